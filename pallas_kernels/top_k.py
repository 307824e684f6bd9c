"""Scores for choosing the best of them, and the largest of each group: Mosaic GPU, Hopper.

The groups are of 16 neighbours, so their maxima need not be looked for in the scores again,
which takes as long as to write these.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import score_tiles as tiles
from pallas_kernels.matmul_tiles import ROWS
from pallas_kernels.output_loss import ItemLayer, listed, load_words

GROUP = 16
_GROUPS = tiles.COLUMNS // GROUP  # of a warpgroup
_STORE = 32  # columns that are written at once: 128 bytes
_LAYOUT = (plgpu.TilingTransform((8, _STORE)), plgpu.SwizzleTransform(4 * _STORE))


def scores_and_maxima(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "batch words"] | None,
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
) -> list[Float[Array, "batch _"]]:
    """Scores of items `start .. start + size - 1`, and the maximum of each 16.

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i        -inf where the bias is

    and -inf where there is a bit, or no item. A maximum of NaN and others is NaN.

    Args:
      h: bfloat16, rows in a multiple of 128.
      kernel: bfloat16, see `score_tiles.unsupported`.
      bias: float32 or None.
      scale: float32 or None.
      words: of items that are not wanted, see `output_loss.label_words`.
      start: first item.
      size: number of items, a multiple of 256.
      limit: from this one on (of the kernel's rows) there are no items.
    """
    batch = h.shape[0]
    layer = ItemLayer(bias, scale)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, *words_refs = layer.split(inputs)
        scores_gmem, maxima_gmem = outputs
        words = [load_words(ref, row, column) for ref in words_refs]
        products = make()

        def group(c, products, words, masked):
            item = first + column + c
            scores = layer.apply(layer_refs, products[:, c : c + GROUP], item)
            denied = layer.denied(layer_refs, item, GROUP)
            denied += [listed(x, c, GROUP) for x in words]
            if masked:
                denied.append(tiles.column_numbers(GROUP) >= end - item)
            for x in denied:
                scores = jnp.where(x, -jnp.inf, scores)
            return scores

        def finish(masked):
            operands = products, words
            if masked:  # see `output_loss.slopes`
                operands = lax.optimization_barrier(operands)
            places = tiles.column_numbers(_GROUPS)
            maxima = places.astype(jnp.float32)
            for c in range(0, tiles.COLUMNS, _STORE):
                pieces = []
                for i in range(c, c + _STORE, GROUP):
                    scores = group(i, operands[0], operands[1], masked)
                    pieces.append(scores)
                    largest = tiles.spread_rows(jnp.max(scores, axis=1), _GROUPS)
                    maxima = jnp.where(places == i // GROUP, largest, maxima)
                # What was there must have been read.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                smem[warpgroup] = lax.concatenate(pieces, 1)
                plgpu.commit_smem()
                target = pl.ds(row, ROWS), pl.ds(column + c, _STORE)
                plgpu.copy_smem_to_gmem(smem.at[warpgroup], scores_gmem.at[*target])
            at = pl.ds(pl.multiple_of(column // GROUP, _GROUPS), _GROUPS)
            target = maxima_gmem.at[pl.ds(row, ROWS), at]
            if hasattr(plgpu, "store"):  # which JAX 0.12 asks for, 0.11 has not
                plgpu.store(target, maxima, optimized=False)
            else:
                target[...] = maxima

        all_inside = first + column + tiles.COLUMNS <= end
        lax.cond(all_inside, lambda: finish(False), lambda: finish(True))

    return tiles.score_tiles(
        "scores_and_maxima",
        epilogue,
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), *([] if words is None else [words])],
        [
            jax.ShapeDtypeStruct((batch, count), jnp.float32)
            for count in (size, size // GROUP)
        ],
        start=start,
        size=size,
        scratch=plgpu.SMEM(
            (tiles.WARPGROUPS, ROWS, _STORE), jnp.float32, transforms=_LAYOUT
        ),
    )
