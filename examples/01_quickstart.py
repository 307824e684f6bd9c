"""From a data set to recommendations, a report and a file for a service.

Run: python examples/01_quickstart.py
"""

from flax import nnx

import sparsejax as sj


def main(num_epochs: int = 10) -> None:
    # The histories of users. To read your own: sj.read("purchases.tsv").
    data = sj.datasets.msweb().train
    print(data)
    train, heldout = data.split(0.8, seed=0)  # hold out a fifth of each row

    config = sj.NetworkConfig.autoencoder(hidden=(64,))
    size = train.num_features
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    history = sj.fit(
        model,
        optimizer,
        train,
        num_epochs=num_epochs,
        validation=heldout,
        log=lambda step, entry: print(
            f"epoch {entry['epoch']}: loss {entry['loss']:.3f}, "
            f"ndcg@20 {entry['ndcg@20']:.3f}"
        ),
    )

    # For each user, rank all items that the user does not have. Compare with popularity.
    measured = sj.evaluate(model, train, heldout, k=20)
    print(f"ndcg@20 {measured['ndcg@20']:.3f}", end=", ")
    print(f"of mere popularity {measured['popularity_ndcg@20']:.3f}")

    found = sj.recommend(model, train, k=3, exclude=train)
    print("recommended to", train.row_names[0], found.names(train)[0])
    alike = sj.similar_items(model, ["/products"], k=3, names=train)
    print("like /products:", alike.names(train)[0])

    sj.write_report("report.html", model, history, measured=measured)

    # A file for a service. The service needs neither Flax nor this script.
    sj.export_predictor(model, "model.predictor", k=3, names=train)
    predictor = sj.load_predictor("model.predictor")
    predictor.warm_up()  # else the first request waits for the compiler
    print("to somebody new:", predictor.recommend_names(["/products", "/support"]))


if __name__ == "__main__":
    main()
