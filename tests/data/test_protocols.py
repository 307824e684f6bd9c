"""Files and candidates of published protocols."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj


def write(folder, name: str, pairs) -> None:
    lines = [f"{user},{item}" for user, item in pairs]
    (folder / f"{name}.csv").write_text("\n".join(["uid,sid", *lines]) + "\n")


def test_files_of_mult_vae(tmp_path):
    """Users of one parity like the items of it. Recall is over min(k, labels)."""
    users = {"train": range(30), "validation": range(30, 36), "test": range(36, 46)}
    liked = {user: range(user % 2, 60, 2) for part in users.values() for user in part}
    write(tmp_path, "train", [(u, i) for u in users["train"] for i in liked[u]])
    for name in ("validation", "test"):
        for part, some in (("tr", slice(0, 4)), ("te", slice(4, None))):
            pairs = [(u, i) for u in users[name] for i in liked[u][some]]
            write(tmp_path, f"{name}_{part}", pairs)
    data = sj.data.read_vae_cf(tmp_path)
    assert data.train.num_rows == 30 and data.train.num_features == 60
    assert data.train.matrix.data is None
    shown, heldout = data.test
    assert sorted(shown.row_names.tolist()) == [str(u) for u in users["test"]]
    assert (shown.num_entries, heldout.num_entries) == (40, 260)
    assert data.validation.train.num_rows == 6
    model = sj.baselines.ease(data.train, l2=1.0)
    measured = sj.evaluate(model, shown, heldout, k=(20, 50), popularity=data.train)
    assert measured["truncated_recall@20"] == measured["truncated_recall@50"] == 1
    assert measured["recall@20"] == pytest.approx(20 / 26)
    assert measured["popularity_truncated_recall@20"] < 0.8
    (tmp_path / "test_te.csv").unlink()
    with pytest.raises(sj.DataError, match="test_te.csv"):
        sj.data.read_vae_cf(tmp_path)


def test_candidates_are_items_that_the_row_does_not_have():
    rng = np.random.default_rng(0)
    dense = rng.random((40, 11)) < 0.4
    dense[3], dense[4], dense[5] = False, True, np.arange(11) != 7
    whole = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(dense))
    train, heldout = whole.split(0.7, seed=0)
    drawn = sj.data.random_candidates(train, heldout, count=4, seed=1)
    found = drawn.to_scipy().toarray() > 0
    assert not (found & dense).any()
    np.testing.assert_array_equal(found.sum(1), np.minimum(4, 11 - dense.sum(1)))
    assert found[5].nonzero()[0].tolist() == [7]
    # Every free item of the empty row is as likely as any other.
    row = [sj.data.random_candidates(whole, count=4, seed=seed) for seed in range(300)]
    items = np.concatenate(
        [r.matrix.indices[slice(*r.matrix.indptr[3:5])] for r in row]
    )
    shares = np.bincount(items, minlength=11) / 300
    assert abs(shares - 4 / 11).max() < 5 * (4 / 11 / 300) ** 0.5
    with pytest.raises(ValueError, match="count=1 or more, got 1 and 0"):
        sj.data.random_candidates(train, count=0)
