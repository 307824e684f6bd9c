"""Layers of click models, among them the last ones of several labels, which may share some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.clicks.config import PLE, MMoE, SharedBottom, Sharing

_kernel_init = nnx.initializers.lecun_normal(batch_axis=0)


class Layers(nnx.Module):
    """Linear layers with ReLU between them, and optionally after the last one.

    The input may have more columns than the first layer, if these are 0.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        end: bool = False,
    ):
        self.end = end
        self.layers = nnx.List(
            nnx.Linear(a, b, dtype=dtype, rngs=rngs)
            for a, b in zip((inputs, *sizes), sizes, strict=False)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = linear(layer, x)
            x = x if i == last and not self.end else relu(x)
        return x


def linear(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """Applies `layer` to `x`, whose additional columns must be 0.

    The kernel is padded with zeros as it is cast, which costs nothing.
    """
    more = x.shape[1] - layer.in_features
    if not more:
        return layer(x)
    kernel = layer.kernel[...].astype(x.dtype)
    return with_bias(layer, x @ jnp.pad(kernel, ((0, more), (0, 0))))


def with_bias(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """Adds the bias of a layer to `x`, if it has one."""
    if layer.bias is None:
        return x
    return x + jnp.expand_dims(layer.bias[...].astype(x.dtype), range(x.ndim - 1))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """ReLU whose derivative is computed from its result.

    Autodiff would read `x`. Then `x` would have to be written by the product, and the result by
    another pass.
    """
    return jnp.maximum(x, 0)


relu.defvjp(lambda x: (relu(x),) * 2, lambda y, slope: (jnp.where(y != 0, slope, 0),))


def shared_layers(
    sharing: Sharing,
    inputs: int,
    sizes: Sequence[int],
    labels: int,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Makes layers that map `[batch, inputs]` to `[batch, labels]`.

    Args:
      sharing: way in which labels share layers.
      inputs: number of inputs.
      sizes: sizes of the shared layers, or of the layers of each expert.
      labels: number of labels.
      dtype: dtype in which the layers compute.
      rngs: random streams.

    Raises:
      ValueError: `sizes` is empty, so no layers can be shared.
    """
    if not sizes:
        raise ValueError(
            "several labels share the layers of top or hidden, and there are none: give a size"
        )
    return _MODULES[type(sharing)](sharing, inputs, sizes, labels, dtype, rngs)


class _Stacks(nnx.Module):
    """Several stacks of layers with equal sizes, computed by one product for each layer.

    ReLU is applied between layers, and optionally after the last one. A shared input may have more
    columns than the first layers, if these are 0.
    """

    def __init__(self, count, inputs, sizes, dtype, rngs, *, end: bool = False):
        self.count, self.dtype, self.end = count, dtype, end
        pairs = list(zip((inputs, *sizes), sizes, strict=False))
        self.kernels = nnx.List(
            nnx.Param(_kernel_init(rngs.params(), (count, a, b))) for a, b in pairs
        )
        self.biases = nnx.List(nnx.Param(jnp.zeros((count, b))) for _, b in pairs)

    def __call__(self, x: jax.Array) -> Float[Array, "batch count outputs"]:
        """`x` is `[batch, inputs]` for all stacks, or `[batch, count, inputs]`."""
        last = len(self.kernels) - 1
        for i, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            w = kernel[...].astype(self.dtype)
            if x.ndim == 2:
                w = jnp.pad(w, ((0, 0), (0, x.shape[1] - w.shape[1]), (0, 0)))
                flat = x @ w.transpose(1, 0, 2).reshape(x.shape[1], -1)
                x = flat.reshape(len(x), self.count, -1)
            else:
                x = jnp.einsum("bci,cio->bco", x, w)
            x = x + bias[...].astype(self.dtype)[None]
            x = x if i == last and not self.end else relu(x)
        return x


class _Towers(_Stacks):
    """The separate layers of each label, from `[batch, labels, inputs]` to `[batch, labels]`."""

    def __init__(self, sharing: Sharing, inputs, labels, dtype, rngs):
        super().__init__(labels, inputs, (*sharing.tower, 1), dtype, rngs)

    def __call__(self, x: jax.Array) -> Float[Array, "batch labels"]:
        return super().__call__(x)[..., 0]


def _weights(gates: _Stacks, x: jax.Array) -> Float[Array, "batch count experts"]:
    """The softmax of the gates' scores, computed in float32 and then rounded."""
    return jax.nn.softmax(gates(x).astype(jnp.float32)).astype(gates.dtype)


class _SharedBottom(nnx.Module):
    """The layers that `SharedBottom` configures."""

    def __init__(self, sharing: SharedBottom, inputs, sizes, labels, dtype, rngs):
        self.bottom = Layers(inputs, sizes, dtype, rngs, end=True)
        self.towers = _Towers(sharing, sizes[-1], labels, dtype, rngs)

    def __call__(self, x: jax.Array) -> Float[Array, "batch labels"]:
        return self.towers(self.bottom(x))


class _MMoE(nnx.Module):
    """The layers that `MMoE` configures."""

    def __init__(self, sharing: MMoE, inputs, sizes, labels, dtype, rngs):
        count = sharing.experts
        self.experts = _Stacks(count, inputs, sizes, dtype, rngs, end=True)
        self.gates = _Stacks(labels, inputs, (count,), dtype, rngs)
        self.towers = _Towers(sharing, sizes[-1], labels, dtype, rngs)

    def __call__(self, x: jax.Array) -> Float[Array, "batch labels"]:
        weights = _weights(self.gates, x)
        return self.towers(jnp.einsum("ble,beh->blh", weights, self.experts(x)))


class _Level(nnx.Module):
    """A level of PLE: experts of each label and shared ones, and gates that mix them."""

    def __init__(self, sharing: PLE, inputs, sizes, labels, dtype, rngs, *, last):
        self.labels, self.own, self.shared = labels, sharing.experts, sharing.shared
        count = labels * self.own + self.shared
        self.experts = _Stacks(count, inputs, sizes, dtype, rngs, end=True)
        self.gates = _Stacks(labels, inputs, (self.own + self.shared,), dtype, rngs)
        gate = None if last else _Stacks(1, inputs, (count,), dtype, rngs)
        self.shared_gate: _Stacks | None = nnx.data(gate)

    def __call__(self, x: jax.Array) -> Float[Array, "batch outputs hidden"]:
        """`x` is `[batch, inputs]` at the first level, and `[batch, labels + 1, inputs]` at
        later ones.
        """
        labels, of_labels, of_shared, given = self.labels, x, x, x
        if x.ndim == 3:
            of_labels, of_shared = x[:, :labels], x[:, labels:]
            own = jnp.repeat(of_labels, self.own, axis=1)
            shared = jnp.repeat(of_shared, self.shared, axis=1)
            given = jnp.concatenate([own, shared], axis=1)
        found = self.experts(given)
        own, shared = jnp.split(found, [labels * self.own], axis=1)
        own = own.reshape(len(own), labels, self.own, own.shape[-1])
        weights = _weights(self.gates, of_labels)
        mixed = jnp.einsum("ble,bleh->blh", weights[..., : self.own], own)
        mixed += jnp.einsum("ble,beh->blh", weights[..., self.own :], shared)
        if self.shared_gate is None:
            return mixed
        weights = _weights(self.shared_gate, of_shared)
        among_all = jnp.einsum("ble,beh->blh", weights, found)
        return jnp.concatenate([mixed, among_all], axis=1)


class _PLE(nnx.Module):
    """The layers that `PLE` configures."""

    def __init__(self, sharing: PLE, inputs, sizes, labels, dtype, rngs):
        widths = [inputs, *[sizes[-1]] * (sharing.levels - 1)]
        self.levels = nnx.List(
            _Level(
                sharing, width, sizes, labels, dtype, rngs, last=i + 1 == len(widths)
            )
            for i, width in enumerate(widths)
        )
        self.towers = _Towers(sharing, sizes[-1], labels, dtype, rngs)

    def __call__(self, x: jax.Array) -> Float[Array, "batch labels"]:
        for level in self.levels:
            x = level(x)
        return self.towers(x)


_MODULES: Mapping[type[Sharing], Callable[..., nnx.Module]] = {
    SharedBottom: _SharedBottom,
    MMoE: _MMoE,
    PLE: _PLE,
}


def chained(
    logits: Float[Array, "batch labels"], after: Sequence[int | None]
) -> Float[Array, "batch labels"]:
    """The logits of labels, some of which can only be 1 if an earlier label is 1.

    ::

        p_i = sigmoid(z_i)                  without an earlier label
        p_i = p_j sigmoid(z_i)              after label j
        logit p_i = -log(exp(-logit p_j) + exp(-z_i) + exp(-logit p_j - z_i))

    Args:
      logits: `[batch, labels]` conditional scores z.
      after: for each label, the index of the earlier label, or None.
    """
    found: list[jax.Array] = []
    for i, at in enumerate(after):
        z = -logits[:, i]
        if at is not None:
            before = -found[at]
            terms = jnp.stack([before, z, before + z])
            z = jax.nn.logsumexp(terms, axis=0)
        found.append(-z)
    return jnp.stack(found, axis=1)


def conditional(
    logits: Float[Array, "batch labels"], after: Sequence[int | None]
) -> Float[Array, "batch labels"]:
    """The inverse of `chained`: the logit of each label among the examples that have its earlier
    label.

    ::

        z_i = -log((exp(-logit p_i) - exp(-logit p_j)) / (1 + exp(-logit p_j)))

    The result is finite even if p_i and p_j are equal.
    """
    found = list(logits.T)
    for i, at in enumerate(after):
        if at is not None:
            mine, before = logits[:, i], logits[:, at]
            less = jnp.log(-jnp.expm1(jnp.minimum(mine - before, -1e-12)))
            found[i] = mine - less + jax.nn.softplus(-before)
    return jnp.stack(found, axis=1)
