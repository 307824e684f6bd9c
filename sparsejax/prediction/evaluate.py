"""How good recommendations are: metrics of what was held out."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sparsejax import metrics
from sparsejax.data import SparseDataset
from sparsejax.data.batching import (
    Array,
    Batch,
    Batches,
    NamedBatches,
    Shown,
    for_batches,
    rows_in_a_batch,
    taken,
)
from sparsejax.data.sources import (
    Inputs,
    NamedCSR,
    Source,
    Sources,
    check_columns,
    check_inputs,
    check_same_features,
    features_of,
    find_rows,
)
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import put_on_mesh, replicated, using_auto_axes
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.prediction.loop import (
    check_positive,
    check_scores,
    each,
    exclusion,
    indicator,
)
from sparsejax.prediction.popularity import Popularity, column_counts
from sparsejax.prediction.recommender import Recommender, merged, split
from sparsejax.sparse import CSR

_HERE = (str(pathlib.Path(__file__).parents[1]),)  # warnings blame the caller
_METRICS = ("recall", "truncated_recall", "ndcg", "precision", "hit_rate", "mrr", "map")


def metric_names(k: int) -> list[str]:
    """Names of what `evaluate` measures at each cut-off, without a baseline."""
    return [f"{name}@{k}" for name in (*_METRICS, "coverage", "gini")]


def evaluate(
    model: Recommender,
    inputs: Sources,
    heldout: Source | None = None,
    *,
    k: int | Sequence[int] = 20,
    fold_in: float | None = None,
    features: SparseDataset | Iterable[object] | None = None,
    seed: int = 0,
    exclude: Source | str | None = "inputs",
    unknown: Literal["miss", "skip"] = "miss",
    candidates: Source | None = None,
    popularity: Source | str | None = "inputs",
    optimizer: Optimizer | None = None,
    batch_size: int = 512,
) -> dict[str, float]:
    """How well the model finds held-out items, ranking all items for each row.

    >>> measured = evaluate(model, train, heldout, k=20)
    >>> list(measured)[:3], "popularity_recall@20" in measured
    (['recall@20', 'truncated_recall@20', 'ndcg@20'], True)

    Most metrics are means over the rows with at least one held-out entry. "coverage",
    "gini" and "mean_popularity" describe the lists of all these rows together; an item's
    popularity is the share of the rows of `popularity` that have it. `sparsejax.metrics`
    defines the metrics.

    The baseline recommends the most popular items to everyone. It leaves out the same
    items as the model does, and it never recommends an item that no row has.

    An item is unknown if the training data has no entry of it. The vocabulary may have
    it or not. A held-out entry of an unknown item counts as missed, unless the vocabulary
    has the item and the model finds it. "users" is the number of rows in the means.
    "users_unknown" is the number of rows whose held-out items are all unknown.
    "entries_unknown" is the number of held-out entries of unknown items.

    To measure on rows that the model was not trained on (strong generalisation), show it
    a part of their entries, and hold out the rest::

        train, others = data.split_rows(0.9, seed=0)
        evaluate(model, others, fold_in=0.8, popularity=train)

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`.
      inputs: `[rows, features]`, what the model is shown; or several by name, see `fit`.
      heldout: `[rows, items]`, what it should find. Two data sets are matched by row
        name; otherwise row `i` belongs to row `i`.
      k: cut-off, or several.
      fold_in: used in place of `heldout`. It is the share of each row's entries in
        `inputs`, a `SparseDataset`, that the model is shown; see `SparseDataset.split`.
      features: used with `fold_in`, where `inputs` were read with a vocabulary of their
        own: the names of the model's features, or a data set with them. Entries of other
        features are left out after the choice, so they count as unknown.
      seed: of the choice that `fold_in` makes.
      exclude: `[rows, items]`, what is never recommended, see `recommend`. The default is
        what the row has in `inputs`. Where there are several inputs, name one, here and
        below. Held-out entries that are excluded count as missed, and a warning gives
        their share. None ranks all items.
      unknown: "miss" counts held-out entries of unknown items as described above. "skip"
        leaves them out, and with them the rows that have no others.
      candidates: `[rows, items]`: for each row, rank only these items and its held-out
        ones, for example one held-out item among 100 others. Rows are matched as those
        of `heldout`. The model also needs `item_scores`.
      popularity: `[any rows, items]`, what the baseline counts, `inputs` by default. If
        the model was not trained on these rows, name the training data. None leaves out
        the baseline and "mean_popularity". This is also the training data that decides
        which items are known. With None the inputs decide, if they are excluded. With
        `fold_in` the inputs do not decide: then all items of the vocabulary are known,
        unless training data is named here.
      optimizer: see `recommend`.
      batch_size: rows scored at a time.

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs`, `heldout` or `exclude` has a type that is not supported, or the
        model cannot score candidates.
      ValueError: nothing is held out, or all of it is excluded. A held-out row is not in
        `inputs`, or has no candidates. An argument does not fit the model or another
        argument.
    """
    setup = Setup(
        k=k,
        exclude=exclude,
        unknown=unknown,
        candidates=candidates,
        popularity=popularity,
        batch_size=batch_size,
        trained_on_inputs=fold_in is None,
    )
    if fold_in is not None:
        inputs, heldout = _folded_in(inputs, heldout, fold_in, seed, features)
    elif features is not None:
        raise ValueError("features go with fold_in; use align_features of other data")
    elif heldout is None:
        raise ValueError("give heldout, or fold_in=... to hold out a part of inputs")
    return prepare(inputs, heldout, setup).run(model, optimizer=optimizer)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """How recommendations are measured; `evaluate` says what each choice means.

    Attributes:
      k: cut-off, or several.
      exclude: what is never recommended.
      unknown: "miss" or "skip".
      candidates: the items to rank for each row, or None for all.
      popularity: what the baseline counts, or None for no baseline.
      batch_size: rows scored at a time.
      trained_on_inputs: whether the inputs are training data, so that an item that
        they lack is unknown.

    Raises:
      ValueError: there is no cut-off, a number is not positive, or `unknown` is
        something else.
    """

    k: int | Sequence[int] = 20
    exclude: Source | str | None = "inputs"
    unknown: Literal["miss", "skip"] = "miss"
    candidates: Source | None = None
    popularity: Source | str | None = "inputs"
    batch_size: int = 512
    trained_on_inputs: bool = True

    def __post_init__(self) -> None:
        if not self.ks:
            raise ValueError("k names no cut-off")
        check_positive(k=min(self.ks), batch_size=self.batch_size)
        if self.unknown not in ("miss", "skip"):
            raise ValueError(f'unknown is "miss" or "skip", got {self.unknown!r}')

    @property
    def ks(self) -> tuple[int, ...]:
        """The cut-offs."""
        return tuple(np.atleast_1d(self.k).tolist())


@using_auto_axes()
def prepare(inputs: Sources | Inputs, heldout: Source, setup: Setup) -> Evaluation:
    """The part of `evaluate` that does not depend on the model, for repeated use.

    Matches the rows, copies the data to the device and measures the baseline.

    Args:
      inputs: `[rows, features]`, what models are shown; or several.
      heldout: `[rows, items]`, what they should find.
      setup: how they are measured.

    Raises:
      TypeError: see `evaluate`.
      ValueError: see `evaluate`.
    """
    exclude, popularity = setup.exclude, setup.popularity
    shown, labels = Inputs.of(inputs), NamedCSR.of("heldout", heldout)
    x = shown.rows
    seen = None if exclude is None else shown.named("exclude", exclude)
    counted = None if popularity is None else shown.named("popularity", popularity)
    among = None
    if setup.candidates is not None:
        among = NamedCSR.of("candidates", setup.candidates)
    for source in (seen, counted, among):
        if source is not None:
            _check_items(source, labels)
    known_by, trained = popularity, counted
    if popularity is None and isinstance(exclude, str):
        known_by, trained = exclude, seen
    if isinstance(known_by, str) and not setup.trained_on_inputs:
        trained = None
    was_trained = None if trained is None else column_counts(trained.matrix) > 0
    known = _of_items(labels, was_trained)
    total, num_known = _num_entries(labels), _num_entries(known)
    if setup.unknown == "skip":
        labels = known
    scored = np.flatnonzero(_num_entries(labels))
    if not scored.size:
        of_known = " of a known item" if total.any() else ""
        raise ValueError(
            f"no row of heldout has an entry{of_known}, so there is nothing to find"
        )
    rows = find_rows(labels, x)[scored]
    missing = scored[rows < 0]
    if missing.size:
        raise ValueError(
            f"{missing.size:,} of {scored.size:,} rows of heldout are not in inputs: "
            f"{labels.labels(missing)}; without inputs the model has nothing to go by"
        )
    batch_size = rows_in_a_batch(setup.batch_size, scored.size)
    held = shown.for_batches()
    unwanted = None
    if seen is not None:
        unwanted = exclusion(shown, rows, held, seen, batch_size)
        seen_rows = rows if isinstance(exclude, str) else find_rows(x, seen)[rows]
        _check_repeats(labels, scored, seen, seen_rows)
    ids = None
    if among is not None:
        ids = _candidate_ids(among, labels, scored, batch_size)
    share = None
    if counted is not None:
        share = column_counts(counted.matrix) / max(counted.num_rows, 1)
    evaluation = Evaluation(
        ks=setup.ks,
        inputs=shown,
        heldout=labels,
        rows=scored,
        batches=shown.batches(held, rows, batch_size),
        exclude=unwanted,
        labels=Batches.of(for_batches(indicator(labels.matrix)), scored, batch_size),
        left_out=_left_out(labels, scored, batch_size),
        users_unknown=int(np.sum((total > 0) & (num_known == 0))),
        entries_unknown=int(np.sum(total - num_known)),
        candidates=ids,
        popularity=share,
        baseline={},
    )
    if share is None:
        return evaluation
    measured = evaluation.run(Popularity(share, shown.features))
    baseline = {f"popularity_{n}": v for n, v in measured.items() if "@" in n}
    return dataclasses.replace(evaluation, baseline=baseline)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """Data ready to measure models on; made by `prepare`.

    Attributes:
      ks: the cut-offs.
      inputs: what the model is shown, all rows of it.
      heldout: the held-out entries, all rows of them.
      rows: `[users]` the rows of `heldout` that have entries.
      batches: what the model is shown for these rows.
      exclude: what is not recommended to them.
      labels: what the model should find.
      left_out: `[steps, batch]` number of held-out entries that have no item number; None
        if there are no such entries.
      users_unknown: number of rows of `heldout` whose items are all unknown.
      entries_unknown: number of its entries of unknown items.
      candidates: `[steps, batch, count]` the items to rank, filled up with -1. None ranks
        all items.
      popularity: `[items]` share of the rows that have the item, or None.
      baseline: metrics of the baseline, or empty.
    """

    ks: tuple[int, ...]
    inputs: Inputs
    heldout: NamedCSR
    rows: np.ndarray
    batches: Batches | NamedBatches
    exclude: Batches | None
    labels: Batches
    left_out: np.ndarray | None
    users_unknown: int
    entries_unknown: int
    candidates: np.ndarray | None
    popularity: np.ndarray | None
    baseline: dict[str, float]

    @using_auto_axes()
    def run(
        self, model: Recommender, *, optimizer: Optimizer | None = None
    ) -> dict[str, float]:
        """The metrics of a model; see `evaluate`."""
        items = self.heldout.matrix.num_cols
        check_inputs(self.inputs, features_of(model))
        check_columns("heldout", items, model.num_items, "items")
        if self.candidates is not None and not hasattr(model, "item_scores"):
            raise TypeError(
                f"candidates need a model with the method item_scores(x, ids), but "
                f"{type(model).__name__} does not have it"
            )
        graphdef, state = split(model, optimizer)
        counts = put_on_mesh(jnp.zeros((len(self.ks), items), jnp.int32))
        parts = []
        for step in zip(
            self.batches,
            each(self.exclude),
            self.labels,
            each(self.left_out),
            each(self.candidates),
            strict=False,
        ):
            part, counts = _measured(graphdef, state, *step, counts, self.ks)
            parts.append(part)
        values = np.concatenate([np.asarray(p) for p in parts], axis=1)
        values = values[:, : self.rows.size].astype(np.float64)
        check_scores(np.isnan(values).any(axis=0), self.heldout, self.rows)
        means = iter(values.mean(axis=1).tolist())
        measured = {}
        for k, given in zip(self.ks, np.asarray(counts), strict=True):
            measured |= {f"{name}@{k}": next(means) for name in _METRICS}
            measured[f"coverage@{k}"] = metrics.coverage(given)
            measured[f"gini@{k}"] = metrics.gini(given)
            if self.popularity is not None:
                mean = metrics.mean_popularity(given, self.popularity)
                measured[f"mean_popularity@{k}"] = mean
        return {
            **measured,
            **self.baseline,
            "users": self.rows.size,
            "users_unknown": self.users_unknown,
            "entries_unknown": self.entries_unknown,
        }


def _folded_in(
    inputs: Sources | Inputs,
    heldout: Source | None,
    fold_in: float,
    seed: int,
    features: SparseDataset | Iterable[object] | None,
) -> tuple[SparseDataset, SparseDataset]:
    if heldout is not None:
        raise ValueError("give either heldout or fold_in, which makes it from inputs")
    if isinstance(inputs, Mapping):
        raise ValueError(
            "fold_in splits a single input; of several, split the one that is meant: "
            "shown, heldout = data.split(...)"
        )
    if not isinstance(inputs, SparseDataset):
        raise TypeError(
            "fold_in chooses entries by their names, so inputs must be a SparseDataset, "
            f"got {type(inputs).__name__}"
        )
    if inputs.left_out is not None:
        warnings.warn(
            f"{inputs.left_out.sum():,} entries of inputs were left out before they were "
            "split, and are in neither part; read them without features=..., and pass "
            "that to evaluate",
            skip_file_prefixes=_HERE,
        )
    shown, rest = inputs.split(fold_in, seed=seed)
    if features is None:
        return shown, rest
    if not isinstance(features, SparseDataset):
        features = list(features)
    return shown.align_features(features), rest.align_features(features)


def _num_entries(heldout: NamedCSR) -> np.ndarray:
    """`[rows]` number of held-out entries, with those that were left out."""
    lengths = np.diff(np.asarray(heldout.matrix.indptr))
    return lengths if heldout.left_out is None else lengths + heldout.left_out


def _of_items(heldout: NamedCSR, chosen: np.ndarray | None) -> NamedCSR:
    """The entries of the `chosen: [items]` items, or of all; nothing in `left_out`."""
    heldout = dataclasses.replace(heldout, left_out=None)
    if chosen is None or chosen.all():
        return heldout
    matrix = jax.tree.map(np.asarray, heldout.matrix)
    keep = chosen.take(matrix.indices[: matrix.indptr[-1]], mode="clip")
    indptr = np.append(0, np.cumsum(keep))[matrix.indptr].astype(np.int32)
    indices = matrix.indices[: keep.size][keep]
    kept = CSR(None, indices, indptr, num_cols=matrix.num_cols)
    return dataclasses.replace(heldout, matrix=kept)


def _left_out(
    heldout: NamedCSR, rows: np.ndarray, batch_size: int
) -> np.ndarray | None:
    """`[steps, batch]` number of entries of the rows that were left out, or None."""
    if heldout.left_out is None:
        return None
    counts = heldout.left_out[rows]
    return np.pad(counts, (0, -counts.size % batch_size)).reshape(-1, batch_size)


def _check_repeats(
    heldout: NamedCSR, rows: np.ndarray, seen: NamedCSR, seen_rows: np.ndarray
) -> None:
    """Warns of held-out entries that are excluded, so that they cannot be found.

    Args:
      heldout: what the model should find.
      rows: of `heldout`.
      seen: what is excluded.
      seen_rows: the row of `seen` for each of `rows`, or -1.

    Raises:
      ValueError: all are excluded.
    """
    has_some = seen_rows >= 0
    wanted = _rows(heldout, rows[has_some])
    repeated = wanted.multiply(_rows(seen, seen_rows[has_some])).nnz
    if not repeated:
        return
    total = int(_num_entries(heldout)[rows].sum())
    if repeated == np.diff(np.asarray(heldout.matrix.indptr))[rows].sum():
        raise ValueError(
            f"all {repeated:,} held-out entries of known items are excluded, as their "
            "rows already have them, so none can be found. Hold out entries that the "
            "inputs lack, or rank also what a row has: exclude=None"
        )
    warnings.warn(
        f"{repeated:,} of {total:,} held-out entries ({repeated / total:.1%}) are "
        "excluded, as their rows already have them: they cannot be found and count as "
        "missed; exclude=None ranks them, too",
        skip_file_prefixes=_HERE,
    )


def _ranked_among(
    model,
    x: Any,
    candidates,
    exclude: SparseRows | None,
    k: int,
):
    """As `model.top_k`, but of the `candidates: [batch, count]` alone.

    In each row candidates ascend, and -1 fills it up.
    """
    valid = candidates >= 0
    if exclude is not None:
        valid &= ~metrics.is_label(candidates, exclude)
    scores = model.item_scores(x, jnp.maximum(candidates, 0))
    scores = jnp.where(valid, scores, -jnp.inf)
    room = max(k - candidates.shape[1], 0)
    best, at = jax.lax.top_k(scores, k - room)  # ties go to the first: the lower id
    ids = jnp.take_along_axis(candidates, at, axis=1)
    ids = jnp.where(best == -jnp.inf, -1, ids)
    best = jnp.where(jnp.isnan(scores).any(axis=1, keepdims=True), jnp.nan, best)
    fill = ((0, 0), (0, room))
    return (
        jnp.pad(ids, fill, constant_values=-1),
        jnp.pad(best, fill, constant_values=-jnp.inf),
    )


@functools.partial(
    jax.jit, static_argnames=("graphdef", "ks"), donate_argnames="counts"
)
def _measured(
    graphdef,
    state,
    shown: Shown,
    exclude: Batch | None,
    labels: Batch,
    left_out: Array | None,
    candidates: Array | None,
    counts,
    ks,
):
    """Metrics of each row, and how often each item is recommended.

    Returns:
      `[len(ks) * metrics, batch]`, NaN for a row with a NaN score; and
      `counts: [len(ks), items]`, to which these recommendations are added.
    """
    with merged(graphdef, state) as model:
        x, k = taken(shown), max(ks)
        unwanted = None if exclude is None else exclude.take()
        if candidates is None:
            ids, scores = model.top_k(x, k, exclude=unwanted)
        else:
            ids, scores = _ranked_among(model, x, candidates, unwanted, k)
    wanted = labels.take()
    values = [value for k in ks for value in _values(ids, wanted, left_out, k)]
    bad = jnp.isnan(scores).any(axis=1)
    # Rows that only fill up the last batch have nothing to find.
    lengths = wanted.row_lengths()
    lengths = lengths if left_out is None else lengths + left_out
    ids = jnp.where(lengths[:, None] > 0, ids, -1)
    num_items = counts.shape[1]
    counts += jnp.stack([metrics.recommendation_counts(ids, num_items, k) for k in ks])
    values = jnp.where(bad[None, :], jnp.nan, jnp.stack(values))
    return replicated((values, counts))


def _values(ids, labels: SparseRows, left_out: Array | None, k: int):
    """`[batch]` each of `_METRICS`, in this order."""
    return [
        metrics.recall_at_k(ids, labels, k, left_out=left_out),
        metrics.truncated_recall_at_k(ids, labels, k, left_out=left_out),
        metrics.ndcg_at_k(ids, labels, k, left_out=left_out),
        metrics.precision_at_k(ids, labels, k),
        metrics.hit_rate_at_k(ids, labels, k),
        metrics.mrr_at_k(ids, labels, k),
        metrics.map_at_k(ids, labels, k, left_out=left_out),
    ]


def _candidate_ids(
    among: NamedCSR, labels: NamedCSR, rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """`[steps, batch, count]` the candidates and the labels of some rows of `labels`.

    In each row ids ascend, and -1 fills it up.
    """
    found = find_rows(labels, among)[rows]
    lengths = np.append(np.diff(np.asarray(among.matrix.indptr)), 0)  # -1: no row
    without = rows[lengths[found] == 0]
    if without.size:
        raise ValueError(
            f"{without.size:,} of {rows.size:,} rows of heldout have no candidates: "
            f"{labels.labels(without)}"
        )
    both = _rows(among, found) + _rows(labels, rows)  # a union: neither has zeros
    lengths = np.diff(both.indptr)
    steps = -(-rows.size // batch_size)
    ids = np.full((steps * batch_size, lengths.max()), -1, np.int32)
    row = np.repeat(np.arange(rows.size), lengths)
    ids[row, np.arange(both.nnz) - both.indptr[row]] = both.sorted_indices().indices
    return ids.reshape(steps, batch_size, -1)


def _rows(source: NamedCSR, rows: np.ndarray) -> scipy.sparse.csr_array:
    """Some rows as an indicator, on the host."""
    return scipy.sparse.csr_array(indicator(source.matrix).to_scipy()[rows])


def _check_items(source: NamedCSR, heldout: NamedCSR) -> None:
    """Raises ValueError unless both have the same columns."""
    check_same_features(source, heldout)
    ours, theirs = source.matrix.num_cols, heldout.matrix.num_cols
    if ours != theirs:
        raise ValueError(
            f"{source.what} has {ours:,} columns but heldout has {theirs:,}; read both "
            "with the same vocabulary (or, if inputs are no items, pass exclude=... and "
            "popularity=..., or None for either)"
        )
