"""Compares `fit` of models with tables in host memory with `fit` of tables on the device."""

import errno
import gc
import os
import pathlib
import subprocess
import sys
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.data.files.stored import id_lists
from sparsejax.embeddings import FeatureConfig, TableConfig, host_files
from sparsejax.embeddings.host_slots import NoRoomError
from sparsejax.embeddings.staged import Staged
from sparsejax.engine.train import checkpoint, dispatch

ROWS, USERS, TAGS = 500, 3000, 2000
SCHEMA = sj.ClickSchema(
    "click",
    {"age": sj.data.DenseColumn()},
    {
        name: sj.data.HashedColumn(size)
        for name, size in (("user", USERS), ("tags", TAGS), ("hour", 24))
    },
)


def made(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, USERS, rows).astype(np.int32)
    lengths = rng.integers(0, 4, rows)
    flat = np.minimum(rng.zipf(1.3, lengths.sum()) - 1, TAGS - 1).astype(np.int32)
    tags = id_lists(flat, np.append(0, np.cumsum(lengths)), TAGS)
    hour = rng.integers(0, 24, rows).astype(np.int32)
    clicks = rng.random(rows) < np.where(user % 3 == 0, 0.8, 0.2)
    dense = rng.standard_normal((rows, 1)).astype(np.float32)
    ids = {"user": user, "tags": tags, "hour": hour}
    return sj.ClickDataset(clicks.astype(np.float32), dense, ids, SCHEMA, {})


class Model(nnx.Module):
    def __init__(self, **options):
        # 256 slots: fewer than 16 steps of 64 examples have rows.
        tables = {
            "user": TableConfig(USERS, 8, placement="rows", **options),
            "tags": TableConfig(TAGS, 8, placement="rows", **options),
            "hour": TableConfig(24, 4),
        }
        features = {name: FeatureConfig(name, combiner="mean") for name in tables}
        rngs = nnx.Rngs(0)
        self.embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=rngs)
        self.last = nnx.Linear(self.embeddings.num_outputs + 1, 1, rngs=rngs)

    def __call__(self, dense, ids):
        x = jnp.concatenate([self.embeddings.concat(ids), dense], axis=1)
        return self.last(x)[:, 0]


def hosted():
    return Model(host=True, device_rows=128)


def fitted(model, *, rule=None, clicks=None, **options):
    # Its programs compile in half the time of those of Adam.
    optimizer = sj.Optimizer(model, rule or sj.optimizers.adagrad(0.1))
    options: dict[str, Any] = {"num_epochs": 2, "batch_size": 64} | options
    return optimizer, sj.fit(model, optimizer, clicks or made(), **options)


def rows_of(model, name):
    return np.concatenate(list(model.embeddings.table_rows(name)))


def check_same(one, other):
    for name in "user", "tags", "hour":
        np.testing.assert_array_equal(rows_of(one, name), rows_of(other, name))


@pytest.mark.parametrize("rule", [sj.optimizers.adagrad(0.1), sj.optimizers.adam(0.02)])
def test_bits_are_those_of_tables_on_the_device(rule):
    here, there = Model(), hosted()
    validation = made(1, 200)
    optimizers, history = zip(
        *(fitted(model, rule=rule, validation=validation) for model in (here, there)),
        strict=True,
    )
    assert [e["loss"] for e in history[1]] == [e["loss"] for e in history[0]]
    assert [e["auc"] for e in history[1]] == [e["auc"] for e in history[0]]
    check_same(here, there)
    unseen = made(2, 300)
    for optimizer in None, optimizers:
        answers = [
            sj.predict(
                m, unseen, optimizer=None if optimizer is None else o, batch_size=64
            )
            for m, o in zip((here, there), optimizers, strict=True)
        ]
        np.testing.assert_array_equal(answers[1], answers[0])
    more = [
        sj.fit(m, o, made(), num_epochs=1, batch_size=64)
        for m, o in zip((here, there), optimizers, strict=True)
    ]
    assert more[1][0]["loss"] == more[0][0]["loss"]


class Killed(BaseException):
    pass


def test_a_resume_has_the_same_bits(tmp_path, monkeypatch):
    """Whatever file is being written when the process ends."""
    there = hosted()
    _, history = fitted(there, num_epochs=3)
    written = []
    rename = os.replace

    def counted(source, target, **options):
        rename(source, target, **options)
        if "host_rows" in str(target):
            written.append(pathlib.Path(target).name)
            if len(written) in (2, 30, 45):
                raise Killed

    monkeypatch.setattr(os, "replace", counted)
    monkeypatch.setattr(host_files, "_PIECE_BYTES", 2**15)  # so there are many
    options: dict[str, Any] = {
        "num_epochs": 3,
        "checkpoint_dir": tmp_path,
        "checkpoint_seconds": 0,
    }
    model, again = hosted(), []
    for _ in range(4):
        model = hosted()
        try:
            _, again = fitted(model, resume=True, **options)
        except Killed:
            continue
        break
    assert len(written) > 45
    assert [e["loss"] for e in again] == [e["loss"] for e in history]
    check_same(model, there)
    # Files that no checkpoint names are gone.
    steps = checkpoint.Checkpoints(tmp_path).steps()
    assert 1 <= len(steps) <= 3
    (folder,) = (tmp_path / "host_rows").iterdir()
    records = [
        checkpoint._opened(checkpoint.epath.Path(tmp_path / str(s))) for s in steps
    ]
    named = {f for r in records for fs in r.host_rows.values() for f in fs}
    assert named == {path.name for path in folder.iterdir() if path.name[0] != "."}


def train_on(folder, result):
    """The code of a process that is killed: it resumes the training of the process before it."""
    model = hosted()
    options = {"checkpoint_dir": folder, "checkpoint_seconds": 0, "resume": True}
    _, history = fitted(model, num_epochs=6, **options)
    np.savez(result, losses=[e["loss"] for e in history], user=rows_of(model, "user"))


def test_a_resume_after_kills_has_the_same_bits(tmp_path):
    """`kill -9` at random moments after the first files of rows."""
    there = hosted()
    _, history = fitted(there, num_epochs=6)
    rng, folder, result = np.random.default_rng(0), tmp_path / "run", tmp_path / "a.npz"
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    script = "import sys, test_host_tables; test_host_tables.train_on(*sys.argv[1:])"

    def written():
        return {p.name for p in folder.glob("host_rows/*/*")}

    kills = 3
    for kill in range(kills + 1):
        before = written()
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(result)],
            env=os.environ | {"PYTHONPATH": path},
        )
        if kill == kills:
            assert process.wait() == 0
            break
        while process.poll() is None and written() <= before:
            time.sleep(0.01)
        time.sleep(0.3 * rng.random())
        assert process.poll() is None  # else it has trained all
        process.kill()
        process.wait()
    with np.load(result) as found:
        assert found["losses"].tolist() == [e["loss"] for e in history]
        np.testing.assert_array_equal(found["user"], rows_of(there, "user"))


def test_a_damaged_file_is_noticed(tmp_path):
    fitted(hosted(), num_epochs=1, checkpoint_dir=tmp_path)
    (folder,) = (tmp_path / "host_rows").iterdir()
    path = next(folder.iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        pytest.warns(checkpoint.CheckpointWarning, match="was altered"),
        pytest.raises(ValueError, match="can be read"),
    ):
        fitted(hosted(), num_epochs=2, checkpoint_dir=tmp_path, resume=True)


def test_parts_of_a_dispatch_do_their_steps_alone(monkeypatch):
    here = Model()
    _, expected = fitted(here)
    monkeypatch.setattr(dispatch, "fills_dispatches", lambda: True)  # as on a GPU
    sizes, cut = [], []
    launched, steps = dispatch.Program._launched, Staged.steps

    def noted(self, part, staged):
        sizes.append((part.count, part.sizes.padded))
        return launched(self, part, staged)

    def counted(self, batches, room):
        try:
            return steps(self, batches, room)
        except NoRoomError:
            cut.append(len(batches))
            raise

    monkeypatch.setattr(dispatch.Program, "_launched", noted)
    monkeypatch.setattr(Staged, "steps", counted)
    there = hosted()
    _, history = fitted(there)
    assert [e["loss"] for e in history] == [e["loss"] for e in expected]
    assert len(cut) == len(set(cut)) > 0  # each size is tried once
    assert max(count for count, _ in sizes) < max(cut)
    assert not any(padded for _, padded in sizes)


def saved(folder):
    """A model, its checkpoint, and a file of its rows."""
    model = hosted()
    optimizer, _ = fitted(model, num_epochs=1)
    checkpoints = checkpoint.Checkpoints(folder)
    checkpoints.save(1, (model, optimizer), {})
    (rows,) = (folder / "host_rows").iterdir()
    return model, optimizer, checkpoints, next(rows.iterdir())


def test_a_damaged_file_is_written_again(tmp_path):
    model, optimizer, checkpoints, path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    host: Any = next(iter(optimizer.host_rows(model).values()))
    host._pieces.changed[:] = True  # as if rows had changed there and back
    checkpoints.save(2, (model, optimizer), {})
    assert path.read_bytes() == data
    assert checkpoints.restore((model, optimizer)) == {}


def test_a_restore_makes_batches_read_nan(tmp_path):
    model, optimizer, checkpoints, _ = saved(tmp_path)
    none = np.full(4, -1, np.int32)
    batch = {"user": np.arange(4, dtype=np.int32), "tags": none, "hour": none}
    (rows,) = model.embeddings.staged([batch], optimizer)
    checkpoints.save(2, (model, optimizer), {})
    assert np.isfinite(model.embeddings.concat(rows)).all()
    checkpoints.restore((model, optimizer))
    assert np.isnan(model.embeddings.concat(rows)).any()


def test_a_checkpoint_of_other_tables_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path)
    checkpoints = checkpoint.Checkpoints(tmp_path)
    monkeypatch.setitem(globals(), "USERS", 2 * USERS)
    other = hosted()
    optimizer = sj.Optimizer(other, sj.optimizers.adagrad(0.1))
    before = rows_of(other, "user")
    with pytest.raises(ValueError, match="1: made with another model or optimizer: "):
        checkpoints.restore((other, optimizer))
    np.testing.assert_array_equal(rows_of(other, "user"), before)


def test_a_full_disk(tmp_path, monkeypatch):
    model, optimizer, checkpoints, _ = saved(tmp_path)
    host: Any = next(iter(optimizer.host_rows(model).values()))

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host._pieces, "save", full)
    with pytest.raises(OSError, match="make room there and resume; earlier"):
        checkpoints.save(2, (model, optimizer), {})


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="rows in host memory need a folder"):
        fitted(hosted(), validation=made(1, 200), early_stopping=sj.EarlyStopping())
    with pytest.raises(
        ValueError, match="batch has ids of .* rows of the tables user, ta"
    ):
        fitted(hosted(), batch_size=512)


def test_an_exported_predictor_has_all_rows(tmp_path):
    clicks, unseen = made(), made(2, 300)
    model = hosted()
    optimizer, _ = fitted(model, clicks=clicks)
    optimizer.flush(model)
    expected = sj.predict(model, unseen)
    path = tmp_path / "clicks.sj"
    sj.export_predictor(model, path, names=clicks)
    found = sj.load_predictor(path).predict(unseen)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # The model goes on.
    np.testing.assert_array_equal(sj.predict(model, unseen), expected)


def test_a_deleted_model_leaves_no_rows():
    # Whatever other tests have left.
    before = {id(array) for array in jax.live_arrays()}
    model = hosted()
    optimizer, _ = fitted(model, validation=made(1, 200))
    host: Any = next(iter(optimizer.host_rows(model).values()))
    arrays = weakref.ref(host._arrays["row"])
    del model, optimizer
    gc.collect()
    assert arrays() is None
    slots = [a.shape for a in jax.live_arrays() if id(a) not in before and a.ndim > 1]
    assert slots == []


def test_rows_are_read_with_their_optimizer_alone():
    here, there = Model(), hosted()
    rule = sj.optimizers.adam(0.02)  # whose rows are behind
    optimizers = [fitted(model, rule=rule)[0] for model in (here, there)]
    other = nnx.clone(optimizers[1])
    with pytest.raises(ValueError, match="the state of another optimizer, which trai"):
        sj.predict(there, made(1, 200), optimizer=other)
    with pytest.raises(ValueError, match="the state of another optimizer, which trai"):
        other.flush(there)
    more = [
        sj.fit(m, o, made(), num_epochs=1, batch_size=64)[0]["loss"]
        for m, o in zip((here, there), optimizers, strict=True)
    ]
    assert more[1] == more[0]
