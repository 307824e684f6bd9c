"""The gradient of some rows of a kernel, written in place: a Mosaic GPU matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, STEP, call, matmul_tiles, numbers

WARPGROUPS = 2  # number of warpgroups that compute
TILE = WARPGROUPS * ROWS  # number of rows in a tile
# Number of columns in the product that sums slopes: the fewest that `wgmma` computes.
SUM_COLUMNS = 8


def weight_gradient(
    slopes: Float[Array, "batch size"],
    h: Float[Array, "batch hidden"],
    gradient: Float[Array, "items hidden"],
    start: jax.typing.ArrayLike,
    *,
    with_sums: bool = False,
) -> tuple[Float[Array, "items hidden"], Float[Array, "size"] | None]:
    """Writes `slopes^T h` into rows `start .. start + size - 1` of `gradient`.

    The rows are written in place if `gradient` is donated. XLA would copy them once more.

    Args:
      slopes: bfloat16; `batch` is a multiple of 64, `size` of 128.
      h: bfloat16; `hidden` is a multiple of 64.
      gradient: bfloat16 or float32.
      start: first row, a multiple of 128.
      with_sums: whether to return the sums of the slopes.

    Returns:
      The gradient, and the float32 sums of the slopes over the batch, or None.
    """
    columns = tile_columns(h.shape[1])
    # Number of columns that are written at once.
    width = 2 * STEP // gradient.dtype.itemsize
    pieces = columns // width
    summing = summing_operands(with_sums)

    def body(start_gmem, slopes_gmem, h_gmem, *refs):
        first = start_gmem[0]
        *summing_gmem, gradient_gmem = refs[: len(summing) + 1]
        sums_gmem = refs[len(summing) + 1 :]

        def finish(tile, warpgroup, make, smem):
            row, column = tile[0] + warpgroup * ROWS, tile[1]
            sums = make()
            for piece in range(pieces):
                slot, c = piece % 2, piece * width
                # Waits until an earlier copy from the slot has ended. If a tile has an odd number
                # of pieces, that may be the last copy.
                plgpu.wait_smem_to_gmem(1 - pieces % 2, wait_read_only=True)
                smem[warpgroup, slot] = sums[:, c : c + width].astype(smem.dtype)
                plgpu.commit_smem()
                target = pl.ds(first + row, ROWS), pl.ds(column + c, width)
                plgpu.copy_smem_to_gmem(
                    smem.at[warpgroup, slot], gradient_gmem.at[*target]
                )

        layout = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * STEP)
        stored = plgpu.SMEM((2, 2, ROWS, width), gradient.dtype, transforms=layout)
        gradient_tiles(slopes_gmem, h_gmem, summing_gmem, sums_gmem, finish, [stored])

    ref = jax.new_ref(gradient)
    operands = *numbers(start), slopes, h, *summing, ref
    out_type = sums_type(slopes, with_sums)
    sums = call("weight_gradient", body, out_type, WARPGROUPS, *operands)
    return jax.freeze(ref), sums[0] if with_sums else None


def summing_operands(with_sums: bool) -> list[jax.Array]:
    """An operand, as a list: its product with the slopes is 8 columns, each 1/8 of their sums."""
    eighths = jnp.full((SUM_COLUMNS, STEP), 1 / SUM_COLUMNS, jnp.bfloat16)
    return [eighths] * with_sums


def sums_type(slopes: jax.Array, with_sums: bool) -> list[jax.ShapeDtypeStruct]:
    """The shape and the dtype of the sums, as a list; empty without sums."""
    return [jax.ShapeDtypeStruct(slopes.shape[1:], jnp.float32)] * with_sums


def gradient_tiles(
    slopes_gmem,
    h_gmem,
    summing_gmem: Sequence,
    sums_gmem: Sequence,
    finish: Callable,
    scratch: Sequence = (),
    **options,
) -> None:
    """The body of a GPU program that computes `slopes^T h` and sums slopes.

    See `matmul_tiles`.

    Args:
      slopes_gmem: `[batch, size]`.
      h_gmem: `[batch, hidden]`.
      summing_gmem: references to `summing_operands`.
      sums_gmem: references to arrays of `sums_type`. They are written when `finish` computes the
        product.
      finish: function that is called as in `matmul_tiles`. `tile` is the first row and the
        first column of `[128, tile_columns(hidden)]`, and the number of tiles that the program
        had before. A warpgroup has 64 rows of the tile. The function that `finish` gets returns
        only the product, without the sums.
      scratch: shared memory.
      options: further arguments of `matmul_tiles`.
    """
    batch, size = slopes_gmem.shape
    hidden = h_gmem.shape[1]
    columns = tile_columns(hidden)
    across = hidden // columns

    def tile_of(i):
        before = div(i, lax.axis_size("program"))
        return div(i, across) * TILE, rem(i, across) * columns, before

    def factors(k, slopes_smem, h_smem, *more):
        del k
        *summing_smem, warpgroup = more
        mine = slopes_smem.at[:, pl.ds(warpgroup * ROWS, ROWS)].transpose((1, 0))
        return [(mine, h_smem), *((mine, x.transpose((1, 0))) for x in summing_smem)]

    def finish_with_sums(tile, warpgroup, make, *scratch_smem):
        def product():
            sums, *of_slopes = make()

            @pl.when(tile[1] == 0)
            def _():
                for ref, eighths in zip(sums_gmem, of_slopes, strict=True):
                    rows = pl.ds(tile[0] + warpgroup * ROWS, ROWS)
                    ref[rows] = jnp.sum(eighths, axis=1)

            return sums

        finish(tile, warpgroup, product, *scratch_smem)

    matmul_tiles(
        size // TILE * across,
        tile_of,
        [
            (slopes_gmem, (STEP, TILE), lambda tile, k: (k * STEP, tile[0])),
            (h_gmem, (STEP, columns), lambda tile, k: (k * STEP, tile[1])),
        ],
        factors,
        finish_with_sums,
        columns=[columns, *(SUM_COLUMNS for _ in summing_gmem)],
        steps=batch // STEP,
        warpgroups=WARPGROUPS,
        constants=summing_gmem,
        scratch=scratch,
        **options,
    )


def tile_columns(hidden: int) -> int:
    """The number of columns of a tile: a divisor of `hidden`, at most 256."""
    return next(n for n in (256, 192, 128, 64) if hidden % n == 0)
