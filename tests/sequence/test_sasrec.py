"""SASRec compared with its formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj

HISTORIES = np.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1], [-1, -1, -1, -1, -1]])


def small(**options) -> sj.sequence.SASRec:
    config = sj.SASRecConfig(max_length=4, width=8, dropout=0.3, **options)
    model = sj.sequence.SASRec(config, items=11, rngs=nnx.Rngs(0))
    model.output.kernel[...] *= 20  # so that scores differ
    return model


def norm(x, layer):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * np.asarray(layer.scale[...], np.float64) + np.asarray(
        layer.bias[...], np.float64
    )


def linear(x, layer):
    bias = 0 if layer.bias is None else np.asarray(layer.bias[...], np.float64)
    return x @ np.asarray(layer.kernel[...], np.float64) + bias


def hidden(model: sj.sequence.SASRec, items: np.ndarray) -> np.ndarray:
    """Hidden vectors `[length, width]` of one history without padding, in float64."""
    x = (
        np.sqrt(8) * np.asarray(model.output.kernel[...], np.float64)[items]
        + np.asarray(model.places[...], np.float64)[: len(items)]
    )
    for block in model.blocks:
        y, heads = norm(x, block.norm1), []
        q, k, v = (linear(y, f) for f in (block.queries, block.keys, block.values))
        for part in np.split(np.arange(8), 2):
            scores = q[:, part] @ k[:, part].T / 2  # sqrt(width / heads)
            scores = np.where(np.tri(len(items)) > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ v[:, part])
        x = x + linear(np.concatenate(heads, 1), block.mixed)
        y = linear(norm(x, block.norm2), block.up)
        gelu = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + linear(gelu, block.down)
    return norm(x, model.norm)


def scores_of(model: sj.sequence.SASRec, h: np.ndarray) -> np.ndarray:
    kernel = np.asarray(model.output.kernel[...], np.float64)[:11]
    if (temperature := model.config.temperature) is not None:
        h = h / np.linalg.norm(h, axis=1, keepdims=True)
        kernel = kernel / np.linalg.norm(kernel, axis=1, keepdims=True) / temperature
    return h @ kernel.T


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_the_formula(temperature):
    model = small(temperature=temperature)
    model.eval()
    losses = []
    for row in HISTORIES[:2]:
        row = row[row >= 0]
        scores = scores_of(model, hidden(model, row[:-1]))
        logs = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(row) - 1), row[1:]]
        losses += logs.tolist()
    found = model.loss(jnp.asarray(HISTORIES))
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-4)
    ids, best = model.top_k(jnp.asarray(HISTORIES[:, 1:]), 11)
    scores = scores_of(model, hidden(model, HISTORIES[0, 1:]))[-1]
    np.testing.assert_array_equal(ids[0], np.argsort(-scores))
    np.testing.assert_allclose(best[0], np.sort(scores)[::-1], rtol=1e-3, atol=1e-4)
    # The history [1], with padding of any length, and none.
    short, _ = model.top_k(jnp.asarray([[1]]), 11)
    np.testing.assert_array_equal(ids[1], short[0])
    assert sorted(np.asarray(ids[2])) == list(range(11))


@nnx.jit
def loss_of(model, histories):
    return model.loss(histories)


def test_gradients_and_dropout():
    model = small(temperature=0.5)
    histories = jnp.asarray(HISTORIES)
    # Other numbers are dropped.
    assert loss_of(model, histories) != loss_of(model, histories)
    model.eval()
    assert loss_of(model, histories) == loss_of(model, histories)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params):
        return nnx.merge(graph, params, rest).loss(histories)

    gradients = jax.jit(jax.grad(loss))(params)
    assert not np.asarray(gradients["output"]["kernel"][...])[11:].any()  # padding
    direction = jax.tree.map(jnp.sign, gradients)
    size = 1e-3

    def moved(sign):
        return loss(jax.tree.map(lambda p, d: p + sign * size * d, params, direction))

    slope = (moved(1) - moved(-1)) / (2 * size)
    wanted = sum(jnp.sum(jnp.abs(g)) for g in jax.tree.leaves(gradients))
    np.testing.assert_allclose(slope, wanted, rtol=0.02)


def test_awkward_histories():
    model = small()
    model.eval()
    assert loss_of(model, jnp.full((2, 5), -1)) == 0
    assert jnp.isnan(loss_of(model, jnp.asarray([[11, 1]])))
    assert jnp.isnan(loss_of(model, jnp.asarray([[-2, 1]])))
    one = sj.sequence.SASRec(sj.SASRecConfig(max_length=1), items=3, rngs=nnx.Rngs(0))
    assert loss_of(one, jnp.asarray([[0, 2], [1, -1]])) > 0
    with pytest.raises(ValueError, match=r"have 5 places, but max_length is 4"):
        model(jnp.asarray(HISTORIES))
    with pytest.raises(ValueError, match="histories of two places or more"):
        model.loss(jnp.asarray([[1]]))
    with pytest.raises(ValueError, match="items must be 1 or more, got 0"):
        sj.sequence.SASRec(sj.SASRecConfig(), items=0, rngs=nnx.Rngs(0))


def test_the_configuration_as_json():
    config = sj.SASRecConfig(max_length=7, width=32, heads=4, temperature=0.07)
    assert sj.SASRecConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "expected a JSON object, got list"),
        ({"version": 2}, '"version" is 2'),
        ({"version": 1, "model": "sas"}, "\"model\" is 'sas', not one of sasrec"),
        ({"widht": 3}, 'unknown key "widht"; known: max_length, width'),
        ({"width": 7}, "width must be a multiple of heads, got 7 and 2"),
        ({"blocks": 0}, "blocks must be 1 or more, got 0"),
        ({"max_length": 0}, "max_length must be 1 or more, got 0"),
        ({"negatives": 0}, "negatives must be 1 or more, got 0"),
        ({"negatives": 9, "sampler": "all"}, "sampler is one of .*, got 'all'"),
        ({"sampler": "batch"}, "negatives is None.*; give a number of them"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ],
)
def test_a_wrong_configuration(given, problem):
    if isinstance(given, dict):
        given = {"version": 1, "model": "sasrec"} | given
    with pytest.raises((ValueError, TypeError), match=problem):
        sj.SASRecConfig.from_json(given)
