"""Estimates the memory of training a network on items; see docs/large_models.md."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sparsejax.engine.batching import bucket
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.footprint import (
    CONTENT_KERNELS,
    ORDER_SORTED,
    Laid,
    Scored,
    Shape,
    Step,
    Workload,
    gathered,
    input_gradient,
    output_bytes,
    summed,
    with_content,
)
from sparsejax.engine.train.resident import Roles, TrainingTask
from sparsejax.kinds.kind import Maker
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import padded_rows
from sparsejax.nn import closed_form
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.content_vectors import CHUNK_ITEMS, SORTED_TAGS
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.planning import Plan
from sparsejax.sparse import CSR

# Bytes per entry of a dispatch. The transpose stores a column, a row and a position, without the
# starts of columns. The sort stores a column, keys, values and work space. Measured on an H200
# with 39 million entries.
_TRANSPOSED, _SORTED = 12, 37
# Bytes per entry of a step: about ten arrays of 4 bytes.
_STEP_ENTRY = 40
# Number of [batch, hidden] arrays for each hidden layer in the forward and backward passes.
_ACTIVATIONS = 5
# Entries of the fullest device divided by their mean over the devices, in the readers' order.
_IMBALANCE = 1.05
# The fullest batch is assumed to have 3 standard deviations more entries than the mean. The
# standard deviation is 1.3 times the mean of a row times the root of the number of rows.
_FULLEST = 3 * 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkWorkload(Workload):
    """Sizes of a training of a network on items.

    Attributes:
      target_entries: number of entries of the targets; None if the inputs are the targets.
    """

    network: NetworkConfig
    outputs: int
    target_entries: int | None

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.outputs

    @property
    def roles(self) -> TrainingTask:
        return Roles()

    def new(self) -> tuple[FeedForward, Optimizer]:
        sizes = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "content": self.content,
        }
        build = functools.partial(FeedForward, self.network, **sizes)
        return Maker(build)(rule=self.rule, seed=0)

    def sizes(self) -> list[tuple[int, int]]:
        """Pairs (entries, columns) for the inputs, and for the targets if they are separate."""
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
        return tuple(map(matrix, self.entries_of(data, model), columns))

    def step(self, data: int, model: int, laid: Sequence[Laid]) -> Step:
        batch, rows = self.batch // data, self.rows_of(data, model)
        itemsize = 8 if self.values else 4
        own = self.capacities(data, model)
        steps = dispatch.steps_on_gpu(dispatch.entries_of_step(own, data))
        # Each device receives the entries of the whole batch that are in its own columns.
        column = data * own[0]
        kernel_rows = padded_rows(self.inputs) // model
        starts = min(column, kernel_rows)
        taken = steps * itemsize * sum(own)
        batches = taken + steps * (_TRANSPOSED * column + 4 * starts)
        batches += _STEP_ENTRY * column
        in_dispatch = taken + steps * (_SORTED - 4) * column
        sorting = max(in_dispatch, ORDER_SORTED * rows)

        # Memory for the closed-form fit before training, without the data set and its order.
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
        made = output_bytes(self, scored)
        output = with_content(self, made, scored, CHUNK_ITEMS, SORTED_TAGS)
        tied = network.output.tied is not None
        first = sizes[0]
        touched = input_gradient(self, column, kernel_rows, first, dense=tied)
        # the fused operand is allocated only during a dispatch
        operand = output.operand if self.fused else 0
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


def network_workload(asked: Plan, batch: int) -> NetworkWorkload:
    """Checks the arguments of `plan`, and makes a workload for steps of `batch` rows."""
    network, outputs = cast(NetworkConfig, asked.network), asked.outputs
    if asked.times:
        raise ValueError("a network does not read times; leave out times")
    if asked.fused and network.output.tied is not None:
        raise NotImplementedError("a tied kernel cannot have a fused update")
    if asked.fused and asked.content is not None:
        raise NotImplementedError(
            "vectors with content of the items cannot have a fused update"
        )
    targets = asked.entries if asked.target_entries is None else asked.target_entries
    return NetworkWorkload(
        network=network,
        rule=asked.rule,
        inputs=asked.inputs,
        outputs=asked.inputs if outputs is None else outputs,
        rows=asked.rows,
        entries=asked.entries,
        target_entries=None if outputs is None else targets,
        values=asked.values,
        batch=batch,
        fused=asked.fused,
        content=asked.content,
    )


def _is_between(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is replicated: all but the kernels for items or features are."""
    if path[0] == 0 and path[1] == "output":
        return path[2:] in CONTENT_KERNELS
    return path[0] == 0 and path[1:] != ("first", "kernel")


def _sent(
    job: NetworkWorkload,
    laid: Sequence[Laid],
    data: int,
    model: int,
    entries: int,
    labels: int,
):
    """Bytes that each device sends in a step by ring algorithms, over "data" and over "model".

    `entries` and `labels` are the numbers of input and label entries of the whole batch that are
    in the columns of one device.
    """
    network, batch = job.network, job.batch // data
    sizes = [layer.size for layer in network.hidden]

    over_data, over_model = {}, {}
    if network.loss == "softmax_cross_entropy":
        # one ring contains all devices
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
            # inputs are divided, so outputs are summed
            if i % 2 == 1 and before % model == 0:
                between += summed(4 * batch * size, model)
            elif i % 2 == 0 and size % model == 0:
                # outputs are divided, so gradients are summed
                between += summed(4 * batch * before, model)
                if i + 2 == len(sizes):  # no further layer takes divided inputs
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
