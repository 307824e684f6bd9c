"""DSSTNE's `predict`: recommendations, or the units of a layer, for samples in a text."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from typing import Any

import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.data import SparseDataset
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import DataError
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.devices import setting_mesh
from sparsejax.dsstne.index_files import holes, read_index
from sparsejax.dsstne.layer_definition import LayerDefinition
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import load_parameters
from sparsejax.dsstne.text import read_samples
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.mesh import processes
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.verbs.recommend import recommend
from sparsejax.whole_files import check_writable, whole_text_file

# Pattern of a floating-point format in C: the text after its %.
_FORMAT = re.compile(r"[-+ #0]*\d{0,3}(\.\d{0,3})?[lL]?[eEfFgG]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """The command `predict`.

    Attributes:
      dataset: name of the data set, without `_input`.
      network: the network file.
      inputs: the index file of the input's features.
      outputs: the index file of the output's features.
      text: text file of samples, or a folder of them.
      filters: path of features that are not recommended to samples, in the form of `text`; it
        may be an empty file.
      out: the file to write.
      batch_size: number of samples that are processed together.
      k: number of recommendations for each sample.
      precision: format of a score, as in C's printf.
      analog: whether the text has values.
      multiply: whether scores are multiplied with the filters' values, as DSSTNE did, and
        nothing is excluded. A value that is missing is 0.
      layer: name of a layer whose units are written in place of recommendations.
      mesh: text such as "data=1,model=2". By default one device, or with several processes
        all devices along "model".
    """

    dataset: str
    network: str
    inputs: str
    outputs: str
    text: str
    filters: str
    out: str
    batch_size: int = 1024
    k: int = 100
    precision: str = "4.3f"
    analog: bool = False
    multiply: bool = False
    layer: str | None = None
    mesh: str | None = None


def predict(command: Predict) -> None:
    """Writes `sample<TAB>feature,score:feature,score:...:`, best first, for each sample.

    For a layer it writes `sample<TAB>1.0 2.0 ...`, which `knn-search` reads.

    Raises:
      DataError: a file is missing or wrong.
      FloatingPointError: a score is NaN.
      OSError: the file cannot be written; no partial file is left.
      ValueError: the files do not match each other.
    """
    check_writable(command.out)
    if not _FORMAT.fullmatch(command.precision):
        raise ValueError(
            f"-p {command.precision} is no format of a number in C's printf, such as 4.3f"
        )
    network, parameters = load_parameters(command.network)
    features, items = read_index(command.inputs), read_index(command.outputs)
    inputs = _inputs(command, network)
    layer = inputs[0]
    _check_width(command.inputs, features, layer)
    if command.layer is None:
        _check_width(command.outputs, items, _ranked(command, network))
    found = read_samples(
        command.text, features=features, new_features=False, analog=command.analog
    )
    rows: Any = found.dataset(width=layer.units).source(
        feature_names=features, row_names=found.samples
    )
    filters = _filters(command, found.samples, items)
    known = [other.name for other in network.layers]
    if command.layer is not None and command.layer not in known:
        raise ValueError(f"-l {command.layer}: the layers are {', '.join(known)}")
    network = network.with_inputs({layer.name: True for layer in inputs})
    with setting_mesh(command.mesh):
        model = Network(network, parameters=parameters, rngs=nnx.Rngs(0))
        nnx.update(model, put_on_mesh(nnx.state(model)))
        if command.layer is not None:
            given = _given(model, rows)
            units = model.units(given, command.layer, batch_size=command.batch_size)
            processes.in_first(lambda: _write_units(command, units, found.samples))
            return
        model.rank_first(len(items))
        if command.multiply:
            best = _multiplied(command, model, rows, filters, items)
        else:
            best = recommend(
                model,
                _given(model, rows),
                command.k,
                exclude=filters.astype(bool),
                exclude_items=holes(items),
                batch_size=command.batch_size,
            )
    processes.in_first(lambda: _write(command, found.samples, best, items))


def _printed(command: Predict, number: float | np.floating) -> str:
    # Python's operator % accepts the flags and widths of C's printf.
    return f"%{command.precision}" % float(number)


def _write_units(command: Predict, units: np.ndarray, samples: Names) -> None:
    with whole_text_file(command.out) as file:
        for sample, values in zip(samples.tolist(), units, strict=True):
            texts = (_printed(command, value) for value in values)
            file.write(f"{sample}\t{' '.join(texts)}\n")


def _write(
    command: Predict, samples: Names, best: Recommendations, items: Names
) -> None:
    counts = np.sum(best.ids >= 0, axis=1).tolist()
    with whole_text_file(command.out) as file:
        for sample, ids, scores, count in zip(
            samples.tolist(), best.ids, best.scores, counts, strict=True
        ):
            names = items[ids[:count]].tolist()
            entries = "".join(
                f"{name},{_printed(command, score)}:"
                for name, score in zip(names, scores, strict=False)
            )
            file.write(f"{sample}\t{entries}\n")


def _filters(command: Predict, samples: Names, items: Names) -> scipy.sparse.csr_array:
    """`[samples, items]` values of the filters; all are 1 if the filters only exclude items."""
    shape = (len(samples), len(items))
    is_file = os.path.isfile(command.filters)
    if command.filters == os.devnull or (
        is_file and not os.stat(command.filters).st_size
    ):
        return scipy.sparse.csr_array(shape)
    with warnings.catch_warnings():
        # Some samples may have no filter, and some filters may be for other samples.
        warnings.filterwarnings("ignore", "(?s).*samples of the index have no line")
        found = read_samples(
            command.filters,
            features=items,
            samples=samples,
            new_features=False,
            analog=command.multiply,
        )
    rows = found.rows
    lengths = (rows.ends - rows.starts)[: len(samples)]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = rows.indices[: indptr[-1]]
    values = np.ones(len(indices)) if rows.values is None else rows.values
    return scipy.sparse.csr_array((values[: indptr[-1]], indices, indptr), shape=shape)


def _multiplied(
    command: Predict,
    model: Network,
    rows: SparseDataset,
    filters: scipy.sparse.csr_array,
    items: Names,
) -> Recommendations:
    """The best items by scores that are multiplied by the values of the filters."""
    assert model.output_layer is not None
    output, count = model.output_layer.name, rows.num_rows
    ids = np.full((count, command.k), -1, np.int32)
    best = np.full((count, command.k), -np.inf, np.float32)
    empty = holes(items)
    most = min(command.k, len(items) - len(empty))
    for start in range(0, count, command.batch_size):
        some = slice(start, start + command.batch_size)
        batch = rows.align_rows(rows.row_names[some])
        given, size = _given(model, batch), command.batch_size
        scores = model.units(given, output, batch_size=size)[:, : len(items)]
        part = scipy.sparse.coo_array(filters[some])
        np.multiply.at(scores, part.coords, part.data.astype(np.float32))
        scores[:, empty] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :most]
        ids[some, :most] = order
        best[some, :most] = np.take_along_axis(scores, order, axis=1)
    return Recommendations(ids, best)


def _inputs(command: Predict, network: Definition) -> tuple[LayerDefinition, ...]:
    """The input layers. Raises ValueError unless all of them read the command's data set."""
    inputs, wanted = network.of_kind("Input"), f"{command.dataset}_input"
    if any(layer.dataset != wanted for layer in inputs):
        there = ", ".join(repr(layer.dataset) for layer in inputs)
        raise ValueError(
            f"{command.network}: -d {command.dataset} needs a network whose inputs are of "
            f"the data set {wanted!r}; they are of {there}"
        )
    return inputs


def _given(model: Network, rows: SparseDataset) -> Any:
    """Rows as a network accepts them: by name of the input if it has several inputs."""
    features = model.num_features
    return dict.fromkeys(features, rows) if isinstance(features, dict) else rows


def _ranked(command: Predict, network: Definition) -> LayerDefinition:
    if network.ranked is None:
        raise ValueError(
            f"{command.network}: the network has no layer of kind Output; -l names a "
            "layer to write"
        )
    return network.ranked


def _check_width(path: str, names: Names, layer: LayerDefinition) -> None:
    if len(names) > layer.units:
        raise DataError.at(
            path,
            f"holds {len(names):,} features, but the layer {layer.name!r} has "
            f"{layer.units:,} units",
        )
