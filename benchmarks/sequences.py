"""Quality and time of sequence models, with the softmax over all items and over samples.

    python benchmarks/sequences.py run --data FILE [--only N ...]     on a GPU
    python benchmarks/sequences.py places --data FILE                 on a GPU
    python benchmarks/sequences.py table                              anywhere

FILE has a line `user item item ...` for each user, in the order of time, such as Amazon
Beauty as S3-Rec prepares it, or DSSTNE's form with times as values; it may be packed (.xz).
The last item of each user is the test, and all items are ranked. `places` trains HSTU with
histories of several lengths, and measures nDCG of users with few items apart. The model is shown the last but one, and is trained on it or
not. All models and files have the configurations' defaults and `sj.training.recipe`. A sampled
softmax has negatives that the batch shares, with the log-q correction; it takes the same
steps. They are uniform, or half of them are of the batch.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx
from report import print_means, training_command

import sparsejax as sj

# Model, negatives (None is the exact softmax), whether the last but one items are trained
# on, and the dtype of layers. Published models are not trained on them; `sparsejax train`
# is given all that is known. Negatives are all equally probable, or half of them are the batch's.
VARIANTS = (
    ("hstu", None, False, "float32", "uniform"),
    ("hstu", None, False, "bfloat16", "uniform"),
    ("hstu", 256, False, "float32", "uniform"),
    ("hstu", 1024, False, "float32", "uniform"),
    ("sasrec", None, False, "float32", "uniform"),
    ("sasrec", None, False, "bfloat16", "uniform"),
    ("gru", None, False, None, "uniform"),
    ("hstu", None, True, "float32", "uniform"),
    ("hstu", None, True, "bfloat16", "uniform"),
    ("sasrec", None, True, "float32", "uniform"),
    ("hstu", 256, False, "float32", "batch"),
    ("hstu", 1024, False, "float32", "batch"),
    ("hstu", 1024, False, "bfloat16", "uniform"),
)
PLACES = (50, 200, 1000, 2600)
DTYPES = ("float32", "bfloat16")
FEW = 40  # entries of a user, so that the history is short for any number of places
K = 10
_NAMES = (
    "model",
    "negatives",
    "sampler",
    "trained on the last but one",
    "places",
    "dtype",
)
_METRICS = (f"recall@{K}", f"ndcg@{K}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, help="of a trial; by default the recipe's"
    )
    parser.add_argument("--only", type=int, nargs="+", help="numbers of variants")
    training_command(
        parser,
        __file__,
        {"run": _run, "places": _run_places},
        {"table": lambda report: print_means(report, *_NAMES)},
        results="beauty",
        data="FILE",
    )


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    data = read(arguments.data)
    results = []
    variants = [VARIANTS[n] for n in arguments.only or range(len(VARIANTS))]
    # One seed of all variants after the other, so that an early end leaves some of each.
    for seed, variant in itertools.product(range(arguments.seeds), variants):
        result = _trained(data, *variant, seed, arguments.epochs)
        results.append(result)
        found = {
            "data": f"{data.num_rows:,} users, {data.num_features:,} items, "
            f"{data.num_entries:,} events",
            "results": results,
        }
        yield found, result


def read(file: pathlib.Path) -> sj.SequenceDataset:
    """Users and items with the names that the file gives them."""
    text = file.read_bytes()
    if file.suffix == ".xz":
        text = lzma.decompress(text)
    # A time follows its item after a comma. They are too large for float32 values.
    rows = [line.replace(":", " ").split() for line in text.decode().splitlines()]
    users, events = [row[0] for row in rows], [row[1:] for row in rows]
    timed = "," in events[0][0]
    if timed:
        pairs = ([entry.split(",") for entry in row] for row in events)
        events = [sorted(row, key=lambda pair: float(pair[1])) for row in pairs]
    flat = np.array([entry for row in events for entry in row])
    names, times = (flat[:, 0], flat[:, 1].astype(float)) if timed else (flat, None)
    items, indices = np.unique(names, return_inverse=True)
    indptr = np.cumsum([0, *map(len, events)])
    return sj.SequenceDataset(indptr, indices, np.array(users), items, times)


def _trained(
    data: sj.SequenceDataset,
    name: str,
    negatives: int | None,
    on_all: bool,
    dtype: str | None,
    sampler: str,
    seed: int,
    epochs: int | None,
) -> dict[str, Any]:
    before, test = data.split_last()
    train = before if on_all else before.split_last().train
    document: dict[str, Any] = {"version": 1, "model": name}
    document |= {"negatives": negatives, "sampler": sampler}
    if dtype is not None:
        document["dtype"] = dtype
    config = sj.sequence.SequenceConfig.from_json(document).suited_to(train)
    model, fitted = _fitted(config, train, seed, epochs)
    start = time.perf_counter()
    result = {
        "model": name,
        "negatives": negatives,
        "trained on the last but one": on_all,
        "dtype": dtype,
        "sampler": sampler,
        **fitted,
    }
    for form, exclude in (("left out", before), ("kept", None)):
        found = sj.evaluate(model, before, test, k=K, exclude=exclude, popularity=None)
        result[f"test, seen {form}"] = [round(found[m], 5) for m in _METRICS]
    seconds = fitted["fit_seconds"] + time.perf_counter() - start
    result["seconds"] = round(seconds, 2)
    return result


def _fitted(config, train, seed: int, epochs: int | None) -> tuple[Any, dict[str, Any]]:
    """The model, trained by the recipe."""
    start = time.perf_counter()
    recipe = sj.training.recipe(config, train, num_epochs=epochs)
    # Without sj.build, which compiles a program for each seed.
    model = sj.sequence.build_sequence_model(
        config, items=train.num_features, rngs=nnx.Rngs(seed)
    )
    history = sj.fit(
        model,
        sj.Optimizer(model, recipe.rule),
        train,
        batch_size=recipe.batch_size,
        num_epochs=recipe.num_epochs,
        seed=seed,
    )
    seconds = round(time.perf_counter() - start, 2)
    return model, {"seed": seed, "epochs": len(history), "fit_seconds": seconds}


def _run_places(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    """HSTU with histories of several lengths; all others is the recipe."""
    data, results = read(arguments.data), []
    before, test = data.split_last()
    few = before.row_names[np.diff(before.indptr) < FEW]
    every = itertools.product(range(arguments.seeds), DTYPES, PLACES)
    for seed, dtype, places in every:
        config = sj.HSTUConfig(max_length=places, divisor=50, dtype=dtype)
        model, result = _fitted(config, before, seed, arguments.epochs)
        result = {"places": places, "dtype": dtype, **result}
        start = time.perf_counter()
        for name, users in (("all", before.row_names), ("few", few)):
            shown = before.align_rows(users), test.align_rows(users)
            found = sj.evaluate(model, *shown, k=K, exclude=shown[0], popularity=None)
            result[name] = [round(found[m], 5) for m in _METRICS]
        result["evaluate_seconds"] = round(time.perf_counter() - start, 2)
        results.append(result)
        about = f"{data.num_rows:,} users, {data.num_entries:,} events"
        yield {"data": about, "few": len(few), "results": results}, result


if __name__ == "__main__":
    main()
