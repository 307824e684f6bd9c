"""The commands for models of histories."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import CLICKS, TEMPERATURES, Commands, Range
from sparsejax.kinds.histories.footprint import assumed_lengths
from sparsejax.sequence.config import SequenceConfig


class Histories(interactions.Interactions):
    """The commands of a `SequenceConfig`."""

    name = "histories"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "width": (32, 64, 128, 256, 512),
        "dropout": Range(0.0, 0.7),
        "temperature": TEMPERATURES,
    }
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "plan": ("examples", *CLICKS),
        "tune": CLICKS,
    }
    held_out = "last"

    def plan_config(
        self, config: SequenceConfig, command: flags.Plan
    ) -> SequenceConfig:
        if command.features is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out --features"
            )
        if command.config is not None:
            return config
        assert command.rows is not None and command.entries is not None
        lengths = assumed_lengths(command.rows, command.entries)
        config = config.suited_to_lengths(lengths)
        print(f"max_length {config.max_length}", file=sys.stderr)
        return config

    def start(self, command: flags.Tune) -> dict[str, Any]:
        config = self.runs.read_config({"version": 1, "model": command.kind})
        tuned = ("width", "dropout", "temperature")
        return {name: getattr(config, name) for name in tuned}


COMMANDS: Commands = Histories()
