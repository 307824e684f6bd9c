"""SparseDataset: construction, splitting, matching by name, saving."""

import dataclasses
import itertools
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data import (
    DataError,
    SparseDataset,
    Split,
    UnknownFeaturesWarning,
    read_pairs,
    scan_parquet,
    vocabulary_order,
)
from sparsejax.data.files.names import as_names
from sparsejax.data.sets.vocabulary import imbalance
from sparsejax.sparse import CSR

ROWS = ["ann", "b\u00f6b", "eve", "\u3042"]
FEATURES = ["milk", "tea", "wine", "a\0b", " "]
DENSE = np.array(
    [[1, 0, 2.5, 0, 0], [0, 0, 0, 0, 0], [0, -3, 1e-30, 0, 7], [0, 0, 1, 0, 0]],
    np.float32,
)

PER_ENTRY = ("times", "order")
KINDS = ("int64", "float64", "datetime64[us]")


def make(*, valued: bool = True) -> SparseDataset:
    matrix = scipy.sparse.csr_array(DENSE if valued else DENSE != 0)
    return SparseDataset.from_scipy(matrix, row_names=ROWS, feature_names=FEATURES)


def random_dataset(rows: int, columns: int, seed: int = 0) -> SparseDataset:
    rng = np.random.default_rng(seed)
    matrix = scipy.sparse.random_array((rows, columns), density=0.3, rng=rng)
    return SparseDataset.from_scipy(matrix)


def with_times(
    dataset: SparseDataset, *, kind: str = "int64", seed: int = 0
) -> SparseDataset:
    """Adds random times, with ties, to the entries of a data set."""
    rng = np.random.default_rng(seed)
    count = dataset.num_entries
    times = rng.integers(-5, 5, count).astype(kind)
    return dataclasses.replace(dataset, times=times, order=rng.permutation(count))


def assert_equal(left: SparseDataset, right: SparseDataset) -> None:
    assert left.row_names.tolist() == right.row_names.tolist()
    assert left.feature_names.tolist() == right.feature_names.tolist()
    assert left.matrix.num_cols == right.matrix.num_cols
    pairs = [(getattr(left, name), getattr(right, name)) for name in PER_ENTRY]
    for name in ("data", "indices", "indptr"):
        pairs.append((getattr(left.matrix, name), getattr(right.matrix, name)))
    for one, other in pairs:
        if one is None or other is None:
            assert one is other
        else:
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    np.testing.assert_array_equal(left.left_out, right.left_out)


def test_from_scipy():
    dataset = make()
    assert (dataset.num_rows, dataset.num_features, dataset.num_entries) == (4, 5, 6)
    np.testing.assert_array_equal(dataset.to_scipy().toarray(), DENSE)
    assert dataset.row_names.tolist() == ROWS
    assert dataset.feature_names.tolist() == FEATURES
    assert isinstance(dataset.feature_names[1], str)
    assert dataset.feature_names[np.array([[2, 0]])].tolist() == [["wine", "milk"]]
    assert "4 rows, 5 features, 6 entries, valued" in repr(dataset)


def test_from_scipy_default_names_and_order():
    """Columns keep their numbers, however unpopular they are."""
    dataset = SparseDataset.from_scipy(scipy.sparse.coo_array(DENSE[::-1]))
    np.testing.assert_array_equal(dataset.to_scipy().toarray(), DENSE[::-1])
    assert dataset.row_names.tolist() == ["0", "1", "2", "3"]
    assert dataset.feature_names.tolist() == ["0", "1", "2", "3", "4"]


def test_from_scipy_duplicates_zeros_and_bools():
    coo = scipy.sparse.coo_array(
        ([1, 2, 0, 5], ([0, 0, 1, 1], [2, 2, 0, 1])), shape=(2, 3)
    )
    matrix = SparseDataset.from_scipy(coo).matrix
    assert isinstance(matrix.data, np.ndarray) and matrix.data.dtype == np.float32
    assert matrix.data.tolist() == [3, 0, 5]  # a stored zero stays an entry
    assert matrix.indices.tolist() == [2, 0, 1]
    matrix = SparseDataset.from_scipy(coo.astype(bool)).matrix
    assert matrix.data is None
    # A stored False is an entry, too.
    assert matrix.indices.tolist() == [2, 0, 1]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_empty_shapes(shape, tmp_path):
    dataset = SparseDataset.from_scipy(scipy.sparse.csr_array(shape, dtype=np.float32))
    assert (dataset.num_rows, dataset.num_features) == shape
    dataset.save(tmp_path / "d")
    assert_equal(SparseDataset.load(tmp_path / "d"), dataset)
    with pytest.raises(ValueError, match="nothing is held out.* longest row has 0"):
        dataset.split(0.5, seed=0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, "row 2, column 1: the value is nan"),
        (np.inf, "row 2, column 1: the value is inf"),
        (1e39, "row 2, column 1: the value is inf"),
    ],
)
def test_from_scipy_rejects_values(bad, message):
    dense = DENSE.astype(np.float64)
    dense[2, 1] = bad
    with pytest.raises(ValueError, match=message):
        SparseDataset.from_scipy(scipy.sparse.csr_array(dense))


def test_from_scipy_rejects():
    matrix = scipy.sparse.csr_array(DENSE)
    with pytest.raises(TypeError, match="SciPy sparse matrix"):
        SparseDataset.from_scipy(DENSE)
    with pytest.raises(ValueError, match="has 4 rows but 3 row names"):
        SparseDataset.from_scipy(matrix, row_names=ROWS[:3])
    with pytest.raises(ValueError, match="has 5 features but 4 feature names"):
        SparseDataset.from_scipy(matrix, feature_names=ROWS)
    with pytest.raises(ValueError, match="row names must be unique.*'x'"):
        SparseDataset.from_scipy(matrix, row_names=["x", "y", "x", "z"])
    with pytest.raises(TypeError, match="sequence of names, got the string 'abcd'"):
        SparseDataset.from_scipy(matrix, row_names="abcd")
    with pytest.raises(ValueError, match="which cannot be a name"):
        SparseDataset.from_scipy(matrix, row_names=[["a", "b"], ["c", "d"]])


def test_constructor_makes_numpy_leaves_without_padding():
    padded = CSR(
        jnp.array([1.0, 2.0, 9.0]),
        jnp.array([1, 0, 7]),
        jnp.array([0, 1, 2]),
        num_cols=2,
    )
    dataset = SparseDataset(padded, as_names(["a", "b"]), as_names(["x", "y"]))
    assert isinstance(dataset.matrix.indices, np.ndarray)
    assert dataset.num_entries == dataset.matrix.nse == 2
    assert dataset.to_scipy().toarray().tolist() == [[0, 1], [2, 0]]


def test_constructor_rejects_repeated_columns():
    matrix = CSR(
        None,
        np.array([2, 0, 1, 1], np.int32),
        np.array([0, 1, 4], np.int32),
        num_cols=3,
    )
    names = as_names(["a", "b"]), as_names(["x", "y", "z"])
    with pytest.raises(ValueError, match="row 1 has column 1 twice"):
        SparseDataset(matrix, *names)
    # The last column of a row and the first column of the next may be equal: that is no duplicate.
    matrix = CSR(
        None, np.array([1, 1, 2], np.int32), np.array([0, 1, 3], np.int32), num_cols=3
    )
    assert SparseDataset(matrix, *names).num_entries == 3


def skewed(columns: int, *, rows: int = 200) -> scipy.sparse.csr_array:
    """A matrix whose columns are in order of popularity: column c is in about rows / (1 + c / 20)
    rows.
    """
    rng = np.random.default_rng(0)
    share = 1 / (1 + np.arange(columns) / 20)
    return scipy.sparse.csr_array(rng.random((rows, columns)) < share)


def test_from_scipy_warns_of_imbalance():
    matrix = skewed(2000)
    with pytest.warns(UserWarning, match="8 devices.*vocabulary_order") as caught:
        dataset = SparseDataset.from_scipy(matrix)
    assert len(caught) == 1
    counts = np.bincount(dataset.matrix.indices, minlength=2000)
    parts = counts.reshape(8, 250).sum(1)
    assert imbalance(counts, 8) == pytest.approx(parts.max() / parts.mean())
    message = str(caught[0].message)
    assert f"{parts.max() / parts.mean():.2f} times its share" in message
    # Following the advice has the promised effect, and causes no warning.
    order = vocabulary_order(counts, dataset.feature_names)
    balanced = SparseDataset.from_scipy(matrix[:, order])
    counts = np.bincount(balanced.matrix.indices, minlength=2000)
    assert f"({imbalance(counts, 8):.2f} times in balanced order)" in message
    assert imbalance(counts, 8) < parts.max() / parts.mean()


def test_from_scipy_does_not_warn_where_it_does_not_matter():
    # Padding to 256 columns decides, so there is no warning.
    SparseDataset.from_scipy(skewed(200))
    # There are too few entries to decide, so there is no warning.
    SparseDataset.from_scipy(skewed(2000, rows=5))


@pytest.mark.parametrize("valued", [True, False])
def test_without_values(valued):
    dataset = make(valued=valued).without_values()
    assert dataset.matrix.data is None
    np.testing.assert_array_equal(dataset.to_scipy().toarray(), DENSE != 0)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.8, 0.9, 0.95])
def test_split_counts(fraction):
    """Of n entries, (1 - fraction) n rounded half up; one always stays in train."""
    lengths = np.arange(0, 41)
    dense = np.arange(41) < lengths[:, None]
    dataset = SparseDataset.from_scipy(scipy.sparse.csr_array(dense))
    train, heldout = dataset.split(fraction, seed=3)
    # In twentieths, so that the rule is exact: floor(x / 20 + 1 / 2).
    twentieths = round((1 - fraction) * 20) * lengths
    expected = np.minimum((2 * twentieths + 20) // 40, np.maximum(lengths - 1, 0))
    assert np.diff(heldout.matrix.indptr).tolist() == expected.tolist()
    assert np.diff(train.matrix.indptr).tolist() == (lengths - expected).tolist()


@pytest.mark.parametrize("valued", [True, False])
def test_split_parts_add_up(valued):
    dataset = random_dataset(50, 30)
    dataset = dataset if valued else dataset.without_values()
    parts = dataset.split(0.7, seed=0)
    for part in parts:
        assert part.row_names.tolist() == dataset.row_names.tolist()
        assert part.feature_names.tolist() == dataset.feature_names.tolist()
        assert (part.matrix.data is None) != valued
    total = parts[0].to_scipy() + parts[1].to_scipy()
    assert total.nnz == parts[0].num_entries + parts[1].num_entries
    np.testing.assert_array_equal(total.toarray(), dataset.to_scipy().toarray())


def test_split_depends_on_seed_and_names_only():
    dataset = random_dataset(40, 30)
    (_, first), (_, again) = dataset.split(0.8, seed=1), dataset.split(0.8, seed=1)
    assert_equal(first, again)
    _, other = dataset.split(0.8, seed=2)
    assert first.matrix.indices.tolist() != other.matrix.indices.tolist()
    # The same entries must be held out for another order of rows and columns, and for fewer rows.
    rng = np.random.default_rng(0)
    rows, columns = rng.permutation(40)[:25], rng.permutation(30)
    moved = SparseDataset.from_scipy(
        scipy.sparse.csr_array(dataset.to_scipy().toarray()[rows][:, columns]),
        row_names=dataset.row_names[rows],
        feature_names=dataset.feature_names[columns],
    )
    _, moved_first = moved.split(0.8, seed=1)
    np.testing.assert_array_equal(
        moved_first.to_scipy().toarray(), first.to_scipy().toarray()[rows][:, columns]
    )


def test_split_is_fixed_for_all_time():
    """A seed written down in one release must mean the same in the next."""
    matrix = scipy.sparse.csr_array(np.ones((2, 10), bool))
    _, heldout = SparseDataset.from_scipy(matrix).split(0.7, seed=0)
    assert heldout.matrix.indices.reshape(2, 3).tolist() == [[3, 4, 6], [0, 6, 7]]


def test_split_is_uniform():
    """Every entry is held out with the same probability, whatever its column."""
    matrix = scipy.sparse.csr_array(np.ones((4000, 10), bool))
    _, heldout = SparseDataset.from_scipy(matrix).split(0.8, seed=0)
    counts = np.bincount(heldout.matrix.indices, minlength=10)
    assert counts.sum() == 8000
    deviation = np.sqrt(4000 * 0.2 * 0.8)
    assert np.abs(counts - 800).max() < 4 * deviation


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_split_rejects(fraction):
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\)"):
        make().split(fraction, seed=0)


def test_split_says_that_it_holds_out_nothing():
    """Of 49 entries .01 is less than half an entry, of 50 it is half of one."""
    for longest in (49, 50):
        dense = np.arange(50) < np.array([[longest], [1], [0]])
        dataset = SparseDataset.from_scipy(scipy.sparse.csr_array(dense))
        if longest == 50:
            assert dataset.split(0.99, seed=0).heldout.num_entries == 1
            continue
        with pytest.raises(ValueError, match="longest row has 49 .*0.01 of them"):
            dataset.split(0.99, seed=0)
    with pytest.raises(ValueError, match="3 rows are too few to hold out 0.001"):
        dataset.split_rows(0.999, seed=0)


def test_split_counts_what_is_new():
    data = SparseDataset.from_scipy(
        scipy.sparse.csr_array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    )
    last = scipy.sparse.csr_array([[0] * 4, [0] * 4, [0, 0, 1, 0], [0] * 4])
    parts = (data.to_scipy() - last, last)
    split = Split(*map(SparseDataset.from_scipy, parts))
    assert (split.new_rows, split.new_features) == (1, 1)
    assert str(split) == (
        "held out 1 of 4 entries (25.0%), in 1 rows; new rows: 1, new features: 1"
    )
    # Rows that are held out whole are new, also those without a place in train.
    split = Split(data.align_rows(["0"]), data.align_rows(["3", "1", "2"]))
    assert (split.new_rows, split.new_features) == (2, 1)


def test_split_rows():
    dataset = random_dataset(53, 11)
    train, heldout = dataset.split_rows(0.9, seed=0)
    assert (train.num_rows, heldout.num_rows) == (48, 5)  # 5.3
    names = dataset.row_names.tolist()
    for part in (train, heldout):
        found = part.row_names.tolist()
        assert found == sorted(found, key=names.index)
        assert_equal(part, dataset.align_rows(found))
    both = {*train.row_names.tolist(), *heldout.row_names.tolist()}
    assert both == set(names)
    # The split must not depend on the order of the rows, or on their entries.
    turned = dataset.align_rows(names[::-1]).without_values()
    again = turned.split_rows(0.9, seed=0)[1]
    assert set(again.row_names.tolist()) == set(heldout.row_names.tolist())
    other = dataset.split_rows(0.9, seed=1)[1]
    assert set(other.row_names.tolist()) != set(heldout.row_names.tolist())


def test_split_rows_of_few():
    dataset = random_dataset(1, 4)
    with pytest.raises(
        ValueError, match="nothing is held out: 1 rows are too few to hold out 0.9 "
    ):
        dataset.split_rows(0.1, seed=0)
    dataset = random_dataset(2, 4)
    assert [part.num_rows for part in dataset.split_rows(0.75, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match="fraction must lie in"):
        dataset.split_rows(1, seed=0)


def test_split_items():
    dataset = random_dataset(11, 53)
    parts = dataset.split_items(0.9, seed=0)
    known, held = (
        set(part.feature_names[np.unique(part.matrix.indices)].tolist())
        for part in parts
    )
    assert not known & held and len(held) == parts.new_features == 5  # of 5.3
    whole = dataset.to_scipy().toarray()
    is_held = np.isin(dataset.feature_names, list(held))
    np.testing.assert_array_equal(parts.train.to_scipy().toarray(), whole * ~is_held)
    np.testing.assert_array_equal(parts.heldout.to_scipy().toarray(), whole * is_held)
    # The split must not depend on the order of the features, or on their entries.
    turned = dataset.align_features(dataset.feature_names[::-1]).without_values()
    again = turned.split_items(0.9, seed=0).heldout
    assert set(again.feature_names[again.matrix.indices].tolist()) == held
    other = dataset.split_items(0.9, seed=1).heldout
    assert set(other.feature_names[other.matrix.indices].tolist()) != held


def test_split_items_of_few():
    with pytest.raises(ValueError, match="1 features are too few to hold out 0.9 "):
        random_dataset(4, 1).split_items(0.1, seed=0)
    with pytest.raises(ValueError, match="fraction must lie in"):
        random_dataset(4, 4).split_items(1, seed=0)
    # One of two features has entries: it is held out, or the other is.
    matrix = scipy.sparse.csr_array([[1, 0], [1, 0]])
    dataset, found = SparseDataset.from_scipy(matrix), set()
    for seed in range(9):
        with pytest.raises(ValueError, match="the 1 features .*have no entries") as e:
            dataset.split_items(0.5, seed=seed)
        found.add(str(e.value).partition(" is held out")[0])
    assert found == {"nothing", "everything"}


def test_match_rows_by_name():
    left, right = make(), make(valued=False).align_rows(["\u3042", "eve"])
    extra = SparseDataset.from_scipy(
        scipy.sparse.csr_array(np.eye(3, 5)), row_names=["zoe", "eve", "ann"]
    )
    one, other = left.match_rows(right)
    assert one.row_names.tolist() == other.row_names.tolist() == ["eve", "\u3042"]
    np.testing.assert_array_equal(one.to_scipy().toarray(), DENSE[2:])
    np.testing.assert_array_equal(other.to_scipy().toarray(), DENSE[2:] != 0)
    one, other = left.match_rows(extra)
    assert one.row_names.tolist() == other.row_names.tolist() == ["ann", "eve"]
    assert other.to_scipy().toarray().tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert other.feature_names.tolist() == ["0", "1", "2", "3", "4"]


def test_match_rows_without_a_common_name():
    other = SparseDataset.from_scipy(scipy.sparse.csr_array((2, 5)))
    with pytest.raises(ValueError, match="no row name in common.*'ann'.*'0', '1'"):
        make().match_rows(other)


def test_align_rows():
    dataset = make()
    aligned = dataset.align_rows(["eve", "ann"])
    assert aligned.row_names.tolist() == ["eve", "ann"]
    np.testing.assert_array_equal(aligned.to_scipy().toarray(), DENSE[[2, 0]])
    assert_equal(dataset.align_rows(dataset), dataset)
    with pytest.raises(ValueError, match="2 of 3 rows are not in .*'x', 'y'"):
        dataset.align_rows(["x", "ann", "y"])


@pytest.mark.parametrize("valued", [True, False])
def test_align_features(valued):
    dataset = make(valued=valued)
    wanted = ["new", "wine", " ", "tea"]
    with pytest.warns(UnknownFeaturesWarning, match="1 of 6 .*2 features.*'milk'"):
        aligned = dataset.align_features(wanted)
    expected = DENSE[:, [3, 2, 4, 1]] if valued else DENSE[:, [3, 2, 4, 1]] != 0
    np.testing.assert_array_equal(aligned.to_scipy().toarray(), expected)
    assert aligned.feature_names.tolist() == wanted
    assert (aligned.matrix.data is None) != valued
    # A data set may be passed in place of its feature names.
    assert_equal(dataset.align_features(dataset), dataset)
    with pytest.raises(ValueError, match="all 6 entries"):
        dataset.align_features(["x"])


@pytest.fixture
def some_left_out() -> SparseDataset:
    """`make()`, of which only wine and the feature called " " are known."""
    with pytest.warns(UnknownFeaturesWarning):
        return make().align_features(["wine", " ", "x"])


def test_what_was_left_out_is_counted_for_each_row(tmp_path, some_left_out):
    known = [FEATURES.index(name) for name in ("wine", " ")]
    counts = np.sum(np.delete(DENSE, known, axis=1) != 0, axis=1)
    assert 0 < counts.sum() < np.sum(DENSE != 0) and some_left_out.left_out is not None
    assert some_left_out.left_out.tolist() == counts.tolist()
    assert (
        some_left_out.align_rows(ROWS[::-1]).left_out.tolist() == counts[::-1].tolist()
    )
    some_left_out.save(tmp_path / "d")
    assert_equal(SparseDataset.load(tmp_path / "d"), some_left_out)
    # A second time: entries that were left out before are counted, too.
    with pytest.warns(UnknownFeaturesWarning):
        again = some_left_out.align_features(["x", "wine"])
    assert again.left_out.sum() == counts.sum() + np.sum(
        DENSE[:, FEATURES.index(" ")] != 0
    )
    assert [part.left_out for part in some_left_out.split(0.5, seed=0)] == [None, None]
    # It is None if nothing was left out, also after selecting rows.
    assert make().align_features(make()).left_out is None
    assert some_left_out.align_rows([ROWS[np.argmin(counts)]]).left_out is None


def test_counts_of_what_was_left_out_must_fit(tmp_path, some_left_out):
    for counts in ([1, 2], [0, 0, 0, -1], [[0, 0, 0, 1]]):
        with pytest.raises(ValueError, match="a count for each of the 4 rows"):
            dataclasses.replace(some_left_out, left_out=np.array(counts))
    path = tmp_path / "d"
    some_left_out.save(path)
    table = pq.read_table(path)
    for counts in ([1, None, 0, 0], [1, 0, -1, 0]):
        pq.write_table(change(table, "left_out", counts), path)
        with pytest.raises(DataError, match="is damaged"):
            SparseDataset.load(path)


@pytest.mark.parametrize("valued", [(True, True), (True, False), (False, False)])
def test_merge(some_left_out, valued):
    """As if the lines of all stood in one file."""
    rng = np.random.default_rng(0)
    names = [["a", "b", "c"], ["c", "d", "a"], ["e"]]
    parts, expected = [], {}
    for rows, has_values in zip(names, (*valued, valued[1]), strict=True):
        dense = np.where(rng.random((len(rows), 5)) < 0.5, 1.0, 0.0)
        if has_values:
            dense *= rng.standard_normal(dense.shape).astype(np.float32)
        matrix = scipy.sparse.csr_array(dense if has_values else dense != 0)
        parts.append(
            SparseDataset.from_scipy(matrix, row_names=rows, feature_names=FEATURES)
        )
        for name, row in zip(rows, dense, strict=True):
            expected[name] = expected.get(name, 0) + row
    merged = parts[0].merge(*parts[1:])
    assert merged.row_names.tolist() == list("abcde")
    dense = np.stack(list(expected.values()))
    if not any(valued):
        assert merged.matrix.data is None
        dense = dense != 0
    np.testing.assert_allclose(merged.to_scipy().toarray(), dense, rtol=1e-6)
    assert merged.feature_names.tolist() == FEATURES and merged.left_out is None
    assert_equal(make().merge(), make())
    # Stored zeros stay entries.
    zero = SparseDataset.from_scipy(scipy.sparse.csr_array(([0.0], ([0], [1])), (1, 5)))
    assert zero.merge(zero).num_entries == 1


def test_merge_keeps_times(tmp_path):
    lines = [
        ["a,x,5", "b,y,1", "a,x,2", "b,x,9"],
        ["c,x,0", "a,x,5", "b,y,0", "a,y,7"],
        ["b,y,1", "a,y,3"],
    ]
    for number, part in enumerate([*lines, itertools.chain(*lines)]):
        text = "\n".join(["user,item,time", *part, ""])
        (tmp_path / f"{number}.csv").write_text(text)
    *parts, expected = (
        read_pairs(tmp_path / f"{number}.csv", features=["x", "y"])
        for number in range(4)
    )
    merged = parts[0].merge(*parts[1:])
    np.testing.assert_array_equal(merged.times, [5, 7, 9, 1, 0])
    assert_equal(merged, expected)
    times = np.asarray(parts[1].times, np.float64)
    floats = dataclasses.replace(parts[1], times=times)
    without = dataclasses.replace(parts[1], times=None, order=None)
    for other in (floats, without):
        assert parts[0].merge(other).times is None


def test_merge_of_what_was_left_out(some_left_out):
    ann = some_left_out.align_rows(["eve", "ann"])
    other = SparseDataset.from_scipy(
        scipy.sparse.csr_array((1, 3)), feature_names=["wine", " ", "x"]
    )
    merged = other.merge(some_left_out, ann)
    by_name = dict(zip(ROWS, some_left_out.left_out.tolist(), strict=True))
    twice = [by_name[name] * (2 if name in ("ann", "eve") else 1) for name in ROWS]
    np.testing.assert_array_equal(merged.left_out, [0, *twice])
    with pytest.raises(ValueError, match="different features; read them with the same"):
        make().merge(some_left_out)


@pytest.mark.parametrize("valued", [True, False])
def test_save_and_load(tmp_path, valued):
    dataset = make(valued=valued)
    path = tmp_path / "d.parquet"
    dataset.save(path)
    assert_equal(SparseDataset.load(path), dataset)
    assert os.listdir(tmp_path) == ["d.parquet"]
    # Other libraries can read the file.
    table = pq.read_table(path)
    assert table.column_names == ["row", "indices", *["values"] * valued, "feature"]
    assert table["row"].to_pylist() == [*ROWS, None]
    assert table["feature"].to_pylist() == FEATURES
    assert table["indices"].to_pylist() == [[0, 2], [], [1, 2, 4], [2], None]
    # Saving again replaces the file; its permissions are those of any new file.
    random_dataset(3, 3).save(path)
    assert SparseDataset.load(path).num_rows == 3
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from([None, *KINDS]),
    st.integers(0, 2**32 - 1),
)
def test_save_and_load_any(tmp_path_factory, rows, columns, valued, kind, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < rng.random()
    matrix = scipy.sparse.csr_array(mask)
    if valued:
        matrix = matrix.astype(np.float32)
        matrix.data[:] = rng.standard_normal(matrix.nnz)
    dataset = SparseDataset.from_scipy(matrix)
    if kind is not None:
        dataset = with_times(dataset, kind=kind, seed=seed)
    path = tmp_path_factory.mktemp("any", numbered=True) / "d"
    dataset.save(path)
    assert_equal(SparseDataset.load(path), dataset)
    if rows:
        scanned = scan_parquet(path).read(0, rows)
        assert_equal(dataclasses.replace(dataset, matrix=scanned), dataset)


def test_times_readable_by_anyone(tmp_path):
    path = tmp_path / "d.parquet"
    dataset = with_times(make(), kind="datetime64[us]")
    dataset.save(path)
    assert pq.read_table(path)["times"].type == pa.list_(pa.timestamp("us"))
    frame = pd.read_parquet(path)
    entries = frame.dropna(subset="row").explode(["times", "order"]).dropna()
    assert dataset.times is not None and dataset.order is not None
    assert entries["times"].tolist() == pd.to_datetime(dataset.times).tolist()
    assert entries["order"].tolist() == dataset.order.tolist()
    # Another library rewrites the file.
    pl.read_parquet(path).write_parquet(tmp_path / "again")
    table = pq.read_table(tmp_path / "again").replace_schema_metadata(
        pq.read_schema(path).metadata
    )
    pq.write_table(table, path)
    assert_equal(SparseDataset.load(path), dataset)
    pq.write_table(table.drop(["order"]), path)
    with pytest.raises(DataError, match="damaged"):
        SparseDataset.load(path)
    short = change(table, "times", [[], *table["times"].to_pylist()[1:]])
    pq.write_table(short, path)
    with pytest.raises(
        DataError, match="indices, values, times and order do not agree"
    ):
        SparseDataset.load(path)
    wrong = table.set_column(3, "times", table["row"])
    pq.write_table(wrong, path)
    with pytest.raises(DataError, match="damaged"):
        SparseDataset.load(path)


def test_several_row_groups(tmp_path):
    dataset = with_times(random_dataset(3000, 40))
    dataset.save(tmp_path / "d")
    table = pq.read_table(tmp_path / "d")
    pq.write_table(table, tmp_path / "groups", row_group_size=70)
    assert_equal(SparseDataset.load(tmp_path / "groups"), dataset)


def test_failing_save_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "d.parquet"
    make().save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        args[1].write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        random_dataset(9, 9).save(path)
    assert os.listdir(tmp_path) == ["d.parquet"]
    assert path.read_bytes() == before


def test_save_to_impossible_places(tmp_path):
    with pytest.raises(FileNotFoundError):
        make().save(tmp_path / "missing" / "d.parquet")
    with pytest.raises(IsADirectoryError):
        make().save(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        make().save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_load_of_damaged_files(tmp_path):
    path = tmp_path / "d.parquet"
    random_dataset(200, 50).save(path)
    whole = path.read_bytes()
    for size in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="^" + str(path)):
            SparseDataset.load(path)


@pytest.mark.parametrize("valued", [True, False])
def test_a_bit_that_flips_changes_nothing_or_is_found(tmp_path, valued):
    path = tmp_path / "d.parquet"
    dataset = random_dataset(30, 20)
    if not valued:
        dataset = dataset.without_values()
    dataset.save(path)
    whole, count = path.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 61):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = SparseDataset.load(path)
        except DataError as error:
            assert str(error).startswith(str(path))
            count += 1
        else:
            assert_equal(found, dataset)
    assert count > len(whole) * 8 / 61 / 2


def change(table: pa.Table, name: str, values: list) -> pa.Table:
    at = table.column_names.index(name)
    return table.set_column(at, name, pa.array(values, table.schema.field(name).type))


VERSION = {b"sparsejax.dataset.version": b"1"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.replace_schema_metadata(None), "not a saved data set.*row, ind"),
        (lambda t: t.drop(["row"]), "not a saved data set.*got indices, values"),
        (
            lambda t: t.replace_schema_metadata({k: b"2" for k in VERSION}),
            "version 2.*newer",
        ),
        (
            lambda t: change(t, "indices", [[0, 9], [], [1, 2, 4], [2], None]),
            "damaged: row 0, column 9: .*outside",
        ),
        (
            lambda t: change(t, "indices", [[2, 0], [], [1, 2, 4], [2], None]),
            "damaged: row 0, .*must ascend",
        ),
        (
            lambda t: change(t, "indices", [[0, 0], [], [1, 2, 4], [2], None]),
            "damaged",
        ),
        (
            lambda t: change(t, "indices", [[0, 2], None, [1, 2, 4], [2], None]),
            "do not agree",
        ),
        (
            lambda t: change(t, "indices", [[0, 2], [], [1, None, 4], [2], None]),
            "damaged",
        ),
        (
            lambda t: change(t, "values", [[1], [], [1, 2, 4], [2], None]),
            "do not agree",
        ),
        (
            lambda t: change(t, "values", [[1, np.nan], [], [1, 2, 4], [2], None]),
            "damaged: row 0, column 2: the value is nan",
        ),
        (
            lambda t: change(t, "feature", ["a", "b", "c", "d", "a"]),
            "damaged",
        ),
        (
            lambda t: t.set_column(1, "indices", pa.array(list("abcde"))),
            "damaged",
        ),
    ],
)
def test_load_of_foreign_tables(tmp_path, edit, message):
    path = tmp_path / "d.parquet"
    make().save(path)
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(DataError, match=message) as caught:
        SparseDataset.load(path)
    assert str(caught.value).startswith(str(path))


def test_load_of_missing(tmp_path: pathlib.Path):
    with pytest.raises(DataError, match="no such file"):
        SparseDataset.load(tmp_path / "d")
    with pytest.raises(DataError, match="is a directory"):
        SparseDataset.load(tmp_path)
