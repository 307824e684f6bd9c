"""The examples in docstrings are run, and what they print is compared."""

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
from flax import nnx

import sparsejax as sj
from sparsejax.cli import main as cli

OBJECTS = {
    name: value
    for module in (sj, sj.baselines, sj.training)
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
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
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
        is_error = isinstance(value, type) and issubclass(value, Exception)
        is_protocol = typing.Protocol in getattr(value, "__bases__", ())
        return not (is_error or is_protocol)

    assert not {n for n, v in OBJECTS.items() if needs_one(v)} - WITH_EXAMPLES
