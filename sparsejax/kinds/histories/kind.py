"""Histories: what users did in its order, and models that say what comes next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np

from sparsejax.data import (
    ScannedSequences,
    SequenceDataset,
    SparseDataset,
    scan_sequences,
)
from sparsejax.data.reading.histories import unordered
from sparsejax.data.reading.sources import Inputs, num_columns
from sparsejax.data.scan import chunk_ends
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds import interactions
from sparsejax.kinds.content import finished
from sparsejax.kinds.histories.next_items import (
    NextItems,
    check_history_model,
    event_shapes,
    has_times,
    shown_of,
)
from sparsejax.kinds.kind import (
    DataSizes,
    Defaults,
    Kind,
    Maker,
    Measurement,
    Range,
    Tuned,
    kind_of,
)
from sparsejax.kinds.reading import (
    read_file,
    read_histories,
)
from sparsejax.kinds.source import Opened, Source
from sparsejax.kinds.threads import meanwhile
from sparsejax.options.measuring import Evaluate, Measure
from sparsejax.options.models import BY_DEFAULT, Described
from sparsejax.options.models import Histories as HistoryOptions
from sparsejax.options.planning import Plan
from sparsejax.options.predicting import Write
from sparsejax.options.reading import Reading
from sparsejax.options.training import Fit, Training
from sparsejax.sequence.config import (
    AttentionConfig,
    SequenceConfig,
    entries_cut_off,
)

# Widths that `tune` tries.
_WIDTHS = (32, 64, 128, 256, 512)


class Histories(interactions.Interactions[SequenceConfig, SequenceDataset]):
    """The kind of a `SequenceConfig` and of a `SequenceDataset`."""

    name = "histories"
    # On the validation of Amazon Beauty, steps also on that of MovieLens.
    defaults = Defaults(
        batch_size=256,
        least_epochs=40,
        least_steps=3500,
        optimizer="adamw",
        options={"b2": 0.98, "weight_decay": 0.1},
    )
    held_out = "last"
    tuned: ClassVar[Tuned] = {
        "width": _WIDTHS,
        "dropout": Range(0.0, 0.7),
        "temperature": interactions.TEMPERATURES,
    }

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.sequence.build import build_sequence_model

        if targets is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out targets"
            )
        items = num_columns("data", data)
        sizes: dict[str, Any] = {"items": items, "content": content}
        if (events := getattr(data, "events", None)) is not None:
            from sparsejax.sequence.events import EventSizes

            sizes["events"] = EventSizes.of(events)
        return Maker(functools.partial(build_sequence_model, config, **sizes))

    def examples(self, model, inputs, targets, weights) -> Examples:
        from sparsejax.kinds.histories.job import sequence_examples, with_targets

        return sequence_examples(model, with_targets(inputs, targets, weights))

    def job(self, asked: Fit) -> Job:
        from sparsejax.kinds.histories.job import sequence_job

        return sequence_job(asked)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        shown = shown_of(model, inputs)
        exclude = unordered("exclude", exclude, inputs)
        return _ranker(model, inputs), shown, exclude

    def excluded_in_validation(self, data: SequenceDataset) -> Literal["inputs"] | None:
        from sparsejax.kinds.histories.job import left_out_of_validation

        return left_out_of_validation(data)

    def encoder(self, model: Any, inputs: Any) -> tuple[Any, Inputs]:
        encoder, shown = super().encoder(model, inputs)
        if not hasattr(model, "last"):
            raise TypeError(
                "vectors of histories need a model with the method last(histories), as a "
                f"SequenceModel has; {type(model).__name__} does not"
            )
        return encoder, shown

    def evaluate(self, asked: Measure) -> dict[str, float]:
        from sparsejax.kinds.histories.evaluation import prepared_sequences

        if asked.heldout is None:
            raise ValueError("give heldout, as split_last makes it")
        model, inputs = asked.model, cast(SequenceDataset, asked.inputs)
        prepared = prepared_sequences(
            model,
            inputs,
            cast(SequenceDataset, asked.heldout),
            **asked.shared_with(Setup),
        )
        ranker = _ranker(model, inputs)
        return prepared.run(
            ranker, optimizer=asked.optimizer, keep_rows=asked.keep_rows
        )

    def portable(self, asked: Write):
        from sparsejax.kinds.portable import portable_ranker

        model, names = asked.model, asked.names
        check_history_model(model)
        if event_shapes(model) is not None:
            raise NotImplementedError(
                "the model reads columns of events, which predictors do not take yet; rank "
                "with recommend(model, ...), or train on data.without_events()"
            )
        timed = kind_of(names) is self and has_times(model, names)
        return portable_ranker(NextItems(model, times=timed), asked)

    def suit_to_memory(self, model, optimizer, data, batch_size) -> None:
        from sparsejax.kinds.histories.footprint import suit_to_memory

        suit_to_memory(model, optimizer, data, batch_size)

    def workload(self, asked: Plan, batch: int) -> Workload:
        from sparsejax.kinds.histories.footprint import history_workload

        return history_workload(asked, batch)

    def read_config(self, document: object) -> SequenceConfig:
        return SequenceConfig.from_json(document)

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[SequenceConfig, Collection[str]]:
        config, _ = super().described(model)
        named = options.values_of(HistoryOptions).items()
        given = {n: v for n, v in named if v is not None}
        for name in given:
            if not hasattr(config, name):
                raise ValueError(f"--{name} is of no use for {model}: leave it out")
        return dataclasses.replace(config, **given), ("max_length",)

    def suited_to_sizes(
        self, config: SequenceConfig, suited: Collection[str], sizes: DataSizes
    ) -> tuple[SequenceConfig, str]:
        if sizes.features is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out --features"
            )
        if "max_length" not in suited:
            return config, ""
        from sparsejax.kinds.histories.footprint import assumed_lengths

        lengths = assumed_lengths(sizes.rows, sizes.entries)
        config = config.suited_to_lengths(lengths)
        return config, f"max_length {config.max_length}"

    def choices(self, config: SequenceConfig) -> Tuned:
        heads = config.heads if isinstance(config, AttentionConfig) else 1
        widths = tuple(width for width in _WIDTHS if width % heads == 0)
        return {**self.tuned, "width": widths}

    def with_negatives(
        self, config: SequenceConfig, negatives: int | None, origin: bool
    ) -> SequenceConfig:
        # If a run is continued, the loss is what is asked for now.
        if negatives is None and not origin:
            return config
        sampler = "uniform" if negatives is None else config.sampler
        return dataclasses.replace(config, negatives=negatives, sampler=sampler)

    def read(
        self, source, reading: Reading, *, features=None, indicator=True
    ) -> SequenceDataset:
        del indicator  # histories have no values
        return read_histories(source, reading, features=features)

    def scan(self, training: Training) -> tuple[ScannedSequences, Sequence[int]]:
        if training.value is not None:
            raise ValueError("value=...: histories have no values; leave it out")
        rows = training.chunk_rows or 1
        histories = scan_sequences(
            training.data,
            user=training.user,
            item=training.item,
            time=training.time,
            chunk_rows=rows,
        )
        return histories, np.diff([0, *chunk_ends(histories.groups, rows)]).tolist()

    def matrix(self, data: SequenceDataset) -> SparseDataset:
        return data.to_sparse()

    def counts(self, data: SequenceDataset) -> np.ndarray:
        return np.bincount(data.indices, minlength=data.num_features)

    def fingerprint(self, data: SequenceDataset) -> str:
        more = [] if data.times is None else [data.times.view(np.int64)]
        more += [] if data.weights is None else [data.weights]
        return fingerprint(data.indptr, data.indices, *more)

    def num_trained(self, data: SequenceDataset) -> int:
        return data.num_examples

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

    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        if asked.heldout is None:
            raise ValueError("give heldout=..., what the model should find")
        inputs = asked.inputs
        shown = meanwhile(lambda: self.read_shown(inputs, reading, run))
        model = run.model()
        train, candidates = shown(), None
        if (source := asked.candidates) is not None:
            candidates = read_file(source, reading, features=run.known, indicator=True)
        heldout = self.heldout(asked.heldout, reading, train, inputs)
        how: dict[str, Any] = {"candidates": candidates, **asked.counted()}
        found = self.evaluate(
            Measure(model, train, heldout, keep_rows=asked.keep_rows, **how)
        )

        def beside() -> tuple[Evaluation, SparseDataset]:
            rows = train.to_sparse()
            wanted = heldout.only_targets().to_sparse()
            return prepared_evaluation(rows, wanted, Setup(**how)), rows

        return Measurement(found, beside)


def _ranker(model: Any, inputs: Any) -> NextItems:
    """The model as one that ranks items."""
    return NextItems(finished(model), times=has_times(model, inputs))


KIND: Kind = Histories()
