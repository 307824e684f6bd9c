"""Predictors to which changes of their model are applied."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax import change_folders
from sparsejax.embeddings import DynamicTableConfig, EmbeddingCollection, TableConfig

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

BATCH = 1
TABLES = {"user": DynamicTableConfig(512, 4), "hour": TableConfig(24, 4)}


class Clicks(nnx.Module):
    num_dense = 2

    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        tables = TABLES | {"user": dataclasses.replace(TABLES["user"], **options)}
        features = {name: name for name in TABLES}
        self.embeddings = EmbeddingCollection(tables, features, rngs=rngs)
        self.last = nnx.Linear(self.embeddings.num_outputs + 2, 1, rngs=rngs)

    def __call__(self, dense, ids):
        rows = self.embeddings.concat(ids)
        return self.last(jnp.concatenate([dense, 3 * rows], axis=1))[:, 0]


@sj.jit
def step(model, optimizer, dense, ids):
    rows = model.embeddings.assign_rows(ids, optimizer)
    loss_fn = lambda model: jnp.mean((model(dense, rows) - 1) ** 2)
    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def batch(rng, first=0, rows=8):
    users = rng.integers(first, first + 400, rows).astype(np.uint64)
    ids = {
        "user": users * np.uint64(0x9E3779B97F4A7C15),
        "hour": rng.integers(0, 24, rows).astype(np.int32),
    }
    return rng.random((rows, 2), np.float32), ids


class Training:
    def __init__(self):
        self.model, self.rng, self.first = Clicks(), np.random.default_rng(0), 0
        self.optimizer = sj.Optimizer(self.model, sj.optimizers.adam(0.1))

    def go_on(self, steps=40):
        for _ in range(steps):
            self.first += 10
            dense, ids = batch(self.rng, self.first)
            packed = self.model.embeddings.pack(ids)
            step(self.model, self.optimizer, dense, packed)

    def export(self, folder):
        return sj.export_changes(self.model, folder, self.optimizer).result()

    def predictor(self, path):
        model, optimizer = nnx.clone((self.model, self.optimizer))
        optimizer.flush(model)
        sj.export_predictor(model, path, batch_size=BATCH)
        return sj.load_predictor(path)


def test_a_predictor_takes_changes_of_rows_in_host_memory(tmp_path):
    """A quarter of them is on the device; the predictor has all of them."""
    model = Clicks(num_rows=128, host_rows=512)
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.1))
    rng, given = np.random.default_rng(0), batch(np.random.default_rng(1), 900, 20)
    folder, first = tmp_path / "changes", 0

    def predictor(name):
        optimizer.flush(model)
        sj.export_predictor(model, tmp_path / name, batch_size=BATCH)
        return sj.load_predictor(tmp_path / name)

    taker = predictor("first.predictor")
    for _ in range(2):
        coming = [batch(rng, first := first + 10) for _ in range(60)]
        for dense, ids in model.embeddings.staged(coming, optimizer):
            step(model, optimizer, dense, ids)
        told = sj.export_changes(model, folder, optimizer).result()
        assert taker.apply_changes(folder) == told
    assert model.embeddings.stats()["user"].evicted and told.removed
    expected = predictor("again.predictor").predict(*given)
    np.testing.assert_array_equal(taker.predict(*given), expected)


def test_a_predictor_answers_as_the_model_does(tmp_path, monkeypatch):
    training, folder = Training(), tmp_path / "changes"
    training.go_on(3)
    predictor = training.predictor(tmp_path / "first.predictor")
    given = batch(np.random.default_rng(1), 900, 20)
    for _ in range(3):
        training.go_on()
        told, held = training.export(folder), list(predictor.weights)
        assert predictor.apply_changes(folder) == told
        assert not any(array.is_deleted() for array in held)  # others may read them
    expected = training.predictor(tmp_path / "again.predictor").predict(*given)
    np.testing.assert_array_equal(predictor.predict(*given), expected)
    assert training.model.embeddings.stats()["user"].evicted and told.removed
    assert predictor.apply_changes(folder) == told  # there is nothing new
    late = sj.load_predictor(tmp_path / "first.predictor")
    before = late.predict(*given)
    assert not np.array_equal(before, expected)

    content = (folder / "00000001" / "0.parquet").read_bytes()
    (folder / "00000001" / "0.parquet").write_bytes(content[:-9])
    with pytest.raises(ValueError, match="0.parquet has .* it was cut off or altered"):
        late.apply_changes(folder)
    np.testing.assert_array_equal(late.predict(*given), before)
    (folder / "00000001" / "0.parquet").write_bytes(content)
    collection = training.model.embeddings
    collection.export_changes(tmp_path / "alone", training.optimizer).result()
    with pytest.raises(ValueError, match="it is of another model"):
        late.apply_changes(tmp_path / "alone")
    with pytest.raises(ValueError, match="but number 2 was taken already"):
        predictor.apply_changes(tmp_path / "alone")

    last = training.model.last.kernel
    whole = last[...]
    last.set_value(whole * jnp.nan)
    with monkeypatch.context() as patch:  # another writer
        patch.setattr(change_folders, "is_finite", lambda array: True)
        training.export(tmp_path / "not finite")
    last.set_value(whole)
    with pytest.raises(
        ValueError, match="'last.kernel' has numbers that are not finite"
    ):
        late.apply_changes(tmp_path / "not finite")
    np.testing.assert_array_equal(late.predict(*given), before)

    # Other threads predict while changes are taken.
    found, done = [], threading.Event()

    def ask():
        while not done.is_set():
            found.append(late.predict(*given))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    late.apply_changes(folder)
    done.set()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(late.predict(*given), expected)
    answers = np.unique(np.stack(found), axis=0)
    assert all(any((a == b).all() for b in (before, expected)) for a in answers)
