"""Adds rows to parameters that have a row for each item, while a model is in use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Shaped

from sparsejax.mesh.layout import (
    axes_are_explicit,
    call_with_auto_axes,
    jit_sharded,
    padded_rows,
)
from sparsejax.ops.item_chunks import accumulator


def add_rows(
    parameter: nnx.Variable, known: int, added: int, *, zeros: bool = False
) -> None:
    """Adds rows after the first `known` rows of a parameter, in place.

    The known rows do not change. A new row is their mean. So a new item
    has about the mean score until it is trained: it is recommended to almost nobody, and it is
    learned sooner than from a small or a random vector. On MSWeb with 10 % of its items
    added, the hit rate@10 of the new items was .78 after one epoch; with rows drawn by
    `glorot_uniform` it was .73, from the distribution of the known rows .71. With these two,
    new items also took 5 to 11 % of the recommendations before training.

    Args:
      parameter: `[padded_rows(known), ...]`; it gets `padded_rows(known + added)` rows.
      known: number of rows before.
      added: number of new rows.
      zeros: whether the new rows are 0.
    """
    array = parameter[...]
    if len(array) != padded_rows(known):
        raise ValueError(
            f"a parameter of {known:,} rows has {padded_rows(known):,} with padding, "
            f"this one has {len(array):,}"
        )

    parameter.set_value(_divided_like(parameter, _longer, known, added, zeros, array))


def add_columns(parameter: nnx.Variable, added: int) -> None:
    """Appends columns of zeros to a parameter, in place."""
    if added:
        parameter.set_value(_divided_like(parameter, _wider, added, parameter[...]))


def with_first_rows(
    variable: nnx.Variable, fresh: Shaped[Array, "rows *rest"], known: int
) -> None:
    """Sets a variable to `fresh`, except its first `known` rows, which do not change."""
    before = variable[...]
    fresh = fresh.astype(before.dtype)
    variable.set_value(_divided_like(variable, _joined, known, fresh, before))


def _longer(known: int, added: int, zeros: bool, array: jax.Array) -> jax.Array:
    rows, rest = array[:known], array.shape[1:]
    parts = [rows]
    if added and not zeros:
        mean = jnp.mean(rows, axis=0, keepdims=True, dtype=accumulator(rows.dtype))
        parts.append(jnp.broadcast_to(mean.astype(rows.dtype), (added, *rest)))
    extra = padded_rows(known + added) - sum(map(len, parts))
    return jnp.concatenate([*parts, jnp.zeros((extra, *rest), array.dtype)])


def _wider(added: int, array: jax.Array) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, added)))


def _joined(known: int, fresh: jax.Array, before: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(fresh, before[:known], 0, 0)


def _divided_like(variable: nnx.Variable, make: Callable, *arguments: int | jax.Array):
    """Calls `make(*arguments)`; the result is divided over the mesh like the variable.

    `make` must be a module-level function: only then its compiled program is reused.
    """
    spec = variable.get_metadata().get("out_sharding")
    numbers = [n for n in arguments if isinstance(n, int)]
    if axes_are_explicit():
        made = functools.partial(make, *numbers)
        arrays = arguments[len(numbers) :]
        return call_with_auto_axes(made, *arrays, out_specs=spec or jax.P())
    return jit_sharded(make, spec, static=tuple(range(len(numbers))))(*arguments)
