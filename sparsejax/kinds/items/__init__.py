"""Items: rows of what was bought or seen, and networks that say what else would be."""

from __future__ import annotations

import functools
from typing import Any

from sparsejax.data.reading.sources import Inputs, num_columns
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds.content import finished
from sparsejax.kinds.items.job import item_examples, item_job
from sparsejax.kinds.kind import Defaults, Kind, Maker, kind_of


class Items(Kind):
    """The kind of a `NetworkConfig`, of a `SparseDataset`, and of matrices."""

    name = "items"
    defaults = Defaults(
        batch_size=512, least_epochs=30, least_steps=200, optimizer="adam"
    )

    def maker(self, config, data, targets=None, *, content=None) -> Maker:
        from sparsejax.kinds.items.modules import new_network

        if (kind := kind_of(data)) is not self:
            raise ValueError(
                f"a network does not read {kind.name}: pass a SparseDataset, as "
                "data.to_sparse() makes it of histories, or the configuration of a model of "
                f"{kind.name}"
            )
        inputs = num_columns("data", data)
        outputs = inputs if targets is None else num_columns("targets", targets)
        sizes = {"inputs": inputs, "outputs": outputs, "content": content}
        return functools.partial(new_network, config, **sizes)

    def examples(self, model, inputs, targets, weights) -> Examples:
        return item_examples(model, Inputs.of(inputs), targets, weights)

    def job(self, model, inputs, **options) -> Job:
        return item_job(model, inputs, **options)

    def shown(self, model, inputs, exclude) -> tuple[Recommender, Inputs, Any]:
        return finished(model), Inputs.of(inputs), exclude

    def evaluate(self, model, inputs, *, optimizer, keep_rows, **options):
        from sparsejax.kinds.items.evaluation import prepared_for

        if not isinstance(model, Recommender):
            raise TypeError(
                "items are ranked by a FeedForward, or a module with num_features, "
                f"num_items and top_k; got {type(model).__name__}. A click model takes a "
                "ClickDataset, a model of histories a SequenceDataset"
            )
        prepared = prepared_for(inputs, **options)
        return prepared.run(finished(model), optimizer=optimizer, keep_rows=keep_rows)

    def portable(self, model, names, **options):
        from sparsejax.kinds.portable import portable_ranker

        return portable_ranker(model, names, **options)

    def workload(self, network, **sizes) -> Workload:
        from sparsejax.kinds.items.footprint import network_workload

        return network_workload(network, **sizes)


KIND = Items()
