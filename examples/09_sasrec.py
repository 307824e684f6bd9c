"""SASRec in a training loop of your own: Flax, optax, and histories in order.

The data is made up: what a user takes next depends on the last item. The last item of each
user is held out, and all items are ranked.

Run: python examples/09_sasrec.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
from flax import nnx

import sparsejax as sj

USERS, ITEMS, LENGTH, BATCH = 2000, 500, 20, 100


def make_data() -> sj.SequenceDataset:
    """Each item has four that may follow it. Events come in any order, with a time."""
    rng = np.random.default_rng(0)
    followers = rng.integers(0, ITEMS, (ITEMS, 4))
    items = np.empty((USERS, LENGTH), np.int64)
    items[:, 0] = rng.integers(0, ITEMS, USERS)
    for place in range(1, LENGTH):
        chosen = rng.choice(4, USERS, p=[0.6, 0.2, 0.1, 0.1])
        items[:, place] = followers[items[:, place - 1], chosen]
    users = np.repeat(np.arange(USERS), LENGTH)
    times = np.tile(np.arange(LENGTH), USERS)
    events = rng.permutation(users.size)[: users.size * 3 // 4]
    columns = {"user": users, "item": items.ravel(), "time": times}
    return sj.read_sequences(pa.table({k: v[events] for k, v in columns.items()}))


@nnx.jit(donate_argnums=(0, 1))
def step(model: sj.SASRec, optimizer: nnx.Optimizer, histories: jax.Array):
    loss, gradients = nnx.value_and_grad(lambda model: model.loss(histories))(model)
    optimizer.update(model, gradients)
    return loss


def main(num_epochs: int = 15) -> dict[str, float]:
    train, heldout = make_data().split_last()
    config = sj.SASRecConfig(max_length=LENGTH, width=64)
    model = sj.SASRec(config, items=train.num_features, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    histories = train.padded(config.max_length + 1)
    rng, losses = np.random.default_rng(0), []
    for _ in range(num_epochs):
        shuffled = rng.permutation(len(histories))
        for start in range(0, len(shuffled) - BATCH + 1, BATCH):
            batch = jnp.asarray(histories[shuffled[start : start + BATCH]])
            losses.append(step(model, optimizer, batch))

    model.eval()  # no dropout
    found, _ = nnx.jit(lambda model, x: model.top_k(x, 10))(
        model, jnp.asarray(train.padded(config.max_length))
    )
    wanted = heldout.padded(1)  # -1 where nothing was held out
    measured = wanted[:, 0] >= 0
    recall = float((np.asarray(found) == wanted).any(axis=1)[measured].mean())
    popular = np.argsort(-np.bincount(train.indices))[:10]
    popularity = float(np.isin(wanted, popular)[measured].mean())
    print(f"loss {losses[0]:.2f}, at the end {losses[-1]:.2f}")
    print(f"recall@10 of the next item {recall:.3f}, of popularity {popularity:.3f}")
    return {"recall": recall, "popularity": popularity}


if __name__ == "__main__":
    main()
