"""The balanced order of columns, in which a network is trained; files keep their own.

On a mesh, weights are cut into ranges of rows, one for each device. In DSSTNE's files the
first columns are often the popular ones, so the first device would do most of the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import scipy.sparse

from sparsejax.data import vocabulary_order
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.layer_definition import LayerDefinition, reads
from sparsejax.dsstne.network_files import Parameters

# For a layer, by name: `[columns]`, the file's column in each place.
Orders = Mapping[str, np.ndarray]


def balanced_orders(network: Definition, data: Mapping[str, FileDataset]) -> Orders:
    """The order of the columns of each layer that can have one; see `vocabulary_order`.

    These are sparse inputs and outputs that only fully connected weights lead from or to.
    Layers whose weights are shared have the same order.

    Args:
      network: the layers.
      data: the data set of each input and output, by the name of the layer.
    """
    orders = {}
    for group in _tied(network):
        layers = [network.layer(name) for name in group]
        if all(_can_be_ordered(network, layer, data) for layer in layers):
            counts = sum(_counts(data[layer.name]) for layer in layers)
            orders |= dict.fromkeys(group, vocabulary_order(np.asarray(counts)))
    return orders


def in_order(dataset: FileDataset, order: np.ndarray | None) -> FileDataset:
    """The data set with its columns in this order; None leaves it as it is.

    Its columns have no names then.
    """
    if order is None:
        return dataset
    place = np.argsort(order)
    if isinstance(dataset.rows, SparseRows):
        indices = place[dataset.rows.indices]
        rows = dataclasses.replace(dataset.rows, indices=indices)
    else:
        assert isinstance(dataset.rows, Classes)
        rows = Classes(place[dataset.rows.ids])
    return dataclasses.replace(dataset, rows=rows, feature_names=None)


def from_file_order(parameters: Parameters, orders: Orders) -> Parameters:
    """A file's parameters, for a network whose columns lie in these orders."""
    weights = {
        (source, layer): _taken(array, (orders.get(source), orders.get(layer)))
        for (source, layer), array in parameters.weights.items()
    }
    biases = {
        (source, layer): _taken(array, (orders.get(layer),))
        for (source, layer), array in parameters.biases.items()
    }
    return dataclasses.replace(parameters, weights=weights, biases=biases)


def to_file_order(parameters: Parameters, orders: Orders) -> Parameters:
    """The inverse of `from_file_order`."""
    inverses = {name: np.argsort(order) for name, order in orders.items()}
    return from_file_order(parameters, inverses)


def _tied(network: Definition) -> Iterable[list[str]]:
    """The names of all layers, those together whose units shared weights belong to."""
    names = [layer.name for layer in network.layers]
    place = {name: at for at, name in enumerate(names)}
    ties = []
    for layer in network.layers:
        for source in layer.sources:
            if (shared := source.shared) is not None:
                theirs = [shared.source_input, shared.source_output]
                if shared.transposed:
                    theirs.reverse()
                ties += zip((source.layer, layer.name), theirs, strict=True)
    pairs = np.array([(place[a], place[b]) for a, b in ties]).reshape(-1, 2)
    graph = scipy.sparse.coo_array(
        (np.ones(len(pairs)), pairs.T), shape=(len(names), len(names))
    )
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    groups: dict[int, list[str]] = {}
    for name, label in zip(names, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(name)
    return groups.values()


def _can_be_ordered(
    network: Definition, layer: LayerDefinition, data: Mapping[str, FileDataset]
) -> bool:
    """Whether no place of a unit means anything: weights alone lead from or to it."""
    if layer.kind == "Hidden" or len(layer.size) > 1:
        return False
    if not data[layer.name].is_sparse:
        return False
    readers = [other for other in network.layers if layer.name in reads(other)]
    if layer.kind == "Output":
        return layer.type == "FullyConnected" and not layer.skips and not readers
    return all(
        reader.type == "FullyConnected" and layer.name not in reader.skips
        for reader in readers
    )


def _counts(dataset: FileDataset) -> np.ndarray:
    """`[columns]` how many entries each column has in the file."""
    rows = dataset.rows
    if isinstance(rows, Classes):
        return np.bincount(rows.ids, minlength=dataset.columns)
    assert isinstance(rows, SparseRows)
    return np.bincount(rows.indices, minlength=dataset.columns)


def _taken(array: np.ndarray, orders: tuple[np.ndarray | None, ...]) -> np.ndarray:
    """The array with each of its first axes in the order of it, if it has one."""
    for axis, order in enumerate(orders):
        if order is not None:
            array = np.take(array, order, axis=axis)
    return array
