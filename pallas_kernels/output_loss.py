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
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import score_tiles as tiles
from pallas_kernels.matmul_tiles import LAYOUT, ROWS

_WORDS = tiles.TILE_ITEMS // 32
SLOPES_COLUMNS = 64  # that are written at once
_PIECE = 16  # columns that are worked on at once
_LOG2E = math.log2(math.e)
_LEAST = 8  # columns of the smallest array


def label_words(
    rows: Int[Array, "nse"], columns: Int[Array, "nse"], batch: int, size: int
) -> Int[Array, "batch words"]:
    """The bits of labels at (row, column), see above; what is outside is left out.

    A sum of different bits, so there must be no duplicates.
    """
    inside = (columns >= 0) & (columns < size)
    word, bit = word_and_bit(columns)
    bit = jnp.left_shift(jnp.int32(1), bit)
    words = jnp.zeros((batch, size // 32), jnp.int32)
    word = jnp.where(inside, word, words.shape[1])
    return words.at[rows, word].add(bit, mode="drop")


def word_and_bit(
    columns: Int[Array, "..."],
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """In which word of a row the bit of a column is, and where there."""
    word = columns // tiles.TILE_ITEMS * _WORDS + columns % _WORDS
    return word, columns % tiles.TILE_ITEMS // _WORDS


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
) -> tuple[Float[Array, "parts batch"] | None, Float[Array, "batch size"]]:
    """`function` of the scores of items `start .. start + size - 1`.

    ::

        scores = (h . kernel_i) scale_i + bias_i                        float32
        values, slopes = function(scores, 1, listed, *vectors)      element by element

    A function may return `odds` between the two, which are at least 0: then its values
    are `values + log(1 + odds)`, and a logarithm is taken of the product of some.

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

    Returns:
      The values, summed over each 128 items, or None; the slopes in bfloat16.
    """
    batch = h.shape[0]
    layer = ItemLayer(bias, scale)
    values = jax.ShapeDtypeStruct((size // tiles.COLUMNS, batch), jnp.float32)
    made = tiles.score_tiles(
        "slopes",
        SlopesEpilogue(function, layer, with_values),
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), words, *vectors],
        [values] * with_values + [jax.ShapeDtypeStruct((batch, size), h.dtype)],
        start=start,
        size=size,
        scratch=slopes_scratch(tiles.WARPGROUPS, 1, h.dtype),
    )
    return made[0] if with_values else None, made[-1]


class SlopesEpilogue:
    """What `slopes` does with the scores of a tile, see `score_tiles`."""

    def __init__(self, function: Callable, layer: ItemLayer, with_values: bool):
        self.function, self.layer, self.with_values = function, layer, with_values

    def __call__(self, make, row, column, warpgroup, scalars, inputs, outputs, smem):
        vectors, words = self.vectors(row, inputs), self.words(row, column, inputs)
        products, sums = make(), self.no_sums()
        for c in range(0, tiles.COLUMNS, SLOPES_COLUMNS):
            part = products[:, c : c + SLOPES_COLUMNS]
            place, refs = (row, column, c, warpgroup), (inputs, outputs, smem)
            sums = self.part(part, words, vectors, sums, place, scalars, refs)
        for ref in outputs[:-1]:
            values = jnp.sum(self.total(sums), axis=1)
            ref[column // tiles.COLUMNS, pl.ds(row, ROWS)] = values

    def vectors(self, row, inputs) -> list:
        """The numbers of the 64 rows."""
        _, _, *refs = self.layer.split(inputs)
        return [tiles.row_vector(ref, row) for ref in refs]

    def words(self, row, column, inputs):
        """The bits of a tile."""
        _, words_gmem, *_ = self.layer.split(inputs)
        return load_words(words_gmem, row, column)

    def no_sums(self):
        """Of no values."""
        zeros = tiles.column_numbers(_LEAST).astype(jnp.float32) * 0.0
        return zeros, zeros

    def total(self, sums):
        """`[64, _]`, the values: their sums over the columns are wanted."""
        total, odds = sums
        return total + _log1p(odds)

    def part(self, products, words, vectors, sums, place, scalars, refs):
        """Works on 64 columns of a tile, and leaves their slopes in shared memory too.

        Args:
          products: `[64, SLOPES_COLUMNS]`.
          words: of the tile.
          vectors: see above.
          sums: `no_sums()` or what the last part returned.
          place: of the tile: first row and column; column of the part in it; warpgroup.
          scalars: first item, and the first one that does not count.
          refs: inputs and outputs in global memory, and `slopes_scratch`.
        """
        (row, column, c, warpgroup), (first, end) = place, scalars
        inputs, (*_, slopes_gmem), smem = refs
        layer_refs, *_ = self.layer.split(inputs)
        slots = smem.shape[1]
        slot = c // SLOPES_COLUMNS % slots
        vectors = [tiles.spread_rows(vector, _PIECE) for vector in vectors]

        def piece(i, operands, masked):
            products, words, (total, odds) = operands
            item = first + column + c + i
            scores = self.layer.apply(layer_refs, products[:, i : i + _PIECE], item)
            bits = listed(words, c + i, _PIECE)
            made = self.function(scores, jnp.ones_like(scores), bits, *vectors)
            if masked:
                inside = tiles.column_numbers(_PIECE) < end - item
                made = [None if x is None else jnp.where(inside, x, 0.0) for x in made]
            values, *more, slopes = made
            for j in range(0, _PIECE if self.with_values else 0, _LEAST):
                total = total + values[:, j : j + _LEAST]
                for x in more:
                    x = x[:, j : j + _LEAST]
                    odds = odds * (1 + x) + x  # (1 + odds) (1 + x) - 1
            return slopes.astype(smem.dtype), (total, odds)

        def work(masked):
            operands = products, words, sums
            if masked:  # else LLVM hoists what both branches do, which costs registers
                operands = lax.optimization_barrier(operands)
            *operands, after = operands
            pieces = []
            for i in range(0, SLOPES_COLUMNS, _PIECE):
                slopes, after = piece(i, (*operands, after), masked)
                pieces.append(slopes)
            # What was there must have been read.
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            smem[warpgroup, slot] = lax.concatenate(pieces, 1)
            return after

        all_inside = first + column + c + SLOPES_COLUMNS <= end
        after = lax.cond(all_inside, lambda: work(False), lambda: work(True))
        plgpu.commit_smem()
        target = pl.ds(row, ROWS), pl.ds(column + c, SLOPES_COLUMNS)
        plgpu.copy_smem_to_gmem(smem.at[warpgroup, slot], slopes_gmem.at[*target])
        return after


def slopes_scratch(warpgroups: int, slots: int, dtype: jnp.dtype):
    """The shared memory of `SlopesEpilogue`, for `slots` times 64 columns."""
    shape = warpgroups, slots, ROWS, SLOPES_COLUMNS
    return plgpu.SMEM(shape, dtype, transforms=LAYOUT)


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
) -> list[Float[Array, "parts batch"]]:
    """What softmax needs to know of the scores, for each 128 items.

    The arguments are those of `slopes`.

    Returns:
      The largest score; the sum of exp(score - largest), from 0 if the largest is -inf;
      the number of labels; the sum of their scores.
    """
    batch = h.shape[0]
    layer = ItemLayer(bias, scale)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, words_gmem = layer.split(inputs)
        words = load_words(words_gmem, row, column)
        products = make()
        parts = range(0, tiles.COLUMNS, _LEAST)

        def scores_of(c, products, masked):
            item = first + column + c
            scores = layer.apply(layer_refs, products[:, c : c + _LEAST], item)
            if masked:
                inside = tiles.column_numbers(_LEAST) < end - item
                scores = jnp.where(inside, scores, -jnp.inf)
            return scores

        def finish(masked):
            operands = products, words
            if masked:  # see `slopes`
                operands = lax.optimization_barrier(operands)
            scores = [scores_of(c, operands[0], masked) for c in parts]
            largest = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
            shift = jnp.where(largest == -jnp.inf, 0.0, largest) * _LOG2E
            shift = tiles.spread_rows(shift, _LEAST)
            total = count = found = jnp.zeros_like(shift)
            for c, x in zip(parts, scores, strict=True):
                bits = listed(operands[1], c, _LEAST)
                total = total + jnp.exp2(x * _LOG2E - shift)
                count = count + jnp.where(bits, 1.0, 0.0)
                found = found + jnp.where(bits, x, 0.0)
            place = column // tiles.COLUMNS, pl.ds(row, ROWS)
            sums = [jnp.sum(x, axis=1) for x in (total, count, found)]
            for ref, x in zip(outputs, (largest, *sums), strict=True):
                ref[place] = x

        all_inside = first + column + tiles.COLUMNS <= end
        lax.cond(all_inside, lambda: finish(False), lambda: finish(True))

    out = jax.ShapeDtypeStruct((size // tiles.COLUMNS, batch), jnp.float32)
    return tiles.score_tiles(
        "normalise",
        epilogue,
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), words],
        [out] * 4,
        start=start,
        size=size,
    )


class ItemLayer:
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

    def denied(self, refs, item, columns: int) -> list:
        """Whether the bias is -inf, `[64, columns]`, if there is one."""
        if self.bias is None:
            return []
        return [tiles.spread_columns(refs[-1], item, columns) == -jnp.inf]


def _log1p(x):
    """`log(1 + x)` for x from 0 on, with a small relative error also of small results."""
    z = x * jnp.square(lax.rsqrt(x + 2.0))
    square = jnp.square(z)
    series = 2 / 13
    for power in range(11, 0, -2):
        series = series * square + 2 / power
    return jnp.where(x < 1.0, series * z, jnp.log(x + 1.0))


def load_words(words_gmem, row, column):
    """`[64, 8]` words of a tile, with the bits from item `column` of it on."""
    first = pl.multiple_of(column // tiles.TILE_ITEMS * _WORDS, _WORDS)
    block = words_gmem.at[pl.ds(row, ROWS), pl.ds(first, _WORDS)]
    words = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
    return lax.shift_right_logical(words, lax.rem(column, tiles.TILE_ITEMS) // _WORDS)


def listed(words, column: int, columns: int):
    """`[64, columns]` whether items from `column` of the tile on are labels."""
    bits = range(column // _WORDS, (column + columns) // _WORDS)
    masks = [1 << bit if bit < 31 else -(2**31) for bit in bits]
    parts = [(words & jnp.int32(mask)) != 0 for mask in masks]
    return lax.concatenate(parts, 1)
