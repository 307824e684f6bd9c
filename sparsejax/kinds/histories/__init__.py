"""Histories: what users did in its order, and models that say what comes next."""

from __future__ import annotations

import functools
from typing import Any

from sparsejax.data.reading.histories import unordered
from sparsejax.data.reading.sources import Inputs, num_columns
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds.content import finished
from sparsejax.kinds.histories.next_items import (
    NextItems,
    check_history_model,
    has_times,
    shown_of,
)
from sparsejax.kinds.kind import Defaults, Kind, Maker, kind_of


class Histories(Kind):
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

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.kinds.histories.modules import new_sequence_model

        _check_targets(targets)
        inputs = num_columns("data", data)
        sizes = {"inputs": inputs, "content": content}
        return functools.partial(new_sequence_model, config, **sizes)

    def examples(self, model, inputs, targets, weights) -> Examples:
        from sparsejax.kinds.histories.job import sequence_examples

        _check_targets(targets)
        return sequence_examples(model, inputs, weights)

    def job(self, model, inputs, *, targets, **options) -> Job:
        from sparsejax.kinds.histories.job import sequence_job

        _check_targets(targets)
        return sequence_job(model, inputs, **options)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        shown = shown_of(model, inputs)
        exclude = unordered("exclude", exclude, inputs)
        return _ranker(model, inputs), shown, exclude

    def evaluate(self, model, inputs, *, heldout, optimizer, keep_rows, **options):
        from sparsejax.kinds.histories.evaluation import prepared_sequences

        if heldout is None:
            raise ValueError("give heldout, as split_last makes it")
        prepared = prepared_sequences(model, inputs, heldout, **options)
        ranker = _ranker(model, inputs)
        return prepared.run(ranker, optimizer=optimizer, keep_rows=keep_rows)

    def portable(self, model, names, **options):
        from sparsejax.kinds.portable import portable_ranker

        check_history_model(model)
        timed = kind_of(names) is self and has_times(model, names)
        return portable_ranker(NextItems(model, times=timed), names, **options)

    def suit_to_memory(self, model, optimizer, data, batch_size) -> None:
        from sparsejax.kinds.histories.footprint import suit_to_memory

        suit_to_memory(model, optimizer, data, batch_size)

    def workload(self, network, **sizes) -> Workload:
        from sparsejax.kinds.histories.footprint import history_workload

        return history_workload(network, **sizes)


def _ranker(model: Any, inputs: Any) -> NextItems:
    """The model as one that ranks items."""
    return NextItems(finished(model), times=has_times(model, inputs))


def _check_targets(targets: Any) -> None:
    if targets is not None:
        raise ValueError(
            "the targets of histories are their own items; leave out targets"
        )


KIND = Histories()
