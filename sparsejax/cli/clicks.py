"""The commands for click models."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from flax import nnx

from sparsejax import codec
from sparsejax.cli import flags
from sparsejax.cli.kind import (
    COLUMNS,
    COUNTING,
    Commands,
    Opened,
    Range,
    Source,
)
from sparsejax.cli.reading import meanwhile, validation_share
from sparsejax.data import writers
from sparsejax.data.click_schema import ClickSchema, DenseColumn, VocabularyColumn
from sparsejax.data.click_storage import is_saved
from sparsejax.data.clicks import ClickDataset, read_clicks, read_unlabelled
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import shown
from sparsejax.data.names import as_names
from sparsejax.data.parquet import first_schema, parquet_files
from sparsejax.data.scan_clicks import ScannedClicks, scan_clicks
from sparsejax.embeddings.collection import EmbeddingCollection
from sparsejax.embeddings.model_config import ClickModelConfig
from sparsejax.embeddings.planner import plan_embeddings
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.clicks.job import ScanOfClicks
from sparsejax.kinds.clicks.scores import (
    check_same_columns,
    evaluate_clicks,
    predict_clicks,
)
from sparsejax.mesh import processes

# Points of a calibration curve.
_BINS = 20


class Clicks(Commands):
    """The commands of a `ClickModelConfig`."""

    name = "clicks"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {"dim": (4, 8, 16, 32, 64)}
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "train": ("origin", "format", "k", "negatives", "fused", *COLUMNS[:-1]),
        "tune": ("format", "k", *COLUMNS[:-1]),
        "plan": (
            *("items", "rows", "entries", "features", "target_entries", "values"),
            *("times", "negatives", "compile", "fused"),
        ),
        "evaluate": (
            *("history", "fold_in", "seed", "candidates", "popularity", "baselines"),
            *("k", "format", *COLUMNS, *COUNTING),
        ),
        "predict": ("users", "k", "exclude_seen", "exclude", "format", *COLUMNS),
        "export": ("k",),
        "report": ("train", "k", "format", *COLUMNS, *COUNTING),
    }

    def check(self, command: Any) -> None:
        if isinstance(command, flags.Vectors | flags.Similar):
            raise ValueError("a model of clicks has no items, and no vectors of them")
        super().check(command)

    def metric(self, k: int) -> str:
        return "auc"

    def read_config(self, document: object) -> ClickModelConfig:
        return ClickModelConfig.from_json(document)

    def source(self, command: flags.Train, before: Any) -> Source:
        data = _read(command.data, _schema_of(command))
        heldout = validation = split = None
        if (text := command.validation) is not None:
            if text == "last":
                raise ValueError(
                    "--validation last is of no use for clicks, whose order is not known: "
                    "name a file or a share; a file called last is written ./last"
                )
            share = validation_share(text)
            if share is None:
                heldout = _read_like(text, data)
            else:
                # Not --seed, so that models of several seeds are compared alike.
                data, heldout = data.split_rows(1 - share, seed=0)
                split = text
                print(f"validation: {heldout}", file=sys.stderr)
            validation = _fingerprint(heldout)
        return _source(
            data,
            chunks=[data.num_rows],
            fingerprint=_fingerprint(data),
            heldout=heldout,
            validation=validation,
            split=split,
        )

    def scanned(self, command: flags.Train) -> Source:
        assert command.chunk_rows is not None
        schema, rows = _schema_of(command), command.chunk_rows
        data = scan_clicks(command.data, schema, chunk_rows=rows)
        heldout = validation = None
        if (text := command.validation) is not None:
            if text == "last" or validation_share(text) is not None:
                raise ValueError(
                    f"--validation {text} needs all of the data: name a file, or leave out "
                    "--chunk-rows"
                )
            heldout = _read_like(text, data)
            validation = _fingerprint(heldout)
        return _source(
            data,
            chunks=Stream(ScanOfClicks(data), None).chunks,
            fingerprint=data.fingerprint(),
            heldout=heldout,
            validation=validation,
        )

    def account(self, data: ClickDataset | ScannedClicks) -> str:
        return (
            f"{data.num_rows:,} examples, {len(data.schema.dense):,} dense columns, "
            f"{sum(data.num_ids.values()):,} ids of {len(data.num_ids):,} features"
        )

    def planned(
        self, config: Any, command: flags.Plan, **how: Any
    ) -> tuple[str, bool | None]:
        known = _known_to_plan(command)
        rule = how["rule"]
        make = self.kind.maker(config, known)
        model, _ = nnx.eval_shape(lambda: make(rule=rule, seed=0))
        tables, features = {}, {}
        for _, node in nnx.iter_graph(model):
            if not isinstance(node, EmbeddingCollection):
                continue
            last = "" if not tables else ", linear"
            for stack in node.stacks:
                for feature in stack.features:
                    name = f"{feature.name}{last}"
                    tables[name] = feature.table.config
                    features[name] = name
        planned = plan_embeddings(tables, features, **how)
        fits = None if planned.memory is None else True  # else it raises
        return str(planned), fits

    def start(self, command: flags.Tune) -> dict[str, Any]:
        return {"dim": self.read_config({"version": 1, "model": command.kind}).dim}

    def save_known(self, path: pathlib.Path, known: ClickDataset) -> None:
        known.save(path)

    def load_known(self, path: pathlib.Path) -> ClickDataset:
        return ClickDataset.load(path)

    def num_known(self, known: ClickDataset) -> int:
        return sum(known.num_ids.values())

    def fingerprint_of(self, known: ClickDataset) -> str:
        schema = as_names([codec.text(known.schema.to_json())])
        return fingerprint(schema, *known.vocabularies.values())

    def evaluate(self, command: flags.Evaluate, run: Opened) -> Mapping[str, float]:
        if command.test is not None:
            raise ValueError(
                "a model of clicks is measured on the examples of one file: leave out "
                f"{command.train if command.train != command.test else 'TEST'}"
            )
        reading = meanwhile(lambda: _read_like(command.train, run.known))
        model = run.model()
        return evaluate_clicks(model, reading(), groups=command.groups)

    def predict(self, command: flags.Predict, run: Opened) -> None:
        reading = meanwhile(lambda: _read_like(command.data, run.known, labelled=False))
        found = predict_clicks(run.model(), reading())
        processes.in_first(
            lambda: writers.save_numbers(command.out, "probability", found)
        )

    def report(self, command: flags.Report, run: Opened) -> dict[str, Any]:
        model = run.model()
        if command.test is None:
            if command.groups is not None:
                raise ValueError("--groups needs --test, the examples to measure on")
            return {"model": model}
        clicks = _read_like(command.test, run.known)
        return {
            "model": model,
            "measured": evaluate_clicks(model, clicks, groups=command.groups),
            "calibration": calibration_curve(
                predict_clicks(model, clicks), clicks.labels
            ),
        }


def calibration_curve(
    probabilities: np.ndarray, labels: np.ndarray
) -> list[tuple[float, float]]:
    """Predicted and true shares of clicks, of parts with as many examples each.

    Equal predictions are in one part, so there may be fewer.

    Args:
      probabilities: `[n]` of a click.
      labels: `[n]` 0 or 1.
    """
    p, labels = np.asarray(probabilities, np.float64), np.asarray(labels, np.float64)
    order = np.argsort(p, kind="stable")
    p, labels = p[order], labels[order]
    ends = np.searchsorted(p, p[(np.arange(1, _BINS) * len(p)) // _BINS])
    parts = np.split(np.arange(len(p)), np.unique(ends[ends > 0]))
    return [(float(p[at].mean()), float(labels[at].mean())) for at in parts]


def _schema_of(command: flags.Train | flags.Plan) -> ClickSchema | None:
    """The schema that the flags name; None for a saved data set, which knows it."""
    given = command.clicks
    delimiter = command.columns.delimiter if hasattr(command, "columns") else None
    others = given.label is not None or given.dense or given.categories
    if given.schema is not None:
        if others or delimiter is not None:
            raise ValueError(
                "--schema says what all columns are, and what separates them: leave out "
                "--label, --dense, --categories and --delimiter, or --schema"
            )
        document = codec.load(given.schema)
        try:
            return ClickSchema.from_json(document)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{given.schema}: {error}") from error
    if not others and delimiter is None:
        return None
    if given.label is None:
        raise ValueError("name the column of labels, --label, or a --schema")
    return ClickSchema(
        given.label,
        dense={name: DenseColumn() for name in given.dense},
        ids={name: VocabularyColumn() for name in given.categories},
        delimiter=delimiter,
    )


def _read(path: str, schema: ClickSchema | None) -> ClickDataset:
    """Reads examples, and prints to stderr what was read."""
    if schema is not None:
        data = read_clicks(path, schema)
    elif is_parquet(path):
        data = ClickDataset.load(path)
    else:
        raise ValueError(
            f"{path}: name the columns of this file: --schema FILE; or --label, --dense "
            "and --categories"
        )
    print(f"{shown(path)}: {data!r}", file=sys.stderr)
    return data


def _read_like(
    path: str,
    known: ClickDataset | ScannedClicks,
    *,
    labelled: bool = True,
) -> ClickDataset:
    """Reads examples of the same columns, with the same ids, and prints what was read.

    Args:
      path: the file.
      known: whose columns and ids they are.
      labelled: whether labels are read.

    Raises:
      ValueError: a saved data set has other columns or other ids.
    """
    if is_parquet(path) and is_saved(first_schema(parquet_files(path))[1]):
        data = ClickDataset.load(path)
        try:
            check_same_columns(known, data)
        except ValueError as error:
            text = "has other columns or categories than the data of the model"
            raise ValueError(f"{path}: {text}") from error
    else:
        read = read_clicks if labelled else read_unlabelled
        data = read(path, known.schema, vocabulary=dict(known.vocabularies))
    said = repr(data) if labelled else f"{data.num_rows:,} examples"
    print(f"{shown(path)}: {said}", file=sys.stderr)
    return data


def _source(data: ClickDataset | ScannedClicks, **facts: Any) -> Source:
    none = np.zeros(0, np.int32)
    known = ClickDataset(
        np.zeros(0, np.float32),
        np.zeros((0, len(data.schema.dense)), np.float32),
        dict.fromkeys(data.schema.ids, none),
        data.schema,
        data.vocabularies,
    )
    count = sum(data.num_ids.values())
    return Source(data=data, num_features=count, known=known, indicator=False, **facts)


def _fingerprint(clicks: ClickDataset) -> str:
    return fingerprint(clicks.labels, clicks.dense, *clicks.ids.values())


def _known_to_plan(command: flags.Plan) -> Any:
    """Data whose schema and numbers of ids are those that the flags name."""
    schema = _schema_of(command)
    if command.examples is not None:
        return scan_clicks(command.examples, schema)
    if schema is None:
        raise ValueError(
            "name the columns: --schema FILE, or --examples, a saved data set"
        )
    learned = [n for n, c in schema.ids.items() if isinstance(c, VocabularyColumn)]
    if learned:
        raise ValueError(
            f"the categories of {', '.join(learned[:3])} are to be counted: name a file of "
            "--examples, or give the columns hashed ids"
        )
    return ScannedClicks("", schema, {}, 1)


COMMANDS: Commands = Clicks()
