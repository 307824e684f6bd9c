"""From a data set to recommendations, a report and a file for a service.

Run: python examples/01_quickstart.py
"""

import sparsejax as sj


def main(num_epochs: int = 10) -> None:
    # The histories of users. To read your own: sj.read("purchases.tsv").
    data = sj.datasets.msweb().train
    print(data)
    train, heldout = data.split(0.8, seed=0)  # hold out a fifth of each row

    # The network and its training suit the data, as those of `sparsejax train`.
    run = sj.Run.train(
        train,
        num_epochs=num_epochs,
        validation=heldout,
        log=lambda step, entry: print(
            f"epoch {entry['epoch']}: loss {entry['loss']:.3f}, "
            f"ndcg@20 {entry['ndcg@20']:.3f}"
        ),
    )

    # For each user, rank all items that the user does not have. Compare with popularity.
    measured = run.evaluate(heldout, k=20)
    print(f"ndcg@20 {measured['ndcg@20']:.3f}", end=", ")
    print(f"of mere popularity {measured['popularity_ndcg@20']:.3f}")

    user = train.row_names[0]
    print("recommended to", user, run.recommend([user], k=3).names()[0])
    print("like /products:", run.similar(["/products"], k=3).names()[0])

    run.report("report.html", heldout)
    # A folder, which commands also read: sparsejax report monday
    run.save("monday")

    # A file for a service. The service needs neither Flax nor this script.
    run.export("model.predictor", k=3)
    predictor = sj.load_predictor("model.predictor")
    predictor.warm_up()  # else the first request waits for the compiler
    print("to somebody new:", predictor.recommend_names(["/products", "/support"]))


if __name__ == "__main__":
    main()
