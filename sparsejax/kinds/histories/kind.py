"""The kind of history models: events of users in order, and models that predict the next item."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np

from sparsejax import codec
from sparsejax.callers import warn_caller
from sparsejax.data import (
    ScannedSequences,
    SequenceDataset,
    SparseDataset,
    scan_sequences,
)
from sparsejax.data.files import stored
from sparsejax.data.files.names import Names, as_names, find_names, quoted
from sparsejax.data.reading.histories import unordered
from sparsejax.data.reading.read_sequences import read_sequences
from sparsejax.data.reading.sources import Inputs, num_columns
from sparsejax.data.scan import chunk_ends
from sparsejax.data.sets.click_schema import (
    DenseColumn,
    VocabularyColumn,
    labels_document,
    vocabulary_columns,
)
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import Events, no_events
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds import interactions
from sparsejax.kinds.content import finished
from sparsejax.kinds.histories.evaluation import (
    label_metrics,
    parts_of,
    prepared_sequences,
)
from sparsejax.kinds.histories.next_items import (
    NextItems,
    check_events,
    check_history_model,
    event_shapes,
    has_times,
    rank_by_of,
    shown_of,
)
from sparsejax.kinds.kind import (
    DataSizes,
    Defaults,
    Kind,
    Maker,
    Measurement,
    Range,
    Tuned,
    kind_of,
)
from sparsejax.kinds.reading import (
    check_columns_of_run,
    check_counted,
    is_saved,
    read_file,
    read_histories,
    stated_schema,
    users_in,
)
from sparsejax.kinds.source import Opened, Source, item_names
from sparsejax.kinds.threads import meanwhile
from sparsejax.options.measuring import Evaluate, Measure
from sparsejax.options.models import BY_DEFAULT, Described
from sparsejax.options.models import Clicks as Columns
from sparsejax.options.models import Histories as HistoryOptions
from sparsejax.options.planning import Plan
from sparsejax.options.predicting import Write
from sparsejax.options.reading import Reading
from sparsejax.options.training import Fit, Repeated, Training
from sparsejax.sequence.config import AttentionConfig, SequenceConfig, entries_cut_off
from sparsejax.sequence.events import EventSizes

# Widths that `tune` chooses from.
_WIDTHS = (32, 64, 128, 256, 512)


class Histories(interactions.Interactions[SequenceConfig, SequenceDataset]):
    """The kind of a `SequenceConfig` and a `SequenceDataset`."""

    name = "histories"
    about = "The model reads what a user did, in its order, and says what comes next."
    # Chosen on the validation set of Amazon Beauty, the number of steps also on MovieLens.
    defaults = Defaults(
        batch_size=256,
        least_epochs=40,
        least_steps=3500,
        optimizer="adamw",
        options={"b2": 0.98, "weight_decay": 0.1},
    )
    held_out = "last"
    tuned: ClassVar[Tuned] = {
        "width": _WIDTHS,
        "dropout": Range(0.0, 0.7),
        "temperature": interactions.TEMPERATURES,
    }

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.sequence.build import build_sequence_model

        if targets is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out targets"
            )
        items = num_columns("data", data)
        sizes: dict[str, Any] = {"items": items, "content": content}
        if (events := EventSizes.of_data(data)) is not None:
            sizes["events"] = events
        return Maker(functools.partial(build_sequence_model, config, **sizes))

    def examples(self, model, inputs, targets, weights) -> Examples:
        from sparsejax.kinds.histories.job import sequence_examples, with_targets

        return sequence_examples(model, with_targets(inputs, targets, weights))

    def job(self, asked: Fit) -> Job:
        from sparsejax.kinds.histories.job import sequence_job

        return sequence_job(asked)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        shown = shown_of(model, inputs)
        exclude = unordered("exclude", exclude, inputs)
        return _ranker(model, inputs), shown, exclude

    def ranked_by(self, ranker: Any, inputs: Any, rank_by: str) -> NextItems:
        by = rank_by_of(ranker.model, getattr(inputs, "events", None), rank_by)
        return NextItems(ranker.model, times=ranker.times, rank_by=by)

    def excluded_in_validation(self, data: SequenceDataset) -> Literal["inputs"] | None:
        from sparsejax.kinds.histories.job import left_out_of_validation

        return left_out_of_validation(data)

    def encoder(self, model: Any, inputs: Any) -> tuple[Any, Inputs]:
        encoder, shown = super().encoder(model, inputs)
        if not hasattr(model, "last"):
            raise TypeError(
                "vectors of histories need a model with the method last(histories), as a "
                f"SequenceModel has; {type(model).__name__} does not"
            )
        return encoder, shown

    def evaluate(self, asked: Measure) -> dict[str, float]:
        if asked.heldout is None:
            raise ValueError("give heldout, as split_last makes it")
        model, inputs = asked.model, cast(SequenceDataset, asked.inputs)
        prepared = prepared_sequences(asked)
        ranker = _ranker(model, inputs)
        how: dict[str, Any] = {"optimizer": asked.optimizer}
        by_labels = label_metrics(
            ranker, inputs, asked.heldout, asked.batch_size, **how
        )
        if asked.rank_by is not None:
            ranker = self.ranked_by(ranker, inputs, asked.rank_by)
        found = prepared.run(ranker, keep_rows=asked.keep_rows, **how)
        found.update(by_labels)
        return found

    def portable(self, asked: Write):
        from sparsejax.kinds.portable import portable_ranker, stated_columns

        model, names = asked.model, asked.names
        check_history_model(model)
        timed = kind_of(names) is self and has_times(model, names)
        ranker, rank_by = NextItems(model, times=timed), asked.rank_by
        if rank_by is not None:
            ranker = self.ranked_by(ranker, names, rank_by)
            asked = asked.replaced(item_features=None)
        found = portable_ranker(ranker, asked)
        if event_shapes(model) is None:
            return found
        if kind_of(names) is not self:
            raise ValueError(
                "the model reads columns of events, whose categories the predictor has to know: "
                "give names=train, the data that it was trained on"
            )
        check_events(model, names, "names")
        stated, named = stated_columns(names)
        return found._replace(
            stated=found.stated | stated, vocabularies={**found.vocabularies, **named}
        )

    def suit_to_memory(self, model, optimizer, data, batch_size) -> None:
        from sparsejax.kinds.histories.footprint import suit_to_memory

        suit_to_memory(model, optimizer, data, batch_size)

    def workload(self, asked: Plan, batch: int) -> Workload:
        from sparsejax.kinds.histories.footprint import history_workload

        return history_workload(asked, batch)

    def columns_to_plan(
        self, schema: EventSchema | None, examples: str | None, users: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if users is not None:
            found["users"] = users_in(users, None, Reading()).columns
        if examples is not None:
            if (events := read_sequences(examples, events=schema).events) is None:
                raise ValueError(
                    "--examples is of no use without columns of events: name them by --kind, "
                    "--dense, --categories or --schema, or leave it out"
                )
            return found | {"events": events}
        if schema is None:
            return found
        check_counted(schema)
        return found | {"events": no_events(schema, {})}

    def read_config(self, document: codec.Json) -> SequenceConfig:
        return SequenceConfig.from_json(document)

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[SequenceConfig, Collection[str]]:
        config, _ = super().described(model)
        named = options.values_of(HistoryOptions).items()
        given = {n: v for n, v in named if v is not None}
        for name in given:
            if not hasattr(config, name):
                raise ValueError(f"--{name} is of no use for {model}: leave it out")
        return dataclasses.replace(config, **given), ("max_length",)

    def suited_to_sizes(
        self, config: SequenceConfig, suited: Collection[str], sizes: DataSizes
    ) -> tuple[SequenceConfig, str]:
        if sizes.features is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out --features"
            )
        if "max_length" not in suited:
            return config, ""
        from sparsejax.kinds.histories.footprint import assumed_lengths

        lengths = assumed_lengths(sizes.rows, sizes.entries)
        config = config.suited_to_lengths(lengths)
        return config, f"max_length {config.max_length}"

    def choices(self, config: SequenceConfig) -> Tuned:
        heads = config.heads if isinstance(config, AttentionConfig) else 1
        widths = tuple(width for width in _WIDTHS if width % heads == 0)
        return {**self.tuned, "width": widths}

    def with_negatives(
        self, config: SequenceConfig, negatives: int | None, origin: bool
    ) -> SequenceConfig:
        # A run that is continued may use another loss than before.
        if negatives is None and not origin:
            return config
        sampler = "uniform" if negatives is None else config.sampler
        return dataclasses.replace(config, negatives=negatives, sampler=sampler)

    def schema(self, columns: Columns) -> EventSchema | None:
        names = {"schema", "kind", "dense", "categories", "user_schema"}
        if getattr(columns, "origin", None) is not None:
            check_columns_of_run(columns, names)
            return None
        others = columns.given & (names - {"schema", "user_schema"})
        if columns.schema is not None:
            if others:
                raise ValueError(
                    "--schema says what all columns are: leave out --kind, --dense and "
                    "--categories, or --schema"
                )
            return codec.load(columns.schema, EventSchema.from_json)
        if not others:
            return None
        dense = {name: DenseColumn() for name in columns.dense}
        ids = dict.fromkeys(columns.categories, VocabularyColumn())
        return EventSchema(columns.kind, dense, ids)

    def read(
        self, source, reading: Reading, *, features=None, indicator=True
    ) -> SequenceDataset:
        return read_histories(source, reading, features=features)

    def read_to_train(
        self, training: Training, before: Opened | None
    ) -> SequenceDataset:
        schema = stated_schema(training, EventSchema)
        events = schema if before is None else getattr(before.known, "events", None)
        if before is not None and schema is not None:
            raise ValueError(
                "schema=...: the columns are those of the run that is trained on; leave it out"
            )
        users = None if before is None else getattr(before.known, "users", None)
        data = read_histories(training.data, training, events=events, users=users)
        if before is not None and users is None and training.user_features is None:
            data = data.with_users(None)
        if before is not None and (data.users is None) != (users is None):
            remedy = "give it again" if data.users is None else "leave it out"
            has = "with" if data.users is None else "without"
            raise ValueError(
                f"{before.directory}: was trained {has} columns of users, user_features=...; {remedy}"
            )
        if before is None or data.events is None:
            return data
        if events is None:
            return data.without_events()
        for name, count in data.events.num_unknown.items():
            new = _new_categories(training, data.events, name)
            named = f", such as {quoted(new)}" * bool(len(new))
            warn_caller(
                f"column {name!r}: {count:,} of {data.num_entries:,} events have a category that "
                f"is new or rare in {before.directory}{named}: it gets the id of unknown ones; for "
                "vectors of its own, train anew on all of the data"
            )
        return data

    def with_targets(
        self, data: SequenceDataset, recorded: Repeated
    ) -> SequenceDataset:
        if recorded.targets is None and recorded.weights is None:
            return data
        return data.with_targets(recorded.targets, weights=recorded.weights)

    def by_kinds(self, heldout: SequenceDataset, by: str | None) -> dict[str, str]:
        several = by is None and len(heldout.only_targets().kinds) > 1
        return {"by": "kinds"} if several else {}

    def facts_of(self, data: SequenceDataset) -> list[str]:
        found = [f"{count:,} {kind}" for kind, count in data.kinds.items()]
        if data.users is not None:
            found.append(f"columns of users: {', '.join(data.users.schema.used)}")
        return found

    def known_of(self, data: SequenceDataset | ScannedSequences) -> Any:
        if EventSizes.of_data(data) is None:
            return data.feature_names
        return data.without_rows()

    def load_known(self, path: pathlib.Path) -> Any:
        if is_saved(path, stored.HISTORIES):
            return SequenceDataset.load(path)
        return super().load_known(path)

    def fingerprint_of(self, known: Any) -> str:
        names = item_names(known)
        if names is known:
            return super().fingerprint_of(known)
        arrays = [names]
        for each in (known.events, known.users):
            if each is not None:
                schema = codec.text(each.schema.to_json()).encode()
                arrays += [np.frombuffer(schema, "u1"), *each.vocabularies.values()]
        return fingerprint(*arrays)

    def like(self, known: Any) -> Any:
        return known if isinstance(known, SequenceDataset) else super().like(known)

    def account(self, data: SequenceDataset) -> str:
        found = super().account(data)
        for what, name in (("", "events"), (" of users", "users")):
            if (columns := getattr(data, name, None)) is not None:
                found += f", columns{what} {', '.join(columns.schema.used)}"
        return found

    def scan(self, training: Training) -> tuple[ScannedSequences, Sequence[int]]:
        if training.value is not None:
            raise ValueError("value=...: histories have no values; leave it out")
        if training.user_features is not None:
            raise ValueError(
                "user_features=... needs all of the data; leave out chunk_rows"
            )
        rows = training.chunk_rows or 1
        histories = scan_sequences(
            training.data,
            user=training.user,
            item=training.item,
            time=training.time,
            events=stated_schema(training, EventSchema),
            chunk_rows=rows,
        )
        targets, weights = training.targets, training.weights
        if targets is not None or weights is not None:
            histories = histories.with_targets(targets, weights=weights)
        return histories, np.diff([0, *chunk_ends(histories.groups, rows)]).tolist()

    def matrix(self, data: SequenceDataset) -> SparseDataset:
        return data.to_sparse()

    def counts(self, data: SequenceDataset) -> np.ndarray:
        return np.bincount(data.indices, minlength=data.num_features)

    def fingerprint(self, data: SequenceDataset) -> str:
        more = [] if data.times is None else [data.times.view(np.int64)]
        more += [] if data.weights is None else [data.weights]
        if data.events is not None:
            more += [*data.events.columns.values()]
            if labels := labels_document(data.events.schema.several):
                more.append(np.frombuffer(codec.text(labels).encode(), "u1"))
        if data.users is not None:
            more += [*data.users.columns.values()]
        return fingerprint(data.indptr, data.indices, *more)

    def suited(
        self, config: SequenceConfig, training: Training, source: Source
    ) -> tuple[SequenceConfig, str]:
        if "max_length" not in training.suited or training.chunk_rows is not None:
            return config, ""
        config = config.suited_to(source.data)
        lengths = np.diff(source.data.indptr)
        older = entries_cut_off(lengths, config.max_length)
        said = f"max_length {config.max_length}"
        if older:
            said += (
                f", from which {older / lengths.sum():.1%} of the entries are cut off"
            )
        return config, said

    def targets_alone(
        self, asked: Evaluate, reading: Reading, run: Opened, other: Opened
    ) -> SequenceDataset:
        shown = self.read_shown(asked.inputs, reading, run)
        heldout = self.heldout(asked.heldout, reading, shown, asked.inputs)
        targets = self.with_targets(heldout, run.settings).only_targets()
        events, wanted = targets.events, getattr(other.known, "events", None)
        if wanted is None or events is None or wanted.schema != events.schema:
            events = None
        return dataclasses.replace(targets, weights=None, events=events)

    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        if asked.heldout is None:
            raise ValueError("give heldout=..., what the model should find")
        inputs = asked.inputs
        shown = meanwhile(lambda: self.read_shown(inputs, reading, run))
        model = run.model()
        train, candidates = shown(), None
        if (source := asked.candidates) is not None:
            names = item_names(run.known)
            candidates = read_file(source, reading, features=names, indicator=True)
        heldout = self.heldout(asked.heldout, reading, train, inputs)
        heldout = self.with_targets(heldout, run.settings)
        how: dict[str, Any] = {"candidates": candidates, **asked.counted()}
        how |= self.by_kinds(heldout, asked.by)
        also = {"keep_rows": asked.keep_rows, "rank_by": asked.rank_by}
        measuring = Measure(model, train, heldout, groups=asked.groups, **also, **how)
        found = self.evaluate(measuring)

        def beside() -> tuple[Evaluation, SparseDataset]:
            rows = train.to_sparse()
            wanted = heldout.only_targets().to_sparse()
            kinds = parts_of(train, heldout.only_targets(), measuring)
            return prepared_evaluation(rows, wanted, Setup(**how, kinds=kinds)), rows

        return Measurement(found, beside)


def _new_categories(training: Training, known: Events, column: str) -> Names:
    """Names of the categories that are new in an event column. A file of events is read again; for
    an iterator, which cannot be read again, there are no names.
    """
    data, schema = training.data, EventSchema(ids={column: VocabularyColumn()})
    if isinstance(data, Iterator):
        return as_names([])
    if is_saved(data, stored.HISTORIES):
        data = SequenceDataset.load(data)
    if not isinstance(data, SequenceDataset):
        quiet = training.replaced(user_features=None).noting(told=lambda _: None)
        data = read_histories(data, quiet, events=schema)
    own, before = (
        each.vocabularies[vocabulary_columns(each.schema)[column]]
        for each in (cast(Events, data.events), known)
    )
    return own[find_names(own, before) < 0]


def _ranker(model: Any, inputs: Any) -> NextItems:
    """Wraps a model of histories as a ranker of items."""
    return NextItems(finished(model), times=has_times(model, inputs))


KIND: Kind = Histories()
