"""The common base of the kinds items and histories, which both store events of users."""

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
    are_baskets,
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

# Range of temperatures that `tune` tries for models with cosine scores.
TEMPERATURES = Range(0.03, 1.0, log=True)


class Interactions[
    Config: NetworkConfig | SequenceConfig,
    Data: SparseDataset | SequenceDataset,
](Kind[Config, Data, Names]):
    """Base of the kinds whose models rank items."""

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
          source: file, table or data set.
          reading: settings of reading: the format and the columns.
          features: names of the features, or a data set with these names. By default the names in
              the source are used.
          indicator: whether values are ignored, even if `reading` does not ask for it.
        """

    @abc.abstractmethod
    def scan(self, training: Training) -> tuple[ScannedEntries[Any], Sequence[int]]:
        """Opens data that is read in chunks during training; returns it with the rows of each
        chunk.
        """

    @abc.abstractmethod
    def matrix(self, data: Data) -> SparseDataset:
        """The data as a matrix of rows and items."""

    @abc.abstractmethod
    def counts(self, data: Data) -> np.ndarray:
        """`[items]` number of occurrences of each item."""

    @abc.abstractmethod
    def fingerprint(self, data: Data) -> str:
        """The fingerprint of data in memory."""

    def split(self, validation: Any, data: Data, path: Any) -> Split[Data] | None:
        """Splits data into training and validation parts;

        None if `validation` is a separate data set.

        Args:
          validation: a share, "last", or a separate data set.
          data: the data to split.
          path: name of the data's source, for messages.
        """
        return validation_split(validation, data)

    def read_to_train(self, training: Training, before: Opened | None) -> Data:
        """Reads the rows to train on."""
        return self.read(training.data, training)

    def with_targets(self, data: Data, recorded: Repeated) -> Data:
        """Sets the targets that the options of a training name."""
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
                # Event columns select the targets and are the context, so the fingerprint covers
                # them.
                own = heldout.align_rows(np.sort(heldout.row_names))
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
        """Reads held-out entries for rows of `data`, which was read from `path`."""
        found = self.read(source, reading, features=data, indicator=True)
        return check_heldout(source, found, data, path)

    def excluded(
        self, asked: Recommend, reading: Reading, run: Opened, shown: Data
    ) -> SparseDataset | Data | None:
        if asked.exclude is None:
            return shown if asked.exclude_seen else None
        pair = asked.inputs, asked.exclude
        if len({len(x) if are_baskets(x) else None for x in pair}) > 1:
            raise ValueError(
                "exclude=... is matched by the names of rows, which lists do not have: give inputs "
                "and exclude both as lists, with one list for each row, or neither"
            )
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
        """Arguments for `evaluate` that measure each kind of event separately; empty without
        `by`.
        """
        return {}

    def facts_of(self, data: Data) -> list[str]:
        """Additional facts about data, for a report."""
        return []

    def add_new(
        self,
        model: Any,
        known: Names | SequenceDataset,
        data: Data,
        optimizer: Optimizer | None,
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

    def num_known(self, known: Names | SequenceDataset) -> int:
        return len(item_names(known))

    def fingerprint_of(self, known: Names) -> str:
        return fingerprint(known)

    def excluded_in_validation(self, data: Data) -> Literal["inputs"] | None:
        """The `exclude` option that `evaluate` uses on held-out items when `fit` validates."""
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
            # Without data, popularity is the order of the vocabulary: popular items come first.
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
            how |= {"keep_rows": True, "groups": asked.groups}
            how |= self.by_kinds(heldout, how.get("by"))
            measured = self.evaluate(Measure(model, shown, heldout, **how))
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
    """Adds to the data items that only the content has; returns it and the content of all items.

    Args:
      training: settings of the training, including the content.
      before: the earlier run that is trained further, or None.
      data: events to train on.
      counts: function that returns the number of events of each item of the data.

    Raises:
      ValueError: an earlier run is trained further, and only one of both trainings has content.
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
    features.align(data)  # raises an error if the content is of other items
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
