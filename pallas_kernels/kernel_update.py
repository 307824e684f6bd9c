"""An optimizer's step on rows of a kernel, as part of its gradient's product: Mosaic GPU.

The gradient is summed in registers. There the rows and their state are read, moved and
written back, so the gradient itself never gets to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kernel_gradient import WARPGROUPS, gradient_tiles, tile_columns
from pallas_kernels.matmul_tiles import ROWS, call, numbers, store

# What moves rows: (arrays of them, gradient, scalars) -> their new arrays.
Update = Callable[[list[jax.Array], jax.Array, list[jax.Array]], Sequence[jax.Array]]

_PIECE = 32  # columns that are moved at once


def kernel_update(
    update: Update,
    slopes: Float[Array, "batch size"],
    h: Float[Array, "batch hidden"],
    tables: Sequence[Float[Array, "items hidden"]],
    operand: Float[Array, "items hidden"] | None,
    start: jax.typing.ArrayLike,
    scalars: Sequence[Float[Array, ""]] = (),
) -> tuple[list[Float[Array, "items hidden"]], Float[Array, "items hidden"] | None]:
    """Moves rows `start .. start + size - 1` of the tables, in place if they are donated.

    ::

        gradient           = slopes^T h                             summed in float32
        tables[:][rows]    = update(tables[:][rows], gradient, scalars)
        operand[rows]      = tables[0][rows], rounded

    Reads and writes each row of the tables once, and `slopes` for each 256 columns.

    Args:
      update: elementwise, in float32. Arrays it makes itself must be scalars.
      slopes: bfloat16; `batch` is a multiple of 64, `size` of 128.
      h: bfloat16; `hidden` is a multiple of 64.
      tables: weights and state, float32 or bfloat16.
      operand: the weights once more, in bfloat16, or None.
      start: first row, a multiple of 128.
      scalars: what else `update` gets.
    """
    columns = tile_columns(h.shape[1])
    refs = [jax.new_ref(table) for table in tables]
    copies = [] if operand is None else [jax.new_ref(operand)]

    def body(start_gmem, slopes_gmem, h_gmem, *refs):
        first = start_gmem[0]
        scalars_gmem, refs = refs[: len(scalars)], refs[len(scalars) :]
        tables_gmem, copies_gmem = refs[: len(tables)], refs[len(tables) :]

        def finish(tile, warpgroup, make):
            layout = plgpu.Layout.WGMMA
            row, column = first + tile[0] + warpgroup * ROWS, tile[1]

            def place(c):
                return pl.ds(row, ROWS), pl.ds(column + c, _PIECE)

            def read(c):
                return [
                    plgpu.load(ref.at[*place(c)], layout=layout, optimized=False)
                    for ref in tables_gmem
                ]

            def splat(value):
                full = jnp.full((ROWS, _PIECE), value, jnp.float32)
                return plgpu.layout_cast(full, layout)

            scalars = [ref[0] for ref in scalars_gmem]
            ahead = read(0)
            sums = make()
            for c in range(0, columns, _PIECE):
                old = [x.astype(jnp.float32) for x in ahead]
                if c + _PIECE < columns:  # by itself no read goes past a write
                    ahead = read(c + _PIECE)
                gradient = sums[:, c : c + _PIECE]
                new = update(old, gradient, [splat(x) for x in scalars])
                written = *tables_gmem, *copies_gmem  # the latter are the weights
                for ref, rows in zip(written, [*new, new[0]], strict=False):
                    store(ref.at[*place(c)], rows.astype(ref.dtype))

        gradient_tiles(slopes_gmem, h_gmem, finish)

    scalars = [jnp.reshape(scalar, 1) for scalar in scalars]
    operands = *numbers(start), slopes, h, *scalars, *refs, *copies
    call("kernel_update", body, [], WARPGROUPS, *operands)
    moved = [jax.freeze(ref) for ref in refs]
    return moved, jax.freeze(copies[0]) if copies else None
