"""The commands for networks of items."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from sparsejax.baselines.models import BASELINES
from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import CLICKS, TEMPERATURES, Opened, Range, Source
from sparsejax.cli.reading import (
    fingerprint_of_heldout,
    meanwhile,
    read_file,
    validation_split,
    with_times,
)
from sparsejax.data import SparseDataset, scan_parquet
from sparsejax.data.names import Names
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.items.evaluation import prepared_for
from sparsejax.kinds.items.job import ScannedItems
from sparsejax.nn.config import LinearConfig, NetworkConfig, temperature_for
from sparsejax.verbs import vectors as vector_files


class Items(interactions.Interactions):
    """The commands of a `NetworkConfig`."""

    name = "items"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "hidden": (64, 128, 256, 512, 1024),
        "temperature": TEMPERATURES,
        "corruption": Range(0.0, 0.8),
    }
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "train": ("negatives", *CLICKS),
        "plan": ("negatives", "examples", *CLICKS),
        "tune": CLICKS,
        "evaluate": ("groups",),
        "report": ("groups",),
    }

    def read_config(self, document: object) -> NetworkConfig:
        return NetworkConfig.from_json(document)

    def described(self, command: flags.Train | flags.Plan) -> NetworkConfig:
        options, rank = dict(vars(command.network)), command.network.linear
        options["linear"] = LinearConfig(rank=rank) if isinstance(rank, int) else None
        if options["temperature"] == "auto":
            del options["temperature"]
        return NetworkConfig.autoencoder(**options)

    def source(self, command: flags.Train, before: Names | None) -> Source:
        data = read_file(command.data, command)
        if before is not None:
            data = data.append_features(before)
        heldout = validation = split = None
        indicator = data.matrix.data is None
        chunks, text = [data.num_rows], command.validation
        if text is not None:
            if text == "last":
                with_times(data, command.data)
            parts = validation_split(text, data)
            if parts is None:
                heldout = self.heldout(text, command, data, command.data)
            else:
                data, heldout = parts.train, parts.heldout.without_values()
                split = text
                print(f"validation: {parts}", file=sys.stderr)
            validation = fingerprint_of_heldout(heldout, data.row_names)
        return Source(
            data=data,
            chunks=chunks,
            fingerprint=fingerprint(data.matrix),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=indicator,
            heldout=heldout,
            validation=validation,
            split=split,
        )

    def scanned(self, command: flags.Train) -> Source:
        interactions.check_scanned(command)
        if command.columns.time is not None or command.columns.no_time:
            raise ValueError(
                "--time and --no-time are for data in memory; leave out --chunk-rows"
            )
        assert command.chunk_rows is not None
        data = scan_parquet(
            command.data,
            user=command.columns.user,
            item=command.columns.item,
            value=command.columns.value,
            indicator=command.columns.no_value,
            chunk_rows=command.chunk_rows,
        )
        return Source(
            data=data,
            chunks=Stream(ScannedItems(data), None).chunks,
            fingerprint=data.fingerprint(),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=data.indicator,
        )

    def suited(
        self, config: NetworkConfig, command: flags.Train, source: Source
    ) -> tuple[NetworkConfig, str]:
        data, said = source.data, []
        if _chooses(command, "temperature"):
            temperature, why = temperature_for(data.num_features)
            config = config.with_temperature(temperature)
            said.append(why)
        if _chooses(command, "linear"):
            if command.chunk_rows is not None:
                why = "no linear part: it needs all of the data in memory"
            else:
                sizes = data.num_rows, data.num_features, data.num_entries
                linear, why = LinearConfig.for_data(*sizes)
                config = dataclasses.replace(config, linear=linear)
            said.append(why)
        return config, "\n".join(said)

    def plan_config(self, config: NetworkConfig, command: flags.Plan) -> NetworkConfig:
        if command.features is not None or not _chooses(command, "linear"):
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

    def evaluate(self, command: flags.Evaluate, run: Opened) -> Mapping[str, float]:
        if (command.test is None) == (command.fold_in is None):
            raise ValueError(
                "name the TEST file, or hold out a part of TRAIN by --fold-in"
            )
        if command.test is None and command.history:
            raise ValueError("--history goes with TEST; leave it out with --fold-in")
        if command.baselines and command.test is None and command.popularity is None:
            raise ValueError(
                "--baselines with --fold-in needs --popularity, the file of the "
                "interactions that the model was trained on"
            )
        data = meanwhile(lambda: _data_to_evaluate(command, run))
        model = run.model()
        given = data()
        prepared = prepared_for(
            **given,
            fold_in=command.fold_in,
            features=None if command.fold_in is None else run.known,
            seed=command.seed,
            **interactions.counted(command),
        )
        measured = prepared.run(model)
        if command.baselines:
            measured = _of_baselines(prepared, given["popularity"]) | measured
        return measured

    def read_shown(self, path, command, run: Opened) -> SparseDataset:
        indicator = run.settings.indicator
        return read_file(path, command, features=run.known, indicator=indicator)

    def excluded(
        self, command: flags.Predict, run: Opened, data: SparseDataset
    ) -> SparseDataset | None:
        if command.exclude is None:
            return data if command.exclude_seen else None
        unwanted = read_file(
            command.exclude, command, features=run.known, indicator=True
        )
        seen = data.without_values()
        return seen.merge(unwanted) if command.exclude_seen else unwanted

    def user_vectors(self, command: flags.Vectors, run: Opened) -> tuple[Any, Any]:
        model = run.model()
        data = self.read_shown(command.data, command, run)
        return vector_files.user_vectors(model, data), data.row_names

    def read_heldout(self, path, command, data: SparseDataset) -> SparseDataset:
        return read_file(path, command, features=data, indicator=True)

    def counts(self, data: SparseDataset) -> np.ndarray:
        return np.bincount(data.matrix.indices, minlength=data.num_features)


def _chooses(command: flags.Train | flags.Plan, flag: str) -> bool:
    """Whether this setting of the network depends on the data."""
    if getattr(command, "origin", None) is not None:
        return False
    return command.config is None and getattr(command.network, flag) == "auto"


def _of_baselines(prepared: Evaluation, train: SparseDataset) -> dict[str, float]:
    """The metrics of each baseline, with its name before that of the metric."""
    measured = {}
    for name, baseline in BASELINES.items():
        try:
            model = baseline(train)
        except MemoryError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        found = prepared.run(model)
        measured |= {
            f"{name}_{n}": found[n] for n in found if f"popularity_{n}" in found
        }
    return measured


def _data_to_evaluate(command: flags.Evaluate, run: Opened) -> dict[str, Any]:
    """The data that is read from files, as arguments of `evaluate`."""
    names = run.known
    read_ = functools.partial(read_file, command=command)
    valued = functools.partial(read_, indicator=run.settings.indicator)
    given: dict[str, Any] = {}
    if command.test is None:
        # With its own features until it is split.
        given["inputs"] = valued(command.train)
    else:
        train = valued(command.train, features=names)
        more = (valued(path, features=names) for path in command.history)
        files = " or ".join([command.train, *command.history])
        given["inputs"] = shown = train.merge(*more)
        given["heldout"] = COMMANDS.heldout(command.test, command, shown, files)
        given["popularity"] = train
    for name, path in (
        ("candidates", command.candidates),
        ("popularity", command.popularity),
    ):
        if path is not None:
            given[name] = read_(path, features=names, indicator=True)
    return given


COMMANDS = Items()
