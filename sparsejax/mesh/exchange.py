"""Sums that go only to the device that needs them, and gradients that come only from it.

A block of a spread `ShardedCSR` has the rows of all devices along "model", with the entries of
its own columns. Most of its rows have none. A device gives every other device a fixed number of
*slots*, its `room`, for the rows that do have an entry::

    forward     the sums of these rows          owner of the columns -> device of the rows
    backward    their gradients                 device of the rows -> owner of the columns

With one id in each row and M devices, that is 1/M of what a reduce-scatter of all rows moves, and
of what a gather of all gradients moves. If some device has too little room, all devices take these
two ways instead: the result is the same up to rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import axis_sizes, call_on_each_device
from sparsejax.mesh.per_device import own_block
from sparsejax.sparse import CSR

# Room by default, as a multiple of an even share, and in deviations of a random share. From 64
# entries on the first is more.
_SLACK, _DEVIATIONS = 1.5, 4


def default_room(rows: int, nse: int) -> int | None:
    """Slots for each pair of devices: 1.5 times an even share of the entries, or more if few.

    Args:
      rows: of the batch, divided over all devices of the mesh that is set.
      nse: entries of the batch.

    Returns:
      None if an exchange moves no less than the sums of all rows.
    """
    data, model = axis_sizes()
    even = nse / (data * model * model)
    room = math.ceil(max(_SLACK * even, even + _DEVIATIONS * math.sqrt(even)))
    size = rows // (data * model)
    return room if 0 < room < size else None


def is_crowded(x: ShardedCSR) -> Bool[Array, ""]:
    """Whether some device has more rows for another one than there is room for."""
    return call_on_each_device(
        lambda blocks: Slots.of(own_block(blocks), x.room).crowded,
        x.blocks,
        in_specs=(P("data", "model"),),
        out_specs=P(),
    )


class Slots(NamedTuple):
    """The rows of this device's block that have an entry, for each device along "model".

    All methods are called within `layout.call_on_each_device`.

    Attributes:
      rows: `[parts, room]` rows, numbered from the first of their part; `size` for a slot
        that is empty.
      size: rows of a part.
      crowded: whether a part has more rows than room, on some device of the mesh.
    """

    rows: Int[Array, "parts room"]
    size: int
    crowded: Bool[Array, ""]

    @classmethod
    def of(cls, block: CSR, room: int | None) -> Slots:
        """The slots of a block; its rows are equal parts, one for each device."""
        assert room is not None
        parts = axis_sizes()[1]
        size = block.num_rows // parts
        # A row that lacks entries counts: it is NaN.
        filled = (block.row_lengths() > 0) | block.overfull_rows()
        filled = filled.reshape(parts, size)
        most = jnp.max(jnp.sum(filled, axis=1, dtype=jnp.int32), initial=0)
        crowded = lax.pmax(most, ("data", "model")) > room
        every = jnp.arange(size, dtype=jnp.int32)[None]
        place = jnp.cumsum(filled, axis=1, dtype=jnp.int32) - 1
        # All places differ, also those that are dropped.
        place = jnp.where(filled & (place < room), place, room + every)
        part = jnp.arange(parts, dtype=jnp.int32)[:, None]
        rows = jnp.full((parts, room), size, jnp.int32)
        rows = rows.at[part, place].set(every, mode="drop", unique_indices=True)
        return cls(rows, size, crowded)

    @property
    def _used(self) -> jax.Array:
        return self.rows < self.size

    def _rows_of_block(self) -> jax.Array:
        """`[parts, room]`: the rows, numbered from the first of the block."""
        parts = self.rows.shape[0]
        return self.rows + jnp.arange(parts, dtype=jnp.int32)[:, None] * self.size

    def compact(self, block: CSR) -> CSR:
        """`[parts * room, columns]`: the rows that are in slots."""
        indptr = jnp.asarray(block.indptr)
        behind = indptr[self.size :: self.size][:, None]
        ends = indptr.at[self._rows_of_block() + 1].get(mode="clip")
        ends = jnp.where(self._used, ends, behind).reshape(-1)
        indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        leaves = (block.data, block.indices, indptr, None)
        return CSR.tree_unflatten(block.num_cols, leaves)

    def deliver(
        self, sums: Float[Array, "slots hidden"]
    ) -> tuple[CSR, Float[Array, "slots hidden"]]:
        """Sends the sums of `compact` rows to the devices of these rows.

        Returns:
          A matrix `[size, slots]` and what has come: their product are the sums of this
          device's rows.
        """
        rows = _exchanged(self.rows)  # for which each owner has a sum
        owners, room = rows.shape
        owner = jnp.broadcast_to(
            jnp.arange(owners, dtype=jnp.int32)[:, None], rows.shape
        )
        count = jnp.zeros((self.size, owners), jnp.int32)
        count = count.at[rows, owner].set(1, mode="drop").reshape(-1)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count)])
        slot = jnp.arange(owners * room, dtype=jnp.int32)
        place = before.at[(rows * owners + owner).reshape(-1)].get(mode="clip")
        place = jnp.where((rows < self.size).reshape(-1), place, owners * room + slot)
        indices = jnp.zeros_like(slot)
        indices = indices.at[place].set(slot, mode="drop", unique_indices=True)
        leaves = (None, indices, before[::owners], None)
        return CSR.tree_unflatten(owners * room, leaves), _exchanged(sums)

    def collect(
        self, slopes: Float[Array, "size hidden"]
    ) -> Float[Array, "rows hidden"]:
        """Gets the gradients of the rows in slots from the devices of these rows.

        Returns:
          A row for each row of the block; zero for rows without an entry.
        """
        rows = _exchanged(self.rows).reshape(-1)
        sent = slopes.at[rows].get(mode="fill", fill_value=0)
        parts, room = self.rows.shape
        slot = jnp.arange(parts * room, dtype=jnp.int32)
        place = self._rows_of_block().reshape(-1)
        place = jnp.where(self._used.reshape(-1), place, parts * self.size + slot)
        zeros = jnp.zeros((parts * self.size, slopes.shape[1]), slopes.dtype)
        return zeros.at[place].set(_exchanged(sent), mode="drop", unique_indices=True)


def _exchanged(values: jax.Array) -> jax.Array:
    """The p-th part of the values goes to the p-th device along "model"."""
    return lax.all_to_all(values, "model", split_axis=0, concat_axis=0, tiled=True)


def slopes_of_block(x: ShardedCSR, dy: jax.Array) -> Float[Array, "model rows hidden"]:
    """The gradients that the owner of each part of the columns needs, of all rows.

    Args:
      x: with room for an exchange.
      dy: `[rows, hidden]`, divided as `x.rows_spec`.

    Returns:
      For each device along "model" a row for each row of `x`. Rows without an entry in its
      columns may be zero.
    """

    def part(blocks, dy):
        slots = Slots.of(own_block(blocks), x.room)
        rows = lax.cond(
            slots.crowded,
            lambda dy: lax.all_gather(dy, "model", tiled=True),
            slots.collect,
            dy,
        )
        return lax.all_gather(rows, "data", tiled=True)[None]

    return call_on_each_device(
        part,
        x.blocks,
        dy,
        in_specs=(P("data", "model"), x.rows_spec),
        out_specs=P("model"),
    )


# Places by default, as a multiple of an even share, and in deviations of a random share. From
# 64 ids on the first is more.
_ROOM, _DEVIATIONS = 1.5, 4


def places(even: float, room: float | None) -> int:
    """Places for a share of ids: `room` times an even one.

    None is 1.5 times, or four deviations of a random share if that is more.
    """
    if room is not None:
        return max(1, math.ceil(room * even))
    return max(1, math.ceil(max(_ROOM * even, even + _DEVIATIONS * math.sqrt(even))))


class Sent(NamedTuple):
    """Bytes that each device sends in a step.

    Attributes:
      ids: columns, slots and weights.
      sums: forward.
      gradients: backward.
    """

    ids: int
    sums: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def bytes_sent(
    rows: int,
    entries: int,
    dim: int,
    *,
    data: int,
    model: int,
    wire_dtype: jax.typing.DTypeLike = jnp.float32,
    room: float | None = None,
    weighted: bool = False,
    replicated_rows: int | None = None,
) -> Sent:
    """Bytes that each device sends in a training step for a stack of tables.

    >>> bytes_sent(8 * 4096, 8 * 4096, 16, data=1, model=8)
    Sent(ids=43008, sums=344064, gradients=344064)

    They are those of a step in which all ids have places. A ring is assumed: of G devices, a
    gather of b bytes of each sends (G - 1) b, an all-to-all of b bytes (G - 1) / G b, and an
    all-reduce 2 (G - 1) / G b.

    Args:
      rows: bags of the batch: examples times the bags of an example.
      entries: ids of the batch that there is room for.
      dim: width of a row.
      data: size of the axis.
      model: size of the axis.
      wire_dtype: in which sums and gradients cross.
      room: see `places`.
      weighted: whether ids have weights (as those of a mean).
      replicated_rows: rows of the kernel, if every device has them all.
    """
    devices, size = data * model, jnp.dtype(wire_dtype).itemsize
    mine, of_id = -(-entries // devices), 8 + 4 * weighted
    if replicated_rows is not None:
        if adds_all(replicated_rows, entries):
            # A sum over devices is in float32.
            reduced = 2 * (devices - 1) * replicated_rows * dim * 4 // devices
            return Sent(0, 0, reduced)
        others = devices - 1
        bags = rows // devices
        ids = others * (mine * (of_id - 4) + 4 * (bags + 1))
        return Sent(ids, 0, others * bags * dim * 4)
    room_for, slots = mine, rows // devices
    if model > 1:
        room_for = min(mine, places(mine / model, room))
        slots = min(room_for, slots)
    ids = (model - 1) * room_for * of_id + (data - 1) * model * room_for * of_id
    sums = (model - 1) * slots * dim * size
    return Sent(ids, sums, sums + (data - 1) * model * slots * dim * size)


def adds_all(num_rows: int, entries: int) -> bool:
    """Whether the gradient of a replicated kernel is cheaper to add as a whole.

    If not, every device gathers the ids and gradients of all others.
    """
    return 2 * num_rows <= entries
