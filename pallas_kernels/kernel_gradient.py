"""The gradient of some of a kernel's rows, written in place: a Mosaic GPU matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.matmul_tiles import LAYOUT, ROWS, STEP, call, matmul_tiles, numbers

WARPGROUPS = 2  # that compute
TILE = WARPGROUPS * ROWS  # rows of a tile


def kernel_gradient(
    slopes: Float[Array, "batch size"],
    h: Float[Array, "batch hidden"],
    gradient: Float[Array, "items hidden"],
    start: jax.typing.ArrayLike,
) -> Float[Array, "items hidden"]:
    """`gradient` with `slopes^T h` in rows `start .. start + size - 1`.

    In place, if `gradient` is donated; XLA would copy the rows once more.

    Args:
      slopes: bfloat16; `batch` is a multiple of 64, `size` of 128.
      h: bfloat16; `hidden` is a multiple of 64.
      gradient: bfloat16.
      start: first row, a multiple of 128.
    """
    columns = tile_columns(h.shape[1])

    def body(start_gmem, slopes_gmem, h_gmem, gradient_gmem):
        first = start_gmem[0]

        def finish(tile, warpgroup, make, smem):
            row, column = tile[0] + warpgroup * ROWS, tile[1]
            sums = make()
            for c in range(0, columns, STEP):
                slot = c // STEP % 2
                # What was there must have been read: with an odd number it was the last.
                plgpu.wait_smem_to_gmem(1 - columns // STEP % 2, wait_read_only=True)
                smem[warpgroup, slot] = sums[:, c : c + STEP].astype(smem.dtype)
                plgpu.commit_smem()
                target = pl.ds(first + row, ROWS), pl.ds(column + c, STEP)
                plgpu.copy_smem_to_gmem(
                    smem.at[warpgroup, slot], gradient_gmem.at[*target]
                )

        stored = plgpu.SMEM((2, 2, ROWS, STEP), h.dtype, transforms=LAYOUT)
        gradient_tiles(slopes_gmem, h_gmem, finish, [stored])

    ref = jax.new_ref(gradient)
    operands = *numbers(start), slopes, h, ref
    call("kernel_gradient", body, [], WARPGROUPS, *operands)
    return jax.freeze(ref)


def gradient_tiles(
    slopes_gmem, h_gmem, finish: Callable, scratch: Sequence = (), **options
) -> None:
    """The body of a kernel that makes `slopes^T h`, see `matmul_tiles`.

    Args:
      slopes_gmem: `[batch, size]`.
      h_gmem: `[batch, hidden]`.
      finish: its tile is the first row and column of `[128, tile_columns(hidden)]`, of
        which a warpgroup has 64 rows, and how many the program had before.
      scratch: shared memory.
      options: of `matmul_tiles`.
    """
    batch, size = slopes_gmem.shape
    hidden = h_gmem.shape[1]
    columns = tile_columns(hidden)
    across = hidden // columns

    def tile_of(i):
        before = lax.div(i, lax.axis_size("program"))
        return lax.div(i, across) * TILE, lax.rem(i, across) * columns, before

    def factors(slopes_smem, h_smem, warpgroup):
        mine = slopes_smem.at[:, pl.ds(warpgroup * ROWS, ROWS)]
        return mine.transpose((1, 0)), h_smem

    matmul_tiles(
        size // TILE * across,
        tile_of,
        [
            (slopes_gmem, (STEP, TILE), lambda tile, k: (k * STEP, tile[0])),
            (h_gmem, (STEP, columns), lambda tile, k: (k * STEP, tile[1])),
        ],
        factors,
        finish,
        columns=columns,
        steps=batch // STEP,
        warpgroups=WARPGROUPS,
        scratch=scratch,
        **options,
    )


def tile_columns(hidden: int) -> int:
    """Columns of a tile, of so many."""
    return next(n for n in (256, 192, 128, 64) if hidden % n == 0)
