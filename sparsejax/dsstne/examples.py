"""Converts the data sets of DSSTNE files to a network's examples."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse

from sparsejax.data.files.names import quoted
from sparsejax.data.files.opening import DataError
from sparsejax.dsstne.datasets import FileDataset
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.layer_definition import LayerDefinition
from sparsejax.dsstne.netcdf import load
from sparsejax.dsstne.network import name_of
from sparsejax.dsstne.order import Orders, in_order
from sparsejax.sparse import CSR

# For error functions of dense targets: the values that count as labels.
_LABELS = {"Hinge": (-1, 1), "ScaledMarginalCrossEntropy": (0, 1)}


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples for training or measuring a network.

    Attributes:
      inputs: data that the network reads, in the forms that `fit` takes.
      targets: data that the network predicts, in the forms that `fit` takes.
      weights: factors of the examples' losses, or None.
    """

    inputs: Any
    targets: Any
    weights: np.ndarray | None

    @classmethod
    def of(
        cls, network: Definition, data: Mapping[str, FileDataset], orders: Orders
    ) -> Examples:
        """Converts data sets to a network's examples.

        Args:
          network: the layers.
          data: the data set of each input and output, by the name of the layer.
          orders: orders of the columns of some layers; see `order`.
        """
        data = {name: in_order(d, orders.get(name)) for name, d in data.items()}
        outputs = network.of_kind("Output")
        found = {name_of(layer): data[layer.name] for layer in outputs}
        weights = first_of_like(found).example_weights()
        targets: Any = {
            name: _targets(network.error_function, name, dataset)
            for name, dataset in found.items()
        }
        if len(outputs) == 1:
            [targets] = targets.values()
        return cls(inputs_of(network, data), targets, weights)


def data_of(inputs: str, outputs: str) -> dict[str, FileDataset]:
    """Reads the data sets of two files, by name.

    Raises:
      DataError: both have a data set of one name, or their numbers of examples differ.
    """
    data = load(inputs)
    if pathlib.Path(outputs).resolve() == pathlib.Path(inputs).resolve():
        others: dict[str, FileDataset] = {}
    else:
        others = load(outputs)
    twice = sorted(data.keys() & others.keys())
    if twice:
        raise DataError.at(
            outputs, f"has the data set {twice[0]!r}, which {inputs} has too"
        )
    [(first, one), *rest] = [*data.items(), *others.items()]
    for name, other in rest:
        if other.num_examples != one.num_examples:
            path = inputs if name in data else outputs
            raise DataError.at(
                path,
                f"the data set {name!r} has {other.num_examples:,} examples, but "
                f"{first!r} has {one.num_examples:,}",
            )
    return data | others


def by_layer(
    network: Definition, data: Mapping[str, FileDataset]
) -> dict[str, FileDataset]:
    """The data set of each input and output, by the name of the layer, and as wide as the layer.

    Raises:
      ValueError: a layer has no data set, or its size does not match.
    """
    outer = (*network.of_kind("Input"), *network.of_kind("Output"))
    return {layer.name: _of_layer(layer, data) for layer in outer}


def _of_layer(layer: LayerDefinition, data: Mapping[str, FileDataset]) -> FileDataset:
    """The data set of a layer, with as many columns as the layer has units.

    Raises:
      ValueError: the layer has no data set, or its size does not match.
    """
    if layer.dataset not in data:
        raise ValueError(
            f"layer {layer.name!r} reads the data set {layer.dataset!r}; the files have "
            f"{quoted(list(data))}"
        )
    return as_wide(layer, data[layer.dataset])


def as_wide(layer: LayerDefinition, dataset: FileDataset) -> FileDataset:
    """Widens a data set to its layer by empty columns at the end.

    Raises:
      ValueError: the size of the data set does not match.
    """
    if dataset.columns == layer.units:
        return dataset
    if dataset.is_sparse and len(dataset.size) == len(layer.size) == 1:
        return dataclasses.replace(dataset, size=layer.size)
    raise ValueError(
        f"layer {layer.name!r} has {layer.units:,} units, but its data set "
        f"{layer.dataset!r} has {dataset.columns:,} columns"
    )


def first_of_like(targets: Mapping[str, FileDataset]) -> FileDataset:
    """The first of the outputs' data sets by name. All of them must have one kind.

    Raises:
      ValueError: the network has no output.
      NotImplementedError: the data sets are of different kinds.
    """
    if not targets:
        raise ValueError("the network has no layer of kind Output, so nothing to learn")
    first, *others = targets.values()
    for other in others:
        one, two = first.example_weights(), other.example_weights()
        if not np.array_equal(np.asarray(one), np.asarray(two)):
            what = "the weights of their examples"
        elif first.ignore_zeros != other.ignore_zeros:
            what = "whether they ignore zeros"
        elif first.is_sparse != other.is_sparse:
            what = "whether they are sparse"
        else:
            continue
        raise NotImplementedError(
            f"the data sets of the outputs {quoted(list(targets))} differ in {what}; "
            "make them alike"
        )
    return first


def inputs_of(network: Definition, data: Mapping[str, FileDataset]) -> Any:
    """The inputs in a form that `fit` takes; a single sparse input is not in a dict.

    Args:
      network: the layers; `sparse` of the inputs agrees with `data`.
      data: the data set of each input, by the name of the layer.
    """
    inputs = network.of_kind("Input")
    found = {name_of(layer): _shown(data[layer.name]) for layer in inputs}
    if len(inputs) == 1 and inputs[0].sparse:
        [alone] = found.values()
        return alone
    return found


def _shown(dataset: FileDataset) -> CSR | np.ndarray:
    """The examples of an input layer. Sparse rows are multiplied by the examples' weights."""
    found, weights = dataset.examples(), dataset.example_weights()
    if weights is None or isinstance(found, np.ndarray):
        return found
    factors = np.repeat(weights, np.diff(found.indptr))
    return found.with_data(factors if found.data is None else found.data * factors)


def _targets(
    error: str, name: str, dataset: FileDataset
) -> CSR | scipy.sparse.csr_array:
    """Targets in a form that `fit` accepts. Of dense data, all numbers other than 0 are labels.

    Args:
      error: the error function.
      name: name of the data set.
      dataset: the labels.

    Raises:
      ValueError: dense targets have labels that the error function ignores.
    """
    found = dataset.examples(target=True)
    if isinstance(found, CSR):
        return found
    labels = found.reshape(len(found), -1)
    if error in _LABELS:
        wrong = np.argwhere(~np.isin(labels, _LABELS[error]))
        if len(wrong):
            row, column = wrong[0]
            one, two = _LABELS[error]
            raise ValueError(
                f"the data set {name!r} has the label {labels[row, column]:g} in example "
                f"{row}, column {column}; {error} knows {one} and {two}"
            )
    return scipy.sparse.csr_array(labels)
