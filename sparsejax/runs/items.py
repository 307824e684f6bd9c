"""Runs of networks of items."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from sparsejax.data import SparseDataset, scan_parquet
from sparsejax.data.files.names import Names
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.items.evaluation import prepared_for
from sparsejax.kinds.items.job import ScannedItems
from sparsejax.mesh import kept_programs
from sparsejax.nn.config import LinearConfig, NetworkConfig, temperature_for
from sparsejax.options.measuring import Evaluate
from sparsejax.options.predicting import Recommend
from sparsejax.options.reading import BY_NAME, Reading
from sparsejax.options.training import Training
from sparsejax.runs import interactions
from sparsejax.runs.kind import Opened, Source
from sparsejax.runs.reading import (
    fingerprint_of_heldout,
    is_last,
    name_of,
    read_file,
    split_name,
    validation_split,
    with_times,
)
from sparsejax.runs.threads import meanwhile


class Items(interactions.Interactions):
    """The runs of a `NetworkConfig`."""

    name = "items"

    def read_config(self, document: object) -> NetworkConfig:
        return NetworkConfig.from_json(document)

    def described(self, model: str) -> tuple[NetworkConfig, Collection[str]]:
        return NetworkConfig.autoencoder(), ("temperature", "linear")

    def source(self, training: Training, before: Names | None) -> Source:
        data = everything = read_file(training.data, training)
        if before is not None:
            data = everything = data.append_features(before)
        data, features = interactions.with_content(training, data, self.counts)
        everything = data
        heldout = validation = split = None
        indicator = data.matrix.data is None
        asked = training.validation
        if asked is not None:
            if is_last(asked):
                with_times(data, training.data)
            parts = validation_split(asked, data)
            if parts is None:
                heldout = self.heldout(asked, training, data, training.data)
            else:
                data, heldout = parts.train, parts.heldout.without_values()
                split = split_name(asked)
                training.say(f"validation: {parts}")
            validation = fingerprint_of_heldout(heldout, data.row_names)
        return Source(
            data=data,
            everything=everything,
            chunks=[data.num_rows],
            fingerprint=fingerprint(data.matrix),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=indicator,
            heldout=heldout,
            validation=validation,
            split=split,
            features=features,
        )

    def scanned(self, training: Training) -> Source:
        interactions.check_scanned(training)
        reading = training
        if reading.time is not BY_NAME:
            raise ValueError("time=... is for data in memory; leave out chunk_rows")
        assert training.chunk_rows is not None
        data = scan_parquet(
            training.data,
            user=reading.user,
            item=reading.item,
            value=reading.value,
            indicator=reading.indicator,
            chunk_rows=training.chunk_rows,
        )
        return Source(
            data=data,
            everything=data,
            chunks=Stream(ScannedItems(data), None).chunks,
            fingerprint=data.fingerprint(),
            num_features=data.num_features,
            known=data.feature_names,
            indicator=data.indicator,
        )

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

    def evaluate(
        self, measuring: Evaluate, reading: Reading, run: Opened
    ) -> Mapping[str, float]:
        if (measuring.heldout is None) == (measuring.fold_in is None):
            raise ValueError(
                "give heldout=..., or fold_in=... to hold out a part of inputs=..."
            )
        if measuring.heldout is None and measuring.history:
            raise ValueError(
                "history=... goes with heldout=...; leave it out with fold_in"
            )
        if (
            measuring.baselines
            and measuring.heldout is None
            and measuring.popularity is None
        ):
            raise ValueError(
                "baselines=True with fold_in needs popularity=..., the interactions that "
                "the model was trained on"
            )

        def prepare(given: dict[str, Any]) -> Evaluation:
            return prepared_for(
                **given,
                fold_in=measuring.fold_in,
                features=None if measuring.fold_in is None else run.known,
                seed=measuring.seed,
                **measuring.counted(),
            )

        if kept_programs.may_compile_beside():

            def read() -> tuple[dict[str, Any], Evaluation]:
                given = _data_to_evaluate(measuring, reading, run)
                return given, prepare(given)

            beside = meanwhile(read)
            baseline = functools.cache(lambda: meanwhile(lambda: beside()[1].baseline))

            def ahead(shapes: Any) -> Callable[[], object]:
                compiling = beside()[1].lower_ahead(shapes)
                baseline()  # begins now, as its programs are small
                return compiling

            model = run.model(ahead)
            given, prepared = beside()
            baseline()()
        else:
            data = meanwhile(lambda: _data_to_evaluate(measuring, reading, run))
            model, given = run.model(), data()
            prepared = prepare(given)
        measured = prepared.run(model, keep_rows=measuring.keep_rows)
        if measuring.baselines:
            measured = interactions.with_baselines(
                measured, prepared, given["popularity"], reading.say
            )
        return interactions.warn_of_popularity(measured)

    def read_shown(self, source, reading: Reading, run: Opened) -> SparseDataset:
        indicator = run.settings.indicator
        return read_file(source, reading, features=run.known, indicator=indicator)

    def excluded(
        self,
        recommending: Recommend,
        reading: Reading,
        run: Opened,
        data: SparseDataset,
    ) -> SparseDataset | None:
        if recommending.exclude is None:
            return None if not recommending.exclude_seen else data
        unwanted = read_file(
            recommending.exclude,
            reading,
            features=run.known,
            indicator=True,
        )
        if not recommending.exclude_seen:
            return unwanted
        return data.without_values().merge(unwanted)

    def read_heldout(
        self, source, reading: Reading, data: SparseDataset
    ) -> SparseDataset:
        return read_file(source, reading, features=data, indicator=True)

    def counts(self, data: SparseDataset) -> np.ndarray:
        return np.bincount(data.matrix.indices, minlength=data.num_features)


def _data_to_evaluate(
    measuring: Evaluate, reading: Reading, run: Opened
) -> dict[str, Any]:
    """The data that is read from files, as arguments of `evaluate`."""
    names = run.known
    valued = run.settings.indicator
    given: dict[str, Any] = {}
    if measuring.heldout is None:
        # With its own features until it is split.
        given["inputs"] = read_file(measuring.inputs, reading, indicator=valued)
    else:

        def read_shown(source: Any) -> SparseDataset:
            return read_file(source, reading, features=names, indicator=valued)

        train = read_shown(measuring.inputs)
        given["inputs"] = shown = train.merge(*map(read_shown, measuring.history))
        files = " or ".join(map(name_of, [measuring.inputs, *measuring.history]))
        given["heldout"] = RUNS.heldout(measuring.heldout, reading, shown, files)
        given["popularity"] = train
    for name, source in (
        ("candidates", measuring.candidates),
        ("popularity", measuring.popularity),
    ):
        if source is not None:
            given[name] = read_file(source, reading, features=names, indicator=True)
    return given


RUNS = Items()
