"""The common part of items and histories, the acts of users."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from flax import nnx

from sparsejax import metrics
from sparsejax.data import (
    ItemFeatures,
    SequenceDataset,
    SparseDataset,
    read_item_features,
)
from sparsejax.data.files.names import Names, find_names, quoted
from sparsejax.data.scans.scan_entries import ScannedEntries
from sparsejax.data.sets.splits import Split
from sparsejax.data.sets.vocabulary import popularity_ranks
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.content import content_of, fitting, without_content
from sparsejax.kinds.kind import Kind, Range
from sparsejax.kinds.reading import (
    check_heldout,
    dates_of,
    fingerprint_of_heldout,
    name_of,
    split_name,
    validation_split,
)
from sparsejax.kinds.source import Findings, Opened, Source, item_names
from sparsejax.nn.config import NetworkConfig
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Measure, Paged
from sparsejax.options.predicting import Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Repeated, Training
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sparse import CSR

# Temperatures of models whose scores are cosines, for `tune`.
TEMPERATURES = Range(0.03, 1.0, log=True)


class Interactions[
    Config: NetworkConfig | SequenceConfig,
    Data: SparseDataset | SequenceDataset,
](Kind[Config, Data, Names]):
    """A kind of models that rank items."""

    @abc.abstractmethod
    def read(
        self,
        source: Any,
        reading: Reading,
        *,
        features: Data | Names | None = None,
        indicator: bool = False,
    ) -> Data:
        """Reads rows from a file or a table.

        Args:
          source: the file, the table or a data set.
          reading: settings of reading: the format and the columns.
          features: names of the features, or a data set that has them; by default those of the
            source.
          indicator: whether values are ignored, whatever `reading` says.
        """

    @abc.abstractmethod
    def scan(self, training: Training) -> tuple[ScannedEntries[Any], Sequence[int]]:
        """Data that is read in chunks while training, and the number of rows in each."""

    @abc.abstractmethod
    def matrix(self, data: Data) -> SparseDataset:
        """The rows as a matrix of items."""

    @abc.abstractmethod
    def counts(self, data: Data) -> np.ndarray:
        """`[items]` how often each occurs."""

    @abc.abstractmethod
    def fingerprint(self, data: Data) -> str:
        """The fingerprint of data in memory."""

    def split(self, validation: Any, data: Data, path: Any) -> Split[Data] | None:
        """The split of data that `validation` asks for; None if it is data of its own.

        Args:
          validation: a share, or "last"; or data.
          data: the data.
          path: name of its source, for messages.
        """
        return validation_split(validation, data)

    def read_to_train(self, training: Training, before: Opened | None) -> Data:
        """Reads the rows to train on."""
        return self.read(training.data, training)

    def with_targets(self, data: Data, recorded: Repeated) -> Data:
        """The data with the targets that the options of a training name."""
        return data

    def source(self, training: Training, before: Opened | None) -> Source:
        data = self.read_to_train(training, before)
        if before is not None:
            data = data.append_features(before.known)
        data, features = with_content(training, before, data, self.counts)
        data = self.with_targets(data, training)
        everything = data
        heldout = validation = split = None
        if (asked := training.validation) is not None:
            parts = self.split(asked, data, training.data)
            if parts is None:
                heldout = self.heldout(asked, training, data, training.data)
                heldout = self.with_targets(heldout, training)
            else:
                data, heldout = parts
                split = split_name(asked)
                training.say(f"validation: {parts}")
            validation = fingerprint_of_heldout(self.matrix(heldout), data.row_names)
            if getattr(heldout, "events", None) is not None:
                # Their columns decide on the targets, and are the context.
                own = heldout.align_rows(data.row_names, missing="empty")
                validation = f"{validation}-{self.fingerprint(own)}"
        return Source(
            data=data,
            everything=everything,
            chunks=[data.num_examples],
            fingerprint=self.fingerprint(data),
            known=self.known_of(data),
            heldout=heldout,
            validation=validation,
            split=split,
            features=features,
        )

    def scanned(self, training: Training) -> Source:
        if training.item_features is not None:
            raise ValueError(
                "item_features=... needs all of the data; leave out chunk_rows"
            )
        if training.skip_bad_lines:
            raise ValueError("skip_bad_lines=True is for files of lines; leave it out")
        if training.validation is not None:
            raise ValueError(
                "validation=... needs all of the data; leave out chunk_rows"
            )
        for name in ("format", "delimiter", "separator", "time_format"):
            if getattr(training, name) not in (None, "parquet"):
                raise ValueError(
                    f"{name}=... is for data in memory; leave out chunk_rows"
                )
        data, chunks = self.scan(training)
        return Source(
            data=data,
            everything=data,
            chunks=chunks,
            fingerprint=data.fingerprint(),
            known=self.known_of(cast(Any, data)),
        )

    def read_shown(self, source: Any, reading: Reading, run: Opened) -> Data:
        indicator = run.settings.indicator
        return self.read(source, reading, features=run.known, indicator=indicator)

    def heldout(self, source: Any, reading: Reading, data: Data, path: Any) -> Data:
        """Reads held-out entries of rows of data that was read from a path."""
        found = self.read(source, reading, features=data, indicator=True)
        return check_heldout(source, found, data, path)

    def excluded(
        self, asked: Recommend, reading: Reading, run: Opened, shown: Data
    ) -> SparseDataset | Data | None:
        if asked.exclude is None:
            return shown if asked.exclude_seen else None
        unwanted = self.matrix(
            self.read(
                asked.exclude,
                reading.replaced(user_features=None),
                features=item_names(run.known),
                indicator=True,
            )
        )
        if not asked.exclude_seen:
            return unwanted
        return self.matrix(shown).without_values().merge(unwanted)

    def by_kinds(self, heldout: Data, by: str | None) -> dict[str, str]:
        """The option `by` of `evaluate`, by which kinds of events are measured apart."""
        return {}

    def facts_of(self, data: Data) -> list[str]:
        """Further facts of some data, for a report."""
        return []

    def add_new(
        self, model: Any, known: Names, data: Data, optimizer: Optimizer | None
    ) -> None:
        new = data.num_features - self.num_known(known)
        model.add_items(new, optimizer=optimizer)

    def like(self, known: Names) -> SparseDataset:
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        matrix = CSR(None, none, start, num_cols=len(known))
        return SparseDataset(matrix, known[:0], known)

    def known_of(self, data: Data) -> Names:
        return data.feature_names

    def load_known(self, path: pathlib.Path) -> Names:
        return SparseDataset.load(path).feature_names

    def num_known(self, known: Names) -> int:
        return len(item_names(known))

    def fingerprint_of(self, known: Names) -> str:
        return fingerprint(known)

    def excluded_in_validation(self, data: Data) -> Literal["inputs"] | None:
        """`exclude` of `evaluate` on held-out items, as `fit` validates."""
        return "inputs"

    def validated(
        self, model: nnx.Module, source: Source, k: int
    ) -> Mapping[str, float]:
        return self.evaluate(
            Measure(
                model,
                source.data,
                source.heldout,
                k=k,
                exclude=self.excluded_in_validation(source.data),
                popularity=None,
                keep_rows=True,
            )
        )

    def doubts(self, model: nnx.Module, source: Source, k: int) -> str | None:
        if source.heldout is None or content_of(model) is None:
            return None
        with_content, without = (
            self.evaluate(
                Measure(each, source.data, source.heldout, k=k, keep_rows=True)
            )
            for each in (model, without_content(model))
        )
        name = self.metric(k, source.data)
        found = metrics.compare(without, with_content)[name]
        if found.high >= 0:
            return None
        return (
            f"the content of items makes the model worse on the validation data: {name} is "
            f"{found.second:.4f}, and {found.first:.4f} where the same model ranks without "
            "content; leave item_features out, or read fewer columns"
        )

    def account(self, data: Data) -> str:
        return (
            f"{data.num_rows:,} rows, {data.num_features:,} features, "
            f"{data.num_entries:,} entries"
        )

    def findings(self, asked: Paged, reading: Reading, run: Opened) -> Findings:
        if asked.heldout is not None and asked.inputs is None:
            raise ValueError(
                "heldout=... needs inputs=..., the interactions that the model is shown"
            )
        model, names = run.model(), item_names(run.known)
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
            *self.facts_of(shown),
        ]
        if asked.heldout is not None:
            heldout = self.heldout(asked.heldout, reading, shown, asked.inputs)
            heldout = self.with_targets(heldout, run.settings)
            how = asked.counted()
            if content_of(model) is not None:
                how["by"] = "entries"
            how |= self.by_kinds(heldout, how.get("by"))
            measured = self.evaluate(
                Measure(model, shown, heldout, keep_rows=True, **how)
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
    before: Opened | None,
    data: Any,
    counts: Callable[[Any], np.ndarray],
) -> tuple[Any, ItemFeatures | None]:
    """The data with the items that only the content has, and the content of all items.

    Args:
      training: settings of the training, with the content.
      before: the run that is trained on, if there is one.
      data: the events.
      counts: function that returns for each item of data how many events it has.

    Raises:
      ValueError: a run that goes on from another one has content and the other has none,
        or the other way round.
    """
    known = given = training.item_features
    if before is not None:
        known = before.item_features()
        if (known is None) != (given is None):
            has = "without" if known is None else "with"
            remedy = "leave it out" if known is None else "give that of all items"
            raise ValueError(
                f"{before.directory}: was trained {has} content of its items, "
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
                f"{before.directory} knows are not in it: {quoted(known.tag_names[gone])}"
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
