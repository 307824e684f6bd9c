"""Initial vectors of ids, which are also read for ids without a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparsejax.embeddings.feature_batch import WITHOUT_ROW
from sparsejax.embeddings.placement import Stack, column, drawn_rows
from sparsejax.mesh.exchange import DividedRows, SentKeys
from sparsejax.mesh.layout import axis_sizes, call_on_each_device
from sparsejax.ops.hash_index import TableKeys
from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR, sums_so_far

# Number of ids whose vectors are computed at a time; smaller in a predictor, whose requests are
# small.
BLOCK = 8192
_BLOCK_OF_PREDICTOR = 256


class Guests(NamedTuple):
    """Ids without a row, in the order of their bags. Entries from `count` on are arbitrary.

    Attributes:
      keys: keys of the ids.
      bag: number of the bag of each id.
      weight: weight of each id's vector.
      count: number of ids without a row.
    """

    keys: TableKeys
    bag: Int[Array, "ids"]
    weight: Float[Array, "ids"]
    count: Int[Array, ""]


def drawn(stack: Stack, seed: jax.Array, keys: TableKeys) -> Float[Array, "keys dim"]:
    """The initial vector of each key, which depends only on the seed, the table and the key."""
    fold_in = jax.vmap(jax.random.fold_in)
    number = column(table.number for table in stack.tables)[keys.table, 0]
    base = jax.random.wrap_key_data(seed, impl="threefry2x32")
    of_table = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(base, number)
    random = fold_in(fold_in(of_table, keys.high), keys.low)
    return drawn_rows(stack, random, keys.table)


def apart(
    x: CSR, keys: TableKeys, order: jax.Array | None = None
) -> tuple[CSR, Guests, jax.Array | None]:
    """Separates entries whose ids have rows from the others; also returns an order of the
    former.
    """
    ends, size = jnp.asarray(x.indptr), x.nse
    place = jnp.arange(size, dtype=jnp.int32)
    used = place < jnp.minimum(ends[-1], size)
    without = used & (x.indices == WITHOUT_ROW)
    kept = used & ~without

    weight = jnp.ones(size, jnp.float32) if x.data is None else jnp.asarray(x.data)
    entries = x.data, jnp.asarray(x.indices), ends, order

    def some():
        guests = _moved(without, (keys, x.row_ids(), weight))
        counted = sums_so_far(kept)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), counted])
        # Rows of the matrix that are marked as overfull stay marked.
        indptr = jnp.where(ends > size, size + 1, before[jnp.minimum(ends, size)])
        data, columns, after = _moved(kept, (entries[0], entries[1], order))
        return (data, columns, indptr, after), guests

    def none():
        return entries, jax.tree.map(jnp.zeros_like, (keys, x.indices, weight))

    count = jnp.sum(without, dtype=jnp.int32)
    # Usually all ids have rows. Then nothing is moved.
    leaves, (ids, bag, weight) = lax.cond(count > 0, some, none)
    *leaves, order = leaves
    found = CSR.tree_unflatten(x.num_cols, (*leaves, None))
    return found, Guests(ids, bag, weight, count), order


def _moved[Tree](mask: Bool[Array, "ids"], values: Tree) -> Tree:
    """Moves the values in the mask to the front, in order, followed by zeros."""
    size = mask.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    at = jnp.where(mask, sums_so_far(mask) - 1, size + place)

    def moved(values):
        zeros = jnp.zeros_like(values)
        return zeros.at[at].set(values, mode="drop", unique_indices=True)

    return jax.tree.map(moved, values)


@dataclasses.dataclass(frozen=True)
class _WithGuestsOfOwner:
    """Adds the vectors of ids without a row to the rows that are sent between devices.

    Attributes:
      stack: stack of the tables.
    """

    stack: Stack

    def __call__(
        self,
        keys: TableKeys,
        without: Bool[Array, "slots"],
        weight: Float[Array, "slots"],
        seed: UInt32[Array, "2"] | None,
        read: Callable[[], Float[Array, "slots dim"]],
    ) -> Float[Array, "slots dim"]:
        size = len(without)

        def some():
            rows = read()
            place = jnp.arange(size, dtype=jnp.int32)
            # No row was read for these ids, so they are NaN until now.
            rows = rows.at[jnp.where(without, place, size + place)].set(
                0, mode="drop", unique_indices=True
            )
            if seed is None:
                return rows
            count = jnp.sum(without, dtype=jnp.int32)
            guests = Guests(*_moved(without, (keys, place, weight)), count)
            return _with_some(self.stack, rows, guests, jnp.int32(0), seed)

        # Usually all ids have rows. The host waits for this condition before rows are read, while
        # the device is idle anyway; then it launches all later work.
        return lax.cond(jnp.any(without), some, read)


def beside_owned(stack: Stack, sent: SentKeys, seed: jax.Array | None) -> DividedRows:
    """Returns `sent.rows` with a function that makes vectors for ids without a row in the table.

    The device that owns an id calls it when it reads rows. The vectors are drawn with `seed`, or
    are zeros if it is None.
    """
    route = sent.rows.route
    assert route is not None
    without = (sent.times != 0) & (route.owned.indices == route.owned.num_cols)
    weight = (sent.times > 0).astype(jnp.float32)
    if seed is not None:
        seed = jnp.broadcast_to(seed, (*sent.times.shape[:2], len(seed)))
    add = _WithGuestsOfOwner(stack)
    add = jax.tree_util.Partial(add, sent.keys, without, weight, seed)
    return dataclasses.replace(sent.rows, route=route._replace(beside=add))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_guests(
    stack: Stack,
    divided: bool,
    y: Float[Array, "bags dim"],
    guests: Guests,
    seed: jax.Array,
) -> Float[Array, "bags dim"]:
    """Adds to `y` the initial vectors of ids without a row. They have no gradient.

    If devices divide the bags, each adds the vectors of its own bags.
    """
    if not divided:
        return _with_some(stack, y, guests, jnp.int32(0), seed)

    def part(y, guests, seed):
        number = lax.axis_index("data") * axis_sizes()[1] + lax.axis_index("model")
        bag = guests.bag - number * len(y)
        # Guests are sorted by bag, so those of a device are adjacent.
        used = jnp.arange(len(bag), dtype=jnp.int32) < guests.count
        first, end = (
            jnp.sum(used & (bag < bound), dtype=jnp.int32) for bound in (0, len(y))
        )
        mine = guests._replace(bag=bag, count=end)
        return _with_some(stack, y, mine, first, seed)

    by_device = P(("data", "model"))
    return call_on_each_device(
        part, (y, guests, seed), (by_device, P(), P()), by_device
    )


def _with_some(
    stack: Stack, y: jax.Array, guests: Guests, start: jax.Array, seed: jax.Array
) -> jax.Array:
    """Adds to `y` the vectors of the guests from `start` on."""
    size = guests.bag.shape[0]
    if isinstance(size, int):
        block = min(BLOCK, size)
    else:  # in a predictor, the seed is an argument of the compiled program
        block = _BLOCK_OF_PREDICTOR
        more = {"pad_width": (0, block)}
        guests = jax.tree.map(lambda a: jnp.pad(a, **more) if a.ndim else a, guests)
        size = guests.bag.shape[0]
    if block == 0:
        return y
    bags, dtype = len(y), accumulator(y.dtype)

    def add(state):
        start, y = state
        # The last block starts earlier, so that it does not exceed the array.
        first = jnp.minimum(start, size - block)
        mine = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, first, block),
            guests._replace(count=jnp.arange(size, dtype=jnp.int32)),
        )
        counts = (mine.count >= start) & (mine.count < guests.count)
        vectors = drawn(stack, seed, mine.keys).astype(dtype)
        vectors *= jnp.where(counts, mine.weight, 0).astype(dtype)[:, None]
        bag = jnp.where(counts, mine.bag, bags)
        # Adjacent guests of a bag are summed in a fixed order; each bag is written once.
        begins = jnp.concatenate([jnp.ones(1, bool), bag[1:] != bag[:-1]])

        def join(a, b):
            return a[0] | b[0], jnp.where(b[0][:, None], b[1], a[1] + b[1])

        _, sums = lax.associative_scan(join, (begins, vectors))
        ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)]) & (bag < bags)
        at = jnp.where(ends, bag, bags + jnp.arange(block, dtype=jnp.int32))
        before = y.at[at].get(mode="fill", fill_value=0).astype(dtype)
        after = (before + sums).astype(y.dtype)
        y = y.at[at].set(after, mode="drop", unique_indices=True)
        return start + block, y

    return lax.while_loop(lambda state: state[0] < guests.count, add, (start, y))[1]


with_guests.defvjp(
    lambda stack, divided, *operands: (with_guests(stack, divided, *operands), None),
    lambda stack, divided, _, slope: (slope, None, None),
)
