"""Prepares held-out data once, so that several models can be measured on it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax import metrics
from sparsejax.callers import warn_caller
from sparsejax.data import SparseDataset
from sparsejax.data.reading.histories import HISTORIES
from sparsejax.data.reading.sources import (
    Inputs,
    NamedArray,
    NamedCSR,
    Source,
    Sources,
    check_columns,
    check_inputs,
    check_same_features,
    features_of,
    find_rows,
)
from sparsejax.engine.batching import (
    Batch,
    Batches,
    batches_of,
    for_batches,
    held_inputs,
    rows_in_a_batch,
)
from sparsejax.engine.rank.denied import denied_items, mask_of
from sparsejax.engine.rank.loop import check_scores, denying, exclusion, indicator
from sparsejax.engine.rank.popularity import Popularity, column_counts
from sparsejax.engine.rank.recommender import (
    Recommender,
    beside,
    can_deny,
    recommended,
    split,
)
from sparsejax.engine.rank.tasks import RankingTask, Tasks, measured, ranked
from sparsejax.mesh.layout import using_auto_axes
from sparsejax.mesh.promotion import promoting
from sparsejax.metrics.ranking import METRICS
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Ranking
from sparsejax.options.option import option
from sparsejax.sparse import CSR


def metric_names(k: int) -> list[str]:
    """Names of the metrics of `evaluate` at each cut-off, without a baseline."""
    return [f"{name}@{k}" for name in (*METRICS, "coverage", "gini")]


class Setup(Ranking):
    """Options of a measurement. `evaluate` documents each option.

    Attributes:
      exclude: items of each row that are never recommended to it.
      popularity: data whose entries the popularity baseline counts; None for no baseline.
      batch_size: number of rows scored at a time; by default 512.
      kinds: held-out entries by kind of event or by group of users, measured separately.
      trained_on_inputs: whether the inputs are the training data, so that items missing from them
          are unknown.

    Raises:
      ValueError: there is no cut-off, a number is not positive, or `unknown` has an invalid value.
    """

    exclude: Source | str | None = "inputs"
    popularity: Source | str | None = "inputs"
    batch_size: int | None = option(None, least=1)
    kinds: Mapping[str, SparseDataset] = option(MappingProxyType({}))
    trained_on_inputs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ks:
            raise ValueError("k is empty; give at least one cut-off")

    @property
    def ks(self) -> tuple[int, ...]:
        """The cut-offs."""
        return tuple(np.atleast_1d(self.k).tolist())


@promoting()
@using_auto_axes()
def prepared_evaluation(
    inputs: Sources | Inputs, heldout: Source, setup: Setup
) -> Evaluation:
    """Prepares the part of `evaluate` that does not depend on the model, for repeated use.

    It matches the rows and copies the data to the device.

    Args:
      inputs: `[rows, features]`, the data that models read; or several inputs.
      heldout: `[rows, items]`, the entries that models should rank high.
      setup: options of the measurement.

    Raises:
      TypeError: an argument has a type that `evaluate` does not accept.
      ValueError: rows, items or settings are inconsistent, as described for `evaluate`.
    """
    shown = Inputs.of(inputs)
    given = _Given.of(shown, heldout, setup)
    known = given.known()
    total, num_known = _num_entries(given.heldout), _num_entries(known)
    labels = known if setup.unknown == "skip" else given.heldout
    scored = np.flatnonzero(_num_entries(labels))
    if not scored.size:
        of_known = " of a known item" if total.any() else ""
        raise ValueError(
            f"no row of heldout has an entry{of_known}, so there is nothing to find"
        )
    denied = denied_items(
        labels.matrix.num_cols,
        labels.feature_names,
        exclude_items=setup.exclude_items,
        only_items=setup.only_items,
    )
    rows = _rows_shown(labels, scored, shown, setup)
    is_new = _are_new(shown, rows)
    users_new = int(is_new.sum())
    if setup.unknown_users == "skip":
        scored, rows = scored[~is_new], rows[~is_new]
        if not scored.size:
            raise ValueError(
                f"none of the {users_new:,} rows of heldout has an entry in inputs, and "
                'unknown_users="skip" leaves such rows out'
            )
    _check_allowed(labels, scored, denied)
    if setup.by == "kinds" and not setup.kinds:
        raise ValueError(
            'by="kinds" measures held-out events of histories by their kinds, and '
            "these have none; read them with events=EventSchema(kind=COLUMN)"
        )
    wanted: list[tuple[str, np.ndarray | None, CSR]] = [
        (name, None, each.matrix) for name, each in setup.kinds.items()
    ]
    if setup.by == "entries":
        wanted += _by_entries(labels, given.trained)
    batch = rows_in_a_batch(setup.batch_size or 512, scored.size)
    groups = tuple(_Group.of(*each, scored, batch) for each in wanted)
    share = None
    if given.popularity is not None:
        counts = column_counts(given.popularity.matrix)
        share = counts / max(given.popularity.num_rows, 1)
    return Evaluation(
        ks=setup.ks,
        inputs=shown,
        heldout=labels,
        rows=scored,
        tasks=_tasks(shown, rows, labels, scored, given, denied, setup),
        denied=denied,
        users_new=users_new,
        users_unknown=int(np.sum((total > 0) & (num_known == 0))),
        entries_unknown=int(np.sum(total - num_known)),
        popularity=share,
        groups=groups,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """Data to measure models on, made by `prepared_evaluation`.

    Attributes:
      ks: the cut-offs.
      inputs: all rows of the data that the model reads.
      heldout: all rows of the held-out entries.
      rows: `[users]` numbers of the rows of `heldout` that have entries.
      tasks: batches of these rows.
      denied: ids of items that are excluded for all rows.
      users_new: number of rows of `heldout` that have no entry in the inputs.
      users_unknown: number of rows of `heldout` whose items are all unknown.
      entries_unknown: number of held-out entries whose item is unknown.
      popularity: `[items]` share of the rows that have each item, or None.
      groups: groups of items, or of held-out entries, that are measured separately.
    """

    ks: tuple[int, ...]
    inputs: Inputs
    heldout: NamedCSR
    rows: np.ndarray
    tasks: Tasks
    denied: np.ndarray
    users_new: int
    users_unknown: int
    entries_unknown: int
    popularity: np.ndarray | None
    groups: tuple[_Group, ...]

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Metrics of the popularity baseline, or an empty dict.

        They are computed at the first access.
        """
        if self.popularity is None:
            return {}
        found, _ = self._measured(Popularity(self.popularity, self.inputs.features))
        return {f"popularity_{n}": v for n, v in found.items() if "@" in n}

    @promoting()
    @using_auto_axes()
    def lower_ahead(self, model: Recommender) -> Callable[[], object]:
        """Lowers the program with which `run` ranks by a model; see `Keepable.lower_ahead`.

        The model may have shapes in place of arrays.
        """
        # Another program ranks candidates.
        if self.tasks.candidates is not None:
            return lambda: None
        graphdef, state = nnx.split((model, None))
        tasks, mask = self._tasks_of(model)
        task, k = next(iter(tasks)), max(self.ks)
        return recommended[False].lower_ahead(
            graphdef, state, task.shown, task.exclude, k, mask
        )

    @promoting()
    @using_auto_axes()
    def run(
        self,
        model: Recommender,
        *,
        optimizer: Optimizer | None = None,
        deterministic: bool = False,
        keep_rows: bool = False,
    ) -> dict[str, float]:
        """Measures a model; see `evaluate`.

        Args:
          model: model to measure.
          optimizer: the model's optimizer, if some of its updates of weight rows are still
              pending.
          deterministic: whether results are bitwise equal in every process on GPUs of one kind.
          keep_rows: whether to return a `Measured`, which has the metrics of each row.
        """
        found, values = self._measured(model, optimizer, deterministic)
        found = {
            **found,
            **self.baseline,
            "users": self.rows.size,
            "users_new": self.users_new,
            "users_unknown": self.users_unknown,
            "entries_unknown": self.entries_unknown,
        }
        if not keep_rows:
            return found
        named = [f"{name}@{k}" for k in self.ks for name in METRICS]
        names = self.heldout.row_names
        return metrics.Measured(
            found,
            metrics.Rows(
                names=None if names is None else names[self.rows],
                means=dict(zip(named, values, strict=True)),
            ),
        )

    def of_epoch(
        self, as_ranker: Callable[[nnx.Module], Recommender]
    ) -> Callable[..., dict[str, float]]:
        """Makes a function that measures a model after an epoch of `fit`. It returns only the
        metrics at the cut-offs `ks`, without groups.
        """

        def measured(
            model: nnx.Module, *, optimizer: Optimizer, deterministic: bool
        ) -> dict[str, float]:
            ranker, how = as_ranker(model), {"deterministic": deterministic}
            found = self.run(ranker, optimizer=optimizer, **how)
            return {name: value for name, value in found.items() if "@" in name}

        return measured

    @promoting()
    @using_auto_axes()
    def _measured(
        self,
        model: Recommender,
        optimizer: Optimizer | None = None,
        deterministic: bool = False,
    ) -> tuple[dict[str, float], np.ndarray]:
        """The metrics of a model by name, and the metrics of each row, `[len(ks) * len(METRICS),
        users]`.
        """
        items = self.heldout.matrix.num_cols
        check_inputs(self.inputs, features_of(model))
        check_columns("heldout", items, model.num_items, "items")
        if self.tasks.candidates is not None and not hasattr(model, "item_scores"):
            raise TypeError(
                f"candidates need a model with the method item_scores(x, ids), but "
                f"{type(model).__name__} does not have it"
            )
        graphdef, state = split(model, optimizer)
        counts = beside(state, np.zeros((len(self.ks), items), np.int32))
        parts, of_groups = [], [[] for _ in self.groups]
        apart = zip(*(group.labels for group in self.groups), strict=True)
        if not self.groups:
            apart = itertools.repeat(())
        tasks, mask = self._tasks_of(model)
        for task, own in zip(tasks, apart, strict=False):
            found = ranked(
                graphdef, state, task, max(self.ks), mask, deterministic=deterministic
            )
            part, counts = measured[deterministic](
                found, task.labels, task.left_out, counts, self.ks
            )
            parts.append(part)
            for wanted, into in zip(own, of_groups, strict=True):
                nothing = beside(state, np.zeros((len(self.ks), items), np.int32))
                # Unknown held-out entries have no item number, so they belong to no group.
                part, _ = measured[deterministic](found, wanted, None, nothing, self.ks)
                into.append(part)
        values = np.concatenate([np.asarray(p) for p in parts], axis=1)
        values = values[:, : self.rows.size].astype(np.float64)
        check_scores(np.isnan(values).any(axis=0), self.heldout, self.rows)
        found = {
            **self._summary(values.mean(axis=1), np.asarray(counts)),
            **self._by_group(of_groups, np.asarray(counts)),
        }
        return found, values

    def _tasks_of(
        self, model: Recommender
    ) -> tuple[Iterable[RankingTask], jax.Array | None]:
        """The tasks for a model, and the mask of excluded items.

        The mask `[items]` is None if the model's `top_k` does not accept one: then each row of the
        tasks excludes these items.
        """
        if not self.denied.size or self.tasks.candidates is not None:
            return self.tasks, None
        items = self.heldout.matrix.num_cols
        if can_deny(model):
            return self.tasks, mask_of(self.denied, items)
        seen = self.tasks.exclude
        matrix = None if seen is None else seen.matrix
        rows = (self.tasks.labels if seen is None else seen).rows
        unwanted = denying(matrix, rows.reshape(-1), self.denied, items, len(rows[0]))
        return map(_replaced, self.tasks, unwanted), None

    def _summary(self, means: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """Converts means over rows, `[len(ks) * len(METRICS)]`, and recommendation counts of
        items, `[len(ks), items]`, to metrics by name.
        """
        rest = iter(means.tolist())
        found = {}
        for k, given in zip(self.ks, counts, strict=True):
            found |= {f"{name}@{k}": next(rest) for name in METRICS}
            allowed = np.delete(given, self.denied)
            found[f"coverage@{k}"] = metrics.coverage(allowed)
            found[f"gini@{k}"] = metrics.gini(allowed)
            if self.popularity is not None:
                mean = metrics.mean_popularity(given, self.popularity)
                found[f"mean_popularity@{k}"] = mean
        return found

    def _by_group(
        self, parts: Sequence[Sequence[jax.Array]], counts: np.ndarray
    ) -> dict[str, float]:
        """Metrics of each group, and for item groups their share of all recommendations."""
        found: dict[str, float] = {}
        names = [f"{name}@{k}" for k in self.ks for name in METRICS]
        for group, own in zip(self.groups, parts, strict=True):
            found[f"entries[{group.name}]"] = int(group.entries.sum())
            if not group.entries.any():
                continue
            values = np.concatenate([np.asarray(p) for p in own], axis=1)
            values = values[:, : self.rows.size][:, group.entries > 0]
            mean = values.astype(np.float64).mean(axis=1)
            means = dict(zip(names, mean, strict=True))
            for k, given in zip(self.ks, counts, strict=True):
                for name in ("recall", "ndcg"):
                    found[f"{name}@{k}[{group.name}]"] = float(means[f"{name}@{k}"])
                if group.items is not None:
                    share = given[group.items].sum() / max(given.sum(), 1)
                    found[f"share@{k}[{group.name}]"] = float(share)
        return found


def _replaced(task: RankingTask, unwanted: Batch) -> RankingTask:
    return dataclasses.replace(task, exclude=unwanted)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """A group of items, or of held-out entries, that is measured separately.

    Attributes:
      name: range of training entries of the group's items, or the kind of event of its entries,
          or the category of its users.
      items: `[items]` bool, True for items of the group; None for a kind of event or users.
      entries: `[users]` number of held-out entries in the group.
      labels: batches of the held-out entries in the group.
    """

    name: str
    items: np.ndarray | None
    entries: np.ndarray
    labels: Batches

    @classmethod
    def of(
        cls,
        name: str,
        items: np.ndarray | None,
        own: CSR,
        scored: np.ndarray,
        batch_size: int,
    ) -> _Group:
        """Makes a group from its held-out entries; `own` has all rows of the held-out data."""
        lengths = np.diff(np.asarray(own.indptr))[scored]
        batches = Batches.of(for_batches(indicator(own)), scored, batch_size)
        return cls(name, items, lengths, batches)


# Upper bounds of the groups by an item's number of training entries. The last group, without a
# bound, has all other items.
_FEW = (0, 4, 9, 19)


def _by_entries(
    labels: NamedCSR, trained: NamedCSR | None
) -> Iterator[tuple[str, np.ndarray, CSR]]:
    """Groups items by their number of training rows. Yields the name, the mask of items and the
    entries of each group.
    """
    if trained is None:
        raise ValueError(
            'by="entries" counts the entries of items in the training data; name these: '
            "popularity=..."
        )
    counts, least = column_counts(trained.matrix), 0
    for most in (*_FEW, None):
        items = (
            counts >= least if most is None else (counts >= least) & (counts <= most)
        )
        name = f"{least}+" if most is None else f"{least}-{most}" if most else "0"
        yield name, items, _of_items(labels, items).matrix
        least = 0 if most is None else most + 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Given:
    """The matrices of an evaluation. Their columns are the items.

    Attributes:
      heldout: entries that the model should rank high.
      exclude: items of each row that are never recommended to it, or None.
      popularity: data whose entries the popularity baseline counts, or None.
      candidates: items to rank for each row, or None.
      trained: training data; items missing from it are unknown. None if all items are known.
    """

    heldout: NamedCSR
    exclude: NamedCSR | None
    popularity: NamedCSR | None
    candidates: NamedCSR | None
    trained: NamedCSR | None

    @classmethod
    def of(cls, inputs: Inputs, heldout: Source, setup: Setup) -> _Given:
        """Makes the matrices from the arguments of `evaluate`.

        Raises:
          TypeError: an argument has a type that is not supported.
          ValueError: a matrix has other columns than `heldout`.
        """
        labels = NamedCSR.of("heldout", heldout)
        exclude, popularity = setup.exclude, setup.popularity
        candidates = setup.candidates
        seen = None if exclude is None else inputs.named("exclude", exclude)
        counted = None if popularity is None else inputs.named("popularity", popularity)
        among = None if candidates is None else NamedCSR.of("candidates", candidates)
        for source in (seen, counted, among):
            if source is not None:
                _check_items(source, labels)
        # If the popularity baseline counts some data, this is the training data. Otherwise the
        # inputs are the training data, if they are excluded.
        known_by, trained = popularity, counted
        if popularity is None and isinstance(exclude, str):
            known_by, trained = exclude, seen
        if isinstance(known_by, str) and not setup.trained_on_inputs:
            trained = None
        return cls(
            heldout=labels,
            exclude=seen,
            popularity=counted,
            candidates=among,
            trained=trained,
        )

    def known(self) -> NamedCSR:
        """The held-out entries whose items are known."""
        if self.trained is None:
            return _of_items(self.heldout, None)
        return _of_items(self.heldout, column_counts(self.trained.matrix) > 0)

    def known_candidates(self) -> NamedCSR:
        """The candidates that are known items. Warns about unknown candidates."""
        assert self.candidates is not None
        if self.trained is None:
            return self.candidates
        known = _of_items(self.candidates, column_counts(self.trained.matrix) > 0)
        total = int(np.asarray(self.candidates.matrix.indptr)[-1])
        lost = total - int(np.asarray(known.matrix.indptr)[-1])
        if lost:
            warn_caller(
                f"{lost:,} of {total:,} candidates ({lost / total:.1%}) are of items without an "
                "entry in the training data: they are left out, as held-out items of that sort "
                "are; popularity=... names the training data"
            )
        return known


def _rows_shown(
    labels: NamedCSR, scored: np.ndarray, inputs: Inputs, setup: Setup
) -> np.ndarray:
    """For each of the `scored: [users]` rows of `labels`, the number `[users]` of its inputs row.

    The number is -1 if the inputs lack the row: the model then reads an empty row.

    Raises:
      ValueError: the inputs lack all rows; or they lack some, and a dense input has no empty row.
    """
    rows = find_rows(labels, inputs.rows)[scored]
    missing = scored[rows < 0]
    dense = any(isinstance(part, NamedArray) for part in inputs.parts.values())
    is_error = len(missing) == len(scored) or (
        dense and setup.unknown_users == "count" and missing.size
    )
    if is_error:
        remedy = ', or leave them out: unknown_users="skip"' * (
            dense and any(rows >= 0)
        )
        raise ValueError(
            f"{missing.size:,} of {scored.size:,} rows of heldout are not in inputs: "
            f"{labels.labels(missing)}; the model needs inputs for them{remedy}"
        )
    return rows


def _are_new(inputs: Inputs, rows: np.ndarray) -> np.ndarray:
    """`[users]` bool: whether all inputs of a user are empty."""
    histories = inputs.parts.get(HISTORIES)
    if isinstance(histories, NamedArray):
        return (rows < 0) | (histories.matrix[rows] < 0).all(axis=1)
    parts = list(inputs.parts.values())
    counts = [
        np.diff(np.asarray(part.matrix.indptr))[rows]
        for part in parts
        if isinstance(part, NamedCSR)
    ]
    # A dense row always counts as an entry, so such a user is not new.
    if len(counts) < len(parts):
        return rows < 0
    return (rows < 0) | (sum(counts) == 0)


def _tasks(
    shown: Inputs,
    rows: np.ndarray,
    labels: NamedCSR,
    scored: np.ndarray,
    given: _Given,
    denied: np.ndarray,
    setup: Setup,
) -> Tasks:
    """Tasks for the `rows: [users]` of the inputs with the rows `scored: [users]` of `labels`.

    The candidates do not include excluded items.
    """
    batch_size = rows_in_a_batch(setup.batch_size or 512, scored.size)
    held = held_inputs(shown)
    unwanted = ids = None
    if given.exclude is not None:
        seen_rows = rows
        if not isinstance(setup.exclude, str):
            found = find_rows(shown.rows, given.exclude)[rows]
            others = np.full(len(rows), -1)
            # `exclude` may have rows that are not in the inputs.
            if given.exclude.row_names is not None:
                others = find_rows(labels, given.exclude)[scored]
            seen_rows = np.where(rows < 0, others, found)
        if (rows < 0).any():
            seen = for_batches(indicator(given.exclude.matrix))
            unwanted = Batches.of(seen, seen_rows, batch_size)
        else:
            unwanted = exclusion(shown, rows, held, given.exclude, batch_size)
        _check_repeats(labels, scored, given.exclude, seen_rows)
    if given.candidates is not None:
        among = given.known_candidates()
        ids = _candidate_ids(among, labels, given.known(), scored, batch_size)
        ids[np.isin(ids, denied)] = -1
    return Tasks(
        shown=batches_of(shown, held, rows, batch_size),
        exclude=unwanted,
        labels=Batches.of(for_batches(indicator(labels.matrix)), scored, batch_size),
        left_out=_left_out(labels, scored, batch_size),
        candidates=ids,
    )


def _num_entries(heldout: NamedCSR) -> np.ndarray:
    """Number of held-out entries in each row, `[rows]`, including entries of unknown items."""
    lengths = np.diff(np.asarray(heldout.matrix.indptr))
    return lengths if heldout.left_out is None else lengths + heldout.left_out


def _of_items(heldout: NamedCSR, chosen: np.ndarray | None) -> NamedCSR:
    """Only the entries of the `chosen: [items]` items, or of all items; `left_out` is empty."""
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
    """How many entries of each row have no item number, `[steps, batch]`; None if all have one."""
    if heldout.left_out is None:
        return None
    counts = heldout.left_out[rows]
    return np.pad(counts, (0, -counts.size % batch_size)).reshape(-1, batch_size)


def _check_repeats(
    heldout: NamedCSR, rows: np.ndarray, seen: NamedCSR, seen_rows: np.ndarray
) -> None:
    """Warns if held-out entries are excluded, so that no model can recommend them.

    Args:
      heldout: entries that the model should rank high.
      rows: row numbers in `heldout`.
      seen: excluded entries.
      seen_rows: the row of `seen` for each of `rows`, or -1.

    Raises:
      ValueError: all held-out entries are excluded.
    """
    has_some = seen_rows >= 0
    wanted = _rows(heldout, rows[has_some])
    repeated = wanted.multiply(_rows(seen, seen_rows[has_some])).nnz
    if not repeated:
        return
    _tell_of_missed(
        heldout,
        rows,
        repeated,
        wholly=f"all {repeated:,} held-out entries of known items are excluded, because "
        "their rows already have them, so none can be found. Hold out entries that "
        "the inputs lack, or also rank what a row has: exclude=None",
        why="excluded, because their rows already have them",
        advice="; exclude=None ranks them, too",
    )


def _check_allowed(heldout: NamedCSR, rows: np.ndarray, denied: np.ndarray) -> None:
    """Warns if items of held-out entries are excluded for all rows.

    Args:
      heldout: entries that the model should rank high.
      rows: row numbers in `heldout`.
      denied: ids of excluded items.

    Raises:
      ValueError: the items of all entries are excluded.
    """
    if not denied.size:
        return
    lost = int(np.isin(_rows(heldout, rows).indices, denied).sum())
    if not lost:
        return
    _tell_of_missed(
        heldout,
        rows,
        lost,
        wholly=f"all {lost:,} held-out entries are of items that exclude_items or only_items "
        "leaves out, so none can be found",
        why="of items that exclude_items or only_items leaves out",
    )


def _tell_of_missed(
    heldout: NamedCSR,
    rows: np.ndarray,
    missed: int,
    *,
    wholly: str,
    why: str,
    advice: str = "",
) -> None:
    """Warns if no model can recommend some held-out entries.

    Args:
      heldout: entries that the model should rank high.
      rows: row numbers in `heldout`.
      missed: number of entries of known items that cannot be recommended.
      wholly: error message if this concerns all entries of known items.
      why: reason, for the warning.
      advice: sentence that is added to the message.

    Raises:
      ValueError: no entry of a known item can be recommended.
    """
    if missed == np.diff(np.asarray(heldout.matrix.indptr))[rows].sum():
        raise ValueError(wholly)
    total = int(_num_entries(heldout)[rows].sum())
    warn_caller(
        f"{missed:,} of {total:,} held-out entries ({missed / total:.1%}) are {why}: they "
        f"cannot be found and count as missed{advice}"
    )


def _candidate_ids(
    among: NamedCSR,
    labels: NamedCSR,
    known: NamedCSR,
    rows: np.ndarray,
    batch_size: int,
) -> np.ndarray:
    """`[steps, batch, count]` ids to rank: candidates and labels of some rows of `labels`.

    Labels of unknown items are not included: they count as ranked after all candidates. `known`
    has the other labels. Candidates are known items. Ids ascend in each row, which is padded with
    -1.
    """
    found = find_rows(labels, among)[rows]
    # The number -1 (a missing row) has length 0.
    lengths = np.append(np.diff(np.asarray(among.matrix.indptr)), 0)
    without = rows[lengths[found] == 0]
    if without.size:
        raise ValueError(
            f"{without.size:,} of {rows.size:,} rows of heldout have no candidates of known "
            f"items: {labels.labels(without)}"
        )
    # The sum of two indicator matrices is their union.
    both = _rows(among, found) + _rows(known, rows)
    lengths = np.diff(both.indptr)
    steps = -(-rows.size // batch_size)
    ids = np.full((steps * batch_size, max(lengths.max(), 1)), -1, np.int32)
    row = np.repeat(np.arange(rows.size), lengths)
    ids[row, np.arange(both.nnz) - both.indptr[row]] = both.sorted_indices().indices
    return ids.reshape(steps, batch_size, -1)


def _rows(source: NamedCSR, rows: np.ndarray) -> scipy.sparse.csr_array:
    """The given rows as an indicator matrix, in SciPy."""
    return scipy.sparse.csr_array(indicator(source.matrix).to_scipy()[rows])


def _check_items(source: NamedCSR, heldout: NamedCSR) -> None:
    """Raises ValueError unless both have equal columns."""
    check_same_features(source, heldout)
    ours, theirs = source.matrix.num_cols, heldout.matrix.num_cols
    if ours != theirs:
        raise ValueError(
            f"{source.what} has {ours:,} columns but heldout has {theirs:,}; read both "
            "with the same vocabulary (or, if the inputs are not items, pass exclude=... "
            "and popularity=..., each may be None)"
        )
