"""Chooses the entries or rows to hold out: at random by hashes of names, or by time."""

from __future__ import annotations

import datetime
import hashlib
import math
from typing import Literal

import numpy as np

from sparsejax.callers import warn_caller
from sparsejax.data.files.names import Names

Repeats = Literal["new", "all"]
Time = float | str | datetime.date | np.datetime64 | np.number


def heldout_entries(
    indptr: np.ndarray,
    indices: np.ndarray,
    row_names: Names,
    feature_names: Names,
    fraction: float,
    seed: int,
    *,
    occurrences: np.ndarray | None = None,
) -> np.ndarray:
    """`[entries]` bool: whether `SparseDataset.split` holds an entry out.

    Each entry gets a 64-bit key: a hash of seed, row name and feature name. In each row
    the entries with the smallest keys are held out.

    Args:
      indptr: `[rows + 1]` offsets of the rows.
      indices: `[entries]` feature of each entry.
      row_names: `[rows]` names of the rows.
      feature_names: `[features]` names of the features.
      fraction: share of each row's entries that stays in train.
      seed: any integer.
      occurrences: `[entries]` number of earlier entries of the row with an equal feature;
        None if no feature repeats.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    return heldout_by_hash(
        indptr,
        indices,
        hashes(row_names, seed),
        hashes(feature_names, seed),
        fraction,
        occurrences,
    )


def heldout_by_hash(
    indptr: np.ndarray,
    indices: np.ndarray,
    row_hashes: np.ndarray,
    feature_hashes: np.ndarray,
    fraction: float,
    occurrences: np.ndarray | None = None,
) -> np.ndarray:
    """Calculates `heldout_entries` from `hashes` of names, for some rows.

    Args:
      indptr: `[rows + 1]` offsets of the rows.
      indices: `[entries]` positions in `feature_hashes`.
      row_hashes: `[rows]` hashes of the rows' names.
      feature_hashes: `[features]` hashes of the features' names.
      fraction: share of each row's entries that stays in train.
      occurrences: `[entries]` number of earlier entries of the row with an equal feature; by
        default 0 for all.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    lengths = np.diff(indptr)
    counts = _num_held(lengths, fraction)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    of_features = feature_hashes[indices]
    if occurrences is not None:
        of_features += occurrences.astype(np.uint64)
    keys = _mix(row_hashes[rows] ^ _mix(of_features))
    # Entries are sorted by row and key in one sort of (row, high bits of the key).
    row_bits = np.uint64(max(len(lengths).bit_length(), 1))
    row_part = rows.astype(np.uint64) << (np.uint64(64) - row_bits)
    order = np.argsort(row_part | (keys >> row_bits))
    place = np.arange(len(indices)) - np.repeat(indptr[:-1], lengths)
    is_held = np.zeros(len(indices), bool)
    is_held[order] = place < counts[rows]
    return is_held


def heldout_last(
    indptr: np.ndarray, times: np.ndarray, order: np.ndarray, n: int
) -> np.ndarray:
    """`[entries]` bool: whether `SparseDataset.split_last` holds an entry out.

    Args:
      indptr: `[rows + 1]` offsets of the rows.
      times: `[entries]` times, of any type that can be ordered.
      order: `[entries]` integers that order entries with equal row and time.
      n: number of entries to hold out from each row. One entry of a row always stays.

    Raises:
      ValueError: `n` is not positive.
    """
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    lengths = np.diff(indptr)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    # Numbers of the entries, sorted by row and time.
    ascending = np.lexsort((order, times, rows))
    first_held = indptr[1:] - np.minimum(n, np.maximum(lengths - 1, 0))
    is_held = np.empty(len(times), bool)
    is_held[ascending] = np.arange(len(times)) >= first_held[rows]
    return is_held


def check_repeats(repeats: str) -> None:
    """Raises ValueError unless `repeats` is "new" or "all"."""
    if repeats not in ("new", "all"):
        raise ValueError(f'repeats is "new" or "all", got {repeats!r}')


def parts_at(
    times: np.ndarray,
    first: np.ndarray,
    cut: object,
    repeats: Repeats,
    known: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns entries to the parts of `split_at`, by the times of their events.

    Args:
      times: `[entries]` time of the latest event of each entry.
      first: `[entries]` time of the earliest event of each entry.
      cut: time of the split; events at or after it are held out.
      repeats: "new" holds out later entries that are not known; "all" holds out all later
        entries.
      known: `[entries]` bool: whether the row has the feature before the cut; by default
        whether an event of the entry is before it.

    Returns:
      `(stays, is_held)`, each `[entries]` bool. An entry may be in both parts.

    Raises:
      ValueError: a part is empty.
    """
    stays, later = first < cut, times >= cut
    known = stays if known is None else known
    is_held = later & ~known if repeats == "new" else later
    span = f"the times are from {first.min()} to {times.max()}, the cut is {cut}"
    if not stays.any():
        raise ValueError(f"everything is held out, nothing to train on: {span}")
    if not is_held.any():
        only = " but repeats" if later.any() else ""
        raise ValueError(f"nothing is held out{only}: {span}")
    return stays, is_held


def are_known(
    rows: np.ndarray, items: np.ndarray, is_held: np.ndarray, num_items: int
) -> np.ndarray:
    """`[entries]` bool: whether the row has the item in an entry that is not held out."""
    pairs = rows.astype(np.int64) * num_items + items
    return np.isin(pairs, pairs[~is_held])


def cut_of(
    times: np.ndarray, time: Time | None, fraction: float | None
) -> int | float | np.number | np.datetime64:
    """The time of the split for `split_at`, in the type of `times`.

    Raises:
      ValueError: `time` is of another kind, `fraction` is outside (0, 1), both or neither
        are given, or all times are equal.
    """
    if time is not None and fraction is None:
        return as_time(time, times)
    if fraction is not None and time is None:
        return time_of_share(times, fraction)
    raise ValueError("pass either a time or a fraction")


def time_of_share(times: np.ndarray, fraction: float) -> np.number | np.datetime64:
    """The time before which about a share `fraction` of the entries is.

    It is the time with the closest share, but never the earliest one. If two times are
    equally close, it is the earlier of them.

    Args:
      times: `[entries]` times.
      fraction: share in (0, 1).

    Raises:
      ValueError: `fraction` is outside (0, 1), or all times are equal.
    """
    check_fraction(fraction)
    distinct, counts = np.unique(times, return_counts=True)
    if len(distinct) < 2:
        raise ValueError(f"all entries have the same time: {distinct[0]}")
    before = np.cumsum(counts)[:-1]
    return distinct[1 + np.argmin(np.abs(before - fraction * len(times)))]


def as_time(time: Time, times: np.ndarray) -> int | float | np.datetime64:
    """Converts a time so that `times >= as_time(time, times)` finds times at or after it.

    Integers are compared exactly, floats as float64, dates in microseconds of UTC.

    Raises:
      ValueError: `time` is of another kind than `times`, or is not a time.
    """
    if isinstance(time, bool | np.bool) or time != time:  # noqa: PLR0124 - as nan and NaT
        raise ValueError(f"the time is {time}")
    if np.issubdtype(times.dtype, np.datetime64):
        if not isinstance(time, str | datetime.date | np.datetime64):
            raise ValueError(
                f"the times are dates, from {times.min()} to {times.max()}, so expected "
                f"a datetime or text like '2024-01-31', got {time!r}"
            )
        return _datetime(time)
    if not isinstance(time, int | float | np.number):
        raise ValueError(
            f"the times are numbers, from {times.min()} to {times.max()}, so expected "
            f"a number, got {time!r}"
        )
    given = time.item() if isinstance(time, np.number) else time
    if times.dtype.kind == "i" and math.isfinite(given):
        return math.ceil(given)  # float64 cannot hold large integers exactly
    return given


def _datetime(time: str | datetime.date | np.datetime64) -> np.datetime64:
    """Converts a time to microseconds, rounded up; a time with a time zone is converted to UTC."""
    if isinstance(time, str):
        try:
            time = datetime.datetime.fromisoformat(time)
        except ValueError as error:
            raise ValueError(
                f"expected a time like '2024-01-31' or '2024-01-31T12:00:00', got "
                f"{time!r}"
            ) from error
    if isinstance(time, datetime.datetime) and time.tzinfo is not None:
        time = time.astimezone(datetime.UTC).replace(tzinfo=None)
    exact = np.datetime64(time)
    found = exact.astype("datetime64[us]")
    return found + np.timedelta64(int(found < exact), "us")


def heldout_names(names: Names, fraction: float, seed: int) -> np.ndarray:
    """`[names]` bool: whether `split_rows` or `split_items` holds a row or item out.

    Each name gets a 64-bit key: a hash of seed and name. The names with the smallest keys are
    held out.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    count = int(_num_held(np.array([len(names)]), fraction)[0])
    is_held = np.zeros(len(names), bool)
    # The hashes are mixed, so that this choice does not depend on that of `split` with equal seed.
    is_held[np.argsort(_mix(hashes(names, seed)), kind="stable")[:count]] = True
    return is_held


def heldout_positions(count: int, fraction: float, seed: int) -> np.ndarray:
    """`[count]` bool: whether `ClickDataset.split_rows` holds an example out.

    Each position gets a 64-bit key, a hash of seed and position. The positions with the
    smallest keys are held out.

    Raises:
      ValueError: `fraction` is outside (0, 1).
    """
    held = int(_num_held(np.array([count]), fraction)[0])
    start = hashes(np.array([""], np.dtypes.StringDType()), seed)
    is_held = np.zeros(count, bool)
    keys = _mix(start ^ _mix(np.arange(count, dtype=np.uint64)))
    is_held[np.argsort(keys, kind="stable")[:held]] = True
    return is_held


def _num_held(counts: np.ndarray, fraction: float) -> np.ndarray:
    """Numbers to hold out: a share of each count, rounded half up, and less than the count."""
    check_fraction(fraction)
    # 1 - 0.9 is slightly less than 0.1, but 5 times it must round up: so 9 decimals are kept.
    shares = np.round((1 - fraction) * counts, 9)
    return np.minimum(np.floor(shares + 0.5), np.maximum(counts - 1, 0))


def warn_of_repeats(repeated: int, heldout: int) -> None:
    """Warns if entries that `split_last` holds out also have other events.

    Args:
      repeated: number of such entries.
      heldout: number of all held-out entries.
    """
    if repeated:
        warn_caller(
            f"{repeated:,} of {heldout:,} held-out entries also have earlier events, "
            "which are in neither part: a repeat of a row and a feature was merged with "
            "them when the data was read, and the latest event gives the time. So they "
            "are held out as if they were new. To split by events, use split_at, or use "
            "read_sequences(...).split_last(...) and to_sparse() of its parts (on the "
            "command line: split --by time, or split --histories)"
        )


def check_fraction(fraction: float) -> None:
    """Raises ValueError unless `fraction` is between 0 and 1, exclusive."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie in (0, 1), got {fraction}")


def hashes(names: Names, seed: int) -> np.ndarray:
    """`[n]` uint64 hashes of name and seed, equal on every machine and in every version."""
    keyed = hashlib.blake2b(str(seed).encode() + b"\0", digest_size=8)
    digests = bytearray()
    for name in names:
        one = keyed.copy()
        one.update(name.encode())
        digests += one.digest()
    return np.frombuffer(bytes(digests), "<u8").astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mixes bits by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
