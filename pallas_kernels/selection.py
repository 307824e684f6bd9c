"""The positions of each row's largest numbers: a Mosaic GPU program, and JAX around it.

::

        number    7 1 8 9 3 ... | 3 2 8 0 6 ...       k is 4, and 6 divides the row
        above     1 0 1 1 0 ... | 0 0 1 0 0 ...       larger than 6, as bits of words
        equal     0 0 0 0 0 ... | 0 0 0 0 1 ...       equal to 6, taken if `above` has too few

    Sorting only 512 numbers takes a GPU longer than all of this.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import mosaic as plgpu

_LANES = 128  # threads of a warpgroup
_PIECE = 64 * _LANES  # most numbers that a warpgroup has in registers
_LEAST, _LARGEST = -(2**31), 2**31 - 1
_INFINITY = 0x7F800000  # the bits of infinity
_WORDS = 8  # number of words whose bits are counted together
# A row with more numbers than the first constant is divided into groups of neighbours, of the size
# of the second, so that each pass over the remaining numbers stays in registers.
_MANY, _GROUP = 2 * _PIECE, 32


def best_places(
    numbers: Float[Array, "batch count"], k: int
) -> Int[Array, "batch places"]:
    """Positions of the `k` largest numbers of each row, or of all if there are fewer.

    The positions are ascending. Of equal numbers the first ones are taken. NaN counts
    as the largest number.
    """
    batch, count = numbers.shape
    if count <= k:
        every = jnp.arange(count, dtype=jnp.int32)[None]
        return jnp.broadcast_to(every, (batch, count))
    if count > max(_MANY, 2 * _GROUP * k):
        missing = (0, 0), (0, -count % _GROUP)
        padded = jnp.pad(numbers, missing, constant_values=-jnp.inf)
        maxima = jnp.max(padded.reshape(batch, -1, _GROUP), axis=2)
        return best_places_inside(maxima, padded, k)
    least = parting(numbers, k)[:, None, None]
    extra = -count % (32 * _WORDS)
    keys = jnp.pad(numbers, ((0, 0), (0, extra)), constant_values=-jnp.inf)
    keys = in_order(keys).reshape(batch, -1, 32)
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))
    above, equal = (
        jnp.sum(jnp.where(x, bits[None, None], 0), axis=2, dtype=jnp.uint32)
        for x in (keys > least, keys == least)
    )
    counts = _num_bits(jnp.stack([above, equal])).reshape(2, batch, -1, _WORDS).sum(3)
    ends = jnp.cumsum(counts, axis=2)
    missing = k - ends[0, :, -1:]
    ended = ends[0] + jnp.minimum(ends[1], missing)
    # The n-th position is found by its group of words first, then by its word.
    n = jnp.arange(k, dtype=jnp.int32)[None]
    at = jnp.sum(ended[:, None] <= n[:, :, None], axis=2, dtype=jnp.int32)
    above_before, equal_before = (pick(x, at) for x in ends - counts)
    n = n - above_before - jnp.minimum(equal_before, missing)
    missing = jnp.maximum(missing - equal_before, 0)
    at *= _WORDS
    found = [jnp.zeros_like(at)] * 3
    words = [jnp.zeros(at.shape, jnp.uint32)] * 2
    for i in range(_WORDS):
        here = [pick(x, at + i) for x in (above, equal)]
        taken = jnp.minimum(_num_bits(here[1]), missing)
        total = _num_bits(here[0]) + taken
        is_here = (n >= 0) & (n < total)
        words = [jnp.where(is_here, *x) for x in zip(here, words, strict=True)]
        now = at + i, n, missing
        found = [jnp.where(is_here, *x) for x in zip(now, found, strict=True)]
        n, missing = n - total, missing - taken
    at, n, missing = found
    return 32 * at + _nth_bit(words[0] | _first_bits(words[1], missing), n)


def best_places_inside(
    maxima: Float[Array, "batch groups"], numbers: Float[Array, "batch count"], k: int
) -> Int[Array, "batch places"]:
    """`best_places` of the numbers, given the maxima of groups of neighbours.

    The k best numbers are in the k best groups, so only these groups are searched.
    """
    size = numbers.shape[1] // maxima.shape[1]
    groups = best_places(maxima, k)
    found = best_places(pick(numbers, groups, size), k)
    return pick(members(groups, size), found)


def members(
    groups: Int[Array, "batch groups"], size: int
) -> Int[Array, "batch places"]:
    """Positions of the `size` members of each group."""
    within = jnp.arange(size, dtype=jnp.int32)[None, None]
    return (groups[:, :, None] * size + within).reshape(groups.shape[0], -1)


def pick(
    array: Shaped[Array, "batch count"],
    groups: Int[Array, "batch groups"],
    size: int = 1,
) -> Shaped[Array, "batch places"]:
    """The `size` members of some groups of each row."""
    # Gathered from a flat array, because `take_along_axis` would first write its indices to
    # memory.
    batch, count = array.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * (count // size)
    flat = array.reshape(-1, size).at[rows + groups]
    return flat.get(mode="promise_in_bounds").reshape(batch, -1)


def _num_bits(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _first_bits(words: jax.Array, n: jax.Array) -> jax.Array:
    """Keeps the lowest n set bits of each word, and clears the others."""
    below = jnp.left_shift(jnp.uint32(1), _nth_bit(words, n).astype(jnp.uint32)) - 1
    return jnp.where(n >= _num_bits(words), words, words & below)


def _nth_bit(words: jax.Array, n: jax.Array) -> jax.Array:
    """The position of the set bit above exactly n other set bits."""
    place = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        low = words & jnp.uint32((1 << width) - 1)
        count = _num_bits(low)
        upper = n >= count
        place += jnp.where(upper, width, 0)
        n = jnp.where(upper, n - count, n)
        words = jnp.where(upper, words >> width, low)
    return place


def in_order(numbers: Float[Array, "..."]) -> Int[Array, "..."]:
    """Maps floats to int32 numbers with equal order. NaN is the largest; 0 and -0 are equal."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    bits = jnp.where(bits < 0, _LEAST - bits, bits)
    # Mosaic treats the result of `where` as signed only if its second operand is signed.
    return jnp.where(jnp.abs(bits) <= _INFINITY, bits, _LARGEST)


def parting(numbers: Float[Array, "batch count"], k: int) -> Int[Array, "batch"]:
    """For each row a number, `in_order`, that divides its `k` largest from the others.

    At most `k` numbers of the row are larger, and at least `k` are as large or larger. The
    number is found bit by bit, by counting; it need not occur in the row. A program
    has one row and counts in registers.
    """
    batch, count = numbers.shape
    piece = min(_PIECE, -(-count // _LANES) * _LANES)
    flat = numbers.reshape(-1)
    flat = jnp.pad(flat, (0, max(0, piece - flat.shape[0])))
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=1)

    def parting_body(numbers_gmem, out_gmem):
        row = lax.axis_index("row")

        def load(first):
            # A piece may extend beyond the row: numbers of other rows do not count.
            start = row * count + first
            shift = jnp.maximum(start + piece - flat.shape[0], 0)
            at = numbers_gmem.at[pl.ds(start - shift, piece)]
            keys = in_order(plgpu.load(at, layout=layout, optimized=False))
            place = plgpu.broadcasted_iota(jnp.int32, (piece,), 0, layout=layout)
            inside = (place >= shift) & (place < count - first + shift)
            return jnp.where(inside, keys, _LEAST)

        kept = load(0) if count <= piece else None

        def not_below(least):
            def counted(i, total):
                keys = load(i * piece) if kept is None else kept
                return total + jnp.sum(jnp.where(keys >= least, 1, 0))

            if kept is not None:
                return counted(0, 0)
            return lax.fori_loop(0, pl.cdiv(count, piece), counted, jnp.int32(0))

        def narrow(state):
            i, least, _ = state
            higher = least + lax.shift_left(jnp.int32(1), i)
            found = not_below(higher)
            return i - 1, jnp.where(found >= k, higher, least), found

        def unfinished(state):
            i, _, found = state
            return (i >= 0) & (found != k)

        found = not_below(jnp.int32(0))
        least = jnp.where(found >= k, jnp.int32(0), jnp.int32(_LEAST))
        state = lax.while_loop(unfinished, narrow, (jnp.int32(30), least, found))
        out_gmem[row] = state[1]

    parting_body.__name__ = "parting"
    return plgpu.kernel(
        parting_body,
        out_type=jax.ShapeDtypeStruct((batch,), jnp.int32),
        grid=(batch,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(flat)
