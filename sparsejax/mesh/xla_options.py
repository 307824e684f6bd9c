"""Options of XLA for single programs; flags in the environment are for whole processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA then times no programs to choose one, and has no operation whose result depends on
# the order in which threads end. A CPU ignores it.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

# What is traced within it is found again only within it, also functions under `jax.jit`.
_same_bits = jax.make_user_context(default_value=False)


def same_bits_are_wanted() -> bool:
    """Whether what is traced now must give the same bits in each run.

    XLA's option does not reach the operations of other libraries.
    """
    return _same_bits.value


def jits(f: Callable[..., Any], **options: Any) -> dict[bool, jax.stages.Wrapped]:
    """`jax.jit(f, **options)` in two forms, by whether it is deterministic.

    A deterministic program gives the same bits in every process on the same kind of GPU.
    It cannot be called inside another program: that one's options hold for both.
    """

    @functools.wraps(f)
    def same(*arguments, **named):
        with _same_bits(True):
            return f(*arguments, **named)

    return {
        False: jax.jit(f, **options),
        True: jax.jit(same, compiler_options=DETERMINISTIC, **options),
    }
