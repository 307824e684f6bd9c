"""A model from a custom loop is saved as a run folder."""

import numpy as np
import optax
import pytest
from flax import nnx
from run_folders import checkerboard, parameters

import sparsejax as sj
from sparsejax.cli.main import main


def test_items_go_on_by_the_commands(tmp_path, capsys):
    train, heldout = checkerboard()
    config = sj.NetworkConfig.autoencoder((8,), linear=sj.nn.LinearConfig(rank=4))
    model, optimizer = sj.build(config, train, sj.optimizers.adagrad(0.1))
    history = sj.fit(model, optimizer, train, num_epochs=2)
    sj.save_model(tmp_path / "run", model, optimizer, train, history=history)
    expected = sj.recommend(model, train, k=5, exclude=train)

    run = sj.Run.load(tmp_path / "run")
    assert run.history == [dict(entry) for entry in history]
    found = run.recommend(k=5, inputs=train)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert int(run.optimizer.step[...]) == int(optimizer.step[...])
    train.save(tmp_path / "train.parquet")
    heldout.save(tmp_path / "heldout.parquet")
    files = [str(tmp_path / f"{name}.parquet") for name in ("train", "heldout")]
    assert main(["evaluate", str(tmp_path / "run"), *files]) == 0
    argv = ["train", files[0], "--from", str(tmp_path / "run"), "--run"]
    capsys.readouterr()
    argv += [str(tmp_path / "more"), "--epochs", "1", "--decay", "none"]
    assert main([*argv, "--optimizer", "adagrad"]) == 0
    assert "goes on with its state" in capsys.readouterr().err
    assert parameters(tmp_path / "more") != parameters(tmp_path / "run")
    with pytest.raises(FileExistsError):
        sj.save_model(tmp_path / "run", model, optimizer, train)


def test_histories_and_clicks(tmp_path):
    events = [
        {"user": f"u{u}", "item": f"i{(u + t) % 7}"} for u in range(6) for t in range(5)
    ]
    histories = sj.read_sequences(events)
    model, optimizer = sj.build(sj.GRUConfig(width=8, max_length=4), histories)
    sj.save_model(tmp_path / "histories", model, optimizer, histories)
    found = sj.Run.load(tmp_path / "histories").recommend(["u3"], k=2, inputs=histories)
    expected = sj.recommend(model, histories, k=2, exclude=histories)
    np.testing.assert_array_equal(found.ids[0], expected.ids[3])

    rows = [{"click": i % 2, "user": i % 5, "item": i % 3, "x": i} for i in range(40)]
    schema = sj.ClickSchema(
        "click",
        dense={"x": sj.data.DenseColumn()},
        ids={"user": sj.data.VocabularyColumn(), "item": sj.data.HashedColumn(9)},
    )
    clicks = sj.read_clicks(rows, schema)
    model, optimizer = sj.build(sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)), clicks)
    sj.save_model(tmp_path / "clicks", model, optimizer, clicks)
    found = sj.Run.load(tmp_path / "clicks").predict(clicks)
    np.testing.assert_array_equal(found, sj.predict(model, clicks))


@pytest.mark.usefixtures("wrong_types")
def test_what_no_run_can_keep_is_said(tmp_path):
    train, _ = checkerboard()
    model, optimizer = sj.build(sj.NetworkConfig.autoencoder((8,)), train)

    def refused(error, match, *arguments):
        with pytest.raises(error, match=match):
            sj.save_model(tmp_path / "run", *arguments)
        assert not (tmp_path / "run").exists()

    own = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    refused(
        TypeError,
        "a Linear has no configuration.*checkpoint_dir",
        own,
        optimizer,
        train,
    )
    refused(
        TypeError,
        "data set of items, got csr_array",
        model,
        optimizer,
        train.to_scipy(),
    )
    histories = sj.read_sequences([{"user": "a", "item": "b"}])
    refused(
        TypeError, "data set of items, got SequenceDataset", model, optimizer, histories
    )
    other = train.append_features(["more"] + [f"item{i}" for i in range(300)])
    refused(
        ValueError,
        "not what its configuration describes.*shape",
        model,
        optimizer,
        other,
    )
    dense = sj.Optimizer(model, sj.optimizers.adam(0.1), dense=optax.sgd(0.1))
    refused(ValueError, "without dense= and wrt=", model, dense, train)
