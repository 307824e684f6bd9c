"""What prediction needs of a model, and how a compiled program is given one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from sparsejax.data.sources import Features
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR


@runtime_checkable
class Recommender(Protocol):
    """What `recommend` and `evaluate` need of a model: an `nnx.Module` with these.

    `sparsejax.FeedForward` has them. On a mesh it is given `ShardedCSR`s.
    """

    @property
    def num_features(self) -> Features:
        """Number of input features.

        Where there are several inputs, a dict: by name the number of features of a
        sparse one, and the shape of a row of a dense one, a tuple. A
        `jax.ShapeDtypeStruct` in place of the tuple gives its dtype as well, for
        `export_predictor`; else that is float32.
        """
        ...

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        ...

    def top_k(
        self, x: Any, k: int, *, exclude: CSR | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Ids and scores, `[batch, k]`, as `sparsejax.top_k` returns them.

        `x` is a `CSR`, or a dict of `CSR`s and arrays where there are several inputs.
        """
        ...


def split(model: Any, optimizer: Optimizer | None) -> tuple[Any, Any]:
    """A model, and its optimizer if its rows may be behind, for a compiled program.

    Returns:
      `(graphdef, state)`: a static argument, and arrays that are on the mesh.
    """
    graphdef, state = nnx.split((model, optimizer))
    return graphdef, put_on_mesh(state)


@contextlib.contextmanager
def merged(graphdef: Any, state: Any) -> Iterator[Any]:
    """The model that was `split`, in a program; its rows read as if up to date."""
    model, optimizer = nnx.merge(graphdef, state)
    with contextlib.nullcontext() if optimizer is None else optimizer.reading(model):
        yield model
