"""Data sets of clicks in memory: labels, numbers and ids, which can be read, saved and split."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import Cells, row_error
from sparsejax.data.events.pieces import Piece
from sparsejax.data.files.names import Names, as_names
from sparsejax.data.files.opening import DataError, Path, WithoutLines
from sparsejax.data.files.stored import id_lists
from sparsejax.data.sets import click_storage
from sparsejax.data.sets.click_columns import (
    ColumnReader,
    Numbered,
    dense_of,
    find_categories,
    labels_of,
    propensities_of,
    ranked,
    times_of,
    weights_of,
    with_fixed,
)
from sparsejax.data.sets.click_files import (
    Paths,
    as_paths,
    click_blocks,
    without_bad_clicks,
)
from sparsejax.data.sets.click_schema import (
    FIRST_KNOWN,
    MISSING,
    RARE,
    ClickSchema,
    LabelColumn,
    features_of,
    num_ids,
    vocabularies_of,
    vocabulary_columns,
    without_propensity,
)
from sparsejax.data.sets.click_storage import Ids
from sparsejax.data.sets.split import Time, cut_of, heldout_positions, parts_at
from sparsejax.data.sets.splits import Split, check_held
from sparsejax.sparse import CSR, MAX_ENTRIES, host_rows

ClickSplit = Split  # an older name of this class


@dataclasses.dataclass(frozen=True, eq=False)
class ClickDataset:
    """Examples of clicks, in host memory.

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user,age\\n1,ann,31\\n0,bob,\\n")
    >>> age = DenseColumn(missing=0.0)
    >>> schema = ClickSchema("click", {"age": age}, {"user": VocabularyColumn()})
    >>> train = read_clicks("clicks.csv", schema)
    >>> train
    ClickDataset(2 examples, 50.0 % clicks, 1 dense, 1 features)
    >>> train.ids["user"], train.num_ids
    (array([2, 3], dtype=int32), {'user': 4})

    Attributes:
      labels: `[n]` float32, 1 for a click, else 0. With several labels `[n, labels]`, NaN for
        a missing one.
      dense: `[n, d]` float32, in the order of `schema.dense`.
      ids: ids by the name of the feature: `[n]` int32, or uint64 for a `KeyColumn`. For a
        column of lists it is a CSR with NumPy leaves whose row `i` has the ids of example
        `i`, in the order of the list and with repetitions.
      schema: types of the columns.
      vocabularies: categories of each `VocabularyColumn`, by name: `[k]` text, the first of
        which has the id 2. A column that is like another one shares the other's categories.
      times: `[n]` int64, float64 or datetime64 in microseconds, if the schema names their
        column; else None.
      weights: `[n]` float32 weights of the examples, or `[n, labels]` if labels have columns
        of weights; None if the schema names no column of weights.
      propensities: `[n]` float32 probabilities that the examples were looked at, if the
        schema names their column; else None.

    Raises:
      ValueError: shapes, features, labels or ids do not match each other or the schema.
    """

    kind: ClassVar[str] = "clicks"

    labels: np.ndarray
    dense: np.ndarray
    ids: Mapping[str, Ids]
    schema: ClickSchema
    vocabularies: Mapping[str, Names]
    times: np.ndarray | None = None
    weights: np.ndarray | None = None
    propensities: np.ndarray | None = None

    def __post_init__(self) -> None:
        rows = len(self.labels)
        if self.dense.shape != (rows, len(self.schema.dense)):
            raise ValueError(
                f"dense must have shape {(rows, len(self.schema.dense))}, got "
                f"{self.dense.shape}"
            )
        if list(self.ids) != list(self.schema.ids):
            raise ValueError(
                f"ids must have the features {list(self.schema.ids)}, got {list(self.ids)}"
            )
        self._check_labels()
        if self.times is not None and self.times.shape != (rows,):
            raise ValueError(f"times must have shape {(rows,)}, got {self.times.shape}")
        shape = (
            (rows, len(self.schema.several)) if self.schema.label_weights else (rows,)
        )
        if (weights := self.weights) is not None and not (
            weights.shape == shape and np.all((weights >= 0) & np.isfinite(weights))
        ):
            raise ValueError(f"weights must be {shape} finite numbers of 0 or more")
        if (seen := self.propensities) is not None and not (
            seen.shape == (rows,) and np.all((seen > 0) & (seen <= 1))
        ):
            raise ValueError(
                f"propensities must be {rows:,} numbers above 0, at most 1"
            )
        if not np.isfinite(self.dense).all():
            raise ValueError("dense must be finite")
        for name, ids in self.ids.items():
            flat = _flat(ids)
            if ids.shape[0] != rows:
                raise ValueError(
                    f"ids[{name!r}] has {ids.shape[0]:,} examples, but there are {rows:,} "
                    "labels"
                )
            size = self.num_ids[name]
            if len(flat) and not (0 <= np.min(flat) and int(np.max(flat)) < size):
                raise ValueError(f"ids[{name!r}] has an id outside [0, {size:,})")

    def _check_labels(self) -> None:
        """Raises ValueError if a label has a value that its column does not allow."""
        if not self.schema.several:
            if self.labels.ndim != 1 or not np.isin(self.labels, (0, 1)).all():
                raise ValueError("labels must be 0 or 1")
            return
        shape = (self.num_rows, len(self.schema.several))
        if self.labels.shape != shape:
            raise ValueError(f"labels must have shape {shape}, got {self.labels.shape}")
        for (name, column), y in zip(
            self.schema.several.items(), self.labels.T, strict=True
        ):
            missing = np.isnan(y)
            y = y[~missing]
            right = np.isin(y, (0, 1)) if column.loss == "binary" else np.isfinite(y)
            if column.loss == "log_loss":
                right = (y >= 0) & (y <= 1)
            if not right.all():
                raise ValueError(
                    f"labels of {name!r} do not fit its loss {column.loss!r}"
                )
            if column.after is not None:
                before = list(self.schema.several).index(column.after)
                if (y[self.labels[~missing, before] == 0] == 1).any():
                    raise ValueError(
                        f"a label {name!r} is 1 where {column.after!r}, which it comes after, is 0"
                    )

    def of_label(self, name: str) -> ClickDataset:
        """Selects one of several labels, and the examples in which it is not missing.

        >>> schema = ClickSchema(labels=["click", "buy"], ids={"ad": HashedColumn(9)})
        >>> clicks = read_clicks({"click": [1, 0], "buy": [0, None], "ad": ["a", "b"]}, schema)
        >>> clicks.of_label("buy")
        ClickDataset(1 examples, 0.0 % clicks, 0 dense, 1 features)

        Raises:
          ValueError: the data set has no label of this name.
        """
        if name not in self.schema.several:
            raise ValueError(
                f"there is no label {name!r}; there are {list(self.schema.several)}"
            )
        place = list(self.schema.several).index(name)
        column = dataclasses.replace(self.schema.several[name], after=None)
        some = self.rows(np.flatnonzero(~np.isnan(self.labels[:, place])))
        weights, schema, weight = some.weights, self.schema, self.schema.weight
        if isinstance(column.weight, str):
            weight, column = column.weight, dataclasses.replace(column, weight=1.0)
        if weights is not None and weights.ndim == 2:
            weights = None if weight is None else weights[:, place]
        labels, alone, seen = some.labels[:, place], {}, some.propensities
        if column.loss != "binary":
            labels, alone, seen = labels[:, None], {name: column}, None
            schema = without_propensity(schema)
        schema = dataclasses.replace(schema, label=name, labels=alone, weight=weight)
        return dataclasses.replace(
            some, labels=labels, weights=weights, propensities=seen, schema=schema
        )

    @property
    def trained_labels(self) -> np.ndarray:
        """The labels for training: labels with 0 and 1 are divided by the propensities."""
        if self.propensities is None:
            return self.labels
        seen = np.maximum(self.propensities, self.schema.least_propensity or 0)
        if not self.schema.several:
            return self.labels / seen
        columns = self.schema.several.values()
        is_binary = np.array([column.loss == "binary" for column in columns])
        return np.where(is_binary, self.labels / seen[:, None], self.labels)

    def as_served(self) -> ClickDataset:
        """Sets the columns that only training reads to their fixed values, as when serving.

        >>> ids = {"ad": HashedColumn(9), "place": VocabularyColumn(fixed="1")}
        >>> clicks = read_clicks(
        ...     {"click": [1, 0], "ad": ["a", "b"], "place": ["1", "2"]}, ClickSchema("click", ids=ids)
        ... )
        >>> clicks.ids["place"].tolist(), clicks.as_served().ids["place"].tolist()
        ([2, 3], [2, 2])
        """
        schema, rows = self.schema, self.num_rows
        if not schema.fixed:
            return self
        one = {name: pa.repeat(pa.scalar(x), 1) for name, x in schema.fixed.items()}
        block = Cells(one, row_error("fixed", 0), "fixed")
        dense, ids = self.dense.copy(), dict(self.ids)
        for at, (name, column) in enumerate(schema.dense.items()):
            if name in one:
                dense[:, at] = dense_of(block, {name: column})[0]
        reader = ColumnReader(schema, self.vocabularies)
        fixed = reader.categories(block, ids.keys() & one.keys())
        for name, (found, _) in reader.numbered(fixed).items():
            found = np.repeat(found, rows)
            if isinstance(ids[name], CSR):
                found = id_lists(found, np.arange(rows + 1), self.num_ids[name])
            ids[name] = found
        return dataclasses.replace(self, dense=dense, ids=ids)

    def __repr__(self) -> str:
        named = {"clicks": self.labels}
        if self.schema.several:
            named = dict(zip(self.schema.several, self.labels.T, strict=True))
        shares = {
            name: f"{y[~np.isnan(y)].mean():.1%} {name}".replace("%", " %")
            for name, y in named.items()
            if self.schema.several.get(name, LabelColumn()).is_probability
            and (~np.isnan(y)).any()
        }
        clicks = ", ".join(shares.values()) or "no  clicks"
        return (
            f"ClickDataset({self.num_rows:,} examples, {clicks}, "
            f"{len(self.schema.dense)} dense, {len(self.ids)} features)"
        )

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return len(self.labels)

    @property
    def num_examples(self) -> int:
        """Number of rows that a model can learn from, which are all rows."""
        return self.num_rows

    @property
    def num_used_ids(self) -> int:
        """Number of different ids in the examples, summed over all features."""
        entries = (e.indices if isinstance(e, CSR) else e for e in self.ids.values())
        return sum(len(np.unique(each)) for each in entries)

    @property
    def num_ids(self) -> dict[str, int]:
        """The number of ids of each feature, which is the number of rows of its table."""
        return num_ids(self.schema, self.vocabularies)

    @property
    def features(self) -> dict[str, int | str]:
        """The features for `build_click_model`: for each the number of its ids, or the name of
        the feature that it is like, whose table it shares."""
        return features_of(self.schema, self.vocabularies)

    def rows(self, chosen: np.ndarray | slice) -> ClickDataset:
        """Selects examples, in the given order.

        Args:
          chosen: `[m]` positions, or a slice.
        """
        at = np.arange(self.num_rows)[chosen]
        ids: dict[str, Ids] = {
            name: _rows_of(each, at) if isinstance(each, CSR) else each[at]
            for name, each in self.ids.items()
        }
        given = {name: getattr(self, name) for name in click_storage.BESIDE}
        beside = {name: x[at] for name, x in given.items() if x is not None}
        return dataclasses.replace(
            self, labels=self.labels[at], dense=self.dense[at], ids=ids, **beside
        )

    def split_rows(self, fraction: float, *, seed: int) -> Split[ClickDataset]:
        """Splits the examples at random into `(train, heldout)`.

        `(1 - fraction) num_rows` examples are held out, rounded half up, but one stays in
        train. Both parts keep the order. Which examples are held out depends on the seed and
        on their positions only.

        Args:
          fraction: share of the examples to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), or nothing would be held out.
        """
        is_held = heldout_positions(self.num_rows, fraction, seed)
        check_held(is_held, "examples", fraction)
        return Split(*(self.rows(np.flatnonzero(p)) for p in (~is_held, is_held)))

    def split_at(
        self, time: Time | None = None, *, fraction: float | None = None
    ) -> Split[ClickDataset]:
        """Holds out all examples at or after a point in time: `(train, heldout)`.

        >>> rows = [{"click": i % 2, "ad": ad, "day": i} for i, ad in enumerate("aabc")]
        >>> schema = ClickSchema("click", ids={"ad": VocabularyColumn()}, time="day")
        >>> train, heldout = read_clicks(rows, schema).split_at(2)
        >>> train.vocabularies["ad"].tolist(), heldout.ids["ad"].tolist()
        (['a'], [1, 1])

        The parts equal data sets that were read separately, the second with the vocabulary
        of the first: a category that only later examples have is unknown, as in a model that
        serves. Ids may differ from those of this data set.

        Args:
          time: time of the split, of the type of `times`; examples at or after it are held
            out.
          fraction: share of the examples before the split, in place of
            `time`.

        Raises:
          ValueError: there are no times, `time` is of another kind, or one part would be
            empty.
        """
        if self.times is None:
            raise ValueError(
                "the data set has no times; name their column: ClickSchema(time=COLUMN)"
            )
        if not self.times.size:
            raise ValueError("nothing is held out: there are no examples")
        cut = cut_of(self.times, time, fraction)
        stays, is_held = parts_at(self.times, self.times, cut, "all")
        train = self.rows(np.flatnonzero(stays))
        parts = [train, self.rows(np.flatnonzero(is_held))]
        for name, column in vocabularies_of(self.schema).items():
            known = self.vocabularies[name]
            size = FIRST_KNOWN + len(known)
            counts = np.zeros(size, np.int64)
            for each in self._columns_of(name):
                counts += np.bincount(_flat(train.ids[each]), minlength=size)
            kept = ranked(known, counts[FIRST_KNOWN:], column.min_count)
            to = np.full(size, RARE, np.int32)
            to[MISSING] = MISSING
            to[FIRST_KNOWN + kept] = FIRST_KNOWN + np.arange(len(kept))
            parts = [part._renamed(name, to, known[kept]) for part in parts]
        return Split(*parts)

    def _columns_of(self, vocabulary: str) -> list[str]:
        """The columns that share the vocabulary of the column `vocabulary`."""
        columns = vocabulary_columns(self.schema)
        return [name for name, owner in columns.items() if owner == vocabulary]

    def _renamed(self, name: str, to: np.ndarray, names: Names) -> ClickDataset:
        """Replaces the vocabulary of a column by `names`, and each of its ids `i` by `to[i]`."""
        ids = dict(self.ids)
        for each in self._columns_of(name):
            found = self.ids[each]
            if isinstance(found, CSR):
                lists = to[np.asarray(found.indices)], np.asarray(found.indptr)
                ids[each] = id_lists(*lists, FIRST_KNOWN + len(names))
            else:
                ids[each] = to[found]
        return dataclasses.replace(
            self, ids=ids, vocabularies={**self.vocabularies, name: names}
        )

    def append_features(
        self, features: ClickDataset | Mapping[str, Names]
    ) -> ClickDataset:
        """Changes the vocabularies to the given ones, followed by the new categories here.

        >>> ids = {"user": VocabularyColumn()}
        >>> monday = read_clicks([{"click": 1, "user": "ann"}], ClickSchema("click", {}, ids))
        >>> tuesday = read_clicks([{"click": 0, "user": "eve"}], ClickSchema("click", {}, ids))
        >>> longer = tuesday.append_features(monday)
        >>> longer.vocabularies["user"].tolist(), longer.ids["user"].tolist()
        (['ann', 'eve'], [3])

        So the ids of a model that was trained on the given data keep their numbers; see
        `sparsejax.embeddings.add_ids`. A category that was rare in this data set has lost its
        name, and stays rare; `read_clicks(..., features=monday, append=True)` still finds it.

        Args:
          features: a data set with equal columns, or the categories of each column by name.

        Raises:
          ValueError: a vocabulary is missing, or the columns differ.
        """
        if isinstance(features, ClickDataset):
            check_same_schema(features.schema, self.schema, "this data set")
        known = known_vocabularies(self.schema, features) or {}
        longer = self
        for name, before in known.items():
            own = self.vocabularies[name]
            place = find_categories(own, before)
            is_new = place < 0
            place = np.where(is_new, len(before) + np.cumsum(is_new) - 1, place)
            to = np.array([MISSING, RARE, *(FIRST_KNOWN + place)], np.int32)
            longer = longer._renamed(name, to, np.concatenate([before, own[is_new]]))
        return longer

    def save(self, path: Path) -> None:
        """Writes the data set as one Parquet file, whole or not at all.

        Raises:
          OSError: the file cannot be written; no partial file remains.
        """
        parts = {name: getattr(self, name) for name in click_storage.ClickParts._fields}
        click_storage.write_clicks(path, click_storage.ClickParts(**parts))

    @classmethod
    def load(cls, path: Path) -> ClickDataset:
        """Reads a file that `save` wrote; the result equals the saved data set.

        Raises:
          DataError: the file is missing, is not a saved data set of clicks, or is damaged.
        """
        parts = click_storage.read_saved(path)
        try:
            return cls(**parts._asdict())
        except ValueError as error:
            raise DataError.at(path, f"is damaged: {error}") from error


def read_clicks(
    path: Paths,
    schema: ClickSchema,
    *,
    features: ClickDataset | Mapping[str, Names] | None = None,
    append: bool = False,
    skip_bad_lines: bool = False,
) -> ClickDataset:
    """Reads examples of clicks from files or from a table in memory.

    >>> line = "1\\t" + "\\t".join(["3"] * 13 + ["68fd1e64"] * 25) + "\\t\\n"
    >>> _ = pathlib.Path("criteo.tsv").write_text(line)
    >>> train = read_clicks("criteo.tsv", ClickSchema.criteo(HashedColumn(1000)))
    >>> int(train.ids["C1"][0]), int(train.ids["C26"][0])
    (289, 0)

    Files are TSV, CSV, JSON Lines or Parquet. Columns hold numbers, text, or lists of
    categories. Text files are UTF-8, may be compressed as for `read`, and have a header
    unless `schema.columns` names the columns. Fields may be quoted as in RFC 4180, unless a
    TAB separates columns. Spaces belong to categories. An empty cell, a null and NaN are
    missing values.

    Args:
      path: a file, a list of files that are read in this order, a folder, an address of
        Parquet files, or a table in memory, see `read`; or a dict of columns, or a list with
        a dict for each example.
      schema: types of the columns.
      features: the training data, or its categories: categories get the ids that they have
        there, and unknown ones the id of rare ones. By default categories are numbered from
        these files. Hashed columns do not need it.
      append: give unknown categories new ids after those of `features`, for a model that
        learns them; see `sparsejax.embeddings.add_ids`.
      skip_bad_lines: leave out lines that cannot be read; see `sparsejax.read`.

    Raises:
      DataError: a file cannot be read, lacks a column, or has a line that is cut, a label
        other than 0 and 1, or a number that is infinite; the message has file and line.
      TypeError: `features` is a data set of another kind.
      ValueError: `features` lacks a column, `append` is given without `features`, or there
        are more than 2^31 - 1 ids in a column of lists.
    """
    if append and features is None:
        raise ValueError("append=True needs features=..., to which it appends")
    known = known_vocabularies(schema, features)
    return _read(path, schema, known, append=append, skip_bad_lines=skip_bad_lines)


def without_bad_lines(path: Path, schema: ClickSchema) -> WithoutLines:
    """Finds lines of labelled examples that cannot be read; returns the file without them.

    Raises:
      DataError: too many lines are bad; see `sparsejax.read`.
      ValueError: the path is not a file of lines.
    """
    check = functools.partial(_check, schema=schema, labelled=True)
    return without_bad_clicks(Piece(path), schema, schema.used, check)


def _check(
    block: Cells, schema: ClickSchema, labelled: bool, served: bool = False
) -> None:
    """Raises DataError if an example of the block cannot be read."""
    if served:
        block = with_fixed(block, schema)
    ColumnReader(schema, {}).check(block)
    if labelled:
        labels_of(block, schema)
        weights_of(block, schema)
        propensities_of(block, schema)
        if schema.time is not None and schema.time in block.columns:
            times_of(block, schema.time, None)


def read_served(
    path: Paths,
    schema: ClickSchema,
    vocabulary: ClickDataset | Mapping[str, Names],
    *,
    labelled: bool = True,
    skip_bad_lines: bool = False,
) -> ClickDataset:
    """Reads examples to measure on or to score, which get the fixed values of columns.

    Args:
      path: the files.
      schema: types of the columns.
      vocabulary: categories of the training data; others get the id of rare ones.
      labelled: whether labels are read. Without, they are 0; of several labels all are missing.
      skip_bad_lines: whether to skip lines that cannot be read, see `read_clicks`.
    """
    known = known_vocabularies(schema, vocabulary)
    how = {"labelled": labelled, "skip_bad_lines": skip_bad_lines}
    return _read(path, schema, known, served=True, **how)


def _read(
    path: Paths,
    schema: ClickSchema,
    known: Mapping[str, Names] | None,
    *,
    labelled: bool = True,
    served: bool = False,
    append: bool = False,
    skip_bad_lines: bool = False,
) -> ClickDataset:
    reader = ColumnReader(schema, known, append=append)
    labels, times, weights, seen, kind = [], [], [], [], None
    timed = schema.time if labelled else None
    names = schema.used + [timed] if timed is not None else None
    check = None
    if skip_bad_lines:
        check = functools.partial(
            _check, schema=schema, labelled=labelled, served=served
        )
    blocks = click_blocks(
        path, schema, names, labelled=labelled, served=served, check=check
    )
    for block in blocks:
        if served:
            block = with_fixed(block, schema)
        reader.take(block)
        labels.append(labels_of(block, schema) if labelled else _none(block, schema))
        if timed is not None:
            part, kind = times_of(block, timed, kind)
            times.append(part)
        if labelled and (part := weights_of(block, schema)) is not None:
            weights.append(part)
        if labelled and (part := propensities_of(block, schema)) is not None:
            seen.append(part)
    vocabularies, dense, ids = reader.finish(as_paths(path)[0], "holds no examples")
    sizes = num_ids(schema, vocabularies)
    return ClickDataset(
        np.concatenate(labels),
        dense,
        {n: join_ids(path, n, parts, sizes[n]) for n, parts in ids.items()},
        schema,
        vocabularies,
        np.concatenate(times) if times else None,
        np.concatenate(weights) if weights else None,
        np.concatenate(seen) if seen else None,
    )


def _none(block: Cells, schema: ClickSchema) -> np.ndarray:
    """Labels for examples without labels: 0, or NaN if the schema has several labels."""
    rows = len(next(iter(block.columns.values())))
    if not schema.several:
        return np.zeros(rows, np.float32)
    return np.full((rows, len(schema.several)), np.nan, np.float32)


def check_same_schema(train: ClickSchema, other: ClickSchema, what: str) -> None:
    """Raises ValueError if the input columns of two schemas differ.

    Args:
      train: schema of the training data.
      other: schema of other data.
      what: name of the other data, for the message.
    """

    def facts(schema: ClickSchema):
        return list(schema.dense.items()), list(schema.ids.items())

    if facts(train) != facts(other):
        raise ValueError(
            f"{what} has other columns than the training data; read both with one schema"
        )


def known_vocabularies(
    schema: ClickSchema, vocabulary: ClickDataset | Mapping[str, Names] | None
) -> dict[str, Names] | None:
    """The given vocabularies of a schema, by column; None if they are to be learned.

    Raises:
      TypeError: `vocabulary` is a data set of another kind.
      ValueError: the vocabulary of a column is missing.
    """
    wanted = list(vocabularies_of(schema))
    if not wanted:
        return {}
    if vocabulary is None:
        return None
    if not isinstance(vocabulary, Mapping):
        if not hasattr(vocabulary, "vocabularies"):
            raise TypeError(
                "features is a data set of clicks, or the categories of each column by its "
                f"name, got {type(vocabulary).__name__}"
            )
        vocabulary = vocabulary.vocabularies
    if missing := [name for name in wanted if name not in vocabulary]:
        raise ValueError(
            f"features lacks {missing}; it has {list(vocabulary)}. Read the training "
            "data by the same schema"
        )
    return {name: as_names(vocabulary[name]) for name in wanted}


def join_ids(path: Paths, name: str, parts: list[Numbered], size: int) -> Ids:
    """Joins the ids of a column over all blocks.

    Args:
      path: name of the files in messages.
      name: name of the column.
      parts: ids of each block.
      size: number of different ids.
    """
    flat = np.concatenate([part.ids for part in parts])
    known = [part.lengths for part in parts if part.lengths is not None]
    if not known:
        return flat
    if len(known) < len(parts):
        raise DataError.at(
            as_paths(path)[0], f"column {name!r} holds lists in some files only"
        )
    if len(flat) > MAX_ENTRIES:
        raise ValueError(
            f"column {name!r} has {len(flat):,} ids, more than int32 can number (2^31 - 1);"
            " read the data in parts: scan_clicks"
        )
    return id_lists(flat, np.append(0, np.cumsum(np.concatenate(known))), size)


def _flat(ids: Ids) -> np.ndarray:
    """The ids of a feature in all examples, as one array."""
    return np.asarray(ids.indices) if isinstance(ids, CSR) else ids


def _rows_of(ids: CSR, at: np.ndarray) -> CSR:
    found = host_rows(ids, at)
    return id_lists(np.asarray(found.indices), np.asarray(found.indptr), ids.num_cols)
