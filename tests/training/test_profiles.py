"""Training while a profile is recorded, and after it."""

import pathlib
import subprocess
import sys

import profiled_training
import pytest

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
