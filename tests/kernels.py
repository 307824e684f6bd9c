"""Where the GPU kernels run in tests."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def kernel_can_run() -> Iterator[None]:
    """On a GPU the kernel is what it is; elsewhere it is interpreted."""
    if jax.default_backend() == "gpu":
        yield
    else:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
