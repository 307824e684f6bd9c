"""A network's layer as a frozen dataclass, with its possible settings and limits.

The module `sizes` computes sizes that depend on other layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

MAX_SOURCES = 4
MAX_UNITS = 2**31 - 1  # an index of a unit is an int32
MAX_LAYERS = 10_000
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
SCHEMES = (
    "Xavier",
    "CaffeXavier",
    "Gaussian",
    "Uniform",
    "UnitBall",
    "Constant",
    "SELU",
)
# Pooling functions that use a window. The other functions use whole layers.
WINDOWS = ("Max", "Average")
FUNCTIONS = (*WINDOWS, "LRN", "Maxout", "DotProduct", "Cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """The function that a layer applies to its sums.

    Attributes:
      name: one of `ACTIVATIONS`.
      slope: slope of LRELU below 0. With DSSTNE's default of 1, LRELU is Linear.
      elu_alpha: minus the limit of ELU far below 0; SELU's limit also has the factor
        `selu_lambda`.
      selu_lambda: factor of SELU.
    """

    name: str = "Sigmoid"
    slope: float = 1.0
    elu_alpha: float = 1.0
    selu_lambda: float = 1.050701


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightInit:
    """How the initial weights and biases of a layer are chosen.

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
      scale: number that sets the spread of the weights, in the formulas above.
      bias: initial value of every bias.
    """

    scheme: str = "Xavier"
    scale: float = 1.0
    bias: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsenessPenalty:
    """`beta sum_j KL(p || mean of unit j over the batch)`, added to the mean loss.

    Attributes:
      p: desired mean.
      beta: weight of the penalty. In a layer, 0 stands for the network's number, for both `p`
        and `beta`.
    """

    p: float = 0.0
    beta: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalResponseNormalization:
    """`a_c (k + alpha / n sum of a_i^2 over n channels around c)^-beta`.

    As in cuDNN, n is from 1 to 16, k is 1e-5 or more, and beta 0.01 or more.
    """

    k: float = 2.0
    n: int = 5
    alpha: float = 1e-4
    beta: float = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """The connection whose weights another connection uses.

    Attributes:
      source_input: name of the layer before the shared weights.
      source_output: name of the layer after the shared weights.
      transposed: whether the matrix is transposed.
    """

    source_input: str
    source_output: str
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connection:
    """The input of a layer from another layer, with the weights between them.

    A pooling layer has no weights: for it, all attributes except `layer` have default values.

    Attributes:
      layer: name of the layer that is read.
      weight_norm: largest L2 norm of the weights of one unit; 0 is no limit.
      locked: whether training does not change weights and bias.
      shared: the connection whose weights this one uses; None for weights of
        its own. The bias is not shared.
    """

    layer: str
    weight_norm: float = 0.0
    locked: bool = False
    shared: Sharing | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDefinition:
    """One layer of a network.

    >>> LayerDefinition(name="Input", kind="Input", size=(32, 32, 3)).units
    3072

    Attributes:
      name: name by which other layers refer to it.
      kind: one of `KINDS`.
      type: one of `TYPES`.
      size: x, y, z, w, or the first of these. For a convolutional layer, and for the
        layers that it reads, the last one is the number of channels.
      dataset: name of the data set; "" if it has none.
      sparse: whether the data set of an input or output is sparse (the data set itself
        decides); or whether a hidden layer has the sparseness penalty.
      denoising: whether the network's denoising applies to an input.
      sources: connections to the layers that it reads; their products are added.
      skips: layers that are added to these sums, unit by unit.
      activation: function of the layer's sums; None in inputs and pooling layers.
      dropout: probability of dropping a unit in training.
      weight_init: how initial weights and biases are chosen.
      delta_norm: largest L2 norm of the gradient in an example's units; 0 is no limit.
      batch_normalization: whether the sums are normalised over the batch.
      sparseness_penalty: penalty of a hidden layer, in place of the network's; see
        `penalty_of`.
      function: function of a pooling layer, one of `FUNCTIONS`.
      kernel: width of the window in x, y, z; one number for each dimension.
      stride: step of the window, with as many numbers as `kernel`.
      padding: zeros before and after the source's units, with as many numbers as `kernel`.
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
        """The total number of units."""
        return math.prod(self.size)

    @property
    def has_weights(self) -> bool:
        """Whether the layer has weights on its inputs."""
        return self.kind != "Input" and self.type != "Pooling"


def reads(layer: LayerDefinition) -> tuple[str, ...]:
    """The names of the layers that a layer reads."""
    return (*(source.layer for source in layer.sources), *layer.skips)


def label_of(layer: LayerDefinition) -> str:
    """The name of a layer in errors."""
    return f"layer {layer.name!r}"


def times(size: Sequence[int]) -> str:
    """A size as text: `32 x 32 x 3`."""
    return " x ".join(map(str, size))


def has_window(layer: LayerDefinition) -> bool:
    """Whether the layer uses `kernel`, `stride` and `padding`."""
    return layer.type == "Convolutional" or layer.function in WINDOWS


def padded_to(size: Sequence[int], length: int) -> tuple[int, ...]:
    """Appends ones to a size until it has at least `length` dimensions."""
    return (*size, *[1] * (length - len(size)))


def weight_shape(source: LayerDefinition, layer: LayerDefinition) -> tuple[int, ...]:
    """The shape of the weights between two layers.

    A fully connected layer has `(in, out)`. A convolutional layer has `(out, in, z, y, x)`,
    with channels in and out, and as many of z, y, x as the layer's kernel has.
    """
    if layer.type == "FullyConnected":
        return source.units, layer.units
    dimensions = len(layer.kernel)
    channels = padded_to(source.size, dimensions + 1)[dimensions]
    return layer.size[-1], channels, *reversed(layer.kernel)


def num_biases(layer: LayerDefinition) -> int:
    """The number of biases of a layer: one a unit, or one a channel for a convolution."""
    return layer.size[-1] if layer.type == "Convolutional" else layer.units


def check_layer(layer: LayerDefinition) -> None:
    """Raises ValueError if the settings of a layer are wrong, whatever the other layers are."""
    label = label_of(layer)
    if not 1 <= len(layer.size) <= 4 or min(layer.size) < 1 or layer.units > MAX_UNITS:
        raise ValueError(
            f"{label} is {times(layer.size) or 'without a size'}; it needs 1 to 4 "
            f"dimensions of 1 or more units, {MAX_UNITS:,} in all"
        )
    sources = [source.layer for source in layer.sources]
    if layer.kind == "Input":
        if sources or layer.skips:
            raise ValueError(f"{label} is an input, but reads {reads(layer)[0]!r}")
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
    for key, sizes, low in (
        ("Kernel", layer.kernel, 1),
        ("KernelStride", layer.stride, 1),
        ("padding", layer.padding, 0),
    ):
        if not 1 <= len(sizes) == len(layer.kernel) <= 3 or min(sizes) < low:
            raise ValueError(
                f"{label}: {key} must be 1 to 3 numbers from {low}, as many as Kernel "
                f"has, got {times(sizes) or 'none'}"
            )


def check_layer_numbers(layer: LayerDefinition) -> None:
    """Raises ValueError if a number that only training needs is out of its range."""
    label = label_of(layer)
    check_range(label, "pDropout", layer.dropout, 0, 1, below=True)
    check_range(label, "DeltaNorm", layer.delta_norm, 0)
    for source in layer.sources:
        check_range(label, "WeightNorm", source.weight_norm, 0)
    if layer.sparseness_penalty is not None:
        check_penalty(label, layer.sparseness_penalty)


def check_penalty(label: str, penalty: SparsenessPenalty) -> None:
    """Raises ValueError if a number of a penalty is out of its range."""
    check_range(label, "SparsenessPenalty p", penalty.p, 0, 1)
    check_range(label, "SparsenessPenalty beta", penalty.beta, 0)


def check_lrn(label: str, lrn: LocalResponseNormalization) -> None:
    """Raises ValueError if a number is out of the range that cuDNN supports."""
    check_range(label, "LocalResponseNormalization n", lrn.n, 1, 16)
    check_range(label, "LocalResponseNormalization k", lrn.k, 1e-5)
    check_range(label, "LocalResponseNormalization beta", lrn.beta, 0.01)


def check_range(
    label: str,
    key: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    below: bool = False,
) -> None:
    """Raises ValueError unless `value` is from `low` to `high`.

    Args:
      label: text for the error, such as the name of the layer.
      key: the JSON key of the value.
      value: the number.
      low: smallest valid number.
      high: largest valid number.
      below: whether it must be less than `high`.
    """
    if low <= value < high or (value == high < math.inf and not below):
        return
    limits = f"{low} or more"
    if high < math.inf:
        limits = f"from {low} to {'below ' if below else ''}{high}"
    raise ValueError(f"{label}: {key} must be {limits}, got {value}")
