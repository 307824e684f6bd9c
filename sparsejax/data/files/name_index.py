"""Finding many names at once, as bytes: no Python object is made of a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from sparsejax.data.files.names import Names, utf8

_WORD = 8
# Bits of a word that belong to a name which ends after so many bytes of it.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
_Levels = list[tuple[np.ndarray, np.ndarray]]
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


class NameIndex:
    """A table of names, in which many are found at once.

    A name is hashed as words of 8 bytes, the last one filled up with zeros. Its place in the
    table is the upper part of the hash; where that is taken, so many places further as the
    lower part says, until one is free. At most a quarter of the places are taken, so few steps
    find all names. A name that is found has the length and the words of the one that was
    asked for, not its hash alone.

    Args:
      names: that are found by their places, each once.
    """

    def __init__(self, names: Names):
        encoded, ends = utf8(names)
        self._lengths = np.diff(ends)
        levels = _levels(encoded, ends[:-1], self._lengths)
        counts = -(-self._lengths // _WORD)
        self._first = np.cumsum(counts) - counts
        self._words = np.zeros(int(counts.sum()) + 1, np.uint64)
        for level, (places, words) in enumerate(levels):
            self._words[self._first[places] + level] = words
        bits = int(4 * len(names)).bit_length()
        self._bits = np.uint64(bits)
        self._table = np.full(1 << bits, -1, np.int32)
        hashes = _hashed(self._lengths, levels)
        self._hashes = np.append(hashes, np.uint64(0))  # the last one of a free place
        waiting = np.arange(len(names), dtype=np.int32)
        slots, steps = self._places(hashes)
        while len(waiting):
            free = self._table[slots] < 0
            self._table[slots[free]] = waiting[free]  # of several the last one stays
            left = self._table[slots] != waiting
            waiting, steps = waiting[left], steps[left]
            slots = self._next(slots[left], steps)

    def find(self, names: EncodedNames) -> np.ndarray:
        """`[names]` int32: the place of each name, -1 if it is absent."""
        lengths = names.ends - names.starts
        levels = _levels(names.data, names.starts, lengths)
        hashes = _hashed(lengths, levels)
        found = np.full(len(names), -1, np.int32)
        waiting = np.arange(len(names))
        slots, steps = self._places(hashes)
        while len(waiting):
            met = self._table[slots]
            same = (met >= 0) & (self._hashes[met] == hashes[waiting])
            if same.any():
                at, them = waiting[same], met[same]
                same[same] = are = self._are(them, at, lengths, levels)
                found[at[are]] = them[are]
            left = (met >= 0) & ~same  # after a free place the name does not come
            waiting, steps = waiting[left], steps[left]
            slots = self._next(slots[left], steps)
        return found

    def _are(
        self, met: np.ndarray, asked: np.ndarray, lengths: np.ndarray, levels: _Levels
    ) -> np.ndarray:
        """Whether names of the table are those that are asked for."""
        same = self._lengths[met] == lengths[asked]
        first = self._first[met]
        for level, (places, words) in enumerate(levels):
            if len(places) == len(lengths):
                # A name of another length was ruled out: it may have no such word.
                at = first + level
                own = self._words.take(at, mode="clip")
                same &= own == words[asked]
                continue
            at = np.flatnonzero(same & (lengths[asked] > level * _WORD))
            own = words[np.searchsorted(places, asked[at])]
            same[at] = self._words[first[at] + level] == own
        return same

    def _places(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the search for names begins, and how far each step of it goes."""
        slots = (hashes >> (np.uint64(64) - self._bits)).astype(np.int64)
        steps = hashes.astype(np.int64) & (len(self._table) - 1)
        return slots, steps | 1  # an odd step comes to all places

    def _next(self, slots: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return (slots + steps) & (len(self._table) - 1)


def _hashed(lengths: np.ndarray, levels: _Levels) -> np.ndarray:
    """A number of 64 bits for each name, which depends on all of its bytes."""
    hashed = lengths.astype(np.uint64)
    for places, words in levels:
        mixed = (hashed[places] ^ words) * _FACTOR
        hashed[places] = mixed ^ (mixed >> np.uint64(29))
    return hashed * _MORE


def _levels(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> _Levels:
    """The first word of each name, then the second one of those that have one, and so on.

    Returns:
      For each level the places of the names, and their words.
    """
    data += bytes(_WORD)  # a word may end behind the last byte
    every = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
    places, begins, left = np.arange(len(lengths)), starts, lengths
    levels: _Levels = []
    while True:
        if not (are := left > 0).all():
            places, begins, left = places[are], begins[are], left[are]
        if not len(places):
            return levels
        levels.append((places, every[begins] & _MASKS[np.minimum(left, _WORD)]))
        begins, left = begins + _WORD, left - _WORD
