"""The gradient of a kernel under the squared loss, from small matrices: Mosaic GPU.

The kernel is read once and its gradient written once. The matrix that the rows of the
kernel are multiplied with stays in shared memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.integers import rem
from pallas_kernels.matmul_tiles import LAYOUT, ROWS, STEP, call, numbers
from pallas_kernels.score_tiles import (
    column_numbers,
    row_vector,
    spread_columns,
    spread_rows,
)

MAX_HIDDEN = 256
_WARPGROUPS = 2
_REGISTERS = 232, 40  # of a thread that computes and of one that copies
_MOST_STAGES = 4
_SHARED = 225 * 1024  # bytes of an SM's shared memory, but for the barriers
# Columns of the product with two vectors: the fewest that `wgmma` makes. Three of them hold
# the parts of a vector in bfloat16 whose sum has the precision of float32.
_COLUMNS, _PARTS = 8, 3


def unsupported(kernel: jax.Array, size: int) -> str | None:
    """Why `squared_gradient` cannot take this kernel and size; None if it can."""
    hidden = kernel.shape[1]
    if kernel.dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, not {kernel.dtype}"
    if hidden % STEP or not 0 < hidden <= MAX_HIDDEN:
        return f"takes hidden sizes of {STEP} to {MAX_HIDDEN}, multiples of {STEP}"
    if size % (_WARPGROUPS * ROWS):
        return f"takes a multiple of {_WARPGROUPS * ROWS} rows, not {size:,}"
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
    """The gradients of kernel and bias, but for the labels' part of the kernel's.

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
      bias: where it is -inf and `of_labels` is finite, both results are 0.
      of_labels: float32.
      weight: float32.
      start: first item, a multiple of 128.
      size: number of items, a multiple of 128.
      dtype: of the kernel's gradient, bfloat16 or float32.

    Returns:
      The gradient of the kernel; the gradient of the bias.
    """
    hidden = kernel.shape[1]
    width = 128 // jnp.dtype(dtype).itemsize  # of a piece that is stored
    stages = _stages(hidden)
    pairs = size // (_WARPGROUPS * ROWS)

    def body(start_gmem, weight_gmem, kernel_gmem, *refs):
        outer_gmem, parts_gmem, centre_gmem, rest_gmem, *refs = refs
        bias_gmem, labels_gmem, gradient_gmem, dbias_gmem = refs
        first, weight = start_gmem[0], weight_gmem[0]
        warpgroup = lax.axis_index("warpgroup")

        def each_row(function):
            """Calls `function` with the first row of a pair of tiles, and the pairs before."""

            @plgpu.nd_loop((pairs,), collective_axes="program")
            def _(info):
                function(info.index[0] * _WARPGROUPS * ROWS, info.local_index)

        def copy(outer_smem, parts_smem, rows_smem, stored_smem, ready, full, free):
            plgpu.copy_gmem_to_smem(outer_gmem, outer_smem, ready)
            plgpu.copy_gmem_to_smem(parts_gmem, parts_smem, ready)

            @each_row
            def _(row, done):
                for i in range(_WARPGROUPS):
                    slot = i * stages + rem(done, stages)

                    @pl.when(done >= stages)
                    def _(slot=slot):
                        plgpu.barrier_wait(free.at[slot])

                    rows = pl.ds(first + row + i * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        kernel_gmem.at[rows], rows_smem.at[slot], full.at[slot]
                    )

        def compute(outer_smem, parts_smem, rows_smem, stored_smem, ready, full, free):
            plgpu.barrier_wait(ready)

            @each_row
            def _(row, done):
                row = row + warpgroup * ROWS
                slot = warpgroup * stages + rem(done, stages)
                own_bias = row_vector(bias_gmem, first + row)
                labels = row_vector(labels_gmem, first + row)

                def multiply(sums, of_vectors):
                    plgpu.barrier_wait(full.at[slot])
                    rows = rows_smem.at[slot]
                    plgpu.wgmma(of_vectors, rows, parts_smem.transpose((1, 0)))
                    plgpu.wgmma(sums, rows, outer_smem)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])
                    return sums[...], of_vectors[...]

                # One warpgroup multiplies while the other works on its sums.
                sums, of_vectors = pl.run_scoped(
                    multiply, plgpu.ACC((ROWS, hidden)), plgpu.ACC((ROWS, _COLUMNS))
                )
                of_centre = column_numbers(_COLUMNS) < _PARTS
                mean, total = (
                    jnp.sum(jnp.where(mask, of_vectors, 0.0), axis=1)
                    for mask in (of_centre, ~of_centre)
                )
                stopped = own_bias == -jnp.inf
                own_bias = jnp.where(stopped, 0.0, own_bias)
                dbias = total + weight * own_bias - labels
                nothing = stopped & (labels < jnp.inf)
                dbias = jnp.where(nothing, 0.0, dbias)
                dbias_gmem[pl.ds(row, ROWS)] = dbias
                live = jnp.where(nothing, 0.0, 1.0)
                mean, dbias, live = (
                    spread_rows(x, width) for x in (mean + own_bias, dbias, live)
                )
                for c in range(0, hidden, width):
                    part = sums[:, c : c + width]
                    part = part + mean * spread_columns(rest_gmem, c, width)
                    part = part + dbias * spread_columns(centre_gmem, c, width)
                    part = jnp.where(live != 0.0, part, 0.0)
                    # The copy of the piece before must have read what is there.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    stored_smem[warpgroup] = part.astype(dtype)
                    plgpu.commit_smem()
                    target = pl.ds(row, ROWS), pl.ds(c, width)
                    plgpu.copy_smem_to_gmem(
                        stored_smem.at[warpgroup], gradient_gmem.at[*target]
                    )

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def scope(*scratch):
            @pl.when(warpgroup == _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[1], action="decrease")
                copy(*scratch)

            @pl.when(warpgroup < _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
                compute(*scratch)

        def shared(*shape):
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=LAYOUT)

        pieces = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)
        slots = _WARPGROUPS * stages
        pl.run_scoped(
            scope,
            shared(hidden, hidden),
            shared(_COLUMNS, hidden),
            shared(slots, ROWS, hidden),
            plgpu.SMEM((_WARPGROUPS, ROWS, width), dtype, transforms=pieces),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            collective_axes="warpgroup",
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


def _stages(hidden: int) -> int:
    """How many tiles of a warpgroup are in shared memory."""
    kept = 2 * hidden * (hidden + _COLUMNS) + _WARPGROUPS * ROWS * 128
    return min(_MOST_STAGES, (_SHARED - kept) // (2 * _WARPGROUPS * ROWS * hidden))


def _in_parts(vector: Float[Array, "hidden"]) -> Float[Array, "parts hidden"]:
    """Rows of bfloat16 whose sum is the vector."""
    rows = []
    for _ in range(_PARTS):
        # Not a plain cast: XLA may keep the precision that a cast there and back loses.
        row = jax.lax.reduce_precision(vector, 8, 7)
        rows.append(row)
        vector = vector - row
    return jnp.stack(rows).astype(jnp.bfloat16)
