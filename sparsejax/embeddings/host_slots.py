"""An index on the devices: it finds the slot of each row of a table in host memory.

A batch has a million ids or more. A device looks them up in microseconds, a host in many
milliseconds. So the index is on the devices, and the host only gets the list of missing rows.
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

# Special values in place of a slot: the row has none; or, as `_LEFT - n`, batch `n` removed the
# row from its slot.
_NO_SLOT, _LEFT = -1, -2
# How many slots are examined to free some: at least the first number, and the second number for
# each row.
_LEAST_LOOKED_AT, _LOOKED_AT = 2**16, 4
_LEAST_MOVED = 256
# Number of last batches whose steps may not have started.
_RECENT = 8
# Unique numbers for look-ups.
_numbers = itertools.count(1)
# Bytes of the index for each row and for each slot.
ROW_BYTES, SLOT_BYTES = 4, 9
# The index is divided over the axis "model"; each device has an equal part.
_MINE = P("model")


class NoRoomError(ValueError):
    """The rows of a batch do not fit the devices."""


class Index(NamedTuple):
    """The index on the devices.

    Each device has an equal share of rows and slots, with its own numbering.

    Attributes:
      slot: `[num_rows]` int32: slot of each row; negative without one.
      row: `[slots]` int32: row in each slot; -1 for an empty slot.
      used: `[slots]` int32: number of the last batch that used the slot; -1 if empty.
      changed: `[slots]` bool: whether the row may differ from its copy on the host.
      counts: `[4]` int32: number of the last batch; number of the last batch for which rows moved;
          number of slots given so far; and the slot at which the next examination starts.
    """

    slot: jax.Array
    row: jax.Array
    used: jax.Array
    changed: jax.Array
    counts: jax.Array


class Looked(NamedTuple):
    """A batch whose rows were looked up, and the rows that have no slot.

    Attributes:
      columns: `[entries]` rows of the batch; negative numbers are padding.
      number: number of this look-up.
      training: whether the batch changes its rows.
      missing: `[devices, 2 + most]`: the number of rows without a slot, the number of slots that
          the batch uses, then the rows without a slot, ascending, in the numbering of the device,
          padded with -1. A row that was just removed is `-2 - row`.
      on_host: copy of `missing`, being copied to the host.
    """

    columns: jax.Array
    number: int
    training: bool
    missing: jax.Array
    on_host: jax.Array


class Wanted(NamedTuple):
    """Rows that need slots.

    Attributes:
      rows: `[devices, room]` rows in the numbering of each device, padded with -1.
      has_left: `[devices, room]` bool: the row was just removed, so that its copy on the host may
          not be complete.
      counts: `[devices]`: number of rows.
      window: number of slots that are examined.
    """

    rows: np.ndarray
    has_left: np.ndarray
    counts: np.ndarray
    window: int


class Slots:
    """The slots of a stack on the devices.

    The row removed is the least recently used of the examined slots. A pointer that circulates
    over the slots selects them; in a small table all are examined.

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
        """Empties all slots."""
        make = jit_sharded(_empty, _MINE, static=(0, 1, 2))
        self.index = make(self.num_rows, self.num_slots, self.devices)
        self.number = next(_numbers)  # a new number makes earlier look-ups invalid
        self._filled = np.zeros(self.devices, np.int64)

    def expire(self) -> None:
        """Records that rows changed on the host whose copies may already have been sent."""
        self.number = next(_numbers)

    def look(self, columns: jax.Array | np.ndarray, *, training: bool) -> Looked:
        """Looks up rows and marks them as used, without waiting for the devices.

        Args:
          columns: `[entries]` rows of the stack; negative ones are padding.
          training: whether the batch will change them.
        """
        self.number = next(_numbers)
        placed: Any = columns
        if not isinstance(columns, jax.Array):
            placed = self._buffers.everywhere("columns", columns)
        self.index, missing = _look(self.index, placed, training=training)
        return Looked(placed, self.number, training, missing, leaving(missing))

    def wanted(self, looked: Looked) -> Wanted | None:
        """The rows that a batch needs; None if it needs none. Waits for the devices.

        It changes nothing, so another thread may call it.

        Raises:
          NoRoomError: there are too few slots besides those of the batch. Its arguments are the
              numbers of rows and slots of a device.
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
        """Records that rows get slots. Returns whether other rows are removed for them."""
        filled = self._filled + wanted.counts
        self._filled = np.minimum(filled, self._size)
        return bool((filled > self._size).any())

    def find(self, columns: jax.Array) -> jax.Array:
        """The slot of each row, `[entries]`, numbered over all devices; negative for a row that
        has no slot.
        """
        return _find(self.index.slot, columns, self._size)

    def changed(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each device, the slots whose rows may have changed, and these rows."""
        found = []
        changed = np.asarray(self.index.changed).reshape(self.devices, -1)
        row = np.asarray(self.index.row).reshape(self.devices, -1)
        owned = self.num_rows // self.devices
        for device in range(self.devices):
            slots = np.flatnonzero(changed[device] & (row[device] >= 0))
            found.append((slots.astype(np.int32), row[device][slots] + device * owned))
        return found

    def forget_changes(self) -> None:
        """Records that the host has all changes.

        Slots of the newest batches stay marked: their steps may not have begun.
        """
        self.index = self.index._replace(changed=_still_changed(self.index))


def taken(
    index: Index, missing: jax.Array, *, room: int, window: int, training: bool
) -> tuple[Index, jax.Array, jax.Array, jax.Array]:
    """Gives missing rows of the last batch slots of other rows, on a single device.

    Args:
      index: index of the device.
      missing: rows without a slot on the device, as `Looked` has them.
      room: capacity for rows; at least the number of missing rows.
      window: number of slots that are examined. Enough of them are not in use.
      training: whether the batch changes its rows.

    Returns:
      The index; the rows `[room]`, padded with -1; their slots, out of range for padding; and the
      rows removed from these slots, if they may have changed, else -1.
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
    # Without this barrier, XLA mixes reads and writes, and copies whole arrays.
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
    """The capacity for a number of moving rows: two or four sizes per power of 2, so few
    programs.
    """
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
    """The row numbers on this device, a mask of the valid ones, and their slots."""
    rows = columns - own_place() * len(slot)
    mine = (columns >= 0) & (rows >= 0) & (rows < len(slot))
    return rows, mine, slot.at[jnp.where(mine, rows, 0)].get(mode="clip")


@jax.jit(static_argnames="training", donate_argnums=0)
def _look(
    index: Index, columns: jax.Array, *, training: bool
) -> tuple[Index, jax.Array]:
    """Marks slots of rows as used, and lists the rows without a slot, see `Looked`."""

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
    """`[entries]`: the slot of each row, numbered over all devices; computed on one device.

    Args:
      slot: slots of the rows in the device's index.
      columns: `[entries]` rows; negative numbers are returned unchanged.
      size: number of slots of a device.
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
