"""Checkpoints restore what was saved, and detect damage."""

import gc
import math
import os
import pathlib
import shutil
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from matrices import random_csr
from orbax.checkpoint import v1 as ocp

from sparsejax.data.files.names import as_names
from sparsejax.engine.train import checkpoint
from sparsejax.engine.train.checkpoint import (
    Checkpoints,
    CheckpointWarning,
    checksums,
    fingerprint,
)
from sparsejax.sparse import CSR


def modules(seed: int, width: int = 8):
    rngs = nnx.Rngs(seed)
    model = nnx.Sequential(
        nnx.Linear(30, width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    )
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def fill(pair, value: float) -> None:
    """Sets all parameters to a value."""
    state = nnx.state(pair[0], nnx.Param)
    nnx.update(pair[0], jax.tree.map(lambda p: jnp.full_like(p, value), state))


def kernel(pair) -> np.ndarray:
    return np.asarray(pair[0].layers[0].kernel[...])


def largest_file(directory: pathlib.Path) -> pathlib.Path:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_round_trip(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.restore(modules(0)) is None
    saved, other = modules(0), modules(1)
    saved[0](jnp.ones((2, 30)))  # moves the random stream
    progress = {"epoch": 3, "loss": 0.1 + 0.2, "best": -math.inf, "history": [{"a": 1}]}
    checkpoints.save(7, saved, progress)
    assert checkpoints.restore(other) == progress
    np.testing.assert_array_equal(kernel(saved), kernel(other))
    x = jnp.ones((4, 30))
    np.testing.assert_array_equal(saved[0](x), other[0](x))  # the same next mask
    assert not [p for p in (tmp_path / "c").iterdir() if "tmp" in p.name]


def test_arrays_are_not_compressed(tmp_path):
    saved = modules(0, width=1000)
    fill(saved, 0.0)
    Checkpoints(tmp_path).save(0, saved, {})
    assert largest_file(tmp_path).stat().st_size > kernel(saved).nbytes


def test_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    pair = modules(0)
    for step, score in enumerate([0.1, 0.7, None, 0.3, None, None]):
        fill(pair, step)
        checkpoints.save(step, pair, {"step": step}, score=score)
    assert checkpoints.steps() == [1, 3, 4, 5]
    assert checkpoints.restore(pair) == {"step": 5}
    assert checkpoints.restore(pair, best=True) == {"step": 1}
    assert (kernel(pair) == 1).all()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "metadata"])
def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    pair = modules(0)
    for step in (1, 2):
        checkpoints.save(step, pair, {"step": step})
    victim = largest_file(tmp_path / "2")
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x10
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "remove":
        victim.unlink()
    else:
        (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("{")
    fresh = modules(1)
    with pytest.warns(CheckpointWarning, match="2 is damaged and was skipped"):
        assert checkpoints.restore(fresh) == {"step": 1}
    np.testing.assert_array_equal(kernel(fresh), kernel(pair))
    checkpoints.delete_after(1)
    assert checkpoints.steps() == [1]
    checkpoints.save(2, pair, {"step": 2})
    assert checkpoints.restore(fresh) == {"step": 2}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_of_any_file_is_told_in_one_line(tmp_path, capfd, caplog, damage):
    pair, folder = modules(0), tmp_path / "c"
    for step in (1, 2):
        Checkpoints(folder).save(step, pair, {"step": step})
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    found = []
    for victim in files:
        damaged = tmp_path / "damaged"
        shutil.copytree(folder, damaged)
        victim = damaged / victim.relative_to(folder)
        content = bytearray(victim.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 0x10
        if damage == "remove":
            victim.unlink()
        else:
            victim.write_bytes(content[: None if damage == "flip" else -9])
        fresh = modules(1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append((Checkpoints(damaged).restore(fresh) or {})["step"])
        np.testing.assert_array_equal(kernel(fresh), kernel(pair))
        assert [str(w.message).count("\n") for w in told] == [0] * (2 - found[-1])
        shutil.rmtree(damaged)
    gc.collect()
    assert set(found) == {1, 2}  # orbax has files that it does not need
    assert capfd.readouterr().err == "" and not caplog.records


def test_an_edited_record_is_damage(tmp_path):
    """Another score or position in it would go unnoticed otherwise."""
    pair, checkpoints = modules(0), Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, pair, {"step": step}, score=step)
    path = tmp_path / "2" / "_CHECKPOINT_METADATA"
    text = path.read_text()
    for old, new in [
        (r"{\"step\": 2}", r"{\"step\": 7}"),
        ("handlers.pytree_handler.PyTreeHandler", "handlers.mine.Handler"),
        ("orbax.checkpoint.experimental.v1", "os.system"),
        ('"item_handlers": {', '"item_handlers": {"other": "antigravity", '),
        ('"record": "', '"record": 3, "other": "'),
        ('{"item_handlers"', "[" * 10**5 + '{"item_handlers"'),
    ]:
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.warns(CheckpointWarning, match="2 is damaged and was skipped"):
            assert checkpoints.restore(modules(1), best=True) == {"step": 1}
        progress = checkpoints.progress()
        assert progress == {"step": 1}
    assert "antigravity" not in sys.modules


def test_checkpoints_of_another_run_and_of_a_later_release(tmp_path, monkeypatch):
    pair = modules(0)
    ours = Checkpoints(tmp_path / "a", identity={"data": "x", "sizes": (1, 2)})
    ours.save(1, pair, {})
    assert ours.restore(pair) == {}
    theirs = Checkpoints(tmp_path / "b", identity={"data": "y", "sizes": (1, 2)})
    theirs.save(2, pair, {})
    shutil.copytree(tmp_path / "b" / "2", tmp_path / "a" / "2")
    with pytest.raises(ValueError, match="2: is a .* data is 'y' there and 'x' here"):
        ours.restore(pair)
    shutil.rmtree(tmp_path / "a" / "2")
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    ours.save(3, pair, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="3: a checkpoint of version 2; .* version 1"):
        ours.restore(pair)


def test_a_checkpoint_that_is_deleted_while_it_is_read(tmp_path, monkeypatch):
    """By the policy of a training that goes on, which has saved another one."""
    pair, checkpoints = modules(0), Checkpoints(tmp_path)
    checkpoints.save(1, pair, {"step": 1})
    load = ocp.load

    def deleted(path, *arguments, **options):
        if path.name == "1":
            checkpoints.save(2, pair, {"step": 2})
        if path.name in doomed:
            shutil.rmtree(path)
        return load(path, *arguments, **options)

    monkeypatch.setattr(ocp, "load", deleted)
    doomed = {"1"}
    assert checkpoints.restore(modules(1)) == {"step": 2}
    doomed = {"2"}
    assert checkpoints.restore(modules(1)) is None


def test_other_folders_are_no_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, modules(0), {})
    for name in ("²", "٣", "01", "-1", "1.5", "x"):
        (tmp_path / name).mkdir()
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(modules(0)) == {}
    checkpoints.save(2, modules(0), {})
    assert checkpoints.steps() == [1, 2]


def test_all_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, modules(0), {})
    largest_file(tmp_path / "1").unlink()
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(ValueError, match="no checkpoint in .* can be read"),
    ):
        checkpoints.restore(modules(0))


def test_half_written_checkpoint_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    pair = modules(0)
    checkpoints.save(1, pair, {"step": 1})
    # What a killed process leaves behind.
    os.makedirs(tmp_path / "2.orbax-checkpoint-tmp-17" / "state")
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(pair) == {"step": 1}


def test_other_model_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, modules(0), {})
    with pytest.raises(ValueError, match=r"shape \(8,\) there and \(9,\) here"):
        checkpoints.restore(modules(0, width=9))
    model, _ = modules(0)
    sgd = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    with pytest.raises(ValueError, match="another model or optimizer: this model has"):
        checkpoints.restore((model, sgd))


def test_checksum_sees_any_change():
    rng = np.random.default_rng(0)
    array = rng.standard_normal((5, 7)).astype(np.float32)
    before = checksums({"a": jnp.asarray(array)})
    for changed in (array.copy(), array[::-1].copy(), array.T.reshape(5, 7).copy()):
        if (changed == array).all():
            changed[2, 3] = np.nextafter(changed[2, 3], 9)
        assert checksums({"a": jnp.asarray(changed)}) != before
    half, flags = jnp.asarray(array, jnp.bfloat16), jnp.asarray(array > 0)
    assert set(checksums({"b": half, "c": flags, "d": jnp.int32(3)})) == {"b", "c", "d"}


def test_checksum_does_not_depend_on_the_mesh():
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("model",))
    array = jnp.arange(64.0).reshape(16, 4)
    spec = jax.sharding.NamedSharding(mesh, jax.P("model"))
    assert checksums({"a": array}) == checksums({"a": jax.device_put(array, spec)})


def test_fingerprint():
    x = random_csr(5, 9, valued=True, extra=0)
    data = np.asarray(x.data)
    same = CSR(np.pad(data, (0, 3)), jnp.pad(x.indices, (0, 3)), x.indptr, num_cols=9)
    assert fingerprint(x) == fingerprint(same)
    names = as_names(["ab", "c", "ä"])
    assert fingerprint(names) == fingerprint(as_names(["ab", "c", "ä"]))
    for other in (["a", "bc", "ä"], ["c", "ab", "ä"], ["ab", "c"]):
        assert fingerprint(names) != fingerprint(as_names(other))
    others = [
        CSR(data + 1, x.indices, x.indptr, num_cols=9),
        CSR(x.data, x.indices + 1, x.indptr, num_cols=10),
        CSR(None, x.indices, x.indptr, num_cols=9),
        random_csr(5, 9, valued=True, seed=1),
    ]
    assert len({fingerprint(m) for m in [x, *others]}) == 5
    assert fingerprint(x, np.ones(5)) != fingerprint(x)
