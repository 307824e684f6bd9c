"""Computes XXH64, a published 64-bit hash (https://xxhash.com), for many texts at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

# The five primes of the specification.
_P1 = np.uint64(11400714785074694791)
_P2 = np.uint64(14029467366897019727)
_P3 = np.uint64(1609587929392839161)
_P4 = np.uint64(9650029242287828579)
_P5 = np.uint64(2870177450012600261)
_STRIPE = 32  # bytes that the four lanes consume in a round
_TOGETHER = 2**16  # texts hashed at a time, so that temporary arrays stay small


def xxh64(texts: pa.LargeStringArray) -> np.ndarray:
    """`[n]` uint64: the XXH64 hash, with seed 0, of the UTF-8 bytes of each text.

    No text may be null. Hashes are equal on every machine, and equal to those of other
    implementations of XXH64. Texts of equal length are hashed together.
    """
    offsets = np.frombuffer(texts.buffers()[1], np.int64)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    content = np.frombuffer(b"" if data is None else data, np.uint8)
    lengths = np.diff(offsets)
    hashes = np.empty(len(texts), np.uint64)
    for length in np.unique(lengths):
        alike = np.flatnonzero(lengths == length)
        for first in range(0, len(alike), _TOGETHER):
            chosen = alike[first : first + _TOGETHER]
            places = offsets[chosen][:, None] + np.arange(length)
            hashes[chosen] = _of_one_length(content[places])
    return hashes


def _of_one_length(texts: np.ndarray) -> np.ndarray:
    """`[n]` uint64 hashes of `texts: [n, length]` bytes. Arithmetic is modulo 2^64."""
    count, length = texts.shape

    def lane(at: int, size: int) -> np.ndarray:
        part = np.ascontiguousarray(texts[:, at : at + size])
        return part.view(f"<u{size}")[:, 0].astype(np.uint64)

    def filled(value: int) -> np.ndarray:
        return np.full(count, value % 2**64, np.uint64)

    at = 0
    if length < _STRIPE:
        h = filled(int(_P5))
    else:
        first = int(_P1) + int(_P2), int(_P2), 0, -int(_P1)
        lanes = [filled(value) for value in first]
        while at + _STRIPE <= length:
            lanes = [_round(v, lane(at + 8 * i, 8)) for i, v in enumerate(lanes)]
            at += _STRIPE
        turns = zip(lanes, (1, 7, 12, 18), strict=True)
        h = sum((_turned(v, by) for v, by in turns), start=filled(0))
        for v in lanes:
            h = (h ^ _round(filled(0), v)) * _P1 + _P4
    h = h + np.uint64(length)
    while at + 8 <= length:
        h = _turned(h ^ _round(filled(0), lane(at, 8)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= length:
        h = _turned(h ^ lane(at, 4) * _P1, 23) * _P2 + _P3
        at += 4
    for i in range(at, length):
        h = _turned(h ^ lane(i, 1) * _P5, 11) * _P1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


def _round(h: np.ndarray, lane: np.ndarray) -> np.ndarray:
    return _turned(h + lane * _P2, 31) * _P1


def _turned(h: np.ndarray, by: int) -> np.ndarray:
    """Rotates the bits of each number to the left."""
    return (h << np.uint64(by)) | (h >> np.uint64(64 - by))
