"""Recommendations by a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from flax import nnx

from sparsejax.data.reading.histories import Unordered
from sparsejax.data.reading.sources import (
    Named,
    NamedCSR,
    Source,
    Sources,
    check_columns,
    check_inputs,
    check_same_features,
    features_of,
)
from sparsejax.engine.batching import (
    batches_of,
    held_inputs,
    rows_in_a_batch,
)
from sparsejax.engine.rank.denied import (
    denied_items,
    mask_of,
    rows_at_a_time,
)
from sparsejax.engine.rank.loop import (
    check_positive,
    collect,
    denying,
    each,
    exclusion,
    rows_of,
)
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.engine.rank.recommender import (
    Recommender,
    can_deny,
    recommended,
    split,
)
from sparsejax.kinds.histories.next_items import (
    HistoryModel,
)
from sparsejax.kinds.kind import OfKind, kind_of
from sparsejax.mesh.layout import using_auto_axes
from sparsejax.mesh.promotion import promoting
from sparsejax.optimizers.optimizer import Optimizer


@promoting()
@using_auto_axes()
def recommend(
    model: Recommender | HistoryModel,
    inputs: Sources | OfKind,
    k: int = 10,
    *,
    exclude: Unordered = "inputs",
    exclude_items: Iterable[str] | np.ndarray = (),
    only_items: Iterable[str] | np.ndarray | None = None,
    optimizer: Optimizer | None = None,
    batch_size: int = 512,
) -> Recommendations:
    """The `k` best of all items for each row of `inputs`.

    A row without entries gets the recommendations that the model makes for an empty row.
    One program is compiled for all batches. It also serves later calls with data of
    similar size. Under `jax.set_mesh`, with a model made there, batches and kernels are
    divided over the mesh.

    >>> found = recommend(model, train, k=10)
    >>> found.names(train)[0]
    ['/...', '/...', ...]

    For histories, a `SequenceDataset`, these are the items that are most likely next. Users
    that the model was not trained on need nothing else. Where items repeat, let those of a
    history come again::

        recommend(model, histories, k=10, exclude=None)

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`.
      inputs: `[rows, features]`; or several by name, see `fit`; or histories.
      k: items per row. Where there are fewer candidates, ids end with -1.
      exclude: "inputs" leaves out the items that a row already has; None ranks them, too.
        Where there are several inputs, the name of one of them, or None. Or `[rows, items]`:
        two data sets are matched by row name, and a row that `exclude`
        lacks has nothing excluded; otherwise row `i` belongs to row `i`.
      exclude_items: names of items that nobody is recommended, such as those sold out; or
        their ids.
      only_items: recommend only these.
      optimizer: the model's optimizer. Pass it while rows of the weights may be behind
        (see `Optimizer.flush`): they are then read as if they were up to date.
      batch_size: rows scored at a time; fewer where a model of your own, whose `top_k` does
        not take `excluded`, excludes very many items.

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs` or `exclude` has a type that is not supported.
      ValueError: `inputs` or `exclude` does not fit the model, or they do not fit each
        other; there is no such item, or none is left.
    """
    steps = _steps(
        model,
        inputs,
        k,
        exclude=exclude,
        exclude_items=exclude_items,
        only_items=only_items,
        batch_size=batch_size,
    )
    graphdef, state = split(steps.ranker, optimizer)
    results = (recommended[False](graphdef, state, *step) for step in steps.batches)
    rows, size = steps.rows.num_rows, steps.batch_size
    counts = [min(size, rows - start) for start in range(0, rows, size)]
    return collect(steps.rows, k, counts, results)


@promoting()
@using_auto_axes()
def lower_recommend(
    model: Any, inputs: Any, k: int, **options: Any
) -> Callable[[], object]:
    """Lowers the program that `recommend` runs; see `Keepable.lower_ahead`.

    Arguments are those of `recommend`, without an optimizer. The model may have shapes in
    place of arrays.
    """
    steps = _steps(model, inputs, k, **options)
    graphdef, state = nnx.split((steps.ranker, None))
    for step in steps.batches:
        return recommended[False].lower_ahead(graphdef, state, *step)
    return lambda: None  # there are no rows


class _Steps(NamedTuple):
    """Rows that a model is shown, in batches.

    Attributes:
      ranker: the model.
      rows: all of them.
      batch_size: rows scored at a time.
      batches: what `recommended` is given of each, behind the model.
    """

    ranker: Recommender
    rows: Named
    batch_size: int
    batches: Iterator[tuple[Any, ...]]


def _steps(
    model: Any,
    inputs: Any,
    k: int,
    *,
    exclude: Any = "inputs",
    exclude_items: Iterable[str] | np.ndarray = (),
    only_items: Iterable[str] | np.ndarray | None = None,
    batch_size: int = 512,
) -> _Steps:
    """Checks the arguments of `recommend`, and gives what it runs."""
    check_positive(k=k, batch_size=batch_size)
    ranker, shown, exclude = kind_of(inputs).shown(model, inputs, exclude)
    check_inputs(shown, features_of(ranker))
    x = shown.rows
    names = getattr(inputs, "feature_names", None)
    if names is not None and len(names) != ranker.num_items:
        names = None  # of the features, which are not the items
    denied = denied_items(
        ranker.num_items, names, exclude_items=exclude_items, only_items=only_items
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
    return _Steps(ranker, x, batch_size, ((*pair, k, mask) for pair in pairs))
