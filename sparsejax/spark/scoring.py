"""The predictor of a task: on the task's GPU, loaded once in a process."""

from __future__ import annotations

import os
from typing import Any

import jax
import pyarrow as pa

from sparsejax.predictors.files import Kept
from sparsejax.predictors.predictor import Predictor

# For each address of a GPU (None for JAX's own choice) the last predictor that a task has
# asked for.
_loaded: dict[str | None, Kept] = {}


def predictor_here(path: str, identity: str) -> Predictor:
    """The predictor, on the device of this task.

    Spark gives a Python process to one task after another, each time with another GPU.
    So the device is chosen for each task, and a process may have the predictor on
    several.

    Args:
      path: the file of the predictor, or its address.
      identity: its `predictor_identity`.

    Raises:
      ValueError: it is no predictor, or another one; or there is no such GPU.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None  # this is called in a task
    _bound(context.cpus())
    gpus = context.resources().get("gpu")
    address = None if gpus is None else gpus.addresses[0]
    # Arrays and programs go where this says.
    jax.config.update("jax_default_device", _device(address))
    return _loaded.setdefault(address, Kept()).load(path, identity)


def _bound(cpus: int) -> None:
    """Limits this process to a task's share of the processors and of the GPUs' memory.

    JAX reads the variables when it first uses a device.
    """
    for name in ("NPROC", "PJRT_NPROC"):  # XLA's threads on a CPU
        os.environ.setdefault(name, str(cpus))
    # Other processes use the same GPU before and after this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pa.set_cpu_count(cpus)


def _device(address: str | None) -> Any:
    """The device of an address that Spark gives."""
    if address is None:
        return None
    devices = {str(d.local_hardware_id): d for d in jax.local_devices(backend="gpu")}
    if address not in devices:
        raise ValueError(
            f"Spark gives this task the GPU {address!r}, but JAX has the GPUs "
            f"{', '.join(devices)}: let the discovery script print their numbers, and do "
            "not set CUDA_VISIBLE_DEVICES"
        )
    return devices[address]
