"""Training while a profile is recorded, and after it."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import profiled_training
import pytest

import sparsejax as sj
from sparsejax.mesh import xla_options

PATH = pathlib.Path(profiled_training.__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["clicks", "histories", "items"])
@pytest.mark.parametrize("rule", ["adam", "adamw", "momentum", "ftrl"])
def test_a_profile_does_no_harm(kind, rule):
    """In a process of its own, which CUDA may end."""
    command = [sys.executable, str(PATH), kind, rule, "10"]
    subprocess.run(command, check=True, timeout=300)


def test_the_losses_are_those_without_a_profile(monkeypatch):
    """The script itself, on a CPU."""
    monkeypatch.setattr(profiled_training, "ROWS", 200)
    monkeypatch.setattr(profiled_training, "BATCH", 64)
    assert profiled_training.main("items", "adagrad", 1) == 0


def test_no_program_runs_both_within_a_profile_and_without(monkeypatch, tmp_path):
    """Those of a training are compiled anew for the profile."""
    monkeypatch.setattr(profiled_training, "BATCH", 64)
    config, data = profiled_training.items(np.random.default_rng(0))
    programs = {False: set(), True: set()}
    # On a CPU there is no option for profiles: one that makes no difference takes its place.
    options_of = {False: {}, True: {"xla_cpu_enable_fast_min_max": True}}
    monkeypatch.setattr(
        xla_options, "gpu_options", lambda **_: options_of[xla_options.is_profiled()]
    )

    def listen(event: str, duration_secs: float, **named: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            programs[xla_options.is_profiled()].add(named.get("fun_name"))

    jax.clear_caches()  # an earlier test may have had programs of these shapes
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for profiled in programs:
            monkeypatch.setattr(xla_options, "is_profiled", lambda it=profiled: it)
            model, optimizer = sj.build(config, data, sj.optimizers.adagrad(0.1))
            folder = tmp_path / str(profiled)
            options = {"num_epochs": 1, "batch_size": 64, "checkpoint_dir": folder}
            sj.fit(model, optimizer, data, **options)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    ours = {f"jit({name})" for name in ("_ordered", "run_steps", "_checksums")}
    assert ours <= programs[True]
