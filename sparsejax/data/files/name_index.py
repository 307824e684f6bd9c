"""Finding and writing many names at once, as bytes: no Python object is made of a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from sparsejax.data.files.names import Names, utf8

_WORD, _LENGTH = 8, 4  # bytes
_LENGTH_BITS = 31
_NO_LENGTH = (1 << _LENGTH_BITS) - 1
# Bits of a word that belong to a name which ends after so many bytes of it.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
_Levels = list[tuple[np.ndarray | slice, np.ndarray]]
_ALL = slice(None)
_FACTOR, _MORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


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
      names: the list.
    """

    def __init__(self, names: Names):
        encoded, ends = utf8(names)
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
      names: that are found by their places, each once.
    """

    def __init__(self, names: Names):
        encoded, ends = utf8(names)
        lengths = np.append(np.diff(ends), _NO_LENGTH)  # the last one of a free place
        levels = _levels(encoded, ends[:-1], lengths[:-1])
        counts = -(-lengths // _WORD)
        counts[-1] = 0
        first = np.cumsum(counts) - counts
        self._words = np.zeros(int(counts.sum()) + 1, np.uint64)
        for level, (places, words) in enumerate(levels):
            self._words[first[:-1][places] + level] = words
        # One number for both, since each look at a large array waits for memory.
        self._first_and_length = (first << _LENGTH_BITS) | lengths
        bits = len(names).bit_length()
        self._groups = np.uint64((1 << bits) - 1)
        self._shifts = np.zeros(1 << bits, np.uint8)
        self._table = np.full(4 << bits, -1, np.int32)
        rest = self._fill(_hashed(lengths[:-1], levels))
        self._others = {names[place]: place for place in rest.tolist()}

    def _fill(self, hashes: np.ndarray) -> np.ndarray:
        """Chooses the shifts, and gives the names that found no place: those of equal hashes."""
        waiting = np.arange(len(hashes), dtype=np.int32)
        groups = (hashes & self._groups).astype(np.int64)
        claims = np.empty_like(self._table)
        for shift in range(256):
            if not len(waiting):
                break
            self._shifts[groups[waiting]] = shift
            slots = self._slots(hashes[waiting])
            claims[slots] = waiting  # of several the last one stays
            is_good = (claims[slots] == waiting) & (self._table[slots] < 0)
            bad = np.zeros(len(self._shifts), bool)
            bad[groups[waiting[~is_good]]] = True  # a group finds places together
            left = bad[groups[waiting]]
            self._table[slots[~left]] = waiting[~left]
            waiting = waiting[left]
        return waiting

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        """The places in the table. A shift adds a multiple of an odd number that differs."""
        shifts = self._shifts[(hashes & self._groups).astype(np.int64)]
        own = (hashes >> np.uint64(32)) + shifts * (
            (hashes >> np.uint64(7)) | np.uint64(1)
        )
        return (own & np.uint64(len(self._table) - 1)).astype(np.int64)

    def find(self, names: EncodedNames) -> np.ndarray:
        """`[names]` int32: the place of each name, -1 if it is absent."""
        lengths = names.ends - names.starts
        levels = _levels(names.data, names.starts, lengths)
        found = self._table[self._slots(_hashed(lengths, levels))]
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
                found[place] = self._others.get(names[place], -1)
        return found


def _hashed(lengths: np.ndarray, levels: _Levels) -> np.ndarray:
    """A number of 64 bits for each name, which depends on all of its bytes."""
    hashed = lengths.astype(np.uint64)
    for places, words in levels:
        hashed[places] = _mixed((hashed[places] ^ words) * _FACTOR)
    return _mixed(hashed * _MORE)


def _mixed(hashed: np.ndarray) -> np.ndarray:
    """Lets the low bits depend on all bits, too; a product's high ones do so."""
    return hashed ^ (hashed >> np.uint64(32))


def _levels(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> _Levels:
    """The first word of each name, then the second one of those that have one, and so on.

    Returns:
      For each level the places of the names, and their words. Of all names the places are a
      slice, which NumPy takes much faster.
    """
    data += bytes(_WORD)  # a word may end behind the last byte
    every = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
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
