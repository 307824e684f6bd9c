"""The implementations of an operation, and on which GPUs the Mosaic one is chosen."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax

from sparsejax.mesh.layout import traced_for_one_device

# The argument `implementation` of every operation. A name is used on whatever machine the
# operation is traced, so a machine without a GPU can lower a program for one. None chooses
# by the devices that are visible where the operation is traced.
Implementation = Literal["xla", "mosaic_gpu"] | None


class Capabilities(NamedTuple):
    """The range of compute capabilities for which a GPU program is chosen."""

    oldest: float
    newest: float = math.inf


# Programs that gather or move single rows.
HOPPER_OR_NEWER = Capabilities(9.0)
# Programs that multiply matrices with `wgmma`, an instruction of sm_90a alone.
HOPPER = Capabilities(9.0, 9.0)


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for an implementation that does not exist."""
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(
            f'implementation is None, "xla" or "mosaic_gpu", got {implementation!r}'
        )


def mosaic_can_run(capabilities: Capabilities, *, divided: bool = False) -> bool:
    """Whether a GPU program for these capabilities can run where this is traced.

    Args:
      capabilities: of the GPUs that the program is for.
      divided: whether `shard_map` will divide the work over devices. Without it there
        must be one device: the partitioner cannot divide a GPU program.
    """
    if jax.default_backend() != "gpu" or not (divided or traced_for_one_device()):
        return False
    capability = float(getattr(jax.devices()[0], "compute_capability", 0))
    return capabilities.oldest <= capability <= capabilities.newest
