"""Loads a predictor for a task of Spark: on the task's GPU, once for each process."""

from __future__ import annotations

import os
from typing import Any

import jax
import pyarrow as pa

from sparsejax.predictors.files import Kept
from sparsejax.predictors.predictor import Predictor

# The predictor that was loaded last, for each GPU's address (None if JAX chooses the device).
_loaded: dict[str | None, Kept] = {}


def predictor_here(path: str, identity: str) -> Predictor:
    """Loads the predictor on the device of this task, unless this process has it already.

    Spark runs one task after another in a Python process, each time with another GPU. So the
    device is chosen for each task, and a process may hold the predictor on several devices.

    Args:
      path: file of the predictor, or its address.
      identity: the `predictor_identity` that the file must have.

    Raises:
      ValueError: the file is no predictor or has another identity, or JAX does not see the
        task's GPU.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None  # this is called in a task
    _bound(context.cpus())
    gpus = context.resources().get("gpu")
    address = None if gpus is None else gpus.addresses[0]
    # From now on, JAX puts arrays on this device by default, and runs programs there.
    jax.config.update("jax_default_device", _device(address))
    return _loaded.setdefault(address, Kept()).load(path, identity)


def _bound(cpus: int) -> None:
    """Limits this process to its task's share of the processors and of the GPU's memory.

    JAX reads these environment variables when it first uses a device.
    """
    for name in ("NPROC", "PJRT_NPROC"):  # XLA's threads on a CPU
        os.environ.setdefault(name, str(cpus))
    # Other processes use the same GPU before and after this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pa.set_cpu_count(cpus)


def _device(address: str | None) -> Any:
    """JAX's device for the address of a GPU that Spark has assigned; None without an address."""
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
