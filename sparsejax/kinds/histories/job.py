"""Training job of history models in `fit`: next-item prediction, in memory or from disk."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.data.reading.histories import EventShapes, arrays_of
from sparsejax.data.reading.sources import check_columns
from sparsejax.data.scan import chunk_ends
from sparsejax.data.scans.scan_sequences import ScannedSequences
from sparsejax.data.sets.click_schema import labels_document
from sparsejax.data.sets.event_schema import CONTEXT
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.rank.evaluation import metric_names
from sparsejax.engine.train.job import Job, metric_of
from sparsejax.engine.train.job import Measure as Measured
from sparsejax.engine.train.resident import Examples, TrainingTask
from sparsejax.engine.train.streaming import Matrix, Scanned, Stream
from sparsejax.kinds.content import check_counted, content_of, count_entries, finished
from sparsejax.kinds.histories.evaluation import prepared_sequences
from sparsejax.kinds.histories.next_items import (
    NextItems,
    check_events,
    check_history_model,
    event_shapes,
    has_times,
)
from sparsejax.mesh.layout import num_devices
from sparsejax.options.measuring import Measure
from sparsejax.options.training import Fit
from sparsejax.sequence.model import SequenceModel, TokenModel
from sparsejax.sparse import CSR, host_rows


@dataclasses.dataclass(frozen=True)
class SequenceTask(TrainingTask):
    """The `TrainingTask` of models of histories.

    The matrices are, in this order: the last `max_length + 1` items of each row, `[n, max_length +
    1]`; their times, if the model uses them; their event columns; their weights as targets; and,
    if the model packs targets, the positions that have a next item. The capacity of this matrix
    bounds their number in a batch.

    Attributes:
      packs: whether the model's loss takes `max_targets`.
      even: whether rows are assigned to batches and devices so that each has equally many entries.
      events: names of the columns of events that the model reads.
      weighted: whether the data has weights.
      wire_dtype: dtype in which item vectors and their gradients are sent between devices. None is
          the dtype of the vectors.
    """

    packs: bool
    # These fields are not in `repr`: a checkpoint compares it to recognize its data.
    even: bool = dataclasses.field(repr=False)  # pyrefly: ignore[bad-override]
    events: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    weighted: bool = dataclasses.field(default=False, repr=False)
    wire_dtype: str | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def of_model(
        cls, model: nnx.Module, data: Any = None, wire_dtype: str | None = None
    ) -> SequenceTask:
        """Makes the task for a model, and for data that may have weights."""
        return cls(
            isinstance(model, SequenceModel),
            isinstance(model, TokenModel),
            tuple(_shapes_in_training(model) or ()),
            getattr(data, "weights", None) is not None,
            wire_dtype,
        )

    @property
    def whole(self) -> bool:
        return True

    def of(self, matrices: Sequence) -> tuple[Any, Any]:
        return matrices, None

    def check(self, model: Any) -> None:
        check_history_model(model)

    def loss(self, model: Any, x: Any, labels: Any, weights: jax.Array) -> jax.Array:
        """`model.loss`: the mean over the targets of the batch.

        The first item of a row is no target.
        """
        histories, *more = x
        # Rows that pad a batch get empty histories, so they have no targets.
        histories = jnp.where(weights[:, None] > 0, histories, -1)
        named = {"max_targets": more.pop().nse} if self.packs else {}
        if self.weighted:
            named["weights"] = more.pop()
        if self.events:
            columns = [more.pop() for _ in self.events]
            named["events"] = dict(zip(self.events, reversed(columns), strict=True))
        if more:
            named["times"] = more[0]
        if self.wire_dtype is not None:
            named["wire_dtype"] = self.wire_dtype
        return model.loss(histories, **named)

    def matrices(self, model: Any, data: Any) -> list[Matrix]:
        """The matrices of `Histories` or a `SequenceDataset`, in the order that the class
        describes.
        """
        length, times = model.config.max_length + 1, has_times(model, data)
        events = _shapes_in_training(model)
        found = arrays_of(data, length, times=times, events=events)
        arrays: list[Matrix] = [*found.values()]
        if self.weighted:
            # The loss is a weighted mean, so scaling the weights does not change it. The sum of
            # large weights would overflow.
            weights = data.weights / np.float32(data.weights.max(initial=0) or 1)
            arrays.append(data.padded_column(weights, length))
        if not self.packs:
            return [*arrays]
        # Without user columns, the first item is no target. With them, it follows their position.
        first = int(getattr(model, "users", None) is None)
        targets = np.minimum(np.diff(data.indptr), length) - first
        has_next = np.arange(length - first) < targets[:, None]
        places = np.nonzero(has_next)[1].astype(np.int32)
        ends = np.cumsum(has_next.sum(axis=1), dtype=np.int32)
        return [*arrays, CSR(None, places, np.append(0, ends), num_cols=length - first)]


def _shapes_in_training(model: nnx.Module) -> EventShapes | None:
    """`event_shapes` without columns of context: in training, context comes from the targets' own
    events.
    """
    if (shapes := event_shapes(model)) is None:
        return None
    return {name: s for name, s in shapes.items() if not name.startswith(CONTEXT)}


def with_targets(
    data: SequenceDataset | ScannedSequences,
    targets: Any,
    weights: Any,
    what: str = "inputs",
) -> Any:
    """Adds to histories the targets and weights that `fit` was given.

    Args:
      data: histories.
      targets: kinds of events to predict, or None for all.
      weights: weight of each kind of event, name of a column, `[entries]` numbers, or None.
      what: name of the data, for messages.

    Raises:
      NotImplementedError: histories that are scanned from disk have a number for each entry.
      ValueError: the events have no kinds, or none of the given kinds; a weight is negative or not
          finite; or no event is a target.
    """
    if targets is None and weights is None:
        return data
    kinds = [targets] if isinstance(targets, str) else targets
    if kinds is not None and not (
        isinstance(kinds, list | tuple) and all(isinstance(k, str) for k in kinds)
    ):
        raise ValueError(
            "the targets of histories are their own items: leave out targets, or name the "
            f"kinds of events to predict, such as 'purchase', got {type(targets).__name__}"
        )
    if weights is None or isinstance(weights, str | Mapping):
        return data.with_targets(kinds, weights=weights)
    if not isinstance(data, SequenceDataset):
        raise NotImplementedError(
            f"{what} is scanned: give weights by the names of kinds or of a column of numbers"
        )
    data = dataclasses.replace(data, weights=weights)
    if kinds is None:
        return data
    of_kinds = data.with_targets(kinds).weights
    assert data.weights is not None and of_kinds is not None
    return dataclasses.replace(data, weights=data.weights * of_kinds)


def sequence_examples(
    model: Any, sequences: SequenceDataset, wire_dtype: str | None = None
) -> Examples:
    """Makes the examples of a model: rows that have a target, see `SequenceDataset.are_examples`.

    Raises:
      TypeError: the model is not a model of histories.
      ValueError: the data differs from the model in its items or event columns, or no row has a
          target.
    """
    _check(model, sequences)
    kept = sequences.are_examples
    if sequences.weights is not None and getattr(model, "next_event", None) is None:
        # The model reads only the last positions of a long row, so only their weights count.
        last = sequences.padded_column(sequences.weights, model.config.max_length + 1)
        kept &= (last[:, int(sequences.users is None) :] > 0).any(axis=1)
    kept = np.flatnonzero(kept)
    if not kept.size:
        targets = "" if sequences.weights is None else " of positive weight"
        raise ValueError(
            f"no row has two entries, an item and the next{targets}, so there is nothing to "
            "learn"
        )
    if content_of(model) is not None:
        counts = np.bincount(sequences.indices, minlength=sequences.num_features)
        count_entries(model, counts)
    task = SequenceTask.of_model(model, sequences, wire_dtype)
    matrices = (
        host_rows(m, kept) if isinstance(m, CSR) else m[kept]
        for m in task.matrices(model, sequences)
    )
    return Examples(task, tuple(matrices), None)


def _check(model: Any, data: SequenceDataset | ScannedSequences) -> None:
    check_history_model(model)
    check_columns("inputs", data.num_features, model.num_items, "items")
    check_events(model, data)


def scan_of_sequences(
    model: Any, sequences: ScannedSequences, wire_dtype: str | None = None
) -> Scanned:
    """Describes scanned histories for `fit`. Chunks end at boundaries of row groups."""
    roles = SequenceTask.of_model(model, sequences, wire_dtype)
    # Bytes of an entry: an item, a time, a position (4 bytes each), a weight, and event columns.
    shapes = (_shapes_in_training(model) or {}).values()
    size = 12 + 4 * roles.weighted + sum(4 * math.prod(shape) for shape in shapes)
    size *= sequences.num_rows * (model.config.max_length + 1)
    read = lambda *rows: roles.matrices(model, sequences.read(*rows))
    ends = functools.partial(chunk_ends, sequences.groups)
    return Scanned([sequences], roles, read, size, ends)


def left_out_of_validation(sequences: SequenceDataset) -> Literal["inputs"] | None:
    """The `exclude` option of `evaluate`: "inputs" unless some history repeats an item, else None.

    Repeated items must be found, too, so they must not be excluded.
    """
    repeats = sequences.to_sparse().num_entries < sequences.num_entries
    return None if repeats else "inputs"


def sequence_job(asked: Fit) -> Job:
    """Checks the arguments of `fit`, and makes its `Job`."""
    model = asked.model
    validation, k = asked.validation, asked.cut_off
    narrow = None
    if asked.wire_dtype is not None:
        if not isinstance(model, TokenModel) or num_devices() == 1:
            raise ValueError(
                "wire_dtype is of no use here: it is for HSTU and SASRec on a mesh of "
                "several devices; leave it out"
            )
        narrow = jnp.dtype(asked.wire_dtype).name
    # On a single device nothing is sent, and the checkpoint does not contain this setting.
    settings: dict[str, Any] = {"wire_dtype": narrow} if num_devices() > 1 else {}
    if (head := getattr(model, "next_event", None)) is not None:
        settings |= labels_document({each.name: each.column for each in head.labels})
    if validation is not None and not isinstance(validation, SequenceDataset):
        raise TypeError(
            "histories are validated on a SequenceDataset, as split_last makes it, got "
            f"{type(validation).__name__}"
        )
    inputs = cast(SequenceDataset | ScannedSequences, asked.inputs)
    sequences = with_targets(inputs, asked.targets, asked.weights)
    if isinstance(sequences, ScannedSequences):
        _check(model, sequences)
        check_counted(model)
        if validation is not None:
            raise ValueError(
                "validation needs the histories in host memory, and these are scanned; "
                "call evaluate with some of them, for example in log=..."
            )
        scanned = scan_of_sequences(model, sequences, narrow)
        return Job(Stream(scanned, None), None, None, settings=settings)
    examples = sequence_examples(model, sequences, narrow)
    if validation is None:
        return Job(examples, None, None, settings=settings)
    if validation.weights is None:
        # Single weights are for the entries of `inputs`. In validation, only the weights by kind
        # of event are used, to select the targets.
        by_kind = asked.weights if isinstance(asked.weights, str | Mapping) else None
        try:
            validation = with_targets(validation, asked.targets, by_kind, "validation")
        except ValueError as error:
            raise ValueError(f"validation: {error}") from error
    metric = metric_of(asked.early_stopping, f"ndcg@{k}", metric_names(k), f"with {k=}")

    times = has_times(model, sequences)

    def measure(batch_size: int) -> Measured:
        asked = Measure(
            model,
            sequences,
            validation,
            k=k,
            exclude=left_out_of_validation(sequences),
            popularity=None,
            # Ranking needs less memory than a training step, and is faster with large batches.
            batch_size=max(batch_size, 1024),
        )
        ranker = lambda model: NextItems(finished(model), times=times)
        return prepared_sequences(asked).of_epoch(ranker)

    return Job(examples, metric, measure, settings=settings)
