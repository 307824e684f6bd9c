"""Runs of models of histories."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from sparsejax.data import SequenceDataset, SparseDataset, scan_sequences
from sparsejax.data.files.names import Names
from sparsejax.data.scan import chunk_ends
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.items.evaluation import prepared_for
from sparsejax.options.measuring import Evaluate
from sparsejax.options.predicting import Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.runs import interactions
from sparsejax.runs.kind import Opened, Source
from sparsejax.runs.reading import (
    fingerprint_of_heldout,
    read_file,
    read_histories,
    split_name,
    validation_split,
)
from sparsejax.runs.threads import meanwhile
from sparsejax.sequence.config import SequenceConfig, entries_cut_off
from sparsejax.verbs.evaluate import evaluate


class Histories(interactions.Interactions):
    """The runs of a `SequenceConfig`."""

    name = "histories"

    def read_config(self, document: object) -> SequenceConfig:
        return SequenceConfig.from_json(document)

    def described(self, model: str) -> tuple[SequenceConfig, Collection[str]]:
        return super().described(model)[0], ("max_length",)

    def with_negatives(
        self, config: SequenceConfig, negatives: int | None, origin: bool
    ) -> SequenceConfig:
        # If a run is continued, the loss is what is asked for now.
        if negatives is None and not origin:
            return config
        sampler = "uniform" if negatives is None else config.sampler
        return dataclasses.replace(config, negatives=negatives, sampler=sampler)

    def source(self, training: Training, before: Names | None) -> Source:
        data = everything = read_histories(training.data, training)
        if before is not None:
            data = everything = data.append_features(before)
        data, features = interactions.with_content(training, data, self.counts)
        everything = data
        heldout = validation = split = None
        if (asked := training.validation) is not None:
            parts = validation_split(asked, data)
            if parts is None:
                heldout = self.heldout(asked, training, data, training.data)
            else:
                data, heldout = parts
                split = split_name(asked)
                training.say(f"validation: {parts}")
            validation = fingerprint_of_heldout(heldout.to_sparse(), data.row_names)
        times = [] if data.times is None else [data.times.view(np.int64)]
        return Source(
            data=data,
            everything=everything,
            chunks=[int(np.sum(np.diff(data.indptr) > 1))],  # as `fit` has them
            fingerprint=fingerprint(data.indptr, data.indices, *times),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=True,
            heldout=heldout,
            validation=validation,
            split=split,
            features=features,
        )

    def scanned(self, training: Training) -> Source:
        interactions.check_scanned(training)
        rows = training.chunk_rows or 1
        histories = scan_sequences(
            training.data,
            user=training.user,
            item=training.item,
            time=training.time,
            chunk_rows=rows,
        )
        ends = chunk_ends(histories.groups, rows)
        return Source(
            data=histories,
            everything=histories,
            chunks=np.diff([0, *ends]).tolist(),
            fingerprint=histories.fingerprint(),
            num_features=histories.num_features,
            known=histories.feature_names,
            indicator=True,
        )

    def suited(
        self, config: SequenceConfig, training: Training, source: Source
    ) -> tuple[SequenceConfig, str]:
        if "max_length" not in training.suited or training.chunk_rows is not None:
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

    def evaluate(
        self, measuring: Evaluate, reading: Reading, run: Opened
    ) -> Mapping[str, float]:
        if measuring.heldout is None:
            raise ValueError("give heldout=..., what the model should find")
        inputs = measuring.inputs
        shown = meanwhile(lambda: self.read_shown(inputs, reading, run))
        model = run.model()
        train, candidates = shown(), None
        if (source := measuring.candidates) is not None:
            candidates = read_file(source, reading, features=run.known, indicator=True)
        heldout = self.heldout(measuring.heldout, reading, train, inputs)
        how: dict[str, Any] = {"candidates": candidates, **measuring.counted()}
        keep = measuring.keep_rows
        measured = evaluate(model, train, heldout, keep_rows=keep, **how)
        if measuring.baselines:
            rows = train.to_sparse()
            prepared = prepared_for(rows, heldout.to_sparse(), **how)
            measured = interactions.with_baselines(
                measured, prepared, rows, reading.say
            )
        return interactions.warn_of_popularity(measured)

    def read_shown(self, source, reading: Reading, run: Opened) -> SequenceDataset:
        return read_histories(source, reading, features=run.known)

    def read_heldout(
        self, source, reading: Reading, data: SequenceDataset
    ) -> SequenceDataset:
        return read_histories(source, reading, features=data)

    def excluded(
        self,
        recommending: Recommend,
        reading: Reading,
        run: Opened,
        data: SequenceDataset,
    ) -> SequenceDataset | SparseDataset | None:
        if recommending.exclude is None:
            return None if not recommending.exclude_seen else data
        unwanted = self.read_shown(recommending.exclude, reading, run).to_sparse()
        return (
            unwanted
            if not recommending.exclude_seen
            else data.to_sparse().merge(unwanted)
        )

    def counts(self, data: SequenceDataset) -> np.ndarray:
        return np.bincount(data.indices, minlength=data.num_features)


RUNS: interactions.Interactions = Histories()
