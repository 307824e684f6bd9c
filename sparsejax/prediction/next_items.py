"""Models of histories in the form in which other models recommend: rows in, items out."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.data.dataset import SparseDataset
from sparsejax.data.sequences import SequenceDataset
from sparsejax.data.sources import (
    Inputs,
    NamedArray,
    NamedCSR,
    Source,
    check_columns,
    check_same_features,
)
from sparsejax.mesh.blocks import SparseRows

# What inputs of such a model are called.
HISTORIES, TIMES = "histories", "times"

# What `exclude` and the like may be where the data are histories.
Unordered = Source | SequenceDataset | str | None


@runtime_checkable
class HistoryModel(Protocol):
    """What `fit`, `recommend` and `evaluate` need of a model of histories.

    It is an `nnx.Module`, such as `SASRec`, a `SequenceModel`. Histories are `[batch, length]` int32, the oldest
    item first, then -1. If the model has an attribute `uses_times` that is true, it is also
    given `times=`, `[batch, length]` float32, see `Histories.padded_times`.
    """

    @property
    def config(self) -> Any:
        """Has an attribute `max_length`, the most items that the model can read."""
        ...

    @property
    def num_items(self) -> int:
        """Number of items that are read and scored."""
        ...

    def loss(self, *histories: Any, **times: Any) -> jax.Array:
        """`loss(histories)`: the mean of a loss of the next item, over all places that have
        one. Histories have up to `max_length + 1` places.
        """
        ...

    def top_k(self, *histories: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        """`top_k(histories, k, exclude=None)`: ids and scores of the items that are most
        likely next, `[batch, k]`. Histories have up to `max_length` places.
        """
        ...


def check_history_model(model: Any) -> None:
    """Raises TypeError if a model cannot learn from histories."""
    lacks = [
        name
        for name in ("loss", "top_k", "num_items", "config")
        if not hasattr(model, name)
    ]
    if not lacks and not hasattr(model.config, "max_length"):
        lacks = ["config.max_length"]
    if lacks:
        raise TypeError(
            "a SequenceDataset needs a model of histories, such as sparsejax.SASRec; "
            f"{type(model).__name__} has no {' and no '.join(lacks)} (other models take "
            "data.to_sparse())"
        )


def uses_times(model: Any) -> bool:
    """Whether a model is given the times of a history."""
    return bool(getattr(model, "uses_times", False))


class NextItems(nnx.Module):
    """A model of histories as a `Recommender`, whose inputs are arrays by name.

    It is made for compiled programs, in which it switches noise off.
    """

    def __init__(self, model: Any):
        self.model = model

    @property
    def num_features(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.model.config.max_length,)
        rows = {HISTORIES: jax.ShapeDtypeStruct(shape, jnp.int32)}
        if uses_times(self.model):
            rows[TIMES] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return rows

    @property
    def num_items(self) -> int:
        return self.model.num_items

    def top_k(self, x: Any, k: int, *, exclude: SparseRows | None = None):
        self.model.eval()
        times = {"times": x[TIMES]} if TIMES in x else {}
        return self.model.top_k(x[HISTORIES], k, exclude=exclude, **times)


def arrays_of(model: Any, data: Any, length: int) -> dict[str, np.ndarray]:
    """What a model is shown of `Histories` or a `SequenceDataset`, each `[rows, length]`.

    Raises:
      ValueError: the model needs times, and there are none.
    """
    arrays = {HISTORIES: data.padded(length)}
    if uses_times(model):
        if data.times is None:
            raise ValueError(
                f"{type(model).__name__} needs the times of the entries, and the data have "
                "none; read them with time=COLUMN"
            )
        arrays[TIMES] = data.padded_times(length)
    return arrays


def shown_of(model: Any, sequences: SequenceDataset) -> Inputs:
    """The last entries of each row, as many as a model reads.

    Raises:
      TypeError: the model is no model of histories.
      ValueError: it has another number of items than the data, or needs times.
    """
    check_history_model(model)
    check_columns("inputs", sequences.num_features, model.num_items, "items")
    arrays = arrays_of(model, sequences, model.config.max_length)
    names = sequences.row_names
    return Inputs(
        {name: NamedArray("inputs", array, names) for name, array in arrays.items()},
        alone=False,
    )


def unordered(
    what: str, source: Unordered, sequences: SequenceDataset
) -> SparseDataset | Source | None:
    """An argument about items, such as `exclude`, as a matrix.

    Args:
      what: the name of the argument.
      source: data, perhaps histories; or "inputs", which are `sequences`.
      sequences: what the model is shown.

    Raises:
      ValueError: it is another text, or has other items.
    """
    if source is None:
        return None
    if isinstance(source, str):
        if source != "inputs":
            raise ValueError(f'{what} is data or "inputs", got {source!r}')
        source = sequences
    if isinstance(source, SequenceDataset):
        matrix = source.to_sparse()
    else:
        matrix = cast(Source, source)
    given = NamedCSR.of(what, matrix)
    check_columns(what, given.matrix.num_cols, sequences.num_features, "items")
    inputs = NamedCSR("inputs", given.matrix, None, sequences.feature_names)
    check_same_features(inputs, given)
    return matrix
