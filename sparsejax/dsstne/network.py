"""A network of DSSTNE as a Flax module that `fit` and `recommend` take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax import losses
from sparsejax.data.batching import (
    Batch,
    Batches,
    Shown,
    for_batches,
    rows_in_a_batch,
    taken,
)
from sparsejax.data.files import Path
from sparsejax.data.sources import (
    Features,
    Inputs,
    Source,
    Sources,
    check_columns,
    check_inputs,
)
from sparsejax.dsstne.definition import (
    Connection,
    Definition,
    LayerDefinition,
    LocalResponseNormalization,
    weight_shape,
    weights_of,
)
from sparsejax.dsstne.losses import activate, of_output
from sparsejax.dsstne.network_files import (
    Normalization,
    Parameters,
    load_parameters,
    save_parameters,
)
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import replicated, to_host, using_auto_axes
from sparsejax.nn.layers import SparseDropout, SparseLinear, SparseOutput
from sparsejax.ops.gather_matmul import combined
from sparsejax.prediction.recommender import merged, split

_NORMALIZATION_EPS = 1e-5
# How much of the running mean and variance a batch replaces.
_NORMALIZATION_RATE = 0.1
_NORM_EPS = 1e-8

# What the layers of a network hold: arrays, or sparse rows. With weights by their pairs.
Values = dict[Any, Any]


class Locked(nnx.Variable):
    """Weights or a bias that training leaves as they are."""


class Network(nnx.Module):
    """A network of DSSTNE.

    ::

        z = sum over sources (x W + b) + sum of skips,    a = dropout(f(normalize(z)))

    >>> from sparsejax.dsstne.definition import parse
    >>> text = '{"Layers": [{"N": 5, "Sparse": true}, {"N": 2}, {"N": 5}]}'
    >>> network = Network(Definition.from_json(parse(text)), rngs=nnx.Rngs(0))
    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> network(x, deterministic=True).shape
    (2, 5)

    Inputs are known by the names of their data sets, or of their layers if they have none.
    A single sparse input is given without its name. Scores are those before the
    activation; `top_k` gives those after it.

    Args:
      definition: the layers. `sparse` of an input says which kind of data it takes.
      parameters: the numbers to start with; by default they are drawn.
      row_sparse: whether a training step writes only those rows of an input's weights that
        the batch touches; see `DsstneRule.row_sparse`. With a weight norm it writes all.
      dense_targets: whether the data set of the targets is dense.
      weighted: whether examples have weights. With SoftMax labels are then 1, not 1 / n.
      ignore_zeros: see `of_output`.
      brake_steps: after so many steps DSSTNE's brake starts anew; see `Brake`. 0 is none.
      rngs: random streams: "params" for the parameters, "dropout" for noise.

    Raises:
      NotImplementedError: it has several outputs or none, an output with dropout, a layer
        that reads an output, or what `of_output` refuses.
      ValueError: two inputs have the same name, or `parameters` do not fit.
    """

    def __init__(
        self,
        definition: Definition,
        *,
        parameters: Parameters | None = None,
        row_sparse: bool = True,
        dense_targets: bool = False,
        weighted: bool = False,
        ignore_zeros: bool = False,
        brake_steps: int = 0,
        rngs: nnx.Rngs,
    ):
        outputs = definition.of_kind("Output")
        if len(outputs) != 1:
            raise NotImplementedError(
                f"the network has {len(outputs)} layers of kind Output; one is supported"
            )
        self.definition, self.weighted = definition, weighted
        _check_supported(definition)
        self.output_layer = outputs[0]
        self.loss_rule = of_output(
            definition, outputs[0], sparse=not dense_targets, ignore_zeros=ignore_zeros
        )
        self.corruption = SparseDropout(definition.denoising, rngs=rngs)
        self.layers = nnx.List(
            [
                _Layer(definition, layer, row_sparse=row_sparse, rngs=rngs)
                for layer in definition.in_order
            ]
        )
        self.brake = nnx.data(Brake(brake_steps) if brake_steps else None)
        if parameters is not None:
            check_parameters(definition, parameters)
            self._set(parameters)

    @property
    def num_features(self) -> Features:
        """The number of input features, or a dict for several inputs; see `Recommender`."""
        inputs = self.definition.of_kind("Input")
        if len(inputs) == 1 and inputs[0].sparse:
            return inputs[0].units
        return {
            name_of(layer): layer.units if layer.sparse else _row_shape(layer)
            for layer in inputs
        }

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        output = self._output.output
        return self._output.ranked if output is None else output.num_items

    def rank_first(self, items: int) -> None:
        """From now on `top_k` ranks only the first items: the others are padding.

        The network cannot be trained any more.
        """
        if not 1 <= items <= self.num_items:
            raise ValueError(f"{items=} must be from 1 to {self.num_items:,}")
        if self._output.output is None:
            self._output.ranked = items
        else:
            self._output.output.num_items = items

    def units(
        self, inputs: Sources, layer: str, *, batch_size: int = 512
    ) -> np.ndarray:
        """What a layer holds for each row of `inputs`, without noise: `[rows, units]`.

        Args:
          inputs: `[rows, features]`; or several by name, see `fit`.
          layer: its name.
          batch_size: rows at a time.

        Raises:
          KeyError: there is no such layer.
          ValueError: `inputs` does not fit the network.
        """
        self.definition.layer(layer)
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        with using_auto_axes():
            graphdef, state = split(self, None)
            size = rows_in_a_batch(batch_size, x.num_rows)
            batches = x.batches(x.for_batches(), np.arange(x.num_rows), size)
            parts = [np.asarray(_units(graphdef, state, b, layer)) for b in batches]
        return np.concatenate(parts)[: x.num_rows]

    def mean_loss(
        self,
        inputs: Sources,
        targets: Source,
        *,
        weights: np.ndarray | None = None,
        batch_size: int = 512,
    ) -> float:
        """The mean of `weights_b loss_b` over all rows, without noise.

        Args:
          inputs: as for `fit`.
          targets: as for `fit`.
          weights: `[rows]`; 1 by default.
          batch_size: rows at a time.

        Raises:
          ValueError: they do not fit the network or each other.
        """
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        labels = x.named("targets", targets)
        check_columns("targets", labels.matrix.num_cols, self.num_items, "items")
        if labels.num_rows != x.num_rows:
            raise ValueError(
                f"inputs has {x.num_rows:,} rows, but targets has {labels.num_rows:,}"
            )
        total, rows = 0.0, np.arange(x.num_rows)
        with using_auto_axes():
            graphdef, state = split(self, None)
            size = rows_in_a_batch(batch_size, x.num_rows)
            shown = x.batches(x.for_batches(), rows, size)
            wanted = Batches.of(for_batches(labels.matrix), rows, size)
            whole = np.zeros(-(-x.num_rows // size) * size, np.float32)
            whole[: x.num_rows] = 1 if weights is None else weights
            steps = zip(shown, wanted, whole.reshape(-1, size), strict=True)
            for batch, given, shares in steps:
                total += float(_loss(graphdef, state, batch, given, shares))
        return total / x.num_rows

    def values(
        self, x: Any, layer: str, *, deterministic: bool | None = None
    ) -> Float[Array, "batch units"]:
        """What a layer holds for each example of a batch; see `units` for all rows."""
        values = self._run(x, None, deterministic)
        if layer == self.output_layer.name:
            return self._output.activated(self._output.scores(values))
        return _dense(values[layer])

    def __call__(
        self, x: Any, *, deterministic: bool | None = None
    ) -> Float[Array, "batch items"]:
        """All scores, before the activation."""
        return self._output.scores(self._run(x, None, deterministic))

    def loss(
        self,
        x: Any,
        labels: SparseRows,
        *,
        weights: Float[Array, "batch"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, ""]:
        """`sum_b weights_b loss_b`; weights are 1 by default.

        The sparseness penalty has gradients, but is not part of the value.
        """
        if weights is None:
            weights = jnp.ones(labels.num_rows, jnp.float32)
        values = self._run(x, weights, deterministic)
        if self.output_layer.activation is not None:
            name, counted = self.output_layer.activation.name, labels.data is not None
            if name == "SoftMax" and not counted and not self.weighted:
                labels = combined(labels, "mean")
        loss = self._output.loss(values, labels, weights, self.loss_rule)
        penalty = self._penalty(values, weights)
        if deterministic or self.brake is None:
            return loss + (penalty - lax.stop_gradient(penalty))
        exists = weights > 0
        mean = loss / jnp.maximum(jnp.sum(weights), 1e-30)
        total = loss + penalty
        share = self.brake(lax.stop_gradient(mean * jnp.sum(exists)))
        return lax.stop_gradient(loss) + share * (total - lax.stop_gradient(total))

    def top_k(
        self, x: Any, k: int, *, exclude: SparseRows | None = None
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and activations of the `k` best items of each row, without noise."""
        return self._output.top_k(self._run(x, None, True), k, exclude)

    def project(self) -> None:
        """Divides the weights that lead to a unit where their L2 norm is too large.

        `fit` calls it after each step.
        """
        for layer in self.layers:
            norms = {s.layer: s.weight_norm for s in layer.layer.sources}
            for (source, _), module in layer.by_pair().items():
                if norms[source] and not isinstance(module, _Sharing):
                    _shorten(module, norms[source])

    def parameters(self) -> Parameters:
        """All numbers, as a network file has them, on the host."""
        weights, biases, normalizations = {}, {}, {}
        for layer in self.layers:
            for pair, module in layer.by_pair().items():
                bias = to_host(module.bias[...])
                biases[pair] = bias[: _num_biases(layer.layer)]
                if not isinstance(module, _Sharing):
                    weights[pair] = _stored(module)
            if layer.normalization is not None:
                normalizations[layer.layer.name] = layer.normalization.numbers()
        return Parameters(weights, biases, normalizations)

    @property
    def _output(self) -> _Layer:
        found = [layer for layer in self.layers if layer.layer == self.output_layer]
        return found[0]

    def _set(self, parameters: Parameters) -> None:
        for layer in self.layers:
            for pair, module in layer.by_pair().items():
                _set(module.bias, parameters.biases[pair])
                if isinstance(module, SparseOutput):
                    _set(module.kernel, parameters.weights[pair].T)
                elif not isinstance(module, _Sharing):
                    _set(module.kernel, parameters.weights[pair])
            if layer.normalization is not None:
                layer.normalization.set(parameters.normalizations[layer.layer.name])

    def _run(
        self, x: Any, weights: jax.Array | None, deterministic: bool | None
    ) -> Values:
        """What each layer holds; without the output, which may be large."""
        inputs = self.definition.of_kind("Input")
        if len(inputs) == 1 and inputs[0].sparse:
            x = {name_of(inputs[0]): x}
        values: Values = {}
        kernels = self._kernels()
        for module in self.layers:
            layer = module.layer
            if layer.kind == "Input":
                value = x[name_of(layer)]
                if not layer.sparse:
                    value = value.reshape(value.shape[0], -1)
                    value = module.noise(value, deterministic)
                elif layer.denoising:
                    value = self.corruption(value, deterministic=deterministic)
                values[layer.name] = value
            elif layer.kind == "Hidden":
                values[layer.name] = module(
                    values, kernels, weights, deterministic=deterministic
                )
        values.update(kernels)
        return values

    def _kernels(self) -> Values:
        """Weights that several connections share, by their pairs of layers."""
        shared = {}
        for layer in self.definition.layers:
            for source in layer.sources:
                if source.shared is not None:
                    pair = source.shared.source_input, source.shared.source_output
                    shared[pair] = shared.get(pair, 1) + 1
        kernels: Values = {}
        for module in self.layers:
            for pair, connection in module.by_pair().items():
                if pair in shared:
                    kernel = connection.kernel[...]
                    kernels[pair] = _slower(kernel, 1 / shared[pair])
        return kernels

    def _penalty(self, values: Values, weights: jax.Array) -> jax.Array:
        """The sparseness penalties, times the sum of the weights."""
        exists = weights > 0
        count = jnp.maximum(jnp.sum(exists), 1)
        total = jnp.zeros((), jnp.float32)
        for layer in self.definition.layers:
            penalty = self.definition.penalty_of(layer)
            if penalty is None:
                continue
            used = jnp.where(exists[:, None], values[layer.name], 0)
            mean = jnp.clip(jnp.sum(used, axis=0) / count, 1e-6, 1 - 1e-6)
            p = penalty.p
            divergence = -p * jnp.log(mean) - (1 - p) * jnp.log1p(-mean)
            total += penalty.beta * jnp.sum(divergence)
        return total * jnp.sum(weights)


@functools.partial(jax.jit, static_argnames=("graphdef", "layer"))
def _units(graphdef, state, shown: Shown, layer: str):
    with merged(graphdef, state) as network:
        found = network.values(taken(shown), layer, deterministic=True)
        return replicated(found)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _loss(graphdef, state, shown: Shown, labels: Batch, weights: jax.Array):
    with merged(graphdef, state) as network:
        x, given = taken(shown), labels.take()
        found = network.loss(x, given, weights=weights, deterministic=True)
        return replicated(found)


def load_network(path: Path) -> Network:
    """A trained network, from a NetCDF file of DSSTNE.

    >>> network = dsstne.load_network("gl.nc")
    >>> data = dsstne.read_datasets("gl_input.nc", features="features")["gl_input"]
    >>> found = recommend(network, data, k=10)

    Raises:
      DataError: the file is missing, damaged or wrong.
      NotImplementedError: see `Network`.
    """
    definition, parameters = load_parameters(path)
    return Network(definition, parameters=parameters, rngs=nnx.Rngs(0))


def save_network(path: Path, network: Network) -> None:
    """Writes a network as a NetCDF file, whole or not at all, that DSSTNE can load.

    Rows must be up to date, as they are after `fit`.

    Raises:
      OSError: the file cannot be written; nothing is left behind.
    """
    save_parameters(path, network.definition, network.parameters())


def name_of(layer: LayerDefinition) -> str:
    """By what name an input is given."""
    return layer.dataset or layer.name


def regularization(network: Network, *, l2: float, l1: float) -> float:
    """`l2 / 2 sum w^2 + l1 sum |w|` over all weights; biases are none.

    Rows must be up to date; see `Optimizer.flush`.
    """
    kernels = [
        variable[...]
        for _, variable in nnx.to_flat_state(nnx.state(network, nnx.Param))
        if variable[...].ndim >= 2
    ]
    squares = sum(float(jnp.sum(jnp.square(kernel))) for kernel in kernels)
    sizes = sum(float(jnp.sum(jnp.abs(kernel))) for kernel in kernels)
    return l2 / 2 * squares + l1 * sizes


def check_parameters(definition: Definition, parameters: Parameters) -> None:
    """Raises ValueError unless a network has the parameters."""
    wanted = weights_of(definition)
    for layer in definition.layers:
        for source in layer.sources if layer.has_weights else ():
            pair, shape = (source.layer, layer.name), (_num_biases(layer),)
            for what, arrays, expected in (
                ("weights", parameters.weights, wanted.get(pair)),
                ("bias", parameters.biases, shape),
            ):
                found = None if pair not in arrays else np.shape(arrays[pair])
                if expected is not None and found != expected:
                    raise ValueError(
                        f"the {what} from {pair[0]!r} to {pair[1]!r} must have the shape "
                        f"{expected}, got {found or 'none'}"
                    )
        normalized = layer.batch_normalization and layer.has_weights
        if normalized and layer.name not in parameters.normalizations:
            raise ValueError(
                f"layer {layer.name!r}: the numbers of its batch normalization are missing"
            )


def _check_supported(definition: Definition) -> None:
    names = [name_of(layer) for layer in definition.of_kind("Input")]
    if len(set(names)) < len(names):
        raise ValueError(f"two inputs read the same data set: {', '.join(names)}")
    [output] = definition.of_kind("Output")
    if output.dropout:
        raise NotImplementedError(
            f"layer {output.name!r}: pDropout of an output is not supported; leave it out"
        )
    for layer in definition.layers:
        if output.name in (*(s.layer for s in layer.sources), *layer.skips):
            raise NotImplementedError(
                f"layer {layer.name!r} reads the output {output.name!r}, which is not "
                "supported; make it a hidden layer"
            )


class Brake(nnx.Module):
    """DSSTNE's brake, which scales the gradients of steps with a large error.

    With E the sum of a batch's losses and m = 0.9 m + 0.1 E, from 0: from step 101 on, a
    step with E > 2 m has no gradient, and those of the 24 steps behind it are divided by
    10. Velocities and penalties of weights are not braked.

    Args:
      steps: after so many steps it starts anew.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.count = BrakeState(jnp.zeros((), jnp.int32))
        self.mean = BrakeState(jnp.zeros((), jnp.float32))
        self.left = BrakeState(jnp.zeros((), jnp.int32))

    def __call__(self, error: Float[Array, ""]) -> Float[Array, ""]:
        """The share of the gradient that counts in this step."""
        step = self.count[...] % self.steps
        mean = 0.9 * jnp.where(step == 0, 0, self.mean[...]) + 0.1 * error
        left = jnp.where(step == 0, 0, self.left[...])
        bad = (step >= 100) & (error > 2 * mean)
        share = jnp.where(bad, 0, jnp.where(left > 0, 0.1, 1)).astype(jnp.float32)
        left = jnp.where(bad, 25, left)
        self.count[...] = self.count[...] + 1
        self.mean[...] = mean
        self.left[...] = jnp.maximum(left - 1, 0)
        return share


class BrakeState(nnx.Variable):
    """What the brake remembers."""


class _Dense(nnx.Module):
    """Weights from one layer to another: `x W + b`, or a convolution."""

    def __init__(
        self, source: LayerDefinition, layer: LayerDefinition, *, rngs: nnx.Rngs
    ):
        shape = weight_shape(source, layer)
        init = _initializer(layer, source.units)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(_bias(layer))


class _Sharing(nnx.Module):
    """A bias beside the weights of another connection."""

    def __init__(self, layer: LayerDefinition):
        self.bias = nnx.Param(_bias(layer))


class _Layer(nnx.Module):
    """A layer with the connections that lead to it."""

    def __init__(
        self,
        definition: Definition,
        layer: LayerDefinition,
        *,
        row_sparse: bool,
        rngs: nnx.Rngs,
    ):
        self.layer, self.lrn, self.ranked = layer, definition.lrn, layer.units
        self.noise = _Dropout(layer, rngs=rngs)
        owners = {
            (source.shared.source_input, source.shared.source_output)
            for other in definition.layers
            for source in other.sources
            if source.shared is not None
        }
        sources = layer.sources if layer.has_weights else ()
        self.source_layers = tuple(
            definition.layer(source.layer) for source in layer.sources
        )
        self.connections = nnx.List(
            [
                _locked(
                    _connection(
                        definition,
                        layer,
                        source,
                        owned=(source.layer, layer.name) in owners,
                        row_sparse=row_sparse,
                        rngs=rngs,
                    ),
                    source,
                )
                for source in sources
            ]
        )
        self.normalization = nnx.data(None)
        if layer.batch_normalization and layer.has_weights:
            self.normalization = _Normalization(layer)

    @property
    def output(self) -> SparseOutput | None:
        """The layer over all items, if that is what this layer is."""
        for module in self.connections:
            if isinstance(module, SparseOutput):
                return module
        return None

    def by_pair(self) -> dict[tuple[str, str], Any]:
        """The modules that have weights or a bias, by the layers that they connect."""
        names = [layer.name for layer in self.source_layers]
        return {
            (name, self.layer.name): module
            for name, module in zip(names, self.connections, strict=False)
        }

    def __call__(
        self,
        values: Values,
        kernels: Values,
        weights: jax.Array | None,
        *,
        deterministic: bool | None,
    ) -> jax.Array:
        """What a hidden layer holds."""
        layer = self.layer
        if layer.type == "Pooling":
            sources = [
                (before, _dense(values[before.name])) for before in self.source_layers
            ]
            return _pooled(layer, self.lrn, sources)
        z = self.sums(values, kernels)
        if layer.delta_norm:
            share = 1.0
            if weights is not None:
                count = jnp.maximum(jnp.sum(weights > 0), 1)
                share = jnp.sum(weights) / count
            z = _with_short_slopes(z, layer.delta_norm * share)
        if self.normalization is not None:
            z = self.normalization(z, weights, deterministic)
        assert layer.activation is not None
        return self.noise(activate(layer.activation, z), deterministic)

    def sums(self, values: Values, kernels: Values) -> jax.Array:
        """`[batch, units]`, before the activation."""
        layer, total = self.layer, jnp.zeros((), jnp.float32)
        pairs = zip(layer.sources, self.source_layers, self.connections, strict=True)
        for source, before, module in pairs:
            x = values[before.name]
            if isinstance(module, SparseLinear):
                total += module(x)
                continue
            pair = before.name, layer.name
            if source.shared is not None:
                pair = source.shared.source_input, source.shared.source_output
                kernel = kernels[pair]
                kernel = kernel.T if source.shared.transposed else kernel
            else:
                kernel = kernels.get(pair, module.kernel[...])
            x, bias = _dense(x), module.bias[...]
            if layer.type == "Convolutional":
                total += _convolved(layer, before, x, kernel, bias)
            else:
                total += jnp.dot(x, kernel, precision=lax.Precision.HIGHEST)
                total += bias[None, :]
        for skip in layer.skips:
            total += _dense(values[skip])
        return total

    def scores(self, values: Values) -> jax.Array:
        """Of an output: all scores."""
        if self.output is not None:
            return self.output.scores(values[self.source_layers[0].name])
        if self.layer.type == "Pooling":
            sources = [
                (before, _dense(values[before.name])) for before in self.source_layers
            ]
            return _pooled(self.layer, self.lrn, sources)
        kernels = {key: v for key, v in values.items() if isinstance(key, tuple)}
        return self.sums(values, kernels)

    def activated(self, scores: jax.Array) -> jax.Array:
        activation = self.layer.activation
        return scores if activation is None else activate(activation, scores)

    def loss(
        self,
        values: Values,
        labels: SparseRows,
        weights: jax.Array,
        rule: losses.LossRule,
    ) -> jax.Array:
        """Of an output: `sum_b weights_b loss_b`."""
        if self.output is not None:
            h = values[self.source_layers[0].name]
            return self.output.loss(h, labels, loss=rule, weights=weights)
        scores, given = self.scores(values), _dense(labels)
        listed = _dense(labels.with_data(None)) > 0
        if isinstance(rule, losses.ElementwiseLoss):
            each = jnp.sum(rule(scores, given, listed), axis=-1)
        else:
            all_items = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            each = jnp.sum(given * (all_items - scores), axis=-1)
        return jnp.sum(jnp.where(weights == 0, 0, weights * each))

    def top_k(
        self, values: Values, k: int, exclude: SparseRows | None
    ) -> tuple[jax.Array, jax.Array]:
        """Of an output: ids and activations."""
        if self.output is not None:
            h = values[self.source_layers[0].name]
            ids, scores = self.output.top_k(h, k, exclude=exclude)
        else:
            all_scores = self.scores(values)[:, : self.ranked]
            if exclude is not None:
                unwanted = _dense(exclude.with_data(None))[:, : self.ranked] > 0
                all_scores = jnp.where(unwanted, -jnp.inf, all_scores)
            count = min(k, self.ranked)
            scores, ids = lax.top_k(all_scores, count)
            ids = jnp.where(scores == -jnp.inf, -1, ids)
            missing = ((0, 0), (0, k - count))
            ids = jnp.pad(ids, missing, constant_values=-1)
            scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        activation = self.layer.activation
        if activation is None:
            return ids, scores
        if activation.name == "SoftMax":
            every = jax.nn.logsumexp(self.scores(values), axis=-1, keepdims=True)
            found = jnp.exp(scores - every)
        else:
            found = activate(activation, scores)
        return ids, jnp.where(ids < 0, -jnp.inf, found)


def _connection(
    definition: Definition,
    layer: LayerDefinition,
    source: Connection,
    *,
    owned: bool,
    row_sparse: bool,
    rngs: nnx.Rngs,
) -> Any:
    """The module between a layer and what it reads; `owned` if others share its weights."""
    before = definition.layer(source.layer)
    if source.shared is not None:
        return _Sharing(layer)
    if owned or layer.type == "Convolutional":
        return _Dense(before, layer, rngs=rngs)
    init = _initializer(layer, before.units)
    bias_init = nnx.initializers.constant(layer.weight_init.bias)
    if before.kind == "Input" and before.sparse:
        module = SparseLinear(
            before.units,
            layer.units,
            kernel_init=init,
            bias_init=bias_init,
            rngs=rngs,
        )
        if source.weight_norm or not row_sparse:
            kernel = module.kernel
            module.kernel = nnx.Param(kernel[...], **_placed(kernel))
        return module
    alone = len(layer.sources) == 1 and not layer.skips
    if layer.kind == "Output" and alone:
        return SparseOutput(
            before.units,
            layer.units,
            kernel_init=init,
            bias_init=bias_init,
            rngs=rngs,
        )
    return _Dense(before, layer, rngs=rngs)


def _shorten(module: Any, limit: float) -> None:
    """Brings the weights of each unit of the layer to an L2 norm of at most `limit`."""
    kernel = module.kernel[...]
    rows = isinstance(module, SparseOutput) or kernel.ndim > 2  # a row for each unit
    axes = tuple(range(1, kernel.ndim)) if rows else 0
    norm = jnp.sqrt(jnp.sum(jnp.square(kernel), axis=axes, keepdims=True))
    module.kernel[...] = kernel * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30))


def _locked(module: Any, source: Connection) -> Any:
    if source.locked:
        module.bias = Locked(module.bias[...], **_placed(module.bias))
        if not isinstance(module, _Sharing):
            module.kernel = Locked(module.kernel[...], **_placed(module.kernel))
    return module


def _placed(variable: nnx.Variable) -> dict[str, Any]:
    spec = variable.get_metadata().get("out_sharding")
    return {} if spec is None else {"out_sharding": spec}


def _initializer(layer: LayerDefinition, inputs: int) -> Callable[..., jax.Array]:
    """How weights start. `inputs` is the number of units of the layer that is read."""
    scheme, scale = layer.weight_init.scheme, layer.weight_init.scale
    outputs = layer.units
    widths = {
        # Half of what Glorot and Bengio have.
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


def _num_biases(layer: LayerDefinition) -> int:
    return layer.size[-1] if layer.type == "Convolutional" else layer.units


def _bias(layer: LayerDefinition) -> jax.Array:
    return jnp.full(_num_biases(layer), layer.weight_init.bias, jnp.float32)


def _set(variable: nnx.Variable, array: np.ndarray) -> None:
    """Sets the first rows of a variable; the others, which only pad, are 0."""
    shape = variable[...].shape
    whole = np.zeros(shape, np.float32)
    whole[tuple(slice(size) for size in array.shape)] = array
    variable.set_value(jax.device_put(whole, variable[...].sharding))


def _stored(module: Any) -> np.ndarray:
    kernel = to_host(module.kernel[...])
    if isinstance(module, SparseLinear):
        return kernel[: module.in_features]
    if isinstance(module, SparseOutput):
        return kernel[: module.num_items].T
    return kernel


def _row_shape(layer: LayerDefinition) -> tuple[int, ...]:
    return tuple(reversed(layer.size))


def _dense(x: Any) -> jax.Array:
    return x.todense() if isinstance(x, SparseRows) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _slower(x: jax.Array, factor: float) -> jax.Array:
    """`x`, with `factor` as its slope."""
    return x


@_slower.defjvp
def _slower_jvp(factor, primals, tangents):
    (x,), (dx,) = primals, tangents
    return x, factor * dx


@jax.custom_vjp
def _with_short_slopes(x: jax.Array, limit: Any) -> jax.Array:
    """`x`; the gradient of each row is cut to an L2 norm of at most `limit`."""
    return x


def _short_forward(x, limit):
    return x, limit


def _short_backward(limit, g):
    norm = jnp.sqrt(jnp.sum(jnp.square(g), axis=-1, keepdims=True))
    return g * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30)), None


_with_short_slopes.defvjp(_short_forward, _short_backward)


class _Dropout(nnx.Module):
    """DSSTNE's dropout, of which there are three kinds.

    A unit is dropped with probability p. With q = 1 - p, and alpha what ELU or SELU goes
    to far below 0::

        Sigmoid     dropped: 0.5                kept: a
        ELU, SELU   dropped: A alpha + B        kept: A a + B
                    A = 1 / sqrt(q + alpha^2 p q),  B = -A p alpha
        others      dropped: 0                  kept: a / q
    """

    def __init__(self, layer: LayerDefinition, *, rngs: nnx.Rngs):
        self.rate, self.activation = layer.dropout, layer.activation
        self.deterministic = False
        self.rngs = rngs.dropout.fork()

    def __call__(self, a: jax.Array, deterministic: bool | None) -> jax.Array:
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or self.rate == 0:
            return a
        p, q = self.rate, 1 - self.rate
        dropped = jax.random.bernoulli(self.rngs(), p, a.shape)
        name = "" if self.activation is None else self.activation.name
        if self.activation is not None and name in ("ELU", "SELU"):
            alpha = -self.activation.elu_alpha
            alpha *= self.activation.selu_lambda if name == "SELU" else 1
            scale = 1 / math.sqrt(q + alpha**2 * p * q)
            shift = -scale * p * alpha
            return jnp.where(dropped, scale * alpha + shift, scale * a + shift)
        if name == "Sigmoid":
            return jnp.where(dropped, 0.5, a)
        return jnp.where(dropped, 0, a / q)


class _Normalization(nnx.Module):
    """Batch normalization of sums: over the examples, of a convolution also over places."""

    def __init__(self, layer: LayerDefinition):
        channels = _num_biases(layer)
        self.channels = channels
        self.deterministic = False
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32))

    def __call__(
        self, z: jax.Array, weights: jax.Array | None, deterministic: bool | None
    ) -> jax.Array:
        if deterministic is None:
            deterministic = self.deterministic
        x = z.reshape(z.shape[0], self.channels, -1)
        if deterministic:
            mean, variance = self.mean[...], self.variance[...]
        else:
            exists = jnp.ones(z.shape[0], bool) if weights is None else weights > 0
            used = exists[:, None, None]
            count = jnp.maximum(jnp.sum(exists), 1) * x.shape[2]
            mean = jnp.sum(jnp.where(used, x, 0), axis=(0, 2)) / count
            gap = jnp.where(used, x - mean[None, :, None], 0)
            variance = jnp.sum(jnp.square(gap), axis=(0, 2)) / count
            for old, new in ((self.mean, mean), (self.variance, variance)):
                moved = old[...] + _NORMALIZATION_RATE * (new - old[...])
                old[...] = lax.stop_gradient(moved)
        factor = self.scale[...] * lax.rsqrt(variance + _NORMALIZATION_EPS)
        x = (x - mean[None, :, None]) * factor[None, :, None]
        return (x + self.bias[...][None, :, None]).reshape(z.shape)

    def numbers(self) -> Normalization:
        variables = (self.scale, self.bias, self.mean, self.variance)
        return Normalization(*(to_host(v[...]) for v in variables))

    def set(self, normalization: Normalization) -> None:
        variables = (self.scale, self.bias, self.mean, self.variance)
        arrays = dataclasses.astuple(normalization)
        for variable, array in zip(variables, arrays, strict=True):
            variable.set_value(jnp.asarray(array))


# Convolution and pooling. Units are [channel][z][y][x].


def _image(x: jax.Array, size: tuple[int, ...], dimensions: int) -> jax.Array:
    """`[batch, channels, z, y, x]`, with as many of z, y, x as there are dimensions."""
    sizes = (*size, *[1] * (dimensions + 1 - len(size)))
    return x.reshape(x.shape[0], sizes[dimensions], *reversed(sizes[:dimensions]))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _padding(layer: LayerDefinition) -> list[tuple[int, int]]:
    return [(padding, padding) for padding in reversed(layer.padding)]


def _convolved(
    layer: LayerDefinition,
    before: LayerDefinition,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    dimensions = len(layer.kernel)
    places = "DHW"[-dimensions:]
    found = lax.conv_general_dilated(
        _image(x, before.size, dimensions),
        kernel,
        window_strides=tuple(reversed(layer.stride)),
        padding=_padding(layer),
        dimension_numbers=(f"NC{places}", f"OI{places}", f"NC{places}"),
        precision=lax.Precision.HIGHEST,
    )
    return _flat(found + bias.reshape(1, -1, *[1] * dimensions))


def _pooled(
    layer: LayerDefinition,
    lrn: LocalResponseNormalization,
    sources: list[tuple[LayerDefinition, jax.Array]],
) -> jax.Array:
    arrays = [array for _, array in sources]
    function = layer.function
    if function == "Maxout":
        return functools.reduce(jnp.maximum, arrays)
    if function in ("DotProduct", "Cosine"):
        first, *others = arrays
        products = [jnp.sum(first * other, axis=-1) for other in others]
        if function == "Cosine":
            lengths = [_length(array) + _NORM_EPS for array in arrays]
            products = [
                product / (lengths[0] * length)
                for product, length in zip(products, lengths[1:], strict=True)
            ]
        return jnp.stack(products, axis=-1)
    if function == "LRN":
        return sum(
            (_normalised(before, lrn, array) for before, array in sources),
            start=jnp.zeros((), jnp.float32),
        )
    return sum(
        (_window(layer, before, array) for before, array in sources),
        start=jnp.zeros((), jnp.float32),
    )


def _length(x: jax.Array) -> jax.Array:
    """The L2 norm of each row; its slope is 0 at 0."""
    square = jnp.sum(jnp.square(x), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _normalised(
    before: LayerDefinition, lrn: LocalResponseNormalization, x: jax.Array
) -> jax.Array:
    """Local response normalization over the channels."""
    image = _image(x, before.size, len(before.size) - 1)
    window = (1, lrn.n, *[1] * (image.ndim - 2))
    behind = (lrn.n - 1) // 2
    padding = [(0, 0)] * image.ndim
    padding[1] = (behind, lrn.n - behind - 1)
    squares = lax.reduce_window(
        jnp.square(image), 0.0, lax.add, window, (1,) * image.ndim, padding
    )
    return _flat(image * (lrn.k + lrn.alpha / lrn.n * squares) ** -lrn.beta)


def _window(layer: LayerDefinition, before: LayerDefinition, x: jax.Array) -> jax.Array:
    """The largest or the mean value in each window; padding does not count."""
    image = _image(x, before.size, len(layer.kernel))
    window = (1, 1, *reversed(layer.kernel))
    strides = (1, 1, *reversed(layer.stride))
    padding = [(0, 0), (0, 0), *_padding(layer)]
    if layer.function == "Max":
        return _flat(
            lax.reduce_window(image, -jnp.inf, lax.max, window, strides, padding)
        )

    def add(array):
        return lax.reduce_window(array, 0.0, lax.add, window, strides, padding)

    return _flat(add(image) / add(jnp.ones_like(image)))
