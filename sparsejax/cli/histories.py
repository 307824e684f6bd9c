"""The commands for models of histories."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from sparsejax.cli import flags, interactions
from sparsejax.cli.kind import CLICKS, TEMPERATURES, Commands, Opened, Range, Source
from sparsejax.cli.reading import (
    fingerprint_of_heldout,
    meanwhile,
    read_file,
    read_histories,
    time_column,
    validation_split,
)
from sparsejax.data import SequenceDataset, SparseDataset, scan_sequences
from sparsejax.data.names import Names
from sparsejax.data.scan_tables import chunk_ends
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.histories.footprint import assumed_lengths
from sparsejax.sequence.config import SequenceConfig, entries_cut_off
from sparsejax.verbs.evaluate import evaluate


class Histories(interactions.Interactions):
    """The commands of a `SequenceConfig`."""

    name = "histories"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {
        "width": (32, 64, 128, 256, 512),
        "dropout": Range(0.0, 0.7),
        "temperature": TEMPERATURES,
    }
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "train": CLICKS,
        "plan": ("examples", *CLICKS),
        "tune": CLICKS,
        "evaluate": (
            *("fold_in", "seed", "history", "baselines"),
            *("popularity", "groups"),
        ),
        "report": ("groups",),
    }
    held_out = "last"

    def read_config(self, document: object) -> SequenceConfig:
        return SequenceConfig.from_json(document)

    def negatives(
        self, config: SequenceConfig, command: flags.Train | flags.Plan
    ) -> SequenceConfig:
        # If a run is continued, the loss is that of the flags.
        if command.negatives is None and getattr(command, "origin", None) is None:
            return config
        return dataclasses.replace(config, negatives=command.negatives)

    def source(self, command: flags.Train, before: Names | None) -> Source:
        data = read_histories(command.data, command)
        if before is not None:
            data = data.append_features(before)
        heldout = validation = split = None
        if (text := command.validation) is not None:
            parts = validation_split(text, data)
            if parts is None:
                heldout = self.heldout(text, command, data, command.data)
            else:
                data, heldout = parts
                split = text
                print(f"validation: {parts}", file=sys.stderr)
            validation = fingerprint_of_heldout(heldout.to_sparse(), data.row_names)
        times = [] if data.times is None else [data.times.view(np.int64)]
        return Source(
            data=data,
            chunks=[int(np.sum(np.diff(data.indptr) > 1))],  # as `fit` has them
            fingerprint=fingerprint(data.indptr, data.indices, *times),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=True,
            heldout=heldout,
            validation=validation,
            split=split,
        )

    def scanned(self, command: flags.Train) -> Source:
        interactions.check_scanned(command)
        histories = scan_sequences(
            command.data,
            user=command.columns.user,
            item=command.columns.item,
            time=time_column(command),
            chunk_rows=command.chunk_rows,
        )
        ends = chunk_ends(histories.groups, command.chunk_rows or 1)
        return Source(
            data=histories,
            chunks=np.diff([0, *ends]).tolist(),
            fingerprint=histories.fingerprint(),
            num_features=histories.num_features,
            known=histories.feature_names,
            indicator=True,
        )

    def suited(
        self, config: SequenceConfig, command: flags.Train, source: Source
    ) -> tuple[SequenceConfig, str]:
        described = command.config is not None or command.origin is not None
        if described or command.chunk_rows is not None:
            return config, ""
        config = config.suited_to(source.data)
        lengths = np.diff(source.data.indptr)
        older = entries_cut_off(lengths, config.max_length)
        said = f"max_length {config.max_length}"
        if older:
            said += (
                f", from which {older / lengths.sum():.1%} of the entries are cut off"
            )
        return config, said

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
        config = self.read_config({"version": 1, "model": command.kind})
        tuned = ("width", "dropout", "temperature")
        return {name: getattr(config, name) for name in tuned}

    def evaluate(self, command: flags.Evaluate, run: Opened) -> Mapping[str, float]:
        if command.test is None:
            raise ValueError("name the TEST file, what the model should find")
        reading = meanwhile(lambda: self.read_shown(command.train, command, run))
        model = run.model()
        train, candidates = reading(), None
        if (path := command.candidates) is not None:
            candidates = read_file(path, command, features=run.known, indicator=True)
        return evaluate(
            model,
            train,
            self.heldout(command.test, command, train, command.train),
            candidates=candidates,
            **interactions.counted(command),
        )

    def read_shown(self, path, command, run: Opened) -> SequenceDataset:
        return read_histories(path, command, features=run.known)

    def read_heldout(self, path, command, data: SequenceDataset) -> SequenceDataset:
        return read_histories(path, command, features=data)

    def excluded(
        self, command: flags.Predict, run: Opened, data: SequenceDataset
    ) -> SequenceDataset | SparseDataset | None:
        if command.exclude is None:
            return data if command.exclude_seen else None
        unwanted = self.read_shown(command.exclude, command, run).to_sparse()
        return data.to_sparse().merge(unwanted) if command.exclude_seen else unwanted

    def counts(self, data: SequenceDataset) -> np.ndarray:
        return np.bincount(data.indices, minlength=data.num_features)


COMMANDS: Commands = Histories()
