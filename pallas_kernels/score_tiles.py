"""Tiles of scores in registers, for operations over all items: a Mosaic GPU matmul.

::

    scores[b, i] = h[b] . kernel[i]        h [batch, hidden], kernel [items, hidden]

Four warpgroups share a tile of 128 rows and 256 items; each has 64 rows and 128 items
(`matmul_tiles`). When its scores are complete, an `epilogue` turns them into something
smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, STEP, call, matmul_tiles, numbers

TILE_ROWS = 128  # rows of a program's tile
TILE_ITEMS = 256  # items of a program's tile
WARPGROUPS = 4  # two by two
COLUMNS = TILE_ITEMS // 2  # items of a warpgroup
# This many tiles of items are worked on side by side: they and `h` stay in the cache.
_WIDTH = 8


def unsupported(hidden: int, items: int, dtype: jnp.dtype) -> str | None:
    """The fault of such operands, as the end of a sentence; None if there is none."""
    if dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, not {dtype}"
    if hidden % STEP or not hidden:
        return f"takes hidden sizes that are multiples of {STEP}, not {hidden}"
    if items % TILE_ITEMS or not items:
        return f"takes kernels of a multiple of {TILE_ITEMS} rows, not {items:,}"
    return None


def score_tiles(
    name: str,
    epilogue: Callable,
    h: jax.Array,
    kernel: jax.Array,
    scalars: Sequence[jax.typing.ArrayLike],
    inputs: Sequence,
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    scratch: object | None = None,
):
    """Calls `epilogue` on all tiles of `h` and rows `start ...` of `kernel`.

    `epilogue(make, row, column, warpgroup, scalars, inputs, outputs, scratch)` gets
    references, and a function `make` that makes the float32 scores `[64, COLUMNS]`. The
    first of them is that of `row` and item `start + column`. Data that the epilogue loads
    before it calls `make` has arrived when the scores are complete.

    Args:
      name: the name that a profiler shows.
      epilogue: see above.
      h: the number of rows is a multiple of 128.
      kernel: see `unsupported`.
      scalars: int32, handed to the epilogue.
      inputs: arrays in global memory, or references to arrays that the epilogue changes.
      out_type: what the epilogue writes.
      start: first item.
      size: number of items, a multiple of 256.
      scratch: shared memory of the epilogue.
    """
    batch, hidden = h.shape
    down, across = batch // TILE_ROWS, size // TILE_ITEMS
    operands = numbers(start, *scalars)

    def body(*refs):
        first, *mine = [ref[0] for ref in refs[: len(operands)]]
        h_gmem, kernel_gmem, *refs = refs[len(operands) :]
        refs = refs[: len(inputs)], refs[len(inputs) :]

        def tile_of(i):
            m, n = plgpu.planar_snake(i, (down, across), 0, _WIDTH)
            return m * TILE_ROWS, n * TILE_ITEMS

        def factors(k, h_smem, kernel_smem, warpgroup):
            del k
            i, j = rem(warpgroup, 2) * ROWS, div(warpgroup, 2) * COLUMNS
            items = kernel_smem.at[pl.ds(j, COLUMNS)]
            return [(h_smem.at[pl.ds(i, ROWS)], items.transpose((1, 0)))]

        def finish(tile, warpgroup, make, scratch_smem=None):
            row = tile[0] + rem(warpgroup, 2) * ROWS
            column = tile[1] + div(warpgroup, 2) * COLUMNS
            epilogue(
                lambda: make()[0], row, column, warpgroup, mine, *refs, scratch_smem
            )

        matmul_tiles(
            down * across,
            tile_of,
            [
                (h_gmem, (TILE_ROWS, STEP), lambda tile, k: (tile[0], k * STEP)),
                (
                    kernel_gmem,
                    (TILE_ITEMS, STEP),
                    lambda tile, k: (first + tile[1], k * STEP),
                ),
            ],
            factors,
            finish,
            columns=[COLUMNS],
            steps=hidden // STEP,
            warpgroups=WARPGROUPS,
            scratch=[] if scratch is None else [scratch],
        )

    return call(name, body, out_type, WARPGROUPS, *operands, h, kernel, *inputs)


def row_vector(ref, row) -> jax.Array:
    """`[64]` elements from `row` on, for `spread_rows`."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(ref.at[pl.ds(row, ROWS)], layout=layout, optimized=False)


def spread_rows(vector: jax.Array, columns: int) -> jax.Array:
    """`[64, columns]` with `vector` in each column."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), (0,))


def spread_columns(ref, column, columns: int) -> jax.Array:
    """`[64, columns]` with elements `column ...` of a vector in each row."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    vector = plgpu.load(ref.at[pl.ds(column, columns)], layout=layout, optimized=False)
    return lax.broadcast_in_dim(vector, (ROWS, columns), (1,))


def column_numbers(columns: int) -> jax.Array:
    """`[64, columns]` with 0, 1, 2 ... in each row."""
    shape, layout = (ROWS, columns), plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
