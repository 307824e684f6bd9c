"""Finding and writing many names at once, as bytes: no Python object is made of a name."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from sparsejax.data.files.names import Names, utf8

_WORD, _LENGTH = 8, 4  # bytes
# Bits of a word that belong to a name which ends after so many bytes of it.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
_WORDS = struct.Struct("<Q")
_LENGTH_BITS = 31
_NO_LENGTH = (1 << _LENGTH_BITS) - 1
_Levels = list[tuple[np.ndarray | slice, np.ndarray]]
_ALL = slice(None)
# These and `_hashed` are part of the form of predictors' files.
_FACTOR, _MORE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_ALL_BITS = (1 << 64) - 1


class EncodedNames(Sequence[str]):
    """Names within one array of bytes. They become text when they are looked at.

    Args:
      data: bytes, in which all names are UTF-8.
      starts: where each name begins.
      ends: where each ends.
    """

    def __init__(self, data: bytes, starts: np.ndarray, ends: np.ndarray):
        self.data, self.starts, self.ends = data, starts, ends

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


class PrefixedNames:
    """Names as bytes, each after its length as four bytes, of which some are written at once.

    Args:
      encoded: all names, in UTF-8.
      ends: `[names + 1]`: where the first begins, and where each ends.
    """

    def __init__(self, encoded: bytes, ends: np.ndarray):
        lengths = np.append(ends[1:] - ends[:-1], 0)  # an empty name is the last
        begins = np.concatenate([[0], np.cumsum(lengths + _LENGTH)])
        is_length = np.zeros(begins[-1], bool)
        for byte in range(_LENGTH):
            is_length[begins[:-1] + byte] = True
        data = np.empty(begins[-1], np.uint8)
        data[is_length] = lengths.astype("<u4").view(np.uint8)
        data[~is_length] = np.frombuffer(encoded, np.uint8)
        buffers = [None, pa.py_buffer(begins), pa.py_buffer(data)]
        kind = pa.large_binary()
        self._names = pa.LargeBinaryArray.from_buffers(kind, len(lengths), buffers)

    def take(self, places: np.ndarray) -> bytes:
        """The names of some places; that of -1 is empty."""
        places = np.where(places < 0, len(self._names) - 1, places)
        found = self._names.take(pa.array(places, pa.int64()))
        _, ends, data = found.buffers()
        end = np.frombuffer(ends, np.int64, len(places) + 1)[-1]
        return data[:end].to_pybytes()


class NameIndex:
    """A table of names, in which many are found at once.

    A name is hashed as words of 8 bytes, the last one filled up with zeros. Its hash chooses one
    of as many groups as there are names. Each group has a shift, chosen so that no two names
    have the same place: so one look at the table finds a name. It is the one that was asked
    for if its length and its words are the same.

    Args:
      encoded: all names, in UTF-8; each comes once.
      ends: `[names + 1]`: where the first begins, and where each ends.
      stored: `shifts` and `table` of an index of the same names; by default they are chosen.

    Attributes:
      shifts: `[groups]` uint8.
      table: `[4 * groups]` int32: the name at each place, -1 if it is free.

    Raises:
      ValueError: what is stored cannot be of so many names.
    """

    def __init__(
        self,
        encoded: bytes,
        ends: np.ndarray,
        stored: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        count, lengths = len(ends) - 1, np.diff(ends)
        self._words, first = _aligned(encoded, ends[:-1], lengths)
        # One number for both, since each look at a large array waits for memory. The last one
        # is of free places.
        self._first_and_length = np.append(
            (first << _LENGTH_BITS) | lengths, _NO_LENGTH
        )
        bits = count.bit_length()
        self._groups = np.uint64((1 << bits) - 1)
        if stored is None:
            self.shifts = np.zeros(1 << bits, np.uint8)
            self.table = np.full(4 << bits, -1, np.int32)
            self._fill(_hashed(lengths, _levels(encoded, ends[:-1], lengths)))
        else:
            self.shifts, self.table = stored
            sizes = len(self.shifts), len(self.table)
            least, most = self.table.min(initial=-1), self.table.max(initial=-1)
            if sizes != (1 << bits, 4 << bits) or least < -1 or most >= count:
                raise ValueError(f"the index is not one of {count:,} names")
        is_there = np.zeros(count + 1, bool)  # the last one is for free places
        is_there[self.table] = True
        others = np.flatnonzero(~is_there[:-1]).tolist()
        # Python takes single numbers faster from these than from arrays.
        self._views = memoryview(self.shifts), memoryview(self.table), memoryview(ends)
        self._encoded = encoded
        names = ((encoded[ends[at] : ends[at + 1]], at) for at in others)
        self._others = dict(names)

    def _fill(self, hashes: np.ndarray) -> None:
        """Chooses the shifts. Names of equal hashes find no place."""
        waiting = np.arange(len(hashes), dtype=np.int32)
        groups = (hashes & self._groups).astype(np.int64)
        claims = np.empty_like(self.table)
        for shift in range(256):
            if not len(waiting):
                break
            self.shifts[groups[waiting]] = shift
            slots = self._slots(hashes[waiting])
            claims[slots] = waiting  # of several the last one stays
            is_good = (claims[slots] == waiting) & (self.table[slots] < 0)
            bad = np.zeros(len(self.shifts), bool)
            bad[groups[waiting[~is_good]]] = True  # a group finds places together
            left = bad[groups[waiting]]
            self.table[slots[~left]] = waiting[~left]
            waiting = waiting[left]

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        """The places in the table. A shift adds a multiple of an odd number that differs."""
        shifts = self.shifts[(hashes & self._groups).astype(np.int64)]
        own = (hashes >> np.uint64(32)) + shifts * (
            (hashes >> np.uint64(7)) | np.uint64(1)
        )
        return (own & np.uint64(len(self.table) - 1)).astype(np.int64)

    def find(self, names: EncodedNames) -> np.ndarray:
        """`[names]` int32: the place of each name, -1 if it is absent."""
        lengths = names.ends - names.starts
        levels = _levels(names.data, names.starts, lengths)
        found = self.table[self._slots(_hashed(lengths, levels))]
        both = self._first_and_length[found]
        same = (both & _NO_LENGTH) == lengths
        first = both >> _LENGTH_BITS
        for level, (places, words) in enumerate(levels):
            # The name in the table may have no such word, if its length differs.
            same[places] &= (
                self._words.take(first[places] + level, mode="clip") == words
            )
        found[~same] = -1
        if self._others:
            for place in np.flatnonzero(found < 0).tolist():
                name = names.data[names.starts[place] : names.ends[place]]
                found[place] = self._others.get(name, -1)
        return found

    def place(self, name: str) -> int:
        """The place of a name, -1 if it is absent: `find` for few names, for which it is faster."""
        encoded = name.encode(errors="surrogatepass")  # no name has such bytes
        shifts, table, ends = self._views
        hashed = len(encoded)
        for (word,) in _WORDS.iter_unpack(encoded + bytes(-hashed % _WORD)):
            hashed = ((hashed ^ word) * _FACTOR) & _ALL_BITS
            hashed ^= hashed >> 32
        hashed = (hashed * _MORE) & _ALL_BITS
        hashed ^= hashed >> 32
        shift = shifts[hashed & (len(shifts) - 1)]
        slot = (hashed >> 32) + shift * ((hashed >> 7) | 1)
        found = table[slot & (len(table) - 1)]
        if found >= 0 and self._encoded[ends[found] : ends[found + 1]] == encoded:
            return found
        return self._others.get(encoded, -1)


class Places(dict[str, int]):
    """The places of names, -1 for those that are absent. It remembers those that were found.

    Args:
      index: of all names.
    """

    def __init__(self, index: NameIndex):
        super().__init__()
        self._index = index

    def __missing__(self, name: str) -> int:
        place = self._index.place(name)
        if place >= 0:  # others have no end
            self[name] = place
        return place


class NameTable:
    """Names as bytes, as a file has them, and what finds and writes them.

    Args:
      encoded: all names, in UTF-8.
      ends: `[names + 1]`: where the first begins, and where each ends.
      stored: see `NameIndex`.

    Raises:
      ValueError: a name is not in UTF-8; or see `NameIndex`.
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
        """The table of an array of names."""
        return cls(*utf8(names))

    @functools.cached_property
    def names(self) -> Names:
        """`[names]` text."""
        return np.array(self._texts.to_pylist(), np.dtypes.StringDType())

    @functools.cached_property
    def index(self) -> NameIndex:
        """In which names are found."""
        return NameIndex(self.encoded, self.ends)


def _hashed(lengths: np.ndarray, levels: _Levels) -> np.ndarray:
    """A number of 64 bits for each name, which depends on all of its bytes."""
    hashed = lengths.astype(np.uint64)
    for places, words in levels:
        hashed[places] = _mixed((hashed[places] ^ words) * np.uint64(_FACTOR))
    return _mixed(hashed * np.uint64(_MORE))


def _mixed(hashed: np.ndarray) -> np.ndarray:
    """Lets the low bits depend on all bits, too; a product's high ones do so."""
    return hashed ^ (hashed >> np.uint64(32))


def _words(data: bytes) -> np.ndarray:
    """The word that begins at each byte."""
    data += bytes(_WORD)  # a word may end behind the last byte
    return np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))


def _aligned(
    data: bytes, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The words of all names, one name after the other; and where each name begins."""
    counts = -(-lengths // _WORD)
    first = np.cumsum(counts) - counts
    at = np.arange(counts.sum()) * _WORD
    at += np.repeat(starts - first * _WORD, counts)
    words = np.append(_words(data)[at], np.uint64(0))  # also if there is no name
    last = first + counts - 1
    masks = _MASKS[lengths - (counts - 1) * _WORD]
    some = counts > 0
    words[last[some]] &= masks[some]
    return words, first


def _levels(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> _Levels:
    """The first word of each name, then the second one of those that have one, and so on.

    Returns:
      For each level the places of the names, and their words. Of all names the places are a
      slice, which NumPy takes much faster.
    """
    every = _words(data)
    places: Any = _ALL
    begins, left = starts, lengths
    levels: _Levels = []
    while True:
        if not (are := left > 0).all():
            places = np.flatnonzero(are) if places is _ALL else places[are]
            begins, left = begins[are], left[are]
        if not len(left):
            return levels
        levels.append((places, every[begins] & _MASKS[np.minimum(left, _WORD)]))
        begins, left = begins + _WORD, left - _WORD
