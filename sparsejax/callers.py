"""Warnings that name the caller's line of code, and errors about packages that are not
installed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Generator

# A warning names the first line outside these files. contextlib is included, because it calls
# context managers that are used as decorators. Each prefix must be shorter than the file's name.
_INSIDE = (os.path.dirname(__file__), os.path.splitext(contextlib.__file__)[0])


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns; the warning names the line that called the library, however deep this is."""
    warnings.warn(message, category, skip_file_prefixes=_INSIDE)


@contextlib.contextmanager
def needing(what: str, extra: str) -> Generator[None]:
    """While this context is open, an import error says which extra must be installed.

    Args:
      what: the beginning of the message, in which {} is the name of the package.
      extra: the extra of sparsejax that has the package.
    """
    try:
        yield
    except ImportError as error:
        text = (
            f"{what.replace('{}', str(error.name))}: pip install 'sparsejax[{extra}]'"
        )
        raise ImportError(text) from error
