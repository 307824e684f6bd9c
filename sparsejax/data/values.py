"""Numbers written as text."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# What Arrow's parser takes; Python's float() also takes `1_000` and other digits.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


# By `call_function`, since type checkers cannot see the functions that pyarrow.compute
# makes when it is imported.


def trim(texts: pa.Array) -> pa.Array:
    """Without white space at both ends."""
    return pc.call_function("utf8_trim_whitespace", [texts])


def lengths(texts: pa.Array) -> np.ndarray:
    """`[n]` number of bytes of each."""
    return pc.call_function("binary_length", [texts]).to_numpy()


def parse_values(texts: pa.Array) -> np.ndarray | None:
    """`[n]` float64, or None if one is not a number that is finite as float32.

    `value_problem` says what is wrong with which.
    """
    try:
        values = trim(texts).cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        return None
    with np.errstate(over="ignore"):
        return values if np.isfinite(values.astype(np.float32)).all() else None


def value_problem(text: str) -> str | None:
    """What is wrong with one value, or None if nothing is."""
    stripped = text.strip()
    if _NOT_FINITE.fullmatch(stripped):
        return f"value {text!r} is not finite"
    if not _NUMBER.fullmatch(stripped):
        return f"value {text!r} is not a number"
    with np.errstate(over="ignore"):
        if math.isinf(np.float32(float(stripped))):
            return f"value {text!r} is too large for float32"
    return None
