"""The gradient of a kernel for the squared loss, from small matrices: Mosaic GPU.

The kernel is read once and its gradient written once. The matrix by which the rows of the
kernel are multiplied stays in shared memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic as plgpu
from pallas_kernels.matmul_tiles import ROWS, STEP, call, matmul_tiles, numbers
from pallas_kernels.score_tiles import (
    column_numbers,
    row_vector,
    spread_columns,
    spread_rows,
)

MAX_HIDDEN = 256
_WARPGROUPS = 2
_TILE = _WARPGROUPS * ROWS  # number of rows in a tile
_STAGES = 3  # number of stages: more do not fit in shared memory
# Number of columns in the product with two vectors: the fewest that `wgmma` computes. Each vector
# takes three columns, with bfloat16 parts whose sum is as precise as float32.
_COLUMNS, _PARTS = 8, 3


def unsupported(kernel: jax.Array, size: int) -> str | None:
    """The reason why `squared_gradient` does not support this kernel and size; None if it does."""
    hidden = kernel.shape[1]
    if kernel.dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, not {kernel.dtype}"
    if hidden % STEP or not 0 < hidden <= MAX_HIDDEN:
        return f"takes hidden sizes of {STEP} to {MAX_HIDDEN}, multiples of {STEP}"
    if size % _TILE:
        return f"takes a multiple of {_TILE} rows, not {size:,}"
    return None


def squared_gradient(
    kernel: Float[Array, "items hidden"],
    outer: Float[Array, "hidden hidden"],
    centre: Float[Array, "hidden"],
    total: Float[Array, "hidden"],
    rest: Float[Array, "hidden"],
    bias: Float[Array, "items"],
    of_labels: Float[Array, "items"],
    weight: jax.typing.ArrayLike,
    *,
    start: jax.typing.ArrayLike,
    size: int,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "size hidden"], Float[Array, "size"]]:
    """The gradients of kernel and bias, without the term of the labels in the kernel's gradient.

    ::

        mean_i     = W_i . centre + bias_i
        dbias_i    = W_i . total + weight bias_i - of_labels_i
        gradient_i = W_i outer + mean_i rest + dbias_i centre     rounded once to `dtype`

    Args:
      kernel: W, bfloat16, see `unsupported`.
      outer: bfloat16.
      centre: float32, like all vectors.
      total: float32.
      rest: float32.
      bias: float32; where it is -inf and `of_labels` is finite, both results are 0.
      of_labels: float32.
      weight: float32.
      start: first item, a multiple of 128.
      size: number of items, a multiple of 128.
      dtype: dtype of the kernel's gradient, bfloat16 or float32.

    Returns:
      The gradient of the kernel; the gradient of the bias.
    """
    hidden = kernel.shape[1]
    # Number of columns in a piece that is stored at once.
    width = 128 // jnp.dtype(dtype).itemsize

    def body(start_gmem, weight_gmem, kernel_gmem, *refs):
        outer_gmem, parts_gmem, centre_gmem, rest_gmem, *refs = refs
        bias_gmem, labels_gmem, gradient_gmem, dbias_gmem = refs
        first, weight = start_gmem[0], weight_gmem[0]

        def factors(k, rows_smem, outer_smem, parts_smem, warpgroup):
            mine = rows_smem.at[pl.ds(warpgroup * ROWS, ROWS)]
            step = pl.ds(k * STEP, STEP)
            parts = parts_smem.at[:, step].transpose((1, 0))
            return [(mine, outer_smem.at[step]), (mine, parts)]

        def finish(tile, warpgroup, make, smem):
            row = tile + warpgroup * ROWS
            own_bias = row_vector(bias_gmem, first + row)
            labels = row_vector(labels_gmem, first + row)
            sums, of_vectors = make()
            of_centre = column_numbers(_COLUMNS) < _PARTS
            mean, total = (
                jnp.sum(jnp.where(mask, of_vectors, 0.0), axis=1)
                for mask in (of_centre, ~of_centre)
            )
            stopped = own_bias == -jnp.inf
            own_bias = jnp.where(stopped, 0.0, own_bias)
            mean = mean + own_bias
            dbias = total + weight * own_bias - labels
            nothing = stopped & (labels < jnp.inf)
            dbias = jnp.where(nothing, 0.0, dbias)
            dbias_gmem[pl.ds(row, ROWS)] = dbias
            live = jnp.where(nothing, 0.0, 1.0)
            spread = [spread_rows(x, width) for x in (mean, dbias, live)]
            for c in range(0, hidden, width):
                slot = c // width % 2
                part = sums[:, c : c + width]
                part = part + spread[0] * spread_columns(rest_gmem, c, width)
                part = part + spread[1] * spread_columns(centre_gmem, c, width)
                part = jnp.where(spread[2] != 0.0, part, 0.0)
                # Waits until an earlier copy from this slot has ended. If a tile has an odd number
                # of pieces, that may be the last copy.
                plgpu.wait_smem_to_gmem(1 - hidden // width % 2, wait_read_only=True)
                smem[warpgroup, slot] = part.astype(smem.dtype)
                plgpu.commit_smem()
                target = pl.ds(row, ROWS), pl.ds(c, width)
                plgpu.copy_smem_to_gmem(
                    smem.at[warpgroup, slot], gradient_gmem.at[*target]
                )

        swizzle = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)
        stored = plgpu.SMEM((_WARPGROUPS, 2, ROWS, width), dtype, transforms=swizzle)
        matmul_tiles(
            size // _TILE,
            lambda i: i * _TILE,
            [(kernel_gmem, (_TILE, STEP), lambda tile, k: (first + tile, k * STEP))],
            factors,
            finish,
            columns=[hidden, _COLUMNS],
            steps=hidden // STEP,
            warpgroups=_WARPGROUPS,
            constants=[outer_gmem, parts_gmem],
            scratch=[stored],
            stages=_STAGES,
        )

    out_type = [
        jax.ShapeDtypeStruct((size, hidden), dtype),
        jax.ShapeDtypeStruct((size,), jnp.float32),
    ]
    weight = jnp.reshape(jnp.asarray(weight, jnp.float32), 1)
    operands = *numbers(start), weight, kernel, outer
    parts = jnp.concatenate([_in_parts(centre), _in_parts(total)])
    parts = jnp.pad(parts, ((0, _COLUMNS - len(parts)), (0, 0)))
    operands = *operands, parts, centre, rest, bias, of_labels
    gradient, dbias = call("squared_gradient", body, out_type, _WARPGROUPS, *operands)
    return gradient, dbias


def _in_parts(vector: Float[Array, "hidden"]) -> Float[Array, "parts hidden"]:
    """Divides a vector into rows of bfloat16 whose sum is the vector."""
    rows = []
    for _ in range(_PARTS):
        # Casts are avoided: XLA may keep the precision that a cast to bfloat16 and back should
        # lose.
        row = lax.reduce_precision(vector, 8, 7)
        rows.append(row)
        vector = vector - row
    return jnp.stack(rows).astype(jnp.bfloat16)
