"""Writes a model as programs that run without it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export

from sparsejax.data import SparseDataset
from sparsejax.data.names import as_names
from sparsejax.data.sources import features_of, rows_of_inputs
from sparsejax.mesh.layout import without_mesh
from sparsejax.nn.layers import SparseLinear, SparseOutput
from sparsejax.nn.linear_part import LinearPart
from sparsejax.prediction.loop import check_positive
from sparsejax.prediction.predictor import sizes_of_programs, unflattened
from sparsejax.prediction.predictor_files import save_predictor
from sparsejax.prediction.programs import Signature, check
from sparsejax.prediction.recommender import Recommender
from sparsejax.sparse import CSR


def export_predictor(
    model: Recommender,
    path: str | os.PathLike[str],
    *,
    k: int = 10,
    names: SparseDataset | Iterable[object] | None = None,
    batch_size: int = 512,
) -> None:
    """Writes a model to a file, which `sparsejax.load_predictor` reads.

    A predictor recommends without Flax and without the model's code. The file holds the
    weights, and programs for 1, 8, 64, ... rows as StableHLO for CPUs and CUDA. The
    number of entries is dynamic. What depends on the weights alone, like the norms of
    the items' vectors, is computed now. The file appears at `path` whole or not at all.

    A model on a mesh is written for one device. With several processes all call this
    function and the first one writes. No host needs room for the whole of a kernel that
    is divided.

    >>> export_predictor(model, "model.predictor", k=10, names=train)

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`.
        Its rows must be up to date, as they are after `fit` or `Optimizer.flush`. It may
        have several inputs; a dense one is float32 unless `num_features` gives its dtype.
      path: the file, which is replaced if it exists.
      k: most items per row that the predictor can recommend.
      names: names of the items, or a data set whose features they are. The file keeps
        them.
      batch_size: most rows that the predictor scores at a time.

    Raises:
      OSError: the file cannot be written.
      OtherProcessError: process 0 could not write the file; the message says why.
      ValueError: the number of names is not that of the items. `path` cannot be a file.
        The model does something that a predictor may not do, for example a callback into
        Python.
    """
    check_positive(k=k, batch_size=batch_size)
    features = features_of(model)
    items = None
    if names is not None:
        known = names.feature_names if isinstance(names, SparseDataset) else names
        items = as_names(known).tolist()
        if len(items) != model.num_items:
            raise ValueError(
                f"{len(items):,} names were given but the model has "
                f"{model.num_items:,} items"
            )
    # A copy, whose weights are the same arrays.
    model = nnx.merge(*nnx.split(model), copy=True)
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, SparseOutput):
            node.fold()
    for _, node in nnx.iter_graph(model):
        if isinstance(node, SparseLinear | SparseOutput | LinearPart):
            # A GPU program is for one platform; this program is for two.
            node.implementation = "xla"
        elif isinstance(node, nnx.Variable):
            node.set_metadata(out_sharding=None)  # the program is for one device
    graphdef, keys, state = nnx.split(model, nnx.RngState, ...)
    with without_mesh():
        keys = jax.tree.map(_here, keys)
    weights, structure = jax.tree.flatten(state)

    def top_k(weights, inputs, exclude):
        state = jax.tree.unflatten(structure, weights)
        model = nnx.merge(graphdef, keys, state)
        x = unflattened(features, inputs)
        seen = CSR(None, *exclude, num_cols=model.num_items)
        return model.top_k(x, k, exclude=seen)

    def programs() -> Iterator[tuple[int, export.Exported]]:
        abstract = tuple(jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights)
        for rows in sizes_of_programs(batch_size):
            signature = Signature(
                rows=rows, k=k, weights=abstract, inputs=rows_of_inputs(features)
            )
            program = signature.program(top_k)
            check(program)
            yield rows, program

    save_predictor(
        path,
        k=k,
        num_features=features,
        num_items=model.num_items,
        items=items,
        programs=programs(),
        weights=weights,
    )


def _here(state: jax.Array) -> jax.Array:
    """A key or a count that all processes have, on this process's devices alone."""
    if not jax.dtypes.issubdtype(state.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(state))
    words = jnp.asarray(np.asarray(jax.random.key_data(state)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(state))
