"""DSSTNE's network language: a network as frozen dataclasses, and its JSON.

Defaults are the defaults of DSSTNE's parser. Sizes that DSSTNE takes from data or from
other layers are computed when a `Definition` is made, so that it has all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import graphlib
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.dsstne.keys import Keys, parse
from sparsejax.dsstne.layer_definition import (
    LayerDefinition,
    LocalResponseNormalization,
    SparsenessPenalty,
    check_layer,
    check_layer_numbers,
    check_lrn,
    check_penalty,
    check_range,
    label_of,
    reads,
    times,
    weight_shape,
)
from sparsejax.dsstne.layer_json import drafts_of, layer_to_json, read_penalty
from sparsejax.dsstne.sizes import check_size, sized

VERSION = 0.9  # DSSTNE's last
OLDEST_VERSION = 0.7

ERROR_FUNCTIONS = (
    "L1",
    "L2",
    "L2Hinge",
    "Hinge",
    "CrossEntropy",
    "ScaledMarginalCrossEntropy",
    "DataScaledMarginalCrossEntropy",
)

# The names of the two layers that a matrix of weights connects: source, then layer.
Pair = tuple[str, str]

_NETWORK_KEYS = {
    "Version": (),
    "Name": (),
    "Kind": (),
    "WeightsData": (),
    "LocalResponseNormalization": ("LRN",),
    "Maxout": (),
    "SparsenessPenalty": (),
    "Denoising": (),
    "DeltaBoost": (),
    "ScaledMarginalCrossEntropy": ("DataScaledMarginalCrossEntropy",),
    "ShuffleIndices": (),
    "RELUSlope": ("Slope",),
    "ELUAlpha": (),
    "SELULambda": (),
    "Decay": (),
    "ErrorFunction": (),
    "Layers": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaBoost:
    """Factors of the gradients at outputs with a label (one) and without (zero)."""

    one: float = 1.0
    zero: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMargins:
    """Thresholds and weights of the two scaled marginal cross-entropies."""

    one_target: float = 0.9
    zero_target: float = 0.1
    one_scale: float = 1.0
    zero_scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """A network of DSSTNE.

    >>> source = '{"Layers": [{"N": 4}, {"N": 2}, {"N": 4}]}'
    >>> Definition.from_json(parse(source)).layer("Hidden1").activation.name
    'Sigmoid'

    Attributes:
      layers: layers in the order of the file; a layer may read a later one.
      name: name of the network.
      kind: "FeedForward" or "AutoEncoder", which are treated alike.
      error_function: one of `ERROR_FUNCTIONS`, for all outputs.
      shuffle_indices: whether each epoch has another order of examples.
      denoising: probability of dropping an entry of an input in training.
      sparseness_penalty: penalty of hidden layers that are `sparse`, if beta > 0.
      delta_boost: factors of the gradients at outputs.
      margins: thresholds and weights of the scaled marginal cross-entropies.
      lrn: settings of layers with the function LRN.
      maxout_k: a setting that DSSTNE stores and never reads.
      decay: step t has the learning rate alpha / (1 + decay (t - 1)).
      weights_data: network file with the initial weights.

    Raises:
      ValueError: layers do not fit each other; the message names the layer. See also
        `check_numbers`.
    """

    layers: tuple[LayerDefinition, ...]
    name: str = ""
    kind: str = "FeedForward"
    error_function: str = "CrossEntropy"
    shuffle_indices: bool = True
    denoising: float = 0.0
    sparseness_penalty: SparsenessPenalty = dataclasses.field(
        default_factory=SparsenessPenalty
    )
    delta_boost: DeltaBoost = DeltaBoost()
    margins: ScaledMargins = ScaledMargins()
    lrn: LocalResponseNormalization = dataclasses.field(
        default_factory=LocalResponseNormalization
    )
    maxout_k: int = 2
    decay: float = 0.0
    weights_data: str | None = None

    def __post_init__(self) -> None:
        _check_network(self)
        order = _order({layer.name: reads(layer) for layer in self.layers})
        layers = {layer.name: layer for layer in self.layers}
        for name in order:
            check_layer(layers[name])
            check_size(layers[name], layers)
        _check_shared(self.layers)

    def layer(self, name: str) -> LayerDefinition:
        """The layer of this name.

        Raises:
          KeyError: no layer has this name.
        """
        if (layer := self._by_name.get(name)) is not None:
            return layer
        raise KeyError(
            f"there is no layer {name!r}; there are "
            f"{', '.join(layer.name for layer in self.layers)}"
        )

    @functools.cached_property
    def _by_name(self) -> dict[str, LayerDefinition]:
        return {layer.name: layer for layer in self.layers}

    def of_kind(self, kind: str) -> tuple[LayerDefinition, ...]:
        """The layers of one of `KINDS`, in order."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    @property
    def in_order(self) -> tuple[LayerDefinition, ...]:
        """The layers, sorted so that each comes after the layers that it reads."""
        order = _order({layer.name: reads(layer) for layer in self.layers})
        return tuple(map(self.layer, order))

    @property
    def ranked(self) -> LayerDefinition | None:
        """The output whose items are ranked: the one named "Output", otherwise the first."""
        outputs = self.of_kind("Output")
        named = [layer for layer in outputs if layer.name == "Output"]
        return next(iter([*named, *outputs]), None)

    def with_inputs(self, sparse: Mapping[str, bool]) -> Definition:
        """This network with other values of `sparse` for some inputs, by the inputs' names."""
        layers = tuple(
            dataclasses.replace(layer, sparse=sparse.get(layer.name, layer.sparse))
            if layer.kind == "Input"
            else layer
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)

    def penalty_of(self, layer: LayerDefinition) -> SparsenessPenalty | None:
        """The sparseness penalty of a layer; None if it has none."""
        ours, own = self.sparseness_penalty, layer.sparseness_penalty
        if layer.kind != "Hidden" or not layer.sparse or ours.beta == 0:
            return None
        own = own or SparsenessPenalty()
        return SparsenessPenalty(p=own.p or ours.p, beta=own.beta or ours.beta)

    def check_numbers(self) -> None:
        """Raises ValueError if a number that only training needs is out of its range.

        A trained network with such numbers can still compute its units.
        """
        margins, boost = self.margins, self.delta_boost
        check_range("the network", "Denoising p", self.denoising, 0, 1, below=True)
        check_range("the network", "Decay", self.decay, 0)
        for name in ("one", "zero"):
            check_range("the network", f"DeltaBoost {name}", getattr(boost, name), 0)
            target, scale = f"{name}_target", f"{name}_scale"
            check_range("the network", _camel(target), getattr(margins, target), 0, 1)
            check_range("the network", _camel(scale), getattr(margins, scale), 0)
        check_penalty("the network", self.sparseness_penalty)
        for layer in self.layers:
            check_layer_numbers(layer)

    def check_data(self, data: Mapping[str, Sequence[int]]) -> None:
        """Raises ValueError if a data set is wider than its layer.

        Args:
          data: `(width, height, length)` of each data set by name, or the first of these numbers.
        """
        for layer in self.layers:
            shape = tuple(data.get(layer.dataset, ()))
            pairs = itertools.zip_longest(shape, layer.size, fillvalue=1)
            if shape and any(wide > size for wide, size in pairs):
                raise ValueError(
                    f"{label_of(layer)}: its data set {layer.dataset!r} is "
                    f"{times(shape)}, wider than the layer, which is "
                    f"{times(layer.size)}"
                )

    @classmethod
    def from_json(
        cls, document: object, data: Mapping[str, Sequence[int]] | None = None
    ) -> Definition:
        """Makes a network from a JSON object, written by `to_json` or by a person.

        Args:
          document: the object that `parse` returns.
          data: `(width, height, length)` of each data set by name; length and height may be
            missing. Needed for layers with `"N": "auto"`, and compared with the other layers.

        Raises:
          ValueError: a key is unknown, or DSSTNE does not accept a value; the message
            names the layer and the key.
          NotImplementedError: DSSTNE names the function or layer, but does not
            implement it.
        """
        data = {} if data is None else data
        network = Keys(document, _NETWORK_KEYS, "the network")
        _check_version(network.number("Version", VERSION))
        drafts = drafts_of(network, data)
        order = _order({name: reads(d) for name, d in drafts.items()})
        layers: dict[str, LayerDefinition] = {}
        for name in order:
            layers[name] = sized(drafts[name], layers)
        boost = network.inner("DeltaBoost", ("one", "zero"))
        lrn = network.inner("LocalResponseNormalization", ("k", "n", "alpha", "beta"))
        definition = cls(
            layers=tuple(layers[name] for name in drafts),
            name=network.text("Name", ""),
            kind=network.choice("Kind", ("FeedForward", "AutoEncoder"), "FeedForward"),
            error_function=network.choice(
                "ErrorFunction", ERROR_FUNCTIONS, "CrossEntropy"
            ),
            shuffle_indices=network.flag("ShuffleIndices", True),
            denoising=network.inner("Denoising", ("p",)).number("p", 0.0),
            sparseness_penalty=read_penalty(network) or SparsenessPenalty(),
            delta_boost=DeltaBoost(
                one=boost.number("one", 1.0), zero=boost.number("zero", 1.0)
            ),
            margins=_margins(network),
            lrn=LocalResponseNormalization(
                k=lrn.number("k", 2.0),
                n=lrn.whole("n", 5),
                alpha=lrn.number("alpha", 1e-4),
                beta=lrn.number("beta", 0.75),
            ),
            maxout_k=network.inner("Maxout", ("k",)).whole("k", 2),
            decay=network.number("Decay", 0.0),
            weights_data=network.text("WeightsData", None),
        )
        definition.check_numbers()
        definition.check_data(data)
        return definition

    @classmethod
    def load(
        cls, path: str | pathlib.Path, data: Mapping[str, Sequence[int]] | None = None
    ) -> Definition:
        """Reads a JSON file; see `from_json`. Errors name the file."""
        try:
            text = pathlib.Path(path).read_bytes().decode("utf-8-sig")
            return cls.from_json(parse(text), data)
        except (ValueError, NotImplementedError) as error:
            kind = ValueError if isinstance(error, ValueError) else NotImplementedError
            raise kind(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The network as a JSON object that DSSTNE can read; default values are omitted.

        Raises:
          ValueError: JSON has no key for a setting: a locked connection, or connections of one
            layer with different norms.
        """
        document: dict[str, Any] = {"Version": VERSION, "Name": self.name}
        document["Kind"] = self.kind
        written = {
            "SparsenessPenalty": self.sparseness_penalty,
            "DeltaBoost": self.delta_boost,
            "ScaledMarginalCrossEntropy": self.margins,
            "LocalResponseNormalization": self.lrn,
        }
        for key, value in written.items():
            if value != type(value)():
                document[key] = {
                    _camel(name): number
                    for name, number in dataclasses.asdict(value).items()
                }
        if self.denoising:
            document["Denoising"] = {"p": self.denoising}
        if self.maxout_k != 2:
            document["Maxout"] = {"k": self.maxout_k}
        if self.decay:
            document["Decay"] = self.decay
        if self.weights_data is not None:
            document["WeightsData"] = self.weights_data
        document["ShuffleIndices"] = self.shuffle_indices
        document["ErrorFunction"] = self.error_function
        document["Layers"] = [
            layer_to_json(layer, denoised=self.denoising > 0) for layer in self.layers
        ]
        return document


def weights_of(network: Definition) -> dict[Pair, tuple[int, ...]]:
    """Shapes of all weights, by the names of the layers before and after them.

    Shared weights are listed under their owner only. The order is that of DSSTNE's files.
    """
    return {
        (source.layer, layer.name): weight_shape(network.layer(source.layer), layer)
        for layer in network.layers
        if layer.has_weights
        for source in layer.sources
        if source.shared is None
    }


def _margins(network: Keys) -> ScaledMargins:
    names = [field.name for field in dataclasses.fields(ScaledMargins)]
    inner = network.inner("ScaledMarginalCrossEntropy", [_camel(n) for n in names])
    default = ScaledMargins()
    return ScaledMargins(
        **{n: inner.number(_camel(n), getattr(default, n)) for n in names}
    )


def _check_version(version: float) -> None:
    if version < OLDEST_VERSION:
        raise ValueError(
            f'the network: "Version" is {version:g}; DSSTNE reads {OLDEST_VERSION} and '
            "later"
        )


def _order(reads: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of the layers, sorted: each layer follows the layers that it reads."""
    for name, others in reads.items():
        for other in others:
            if other not in reads:
                near = difflib.get_close_matches(other, reads, n=1, cutoff=0.0)
                raise ValueError(
                    f"layer {name!r} reads {other!r}, which is no layer; the nearest "
                    f"name is {near[0]!r}"
                )
    try:
        return tuple(graphlib.TopologicalSorter(reads).static_order())
    except graphlib.CycleError as error:
        circle = " reads ".join(map(repr, reversed(error.args[1])))
        raise ValueError(f"layers read each other in a circle: {circle}") from error


def _check_network(network: Definition) -> None:
    names = set()
    for layer in network.layers:
        if layer.name in names:
            raise ValueError(f"two layers are called {layer.name!r}")
        names.add(layer.name)
    if not network.of_kind("Input"):
        raise ValueError("the network has no layer of kind Input")
    if len(network.of_kind("Input")) == len(network.layers):
        raise ValueError("the network has only layers of kind Input")
    if any(layer.function == "LRN" for layer in network.layers):
        check_lrn("the network", network.lrn)


def _check_shared(layers: Sequence[LayerDefinition]) -> None:
    by_name = {layer.name: layer for layer in layers}
    owners = {
        (source.layer, layer.name): source
        for layer in layers
        if layer.has_weights
        for source in layer.sources
    }
    for layer in layers:
        for source in layer.sources:
            if (shared := source.shared) is None:
                continue
            pair = shared.source_input, shared.source_output
            label = (
                f"{label_of(layer)} shares the weights from {pair[0]!r} to {pair[1]!r}"
            )
            if pair not in owners:
                raise ValueError(f"{label}, which do not exist")
            if owners[pair].shared is not None:
                raise ValueError(
                    f"{label}, which are shared themselves; name the ones they are"
                )
            mine = weight_shape(by_name[source.layer], layer)
            theirs = weight_shape(by_name[pair[0]], by_name[pair[1]])
            if shared.transposed:
                if "Convolutional" in (layer.type, by_name[pair[1]].type):
                    raise ValueError(
                        f"{label} transposed, which only fully connected layers can"
                    )
                theirs = theirs[::-1]
            if mine != theirs:
                transposed = " transposed" if shared.transposed else ""
                raise ValueError(
                    f"{label}{transposed}, which are {times(theirs)}; it needs "
                    f"{times(mine)}"
                )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
