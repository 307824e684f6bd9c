"""Prepares held-out items of rows, to measure models on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from sparsejax.callers import warn_caller
from sparsejax.data import SparseDataset
from sparsejax.data.reading.sources import Inputs, Source, Sources
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.options.measuring import Measure


def prepared_for(asked: Measure) -> Evaluation:
    """Prepares the data of `evaluate` once, so that several models can be measured on it."""
    inputs, heldout = cast(Sources, asked.inputs), cast(Source | None, asked.heldout)
    setup = asked.as_type(Setup, trained_on_inputs=asked.fold_in is None)
    if asked.fold_in is not None:
        chosen = asked.fold_in, asked.seed or 0, asked.features
        inputs, heldout = _folded_in(inputs, heldout, *chosen)
    elif heldout is None:
        raise ValueError("give heldout, or fold_in=... to hold out a part of inputs")
    return prepared_evaluation(inputs, heldout, setup)


def _folded_in(
    inputs: Sources | Inputs,
    heldout: Source | None,
    fold_in: float,
    seed: int,
    features: SparseDataset | Iterable[object] | None,
) -> tuple[SparseDataset, SparseDataset]:
    if heldout is not None:
        raise ValueError("give heldout or fold_in, not both: fold_in splits the inputs")
    if isinstance(inputs, Mapping):
        raise ValueError(
            "fold_in splits a single input; with several inputs, split one of them by "
            "shown, heldout = data.split(...)"
        )
    if not isinstance(inputs, SparseDataset):
        raise TypeError(
            "fold_in chooses entries by their names, so inputs must be a SparseDataset, "
            f"got {type(inputs).__name__}"
        )
    if inputs.left_out is not None:
        warn_caller(
            f"{inputs.left_out.sum():,} entries of inputs were left out before the split "
            "and are in neither part; read inputs without features=..., and pass "
            "features=... to evaluate"
        )
    shown, rest = inputs.split(fold_in, seed=seed)
    if features is None:
        return shown, rest
    if not isinstance(features, SparseDataset):
        features = list(features)
    return shown.align_features(features), rest.align_features(features)
