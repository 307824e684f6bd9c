"""Data sets that stay on disk."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj
from sparsejax.data import parquet


def dataset(rows, cols=50, seed=0, *, valued=True):
    rng = np.random.default_rng(seed)
    matrix = scipy.sparse.random_array((rows, cols), density=0.1, rng=rng)
    matrix = matrix if valued else matrix.astype(bool)
    return sj.SparseDataset.from_scipy(scipy.sparse.csr_array(matrix))


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 16)


@pytest.mark.parametrize("valued", [True, False])
@pytest.mark.parametrize("rows", [40, 3])  # more rows than features, and fewer
def test_parts_are_the_rows(tmp_path, small_groups, rows, valued):
    data = dataset(rows, valued=valued)
    data.save(tmp_path / "data")
    scanned = sj.scan_parquet(tmp_path / "data")
    assert scanned.num_rows == rows
    assert scanned.indicator != valued
    np.testing.assert_array_equal(scanned.feature_names, data.feature_names)
    lengths = np.diff(data.matrix.indptr)
    assert scanned.num_entries == np.maximum(lengths, 1).sum()
    for start, stop in [(0, rows), (1, 2), (rows - 1, rows), (rows // 3, rows - 1)]:
        part = scanned.read(start, stop).to_scipy()
        expected = data.matrix.to_scipy().toarray()[start:stop]
        np.testing.assert_array_equal(part.toarray(), expected)


def test_a_folder_of_files_with_one_vocabulary(tmp_path, small_groups):
    parts = [dataset(20, seed=1), dataset(7, seed=2)]
    for number, part in enumerate(parts):
        part.save(tmp_path / f"part-{number}.parquet")
    scanned = sj.scan_parquet(tmp_path)
    both = scipy.sparse.vstack([part.matrix.to_scipy() for part in parts])
    np.testing.assert_array_equal(scanned.read(0, 27).todense(), both.toarray())
    before = scanned.fingerprint()
    dataset(5, 51).save(tmp_path / "part-2.parquet")
    with pytest.raises(sj.DataError, match=r"part-2.parquet: has another vocabulary"):
        sj.scan_parquet(tmp_path)
    dataset(5).save(tmp_path / "part-2.parquet")
    assert sj.scan_parquet(tmp_path).fingerprint() != before


def test_what_is_no_saved_data_set(tmp_path):
    (tmp_path / "text.tsv").write_text("ann\tmilk\n")
    with pytest.raises(sj.DataError, match="not a Parquet file"):
        sj.scan_parquet(tmp_path / "text.tsv")
    dataset(3).save(tmp_path / "data")
    with pytest.raises(ValueError, match="chunk_rows must be positive, got 0"):
        sj.scan_parquet(tmp_path / "data", chunk_rows=0)
    scanned = sj.scan_parquet(tmp_path / "data")
    dataset(3, valued=False).save(tmp_path / "data")
    with pytest.raises(sj.DataError):
        scanned.read(0, 3)
