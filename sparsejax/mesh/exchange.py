"""Exchange of ids with the owners of their rows, and of sums of rows, over the axis "model".

A batch is divided over all devices: each has the ids of its own examples. The rows of a kernel
are divided over "model", and replicated over "data". A device sorts its ids by their owners.
Each pair of devices along "model" has a number of *places* for ids, and of *slots* for bags that
have some of these ids. Both numbers are constant over all steps::

    ids         (column, slot)           device of the examples -> owner of the rows
    forward     one sum for each slot    owner of the rows -> device of the examples
    backward    their gradients          device of the examples -> owner of the rows

With one id in each bag and M devices, this sends 1/M of the bytes of a reduce-scatter of all
sums, and of a gather of all gradients. If a pair of devices has too few places, all devices
gather all ids and use reduce-scatter and gather instead: the result is equal up to rounding.
Only the gather is under a condition, the exchange is not: so layers compute during exchanges.

An owner adds the rows that a bag has there, so a bag has one slot for each owner. If ids
repeat, there may be fewer *distinct* ids than bags. Then each distinct id has a slot: its row
is sent once, and the device of the examples adds rows for its bags, and gradients for its ids::

    ids         column                   device of the examples -> owner of the rows
    forward     the row of each id       owner of the rows -> device of the examples
    backward    its gradient             device of the examples -> owner of the rows

Ids may be *keys* whose columns only the owner can look up, see `keys_sent`. These are always
sent as distinct ids. If a pair has too few places, the caller has to gather in another way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparsejax.mesh.layout import axis_sizes, call_on_each_device, padded_rows
from sparsejax.mesh.per_device import (
    blocks_of,
    concatenate_rows,
    entries_over_data,
    gather_over_data,
    gathered_columns,
    on_blocks,
    own_block,
)
from sparsejax.sparse import CSR, Transposed, segment_ids, sums_so_far

# Function that multiplies a matrix by an array. It sums in float32, and rounds to the given dtype
# if that is narrower.
Add = Callable[[CSR, jax.Array, np.dtype | None], jax.Array]

# The default number of places is the larger of two numbers: a multiple of an even share, and an
# even share plus this many standard deviations of a random share. From 64 ids on the multiple is
# larger. Distinct ids have a smaller multiple, as their number varies less between batches.
_ROOM, _DISTINCT_ROOM, _DEVIATIONS = 1.5, 1.2, 4
# Places for items that a device sends to an owner, as a multiple of an even share. Items are
# numbered in the order of their first occurrence, so popular items are neighbours, and one owner
# may get many. With two owners, each has places for all items of a device.
_ONE_EACH_ROOM = 2.0


def places(even: float, room: float | None, default: float = _ROOM) -> int:
    """The number of places for a share of ids: `room` times an even share.

    If `room` is None: `default` times, or plus four standard deviations if that is more.
    """
    if room is not None:
        return max(1, math.ceil(room * even))
    return max(1, math.ceil(max(default * even, even + _DEVIATIONS * math.sqrt(even))))


class Slots(NamedTuple):
    """The capacities of an exchange.

    Attributes:
      ids: most ids of a device.
      places: most ids that a device sends to one owner.
      count: number of slots for each pair of devices.
      distinct: whether each slot is for a distinct id; otherwise each is for a bag.
    """

    ids: int
    places: int
    count: int
    distinct: bool


class Share(NamedTuple):
    """The ids of a device that belong to the owner with the most of them.

    Attributes:
      room: number of places for ids of each pair of devices, relative to an even share; None is
        the default of `places`.
      ids: average fraction of a device's ids that belong to this owner; None is an even share.
      bags: most rows of a device that may have ids of one owner; None is all. If there are more,
        all devices gather, as with too few places.
      distinct: average number of a device's distinct ids at this owner; None is the number of
        ids.
    """

    room: float | None = None
    ids: float | None = None
    bags: int | None = None
    distinct: float | None = None


_EVEN = Share()


def slots_for(entries: float, bags: int, *, model: int, share: Share) -> Slots:
    """The capacities for `entries` ids and `bags` bags of a device; see `divided`.

    Slots are distinct ids if there are fewer distinct ids than bags.
    """
    # The most ids that a device may have. If one has more, all devices gather all ids, as if there
    # were too few places.
    mine = places(entries, share.room)
    part = 1 / model if share.ids is None else share.ids
    count = min(mine, places(entries * part, share.room))
    slots = min(count, bags if share.bags is None else share.bags)
    if share.distinct is not None:
        fewer = places(share.distinct, share.room, _DISTINCT_ROOM)
        if fewer < slots:
            return Slots(mine, fewer, fewer, True)
    return Slots(mine, count, slots, False)


class Sent(NamedTuple):
    """Bytes that each device sends in a step.

    Attributes:
      ids: bytes of ids to the owners of their rows, with slots and weights.
      sums: bytes of rows or sums of rows that owners send back.
      gradients: bytes of the gradients of these sums, to the owners.
    """

    ids: int
    sums: int
    gradients: int

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return sum(self)


def bytes_sent(
    rows: int,
    entries: int,
    dim: int,
    *,
    data: int,
    model: int,
    wire_dtype: jax.typing.DTypeLike = jnp.float32,
    share: Share = _EVEN,
    weighted: bool = False,
    replicated_rows: int | None = None,
) -> Sent:
    """Bytes that each device sends in a training step for a stack of tables.

    >>> bytes_sent(8 * 4096, 8 * 4096, 16, data=1, model=8)
    Sent(ids=43008, sums=344064, gradients=344064)

    The numbers are for a step in which no pair has too few places. A ring is assumed: with G
    devices, a gather of b bytes from each device sends (G - 1) b, an all-to-all of b bytes
    (G - 1) / G b, and an all-reduce 2 (G - 1) / G b.

    Args:
      rows: bags of the batch: examples times the bags of an example.
      entries: capacity of the batch for ids.
      dim: width of a row.
      data: size of the axis "data".
      model: size of the axis "model".
      wire_dtype: dtype in which sums and gradients are sent.
      share: ids of a device at the owner with the most of them.
      weighted: whether ids have weights (as for a mean).
      replicated_rows: number of rows of the kernel if each device has all rows.
    """
    devices, size = data * model, jnp.dtype(wire_dtype).itemsize
    mine, of_id = -(-entries // devices), 8 + 4 * weighted
    if replicated_rows is not None:
        if adds_all(replicated_rows, entries):
            # The bytes of gradients in float32, and of a flag for each row that was read.
            reduced = 2 * (devices - 1) * replicated_rows * (dim + 1) * 4 // devices
            return Sent(0, 0, reduced)
        others = devices - 1
        bags = rows // devices
        ids = others * (mine * (of_id - 4) + 4 * (bags + 1))
        return Sent(ids, 0, others * bags * dim * 4)
    slots = Slots(mine, mine, rows // devices, False)
    if model > 1:
        mean = entries / devices
        slots = slots_for(mean, rows // devices, model=model, share=share)
    room_for = min(mine, slots.places)
    if slots.distinct:
        of_id = 4  # Bytes of an id. Bags and weights are not sent.
    ids = (model - 1) * room_for * of_id + (data - 1) * model * room_for * of_id
    sums = (model - 1) * slots.count * dim * size
    return Sent(ids, sums, sums + (data - 1) * model * slots.count * dim * size)


def adds_all(num_rows: int, entries: int) -> bool:
    """Whether an all-reduce of the dense gradient of a replicated kernel is cheaper.

    If not, every device gathers the ids and gradients of all other devices.
    """
    return 2 * num_rows <= entries


class Route(NamedTuple):
    """Where the ids of a batch are sent. Leaves are `[data, model, n]`: each device has its own.

    Attributes:
      owned: `[model * slots, columns]`: the entries of this device's columns, by slot, from all
        devices along "model". A slot for a distinct id has one entry; if the slot is empty,
        its column is `columns`, a row that nobody reads.
      asked: `[bags, model * slots]`: the slots, of all owners, that each bag of this device
        adds. `asked`, `bags` and `beside` are None if "model" is 1 and slots are for bags:
        then the slots are this device's bags.
      bags: `[model * slots]`: the bag of each of these slots; the number of bags if a slot is
        empty. For distinct ids, the transpose of `asked`: a slot has several bags.
      crowded: `[1]` whether any device has too few places for another device.
      beside: function that an owner calls with the function that reads the sums of `owned`. It
        computes further results, which have no gradient, and returns the sums.
    """

    owned: CSR
    asked: CSR | None
    bags: jax.Array | CSR | None
    crowded: jax.Array | None
    beside: jax.tree_util.Partial | None = None

    @property
    def distinct(self) -> bool:
        """Whether the slots are for distinct ids."""
        return isinstance(self.bags, CSR)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parts", "route"),
    meta_fields=("nse", "wire_dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class DividedRows:
    """A `[rows, num_cols]` sparse matrix whose rows are divided over all devices.

    Every device has all columns of its rows. Rows are numbered in the order of the devices.
    It is made for one kernel, whose rows are divided over "model" (`route`) or replicated.

    `gather_matmul` and row gradients take it, under `jax.set_mesh`. A method whose docstring
    begins with "In `shard_map`" is called with a device's own part, `own_block(x)`, in
    `layout.call_on_each_device`.

    Attributes:
      parts: the rows of each device; leaves are `[data, model, n]`.
      route: destinations of the ids; None if the kernel is replicated.
      nse: capacity for entries on all devices together (static).
      wire_dtype: widest dtype in which sums and gradients are sent; None sends their own dtype
        (static).
    """

    parts: CSR
    route: Route | None
    nse: int
    wire_dtype: np.dtype | None

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return self.parts.num_cols

    @property
    def num_rows(self) -> int:
        """Number of rows of all devices together."""
        data, model = self.parts.indptr.shape[:2]
        return data * model * self.parts.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, num_cols)`."""
        return self.num_rows, self.num_cols

    @property
    def data(self) -> jax.Array | None:
        """`[data, model, n]` values, or None for an indicator matrix."""
        return self.parts.data  # pyrefly: ignore[bad-return]

    @property
    def kernel_spec(self) -> P:
        """The partition spec of the kernel."""
        return P() if self.route is None else P("model")

    def crowded(self) -> Bool[Array, ""] | None:
        """Whether all ids are gathered in this step; None if they are never gathered."""
        if self.route is None or self.route.crowded is None:
            return None
        return call_on_each_device(
            lambda crowded: own_block(crowded)[0],
            (self.route.crowded,),
            (P("data", "model"),),
            P(),
        )

    def certain(self) -> DividedRows:
        """This matrix, marked as having enough places for all ids."""
        if self.route is None:
            return self
        return dataclasses.replace(self, route=self.route._replace(crowded=None))

    def sorted_ahead(self) -> DividedRows:
        """This matrix, with entries that are sorted for their gradients while rows are sent.

        Otherwise sorting waits for the layers' gradients, and little runs while rows are sent.
        With several devices along "data" the matrix does not change: entries of all are sorted.
        """
        route = self.route
        if route is None or not self.crosses or axis_sizes()[0] > 1:
            return self

        owned = on_blocks(CSR.with_transposed, route.owned)
        return dataclasses.replace(self, route=route._replace(owned=owned))

    def read_after(self, x: jax.Array) -> DividedRows:
        """This matrix, which compiled programs read only after `x` was computed."""
        route = self.route
        if route is None or route.asked is None:
            return self

        def part(asked, x):
            first = lax.stop_gradient(x).reshape(-1)[0].astype(jnp.float32)
            first = lax.bitcast_convert_type(first, jnp.int32)
            return _after(own_block(asked), jnp.minimum(first & 0x7FFFFFFF, 0))

        specs = P("data", "model"), P(("data", "model"))
        asked = blocks_of(part, (route.asked, x), specs)
        return dataclasses.replace(self, route=route._replace(asked=asked))

    @property
    def crosses(self) -> bool:
        """Whether sums or rows are exchanged between devices."""
        return self.route is not None and self.route.asked is not None

    def with_gradient(self, parts: Any, owned: Any) -> DividedRows:
        """The cotangent of this matrix, from the gradients of its values."""
        route = self.route
        if route is not None:
            asked = None if route.asked is None else _only_data(route.asked, None)
            route = Route(_only_data(route.owned, owned), asked, None, None)
        return dataclasses.replace(
            self, parts=_only_data(self.parts, parts), route=route
        )

    def by_way(self, gather: Callable[[], Any], exchange: Callable[[], Any]) -> Any:
        """In `shard_map`: the result of `gather()` if places are too few, else of `exchange()`."""
        assert self.route is not None
        if self.route.crowded is None:
            return exchange()
        return lax.cond(self.route.crowded[0], gather, exchange)

    def block(self) -> CSR:
        """In `shard_map`: this device's columns of the rows of all devices along "model"."""
        assert self.route is not None
        x = gathered_columns(self.parts, self.route.owned.num_cols)
        return _cut(x, self.nse)

    def block_slopes(self, dy: jax.Array) -> jax.Array:
        """In `shard_map`: the gradients of the rows of `block`, by a gather."""
        return lax.all_gather(dy, "model", tiled=True)

    def after(self, zero: Int[Array, ""]) -> DividedRows:
        """In `shard_map`: this matrix; its gradients are exchanged after `zero` is computed."""
        route = self.route
        assert route is not None
        bags = route.bags
        if isinstance(bags, CSR):
            bags = _after(bags, zero)
        elif bags is not None:
            bags = bags + zero
        return dataclasses.replace(self, route=route._replace(bags=bags))

    def owned_slopes(self, dy: jax.Array, add: Add) -> jax.Array:
        """In `shard_map`: the gradients of the rows of `route.owned`, in the dtype of sending."""
        assert self.route is not None
        bags = self.route.bags
        if bags is None:
            return self._narrow(dy)
        if isinstance(bags, CSR):
            sent = add(bags, dy, self.wire_dtype)
        else:
            sent = dy.at[bags].get(mode="fill", fill_value=0)
        return _crossing(_exchanged, self._narrow(sent))

    def sent_back(self, read: Callable[[], jax.Array]) -> jax.Array:
        """In `shard_map`: the sums or rows of this device's slots, received from owners. `read`
        computes those of `route.owned`."""
        assert self.route is not None
        beside = self.route.beside
        sums = read() if beside is None else beside(read)
        # With one shard, this device is the owner of all rows.
        if axis_sizes()[1] == 1:
            return sums
        return _crossing(_exchanged, self._narrow(sums))

    def sums(
        self,
        read: Callable[[CSR, np.dtype | None], jax.Array],
        add: Add,
        dtype: np.dtype,
    ) -> jax.Array:
        """In `shard_map`: the sums of this device's rows.

        Args:
          read: function that sums rows of this device's part of the kernel, for a matrix with
            these columns. It may round sums to its second argument, a narrower dtype.
          add: the product of a matrix and an array; sums are computed in float32.
          dtype: dtype of the result.
        """
        if self.route is None:
            return read(self.parts, None)
        owned, asked = self.route.owned, self.route.asked
        if asked is None:
            return read(owned, None)

        def gather():
            sums = read(self.block(), None)
            wide = sums.astype(jnp.promote_types(sums.dtype, jnp.float32))
            total = lax.psum_scatter(wide, "model", scatter_dimension=0, tiled=True)
            return total.astype(dtype)

        # Rows are exchanged even if the result is not used: other layers compute meanwhile. The
        # host waits for the condition only after that.
        wire = self.wire_dtype if axis_sizes()[1] > 1 else None
        came = self.sent_back(lambda: read(owned, wire))
        if owned.transposed is not None:
            # The dependency starts the sort before the program waits for the rows.
            asked = _after(asked, jnp.minimum(owned.transposed.indptr[0], 0))
        return self.by_way(gather, lambda: add(asked, came, None).astype(dtype))

    def gathered(self) -> CSR:
        """The whole matrix on every device."""

        def part(parts):
            everywhere = jax.tree.map(
                lambda leaf: lax.all_gather(leaf, ("data", "model")), own_block(parts)
            )
            cut = jax.vmap(CSR.overfull_rows)(everywhere)
            return _cut(concatenate_rows(everywhere, cut), self.nse)

        return call_on_each_device(part, (self.parts,), (P("data", "model"),), P())

    def _narrow(self, values: jax.Array) -> jax.Array:
        return values.astype(narrower(values.dtype, self.wire_dtype))


def narrower(dtype: np.dtype, wire: np.dtype | None) -> np.dtype:
    """The dtype in which numbers are sent: `wire`, unless `dtype` has fewer bits."""
    return dtype if wire is None or wire.itemsize >= dtype.itemsize else wire


def _only_data(x: CSR, data: Any) -> CSR:
    return CSR.tree_unflatten(x.num_cols, (data, None, None, None))


def _after(x: CSR, zero: Int[Array, ""]) -> CSR:
    """Returns `x` with a dependency: compiled programs read it only after they have computed
    `zero`.
    """
    leaves = (x.data, x.indices, x.indptr + zero, None)
    return CSR.tree_unflatten(x.num_cols, leaves)


def _cut(x: CSR, nse: int) -> CSR:
    """The matrix with a smaller capacity; rows that do not fit are overfull."""
    data = None if x.data is None else x.data[:nse]
    return CSR.tree_unflatten(x.num_cols, (data, x.indices[:nse], x.indptr, None))


def slots_for_each(ids: int, distinct: int, *, model: int) -> Slots:
    """The capacities of `one_each` for a device's `ids` and `distinct` ids."""
    return slots_for(ids, ids, model=model, share=_share_of_each(distinct, model))


def _share_of_each(distinct: int, model: int) -> Share:
    return Share(1.0 if model == 1 else _ONE_EACH_ROOM, distinct=distinct / model)


def one_each(
    ids: Int[Array, "count"],
    num_cols: int,
    *,
    distinct: int,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> DividedRows:
    """Rows with one column each, and their route to the owners of a kernel's rows.

    A distinct id is sent once. Devices along "data" then exchange the gradients of all
    distinct ids.

    Args:
      ids: columns; -1 makes an empty row. The number of ids must be a multiple of the devices.
      num_cols: number of columns.
      distinct: the most distinct ids of a device.
      wire_dtype: dtype in which rows and gradients are sent; None is the kernel's.
    """
    data, model = axis_sizes()
    slots = slots_for_each(len(ids) // (data * model), distinct, model=model)

    def part(ids):
        used, count = ids >= 0, len(ids)
        ends = sums_so_far(used)
        places = jnp.where(used, ends - 1, count + jnp.arange(count))
        packed = jnp.zeros_like(ids)
        packed = packed.at[places].set(ids, mode="drop", unique_indices=True)
        indptr = jnp.append(jnp.int32(0), ends)
        return CSR.tree_unflatten(num_cols, (None, packed, indptr, None))

    parts = blocks_of(part, (ids,), (P(("data", "model")),))
    how = {"share": _share_of_each(distinct, model), "wire_dtype": wire_dtype}
    rows = divided(parts, nse=len(ids), by_rows=True, **how)
    fits = model == 1 or (slots.distinct and slots.count >= distinct)
    return rows.certain() if fits else rows


def parts_of(x: CSR) -> CSR:
    """Divides the rows of a matrix that all devices have: `DividedRows.parts`.

    Differentiable in `data`. The devices must divide the number of rows. Nothing is sent.
    """
    data, model = axis_sizes()
    size = x.num_rows // (data * model)

    def part(x):
        first = (lax.axis_index("data") * model + lax.axis_index("model")) * size
        ptr = lax.dynamic_slice_in_dim(x.indptr, first, size + 1)
        over = lax.dynamic_slice_in_dim(x.overfull_rows(), first, size)

        def entries(values):
            padded = jnp.pad(values, (0, x.nse))
            return lax.dynamic_slice_in_dim(padded, ptr[0], x.nse)

        ends = jnp.where(over, x.nse + 1, ptr[1:] - ptr[0])
        indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        values = None if x.data is None else entries(x.data)
        leaves = values, entries(x.indices), indptr, None
        return CSR.tree_unflatten(x.num_cols, leaves)

    return blocks_of(part, (dataclasses.replace(x, transposed=None),), (P(),))


def divided(
    parts: CSR,
    *,
    nse: int,
    by_rows: bool,
    share: Share = _EVEN,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> DividedRows:
    """The rows of a batch, and the route of its ids to the owners of the kernel's rows.

    Differentiable in `data`.

    Args:
      parts: the rows of each device, leaves `[data, model, n]`; all columns.
      nse: most entries of all devices together.
      by_rows: whether the kernel's rows are divided over "model". If not, it is replicated.
      share: ids of a device at the owner with the most of them.
      wire_dtype: dtype in which sums and gradients are sent; None is the kernel's.
    """
    wire = None if wire_dtype is None else jnp.dtype(wire_dtype)
    if not by_rows:
        return DividedRows(parts, None, nse, wire)
    slots, mine, width = _room_of(parts, nse, share)
    if axis_sizes()[1] == 1 and not slots.distinct:
        return DividedRows(parts, Route(parts, None, None, None), nse, wire)
    count, slot_count = min(mine, slots.places), min(mine, slots.count)

    def part(parts):
        if slots.distinct:
            return _distinct_route(parts, width, mine, slot_count)
        return _route(parts, width, mine, count, slot_count)

    return DividedRows(parts, on_blocks(part, parts), nse, wire)


def _room_of(parts: CSR, nse: int, share: Share) -> tuple[Slots, int, int]:
    """The capacities, the most entries that a device sends, and the width of an owner's block."""
    data, model = axis_sizes()
    mean = nse / (data * model)
    slots = slots_for(mean, parts.num_rows, model=model, share=share)
    return slots, min(parts.nse, slots.ids), padded_rows(parts.num_cols) // model


def _route(part: CSR, width: int, mine: int, count: int, slots: int) -> Route:
    """In `shard_map`: sends this device's ids to the owners of their rows.

    Args:
      part: the rows of this device.
      width: number of columns of an owner.
      mine: most entries that a device sends.
      count: number of places for each pair of devices.
      slots: number of slots for bags, for each pair of devices.
    """
    model, bags = axis_sizes()[1], part.num_rows
    position = jnp.arange(mine, dtype=jnp.int32)
    column = jnp.asarray(part.indices)[:mine]
    bag = segment_ids(part.indptr, mine)
    wrong = (column < 0) | (column >= part.num_cols)
    owner = jnp.where(wrong, 0, column // width)
    column = jnp.where(wrong, -1, column - owner * width)
    owner = jnp.where(bag < bags, owner, model)  # padding has no owner
    owner, order = lax.sort_key_val(owner, position, is_stable=True)
    column, bag = column[order], bag[order]
    starts = _first_at_least(owner, jnp.arange(model + 1, dtype=jnp.int32))
    counts = jnp.diff(starts)

    # A bag gets a slot at the first of its entries for each owner.
    before = (
        jnp.concatenate([owner[:1] - 1, owner[:-1]]),
        jnp.concatenate([bag[:1], bag[:-1]]),
    )
    first = ((owner != before[0]) | (bag != before[1])) & (owner < model)
    passed = jnp.concatenate([jnp.zeros(1, jnp.int32), sums_so_far(first)])
    slot = jnp.minimum(passed[1:] - 1 - passed[starts[owner]], slots)
    crowded = jnp.max(counts) > count
    crowded |= (part.indptr[-1] > mine) | (jnp.max(jnp.diff(passed[starts])) > slots)
    crowded = _on_any_device(crowded)

    # Positions of the entries that are sent to each owner.
    every = jnp.arange(count, dtype=jnp.int32)[None]
    place = starts[:-1, None] + every
    used = every < counts[:, None]

    def exchanged(values, padding):
        sent = jnp.where(used, values.at[place].get(mode="clip"), padding)
        return _exchanged(sent)

    came = jnp.stack([column, slot], axis=1)
    came = jnp.where(used[..., None], came.at[place].get(mode="clip"), slots)
    came = _exchanged(came)
    column, of_slot = came[..., 0], came[..., 1]
    filled = jnp.sum(of_slot < slots, axis=1, dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), sums_so_far(filled)])
    # Entries of a sender's slots in use come first in the data received from it.
    entry = jnp.arange(model * count, dtype=jnp.int32)
    device = jnp.minimum(segment_ids(before, model * count), model - 1)
    source = device * count + entry - before[device]

    def in_order(values):
        return values.reshape(-1).at[source].get(mode="clip")

    data = None
    if part.data is not None:
        data = jnp.asarray(part.data)[:mine][order]
        data = in_order(exchanged(data, 0))
    of_slot = device * slots + in_order(of_slot)
    is_first = jnp.concatenate([jnp.ones(1, bool), of_slot[1:] != of_slot[:-1]])
    is_first &= entry < before[-1]
    # `jnp.repeat` is avoided, because XLA would evaluate it at compile time.
    ptr = jnp.broadcast_to(before[1:, None], (model, slots)).reshape(-1)
    ptr = ptr.at[jnp.where(is_first, of_slot, model * slots + entry)].set(
        entry, mode="drop", unique_indices=True
    )
    ptr = jnp.concatenate([ptr, before[-1:]])
    owned = CSR.tree_unflatten(width, (data, in_order(column), ptr, None))

    # Mask of the entries that start a slot, and numbers of the slots whose sums this device
    # receives.
    first &= slot < slots
    number = owner * slots + slot
    bag_of = jnp.full(model * slots, bags, jnp.int32)
    bag_of = bag_of.at[jnp.where(first, number, model * slots + position)].set(
        bag, mode="drop", unique_indices=True
    )
    number = (
        jnp.zeros(mine, jnp.int32)
        .at[order]
        .set(jnp.where(first, number, -1), unique_indices=True)
    )
    first = number >= 0
    passed = jnp.concatenate([jnp.zeros(1, jnp.int32), sums_so_far(first)])
    asked = jnp.zeros(mine, jnp.int32)
    asked = asked.at[jnp.where(first, passed[:-1], mine + position)].set(
        number, mode="drop", unique_indices=True
    )
    ptr = passed.at[part.indptr].get(mode="clip")
    asked = CSR.tree_unflatten(model * slots, (None, asked, ptr, None))
    return Route(owned, asked, bag_of, crowded[None])


def _first_at_least(ascending: jax.Array, bounds: jax.Array) -> jax.Array:
    """Does the work of `searchsorted` for few bounds in one pass; on a GPU `searchsorted` is a
    loop of launches.
    """
    found = jnp.searchsorted(ascending, bounds, method="compare_all")
    return found.astype(jnp.int32)


def _distinct_route(part: CSR, width: int, mine: int, count: int) -> Route:
    """In `shard_map`: sends this device's distinct ids to the owners of their rows.

    Args:
      part: the rows of this device.
      width: number of columns of an owner.
      mine: most entries that a device sends.
      count: number of slots for each pair of devices.
    """
    model = axis_sizes()[1]
    end = model * width  # column number of entries that are ignored
    bag = segment_ids(part.indptr, mine)
    by_column = Transposed.of(part.columns(padding=end)[:mine], bag, end)
    column = by_column.columns
    owners = jnp.arange(model + 1, dtype=jnp.int32)
    starts = _first_at_least(column, owners * width)
    slots = _Slots.of(
        by_column.indptr, by_column.numbers(end), starts, column // width, count
    )
    crowded = _on_any_device(slots.lack | (part.indptr[-1] > mine))
    sent = column.at[slots.starts[:-1]].get(mode="clip").reshape(model, count)
    sent = jnp.where(slots.filled, sent - owners[:-1, None] * width, width)
    # An id that no owner has gets an invalid slot, which makes its bag NaN.
    slot = jnp.where(column < end, slots.slot, -1)
    owned = _one_each(width, _exchanged(sent).reshape(-1))
    way = slots.way_back(part, by_column.order, by_column.rows, slot)
    return Route(owned, *way, crowded[None])


class _Slots(NamedTuple):
    """The slots of a device's entries, which are sorted by id.

    Attributes:
      starts: `[model * count + 1]` the first entry of each slot.
      filled: `[model, count]` whether the slot has an id.
      slot: slot of each entry.
      lack: `[]` whether an owner has more ids than slots.
    """

    starts: Int[Array, "slots_and_1"]
    filled: Bool[Array, "model count"]
    slot: Int[Array, "entries"]
    lack: Bool[Array, ""]

    @classmethod
    def of(
        cls,
        indptr: Int[Array, "ids_and_1"],
        number: Int[Array, "entries"],
        starts: Int[Array, "model_and_1"],
        owner: Int[Array, "entries"],
        count: int,
    ) -> _Slots:
        """In `shard_map`: assigns slots.

        Args:
          indptr: the first entry of each distinct id, in the order of owners.
          number: number of the distinct id of each entry.
          starts: the first entry of each owner, and the end of the entries that count.
          owner: owner of each entry.
          count: number of slots for each pair of devices.
        """
        # The number of each owner's first distinct id.
        firsts = jnp.where(starts > 0, number.at[starts - 1].get(mode="clip") + 1, 0)
        counts = jnp.diff(firsts)
        place = jnp.arange(count, dtype=jnp.int32)[None]
        ids = firsts[:-1, None] + jnp.minimum(place, counts[:, None])
        begins = indptr.at[ids.reshape(-1)].get(mode="clip")
        return cls(
            jnp.concatenate([begins, starts[-1:]]),
            place < counts[:, None],
            owner * count + number - firsts.at[owner].get(mode="clip"),
            jnp.max(counts) > count,
        )

    def way_back(
        self,
        part: CSR,
        order: Int[Array, "entries"],
        bag: Int[Array, "entries"],
        slot: Int[Array, "entries"],
    ) -> tuple[CSR, CSR]:
        """The matrices `Route.asked` and `Route.bags`.

        Args:
          part: the rows of this device.
          order: position in `part` of each entry.
          bag: bag of each entry.
          slot: slot whose row each entry reads.
        """
        slots, mine = self.filled.size, len(order)
        data = None if part.data is None else jnp.asarray(part.data)[:mine]
        of_slot = None if data is None else data[order]
        asked = jnp.zeros(mine, jnp.int32)
        asked = asked.at[order].set(slot, unique_indices=True)
        return (
            CSR.tree_unflatten(slots, (data, asked, part.indptr, None)),
            CSR.tree_unflatten(part.num_rows, (of_slot, bag, self.starts, None)),
        )


def _one_each(width: int, columns: Int[Array, "rows"]) -> CSR:
    """A matrix with one entry in each row."""
    every = jnp.arange(len(columns) + 1, dtype=jnp.int32)
    return CSR.tree_unflatten(width, (None, columns, every, None))


def _on_any_device(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    return lax.pmax(flag.astype(jnp.int32), ("data", "model")) > 0


class SentKeys(NamedTuple):
    """Distinct ids, sent to their owners as keys; the owners look up the columns of the keys.

    Leaves are `[data, model, n]`: each device has its own.

    Attributes:
      rows: the matrix, with the route of its ids. No pair had too few places. In `route.owned`
        a column is `num_cols` until the owner sets it, or if the id has none.
      keys: arrays of numbers that identify the id of each slot of `route.owned`.
      times: number of occurrences in the batch of the id of each slot; 0 for a slot without an
        id; -1 for the empty slot that entries which do not count read.
    """

    rows: DividedRows
    keys: Any
    times: Int[Array, "data model slots"]

    def at(self, columns: Int[Array, "data model slots"]) -> SentKeys:
        """Sets the columns of the slots at the owners."""
        route = self.rows.route
        assert route is not None
        owned = route.owned
        leaves = (None, columns, owned.indptr, None)
        owned = CSR.tree_unflatten(owned.num_cols, leaves)
        rows = dataclasses.replace(self.rows, route=route._replace(owned=owned))
        return self._replace(rows=rows)


def keys_sent(
    parts: CSR,
    numbers: UInt32[Array, "data model entries"],
    keys: Any,
    wanted: Bool[Array, "data model entries"],
    *,
    nse: int,
    share: Share,
    wire_dtype: jax.typing.DTypeLike | None,
) -> tuple[SentKeys, Bool[Array, ""]] | None:
    """Sends distinct ids to their owners as keys; see `divided`.

    Args:
      parts: the rows of each device; a column below 0 makes its row NaN, other columns are not
        read.
      numbers: hashes of the entries' keys. They divide 2^32 evenly among the owners;
        equal keys have equal hashes.
      keys: arrays of 32-bit numbers, one for each entry.
      wanted: which entries count. Others add nothing to their rows.
      nse: most entries of all devices together.
      share: ids of a device at the owner with the most of them.
      wire_dtype: dtype in which sums and gradients are sent; None is the kernel's.

    Returns:
      The ids, and whether a pair of devices has too few places. None if there are not fewer
      distinct ids than bags, so that it is cheaper to send sums.
    """
    if axis_sizes()[1] == 1:
        return None
    slots, mine, width = _room_of(parts, nse, share)
    if not slots.distinct:
        return None
    # Ignored entries read one additional slot, which is empty.
    count = min(mine, slots.count) + 1

    def part(part, numbers, keys, wanted):
        return _keys_route(part, numbers, keys, wanted, width, mine, count)

    route, keys, times = on_blocks(part, parts, numbers, keys, wanted)
    wire = None if wire_dtype is None else jnp.dtype(wire_dtype)
    rows = DividedRows(parts, route, nse, wire)
    crowded = rows.crowded()
    assert crowded is not None
    return SentKeys(rows.certain(), keys, times), crowded


def _keys_route(
    part: CSR,
    numbers: UInt32[Array, "entries"],
    keys: Any,
    wanted: Bool[Array, "entries"],
    width: int,
    mine: int,
    count: int,
) -> tuple[Route, Any, Int[Array, "slots"]]:
    """In `shard_map`: computes the route of a device's keys. Returns the route, the received keys,
    and how often each of them occurs.
    """
    model, last = axis_sizes()[1], np.uint32(0xFFFFFFFF)
    bag = segment_ids(part.indptr, mine)
    wrong = jnp.asarray(part.indices)[:mine] < 0
    counts = wanted[:mine] & ~wrong & (bag < part.num_rows)
    number = jnp.where(counts, jnp.minimum(numbers[:mine], last - 1), last)
    position = jnp.arange(mine, dtype=jnp.int32)
    number, order = lax.sort_key_val(number, position, is_stable=True)
    here = number < last
    keys = jax.tree.map(lambda word: word[order], keys)
    # If another key with an equal hash is between two equal keys, the two get separate slots, and
    # the owner looks up both.
    words = (number, *jax.tree.leaves(keys))
    first = here & functools.reduce(
        operator.or_, (jnp.append(True, w[1:] != w[:-1]) for w in words)
    )
    of_id = sums_so_far(first) - 1
    bounds = np.arange(model, dtype=np.uint64) * 2**32 // model
    bounds = jnp.asarray(np.append(bounds, last), jnp.uint32)
    starts = _first_at_least(number, bounds)
    indptr = jnp.full(mine + 1, starts[-1])
    indptr = indptr.at[jnp.where(first, of_id, mine + 1 + position)].set(
        position, mode="drop", unique_indices=True
    )
    owner = jnp.sum(number[:, None] >= bounds[None, 1:-1], axis=1, dtype=jnp.int32)
    slots = _Slots.of(indptr, of_id, starts, owner, count)
    empty = jnp.sum(slots.filled[0], dtype=jnp.int32)
    lack = slots.lack | jnp.all(slots.filled[0]) | (part.indptr[-1] > mine)
    crowded = _on_any_device(lack)

    times = jnp.diff(slots.starts)
    idle = jnp.any(~wanted[:mine] & ~wrong & (bag < part.num_rows))
    times = times.at[empty].set(jnp.where(idle, -1, times[empty]))
    leaves, kind = jax.tree.flatten(keys)
    sent = [leaf.at[slots.starts[:-1]].get(mode="clip") for leaf in leaves]
    sent = [word.reshape(model, 1, count).astype(jnp.uint32) for word in (*sent, times)]
    came = jnp.moveaxis(_exchanged(jnp.concatenate(sent, axis=1)), 1, 0)
    *came, times = came.reshape(len(sent), model * count)
    came = [word.astype(leaf.dtype) for word, leaf in zip(came, leaves, strict=True)]

    slot = jnp.where(here, slots.slot, jnp.where(wrong[order], -1, empty))
    way = slots.way_back(part, order, bag[order], slot)
    # The owner sets these columns later.
    owned = _one_each(width, jnp.full(model * count, width, jnp.int32))
    route = Route(owned, *way, crowded[None])
    return route, jax.tree.unflatten(kind, came), times.astype(jnp.int32)


def _exchanged(values: jax.Array) -> jax.Array:
    """Sends the p-th part of the values to the p-th device along "model"."""
    if axis_sizes()[1] == 1:
        return values
    return lax.all_to_all(values, "model", split_axis=0, concat_axis=0, tiled=True)


def _crossing(move: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """Applies `move` to the bits of the values: XLA would widen bfloat16 on a device that does not
    compute in it.
    """
    if values.dtype.itemsize > 2:
        return move(values)
    bits = lax.bitcast_convert_type(values, jnp.uint16)
    return lax.bitcast_convert_type(move(bits), values.dtype)


class OwnTerms(NamedTuple):
    """In `shard_map`: the terms of the gradients of a device's rows, from all along "data".

    Attributes:
      column: column of each entry; `width` if it does not count.
      row: row of `slopes` that each entry reads.
      data: value of each entry, or None if all are 1.
      slopes: gradients of sums, in the dtype in which they were received.
    """

    column: Int[Array, "entries"]
    row: Int[Array, "entries"]
    data: jax.Array | None
    slopes: Float[Array, "rows hidden"]


def own_terms(
    x: DividedRows, dy: jax.Array, width: int, add: Add, *, gather: bool
) -> OwnTerms:
    """In `shard_map`: the terms of one matrix, by a gather or an exchange.

    A device has `width` rows of the kernel.
    """
    assert x.route is not None
    if gather:
        block, slopes = x.block(), x.block_slopes(dy)
    else:
        block, slopes = x.route.owned, x.owned_slopes(dy, add)
    if x.route.distinct and not gather:
        column = gather_over_data(block.columns(padding=block.num_cols))
        row = jnp.arange(len(column), dtype=jnp.int32)
    else:
        column, row = entries_over_data(block)
    column = jnp.where(column < block.num_cols, column, width)
    slopes = _crossing(gather_over_data, slopes)
    return OwnTerms(column, row, gather_over_data(block.data), slopes)
