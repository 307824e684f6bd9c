"""A training step whose output kernel has no gradient array.

The gradient of a chunk of items is applied to its weights and optimizer state where it
is made. What remains to differentiate is the part of the model before the output::

    h                      = encode(x)
    loss, dh, output layer = losses and updates, a chunk of items at a time
    gradients of encode    = those of  sum(h * dh)  with dh constant
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
from sparsejax.mesh.blocks import SparseRows
from sparsejax.nn.layers import SparseOutput
from sparsejax.ops.chunked_loss import (
    Layer,
    loss_and_updates,
    over_items,
    weighted_sum,
)
from sparsejax.ops.item_chunks import accumulator, slice_rows, write_rows
from sparsejax.ops.row_update import State, by_elements, step_of_arrays
from sparsejax.optimizers.optimizer import Optimizer


@runtime_checkable
class Fusable(Protocol):
    """A model whose loss is that of a `SparseOutput` on what `encode` makes."""

    output: SparseOutput
    loss_rule: LossRule

    def encode(self, x: Any) -> jax.Array:
        """`[batch, hidden]`."""
        ...


class Derived(NamedTuple):
    """What scores are made of beside parameters, kept from step to step.

    Attributes:
      operand: the kernel in the dtype of the products, if that is another.
      scale: factors of the scores, if they are cosines.
    """

    operand: jax.Array | None
    scale: jax.Array | None


class _Tables(NamedTuple):
    """All that an update of the output layer changes."""

    kernel: jax.Array
    kernel_state: State
    bias: jax.Array | None
    bias_state: State
    derived: Derived


def check(model: Any, optimizer: Optimizer) -> None:
    """Raises NotImplementedError if the two cannot be trained so, and says why."""
    if not isinstance(model, Fusable):
        raise NotImplementedError(
            "a fused update needs a model with encode, output (a SparseOutput) and "
            f"loss_rule, as FeedForward has; {type(model).__name__} has not all of them"
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
    """From the parameters as they are now."""
    return _derived(model.output, model.output.kernel[...])


def train_step(
    model: Fusable,
    optimizer: Optimizer,
    x: Any,
    labels: SparseRows,
    weights: Float[Array, "batch"],
    derived: Derived,
    *,
    chunk_scores: int | None = None,
) -> tuple[Float[Array, ""], Derived]:
    """One step of all parameters, in place: as of `sum_b weights_b loss_b`.

    Args:
      model: with the parameters.
      optimizer: of this model.
      x: what the model encodes.
      labels: of the output.
      weights: of the examples.
      derived: from the output layer as it is now, see `derive`.
      chunk_scores: about how many scores of the output exist at a time; None is what is
        fastest here.

    Returns:
      The loss, and what was derived from the output layer as it is now.
    """
    layer, rule = model.output, optimizer.rule
    count = optimizer.step[...] + 1
    numbers = rule.numbers(count)
    keys = _keys(model)
    states = optimizer.state_of(keys)
    bias = None if layer.bias is None else layer.bias[...]
    before = _Tables(
        layer.kernel[...],
        states[keys[0]],
        bias,
        states[keys[1]] if bias is not None else {},
        derived,
    )
    arrays = [before.kernel, *before.kernel_state.values()]
    if derived.operand is not None:
        arrays.append(derived.operand)
    itemsize = sum(array.dtype.itemsize for array in arrays)
    fits = by_elements(rule, before.kernel, before.kernel_state)
    fits = fits and weight_update.fits(before.kernel.shape[1], itemsize)

    def operands(tables: _Tables) -> Layer:
        kernel = tables.derived.operand
        bias = tables.bias
        bias = None if bias is None else bias.astype(accumulator(bias.dtype))
        return Layer(
            tables.kernel if kernel is None else kernel, bias, tables.derived.scale
        )

    def move(w, state, gradient, start, derived=lambda new: ()):
        """One step of a chunk of a parameter and of its state, in the whole arrays."""
        size = len(gradient)
        old = slice_rows(w, start, size)
        parts = {name: slice_rows(array, start, size) for name, array in state.items()}
        wide = accumulator(w.dtype)
        new, parts = rule.step(old.astype(wide), parts, gradient.astype(wide), numbers)
        new = new.astype(w.dtype)
        # Else XLA works out the chunk once more for each array that is written, from
        # old values of the others, and copies those to have them.
        new, parts, more = lax.optimization_barrier((new, parts, derived(new)))
        state = {name: write_rows(state[name], parts[name], start) for name in state}
        return write_rows(w, new, start), state, more

    def update_kernel(
        start, slopes, h, tables: _Tables
    ) -> tuple[_Tables, jax.Array | None]:
        """The same by the GPU program that makes the gradient."""
        step, scalars = step_of_arrays(rule, tables.kernel_state, count)
        (kernel, *state), operand, sums = weight_update.weight_update(
            step,
            slopes,
            h,
            [tables.kernel, *tables.kernel_state.values()],
            tables.derived.operand,
            start,
            scalars,
            with_sums=tables.bias is not None,
        )
        tables = tables._replace(
            kernel=kernel,
            kernel_state=dict(zip(tables.kernel_state, state, strict=True)),
            derived=tables.derived._replace(operand=operand),
        )
        return tables, sums

    def update(start, gradient: Layer, tables: _Tables) -> _Tables:
        if len(gradient.kernel):
            tables = update_rows(start, gradient, tables)
        if tables.bias is None:
            return tables
        bias, state, _ = move(tables.bias, tables.bias_state, gradient.bias, start)
        return tables._replace(bias=bias, bias_state=state)

    def update_rows(start, gradient: Layer, tables: _Tables) -> _Tables:
        slope = gradient.kernel
        if gradient.scale is not None:
            old = slice_rows(tables.kernel, start, len(slope))
            _, pull = jax.vjp(layer.score_scale, old)
            slope = slope.astype(accumulator(slope.dtype)) + pull(gradient.scale)[0]
        kernel, kernel_state, more = move(
            tables.kernel,
            tables.kernel_state,
            slope,
            start,
            functools.partial(_derived, layer),
        )
        derived = jax.tree.map(
            lambda whole, chunk: write_rows(whole, chunk, start), tables.derived, more
        )
        return tables._replace(
            kernel=kernel, kernel_state=kernel_state, derived=derived
        )

    def step_output(shard, h, labels, weights, tables):
        """Of a device's part of the batch and of the items."""
        return loss_and_updates(
            model.loss_rule,
            h,
            labels,
            weights,
            tables,
            layer=operands,
            update=update,
            update_kernel=update_kernel if fits else None,
            shard=shard,
            implementation=layer.implementation,
            chunk_scores=chunk_scores,
        )

    def surrogate(model):
        h = model.output.hidden_operand(model.encode(x))
        constant = lax.stop_gradient(h)
        # A program of its own, as what is written in place cannot be in one that is
        # differentiated.
        run = jax.jit(
            functools.partial(over_items, kernel_spec=layer.kernel_spec),
            static_argnums=0,
        )
        per_example, dh, after = run(step_output, constant, labels, weights, before)
        loss = weighted_sum(per_example, weights)
        assert dh is not None  # as there is an update
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


def _derived(layer: SparseOutput, kernel: jax.Array) -> Derived:
    """From a kernel, or some of its rows."""
    dtype = layer.dtype or kernel.dtype
    return Derived(
        None if dtype == kernel.dtype else kernel.astype(dtype),
        None if layer.temperature is None else layer.score_scale(kernel),
    )


def _keys(model: Fusable) -> list[tuple]:
    """Paths of the output's parameters: of the kernel, then of the bias if any."""
    names = ["kernel"] if model.output.bias is None else ["kernel", "bias"]
    return [("output", name) for name in names]
