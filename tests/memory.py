"""What a compiled program needs, by the compiler's own figures."""

from collections.abc import Callable

import jax


def temporary_bytes(function: Callable, *arguments) -> int:
    """Bytes for intermediates, without arguments and results."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
