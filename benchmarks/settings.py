"""How quality depends on hidden units, temperature, corruption and epochs.

    python benchmarks/settings.py run --data FOLDER [--workers N] [--commit NAME]
    python benchmarks/settings.py plot

FOLDER holds `train.txt.xz` of Gowalla (the split of the LightGCN paper) and
`user_movie.csv.xz` of MovieLens-1M. The bundled data set is the third. A fifth of each
row of these training files is held out, and nDCG@20 on it is measured after every epoch.
One setting at a time differs from the defaults of `sparsejax train`. Test data is not
read.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent

from report import training_command

_DATA = {"gowalla": "train.txt.xz", "ml-1m": "user_movie.csv.xz", "msweb": None}
_EPOCHS = {"gowalla": 80, "ml-1m": 150, "msweb": 60}
_DEFAULTS = {"hidden": 256, "temperature": 0.1, "corruption": 0.5}
_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden": (32, 64, 128, 256, 512, 1024),
    "temperature": (0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, None),
    "corruption": (0.0, 0.25, 0.5, 0.75),
}
_SEEDS = (0, 1, 2)  # of the defaults; other settings have the first
_PLOT = _HERE.parent / "docs" / "settings.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    training_command(parser, __file__, {"run": _run}, {"plot": _plot})


def _settings() -> Iterator[dict[str, Any]]:
    """The defaults with every seed, then one departure from them at a time."""
    for seed in _SEEDS:
        yield _DEFAULTS | {"seed": seed}
    for name, values in _VALUES.items():
        for value in values:
            if value != _DEFAULTS[name]:
                yield _DEFAULTS | {"seed": _SEEDS[0], name: value}


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers share a GPU
    runs = [(name, setting) for setting in _settings() for name in _DATA]
    results: list[dict[str, Any]] = []
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        arguments.workers, mp_context=spawned
    ) as pool:
        waiting = [pool.submit(_trained, arguments.data, *run) for run in runs]
        for done in concurrent.futures.as_completed(waiting):
            result, versions = done.result()
            results.append(result)
            found = {"versions": versions, "epochs": _EPOCHS, "results": results}
            yield found, {k: v for k, v in result.items() if k != "ndcg@20"}


def _trained(
    folder: pathlib.Path, name: str, setting: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Trains with one setting; the curve of the validation metric."""
    import jax
    from flax import nnx

    import sparsejax as sj

    file = _DATA[name]
    data = sj.datasets.msweb().train if file is None else sj.read(folder / file)
    train, heldout = data.split(0.8, seed=0)
    config = sj.NetworkConfig.autoencoder(
        (setting["hidden"],),
        temperature=setting["temperature"],
        corruption=setting["corruption"],
    )
    size, seed = data.num_features, setting["seed"]
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(seed))
    start = time.perf_counter()
    history = sj.fit(
        model,
        sj.Optimizer(model, sj.optimizers.adam(1e-3)),
        train,
        num_epochs=_EPOCHS[name],
        seed=seed,
        validation=heldout,
    )
    curve = [round(entry["ndcg@20"], 5) for entry in history]
    best = max(range(len(curve)), key=curve.__getitem__)
    result = {
        "data": name,
        **setting,
        "best_epoch": best + 1,
        "best_ndcg@20": curve[best],
        "recall@20_there": round(history[best]["recall@20"], 5),
        "seconds": round(time.perf_counter() - start, 1),
        "ndcg@20": curve,
    }
    device = jax.devices()[0].device_kind
    return result, {"jax": jax.__version__, "device": device}


def _plot(report: dict) -> None:
    """Four panels: each setting, and the epochs of the defaults."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "settings", "svg.fonttype": "none"}
    from matplotlib import pyplot

    results = report["results"]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), constrained_layout=True)
    for axis, name in zip(axes.flat, _VALUES, strict=False):
        values = _VALUES[name]
        for data in _DATA:
            scores = {}
            for result in results:
                others = _DEFAULTS.keys() - {name}
                plain = all(result[other] == _DEFAULTS[other] for other in others)
                if result["data"] == data and plain and result["seed"] == _SEEDS[0]:
                    scores[result[name]] = result["best_ndcg@20"]
            shown = [value for value in values if value in scores]
            places = [values.index(value) for value in shown]
            best = max(scores.values())
            axis.plot(places, [scores[v] / best for v in shown], marker="o", label=data)
        labels = ["dot" if v is None else f"{v:g}" for v in values]
        axis.set_xticks(range(len(values)), labels)
        axis.set_xlabel(name)
        axis.set_ylabel("best nDCG@20, of the largest")
        axis.grid(alpha=0.3)
    axis = axes.flat[-1]
    for data in _DATA:
        (curve,) = (
            r["ndcg@20"]
            for r in results
            if r["data"] == data
            and r["seed"] == _SEEDS[0]
            and all(r[k] == v for k, v in _DEFAULTS.items())
        )
        epochs = range(1, len(curve) + 1)
        axis.plot(epochs, [v / max(curve) for v in curve], label=data)
    axis.set_xscale("log")
    axis.set_xlabel("epochs, with the defaults")
    axis.set_ylabel("nDCG@20, of the largest")
    axis.set_ylim(0.6, 1.02)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(_PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
