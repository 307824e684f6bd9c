"""Predicts click probabilities and measures their quality."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.callers import warn_caller
from sparsejax.data.files.names import quoted
from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.click_records import check_lengths
from sparsejax.data.sets.click_schema import (
    MISSING,
    RARE,
    HashedColumn,
    IdColumn,
    LabelColumn,
    VocabularyColumn,
    unweighted,
    vocabulary_of,
)
from sparsejax.data.sets.clicks import ClickDataset, check_same_schema
from sparsejax.embeddings.host_slots import NoRoomError
from sparsejax.embeddings.staged import Staged
from sparsejax.engine.batching import bucket, largest_batch
from sparsejax.engine.rank.loop import check_positive
from sparsejax.engine.rank.recommender import merged, split
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.kind import kind_of_model
from sparsejax.kinds.labels import (
    METRICS,
    OF_NUMBERS,
    Found,
    errors_of,
    of_binary,
    of_label,
    probabilities_of,
)
from sparsejax.mesh.layout import (
    axis_sizes,
    current_mesh,
    put_on_mesh,
    put_rows,
    replicated,
    using_auto_axes,
)
from sparsejax.mesh.promotion import promoting
from sparsejax.mesh.xla_options import Programs
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Measure
from sparsejax.sparse import CSR
from sparsejax.wide_ids import WideIds

Clicks = ClickDataset | ScannedClicks


def predict(
    model: ClickModel,
    clicks: Clicks,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int = 8192,
) -> Any:
    """Predicts the probability of a click for each example, `sigmoid(model(dense, ids))`.

    With several labels, a dict by label name, with `[examples]` arrays: probabilities for binary
    labels, numbers for labels with the losses "squared" and "quantile", see `LabelColumn`.

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n0,ann\\n")
    >>> clicks = read_clicks("clicks.csv", ClickSchema("click", ids={"user": HashedColumn(9)}))
    >>> config = WideDeepConfig(dim=4, hidden=(8,))
    >>> model = WideDeep(config, num_dense=0, features=clicks.features, rngs=nnx.Rngs(0))
    >>> predict(model, clicks).shape
    (3,)

    Labels are not read. On a mesh, batches are divided over the devices.

    Args:
      model: a click model, or a module that is called as `model(dense, ids)`, see `ClickModel`.
      clicks: examples; scanned ones are read a chunk at a time.
      optimizer: the model's optimizer, needed if its update of some table rows is still pending,
          as in `log` of `fit`.
      batch_size: examples scored at a time.

    Raises:
      FloatingPointError: a score is NaN, for example because a table does not have an id. The
          message names the example.
      TypeError: the model or the data are of another kind.
      ValueError: the columns of the data are not those of the model.
    """
    found = _Scores(model, optimizer, batch_size).of_all(clicks)
    if not clicks.schema.several:
        return probabilities_of(found.logits).astype(np.float32)
    return predictions(found.logits, clicks.schema.several)


def logits_of(
    model: ClickModel,
    clicks: Clicks,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int = 8192,
    deterministic: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """`[examples]` logits and labels, or `[examples, labels]` with several labels."""
    found = _Scores(model, optimizer, batch_size, deterministic).of_all(clicks)
    return found.logits, found.labels


def evaluate_clicks(asked: Measure, *, deterministic: bool = False) -> dict[str, float]:
    """`sparsejax.evaluate` of clicks.

    Args:
      asked: the call of `evaluate`.
      deterministic: whether results are bitwise equal in every process on GPUs of one kind.
    """
    clicks, groups = cast(Clicks, asked.inputs), asked.groups
    weighted, keep_rows = asked.weighted, asked.keep_rows
    if weighted and keep_rows:
        raise ValueError("keep_rows has no use for weights: leave out weighted")
    size = asked.batch_size or 8192
    scores = _Scores(asked.model, asked.optimizer, size, deterministic)
    if isinstance(groups, str) and groups not in clicks.schema.ids:
        raise ValueError(
            f"groups names the feature {groups!r}, but there are "
            f"{', '.join(clicks.schema.ids)}"
        )
    found = scores.of_all(clicks, groups if isinstance(groups, str) else None)
    if weighted and found.weights is None:
        raise ValueError(
            "weighted: the data have no weights, see ClickSchema(weight=...)"
        )
    by = None
    if groups is not None:
        by = np.asarray(groups) if found.groups is None else found.groups
        if by.shape != (shape := found.labels.shape[:1]):
            raise ValueError(f"groups must have shape {shape}, got shape {by.shape}")
        if isinstance(groups, str):
            _warn_of_merged(groups, clicks.schema.ids[groups], by)
    found = found._replace(groups=by, weights=found.weights if weighted else None)
    several = clicks.schema.several
    if not several:
        measured = of_binary(found.of_label() if weighted else found)
        rows = metrics.Rows.of_clicks(found.logits, found.labels) if keep_rows else None
    else:
        measured, parts = {}, {}
        for place, (name, column) in enumerate(several.items()):
            each = found.of_label(place)
            measured |= of_label(each, column, name)
            if keep_rows and len(each.labels):
                parts[name] = _rows_of_label(each, column)
        rows = metrics.Rows(None, {}, parts=parts) if keep_rows else None
    return measured if rows is None else metrics.Measured(measured, rows)


def _rows_of_label(found: Found, column: LabelColumn) -> metrics.Rows:
    if column.loss == "binary":
        return metrics.Rows.of_clicks(found.logits, found.labels)
    figures = {OF_NUMBERS[column.loss]: errors_of(found, column)}
    return metrics.Rows(None, figures, labels=found.labels)


def predictions(
    logits: np.ndarray, labels: Mapping[str, LabelColumn]
) -> dict[str, np.ndarray]:
    """Converts `[examples, labels]` logits to predictions, `[examples]` float32 for each label."""
    return {
        name: (probabilities_of(z) if column.is_probability else z).astype(np.float32)
        for (name, column), z in zip(labels.items(), logits.T, strict=True)
    }


def names_of_metrics(several: Mapping[str, LabelColumn]) -> list[str]:
    """Names of the metrics that early stopping can use, the default first."""
    if not several:
        return [*METRICS[:-1]]
    return [
        f"{metric}/{name}"
        for name, column in several.items()
        for metric in (
            METRICS[:-1] if column.loss == "binary" else [OF_NUMBERS[column.loss]]
        )
    ]


def _warn_of_merged(name: str, column: IdColumn, ids: np.ndarray) -> None:
    """Warns if several categories share an id; metrics then count them as one group."""
    advice = "; give the categories themselves as an array: groups=[...]"
    if isinstance(column, HashedColumn):
        room, found = column.size - 1, len(np.unique(ids[ids != MISSING]))
        if found == room:
            warn_caller(
                f"groups={name!r} is hashed to {room:,} ids, and all of them occur: categories "
                f"that share an id are one group{advice}"
            )
            return
        # Number of categories that on average hash to `found` distinct ids.
        expected = round(np.log1p(-found / room) / np.log1p(-1 / room))
        if expected > found:
            warn_caller(
                f"groups={name!r} is hashed to {room:,} ids, of which {found:,} occur: that is "
                f"what about {expected:,} categories give, and those that share an id are one "
                f"group{advice}"
            )
    elif isinstance(column, VocabularyColumn) and (rare := int((ids == RARE).sum())):
        warn_caller(
            f"groups={name!r}: {rare:,} of {len(ids):,} examples have a category without an id "
            f"of its own, rare or unknown, and are one group{advice}"
        )


def check_click_model(model: Any) -> None:
    """Raises TypeError if a model is not a click model."""
    if kind_of_model(model).ranks_items or not callable(model):
        raise TypeError(
            "clicks need a click model, such as sparsejax.clicks.DLRM, or a module that is called as "
            f"model(dense, ids); got {type(model).__name__}, "
            + ("which predicts items" if callable(model) else "which is not called")
        )


def check_columns(model: Any, clicks: Clicks) -> None:
    """Raises ValueError if the columns of the data differ from those of the model."""
    columns = clicks.schema.dense
    if getattr(model, "num_dense", len(columns)) != len(columns):
        raise ValueError(
            f"the model has num_dense={model.num_dense}, but the data have {len(columns)} "
            f"dense columns ({quoted(columns)}); build it with "
            "num_dense=len(data.schema.dense)"
        )
    wanted, given = getattr(model, "num_ids", None), clicks.num_ids
    if not isinstance(wanted, Mapping):
        return
    for name in [*wanted, *given]:
        if name not in given:
            raise ValueError(
                f"the model has a feature {name!r}, which the data lack; they have "
                f"{quoted(given)}"
            )
        if name not in wanted:
            raise ValueError(
                f"the data have a feature {name!r}, which the model lacks; it has "
                f"{quoted(wanted)}"
            )
        if wanted[name] != given[name]:
            raise ValueError(
                f"feature {name!r} has {given[name]:,} ids in the data, but the model was "
                f"built for {wanted[name]:,}; read all data with features=train and one "
                "schema, and build the model with features=train.features"
            )
    shared = {n: f for n, f in clicks.features.items() if isinstance(f, str)}
    read = getattr(model, "like", shared)
    for name in given:
        if read.get(name) != shared.get(name):
            raise ValueError(
                f"feature {name!r} has {_table(shared.get(name))} by the data, but "
                f"{_table(read.get(name))} in the model; build it with "
                "features=train.features"
            )
    if isinstance(clicks, ClickDataset):
        for pair in getattr(model, "beside", ()):
            check_lengths(clicks.ids, *pair)


def check_shape(shape: tuple[int, ...], rows: int, labels: int) -> None:
    """Raises ValueError unless logits have the shape `[rows]`, or `[rows, labels]`."""
    wanted = (rows, labels) if labels else (rows,)
    if shape != wanted:
        raise ValueError(
            "a click model returns a logit for each example, [batch], or with several labels for "
            f"each of them, [batch, labels]: expected the shape {wanted}, got {shape}"
        )


def _check_numbers(logits: np.ndarray, first: int) -> None:
    wrong = np.isnan(logits).any(axis=(*range(1, logits.ndim),))
    if wrong.any():
        raise FloatingPointError(
            f"the model gives NaN for example {first + int(wrong.argmax()):,}; its weights "
            "are not finite, or an id is outside its table"
        )


def check_fixed(clicks: Clicks) -> None:
    """Raises ValueError if the fixed category of a column has no id in the training data: a model
    would never learn it.
    """
    for name, value in clicks.schema.fixed.items():
        known = vocabulary_of(clicks.schema, name, clicks.vocabularies)
        if known is not None and value and str(value) not in known:
            raise ValueError(
                f"column {name!r} is fixed to the category {value!r}, which has no id of "
                f"its own: the training data has {quoted(known)}"
            )


def check_labels(model: Any, clicks: Clicks) -> None:
    """Raises ValueError if the labels of the data differ from those of the model."""
    given = tuple(clicks.schema.several)
    wanted = getattr(model, "labels", given)
    if tuple(wanted) != given:
        named = [tuple(each) or "one label" for each in (wanted, given)]
        raise ValueError(
            f"the model has {named[0]}, but the data have {named[1]}; read all data with "
            "one schema, and build the model with it"
        )


def check_same_labels(train: Clicks, other: Clicks) -> None:
    """Raises ValueError if the labels of two data sets differ in their meaning."""
    if unweighted(train.schema).several != unweighted(other.schema).several:
        raise ValueError("the labels differ from those of the training data")


def check_same_columns(train: Clicks, validation: Clicks) -> None:
    """Raises ValueError if the ids of two data sets differ in their meaning."""
    check_same_schema(train.schema, validation.schema, "validation")
    check_same_labels(train, validation)
    for name, known in train.vocabularies.items():
        if not np.array_equal(known, validation.vocabularies[name]):
            raise ValueError(
                f"validation has another vocabulary of {name!r} than the training data; read "
                "it with features=train"
            )


def _table(like: str | None) -> str:
    return "a table of its own" if like is None else f"the table of {like!r}"


class _Scores:
    """Scores examples with a model."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | None,
        batch_size: int,
        deterministic: bool = False,
    ):
        check_click_model(model)
        check_positive(batch_size=batch_size)
        self._model, self._optimizer = model, optimizer
        self._most, self._program = batch_size, _logits[deterministic]
        # Scores include the optimizer's pending updates. Neither model nor optimizer is changed.
        self._staged = Staged.of(model, None)
        if self._staged is not None and optimizer is not None:
            optimizer.host_rows(model, reading=True)

    @promoting()
    @using_auto_axes()
    def of_all(self, clicks: Clicks, feature: str | None = None) -> Found:
        """Args:
        clicks: all examples.
        feature: name of the feature whose ids are the groups, or None.
        """
        if not isinstance(clicks, ClickDataset | ScannedClicks):
            raise TypeError(
                "a click model takes a ClickDataset, as read_clicks makes it, or "
                f"ScannedClicks; got {type(clicks).__name__}"
            )
        check_labels(self._model, clicks)
        parts = [clicks] if isinstance(clicks, ClickDataset) else clicks.chunks()
        scored = None
        if self._staged is None:
            scored = split(self._model, self._optimizer)
        logits, labels, groups, weights, first = [], [], [], [], 0
        for part in parts:
            check_columns(self._model, part)
            found = self._of_part(scored, part.as_served())
            _check_numbers(found, first)
            logits.append(found)
            labels.append(part.labels)
            if part.weights is not None:
                weights.append(part.weights)
            if feature is not None:
                if isinstance(ids := part.ids[feature], CSR):
                    raise ValueError(
                        f"groups={feature!r} is a feature of lists; name one with an id an "
                        "example, or give an array"
                    )
                groups.append(ids)
            first += part.num_rows
        shape = (0, len(clicks.schema.several)) if clicks.schema.several else 0
        empty = [np.empty(shape, np.float32)]
        by = None if feature is None else np.concatenate(groups or empty)
        return Found(
            np.concatenate(logits or empty),
            np.concatenate(labels or empty),
            by,
            np.concatenate(weights) if weights else None,
        )

    def _of_part(
        self, scored: tuple[Any, Any] | None, clicks: ClickDataset
    ) -> np.ndarray:
        found = []
        if scored is not None:
            batches = _batches(clicks, self._most, on_host=False)
            found = [self._program(*scored, *batch) for batch in batches]
        else:
            while self._staged is not None:
                try:
                    for dense, ids in _batches(clicks, self._most, on_host=True):
                        ids = self._staged.brought(ids)
                        # This replaces the model's arrays, so each batch splits it anew.
                        parts = split(self._model, self._optimizer)
                        found.append(self._program(*parts, dense, ids))
                    break
                except NoRoomError:  # smaller batches may fit
                    found = []
                    if self._most == 1:
                        raise
                    self._most = -(-min(self._most, clicks.num_rows) // 2)
        shape = (0, len(clicks.schema.several)) if clicks.schema.several else 0
        parts = [np.asarray(x) for x in found] or [np.empty(shape, np.float32)]
        check_shape(parts[0].shape, len(parts[0]), len(clicks.schema.several))
        return np.concatenate(parts)[: clicks.num_rows]


@functools.partial(Programs, static_argnames="graphdef")
def _logits(graphdef, state, dense, ids):
    """`[batch]` or `[batch, labels]` logits of a model that is given as `split` returns it."""
    with merged(graphdef, state) as model:
        model.eval()
        return replicated(model(dense, ids).astype(jnp.float32))


def _batches(
    clicks: ClickDataset, most: int, *, on_host: bool
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches of equal size on the devices; the last batch is padded with empty rows.

    With `on_host`, ids are NumPy arrays.
    """
    mesh = current_mesh()
    parts = 1 if mesh is None else int(np.prod(axis_sizes()))
    size = -(-min(most, bucket(clicks.num_rows)) // parts) * parts
    starts = range(0, clicks.num_rows, size)
    steps = np.arange(len(starts) * size).reshape(-1, size)
    steps = np.where(steps < clicks.num_rows, steps, -1)
    room = {
        name: bucket(largest_batch(np.diff(ids.indptr), steps))
        for name, ids in clicks.ids.items()
        if isinstance(ids, CSR)
    }

    def filled(array, fill=0):
        more = [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, more, constant_values=fill)

    def put(array, fill=0):
        array = filled(array, fill)
        return jnp.asarray(array) if mesh is None else put_rows(array, mesh)

    def lists(ids: CSR, nse: int) -> CSR:
        indices = np.pad(np.asarray(ids.indices), (0, nse - len(ids.indices)))
        more = (0, size + 1 - len(ids.indptr))
        indptr = np.pad(np.asarray(ids.indptr), more, mode="edge")
        x = CSR.tree_unflatten(ids.num_cols, (None, indices, indptr, None))
        return x if on_host else put_on_mesh(jax.tree.map(jnp.asarray, x))

    def padded(name: str, ids: Any) -> Any:
        if isinstance(ids, CSR):
            return lists(ids, room[name])
        if ids.dtype != np.uint64:
            return filled(ids, -1) if on_host else put(ids, -1)
        words, there = WideIds.of(ids), np.ones(len(ids), bool)
        place = filled if on_host else put
        return WideIds(place(words.low), place(words.high), place(there))

    for start in starts:
        part = clicks.rows(slice(start, start + size))
        yield put(part.dense), {name: padded(name, x) for name, x in part.ids.items()}
