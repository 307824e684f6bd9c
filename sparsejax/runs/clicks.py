"""Runs of click models."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from sparsejax import codec
from sparsejax.callers import warn_caller
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files.names import Names, as_names
from sparsejax.data.scans.scan_clicks import ScannedClicks, scan_clicks
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    HashedColumn,
    KeyColumn,
    VocabularyColumn,
    num_ids,
    without_time,
)
from sparsejax.data.sets.clicks import (
    ClickDataset,
    check_same_schema,
    read_clicks,
    read_unlabelled,
    without_bad_lines,
)
from sparsejax.embeddings.model_config import ClickModelConfig, DynamicTables
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.clicks.calibrate import calibrate
from sparsejax.kinds.clicks.job import ScanOfClicks
from sparsejax.kinds.clicks.scores import (
    check_same_columns,
    evaluate_clicks,
    predict,
)
from sparsejax.kinds.clicks.worth import LEAST_ROWS, compared
from sparsejax.ops.implementations import HOPPER_OR_NEWER, custom_call_can_run
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Correcting, Evaluate, Paged
from sparsejax.options.predicting import Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.runs.kind import Opened, Runs, Source
from sparsejax.runs.reading import (
    is_file,
    is_last,
    kind_of_saved,
    name_of,
    skips_bad_lines,
    split_name,
    validation_share,
)
from sparsejax.runs.threads import meanwhile
from sparsejax.sparse import CSR
from sparsejax.wide_ids import NUM_IDS

# Points of a calibration curve.
_BINS = 20
# A model with this AUC orders examples, even if its probabilities are wrong.
_ORDERS = 0.55


_COLUMNS_OF_RUN = (
    "schema=...: the columns are those of the run that is trained on; leave it out"
)
# In place of the fingerprint of data, where files come and go.
_FOLLOWED = "followed"
# Rows of a chunk that has the whole of a file.
_ALL = 2**62
# A model has a regression by default from so many examples on, if each label has so many of
# them, and up to so many numbers of all examples together, which are fitted in a minute.
_LEAST_REGRESSED, _LEAST_OF_LABEL, _MOST_REGRESSED = 1_000, 100, 20_000_000
# The share of the examples that is then held out.
_HELD_OUT = 0.1
_SILENT = Reading()


class Clicks(Runs):
    """The runs of a `ClickModelConfig`."""

    name = "clicks"
    numbered = "ids"
    ranks_items = False

    def metric(self, k: int) -> str:
        return "auc"

    def read_config(self, document: object) -> ClickModelConfig:
        return ClickModelConfig.from_json(document)

    def described(self, model: str) -> tuple[ClickModelConfig, Collection[str]]:
        return super().described(model)[0], ("dtype", "regression")

    def with_dynamic(
        self, config: ClickModelConfig, num_rows: int | None
    ) -> ClickModelConfig:
        if num_rows is None:
            return config
        before = config.dynamic or DynamicTables(num_rows=num_rows)
        tables = dataclasses.replace(before, num_rows=num_rows)
        return dataclasses.replace(config, dynamic=tables)

    def suited(
        self, config: ClickModelConfig, training: Training, source: Source
    ) -> tuple[ClickModelConfig, str]:
        chosen: dict[str, Any] = {}
        said = []
        if "regression" in training.suited and _is_regressed(
            training, source.everything
        ):
            chosen["regression"] = True
            said.append("a logistic regression is fitted first")
        # As good there by AUC, and faster: benchmarks/click_dtypes.py.
        if "dtype" in training.suited and custom_call_can_run(
            HOPPER_OR_NEWER, divided=True
        ):
            chosen["dtype"] = "bfloat16"
            said.append("dtype bfloat16")
        return dataclasses.replace(config, **chosen), ", ".join(said)

    def source(self, training: Training, before: Any) -> Source:
        if before is None:
            data = _read(training.data, training.schema, training)
        else:
            if training.schema is not None:
                raise ValueError(_COLUMNS_OF_RUN)
            data = _read_like(training.data, before, training, append=True)
        everything = data
        heldout = validation = split = None
        asked = training.validation
        if asked is None and _is_regressed(training, data):
            asked = _HELD_OUT
        if asked is not None:
            if is_last(asked):
                raise ValueError(
                    "validation=last is of no use for clicks, whose order is not known: "
                    "name a file or a share; a file called last is written ./last"
                )
            share = validation_share(asked)
            if share is None:
                heldout = _read_like(asked, data, training)
            else:
                data, heldout = _held_out(data, share)
                split = split_name(asked)
                training.say(f"validation: {heldout}")
            validation = _fingerprint(heldout)
        return _source(
            data,
            everything=everything,
            chunks=[data.num_rows],
            fingerprint=_fingerprint(data),
            heldout=heldout,
            validation=validation,
            split=split,
        )

    def scanned(self, training: Training) -> Source:
        assert training.chunk_rows is not None
        schema, rows = training.schema, training.chunk_rows
        if training.skip_bad_lines:
            raise ValueError(
                "skip_bad_lines=True needs all of the data; leave out chunk_rows"
            )
        data = scan_clicks(training.data, schema, chunk_rows=rows)
        heldout = validation = None
        if (asked := training.validation) is not None:
            if is_last(asked) or validation_share(asked) is not None:
                raise ValueError(
                    f"validation={asked} needs all of the data: name a file, or leave out "
                    "chunk_rows"
                )
            heldout = _read_like(asked, data, training)
            validation = _fingerprint(heldout)
        return _source(
            data,
            everything=data,
            chunks=Stream(ScanOfClicks(data), None).chunks,
            fingerprint=data.fingerprint(),
            heldout=heldout,
            validation=validation,
        )

    def followed(self, training: Training, before: Any) -> Source:
        schema = training.schema
        if before is not None:
            if schema is not None:
                raise ValueError(_COLUMNS_OF_RUN)
            data = self.known_of(before)
        else:
            if schema is None:
                raise ValueError(
                    "follow=True needs schema=..., what the columns of the files are"
                )
            learned = [
                name
                for name, column in schema.ids.items()
                if isinstance(column, VocabularyColumn)
            ]
            if learned:
                raise ValueError(
                    f"follow=True: the categories of {', '.join(learned[:3])} are not known "
                    "before the files are: make each a KeyColumn or a HashedColumn, or go on "
                    "from a run that knows them"
                )
            data = _without_rows(num_ids(schema, {}), schema, {})
        return _source(data, everything=data, chunks=[1], fingerprint=_FOLLOWED)

    def read_followed(
        self, path: str, known: ClickDataset, reading: Reading
    ) -> ClickDataset | None:
        if kind_of_saved(path) == "clicks":
            data = _read_like(path, known, _SILENT)
            return data if data.num_rows else None
        file: Any = path
        if skips_bad_lines(path, reading):
            file = without_bad_lines(path, known.schema)
        # Unlike `read_clicks`, it takes a file without examples.
        scanned = scan_clicks(
            file, known.schema, features=known.vocabularies, chunk_rows=_ALL
        )
        return next(scanned.chunks(), None)

    def add_new(
        self,
        model: Any,
        known: ClickDataset,
        data: ClickDataset,
        optimizer: Optimizer | None,
    ) -> None:
        added = {
            name: len(names) - len(known.vocabularies[name])
            for name, names in data.vocabularies.items()
        }
        model.add_ids(added, optimizer=optimizer)

    def doubts(self, model: Any, source: Source, k: int) -> str | None:
        found = compared(model, source.data, source.heldout)
        what = "training" if source.heldout is None else "validation"
        return None if found is None else found.warning(what)

    def account(self, data: ClickDataset | ScannedClicks) -> str:
        return (
            f"{data.num_rows:,} examples, {len(data.schema.dense):,} dense columns, "
            f"{_num_known(data):,} ids of {len(data.num_ids):,} features"
        )

    def known_of(self, data: ClickDataset | ScannedClicks) -> ClickDataset:
        return _without_rows(data.num_ids, data.schema, data.vocabularies)

    def save_known(self, path: pathlib.Path, known: ClickDataset) -> None:
        known.save(path)

    def load_known(self, path: pathlib.Path) -> ClickDataset:
        return ClickDataset.load(path)

    def num_known(self, known: ClickDataset) -> int:
        return _num_known(known)

    def fingerprint_of(self, known: ClickDataset) -> str:
        schema = as_names([codec.text(known.schema.to_json())])
        return fingerprint(schema, *known.vocabularies.values())

    def evaluate(
        self, measuring: Evaluate, reading: Reading, run: Opened
    ) -> Mapping[str, float]:
        if (examples := measuring.heldout) is None:
            raise ValueError("give heldout=..., the examples to measure on")
        read = meanwhile(lambda: _read_like(examples, run.known, reading))
        model = self.corrected(run, measuring, reading)
        clicks = read()
        groups = _groups_of(measuring, reading, run, clicks)
        measured = evaluate_clicks(
            model, clicks, groups=groups, keep_rows=measuring.keep_rows
        )
        if clicks.num_rows >= LEAST_ROWS:
            _warn_of_base_rate(measured)
        return measured

    def corrected(self, run: Opened, correcting: Correcting, reading: Reading) -> Any:
        model, source = run.model(), correcting.calibrate
        if source is None and correcting.method is not None:
            raise ValueError(
                "method=... needs calibrate=..., the examples to correct by"
            )
        if source is None and correcting.negatives_kept is None:
            return model
        examples = None
        if source is not None:
            examples = _read_like(source, run.known, reading)
            if _were_trained_on(examples, run.settings):
                warn_caller(
                    f"{name_of(source)}: has the examples that the run was trained on, of "
                    "which a model is too sure: name others by calibrate=..."
                )
        method, kept = correcting.method or "platt", correcting.negatives_kept
        try:
            return calibrate(model, examples, method=method, negatives_kept=kept)
        except ValueError as error:
            if source is None:
                raise
            raise ValueError(f"{name_of(source)}: {error}") from error

    def recommend(
        self,
        recommending: Recommend,
        reading: Reading,
        run: Opened,
        check: Callable[[Names], None] | None = None,
        hint: str = "",
    ) -> tuple[None, np.ndarray]:
        read = meanwhile(
            lambda: _read_like(recommending.inputs, run.known, reading, labelled=False)
        )
        return None, predict(run.model(), read())

    def report(self, measuring: Paged, reading: Reading, run: Opened) -> dict[str, Any]:
        model = run.model()
        if measuring.heldout is None:
            if measuring.groups is not None:
                raise ValueError(
                    "groups=... needs heldout=..., the examples to measure on"
                )
            return {"model": model}
        clicks = _read_like(measuring.heldout, run.known, reading)
        return {
            "model": model,
            "measured": evaluate_clicks(
                model,
                clicks,
                groups=_groups_of(measuring, reading, run, clicks),
                keep_rows=True,
            ),
            "data": [
                name_of(measuring.heldout),
                f"{clicks.num_rows:,} examples",
                f"{clicks.labels.mean():.1%} clicks".replace("%", " %"),
            ],
            "calibration": calibration_curve(predict(model, clicks), clicks.labels),
        }


def _is_regressed(training: Training, data: ClickDataset | ScannedClicks) -> bool:
    """Whether the model has a regression, and there are examples enough to hold some out."""
    if not isinstance(data, ClickDataset) or data.num_rows < _LEAST_REGRESSED:
        return False
    clicked = int(data.labels.sum())
    if min(clicked, data.num_rows - clicked) < _LEAST_OF_LABEL:
        return False
    config: Any = training.config
    if config.regression:
        return True
    if "regression" not in training.suited or config.dynamic is not None:
        return False
    sizes = [ids.nse if isinstance(ids, CSR) else len(ids) for ids in data.ids.values()]
    return data.dense.size + sum(sizes) <= _MOST_REGRESSED


def _groups_of(
    measuring: Evaluate | Paged, reading: Reading, run: Opened, clicks: ClickDataset
) -> Any:
    """The groups of the examples: the categories of the file themselves, where it has them.

    The ids of a model may be one for several categories: by a hash, or as they are rare.
    """
    name, source, schema = measuring.groups, measuring.heldout, run.known.schema
    if name is None:
        return None
    column = schema.ids.get(name)
    if (
        not isinstance(column, HashedColumn | VocabularyColumn)
        or isinstance(source, ClickDataset)
        or (is_file(source) and kind_of_saved(source) == "clicks")
        or reading.skip_bad_lines  # lines that are bad elsewhere are not left out
        or isinstance(clicks.ids[name], CSR)  # an error, which names the column
    ):
        return name
    only = dataclasses.replace(without_time(schema), dense={}, ids={name: KeyColumn()})
    return read_clicks(source, only).ids[name]


def _warn_of_base_rate(measured: Mapping[str, float]) -> None:
    """Warns if predicting the share of clicks for all examples is as good as the model."""
    entropy = measured.get("normalized_entropy", 0.0)
    if entropy < 1:
        return
    constant = measured["log_loss"] / entropy
    advice = (
        "train longer, or with the settings that suit the data"
        if measured["auc"] < _ORDERS
        else "its order is right (AUC {auc:.3f}), so correct its probabilities by "
        "calibrate=...".format(**measured)
    )
    warn_caller(
        "predicting the share of clicks for all examples is as good as this model: log loss "
        f"{constant:.4f}, of the model {measured['log_loss']:.4f}; {advice}"
    )


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


def _read(source: Any, schema: ClickSchema | None, reading: Reading) -> ClickDataset:
    """Reads examples, and says what was read."""
    if isinstance(source, ClickDataset):
        if schema is not None:
            raise ValueError(
                "schema is of no use for a data set, which has one: leave it out"
            )
        return source
    _check_source(source)
    if schema is not None:
        skip = skips_bad_lines(source, reading)
        data = read_clicks(source, without_time(schema), skip_bad_lines=skip)
    elif is_file(source) and is_parquet(source):
        data = ClickDataset.load(source)
    else:
        raise ValueError(
            f"{name_of(source)}: name the columns of this file: schema=..."
        )
    reading.say(f"{name_of(source)}: {data!r}")
    return data


def _read_like(
    source: Any,
    known: ClickDataset | ScannedClicks,
    reading: Reading,
    *,
    labelled: bool = True,
    append: bool = False,
) -> ClickDataset:
    """Reads examples of the same columns, with the same ids, and says what was read.

    Args:
      source: the file, or a data set.
      known: whose columns and ids they are.
      reading: is told what was read.
      labelled: whether labels are read.
      append: whether new categories get ids behind the known ones.

    Raises:
      ValueError: a saved data set has other columns or other ids.
    """
    is_data = isinstance(source, ClickDataset)
    skip = skips_bad_lines(source, reading)
    if not is_data:
        _check_source(source)
    if is_data or (is_file(source) and kind_of_saved(source) == "clicks"):
        data = source if is_data else ClickDataset.load(source)
        try:
            if append:
                check_same_schema(known.schema, data.schema, "this data set")
                data = data.append_features(known.vocabularies)
            else:
                check_same_columns(known, data)
        except ValueError as error:
            text = "has other columns or categories than the data of the model"
            raise ValueError(f"{name_of(source)}: {text}") from error
        if is_data:
            return data
    elif labelled:
        vocabulary = dict(known.vocabularies)
        schema = without_time(known.schema)
        data = read_clicks(
            source, schema, features=vocabulary, append=append, skip_bad_lines=skip
        )
    else:
        vocabulary = dict(known.vocabularies)
        data = read_unlabelled(source, known.schema, vocabulary, skip_bad_lines=skip)
    said = repr(data) if labelled else f"{data.num_rows:,} examples"
    reading.say(f"{name_of(source)}: {said}")
    return data


def _check_source(source: Any) -> None:
    """Raises TypeError for what is neither a file, nor a table, nor records."""
    is_table = hasattr(source, "__arrow_c_stream__")
    if not (is_file(source) or is_table or isinstance(source, list | tuple | Mapping)):
        raise TypeError(
            "examples of clicks are a file, a table, a dict of columns, a list of dicts, or a "
            f"ClickDataset, got {type(source).__name__}"
        )


def _source(data: ClickDataset | ScannedClicks, **facts: Any) -> Source:
    known = RUNS.known_of(data)
    return Source(
        data=data, num_features=_num_known(data), known=known, indicator=False, **facts
    )


def _were_trained_on(clicks: ClickDataset, settings: Any) -> bool:
    """Whether a run was trained on these examples, or on what it did not hold out of them."""
    trained = settings.data_fingerprint
    if _fingerprint(clicks) == trained:
        return True
    if (share := settings.validation_split) is None:
        return False
    kept, _ = _held_out(clicks, float(share))
    return _fingerprint(kept) == trained


def _held_out(clicks: ClickDataset, share: float) -> tuple[ClickDataset, ClickDataset]:
    """The examples that a run is trained on, and the share of them that it holds out."""
    # Not --seed, so that models of several seeds are compared alike.
    return clicks.split_rows(1 - share, seed=0)


def _without_rows(
    sizes: Mapping[str, int], schema: ClickSchema, vocabularies: Mapping[str, Names]
) -> ClickDataset:
    """Clicks without examples."""
    ids = {
        name: np.zeros(0, np.uint64 if size == NUM_IDS else np.int32)
        for name, size in sizes.items()
    }
    return ClickDataset(
        np.zeros(0, np.float32),
        np.zeros((0, len(schema.dense)), np.float32),
        ids,
        without_time(schema),
        vocabularies,
    )


def _num_known(data: ClickDataset | ScannedClicks) -> int:
    """How many ids the data number; a column of 64-bit ids, whose ids it does not, counts 1."""
    sizes = [size for size in data.features.values() if not isinstance(size, str)]
    return sum(1 if size == NUM_IDS else size for size in sizes)


def _fingerprint(clicks: ClickDataset) -> str:
    return fingerprint(clicks.labels, clicks.dense, *clicks.ids.values())


RUNS: Runs = Clicks()
