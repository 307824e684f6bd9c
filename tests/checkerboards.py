"""Data that is easy to learn, and small models that learn it."""

from typing import Any

import jax
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax import optimizers
from sparsejax.data import SparseDataset
from sparsejax.engine.train.checkpoint import checksums
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward


def checkerboard(rows: int, items: int) -> tuple[SparseDataset, SparseDataset]:
    """Even rows like even items, odd rows like odd items. One entry of each row is held out.

    The held-out item is the only item of a row's colour that is missing in its training entries.
    """
    row, item = np.indices((rows, items))
    liked = row % 2 == item % 2
    held = liked & (item // 2 == row // 2 % (items // 2))
    names = [f"u{r}" for r in range(rows)], [f"i{i}" for i in range(items)]
    parts = (scipy.sparse.csr_array(part) for part in (liked & ~held, held))
    train, test = (
        SparseDataset.from_scipy(part, row_names=names[0], feature_names=names[1])
        for part in parts
    )
    return train, test


PLAIN: dict[str, Any] = {
    "activation": "relu",
    "normalize": False,
    "corruption": 0.0,
    "temperature": None,
}


def build(
    features: int,
    *,
    hidden=(16,),
    rule=None,
    seed: int = 0,
    **options,
) -> tuple[FeedForward, optimizers.Optimizer]:
    config = NetworkConfig.autoencoder(hidden, **(PLAIN | options))
    model = FeedForward(config, inputs=features, outputs=features, rngs=nnx.Rngs(seed))
    # Adagrad's programs compile in half the time of Adam's.
    return model, optimizers.Optimizer(model, rule or optimizers.adagrad(0.1))


def parameters(model) -> dict[str, int]:
    """A checksum for each parameter of a model."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    return checksums({jax.tree_util.keystr(p): leaf for p, leaf in leaves})


def without_speed(history):
    """The part of a history that repeats exactly: everything but speeds."""
    return [
        {k: v for k, v in entry.items() if k != "examples_per_second"}
        for entry in history
    ]
