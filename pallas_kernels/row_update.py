"""An optimizer's step on the rows of a kernel that a batch has touched: Mosaic GPU.

The gradient of a row is the sum of the rows of `dy` that its entries name, as in
`gather_matmul`. When such a sum is complete, the program reads the row and its state,
moves them, and writes them back. It does not write the gradient to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels.gather_matmul import (
    REDUCE_CHUNK,
    Config,
    chunk_of,
    compiler_params,
    reduce_body,
    sum_body,
)
from pallas_kernels.matmul_tiles import numbers
from pallas_kernels.rounding import of_columns, of_rows, rounded

# Moves a row: (its arrays, its gradient, missed steps, scalars) -> its new arrays.
Update = Callable[
    [list[jax.Array], jax.Array, jax.Array | None, list[jax.Array]], Sequence[jax.Array]
]


def default_config(hidden: int) -> Config:
    """None that was tried is faster, on an H200 with jax 0.11.2 (benchmarks/README.md)."""
    return Config(entries=64, unroll=4, chunk=256 if hidden <= 256 else 512)


def row_update(
    update: Update,
    arrays: Sequence[Float[Array, "num_rows hidden"]],
    data: Float[Array, "nse"] | None,
    rows: Int[Array, "nse"],
    indptr: Int[Array, "capacity_plus_1"],
    targets: Int[Array, "nse"],
    lags: Int[Array, "nse"] | None,
    dy: Float[Array, "batch hidden"],
    scalars: Sequence[Float[Array, ""]] = (),
    *,
    place: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None,
    config: Config | None = None,
) -> list[Float[Array, "num_rows hidden"]]:
    """Moves rows of a kernel and its state, in place if they are donated.

    ::

        gradient_u = sum_j data_j dy[rows_j]      entries j = indptr[u] .. indptr[u + 1] - 1
        arrays[:][target_u] = update(arrays[:][target_u], gradient_u, lag_u, scalars)

    Gradients are summed in float32 in the order of the entries. Reads `nse * hidden`
    elements of `dy`, and reads and writes the touched rows of each array once.

    Args:
      update: works element by element, in float32, on pieces of a row. Arrays that it
        makes itself must be scalars.
      arrays: kernel and state, float32 or bfloat16; `hidden` is a multiple of 128.
      data: values, or None if every entry is 1.
      rows: int32, each in `[0, batch)`.
      indptr: int32, where the entries of each touched row start. The last element is the
        number of entries; entries beyond it are ignored.
      targets: int32; at the last entry of each touched row the number of that row in the
        arrays, and -1 at the other entries. No row occurs twice.
      lags: at the last entry of each touched row its missed steps, which `update` gets as
        float32; or None.
      dy: float32 or bfloat16.
      scalars: further numbers that `update` gets, the same for all rows.
      place: rounds bfloat16 arrays at random, with this key (`Noise.key`); the other
        number is that of the arrays' first row. Without it they are rounded to nearest.
      config: how the work is cut; see `gather_matmul`.

    Raises:
      ValueError: shapes or dtypes that the GPU program does not take.
    """
    hidden, nse = dy.shape[1], rows.shape[0]
    for array in (dy, *arrays):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"float32 or bfloat16 arrays only, got {array.dtype}")
        if array.shape[1] != hidden or hidden % 128:
            raise ValueError(
                f"dy and the arrays must have one width, a multiple of 128; got {hidden} "
                f"and {array.shape[1]}"
            )
    if nse == 0 or dy.shape[0] == 0:
        return list(arrays)
    config = config or default_config(hidden)
    chunk, vec = chunk_of(hidden, config.chunk, 4)
    programs = pl.cdiv(nse, config.entries)
    extras = [targets] if lags is None else [targets, lags]
    entries = [rows, *([] if data is None else [data]), *extras]
    scalars = [jnp.reshape(scalar, 1) for scalar in scalars]
    noise = [] if place is None else numbers(*place)

    def read_row(arrays_gmem, target, columns, layout):
        return [
            plgpu.load(ref.at[target, columns], layout=layout, optimized=False)
            for ref in arrays_gmem
        ]

    def move(arrays_gmem, numbers_gmem, columns, layout, old, gradient, extra):
        scalars_gmem, noise_gmem = _split(numbers_gmem, len(scalars))

        def splat(value):
            full = jnp.full(gradient.shape, value, jnp.float32)
            return plgpu.layout_cast(full, layout)

        target, *lag = extra
        lag = splat(lag[0].astype(jnp.float32)) if lag else None
        old = [row.astype(jnp.float32) for row in old]
        new = update(old, gradient, lag, [splat(ref[0]) for ref in scalars_gmem])
        for ref, row in zip(arrays_gmem, new, strict=True):
            if noise_gmem and ref.dtype == jnp.bfloat16:
                key, first_row = (ref[0] for ref in noise_gmem)
                column = plgpu.broadcasted_iota(jnp.int32, row.shape, 0, layout=layout)
                column = of_columns(columns.start + column)
                of_row = of_rows(key, first_row + target)
                ref[target, columns] = rounded(row, of_row, column)
            else:
                ref[target, columns] = row.astype(ref.dtype)

    def row_update_sum(indptr_gmem, dy_gmem, *refs):
        *refs, partial_gmem, cut_rows_gmem = refs
        entries_gmem, numbers_gmem, arrays_gmem = _split(
            refs, len(entries), len(scalars) + len(noise)
        )
        layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vec)

        def read_ahead(columns, layout, entry):
            """Loads the row that is to be moved, at the last entry of its gradient."""
            target = entry[-len(extras)]
            zero = plgpu.layout_cast(jnp.zeros((chunk,), jnp.float32), layout)
            return jax.lax.cond(
                target >= 0,
                lambda: read_row(arrays_gmem, target, columns, layout),
                lambda: [zero.astype(ref.dtype) for ref in arrays_gmem],
            )

        def store(row, columns, gradient, entry, old):
            extra = entry[-len(extras) :]
            move(arrays_gmem, numbers_gmem, columns, layout, old, gradient, extra)

        sum_body(
            entries_gmem,
            indptr_gmem,
            dy_gmem,
            partial_gmem,
            cut_rows_gmem,
            store,
            read_ahead,
            valued=data is not None,
            num_cols=dy.shape[0],
            chunk=chunk,
            vec=vec,
            config=config,
        )

    array_refs = [jax.new_ref(array) for array in arrays]
    partial, cut_rows = plgpu.kernel(
        row_update_sum,
        out_type=[
            jax.ShapeDtypeStruct((2, programs, hidden), jnp.float32),
            jax.ShapeDtypeStruct((2, programs), jnp.int32),
        ],
        grid=(hidden // chunk, programs),
        grid_names=("chunk", "program"),
        compiler_params=compiler_params(),
    )(indptr, dy, *entries, *scalars, *noise, *array_refs)
    if programs > 1:
        reduce_chunk, reduce_vec = chunk_of(hidden, REDUCE_CHUNK, 4)
        layout = plgpu.Layout.WG_STRIDED((reduce_chunk,), vec_size=reduce_vec)

        def row_update_reduce(indptr_gmem, partial_gmem, cut_rows_gmem, *refs):
            extras_gmem, numbers_gmem, arrays_gmem = _split(
                refs, len(extras), len(scalars) + len(noise)
            )

            def store(row, columns, gradient):
                last = indptr_gmem[row + 1] - 1
                extra = [ref[last] for ref in extras_gmem]
                old = read_row(arrays_gmem, extra[0], columns, layout)
                move(arrays_gmem, numbers_gmem, columns, layout, old, gradient, extra)

            reduce_body(
                partial_gmem, cut_rows_gmem, store, chunk=reduce_chunk, vec=reduce_vec
            )

        plgpu.kernel(
            row_update_reduce,
            out_type=[],
            grid=(hidden // reduce_chunk, programs),
            grid_names=("chunk", "program"),
            compiler_params=compiler_params(),
        )(indptr, partial, cut_rows, *extras, *scalars, *noise, *array_refs)
    return [jax.freeze(ref) for ref in array_refs]


def _split(refs, *counts):
    """The first `counts[0]` refs, the next `counts[1]`, and the rest."""
    parts = []
    for count in counts:
        parts.append(refs[:count])
        refs = refs[count:]
    return *parts, refs
