"""DIN, whose histories are weighed by the candidate, beside float64 and a second formula."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.sparse import CSR

FEATURES = {"user": 30, "item": 50, "shop": 9, "had": "item", "shops": "shop"}
CONFIG = sj.DINConfig(dim=4, length=5, attention=(6, 3), hidden=(7,))


def lists(rng, batch, rows, longest):
    """Lists of 0 to `longest` ids: none of an example, duplicates, and a very long one."""
    lengths = rng.integers(0, longest + 1, batch)
    lengths[:2] = 0, 40
    indptr = np.append(0, np.cumsum(lengths)).astype(np.int32)
    ids = rng.integers(0, rows, indptr[-1]).astype(np.int32)
    return CSR.tree_unflatten(rows, (None, ids, indptr, None))


def inputs(batch=16, num_dense=2):
    rng = np.random.default_rng(0)
    ids: dict[str, Any] = {
        "user": rng.integers(0, 30, batch).astype(np.int32),
        "item": rng.integers(-1, 50, batch).astype(np.int32),
        "shop": rng.integers(0, 9, (batch, 1)).astype(np.int32),
        "had": lists(rng, batch, 50, 8),
        "shops": lists(rng, batch, 9, 3),
    }
    dense = rng.standard_normal((batch, num_dense)).astype(np.float32)
    return dense, ids, rng.integers(0, 2, batch).astype(np.float32)


def built(config=CONFIG, num_dense=2, features=FEATURES):
    """With parameters none of which is zero."""
    model = sj.embeddings.build_click_model(
        config, num_dense=num_dense, features=features, rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = rng.standard_normal(variable.shape) / 2
        variable.set_value(jnp.asarray(values, jnp.float32))
    return model


def through(layers, x):
    for i, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        x = x if i == len(layers) - 1 else np.maximum(x, 0)
    return x


def oracle(model, dense, ids):
    """The formula of the docstring, example by example, in float64."""

    def wide(variable):
        return np.asarray(variable[...], np.float64)

    def stack(module):
        return [(wide(layer.kernel), wide(layer.bias)) for layer in module.layers]

    units = {
        name: stack(m)
        for (name, _), m in zip(model.histories, model.attention, strict=True)
    }
    tables = {name: wide_table(model, name) for name in ("user", "item", "shop")}
    scores = []
    for row in range(len(dense)):
        parts = [np.asarray(dense[row], np.float64)]
        for name, of in FEATURES.items():
            if isinstance(of, int):
                id_ = int(ids[name].reshape(-1)[row])
                parts.append(tables[name][id_] * (id_ >= 0))
                continue
            candidate = int(ids[of].reshape(-1)[row])
            c = tables[of][candidate] * (candidate >= 0)
            x = ids[name]
            had = x.indices[x.indptr[row] : x.indptr[row + 1]]
            total = np.zeros(model.config.dim)
            for each in had[-model.config.length :]:
                e = tables[of][each]
                unit = np.concatenate([e, c, e - c, e * c])
                total += through(units[name], unit)[0] * e
            parts.append(total)
        scores.append(through(stack(model.hidden), np.concatenate(parts))[0])
    return np.array(scores)


def wide_table(model, name):
    return np.asarray(model.embeddings.table(name), np.float64)


def test_scores_are_those_of_the_formula():
    dense, ids, _ = inputs()
    model = built()
    np.testing.assert_allclose(
        model(dense, ids), oracle(model, dense, ids), rtol=2e-5, atol=2e-5
    )
    assert sj.DINConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG
    # On the device lists are cut as on the host.
    on_device = jax.tree.map(jnp.asarray, ids)
    np.testing.assert_allclose(
        nnx.jit(lambda m, d, i: m(d, i))(model, dense, on_device),
        model(dense, ids),
        rtol=1e-5,
        atol=1e-5,
    )


def test_histories_in_arrays_are_cut_to_their_last_ids():
    dense, ids, _ = inputs()
    model = built()
    widths = {"had": 40, "shops": 40}
    arrays = dict(ids)
    for name, width in widths.items():
        x = ids[name]
        array = np.full((len(dense), width), -1, np.int32)
        for row in range(len(dense)):
            own = x.indices[x.indptr[row] : x.indptr[row + 1]]
            array[row, : len(own)] = own
        arrays[name] = array
    want = model(dense, ids)
    for given in (arrays, jax.tree.map(jnp.asarray, arrays)):
        np.testing.assert_allclose(model(dense, given), want, rtol=1e-5, atol=1e-5)


def test_a_predictor_cuts_histories_as_the_model_does(tmp_path):
    dense, ids, _ = inputs()
    model = built()
    ids["had"] = np.full((16, 9), -1, np.int32)
    for row in range(16):
        ids["had"][row, : row % 10] = np.arange(row % 10)
    sj.export_predictor(model, tmp_path / "din.predictor", batch_size=16)
    found = sj.load_predictor(tmp_path / "din.predictor").predict(dense, ids)
    want = jax.nn.sigmoid(model(dense, ids))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_formula():
    """By finite differences of the float64 oracle, for some numbers of each array."""
    dense, ids, clicks = inputs(6)
    model = built()

    def loss_of(scores):
        return np.mean(np.logaddexp(0, scores) - clicks * scores)

    def loss_fn(model):
        logits = model(dense, ids)
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    gradient = nnx.to_flat_state(nnx.grad(loss_fn)(model))
    rng, step = np.random.default_rng(3), 1e-3
    found = {path: np.asarray(leaf[...]) for path, leaf in gradient}
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert found.keys() == variables.keys()
    for path, slope in found.items():
        used = np.argwhere(np.abs(slope) > 1e-4)
        for at in map(tuple, rng.permutation(used)[:2]):
            around = []
            for sign in (1, -1):
                moved = nnx.clone(model)
                variable = dict(nnx.to_flat_state(nnx.state(moved, nnx.Param)))[path]
                variable.set_value(variable[...].at[at].add(sign * step))
                nnx.update(moved, nnx.from_flat_state([(path, variable)]))
                around.append(loss_of(oracle(moved, dense, ids)))
            want = (around[0] - around[1]) / (2 * step)
            np.testing.assert_allclose(slope[at], want, rtol=0.05, atol=2e-4)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, dense, ids, click):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(dense, ids), click).mean()

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def test_training_on_a_mesh_has_the_losses_of_one_device():
    losses = []
    for mesh in (sj.make_mesh(), sj.make_mesh(data=2, model=4)):
        with jax.set_mesh(mesh):
            model = sj.embeddings.build_click_model(
                CONFIG,
                num_dense=2,
                features=FEATURES,
                plan={"item": "rows"},
                rngs=nnx.Rngs(0),
            )
            optimizer = sj.Optimizer(
                model, sj.optimizers.rowwise_adagrad(0.1), dense=optax.adam(1e-2)
            )
            batch = inputs()
            losses.append([float(step(model, optimizer, *batch)) for _ in range(8)])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < 0.8 * losses[0][0]


def test_a_model_without_histories():
    with pytest.raises(ValueError, match="DIN needs a history: a column of lists"):
        built(features={"user": 30, "item": 50})
    with pytest.raises(ValueError, match='longer is "error" or "last"'):
        sj.embeddings.FeatureConfig("item", longer="first")  # pyrefly: ignore
    with pytest.raises(ValueError, match="give combiner=None and length"):
        sj.embeddings.FeatureConfig("item", longer="last")
