"""Training data on the devices, and the order of its rows in training.

The order does not depend on the mesh. Row `r` belongs to shard `r mod 64`, and in each epoch each
shard permutes its rows by its own key. A batch has equally many rows of each shard, and the rows
of a shard are adjacent in it::

    shard 0        shard 1        ...  shard 63
    r r r r | r r  r r r r | r r       r r r r | r r      | end of the first batch
    batch 0:  shard 0's, shard 1's, ..., shard 63's

So part `d` of `D` parts of every batch has rows of the shards `64 d / D` to `64 (d + 1) / D - 1`.
These rows are stored on the devices at position `d` of the axis "data", so that no row is
transferred.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sparsejax.data.reading.sources import Inputs, Source, Sources, aligned
from sparsejax.data.sets import vocabulary
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.losses import LossRule
from sparsejax.mesh.blocks import ShardedCSR, SparseRows
from sparsejax.mesh.layout import (
    VIRTUAL_SHARDS,
    axis_sizes,
    call_on_each_device,
    dealt,
    mesh_is_set,
    num_devices,
    put_on_mesh,
    put_rows,
    replicated,
)
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR, take_rows

# One target, or several by name. A string is the name of a sparse input, which is also the target.
Targets = Source | str | Mapping[str, Source | str] | None

# A warning about an uneven distribution is issued only if a device has more entries than this:
# fewer take little time.
MANY_ENTRIES = 2**20


class Sizes(NamedTuple):
    """The sizes that a program is compiled for.

    Attributes:
      capacities: for each matrix of the examples, the capacity for the entries of a batch.
      steps: largest number of steps of a dispatch.
      sorted_ahead: whether a dispatch sorts the inputs of all its steps by column at once, to
          compute the gradients of their rows.
      full: whether each dispatch has exactly `steps` steps. Then a GPU need not ask the host
          before each step whether there is another, and the host can launch far ahead.
      padded: whether a dispatch with fewer steps is padded for that reason to `steps` steps, of
          which the last ones change nothing.
    """

    capacities: tuple[int, ...]
    steps: int
    sorted_ahead: bool
    full: bool = False
    padded: bool = False


class TrainingTask(abc.ABC):
    """The roles of the matrices of `Examples`, and the loss that is learned from them.

    Each kind of model has a subclass, such as `Roles` for item models and `ClickTask` in
    `sparsejax.kinds.clicks.job` for click models. It is hashable, as it is a key of compiled
    programs.

    Attributes:
      inputs: names, for messages, of the first matrices: sparse inputs whose columns are divided
          over a mesh, and whose entries are sorted ahead. Other matrices have no name here.
      whole: whether sparse matrices are replicated on every device of a mesh.
      even: whether each part of a batch has equal capacity for the entries of such a matrix, and
          rows are assigned to batches and parts so that each has equally many entries.
      begins_rows: whether each step assigns rows of tables to new ids.
    """

    even: bool = False

    @property
    def inputs(self) -> Sequence[str]:
        return ()

    @property
    def whole(self) -> bool:
        return False

    @property
    def begins_rows(self) -> bool:
        return False

    @abc.abstractmethod
    def of(self, matrices: Sequence) -> tuple[Any, Any]:
        """Selects the inputs of the model, and the labels, from all matrices."""

    @abc.abstractmethod
    def check(self, model: Any) -> None:
        """Raises TypeError if a model cannot learn from such examples."""

    @abc.abstractmethod
    def loss(
        self, model: nnx.Module, x: Any, labels: Any, weights: jax.Array
    ) -> jax.Array:
        """The loss of a batch, a scalar: `sum_b weights_b loss_b`."""

    def staging(
        self, model: Any, optimizer: Optimizer, deterministic: bool
    ) -> Staging | None:
        """Makes the `Staging` that runs before the steps of a dispatch, or None."""
        return None

    def with_staged(self, x: Any, staged: Any) -> Any:
        """Replaces ids in the model's inputs by the results of `Staging`, in a compiled step."""
        return x

    def begun(
        self, model: nnx.Module, optimizer: Optimizer, x: Any, exists: jax.Array
    ) -> Any:
        """The input of the model, after new ids were assigned rows.

        Args:
          model: model, which is changed in place.
          optimizer: optimizer, which is changed in place.
          x: input that `of` selected.
          exists: `[batch]` bool: False for padding rows.
        """
        return x


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """Some steps of an epoch, made by `Epochs.dispatches` and run by `Program.launch`.

    >>> epochs = Epochs(place(train), batch_size=512, num_epochs=20)
    >>> dispatch = next(epochs.dispatches(0))
    >>> dispatch.count == len(dispatch.examples), int(dispatch.examples[0])
    (True, 512)

    Attributes:
      data: the examples on the devices.
      rows: `[steps, data, batch_size / data]` row numbers for each step of an epoch, or of a chunk
          of streamed data; -1 stands for no row.
      first: index in `rows` of the first step of this dispatch.
      examples: number of examples of each step of this dispatch.
      sizes: sizes that the program is compiled for.
      is_last: whether this dispatch contains the last step of `rows`.
      after: function that returns the next dispatch of these data, also of the next epoch, or
          None behind the last one; None if it is not known.
    """

    data: Resident
    rows: jax.Array
    first: int
    examples: np.ndarray
    sizes: Sizes
    is_last: bool
    after: Callable[[], Dispatch | None] | None = None

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.examples)


@runtime_checkable
class Staging(Protocol):
    """Processes the ids of steps before the steps run.

    It copies their rows from host memory to the devices, or sends ids to the devices that own the
    rows.
    """

    def parts(self, dispatch: Dispatch) -> Iterator[tuple[int, Any]]:
        """Prepares the steps of a dispatch.

        If their rows do not fit into memory together, it yields parts of them.

        Yields:
          The number of steps in the part, and the argument `staged` of `TrainingTask.with_staged`.
          It is padded to the number of steps of a program by repeating the last step. The caller
          must launch these steps before it requests the next part.
        """
        ...


@runtime_checkable
class Trainable(Protocol):
    """An item model that `Program` can train: an `nnx.Module` with these methods.

    `FeedForward` has them.
    """

    def loss(
        self, x: Any, labels: CSR, *, weights: jax.Array | None = None
    ) -> jax.Array:
        """The loss of a batch, a scalar:

        `sum_b weights_b loss_b`. `x` is a `CSR`, or a dict of inputs.
        """
        ...

    def train(self) -> None:
        """Enables dropout and other noise, as `nnx.Module.train` does."""
        ...


@dataclasses.dataclass(frozen=True)
class Roles(TrainingTask):
    """The `TrainingTask` of item models.

    Attributes:
      names: names of the inputs, which are the first matrices; None for a single input
        without a name.
      labels: positions of the targets among the matrices. A target may also be an input.
      targets: names of the targets; None for a single target without a name.
    """

    names: tuple[str, ...] | None = None
    labels: tuple[int, ...] = (-1,)
    targets: tuple[str, ...] | None = None

    def check(self, model: Any) -> None:
        lacks = [name for name in ("loss", "train") if not hasattr(model, name)]
        if lacks:
            raise TypeError(
                "expected a model with the methods of Trainable, as FeedForward has (a "
                "click model takes a ClickDataset or ScannedClicks); "
                f"{type(model).__name__} has no {' and no '.join(lacks)}"
            )

    def loss(self, model: Any, x: Any, labels: Any, weights: jax.Array) -> jax.Array:
        return model.loss(x, labels, weights=weights)

    def of(self, matrices: Sequence) -> tuple[Any, Any]:
        shown = matrices[0]
        if self.names is not None:
            shown = dict(zip(self.names, matrices, strict=False))
        labels = [matrices[place] for place in self.labels]
        if self.targets is None:
            return shown, labels[0]
        return shown, dict(zip(self.targets, labels, strict=True))

    @property
    def inputs(self) -> list[str]:
        names = self.names or ()
        return [f"inputs[{name!r}]" for name in names] or ["inputs"]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Checked training examples. The first call of `on_device` copies them to the devices.

    >>> place(train).num_rows == train.num_rows
    True

    Attributes:
      roles: task with the roles of the matrices.
      matrices: inputs `[rows, ...]`, then the targets that are not inputs.
      weights: `[rows]` float32 weights of the examples, or None.
    """

    roles: TrainingTask
    matrices: tuple[CSR | np.ndarray, ...]
    weights: np.ndarray | None

    @classmethod
    def of(
        cls, inputs: Sources | Inputs, targets: Targets, weights: ArrayLike | None
    ) -> Examples:
        """Makes examples by matching the rows of inputs and targets.

        Raises:
          TypeError: a source has an unsupported type.
          ValueError: there are no rows, a source lacks a row, or a weight is not valid.
        """
        inputs = Inputs.of(inputs)
        names = None if inputs.alone else tuple(sorted(inputs.parts))
        parts = [inputs.parts[name] for name in names or ("inputs",)]
        if inputs.num_rows == 0:
            raise ValueError(f"{inputs.rows.what} has no rows")
        if targets is None and not inputs.alone:
            raise ValueError(
                "several inputs need targets: data, or the name of a sparse input"
            )
        if isinstance(targets, Mapping):
            if not targets:
                raise ValueError("targets is empty; give {name: source}")
            named = tuple(sorted(targets))
            given = {f"targets[{name!r}]": targets[name] for name in named}
        else:
            named = None
            given = {"targets": "inputs" if targets is None else targets}
        labels = []
        for what, source in given.items():
            wanted = inputs.named(what, source)
            if isinstance(source, str):
                labels.append(parts.index(wanted))
            else:
                labels.append(len(parts))
                parts.append(aligned(wanted, inputs.rows))
        matrices = tuple(jax.tree.map(_canonical, part.matrix) for part in parts)
        weights = checked_weights(weights, inputs.num_rows)
        return cls(Roles(names, tuple(labels), named), matrices, weights)

    @property
    def num_rows(self) -> int:
        return self.matrices[0].shape[0]

    @property
    def chunks(self) -> list[int]:
        """Number of rows in each chunk: here a single chunk has all rows."""
        return [self.num_rows]

    def order(self, seed: int, epoch: int) -> list[int]:
        """The chunk numbers, in the order of an epoch."""
        return [0]

    def on_device(self, chunk: int, following: int | None) -> Resident:
        """The data of a chunk on the devices. `following` is the number of the next chunk."""
        return self._resident

    def close(self) -> None:
        """Does nothing, as no file is open."""

    @functools.cached_property
    def _resident(self) -> Resident:
        return Resident.of(self)

    def fingerprint(self) -> str:
        """A hash of the contents, which does not depend on the mesh."""
        weights = [] if self.weights is None else [self.weights]
        names = (getattr(self.roles, part, ()) for part in ("names", "targets"))
        if all(name is None for name in names):
            return fingerprint(*self.matrices, *weights)
        # Fields with default values are omitted from the hash, so that a new field does not change
        # earlier hashes.
        given, defaults = vars(self.roles), vars(type(self.roles))
        stated = {n: v for n, v in given.items() if v != defaults.get(n, ...)}
        roles = np.frombuffer(repr(stated).encode(), np.uint8)
        return fingerprint(*self.matrices, *weights, roles)


def checked_weights(weights: Any, rows: int) -> np.ndarray | None:
    """Weights of the examples as `[rows]` float32.

    Raises:
      ValueError: the number of weights is not `rows`, or a weight is not finite.
    """
    if weights is None:
        return None
    weights = np.asarray(weights, np.float32)
    if weights.shape != (rows,):
        raise ValueError(f"weights has shape {weights.shape}, expected ({rows},)")
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        bad = np.flatnonzero(wrong)[0]
        raise ValueError(
            f"weights[{bad}] is {weights[bad]}; a weight is a number that is 0 or more"
        )
    return weights


def check_labels(rule: object, labels: Any, *, whole: bool) -> None:
    """Raises ValueError if label values are invalid for the loss.

    Args:
      rule: the loss. Only a `LossRule` defines which label values are valid.
      labels: a `CSR`.
      whole: whether `labels` has all labels of the data.
    """
    count = int(labels.indptr[-1])
    if labels.data is None or count == 0:
        return
    least, most = float(labels.data[:count].min()), float(labels.data[:count].max())
    if whole and least == most == 0:
        raise ValueError(
            f"all {count:,} values of the targets are 0, so there is nothing to learn; "
            "leave the values out if each entry counts"
        )
    if not isinstance(rule, LossRule):
        return
    low, high = rule.labels
    if not (low <= least and most <= high):
        name = getattr(rule, "name", type(rule).__name__)
        raise ValueError(
            f"the targets have values from {least:g} to {most:g}, but the loss {name} "
            f"takes values from {low:g} to {high:g} only. Leave "
            "the values out if each entry counts, scale them, or choose another loss "
            "(l2_loss takes any)"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Resident:
    """A data set on the device, or in blocks on a mesh.

    Attributes:
      matrices: inputs, then targets that are not inputs. A dense input is `[data, rows of a part +
          1, ...]`; the last row of a part is padding. A CSR has all rows on every device.
      weights: `[data, rows of a part]` weights of the examples, or None. Without a mesh there is
          one part.
      num_rows: number of rows (static).
      contiguous: whether each shard is a range of consecutive rows, see `first_row`; otherwise row
          `r` belongs to shard `r mod 64` (static).
      roles: task with the roles of the matrices (static).
    """

    # Each is a CSR, a ShardedCSR or an array; a placeholder of JAX while a program is lowered.
    matrices: tuple[Any, ...]
    weights: jax.Array | None
    num_rows: int = dataclasses.field(metadata={"static": True})
    contiguous: bool = dataclasses.field(default=False, metadata={"static": True})
    roles: TrainingTask = dataclasses.field(default=Roles(), metadata={"static": True})

    @classmethod
    def of(cls, examples: Examples) -> Resident:
        """Copies the data to the device, or to the mesh if one is set.

        Warns if the devices of the mesh get very unequal numbers of entries.
        """
        weights, num_rows, roles = examples.weights, examples.num_rows, examples.roles
        if not mesh_is_set():
            matrices = (
                jax.tree.map(jnp.asarray, matrix)
                if isinstance(matrix, CSR)
                else jnp.asarray(np.append(matrix, matrix[:1], axis=0)[None])
                for matrix in examples.matrices
            )
            weights = None if weights is None else jnp.asarray(weights)[None]
            return cls(tuple(matrices), weights, num_rows, roles=roles)
        mesh = jax.sharding.get_mesh()
        rows = home_rows(num_rows, axis_sizes()[0])
        and_one = np.pad(np.maximum(rows, 0), ((0, 0), (0, 1)))

        def placed(matrix):
            if not isinstance(matrix, CSR):
                return put_rows(matrix[and_one], mesh)
            if roles.whole:
                return put_on_mesh(jax.tree.map(jnp.asarray, matrix))
            return ShardedCSR.from_host(matrix, rows, mesh)

        blocks = tuple(map(placed, examples.matrices))
        others = ["targets"] * (len(blocks) - len(roles.inputs))
        for what, matrix in zip([*roles.inputs, *others], blocks, strict=True):
            if isinstance(matrix, ShardedCSR):
                _warn_of_imbalance(what, matrix, mesh)
        if weights is not None:
            weights = put_rows(np.where(rows >= 0, weights[rows], 0), mesh)
        return cls(blocks, weights, num_rows, roles=roles)

    def take(self, rows: jax.Array, capacities: tuple[int, ...]) -> list:
        """Gathers the batches of some steps: for each matrix a stack of matrices, or an array
        `[steps, batch, ...]`.

        Args:
          rows: `[steps, data, n]` from `epoch_order`.
          capacities: for each matrix, the capacity for the entries of a batch, or of a block of
              it.
        """
        every, rows = rows.reshape(len(rows), -1), self.local(rows)

        def of(matrix, nse):
            if isinstance(matrix, ShardedCSR):
                return matrix.take(rows, nse)
            if isinstance(matrix, CSR):
                # Without replication, XLA's partitioner may divide these matrices, and then sum
                # some entries wrongly (jax 0.12.0 on CPUs, data=2 and model=4, replicated tables).
                return replicated(jax.vmap(lambda r: take_rows(matrix, r, nse))(every))
            return _dense_rows(matrix, rows)

        return [of(*pair) for pair in zip(self.matrices, capacities, strict=True)]

    @property
    def sparse_inputs(self) -> list[int]:
        """The positions of the sparse inputs among the matrices."""
        first = enumerate(self.matrices[: len(self.roles.inputs)])
        return [i for i, x in first if isinstance(x, SparseRows)]

    def needed(self, rows: jax.Array) -> list[jax.Array]:
        """The capacity that `take` needs for each matrix: the number of entries of a CSR, or of
        elements of an array.
        """
        every, rows = rows.reshape(len(rows), -1), self.local(rows)

        def of(matrix):
            if isinstance(matrix, ShardedCSR):
                return matrix.fullest(rows)
            if isinstance(matrix, CSR):
                if self.roles.even:
                    # Models of tokens divide their batch into one part for each device.
                    size, parts = every.shape[1], num_devices()
                    parts = 1 if size % parts else parts
                    largest = parts * _largest_dealt(matrix, every, parts)
                    # The mean is equal in all epochs, so that one program serves all of them.
                    mean = size * jnp.sum(matrix.row_lengths()) / self.num_rows
                    return jnp.maximum(largest, jnp.ceil(1.01 * mean).astype(jnp.int32))
                return _largest(matrix, every)
            return jnp.int32(rows.shape[2] * math.prod(matrix.shape[2:]))

        return [of(matrix) for matrix in self.matrices]

    def loads(self) -> jax.Array:
        """`[rows]`: number of entries of each row, by which `evened` assigns rows, if
        `roles.even`.
        """
        [lengths] = (m.row_lengths() for m in self.matrices if isinstance(m, CSR))
        return lengths

    def means(self, rows: jax.Array) -> jax.Array:
        """`[steps, batch]`: factors of the losses in the sum of a step.

        With them, the sum is the mean of `weights_b loss_b` over the rows that are not padding.
        """
        exists = rows >= 0
        means = exists / jnp.sum(exists, axis=(1, 2), keepdims=True)
        if self.weights is not None:
            pick = jax.vmap(lambda w, r: w[r], in_axes=(0, 1), out_axes=1)
            means *= pick(self.weights, self.local(rows))
        return means.reshape(len(rows), -1)

    def local(self, rows: jax.Array) -> jax.Array:
        """Converts rows `[steps, data, n]` to row numbers inside their part; -1 is padding."""
        data = rows.shape[1]
        if self.contiguous:
            shard = jnp.arange(data, dtype=jnp.int32) * (VIRTUAL_SHARDS // data)
            place = rows - first_row(shard, self.num_rows)[None, :, None]
        else:  # `home_rows` has already divided the rows into parts
            shards = VIRTUAL_SHARDS // data
            place = rows // VIRTUAL_SHARDS * shards + rows % shards
        return jnp.where(rows >= 0, place, -1)


def first_row(shard, num_rows: int):
    """The first row of a shard of consecutive rows. Shard sizes differ by at most 1."""
    each, more = divmod(num_rows, VIRTUAL_SHARDS)
    return shard * each + shard.clip(max=more)


def home_rows(num_rows: int, data: int) -> np.ndarray:
    """`[data, rows of a part]`: the row numbers of each of `data` parts; -1 is padding."""
    shards = VIRTUAL_SHARDS // data
    place = np.arange(-(-num_rows // VIRTUAL_SHARDS) * shards)
    rows = place // shards * VIRTUAL_SHARDS + place % shards
    rows = rows + np.arange(data)[:, None] * shards
    return np.where(rows < num_rows, rows, -1)


def _dense_rows(parts: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers `[steps, batch, ...]` from `parts: [data, n, ...]` by `rows: [steps, data, b]`.

    -1 selects the last row of a part. No data is sent between devices.
    """

    def block(part, rows):
        return part[0][rows[:, 0]]

    if not mesh_is_set():
        return block(parts, rows)
    specs = P("data"), P(None, "data")
    return call_on_each_device(block, (parts, rows), specs, P(None, "data"))


def _largest(matrix: CSR, rows: jax.Array) -> jax.Array:
    return jnp.max(jnp.sum(_lengths(matrix, rows), axis=1))


def _largest_dealt(matrix: CSR, rows: jax.Array, parts: int) -> jax.Array:
    """Number of entries in the fullest part of any batch, for `rows: [steps, batch]` in `parts`
    parts.
    """

    def of_batch(lengths):
        return jnp.max(jnp.sum(lengths[dealt(lengths, parts)], axis=1))

    return jnp.max(jax.vmap(of_batch)(_lengths(matrix, rows)))


def _lengths(matrix: CSR, rows: jax.Array) -> jax.Array:
    lengths = matrix.row_lengths().at[rows].get(mode="fill", fill_value=0)
    return jnp.where(rows >= 0, lengths, 0)


def _canonical(array):
    """Converts an array to a NumPy array with the dtype that it has on the device."""
    if not isinstance(array, np.ndarray):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _warn_of_imbalance(what: str, matrix: ShardedCSR, mesh: jax.sharding.Mesh) -> None:
    """Warns if a device has far more than its share of the entries of a matrix."""
    everywhere = NamedSharding(mesh, P())
    ends = jax.jit(lambda indptr: indptr[..., -1], out_shardings=everywhere)
    counts = np.asarray(ends(matrix.blocks.indptr))
    if counts.max() <= MANY_ENTRIES:
        return
    ratio = vocabulary.imbalance(counts.reshape(-1), counts.size)
    if ratio > vocabulary.MAX_IMBALANCE:
        warnings.warn(
            f"the fullest device has {ratio:.1f} times the mean of the entries of "
            f"{what}, and the others wait for it; read the data with sparsejax's "
            "readers, whose vocabulary order is balanced, or bring the columns into "
            "such an order with sparsejax.data.vocabulary_order",
            stacklevel=3,
        )
