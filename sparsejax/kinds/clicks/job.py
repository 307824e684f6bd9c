"""Training job of click models in `fit`: labels, dense columns and ids, in memory or on disk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from sparsejax.callers import warn_caller
from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.click_records import check_lengths
from sparsejax.data.sets.click_schema import ClickSchema, KeyColumn, labels_document
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.host_slots import NoRoomError
from sparsejax.embeddings.staged import Staged
from sparsejax.engine.train.job import Job, Measure, metric_of
from sparsejax.engine.train.resident import (
    Dispatch,
    Examples,
    Resident,
    TrainingTask,
    checked_weights,
)
from sparsejax.engine.train.streaming import Matrix, Scanned, Stream
from sparsejax.kinds.clicks.dynamic import assigned, rates_of
from sparsejax.kinds.clicks.exchange import IdsAhead, exchange_of
from sparsejax.kinds.clicks.regression import least_share, set_to
from sparsejax.kinds.clicks.scores import (
    Clicks,
    check_click_model,
    check_columns,
    check_fixed,
    check_labels,
    check_same_columns,
    check_shape,
    evaluate_clicks,
    logits_of,
    names_of_metrics,
)
from sparsejax.losses import label_loss
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options import measuring
from sparsejax.options.training import Fit
from sparsejax.sparse import CSR, host_rows, with_room
from sparsejax.wide_ids import WideIds

_ONE_CLASS = "validation needs examples with label 0 and with label 1, for its AUC"


@dataclasses.dataclass(frozen=True)
class ClickTask(TrainingTask):
    """The `TrainingTask` of click models.

    The matrices are, in this order: labels `[n]`, or `[n, 2 l]` with the weights of the l labels
    as last columns; dense columns `[n, d]`; ids `[n, f]` of all features with one id per example;
    a CSR for each list feature; and, if there are 64-bit ids, their words `[n, f, 2]`, the low
    word first.

    Attributes:
      single: names of the features with one id per example.
      lists: names of the features of lists.
      keys: names of the features with one 64-bit id per example.
      weighted: whether the matrix of labels also has columns of weights.
      losses: with several labels the name and the quantile of each label's loss; else empty.
    """

    single: tuple[str, ...]
    lists: tuple[str, ...]
    keys: tuple[str, ...] = ()
    weighted: bool = False
    losses: tuple[tuple[str, float | None], ...] = ()

    @property
    def whole(self) -> bool:
        return bool(self.lists)

    @classmethod
    def of_data(cls, clicks: ClickDataset) -> ClickTask:
        lists = [name for name, ids in clicks.ids.items() if isinstance(ids, CSR)]
        keys = [n for n, c in clicks.schema.ids.items() if isinstance(c, KeyColumn)]
        single = [name for name in clicks.ids if name not in (*lists, *keys)]
        several = clicks.schema.several.values()
        losses = tuple((column.loss, column.quantile) for column in several)
        weighted = clicks.weights is not None or bool(several)
        return cls(tuple(single), tuple(lists), tuple(keys), weighted, losses)

    def matrices(self, clicks: ClickDataset) -> list[Matrix]:
        """The matrices of the given examples, in the order that the class describes."""
        ids = [np.asarray(clicks.ids[name]) for name in self.single]
        empty = np.empty((clicks.num_rows, 0), np.int32)
        rows = np.stack(ids, axis=1) if ids else empty
        lists = [clicks.ids[name] for name in self.lists]
        wide = [WideIds.of(clicks.ids[name]) for name in self.keys]
        words = [np.stack([ids.low, ids.high], axis=1) for ids in wide]
        keys = [np.stack(words, axis=1)] if words else []
        return [_with_weights(clicks), clicks.dense, rows, *lists, *keys]

    def of(self, matrices: Sequence) -> tuple[Any, Any]:
        labels, dense, rows, *lists = matrices
        ids = {n: rows[:, i] for i, n in enumerate(self.single)}
        if self.keys:
            *lists, words = lists
            low, high = words[..., 0], words[..., 1]
            ids |= {n: WideIds(low[:, i], high[:, i]) for i, n in enumerate(self.keys)}
        return (dense, ids | dict(zip(self.lists, lists, strict=True))), labels

    @property
    def begins_rows(self) -> bool:
        return bool(self.keys)

    def begun(
        self, model: nnx.Module, optimizer: Any, x: Any, exists: jax.Array
    ) -> Any:
        """Assigns rows of dynamic tables to new ids of the batch."""
        if not self.keys:
            return x
        dense, ids = x
        return dense, assigned(model, optimizer, ids, exists)

    def check(self, model: Any) -> None:
        check_click_model(model)

    def loss(
        self, model: nnx.Module, x: Any, labels: Any, weights: jax.Array
    ) -> jax.Array:
        """The binary cross-entropy of `model(dense, ids)`, or of its `training_logits`.

        With several labels, it returns the sum of their losses.
        """
        logits = getattr(model, "training_logits", model)(*x).astype(jnp.float32)
        check_shape(logits.shape, len(labels), len(self.losses))
        if self.losses:
            count = len(self.losses)
            each = zip(self.losses, logits.T, labels[:, :count].T, strict=True)
            found = jnp.stack([label_loss(*loss, z, y) for loss, z, y in each], axis=1)
            return weights @ jnp.sum(labels[:, count:] * found, axis=1)
        if self.weighted:
            labels, given = labels.T
            weights = weights * given
        return jnp.sum(weights * label_loss("binary", None, logits, labels))

    def staging(
        self, model: Any, optimizer: Optimizer, deterministic: bool
    ) -> ClickStaging | IdsAhead | None:
        staged = Staged.of(model, optimizer)
        if staged is None:
            return IdsAhead.of(model, deterministic)
        return ClickStaging(staged, self)

    def with_staged(self, x: Any, staged: Any) -> Any:
        return x[0], staged


def _with_weights(clicks: ClickDataset) -> np.ndarray:
    """Labels as columns, followed by columns with their weights if the data has weights. A missing
    label has the weight 0.
    """
    labels, weights = clicks.trained_labels, clicks.weights
    if not clicks.schema.several:
        return labels if weights is None else np.stack([labels, weights], axis=1)
    factors = [c.weight for c in clicks.schema.several.values()]
    of_label = np.array([1 if isinstance(f, str) else f for f in factors], np.float32)
    if weights is not None:
        of_label = of_label * weights.reshape(clicks.num_rows, -1)
    missing = np.isnan(labels)
    labels, given = np.where(missing, 0, labels), np.where(missing, 0, of_label)
    return np.concatenate([labels, given], axis=1, dtype=np.float32)


class ClickStaging:
    """The `Staging` of click models whose ids are looked up on the host."""

    def __init__(self, staged: Staged, task: ClickTask):
        self._staged, self._task = staged, task
        self._rows: tuple[jax.Array, np.ndarray, np.ndarray] | None = None
        # Number of steps whose rows fit in device memory at once. None until a dispatch did not
        # fit and was split.
        self._fits: int | None = None

    def parts(self, dispatch: Dispatch) -> Iterator[tuple[int, FeatureBatch]]:
        data, rows, sizes = dispatch.data, dispatch.rows, dispatch.sizes
        first, count = dispatch.first, dispatch.count
        if self._rows is None or self._rows[0] is not rows:  # once an epoch
            local = np.asarray(jax.jit(Resident.local)(data, rows))
            self._rows = rows, np.asarray(rows), local
        _, every, local = self._rows
        steps = range(first, first + count)
        room = sizes.capacities
        batches = [self._packed(data, every[i], local[i], room) for i in steps]
        batches = self._staged.numbered(batches)
        start, size = 0, self._fits or count
        while start < count:
            size = min(size, count - start)
            try:
                found = self._staged.steps(batches[start : start + size], sizes.steps)
            except Exception as error:
                if size == 1 or not isinstance(error, NoRoomError):
                    self._staged.begin_on_host(batches[start:])
                    raise
                self._fits = size = -(-size // 2)
                continue
            yield size, found
            start += size

    def _packed(
        self,
        data: Resident,
        every: np.ndarray,
        local: np.ndarray,
        capacities: Sequence[int],
    ) -> FeatureBatch:
        """The packed ids of a step; each list feature is padded to its capacity."""
        _, _, single, *lists = data.matrices

        def selected(matrix):
            parts = zip(np.asarray(matrix), local, strict=True)
            return np.concatenate([part[mine] for part, mine in parts])

        ids = selected(single)
        found: dict[str, Any] = {
            name: ids[:, i] for i, name in enumerate(self._task.single)
        }
        if self._task.keys:
            *lists, words = lists
            words, there = selected(words), every.reshape(-1) >= 0
            for i, name in enumerate(self._task.keys):
                found[name] = WideIds(words[:, i, 0], words[:, i, 1], there)
        for name, matrix, room in zip(
            self._task.lists, lists, capacities[3 : 3 + len(lists)], strict=True
        ):
            x = host_rows(jax.tree.map(np.asarray, matrix), every.reshape(-1))
            found[name] = with_room(x, room)
        return self._staged.packed(found)


def click_examples(clicks: ClickDataset, weights: ArrayLike | None = None) -> Examples:
    """Checks clicks and makes the `Examples` that a model is trained on.

    Raises:
      ValueError: there are no examples, or a weight is wrong.
    """
    _check_rows(clicks)
    if (given := clicks.weights) is not None and not given.any():
        raise ValueError("all examples have the weight 0: there is nothing to learn")
    named = [clicks.schema.weight or "", *clicks.schema.label_weights]
    if given is None and any(named):
        raise ValueError(f"the examples have no weights, but the schema names {named}")
    if clicks.propensities is None and clicks.schema.propensity is not None:
        name = clicks.schema.propensity
        raise ValueError(
            f"the examples have no propensities, but the schema names {name!r}"
        )
    for name, labels in zip(clicks.schema.several, clicks.labels.T, strict=False):
        # for example in a file of the last hour, whose purchases are not known yet
        if np.isnan(labels).all():
            warn_caller(
                f"no example has the label {name!r}, of which nothing is learned"
            )
    roles = ClickTask.of_data(clicks)
    weights = checked_weights(weights, clicks.num_rows)
    return Examples(roles, tuple(roles.matrices(clicks)), weights)


def _check_rows(clicks: Clicks) -> None:
    if clicks.num_rows == 0:
        raise ValueError("the data have no examples")


def scan_of_clicks(
    clicks: ScannedClicks, beside: Sequence[tuple[str, str]] = ()
) -> Scanned:
    """Describes scanned clicks for `fit`.

    Lists are not counted: the files do not state their lengths.
    """
    _check_rows(clicks)
    rows = clicks.num_rows
    # Only the values of a column show whether they are lists.
    roles = ClickTask.of_data(clicks.read(0, 1))

    def read(start: int, stop: int) -> list[Matrix]:
        part = clicks.read(start, stop)
        for pair in beside:
            check_lengths(part.ids, *pair)
        return roles.matrices(part)

    size = 4 * rows * len(clicks.schema.used)
    return Scanned([clicks], roles, read, size, lambda n: [*range(n, rows, n), rows])


def click_job(asked: Fit) -> Job:
    """Checks the arguments of `fit`, and makes its `Job`."""
    model, clicks, validation = asked.model, asked.inputs, asked.validation
    assert isinstance(clicks, Clicks)  # which its kind is
    check_columns(model, clicks)
    check_labels(model, clicks)
    check_fixed(clicks)
    # If no ids are exchanged between devices, `exchange` is None and `settings` is empty.
    exchange, settings = exchange_of(
        model, clicks, asked.wire_dtype, asked.exchange_room
    )
    settings = settings | labels_document(clicks.schema.several)
    metric, prepare = None, None
    if validation is not None:
        known = names_of_metrics(clicks.schema.several)
        metric = metric_of(asked.early_stopping, known[0], known, "of clicks")
        if not isinstance(validation, ClickDataset | ScannedClicks):
            raise TypeError(
                "clicks are validated on a ClickDataset or ScannedClicks, got "
                f"{type(validation).__name__}"
            )
        check_same_columns(clicks, validation)
        # The files of ScannedClicks are not read yet, so their labels are not known.
        if (
            isinstance(validation, ClickDataset)
            and not clicks.schema.several
            and len(np.unique(validation.labels)) < 2
        ):
            raise ValueError(_ONE_CLASS)
        prepare = functools.partial(_measure, clicks.schema, validation, metric)
    if isinstance(clicks, ClickDataset):
        examples = click_examples(clicks, asked.row_weights)
    else:
        scan = scan_of_clicks(clicks, getattr(model, "beside", ()))
        examples = Stream(scan, asked.row_weights)
    return Job(examples, metric, prepare, exchange, settings, rates_of(model))


def _measure(
    schema: ClickSchema, validation: Clicks, metric: str, batch_size: int
) -> Measure:
    # If training corrects clicks for positions and validation does not, the log loss on validation
    # cannot choose the share.
    corrects = schema.propensity or schema.fixed

    def measured(model, *, optimizer, deterministic) -> Mapping[str, float]:
        how = {"optimizer": optimizer, "batch_size": max(batch_size, 8192)}
        if getattr(model, "share", None) is not None and not corrects:
            _choose_share(model, validation, deterministic=deterministic, **how)
        asked = measuring.Measure(model, validation, **how)
        found = evaluate_clicks(asked, deterministic=deterministic)
        if metric not in found:
            wanted = "examples that have this label, and for an AUC both labels"
            raise ValueError(f"the validation gives no {metric}: it needs {wanted}")
        return found

    return measured


def _choose_share(model: Any, validation: Clicks, **options: Any) -> None:
    """Chooses the weight of the layers beside the regression by the log loss on `validation`."""
    found = []
    for share in (0.0, 1.0):
        set_to(model.share, share)
        logits, labels = logits_of(model, validation, **options)
        found.append(logits.astype(np.float64))
    set_to(model.share, least_share(found[0], found[1], labels))
