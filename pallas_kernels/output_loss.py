"""Mosaic GPU programs for Hopper: functions of scores that the output layer's loss needs.

Scores are computed in registers (`score_tiles`). There they are converted to score
gradients, rounded to bfloat16, or to the sums that softmax needs first. Bits mark the items
that are labels, so that no result has to be corrected afterwards::

    word [b, 8 (i // 256) + i % 8], bit (i % 256) // 8        item i of row b

In this order a thread finds the bits of its scores in two words for all of a
tile's 256 items. If each row has one label, its column is compared instead (`Targets`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels import score_tiles as tiles
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, num_programs, transforms

_WORDS = tiles.TILE_ITEMS // 32
SLOPES_COLUMNS = 64  # number of columns of slopes that are written at once
_PIECE = 16  # number of columns that are computed at once
_LOG2E = math.log2(math.e)
_LEAST = 8  # number of columns in the smallest array


def label_words(
    rows: Int[Array, "nse"],
    columns: Int[Array, "nse"],
    batch: int,
    size: int,
    *,
    counted: bool = False,
) -> Int[Array, "rows words"]:
    """The words with the bits of labels at (row, column), in the layout of the module's text.

    Labels outside `[batch, size]` are ignored. Bits are added, so there must be no
    duplicates. If `counted`, `batch` must be a multiple of 64. Then a row is appended for
    each 64 rows, with the number of labels in each 64 columns.
    """
    inside = (columns >= 0) & (columns < size) & (rows < batch)
    word, bit = word_and_bit(columns)
    bit = jnp.left_shift(jnp.int32(1), bit)
    if counted:
        rows = jnp.stack([rows, batch + rows // ROWS])
        word = jnp.stack([word, columns // SLOPES_COLUMNS])
        bit = jnp.stack([bit, jnp.ones_like(bit)])
    more = batch // ROWS if counted else 0
    words = jnp.zeros((batch + more, size // 32), jnp.int32)
    word = jnp.where(inside, word, words.shape[1])
    return words.at[rows, word].add(bit, mode="drop")


class Targets(NamedTuple):
    """Labels for rows with one label each, in place of `label_words`.

    Attributes:
      columns: the item that is the label of each row; a number that is no item means no label.
      blocks: whether there is a label in each block of 64 rows and 64 columns.
    """

    columns: Int[Array, "batch"]
    blocks: Int[Array, "blocks_of_rows blocks_of_columns"]

    @classmethod
    def of(cls, columns: Int[Array, "batch"], size: int) -> Targets:
        """The targets among `size` items; the batch is a multiple of 64."""
        block = jnp.where(columns < 0, -1, columns // SLOPES_COLUMNS)
        block = jnp.reshape(block, (-1, ROWS, 1))
        numbers = jnp.arange(size // SLOPES_COLUMNS, dtype=jnp.int32)
        blocks = jnp.any(block == numbers[None, None], axis=1)
        return cls(columns, blocks.astype(jnp.int32))


Labels = Int[Array, "rows words"] | Targets


def word_and_bit(
    columns: Int[Array, "..."],
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """The word of a row that contains the bit of a column, and the bit's position in the word."""
    word = columns // tiles.TILE_ITEMS * _WORDS + columns % _WORDS
    return word, columns % tiles.TILE_ITEMS // _WORDS


def slopes(
    function: Callable,
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    labels: Labels,
    vectors: Sequence[Float[Array, "batch"]],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
    with_values: bool = True,
) -> tuple[Float[Array, "parts batch"] | None, Float[Array, "batch size"]]:
    """Applies `function` to the scores of items `start .. start + size - 1`.

    ::

        scores = (h . kernel_i) scale_i + bias_i                        float32
        values, slopes = function(scores, 1, listed, *vectors)      element by element

    A function may also return `values, odds, slopes`, with odds from 0 to 1. Its values
    are then `values + log(1 + odds)`, and one logarithm is taken of a product of several
    `1 + odds`.

    Args:
      function: function that gets float32 arrays `[rows, columns]`. Only `listed` is bool: it
        is true for items that are labels. The function may only use operations that Mosaic GPU
        can lower.
      h: bfloat16; the number of rows is a multiple of 128.
      kernel: bfloat16, see `score_tiles.unsupported`.
      bias: float32 or None.
      scale: float32 or None.
      labels: `label_words` of these items, `counted`; or `Targets`, whose columns are numbered
        from `start`.
      vectors: float32, one number for each row. The first is the row's weight; where it
        is 0, all slopes are 0.
      start: first item.
      size: number of items, a multiple of 256.
      limit: items from this row of the kernel on have value 0 and slope 0.
      with_values: whether to return the values.

    Returns:
      The values, summed over each 128 items, or None; the slopes in bfloat16.
    """
    batch = h.shape[0]
    layer = ItemLayer(bias, scale)
    of_labels = label_arrays(labels)
    values = jax.ShapeDtypeStruct((size // tiles.COLUMNS, batch), jnp.float32)
    made = tiles.score_tiles(
        "slopes",
        SlopesEpilogue(function, layer, len(of_labels), with_values),
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), *slopes_inputs(of_labels, vectors)],
        [values] * with_values + [jax.ShapeDtypeStruct((batch, size), h.dtype)],
        start=start,
        size=size,
        scratch=slopes_scratch(tiles.WARPGROUPS, SLOPES_COLUMNS, h.dtype),
    )
    return made[0] if with_values else None, made[-1]


def slopes_inputs(of_labels, vectors) -> list[jax.Array]:
    """The arrays that `SlopesEpilogue` reads from global memory, in its order."""
    weights = jnp.reshape(vectors[0], (-1, ROWS))
    weightless = jnp.any(weights == 0, axis=1).astype(jnp.int32)
    return [*of_labels, weightless, *vectors]


class SlopesEpilogue:
    """Computes `slopes` from the scores of a tile, see `score_tiles`.

    The first `num_labels` of its inputs are `label_arrays`.
    """

    def __init__(
        self, function: Callable, layer: ItemLayer, num_labels: int, with_values: bool
    ):
        self.function, self.layer, self.with_values = function, layer, with_values
        self.num_labels = num_labels

    def __call__(self, make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, *inputs = self.layer.split(inputs)
        layer_refs = [
            ref.at[pl.ds(first + column, tiles.COLUMNS)] for ref in layer_refs
        ]
        of_rows = self.of_rows(row, inputs)
        labels = self.labels(row, column, inputs)
        products, sums = make(), self.no_sums()
        for c in range(0, tiles.COLUMNS, SLOPES_COLUMNS):
            part = products[:, c : c + SLOPES_COLUMNS]
            slopes, sums = self.part(
                part, c, labels, of_rows, sums, end - (first + column), layer_refs
            )
            self.write(slopes, row, column + c, smem.at[warpgroup], outputs)
        for ref in outputs[:-1]:
            values = jnp.sum(self.total(sums), axis=1)
            ref[div(column, tiles.COLUMNS), pl.ds(row, ROWS)] = values

    def of_rows(self, row, inputs) -> tuple:
        """For 64 rows: whether the weight of any row is 0, and the `vectors` of the rows."""
        weightless_gmem, *refs = inputs[self.num_labels :]
        return weightless_gmem[div(row, ROWS)], [
            tiles.row_vector(ref, row) for ref in refs
        ]

    def labels(self, row, column, inputs) -> tuple:
        """The labels of a tile, as `listed` takes them, and their number in each part of the
        tile.
        """
        return load_labels(inputs[: self.num_labels], row, column)

    def no_sums(self):
        """The initial sums, for the first part of a tile."""
        zeros = tiles.column_numbers(_LEAST).astype(jnp.float32) * 0.0
        return zeros, zeros

    def total(self, sums):
        """Converts sums to an array `[64, _]` whose sums over the columns are the values."""
        total, odds = sums
        return total + _log1p(odds)

    def part(self, products, c, labels, of_rows, sums, count, layer_refs):
        """Computes the slopes of 64 columns of a tile.

        Args:
          products: `[64, SLOPES_COLUMNS]`.
          c: first column in the tile.
          labels: the result of the method `labels` for the tile.
          of_rows: the result of the method `of_rows`.
          sums: `no_sums()`, or the sums that the last call returned.
          count: items of the tile from this one on do not count.
          layer_refs: references to scales and biases of the tile's items.

        Returns:
          The slopes, and the sums.
        """
        places, numbers = labels
        weightless, vectors = of_rows
        vectors = [tiles.spread_rows(vector, _PIECE) for vector in vectors]

        def piece(i, products, places, sums, masked):
            total, odds = sums
            scores = self.layer.apply(layer_refs, products[:, i : i + _PIECE], c + i)
            if places is None:
                bits = tiles.column_numbers(_PIECE) < 0
            else:
                bits = listed(places, c + i, _PIECE)
            made = self.function(scores, jnp.ones_like(scores), bits, *vectors)
            values, *more, slopes = made
            if masked:
                inside = tiles.column_numbers(_PIECE) < count - (c + i)
                if self.with_values:
                    values, *more = (jnp.where(inside, x, 0.0) for x in (values, *more))
                slopes = jnp.where(inside & (vectors[0] != 0.0), slopes, 0.0)
            for j in range(0, _PIECE if self.with_values else 0, _LEAST):
                total = total + values[:, j : j + _LEAST]
                for x in more:
                    x = x[:, j : j + _LEAST]
                    odds = odds * (1 + x) + x  # (1 + odds) (1 + x) - 1
            return slopes.astype(jnp.bfloat16), (total, odds)

        def work(labelled=True, masked=False):
            operands = products, places, sums
            if masked or not labelled:
                # Without the barrier, LLVM hoists code that both branches contain, which takes
                # more registers.
                operands = lax.optimization_barrier(operands)
            mine, bits, after = operands
            pieces = []
            for i in range(0, SLOPES_COLUMNS, _PIECE):
                slopes, after = piece(
                    i, mine, bits if labelled else None, after, masked
                )
                pieces.append(slopes)
            return lax.concatenate(pieces, 1), after

        def unmasked():
            no_labels = numbers[c // SLOPES_COLUMNS] == 0
            return lax.cond(no_labels, lambda: work(labelled=False), work)

        inside = c + SLOPES_COLUMNS <= count
        plain = jnp.where(inside, weightless, 1) == 0
        return lax.cond(plain, unmasked, lambda: work(masked=True))

    def write(self, slopes, row, column, smem, outputs):
        """Writes slopes to `smem`, and starts their copy to global memory."""
        # Waits until an earlier copy from the buffer has ended.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[...] = slopes
        plgpu.commit_smem()
        target = pl.ds(row, ROWS), pl.ds(column, slopes.shape[1])
        plgpu.copy_smem_to_gmem(smem, outputs[-1].at[*target])


def slopes_scratch(warpgroups: int, columns: int, dtype: jnp.dtype):
    """Shared memory for the results that `SlopesEpilogue` writes."""
    return plgpu.SMEM((warpgroups, ROWS, columns), dtype, transforms=transforms())


def no_scores(
    batch: int, *, with_labels: bool = True
) -> list[Float[Array, "parts batch"]]:
    """The sums of a softmax before its first item, for the argument `known` of `normalise`.

    They are the largest score, -inf, and the sum of exponentials, 0; with labels also their number
    and the sum of their scores, both 0.
    """
    # Each program of `score_tiles` works on two blocks of 128 items at once.
    zeros = jnp.zeros((2 * num_programs(), batch), jnp.float32)
    return [zeros - jnp.inf, zeros, *([zeros, zeros] if with_labels else [])]


def normalise(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "rows words"] | None,
    known: Sequence[Float[Array, "parts batch"]],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
) -> list[Float[Array, "parts batch"]]:
    """Adds the scores of some items to `known`, the running sums of softmax.

    The other arguments are those of `slopes`.

    Args:
      words: `label_words`, `counted`; None if no sums of labels are needed.
      known: `no_scores(batch)`, or the result of a call for other items. It is written
        in place if it is donated.

    Returns:
      For each part of the items: the largest score; the sum of exp(score - largest), where
      0 replaces a largest score of -inf; with labels also their number and the sum of
      their scores.
    """
    layer = ItemLayer(bias, scale)
    of_labels = [] if words is None else label_arrays(words)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        layer_refs, *inputs = layer.split(inputs)
        labels_gmem, known_gmem = inputs[: len(of_labels)], inputs[len(of_labels) :]
        if labels_gmem:
            places, counts = load_labels(labels_gmem, row, column)
        part = 2 * lax.axis_index("program") + div(warpgroup, 2)
        refs = [ref.at[part] for ref in known_gmem]
        before = [tiles.row_vector(ref, row) for ref in refs]
        products = make()
        parts = range(0, tiles.COLUMNS, _LEAST)

        def scores_of(c, products, masked):
            item = first + column + c
            scores = layer.apply(layer_refs, products[:, c : c + _LEAST], item)
            if masked:
                inside = tiles.column_numbers(_LEAST) < end - item
                scores = jnp.where(inside, scores, -jnp.inf)
            return scores

        def sums_of_labels(scores):
            count = found = jnp.zeros_like(scores[0])
            for c, x in zip(parts, scores, strict=True):
                bits = listed(places, c, _LEAST)
                count = count + jnp.where(bits, 1.0, 0.0)
                found = found + jnp.where(bits, x, 0.0)
            return [
                y + jnp.sum(x, axis=1)
                for x, y in zip((count, found), before[2:], strict=True)
            ]

        def finish(masked):
            mine = products
            if masked:  # the branches are those of `SlopesEpilogue`
                mine = lax.optimization_barrier(mine)
            scores = [scores_of(c, mine, masked) for c in parts]
            largest = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
            largest = jnp.maximum(largest, before[0])
            shift = jnp.where(largest == -jnp.inf, 0.0, largest)
            shifts = tiles.spread_rows(shift * _LOG2E, _LEAST)
            total = jnp.zeros_like(shifts)
            for x in scores:
                total = total + jnp.exp2(x * _LOG2E - shifts)
            total = jnp.sum(total, axis=1)
            total = total + before[1] * jnp.exp2((before[0] - shift) * _LOG2E)
            sums = []
            if labels_gmem:
                # Mosaic lowers the last branch of a `cond` twice, so the shorter branch is last.
                sums = lax.cond(
                    sum(counts) != 0, lambda: sums_of_labels(scores), lambda: before[2:]
                )
            for ref, x in zip(refs, (largest, total, *sums), strict=True):
                ref[pl.ds(row, ROWS)] = x

        some_outside = first + column + tiles.COLUMNS > end
        lax.cond(some_outside, lambda: finish(True), lambda: finish(False))

    refs = [jax.new_ref(x) for x in known]
    tiles.score_tiles(
        "normalise",
        epilogue,
        h,
        kernel,
        (start, limit),
        [*layer.arrays(), *of_labels, *refs],
        [],
        start=start,
        size=size,
    )
    return [jax.freeze(ref) for ref in refs]


class ItemLayer:
    """The scale and the bias of each item; either may be None."""

    def __init__(self, bias, scale):
        self.bias, self.scale = bias, scale

    def arrays(self) -> list[jax.Array]:
        return [x for x in (self.scale, self.bias) if x is not None]

    def split(self, refs):
        count = len(self.arrays())
        return refs[:count], *refs[count:]

    def load(self, refs, item, columns: int) -> list:
        """The scales and biases of some items, for `applied`."""
        return [tiles.column_vector(ref, item, columns) for ref in refs]

    def apply(self, refs, products, item):
        return self.applied(self.load(refs, item, products.shape[1]), products)

    def applied(self, loaded, products):
        """The scores of `[64, columns]` products, with the values that `load` read for them."""
        spread = [tiles.down_rows(x) for x in loaded]
        if self.scale is not None:
            products = products * spread.pop(0)
        if self.bias is not None:
            products = products + spread.pop(0)
        return products

    def denied(self, loaded) -> list:
        """Masks `[64, columns]` of items whose bias is -inf, as a list; empty without a bias."""
        if self.bias is None:
            return []
        return [tiles.down_rows(loaded[-1]) == -jnp.inf]


def _log1p(x):
    """`log(1 + x)` for x >= 0. The relative error is small for small results, too."""
    z = x * jnp.square(lax.rsqrt(x + 2.0))
    square = jnp.square(z)
    series = 2 / 13
    for power in range(11, 0, -2):
        series = series * square + 2 / power
    return jnp.where(x < 1.0, series * z, jnp.log(x + 1.0))


def load_words(words_gmem, row, column):
    """Reads `[64, 8]` words of a tile, shifted so that the bits of item `column` come first."""
    first = pl.multiple_of(div(column, tiles.TILE_ITEMS) * _WORDS, _WORDS)
    block = words_gmem.at[pl.ds(row, ROWS), pl.ds(first, _WORDS)]
    words = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
    return lax.shift_right_logical(words, div(rem(column, tiles.TILE_ITEMS), _WORDS))


def label_arrays(labels: Labels) -> list[jax.Array]:
    """The arrays of the labels, for `load_labels`."""
    return list(labels) if isinstance(labels, Targets) else [labels]


def load_labels(refs, row, column):
    """Reads the labels of a tile, as `listed` takes them, and their number in each 64 columns."""
    place = div(column, SLOPES_COLUMNS)
    parts = range(tiles.COLUMNS // SLOPES_COLUMNS)
    if len(refs) == 2:
        columns_gmem, blocks_gmem = refs
        counts = [blocks_gmem[div(row, ROWS), place + i] for i in parts]
        return tiles.row_vector(columns_gmem, row) - column, counts
    (words_gmem,) = refs
    # There are 65 rows of words for each 64 rows.
    batch = words_gmem.shape[0] // (ROWS + 1) * ROWS
    at = batch + div(row, ROWS)
    counts = [words_gmem[at, place + i] for i in parts]
    return load_words(words_gmem, row, column), counts


def listed(labels, column: int, columns: int):
    """`[64, columns]`: whether the items from `column` of the tile on are labels."""
    if labels.ndim == 1:
        places = tiles.spread_rows(labels - column, columns)
        return tiles.column_numbers(columns) == places
    bits = range(column // _WORDS, (column + columns) // _WORDS)
    masks = [1 << bit if bit < 31 else -(2**31) for bit in bits]
    parts = [(labels & jnp.int32(mask)) != 0 for mask in masks]
    return lax.concatenate(parts, 1)
