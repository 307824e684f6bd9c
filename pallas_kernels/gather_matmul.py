"""Sparse rows times a dense matrix, by gathering rows: a Mosaic GPU program.

The module `row_sums` describes how rows of any length are divided among programs.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels.catch_up import Missed
from pallas_kernels.matmul_tiles import store as store_registers
from pallas_kernels.row_sums import (
    Config,
    columns_of,
    compiler_params,
    entries_for,
    grid,
    reduce_body,
    reducing_team,
    sum_body,
    takes_narrow,
    team_of,
)
from pallas_kernels.teams import Team, on_teams, team_for

# Threads of a warpgroup. Narrower rows are read by teams of lanes, or padded.
_THREADS = 128
# Number of programs for a large batch whose rows are brought up to date.
_PROGRAMS = 8_192
_SMALL = 2**16  # with at most this many entries, fewer rows are loaded at once
_FILL_ROWS = 64  # number of rows that a program checks for emptiness


def default_config(hidden: int, itemsize: int, nse: int, period: int = 0) -> Config:
    """The fastest of some 40 configurations on an H200, jax 0.11.2.

    See benchmarks/notes/gather_matmul.md. Long weight rows are fastest with small programs,
    which leave less work at the end. Short weight rows are fastest with few programs, which
    cost less to start; there, loading more float32 rows at once gains 3 %. Rows of 128 elements
    are read by half a warp: a warpgroup takes 1.1 times as long with 63 entries a row, and 1.4
    times with one; for bfloat16 2.5 times with 26 or one.

    A small input is read by many programs, each of which loads few rows at once: rows of 1 KB
    take .7 times as long, rows of 8 KB 1.04 times. Half as much code is traced and lowered.

    If the order of tables is known (`period`), long programs are faster: for rows of 128 float32,
    128 entries take .83 to .90 times as long as 64.
    """
    config = dataclasses.replace(_for_rows(hidden, itemsize), period=period)
    if nse <= _SMALL:
        return dataclasses.replace(config, entries=32, unroll=4)
    if period and hidden == _THREADS:
        return dataclasses.replace(config, entries=128)
    return config


def _for_rows(hidden: int, itemsize: int) -> Config:
    chunk = 2048 // itemsize  # each thread loads 16 bytes
    if hidden == _THREADS:
        entries = 64 if itemsize == 4 else 128
        return Config(entries=entries, unroll=8, chunk=chunk, threads=16)
    if takes_narrow(hidden) and (team := team_for(hidden, itemsize)):
        unroll = 16 if hidden * itemsize <= 64 else 8
        return Config(entries=64, unroll=unroll, chunk=chunk, threads=team.threads)
    if hidden * itemsize >= 2048:
        return Config(entries=64, unroll=8, chunk=chunk)
    return Config(entries=128, unroll=4 * itemsize, chunk=chunk)


def gather_matmul(
    data: Float[Array, "nse"] | None,
    indices: Int[Array, "nse"],
    indptr: Int[Array, "rows_plus_1"],
    w: Float[Array, "features hidden"],
    num_cols: int,
    *,
    dtype: jnp.dtype | None = None,
    missed: Missed | None = None,
    config: Config | None = None,
) -> Float[Array, "rows hidden"]:
    """`y[b] = sum_j data_j w[indices_j]` over the entries j of CSR row b.

    Sums are made in float32, in the order of the entries, and rounded once to `dtype`.
    Pieces of a row longer than `T` entries are summed first, each by itself. Reads
    `nse * hidden` elements of `w` and writes `rows * hidden`. Rows longer than `T` also
    move about `2 hidden / T` float32 numbers per entry.

    If `hidden` is above 128 and no multiple of it, the last programs compute some columns a
    second time and write equal values there. If it is below 128 and no multiple of 8,
    `w` is padded, which copies it.

    Args:
      data: values, or None if every entry is 1. If a row has a value that is not finite,
        its result is not finite either.
      indices: int32 columns. An index outside `[0, num_cols)` makes its row NaN; no
        memory is read there.
      indptr: int32, ascending from 0. Entries from `indptr[-1]` on are ignored; a row
        that ends beyond `nse` is NaN.
      w: float32 or bfloat16, with at least `num_cols` rows. Later rows are not read.
      num_cols: number of columns.
      dtype: dtype of the result, float32 or bfloat16; that of `w` by default.
      missed: operands by which rows of `w` are brought up to date while they are
        read. Then `hidden` must be a multiple of 128, or a width that `takes_narrow` allows.
      config: how the work is divided; by default `default_config` for the shape.

    Raises:
      ValueError: the GPU program does not support these shapes or dtypes.
    """
    num_rows, nse = indptr.shape[0] - 1, indices.shape[0]
    dtype = jnp.dtype(w.dtype if dtype is None else dtype)
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"w must be float32 or bfloat16, got {w.dtype}")
    if indices.dtype != jnp.int32 or indptr.dtype != jnp.int32:
        raise ValueError(
            f"indices and indptr must be int32, got {indices.dtype}, {indptr.dtype}"
        )
    if not 0 <= num_cols <= w.shape[0]:
        raise ValueError(f"num_cols is {num_cols:,} but w has {w.shape[0]:,} rows")
    if nse > 2**31 - 2**20 or num_rows > 2**27:
        raise ValueError(
            f"{num_rows:,} rows and {nse:,} entries: more than 2^27 rows or 2^31 - 2^20 "
            "entries; split the rows"
        )
    if nse == 0 or num_rows == 0 or num_cols == 0 or w.shape[1] == 0:
        # There are no entries, or `w` has no rows. In the latter case rows with entries are NaN.
        filled = jnp.where(jnp.diff(indptr) > 0, jnp.nan, 0.0).astype(dtype)
        return jnp.broadcast_to(filled[:, None], (num_rows, w.shape[1]))
    if config is None:
        config = default_config(w.shape[1], w.dtype.itemsize, nse)
        # Bringing rows up to date needs more registers and code for each row.
        if missed is not None:
            config = dataclasses.replace(
                config,
                entries=entries_for(nse, _PROGRAMS, config.entries),
                unroll=min(config.unroll, 4),
            )
    padding = _THREADS - w.shape[1]
    if padding > 0 and config.threads == _THREADS:
        w_padded = jnp.pad(w, ((0, 0), (0, padding)))
        y = gather_matmul(
            data, indices, indptr, w_padded, num_cols, dtype=dtype, config=config
        )
        return y[:, :-padding]

    # A thread cannot store more than 16 bytes at once, either.
    itemsize = max(w.dtype.itemsize, dtype.itemsize)
    team = team_of(w.shape[1], itemsize, config.threads, config.chunk)
    rows = [] if data is None else [data]
    sizes = {"num_cols": num_cols, "dtype": dtype, "config": config}
    return _traced_once(rows, indices, indptr, w, missed, team=team, **sizes)


# A separate jit, so that it is traced once: tracing takes longer than compiling, and
# `value_and_grad` traces a loss twice.
@functools.partial(
    jax.jit, static_argnames=("team", "num_cols", "dtype", "config"), inline=True
)
def _traced_once(data, indices, indptr, w, missed, *, team, num_cols, dtype, config):
    def product(team, indices, indptr, w, missed, *data):
        return _product(team, data, indices, indptr, w, missed, num_cols, dtype, config)

    return on_teams(product, team, indices, indptr, w, missed, *data)


def _product(team, data, indices, indptr, w, missed, num_cols, dtype, config):
    """Runs `gather_matmul` with the given team; `data` is a list of one array or none."""
    num_rows, nse, hidden = indptr.shape[0] - 1, indices.shape[0], w.shape[1]
    programs = pl.cdiv(nse, config.entries)
    behind = [] if missed is None else missed.operands()

    def store(out_gmem, row, columns, acc):
        store_registers(out_gmem.at[row, columns], acc.astype(out_gmem.dtype))

    def gather_matmul_sum(indices_gmem, indptr_gmem, w_gmem, *refs):
        *data_gmem, out_gmem, partial_gmem, cut_rows_gmem = refs
        reading = {}
        if missed is not None:
            missed_gmem, data_gmem = data_gmem[len(data) :], data_gmem[: len(data)]
            load, value = missed.reader(team, w_gmem, missed_gmem)
            reading = {"load": load, "value": value}
        _fill_body(indptr_gmem, out_gmem, nse=nse, programs=programs, team=team)
        sum_body(
            (indices_gmem, *data_gmem),
            indptr_gmem,
            w_gmem,
            partial_gmem,
            cut_rows_gmem,
            lambda row, columns, acc, *_: store(out_gmem, row, columns, acc),
            **reading,
            valued=bool(data),
            num_cols=num_cols,
            team=team,
            config=config,
        )

    fills = pl.cdiv(num_rows, _FILL_ROWS)
    out, partial, cut_rows = plgpu.kernel(
        gather_matmul_sum,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, hidden), dtype),
            jax.ShapeDtypeStruct((2, programs, hidden), jnp.float32),
            jax.ShapeDtypeStruct((2, programs), jnp.int32),
        ],
        grid=grid(hidden, team, programs + fills),
        grid_names=("chunk", "program"),
        compiler_params=compiler_params(),
    )(indices, indptr, w, *data, *behind)
    if programs == 1:
        return out
    out_ref = jax.new_ref(out)  # the fill program writes into the result in place
    reducing = reducing_team(team, hidden)

    def gather_matmul_reduce(partial_gmem, cut_rows_gmem, out_gmem):
        put = functools.partial(store, out_gmem)
        reduce_body(partial_gmem, cut_rows_gmem, put, team=reducing)

    plgpu.kernel(
        gather_matmul_reduce,
        out_type=[],
        grid=grid(hidden, reducing, programs),
        grid_names=("chunk", "program"),
        compiler_params=compiler_params(),
    )(partial, cut_rows, out_ref)
    return jax.freeze(out_ref)


def _fill_body(indptr_gmem, out_gmem, *, nse, programs, team: Team):
    """Writes 0 to rows without entries, and NaN to rows that end beyond `nse`."""
    num_rows, hidden = out_gmem.shape
    p, columns = team.number(), columns_of(hidden, team.width)

    @pl.when(p >= programs)
    def _():
        first = (p - programs) * _FILL_ROWS

        @pl.loop(0, _FILL_ROWS // 8)
        def _(i):
            row = first + i * 8
            ends = [indptr_gmem[jnp.minimum(row + u, num_rows)] for u in range(9)]
            for u in range(8):
                start, end = ends[u], ends[u + 1]

                @pl.when(((start == end) | (end > nse)) & (row + u < num_rows))
                def _(row=row + u, end=end):
                    value = jnp.where(end > nse, jnp.float32(jnp.nan), jnp.float32(0))
                    full = team.splat(value).astype(out_gmem.dtype)
                    store_registers(out_gmem.at[row, columns], full)
