"""Assigns rows to the ids of a batch: finds known ids, and gives new ids a row.

On a mesh every device has all ids, and processes those of its own parts. Other ids cost it only a
hash each, and only row numbers are exchanged. If ids were sent to the owners of their rows, a
device has only its own ids, once from each sender.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.embeddings.dynamic import admission, eviction, vectors
from sparsejax.embeddings.dynamic.state import (
    FOUND,
    INSERTED,
    REFUSED,
    WAITING,
    State,
    configs_of,
    counted,
    layout_of,
    numbers_of,
    policies_of,
)
from sparsejax.embeddings.feature_batch import WITHOUT_ROW, WRONG
from sparsejax.embeddings.placement import Stack
from sparsejax.embeddings.row_numbers import RowNumber
from sparsejax.mesh.exchange import SentKeys
from sparsejax.mesh.layout import call_on_each_device
from sparsejax.mesh.per_device import (
    found_anywhere,
    gather_over_data,
    on_any,
    on_each,
    own_block,
    own_place,
)
from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import Index, TableKeys
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers.optimizer import first_state
from sparsejax.optimizers.rules import Rule
from sparsejax.sparse import CSR, MAX_ENTRIES, sums_so_far

# Programs for few new ids are compiled separately: for none, up to a 64th, and up to an 8th of the
# ids of a batch. Small batches use one program.
_TIERS = 64, 8
_LEAST_FOR_TIERS = 4096
_TURNS = 64


class Trained(NamedTuple):
    """A kernel with the optimizer state of its rows.

    Attributes:
      w: `[rows, dim]`.
      arrays: `[rows, dim]`, `[rows, 1]` or `[rows]`.
    """

    w: Float[Array, "rows dim"]
    arrays: dict[str, jax.Array]


# The rows that assignment initializes: a `Trained`. `Number` has another type, as its rows are
# initialized later.
_Carry = Any


class Moment(NamedTuple):
    """Numbers of a step, equal on all devices.

    Attributes:
      seed: seed, two 32-bit words.
      now: current time of the clock.
      step: number of steps done by the optimizer.
    """

    seed: jax.Array
    now: jax.Array
    step: jax.Array


class _New(NamedTuple):
    """New ids that got a row; only the first `count` elements are valid."""

    rows: Int[Array, "ids"]
    keys: TableKeys
    count: Int[Array, ""]


class _Got(NamedTuple):
    """Distinct ids that requested a row.

    Attributes:
      rows: row number of each of them.
      got: bool: whether the id got its row now.
      of: the distinct ids, in their sorted order.
      missing: bool for each id of the batch: whether it requested a row.
      at: index of each id of the batch among the distinct ids.
    """

    rows: Int[Array, "some"]
    got: Bool[Array, "some"]
    of: hash_index.Distinct
    missing: Bool[Array, "ids"]
    at: Int[Array, "ids"]


@dataclasses.dataclass(frozen=True)
class Assign:
    """Assigns rows to the ids of a batch.

    Attributes:
      stack: stack of dynamic tables.
      rule: rule that trains the rows.
      keeps_seen: whether rows last seen at the current time are kept, as earlier batches of this
          step may use them.
    """

    stack: Stack
    rule: Rule
    keeps_seen: bool

    def __call__(
        self, state: State, trained: _Carry, x: CSR, keys: TableKeys, moment: Moment
    ) -> tuple[State, _Carry, Int[Array, "ids"]]:
        """Assigns rows; returns the new state and rows, and the column of each id; see
        `_given`.
        """
        times = _wanted(x).astype(jnp.int32)
        if x.nse == 0:
            return state, self._none_new(trained, times), jnp.asarray(x.indices)

        def part(state, trained, keys, times, moment):
            first = _first_part(state.index)
            state, trained, rows = self._given(
                state, trained, keys, times, moment, first
            )
            rows = found_anywhere(rows, first * layout_of(self.stack).rows)
            return state, self._of_all(trained), rows

        by_parts = P("model")
        state, trained, rows = on_each(
            part,
            (state, trained, keys, times, moment),
            (by_parts, by_parts, P(), P(), P()),
            (by_parts, self.new_spec, P()),
        )
        return state, trained, _columns(x, rows)

    # `Number` overrides the following methods for rows in host memory: these are initialized after
    # they were copied to the devices.

    new_spec: ClassVar[P] = P("model")

    def _none_new(self, trained: _Carry, times: Int[Array, "ids"]) -> _Carry:
        """The result for a batch whose new ids all got no row."""
        del times
        return trained

    def _of_all(self, trained: _Carry) -> _Carry:
        """The trained rows of all devices; called inside `shard_map`."""
        return trained

    def _new(self, trained: _Carry, new: _Got, moment: Moment) -> _Carry:
        """Initializes new rows."""
        size = len(new.rows)
        at = jnp.where(new.got, sums_so_far(new.got) - 1, size)
        begun = _New(
            _put(size, at, new.rows),
            TableKeys(*(_put(size, at, word) for word in new.of.keys)),
            jnp.sum(new.got, dtype=jnp.int32),
        )
        return self._begun(trained, begun, moment)

    def at_owners(
        self, state: State, trained: Trained, sent: SentKeys, moment: Moment
    ) -> tuple[State, Trained, SentKeys]:
        """Assigns rows to ids that were sent: each device processes the ids of its own parts."""

        def part(state, trained, keys, times, moment):
            keys, times = own_block((keys, times))
            size, first = len(times), _first_part(state.index)
            # Parts are replicated over the axis "data", so each copy must process the ids of all
            # devices.
            keys, times = gather_over_data((keys, times))
            state, trained, rows = self._given(
                state, trained, keys, times, moment, first
            )
            mine = lax.axis_index("data") * size
            rows = lax.dynamic_slice_in_dim(rows, mine, size)
            return state, trained, _columns_of_owner(state.index, rows)

        by_parts, by_device = P("model"), P("data", "model")
        state, trained, columns = call_on_each_device(
            part,
            (state, trained, sent.keys, sent.times, moment),
            (by_parts, by_parts, by_device, by_device, P()),
            (by_parts, by_parts, by_device),
        )
        return state, trained, sent.at(columns)

    def begin(
        self,
        trained: Trained,
        slots: Int[Array, "ids"],
        keys: TableKeys,
        new: Bool[Array, "ids"],
        moment: Moment,
    ) -> Trained:
        """Initializes the vector and state of new rows that were copied from host memory.

        Args:
          trained: rows and optimizer state on the devices.
          slots: slot of each id's row.
          keys: keys of the ids.
          new: bool: True for one id of each row to initialize.
          moment: time and step.
        """

        def part(trained, slots, keys, new, moment):
            size, ids = len(trained.w), len(slots)
            slots = slots - own_place() * size
            mine = new & (slots >= 0) & (slots < size)
            at = jnp.where(mine, sums_so_far(mine) - 1, ids)
            count = jnp.sum(mine, dtype=jnp.int32)
            rows, *words = (_put(ids, at, each) for each in (slots, *keys))
            return self._begun(trained, _New(rows, TableKeys(*words), count), moment)

        return on_each(
            part,
            (trained, slots, keys, new, moment),
            (P("model"), P(), P(), P(), P()),
            P("model"),
        )

    def _given(
        self,
        state: State,
        trained: _Carry,
        keys: TableKeys,
        times: Int[Array, "ids"],
        moment: Moment,
        first_part: int | jax.Array,
    ) -> tuple[State, _Carry, Int[Array, "ids"]]:
        """Assigns rows to ids of some parts. Row numbers are relative to the first of these parts.

        `times` is the number of occurrences of each id in the batch, in which an id may be
        repeated; an entry with 0 or less stands for no id.

        Returns:
          The state; the trained rows after initialization, or the result of `_new`; and the row of
          each id.
        """
        layout, parts = layout_of(self.stack), len(state.index.used)
        wanted = times > 0
        found = hash_index.find(layout, state.index, keys, wanted, first_part)
        part = hash_index.part_of(keys) - first_part
        wanted &= (part >= 0) & (part < parts)
        missing = wanted & (found < 0)
        # Existing rows keep their numbers, so counting can run while rows are exchanged. Only a
        # number that fades must include the counts of this batch first.
        kept = numbers_of(self.stack)
        fades = any(number.fades for number in policies_of(self.stack))
        known = found
        if fades:
            state = _seen(kept, state, known, times, moment.now)
        size, count = len(found), jnp.sum(missing, dtype=jnp.int32)

        def insert(few, state, trained, *more):
            state, rows, new = self._insert(few, first_part, state, *more)
            return state, self._new(trained, new, moment), rows

        def nothing_new(state, trained, _, missing, found, times, moment):
            return state, self._none_new(trained, missing), found

        operands = state, trained, keys, missing, found, times, moment
        if size < _LEAST_FOR_TIERS:
            state, new, found = insert(size, *operands)
        else:
            sizes = [*(-(-size // part) for part in _TIERS), size]
            programs = [functools.partial(insert, few) for few in sizes]
            limits = 0, *sizes[:-1]
            tier = sum((count > few).astype(jnp.int32) for few in limits)
            branches = [nothing_new, *programs]
            state, new, found = lax.switch(tier, branches, *operands)
        if not fades:
            state = _seen(kept, state, known, times, moment.now)
        known = _per_table(state, part, keys.table, wanted & ~missing, times)
        return counted(state, FOUND, known), new, found

    def _insert(
        self,
        size: int,
        first_part: int | jax.Array,
        state: State,
        keys: TableKeys,
        missing: Bool[Array, "ids"],
        found: Int[Array, "ids"],
        times: Int[Array, "ids"],
        moment: Moment,
    ) -> tuple[State, Int[Array, "ids"], _Got]:
        """Assigns rows to up to `size` ids that have none.

        Returns:
          The state; the row of each id; and the newly assigned rows.
        """
        stack, layout = self.stack, layout_of(self.stack)
        configs, ids = configs_of(stack), len(found)
        place = sums_so_far(missing) - 1
        at = jnp.where(missing, place, ids + jnp.arange(ids, dtype=jnp.int32))
        few = TableKeys(*(_put(size, at, word) for word in keys))
        of, counts = hash_index.distinct(layout, few, _put(size, at, times))
        sketch, admitted = admission.admit(
            configs, state.sketch, of, counts, moment.seed, moment.now, first_part
        )
        state = state._replace(sketch=sketch)
        part, table = of.part - first_part, of.keys.table
        new = of.first & admitted
        waiting = _per_table(state, part, table, of.first & ~admitted, counts)
        state = counted(state, WAITING, waiting)
        if any(config.evict or config.time_to_live for config in configs):
            needed = _per_table(state, part, table, new)
            lacking = needed > state.index.num_free

            def evicted(state):
                last = state.numbers["last"]
                kept = jnp.zeros(last.size, bool)
                kept = kept.at[jnp.where(found >= 0, found, kept.size)].set(
                    True, mode="drop"
                )
                kept = kept.reshape(last.shape)
                if self.keeps_seen:
                    kept |= last == moment.now
                return eviction.evict(configs, layout, state, needed, kept, moment.now)

            state = lax.cond(jnp.any(lacking), evicted, lambda state: state, state)
        index, rows = hash_index.insert(layout, state.index, of, new, first_part)
        got = rows >= 0
        nowhere = MAX_ENTRIES - jnp.arange(size, dtype=jnp.int32)
        to = jnp.where(got, rows, nowhere)
        options = {"mode": "drop", "unique_indices": True}
        after = {}
        for number in numbers_of(stack):
            values = state.numbers[number.name]
            first = number.initial(counts, moment.now).astype(values.dtype)
            flat = values.reshape(-1).at[to].set(first, **options)
            after[number.name] = flat.reshape(values.shape)
        state = state._replace(index=index, numbers=after)
        refused = _per_table(state, part, table, new & ~got, counts)
        state = counted(state, REFUSED, refused)
        inserted = _per_table(state, part, table, got)
        state = counted(state, INSERTED, inserted)
        # Maps results for the sorted keys back to the ids of the batch.
        of_few = (
            jnp.zeros(size, jnp.int32)
            .at[of.place]
            .set(rows[of.start], unique_indices=True)
        )
        at = jnp.clip(place, 0, size - 1)
        back = jnp.where(missing, of_few[at], found)
        return state, back, _Got(rows, got, of, missing, at)

    def _begun(self, trained: Trained, new: _New, moment: Moment) -> Trained:
        """Writes the initial vector and the initial optimizer state of new rows."""
        size = len(new.rows)
        block = min(vectors.BLOCK, size)
        if block == 0:
            return trained
        rows_of_part = len(trained.w)

        def begin(state):
            start, trained = state
            first = jnp.minimum(start, size - block)
            cut = functools.partial(
                lax.dynamic_slice_in_dim, start_index=first, slice_size=block
            )
            rows, keys = cut(new.rows), TableKeys(*map(cut, new.keys))
            number = first + jnp.arange(block, dtype=jnp.int32)
            rows = jnp.where(
                number < new.count,
                rows,
                rows_of_part + jnp.arange(block, dtype=jnp.int32),
            )
            w = vectors.drawn(self.stack, moment.seed, keys)
            return start + block, written(
                trained, rows, w, first_state(self.rule, w, moment.step)
            )

        return lax.while_loop(
            lambda state: state[0] < new.count, begin, (jnp.int32(0), trained)
        )[1]


class Number(Assign):
    """Assigns rows in host memory, which `begin` initializes after they were copied to the
    devices.

    A call takes None in place of the trained rows, and returns which ids got a new row: `[ids]`
    bool, True once for each row.
    """

    new_spec = P()

    def _none_new(self, trained: _Carry, times: Array) -> Bool[Array, "ids"]:
        return jnp.zeros_like(times, bool)

    def _of_all(self, trained: Bool[Array, "ids"]) -> Bool[Array, "ids"]:
        return on_any(trained)

    def _new(self, trained: _Carry, new: _Got, moment: Moment) -> Bool[Array, "ids"]:
        firsts = jnp.zeros(len(new.rows), bool)
        firsts = firsts.at[new.of.place].set(new.got, unique_indices=True)
        return new.missing & firsts[new.at]


assign = jax.jit(Assign.__call__, static_argnums=0)
assign_at_owners = jax.jit(Assign.at_owners, static_argnums=0)
numbers = jax.jit(Number.__call__, static_argnums=0, donate_argnums=1)
begin = jax.jit(Assign.begin, static_argnums=0, donate_argnums=1)


def written(
    trained: Trained, rows: Int[Array, "some"], w: jax.Array, arrays: dict[str, Any]
) -> Trained:
    """Replaces some rows. Row numbers out of range are ignored; none may be repeated."""

    def put(array, values):
        values = values.astype(array.dtype)
        return array.at[rows].set(values, mode="drop", unique_indices=True)

    after = {name: put(array, arrays[name]) for name, array in trained.arrays.items()}
    return Trained(put(trained.w, w), after)


def find(
    stack: Stack,
    index: Index,
    x: CSR,
    keys: TableKeys,
    *,
    implementation: Implementation = None,
) -> Int[Array, "ids"]:
    """The column of each id, without assigning rows."""
    layout = layout_of(stack)
    if x.nse == 0:
        return jnp.asarray(x.indices)

    def part(index, keys, wanted):
        first = _first_part(index)
        rows = hash_index.find(
            layout, index, keys, wanted, first, implementation=implementation
        )
        return found_anywhere(rows, first * layout.rows)

    rows = on_each(part, (index, keys, _wanted(x)), (P("model"), P(), P()), P())
    return _columns(x, rows)


def find_at_owners(
    stack: Stack, index: Index, sent: SentKeys, *, implementation: Implementation = None
) -> SentKeys:
    """`find` for ids that were sent to the owners of their rows."""

    def part(index, keys, times):
        keys, times = own_block((keys, times))
        rows = hash_index.find(
            layout_of(stack),
            index,
            keys,
            times > 0,
            _first_part(index),
            implementation=implementation,
        )
        return _columns_of_owner(index, rows)

    by_device = P("data", "model")
    columns = call_on_each_device(
        part,
        (index, sent.keys, sent.times),
        (P("model"), by_device, by_device),
        by_device,
    )
    return sent.at(columns)


def _wanted(x: CSR) -> Bool[Array, "ids"]:
    """Mask of the matrix entries whose keys need a row."""
    place = jnp.arange(x.nse, dtype=jnp.int32)
    return (place < jnp.asarray(x.indptr)[-1]) & (jnp.asarray(x.indices) >= 0)


def _first_part(index: Index) -> int | jax.Array:
    """The number of the first part on this device; called inside `shard_map`."""
    return own_place() * len(index.used)


def _columns_of_owner(
    index: Index, rows: Int[Array, "slots"]
) -> Int[Array, "1 1 slots"]:
    """The columns of slots on this device, `num_cols` for slots without a row; inside
    `shard_map`.
    """
    return jnp.where(rows >= 0, rows, index.used.size)[None, None]


def _columns(x: CSR, rows: Int[Array, "ids"]) -> Int[Array, "ids"]:
    """Replaces each key in a matrix by the row number of its id."""
    rows = jnp.where(rows >= 0, rows, WITHOUT_ROW)
    return jnp.where(jnp.asarray(x.indices) == WRONG, WRONG, rows)


def _seen(
    kept: Sequence[RowNumber],
    state: State,
    found: Int[Array, "ids"],
    times: Int[Array, "ids"],
    now: jax.Array,
) -> State:
    # Without the barrier, XLA moves reshapes across the branches, and copies the arrays.
    state = lax.optimization_barrier(state)
    after = {}
    for number in kept:
        values = state.numbers[number.name]
        at = jnp.where(found >= 0, found, values.size)
        flat = number.seen(values.reshape(-1), at, times, now)
        after[number.name] = flat.reshape(values.shape)
    return lax.optimization_barrier(state._replace(numbers=after))


def _per_table(
    state: State,
    part: Int[Array, "ids"],
    table: Int[Array, "ids"],
    counts: Bool[Array, "ids"],
    values: Int[Array, "ids"] | None = None,
) -> Int[Array, "parts tables"]:
    """For each part and table, the number of ids that count, or the sum of their values."""
    shape, size = state.index.num_free.shape, state.index.num_free.size
    # Adjacent ids use different counters, because a GPU serializes additions to one counter.
    turns = max(1, min(_TURNS, len(part) // size))
    turn = jnp.arange(len(part), dtype=jnp.int32) % turns
    at = jnp.where(counts, turn * size + part * shape[1] + table, turns * size)
    zeros = jnp.zeros(turns * size, jnp.int32)
    added = jnp.ones(len(at), jnp.int32) if values is None else values
    found = zeros.at[at].add(added, mode="drop")
    return jnp.sum(found.reshape(turns, *shape), axis=0, dtype=jnp.int32)


def _put(size: int, at: Int[Array, "ids"], values: jax.Array) -> jax.Array:
    """An array of `size` zeros, with values written to the given positions."""
    return jnp.zeros(size, values.dtype).at[at].set(values, mode="drop")
