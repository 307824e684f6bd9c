"""The formula for the memory of a device in training; see docs/large_models.md."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import score_tiles, slopes_product
from sparsejax.data.batching import bucket
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import VIRTUAL_SHARDS, padded_rows
from sparsejax.nn import closed_form
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.ops import chunked_loss, gather_sum, item_chunks, row_update
from sparsejax.ops.precision import Precision
from sparsejax.optimizers import optimizer
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.model import SequenceModel
from sparsejax.sparse import CSR
from sparsejax.training import dispatch
from sparsejax.training.build import make_modules
from sparsejax.training.resident import Roles, Task

# Bytes per entry of a dispatch. The transpose has its column, row and place; the starts of
# the columns are counted separately. During the sort, an entry has its column, keys, values
# and what the sort needs, as measured on an H200 with 39 million entries.
_TRANSPOSED, _SORTED = 12, 37
# Bytes per entry of a step: about ten arrays of 4 bytes; and for each of the `hidden`
# numbers of the entry's row, the sums of pieces of rows.
_STEP_ENTRY, _PIECES = 40, 1 / 8
# Bytes per row of the data while the order of an epoch is sorted, besides the order.
ORDER_SORTED = 20
# Arrays of [batch, hidden] for each hidden layer, forward and backward.
_ACTIVATIONS = 5
# The entries of the fullest device of a mesh divided by the mean, in the readers' order.
_IMBALANCE = 1.05
# The entries of the fullest batch are 3 standard deviations above the mean. A standard
# deviation is 1.3 times the mean of a row times the root of the number of rows.
_FULLEST = 3 * 1.3


# Makes something in place of an array of a shape and a dtype that lies so on a mesh.
type Shape = Callable[[tuple[int, ...], Any, P], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a device makes and sends while it trains, in bytes; see `sparsejax.Plan`."""

    steps: int
    batches: int
    hidden: int
    operand: int
    output_gradient: int
    chunk: int
    input_gradient: int
    sorting: int
    linear: int = 0
    temporary: int
    over_data: Mapping[str, int]
    over_model: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint(Step):
    """Bytes on one device; see `sparsejax.Plan`."""

    data: int
    model: int
    entries: int
    weights: int
    state: int
    dataset: int
    order: int

    @property
    def kept(self) -> int:
        """Weights, state, data set and order: what exists all the time."""
        return self.weights + self.state + self.dataset + self.order

    @property
    def total(self) -> int:
        """The peak: what is kept and the most that is temporary."""
        return self.kept + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """What is to be trained, on any mesh.

    Attributes:
      inputs: number of features; of a model of histories the items.
      entries: of the inputs, over all rows.
      values: whether entries have values.
      batch: rows of a step.
      fused: as `fit` takes it.
    """

    network: NetworkConfig | SequenceConfig
    rule: Rule
    inputs: int
    rows: int
    entries: int
    batch: int
    values: bool = False
    fused: bool = False

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.inputs

    def modules(self) -> tuple[FeedForward | SequenceModel, Optimizer]:
        """Model and optimizer, with shapes in place of arrays."""

        def make():
            modules = make_modules(
                self.network,
                self.rule,
                inputs=self.inputs,
                outputs=self.num_items,
                seed=0,
            )
            modules[0].train()
            return modules

        return cast(tuple[FeedForward | SequenceModel, Optimizer], nnx.eval_shape(make))

    def rows_of(self, data: int, model: int) -> int:
        """Rows of the data set that a device has."""
        if data * model == 1:
            return self.rows
        return -(-self.rows // VIRTUAL_SHARDS) * VIRTUAL_SHARDS // data

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        """Shapes of the state arrays of a kernel `[2, width]`."""
        arrays = jax.eval_shape(lambda: self.rule.init((2, width)))
        return [array.shape for array in arrays.values()]

    def steps_by_elements(self, width: int) -> bool:
        """Whether a GPU program can do the rule's step on rows of this width."""
        alike = all(shape == (2, width) for shape in self.state_shapes(width))
        return self.rule.elementwise and alike

    @abc.abstractmethod
    def entries_of(self, data: int, model: int) -> list[int]:
        """Entries of each sparse matrix on the fullest device."""

    @abc.abstractmethod
    def capacities(self, data: int, model: int) -> list[int]:
        """Room for a batch in the fullest device's block of each matrix."""

    @property
    def roles(self) -> Task:
        """What the matrices are."""
        return Roles()

    @abc.abstractmethod
    def placed(self, data: int, model: int, shape: Shape) -> tuple[Any, ...]:
        """The matrices on a mesh; `shape` makes what takes the place of arrays."""

    @abc.abstractmethod
    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        """What a device makes and sends, if the variables lie so on the mesh."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkJob(Job):
    """A network that is to be trained.

    Attributes:
      target_entries: None if the inputs are the targets.
    """

    network: NetworkConfig
    outputs: int
    target_entries: int | None

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.outputs

    def sizes(self) -> list[tuple[int, int]]:
        """Entries and columns of the inputs, and of the targets if they are separate."""
        found = [(self.entries, self.inputs)]
        if self.target_entries is not None:
            found.append((self.target_entries, self.outputs))
        return found

    def entries_of(self, data: int, model: int) -> list[int]:
        uneven = _IMBALANCE if data * model > 1 else 1
        return [math.ceil(e * uneven / (data * model)) for e, _ in self.sizes()]

    def capacities(self, data: int, model: int) -> list[int]:
        rows = self.batch // data
        share = (rows + _FULLEST * math.sqrt(rows)) / self.rows / model
        share *= _IMBALANCE if model > 1 else 1
        return [bucket(math.ceil(share * e)) for e, _ in self.sizes()]

    def placed(self, data: int, model: int, shape: Shape) -> tuple[Any, ...]:
        is_mesh = data * model > 1
        parts, spec = ((data, model), P("data", "model")) if is_mesh else ((), P())
        rows = self.rows_of(data, model)

        def matrix(entries: int, columns: int):
            width = padded_rows(columns) // model if is_mesh else columns
            leaves = (
                shape((*parts, entries), jnp.float32, spec) if self.values else None,
                shape((*parts, entries), jnp.int32, spec),
                shape((*parts, rows + 1), jnp.int32, spec),
                None,
            )
            block = CSR.tree_unflatten(width, leaves)
            return ShardedCSR(block, num_cols=columns) if is_mesh else block

        columns = [columns for _, columns in self.sizes()]
        held = self.entries_of(data, model)
        return tuple(map(matrix, held, columns))

    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        batch, rows = self.batch // data, self.rows_of(data, model)
        itemsize = 8 if self.values else 4
        own = self.capacities(data, model)
        steps = dispatch.steps_on_gpu(dispatch.entries_of_step(own, data))
        # A device receives the entries of the whole batch that are in its columns.
        column = data * own[0]
        kernel_rows = padded_rows(self.inputs) // model
        starts = min(column, kernel_rows)
        taken = steps * itemsize * sum(own)
        batches = taken + steps * (_TRANSPOSED * column + 4 * starts)
        batches += _STEP_ENTRY * column
        in_dispatch = taken + steps * (_SORTED - 4) * column
        sorting = max(in_dispatch, ORDER_SORTED * rows)

        # Before training, without the data set and the order.
        network, linear = self.network, 0
        if network.linear is not None:
            sizes_of_data = self.rows, self.inputs, self.entries
            linear = closed_form.gpu_bytes(network.linear, *sizes_of_data)

        sizes = [layer.size for layer in network.hidden]
        hidden = 4 * batch * sum(sizes) * _ACTIVATIONS
        if data > 1:  # gradient of the first layer, operand and gradient of the output
            hidden += 4 * self.batch * (sizes[0] + 2 * sizes[-1])
        stored = jnp.dtype(network.param_dtype)
        scored = Scored(
            rows=self.batch,
            items=padded_rows(self.outputs) // (data * model),
            width=sizes[-1],
            stored=stored,
            dtype=jnp.dtype(network.output.dtype or stored),
            temperature=network.output.temperature,
            precision=network.precision,
        )
        output = output_bytes(self, scored)
        tied = network.output.tied is not None
        first = sizes[0]
        touched = input_gradient(self, column, kernel_rows, first, dense=tied)
        operand = output.operand if self.fused else 0  # exists during a dispatch
        stays = output.gradient + operand
        stages = output.at_once(self.fused), stays + touched
        over_data, over_model = _sent(self, laid, data, model, column, data * own[-1])
        return Step(
            steps=steps,
            batches=batches,
            hidden=hidden,
            operand=output.operand,
            output_gradient=output.gradient,
            chunk=output.chunk,
            input_gradient=touched,
            sorting=sorting,
            linear=linear,
            temporary=max(
                sorting, in_dispatch + operand, batches + hidden + max(stages), linear
            ),
            over_data=over_data,
            over_model=over_model,
        )


class Laid(NamedTuple):
    """A variable of the model or of the optimizer, and how it lies on a mesh.

    Attributes:
      path: where it is in `nnx.state((model, optimizer))`.
      spec: which of its axes lie over which axis of the mesh.
      size: bytes of the whole.
      part: bytes on each device.
    """

    path: tuple[Any, ...]
    spec: P
    size: int
    part: int


def laid_out(job: Job, data: int, model: int) -> list[Laid]:
    """How the variables of model and optimizer lie on a mesh of these axes.

    The metadata of a variable says it. The optimizer's state of a hidden layer's parameter
    has no such metadata: it lies as the parameter does, except for axes of another size.
    """
    mesh = AbstractMesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    with jax.sharding.use_abstract_mesh(mesh):
        variables = nnx.to_flat_state(nnx.state(job.modules()))
    parameters: dict[Any, nnx.Variable] = {}
    found = []
    for path, variable in variables:  # the model's come first
        spec = variable.get_metadata().get("out_sharding", P())
        if path[0] == 0:
            parameters["/".join(map(str, path[1:]))] = variable
        elif path[-1] in parameters:
            spec = _as_parameter(variable.shape, parameters[path[-1]])
        size = variable.size * variable.dtype.itemsize
        found.append(Laid(path, spec, size, size // _parts(spec, data, model)))
    return found


def _parts(spec: P, data: int, model: int) -> int:
    """The number of parts into which a mesh of these axes divides an array."""
    sizes = {"data": data, "model": model}
    return math.prod(
        sizes[axis]
        for axes in spec
        if axes is not None
        for axis in ((axes,) if isinstance(axes, str) else axes)
    )


def _as_parameter(shape: tuple[int, ...], parameter: nnx.Variable) -> P:
    """The spec of state of this shape that belongs to the parameter."""
    spec = parameter.get_metadata().get("out_sharding", P())
    sizes = zip(shape, parameter.shape, spec, strict=False)
    return P(*(axis if size == whole else None for size, whole, axis in sizes))


def footprint(job: Job, data: int, model: int) -> Footprint:
    """What a device needs on a mesh with axes of these sizes."""

    def part(size: tuple[int, ...], dtype: Any, spec: P) -> int:
        whole = math.prod(size) * jnp.dtype(dtype).itemsize
        return whole // _parts(spec, data, model)

    laid = laid_out(job, data, model)
    return Footprint(
        **vars(job.step(data, model, laid)),
        data=data,
        model=model,
        entries=max(job.entries_of(data, model)),
        weights=sum(variable.part for variable in laid if variable.path[0] == 0),
        state=sum(variable.part for variable in laid if variable.path[0] == 1),
        dataset=sum(jax.tree.leaves(job.placed(data, model, part))),
        order=4 * -(-job.rows // job.batch) * (job.batch // data),
    )


class Scored(NamedTuple):
    """An output layer, and what it scores.

    Attributes:
      rows: of the whole batch.
      items: rows of the kernel that the device has.
      width: of the kernel.
      stored: dtype of the kernel.
      dtype: that of the operands of the products.
    """

    rows: int
    items: int
    width: int
    stored: jnp.dtype
    dtype: jnp.dtype
    temperature: float | None
    precision: Precision


class Output(NamedTuple):
    """Bytes of the output's temporary arrays, and whether one chunk has all items."""

    operand: int
    gradient: int
    chunk: int
    one: bool

    def at_once(self, fused: bool) -> int:
        if self.one and not fused:  # the gradient takes the operand's place
            return max(self.operand, self.gradient) + self.chunk
        return self.operand + self.gradient + self.chunk


def output_bytes(job: Job, scored: Scored) -> Output:
    """Of the loss over all items, a chunk of items at a time, and its gradients."""
    batch, items, width, stored, dtype, temperature, precision = scored
    operand = items * width * dtype.itemsize if dtype != stored else 0
    gradient = items * width * dtype.itemsize
    if temperature is not None:  # factors of the scores
        operand += 4 * items
        gradient += 4 * items
    if job.fused:
        gradient = 0
    product = chunked_loss.operand_dtype(precision, dtype, batch, items)
    with_kernel = not job.values and not score_tiles.unsupported(width, items, product)
    budget = chunked_loss.GPU_CHUNK_SCORES
    if with_kernel:
        batch = -(-batch // score_tiles.TILE_ROWS) * score_tiles.TILE_ROWS
        budget = chunked_loss.mosaic_chunk_scores(batch)
    size = item_chunks.chunk_size(batch, items, budget)
    scores, rows = batch * size, size * width
    # Slopes and the bits of labels. Or scores, and where labels are; or also their values.
    made = 2 * scores + scores // 8 if with_kernel else 5 * scores
    if job.values:
        made = 17 * scores
    if rounded := with_kernel and product != dtype:
        made += product.itemsize * rows
    in_product = with_kernel and temperature is None
    if job.fused and in_product and job.steps_by_elements(width):
        in_place = size >= items or width <= slopes_product.MAX_HIDDEN or rounded
        copied = 0 if in_place else dtype.itemsize * rows
        return Output(operand, gradient, made + copied, size >= items)
    if size >= items:  # whole arrays are updated in place, without copies of rows
        return Output(operand, gradient, made + job.fused * 4 * rows, True)
    read = made + (8 if with_kernel else 12) * rows
    arrays = job.state_shapes(width).count((2, width))
    moved = (8 + 4 * arrays + 2 * with_kernel) * rows
    return Output(operand, gradient, max(read, job.fused * moved), False)


def input_gradient(
    job: Job, entries: int, rows: int, width: int, *, dense: bool
) -> int:
    """Bytes of the gradient of a kernel `[rows, width]` of which a batch reads rows.

    Args:
      job: what is trained.
      entries: how many of them the batch reads.
      rows: of the kernel, on a device.
      width: of the kernel.
      dense: whether a gradient of all rows is made, too.
    """
    rule = job.rule
    touched = 4 * min(entries, rows) * width
    if not gather_sum.mosaic_fits(rows, width, entries):
        touched = 8 * entries * width  # XLA's gather, and what is summed
    elif width < 128 and width % 8:
        touched += 4 * 128 * rows  # a copy of the kernel with wider rows
    if dense:
        return touched + 4 * rows * width
    if rule.drifts and optimizer.updates_whole(rows, entries):
        return touched + 4 * rows * width
    in_program = job.steps_by_elements(width) or rule.by_row
    in_program &= row_update.takes_rows(width, by_row=rule.by_row)
    if in_program and not rule.drifts:
        return int(_PIECES * entries * width)  # one GPU program sums and moves
    return touched


def _is_between(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is not the first kernel and not in the output."""
    return path[0] == 0 and path[1] != "output" and path[1:] != ("first", "kernel")


def gathered(size: int, n: int) -> int:
    """Bytes that each device of a ring of n sends to gather an array of this size."""
    return round((n - 1) / n * size)


def summed(size: int, n: int) -> int:
    """Bytes that each device of a ring of n sends to sum arrays of this size."""
    return 2 * gathered(size, n)


def _sent(
    job: NetworkJob,
    laid: Sequence[Laid],
    data: int,
    model: int,
    entries: int,
    labels: int,
):
    """Bytes that a ring sends from each device in a step, over "data" and "model".

    `entries` and `labels` are those of the whole batch in a device's columns.
    """
    network, batch = job.network, job.batch // data
    sizes = [layer.size for layer in network.hidden]

    over_data, over_model = {}, {}
    if network.loss == "softmax_cross_entropy":
        # A ring through all devices.
        over = over_data if data > 1 else over_model
        n = data * model
        if n > 1:
            over["normalisers"] = gathered(4 * 4 * job.batch * n, n)
    if model > 1:
        over_model["sums of the first layer"] = summed(4 * batch * sizes[0], model)
        over_model["gradient of the last hidden layer"] = summed(
            4 * batch * sizes[-1], model
        )
        between = 0
        for i, (before, size) in enumerate(itertools.pairwise(sizes)):
            if i % 2 == 1 and before % model == 0:  # inputs in parts: sums
                between += summed(4 * batch * size, model)
            elif i % 2 == 0 and size % model == 0:
                between += summed(4 * batch * before, model)  # outputs: backward
                if i + 2 == len(sizes):  # no layer takes the parts
                    between += gathered(4 * batch * size, model)
        if between:
            over_model["between hidden layers"] = between
    if data > 1:
        operand = jnp.dtype(network.output.dtype or network.param_dtype)
        of_input = network.input
        valued = job.values or of_input.normalize or of_input.corruption > 0
        over_data["entries of the batch"] = gathered(
            (12 if valued else 8) * entries, data
        )
        over_data["entries of the labels"] = gathered(
            (12 if job.values else 8) * labels, data
        )
        over_data["hidden vectors of the batch"] = gathered(
            operand.itemsize * job.batch * sizes[-1], data
        )
        over_data["gradient of the last hidden layer"] = gathered(
            4 * job.batch * sizes[-1], data
        )
        over_data["gradient of the first layer"] = gathered(
            4 * job.batch * sizes[0], data
        )
        over_data["sums of hidden gradients"] = summed(
            sum(v.part for v in laid if _is_between(v.path)), data
        )
        if network.output.tied is not None:
            kernel = 4 * padded_rows(job.inputs) // model * sizes[0]
            over_data["tied kernel and its gradient"] = gathered(kernel, data) + summed(
                kernel, data
            )
    return over_data, over_model
