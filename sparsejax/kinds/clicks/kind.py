"""The kind of click models and of click data."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import numpy as np
from flax import nnx

from sparsejax import codec
from sparsejax.callers import warn_caller
from sparsejax.clicks.config import ClickModelConfig, DynamicTables
from sparsejax.data.files import stored
from sparsejax.data.files.names import as_names
from sparsejax.data.reading.sources import Inputs
from sparsejax.data.scans.scan_clicks import ScannedClicks, scan_clicks
from sparsejax.data.sets.click_schema import ClickSchema, VocabularyColumn, num_ids
from sparsejax.data.sets.clicks import ClickDataset, without_bad_lines
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.clicks.calibrate import NOT_BINARY, calibrate, calibration_curve
from sparsejax.kinds.clicks.defaults import ClickDefaults
from sparsejax.kinds.clicks.job import scan_of_clicks
from sparsejax.kinds.clicks.reading import (
    fingerprint_of,
    groups_of,
    held_out,
    read_examples,
    read_like,
    were_trained_on,
    without_rows,
)
from sparsejax.kinds.clicks.scores import (
    check_click_model,
    evaluate_clicks,
    names_of_metrics,
    predict,
)
from sparsejax.kinds.clicks.worth import LEAST_ROWS, compared, warning_of_columns
from sparsejax.kinds.kind import (
    Defaults,
    Final,
    Kind,
    Maker,
    Measurement,
    Tuned,
    kind_of,
)
from sparsejax.kinds.reading import (
    is_last,
    is_saved,
    name_of,
    skips_bad_lines,
    split_name,
    stated_schema,
    validation_share,
)
from sparsejax.kinds.source import Findings, Opened, Source
from sparsejax.kinds.threads import meanwhile
from sparsejax.ops.implementations import HOPPER_OR_NEWER, custom_call_can_run
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.options.measuring import Correcting, Evaluate, Measure, Paged
from sparsejax.options.models import BY_DEFAULT, Described
from sparsejax.options.models import Clicks as ClickOptions
from sparsejax.options.planning import Plan
from sparsejax.options.predicting import Write
from sparsejax.options.reading import Reading
from sparsejax.options.training import Fit, Training
from sparsejax.sparse import CSR
from sparsejax.wide_ids import NUM_IDS

# A model with at least this AUC orders examples well, even if its probabilities are wrong.
_ORDERS = 0.55


_COLUMNS_OF_RUN = (
    "schema=...: the columns are those of the run that is trained on; leave it out"
)
# Fingerprint for data in a folder that is followed: its files change, so they have no other.
_FOLLOWED = "followed"
# Number of rows of a chunk; so large that a chunk holds a whole file.
_ALL = 2**62
# By default a model has a regression if there are at least 1,000 examples, at least 100 of each
# value of the label, and at most 20 million stored values, which take a minute to fit.
_LEAST_REGRESSED, _LEAST_OF_LABEL, _MOST_REGRESSED = 1_000, 100, 20_000_000
# Share of the examples that is held out to choose the weight of the layers beside the regression.
_HELD_OUT = 0.1
_SILENT = Reading()


class Clicks(Kind[ClickModelConfig, ClickDataset | ScannedClicks, ClickDataset]):
    """The kind of a `ClickModelConfig` and of a `ClickDataset`."""

    name = "clicks"
    about = "The model says how probable a click is, from columns of numbers and of categories."
    numbered = "ids"
    ranks_items = False
    default_model = "dlrm"
    defaults = ClickDefaults(
        batch_size=4096,
        least_epochs=1,
        least_steps=1,
        optimizer="adamw",
        options={"weight_decay": 0.0},
        learning_rate=5e-3,
        most_epochs=10,
    )
    tuned: ClassVar[Tuned] = {"dim": (4, 8, 16, 32, 64)}

    def defaults_of(self, config: Any) -> Defaults:
        defaults = cast(ClickDefaults, self.defaults)
        return dataclasses.replace(defaults, beside_regression=config.regression)

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.clicks.models import build_click_model

        _check_targets(targets)
        if kind_of(data) is not self:
            raise TypeError(
                "a click model reads a ClickDataset or ScannedClicks, got "
                f"{type(data).__name__}"
            )
        sizes = {"num_dense": len(data.schema.dense), "features": data.features}
        if several := data.schema.several:
            sizes["labels"] = {name: column.after for name, column in several.items()}
        return Maker(functools.partial(build_click_model, config, **sizes))

    def prepare(self, model, data, everything=None, *, earlier=None) -> Final | None:
        from sparsejax.kinds.clicks.regression import set_regression

        return set_regression(model, data, everything, earlier)

    def set_final(self, model, path) -> None:
        from sparsejax.kinds.clicks.regression import set_final

        set_final(model, path)

    def examples(self, model, inputs, targets, weights) -> Examples:
        from sparsejax.kinds.clicks.job import click_examples

        _check_targets(targets)
        return click_examples(inputs, weights)

    def job(self, asked: Fit) -> Job:
        from sparsejax.kinds.clicks.job import click_job

        check_click_model(asked.model)
        _check_targets(asked.targets)
        return click_job(asked)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        raise TypeError(
            f"a {type(inputs).__name__} has no items to rank: predict says how "
            "probable its clicks are"
        )

    def evaluate(self, asked: Measure) -> dict[str, float]:
        return evaluate_clicks(asked)

    def portable(self, asked: Write):
        from sparsejax.kinds.clicks.portable import portable_clicks

        return portable_clicks(asked)

    def workload(self, asked: Plan, batch: int) -> Workload:
        raise TypeError("the memory of a click model is planned by plan_embeddings")

    def tables(
        self,
        config: ClickModelConfig,
        rule: Rule,
        schema: ClickSchema | None,
        examples: str | None,
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        from sparsejax.kinds.clicks.shell import data_to_plan, tables_of

        return tables_of(self.maker(config, data_to_plan(schema, examples)), rule)

    def metric(self, k: int, data: Any) -> str:
        return names_of_metrics(data.schema.several)[0]

    def read_config(self, document: codec.Json) -> ClickModelConfig:
        return ClickModelConfig.from_json(document)

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[ClickModelConfig, Collection[str]]:
        return super().described(model, options)[0], ("dtype", "regression")

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
        # In bfloat16 the AUC is equal to that in float32, and training is faster, see
        # benchmarks/notes/dlrm.md.
        if "dtype" in training.suited and custom_call_can_run(
            HOPPER_OR_NEWER, divided=True
        ):
            chosen["dtype"] = "bfloat16"
            said.append("dtype bfloat16")
        return dataclasses.replace(config, **chosen), ", ".join(said)

    def schema(self, columns: ClickOptions) -> ClickSchema | None:
        from sparsejax.kinds.clicks.shell import schema_of

        return schema_of(columns)

    def source(self, training: Training, before: Opened | None) -> Source:
        if before is None:
            schema = stated_schema(training, ClickSchema)
            data = read_examples(training.data, schema, training)
        else:
            if training.schema is not None:
                raise ValueError(_COLUMNS_OF_RUN)
            data = read_like(
                training.data, before.known, training, append=True, training=True
            )
        if warning := warning_of_columns(data):
            warn_caller(warning)
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
                heldout = read_like(asked, data, training)
            else:
                data, heldout = held_out(data, share)
                split = split_name(asked)
                training.say(f"validation: {heldout}")
            validation = fingerprint_of(heldout)
        return Source(
            data=data,
            known=self.known_of(data),
            everything=everything,
            chunks=[data.num_rows],
            fingerprint=fingerprint_of(data),
            heldout=heldout,
            validation=validation,
            split=split,
        )

    def scanned(self, training: Training) -> Source:
        assert training.chunk_rows is not None
        schema, rows = stated_schema(training, ClickSchema), training.chunk_rows
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
            heldout = read_like(asked, data, training)
            validation = fingerprint_of(heldout)
        return Source(
            data=data,
            known=self.known_of(data),
            everything=data,
            chunks=Stream(scan_of_clicks(data), None).chunks,
            fingerprint=data.fingerprint(),
            heldout=heldout,
            validation=validation,
        )

    def followed(self, training: Training, before: Opened | None) -> Source:
        schema = stated_schema(training, ClickSchema)
        if before is not None:
            if schema is not None:
                raise ValueError(_COLUMNS_OF_RUN)
            data = self.known_of(before.known)
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
            data = without_rows(num_ids(schema, {}), schema, {})
        known = self.known_of(data)
        facts = {"everything": data, "known": known, "fingerprint": _FOLLOWED}
        return Source(data=data, chunks=[1], **facts)

    def read_followed(
        self, path: str, known: ClickDataset, reading: Reading
    ) -> ClickDataset | None:
        if is_saved(path, stored.CLICKS):
            data = read_like(path, known, _SILENT, training=True)
        else:
            file = path
            if skips_bad_lines(path, reading):
                file = without_bad_lines(path, known.schema)
            # Unlike `read_clicks`, `scan_clicks` accepts a file without examples.
            scanned = scan_clicks(
                file, known.schema, features=known.vocabularies, chunk_rows=_ALL
            )
            data = next(scanned.chunks(), None)
        if data is None or not data.num_rows:
            return None
        if data.weights is not None and not data.weights.any():
            warn_caller(f"{path}: all examples have the weight 0: nothing is learned")
            return None
        return data

    def add_new(
        self,
        model: Any,
        known: ClickDataset,
        data: ClickDataset | ScannedClicks,
        optimizer: Optimizer | None,
    ) -> None:
        added = {
            name: len(names) - len(known.vocabularies[name])
            for name, names in data.vocabularies.items()
        }
        model.add_ids(added, optimizer=optimizer)

    def doubts(self, model: nnx.Module, source: Source, k: int) -> str | None:
        found = compared(model, source.data, source.heldout)
        what = "training" if source.heldout is None else "validation"
        return None if found is None else found.warning(what)

    def is_indicator(self, data: Any) -> bool:
        return False

    def account(self, data: ClickDataset | ScannedClicks) -> str:
        return (
            f"{data.num_rows:,} examples, {len(data.schema.dense):,} dense columns, "
            f"{self.num_known(data):,} ids of {len(data.num_ids):,} features"
        )

    def known_of(self, data: ClickDataset | ScannedClicks) -> ClickDataset:
        return without_rows(data.num_ids, data.schema, data.vocabularies)

    def load_known(self, path: pathlib.Path) -> ClickDataset:
        return ClickDataset.load(path)

    def num_known(self, known: ClickDataset | ScannedClicks) -> int:
        sizes = [size for size in known.features.values() if not isinstance(size, str)]
        # A column of 64-bit ids has no numbered categories, and counts as 1.
        return sum(1 if size == NUM_IDS else size for size in sizes)

    def fingerprint_of(self, known: ClickDataset) -> str:
        schema = as_names([codec.text(known.schema.to_json())])
        return fingerprint(schema, *known.vocabularies.values())

    def asked_in_shell(self, command: Evaluate) -> Evaluate:
        if command.heldout is not None:
            same = command.inputs == command.heldout
            raise ValueError(
                "a model of clicks is measured on the examples of one file: leave out "
                f"{'TEST' if same else command.inputs}"
            )
        given = command.given - {"inputs"}
        command = command.replaced(inputs=None, heldout=command.inputs)
        return command.noting(given=given)

    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        if (examples := asked.heldout) is None:
            raise ValueError("give heldout=..., the examples to measure on")
        schema = run.known.schema
        if (weighted := asked.weighted) and not (schema.weight or schema.label_weights):
            raise ValueError(
                "weighted: the run has no column of weights, as weight=... names one"
            )
        read = meanwhile(
            lambda: read_like(examples, run.known, reading, weighted=weighted)
        )
        model = self.corrected(run, asked, reading)
        clicks = read()
        groups = groups_of(asked, reading, run, clicks)
        how = {"keep_rows": asked.keep_rows, "weighted": weighted}
        measured = evaluate_clicks(Measure(model, clicks, groups=groups, **how))
        if clicks.num_rows >= LEAST_ROWS and schema.is_plain:
            _warn_of_base_rate(measured)
        return Measurement(measured)

    def corrected(self, run: Opened, correcting: Correcting, reading: Reading) -> Any:
        model, source = run.model(), correcting.calibrate
        if source is None and correcting.negatives_kept is None:
            return model
        examples = None
        if source is not None:
            examples = read_like(source, run.known, reading)
            if were_trained_on(examples, run.settings):
                warn_caller(
                    f"{name_of(source)}: has the examples that the run was trained on, of "
                    "which a model is too sure: name others by calibrate=..."
                )
        method, kept = correcting.method or "platt", correcting.negatives_kept
        losses = {column.loss for column in run.known.schema.several.values()}
        if kept is not None and losses and "binary" not in losses:
            raise ValueError(NOT_BINARY)
        try:
            return calibrate(model, examples, method=method, negatives_kept=kept)
        except ValueError as error:
            if source is None:
                raise
            raise ValueError(f"{name_of(source)}: {error}") from error

    def validated(
        self, model: nnx.Module, source: Source, k: int
    ) -> Mapping[str, float]:
        return evaluate_clicks(Measure(model, source.heldout, keep_rows=True))

    def probabilities(self, examples: Any, reading: Reading, run: Opened) -> Any:
        read = meanwhile(
            lambda: read_like(examples, run.known, reading, labelled=False)
        )
        return predict(run.model(), read())

    def findings(self, asked: Paged, reading: Reading, run: Opened) -> Findings:
        model = run.model()
        if asked.heldout is None:
            return Findings(model=model)
        clicks = read_like(asked.heldout, run.known, reading)
        groups = groups_of(asked, reading, run, clicks)
        how = Measure(model, clicks, groups=groups, keep_rows=True)
        return Findings(
            model=model,
            measured=evaluate_clicks(how),
            facts=[name_of(asked.heldout), *_facts(clicks)],
            calibration=_curves(clicks, predict(model, clicks)),
        )


def _facts(clicks: ClickDataset) -> list[str]:
    """Lines of a report: the number of examples, and the share of clicks, or the share of positive
    examples for each binary label.
    """
    shares = {"clicks": clicks.labels}
    if several := clicks.schema.several:
        columns = zip(several.items(), clicks.labels.T, strict=True)
        shares = {name: y for (name, c), y in columns if c.loss == "binary"}
    found = [
        f"{y[~np.isnan(y)].mean():.1%} {name}".replace("%", " %")
        for name, y in shares.items()
        if not np.isnan(y).all()
    ]
    return [f"{clicks.num_rows:,} examples", *found]


def _curves(
    clicks: ClickDataset, predicted: np.ndarray | dict[str, np.ndarray]
) -> dict[str, list[tuple[float, float]]]:
    """Calibration curves of all binary labels, by label name."""
    if not isinstance(predicted, dict):
        return {clicks.schema.label: calibration_curve(predicted, clicks.labels)}
    columns = zip(clicks.schema.several.items(), clicks.labels.T, strict=True)
    return {
        name: calibration_curve(predicted[name][there], y[there])
        for (name, column), y in columns
        if column.loss == "binary" and (there := ~np.isnan(y)).any()
    }


def _is_regressed(training: Training, data: ClickDataset | ScannedClicks) -> bool:
    """Whether the model has a regression, and there are enough examples to hold out some."""
    if not isinstance(data, ClickDataset) or data.num_rows < _LEAST_REGRESSED:
        return False
    # If training corrects clicks for positions and held-out examples are not corrected, they
    # cannot choose the share.
    if data.schema.several or data.schema.propensity or data.schema.fixed:
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


def _warn_of_base_rate(measured: Mapping[str, float]) -> None:
    """Warns if the constant prediction of the click rate has no higher log loss than the model."""
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


def _check_targets(targets: Any) -> None:
    if targets is not None:
        raise ValueError("clicks have their labels; leave out targets")


KIND: Kind = Clicks()
