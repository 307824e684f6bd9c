"""Two towers: one for users, from their history and profile, and one for items.

Features of users are the input of a network, and the vectors of items come from what they
are: `item_features`. So items that nobody has bought yet also have vectors, and are
recommended. The data is made up: users buy items whose tags they like.

Run: python examples/07_two_towers.py
"""

import numpy as np
import scipy.sparse

import sparsejax as sj

USERS, ITEMS, TAGS = 2000, 300, 24


def make_data():
    """Purchases; profiles of some users, in another order; and the items' tags."""
    rng = np.random.default_rng(0)
    tags = rng.random((ITEMS, TAGS)) < 0.15
    likes = rng.normal(size=(USERS, TAGS))
    scores = likes @ tags.T + rng.gumbel(size=(USERS, ITEMS))
    bought = np.argsort(-scores, axis=1)[:, :12]
    entries = (np.ones(bought.size, bool), bought.ravel(), np.arange(USERS + 1) * 12)
    users = [f"user{u}" for u in range(USERS)]
    items = [f"item{i}" for i in range(ITEMS)]
    purchases = sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(entries, shape=(USERS, ITEMS)),
        row_names=users,
        feature_names=items,
    )
    known = rng.permutation(USERS)[: USERS * 9 // 10]
    about = likes[known, :8] + 0.5 * rng.normal(size=(len(known), 8))
    profiles = sj.data.DenseDataset(about, [users[u] for u in known])
    products = [
        {"item": item, "tag": [f"t{t}" for t in np.flatnonzero(row)]}
        for item, row in zip(items, tags, strict=True)
    ]
    return purchases, profiles, products


def only(data: sj.SparseDataset, items: np.ndarray) -> sj.SparseDataset:
    """The entries of some items; all rows and items stay."""
    whole = data.to_scipy().tocoo()
    keep = items[whole.col]
    entries = (np.ones(keep.sum(), bool), (whole.row[keep], whole.col[keep]))
    matrix = sj.CSR.from_scipy(scipy.sparse.coo_array(entries, shape=whole.shape))
    return sj.SparseDataset(matrix, data.row_names, data.feature_names)


def known_of_users(
    history: sj.SparseDataset, profiles: sj.data.DenseDataset
) -> sj.SparseDataset:
    """A row for each user: what they bought, then the numbers of their profile."""
    # Users without a profile get one of zeros. Rows are matched by name.
    numbers = profiles.align_rows(history.row_names, fill=0).values
    names = [f"profile{i}" for i in range(numbers.shape[1])]
    both = scipy.sparse.hstack([history.to_scipy().astype(np.float32), numbers])
    columns = np.concatenate([history.feature_names, names])
    return sj.SparseDataset(sj.CSR.from_scipy(both), history.row_names, columns)


def main(num_epochs: int = 20) -> dict[str, float]:
    purchases, profiles, products = make_data()
    is_new = np.arange(ITEMS) % 5 == 4  # training sees no purchase of these
    new = only(purchases, is_new)
    train, heldout = only(purchases, ~is_new).split(0.8, seed=0)
    users = known_of_users(train, profiles)
    network = sj.NetworkConfig.autoencoder((32,), temperature=0.1)
    rule = sj.optimizers.adam(3e-3)
    how = {"batch_size": 128, "num_epochs": num_epochs}

    features = sj.read_item_features(products)
    model, optimizer = sj.build(
        network, users, rule, targets=train, item_features=features
    )
    sj.fit(model, optimizer, users, train, **how)

    seen = {"exclude": train, "popularity": train}
    later = sj.evaluate(model, users, heldout, k=20, **seen)
    # All items are ranked, old and new: chance would find 20 of 300.
    fresh = sj.evaluate(model, users, new, k=20, exclude=train, popularity=None)
    found = sj.recommend(model, users, k=20, exclude=train)
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
