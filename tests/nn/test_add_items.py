"""A trained model gets more items, and its vectors of old items do not change."""

import jax
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.nn.config import LinearConfig

KNOWN, ADDED, ROWS = 250, 25, 128


def interactions(items=KNOWN + ADDED):
    """Draws rows of two kinds: each prefers the items of its parity."""
    rng = np.random.default_rng(0)
    likely = (np.arange(ROWS)[:, None] + np.arange(items)[None]) % 2 == 0
    drawn = rng.random((ROWS, items)) < np.where(likely, 0.15, 0.005)
    drawn[3] = False
    return scipy.sparse.csr_array(drawn.astype(np.float32))


def wider(matrix, columns):
    shape = matrix.shape[0], columns
    return scipy.sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), shape)


def build(rule, columns=KNOWN, **options):
    config = sj.NetworkConfig.autoencoder((16,), corruption=0.0, **options)
    return sj.build(config, interactions()[:, :columns], rule)


def arrays_of(*modules):
    flat = nnx.to_flat_state(nnx.state(modules))
    return {path: np.asarray(leaf[...]) for path, leaf in flat if path[-1] != "key"}


def check_known_rows(got, wanted):
    """Checks that old rows are bitwise unchanged; 512 and 256 are numbers of padded rows."""
    assert got.keys() == wanted.keys()
    for path, before in wanted.items():
        after = got[path]
        if before.ndim and len(before) == 256:
            assert after.shape[1:] == before.shape[1:], path
            before, after = before[:KNOWN], after[:KNOWN]
        np.testing.assert_array_equal(after, before, str(path))


@pytest.mark.parametrize(
    ("rule", "options"),
    [(sj.optimizers.adam(1e-2), {}), (sj.optimizers.adamw(1e-2), {"tied": True})],
    ids=["adam", "adamw-tied"],
)
def test_a_trained_model_learns_new_items_and_keeps_the_known_ones(rule, options):
    everything = interactions()
    before = everything[:, :KNOWN]
    model, optimizer = build(rule, **options)
    sj.fit(model, optimizer, before, num_epochs=4, batch_size=64)
    wanted, steps = arrays_of(model, optimizer), int(optimizer.step[...])
    found = sj.recommend(model, before, k=10, exclude=before, optimizer=optimizer)

    model.add_items(ADDED, optimizer=optimizer)

    assert (model.num_items, model.num_features) == (KNOWN + ADDED,) * 2
    got = arrays_of(model, optimizer)
    check_known_rows(got, wanted)
    for path, array in got.items():
        if path[-1] == "last_step":  # new rows have missed nothing
            first = steps if rule.weight_decay else -1
            assert (array[KNOWN : KNOWN + ADDED] == first).all()
    shown = wider(before, KNOWN + ADDED)
    k = 10 + ADDED
    again = sj.recommend(model, shown, k=k, exclude=shown, optimizer=optimizer)
    for ids, before_ids in zip(again.ids, found.ids, strict=True):
        np.testing.assert_array_equal(ids[ids < KNOWN][:10], before_ids)

    sj.fit(model, optimizer, everything, num_epochs=4, batch_size=64)
    new = np.arange(KNOWN, KNOWN + ADDED)
    scores = model(sj.CSR.from_scipy(everything), deterministic=True)[:, new]
    alike = (np.arange(ROWS)[:, None] + new[None]) % 2 == 0
    assert scores[alike].mean() > scores[~alike].mean() + 0.1
    for parameter in (model.first.kernel, model.output.kernel):
        assert not np.asarray(parameter[...])[KNOWN + ADDED :].any()


@pytest.mark.parametrize(
    ("rule", "added"),
    [(sj.optimizers.adagrad, 4), (sj.optimizers.rowwise_adagrad, ADDED)],
    ids=["adagrad", "rowwise"],
)
def test_new_rows_are_means_and_within_the_padding_too(rule, added):
    linear = LinearConfig(rank=8)
    model, optimizer = build(rule(0.1), linear=linear)
    bias = np.linspace(-1, 2, KNOWN, dtype=np.float32)
    bias = np.pad(bias, (0, 256 - KNOWN))
    layer = model.output
    assert layer.bias is not None and layer.linear is not None
    layer.bias.set_value(jax.numpy.asarray(bias))
    wanted = arrays_of(model, optimizer)
    model.add_items(added, optimizer=optimizer)
    got = arrays_of(model, optimizer)
    check_known_rows(got, wanted)
    kernel = np.asarray(model.output.kernel[...])
    np.testing.assert_allclose(
        kernel[KNOWN : KNOWN + added],
        [kernel[:KNOWN].mean(0)] * added,
        rtol=1e-5,
        atol=1e-7,
    )
    np.testing.assert_allclose(layer.bias[KNOWN : KNOWN + added], 0.5, rtol=1e-5)
    assert not np.asarray(layer.linear.scale[KNOWN:]).any()
    layer.linear.set_from(interactions()[:, : KNOWN + added])
    assert np.asarray(layer.linear.scale[KNOWN : KNOWN + added]).all()
    # Adagrad's sums do not begin with 0.
    fresh = arrays_of(*build(rule(0.1), KNOWN + added, linear=linear))
    for path in got:
        if "rows" in path or "dense" in path:
            np.testing.assert_array_equal(got[path], fresh[path], str(path))


def test_a_linear_part_of_few_items_gets_a_higher_rank():
    config = sj.NetworkConfig.autoencoder((4,), linear=LinearConfig(rank=64))
    model = sj.FeedForward(config, inputs=20, outputs=20, rngs=nnx.Rngs(0))
    model.add_items(30)
    linear = model.output.linear
    assert linear is not None and linear.kernel.shape == (256, 50)
    linear.set_from(interactions(50))
    assert np.asarray(linear.kernel[:50, 20:]).any()


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_on_a_mesh_as_on_one_device(shape):
    rule = sj.optimizers.adamw(1e-2)
    model, optimizer = build(rule)
    wanted = arrays_of(model, optimizer)
    model.add_items(ADDED, optimizer=optimizer)
    wanted = arrays_of(model, optimizer)
    with jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1])):
        model, optimizer = build(rule)
        lies = {p: v[...].sharding for p, v in nnx.to_flat_state(nnx.state(model))}
        model.add_items(ADDED, optimizer=optimizer)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            assert variable[...].sharding.is_equivalent_to(
                lies[path], variable[...].ndim
            ), path
        got = arrays_of(model, optimizer)
    assert got.keys() == wanted.keys()
    for path in wanted:
        np.testing.assert_allclose(
            got[path], wanted[path], rtol=1e-5, atol=1e-6, err_msg=str(path)
        )


def test_features_that_are_no_items():
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=10, outputs=20, rngs=nnx.Rngs(0))
    model.add_items(5, features=0)
    assert (model.num_items, model.num_features) == (25, 10)
    with pytest.raises(ValueError, match="negative"):
        model.add_items(-1)
    tied = sj.NetworkConfig.autoencoder((4,), tied=True)
    model = sj.FeedForward(tied, inputs=10, outputs=10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="items of this model are its features"):
        model.add_items(5, features=0)
    model.output.fold()
    with pytest.raises(ValueError, match="folded"):
        model.add_items(5)


def test_state_of_another_shape_is_refused():
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=250, outputs=250, rngs=nnx.Rngs(0))
    flat = optax.flatten(optax.adam(1e-3))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3), dense=flat)
    with pytest.raises(NotImplementedError, match="dense"):
        model.add_items(10, optimizer=optimizer)
