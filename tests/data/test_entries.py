"""Ragged rows compared with Python lists."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from sparsejax.data.files.entries import Entries, joined, known, taken


def made(rows, *, timed=True, left_out=None):
    """Entries of rows; each row is a list of (index, time)."""
    flat = [entry for row in rows for entry in row]
    return Entries.of_lengths(
        np.array([len(row) for row in rows], np.int64),
        known(
            indices=np.array([i for i, _ in flat], np.int32),
            times=np.array([t for _, t in flat], np.int64) if timed else None,
        ),
        known(left_out=left_out),
    )


def listed(entries):
    columns = [entries.columns[n].tolist() for n in entries.columns]
    flat = list(zip(*columns, strict=True))
    assert entries.indptr[0] == 0
    assert len(flat) == entries.indptr[-1]
    ends = entries.indptr.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(ends)]


@pytest.fixture(params=range(6))
def rows(request):
    rng = np.random.default_rng(request.param)
    longest = (0, 1, 2, 5, 9, 9)[request.param]
    lengths = rng.integers(0, longest + 1, (0, 1, 7, 20, 20, 3)[request.param])
    return [[tuple(rng.integers(0, 5, 2).tolist()) for _ in range(n)] for n in lengths]


def test_each_method_against_lists(rows):
    rng = np.random.default_rng(1)
    left_out = rng.integers(0, 9, len(rows))
    entries = made(rows, left_out=left_out)
    assert listed(entries) == rows
    assert entries.lengths.tolist() == [len(row) for row in rows]
    assert entries.row_of.tolist() == [r for r, row in enumerate(rows) for _ in row]
    if rows:
        chosen = rng.integers(-1, len(rows), 12)
        found = entries.rows(chosen)
        assert listed(found) == [rows[r] if r >= 0 else [] for r in chosen]
        expected = [left_out[r] if r >= 0 else 0 for r in chosen]
        assert found.of_rows["left_out"].tolist() == expected
    some = entries.slice(len(rows) // 3, len(rows))
    assert listed(some) == rows[len(rows) // 3 :]
    assert some.of_rows["left_out"].tolist() == left_out[len(rows) // 3 :].tolist()
    kept = rng.random(len(entries.indices)) < 0.5
    at = iter(kept)
    expected = [[entry for entry in row if next(at)] for row in rows]
    assert listed(entries.keep(kept)) == expected
    without = entries.keep(kept).without_empty_rows()
    assert listed(without) == [row for row in expected if row]
    there = [bool(row) for row in expected]
    assert without.of_rows["left_out"].tolist() == left_out[there].tolist()
    parts = Entries.joined([entries, without, entries])
    assert listed(parts) == [*rows, *listed(without), *rows]
    by_time = entries.sorted("times", "indices")
    assert listed(by_time) == [sorted(row, key=lambda e: e[::-1]) for row in rows]
    by_index = entries.sorted("indices")
    assert [[i for i, _ in row] for row in listed(by_index)] == [
        sorted(i for i, _ in row) for row in rows
    ]
    assert list(map(sorted, listed(by_index))) == list(map(sorted, rows))


def test_what_is_not_known_is_not_there():
    entries = made([[(3, 1)], [(4, 2)]], timed=False)
    for each in (entries, entries.keep(np.array([True, False])), entries.slice(0, 1)):
        assert list(each.columns) == ["indices"]
        assert not each.of_rows
    timed = entries.replaced(times=np.array([1, 2]))
    assert list(timed.columns) == ["indices", "times"]
    assert list(timed.replaced(times=None).columns) == ["indices"]


def test_names_of_arrow():
    leaves = {"names": pa.array(["a", "b", "c"]), "numbers": np.arange(3)}
    for at in (slice(1, 3), np.array([False, True, True]), np.array([1, 2])):
        found = taken(leaves, at)
        assert found["names"].to_pylist() == ["b", "c"]
        assert found["numbers"].tolist() == [1, 2]
    both = joined([leaves, {"names": pa.array([], pa.string())}, leaves])
    assert both["names"].to_pylist() == ["a", "b", "c"] * 2
    assert both["numbers"].tolist() == [0, 1, 2] * 2


def test_more_entries_than_int32_has_numbers():
    entries = Entries(np.array([0, 2**31 + 3]), {"indices": np.empty(0, np.int32)})
    with pytest.raises(ValueError, match="does not fit in int32"):
        entries.csr(3)
