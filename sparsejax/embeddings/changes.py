"""Exports and applies changes of models: changed rows of tables, and all other layers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax import change_folders
from sparsejax.change_folders import Changes, Link, Table, merged
from sparsejax.embeddings import exports
from sparsejax.embeddings.collection import collections_of
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.dynamic.state import IndexState
from sparsejax.embeddings.exports import Export, Part, Pieces, tables_of
from sparsejax.embeddings.host_rows import ROW
from sparsejax.embeddings.stores.store import Store
from sparsejax.optimizers.gradients import RowParam
from sparsejax.optimizers.optimizer import Optimizer


def export_changes(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    optimizer: Optimizer | None,
    *,
    state: bool = False,
) -> Export:
    """Writes the changes of a model since the last export into a folder.

    >>> tables = {"user": DynamicTableConfig(1000, 2)}
    >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
    >>> export_changes(embeddings, "changes", None).result().is_base
    True

    ::

        for number, batch in enumerate(batches):
            step(model, optimizer, *batch)
            if number % 1000 == 0:
                sj.export_changes(model, "changes", optimizer)

    The first export is a *base* with all rows. Each later one has the rows that differ from the
    content of the folder, ids of dynamic tables that lost their row, and all other layers.
    `apply_changes` applies them in order. When the changes since the base contain four times as
    many rows as the tables have, the next export is a new base, and files before the last base are
    removed.

    Rows are written as they would be after `Optimizer.flush`; training continues bitwise as
    without the export. The call waits for the running steps, compares rows with 8 bytes that it
    keeps for each (16 for a row of a dynamic table), and copies changed rows on the device. A
    thread writes them. If there is more than a gigabyte of changed rows, the others are copied to
    the host before the call returns.

    If the process is killed, or the disk is full, the folder keeps the earlier changes. An export
    after a restart reads the folder, and writes the differences.

    Args:
      model: model whose tables are those of each `EmbeddingCollection` in it.
      folder: folder that collects the exports; it is created if it does not exist.
      optimizer: optimizer that trains the model. With None, rows are written without pending
          updates.
      state: whether to write the optimizer state of the rows of dynamic tables, too. Under most
          rules each step changes the state of every row, so that each export has all rows.

    Returns:
      The running export. `result()` waits for it and raises its errors; otherwise the next export
      raises them.

    Raises:
      NotImplementedError: there are several processes, or the model has a `RowParam` outside its
          collections.
      OSError: the folder cannot be made or read.
      ValueError: the model has no tables; the folder contains truncated or altered changes; or
          `state` is set without an optimizer.
    """
    tables = _tables_of(model)
    values = {name: variable[...] for name, variable in tables.values.items()}
    path = pathlib.Path(folder)
    return exports.export(model, path, tables.parts, values, optimizer, state=state)


def apply_changes(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    optimizer: Optimizer | None = None,
    *,
    after: Changes | None = None,
) -> Changes:
    """Applies the changes in a folder, written by `export_changes`, to a model, in order.

    >>> tables = {"user": DynamicTableConfig(1000, 2)}
    >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
    >>> _ = export_changes(embeddings, "of users", None).result()
    >>> apply_changes(embeddings, "of users").number
    0

    ::

        taken = sj.apply_changes(model, "changes")               # from the last base on
        taken = sj.apply_changes(model, "changes", after=taken)  # what has come since then

    All files are read and checked before the model changes, so after an error it is unchanged.

    Args:
      model: model with the layers and tables of the exported one; or an `EmbeddingCollection`, if
          a collection was exported. Its mesh and the capacities of its dynamic tables may differ.
      folder: folder that `export_changes` has filled.
      optimizer: optimizer that trains this model. Rows get the optimizer state stored in the
          changes, and `optimizer.step` becomes the step of the export. If the changes have no
          state, rows get the state of a new optimizer.
      after: changes that an earlier call returned. Only later ones are applied. By default all
          changes from the last base on are applied.

    Returns:
      The last changes that were applied.

    Raises:
      OSError: a file cannot be read.
      ValueError: there are no changes; a file is missing, truncated, altered, out of order,
          belongs to another base, or contains a number that is not finite; the changes belong to
          other tables, or have more ids than the tables have room for. The message names the file
          and the expected content.
    """
    links = change_folders.chain(folder, after)
    if not links:
        # If `after` is None, the first link is a base, so this is not reached.
        assert after is not None
        return after
    tables = _tables_of(model)
    _check_tables(links[-1], tables.parts)
    values = links[-1].values()
    _check_values(links[-1], tables.values)
    _apply(links, tables.parts, optimizer)
    for name, variable in tables.values.items():
        array = variable[...]
        variable.set_value(jax.device_put(values[name], array.sharding))
    return links[-1].changes


class _Tables(NamedTuple):
    """The parts of a model that change in training.

    Attributes:
      parts: stacks of its collections.
      values: all other variables, by name.
    """

    parts: list[Part]
    values: dict[str, nnx.Variable]


def _tables_of(model: nnx.Module) -> _Tables:
    collections = collections_of(model)
    if not collections:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingCollection, whose tables could change"
        )
    parts = [
        part
        for path, node in collections.items()
        for part in node.parts(prefix="".join(f"{p}." for p in path), within=path)
    ]
    tables = {id(part.store.kernel) for part in parts}
    values = {}
    for path, node in nnx.iter_graph(model):
        path = tuple(path)
        within = any(path[: len(each)] == each for each in collections)
        is_seed = isinstance(node, IndexState) and path[-1] == "seed"
        if not isinstance(node, nnx.Variable) or isinstance(node, nnx.RngState):
            continue
        if within and not is_seed:
            continue
        name = ".".join(map(str, path))
        if isinstance(node, RowParam) and id(node) not in tables:
            raise NotImplementedError(
                f"'{name}' is a RowParam outside of an EmbeddingCollection: changes of it are "
                "not exported. Export the collection alone"
            )
        values[name] = node
    return _Tables(parts, values)


def _check_values(link: Link, here: dict[str, nnx.Variable]) -> None:
    given = {value.name: (value.dtype, value.shape) for value in link.manifest.values}
    wanted = {
        name: (variable[...].dtype.name, variable.shape)
        for name, variable in here.items()
    }
    if given != wanted:
        name = min(
            name
            for name in given.keys() | wanted.keys()
            if given.get(name) != wanted.get(name)
        )
        raise ValueError(
            f"{link.path} is of another model: '{name}' has the dtype and the shape "
            f"{given.get(name)} there, and {wanted.get(name)} here"
        )


def _apply(
    links: Sequence[Link], parts: Sequence[Part], optimizer: Optimizer | None
) -> None:
    """Applies the changes of `change_folders.chain` to tables; see `sparsejax.apply_changes`.

    After an error the tables are unchanged.
    """
    tables = _tables(parts)
    stated = links[-1].manifest.tables
    number_of = {table.name: number for number, table in enumerate(stated)}
    with_state = optimizer is not None and any(
        column.name.startswith(files.STATE)
        for table in stated
        for column in table.columns
    )
    step = None if optimizer is None else optimizer.step[...]
    # The rows in the changes, also those of static tables, have their values and state as of this
    # step.
    if with_state:
        step = jnp.asarray(links[-1].manifest.steps, jnp.int32)
    plans: list[tuple[Store, np.ndarray, dict[str, np.ndarray], bool]] = []
    is_base = links[0].manifest.base is None
    known = [v for part in parts for v in part.store.known.values()]
    before = [variable[...] for variable in known]
    try:
        for table, pieces in tables.items():
            number = number_of[table.name]
            content = merged(link.content(number) for link in links)
            store = parts[pieces.part].store
            removed = None if is_base else content.removed
            places = store.placed(links[-1].path, pieces.tables, content.ids, removed)
            for piece, rows in zip(pieces.tables, places, strict=True):
                row = store.stack.part_of(content.columns[ROW], piece)
                columns = {**content.columns, ROW: row}
                columns, begins = _with_state(
                    links[-1], store, columns, optimizer, with_state=with_state
                )
                plans.append((store, rows, columns, begins))
    except BaseException:
        for variable, array in zip(known, before, strict=True):
            variable.set_value(array)
        raise
    for store, rows, columns, begins in plans:
        if begins and optimizer is not None and step is not None:
            store.begin(rows, columns, optimizer, step)
        else:
            store.write(rows, columns, optimizer)
    if with_state and optimizer is not None:
        optimizer.step.set_value(step)


def _tables(parts: Sequence[Part]) -> dict[Table, Pieces]:
    return tables_of(parts, [p.store.exported(None, state=False) for p in parts])


def _check_tables(link: Link, parts: Sequence[Part]) -> None:
    """Raises ValueError unless the changes belong to these tables."""
    given, here = (
        {
            (table.name, table.num_rows, column)
            for table in tables
            for column in table.columns
            if column.name == ROW
        }
        for tables in (link.manifest.tables, _tables(parts))
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
    store: Store,
    columns: dict[str, np.ndarray],
    optimizer: Optimizer | None,
    *,
    with_state: bool,
) -> tuple[dict[str, np.ndarray], bool]:
    """The columns to write to a store, and whether to initialize the optimizer state of their
    rows.
    """
    given = {n: a for n, a in columns.items() if not n.startswith(files.STATE)}
    if optimizer is None or not len(columns[ROW]):
        return given, False
    if not (with_state and store.known):
        return given, True
    arrays = optimizer.rows_within(store.path, store.kernel)
    wanted = {files.STATE + name for name in arrays}
    if wanted != columns.keys() - given.keys():
        raise ValueError(
            f"{link.path} has the state {sorted(columns.keys() - given.keys())}, expected "
            f"{sorted(wanted)}: it is of another rule; leave the optimizer out"
        )
    return columns, False
