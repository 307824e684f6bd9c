"""Converts the columns of a block of clicks to labels, numbers and ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.callers import warn_caller
from sparsejax.data.events.block import Cells, encoded_names, is_list, list_lengths
from sparsejax.data.files import spelling
from sparsejax.data.files.name_index import NameTable, Places
from sparsejax.data.files.names import (
    NameEncoder,
    Names,
    as_names,
    find_texts,
    to_arrow,
)
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.files.values import (
    are_no_times,
    find_time_problem,
    lengths,
    parse_times,
    plain_text,
    trim,
    value_problem,
)
from sparsejax.data.files.xxh64 import xxh64
from sparsejax.data.sets.click_schema import (
    FIRST_KNOWN,
    MISSING,
    RARE,
    ClickSchema,
    DenseColumn,
    HasColumns,
    HashedColumn,
    IdColumn,
    KeyColumn,
    VocabularyColumn,
    vocabularies_of,
    vocabulary_columns,
    vocabulary_of,
)

_LARGEST = str(2**64 - 1)
# Counts of new names are merged when so many names are waiting.
_FOLD = 2**20
# Characters by which other software separates the items of a list, and how many cells are searched
# for them.
_SEPARATORS, _LOOKED_AT = "|;, ", 1000


class Numbered(NamedTuple):
    """The ids of a column in one block.

    Attributes:
      ids: `[entries]` ids.
      lengths: `[examples]` number of entries of each example; None if each has one.
    """

    ids: np.ndarray
    lengths: np.ndarray | None


class Categories(NamedTuple):
    """The categories of a column in one block, as text.

    Attributes:
      texts: `[entries]` texts in a dictionary, in which a text may occur twice. They have the
        spelling of the file; a missing value is "".
      lengths: `[examples]` number of entries of each example; None if each has one.
    """

    texts: pa.DictionaryArray
    lengths: np.ndarray | None


def labels_of(block: Cells, schema: ClickSchema) -> np.ndarray:
    """The labels of a block: `[examples]` float32, or `[examples, labels]` for several.

    A missing label is NaN, or 0 if the label in its `after` is 0.

    Raises:
      DataError: a label has a value that its loss does not allow, or the only label is
        missing, or a label is 1 although the label in its `after` is 0.
    """
    if not schema.several:
        return _label(block, schema.label, 1.0, is_binary=True, optional=False)
    found: dict[str, np.ndarray] = {}
    for name, column in schema.several.items():
        most = 1.0 if column.is_probability else None
        is_binary = column.loss == "binary"
        found[name] = _label(block, name, most, is_binary=is_binary, optional=True)
        if column.after is not None:
            without = found[column.after] == 0
            wrong = (found[name] == 1) & without
            if wrong.any():
                raise block.error(
                    int(np.argmax(wrong)),
                    f"the label {name!r} is 1, but {column.after!r}, which it comes after, is 0",
                )
            found[name] = np.where(without, np.float32(0), found[name])
    return np.stack([*found.values()], axis=1)


def _label(
    block: Cells, name: str, most: float | None, *, is_binary: bool, optional: bool
) -> np.ndarray:
    """Reads a label from 0 to `most`, or any number if None; NaN if missing and `optional`."""
    found, missing = _numbers(block, name)
    wrong = missing & (not optional)
    if most is not None:
        wrong |= (found < 0) | (found > most) | (is_binary & (found != found.round()))
    if wrong.any():
        row = int(np.argmax(wrong))
        given = "missing" if missing[row] else f"{found[row]:g}"
        wanted = "0 or 1" if is_binary else f"a number from 0 to {most:g}"
        raise block.error(row, f"the label {name!r} is {given}; expected {wanted}")
    return np.where(missing, np.nan, found).astype(np.float32)


def weights_of(block: Cells, schema: ClickSchema) -> np.ndarray | None:
    """The weights of a block: `[examples]` float32, or `[examples, labels]` for label weights.

    Raises:
      DataError: a weight is missing, negative or not finite.
    """
    rows = None if schema.weight is None else _weight(block, schema.weight)
    if not schema.label_weights:
        return rows
    one = np.ones(len(block.columns[schema.label]), np.float32)
    rows = one if rows is None else rows
    by_label = [
        rows * _weight(block, column.weight) if isinstance(column.weight, str) else rows
        for column in schema.several.values()
    ]
    return np.stack(by_label, axis=1)


def _weight(block: Cells, name: str) -> np.ndarray:
    found, missing = _numbers(block, name)
    if (wrong := missing | (found < 0)).any():
        row = int(np.argmax(wrong))
        given = "missing" if missing[row] else f"{found[row]:g}"
        problem = f"the weight {name!r} is {given}; expected a number that is 0 or more"
        raise block.error(row, problem)
    return found.astype(np.float32)


def propensities_of(block: Cells, schema: ClickSchema) -> np.ndarray | None:
    """The propensities of a block: `[examples]` float32; None if the schema has no such column.

    Raises:
      DataError: a propensity is missing, or not above 0 and at most 1.
    """
    if schema.propensity is None:
        return None
    found, missing = _numbers(block, schema.propensity)
    if (wrong := missing | (found <= 0) | (found > 1)).any():
        row = int(np.argmax(wrong))
        given = "missing" if missing[row] else f"{found[row]:g}"
        problem = f"the propensity {schema.propensity!r} is {given}; expected a number above 0"
        raise block.error(row, f"{problem} and at most 1")
    return found.astype(np.float32)


def with_fixed(block: Cells, schema: ClickSchema) -> Cells:
    """Sets the columns that only training reads to their fixed values."""
    rows = len(next(iter(block.columns.values())))
    fixed = {name: pa.repeat(pa.scalar(x), rows) for name, x in schema.fixed.items()}
    return block._replace(columns={**block.columns, **fixed})


def dense_of(
    block: Cells, columns: Mapping[str, DenseColumn], labels: Collection[str] = ()
) -> np.ndarray:
    """The columns of numbers, `[examples, columns]` float32.

    In a column among `labels` a missing number becomes NaN.

    Raises:
      DataError: a value is not a finite number, or is missing in a column without `missing`.
    """
    parts = []
    for name, column in columns.items():
        values, missing = _numbers(block, name)
        if missing.any() and column.missing is None:
            raise block.error(
                int(np.argmax(missing)),
                f"column {name!r} is empty, null or NaN; fill it in, or say what the model gets: "
                "DenseColumn(missing=0.0)",
            )
        if column.log1p:
            values = np.log1p(np.maximum(values, 0))
        filled = np.nan if name in labels else column.missing or 0
        parts.append(np.where(missing, filled, values).astype(np.float32))
    rows = len(next(iter(block.columns.values())))
    return np.stack(parts, axis=1) if parts else np.empty((rows, 0), np.float32)


def times_of(block: Cells, name: str, kind: str | None) -> tuple[np.ndarray, str]:
    """The times of a block's examples, and the name of their kind; see `parse_times`.

    Args:
      block: cells of the examples.
      name: name of the column of times.
      kind: kind of the times in earlier blocks, or None.

    Raises:
      DataError: a time is missing, cannot be read, or is of another kind.
    """
    column = plain_text(block.columns[name])
    missing = are_no_times(column)
    if missing.any():
        raise block.error(int(np.argmax(missing)), f"column {name!r} has no time here")
    found = parse_times(column)
    if found is None or kind not in (None, found[1]):
        row, problem = find_time_problem(column, kind)
        raise block.error(row, f"column {name!r}: {problem}")
    return found


def _numbers(block: Cells, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column as `[examples]` float64, and as bool whether a value is missing.

    Null, NaN and an empty text are missing values, which become 0.
    """
    column = plain_text(block.columns[name])
    type_ = column.type
    if spelling.is_text(type_):
        texts = trim(column.cast(pa.large_string()).fill_null(""))
        missing = lengths(texts) == 0
        zero = pa.scalar("0", texts.type)
        filled = pc.call_function("if_else", [pa.array(missing), zero, texts])
        try:
            values = filled.cast(pa.float64())
        except pa.ArrowInvalid as error:
            for row, text in enumerate(texts.to_pylist()):
                if text and (problem := value_problem(text)):
                    raise block.error(row, f"column {name!r}: {problem}") from error
            raise
    elif spelling.is_number(type_) or pt.is_boolean(type_):
        missing = column.is_null().to_numpy(zero_copy_only=False)
        if pt.is_boolean(type_):
            column = column.cast(pa.int8())
        values = column.cast(pa.float64(), safe=False).fill_null(0)
    else:
        raise DataError.at(
            block.path, f"column {name!r} must hold numbers, but it is {type_}"
        )
    found = values.to_numpy()
    if (is_nan := np.isnan(found)).any():
        found, missing = np.where(is_nan, 0, found), missing | is_nan
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(found.astype(np.float32))
    if wrong.any():
        row = int(np.argmax(wrong))
        problem = value_problem(str(found[row]))
        raise block.error(row, f"column {name!r}: {problem}")
    return found, missing


def categories_of(block: Cells, name: str) -> Categories:
    """Reads the categories of a column of text, integers, booleans, or lists of these.

    Raises:
      DataError: the column has another type, or a float that is no integer.
    """
    column, sizes = block.columns[name], None
    if is_list(column.type):
        sizes, column = list_lengths(column), column.flatten()
    if not (spelling.is_name(column.type) or pt.is_boolean(column.type)):
        raise DataError.at(
            block.path,
            f"column {name!r} must hold text, integers, or lists of these, but it is "
            f"{block.columns[name].type}",
        )
    column = spelling.without_views(_with_nulls(column))
    present = column.is_valid().to_numpy(zero_copy_only=False)
    if pt.is_null(column.type):
        column = column.cast(pa.large_string())
    found, wrong, problem = spelling.as_integers_or_text(column.drop_null())
    if wrong.any():
        row = entry = int(np.flatnonzero(present)[np.argmax(wrong)])
        if sizes is not None:
            row = int(np.searchsorted(np.cumsum(sizes), entry, side="right"))
        raise block.error(row, f"column {name!r} {problem}")
    texts = encoded_names(found, block.path)
    # The dictionary of a dictionary column in a file may contain a null.
    known = texts.dictionary.fill_null("")
    if present.all():
        return Categories(pa.DictionaryArray.from_arrays(texts.indices, known), sizes)
    codes = np.full(len(present), len(known), np.int32)
    codes[present] = texts.indices.to_numpy()
    known = pa.concat_arrays([known, pa.array([""], known.type)])
    return Categories(pa.DictionaryArray.from_arrays(codes, known), sizes)


def warn_of_lists(
    found: Mapping[str, Categories],
    schema: HasColumns,
    vocabularies: Mapping[str, Names] | None,
) -> None:
    """Warns about text that seems to be a list, such as "tea|rye", but is read as one category.

    This is checked only for a column that is like another one: the parts of its new
    categories must be categories of the other column.

    Args:
      found: columns of a block, by name.
      schema: types of the columns.
      vocabularies: known categories, or None.
    """
    for name, owner in vocabulary_columns(schema).items():
        if name == owner or found[name].lengths is not None:
            continue
        texts = _spelled(found[name].texts).dictionary.slice(0, _LOOKED_AT).to_pylist()
        if not any(sign in text for text in texts for sign in _SEPARATORS):
            continue
        among = _spelled(found[owner].texts).dictionary.cast(pa.large_string())
        known = vocabulary_of(schema, owner, vocabularies)
        if known is not None:
            among = pa.concat_arrays([among, to_arrow(known)])
        is_new = find_texts(pa.array(texts, pa.large_string()), among) < 0
        new = [text for text, n in zip(texts, is_new, strict=True) if n and text]
        sign = max(_SEPARATORS, key=lambda sign: sum(sign in text for text in new))
        lists = [text for text in new if sign in text]
        parts = [part for text in lists for part in text.split(sign) if part]
        places = find_texts(pa.array(parts, pa.large_string()), among)
        if 2 * len(lists) > len(new) and 2 * np.sum(places >= 0) > len(parts):
            warn_caller(
                f"column {name!r}: {lists[0]!r} is one category, though its parts are "
                f"categories of {owner!r}. If it is a list: a header of CSV with types makes "
                f"lists, {name}:token_seq with spaces between the parts, and each other column "
                f"has a type, too, such as {owner}:token. Parquet, JSON Lines, tables and "
                "records hold lists"
            )


def _with_nulls(column: pa.Array) -> pa.Array:
    """Replaces NaN by null, and decodes a dictionary of numbers."""
    type_ = column.type
    if pt.is_dictionary(type_) and not spelling.is_text(type_.value_type):
        return _with_nulls(column.dictionary_decode())
    if not pt.is_floating(type_):
        return column
    missing = column.is_null(nan_is_null=True)
    null = pa.nulls(len(column), type_)
    return pc.call_function("if_else", [missing, null, column])


def _spelled(texts: pa.DictionaryArray) -> pa.DictionaryArray:
    """Spells the categories by the rules of `spelling.as_categories`."""
    known = spelling.as_categories(texts.dictionary)
    return pa.DictionaryArray.from_arrays(texts.indices, known)


class Numbering:
    """Converts categories to ids, by a hash or by a known vocabulary.

    Args:
      column: type of the column.
      vocabulary: known categories, or None.
      few: whether calls are frequent and have few categories each; then an index is kept.
    """

    def __init__(
        self, column: IdColumn, vocabulary: Names | None, *, few: bool = False
    ):
        self._column = column
        known = to_arrow(as_names([]) if vocabulary is None else vocabulary)
        self._known = spelling.as_categories(known)
        self._places = None
        if few and isinstance(column, VocabularyColumn):
            self._places = Places(NameTable.of(as_names(self._known)).index)

    def ids(self, categories: Categories) -> np.ndarray:
        """The ids, `[entries]` int32, or uint64 for a `KeyColumn`.

        Raises:
          ValueError: a `KeyColumn` has lists.
        """
        texts = categories.texts
        known = texts.dictionary
        spelled = spelling.as_categories(known)
        if isinstance(self._column, KeyColumn):
            if categories.lengths is not None:
                raise ValueError(
                    "a KeyColumn has one id an example, but the file has lists of them; "
                    "read lists by a HashedColumn or a VocabularyColumn"
                )
            return _keys(spelled)[texts.indices.to_numpy()]
        if isinstance(self._column, HashedColumn):
            rest = xxh64(spelled) % np.uint64(self._column.size - 1)
            found = 1 + rest.astype(np.int32)
            found[lengths(spelled) == 0] = MISSING
        else:
            if self._places is None:
                found = find_texts(spelled, self._known)
            else:
                found = self._places.find(spelled.to_pylist())
            found = np.where(found < 0, RARE, found + FIRST_KNOWN)
            found[lengths(spelled) == 0] = MISSING
        return found.astype(np.int32)[texts.indices.to_numpy()]


def _keys(texts: pa.Array) -> np.ndarray:
    """`[texts]` uint64 ids of texts in a `KeyColumn`."""
    found, sizes = xxh64(texts), lengths(texts)
    pattern = pc.MatchSubstringOptions(r"\A(0|[1-9][0-9]{0,19})\z")
    is_number = pc.call_function("match_substring_regex", [texts], pattern)
    is_number = is_number.to_numpy(zero_copy_only=False)
    fits = pc.call_function("less_equal", [texts, pa.scalar(_LARGEST, texts.type)])
    is_number &= (sizes < len(_LARGEST)) | fits.to_numpy(zero_copy_only=False)
    numbers = texts.filter(pa.array(is_number)).cast(pa.uint64())
    found[is_number] = numbers.to_numpy()
    return found


def find_categories(names: Names, known: Names) -> np.ndarray:
    """`[names]` positions of categories among known ones; -1 for new ones."""
    texts, others = (spelling.as_categories(to_arrow(some)) for some in (names, known))
    return find_texts(texts, others)


class Learner:
    """Collects categories block by block, and ranks and numbers new ones at the end.

    Args:
      known: vocabulary whose categories keep their ids; new ones follow.
    """

    def __init__(self, known: Names | None = None) -> None:
        self._encoder = NameEncoder()
        self._known = as_names([]) if known is None else known
        self._columns: list[str] = []
        self._sizes: list[int] = []

    def add(self, column: str, texts: pa.DictionaryArray) -> None:
        """Adds the categories of a column's next block."""
        self._encoder.add(_spelled(texts))
        self._columns.append(column)
        self._sizes.append(len(texts))

    def finish(self, min_count: int) -> tuple[Names, dict[str, list[np.ndarray]]]:
        """The vocabulary, and for each column the `[entries]` int32 ids of its blocks."""
        names, codes = self._encoder.finish()
        place = find_categories(names, self._known)
        counts = np.bincount(codes, minlength=len(names))
        counts[place >= 0] = -1  # known categories are not ranked
        order = ranked(names, counts, min_count)
        ids = np.where(place < 0, RARE, FIRST_KNOWN + place).astype(np.int32)
        ids[names == ""] = MISSING
        first = FIRST_KNOWN + len(self._known)
        ids[order] = first + np.arange(len(order), dtype=np.int32)
        blocks = np.split(ids[codes], np.cumsum(self._sizes)[:-1])
        found: dict[str, list[np.ndarray]] = {name: [] for name in self._columns}
        for name, block in zip(self._columns, blocks, strict=True):
            found[name].append(block)
        return np.concatenate([self._known, names[order]]), found


class Counter:
    """Counts categories block by block, and keeps only distinct ones in memory."""

    def __init__(self) -> None:
        self._waiting: list[pa.Table] = []
        self._size = self._known = 0

    def add(self, texts: pa.DictionaryArray) -> None:
        """Counts the categories of the next block."""
        texts = _spelled(texts)
        names = texts.dictionary
        counts = np.bincount(texts.indices.to_numpy(), minlength=len(names))
        self.add_counts(names, pa.array(counts))

    def add_counts(self, names: pa.Array, counts: pa.Array) -> None:
        """Adds counts of names, which all have one type."""
        self._waiting.append(pa.table([names, counts], ["name", "count"]))
        self._size += len(names)
        if self._size > max(_FOLD, 2 * self._known):
            self._fold()

    def counts(self) -> tuple[Names, np.ndarray]:
        """The distinct names, and the count of each."""
        if not self._waiting:
            return as_names([]), np.empty(0, np.int64)
        self._fold()
        names, counts = self._waiting[0].columns
        return as_names(names.cast(pa.large_string())), counts.to_numpy()

    def finish(self, min_count: int) -> Names:
        """The vocabulary: names with at least `min_count` occurrences, most frequent first."""
        names, counts = self.counts()
        return names[ranked(names, counts, min_count)]

    def _fold(self) -> None:
        table = pa.concat_tables(self._waiting)
        table = table.group_by("name").aggregate([("count", "sum")])
        self._waiting = [table.rename_columns(["name", "count"])]
        self._size = self._known = len(table)


class ColumnReader:
    """Converts cells to numbers and ids, block by block.

    Args:
      schema: types of the columns.
      known: categories of each vocabulary, which keep their ids; None learns all categories.
      append: learn categories that `known` lacks. Otherwise they count as unknown.
      most: largest number of categories in a list; None for any.
      few: whether blocks are small and frequent; see `Numbering`.
    """

    def __init__(
        self,
        schema: HasColumns,
        known: Mapping[str, Names] | None,
        *,
        append: bool = False,
        most: int | None = None,
        few: bool = False,
    ):
        self._schema, self._known, self._most = schema, known, most
        learned = vocabularies_of(schema) if known is None or append else {}
        self._learners = {
            name: Learner(None if known is None else known[name]) for name in learned
        }
        self._owners = vocabulary_columns(schema)
        self._numbering = {
            name: Numbering(column, vocabulary_of(schema, name, known), few=few)
            for name, column in schema.ids.items()
            if self._owners.get(name) not in self._learners
        }
        self._dense: list[np.ndarray] = []
        self._ids: dict[str, list[np.ndarray]] = {name: [] for name in schema.ids}
        self._lengths: dict[str, list[np.ndarray | None]] = {n: [] for n in schema.ids}

    def categories(
        self, cells: Cells, names: Iterable[str] | None = None
    ) -> dict[str, Categories]:
        """Reads the categories of all columns of categories, or of some of them, by name.

        Raises:
          DataError: a column has a wrong type, or a list has too many categories.
        """
        names = self._schema.ids if names is None else names
        found = {name: categories_of(cells, name) for name in names}
        for name, (_, sizes) in found.items():
            most = np.inf if self._most is None else self._most
            if sizes is not None and sizes.max(initial=0) > most:
                event = int(np.argmax(sizes))
                raise cells.error(
                    event,
                    f"column {name!r} has {sizes[event]:,} categories here, but an event has "
                    f"at most {most}; keep the most important ones",
                )
        return found

    def numbered(self, found: Mapping[str, Categories]) -> dict[str, Numbered]:
        """The ids of those columns whose categories are not being learned."""
        return {
            name: Numbered(self._numbering[name].ids(each), each.lengths)
            for name, each in found.items()
            if name in self._numbering
        }

    def check(self, cells: Cells) -> None:
        """Raises DataError if a cell cannot be read."""
        dense_of(cells, self._schema.dense)
        self.categories(cells)

    def take(self, cells: Cells) -> None:
        """Reads the next block and keeps its numbers and ids.

        Raises:
          DataError: a cell cannot be read.
        """
        schema = self._schema
        self._dense.append(dense_of(cells, schema.dense, schema.several))
        found = self.categories(cells)
        if len(self._dense) == 1:
            warn_of_lists(found, self._schema, self._known)
        for name, each in self.numbered(found).items():
            self._ids[name].append(each.ids)
        for name, each in found.items():
            self._lengths[name].append(each.lengths)
            if name not in self._numbering:
                self._learners[self._owners[name]].add(name, each.texts)

    def finish(
        self, path: Path, what: str
    ) -> tuple[dict[str, Names], np.ndarray, dict[str, list[Numbered]]]:
        """The vocabularies, `[examples, columns]` numbers, and the ids of all blocks by column.

        Raises:
          DataError: no block was read; `what` is the message.
        """
        if not self._dense:
            raise DataError.at(path, what)
        vocabularies, ids = dict(self._known or {}), dict(self._ids)
        for name, learner in self._learners.items():
            least = vocabularies_of(self._schema)[name].min_count
            vocabularies[name], learned = learner.finish(least)
            ids |= learned
        each = {
            name: list(map(Numbered, parts, self._lengths[name]))
            for name, parts in ids.items()
        }
        return vocabularies, np.concatenate(self._dense), each


class CategoryCounter:
    """Counts the categories in the columns of a schema, block by block.

    Args:
      schema: types of the columns.
      known: categories of each vocabulary, which are then not counted; or None.

    Attributes:
      lists: largest number of categories in a list, for each column with lists.
    """

    def __init__(
        self, schema: HasColumns, known: Mapping[str, Names] | None = None
    ) -> None:
        self._schema, self._known, self._has_begun = schema, known, False
        learned = vocabularies_of(schema) if known is None else {}
        self._counters = {name: (Counter(), c.min_count) for name, c in learned.items()}
        self.lists: dict[str, int] = {}

    def add(self, found: Mapping[str, Categories]) -> None:
        """Counts the categories of the next block, which must have all columns of categories."""
        if not self._has_begun:
            warn_of_lists(found, self._schema, self._known)
        self._has_begun = True
        owners = vocabulary_columns(self._schema)
        for name, (texts, sizes) in found.items():
            if sizes is not None:
                longest = int(sizes.max(initial=1))
                self.lists[name] = max(self.lists.get(name, 1), longest)
            if (owner := owners.get(name)) in self._counters:
                self._counters[owner][0].add(texts)

    def finish(self) -> dict[str, Names]:
        """The vocabularies, by column."""
        counted = self._counters.items()
        found = {name: counter.finish(least) for name, (counter, least) in counted}
        return dict(self._known or {}) | found


def ranked(names: Names, counts: np.ndarray, min_count: int) -> np.ndarray:
    """Positions of the names that get an id of their own, the most frequent one first."""
    kept = np.flatnonzero((counts >= min_count) & (names != ""))
    by_name = np.argsort(names[kept], kind="stable")  # code points order as bytes do
    kept = kept[by_name]
    return kept[np.argsort(-counts[kept], kind="stable")]
