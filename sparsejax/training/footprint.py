"""The formula for the memory of a device in training; see docs/large_models.md."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import score_tiles, slopes_product
from sparsejax.data.batching import bucket
from sparsejax.mesh.layout import VIRTUAL_SHARDS, padded_rows
from sparsejax.nn import closed_form
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.ops import chunked_loss, gather_sum, item_chunks, row_update
from sparsejax.optimizers import optimizer
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.training import dispatch
from sparsejax.training.build import make_modules

# Bytes per entry of a dispatch. The transpose has its column, row and place; the starts of
# the columns are counted separately. During the sort, an entry has its column, keys, values
# and what the sort needs, as measured on an H200 with 39 million entries.
_TRANSPOSED, _SORTED = 12, 37
# Bytes per entry of a step: about ten arrays of 4 bytes; and for each of the `hidden`
# numbers of the entry's row, the sums of pieces of rows.
_STEP_ENTRY, _PIECES = 40, 1 / 8
# Bytes per row of the data while the order of an epoch is sorted, besides the order.
_ORDER_SORTED = 20
# Arrays of [batch, hidden] for each hidden layer, forward and backward.
_ACTIVATIONS = 5
# The entries of the fullest device of a mesh divided by the mean, in the readers' order.
_IMBALANCE = 1.05
# The entries of the fullest batch are 3 standard deviations above the mean. A standard
# deviation is 1.3 times the mean of a row times the root of the number of rows.
_FULLEST = 3 * 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one device; see `sparsejax.Plan`."""

    data: int
    model: int
    steps: int
    entries: int
    weights: int
    state: int
    dataset: int
    order: int
    batches: int
    hidden: int
    operand: int
    output_gradient: int
    chunk: int
    input_gradient: int
    sorting: int
    linear: int
    temporary: int
    over_data: Mapping[str, int]
    over_model: Mapping[str, int]

    @property
    def kept(self) -> int:
        """Weights, state, data set and order: what exists all the time."""
        return self.weights + self.state + self.dataset + self.order

    @property
    def total(self) -> int:
        """The peak: what is kept and the most that is temporary."""
        return self.kept + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on any mesh.

    Attributes:
      target_entries: None if the inputs are the targets.
      batch: rows of a step.
    """

    network: NetworkConfig
    rule: Rule
    inputs: int
    outputs: int
    rows: int
    entries: int
    target_entries: int | None
    values: bool
    batch: int
    fused: bool

    def modules(self) -> tuple[FeedForward, Optimizer]:
        """Model and optimizer, with shapes in place of arrays."""

        def make():
            modules = make_modules(
                self.network,
                self.rule,
                inputs=self.inputs,
                outputs=self.outputs,
                seed=0,
            )
            modules[0].train()
            return modules

        return cast(tuple[FeedForward, Optimizer], nnx.eval_shape(make))

    def matrices(self) -> list[tuple[int, int]]:
        """Entries and columns of the inputs, and of the targets if they are separate."""
        found = [(self.entries, self.inputs)]
        if self.target_entries is not None:
            found.append((self.target_entries, self.outputs))
        return found

    def rows_of(self, data: int, model: int) -> int:
        """Rows of the data set that a device has."""
        if data * model == 1:
            return self.rows
        return -(-self.rows // VIRTUAL_SHARDS) * VIRTUAL_SHARDS // data

    def entries_of(self, data: int, model: int) -> list[int]:
        """Entries of each matrix on the fullest device."""
        uneven = _IMBALANCE if data * model > 1 else 1
        return [math.ceil(e * uneven / (data * model)) for e, _ in self.matrices()]

    def capacities(self, data: int, model: int) -> list[int]:
        """Room for a batch in the fullest device's block of each matrix."""
        rows = self.batch // data
        share = (rows + _FULLEST * math.sqrt(rows)) / self.rows / model
        share *= _IMBALANCE if model > 1 else 1
        return [bucket(math.ceil(share * e)) for e, _ in self.matrices()]

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        """Shapes of the state arrays of a kernel `[2, width]`."""
        arrays = jax.eval_shape(lambda: self.rule.init((2, width)))
        return [array.shape for array in arrays.values()]

    def steps_by_elements(self, width: int) -> bool:
        """Whether a GPU program can do the rule's step on rows of this width."""
        alike = all(shape == (2, width) for shape in self.state_shapes(width))
        return self.rule.elementwise and alike


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
        part = size // math.prod(
            mesh.shape[axis]
            for axes in spec
            if axes is not None
            for axis in ((axes,) if isinstance(axes, str) else axes)
        )
        found.append(Laid(path, spec, size, part))
    return found


def _as_parameter(shape: tuple[int, ...], parameter: nnx.Variable) -> P:
    """The spec of state of this shape that belongs to the parameter."""
    spec = parameter.get_metadata().get("out_sharding", P())
    sizes = zip(shape, parameter.shape, spec, strict=False)
    return P(*(axis if size == whole else None for size, whole, axis in sizes))


def footprint(job: Job, data: int, model: int) -> Footprint:
    """What a device needs on a mesh with axes of these sizes."""
    batch, rows = job.batch // data, job.rows_of(data, model)
    itemsize = 8 if job.values else 4
    own = job.capacities(data, model)
    steps = dispatch.steps_on_gpu(dispatch.entries_of_step(own, data))
    # A device receives the entries of the whole batch that are in its columns.
    column = data * own[0]
    starts = min(column, padded_rows(job.inputs) // model)
    taken = steps * itemsize * sum(own)
    batches = taken + steps * (_TRANSPOSED * column + 4 * starts)
    batches += _STEP_ENTRY * column
    in_dispatch = taken + steps * (_SORTED - 4) * column
    sorting = max(in_dispatch, _ORDER_SORTED * rows)

    # Before training, without the data set and the order.
    linear = 0
    if job.network.linear is not None:
        sizes_of_data = job.rows, job.inputs, job.entries
        linear = closed_form.gpu_bytes(job.network.linear, *sizes_of_data)

    sizes = [layer.size for layer in job.network.hidden]
    hidden = 4 * batch * sum(sizes) * _ACTIVATIONS
    if data > 1:  # gradient of the first layer, operand and gradient of the output
        hidden += 4 * job.batch * (sizes[0] + 2 * sizes[-1])
    output = _output(job, data, model)
    input_gradient = _input_gradient(job, column, model)
    operand = output.operand if job.fused else 0  # exists during a dispatch
    stays = output.gradient + operand
    stages = output.at_once(job.fused), stays + input_gradient
    held = job.entries_of(data, model)
    laid = laid_out(job, data, model)
    over_data, over_model = _sent(job, laid, data, model, column, data * own[-1])
    return Footprint(
        data=data,
        model=model,
        steps=steps,
        entries=max(held),
        weights=sum(variable.part for variable in laid if variable.path[0] == 0),
        state=sum(variable.part for variable in laid if variable.path[0] == 1),
        dataset=sum(itemsize * n + 4 * (rows + 1) for n in held),
        order=4 * -(-job.rows // job.batch) * batch,
        batches=batches,
        hidden=hidden,
        operand=output.operand,
        output_gradient=output.gradient,
        chunk=output.chunk,
        input_gradient=input_gradient,
        sorting=sorting,
        linear=linear,
        temporary=max(
            sorting, in_dispatch + operand, batches + hidden + max(stages), linear
        ),
        over_data=over_data,
        over_model=over_model,
    )


class _Output(NamedTuple):
    """Bytes of the output's temporary arrays, and whether one chunk has all items."""

    operand: int
    gradient: int
    chunk: int
    one: bool

    def at_once(self, fused: bool) -> int:
        if self.one and not fused:  # the gradient takes the operand's place
            return max(self.operand, self.gradient) + self.chunk
        return self.operand + self.gradient + self.chunk


def _output(job: Job, data: int, model: int) -> _Output:
    layer, width, batch = job.network.output, job.network.hidden[-1].size, job.batch
    items = padded_rows(job.outputs) // (data * model)
    stored = jnp.dtype(job.network.param_dtype)
    dtype = jnp.dtype(layer.dtype or stored)
    operand = items * width * dtype.itemsize if dtype != stored else 0
    gradient = items * width * dtype.itemsize
    if layer.temperature is not None:  # factors of the scores
        operand += 4 * items
        gradient += 4 * items
    if job.fused:
        gradient = 0
    product = chunked_loss.operand_dtype(job.network.precision, dtype, batch, items)
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
    in_product = with_kernel and layer.temperature is None
    if job.fused and in_product and job.steps_by_elements(width):
        in_place = size >= items or width <= slopes_product.MAX_HIDDEN or rounded
        copied = 0 if in_place else dtype.itemsize * rows
        return _Output(operand, gradient, made + copied, size >= items)
    if size >= items:  # whole arrays are updated in place, without copies of rows
        return _Output(operand, gradient, made + job.fused * 4 * rows, True)
    read = made + (8 if with_kernel else 12) * rows
    arrays = job.state_shapes(width).count((2, width))
    moved = (8 + 4 * arrays + 2 * with_kernel) * rows
    return _Output(operand, gradient, max(read, job.fused * moved), False)


def _input_gradient(job: Job, entries: int, model: int) -> int:
    """Bytes of the gradient of the first kernel, for a batch with this many entries."""
    rule, width = job.rule, job.network.hidden[0].size
    rows = padded_rows(job.inputs) // model
    touched = 4 * min(entries, rows) * width
    if not gather_sum.mosaic_fits(rows, width, entries):
        touched = 8 * entries * width  # XLA's gather, and what is summed
    elif width < 128 and width % 8:
        touched += 4 * 128 * rows  # a copy of the kernel with wider rows
    if job.network.output.tied is not None:
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


def _sent(
    job: Job, laid: Sequence[Laid], data: int, model: int, entries: int, labels: int
):
    """Bytes that a ring sends from each device in a step, over "data" and "model".

    `entries` and `labels` are those of the whole batch in a device's columns.
    """
    network, batch = job.network, job.batch // data
    sizes = [layer.size for layer in network.hidden]

    def gathered(size: int, n: int) -> int:
        return round((n - 1) / n * size)

    def summed(size: int, n: int) -> int:
        return 2 * gathered(size, n)

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
