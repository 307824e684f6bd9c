"""DSSTNE's NetCDF files of trained networks.

In a file, everything except arrays is an attribute of the root: settings of the network, of
layer
`i` as `layer{i}_...`, of weights `i` as `weight{i}_...`. Arrays are the variables
`weight{i}_weights`, `weight{i}_bias`, and four for each layer with batch normalization.
Files have no state of the update rule, number of epochs, or names of features.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import Any

import h5netcdf
import h5py
import numpy as np

from sparsejax.data.files.opening import DataError, Path
from sparsejax.dsstne.definition import (
    VERSION,
    Definition,
    DeltaBoost,
    Pair,
    ScaledMargins,
)
from sparsejax.dsstne.hdf5 import File, opened
from sparsejax.dsstne.layer_definition import (
    MAX_LAYERS,
    Activation,
    Connection,
    LayerDefinition,
    LocalResponseNormalization,
    Sharing,
    SparsenessPenalty,
    WeightInit,
    num_biases,
    weight_shape,
)
from sparsejax.whole_files import check_writable, whole_file

# Names of choices, each at the position that is its number in DSSTNE's files.
_KINDS = ("Input", "Hidden", "Output", "Target")
_TYPES = ("FullyConnected", "Convolutional", "Pooling")
_FUNCTIONS = (
    *(None, "Max", "Average", "LRN", "Maxout", "DotProduct", "Cosine"),
    *("Stochastic", "LCN", "GlobalTemporal"),
)
_ACTIVATIONS = (
    *("Sigmoid", "Tanh", "RELU", "Linear", "PRelu", "SoftPlus", "SoftSign", "SoftMax"),
    *("RELUMax", "LinearMax", "ELU", "LRELU", "SELU"),
)
_SCHEMES = (
    *("Xavier", "CaffeXavier", "Gaussian", "Uniform", "UnitBall", "Constant", "SELU"),
)
_ERRORS = (
    *("L1", "L2", "CrossEntropy", "ScaledMarginalCrossEntropy"),
    *("DataScaledMarginalCrossEntropy", "Hinge", "L2Hinge"),
)
_NETWORK_KINDS = ("FeedForward", "AutoEncoder")
_REFUSED = ("Target", *_FUNCTIONS[7:], "PRelu", "RELUMax", "LinearMax")
_SPARSE, _DENOISING, _BATCH_NORMALIZATION = 1, 2, 4
_AXES = ("x", "y", "z", "w")
_TRAINING = "sparsejax_training"


@dataclasses.dataclass(frozen=True, eq=False)
class Normalization:
    """Batch normalization of a layer: arrays `[units]`, or `[channels]` for a convolution.

    Attributes:
      scale: factor of the normalised sums.
      bias: number that is then added to the sums.
      mean: running mean of the sums.
      variance: running variance of the sums.
    """

    scale: np.ndarray
    bias: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a network.

    Weights and biases belong to a pair of layers: the names of the source, and of the layer
    that reads it.

    Attributes:
      weights: `[in, out]` float32, or `[out, in, z, y, x]` for a convolution (as many of
        z, y, x as its kernel has). Shared weights are listed under their owner only.
      biases: `[out]` float32. The biases of all sources of a layer are added.
      normalizations: arrays of the layers that have batch normalization, by name.
    """

    weights: Mapping[Pair, np.ndarray]
    biases: Mapping[Pair, np.ndarray]
    normalizations: Mapping[str, Normalization] = dataclasses.field(
        default_factory=dict
    )


def load_parameters(path: Path) -> tuple[Definition, Parameters]:
    """Reads a network file.

    Raises:
      DataError: the file is missing, damaged or wrong; the message names the attribute or
        the variable.
      NotImplementedError: the network has a function that DSSTNE names, but does not
        implement.
    """
    with opened(path, "network") as file:
        reader = _Reader(file)
        try:
            connections = reader.connections()
            definition = reader.definition(connections)
        except DataError:
            raise
        except ValueError as error:
            raise DataError.at(path, str(error)) from error
        return definition, reader.parameters(definition, connections)


def training_of(path: Path) -> str:
    """The text about a network's training that was passed to `save_parameters`, or "".

    Raises:
      DataError: the file is missing or damaged.
    """
    with opened(path, "network") as file:
        return file.text(_TRAINING) if file.has_attribute(_TRAINING) else ""


def save_parameters(
    path: Path, network: Definition, parameters: Parameters, *, training: str = ""
) -> None:
    """Writes a network file that DSSTNE can load, whole or not at all.

    Args:
      path: the file.
      network: the layers.
      parameters: the parameters of the layers.
      training: text about the training, which `training_of` returns. DSSTNE reads no
        attribute of this name.

    Raises:
      OSError: the file cannot be written; no partial file is left.
      ValueError: an array is missing, not finite, or has another shape.
    """
    check_writable(path)
    # The file is written in memory first, because HDF5 ends the process if the disk is full.
    image = io.BytesIO()
    with h5netcdf.File(image, "w") as file:
        _Writer(file).network(network, parameters)
        if training:
            _Writer(file).text(_TRAINING, training)
    with whole_file(path) as out:
        out.write(image.getbuffer())


@dataclasses.dataclass(frozen=True)
class _Reader:
    file: File

    def choice(self, name: str, choices: tuple[Any, ...]) -> Any:
        number = self.file.count(name)
        if number >= len(choices):
            raise self.file.error(
                f"{name} is {number}; known are 0 to {len(choices) - 1}"
            )
        if choices[number] in _REFUSED:
            raise NotImplementedError(
                f"{self.file.path}: {name} is {number} ({choices[number]}): DSSTNE has a "
                "name for it, but no formula"
            )
        return choices[number]

    def function(self, name: str, type: str) -> str | None:
        """The function of a pooling layer. For other layers a file may lack this attribute."""
        is_needed = type == "Pooling" or self.file.has_attribute(name)
        return self.choice(name, _FUNCTIONS) if is_needed else _FUNCTIONS[0]

    def count(self, name: str) -> int:
        """A number of layers, weights or sources; raises an error if it is above the limit."""
        count = self.file.count(name)
        if count > MAX_LAYERS:
            raise self.file.error(
                f"{name} is {count:,}; at most {MAX_LAYERS:,} are read"
            )
        return count

    def sizes(
        self, prefix: str, count: int, axes: tuple[str, ...], *, at_least: int = 1
    ) -> tuple[int, ...]:
        names = [f"{prefix}{axis}" for axis in axes]
        if not 1 <= count <= len(names):
            raise self.file.error(
                f"{prefix}: {count} dimensions; expected 1 to {len(names)}"
            )
        return tuple(self.file.count(name, at_least=at_least) for name in names[:count])

    def optional(self, name: str) -> float:
        return self.file.number(name) if self.file.has_attribute(name) else 0.0

    def definition(self, connections: Mapping[Pair, tuple[int, Connection]]):
        file = self.file
        layers = [self.layer(i, connections) for i in range(self.count("layers"))]
        penalty = SparsenessPenalty()
        if file.count("bSparsenessPenalty"):
            penalty = SparsenessPenalty(
                p=file.number("sparsenessPenalty_p"),
                beta=file.number("sparsenessPenalty_beta"),
            )
        return Definition(
            layers=tuple(layers),
            name=file.text("name", may_be_empty=True),
            kind=self.choice("kind", _NETWORK_KINDS),
            error_function=self.choice("errorFunction", _ERRORS),
            shuffle_indices=bool(file.count("ShuffleIndices")),
            denoising=file.number("denoising_p") if file.count("bDenoising") else 0.0,
            sparseness_penalty=penalty,
            delta_boost=DeltaBoost(
                one=file.number("deltaBoost_one"), zero=file.number("deltaBoost_zero")
            ),
            margins=ScaledMargins(
                one_target=file.number("SMCE_oneTarget"),
                zero_target=file.number("SMCE_zeroTarget"),
                one_scale=file.number("SMCE_oneScale"),
                zero_scale=file.number("SMCE_zeroScale"),
            ),
            lrn=LocalResponseNormalization(
                k=file.number("LRN_k"),
                n=file.count("LRN_n", at_least=1),
                alpha=file.number("LRN_alpha"),
                beta=file.number("LRN_beta"),
            ),
            maxout_k=file.count("maxout_k"),
            decay=self.optional("decay"),
        )

    def layer(
        self, i: int, connections: Mapping[Pair, tuple[int, Connection]]
    ) -> LayerDefinition:
        file, at = self.file, f"layer{i}_"
        name = file.text(f"{at}name")
        kind = self.choice(f"{at}kind", _KINDS)
        type = self.choice(f"{at}type", _TYPES)
        attributes = file.count(f"{at}attributes")
        windows = file.count(f"{at}kernelDimensions")
        sources = [
            file.text(f"{at}source{j}") for j in range(self.count(f"{at}sources"))
        ]
        own = SparsenessPenalty(
            p=self.optional(f"{at}sparsenessPenalty_p"),
            beta=self.optional(f"{at}sparsenessPenalty_beta"),
        )
        layer = LayerDefinition(
            name=name,
            kind=kind,
            type=type,
            size=self.sizes(f"{at}N", file.count(f"{at}dimensions"), _AXES),
            dataset=file.text(f"{at}dataSet", may_be_empty=True),
            sparse=bool(attributes & _SPARSE),
            denoising=bool(attributes & _DENOISING),
            dropout=file.number(f"{at}pDropout"),
        )
        if kind == "Input":
            return layer
        if type != "Pooling":
            for source in sources:
                if (source, name) not in connections:
                    raise file.error(
                        f"there are no weights from {source!r} to {name!r}"
                    )
        activation = None
        if type != "Pooling":
            activation = Activation(
                name=self.choice(f"{at}activation", _ACTIVATIONS),
                slope=file.number(f"{at}RELUSlope"),
                elu_alpha=file.number(f"{at}ELUAlpha"),
                selu_lambda=file.number(f"{at}SELULambda"),
            )
        axes = tuple(axis.upper() for axis in _AXES[:3])
        windowed = windows if type != "FullyConnected" else 1
        return dataclasses.replace(
            layer,
            sources=tuple(
                connections[source, name][1]
                if type != "Pooling"
                else Connection(layer=source)
                for source in sources
            ),
            skips=tuple(
                file.text(f"{at}skip{j}") for j in range(self.count(f"{at}skips"))
            ),
            activation=activation,
            weight_init=WeightInit(
                scheme=self.choice(f"{at}weightInit", _SCHEMES),
                scale=file.number(f"{at}weightInitScale"),
                bias=file.number(f"{at}biasInit"),
            ),
            delta_norm=file.number(f"{at}deltaNorm"),
            batch_normalization=bool(attributes & _BATCH_NORMALIZATION),
            sparseness_penalty=own if kind == "Hidden" and own.p + own.beta else None,
            function=self.function(f"{at}poolingfunction", type),
            kernel=self.sizes(f"{at}kernel", windowed, axes),
            stride=self.sizes(f"{at}kernelStride", windowed, axes),
            padding=self.sizes(f"{at}kernelPadding", windowed, axes, at_least=0),
        )

    def connections(self) -> dict[Pair, tuple[int, Connection]]:
        """For each pair of layers: the number of its weights, and its connection."""
        file, found = self.file, {}
        for i in range(self.count("weights")):
            at = f"weight{i}_"
            pair = file.text(f"{at}inputLayer"), file.text(f"{at}outputLayer")
            if pair in found:
                raise file.error(f"{at}inputLayer: there are weights of {pair} already")
            shared = None
            if file.count(f"{at}bShared"):
                shared = Sharing(
                    source_input=file.text(f"{at}sourceInputLayer"),
                    source_output=file.text(f"{at}sourceOutputLayer"),
                    transposed=bool(file.count(f"{at}bTransposed")),
                )
            found[pair] = (
                i,
                Connection(
                    layer=pair[0],
                    weight_norm=self.optional(f"{at}norm"),
                    locked=bool(self.optional(f"{at}bLocked")),
                    shared=shared,
                ),
            )
        return found

    def parameters(
        self, network: Definition, connections: Mapping[Pair, tuple[int, Connection]]
    ) -> Parameters:
        weights, biases, normalizations = {}, {}, {}
        for i, layer in enumerate(network.layers):
            if layer.batch_normalization:
                normalizations[layer.name] = Normalization(
                    *(
                        self.array(f"layer{i}_{name}BN", (num_biases(layer),))
                        for name in _OF_NORMALIZATION
                    )
                )
            if not layer.has_weights:
                continue
            for source in layer.sources:
                pair = source.layer, layer.name
                at = f"weight{connections[pair][0]}_"
                biases[pair] = self.array(f"{at}bias", (num_biases(layer),))
                if source.shared is None:
                    shape = weight_shape(network.layer(source.layer), layer)
                    weights[pair] = self.array(f"{at}weights", shape)
        return Parameters(weights, biases, normalizations)

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = self.file.array(name)
        if array.size != math.prod(shape):
            raise self.file.error(
                f"{name} has {array.size:,} numbers, but the layers need "
                f"{' x '.join(map(str, shape))}"
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32, copy=False)
        if not np.isfinite(array).all():
            at = int(np.argmin(np.isfinite(array)))
            raise self.file.error(f"{name}[{at}] is {array[at]}")
        return array.reshape(shape)


_OF_NORMALIZATION = ("scale", "bias", "runningMean", "runningVariance")


@dataclasses.dataclass(frozen=True)
class _Writer:
    file: h5netcdf.File

    def text(self, name: str, text: str) -> None:
        if "\0" in text:
            raise ValueError(f"{name} is {text!r}, which cannot be written")
        data = text.encode()
        self.file.attrs[name] = np.bytes_(data) if data else h5py.Empty("S1")

    def attributes(self, kind: type, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.file.attrs[name] = kind(value)

    def array(self, name: str, dimension: str, array: Any, shape: tuple[int, ...]):
        array = np.ascontiguousarray(array, np.float32)
        if array.shape != shape or not np.isfinite(array).all():
            raise ValueError(
                f"{name}: expected finite numbers {' x '.join(map(str, shape))}, got "
                f"{' x '.join(map(str, array.shape))}"
            )
        if dimension not in self.file.dimensions:
            self.file.dimensions[dimension] = array.size
        self.file.create_variable(name, (dimension,), np.float32, data=array.ravel())

    def network(self, network: Definition, parameters: Parameters) -> None:
        penalty, lrn = network.sparseness_penalty, network.lrn
        boost, margins = network.delta_boost, network.margins
        pairs = [
            (layer, source)
            for layer in network.layers
            if layer.has_weights
            for source in layer.sources
        ]
        self.text("name", network.name)
        self.text("checkpoint_name", "checkpoint")
        self.attributes(
            np.float32,
            {
                "version": VERSION,
                "decay": network.decay,
                "LRN_k": lrn.k,
                "LRN_alpha": lrn.alpha,
                "LRN_beta": lrn.beta,
                "sparsenessPenalty_p": penalty.p,
                "sparsenessPenalty_beta": penalty.beta,
                "denoising_p": network.denoising,
                "deltaBoost_one": boost.one,
                "deltaBoost_zero": boost.zero,
                "SMCE_oneScale": margins.one_scale,
                "SMCE_zeroScale": margins.zero_scale,
                "SMCE_oneTarget": margins.one_target,
                "SMCE_zeroTarget": margins.zero_target,
            },
        )
        self.attributes(
            np.int32,
            {
                "maxout_k": network.maxout_k,
                "LRN_n": lrn.n,
                "checkpoint_interval": 0,
                "checkpoint_epochs": 0,
            },
        )
        self.attributes(
            np.uint32,
            {
                "kind": _NETWORK_KINDS.index(network.kind),
                "errorFunction": _ERRORS.index(network.error_function),
                "bSparsenessPenalty": penalty.beta > 0,
                "bDenoising": network.denoising > 0,
                "ShuffleIndices": network.shuffle_indices,
                "layers": len(network.layers),
                "weights": len(pairs),
            },
        )
        for i, layer in enumerate(network.layers):
            self.layer(i, layer)
            if layer.batch_normalization:
                self.normalization(i, layer, parameters)
        for i, (layer, source) in enumerate(pairs):
            self.weights(i, network.layer(source.layer), layer, source, parameters)

    def layer(self, i: int, layer: LayerDefinition) -> None:
        at = f"layer{i}_"
        self.text(f"{at}name", layer.name)
        self.text(f"{at}dataSet", layer.dataset)
        activation, init = layer.activation or Activation(), layer.weight_init
        penalty = layer.sparseness_penalty or SparsenessPenalty()
        windows = {
            f"{at}kernel{what}{axis.upper()}": [*values, fill, fill, fill][place]
            for what, values, fill in (
                ("", layer.kernel, 1),
                ("Stride", layer.stride, 1),
                ("Padding", layer.padding, 0),
            )
            for place, axis in enumerate(_AXES[:3])
        }
        self.attributes(
            np.uint32,
            {
                f"{at}kind": _KINDS.index(layer.kind),
                f"{at}type": _TYPES.index(layer.type),
                f"{at}poolingfunction": _FUNCTIONS.index(layer.function),
                **{
                    f"{at}N{axis}": [*layer.size, 1, 1, 1][place]
                    for place, axis in enumerate(_AXES)
                },
                f"{at}dimensions": len(layer.size),
                **windows,
                f"{at}kernelDimensions": len(layer.kernel),
                f"{at}weightInit": _SCHEMES.index(init.scheme),
                f"{at}activation": _ACTIVATIONS.index(activation.name),
                f"{at}attributes": _SPARSE * layer.sparse
                + _DENOISING * layer.denoising
                + _BATCH_NORMALIZATION * layer.batch_normalization,
                f"{at}sources": len(layer.sources),
                f"{at}skips": len(layer.skips),
            },
        )
        self.attributes(
            np.float32,
            {
                f"{at}pDropout": layer.dropout,
                f"{at}weightInitScale": init.scale,
                f"{at}biasInit": init.bias,
                f"{at}weightNorm": max(
                    (c.weight_norm for c in layer.sources), default=0
                ),
                f"{at}deltaNorm": layer.delta_norm,
                f"{at}sparsenessPenalty_p": penalty.p,
                f"{at}sparsenessPenalty_beta": penalty.beta,
                f"{at}RELUSlope": activation.slope,
                f"{at}ELUAlpha": activation.elu_alpha,
                f"{at}SELULambda": activation.selu_lambda,
            },
        )
        for j, source in enumerate(layer.sources):
            self.text(f"{at}source{j}", source.layer)
        for j, skip in enumerate(layer.skips):
            self.text(f"{at}skip{j}", skip)

    def normalization(
        self, i: int, layer: LayerDefinition, parameters: Parameters
    ) -> None:
        if layer.name not in parameters.normalizations:
            raise ValueError(f"layer {layer.name!r}: its normalization is missing")
        normalization = parameters.normalizations[layer.name]
        dimension, shape = f"layer{i}_bnDim", (num_biases(layer),)
        arrays = dataclasses.astuple(normalization)
        for name, array in zip(_OF_NORMALIZATION, arrays, strict=True):
            self.array(f"layer{i}_{name}BN", dimension, array, shape)

    def weights(
        self,
        i: int,
        before: LayerDefinition,
        layer: LayerDefinition,
        source: Connection,
        parameters: Parameters,
    ) -> None:
        at, pair = f"weight{i}_", (before.name, layer.name)
        shape = weight_shape(before, layer)
        self.text(f"{at}inputLayer", before.name)
        self.text(f"{at}outputLayer", layer.name)
        # In the file, the kernel's axes are: out, in, then the kernel's sizes in the order x, y,
        # z.
        sides = (*shape[:2], *reversed(shape[2:]), 1, 1, 1)
        if layer.type == "FullyConnected":
            sides = (shape[1], shape[0], 1, 1, 1)
        names = ("width", "height", "length", "depth", "breadth")
        self.attributes(
            np.uint64,
            {f"{at}{name}": side for name, side in zip(names, sides, strict=False)},
        )
        self.attributes(
            np.uint32,
            {f"{at}bShared": source.shared is not None, f"{at}bLocked": source.locked},
        )
        self.attributes(np.float32, {f"{at}norm": source.weight_norm})
        if source.shared is not None:
            self.attributes(np.uint32, {f"{at}bTransposed": source.shared.transposed})
            self.text(f"{at}sourceInputLayer", source.shared.source_input)
            self.text(f"{at}sourceOutputLayer", source.shared.source_output)
        self.of_pair(f"{at}bias", pair, parameters.biases, (num_biases(layer),))
        if source.shared is None:
            self.of_pair(f"{at}weights", pair, parameters.weights, shape)

    def of_pair(
        self,
        name: str,
        pair: Pair,
        arrays: Mapping[Pair, np.ndarray],
        shape: tuple[int, ...],
    ) -> None:
        if pair not in arrays:
            raise ValueError(f"{name}, from {pair[0]!r} to {pair[1]!r}, is missing")
        self.array(name, f"{name.replace('weights', 'weight')}Dim", arrays[pair], shape)
