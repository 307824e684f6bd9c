"""Data sets that DuckDB prepares as folders."""

import pathlib
import tempfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from event_tables import entries, expected, frequent, repeats, tables
from hypothesis import given

import sparsejax as sj
from sparsejax.data import DenseColumn, HashedColumn, VocabularyColumn
from sparsejax.data.prepared import folder_files, preparation
from sparsejax.data.prepared.folder import Part

pytest.importorskip("duckdb")


@pytest.mark.filterwarnings("ignore::sparsejax.data.UnknownFeaturesWarning")
@pytest.mark.parametrize(
    "kind", ["whole", "fraction", "last", "new", "all", "features"]
)
# Many of the small tables are rejected, because nothing is left or held out.
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.filter_too_much])
@given(
    table=tables(),
    least=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    indicator=st.booleans(),
)
def test_the_same_as_read(kind, table, least, indicator):
    kept = frequent(table, *least)
    hypothesis.assume(kept["user"])
    try:
        with repeats() as warned:
            options, train, heldout, left_out = expected(
                kept, kind, indicator=indicator
            )
    except ValueError:  # nothing or everything is held out or unknown
        hypothesis.assume(False)
        raise
    options |= {"min_user": least[0], "min_item": least[1], "indicator": indicator}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        with repeats() as told:
            manifest = sj.prepare(pa.table(table), out, **options)
        assert told == warned and manifest.repeats == left_out
        found: dict[Part, sj.SparseDataset] = {"train": sj.read(out)}
        if heldout is not None:
            found["test"] = sj.read(out / "test")
        scanned = sj.data.scan_parquet(out)
        rows = scanned.read(0, scanned.num_rows)
    for (part, data), given_ in zip(found.items(), (train, heldout), strict=False):
        assert entries(data) == entries(given_)
        assert data.feature_names.tolist() == given_.feature_names.tolist()
        assert (data.matrix.data is None) == (given_.matrix.data is None) == indicator
        assert manifest.num_rows(part) == data.num_rows
        assert manifest.num_entries(part) == data.num_entries
        if given_.left_out is None:
            assert data.left_out is None and part not in manifest.left_out
        else:
            unknown = given_.align_rows(data.row_names).left_out
            np.testing.assert_array_equal(data.left_out, unknown)
            assert manifest.left_out[part] == given_.left_out.sum()
    np.testing.assert_array_equal(rows.indices, found["train"].matrix.indices)
    np.testing.assert_array_equal(rows.indptr, found["train"].matrix.indptr)


@pytest.mark.parametrize(
    "columns",
    [
        {"user": ["1.0", "2.0", "2.0"], "item": ["x", "2.5", "7.0"]},
        {"user": ["a", "2.0", "a"], "item": ["3.0", "4.0", "4.0"], "time": [2, 1, 3]},
        {"user": ["a", "b", "a"], "item": [1, 1, 2], "rating": [None] * 3},
        {"user": ["a", "b"], "item": [[1, 2], [1]], "rating": [[None] * 2, [None]]},
    ],
)
def test_names_like_floats_and_values_that_are_null(columns, tmp_path):
    table = pa.table(columns)
    manifest = sj.prepare(table, tmp_path / "out", split_fraction=0.5)
    train, heldout = sj.data.from_arrow(table).split(0.5, seed=0)
    assert entries(sj.read(tmp_path / "out")) == entries(train)
    assert entries(sj.read(tmp_path / "out" / "test")) == entries(heldout)
    assert manifest.indicator


def test_values_after_nulls(tmp_path):
    values = pa.chunked_array([pa.array([None], pa.float64()), [2.0]])
    wrong = {"user": ["a", "b"], "item": ["x", "y"], "value": values}
    with pytest.raises(sj.DataError, match="row 1: an entry has a value but earlier"):
        sj.prepare(pa.table(wrong), tmp_path / "out")


@pytest.mark.parametrize(("time", "problem"), [(1, "nothing"), (-1, "everything")])
def test_a_split_at_an_infinite_time(time, problem, tmp_path):
    table = pa.table({"user": ["a", "a"], "item": ["x", "y"], "time": [1.5, 2.5]})
    with pytest.raises(sj.DataError, match=f"{problem} is held out"):
        sj.prepare(table, tmp_path / "out", split_time=time * float("inf"))


@pytest.mark.parametrize("duplicates", ["add", "last", "max"])
def test_more_events_than_the_engine_can_group_at_once(
    duplicates, tmp_path, monkeypatch
):
    rng = np.random.default_rng(0)
    names = [f"user {each}" for each in rng.integers(0, 40, 600)]
    columns = {"user": names, "item": rng.integers(0, 9, 600).astype(str)}
    columns |= {"value": rng.integers(1, 99, 600) / 4, "time": rng.permutation(600)}
    parts = [pa.table(columns).slice(start, 100) for start in range(0, 600, 100)]
    found, told = {}, []
    # Each part of the table exceeds what 1 GB would allow for events of so many bytes.
    for size in (preparation.BYTES_PER_EVENT, 2**40):
        monkeypatch.setattr(preparation, "BYTES_PER_EVENT", size)
        with repeats() as warned:
            found[size] = sj.prepare(
                pa.concat_tables(parts),
                tmp_path / str(size),
                duplicates=duplicates,
                value="value",
                split_last=1,
                memory="1GB",
            )
        told.append(warned)
    one, several = found.values()
    assert told[0] == told[1] and told[0]
    assert one == several and one.num_entries("train") > 200
    for part in ("", "test"):
        whole, grouped = (sj.read(tmp_path / str(size) / part) for size in found)
        assert entries(whole) == entries(grouped)
        assert whole.row_names.tolist() == grouped.row_names.tolist()
    assert not list(tmp_path.glob(".sparsejax*"))


EVENTS = sj.EventSchema(
    kind="action",
    dense={"price": DenseColumn(missing=-1.0)},
    ids={"tags": VocabularyColumn(), "shop": HashedColumn(5)},
)


def of_events(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    """Events in random order, with equal times, repeats, missing cells and lists."""
    rng = np.random.default_rng(seed)
    tags: Any = [
        [f"t{t}" for t in rng.integers(5, size=n)] for n in rng.integers(0, 4, rows)
    ]
    tags[3] = None
    columns: Any = {
        "user": rng.integers(0, 30, rows),
        "item": [f"i{i}" for i in rng.integers(0, 12, rows) ** 2 // 11],
        "time": np.datetime64("2024-01-01", "us") + rng.integers(0, 60, rows),
        "action": rng.choice(np.array(["view", "buy", None], object), rows),
        "price": np.where(rng.random(rows) < 0.2, np.nan, rng.random(rows)),
        "tags": tags,
        "shop": rng.integers(0, 9, rows),
    }
    return pd.DataFrame(columns)


def check_histories(found: Any, wanted: Any) -> None:
    """Checks that both data sets have bitwise equal rows, in any order."""
    wanted = wanted.align_rows(found.row_names)
    for name in ("indptr", "indices", "times"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert found.feature_names.tolist() == wanted.feature_names.tolist()
    found.events.check_like(wanted.events, "the data")
    for name, column in wanted.events.columns.items():
        np.testing.assert_array_equal(found.events[name], column)


def test_histories_are_those_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_files, "GROUP_ENTRIES", 50)
    table = of_events()
    table.to_parquet(tmp_path / "t.parquet", row_group_size=70)
    wanted: Any = sj.read_sequences(table, events=EVENTS)
    for n, source in enumerate((table, tmp_path / "t.parquet")):
        out = tmp_path / f"out{n}"
        manifest = sj.prepare(source, out, histories=True, schema=EVENTS)
        assert manifest.num_entries() == 400 and manifest.num_rows() == 30
        found: Any = sj.read_sequences(out)
        check_histories(found, wanted)
        scanned: Any = sj.data.scan_sequences(out, chunk_rows=3)
        assert len(scanned.groups) > 5
        part = scanned.read(3, 17)
        entries = slice(*found.indptr[[3, 17]])
        np.testing.assert_array_equal(part.indices, found.indices[entries])
        np.testing.assert_array_equal(
            part.events["tags"], found.events["tags"][entries]
        )
        assert scanned.events.lists == wanted.events.lists
        again = sj.prepare(source, out, histories=True, schema=EVENTS)
        assert again.id == manifest.id and again.events == manifest.events
    # Later data by the categories and the items of these.
    sj.prepare(
        of_events(90, seed=5).assign(action="new"),
        tmp_path / "later",
        histories=True,
        schema=EVENTS,
        features=wanted,
    )
    later: Any = sj.read_sequences(tmp_path / "later", events=wanted.events)
    assert set(later.events["action"].tolist()) == {1}
    assert later.feature_names.tolist() == wanted.feature_names.tolist()


def test_histories_are_split_as_in_memory(tmp_path):
    wanted: Any = sj.read_sequences(of_events(), events=EVENTS)
    for how, parts in (
        ({"split_last": 2}, wanted.split_last(2)),
        (
            {"split_time": "2024-01-01T00:00:00.000040"},
            wanted.split_at("2024-01-01T00:00:00.000040"),
        ),
        (
            {"split_time": "2024-01-01T00:00:00.000040", "repeats": "all"},
            wanted.split_at("2024-01-01T00:00:00.000040", repeats="all"),
        ),
    ):
        out = tmp_path / "-".join(how)
        options: Any = how
        manifest = sj.prepare(
            of_events(), out, histories=True, schema=EVENTS, features=wanted, **options
        )
        assert manifest.repeats == parts.repeats
        for name, part in zip(("train", "test"), parts, strict=True):
            found: Any = sj.read_sequences(out / name)
            assert found.num_entries == part.num_entries
            check_histories(found, part)


def test_a_user_counts_once_for_an_item_that_comes_again(tmp_path):
    pairs = [("a", "x"), ("a", "x"), ("a", "y"), ("b", "y"), ("b", "z"), ("b", "z")]
    table = pd.DataFrame(pairs, columns=["user", "item"])
    sj.prepare(table, tmp_path / "out", histories=True, min_item=2)
    found = sj.read_sequences(tmp_path / "out")
    assert found.feature_names.tolist() == ["y"] and found.num_entries == 2


def test_histories_that_cannot_be_prepared(tmp_path):
    table = of_events(40)
    with pytest.raises(ValueError, match="schema"):
        sj.prepare(table, tmp_path / "out", schema=EVENTS)
    with pytest.raises(sj.DataError, match="there is no column 'shop'"):
        sj.prepare(
            table.drop(columns="shop"), tmp_path / "out", histories=True, schema=EVENTS
        )
    for option in ({"split_fraction": 0.5}, {"duplicates": "last"}, {"value": "price"}):
        given: Any = option
        with pytest.raises(ValueError, match=f"{next(iter(option))}.*histories"):
            sj.prepare(table, tmp_path / "out", histories=True, **given)
    sj.prepare(table, tmp_path / "items")
    sj.prepare(table, tmp_path / "out", histories=True)
    for read in (sj.read, sj.data.scan_parquet):
        with pytest.raises(
            sj.DataError, match="holds prepared histories: read it with"
        ):
            read(tmp_path / "out")
    for read in (sj.read_sequences, sj.data.scan_sequences):
        with pytest.raises(
            sj.DataError, match="prepare the events with histories=True"
        ):
            read(tmp_path / "items")
    with pytest.raises(FileExistsError, match="prepared with other settings"):
        sj.prepare(table, tmp_path / "out", histories=True, schema=EVENTS)
