"""The examples in docstrings are run, and what they print is compared.

Docstrings and comments are read for words that hide the subject of a sentence.
"""

import ast
import doctest
import pathlib
import re
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.cli import main as cli

MODULES = [sj.baselines, sj.data, sj.embeddings, sj.mesh, sj.nn, sj.optimizers]
MODULES += [sj.sequence, sj.training, sj]
OBJECTS = {
    name: value
    for module in MODULES
    for name in dir(module)
    if not name.startswith("_")
    and not isinstance(value := getattr(module, name), types.ModuleType)
}
MEASURED = {name: getattr(sj.metrics, name) for name in dir(sj.metrics)}
DOCUMENTED = MEASURED | OBJECTS
WITH_EXAMPLES = {n for n, v in DOCUMENTED.items() if ">>>" in (v.__doc__ or "")}
PURCHASES = "ann\tmilk:rye\nbob\ttea:rye\neve\tmilk:tea\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Where examples run: with a file of purchases, and a run."""
    folder = tmp_path_factory.mktemp("docstrings")
    (folder / "purchases.tsv").write_text(PURCHASES)
    (folder / "pro_sg").mkdir()
    parts = {"train": "1,a\n1,b\n2,b\n2,c"}
    for name, user in (("validation", 3), ("test", 4)):
        parts |= {f"{name}_tr": f"{user},a", f"{name}_te": f"{user},b"}
    for name, pairs in parts.items():
        (folder / "pro_sg" / f"{name}.csv").write_text(f"uid,sid\n{pairs}\n")
    train = ["train", str(folder / "purchases.tsv"), "--run", str(folder / "run")]
    assert cli.main([*train, "--epochs", "1", "--optimizer", "sgd"]) == 0
    return folder


@pytest.fixture(scope="module")
def given(symbolic_sizes) -> dict[str, typing.Any]:
    """What examples take as given: all public names, and a model of the bundled data."""
    train, heldout = sj.datasets.msweb().train.split(0.8, seed=0)
    size = train.num_features
    config = sj.NetworkConfig.autoencoder((64,))
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    # Its program compiles in half the time of that of Adam.
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.1))
    history = sj.fit(model, optimizer, train, num_epochs=1, validation=heldout)
    libraries = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx}
    return {
        **OBJECTS,
        **{
            name: getattr(sj, name)
            for name in ("baselines", "losses", "metrics", "optimizers")
        },
        **libraries,
        "scipy": scipy,
        "pandas": pandas,
        "pathlib": pathlib,
        "train": train,
        "heldout": heldout,
        "model": model,
        "optimizer": optimizer,
        "history": history,
    }


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES))
def test_examples_of(name, given, folder, monkeypatch):
    monkeypatch.chdir(folder)
    said: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    finder = doctest.DocTestFinder()
    for test in finder.find(DOCUMENTED[name], name, module=False, globs=given):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_every_public_name_has_an_example():
    def needs_one(value) -> bool:
        of_rules = value.__module__.startswith("sparsejax.optimizers.rules")
        is_error = isinstance(value, type) and issubclass(value, Exception)
        is_protocol = typing.Protocol in getattr(value, "__bases__", ())
        return not (is_error or is_protocol or of_rules)

    assert not {n for n, v in OBJECTS.items() if needs_one(v)} - WITH_EXAMPLES


def _message(node: ast.Raise | ast.Call) -> str:
    """The text of an error or a warning, without what f-strings insert."""
    is_warning = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("warn", "warn_caller", "DataError.at", ".error")
    )
    if isinstance(node, ast.Call) and not is_warning:
        return ""
    texts = [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return "".join(text for text in texts if " " in text)


def test_texts_begin_with_a_noun_or_a_verb():
    """No docstring or block of comments makes its reader search for the subject.

    "Whether ..." is the answer of a function that returns a bool. A comment may begin
    with "As", "On" or "With": what follows is mostly a whole sentence, "On a GPU ...".
    What stands behind the name of an attribute is the help of a flag if it is a sentence.
    """
    bad_begins = {
        "help": r"(Of|What|That|Those|Whose|Lest)\b",
        "docstring": r"(Of|As|On|With|What|That|Those|Whose|Lest|But for)\b",
        "comment": r"(Of|What|That|Those|Whose|Lest|But for)\b",
        "message": r"(of|that|those|whose|lest|but for)\b",
    }
    # "None if there is none" is plain; "What is none has time 0" is not.
    bad_within = (
        r"(?<!there )\b(is|are) none\b"
        r"|\b(but for|but of|lest|by and by|so too|as of an?)\b"
    )
    # A number may stand between: "but of 7 labels 3 are clicks", "is 5 by 4 and 3 by 2".
    in_messages = bad_within.replace("but for|but of|", "").replace("by and by|", "")

    def faults(source: str) -> list[str]:
        texts = [
            ("docstring", text)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and (text := ast.get_docstring(node))
        ]
        texts += [
            ("help", said)
            for _, text in texts
            for said in re.findall(r"^ +\w+: (.*)", text, re.MULTILINE)
        ]
        texts += [
            ("message", said)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Raise | ast.Call)
            for said in [_message(node)]
            if said
        ]
        blocks = re.findall(r"^([ ]*)#:? ?(.*(?:\n\1#.*)*)", source, re.MULTILINE)
        texts += [("comment", re.sub(r"\n *#", " ", text)) for _, text in blocks]
        return [
            f"{kind}: {text[:80]}"
            for kind, text in texts
            if re.match(bad_begins[kind], text)
            or re.search(
                in_messages if kind == "message" else bad_within, " ".join(text.split())
            )
        ]

    planted = [
        '"""What it does."""',
        'def f():\n    """Of a\n    device."""',
        '"""Trains.\n\nAttributes:\n  k: Of clicks, a number.\n"""',
        "# Those of a device.",
        "x = 1\n# Kept, but\n# for the last.",
        "# What is\n# none has time 0.",
        'raise ValueError(f"what is {name} is none " "of clicks")',
        'warn_caller("those of a device")',
    ]
    assert all(len(faults(source)) == 1 for source in planted)
    fine = '"""None if there is none."""\ndef f():\n    """Whether it is."""\n    # On a GPU.'
    assert not faults(fine)
    root = pathlib.Path(sj.__file__).parents[1]
    found = {
        f"{path.relative_to(root)}: {fault}"
        for package in ("sparsejax", "pallas_kernels")
        for path in root.glob(f"{package}/**/*.py")
        for fault in faults(path.read_text())
    }
    # In a page a sentence that begins with a preposition hides its subject alike.
    in_pages = rf"(?:^|[.:] )((?:Of|Lest) .{{0,60}})|({bad_within}.{{0,40}})"
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        found |= {
            f"{path.name}: {m[0]}" for m in re.finditer(in_pages, text, re.MULTILINE)
        }
    assert not found, "\n".join(sorted(found))
