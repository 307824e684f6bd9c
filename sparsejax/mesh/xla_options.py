"""Options of XLA for single programs; flags in the environment are for whole processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# XLA then times no programs to choose one, and has no operation whose result depends on
# the order in which threads end. A CPU ignores it.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def jits(f: Callable[..., Any], **options: Any) -> dict[bool, jax.stages.Wrapped]:
    """`jax.jit(f, **options)` in two forms, by whether it is deterministic.

    A deterministic program gives the same bits in every process on the same kind of GPU.
    It cannot be called inside another program: that one's options hold for both.
    """
    return {
        deterministic: jax.jit(
            f, compiler_options=DETERMINISTIC if deterministic else None, **options
        )
        for deterministic in (False, True)
    }
