"""Histories in order, compared with plain Python."""

import dataclasses
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

import sparsejax as sj
from sparsejax.data.files.names import as_names

ROWS = [
    ("ann", "tea", 5),
    ("bob", "rye", 2),
    ("ann", "rye", 1),
    ("ann", "tea", 3),
    ("eve", "fig", 9),
    ("ann", "fig", 3),  # as early as the tea before it
    ("bob", "rye", 1),
]
FRAME = pd.DataFrame(ROWS, columns=["user", "item", "time"])
WANTED = {"ann": ["rye", "tea", "fig", "tea"], "bob": ["rye", "rye"], "eve": ["fig"]}


def named(data) -> dict[str, list[str]]:
    return {
        name: data.feature_names[data.indices[start:stop]].tolist()
        for name, start, stop in zip(
            data.row_names, data.indptr[:-1], data.indptr[1:], strict=True
        )
    }


def times_of(data: sj.SequenceDataset | sj.data.Histories) -> np.ndarray:
    assert data.times is not None
    return data.times


def same(found, wanted):
    for name in ("indptr", "indices", "row_names", "feature_names"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    for name in ("times", "left_out"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


@pytest.mark.parametrize("form", ["csv", "parquet", "frame", "lists", "dates"])
def test_events_in_order(tmp_path, form):
    source, frame = tmp_path / f"data.{form}", FRAME
    if form == "csv":
        frame.to_csv(source, index=False)
    elif form == "parquet":
        frame.to_parquet(source)
    elif form == "dates":
        source = frame.assign(time=pd.to_datetime(frame["time"], unit="D"))
    elif form == "lists":
        source = frame.groupby("user", sort=False).agg(list).reset_index()
    else:
        source = frame
    data = sj.read_sequences(source)
    assert named(data) == WANTED
    times = times_of(data)
    if form == "dates":
        times = times.astype("M8[D]").astype(int)
    assert times.tolist() == [1, 3, 3, 5, 1, 2, 9]
    # The numbers of the items are those of `read`.
    other = sj.data.from_arrow(FRAME, time="time", indicator=True)
    np.testing.assert_array_equal(data.feature_names, other.feature_names)
    np.testing.assert_array_equal(data.padded(2)[2], [data.indices[-1], -1])


def test_without_times_the_file_has_the_order(tmp_path):
    (tmp_path / "rows.txt").write_text("ann tea rye tea\nbob\nann fig\n")
    data = sj.read_sequences(tmp_path / "rows.txt")
    assert named(data) == {"ann": ["tea", "rye", "tea", "fig"], "bob": []}
    assert data.times is None and data.to_sparse().times is None
    with pytest.raises(ValueError, match="no times; read it with time=COLUMN"):
        data.split_at(3)
    with pytest.raises(ValueError, match="no times, so the order is not known"):
        sj.SequenceDataset.from_sparse(data.to_sparse())


def test_to_and_from_sparse(tmp_path):
    data = sj.read_sequences(FRAME)
    sparse, wanted = (
        data.to_sparse(),
        sj.data.from_arrow(FRAME, time="time", indicator=True),
    )
    for name in ("row_names", "feature_names", "times"):
        np.testing.assert_array_equal(getattr(sparse, name), getattr(wanted, name))
    np.testing.assert_array_equal(
        sparse.to_scipy().toarray(), wanted.to_scipy().toarray()
    )
    back = sj.SequenceDataset.from_sparse(wanted)
    same(back, sj.SequenceDataset.from_sparse(sparse))
    assert named(back) == {"ann": ["rye", "fig", "tea"], "bob": ["rye"], "eve": ["fig"]}
    wanted.save(tmp_path / "sparse")
    same(sj.read_sequences(tmp_path / "sparse"), back)


@pytest.mark.parametrize("times", [True, False])
def test_saved_and_scanned(tmp_path, times):
    frame = FRAME if times else FRAME.drop(columns="time")
    known = sj.read_sequences(frame).feature_names[:2]
    with pytest.warns(sj.data.UnknownFeaturesWarning, match="entries are left out"):
        data = sj.read_sequences(frame, features=known)
    assert data.left_out is not None
    data.save(tmp_path / "data")
    same(sj.SequenceDataset.load(tmp_path / "data"), data)
    same(sj.read_sequences(tmp_path / "data"), data)
    part = sj.data.scan_sequences(tmp_path / "data").read(1, 3)
    np.testing.assert_array_equal(part.padded(9), data.padded(9)[1:3])
    if times:
        np.testing.assert_array_equal(part.times, times_of(data)[data.indptr[1] :])
    for read in (sj.read, sj.data.scan_parquet, sj.SparseDataset.load):
        with pytest.raises(sj.DataError, match="holds saved sequences"):
            read(tmp_path / "data")
    (tmp_path / "folder").mkdir()
    data.save(tmp_path / "folder" / "a.parquet")
    other = None if times else np.arange(data.num_entries)
    dataclasses.replace(data, times=other).save(tmp_path / "folder" / "b.parquet")
    with pytest.raises(sj.DataError, match="b.parquet: has times of another kind than"):
        sj.data.scan_sequences(tmp_path / "folder")
    data.to_sparse().save(tmp_path / "sparse")
    with pytest.raises(sj.DataError, match="holds no saved sequences"):
        sj.SequenceDataset.load(tmp_path / "sparse")
    with pytest.raises(sj.DataError, match="not in the order of time"):
        sj.data.scan_sequences(tmp_path / "sparse")


@pytest.mark.parametrize("form", ["pairs", "lists"])
def test_scanned_tables(tmp_path, form):
    frame = FRAME.sort_values("user", kind="stable")
    if form == "lists":
        frame = frame.groupby("user").agg(list).reset_index()
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=2)
    scanned = sj.data.scan_sequences(tmp_path / "t.parquet")
    found = scanned.read(0, 3)
    names = [scanned.feature_names[row[row >= 0]].tolist() for row in found.padded(4)]
    assert names == list(WANTED.values())
    assert times_of(found).tolist() == [1, 3, 3, 5, 1, 2, 9]
    np.testing.assert_array_equal(scanned.read(1, 2).padded(4), found.padded(4)[1:2])
    few = sj.data.scan_sequences(tmp_path / "t.parquet", features=["tea"])
    with pytest.warns(sj.data.UnknownFeaturesWarning):
        assert few.read(0, 3).indptr.tolist() == [0, 2, 2, 2]


def test_splits():
    data = sj.read_sequences(FRAME)
    train, heldout = data.split_last(3)
    assert named(train) == {"ann": ["rye"], "bob": ["rye"], "eve": ["fig"]}
    assert named(heldout) == {"ann": ["tea", "fig", "tea"], "bob": ["rye"], "eve": []}
    split = data.split_at(3)
    assert named(split.train) == {"ann": ["rye"], "bob": ["rye", "rye"], "eve": []}
    assert times_of(split.heldout).tolist() == [3, 3, 5, 9]
    assert str(split) == (
        "held out 4 of 7 entries (57.1%), in 2 rows; new rows: 1, new features: 2"
    )
    assert data.split_at(fraction=0.5).train.num_entries == 3
    train, heldout = data.split_rows(0.7, seed=0)
    assert named(train) | named(heldout) == WANTED
    sparse = data.to_sparse().split_rows(0.7, seed=0).heldout
    assert heldout.row_names.tolist() == sparse.row_names.tolist()
    train, heldout = data.split_items(0.5, seed=0)
    sparse = data.to_sparse().split_items(0.5, seed=0).heldout
    held = np.unique(sparse.matrix.indices).tolist()
    assert 0 < len(held) == np.unique(heldout.indices).size
    assert heldout.indices.tolist() == [i for i in data.indices if i in held]
    assert train.indices.tolist() == [i for i in data.indices if i not in held]
    # Repeats of one item fall on both sides.
    many = pd.DataFrame({"user": ["ann"] * 40, "item": ["tea"] * 40, "time": range(40)})
    train, heldout = sj.read_sequences(many).split(0.5, seed=1)
    assert sorted([*times_of(train), *times_of(heldout)]) == list(range(40))
    assert 0 < np.sum(times_of(heldout) < 20) < 20
    # Without repeats it is the split of the sparse data set.
    once = sj.SequenceDataset.from_sparse(data.to_sparse())
    found = once.split(0.5, seed=3).train.to_sparse().to_scipy()
    wanted = data.to_sparse().split(0.5, seed=3).train.to_scipy()
    np.testing.assert_array_equal(found.toarray(), wanted.toarray())


def test_nothing_is_left():
    data = sj.read_sequences(FRAME)
    with pytest.raises(ValueError, match="everything is held out"):
        data.split_at(0)
    with pytest.raises(ValueError, match="nothing is held out: the times are from 1"):
        data.split_at(10)
    with pytest.raises(ValueError, match="expected a number, got '2024-01-01'"):
        data.split_at("2024-01-01")
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        data.split_last(0)
    alone = sj.read_sequences(FRAME.drop_duplicates("user"))
    with pytest.raises(ValueError, match="no row has more than one entry"):
        alone.split_last()
    with pytest.raises(ValueError, match="the longest row has 1 entries"):
        alone.split(0.5, seed=0)
    with pytest.raises(ValueError, match="length must be 1 or more, got 0"):
        alone.padded(0)
    with pytest.raises(sj.DataError, match="vocabulary lacks"):
        sj.read_sequences(FRAME, features=["other"])


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        ("1,2,,4", "4: an event has no time but earlier events have one"),
        ("1,2,2024-01-01,4", "4: time .* is a date, but an earlier time is a number"),
        ("1,2,nan,4", "4: time .nan. is neither a finite number nor a date"),
    ],
)
def test_times_that_are_missing_or_mixed(tmp_path, times, problem):
    lines = [f"ann,tea,{time}\n" for time in times.split(",")]
    (tmp_path / "data.csv").write_text("user,item,time\n" + "".join(lines))
    with pytest.raises(sj.DataError, match=problem):
        sj.read_sequences(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"indices": [0, 2]}, "entry 1 is feature 2, but there are 2 features"),
        ({"indices": [0.0, 1.0]}, "indices must be integers"),
        ({"indptr": [0, 1]}, "one number more than there are row names"),
        ({"indptr": [0, 3, 2]}, "indptr must rise from 0 to the 2 entries"),
        ({"times": np.array([1])}, "2 entries, but times has the shape (1,)"),
        ({"times": np.array([2, 1])}, "row 1 has the time 1 after 2"),
        ({"times": np.array([1.0, np.inf])}, "entry 1 has no finite time"),
        ({"left_out": [1]}, "left_out must be a count for each of the 2 rows"),
        ({"row_names": as_names(["a", "a"])}, "row names must be unique"),
    ],
)
def test_what_is_no_data_set(changed, problem):
    given = {
        "indptr": [0, 0, 2],
        "indices": [1, 1],
        "row_names": as_names(["a", "b"]),
        "feature_names": as_names(["x", "y"]),
    }
    parts: dict[str, Any] = {name: np.asarray(part) for name, part in given.items()}
    changed = {name: np.asarray(part) for name, part in changed.items()}
    sj.SequenceDataset(**parts)
    with pytest.raises(ValueError, match=re.escape(problem)):
        sj.SequenceDataset(**{**parts, **changed})  # pyrefly: ignore


def test_rows_of_names():
    """Histories that are not there are empty, and what was left out goes with its row."""
    data = sj.SequenceDataset(
        np.array([0, 2, 3]),
        np.array([1, 0, 1]),
        np.array(["ann", "bob"]),
        np.array(["tea", "rye"]),
        left_out=np.array([0, 4]),
    )
    found = data.align_rows(["bob", "new", "ann"], missing="empty")
    assert found.row_names.tolist() == ["bob", "new", "ann"]
    assert found.indptr.tolist() == [0, 1, 1, 3]
    assert found.indices.tolist() == [1, 1, 0]
    assert found.left_out is not None and found.left_out.tolist() == [4, 0, 0]
    with pytest.raises(ValueError, match="1 of 2 rows are not in the data set: 'new'"):
        data.align_rows(["bob", "new"])
