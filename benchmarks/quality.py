"""Quality by the defaults, by each setting, of models of histories, and with content.

    python benchmarks/quality.py ACTION --data FOLDER [--only NAME ...]    on a GPU
    python benchmarks/quality.py step --content vectors                    on a GPU
    python benchmarks/quality.py plot                                      anywhere
    python benchmarks/quality.py table                                     anywhere

FOLDER holds what there is of `train.txt.xz` and `test.txt.xz` (Gowalla in the split of the
LightGCN paper), `user_movie.csv.xz` (MovieLens-1M), `Beauty.txt.xz` (Amazon Beauty as S3-Rec
prepares it), `Beauty_item2attributes.json.xz` and `movielens_input_1024.txt.xz` (users 1 to 1024
of MovieLens-20M in DSSTNE's form). All items are ranked. Models are those of `sj.training.recipe`.

defaults: `sparsejax train` on five data sets. But for Gowalla, a fifth of the entries of each row
is held out. A model is measured with its linear part, with its layers alone, with less of what is
popular, and as its linear part alone; beside it EASE, where the items are few enough.
settings: nDCG@20 on a fifth of each row of training data after every epoch; one setting at a time
differs from the defaults. *plot* draws it. Test data is not read.
histories: the last item of each user is the test. Models are shown the last but one, and trained
on it or not. A sampled softmax has negatives that the batch shares, half of them the batch's or
none. *places* trains HSTU with histories of several lengths, and measures users with few items
apart.
content: vectors by ids alone and with tags; items are measured by the number of their entries.
step: times of a training step of SASRec over a million items with content, whose vectors are made
part by part, or stored, and the most memory that the process has had until then.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import json
import lzma
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import scipy.sparse
from flax import nnx
from report import RESULTS, print_means, write_report

import sparsejax as sj

_FILES = {
    "gowalla": "train.txt.xz",
    "ml-1m": "user_movie.csv.xz",
    "msweb": None,
    "beauty": "Beauty.txt.xz",
    "ml-20m-1024": "movielens_input_1024.txt.xz",
}
# Number of epochs (None is the default) and hidden units of each training.
_TRAININGS = {"gowalla": ((None, 256), (50, 256), (50, 512))}
_METRICS = ("recall@20", "ndcg@20", "coverage@20", "gini@20", "mean_popularity@20")
# Factors: this times the log of an item's entries is subtracted from its bias.
_PENALTIES = (0.25, 0.5, 1.0)
_EASE_ITEMS = 15_000

_EPOCHS = {"gowalla": 80, "ml-1m": 150, "msweb": 60}  # number of epochs for `settings`
_DEFAULTS = {"hidden": 256, "temperature": 0.1, "corruption": 0.5}
_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden": (32, 64, 128, 256, 512, 1024),
    "temperature": (0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, None),
    "corruption": (0.0, 0.25, 0.5, 0.75),
}
_PLOT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "settings.svg"

# Model; number of negatives (None is the exact softmax); their sampler; whether the last but one
# items are trained on; dtype of layers. Published models are not trained on these items, but
# `sparsejax train` is trained on everything known.
_HISTORIES = (
    ("hstu", None, "uniform", False, "float32"),
    ("hstu", None, "uniform", False, "bfloat16"),
    ("hstu", 256, "uniform", False, "float32"),
    ("hstu", 1024, "uniform", False, "float32"),
    ("sasrec", None, "uniform", False, "float32"),
    ("sasrec", None, "uniform", False, "bfloat16"),
    ("gru", None, "uniform", False, None),
    ("hstu", None, "uniform", True, "float32"),
    ("hstu", None, "uniform", True, "bfloat16"),
    ("sasrec", None, "uniform", True, "float32"),
    ("hstu", 256, "batch", False, "float32"),
    ("hstu", 1024, "batch", False, "float32"),
    ("hstu", 1024, "uniform", False, "bfloat16"),
)
_NAMES = "model", "negatives", "sampler", "trained on the last but one", "dtype"
# Most entries of a user who counts as having few: for any number of places, the history is short.
_FEW = 40
_K = 10

_WIDTH, _LENGTH, _BATCH = 256, 50, 256  # sizes for `step`
_VECTORS, _TAGS, _KINDS = 768, 20, 100_000
# For each name, a function that yields the results of a trial with a given seed.
Trials = dict[str, Callable[[int], Iterator[dict]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=[*_ACTIONS, "plot", "table"])
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=["*"], help="trials, by patterns")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="by default the recipe's")
    parser.add_argument("--content", choices=("none", "vectors", "tags"))
    parser.add_argument("--items", type=int, default=1_000_000, help="of `step`")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.action == "plot":
        _plot(json.loads((RESULTS / "settings.json").read_text())["results"])
    elif arguments.action == "table":
        for name, (_, *names) in _ACTIONS.items():
            print(f"# {name}\n")
            print_means(json.loads((RESULTS / f"{name}.json").read_text()), *names)
    elif arguments.data is None and arguments.action != "step":
        parser.error(f"{arguments.action} needs --data FOLDER")
    elif arguments.content is None and arguments.action == "step":
        parser.error("step needs --content none, --content vectors or --content tags")
    else:
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    """Runs all trials with one seed, then with the next seed, so that an early end leaves results
    of each trial.
    """
    action, results = arguments.action, []
    trials = {
        name: trial
        for name, trial in _ACTIONS[action][0](arguments).items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only)
    }
    for seed, trial in itertools.product(range(arguments.seeds), trials.values()):
        for result in trial(seed):
            results.append(result | {"seed": seed})
            output = arguments.output or RESULTS / f"{action}.json"
            write_report(output, f"quality.py {action}", arguments.commit, results)
            print(json.dumps(results[-1])[:500], flush=True)


def _fitted(config: Any, train: Any, seed: int, epochs: int | None, features=None):
    """Trains a model by the recipe; returns it and its training time."""
    start = time.perf_counter()
    how = sj.training.recipe(config, train, num_epochs=epochs)
    modules = sj.build(config, train, how.rule, item_features=features, seed=seed)
    sizes = {"batch_size": how.batch_size, "num_epochs": how.num_epochs}
    history = sj.fit(*modules, train, **sizes, seed=seed)
    seconds = round(time.perf_counter() - start, 2)
    return modules[0], {"epochs": len(history), "fit_seconds": seconds}


def _scores(model: Any, shown: Any, wanted: Any, metrics, **options) -> dict[str, Any]:
    found = sj.evaluate(model, shown, wanted, **options)
    return {name: round(float(found[name]), 5) for name in metrics}


def _matrix(folder: pathlib.Path, name: str) -> Any:
    file = _FILES[name]
    if file is None:
        return sj.datasets.msweb().train
    # One file has times as values, which are removed.
    return sj.read(folder / file).without_values()


# --- defaults ---


def _defaults(arguments: argparse.Namespace) -> Trials:
    folder = arguments.data
    return {
        f"{name} {epochs} {hidden}": functools.partial(
            _by_default, folder, name, arguments.epochs or epochs, hidden
        )
        for name, file in _FILES.items()
        for epochs, hidden in _TRAININGS.get(name, ((None, 256),))
        if file is None or (folder / file).exists()
    }


def _by_default(
    folder: pathlib.Path, name: str, epochs: int | None, hidden: int, seed: int
) -> Iterator[dict]:
    """Trains a model by the defaults; yields the metrics of each form of it."""
    train = _matrix(folder, name)
    if name == "gowalla":
        test = sj.read(folder / "test.txt.xz", features=train)
    else:
        train, test = train.split(0.8, seed=seed)
    items = train.num_features
    sizes = train.num_rows, items, train.num_entries
    config, _ = sj.NetworkConfig.for_data(*sizes, hidden=(hidden,))
    model, fitted = _fitted(config, train, seed, epochs)
    named = {"set": name, **fitted, "hidden": hidden}

    def measured(form: str, model: Any = model) -> dict:
        named["form"] = form
        return named | _scores(model, train, test, _METRICS, k=20)

    yield measured("default")
    output: Any = model.output
    bias = output.bias[...]
    counts = np.bincount(train.matrix.indices, minlength=len(bias))
    excess = jnp.asarray(np.log(np.maximum(counts, 1)), bias.dtype)
    for penalty in _PENALTIES if seed == 0 else ():
        output.bias.set_value(bias - penalty * excess)
        yield measured(f"penalty {penalty}")
    output.bias.set_value(bias)
    if config.linear is not None:
        scale = output.linear.scale[...]
        output.linear.scale.set_value(scale * 0)
        yield measured("layers alone")
        output.linear.scale.set_value(scale)
        output.kernel.set_value(output.kernel[...] * 0)
        output.bias.set_value(bias * 0)
        yield measured("linear part alone")
    if items <= _EASE_ITEMS:
        yield measured("EASE", sj.baselines.ease(train))


# --- settings ---


def _settings(arguments: argparse.Namespace) -> Trials:
    """The trials: the defaults with three seeds, then with one setting changed at a time."""
    departures = [{name: v} for name, values in _VALUES.items() for v in values]
    others = [d for d in departures if not d.items() <= _DEFAULTS.items()]
    return {
        f"{name} {' '.join(f'{k} {v}' for k, v in departure.items())}": (
            functools.partial(_with_setting, arguments.data, name, departure)
        )
        for departure in ({}, *others)
        for name in _EPOCHS
    }


def _with_setting(
    folder: pathlib.Path, name: str, departure: dict[str, Any], seed: int
) -> Iterator[dict]:
    """Trains with one changed setting; yields the validation metric after each epoch."""
    if seed >= (1 if departure else 3):
        return
    data = _matrix(folder, name)
    train, heldout = data.split(0.8, seed=0)
    setting: dict[str, Any] = _DEFAULTS | departure
    config = sj.NetworkConfig.autoencoder(
        (setting["hidden"],),
        temperature=setting["temperature"],
        corruption=setting["corruption"],
    )
    size = data.num_features
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(seed))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    how = {"num_epochs": _EPOCHS[name], "validation": heldout, "seed": seed}
    history = sj.fit(model, optimizer, train, **how)
    curve = [round(entry["ndcg@20"], 5) for entry in history]
    best = int(np.argmax(curve))
    yield {
        "data": name,
        **setting,
        "best_epoch": best + 1,
        "best_ndcg@20": curve[best],
        "recall@20_there": round(history[best]["recall@20"], 5),
        "ndcg@20": curve,
    }


def _plot(results: list[dict]) -> None:
    """Draws four panels: one for each setting, and one for the epochs of the defaults."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "settings", "svg.fonttype": "none"}
    from matplotlib import pyplot

    first = [r for r in results if r["seed"] == 0]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), constrained_layout=True)
    for axis, (name, values) in zip(axes.flat, _VALUES.items(), strict=False):
        others = {k: v for k, v in _DEFAULTS.items() if k != name}.items()
        for data in _EPOCHS:
            scores = {
                values.index(r[name]): r["best_ndcg@20"]
                for r in first
                if r["data"] == data and others <= r.items()
            }
            places, best = sorted(scores), max(scores.values())
            axis.plot(
                places, [scores[p] / best for p in places], marker="o", label=data
            )
        labels = ["dot" if v is None else f"{v:g}" for v in values]
        axis.set_xticks(range(len(values)), labels)
        axis.set(xlabel=name, ylabel="best nDCG@20, of the largest")
        axis.grid(alpha=0.3)
    axis = axes.flat[-1]
    plain = [r for r in first if all(r[k] == v for k, v in _DEFAULTS.items())]
    curves = {r["data"]: r["ndcg@20"] for r in plain}
    for data, curve in ((data, curves[data]) for data in _EPOCHS):
        epochs = range(1, len(curve) + 1)
        axis.plot(epochs, [v / max(curve) for v in curve], label=data)
    axis.set(xscale="log", xlabel="epochs, with the defaults")
    axis.set(ylabel="nDCG@20, of the largest", ylim=(0.6, 1.02))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(_PLOT, metadata={"Date": None})


# --- histories ---


def _history_config(train: Any, name: str, dtype: str | None = None, **more) -> Any:
    document = {"version": 1, "model": name} | more
    document |= {} if dtype is None else {"dtype": dtype}
    return sj.sequence.SequenceConfig.from_json(document).suited_to(train)


def _histories(arguments: argparse.Namespace) -> Trials:
    data = sj.read_sequences(arguments.data / _FILES["beauty"])
    before, test = data.split_last()

    def trial(variant: tuple, seed: int) -> Iterator[dict]:
        name, negatives, sampler, on_all, dtype = variant
        train = before if on_all else before.split_last().train
        more = {"negatives": negatives, "sampler": sampler}
        config = _history_config(train, name, dtype, **more)
        model, fitted = _fitted(config, train, seed, arguments.epochs)
        result = dict(zip(_NAMES, variant, strict=True)) | fitted
        metrics = f"recall@{_K}", f"ndcg@{_K}"
        for form, exclude in (("left out", before), ("kept", None)):
            options = {"k": _K, "exclude": exclude, "popularity": None}
            found = _scores(model, before, test, metrics, **options)
            result[f"test, seen {form}"] = [*found.values()]
        yield result

    return {
        " ".join(map(str, variant)): functools.partial(trial, variant)
        for variant in _HISTORIES
    }


def _places(arguments: argparse.Namespace) -> Trials:
    """Trials of HSTU with several lengths of histories. All other settings are the recipe's."""
    text = lzma.decompress((arguments.data / _FILES["ml-20m-1024"]).read_bytes())
    # In the files, a time follows its item after a comma. Times are too large for float32 values.
    events = [
        (user, *event.split(","))
        for user, entries in map(str.split, text.decode().splitlines())
        for event in entries.split(":")
    ]
    users, items, times = zip(*events, strict=True)
    table = {"user": users, "item": items, "time": np.array(times, float)}
    before, test = sj.read_sequences(pa.table(table)).split_last()
    few = before.row_names[np.diff(before.indptr) < _FEW]

    def trial(places: int, dtype: Any, seed: int) -> Iterator[dict]:
        config = sj.HSTUConfig(max_length=places, divisor=50, dtype=dtype)
        model, fitted = _fitted(config, before, seed, arguments.epochs)
        result: dict[str, Any] = {"places": places, "dtype": dtype, **fitted}
        for name, names in (("all", before.row_names), ("few", few)):
            shown, wanted = before.align_rows(names), test.align_rows(names)
            options = {"k": _K, "exclude": shown, "popularity": None}
            metrics = f"recall@{_K}", f"ndcg@{_K}"
            found = _scores(model, shown, wanted, metrics, **options)
            result[name] = [*found.values()]
        yield result

    return {
        f"{places} {dtype}": functools.partial(trial, places, dtype)
        for dtype in ("float32", "bfloat16")
        for places in (50, 200, 1000, 2600)
    }


# --- content ---


def _content(arguments: argparse.Namespace) -> Trials:
    folder = arguments.data
    data = sj.read_sequences(folder / _FILES["beauty"])
    features = sj.read_item_features(folder / "Beauty_item2attributes.json.xz")
    before, test = data.split_last()
    parts: Any = before, test, *before.split_last()
    dtype = "bfloat16" if jax.default_backend() == "gpu" else None

    def trial(name: str, form: str, seed: int) -> Iterator[dict]:
        given, config = parts, sj.NetworkConfig.autoencoder((256,))
        if name == "autoencoder":
            given = tuple(part.to_sparse() for part in parts)
        else:
            config = _history_config(parts[2], name, dtype)
        tags = features if form == "tags" else None
        model, fitted = _fitted(config, given[2], seed, arguments.epochs, tags)
        named = {"model": name, "form": form}
        yield named | fitted | _by_entries(model, given)
        if tags is not None and name != "autoencoder":
            ranked = sj.sequence.WithNeighbours(model)
            named["form"] = "tags and neighbours"
            yield named | _by_entries(ranked, given)

    return {
        f"{name} {form}": functools.partial(trial, name, form)
        for name in ("hstu", "sasrec", "autoencoder")
        for form in ("ids", "tags")
    }


def _by_entries(model: Any, parts: tuple) -> dict[str, float]:
    """Metrics of the last items, grouped by the items' number of entries; and of all last but one
    items.
    """
    shown, wanted, known, chosen = parts
    found = sj.evaluate(
        model, shown, wanted, k=_K, exclude=shown, popularity=known, by="entries"
    )
    kept = (f"recall@{_K}", f"ndcg@{_K}", f"share@{_K}", f"coverage@{_K}", "entries[")
    result = {k: round(v, 5) for k, v in found.items() if k.startswith(kept)}
    options = {"k": _K, "exclude": known, "popularity": None}
    other = _scores(model, known, chosen, (f"recall@{_K}", f"ndcg@{_K}"), **options)
    return result | {f"validation {name}": each for name, each in other.items()}


def _steps(arguments: argparse.Namespace) -> Trials:
    def trial(seed: int) -> Iterator[dict]:
        if seed == 0:
            yield from _step(arguments.content, arguments.items)

    return {arguments.content: trial}


def _step(kind: str, items: int) -> Iterator[dict]:
    rng = np.random.default_rng(0)
    tags = vectors = sizes = content = None
    if kind == "vectors":
        some = rng.standard_normal((10_000, _VECTORS)) / _VECTORS**0.5
        vectors = np.resize(some.astype(np.float16), (items, _VECTORS))
    if kind == "tags":
        columns = rng.integers(0, _KINDS, (items, _TAGS), np.int32)
        columns.sort(axis=1)
        ends = np.arange(items + 1, dtype=np.int64) * _TAGS
        ones = np.ones(columns.size, np.float32)
        tags = scipy.sparse.csr_array((ones, columns.ravel(), ends), (items, _KINDS))
    if kind != "none":
        sizes = sj.nn.ContentSizes.of(tags, vectors)
    shape = {"max_length": _LENGTH, "width": _WIDTH, "blocks": 2, "dropout": 0.2}
    config = sj.SASRecConfig(**shape, temperature=None, dtype="bfloat16")
    model = sj.sequence.SASRec(config, items=items, content=sizes, rngs=nnx.Rngs(0))
    if sizes is not None:
        content = cast(Any, model.output.content)
        content.set_to(tags, vectors)
        content.set_entries(rng.integers(1, 50, items))
    held = sum(v[...].nbytes for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    given = 0 if vectors is None else vectors.nbytes
    given += 0 if tags is None else 8 * tags.nnz
    del tags, vectors
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    histories = jnp.asarray(rng.integers(0, items, (_BATCH, _LENGTH + 1)), jnp.int32)
    for form in ("stored",) if content is None else ("parts", "stored"):
        if content is not None:
            content.by_parts = form == "parts"
        yield {
            "content": kind,
            "form": form,
            "items": items,
            **_timed(model, optimizer, histories),
            "content_bytes": given,
            "parameter_bytes": held,
        }


def _timed(model: Any, optimizer: Any, histories: jax.Array) -> dict:
    """Times steps, and measures the largest memory that the process has used until then."""

    @sj.jit
    def step(model, optimizer, histories):
        loss, grads = optimizer.value_and_grad(
            lambda m: m.loss(histories, max_targets=_BATCH * _LENGTH)
        )(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, histories)) for _ in range(3)]
    times = []
    for _ in range(30):
        start = time.perf_counter()
        step(model, optimizer, histories).block_until_ready()
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "milliseconds": round(1e3 * min(times), 2),
        "median_milliseconds": round(1e3 * statistics.median(times), 2),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "losses": [round(x, 3) for x in losses],
    }


# The trials of each action, and the keys that distinguish its results.
_ACTIONS: dict[str, tuple] = {
    "defaults": (_defaults, "set", "epochs", "hidden", "form"),
    "settings": (_settings, "data", *_DEFAULTS),
    "histories": (_histories, *_NAMES),
    "places": (_places, "places", "dtype"),
    "content": (_content, "model", "form"),
    "step": (_steps, "content", "form", "items"),
}


if __name__ == "__main__":
    main()
