"""Tiles of scores in registers, for operations over all items: a Mosaic GPU matmul.

::

    scores[b, i] = h[b] . kernel[i]        h [batch, hidden], kernel [items, hidden]

Four warpgroups share a tile of 128 rows and 256 items, or of 64 rows and 512 items; each has
64 rows and 128 items (`matmul_tiles`). When its scores are complete, an `epilogue` reduces
them to a smaller result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import (
    ROWS,
    STAGES,
    call,
    matmul_tiles,
    numbers,
    step_of,
)

TILE_ROWS = 128  # number of rows in a program's tile
TILE_ITEMS = 256  # number of items in a program's tile
# Number of warpgroups that share a tile: two along rows, two along items.
WARPGROUPS = 4
COLUMNS = TILE_ITEMS // 2  # number of items of a warpgroup
WIDE_ITEMS = WARPGROUPS * COLUMNS  # number of items in a program's tile of 64 rows
_WIDE_STAGES = 3  # number of steps of such a wide tile that fit in shared memory
# Number of tiles along items that are computed in parallel: they and `h` stay in the cache.
_WIDTH = 8


def rounded_items(size: int) -> int:
    """Rounds a number of items up to whole tiles; a large number to whole wide tiles."""
    tile = TILE_ITEMS if size <= TILE_ITEMS else WIDE_ITEMS
    return -(-size // tile) * tile


def rows_for(batch: int, items: int) -> int:
    """The number of rows to which a batch is padded. If it is 64, tiles have 512 items.

    Args:
      batch: number of rows of the batch.
      items: number of items in each call; wide tiles need a multiple of 512.
    """
    if batch <= ROWS and items % WIDE_ITEMS == 0:
        return ROWS
    return -(-batch // TILE_ROWS) * TILE_ROWS


def unsupported(
    hidden: int,
    items: int,
    dtype: jax.typing.DTypeLike,
    wanted: jax.typing.DTypeLike = jnp.bfloat16,
) -> str | None:
    """The fault of such operands, as the end of a sentence; None if they can be used.

    Args:
      hidden: number of elements of a row.
      items: number of rows of the kernel.
      dtype: dtype of both operands.
      wanted: dtype that both operands must have.
    """
    if dtype != wanted:
        return f"takes {jnp.dtype(wanted)} operands, not {dtype}"
    step = step_of(wanted)
    if hidden % step or not hidden:
        return f"takes hidden sizes that are multiples of {step}, not {hidden}"
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
    references, and a function `make` that computes the scores `[64, COLUMNS]`: float32, or
    int32 for int8 operands. The first score belongs to `row` and item `start + column`.
    Data that the epilogue loads before it calls `make` has arrived when the scores are
    complete.

    Args:
      name: the name that a profiler shows.
      epilogue: function that uses the scores of a tile; its arguments are above.
      h: the number of rows is a multiple of 128, or 64 as `rows_for` says.
      kernel: a row for each item, with a shape and dtype that `unsupported` allows.
      scalars: int32 numbers, passed to the epilogue.
      inputs: arrays in global memory, or references to arrays that the epilogue changes.
      out_type: shapes and dtypes of the arrays that the epilogue writes.
      start: first item.
      size: number of items, a multiple of 256; for 64 rows, of 512.
      scratch: shared memory of the epilogue. With tiles of 64 rows, 8 KB are free.
    """
    batch, hidden = h.shape
    is_wide = batch == ROWS
    rows, items = (ROWS, WIDE_ITEMS) if is_wide else (TILE_ROWS, TILE_ITEMS)
    down, across = batch // rows, size // items
    step = step_of(h.dtype)
    operands = numbers(start, *scalars)

    def body(*refs):
        first, *mine = [ref[0] for ref in refs[: len(operands)]]
        h_gmem, kernel_gmem, *refs = refs[len(operands) :]
        refs = refs[: len(inputs)], refs[len(inputs) :]

        def tile_of(i):
            m, n = plgpu.planar_snake(i, (down, across), 0, _WIDTH)
            return m * rows, n * items

        def part_of(warpgroup):
            across = warpgroup if is_wide else div(warpgroup, 2)
            down = 0 if is_wide else rem(warpgroup, 2)
            return down * ROWS, across * COLUMNS

        def factors(k, h_smem, kernel_smem, warpgroup):
            del k
            i, j = part_of(warpgroup)
            mine = kernel_smem.at[pl.ds(j, COLUMNS)]
            return [(h_smem.at[pl.ds(i, ROWS)], mine.transpose((1, 0)))]

        def finish(tile, warpgroup, make, scratch_smem=None):
            i, j = part_of(warpgroup)
            row, column = tile[0] + i, tile[1] + j
            epilogue(
                lambda: make()[0], row, column, warpgroup, mine, *refs, scratch_smem
            )

        matmul_tiles(
            down * across,
            tile_of,
            [
                (h_gmem, (rows, step), lambda tile, k: (tile[0], k * step)),
                (
                    kernel_gmem,
                    (items, step),
                    lambda tile, k: (first + tile[1], k * step),
                ),
            ],
            factors,
            finish,
            columns=[COLUMNS],
            steps=hidden // step,
            warpgroups=WARPGROUPS,
            scratch=[] if scratch is None else [scratch],
            stages=_WIDE_STAGES if is_wide else STAGES,
        )

    return call(name, body, out_type, WARPGROUPS, *operands, h, kernel, *inputs)


def row_vector(ref, row) -> jax.Array:
    """Reads 64 elements from `row` on, in the layout for `spread_rows`."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(ref.at[pl.ds(row, ROWS)], layout=layout, optimized=False)


def spread_rows(vector: jax.Array, columns: int) -> jax.Array:
    """An array `[64, columns]` with `vector` in each column."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), (0,))


def column_vector(ref, column, columns: int) -> jax.Array:
    """Reads `columns` elements from `column` on, in the layout for `down_rows`."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref.at[pl.ds(column, columns)], layout=layout, optimized=False)


def one_each(ref, column, columns: int) -> jax.Array:
    """Reads `columns` elements from `column` on, one for each thread."""
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)
    return plgpu.load(ref.at[pl.ds(column, columns)], layout=layout, optimized=False)


def down_rows(vector: jax.Array) -> jax.Array:
    """An array `[64, columns]` with a `column_vector` in each row."""
    return lax.broadcast_in_dim(vector, (ROWS, *vector.shape), (1,))


def spread_columns(ref, column, columns: int) -> jax.Array:
    """Reads `columns` elements from `column` on into each row of an array `[64, columns]`."""
    return down_rows(column_vector(ref, column, columns))


def column_numbers(columns: int) -> jax.Array:
    """An array `[64, columns]` with 0, 1, 2, ... in each row."""
    shape, layout = (ROWS, columns), plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
