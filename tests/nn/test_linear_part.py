"""The linear part of a network: EASE of a low rank, without training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj
from sparsejax.nn.closed_form import closed_form, on_device, on_host
from sparsejax.nn.config import LinearConfig
from sparsejax.nn.linear_part import LinearPart

ROWS, ITEMS = 90, 40
WHOLE = LinearConfig(rank=ITEMS, ridge=20.0, popularity=0.0, weight=1.5)


def some_data(*, valued=False):
    """Data with three tastes: one row and one item have no entries, one row has all other
    items.
    """
    rng = np.random.default_rng(0)
    likely = np.where(np.arange(ITEMS) % 3 == np.arange(ROWS)[:, None] % 3, 0.4, 0.05)
    data = (rng.random((ROWS, ITEMS)) < likely).astype(float)
    if valued:
        data *= rng.uniform(0.5, 2, data.shape)
    data[5], data[7] = 0, 1
    data[:, 11] = 0
    return scipy.sparse.csr_array(data)


def normalised(data, popularity):
    """The matrix that is decomposed, as a dense float64 array."""
    dense = data.toarray()
    counts = np.maximum((dense != 0).sum(axis=0), 1)
    damping = (counts / counts.mean()) ** -popularity
    return dense / np.maximum(np.linalg.norm(dense, axis=1), 1e-30)[:, None] * damping


def mean_length(data):
    """The mean number of entries in non-empty rows."""
    lengths = (data.toarray() != 0).sum(axis=1)
    return lengths[lengths > 0].mean()


def up_to_a_factor(got, want):
    """Scales `got` to the unit of `want`: scores have an arbitrary factor."""
    return got * (got * want).sum() / np.square(got).sum()


def test_rows_of_all_items_and_zeros_that_are_stored():
    rng = np.random.default_rng(0)
    data = scipy.sparse.csr_array((rng.random((60, 6)) < 0.4).astype(np.float32))
    wanted = closed_form(data, LinearConfig(rank=6))
    stored = data.toarray()
    stored = scipy.sparse.csr_array(
        (stored.reshape(-1), np.tile(np.arange(6), 60), 6 * np.arange(61))
    )
    for got, want in zip(
        closed_form(stored, LinearConfig(rank=6)), wanted, strict=True
    ):
        np.testing.assert_allclose(got, want)
    # Of rows that have everything, no item can be told from the others.
    everything = scipy.sparse.csr_array(np.ones((5, 3)))
    _, scale = closed_form(everything, LinearConfig(rank=3))
    assert not scale.any()


def test_without_a_ridge_it_is_finite():
    with np.errstate(divide="raise", invalid="raise"):
        arrays = closed_form(some_data()[:20], LinearConfig(rank=ITEMS, ridge=0.0))
    assert all(np.isfinite(array).all() for array in arrays)


@pytest.mark.parametrize(("popularity", "valued"), [(0.0, False), (0.5, True)])
def test_is_ease_on_items_that_a_row_does_not_have(popularity, valued):
    data = some_data(valued=valued)
    config = LinearConfig(rank=ITEMS, ridge=20.0, popularity=popularity, weight=1.5)
    kernel, scale = (np.asarray(a, np.float64) for a in closed_form(data, config))
    a = normalised(data, popularity)
    ridge = 20.0 / mean_length(data)
    inverse = np.linalg.inv(a.T @ a + ridge * np.eye(ITEMS))
    ease = -(a @ inverse) / np.diag(inverse)
    scores = normalised(data, 0.0) @ kernel @ kernel.T * scale
    new = data.toarray() == 0
    np.testing.assert_allclose(
        up_to_a_factor(scores[new], ease[new]), ease[new], rtol=1e-3, atol=1e-5
    )


def test_its_unit_is_the_most_likely_one_for_rows_and_items_that_are_left_out():
    data = some_data()
    config = LinearConfig(rank=ITEMS, ridge=20.0, popularity=0.25, weight=1.0)
    kernel, scale = (np.asarray(a, np.float64) for a in closed_form(data, config))
    a, plain = normalised(data, 0.25), normalised(data, 0.0)
    ridge = 20.0 / mean_length(data)

    def inverse(rows):
        return np.linalg.inv(rows.T @ rows + ridge * np.eye(ITEMS))

    c = inverse(a)
    ease = -(a @ c) / np.diag(c)
    got, new = plain @ kernel @ kernel.T * scale, data.toarray() == 0
    damping = (a.sum(axis=0) + 1e-30) / (plain.sum(axis=0) + 1e-30)
    unit = (got[new] * (ease / damping)[new]).sum() / np.square(
        (ease / damping)[new]
    ).sum()
    wanted, others = [], []
    for row in range(ROWS):
        (own,) = np.nonzero(~new[row])
        if len(own) < 2:
            continue
        c = inverse(np.delete(a, row, axis=0))
        for item in own:
            shorter = np.where(np.arange(ITEMS) == item, 0, a[row])
            scores = -(shorter @ c) / np.diag(c) / damping
            # The norm of the row without the item.
            scores *= np.sqrt(len(own) / (len(own) - 1))
            wanted.append(scores[item])
            rest = (
                -(a[row] @ c)
                / np.diag(c)
                / damping
                * np.sqrt(len(own) / (len(own) - 1))
            )
            others.append(np.where(new[row], rest, -np.inf))
    wanted, others = np.array(wanted), np.array(others)

    def cost(unit):
        rest = np.exp(unit * others).sum(axis=1)
        return (np.log(np.exp(unit * wanted) + rest) - unit * wanted).mean()

    assert cost(unit) < min(cost(unit * 1.3), cost(unit / 1.3))


def test_a_lower_rank_keeps_the_largest_components():
    data = some_data()
    kernel, scale = (
        np.asarray(a, np.float64)
        for a in closed_form(data, LinearConfig(rank=4, ridge=20.0, popularity=0.0))
    )
    a = normalised(data, 0.0)
    _, sigma, q = np.linalg.svd(a, full_matrices=False)
    diagonal = np.square(a).sum(axis=0)
    ridge = 20.0 / mean_length(data)
    u = q[:4].T * (sigma / np.sqrt(sigma**2 + ridge))[:4]
    left_out = diagonal - np.square(q[:4].T) @ sigma[:4] ** 2
    error = 1 - np.square(u).sum(axis=1)
    error -= left_out / (ridge + left_out.sum() / (ITEMS - 4))
    want = u @ u.T / error
    got = kernel @ kernel.T * scale
    np.testing.assert_allclose(up_to_a_factor(got, want), want, rtol=1e-3, atol=1e-5)


def test_one_item_is_in_nearly_all_rows_and_most_are_in_none():
    dense = np.zeros((3000, 400))
    dense[:, 0] = 1
    dense[:40, 1:100] = np.random.default_rng(0).random((40, 99)) < 0.3
    kernel, scale = closed_form(
        scipy.sparse.csr_array(dense), LinearConfig(rank=300, popularity=0.0)
    )
    assert np.all(np.isfinite(kernel)) and np.all(np.isfinite(scale))
    a = dense / np.linalg.norm(dense, axis=1)[:, None]
    ridge = 300 / mean_length(scipy.sparse.csr_array(dense))
    want = np.eye(400) - ridge * np.linalg.inv(a.T @ a + ridge * np.eye(400))
    np.testing.assert_allclose(kernel @ kernel.T, want, atol=2e-3)


@pytest.mark.parametrize("shape", [(0, 6), (3, 6), (1, 1)])
def test_little_data(shape):
    part = LinearPart(LinearConfig(rank=4), shape[1])
    part.set_from(scipy.sparse.csr_array(shape))
    assert np.all(np.isfinite(part.kernel[...])) and np.all(part.scale[...] == 0)


@pytest.mark.parametrize("decomposed", [on_host, on_device])
@pytest.mark.parametrize("items", [40, 5000])  # with a matrix of all pairs, or without
def test_decompositions(monkeypatch, decomposed, items):
    monkeypatch.setattr("sparsejax.nn.closed_form.BLOCK_ROWS", 32)
    data = some_data().astype(np.float32)
    data.resize((ROWS, items))
    squares, q = decomposed(data, ITEMS)  # one item has no entries
    want = np.linalg.svd(data.toarray(), compute_uv=False)[: ITEMS - 1] ** 2
    np.testing.assert_allclose(squares[:-1], want, rtol=1e-3)
    q = q[:, :-1]
    np.testing.assert_allclose(q.T @ q, np.eye(ITEMS - 1), atol=1e-3)
    np.testing.assert_allclose(data.T @ (data @ q), q * want, atol=0.03)


def a_model(**options):
    config = sj.NetworkConfig.autoencoder((6,), linear=WHOLE, **options)
    return sj.build(config, some_data())


@pytest.mark.parametrize("temperature", [0.2, None])
def test_scores_are_sums(temperature):
    model, optimizer = a_model(temperature=temperature)
    data, part = some_data(), model.output.linear
    assert part is not None
    sj.fit(model, optimizer, data, num_epochs=2, batch_size=32)
    want = [np.asarray(a) for a in closed_form(data, WHOLE)]
    np.testing.assert_array_equal(part.kernel[:ITEMS], want[0])  # it is not trained
    np.testing.assert_array_equal(part.scale[:ITEMS], want[1])
    x = sj.CSR.from_scipy(data)
    layers = model.output.scores(model.encode(x, deterministic=True))
    linear = normalised(data, 0.0) @ want[0] @ want[0].T * want[1]
    scores = np.asarray(model(x, deterministic=True))
    np.testing.assert_allclose(scores, layers + linear, rtol=1e-4, atol=1e-4)
    _, best = model.top_k(x, 3, exclude=x)
    hidden = np.where(data.toarray() != 0, -np.inf, scores)
    chosen = np.sort(hidden, axis=1)[:, :-4:-1]
    np.testing.assert_allclose(best, chosen, rtol=1e-4, atol=1e-4)
    some = model.item_scores(x, jnp.tile(jnp.arange(4), (ROWS, 1)))
    np.testing.assert_allclose(some, scores[:, :4], rtol=1e-4, atol=1e-4)


def test_on_a_mesh_it_is_the_same():
    def results():
        model, optimizer = a_model()
        data = some_data()
        sj.fit(model, optimizer, data, num_epochs=1, batch_size=64, fused=True)
        return sj.recommend(model, data, k=4, exclude=data).scores

    want = results()
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        np.testing.assert_allclose(results(), want, rtol=1e-3, atol=1e-3)


def test_a_resumed_training_has_it(tmp_path):
    def trained(epochs, seed, **options):
        config = sj.NetworkConfig.autoencoder((6,), linear=WHOLE)
        # Another seed and other data: the checkpoint has all that is needed.
        model, optimizer = sj.build(
            config, some_data() if seed == 0 else some_data() * 2
        )
        sj.fit(
            model, optimizer, some_data(), num_epochs=epochs, checkpoint_dir=tmp_path, **options
        )  # fmt: skip
        assert model.output.linear is not None
        return np.asarray(model.output.linear.scale)

    np.testing.assert_array_equal(trained(1, 0), trained(2, 1, resume=True))


def test_configuration():
    config = sj.NetworkConfig.autoencoder((6,), linear=WHOLE)
    assert sj.NetworkConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="linear: ridge -1"):
        LinearConfig(ridge=-1)
    with pytest.raises(ValueError, match='linear: unknown key "rang"'):
        sj.NetworkConfig.from_json(config.to_json() | {"linear": {"rang": 3}})
    with pytest.raises(ValueError, match="as many items as features"):
        sj.build(config, scipy.sparse.csr_array((3, 5)), targets=scipy.sparse.csr_array((3, 4)))  # fmt: skip
