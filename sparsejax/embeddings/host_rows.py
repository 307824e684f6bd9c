"""Rows of tables in host memory, some of which are on the devices at a time.

The parameter of such a stack has *slots*, fewer than rows. Before a step, the rows of its batch
are copied to slots, and the columns of the batch are replaced by slot numbers. So a step is equal
to a step with tables on the devices. The optimizer state of a row moves with it. On a CPU, results
do not depend on the slot of a row, bit by bit.

A row is initialized on a device, when its id is first in a batch. So only rows that were seen take
host memory, and nothing is written at the start.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.host_files import Pieces
from sparsejax.embeddings.host_slots import (
    Index,
    Looked,
    NoRoomError,
    Slots,
    Wanted,
    find,
    taken,
)
from sparsejax.embeddings.placement import Stack, rows_at
from sparsejax.mesh import interrupts
from sparsejax.mesh.host_buffers import (
    Buffers,
    arrived,
    beside,
    by_device,
    in_parts,
    leaving,
    reserved,
)
from sparsejax.mesh.layout import current_mesh, parts_of_axes, using_mesh
from sparsejax.mesh.per_device import on_each, own_place
from sparsejax.optimizers import inplace
from sparsejax.optimizers.optimizer import HostSettler, first_state
from sparsejax.optimizers.rules import Rule

# Name of the column with the kernel's rows; other columns have the names of optimizer arrays.
ROW = "row"
# Name of the array of row flags; it sorts before all other names.
_KNOWN = " known"
# Flags of a row: its numbers are valid, its optimizer state is valid.
_NUMBERS, _STATE = 1, 2
# Number of rows that are initialized, or brought up to date, at a time.
_BLOCK = 8192

Arrays = dict[str, np.ndarray]


class _Gathered(NamedTuple):
    """Rows that a batch needs, while they are copied from the host to the devices.

    Attributes:
      wanted: row numbers.
      known: `[devices * room]` flags of each row; None if numbers and state of all rows are valid
          on the host.
      values: arrays of these rows by name, `[devices * room, ...]`.
    """

    wanted: Wanted
    known: jax.Array | None
    values: dict[str, jax.Array]


# The slots of a batch; the removed rows; and the former content of their slots.
_Swapped = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


class Coming(NamedTuple):
    """The slots of a batch, the rows that were removed from slots, and the former content of these
    slots.

    Attributes:
      looked: result of the look-up, with the rows that have no slot.
      gathered: rows that must be copied to the devices; None if there are none.
    """

    looked: Looked
    gathered: concurrent.futures.Future[_Gathered | None]


class Touched:
    """Marks of the rows that have changed since the marks were last read.

    Attributes:
      rows: `[num_rows]` bool; initially all True.
    """

    def __init__(self, num_rows: int):
        self.rows = np.ones(num_rows, bool)


class HostRows:
    """The rows of a stack in host memory, with their optimizer state.

    It is stored in the metadata of the stack's parameter. All objects of this class compare equal,
    so that programs compiled for one model can be used for other models with such tables. A
    compiled program keeps this object alive, so it has only a weak reference to the parameter, and
    frees all rows when the parameter is deleted.

    Args:
      stack: stack of the tables.
      key: random key for the initial rows of static tables.
    """

    def __init__(self, stack: Stack, key: nnx.Variable):
        self.stack, self.key = stack, key
        self.bytes_moved = 0
        # Version number of the tables on the devices: batches prepared for another version read
        # NaN. `last_number` repeats it, because reading the variable would wait for the devices.
        self.number: nnx.Variable | None = None
        self.last_number = 0
        self._kernel: weakref.ref[nnx.Variable] | None = None
        self._state: dict[str, nnx.Variable] = {}
        self._rule: Rule | None = None
        self._arrays: Arrays = {}
        self._known = np.zeros(0, np.uint8)
        self._slots: Slots | None = None
        self._pieces: Pieces | None = None
        # A tuple, which is replaced and never modified, because threads iterate over it.
        self._watching: tuple[weakref.ref[Touched], ...] = ()
        self._mesh: jax.sharding.Mesh | None = None
        self._buffers = Buffers()
        # The task that copies rows removed from the devices into `_arrays`.
        self._leaving: concurrent.futures.Future[None] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostRows)

    def __hash__(self) -> int:
        return hash(HostRows)

    def attach(
        self,
        kernel: nnx.Variable,
        state: Mapping[str, nnx.Variable] | None,
        rule: Rule | None,
        *,
        reading: bool = False,
    ) -> None:
        """Sets the variables that contain the slots on the devices.

        Args:
          kernel: the parameter of the stack.
          state: arrays of its optimizer state; None keeps the present ones.
          rule: rule of the optimizer, or None.
          reading: whether rows are only read. Then no state is created for this optimizer.

        Raises:
          ValueError: the variables belong to a copy of the model; or, when reading, to another
              optimizer than the one whose state is stored.
        """
        if self._kernel is not None and self._kernel() is not kernel:
            raise ValueError(
                "this model is a copy of one whose tables are in host memory, and both would "
                "write the same rows: build another model, and load a checkpoint into it"
            )
        if jax.process_count() > 1:
            raise NotImplementedError(
                "tables in host memory are for one process, which may have several devices"
            )
        state = self._state if state is None else dict(state)
        devices = parts_of_axes()[1]
        same = self._is_state(state)
        if reading:
            self.check_state(state)
        same &= self._kernel is not None
        if self._slots is not None:
            if same and self._slots.devices == devices:
                return
            self.write_back()
            self.forget_slots()
        rows = self.stack.num_rows
        # equal for all tables of the stack
        folder = self.stack.tables[0].config.host_path
        if not same:
            variables = {ROW: kernel, **state}
            kept = {ROW: self._arrays[ROW]} if self._arrays else {}
            self._arrays = {
                name: kept[name]
                if name in kept
                else reserved((rows, *variable.shape[1:]), variable.dtype, folder)
                for name, variable in variables.items()
            }
            # The optimizer state in host memory belongs to another optimizer, and is discarded.
            self._known &= np.uint8(_NUMBERS)
            if not len(self._known):
                self._known = np.zeros(rows, np.uint8)
            if self._kernel is None:
                self._kernel = weakref.ref(kernel)
                weakref.finalize(kernel, self._release)
            self._state, self._rule = state, rule
            # Arrays are stored sorted by name: the flags come first, and show whether a piece has
            # rows.
            self._pieces = Pieces({_KNOWN: self._known, **self._arrays})
            self._touch(slice(None))
        self._mesh = current_mesh()
        self._slots = Slots(rows, self.stack.kernel_rows, devices)

    def check_state(self, state: Mapping[str, nnx.Variable]) -> None:
        """Raises ValueError if the stored state belongs to another optimizer."""
        if self._rule is not None and not self._is_state(state):
            raise ValueError(
                "the rows in host memory have the state of another optimizer, which trains "
                "this model: give that one; or none, after its flush(model)"
            )

    def _is_state(self, state: Mapping[str, nnx.Variable]) -> bool:
        return state.keys() == self._state.keys() and all(
            state[name] is self._state[name] for name in state
        )

    def look(self, columns: jax.Array | np.ndarray, *, training: bool) -> Coming:
        """Looks up rows and marks them as used, without waiting for the devices.

        A thread gathers the rows that are not on the devices.

        Args:
          columns: rows of the stack, of any shape; negative ones are padding.
          training: whether the batch will change its rows.
        """
        assert self._slots is not None
        with interrupts.uninterrupted():
            if isinstance(columns, np.ndarray):
                columns = np.ascontiguousarray(columns, np.int32)
            looked = self._slots.look(columns.reshape(-1), training=training)
            gather = functools.partial(
                self._gathered,
                self._slots,
                looked,
                self._arrays,
                self._leaving,
                current_mesh(),
            )
            return Coming(looked, beside("coming").submit(gather))

    def bring(self, coming: Coming) -> tuple[jax.Array, jax.Array, bool]:
        """Copies rows to the devices.

        Args:
          coming: result of `look` for a batch.

        Returns:
          The slot of each row, negative numbers unchanged; the rows; and whether others were
          removed.

        Raises:
          NoRoomError: the rows do not fit on the devices.
        """
        assert self._slots is not None
        with interrupts.uninterrupted():
            looked = coming.looked
            # Between look-up and copy, other rows were copied.
            if looked.number != self._slots.number:
                concurrent.futures.wait([coming.gathered])
                coming = self.look(looked.columns, training=looked.training)
                looked = coming.looked
            try:
                gathered = coming.gathered.result()
            except NoRoomError as error:
                rows, slots = error.args
                tables = dict.fromkeys(t.name for t in self.stack.tables)
                what = "num_rows" if self.stack.dynamic else "device_rows"
                raise NoRoomError(
                    f"a batch has ids of {rows:,} rows of the tables "
                    f"{', '.join(tables)}, but a device has room for {slots:,}: make "
                    f"{what} larger, or batches smaller"
                ) from None
            if gathered is None:
                return self._slots.find(looked.columns), looked.columns, False
            slots, leave = self._swapped(gathered, looked)
            return slots, looked.columns, leave

    def write_back(self) -> None:
        """Copies changed rows from the devices to the host. Rows keep their slots.

        Raises:
          ValueError: the model was deleted, and a copy of it is used.
        """
        if self._slots is None:
            if self._kernel is not None:
                raise ValueError(
                    "this model is a copy of one whose tables were in host memory, and that "
                    "one was deleted with all rows: keep it, or load a checkpoint"
                )
            return
        with interrupts.uninterrupted(), using_mesh(self._mesh):
            self._collect()
            room, devices = 8 * _BLOCK, self._slots.devices
            changed = self._slots.changed()
            for start in range(0, max(len(slots) for slots, _ in changed), room):
                places = np.zeros((devices, room), np.int32)
                rows = np.full((devices, room), -1, np.int32)
                for device, (slots, mine) in enumerate(changed):
                    some = slots[start : start + room]
                    places[device, : len(some)] = some
                    rows[device, : len(some)] = mine[start : start + room]
                arrays = {n: v.get_raw_value() for n, v in self._variables().items()}
                found = _read_slots(arrays, by_device(places.reshape(-1)))
                self._put(rows, {n: leaving(a) for n, a in found.items()})
            self._slots.forget_changes()

    def forget_slots(self) -> None:
        """Removes all rows from the devices without saving their changes.

        Batches that are already prepared read NaN.
        """
        self._collect()
        if self._slots is not None:
            self._slots.clear()
        if self.number is not None:
            self.last_number = 1 + max(self.last_number, int(self.number[...]))
            set_number(self.number, self.last_number)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """`[rows, dim]`: current values of rows."""
        self.write_back()
        rows = np.asarray(rows)
        if self._slots is None:
            known = np.zeros(len(rows), bool)
            found = np.empty((len(rows), self.stack.dim), self.stack.dtype)
        else:
            known = self._known[rows] & _NUMBERS > 0
            found = self._arrays[ROW][rows]
        new = np.flatnonzero(~known)
        for start in range(0, len(new), _BLOCK):
            some = new[start : start + _BLOCK]
            at = np.resize(rows[some], _BLOCK).astype(np.int32)
            made = _made(self.stack, self.key[...], at)
            found[some] = np.asarray(made)[: len(some)]
        return found

    def put(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Sets the numbers of rows, and their state as far as `values` contains it."""
        self.write_back()
        for name, array in values.items():
            self._arrays[name][rows] = array
        whole = values.keys() == self._arrays.keys()
        self._changed(rows, _NUMBERS | (_STATE if whole else 0))
        self.forget_slots()

    def take(self, other: HostRows, rows: np.ndarray, there: np.ndarray) -> None:
        """Copies initialized rows from another object.

        Args:
          other: object that has the rows.
          rows: numbers of the rows to write.
          there: numbers of the rows in `other`.
        """
        arrays = other.arrays()
        if not arrays:
            return
        self.write_back()
        flags = other._known[there]
        for name in self._arrays.keys() & arrays.keys():
            mine = flags & (_NUMBERS if name == ROW else _STATE) > 0
            self._arrays[name][rows[mine]] = arrays[name][there[mine]]
        for known in {*flags.tolist()} - {0}:
            mine = rows[flags == known]
            self._changed(mine, known if len(self._arrays) > 1 else _NUMBERS)

    def arrays(self) -> Arrays:
        """Current values of all rows, by name; zeros for unseen rows. Do not modify them."""
        self.write_back()
        return self._arrays

    @property
    def drifts(self) -> bool:
        """Whether a step can change rows that it does not touch."""
        return self._rule is not None and self._rule.drifts

    def watch(self) -> Touched:
        """Marks rows that change from now on, as long as the caller keeps the result."""
        touched = Touched(self.stack.num_rows)
        here = (each for each in self._watching if each() is not None)
        self._watching = (*here, weakref.ref(touched))
        return touched

    def current(self, rows: np.ndarray, settled: HostSettler | None) -> Arrays:
        """Copies of rows, by name, with all updates applied; nothing is written back.

        Args:
          rows: numbers of rows whose vectors are in host memory; rows of a dynamic table need
            an id.
          settled: None if rows are up to date.
        """
        found = {name: array[rows] for name, array in self._arrays.items()}
        at = np.arange(len(rows))
        if settled is None or self._rule is None:
            if self.stack.dynamic:
                return found
            whole = _NUMBERS | (_STATE if len(found) > 1 else 0)
            at = np.flatnonzero(self._known[rows] & whole != whole)
        for start in range(0, len(at), _BLOCK):
            some = at[start : start + _BLOCK]
            # Padded to one shape, so that one program is compiled.
            padded = np.resize(rows[some], _BLOCK)
            given = _with_new(
                self.stack,
                self._rule,
                self._first_key(),
                padded.astype(np.int32),
                self._known[padded],
                {name: array[padded] for name, array in self._arrays.items()},
            )
            for name, array in (settled(given) if settled else given).items():
                found[name][some] = np.asarray(array)[: len(some)]
        return found

    def settle(self, settled: HostSettler, *, everywhere: bool) -> None:
        """Applies pending updates to the rows on the host, not to slots. See `Optimizer.flush`."""
        self.write_back()
        if self._rule is None:
            return
        if self._slots is not None:
            self._slots.expire()
        for rows in self._seen(everywhere=everywhere):
            for name, array in self.current(rows, settled).items():
                self._arrays[name][rows] = array
            self._changed(rows, _NUMBERS | _STATE)

    def variables(self) -> list[nnx.Variable]:
        """The variables with data of the rows on the devices."""
        return list(self._variables().values())

    def save(self, folder: str | os.PathLike[str]) -> list[str]:
        """Writes the rows that changed since the last save. Returns the names of all files."""
        self.write_back()
        assert self._pieces is not None
        return self._pieces.save(folder)

    def load(self, folder: str | os.PathLike[str], names: list[str]) -> None:
        """Reads the files that `save` wrote. All rows are removed from the devices."""
        assert self._pieces is not None
        self.forget_slots()
        # arrays are created if the model has only shapes
        for variable in self.variables():
            like = variable.get_raw_value()
            if isinstance(like, jax.ShapeDtypeStruct):
                empty = jnp.zeros(like.shape, like.dtype, device=like.sharding)
                variable.set_raw_value(empty)
        self._pieces.load(folder, names)
        self._touch(slice(None))

    def _release(self) -> None:
        """Frees all rows, and the state on the devices, after the model was deleted."""
        self._state, self._arrays, self._rule = {}, {}, None
        self._known = np.zeros(0, np.uint8)
        self._slots = self._pieces = self._mesh = self._leaving = self.number = None
        self._buffers = Buffers()

    def _first_key(self) -> jax.Array | None:
        """The random key of initial rows; None for dynamic tables, which are initialized on a
        device.

        None for dynamic tables, which are initialized on a device.
        """
        return None if self.stack.dynamic else self.key.get_raw_value()

    def _variables(self) -> dict[str, nnx.Variable]:
        kernel = None if self._kernel is None else self._kernel()
        return {} if kernel is None else {ROW: kernel, **self._state}

    def _changed(self, rows: np.ndarray, known: int) -> None:
        # All rows are already initialized, so their flags need not be read.
        if known == _NUMBERS | _STATE:
            self._known[rows] = known
        else:
            self._known[rows] |= np.uint8(known)
        assert self._pieces is not None
        self._pieces.note(rows)
        self._touch(rows)

    def _touch(self, rows: np.ndarray | slice) -> None:
        for each in self._watching:
            if (touched := each()) is not None:
                touched.rows[rows] = True

    def _seen(self, *, everywhere: bool) -> Iterator[np.ndarray]:
        """Iterates over blocks of the rows with state, or of all rows.

        Unseen rows of dynamic tables are skipped, as nothing is stored for them.
        """
        flags = _NUMBERS | _STATE if everywhere else _STATE
        everywhere &= not self.stack.dynamic
        for start in range(0, len(self._known), 64 * _BLOCK):
            known = self._known[start : start + 64 * _BLOCK]
            rows = (
                np.arange(len(known)) if everywhere else np.flatnonzero(known & flags)
            )
            for first in range(0, len(rows), _BLOCK):
                yield start + rows[first : first + _BLOCK]

    def _gathered(
        self,
        table: Slots,
        looked: Looked,
        arrays: Arrays,
        before: concurrent.futures.Future[None] | None,
        mesh: jax.sharding.Mesh | None,
    ) -> _Gathered | None:
        """Gathers the rows that a batch needs, in a thread while the previous step runs.

        Args:
          table: slots of the stack.
          looked: the batch.
          arrays: the rows in host memory.
          before: task that copies rows just removed from the devices into host memory.
          mesh: mesh of the batch, or None.
        """
        with using_mesh(mesh):
            wanted = table.wanted(looked)
            if wanted is None:
                return None
            devices, room = wanted.rows.shape
            owned = self.stack.num_rows // devices
            rows = wanted.rows + owned * np.arange(devices, dtype=np.int32)[:, None]
            buffers = {
                name: self._buffers.one(name, devices, (room, *a.shape[1:]), a.dtype)
                for name, a in arrays.items()
            }
            known = np.full((devices, room), _NUMBERS | _STATE, np.uint8)
            for device, count in enumerate(wanted.counts.tolist()):

                def gather(part: slice, device=device) -> None:
                    mine = rows[device, part]
                    flags = known[device, part]
                    np.take(self._known, mine, out=flags, mode="clip")
                    # Rows without flags were never written: reading them would allocate their
                    # memory.
                    if not flags.all():
                        mine = np.where(flags > 0, mine, 0)
                    for name, buffer in buffers.items():
                        out = buffer.parts[device][part]
                        np.take(arrays[name], mine, axis=0, out=out, mode="clip")

                in_parts(count, gather)
            if before is not None:
                before.result()
            for device in range(devices):
                places = np.flatnonzero(wanted.has_left[device])
                mine = rows[device, places]
                known[device, places] = self._known[mine]
                for name, buffer in buffers.items():
                    buffer.parts[device][places] = arrays[name][mine]
            values = {name: buffer.sent() for name, buffer in buffers.items()}
            all_of_it = _NUMBERS | (_STATE if len(arrays) > 1 else 0)
            if (known & all_of_it == all_of_it).all():
                return _Gathered(wanted, None, values)
            return _Gathered(wanted, by_device(known.reshape(-1)), values)

    def _swapped(self, gathered: _Gathered, looked: Looked) -> tuple[jax.Array, bool]:
        """Assigns slots to the rows of a batch. A thread copies the rows removed from these slots
        to the host.

        Returns:
          The slots of the batch, and whether rows were removed.
        """
        wanted, known, values = gathered
        devices, room = wanted.rows.shape
        self._collect()
        self.bytes_moved += sum(array.nbytes for array in values.values())
        variables, table = self._variables(), self._slots
        assert table is not None

        def program() -> tuple[list[jax.Array], _Swapped]:
            arrays = {n: v.get_raw_value() for n, v in variables.items()}
            after, table.index, slots, left, found = _swap(
                _kind(self.stack, self._rule),
                self._first_key(),
                arrays,
                table.index,
                looked.missing,
                looked.columns,
                known,
                values,
                room=room,
                window=wanted.window,
                training=looked.training,
            )
            return [after[name] for name in variables], (slots, left, found)

        slots, left, found = inplace.overwrite(list(variables.values()), program)
        leave = table.give(wanted)
        if leave:

            def put() -> None:
                numbers = leaving(left)
                arrays = {name: leaving(array) for name, array in found.items()}
                ours = np.stack(arrived(numbers))
                owned = self.stack.num_rows // devices
                first = owned * np.arange(devices, dtype=np.int32)[:, None]
                self._put(np.where(ours < 0, -1, ours + first), arrays)

            self._leaving = beside("leaving").submit(_on_mesh, current_mesh(), put)
        return slots, leave

    def _collect(self) -> None:
        """Waits for removed rows to be copied to the host."""
        if self._leaving is not None:
            self._leaving.result()
        self._leaving = None

    def _put(self, rows: np.ndarray, arrays: Mapping[str, jax.Array]) -> None:
        """Writes removed rows, which are being copied from the devices, into host memory.

        Args:
          rows: `[devices, room]` row numbers; -1 for padding.
          arrays: arrays by name, whose copies to the host were started by `leaving`.
        """
        found = {name: arrived(array) for name, array in arrays.items()}
        self.bytes_moved += sum(array.nbytes for array in arrays.values())
        known = _NUMBERS | (_STATE if len(found) > 1 else 0)
        for device, mine in enumerate(rows):
            places = np.flatnonzero(mine >= 0)
            mine = mine[places]

            def write(part: slice, device=device, mine=mine, places=places) -> None:
                to, come = mine[part], places[part]
                # Row numbers are usually contiguous. Then a slice avoids a copy.
                if len(come) and come[-1] - come[0] + 1 == len(come):
                    come = slice(come[0], come[-1] + 1)
                for name, parts in found.items():
                    self._arrays[name][to] = parts[device][come]
                self._changed(to, known)

            in_parts(len(mine), write)


def set_number(variable: nnx.Variable, number: int) -> None:
    """Sets the version number of the tables on the devices."""
    lies = variable[...].sharding
    variable.set_raw_value(jax.device_put(np.int32(number), lies))


@functools.partial(jax.jit, static_argnums=0)
def _made(stack: Stack, key: jax.Array, rows: jax.Array) -> jax.Array:
    return rows_at(stack, key, rows)


def _first_rows(stack: Stack, key: jax.Array, rows: jax.Array) -> jax.Array:
    """Initial values of rows, `[rows, dim]`, computed a few at a time to bound memory."""
    if len(rows) <= _BLOCK:
        return rows_at(stack, key, rows)
    blocks = -(-len(rows) // _BLOCK)
    padded = jnp.pad(rows, (0, blocks * _BLOCK - len(rows))).reshape(blocks, _BLOCK)
    made = lax.map(functools.partial(rows_at, stack, key), padded)
    return made.reshape(-1, stack.dim)[: len(rows)]


def _completed(
    stack: Stack,
    rule: Rule | None,
    key: jax.Array | None,
    rows: jax.Array,
    known: jax.Array,
    values: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Fills in the numbers, or the state, of rows that are not yet initialized on the host."""
    w = values[ROW]
    if key is not None:  # without a key, rows are initialized before they are read
        has_numbers = (known & _NUMBERS > 0)[:, None]
        w = jnp.where(has_numbers, w, _first_rows(stack, key, rows))
    found = {ROW: w}
    if rule is None:
        return found
    # Tables conceptually have all rows from the first step on, so a row without state gets the
    # state of step 0.
    fresh = first_state(rule, w, jnp.zeros((), jnp.int32))
    for name, array in fresh.items():
        old = values[name]
        has = (known & _STATE > 0).reshape(-1, *(1,) * (old.ndim - 1))
        found[name] = jnp.where(has, old, array.astype(old.dtype))
    return found


_with_new = jax.jit(_completed, static_argnums=(0, 1))


class _Kind:
    """A stack and an optimizer rule. It is a static argument of compiled programs, so its hash is
    cheap.
    """

    def __init__(self, stack: Stack, rule: Rule | None):
        self.stack, self.rule = stack, rule


_kind = functools.cache(_Kind)


@jax.jit(
    static_argnums=0,
    static_argnames=("room", "window", "training"),
    donate_argnums=(2, 3),
)
def _swap(
    kind: _Kind,
    key: jax.Array | None,
    arrays: dict[str, jax.Array],
    index: Index,
    missing: jax.Array,
    columns: jax.Array,
    known: jax.Array | None,
    values: dict[str, jax.Array],
    *,
    room: int,
    window: int,
    training: bool,
) -> tuple[dict[str, jax.Array], Index, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Gives rows copied from the host the slots of removed rows.

    Args:
      kind: stack, and rule of its optimizer.
      missing: rows that need a slot, as in `Looked`.
      columns: all rows of the batch.
      known: flags of the numbers and state of the missing rows that are valid on the host; None if
          all are valid.
      values: arrays of the missing rows by name; padding is arbitrary.
      room: capacity for rows; at least the number of missing rows.
      window: number of slots that are examined.
      training: whether the batch changes its rows.

    Returns:
      The arrays and the index; the slots of the batch; the removed rows that may have changed,
      else -1; and the former content of their slots.
    """

    def part(arrays, index, key, missing, columns, known, values):
        index, rows, slots, left = taken(
            index, missing[0], room=room, window=window, training=training
        )
        new = values
        if known is not None:
            every = jnp.maximum(rows, 0) + own_place() * len(index.slot)
            new = _completed(kind.stack, kind.rule, key, every, known, values)
        before = {n: a.at[slots].get(mode="clip") for n, a in arrays.items()}
        # Without this barrier, XLA mixes reads and writes, and copies the whole array.
        before, arrays = lax.optimization_barrier((before, arrays))
        after = {
            name: array.at[slots].set(
                new[name].astype(array.dtype), mode="drop", unique_indices=True
            )
            for name, array in arrays.items()
        }
        return after, index, find(index.slot, columns, len(index.row)), left, before

    lies, mine = _specs(arrays), P("model")
    return on_each(
        part,
        (arrays, index, key, missing, columns, known, values),
        (lies, mine, P(), mine, P(), mine, mine),
        (lies, mine, P(), mine, mine),
    )


def _on_mesh(mesh: jax.sharding.Mesh | None, work: Callable[[], None]) -> None:
    """Calls `work` with the given mesh. A new thread has no mesh."""
    with using_mesh(mesh):
        work()


@jax.jit
def _read_slots(arrays: dict[str, jax.Array], slots: jax.Array) -> dict[str, jax.Array]:
    def part(arrays, slots):
        return {n: a.at[slots].get(mode="clip") for n, a in arrays.items()}

    lies, mine = _specs(arrays), P("model")
    return on_each(part, (arrays, slots), (lies, mine), mine)


def _specs(arrays: Mapping[str, Any]) -> dict[str, P]:
    """The partition spec of each array, as it was created."""
    return {n: P("model", None) if n == ROW else P("model") for n in arrays}
