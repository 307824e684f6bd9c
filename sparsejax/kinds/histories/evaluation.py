"""Prepares held-out items of histories, to measure models on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sparsejax.data.files.names import RowNames, find_names
from sparsejax.data.reading.histories import unordered
from sparsejax.data.reading.sources import Source
from sparsejax.data.sets.click_schema import (
    FIRST_KNOWN,
    MISSING,
    vocabulary_columns,
    vocabulary_of,
)
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.events import Events
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.batching import (
    Shown,
    batches_of,
    held_inputs,
    rows_in_a_batch,
    taken,
)
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.engine.rank.loop import check_scores
from sparsejax.engine.rank.recommender import merged, split
from sparsejax.kinds.histories.next_items import NextItems, check_events, shown_of
from sparsejax.kinds.labels import Found, of_label
from sparsejax.mesh.layout import replicated, using_auto_axes
from sparsejax.mesh.promotion import promoting
from sparsejax.mesh.xla_options import Programs
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Measure
from sparsejax.sequence.events import Label

# At most this many categories of a column are measured: the most frequent.
_CATEGORIES = 10


def prepared_sequences(asked: Measure) -> Evaluation:
    """Prepares an evaluation on histories. `evaluate` then runs the model, a `NextItems`, on
    it.
    """
    model, inputs = asked.model, cast(SequenceDataset, asked.inputs)
    heldout = cast(Source | SequenceDataset, asked.heldout)
    candidates = asked.candidates
    if candidates is not None and not hasattr(model, "item_scores"):
        raise TypeError(
            "candidates need a model with the method item_scores(histories, ids), but "
            f"{type(model).__name__} does not have it"
        )
    if isinstance(candidates, str):
        raise ValueError(
            f"candidates are data, a list of items for each row, got {candidates!r}"
        )
    if isinstance(heldout, SequenceDataset):
        heldout = heldout.only_targets()
    shown = _with_new_rows(inputs, heldout)
    chosen = asked.as_type(
        Setup,
        kinds=parts_of(inputs, heldout, asked),
        candidates=unordered("candidates", candidates, inputs),
        exclude=unordered("exclude", asked.exclude, inputs),
        popularity=unordered("popularity", asked.popularity, inputs),
    )
    wanted = unordered("heldout", heldout, inputs)
    assert wanted is not None
    if isinstance(heldout, SequenceDataset):
        shown = shown.with_context_of(heldout)
    return prepared_evaluation(shown_of(model, shown), wanted, chosen)


@promoting()
@using_auto_axes()
def label_metrics(
    ranker: NextItems,
    inputs: SequenceDataset,
    heldout: Any,
    batch_size: int | None,
    *,
    optimizer: Optimizer | None = None,
) -> dict[str, float]:
    """Metrics of the label predictions for the first held-out event of each row.

    Args:
      ranker: the model. If it predicts no labels, the result is empty.
      inputs: the histories that the model reads.
      heldout: held-out events.
      batch_size: rows scored at a time.
      optimizer: the model's optimizer, if some of its updates of weight rows are still pending.
    """
    head = getattr(ranker.model, "next_event", None)
    if head is None or not isinstance(heldout, SequenceDataset):
        return {}
    check_events(ranker.model, heldout, "heldout")
    shown = _with_new_rows(inputs, heldout)
    heldout = heldout.align_rows(heldout.row_names[np.diff(heldout.indptr) > 0])
    events: Any = heldout.events
    shown = shown.align_rows(heldout.row_names)
    shown = shown_of(ranker.model, shown.with_context_of(heldout))
    first, rows = heldout.indptr[:-1], np.arange(heldout.num_rows)
    size = rows_in_a_batch(batch_size or 512, len(rows))
    batches = batches_of(shown, held_inputs(shown), rows, size)
    model = split(ranker, optimizer)
    found = []
    for start, batch in zip(range(0, len(rows), size), batches, strict=True):
        ids = np.zeros(size, np.int32)
        own = heldout.indices[first[start : start + size]]
        ids[: len(own)] = own
        found.append(np.asarray(_scored[False](*model, batch, ids))[: len(own)])
    scores, measured = np.concatenate(found), {}
    check_scores(np.isnan(scores).any(axis=1), shown.rows, rows)
    for each in head.labels:
        own = scores[:, each.first : each.first + each.scores]
        values = events[each.name][first]
        for name, given in _by_category(events, each, own, values):
            measured |= of_label(given, each.column, name)
    return measured


def _by_category(
    events: Events, label: Label, scores: np.ndarray, values: np.ndarray
) -> Iterator[tuple[str, Found]]:
    """Iterates over the metrics' inputs: a name, and an array of scores with their labels.

    A numeric column has one of them, a column of hashed ids one for all its ids together, and
    other columns one for each frequent category.
    """
    if label.dense is not None:
        there = ~np.isnan(values)
        yield label.name, Found(scores[there, 0], values[there], None, None)
        return
    ids = values.reshape(len(values), -1)
    there = (ids > MISSING).any(axis=1)
    ids, scores = ids[there], scores[there]
    names = vocabulary_of(events.schema, label.name, events.vocabularies)
    if names is None:
        has = np.zeros((len(ids), label.scores + 2), np.float32)
        np.put_along_axis(has, ids + 1, 1, axis=1)
        yield label.name, Found(scores.reshape(-1), has[:, 2:].reshape(-1), None, None)
        return
    for place, category in enumerate(names[:_CATEGORIES].tolist(), FIRST_KNOWN):
        has = (ids == place).any(axis=1).astype(np.float32)
        name = f"{label.name}={category}"
        yield name, Found(scores[:, place - 1], has, None, None)


@functools.partial(Programs, static_argnames="graphdef")
def _scored(graphdef, state, shown: Shown, ids: jax.Array):
    """`[batch, scores]` scores of all labels, by a `NextItems` given as `split` returns it."""
    with merged(graphdef, state) as model:
        return replicated(model.label_scores(taken(shown), jnp.asarray(ids)))


def parts_of(
    inputs: SequenceDataset, heldout: Any, asked: Measure
) -> dict[str, SparseDataset]:
    """Held-out targets to measure separately, of each kind of event and of each group of users, by
    `COLUMN=CATEGORY`; the rows are those of `heldout`.
    """
    found: dict[str, np.ndarray] = {}
    is_ours = isinstance(heldout, SequenceDataset)
    if asked.by == "kinds" and is_ours and (events := heldout.events) is not None:
        column = events.schema.kind
        found = {f"{column}={kind}": events.are_of(kind) for kind in heldout.kinds}
    # Where `by` finds no kinds, nothing is returned, so that `prepared_evaluation` refuses it.
    if asked.groups is not None and (found or asked.by != "kinds"):
        found |= _by_users(inputs, heldout, asked.groups)
    whole = functools.partial(dataclasses.replace, heldout)
    parts = {n: whole(weights=x.astype(np.float32)) for n, x in found.items()}
    return {name: part.only_targets().to_sparse() for name, part in parts.items()}


def _by_users(
    inputs: SequenceDataset, heldout: Any, column: str | ArrayLike
) -> dict[str, np.ndarray]:
    """`[entries]` masks by "COLUMN=CATEGORY": held-out entries of users who have this category."""
    users, known = None, []
    if isinstance(heldout, SequenceDataset):
        shown = _with_new_rows(inputs, heldout)
        users = shown.align_rows(heldout.row_names, missing="empty").users
    if users is not None:
        known = [*vocabulary_columns(users.schema)]
    if users is None or not isinstance(column, str) or column not in known:
        raise ValueError(
            f"groups={column!r} is no column of categories of the users; these are {known}"
        )
    names = users.vocabularies[vocabulary_columns(users.schema)[column]]
    ids = users[column].reshape(heldout.num_rows, -1)
    are = enumerate(names[:_CATEGORIES].tolist(), FIRST_KNOWN)
    own = {f"{column}={name}": (ids == place).any(axis=1) for place, name in are}
    return {n: np.repeat(x, np.diff(heldout.indptr)) for n, x in own.items()}


def _with_new_rows(
    inputs: SequenceDataset, heldout: Source | SequenceDataset
) -> SequenceDataset:
    """Adds to `inputs` an empty history for each row that only `heldout` has."""
    if not isinstance(heldout, RowNames):
        return inputs
    names = heldout.row_names
    new = names[find_names(names, inputs.row_names) < 0]
    if not len(new) or len(new) == len(names):
        return inputs
    more = (0, len(new))
    left_out, users = inputs.left_out, inputs.users
    if users is not None:
        of_new = getattr(heldout, "users", None)
        if of_new is None:
            at = np.arange(len(inputs.row_names) + len(new))
            users = users.rows(np.where(at < inputs.num_rows, at, -1))
        else:
            users.check_like(of_new, "the held-out data")
            users = users.joined(of_new.taken(find_names(new, names)))
    return dataclasses.replace(
        inputs,
        indptr=np.pad(inputs.indptr, more, mode="edge"),
        row_names=np.concatenate([inputs.row_names, new]),
        left_out=None if left_out is None else np.pad(left_out, more),
        context=None,  # that of these rows is not known
        users=users,
    )
