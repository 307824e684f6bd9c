"""Writes files as release 0.1.0 writes them, and the values that it reads in them.

`tests/test_golden.py` reads each of them, compares it with `expected.json`, and trains on.
They were written at the release (2026-11-29). Until a release drops the reading of such files, they stay::

    PYTHONPATH=. python tests/golden/make.py tests/golden

With an empty folder instead, at two commits on one machine and with one version of JAX, the
two `expected.json` say whether bits have changed.

Only public names and the command line are used here, so that this runs at any commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import optimizers
from sparsejax.cli.main import main

USERS, ITEMS, CLICKS = 40, 24, 160
BEGUN, ENDED = 2, 4  # epochs: of a stored run, and of the run that goes on
K, SHOWN = 5, 6  # items of a list, and rows whose lists are expected
QUICK = ["--batch-size", "16", "--decay", "none", "--learning-rate", "0.02"]
QUICK += ["--deterministic", "--no-compilation-cache"]
NETWORK = ["--hidden", "4", "--linear", "None", "--temperature", "0.2"]

# The runs of `sparsejax train`: the data, and the other flags.
RANKING = {
    "run_float32": (
        "items_valued.parquet",
        [*NETWORK, "--optimizer", "adam", "--validation", "0.8"],
    ),
    "run_bfloat16": (
        "items_indicator.parquet",
        ["--optimizer", "adagrad", "--param-dtype", "bfloat16"]
        + ["--output-dtype", "bfloat16", *NETWORK],
    ),
    "run_linear": (
        "items_indicator.parquet",
        ["--hidden", "4", "--linear", "3", "--temperature", "None"]
        + ["--optimizer", "momentum", "--loss", "sigmoid_binary_cross_entropy"]
        + ["--warmup-epochs", "1", "--fused"],
    ),
    "run_sasrec": (
        "histories.parquet",
        ["--config", "sasrec.json", "--validation", "last"],
    ),
    "run_hstu": (
        "histories_with_times.parquet",
        ["--config", "hstu.json", "--optimizer", "adam"],
    ),
    "run_gru": (
        "histories.parquet",
        ["--config", "gru.json", "--optimizer", "adagrad", "--negatives", "7"],
    ),
}
CLICKED = {
    "run_dlrm": (
        "clicks_table.parquet",
        ["--config", "dlrm.json", "--schema", "schema.json", "--validation", "0.8"]
        + ["--optimizer", "adagrad"],
    )
}
COMMANDS = {
    **{
        name: (data, [*more, *(["--k", "5"] if "--validation" in more else [])])
        for name, (data, more) in RANKING.items()
    },
    **CLICKED,
}
SEQUENCES: dict[str, dict[str, Any]] = {
    "sasrec": {"dropout": 0.2},
    "hstu": {"heads": 1, "temperature": None},
    "gru": {},
}
CLICK_MODELS: dict[str, tuple[sj.clicks.ClickModelConfig, Callable[[], Any]]] = {
    "fit_dlrm": (
        sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)),
        lambda: optimizers.adagrad(0.05),
    ),
    "fit_wide_deep": (
        sj.WideDeepConfig(dim=4, hidden=(4,), dtype="bfloat16"),
        lambda: optimizers.adam(0.01),
    ),
}
SCHEMA = sj.ClickSchema(
    "click",
    dense={
        "age": sj.data.DenseColumn(missing=30.0),
        "price": sj.data.DenseColumn(log1p=True, missing=0.0),
    },
    ids={
        "user": sj.data.HashedColumn(30),
        "tags": sj.data.HashedColumn(20),
        "item": sj.data.VocabularyColumn(min_count=2),
    },
)
RULES = ["sgd", "momentum", "nesterov", "adagrad", "rowwise_adagrad", "ftrl", "rmsprop"]
RULES += ["adadelta", "adam", "adamw", "lazy_adam"]
PREPARED = ["prepared", "prepared_last"]
CONFIGS = {
    "network.json": lambda: sj.NetworkConfig.autoencoder(
        (8, 4),
        activation="relu",
        loss="scaled_marginal_cross_entropy",
        dropout=0.25,
        temperature=0.1,
        tied=False,
        output_dtype="bfloat16",
        precision="high",
        linear=sj.nn.LinearConfig(rank=3),
    ),
    **{f"{name}.json": (lambda name=name: sequence_config(name)) for name in SEQUENCES},
    "dlrm.json": lambda: CLICK_MODELS["fit_dlrm"][0],
    "wide_deep.json": lambda: CLICK_MODELS["fit_wide_deep"][0],
    "dcn.json": lambda: sj.DCNConfig(cross=2, rank=5, hidden=(3,)),
    "deepfm.json": lambda: sj.DeepFMConfig(combiner="mean"),
    "din.json": lambda: sj.DINConfig(length=9, attention=(8,)),
    "tin.json": lambda: sj.TINConfig(beside=(("seen", "days"),)),
}


def sequence_config(name: str) -> sj.sequence.SequenceConfig:
    sizes = {"max_length": 6, "width": 8, "blocks": 1}
    return sj.sequence.SequenceConfig.from_json(
        {"version": 1, "model": name, **sizes, **SEQUENCES[name]}
    )


def write(folder: pathlib.Path) -> None:
    """Writes all files, and the values that are read from them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # a run names its data
    here = pathlib.Path()
    write_data(here)
    pathlib.Path("schema.json").write_text(json.dumps(SCHEMA.to_json(), indent=1))
    for name, config in CONFIGS.items():
        pathlib.Path(name).write_text(json.dumps(config().to_json(), indent=1) + "\n")
    write_plan(here)
    write_rules(here)
    found = read_files(here) | {"prepared": read_prepared(here)}
    for name in PREPARED:
        pack(name)
        remove(name)
    for name in COMMANDS:
        train(here, name, epochs=BEGUN)
        pack(name)
        found[name] = read_run(here, name)
        export_run(name)
        found[name]["continued"] = train(here, name, epochs=ENDED, resume=True)
        found[name]["ended"] = read_run(here, name)
        remove(name)
    for name in [*CLICK_MODELS, "fit_items"]:
        begun = fit(here, name, epochs=BEGUN)
        pack(name)
        found[name] = {"begun": begun}
        found[name]["continued"] = fit(here, name, epochs=ENDED, resume=True)
        remove(name)
    found["predictors"] = read_predictors(here)
    text = json.dumps(found, indent=None).replace("}, ", "},\n ")
    pathlib.Path("expected.json").write_text(text + "\n")


def write_data(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(7)
    popular = rng.random((USERS, ITEMS)) < np.linspace(0.5, 0.1, ITEMS)
    popular[3], popular[:, 5] = False, False  # an empty row, and an empty column
    matrix = scipy.sparse.csr_array(popular * rng.integers(1, 6, popular.shape) / 2)
    names: dict[str, Any] = {
        "row_names": [f"user {u}" for u in range(USERS)],
        "feature_names": [f"item {i}" if i % 7 else f"ítem {i}" for i in range(ITEMS)],
    }
    items = sj.SparseDataset.from_scipy(matrix, **names)
    items.save(folder / "items_valued.parquet")
    items.without_values().save(folder / "items_indicator.parquet")

    lengths = rng.integers(2, 9, USERS)
    indptr = np.append(0, np.cumsum(lengths))
    indices = rng.integers(0, ITEMS, indptr[-1])
    walked = np.arange(indptr[-1]) % 3 > 0  # mostly the item after the last one
    indices[1:] = np.where(walked[1:], (indices[:-1] + 1) % ITEMS, indices[1:])
    times = np.concatenate([np.sort(rng.integers(0, 10**6, n)) for n in lengths])
    history: list[Any] = [indptr, indices, names["row_names"], names["feature_names"]]
    sj.SequenceDataset(*history).save(folder / "histories.parquet")
    dates = times.astype("datetime64[us]")
    timed = sj.SequenceDataset(*history, times=dates)
    timed.save(folder / "histories_with_times.parquet")

    user, item = rng.integers(0, 25, CLICKS), rng.integers(0, 12, CLICKS)
    tags = [rng.integers(0, 9, n % 4).tolist() for n in range(CLICKS)]
    table = {
        "click": (rng.random(CLICKS) < np.where(user % 3, 0.2, 0.8)).astype(int),
        "age": [None if n % 9 == 0 else 20 + n % 50 for n in range(CLICKS)],
        "price": rng.integers(0, 100, CLICKS),
        "user": [f"u{u}" for u in user],
        "tags": tags,
        "item": [f"i{i}" for i in item],
    }
    pd.DataFrame(table).to_parquet(folder / "clicks_table.parquet", index=False)
    clicks = sj.read_clicks(folder / "clicks_table.parquet", SCHEMA)
    clicks.save(folder / "clicks.parquet")

    rows = np.repeat(np.arange(USERS), lengths)
    events = pd.DataFrame(
        {
            "user": np.array(names["row_names"])[rows],
            "item": np.array(names["feature_names"])[indices],
            "value": rng.integers(1, 5, len(rows)) / 4,
            "time": dates,
        }
    )
    columns = {"user": "user", "item": "item", "value": "value"}
    sj.prepare(events, folder / "prepared", split_fraction=0.7, **columns)
    del columns["value"]
    sj.prepare(
        events, folder / "prepared_last", time="time", split_last=1, indicator=True,
        min_item=2, **columns,
    )  # fmt: skip


def write_plan(folder: pathlib.Path) -> None:
    tables, features = tables_and_features()
    sizes: dict[str, Any] = {"batch_size": 64, "data": 2, "model": 2, "memory": 10**9}
    planned = sj.plan_embeddings(
        tables, features, rule=optimizers.adagrad(0.1), **sizes
    )
    (folder / "plan.json").write_text(json.dumps(planned.to_json()) + "\n")
    model = click_model("fit_dlrm", sj.ClickDataset.load(folder / "clicks.parquet"))
    [embeddings] = [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, sj.embeddings.EmbeddingCollection)
    ]
    embeddings.save_table("user", folder / "table.npy")
    names = [f"tag {n}" for n in range(20)]
    embeddings.save_table("tags", folder / "table.parquet", names=names)


def tables_and_features() -> tuple[
    dict[str, sj.embeddings.TableConfig], dict[str, str]
]:
    tables = {
        "small": sj.embeddings.TableConfig(100, 8),
        "large": sj.embeddings.TableConfig(10**6, 8),
    }
    return tables, {"a": "small", "b": "large", "c": "large"}


def write_rules(folder: pathlib.Path) -> None:
    """Writes rules and schedules as JSON, in the form in which runs store them."""
    rate = optimizers.schedule("cosine_decay_schedule", init_value=0.1, decay_steps=9)
    rules = [optimizers.get(name, learning_rate=0.1) for name in RULES]
    rules += [optimizers.adamw(rate, b2=0.98), optimizers.sgd(rate, weight_decay=0.1)]
    documents = [optimizers.to_json(rule) for rule in rules]
    (folder / "rules.json").write_text(json.dumps(documents, indent=1) + "\n")


def pack(name: str) -> None:
    """Packs a folder into one file."""
    with zipfile.ZipFile(f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(pathlib.Path(name).rglob("*")):
            if path.is_file() and path.name != ".lock":
                # Orbax's notes of success name the folder on this machine.
                here = os.fspath(pathlib.Path.cwd()).encode()
                packed.writestr(str(path), path.read_bytes().replace(here, b"."))


def unpack(folder: pathlib.Path, name: str, into: pathlib.Path) -> pathlib.Path:
    """Unpacks a file of `folder`; returns the unpacked folder."""
    with zipfile.ZipFile(folder / f"{name}.zip") as packed:
        packed.extractall(into)
    return into / name


def remove(name: str) -> None:
    for path in sorted(pathlib.Path(name).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    pathlib.Path(name).rmdir()


def train(
    folder: pathlib.Path, name: str, *, epochs: int, resume: bool = False
) -> list[dict[str, float]]:
    """Runs `sparsejax train` in a folder; returns what it reports for each epoch."""
    data, options = COMMANDS[name]
    said = io.StringIO()
    arguments = [
        "train",
        data,
        "--run",
        name,
        *QUICK,
        *options,
        "--epochs",
        str(epochs),
    ]
    with contextlib.chdir(folder), contextlib.redirect_stderr(said):
        status = main([*arguments, *(["--resume"] if resume else [])])
    if status:
        raise RuntimeError(said.getvalue())
    lines = re.findall(
        r"^epoch (\d+)/\d+  loss (\S+) (.*)$", said.getvalue(), re.MULTILINE
    )
    metrics = [re.findall(r"(\w+@\d+|auc) (\S+)", rest) for *_, rest in lines]
    return [
        {"epoch": int(epoch), "loss": float(loss)} | {n: float(v) for n, v in measured}
        for (epoch, loss, _), measured in zip(lines, metrics, strict=True)
    ]


def read_run(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The recommendations of a run's model, or its probabilities of clicks."""
    model, names = sj.load_model(folder / name)
    if name in CLICKED:
        table = folder / COMMANDS[name][0]
        data = sj.read_clicks(table, names.schema, features=names)
        scores = sj.predict(model, data)[: 2 * SHOWN]
        vocabularies = {n: v.tolist() for n, v in names.vocabularies.items()}
        return {"clicks": scores.astype(float).tolist(), "vocabulary": vocabularies}
    data = data_of(folder, name)
    return lists(sj.recommend(model, data, k=K, exclude=None)) | {
        "vocabulary": names.tolist()
    }


def data_of(folder: pathlib.Path, name: str) -> Any:
    path = folder / COMMANDS[name][0]
    kind = sj.SparseDataset if path.name.startswith("items") else sj.SequenceDataset
    return kind.load(path)


def lists(found: sj.Recommendations) -> dict[str, Any]:
    scores = found.scores[:SHOWN].astype(float)
    return {"ids": found.ids[:SHOWN].tolist(), "scores": scores.tolist()}


def export_run(name: str) -> None:
    """Exports the predictors of some runs."""
    if name in ("run_float32", "run_sasrec"):
        model, names = sj.load_model(name)
        sj.export_predictor(model, f"{name}.predictor", k=K, names=names, batch_size=8)


def click_model(name: str, clicks: sj.ClickDataset) -> Any:
    sizes = {"num_dense": 2, "features": clicks.num_ids}
    return sj.clicks.build_click_model(CLICK_MODELS[name][0], **sizes, rngs=nnx.Rngs(3))


def fit(
    folder: pathlib.Path, name: str, *, epochs: int, resume: bool = False
) -> dict[str, Any]:
    """`fit` with a folder of checkpoints; writes the predictor of the first training."""
    if name == "fit_items":
        data: Any = sj.SparseDataset.load(folder / "items_indicator.parquet")
        network = sj.NetworkConfig.autoencoder((4,), activation="relu")
        sizes = {"inputs": ITEMS, "outputs": ITEMS}
        model: Any = sj.FeedForward(network, **sizes, rngs=nnx.Rngs(1))
        rule: Any = optimizers.adamw(0.02)
    else:
        data = sj.ClickDataset.load(folder / "clicks.parquet")
        model, rule = click_model(name, data), CLICK_MODELS[name][1]()
    history = sj.fit(
        model,
        sj.Optimizer(model, rule),
        data,
        batch_size=16,
        num_epochs=epochs,
        seed=5,
        deterministic=True,
        checkpoint_dir=folder / name,
        checkpoint_seconds=1000,
        resume=resume,
    )
    found: dict[str, Any] = {"losses": [entry["loss"] for entry in history]}
    if isinstance(data, sj.SparseDataset):
        return found | lists(sj.recommend(model, data, k=K, exclude=None))
    if name == "fit_dlrm" and not resume:
        sj.export_predictor(
            model, folder / "fit_dlrm.predictor", names=data, batch_size=8
        )
        sj.export_predictor(
            model, folder / "fit_dlrm_int8.predictor", table_dtype="int8", batch_size=8
        )
    scores = sj.predict(model, data)[: 2 * SHOWN]
    return found | {"clicks": scores.astype(float).tolist()}


def read_files(folder: pathlib.Path) -> dict[str, Any]:
    """The content of data sets, plans, tables and configurations."""
    found: dict[str, Any] = {}
    for name in ("items_indicator", "items_valued"):
        data = sj.SparseDataset.load(folder / f"{name}.parquet")
        found[name] = items(data)
    for name in ("histories", "histories_with_times"):
        found[name] = histories(sj.SequenceDataset.load(folder / f"{name}.parquet"))
    found["clicks"] = clicks(sj.ClickDataset.load(folder / "clicks.parquet"))
    table = folder / "clicks_table.parquet"
    found["clicks_table"] = clicks(sj.read_clicks(table, SCHEMA))
    tables, _ = tables_and_features()
    planned = sj.embeddings.EmbeddingPlan.from_json(
        json.loads((folder / "plan.json").read_text())
    )
    placements = planned.placements(tables)
    found["plan"] = plain(planned) | {name: plain(p) for name, p in placements.items()}
    configs = {name: read_config(folder / name) for name in CONFIGS}
    found["configs"] = {name: plain(config) for name, config in configs.items()}
    documents = json.loads((folder / "rules.json").read_text())
    found["rules"] = [plain(optimizers.from_json(document)) for document in documents]
    table = pd.read_parquet(folder / "table.parquet")
    found["tables"] = {
        "npy": np.load(folder / "table.npy")[:3].astype(float).tolist(),
        "parquet": [[*table.columns], table["name"].tolist()],
        "row": np.array(table["row"].tolist())[:3].astype(float).tolist(),
    }
    return found


def plain(value: Any) -> dict[str, Any]:
    """Converts a dataclass, and the dataclasses in it, to dicts."""
    return {"type": type(value).__name__, **dataclasses.asdict(value)}


def read_config(path: pathlib.Path) -> Any:
    document = json.loads(path.read_text())
    if path.name == "network.json":
        return sj.NetworkConfig.load(path)
    is_sequence = path.stem in SEQUENCES
    kind = sj.sequence.SequenceConfig if is_sequence else sj.clicks.ClickModelConfig
    return kind.from_json(document)


def read_prepared(folder: pathlib.Path) -> dict[str, Any]:
    """The content of prepared folders, which are unpacked in `folder`."""
    found: dict[str, Any] = {}
    for name in PREPARED:
        scanned = sj.data.scan_parquet(folder / name)
        train, test = sj.read(folder / name), sj.read(folder / name / "test")
        found[name] = {"train": items(train), "test": items(test)}
        found[name]["scanned"] = [scanned.num_rows, scanned.feature_names.tolist()]
    return found


def items(data: sj.SparseDataset) -> dict[str, Any]:
    matrix = data.to_scipy()
    values = None if data.matrix.data is None else matrix.data.astype(float).tolist()
    names = {"rows": data.row_names.tolist(), "features": data.feature_names.tolist()}
    return names | {
        "indptr": matrix.indptr.tolist(),
        "indices": matrix.indices.tolist(),
        "values": values,
    }


def histories(data: sj.SequenceDataset) -> dict[str, Any]:
    times = None if data.times is None else data.times.astype(np.int64).tolist()
    return {
        "indptr": data.indptr.tolist(),
        "indices": data.indices.tolist(),
        "times": times,
        "rows": data.row_names.tolist(),
        "features": data.feature_names.tolist(),
    }


def clicks(data: sj.ClickDataset) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for name, found in data.ids.items():
        is_plain = isinstance(found, np.ndarray)
        ids[name] = (
            found.tolist()
            if is_plain
            else [np.asarray(found.indptr).tolist(), np.asarray(found.indices).tolist()]
        )
    return {
        "labels": data.labels.astype(int).tolist(),
        "dense": data.dense.astype(float).tolist(),
        "ids": ids,
        "num_ids": data.num_ids,
        "schema": data.schema.to_json(),
        "vocabularies": {n: v.tolist() for n, v in data.vocabularies.items()},
    }


def read_predictors(folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("run_float32", "run_sasrec"):
        predictor = sj.load_predictor(folder / f"{name}.predictor")
        few = data_of(folder, name)
        named = predictor.recommend_names([["item 1", "item 2", "item 3"], []], k=3)
        found[name] = lists(predictor.recommend(few)) | {"names": named}
    data = sj.ClickDataset.load(folder / "clicks.parquet").rows(slice(0, 2 * SHOWN))
    for name in ("fit_dlrm", "fit_dlrm_int8"):
        clicked = sj.load_predictor(folder / f"{name}.predictor")
        found[name] = {"clicks": clicked.predict(data).astype(float).tolist()}
    records = {"age": [31, None], "price": [3, 5], "user": ["u1", "u99"]}
    records |= {"tags": [[1, 2], []], "item": ["i3", "unseen"]}
    clicked = sj.load_predictor(folder / "fit_dlrm.predictor")
    found["records"] = {
        "clicks": clicked.predict_records(records).astype(float).tolist()
    }
    return found


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]).resolve())
