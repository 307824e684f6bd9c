"""MovieLens: which films does a user like? Ratings of 4 and more are likes.

Download a set from https://grouplens.org/datasets/movielens/ and unpack it. Run:

    python examples/02_movielens.py ml-1m            # or ml-100k, ml-20m, ml-32m, ...
"""

import argparse
import csv
import pathlib

import numpy as np
from flax import nnx

import sparsejax as sj

LIKED = 4.0
FEWEST_LIKES = 5  # users with fewer likes are left out


def read_ratings(folder: pathlib.Path) -> sj.SparseDataset:
    """Ratings in any of the three forms that MovieLens has had."""
    if (folder / "ratings.csv").exists():  # since 2015
        return sj.data.read_pairs(folder / "ratings.csv")
    if (folder / "ratings.dat").exists():  # user::movie::rating::time
        return sj.data.read_pairs(folder / "ratings.dat")
    return sj.data.read_pairs(folder / "u.data", user=0, item=1, value=2, time=3)


def read_titles(folder: pathlib.Path) -> dict[str, str]:
    """The title of each film by its number."""
    if (folder / "movies.csv").exists():
        with open(folder / "movies.csv", encoding="utf-8", newline="") as file:
            return {record[0]: record[1] for record in csv.reader(file)}
    name, separator = "movies.dat", "::"
    if not (folder / name).exists():
        name, separator = "u.item", "|"
    lines = (folder / name).read_text(encoding="latin-1").splitlines()
    return dict(line.split(separator)[:2] for line in lines)


def likes(ratings: sj.SparseDataset) -> sj.SparseDataset:
    """The users with enough likes, and what they like."""
    matrix = ratings.to_scipy() >= LIKED
    enough = np.diff(matrix.indptr) >= FEWEST_LIKES
    return sj.SparseDataset.from_scipy(
        matrix[enough],
        row_names=ratings.row_names[enough],
        feature_names=ratings.feature_names,
    )


def main(folder: pathlib.Path, *, hidden: int, num_epochs: int) -> None:
    data = likes(read_ratings(folder))
    print(data)
    known, test = data.split(0.8, seed=0)
    train, validation = known.split(0.9, seed=0)

    size = data.num_features
    config = sj.NetworkConfig.autoencoder((hidden,))
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    history = sj.fit(
        model,
        sj.Optimizer(model, sj.optimizers.adam(1e-3)),
        train,
        num_epochs=num_epochs,
        validation=validation,
        early_stopping=sj.EarlyStopping(metric="ndcg@20", patience=3),
    )
    print("epochs:", len(history))

    measured = sj.evaluate(model, known, test, k=20)
    for name in ("recall@20", "ndcg@20"):
        baseline = measured[f"popularity_{name}"]
        print(f"{name}: {measured[name]:.4f}, of mere popularity {baseline:.4f}")

    titles = read_titles(folder)
    names = [titles[number] for number in data.feature_names.tolist()]
    found = sj.recommend(model, known, k=5, exclude=known)
    print(f"recommended to user {known.row_names[0]}:")
    print("".join(f"  {title}\n" for title in found.names(names)[0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=pathlib.Path, help="the unpacked folder, with ratings"
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden units")
    parser.add_argument("--epochs", type=int, default=50, help="largest number")
    arguments = parser.parse_args()
    main(arguments.folder, hidden=arguments.hidden, num_epochs=arguments.epochs)
