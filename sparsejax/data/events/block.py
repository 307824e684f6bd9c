"""Blocks of events, as all decoders give them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows that were read from a part of a file.

    Attributes:
      rows: `[lines]` the row name on each line.
      lengths: `[lines]` int, how many entries each line has; None if each has one.
      features: `[entries]` feature names, line after line.
      values: `[entries]` float64, or None.
      times: `[entries]` int64, float64 or datetime64[us], or None.
    """

    rows: pa.Array
    lengths: np.ndarray | None
    features: pa.Array
    values: np.ndarray | None
    times: np.ndarray | None = None
