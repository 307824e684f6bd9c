"""The examples run, on little data or for an epoch."""

import importlib.util
import pathlib
import re
import socket
import sys
import types
import warnings
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest

import sparsejax as sj

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
CUTS = {"tr": (0, 4), "te": (4, 60)}
FILMS = [f"Film {i}: the {i} | rest" for i in range(12)]


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name[3:], EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("symbolic_sizes")
def test_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example("01_quickstart").main(num_epochs=1)
    assert re.search(
        r"epoch 1: loss \d+\.\d+, ndcg@20 0\.\d+\n", capsys.readouterr().out
    )
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"report.html", "model.predictor", "monday"}


def ratings() -> list[tuple[int, int, float]]:
    """Even users like even films; each has rated some others, and badly."""
    rng = np.random.default_rng(0)
    return [
        (user, film, 4.5 if user % 2 == film % 2 else rng.choice([1, 3.5]))
        for user in range(1, 41)
        for film in range(1, 13)
        if user % 2 == film % 2 or rng.random() < 0.3
    ] + [(99, 1, 5.0), (99, 2, 5.0)]  # too few likes


def write_movielens(folder: pathlib.Path, form: str) -> None:
    match form:
        case "csv":
            lines = ["userId,movieId,rating,timestamp"]
            lines += [f"{u},{f},{r},9" for u, f, r in ratings()]
            titles = ["movieId,title,genres"]
            titles += [f'{i},"{film}",Drama' for i, film in enumerate(FILMS, 1)]
            names = ("ratings.csv", "movies.csv")
        case "dat":
            lines = [f"{u}::{f}::{r:g}::9" for u, f, r in ratings()]
            titles = [f"{i}::{film}::Drama|War" for i, film in enumerate(FILMS, 1)]
            names = ("ratings.dat", "movies.dat")
        case _:
            lines = [f"{u}\t{f}\t{r:g}\t9" for u, f, r in ratings()]
            films = [film.replace("|", "é") for film in FILMS]
            titles = [f"{i}|{film}|01-Jan-1995||" for i, film in enumerate(films, 1)]
            names = ("u.data", "u.item")
    (folder / names[0]).write_text("\n".join(lines) + "\n")
    encoding = "utf-8" if form == "csv" else "latin-1"
    (folder / names[1]).write_text("\n".join(titles) + "\n", encoding=encoding)


@pytest.mark.parametrize("form", ["csv", "dat", "u.data"])
def test_movielens(tmp_path, capsys, form):
    write_movielens(tmp_path, form)
    module = example("02_movielens")
    data = module.likes(module.read_ratings(tmp_path))
    # Of the films that a user rated, those with 4 and more.
    assert data.num_rows == 40 and data.num_entries == 40 * 6
    parities = {
        (int(user) + int(film)) % 2
        for user, features in zip(
            data.row_names, data.to_scipy().tolil().rows, strict=True
        )
        for film in data.feature_names[features]
    }
    assert parities == {0}
    titles = module.read_titles(tmp_path)
    assert titles["3"] == FILMS[2].replace("|", "é" if form == "u.data" else "|")
    if form == "dat":  # the same from here on
        module.main(tmp_path, hidden=8, num_epochs=2)
        printed = capsys.readouterr().out
        assert re.search(r"ndcg@20: \d\.\d+, of mere popularity \d\.\d+\n", printed)
        assert printed.count("  Film ") == 5


def test_own_flax_loop(capsys):
    reached = example("03_own_flax_loop").main(num_epochs=1)
    assert reached["rows"] == pytest.approx(reached["dense"], abs=2e-3)
    assert "popularity" in capsys.readouterr().out


def test_clicks(capsys):
    module, settings = example("04_clicks"), {"rows": 4000, "num_epochs": 3}
    by_fit = module.main(kind="wide_deep", **settings)
    by_loop = module.main(kind="wide_deep", **settings, loop=True)
    assert by_loop == pytest.approx(by_fit, abs=1e-5)
    assert 0.6 < by_fit["test"] < by_fit["planted"]
    printed = capsys.readouterr().out
    assert printed.count("epoch 3: loss") == printed.count("digest") == 2


def test_ids_that_come_and_go(capsys):
    reached = example("11_ids_that_come_and_go").main(num_days=4, rows=4096)
    assert reached["dynamic"][-1] > 0.6
    assert "day 3:" in capsys.readouterr().out


def test_two_towers(capsys):
    reached = example("07_two_towers").main(num_epochs=5)
    assert reached["recall"] > reached["popularity"]
    assert reached["new"] > 20 / 300  # what chance finds
    assert "of the recommendations are such items" in capsys.readouterr().out


def test_own_transformer(capsys):
    reached = example("05_own_transformer").main(num_epochs=2)
    assert reached["last"] < reached["first"] - 0.5
    assert reached["recall"] > reached["popularity"]
    assert "of mere popularity" in capsys.readouterr().out


def test_sasrec(monkeypatch, capsys):
    module = example("09_sasrec")
    monkeypatch.setattr(module, "USERS", 500)
    monkeypatch.setattr(module, "ITEMS", 100)
    reached = module.main(num_epochs=8)
    assert reached["recall"] > 2.5 * reached["popularity"]
    assert "of popularity" in capsys.readouterr().out


def test_item_features(monkeypatch, capsys):
    module = example("12_item_features")
    monkeypatch.setattr(module, "USERS", 600)
    module.main(num_epochs=30)
    said = capsys.readouterr().out
    found = re.search(r"(\d+) of 600 users are recommended a product without", said)
    assert found is not None and int(found[1]) > 0
    found = re.search(r"it is number (\d+)\n", said)
    assert found is not None and int(found[1]) <= 30


def test_own_loop_at_full_speed(capsys):
    losses = example("08_own_loop_at_full_speed").main(num_epochs=2)
    train, _ = sj.datasets.msweb().train.split(0.8, seed=0)
    config = sj.NetworkConfig.autoencoder(hidden=(64,))
    model, optimizer = sj.build(config, train, sj.optimizers.adam(1e-3))
    history = sj.fit(model, optimizer, train, batch_size=512, num_epochs=2)
    assert losses == [entry["loss"] for entry in history]
    assert "ndcg@20 0." in capsys.readouterr().out


def test_serve(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    example("10_serve").main(num_epochs=1, port=port)
    shown = re.findall(
        r"^(.*): \['/.*', '/.*', '/.*'\]$", capfd.readouterr().out, re.MULTILINE
    )
    assert shown == ["recommended", "to somebody new"]


def test_the_docs_name_each_example_program():
    pages = [EXAMPLES.parent / "README.md", *(EXAMPLES.parent / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    for path in EXAMPLES.glob("*.py"):
        assert path.name in text


def test_published_tables(tmp_path, monkeypatch, capsys):
    """On files of Mult-VAE's protocol, beside a stand-in for implicit 0.7."""

    class Als:
        def __init__(self, *, factors, iterations, random_state, regularization, alpha):
            self.good = regularization == 1.0 and alpha == 5.0

        def fit(self, user_items, show_progress):
            self.num_items = user_items.shape[1]

        def recommend(self, userid, user_items, N, recalculate_user):
            # Items of the user's parity that it does not have, if the settings are good.
            names = np.array([int(name) for name in data.train.feature_names])
            parity = names[user_items.indices[user_items.indptr[:-1]]] % 2
            scores = (names[None] % 2 == parity[:, None]) == self.good
            scores = scores - 9.0 * (user_items.toarray() > 0)
            assert recalculate_user and len(userid) == len(scores)
            return np.argsort(-scores, axis=1, kind="stable")[:, :N], None

    monkeypatch.setitem(sys.modules, "implicit", types.ModuleType("implicit"))
    als = types.SimpleNamespace(AlternatingLeastSquares=Als)
    monkeypatch.setitem(sys.modules, "implicit.als", als)
    users = {"train": range(60), "validation": range(60, 64), "test": range(64, 74)}
    parts = {"train": (0, 60)}
    parts |= {f"{n}_{p}": c for n in ("validation", "test") for p, c in CUTS.items()}
    for part, (start, end) in parts.items():
        pairs = [
            f"{user},{2 * i + user % 2}"
            for user in users[part.partition("_")[0]]
            for i in range(start, end)
        ]
        (tmp_path / f"{part}.csv").write_text("\n".join(["uid,sid", *pairs]))
    data = sj.data.read_vae_cf(tmp_path)
    module = example("06_published_tables")
    # Each number of neighbours is another program, so of ours few settings are tried.
    few = {
        label: (run, settings if label == "iALS" else settings[:2])
        for label, (run, settings) in module.baselines().items()
    }
    monkeypatch.setattr(module, "baselines", lambda: few)
    results = module.main("ml-20m", tmp_path, seeds=2)
    printed = capsys.readouterr().out
    metric = "truncated_recall@20"
    assert results["EASE here"][0][0][metric] == results["iALS"][0][0][metric] == 1
    assert len(results["sparsejax"]) == 2 and len(results["EASE here"]) == 1
    assert "iALS: {'regularization': 1.0, 'alpha': 5.0}" in printed
    row = next(line for line in printed.splitlines() if line.startswith("VASP"))
    assert row.split() == ["VASP", "0.4140", "0.5520", "0.4480"]
    row = next(line for line in printed.splitlines() if line.startswith("sparsejax"))
    mean = np.mean([found[metric] for found, _ in results["sparsejax"]])
    assert row.split()[1] == f"{mean:.4f}" and row.count("±") == 6


@pytest.mark.parametrize("name", ["items", "histories", "clicks"])
def test_notebooks(name, tmp_path):
    """They run, and print what the pages show, with other digits and names of items."""
    notebook: Any = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", 4)
    shown = printed(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    with warnings.catch_warnings():
        # The client and its kernel are on one machine.
        warnings.filterwarnings("ignore", message=".*without encryption")
        nbclient.NotebookClient(notebook, timeout=300, resources=folder).execute()
    assert printed(notebook) == shown


def printed(notebook: Any) -> str:
    """What cells have printed, without digits and names of items."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    texts = [output["text"] for output in outputs if output.get("name") == "stdout"]
    return re.sub(r"\d+|'/\w+'", "0", "".join(texts))
