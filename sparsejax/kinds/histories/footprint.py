"""Estimates the memory of training a model of histories; see docs/large_models.md."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import slopes_product
from pallas_kernels.matmul_tiles import STEP
from sparsejax.engine.batching import bucket, close_bucket
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.footprint import (
    CONTENT_KERNELS,
    ORDER_SORTED,
    Laid,
    Output,
    Scored,
    Shape,
    Step,
    Workload,
    fitting,
    gathered,
    input_gradient,
    output_bytes,
    summed,
    with_content,
)
from sparsejax.engine.train.resident import TrainingTask
from sparsejax.kinds.content import content_of
from sparsejax.kinds.histories.job import SequenceTask
from sparsejax.kinds.histories.next_items import has_times
from sparsejax.kinds.kind import Maker
from sparsejax.mesh.exchange import slots_for_each
from sparsejax.mesh.layout import device_memory, padded_rows, parts_of_axes
from sparsejax.nn.content_vectors import CHUNK_ITEMS, SORTED_TAGS
from sparsejax.ops import chunked_loss, two_passes
from sparsejax.ops.history_attention import scores_at_once
from sparsejax.optimizers.optimizer import Optimizer, updates_whole
from sparsejax.options.planning import Plan
from sparsejax.sequence.build import build_sequence_model, model_of
from sparsejax.sequence.config import AttentionConfig, SequenceConfig, operand_dtype
from sparsejax.sequence.events import EventSizes
from sparsejax.sequence.model import Asked, SequenceModel, TokenModel
from sparsejax.sparse import CSR

# Number of [tokens, width] float32 arrays, besides the activations that are stored for the
# backward pass: gradients, and random bits for dropout.
_GRADIENTS = 16
# Number of [targets, width] float32 arrays: the hidden vectors of targets, and gradients.
_OF_TARGETS = 4
# Number of float32 arrays as large as the attention scores: weights and gradients.
_OF_SCORES = 5
# If device memory is at least this many times the size of the item vectors, all of them are
# stored.
_FEW_VECTORS = 20
# Number of quantiles of the length distribution.
_QUANTILES = 1000


def assumed_lengths(rows: int, entries: int) -> np.ndarray:
    """Assumed lengths of histories with the given mean; each length stands for equally many rows.

    A trainable history has at least 2 entries. The part above 2 is lognormal, with a standard
    deviation of 1.3 times its mean.

    >>> lengths = assumed_lengths(10, 200)
    >>> float(lengths.min()) > 2, round(float(lengths.mean()))
    (True, 20)

    Raises:
      ValueError: there are fewer than two entries for each row.
    """
    if entries < 2 * rows:
        raise ValueError(
            "rows must have two entries or more each, an item and the next, to be trained "
            f"on: got entries={entries:,} for rows={rows:,}"
        )
    normal = statistics.NormalDist()
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    drawn = np.exp([normal.inv_cdf(place) for place in places])
    return 2 + (entries / rows - 2) * drawn / drawn.mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryWorkload(Workload):
    """Sizes of a training of a model of histories.

    Attributes:
      times: whether the model reads times.
      events: sizes of the event columns that the model reads; None if it reads none.
    """

    network: SequenceConfig
    times: bool
    events: EventSizes | None = None

    @property
    def _columns(self) -> dict[str, tuple[int, ...]]:
        """The shape of an event's value in each event column."""
        return {} if self.events is None else self.events.shapes

    @property
    def _user_columns(self) -> dict[str, tuple[int, ...]]:
        """The shape of a user's value in each user column."""
        return {} if self.events is None else self.events.user_shapes

    @property
    def _places(self) -> int:
        """Number of positions that the model reads. User columns add one position at the front."""
        return self.network.max_length + bool(self._user_columns)

    @property
    def window(self) -> int:
        """Number of positions in a row: the model's, and one more that is only a target."""
        return self.network.max_length + 1

    def _targets(self) -> np.ndarray:
        """Number of positions that have a next item, for each assumed length of a history."""
        lengths = assumed_lengths(self.rows, self.entries)
        return np.minimum(lengths, self.window) - self.window + self._places

    def entries_of(self, data: int, model: int) -> list[int]:
        return [math.ceil(self.rows * self._targets().mean())]

    def capacities(self, data: int, model: int) -> list[int]:
        room = close_bucket if self._of_tokens else bucket
        windows = room(self.batch // data * self.window)
        targets, rows = self._targets(), self.batch
        fullest = rows * targets.mean()
        if not self._of_tokens:
            # For the fullest batch, 3 standard deviations above the mean are assumed.
            fullest += 3 * math.sqrt(rows) * targets.std()
        most = min(math.ceil(fullest), rows * self._places)
        of_events = [windows * math.prod(shape) for shape in self._columns.values()]
        of_events += [
            room(self.batch // data * math.prod(shape))
            for shape in self._user_columns.values()
        ]
        return [windows] * (1 + self.times) + of_events + [room(most)]

    @property
    def roles(self) -> TrainingTask:
        columns = *self._columns, *self._user_columns
        return SequenceTask(True, self._of_tokens, columns)

    @property
    def _of_tokens(self) -> bool:
        """Whether the model packs tokens and computes nothing for padding."""
        return issubclass(model_of(self.network), TokenModel)

    def _parts(self, data: int, model: int) -> int:
        """Number of parts into which the layers divide a batch."""
        if not self._of_tokens:
            return data
        return 1 if self.batch % (data * model) else data * model

    def _read(self, data: int, model: int) -> int:
        """Number of tokens in each part of a batch."""
        if self._of_tokens:
            return -(-self.capacities(data, model)[-1] // self._parts(data, model))
        return self.batch // data * self._places

    def _asked(self, data: int, model: int) -> Asked | None:
        """Number of items whose vectors each device requests; None if it requests none."""
        parts, drawn = self._parts(data, model), self.network.negatives
        if drawn is None or self.content is not None or not self._of_tokens:
            return None
        if parts == 1:
            return None
        return Asked.of(self._read(data, model), self.batch // parts, drawn, parts)

    @property
    def can_be_by_parts(self) -> bool:
        return self.content is not None and self.network.negatives is None

    def new(self) -> tuple[SequenceModel, Optimizer]:
        sizes = {"items": self.inputs, "content": self.content, "events": self.events}
        build = functools.partial(build_sequence_model, self.network, **sizes)
        model, optimizer = Maker(build)(rule=self.rule, seed=0)
        if model.output.content is not None:
            model.output.content.by_parts = self.by_parts
        return model, optimizer

    def placed(self, data: int, model: int, shape: Shape) -> tuple[Any, ...]:
        size = data, self.rows_of(data, model) + 1, self.window
        dtypes = [jnp.int32] + [jnp.float32] * self.times
        windows = [shape(size, dtype, P("data")) for dtype in dtypes]
        for columns, each_of in ((self._columns, size), (self._user_columns, size[:2])):
            windows += [
                shape((*each_of, *each), self._dtype(name), P("data"))
                for name, each in columns.items()
            ]
        [entries] = self.entries_of(data, model)
        ends = shape((self.rows + 1,), jnp.int32, P())
        leaves = None, shape((entries,), jnp.int32, P()), ends, None
        return *windows, CSR.tree_unflatten(self._places, leaves)

    def _dtype(self, name: str) -> Any:
        """The dtype of an event column."""
        # `events` is None only if there are no event columns.
        assert self.events is not None
        return self.events.dtype_of(name)

    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        width, read = self.network.width, self._read(data, model)
        own = self.capacities(data, model)
        targets = own[-1]
        steps = dispatch.steps_on_gpu(dispatch.entries_of_step(own, data, ()))
        batches = 4 * steps * (sum(own) + self.batch + 1)
        sorting = ORDER_SORTED * self.rows_of(data, model)
        kept = read * self._kept_of_token
        own_targets = read if self._of_tokens else targets
        of_targets = 4 * _OF_TARGETS * own_targets * width
        gradients = 4 * _GRADIENTS * read * width
        # Item vectors and their gradient are gathered for the whole batch.
        if data > 1 and not self._of_tokens:
            gradients += 2 * 4 * data * read * width
        items, dtype = (
            padded_rows(self.inputs) // (data * model),
            jnp.dtype(jnp.float32),
        )
        scored = Scored(
            targets, items, width, dtype, dtype, self.network.temperature, None
        )
        if self.by_parts:
            output = self._by_parts(scored)
        else:
            made = self._output(targets, items, data, model)
            output = with_content(self, made, scored, CHUNK_ITEMS, SORTED_TAGS)
        touched = self._input_gradient(read, targets, data, model)
        stages = (
            of_targets + output.at_once(False),
            gradients + output.gradient + touched,
            gradients + self._scores(read),
        )
        over_data, over_model = self._sent(laid, data, model, targets)
        return Step(
            steps=steps,
            batches=batches,
            hidden=kept + of_targets + gradients,
            operand=output.operand,
            output_gradient=output.gradient,
            chunk=output.chunk,
            input_gradient=touched,
            sorting=sorting,
            temporary=max(sorting, batches + kept + max(stages)),
            by_parts=self.by_parts,
            over_data=over_data,
            over_model=over_model,
        )

    def _output(self, targets: int, items: int, data: int, model: int) -> Output:
        """Memory of the softmax over all items, or over sampled items."""
        dtype, width = jnp.dtype(jnp.float32), self.network.width
        temperature, drawn = self.network.temperature, self.network.negatives
        if drawn is not None:
            # Scores are in float32. Bfloat16 and meshes need another array for their gradients.
            parts = self._parts(data, model)
            each = 4 if operand_dtype(self.network) == "float32" and parts == 1 else 6
            return Output(0, 0, each * -(-targets // parts) * drawn, True)
        scored = Scored(targets, items, width, dtype, dtype, temperature, None)
        product = chunked_loss.operand_dtype(None, dtype, targets, items)
        if product == dtype:
            return output_bytes(self, scored)
        wide = -(-width // STEP) * STEP  # padded with zeros in a copy of the kernel
        copied = 4 * items * wide if wide > width else 0
        if temperature is None and wide <= slopes_product.MAX_HIDDEN:
            # The scores are not stored. For a chunk of items, the memory contains its rounded
            # rows, their gradient, and the sum of this gradient.
            rows = min(items, two_passes.CHUNK_ITEMS)
            chunk = (product.itemsize + 2 * 4) * rows * wide
            return Output(copied, 4 * items * wide, chunk, False)
        made = output_bytes(self, scored._replace(width=wide))
        return made._replace(operand=made.operand + copied)

    def _by_parts(self, scored: Scored) -> Output:
        """Memory of the softmax if item vectors are computed from content chunk by chunk."""
        part = scored._replace(items=min(scored.items, CHUNK_ITEMS))
        made = with_content(
            self, output_bytes(self, part), part, CHUNK_ITEMS, SORTED_TAGS
        )
        gradient = scored.items * scored.width * scored.stored.itemsize
        return Output(0, gradient, made.at_once(False), False)

    def _input_gradient(self, read: int, targets: int, data: int, model: int) -> int:
        """Bytes for the gradient of a step's item vectors, `read` of which are in histories."""
        width, drawn = self.network.width, self.network.negatives
        rows = padded_rows(self.inputs) // model
        if self.by_parts:  # this gradient is added in place to that of the output layer
            return 2 * 4 * read * width
        # All items have a gradient: all are scored, or their vectors are computed from content.
        if drawn is None or self.content is not None:
            return input_gradient(self, read, rows // data, width, dense=True)
        if (asked := self._asked(data, model)) is not None:
            # Requested rows, received rows, and gradients received from all parts of the batch.
            owned = model * slots_for_each(*asked, model=model).count
            made = input_gradient(self, data * owned, rows, width, dense=False)
            return made + 4 * (2 + data) * owned * width
        # The rows' gradients are gathered from all devices along "data".
        entries = data * read + targets + drawn
        made = input_gradient(self, entries, rows, width, dense=False)
        if data == 1:
            return made
        if self.rule.drifts and updates_whole(rows, entries):
            # For each of two lookups, the gradient of all rows is summed over the devices.
            return made + 2 * 4 * rows * width
        return made + 4 * entries * width

    def _scores(self, tokens: int) -> int:
        """Bytes for the attention scores that the backward pass computes at a time."""
        if not isinstance(config := self.network, AttentionConfig):
            return 0
        heads, dtype = config.heads, operand_dtype(config)
        made = scores_at_once(tokens, heads, config.width // heads, dtype)
        return 4 * _OF_SCORES * made

    @functools.cached_property
    def _kept_of_token(self) -> int:
        """Bytes per token that the blocks store in the forward pass for the backward pass."""
        graphdef, parameters, others = nnx.split(self.modules()[0], nnx.Param, ...)

        def kept(rows: int) -> int:
            size = rows, self.network.max_length
            ids = jax.ShapeDtypeStruct(size, jnp.int32)
            times = jax.ShapeDtypeStruct(size, jnp.float32) if self.times else None
            beside = {
                name: jax.ShapeDtypeStruct((*size, *each), self._dtype(name))
                for name, each in self._columns.items()
            }
            more = {} if self.events is None else {"events": beside}
            if self.events is not None:
                of_rows = self.events.request_shapes | self.events.user_shapes
                beside |= {
                    name: jax.ShapeDtypeStruct((rows, *each), self._dtype(name))
                    for name, each in of_rows.items()
                }

            def backward(parameters, others, ids, times, more):
                def forward(parameters):
                    model = nnx.merge(graphdef, parameters, others, copy=True)
                    return model(ids, times, **more)

                return jax.vjp(forward, parameters)[1]

            found = jax.eval_shape(backward, parameters, others, ids, times, more)
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found))

        # Both numbers count the parameters that the backward pass reads, so these cancel.
        return -(-(kept(3) - kept(2)) // self._places)

    def _sent(self, laid: Sequence[Laid], data: int, model: int, targets: int):
        """Bytes that each device sends in a step.

        Transfers that XLA's partitioner chooses are estimated.
        """
        width, drawn = self.network.width, self.network.negatives
        read = 4 * self._parts(data, model) * self._read(data, model) * width
        hidden, whole = 4 * targets * width, data * model
        over_data: dict[str, int] = {}
        over_model: dict[str, int] = {}
        over = over_data if data > 1 else over_model  # a ring through all devices
        alone = self._of_tokens and model == 1  # then each part reads its own tokens
        if whole > 1 and drawn is None and not alone:
            over["vectors of the items"] = summed(read, whole)
        if whole > 1 and drawn is None:
            over["normalisers"] = gathered(4 * 4 * targets * whole, whole)
        between = sum(
            v.part
            for v in laid
            if v.path[0] == 0
            and (v.path[1] != "output" or v.path[2:] in CONTENT_KERNELS)
        )
        if self._of_tokens and whole > 1:
            shown = 4 * (1 + self.times) * self.batch * self.window
            over["histories of the batch"] = gathered(shown, whole)
            over["sums of hidden gradients"] = summed(between, whole)
        if (asked := self._asked(data, model)) is not None:
            rows = 4 * model * slots_for_each(*asked, model=model).count * width
            items = padded_rows(self.inputs)
            is_whole = self.rule.drifts and updates_whole(items, whole * asked.ids)
            if model > 1:
                over_model["vectors of the items and their gradients"] = 2 * gathered(
                    rows, model
                )
            if data > 1:
                over_data["gradients of the vectors of items"] = (
                    summed(4 * items // model * width, data)
                    if is_whole
                    else gathered(data * rows, data)
                )
            assert drawn is not None
            over["vectors of the negatives"] = 3 * gathered(4 * drawn * width, whole)
            return over_data, over_model
        if model > 1:
            if drawn is None and self._of_tokens:
                over_model["hidden vectors of the batch"] = gathered(
                    hidden // data, model
                )
            if drawn is None:
                over_model["gradient of the last hidden layer"] = summed(
                    hidden // data, model
                )
            else:
                vectors = (read + hidden) // data + 4 * drawn * width
                over_model["vectors of the items"] = summed(vectors, model)
        if data > 1 and not (self._of_tokens and drawn is not None):
            over_data["hidden vectors of the batch"] = summed(
                hidden // model, data
            ) + gathered(hidden, data)
            over_data["gradient of the last hidden layer"] = gathered(hidden, data)
        if self._of_tokens and drawn is None and whole > 1:
            over["gradient of the vectors"] = gathered(read, whole)
        elif data > 1 and drawn is None:
            over_data["gradient of the vectors"] = gathered(read, data)
        elif data > 1 and drawn is not None:
            entries = data * self._read(data, model) + targets + drawn
            rows, found = padded_rows(self.inputs) // model, gathered
            if self.rule.drifts and updates_whole(rows, entries):
                entries, found = 2 * rows, summed
            over_data["gradients of the vectors of items"] = found(
                4 * entries * width, data
            )
        if data > 1 and not self._of_tokens:
            over_data["sums of hidden gradients"] = summed(between, data)
        return over_data, over_model


def history_workload(asked: Plan, batch: int) -> HistoryWorkload:
    """Checks the arguments of `plan`, and makes a workload for steps of `batch` rows."""
    network = cast(SequenceConfig, asked.network)
    if asked.outputs is not None:
        raise ValueError(
            "the targets of histories are their own items; leave out outputs"
        )
    if asked.values:
        raise ValueError("histories have no values; leave out values")
    if asked.fused:
        raise NotImplementedError(
            "a fused update needs a kernel that only the output reads, and histories are "
            "read with it, too; leave out fused"
        )
    return HistoryWorkload(
        network=network,
        rule=asked.rule,
        inputs=asked.inputs,
        rows=asked.rows,
        entries=asked.entries,
        times=asked.times and model_of(network).uses_times,
        batch=batch,
        content=asked.content,
        events=EventSizes.of_both(asked.events, asked.users),
    )


def suit_to_memory(model: Any, optimizer: Optimizer, data: Any, batch: int) -> None:
    """Trains a model with content by parts if there is not enough memory for all item vectors.

    Args:
      model: model of histories.
      optimizer: optimizer of the model.
      data: data that the model is trained on.
      batch: rows of a step.
    """
    content, memory = content_of(model), device_memory()
    if content is None or memory is None:
        return
    # A subclass may read the kernel of item vectors itself, and so needs all of them.
    if type(model) is not model_of(model.config):
        return
    width = model.config.width
    divided, by = parts_of_axes()
    vectors = 4 * padded_rows(model.num_items) // (divided * by) * width
    if vectors * _FEW_VECTORS < memory:
        return
    lengths = np.diff(data.indptr)
    lengths = lengths[lengths > 1]
    job = HistoryWorkload(
        network=model.config,
        rule=optimizer.rule,
        inputs=model.num_items,
        rows=len(lengths),
        entries=int(lengths.sum()),
        batch=batch,
        times=has_times(model, data),
        content=content.sizes,
        events=None if model.events is None else model.events.sizes,
    )
    content.by_parts = fitting(job, divided, by, memory)[0].by_parts
