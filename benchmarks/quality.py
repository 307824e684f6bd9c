"""Quality with the defaults of `sparsejax train`, on five data sets, for several seeds.

    python benchmarks/quality.py run --data FOLDER [--sets NAME ...] [--seeds N] [--add]
    python benchmarks/quality.py table

FOLDER holds what there is of `train.txt.xz` and `test.txt.xz` (Gowalla in the split of the
LightGCN paper), `user_movie.csv.xz` (MovieLens-1M), `Beauty.txt.xz` (Amazon Beauty, a
history on each line) and `movielens_input_1024.txt.xz` (users 1 to 1024 of MovieLens-20M in
DSSTNE's form). The bundled data set needs no file. But for Gowalla, a
fifth of the entries of each row is held out for the test, with the seed of the training.

With each seed a model is trained on all of the rest. It is measured with its linear part,
with its layers alone, with less of what is popular, and as its linear part alone. All items
are ranked, except those that a user has in the training data. EASE is computed where
the items are few enough. Nothing is chosen on the test.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from report import print_means, training_command

_FILES = {
    "gowalla": "train.txt.xz",
    "ml-1m": "user_movie.csv.xz",
    "msweb": None,
    "beauty": "Beauty.txt.xz",
    "ml-20m-1024": "movielens_input_1024.txt.xz",
}
# Epochs and hidden units; None is the default.
_DEFAULT = (None, 256)
_TRAININGS = {"gowalla": (_DEFAULT, (50, 256), (50, 512))}
_METRICS = ("recall@20", "ndcg@20", "coverage@20", "gini@20", "mean_popularity@20")
# From the bias of an item's score, this times the log of its entries is subtracted.
_PENALTIES = (0.25, 0.5, 1.0)
_EASE_ITEMS = 15_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(_FILES), default=list(_FILES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of the default")
    parser.add_argument("--add", action="store_true", help="keep results of others")
    training_command(
        parser,
        __file__,
        {"run": _run},
        {"table": lambda report: print_means(report, "set")},
    )


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    import jax

    results: list[dict[str, Any]] = []
    if arguments.add:
        results = json.loads(arguments.output.read_text())["results"]
    device = jax.devices()[0].device_kind
    for seed in range(arguments.seeds):
        for name in arguments.sets:
            file = _FILES[name]
            if file is not None and not (arguments.data / file).exists():
                continue
            trainings = _TRAININGS.get(name, (_DEFAULT,))
            if arguments.epochs is not None:
                trainings = ((arguments.epochs, 256),)
            result = {"set": name, "seed": seed, "device": device}
            for training in trainings:
                result |= _trained(arguments.data, name, seed, *training)
            same = [r for r in results if (r["set"], r["seed"]) == (name, seed)]
            results = [r for r in results if r not in same] + [result]
            shown = {k: v[:2] if isinstance(v, list) else v for k, v in result.items()}
            yield {"results": results}, shown


def _trained(
    folder: pathlib.Path, name: str, seed: int, epochs: int | None, hidden: int
) -> dict[str, Any]:
    """Seconds, and a list of metrics for each form of the model."""
    import jax

    import sparsejax as sj

    train, test = load(folder, name, seed)
    sizes = train.num_rows, train.num_features, train.num_entries
    start = time.perf_counter()
    config, _ = sj.NetworkConfig.for_data(*sizes, hidden=(hidden,))
    how = sj.training.recipe(config, train, num_epochs=epochs)
    model, optimizer = sj.build(config, train, how.rule, seed=seed)
    jax.block_until_ready(model.output.kernel[...])
    epochs = how.num_epochs
    form = f"{epochs} epochs" + f", {hidden} hidden units" * (hidden != _DEFAULT[1])
    result: dict[str, Any] = {
        "temperature": config.output.temperature,
        "linear": None if config.linear is None else vars(config.linear),
        "entries of an item": sizes[2] / sizes[1],
        f"{form}, build, s": time.perf_counter() - start,
    }
    counts = np.bincount(train.matrix.indices, minlength=sizes[1])
    excess = np.log(np.maximum(counts, 1))

    def measured(part: str) -> None:
        found = sj.evaluate(model, train, test, k=20)
        result[f"{form}, {part}"] = [float(found[m]) for m in _METRICS]

    start = time.perf_counter()
    sj.fit(
        model, optimizer, train, batch_size=how.batch_size, num_epochs=epochs, seed=seed
    )
    result[f"{form}, fit, s"] = time.perf_counter() - start
    measured("default")
    output: Any = model.output
    bias = output.bias[...]
    for penalty in _PENALTIES if seed == 0 else ():
        less = np.pad(excess, (0, len(bias) - len(excess)))
        output.bias.set_value(bias - penalty * jax.numpy.asarray(less, bias.dtype))
        measured(f"penalty {penalty}")
    output.bias.set_value(bias)
    if config.linear is not None:
        scale = output.linear.scale[...]
        output.linear.scale.set_value(scale * 0)
        measured("layers alone")
        output.linear.scale.set_value(scale)
        output.kernel.set_value(output.kernel[...] * 0)
        output.bias.set_value(bias * 0)
        measured("linear part alone")
    if train.num_features <= _EASE_ITEMS:
        start = time.perf_counter()
        found = sj.evaluate(sj.baselines.ease(train), train, test, k=20)
        result["EASE"] = [float(found[m]) for m in _METRICS]
        result["EASE, s"] = time.perf_counter() - start
    return result


def load(folder: pathlib.Path, name: str, seed: int):
    import sparsejax as sj

    if name == "gowalla":
        train = sj.read(folder / "train.txt.xz")
        return train, sj.read(folder / "test.txt.xz", features=train)
    file = _FILES[name]
    if file is None:
        data = sj.datasets.msweb().train
    else:
        data = sj.read(folder / file).without_values()  # times, in one file
    parts = data.split(0.8, seed=seed)
    return parts.train, parts.heldout


if __name__ == "__main__":
    main()
