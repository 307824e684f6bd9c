"""fit: results, errors, and interruption."""

import contextlib
import signal
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from checkerboards import build, checkerboard, parameters
from flax import nnx

from sparsejax import optimizers, training
from sparsejax.data import SparseDataset
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.mesh import interrupts
from sparsejax.optimizers import inplace
from sparsejax.verbs.evaluate import evaluate
from sparsejax.verbs.fit import fit
from sparsejax.verbs.recommend import recommend


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "l2_loss"])
def test_learns_a_checkerboard(loss):
    train, heldout = checkerboard(60, 20)
    model, optimizer = build(20, loss=loss)
    history = fit(model, optimizer, train, batch_size=16, num_epochs=40)
    assert [entry["epoch"] for entry in history] == list(range(1, 41))
    assert history[-1]["step"] == 40 * 4
    assert history[-1]["loss"] < history[0]["loss"]
    found = recommend(model, train, k=1, exclude=train)
    expected = [row[0] for row in np.split(np.asarray(heldout.matrix.indices), 60)]
    np.testing.assert_array_equal(found.ids[:, 0], expected)
    measured = evaluate(model, train, heldout, k=1)
    assert measured["recall@1"] == 1.0
    assert measured["popularity_recall@1"] < 0.5


def test_one_step_is_the_mean_gradient_of_the_batch():
    train, _ = checkerboard(10, 8)
    rate = 0.5
    model, optimizer = build(8, rule=optimizers.sgd(rate), loss="l2_loss")
    before = np.asarray(model.first.kernel[:8], np.float64)
    out = np.asarray(model.output.kernel[:8], np.float64)
    history = fit(model, optimizer, train, batch_size=32, num_epochs=1)
    x = train.to_scipy().toarray()
    hidden = np.maximum(x @ before, 0)
    error = hidden @ out.T - x
    np.testing.assert_allclose(history[0]["loss"], (error**2).sum() / 20, rtol=1e-5)
    slope = x.T @ ((error @ out) * (hidden > 0)) / 10
    np.testing.assert_allclose(
        model.first.kernel[:8], before - rate * slope, rtol=1e-4, atol=1e-6
    )


def test_without_shuffling_the_seed_does_not_matter(tmp_path):
    rng = np.random.default_rng(0)
    train = SparseDataset.from_scipy(scipy.sparse.csr_array(rng.random((70, 8)) < 0.4))

    def trained(**options):
        model, optimizer = build(8)
        history = fit(model, optimizer, train, batch_size=64, **options)
        return parameters(model), [entry["loss"] for entry in history]

    in_order = trained(shuffle=False, seed=1, num_epochs=2, checkpoint_dir=tmp_path)
    assert in_order == trained(shuffle=False, seed=2, num_epochs=2)
    assert in_order != trained(seed=1, num_epochs=2)
    with pytest.raises(ValueError, match="shuffle"):
        trained(seed=1, checkpoint_dir=tmp_path, resume=True, num_epochs=3)


def test_what_is_called_after_each_epoch_sees_and_changes_the_model():
    train, _ = checkerboard(70, 8)
    model, optimizer = build(8, rule=optimizers.sgd(0.5), loss="l2_loss")
    seen = []

    def after_epoch(epoch):
        seen.append((epoch, parameters(model)))
        kernel, bias = model.output.kernel, model.output.bias
        assert bias is not None
        for parameter in (kernel, bias):
            parameter.set_value(jax.numpy.zeros_like(parameter[...]))

    options = {"batch_size": 70, "num_epochs": 2, "after_epoch": after_epoch}
    history = fit(model, optimizer, train, **options)
    assert [epoch for epoch, _ in seen] == [1, 2] and seen[0][1] != seen[1][1]
    # All scores are zero then.
    assert history[1]["loss"] == pytest.approx(train.num_entries / 70 / 2)


def test_last_batch_counts_its_own_examples():
    # 10 rows in batches of 6: the second step has 4, and their mean is over 4.
    train, _ = checkerboard(10, 8)
    model, optimizer = build(8, rule=optimizers.sgd(0.0), loss="l2_loss")
    whole = fit(model, optimizer, train, batch_size=10**9, num_epochs=1)
    parts = fit(model, optimizer, train, batch_size=6, num_epochs=1)
    np.testing.assert_allclose(parts[0]["loss"], whole[0]["loss"], rtol=1e-6)


def test_weights_of_examples():
    train, _ = checkerboard(12, 8)
    weights = np.zeros(12, np.float32)
    weights[3] = 12
    model, optimizer = build(8, loss="l2_loss")
    history = fit(model, optimizer, train, weights=weights, num_epochs=1)
    alone, other = build(8, loss="l2_loss")
    only = SparseDataset.from_scipy(train.to_scipy().astype(bool)[[3] * 12])
    expected = fit(alone, other, only, weights=np.ones(12), num_epochs=1)
    np.testing.assert_allclose(history[0]["loss"], expected[0]["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match=r"weights has shape \(2,\), expected \(12,\)"):
        fit(model, optimizer, train, weights=np.ones(2))
    with pytest.raises(TypeError, match="are for histories: give one number for each"):
        fit(model, optimizer, train, weights={"view": 1.0})
    for wrong in (np.nan, np.inf, -0.5):
        with pytest.raises(ValueError, match=rf"weights\[1\] is {wrong}"):
            weights = np.where(np.arange(12) == 1, wrong, 1)
            fit(model, optimizer, train, weights=weights)


def test_targets_are_matched_by_name():
    train, heldout = checkerboard(12, 8)
    turned = SparseDataset.from_scipy(
        heldout.to_scipy().astype(bool)[::-1],
        row_names=heldout.row_names[::-1],
        feature_names=heldout.feature_names,
    )
    results = []
    for targets in (heldout, turned):
        model, optimizer = build(8)
        fit(model, optimizer, train, targets, num_epochs=2)
        results.append(parameters(model))
    assert results[0] == results[1]
    short = SparseDataset.from_scipy(
        heldout.to_scipy()[:5],
        row_names=heldout.row_names[:5],
        feature_names=heldout.feature_names,
    )
    with pytest.raises(ValueError, match="7 of 12 rows of inputs are not in targets"):
        fit(model, optimizer, train, short)


def test_validation_and_early_stopping():
    train, heldout = checkerboard(60, 20)
    model, optimizer = build(20)
    logged = []
    history = fit(
        model,
        optimizer,
        train,
        batch_size=16,
        num_epochs=200,
        validation=heldout,
        k=1,
        early_stopping=EarlyStopping(metric="recall@1", patience=3),
        log=lambda step, entry: logged.append((step, dict(entry))),
    )
    scores = [entry["recall@1"] for entry in history]
    best = int(np.argmax(scores))
    assert len(history) == best + 1 + 3 < 200
    assert [entry for _, entry in logged] == history
    assert [step for step, _ in logged] == [entry["step"] for entry in history]
    for metric in ("auc", "ndcg@20"):  # found before the first epoch
        with pytest.raises(
            ValueError,
            match=f"with k=1 there is no .* metric '{metric}'; there are rec",
        ):
            fit(
                model,
                optimizer,
                train,
                validation=heldout,
                k=1,
                early_stopping=EarlyStopping(metric=metric),
                log=lambda step, entry: pytest.fail("it was trained"),
            )
    with pytest.raises(ValueError, match="early_stopping needs validation"):
        fit(model, optimizer, train, early_stopping=EarlyStopping())


@pytest.mark.parametrize("fused", [False, True])
def test_the_model_can_be_used_in_log(fused, monkeypatch):
    train, heldout = checkerboard(60, 20)
    monkeypatch.setattr(dispatch, "launches_ahead", lambda: True)
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 2)
    model, optimizer = build(20)
    copies, scores = [], []

    def log(step, entry):
        assert int(optimizer.step[...]) == step
        copies.append((nnx.clone((model, optimizer)), parameters(model)))
        measured = evaluate(model, train, heldout, k=1, optimizer=optimizer)
        scores.append(measured["recall@1"])

    options: dict[str, Any] = {"batch_size": 16, "num_epochs": 3, "fused": fused}
    fit(model, optimizer, train, log=log, **options)
    assert all(parameters(copy[0]) == before for copy, before in copies)
    other = build(20)
    history = fit(*other, train, validation=heldout, k=1, **options)
    assert scores == [entry["recall@1"] for entry in history]
    assert parameters(model) == parameters(other[0])


def test_copies_are_others_and_nothing_else_is_copied(monkeypatch, tmp_path):
    train, heldout = checkerboard(60, 20)
    model, optimizer = build(20, corruption=0.3, dropout=0.2)
    copies = nnx.clone((model, optimizer))
    before = parameters(copies[0])
    fit(model, optimizer, train, batch_size=16, num_epochs=1)
    assert parameters(copies[0]) == before
    fit(*copies, train, batch_size=16, num_epochs=1)
    assert parameters(copies[0]) == parameters(model) != before
    del copies
    unshare, calls = inplace.unshare, []

    def watched(variables):
        arrays = [id(variable.get_raw_value()) for variable in variables]
        unshare(variables)
        calls.append(arrays == [id(v.get_raw_value()) for v in variables])

    monkeypatch.setattr(inplace, "unshare", watched)
    options = {"batch_size": 16, "num_epochs": 2, "validation": heldout, "k": 1}
    folder = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0}
    fit(model, optimizer, train, log=lambda *_: None, **options, **folder)
    assert len(calls) > 2 and all(calls)


# Where Python loses the exception, as in a callback of its garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_models_survive_a_signal_at_any_moment():
    train, _ = checkerboard(60, 20)
    rng = np.random.default_rng(0)
    model, optimizer = build(20)
    fit(model, optimizer, train, batch_size=16, num_epochs=1)
    came = []

    def told(number, frame):
        came.append(number)
        raise Interrupted

    before = signal.signal(signal.SIGALRM, told)
    try:
        for _ in range(8):
            signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.3 * rng.random())
            earlier = len(came)
            # Raised within a call of Python from C++, as of `__eq__` in a cache of JAX, it
            # reaches us as an error of another type.
            with contextlib.suppress(Exception):
                fit(model, optimizer, train, batch_size=16, num_epochs=10_000)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(came) == earlier + 1
            assert all(np.isfinite(leaf).all() for leaf in values_of(model, optimizer))
    finally:
        signal.signal(signal.SIGALRM, before)


def values_of(*modules):
    filters = nnx.Any(nnx.Param, nnx.OptState)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(modules, filters))]


@pytest.mark.parametrize(
    ("loss", "value", "message"),
    [
        (
            "softmax_cross_entropy",
            -1,
            "from -1 to -1, but the loss softmax_cross_entropy",
        ),
        ("sigmoid_binary_cross_entropy", 5, "takes values from 0 to 1"),
        ("scaled_marginal_cross_entropy", -2, "the loss scaled_marginal"),
        ("l2_loss", 0, "all 540 values of the targets are 0"),
        ("l2_loss", -1, None),
        ("hinge_loss", -1, None),
    ],
)
def test_values_that_mean_nothing(loss, value, message):
    train, _ = checkerboard(60, 20)
    data = train.to_scipy().astype(np.float32)
    data.data[:] = value
    if message is None:
        assert len(fit(*build(20, loss=loss), data, num_epochs=1)) == 1
        return
    log = {"log": lambda *_: pytest.fail("it was trained")}
    with pytest.raises(ValueError, match=message):
        fit(*build(20, loss=loss), data, num_epochs=1, **log)


def test_validation_does_not_alter_training():
    train, heldout = checkerboard(60, 20)
    results = []
    for validation in (None, heldout):
        model, optimizer = build(20, corruption=0.3, dropout=0.2)
        options = {"batch_size": 16, "num_epochs": 3, "validation": validation}
        fit(model, optimizer, train, k=1 if validation else None, **options)
        results.append(parameters(model))
    assert results[0] == results[1]


def test_an_interrupt_whose_exception_is_lost(tmp_path):
    train, _ = checkerboard(20, 8)
    options = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 1e9}
    with interrupts.noted():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="told to end"):
            fit(*build(8), train, num_epochs=100, **options)
    assert Checkpoints(tmp_path).steps()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(fit(*build(8), train, num_epochs=3, resume=True, **options)) == 3


def test_an_interrupt_saves_a_checkpoint(tmp_path):
    train, heldout = checkerboard(60, 20)
    options = {"batch_size": 16, "validation": heldout, "num_epochs": 4, "k": 1}
    folder = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 1e9}
    whole, broken = build(20), build(20)
    fit(*whole, train, **options)

    def told(step, entry):
        if entry["epoch"] == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="told to end"):
        fit(*broken, train, log=told, **options, **folder)
    assert Checkpoints(tmp_path).steps()[-1] == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = build(20, seed=1)
    assert len(fit(*again, train, resume=True, **options, **folder)) == 4
    np.testing.assert_array_equal(
        np.asarray(again[0].first.kernel), np.asarray(whole[0].first.kernel)
    )


def test_a_second_interrupt_does_not_wait(tmp_path):
    train, _ = checkerboard(20, 8)

    def told(step, entry):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        fit(*build(8), train, log=told, checkpoint_dir=tmp_path)
    assert len(fit(*build(8), train, num_epochs=1)) == 1  # nobody is told any more


def test_a_handler_of_the_users_own_stays(monkeypatch):
    train, _ = checkerboard(20, 8)
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        fit(
            *build(8),
            train,
            num_epochs=2,
            log=lambda *_: signal.raise_signal(signal.SIGINT),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1, 1]


def test_refusals(tmp_path):
    train, _ = checkerboard(20, 8)
    model, optimizer = build(8)
    options = {"num_epochs": 1, "checkpoint_dir": tmp_path}
    fit(model, optimizer, train, **options)
    with pytest.raises(FileExistsError, match="resume=True"):
        fit(model, optimizer, train, **options)
    with pytest.raises(ValueError, match="cannot resume with batch_size 7"):
        fit(model, optimizer, train, batch_size=7, resume=True, **options)
    with pytest.raises(ValueError, match="cannot resume with seed 1"):
        fit(model, optimizer, train, seed=1, resume=True, **options)
    with pytest.raises(ValueError, match="cannot resume with other data"):
        fit(model, optimizer, checkerboard(22, 8)[0], resume=True, **options)
    with pytest.raises(ValueError, match="checkpoint_seconds needs checkpoint_dir"):
        fit(model, optimizer, train, checkpoint_seconds=30.0)
    with pytest.raises(ValueError, match="resume=True needs checkpoint_dir"):
        fit(model, optimizer, train, resume=True)
    with pytest.raises(ValueError, match=r"seed must be below 4,294,967,296"):
        fit(model, optimizer, train, seed=2**32)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        fit(model, optimizer, train, batch_size=0)
    with pytest.raises(
        ValueError, match="checkpoint_seconds must be at least 0, got nan"
    ):
        fit(model, optimizer, train, checkpoint_seconds=float("nan"))
    with pytest.raises(ValueError, match="inputs has 8 columns but the model has 9"):
        fit(*build(9), train)


def test_a_loss_that_is_not_finite_stops(tmp_path):
    train, _ = checkerboard(60, 20)
    model, optimizer = build(20, rule=optimizers.sgd(1e30), loss="l2_loss")
    with pytest.raises(
        FloatingPointError, match=r"the loss is (nan|inf) in epoch 1, step [23] of it\."
    ):
        fit(model, optimizer, train, batch_size=16, checkpoint_dir=tmp_path / "a")
    assert Checkpoints(tmp_path / "a").steps() == []


class Losses:
    """The losses of a dispatch; records when they are read."""

    def __init__(self, losses: jax.Array, calls: list[str]):
        self.losses, self.calls = losses, calls

    def __array__(self, dtype=None, copy=None):
        self.calls.append("awaited")
        return np.asarray(self.losses)


@pytest.mark.usefixtures("wrong_types")
def test_the_next_dispatch_is_launched_before_the_losses_are_awaited(monkeypatch):
    train, _ = checkerboard(60, 20)
    launch, calls = training.Program.launch, []

    def launched(self, dispatch):
        calls.append("launched")
        return Losses(launch(self, dispatch), calls)

    monkeypatch.setattr(dispatch, "launches_ahead", lambda: True)
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 3)
    monkeypatch.setattr(training.Program, "launch", launched)
    (entry,) = fit(*build(20), train, batch_size=8, num_epochs=1)  # 8 steps
    assert calls == ["launched"] + 2 * ["launched", "awaited"] + ["awaited"]
    assert entry["step"] == 8


def test_model_survives_an_interrupt(monkeypatch):
    train, _ = checkerboard(60, 20)
    model, optimizer = build(20)

    def stop(step, entry):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, optimizer, train, batch_size=16, log=stop)
    assert np.isfinite(np.asarray(model.first.kernel[...])).all()
    fit(model, optimizer, train, batch_size=16, num_epochs=1)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_sharded_parameters_train_the_same():
    train, heldout = checkerboard(60, 20)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("model"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())

    def spread(leaf):
        return jax.device_put(leaf, rows if leaf.shape[:1] == (256,) else everywhere)

    kernels, histories = [], []
    for place in (lambda leaf: leaf, spread):
        model, optimizer = build(20, corruption=0.3, dropout=0.2)
        nnx.update(
            (model, optimizer), jax.tree.map(place, nnx.state((model, optimizer)))
        )
        options = {"batch_size": 16, "num_epochs": 3, "k": 1}
        history = fit(model, optimizer, train, validation=heldout, **options)
        histories.append([[e["loss"], e["recall@1"]] for e in history])
        kernels.append(np.asarray(model.first.kernel[...]))
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-4)
    np.testing.assert_allclose(kernels[1], kernels[0], rtol=1e-3, atol=1e-4)
