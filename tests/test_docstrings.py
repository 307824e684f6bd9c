"""The examples in docstrings are run, and what they print is compared.

Docstrings and comments are read for words that hide the subject of a sentence.
"""

import dataclasses
import doctest
import pathlib
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
import scipy.sparse
import texts
from flax import nnx

import sparsejax as sj
from sparsejax.cli import main as cli

MODULES = [
    sj.baselines,
    sj.clicks,
    sj.data,
    sj.embeddings,
    sj.mesh,
    sj.nn,
    sj.optimizers,
]
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
        "dataclasses": dataclasses,
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


def test_texts_begin_with_a_noun_or_a_verb():
    """No docstring, entry, comment or message makes its reader search for the subject."""
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
    assert all(len(texts.faults(source)) == 1 for source in planted)
    fine = '"""None if there is none."""\ndef f():\n    """Whether it is."""\n    # On a GPU.'
    assert not texts.faults(fine)
    found = texts.faults_of_repository()
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "begin",
    [
        "of draws",
        "what is drawn",
        "that is drawn",
        "those drawn",
        "who draws",
        "whose draws",
        "by item",
        "as `f`",
        "so many",
        "see `f`",
        "like `f`",
        "where draws begin",
        "makes draws",
        "called with draws",
        "the same",
        "Of draws",
    ],
)
@pytest.mark.parametrize("section", ["Args", "Attributes", "Returns", "Raises"])
def test_entries_begin_with_a_noun(section, begin):
    def lines(begin: str, name: str = "seed: ") -> list[int]:
        entry = (
            f"{section}:\n  first: seed of draws.\n\n  {name}{begin} and\n    of all."
        )
        source = (
            f'x = 1\n\ndef f():\n    """Draws.\n\n{entry}\n\nSee `g`: of use.\n"""\n'
        )
        return [text.line for text in texts.faults(source)]

    assert lines(begin) == [9]
    assert lines(begin, "*rest, a: ") == lines(begin, "seed:\n    ") == [9]
    assert not lines("seed of draws") and not lines("None, as by default")
    unnamed = f'"""Draws.\n\nReturns:\n  {begin} and\n  of all.\n"""'
    assert [text.line for text in texts.faults(unnamed)] == [4]
