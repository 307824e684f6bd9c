"""Recommendations by a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from flax import nnx

from sparsejax.data.reading.sources import (
    Named,
    NamedCSR,
    Source,
    check_columns,
    check_inputs,
    check_same_features,
    features_of,
)
from sparsejax.engine.batching import batches_of, held_inputs, rows_in_a_batch
from sparsejax.engine.rank.denied import denied_items, mask_of, rows_at_a_time
from sparsejax.engine.rank.loop import collect, denying, each, exclusion, rows_of
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.engine.rank.recommender import Recommender, can_deny, recommended, split
from sparsejax.kinds.kind import kind_of
from sparsejax.mesh.layout import using_auto_axes
from sparsejax.mesh.promotion import promoting
from sparsejax.options.option import verb
from sparsejax.options.predicting import Rank


@promoting()
@using_auto_axes()
@verb(Rank)
def recommend(asked: Rank) -> Recommendations:
    """Recommends the `k` best of all items to each row of `inputs`.

    A row without entries gets the recommendations for an empty row.
    One program is compiled for all batches, and reused for later data of similar size. Under
    `jax.set_mesh`, with a model made there, batches and kernels are divided over the mesh.

    >>> found = recommend(model, train, k=10)
    >>> found.names(train)[0]
    ['/...', '/...', ...]

    For histories, a `SequenceDataset`, these are the most likely next items. Users need not be in
    the training data. If items repeat, do not exclude the items of a history::

        recommend(model, histories, k=10, exclude=None)

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs` or `exclude` has a type that is not supported.
      ValueError: `inputs` or `exclude` do not match the model or each other; an item is unknown,
          or all items are excluded.
    """
    steps = _steps(asked)
    graphdef, state = split(steps.ranker, asked.optimizer)
    results = (recommended[False](graphdef, state, *step) for step in steps.batches)
    rows, size = steps.rows.num_rows, steps.batch_size
    counts = [min(size, rows - start) for start in range(0, rows, size)]
    return collect(steps.rows, asked.k, counts, results)


@promoting()
@using_auto_axes()
def lower_recommend(asked: Rank) -> Callable[[], object]:
    """Lowers the program that `recommend` runs; see `Keepable.lower_ahead`.

    Args:
      asked: arguments of `recommend`, without an optimizer. The model may have shapes in place of
          arrays.
    """
    steps = _steps(asked)
    graphdef, state = nnx.split((steps.ranker, None))
    for step in steps.batches:
        return recommended[False].lower_ahead(graphdef, state, *step)
    return lambda: None  # nothing is compiled, as there are no rows


class _Steps(NamedTuple):
    """The batches that `recommend` scores, and the model that scores them.

    Attributes:
      ranker: model that ranks items.
      rows: all rows to recommend to.
      batch_size: number of rows scored at a time.
      batches: for each batch, the arguments of `recommended` after the model.
    """

    ranker: Recommender
    rows: Named
    batch_size: int
    batches: Iterator[tuple[Any, ...]]


def _steps(asked: Rank) -> _Steps:
    """Checks the arguments of `recommend`, and makes batches from them."""
    inputs, batch_size = asked.inputs, asked.batch_size
    if asked.context is not None:
        if not hasattr(inputs, "with_context"):
            raise ValueError(
                "context is for histories, a SequenceDataset; leave it out"
            )
        inputs = inputs.with_context(asked.context)
    ranker, shown, exclude = kind_of(inputs).shown(asked.model, inputs, asked.exclude)
    if asked.rank_by is not None:
        ranker = kind_of(inputs).ranked_by(ranker, inputs, asked.rank_by)
    check_inputs(shown, features_of(ranker))
    x = shown.rows
    names = getattr(inputs, "feature_names", None)
    if names is not None and len(names) != ranker.num_items:
        names = None  # these names belong to features that are not items
    denied = denied_items(
        ranker.num_items,
        names,
        exclude_items=asked.exclude_items,
        only_items=asked.only_items,
    )
    seen = None
    if exclude is not None:
        seen = shown.named("exclude", cast(Source | str, exclude))
        columns = seen.matrix.num_cols
        is_inputs = isinstance(exclude, str) and exclude == "inputs"
        if is_inputs and columns != ranker.num_items:
            raise ValueError(
                f"inputs has {columns:,} columns, but the model ranks {ranker.num_items:,} "
                "items, so no column says which items a row has: pass exclude=None, or "
                "rows of items as exclude"
            )
        check_columns("exclude", columns, ranker.num_items, "items")
        if shown.alone and isinstance(x, NamedCSR):
            check_same_features(x, seen)
    had, mask = None if seen is None else seen.matrix, None
    by_rows = denied.size > 0 and not can_deny(ranker)
    if by_rows:
        batch_size = min(batch_size, rows_at_a_time(denied, had, ranker.num_items))
    batch_size = rows_in_a_batch(batch_size, x.num_rows)
    held = held_inputs(shown)
    rows = np.arange(x.num_rows)
    batches = batches_of(shown, held, rows, batch_size)
    unwanted = None
    if denied.size and not by_rows:
        mask = mask_of(denied, ranker.num_items)
    if by_rows:
        its = rows if seen is None else rows_of(seen, x)
        unwanted = denying(had, its, denied, ranker.num_items, batch_size)
    elif seen is not None:
        unwanted = exclusion(shown, rows, held, seen, batch_size)
    pairs = zip(batches, each(unwanted), strict=False)
    return _Steps(ranker, x, batch_size, ((*pair, asked.k, mask) for pair in pairs))
