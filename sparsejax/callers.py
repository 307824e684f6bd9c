"""Warnings that name the line of the caller's program."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable

# A warning names the first line outside these files. Context managers that are decorators
# call from contextlib. A prefix must be shorter than the name.
_INSIDE = (os.path.dirname(__file__), os.path.splitext(contextlib.__file__)[0])


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns; the warning names the line that called the library, however deep this is."""
    warnings.warn(message, category, skip_file_prefixes=_INSIDE)


def renamed[**P, R](**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a function also takes arguments by their earlier names, and warns then.

    Args:
      names: the names of today, by the earlier ones, which the next release drops.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **options: P.kwargs) -> R:
            for before in names.keys() & options.keys():
                now = names[before]
                if now in options:
                    raise TypeError(
                        f"{before} is the earlier name of {now}: give {now} alone"
                    )
                warn_caller(
                    f"{before}= is {now}= now; 0.2 drops the earlier name",
                    FutureWarning,
                )
                options[now] = options.pop(before)
            return function(*args, **options)

        return called

    return decorated
