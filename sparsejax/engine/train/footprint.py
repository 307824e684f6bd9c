"""Estimates the memory that training needs on a device; see docs/large_models.md."""

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

# Long rows are summed in pieces. Partial sums take this many bytes for each entry of a step, times
# `hidden`, the width of the entry's row.
_PIECES = 1 / 8
# Bytes for each row of the data, for sorting the order of an epoch, besides the order itself.
ORDER_SORTED = 20
# Bytes for each tag of an item, for sorting tags.
_TAGS_SORTED = 40
# Parameters of the output layer that do not belong to single items.
CONTENT_KERNELS = [
    ("content", name) for name in ("tag_kernel", "vector_kernel", "log_half")
]


# Makes a placeholder for an array from its shape, its dtype and its spec on a mesh.
type Shape = Callable[[tuple[int, ...], Any, P], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Bytes that a device allocates and sends during training; see `sparsejax.Plan`."""

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
        """Permanent memory: weights, optimizer state, data set and order."""
        return self.weights + self.state + self.dataset + self.order

    @property
    def total(self) -> int:
        """Peak memory: the permanent memory plus the largest temporary memory."""
        return self.kept + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(abc.ABC):
    """A training on an arbitrary mesh, described by its sizes.

    Attributes:
      inputs: number of features; for a model of histories the number of items.
      entries: number of entries of the inputs over all rows.
      values: whether entries have values.
      batch: number of rows in a step.
      fused: whether the output layer is updated without a gradient array, as in `fit`.
      content: sizes of the items' content, a `ContentSizes`, or None.
      by_parts: whether item vectors with content are computed part by part, and not stored.
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
        """Whether training is possible without storing item vectors with content."""
        return False

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.inputs

    @abc.abstractmethod
    def new(self) -> tuple[Any, Optimizer]:
        """Makes the model and the optimizer."""

    def modules(self) -> tuple[Any, Optimizer]:
        """Makes the model and the optimizer, with shapes in place of arrays."""

        def make():
            model, optimizer = self.new()
            model.train()
            return model, optimizer

        return nnx.eval_shape(make)

    def rows_of(self, data: int, model: int) -> int:
        """Number of rows of the data set on each device."""
        if data * model == 1:
            return self.rows
        return -(-self.rows // VIRTUAL_SHARDS) * VIRTUAL_SHARDS // data

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        """Shapes of the optimizer's state arrays for a kernel `[2, width]`."""
        arrays = jax.eval_shape(lambda: self.rule.init((2, width)))
        return [array.shape for array in arrays.values()]

    def steps_by_elements(self, width: int) -> bool:
        """Whether a GPU program can apply the optimizer's rule to rows of this width."""
        alike = all(shape == (2, width) for shape in self.state_shapes(width))
        return self.rule.elementwise and alike

    @abc.abstractmethod
    def entries_of(self, data: int, model: int) -> list[int]:
        """Number of entries of each sparse matrix on the fullest device."""

    @abc.abstractmethod
    def capacities(self, data: int, model: int) -> list[int]:
        """Capacity of each matrix for the fullest device's block of a batch."""

    @property
    @abc.abstractmethod
    def roles(self) -> TrainingTask:
        """The task, which defines the roles of the matrices."""

    @abc.abstractmethod
    def placed(self, data: int, model: int, shape: Shape) -> tuple[Any, ...]:
        """The data's matrices on a mesh of `data` by `model` devices.

        In place of each array they have the result of `shape(size, dtype, spec)`.
        """

    @abc.abstractmethod
    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        """Bytes that a device allocates and sends, if the variables are laid out as `laid`
        states.
        """


class Laid(NamedTuple):
    """A variable of the model or the optimizer, and its layout on a mesh.

    Attributes:
      path: its path in `nnx.state((model, optimizer))`.
      spec: mesh axis over which each of its axes is divided.
      size: number of bytes of the whole variable.
      part: number of bytes on each device.
    """

    path: tuple[Any, ...]
    spec: P
    size: int
    part: int


def laid_out(job: Workload, data: int, model: int) -> list[Laid]:
    """The layout of the variables of model and optimizer on a mesh with axes of these sizes.

    The metadata of a variable states its layout. The optimizer's state for a hidden layer has no
    such metadata: it is laid out like its parameter, except for axes of another size.
    """
    mesh = AbstractMesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    with jax.sharding.use_abstract_mesh(mesh):
        variables = nnx.to_flat_state(nnx.state(job.modules()))
    parameters = {}
    found = []
    # The model's variables come before the optimizer's.
    for path, variable in variables:
        spec = variable.get_metadata().get("out_sharding", P())
        if path[0] == 0:
            parameters["/".join(map(str, path[1:]))] = variable
        elif path[-1] in parameters:
            spec = _as_parameter(variable.shape, parameters[path[-1]])
        size = variable.size * variable.dtype.itemsize
        found.append(Laid(path, spec, size, size // _parts(spec, data, model)))
    return found


def _parts(spec: P, data: int, model: int) -> int:
    """Number of parts into which a mesh with axes of these sizes divides an array."""
    sizes = {"data": data, "model": model}
    return math.prod(
        sizes[axis]
        for axes in spec
        if axes is not None
        for axis in ((axes,) if isinstance(axes, str) else axes)
    )


def _as_parameter(shape: tuple[int, ...], parameter: nnx.Variable) -> P:
    """The spec for an optimizer state of this shape that belongs to a parameter."""
    spec = parameter.get_metadata().get("out_sharding", P())
    sizes = zip(shape, parameter.shape, spec, strict=False)
    return P(*(axis if size == whole else None for size, whole, axis in sizes))


def footprint(job: Workload, data: int, model: int) -> Footprint:
    """Estimates the memory of a device on a mesh with axes of these sizes."""

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
    """Chooses whether item vectors are stored; returns the job, and its memory on such a mesh.

    Args:
      job: a training that stores all item vectors.
      data: size of the mesh's axis "data".
      model: size of the mesh's axis "model".
      memory: bytes of memory of a device; None if unknown.
    """
    found = footprint(job, data, model)
    if memory is None or found.total <= memory or not job.can_be_by_parts:
        return job, found
    other = dataclasses.replace(job, by_parts=True)
    made = footprint(other, data, model)
    return (other, made) if made.total <= memory else (job, found)


class Scored(NamedTuple):
    """An output layer, and the numbers of rows and items that it scores.

    Attributes:
      rows: number of rows in the whole batch.
      items: number of kernel rows on the device.
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
    """Bytes of the temporary arrays of an output layer, and whether a single chunk has all
    items.
    """

    operand: int
    gradient: int
    chunk: int
    one: bool

    def at_once(self, fused: bool) -> int:
        if self.one and not fused:  # the gradient reuses the memory of the operand
            return max(self.operand, self.gradient) + self.chunk
        return self.operand + self.gradient + self.chunk


def output_bytes(job: Workload, scored: Scored) -> Output:
    """Bytes of a loss over all items, computed a chunk of items at a time, and of its
    gradients.
    """
    batch, items, width, stored, dtype, temperature, precision = scored
    operand = items * width * dtype.itemsize if dtype != stored else 0
    gradient = items * width * dtype.itemsize
    if temperature is not None:  # bytes for the scale factors of cosine scores
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
    # Score gradients, and a bit for each label. Without a kernel: scores and label positions; with
    # weights also label values.
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
    # Without chunks, whole arrays are updated in place, without copies of rows.
    if size >= items:
        return Output(operand, gradient, made + job.fused * 4 * rows, True)
    read = made + (8 if with_kernel else 12) * rows
    arrays = job.state_shapes(width).count((2, width))
    moved = (8 + 4 * arrays + 2 * with_kernel) * rows
    return Output(operand, gradient, max(read, job.fused * moved), False)


def with_content(
    job: Workload, output: Output, scored: Scored, chunk_items: int, sorted_tags: int
) -> Output:
    """Adds memory for item vectors that are the sums of learned rows and content.

    Vectors of `chunk_items` items are computed at a time, and `sorted_tags` tags are sorted.
    """
    if job.content is None:
        return output
    _, items, width, stored, dtype, *_ = scored
    operand, gradient = output.operand, output.gradient
    if dtype == stored:  # otherwise the operand is the sum itself
        operand += items * width * dtype.itemsize
    else:  # in the dtype of the rows; their gradient reuses the memory
        gradient += items * width * stored.itemsize
    rows = min(items, chunk_items)
    # Bytes of item vectors, their gradient, the gradient of the rows, and content as an operand.
    chunk = 4 * rows * (3 * width + job.content.vectors)
    if tags := job.content.tags:  # tags sorted by parts, and two sums for each tag
        some = min(256 * job.content.entries, sorted_tags)
        chunk = max(chunk, _TAGS_SORTED * some + 8 * tags * width)
    # Gradient of the item vectors, if the softmax needs no separate operand.
    least = items * width * dtype.itemsize
    return Output(operand, max(gradient, least), max(output.chunk, chunk), False)


def input_gradient(
    job: Workload, entries: int, rows: int, width: int, *, dense: bool
) -> int:
    """Bytes of the gradient of a kernel `[rows, width]` from which a batch gathers rows.

    Args:
      job: sizes of the training.
      entries: number of rows that the batch gathers.
      rows: number of kernel rows on a device.
      width: width of the kernel.
      dense: whether a gradient of all rows is computed, too.
    """
    rule = job.rule
    touched = 4 * min(entries, rows) * width
    if not gather_sum.mosaic_fits(rows, width, entries):
        touched = 8 * entries * width  # gathered rows, and the sums of their gradients
    elif width < 128 and width % 8:
        touched += 4 * 128 * rows  # a copy of the kernel with padded rows
    if dense:
        return touched + 4 * rows * width
    if rule.drifts and optimizer.updates_whole(rows, entries):
        return touched + 4 * rows * width
    in_program = job.steps_by_elements(width) or rule.by_row
    in_program &= row_update.takes_rows(width, by_row=rule.by_row)
    if in_program and not rule.drifts:
        # One GPU program sums gradients and updates rows, without an array of gradients.
        return int(_PIECES * entries * width)
    return touched


def gathered(size: int, n: int) -> int:
    """Bytes that each of n devices sends to gather an array of this size, in a ring."""
    return round((n - 1) / n * size)


def summed(size: int, n: int) -> int:
    """Bytes that each of n devices sends to sum arrays of this size, in a ring."""
    return 2 * gathered(size, n)
