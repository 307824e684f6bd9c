"""Splits by time, compared with pandas and plain Python."""

import dataclasses
import datetime
import itertools
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparsejax as sj
from sparsejax.data import SparseDataset, Split, from_arrow
from sparsejax.data.files.names import as_names
from sparsejax.data.sets.split import as_time, heldout_last, time_of_share
from sparsejax.sparse import CSR

DTYPES = ("int64", "float64", "datetime64[us]")


@st.composite
def events(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(indptr, times, order)` of rows with many ties; rows may be empty."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=12))
    indptr = np.append(0, np.cumsum(lengths, dtype=np.int64))
    count = int(indptr[-1])
    at = st.integers(-(2**53), 2**53) if draw(st.booleans()) else st.integers(0, 3)
    times = np.array(draw(st.lists(at, min_size=count, max_size=count)), np.int64)
    order = np.array(draw(st.permutations(range(count))), np.int64)
    return indptr, times.astype(draw(st.sampled_from(DTYPES))), order


@given(events(), st.integers(1, 6))
def test_the_last_of_each_row(drawn, n):
    indptr, times, order = drawn
    is_held = heldout_last(indptr, times, order, n)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    frame = pd.DataFrame({"row": rows, "time": times, "order": order})
    held = []
    for _, part in frame.groupby("row"):
        latest = part.sort_values(["time", "order"])
        held += latest.index[1:][-n:].tolist()  # the first always stays
    assert np.flatnonzero(is_held).tolist() == sorted(held)


@given(events(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_last_of_a_row_in_any_order(drawn, n, random):
    """Where the entries of a row stand does not matter, nor what other rows hold."""
    indptr, times, order = drawn
    is_held = heldout_last(indptr, times, order, n)
    for start, end in itertools.pairwise(indptr):
        moved = np.arange(start, end)
        random.shuffle(moved)
        alone = heldout_last(np.array([0, end - start]), times[moved], order[moved], n)
        np.testing.assert_array_equal(alone, is_held[moved])


def test_the_last_none():
    nothing = np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        heldout_last(np.array([0]), nothing, nothing, 0)


@given(st.lists(st.integers(0, 6), min_size=2), st.floats(0.001, 0.999))
def test_time_of_share(times, fraction):
    if len(set(times)) < 2:
        times += [9]
    if len(set(times)) < 2:
        times += [8]
    found = time_of_share(np.array(times), fraction)
    wrong = {
        time: abs(sum(t < time for t in times) - fraction * len(times))
        for time in sorted(set(times))[1:]
    }
    assert found == min(wrong, key=wrong.__getitem__)


DATES = np.array(["2024-01-30", "2024-02-02"], "datetime64[us]")


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2024-01-31", "2024-01-31"),
        ("20240131", "2024-01-31"),
        ("2024-01-31 12:00", "2024-01-31T12:00"),
        ("2024-01-31T12:00:00.000001Z", "2024-01-31T12:00:00.000001"),
        ("2024-01-31T01:00+02:00", "2024-01-30T23:00"),
        (datetime.date(2024, 1, 31), "2024-01-31"),
        (datetime.datetime(2024, 1, 31, 5), "2024-01-31T05"),
        (pd.Timestamp("2024-01-31 01:00", tz="Europe/Berlin"), "2024-01-31"),
        (np.datetime64("2024-01"), "2024-01-01"),
        (np.datetime64("2024-01-31", "ns"), "2024-01-31"),
        # There is no time between: at or after it is at or after the next microsecond.
        (np.datetime64("2024-01-31T00:00:00.000000001"), "2024-01-31T00:00:00.000001"),
    ],
)
def test_as_time_of_dates(time, expected):
    found = as_time(time, DATES)
    assert found == np.datetime64(expected)
    assert np.asarray(found).dtype == "datetime64[us]"


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_as_time_of_numbers(dtype):
    times = np.array([-3, 0, 2**53 - 1, 2**53, 2**53 + 2, 2**62], dtype)
    cuts = [-3, -2.5, 0, np.int8(1), np.float32(1e-9), 2**53, 2.0**62, 2**70]
    if dtype == "int64":
        cuts += [2**53 + 1, 2**62 - 1]  # which float64 does not hold
    for time in cuts:
        held = times >= as_time(time, times)
        assert held.tolist() == [t >= time for t in times.tolist()], time
    assert not (times >= as_time(np.inf, times)).any()


@pytest.mark.parametrize(
    ("time", "times", "message"),
    [
        ("soon", DATES, "expected a time like '2024-01-31' or .*, got 'soon'"),
        (17, DATES, "times are dates, from 2024-01-30.* to 2024-02-02.*got 17"),
        ("2024-01-31", np.array([5, 7]), "numbers, from 5 to 7.*got '2024-01-31'"),
        (datetime.date(2024, 1, 31), np.array([5.5]), "from 5.5 to 5.5.*a number"),
        (float("nan"), np.array([5]), "the time is nan"),
        (True, np.array([5]), "the time is True"),
        (np.datetime64("NaT", "us"), DATES, "the time is NaT"),
        (pd.NaT, DATES, "the time is NaT"),
    ],
)
def test_as_time_refuses(time, times, message):
    with pytest.raises(ValueError, match=message):
        as_time(time, times)


@st.composite
def datasets(draw) -> SparseDataset:
    """Rows of several lengths, with ties in their times."""
    indptr, times, order = draw(events())
    lengths = np.diff(indptr)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = [np.sort(rng.permutation(9)[:n]) for n in lengths]
    indices = np.concatenate([np.empty(0, np.int32), *columns]).astype(np.int32)
    values = None
    if draw(st.booleans()):
        values = np.arange(len(indices), dtype=np.float32)
    matrix = CSR(values, indices, indptr.astype(np.int32), num_cols=9)
    names = as_names(range(len(lengths))), as_names(list("abcdefghi"))
    return SparseDataset(matrix, *names, times=times, order=order)


def entries(dataset: SparseDataset) -> list[tuple]:
    """`(row, feature, value, time, order)` of each entry, as the data set has them."""
    matrix = dataset.matrix
    rows = dataset.row_names.repeat(np.diff(matrix.indptr)).tolist()
    values = [1] * len(rows) if matrix.data is None else matrix.data.tolist()
    assert dataset.times is not None and dataset.order is not None
    return list(
        zip(
            rows,
            dataset.feature_names[matrix.indices].tolist(),
            values,
            dataset.times.tolist(),
            dataset.order.tolist(),
            strict=True,
        )
    )


@given(datasets(), st.integers(1, 3), st.integers(-1, 4), st.floats(0.01, 0.99))
def test_every_entry_is_in_one_part(dataset, n, cut, fraction):
    time = cut if dataset.times.dtype.kind != "M" else np.datetime64(cut, "us")
    whole = entries(dataset)
    for split in (
        lambda: dataset.split(fraction, seed=n),
        lambda: dataset.split_rows(fraction, seed=n),
        lambda: dataset.split_last(n),
        lambda: dataset.split_at(time),
        lambda: dataset.split_at(fraction=fraction),
    ):
        try:
            parts = split()
        except ValueError as error:
            assert re.search("thing is held out|have the same time", str(error))
            continue
        train, heldout = map(entries, parts)
        assert sorted(train + heldout) == sorted(whole)
        assert parts.heldout.num_rows and len(train) + len(heldout) == len(whole)
        for part in parts:
            assert part.feature_names.tolist() == dataset.feature_names.tolist()
            assert (part.matrix.data is None) == (dataset.matrix.data is None)
        in_train = {feature for _, feature, *_ in train}
        assert parts.new_features == len({e[1] for e in heldout} - in_train)
        assert parts.new_rows == len({e[0] for e in heldout} - {e[0] for e in train})


def events_of(times: list, rows: str = "aabbc") -> SparseDataset:
    """Events: row a has two entries, b two and c one, all of different features."""
    starts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1]), len(rows)]
    count = len(rows)
    matrix = CSR(
        None, np.arange(count, dtype=np.int32), np.array(starts, np.int32), num_cols=9
    )
    return SparseDataset(
        matrix,
        as_names(sorted(set(rows))),
        as_names(range(9)),
        times=np.array(times),
        order=np.arange(count),
    )


def held(split: Split) -> list[int]:
    return split.heldout.matrix.indices.tolist()


def test_split_last():
    data = events_of([5, 3, 1, 2, 9])
    assert held(data.split_last()) == held(data.split_last(4)) == [0, 3]
    data = events_of([5, 3, 1, 2, 9], "aaabb")
    assert held(data.split_last(2)) == [0, 1, 4]
    # Where the times are the same, the later in the file.
    data = dataclasses.replace(events_of([1] * 5), order=np.array([9, 4, 0, 7, 1]))
    assert held(data.split_last()) == [0, 3]
    with pytest.raises(ValueError, match="nothing is held out: no row has more than"):
        events_of([1, 2, 3], "abc").split_last()
    with pytest.raises(ValueError, match="n must be 1 or more"):
        data.split_last(0)


def test_split_at():
    data = events_of([5, 3, 1, 2, 9])
    split = data.split_at(3)
    assert held(split) == [0, 1, 4]
    assert str(split) == (
        "held out 3 of 5 entries (60.0%), in 2 rows; new rows: 2, new features: 3"
    )
    assert held(data.split_at(3.5)) == held(data.split_at(fraction=0.6)) == [0, 4]
    with pytest.raises(ValueError, match="nothing is held out: .*from 1 to 9.*is 10"):
        data.split_at(10)
    with pytest.raises(ValueError, match="everything is held out.*from 1 to 9.*is 0"):
        data.split_at(0)
    with pytest.raises(ValueError, match="all entries have the same time: 4"):
        events_of([4] * 5).split_at(fraction=0.5)
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\)"):
        data.split_at(fraction=1)
    with pytest.raises(ValueError, match="a time or a fraction"):
        data.split_at()
    with pytest.raises(ValueError, match="a time or a fraction"):
        data.split_at(3, fraction=0.5)
    with pytest.raises(ValueError, match="the times are numbers"):
        data.split_at("2024-01-31")
    with pytest.raises(ValueError, match="there are no entries"):
        data.align_rows([]).split_at(1)


def test_split_at_dates():
    dates = [
        "2024-01-31",
        "2024-02-01",
        "2023-12-31T23:59:59",
        "2024-01-01",
        "2024-01-02",
    ]
    data = events_of(list(np.array(dates, "datetime64[us]")))
    assert held(data.split_at("2024-01-31")) == [0, 1]
    assert held(data.split_at(datetime.date(2024, 1, 1))) == [0, 1, 3, 4]
    cut = datetime.datetime(
        2024, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
    )
    assert held(data.split_at(cut)) == [0, 1, 3, 4]
    with pytest.raises(ValueError, match="cut is 2025"):
        data.split_at("2025-01-01")


def test_splits_by_time_need_times():
    data = dataclasses.replace(events_of([1] * 5), times=None, order=None)
    for split in (data.split_last, lambda: data.split_at(1)):
        with pytest.raises(ValueError, match="no times; read it with time=COLUMN"):
            split()


REPEATS = {
    "user": ["ann", "ann", "ann", "bob", "bob"],
    "item": ["tea", "rye", "tea", "rye", "tea"],
    "time": [1, 2, 9, 3, 8],
}
REPEATED = "1 of 2 held-out entries also have earlier events, which are in neither part"


def test_repeats_across_a_cut_are_counted(tmp_path):
    data = from_arrow(pa.table(REPEATS))
    assert data.first_times is not None and data.first_times.min() == 1
    data.save(tmp_path / "saved")
    sequences = sj.read_sequences(pa.table(REPEATS))
    # However the set was made, and whatever was done to it.
    other = data.align_features(["tea", "rye", "fig"]).align_rows(["bob", "ann"])
    sets = [data, SparseDataset.load(tmp_path / "saved"), sequences.to_sparse(), other]
    parts = [
        from_arrow(pa.table(REPEATS)[rows], features=["rye", "tea"])
        for rows in (slice(0, 2), slice(2, 5))
    ]
    sets.append(parts[0].merge(parts[1]))
    for each in sets:
        assert each.split_at(5).repeats == 1
        assert each.split_at(5)._replace(train=each).repeats == 0
        with pytest.warns(UserWarning, match=REPEATED):
            each.split_last()
        each.split_rows(0.5, seed=0)  # nothing to warn of
        # All that was known at the cut is in train.
        assert each.split_at(5).train.num_entries == 3
        assert each.split_at(5, repeats="all").heldout.num_entries == 2


def test_repeats_on_one_side_are_no_matter():
    table = pa.table({"user": ["a"] * 4, "item": [*"xxyy"], "time": [1, 2, 8, 9]})
    data = from_arrow(table)
    assert data.first_times is not None
    data.split_at(5)  # and no warning
    assert from_arrow(table[1:3]).first_times is None
    assert from_arrow(table, time=None).first_times is None
    with pytest.raises(ValueError, match="first_times must have a time for each entry"):
        dataclasses.replace(data, first_times=np.array([99, 99]))
