"""Click models compared with NumPy in float64; both have parameters with equal names."""

import itertools
import json
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_steps import step
from flax import nnx
from tolerances import tolerance

import sparsejax as sj

FEATURES = {"user": 30, "item": 50, "tags": 20}
CONFIGS = [
    sj.DLRMConfig(dim=4, bottom=(5,), top=(6,)),
    sj.DCNConfig(dim=4, cross=2, rank=3, hidden=(6,)),
    sj.DCNConfig(dim=4, cross=1, hidden=(6,), combiner="mean"),
    sj.DeepFMConfig(dim=4, hidden=(6,)),
    sj.WideDeepConfig(dim=4, hidden=(6, 5)),
]


def inputs(num_dense, batch=16):
    rng = np.random.default_rng(0)
    ids = {
        "user": rng.integers(0, 30, batch).astype(np.int32),
        "item": rng.integers(-1, 50, (batch, 1)).astype(np.int32),
        "tags": rng.integers(-1, 20, (batch, 3)).astype(np.int32),
    }
    dense = rng.standard_normal((batch, num_dense)).astype(np.float32)
    return dense, ids, rng.integers(0, 2, batch).astype(np.float32)


def build(config, num_dense=3):
    """A model without parameters that are 0."""
    sizes = {"num_dense": num_dense, "features": FEATURES}
    model = sj.clicks.build_click_model(config, **sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = rng.standard_normal(variable.shape) / 2
        variable.set_value(jnp.asarray(values, jnp.float32))
    return model


def wide(variable):
    return np.asarray(variable[...], np.float64)


def rows_of(embeddings, ids, combiner="sum"):
    """The summed rows, `[batch, features, dim]`."""
    parts = []
    for name, value in ids.items():
        table = np.asarray(embeddings.table(name), np.float64)
        value = value.reshape(len(value), -1)
        used = (value >= 0)[..., None]
        total = np.sum(table[value] * used, axis=1)
        parts.append(
            total / np.maximum(used.sum(1), 1) if combiner == "mean" else total
        )
    return np.stack(parts, axis=1)


def through(layers, x, *, end=False):
    for i, layer in enumerate(layers.layers):
        x = x @ wide(layer.kernel) + wide(layer.bias)
        x = x if i == len(layers.layers) - 1 and not end else np.maximum(x, 0)
    return x


def linear(part, dense, ids):
    rows = rows_of(part.embeddings, ids)[..., 0].sum(1)
    return rows + dense @ wide(part.weights) + wide(part.bias)


def oracle(model, dense, ids):
    config, dense = model.config, dense.astype(np.float64)
    rows = rows_of(model.embeddings, ids, config.combiner)
    flat = np.concatenate([dense, rows.reshape(len(rows), -1)], axis=1)
    match config:
        case sj.DLRMConfig():
            first = through(model.bottom, dense, end=True)
            vectors = [first, *rows.transpose(1, 0, 2)]
            pairs = [np.sum(a * b, 1) for a, b in itertools.combinations(vectors, 2)]
            x = np.concatenate([first, np.stack(pairs, axis=1)], axis=1)
            return through(model.top, x)[:, 0]
        case sj.DCNConfig():
            x = flat
            for layer in model.cross:
                if config.rank is None:
                    crossed = x @ wide(layer.kernel) + wide(layer.bias)
                else:
                    down, up = layer.layers
                    crossed = x @ wide(down.kernel) @ wide(up.kernel) + wide(up.bias)
                x = flat * crossed + x
            return through(model.hidden, x)[:, 0]
        case sj.DeepFMConfig():
            columns = dense[..., None] * wide(model.factors)
            vectors = np.concatenate([columns, rows], axis=1).transpose(1, 0, 2)
            pairs = sum(np.sum(a * b, 1) for a, b in itertools.combinations(vectors, 2))
            deep = through(model.hidden, flat)[:, 0]
            return linear(model.linear, dense, ids) + pairs + deep
        case sj.WideDeepConfig():
            return linear(model.linear, dense, ids) + through(model.hidden, flat)[:, 0]


@nnx.jit
def call(model, dense, ids):
    return model(dense, ids)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_scores(config):
    dense, ids, _ = inputs(3)
    model = build(config)
    want = oracle(model, dense, ids)
    bound = tolerance("float32", 99)["rtol"] * 10
    assert want is not None
    np.testing.assert_allclose(call(model, dense, ids), want, rtol=bound, atol=bound)
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_without_dense_columns_and_in_bfloat16():
    dense, ids, _ = inputs(0)
    for config in (sj.DLRMConfig(dtype="bfloat16"), sj.DeepFMConfig(dtype="bfloat16")):
        scores = jax.eval_shape(lambda m: call(m, dense, ids), build(config, 0))
        assert scores.shape == (16,) and scores.dtype == jnp.float32


def test_training_on_a_mesh():
    """The same losses as on one device, and they fall; the model has two collections."""
    losses = {}
    for mesh in (None, sj.make_mesh(data=2, model=4)):
        with jax.set_mesh(mesh) if mesh else jax.set_mesh(sj.make_mesh()):
            sizes: dict[str, typing.Any] = {"num_dense": 3, "features": FEATURES}
            sizes["plan"] = {"item": "rows"}
            model = sj.clicks.build_click_model(CONFIGS[3], **sizes, rngs=nnx.Rngs(0))
            rule = sj.optimizers.rowwise_adagrad(0.1)
            optimizer = sj.Optimizer(model, rule, dense=optax.adam(1e-2))
            batch = inputs(3)
            losses[mesh] = [float(step(model, optimizer, *batch)) for _ in range(10)]
    one, many = losses.values()
    np.testing.assert_allclose(many, one, rtol=1e-4)
    assert one[-1] < 0.8 * one[0]


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ([], ValueError, "JSON object"),
        ({"model": "dlrm"}, ValueError, "version"),
        ({"version": 1, "model": "mlp"}, ValueError, "dlrm, dcn, deepfm, wide_deep"),
        (
            {"version": 1, "model": "dlrm", "cross": 1},
            ValueError,
            'unknown key "cross"',
        ),
        ({"version": 1, "model": "dlrm", "top": 3}, ValueError, '"top" must be a list'),
        ({"version": 1, "model": "dlrm", "dim": 0}, ValueError, "dim must be positive"),
    ],
)
def test_bad_json(document, error, message):
    with pytest.raises(error, match=message):
        sj.clicks.ClickModelConfig.from_json(document)


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"dense must be \[batch, 3\]"):
        build(CONFIGS[0])(*inputs(2)[:2])
    with pytest.raises(ValueError, match="at least one feature"):
        sj.clicks.DCN(sj.DCNConfig(), num_dense=3, features={}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no pairs"):
        sj.clicks.DLRM(
            sj.DLRMConfig(), num_dense=0, features={"a": 3}, rngs=nnx.Rngs(0)
        )
