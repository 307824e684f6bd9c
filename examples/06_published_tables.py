"""The published table of a data set with ours in it: five seeds, mean, spread, seconds.

Run one of:

    python examples/06_published_tables.py gowalla FOLDER       # train.txt and test.txt
    python examples/06_published_tables.py amazon-book FOLDER   # the same, of LightGCN
    python examples/06_published_tables.py ml-20m pro_sg        # the files of Mult-VAE's
    python examples/06_published_tables.py netflix pro_sg       # notebook, also for MSD
    python examples/06_published_tables.py ml-1m ratings.dat    # 80/20 of each user's entries
    python examples/06_published_tables.py msweb                # 80/20, bundled

Nothing is set by hand for a data set. A tenth of the training entries of each row decides
whether our model, with its default settings, gets the default number of epochs or twice as
many, and which settings the baselines get. Then all of them learn from all training
entries, and the test data is read once. iALS takes part if the library `implicit` is
installed.
"""

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse

import sparsejax as sj

GCN = ("recall@20", "ndcg@20")  # of the papers after LightGCN
VAE = ("truncated_recall@20", "truncated_recall@50", "ndcg@100")  # after Mult-VAE
BEYOND = ("coverage@20", "gini@20", "mean_popularity@20")

# From BARS (reczoo/BARS) and the papers or repositories of BSPM, ChebyCF, SANSA and VASP.
PUBLISHED: dict[str, tuple[tuple[str, ...], dict[str, tuple[float, ...]]]] = {
    "gowalla": (
        GCN,
        {
            "Mult-VAE": (0.1641, 0.1335),
            "EASE": (0.1765, 0.1467),
            "LightGCN": (0.1830, 0.1554),
            "UltraGCN": (0.1862, 0.1580),
            "SimpleX": (0.1872, 0.1557),
            "BSPM": (0.1920, 0.1597),
            "ChebyCF": (0.1941, 0.1616),
        },
    ),
    "amazon-book": (
        GCN,
        {
            "LightGCN": (0.0411, 0.0318),
            "UltraGCN": (0.0681, 0.0556),
            "EASE": (0.0710, 0.0567),
            "BSPM": (0.0733, 0.0610),
            "ChebyCF": (0.0738, 0.0613),
            "SANSA": (0.0768, 0.0637),
        },
    ),
    "ml-20m": (
        VAE,
        {
            "EASE": (0.391, 0.521, 0.420),
            "Mult-VAE": (0.395, 0.537, 0.426),
            "RecVAE": (0.414, 0.553, 0.442),
            "H+Vamp": (0.413, 0.551, 0.445),
            "VASP": (0.414, 0.552, 0.448),
        },
    ),
    "netflix": (
        VAE,
        {
            "Mult-VAE": (0.351, 0.444, 0.386),
            "EASE": (0.362, 0.445, 0.393),
            "RecVAE": (0.361, 0.452, 0.394),
            "VASP": (0.372, 0.457, 0.406),
            "H+Vamp": (0.376, 0.463, 0.409),
        },
    ),
    "msd": (
        VAE,
        {"Mult-VAE": (0.266, 0.364, 0.316), "EASE": (0.332, 0.428, 0.388)},
    ),
    "ml-1m": (GCN, {}),
    "msweb": (GCN, {}),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train on, what to show, and what to find."""

    train: sj.SparseDataset
    shown: sj.SparseDataset
    heldout: sj.SparseDataset


Result = tuple[dict[str, float], float]  # metrics, and seconds of training


def tasks(name: str, path: pathlib.Path | None, seeds: int) -> Iterator[Task]:
    """One for each seed. Published splits are the same for all."""
    if path is None:
        if name != "msweb":
            raise SystemExit(f"say where {name} is")
        data = sj.datasets.msweb().train
    elif path.is_file():
        data = sj.read(str(path)).without_values()
    elif PUBLISHED[name][0] == VAE:
        parts = sj.data.read_vae_cf(path)
        for _ in range(seeds):
            yield Task(parts.train, *parts.test)
        return
    else:
        found = [sorted(path.glob(f"{part}.txt*"))[:1] for part in ("train", "test")]
        if not all(found):
            raise SystemExit(f"{path} has no train.txt and test.txt")
        train = sj.data.read_adjacency(found[0][0])
        heldout = sj.data.read_adjacency(found[1][0], features=train)
        for _ in range(seeds):
            yield Task(train, train, heldout)
        return
    for seed in range(seeds):
        train, heldout = data.split(0.8, seed=seed)
        yield Task(train, train, heldout)


def measure(model: Any, task: Task, metrics: tuple[str, ...]) -> dict[str, float]:
    ks = sorted({int(metric.partition("@")[2]) for metric in (*metrics, *BEYOND)})
    return sj.evaluate(model, task.shown, task.heldout, k=ks, popularity=task.train)


def ours(train: sj.SparseDataset, seed: int, times: int) -> Any:
    """A model with the settings of `sparsejax train`, but so many times the epochs."""
    sizes = train.num_rows, train.num_features, train.num_entries
    config, _ = sj.NetworkConfig.for_data(*sizes)
    epochs = times * sj.training.recipe(config, train).num_epochs
    how = sj.training.recipe(config, train, num_epochs=epochs)
    model, optimizer = sj.build(config, train, how.rule, seed=seed)
    sj.fit(
        model,
        optimizer,
        train,
        batch_size=how.batch_size,
        num_epochs=epochs,
        seed=seed,
    )
    return model


def grid(**choices) -> list[dict[str, float]]:
    found: list[dict[str, float]] = [{}]
    for name, values in choices.items():
        found = [{**chosen, name: value} for chosen in found for value in values]
    return found


def of_baseline(make: Callable[..., Any], task: Task, metrics, chosen) -> Result:
    began = time.monotonic()
    model = make(task.train, **chosen)
    seconds = time.monotonic() - began
    return measure(model, task, metrics), seconds


def of_implicit(als: Any, task: Task, metrics, chosen) -> Result:
    """iALS of the library `implicit`, measured by our metrics."""
    began = time.monotonic()
    model = als(factors=256, iterations=15, random_state=0, **chosen)
    model.fit(scipy.sparse.csr_matrix(task.train.to_scipy()), show_progress=False)
    seconds = time.monotonic() - began
    shown, heldout = task.shown.match_rows(task.heldout)
    seen = scipy.sparse.csr_matrix(shown.to_scipy())  # it takes no sparse array
    k = max(int(metric.partition("@")[2]) for metric in metrics)
    ids, _ = model.recommend(
        np.arange(shown.num_rows), seen, N=k, recalculate_user=True
    )
    lengths = np.diff(heldout.matrix.indptr)
    lengths = lengths + (0 if heldout.left_out is None else heldout.left_out)
    measured = {}
    for metric in metrics:
        name, _, k = metric.partition("@")
        of_row = getattr(sj.metrics, f"{name}_at_k")(
            jnp.asarray(ids, jnp.int32),
            heldout.matrix,
            int(k),
            left_out=heldout.left_out,
        )
        measured[metric] = float(np.mean(np.asarray(of_row)[lengths > 0]))
    return measured, seconds


def baselines() -> dict[str, tuple[Callable[..., Result], list[dict[str, float]]]]:
    """Each with the settings to choose from."""

    def with_model(make):
        return lambda *arguments: of_baseline(make, *arguments)

    knn = grid(neighbours=(20, 100), shrink=(0.0, 10.0, 100.0))
    found: dict[str, Any] = {
        "popularity": (with_model(sj.baselines.popularity), [{}]),
        "ItemKNN": (with_model(sj.baselines.item_knn), knn),
        "EASE here": (with_model(sj.baselines.ease), grid(l2=(100, 200, 500, 1000))),
    }
    try:
        # pyrefly: ignore[missing-import]
        from implicit.als import AlternatingLeastSquares as als
    except ImportError:
        return found
    settings = grid(regularization=(0.1, 1.0, 10.0), alpha=(1.0, 5.0, 20.0))
    found["iALS"] = (lambda *arguments: of_implicit(als, *arguments), settings)
    return found


def summary(results: list[Result], metrics: tuple[str, ...]) -> Mapping[str, str]:
    """Mean and, of several seeds, the standard deviation."""
    cells = {}
    for metric in (*metrics, *BEYOND):
        values = [found[metric] for found, _ in results if metric in found]
        spread = f" ±{np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
        cells[metric] = f"{np.mean(values):.4f}{spread}" if values else ""
    cells["seconds"] = f"{np.mean([seconds for _, seconds in results]):.1f}"
    return cells


def main(name: str, path: pathlib.Path | None, seeds: int = 5) -> dict[str, list]:
    """Prints the table, and returns the results of what was trained here."""
    metrics, published = PUBLISHED[name]
    everything = list(tasks(name, path, seeds))
    known, validation = everything[0].train.split(0.9, seed=0)
    inner = Task(known, known, validation)
    scores = [
        measure(ours(known, 0, times), inner, metrics)[metrics[-1]] for times in (1, 2)
    ]
    times = 1 + int(np.argmax(scores))
    print(f"{everything[0].train}\nour model: {times} x the epochs", flush=True)

    results: dict[str, list[Result]] = {}
    for label, (run, settings) in baselines().items():
        try:
            scores = [
                run(inner, metrics, chosen)[0][metrics[-1]] if settings[1:] else 0.0
                for chosen in settings
            ]
            chosen = settings[int(np.argmax(scores))]
            # Without a random choice one run is enough for a split that never changes.
            some = everything if path is None or path.is_file() else everything[:1]
            results[label] = [run(task, metrics, chosen) for task in some]
            print(f"{label}: {chosen or 'nothing to choose'}", flush=True)
        except MemoryError as error:
            print(f"{label} is left out: {error}", flush=True)
    mine = results["sparsejax"] = []
    for seed, task in enumerate(everything):
        began = time.monotonic()
        model = ours(task.train, seed, times)
        seconds = time.monotonic() - began
        mine.append((measure(model, task, metrics), seconds))

    columns = [*metrics, *BEYOND, "seconds"]
    print(" ".join([f"{'':12}", *(f"{column:>20}" for column in columns)]))
    for label, values in published.items():
        print(" ".join([f"{label:12}", *(f"{value:>20.4f}" for value in values)]))
    for label, found in results.items():
        cells = summary(found, metrics)
        print(" ".join([f"{label:12}", *(f"{cells[c]:>20}" for c in columns)]))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", choices=sorted(PUBLISHED))
    parser.add_argument("path", nargs="?", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.dataset, arguments.path, arguments.seeds)
