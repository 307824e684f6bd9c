"""Models that can recommend, and how a compiled program is given one."""

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

    `sparsejax.FeedForward` has these methods. On a mesh, `top_k` is given `ShardedCSR`s.
    """

    @property
    def num_features(self) -> Features:
        """Number of input features.

        With several inputs this is a dict: for the name of a sparse input the number of
        its features, for the name of a dense input the shape of a row, a tuple. A
        `jax.ShapeDtypeStruct` in place of the tuple also gives the dtype, which
        `export_predictor` uses; with a tuple that is float32.
        """
        ...

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        ...

    def top_k(
        self, x: Any, k: int, *, exclude: CSR | None = None
    ) -> tuple[jax.Array, ...]:
        """Ids and scores, `[batch, k]`, as `sparsejax.top_k` returns them; and perhaps values.

        `x` is a `CSR`, or a dict of `CSR`s and arrays where there are several inputs. A
        method that also takes `excluded=None`, `[items]` bool, gets a mask of items that are
        excluded in all rows. Other methods get these items in each row of `exclude`, which
        costs much where they are many.
        """
        ...


def can_deny(model: Any) -> bool:
    """Whether a model's `top_k` accepts `excluded`, a mask of excluded items."""
    known = getattr(model, "denies", None)
    if known is not None:
        return known
    return "excluded" in inspect.signature(model.top_k).parameters


def split(model: Any, optimizer: Optimizer | None) -> tuple[Any, Any]:
    """A model as arguments of a compiled program, which makes it again by `merged`.

    Args:
      model: an `nnx.Module`.
      optimizer: its optimizer, if rows of its weights may be behind.

    Returns:
      `(graphdef, state)`: a static argument, and arrays that are on the mesh.
    """
    graphdef, state = nnx.split((model, optimizer))
    check_hashable(graphdef, model)
    return graphdef, _committed(put_on_mesh(state))


def _committed(state: Any) -> Any:
    """The state, with its arrays committed to their devices, as restored arrays are.

    A program is compiled once more for arrays that are not.
    """
    leaves = jax.tree.leaves(state)
    if any(leaf.committed for leaf in leaves):
        return state
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, state))


def beside(state: Any, array: np.ndarray) -> jax.Array:
    """The array, whole on each device of a state from `split`, as programs return it."""
    for leaf in jax.tree.leaves(state):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P())
        return jax.device_put(array, sharding)
    return put_on_mesh(jax.device_put(array))


@contextlib.contextmanager
def merged(graphdef: Any, state: Any) -> Iterator[Any]:
    """The model from the results of `split`, inside a compiled program.

    Rows that are behind are read as if they were up to date.
    """
    model, optimizer = nnx.merge(graphdef, state)
    # A model in another form says which one the optimizer knows.
    trained = getattr(model, "trained", model)
    with contextlib.nullcontext() if optimizer is None else optimizer.reading(trained):
        yield model


@functools.partial(Programs, static_argnames=("graphdef", "k"))
def recommended(
    graphdef, state, shown: Shown, exclude: Batch | None, k: int, denied=None
):
    """Ids and scores, `[batch, k]`, of a model from `split`.

    `recommended[deterministic]` is one of the two forms of `Programs`. With `denied`,
    `[items]` bool, the model must be one that `can_deny`.
    """
    with merged(graphdef, state) as model:
        unwanted = None if exclude is None else exclude.take()
        options = {} if denied is None else {"excluded": denied}
        return replicated(model.top_k(taken(shown), k, exclude=unwanted, **options))
