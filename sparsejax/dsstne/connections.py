"""The weights between two layers: initialization, sharding over a mesh, and sharing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparsejax.dsstne.definition import Definition, Pair
from sparsejax.dsstne.layer_definition import (
    Connection,
    LayerDefinition,
    num_biases,
    reads,
    weight_shape,
)
from sparsejax.mesh.layout import hidden_layout, jit_sharded, to_host
from sparsejax.nn.layers import SparseLinear, SparseOutput


class Locked(nnx.Variable):
    """Weights or a bias that training does not change."""


class Dense(nnx.Module):
    """Weights from one layer to another: `x W + b`, or a convolution.

    Attributes:
      by_outputs: whether the units of the layer are divided over the mesh.
    """

    def __init__(
        self,
        source: LayerDefinition,
        layer: LayerDefinition,
        *,
        by_inputs: bool,
        rngs: nnx.Rngs,
    ):
        layout = None
        if layer.type == "FullyConnected":
            layout = hidden_layout(source.units, layer.units, by_inputs=by_inputs)
        self.by_outputs = layout is not None and not by_inputs
        shape, init = weight_shape(source, layer), _initializer(layer, source.units)

        def made(spec: P | None, static: tuple, make: Callable, *arguments: Any):
            placed: dict[str, Any] = {} if spec is None else {"out_sharding": spec}
            value = jit_sharded(make, spec, static=static)(*arguments)
            return nnx.Param(value, **placed)

        kernel_spec, bias_spec = (None, None) if layout is None else layout
        self.kernel = made(kernel_spec, (1, 2), init, rngs.params(), shape, jnp.float32)
        self.bias = made(bias_spec, (0,), _bias, layer)


class _Bias(nnx.Module):
    """The bias of a connection whose weights belong to another connection."""

    def __init__(self, layer: LayerDefinition):
        self.bias = nnx.Param(_bias(layer))


@dataclasses.dataclass(frozen=True)
class SharedWeights:
    """Weights that several connections share.

    Attributes:
      counts: for each pair of layers, number of connections that use its weights.
      kernels: `[rows, hidden]` kernels, by the pair of layers that owns them. Rows are the
        features of sparse inputs and the items of outputs.
      locked: kernels that training does not change. They are here instead of in
        `kernels`.
    """

    counts: Mapping[Pair, int]
    kernels: Mapping[Pair, nnx.Param]
    locked: Mapping[Pair, Locked]

    @classmethod
    def of(
        cls, definition: Definition, *, row_sparse: bool, rngs: nnx.Rngs
    ) -> SharedWeights:
        groups: dict[Pair, list[tuple[LayerDefinition, Connection]]] = {}
        for layer in definition.layers:
            for source in layer.sources if layer.has_weights else ():
                group = groups.setdefault(owner_of(layer, source), [])
                group.append((layer, source))
        kernels = {
            pair: _shared_kernel(definition, pair, row_sparse=row_sparse, rngs=rngs)
            for pair, group in groups.items()
            if len(group) > 1 and _shares_rows(definition, pair, group)
        }
        locked = {
            pair: _locked(kernels[pair])
            for pair, group in groups.items()
            for _, source in group
            if pair in kernels and source.shared is None and source.locked
        }
        counts = {pair: len(group) for pair, group in groups.items()}
        return cls(counts, kernels, locked)


def connection(
    definition: Definition,
    layer: LayerDefinition,
    source: Connection,
    sharing: SharedWeights,
    *,
    row_sparse: bool,
    by_inputs: bool,
    rngs: nnx.Rngs,
) -> Any:
    """The module between a layer and the layer that it reads."""
    before, owner = definition.layer(source.layer), owner_of(layer, source)
    kernel = sharing.kernels.get(owner)
    options: dict[str, Any] = {
        "kernel_init": _initializer(layer, before.units),
        "bias_init": _constant(layer.weight_init.bias),
        "kernel": kernel,
        "rngs": rngs,
    }
    rows = _rows_are(definition, layer, source)
    if kernel is None and source.shared is not None:
        module = _Bias(layer)
    elif rows is None or (kernel is None and sharing.counts[owner] > 1):
        module = Dense(before, layer, by_inputs=by_inputs, rngs=rngs)
    elif rows == "features":
        module = SparseLinear(before.units, layer.units, **options)
        if kernel is None and (source.weight_norm or not row_sparse):
            module.kernel = _whole(module.kernel)
    else:
        module = SparseOutput(before.units, layer.units, **options)
    module = cast(Any, module)
    if source.locked:
        module.bias = _locked(module.bias)
    if owner in sharing.locked:
        module.kernel = sharing.locked[owner]
    elif source.locked and source.shared is None:
        module.kernel = _locked(module.kernel)
    return module


def owner_of(layer: LayerDefinition, source: Connection) -> Pair:
    """The pair of layers that owns the weights between a layer and a source."""
    if source.shared is None:
        return source.layer, layer.name
    return source.shared.source_input, source.shared.source_output


def is_whole(definition: Definition, layer: LayerDefinition) -> bool:
    """Whether an output is computed as an array `[batch, units]`, like hidden layers."""
    weighted = layer.has_weights and (layer.dropout > 0 or layer.batch_normalization)
    is_read = any(layer.name in reads(each) for each in definition.layers)
    return weighted or layer.delta_norm > 0 or is_read


def _rows_are(
    definition: Definition, layer: LayerDefinition, source: Connection
) -> Literal["features", "items"] | None:
    """The kind of units for which a connection's kernel has a row each.

    These are the features in a `SparseLinear`, and the items in a `SparseOutput`; None if the
    connection is neither.
    """
    if layer.type != "FullyConnected":
        return None
    before = definition.layer(source.layer)
    if before.kind == "Input" and before.sparse:
        return "features"
    alone = len(layer.sources) == 1 and not layer.skips
    if layer.kind == "Output" and alone and not is_whole(definition, layer):
        return "items"
    return None


def _shares_rows(
    definition: Definition, pair: Pair, group: list[tuple[LayerDefinition, Connection]]
) -> bool:
    """Whether all connections that share a pair's weights can use one kernel by rows."""
    kinds = {
        (source.layer, layer.name): _rows_are(definition, layer, source)
        for layer, source in group
    }
    return all(
        kind is not None
        and (
            source.shared is None
            or source.shared.transposed == (kind != kinds.get(pair))
        )
        for (layer, source), kind in zip(group, kinds.values(), strict=True)
    )


def _shared_kernel(
    definition: Definition, pair: Pair, *, row_sparse: bool, rngs: nnx.Rngs
) -> nnx.Param:
    before, layer = map(definition.layer, pair)
    [owner] = [source for source in layer.sources if source.layer == before.name]
    of_features = _rows_are(definition, layer, owner) == "features"
    rows, width = layer.units, before.units
    if of_features:
        rows, width = width, rows
    init: dict[str, Any] = {
        "use_bias": False,
        "kernel_init": _initializer(layer, before.units),
        "rngs": rngs,
    }
    members = [
        _rows_are(definition, other, source)
        for other in definition.layers
        for source in other.sources
        if owner_of(other, source) == pair
    ]
    if "items" in members:
        return SparseOutput(width, rows, **init).kernel
    kernel = SparseLinear(rows, width, **init).kernel
    return kernel if row_sparse and not owner.weight_norm else _whole(kernel)


def _whole(kernel: nnx.Param) -> nnx.Param:
    """Makes a kernel whose rows are all updated in each step."""
    return nnx.Param(kernel[...], **_placed(kernel))


def _locked(variable: nnx.Variable) -> Locked:
    return Locked(variable[...], **_placed(variable))


def _placed(variable: nnx.Variable) -> dict[str, Any]:
    spec = variable.get_metadata().get("out_sharding")
    return {} if spec is None else {"out_sharding": spec}


def _initializer(layer: LayerDefinition, inputs: int) -> Callable[..., jax.Array]:
    """The initializer of a connection's weights. `inputs` is the number of its source's units."""
    start = layer.weight_init
    return _drawing(start.scheme, start.scale, inputs, layer.units)


# The cache returns the identical function for an equal value, so JAX reuses compiled programs.
_constant = functools.lru_cache(maxsize=256)(nnx.initializers.constant)


@functools.lru_cache(maxsize=256)
def _drawing(
    scheme: str, scale: float, inputs: int, outputs: int
) -> Callable[..., jax.Array]:
    widths = {
        # This is half of the bound by Glorot and Bengio.
        "Xavier": scale / 2 * math.sqrt(6 / (inputs + outputs)),
        "CaffeXavier": scale * math.sqrt(3 / outputs),
        "Uniform": scale,
    }
    deviations = {"Gaussian": scale, "SELU": math.sqrt(1 / inputs)}

    def draw(key, shape, dtype):
        if scheme == "Constant":
            return jnp.full(shape, scale, dtype)
        if scheme in deviations:
            return deviations[scheme] * jax.random.normal(key, shape, dtype)
        low, high = (0, scale)  # UnitBall
        if scheme in widths:
            low, high = -widths[scheme], widths[scheme]
        return jax.random.uniform(key, shape, dtype, low, high)

    return draw


def _bias(layer: LayerDefinition) -> jax.Array:
    return jnp.full(num_biases(layer), layer.weight_init.bias, jnp.float32)


def shorten(module: Any, limit: float) -> None:
    """Scales the weights of each unit of the layer to an L2 norm of at most `limit`."""
    kernel = module.kernel[...]
    rows = isinstance(module, SparseOutput) or kernel.ndim > 2  # a row for each unit
    axes = tuple(range(1, kernel.ndim)) if rows else 0
    norm = jnp.sqrt(jnp.sum(jnp.square(kernel), axis=axes, keepdims=True))
    module.kernel[...] = kernel * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30))


def set_array(variable: nnx.Variable, array: np.ndarray) -> None:
    """Sets the first rows of a variable; the other rows, which are padding, become 0."""
    shape = variable[...].shape
    whole = np.zeros(shape, np.float32)
    whole[tuple(slice(size) for size in array.shape)] = array
    variable.set_value(jax.device_put(whole, variable[...].sharding))


def stored(module: Any) -> np.ndarray:
    """The weights of a connection in the layout of a network file, on the host."""
    kernel = to_host(module.kernel[...])
    if isinstance(module, SparseLinear):
        return kernel[: module.in_features]
    if isinstance(module, SparseOutput):
        return kernel[: module.num_items].T
    return kernel
