"""The columns of events in histories: the kind of each event, categories and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparsejax import codec
from sparsejax.data.sets.click_schema import (
    DenseColumn,
    IdColumn,
    KeyColumn,
    VocabularyColumn,
    check_columns,
    id_column,
    ids_document,
)


@dataclasses.dataclass(frozen=True)
class EventSchema:
    """The columns that events have beside user, item and time.

    >>> schema = EventSchema(
    ...     kind="action",
    ...     dense={"price": DenseColumn(log1p=True, missing=0.0)},
    ...     ids={"device": VocabularyColumn(min_count=5), "tags": HashedColumn(1_000)},
    ... )
    >>> list(schema.ids)
    ['action', 'device', 'tags']

    The words are those of `ClickSchema`: a missing value, a rare category and a category that
    the training data lacks are treated as there. A column of categories may hold lists.

    Attributes:
      kind: the column with the kind of each event, such as "view" or "purchase". It is a
        column of `ids`, and need not be named there. None: events have no kinds.
      dense: columns of numbers.
      ids: columns of categories: `HashedColumn` or `VocabularyColumn`.

    Raises:
      ValueError: a column has two roles, there is no column, or the kinds are not in a
        `VocabularyColumn` of their own.
      TypeError: a column is of no known type.
    """

    kind: str | None = None
    dense: Mapping[str, DenseColumn] = dataclasses.field(default_factory=dict)
    ids: Mapping[str, IdColumn] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in self.ids:
            both = {self.kind: VocabularyColumn(), **self.ids}
            object.__setattr__(self, "ids", both)
        check_columns(self.dense, self.ids)
        if not self.used:
            raise ValueError("expected at least one column: kind, or in dense or ids")
        for name, column in self.ids.items():
            if isinstance(column, KeyColumn):
                raise ValueError(
                    f"column {name!r} is a KeyColumn, whose ids are for dynamic tables; "
                    "give events a HashedColumn or a VocabularyColumn"
                )
        if self.kind is not None:
            column = self.ids[self.kind]
            if not isinstance(column, VocabularyColumn) or column.like is not None:
                raise ValueError(
                    f"the kinds in {self.kind!r} must be a VocabularyColumn that is like no "
                    f"other, so that they have names, got {column!r}"
                )

    @property
    def used(self) -> list[str]:
        """The columns that are read: dense, ids."""
        return [*self.dense, *self.ids]

    def to_json(self) -> dict[str, Any]:
        """The schema as a JSON object, for `from_json`."""
        return {
            "kind": self.kind,
            "dense": {n: codec.document(c) for n, c in self.dense.items()},
            "ids": ids_document(self.ids),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EventSchema:
        """Reads a schema from the document that `to_json` made.

        Raises:
          ValueError: it is not such an object.
        """
        label = "not a schema of events"
        document = codec.value(dict[str, Any], document, label)
        ids = codec.value(dict[str, Any], document.get("ids"), label, "ids")
        read = {n: id_column(n, c, label) for n, c in ids.items()}
        return codec.read(cls, {**document, "ids": read}, label)
