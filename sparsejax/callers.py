"""Warnings that name the line of the caller's program."""

from __future__ import annotations

import contextlib
import os
import warnings

# A warning names the first line outside these files. Context managers that are decorators
# call from contextlib. A prefix must be shorter than the name.
_INSIDE = (os.path.dirname(__file__), os.path.splitext(contextlib.__file__)[0])


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns; the warning names the line that called the library, however deep this is."""
    warnings.warn(message, category, skip_file_prefixes=_INSIDE)
