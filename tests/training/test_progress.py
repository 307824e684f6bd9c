"""Trainings that resume where they ended, and end with the best epoch."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkerboards import build, checkerboard, parameters, without_speed

from sparsejax import optimizers, training
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.checkpoint import Checkpoints, CheckpointWarning
from sparsejax.engine.train.progress import EarlyStopping, Progress
from sparsejax.verbs.fit import fit


class Interrupted(Exception):
    pass


def build_noisy(seed=0):
    """A model with all kinds of randomness. Adagrad's programs compile faster than Adam's."""
    noise = {"corruption": 0.3, "dropout": 0.2}
    rule = optimizers.adagrad(0.1)
    return build(20, hidden=(8, 6), rule=rule, seed=seed, **noise)


def interrupted_fit(at: int, checkpoint_dir, monkeypatch, **options):
    """Runs a `fit` that raises an exception before dispatch number `at`."""
    model, optimizer = build_noisy()
    launch, calls = training.Program.launch, iter(range(10**6))

    def dying(self, dispatch):
        if next(calls) == at:
            raise Interrupted
        return launch(self, dispatch)

    with monkeypatch.context() as patch:
        patch.setattr(training.Program, "launch", dying)
        with pytest.raises(Interrupted):
            fit(model, optimizer, checkpoint_dir=checkpoint_dir, **options)


def test_a_resumed_training_has_the_same_bits(tmp_path, monkeypatch):
    train, heldout = checkerboard(186, 20)  # 12 steps, the last of fewer rows
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 3)
    options: dict[str, Any] = {
        "inputs": train,
        "batch_size": 16,
        "num_epochs": 4,
        "validation": heldout,
        "early_stopping": EarlyStopping(patience=50),
    }
    model, optimizer = build_noisy()
    history = fit(model, optimizer, **options)
    expected = parameters(model)

    directory = tmp_path / "c"
    options |= {"resume": True, "checkpoint_seconds": 0}
    interrupted_fit(0, directory, monkeypatch, **options)  # before any checkpoint
    for at in (3, 4, 7):
        interrupted_fit(at, directory, monkeypatch, **options)
    newest = Checkpoints(directory).steps()[-1]
    assert 0 < newest < history[-1]["step"]
    model, optimizer = build_noisy(seed=5)
    resumed = fit(model, optimizer, checkpoint_dir=directory, **options)
    assert parameters(model) == expected

    assert without_speed(resumed) == without_speed(history)
    # Nothing is left to do, and the result is the same.
    model, optimizer = build_noisy(seed=6)
    fit(model, optimizer, checkpoint_dir=directory, **options)
    assert parameters(model) == expected


@pytest.mark.parametrize("metric", ["auc", "log_loss"])
def test_an_epoch_that_is_as_good_is_not_better(metric):
    """So training stops where a metric does not move, and the first such epoch is kept."""
    state = Progress({"metric": metric})
    scores = []
    for epoch, value in enumerate([0.5, 0.5, 0.5], 1):
        state.epoch = epoch
        scores.append(
            state.judge({metric: value}, EarlyStopping(patience=2, metric=metric))
        )
    assert scores == [0.5 if metric == "auc" else -0.5, None, None]
    assert (state.best_epoch, state.waited, state.stopped) == (1, 2, True)


def test_resume_refuses_another_metric(tmp_path):
    train, heldout = checkerboard(60, 20)
    options: dict[str, Any] = {"validation": heldout, "checkpoint_dir": tmp_path}
    options |= {"batch_size": 16}

    def fitted(k, **more):
        model, optimizer = build(20, dropout=0.2)
        return fit(model, optimizer, train, k=k, **options, **more)

    fitted(1, num_epochs=1)
    options |= {"num_epochs": 2, "resume": True}
    with pytest.raises(ValueError, match="cannot resume with metric 'ndcg@2'"):
        fitted(2)
    stopping = EarlyStopping(metric="map@1")
    with pytest.raises(ValueError, match="cannot resume with metric 'map@1'"):
        fitted(1, early_stopping=stopping)
    assert len(fitted(1)) == 2


def test_resume_passes_over_a_damaged_checkpoint(tmp_path, monkeypatch):
    train, _ = checkerboard(60, 20)
    options = {"inputs": train, "batch_size": 16, "checkpoint_dir": tmp_path}
    model, optimizer = build(20)
    for epochs in (1, 2):
        fit(model, optimizer, num_epochs=epochs, resume=epochs > 1, **options)
    newest = Checkpoints(tmp_path).steps()[-1]
    for path in (tmp_path / str(newest)).rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"")
    again, optimizer = build(20, seed=3)
    with pytest.warns(CheckpointWarning, match="damaged"):
        fit(again, optimizer, num_epochs=2, resume=True, **options)
    assert Checkpoints(tmp_path).steps()[-1] == newest  # trained to there once more


@pytest.mark.parametrize("with_folder", [False, True])
def test_ends_with_the_best_epoch(with_folder, tmp_path, capsys):
    train, heldout = checkerboard(60, 20)
    options: dict[str, Any] = {"batch_size": 16, "validation": heldout, "k": 1}
    stopping = EarlyStopping(metric="recall@1", patience=2)
    folder = {"checkpoint_dir": tmp_path} if with_folder else {}

    def trained(early_stopping, num_epochs, **more):
        model, optimizer = build(20, dropout=0.2)
        more = options | {"early_stopping": early_stopping} | more
        history = fit(model, optimizer, train, num_epochs=num_epochs, **more)
        return parameters(model), history

    found, history = trained(stopping, 100, **folder)
    scores = [entry["recall@1"] for entry in history]
    best = int(np.argmax(scores)) + 1
    assert len(history) == best + 2
    assert capsys.readouterr().err == (
        f"training ended after epoch {best + 2}, as recall@1 has not risen for 2 epochs; "
        f"epoch {best} (recall@1 {scores[best - 1]:.4f}) was the best, the model is that "
        f"of epoch {best}\n"
    )
    assert found == trained(None, best)[0]
    last = dataclasses.replace(stopping, restore_best=False)
    assert trained(last, 100)[0] == trained(None, best + 2)[0] != found
    assert "was the best, the model is that of epoch" in capsys.readouterr().err
    if with_folder:  # the end of a run that has ended, and one that was cut off
        again, entries = trained(stopping, 100, resume=True, **folder)
        assert again == found and entries == history
        folder = {"checkpoint_dir": tmp_path / "cut"}
        first = dataclasses.replace(stopping, patience=50)
        trained(first, best + 1, **folder)
        again, entries = trained(stopping, 100, resume=True, **folder)
        assert again == found
        assert without_speed(entries) == without_speed(history)


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(
    tmp_path, monkeypatch
):
    train, _ = checkerboard(60, 20)
    model, optimizer = build(20)
    launch, calls = training.Program.launch, iter(range(10**6))

    def poisoned(self, dispatch):
        return launch(self, dispatch) * (jnp.nan if next(calls) == 2 else 1)

    monkeypatch.setattr(training.Program, "launch", poisoned)
    with pytest.raises(FloatingPointError, match=r"epoch 3, step 1 of it; .* step 2\."):
        fit(model, optimizer, train, checkpoint_dir=tmp_path, checkpoint_seconds=0)
    assert Checkpoints(tmp_path).steps() == [1, 2]
