"""An optimizer's step on rows of a kernel, fused with its gradient's product: Mosaic GPU.

The gradient is summed in registers and never written to memory. Pieces of the rows and of
their state pass through slots of shared memory. One warp copies them there in advance,
also during the product. The warpgroup that has summed the gradient updates them. Other warps
copy them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, STEP, call, numbers
from pallas_kernels.rounding import of_columns, of_rows, rounded
from pallas_kernels.weight_gradient import (
    SUM_COLUMNS,
    TILE,
    WARPGROUPS,
    gradient_tiles,
    summing_operands,
    sums_type,
    tile_columns,
)

# Function that updates rows: (rows of each array, their gradient, scalars) -> new rows of each
# array.
Update = Callable[[list[jax.Array], jax.Array, list[jax.Array]], Sequence[jax.Array]]

# Columns of a piece, and steps of the product that are copied in advance. The first choice that
# fits in memory is taken. Pieces of 128 bytes a row are read and written more slowly.
_CHOICES = (64, 3), (64, 2), (32, 3), (32, 2)
_LEAST_SLOTS, _MOST_SLOTS = 2, 8
_SHARED = 226 * 1024  # bytes of an SM's shared memory


def weight_update(
    update: Update,
    slopes: Float[Array, "batch size"],
    h: Float[Array, "batch hidden"],
    arrays: Sequence[Float[Array, "items hidden"]],
    operand: Float[Array, "items hidden"] | None,
    start: jax.typing.ArrayLike,
    scalars: Sequence[Float[Array, ""]] = (),
    *,
    place: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None,
    with_sums: bool = False,
) -> tuple[
    list[Float[Array, "items hidden"]],
    Float[Array, "items hidden"] | None,
    Float[Array, "size"] | None,
]:
    """Updates rows `start .. start + size - 1` of a kernel and its state, in place if they
    are donated.

    ::

        gradient           = slopes^T h                             summed in float32
        arrays[:][rows]    = update(arrays[:][rows], gradient, scalars)
        operand[rows]      = arrays[0][rows], rounded to nearest
        sums               = slopes summed over the batch           in float32

    Each row of the arrays is read and written once, and `slopes` once for each 256 columns.

    Args:
      update: function that works element by element, in float32. Arrays that it creates
        must be scalars.
      slopes: bfloat16; `batch` is a multiple of 64, `size` of 128.
      h: bfloat16; `hidden` is a multiple of 64.
      arrays: kernel and state, float32 or bfloat16, with sizes that `fits` allows.
      operand: a copy of the kernel in bfloat16, or None.
      start: first row, a multiple of 128.
      scalars: further numbers that `update` gets.
      place: key (`Noise.key`) by which bfloat16 arrays are rounded at random, and number of the
        arrays' first row. Without it they are rounded to nearest.
      with_sums: whether to return the sums.

    Returns:
      The arrays; the operand or None; the sums or None.

    Raises:
      ValueError: the arrays together have too many bytes per element, see `fits`.
    """
    columns = tile_columns(h.shape[1])
    refs = [jax.new_ref(array) for array in arrays]
    copies = [] if operand is None else [jax.new_ref(operand)]
    dtypes = [x.dtype for x in (*refs, *copies)]
    itemsize = sum(x.itemsize for x in dtypes)
    if not fits(h.shape[1], itemsize):
        raise ValueError(
            f"{itemsize} bytes an element do not fit an SM's shared memory"
        )
    width, stages, slots = _pieces(itemsize, columns)
    each = columns // width  # number of pieces of a tile that a warpgroup has
    summing = summing_operands(with_sums)

    def body(start_gmem, slopes_gmem, h_gmem, *refs):
        first = start_gmem[0]
        summing_gmem, refs = refs[: len(summing)], refs[len(summing) :]
        scalars_gmem, refs = refs[: len(scalars)], refs[len(scalars) :]
        noise_gmem, refs = refs[: len(noise)], refs[len(noise) :]
        refs, sums_gmem = refs[: len(dtypes)], refs[len(dtypes) :]

        def corner_of(tile, warpgroup, c):
            return first + tile[0] + warpgroup * ROWS, tile[1] + c * width

        def part_of(tile, warpgroup, c):
            row, column = corner_of(tile, warpgroup, c)
            return pl.ds(row, ROWS), pl.ds(column, width)

        def slot_of(tile, warpgroup, c):
            """The slot and the barrier of a piece, and whether the slot held another piece
            before.
            """
            # Numbers all pieces of one warpgroup before those of the other, as one warpgroup
            # begins its next product while the other still updates its pieces.
            number = (tile[2] * WARPGROUPS + warpgroup) * each + c
            slot = rem(number, slots)
            return slot, warpgroup * slots + slot, number >= slots

        def load(each_tile, smem, ready, done, free):
            @each_tile
            def _(tile):
                @pl.loop(0, WARPGROUPS * each)
                def _(i):
                    piece = tile, div(i, each), rem(i, each)
                    slot, barrier, again = slot_of(*piece)

                    @pl.when(again)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for ref, pieces in zip(refs[: len(arrays)], smem, strict=False):
                        plgpu.copy_gmem_to_smem(
                            ref.at[*part_of(*piece)], pieces.at[slot], ready.at[barrier]
                        )

        def store(warpgroup, each_tile, smem, ready, done, free):
            @each_tile
            def _(tile):
                @pl.loop(0, each)
                def _(c):
                    slot, barrier, _ = slot_of(tile, warpgroup, c)
                    plgpu.barrier_wait(done.at[barrier])
                    for ref, pieces in zip(refs, smem, strict=True):
                        plgpu.copy_smem_to_gmem(
                            pieces.at[slot], ref.at[*part_of(tile, warpgroup, c)]
                        )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(free.at[slot])

        def finish(tile, warpgroup, make, smem, ready, done, free):
            layout = plgpu.Layout.WGMMA

            def splat(value):
                full = jnp.full((ROWS, width), value, jnp.float32)
                return plgpu.layout_cast(full, layout)

            def stored(rows, dtype, c):
                if not noise_gmem or dtype != jnp.bfloat16:
                    return rows.astype(dtype)
                key, first_row = (ref[0] for ref in noise_gmem)
                row, column = corner_of(tile, warpgroup, c)

                # Each row and each column is hashed once, and then broadcast over the piece.
                def of_axis(axis, first, hashed):
                    size, along = rows.shape[axis], layout.reduce(1 - axis)
                    number = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=along)
                    hashes = hashed(first + number)
                    return jax.lax.broadcast_in_dim(hashes, rows.shape, [axis])

                of_row = of_axis(0, first_row + row, partial(of_rows, key))
                return rounded(rows, of_row, of_axis(1, column, of_columns))

            scalars = [ref[0] for ref in scalars_gmem]
            sums = make()
            for c in range(each):
                slot, barrier, _ = slot_of(tile, warpgroup, c)
                plgpu.barrier_wait(ready.at[barrier])
                old = [
                    plgpu.load(pieces.at[slot], layout=layout).astype(jnp.float32)
                    for pieces in smem[: len(arrays)]
                ]
                gradient = sums[:, c * width : (c + 1) * width]
                new = update(old, gradient, [splat(x) for x in scalars])
                for pieces, rows in zip(smem, new, strict=False):
                    pieces[slot] = stored(rows, pieces.dtype, c)
                if copies:
                    smem[-1][slot] = new[0].astype(smem[-1].dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(done.at[barrier])

        barriers = WARPGROUPS * slots
        scratch = [
            [_pieces_type(slots, width, dtype) for dtype in dtypes],
            plgpu.Barrier(num_arrivals=len(arrays), num_barriers=barriers),
            plgpu.Barrier(num_barriers=barriers),
            plgpu.Barrier(num_barriers=slots),
        ]
        stores = [partial(store, i) for i in range(WARPGROUPS)]
        gradient_tiles(
            slopes_gmem,
            h_gmem,
            summing_gmem,
            sums_gmem,
            finish,
            scratch,
            stages=stages,
            movers=[load, *stores],
        )

    scalars = [jnp.reshape(scalar, 1) for scalar in scalars]
    noise = [] if place is None else numbers(*place)
    operands = *numbers(start), slopes, h, *summing, *scalars, *noise, *refs, *copies
    out_type = sums_type(slopes, with_sums)
    sums = call("weight_update", body, out_type, WARPGROUPS, *operands)
    moved = [jax.freeze(ref) for ref in refs]
    copy = jax.freeze(copies[0]) if copies else None
    return moved, copy, sums[0] if with_sums else None


def fits(hidden: int, itemsize: int) -> bool:
    """Whether `weight_update` supports such rows, and shared memory suffices for them.

    Args:
      hidden: number of columns.
      itemsize: bytes per element, of weights, state and operand together. Up to 32 bytes always
        fit.
    """
    if hidden % STEP:
        return False
    *_, slots = _pieces(itemsize, tile_columns(hidden))
    return slots >= _LEAST_SLOTS


def _pieces(itemsize: int, columns: int) -> tuple[int, int, int]:
    """Columns of a piece, number of steps of the product copied in advance, number of slots.

    Args:
      itemsize: bytes per element, of all arrays together.
      columns: number of columns of a tile.
    """
    for width, stages in _CHOICES:
        left = _SHARED - 2 * STEP * (stages * (TILE + columns) + SUM_COLUMNS)
        slots = left // (ROWS * width * itemsize)
        if slots >= _LEAST_SLOTS:
            break
    return width, stages, min(slots, _MOST_SLOTS)


def _pieces_type(slots: int, width: int, dtype: jnp.dtype):
    """Shared memory for an array's pieces, in the layout of `wgmma`'s results."""
    tile = min(width, 128 // dtype.itemsize)
    swizzle = plgpu.SwizzleTransform(tile * dtype.itemsize)
    layout = plgpu.TilingTransform((8, tile)), swizzle
    return plgpu.SMEM((slots, ROWS, width), dtype, transforms=layout)
