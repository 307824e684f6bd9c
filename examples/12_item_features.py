"""What items are: new products are recommended from the first day.

From events and a table of products to recommendations that hold products without events;
then a predictor takes a product that comes later. The data is made up: users buy products
of the kinds and brands that they like.

Run: python examples/12_item_features.py
"""

import csv
import pathlib
import tempfile

import numpy as np

import sparsejax as sj

USERS, PRODUCTS, KINDS, BRANDS = 2000, 300, 12, 8
NEW = 5  # the last products, which are in no event


def write_data(folder: pathlib.Path) -> None:
    """Writes events.csv, and products.csv with a kind, a brand and a title each."""
    rng = np.random.default_rng(0)
    kinds, brands = (rng.integers(0, n, PRODUCTS) for n in (KINDS, BRANDS))
    likes = 2 * rng.normal(size=(USERS, KINDS))[:, kinds]
    likes += rng.normal(size=(USERS, BRANDS))[:, brands]
    likes += rng.gumbel(size=likes.shape)
    likes[:, -NEW:] = -np.inf
    with open(folder / "events.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user", "item"])
        for user, bought in enumerate(np.argsort(-likes, axis=1)[:, :10]):
            out.writerows([f"user{user}", f"product{item}"] for item in bought)
    with open(folder / "products.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["item", "kind", "brand", "title"])
        for item, (kind, brand) in enumerate(zip(kinds, brands, strict=True)):
            row = [f"kind{kind}", f"brand{brand}", f"A thing of kind{kind}"]
            out.writerow([f"product{item}", *row])


def main(num_epochs: int | None = None) -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    write_data(folder)
    products = sj.read_item_features(folder / "products.csv", words=["title"])
    print(products)

    # Products that are in no event are in the vocabulary, too.
    run = sj.Run.train(
        folder / "events.csv", item_features=products, num_epochs=num_epochs
    )
    found = run.recommend(k=10)
    new = {f"product{item}" for item in range(PRODUCTS - NEW, PRODUCTS)}
    users = sum(bool(new & set(names)) for names in found.names())
    print(f"{users:,} of {USERS:,} users are recommended a product without events")

    # Tomorrow there is another one, of a kind and a brand that are known. Nothing is trained.
    run.export(folder / "today.predictor", k=100)
    with open(folder / "products.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    new_one = sj.read_item_features([rows[0] | {"item": "product999"}], words=["title"])
    predictor = sj.load_predictor(folder / "today.predictor")
    predictor.add_items(new_one).save(folder / "tomorrow.predictor")

    tomorrow = sj.load_predictor(folder / "tomorrow.predictor")
    alike = [row["item"] for row in rows if row["kind"] == rows[0]["kind"]][:5]
    best = tomorrow.recommend_names(alike)
    print(f"after {', '.join(alike)} it is number {best.index('product999') + 1}")


if __name__ == "__main__":
    main()
