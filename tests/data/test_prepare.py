"""Data sets that DuckDB prepares as folders."""

import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from event_tables import entries, expected, frequent, repeats, tables
from hypothesis import given

import sparsejax as sj
from sparsejax.data.prepared import preparation
from sparsejax.data.prepared.folder import Part

pytest.importorskip("duckdb")


@pytest.mark.filterwarnings("ignore::sparsejax.data.UnknownFeaturesWarning")
@pytest.mark.parametrize(
    "kind", ["whole", "fraction", "last", "new", "all", "features"]
)
# Of many small tables nothing is left or held out.
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
