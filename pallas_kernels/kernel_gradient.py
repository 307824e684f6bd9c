"""The gradient of some of a kernel's rows, written in place: a Mosaic GPU matmul."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.matmul_tiles import LAYOUT, ROWS, STEP, call, matmul_tiles, numbers

_TILE = 2 * ROWS  # rows of a tile, half of them a warpgroup's


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
    batch, size = slopes.shape
    hidden = h.shape[1]
    columns = next(n for n in (256, 192, 128, 64) if hidden % n == 0)
    across = hidden // columns

    def body(start_gmem, slopes_gmem, h_gmem, gradient_gmem):
        first = start_gmem[0]

        def tile_of(i):
            return lax.div(i, across) * _TILE, lax.rem(i, across) * columns

        def factors(slopes_smem, h_smem, warpgroup):
            mine = slopes_smem.at[:, pl.ds(warpgroup * ROWS, ROWS)]
            return mine.transpose((1, 0)), h_smem

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

        matmul_tiles(
            size // _TILE * across,
            tile_of,
            [
                (slopes_gmem, (STEP, _TILE), lambda tile, k: (k * STEP, tile[0])),
                (h_gmem, (STEP, columns), lambda tile, k: (k * STEP, tile[1])),
            ],
            factors,
            finish,
            columns=columns,
            steps=batch // STEP,
            warpgroups=2,
            scratch=[plgpu.SMEM((2, 2, ROWS, STEP), h.dtype, transforms=LAYOUT)],
        )

    ref = jax.new_ref(gradient)
    call("kernel_gradient", body, [], 2, *numbers(start), slopes, h, ref)
    return jax.freeze(ref)
