"""The configuration of a network: frozen dataclasses, read from and written to JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from sparsejax import codec, losses
from sparsejax.nn.activations import activation
from sparsejax.ops.precision import Precision, check_precision

VERSION = 1

# Constants of `LinearConfig.for_data`. First line: the most elements of the kernel (1 GB), and the
# ranks to try. Second: the number of entries of a row and an item together for which the weight is
# 1; the smallest and largest weight; and the number of entries of rows and items for the ridge of
# dense data.
_LARGEST_LINEAR, _RANKS = 2**28, (2048, 1024)
_ENTRIES_FOR_WEIGHT, _WEIGHTS = 200, (0.1, 2.0)
_DENSE, _DENSE_RIDGE = 50, 1000.0
# For `temperature_for`: two pairs of a number of items and its temperature.
_TEMPERATURES = (5_000, 0.18), (40_000, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig:
    """A layer of sparse features.

    >>> InputConfig(normalize=True, corruption=0.5).name
    'input'

    Attributes:
      name: name by which other layers refer to it.
      normalize: whether to divide each row by its L2 norm.
      corruption: probability with which an entry is dropped in training. The other entries are
        multiplied by `1 / (1 - corruption)` (a denoising autoencoder).
    """

    kind: ClassVar[str] = "input"
    name: str = "input"
    normalize: bool = False
    corruption: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenConfig:
    """A fully connected layer.

    >>> HiddenConfig(name="hidden1", size=256, activation="tanh").use_bias
    True

    Attributes:
      name: name by which other layers refer to it.
      source: the layer that it reads; by default the one before it.
      size: number of units.
      activation: a function of `jax.nn` ("relu", "tanh", "sigmoid", "gelu", ...) or
        "linear".
      use_bias: whether it has a bias.
      dropout: probability of dropping a unit in training.
      dtype: "float32" or "bfloat16", the dtype of the operands and of the result of the
        product with the kernel. In the layer that reads the input it is the dtype of
        the result only. The sums are always float32. By default it is the finer dtype
        of the kernel and the layer's input.
    """

    kind: ClassVar[str] = "hidden"
    name: str
    source: str | None = None
    size: int
    activation: str = "relu"
    use_bias: bool = True
    dropout: float = 0.0
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """A layer of scores over items.

    >>> OutputConfig(temperature=0.1, tied="hidden1").name
    'output'

    Attributes:
      name: name by which other layers refer to it.
      source: the layer that it reads; by default the one before it.
      use_bias: whether each item has a bias.
      temperature: divisor of scores, which are then cosines; None for dot products.
      tied: name of a hidden layer whose kernel this layer shares: the one that reads
        the input.
      dtype: "float32" or "bfloat16", the dtype of the operands of the products with the
        kernel. Sums and scores are always float32. By default it is the dtype of the
        kernel.
    """

    kind: ClassVar[str] = "output"
    name: str = "output"
    source: str | None = None
    use_bias: bool = True
    temperature: float | None = None
    tied: str | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Scores that are linear in the row, computed from the data and added to other scores.

    They need no training: see `LinearPart`. The defaults were chosen on held-out parts of
    the training data of six data sets.

    >>> LinearConfig(rank=512).popularity
    0.25

    Attributes:
      rank: width of the factors, at most the number of items.
      ridge: regularization, which damps small components: EASE's lambda, in its scale.
      popularity: exponent of an item's number of entries by which its column is divided.
      weight: factor of these scores. With 1, the softmax of these scores alone would fit
        held-out entries best.
    """

    rank: int = 2048
    ridge: float = 300.0
    popularity: float = 0.25
    weight: float = 0.35

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 1),
            ("ridge", 0),
            ("popularity", 0),
            ("weight", 0),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"linear: {name} {value} is not {least} or more")

    @classmethod
    def for_data(
        cls, rows: int, items: int, entries: int
    ) -> tuple[LinearConfig | None, str]:
        """The linear part that `sparsejax train` chooses for data of these sizes, and a reason.

        >>> linear, why = LinearConfig.for_data(6_040, 3_706, 800_000)
        >>> linear.weight, linear.ridge
        (1.74, 1000.0)
        >>> print(why)
        linear part of rank 2,048, ridge 1,000 and weight 1.74: a row has 132.5 entries, an item 215.9

        The longer the rows, the more the linear part adds to the layers. The more
        entries an item has, the better its scores are estimated. So the weight is the mean number
        of entries of a row, plus that of an item, divided by 200; at least 0.1 and at most
        2. The ridge is 300, or 1,000 if both rows and items have over 50 entries. The rank is
        2,048, or 1,024 if the factors would take over 1 GB; if these are too large as well, it
        is None.
        """
        length, each = entries / max(rows, 1), entries / max(items, 1)
        least, largest = _WEIGHTS
        weight = (length + each) / _ENTRIES_FOR_WEIGHT
        weight = round(min(max(weight, least), largest), 2)
        ridge = _DENSE_RIDGE if min(length, each) > _DENSE else cls.ridge
        for rank in _RANKS:
            if items * rank <= _LARGEST_LINEAR:
                return cls(rank=rank, ridge=ridge, weight=weight), (
                    f"linear part of rank {min(rank, items):,}, ridge {ridge:,g} and "
                    f"weight {weight:g}: a row has {length:,.1f} entries, an item "
                    f"{each:,.1f}"
                )
        return None, f"no linear part: {items:,} items are too many for one"


@runtime_checkable
class HasSizes(Protocol):
    """Data whose sizes are known, such as a `SparseDataset`."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_features(self) -> int: ...

    @property
    def num_entries(self) -> int: ...


def _sizes(
    data: HasSizes | int, items: int | None, entries: int | None
) -> tuple[int, int, int]:
    if not isinstance(data, int | np.integer):
        if items is not None or entries is not None:
            raise TypeError("data have their own sizes: give no items and no entries")
        return data.num_rows, data.num_features, data.num_entries
    if items is None or entries is None:
        raise TypeError(
            "for_data needs data, or three numbers: of rows, items and entries"
        )
    return int(data), items, entries


def temperature_for(items: int) -> tuple[float, str]:
    """The temperature of cosine scores for this many items, and a reason as text.

    It is 0.18 for up to 5,000 items and 0.1 for 40,000 and more. Between them it falls by
    an equal amount for each doubling of the items. It was chosen on held-out parts of the
    training data of six data sets.

    >>> temperature_for(10_000)
    (0.153, 'temperature 0.153: there are 10,000 items')
    """
    (few, warm), (many, cold) = _TEMPERATURES
    share = math.log(min(max(items, few), many) / few) / math.log(many / few)
    temperature = round(warm + share * (cold - warm), 3)
    return temperature, f"temperature {temperature:g}: there are {items:,} items"


LayerConfig = InputConfig | HiddenConfig | OutputConfig
_KINDS = {c.kind: c for c in (InputConfig, HiddenConfig, OutputConfig)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(codec.Config):
    """A feed-forward network: layers in order, and the loss for training.

    Only a chain is supported so far: one input, any number of hidden layers, one
    output. Each layer reads the one before it.

    >>> hidden = HiddenConfig(name="hidden1", size=256)
    >>> config = NetworkConfig(layers=(InputConfig(), hidden, OutputConfig()))
    >>> config.loss
    'softmax_cross_entropy'

    Attributes:
      layers: layers from input to output.
      loss: name of a loss in `sparsejax.losses`.
      loss_options: parameters of the loss, as `(name, value)` pairs.
      precision: "highest", "high" or "default", for products of float32 matrices: for the
        output layer see `sparsejax.output_loss` and `sparsejax.top_k`; for hidden layers
        that do not read the input it is `precision` of `flax.nnx.Linear`. None is
        "default".
      param_dtype: "float32" or "bfloat16", the dtype in which kernel and bias of the first
        and of the last layer are stored. Bfloat16 takes half the memory; it is rounded at
        random in training, see docs/optimizers.md. Layers between them always have float32.
      linear: scores that are added to those of the layers, for networks whose items are
        their features. The layers are trained without them. None adds nothing.

    Raises:
      ValueError: the layers are not a chain, a value is out of its range, or a
        loss, an option of it, or an activation is unknown; the message names the layer.
    """

    layers: tuple[LayerConfig, ...]
    loss: str = "softmax_cross_entropy"
    loss_options: tuple[tuple[str, float], ...] = ()
    precision: Precision = None
    param_dtype: str = "float32"
    linear: LinearConfig | None = None

    def __post_init__(self) -> None:
        _check_chain(self.layers)
        # Raises an error for an unknown loss.
        losses.get(self.loss, **dict(self.loss_options))
        check_precision(self.precision)
        if self.param_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f'param_dtype is "float32" or "bfloat16", got {self.param_dtype!r}'
            )

    @property
    def input(self) -> InputConfig:
        """The input layer."""
        return typing.cast(InputConfig, self.layers[0])

    @property
    def hidden(self) -> tuple[HiddenConfig, ...]:
        """The hidden layers, in order."""
        return typing.cast(tuple[HiddenConfig, ...], self.layers[1:-1])

    @property
    def output(self) -> OutputConfig:
        """The output layer."""
        return typing.cast(OutputConfig, self.layers[-1])

    @classmethod
    def autoencoder(
        cls,
        hidden: Sequence[int] = (256,),
        *,
        activation: str = "tanh",
        normalize: bool = True,
        corruption: float = 0.5,
        dropout: float = 0.0,
        temperature: float | None = 0.1,
        tied: bool = False,
        output_dtype: str | None = None,
        param_dtype: str = "float32",
        loss: str = "softmax_cross_entropy",
        loss_options: Mapping[str, float] = types.MappingProxyType({}),
        precision: Precision = None,
        linear: LinearConfig | None = None,
    ) -> NetworkConfig:
        """Layers `input -> hidden1 -> ... -> output`, with equal options in all hidden layers.

        The defaults make a denoising autoencoder with cosine scores, the best of
        twenty settings on a held-out part of the Gowalla check-ins.

        >>> config = NetworkConfig.autoencoder((256, 128), activation="tanh")
        >>> [layer.name for layer in config.layers]
        ['input', 'hidden1', 'hidden2', 'output']
        >>> NetworkConfig.from_json(config.to_json()) == config
        True
        """
        middle = (
            HiddenConfig(
                name=f"hidden{i}", size=size, activation=activation, dropout=dropout
            )
            for i, size in enumerate(hidden, 1)
        )
        return cls(
            layers=(
                InputConfig(normalize=normalize, corruption=corruption),
                *middle,
                OutputConfig(
                    temperature=temperature,
                    tied="hidden1" if tied else None,
                    dtype=output_dtype,
                ),
            ),
            loss=loss,
            loss_options=tuple(sorted(loss_options.items())),
            precision=precision,
            param_dtype=param_dtype,
            linear=linear,
        )

    @classmethod
    def for_data(
        cls,
        data: HasSizes | int,
        items: int | None = None,
        entries: int | None = None,
        **options: Any,
    ) -> tuple[NetworkConfig, str]:
        """The network that `sparsejax train` chooses for these data, and the reasons.

        >>> config, why = NetworkConfig.for_data(6_040, 3_706, 800_000)
        >>> config.output.temperature, config.linear.weight
        (0.18, 1.74)
        >>> print(why.splitlines()[0])
        temperature 0.18: there are 3,706 items
        >>> NetworkConfig.for_data(6_040, 3_706, 800_000, temperature=0.2)[0].output.temperature
        0.2

        See `temperature_for` and `LinearConfig.for_data`.

        Args:
          data: the training data, such as a `SparseDataset`; or its number of rows.
          items: number of columns, if `data` is a number of rows.
          entries: number of entries, if `data` is a number of rows.
          **options: options of `autoencoder` that replace the ones chosen for the data.

        Raises:
          TypeError: sizes are missing, or are given in addition to data.
        """
        rows, items, entries = _sizes(data, items, entries)
        said = []
        if "temperature" not in options:
            options["temperature"], why = temperature_for(items)
            said.append(why)
        if "linear" not in options:
            options["linear"], why = LinearConfig.for_data(rows, items, entries)
            said.append(why)
        return cls.autoencoder(**options), "\n".join(said)

    def with_temperature(self, temperature: float | None) -> NetworkConfig:
        """This network with another temperature.

        >>> NetworkConfig.autoencoder((8,)).with_temperature(0.2).output.temperature
        0.2
        """
        output = dataclasses.replace(self.output, temperature=temperature)
        return dataclasses.replace(self, layers=(*self.layers[:-1], output))

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object; default values are omitted."""
        stored = {"param_dtype": self.param_dtype}
        return {
            "version": VERSION,
            "loss": {"name": self.loss, **dict(self.loss_options)},
            **({} if self.precision is None else {"precision": self.precision}),
            **(stored if self.param_dtype != type(self).param_dtype else {}),
            **({} if self.linear is None else {"linear": codec.document(self.linear)}),
            "layers": [_layer_to_dict(layer) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, document: codec.Json) -> NetworkConfig:
        """Makes a configuration from a JSON object, written by `to_json` or by a person.

        Raises:
          ValueError: no object; an unknown version, key or kind; a wrong type.
        """
        document = codec.without_version(document, VERSION, "the network")
        known = "version", "loss", "precision", "param_dtype", "linear", "layers"
        codec.check_keys(document, known, "the network")
        layers = document.get("layers")
        if not isinstance(layers, list) or not layers:
            raise ValueError('"layers" must be a list of layers, from input to output')
        loss = document.get("loss", cls.loss)
        if not isinstance(loss, str | dict):
            raise ValueError('"loss" must be a name, or an object with a "name"')
        stated = {"name": loss} if isinstance(loss, str) else loss
        name, options = codec.read_named(stated, "name", "the loss")
        named = codec.value(str | None, document.get("precision"), "precision")
        precision = None if named is None else check_precision(named)
        linear = document.get("linear")
        param_dtype = document.get("param_dtype", cls.param_dtype)
        return cls(
            layers=tuple(_layer_from_dict(i, layer) for i, layer in enumerate(layers)),
            loss=name,
            loss_options=tuple(sorted(options.items())),
            precision=precision,
            param_dtype=codec.value(str, param_dtype, "param_dtype"),
            linear=None
            if linear is None
            else codec.read(LinearConfig, linear, "linear"),
        )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> NetworkConfig:
        """Reads a JSON file. Errors name the file."""
        return codec.load(path, cls.from_json)


def _layer_to_dict(layer: LayerConfig) -> dict[str, Any]:
    chosen = codec.document(layer, skip_defaults=True)
    return {"kind": layer.kind, "name": layer.name, **chosen}


def _layer_from_dict(index: int, layer: Any) -> LayerConfig:
    if not isinstance(layer, dict):
        raise ValueError(f"layer {index} must be an object, got {layer!r}")
    label = f"layer {index} ({layer.get('name', 'unnamed')!r})"
    if isinstance(layer.get("source"), list):
        raise ValueError(
            f"{label}: several sources {layer['source']}; only a chain is supported"
        )
    return codec.read_tagged(_KINDS, "kind", layer, label)


def _check_chain(layers: tuple[LayerConfig, ...]) -> None:
    kinds = [layer.kind for layer in layers]
    if len(layers) < 3 or kinds != ["input", *["hidden"] * (len(layers) - 2), "output"]:
        raise ValueError(
            "layers must be one input, one or more hidden and one output, in this "
            f"order; got {', '.join(kinds) or 'none'}"
        )
    names = [layer.name for layer in layers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two layers are called {name!r}")
    for before, layer in itertools.pairwise(layers):
        assert not isinstance(layer, InputConfig)
        if layer.source not in (None, before.name):
            raise ValueError(
                f"layer {layer.name!r} reads {layer.source!r}; only a chain is "
                f"supported: it can read {before.name!r}, the layer before it"
            )
    for layer in layers:
        for key in ("corruption", "dropout"):
            rate = getattr(layer, key, 0.0)
            if not 0 <= rate < 1:
                raise ValueError(f"layer {layer.name!r}: {key} {rate} is not in [0, 1)")
        dtype = getattr(layer, "dtype", None)
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(
                f'layer {layer.name!r}: dtype is "float32" or "bfloat16", got {dtype!r}'
            )
        if isinstance(layer, HiddenConfig):
            if not 1 <= layer.size < 2**31:
                raise ValueError(
                    f"layer {layer.name!r}: size {layer.size} is not positive, or not "
                    "below 2^31"
                )
            try:
                activation(layer.activation)
            except ValueError as error:
                raise ValueError(f"layer {layer.name!r}: {error}") from None
        if isinstance(layer, OutputConfig):
            if layer.temperature is not None and not 0 < layer.temperature < math.inf:
                raise ValueError(
                    f"layer {layer.name!r}: temperature {layer.temperature} is not "
                    "positive"
                )
            if layer.tied is not None:
                _check_tied(layers, layer)


def _check_tied(layers: tuple[LayerConfig, ...], output: OutputConfig) -> None:
    first, last = layers[1], layers[-2]
    assert isinstance(first, HiddenConfig) and isinstance(last, HiddenConfig)
    if output.tied != first.name:
        raise ValueError(
            f"layer {output.name!r} is tied to {output.tied!r}; only the kernel of "
            f"{first.name!r}, the layer that reads the input, can be shared"
        )
    if first.size != last.size:
        raise ValueError(
            f"layer {output.name!r} shares the kernel of {first.name!r}, so "
            f"{last.name!r} must have {first.size} units too, not {last.size}"
        )
