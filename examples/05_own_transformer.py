"""A transformer of your own over sequences of items, with the exact softmax over all items.

The network is plain Flax, and optax trains it. Of sparsejax it takes `linear_cross_entropy`,
which never makes the `[batch, length, items]` array of scores, and `top_k`. So the same
code trains on millions of items. The data is made up: what a user takes next depends on
the last item.

Run: python examples/05_own_transformer.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax as sj

USERS, ITEMS, LENGTH, BATCH = 4000, 1000, 24, 100
PADDING = -1  # a target that does not count


class Block(nnx.Module):
    """Attention to the items before, then two layers for each item alone."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.before, self.between = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.queries, self.keys, self.values, self.mixed = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.before(x)
        by_head = (*x.shape[:-1], self.heads, -1)
        q, k, v = (
            f(y).reshape(by_head) for f in (self.queries, self.keys, self.values)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class Transformer(nnx.Module):
    """The vectors of the items are both what is read and what scores are made with."""

    def __init__(self, items: int, width: int, *, rngs: nnx.Rngs):
        self.items = nnx.Embed(items, width, rngs=rngs)
        self.places = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, 2, rngs=rngs) for _ in range(2))
        self.last = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, histories: jax.Array) -> jax.Array:
        """`[batch, length, width]`. Padding comes last, so nothing attends to it."""
        x = self.items(jnp.maximum(histories, 0))
        x = x + self.places.embedding[None, : histories.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, histories: jax.Array) -> jax.Array:
        """At each place, the next item is the target."""
        h = self(histories[:, :-1])
        kernel = self.items.embedding[...]
        return sj.linear_cross_entropy(h, kernel, histories[:, 1:])

    def top_k(self, histories: jax.Array, k: int) -> jax.Array:
        """What may come after each history."""
        last = jnp.sum(histories != PADDING, axis=1) - 1
        h = self(histories)[jnp.arange(len(histories)), last]
        return sj.top_k(h, self.items.embedding[...], k)[0]


@sj.jit
def step(model: Transformer, optimizer: nnx.Optimizer, histories: jax.Array):
    loss, grads = nnx.value_and_grad(lambda model: model.loss(histories))(model)
    optimizer.update(model, grads)
    return loss


def make_histories() -> np.ndarray:
    """`[users, length]` items, in order. Short histories end with padding."""
    rng = np.random.default_rng(0)
    followers = rng.integers(0, ITEMS, (ITEMS, 4))
    histories = np.empty((USERS, LENGTH), np.int32)
    histories[:, 0] = rng.integers(0, ITEMS, USERS)
    for place in range(1, LENGTH):
        chosen = rng.choice(4, USERS, p=[0.6, 0.2, 0.1, 0.1])
        histories[:, place] = followers[histories[:, place - 1], chosen]
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, USERS)
    return np.where(np.arange(LENGTH) < lengths[:, None], histories, PADDING)


def main(num_epochs: int = 10) -> dict[str, float]:
    histories = make_histories()
    # The last item of each user is held out.
    lengths = (histories != PADDING).sum(axis=1)
    rows, lasts = np.arange(USERS), lengths - 1
    heldout = histories[rows, lasts]
    train = histories.copy()
    train[rows, lasts] = PADDING

    model = Transformer(ITEMS, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    rng, losses = np.random.default_rng(0), []
    for _ in range(num_epochs):
        for chosen in rng.permutation(USERS).reshape(-1, BATCH):
            losses.append(step(model, optimizer, jnp.asarray(train[chosen])))

    found = sj.jit(lambda model, x: model.top_k(x, 4))(model, jnp.asarray(train))
    recall = float(np.mean((np.asarray(found) == heldout[:, None]).any(axis=1)))
    popular = np.argsort(-np.bincount(train[train != PADDING], minlength=ITEMS))[:4]
    popularity = float(np.mean(np.isin(heldout, popular)))
    print(f"loss {losses[0]:.2f}, at the end {losses[-1]:.2f}")
    print(
        f"recall@4 of the next item {recall:.3f}, of mere popularity {popularity:.3f}"
    )
    return {
        "first": float(losses[0]),
        "last": float(losses[-1]),
        "recall": recall,
        "popularity": popularity,
    }


if __name__ == "__main__":
    main()
