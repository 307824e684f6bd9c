"""Vectors of items and users, against NumPy."""

import errno
import os
import resource

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.verbs import vectors

FEATURES, HIDDEN = 37, 8  # the kernel has 256 rows


def model_of(*, tied: bool = False, temperature: float | None = None):
    config = sj.NetworkConfig.autoencoder(
        (HIDDEN,), tied=tied, temperature=temperature, dropout=0.3
    )
    sizes = {"inputs": FEATURES, "outputs": FEATURES}
    return sj.FeedForward(config, **sizes, rngs=nnx.Rngs(3))


def random_data(rows: int = 21) -> sj.SparseDataset:
    rng = np.random.default_rng(0)
    dense = rng.random((rows, FEATURES)) < 0.15
    dense[2] = False
    names = [f"item {i}" for i in range(FEATURES)]
    return sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(dense), feature_names=names
    )


def cosines(kernel: np.ndarray) -> np.ndarray:
    kernel = kernel.astype(np.float64)
    norms = np.linalg.norm(kernel, axis=1)
    norms[norms == 0] = np.inf
    return (kernel @ kernel.T) / np.outer(norms, norms)


@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_made_of_the_vectors(tied):
    model, data = model_of(tied=tied), random_data()
    items, users = sj.item_vectors(model), sj.user_vectors(model, data, batch_size=16)
    assert items.shape == (FEATURES, HIDDEN) and items.dtype == np.float32
    assert users.shape == (21, HIDDEN) and users.dtype == np.float32
    assert model.output.bias is not None
    bias = np.asarray(model.output.bias[...])[:FEATURES]
    found = sj.recommend(model, data, FEATURES, exclude=None)
    scores = np.take_along_axis(users @ items.T + bias, found.ids, axis=1)
    np.testing.assert_allclose(scores, found.scores, rtol=1e-5, atol=1e-6)


def test_scores_of_cosines():
    model, data = model_of(temperature=0.2), random_data()
    items, users = sj.item_vectors(model), sj.user_vectors(model, data)
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    users /= np.maximum(np.linalg.norm(users, axis=1, keepdims=True), 1e-30)
    found = sj.recommend(model, data, FEATURES, exclude=None)
    scores = np.take_along_axis(users @ items.T / 0.2, found.ids, axis=1)
    np.testing.assert_allclose(scores, found.scores, rtol=1e-4, atol=1e-5)


def test_rows_that_are_behind_are_read_up_to_date():
    data = random_data()
    model = model_of(tied=False)
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.01))

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = optimizer.value_and_grad(lambda m: m.encode(x).sum())(model)
        optimizer.update(model, grads)

    for rows in ([0, 1], [3, 4], [0, 1]):
        step(model, optimizer, sj.CSR.from_scipy(data.to_scipy()[rows], nse=20))
    current = sj.user_vectors(model, data, optimizer=optimizer)
    behind = sj.user_vectors(model, data)
    optimizer.flush(model)
    flushed = sj.user_vectors(model, data)
    np.testing.assert_allclose(current, flushed, rtol=1e-5, atol=1e-6)
    assert np.abs(behind - flushed).max() > 1e-4


def test_vectors_of_no_rows():
    model = model_of()
    nobody = scipy.sparse.csr_array((0, FEATURES))
    assert sj.user_vectors(model, nobody).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match="inputs has 3 columns but the model has 37"):
        sj.user_vectors(model, scipy.sparse.csr_array((2, 3)))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        sj.user_vectors(model, nobody, batch_size=0)


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_similar_items_by_cosine(temperature):
    model, data = model_of(temperature=temperature), random_data()
    kernel = model.output.kernel
    kernel[5] = jnp.zeros(HIDDEN)  # similar to none
    kernel[7] = 3 * kernel[4]  # the most similar to each other
    expected = cosines(sj.item_vectors(model))
    np.fill_diagonal(expected, -np.inf)
    items = np.array([4, 0, 5, 36])
    found = sj.similar_items(model, items, k=FEATURES)
    assert (found.ids[:, -1] == -1).all()  # all but itself
    assert found.ids[0, 0] == 7 and found.scores[0, 0] == pytest.approx(1)
    ids, scores = found.ids[:, :-1], found.scores[:, :-1]
    assert (np.sort(ids) == [np.setdiff1d(np.arange(FEATURES), i) for i in items]).all()
    wanted = np.take_along_axis(expected[items], ids, axis=1)
    np.testing.assert_allclose(scores, wanted, atol=2e-6)
    assert (np.diff(scores) <= 0).all()
    assert (scores[2] == 0).all()
    by_name = sj.similar_items(model, [f"item {i}" for i in items], 3, names=data)
    np.testing.assert_array_equal(by_name.ids, found.ids[:, :3])
    again = sj.similar_items(model, data.feature_names[items], 3, names=data)
    assert again.names(data)[0][0] == "item 7"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_that_are_not_finite(bad, tmp_path):
    model, data = model_of(), random_data()
    kernel = model.output.kernel
    kernel[3, 1] = bad
    kernel[5] = 1e30 * kernel[4]  # its square leaves float32
    kernel[6] = 1e-30 * kernel[4]
    with pytest.warns(UserWarning, match="the vectors of 1 of 37 items are not finite"):
        found = sj.similar_items(model, [4], k=FEATURES)
    assert (found.ids != 3).all() and (found.ids[0, -2:] == -1).all()
    np.testing.assert_allclose(found.scores[0, :2], 1, rtol=1e-6)
    assert set(found.ids[0, :2].tolist()) == {5, 6}
    with pytest.raises(FloatingPointError, match="the vector of item 3 is not finite"):
        sj.similar_items(model, [4, 3], k=2)
    with pytest.warns(UserWarning, match="1 of 37 vectors are not finite.* 'item 3'"):
        sj.save_vectors(tmp_path / "v.npy", sj.item_vectors(model), data.feature_names)
    if np.isnan(bad):
        with pytest.raises(FloatingPointError, match=r"weights .*kernel.* have NaN"):
            sj.export_predictor(model, tmp_path / "predictor", names=data)
        assert not (tmp_path / "predictor").exists()


@pytest.mark.parametrize(
    ("items", "names", "message"),
    [
        ([], None, "items is empty"),
        ([3, 37], None, "there is no item 37: the model has 37"),
        ([-1], None, "there is no item -1"),
        (["x"], None, "given by name, so names="),
        (["x"], ["x"], "1 names were given but the model has 37"),
        (
            ["item 3", "tea"],
            random_data(),
            "no item is called 'tea'; names are 'item 0'",
        ),
    ],
)
def test_items_that_do_not_exist(items, names, message):
    with pytest.raises(ValueError, match=message):
        sj.similar_items(model_of(), items, names=names)


def test_items_of_another_kind():
    with pytest.raises(TypeError, match="integers or names, got float64"):
        sj.similar_items(model_of(), np.array([1.5]))


def test_files(tmp_path):
    names = ["tea", "é", 'a"b,c\t']
    rows = np.random.default_rng(0).random((3, 5), np.float32)
    for ending in vectors.FORMATS:
        sj.save_vectors(tmp_path / f"v{ending}", np.zeros((3, 5), np.float32), names)
        sj.save_vectors(tmp_path / f"v{ending}", rows, names)
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), rows)
    with np.load(tmp_path / "v.npz") as arrays:
        np.testing.assert_array_equal(arrays["vectors"], rows)
        assert arrays["names"].tolist() == names
    table = pq.read_table(tmp_path / "v.parquet")
    assert table["name"].to_pylist() == names
    assert table["vector"].to_pylist() == rows.tolist()
    assert len(os.listdir(tmp_path)) == 3
    with pytest.raises(ValueError, match=r"v\.csv: vectors are written to \.npy, "):
        sj.save_vectors(tmp_path / "v.csv", rows, names)
    with pytest.raises(ValueError, match=r"expected vectors \[2, hidden\]"):
        sj.save_vectors(tmp_path / "v.npy", rows, names[:2])
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), rows)


def test_npz_refuses_names_that_it_cannot_hold(tmp_path):
    """A width for all names: 4 * 1,000 * 20,000 bytes; and no zeros at the end."""
    rows = np.zeros((1000, 2), np.float32)
    names = [str(i) for i in range(1000)]
    for bad, message in (
        (
            "x" * 20_000,
            "20,000 characters: they would take 80,000,000 bytes; write .par",
        ),
        ("tea\0", r"loses zero bytes at the end of names, for example of 'tea\\x00'"),
    ):
        with pytest.raises(ValueError, match=message):
            sj.save_vectors(tmp_path / "v.npz", rows, [*names[1:], bad])
        sj.save_vectors(tmp_path / "v.parquet", rows, [*names[1:], bad])
        assert pq.read_table(tmp_path / "v.parquet")["name"].to_pylist()[-1] == bad
    assert os.listdir(tmp_path) == ["v.parquet"]
    sj.save_vectors(tmp_path / "v.npz", rows, [*names[1:], "x" * 10_000])


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    path, limits = tmp_path / "v.npy", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError) as told:
            vectors.save_vectors(path, np.ones((2**10, 2**8), np.float32), range(2**10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.value.errno == errno.EFBIG and told.value.filename == str(path)
    assert not list(tmp_path.iterdir())
