"""Labels for rows that have one label each, stored as the column of each row's label."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.output_loss import Targets as ColumnsOfChunk
from sparsejax.mesh.blocks import SparseRows

IGNORED = -1


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Targets:
    """A `[batch, num_cols]` matrix with a 1 in one column of each row, as labels.

    >>> Targets(jnp.array([2, -1]), num_cols=3).num_rows
    2

    A row whose column is -1 is ignored: its loss and its gradients are 0. Any other
    column outside `[0, num_cols)` makes the loss of its row NaN.

    Attributes:
      columns: `[batch]` integers.
      num_cols: number of items.
      data: None, as the values of all labels are 1.
      transposed: None; `CSR` has such an attribute.
    """

    columns: jax.Array | np.ndarray
    num_cols: int = dataclasses.field(kw_only=True)
    data: None = dataclasses.field(default=None, kw_only=True)
    transposed: None = dataclasses.field(default=None, kw_only=True)

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("columns"), self.columns)], self.num_cols

    @classmethod
    def tree_unflatten(cls, num_cols: int, leaves: Any) -> Targets:
        self = object.__new__(cls)
        of = {"columns": leaves[0], "num_cols": num_cols}
        for name, value in (of | {"data": None, "transposed": None}).items():
            object.__setattr__(self, name, value)
        return self

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch."""
        return self.columns.shape[-1]

    @property
    def ignored(self) -> Bool[Array, "batch"]:
        """Mask of the rows without a target."""
        return jnp.asarray(self.columns == IGNORED)

    @property
    def broken(self) -> Bool[Array, "batch"]:
        """Mask of the rows whose target is no item."""
        return jnp.asarray((self.columns < IGNORED) | (self.columns >= self.num_cols))


Labels = SparseRows | Targets
"""What a batch is compared with."""


class TargetColumns(NamedTuple):
    """Targets in the coordinates of one device; see `item_chunks.Entries`.

    Attributes:
      columns: the label of each row; it may be outside the device's items.
      data: None, as all values are 1.
    """

    columns: Int[Array, "batch"]
    data: None = None

    def dense(
        self, values: bool, start: jax.typing.ArrayLike, shape: tuple[int, int]
    ) -> Bool[Array, "batch size"]:
        """A dense chunk with `values` at the labels, from column `start` on; False elsewhere."""
        numbers = jnp.arange(shape[1], dtype=jnp.int32)
        return ((self.columns - start)[:, None] == numbers[None]) & values

    def words(
        self,
        start: jax.typing.ArrayLike,
        shape: tuple[int, int],
        *,
        counted: bool = False,
    ) -> ColumnsOfChunk:
        """The labels of the chunk for the GPU programs, which count labels in any case."""
        del counted
        columns = self.columns - start
        padding = shape[0] - len(columns)
        columns = jnp.pad(columns, (0, padding), constant_values=-1)
        return ColumnsOfChunk.of(columns, shape[1])


def check_targets(targets: Any, shape: tuple[int, ...], num_items: int) -> None:
    """Raises TypeError or ValueError if the targets are no items or do not match the rows.

    Numbers are checked only in NumPy arrays, as a JAX array may be on a device or traced.

    Args:
      targets: targets given by a user.
      shape: shape of the rows.
      num_items: number of items; targets are smaller.
    """
    dtype = getattr(targets, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        what = type(targets).__name__ if dtype is None else dtype
        raise TypeError(
            f"targets are item numbers, an array of integers (-1: no target), got {what}"
        )
    if targets.shape != shape:
        raise ValueError(
            f"targets has shape {targets.shape}; one for each hidden vector: {shape}"
        )
    if not isinstance(targets, np.ndarray):
        return
    _check_numbers("target", targets, IGNORED, num_items, ", or -1 for none")


def check_item_ids(ids: Any, num_rows: int, num_items: int) -> None:
    """Raises TypeError or ValueError if the ids of items to be scored are wrong.

    Numbers are checked only in NumPy arrays; see `only_of_items` for other arrays.

    Args:
      ids: ids given by a user.
      num_rows: number of rows; each has the same number of ids.
      num_items: number of items; ids are smaller.
    """
    dtype = getattr(ids, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        what = type(ids).__name__ if dtype is None else dtype
        raise TypeError(f"ids are item numbers, an array of integers, got {what}")
    if ids.ndim != 2 or len(ids) != num_rows:
        raise ValueError(
            f"ids has shape {ids.shape}; expected ({num_rows}, count), the items of each row"
        )
    if isinstance(ids, np.ndarray):
        _check_numbers("id", ids, 0, num_items)


def only_of_items(
    scores: Float[Array, "rows count"], ids: Int[Array, "rows count"], num_items: int
) -> Float[Array, "rows count"]:
    """Replaces the score of each id that is no item by NaN."""
    return jnp.where((ids >= 0) & (ids < num_items), scores, jnp.nan)


def _check_numbers(
    name: str, numbers: np.ndarray, least: int, num_items: int, more: str = ""
) -> None:
    """Raises ValueError if one of the numbers is not an item number."""
    wrong = (numbers >= num_items) | (numbers < least)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        at = place[0] if len(place) == 1 else place
        raise ValueError(
            f"{name} {numbers[place]:,} at {at} is no item: {name}s are in "
            f"[0, {num_items:,}){more}"
        )


def as_targets(targets: jax.Array | np.ndarray, num_items: int) -> Targets:
    """A `Targets` of checked targets, one for each row."""
    if isinstance(targets, np.ndarray):
        return Targets(jnp.asarray(targets.reshape(-1), jnp.int32), num_cols=num_items)
    targets = targets.reshape(-1)
    if targets.dtype.itemsize < 4:
        targets = targets.astype(jnp.int32)
    # Without the selection, a number beyond int32 would wrap around to another target.
    columns = jnp.where(targets < num_items, targets, num_items).astype(jnp.int32)
    return Targets(columns, num_cols=num_items)
