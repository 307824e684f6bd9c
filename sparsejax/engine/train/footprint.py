"""The formula for the memory of a device in training; see docs/large_models.md."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import score_tiles, slopes_product
from sparsejax.engine.train.resident import TrainingTask
from sparsejax.mesh.layout import VIRTUAL_SHARDS
from sparsejax.ops import chunked_loss, gather_sum, item_chunks, row_update
from sparsejax.ops.precision import Precision
from sparsejax.optimizers import optimizer
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule

# Long rows are added up in pieces. The sums of the pieces take so many bytes for each entry of a
# step and each of the `hidden` numbers of its row.
_PIECES = 1 / 8
# Bytes per row of the data while the order of an epoch is sorted, besides the order.
ORDER_SORTED = 20
# Bytes per tag of an item while tags are sorted.
_TAGS_SORTED = 40
# Parameters of the output layer that all items share.
CONTENT_KERNELS = [
    ("content", name) for name in ("tag_kernel", "vector_kernel", "log_half")
]


# Makes something in place of an array of a shape and a dtype that lies so on a mesh.
type Shape = Callable[[tuple[int, ...], Any, P], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Bytes that a device makes and sends while it trains; see `sparsejax.Plan`."""

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
    by_parts: bool = False
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
        """Weights, state, data set and order: the memory that is used all the time."""
        return self.weights + self.state + self.dataset + self.order

    @property
    def total(self) -> int:
        """The peak: the memory that is used all the time, and the most that is temporary."""
        return self.kept + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(abc.ABC):
    """A training on any mesh, by its sizes.

    Attributes:
      inputs: number of features; of a model of histories the items.
      entries: number of entries of the inputs, over all rows.
      values: whether entries have values.
      batch: rows of a step.
      fused: whether the output layer is updated without a gradient array, as `fit`
        takes it.
      content: sizes of the items' content, as `ContentSizes`, or None.
      by_parts: whether vectors with content are made part by part, and not stored.
    """

    network: Any
    rule: Rule
    inputs: int
    rows: int
    entries: int
    batch: int
    values: bool = False
    fused: bool = False
    content: Any = None
    by_parts: bool = False

    @property
    def can_be_by_parts(self) -> bool:
        """Whether there is a form of training that does not store vectors with content."""
        return False

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.inputs

    @abc.abstractmethod
    def new(self) -> tuple[Any, Optimizer]:
        """Model and optimizer."""

    def modules(self) -> tuple[Any, Optimizer]:
        """Model and optimizer, with shapes in place of arrays."""

        def make():
            model, optimizer = self.new()
            model.train()
            return model, optimizer

        return nnx.eval_shape(make)

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
    @abc.abstractmethod
    def roles(self) -> TrainingTask:
        """The roles of the matrices."""

    @abc.abstractmethod
    def placed(self, data: int, model: int, shape: Shape) -> tuple[Any, ...]:
        """The matrices on a mesh; `shape` makes the objects that stand for arrays."""

    @abc.abstractmethod
    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        """The bytes that a device makes and sends, if the variables lie so on the mesh."""


class Laid(NamedTuple):
    """A variable of the model or of the optimizer, and how it lies on a mesh.

    Attributes:
      path: its path in `nnx.state((model, optimizer))`.
      spec: which of its axes lie over which axis of the mesh.
      size: bytes of the whole.
      part: bytes on each device.
    """

    path: tuple[Any, ...]
    spec: P
    size: int
    part: int


def laid_out(job: Workload, data: int, model: int) -> list[Laid]:
    """How the variables of model and optimizer lie on a mesh of these axes.

    The metadata of a variable says it. The optimizer's state of a hidden layer's parameter
    has no such metadata: it lies as the parameter does, except for axes of another size.
    """
    mesh = AbstractMesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    with jax.sharding.use_abstract_mesh(mesh):
        variables = nnx.to_flat_state(nnx.state(job.modules()))
    parameters = {}
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


def footprint(job: Workload, data: int, model: int) -> Footprint:
    """The memory of a device on a mesh with axes of these sizes."""

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


def fitting[Job: Workload](
    job: Job, data: int, model: int, memory: int | None
) -> tuple[Job, Footprint]:
    """The job, and its memory on such a mesh: by parts if it fits only so.

    Args:
      job: a training that stores all vectors.
      data: size of the mesh's axis.
      model: size of the mesh's axis "model".
      memory: memory of a device; None if it is not known.
    """
    found = footprint(job, data, model)
    if memory is None or found.total <= memory or not job.can_be_by_parts:
        return job, found
    other = dataclasses.replace(job, by_parts=True)
    made = footprint(other, data, model)
    return (other, made) if made.total <= memory else (job, found)


class Scored(NamedTuple):
    """An output layer, and the rows and items that it scores.

    Attributes:
      rows: number of rows of the whole batch.
      items: rows of the kernel that the device has.
      width: width of the kernel.
      stored: dtype of the kernel.
      dtype: dtype of the operands of the products.
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


def output_bytes(job: Workload, scored: Scored) -> Output:
    """Bytes of the loss over all items, a chunk of items at a time, and its gradients."""
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


def with_content(
    job: Workload, output: Output, scored: Scored, chunk_items: int, sorted_tags: int
) -> Output:
    """The output's arrays where its operand is the sum of the items' rows and content.

    Vectors of `chunk_items` items are made at a time, and `sorted_tags` tags are sorted.
    """
    if job.content is None:
        return output
    _, items, width, stored, dtype, *_ = scored
    operand, gradient = output.operand, output.gradient
    if dtype == stored:  # else the operand is it
        operand += items * width * dtype.itemsize
    else:  # in the type of the rows, whose gradient takes its place
        gradient += items * width * stored.itemsize
    rows = min(items, chunk_items)
    # The sum, its slopes and the gradient of the rows, and content as an operand.
    chunk = 4 * rows * (3 * width + job.content.vectors)
    if tags := job.content.tags:  # sorted by parts, which have two sums of all tags
        some = min(256 * job.content.entries, sorted_tags)
        chunk = max(chunk, _TAGS_SORTED * some + 8 * tags * width)
    least = items * width * dtype.itemsize  # E's gradient, if the softmax makes none
    return Output(operand, max(gradient, least), max(output.chunk, chunk), False)


def input_gradient(
    job: Workload, entries: int, rows: int, width: int, *, dense: bool
) -> int:
    """Bytes of the gradient of a kernel `[rows, width]` of which a batch reads rows.

    Args:
      job: the training.
      entries: how many of them the batch reads.
      rows: number of rows of the kernel, on a device.
      width: width of the kernel.
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


def gathered(size: int, n: int) -> int:
    """Bytes that each device of a ring of n sends to gather an array of this size."""
    return round((n - 1) / n * size)


def summed(size: int, n: int) -> int:
    """Bytes that each device of a ring of n sends to sum arrays of this size."""
    return 2 * gathered(size, n)
