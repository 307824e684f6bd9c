"""Items that are excluded for all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.callers import warn_caller
from sparsejax.data.files.names import Names, as_names, find_names, quoted
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.sparse import CSR

# Maximum size of the boolean table that is made to find the excluded items of rows.
_TABLE = 2**26
# Maximum number of excluded entries in one batch.
_ENTRIES = 2**25


def denied_items(
    num_items: int,
    names: Names | None,
    *,
    exclude_items: Iterable[str] | np.ndarray = (),
    only_items: Iterable[str] | np.ndarray | None = None,
    tell: Callable[[str], None] = warn_caller,
) -> np.ndarray:
    """The ids of all excluded items, in ascending order without duplicates.

    Names that the model does not know are counted and reported in one line: a shop's lists can
    contain items that were never sold.

    Args:
      num_items: number of items.
      names: names of the items, if they have names.
      exclude_items: names or ids of items to exclude.
      only_items: names or ids of the only items that may be recommended; all others are excluded.
          None allows all items.
      tell: function that is called with a line of text about unknown names; by default it warns.

    Raises:
      ValueError: an id is not an id of an item, or no item is left.
    """
    unwanted = _ids_of("exclude_items", exclude_items, num_items, names, tell)
    denied = np.zeros(num_items, bool)
    if only_items is not None:
        denied[:] = True
        denied[_ids_of("only_items", only_items, num_items, names, tell)] = False
    denied[unwanted] = True
    if denied.all():
        raise ValueError(
            f"no item is left to recommend: all {num_items:,} are among exclude_items, or "
            "are not among only_items"
        )
    return np.flatnonzero(denied).astype(np.int32)


def mask_of(denied: np.ndarray, num_items: int) -> jax.Array:
    """`[items]` bool on the device: True for each id in `denied`."""
    found = np.zeros(num_items, bool)
    found[denied] = True
    return put_on_mesh(jnp.asarray(found))


def rows_at_a_time(denied: np.ndarray, seen: CSR | None, num_items: int) -> int:
    """Largest batch size for which `with_denied` does not make too many entries.

    Args:
      denied: ids of excluded items, from `denied_items`.
      seen: items that each row has already.
      num_items: number of items.
    """
    had = 0 if seen is None else np.diff(np.asarray(seen.indptr)).max(initial=0)
    return max(1, _ENTRIES // max(1, min(num_items, denied.size + int(had))))


def with_denied(seen: CSR, denied: np.ndarray, num_items: int) -> CSR:
    """Adds the excluded items to each row of `seen`, as NumPy arrays.

    Args:
      seen: `[rows, items]` matrix of the items that each row has already.
      denied: ids of excluded items, from `denied_items`.
      num_items: number of items.
    """
    if not denied.size:
        return seen
    rows = seen.num_rows
    step = max(1, _TABLE // num_items)
    indptr, columns = np.asarray(seen.indptr), np.asarray(seen.indices)
    found, counts = [], []
    for start in range(0, rows, step):
        ends = indptr[start : min(start + step, rows) + 1]
        table = np.zeros((len(ends) - 1, num_items), bool)
        table[:, denied] = True
        row = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        table[row, columns[ends[0] : ends[-1]]] = True
        found.append(np.nonzero(table)[1].astype(np.int32))
        counts.append(table.sum(axis=1))
    ends = np.append(0, np.cumsum(np.concatenate(counts)))
    if ends[-1] >= 2**31:
        raise ValueError(
            f"{rows:,} rows are too many at a time where {denied.size:,} items are excluded in "
            "each; give a smaller batch_size, or a model whose top_k takes excluded="
        )
    matrix = np.concatenate(found), ends.astype(np.int32)
    return CSR(None, *matrix, num_cols=num_items)


def _ids_of(
    what: str,
    items: Iterable[str] | np.ndarray,
    num_items: int,
    names: Names | None,
    tell: Callable[[str], None],
) -> np.ndarray:
    if isinstance(items, str):
        raise TypeError(f"{what} is a list of names, got the text {items!r}")
    given = items if isinstance(items, np.ndarray) else list(items)
    if not len(given):
        return np.zeros(0, np.int32)
    array = np.asarray(given)
    if np.issubdtype(array.dtype, np.integer):
        if array.min() < 0 or array.max() >= num_items:
            raise ValueError(
                f"{what} has the id {array.max() if array.max() >= num_items else array.min()}, "
                f"but there are {num_items:,} items"
            )
        return array
    if names is None:
        raise ValueError(
            f"{what} has names, and the items here have none: give their ids"
        )
    wanted = as_names(dict.fromkeys(given))
    found = find_names(wanted, names)
    if (unknown := wanted[found < 0]).size:
        tell(
            f"{what}: {unknown.size:,} of {wanted.size:,} names are not items of the model, "
            f"and have no effect: {quoted(unknown)}"
        )
    return found[found >= 0]
