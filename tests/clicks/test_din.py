"""DIN and TIN, which weight a history by the candidate, compared with float64."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_steps import step
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings.feature_batch import CandidateBatch
from sparsejax.sparse import CSR

FEATURES = {"user": 30, "item": 50, "shop": 9, "had": "item", "shops": "shop"}
CONFIG = sj.DINConfig(dim=4, length=5, attention=(6, 3), hidden=(7,))
TIMED = sj.TINConfig(dim=4, length=5, beside=(("had", "days"),), hidden=(7,))
# For this length, a CPU computes attention in another form.
LONG = dataclasses.replace(CONFIG, length=40)
FEATURES_OF = {CONFIG: FEATURES, TIMED: FEATURES | {"days": 12}, LONG: FEATURES}
both = pytest.mark.parametrize("config", [CONFIG, TIMED], ids=["din", "tin"])
all_forms = pytest.mark.parametrize("config", FEATURES_OF, ids=["din", "tin", "long"])


def lists(rng, batch, rows, longest):
    """Lists of 0 to `longest` ids: empty lists, duplicates, and a very long list."""
    lengths = rng.integers(0, longest + 1, batch)
    lengths[:2] = 0, 40
    indptr = np.append(0, np.cumsum(lengths)).astype(np.int32)
    ids = rng.integers(0, rows, indptr[-1]).astype(np.int32)
    return CSR.tree_unflatten(rows, (None, ids, indptr, None))


def inputs(batch=16, num_dense=2, config=CONFIG):
    rng = np.random.default_rng(0)
    ids: dict[str, Any] = {
        "user": rng.integers(0, 30, batch).astype(np.int32),
        "item": rng.integers(-1, 50, batch).astype(np.int32),
        "shop": rng.integers(0, 9, (batch, 1)).astype(np.int32),
        "had": lists(rng, batch, 50, 8),
        "shops": lists(rng, batch, 9, 3),
    }
    if config == TIMED:
        indptr = ids["had"].indptr
        days = rng.integers(0, 12, indptr[-1]).astype(np.int32)
        ids["days"] = CSR.tree_unflatten(12, (None, days, indptr, None))
    dense = rng.standard_normal((batch, num_dense)).astype(np.float32)
    return dense, ids, rng.integers(0, 2, batch).astype(np.float32)


def built(config=CONFIG, num_dense=2, features=None):
    """A model without parameters that are 0."""
    model = sj.clicks.build_click_model(
        config,
        num_dense=num_dense,
        features=features or FEATURES_OF[config],
        rngs=nnx.Rngs(0),
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
        name: m for (name, _), m in zip(model.histories, model.attention, strict=True)
    }
    names = [*model.num_ids]
    tables = {n: wide_table(model, n) for n in names if n not in model.like}

    def of(name, row):
        """The last ids of a list, in full and as vectors."""
        x = ids[name]
        found = x.indices[x.indptr[row] : x.indptr[row + 1]][-model.config.length :]
        return tables[model.like.get(name, name)][found] * (found >= 0)[:, None]

    def pooled(name, row):
        e, unit = of(name, row), units[name]
        if model.config.model == "din":
            layers = stack(unit)
            units_of = [np.concatenate([x, c, x - c, x * c]) for x in e]
            return sum(
                (through(layers, u)[0] * x for u, x in zip(units_of, e, strict=True)),
                0 * c,
            )
        known, places = e.any(1), wide(unit.vectors)
        for history, column in model.config.beside:
            e = e + of(column, row) if history == name else e
        e, query = e + places[1 : 1 + len(e)][::-1], c + places[0]
        a = np.exp(e @ query / np.sqrt(model.config.dim)) * known
        return (a[:, None] * e).sum(0) * query / max(a.sum(), 1e-30)

    scores = []
    for row in range(len(dense)):
        parts = [np.asarray(dense[row], np.float64)]
        for name in names:
            if name == "days":
                continue
            at = int(ids[model.like.get(name, name)].reshape(-1)[row])
            c = tables[model.like.get(name, name)][at] * (at >= 0)
            parts.append(pooled(name, row) if name in model.like else c)
        scores.append(through(stack(model.hidden), np.concatenate(parts))[0])
    return np.array(scores)


def wide_table(model, name):
    return np.asarray(model.embeddings.table(name), np.float64)


@all_forms
def test_scores_are_those_of_the_formula(config):
    dense, ids, _ = inputs(config=config)
    model = built(config)
    np.testing.assert_allclose(
        model(dense, ids), oracle(model, dense, ids), rtol=2e-5, atol=2e-5
    )
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config
    # On the device lists are cut as on the host.
    on_device = jax.tree.map(jnp.asarray, ids)
    np.testing.assert_allclose(
        nnx.jit(lambda m, d, i: m(d, i))(model, dense, on_device),
        model(dense, ids),
        rtol=1e-5,
        atol=1e-5,
    )


@both
def test_histories_in_arrays_are_cut_to_their_last_ids(config):
    dense, ids, _ = inputs(config=config)
    model = built(config)
    # -1 marks an unknown id, as in arrays. Other ids keep their positions.
    ids["had"].indices[ids["had"].indptr[2] - 2] = -1
    width = 40
    arrays = dict(ids)
    for name in {"had", "shops", "days"} & ids.keys():
        x = ids[name]
        array = np.full((len(dense), width), -1, np.int32)
        for row in range(len(dense)):
            own = x.indices[x.indptr[row] : x.indptr[row + 1]]
            array[row, : len(own)] = own
        arrays[name] = array
    want = oracle(model, dense, ids)
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


@all_forms
def test_gradients_are_those_of_the_formula(config):
    """By finite differences of the float64 oracle, for some numbers of each array."""
    dense, ids, clicks = inputs(6, config=config)
    model = built(config)

    def loss_of(scores):
        return np.mean(np.logaddexp(0, scores) - clicks * scores)

    def loss_fn(model):
        logits = model(dense, ids)
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    gradient = nnx.to_flat_state(nnx.grad(loss_fn)(model))
    rng, width = np.random.default_rng(3), 1e-3
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
                variable.set_value(variable[...].at[at].add(sign * width))
                nnx.update(moved, nnx.from_flat_state([(path, variable)]))
                around.append(loss_of(oracle(moved, dense, ids)))
            want = (around[0] - around[1]) / (2 * width)
            np.testing.assert_allclose(slope[at], want, rtol=0.05, atol=2e-4)


@both
def test_training_on_a_mesh_has_the_losses_of_one_device(config):
    losses = []
    for mesh in (sj.make_mesh(), sj.make_mesh(data=2, model=4)):
        with jax.set_mesh(mesh):
            model = sj.clicks.build_click_model(
                config,
                num_dense=2,
                features=FEATURES_OF[config],
                plan={"item": "rows"},
                rngs=nnx.Rngs(0),
            )
            optimizer = sj.Optimizer(
                model, sj.optimizers.rowwise_adagrad(0.1), dense=optax.adam(1e-2)
            )
            batch = inputs(config=config)
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
    for pair in (("had", "item"), ("user", "shop"), ("had", "day")):
        with pytest.raises(ValueError, match="beside has pairs of a history and"):
            built(sj.TINConfig(beside=(pair,)), features=FEATURES)
    with pytest.raises(TypeError, match="beside must be pairs of a history and"):
        sj.TINConfig(beside=("had",))  # pyrefly: ignore


def test_a_column_beside_a_history_is_as_long(tmp_path):
    column = sj.data.VocabularyColumn
    schema = sj.ClickSchema(
        "click",
        ids={"item": column(), "had": column(like="item"), "days": column()},
    )
    shown: dict[str, Any] = {"click": [0, 1], "item": ["a", "b"]}
    shown |= {"had": [["a"], ["a", "b"]], "days": [["1"], ["2"]]}
    data = sj.read_clicks(shown, schema)
    config = sj.TINConfig(dim=2, beside=(("had", "days"),))
    model, optimizer = sj.build(config, data, sj.optimizers.sgd(0.1))
    wrong = "example 1: 2 ids in 'had', but 1 in 'days'"
    with pytest.raises(ValueError, match=wrong):
        sj.fit(model, optimizer, data, num_epochs=1, batch_size=2)
    data.save(tmp_path / "clicks.parquet")
    scanned = sj.data.scan_clicks(tmp_path / "clicks.parquet")
    for use in (sj.predict, lambda *x: sj.fit(x[0], optimizer, x[1], batch_size=2)):
        with pytest.raises(ValueError, match=wrong):
            use(model, scanned)
    right = {**shown, "days": [["1"], ["2", "1"]]}
    names = sj.read_clicks(right, schema)
    sj.export_predictor(model, tmp_path / "tin", batch_size=2, names=names)
    predictor = sj.load_predictor(tmp_path / "tin")
    with pytest.raises(ValueError, match=wrong):
        predictor.predict_records(shown)
    assert predictor.predict_records(right).shape == (2,)


def test_the_last_of_a_history_counts_more():
    """A click is likely if the candidate is the last of four, which a DIN cannot see."""
    rng = np.random.default_rng(0)
    had = rng.integers(0, 6, (6000, 4)).astype(np.int32)
    item = had[np.arange(6000), rng.integers(0, 4, 6000)]
    dense, click = np.zeros((6000, 0), np.float32), (item == had[:, -1]) * 1.0
    found = []
    for config in (sj.DINConfig(length=4), sj.TINConfig(length=4)):
        model = built(config, 0, {"item": 6, "had": "item"})
        optimizer = sj.Optimizer(model, sj.optimizers.adam(0.01))
        for at in range(0, 5000, 100):
            part = slice(at, at + 100)
            ids = {"item": item[part], "had": had[part]}
            step(model, optimizer, dense[part], ids, click[part])
        part = slice(5000, None)
        scores = model(dense[part], {"item": item[part], "had": had[part]})
        found.append(sj.metrics.auc(np.asarray(scores), click[part]))
    assert found[1] > found[0] + 0.1


def test_candidates_share_the_history_of_their_request() -> None:
    rng = np.random.default_rng(0)
    config = sj.DINConfig(dim=4, length=5, attention=(6, 3), hidden=(4,))
    model: Any = sj.clicks.build_click_model(
        config, num_dense=0, features={"item": 20, "had": "item"}, rngs=nnx.Rngs(0)
    )
    params = jax.tree.map(lambda x: 3 * x + 0.5, nnx.state(model, nnx.Param))
    nnx.update(model, params)
    had = rng.integers(-1, 20, (2, 5)).astype(np.int32)
    item = rng.integers(0, 20, (6, 1)).astype(np.int32)
    nothing = np.zeros((2, 0), np.int32), np.zeros((6, 0), np.int32)
    batch = CandidateBatch(
        requests={"item": nothing[0], "had": had},
        candidates={"item": item, "had": nothing[1]},
    )
    each = {"item": item, "had": np.repeat(had, 3, axis=0)}
    dense = np.zeros((6, 0), np.float32)
    np.testing.assert_allclose(model(dense, batch), model(dense, each), rtol=1e-5)
