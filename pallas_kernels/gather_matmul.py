"""Sparse rows times a dense matrix, by gathering rows: a Mosaic GPU program.

::

    entries    0          T          2T         3T         4T         nse
               |----------|----------|----------|----------|----------|
    rows       [a ][b][  c  ][ d ][           e             ][ f  ]  padding
    programs   0: a b c   1: d e'    2: e'      3: e'  (e'' in 4)    4: e'' f

A program has a range of `T` consecutive entries, so rows of any length make equal work.
A row belongs to the program in whose range it starts, if it ends in that range or in the
next one. Only a longer row (`e`) is cut, at the ends of the ranges. Its pieces are
written to `partial`, and a second launch adds them in order. The same input gives the
same bits, because there are no atomics.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.integers import div

_LANES = 128  # threads of a warpgroup: `hidden` is cut into multiples of it
_FILL_ROWS = 64  # rows that a program looks through for empty ones
_WAYS = 8  # each step of a search splits the rows into this many parts
# Columns of a program that adds the pieces of cut rows. On ml20m, 512 columns with 8 pieces
# at once take 6.6 us; 256 columns with 16 pieces take 10 us.
REDUCE_CHUNK = 512

PARAMS = plgpu.CompilerParams(
    # No program reads what it or another program has written.
    unsafe_no_auto_barriers=True,
    # With the default semantics, inferring the layouts takes half a minute.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut; `default_config` picks one.

    Attributes:
      entries: number of entries of a program, `T`.
      unroll: number of weight rows that are loaded before the first is added.
      chunk: largest number of elements of a weight row that a program takes. Programs of
        one chunk run before those of the next, so that less of `w` has to fit in the L2
        cache.
    """

    entries: int
    unroll: int
    chunk: int


def default_config(hidden: int, itemsize: int) -> Config:
    """The fastest of some 40 tried on an H200, jax 0.11.2 (benchmarks/README.md).

    Long weight rows are fastest with small programs, which leave less work at the end.
    Short weight rows are fastest with few programs, which cost less to start; there,
    loading more float32 rows at once gains 3 %.
    """
    chunk = 2048 // itemsize  # 16 bytes a thread
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
    config: Config | None = None,
) -> Float[Array, "rows hidden"]:
    """`y[b] = sum_j data_j w[indices_j]` over the entries j of CSR row b.

    Sums are made in float32, in the order of the entries, and rounded once to `dtype`.
    Pieces of a row longer than `T` are summed first, each by itself. Reads
    `nse * hidden` elements of `w` and writes `rows * hidden`. Rows longer than `T` also
    move about `2 hidden / T` float32 numbers per entry.

    If `hidden` is not a multiple of 128, the last programs compute some columns a second
    time and write the same values there. If `hidden` is below 128, `w` is padded, which
    copies it.

    Args:
      data: values, or None if every entry is 1. If a row has a value that is not finite,
        its result is not finite either.
      indices: int32 columns. An index outside `[0, num_cols)` makes its row NaN; no
        memory is read there.
      indptr: int32, ascending from 0. Entries from `indptr[-1]` on are ignored; a row
        that ends beyond `nse` is NaN.
      w: float32 or bfloat16, with at least `num_cols` rows. Later rows are not read.
      num_cols: number of columns.
      dtype: of the result, float32 or bfloat16; that of `w` by default.
      config: how the work is cut; by default `default_config` for the shape.

    Raises:
      ValueError: shapes or dtypes that the GPU program does not take.
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
        # There is nothing to read. A row that has entries all the same is NaN.
        filled = jnp.where(jnp.diff(indptr) > 0, jnp.nan, 0.0).astype(dtype)
        return jnp.broadcast_to(filled[:, None], (num_rows, w.shape[1]))
    padding = _LANES - w.shape[1]
    if padding > 0:
        w_padded = jnp.pad(w, ((0, 0), (0, padding)))
        y = gather_matmul(
            data, indices, indptr, w_padded, num_cols, dtype=dtype, config=config
        )
        return y[:, :-padding]

    hidden = w.shape[1]
    config = config or default_config(hidden, w.dtype.itemsize)
    # A thread stores no more than 16 bytes at once either.
    chunk, vec = chunk_of(hidden, config.chunk, max(w.dtype.itemsize, dtype.itemsize))
    programs = pl.cdiv(nse, config.entries)

    def store(out_gmem, row, columns, acc):
        out_gmem[row, columns] = acc.astype(out_gmem.dtype)

    def gather_matmul_sum(indices_gmem, indptr_gmem, w_gmem, *refs):
        *data_gmem, out_gmem, partial_gmem, cut_rows_gmem = refs
        _fill_body(
            indptr_gmem, out_gmem, nse=nse, programs=programs, chunk=chunk, vec=vec
        )
        sum_body(
            (indices_gmem, *data_gmem),
            indptr_gmem,
            w_gmem,
            partial_gmem,
            cut_rows_gmem,
            lambda row, columns, acc, *_: store(out_gmem, row, columns, acc),
            valued=data is not None,
            num_cols=num_cols,
            chunk=chunk,
            vec=vec,
            config=config,
        )

    values = [] if data is None else [data]
    out, partial, cut_rows = plgpu.kernel(
        gather_matmul_sum,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, hidden), dtype),
            jax.ShapeDtypeStruct((2, programs, hidden), jnp.float32),
            jax.ShapeDtypeStruct((2, programs), jnp.int32),
        ],
        grid=(pl.cdiv(hidden, chunk), programs + pl.cdiv(num_rows, _FILL_ROWS)),
        grid_names=("chunk", "program"),
        compiler_params=PARAMS,
    )(indices, indptr, w, *values)
    if programs == 1:
        return out
    out_ref = jax.new_ref(out)  # written in place
    chunk, vec = chunk_of(hidden, REDUCE_CHUNK, 4)

    def gather_matmul_reduce(partial_gmem, cut_rows_gmem, out_gmem):
        put = functools.partial(store, out_gmem)
        reduce_body(partial_gmem, cut_rows_gmem, put, chunk=chunk, vec=vec)

    plgpu.kernel(
        gather_matmul_reduce,
        out_type=[],
        grid=(pl.cdiv(hidden, chunk), programs),
        grid_names=("chunk", "program"),
        compiler_params=PARAMS,
    )(partial, cut_rows, out_ref)
    return jax.freeze(out_ref)


def chunk_of(hidden: int, most: int, itemsize: int) -> tuple[int, int]:
    """Elements of a row that a program takes, and that a thread accesses at once.

    The first is a multiple of 128. It is chosen so that all programs together take the
    fewest elements and, among equals, so that there are the fewest programs.
    """
    units = range(1, min(most, hidden) // _LANES + 1)
    unit = min(units, key=lambda u: (pl.cdiv(hidden, u * _LANES) * u, -u))
    return unit * _LANES, min(unit & -unit, hidden & -hidden, 16 // itemsize)


def columns_of(hidden: int, chunk: int):
    """The columns of a program: always a whole chunk, so the last two may overlap."""
    start = lax.axis_index("chunk") * chunk
    if hidden % chunk:
        start = jnp.minimum(start, hidden - chunk)
    return pl.ds(start, chunk)


def _fill_body(indptr_gmem, out_gmem, *, nse, programs, chunk, vec):
    """Writes 0 to rows without entries, and NaN to rows that end beyond `nse`."""
    num_rows, hidden = out_gmem.shape
    p, columns = lax.axis_index("program"), columns_of(hidden, chunk)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vec)

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
                    full = jnp.full((chunk,), value, jnp.float32)
                    full = plgpu.layout_cast(full, layout)
                    out_gmem[row, columns] = full.astype(out_gmem.dtype)


def sum_body(
    entries_gmem,
    indptr_gmem,
    w_gmem,
    partial_gmem,
    cut_rows_gmem,
    store,
    read_ahead=lambda columns, layout, entry: (),
    *,
    valued,
    num_cols,
    chunk,
    vec,
    config: Config,
):
    """Sums the rows that belong to a program, and its pieces of rows that are cut.

    Args:
      entries_gmem: arrays `[nse]` with one value for each entry: the index of its row of
        `w`; its factor, if `valued`; then any others.
      cut_rows_gmem: `[2, programs]`, written: for each range, the row that begins in it
        and is cut, or -1 if no row is; and the range in which that row ends.
      store: called with a row, the columns, the row's sum, the values of its last entry,
        and what `read_ahead` returned for that entry.
      read_ahead: called for each entry when its row of `w` is loaded, with the columns,
        the layout and the entry's values.
    """
    nse, num_rows = entries_gmem[0].shape[0], indptr_gmem.shape[0] - 1
    programs = cut_rows_gmem.shape[1]
    t, unroll = config.entries, config.unroll
    p, c = lax.axis_index("program"), lax.axis_index("chunk")
    columns = columns_of(w_gmem.shape[1], chunk)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vec)

    def splat(value):
        full = jnp.full((chunk,), value, jnp.float32)
        return plgpu.layout_cast(full, layout)

    count = jnp.minimum(indptr_gmem[num_rows], nse)
    begin = p * t
    stop = jnp.minimum(begin + t, count)

    @pl.when((p < programs) & (stop <= begin) & (c == 0))
    def _no_entries():
        cut_rows_gmem[0, p] = -1

    def rows_of(entries):
        """The rows that hold the entries. Eight parts a step: few trips to memory."""
        width, steps = 1, 0
        while width < num_rows:
            width, steps = width * _WAYS, steps + 1

        def narrow(_, carry):
            width, *lows = carry
            width = width // _WAYS
            new = []
            probes = [
                [
                    indptr_gmem[jnp.minimum(low + width * k, num_rows)]
                    for k in range(1, _WAYS)
                ]
                for low in lows
            ]
            for low, entry, probe in zip(lows, entries, probes, strict=True):
                right = jnp.int32(0)
                for value in probe:
                    right = right + jnp.where(value <= entry, 1, 0)
                new.append(low + width * right)
            return width, *new

        start = jnp.int32(width), *([jnp.int32(0)] * len(entries))
        return lax.fori_loop(0, steps, narrow, start)[1:]

    def row_of(entry, low, high):
        """The row in [low, high) that holds the entry. Short code for a rare case."""

        def halve(bounds):
            low, high = bounds
            middle = div(low + high, 2)
            right = indptr_gmem[middle] <= entry
            return jnp.where(right, middle, low), jnp.where(right, high, middle)

        return lax.while_loop(lambda b: b[1] - b[0] > 1, halve, (low, high))[0]

    @pl.when((p < programs) & (begin < stop))
    def _entries():
        # Row a holds the first entry of the range, row b the last one. This program sums
        # the entries [first, last).
        row_a, row_b = rows_of([begin, stop - 1])
        start_a, end_a = indptr_gmem[row_a], indptr_gmem[row_a + 1]
        start_b, end_b = indptr_gmem[row_b], indptr_gmem[row_b + 1]
        earlier = start_a < begin
        theirs = earlier & (end_a <= (div(start_a, t) + 2) * t)
        head = earlier & ~theirs
        first = jnp.where(theirs, end_a, begin)
        mine = (start_b >= begin) & (end_b <= begin + 2 * t)
        tail = (start_b >= begin) & ~mine & (end_b <= nse)
        last = jnp.where(mine, end_b, stop)
        last = jnp.where(end_b > nse, jnp.maximum(start_b, begin), last)

        @pl.when(c == 0)
        def _():
            cut_rows_gmem[0, p] = jnp.where(tail, row_b, -1)
            cut_rows_gmem[1, p] = div(end_b - 1, t)

        def flush(row, acc, bad, entry, ahead):
            acc = acc + bad
            is_head = head & (row == row_a)
            is_tail = tail & (row == row_b)

            def is_cut():
                partial_gmem[jnp.where(is_tail, 1, 0), p, columns] = acc

            def is_whole():
                store(row, columns, acc, entry, ahead)

            lax.cond(~(is_head | is_tail), is_whole, is_cut)

        def end_of(row):
            return indptr_gmem[jnp.minimum(row + 1, num_rows)]

        # `end` is where the row ends, or its piece in this program. `following` is where
        # the next row ends, loaded ahead. `bad` is NaN if an index of the row is out of
        # bounds, else 0.
        def end_row(position, last_entry, row, end, following, bad, acc):
            def search():
                found = row_of(position, row, row_b + 1)
                return found, end_of(found), end_of(found + 1)

            def ended():
                flush(row, acc, bad, *last_entry)
                empty = (following <= position) & (position < last)
                after = row + 1, following, end_of(row + 2)
                new, end, further = lax.cond(empty, search, lambda: after)
                end = jnp.minimum(end, last)
                return new, end, further, jnp.float32(0), splat(0.0)

            same = row, end, following, bad, acc
            return lax.cond(position == end, ended, lambda: same)

        def load_entries(position):
            def whole():
                blocks = [ref.at[pl.ds(position, unroll)] for ref in entries_gmem]
                return [[ref[u] for u in range(unroll)] for ref in blocks]

            def clipped():
                places = [jnp.minimum(position + u, last - 1) for u in range(unroll)]
                return [[ref[i] for i in places] for ref in entries_gmem]

            return lax.cond(position + unroll <= last, whole, clipped)

        w_columns = w_gmem.at[:, columns]

        def block(carry):
            position, row, end, following, bad, acc, entries = carry
            ids = [i.astype(jnp.uint32) for i in entries[0]]
            safe = [jnp.minimum(i, num_cols - 1).astype(jnp.int32) for i in ids]
            terms = [
                plgpu.load(w_columns.at[i], layout=layout, optimized=False)
                for i in safe
            ]
            each = [tuple(values[u] for values in entries) for u in range(unroll)]
            ahead = [read_ahead(columns, layout, entry) for entry in each]
            # Loaded ahead: an index takes as long to arrive as a row.
            upcoming = lax.cond(
                position + unroll < last,
                lambda: load_entries(position + unroll),
                lambda: entries,
            )
            largest = functools.reduce(jnp.maximum, ids)

            def term(u):
                term = terms[u].astype(jnp.float32)
                return term * entries[1][u].astype(jnp.float32) if valued else term

            def one_row():
                total = acc
                for u in range(unroll):
                    total = total + term(u)
                return row, end, following, bad, total

            def several_rows():
                # Entries past the last one are copies of it. They are added after the
                # last row has ended, so they reach no result.
                state = row, end, following, bad, acc
                for u in range(unroll):
                    *place, worst, total = state
                    worst = jnp.where(ids[u] < num_cols, worst, jnp.float32(jnp.nan))
                    state = *place, worst, total + term(u)
                    if u < unroll - 1:
                        state = end_row(position + u + 1, (each[u], ahead[u]), *state)
                return state

            # Mosaic lowers the last branch of a `cond` twice: the shorter one is last.
            several = (position + unroll > end) | (largest >= num_cols)
            state = lax.cond(several, several_rows, one_row)
            position = position + unroll
            return position, *end_row(position, (each[-1], ahead[-1]), *state), upcoming

        @pl.when(first < last)
        def _():
            row = lax.cond(
                theirs, lambda: row_of(first, row_a, row_b + 1), lambda: row_a
            )
            end, following = end_of(row), end_of(row + 1)
            state = first, row, jnp.minimum(end, last), following
            zero = jnp.float32(0), splat(0.0)
            carry = *state, *zero, load_entries(first)
            lax.while_loop(lambda carry: carry[0] < last, block, carry)


def reduce_body(partial_gmem, cut_rows_gmem, store, *, chunk, vec):
    """Sums a cut row: partial[1, p] + sum of partial[0, q] over the ranges q after p.

    Calls `store` with the row, the columns and the sum.
    """
    p = lax.axis_index("program")
    columns = columns_of(partial_gmem.shape[-1], chunk)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vec)

    def load(which, q):
        ref = partial_gmem.at[which, q, columns]
        return plgpu.load(ref, layout=layout, optimized=False)

    row, last = cut_rows_gmem[0, p], cut_rows_gmem[1, p]

    @pl.when(row >= 0)
    def _():
        carry = p + 1, load(1, p)
        for unroll in (32, 8, 1) if chunk <= 256 else (8, 1):

            def block(carry, unroll=unroll):
                q, acc = carry
                for term in [load(0, q + u) for u in range(unroll)]:
                    acc = acc + term
                return q + unroll, acc

            def more(carry, unroll=unroll):
                return carry[0] + unroll <= last + 1

            carry = lax.while_loop(more, block, carry)
        store(row, columns, carry[1])
