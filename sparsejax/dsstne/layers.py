"""A module for a layer of a network, with dropout, normalization and loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax import losses
from sparsejax.data.reading.sources import check_columns
from sparsejax.dsstne.connections import (
    Dense,
    SharedWeights,
    connection,
    is_whole,
    owner_of,
)
from sparsejax.dsstne.definition import Definition, Pair
from sparsejax.dsstne.layer_definition import Connection, LayerDefinition, num_biases
from sparsejax.dsstne.losses import Boosted, activate, of_units, with_slope
from sparsejax.dsstne.network_files import Normalization
from sparsejax.dsstne.windows import convolved, pooled
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import call_with_auto_axes, to_host
from sparsejax.nn.layers import SparseLinear, SparseOutput
from sparsejax.ops.output_loss import output_loss
from sparsejax.ops.top_k import top_k
from sparsejax.optimizers.gradients import lookup

_NORMALIZATION_EPS = 1e-5
# Weight of a batch in the running mean and variance.
_NORMALIZATION_RATE = 0.1
# Partition spec of an array with a row for each example.
_BATCH = P("data")


class Held(NamedTuple):
    """The values of a network's layers for a batch.

    Attributes:
      units: values by the name of a layer: an array, or sparse rows. An output may be
        too large to be here, see `Layer.whole`.
      scores: values before the activation, for the outputs in `units`.
      kernels: arrays that several connections share, by the pair of layers that owns them.
    """

    units: dict[str, Any]
    scores: dict[str, jax.Array]
    kernels: dict[Pair, jax.Array]


class Counted(NamedTuple):
    """The rows of a batch that are examples, and the factor of their losses.

    Attributes:
      exists: `[batch]`; other rows are padding.
      share: factor of the loss of an example whose own weight is 1.
    """

    exists: jax.Array
    share: jax.Array

    @property
    def examples(self) -> jax.Array:
        """The number of examples, at least 1."""
        return jnp.maximum(jnp.sum(self.exists), 1)


class Layer(nnx.Module):
    """A layer with the connections from its sources.

    Attributes:
      layer: definition of the layer.
      rule: loss of an output.
      whole: whether an output is computed as an array `[batch, units]`, like hidden layers.
      ranked: number of items of an output that are ranked.
      counts: for each connection, number of connections that share its weights.
      factors: for each connection, the factor of the gradients of its weights.
      delta_norm: largest L2 norm of the gradient in an example's units; 0 is no
        limit.
    """

    def __init__(
        self,
        definition: Definition,
        layer: LayerDefinition,
        sharing: SharedWeights,
        *,
        row_sparse: bool,
        divided: set[str],
        rngs: nnx.Rngs,
    ):
        self.layer, self.lrn, self.ranked = layer, definition.lrn, layer.units
        self.rule: losses.LossRule | None = None
        self.whole = layer.kind == "Output" and is_whole(definition, layer)
        self.noise = _Dropout(layer, rngs=rngs)
        sources = layer.sources if layer.has_weights else ()
        self.source_layers = tuple(
            definition.layer(source.layer) for source in layer.sources
        )
        self.counts = tuple(
            sharing.counts[owner_of(layer, source)] for source in sources
        )
        self.factors = tuple(1 / count for count in self.counts)
        # In hidden pooling layers, DSSTNE ignores DeltaNorm, and our JSON reader rejects it.
        limits = layer.has_weights or layer.kind == "Output"
        self.delta_norm = layer.delta_norm if limits else 0.0
        self.connections = nnx.List(
            [
                connection(
                    definition,
                    layer,
                    source,
                    sharing,
                    row_sparse=row_sparse,
                    by_inputs=source.layer in divided,
                    rngs=rngs,
                )
                for source in sources
            ]
        )
        self.normalization = nnx.data(None)
        if layer.batch_normalization and layer.has_weights:
            self.normalization = _Normalization(layer)

    @property
    def is_divided(self) -> bool:
        """Whether the layer's units are divided over the mesh."""
        return len(self.connections) > 0 and all(
            isinstance(module, Dense) and module.by_outputs
            for module in self.connections
        )

    @property
    def output(self) -> SparseOutput | None:
        """The `SparseOutput`, if this layer is one; otherwise None."""
        for module in self.connections:
            if isinstance(module, SparseOutput):
                return module
        return None

    def set_rule(self, rule: losses.LossRule) -> None:
        self.rule = of_units(rule) if self._loss_is_of_units else rule

    def follow_values(self) -> None:
        """Makes all gradients equal to the derivatives of the loss, from now on.

        DeltaBoost and DeltaNorm are turned off, and the gradient of shared weights is a sum.
        """
        if isinstance(self.rule, Boosted):
            self.rule = self.rule.loss
        self.factors, self.delta_norm = (1.0,) * len(self.factors), 0.0

    @property
    def _loss_is_of_units(self) -> bool:
        # A dropped unit of Sigmoid is 0.5, the value for the score 0. For other activations, maybe
        # no score gives the value of a dropped unit, so the loss is computed from units.
        activation = self.layer.activation
        return (
            self.layer.dropout > 0
            and activation is not None
            and activation.name != "Sigmoid"
        )

    def connected(self) -> Iterator[tuple[Pair, Connection, Any]]:
        """For each connection, the pair of layers, the definition, and the module with weights."""
        for source, module in zip(self.layer.sources, self.connections, strict=False):
            yield (source.layer, self.layer.name), source, module

    def shared_kernels(self) -> dict[Pair, jax.Array]:
        """The arrays that other connections use too, by the pair of layers that owns them."""
        return {
            pair: with_slope(module.kernel[...], factor)
            for (pair, _, module), count, factor in zip(
                self.connected(), self.counts, self.factors, strict=True
            )
            if isinstance(module, Dense) and count > 1
        }

    def __call__(
        self, held: Held, batch: Counted | None, *, deterministic: bool | None
    ) -> tuple[jax.Array, jax.Array]:
        """Scores and units: the layer's values before and after its activation.

        Args:
          held: values of the layers before it.
          batch: None if all rows are examples.
          deterministic: whether dropout is turned off.
        """
        layer = self.layer
        if layer.type == "Pooling":
            units = self._limited(self._pooled(held), batch)
            return units, units
        z = self.sums(held)
        if self.normalization is not None:
            exists = None if batch is None else batch.exists
            z = self.normalization(z, exists, deterministic)
        z = self._limited(z, batch)
        assert layer.activation is not None
        if layer.kind == "Output" and not self._loss_is_of_units:
            dropped = self.noise.drawn(z, deterministic)
            z = z if dropped is None else jnp.where(dropped, 0, z)
            return z, self.activated(z)
        return z, self.noise(self.activated(z), deterministic)

    def sums(self, held: Held) -> jax.Array:
        """The sums over all connections before the activation, `[batch, units]`."""
        layer, total = self.layer, jnp.zeros((), jnp.float32)
        for at, (_, source, module) in enumerate(self.connected()):
            before, x = self.source_layers[at], held.units[source.layer]
            bias = module.bias[...]
            if isinstance(module, SparseLinear):
                y = lookup(module.kernel, x)
                total += with_slope(y, self.factors[at]) + bias[None, :]
                continue
            if self.counts[at] > 1:
                kernel = held.kernels[owner_of(layer, source)]
                if source.shared is not None and source.shared.transposed:
                    kernel = kernel.T
            else:
                kernel = module.kernel[...]
            x = dense(x)
            if layer.type == "Convolutional":
                total += convolved(layer, before, x, kernel, bias)
            else:
                total += call_with_auto_axes(
                    _product, x, kernel, bias, out_specs=_BATCH
                )
        return self._with_skips(total, held)

    def scores(self, held: Held) -> jax.Array:
        """The scores of all units of an output."""
        if self.layer.name in held.scores:
            return held.scores[self.layer.name]
        if self.output is not None:
            return self.output.scores(held.units[self.source_layers[0].name])
        return self._pooled(held) if self.layer.type == "Pooling" else self.sums(held)

    def _pooled(self, held: Held) -> jax.Array:
        names = [before.name for before in self.source_layers]
        arrays = [dense(held.units[name]) for name in names]
        pairs = list(zip(self.source_layers, arrays, strict=True))
        return self._with_skips(pooled(self.layer, self.lrn, pairs), held)

    def _with_skips(self, z: jax.Array, held: Held) -> jax.Array:
        for skip in self.layer.skips:
            z += dense(held.units[skip])
        return z

    def _limited(self, z: jax.Array, batch: Counted | None) -> jax.Array:
        """Returns `z`. In the backward pass, `DeltaNorm` limits its gradient."""
        if not self.delta_norm or batch is None:
            return z
        return _with_short_slopes(z, self.delta_norm * batch.share)

    def activated(self, scores: jax.Array) -> jax.Array:
        activation = self.layer.activation
        return scores if activation is None else activate(activation, scores)

    def loss(self, held: Held, labels: SparseRows, weights: jax.Array) -> jax.Array:
        """The loss of an output: `sum_b weights_b loss_b`."""
        check_columns("targets", labels.num_cols, self.layer.units, "items")
        rule = self.rule
        assert rule is not None
        if self.output is not None:
            h, module = held.units[self.source_layers[0].name], self.output
            return output_loss(
                h,
                with_slope(module.kernel[...], self.factors[0]),
                _bias(module),
                labels,
                loss=rule,
                weights=weights,
                kernel_spec=module.kernel_spec,
                implementation=module.implementation,
                precision="highest",
            )
        scores = self.scores(held)
        if self._loss_is_of_units:
            scores = held.units[self.layer.name]
        given, listed = dense(labels), dense(labels.with_data(None)) > 0
        if isinstance(rule, losses.ElementwiseLoss):
            each = jnp.sum(rule(scores, given, listed), axis=-1)
        else:
            all_items = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            each = jnp.sum(given * (all_items - scores), axis=-1)
        return jnp.sum(jnp.where(weights == 0, 0, weights * each))

    def top_k(
        self, held: Held, k: int, exclude: SparseRows | None
    ) -> tuple[jax.Array, jax.Array]:
        """Ids and activations of the best units of an output."""
        if self.output is not None:
            module = self.output
            ids, scores = top_k(
                held.units[self.source_layers[0].name],
                module.kernel[...],
                k,
                bias=_bias(module),
                exclude=exclude,
                num_items=self.ranked,
                kernel_spec=module.kernel_spec,
                implementation=module.implementation,
                precision="highest",
            )
        else:
            all_scores = self.scores(held)[:, : self.ranked]
            if exclude is not None:
                unwanted = dense(exclude.with_data(None))[:, : self.ranked] > 0
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
            every = jax.nn.logsumexp(self.scores(held), axis=-1, keepdims=True)
            found = jnp.exp(scores - every)
        else:
            found = activate(activation, scores)
        return ids, jnp.where(ids < 0, -jnp.inf, found)


class _Dropout(nnx.Module):
    """DSSTNE's dropout, which depends on the activation.

    A unit is dropped with probability p. With q = 1 - p, and alpha the limit of ELU or
    SELU far below 0::

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
        dropped = self.drawn(a, deterministic)
        if dropped is None:
            return a
        p, q = self.rate, 1 - self.rate
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

    def drawn(self, a: jax.Array, deterministic: bool | None) -> jax.Array | None:
        """Mask of the units that are dropped; None if there is no dropout."""
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or self.rate == 0:
            return None
        return jax.random.bernoulli(self.rngs(), self.rate, a.shape)


class _Normalization(nnx.Module):
    """Batch normalization of sums, over the examples and, in a convolution, over positions."""

    def __init__(self, layer: LayerDefinition):
        channels = num_biases(layer)
        self.channels = channels
        self.deterministic = False
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32))

    def __call__(
        self, z: jax.Array, exists: jax.Array | None, deterministic: bool | None
    ) -> jax.Array:
        if deterministic is None:
            deterministic = self.deterministic
        x = z.reshape(z.shape[0], self.channels, -1)
        if deterministic:
            mean, variance = self.mean[...], self.variance[...]
        else:
            if exists is None:
                exists = jnp.ones(z.shape[0], bool)
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


def _bias(module: SparseOutput) -> jax.Array:
    assert module.bias is not None
    return module.bias[...]


def _product(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.dot(x, kernel, precision=lax.Precision.HIGHEST) + bias[None, :]


def dense(x: Any) -> jax.Array:
    """The values of a layer as a dense array `[batch, units]`."""
    return x.todense() if isinstance(x, SparseRows) else x


@jax.custom_vjp
def _with_short_slopes(x: jax.Array, limit: Any) -> jax.Array:
    """Returns `x`. In the backward pass, each row's gradient is cut to an L2 norm of `limit`."""
    return x


def _short_backward(limit, g):
    norm = jnp.sqrt(jnp.sum(jnp.square(g), axis=-1, keepdims=True))
    return g * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30)), None


_with_short_slopes.defvjp(lambda x, limit: (x, limit), _short_backward)
