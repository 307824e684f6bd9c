"""The sparse layers in a network and a training loop of your own.

Trains the same network twice. With plain Flax and optax, the gradient of each kernel is
dense. With sparsejax's optimizer, a gradient has only the rows of the features that occur
in the batch, and the other rows are never touched. The results agree.

Run: python examples/03_own_flax_loop.py
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax as sj

BATCH, LEARNING_RATE = 512, 1e-3


class Network(nnx.Module):
    """`recommend` and `evaluate` need `num_features`, `num_items` and `top_k`."""

    def __init__(self, num_items: int, width: int, *, rngs: nnx.Rngs):
        self.num_features = self.num_items = num_items
        self.corruption = sj.SparseDropout(0.5, rngs=rngs)  # a denoising autoencoder
        self.first = sj.SparseLinear(num_items, width, combiner="sqrtn", rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.output = sj.SparseOutput(width, num_items, temperature=0.1, rngs=rngs)

    def encode(self, x: sj.CSR, *, deterministic: bool | None = None) -> jax.Array:
        x = self.corruption(x, deterministic=deterministic)
        h = jnp.tanh(self.first(x))
        return h + nnx.gelu(self.second(self.norm(h)))

    def loss(self, x: sj.CSR) -> jax.Array:
        """The mean over the batch. The labels are the inputs without corruption."""
        total = self.output.loss(self.encode(x), x, loss="softmax_cross_entropy")
        return total / x.num_rows

    def top_k(self, x: sj.CSR, k: int, *, exclude: sj.CSR | None = None):
        h = self.encode(x, deterministic=True)
        return self.output.top_k(h, k, exclude=exclude)


def batches(data: sj.SparseDataset, num_epochs: int) -> Iterator[sj.CSR]:
    """Shuffled rows. All batches have one shape, so that one program is compiled."""
    resident = jax.tree.map(jnp.asarray, data.matrix)
    lengths = np.diff(data.matrix.indptr)
    capacity = int(np.sort(lengths)[-BATCH:].sum())  # the fullest batch there could be
    rng = np.random.default_rng(0)
    for _ in range(num_epochs):
        order = rng.permutation(data.num_rows)
        for start in range(0, data.num_rows - BATCH + 1, BATCH):
            yield resident.take(order[start : start + BATCH], nse=capacity)


@sj.jit
def dense_step(model: Network, optimizer: nnx.Optimizer, x: sj.CSR) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: model.loss(x))(model)
    optimizer.update(model, grads)
    return loss


@sj.jit
def row_step(model: Network, optimizer: sj.Optimizer, x: sj.CSR) -> jax.Array:
    # The optimizer's own function: it brings rows up to date as they are read.
    loss, grads = optimizer.value_and_grad(lambda model: model.loss(x))(model)
    optimizer.update(model, grads)
    return loss


def main(num_epochs: int = 5) -> dict[str, float]:
    train, heldout = sj.datasets.msweb().train.split(0.8, seed=0)
    reached = {}
    for kind in ("dense", "rows"):
        model = Network(train.num_features, 64, rngs=nnx.Rngs(0))
        if kind == "dense":
            optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
            for x in batches(train, num_epochs):
                dense_step(model, optimizer, x)
        else:
            optimizer = sj.Optimizer(model, sj.optimizers.adam(LEARNING_RATE))
            for x in batches(train, num_epochs):
                row_step(model, optimizer, x)
            optimizer.flush(model)  # at the end: all rows up to date
        measured = sj.evaluate(model, train, heldout, k=20)
        reached[kind] = measured["ndcg@20"]
        reached["popularity"] = measured["popularity_ndcg@20"]
    for kind, ndcg in reached.items():
        print(f"{kind:10}  ndcg@20 {ndcg:.4f}")
    return reached


if __name__ == "__main__":
    main()
