"""Estimates the memory that training needs on each device, without using such a device."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.engine.train import dispatch
from sparsejax.engine.train.footprint import Footprint, Workload, fitting, laid_out
from sparsejax.engine.train.resident import Resident
from sparsejax.kinds.kind import kind_of
from sparsejax.mesh.layout import (
    ROW_MULTIPLE,
    check_axis_sizes,
    device_memory,
    make_mesh,
    readable_bytes,
)
from sparsejax.options import planning
from sparsejax.options.option import verb
from sparsejax.sparse import MAX_ENTRIES


class Compiled(NamedTuple):
    """Memory of the compiled program on devices of the kind in this machine, in bytes.

    A CPU's program differs from a GPU's: it has other operations, smaller chunks, and 16 steps
    whose inputs are not sorted ahead. Only `kept` can be compared between them.

    Attributes:
      platform: "cpu" or "gpu".
      kept: weights, state, data set and order: the arguments of the program. For histories the
          program does not read the positions that have a next item, so they are not counted.
      temporary: all other arrays that the program allocates.
    """

    platform: str
    kept: int
    temporary: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Footprint):
    """Memory of each GPU of a mesh while `fit` trains, and the bytes that it sends in a step.

    >>> config = NetworkConfig.autoencoder((1024,))
    >>> sizes = {"inputs": 8_000_000, "rows": 10_000_000, "entries": 300_000_000}
    >>> planned = plan(config, optimizers.rmsprop(1e-3), model=4, **sizes)
    >>> planned.total == planned.kept + planned.temporary
    True

    Sizes are in bytes, on one device.

    Attributes:
      data: number of devices over which batches are divided.
      model: number of devices over which the first kernel is divided. The last kernel is divided
          over all devices.
      steps: number of steps in a dispatch.
      entries: number of entries of the inputs or of the targets, whichever is larger, on the
          fullest device; for histories the number of positions that have a next item.
      weights: parameters, and content of the items.
      state: state of the optimizer.
      dataset: inputs and targets; for histories their last items, and the positions of targets.
      order: order of the rows in an epoch.
      batches: batches of all steps in a dispatch, and arrays that a step computes from their
          entries.
      hidden: activations of the hidden layers, or of the blocks, and their gradients.
      operand: a copy of the last kernel in bfloat16, and factors of cosines; or the item vectors,
          if items have content.
      output_gradient: gradient of the last kernel, if it is not applied chunk by chunk.
      chunk: scores of a part of the items, and the gradient of their rows.
      input_gradient: gradient of the rows of the first kernel that a batch touches; for histories,
          of the item vectors in the input.
      sorting: arrays for sorting the entries of a dispatch, or the rows of an epoch.
      linear: arrays for computing the linear part of the network, before training, on the first
        device.
      temporary: largest sum of those of the eight numbers above that are allocated together:
          before training, while sorting, in the output layer, or in the input layer.
      by_parts: whether item vectors with content are computed part by part, and not stored, as
          `fit` does if they do not fit.
      over_data: `{purpose: bytes}` that each device sends along "data" in a step, by a ring.
      over_model: `{purpose: bytes}` that each device sends along "model" in a step.
      memory: memory of a device in bytes; None if unknown.
      least_model: smallest `model` that fits, with this `data`; None if no `model` fits, or the
          memory is unknown.
      compiled: memory of the compiled program, if requested; else None.
    """

    memory: int | None = None
    least_model: int | None = None
    compiled: Compiled | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices, and numbers of entries fit in 32 bits; None if unknown."""
        if self.memory is None:
            return None
        return self.total <= self.memory and self.entries <= MAX_ENTRIES

    def table(self) -> str:
        """A table of all figures as text, with a line about whether they fit."""
        devices = self.data * self.model
        where = "on one device" if devices == 1 else f"on each of {devices:,} devices"
        lines = [
            ("kept", self.kept),
            ("  weights", self.weights),
            ("  optimizer state", self.state),
            ("  data set", self.dataset),
            ("  order of the rows", self.order),
            ("temporary, at most at once", self.temporary),
            (f"  batches, {self.steps} steps at a time", self.batches),
            ("  hidden layers", self.hidden),
            ("  operand of the output's products", self.operand),
            ("  gradient of the output", self.output_gradient),
            ("  scores, and gradients of a chunk of items", self.chunk),
            ("  gradient of the input", self.input_gradient),
            ("  sorting", self.sorting),
            *[("  computing the linear part", self.linear)] * bool(self.linear),
            ("peak", self.total),
        ]
        for axis, sent in (("data", self.over_data), ("model", self.over_model)):
            if sent:
                lines.append((f'sent in a step over "{axis}"', sum(sent.values())))
                lines += [(f"  {what}", size) for what, size in sent.items()]
        head, beside = f"{where}, data={self.data}, model={self.model}", {}
        if (other := self.compiled) is not None:
            head = f"{head:<53}compiler ({other.platform})"
            beside["kept"] = other.kept
            beside["temporary, at most at once"] = other.temporary
            beside["peak"] = other.kept + other.temporary
        text = [head]
        for name, size in lines:
            line = f"{name:<44}{readable_bytes(size):>8}"
            more = f"{readable_bytes(beside[name]):>15}" if name in beside else ""
            text.append(line + more)
        return "\n".join([*text, *self._verdict()])

    def _verdict(self) -> list[str]:
        if self.memory is None:
            return []
        into = readable_bytes(self.memory)
        if self.fits and self.by_parts:
            return [f"fits in {into}, with the items' vectors made part by part"]
        if self.fits:
            return [f"fits in {into}"]
        if self.total <= self.memory:
            into = f"32-bit offsets: {self.entries:,} entries on a device"
        more = f"with data={self.data} no model is large enough"
        if self.least_model is not None:
            more = f"needs model={self.least_model} at least"
        return [f"does not fit in {into}; {more}"]


@verb(planning.Plan)
def plan(asked: planning.Plan) -> Plan:
    """Estimates the memory that `fit` needs on each GPU of a mesh, without allocating it.

    >>> config = NetworkConfig.autoencoder((1024,))
    >>> sizes = {"inputs": 8_000_000, "rows": 10_000_000, "entries": 300_000_000}
    >>> planned = plan(config, optimizers.rmsprop(1e-3), memory=134 * 10**9, **sizes)
    >>> planned.fits, planned.least_model
    (False, 2)
    >>> planned.weights // 10**9  # two kernels of 8 million x 1,024 x 4, and biases
    66

    Weights, state and data are exact, except that a mesh is assumed to divide the data evenly to 5
    %. Temporary arrays are those of our GPU programs on an H200. Validation, host memory, and
    memory for the compiler's autotuning are not counted.

    For a model of histories, `inputs` is the number of items:

    >>> sizes = {"inputs": 1_000_000, "rows": 2_000_000, "entries": 100_000_000}
    >>> planned = plan(HSTUConfig(), optimizers.adamw(1e-3), times=True, **sizes)
    >>> planned.dataset // 10**6  # items and times of 51 places a row, and where targets are
    1071

    Its activations are those that JAX keeps for the backward pass. The bytes sent over a mesh are
    estimated, as XLA's partitioner chooses the transfers.

    Raises:
      ValueError: a size is not positive, the mesh cannot be made or does not divide the
        batch, there are too few devices to compile for, or histories have fewer than two
        entries a row, targets or values.
      NotImplementedError: `fused` with a tied output, with content, or with a model of
        histories.
    """
    kind = kind_of(asked.network)
    asked.check_kind(kind.name)
    data, model = asked.data, asked.model
    check_axis_sizes(data, model)
    job = kind.workload(asked, dispatch.step_size(asked.batch_size, asked.rows, data))
    memory = device_memory() if asked.memory is None else asked.memory

    def plan_on(model: int) -> Plan:
        return Plan(**vars(fitting(job, data, model, memory)[1]), memory=memory)

    larger = (plan_on(2**i) for i in range((ROW_MULTIPLE // data).bit_length()))
    return dataclasses.replace(
        plan_on(model),
        least_model=next((each.model for each in larger if each.fits), None),
        compiled=_compiled(fitting(job, data, model, memory)[0], data, model)
        if asked.compile
        else None,
    )


def _compiled(job: Workload, data: int, model: int) -> Compiled:
    found: Any = program(job, data, model).memory_analysis()
    result = found.output_size_in_bytes - found.alias_size_in_bytes
    return Compiled(
        jax.default_backend(),
        found.argument_size_in_bytes,
        found.temp_size_in_bytes + result,
    )


def program(job: Workload, data: int, model: int) -> jax.stages.Compiled:
    """Compiles a dispatch from shapes, for a mesh of devices of the kind in this machine."""
    mesh = None
    if data * model > 1:
        devices = _devices(data * model)
        mesh = make_mesh(data=data, model=model, devices=devices)

    def shape(size, dtype, spec):
        place = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(size, dtype, sharding=place)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        graphdef, state = nnx.split(job.modules())
        specs = {laid.path: laid.spec for laid in laid_out(job, data, model)}

        def placed(path, variable):
            made = shape(variable.shape, variable.dtype, specs[path])
            return variable.replace(made)

        state = nnx.map_state(placed, state)
        placed = job.placed(data, model, shape)
        resident = Resident(placed, None, job.rows, roles=job.roles)
        capacities = tuple(job.capacities(data, model))
        steps = -(-job.rows // job.batch)
        order = shape((steps, data, job.batch // data), jnp.int32, P(None, "data"))
        number = shape((), jnp.int32, P())
        layout = None
        if mesh is not None:
            layout = tuple(leaf.sharding for leaf in jax.tree.leaves(state))
        sparse_inputs = resident.sparse_inputs
        entries = dispatch.entries_of_step(capacities, data, sparse_inputs)
        return (
            dispatch.run_steps[False]
            .program.lower(
                dispatch.How(graphdef, layout, job.fused),
                state,
                resident,
                order,
                number,
                number,
                dispatch.Sizes(
                    capacities,
                    dispatch.steps_per_dispatch(entries),
                    dispatch.sorts_ahead(),
                ),
            )
            .compile()
        )


def _devices(count: int) -> list[jax.Device]:
    """At least `count` devices of this machine's kind. GPUs that do not exist are simulated."""
    devices = jax.devices()
    if len(devices) >= count or devices[0].platform != "gpu":
        return devices
    hosts = f"1x{-(-count // 8)}x{min(count, 8)}"
    return topologies.get_topology_desc("", "cuda", topology=hosts).devices


def read_bytes(text: str) -> int:
    """Converts a size such as "141GB", "1.5 TB" or "139 GiB" to a number of bytes."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kKMGT]?)(i?)B", text.strip())
    if found is None:
        raise ValueError(f'expected a size such as "141GB" or "139GiB", got {text!r}')
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
