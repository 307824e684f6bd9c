"""The commands for models of histories."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import TEMPERATURES, Commands, Range
from sparsejax.kinds.histories.footprint import assumed_lengths
from sparsejax.sequence.config import AttentionConfig, SequenceConfig


class Histories(interactions.Interactions):
    """The commands of a `SequenceConfig`."""

    name = "histories"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "width": (32, 64, 128, 256, 512),
        "dropout": Range(0.0, 0.7),
        "temperature": TEMPERATURES,
    }
    held_out = "last"

    def described(
        self, command: flags.Train | flags.Plan | flags.Tune
    ) -> tuple[SequenceConfig, Collection[str]]:
        assert command.model is not None  # else it is an autoencoder
        config, suited = self.kind.described(command.model)
        options = command.values_of(flags.Histories).items()
        given = {n: v for n, v in options if v is not None}
        for name in given:
            if not hasattr(config, name):
                raise ValueError(
                    f"--{name} is of no use for {command.model}: leave it out"
                )
        return dataclasses.replace(config, **given), suited

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
        config, _ = self.described(command)
        tuned = ("width", "dropout", "temperature")
        return {name: getattr(config, name) for name in tuned}

    def choices(self, command: flags.Tune) -> Mapping[str, Range | tuple[int, ...]]:
        config, _ = self.described(command)
        heads = config.heads if isinstance(config, AttentionConfig) else 1
        widths = self.tuned["width"]
        assert isinstance(widths, tuple)
        divided = tuple(int(width) for width in widths if width % heads == 0)
        return {**self.tuned, "width": divided}


COMMANDS: Commands = Histories()
