"""Data sets that stay on disk."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse

import sparsejax as sj


def dataset(rows, cols=50, seed=0, *, valued=True):
    rng = np.random.default_rng(seed)
    matrix = scipy.sparse.random_array((rows, cols), density=0.1, rng=rng)
    matrix = matrix if valued else matrix.astype(bool)
    return sj.SparseDataset.from_scipy(scipy.sparse.csr_array(matrix))


def save(data, path):
    """Saves a data set in row groups of 16 rows."""
    data.save(path)
    pq.write_table(pq.read_table(path), path, row_group_size=16)


@pytest.mark.parametrize("valued", [True, False])
@pytest.mark.parametrize("rows", [40, 3])  # more rows than features, and fewer
def test_parts_are_the_rows(tmp_path, rows, valued):
    data = dataset(rows, valued=valued)
    save(data, tmp_path / "data")
    scanned = sj.data.scan_parquet(tmp_path / "data")
    assert scanned.num_rows == rows
    assert scanned.indicator != valued
    np.testing.assert_array_equal(scanned.feature_names, data.feature_names)
    lengths = np.diff(data.matrix.indptr)
    assert scanned.num_entries == np.maximum(lengths, 1).sum()
    for start, stop in [(0, rows), (1, 2), (rows - 1, rows), (rows // 3, rows - 1)]:
        part = scanned.read(start, stop).to_scipy()
        expected = data.matrix.to_scipy().toarray()[start:stop]
        np.testing.assert_array_equal(part.toarray(), expected)


def test_a_folder_of_files_with_one_vocabulary(tmp_path):
    parts = [dataset(20, seed=1), dataset(7, seed=2)]
    for number, part in enumerate(parts):
        save(part, tmp_path / f"part-{number}.parquet")
    scanned = sj.data.scan_parquet(tmp_path)
    both = scipy.sparse.vstack([part.matrix.to_scipy() for part in parts])
    np.testing.assert_array_equal(scanned.read(0, 27).todense(), both.toarray())
    before = scanned.fingerprint()
    dataset(5, 51).save(tmp_path / "part-2.parquet")
    with pytest.raises(sj.DataError, match=r"part-2.parquet: has another vocabulary"):
        sj.data.scan_parquet(tmp_path)
    dataset(5).save(tmp_path / "part-2.parquet")
    assert sj.data.scan_parquet(tmp_path).fingerprint() != before


def test_what_is_no_saved_data_set(tmp_path):
    (tmp_path / "text.tsv").write_text("ann\tmilk\n")
    with pytest.raises(sj.DataError, match="not a Parquet file"):
        sj.data.scan_parquet(tmp_path / "text.tsv")
    dataset(3).save(tmp_path / "data")
    with pytest.raises(ValueError, match="chunk_rows must be positive, got 0"):
        sj.data.scan_parquet(tmp_path / "data", chunk_rows=0)
    scanned = sj.data.scan_parquet(tmp_path / "data")
    dataset(3, valued=False).save(tmp_path / "data")
    with pytest.raises(sj.DataError):
        scanned.read(0, 3)


# Tables


def random_lists(rows=70, items=40, seed=0, *, integers=True):
    """Draws a list of items and values for each user; some items occur twice, some rows are
    empty.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rows)
    lists = [rng.integers(0, items, n).tolist() for n in lengths]
    if not integers:
        lists = [[f"item {i}" for i in row] for row in lists]
    return lists, [rng.random(n).tolist() for n in lengths]


def write(path, columns, group=16):
    pq.write_table(pa.table(columns), path, row_group_size=group)


def assert_the_same(scanned, data, rows=None):
    """Asserts that all rows, and parts of them, are equal, with the features in the order of
    `data`.
    """
    names = scanned.feature_names.tolist()
    order = [names.index(name) for name in data.feature_names.tolist()]
    expected = data.matrix.to_scipy().toarray()
    if rows is not None:
        expected = expected[rows]
    count = len(expected)
    assert scanned.num_rows == count and len(names) == data.num_features
    assert scanned.indicator == (data.matrix.data is None)
    for start, stop in [(0, count), (count // 3, count - 2), (5, 6), (7, 7)]:
        part = scanned.read(start, stop)
        assert (part.data is None) == scanned.indicator
        assert part.indices.dtype == part.indptr.dtype == np.int32
        got = part.to_scipy().toarray()[:, order]
        np.testing.assert_allclose(got, expected[start:stop], rtol=1e-6)
        assert part.to_scipy().has_canonical_format


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("valued", [True, False])
def test_lists_on_each_row(tmp_path, integers, valued):
    items, values = random_lists(integers=integers)
    columns = {"user": np.arange(len(items)), "items": items}
    if valued:
        columns["values"] = values
    write(tmp_path / "table.parquet", columns)
    expected = sj.read(tmp_path / "table.parquet")
    scanned = sj.data.scan_parquet(tmp_path / "table.parquet")
    assert_the_same(scanned, expected)
    assert len(scanned.groups) == 5
    assert scanned.num_entries == sum(max(len(row), 1) for row in items)
    write(tmp_path / "table.parquet", columns, group=1000)
    assert (
        scanned.fingerprint()
        != sj.data.scan_parquet(tmp_path / "table.parquet").fingerprint()
    )
    with pytest.raises(sj.DataError, match="was changed since it was scanned"):
        scanned.read(0, 3)


def test_lists_need_no_user_and_may_be_null(tmp_path):
    items, _ = random_lists()
    items = [*items[:3], None, *items[4:]]
    column = pa.array(items)
    write(tmp_path / "a.parquet", {"seen": column.slice(0, 33), "more": range(33)})
    write(tmp_path / "b.parquet", {"seen": column.slice(33), "more": range(37)})
    scanned = sj.data.scan_parquet(tmp_path)
    users = {"user": np.arange(70), "item": items}
    assert_the_same(scanned, sj.data.from_arrow(pa.table(users)))
    with pytest.raises(sj.DataError, match="no column 'bought'; name another: item="):
        sj.data.scan_parquet(tmp_path, item="bought")
    with pytest.raises(sj.DataError, match="no column 'who'; name another: user="):
        sj.data.scan_parquet(tmp_path, user="who")


@pytest.mark.parametrize(
    ("kind", "group"),
    [("integers", 2), ("text", 7), ("categories", 7), ("integers", 1000)],
)
def test_pairs_sorted_by_user(tmp_path, kind, group):
    lists, values = random_lists()
    lists[20] = list(range(30))  # goes on in several groups, and in the next file
    values[20] = [0.5] * 30
    lengths = [len(row) for row in lists]
    users = np.repeat(np.arange(len(lists)), lengths)
    pairs = {
        "userId": pa.array(
            users if kind == "integers" else [f"{u:03d}" for u in users]
        ),
        "movieId": pa.array(np.concatenate(lists).astype(np.int16)),
        "timestamp": pa.array(users),
        "rating": pa.array(np.concatenate(values)),
    }
    if kind == "categories":
        pairs["userId"] = pairs["userId"].dictionary_encode()
    middle = sum(lengths[:20]) + 11
    table = pa.table(pairs)
    for name, part in (("a", table[:middle]), ("b", table[middle:])):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=group)
    scanned = sj.data.scan_parquet(tmp_path)
    expected = sj.read(tmp_path)
    assert_the_same(scanned, expected)
    assert scanned.num_entries == sum(lengths)
    assert_the_same(
        sj.data.scan_parquet(tmp_path, indicator=True), expected.without_values()
    )


def test_pairs_that_are_not_sorted(tmp_path):
    pairs = {"user": [1, 1, 2, 10, 9], "item": [1, 2, 3, 4, 5]}
    for group in (1, 3, 4, 9):
        write(tmp_path / "pairs.parquet", pairs, group)
        message = "pairs.parquet: row 4: the user comes before the user of the row"
        with pytest.raises(sj.DataError, match=message):
            sj.data.scan_parquet(tmp_path / "pairs.parquet")
    write(tmp_path / "pairs.parquet", pairs | {"user": [1, 1, 2, 3, None]}, 2)
    with pytest.raises(sj.DataError, match="row 4: the user .* is empty or null"):
        sj.data.scan_parquet(tmp_path / "pairs.parquet")
    write(tmp_path / "a.parquet", pairs | {"user": [1, 1, 2, 3, 4]})
    write(tmp_path / "pairs.parquet", pairs | {"user": ["4", "5", "6", "7", "8"]})
    with pytest.raises(sj.DataError, match="pairs.parquet: has users of another type"):
        sj.data.scan_parquet(tmp_path)
    # Integers of another type that cannot hold the last one before.
    write(tmp_path / "a.parquet", pairs | {"user": [-5, -4, -3, -2, -1]})
    users = pa.array([1, 2, 3, 4, 5], pa.uint64())
    write(tmp_path / "pairs.parquet", pairs | {"user": users})
    with pytest.raises(sj.DataError, match="pairs.parquet: has users of another type"):
        sj.data.scan_parquet(tmp_path)


def test_a_table_against_a_vocabulary(tmp_path):
    items, _ = random_lists()
    path = tmp_path / "table.parquet"
    write(path, {"item": items})
    data = sj.data.from_arrow(pa.table({"user": np.arange(70), "item": items}))
    names = ["39", "none", *data.feature_names[::-1].tolist()]
    names = list(dict.fromkeys(names))
    scanned = sj.data.scan_parquet(path, features=names)
    assert scanned.feature_names.tolist() == names
    np.testing.assert_array_equal(
        scanned.read(0, 70).to_scipy().toarray(),
        data.align_features(names).matrix.to_scipy().toarray(),
    )
    assert scanned.fingerprint() != sj.data.scan_parquet(path).fingerprint()
    for far in (2**40, -3):  # no table of numbers, and one
        far = [*names, str(far)]
        same = sj.data.scan_parquet(path, features=far).read(0, 70)
        np.testing.assert_array_equal(same.indices, scanned.read(0, 70).indices)
    some = data.feature_names[:10]
    with pytest.warns(
        sj.data.UnknownFeaturesWarning, match="not among the 10 known ones"
    ):
        part = sj.data.scan_parquet(path, features=some).read(0, 70)
    with pytest.warns(sj.data.UnknownFeaturesWarning, match="entries"):
        expected = data.align_features(some).matrix.to_scipy()
    np.testing.assert_array_equal(part.to_scipy().toarray(), expected.toarray())
    with (
        pytest.warns(sj.data.UnknownFeaturesWarning),
        pytest.raises(sj.DataError, match="all entries of the first row group"),
    ):
        sj.data.scan_parquet(path, features=["none"])


def test_tables_that_are_wrong(tmp_path):
    path = tmp_path / "table.parquet"
    write(path, {"item": [[1], [2, None]]})
    with pytest.raises(sj.DataError, match="row 1: an item .* is empty or null"):
        sj.data.scan_parquet(path)
    write(path, {"item": [[1]] * 20 + [[2, 3]], "value": [[1.0]] * 20 + [[np.nan, 1]]})
    scanned = sj.data.scan_parquet(path)
    with pytest.raises(sj.DataError, match="row 20: a value is not finite"):
        scanned.read(0, 21)
    write(path, {"item": [[1], [2]], "value": [[1.0], [1.0, 2.0]]})
    with pytest.raises(
        sj.DataError, match="row 1: the numbers of values and of items differ"
    ):
        sj.data.scan_parquet(path, features=["1", "2"])
    write(path, {"item": [[b"\xff"], [b"tea"]]})
    for features in (None, ["tea"]):
        with pytest.raises(sj.DataError, match=r"table.parquet: .*UTF"):
            sj.data.scan_parquet(path, features=features)
    write(path, {"item": pa.array([], pa.list_(pa.int64()))})
    with pytest.raises(sj.DataError, match="holds no data"):
        sj.data.scan_parquet(path)
    write(path, {"item": pa.array([[], []], pa.list_(pa.int64()))})
    with pytest.raises(sj.DataError, match="none of the rows has a feature"):
        sj.data.scan_parquet(path)
    dataset(3).save(path)
    with pytest.raises(ValueError, match="is a saved data set, so it has no columns"):
        sj.data.scan_parquet(path, features=["1"])
    indicator = sj.data.scan_parquet(path, indicator=True).read(0, 3)
    assert indicator.data is None
    write(tmp_path / "a.parquet", {"user": [1], "item": [2]})
    write(tmp_path / "b.parquet", {"user": [1], "item": [[2]]})
    (tmp_path / "table.parquet").unlink()
    with pytest.raises(sj.DataError, match="b.parquet: .*lists"):
        sj.data.scan_parquet(tmp_path)
