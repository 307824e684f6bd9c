"""The gradient of a gather-matmul: `x^T dy`, with all rows or only the touched ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.blocks import LookupRows, ShardedCSR
from sparsejax.mesh.exchange import DividedRows, adds_all, own_terms
from sparsejax.mesh.layout import (
    call_on_each_device,
    replicated,
    rows_per_device,
    vary_alike,
    vary_over,
    varying_axes,
)
from sparsejax.mesh.per_device import entries_over_data, gather_over_data, own_block
from sparsejax.ops.gather_sum import added, gather_sum, mosaic_is_fastest
from sparsejax.ops.implementations import FOR_GPU, Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR, Transposed, sums_so_far

# Touched rows are ranked by a pass over all rows, or by sorting the entries. On a CPU the pass is
# faster with at most about this many rows for each entry (67 k entries: 0.4 ms for 27 k rows and 5
# for a million; 8 million rows take 60; sorting takes 5).
COUNTING_LIMIT = 16


def row_gradient(
    xs: Sequence[LookupRows],
    dys: Sequence[Float[Array, "_ hidden"]],
    num_rows: int,
    *,
    implementation: Implementation = None,
) -> tuple[Int[Array, "capacity"], Float[Array, "capacity hidden"]]:
    """The rows of `sum_k xs[k]^T dys[k]` that have an entry.

    ::

        values[u] = sum over the entries j with column ids[u] of  v_j dy[row of j]

    Terms of a row are added in the order of the batch, so the sum is deterministic.
    `capacity` is the smaller of the numbers of all entries and all columns, so that nothing
    can overflow.

    Args:
      xs: CSR matrices `[batch_k, num_cols]`; all uses of one kernel.
      dys: the gradient of each `xs[k] @ w`.
      num_rows: number of rows of `w`.
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `gather_matmul`; None
        picks the fastest here.

    Returns:
      ids: unique and ascending, padded with `num_rows`. On a mesh this holds for each
        part of the rows.
      values: sums in float32 (float64 for float64 `dys`); zero in padding.
    """
    if len(xs) != len(dys) or not xs:
        raise ValueError(f"{len(xs)} matrices but {len(dys)} gradients")
    xs, dys = vary_alike(list(xs), list(dys))
    if _nothing_to_add(xs):
        hidden, dtype = dys[0].shape[1], accumulator(dys[0].dtype)
        return jnp.zeros(0, jnp.int32), jnp.zeros((0, hidden), dtype)

    def sort(xs, dys):
        terms = row_terms(xs, dys, num_rows).whole()
        return terms.ids(), terms.values(implementation)

    def count(xs, dys):
        num_cols = max(x.num_cols for x in xs)
        column, row, value = _concatenated(xs, num_cols)
        dy = jnp.concatenate(dys)
        ids, values = _rows_by_count(column, row, value, dy, num_cols)
        return jnp.where(ids < num_cols, ids, num_rows), values

    if all(isinstance(x, DividedRows) and x.route is None for x in xs):
        if adds_all(num_rows, sum(x.nse for x in xs)):
            return _reduced_rows(xs, dys, num_rows)
        xs, dys = _gathered(xs), [replicated(dy) for dy in dys]
    plain = [x for x in xs if isinstance(x, CSR)]
    if len(plain) < len(xs):
        return sort(xs, dys)
    sorted_ahead = len(plain) == 1 and plain[0].transposed is not None
    large = num_rows > COUNTING_LIMIT * sum(x.nse for x in xs)
    if sorted_ahead or large or implementation in FOR_GPU:
        return sort(xs, dys)
    return lax.platform_dependent(xs, dys, cpu=count, default=sort)


class Unsent(NamedTuple):
    """The operands of an exchange in which a device may have too little space for the ids.

    If so, all ids are gathered instead.

    Attributes:
      crowded: `[]` whether a device had too little space.
      chosen: `[]` whether the terms count, see `Terms.where`.
      xs: CSR matrices `[batch_k, num_cols]`; all uses of one kernel.
      dys: the gradient of each `xs[k] @ w`.
    """

    crowded: Bool[Array, ""]
    chosen: Bool[Array, ""]
    xs: Sequence[DividedRows]
    dys: Sequence[jax.Array]


class Terms(NamedTuple):
    """A row gradient that is not summed yet.

    ::

        values[u] = sum over the entries j of the u-th touched row of  data_j dy[rows_j]

    On a mesh each device along "model" has the entries of its kernel rows, from all parts
    of the batch: devices exchange `dy`, not kernel rows.

    Attributes:
      by_column: rows and order of the entries.
      data: `[nse]` values in that order, or None if they are all 1.
      dy: `[batch, hidden]`. After an exchange `[model, batch, hidden]`: for each device along
        "model" the gradient rows that it needs.
      num_rows: rows of the kernel.
      divided: whether `by_column` and `data` have a leading axis, over "model".
      unsent: operands of the gather that replaces the exchange if a device has too little
        space; None if that cannot happen.
    """

    by_column: Transposed
    data: jax.Array | None
    dy: jax.Array
    num_rows: int
    divided: bool = False
    unsent: Unsent | None = None

    def per_device(self, f, arguments=(), in_specs=(), *, out_specs):
        """Calls `f(terms, *arguments)` on each device, with the terms of its kernel rows."""
        num_rows = rows_per_device(self.num_rows)

        def part(by_column, data, dy, unsent, *arguments):
            by_column, data = jax.tree.map(lambda a: a[0], (by_column, data))
            dy = dy[0] if dy.ndim == 3 else dy
            if unsent is not None:
                unsent = unsent._replace(xs=[own_block(x) for x in unsent.xs])
            mine = Terms(by_column, data, dy, num_rows, unsent=unsent)
            return f(mine, *arguments)

        of_unsent = None
        if self.unsent is not None:
            specs: Any = P(), P(), P("data", "model"), P(("data", "model"))
            of_unsent = Unsent(*specs)
        dy_spec = P("model") if self.dy.ndim == 3 else P()
        return call_on_each_device(
            part,
            (self.by_column, self.data, self.dy, self.unsent, *arguments),
            (P("model"), P("model"), dy_spec, of_unsent, *in_specs),
            out_specs,
        )

    def where(self, chosen: Bool[Array, ""]) -> Terms:
        """These terms if `chosen` is true, otherwise no terms."""
        indptr = jnp.where(chosen, self.by_column.indptr, 0)
        unsent = self.unsent
        if unsent is not None:
            flags = unsent.crowded & chosen, unsent.chosen & chosen
            unsent = unsent._replace(crowded=flags[0], chosen=flags[1])
        by_column = self.by_column._replace(indptr=indptr)
        return self._replace(by_column=by_column, unsent=unsent)

    def gathered(self) -> Terms:
        """In `shard_map`: the terms by a gather, used when the exchange has too little space."""
        assert self.unsent is not None
        _, _, xs, dys = self.unsent
        return _own_terms(xs, dys, self.num_rows, gather=True)

    def exchanged_after(self, zero: Int[Array, ""]) -> Terms:
        """In `shard_map`: the terms by an exchange that starts only when `zero` is computed."""
        assert self.unsent is not None
        _, chosen, xs, dys = self.unsent
        xs = [x.after(zero) for x in xs]
        return _own_terms(xs, dys, self.num_rows, gather=False).where(chosen)

    def whole(self) -> Terms:
        """The terms by exchange or gather, in arrays with enough space for either."""
        if self.unsent is None:
            return self
        if self.divided:

            def leading(terms):
                found = terms.whole()
                found = found.by_column, found.data, found.dy
                return jax.tree.map(lambda a: a[None], found)

            by_column, data, dy = self.per_device(leading, out_specs=P("model"))
            return Terms(by_column, data, dy, self.num_rows, divided=True)
        gathered = jax.eval_shape(self.gathered)
        nse = max(len(gathered.by_column.rows), len(self.by_column.rows))
        batch = max(len(gathered.dy), len(self.dy))

        dtype = jnp.result_type(gathered.dy, self.dy)

        def sized(terms):
            data, dy = terms.data, terms.dy.astype(dtype)
            if data is not None:
                data = _sized(data, nse, 0)
            elif gathered.data is not None:  # distinct ids have no values
                data = jnp.ones(nse, gathered.data.dtype)
            if len(dy) < batch:
                # No entry reads the rows after `dy`, so they need no zeros, which would take 0.3
                # ms.
                room = lax.empty((batch, dy.shape[1]), dy.dtype)
                dy = lax.dynamic_update_slice(room, dy, (0, 0))
            return _sized_transposed(terms.by_column, nse, self.num_rows), data, dy

        by_column, data, dy = lax.cond(
            self.unsent.crowded, lambda: sized(self.gathered()), lambda: sized(self)
        )
        return Terms(by_column, data, dy, self.num_rows)

    def ids(self) -> Int[Array, "capacity"]:
        """The touched rows, unique and ascending, padded with `num_rows`."""
        if self.unsent is not None:
            return self.whole().ids()
        if self.divided:

            def numbered(terms):
                ids, first = terms.ids(), lax.axis_index("model") * terms.num_rows
                return jnp.where(ids < terms.num_rows, ids + first, self.num_rows)

            return self.per_device(numbered, out_specs=P("model"))
        return self.by_column.distinct(self.num_rows)

    def values(
        self, implementation: Implementation = None
    ) -> Float[Array, "capacity hidden"]:
        """The sums of the touched rows in float32: a gather-matmul of the entries by column."""
        if self.unsent is not None:
            return self.whole().values(implementation)
        if self.divided:
            return self.per_device(
                lambda terms: terms.values(implementation), out_specs=P("model")
            )
        by_column, dy = self.by_column, self.dy
        if not mosaic_is_fastest(dy, by_column.rows.shape[0]):
            dy = dy.astype(accumulator(dy.dtype))
        x = CSR(self.data, by_column.rows, by_column.indptr, num_cols=dy.shape[0])
        return gather_sum(x, dy, implementation, wide=True)


def row_terms(
    xs: Sequence[LookupRows], dys: Sequence[Float[Array, "_ hidden"]], num_rows: int
) -> Terms:
    """The terms that `row_gradient` sums, from a stable sort of the entries by column."""
    if all(isinstance(x, DividedRows) and x.route is not None for x in xs):
        return _exchanged_terms(xs, dys, num_rows)
    xs = _gathered(xs)
    plain = [x for x in xs if isinstance(x, CSR)]
    if len(plain) < len(xs):
        return _divided_terms(xs, dys, num_rows)
    if len(plain) == 1:
        x = plain[0]
        by_column = x.by_column()
        data = None if x.data is None else _wide(x.data)
    else:
        num_cols = max(x.num_cols for x in plain)
        column, row, data = _concatenated(plain, num_cols)
        by_column = Transposed.of(column, row, num_cols)
    data = None if data is None else data[by_column.order]
    return Terms(by_column, data, jnp.concatenate(dys), num_rows)


def _divided_terms(xs, dys, num_rows: int) -> Terms:
    """The terms of `ShardedCSR`s: each device gathers its rows' entries along "data"."""
    xs = [x if isinstance(x, ShardedCSR) else ShardedCSR.of(x) for x in xs]
    sorted_ahead = len(xs) == 1 and xs[0].transposed is not None

    def part(blocks, by_column):
        blocks = own_block(blocks)
        if sorted_ahead:
            by_column = jax.tree.map(lambda a: a[0], by_column)
            data = gather_over_data(blocks[0].data)
        else:
            first, parts = 0, []
            for x, block in zip(xs, blocks, strict=True):
                column, row = entries_over_data(block)
                parts.append((column, row + first, gather_over_data(block.data)))
                first += x.num_rows
            column, row, data = _joined(parts)
            by_column = Transposed.of(column, row, blocks[0].num_cols)
        if data is not None:
            data = _wide(data)[by_column.order]
        return jax.tree.map(lambda a: a[None], (by_column, data))

    by_column, data = call_on_each_device(
        part,
        ([x.blocks for x in xs], xs[0].transposed if sorted_ahead else None),
        (P("data", "model"), P("model")),
        P("model"),
    )
    # Each `dy` is gathered separately: XLA would divide a concatenation by columns before it
    # gathers.
    dy = jnp.concatenate([replicated(dy) for dy in dys])
    return Terms(by_column, data, dy, num_rows, divided=True)


def _exchanged_terms(xs, dys, num_rows: int) -> Terms:
    """Each device receives the gradients of its kernel rows, and sorts their entries.

    There is no `lax.cond` on whether the exchange had room, since the host would wait for its
    predicate. So layers can compute meanwhile.
    """
    width = rows_per_device(num_rows)
    crowded = [flag for flag in (x.crowded() for x in xs) if flag is not None]

    def part(xs, dys):
        xs = [own_block(x) for x in xs]
        found = _own_terms(xs, dys, width, gather=False)
        found = found.by_column, found.data, found.dy
        return jax.tree.map(lambda a: a[None], found)

    by_column, data, dy = call_on_each_device(
        part,
        (list(xs), list(dys)),
        (P("data", "model"), P(("data", "model"))),
        P("model"),
    )
    unsent = None
    if crowded:
        any_crowded = functools.reduce(jnp.logical_or, crowded)
        unsent = Unsent(any_crowded, jnp.bool(True), list(xs), list(dys))
    return Terms(by_column, data, dy, num_rows, divided=True, unsent=unsent)


def _own_terms(xs, dys, width: int, *, gather: bool) -> Terms:
    """In `shard_map`: the gradient terms of this device's rows, after a gather or an exchange."""
    parts, slopes, first = [], [], 0
    for x, dy in zip(xs, dys, strict=True):
        found = own_terms(x, dy, width, added, gather=gather)
        parts.append((found.column, found.row + first, found.data))
        slopes.append(found.slopes)
        first += len(found.slopes)
    column, row, data = _joined(parts)
    by_column = None
    if not gather and len(xs) == 1:
        by_column = xs[0].route.owned.transposed
    if by_column is None:
        by_column = Transposed.of(column, row, width)
    if data is not None:
        data = _wide(data)[by_column.order]
    return Terms(by_column, data, jnp.concatenate(slopes), width)


def _sized(values: jax.Array, size: int, padding: Any) -> jax.Array:
    """The first `size` values. If there are fewer, padding follows them."""
    values = values[:size]
    more = jnp.full(size - len(values), padding, values.dtype)
    return jnp.concatenate([values, more])


def _sized_transposed(x: Transposed, nse: int, num_cols: int) -> Transposed:
    """Resizes arrays to another `nse`, which must be enough for all entries that count."""
    return Transposed(
        _sized(x.columns, nse, num_cols),
        _sized(x.rows, nse, 0),
        _sized(x.order, nse, 0),
        _sized(x.indptr, min(nse, num_cols) + 1, x.indptr[-1]),
    )


def _gathered(xs: Sequence[LookupRows]) -> list[LookupRows]:
    """Converts matrices so that each device has all entries of its kernel rows."""

    def gathered(x):
        if not isinstance(x, DividedRows):
            return x
        return x.gathered() if x.route is None else ShardedCSR.of_rows(x.parts)

    return [gathered(x) for x in xs]


def _reduced_rows(xs, dys, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The touched rows and their gradients. Gradients are summed over all devices as dense
    matrices.
    """

    def part(xs, dys):
        xs, total = [own_block(x).parts for x in xs], 0
        touched = jnp.zeros(num_rows, bool)
        for x, dy in zip(xs, dys, strict=True):
            total += dense_gradient(x, dy, num_rows)
            touched = touched.at[x.columns(padding=num_rows)].set(True, mode="drop")
        # One sum over devices serves gradients and touched flags.
        total = jnp.concatenate([total, touched[:, None]], axis=1)
        return lax.psum(total, ("data", "model"))

    total = call_on_each_device(
        part, (list(xs), list(dys)), (P("data", "model"), P(("data", "model"))), P()
    )
    every = jnp.arange(num_rows, dtype=jnp.int32)
    touched = total[:, -1] > 0
    place = jnp.where(touched, sums_so_far(touched) - 1, num_rows + every)
    ids = jnp.full(num_rows, num_rows, jnp.int32)
    ids = ids.at[place].set(every, mode="drop", unique_indices=True)
    return ids, total[:, :-1].at[ids].get(mode="fill", fill_value=0)


def dense_gradient(
    x: LookupRows,
    dy: Float[Array, "batch hidden"],
    num_rows: int,
    *,
    implementation: Implementation = None,
) -> Float[Array, "features hidden"]:
    """`x^T dy` in float32 (float64 for a float64 `dy`), with all rows of the kernel.

    Writes `num_rows * hidden` elements even where a batch touches few rows.
    """
    if isinstance(x, ShardedCSR):
        rows = rows_per_device(num_rows)

        def part(block, dy):
            block = own_block(block)
            return lax.psum(
                dense_gradient(block, dy, rows, implementation=implementation), "data"
            )

        return call_on_each_device(
            part, (x.blocks, dy), (P("data", "model"), P("data")), P("model")
        )
    if isinstance(x, DividedRows):
        return _dense_gradient_of_divided(x, dy, num_rows, implementation)
    x, dy = vary_alike(x, dy)
    sums = accumulator(dy.dtype)
    if _nothing_to_add([x]):
        return vary_over(jnp.zeros((num_rows, dy.shape[1]), sums), varying_axes(dy))

    def add(x, dy):
        count = jnp.minimum(jnp.asarray(x.indptr)[-1], x.nse)
        return _add_rows(num_rows, *_entries(x, num_rows), dy, count)

    def scatter(x, dy):
        # The entries of each touched row are summed first: XLA's scatter of rows is slow with
        # duplicate indices.
        terms = row_terms([x], [dy], num_rows)
        ids, values = terms.ids(), terms.values(implementation)
        zeros = jnp.zeros((num_rows, dy.shape[1]), sums)
        return zeros.at[ids].set(
            values,
            mode="drop",
            unique_indices=True,
            # The columns of an existing `transposed` may be in another order.
            indices_are_sorted=x.transposed is None,
        )

    if x.transposed is not None or implementation in FOR_GPU:
        return scatter(x, dy)
    return lax.platform_dependent(x, dy, cpu=add, default=scatter)


def _dense_gradient_of_divided(x: DividedRows, dy, num_rows: int, implementation):
    rows = num_rows if x.route is None else rows_per_device(num_rows)

    def part(x, dy):
        x = own_block(x)

        def of(block, dy):
            return dense_gradient(block, dy, rows, implementation=implementation)

        def wide(slopes):
            return slopes.astype(jnp.promote_types(slopes.dtype, dy.dtype))

        if x.route is None:
            return lax.psum(of(x.parts, dy), ("data", "model"))
        total = x.by_way(
            lambda: of(x.block(), x.block_slopes(dy)),
            lambda: of(x.route.owned, wide(x.owned_slopes(dy, added))),
        )
        return lax.psum(total, "data")

    return call_on_each_device(
        part, (x, dy), (P("data", "model"), P(("data", "model"))), x.kernel_spec
    )


def _entries(x: CSR, padding: int):
    """The column, row and value of each entry; the column is `padding` for an entry that does not
    count.
    """
    value = None if x.data is None else _wide(x.data)
    row = jnp.minimum(x.row_ids(), x.num_rows - 1)
    return x.columns(padding=padding), row, value


def _concatenated(xs: Sequence[CSR], padding: int):
    """`_entries` of all matrices, concatenated. Rows are numbered consecutively over the
    matrices.
    """
    firsts = itertools.accumulate([0, *(x.num_rows for x in xs[:-1])])
    parts = [_entries(x, padding) for x in xs]
    return _joined(
        [(c, row + f, value) for (c, row, value), f in zip(parts, firsts, strict=True)]
    )


def _joined(parts):
    """Concatenates the columns, rows and values of all parts."""
    column = jnp.concatenate([part[0] for part in parts])
    row = jnp.concatenate([part[1] for part in parts])
    if all(part[2] is None for part in parts):
        return column, row, None
    dtype = jnp.result_type(*(part[2] for part in parts if part[2] is not None))
    ones = [jnp.ones_like(p[0], dtype) if p[2] is None else p[2] for p in parts]
    return column, row, jnp.concatenate(ones)


def _rows_by_count(column, row, value, dy, num_rows):
    """Ranks the touched rows, then adds up their entries one by one."""
    ids, slot = rank_by_count(column, num_rows)
    return ids, _add_rows(ids.shape[0], slot, row, value, dy, column.shape[0])


def rank_by_count(
    column: Int[Array, "nse"], num_rows: int
) -> tuple[Int[Array, "capacity"], Int[Array, "nse"]]:
    """The distinct columns, and each entry's index in them, by a pass over all rows.

    Args:
      column: the column of each entry; `num_rows` for an entry that does not count.
      num_rows: number of rows of the kernel.

    Returns:
      ids: unique and ascending, padded with `num_rows`; `capacity` is the smaller of
        `nse` and `num_rows`.
      slots: the index of each entry's column in `ids`; `capacity` if it does not count.
    """
    capacity = min(column.shape[0], num_rows)
    touched = jnp.zeros(num_rows, jnp.int32).at[column].set(1, mode="drop")
    slot = sums_so_far(touched) - 1
    place = jnp.where(touched > 0, slot, capacity)
    every = jnp.arange(num_rows, dtype=jnp.int32)
    ids = jnp.full(capacity, num_rows, jnp.int32).at[place].set(every, mode="drop")
    return ids, slot.at[column].get(mode="fill", fill_value=capacity)


def _add_rows(num_slots, slot, row, value, dy, count):
    """`out[slot_j] += value_j dy[row_j]` for `j < count`, in place and in order."""
    sums = accumulator(dy.dtype)
    used = slot < num_slots
    value = jnp.where(used, jnp.asarray(1 if value is None else value, sums), 0)

    def entry(j, total):
        term = lax.dynamic_index_in_dim(dy, row[j], keepdims=False).astype(sums)
        # A select, not a factor of zero: the row of a skipped entry may be NaN.
        term = jnp.where(used[j], term * value[j], 0)
        old = lax.dynamic_index_in_dim(total, slot[j], keepdims=False)
        return lax.dynamic_update_index_in_dim(total, old + term, slot[j], 0)

    zeros = vary_over(jnp.zeros((num_slots, dy.shape[1]), sums), varying_axes(dy))
    return lax.fori_loop(0, count, entry, zeros)


def _nothing_to_add(xs: Sequence[LookupRows]) -> bool:
    """Whether no row can have an entry, so that no program is needed."""
    return all(x.nse == 0 or x.num_rows == 0 for x in xs)


def _wide(data: jax.Array | np.ndarray) -> jax.Array:
    """Converts values to the dtype in which their products are summed."""
    return jnp.asarray(data, accumulator(data.dtype))
