"""The protocol of models that recommend, and how such a model is passed to a compiled program."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.data.reading.sources import Features
from sparsejax.engine.batching import Batch, Shown, taken
from sparsejax.engine.static import check_hashable
from sparsejax.mesh.layout import put_on_mesh, replicated
from sparsejax.mesh.xla_options import Programs
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR


@runtime_checkable
class Recommender(Protocol):
    """A model that `recommend` and `evaluate` can use, which is an `nnx.Module`.

    `sparsejax.FeedForward` has these methods. On a mesh, `top_k` gets `ShardedCSR`s.
    """

    @property
    def num_features(self) -> Features:
        """Number of input features.

        With several inputs this is a dict. The value for a sparse input is its number of features;
        for a dense input it is the shape of a row, a tuple, or a `jax.ShapeDtypeStruct`, which
        also gives the dtype for `export_predictor`. With a tuple the dtype is float32.
        """
        ...

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        ...

    def top_k(
        self, x: Any, k: int, *, exclude: CSR | None = None
    ) -> tuple[jax.Array, ...]:
        """Ids and scores, `[batch, k]`, as `sparsejax.top_k` returns them, and maybe values.

        `x` is a `CSR`, or with several inputs a dict of `CSR`s and arrays. If the method also
        takes `excluded=None`, it gets an `[items]` bool mask of items that are excluded in all
        rows. Otherwise these items are added to each row of `exclude`, which is slow if there are
        many.
        """
        ...


def can_deny(model: Any) -> bool:
    """Whether a model's `top_k` accepts `excluded`, a mask of excluded items."""
    known = getattr(model, "denies", None)
    if known is not None:
        return known
    return "excluded" in inspect.signature(model.top_k).parameters


def split(model: Any, optimizer: Optimizer | None) -> tuple[Any, Any]:
    """Splits a model into arguments of a compiled program, which restores it by `merged`.

    Args:
      model: an `nnx.Module`.
      optimizer: the model's optimizer, if some of its updates of weight rows are still pending.

    Returns:
      `(graphdef, state)`: a static argument, and arrays that are placed on the mesh.
    """
    graphdef, state = nnx.split((model, optimizer))
    check_hashable(graphdef, model)
    return graphdef, _committed(put_on_mesh(state))


def _committed(state: Any) -> Any:
    """Commits the arrays of a state to their devices, as restored arrays are committed.

    For uncommitted arrays, JAX would compile a program a second time.
    """
    leaves = jax.tree.leaves(state)
    if any(leaf.committed for leaf in leaves):
        return state
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, state))


def beside(state: Any, array: np.ndarray) -> jax.Array:
    """The array, replicated over the devices of a state from `split`, as programs return it."""
    for leaf in jax.tree.leaves(state):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P())
        return jax.device_put(array, sharding)
    return put_on_mesh(jax.device_put(array))


@contextlib.contextmanager
def merged(graphdef: Any, state: Any) -> Iterator[Any]:
    """Restores a model from the results of `split`, inside a compiled program.

    Pending optimizer updates are applied to rows when they are read.
    """
    model, optimizer = nnx.merge(graphdef, state)
    # A wrapper has an attribute for the model that the optimizer trains.
    trained = getattr(model, "trained", model)
    with contextlib.nullcontext() if optimizer is None else optimizer.reading(trained):
        yield model


@functools.partial(Programs, static_argnames=("graphdef", "k"))
def recommended(
    graphdef, state, shown: Shown, exclude: Batch | None, k: int, denied=None
):
    """Recommends by a model from `split`: ids and scores, `[batch, k]`.

    `recommended[True]` is the deterministic form, `recommended[False]` the default, see
    `Programs`. If `denied`, `[items]` bool, is given, `can_deny` must be true of the model.
    """
    with merged(graphdef, state) as model:
        unwanted = None if exclude is None else exclude.take()
        options = {} if denied is None else {"excluded": denied}
        return replicated(model.top_k(taken(shown), k, exclude=unwanted, **options))
