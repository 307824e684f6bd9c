"""Runs the examples in docstrings of the package `dsstne`."""

import doctest
import inspect

import dsstne_networks as networks
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import dsstne
from sparsejax.dsstne import (
    definition,
    keys,
    layer_definition,
    losses,
    netcdf,
    network,
    rules,
)

MODULES = (definition, keys, layer_definition, losses, netcdf, network, rules)

OBJECTS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if inspect.isclass(value) or inspect.isfunction(value)
    if ">>>" in (value.__doc__ or "") and value.__module__ == module.__name__
}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_examples_of(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "purchases.tsv").write_text(
        "ann\tmilk:rye\nbob\ttea:rye\neve\tmilk:tea\n"
    )
    networks.tiny("gl.nc")
    (tmp_path / "features").write_text("a\t0\nb\t1\nc\t2\nd\t3\n")
    data = scipy.sparse.csr_array(np.eye(4, dtype=bool))
    dsstne.write_datasets(
        "gl_input.nc", {"gl_input": sj.SparseDataset.from_scipy(data)}
    )
    names = {n: getattr(sj, n) for n in ("read", "CSR", "recommend")}
    libraries = {"np": np, "jnp": jnp, "nnx": nnx, "scipy": scipy, "dsstne": dsstne}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    given = {name: value for m in MODULES for name, value in vars(m).items()}
    found = doctest.DocTestFinder().find(
        OBJECTS[name], name, module=False, globs=given | names | libraries
    )
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
