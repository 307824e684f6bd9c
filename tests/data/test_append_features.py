"""Data gets the vocabulary of a trained model; new names are appended."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj


def test_known_features_come_first_and_no_entry_is_lost():
    matrix = scipy.sparse.csr_array([[1.0, 2, 0], [0, 0, 3]])
    data = sj.SparseDataset.from_scipy(matrix, feature_names=["new", "tea", "other"])
    longer = data.append_features(["milk", "tea"])
    assert longer.feature_names.tolist() == ["milk", "tea", "new", "other"]
    np.testing.assert_array_equal(
        longer.to_scipy().todense(), [[0, 2, 1, 0], [0, 0, 0, 3]]
    )
    assert data.append_features(longer).feature_names.tolist() == [
        "milk",
        "tea",
        "new",
        "other",
    ]
    histories = sj.SequenceDataset(
        np.array([0, 3, 4]),
        np.array([2, 0, 2, 1]),
        np.array(["a", "b"], np.dtypes.StringDType()),
        data.feature_names,
    )
    same = histories.append_features(["milk", "tea"])
    assert same.feature_names.tolist() == longer.feature_names.tolist()
    assert same.feature_names[same.indices].tolist() == ["other", "new", "other", "tea"]
    with pytest.raises(ValueError, match="must be unique"):
        data.append_features(["tea", "tea"])


def test_many_new_entries_at_the_end_are_warned_of():
    # 270 old features, and 30 new features that are in each row.
    columns = [[i, *range(270, 300)] for i in range(270)]
    matrix = scipy.sparse.lil_array((270, 300))
    for row, mine in enumerate(columns):
        matrix[row, mine] = 1
    order = sj.data.vocabulary_order(matrix.tocsr().sum(axis=0).astype(int))
    data = sj.SparseDataset.from_scipy(
        matrix.tocsr()[:, order], feature_names=[str(i) for i in order]
    )
    with pytest.warns(UserWarning, match="new features are at the end"):
        data.append_features([str(i) for i in range(270)])
