"""Finds and writes changes of tables.

For each row, a hash of 64 bits states what the folder of changes contains. So an export finds all
differences from the folder, whether they come from a step, a flush, a loaded file, or training
from an older checkpoint. If two hashes were equal by chance (once in 2^64), a change would be
missed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, UInt32

from sparsejax import change_folders, row_files
from sparsejax.change_folders import Changes, Column, Link, Table
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.host_rows import ROW, Touched
from sparsejax.embeddings.placement import Stack, StackedTable, spec_of
from sparsejax.embeddings.stores.store import Hosted, Rows, Store
from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded, sharding_of, to_host
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.whole_files import check_path
from sparsejax.wide_ids import WideIds

# When the changes since a base have more than this many times the rows of all tables, a new base
# is written.
_MOST_CHANGES = 4
# The most bytes of copied rows that wait on the devices for the writing thread.
_HELD = 2**30
# Number of rows in host memory that are compared at a time.
_COMPARED = 2**16


class Part(NamedTuple):
    """A stack of a model, to export.

    Attributes:
      prefix: path of its collection, a prefix of its table names.
      store: store of its rows.
    """

    prefix: str
    store: Store

    @property
    def stack(self) -> Stack:
        """The stack: its tables, and their layout."""
        return self.store.stack


class _OnHost(NamedTuple):
    """The state of a folder of changes, for the columns in host memory of one stack.

    Attributes:
      hashes: `[rows, 2]` hashes of the content.
      touched: marks of rows that may differ from it.
    """

    hashes: np.ndarray
    touched: Touched


class _Told(NamedTuple):
    """The state of a folder of changes, for the columns on the devices of one stack.

    Attributes:
      hashes: hashes of the row's columns on the devices, as the folder has them.
      used: bool: whether the folder has the row.
      keys: key that the folder has for the row of a dynamic table; else None.
    """

    hashes: UInt32[Array, "rows 2"]
    used: Bool[Array, "rows"]
    keys: UInt32[Array, "rows 2"] | None


class _Content(NamedTuple):
    """The state of a folder of changes, for one stack.

    Attributes:
      told: content for the rows' columns on the devices.
      on_host: content for the columns in host memory; None if there are none.
    """

    told: _Told
    on_host: _OnHost | None


class _Difference(NamedTuple):
    """Differences between the rows of a stack and the rows stored in a folder.

    Attributes:
      changed: bool: the row must be written, as it differs or is missing in the folder.
      gone: bool: the folder has a key for the row that the row has lost.
      keys: keys that the folder has for the rows of a dynamic table; else None.
    """

    changed: np.ndarray
    gone: np.ndarray
    keys: jax.Array | None


@dataclasses.dataclass
class _Memory:
    """The state of a folder of changes, kept in memory between exports.

    Attributes:
      last: last changes in the folder.
      contents: content of the folder for each stack.
      lost: for each table, ids that are in the folder but no longer in the table.
      written: number of rows and removed ids since the last base.
    """

    last: Link
    contents: list[_Content]
    lost: list[np.ndarray]
    written: int


class Export:
    """Changes that a thread is writing.

    >>> tables = {"user": DynamicTableConfig(1000, 2)}
    >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
    >>> embeddings.export_changes("of a table", None).result().rows
    0

    Its error is raised by `result`, or else by the next export of this model. The folder then has
    the earlier changes, and the next export writes the missing ones, too.
    """

    def __init__(self, write: Callable[[], Changes]):
        self._future: concurrent.futures.Future[Changes] = concurrent.futures.Future()
        self._asked = False
        self._thread = threading.Thread(target=self._run, args=(write,))
        self._thread.start()

    def _run(self, write: Callable[[], Changes]) -> None:
        try:
            self._future.set_result(write())
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(error)

    def done(self) -> bool:
        """Whether the export has ended, successfully or not."""
        return self._future.done()

    def result(self) -> Changes:
        """Waits for the export to end; returns the changes that were written.

        Raises:
          FloatingPointError: a row or a layer has a number that is not finite; nothing was
              written.
          OSError: a file could not be written.
        """
        self._asked = True
        return self._future.result()

    def join(self) -> None:
        """Waits for the export to end, without raising its error."""
        self._thread.join()

    def settle(self) -> None:
        """Waits for the export to end, and raises its error unless `result` has raised it."""
        self.join()
        if not self._asked:
            self.result()


class Pieces(NamedTuple):
    """A table in its stack.

    Attributes:
      part: number of the stack.
      tables: the table, or its pieces with some of its columns each.
    """

    part: int
    tables: tuple[StackedTable, ...]


class _Later(NamedTuple):
    """Rows of a table that are read only when they are written.

    Attributes:
      nbytes: approximate number of bytes.
      read: function that returns for each column the arrays that are concatenated in it.
    """

    nbytes: int
    read: Callable[[], list[list[Any]]]


# A block of table rows: the ids, and for each column the arrays to be concatenated. These arrays
# may have padding rows.
_Block = tuple[np.ndarray, list[list[Any]] | _Later]

_memories: weakref.WeakKeyDictionary[Any, dict[pathlib.Path, _Memory]] = (
    weakref.WeakKeyDictionary()
)
_running: weakref.WeakKeyDictionary[Any, Export] = weakref.WeakKeyDictionary()


def export(
    owner: Any,
    folder: pathlib.Path,
    parts: Sequence[Part],
    values: Mapping[str, jax.Array],
    optimizer: Optimizer | None,
    *,
    state: bool,
) -> Export:
    """Writes the difference between a model and a folder into the folder; see
    `sparsejax.export_changes`.

    Args:
      owner: module that contains the tables. It stores the hashes of the content of folders.
      folder: folder that collects the exports.
      parts: stacks to export.
      values: other arrays by name.
      optimizer: optimizer that trains the rows.
      state: whether the state of dynamic tables is exported.
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            "export_changes works in one process; this is one of "
            f"{jax.process_count()}: use save_table"
        )
    if state and optimizer is None:
        raise ValueError("state=True needs the optimizer that has the state")
    if owner in _running:
        _running.pop(owner).settle()
    check_path(folder)
    folder = folder.resolve()
    # Creating the folder here raises an error to the caller, not in the writing thread.
    folder.mkdir(exist_ok=True)
    now = [part.store.exported(optimizer, state=state) for part in parts]
    tables = tables_of(parts, now)
    memories = _memories.setdefault(owner, {})
    memory, last = _recalled(folder, memories.pop(folder, None), parts, now, tables)
    contents, differences = _differing(parts, now, memory)
    # Changed rows are copied on the devices, so that training can continue while they are written.
    held, removed, blocks = _Held(), [], []
    for number, (at, pieces) in enumerate(tables.values()):
        store, mine = parts[at].store, differences[at]
        lost, _ = store.ids_in(pieces, mine.gone, mine.keys)
        found = store.ids_in(pieces, mine.changed, contents[at].told.keys)
        changes = _changed_rows(now[at], *found)
        some: list[_Block] = [(ids, held.kept(arrays)) for ids, arrays in changes]
        if memory is not None:
            lost = np.union1d(lost, memory.lost[number])
        blocks.append(some)
        removed.append(
            np.setdiff1d(lost, np.concatenate([_NONE, *(i for i, _ in some)]))
        )
    layers = {name: to_host(value) for name, value in values.items()}
    steps = None if optimizer is None else int(optimizer.step[...])
    written = 0 if memory is None else memory.written
    is_base = memory is None

    def write() -> Changes:
        for name, value in layers.items():
            _check_finite(f"the layer '{name}'", value)
        given = {
            table: (_on_host(table, some), gone)
            for table, some, gone in zip(tables, blocks, removed, strict=True)
        }
        link = change_folders.write(
            folder, last, is_base=is_base, steps=steps, tables=given, values=layers
        )
        changes = link.changes
        count = written + (0 if is_base else changes.rows + changes.removed)
        lost = [_NONE] * len(tables)
        memories[folder] = _Memory(link, contents, lost, count)
        if is_base and last is not None:
            # A slow reader either loads the new base, or still reads the files since the previous
            # base.
            change_folders.remove_before_base(folder, last)
        return changes

    running = _running[owner] = Export(write)
    if held.waits:
        running.join()
    return running


_NONE = np.zeros(0, np.uint64)


class _Held:
    """Copies of rows on the device, up to a number of bytes; further copies are on the host.

    Rows in host memory are copied up to this number of bytes; further ones are read later.

    Attributes:
      waits: whether rows must not change until they are written.
    """

    def __init__(self):
        self._bytes, self.waits = 0, False

    def kept(self, arrays: list[list[Any]] | _Later) -> list[list[Any]] | _Later:
        """Returns the arrays themselves, copies of them in host memory, or an unread `_Later`."""
        if isinstance(arrays, _Later):
            self._bytes += arrays.nbytes
            self.waits |= self._bytes > _HELD
            return arrays if self._bytes > _HELD else arrays.read()
        self._bytes += sum(each.nbytes for each in itertools.chain(*arrays))
        if self._bytes <= _HELD:
            return arrays
        return [[np.asarray(each) for each in some] for some in arrays]


def tables_of(parts: Sequence[Part], now: Sequence[Rows]) -> dict[Table, Pieces]:
    """The tables of all parts in order, with the pieces of each table."""
    found = {}
    for number, (part, rows) in enumerate(zip(parts, now, strict=True)):
        for name in dict.fromkeys(table.name for table in part.stack.tables):
            pieces = tuple(t for t in part.stack.tables if t.name == name)
            arrays = rows.arrays().items()
            columns = tuple(_column(n, array, pieces[0]) for n, array in arrays)
            num_rows = 0 if part.store.grows else pieces[0].config.num_rows
            table = Table(part.prefix + name, num_rows, columns)
            found[table] = Pieces(number, pieces)
    return found


def _column(name: str, array: jax.Array | np.ndarray, table: StackedTable) -> Column:
    dtype = row_files.dtype_of(array)
    if name == ROW:
        return Column(name, dtype.name, table.config.dim)
    alone = files.is_number(name) or array.ndim == 1
    return Column(name, dtype.name, 0 if alone else array.shape[1])


# --- differences between tables and folder ---


def _differing(
    parts: Sequence[Part], now: Sequence[Rows], memory: _Memory | None
) -> tuple[list[_Content], list[_Difference]]:
    """Compares the rows of each stack with the folder: their new hashes, and the differences."""
    contents, differences = [], []
    for number, (part, rows) in enumerate(zip(parts, now, strict=True)):
        known = [] if memory is None else memory.contents[number : number + 1]
        before, there = known[0] if known else _nothing(part.stack, rows)
        after, gone = before, np.zeros(part.stack.num_rows, bool)
        changed = gone
        if rows.columns:
            spec = spec_of(part.stack, 1)
            compare = jit_sharded(_compared, spec, static=(0,))
            after, *found = compare(spec, rows._replace(hosted=None), before)
            changed, gone = map(to_host, found)
        if there is not None:
            changed = changed | _compared_on_host(rows, there)
        contents.append(_Content(after, there))
        differences.append(_Difference(changed, gone, before.keys))
    return contents, differences


def _compared(spec: P, rows: Rows, told: _Told):
    """Compares rows on the devices with the folder: new state, changed rows, and removed keys."""

    def compared(rows, told):
        columns = [
            array.reshape(-1) if files.is_number(name) else array
            for name, array in rows.columns.items()
        ]
        hashes = _hashed(columns, jnp)
        if rows.keys is None or rows.used is None or told.keys is None:
            used = jnp.ones(len(hashes), bool)
            changed = ~told.used | jnp.any(hashes != told.hashes, axis=1)
            return _Told(hashes, used, None), changed, jnp.zeros_like(used)
        used, keys = rows.used.reshape(-1), rows.keys.reshape(-1, 2)
        other = jnp.any(keys != told.keys, axis=1)
        differs = ~told.used | other | jnp.any(hashes != told.hashes, axis=1)
        gone = told.used & (~used | other)
        return _Told(hashes, used, keys), used & differs, gone

    return call_with_auto_axes(compared, rows, told, out_specs=spec)


def _compared_on_host(rows: Rows, told: _OnHost) -> np.ndarray:
    """A mask of rows whose columns in host memory differ; updates `told` to the new content."""
    assert rows.hosted is not None
    used = np.ones(len(told.hashes), bool)
    if rows.used is not None:
        used = to_host(rows.used).reshape(-1)
    looked = used if rows.hosted.drifts else used & told.touched.rows
    told.touched.rows[:] = False
    differs, at = np.zeros(len(used), bool), np.flatnonzero(looked)
    for start in range(0, len(at), _COMPARED):
        some = at[start : start + _COMPARED]
        hashes = _hashed([*rows.hosted.read(some).values()], np)
        differs[some] = (hashes != told.hashes[some]).any(axis=1)
        told.hashes[some] = hashes
    return differs


def _hashed(columns: Sequence[Any], xp: Any) -> Any:
    """Hashes each row of some arrays to `[rows, 2]` uint32; `xp` is NumPy or jax.numpy."""
    totals = [np.uint32(0), np.uint32(0)]
    first = 0
    for column in columns:
        words = _words(column, xp)
        number = np.arange(first, first + words.shape[1], dtype=np.uint32)
        first += words.shape[1]
        for i in range(2):
            salt = _mixed(number * np.uint32(0x9E3779B9) + np.uint32(i + 1))
            mixed = _mixed(words ^ salt[None])
            totals[i] = totals[i] + xp.sum(mixed, axis=1, dtype=np.uint32)
    return xp.stack(totals, axis=1)


def _mixed(word: Any) -> Any:
    """The finalizer of MurmurHash3, a bijection that mixes all bits of a word."""
    word = (word ^ word >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return word ^ word >> np.uint32(16)


def _words(column: Any, xp: Any) -> Any:
    """The values of a column as they are stored in a file, `[rows, words]` uint32."""
    column = row_files.in_file(column)
    if column.ndim == 1:
        column = column[:, None]
    if xp is np:
        return np.ascontiguousarray(column).view(np.uint32)
    words = lax.bitcast_convert_type(column, jnp.uint32)
    return words.reshape(len(column), -1)


def _changed_rows(
    rows: Rows, ids: np.ndarray, places: Sequence[np.ndarray]
) -> Iterator[_Block]:
    """Yields the columns of some ids in blocks, given the row numbers in each piece of their
    table.
    """
    arrays = files.flattened(rows.columns)
    gathered = [files.gathered(at, arrays) for at in places]
    for blocks in zip(*gathered, strict=True):
        some, _ = blocks[0]
        columns = zip(*(each for _, each in blocks), strict=True)
        found: Any = [list(parts) for parts in columns]
        if rows.hosted is not None:
            on_device = dict(zip(rows.columns, blocks[0][1], strict=True))
            found = _read_later(rows, rows.hosted, places[0][some], on_device)
        yield ids[some], found


def _read_later(
    rows: Rows, hosted: Hosted, at: np.ndarray, on_device: dict[str, jax.Array]
) -> _Later:
    def read() -> list[list[Any]]:
        arrays = on_device | hosted.read(at)
        return [[arrays[name]] for name in rows.arrays()]

    like = hosted.like.values()
    row = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in like)
    return _Later(len(at) * row, read)


def _on_host(
    table: Table, blocks: Sequence[_Block]
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    for ids, arrays in blocks:
        if isinstance(arrays, _Later):
            arrays = arrays.read()
        columns = []
        for column, parts in zip(table.columns, arrays, strict=True):
            found = [np.asarray(part)[: len(ids)] for part in parts]
            values = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
            _check_finite(f"{column.name!r} of the table {table.name!r}", values)
            columns.append(values)
        yield ids, columns


def _check_finite(what: str, values: np.ndarray) -> None:
    if not change_folders.is_finite(values):
        raise FloatingPointError(
            f"{what} has numbers that are not finite: nothing was exported. Train again, "
            "for example with a lower learning rate"
        )


# --- content of a folder ---


def _recalled(
    folder: pathlib.Path,
    memory: _Memory | None,
    parts: Sequence[Part],
    now: Sequence[Rows],
    tables: Mapping[Table, Pieces],
) -> tuple[_Memory | None, Link | None]:
    """The state of a folder (None if a new base must be written), and its last link."""
    numbers = change_folders.numbers(folder)
    if not numbers:
        return None, None
    last = change_folders.read(folder, numbers[-1])
    if last.manifest.tables != tuple(tables):
        return None, last
    if memory is None or not _fits(memory, last, parts, now):
        memory = _read(folder, parts, now, tables)
    rows = sum(pieces[0].config.num_rows for _, pieces in tables.values())
    return (None if memory.written > _MOST_CHANGES * rows else memory), last


def _fits(
    memory: _Memory, last: Link, parts: Sequence[Part], now: Sequence[Rows]
) -> bool:
    """Whether the remembered state is still valid: no other process wrote into the folder, and
    rows are divided over the devices as before.
    """
    told = (content.told for content in memory.contents)
    triples = zip(told, parts, now, strict=False)
    return memory.last.checksum == last.checksum and all(
        len(told.hashes) == _rows_on_devices(part.stack, rows)
        and told.hashes.sharding.is_equivalent_to(
            sharding_of(spec_of(part.stack, 1)), 2
        )
        for told, part, rows in triples
    )


def _read(
    folder: pathlib.Path,
    parts: Sequence[Part],
    now: Sequence[Rows],
    tables: Mapping[Table, Pieces],
) -> _Memory:
    """Reads the state of a folder from its files, for example after a restart."""
    links = change_folders.chain(folder)
    pairs = zip(parts, now, strict=True)
    empty = [_nothing(part.stack, rows) for part, rows in pairs]
    told: list[Any] = [jax.tree.map(np.array, content.told) for content in empty]
    lost = []
    for number, (table, (at, pieces)) in enumerate(tables.items()):
        content = change_folders.merged(link.content(number) for link in links)
        gone = _NONE
        for piece in pieces:
            places = parts[at].store.rows_of(piece, content.ids)
            here = places >= 0
            gone, rows = content.ids[~here], places[here]
            if told[at].keys is not None:
                words = WideIds.of(content.ids[here])
                told[at].keys[rows] = np.stack([words.low, words.high], axis=1)
            given = {c.name: content.columns[c.name][here] for c in table.columns}
            given[ROW] = parts[at].stack.part_of(given[ROW], piece)
            if (there := empty[at].on_host) is not None:
                names = [name for name in given if not files.is_number(name)]
                there.hashes[rows] = _hashed([given.pop(name) for name in names], np)
            if given:
                told[at].used[rows] = True
                # Compiled programs sort the columns by name, so hashes must use this order.
                columns = [given[name] for name in sorted(given)]
                told[at].hashes[rows] = _hashed(columns, np)
        lost.append(gone)
    contents = [
        _Content(jax.device_put(each, sharding_of(spec_of(part.stack, 1))), there)
        for part, each, (_, there) in zip(parts, told, empty, strict=True)
    ]
    written = sum(link.changes.rows + link.changes.removed for link in links[1:])
    return _Memory(links[-1], contents, lost, written)


def _rows_on_devices(stack: Stack, rows: Rows) -> int:
    """Number of rows of a stack whose columns are on the devices."""
    return stack.num_rows if rows.columns else 0


def _nothing(stack: Stack, rows: Rows) -> _Content:
    """The state of an empty folder, for one stack."""
    make = jit_sharded(_no_rows, spec_of(stack, 1), static=(0, 1))
    told = make(_rows_on_devices(stack, rows), rows.keys is not None)
    if rows.hosted is None:
        return _Content(told, None)
    hashes = np.zeros((stack.num_rows, 2), np.uint32)
    return _Content(told, _OnHost(hashes, rows.hosted.watch()))


def _no_rows(count: int, has_keys: bool) -> _Told:
    words = jnp.zeros((count, 2), jnp.uint32)
    used = jnp.zeros(count, bool)
    return _Told(words, used, words if has_keys else None)
