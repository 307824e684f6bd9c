"""The common part of items and histories, the acts of users."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from sparsejax import metrics
from sparsejax.data import ItemFeatures, SparseDataset, read_item_features
from sparsejax.data.files.names import Names, find_names, quoted
from sparsejax.data.sets.vocabulary import popularity_ranks
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.content import content_of, fitting, without_content
from sparsejax.kinds.kind import Kind, Range
from sparsejax.kinds.reading import check_heldout, dates_of, name_of
from sparsejax.kinds.source import Earlier, Findings, Opened, Source
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Paged
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.sparse import CSR

# Temperatures of models whose scores are cosines, for `tune`.
TEMPERATURES = Range(0.03, 1.0, log=True)


class Interactions(Kind):
    """A kind of models that rank items."""

    @abc.abstractmethod
    def read_heldout(self, source: Any, reading: Reading, data: Any) -> Any:
        """Reads what was held out of `data`, with its features."""

    def heldout(self, source: Any, reading: Reading, data: Any, shown: Any) -> Any:
        """`read_heldout`, checked to be of rows of `data`, which `shown` names."""
        found = self.read_heldout(source, reading, data)
        return check_heldout(source, found, data, shown)

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

    def excluded_in_validation(self, data: Any) -> Literal["inputs"] | None:
        """`exclude` of `evaluate` on held-out items, as `fit` validates."""
        del data
        return "inputs"

    def validated(self, model: Any, source: Source, k: int) -> Mapping[str, float]:
        return self.evaluate(
            model,
            source.data,
            heldout=source.heldout,
            k=k,
            exclude=self.excluded_in_validation(source.data),
            popularity=None,
            keep_rows=True,
        )

    def doubts(self, model: Any, source: Source, k: int) -> str | None:
        if source.heldout is None or content_of(model) is None:
            return None
        with_content, without = (
            self.evaluate(
                each, source.data, heldout=source.heldout, k=k, keep_rows=True
            )
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

    def findings(self, asked: Paged, reading: Reading, run: Opened) -> Findings:
        if asked.heldout is not None and asked.inputs is None:
            raise ValueError(
                "heldout=... needs inputs=..., the interactions that the model is shown"
            )
        model, names = run.model(), run.known
        if asked.inputs is None:
            # Without data: by the order of the vocabulary, which popularity decided.
            counts = -popularity_ranks(len(names))
            return Findings(model=model, facts=[f"{len(names):,} items"], counts=counts)
        measured = heldout = None
        shown = self.read_shown(asked.inputs, reading, run)
        facts = [
            name_of(asked.inputs),
            f"{shown.num_rows:,} users",
            f"{shown.num_features:,} items",
            f"{shown.num_entries:,} entries",
            *dates_of(shown),
        ]
        if asked.heldout is not None:
            heldout = self.heldout(asked.heldout, reading, shown, asked.inputs)
            how = asked.counted()
            if content_of(model) is not None:
                how["by"] = "entries"
            measured = self.evaluate(
                model, shown, heldout=heldout, keep_rows=True, **how
            )
        return Findings(
            model=model,
            facts=facts,
            measured=measured,
            counts=self.counts(shown),
            shown=shown,
            heldout=heldout,
        )


def with_content(
    training: Training,
    before: Earlier | None,
    data: Any,
    counts: Callable[[Any], np.ndarray],
) -> tuple[Any, ItemFeatures | None]:
    """The data with the items that only the content has, and the content of all items.

    Args:
      training: has the content.
      before: the run that is trained on, if there is one.
      data: the events.
      counts: returns for each item of data how many events it has.

    Raises:
      ValueError: a run that goes on from another one has content and the other has none,
        or the other way round.
    """
    known = given = training.item_features
    if before is not None:
        known = before.item_features
        if (known is None) != (given is None):
            has = "without" if known is None else "with"
            remedy = "leave it out" if known is None else "give that of all items"
            raise ValueError(
                f"{before.name}: was trained {has} content of its items, "
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
    if before is not None:
        gone = find_names(known.tag_names, features.tag_names) < 0
        if gone.any():
            training.say(
                f"content of items: {int(gone.sum()):,} of {len(gone):,} tags that "
                f"{before.name} knows are not in it: {quoted(known.tag_names[gone])}"
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
