"""Tables that take the changes of a folder."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.change_folders import Link, Table, merged
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.dynamic.changes import (
    Part,
    Piece,
    rows_now,
    tables_of,
)
from sparsejax.embeddings.host_rows import ROW
from sparsejax.embeddings.placement import Stack, StackedTable
from sparsejax.optimizers.gradients import Path, RowParam
from sparsejax.optimizers.optimizer import Optimizer, first_state


class Taker(Protocol):
    """A store of some tables, which takes changes; see `sparsejax.embeddings.stores`."""

    stack: Stack
    kernel: RowParam
    known: Mapping[str, nnx.Variable]
    path: Path

    def placed(
        self,
        path: pathlib.Path,
        pieces: tuple[StackedTable, ...],
        ids: np.ndarray,
        removed: np.ndarray | None,
    ) -> list[np.ndarray]:
        """Gives ids their rows."""
        ...

    def write(
        self,
        rows: np.ndarray,
        values: Mapping[str, np.ndarray],
        optimizer: Optimizer | None,
    ) -> None:
        """Replaces columns of rows."""
        ...


def apply(
    links: Sequence[Link],
    parts: Sequence[Part],
    stores: Sequence[Taker],
    optimizer: Optimizer | None,
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
    plans: list[tuple[Taker, np.ndarray, dict[str, np.ndarray]]] = []
    is_base = links[0].manifest.base is None
    known = [variable for store in stores for variable in store.known.values()]
    before = [variable[...] for variable in known]
    try:
        for table, pieces in tables.items():
            number = number_of[table.name]
            content = merged(link.content(number) for link in links)
            store = stores[pieces[0].part]
            removed = None if is_base else content.removed
            mine = tuple(piece.table for piece in pieces)
            places = store.placed(links[-1].path, mine, content.ids, removed)
            for piece, rows in zip(mine, places, strict=True):
                columns = content.columns
                if table.num_rows:
                    first = piece.first_column
                    columns = {ROW: columns[ROW][:, first : first + store.stack.dim]}
                columns = _with_state(
                    links[-1], store, columns, optimizer, step, with_state=with_state
                )
                plans.append((store, rows, columns))
    except BaseException:
        for variable, array in zip(known, before, strict=True):
            variable.set_value(array)
        raise
    for store, rows, columns in plans:
        store.write(rows, columns, optimizer)
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


def _with_state(
    link: Link,
    store: Taker,
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
    arrays = optimizer.rows_within(store.path, store.kernel)
    if not (with_state and store.known):
        begin = functools.partial(first_state, optimizer.rule_of(store.kernel))
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
