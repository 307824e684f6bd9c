"""A training step without an array for the gradient of the output kernel.

The gradient of a chunk of items is applied to its weights and optimizer state as soon as it is
computed. The layers before the output are differentiated as usual::

    h                      = encode(x)
    loss, dh, output layer = losses and updates, a chunk of items at a time
    gradients of encode    = gradients of  sum(h * dh)  with dh constant
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import weight_update
from sparsejax.losses import LossRule
from sparsejax.ops.chunked_loss import (
    Layer,
    LossBatch,
    Method,
    Updates,
    over_items,
    weighted_sum,
)
from sparsejax.ops.gram_loss import loss_and_updates
from sparsejax.ops.item_chunks import accumulator, slice_rows, write_rows
from sparsejax.ops.precision import check_precision
from sparsejax.ops.row_update import (
    State,
    by_elements,
    narrowed,
    place_of,
    step_of_arrays,
)
from sparsejax.ops.targets import Labels
from sparsejax.optimizers.optimizer import Optimizer


@runtime_checkable
class OutputLayer(Protocol):
    """The interface of an output layer that a fused step needs; `SparseOutput` implements it."""

    kernel: Any
    bias: Any
    dtype: Any
    temperature: Any
    implementation: Any
    precision: Any

    @property
    def kernel_spec(self) -> Any: ...

    def score_scale(self, kernel: Any) -> Any: ...

    def hidden_operand(self, h: Any) -> jax.Array: ...


@runtime_checkable
class Fusable(Protocol):
    """A model whose loss is a `SparseOutput`'s loss on the result of `encode`."""

    loss_rule: LossRule

    @property
    def output(self) -> OutputLayer:
        """The output layer, which scores items."""
        ...

    def encode(self, x: Any) -> jax.Array:
        """Computes the input `[batch, hidden]` of the output layer."""
        ...


class Derived(NamedTuple):
    """Arrays computed from parameters to score items, kept from step to step.

    Attributes:
      operand: the kernel in the dtype of the products, if it is not the kernel's own, else None.
      scale: factors of the scores, if they are cosines, else None.
    """

    operand: jax.Array | None
    scale: jax.Array | None


class _Arrays(NamedTuple):
    """All arrays that change when the output layer is updated."""

    kernel: jax.Array
    kernel_state: State
    bias: jax.Array | None
    bias_state: State
    derived: Derived


def check(model: Any, optimizer: Optimizer) -> None:
    """Raises NotImplementedError if a fused step cannot train the model, and states the reason."""
    if not isinstance(model, Fusable):
        raise NotImplementedError(
            "a fused update needs a model with encode, output (a SparseOutput) and "
            f"loss_rule, as FeedForward has; {type(model).__name__} lacks some of them"
        )
    bias = model.output.bias
    elsewhere = [
        ".".join(map(str, path))
        for path, node in nnx.iter_graph(
            {k: v for k, v in vars(model).items() if k != "output"}
        )
        if node is model.output.kernel or (node is bias and bias is not None)
    ]
    if elsewhere:
        raise NotImplementedError(
            f"the output's kernel is shared with {elsewhere[0]}, whose gradient has to "
            "be added first: a tied kernel cannot have a fused update"
        )
    if getattr(model.output, "content", None) is not None:
        raise NotImplementedError(
            "the vectors of items with content are made of several parameters, whose "
            "gradients need that of the vectors: they cannot have a fused update"
        )
    trained = nnx.filterlib.to_predicate(optimizer.wrt)
    frozen = [
        ".".join(path)
        for path in _keys(model)
        if not trained(path, getattr(model.output, path[-1]))
    ]
    if frozen:
        raise NotImplementedError(
            f"the optimizer does not train {' and '.join(frozen)} (wrt), which a fused "
            "update would move: leave fused out"
        )
    optimizer.state_of(_keys(model))


def derive(model: Fusable) -> Derived:
    """Computes the derived arrays from the current parameters."""
    return _derived(model.output, model.output.kernel[...])


def train_step(
    model: Fusable,
    optimizer: Optimizer,
    x: Any,
    labels: Labels,
    weights: Float[Array, "batch"],
    derived: Derived,
    *,
    chunk_scores: int | None = None,
) -> tuple[Float[Array, ""], Derived]:
    """Trains all parameters in place by one step on the loss `sum_b weights_b loss_b`.

    Args:
      model: model to train.
      optimizer: the optimizer of this model.
      x: input for the model's `encode`.
      labels: labels of the output.
      weights: `[batch]` factors of the examples' losses.
      derived: arrays derived from the current output layer, see `derive`.
      chunk_scores: approximate number of scores computed at a time. None chooses the fastest
          number for the device.

    Returns:
      The loss, and arrays derived from the updated output layer.
    """
    layer, rule = model.output, optimizer.rule
    count = optimizer.step[...] + 1
    numbers = rule.numbers(count)
    keys = _keys(model)
    states = optimizer.state_of(keys)
    bias = None if layer.bias is None else layer.bias[...]
    before = _Arrays(
        layer.kernel[...],
        states[keys[0]],
        bias,
        states[keys[1]] if bias is not None else {},
        derived,
    )
    read = [before.kernel, *before.kernel_state.values()]
    if derived.operand is not None:
        read.append(derived.operand)
    itemsize = sum(array.dtype.itemsize for array in read)
    fits = by_elements(rule, before.kernel, before.kernel_state)
    fits = fits and weight_update.fits(before.kernel.shape[1], itemsize)
    noises = [optimizer.noise_of(key) for key in keys]

    def operands(arrays: _Arrays) -> Layer:
        kernel = arrays.derived.operand
        bias = arrays.bias
        bias = None if bias is None else bias.astype(accumulator(bias.dtype))
        return Layer(
            arrays.kernel if kernel is None else kernel, bias, arrays.derived.scale
        )

    def move(w, state, gradient, start, noise, derived=lambda new: ()):
        """Updates a chunk of a parameter and its state inside the whole arrays."""
        size = len(gradient)
        old = slice_rows(w, start, size)
        parts = {name: slice_rows(array, start, size) for name, array in state.items()}
        wide = accumulator(w.dtype)
        new, parts = rule.step(old.astype(wide), parts, gradient.astype(wide), numbers)
        if noise is not None:
            noise = noise.after(start)
        new = narrowed(new, w.dtype, noise, count)
        # Without the barrier, XLA recomputes the chunk for each array written, and copies the old
        # values of the other arrays for that.
        new, parts, more = lax.optimization_barrier((new, parts, derived(new)))
        state = {name: write_rows(state[name], parts[name], start) for name in state}
        return write_rows(w, new, start), state, more

    def update_kernel(
        noises, start, slopes, h, arrays: _Arrays
    ) -> tuple[_Arrays, jax.Array | None]:
        """Updates a chunk of the kernel in the GPU program that computes its gradient."""
        step, scalars = step_of_arrays(rule, arrays.kernel_state, count)
        (kernel, *state), operand, sums = weight_update.weight_update(
            step,
            slopes,
            h,
            [arrays.kernel, *arrays.kernel_state.values()],
            arrays.derived.operand,
            start,
            scalars,
            place=place_of(noises[0], count),
            with_sums=arrays.bias is not None,
        )
        arrays = arrays._replace(
            kernel=kernel,
            kernel_state=dict(zip(arrays.kernel_state, state, strict=True)),
            derived=arrays.derived._replace(operand=operand),
        )
        return arrays, sums

    def update(noises, start, gradient: Layer, arrays: _Arrays) -> _Arrays:
        if len(gradient.kernel):
            arrays = update_rows(noises[0], start, gradient, arrays)
        if arrays.bias is None:
            return arrays
        bias, state, _ = move(
            arrays.bias, arrays.bias_state, gradient.bias, start, noises[1]
        )
        return arrays._replace(bias=bias, bias_state=state)

    def update_rows(noise, start, gradient: Layer, arrays: _Arrays) -> _Arrays:
        slope = gradient.kernel
        if gradient.scale is not None:
            old = slice_rows(arrays.kernel, start, len(slope))
            _, pull = jax.vjp(layer.score_scale, old)
            slope = slope.astype(accumulator(slope.dtype)) + pull(gradient.scale)[0]
        kernel, kernel_state, more = move(
            arrays.kernel,
            arrays.kernel_state,
            slope,
            start,
            noise,
            functools.partial(_derived, layer),
        )
        derived = jax.tree.map(
            lambda whole, chunk: write_rows(whole, chunk, start), arrays.derived, more
        )
        return arrays._replace(
            kernel=kernel, kernel_state=kernel_state, derived=derived
        )

    method = Method(
        rule=model.loss_rule,
        kernel_spec=layer.kernel_spec,
        implementation=layer.implementation,
        chunk_scores=chunk_scores,
        precision=check_precision(layer.precision),
    )

    def step_output(shard, batch, arrays):
        """Updates the output layer for a device's part of the batch and of the items."""
        first = shard.first_item(len(arrays.kernel))
        own = [None if noise is None else noise.after(first) for noise in noises]
        updates = Updates(
            layer=operands,
            update=functools.partial(update, own),
            update_kernel=functools.partial(update_kernel, own) if fits else None,
        )
        return loss_and_updates(method, batch, arrays, updates, shard)

    def surrogate(model):
        h = model.output.hidden_operand(model.encode(x))
        constant = lax.stop_gradient(h)
        # A separate program, because JAX cannot differentiate a program that writes arrays in
        # place.
        run = jax.jit(
            functools.partial(over_items, kernel_spec=method.kernel_spec),
            static_argnums=0,
        )
        per_example, dh, after = run(
            step_output, LossBatch(constant, labels, weights), before
        )
        loss = weighted_sum(per_example, weights)
        assert dh is not None  # `dh` is not None if there is an update
        wide = accumulator(h.dtype)
        slopes = lax.stop_gradient(dh).astype(wide)
        return jnp.sum(h.astype(wide) * slopes), (loss, after)

    (_, (loss, after)), grads = optimizer.value_and_grad(surrogate, has_aux=True)(model)
    optimizer.update(model, grads, updated=keys)
    layer.kernel.set_value(after.kernel)
    if layer.bias is not None:
        layer.bias.set_value(after.bias)
    done = dict(zip(keys, (after.kernel_state, after.bias_state), strict=False))
    optimizer.set_state_of(done)
    return loss, after.derived


def _derived(layer: OutputLayer, kernel: jax.Array) -> Derived:
    """Computes arrays derived from a kernel (or from some of its rows)."""
    dtype = layer.dtype or kernel.dtype
    return Derived(
        None if dtype == kernel.dtype else kernel.astype(dtype),
        None if layer.temperature is None else layer.score_scale(kernel),
    )


def _keys(model: Fusable) -> list[tuple]:
    """Paths of the output layer's parameters: the kernel, then the bias if there is one."""
    names = ["kernel"] if model.output.bias is None else ["kernel", "bias"]
    return [("output", name) for name in names]
