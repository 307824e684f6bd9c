"""Functions that run on each device's own blocks, in `layout.call_on_each_device`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.mesh.layout import axis_sizes, call_on_each_device, mesh_is_set
from sparsejax.sparse import CSR, Transposed, segment_ids, sums_so_far


def on_each[Result](
    f: Callable[..., Result], arguments: tuple[Any, ...], in_specs: Any, out_specs: Any
) -> Result:
    """Calls `f` on each device of the mesh by `call_on_each_device`; without a mesh, once."""
    if not mesh_is_set():
        return f(*arguments)
    return call_on_each_device(f, arguments, in_specs, out_specs)


def _is_part() -> bool:
    """Whether the code is traced for one device of a mesh, in `on_each`."""
    return "model" in jax.sharding.get_abstract_mesh().manual_axes


def own_place() -> int | jax.Array:
    """In `on_each`: the index of this device along "model"; 0 without a mesh."""
    return lax.axis_index("model") if _is_part() else 0


def found_anywhere(rows: jax.Array, first: int | jax.Array) -> jax.Array:
    """In `on_each`: the row of each id, found on any device and numbered over all devices.

    Args:
      rows: this device's row of each id; -1 if the device has none.
      first: number of this device's first row.
    """
    if not _is_part():
        return rows
    return lax.pmax(jnp.where(rows >= 0, rows + first, -1), "model")


def sum_over_model(values: jax.Array) -> jax.Array:
    """In `on_each`: the sum of the values over all devices along "model"."""
    return lax.psum(values, "model") if _is_part() else values


def on_any(flags: jax.Array) -> jax.Array:
    """In `on_each`: whether a flag is true on any device along "model"."""
    return lax.pmax(flags.astype(jnp.int32), "model") > 0 if _is_part() else flags


def own_block(tree: Any) -> Any:
    """Removes the two axes of size 1 from a device's block: `[..., 1, 1, n]` to `[..., n]`."""

    def squeezed(leaf):
        return leaf.reshape(*leaf.shape[:-3], leaf.shape[-1])

    return jax.tree.map(squeezed, tree)


def as_block(tree: Any) -> Any:
    """Adds two axes of size 1 to a device's block; the inverse of `own_block`."""
    return jax.tree.map(lambda leaf: leaf[None, None], tree)


def blocks_of[Tree](
    f: Callable[..., Tree], arguments: tuple[Any, ...], in_specs: tuple[P, ...]
) -> Tree:
    """Calls `f` on each device, which returns its block; the leaves become `[data, model, n]`."""

    def part(*arguments):
        return as_block(f(*arguments))

    return call_on_each_device(part, arguments, in_specs, P("data", "model"))


def on_blocks[Tree](f: Callable[..., Tree], *blocks: Any) -> Tree:
    """Calls `f` with each device's own blocks; `f` returns blocks, too."""
    specs = (P("data", "model"),) * len(blocks)
    return blocks_of(lambda *blocks: f(*own_block(blocks)), blocks, specs)


def transpose_over_data(block: CSR) -> Transposed:
    """Gathers the entries of this device's columns along "data", and sorts them by column.

    `block` is the device's own block, or a stack of blocks.
    """

    entries = (
        jax.vmap(entries_over_data) if block.indptr.ndim > 1 else entries_over_data
    )
    return Transposed.of(*entries(block), block.num_cols)


def entries_over_data(block: CSR) -> tuple[jax.Array, jax.Array]:
    """Columns and rows of the entries in this device's columns, gathered along "data".

    The column is `num_cols` for an entry that does not count.
    """
    first = lax.axis_index("data") * block.num_rows
    return gather_over_data(
        (block.columns(padding=block.num_cols), block.row_ids() + first)
    )


def gather_over_data(arrays: Any) -> Any:
    """Concatenates the arrays `[n, ...]` of all devices along "data"."""
    # Without data parallelism nothing is gathered; returning here avoids a copy by XLA.
    if axis_sizes()[0] == 1:
        return arrays
    return jax.tree.map(lambda a: lax.all_gather(a, "data", tiled=True), arrays)


def concatenate_rows(parts: CSR, cut: jax.Array) -> CSR:
    """Joins a stack `[count, ...]` of matrices. Rows that are `cut` get an invalid index."""
    count, nse = parts.indices.shape
    indptr = jnp.asarray(parts.indptr)
    starts = indptr[:, :-1] + jnp.arange(count, dtype=jnp.int32)[:, None] * nse
    wrong = count * nse  # position of an invalid index
    starts = jnp.where(cut, wrong, starts).reshape(-1)
    lengths = jnp.where(cut, 1, jnp.diff(indptr, axis=1)).reshape(-1)
    ends = sums_so_far(lengths)
    joined = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    positions = jnp.arange(count * nse, dtype=jnp.int32)
    row = jnp.minimum(segment_ids(joined, count * nse), lengths.shape[0] - 1)
    source = jnp.clip(starts[row] + positions - joined[row], 0, wrong)

    def entries(values, last):
        return jnp.append(jnp.asarray(values).reshape(-1), last)[source]

    data = None if parts.data is None else entries(parts.data, 0)
    return CSR(data, entries(parts.indices, -1), joined, num_cols=parts.num_cols)


def columns_between(x: CSR, part: jax.Array, width: int, cut: jax.Array) -> CSR:
    """The columns `part * width .. (part + 1) * width - 1`, numbered from 0.

    The capacity stays that of `x`. Invalid indices are kept and go to shard 0. Rows
    that are `cut`, and all rows after them, lack entries: they are overfull in the
    result.
    """
    columns = jnp.asarray(x.indices)
    row = x.row_ids()
    wrong = (columns < 0) | (columns >= x.num_cols)
    inside = ~wrong & (columns // width == part)
    kept = (inside | (wrong & (part == 0))) & (row < x.num_rows)
    place = jnp.where(kept, sums_so_far(kept) - 1, x.nse)

    def compact(values):
        return jnp.zeros_like(values).at[place].set(values, mode="drop")

    lengths = (
        jnp.zeros(x.num_rows, jnp.int32)
        .at[row]
        .add(kept.astype(jnp.int32), mode="drop")
    )
    ends = sums_so_far(lengths)
    ends = jnp.where(cut, x.nse + 1, ends)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    indices = compact(jnp.where(wrong, -1, columns - part * width))
    data = None if x.data is None else compact(jnp.asarray(x.data))
    return CSR(data, indices, indptr, num_cols=width)


def gathered_columns(part: CSR, width: int) -> CSR:
    """The rows of all devices along "model", restricted to this device's `width` columns.

    The capacity is the sum of the devices' capacities.
    """
    parts = jax.tree.map(lambda leaf: lax.all_gather(leaf, "model"), part)
    cut = jax.vmap(CSR.overfull_rows)(parts)
    where = lax.axis_index("model")
    found = jax.vmap(lambda x, cut: columns_between(x, where, width, cut))(parts, cut)
    return concatenate_rows(found, cut)
