"""Data files of networks with several outputs, or none."""

import dataclasses
import json
from typing import Any, cast

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.data import SparseDataset
from sparsejax.dsstne import rules, train
from sparsejax.dsstne.datasets import FileDataset
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.examples import Examples, by_layer
from sparsejax.dsstne.netcdf import write_datasets
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import load_parameters

LAYERS = [
    {"Name": "x", "N": 8, "Sparse": True, "DataSet": "d"},
    {"Name": "h", "N": 4},
    {"Name": "o", "Kind": "Output", "N": 8, "DataSet": "d"},
    {"Name": "p", "Kind": "Output", "Source": "h", "N": 3, "DataSet": "e"},
]


def test_two_outputs_are_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    d, e = (scipy.sparse.csr_array(rng.random((20, n)) < 0.4) for n in (8, 3))
    write_datasets("in.nc", {"d": SparseDataset.from_scipy(d)})
    write_datasets("out.nc", {"e": SparseDataset.from_scipy(e)})
    (tmp_path / "config.json").write_text(json.dumps({"Layers": LAYERS}))
    train.train(
        train.Train(
            config="config.json",
            inputs="in.nc",
            outputs="out.nc",
            network="net.nc",
            epochs=1,
            alpha=0.0,
            validation=("in.nc", "out.nc"),
        )
    )
    # Without a change, the error after the epoch is that of the epoch, of both outputs.
    trained, validated = (
        float(line.split("average " + what + " error ")[1].split(",")[0])
        for line, what in zip(
            capsys.readouterr().out.splitlines(),
            ("training", "validation"),
            strict=True,
        )
    )
    assert trained == pytest.approx(validated, rel=1e-5)
    _, numbers = load_parameters("net.nc")
    h = 1 / (1 + np.exp(-d.astype(float) @ numbers.weights["x", "h"]))
    expected = 0.0
    for name, labels in (("o", d), ("p", e)):
        a = 1 / (1 + np.exp(-h @ numbers.weights["h", name]))
        t = labels.toarray()
        expected -= np.log(np.where(t, a, 1 - a)).sum() / 20
    assert trained == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_learned():
    d, e = (FileDataset.of(np.ones((3, n), np.float32)) for n in (8, 3))
    both = Definition.from_json({"Layers": LAYERS})
    data = {"d": d, "e": dataclasses.replace(e, weights=np.ones(3, np.float32))}
    with pytest.raises(
        NotImplementedError, match="'d', 'e'.* weights of their examples"
    ):
        Examples.of(both, by_layer(both, data), {})
    none = Definition.from_json(
        {"Layers": [*LAYERS[:1], {**LAYERS[1], "Kind": "Hidden"}]}
    )
    with pytest.raises(ValueError, match="no layer of kind Output"):
        Examples.of(none, by_layer(none, data), {})


def test_weights_of_an_input_multiply_its_examples():
    one = Definition.from_json({"Layers": LAYERS[:3]})
    rows = np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 1, 0, 0]], np.float32)
    weights = np.array([2.0, 3.0, 0.5], np.float32)
    for matrix in (rows, rows > 0):
        sparse = SparseDataset.from_scipy(scipy.sparse.csr_array(matrix))
        d = FileDataset.of(sparse, weights=weights)
        given = Examples.of(one, by_layer(one, {"d": d}), {})
        found = given.inputs.to_scipy().toarray()
        np.testing.assert_array_equal(found[:, :4], weights[:, None] * matrix)
        np.testing.assert_array_equal(given.weights, weights)


@pytest.mark.parametrize(
    ("error", "labels", "wrong"),
    [
        ("Hinge", [[1, -1], [1, 0]], "0 in example 1, column 1; Hinge knows -1 and 1"),
        (
            "ScaledMarginalCrossEntropy",
            [[0, 1], [0.5, 1]],
            "0.5 in example 1, column 0",
        ),
    ],
)
def test_labels_that_an_error_function_does_not_know(error, labels, wrong):
    layers = [LAYERS[0], LAYERS[1], {**LAYERS[3], "N": 2}]
    network = Definition.from_json({"ErrorFunction": error, "Layers": layers})
    d, e = np.ones((2, 8), np.float32), np.array(labels, np.float32)
    data = by_layer(network, {"d": FileDataset.of(d), "e": FileDataset.of(e)})
    with pytest.raises(ValueError, match=f"data set 'e' has the label {wrong}"):
        Examples.of(network, data, {})


def test_what_fit_refuses_with_several_targets():
    network = Network(Definition.from_json({"Layers": LAYERS}), rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(network, rules.SGD(0.1))
    d, e = (scipy.sparse.csr_array(np.eye(8, n, dtype=bool)) for n in (8, 3))
    for targets, options, error, message in (
        ({"d": d, "e": e}, {"fused": True}, NotImplementedError, "several targets"),
        (
            {"d": d, "e": e},
            {"validation": d},
            ValueError,
            "a single target",
        ),
        ({}, {}, ValueError, "targets is empty"),
        ({"d": d, "e": e[:3]}, {}, ValueError, r"targets\['e'\]"),
        ({"d": d, "f": e}, {}, ValueError, "the targets d, e"),
    ):
        with pytest.raises(error, match=message):
            sj.fit(network, optimizer, d, targets, num_epochs=1, **cast(Any, options))
