"""The schema of a file of clicks: labels, numbers and categories."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast, get_args, runtime_checkable

from sparsejax import codec
from sparsejax.data.files.names import Names
from sparsejax.wide_ids import NUM_IDS

# Ids in a vocabulary: of a missing value, of rare and unknown categories, of the first known one.
MISSING, RARE, FIRST_KNOWN = 0, 1, 2


def _check_integer(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not least <= int(value) < 2**31:
        raise ValueError(f"{name} must be in [{least}, 2^31), got {value}")


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """The type of a column of numbers.

    >>> DenseColumn(log1p=True, missing=0.0).missing
    0.0

    Attributes:
      log1p: replace x by `log(1 + max(x, 0))`, for counts.
      missing: number that replaces an empty value in the model's input (not
        transformed). By default an empty value is an error.
      fixed: value, before a logarithm, that the column has outside training, such as a
        position on a page. Then only training reads the column.
    """

    log1p: bool = False
    missing: float | None = None
    fixed: float | None = None

    def __post_init__(self) -> None:
        for name in ("missing", "fixed"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")


@dataclasses.dataclass(frozen=True)
class HashedColumn:
    """The type of a column of categories whose ids, `size` of them, come from a hash.

    >>> HashedColumn(100_000).size
    100000

    The id is `1 + XXH64(UTF-8 bytes, seed 0) mod (size - 1)`, on every machine and in every
    version. A missing value has the id 0. Numbers are hashed as decimal text, `2.0` as `2`,
    and booleans as `true` and `false`, however the file spells them.

    Attributes:
      size: number of ids, at least 2.
      fixed: category that the column has outside training, such as a position on a page. Then
        only training reads the column.
    """

    size: int
    fixed: str | None = None

    def __post_init__(self) -> None:
        _check_integer("size", self.size, least=2)


@dataclasses.dataclass(frozen=True)
class VocabularyColumn:
    """The type of a column of categories that are numbered by their count in the training data.

    >>> VocabularyColumn(min_count=10).min_count
    10

    Id 0 is a missing value: empty, null or NaN. Id 1 is a category that occurs less than
    `min_count` times in the training data, or not at all. The others have ids from 2, the most
    frequent one first. Equally frequent ones are in the order of their UTF-8 bytes.

    A column that is like another one shares its categories, ids and table, for example the
    list of items that the user has had and the item that is shown. Categories are then
    counted over both columns.

    >>> item, seen = VocabularyColumn(min_count=2), VocabularyColumn(like="item")
    >>> schema = ClickSchema("click", ids={"item": item, "seen": seen})
    >>> rows = [{"click": 1, "item": "tea", "seen": ["milk", "cup"]}]
    >>> rows += [{"click": 0, "item": "milk", "seen": ["tea", "milk"]}]
    >>> clicks = read_clicks(rows, schema)
    >>> clicks.vocabularies["item"].tolist(), clicks.ids["item"].tolist()
    (['milk', 'tea'], [3, 2])
    >>> clicks.ids["seen"].indices.tolist()
    [2, 1, 3, 2]

    Attributes:
      min_count: number of times that a category must occur to get an id of its own.
      like: name of a `VocabularyColumn` whose categories this column shares, and whose
        `min_count` counts. Several columns can be like one.
      fixed: category that the column has outside training, such as a position on a page. Then
        only training reads the column.
    """

    min_count: int = 1
    like: str | None = None
    fixed: str | None = None

    def __post_init__(self) -> None:
        _check_integer("min_count", self.min_count, least=1)
        if self.like is not None and self.min_count != 1:
            raise ValueError(
                f"min_count={self.min_count} has no effect in a column that is like "
                f"{self.like!r}, which counts for both: say min_count there"
            )


@dataclasses.dataclass(frozen=True)
class KeyColumn:
    """The type of a column of categories with 64-bit ids, for a dynamic table.

    >>> schema = ClickSchema("click", ids={"user": KeyColumn()})
    >>> clicks = read_clicks([{"click": 1, "user": "7"}, {"click": 0, "user": "ann"}], schema)
    >>> clicks.ids["user"].tolist()
    [7, 811139115053772478]

    An integer from 0 to 2^64 - 1 is its own id, also if the file has it as text. Any other
    category has the id XXH64(UTF-8 bytes, seed 0), on every machine and in every version. A
    missing value has the id of the empty text. Each example has one id; lists are not
    allowed.
    """


IdColumn = HashedColumn | VocabularyColumn | KeyColumn
_KINDS = {"hashed": HashedColumn, "vocabulary": VocabularyColumn, "key": KeyColumn}


Loss = Literal["binary", "log_loss", "squared", "quantile"]


@dataclasses.dataclass(frozen=True)
class LabelColumn:
    """The type of one of several labels. Empty cells are missing labels.

    ::
        "binary"      0 or 1, with the log loss; the prediction is the probability of 1
        "log_loss"    a number from 0 to 1, with the log loss; the prediction is its mean
        "squared"     any number, with the squared error; the prediction is its mean
        "quantile"    any number, with the loss max(q d, (q - 1) d), d = label - prediction

    >>> labels = {"click": LabelColumn(), "buy": LabelColumn(weight=5.0, after="click")}
    >>> schema = ClickSchema(labels=labels, ids={"item": HashedColumn(100)})
    >>> rows = [{"click": 1, "item": "tea"}, {"click": 0, "item": "cup"}]
    >>> rows = [{**row, "buy": None} for row in rows]
    >>> read_clicks(rows, schema).labels.tolist()
    [[1.0, nan], [0.0, 0.0]]

    A missing label counts in no loss and in no metric. In files, a missing label becomes 0 if
    the label in `after` is 0.

    Attributes:
      loss: name of the loss, which decides the values that a label may have.
      quantile: quantile q of the loss "quantile", between 0 and 1.
      weight: factor of this label's loss; or the name of a column with a factor for each
        example.
      after: name of an earlier label without which this one is never 1: an item that was not
        clicked cannot be bought. The model then learns the probability of this label among
        examples with the earlier one, and multiplies both; see `ESMM` (Ma et al. 2018).
    """

    loss: Loss = "binary"
    quantile: float | None = None
    weight: float | str = 1.0
    after: str | None = None

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise ValueError(f"loss is one of {get_args(Loss)}, got {self.loss!r}")
        if (self.loss == "quantile") != (self.quantile is not None):
            raise ValueError(
                'quantile=... goes with loss="quantile", and it with quantile=...'
            )
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(f"quantile is between 0 and 1, got {self.quantile}")
        if not isinstance(self.weight, str) and not 0 <= self.weight < math.inf:
            raise ValueError(f"weight is 0 or more, or a column, got {self.weight}")
        if self.after is not None and self.loss != "binary":
            raise ValueError(f'after=... is for loss="binary", got {self.loss!r}')

    @property
    def is_probability(self) -> bool:
        """Whether a prediction is the sigmoid of the model's score, not the score itself."""
        return self.loss in ("binary", "log_loss")


@dataclasses.dataclass(frozen=True)
class ClickSchema:
    """The columns of a file of clicks, with their roles and types.

    >>> schema = ClickSchema(
    ...     "click",
    ...     dense={"price": DenseColumn(log1p=True, missing=0.0)},
    ...     ids={"user": HashedColumn(1_000_000), "item": VocabularyColumn(min_count=5)},
    ... )
    >>> list(schema.ids)
    ['user', 'item']

    Columns of the file that the schema does not name are not read.

    Attributes:
      label: name of the column with 1 for a click and 0 for none; with several labels, the
        name of the first one.
      dense: columns of numbers, in the order of the model's input.
      ids: columns of categories: the features of an `EmbeddingCollection`.
      columns: names of all columns in order, for a text file without a header.
      delimiter: text between columns of a text file; by default a TAB if the first line has
        one, else a comma.
      time: name of the column of times, for `ClickDataset.split_at`. Models do not read it.
      weight: name of the column of the examples' weights, 0 or more, by which `fit`
        multiplies their losses. Only examples with labels need it.
      labels: several labels, in place of `label`: names of columns with 0 and 1, or a
        `LabelColumn` for each name. Then a data set's labels are `[n, labels]`.
      propensity: name of the column with the probability that an example was looked at, above
        0 and at most 1. `fit` divides labels with 0 and 1 by it: a click on an example that
        was seen with the probability p stands for 1 / p clicks. Only training reads it.
      least_propensity: lower bound, above 0 and at most 1, to which smaller propensities are
        raised. It must be given with `propensity`.

    Raises:
      ValueError: a column has two roles, or is not among `columns`; there are no columns but
        labels, or no label.
      TypeError: a column has an unknown type.
    """

    kind: ClassVar[str] = "clicks"
    label: str = ""
    dense: Mapping[str, DenseColumn] = dataclasses.field(default_factory=dict)
    ids: Mapping[str, IdColumn] = dataclasses.field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    time: str | None = None
    weight: str | None = None
    labels: Mapping[str, LabelColumn] | Sequence[str] = ()
    propensity: str | None = None
    least_propensity: float | None = None

    def __post_init__(self) -> None:
        self._set_labels()
        self._check_propensity()
        check_columns(self.dense, self.ids)
        used = self.used if self.time is None else [*self.used, self.time]
        if twice := sorted({name for name in used if used.count(name) > 1}):
            raise ValueError(f"each column has one role, but {twice} have two")
        if not self.inputs:
            raise ValueError("expected at least one column in dense or ids")
        if len(self.fixed) == len(self.inputs):
            raise ValueError("all columns are fixed: a prediction would read nothing")
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("columns has a name twice")
            if unknown := [name for name in used if name not in self.columns]:
                raise ValueError(f"columns lacks {unknown}, which the schema names")

    @classmethod
    def criteo(
        cls, ids: IdColumn | Mapping[str, IdColumn] = VocabularyColumn(min_count=10)
    ) -> ClickSchema:
        """The schema of Criteo's TSV: label, numbers I1 to I13, and categories C1 to C26.

        >>> ClickSchema.criteo(HashedColumn(100_000)).columns[:3]
        ('label', 'I1', 'I2')

        Numbers are counts: `log1p`, and 0 if they are missing.

        Args:
          ids: type of all columns of categories, or of each by name.
        """
        numbers_ = [f"I{i}" for i in range(1, 14)]
        names = [f"C{i}" for i in range(1, 27)]
        return cls(
            "label",
            dense=dict.fromkeys(numbers_, DenseColumn(log1p=True, missing=0.0)),
            ids=dict(ids) if isinstance(ids, Mapping) else dict.fromkeys(names, ids),
            columns=("label", *numbers_, *names),
        )

    def _set_labels(self) -> None:
        """Checks the labels. A single `LabelColumn` with default values becomes `label`."""
        given = self.labels
        if not isinstance(given, Mapping):
            if isinstance(given, str) or len(set(given)) < len(given):
                raise ValueError(
                    f"labels are different names of columns, got {given!r}"
                )
            given = dict.fromkeys(given, LabelColumn())
        first = next(iter(given), self.label)
        if not first or self.label not in ("", first):
            raise ValueError(
                "name the column of labels, label=..., or several, labels=[...], whose first "
                f"one is label; got {self.label!r} and {list(given)}"
            )
        for name, column in given.items():
            if not isinstance(column, LabelColumn):
                raise TypeError(f"labels[{name!r}] must be LabelColumn, got {column!r}")
            earlier = list(given)[: list(given).index(name)]
            before = column.after
            if before is not None and not (
                before in earlier and given[before].loss == "binary"
            ):
                raise ValueError(
                    f"label {name!r} comes after {before!r}, which is no label with 0 and 1 "
                    f"before it; these are {earlier}"
                )
        if [c.loss for c in given.values()] == ["binary"]:
            [column] = given.values()
            if isinstance(column.weight, str):
                raise ValueError(
                    f"weight={column.weight!r} of the only label: name the column by the "
                    "schema, ClickSchema(weight=...)"
                )
            if column == LabelColumn():
                given = {}
        object.__setattr__(self, "labels", given)
        object.__setattr__(self, "label", first)

    def _check_propensity(self) -> None:
        if (self.propensity is None) != (self.least_propensity is None):
            raise ValueError("propensity=... and least_propensity=... go together")
        if self.propensity is None or self.least_propensity is None:
            return
        if not 0 < self.least_propensity <= 1:
            raise ValueError(
                f"least_propensity is above 0 and at most 1, got {self.least_propensity}"
            )
        losses = [column.loss for column in self.several.values()] or ["binary"]
        if "binary" not in losses:
            raise ValueError(
                "propensity is for labels with 0 and 1, and there are none"
            )

    @property
    def several(self) -> dict[str, LabelColumn]:
        """The labels by name; empty for a single one with 0 and 1."""
        return dict(cast(Mapping[str, LabelColumn], self.labels))

    @property
    def is_plain(self) -> bool:
        """Whether there is one label with the log loss, without weights or fixed columns."""
        others = self.several, self.weight, self.propensity, self.fixed
        return not any(others)

    @property
    def label_weights(self) -> list[str]:
        """The names of the columns with weights for single labels."""
        weights = (column.weight for column in self.several.values())
        return list(dict.fromkeys(w for w in weights if isinstance(w, str)))

    @property
    def inputs(self) -> list[str]:
        """The names of the columns that a model reads: first dense, then ids."""
        return [*self.dense, *self.ids]

    @property
    def targets(self) -> list[str]:
        """The names of the columns that no model reads: labels, weights, propensities."""
        labels = list(self.several) or [self.label]
        beside = [n for n in (self.weight, self.propensity) if n is not None]
        return [*labels, *beside, *self.label_weights]

    @property
    def fixed(self) -> dict[str, float | str]:
        """The columns that only training reads, each with its fixed value outside training."""
        return fixed_of({**self.dense, **self.ids})

    @property
    def used(self) -> list[str]:
        """The names of all columns to read: first `targets`, then `inputs`."""
        return [*self.targets, *self.inputs]

    def to_json(self) -> dict[str, Any]:
        """The schema as a JSON object, for `from_json`."""
        propensity = {n: getattr(self, n) for n in ("propensity", "least_propensity")}
        return {
            "label": self.label,
            **columns_document(self),
            "columns": None if self.columns is None else list(self.columns),
            "delimiter": self.delimiter,
            **({} if self.time is None else {"time": self.time}),
            **({} if self.weight is None else {"weight": self.weight}),
            **labels_document(self.several),
            **{name: value for name, value in propensity.items() if value is not None},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ClickSchema:
        """Reads a schema from the document that `to_json` made.

        Raises:
          ValueError: the document has another form.
        """
        label = "not a schema of clicks"
        return codec.read(cls, with_columns_read(document, label), label)


def labels_document(labels: Mapping[str, LabelColumn]) -> dict[str, Any]:
    """The labels as an entry for the JSON object of a schema; empty if there are none."""
    columns = {n: codec.document(c, skip_defaults=True) for n, c in labels.items()}
    return {"labels": columns} if columns else {}


def fixed_of(columns: Mapping[str, DenseColumn | IdColumn]) -> dict[str, float | str]:
    """The fixed values of the columns that have one."""
    values = {name: getattr(c, "fixed", None) for name, c in columns.items()}
    return {name: value for name, value in values.items() if value is not None}


def check_columns(
    dense: Mapping[str, DenseColumn], ids: Mapping[str, IdColumn]
) -> None:
    """Raises TypeError or ValueError unless these can be the columns of one schema."""
    for what, given, kinds in (
        ("dense", dense, (DenseColumn,)),
        ("ids", ids, tuple(_KINDS.values())),
    ):
        for name, column in given.items():
            if not isinstance(column, kinds):
                known = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{what}[{name!r}] must be {known}, got {column!r}")
    if twice := sorted(dense.keys() & ids.keys()):
        raise ValueError(f"each column has one role, but {twice} have two")
    for name, column in ids.items():
        if isinstance(column, VocabularyColumn) and column.like is not None:
            _check_like(name, column.like, ids)


def _check_like(name: str, like: str, ids: Mapping[str, IdColumn]) -> None:
    """Raises ValueError if a column cannot share the categories of the column `like`."""
    other = ids.get(like)
    if other is None:
        raise ValueError(
            f"column {name!r} is like {like!r}, but ids has no such column; it has "
            f"{list(ids)}"
        )
    if like == name:
        raise ValueError(
            f"column {name!r} is like itself: name another column, or leave out like"
        )
    if not isinstance(other, VocabularyColumn):
        raise ValueError(
            f"column {name!r} is like {like!r}, which is a {type(other).__name__}: a "
            "column can only be like a VocabularyColumn"
        )
    if other.like is not None:
        raise ValueError(
            f"column {name!r} is like {like!r}, which is itself like {other.like!r}: say "
            f"like={other.like!r} in both"
        )


def columns_document(schema: HasColumns) -> dict[str, Any]:
    """The columns of a schema as JSON, for `with_columns_read`."""
    kind_of = {kind: name for name, kind in _KINDS.items()}
    ids = {n: {"kind": kind_of[type(c)], **_document(c)} for n, c in schema.ids.items()}
    return {"dense": {n: _document(c) for n, c in schema.dense.items()}, "ids": ids}


def _document(column: IdColumn | DenseColumn) -> dict[str, Any]:
    """The JSON object of a column, without `like` and `fixed` if they are unset."""
    found = codec.document(column)
    for name in ("like", "fixed"):
        if found.get(name, "") is None:
            del found[name]
    return found


def with_columns_read(document: codec.Json, label: str) -> dict[str, Any]:
    """Converts the columns of categories and the labels in a schema's JSON to dataclasses.

    Args:
      document: JSON object of the schema. Labels may be names only.
      label: begin of the message of an error.

    Raises:
      ValueError: the document has another form.
    """
    found = dict(codec.value(dict[str, Any], document, label))
    ids = codec.value(dict[str, Any], found.get("ids"), label, "ids")
    found["ids"] = {
        name: codec.read_tagged(_KINDS, "kind", column, f'{label}: column "{name}"')
        for name, column in ids.items()
    }
    labels = found.get("labels")
    if isinstance(labels, list):
        names = codec.value(tuple[str, ...], labels, label, "labels")
        labels = {name: LabelColumn() for name in names}
        if len(labels) < len(names):
            raise ValueError(f"{label}: labels has a name twice, got {[*names]}")
    if labels is not None:
        found["labels"] = codec.value(dict[str, LabelColumn], labels, label, "labels")
    return found


def without_time(schema: ClickSchema) -> ClickSchema:
    """The schema without the column of times, which models do not read."""
    return dataclasses.replace(schema, time=None)


def with_columns(
    schema: ClickSchema, names: Collection[str]
) -> tuple[ClickSchema | None, dict[str, str]]:
    """A schema with some of the columns; None if it would have no columns.

    Returns:
      The schema, and a dict from each of its columns that owns a vocabulary to the column that
      owned it in the old schema. They differ if the old owner is left out, but not a column
      like it.
    """
    owners, own = vocabulary_columns(schema), {}
    ids: dict[str, IdColumn] = {}
    for name, column in schema.ids.items():
        if name in names and isinstance(column, VocabularyColumn):
            first = own.setdefault(owners[name], name)
            like = None if first == name else first
            ids[name] = VocabularyColumn(like=like, fixed=column.fixed)
        elif name in names:
            ids[name] = column
    dense = {name: column for name, column in schema.dense.items() if name in names}
    if not ids and not dense:
        return None, {}
    return ClickSchema(schema.label, dense, ids), {new: old for old, new in own.items()}


def unweighted(schema: ClickSchema) -> ClickSchema:
    """The schema without columns of weights and of propensities."""
    labels = {
        name: dataclasses.replace(column, weight=1.0)
        if isinstance(column.weight, str)
        else column
        for name, column in schema.several.items()
    }
    return dataclasses.replace(without_propensity(schema), weight=None, labels=labels)


def without_propensity(schema: ClickSchema) -> ClickSchema:
    """The schema without the column of propensities, which only training reads."""
    return dataclasses.replace(schema, propensity=None, least_propensity=None)


@runtime_checkable
class HasColumns(Protocol):
    """A schema with columns of numbers and of categories: of clicks, or of events."""

    @property
    def dense(self) -> Mapping[str, DenseColumn]: ...
    @property
    def ids(self) -> Mapping[str, IdColumn]: ...
    @property
    def several(self) -> Mapping[str, LabelColumn]: ...


def vocabulary_columns(schema: HasColumns) -> dict[str, str]:
    """The column whose vocabulary each `VocabularyColumn` uses: itself, or the one in `like`."""
    return {
        name: column.like or name
        for name, column in schema.ids.items()
        if isinstance(column, VocabularyColumn)
    }


def vocabularies_of(schema: HasColumns) -> dict[str, VocabularyColumn]:
    """The columns that own a vocabulary, which are like no other column."""
    return {
        name: column
        for name, column in schema.ids.items()
        if isinstance(column, VocabularyColumn) and column.like is None
    }


def vocabulary_of(
    schema: HasColumns, name: str, vocabularies: Mapping[str, Names] | None
) -> Names | None:
    """The vocabulary of a column; None if the column has none, or if `vocabularies` is None."""
    return (vocabularies or {}).get(vocabulary_columns(schema).get(name, name))


def num_ids(schema: HasColumns, vocabularies: Mapping[str, Names]) -> dict[str, int]:
    """The number of ids of each feature, by name."""
    columns = vocabulary_columns(schema)

    def of(name: str, column: IdColumn) -> int:
        if isinstance(column, KeyColumn):
            return NUM_IDS
        if isinstance(column, HashedColumn):
            return column.size
        return FIRST_KNOWN + len(vocabularies[columns[name]])

    return {name: of(name, column) for name, column in schema.ids.items()}


def features_of(
    schema: HasColumns, vocabularies: Mapping[str, Names]
) -> dict[str, int | str]:
    """For each feature its number of ids, or the name of the feature whose table it shares."""
    columns = vocabulary_columns(schema)
    return {
        name: size if columns.get(name, name) == name else columns[name]
        for name, size in num_ids(schema, vocabularies).items()
    }
