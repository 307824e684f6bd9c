"""What of a data set to hold out: a random choice that names alone decide."""

from __future__ import annotations

import hashlib

import numpy as np

from sparsejax.data.names import Names
from sparsejax.sparse import CSR


def heldout_entries(
    matrix: CSR, row_names: Names, feature_names: Names, fraction: float, seed: int
) -> np.ndarray:
    """`[entries]` bool: the entries that `SparseDataset.split` holds out.

    Each entry gets a 64-bit key, a hash of seed, row name and feature name; in each row
    the entries of the smallest keys are held out.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    indptr = np.asarray(matrix.indptr)
    lengths = np.diff(indptr)
    counts = _num_held(lengths, fraction)
    rows = np.repeat(np.arange(matrix.num_rows), lengths)
    keys = _mix(
        _hashes(row_names, seed)[rows]
        ^ _mix(_hashes(feature_names, seed)[matrix.indices])
    )
    # Sorted by key within each row: one sort of (row, high bits of the key).
    row_bits = np.uint64(max(matrix.num_rows.bit_length(), 1))
    row_part = rows.astype(np.uint64) << (np.uint64(64) - row_bits)
    order = np.argsort(row_part | (keys >> row_bits))
    place = np.arange(matrix.nse) - np.repeat(indptr[:-1], lengths)
    is_held = np.zeros(matrix.nse, bool)
    is_held[order] = place < counts[rows]
    return is_held


def heldout_rows(row_names: Names, fraction: float, seed: int) -> np.ndarray:
    """`[rows]` bool: the rows that `SparseDataset.split_rows` holds out.

    Each row gets a 64-bit key, a hash of seed and name; the smallest are held out.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    count = int(_num_held(np.array([len(row_names)]), fraction)[0])
    is_held = np.zeros(len(row_names), bool)
    # Mixed, so that it is another choice than that of entries by the same seed.
    is_held[np.argsort(_mix(_hashes(row_names, seed)), kind="stable")[:count]] = True
    return is_held


def _num_held(counts: np.ndarray, fraction: float) -> np.ndarray:
    """How many of so many are held out: rounded half up, but one stays."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie in (0, 1), got {fraction}")
    # 1 - 0.9 is below 0.1, and half of it must still count as half: nine decimals.
    shares = np.round((1 - fraction) * counts, 9)
    return np.minimum(np.floor(shares + 0.5), np.maximum(counts - 1, 0))


def _hashes(names: Names, seed: int) -> np.ndarray:
    """`[n]` uint64 from each name and the seed, the same everywhere and always."""
    keyed = hashlib.blake2b(str(seed).encode() + b"\0", digest_size=8)
    digests = bytearray()
    for name in names:
        one = keyed.copy()
        one.update(name.encode())
        digests += one.digest()
    return np.frombuffer(bytes(digests), "<u8").astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
