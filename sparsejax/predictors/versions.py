"""Folders of versions of a predictor: which numbers they have, and which comes next.

::

    films/3/model.predictor     the version 3 of the model films, as Triton has it
"""

from __future__ import annotations

import os
import pathlib

FILE = "model.predictor"  # of each version, in a folder with its number as name


def numbered(folder: pathlib.Path) -> list[int]:
    """The numbers that are names in a folder, the highest first.

    Only as `str(number)` is written: 03 and 3 would be one version.

    Raises:
      OSError: the folder cannot be read.
    """
    found = [name for name in _digits(folder) if name == str(int(name))]
    return sorted(map(int, found), reverse=True)


def following(folder: pathlib.Path) -> int:
    """The number of the next version: above all that a folder or file has as name.

    Raises:
      OSError: the folder cannot be read.
    """
    return max(map(int, _digits(folder)), default=0) + 1


def _digits(folder: pathlib.Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.isascii() and name.isdigit()]
