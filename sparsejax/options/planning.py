"""Options to plan the memory that training needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from sparsejax.options.option import RANKING, SWITCH, Options, option

if TYPE_CHECKING:
    from sparsejax.codec import ModelConfig
    from sparsejax.data.sets.events import Events
    from sparsejax.nn.config import NetworkConfig
    from sparsejax.nn.item_content import ContentSizes
    from sparsejax.optimizers.rules import Rule


class Sized(Options):
    """Sizes of the data whose training is planned, for `plan` and for the command.

    Attributes:
      target_entries: Number of entries of the targets, over all rows.
      values: The entries have values.
      times: The entries have times. Among the models of histories, hstu reads them.
      fused: Plan for training with --fused.
      compile: Also print the memory that the compiler needs, for a mesh of devices of the kind in
          this machine. The mesh may have more devices than this machine.
    """

    target_entries: int | None = option(
        None, "those of the inputs", kinds=RANKING, least=1
    )
    values: bool = option(False, SWITCH, kinds=RANKING)
    times: bool = option(False, SWITCH, kinds=RANKING)
    fused: bool = option(False, SWITCH, kinds=RANKING)
    compile: bool = option(False, SWITCH, kinds=RANKING)


class Plan(Sized, kw_only=False):
    """The arguments of a call of `plan`.

    Attributes:
      network: Layers and loss, or the configuration of a model of histories.
      rule: Rule of the optimizer.
      inputs: Number of features.
      outputs: Number of items; by default the features, which are then the targets too.
        Histories have none.
      rows: Number of rows of the data set; for histories of rows with two entries or more.
      entries: Number of entries of the inputs, over all rows. The lengths of rows are
        assumed to have a standard deviation of 1.3 times their mean, as those of purchase
        histories have.
      target_entries: Number of entries of the targets; `entries` by default.
      values: Whether entries have values.
      times: Whether histories have times. Only `HSTU` reads them.
      batch_size: Examples a step.
      fused: Plan for training with `fused=True`.
      content: Sizes of the content of the items, a `sparsejax.nn.ContentSizes`.
      events: The columns of events of histories, `train.events`; their entries do not count.
      users: The columns of their users, `train.users`; the rows do not count.
      data: Devices over which batches are divided.
      model: Devices over which the first kernel is divided. The last kernel is divided
        over all devices.
      memory: Memory of a device; by default as much as JAX may use of the first device here, if
        that is known.
      compile: Also compile the program, for a mesh of devices of the kind in this machine. The
          mesh may have more GPUs than the machine. For more CPU devices than the machine has, call
          `jax.config.update("jax_num_cpu_devices", 64)` before JAX is used.
    """

    only_with: ClassVar = {"target_entries": ("outputs",)}

    network: NetworkConfig | ModelConfig
    rule: Rule
    _: dataclasses.KW_ONLY
    inputs: int = option(least=1)
    outputs: int | None = option(None, least=1)
    rows: int = option(least=1)
    entries: int = option(least=1)
    batch_size: int = option(512, least=1)
    content: ContentSizes | None = None
    events: Events | None = option(None, kinds=("histories",))
    users: Events | None = option(None, kinds=("histories",))
    data: int = 1
    model: int = 1
    memory: int | None = None
