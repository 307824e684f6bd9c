"""Runs GPU programs in tests."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def kernel_can_run() -> Iterator[None]:
    """While this context is open, GPU programs run: on a GPU as they are, elsewhere
    interpreted.
    """
    if jax.default_backend() == "gpu":
        yield
    else:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
