"""Two towers: one for users, from their history and profile, and one for items.

The vector of an item is made from its tags alone. So items that nobody has bought yet also
have vectors, and are recommended. The profile of a user is dense. The data is made up:
users buy items whose tags they like.

Run: python examples/07_two_towers.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx

import sparsejax as sj

USERS, ITEMS, TAGS = 2000, 300, 24
TEMPERATURE = 0.1


class TwoTowers(nnx.Module):
    """Scores are cosines of what the two towers make, divided by a temperature."""

    def __init__(self, tags: np.ndarray, profile: int, width: int, *, rngs: nnx.Rngs):
        self.num_items, num_tags = tags.shape
        self.profile_size = profile
        self.tags = nnx.Variable(jnp.asarray(tags))  # no nnx.Param: it is not trained
        self.history = sj.SparseLinear(
            self.num_items, width, combiner="sqrtn", rngs=rngs
        )
        self.profile = nnx.Linear(profile, width, rngs=rngs)
        self.user = nnx.Linear(width, width, rngs=rngs)
        self.item = nnx.Linear(num_tags, width, rngs=rngs)

    @property
    def num_features(self) -> dict[str, int | tuple[int, ...]]:
        """A sparse input has a number of features, a dense one the shape of a row."""
        return {"history": self.num_items, "profile": (self.profile_size,)}

    def encode(self, x, *, deterministic: bool | None = None) -> jax.Array:
        """The users' tower, `[batch, width]`."""
        h = jnp.tanh(self.history(x["history"]) + self.profile(x["profile"]))
        return unit(self.user(h))

    def item_vectors(self) -> jax.Array:
        """The items' tower, `[items, width]`: it takes the place of an output kernel."""
        return unit(self.item(self.tags[...])) / TEMPERATURE

    def loss(self, x, labels: sj.CSR, *, weights: jax.Array | None = None) -> jax.Array:
        return sj.output_loss(
            self.encode(x),
            self.item_vectors(),
            None,
            labels,
            loss="softmax_cross_entropy",
            weights=weights,
        )

    def top_k(self, x, k: int, *, exclude: sj.CSR | None = None):
        return sj.top_k(self.encode(x), self.item_vectors(), None, k, exclude=exclude)


def unit(vectors: jax.Array) -> jax.Array:
    """Vectors of length 1. A vector of zeros (an item without tags) stays zero."""
    square = jnp.sum(jnp.square(vectors), axis=1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(square, 1e-12))


def make_data():
    """Purchases; profiles of some users, in another order; and the items' tags."""
    rng = np.random.default_rng(0)
    tags = (rng.random((ITEMS, TAGS)) < 0.15).astype(np.float32)
    likes = rng.normal(size=(USERS, TAGS))
    scores = likes @ tags.T + rng.gumbel(size=(USERS, ITEMS))
    bought = np.argsort(-scores, axis=1)[:, :12]
    entries = (np.ones(bought.size, bool), bought.ravel(), np.arange(USERS + 1) * 12)
    users = [f"user{u}" for u in range(USERS)]
    purchases = sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(entries, shape=(USERS, ITEMS)), row_names=users
    )
    known = rng.permutation(USERS)[: USERS * 9 // 10]
    about = likes[known, :8] + 0.5 * rng.normal(size=(len(known), 8))
    return purchases, sj.data.DenseDataset(about, [users[u] for u in known]), tags


def only(data: sj.SparseDataset, items: np.ndarray) -> sj.SparseDataset:
    """The entries of some items; all rows and items stay."""
    whole = data.to_scipy().tocoo()
    keep = items[whole.col]
    entries = (np.ones(keep.sum(), bool), (whole.row[keep], whole.col[keep]))
    matrix = sj.CSR.from_scipy(scipy.sparse.coo_array(entries, shape=whole.shape))
    return sj.SparseDataset(matrix, data.row_names, data.feature_names)


def main(num_epochs: int = 10) -> dict[str, float]:
    purchases, profiles, tags = make_data()
    is_new = np.arange(ITEMS) % 5 == 4  # training sees no purchase of these
    new = only(purchases, is_new)
    train, heldout = only(purchases, ~is_new).split(0.8, seed=0)

    # Users without a profile get one of zeros. Rows are matched by name.
    inputs = {"history": train, "profile": profiles.align_rows(train, fill=0)}
    model = TwoTowers(tags, profile=8, width=32, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(3e-3))
    sj.fit(model, optimizer, inputs, targets="history", num_epochs=num_epochs)

    named = {"exclude": "history", "popularity": "history"}
    later = sj.evaluate(model, inputs, heldout, k=20, **named)
    # All items are ranked, old and new: chance would find 20 of 300.
    fresh = sj.evaluate(model, inputs, new, k=20, exclude="history", popularity=None)
    found = sj.recommend(model, inputs, k=20, exclude="history")
    share = float(np.mean(is_new[found.ids]))
    print(f"recall@20 of held-out items {later['recall@20']:.3f}, ", end="")
    print(f"of mere popularity {later['popularity_recall@20']:.3f}")
    print(f"recall@20 of items that nobody had bought {fresh['recall@20']:.3f}")
    print(f"{share:.0%} of the recommendations are such items")
    return {
        "recall": later["recall@20"],
        "popularity": later["popularity_recall@20"],
        "new": fresh["recall@20"],
    }


if __name__ == "__main__":
    main()
