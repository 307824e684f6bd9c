"""Training job of item models in `fit`: inputs and targets, with held-out items for validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from jax.typing import ArrayLike

from sparsejax.data import ScannedDataset
from sparsejax.data.reading.sources import (
    Inputs,
    Source,
    Sources,
    check_inputs,
    features_of,
)
from sparsejax.data.scan import chunk_ends
from sparsejax.engine.rank.evaluation import Setup, metric_names, prepared_evaluation
from sparsejax.engine.rank.popularity import column_counts
from sparsejax.engine.train.job import Job, Measure, metric_of
from sparsejax.engine.train.resident import Examples, Roles, Targets, check_labels
from sparsejax.engine.train.streaming import Scanned, Stream
from sparsejax.kinds.content import check_counted, content_of, count_entries, finished
from sparsejax.options.training import Fit
from sparsejax.sparse import CSR


def scanned_items(
    inputs: ScannedDataset,
    targets: ScannedDataset | None = None,
    check: Callable[[CSR], None] = lambda labels: None,
) -> Scanned:
    """Describes scanned inputs and targets for `fit`. Chunks end at boundaries of row groups."""
    if targets is not None and targets.num_rows != inputs.num_rows:
        raise ValueError(
            f"targets has {targets.num_rows:,} rows but inputs has "
            f"{inputs.num_rows:,}; scanned rows are matched by position"
        )
    sources = [inputs] if targets is None else [inputs, targets]

    def read(start: int, stop: int) -> list[CSR]:
        matrices = [source.read(start, stop) for source in sources]
        check(matrices[-1])
        return matrices

    size = sum(s.num_entries * (4 if s.indicator else 8) for s in sources)
    ends = functools.partial(chunk_ends, inputs.groups)
    return Scanned(sources, Roles(), read, size, ends)


def item_examples(
    model: Any, inputs: Inputs, targets: Targets, weights: ArrayLike | None
) -> Examples:
    """Makes the examples of a model, and sets the entry counts of its items in its content."""
    examples = Examples.of(inputs, targets, weights)
    if content_of(model) is not None and not isinstance(targets, Mapping):
        roles = cast(Roles, examples.roles)
        matrix = cast(CSR, examples.matrices[roles.labels[0]])
        count_entries(model, column_counts(matrix))
    return examples


def item_job(asked: Fit) -> Job:
    """Checks the arguments of `fit`, and makes its `Job`."""
    model = asked.model
    inputs, validation = asked.inputs, asked.validation
    targets = cast(Targets | ScannedDataset, asked.targets)
    k, metric = asked.cut_off, None
    if validation is not None:
        metric = metric_of(
            asked.early_stopping, f"ndcg@{k}", metric_names(k), f"with {k=}"
        )
    Roles().check(model)
    check = functools.partial(check_labels, getattr(model, "loss_rule", None))
    if isinstance(inputs, ScannedDataset):
        check_counted(model)
        if targets is not None and not isinstance(targets, ScannedDataset):
            raise TypeError("inputs is scanned, so targets must be scanned too")
        if validation is not None:
            raise ValueError(
                "validation needs the inputs in host memory, and these are scanned; call "
                "evaluate with some rows of them, for example in log=..."
            )
        rows = scanned_items(inputs, targets, functools.partial(check, whole=False))
        return Job(Stream(rows, asked.row_weights), None, None)
    if isinstance(targets, ScannedDataset):
        raise TypeError("targets is scanned, so inputs must be scanned too")
    shown = Inputs.of(cast(Sources, inputs))
    check_inputs(shown, features_of(model))
    examples = item_examples(model, shown, targets, asked.row_weights)
    # A model with several targets has a loss for each of them.
    if not isinstance(targets, Mapping):
        roles = cast(Roles, examples.roles)
        check(examples.matrices[roles.labels[0]], whole=True)
    elif validation is not None:
        raise ValueError(
            "validation ranks the items of a single target, and there are several; call "
            "evaluate in after_epoch=..."
        )
    if validation is None:
        return Job(examples, None, None)

    def measure(batch_size: int) -> Measure:
        setup = Setup(
            k=k,
            exclude="inputs" if targets is None else cast(Source | str, targets),
            popularity=None,
            batch_size=batch_size,
        )
        prepared = prepared_evaluation(shown, cast(Source, validation), setup)
        return prepared.of_epoch(finished)

    return Job(examples, metric, measure)
