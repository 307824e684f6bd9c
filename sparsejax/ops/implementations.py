"""The implementations of an operation, and the GPUs on which each is chosen."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
from jax import lax

from sparsejax.mesh.layout import is_for_one_device

# The argument `implementation` of every operation.
#
#   "xla"         XLA's operations, in the form for the platform that the program is for
#   "xla_gpu"     XLA's operations in the form for GPUs, on every platform
#   "cusparse"    cuSPARSE's product, where rows are gathered and added; else as "xla_gpu"
#   "mosaic_gpu"  a GPU program of `pallas_kernels`
#   None          the fastest that can run on the kind of device that is visible during
#                 tracing; the number of visible devices does not matter
#
# A named implementation is used whatever machine traces the operation. So a machine without
# a GPU can lower a program for a GPU, and run the form that other machines run.
Implementation = Literal["xla", "xla_gpu", "cusparse", "mosaic_gpu"] | None

# Implementations in a form for GPUs. When named, they are used on every platform.
FOR_GPU = "xla_gpu", "cusparse", "mosaic_gpu"


class Capabilities(NamedTuple):
    """The range of compute capabilities for which an implementation is chosen."""

    oldest: float
    newest: float = math.inf


# Programs that gather or move single rows run on these GPUs.
HOPPER_OR_NEWER = Capabilities(9.0)
# Programs that multiply matrices with `wgmma`, an instruction of sm_90a alone.
HOPPER = Capabilities(9.0, 9.0)
# cuSPARSE is chosen on these GPUs. Newer GPUs run our own programs, which are faster.
BEFORE_HOPPER = Capabilities(0.0, 8.9)


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for an implementation that does not exist."""
    if implementation not in (None, *FOR_GPU, "xla"):
        raise ValueError(
            'implementation is None, "xla", "xla_gpu", "cusparse" or "mosaic_gpu", '
            f"got {implementation!r}"
        )


def gpu_capability() -> float | None:
    """Compute capability of the GPUs that are visible here; None if there are none.

    Each choice that depends on the GPU calls this function. A test that replaces it
    lowers the program for another GPU.
    """
    if jax.default_backend() != "gpu":
        return None
    return float(getattr(jax.devices()[0], "compute_capability", 0))


def custom_call_can_run(capabilities: Capabilities, *, divided: bool = False) -> bool:
    """Whether a custom call for these GPUs can run on the devices visible during tracing.

    Our GPU programs and cuSPARSE's are custom calls.

    Args:
      capabilities: compute capabilities of the GPUs that the call supports.
      divided: whether `shard_map` will divide the work over devices. Without it the
        program must be for one device: the partitioner cannot divide a custom call.
    """
    capability = gpu_capability()
    if capability is None or not (divided or is_for_one_device()):
        return False
    return capabilities.oldest <= capability <= capabilities.newest


def computed_once[Tree](tree: Tree) -> Tree:
    """Returns equal arrays, for a chain of operations whose results are read more than once.

    A CPU's compiler copies the operations of an array into each operation that reads it.
    If each link of a chain is read twice, the program doubles with each link.
    """
    return tree if gpu_capability() is not None else lax.optimization_barrier(tree)


def xla_is_for_gpu(implementation: Implementation) -> bool:
    """Whether XLA's operations use the sizes and the order that are fast on a GPU."""
    return implementation in FOR_GPU or gpu_capability() is not None
