"""Columns of the events in histories: one value, or a list of categories, for each event."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from sparsejax import codec
from sparsejax.callers import warn_caller
from sparsejax.data.events.block import Block, Cells
from sparsejax.data.files.entries import taken
from sparsejax.data.files.names import (
    Names,
    as_names,
    find_names,
    quoted,
    spelled_like,
)
from sparsejax.data.files.opening import Path
from sparsejax.data.files.stored import EVENTS
from sparsejax.data.sets.click_columns import (
    CategoryCounter,
    ColumnReader,
    Numbered,
    dense_of,
    find_categories,
)
from sparsejax.data.sets.click_records import cells_of, record_columns
from sparsejax.data.sets.click_schema import (
    FIRST_KNOWN,
    MISSING,
    RARE,
    num_ids,
    vocabularies_of,
    vocabulary_columns,
)
from sparsejax.data.sets.event_schema import EventSchema

# Most categories of an event: memory is allocated for the longest list in every event.
_MOST_CATEGORIES = 64
_PADDING = -1  # fills lists after the last category
_LABEL = "columns of events"

# The arguments of `SequenceDataset.with_targets`.
Targets = str | Sequence[str] | None
Weights = Mapping[str, float] | str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Events:
    """The columns of the events of a `SequenceDataset`.

    >>> events = [{"user": "ann", "item": "tea", "action": "view"}]
    >>> events += [{"user": "ann", "item": "tea", "action": "purchase"}]
    >>> data = read_sequences(events, events=EventSchema(kind="action"))
    >>> data.events.vocabularies["action"].tolist(), data.events["action"].tolist()
    (['purchase', 'view'], [3, 2])

    Attributes:
      schema: types of the columns.
      vocabularies: categories of each `VocabularyColumn`, which have the ids from 2 on; id 0
        is a missing value, and id 1 a rare or unknown category.
      columns: arrays by the name of the column. Columns of `schema.dense` are `[entries]`
        float32, NaN where a label is missing. Columns of `schema.ids` are `[entries]` int32,
        or `[entries, most]` if events have lists of categories, padded with -1.

    Raises:
      ValueError: columns or vocabularies do not match the schema, or differ in their lengths.
    """

    schema: EventSchema
    vocabularies: Mapping[str, Names]
    columns: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        wanted = vocabularies_of(self.schema).keys()
        if self.vocabularies.keys() != wanted:
            raise ValueError(
                f"vocabularies must be those of {list(wanted)}, got "
                f"{list(self.vocabularies)}"
            )
        if [*self.columns] != self.schema.used:
            raise ValueError(
                f"columns must be {self.schema.used} in this order, got {[*self.columns]}"
            )
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError("columns of events differ in their lengths")
        for name in self.schema.dense:
            self._check(name, np.dtype(np.float32), 1)
            self._check_numbers(name, self.columns[name])
        for name, size in self.num_ids.items():
            column = self.columns[name]
            self._check(name, np.dtype(np.int32), max(1, column.ndim))
            least = _PADDING if column.ndim == 2 else 0
            if column.size and not least <= column.min() <= column.max() < size:
                raise ValueError(
                    f"column {name!r} has an id that is not below {size:,}"
                )

    def _check_numbers(self, name: str, numbers: np.ndarray) -> None:
        label = self.schema.several.get(name)
        if label is not None and self.schema.dense[name].missing is not None:
            numbers = numbers[~np.isnan(numbers)]  # NaN is a missing label
        if not np.isfinite(numbers).all():
            raise ValueError(f"column {name!r} has a number that is not finite")
        if label is None or not label.is_probability:
            return
        wrong = (numbers < 0) | (numbers > 1)
        if label.loss == "binary":
            wrong |= (numbers > 0) & (numbers < 1)
        if wrong.any():
            wanted = "0 or 1" if label.loss == "binary" else "from 0 to 1"
            raise ValueError(
                f"label {name!r} with the loss {label.loss!r} must be {wanted}, got "
                f"{numbers[np.argmax(wrong)]:g}; for other numbers give the loss "
                '"squared" or "quantile"'
            )

    def _check(self, name: str, dtype: np.dtype, ndim: int) -> None:
        column = self.columns[name]
        if column.dtype != dtype or column.ndim != min(ndim, 2):
            raise ValueError(
                f"column {name!r} must be {dtype}[entries], got "
                f"{column.dtype}{list(column.shape)}"
            )

    def __getitem__(self, name: str) -> np.ndarray:
        """A column by its name."""
        return self.columns[name]

    def __len__(self) -> int:
        """Number of events."""
        return len(next(iter(self.columns.values())))

    @property
    def num_ids(self) -> dict[str, int]:
        """Number of ids of each column of categories, by name."""
        return num_ids(self.schema, self.vocabularies)

    @property
    def lists(self) -> dict[str, int]:
        """For each column with lists, the largest number of categories in an event."""
        return {n: c.shape[1] for n, c in self.columns.items() if c.ndim == 2}

    @property
    def num_unknown(self) -> dict[str, int]:
        """Number of events with an unknown or rare category, for columns that have some."""
        found = {n: self.columns[n] == RARE for n in vocabulary_columns(self.schema)}
        events = {n: x if x.ndim == 1 else x.any(axis=1) for n, x in found.items()}
        return {name: int(x.sum()) for name, x in events.items() if x.any()}

    @property
    def kinds(self) -> list[str]:
        """The kinds of events in the training data, the most frequent one first."""
        return [] if self.schema.kind is None else self._kinds.tolist()

    def are_of(self, *kinds: str) -> np.ndarray:
        """`[entries]` bool: whether an event has one of the given kinds.

        Raises:
          ValueError: events have no kinds, or a kind does not occur in the training data.
        """
        if self.schema.kind is None:
            raise ValueError(
                "the events have no kinds; read them with EventSchema(kind=COLUMN)"
            )
        if unknown := [kind for kind in kinds if kind not in self.kinds]:
            raise ValueError(
                f"no event is of the kind {', '.join(map(repr, unknown))}; the kinds of the "
                f"column {self.schema.kind!r} are {', '.join(map(repr, self.kinds))}"
            )
        known = self._kinds.tolist()
        wanted = [FIRST_KNOWN + known.index(kind) for kind in kinds]
        column = self.columns[self.schema.kind]
        found = np.isin(column, wanted)
        return found if column.ndim == 1 else found.any(axis=1)

    def weights_of(self, targets: Targets, weights: Weights) -> np.ndarray:
        """`[entries]` float32: the weight of each event as a target; see
        `SequenceDataset.with_targets`.
        """
        found = np.ones(len(self), np.float32)
        targets = [targets] if isinstance(targets, str) else targets
        if isinstance(weights, str):
            if weights not in self.schema.dense:
                raise ValueError(
                    f"weights={weights!r} is no column of numbers of the events; there is "
                    f"{', '.join(map(repr, self.schema.dense)) or 'none'}"
                )
            found, missing = self[weights], self.schema.dense[weights].missing
            found = np.where(np.isnan(found), missing or 0, found)  # of a label
        else:
            given = dict.fromkeys(targets or (), 1) if weights is None else weights
            checked_weights(np.array([*given.values()]), len(given))
            wanted = given if targets is None else targets
            if not any(given[kind] for kind in given if kind in wanted):
                raise ValueError("no event is a target with a positive weight")
            found = np.zeros_like(found)
            for kind, weight in given.items():
                found = np.where(self.are_of(kind), np.float32(weight), found)
        if targets is not None:
            found = np.where(self.are_of(*targets), found, 0)
        return checked_weights(found, len(self))

    @property
    def _kinds(self) -> Names:
        assert self.schema.kind is not None
        return self.vocabularies[self.schema.kind]

    def context_of(self, records: Any, rows: int) -> dict[str, np.ndarray]:
        """The context columns of the next event of each history, as arrays by name.

        Args:
          records: a table or frame with a row for each history; or a list with a dict for each
            history; or a dict of lists or arrays, in which a single value counts for all
            histories. A column that dicts lack has missing values.
          rows: number of histories.

        Raises:
          DataError: a cell has a value that its column does not allow, or columns have
            different lengths.
          ValueError: the schema has no context, a given column is not in it, or the number of
            rows differs.
          TypeError: `records` is no table.
        """
        names = self.schema.context
        if not names:
            raise ValueError(
                "no column is known of the event to come; name some when the data are read: "
                "EventSchema(context=...)"
            )
        return self._of_rows("context", records, rows, names)

    def users_of(
        self, given: Mapping[str, Any], rows: int, known: Events | None
    ) -> dict[str, np.ndarray]:
        """The columns of the users of some histories, as arrays by name.

        Args:
          given: cells of columns, by name. If some columns are given and `known` is None, the
            cells of all others are missing.
          rows: number of histories.
          known: columns of these users, of which `given` replaces some; None if the users are
            unknown.

        Raises:
          DataError: a cell has a value that its column does not allow, or columns have
            different lengths.
          ValueError: the number of rows differs; or a user is unknown, and a column of numbers
            has no value for missing ones.
        """
        found = {} if known is None else dict(known.columns)
        if known is None and not given:
            return dict(self.rows(np.full(rows, -1)).columns)
        names = [n for n in self.schema.used if n in given or known is None]
        if names:
            found |= self._of_rows("users", given, rows, names)
        return {name: found[name] for name in self.schema.used}

    def _of_rows(
        self, what: str, records: Any, rows: int, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        if isinstance(records, list | tuple):
            # An additional column keeps the number of rows if all dicts are empty.
            records = {names[0]: [None] * len(records)} | record_columns(records)
        if isinstance(records, Mapping):
            if unknown := [name for name in records if name not in names]:
                raise ValueError(f"{what} has {unknown}, expected {[*names]}")
            each = {name: records.get(name) for name in names}
            alone = {n for n, v in each.items() if v is None or np.isscalar(v)}
            records = {n: [v] * rows if n in alone else v for n, v in each.items()}
        cells = cells_of(records, names)
        if (count := len(cells.columns[names[0]])) != rows:
            raise ValueError(
                f"{what} has {count:,} rows, but there are {rows:,} histories"
            )
        return self.read(cells, names)

    def read(self, cells: Cells, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads columns from cells; categories get the ids of these vocabularies.

        Raises:
          DataError: a cell has a value that its column does not allow.
        """
        dense = {n: self.schema.dense[n] for n in names if n in self.schema.dense}
        numbers = dense_of(cells, dense, self.schema.several)
        found = {n: np.ascontiguousarray(numbers[:, i]) for i, n in enumerate(dense)}
        categories = self._reader.categories(
            cells, [n for n in names if n not in dense]
        )
        numbered = self._reader.numbered(categories).items()
        return found | {name: _joined([each]) for name, each in numbered}

    @functools.cached_property
    def _reader(self) -> EventReader:
        return EventReader(self)

    def with_room(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Pads the lists in columns of other events to the width of the lists here.

        Raises:
          ValueError: a list is longer than the lists here.
        """
        lists = self.lists
        return {
            n: widened(c, lists[n]) if n in lists else c for n, c in columns.items()
        }

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> Events:
        """Makes events with this schema and these vocabularies from other columns."""
        return dataclasses.replace(self, columns=columns)

    def taken(self, at: np.ndarray) -> Events:
        """Selects events by their positions."""
        return self.with_columns(taken(self.columns, at))

    def rows(self, at: np.ndarray, *, replaced: Collection[str] = ()) -> Events:
        """Selects users by their positions; -1 is an unknown user, with missing values.

        Args:
          at: positions of the users.
          replaced: columns that the caller replaces, so that they need no value for missing ones.

        Raises:
          ValueError: a user is unknown, and a column of numbers has no value for missing ones.
        """
        unknown, columns = at < 0, {}
        for name, column in self.columns.items():
            known = (
                column
                if len(column)
                else np.zeros((1, *column.shape[1:]), column.dtype)
            )
            columns[name] = found = known[at]
            if not unknown.any():
                continue
            if (number := self.schema.dense.get(name)) is None:
                found[unknown] = MISSING if found.ndim == 1 else _PADDING
            elif number.missing is None and name not in replaced:
                raise ValueError(
                    f"nothing is known of {unknown.sum():,} users, and the column of users "
                    f"{name!r} does not say which number they have: DenseColumn(missing=0.0)"
                )
            else:
                found[unknown] = number.missing or 0
        return self.with_columns(columns)

    def joined(self, others: Events) -> Events:
        """Concatenates these events and others with an equal schema."""
        columns = {}
        for name, column in self.columns.items():
            parts = [column, others[name]]
            if name in self.schema.ids and max(part.ndim for part in parts) == 2:
                most = max(self.lists.get(name, 1), others.lists.get(name, 1))
                parts = [widened(part, most) for part in parts]
            columns[name] = np.concatenate(parts)
        return self.with_columns(columns)

    def has_ids_of(self, other: Events) -> bool:
        """Whether both have equal columns and equal ids for all categories."""
        return self.schema == other.schema and all(
            np.array_equal(names, other.vocabularies[name])
            for name, names in self.vocabularies.items()
        )

    def check_like(self, other: Events, what: str) -> None:
        """Raises ValueError unless `other` has equal columns and ids; `what` names its data."""
        if not self.has_ids_of(other):
            raise ValueError(
                f"{what} has other columns of events, or other categories, than the training "
                "data; read it with features=train, events=train.events"
            )

    def like(self, known: Events, what: str) -> Events:
        """Renumbers the categories of these events by the vocabularies of `known`.

        `what` names the data of these events in messages.

        A category that `known` lacks becomes unknown, and so does one that was rare here.

        Raises:
          ValueError: `known` has other columns.
        """
        if self.schema != known.schema:
            known.check_like(self, what)
        columns, owners = dict(self.columns), vocabulary_columns(self.schema)
        for name, owner in owners.items():
            own, wanted = self.vocabularies[owner], known.vocabularies[owner]
            if np.array_equal(own, wanted):
                continue
            places = find_categories(own, wanted)
            ids = np.where(places < 0, RARE, FIRST_KNOWN + places)
            # The last element maps padding (-1) to itself.
            ids = np.concatenate([[MISSING, RARE], ids, [_PADDING]]).astype(np.int32)
            columns[name] = ids[self.columns[name]]
        return known.with_columns(columns)

    def to_json(self) -> dict[str, Any]:
        """The schema and the categories as a JSON object, for `from_json`; no cells of events."""
        return {
            "schema": self.schema.to_json(),
            "vocabularies": {n: v.tolist() for n, v in self.vocabularies.items()},
            "lists": self.lists,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Events:
        """Makes empty `Events` from the document that `to_json` made.

        Raises:
          ValueError: the document has another form.
        """
        document = codec.value(dict[str, Any], document, _LABEL)
        schema = EventSchema.from_json(document.get("schema", {}))
        given = codec.value(
            dict[str, tuple[str, ...]],
            document.get("vocabularies"),
            _LABEL,
            "vocabularies",
        )
        lists = document.get("lists", {})
        lists = codec.value(dict[str, int], lists, _LABEL, "lists")
        names = {name: as_names(v) for name, v in given.items()}
        return no_events(schema, names, lists)


def checked_weights(weights: np.ndarray, count: int) -> np.ndarray:
    """Checks weights and converts them to `[entries]` float32.

    Raises:
      ValueError: there is not one finite number of 0 or more for each entry.
    """
    given = np.asarray(weights, np.float32)
    if given.shape != (count,):
        raise ValueError(
            f"there are {count:,} entries, but weights has the shape {given.shape}"
        )
    wrong = ~(np.isfinite(given) & (given >= 0))
    if wrong.any():
        entry = int(np.argmax(wrong))
        raise ValueError(
            f"weights are finite numbers of 0 or more, got {given[entry]} for entry "
            f"{entry:,}"
        )
    return given


def no_events(
    schema: EventSchema,
    vocabularies: Mapping[str, Names],
    lists: Mapping[str, int] = MappingProxyType({}),
) -> Events:
    """Makes empty `Events` with a schema and its categories.

    Args:
      schema: types of the columns.
      vocabularies: categories of each `VocabularyColumn`.
      lists: for each column with lists, the largest number of categories in an event.
    """
    shapes = {name: (0, lists[name]) if name in lists else (0,) for name in schema.ids}
    columns = {
        **{name: np.zeros(0, np.float32) for name in schema.dense},
        **{name: np.zeros(shape, np.int32) for name, shape in shapes.items()},
    }
    return Events(schema, vocabularies, columns)


class EventReader(ColumnReader):
    """Reads columns of events from cells, block by block.

    Args:
      given: types of the columns; or events with equal columns, whose categories keep their
        ids; then others count as unknown.
    """

    def __init__(self, given: EventSchema | Events):
        self.schema = schema_of(given)
        known = given.vocabularies if isinstance(given, Events) else None
        super().__init__(self.schema, known, most=_MOST_CATEGORIES)

    def taking(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields the blocks unchanged, and passes their further columns to `take`.

        Raises:
          DataError: a cell cannot be read.
        """
        for block in blocks:
            if block.beside is not None:
                self.take(block.beside)
            yield block

    def events(self, path: Path) -> Events:
        """The columns of all events that were read, in this order.

        Raises:
          DataError: no events were read.
        """
        names, dense, ids = self.finish(path, "holds no data: there is no event")
        columns = {
            name: np.ascontiguousarray(dense[:, i])
            for i, name in enumerate(self.schema.dense)
        }
        columns |= {name: _joined(parts) for name, parts in ids.items()}
        return Events(self.schema, names, columns)


def schema_of(given: EventSchema | Events) -> EventSchema:
    """The schema of columns of events, given as a schema or as events.

    Raises:
      TypeError: the argument is something else.
    """
    if isinstance(given, EventSchema):
        return given
    if isinstance(given, Events):
        return given.schema
    raise TypeError(
        "events is an EventSchema, or the events of a SequenceDataset, got "
        f"{type(given).__name__}"
    )


class EventCounter:
    """Counts the categories of events on disk, block by block.

    Args:
      given: types of the columns; or events with equal columns, whose categories are kept.
    """

    def __init__(self, given: EventSchema | Events):
        self._reader = EventReader(given)
        known = given.vocabularies if isinstance(given, Events) else None
        self._counter = CategoryCounter(self._reader.schema, known)

    def take(self, cells: Cells) -> None:
        """Counts the categories in the cells of some events.

        Raises:
          DataError: a cell cannot be read.
        """
        dense_of(cells, self._reader.schema.dense)
        self._counter.add(self._reader.categories(cells))

    def finish(self) -> Events:
        """Empty `Events` with the categories that were counted."""
        names = self._counter.finish()
        return no_events(self._reader.schema, names, self._counter.lists)


def named(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames columns of events to their names in `Entries`."""
    return {f"{EVENTS}{name}": column for name, column in columns.items()}


def widened(column: np.ndarray, most: int) -> np.ndarray:
    """Pads a column of ids, or of lists of ids, to `[entries, most]`."""
    column = column if column.ndim == 2 else column[:, None]
    more = [(0, 0), (0, most - column.shape[1])]
    return np.pad(column, more, constant_values=_PADDING)


def stated(events: Events) -> dict[str, Any]:
    """The JSON document of columns of events or users, without categories."""
    return {"schema": events.schema.to_json(), "lists": events.lists}


def of_stated(
    document: Mapping[str, Any], categories: Mapping[str, Names], begin: str = ""
) -> Events:
    """Makes empty `Events` from a document of `stated` and the categories.

    Args:
      document: document that `stated` made.
      categories: categories of the columns, by name after the prefix `begin`.
      begin: prefix of these names.
    """
    schema = EventSchema.from_json(document["schema"])
    names = {n: categories[f"{begin}{n}"] for n in vocabularies_of(schema)}
    return no_events(schema, names, document["lists"])


def _joined(parts: list[Numbered]) -> np.ndarray:
    """Concatenates ids as `[entries]`, or as padded `[entries, most]` if some have lists."""
    flat = np.concatenate([part.ids for part in parts])
    if all(part.lengths is None for part in parts):
        return flat
    each = [np.ones(len(p), np.int64) if n is None else n for p, n in parts]
    sizes = np.concatenate(each)
    has = np.arange(max(1, sizes.max(initial=0))) < sizes[:, None]
    found = np.full(has.shape, _PADDING, np.int32)
    found[has] = flat
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class UserFeatures:
    """Columns of users, in host memory; `read_user_features` returns them.

    >>> schema = EventSchema(ids={"plan": VocabularyColumn()})
    >>> users = read_user_features([{"user": "ann", "plan": "paid"}], schema)
    >>> users.user_names.tolist(), users.columns["plan"].tolist()
    (['ann'], [2])

    Attributes:
      user_names: `[users]` names of the users.
      columns: columns with one cell for each user.
    """

    user_names: Names
    columns: Events

    def of(self, names: Names) -> Events:
        """The columns for users with these names; unknown users get missing values.

        It warns if all users are unknown: their names may be spelled in another way.

        Raises:
          ValueError: a user is unknown, and a column of numbers has no value for missing ones.
        """
        own = spelled_like(self.user_names, names)
        at = find_names(names, own)
        if len(names) and at.max() < 0:
            warn_caller(
                f"the table of users has {quoted(self.user_names)}, and no user of the data, "
                f"which has {quoted(names)}: nothing is known of them"
            )
        return self.columns.rows(at)
