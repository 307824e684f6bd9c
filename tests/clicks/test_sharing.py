"""Click models with several labels: losses and gradients compared with NumPy in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj

Label = sj.data.LabelColumn
LABELS = {
    "click": Label(),
    "buy": Label(weight=3.0, after="click"),
    "again": Label(weight="v", after="buy"),
    "share": Label("log_loss"),
    "price": Label("squared", weight=0.5),
    "wait": Label("quantile", quantile=0.8),
}
SCHEMA = sj.ClickSchema(
    labels=LABELS,
    dense={"age": sj.data.DenseColumn()},
    ids={"user": sj.data.HashedColumn(7), "item": sj.data.HashedColumn(9)},
    weight="w",
)
SHARING = {
    "shared_bottom": sj.SharedBottom(tower=(3,)),
    "mmoe": sj.MMoE(experts=3, tower=(3,)),
    "ple": sj.PLE(experts=2, shared=1, levels=2, tower=(3, 2)),
}
ROWS = 40


def clicks(rows=ROWS) -> sj.ClickDataset:
    """Draws examples; a third of them lack a label."""
    rng = np.random.default_rng(0)
    click, buy, again = np.cumprod(rng.integers(0, 2, (3, rows)), axis=0)
    numbers = rng.random(rows), rng.normal(size=rows), rng.normal(size=rows) + 1
    labels = np.stack([click, buy, again, *numbers], axis=1).astype(np.float32)
    labels[rng.random(labels.shape) < 0.3] = np.nan
    weights = (rng.random(rows) * 2).astype(np.float32)[:, None].repeat(6, 1)
    weights[:, 2] *= rng.random(rows)
    ids = {
        n: rng.integers(0, k, rows).astype(np.int32)
        for n, k in (("user", 7), ("item", 9))
    }
    dense = rng.standard_normal((rows, 1)).astype(np.float32)
    return sj.ClickDataset(labels, dense, ids, SCHEMA, {}, weights=weights)


def built(config, data):
    """A model without parameters that are 0."""
    model, optimizer = sj.build(config, data, sj.optimizers.sgd(1.0))
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = rng.standard_normal(variable.shape) / 2
        variable.set_value(jnp.asarray(values, jnp.float32))
    return model, optimizer


def parameters(model) -> dict[tuple, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: np.asarray(value[...], np.float64) for path, value in flat}


def stacks(p, path, x, *, end):
    """Computes stacks of layers one after the other; `x` is `[batch, inputs]` for each."""
    count = sum(1 for key in p if key[: len(path) + 1] == (*path, "kernels"))
    found = []
    for c, given in enumerate(x):
        y = given
        for i in range(count):
            y = y @ p[(*path, "kernels", i)][c] + p[(*path, "biases", i)][c]
            y = np.maximum(y, 0) if end or i < count - 1 else y
        found.append(y)
    return found


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def mixed(weights, experts):
    return sum(weights[:, [e]] * y for e, y in enumerate(experts))


def scores(p, sharing, x, path=("hidden",)):
    """`[batch, labels]` scores, computed label by label and expert by expert."""
    k = len(LABELS)
    if isinstance(sharing, sj.SharedBottom):
        at = (*path, "bottom", "layers", 0)
        x = np.maximum(x @ p[(*at, "kernel")] + p[(*at, "bias")], 0)
        towers = [x] * k
    elif isinstance(sharing, sj.MMoE):
        experts = stacks(p, (*path, "experts"), [x] * sharing.experts, end=True)
        gates = stacks(p, (*path, "gates"), [x] * k, end=False)
        towers = [mixed(softmax(g), experts) for g in gates]
    else:
        own, towers, of_shared = sharing.experts, [x] * k, x
        for level in range(sharing.levels):
            at = (*path, "levels", level)
            given = [t for t in towers for _ in range(own)]
            given += [of_shared] * sharing.shared
            experts = stacks(p, (*at, "experts"), given, end=True)
            gates = stacks(p, (*at, "gates"), towers, end=False)
            towers = [
                mixed(softmax(g), experts[i * own : (i + 1) * own] + experts[k * own :])
                for i, g in enumerate(gates)
            ]
            if level < sharing.levels - 1:
                [gate] = stacks(p, (*at, "shared_gate"), [of_shared], end=False)
                of_shared = mixed(softmax(gate), experts)
    return np.concatenate(stacks(p, (*path, "towers"), towers, end=False), axis=1)


def crossed(p, data, rows):
    parts = [t[data.ids[n]] for n, t in zip(SCHEMA.ids, rows, strict=True)]
    x = np.concatenate([data.dense, *parts], axis=1)
    return x * (x @ p["cross", 0, "kernel"] + p["cross", 0, "bias"]) + x


def predicted(z):
    """Probabilities of the labels in the chain, and scores of the numeric labels."""
    p = 1 / (1 + np.exp(-z))
    p[:, 1] *= p[:, 0]
    p[:, 2] *= p[:, 1]
    p[:, 4:] = z[:, 4:]
    return p


def loss(z, data):
    """The mean over the examples of the sum of weighted losses."""
    p, y = predicted(z), data.labels.astype(np.float64)
    each = np.empty_like(y)
    q, t = p[:, :4], y[:, :4]
    each[:, :4] = -(t * np.log(q) + (1 - t) * np.log1p(-q))
    each[:, 4] = (y - p)[:, 4] ** 2
    over = (y - p)[:, 5]
    each[:, 5] = np.where(over > 0, 0.8 * over, -0.2 * over)
    factors = np.array([1, 3, 1, 1, 0.5, 1]) * data.weights
    return np.nansum(factors * each) / data.num_rows


@pytest.mark.parametrize("name", SHARING)
def test_a_step_of_fit_is_the_gradient_of_the_formula(name):
    sharing, data = SHARING[name], clicks()
    config = sj.DCNConfig(dim=2, cross=1, hidden=(4,), sharing=sharing)
    assert sj.DCNConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    model, optimizer = built(config, data)
    before = parameters(model)
    rows = [np.asarray(model.embeddings.table(n), np.float64) for n in SCHEMA.ids]

    def loss_of(p):
        return loss(scores(p, sharing, crossed(p, data, rows)), data)

    predictions = sj.predict(model, data)
    [entry] = sj.fit(model, optimizer, data, batch_size=64, num_epochs=1)
    assert entry["loss"] == pytest.approx(loss_of(before), rel=1e-5)
    after, rng = parameters(model), np.random.default_rng(2)
    checked = [path for path in before if path[0] in ("cross", "hidden")]
    assert len(checked) > 6
    for path in checked:
        direction = rng.standard_normal(before[path].shape)
        ends = [
            loss_of(before | {path: before[path] + step * direction})
            for step in (1e-5, -1e-5)
        ]
        gradient = np.sum((before[path] - after[path]) * direction)
        found = (ends[0] - ends[1]) / 2e-5
        assert gradient == pytest.approx(found, rel=2e-3, abs=2e-5), path
    z = scores(before, sharing, crossed(before, data, rows))
    for label, expected in zip(LABELS, predicted(z).T, strict=True):
        np.testing.assert_allclose(predictions[label], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "config",
    [
        sj.DLRMConfig(dim=2, bottom=(3,), top=(4,)),
        sj.DeepFMConfig(dim=2, hidden=(4,), sharing=sj.MMoE(experts=2)),
        sj.WideDeepConfig(dim=2, hidden=(4,), sharing=sj.PLE()),
    ],
    ids=lambda config: config.model,
)
def test_a_mesh_and_a_label_alone(config):
    """A mesh trains as one device. The linear part of a label moves by its labels alone."""
    data = clicks(64)
    model, optimizer = built(config, data)
    losses = [
        e["loss"] for e in sj.fit(model, optimizer, data, batch_size=64, num_epochs=2)
    ]
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        other, with_mesh = built(config, data)
        found = sj.fit(other, with_mesh, data, batch_size=64, num_epochs=2)
        assert [e["loss"] for e in found] == pytest.approx(losses, rel=1e-5)
        ours = sj.predict(model, data)
        for name, theirs in sj.predict(other, data).items():
            np.testing.assert_allclose(ours[name], theirs, rtol=1e-4, atol=1e-5)
    if model.linear is None:
        return
    nothing = data.labels.copy()
    nothing[:, 4], nothing[1:, 5] = np.nan, np.nan
    nothing[0, 4] = 1.0
    weights = data.weights * (np.arange(6) != 5)
    alone = sj.ClickDataset(nothing, data.dense, data.ids, SCHEMA, {}, weights=weights)
    before = np.asarray(model.linear.bias[...])
    sj.fit(model, optimizer, alone, batch_size=64, num_epochs=1)
    moved = np.asarray(model.linear.bias[...]) != before
    assert moved[0] and not moved[5]


def test_what_does_not_fit():
    data = clicks()
    one = sj.ClickSchema("click", ids=SCHEMA.ids)
    plain = sj.read_clicks(
        {"click": [0, 1], "user": list("ab"), "item": list("ab")}, one
    )
    with pytest.raises(ValueError, match="sharing says how several labels"):
        sj.build(sj.DCNConfig(sharing=sj.MMoE()), plain)
    with pytest.raises(ValueError, match="regression=True is for one label"):
        sj.build(sj.DCNConfig(regression=True), data)
    with pytest.raises(TypeError, match="SharedBottom, MMoE or PLE"):
        sj.DCNConfig(sharing=sj.DCNConfig())  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="experts must be positive"):
        sj.MMoE(experts=0)
    with pytest.raises(ValueError, match="'other', not one of"):
        sj.DCNConfig.from_json(
            {"version": 1, "model": "dcn", "sharing": {"kind": "other"}}
        )
    with pytest.raises(ValueError, match="layers of top or hidden, and there are none"):
        sj.build(sj.WideDeepConfig(hidden=()), data)
    model, _ = sj.build(sj.DCNConfig(dim=2), data)
    fewer = data.of_label("click")
    with pytest.raises(ValueError, match="data have one label"):
        sj.predict(model, fewer)
    with pytest.raises(ValueError, match="the model has one label, but the data have"):
        sj.predict(sj.clicks.Calibrated(OfOneLabel()), data)


class Wide(nnx.Module):
    """A custom model that returns one column of logits too many."""

    kind = "clicks"

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(1))

    def __call__(self, dense, ids):
        return dense[:, :1] + self.bias[...][None]


class OfOneLabel(Wide):
    labels: tuple[str, ...] = ()


@pytest.mark.parametrize("name", ["click", ""], ids=["one", "several"])
def test_logits_of_other_shapes(name):
    data = clicks().of_label(name) if name else clicks()
    model = Wide()
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    with pytest.raises(ValueError, match="a click model returns a logit for each exam"):
        sj.fit(model, optimizer, data, batch_size=64, num_epochs=1)
    with pytest.raises(ValueError, match=r"expected the shape \(.* got \(\d+, 1\)"):
        sj.predict(model, data)
