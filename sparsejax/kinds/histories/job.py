"""Models of histories in `fit`: what comes next, in memory or from disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sparsejax.data.reading.histories import arrays_of
from sparsejax.data.reading.sources import check_columns
from sparsejax.data.scan import chunk_ends
from sparsejax.data.scans.scan_sequences import ScannedSequences
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.rank.evaluation import metric_names
from sparsejax.engine.train.job import Job, Measure, metric_of
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.engine.train.resident import Examples
from sparsejax.engine.train.streaming import Matrix, Stream
from sparsejax.kinds.content import check_counted, content_of, count_entries, finished
from sparsejax.kinds.histories.evaluation import prepared_sequences
from sparsejax.kinds.histories.next_items import (
    NextItems,
    check_history_model,
    has_times,
)
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sequence.model import SequenceModel, TokenModel
from sparsejax.sparse import CSR, host_rows


@dataclasses.dataclass(frozen=True)
class SequenceTask:
    """The `TrainingTask` of models of histories.

    Matrices are the last `max_length + 1` items of each row, `[n, max_length + 1]`, their
    times if the model uses them, and the places that have a next item if the model packs
    them: their number in a batch has a bound, which the matrix's capacity is.

    Attributes:
      packs: whether the loss of the model takes `max_targets`.
      even: whether it deals rows to batches and to the parts of "data" by their entries.
    """

    packs: bool
    # Checkpoints know data by what this is written as.
    even: bool = dataclasses.field(repr=False)

    @classmethod
    def of_model(cls, model: Any) -> SequenceTask:
        return cls(isinstance(model, SequenceModel), isinstance(model, TokenModel))

    @property
    def inputs(self) -> list[str]:
        return []

    @property
    def whole(self) -> bool:
        return True

    def of(self, matrices: Sequence) -> tuple[Any, Any]:
        return matrices, None

    def check(self, model: Any) -> None:
        check_history_model(model)

    def loss(self, model: Any, x: Any, labels: Any, weights: jax.Array) -> jax.Array:
        """`model.loss`, the mean over all items of the batch but the first of each row."""
        histories, *more = x
        # A row that only fills up the batch has no items, so nothing to learn.
        histories = jnp.where(weights[:, None] > 0, histories, -1)
        named = {"max_targets": more.pop().nse} if self.packs else {}
        if more:
            named["times"] = more[0]
        return model.loss(histories, **named)

    def staging(self, model: Any, optimizer: Optimizer, deterministic: bool) -> None:
        return None

    def with_staged(self, x: Any, staged: Any) -> Any:
        return x

    def matrices(self, model: Any, data: Any) -> list[Matrix]:
        """The matrices of `Histories` or a `SequenceDataset`."""
        length, times = model.config.max_length + 1, has_times(model, data)
        arrays: list[Matrix] = [*arrays_of(data, length, times=times).values()]
        if not self.packs:
            return [*arrays]
        targets = np.minimum(np.diff(data.indptr), length) - 1
        has_next = np.arange(length - 1) < targets[:, None]
        places = np.nonzero(has_next)[1].astype(np.int32)
        ends = np.cumsum(has_next.sum(axis=1), dtype=np.int32)
        return [*arrays, CSR(None, places, np.append(0, ends), num_cols=length - 1)]


def sequence_examples(
    model: Any, sequences: SequenceDataset, weights: ArrayLike | None = None
) -> Examples:
    """The examples for a model: the rows with two entries or more.

    Raises:
      TypeError: the model is no model of histories.
      ValueError: the data have other items than the model, or no row has two entries.
      NotImplementedError: there are weights.
    """
    _check(model, sequences, weights)
    kept = np.flatnonzero(np.diff(sequences.indptr) > 1)
    if not kept.size:
        raise ValueError(
            "no row has two entries, an item and the next, so there is nothing to learn"
        )
    if content_of(model) is not None:
        counts = np.bincount(sequences.indices, minlength=sequences.num_features)
        count_entries(model, counts)
    task = SequenceTask.of_model(model)
    matrices = (
        host_rows(m, kept) if isinstance(m, CSR) else m[kept]
        for m in task.matrices(model, sequences)
    )
    return Examples(task, tuple(matrices), None)


def _check(model: Any, data: Any, weights: ArrayLike | None) -> None:
    check_history_model(model)
    check_columns("inputs", data.num_features, model.num_items, "items")
    if weights is not None:
        raise NotImplementedError(
            "the loss of histories is a mean over their items: rows cannot have weights"
        )


class ScanOfSequences:
    """Histories on disk, see `streaming.Scanned`."""

    def __init__(self, model: Any, sequences: ScannedSequences):
        self._model, self._sequences = model, sequences
        self.roles = SequenceTask.of_model(model)
        self.num_rows = sequences.num_rows
        self.chunk_rows: int | None = sequences.chunk_rows

    @property
    def num_bytes(self) -> int:
        # Histories, times and places.
        return 12 * self.num_rows * (self._model.config.max_length + 1)

    def ends(self, chunk_rows: int) -> list[int]:
        """Chunks end where a group of rows does."""
        return chunk_ends(self._sequences.groups, chunk_rows)

    def read(self, start: int, stop: int) -> list[Matrix]:
        return self.roles.matrices(self._model, self._sequences.read(start, stop))

    def fingerprint(self) -> str:
        return self._sequences.fingerprint()


def left_out_of_validation(sequences: SequenceDataset) -> Literal["inputs"] | None:
    """`exclude` of `evaluate`: items that histories have, unless they have some twice.

    Items that come again are to be found, too.
    """
    repeats = sequences.to_sparse().num_entries < sequences.num_entries
    return None if repeats else "inputs"


def sequence_job(
    model: Any,
    sequences: SequenceDataset | ScannedSequences,
    *,
    weights: ArrayLike | None,
    validation: Any,
    stopping: EarlyStopping | None,
    k: int,
) -> Job:
    """The arguments of `fit`, checked."""
    if validation is not None and not isinstance(validation, SequenceDataset):
        raise TypeError(
            "histories are validated on a SequenceDataset, as split_last makes it, got "
            f"{type(validation).__name__}"
        )
    if isinstance(sequences, ScannedSequences):
        _check(model, sequences, weights)
        check_counted(model)
        if validation is not None:
            raise ValueError(
                "validation needs the histories in host memory, and these are scanned; "
                "call evaluate with some of them, for example in log=..."
            )
        return Job(Stream(ScanOfSequences(model, sequences), None), None, None)
    examples = sequence_examples(model, sequences, weights)
    if validation is None:
        return Job(examples, None, None)
    metric = metric_of(stopping, f"ndcg@{k}", metric_names(k), f"with {k=}")

    times = has_times(model, sequences)

    def measure(batch_size: int) -> Measure:
        evaluation = prepared_sequences(
            model,
            sequences,
            validation,
            k=k,
            exclude=left_out_of_validation(sequences),
            popularity=None,
            # Ranking needs less memory than a step, and large batches take less time.
            batch_size=max(batch_size, 1024),
        )

        def measured(model, *, optimizer, deterministic):
            found = evaluation.run(
                NextItems(finished(model), times=times),
                optimizer=optimizer,
                deterministic=deterministic,
            )
            return {name: value for name, value in found.items() if "@" in name}

        return measured

    return Job(examples, metric, measure)
