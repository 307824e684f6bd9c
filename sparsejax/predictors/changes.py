"""Applies exported changes of a model to a predictor's weights."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sparsejax.change_folders import Changes, Content, Link, Table, merged
from sparsejax.mesh.layout import without_mesh
from sparsejax.ops import index_edits
from sparsejax.ops.hash_index import PARTS, Index, Layout
from sparsejax.predictors.signature import ClickStack, ClickTable, Signature


@dataclasses.dataclass(eq=False)
class Taken:
    """The state of a predictor that applies the changes in a folder.

    Attributes:
      last: changes that were applied last.
      lock: lock that a thread holds while it applies changes.
    """

    last: Changes | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


def changed_weights(
    signature: Signature, weights: Sequence[jax.Array], links: Sequence[Link]
) -> list[jax.Array]:
    """Weights after the changes of `change_folders.chain`. The given arrays are not modified.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file is truncated or altered, or belongs to another model; or a table has no
          room for new ids.
    """
    last, found = links[-1], list(weights)
    places = {each.name: i for i, each in enumerate(signature.weights) if each.name}
    tables = {
        table.name: (stack, number)
        for stack in signature.stacks
        for number, table in enumerate(stack.tables)
    }
    if not tables:
        raise ValueError(
            "changes are for predictors of click models that this release has exported; "
            "export this one again"
        )
    stated = {table.name for table in last.manifest.tables}
    if not tables.keys() <= stated:
        raise ValueError(
            f"{last.path} has changes of the tables {sorted(stated)}, but this predictor "
            f"has {sorted(tables)}: it is of another model"
        )
    for value, array in last.values().items():
        at = places.get(value)
        like = None if at is None else found[at]
        if like is None or (like.shape, like.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"{last.path} is of another model: this predictor has no {value!r} of "
                f"{array.dtype} and the shape {array.shape}"
            )
        found[places[value]] = jnp.asarray(array)
    is_base = links[0].manifest.base is None
    with without_mesh():
        for number, table in enumerate(last.manifest.tables):
            if table.name not in tables:  # no feature reads this table
                continue
            stack, place = tables[table.name]
            kernel = places[stack.kernel]
            _check_rows(last, table, stack, stack.tables[place], found[kernel])
            content = merged(link.content(number) for link in links)
            rows = content.ids.astype(np.int64) + stack.tables[place].first
            if stack.dynamic:
                names = [f"{stack.index}.{name}" for name in Index._fields]
                index = Index(*(found[places[name]] for name in names))
                index, rows = _indexed(last, stack, place, index, content, is_base)
                for name, array in zip(names, index, strict=True):
                    found[places[name]] = array
            found[kernel] = _written(found[kernel], rows, content.columns["row"])
        return jax.block_until_ready(found)


def _check_rows(
    link: Link, table: Table, stack: ClickStack, here: ClickTable, kernel: jax.Array
) -> None:
    (row,) = (column for column in table.columns if column.name == "row")
    if not jnp.issubdtype(kernel.dtype, jnp.floating) or kernel.dtype.itemsize == 1:
        raise ValueError(
            f"the rows of this predictor are {kernel.dtype}, and take no changes: export it "
            "without table_dtype"
        )
    wanted = 0 if stack.dynamic else here.num_rows
    if (table.num_rows, row.width) != (wanted, kernel.shape[1]):
        raise ValueError(
            f"{link.path} has {table.num_rows or 'dynamic'} rows of {row.width} numbers of "
            f"table {table.name!r}, expected {wanted or 'dynamic'} of {kernel.shape[1]}"
        )


def layout_of(stack: ClickStack, used: jax.Array | np.ndarray) -> Layout:
    """The index layout of dynamic tables. `used` is a mask of their used rows."""
    return Layout(
        rows=used.shape[1],
        firsts=tuple(table.first // PARTS for table in stack.tables),
        sizes=tuple(table.num_rows // PARTS for table in stack.tables),
    )


def _indexed(
    link: Link,
    stack: ClickStack,
    place: int,
    index: Index,
    content: Content,
    is_base: bool,
) -> tuple[Index, np.ndarray]:
    """Applies changes to an index. Returns the new index, and row numbers of changed ids."""
    layout = layout_of(stack, index.used)
    known = index_edits.rows_of(
        layout, place, np.asarray(index.used), np.asarray(index.keys)
    )
    return index_edits.changed(
        link.path,
        layout,
        place,
        stack.tables[place].name,
        index,
        known,
        ids=content.ids,
        removed=None if is_base else content.removed,
    )


def _written(kernel: jax.Array, rows: np.ndarray, values: np.ndarray) -> jax.Array:
    """A copy of a kernel in which the given rows are replaced."""
    for number, (at, data) in enumerate(index_edits.blocks(rows, values)):
        # Running programs may still read the original kernel, so only copies of it are donated.
        kernel = _write(number > 0)(kernel, at, data)
    return kernel


@functools.cache
def _write(donate: bool):
    return jax.jit(_put, donate_argnums=(0,) if donate else ())


def _put(kernel: jax.Array, rows: ArrayLike, values: ArrayLike) -> jax.Array:
    data = jnp.asarray(values).astype(kernel.dtype)
    return kernel.at[rows].set(data, mode="drop")
