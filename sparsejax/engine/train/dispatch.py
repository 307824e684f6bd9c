"""Dispatches: many training steps in one call of a compiled program.

A custom loop trains as fast as `fit`, on one device or under `jax.set_mesh(make_mesh(...))`, and
with bitwise equal results::

    examples = training.place(train)                              # on the devices
    epochs = training.Epochs(examples, batch_size=512, num_epochs=20)
    program = training.Program(model, optimizer)
    for epoch in range(20):
        for dispatch in epochs.dispatches(epoch):                 # in the epoch's order
            losses = program.launch(dispatch)                     # of each of its steps
    optimizer.flush(model)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sparsejax.engine.batching import bucket, close_bucket
from sparsejax.engine.static import check_hashable
from sparsejax.engine.train import fused as fused_output
from sparsejax.engine.train.resident import (
    Dispatch,
    Examples,
    Resident,
    Sizes,
    Staging,
    Trainable,
    TrainingTask,
    first_row,
)
from sparsejax.engine.train.streaming import Stream
from sparsejax.mesh import interrupts
from sparsejax.mesh.layout import (
    VIRTUAL_SHARDS,
    axes_are_explicit,
    parts_of_axes,
    put_on_mesh,
    with_shardings,
)
from sparsejax.mesh.xla_options import Programs, is_timed
from sparsejax.optimizers import inplace
from sparsejax.optimizers.gradients import row_params
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.training import Looping

# Number of epochs for which a program is compiled: its capacities fit their largest batch.
_EPOCHS_OF_A_PROGRAM = 32

# Maximum number of entries in all batches of a dispatch. They need about 300 MB (500 MB if their
# values are only copied) and take several milliseconds. The host needs one or two milliseconds for
# a dispatch, which it cannot overlap if steps have conditions.
_DISPATCH_ENTRIES = 2**23


@runtime_checkable
class Projected(Protocol):
    """A model whose parameters are projected after each step."""

    def project(self) -> None:
        """Projects parameters in place onto the values that they may have, such as a norm ball.

        Rows of a `RowParam` with pending updates are seen without these updates.
        """
        ...


class Epochs:
    """The order of the training examples in each epoch.

    >>> examples = place(train)
    >>> epochs = Epochs(examples, batch_size=512, num_epochs=20)
    >>> sum(dispatch.count for dispatch in epochs.dispatches(0)) == -(-32711 // 512)
    True

    The order depends only on `seed`, the epoch and the batch size; a mesh divides the same
    batches. Histories are grouped into batches with nearly equal numbers of entries, in a new way
    in each epoch. If the mesh of `jax.set_mesh` divides batches, the examples must have been
    placed under the same mesh.

    One program serves the dispatches of 32 epochs. Its capacities fit the largest of their
    batches, whose size is computed before the first of these epochs begins.

    Args:
      examples: examples from `place`.
      batch_size: examples of a step. On a mesh that divides batches it must be a multiple of 64.
          The last batch of an epoch may be smaller.
      num_epochs: number of epochs.
      seed: seed of the order.
      shuffle: whether the order is random. Otherwise each epoch has the order of the data: the
          first batch has the first rows.

    Attributes:
      batch_size: rows of a step, including padding rows.
      num_epochs: number of epochs.
      num_rows: examples of an epoch.

    Raises:
      ValueError: a number is out of range, or the mesh does not divide the batch; or scanned data
          without shuffling would be divided over devices.
    """

    def __init__(
        self,
        examples: Examples | Stream,
        *,
        batch_size: int = 512,
        num_epochs: int = 20,
        seed: int = 0,
        shuffle: bool = True,
    ):
        # The constructor raises an error for invalid values.
        Looping(batch_size=batch_size, num_epochs=num_epochs, seed=seed)
        self.num_epochs, self.num_rows = num_epochs, examples.num_rows
        self._examples, self._seed, self._shuffle = examples, seed, shuffle
        self._parts = parts_of_axes()[0]
        if not shuffle and self._parts > 1 and isinstance(examples, Stream):
            raise ValueError(
                f"shuffle=False with scanned data needs a mesh with data=1, got data="
                f"{self._parts}: each device reads rows that are far apart"
            )
        self.batch_size = step_size(batch_size, max(examples.chunks), self._parts)
        self._key = put_on_mesh(jax.random.key(seed))
        self._found: dict[tuple[int, int], tuple[int, ...]] = {}
        # The row order of a later epoch whose first dispatch was requested early.
        self._ahead: dict[int, jax.Array] = {}

    def dispatches(self, epoch: int, *, position: int = 0) -> Iterator[Dispatch]:
        """Iterates over the dispatches of an epoch.

        Args:
          epoch: number of the epoch, from 0 to `num_epochs - 1`.
          position: number of steps to skip at the beginning: the sum of `count` over the
              dispatches to skip.

        Raises:
          ValueError: `epoch` is out of range.
        """
        if not 0 <= epoch < self.num_epochs:
            raise ValueError(
                f"{epoch=} must be from 0 to {self.num_epochs - 1}; make Epochs with a "
                "larger num_epochs"
            )
        chunks = self._chunks(epoch)
        # While the last chunk of this epoch is trained on, the first chunk of the next epoch is
        # read.
        more = epoch + 1 < self.num_epochs
        after = self._chunks(epoch + 1)[:1] if more else [None]
        start = 0
        for chunk, following in zip(chunks, chunks[1:] + after, strict=True):
            steps = math.ceil(self._examples.chunks[chunk] / self.batch_size)
            if position < start + steps:
                # No variable here refers to the data, so that its memory is freed before the next
                # chunk.
                yield from self._of_chunk(
                    self._examples.on_device(chunk, following),
                    chunk,
                    epoch,
                    max(0, position - start),
                )
            start += steps

    def _chunks(self, epoch: int) -> list[int]:
        """The numbers of the chunks, in the order of an epoch."""
        if not self._shuffle:
            return list(range(len(self._examples.chunks)))
        return self._examples.order(self._seed, epoch)

    def _of_chunk(
        self, data: Resident, chunk: int, epoch: int, position: int
    ) -> Iterator[Dispatch]:
        capacities = self._capacities(data, chunk, epoch)
        rows = self._ahead.pop(epoch, None)
        if rows is None:
            rows, _ = self._order(data, chunk, epoch)
        entries = entries_of_step(capacities, self._parts, data.sparse_inputs)
        steps, full, padded = steps_per_dispatch(entries), False, fills_dispatches()
        if padded:
            # Chunks have different numbers of steps, but share one program.
            largest = math.ceil(max(self._examples.chunks) / self.batch_size)
            steps = even_steps(largest, steps)
            one_chunk = len(self._examples.chunks) == 1
            full = one_chunk and (len(rows) - position) % steps == 0
        sizes = Sizes(capacities, steps, sorts_ahead(), full, padded and not full)

        make = functools.partial(self._made, data, rows, sizes, epoch)
        yield from filter(None, map(make, range(position, len(rows), sizes.steps)))

    def _made(
        self, data: Resident, rows: jax.Array, sizes: Sizes, epoch: int, first: int
    ) -> Dispatch | None:
        """The dispatch from step `first` on; behind the last step, the first one of the next epoch.

        It is no nested function, which would refer to itself and so keep the data of a chunk in
        memory until garbage is collected.
        """
        if first >= len(rows):
            return self._first_after(data, epoch)
        steps = np.arange(first, min(first + sizes.steps, len(rows)))
        left = data.num_rows - steps * self.batch_size
        following = data, rows, sizes, epoch, first + sizes.steps
        return Dispatch(
            data=data,
            rows=rows,
            first=first,
            examples=np.minimum(self.batch_size, left),
            sizes=sizes,
            is_last=first + len(steps) == len(rows),
            after=functools.partial(self._made, *following),
        )

    def _first_after(self, data: Resident, epoch: int) -> Dispatch | None:
        """The first dispatch of the next epoch; None if this is the last epoch, or if data is in
        chunks.
        """
        following = epoch + 1
        if following == self.num_epochs or len(self._examples.chunks) > 1:
            return None
        dispatch = next(self._of_chunk(data, 0, following, 0))
        self._ahead[following] = dispatch.rows
        return dispatch

    def _order(self, data: Resident, chunk: int, epoch: int):
        # An exception raised by a signal handler here would be replaced by another one inside
        # JAX's caches.
        with interrupts.uninterrupted():
            return _ordered[False](
                self._key,
                epoch,
                data,
                chunk,
                self.batch_size,
                self._parts,
                self._shuffle,
                self._is_evened(data),
            )

    def _is_evened(self, data: Resident) -> bool:
        return self._shuffle and data.roles.even

    def _capacities(self, data: Resident, chunk: int, epoch: int) -> tuple[int, ...]:
        """The capacity of each matrix for its largest batch in many epochs."""
        period = epoch // _EPOCHS_OF_A_PROGRAM
        if (chunk, period) not in self._found:
            first = period * _EPOCHS_OF_A_PROGRAM
            last = min(first + _EPOCHS_OF_A_PROGRAM, self.num_epochs)
            needed = [
                [int(n) for n in self._order(data, chunk, epoch)[1]]
                for epoch in range(first, last)
            ]
            largest = map(max, zip(*needed, strict=True))
            # Evened batches need equal capacities in each epoch, so little spare capacity is
            # enough.
            room = close_bucket if self._is_evened(data) else bucket
            self._found[chunk, period] = tuple(map(room, largest))
        return self._found[chunk, period]


class Program[Model: nnx.Module | Trainable]:
    """A compiled program that trains a model and its optimizer, one dispatch at a time.

    >>> epochs = Epochs(place(train), batch_size=512, num_epochs=20)
    >>> program = Program(model, optimizer)
    >>> dispatch = next(epochs.dispatches(0))
    >>> program.launch(dispatch).shape == (dispatch.count,)
    True

    Parameters and state are overwritten in place; a copy made by `nnx.clone` keeps its values. The
    model is set to training mode (`model.train()`). On a mesh, all arrays of model and optimizer
    that are not divided are copied to every device.

    The program is compiled at the first launch. Later programs reuse it, also for other models
    with equal network, shapes and settings.

    Args:
      model: a `FeedForward`, or a module with the methods of `Trainable`; for clicks a click
        model, such as `DLRM`, or a module that is called as `model(dense, ids)`.
      optimizer: the optimizer of this model.
      fused: whether the gradient of each chunk of output items is applied as soon as it is
          computed, see `fit`.
      deterministic: whether results are bitwise equal in every process on GPUs of one kind, see
          `fit`. If so, call `optimizer.flush(model, deterministic=True)`, too.

    Attributes:
      modules: model and optimizer.
      variables: all variables of model and optimizer.

    Raises:
      TypeError: the model or the optimizer has another type.
      ValueError: a kernel is not divided over the mesh, or the axes of the mesh are
        Explicit.
      NotImplementedError: `fused` with a tied output, or with a model that has no
        `SparseOutput` of its own.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        fused: bool = False,
        deterministic: bool = False,
    ):
        check_modules(model, optimizer)
        if axes_are_explicit():
            raise ValueError(
                "the mesh that is set has Explicit axes; a Program needs Auto axes, as "
                "sparsejax.make_mesh makes them"
            )
        if fused:
            fused_output.check(model, optimizer)
        model.train()
        self.modules = model, optimizer
        self._flat = inplace.Flattened(self.modules)
        self.variables = self._flat.variables
        if constants := nnx.to_flat_state(self._flat.constants):
            path = ".".join(map(str, constants[0][0][1:]))
            raise TypeError(
                f"'{path}' of the model is an array; make it an nnx.Variable(array)"
            )
        _check_divided(model)
        check_hashable(self._flat.graphdef, model)
        self._how = How(self._flat.graphdef, self._flat.layout, fused)
        self._steps = run_steps.timed if is_timed(self.modules) else run_steps
        self._deterministic = deterministic
        self._stagings: dict[TrainingTask, Staging | None] = {}

    def launch(self, dispatch: Dispatch) -> jax.Array:
        """Starts the steps of a dispatch without waiting for them to end.

        The next dispatch can be launched before they end, so that the devices need not wait for
        the host.

        Returns:
          `[dispatch.count]` float32, the loss of each step: the mean of
          `weights_b loss_b` over the examples of its batch.
        """
        dispatch.data.roles.check(self.modules[0])
        staging = self._staging_of(dispatch.data.roles)
        if staging is None:
            return self._launched(dispatch, None)
        found, start, sizes = [], 0, dispatch.sizes
        for count, staged in staging.parts(dispatch):
            part = dispatch
            if count < dispatch.count:
                # A resumed dispatch may have far fewer steps than the program's capacity.
                part = dataclasses.replace(
                    dispatch,
                    first=dispatch.first + start,
                    examples=dispatch.examples[start : start + count],
                    sizes=sizes._replace(full=False, padded=False),
                )
            found.append(self._launched(part, staged))
            start += count
        return found[0] if len(found) == 1 else jnp.concatenate(found)

    def _staging_of(self, roles: TrainingTask) -> Staging | None:
        if roles not in self._stagings:
            how = self._deterministic
            self._stagings[roles] = roles.staging(*self.modules, deterministic=how)
        return self._stagings[roles]

    def _launched(self, dispatch: Dispatch, staged: Any) -> jax.Array:
        def program(arrays):
            arguments = self._arguments(dispatch, arrays)
            state, losses = self._steps[self._deterministic](*arguments, staged)
            return jax.tree.leaves(state), losses

        losses = self._flat.run(program)
        # Sliced before the next launch: later, the slice would wait for the end of that dispatch.
        return losses if dispatch.count == len(losses) else losses[: dispatch.count]

    def compile_ahead(self, dispatch: Dispatch) -> None:
        """Compiles the program for a dispatch, if a command caches programs on disk."""
        if self._staging_of(dispatch.data.roles) is not None:
            return  # the staged arguments are not known before the batch is staged
        arrays = [variable.get_raw_value() for variable in self.variables]
        run_steps = self._steps[self._deterministic]
        run_steps.compile_ahead(*self._arguments(dispatch, arrays))

    def _arguments(self, dispatch: Dispatch, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments for `run_steps` that belong to a dispatch."""
        return (
            self._how,
            jax.tree.unflatten(self._flat.structure, arrays),
            dispatch.data,
            dispatch.rows,
            dispatch.first,
            dispatch.count,
            dispatch.sizes,
        )


@dataclasses.dataclass(frozen=True)
class How:
    """The static part of a `Program`, a key of compiled programs.

    Attributes:
      graphdef: the graph of `(model, optimizer)`.
      layout: sharding of each array of their state on the mesh; None without a mesh.
      fused: whether the update of the output layer is fused into its loss.
    """

    graphdef: nnx.GraphDef
    layout: tuple[jax.sharding.Sharding, ...] | None
    fused: bool

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Cached, because each launch needs this hash, and a graph of a hundred variables takes a
        # millisecond to hash.
        return hash((self.graphdef, self.layout, self.fused))


@functools.partial(
    Programs,
    loops_in_graphs=True,
    static_argnames=("how", "sizes"),
    donate_argnames="state",
)
def run_steps(
    how: How,
    state: Any,
    data: Resident,
    rows: jax.Array,
    first: jax.Array,
    count: jax.Array,
    sizes: Sizes,
    staged: Any = None,
) -> tuple[Any, jax.Array]:
    """The compiled program: steps `first .. first + count - 1` of `rows`.

    `run_steps[True]` is the deterministic form, `run_steps[False]` the default, see `Programs`.

    `count` is at most `sizes.steps`, and not static, so that one program serves every dispatch of
    an epoch. With `sizes.full` it is not read. With `sizes.padded`, steps from `count` on repeat
    the last batch and change nothing. On a mesh the state keeps its layout, and the losses are
    replicated. `staged` is the result of `Staging`, or None.

    Returns:
      The state, and losses `[sizes.steps]`, which are 0 from step `count` on.
    """
    numbers = first + jnp.arange(sizes.steps)
    if sizes.padded:
        numbers = jnp.minimum(numbers, first + count - 1)
    rows = rows.at[numbers].get(mode="fill", fill_value=-1)
    batches = data.take(rows, sizes.capacities)
    if sizes.sorted_ahead:
        for i in data.sparse_inputs:
            batches[i] = batches[i].with_transposed()
    means, exists = data.means(rows), (rows >= 0).reshape(len(rows), -1)
    begins = data.roles.begins_rows

    def step(i, carry):
        state, losses, derived = carry
        used = [_of_step(batch, i) for batch in batches]
        x, labels = data.roles.of(used)
        if staged is not None:
            here = jax.tree.map(lambda leaf: leaf[i], staged)
            x = data.roles.with_staged(x, here)
        model, optimizer = nnx.merge(how.graphdef, state, copy=True)
        if begins:
            x = data.roles.begun(model, optimizer, x, exists[i])

        def loss_fn(model):
            return data.roles.loss(model, x, labels, means[i])

        if how.fused:
            loss, derived = fused_output.train_step(
                model, optimizer, x, labels, means[i], derived
            )
        else:
            loss, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
        if isinstance(model, Projected):
            model.project()
        after = nnx.state((model, optimizer))
        if padded:
            after = optimizer.where(model, i < count, after, state)
            loss = jnp.where(i < count, loss, 0)
        state = with_shardings(after, how.layout)
        return state, losses.at[i].set(jnp.asarray(loss, losses.dtype)), derived

    model, optimizer = nnx.merge(how.graphdef, state, copy=True)
    # In these three cases, rows are written without a call of the optimizer.
    asks = not (how.fused or isinstance(model, Projected) or begins)
    padded = sizes.padded and asks
    with optimizer.ahead(model, sizes.steps, count if padded else None):
        state = with_shardings(nnx.state((model, optimizer)), how.layout)
        derived = fused_output.derive(model) if how.fused else None
        losses = jnp.zeros(sizes.steps, jnp.float32)
        steps = sizes.steps if sizes.full or padded else count
        state, losses, _ = lax.fori_loop(0, steps, step, (state, losses, derived))
    if how.layout is not None:
        losses = lax.with_sharding_constraint(losses, jax.P())
    return with_shardings(state, how.layout), losses


def _of_step[Batch](batches: Batch, i: jax.Array) -> Batch:
    """The batch of step `i`."""
    batch = jax.tree.map(lambda leaf: leaf[i], batches)
    if not isinstance(batch, jax.Array) or batch.dtype != jnp.float32:
        return batch
    # Without the barrier, XLA fuses the slice with a product that reads it, and does not autotune
    # this fusion: the gradient of a layer with 13 inputs took 670 us instead of 25.
    return lax.optimization_barrier(batch)


def steps_per_dispatch(entries: int) -> int:
    """Number of steps in a dispatch: enough to hide the time of its launch.

    On a CPU the number is small, as a step may take seconds there. The batches of all steps of a
    dispatch are in memory and sorted at once. Each has `entries` entries, see `entries_of_step`,
    and the sort needs about 40 bytes per entry.
    """
    return 16 if jax.default_backend() == "cpu" else steps_on_gpu(entries)


def steps_on_gpu(entries: int) -> int:
    """Number of steps in a dispatch on a GPU, if each batch has this many entries."""
    return max(1, min(64, _DISPATCH_ENTRIES // max(1, entries)))


def fills_dispatches() -> bool:
    """Whether dispatches have as many steps as possible, see `Sizes`; no gain on a CPU."""
    return jax.default_backend() != "cpu"


def even_steps(total: int, most: int) -> int:
    """Number of steps in a dispatch: a number up to `most` that divides `total`.

    If no number above an eighth of `most` divides `total`, the last dispatch has fewer steps. The
    number is then chosen so that the last dispatch lacks as few steps as possible.
    """
    fewest = min(total, max(1, most // 8))
    for steps in range(min(most, total), fewest - 1, -1):
        if total % steps == 0:
            return steps
    return math.ceil(total / math.ceil(total / most))


def entries_of_step(
    capacities: Sequence[int], parts: int, sparse_inputs: Collection[int] = (0,)
) -> int:
    """Entries that a device sorts in a step, plus a 16th of the numbers that it only copies.

    For a sparse input, a device sorts those entries of all parts of the batch that belong to its
    columns.

    Args:
      capacities: for each matrix, the capacity of a device's block of a batch.
      parts: number of parts into which batches are divided.
      sparse_inputs: positions of the matrices that are sorted.
    """
    by_column = sum(capacities[i] for i in sparse_inputs)
    return parts * by_column + (sum(capacities) - by_column) // 16


def sorts_ahead() -> bool:
    """Whether a dispatch sorts the inputs of all its steps at once, see `Sizes`.

    On a CPU it is faster to process one step at a time.
    """
    return jax.default_backend() != "cpu"


def launches_ahead() -> bool:
    """Whether `fit` launches a dispatch before it reads the losses of the previous one.

    Several processes do not: they communicate after each dispatch has ended. A CPU does not: it is
    both the device and the host.
    """
    return jax.process_count() == 1 and jax.default_backend() != "cpu"


def step_size(batch_size: int, num_rows: int, data: int) -> int:
    """Number of rows in a step, including padding rows.

    Raises:
      ValueError: a batch of this size cannot be divided over `data` devices.
    """
    if batch_size % VIRTUAL_SHARDS == 0:
        return min(batch_size, -(-num_rows // VIRTUAL_SHARDS) * VIRTUAL_SHARDS)
    if data > 1:
        raise ValueError(
            f"{batch_size=} must be a multiple of {VIRTUAL_SHARDS} where the mesh has "
            f"data={data}"
        )
    return min(batch_size, num_rows)


def epoch_order(
    key: jax.Array,
    epoch: jax.Array | int,
    num_rows: int,
    batch_size: int,
    data: int,
    *,
    contiguous: bool = False,
    shuffle: bool = True,
) -> jax.Array:
    """`[steps, data, batch_size / data]` row numbers for each step of an epoch; -1 is padding.

    If the batch size is no multiple of 64, the batches are consecutive parts of one sequence,
    whose position `p` is entry `p // 64` of shard `p mod 64`. Row `r` is in shard `r mod 64`, or,
    if shards are contiguous, in one of 64 consecutive ranges of rows.
    Without `shuffle`, step `s` has the rows from `s * batch_size` on.
    """
    # Without shuffling there is one part, which has all rows.
    contiguous = contiguous and shuffle
    depth = -(-num_rows // VIRTUAL_SHARDS)
    steps = -(-num_rows // batch_size)
    epoch_key = jax.random.fold_in(key, epoch)

    def permuted(shard):
        entry = jnp.arange(depth, dtype=jnp.int32)
        exists = entry * VIRTUAL_SHARDS + shard < num_rows
        if shuffle:
            bits = jax.random.bits(jax.random.fold_in(epoch_key, shard), (depth,))
            # Only the last entry can be padding. The sort is stable, so it stays last.
            bits = jnp.where(exists, bits, jnp.uint32(2**32 - 1))
            _, entry = lax.sort_key_val(bits, entry, is_stable=True)
        row = entry * VIRTUAL_SHARDS + shard
        if contiguous:
            row = first_row(shard, num_rows) + entry
        return jnp.where(exists, row, -1)

    shards = jax.vmap(permuted)(jnp.arange(VIRTUAL_SHARDS, dtype=jnp.int32))
    if batch_size % VIRTUAL_SHARDS:
        order = shards.T.reshape(-1)[:num_rows]
        missing = (0, steps * batch_size - num_rows)
        order = jnp.pad(order, missing, constant_values=-1)
        return order.reshape(steps, data, -1)
    each = batch_size // VIRTUAL_SHARDS
    missing = ((0, 0), (0, steps * each - depth))
    order = jnp.pad(shards, missing, constant_values=-1)
    return (
        order.reshape(data, -1, steps, each)
        .transpose(2, 0, 1, 3)
        .reshape(steps, data, -1)
    )


def evened(
    order: jax.Array, loads: jax.Array, key: jax.Array, num_rows: int
) -> jax.Array:
    """Exchanges rows between batches, so that the batches of an epoch have nearly equal loads.

    A row keeps its position in the batch, and so its shard and part. Positions are merged in
    random pairs: first two positions, then two pairs, and so on. In each merge the sums of one
    side in ascending order are added to the sums of the other side in descending order, so that
    the sums differ less each time. If the last batch is smaller, it is the one, of as many as
    there are batches, whose mean load is nearest to the mean of all rows.

    Args:
      order: `[steps, data, batch / data]` from `epoch_order`.
      loads: `[rows]` integers: the load of each row.
      key: random key of the epoch.
      num_rows: number of rows of the epoch.
    """
    steps, size = len(order), math.prod(order.shape[1:])
    rows, full = order.reshape(steps, size).T, num_rows // size
    if full < 2:
        return order
    if full < steps:
        of_rows, is_last = _of_rows(loads, rows), rows[:, -1:] >= 0
        means = jnp.sum(of_rows * is_last, axis=0) / jnp.sum(is_last)
        chosen = jnp.argmin(jnp.abs(means - jnp.sum(of_rows) / num_rows))
        others = jnp.where(is_last[:, 0], rows[:, chosen], -1)
        left = jnp.where(is_last[:, 0], rows[:, -1], rows[:, chosen])
        rows = rows.at[:, chosen].set(left).at[:, -1].set(others)
    levels = (size - 1).bit_length()
    of_places, of_steps = jax.random.split(key)
    place = jax.random.permutation(of_places, 2**levels)
    table = jnp.full((2**levels, full), -1, rows.dtype)
    table = table.at[place[:size]].set(rows[:, :full])
    number = jnp.arange(2**levels)

    def meet(level, carry):
        sums, table = carry
        # Positions to be merged have equal sums, and are sorted in one direction.
        falls = (number >> level) & 1 > 0
        keys = jnp.where(falls[:, None], -sums, sums)
        _, sums, table = lax.sort((keys, sums, table), dimension=1, num_keys=1)
        return sums + sums[number ^ (1 << level)], table

    _, table = lax.fori_loop(0, levels, meet, (_of_rows(loads, table), table))
    # The batches are permuted, so that the sort does not decide their order.
    table = table[place[:size]][:, jax.random.permutation(of_steps, full)]
    return jnp.append(table, rows[:, full:], axis=1).T.reshape(order.shape)


def _of_rows(loads: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.where(rows >= 0, loads[rows], 0)


@functools.partial(
    Programs, static_argnames=("batch_size", "parts", "shuffle", "evens_out")
)
def _ordered(
    key,
    epoch,
    data: Resident,
    chunk,
    batch_size: int,
    parts: int,
    shuffle: bool,
    evens_out: bool,
):
    """The row order of a chunk, and the number of entries in the largest batch of each matrix."""
    if data.contiguous:  # contiguous data may be one of several chunks
        key = jax.random.fold_in(key, chunk)
    order = epoch_order(
        key,
        epoch,
        data.num_rows,
        batch_size,
        parts,
        contiguous=data.contiguous,
        shuffle=shuffle,
    )
    if evens_out:
        # Numbers below `VIRTUAL_SHARDS` are used for the keys of shards.
        number = jax.random.fold_in(jax.random.fold_in(key, epoch), VIRTUAL_SHARDS)
        order = evened(order, data.loads(), number, data.num_rows)
    return order, data.needed(order)


def check_modules(model: Any, optimizer: Any) -> None:
    """Raises TypeError if the model cannot be trained by the optimizer."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer)
        raise TypeError(
            "expected a sparsejax.Optimizer, as sparsejax.Optimizer(model, "
            f"sparsejax.optimizers.adam(1e-3)), got {kind.__module__}.{kind.__name__}; "
            "with an optax rule write the step yourself, with nnx.Optimizer and "
            "nnx.value_and_grad"
        )
    if not hasattr(model, "train"):
        raise TypeError(
            f"expected a model that is an nnx.Module, got {type(model).__name__}"
        )


def _check_divided(model: Any) -> None:
    """Raises ValueError if a kernel is replicated on a mesh although nobody asked for it."""
    if parts_of_axes()[1] == 1:
        return
    for path, kernel in row_params(model).items():
        # A kernel made for a mesh has its sharding in its metadata; that may be a deliberate
        # replication.
        is_meant = kernel.get_metadata().get("out_sharding") is not None
        if kernel[...].sharding.is_fully_replicated and not is_meant:
            raise ValueError(
                f"'{'.'.join(map(str, path))}' is not divided over the mesh's axis "
                '"model"; make the model and the optimizer under the same '
                "`with jax.set_mesh(mesh):`"
            )
