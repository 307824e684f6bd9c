"""Vectors of items and users, and similar items."""

from __future__ import annotations

import functools
import os
import pathlib
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data.files.names import (
    FeatureNames,
    Names,
    as_names,
    find_names,
    quoted,
    to_arrow,
)
from sparsejax.data.reading.sources import Features, Sources, check_inputs, features_of
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.batching import (
    Shown,
    batches_of,
    held_inputs,
    rows_in_a_batch,
    taken,
)
from sparsejax.engine.rank.loop import check_positive
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.engine.rank.recommender import merged, split
from sparsejax.kinds.histories.next_items import HistoryModel
from sparsejax.kinds.kind import kind_of
from sparsejax.mesh.layout import put_on_mesh, replicated, to_host, using_auto_axes
from sparsejax.mesh.promotion import promoting
from sparsejax.nn.layers import SparseOutput
from sparsejax.ops.top_k import top_k
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR
from sparsejax.whole_files import check_writable, whole_file

FORMATS = (".npy", ".npz", ".parquet")

# In `.npz` all names are padded to an equal length. The padded names may take this many bytes, or
# this many times the bytes of the names without padding.
_SMALL_BYTES, _MAX_PADDING = 2**26, 16


@runtime_checkable
class HasItems(Protocol):
    """A model whose last layer is a `SparseOutput` called `output`."""

    @property
    def output(self) -> SparseOutput:
        """The layer that scores items."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """A model that `user_vectors` can use, which is an `nnx.Module`."""

    @property
    def num_features(self) -> Features:
        """Number of input features; for several inputs see `Recommender`."""
        ...

    def encode(self, x: Any, *, deterministic: bool | None = None) -> jax.Array:
        """Computes the input `[batch, hidden]` of the output layer."""
        ...


@using_auto_axes()
def item_vectors(model: HasItems) -> np.ndarray:
    """The items' vectors, `[num_items, hidden]` float32.

    They are the rows of the output kernel, without padding rows; with content, the sums of rows
    and content vectors. If `u` is a row of `user_vectors` and `v` is an item's vector, the score
    of the item is `u . v + bias`. If the output layer has a temperature, it is `u . v / (|u| |v|
    temperature) + bias`.

    >>> item_vectors(model).shape
    (294, 64)

    Args:
      model: a `FeedForward`, or a module with a `SparseOutput` called `output`. Its rows
        must be up to date, as they are after `fit`, `load_model` or `Optimizer.flush`.
    """
    output = model.output
    return to_host(output.vectors())[: output.num_items].astype(np.float32)


@promoting()
@using_auto_axes()
def user_vectors(
    model: Encoder | HistoryModel,
    inputs: Sources | SequenceDataset,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int = 512,
) -> np.ndarray:
    """The last hidden layer's output for each row of `inputs`, `[rows, hidden]` float32.

    The vector of a history is the output at its last entry, which depends on all entries before
    it.

    >>> user_vectors(model, train).shape
    (32711, 64)

    Args:
      model: a `FeedForward`, or a module with `num_features` and `encode`; for histories a
        `SequenceModel`, or a `HistoryModel` with `last`.
      inputs: `[rows, features]`; or several by name, see `fit`; or histories.
      optimizer: optimizer of the model, needed if updates of weight rows are pending (see
          `Optimizer.flush`): vectors then include these updates.
      batch_size: number of rows encoded at a time.

    Raises:
      TypeError: `inputs` has an unsupported type, or the model does not compute vectors.
      ValueError: `inputs` does not match the model.
    """
    check_positive(batch_size=batch_size)
    encoder, x = kind_of(inputs).encoder(model, inputs)
    check_inputs(x, features_of(encoder))
    batch_size = rows_in_a_batch(batch_size, x.num_rows)
    # Without rows, an empty row is encoded to find out the width of the vectors.
    rows = np.arange(x.num_rows) if x.num_rows else np.array([-1])
    batches = batches_of(x, held_inputs(x), rows, batch_size)
    graphdef, state = split(encoder, optimizer)
    parts = [np.asarray(_encoded(graphdef, state, batch)) for batch in batches]
    return np.concatenate(parts)[: x.num_rows]


@promoting()
@using_auto_axes()
def similar_items(
    model: HasItems,
    items: Sequence[int] | Sequence[str] | np.ndarray,
    k: int = 10,
    *,
    names: FeatureNames | Iterable[object] | None = None,
) -> Recommendations:
    """Finds the `k` items whose vectors have the largest cosine with that of each given item.

    An item is not similar to itself here. A zero vector has the cosine 0 with all others. Items
    whose vectors are not finite are excluded, with a warning.

    >>> similar_items(model, ["/products"], k=3, names=train).names(train)
    [['/...', '/...', '/...']]

    Args:
      model: a `FeedForward`, or a module with a `SparseOutput` called `output`. Its rows must
        be up to date, as they are after `fit`, `load_model` or `Optimizer.flush`.
      items: `[n]` numbers of items, or their names.
      k: number of similar items for each item.
      names: names of all items, or a data set whose features are the items; needed if `items` are
          names.

    Returns:
      Ids `[n, k]`, and cosines as scores.

    Raises:
      FloatingPointError: the vector of one of `items` is not finite.
      TypeError: `items` are neither integers nor names.
      ValueError: an item does not exist, or names are given without `names`.
    """
    check_positive(k=k)
    output = model.output
    ids = _ids(items, output.num_items, names)
    kernel = put_on_mesh(output.vectors()).astype(jnp.float32)
    finite = np.asarray(_are_finite(kernel))
    left_out = None
    if not finite[: output.num_items].all():
        if not finite[ids].all():
            at = int(np.argmin(finite[ids]))
            raise FloatingPointError(f"the vector of item {items[at]!r} is not finite")
        count = output.num_items - int(finite[: output.num_items].sum())
        warnings.warn(
            f"the vectors of {count:,} of {output.num_items:,} items are not finite: these "
            "items are left out",
            stacklevel=2,
        )
        kernel = jnp.where(finite[:, None], kernel, 0)
        left_out = jnp.where(finite, 0, -jnp.inf).astype(jnp.float32)
    found = _similar(kernel, left_out, ids, k, output.num_items, output.kernel_spec)
    return Recommendations(*map(np.asarray, found))


def save_vectors(
    path: str | os.PathLike[str], vectors: np.ndarray, names: Iterable[object]
) -> None:
    """Writes vectors to a file, in the format given by its ending; a partial file is never
    visible.

    ::

        .npy        the array alone
        .npz        arrays `names` and `vectors`
        .parquet    columns `name` and `vector` (a list of fixed size)

    >>> save_vectors("items.parquet", item_vectors(model), train.feature_names)

    A warning counts vectors that are not finite.

    Args:
      path: the file, which is replaced if it exists.
      vectors: `[n, hidden]`.
      names: `[n]` names of the vectors.

    Raises:
      OSError: the file cannot be written.
      ValueError: the ending is unknown, the number of names differs from the number of vectors, or
          `.npz` cannot store the names, because their lengths differ very much or one ends with a
          zero byte.
    """
    check_ending(path)
    check_writable(path)
    known = as_names(names)
    if vectors.ndim != 2 or len(known) != len(vectors):
        raise ValueError(
            f"expected vectors [{len(known):,}, hidden], one for each name, got "
            f"{vectors.shape}"
        )
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        warnings.warn(
            f"{len(vectors) - int(finite.sum()):,} of {len(vectors):,} vectors are not "
            f"finite, for example those of {quoted(known[~finite])}",
            stacklevel=2,
        )
    if pathlib.Path(path).suffix == ".npz":
        _check_fixed_width(path, known)
    with whole_file(path) as file:
        match pathlib.Path(path).suffix:
            case ".npy":
                # When NumPy writes to a real file itself, it does not report a full disk.
                np.save(types.SimpleNamespace(write=file.write), vectors)
            case ".npz":
                fixed = np.array(known.tolist(), np.str_)
                np.savez(file, names=fixed, vectors=vectors)
            case ".parquet":
                flat = pa.array(vectors.reshape(-1))
                column = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
                table = pa.table({"name": to_arrow(known), "vector": column})
                pq.write_table(table, file, compression="zstd")


def check_ending(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if the ending of a file name is not that of a format for vectors."""
    if pathlib.Path(path).suffix not in FORMATS:
        raise ValueError(f"{path}: vectors are written to {', '.join(FORMATS)} files")


def _check_fixed_width(path: str | os.PathLike[str], names: Names) -> None:
    """Raises ValueError if NumPy's type `<U` would change a name, or take too much memory."""
    lengths = np.strings.str_len(names)
    size, used = 4 * len(names) * int(lengths.max(initial=0)), 4 * int(lengths.sum())
    if size > max(_SMALL_BYTES, _MAX_PADDING * used):
        raise ValueError(
            f"{path}: .npz makes all names as long as the longest, of {lengths.max():,} "
            f"characters: they would take {size:,} bytes; write .parquet instead"
        )
    zeros = [name for name in names.tolist() if name.endswith("\0")]
    if zeros:
        raise ValueError(
            f"{path}: .npz loses zero bytes at the end of names, for example of "
            f"{quoted(zeros)}; write .parquet instead"
        )


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _encoded(graphdef, state, x: Shown) -> jax.Array:
    with merged(graphdef, state) as model:
        h = model.encode(taken(x), deterministic=True).astype(jnp.float32)
        return replicated(h)


@jax.jit
def _are_finite(kernel) -> jax.Array:
    """`[rows]` bool: whether all numbers of a row are finite."""
    return replicated(jnp.isfinite(kernel).all(axis=1))


@functools.partial(jax.jit, static_argnames=("k", "num_items", "kernel_spec"))
def _similar(kernel, bias, ids, k: int, num_items: int, kernel_spec: jax.P | None):
    # Rows are divided by their largest number, so that squares neither overflow nor underflow.
    largest = jnp.max(jnp.abs(kernel), axis=1, initial=0)
    some = jnp.where(largest > 0, largest, 1)
    square = jnp.sum(jnp.square(kernel / some[:, None]), axis=1)
    inverse = jnp.where(largest > 0, jax.lax.rsqrt(square) / some, 0)
    h = kernel[ids] * inverse[ids][:, None]
    itself = CSR(None, ids, jnp.arange(len(ids) + 1), num_cols=num_items)
    return replicated(
        top_k(
            h,
            kernel,
            k,
            bias=bias,
            scale=inverse,
            exclude=itself,
            kernel_spec=kernel_spec,
            precision="highest",
        )
    )


def _ids(items, num_items: int, names) -> np.ndarray:
    """`[n]` int32 numbers of items that are given by number or by name."""
    if len(items) == 0:
        raise ValueError("items is empty; name at least one")
    given = np.asarray(items)
    known = None
    if names is not None:
        has_them = isinstance(names, FeatureNames)
        known = as_names(names.feature_names if has_them else names)
        if len(known) != num_items:
            raise ValueError(
                f"{len(known):,} names were given but the model has {num_items:,} items"
            )
    if np.issubdtype(given.dtype, np.integer):
        outside = given[(given < 0) | (given >= num_items)]
        if outside.size:
            raise ValueError(
                f"there is no item {outside[0]}: the model has {num_items:,}"
            )
        return given.astype(np.int32)
    if given.dtype.kind not in "UT":
        raise TypeError(f"items are integers or names, got {given.dtype}")
    if known is None:
        raise ValueError("items are given by name, so names=... is needed")
    wanted = as_names(given)
    found = find_names(wanted, known)
    if (found < 0).any():
        raise ValueError(
            f"no item is called {quoted(wanted[found < 0])}; names are {quoted(known)}"
        )
    return found
