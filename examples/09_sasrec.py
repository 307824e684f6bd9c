"""SASRec: what comes next in a history, with the exact softmax over all items.

The data is made up: what a user takes next depends on the last item. The last item of each
user is held out, and all items are ranked.

Run: python examples/09_sasrec.py
"""

import numpy as np
import pyarrow as pa
from flax import nnx

import sparsejax as sj

USERS, ITEMS, LENGTH = 2000, 500, 20


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


def main(num_epochs: int = 15) -> dict[str, float]:
    train, heldout = make_data().split_last()
    config = sj.SASRecConfig(max_length=LENGTH, width=64)
    model = sj.sequence.SASRec(config, items=train.num_features, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(3e-3))
    history = sj.fit(
        model,
        optimizer,
        train,
        batch_size=128,
        num_epochs=num_epochs,
        validation=heldout,
        k=10,
    )
    print(f"loss {history[0]['loss']:.2f}, at the end {history[-1]['loss']:.2f}")

    # Items may come again, so those of the history are ranked, too.
    measured = sj.evaluate(model, train, heldout, k=10, exclude=None)
    reached = {
        "recall": measured["recall@10"],
        "popularity": measured["popularity_recall@10"],
    }
    print(
        "recall@10 of the next item {recall:.3f}, of popularity {popularity:.3f}".format(
            **reached
        )
    )
    found = sj.recommend(model, train, k=3, exclude=None).names(train.feature_names)
    print(f"next for user {train.row_names[0]}: {', '.join(found[0])}")
    return reached


if __name__ == "__main__":
    main()
