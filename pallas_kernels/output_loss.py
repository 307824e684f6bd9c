"""What an output layer's loss needs of its scores: a Mosaic GPU kernel for Hopper.

Scores are made in registers (`score_tiles`) and turned there into the slopes of the loss,
rounded to bfloat16, or into what softmax needs first. Which items are labels is told by
bits, so that nothing has to be put right afterwards::

    word [b, 8 (i // 256) + i % 8], bit (i % 256) // 8        item i of row b

In this order a thread finds the bits of its scores in the same two words for all of a
tile's 256 items.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import score_tiles as tiles
from pallas_kernels.score_tiles import Config

_WORDS = tiles.TILE_ITEMS // 32
_STORE = 64  # columns that are worked on and written at once


def label_words(
    rows: Int[Array, "nse"], columns: Int[Array, "nse"], batch: int, size: int
) -> Int[Array, "batch words"]:
    """The bits of labels at (row, column), see above; what is outside is left out.

    A sum of different bits, so there must be no duplicates.
    """
    inside = (columns >= 0) & (columns < size)
    word = columns // tiles.TILE_ITEMS * _WORDS + columns % _WORDS
    bit = jnp.left_shift(jnp.int32(1), columns % tiles.TILE_ITEMS // _WORDS)
    words = jnp.zeros((batch, size // 32), jnp.int32)
    word = jnp.where(inside, word, words.shape[1])
    return words.at[rows, word].add(bit, mode="drop")


def slopes(
    function: Callable,
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "batch words"],
    vectors: Sequence[Float[Array, "batch"]],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
    with_values: bool = True,
    config: Config | None = None,
) -> tuple[Float[Array, "parts batch"] | None, Float[Array, "batch size"]]:
    """`function` of the scores of items `start .. start + size - 1`.

    ::

        scores = (h . kernel_i) scale_i + bias_i                        float32
        values, slopes = function(scores, 1, listed, *vectors)      element by element

    Args:
      function: gets float32 arrays `[rows, columns]`, `listed` a bool one, and may only
        use what Mosaic GPU can lower.
      h: bfloat16, rows in a multiple of 128.
      kernel: bfloat16, see `score_tiles.unsupported`.
      bias: float32 or None.
      scale: float32 or None.
      words: of the labels of these items, see `label_words`.
      vectors: float32, a number for each row.
      start: first item.
      size: number of items, a multiple of 256.
      limit: items from this one on (of the kernel's rows) have no value and no slope.
      with_values: whether the values are wanted.
      config: how the work is cut.

    Returns:
      The values, summed over each 256 items, or None; the slopes in bfloat16.
    """
    batch = h.shape[0]
    config = config or Config()
    layer = _Layer(bias, scale)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, words_gmem, *vector_refs = layer.split(inputs)
        *values_gmem, slopes_gmem = outputs
        vectors = [tiles.row_vector(ref, row) for ref in vector_refs]
        words = _load_words(words_gmem, row, column)
        products = make()
        total = jnp.zeros(tiles.ROWS, jnp.float32)
        width = _STORE
        for c in range(0, tiles.TILE_ITEMS, width):
            item = first + column + c
            scores = layer.apply(layer_refs, products[:, c : c + width], item)
            values, slopes = function(
                scores,
                jnp.ones_like(scores),
                _listed(words, c, width),
                *(tiles.spread_rows(vector, width) for vector in vectors),
            )
            inside = tiles.column_numbers(width) < end - item
            if with_values:
                total = total + jnp.sum(jnp.where(inside, values, 0.0), axis=1)
            slot = c // width % 2
            # Of the two slots, the older must have been read.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            slopes = jnp.where(inside, slopes, 0.0).astype(slopes_gmem.dtype)
            smem[warpgroup, slot] = slopes
            plgpu.commit_smem()
            target = pl.ds(row, tiles.ROWS), pl.ds(column + c, width)
            plgpu.copy_smem_to_gmem(smem.at[warpgroup, slot], slopes_gmem.at[target])
        for ref in values_gmem:
            ref[column // tiles.TILE_ITEMS, pl.ds(row, tiles.ROWS)] = total

    values = jax.ShapeDtypeStruct((size // tiles.TILE_ITEMS, batch), jnp.float32)
    made = tiles.score_tiles(
        epilogue,
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), words, *vectors],
        [values] * with_values + [jax.ShapeDtypeStruct((batch, size), h.dtype)],
        start=start,
        size=size,
        scratch=plgpu.SMEM(
            (2, 2, tiles.ROWS, _STORE), h.dtype, transforms=tiles.LAYOUT
        ),
        config=config,
    )
    return made[0] if with_values else None, made[-1]


def normalise(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "batch words"],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
    config: Config | None = None,
) -> list[Float[Array, "parts batch"]]:
    """What softmax needs to know of the scores, for each 256 items.

    The arguments are those of `slopes`.

    Returns:
      The largest score; the sum of exp(score - largest), from 0 if the largest is -inf;
      the number of labels; the sum of their scores.
    """
    batch = h.shape[0]
    config = config or Config()
    layer = _Layer(bias, scale)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, words_gmem = layer.split(inputs)
        words = _load_words(words_gmem, row, column)
        products = make()
        parts, width = [], _STORE
        for c in range(0, tiles.TILE_ITEMS, width):
            item = first + column + c
            scores = layer.apply(layer_refs, products[:, c : c + width], item)
            inside = tiles.column_numbers(width) < end - item
            parts.append(jnp.where(inside, scores, -jnp.inf))
        largest = functools.reduce(
            jnp.maximum, [jnp.max(part, axis=1) for part in parts]
        )
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)
        shift = tiles.spread_rows(shift, width)
        total, count, found = (jnp.zeros(tiles.ROWS, jnp.float32) for _ in range(3))
        for i, scores in enumerate(parts):
            listed = _listed(words, i * width, width)
            total = total + jnp.sum(jnp.exp(scores - shift), axis=1)
            count = count + jnp.sum(jnp.where(listed, 1.0, 0.0), axis=1)
            found = found + jnp.sum(jnp.where(listed, scores, 0.0), axis=1)
        place = column // tiles.TILE_ITEMS, pl.ds(row, tiles.ROWS)
        for ref, x in zip(outputs, (largest, total, count, found), strict=True):
            ref[place] = x

    out = jax.ShapeDtypeStruct((size // tiles.TILE_ITEMS, batch), jnp.float32)
    return tiles.score_tiles(
        epilogue,
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), words],
        [out] * 4,
        start=start,
        size=size,
        config=config,
    )


class _Layer:
    """Scale and bias, of which there may be none."""

    def __init__(self, bias, scale):
        self.bias, self.scale = bias, scale

    def arrays(self) -> list[jax.Array]:
        return [x for x in (self.scale, self.bias) if x is not None]

    def split(self, refs):
        count = len(self.arrays())
        return refs[:count], *refs[count:]

    def apply(self, refs, products, item):
        refs = list(refs)
        columns = products.shape[1]
        if self.scale is not None:
            products = products * tiles.spread_columns(refs.pop(0), item, columns)
        if self.bias is not None:
            products = products + tiles.spread_columns(refs.pop(0), item, columns)
        return products


def _load_words(words_gmem, row, column):
    """`[64, 8]` words of a tile."""
    first = pl.multiple_of(column // 32, _WORDS)
    block = words_gmem.at[pl.ds(row, tiles.ROWS), pl.ds(first, _WORDS)]
    return plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)


def _listed(words, column: int, columns: int):
    """`[64, columns]` whether items from `column` of the tile on are labels."""
    bits = range(column // _WORDS, (column + columns) // _WORDS)
    masks = [1 << bit if bit < 31 else -(2**31) for bit in bits]
    parts = [(words & jnp.int32(mask)) != 0 for mask in masks]
    return lax.concatenate(parts, 1)
