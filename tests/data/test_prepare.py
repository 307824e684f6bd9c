"""Data sets that DuckDB prepares as folders."""

import collections
import dataclasses
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from contents import Contents, contents
from hypothesis import given

import sparsejax as sj
from sparsejax.data.folder import Part

pytest.importorskip("duckdb")


def entries(data: sj.SparseDataset) -> Contents:
    """The values by row and item, of rows that have entries."""
    return {row: found for row, found in contents(data).items() if found}


def frequent(table, min_user, min_item):
    """The rows of a table whose users and items are frequent, one by one."""
    pairs = set(zip(table["user"], table["item"], strict=True))
    while True:
        users = collections.Counter(user for user, _ in pairs)
        items = collections.Counter(item for _, item in pairs)
        kept = {
            (u, i) for u, i in pairs if users[u] >= min_user and items[i] >= min_item
        }
        if kept == pairs:
            break
        pairs = kept
    at = [n for n, p in enumerate(zip(*table.values(), strict=True)) if p[:2] in pairs]
    return {name: [column[n] for n in at] for name, column in table.items()}


# Two names of each kind differ in few code points; among integers ties are many.
texts = st.text(
    st.one_of(st.sampled_from("aé\U0001f600 ,:\t"), st.characters(codec="utf-8")),
    min_size=1,
    max_size=4,
).filter(lambda name: "\0" not in name)
names = st.one_of(
    st.lists(texts, min_size=1, max_size=8, unique=True),
    st.lists(st.integers(-30, 200), min_size=1, max_size=8, unique=True),
)


@st.composite
def tables(draw):
    """Events, with values that add up without rounding."""
    users, items = draw(names), draw(names)
    events = draw(
        st.lists(
            st.tuples(
                st.sampled_from(users),
                st.sampled_from(items),
                st.integers(-20, 20).map(lambda n: n / 8),
                st.integers(0, 5),
            ),
            min_size=1,
            max_size=60,
        )
    )
    columns = zip(*events, strict=True)
    return dict(zip(("user", "item", "value", "time"), map(list, columns), strict=True))


def expected(whole: sj.SparseDataset, kind: str):
    """The options of a kind of preparation, and the parts that it should make."""
    match kind:
        case "fraction":
            return {"split_fraction": 0.5, "seed": 3}, *whole.split(0.5, seed=3)
        case "last":
            # Of equal times the greater name is the later one.
            rank = np.argsort(np.argsort(whole.feature_names))
            order = rank[whole.matrix.indices].astype(np.int64)
            ranked = dataclasses.replace(whole, order=order)
            return {"split_last": 2}, *ranked.split_last(2)
        case "time":
            train, heldout = whole.split_at(3)
            counts = np.bincount(train.matrix.indices, minlength=whole.num_features)
            some = np.flatnonzero(counts)
            order = sj.data.vocabulary_order(counts[some], whole.feature_names[some])
            known = whole.feature_names[some][order]
            parts = train.align_features(known), heldout.align_features(known)
            return {"split_time": 3}, *parts
        case "features":
            known = [*whole.feature_names[::2].tolist(), "no such item"]
            return {"features": known}, whole.align_features(known), None
    return {}, whole, None


@pytest.mark.filterwarnings("ignore::sparsejax.UnknownFeaturesWarning")
@pytest.mark.parametrize("kind", ["all", "fraction", "last", "time", "features"])
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
    whole = sj.from_arrow(pa.table(kept), indicator=indicator)
    try:
        options, train, heldout = expected(whole, kind)
    except ValueError:  # nothing or everything is held out or unknown
        hypothesis.assume(False)
        raise
    options |= {"min_user": least[0], "min_item": least[1], "indicator": indicator}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        manifest = sj.prepare(pa.table(table), out, **options)
        found: dict[Part, sj.SparseDataset] = {"train": sj.read(out)}
        if heldout is not None:
            found["test"] = sj.read(out / "test")
        scanned = sj.scan_parquet(out)
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
            left_out = given_.align_rows(data.row_names).left_out
            np.testing.assert_array_equal(data.left_out, left_out)
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
def test_names_that_were_floats_and_values_that_are_null(columns, tmp_path):
    table = pa.table(columns)
    manifest = sj.prepare(table, tmp_path / "out", split_fraction=0.5)
    train, heldout = sj.from_arrow(table).split(0.5, seed=0)
    assert entries(sj.read(tmp_path / "out")) == entries(train)
    assert entries(sj.read(tmp_path / "out" / "test")) == entries(heldout)
    assert manifest.indicator


def test_names_that_are_fractions_and_values_after_nulls(tmp_path):
    wrong = {"user": ["a", "b"], "item": ["3.5", "4.0"]}
    with pytest.raises(sj.DataError, match=r"fractions like 3\.5"):
        sj.prepare(pa.table(wrong), tmp_path / "out")
    values = pa.chunked_array([pa.array([None], pa.float64()), [2.0]])
    wrong = {"user": ["a", "b"], "item": ["x", "y"], "value": values}
    with pytest.raises(sj.DataError, match="row 1: an entry has a value but earlier"):
        sj.prepare(pa.table(wrong), tmp_path / "out")


@pytest.mark.parametrize(("time", "problem"), [(1, "nothing"), (-1, "everything")])
def test_a_split_at_an_infinite_time(time, problem, tmp_path):
    table = pa.table({"user": ["a", "a"], "item": ["x", "y"], "time": [1.5, 2.5]})
    with pytest.raises(sj.DataError, match=f"{problem} is held out"):
        sj.prepare(table, tmp_path / "out", split_time=time * float("inf"))
