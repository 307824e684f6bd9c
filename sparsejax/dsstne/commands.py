"""DSSTNE's commands as functions: `generateNetCDF`, `train` and `predict`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.data import SparseDataset
from sparsejax.data.files import DataError
from sparsejax.data.names import Names, quoted
from sparsejax.dsstne import rules
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows, check_fits
from sparsejax.dsstne.definition import Definition, weights_of
from sparsejax.dsstne.index_files import read_index, write_index
from sparsejax.dsstne.layer_definition import LayerDefinition
from sparsejax.dsstne.netcdf import load, save
from sparsejax.dsstne.network import Network, name_of, regularization
from sparsejax.dsstne.network_files import load_parameters, save_parameters
from sparsejax.dsstne.text import read_samples
from sparsejax.mesh import processes
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.prediction.recommend import recommend
from sparsejax.prediction.recommendations import Recommendations
from sparsejax.sparse import CSR
from sparsejax.training.checkpoint import Checkpoints
from sparsejax.training.fit import fit
from sparsejax.whole_files import check_writable, remove_folder, whole_text_file

INITIAL = "initial_network.nc"
# How often a checkpoint is saved from which `resume` can go on.
CHECKPOINT_SECONDS = 300
OPTIMIZERS = ("sgd", "momentum", "adagrad", "nesterov", "rmsprop", "adadelta", "adam")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """What `generateNetCDF` does. Attributes have the names of its flags in `cli`.

    Attributes:
      dataset: name of the data set.
      text: a text file of samples, or a folder of them.
      out: the NetCDF file to write.
      features: the index file of features.
      samples: the index file of samples. New samples are added to it.
      create: whether to make a new index of features.
      merge: whether to add new features to the index. Without both, they are left out.
      analog: whether entries have values.
    """

    dataset: str
    text: str
    out: str
    features: str
    samples: str
    create: bool = False
    merge: bool = False
    analog: bool = False


def generate(command: Generate) -> None:
    """Writes a text of samples as a NetCDF file, and the index files.

    Raises:
      DataError: a file is missing or wrong.
      OSError: a file cannot be written.
      ValueError: both `create` and `merge` are given.
    """
    if command.create and command.merge:
        raise ValueError("-c makes a new index and -m adds to one: give one of them")
    for path in (command.out, command.features, command.samples):
        check_writable(path)
    known = () if command.create else read_index(command.features)
    old = read_index(command.samples) if os.path.exists(command.samples) else ()
    found = read_samples(
        command.text,
        features=known,
        samples=old,
        new_features=command.create or command.merge,
        analog=command.analog,
    )
    dataset = found.dataset()
    # The indices first: an index without a file does no harm.
    if command.create or len(found.features) > len(known):
        write_index(command.features, found.features)
    if len(found.samples) > len(old):
        write_index(command.samples, found.samples)
    save(command.out, {command.dataset: dataset})
    print(
        f"{command.out}: {command.dataset}, {dataset.num_examples:,} examples, "
        f"{len(found.features):,} features, width {dataset.columns:,}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """What `train` does.

    Attributes:
      config: the network's JSON.
      inputs: a NetCDF file of data sets.
      outputs: another one.
      network: the network file to write, which must not exist.
      batch_size: examples of a step.
      epochs: passes over the data.
      alpha: learning rate.
      l2: DSSTNE's lambda, which adds `lambda w` to the gradient of a weight.
      l1: DSSTNE's lambda1, which adds `lambda1 sign(w)`.
      mu: of the optimizers that have it.
      mu1: of Adam.
      optimizer: one of `OPTIMIZERS`.
      seed: of the first weights, of noise and of the order.
      resume: whether to go on where a training of the same flags was stopped.
      mesh: such as "data=1,model=2". By default one device, or with several processes
        all devices along "model".
      validation: two files, like `inputs` and `outputs`, whose error is measured after
        each epoch.
      interval: after so many epochs alpha is multiplied by `multiplier`; 0 is never.
      multiplier: see `interval`.
      kept: beginning of the names of network files that are written on the way, in place
        of that of `network`.
      kept_epochs: how many epochs are between two of these files.
    """

    config: str
    inputs: str
    outputs: str
    network: str
    batch_size: int = 1024
    epochs: int = 40
    alpha: float = 0.025
    l2: float = 0.0001
    l1: float = 0.0
    mu: float = 0.5
    mu1: float = 0.0
    optimizer: str = "sgd"
    seed: int = 12134
    resume: bool = False
    mesh: str | None = None
    validation: tuple[str, str] | None = None
    interval: int = 0
    multiplier: float = 1.0
    kept: str | None = None
    kept_epochs: int = 10


def train(command: Train) -> None:
    """Trains a network and writes it, also before the first and after each tenth epoch.

    Raises:
      DataError: a file is missing or wrong.
      FileExistsError: the network file exists.
      FloatingPointError: the loss is not finite.
      ValueError: data and network do not fit each other.
    """
    # A training that is killed just before it ends has written its network.
    is_ending = command.resume and os.path.exists(checkpoints_of(command))
    if os.path.exists(command.network) and not is_ending:
        raise FileExistsError(
            f"{command.network}: already exists; remove it, or name another file"
        )
    for path in (command.network, INITIAL):
        check_writable(path)
    with _mesh(command.mesh):
        made(command).run()


def checkpoints_of(command: Train) -> str:
    """The folder of checkpoints, which is there until the training has ended."""
    return f"{command.network}.checkpoints"


def made(command: Train) -> Training:
    """The network and its data, before training."""
    data = _data_of(command.inputs, command.outputs)
    sizes = {name: dataset.size for name, dataset in data.items()}
    network = Definition.load(command.config, sizes)
    weights = sum(map(math.prod, weights_of(network).values()))
    check_fits(f"{command.config}: the weights", 4 * weights // jax.process_count())
    return Training(command, network, data)


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """What a network is trained or measured on.

    Attributes:
      inputs: as `fit` takes them.
      targets: as `fit` takes them.
      weights: of the examples, or None.
    """

    inputs: Any
    targets: Any
    weights: np.ndarray | None

    @classmethod
    def of(cls, network: Definition, data: Mapping[str, FileDataset]) -> Examples:
        sources = {
            name_of(layer): _of_layer(layer, data).examples()
            for layer in network.of_kind("Input")
        }
        inputs = network.of_kind("Input")
        alone = len(inputs) == 1 and inputs[0].sparse
        outputs = network.of_kind("Output")
        found = {name_of(layer): _of_layer(layer, data) for layer in outputs}
        first = _first_of_like(found)
        targets = {name: _targets(dataset) for name, dataset in found.items()}
        return cls(
            next(iter(sources.values())) if alone else sources,
            targets if len(outputs) > 1 else _targets(first),
            first.example_weights(),
        )


class Training:
    """A network with its data.

    Attributes:
      model: the network.
      optimizer: its optimizer.
      examples: what it is trained on.
      validation: what is measured after each epoch, or None.
    """

    def __init__(
        self, command: Train, network: Definition, data: Mapping[str, FileDataset]
    ):
        self.command = command
        layers = [
            dataclasses.replace(layer, sparse=_is_sparse(_of_layer(layer, data)))
            if layer.kind == "Input"
            else layer
            for layer in network.layers
        ]
        network = dataclasses.replace(network, layers=tuple(layers))
        outputs = network.of_kind("Output")
        target = _first_of_like({name_of(o): _of_layer(o, data) for o in outputs})
        [examples, *_] = [dataset.num_examples for dataset in data.values()]
        steps = -(-examples // command.batch_size)
        rule = rule_of(command, network.decay, command.interval * steps)
        self.model = Network(
            network,
            row_sparse=rule.row_sparse,
            dense_targets=not _is_sparse(target),
            weighted=target.weights is not None,
            ignore_zeros=target.ignore_zeros,
            brake_steps=steps * max(command.interval, 1),
            parameters=None
            if network.weights_data is None
            else load_parameters(network.weights_data)[1],
            rngs=nnx.Rngs(command.seed),
        )
        self.optimizer = Optimizer(self.model, rule)
        modules = (self.model, self.optimizer)
        nnx.update(modules, put_on_mesh(nnx.state(modules)))
        self.examples = Examples.of(network, data)
        # Of the last epoch. Only the first process, which prints, has it.
        self.error = math.nan
        self.validation = None
        if command.validation is not None:
            self.validation = Examples.of(network, _data_of(*command.validation))

    def run(self) -> None:
        """Trains, and writes the network files. All processes must call this."""
        command = self.command
        folder = checkpoints_of(command)
        may_differ = ("epochs", "resume", "mesh")
        identity = {n: v for n, v in vars(command).items() if n not in may_differ}
        network = repr(self.model.definition).encode()
        identity["what the config says"] = hashlib.sha256(network).hexdigest()[:16]
        if not command.resume:
            _remove(folder)
        if processes.is_true_anywhere(not os.path.exists(folder)):
            self.save(INITIAL)
        self.began = time.monotonic()
        try:
            fit(
                self.model,
                self.optimizer,
                self.examples.inputs,
                self.examples.targets,
                weights=self.examples.weights,
                batch_size=command.batch_size,
                num_epochs=command.epochs,
                seed=command.seed,
                shuffle=self.model.definition.shuffle_indices,
                checkpoint_dir=Checkpoints(folder, identity=identity),
                checkpoint_seconds=CHECKPOINT_SECONDS,
                resume=command.resume,
                log=self.note,
                after_epoch=self.end_epoch,
            )
            self.save(command.network)
        except FloatingPointError:  # after others, `-resume` can go on
            _remove(folder)
            raise
        _remove(folder)

    def note(self, step: int, entry: Mapping[str, float]) -> None:
        """Remembers the error of an epoch."""
        self.error = entry["loss"]

    def end_epoch(self, epoch: int) -> None:
        """Prints how an epoch went, and keeps every tenth network."""
        command, measured = self.command, None
        self.optimizer.flush(self.model)
        penalty = regularization(self.model, l2=command.l2, l1=command.l1)
        now = time.monotonic()
        if (found := self.validation) is not None:
            measured = self.model.mean_loss(
                found.inputs,
                found.targets,
                weights=found.weights,
                batch_size=command.batch_size,
            )
        print(
            f"NNNetwork::Train: Epoch {epoch}, average error {self.error + penalty:f}, "
            f"average training error {self.error:f}, average regularization error "
            f"{penalty:f}, elapsed time {now - self.began:f}s",
            flush=True,
        )
        if measured is not None:
            print(
                f"NNNetwork::Validate: Epoch {epoch}, average validation error "
                f"{measured:f}",
                flush=True,
            )
        self.began = time.monotonic()
        if epoch % command.kept_epochs == 0:
            self.save(f"{command.kept or command.network}{epoch}.nc")

    def save(self, path: str) -> None:
        """Writes the network as it is now."""
        definition, parameters = self.model.definition, self.model.parameters()
        processes.in_first(lambda: save_parameters(path, definition, parameters))


def _remove(folder: str) -> None:
    processes.in_first(lambda: remove_folder(folder))


def rule_of(command: Train, decay: float, steps: int = 0) -> rules.DsstneRule:
    """The update rule that the flags describe.

    Args:
      command: the flags.
      decay: the network's `Decay`.
      steps: of an interval, see `Decay`.
    """
    rate: Any = command.alpha
    if decay or steps:
        rate = rules.Decay(command.alpha, decay, command.multiplier, steps)
    penalties = {"weight_decay": command.l2, "l1": command.l1}
    mu, mu1 = command.mu, command.mu1
    match command.optimizer:
        case "sgd":
            return rules.SGD(rate, **penalties)
        case "momentum":
            return rules.Momentum(rate, mu=mu, **penalties)
        case "nesterov":
            return rules.Nesterov(rate, mu=mu, **penalties)
        case "adagrad":
            return rules.AdaGrad(rate, **penalties)
        case "rmsprop":
            return rules.RMSProp(rate, mu=mu, **penalties)
        case "adadelta":
            return rules.AdaDelta(mu=mu, **penalties)
        case "adam":
            return rules.Adam(rate, mu=mu, mu1=mu1, **penalties)
    known = ", ".join(OPTIMIZERS)
    raise ValueError(f"-optimizer {command.optimizer} is unknown; known: {known}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """What `predict` does.

    Attributes:
      dataset: name of the data set, without `_input`.
      network: the network file.
      inputs: the index file of the input's features.
      outputs: the index file of the output's features.
      text: samples, a text file or a folder of them.
      filters: features of samples that are not recommended, in the same form; it may be
        an empty file.
      out: the file to write.
      batch_size: samples at a time.
      k: how many recommendations.
      precision: how a score is printed, as C's printf has it.
      analog: whether the text has values.
      multiply: whether scores are multiplied with the filters' values, as DSSTNE did, and
        nothing is left out. A value that is missing is 0.
      layer: write the units of this layer, in place of recommendations.
      mesh: such as "data=1,model=2". By default one device, or with several processes
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

    Of a layer it writes `sample<TAB>1.0 2.0 ...`, which `knn-search` reads.

    Raises:
      DataError: a file is missing or wrong.
      FloatingPointError: a score is NaN.
      OSError: the file cannot be written; nothing is left behind.
      ValueError: the files do not fit each other.
    """
    check_writable(command.out)
    try:
        format(0.5, command.precision)
    except ValueError as error:
        raise ValueError(
            f"-p {command.precision} is no format of a number, such as 4.3f"
        ) from error
    network, parameters = load_parameters(command.network)
    features, items = read_index(command.inputs), read_index(command.outputs)
    layer = _input_layer(command, network)
    _check_width(command.inputs, features, layer)
    _check_width(command.outputs, items, network.of_kind("Output")[0])
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
    network = dataclasses.replace(
        network,
        layers=tuple(
            dataclasses.replace(other, sparse=True) if other == layer else other
            for other in network.layers
        ),
    )
    with _mesh(command.mesh):
        model = Network(network, parameters=parameters, rngs=nnx.Rngs(0))
        nnx.update(model, put_on_mesh(nnx.state(model)))
        if command.layer is not None:
            units = model.units(rows, command.layer, batch_size=command.batch_size)
            processes.in_first(lambda: _write_units(command, units, found.samples))
            return
        model.rank_first(len(items))
        if command.multiply:
            best = _multiplied(command, model, rows, filters, len(items))
        else:
            best = recommend(
                model,
                rows,
                command.k,
                exclude=filters.astype(bool),
                batch_size=command.batch_size,
            )
    processes.in_first(lambda: _write(command, found.samples, best, items))


def _write_units(command: Predict, units: np.ndarray, samples: Names) -> None:
    with whole_text_file(command.out) as file:
        for sample, values in zip(samples.tolist(), units, strict=True):
            texts = (format(float(value), command.precision) for value in values)
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
                f"{name},{format(float(score), command.precision)}:"
                for name, score in zip(names, scores, strict=False)
            )
            file.write(f"{sample}\t{entries}\n")


def _filters(command: Predict, samples: Names, items: Names) -> scipy.sparse.csr_array:
    """`[samples, items]`: the values of the filters; if they only leave out, each is 1."""
    shape = (len(samples), len(items))
    is_file = os.path.isfile(command.filters)
    if command.filters == os.devnull or (
        is_file and not os.stat(command.filters).st_size
    ):
        return scipy.sparse.csr_array(shape)
    with warnings.catch_warnings():
        # A sample needs no filter, and a filter may have other samples.
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
    items: int,
) -> Recommendations:
    """The best after scores were multiplied with the filters' values."""
    assert model.output_layer is not None
    output, count = model.output_layer.name, rows.num_rows
    ids = np.full((count, command.k), -1, np.int32)
    best = np.full((count, command.k), -np.inf, np.float32)
    most = min(command.k, items)
    for start in range(0, count, command.batch_size):
        some = slice(start, start + command.batch_size)
        batch = rows.align_rows(rows.row_names[some])
        scores = model.units(batch, output, batch_size=command.batch_size)[:, :items]
        part = scipy.sparse.coo_array(filters[some])
        np.multiply.at(scores, part.coords, part.data.astype(np.float32))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :most]
        ids[some, :most] = order
        best[some, :most] = np.take_along_axis(scores, order, axis=1)
    return Recommendations(ids, best)


def _input_layer(command: Predict, network: Definition) -> LayerDefinition:
    inputs, wanted = network.of_kind("Input"), f"{command.dataset}_input"
    if len(inputs) != 1 or inputs[0].dataset != wanted:
        there = ", ".join(repr(layer.dataset) for layer in inputs)
        raise ValueError(
            f"{command.network}: -d {command.dataset} needs a network with one input, of "
            f"the data set {wanted!r}; its inputs are of {there}"
        )
    if not network.of_kind("Output"):
        raise ValueError(f"{command.network}: the network has no layer of kind Output")
    return inputs[0]


def _check_width(path: str, names: Names, layer: LayerDefinition) -> None:
    if len(names) > layer.units:
        raise DataError.at(
            path,
            f"holds {len(names):,} features, but the layer {layer.name!r} has "
            f"{layer.units:,} units",
        )


def _mesh(text: str | None) -> contextlib.AbstractContextManager[Any]:
    """The mesh of `-mesh`. By default several processes divide weights, as DSSTNE's do."""
    if text is None and not processes.is_joined():
        return contextlib.nullcontext()
    text = text or f"model={jax.device_count()}"
    try:
        return jax.set_mesh(processes.mesh_of(text))
    except ValueError as error:
        raise ValueError(str(error).replace("--mesh", "-mesh")) from error


def _data_of(inputs: str, outputs: str) -> dict[str, FileDataset]:
    """The data sets of both files, by name.

    Raises:
      DataError: both have a data set of the same name, or another number of examples.
    """
    data = load(inputs)
    if pathlib.Path(outputs).resolve() == pathlib.Path(inputs).resolve():
        others: dict[str, FileDataset] = {}
    else:
        others = load(outputs)
    twice = sorted(data.keys() & others.keys())
    if twice:
        raise DataError.at(
            outputs,
            f"has the data set {twice[0]!r}, which {inputs} has too",
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


def _is_sparse(dataset: FileDataset) -> bool:
    return isinstance(dataset.rows, SparseRows | Classes)


def _of_layer(layer: LayerDefinition, data: Mapping[str, FileDataset]) -> FileDataset:
    """The data set of a layer, as wide as the layer.

    Raises:
      ValueError: there is none, or its size does not fit.
    """
    if layer.dataset not in data:
        raise ValueError(
            f"layer {layer.name!r} reads the data set {layer.dataset!r}; the files have "
            f"{quoted(list(data))}"
        )
    dataset = data[layer.dataset]
    if dataset.columns == layer.units:
        return dataset
    if _is_sparse(dataset) and len(dataset.size) == len(layer.size) == 1:
        return dataclasses.replace(dataset, size=layer.size)
    raise ValueError(
        f"layer {layer.name!r} has {layer.units:,} units, but its data set "
        f"{layer.dataset!r} has {dataset.columns:,} columns"
    )


def _first_of_like(targets: Mapping[str, FileDataset]) -> FileDataset:
    """The first of the outputs' data sets, by their names. They have the same kind.

    Raises:
      ValueError: there is none: the network has no output.
      NotImplementedError: they are of different kinds.
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
        elif _is_sparse(first) != _is_sparse(other):
            what = "whether they are sparse"
        else:
            continue
        raise NotImplementedError(
            f"the data sets of the outputs {quoted(list(targets))} differ in {what}; "
            "make them alike"
        )
    return first


def _targets(dataset: FileDataset) -> CSR | scipy.sparse.csr_array:
    """What `fit` takes as targets. A dense data set has a label wherever it is not 0."""
    found = dataset.examples(target=True)
    if isinstance(found, CSR):
        return found
    return scipy.sparse.csr_array(found.reshape(len(found), -1))
