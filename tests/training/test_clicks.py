"""Trains click models by `fit`, by a custom loop, from disk, on meshes, and resumed after a
kill.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import training
from sparsejax.data.files.stored import id_lists
from sparsejax.engine.train import dispatch
from sparsejax.kinds.clicks.exchange import IdsAhead

ROWS = 300
SCHEMA = sj.ClickSchema(
    "click",
    {"age": sj.data.DenseColumn(), "price": sj.data.DenseColumn()},
    {name: sj.data.HashedColumn(size) for name, size in (("user", 30), ("tags", 20))},
)


def made(rows=ROWS, *, seed=0) -> sj.ClickDataset:
    """Draws clicks that depend on the user; some lists are empty, and one is long."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 30, rows).astype(np.int32)
    lengths = rng.integers(0, 4, rows)
    lengths[rows // 2] = 25
    flat = rng.integers(0, 20, lengths.sum()).astype(np.int32)
    tags = id_lists(flat, np.append(0, np.cumsum(lengths)), 20)
    clicks = rng.random(rows) < np.where(user % 3 == 0, 0.8, 0.2)
    dense = rng.standard_normal((rows, 2)).astype(np.float32)
    return sj.ClickDataset(
        clicks.astype(np.float32), dense, {"user": user, "tags": tags}, SCHEMA, {}
    )


def build(*, placement="replicated", rule=None):
    config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
    plan: dict[str, Any] = dict.fromkeys(("user", "tags"), placement)
    sizes = {"num_dense": 2, "features": {"user": 30, "tags": 20}}
    model = sj.clicks.build_click_model(config, **sizes, plan=plan, rngs=nnx.Rngs(0))
    return model, sj.Optimizer(model, rule or sj.optimizers.adagrad(0.05))


@pytest.mark.parametrize("shape", [None, (2, 4)], ids=["one", "mesh"])
def test_build_is_the_same_as_the_long_form(shape):
    config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
    with on(shape):
        model, optimizer = sj.build(config, made(), sj.optimizers.adagrad(0.05))
        written, _ = build()
        pairs = zip(*map(parameters, (model, written)), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert np.isfinite(sj.fit(model, optimizer, made(), num_epochs=1)[0]["loss"])
    with pytest.raises(TypeError, match="reads a ClickDataset.*csr_array"):
        sj.build(config, scipy.sparse.csr_array((3, 4)))
    targets: Any = {"targets": made()}
    with pytest.raises(ValueError, match="leave out targets"):
        sj.build(config, made(), **targets)


def parameters(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def trained(clicks, **options):
    model, optimizer = build()
    history = sj.fit(model, optimizer, clicks, batch_size=64, **options)
    return model, history


def on(shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def losses(history):
    return [entry["loss"] for entry in history]


def test_fit_is_a_loop_of_ones_own():
    clicks = made()
    _, history = trained(clicks, num_epochs=2, shuffle=False)
    model, optimizer = build()

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, dense, ids, click):
        def loss_fn(model):
            return optax.sigmoid_binary_cross_entropy(model(dense, ids), click).mean()

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for entry in history:
        found = 0.0
        for start in range(0, ROWS, 64):
            part = clicks.rows(slice(start, start + 64))
            loss = step(model, optimizer, part.dense, dict(part.ids), part.labels)
            found += float(loss) * part.num_rows / ROWS
        np.testing.assert_allclose(found, entry["loss"], rtol=1e-6)

    # The same by dispatches, to the bit.
    model, optimizer = build()
    epochs = training.Epochs(training.place(clicks), batch_size=64, num_epochs=1)
    program = training.Program(model, optimizer)
    found = [program.launch(dispatch) for dispatch in epochs.dispatches(0)]
    sizes = np.concatenate([d.examples for d in epochs.dispatches(0)])
    _, [entry] = trained(clicks, num_epochs=1)
    assert (
        np.dot(np.concatenate(found).astype(np.float64), sizes) / ROWS == entry["loss"]
    )


def test_a_mesh_gives_the_same_losses():
    """With tables in parts; `test_streamed_clicks_on_a_mesh` has them on every device."""
    clicks, found = made(), []
    for shape in (None, (2, 4)):
        with on(shape):
            model, optimizer = build(placement="rows")
            options = {
                "batch_size": 64,
                "num_epochs": 2,
                "validation": made(90, seed=1),
            }
            history = sj.fit(model, optimizer, clicks, **options)
            found.append([losses(history), sj.predict(model, clicks)])
            assert history[1]["auc"] == pytest.approx(
                sj.evaluate(model, made(90, seed=1))["auc"]
            )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_streamed_clicks(tmp_path):
    clicks = made()
    clicks.save(tmp_path / "clicks.parquet")
    scanned = sj.data.scan_clicks(tmp_path / "clicks.parquet", chunk_rows=ROWS)
    options: dict[str, Any] = {"num_epochs": 2, "shuffle": False}
    model, history = trained(scanned, **options, validation=scanned)
    same, expected = trained(clicks, **options, validation=clicks)
    for entry in (*history, *expected):
        del entry["examples_per_second"]
    assert history == expected
    found = sj.predict(model, scanned)
    np.testing.assert_array_equal(found, sj.predict(same, clicks))

    text = tmp_path / "clicks.csv"
    text.write_text("click,age,price,user,tags\n1,1,2,3,4\n")
    with pytest.raises(NotImplementedError, match="save them as Parquet"):
        trained(sj.data.scan_clicks(text, SCHEMA))
    clicks.rows(slice(0, 0)).save(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="the data have no examples"):
        trained(sj.data.scan_clicks(tmp_path / "none.parquet"))


def test_ids_that_repeat_cross_a_mesh_once(tmp_path, monkeypatch):
    """`fit` counts them. With too few places the losses are the same, and it says so.

    It sends ids before the steps, unless a model may do with them what it likes.
    """
    monkeypatch.setattr(dispatch, "launches_ahead", lambda: True)
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 2)
    clicks, found = made(600), dict[str, Any]()

    class Own(nnx.Module):
        def __init__(self, model):
            self.model = model

    def history(shape=(1, 8), **options):
        with on(shape):
            model, optimizer = build(placement="rows")
            assert isinstance(model, sj.clicks.DLRM)
            if shape is not None:
                assert IdsAhead.of(model, False) and not IdsAhead.of(Own(model), False)
            result = sj.fit(
                model, optimizer, clicks, batch_size=256, num_epochs=2, **options
            )
            wire = model.embeddings.settings
            counted = wire.distinct and vars(wire.distinct)
            found.update(wire=wire.wire_dtype, counted=counted)
            return result

    want = history(None)
    assert "overflows" not in want[0] and not found["counted"]
    # Of an epoch's two dispatches, the second has enough places.
    with pytest.warns(UserWarning, match="in 2 of 3 steps.*larger exchange_room") as w:
        got = history(exchange_room=1.15)
    assert len(w) == 1 and [entry["overflows"] for entry in got] == [2, 2]
    np.testing.assert_allclose(losses(got), losses(want), rtol=1e-5)
    rows = dict(found["counted"]["rows"])
    assert found["counted"]["examples"] == 32
    assert 15 < rows["user"] < 25 and 10 < rows["tags"] <= 20
    narrow = history(wire_dtype="bfloat16", checkpoint_dir=tmp_path)
    assert [entry["overflows"] for entry in narrow] == [0, 0]
    narrow = losses(narrow)
    assert found["wire"] == jnp.bfloat16
    np.testing.assert_allclose(narrow, losses(want), rtol=1e-3)
    assert narrow != losses(got)
    again: dict[str, Any] = {"checkpoint_dir": tmp_path, "resume": True}
    with pytest.raises(ValueError, match="resume with wire_dtype None: .* 'bfloat16'"):
        history(**again)
    with pytest.raises(ValueError, match=r"resume with exchange_room 2\.0: .* None"):
        history(wire_dtype="bfloat16", exchange_room=2.0, **again)
    assert losses(history(None, **again)) == narrow  # nothing crosses there
    for name, value in {"wire_dtype": "bfloat16", "exchange_room": 2.0}.items():
        options: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name} is of no use here"):
            history(None, **options)


def test_streamed_clicks_on_a_mesh(tmp_path):
    made().save(tmp_path / "clicks.parquet")
    chunks = sj.data.scan_clicks(tmp_path / "clicks.parquet", chunk_rows=130)
    _, expected = trained(chunks, num_epochs=2)
    with on((2, 4)):
        _, history = trained(chunks, num_epochs=2)
    np.testing.assert_allclose(losses(history), losses(expected), rtol=1e-5)


def test_a_resume_gives_the_same_bits(tmp_path):
    """From disk; `cli/test_clicks.py` has clicks in memory."""
    path = tmp_path / "clicks.parquet"
    made().save(path)
    options: dict[str, Any] = {"num_epochs": 3, "validation": made(90, seed=1)}

    class Killed(Exception):
        pass

    def killed(epoch):
        if epoch == 2:
            raise Killed

    clicks = sj.data.scan_clicks(path, chunk_rows=130)
    expected, history = trained(clicks, **options)
    folder: dict[str, Any] = {"checkpoint_dir": tmp_path / "run"}
    folder["checkpoint_seconds"] = 0
    with pytest.raises(Killed):
        trained(clicks, **options, **folder, after_epoch=killed)
    model, resumed = trained(clicks, **options, **folder, resume=True)
    assert losses(resumed) == losses(history)
    for ours, theirs in zip(*map(leaves, (model, expected)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = made(seed=5)
    with pytest.raises(ValueError, match="cannot resume with other data"):
        sj.fit(*build(), other, batch_size=64, **options, **folder, resume=True)


@pytest.mark.parametrize("metric, sign", [("auc", 1), ("log_loss", -1)])
def test_early_stopping_keeps_the_best_epoch(metric, sign, capsys):
    clicks, validation = made(100), made(90, seed=1)
    stopping = sj.EarlyStopping(metric=None if metric == "auc" else metric, patience=2)
    model, optimizer = build(rule=sj.optimizers.adam(0.1))  # learns by heart
    options: dict[str, Any] = {
        "num_epochs": 30,
        "validation": validation,
        "early_stopping": stopping,
    }
    history = sj.fit(model, optimizer, clicks, batch_size=64, **options)
    values = [sign * entry[metric] for entry in history]
    assert len(values) < 30 and max(values) == values[-3]
    found = sj.evaluate(model, validation)
    assert sign * found[metric] == max(values)
    assert f"{metric} has not {'risen' if sign > 0 else 'fallen'} for 2" in (
        capsys.readouterr().err
    )


def test_measures_of_clicks():
    clicks, (model, _) = made(), build()
    p = sj.predict(model, clicks, batch_size=70).astype(np.float64)
    ids = jax.tree.map(jnp.asarray, dict(clicks.ids))
    logits = np.asarray(sj.jit(lambda model: model(clicks.dense, ids))(model))
    np.testing.assert_allclose(p, 1 / (1 + np.exp(-logits)), rtol=1e-6)
    with pytest.warns(UserWarning, match="'user' is hashed to 29 ids"):
        found = sj.evaluate(model, clicks, groups="user")
    y, metrics = clicks.labels, sj.metrics
    users = np.asarray(clicks.ids["user"])
    grouped = metrics.group_auc(p, y, users)
    expected = {
        "auc": metrics.auc(p, y),
        "log_loss": metrics.log_loss(p, y),
        "normalized_entropy": metrics.normalized_entropy(p, y),
        "calibration": metrics.calibration(p, y),
        "group_auc": grouped.auc,
        "groups": grouped.groups,
    }
    assert found == pytest.approx(expected, rel=1e-6)
    assert sj.evaluate(model, clicks, groups=users) == found


def test_what_does_not_fit_together():
    clicks, (model, optimizer) = made(), build()
    items = sj.CSR.from_scipy(scipy.sparse.eye_array(4))
    config = sj.NetworkConfig.autoencoder((4,))
    recommender = sj.FeedForward(config, inputs=4, outputs=4, rngs=nnx.Rngs(0))

    def refused(error, message, call, *arguments, **options):
        with pytest.raises(error, match=message):
            call(*arguments, **options)

    theirs = sj.Optimizer(recommender, sj.optimizers.sgd(1.0))
    refused(
        TypeError,
        "FeedForward, which predicts items",
        sj.fit,
        recommender,
        theirs,
        clicks,
    )
    refused(TypeError, "takes a ClickDataset", sj.fit, model, optimizer, items)
    refused(TypeError, "which predicts items", sj.evaluate, recommender, clicks)
    refused(TypeError, "A click model takes", sj.evaluate, model, items, items)
    refused(ValueError, "heldout is of no use", sj.evaluate, model, clicks, items)
    refused(
        ValueError,
        "'tags' is a feature of lists",
        sj.evaluate,
        model,
        clicks,
        groups="tags",
    )
    refused(ValueError, "leave out targets", sj.fit, model, optimizer, clicks, items)
    refused(
        ValueError, "no validation metric 'ndcg@20'.* auc, log_loss", sj.fit, model, optimizer,
        clicks, validation=clicks, early_stopping=sj.EarlyStopping(metric="ndcg@20"),
    )  # fmt: skip
    refused(
        ValueError, "examples with label 0 and with label 1", sj.fit, model, optimizer,
        clicks, validation=clicks.rows(np.flatnonzero(clicks.labels)),
    )  # fmt: skip
    refused(NotImplementedError, "fused", sj.fit, model, optimizer, clicks, fused=True)

    def with_schema(dense, ids):
        arrays = {name: np.zeros(4, np.int32) for name in ids}
        schema = sj.ClickSchema(
            "click", dense, {n: sj.data.HashedColumn(s) for n, s in ids.items()}
        )
        labels = np.array([0, 1, 0, 1], np.float32)
        return sj.ClickDataset(
            labels, np.zeros((4, len(dense)), np.float32), arrays, schema, {}
        )

    two = dict.fromkeys(("a", "b"), sj.data.DenseColumn())
    fewer = with_schema({}, {"user": 30, "tags": 20})
    refused(
        ValueError, "num_dense=2, but the data have 0", sj.fit, model, optimizer, fewer
    )
    other = with_schema(two, {"user": 30})
    refused(
        ValueError,
        "a feature 'tags', which the data lack",
        sj.predict,
        model,
        other,
    )
    other = with_schema(two, {"user": 31, "tags": 20})
    refused(ValueError, "'user' has 31 ids in .* for 30", sj.evaluate, model, other)
    same = with_schema(two, {"user": 30, "tags": 20})
    refused(
        ValueError,
        "validation has other columns",
        sj.fit,
        model,
        optimizer,
        clicks,
        validation=same,
    )
