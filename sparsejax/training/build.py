"""A model and its optimizer from a network's description and data."""

from __future__ import annotations

from typing import Any

import scipy.sparse
from flax import nnx

from sparsejax import optimizers
from sparsejax.data import ScannedDataset, SparseDataset
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sparse import CSR


def build(
    config: NetworkConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    targets: Any = None,
    seed: int = 0,
) -> tuple[FeedForward, Optimizer]:
    """A `FeedForward` that fits the data, and the optimizer that trains it.

    >>> model, optimizer = build(NetworkConfig.autoencoder((8,)), train)
    >>> model.num_features == train.num_features
    True

    It is short for::

        model = FeedForward(
            config, inputs=data.num_features, outputs=targets.num_features,
            rngs=nnx.Rngs(seed),
        )
        optimizer = Optimizer(model, rule)

    Under `jax.set_mesh(...)` the parameters lie on the mesh.

    Args:
      config: the layers and the loss.
      data: `[rows, features]`: a `SparseDataset`, what `scan_parquet` gives, a `CSR` or a
        SciPy matrix. Only its number of columns is used.
      rule: how parameters move; `sparsejax.optimizers.adam(1e-3)` by default.
      targets: `[rows, items]`, of the same types; `data` itself by default.
      seed: seed of the random initial parameters and of the noise in training.

    Returns:
      The model and the optimizer.

    Raises:
      TypeError: `data` or `targets` has another type.
      ValueError: the network cannot be made. For example, a tied output has another
        number of items than features.
    """
    features = _num_columns("data", data)
    model = FeedForward(
        config,
        inputs=features,
        outputs=features if targets is None else _num_columns("targets", targets),
        rngs=nnx.Rngs(seed),
    )
    rule = optimizers.adam(1e-3) if rule is None else rule
    modules = model, Optimizer(model, rule)
    nnx.update(modules, put_on_mesh(nnx.state(modules)))
    return modules


def _num_columns(what: str, source: Any) -> int:
    match source:
        case SparseDataset() | ScannedDataset():
            return source.num_features
        case CSR():
            return source.num_cols
        case _ if scipy.sparse.issparse(source):
            return source.shape[1]
    raise TypeError(
        f"{what} must be a SparseDataset, a ScannedDataset, a CSR or a SciPy matrix, got "
        f"{type(source).__name__}"
    )
