"""Rows of tables in the memory of the host, of which the devices have some at a time.

The parameter of such a stack has *slots*, fewer than rows. Before a step its rows get slots, and
the columns of its batch become the numbers of their slots. So a step is the same as that of
other tables. Whatever there is of a row moves with it: its numbers and the state of the
optimizer. On a CPU, in which slot a row lies has no influence on results, to the bit.

A row is first made on a device, when a batch first has its id. So host memory is taken by rows
that were seen, and nothing is written at the start.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.host_files import Pieces
from sparsejax.embeddings.placement import Stack, rows_at
from sparsejax.mesh import interrupts
from sparsejax.mesh.layout import (
    axis_sizes,
    call_on_each_device,
    mesh_is_set,
    without_mesh,
)
from sparsejax.optimizers import inplace
from sparsejax.optimizers.optimizer import first_state
from sparsejax.optimizers.rules import Rule

# The column of a kernel itself; others are the names of the optimizer's arrays.
ROW = "row"
# A name before all others.
_KNOWN = " known"
# Flags of a row: its numbers are known, the state of the optimizer is.
_NUMBERS, _STATE = 1, 2
# Batches in which a slot need not be marked again.
_RECENT = 8
# Slots that are looked at together for one whose row can leave.
_SLOTS = 4096
# Rows that are made, or brought up to date, together.
_BLOCK = 8192
# Rows that a thread copies at a time, and those whose slots it looks up.
_COPIED, _LOOKED_UP = 2048, 2**16
_LEAST_MOVED = 256

Arrays = dict[str, np.ndarray]


class NoRoomError(ValueError):
    """The rows of a batch do not fit the devices."""


class _Given(NamedTuple):
    """Slots of a device for rows that had none.

    Attributes:
      slots: numbered from the first slot of the device.
      rows: that get them.
    """

    slots: np.ndarray
    rows: np.ndarray


class Slots:
    """Which rows have slots, and which of them leave for others.

    Each device has an equal share of the slots, for rows that it owns. A row can leave if it was
    not used since the hand of a clock last came by its slot: this is nearly the row
    that was not used for longest, and is quicker found.

    Args:
      num_rows: of the stack.
      slots: fewer.
      devices: over which rows are divided.
    """

    def __init__(self, num_rows: int, slots: int, devices: int):
        self.slot = np.zeros(num_rows, np.int32)  # plus 1; zeros take no memory yet
        self.row = np.full(slots, -1, np.int32)
        self.used = np.zeros(slots, np.int32)  # twice when; odd if it then changed
        self.changed = np.zeros(slots, bool)
        self.now, self.devices = _RECENT, devices
        self._least = 0  # `used` of a slot of the newest batch is at least this
        self._size = slots // devices
        self._filled = [0] * devices
        self._hand = [0] * devices
        self._passed = np.zeros((devices, -(-self._size // _SLOTS)), np.int32)

    def find(self, rows: np.ndarray, *, training: bool) -> np.ndarray:
        """The slot of each row, from now on used; -1 if it has none.

        A slot that was said to be used a few batches ago is not said to be so again: most are,
        and to write so many places takes most of the time.

        Args:
          rows: of the stack.
          training: whether they will change.
        """
        slots = np.empty(len(rows), np.int32)
        now = 2 * self.now + training
        # An even number is of a batch that was only read.
        least = self._least = 2 * (self.now - _RECENT)

        def look(part: slice) -> None:
            mine = np.take(self.slot, rows[part], mode="clip") - 1
            slots[part] = mine
            used = np.take(self.used, mine, mode="clip")
            old = used < least
            if training:
                old |= used & 1 == 0
            mine = mine[old & (mine >= 0)]
            self.used[mine] = now
            if training:
                self.changed[mine] = True

        _in_parts(len(rows), _LOOKED_UP, look)
        return slots

    def room_for(self, missing: np.ndarray, found: np.ndarray) -> list[_Given]:
        """Slots for rows, ascending, that have none; for each device. Nothing changes yet.

        Args:
          missing: the rows.
          found: slots that are used now.

        Raises:
          NoRoomError: there are not so many slots beside those that are used now. Its
            arguments are the rows and the slots of a device.
        """
        owned = len(self.slot) // self.devices
        ends = np.searchsorted(missing, owned * np.arange(self.devices + 1))
        given, exact = [], False
        for device in range(self.devices):
            rows = missing[ends[device] : ends[device + 1]]
            slots = self._free(device, len(rows), 2 * (self.now - _RECENT))
            if len(slots) < len(rows):
                if not exact:
                    self.used[found] = 2 * self.now + self.changed[found]
                    exact = True
                slots = self._free(device, len(rows), 2 * self.now)
            if len(slots) < len(rows):
                mine = slice(device * self._size, (device + 1) * self._size)
                in_use = int(np.sum(self.used[mine] >= 2 * self.now))
                raise NoRoomError(in_use + len(rows), self._size)
            given.append(_Given(slots, rows))
        return given

    def give(self, given: list[_Given], *, training: bool) -> None:
        """Takes slots from the rows that have them, and gives them to others."""
        for device, (slots, rows) in enumerate(given):
            slots = slots + device * self._size
            before = self.row[slots]
            self.slot[before[before >= 0]] = 0
            self.slot[rows] = slots + 1
            self.row[slots], self.used[slots] = rows, 2 * self.now + training
            self.changed[slots] = training
            self._filled[device] += int(np.sum(before < 0))

    def forget_changes(self) -> None:
        """Says that the host has all that has changed.

        Slots of the newest batch stay marked: its step may not have begun.
        """
        self.changed &= self.used >= self._least
        self.now += _RECENT + 1  # so that what is used is marked again

    def clear(self) -> None:
        """Takes all slots from their rows."""
        self.__init__(len(self.slot), len(self.row), self.devices)

    def _free(self, device: int, count: int, before: int) -> np.ndarray:
        """Up to `count` slots of a device that others can have, not used since `before`."""
        filled = self._filled[device]
        found = [np.arange(filled, min(filled + count, self._size))]
        count -= len(found[0])
        first, passed = device * self._size, self._passed[device]
        blocks = len(passed)
        for _ in range(2 * blocks + 1):
            if count == 0:
                break
            block = self._hand[device]
            start = block * _SLOTS
            stop = min(start + _SLOTS, self._size, filled)
            used = self.used[first + start : first + stop]
            some = start + np.flatnonzero(used < min(passed[block], before))
            found.append(some[:count])
            count -= len(found[-1])
            if len(some) == len(found[-1]):
                passed[block] = 2 * self.now
                self._hand[device] = (block + 1) % blocks
        return np.unique(np.concatenate(found)).astype(np.int32)


class HostRows:
    """The rows of a stack, with what an optimizer keeps of them.

    It is part of the metadata of the stack's parameter. All of these are equal, so that
    programs that are compiled for a model serve others of the same tables. Such a program keeps
    it, so it keeps the parameter weakly, and lets go of all rows when that is gone.

    Args:
      stack: of the tables.
      key: of the random numbers of rows that were not seen yet.
    """

    def __init__(self, stack: Stack, key: nnx.Variable):
        self.stack, self.key = stack, key
        self.bytes_moved = 0
        # The number of the state of the devices' tables: batches of others read NaN.
        self.number: nnx.Variable | None = None
        self._last_number = 0
        self._kernel: weakref.ref[nnx.Variable] | None = None
        self._state: dict[str, nnx.Variable] = {}
        self._rule: Rule | None = None
        self._arrays: Arrays = {}
        self._known = np.zeros(0, np.uint8)
        self._slots: Slots | None = None
        self._pieces: Pieces | None = None
        self._mesh: jax.sharding.Mesh | None = None
        # Rows that have left the devices and are not in `_arrays` yet.
        self._leaving: tuple[np.ndarray, np.ndarray, dict[str, jax.Array]] | None = None

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
        """Says which variables have the slots.

        Args:
          kernel: the parameter of the stack.
          state: of its optimizer; None leaves that as it was.
          rule: of the optimizer.
          reading: whether rows will not change, so that this optimizer begins nothing.

        Raises:
          ValueError: they are those of a copy of the model; or of another optimizer than
            that of the rows, for reading.
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
        devices = axis_sizes()[1] if mesh_is_set() else 1
        same = state.keys() == self._state.keys() and all(
            state[name] is self._state[name] for name in state
        )
        if reading and self._state and not same:
            raise ValueError(
                "the rows in host memory have the state of another optimizer, which trains "
                "this model: give that one; or none, after its flush(model)"
            )
        same &= self._kernel is not None
        if self._slots is not None:
            if same and self._slots.devices == devices:
                return
            self.write_back()
            self.forget_slots()
        rows = self.stack.num_rows
        if not same:
            variables = {ROW: kernel, **state}
            kept = {ROW: self._arrays[ROW]} if self._arrays else {}
            self._arrays = {
                name: kept[name]
                if name in kept
                else np.zeros((rows, *variable.shape[1:]), variable.dtype)
                for name, variable in variables.items()
            }
            self._known &= np.uint8(_NUMBERS)  # another optimizer begins
            if not len(self._known):
                self._known = np.zeros(rows, np.uint8)
            if self._kernel is None:
                self._kernel = weakref.ref(kernel)
                weakref.finalize(kernel, self._release)
            self._state, self._rule = state, rule
            # Names in their order: "known" comes first, and tells whether a piece has rows.
            self._pieces = Pieces({_KNOWN: self._known, **self._arrays})
        self._mesh = jax.sharding.get_mesh() if mesh_is_set() else None
        self._slots = Slots(rows, self.stack.kernel_rows, devices)

    def stage(self, columns: np.ndarray, *, training: bool) -> tuple[np.ndarray, bool]:
        """Brings rows to the devices.

        Args:
          columns: rows of the stack, of any shape; negative ones stay as they are.
          training: whether the rows will change there.

        Returns:
          The slot of each, and whether rows have left.

        Raises:
          NoRoomError: they do not fit.
        """
        assert self._slots is not None
        flat = np.asarray(columns).reshape(-1)
        real = flat >= 0
        whole = bool(real.all())
        rows = flat if whole else flat[real]
        with interrupts.uninterrupted():
            self._collect()
            self._slots.now += 1
            found = self._slots.find(rows, training=training)
            absent = np.flatnonzero(found < 0)
            left = False
            if len(absent):
                missing = rows[absent]
                try:
                    here = found[found >= 0]
                    left = self._bring(np.unique(missing), here, training=training)
                except NoRoomError as error:
                    wanted, slots = error.args
                    tables = dict.fromkeys(t.name for t in self.stack.tables)
                    raise NoRoomError(
                        f"a batch has ids of {wanted:,} rows of the tables "
                        f"{', '.join(tables)}, but a device has room for {slots:,}: make "
                        "device_rows larger, or batches smaller"
                    ) from None
                found[absent] = self._slots.slot[missing] - 1
        if not whole:
            slots = flat.copy()
            slots[real] = found
            found = slots
        return found.reshape(np.shape(columns)), left

    def write_back(self) -> None:
        """Copies what has changed on the devices to the host. Rows keep their slots.

        Raises:
          ValueError: the model is gone, and this was asked for by a copy of it.
        """
        if self._slots is None:
            if self._kernel is not None:
                raise ValueError(
                    "this model is a copy of one whose tables were in host memory, and that "
                    "one was deleted with all rows: keep it, or load a checkpoint"
                )
            return
        mesh = without_mesh() if self._mesh is None else jax.set_mesh(self._mesh)
        with interrupts.uninterrupted(), mesh:
            self._collect()
            table = self._slots
            changed = np.flatnonzero(table.changed)
            size = len(table.row) // table.devices
            for device in range(table.devices):
                first = device * size
                mine = changed[(changed >= first) & (changed < first + size)] - first
                for start in range(0, len(mine), 8 * _BLOCK):
                    some = mine[start : start + 8 * _BLOCK]
                    given = [_Given(np.zeros(0, np.int32), np.zeros(0, np.int32))]
                    given *= table.devices
                    given[device] = _Given(
                        some.astype(np.int32), table.row[first + some]
                    )
                    self._leave(given, [g.rows for g in given])
                    self._collect()
            table.forget_changes()

    def forget_slots(self) -> None:
        """Makes all rows come anew; what has changed on the devices is lost.

        Batches that are on the devices read NaN.
        """
        self._leaving = None
        if self._slots is not None:
            self._slots.clear()
        if self.number is not None:
            last = max(self._last_number, int(self.number[...]))
            self._last_number = last + 1
            set_number(self.number, last + 1)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """`[rows, dim]`: rows as they are now."""
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

    def replace(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Gives rows other numbers; their state stays."""
        self.write_back()
        self._arrays[ROW][rows] = values
        self._changed(rows, _NUMBERS)
        self.forget_slots()

    def settle(
        self,
        settled: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]],
        *,
        everywhere: bool,
    ) -> None:
        """Brings the rows here up to date; slots are not written. See `Optimizer.flush`."""
        self.write_back()
        if self._rule is None:
            return
        for rows in self._seen(everywhere=everywhere):
            padded = np.resize(rows, _BLOCK)  # one shape, one program
            given = _with_new(
                self.stack,
                self._rule,
                self.key[...],
                padded.astype(np.int32),
                self._known[padded],
                {name: array[padded] for name, array in self._arrays.items()},
            )
            for name, array in settled(given).items():
                self._arrays[name][rows] = np.asarray(array)[: len(rows)]
            self._changed(rows, _NUMBERS | _STATE)

    def variables(self) -> list[nnx.Variable]:
        """Lists the variables that have something of the rows on the devices."""
        return list(self._variables().values())

    def save(self, folder: str | os.PathLike[str]) -> list[str]:
        """Writes what has changed since the last save. Returns the names of all files."""
        self.write_back()
        assert self._pieces is not None
        return self._pieces.save(folder)

    def load(self, folder: str | os.PathLike[str], names: list[str]) -> None:
        """Reads what `save` wrote. Rows on the devices come anew."""
        assert self._pieces is not None
        self.forget_slots()
        self._pieces.load(folder, names)

    def _release(self) -> None:
        """Lets go of all rows, and of the state on the devices: the model is gone."""
        self._state, self._arrays, self._rule = {}, {}, None
        self._known = np.zeros(0, np.uint8)
        self._slots = self._pieces = self._mesh = self._leaving = self.number = None

    def _variables(self) -> dict[str, nnx.Variable]:
        kernel = None if self._kernel is None else self._kernel()
        return {} if kernel is None else {ROW: kernel, **self._state}

    def _changed(self, rows: np.ndarray, known: int) -> None:
        self._known[rows] |= np.uint8(known)
        assert self._pieces is not None
        self._pieces.note(rows)

    def _seen(self, *, everywhere: bool) -> Iterator[np.ndarray]:
        """The rows with state, or all of them, some at a time."""
        for start in range(0, len(self._known), 64 * _BLOCK):
            known = self._known[start : start + 64 * _BLOCK]
            rows = (
                np.arange(len(known)) if everywhere else np.flatnonzero(known & _STATE)
            )
            for first in range(0, len(rows), _BLOCK):
                yield start + rows[first : first + _BLOCK]

    def _bring(self, missing: np.ndarray, found: np.ndarray, *, training: bool) -> bool:
        """Gives rows slots. Returns whether others have lost theirs."""
        table = self._slots
        assert table is not None
        given = table.room_for(missing, found)
        size = len(table.row) // table.devices
        before = [
            table.row[device * size + slots] for device, (slots, _) in enumerate(given)
        ]
        left = any((rows >= 0).any() for rows in before)
        leaves = [
            table.changed[device * size + slots]
            for device, (slots, _) in enumerate(given)
        ]
        if any(mask.any() for mask in leaves):
            self._leave(
                given,
                [
                    np.where(mask, rows, -1)
                    for mask, rows in zip(leaves, before, strict=True)
                ],
            )
        room = _padded(max(len(rows) for _, rows in given))
        rows = np.full((table.devices, room), -1, np.int32)
        for device, (_, mine) in enumerate(given):
            rows[device, : len(mine)] = mine
        rows = rows.reshape(-1)
        padding, rows = rows < 0, np.maximum(rows, 0)
        slots = self._places(given, room)
        values = {name: _taken(array, rows) for name, array in self._arrays.items()}
        # Nothing is made for padding.
        known = np.where(padding, np.uint8(_NUMBERS | _STATE), self._known[rows])
        self.bytes_moved += sum(array.nbytes for array in values.values())
        moved = _on_devices((slots, rows, known, values))
        variables = self._variables()

        def program():
            arrays = {n: v.get_raw_value() for n, v in variables.items()}
            after = _enter(self.stack, self._rule, self.key[...], arrays, *moved)
            return [after[name] for name in variables], None

        inplace.overwrite(list(variables.values()), program)
        table.give(given, training=training)
        return left

    def _leave(self, given: list[_Given], rows: list[np.ndarray]) -> None:
        """Begins to copy slots to the host, for these rows; -1 for none."""
        room = _padded(max(len(mine) for mine in rows))
        slots = self._places(given, room)
        arrays = {n: v.get_raw_value() for n, v in self._variables().items()}
        found = _read_slots(arrays, _on_devices(slots))
        for array in found.values():
            array.copy_to_host_async()
        to = np.full((len(rows), room), -1, np.int32)
        for device, mine in enumerate(rows):
            to[device, : len(mine)] = mine
        to = to.reshape(-1)
        places = np.flatnonzero(to >= 0)
        self._leaving = to[places], places, found

    def _collect(self) -> None:
        """Waits for the rows that leave, and writes them."""
        if self._leaving is None:
            return
        rows, places, found = self._leaving
        for name, array in found.items():
            host = np.asarray(array)
            self.bytes_moved += host.nbytes
            _put(self._arrays[name], rows, host, places)
        self._changed(rows, _NUMBERS | (_STATE if len(found) > 1 else 0))
        self._leaving = None

    def _places(self, given: list[_Given], room: int) -> np.ndarray:
        """`[devices * room]`: slots of each device; those of padding are outside."""
        assert self._slots is not None
        outside = self.stack.kernel_rows + np.arange(room, dtype=np.int32)
        slots = np.tile(outside, (self._slots.devices, 1))
        for device, (mine, _) in enumerate(given):
            slots[device, : len(mine)] = mine
        return slots.reshape(-1)


def set_number(variable: nnx.Variable, number: int) -> None:
    """Gives the devices' tables another number."""
    lies = variable[...].sharding
    variable.set_raw_value(jax.device_put(np.int32(number), lies))


def _padded(count: int) -> int:
    """Room for so many rows that move: two sizes in each power of 2, so few programs."""
    size = _LEAST_MOVED
    while size < count:
        if 3 * size // 2 >= count:
            return 3 * size // 2
        size *= 2
    return size


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        min(16, os.cpu_count() or 1), "sparsejax-rows"
    )


def _in_parts(count: int, size: int, work: Callable[[slice], None]) -> None:
    """Calls `work` with parts of `count` rows, by several threads. NumPy copies without the GIL."""
    if count <= size:
        work(slice(0, count))
        return
    parts = [slice(i, i + size) for i in range(0, count, size)]
    list(_threads().map(work, parts))


def _taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    found = np.empty((len(rows), *array.shape[1:]), array.dtype)

    def copy(part: slice) -> None:
        np.take(array, rows[part], axis=0, out=found[part], mode="clip")

    _in_parts(len(rows), _COPIED, copy)
    return found


def _put(
    array: np.ndarray, rows: np.ndarray, values: np.ndarray, places: np.ndarray
) -> None:
    def copy(part: slice) -> None:
        array[rows[part]] = values[places[part]]

    _in_parts(len(rows), _COPIED, copy)


def _on_devices(tree: Any) -> Any:
    """Arrays with a part for each device; all are copied at once."""
    if not mesh_is_set():
        return jax.tree.map(jnp.asarray, tree)
    lies = NamedSharding(jax.sharding.get_mesh(), P("model"))
    return jax.device_put(tree, lies)


@functools.partial(jax.jit, static_argnums=0)
def _made(stack: Stack, key: jax.Array, rows: jax.Array) -> jax.Array:
    return rows_at(stack, key, rows)


def _first_rows(stack: Stack, key: jax.Array, rows: jax.Array) -> jax.Array:
    """`[rows, dim]`: what rows begin with, few at a time, as random bits take memory."""
    if len(rows) <= _BLOCK:
        return rows_at(stack, key, rows)
    blocks = -(-len(rows) // _BLOCK)
    padded = jnp.pad(rows, (0, blocks * _BLOCK - len(rows))).reshape(blocks, _BLOCK)
    made = lax.map(functools.partial(rows_at, stack, key), padded)
    return made.reshape(-1, stack.dim)[: len(rows)]


def _completed(
    stack: Stack,
    rule: Rule | None,
    key: jax.Array,
    rows: jax.Array,
    known: jax.Array,
    values: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Rows of which the host may not know the numbers, or the state."""
    has_numbers = (known & _NUMBERS > 0)[:, None]

    def with_numbers():
        return jnp.where(has_numbers, values[ROW], _first_rows(stack, key, rows))

    w = lax.cond(jnp.all(has_numbers), lambda: values[ROW], with_numbers)
    found = {ROW: w}
    if rule is None:
        return found
    # As of an optimizer that is made: tables have all of their rows from the first step on.
    fresh = first_state(rule, w, jnp.zeros((), jnp.int32))
    for name, array in fresh.items():
        old = values[name]
        has = (known & _STATE > 0).reshape(-1, *(1,) * (old.ndim - 1))
        found[name] = jnp.where(has, old, array.astype(old.dtype))
    return found


_with_new = jax.jit(_completed, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _enter(
    stack: Stack,
    rule: Rule | None,
    key: jax.Array,
    arrays: dict[str, jax.Array],
    slots: jax.Array,
    rows: jax.Array,
    known: jax.Array,
    values: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Arrays whose slots have other rows."""

    def part(arrays, key, slots, rows, known, values):
        new = _completed(stack, rule, key, rows, known, values)
        return {
            name: array.at[slots].set(
                new[name].astype(array.dtype), mode="drop", unique_indices=True
            )
            for name, array in arrays.items()
        }

    operands = arrays, key, slots, rows, known, values
    if not mesh_is_set():
        return part(*operands)
    lies, mine = _specs(arrays), P("model")
    return call_on_each_device(
        part,
        *operands,
        in_specs=(lies, P(), mine, mine, mine, mine),
        out_specs=lies,
    )


@jax.jit
def _read_slots(arrays: dict[str, jax.Array], slots: jax.Array) -> dict[str, jax.Array]:
    def part(arrays, slots):
        return {n: a.at[slots].get(mode="clip") for n, a in arrays.items()}

    if not mesh_is_set():
        return part(arrays, slots)
    lies = _specs(arrays)
    return call_on_each_device(
        part, arrays, slots, in_specs=(lies, P("model")), out_specs=P("model")
    )


def _specs(arrays: Mapping[str, Any]) -> dict[str, P]:
    """How each array is divided, in the words of those who made it."""
    return {n: P("model", None) if n == ROW else P("model") for n in arrays}
