"""Which rows of a stack in host memory are on the devices: an index on the devices.

A batch has a million ids or more. To look each of them up takes a device microseconds, and a host
many milliseconds. So the host gets a list of those rows alone that are missing.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.mesh.host_buffers import Buffers, arrived, leaving
from sparsejax.mesh.layout import jit_sharded
from sparsejax.mesh.per_device import on_each, own_place, sum_over_model
from sparsejax.sparse import sums_so_far

# In place of a slot: there is none. `_LEFT - n` says that batch `n` took it from the row.
_NO_SLOT, _LEFT = -1, -2
# Slots that are looked at for some rows: at least so many, and so many for each row.
_LEAST_LOOKED_AT, _LOOKED_AT = 2**16, 4
_LEAST_MOVED = 256
# Batches whose steps may not have begun.
_RECENT = 8
# Each look has a number of its own, so none is taken for that of other slots.
_numbers = itertools.count(1)
# Bytes of the index on the devices, of each row and of each slot.
ROW_BYTES, SLOT_BYTES = 4, 9
# How the index is divided, and a number for each device.
_MINE = P("model")


class NoRoomError(ValueError):
    """The rows of a batch do not fit the devices."""


class Index(NamedTuple):
    """Rows and slots of the devices. Each has an equal share of both, with its own numbers.

    Attributes:
      slot: `[num_rows]` int32: of each row; negative if it has none.
      row: `[slots]` int32: in each slot; -1 if there is none.
      used: `[slots]` int32: the number of the last batch with this row; -1 without a row.
      changed: `[slots]` bool: whether the host may not have the row as it is.
      counts: `[4]` int32: the number of the last batch, and of the last one for which rows
        moved; how many slots were given; and the hand, the slot at which those begin that are
        looked at next.
    """

    slot: jax.Array
    row: jax.Array
    used: jax.Array
    changed: jax.Array
    counts: jax.Array


class Looked(NamedTuple):
    """A batch whose rows were looked up, and the rows that have no slot.

    Attributes:
      columns: `[entries]`: rows of the batch; negative ones are padding.
      number: number of this look-up.
      training: whether the batch changes its rows.
      missing: `[devices, 2 + most]`: first the number of rows without a slot, and the number of
        slots that the batch has; then the rows without a slot, ascending, as the device numbers
        them; then -1. A row that has just left is `-2 - row`.
      on_host: copy of `missing`, on its way to the host.
    """

    columns: jax.Array
    number: int
    training: bool
    missing: jax.Array
    on_host: jax.Array


class Wanted(NamedTuple):
    """Rows that need slots.

    Attributes:
      rows: `[devices, room]`: rows as the device numbers them; then -1.
      has_left: `[devices, room]`: whether the row has just left, so that the host may not have
        it yet.
      counts: `[devices]`: number of rows.
      window: number of slots that are examined.
    """

    rows: np.ndarray
    has_left: np.ndarray
    counts: np.ndarray
    window: int


class Slots:
    """The slots of a stack.

    The row that leaves is the least recently used one of the examined slots. A pointer that
    moves around the slots says which ones are examined; in a small table all are.

    Args:
      num_rows: number of rows in the stack.
      slots: number of slots, which is smaller.
      devices: number of devices over which rows are divided.
    """

    def __init__(self, num_rows: int, slots: int, devices: int):
        self.devices = devices
        self.num_rows, self.num_slots = num_rows, slots
        self._size = slots // devices
        self._buffers = Buffers()
        self.clear()

    def clear(self) -> None:
        """Takes all slots from their rows."""
        make = jit_sharded(_empty, _MINE, static=(0, 1, 2))
        self.index = make(self.num_rows, self.num_slots, self.devices)
        self.number = next(_numbers)  # whatever was looked up is wrong
        self._filled = np.zeros(self.devices, np.int64)

    def expire(self) -> None:
        """Says that rows have changed in the host, which may have been sent already."""
        self.number = next(_numbers)

    def look(self, columns: jax.Array | np.ndarray, *, training: bool) -> Looked:
        """Looks rows up, which are in use from now on. Does not wait for the devices.

        Args:
          columns: `[entries]` rows of the stack; negative ones are padding.
          training: whether they will change.
        """
        self.number = next(_numbers)
        placed: Any = columns
        if not isinstance(columns, jax.Array):
            placed = self._buffers.everywhere("columns", columns)
        self.index, missing = _look(self.index, placed, training=training)
        return Looked(placed, self.number, training, missing, leaving(missing))

    def wanted(self, looked: Looked) -> Wanted | None:
        """The rows that a batch lacks; None if it lacks none. Waits for the devices.

        Nothing changes, so another thread may ask.

        Raises:
          NoRoomError: there are not so many slots beside those of the batch. Its arguments are
            the rows and the slots of a device.
        """
        found = np.concatenate(arrived(looked.on_host))
        counts = found[:, :2]
        missing, busy = counts.max(axis=0).tolist()
        if not missing:
            return None
        for both in counts.sum(axis=1).tolist():
            if both > self._size:
                raise NoRoomError(both, self._size)
        room = min(padded(missing), found.shape[1] - 2)
        rows = found[:, 2 : 2 + room]
        has_left = rows < -1
        window = max(_LEAST_LOOKED_AT, _LOOKED_AT * room, busy + room)
        return Wanted(
            np.where(has_left, -2 - rows, rows),
            has_left,
            counts[:, 0],
            min(self._size, padded(window)),
        )

    def give(self, wanted: Wanted) -> bool:
        """Notes that rows get slots. Returns whether others leave for them."""
        filled = self._filled + wanted.counts
        self._filled = np.minimum(filled, self._size)
        return bool((filled > self._size).any())

    def find(self, columns: jax.Array) -> jax.Array:
        """`[entries]`: the slot of each row, numbered over all devices; none for none."""
        return _find(self.index.slot, columns, self._size)

    def changed(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each device the slots whose rows may have changed, and these rows."""
        found = []
        changed = np.asarray(self.index.changed).reshape(self.devices, -1)
        row = np.asarray(self.index.row).reshape(self.devices, -1)
        owned = self.num_rows // self.devices
        for device in range(self.devices):
            slots = np.flatnonzero(changed[device] & (row[device] >= 0))
            found.append((slots.astype(np.int32), row[device][slots] + device * owned))
        return found

    def forget_changes(self) -> None:
        """Says that the host has all that has changed.

        Slots of the newest batches stay marked: their steps may not have begun.
        """
        self.index = self.index._replace(changed=_still_changed(self.index))


def taken(
    index: Index, missing: jax.Array, *, room: int, window: int, training: bool
) -> tuple[Index, jax.Array, jax.Array, jax.Array]:
    """Gives rows that the last batch lacks the slots of other rows, on a device.

    Args:
      index: index of the device.
      missing: rows without a slot on the device, as `Looked` has them.
      room: number of places for rows; at least as many as are missing.
      window: number of slots that are examined. Enough of them are not in use.
      training: whether the batch changes its rows.

    Returns:
      The index; `[room]` the rows, -1 for padding; their slots, outside for padding; and the
      rows that leave these, if they may have changed, else -1.
    """
    owned, size = len(index.slot), len(index.row)
    number, _, filled, hand = index.counts
    rows = missing[2 : 2 + room]
    rows = jnp.where(rows < -1, -2 - rows, rows)
    place = jnp.arange(room, dtype=jnp.int32)
    there = rows >= 0
    start = jnp.where(filled < size, filled, hand)
    looked_at = (start + jnp.arange(window, dtype=jnp.int32)) % size
    _, longest_ago = lax.sort_key_val(index.used[looked_at], looked_at)
    slots = jnp.where(there, longest_ago[:room], size + place)
    before = jnp.where(there, index.row.at[slots].get(mode="clip"), -1)
    leave = jnp.where(index.changed.at[slots].get(mode="clip"), before, -1)
    is_full = missing[0] > size - filled
    counts = jnp.stack(
        [
            number,
            number,
            jnp.where(is_full, size, filled + missing[0]),
            jnp.where(is_full, (start + window) % size, hand),
        ]
    )
    # All is read before something is written: else XLA copies whole arrays.
    rows, slots, before, leave, index = lax.optimization_barrier(
        (rows, slots, before, leave, index)
    )
    gone = jnp.where(before >= 0, before, owned + place)
    come = jnp.where(there, rows, owned + place)

    def written(array, at, values):
        return array.at[at].set(values, mode="drop", unique_indices=True)

    slot = written(index.slot, gone, _LEFT - number)
    index = Index(
        written(slot, come, slots),
        written(index.row, slots, rows),
        written(index.used, slots, number),
        written(index.changed, slots, training),
        counts,
    )
    return index, rows, slots, leave


def padded(count: int) -> int:
    """Room for so many rows that move: two or four sizes in each power of 2: few programs."""
    size = _LEAST_MOVED
    while 2 * size < count:
        size *= 2
    step = size // (2 if count <= 2**14 else 4)
    return max(size, -(-count // step) * step)


def _empty(num_rows: int, slots: int, devices: int) -> Index:
    return Index(
        jnp.full(num_rows, _NO_SLOT, jnp.int32),
        jnp.full(slots, -1, jnp.int32),
        jnp.full(slots, -1, jnp.int32),
        jnp.zeros(slots, bool),
        jnp.zeros(4 * devices, jnp.int32),
    )


def _look_up(
    slot: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows that are this device's, by its numbers; whether they are; their slots."""
    rows = columns - own_place() * len(slot)
    mine = (columns >= 0) & (rows >= 0) & (rows < len(slot))
    return rows, mine, slot.at[jnp.where(mine, rows, 0)].get(mode="clip")


@jax.jit(static_argnames="training", donate_argnums=0)
def _look(
    index: Index, columns: jax.Array, *, training: bool
) -> tuple[Index, jax.Array]:
    """Marks the slots of rows as used, and lists the rows that have none, see `Looked`."""

    def part(index, columns):
        owned, size = len(index.slot), len(index.row)
        number, moved, *rest = index.counts
        number += 1
        rows, mine, slots = _look_up(index.slot, columns)
        places = jnp.where(mine & (slots >= 0), slots, size)
        used = index.used.at[places].set(number, mode="drop")
        changed = index.changed
        if training:
            changed = changed.at[places].set(True, mode="drop")
        rows = lax.sort(jnp.where(mine & (slots < 0), rows, owned))
        before = jnp.concatenate([jnp.full(1, -1, jnp.int32), rows[:-1]])
        is_new = (rows < owned) & (rows != before)
        most, count = min(len(rows), size), jnp.sum(is_new, dtype=jnp.int32)
        place = sums_so_far(is_new) - 1
        place = jnp.where(is_new, place, most + jnp.arange(len(rows), dtype=jnp.int32))
        missing = jnp.full(most, -1, jnp.int32)
        missing = missing.at[place].set(rows, mode="drop", unique_indices=True)
        left = index.slot.at[jnp.maximum(missing, 0)].get(mode="clip") == _LEFT - moved
        missing = jnp.where(left & (missing >= 0), -2 - missing, missing)
        busy = jnp.sum(used == number, dtype=jnp.int32)
        index = index._replace(
            used=used, changed=changed, counts=jnp.stack([number, moved, *rest])
        )
        return index, jnp.concatenate([jnp.stack([count, busy]), missing])[None]

    return on_each(part, (index, columns), (_MINE, P()), (_MINE, _MINE))


def find(slot: jax.Array, columns: jax.Array, size: int) -> jax.Array:
    """`[entries]`: the slot of each row, numbered over all devices; on a device.

    Args:
      slot: slots of the rows in the device's index.
      columns: `[entries]` rows; negative ones stay as they are.
      size: slots of a device.
    """
    _, mine, slots = _look_up(slot, columns)
    slots = sum_over_model(jnp.where(mine, slots + own_place() * size, 0))
    return jnp.where(columns < 0, columns, slots)


@jax.jit(static_argnums=2)
def _find(slot: jax.Array, columns: jax.Array, size: int) -> jax.Array:
    def part(slot, columns):
        return find(slot, columns, size)

    return on_each(part, (slot, columns), (_MINE, P()), P())


@jax.jit
def _still_changed(index: Index) -> jax.Array:
    def part(index):
        return index.changed & (index.used > index.counts[0] - _RECENT)

    return on_each(part, (index,), (_MINE,), _MINE)
