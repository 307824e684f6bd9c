"""deterministic=True: options passed to the compiler, and equal bits in several processes."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from checkerboards import build, checkerboard, parameters

from sparsejax import optimizers
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.mesh.layout import make_mesh
from sparsejax.verbs.fit import fit

# Values and normalized rows: on a GPU, sums that XLA may add in any order. It trains with
# each of its arguments, and moves what was dumped meanwhile to a folder of that name.
TRAINING = """
import pathlib, sys
import numpy as np
import scipy.sparse
import sparsejax as sj
from sparsejax.engine.train.checkpoint import checksums
from flax import nnx

rng = np.random.default_rng(0)
data = scipy.sparse.random_array((256, 90), density=0.2, rng=rng, format="csr")
train, heldout = sj.SparseDataset.from_scipy(data).split(0.8, seed=0)
config = sj.NetworkConfig.autoencoder((8,), dropout=0.5)
dump, *flags = sys.argv[1:]
for flag in flags:
    model, optimizer = sj.build(config, train, sj.optimizers.momentum(1e-2), seed=3)
    history = sj.fit(
        model, optimizer, train, batch_size=64, num_epochs=3, validation=heldout,
        deterministic=flag == "True",
    )
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    print([(e["loss"], e["ndcg@20"]) for e in history], end="")
    print(checksums({str(path): array[...] for path, array in parameters}))
    if dump:
        (pathlib.Path(dump) / flag).mkdir()
        for file in pathlib.Path(dump).glob("*debug_options*"):
            file.rename(file.parent / flag / file.name)
"""
# The programs of `fit` that compute weights, or what decides which weights are kept.
PROGRAMS = "jit_run_steps", "jit_settle", "jit_recommended", "jit_measured"


def started(*flags: bool, dump: pathlib.Path | None = None) -> subprocess.Popen:
    """Starts a process that trains; it prints losses, metrics and checksums, one line for each
    training.
    """
    env = dict(os.environ)
    if dump is not None:
        pattern = "|".join(PROGRAMS)
        env["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_module_re={pattern}"
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(dump or ""), *map(str, flags)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen) -> str:
    out, _ = process.communicate()
    assert process.returncode == 0
    return out


def programs_told(folder: pathlib.Path) -> set[str]:
    """The programs for which XLA was asked for deterministic operations."""
    told = {}
    for path in folder.glob("*debug_options*"):
        (name,) = re.findall("|".join(PROGRAMS), path.name)
        flag = "xla_gpu_deterministic_ops: true" in path.read_text()
        assert told.setdefault(name, flag) == flag
    assert told.keys() == set(PROGRAMS)
    return {name for name, flag in told.items() if flag}


def test_the_compiler_is_told(tmp_path):
    said = printed(started(True, False, dump=tmp_path)).splitlines()
    assert programs_told(tmp_path / "True") == set(PROGRAMS)
    assert programs_told(tmp_path / "False") == set()
    if jax.default_backend() == "cpu":
        first, second = said
        assert first == second


@pytest.mark.gpu
def test_two_processes_have_the_same_bits():
    processes = [started(True), started(True)]
    assert printed(processes[0]) == printed(processes[1])


def test_trains_the_same_on_a_mesh():
    train, heldout = checkerboard(200, 20)

    def trained(deterministic):
        model, optimizer = build(20, rule=optimizers.adam(1e-2), corruption=0.3)
        history = fit(
            model,
            optimizer,
            train,
            batch_size=64,
            num_epochs=2,
            validation=heldout,
            early_stopping=EarlyStopping(patience=1),
            deterministic=deterministic,
        )
        return [entry["loss"] for entry in history], parameters(model)

    with jax.set_mesh(make_mesh(data=2, model=4)):
        assert trained(True) == trained(False)


def test_a_resume_keeps_it(tmp_path):
    train, _ = checkerboard(20, 8)
    options = {"num_epochs": 1, "checkpoint_dir": tmp_path}
    fit(*build(8), train, deterministic=True, **options)
    with pytest.raises(ValueError, match="cannot resume with deterministic False"):
        fit(*build(8), train, resume=True, **options)
    options["num_epochs"] = 2
    history = fit(*build(8), train, deterministic=True, resume=True, **options)
    assert len(history) == 2
