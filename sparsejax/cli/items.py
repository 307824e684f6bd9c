"""The commands for networks of items."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import CLICKS, TEMPERATURES, Range
from sparsejax.nn.config import LinearConfig, NetworkConfig


class Items(interactions.Interactions):
    """The commands of a `NetworkConfig`."""

    name = "items"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "hidden": (64, 128, 256, 512, 1024),
        "temperature": TEMPERATURES,
        "corruption": Range(0.0, 0.8),
    }
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "plan": ("negatives", "examples", *CLICKS),
        "tune": CLICKS,
    }

    def described(
        self, command: flags.Train | flags.Plan
    ) -> tuple[NetworkConfig, Collection[str]]:
        options, rank = dict(vars(command.network)), command.network.linear
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
        network = command.network
        start: dict[str, Any] = {"corruption": network.corruption}
        if len(network.hidden) == 1:
            start["hidden"] = network.hidden[0]
        if isinstance(network.temperature, float):  # None stays, "auto" needs the data
            start["temperature"] = network.temperature
        return start

    def with_flags(
        self, command: flags.Tune, chosen: Mapping[str, Any]
    ) -> flags.Network:
        tuned = dict(chosen)
        if "hidden" in tuned:
            tuned["hidden"] = (tuned["hidden"],)
        return dataclasses.replace(command.network, **tuned)

    def with_chosen(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        return config  # which the flags describe

    def of_data(self, command: flags.Tune, config: NetworkConfig) -> flags.Tune:
        temperature = config.output.temperature
        network = dataclasses.replace(command.network, temperature=temperature)
        return dataclasses.replace(command, network=network)


def _is_auto(command: flags.Train | flags.Plan, flag: str) -> bool:
    """Whether the data decides this setting of the network."""
    return getattr(command.network, flag) == "auto"


COMMANDS = Items()
