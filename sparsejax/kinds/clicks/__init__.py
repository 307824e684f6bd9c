"""Clicks: examples with a label, and models of how probable it is."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sparsejax.data.reading.sources import Inputs
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds.kind import Defaults, Kind, Maker, kind_of


class Clicks(Kind):
    """The kind of a `ClickModelConfig` and of a `ClickDataset`."""

    name = "clicks"
    defaults = Defaults(
        batch_size=4096, least_epochs=1, least_steps=1, optimizer="adam", scored=8192
    )
    unused: ClassVar[Mapping[str, Collection[str]]] = {
        "build": ("item_features",),
        "fit": ("k",),
        "export_predictor": ("k", "item_features", "int8"),
        "evaluate": (
            "heldout",
            "k",
            "fold_in",
            "features",
            "seed",
            "exclude",
            "exclude_items",
            "only_items",
            "unknown",
            "unknown_users",
            "candidates",
            "popularity",
            "by",
        ),
    }

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.kinds.clicks.modules import new_click_model

        _check_targets(targets)
        if kind_of(data) is not self:
            raise TypeError(
                "a click model reads a ClickDataset or ScannedClicks, got "
                f"{type(data).__name__}"
            )
        sizes = {"num_dense": len(data.schema.dense), "features": data.features}
        return functools.partial(new_click_model, config, **sizes)

    def examples(self, model, inputs, targets, weights) -> Examples:
        from sparsejax.kinds.clicks.job import click_examples

        _check_targets(targets)
        return click_examples(inputs, weights)

    def job(self, model, inputs, *, targets, **options) -> Job:
        from sparsejax.kinds.clicks.job import click_job
        from sparsejax.kinds.clicks.scores import check_click_model

        check_click_model(model)
        _check_targets(targets)
        return click_job(model, inputs, **options)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        raise TypeError(
            f"a {type(inputs).__name__} has no items to rank: predict says how "
            "probable its clicks are"
        )

    def evaluate(self, model, inputs, **options):
        from sparsejax.kinds.clicks.scores import evaluate_clicks

        return evaluate_clicks(model, inputs, **options)

    def portable(self, model, names, **options):
        from sparsejax.kinds.clicks.portable import portable_clicks

        return portable_clicks(model, names, **options)

    def workload(self, network, **sizes) -> Workload:
        raise TypeError("the memory of a click model is planned by plan_embeddings")


def _check_targets(targets: Any) -> None:
    if targets is not None:
        raise ValueError("clicks have their labels; leave out targets")


KIND = Clicks()
