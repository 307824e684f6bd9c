"""The ids of a batch as one sparse matrix for each stack of tables.

A row of the matrix is a *bag*, whose table rows are summed. Each example has a fixed number of
bags: one for a feature that is summed, `length` for one whose ids are kept in order::

    row      example * bags + bag
    column   row number of the id in the stack

The number of operations does not grow with the number of features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.placement import Place, Stack, StackedFeature
from sparsejax.mesh.exchange import DividedRows, SentKeys
from sparsejax.mesh.layout import (
    axes_are_explicit,
    axis_sizes,
    call_with_auto_axes,
    mesh_is_set,
    replicated,
)
from sparsejax.mesh.per_device import blocks_of
from sparsejax.ops.hash_index import TableKeys
from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR, MAX_ENTRIES, segment_ids, sums_so_far
from sparsejax.wide_ids import WideIds

# Sharding of arrays whose first axis is the example.
_BY_EXAMPLES = (P(("data", "model")),)
Array = jax.Array | np.ndarray
Ids = Array | CSR | WideIds

# Marks an invalid column: the row of the matrix becomes NaN, and the id has no row.
WRONG = -1
WITHOUT_ROW = -2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FeatureBatch:
    """The ids of a batch, as `EmbeddingCollection.pack` makes them.

    >>> tables = {"item": TableConfig(100, 8)}
    >>> embeddings = EmbeddingCollection(tables, {"item": "item"}, rngs=nnx.Rngs(0))
    >>> batch = embeddings.pack({"item": np.array([3, 99, -1], np.int32)})
    >>> [x.indptr.tolist() for x in batch.stacks.values()]
    [[0, 1, 2, 2]]

    Attributes:
      stacks: for each stack of tables, a matrix with a row for each bag. Combiners are not applied
          yet. Columns need not ascend inside a row. On a mesh there may be a matrix for each
          device, with its own examples: leaves are then `[data, model, n]`.
      keys: for each stack of dynamic tables, the key of each entry of its matrix.
      assigned: whether the columns of stacks of dynamic tables are known, by
          `EmbeddingCollection.assign_rows`. A column is `WITHOUT_ROW` for an id without a row.
      stage: `[]` int32, for tables in host memory: version number of the devices' tables for
          which the columns are valid. None if `EmbeddingCollection.staged` has not copied the
          rows.
      rows: for each stack in host memory, the row number of each entry of its matrix, whose
          columns are then slots on the devices.
      new: for each stack of dynamic tables in host memory with uninitialized rows, a mask of
          entries, True for one entry of each such row.
      routes: for each stack whose ids were already sent over the mesh by
          `EmbeddingCollection.ahead`, the matrix, with combiners, and the routes of its ids;
          `stacks` then lacks this stack. All ids fit in the exchange, so a step does not check
          this. For dynamic tables it also has the keys.
    """

    stacks: dict[str, CSR]
    keys: dict[str, TableKeys] = dataclasses.field(default_factory=dict)
    assigned: bool = dataclasses.field(default=False, metadata={"static": True})
    stage: Array | None = None
    rows: dict[str, Array | None] = dataclasses.field(default_factory=dict)
    new: dict[str, Array] = dataclasses.field(default_factory=dict)
    routes: dict[str, DividedRows | SentKeys] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CandidateBatch(FeatureBatch):
    """The ids of requests, and of the candidates of each request.

    An example is a candidate; candidates of a request are adjacent. The vectors of a request are
    looked up once, and broadcast to its candidates.

    Attributes:
      requests: ids of each feature, an example for each request.
      candidates: ids of each feature, an example for each candidate. A feature has ids either here
          or in `requests`, and is `[n, 0]` in the other.
    """

    stacks: dict[str, CSR] = dataclasses.field(default_factory=dict)
    requests: Mapping[str, Ids]
    candidates: Mapping[str, Ids]


def pack(
    stacks: Sequence[Stack],
    ids: Mapping[str, Ids],
    *,
    nse: Mapping[str, int] | None = None,
) -> FeatureBatch:
    """Packs the ids of a batch; see `EmbeddingCollection.pack`."""
    nse = {} if nse is None else nse
    features = {f.name: f for stack in stacks for f in stack.features}
    if ids.keys() != features.keys():
        missing, unknown = features.keys() - ids.keys(), ids.keys() - features.keys()
        what = f"lack {sorted(missing)}" if missing else f"have {sorted(unknown)}"
        raise ValueError(f"the features are {sorted(features)}, but the ids {what}")
    if unknown := nse.keys() - {stack.name for stack in stacks}:
        raise ValueError(
            f"nse has {sorted(unknown)}; the stacks are {[s.name for s in stacks]}"
        )
    given = {name: _given(features[name], value) for name, value in ids.items()}
    narrow = {name: value for name, (value, _) in given.items()}
    wide = {name: words for name, (_, words) in given.items() if words is not None}
    sizes = {n: _batch_size(features[n], value) for n, value in narrow.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"features differ in their numbers of examples: {sizes}")
    batch = next(iter(sizes.values()))
    leaves = jax.tree.leaves((narrow, wide))
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    packed, keys = {}, {}
    for stack in stacks:
        if not stack.features:
            continue
        values = [narrow[feature.name] for feature in stack.features]
        room = sum(v.nse if isinstance(v, CSR) else v.size for v in values)
        room = nse.get(stack.name, room)
        if max(room, batch * stack.bags) > MAX_ENTRIES:
            raise ValueError(
                f"{batch:,} examples have {room:,} ids in {batch * stack.bags:,} bags, "
                "more than int32 can number (2^31 - 1); make batches smaller"
            )
        if on_host:
            for feature, value in zip(stack.features, values, strict=True):
                _check_on_host(feature, value)

        def made(make, *given, size=(stack, batch, room)):
            if on_host:
                return make(np, *size, *given)
            make = functools.partial(make, jnp, *size)
            return call_with_auto_axes(make, *given, out_specs=P())

        if words := [wide[f.name] for f in stack.features if f.name in wide]:
            both = made(_packed_keys, values, words)
            packed[stack.name], keys[stack.name] = both
        elif not on_host and stack.name not in nse and _are_divided(batch, values):
            packed[stack.name] = _packed_on_devices(stack, values)
        else:
            packed[stack.name] = made(_packed, values)
    return FeatureBatch(packed, keys)


def checked(stacks: Sequence[Stack], ids: Mapping[str, Ids]) -> dict[str, Ids]:
    """Checks the ids of a batch; returns them, with 64-bit NumPy ids as pairs of 32-bit words.

    A compiled program would truncate 64-bit ids to 32 bits.

    Raises:
      TypeError: ids are not int32.
      ValueError: NumPy's ids have a wrong shape, an id is outside its table, or a list is too
        long.
    """
    features, found = {f.name: f for stack in stacks for f in stack.features}, dict(ids)
    for name in features.keys() & ids.keys():
        feature = features[name]
        value, wide = _given(feature, ids[name])
        found[name] = value if wide is None else wide
        # Other dtypes raise an error in `_batch_size`.
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value)):
            _batch_size(feature, value)
            _check_on_host(feature, value)
    return found


def _given(feature: StackedFeature, value: Ids) -> tuple[Any, WideIds | None]:
    """The ids of a feature as they are packed; for dynamic tables also as pairs of 32-bit words.

    For a dynamic table, the position of each id among the ids of the feature is packed.
    """
    value = _last_ids(feature, value)
    if feature.table.dynamic:
        wide = _wide_ids(feature, value)
        return _positions(wide), wide
    if isinstance(value, WideIds):
        value = value.narrow(feature.table.config.num_rows)
    return value, None


def _last_ids(feature: StackedFeature, value: Ids) -> Ids:
    """The last `length` ids in each row of an array, if the feature keeps only the last ones.

    Lists in other forms are cut when they are packed.
    """
    length = feature.config.length
    if feature.config.longer == "error" or length is None:
        return value
    if isinstance(value, WideIds):
        if value.offsets is not None or _width(value.low) <= length:
            return value
        if value.present is None:
            return jax.tree.map(lambda array: array[:, -length:], value)
        at = _last_places(value.present, length)
        return jax.tree.map(lambda array: _taken(array, at), value)
    if not isinstance(value, Array) or value.ndim != 2 or _width(value) <= length:
        return value
    return _taken(value, _last_places(value != -1, length))


def _last_places(present: Array, length: int) -> Array:
    """`[batch, length]`: the columns of the last `length` ids, starting with the first if there
    are fewer.
    """
    xp = np if isinstance(present, np.ndarray) else jnp
    behind = xp.arange(1, present.shape[1] + 1, dtype=np.int32)[None]
    ends = xp.max(xp.where(present, behind, 0), axis=1, keepdims=True)
    return xp.maximum(ends - length, 0) + xp.arange(length, dtype=np.int32)[None]


def _taken(array: Array, at: Array) -> Array:
    """Gathers the columns `at` from each row."""
    xp = np if isinstance(array, np.ndarray) else jnp
    return array[xp.arange(len(array), dtype=np.int32)[:, None], at]


def divides_batch(batch: int) -> bool:
    """Whether the current mesh divides a batch of this size equally over all devices."""
    if batch == 0 or not mesh_is_set() or axes_are_explicit():
        return False
    data, model = axis_sizes()
    return batch % (data * model) == 0


def _are_divided(batch: int, values: Sequence[Any]) -> bool:
    """Whether each device packs only its own examples.

    The entries of a CSR are not divided by examples, so every device has all of them.
    """
    given = not any(isinstance(v, CSR) for v in values) and any(v.size for v in values)
    return given and divides_batch(batch)


def _packed_on_devices(stack: Stack, values: Sequence[Ids]) -> CSR:
    """Packs arrays of ids into a matrix for each device."""

    def part(values):
        batch, room = len(values[0]), sum(v.size for v in values)
        return _packed(jnp, stack, batch, room, values)

    return blocks_of(part, (list(values),), _BY_EXAMPLES)


def keys_on_devices(
    stack: Stack, ids: Mapping[str, Ids], exists: Array | None
) -> tuple[CSR, TableKeys] | None:
    """Packs ids of dynamic tables into a matrix and keys for each device; None if ids are lists.

    Examples are divided over the devices. `exists` is passed to `without_examples`.
    """
    words = [_wide_ids(feature, ids[feature.name]) for feature in stack.features]
    if any(each.offsets is not None for each in words):
        return None

    def part(values):
        words, exists = values
        batch, room = len(words[0].low), sum(each.low.size for each in words)
        positions = [_positions(each) for each in words]
        x, keys = _packed_keys(jnp, stack, batch, room, positions, words)
        return x if exists is None else _without(x, exists), keys

    return blocks_of(part, ((words, exists),), _BY_EXAMPLES)


def _wide_ids(feature: StackedFeature, value: Any) -> WideIds:
    """Converts the ids of a dynamic table to `WideIds`."""
    if feature.config.outside != "error":
        raise ValueError(
            f"feature {feature.name!r} has outside={feature.config.outside!r}, but every "
            "64-bit id is one of a dynamic table: leave outside out"
        )
    if isinstance(value, WideIds):
        return value
    if isinstance(value, CSR):
        raise TypeError(
            f"ids of feature {feature.name!r}, of a dynamic table, have 64 bits: give lists "
            "as WideIds.ragged(values, offsets)"
        )
    try:
        return WideIds.of(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"feature {feature.name!r}: {error}") from None


def _positions(value: WideIds) -> Array | CSR:
    """Replaces each id by its position among the ids of its feature."""
    shape = value.low.shape
    count = np.arange(value.low.size, dtype=np.int32).reshape(shape)
    if value.offsets is not None:
        leaves = (value.weights, count, value.offsets, None)
        return CSR.tree_unflatten(MAX_ENTRIES, leaves)
    if value.present is None:
        return count
    xp = np if isinstance(value.present, np.ndarray) else jnp
    return xp.where(value.present, count, -1)


def _packed_keys(
    xp: ModuleType,
    stack: Stack,
    batch: int,
    nse: int,
    positions: Sequence[Array | CSR],
    words: Sequence[WideIds],
) -> tuple[CSR, TableKeys]:
    """Packs ids of dynamic tables into a matrix, whose columns are not known yet, and keys."""
    tables = list(stack.tables)
    numbers = [tables.index(feature.table) for feature in stack.features]
    numbers = np.asarray(numbers, np.int32)
    starts = np.cumsum([0, *(ids.low.size for ids in words)], dtype=np.int32)
    are_there = all(ids.present is None and ids.offsets is None for ids in words)
    if are_there and nse == starts[-1]:
        return _whole_keys(xp, stack, batch, numbers, words)

    def moved(value, start):
        if isinstance(value, CSR):
            return value.with_indices(value.indices + start, stack.num_rows)
        return xp.where(value < 0, value, value + start).astype(np.int32)

    moved_all = [
        moved(v, start) for v, start in zip(positions, starts[:-1], strict=True)
    ]
    x = _packed(xp, stack, batch, nse, moved_all)
    table = np.repeat(numbers, np.diff(starts))
    low = xp.concatenate([xp.asarray(ids.low).reshape(-1) for ids in words])
    high = xp.concatenate([xp.asarray(ids.high).reshape(-1) for ids in words])
    at = xp.maximum(xp.asarray(x.indices), 0)
    if len(table) == 0:
        keys = TableKeys(at, at.astype(np.uint32), at.astype(np.uint32))
    else:
        keys = TableKeys(xp.asarray(table)[at], high[at], low[at])
    columns = xp.minimum(xp.asarray(x.indices), 0)  # `WRONG` is negative, so it stays
    return x.with_indices(columns, stack.num_rows), keys


def _whole_keys(
    xp: ModuleType,
    stack: Stack,
    batch: int,
    numbers: np.ndarray,
    words: Sequence[WideIds],
) -> tuple[CSR, TableKeys]:
    """`_packed_keys` for arrays without missing ids: each id keeps its position.

    `numbers` are the numbers of the tables that the features read.
    """
    low = _side_by_side(xp, batch, [ids.low for ids in words]).reshape(-1)
    high = _side_by_side(xp, batch, [ids.high for ids in words]).reshape(-1)
    table = np.repeat(numbers, [_width(ids.low) for ids in words])
    table = xp.broadcast_to(xp.asarray(table), (batch, len(table))).reshape(-1)
    pairs = [(f, ids.low) for f, ids in zip(stack.features, words, strict=True)]
    ends = _ends_of_bags(xp, stack, batch, pairs)
    indptr = xp.concatenate([xp.zeros(1, np.int32), ends])
    leaves = (None, xp.zeros(len(low), np.int32), indptr, None)
    return CSR.tree_unflatten(stack.num_rows, leaves), TableKeys(table, high, low)


def _side_by_side(xp: ModuleType, batch: int, arrays: Sequence[Array]) -> Array:
    """Concatenates arrays `[batch]` and `[batch, n]` to `[batch, ids of an example]`."""
    columns = [xp.asarray(array).reshape(batch, _width(array)) for array in arrays]
    return xp.concatenate(columns, axis=1)


def _ends_of_bags(xp: ModuleType, stack: Stack, batch: int, lists) -> Array:
    """The end of each bag's entries, `[batch * bags]`, if no id is missing."""
    ends = np.cumsum(_lengths_of_bags(stack, lists), dtype=np.int32)
    examples = xp.arange(batch, dtype=np.int32)[:, None] * int(ends[-1])
    return (examples + ends[None]).reshape(-1)


def without_examples(batch: FeatureBatch, exists: Array) -> FeatureBatch:
    """Removes the ids of padding examples, so that they get no row in dynamic tables.

    Args:
      batch: a batch with one id for each example and feature.
      exists: `[batch]` bool: False for padding examples.
    """

    def of(x: CSR) -> CSR:
        # Without replication, XLA would divide the ids, and move all arrays made from them between
        # devices in each step.
        return replicated(_without(x, exists))

    stacks = {n: of(x) if n in batch.keys else x for n, x in batch.stacks.items()}
    return dataclasses.replace(batch, stacks=stacks)


def _without(x: CSR, exists: Array) -> CSR:
    columns = jnp.asarray(x.indices).reshape(len(exists), -1)
    columns = jnp.where(exists[:, None], columns, WITHOUT_ROW).reshape(-1)
    return x.with_indices(columns)


class _Entries(NamedTuple):
    """Entries of a matrix: arrays with one element for each id.

    Attributes:
      row: bag of each id.
      column: row number of the id in the stack; `WRONG` for an id outside its table.
      kept: whether the id counts. Others are ignored.
      first: index of the first entry of the bag. Entries of a bag are adjacent.
      weight: weight of each id, or None if all are 1.
    """

    row: Array
    column: Array
    kept: Array
    first: Array
    weight: Array | None


def _packed(
    xp: ModuleType, stack: Stack, batch: int, nse: int, values: Sequence[Ids]
) -> CSR:
    """Packs ids into the matrix of a stack. `xp` is NumPy or jax.numpy."""
    pairs = list(zip(stack.features, values, strict=True))
    lists = [(f, v) for f, v in pairs if not isinstance(v, CSR)]
    matrices = [(f, v) for f, v in pairs if isinstance(v, CSR)]
    parts, cut = [], None
    if lists:
        parts.append(_of_lists(xp, stack, batch, lists))
    if matrices:
        entries, cut = _of_matrices(xp, stack, batch, matrices)
        parts.append(entries)
    entries = parts[0] if len(parts) == 1 else _joined(xp, *parts)
    rows, size = batch * stack.bags, len(entries.row)
    sums = sums_so_far
    if xp is np:
        sums = functools.partial(np.cumsum, dtype=np.int32)
    zero = xp.zeros(1, np.int32)
    kept = entries.kept.astype(np.int32)
    # The number of kept entries before each entry, and in total.
    before = xp.concatenate([zero, sums(kept)])
    if matrices:
        counts = _added(xp, rows, xp.where(entries.kept, entries.row, rows), kept)
        indptr = xp.concatenate([zero, sums(counts)])
        place = indptr[entries.row] + before[:-1] - before[entries.first]
    else:  # without matrices, entries are already in the order of the bags
        ends = _ends_of_bags(xp, stack, batch, lists)
        indptr = xp.concatenate([zero, before[ends]])
        place = before[:-1]
    if cut is not None:
        # The first row that lacks ids, and all later rows, are marked as overfull.
        over = xp.arange(1, rows + 1, dtype=np.int32) > cut
        ends = xp.where(over, xp.maximum(indptr[1:], nse + 1), indptr[1:])
        indptr = xp.concatenate([zero, ends])
    if xp is np and indptr[-1] > nse:
        raise ValueError(
            f"the batch has {indptr[-1]:,} ids for the stack {stack.name!r}, but there is "
            f"room for nse={nse:,}"
        )
    # Entries to be dropped get unique positions outside the array.
    left_out = size + nse + xp.arange(size, dtype=np.int32)
    place = xp.where(entries.kept, place, left_out)
    indices = _written(xp, nse, place, entries.column)
    data = entries.weight
    if data is not None:
        data = _written(xp, nse, place, data)
    # The constructor is avoided: it requires ascending columns in each row, and checks values
    # again.
    return CSR.tree_unflatten(stack.num_rows, (data, indices, indptr, None))


def _of_lists(xp, stack: Stack, batch: int, lists) -> _Entries:
    """The entries for arrays `[batch]` and `[batch, n]` of ids, in the order of the bags."""
    widths = [_width(value) for _, value in lists]
    ids = _side_by_side(xp, batch, [value for _, value in lists])

    def of_each(values):  # [1, ids of an example]
        values = np.asarray(values)
        values = values if values.dtype == bool else np.int32(values)
        return np.repeat(values, widths)[None]

    features = [feature for feature, _ in lists]
    bag = [
        feature.first_bag
        + (np.arange(width) if feature.config.length else np.zeros(width))
        for feature, width in zip(features, widths, strict=True)
    ]
    bag = np.concatenate(bag).astype(np.int32)
    first = np.searchsorted(bag, bag).astype(np.int32)[None]
    column, kept = _columns(stack, xp, ids, features, of_each)
    example = xp.arange(batch, dtype=np.int32)[:, None]
    row, first = example * stack.bags + bag[None], example * ids.shape[1] + first
    flat = (array.reshape(-1) for array in (row, column, kept & (ids != -1), first))
    return _Entries(*flat, weight=None)


def _of_matrices(
    xp, stack: Stack, batch: int, matrices: Sequence[tuple[StackedFeature, CSR]]
) -> tuple[_Entries, Array]:
    """The entries of CSR matrices, and the number of the first row that lacks ids."""
    features = [feature for feature, _ in matrices]
    sizes = [x.nse for _, x in matrices]
    starts_of = np.cumsum([0, *sizes], dtype=np.int32)[:-1]
    ptr = xp.stack([xp.asarray(x.indptr) for _, x in matrices])
    room = np.asarray(sizes, np.int32)[:, None]
    # A group is a row of a matrix, or the padding after its last row.
    ends = xp.concatenate([xp.minimum(ptr[:, 1:], room), xp.asarray(room)], axis=1)
    starts = xp.concatenate([xp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    ends, starts = ((a + starts_of[:, None]).reshape(-1) for a in (ends, starts))
    total = int(sum(sizes))
    if xp is np:
        group = np.repeat(np.arange(len(ends), dtype=np.int32), ends - starts)
    else:
        group = segment_ids(jnp.concatenate([starts[:1], ends]), total)
    feature, example = group // (batch + 1), group % (batch + 1)

    def of_each(values):
        values = np.asarray(values)
        return xp.asarray(values if values.dtype == bool else np.int32(values))[feature]

    ids = xp.concatenate([xp.asarray(x.indices) for _, x in matrices])
    column, kept = _columns(stack, xp, ids, features, of_each)
    entry = xp.arange(total, dtype=np.int32)
    position = entry - starts[group]
    length = of_each([f.config.length or 0 for f in features])
    begin = starts[group]
    if any(f.config.longer == "last" for f in features):
        cut_off = of_each([f.config.longer == "last" for f in features])
        more = xp.maximum((ends - starts)[group] - length, 0)
        more = xp.where(cut_off & (example < batch), more, 0)
        kept, position, begin = kept & (position >= more), position - more, begin + more
    bag = xp.clip(position, 0, xp.maximum(length - 1, 0))
    column = xp.where((length > 0) & (position >= length), WRONG, column)
    first_bag = of_each([f.first_bag for f in features])
    used = example < batch
    row = xp.where(used, example, 0) * stack.bags + first_bag + bag
    first = xp.minimum(begin + bag, entry)
    weight = None
    if any(x.data is not None for _, x in matrices):
        dtype = np.result_type(
            *(accumulator(x.data.dtype) for _, x in matrices if x.data is not None)
        )
        weights = [
            xp.ones(x.nse, dtype) if x.data is None else xp.asarray(x.data, dtype)
            for _, x in matrices
        ]
        weight = xp.concatenate(weights)
    rows = xp.arange(batch, dtype=np.int32)[None] * stack.bags
    rows = rows + np.asarray([f.first_bag for f in features], np.int32)[:, None]
    last = batch * stack.bags
    cut = xp.min(xp.where(ptr[:, 1:] > room, rows, last), initial=last)
    return _Entries(row, column, kept & used, first, weight), xp.asarray(cut)


def _columns(stack: Stack, xp, ids, features: Sequence[StackedFeature], of_each):
    """The row number of each id in the stack, and whether the id counts.

    `of_each` makes an array for all ids from a value of each feature.
    """
    num_rows = of_each([f.table.config.num_rows for f in features])
    # If a field is equal for all features, it is passed as a single number.
    places = zip(*(feature.table.place for feature in features), strict=True)
    place = Place(*(v[0] if len(set(v)) == 1 else of_each(v) for v in places))
    drop = of_each([f.config.outside == "drop" for f in features])
    # In dynamic stacks, columns are positions of keys; their rows are found later.
    if stack.dynamic:
        return ids.astype(np.int32), ids >= 0
    inside = (ids >= 0) & (ids < num_rows)
    column = xp.where(inside, stack.row_of(ids, place), WRONG)
    return column.astype(np.int32), inside | ~drop


def _joined(xp, a: _Entries, b: _Entries) -> _Entries:
    """Concatenates two sets of entries."""
    b = b._replace(first=b.first + len(a.row))
    weight = b.weight
    if weight is not None:
        weight = xp.concatenate([xp.ones(len(a.row), weight.dtype), weight])
    arrays = (xp.concatenate([x, y]) for x, y in zip(a[:-1], b[:-1], strict=True))
    return _Entries(*arrays, weight=weight)


def _lengths_of_bags(stack: Stack, lists) -> np.ndarray:
    """`[bags]`: number of ids of an example in each bag."""
    lengths = np.zeros(stack.bags, np.int32)
    for feature, value in lists:
        width = _width(value)
        if feature.config.length is None:
            lengths[feature.first_bag] = width
        else:
            lengths[feature.first_bag : feature.first_bag + width] = 1
    return lengths


def _width(ids: Array) -> int:
    """Number of ids of an example."""
    return 1 if ids.ndim == 1 else ids.shape[1]


def _written(xp, size: int, place: Array, values: Array) -> Array:
    """`[size]`: values written to their positions; positions out of range are ignored."""
    if xp is np:
        found = np.zeros(size, values.dtype)
        inside = place < size
        found[place[inside]] = values[inside]
        return found
    zeros = jnp.zeros(size, values.dtype)
    return zeros.at[place].set(values, mode="drop", unique_indices=True)


def _added(xp, size: int, place: Array, values: Array) -> Array:
    """`[size]`: sums of the values at each position; the position `size` is ignored."""
    if xp is np:
        return np.bincount(place, values, size + 1)[:size].astype(np.int32)
    return jnp.zeros(size, np.int32).at[place].add(values, mode="drop")


def _batch_size(feature: StackedFeature, value: Any) -> int:
    """Number of examples; raises if the shape or dtype is wrong."""
    name, config = feature.name, feature.config
    if isinstance(value, CSR):
        if value.num_cols != (rows := feature.table.num_ids):
            raise ValueError(
                f"the CSR of feature {name!r} has {value.num_cols:,} columns, but its table "
                f"{feature.table.name!r} has {rows:,} rows; make it with num_cols={rows}"
            )
        if value.indptr.ndim != 1:
            raise ValueError(
                f"feature {name!r} is a stack of matrices; pass one of them"
            )
        return value.num_rows
    if not isinstance(value, Array):
        raise TypeError(
            f"ids of feature {name!r} must be an array of int32, a CSR or WideIds.ragged(ids, "
            f"offsets), got {type(value).__name__}"
        )
    if value.dtype != np.int32:
        raise TypeError(
            f"ids of feature {name!r} must be int32, got {value.dtype}; cast them with "
            ".astype(np.int32)"
        )
    if value.ndim not in (1, 2):
        raise ValueError(
            f"ids of feature {name!r} must be [batch] or [batch, n], got the shape "
            f"{value.shape}"
        )
    width = _width(value)
    if config.length is not None and width > config.length:
        raise ValueError(
            f"feature {name!r} has lists of {width} ids, but length={config.length}; cut "
            "them, or make the feature longer"
        )
    return value.shape[0]


def _check_on_host(feature: StackedFeature, value: Array | CSR) -> None:
    """Raises ValueError for an id outside its table, or a list that is too long."""
    name, config, table = feature.name, feature.config, feature.table
    if isinstance(value, CSR):
        count = int(value.indptr[-1])
        if count > value.nse:
            raise ValueError(
                f"feature {name!r} is overfull: {count:,} ids, room for {value.nse:,}"
            )
        lengths = np.diff(value.indptr)
        most = config.length if config.longer == "error" else None
        if most is not None and (lengths > most).any():
            example = int(np.argmax(lengths > most))
            raise ValueError(
                f"feature {name!r}, example {example}: {lengths[example]} ids, but "
                f"length={config.length}; cut the list, or make the feature longer"
            )
        ids = np.asarray(value.indices)[:count]
        examples = np.repeat(np.arange(len(lengths)), lengths)
        wrong = (ids < 0) | (ids >= table.num_ids)
    else:
        ids, examples = np.asarray(value), np.arange(len(value))
        wrong = (ids < -1) | (ids >= table.num_ids)
    if config.outside == "drop" or not wrong.any():
        return
    at = tuple(np.argwhere(wrong)[0])
    raise ValueError(
        f"feature {name!r}, example {examples[at[0]]}: id {ids[at]} is outside the table "
        f"{table.name!r}, which has {table.config.num_rows:,} rows; make the table "
        'larger, or leave such ids out with outside="drop"'
    )
