"""Training data on the device, and the order in which its rows are trained on.

The order does not depend on the mesh. Row `r` belongs to shard `r mod 64`, and in each
epoch a shard permutes its rows by a key of its own. A batch has the same number of rows
from each shard. The rows of a shard stand together::

    shard 0        shard 1        ...  shard 63
    r r r r | r r  r r r r | r r       r r r r | r r      | end of the first batch
    batch 0:  shard 0's, shard 1's, ..., shard 63's

So part `d` of `D` of every batch has rows of the shards `64 d / D` to `64 (d + 1) / D - 1`.
These rows are on the devices at place `d` of the axis "data", so nothing has to be fetched.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

# One, or several by name. A string is the name of a sparse input.
Targets = Source | str | Mapping[str, Source | str] | None

# A device with more than its share of the entries is worth a warning only if it has more
# entries than this. Fewer take little time.
MANY_ENTRIES = 2**20


class Sizes(NamedTuple):
    """The sizes that a program is compiled for.

    Attributes:
      capacities: for each matrix of the examples, room for the entries of a batch.
      steps: largest number of steps of a dispatch.
      sorted_ahead: whether a dispatch sorts the inputs of all its steps by column at
        once, for the gradients of their rows.
      full: whether each dispatch has `steps` steps. Then a GPU does not tell the host
        before each step that there is one more, and the host launches far ahead.
      padded: whether a dispatch with fewer steps also does `steps` steps, for that
        reason, of which the last ones change nothing.
    """

    capacities: tuple[int, ...]
    steps: int
    sorted_ahead: bool
    full: bool = False
    padded: bool = False


class TrainingTask(abc.ABC):
    """The roles of the matrices of `Examples`, and the way to learn from them.

    Here kinds of models differ: `Roles` is for item models, `ClickTask` of
    `sparsejax.kinds.clicks.job` that of click models. It is hashable, because programs are
    compiled for it.

    Attributes:
      inputs: names in messages of the first matrices: those whose columns are divided over a
        mesh, and sorted ahead. Other sparse matrices that are no targets have none.
      whole: whether sparse matrices lie whole on every device of a mesh.
      even: whether each part of a batch has equal room for the entries of such a matrix, and
        rows are dealt to batches and their parts by their entries.
      begins_rows: whether tables give rows to new ids, in each step.
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
        """Selects from all matrices the inputs of the model, and the labels."""

    @abc.abstractmethod
    def check(self, model: Any) -> None:
        """Raises TypeError if a model cannot learn from them."""

    @abc.abstractmethod
    def loss(
        self, model: nnx.Module, x: Any, labels: Any, weights: jax.Array
    ) -> jax.Array:
        """`sum_b weights_b loss_b` of a batch, a scalar."""

    def staging(
        self, model: Any, optimizer: Optimizer, deterministic: bool
    ) -> Staging | None:
        """Makes the work that is done before the steps of a dispatch, if there is some."""
        return None

    def with_staged(self, x: Any, staged: Any) -> Any:
        """Replaces ids in the model's inputs by the results of `Staging`."""
        return x

    def begun(
        self, model: nnx.Module, optimizer: Optimizer, x: Any, exists: jax.Array
    ) -> Any:
        """The input that the model is shown, once its new ids have rows.

        Args:
          model: the model, which is changed.
          optimizer: the optimizer, which is changed, too.
          x: the input that `of` selected.
          exists: `[batch]` whether there is such an example.
        """
        return x


@runtime_checkable
class Staging(Protocol):
    """Works on the ids of steps before the steps begin.

    It brings their rows from host memory to the devices, or sends ids to the devices that
    own the rows.
    """

    def parts(
        self, data: Resident, rows: jax.Array, first: int, count: int, sizes: Sizes
    ) -> Iterator[tuple[int, Any]]:
        """Prepares some steps, some steps at a time if their rows do not fit together.

        Args:
          data: the examples.
          rows: rows of each step of an epoch, as in `Dispatch`.
          first: number of the first step.
          count: number of steps.
          sizes: sizes that the program is compiled for.

        Yields:
          The next number of steps, and what `TrainingTask.with_staged` takes, of as many steps
          as a program has, of which those behind repeat the last one. These steps have to be launched before
          the next part is asked for.
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
        """`sum_b weights_b loss_b`, a scalar. `x` is a `CSR`, or a dict of inputs."""
        ...

    def train(self) -> None:
        """Switches noise on, as `nnx.Module.train` does."""
        ...


@dataclasses.dataclass(frozen=True)
class Roles(TrainingTask):
    """The `TrainingTask` of item models.

    Attributes:
      names: names of the inputs, which are the first matrices; None for a single input
        without a name.
      labels: the places of the targets among the matrices. They may be inputs.
      targets: names of the targets; None for a single one without a name.
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
    """Rows to train on, checked. The first call of `on_device` copies them to the devices.

    >>> place(train).num_rows == train.num_rows
    True

    Attributes:
      roles: names and kinds of the matrices.
      matrices: the inputs, `[rows, ...]`, then those targets that are something else.
      weights: `[rows]` float32, or None.
    """

    roles: TrainingTask
    matrices: tuple[CSR | np.ndarray, ...]
    weights: np.ndarray | None

    @classmethod
    def of(
        cls, inputs: Sources | Inputs, targets: Targets, weights: ArrayLike | None
    ) -> Examples:
        """Matches the rows.

        Raises:
          TypeError: a source has another type.
          ValueError: there are no rows, a row is missing, or a weight is wrong.
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
        """Number of rows of each chunk: here one chunk has all rows."""
        return [self.num_rows]

    def order(self, seed: int, epoch: int) -> list[int]:
        """The chunks in the order of an epoch."""
        return [0]

    def on_device(self, chunk: int, following: int | None) -> Resident:
        """The data of a chunk on the devices; `following` comes next."""
        return self._resident

    def close(self) -> None:
        """Does nothing, because nothing is open."""

    @functools.cached_property
    def _resident(self) -> Resident:
        return Resident.of(self)

    def fingerprint(self) -> str:
        """A hash of the contents; the same on any mesh."""
        weights = [] if self.weights is None else [self.weights]
        names = (getattr(self.roles, part, ()) for part in ("names", "targets"))
        if all(name is None for name in names):
            return fingerprint(*self.matrices, *weights)
        # Without defaults, so that a field of a later version changes no earlier hash.
        given, defaults = vars(self.roles), vars(type(self.roles))
        stated = {n: v for n, v in given.items() if v != defaults.get(n, ...)}
        roles = np.frombuffer(repr(stated).encode(), np.uint8)
        return fingerprint(*self.matrices, *weights, roles)


def checked_weights(weights: Any, rows: int) -> np.ndarray | None:
    """Weights of `rows` examples in float32.

    Raises:
      ValueError: there are more or fewer, or one is not finite.
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
    """Raises ValueError if the loss cannot make sense of the values of labels.

    Args:
      rule: the loss. Only a `LossRule` says which values it takes.
      labels: a `CSR`.
      whole: whether these are all labels of the data.
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
    """A data set on the device, or in blocks on the mesh.

    Attributes:
      matrices: the inputs, then targets that are no inputs. A dense input is `[data,
        rows of a part + 1, ...]`; the last row of a part stands for no row. A CSR has
        all rows, on every device.
      weights: `[data, rows of a part]`, or None; without a mesh there is one part.
      num_rows: number of rows (static).
      contiguous: whether the rows of a shard follow each other, see `first_row`; else
        row `r` belongs to shard `r mod 64` (static).
      roles: names and kinds of the matrices (static).
    """

    # Each a CSR, ShardedCSR or array; while a program is lowered, JAX's placeholder.
    matrices: tuple[Any, ...]
    weights: jax.Array | None
    num_rows: int = dataclasses.field(metadata={"static": True})
    contiguous: bool = dataclasses.field(default=False, metadata={"static": True})
    roles: TrainingTask = dataclasses.field(default=Roles(), metadata={"static": True})

    @classmethod
    def of(cls, examples: Examples) -> Resident:
        """Places the data, on the mesh if one is set.

        Warns if the devices of the mesh have very different shares.
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
        """For each matrix the batches of some steps: a stack of matrices, or an array
        `[steps, batch, ...]`.

        Args:
          rows: `[steps, data, n]` from `epoch_order`.
          capacities: room for the entries of a batch, or of a block of it.
        """
        every, rows = rows.reshape(len(rows), -1), self.local(rows)

        def of(matrix, nse):
            if isinstance(matrix, ShardedCSR):
                return matrix.take(rows, nse)
            if isinstance(matrix, CSR):
                # Otherwise XLA's partitioner may divide them, and then sum some entries wrongly
                # (jax 0.12.0 on CPUs, data=2 and model=4, tables that are replicated).
                return replicated(jax.vmap(lambda r: take_rows(matrix, r, nse))(every))
            return _dense_rows(matrix, rows)

        return [of(*pair) for pair in zip(self.matrices, capacities, strict=True)]

    @property
    def sparse_inputs(self) -> list[int]:
        """The places of the sparse inputs among the matrices."""
        first = enumerate(self.matrices[: len(self.roles.inputs)])
        return [i for i, x in first if isinstance(x, SparseRows)]

    def needed(self, rows: jax.Array) -> list[jax.Array]:
        """For each matrix the room that `take` needs: entries, or numbers of an array."""
        every, rows = rows.reshape(len(rows), -1), self.local(rows)

        def of(matrix):
            if isinstance(matrix, ShardedCSR):
                return matrix.fullest(rows)
            if isinstance(matrix, CSR):
                if self.roles.even:
                    # As models of tokens divide a batch.
                    size, parts = every.shape[1], num_devices()
                    parts = 1 if size % parts else parts
                    largest = parts * _largest_dealt(matrix, every, parts)
                    # The mean is the mean of each epoch, so one program serves all of
                    # them.
                    mean = size * jnp.sum(matrix.row_lengths()) / self.num_rows
                    return jnp.maximum(largest, jnp.ceil(1.01 * mean).astype(jnp.int32))
                return _largest(matrix, every)
            return jnp.int32(rows.shape[2] * math.prod(matrix.shape[2:]))

        return [of(matrix) for matrix in self.matrices]

    def loads(self) -> jax.Array:
        """`[rows]`: the entries by which rows are dealt, if `roles.even`."""
        [lengths] = (m.row_lengths() for m in self.matrices if isinstance(m, CSR))
        return lengths

    def means(self, rows: jax.Array) -> jax.Array:
        """`[steps, batch]`: the weights with which a step's losses are summed.

        They make the sum the mean of `weights_b loss_b` over the rows that exist.
        """
        exists = rows >= 0
        means = exists / jnp.sum(exists, axis=(1, 2), keepdims=True)
        if self.weights is not None:
            pick = jax.vmap(lambda w, r: w[r], in_axes=(0, 1), out_axes=1)
            means *= pick(self.weights, self.local(rows))
        return means.reshape(len(rows), -1)

    def local(self, rows: jax.Array) -> jax.Array:
        """Rows `[steps, data, n]`, counted from the first of their part; -1 is no row."""
        data = rows.shape[1]
        if self.contiguous:
            shard = jnp.arange(data, dtype=jnp.int32) * (VIRTUAL_SHARDS // data)
            place = rows - first_row(shard, self.num_rows)[None, :, None]
        else:  # see `home_rows`
            shards = VIRTUAL_SHARDS // data
            place = rows // VIRTUAL_SHARDS * shards + rows % shards
        return jnp.where(rows >= 0, place, -1)


def first_row(shard, num_rows: int):
    """The first row of a shard, if its rows follow each other. Shards are almost equal."""
    each, more = divmod(num_rows, VIRTUAL_SHARDS)
    return shard * each + shard.clip(max=more)


def home_rows(num_rows: int, data: int) -> np.ndarray:
    """`[data, rows of a part]`: the rows of each of `data` parts; -1 is no row."""
    shards = VIRTUAL_SHARDS // data
    place = np.arange(-(-num_rows // VIRTUAL_SHARDS) * shards)
    rows = place // shards * VIRTUAL_SHARDS + place % shards
    rows = rows + np.arange(data)[:, None] * shards
    return np.where(rows < num_rows, rows, -1)


def _dense_rows(parts: jax.Array, rows: jax.Array) -> jax.Array:
    """`[steps, batch, ...]` of `parts: [data, n, ...]` and `rows: [steps, data, b]`.

    -1 selects the last row of a part. Nothing moves between devices.
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
    """Entries of the fullest part of a batch, of `rows: [steps, batch]`."""

    def of_batch(lengths):
        return jnp.max(jnp.sum(lengths[dealt(lengths, parts)], axis=1))

    return jnp.max(jax.vmap(of_batch)(_lengths(matrix, rows)))


def _lengths(matrix: CSR, rows: jax.Array) -> jax.Array:
    lengths = matrix.row_lengths().at[rows].get(mode="fill", fill_value=0)
    return jnp.where(rows >= 0, lengths, 0)


def _canonical(array):
    """A NumPy array in the dtype that it has on the device."""
    if not isinstance(array, np.ndarray):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _warn_of_imbalance(what: str, matrix: ShardedCSR, mesh: jax.sharding.Mesh) -> None:
    """Warns if a device has far more than its share of the entries."""
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
