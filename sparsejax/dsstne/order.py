"""A balanced order of columns for training; files have another order.

On a mesh, each device has a range of the weights' rows. In DSSTNE's files the
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

# For the name of each layer, an array `[columns]`: the column in the file for each position.
Orders = Mapping[str, np.ndarray]


def balanced_orders(network: Definition, data: Mapping[str, FileDataset]) -> Orders:
    """The order of the columns of each layer that can be reordered; see `vocabulary_order`.

    These are sparse inputs and outputs that only have fully connected weights.
    Layers whose shared weights have the columns as an axis have one order.

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
    """The data set with its columns in this order; unchanged if the order is None.

    The columns of the result have no names.
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
    """Reorders a file's parameters for a network whose columns are in these orders."""
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
    """Groups of layer names: the layers of a group share an axis of some shared weights."""
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
    """Whether a layer's units may be reordered: all its connections must have dense weights."""
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
    """`[columns]`: the number of entries in each column of the file."""
    rows = dataset.rows
    if isinstance(rows, Classes):
        return np.bincount(rows.ids, minlength=dataset.columns)
    assert isinstance(rows, SparseRows)
    return np.bincount(rows.indices, minlength=dataset.columns)


def _taken(array: np.ndarray, orders: tuple[np.ndarray | None, ...]) -> np.ndarray:
    """Reorders the first axes of an array; an order of None leaves its axis unchanged."""
    for axis, order in enumerate(orders):
        if order is not None:
            array = np.take(array, order, axis=axis)
    return array
