"""Held-out items of histories, made ready to measure models on."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from sparsejax.data.files.names import RowNames, find_names
from sparsejax.data.reading.histories import Unordered, unordered
from sparsejax.data.reading.sources import Source
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.kinds.histories.next_items import shown_of


def prepared_sequences(
    model: Any,
    inputs: SequenceDataset,
    heldout: Source | SequenceDataset,
    *,
    exclude: Unordered = "inputs",
    popularity: Unordered = "inputs",
    candidates: Unordered = None,
    by: Literal["entries", "kinds"] | None = None,
    **setup: Any,
) -> Evaluation:
    """Prepares histories for `evaluate`, before it runs the model, a `NextItems`.

    Arguments and errors are those of `evaluate`; `setup` are attributes of `Setup`.
    """
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
    chosen = Setup(
        by=by,
        kinds=kinds_of(heldout) if by == "kinds" else {},
        candidates=unordered("candidates", candidates, inputs),
        exclude=unordered("exclude", exclude, inputs),
        popularity=unordered("popularity", popularity, inputs),
        **setup,
    )
    wanted = unordered("heldout", heldout, inputs)
    assert wanted is not None
    shown = _with_new_rows(inputs, heldout)
    if isinstance(heldout, SequenceDataset):
        shown = shown.with_context_of(heldout)
    return prepared_evaluation(shown_of(model, shown), wanted, chosen)


def kinds_of(heldout: Any) -> dict[str, SparseDataset]:
    """The held-out targets of each kind of event, by `COLUMN=KIND`, of the rows of `heldout`."""
    if not isinstance(heldout, SequenceDataset) or heldout.events is None:
        return {}
    targets, column = heldout.only_targets(), heldout.events.schema.kind
    found = ((kind, targets.of_kinds(kind)) for kind in targets.kinds)
    return {f"{column}={kind}": data.to_sparse() for kind, data in found}


def _with_new_rows(
    inputs: SequenceDataset, heldout: Source | SequenceDataset
) -> SequenceDataset:
    """The inputs, with an empty history for each row that only `heldout` has."""
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
        users=users,
    )
