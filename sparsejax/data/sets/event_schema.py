"""The schema of events' columns in histories: kind, categories and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sparsejax import codec
from sparsejax.data.sets.click_schema import (
    DenseColumn,
    IdColumn,
    KeyColumn,
    LabelColumn,
    VocabularyColumn,
    check_columns,
    columns_document,
    fixed_of,
    labels_document,
    with_columns_read,
)

# Prefixes of names of columns that have one cell for each history: the context, which is known
# about the next event, and user columns.
CONTEXT, USERS = "context/", "users/"


@dataclasses.dataclass(frozen=True)
class EventSchema:
    """The columns that events have in addition to user, item and time.

    >>> schema = EventSchema(
    ...     kind="action",
    ...     dense={"price": DenseColumn(log1p=True, missing=0.0)},
    ...     ids={"device": VocabularyColumn(min_count=5), "tags": HashedColumn(1_000)},
    ... )
    >>> list(schema.ids)
    ['action', 'device', 'tags']

    A missing value, a rare category and a category that the training data lacks are treated
    as by `ClickSchema`. A column of categories may hold lists.

    Attributes:
      kind: name of the column with the kind of each event, such as "view" or "purchase". It
        is a column of `ids`, and need not be named there. None: events have no kinds.
      dense: columns of numbers.
      ids: columns of categories: `HashedColumn` or `VocabularyColumn`.
      context: names of columns that are known before an event happens, such as its hour or
        device. A model that predicts an event's item sees these columns of that event.
      labels: columns of the next event that a model predicts in addition to its item, given
        the item: names, or a `LabelColumn` for each name. Each category of a column of
        categories is a label with the values 0 and 1. A column of numbers without a
        `LabelColumn` has the loss "squared". A missing number, where `DenseColumn.missing`
        permits it, is no label.

    Raises:
      ValueError: a column has two roles or a fixed value, there is no column, the kinds are not
        in a `VocabularyColumn` of their own, or `context` or `labels` name an unknown column, or
        one twice.
      TypeError: a column has an unknown type.
    """

    kind: str | None = None
    dense: Mapping[str, DenseColumn] = dataclasses.field(default_factory=dict)
    ids: Mapping[str, IdColumn] = dataclasses.field(default_factory=dict)
    context: Sequence[str] = ()
    labels: Mapping[str, LabelColumn] | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in self.ids:
            both = {self.kind: VocabularyColumn(), **self.ids}
            object.__setattr__(self, "ids", both)
        check_columns(self.dense, self.ids)
        if not self.used:
            raise ValueError("expected at least one column: kind, or in dense or ids")
        self._check_types()
        if self.kind is not None:
            column = self.ids[self.kind]
            if not isinstance(column, VocabularyColumn) or column.like is not None:
                raise ValueError(
                    f"the kinds in {self.kind!r} must be a VocabularyColumn that is like no "
                    f"other, so that they have names, got {column!r}"
                )

        one = isinstance(self.context, str)
        object.__setattr__(
            self, "context", (self.context,) if one else tuple(self.context)
        )
        if unknown := [name for name in self.context if name not in self.used]:
            raise ValueError(
                f"context names the columns {unknown}, but the schema has {self.used}"
            )
        if len(set(self.context)) < len(self.context):
            raise ValueError(f"context names a column twice: {list(self.context)}")
        if wrong := [n for n in self.used if n.startswith((CONTEXT, USERS))]:
            raise ValueError(
                f"names of columns may not begin with {CONTEXT!r} or {USERS!r}, as {wrong} do; "
                "rename them"
            )
        self._set_labels()

    def _check_types(self) -> None:
        """Raises ValueError for columns that only clicks have."""
        for name, column in self.ids.items():
            if isinstance(column, KeyColumn):
                raise ValueError(
                    f"column {name!r} is a KeyColumn, whose ids are for dynamic tables; "
                    "give events a HashedColumn or a VocabularyColumn"
                )
        if fixed := fixed_of({**self.dense, **self.ids}):
            raise ValueError(
                f"fixed=... is for columns of clicks, as events are read as they are: leave it "
                f"out of {[*fixed]}"
            )

    def _set_labels(self) -> None:
        """Checks the labels, and converts them to a `LabelColumn` for each name."""
        given = self.labels
        if not isinstance(given, Mapping):
            names = [given] if isinstance(given, str) else [*given]
            if len(set(names)) < len(names):
                raise ValueError(f"labels names a column twice: {names}")
            squared = LabelColumn("squared")
            given = {n: squared if n in self.dense else LabelColumn() for n in names}
        for name, column in given.items():
            if not isinstance(column, LabelColumn):
                raise TypeError(f"labels[{name!r}] must be LabelColumn, got {column!r}")
            if name not in self.used or name in self.context:
                known = [n for n in self.used if n not in self.context]
                raise ValueError(
                    f"labels names the column {name!r}, but columns that are not known before "
                    f"the event are {known}"
                )
            if column.after is not None or isinstance(column.weight, str):
                raise ValueError(
                    f"label {name!r}: labels of events have no after=..., and a number as weight"
                )
            number = self.dense.get(name)
            if number is None and column.loss != "binary":
                raise ValueError(
                    f'label {name!r}: categories have the loss "binary", got {column.loss!r}'
                )
            if number is not None and number.log1p and column.is_probability:
                raise ValueError(
                    f"label {name!r}: the logarithms that log1p=True makes are no shares; give "
                    'the loss "squared" or "quantile"'
                )
        object.__setattr__(self, "labels", given)

    @property
    def several(self) -> dict[str, LabelColumn]:
        """The label columns by name."""
        return dict(cast(Mapping[str, LabelColumn], self.labels))

    @property
    def used(self) -> list[str]:
        """The names of all columns: first those of `dense`, then those of `ids`."""
        return [*self.dense, *self.ids]

    def to_json(self) -> dict[str, Any]:
        """The schema as a JSON object, for `from_json`."""
        return {
            "kind": self.kind,
            **columns_document(self),
            **({"context": list(self.context)} if self.context else {}),
            **labels_document(self.several),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EventSchema:
        """Reads a schema from the document that `to_json` made.

        Raises:
          ValueError: the document has another form.
        """
        label = "not a schema of events"
        return codec.read(cls, with_columns_read(document, label), label)
