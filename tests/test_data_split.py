"""What is held out by time, against pandas and plain Python."""

import datetime
import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data.split import as_time, heldout_last, time_of_share

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
        ("soon", DATES, "expected a time as '2024-01-31' or .*, got 'soon'"),
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
