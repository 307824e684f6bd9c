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
# A count of a sketch has 8 bits.
MOST_COUNTED = 255
Initializer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of embeddings: a row of `dim` numbers for each id.

    >>> TableConfig(1_000_000, 16, placement="rows").dtype
    dtype('float32')

    Attributes:
      num_rows: ids are `0 .. num_rows - 1`.
      dim: numbers in a row.
      init: function that makes a row: `init(key, (1, dim), dtype)`, with a key for each row.
        Its scale must not depend on the number of rows, as the scale of `glorot_uniform` does.
        By default numbers are uniform between `-1 / sqrt(num_rows)` and `1 / sqrt(num_rows)`.
      dtype: dtype of the numbers.
      placement: how the table is placed on a mesh: "rows" divides its rows over "model",
        "table" puts all of them on one device, "columns" cuts its width into pieces, each on
        one device, "replicated" puts the whole table on every device. By default
        `EmbeddingCollection` decides.
      pieces: number of pieces into which the placement "columns" cuts the width. A rule that
        keeps one number for each row keeps one for each piece of it.
      rule: how its rows are trained; by default the rule of the `Optimizer`.
      host: whether the rows are in host memory. The devices then have some of them at a time,
        see docs/host_tables.md.
      device_rows: with `host`, the number of rows on the devices: at least as many as a batch
        has different ids. By default a fifth of all.
      host_path: with `host`, a folder, best on a local disk. The rows are in files there, which
        the system keeps in memory as far as there is room. The files have no names, and vanish
        with the model.
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
    # Whether ids are numbers of 64 bits, which get a row when they are seen.
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
        """The kind of store that has its rows, see `sparsejax.embeddings.stores`."""
        return "host" if self.host else "static"

    @property
    def index_bytes(self) -> int:
        """Bytes for each row, beside its numbers and state; 0 unless it is dynamic."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admit:
    """Which new ids of a dynamic table get a row: just one of the two.

    >>> Admit(count=3)
    Admit(count=3, probability=None)

    Attributes:
      count: ids that have been seen this often, up to 255. How often is counted in little
        memory, so a few ids get their row sooner, see docs/dynamic_tables.md.
      probability: probability with which an id gets a row, each time that a batch has it.
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

    `EmbeddingCollection.assign_rows` gives the ids of a batch their rows. See
    docs/dynamic_tables.md.

    Attributes:
      num_rows: largest number of ids that have a row. It is rounded up to a multiple of 256, as
        rows are divided into 256 parts by a hash of the id. With `host_rows`, pass the number
        of rows on the devices here: it becomes `device_rows`, and the attribute `num_rows` is
        then the number of all rows.
      dim: numbers in a row.
      init: function that makes a row: `init(key, (1, dim), dtype)`. The first row of an id
        depends on this function, the seed, the table and the id alone.
      evict: which ids lose their row when a part has none left for new ones: "lru" the ids that
        were not seen for the longest time, "lfu" the ids seen least often. With None no id
        loses its row, unless `time_to_live` has passed; new ids then get none. A `RowNumber` is
        a policy of your own.
      time_to_live: age after which ids lose their row first, counted from when they were last
        seen. Its unit is that of the clock of `assign_rows`: steps, if no clock is given.
      admit: which new ids get a row; by default all.
      host_rows: largest number of ids that have a row, if the rows are in host memory. The
        devices have `num_rows` of them at a time, at least as many as a batch has different
        ids. See docs/host_tables.md.
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
        """Says in the words of `TableConfig` where the rows lie."""
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
            return  # a copy of one that was made
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
        """The kind of store that has its rows."""
        return "dynamic_host" if self.host else "dynamic"

    @property
    def index_bytes(self) -> int:
        """Bytes for each row, beside its numbers and state."""
        # A key, a flag, a place in the free list, two slots with tags, `last` and `count`.
        index = 8 + 1 + 4 + 2 * (4 + 1) + 4 + 4
        index += 4 if isinstance(self.evict, RowNumber) else 0
        return index + (16 if self.admit and self.admit.count else 0)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """A feature: ids of each example, and what is made of their rows.

    >>> FeatureConfig("item", combiner=None, length=20).bags
    20

    Attributes:
      table: name of the table with its rows. Features can share a table.
      combiner: how the rows of an example are combined: "sum", "mean" or "sqrtn", as in
        `sparsejax.gather_matmul`. With None the rows stay apart, in the order of the ids. "sum"
        is also the default of TorchRec; Keras and SparseOperationKit take "mean".
      length: with the combiner None, the largest number of ids in an example.
      outside: reaction to an id that the table does not have: "error" or "drop". Where ids are
        traced or on a device, an error is a row of NaN.
      longer: with the combiner None, reaction to a list of more than `length` ids: "error", or
        "last", which reads the last `length` ids. In an array, -1 behind the last id of a row
        is no part of its list.
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
        """How many rows of numbers an example gets: `length`, or 1."""
        return 1 if self.length is None else self.length


def feature_configs(
    features: Mapping[str, str | FeatureConfig], tables: Mapping[str, TableConfig]
) -> dict[str, FeatureConfig]:
    """The configuration of each feature, which may be given as the name of its table.

    Raises:
      ValueError: there is no such table.
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
