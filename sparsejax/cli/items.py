"""The commands for networks of items."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import TEMPERATURES, Range
from sparsejax.nn.config import LinearConfig, NetworkConfig


class Items(interactions.Interactions):
    """The commands of a `NetworkConfig`."""

    name = "items"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "hidden": (64, 128, 256, 512, 1024),
        "temperature": TEMPERATURES,
        "corruption": Range(0.0, 0.8),
    }

    def described(
        self, command: flags.Train | flags.Plan
    ) -> tuple[NetworkConfig, Collection[str]]:
        options, rank = command.values_of(flags.Network), command.linear
        options["linear"] = LinearConfig(rank=rank) if isinstance(rank, int) else None
        suited = [n for n in ("temperature", "linear") if _is_auto(command, n)]
        if "temperature" in suited:
            del options["temperature"]
        return NetworkConfig.autoencoder(**options), suited

    def plan_config(self, config: NetworkConfig, command: flags.Plan) -> NetworkConfig:
        if command.features is not None or command.config is not None:
            return config
        if not _is_auto(command, "linear"):
            return config
        sizes: Any = command.rows, command.items, command.entries  # which are given
        linear, _ = LinearConfig.for_data(*sizes)
        return dataclasses.replace(config, linear=linear)

    def start(self, command: flags.Tune) -> dict[str, Any]:
        start: dict[str, Any] = {"corruption": command.corruption}
        if len(command.hidden) == 1:
            start["hidden"] = command.hidden[0]
        if isinstance(command.temperature, float):  # None stays, "auto" needs the data
            start["temperature"] = command.temperature
        return start

    def with_flags(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        tuned = dict(chosen)
        if "hidden" in tuned:
            tuned["hidden"] = (tuned["hidden"],)
        return tuned

    def with_chosen(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        return config  # which the flags describe

    def of_data(self, command: flags.Tune, config: NetworkConfig) -> flags.Tune:
        return command.replaced(temperature=config.output.temperature)


def _is_auto(command: flags.Network, flag: str) -> bool:
    """Whether the data decides this setting of the network."""
    return getattr(command, flag) == "auto"


COMMANDS = Items()
