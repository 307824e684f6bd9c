"""Arrays of names of rows and features, and lookup of names by hashing.

Names are NumPy arrays of `StringDType`. A name of up to 15 bytes takes 16 bytes there; a
Python string in an object array takes about 60. Indexing gives a `str`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparsejax.data.files import arrow, spelling
from sparsejax.data.files.opening import half_pair

Names = np.ndarray


def as_names(names: Iterable[object] | pa.Array) -> Names:
    """Converts names to an `[n]` array of text, spelled as by all readers.

    Text stays as it is, and an array of `StringDType` is returned unchanged. Integers, whole
    floats, decimals and UUIDs become text.

    Raises:
      ValueError: the names are not one-dimensional. A name is missing, or is a fraction, a
        boolean or a date.
      TypeError: one name was given instead of a sequence.
    """
    if isinstance(names, str):
        raise TypeError(f"expected a sequence of names, got the string {names!r}")
    if isinstance(names, pa.Array | pa.ChunkedArray):
        if arrow.is_text(names):
            return np.array(arrow.texts(names), _TEXT)
        return _of_arrow(names)
    if isinstance(names, range):
        names = np.arange(names.start, names.stop, names.step)
    if isinstance(names, np.ndarray):
        if names.ndim != 1:
            raise ValueError(f"names must be one-dimensional, got shape {names.shape}")
        if names.dtype == _TEXT:
            return names
        if names.dtype.kind in "iu":
            return names.astype(_TEXT)
    # Elements stay NumPy scalars: `_spelled` must know if a float is a float32, which represents
    # fewer integers exactly.
    names = list(names)
    is_plain = set(map(type, names)) <= {str} and all(names)
    found = names if is_plain else _spelled(names)
    try:
        return np.array(found, _TEXT)
    except UnicodeEncodeError as error:
        at = found.index(error.object)
        raise ValueError(f"name {at:,} {half_pair(error)}") from error


_TEXT = np.dtypes.StringDType()
_MISSING = "is empty or null; every name is needed"


def _of_arrow(names: pa.Array | pa.ChunkedArray) -> Names:
    if isinstance(names, pa.ChunkedArray):
        names = pa.concat_arrays(names.chunks or [pa.array([], names.type)])
    if not spelling.is_name(names.type):
        raise ValueError(f"names are text or integers, but these are {names.type}")
    if (missing := spelling.are_missing(names)).any():
        raise ValueError(f"name {np.argmax(missing):,} {_MISSING}")
    found, wrong, problem = spelling.as_integers_or_text(names)
    if wrong.any():
        raise ValueError(f"name {np.argmax(wrong):,} {problem}")
    try:
        return np.array(arrow.texts(found.cast(pa.large_string())), _TEXT)
    except pa.ArrowInvalid as error:
        raise ValueError(f"a name is not valid UTF-8: {error}") from error


def _spelled(names: Iterable[object]) -> list[str]:
    found = []
    for at, value in enumerate(names):
        try:
            name = spelling.name_of(value)
        except ValueError as error:
            raise ValueError(f"name {at:,} {error}") from None
        if name is None:
            raise ValueError(f"name {at:,} {_MISSING}")
        found.append(name)
    return found


def given_names(names: Iterable[object] | pa.Array) -> Names:
    """Calls `as_names`, and also refuses an empty name in an array of text."""
    found = as_names(names)
    if (empty := found == "").any():
        at = int(np.argmax(empty))
        raise ValueError(f"name {at:,} {_MISSING}")
    return found


@runtime_checkable
class RowNames(Protocol):
    """A data set that has names of rows."""

    @property
    def row_names(self) -> Names:
        """`[rows]` names of the rows."""
        ...


@runtime_checkable
class FeatureNames(Protocol):
    """A data set that has names of features."""

    @property
    def feature_names(self) -> Names:
        """`[features]` names of the features."""
        ...


def of_features(features: FeatureNames | Iterable[object]) -> Names:
    """The given names, or the feature names of a data set.

    Raises:
      ValueError: a name was given twice.
    """
    if isinstance(features, FeatureNames):
        return features.feature_names
    names = given_names(features)
    check_unique(names, "feature")
    return names


def of_rows(rows: RowNames | Iterable[object]) -> Names:
    """The given names, or the row names of a data set."""
    return rows.row_names if isinstance(rows, RowNames) else given_names(rows)


def to_arrow(names: Names) -> pa.LargeStringArray:
    """Converts names to an Arrow array with 64-bit offsets, because they may pass 2 GiB."""
    encoded, offsets = utf8(names)
    return pa.LargeStringArray.from_buffers(
        len(names), pa.py_buffer(offsets), pa.py_buffer(encoded)
    )


def utf8(names: Names) -> tuple[bytes, np.ndarray]:
    """The UTF-8 bytes of all names, concatenated, and their `[n + 1]` offsets."""
    texts = names.tolist()
    whole = "".join(texts)
    encoded = whole.encode()
    lengths = map(len, texts)
    if len(encoded) != len(whole):
        lengths = (len(text.encode()) for text in texts)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, len(texts)), out=offsets[1:])
    return encoded, offsets


def find_names(names: Names, among: Names) -> np.ndarray:
    """`[len(names)]` int32: the position of each name in `among`, -1 if absent."""
    return find_texts(to_arrow(names), to_arrow(among))


def find_texts(texts: pa.Array, among: pa.Array) -> np.ndarray:
    """`find_names` for Arrow arrays: the positions of texts, -1 for an absent text or null."""
    # This calls pc.index_in, which type checkers do not know.
    lookup = pc.SetLookupOptions(value_set=among)
    found = pc.call_function("index_in", [texts], lookup)
    absent = arrow.from_numbers(np.full(len(texts), -1, np.int32))
    return arrow.numbers(pc.call_function("coalesce", [found, absent]))


def check_unique(names: Names, what: str) -> None:
    """Raises ValueError if a name occurs twice; `what` is "row" or "feature"."""
    encoded = to_arrow(names)
    if len(encoded.unique()) == len(encoded):
        return
    seen = encoded.value_counts()
    repeated = as_names(seen.field("values"))[arrow.numbers(seen.field("counts")) > 1]
    raise ValueError(
        f"{what} names must be unique, but these occur more than once: "
        f"{quoted(repeated)}"
    )


def quoted(names: Iterable[object] | pa.Array, *, count: int = 3) -> str:
    """The first few names, quoted, for a message."""
    some = list(itertools.islice(names, count + 1))
    shown = ", ".join(repr(str(name)) for name in some[:count])
    return shown if len(some) <= count else f"{shown}, ..."


def spelled_like(names: Names, vocabulary: Names) -> Names:
    """Spells names like a vocabulary, so that they can be found in it.

    If all names of the vocabulary are integers, `7.0` becomes `7`: pandas writes a column of
    integers as floats if some are missing. With any other vocabulary, names are unchanged.
    """
    if not len(vocabulary) or not spelling.has_only_digits(to_arrow(vocabulary)):
        return names
    before = to_arrow(names)
    after = spelling.without_point_zero(before)
    return names if after.equals(before) else as_names(after)


class NameEncoder:
    """Numbers names by first appearance, a block at a time, in linear time.

    Each block is encoded alone, with provisional numbers, and its distinct names are collected.
    When more names are collected than known, all of them are encoded together. So a name is
    hashed a bounded number of times on average. The memory holds at most twice the number
    of distinct names, or `waiting` names if that is more.

    Args:
      waiting: number of names that may be collected, even if fewer are known.
    """

    def __init__(self, waiting: int = 2**20) -> None:
        self._may_wait = waiting
        self._known = to_arrow(as_names([]))
        self._waiting: list[pa.LargeStringArray] = []
        self._num_waiting = 0
        self._settled: list[np.ndarray] = []
        self._provisional: list[np.ndarray] = []

    def add(self, names: pa.Array) -> None:
        """Adds a block of names: strings, which may be dictionary-encoded."""
        if not isinstance(names, pa.DictionaryArray):
            names = names.dictionary_encode()
        codes = arrow.numbers(names.indices)
        offset = np.int32(len(self._known) + self._num_waiting)
        self._provisional.append(codes + offset)
        self._waiting.append(names.dictionary.cast(pa.large_string()))
        self._num_waiting += len(names.dictionary)
        if self._num_waiting > max(self._may_wait, len(self._known)):
            self._fold()

    def finish(self) -> tuple[Names, np.ndarray]:
        """`(names [n], codes [total] int32)`; `names[codes]` are the names of all blocks."""
        self._fold()
        codes = np.concatenate([np.empty(0, np.int32), *self._settled])
        return as_names(self._known), codes

    def _fold(self) -> None:
        merged = pa.concat_arrays([self._known, *self._waiting]).dictionary_encode()
        # Known names come first in the dictionary, so their codes do not change.
        final = arrow.numbers(merged.indices)
        self._known = merged.dictionary
        self._settled += [final[codes] for codes in self._provisional]
        self._waiting, self._num_waiting, self._provisional = [], 0, []


def numbered(names: Names) -> tuple[Names, np.ndarray]:
    """The distinct names by first appearance, and `[len(names)]` int32 codes into them."""
    encoder = NameEncoder()
    encoder.add(to_arrow(names))
    return encoder.finish()
