"""The kind of item models: rows of bought or seen items, and networks that predict more items."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from sparsejax.callers import warn_caller
from sparsejax.codec import Json
from sparsejax.data import ScannedDataset, SparseDataset, scan_parquet
from sparsejax.data.reading.sources import Inputs, Sources, num_columns
from sparsejax.data.reading.sources import Source as Given
from sparsejax.data.sets.splits import Split
from sparsejax.engine.rank.evaluation import Evaluation, Setup, prepared_evaluation
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds import interactions
from sparsejax.kinds.content import finished
from sparsejax.kinds.items.job import item_examples, item_job, scanned_items
from sparsejax.kinds.kind import (
    DataSizes,
    Defaults,
    Maker,
    Measurement,
    Range,
    Tuned,
    kind_of,
)
from sparsejax.kinds.reading import is_last, name_of, read_file, with_times
from sparsejax.kinds.source import Opened, Source
from sparsejax.kinds.threads import meanwhile
from sparsejax.mesh import kept_programs
from sparsejax.nn.config import LinearConfig, NetworkConfig, temperature_for
from sparsejax.options.measuring import Evaluate, Measure
from sparsejax.options.models import BY_DEFAULT, Described, Network
from sparsejax.options.planning import Plan
from sparsejax.options.predicting import Write
from sparsejax.options.reading import BY_NAME, Reading
from sparsejax.options.training import Fit, Training


class Items(interactions.Interactions[NetworkConfig, SparseDataset]):
    """The kind of a `NetworkConfig`, a `SparseDataset`, and matrices."""

    name = "items"
    about = (
        "The model has learned which items go together. It looks at all that a user has, and "
        "gives each item a score."
    )
    defaults = Defaults(
        batch_size=512, least_epochs=30, least_steps=200, optimizer="adam"
    )
    tuned: ClassVar[Tuned] = {
        "hidden": (64, 128, 256, 512, 1024),
        "temperature": interactions.TEMPERATURES,
        "corruption": Range(0.0, 0.8),
    }

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.nn.models import FeedForward

        if (kind := kind_of(data)) is not self:
            raise ValueError(
                f"a network does not read {kind.name}: pass a SparseDataset, as "
                "data.to_sparse() makes it of histories, or the configuration of a model of "
                f"{kind.name}"
            )
        inputs = num_columns("data", data)
        outputs = inputs if targets is None else num_columns("targets", targets)
        sizes = {"inputs": inputs, "outputs": outputs, "content": content}
        return Maker(functools.partial(FeedForward, config, **sizes))

    def examples(self, model, inputs, targets, weights) -> Examples:
        return item_examples(model, Inputs.of(inputs), targets, weights)

    def job(self, asked: Fit) -> Job:
        return item_job(asked)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        return finished(model), Inputs.of(inputs), exclude

    def evaluate(self, asked: Measure) -> dict[str, float]:
        model = asked.model
        if not isinstance(model, Recommender):
            raise TypeError(
                "items are ranked by a FeedForward, or a module with num_features, "
                f"num_items and top_k; got {type(model).__name__}. A click model takes a "
                "ClickDataset, a model of histories a SequenceDataset"
            )
        how = {"optimizer": asked.optimizer, "keep_rows": asked.keep_rows}
        return _prepared(asked).run(finished(model), **how)

    def portable(self, asked: Write):
        from sparsejax.kinds.portable import portable_ranker

        return portable_ranker(asked.model, asked)

    def workload(self, asked: Plan, batch: int) -> Workload:
        from sparsejax.kinds.items.footprint import network_workload

        return network_workload(asked, batch)

    def read_config(self, document: Json) -> NetworkConfig:
        return NetworkConfig.from_json(document)

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[NetworkConfig, Collection[str]]:
        given, rank = options.values_of(Network), options.linear
        given["linear"] = LinearConfig(rank=rank) if isinstance(rank, int) else None
        suited = [n for n in ("temperature", "linear") if getattr(options, n) == "auto"]
        if "temperature" in suited:
            del given["temperature"]
        return NetworkConfig.autoencoder(**given), suited

    def suited_to_sizes(
        self, config: NetworkConfig, suited: Collection[str], sizes: DataSizes
    ) -> tuple[NetworkConfig, str]:
        if "linear" not in suited or sizes.features is not None:
            return config, ""
        linear, _ = LinearConfig.for_data(*sizes[:3])
        return dataclasses.replace(config, linear=linear), ""

    def tuned_in(self, config: NetworkConfig) -> dict[str, Any]:
        found = {"corruption": config.input.corruption}
        if len(config.hidden) == 1:
            found["hidden"] = config.hidden[0].size
        if config.output.temperature is not None:
            found["temperature"] = config.output.temperature
        return found

    def with_tuned(
        self, config: NetworkConfig, chosen: Mapping[str, Any]
    ) -> NetworkConfig:
        first, *hidden, last = config.layers
        first = dataclasses.replace(config.input, corruption=chosen["corruption"])
        if "hidden" in chosen:
            hidden = [dataclasses.replace(config.hidden[0], size=chosen["hidden"])]
        if "temperature" in chosen:
            last = dataclasses.replace(config.output, temperature=chosen["temperature"])
        return dataclasses.replace(config, layers=(first, *hidden, last))

    def read(
        self, source, reading: Reading, *, features=None, indicator=False
    ) -> SparseDataset:
        return read_file(source, reading, features=features, indicator=indicator)

    def scan(self, training: Training) -> tuple[ScannedDataset, Sequence[int]]:
        if training.time is not BY_NAME:
            raise ValueError("time=... is for data in memory; leave out chunk_rows")
        data = scan_parquet(
            training.data,
            user=training.user,
            item=training.item,
            value=training.value,
            indicator=training.indicator,
            chunk_rows=training.chunk_rows,
        )
        return data, Stream(scanned_items(data), None).chunks

    def matrix(self, data: SparseDataset) -> SparseDataset:
        return data

    def counts(self, data: SparseDataset) -> np.ndarray:
        return np.bincount(data.matrix.indices, minlength=data.num_features)

    def fingerprint(self, data: SparseDataset) -> str:
        return fingerprint(data.matrix)

    def split(self, validation, data: SparseDataset, path) -> Split | None:
        if is_last(validation):
            with_times(data, path)
        parts = super().split(validation, data, path)
        if parts is None:
            return None
        heldout = parts.heldout.without_values()
        return Split(parts.train, heldout, repeats=parts.repeats)

    def is_indicator(self, data: SparseDataset | ScannedDataset) -> bool:
        if isinstance(data, ScannedDataset):
            return data.indicator
        return data.matrix.data is None

    def suited(
        self, config: NetworkConfig, training: Training, source: Source
    ) -> tuple[NetworkConfig, str]:
        data, said = source.data, []
        if "temperature" in training.suited:
            temperature, why = temperature_for(data.num_features)
            config = config.with_temperature(temperature)
            said.append(why)
        if "linear" in training.suited:
            if training.chunk_rows is not None:
                why = "no linear part: it needs all of the data in memory"
            else:
                sizes = data.num_rows, data.num_features, data.num_entries
                linear, why = LinearConfig.for_data(*sizes)
                config = dataclasses.replace(config, linear=linear)
            said.append(why)
        return config, "\n".join(said)

    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        if (asked.heldout is None) == (asked.fold_in is None):
            raise ValueError(
                "give heldout=..., or fold_in=... to hold out a part of inputs=..."
            )
        if asked.baselines and asked.heldout is None and asked.popularity is None:
            raise ValueError(
                "baselines=True with fold_in needs popularity=..., the interactions that "
                "the model was trained on"
            )

        def prepare(given: dict[str, Any]) -> Evaluation:
            features = None if asked.fold_in is None else run.known
            how = {"fold_in": asked.fold_in, "seed": asked.seed, "features": features}
            model = cast(Any, None)  # the model is loaded later
            return _prepared(Measure(model, **given, **how, **asked.counted()))

        if kept_programs.may_compile_beside():

            def read() -> tuple[dict[str, Any], Evaluation]:
                given = _data_to_evaluate(asked, reading, run)
                return given, prepare(given)

            beside = meanwhile(read)
            baseline = functools.cache(lambda: meanwhile(lambda: beside()[1].baseline))

            def ahead(shapes: Any) -> Callable[[], object]:
                compiling = beside()[1].lower_ahead(shapes)
                # The baseline starts now in another thread, because its programs compile quickly.
                baseline()
                return compiling

            model = run.model(ahead)
            given, prepared = beside()
            baseline()()
        else:
            data = meanwhile(lambda: _data_to_evaluate(asked, reading, run))
            model, given = run.model(), data()
            prepared = prepare(given)
        found = prepared.run(model, keep_rows=asked.keep_rows)
        return Measurement(found, lambda: (prepared, given["popularity"]))


def _data_to_evaluate(asked: Evaluate, reading: Reading, run: Opened) -> dict[str, Any]:
    """Reads the files that `asked` names. Returns the data as arguments of `evaluate`."""
    names = run.known
    valued = run.settings.indicator
    given = {}
    if asked.heldout is None:
        # The data keeps the file's own features until it is split.
        given["inputs"] = read_file(asked.inputs, reading, indicator=valued)
    else:

        def read_shown(source: Any) -> SparseDataset:
            return read_file(source, reading, features=names, indicator=valued)

        train = read_shown(asked.inputs)
        given["inputs"] = shown = train.merge(*map(read_shown, asked.history))
        files = " or ".join(map(name_of, [asked.inputs, *asked.history]))
        given["heldout"] = KIND.heldout(asked.heldout, reading, shown, files)
        given["popularity"] = train
    for name, source in (
        ("candidates", asked.candidates),
        ("popularity", asked.popularity),
    ):
        if source is not None:
            given[name] = read_file(source, reading, features=names, indicator=True)
    return given


def _prepared(asked: Measure) -> Evaluation:
    """Prepares the data of `evaluate` once, so that several models can be measured on it."""
    inputs, heldout = cast(Sources, asked.inputs), cast(Given | None, asked.heldout)
    setup = asked.as_type(Setup, trained_on_inputs=asked.fold_in is None)
    if asked.fold_in is not None:
        chosen = asked.fold_in, asked.seed or 0, asked.features
        inputs, heldout = _folded_in(inputs, heldout, *chosen)
    elif heldout is None:
        raise ValueError("give heldout, or fold_in=... to hold out a part of inputs")
    return prepared_evaluation(inputs, heldout, setup)


def _folded_in(
    inputs: Sources | Inputs,
    heldout: Given | None,
    fold_in: float,
    seed: int,
    features: SparseDataset | Iterable[object] | None,
) -> tuple[SparseDataset, SparseDataset]:
    if heldout is not None:
        raise ValueError("give heldout or fold_in, not both: fold_in splits the inputs")
    if isinstance(inputs, Mapping):
        raise ValueError(
            "fold_in splits a single input; with several inputs, split one of them by "
            "shown, heldout = data.split(...)"
        )
    if not isinstance(inputs, SparseDataset):
        raise TypeError(
            "fold_in chooses entries by their names, so inputs must be a SparseDataset, "
            f"got {type(inputs).__name__}"
        )
    if inputs.left_out is not None:
        warn_caller(
            f"{inputs.left_out.sum():,} entries of inputs were left out before the split "
            "and are in neither part; read inputs without features=..., and pass "
            "features=... to evaluate"
        )
    shown, rest = inputs.split(fold_in, seed=seed)
    if features is None:
        return shown, rest
    if not isinstance(features, SparseDataset):
        features = list(features)
    return shown.align_features(features), rest.align_features(features)


KIND = Items()
