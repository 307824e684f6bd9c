"""The common part of runs of items and of histories, the acts of users."""

from __future__ import annotations

import abc
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparsejax import metrics
from sparsejax.baselines.models import BASELINES
from sparsejax.data import ItemFeatures, SparseDataset, read_item_features
from sparsejax.data.files.names import Names, find_names, quoted
from sparsejax.data.sets.vocabulary import popularity_ranks
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.content import content_of, fitting, without_content
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Paged
from sparsejax.options.predicting import Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.runs import folders
from sparsejax.runs.kind import Opened, Runs, Source
from sparsejax.runs.reading import (
    check_heldout,
    dates_of,
    name_of,
    some_rows,
)
from sparsejax.runs.threads import meanwhile
from sparsejax.sparse import CSR
from sparsejax.verbs.evaluate import evaluate
from sparsejax.verbs.recommend import lower_recommend, recommend
from sparsejax.verbs.vectors import user_vectors


class Interactions(Runs):
    """Runs of models that rank items."""

    @abc.abstractmethod
    def read_shown(self, source: Any, reading: Reading, run: Opened) -> Any:
        """Reads what a model is shown."""

    @abc.abstractmethod
    def read_heldout(self, source: Any, reading: Reading, data: Any) -> Any:
        """Reads what was held out of `data`, with its features."""

    def heldout(self, source: Any, reading: Reading, data: Any, shown: Any) -> Any:
        """`read_heldout`, checked to be of rows of `data`, which `shown` names."""
        found = self.read_heldout(source, reading, data)
        return check_heldout(source, found, data, shown)

    @abc.abstractmethod
    def excluded(
        self, recommending: Recommend, reading: Reading, run: Opened, data: Any
    ) -> Any:
        """The items that are not to be recommended."""

    @abc.abstractmethod
    def counts(self, data: Any) -> np.ndarray:
        """`[items]` how often each occurs."""

    def add_new(
        self, model: Any, known: Names, data: Any, optimizer: Optimizer | None
    ) -> None:
        model.add_items(data.num_features - len(known), optimizer=optimizer)

    def like(self, known: Names) -> SparseDataset:
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        matrix = CSR(None, none, start, num_cols=len(known))
        return SparseDataset(matrix, known[:0], known)

    def known_of(self, data: Any) -> Names:
        return data.feature_names

    def save_known(self, path: pathlib.Path, known: Names) -> None:
        self.like(known).save(path)

    def load_known(self, path: pathlib.Path) -> Names:
        return SparseDataset.load(path).feature_names

    def num_known(self, known: Names) -> int:
        return len(known)

    def fingerprint_of(self, known: Names) -> str:
        return fingerprint(known)

    def doubts(self, model: Any, source: Source, k: int) -> str | None:
        if source.heldout is None or content_of(model) is None:
            return None
        with_content, without = (
            evaluate(each, source.data, source.heldout, k=k, keep_rows=True)
            for each in (model, without_content(model))
        )
        name = self.metric(k)
        found = metrics.compare(without, with_content)[name]
        if found.high >= 0:
            return None
        return (
            f"the content of items makes the model worse on the validation data: {name} is "
            f"{found.second:.4f}, and {found.first:.4f} where the same model ranks without "
            "content; leave item_features out, or read fewer columns"
        )

    def account(self, data: Any) -> str:
        return (
            f"{data.num_rows:,} rows, {data.num_features:,} features, "
            f"{data.num_entries:,} entries"
        )

    def recommend(
        self,
        recommending: Recommend,
        reading: Reading,
        run: Opened,
        check: Callable[[Names], None] | None = None,
        hint: str = "",
    ) -> tuple[Names, Recommendations]:
        def read() -> tuple[Any, dict[str, Any]]:
            data = self.read_shown(recommending.inputs, reading, run)
            if recommending.users is not None:
                data = some_rows(data, recommending.users, hint)
            if check is not None:
                check(data.row_names)
            return data, {
                "k": recommending.k,
                "exclude": self.excluded(recommending, reading, run, data),
                "exclude_items": recommending.exclude_items,
                "only_items": recommending.only_items,
            }

        shown = meanwhile(read)

        def ahead(shapes: Any) -> Callable[[], object]:
            data, how = shown()
            return lower_recommend(shapes, data, **how)

        model = run.model(ahead)
        data, how = shown()
        return data.row_names, recommend(model, data, **how)

    def user_vectors(self, inputs: Any, reading: Reading, run: Opened) -> Any:
        model = run.model()
        data = self.read_shown(inputs, reading, run)
        return user_vectors(model, data), data.row_names

    def report(self, measuring: Paged, reading: Reading, run: Opened) -> dict[str, Any]:
        from sparsejax.runs import report as reports

        if measuring.heldout is not None and measuring.inputs is None:
            raise ValueError(
                "heldout=... needs inputs=..., the interactions that the model is shown"
            )
        model, names = run.model(), run.known
        # Without data: by the order of the vocabulary, which popularity decided.
        counts, measured, examples = -popularity_ranks(len(names)), None, []
        facts = [f"{len(names):,} items"]
        if measuring.inputs is not None:
            heldout, keep_seen = None, not measuring.exclude_seen
            shown = self.read_shown(measuring.inputs, reading, run)
            counts = self.counts(shown)
            facts = [
                name_of(measuring.inputs),
                f"{shown.num_rows:,} users",
                f"{shown.num_features:,} items",
                f"{shown.num_entries:,} entries",
                *dates_of(shown),
            ]
            if measuring.heldout is not None:
                heldout = self.heldout(
                    measuring.heldout, reading, shown, measuring.inputs
                )
                how = measuring.counted()
                if content_of(model) is not None:
                    how["by"] = "entries"
                measured = evaluate(model, shown, heldout, keep_rows=True, **how)
            examples = reports.examples_of(model, shown, heldout, keep_seen=keep_seen)
        return {
            "model": model,
            "measured": measured,
            "examples": examples,
            "similar": reports.similar_to_popular(model, names, counts),
            "data": facts,
        }


def with_baselines(
    measured: Mapping[str, float],
    prepared: Evaluation,
    train: SparseDataset,
    say: Callable[[str], None],
) -> Mapping[str, float]:
    """The metrics, behind those of each baseline, with its name before that of the metric.

    Args:
      measured: the metrics of the model.
      prepared: on which the baselines are measured.
      train: of which they are made.
      say: is told which of them need too much memory.
    """
    found: dict[str, float] = {}
    for name, baseline in BASELINES.items():
        try:
            model = baseline(train)
        except MemoryError as error:
            say(f"left out: {error}")
            continue
        its = prepared.run(model)
        found |= {f"{name}_{n}": its[n] for n in its if f"popularity_{n}" in its}
    found |= measured
    rows = getattr(measured, "rows", None)
    return found if rows is None else metrics.Measured(found, rows)


def warn_of_popularity(measured: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics, with a warning if the most popular items are better for everyone."""
    for name, value in measured.items():
        popular = measured.get(f"popularity_{name}")
        of_all = name.startswith("ndcg@") and not name.endswith("]")
        if of_all and popular is not None and popular > value:
            warnings.warn(
                f"recommending the most popular items to everyone is better than this model: "
                f"{name} {popular:.4f}, of the model {value:.4f}. Train longer, or with the "
                "settings that suit the data",
                stacklevel=2,
            )
            break
    return measured


def with_content(
    training: Training, data: Any, counts: Callable[[Any], np.ndarray]
) -> tuple[Any, ItemFeatures | None]:
    """The data with the items that only the content has, and the content of all items.

    Args:
      training: has the content.
      data: the events.
      counts: returns for each item of data how many events it has.

    Raises:
      ValueError: a run that goes on from another one has content and the other has none,
        or the other way round.
    """
    known = given = training.item_features
    if training.origin is not None:
        known = folders.item_features_of(training.origin)
        if (known is None) != (given is None):
            has = "without" if known is None else "with"
            remedy = "leave it out" if known is None else "give that of all items"
            raise ValueError(
                f"{training.origin}: was trained {has} content of its items, "
                f"item_features=...; {remedy}"
            )
    if given is None:
        return data, None
    features = given
    if not isinstance(given, ItemFeatures):
        features = read_item_features(given)
    for name, became in features.columns.items():
        training.say(f"content of items: {name}: {became}")
    features.align(data)  # is it of these items?
    data = data.align_features(features.names_after(data))
    features = fitting(features, data)
    if training.origin is not None:
        gone = find_names(known.tag_names, features.tag_names) < 0
        if gone.any():
            training.say(
                f"content of items: {int(gone.sum()):,} of {len(gone):,} tags that "
                f"{training.origin} knows are not in it: {quoted(known.tag_names[gone])}"
            )
        features = features.like(known)
    numbers = features.vectors
    without = int((counts(data) == 0).sum())
    training.say(
        f"content of items: {len(features.tag_names):,} tags"
        + ("" if numbers is None else f", {numbers.shape[1]:,} numbers")
        + f"; {features.num_empty:,} of {data.num_features:,} items have none, and "
        f"{without:,} are in no event"
    )
    return data, features


def check_scanned(training: Training) -> None:
    """Raises ValueError for what needs all of the data."""
    if training.item_features is not None:
        raise ValueError(
            "item_features=... needs all of the data; leave out chunk_rows"
        )
    if training.skip_bad_lines:
        raise ValueError("skip_bad_lines=True is for files of lines; leave it out")
    if training.validation is not None:
        raise ValueError("validation=... needs all of the data; leave out chunk_rows")
