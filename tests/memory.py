"""The memory that a compiled program needs, as the compiler states it."""

from collections.abc import Callable

import jax


def temporary_bytes(function: Callable, *arguments, **options) -> int:
    """Bytes for intermediates, without arguments and results; options are jit's."""
    analysis = (
        jax.jit(function, **options).lower(*arguments).compile().memory_analysis()
    )
    assert analysis is not None
    return analysis.temp_size_in_bytes
