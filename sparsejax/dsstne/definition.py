"""DSSTNE's network language: a network as frozen dataclasses, and its JSON.

Keys and the names of choices are case-insensitive, comments are allowed, and defaults are
those of DSSTNE's parser. Sizes that DSSTNE takes from data or from other layers are worked
out at once: a `Definition` has them all.
"""

from __future__ import annotations

import dataclasses
import difflib
import graphlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = 0.9  # DSSTNE's last
OLDEST_VERSION = 0.7

MAX_SOURCES = 4
MAX_UNITS = 2**31 - 1  # an index of a unit is an int32

KINDS = ("Input", "Hidden", "Output")
TYPES = ("FullyConnected", "Convolutional", "Pooling")
ACTIVATIONS = (
    "Sigmoid",
    "Tanh",
    "Linear",
    "RELU",
    "LRELU",
    "ELU",
    "SELU",
    "SoftPlus",
    "SoftSign",
    "SoftMax",
)
ERROR_FUNCTIONS = (
    "L1",
    "L2",
    "L2Hinge",
    "Hinge",
    "CrossEntropy",
    "ScaledMarginalCrossEntropy",
    "DataScaledMarginalCrossEntropy",
)
SCHEMES = (
    "Xavier",
    "CaffeXavier",
    "Gaussian",
    "Uniform",
    "UnitBall",
    "Constant",
    "SELU",
)
# Those with a window, and those of whole layers.
WINDOWS = ("Max", "Average")
FUNCTIONS = (*WINDOWS, "LRN", "Maxout", "DotProduct", "Cosine")

_ALIASES = {
    "rectifiedlinear": "RELU",
    "leakyrectifiedlinear": "LRELU",
    "exponentiallinear": "ELU",
    "scaledexponentiallinear": "SELU",
    "cross entropy": "CrossEntropy",
    "localresponsenormalization": "LRN",
}
_NO_FORMULA = "DSSTNE has a name for it, but no formula"
_REFUSED = {
    "prelu": _NO_FORMULA,
    "maxout": "it is a Function of a layer of Type Pooling",
    "relumax": _NO_FORMULA,
    "linearmax": _NO_FORMULA,
    "stochastic": _NO_FORMULA,
    "lcn": _NO_FORMULA,
    "localcontrastnormalization": _NO_FORMULA,
    "globaltemporal": _NO_FORMULA,
    "target": "DSSTNE reads this kind, but never trained it; use Output",
    "recurrent": "DSSTNE's documents name it, but DSSTNE never had it",
    "lstm": "DSSTNE never had it",
    "gru": "DSSTNE never had it",
    "l1penalty": (
        "DSSTNE's documents name it, but DSSTNE never had it; an L1 penalty of all "
        "weights is lambda1 of the update rule"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """What a layer makes of its sums.

    Attributes:
      name: one of `ACTIVATIONS`.
      slope: of LRELU below 0. With DSSTNE's default of 1, LRELU is Linear.
      elu_alpha: ELU and SELU go to minus this number (SELU: times `selu_lambda`).
      selu_lambda: factor of SELU.
    """

    name: str = "Sigmoid"
    slope: float = 1.0
    elu_alpha: float = 1.0
    selu_lambda: float = 1.050701


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightInit:
    """How the weights and biases of a layer start.

    ::

        Xavier        uniform in +-scale / 2 sqrt(6 / (inputs + outputs))
        CaffeXavier   uniform in +-scale sqrt(3 / outputs)
        Gaussian      normal, of standard deviation scale
        Uniform       uniform in +-scale
        UnitBall      uniform in 0 .. scale
        Constant      scale                                 (DSSTNE: -scale)
        SELU          normal, of variance 1 / inputs        (DSSTNE: 1 / inputs^2)

    Attributes:
      scheme: one of `SCHEMES`.
      scale: see above.
      bias: the number at which every bias starts.
    """

    scheme: str = "Xavier"
    scale: float = 1.0
    bias: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsenessPenalty:
    """`beta sum_j KL(p || mean of unit j over the batch)`, added to the mean loss.

    Attributes:
      p: the wanted mean.
      beta: its weight. In a layer, 0 stands for the network's number, and so does p = 0.
    """

    p: float = 0.0
    beta: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalResponseNormalization:
    """`a_c (k + alpha / n sum of a_i^2 over n channels around c)^-beta`."""

    k: float = 2.0
    n: int = 5
    alpha: float = 1e-4
    beta: float = 0.75


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
class Sharing:
    """Whose weights a connection uses: those from one layer to another.

    Attributes:
      source_input: the layer that the owner of the weights reads.
      source_output: the layer to which the owner leads.
      transposed: whether the matrix is transposed.
    """

    source_input: str
    source_output: str
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connection:
    """A layer that another one reads, and the weights between them.

    A pooling layer has no weights: there all but `layer` are defaults.

    Attributes:
      layer: name of the layer that is read.
      weight_norm: the largest L2 norm of the weights that lead to one unit; 0 is none.
      locked: whether training leaves weights and bias as they are.
      shared: if given, the weights are those of another connection. The bias is not.
    """

    layer: str
    weight_norm: float = 0.0
    locked: bool = False
    shared: Sharing | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDefinition:
    """A layer.

    >>> LayerDefinition(name="Input", kind="Input", size=(32, 32, 3)).units
    3072

    Attributes:
      name: what other layers call it.
      kind: one of `KINDS`.
      type: one of `TYPES`.
      size: x, y, z, w, as many as the layer has. Of a convolutional layer, and of what it
        reads, the last one counts channels.
      dataset: name of the data set; "" is none.
      sparse: of an input or output, that its data set is sparse (the data set knows
        better); of a hidden layer, that it has the sparseness penalty.
      denoising: of an input, whether the network's denoising applies to it.
      sources: what it reads; the products are added.
      skips: layers that are added to these sums, unit by unit.
      activation: None where there is none: in inputs and pooling layers.
      dropout: probability of dropping a unit in training.
      weight_init: how weights and biases start.
      delta_norm: the largest L2 norm of the gradient of an example's units; 0 is none.
      batch_normalization: whether the sums are normalised over the batch.
      sparseness_penalty: of a hidden layer, in place of the network's; see `penalty_of`.
      function: of a pooling layer, one of `FUNCTIONS`.
      kernel: width of the window in x, y, z; as many as it has dimensions.
      stride: step of the window, like `kernel`.
      padding: zeros before and after the source's units, like `kernel`.
    """

    name: str
    kind: str = "Hidden"
    type: str = "FullyConnected"
    size: tuple[int, ...]
    dataset: str = ""
    sparse: bool = False
    denoising: bool = False
    sources: tuple[Connection, ...] = ()
    skips: tuple[str, ...] = ()
    activation: Activation | None = None
    dropout: float = 0.0
    weight_init: WeightInit = WeightInit()
    delta_norm: float = 0.0
    batch_normalization: bool = False
    sparseness_penalty: SparsenessPenalty | None = None
    function: str | None = None
    kernel: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)

    @property
    def units(self) -> int:
        """How many units it has in all."""
        return math.prod(self.size)

    @property
    def has_weights(self) -> bool:
        """Whether weights lead to it."""
        return self.kind != "Input" and self.type != "Pooling"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """A network of DSSTNE.

    >>> source = '{"Layers": [{"N": 4}, {"N": 2}, {"N": 4}]}'
    >>> Definition.from_json(parse(source)).layer("Hidden1").activation.name
    'Sigmoid'

    Attributes:
      layers: in the order of the file; a layer may read a later one.
      name: of the network.
      kind: "FeedForward" or "AutoEncoder", which mean the same.
      error_function: one of `ERROR_FUNCTIONS`, of all outputs.
      shuffle_indices: whether each epoch has another order of examples.
      denoising: probability of dropping an entry of an input in training.
      sparseness_penalty: of hidden layers that are `sparse`, if beta > 0.
      delta_boost: factors of gradients.
      margins: of the scaled marginal cross-entropies.
      lrn: of layers with the function LRN.
      maxout_k: DSSTNE stores it; nothing reads it.
      decay: step t has the learning rate alpha / (1 + decay (t - 1)).
      weights_data: a network file from which the weights start.

    Raises:
      ValueError: layers do not fit each other, or a value is out of its range; the
        message names the layer.
    """

    layers: tuple[LayerDefinition, ...]
    name: str = ""
    kind: str = "FeedForward"
    error_function: str = "CrossEntropy"
    shuffle_indices: bool = True
    denoising: float = 0.0
    sparseness_penalty: SparsenessPenalty = SparsenessPenalty()
    delta_boost: DeltaBoost = DeltaBoost()
    margins: ScaledMargins = ScaledMargins()
    lrn: LocalResponseNormalization = LocalResponseNormalization()
    maxout_k: int = 2
    decay: float = 0.0
    weights_data: str | None = None

    def __post_init__(self) -> None:
        _check_network(self)
        order = _order({layer.name: _reads(layer) for layer in self.layers})
        layers = {layer.name: layer for layer in self.layers}
        for name in order:
            _check_layer(layers[name])
            _check_size(layers[name], layers)
        _check_shared(self.layers)

    def layer(self, name: str) -> LayerDefinition:
        """The layer of this name.

        Raises:
          KeyError: there is none.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(
            f"there is no layer {name!r}; there are "
            f"{', '.join(layer.name for layer in self.layers)}"
        )

    def of_kind(self, kind: str) -> tuple[LayerDefinition, ...]:
        """The layers of one of `KINDS`, in order."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    @property
    def in_order(self) -> tuple[LayerDefinition, ...]:
        """The layers, each after those that it reads."""
        order = _order({layer.name: _reads(layer) for layer in self.layers})
        return tuple(map(self.layer, order))

    def penalty_of(self, layer: LayerDefinition) -> SparsenessPenalty | None:
        """The sparseness penalty of a layer; None if it has none."""
        ours, own = self.sparseness_penalty, layer.sparseness_penalty
        if layer.kind != "Hidden" or not layer.sparse or ours.beta == 0:
            return None
        own = own or SparsenessPenalty()
        return SparsenessPenalty(p=own.p or ours.p, beta=own.beta or ours.beta)

    def check_data(self, data: Mapping[str, Sequence[int]]) -> None:
        """Raises ValueError if a data set is wider than its layer.

        Args:
          data: width, height, length of data sets, by their names.
        """
        for layer in self.layers:
            shape = tuple(data.get(layer.dataset, ()))
            pairs = itertools.zip_longest(shape, layer.size, fillvalue=1)
            if shape and any(wide > size for wide, size in pairs):
                raise ValueError(
                    f"{_label(layer)}: its data set {layer.dataset!r} is "
                    f"{_times(shape)}, wider than the layer, which is "
                    f"{_times(layer.size)}"
                )

    @classmethod
    def from_json(
        cls, document: object, data: Mapping[str, Sequence[int]] | None = None
    ) -> Definition:
        """The network of a JSON object, which `to_json` or a person has made.

        Args:
          document: what `parse` returns.
          data: width, height, length of data sets, by their names, as many as each has:
            for layers with `"N": "auto"`, and to check the others.

        Raises:
          ValueError: a key is unknown, or a value is not what DSSTNE takes; the message
            names the layer and the key.
          NotImplementedError: what DSSTNE itself names, but has not.
        """
        data = {} if data is None else data
        network = Keys(document, _NETWORK_KEYS, "the network")
        _check_version(network.number("Version", VERSION))
        drafts = _drafts(network, data)
        order = _order({name: _reads(d) for name, d in drafts.items()})
        sized: dict[str, LayerDefinition] = {}
        for name in order:
            sized[name] = _sized(drafts[name], sized)
        boost = network.inner("DeltaBoost", ("one", "zero"))
        lrn = network.inner("LocalResponseNormalization", ("k", "n", "alpha", "beta"))
        definition = cls(
            layers=tuple(sized[name] for name in drafts),
            name=network.text("Name", ""),
            kind=network.choice("Kind", ("FeedForward", "AutoEncoder"), "FeedForward"),
            error_function=network.choice(
                "ErrorFunction", ERROR_FUNCTIONS, "CrossEntropy"
            ),
            shuffle_indices=network.flag("ShuffleIndices", True),
            denoising=network.inner("Denoising", ("p",)).number("p", 0.0),
            sparseness_penalty=_penalty(network) or SparsenessPenalty(),
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
        """The network as a JSON object that DSSTNE reads too; defaults are left out.

        Raises:
          ValueError: JSON has no key for it: a locked connection, or connections of one
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
        document["Layers"] = [_layer_to_json(self, layer) for layer in self.layers]
        return document


def parse(text: str) -> Any:
    """What JSON text says. Comments, `// ...` and `/* ... */`, are allowed.

    >>> parse('{"N": 128 /* units */} // a layer')
    {'N': 128}

    Raises:
      ValueError: it is not JSON; the message has line and column.
    """

    def blank(match: re.Match) -> str:
        # A string stays; a comment keeps its lines, so that errors name the right one.
        return match[1] or re.sub(r"[^\n]", " ", match[0])

    # A comment that never ends, and a string that does not, are left to the parser.
    tokens = r'("(?:[^"\\\n]|\\.)*"?)|//[^\n]*|/\*.*?\*/'
    try:
        return json.loads(re.sub(tokens, blank, text, flags=re.DOTALL))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not a network: its brackets are too deep") from error


# Keys and values

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
_ANY_LAYER = ("Kind", "Type", "Name", "Sparse", "N", "pDropout")
_READING_LAYER = (
    "Source",
    "Kernel",
    "KernelStride",
    "Function",
    "Skip",
    "Activation",
    "RELUSlope",
    "ELUAlpha",
    "SELULambda",
    "WeightNorm",
    "DeltaNorm",
    "WeightInit",
    "SharedWeights",
)
_KEYS_OF_KIND = {
    "Input": (*_ANY_LAYER, "DataSet"),
    "Hidden": (
        *_ANY_LAYER,
        *_READING_LAYER,
        "BatchNormalization",
        "SparsenessPenalty",
    ),
    "Output": (*_ANY_LAYER, *_READING_LAYER, "DataSet"),
}
_LAYER_KEYS = {
    key: ("Slope",) if key == "RELUSlope" else ()
    for key in dict.fromkeys(itertools.chain(*_KEYS_OF_KIND.values()))
}


class Keys:
    """A JSON object whose keys are case-insensitive, and known."""

    def __init__(self, document: object, known: Any, label: str):
        if not isinstance(document, dict):
            raise ValueError(
                f"{label} must be a JSON object, {{...}}, got {_short(document)}"
            )
        aliases = known if isinstance(known, Mapping) else {key: () for key in known}
        names = {
            spelling.lower(): key
            for key, others in aliases.items()
            for spelling in (key, *others)
        }
        self.label = label
        self.values: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        for written, value in document.items():
            key = names.get(written.lower())
            if key is None:
                raise _unknown(written, names, aliases, label)
            if key in self.values:
                raise ValueError(
                    f'{label}: "{self.written[key]}" and "{written}" are the same key'
                )
            self.values[key], self.written[key] = value, written

    def _wrong(self, key: str, expected: str) -> ValueError:
        got = _short(self.values[key])
        return ValueError(
            f'{self.label}: "{self.written[key]}" must be {expected}, got {got}'
        )

    def number(self, key: str, default: Any) -> Any:
        if key not in self.values:
            return default
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return value

    def whole(self, key: str, default: int) -> int:
        if key not in self.values:
            return default
        if (value := _as_whole(self.values[key])) is None:
            raise self._wrong(key, "a whole number from 1")
        return value

    def wholes(self, key: str, most: int) -> tuple[int, ...] | None:
        """A whole number or a list of up to `most`."""
        if key not in self.values:
            return None
        value = self.values[key]
        numbers = value if isinstance(value, list) else [value]
        found = [_as_whole(number) for number in numbers]
        if not 1 <= len(found) <= most or None in found:
            raise self._wrong(
                key, f"a whole number from 1, or a list of 1 to {most} of them"
            )
        return tuple(number for number in found if number is not None)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if value not in (0, 1):
            raise self._wrong(key, "true or false")
        return bool(value)

    def text(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if key in self.values and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A name, or a list of names."""
        if key not in self.values:
            return None
        value = self.values[key]
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            raise self._wrong(key, "the name of a layer, or a list of such names")
        return tuple(names)

    def choice(self, key: str, choices: Sequence[str], default: Any) -> Any:
        if key not in self.values:
            return default
        value = self.text(key, None)
        lower = value.lower()
        known = {choice.lower(): choice for choice in choices}
        if (found := known.get(_ALIASES.get(lower, lower).lower())) is not None:
            return found
        if lower in _REFUSED:
            raise NotImplementedError(
                f'{self.label}: "{self.written[key]}" is "{value}", which is not '
                f"supported: {_REFUSED[lower]}"
            )
        raise self._wrong(key, f"one of {', '.join(choices)}")

    def inner(self, key: str, known: Any) -> Keys:
        return Keys(self.values.get(key, {}), known, f'{self.label}, "{key}"')


def _as_whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 1 <= value <= MAX_UNITS or int(value) != value:
        return None
    return int(value)


def _unknown(written: str, names: Any, known: Any, label: str) -> Exception:
    lower = written.lower()
    if reason := {k: _REFUSED[k] for k in ("recurrent", "l1penalty")}.get(lower):
        return NotImplementedError(
            f"{label}: {_short(written)} is not supported: {reason}"
        )
    nearest = difflib.get_close_matches(lower, names, n=1, cutoff=0.0)
    hint = f'; the nearest known key is "{names[nearest[0]]}"' if nearest else ""
    return ValueError(f"{label}: unknown key {_short(written)}{hint}")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _penalty(keys: Keys) -> SparsenessPenalty | None:
    if "SparsenessPenalty" not in keys.values:
        return None
    inner = keys.inner("SparsenessPenalty", ("p", "beta"))
    return SparsenessPenalty(p=inner.number("p", 0.0), beta=inner.number("beta", 0.0))


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


# Layers


def _drafts(network: Keys, data: Mapping) -> dict[str, LayerDefinition]:
    """The layers, by name. A size that depends on other layers is that of the channels."""
    layers = network.values.get("Layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError('the network: "Layers" must be a list of layers')
    shape = Activation(
        slope=network.number("RELUSlope", 1.0),
        elu_alpha=network.number("ELUAlpha", 1.0),
        selu_lambda=network.number("SELULambda", 1.050701),
    )
    denoised = network.inner("Denoising", ("p",)).number("p", 0.0) > 0
    drafts: dict[str, LayerDefinition] = {}
    before = None
    for i, layer in enumerate(layers):
        by_place = "Input" if i == 0 else "Output" if i == len(layers) - 1 else "Hidden"
        draft = _draft(i, layer, by_place, before, shape, denoised, data)
        if draft.name in drafts:
            raise ValueError(f"two layers are called {draft.name!r}")
        drafts[draft.name] = draft
        before = draft.name
    return drafts


def _draft(
    i: int,
    document: Any,
    by_place: str,
    before: str | None,
    shape: Activation,
    denoised: bool,
    data: Mapping[str, Sequence[int]],
) -> LayerDefinition:
    keys = Keys(document, _LAYER_KEYS, f"layer {i}")
    kind = keys.choice("Kind", KINDS, by_place)
    name = keys.text("Name", f"{kind}{i}")
    keys.label = f"layer {name!r}"
    for key in keys.values:
        if key not in _KEYS_OF_KIND[kind]:
            homes = [k for k in KINDS if key in _KEYS_OF_KIND[k]]
            raise ValueError(
                f'{keys.label}: "{keys.written[key]}" is for layers of kind '
                f"{' or '.join(homes)}; this one is {kind}"
            )
    type = keys.choice("Type", TYPES, "FullyConnected")
    _check_keys_of_type(keys, kind, type)
    dataset = keys.text("DataSet", "")
    sparse = keys.flag("Sparse", False)
    common = {
        "name": name,
        "kind": kind,
        "type": type,
        "size": _draft_size(keys, kind, type, dataset, data),
        "dataset": dataset,
        "sparse": sparse,
        "dropout": keys.number("pDropout", 0.0),
    }
    if kind == "Input":
        return LayerDefinition(**common, denoising=sparse and denoised)
    sources = keys.texts("Source")
    if sources is None:
        if before is None:
            raise ValueError(
                f'{keys.label}: it is the first layer, so its "Source" must be given'
            )
        sources = (before,)
    init = keys.inner("WeightInit", ("Scheme", "Scale", "Bias"))
    kernel = keys.wholes("Kernel", 3) or (1,)
    stride = keys.wholes("KernelStride", 3) or (1,)
    if len(stride) > len(kernel):
        raise ValueError(
            f'{keys.label}: "KernelStride" has {len(stride)} numbers, "Kernel" '
            f"{len(kernel)}"
        )
    # A bool does nothing, as in DSSTNE.
    if isinstance(keys.values.get("SparsenessPenalty"), bool):
        del keys.values["SparsenessPenalty"]
    activation = None
    if type != "Pooling":
        activation = Activation(
            name=keys.choice("Activation", ACTIVATIONS, "Sigmoid"),
            slope=keys.number("RELUSlope", shape.slope),
            elu_alpha=keys.number("ELUAlpha", shape.elu_alpha),
            selu_lambda=keys.number("SELULambda", shape.selu_lambda),
        )
    return LayerDefinition(
        **common,
        sources=_connections(keys, sources),
        skips=keys.texts("Skip") or (),
        activation=activation,
        weight_init=WeightInit(
            scheme=init.choice("Scheme", SCHEMES, "Xavier"),
            scale=init.number("Scale", 1.0),
            bias=init.number("Bias", 0.0),
        ),
        delta_norm=keys.number("DeltaNorm", 0.0),
        batch_normalization=keys.flag("BatchNormalization", False),
        sparseness_penalty=_penalty(keys),
        function=keys.choice("Function", FUNCTIONS, None),
        kernel=kernel,
        stride=(*stride, *[1] * (len(kernel) - len(stride))),
        padding=(0,) * len(kernel),
    )


def _check_keys_of_type(keys: Keys, kind: str, type: str) -> None:
    """Refuses what would have no effect."""
    if type == "Pooling":
        if "Function" not in keys.values:
            raise ValueError(
                f'{keys.label}: a layer of Type Pooling needs a "Function": one of '
                f"{', '.join(FUNCTIONS)}"
            )
        function = keys.choice("Function", FUNCTIONS, None)
        useless = [
            "pDropout",
            "WeightInit",
            "WeightNorm",
            "SharedWeights",
            "BatchNormalization",
            *([] if function in WINDOWS else ["Kernel", "KernelStride"]),
        ]
        # Linear is what it is.
        if keys.choice("Activation", ACTIVATIONS, "Linear") != "Linear":
            useless.append("Activation")
        what = f"a pooling layer ({function})"
    else:
        useless = ["Function"]
        what = f"a layer of Type {type}"
        if type == "FullyConnected":
            useless += ["Kernel", "KernelStride"]
    if kind == "Input":
        return
    for key in useless:
        value = keys.values.get(key)
        if value is not None and value not in (0, False):
            raise ValueError(
                f'{keys.label}: "{keys.written[key]}" has no effect in {what}; leave '
                "it out"
            )


def _draft_size(
    keys: Keys, kind: str, type: str, dataset: str, data: Mapping
) -> tuple[int, ...]:
    value = keys.values.get("N")
    if isinstance(value, str) and value.lower() == "auto":
        if kind == "Hidden":
            raise ValueError(
                f'{keys.label}: "N" is "auto", the size of a data set, and a hidden '
                "layer has none; give a number"
            )
        if dataset not in data:
            known = ", ".join(map(repr, data)) or "none"
            raise ValueError(
                f'{keys.label}: "N" is "auto", but there is no data set {dataset!r}; '
                f"there are: {known}"
            )
        return tuple(data[dataset])
    if value is None and type == "Pooling" and kind != "Input":
        return ()
    if value is None:
        raise ValueError(f'{keys.label}: "N", the number of units, is missing')
    size = keys.wholes("N", 4)
    assert size is not None
    if kind == "Hidden" and type == "Convolutional" and len(size) > 1:
        raise ValueError(
            f'{keys.label}: "N" of a hidden convolutional layer is its number of '
            f"channels, one number, got {list(size)}"
        )
    return size


def _connections(keys: Keys, sources: Sequence[str]) -> tuple[Connection, ...]:
    norm = keys.number("WeightNorm", 0.0)
    shares = keys.values.get("SharedWeights", [])
    known = ("InputLayer", "SourceInputLayer", "SourceOutputLayer", "Transposed")
    shared: dict[str, Sharing] = {}
    for share in shares if isinstance(shares, list) else [shares]:
        inner = Keys(share, known, f'{keys.label}, "SharedWeights"')
        for key in known[:3]:
            if not inner.text(key, ""):
                raise ValueError(f'{inner.label}: "{key}" is missing')
        source = inner.text("InputLayer", "")
        if source not in sources or source in shared:
            raise ValueError(
                f'{inner.label}: "InputLayer" must be another one of its sources '
                f"({', '.join(map(repr, sources))}) each time, got {source!r}"
            )
        shared[source] = Sharing(
            source_input=inner.text("SourceInputLayer", ""),
            source_output=inner.text("SourceOutputLayer", ""),
            transposed=inner.flag("Transposed", False),
        )
    return tuple(
        Connection(layer=source, weight_norm=norm, shared=shared.get(source))
        for source in sources
    )


# Sizes


def _sized(
    draft: LayerDefinition, layers: Mapping[str, LayerDefinition]
) -> LayerDefinition:
    """A layer with the size that its sources give it."""
    if draft.kind == "Input" or draft.type == "FullyConnected":
        return draft
    padding = draft.padding
    if draft.kind == "Hidden" and _has_window(draft):
        # DSSTNE pads hidden layers only.
        source = layers[draft.sources[0].layer]
        sizes = _padded_to(source.size, len(draft.kernel))
        padding = tuple(map(_padding, sizes, draft.kernel, draft.stride))
    draft = dataclasses.replace(draft, padding=padding)
    given = draft.size
    if draft.type == "Convolutional" and draft.kind == "Hidden":
        return dataclasses.replace(draft, size=_size_of(draft, layers))
    if given == ():
        return dataclasses.replace(draft, size=_size_of(draft, layers))
    return draft  # and `Definition` checks it


def _check_size(layer: LayerDefinition, layers: Mapping[str, LayerDefinition]) -> None:
    for skip in layer.skips:
        if layers[skip].units != layer.units:
            raise ValueError(
                f"{_label(layer)} adds the units of {skip!r}, which has "
                f"{layers[skip].units:,}; it has {layer.units:,} itself"
            )
    if layer.kind == "Input" or layer.type == "FullyConnected":
        return
    size = _size_of(layer, layers)
    if size != layer.size:
        raise ValueError(
            f"{_label(layer)} is {_times(layer.size)}, but its sources make it "
            f"{_times(size)}"
        )


def _size_of(
    layer: LayerDefinition, layers: Mapping[str, LayerDefinition]
) -> tuple[int, ...]:
    """The size of a convolutional or pooling layer, from what it reads."""
    sources = [layers[source.layer] for source in layer.sources]
    whole = layer.type == "Pooling" and layer.function not in WINDOWS
    if whole and layer.function != "LRN":
        for source in sources:
            if source.size != sources[0].size:
                raise ValueError(
                    f"{_label(layer)} ({layer.function}) reads layers of one size, but "
                    f"{sources[0].name!r} is {_times(sources[0].size)} and "
                    f"{source.name!r} {_times(source.size)}"
                )
    if layer.function in ("DotProduct", "Cosine"):
        if len(sources) < 2:
            raise ValueError(
                f"{_label(layer)} ({layer.function}) compares its first source with "
                "the others: it needs two sources or more"
            )
        return (len(sources) - 1,)
    sizes = [source.size if whole else _window(layer, source) for source in sources]
    for source, size in zip(sources, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"{_label(layer)} would be {_times(sizes[0])} by {sources[0].name!r} "
                f"and {_times(size)} by {source.name!r}"
            )
    return sizes[0]


def _window(layer: LayerDefinition, source: LayerDefinition) -> tuple[int, ...]:
    """The size of a layer with a window that moves over a source."""
    dimensions = len(layer.kernel)
    if len(source.size) > dimensions + 1:
        raise ValueError(
            f"{_label(layer)}: a kernel of {dimensions} dimensions reads these and one "
            f"of channels, but its source {source.name!r} is {_times(source.size)}"
        )
    made = []
    places = _padded_to(source.size, dimensions)
    windows = zip(places, layer.kernel, layer.stride, layer.padding, strict=False)
    for width, kernel, stride, padding in windows:
        # What a convolution makes, and what DSSTNE reserves for it.
        size = (width + 2 * padding - kernel) // stride + 1
        reserved = size
        if layer.kind == "Hidden":
            strided = width if stride == 1 else (width - kernel) // stride + 1
            reserved = 1 if width <= kernel else strided
        if size != reserved or size < 1:
            raise ValueError(
                f"{_label(layer)}: a kernel of {kernel} with stride {stride} and "
                f"padding {padding} makes {max(size, 0)} of the {width} units of "
                f"{source.name!r}, where DSSTNE would need {max(reserved, 1)}; use an "
                "odd kernel that is narrower than its source, or a larger stride"
            )
        made.append(size)
    channels = source.size[dimensions:]
    if layer.type == "Convolutional":
        # Of a draft `size` is the number of channels.
        channels = layer.size[-1:]
    return (*made, *channels)


def _padding(width: int, kernel: int, stride: int) -> int:
    if width < kernel:
        return (kernel - width + 1) // 2
    return kernel // 2 if stride == 1 else 0


def _padded_to(size: Sequence[int], length: int) -> tuple[int, ...]:
    return (*size, *[1] * (length - len(size)))


def _has_window(layer: LayerDefinition) -> bool:
    return layer.type == "Convolutional" or layer.function in WINDOWS


def _times(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _label(layer: LayerDefinition) -> str:
    return f"layer {layer.name!r}"


def weights_of(network: Definition) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes of all weights, by the names of the layers that they lead from and to.

    Shared ones are only with their owner. They are in the order of DSSTNE's files.
    """
    return {
        (source.layer, layer.name): weight_shape(network.layer(source.layer), layer)
        for layer in network.layers
        if layer.has_weights
        for source in layer.sources
        if source.shared is None
    }


# Checks


def _reads(layer: LayerDefinition) -> tuple[str, ...]:
    return (*(source.layer for source in layer.sources), *layer.skips)


def _order(reads: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of layers, each after those that it reads."""
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
    names = [layer.name for layer in network.layers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two layers are called {name!r}")
    if not network.of_kind("Input"):
        raise ValueError("the network has no layer of kind Input")
    if len(network.of_kind("Input")) == len(names):
        raise ValueError("the network has only layers of kind Input")
    margins, boost = network.margins, network.delta_boost
    _check_range("the network", "Denoising p", network.denoising, 0, 1, below=True)
    _check_range("the network", "Decay", network.decay, 0)
    for name in ("one", "zero"):
        _check_range("the network", f"DeltaBoost {name}", getattr(boost, name), 0)
        target, scale = f"{name}_target", f"{name}_scale"
        _check_range("the network", _camel(target), getattr(margins, target), 0, 1)
        _check_range("the network", _camel(scale), getattr(margins, scale), 0)
    _check_penalty("the network", network.sparseness_penalty)


def _check_layer(layer: LayerDefinition) -> None:
    label = _label(layer)
    if not 1 <= len(layer.size) <= 4 or min(layer.size) < 1 or layer.units > MAX_UNITS:
        raise ValueError(
            f"{label} is {_times(layer.size) or 'without a size'}; it needs 1 to 4 "
            f"dimensions of 1 or more units, {MAX_UNITS:,} in all"
        )
    sources = [source.layer for source in layer.sources]
    if layer.kind == "Input":
        if sources or layer.skips:
            raise ValueError(f"{label} is an input, but reads {_reads(layer)[0]!r}")
    elif not sources:
        raise ValueError(f"{label} has no source")
    if len(set(sources)) < len(sources):
        raise ValueError(
            f"{label} reads a layer twice: {', '.join(map(repr, sources))}"
        )
    if layer.has_weights and len(sources) > MAX_SOURCES:
        raise ValueError(
            f"{label} has {len(sources)} sources; DSSTNE has up to {MAX_SOURCES}"
        )
    _check_range(label, "pDropout", layer.dropout, 0, 1, below=True)
    _check_range(label, "DeltaNorm", layer.delta_norm, 0)
    for source in layer.sources:
        _check_range(label, "WeightNorm", source.weight_norm, 0)
    if layer.sparseness_penalty is not None:
        _check_penalty(label, layer.sparseness_penalty)


def _check_penalty(label: str, penalty: SparsenessPenalty) -> None:
    _check_range(label, "SparsenessPenalty p", penalty.p, 0, 1)
    _check_range(label, "SparsenessPenalty beta", penalty.beta, 0)


def _check_range(
    label: str,
    key: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    below: bool = False,
) -> None:
    if low <= value < high or (value == high < math.inf and not below):
        return
    limits = f"{low} or more"
    if high < math.inf:
        limits = f"from {low} to {'below ' if below else ''}{high}"
    raise ValueError(f"{label}: {key} must be {limits}, got {value}")


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
                f"{_label(layer)} shares the weights from {pair[0]!r} to {pair[1]!r}"
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
                    f"{label}{transposed}, which are {_times(theirs)}; it needs "
                    f"{_times(mine)}"
                )


def weight_shape(source: LayerDefinition, layer: LayerDefinition) -> tuple[int, ...]:
    """The shape of the weights between two layers.

    `(in, out)` of a fully connected layer. `(out, in, z, y, x)` of a convolutional one,
    with channels in and out, and as many of z, y, x as the layer's kernel has.
    """
    if layer.type == "FullyConnected":
        return source.units, layer.units
    dimensions = len(layer.kernel)
    channels = _padded_to(source.size, dimensions + 1)[dimensions]
    return layer.size[-1], channels, *reversed(layer.kernel)


# The way back


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _one_or_all(values: Sequence) -> Any:
    return values[0] if len(values) == 1 else list(values)


def _layer_to_json(network: Definition, layer: LayerDefinition) -> dict[str, Any]:
    document: dict[str, Any] = {"Name": layer.name, "Kind": layer.kind}
    document["Type"] = layer.type
    channels = layer.type == "Convolutional" and layer.kind == "Hidden"
    document["N"] = layer.size[-1] if channels else _one_or_all(layer.size)
    if layer.dataset:
        document["DataSet"] = layer.dataset
    # With denoising, the flag of an input says whether it has it.
    denoised = layer.kind == "Input" and network.denoising > 0
    if layer.denoising if denoised else layer.sparse:
        document["Sparse"] = True
    if layer.dropout:
        document["pDropout"] = layer.dropout
    if layer.kind == "Input":
        return document
    document["Source"] = _one_or_all([source.layer for source in layer.sources])
    if layer.skips:
        document["Skip"] = _one_or_all(layer.skips)
    if layer.function is not None:
        document["Function"] = layer.function
    if _has_window(layer):
        document["Kernel"] = list(layer.kernel)
        document["KernelStride"] = list(layer.stride)
    if layer.activation is not None:
        document["Activation"] = layer.activation.name
        document["RELUSlope"] = layer.activation.slope
        document["ELUAlpha"] = layer.activation.elu_alpha
        document["SELULambda"] = layer.activation.selu_lambda
    if layer.weight_init != WeightInit():
        init = layer.weight_init
        document["WeightInit"] = {
            "Scheme": init.scheme,
            "Scale": init.scale,
            "Bias": init.bias,
        }
    if layer.delta_norm:
        document["DeltaNorm"] = layer.delta_norm
    if layer.batch_normalization:
        document["BatchNormalization"] = True
    if layer.sparseness_penalty is not None:
        document["SparsenessPenalty"] = dataclasses.asdict(layer.sparseness_penalty)
    document |= _connections_to_json(layer)
    return document


def _connections_to_json(layer: LayerDefinition) -> dict[str, Any]:
    document: dict[str, Any] = {}
    norms = {source.weight_norm for source in layer.sources}
    if len(norms) > 1 or any(source.locked for source in layer.sources):
        raise ValueError(
            f"{_label(layer)}: JSON has no key for locked weights, nor for a norm of "
            "each source; use a network file (.nc)"
        )
    if norms != {0.0}:
        document["WeightNorm"] = norms.pop()
    shares = [
        {
            "InputLayer": source.layer,
            "SourceInputLayer": source.shared.source_input,
            "SourceOutputLayer": source.shared.source_output,
            "Transposed": source.shared.transposed,
        }
        for source in layer.sources
        if source.shared is not None
    ]
    if shares:
        document["SharedWeights"] = shares
    return document
