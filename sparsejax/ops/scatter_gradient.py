"""The gradient of a gather-matmul: rows of `x^T dy`, dense or only the touched ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.ops import gather_matmul
from sparsejax.sparse import CSR

Implementation = Literal["xla", "mosaic_gpu"] | None

# On a CPU, ranking the touched rows by a pass over all rows beats sorting the entries
# up to about this many rows an entry (67 k entries: .4 ms for 27 k rows and 5 for a
# million, a sort takes 5; 8 million rows take 60).
COUNTING_LIMIT = 16


def row_gradient(
    xs: Sequence[CSR],
    dys: Sequence[Float[Array, "_ hidden"]],
    num_rows: int,
    *,
    implementation: Implementation = None,
) -> tuple[Int[Array, "capacity"], Float[Array, "capacity hidden"]]:
    """The rows of `sum_k xs[k]^T dys[k]` that any entry touches.

    ::

        values[u] = sum over the entries j with column ids[u] of  v_j dy[row of j]

    Terms of a row are added in the order of the batch, so the sum is deterministic.
    `capacity` is the smaller of all entries and `num_rows`: nothing can overflow.

    Args:
      xs: CSR matrices `[batch_k, num_cols]`; all uses of one kernel.
      dys: the gradient of each `xs[k] @ w`.
      num_rows: number of rows of `w`.
      implementation: see `gather_matmul`.

    Returns:
      ids: unique and ascending, padded with `num_rows`.
      values: float32 sums; zero in padding.
    """
    if len(xs) != len(dys) or not xs:
        raise ValueError(f"{len(xs)} matrices but {len(dys)} gradients")
    parts = [_entries(x, num_rows) for x in xs]
    firsts = [0]
    for x in xs[:-1]:
        firsts.append(firsts[-1] + x.num_rows)
    column = jnp.concatenate([part[0] for part in parts])
    row = jnp.concatenate([part[1] + f for part, f in zip(parts, firsts, strict=True)])
    value = None
    if any(part[2] is not None for part in parts):
        ones = [jnp.ones_like(p[0], float) if p[2] is None else p[2] for p in parts]
        value = jnp.concatenate(ones)
    dy = jnp.concatenate(dys)

    def sort(column, row, value, dy):
        return _rows_by_sort(column, row, value, dy, num_rows, implementation)

    def count(column, row, value, dy):
        return _rows_by_count(column, row, value, dy, num_rows)

    large = num_rows > COUNTING_LIMIT * column.shape[0]
    if large or implementation == "mosaic_gpu":
        return sort(column, row, value, dy)
    return lax.platform_dependent(column, row, value, dy, cpu=count, default=sort)


def dense_gradient(
    x: CSR,
    dy: Float[Array, "batch hidden"],
    num_rows: int,
    *,
    implementation: Implementation = None,
) -> Float[Array, "rows hidden"]:
    """`x^T dy` in float32 with a row for every row of the kernel.

    Writes `num_rows * hidden` elements even where a batch touches few rows.
    """
    column, row, value = _entries(x, num_rows)

    def add(column, row, value, dy):
        count = jnp.minimum(jnp.asarray(x.indptr)[-1], x.nse)
        return _add_rows(num_rows, column, row, value, dy, count)

    def scatter(column, row, value, dy):
        # The touched rows are summed first: XLA's scatter of rows is slow where it has
        # duplicates to add.
        ids, values = _rows_by_sort(column, row, value, dy, num_rows, implementation)
        zeros = jnp.zeros((num_rows, dy.shape[1]), jnp.float32)
        return zeros.at[ids].set(
            values, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    if implementation == "mosaic_gpu":
        return scatter(column, row, value, dy)
    return lax.platform_dependent(column, row, value, dy, cpu=add, default=scatter)


def _entries(x: CSR, num_rows: int):
    """Column (`num_rows` where there is nothing to add), row and value of each entry."""
    row, column = x.row_ids(), jnp.asarray(x.indices)
    used = (row < x.num_rows) & (column >= 0) & (column < x.num_cols)
    column = jnp.where(used, column, num_rows).astype(jnp.int32)
    value = None if x.data is None else jnp.asarray(x.data, jnp.float32)
    return column, jnp.minimum(row, x.num_rows - 1), value


def _rows_by_sort(column, row, value, dy, num_rows, implementation):
    """A stable sort by column is the compact transpose: one more gather-matmul."""
    nse = column.shape[0]
    capacity = min(nse, num_rows)
    positions = jnp.arange(nse, dtype=jnp.int32)
    column, order = lax.sort_key_val(column, positions, is_stable=True)
    first = jnp.concatenate([jnp.ones(1, bool), column[1:] != column[:-1]])[:nse]
    used = column < num_rows
    nowhere = capacity + 1  # outside of both arrays below
    slot = jnp.where(first & used, jnp.cumsum(first) - 1, nowhere)
    ids = jnp.full(capacity, num_rows, jnp.int32).at[slot].set(column, mode="drop")
    count = jnp.sum(used, dtype=jnp.int32)
    indptr = jnp.full(capacity + 1, count).at[slot].set(positions, mode="drop")
    value = None if value is None else value[order]
    transposed = CSR(value, row[order], indptr, num_cols=dy.shape[0])
    dy = dy.astype(jnp.float32)
    return ids, gather_matmul.gather_sum(transposed, dy, implementation)


def _rows_by_count(column, row, value, dy, num_rows):
    """Ranks the touched rows, then adds entry by entry."""
    ids, slot = rank_by_count(column, num_rows)
    return ids, _add_rows(ids.shape[0], slot, row, value, dy, column.shape[0])


def rank_by_count(
    column: Int[Array, "nse"], num_rows: int
) -> tuple[Int[Array, "capacity"], Int[Array, "nse"]]:
    """The distinct columns, and which of them each entry has, by a pass over all rows.

    Args:
      column: of each entry; `num_rows` for one that does not count.
      num_rows: number of rows that there are.

    Returns:
      ids: unique and ascending, padded with `num_rows`; `capacity` is the smaller of
        `nse` and `num_rows`.
      slots: the place of each entry's column in `ids`; `capacity` if it does not count.
    """
    capacity = min(column.shape[0], num_rows)
    touched = jnp.zeros(num_rows, jnp.int32).at[column].set(1, mode="drop")
    slot = jnp.cumsum(touched) - 1
    place = jnp.where(touched > 0, slot, capacity)
    every = jnp.arange(num_rows, dtype=jnp.int32)
    ids = jnp.full(capacity, num_rows, jnp.int32).at[place].set(every, mode="drop")
    return ids, slot.at[column].get(mode="fill", fill_value=capacity)


def _add_rows(num_slots, slot, row, value, dy, count):
    """`out[slot_j] += value_j dy[row_j]` for `j < count`, in place and in order."""
    hidden = dy.shape[1]
    used = slot < num_slots
    value = used * (1.0 if value is None else value)

    def entry(j, total):
        term = lax.dynamic_slice(dy, (row[j], 0), (1, hidden)).astype(jnp.float32)
        # A select, not a factor of zero: the row of a skipped entry may be NaN.
        term = jnp.where(used[j], term * value[j], 0)
        start = (slot[j], 0)
        old = lax.dynamic_slice(total, start, (1, hidden))
        return lax.dynamic_update_slice(total, old + term, start)

    zeros = jnp.zeros((num_slots, hidden), jnp.float32)
    return lax.fori_loop(0, count, entry, zeros)
