"""Finds and writes many names at once, as bytes, without a Python object for each name."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from sparsejax.data.files.names import Names, utf8

_WORD, _LENGTH = 8, 4  # bytes of a word, and of a stored length
_MOST_WORDS = 32  # most words of a name in a record
# Files of predictors contain hashes, so neither these factors nor `_hashed` may change.
_FACTOR, _MORE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_ALL_BITS = (1 << 64) - 1
_HALF = np.uint64(32)  # bits of a word
_WORDS = struct.Struct("<Q")
# For at most this many names, a Python loop is faster than calls of NumPy.
_FEW = 12


class EncodedNames(Sequence[str]):
    """Names as slices of one array of bytes. A name becomes a `str` when it is indexed.

    Args:
      data: bytes that contain all names in UTF-8.
      starts: offset in `data` where each name begins.
      ends: offset in `data` where each name ends.
    """

    def __init__(self, data: bytes, starts: np.ndarray, ends: np.ndarray):
        self.data, self.starts, self.ends = data, starts, ends

    @classmethod
    def of(cls, names: Sequence[str]) -> EncodedNames:
        """Encodes names that are `str`."""
        each = [*map(_utf8, names)]
        ends = np.cumsum([0, *map(len, each)])
        return cls(b"".join(each), ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            pairs = zip(self.starts[place], self.ends[place], strict=True)
            return [self.data[a:b].decode() for a, b in pairs]
        return self.data[self.starts[place] : self.ends[place]].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])


class NameIndex:
    """A perfect hash table of names, which finds and writes many names at once.

    A name is hashed as words of 8 bytes, the last one padded with zeros. Its hash selects one
    of about as many groups as there are names. Each group has a shift, chosen so that no two
    names get the same slot. So one lookup in the table finds a name. A name in the table is
    the wanted one if its length and its words are equal.

    The length and the first words of a name are one record, because each access to a large
    array waits for memory. All records have equal widths, which few names exceed.

    Args:
      encoded: all names in UTF-8, concatenated; names are distinct.
      ends: `[names + 1]` offsets of the names in `encoded`.
      stored: `shifts` and `table` of an index of the same names; by default they are
        computed.

    Attributes:
      shifts: `[groups]` uint8 shift of each group.
      table: `[4 * groups]` int32 position of the name in each slot, -1 if the slot is free.

    Raises:
      ValueError: the stored arrays do not match the number of names.
    """

    def __init__(
        self,
        encoded: bytes,
        ends: np.ndarray,
        stored: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        count, lengths = len(ends) - 1, np.diff(ends)
        self._encoded, self._ends = encoded, ends
        most = min(lengths.max(initial=0), 2 * len(encoded) // max(count, 1))
        self._width = width = min(max(_words(most), 1), _MOST_WORDS)
        data = encoded + bytes(_WORD * width)
        words = _first_words(data, ends[:-1], lengths, width)
        # The last two records are the empty name, and a record that no name equals.
        records = np.zeros((count + 2, 1 + width), np.uint64)
        records[:-2, 0] = _shown(lengths)
        records[:-2, 1:] = words
        records[-1, 0] = ~np.uint64(0)
        self._records = records.view(f"V{records.strides[0]}").ravel()
        bits = count.bit_length()
        self._groups = np.uint64((1 << bits) - 1)
        if stored is None:
            self.shifts = np.zeros(1 << bits, np.uint8)
            self.table = np.full(4 << bits, -1, np.int32)
            self._fill(_hashed(data, ends[:-1], lengths, words))
        else:
            self.shifts, self.table = stored
            sizes = len(self.shifts), len(self.table)
            least, most = self.table.min(initial=-1), self.table.max(initial=-1)
            if sizes != (1 << bits, 4 << bits) or least < -1 or most >= count:
                raise ValueError(f"the index is not one of {count:,} names")
        is_there = np.zeros(count + 1, bool)  # -1, a free slot, marks the last element
        is_there[self.table] = True
        others = np.flatnonzero(~is_there[:-1]).tolist()
        # Python reads single elements faster from memory views than from arrays.
        self._views = memoryview(self.shifts), memoryview(self.table)
        self._others = {self._name(place): place for place in others}

    def _name(self, place: int | np.integer) -> bytes:
        return self._encoded[self._ends[place] : self._ends[place + 1]]

    def _fill(self, hashes: np.ndarray) -> None:
        """Chooses the shifts and fills the table. Of names with equal hashes, none gets a slot."""
        waiting = np.arange(len(hashes), dtype=np.int32)
        groups = (hashes & self._groups).astype(np.int64)
        claims = np.empty_like(self.table)
        for shift in range(256):
            if not len(waiting):
                break
            self.shifts[groups[waiting]] = shift
            slots = self._slots(hashes[waiting])
            claims[slots] = waiting  # if several names claim a slot, the last one stays
            is_good = (claims[slots] == waiting) & (self.table[slots] < 0)
            bad = np.zeros(len(self.shifts), bool)
            bad[groups[waiting[~is_good]]] = True  # a group gets all its slots or none
            left = bad[groups[waiting]]
            self.table[slots[~left]] = waiting[~left]
            waiting = waiting[left]

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        """Slots of hashes: hash >> 32, plus shift * (hash >> 7 | 1), modulo the table's size."""
        slots = hashes >> np.uint64(7)
        slots |= np.uint64(1)
        slots *= self.shifts.take((hashes & self._groups).view(np.int64))
        slots += hashes >> _HALF
        slots &= np.uint64(len(self.table) - 1)
        return slots.view(np.int64)

    def find(self, names: EncodedNames) -> np.ndarray:
        """`[names]` int32: the position of each name in the index, -1 if it is absent."""
        lengths = names.ends - names.starts
        width = min(max(_words(lengths.max(initial=0)), 1), self._width)
        data = names.data + bytes(_WORD * width)
        asked = np.empty((len(lengths), 1 + width), np.uint64)
        asked[:, 0] = _shown(lengths)
        asked[:, 1:] = words = _first_words(data, names.starts, lengths, width)
        hashes = _hashed(data, names.starts, lengths, words)
        found = self.table.take(self._slots(hashes))
        records = self._records.take(found, mode="wrap")  # -1 takes the last one
        records = records.view(np.uint64).reshape(-1, 1 + self._width)[:, : 1 + width]
        same = records == asked
        if same.all() and lengths.max(initial=0) <= _WORD * width:
            return found  # the usual case: all names are known
        same = same.all(axis=1)
        for at in np.flatnonzero(same & (lengths > _WORD * width)).tolist():
            name = names.data[names.starts[at] : names.ends[at]]
            same[at] = self._name(found[at]) == name
        found[~same] = -1
        if self._others:
            for at in np.flatnonzero(found < 0).tolist():
                name = names.data[names.starts[at] : names.ends[at]]
                found[at] = self._others.get(name, -1)
        return found

    def place(self, name: str) -> int:
        """The position of one name, -1 if it is absent; faster than `find` for few names."""
        encoded = _utf8(name)
        shifts, table = self._views
        hashed = len(encoded)
        for (word,) in _WORDS.iter_unpack(encoded + bytes(-hashed % _WORD)):
            hashed = ((hashed ^ word) * _FACTOR) & _ALL_BITS
            hashed ^= hashed >> 32
        hashed = (hashed * _MORE) & _ALL_BITS
        hashed ^= hashed >> 32
        shift = shifts[hashed & (len(shifts) - 1)]
        slot = (hashed >> 32) + shift * ((hashed >> 7) | 1)
        found = table[slot & (len(table) - 1)]
        if found >= 0 and self._name(found) == encoded:
            return found
        return self._others.get(encoded, -1)

    def prefixed(self, places: np.ndarray) -> bytes:
        """The names at some positions, each after its length in four bytes; "" for -1."""
        room, count = _WORD * self._width, len(self._ends) - 1
        if places.min(initial=0) < 0:
            places = np.where(places < 0, count, places)
        records = self._records.take(places)
        lengths = records.view("<u4")[1 :: 2 + 2 * self._width].astype(np.int64)
        ends = np.cumsum(lengths + _LENGTH)
        starts = ends - lengths - _LENGTH
        size = int(ends[-1]) if len(ends) else _LENGTH
        text = np.empty(size + room, np.uint8)
        # NumPy assigns in ascending order, so each name overwrites the padding of the previous
        # name.
        every = np.ndarray(size + 1 - _LENGTH, f"V{_LENGTH + room}", text, strides=(1,))
        every[starts] = records.view(_within(self._width))["text"]
        for at in np.flatnonzero(lengths > room).tolist():
            left = self._name(places[at])[room:]
            text[ends[at] - len(left) : ends[at]] = np.frombuffer(left, np.uint8)
        return text[: ends[-1] if len(ends) else 0].tobytes()


class Places(dict[str, int]):
    """A cache from name to position in an index.

    Args:
      index: index of all names.
    """

    def __init__(self, index: NameIndex):
        super().__init__()
        self._index = index

    def find(self, names: Sequence[str]) -> np.ndarray:
        """`[names]` int64: the position of each name, -1 if it is absent."""
        # A request may have thousands of names: `map` runs this loop in C, and NumPy converts a
        # list much faster than an iterator.
        found = np.array([*map(self.get, names, itertools.repeat(-1))], np.int64)
        absent = np.flatnonzero(found < 0)
        if len(absent):
            asked = [names[at] for at in absent.tolist()]
            if len(asked) > _FEW:
                places = self._index.find(EncodedNames.of(asked)).tolist()
            else:
                places = [*map(self._index.place, asked)]
            found[absent] = places
            pairs = zip(asked, places, strict=True)
            # Unknown names are not cached, because there may be arbitrarily many.
            self.update((name, place) for name, place in pairs if place >= 0)
        return found


class NameTable:
    """Names as UTF-8 bytes, as a file stores them, with an index to find and write them.

    Args:
      encoded: all names in UTF-8, concatenated.
      ends: `[names + 1]` offsets of the names in `encoded`.
      stored: `shifts` and `table` of a stored `NameIndex`; by default they are computed.

    Raises:
      ValueError: a name is not UTF-8, or the stored arrays do not match the number of
        names.
    """

    def __init__(
        self,
        encoded: bytes,
        ends: np.ndarray,
        stored: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.encoded, self.ends = encoded, ends
        buffers = pa.py_buffer(ends), pa.py_buffer(encoded)
        self._texts = pa.LargeStringArray.from_buffers(len(ends) - 1, *buffers)
        self._texts.validate(full=True)
        if stored is not None:
            self.index = NameIndex(encoded, ends, stored)

    @classmethod
    def of(cls, names: Names) -> NameTable:
        """Makes a table from an array of names."""
        return cls(*utf8(names))

    @functools.cached_property
    def names(self) -> Names:
        """`[names]` the names as an array of text."""
        return np.array(self._texts.to_pylist(), np.dtypes.StringDType())

    @functools.cached_property
    def index(self) -> NameIndex:
        """The index of the names, made at the first use."""
        return NameIndex(self.encoded, self.ends)


def _utf8(name: str) -> bytes:
    """Encodes a text in UTF-8. A lone surrogate becomes bytes that no valid name has."""
    return name.encode(errors="surrogatepass")


def _hashed(
    data: bytes, starts: np.ndarray, lengths: np.ndarray, words: np.ndarray
) -> np.ndarray:
    """A 64-bit hash of each name, `[names]` uint64.

    Args:
      data: bytes that contain the names; see `_first_words`.
      starts: offset where each name begins.
      lengths: number of bytes of each name.
      words: `[names, width]` first words of each name.
    """
    hashed = lengths.astype(np.uint64)
    least = lengths.min(initial=_WORD * words.shape[1])
    for column in range(words.shape[1]):
        mixed = hashed ^ words[:, column]
        mixed *= np.uint64(_FACTOR)
        mixed = _mixed(mixed)
        if least <= _WORD * column:
            mixed = np.where(lengths > _WORD * column, mixed, hashed)
        hashed = mixed
    done = _WORD * words.shape[1]
    longer = np.flatnonzero(lengths > done)
    while len(longer):
        begins, left = starts[longer] + done, lengths[longer] - done
        word = _first_words(data, begins, left, 1).ravel()
        hashed[longer] = _mixed((hashed[longer] ^ word) * np.uint64(_FACTOR))
        done += _WORD
        longer = longer[left > _WORD]
    return _mixed(hashed * np.uint64(_MORE))


def _mixed(hashed: np.ndarray) -> np.ndarray:
    """Mixes the high bits of a product into its low bits, in place."""
    hashed ^= hashed >> _HALF
    return hashed


def _words(count: int | np.integer) -> int:
    """The number of words needed for `count` bytes."""
    return -(-int(count) // _WORD)


def _first_words(
    data: bytes, starts: np.ndarray, lengths: np.ndarray, width: int
) -> np.ndarray:
    """`[names, width]` uint64: the first words of each name, padded with zeros.

    Args:
      data: bytes that contain the names, with at least `width` words after the last one.
      starts: offset where each name begins.
      lengths: number of bytes of each name.
      width: number of words.
    """
    size = _WORD * width
    every = np.ndarray(len(data) - size + 1, f"V{size}", data, strides=(1,))
    words = every[starts].view(np.uint64)
    words &= _masks(width).take(np.minimum(lengths, size)).view(np.uint64)
    return words.reshape(-1, width)


@functools.cache
def _masks(width: int) -> np.ndarray:
    """For each length of a name, a bit mask that keeps its bytes and clears the padding."""
    size = _WORD * width
    is_name = np.arange(size) < np.arange(size + 1)[:, None]
    return (is_name * np.uint8(255)).view(f"V{size}").ravel()


def _within(width: int) -> np.dtype:
    """A dtype that views a record; its field `text` is the length in four bytes and the name."""
    before, text = _WORD - _LENGTH, _LENGTH + _WORD * width
    return np.dtype([("before", f"V{before}"), ("text", f"V{text}")])


def _shown(lengths: np.ndarray) -> np.ndarray:
    """The first word of each name's record: the length in the upper 32 bits."""
    return lengths.astype(np.uint64) << _HALF
