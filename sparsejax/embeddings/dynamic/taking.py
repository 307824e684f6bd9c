"""Tables that take the changes of a folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.change_folders import Content, Link, Table, merged
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.dynamic.changes import (
    Part,
    Piece,
    rows_now,
    tables_of,
)
from sparsejax.embeddings.dynamic.state import layout_of, rows_of
from sparsejax.embeddings.host_rows import ROW
from sparsejax.embeddings.placement import StackedTable
from sparsejax.mesh.layout import to_host
from sparsejax.ops import index_edits
from sparsejax.ops.hash_index import Index
from sparsejax.optimizers import inplace
from sparsejax.optimizers.optimizer import Optimizer, first_state


class _Plan(NamedTuple):
    """The changes that a table takes.

    Attributes:
      number: of its stack.
      rows: of the kernel.
      columns: what each of the rows has, by column.
    """

    number: int
    rows: np.ndarray
    columns: dict[str, np.ndarray]


def apply(
    links: Sequence[Link], parts: Sequence[Part], optimizer: Optimizer | None
) -> None:
    """Gives tables the changes of `change_folders.chain`; see `sparsejax.apply_changes`.

    An error leaves the tables as they are.
    """
    tables = _tables_of(parts)
    stated = links[-1].manifest.tables
    number_of = {table.name: number for number, table in enumerate(stated)}
    with_state = optimizer is not None and any(
        column.name.startswith(files.STATE)
        for table in stated
        for column in table.columns
    )
    step = None if optimizer is None else optimizer.step[...]
    if with_state:  # rows are as they were at this step, those of static tables, too
        step = jnp.asarray(links[-1].manifest.steps, jnp.int32)
    plans: list[_Plan] = []
    indexes: dict[int, Index] = {}
    is_base = links[0].manifest.base is None
    for table, pieces in tables.items():
        number = number_of[table.name]
        content = merged(link.content(number) for link in links)
        for at, piece in pieces:
            part = parts[at]
            columns = content.columns
            if table.num_rows:
                rows = part.stack.row_of(content.ids.astype(np.int64), piece.place)
                first = piece.first_column
                columns = {ROW: columns[ROW][:, first : first + part.stack.dim]}
            else:
                index = indexes.get(at) or _index(part)
                indexes[at], rows = _indexed(
                    links[-1], part, piece, index, content, is_base=is_base
                )
            columns = _with_state(
                links[-1], part, columns, optimizer, step, with_state=with_state
            )
            plans.append(_Plan(at, rows, columns))
    for at, index in indexes.items():
        for name, array in index._asdict().items():
            parts[at].known[name].set_value(array)
    for plan in plans:
        _write(parts[plan.number], plan, optimizer)
    if with_state and optimizer is not None:
        optimizer.step.set_value(step)


def _tables_of(parts: Sequence[Part]) -> dict[Table, list[Piece]]:
    return tables_of(parts, [rows_now(part, None, state=False) for part in parts])


def check_tables(link: Link, parts: Sequence[Part]) -> None:
    """Raises ValueError unless changes are of these tables."""
    given, here = (
        {
            (table.name, table.num_rows, column)
            for table in tables
            for column in table.columns
            if column.name == ROW
        }
        for tables in (link.manifest.tables, _tables_of(parts))
    )
    if given != here:
        shown = "; ".join(
            ", ".join(
                f"{name} {f'[{rows}]' if rows else '(dynamic)'} x {column.width} "
                f"{column.dtype}"
                for name, rows, column in sorted(some, key=lambda each: each[0])
            )
            for some in (given, here)
        )
        raise ValueError(
            f"{link.path} has changes of other tables than the model: {shown}. Give the "
            "model, or its collection, that was exported"
        )


def _index(part: Part) -> Index:
    return Index(**{name: part.known[name][...] for name in Index._fields})


def _indexed(
    link: Link,
    part: Part,
    table: StackedTable,
    index: Index,
    content: Content,
    *,
    is_base: bool,
) -> tuple[Index, np.ndarray]:
    """An index with the changed ids, and their rows."""
    stack = part.stack
    return index_edits.changed(
        link.path,
        layout_of(stack),
        stack.tables.index(table),
        table.name,
        index,
        rows_of(stack, table, *_used_and_keys(part)),
        ids=content.ids,
        removed=None if is_base else content.removed,
    )


def _used_and_keys(part: Part) -> tuple[np.ndarray, np.ndarray]:
    return to_host(part.known["used"][...]), to_host(part.known["keys"][...])


def _with_state(
    link: Link,
    part: Part,
    columns: dict[str, np.ndarray],
    optimizer: Optimizer | None,
    step: jax.Array | None,
    *,
    with_state: bool,
) -> dict[str, np.ndarray]:
    """The columns with what the optimizer is to have of the rows."""
    given = {n: a for n, a in columns.items() if not n.startswith(files.STATE)}
    if optimizer is None or step is None or not len(columns[ROW]):
        return given
    arrays = optimizer.rows_within(part.within, part.kernel)
    if not (with_state and part.stack.dynamic):
        begin = functools.partial(first_state, optimizer.rule_of(part.kernel))
        fresh = files.in_blocks(
            lambda rows: begin(jnp.asarray(rows), step), columns[ROW]
        )
        return given | {files.STATE + name: array for name, array in fresh.items()}
    wanted = {files.STATE + name for name in arrays}
    if wanted != columns.keys() - given.keys():
        raise ValueError(
            f"{link.path} has the state {sorted(columns.keys() - given.keys())}, expected "
            f"{sorted(wanted)}: it is of another rule; leave the optimizer out"
        )
    return columns


def _write(part: Part, plan: _Plan, optimizer: Optimizer | None) -> None:
    variables: dict[str, nnx.Variable] = {ROW: part.kernel}
    variables |= {name: part.known[name] for name in part.numbers}
    if optimizer is not None:
        arrays = optimizer.rows_within(part.within, part.kernel)
        variables |= {files.STATE + name: array for name, array in arrays.items()}
    columns = plan.columns
    if part.host is not None:
        part.host.attach_within(part.within, part.kernel, optimizer)
        on_host = {
            name.removeprefix(files.STATE): values
            for name, values in columns.items()
            if not files.is_number(name)
        }
        part.host.put(plan.rows, on_host)
        columns = {name: columns[name] for name in part.numbers}
    for name, values in columns.items():
        variable = variables[name]
        write = functools.partial(
            files.overwritten,
            rows=plan.rows,
            values=values,
            by_parts=files.is_number(name),
            divided=part.stack.divided,
        )
        inplace.overwrite([variable], _once(write, variable))


def _once(write: Callable[[jax.Array], jax.Array], variable: nnx.Variable):
    return lambda: ([write(variable[...])], None)
