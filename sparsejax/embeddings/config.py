"""The tables and features of an `EmbeddingCollection`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from sparsejax.ops.gather_matmul import Combiner
from sparsejax.optimizers.rules import Rule

Placement = Literal["replicated", "rows", "table", "columns"]
Outside = Literal["error", "drop"]
Initializer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of embeddings: a row of `dim` numbers for each id.

    >>> TableConfig(1_000_000, 16, placement="rows").dtype
    dtype('float32')

    Attributes:
      num_rows: ids are `0 .. num_rows - 1`.
      dim: numbers in a row.
      init: makes a row: `init(key, (1, dim), dtype)`, with a key for each row. Its scale must
        not depend on the number of rows, as that of `glorot_uniform` does. By default
        numbers are uniform between `-1 / sqrt(num_rows)` and `1 / sqrt(num_rows)`.
      dtype: of the numbers.
      placement: how the table lies on a mesh: "rows" divides its rows over "model",
        "table" puts all of them on one device, "columns" cuts its width into pieces, each on
        one device, "replicated" puts the whole table on every device. By default
        `EmbeddingCollection` decides.
      pieces: of the width, with the placement "columns". A rule with one number a row has
        one for each piece.
      rule: how its rows are trained; by default by the rule of the `Optimizer`.
    """

    num_rows: int
    dim: int
    _: dataclasses.KW_ONLY
    init: Initializer | None = None
    dtype: jax.typing.DTypeLike = jnp.float32
    placement: Placement | None = None
    pieces: int = 2
    rule: Rule | None = None

    def __post_init__(self) -> None:
        for name in ("num_rows", "dim", "pieces"):
            _check_positive(name, getattr(self, name))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        check_floating("dtype of a table", self.dtype)
        if self.placement is not None:
            check_placement(self.placement)
        if self.rule is not None and not isinstance(self.rule, Rule):
            raise TypeError(
                "rule of a table must be one of sparsejax.optimizers, got "
                f"{type(self.rule).__name__}"
            )


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """A feature: ids of each example, and what is made of their rows.

    >>> FeatureConfig("item", combiner=None, length=20).bags
    20

    Attributes:
      table: name of the table with its rows. Features can share a table.
      combiner: "sum", "mean" or "sqrtn" of the rows, see `sparsejax.gather_matmul`. With
        None the rows stay apart, in the order of the ids.
      length: with the combiner None, the most ids that an example has.
      outside: what to do about an id that the table does not have: "error" or "drop".
        Where ids are traced or on a device, an error is a row of NaN.
    """

    table: str
    _: dataclasses.KW_ONLY
    combiner: Combiner | None = "sum"
    length: int | None = None
    outside: Outside = "error"

    def __post_init__(self) -> None:
        if self.combiner not in (None, *get_args(Combiner)):
            raise ValueError(
                f'combiner is "sum", "mean", "sqrtn" or None, got {self.combiner!r}'
            )
        if self.outside not in get_args(Outside):
            raise ValueError(f'outside is "error" or "drop", got {self.outside!r}')
        if (self.combiner is None) != (self.length is not None):
            raise ValueError(
                "length belongs to combiner=None, and is needed there: got combiner="
                f"{self.combiner!r}, length={self.length}"
            )
        if self.length is not None:
            _check_positive("length", self.length)

    @property
    def bags(self) -> int:
        """How many rows of numbers an example gets: `length`, or 1."""
        return 1 if self.length is None else self.length


def check_placement(placement: str) -> None:
    """Raises ValueError if there is no such placement."""
    if placement not in get_args(Placement):
        known = ", ".join(map(repr, get_args(Placement)))
        raise ValueError(f"placement is one of {known}, got {placement!r}")


def check_floating(what: str, dtype: jax.typing.DTypeLike) -> None:
    """Raises TypeError unless arithmetic takes a dtype: floats of 8 bits are for exports."""
    kind = jnp.dtype(dtype)
    if not (jnp.issubdtype(kind, jnp.floating) and kind.itemsize > 1):
        raise TypeError(f"{what} must be floating, of 16 bits or more, got {kind}")


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
