"""The tables and features of an `EmbeddingCollection`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from sparsejax.embeddings.row_numbers import RowNumber
from sparsejax.mesh.layout import ROW_MULTIPLE
from sparsejax.ops.gather_matmul import Combiner
from sparsejax.optimizers.rules import Rule

Placement = Literal["replicated", "rows", "table", "columns"]
Outside = Literal["error", "drop"]
Longer = Literal["error", "last"]
Evict = Literal["lru", "lfu"]
Unknown = Literal["init", "zeros"]
# A counter of the sketch has 8 bits.
MOST_COUNTED = 255
Initializer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """An embedding table: a row of `dim` numbers for each id.

    >>> TableConfig(1_000_000, 16, placement="rows").dtype
    dtype('float32')

    Attributes:
      num_rows: number of rows; ids are `0 .. num_rows - 1`.
      dim: number of numbers in a row.
      init: function that initializes a row: `init(key, (1, dim), dtype)`, with a separate key for
          each row. Its scale must not depend on the number of rows, as that of `glorot_uniform`
          does. By default numbers are uniform between `-1 / sqrt(num_rows)` and `1 /
          sqrt(num_rows)`.
      dtype: dtype of the numbers.
      placement: how the table is placed on a mesh: "rows" divides its rows over "model",
        "table" puts all of them on one device, "columns" cuts its width into pieces, each on
        one device, "replicated" puts the whole table on every device. By default
        `EmbeddingCollection` decides.
      pieces: number of pieces into which the placement "columns" cuts the width. A rule that
        keeps one number for each row keeps one for each piece of it.
      rule: optimizer rule for its rows; by default the rule of the `Optimizer`.
      host: whether the rows are in host memory. The devices then hold only some rows at a time,
          see docs/host_tables.md.
      device_rows: with `host`, the number of rows on the devices, which must be at least the
          number of distinct ids in a batch. By default a fifth of all rows.
      host_path: with `host`, a folder for files with the rows, preferably on a local disk. The
          system caches them in memory as far as there is room. The files have no names, and are
          removed with the model.
    """

    num_rows: int
    dim: int
    _: dataclasses.KW_ONLY
    init: Initializer | None = None
    dtype: jax.typing.DTypeLike = jnp.float32
    placement: Placement | None = None
    pieces: int = 2
    rule: Rule | None = None
    host: bool = False
    device_rows: int | None = None
    host_path: str | os.PathLike[str] | None = None
    # Whether ids are 64-bit numbers, which get a row when they are first seen.
    wide_ids: ClassVar[bool] = False

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
        self._check_host()

    def _check_host(self) -> None:
        rows = self.device_rows
        if not self.host:
            if rows is not None:
                raise ValueError(
                    f"device_rows={rows} is for tables in host memory: give host=True, too, "
                    "or leave it out"
                )
            if self.host_path is not None:
                raise ValueError(
                    f"host_path={os.fspath(self.host_path)!r} is for tables in host memory: "
                    "give host=True, too, or leave it out"
                )
            return
        if self.host_path is not None:
            object.__setattr__(self, "host_path", os.fspath(self.host_path))
        if self.placement not in (None, "rows") or self.pieces != 2:
            raise ValueError(
                "rows of a table in host memory are always divided: leave out placement and "
                f"pieces, got placement={self.placement!r}, pieces={self.pieces}"
            )
        if self.dtype == jnp.bfloat16:
            raise NotImplementedError(
                "a table in host memory cannot be bfloat16, whose rounding depends on where a "
                "row lies: take float32"
            )
        if rows is None:
            rows = -(-self.num_rows // 5)
        _check_positive("device_rows", rows)
        if rows > self.num_rows:
            raise ValueError(
                f"device_rows={rows:,} is more than the {self.num_rows:,} rows of the table: "
                "leave out host and device_rows, and all rows are on the devices"
            )
        object.__setattr__(self, "device_rows", rows)
        object.__setattr__(self, "placement", "rows")

    @property
    def store(self) -> str:
        """Name of the kind of store for its rows, see `sparsejax.embeddings.stores`."""
        return "host" if self.host else "static"

    @property
    def index_bytes(self) -> int:
        """Bytes of the index for each row, besides its numbers and state; 0 unless it is
        dynamic.
        """
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admit:
    """Conditions for giving a new id of a dynamic table a row. Set exactly one.

    >>> Admit(count=3)
    Admit(count=3, probability=None)

    Attributes:
      count: number of times, up to 255, that an id must be seen. The counts are approximate to
          save memory, so some ids get a row sooner, see docs/dynamic_tables.md.
      probability: probability that an id gets a row each time that it is in a batch.
    """

    count: int | None = None
    probability: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.probability is None):
            raise ValueError(
                "Admit takes count or probability, and not both: got "
                f"count={self.count}, probability={self.probability}"
            )
        if self.count is not None:
            _check_positive("count", self.count)
            if self.count > MOST_COUNTED:
                raise ValueError(
                    f"count must be at most {MOST_COUNTED}, got {self.count}"
                )
        elif not (
            isinstance(self.probability, int | float) and 0 < self.probability <= 1
        ):
            raise ValueError(
                f"probability must be above 0, up to 1, got {self.probability!r}"
            )


@dataclasses.dataclass(frozen=True)
class DynamicTableConfig(TableConfig):
    """A table whose ids are 64-bit keys, which get a row when they are first seen.

    >>> DynamicTableConfig(1_000_000, 16, evict="lfu", admit=Admit(count=2)).num_rows
    1000192

    `EmbeddingCollection.assign_rows` assigns rows to the ids of a batch. See
    docs/dynamic_tables.md.

    Attributes:
      num_rows: largest number of ids with a row. It is rounded up to a multiple of 256, as rows
          are divided into 256 parts by a hash of the id. With `host_rows`, pass the number of rows
          on the devices here: it becomes `device_rows`, and the attribute `num_rows` is then the
          number of all rows.
      dim: numbers in a row.
      init: function that initializes a row: `init(key, (1, dim), dtype)`. The initial row of an id
          depends only on this function, the seed, the table and the id.
      evict: policy for the ids that lose their row when a part has no free row for a new id: "lru"
          for ids not seen for the longest time, "lfu" for ids seen least often. With None, ids
          lose their row only after `time_to_live`, and new ids may get none. A `RowNumber` is a
          custom policy.
      time_to_live: time since an id was last seen after which it loses its row first, in units of
          the clock of `assign_rows`: steps, if no clock is given.
      admit: condition for giving new ids a row; by default all get one.
      host_rows: largest number of ids with a row, if the rows are in host memory. The devices hold
          `num_rows` of them at a time, which must be at least the number of distinct ids in a
          batch. See docs/host_tables.md.
      host_path: with `host_rows`, a folder for the files of the rows, as in `TableConfig`.
    """

    _: dataclasses.KW_ONLY
    evict: Evict | RowNumber | None = "lru"
    time_to_live: int | None = None
    admit: Admit | None = None
    host_rows: int | None = None
    wide_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._take_host_rows()
        super().__post_init__()
        if self.placement not in (None, "rows") or self.pieces != 2:
            raise ValueError(
                "rows of a dynamic table are always divided: leave out placement and "
                f"pieces, got placement={self.placement!r}, pieces={self.pieces}"
            )
        if not isinstance(self.evict, RowNumber) and self.evict not in (
            None,
            *get_args(Evict),
        ):
            raise ValueError(
                f'evict is "lru", "lfu" or None, or a RowNumber, got {self.evict!r}'
            )
        if self.time_to_live is not None:
            _check_positive("time_to_live", self.time_to_live)
        if self.admit is not None and not isinstance(self.admit, Admit):
            raise TypeError(f"admit must be an Admit, got {type(self.admit).__name__}")
        rows = math.ceil(self.num_rows / ROW_MULTIPLE) * ROW_MULTIPLE
        object.__setattr__(self, "num_rows", rows)
        object.__setattr__(self, "placement", "rows")
        if self.host:
            object.__setattr__(self, "host_rows", rows)

    def _take_host_rows(self) -> None:
        """Converts `num_rows` and `host_rows` to the fields of `TableConfig`."""
        rows, here = self.host_rows, self.num_rows
        if rows is None:
            if self.host or self.device_rows is not None or self.host_path is not None:
                raise ValueError(
                    "rows of a dynamic table are in host memory with host_rows, the number of "
                    "all, beside that of the rows on the devices: DynamicTableConfig("
                    f"{here}, {self.dim}, host_rows=...); host and device_rows are for a "
                    "TableConfig"
                )
            return
        if self.host and self.device_rows is not None and rows == here:
            return  # fields are already set in a copy of an existing configuration
        if self.host or self.device_rows is not None:
            raise ValueError(
                "host and device_rows are for a TableConfig: beside host_rows leave them out, "
                "num_rows is how many rows the devices have"
            )
        _check_positive("num_rows", here)
        _check_positive("host_rows", rows)
        if rows < here:
            raise ValueError(
                f"host_rows={rows:,} is below the {here:,} rows that the devices have: it is "
                "the number of all rows; leave it out, and all rows are on the devices"
            )
        object.__setattr__(self, "num_rows", rows)
        object.__setattr__(self, "device_rows", here)
        object.__setattr__(self, "host", True)

    @property
    def store(self) -> str:
        """Name of the kind of store for its rows."""
        return "dynamic_host" if self.host else "dynamic"

    @property
    def index_bytes(self) -> int:
        """Bytes of the index for each row, besides its numbers and state."""
        # Bytes of the index for a row: key, flag, position in the free list, two slots with tags,
        # `last` and `count`.
        index = 8 + 1 + 4 + 2 * (4 + 1) + 4 + 4
        index += 4 if isinstance(self.evict, RowNumber) else 0
        return index + (16 if self.admit and self.admit.count else 0)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """A feature: ids of each example, and how the rows of these ids are combined.

    >>> FeatureConfig("item", combiner=None, length=20).bags
    20

    Attributes:
      table: name of the table that it reads. Several features can share a table.
      combiner: how the rows of an example are combined: "sum", "mean" or "sqrtn", as in
          `sparsejax.gather_matmul`. With None the rows are kept separate, in the order of the ids.
          "sum" is also the default of TorchRec; Keras and SparseOperationKit use "mean".
      length: with combiner None, the largest number of ids in an example.
      outside: reaction to an id outside the table: "error" or "drop". If ids are traced or on a
          device, an error becomes a row of NaN.
      longer: with combiner None, reaction to a list of more than `length` ids: "error", or "last",
          which reads only the last `length` ids. In an array, -1 after the last id of a row is
          padding.
    """

    table: str
    _: dataclasses.KW_ONLY
    combiner: Combiner | None = "sum"
    length: int | None = None
    outside: Outside = "error"
    longer: Longer = "error"

    def __post_init__(self) -> None:
        if self.combiner not in (None, *get_args(Combiner)):
            raise ValueError(
                f'combiner is "sum", "mean", "sqrtn" or None, got {self.combiner!r}'
            )
        if self.outside not in get_args(Outside):
            raise ValueError(f'outside is "error" or "drop", got {self.outside!r}')
        if self.longer not in get_args(Longer):
            raise ValueError(f'longer is "error" or "last", got {self.longer!r}')
        if self.longer != "error" and self.length is None:
            raise ValueError(
                f"longer={self.longer!r} is for lists whose rows stay apart: give "
                "combiner=None and length, or leave longer out"
            )
        if (self.combiner is None) != (self.length is not None):
            raise ValueError(
                "length belongs to combiner=None, and is needed there: got combiner="
                f"{self.combiner!r}, length={self.length}"
            )
        if self.length is not None:
            _check_positive("length", self.length)

    @functools.cached_property
    def bags(self) -> int:
        """Number of vectors for each example: `length`, or 1."""
        return 1 if self.length is None else self.length


def feature_configs(
    features: Mapping[str, str | FeatureConfig], tables: Mapping[str, TableConfig]
) -> dict[str, FeatureConfig]:
    """The configuration of each feature; a table name is converted to `FeatureConfig(table)`.

    Raises:
      ValueError: a feature names an unknown table.
    """
    configs = {
        name: FeatureConfig(f) if isinstance(f, str) else f
        for name, f in features.items()
    }
    for name, config in configs.items():
        if config.table not in tables:
            raise ValueError(
                f"feature {name!r} reads the table {config.table!r}, but the tables are "
                f"{sorted(tables)}"
            )
    return configs


def check_placement(placement: str) -> None:
    """Raises ValueError if the placement is unknown."""
    if placement not in get_args(Placement):
        known = ", ".join(map(repr, get_args(Placement)))
        raise ValueError(f"placement is one of {known}, got {placement!r}")


def check_floating(what: str, dtype: jax.typing.DTypeLike) -> None:
    """Raises TypeError unless a dtype is floating with at least 16 bits: 8-bit floats are for
    exports only.
    """
    kind = jnp.dtype(dtype)
    if not (jnp.issubdtype(kind, jnp.floating) and kind.itemsize > 1):
        raise TypeError(f"{what} must be floating, of 16 bits or more, got {kind}")


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
