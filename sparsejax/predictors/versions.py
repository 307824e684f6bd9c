"""Folders with versions of a predictor: existing numbers, and the next number.

::

    films/3/model.predictor     version 3 of the model "films", in the layout of Triton
"""

from __future__ import annotations

import os
import pathlib

FILE = "model.predictor"  # name of the file in the folder of each version


def numbered(folder: pathlib.Path) -> list[int]:
    """The version numbers that are names in a folder, in descending order.

    Only names equal to `str(number)` count: 03 and 3 would be the same version.

    Raises:
      OSError: the folder cannot be read.
    """
    found = [name for name in _digits(folder) if name == str(int(name))]
    return sorted(map(int, found), reverse=True)


def following(folder: pathlib.Path) -> int:
    """The number of the next version: one more than any number in the folder.

    Raises:
      OSError: the folder cannot be read.
    """
    return max(map(int, _digits(folder)), default=0) + 1


def _digits(folder: pathlib.Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.isascii() and name.isdigit()]
