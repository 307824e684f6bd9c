"""Runs the code that the pages show, and checks that the API page lists every public name."""

import ast
import contextlib
import dataclasses
import inspect
import json
import operator
import pathlib
import re
import shlex
import sys
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import public_api
import pyarrow.csv
import pytest
import scipy.sparse
from flax import nnx
from test_readme import blocks

import sparsejax as sj
from sparsejax import losses
from sparsejax.cli import flags
from sparsejax.cli import main as cli
from sparsejax.data.files import columns
from sparsejax.kinds.clicks.defaults import ClickDefaults
from sparsejax.kinds.clicks.kind import Clicks
from sparsejax.optimizers import rules

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.fixture
def trained(tmp_path, monkeypatch) -> dict:
    """What the pages take as given; files go to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    names = ["/products", "/support", *"abcdefgh"]
    rng = np.random.default_rng(0)
    data = sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(rng.random((60, 10)) < 0.4), feature_names=names
    )
    train, heldout = data.split(0.7, seed=0)
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=10, outputs=10, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    given = {"sj": sj, "model": model, "optimizer": optimizer, "names": names}
    return given | {"data": data, "visits": data, "train": train, "heldout": heldout}


def python(page: str) -> list[str]:
    return blocks((DOCS / page).read_text(encoding="utf-8"), "python")


def quick(page: str) -> list[str]:
    """Replaces the rule in a page by Adagrad, whose programs compile in half the time of
    Adam's.
    """
    return [
        code.replace("sj.optimizers.adam(", "sj.optimizers.adagrad(")
        for code in python(page)
    ]


@pytest.fixture
def quick_rules(monkeypatch):
    """Also where a page and its commands leave the rule of a click model to us."""
    defaults = dataclasses.replace(
        Clicks.defaults, optimizer="adagrad", learning_rate=0.1
    )
    monkeypatch.setattr(Clicks, "defaults", defaults)
    usual = ClickDefaults.for_data

    def for_data(self, data, **options):  # Adagrad has no weight decay
        return dataclasses.replace(usual(self, data, **options), options={})

    monkeypatch.setattr(ClickDefaults, "for_data", for_data)


PACKAGES = {
    "clicks",
    "data",
    "embeddings",
    "mesh",
    "nn",
    "optimizers",
    "sequence",
    "training",
}


def test_the_api_lists_every_public_name():
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r":: (?:sparsejax\.)?([\w.]+)", pages))
    known = {sj.optimizers.get(name, learning_rate=0.1) for name in rules.NAMES}
    wanted = {type(rule).__name__ for rule in known} | {"losses", "metrics"}
    wanted |= {f"baselines.{name}" for name in ("popularity", "item_knn", "ease")}
    for module in (losses, sj.metrics):
        area = module.__name__.removeprefix("sparsejax.")
        wanted |= {f"{area}.{name}" for name in public_api.public_names(module)}
    wanted |= set(dir(sj)) - {"baselines", "datasets", "dsstne", "spark"} - PACKAGES
    for package in sorted(PACKAGES):
        names = public_api.public_names(getattr(sj, package)) - {"datasets"}
        found = listed | {name.rpartition(".")[2] for name in listed}
        assert not names - found, package
    assert not wanted - listed


def test_the_softmax_over_many_classes():
    dense, ours, *rest = python("many_classes.md")
    given: dict = {"sj": sj, "jnp": jnp, "optax": optax, "nnx": nnx, "np": np}
    given["jax"] = jax
    h = jax.random.normal(jax.random.key(0), (2, 5, 64))
    kernel = jax.random.normal(jax.random.key(1), (1000, 64)) / 8
    targets = jnp.arange(10).reshape(2, 5) * 99
    values = []
    for block in (dense, ours):
        exec(block, given)  # noqa: S102
        values.append(jax.value_and_grad(given["loss"], (0, 1))(h, kernel, targets))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *values
    )
    given |= {"h": h, "kernel": kernel, "targets": targets}
    for block in rest:
        exec(block, given)  # noqa: S102
    assert given["packed"].shape == (4096, 64)
    np.testing.assert_allclose(given["mean"], values[0][0], rtol=1e-5)
    assert given["ids"].shape == (10, 10) and given["total"] > 0
    assert isinstance(given["gradients"]["kernel"][...], sj.optimizers.RowGradient)


def test_what_the_quickstart_shows_calls_what_it_defines():
    page = (DOCS / "quickstart.md").read_text()
    shown = re.search(r"```\{literalinclude\} (\S+)\n:start-at: (.*)\n```", page)
    assert shown is not None
    example, start = shown.groups()
    code = (DOCS / example).read_text().partition(start)[2]
    assert code.rstrip().endswith('if __name__ == "__main__":\n    main()')


@pytest.mark.usefixtures("symbolic_sizes")
def test_deployment(trained, tmp_path):
    pathlib.Path("clicks.csv").write_text("click,price,user\n1,2,ann\n0,1,bob\n")
    price, user = sj.data.DenseColumn(), sj.data.VocabularyColumn()
    schema = sj.ClickSchema("click", {"price": price}, {"user": user})
    clicks = sj.read_clicks("clicks.csv", schema)
    config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
    sizes = {"num_dense": 1, "features": clicks.num_ids}
    model = sj.clicks.DLRM(config, **sizes, rngs=nnx.Rngs(0))
    trained |= {"train_clicks": clicks, "clicks_model": model}
    for code in python("deployment.md"):
        exec(compile(code, "deployment.md", "exec"), trained)  # noqa: S102
    assert trained["found"].ids.shape == (60, 10)
    assert trained["ids"].shape == (1, 10)
    assert trained["users"].shape == (60, 4)
    assert trained["click_predictor"].num_dense == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "clicks.csv",
        "clicks.predictor",
        "items.parquet",
        "model.predictor",
    ]


def test_several_inputs(trained):
    train, rng = trained["train"], np.random.default_rng(0)
    names = train.row_names[::-1]
    some = trained["data"].align_rows(names[:9])
    given = {"profiles": rng.normal(size=(60, 3)), "profile_names": names}
    trained |= given | {"searches": some, "nnx": nnx, "jnp": jnp}
    first, rows, model, use = python("several_inputs.md")
    for code in (model, first, rows, use):
        exec(compile(code, "several_inputs.md", "exec"), trained)  # noqa: S102
    assert trained["searches_of_all"].num_entries == some.num_entries
    assert "recall@20" in trained["measured"] and len(trained["found"]) == 60


def test_embedding_collections():
    """With smaller tables, on a mesh."""
    page = (DOCS / "embeddings.md").read_text(encoding="utf-8")
    section = page.partition("## Embedding collections")[2]
    section += (DOCS / "embeddings_mesh.md").read_text(encoding="utf-8")
    section = section.replace("10_000_000", "2_000").replace("40_000_000", "500")
    rng, batch = np.random.default_rng(0), 8
    given: dict[str, typing.Any] = {
        "dense": rng.normal(size=(batch, 13)).astype(np.float32),
        "click": rng.integers(0, 2, batch).astype(np.float32),
        "user": rng.integers(-1, 500, batch).astype(np.int32),
        "item": rng.integers(-1, 2000, (batch, 1)).astype(np.int32),
        "recent": rng.integers(-1, 2000, (batch, 20)).astype(np.int32),
        "liked": sj.CSR.from_scipy(
            scipy.sparse.random_array((batch, 2000), density=0.001, rng=rng)
        ),
    }
    for code in blocks(section, "python"):
        exec(compile(code, "embeddings.md", "exec"), given)  # noqa: S102
    assert int(given["optimizer"].step[...]) == 1
    rows = given["model"].embeddings(given["ids"])
    assert rows["recent"].shape == (batch, 20, 64)


def test_dynamic_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given: dict[str, typing.Any] = {}
    for page in ("", "_changes", "_reference"):
        for code in quick(name := f"dynamic_tables{page}.md"):
            exec(compile(code, name, "exec"), given)  # noqa: S102
    stats = given["model"].embeddings.stats()
    assert stats["user"].rows > 4000 and stats["user"].refused == 0
    assert stats["query"].waiting > 7000  # all of them are seen once
    assert capsys.readouterr().out.count("TableStats(") == 3


def test_host_tables():
    given: dict[str, typing.Any] = {}
    for code in quick("host_tables.md"):
        exec(compile(code, "host_tables.md", "exec"), given)  # noqa: S102
    assert np.isfinite(given["loss"])
    assert given["model"].embeddings.kernels["16_float32_host"].shape[0] < 60_000


def test_your_data(tmp_path, monkeypatch, capsys):
    """What the page says is printed, and it lists the names that are known."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "your_data.md").read_text()
    orders, kauf = "orders.csv", "kauf.csv"
    for block in blocks(page, ""):
        if block.startswith("sparsejax convert"):
            cli.main(shlex.split(block)[1:])
        elif block.startswith(("customer,", "kunde,")):
            name = orders if block.startswith("customer,") else kauf
            pathlib.Path(name).write_text(block)
        else:
            assert capsys.readouterr().err == block
    assert capsys.readouterr().err == ""
    [code] = python("your_data.md")
    given: dict[str, typing.Any] = {}
    exec(compile(code, "your_data.md", "exec"), given)  # noqa: S102
    assert given["run"].recommend(["bob"], k=1).names() == [["milk"]]
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) \|$", page, flags=re.MULTILINE)
    listed = {role: tuple(names.split(", ")) for role, names in rows}
    assert {role: listed[role] for role in columns.SYNONYMS} == columns.SYNONYMS


@pytest.mark.usefixtures("quick_rules")
def test_clicks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [
        f"{i % 3 % 2},{i % 3 % 2 + i / 600},u{i % 5},i{i % 4},{i}\n" for i in range(300)
    ]
    for name in ("train.csv", "valid.csv", "test.csv"):
        pathlib.Path(name).write_text("click,price,user,item,day\n" + "".join(lines))
    given: dict = {}
    pages = [f"{name}.md" for name in ("clicks", "click_metrics", "click_histories")]
    for code in [code for page in pages for code in quick(page)]:
        code = code.replace("1_000_000", "1_000").replace("(5e-4)", "(0.1)")
        exec(compile(code, "clicks", "exec"), given)  # noqa: S102
    assert capsys.readouterr().out == (
        "ClickDataset(300 examples, 33.3 % clicks, 1 dense, 2 features)\n1.0\n"
    )
    assert given["train"].num_rows == 270 and given["train"].num_ids["item"] == 6
    assert 0.9 < given["found"].auc < 0.95
    assert given["probabilities"].shape == (300,) and "group_auc" in given["measured"]

    pathlib.Path("schema.json").write_text(json.dumps(given["schema"].to_json()))
    for line in "\n".join((DOCS / name).read_text() for name in pages).split("\n"):
        if line.startswith("sparsejax "):
            line = line.replace("--trials 2", "--trials 1")
            assert cli.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert np.load("probabilities.npy").shape == (300,)


def test_several_labels():
    given: dict[str, typing.Any] = {}
    for code in quick("several_labels.md"):
        exec(compile(code, "several_labels.md", "exec"), given)  # noqa: S102
    assert given["weighted"] != given["plain"]
    assert {"auc/click", "log_loss/buy", "squared_error/minutes"} <= {
        *given["measured"]
    }
    assert list(given["predicted"]) == ["click", "buy", "minutes"]
    np.testing.assert_allclose(given["train"].trained_labels[:2], [1, 0])


def test_sequences(trained, symbolic_sizes):
    """Of ten users, one has a single purchase."""
    lines = ["user,item,date"]
    for u in range(10):
        lines += [f"u{u},i{(u + i) % 7},2024-05-{30 - i}" for i in range(u + 1)]
    pathlib.Path("purchases.csv").write_text("\n".join(lines))
    trained |= {"optax": optax, "nnx": nnx, "np": np, "jnp": jnp}
    pages = "sequence_events", "sequence_events_use", "sequences", "sequence_models"
    for page in [f"{name}.md" for name in pages]:
        for code in quick(page):
            code = code.replace("width=64", "width=64, blocks=1")
            code = code.replace("recipe.rule)", "sj.optimizers.sgd(0.1))")
            exec(compile(code, page, "exec"), trained)  # noqa: S102
    assert (
        trained["heldout"].num_entries == 9 and trained["validation"].num_entries == 8
    )
    assert len(trained["history"]) <= 5 and trained["measured"]["users"] == 9
    assert len(trained["names"][0]) == 7 and trained["fresh"].ids[9].max() == -1
    assert trained["loss"] > 0 and len(trained["next_names"]) == 2
    assert trained["model"].config.width == 64 and trained["recipe"].num_epochs == 300
    np.testing.assert_array_equal(trained["some"], trained["heldout"].padded(50))


def test_splits(trained, capsys):
    """Forty users, of whom two and two items come after May."""
    dates = np.array(["2024-05-01", "2024-05-20", "2024-06-01", "2024-06-30"])
    lines = ["user,item,date"]
    for u in range(40):
        for i, date in zip(range(u, u + 5), dates[[0, 0, 0, 1, 2]], strict=True):
            late = u < 2 or i % 10 > 7
            lines.append(f"u{u},i{i % 10},{dates[3] if late else date}")
    pathlib.Path("purchases.csv").write_text("\n".join(lines))
    page = (DOCS / "splits.md").read_text()
    fences = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    first, output, again, commands, more = fences
    exec(compile(first, "splits.md", "exec"), trained)  # noqa: S102
    assert capsys.readouterr().out == output
    exec(compile(again, "splits.md", "exec"), trained)  # noqa: S102
    assert trained["validation"].num_entries > 30
    for line in (commands + more).splitlines():
        assert cli.main(shlex.split(line)[1:]) == 0
    assert "popularity_ndcg@20" in capsys.readouterr().out


def test_dsstne(trained):
    """The script of the page runs, and then its Python."""
    lines = [f"u{u}\t" + ":".join(f"i{i}" for i in range(u % 5, 9)) for u in range(30)]
    pathlib.Path("ratings").write_text("\n".join(lines) + "\n")
    layers = [
        {"Name": "Input", "N": "auto", "DataSet": "gl_input"},
        {"Name": "Hidden", "N": 4},
        {"Name": "Output", "N": "auto", "DataSet": "gl_output"},
    ]
    pathlib.Path("config.json").write_text(json.dumps({"Layers": layers}))
    page = (DOCS / "dsstne.md").read_text()
    _, script, pairs = blocks(page, "")
    for line in script.splitlines():
        assert cli.main(shlex.split(line)[1:]) == 0
    assert len(pathlib.Path("recs").read_text().splitlines()) == 30
    *first, search = python("dsstne.md")
    for code in first:
        exec(compile(code, "dsstne.md", "exec"), trained)  # noqa: S102
    assert trained["hidden"].shape == (30, 4) and len(trained["history"]) == 2

    # A query has a word of the product that is right for it, and one of all products.
    [config] = blocks(page, "json")
    pathlib.Path("search.json").write_text(config)
    products, queries = (np.zeros((7, 15), bool) for _ in range(2))
    for i in range(7):
        products[i, [2 * i, 2 * i + 1, 14]] = queries[i, [2 * i, 14]] = True
    left, right = np.divmod(np.arange(49), 7)
    share = (left == right).astype(np.float32)[:, None]
    words, products_of_pairs, once, each, target = (
        sj.SparseDataset.from_scipy(scipy.sparse.csr_array(rows))
        for rows in (queries[left], products[right], queries, products, np.eye(7) > 0)
    )
    of_pairs = {"query": words, "asin": products_of_pairs, "target_share": share}
    sj.dsstne.write_datasets("pairs.nc", of_pairs)
    sj.dsstne.write_datasets("eval.nc", {"query": once, "asin": each, "target": target})
    assert cli.main(shlex.split(pairs)[1:]) == 0
    exec(compile(search, "dsstne.md", "exec"), trained)  # noqa: S102
    np.testing.assert_allclose(trained["mrr"], 1)


def public_names() -> dict[str, set[str]]:
    """The names that users can write, with the arguments that each accepts; for classes also their
    members.
    """
    rules = [rule for rule in vars(losses).values() if hasattr(rule, "name")]
    found: dict[str, set[str]] = {rule.name: set() for rule in rules}

    def add(name: str, value: object) -> None:
        called = value.__init__ if isinstance(value, type) else value  # type: ignore[misc]
        takes = found.setdefault(name, set())
        if callable(called):
            with contextlib.suppress(TypeError, ValueError):
                takes |= set(inspect.signature(called).parameters)

    packages = (getattr(sj, name) for name in sorted(PACKAGES))
    for wing in (sj, losses, sj.metrics, *packages):
        for name in filter(lambda name: name[0] != "_", dir(wing)):
            add(name, value := getattr(wing, name))
            for inner in dir(value) if isinstance(value, type) else ():
                if inner[0] != "_":
                    add(inner, inspect.getattr_static(value, inner))
    return found


# Spans of code in the tables that do not name things of ours.
GIVEN = {
    *(
        "jax",
        "model",
        "optimizer",
        "data",
        "train",
        "heldout",
        "name",
        "path",
        "x",
        "ids",
    ),
    *(
        "tables",
        "features",
        "rngs",
        "table",
        "num_rows",
        "dim",
        "rule",
        "dense",
        "array",
    ),
    *("collection", "config", "feature", "schema", "time"),
}


def unknown_names(span: str, known: dict[str, set[str]]) -> set[str]:
    """Names in a table's code that should be ours, but do not exist."""
    try:
        tree = ast.parse(f"{span}\n")
    except SyntaxError:
        return {span}
    taken, wrong = set().union(*known.values()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in GIVEN | {"sj"}:
            # Of a span such as `combiner=None`, an argument.
            argument = isinstance(node.ctx, ast.Store) and node.id in taken
            if node.id not in known and not argument:
                wrong.add(node.id)
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            module = {"sj": sj, "jax": jax}.get(root)
            exists = module is None and node.attr in known
            if module is not None:
                with contextlib.suppress(AttributeError):
                    exists = operator.attrgetter(rest)(module) is not None
            if not exists:
                wrong.add(node.attr)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for keyword in node.keywords:
                if name in known and keyword.arg not in known[name]:
                    wrong.add(f"{name}({keyword.arg}=)")
    return wrong


def test_the_names_for_users_of_other_libraries(capsys):
    """Each name, argument and flag in the last column of the tables exists."""
    page = (DOCS / "coming_from.md").read_text()
    known = public_names()
    rows = [
        line.strip("|").rpartition("|")[2]
        for line in page.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| implicit |"))
    ]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    commands = [span for span in spans if span.startswith("sparsejax ")]
    wrong = set()
    texts = {"user<TAB>item,value:item", "[batch, n]"}
    for span in set(spans) - set(commands) - texts:
        wrong |= unknown_names(span, known)
    assert wrong == set() and len(spans) > 40
    for command in commands:
        _, name, *words = command.split()
        assert cli.main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        wanted = {word for word in words if word.startswith("--")}
        assert not wanted - set(re.findall(r"--[\w-]+", shown)), command
    # It finds what is not there.
    for span in (
        "sj.fits(model)",
        "sj.fit(model, epochs=3)",
        "SparseLinea",
        "combine=1",
    ):
        assert unknown_names(span, known), span


def test_the_lines_for_users_of_other_libraries_run(tmp_path, monkeypatch):
    """The calls in the last column, one after the other, of models of items and histories."""
    monkeypatch.chdir(tmp_path)
    rng, items = np.random.default_rng(0), ["tea", "milk", "rye", "nuts", "figs", "oil"]
    lines = [
        f"user{user},{item},2024-03-{day:02}"
        for user in range(24)
        for day, item in enumerate(rng.choice(items, 4, replace=False), user + 1)
    ]
    pathlib.Path("purchases.csv").write_text("user,item,date\n" + "\n".join(lines))
    kinds = "\n".join(
        f"{item},{'drink' if len(item) < 4 else 'food'}" for item in items
    )
    pathlib.Path("products.csv").write_text("item,kind\n" + kinds)
    small, fit = sj.SASRecConfig(max_length=4, width=8, blocks=1), sj.fit
    monkeypatch.setattr(sj, "fit", lambda *a, **k: fit(*a, **(k | {"num_epochs": 1})))
    for section in (DOCS / "coming_from.md").read_text().split("\n## ")[1:]:
        title = section.splitlines()[0]
        if title not in ("implicit", "LightFM", "RecBole", "RecTools", "Keras-RS"):
            continue
        data = sj.read("purchases.csv")
        train, heldout = data.split(0.8, seed=0)
        model, optimizer = sj.build(sj.NetworkConfig.autoencoder((4,)), data)
        given = {"sj": sj, "data": data, "train": train, "heldout": heldout}
        given |= {"model": model, "optimizer": optimizer, "name": "tea", "path": "one"}
        given |= {"config": sj.NetworkConfig.autoencoder((4,)), "time": "2024-03-15"}
        given |= {
            "x": sj.CSR.from_scipy(data.to_scipy()[:2]),
            "ids": np.tile(np.arange(4), (2, 1)),
        }
        if title == "RecBole":
            given["ids"] = sj.data.random_candidates(train, heldout, count=2)
        if title == "RecTools":
            given |= {"table": pyarrow.csv.read_csv("purchases.csv")}
            given |= {"path": "purchases.csv", "config": small}
        for line in section.splitlines():
            last = line.strip("|").rpartition("|")[2] if line.startswith("|") else ""
            for code in re.findall(r"`([^`]+)`", last):
                if "(" in code and "..." not in code:
                    code = code.replace("sj.SASRecConfig()", "config")
                    exec(compile(code, f"coming_from.md: {title}", "exec"), given)  # noqa: S102


def test_large_models(capsys):
    command, output, *_ = blocks((DOCS / "large_models.md").read_text(), "")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["sparsejax", "plan"] and cli.main(words[1:]) == 0
    assert capsys.readouterr().out == output


def test_distributed(trained, capsys):
    [code] = quick("distributed.md")
    exec(compile(code, "distributed.md", "exec"), trained)  # noqa: S102
    assert "popularity_recall@20" in capsys.readouterr().out
    assert trained["model"].output.kernel[...].sharding.spec[0] == ("model", "data")


@pytest.mark.usefixtures("symbolic_sizes")
def test_command_line(tmp_path, monkeypatch, capsys):
    """Each command is shown, and runs as it stands, after those before it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["user,item,time"]
    for user in ("ann", "bob", *(f"user{n}" for n in range(40))):
        for item in ("tea", *rng.choice(["milk", "rye", "nuts", "figs"], 3, False)):
            lines.append(f"{user},{item},2024-01-{rng.integers(10, 28)}")
    pathlib.Path("purchases.csv").write_text("\n".join(lines) + "\n")
    page = (DOCS / "command_line.md").read_text().split("\n")
    commands = [shlex.split(line)[1:] for line in page if line.startswith("sparsejax ")]
    for words in commands:
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
    shown = {words[0] for words in commands}
    kinds = {kind.__name__.lower() for kind in flags.Command.__subclasses__()}
    shown = {name.replace("-", "") for name in shown}
    assert shown == kinds - {"demo", "serve"}  # serve ends by a signal


def test_measuring_while_it_trains(trained, capsys):
    exec(compile(python("logging.md")[0], "logging.md", "exec"), trained)  # noqa: S102
    assert capsys.readouterr().out.count("'users'") == 2
    _, _, code, _ = python("training.md")
    exec(compile(code, "training.md", "exec"), trained)  # noqa: S102
    found = capsys.readouterr().err
    assert found.startswith("training ended after epoch ")
    assert " was the best, the model is that of epoch " in found


def test_a_loop_of_your_own(trained):
    for code in python("training.md")[:2]:
        exec(compile(code, "training.md", "exec"), trained)  # noqa: S102
    assert 0 < trained["loss"] < 100
    model, optimizer = (nnx.clone(trained[name]) for name in ("model", "optimizer"))
    assert np.isfinite(np.asarray(trained["losses"])).all()
    ranked = sj.recommend(
        model, trained["train"], k=3, optimizer=optimizer, exclude=None
    )
    assert ranked.ids.shape == (60, 3)


def test_tensorboard(trained, tmp_path):
    exec(compile(python("logging.md")[1], "logging.md", "exec"), trained)  # noqa: S102
    [events] = (tmp_path / "logs").iterdir()
    assert b"ndcg_20" in events.read_bytes()


@pytest.mark.parametrize(("block", "name"), [(2, "wandb"), (3, "mlflow")])
def test_trackers(trained, monkeypatch, block, name):
    """Stand-ins with the signatures of wandb 0.31 and mlflow 3.17."""
    logged = []

    @contextlib.contextmanager
    def wandb_init(*, project: str):
        yield types.SimpleNamespace(log=lambda data, step: logged.append((data, step)))

    @contextlib.contextmanager
    def start_run():
        yield

    def log_metrics(metrics, step):
        assert not any("@" in key for key in metrics)
        logged.append((metrics, step))

    made = types.ModuleType(name)
    made.__dict__.update(init=wandb_init, start_run=start_run, log_metrics=log_metrics)
    monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(sj, "fit", lambda *args, log: log(7, {"recall@20": 0.5}))
    exec(compile(python("logging.md")[block], "logging.md", "exec"), trained)  # noqa: S102
    [(metrics, step)] = logged
    assert step == 7 and list(metrics.values()) == [0.5]


@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.filterwarnings("ignore:recommending the most popular")  # random data
def test_tasks(tmp_path, monkeypatch, capsys):
    """The blocks run in their order, and so do the commands beside them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["user,item,time"]
    for user in range(40):
        items = rng.choice(["tea", "milk", "rye", "figs", "oats", "jam"], 4, False)
        days = sorted(rng.choice(28, 4, False) + 1)
        lines += [
            f"u{user},{item},2024-03-{day:02}"
            for item, day in zip(items, days, strict=True)
        ]
    pathlib.Path("shop.csv").write_text("\n".join(lines) + "\n")
    given: dict = {}
    for block in python("tasks.md"):
        exec(compile(block, "tasks.md", "exec"), given)  # noqa: S102
    assert set(sj.Run.load("runs/tuesday").known) == {
        *("tea", "milk", "rye", "figs", "oats", "jam")
    }
    assert (
        pathlib.Path("mail.parquet").is_file() and pathlib.Path("report.html").is_file()
    )
    page = (DOCS / "tasks.md").read_text()
    commands = re.findall(r"`(sparsejax [^`]+)`", page)
    for command in commands:
        words = shlex.split(command.replace("runs/", "again/"))[1:]
        assert cli.main(words) == 0, command
    assert len(commands) == 4 and pathlib.Path("mail.tsv").is_file()


@pytest.mark.usefixtures("symbolic_sizes", "quick_rules")
def test_two_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    items = [f"i{n}" for n in range(9)]
    rng = np.random.default_rng(0)
    shown = [
        {"click": n % 2, "user": f"u{n % 7}", "item": items[n % 9], "kind": f"k{n % 3}"}
        | {"had": items[: n % 4], "device": ("phone", "tablet")[n % 2], "price": n / 9}
        for n in range(60)
    ]
    rows = [rng.permutation(items) for _ in range(12)]
    plays = [
        f"u{u},{i},{n}" for u, row in enumerate(rows) for n, i in enumerate(row[:4])
    ]
    files = {
        "plays.csv": ["user,item,time", *plays],
        "later.csv": ["user,item", *(f"u{u},{row[4]}" for u, row in enumerate(rows))],
        "items.csv": ["item,kind,price", *(f"i{n},k{n % 3},{n}" for n in range(8))],
        "devices.csv": ["user,device", *(f"u{u},phone" for u in range(12))],
        "shown.jsonl": map(json.dumps, shown),
    }
    for name, lines in files.items():
        pathlib.Path(name).write_text("\n".join(lines) + "\n")
    given: dict = {}
    for block in python("two_stages.md"):
        exec(compile(block, "two_stages.md", "exec"), given)  # noqa: S102
    assert "['user', 'device']" in capsys.readouterr().out
    given["retrieval"].save("run")
    given["ranking"].save("clicks")
    page = (DOCS / "two_stages.md").read_text()
    commands = re.findall(r"^sparsejax .+", page, re.MULTILINE)
    for command in commands:
        words = command.replace("--num-candidates 500", "--num-candidates 20").split()
        assert cli.main(words[1:]) == 0, command
    assert len(commands) == 3 and pathlib.Path("best.csv").is_file()


@pytest.mark.usefixtures("symbolic_sizes")
def test_own_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given: dict = {}
    for block in quick("own_models.md"):
        exec(compile(block, "own_models.md", "exec"), given)  # noqa: S102
    assert sj.load_predictor("mine.predictor").recommend_names(["/products"], k=2)
