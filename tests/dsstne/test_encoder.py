"""DSSTNE's `encoder` and its CDL files."""

import json
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax import lax

import sparsejax as sj
from sparsejax import dsstne
from sparsejax.cli.main import main
from sparsejax.dsstne import encoder, train
from sparsejax.dsstne.rules import Decay

CDL = {
    "Version": 0.8,
    "Network": "net.json",
    "Data": "data.nc",
    "RandomSeed": 12345,
    "Command": "Train",
    "TrainingParameters": {
        "Epochs": 5,
        "Alpha": 0.5,
        "AlphaInterval": 2,
        "AlphaMultiplier": 0.8,
        "mu": 0.5,
        "lambda": 0.0001,
        "Optimizer": "Nesterov",
        "CheckpointInterval": 2,
        "CheckpointName": "check",
        "Results": "out.nc",
    },
}
NETWORK = {
    "ErrorFunction": "CrossEntropy",
    "Layers": [
        {"N": "auto", "DataSet": "input"},
        {"N": 6, "Activation": "Tanh"},
        {"Name": "Output", "N": "auto", "DataSet": "output"},
    ],
}
# The networks of DSSTNE's own tests, with the hidden layers wired in.
LINEAR = {"N": 1, "Activation": "Linear"}
SCALES = {"oneTarget": 0.9, "zeroTarget": 0.1, "oneScale": 30.0, "zeroScale": 1.0}
TESTED: dict[str, tuple[str, list[dict]]] = {
    "L2_01": ("L2", [LINEAR]),
    "L2_02": ("L2", [{"N": 4}, LINEAR]),
    "L2_LRelu_01": ("L2", [{"N": 4, "Activation": "LRelu", "Slope": 0.0}, LINEAR]),
    "L2_LRelu_02": ("L2", [{"N": 4, "Activation": "LRelu", "Slope": 0.5}, LINEAR]),
    "SMCE_01": ("ScaledMarginalCrossEntropy", [{"N": 2}]),
    "SMCE_02": ("ScaledMarginalCrossEntropy", [{"N": 2}, {"N": 2}]),
    "DSMCE_02": ("DataScaledMarginalCrossEntropy", [{"N": 2}, {"N": 2}]),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).random((30, 8)) < 0.3
    data = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(rows))
    dsstne.write_datasets("data.nc", {"input": data, "output": data})
    write({}, NETWORK)
    return tmp_path


def write(cdl, network=None):
    with open("train.cdl", "w") as file:
        json.dump({**CDL, **cdl}, file)
    if network is not None:
        with open("net.json", "w") as file:
            json.dump(network, file)


def test_train_and_predict(folder, capsys):
    (folder / "out.nc").write_text("of an earlier run")
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    assert {p.name for p in folder.glob("*.nc")} == {
        *("data.nc", "out.nc", "check2.nc", "check4.nc")
    }
    errors = re.findall(r"training error ([\d.]+)", capsys.readouterr().out)
    assert len(errors) == 5 and float(errors[-1]) < float(errors[0])
    write({"Command": "predict", "Network": "out.nc"})
    narrow = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(np.eye(7, 6) > 0))
    dsstne.write_datasets("data.nc", {"input": narrow, "output": narrow})
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "k,precision,recall,NDCG" and len(lines) == 8
    assert float(lines[-1].split(",")[2]) == 1  # all 8 items are recommended


@pytest.mark.parametrize(("interval", "epochs"), [(2, 2), (0, 5)])
def test_the_brake_starts_anew_with_each_interval(folder, interval, epochs):
    inner = {**CDL["TrainingParameters"], "AlphaInterval": interval}
    write({"TrainingParameters": inner})
    made = train.made(encoder.load_cdl("train.cdl").training)
    assert made.model.brake is not None
    assert made.model.brake.steps == epochs  # an epoch has one step


def test_the_rate_falls_by_intervals():
    rate = Decay(0.5, multiplier=0.8, steps=4)
    found = [float(rate(count)) for count in (0, 3, 4, 11, jnp.int32(12))]
    expected = [0.5, 0.5, 0.4, 0.32, 0.256]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", TESTED)
def test_validate_passes_on_the_networks_of_dsstne(folder, capsys, name):
    error, hidden = TESTED[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 1 if error == "L2" else 2)).astype(np.float32)
    target: Any = -2 * x + 3
    if error != "L2":
        classes = scipy.sparse.csr_array(rng.random((64, 2)) < 0.5)
        is_data = error.startswith("Data")
        classes = classes.astype(np.float32 if is_data else bool)
        target = sj.SparseDataset.from_scipy(classes)
    dsstne.write_datasets("data.nc", {"input": x, "output": target})
    layers = [{"N": "auto", "DataSet": "input"}, *hidden]
    layers[-1] = {**layers[-1], "DataSet": "output"}
    network: dict[str, Any] = {"ErrorFunction": error, "Layers": layers}
    if error.startswith("Data"):
        network["ScaledMarginalCrossEntropy"] = SCALES
    write({"Command": "Validate"}, network)
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    assert capsys.readouterr().out.count("largest error") == 2 * len(hidden)


def test_validate_leaves_out_what_has_no_value(folder, capsys):
    """A mean of shared weights and a DeltaNorm, in a network with two outputs."""
    rng = np.random.default_rng(0)
    data, extra = (
        sj.SparseDataset.from_scipy(scipy.sparse.csr_array(rng.random((30, n)) < 0.3))
        for n in (8, 3)
    )
    dsstne.write_datasets("data.nc", {"input": data, "output": data, "extra": extra})
    shared = {"InputLayer": "h", "SourceInputLayer": "x", "SourceOutputLayer": "h"}
    layers = [
        {"Name": "x", "N": "auto", "DataSet": "input"},
        {
            "Name": "h",
            "N": 6,
            "Activation": "Tanh",
            "DeltaNorm": 0.001,
            "BatchNormalization": True,
        },
        {
            "Kind": "Output",
            "N": "auto",
            "DataSet": "output",
            "SharedWeights": {**shared, "Transposed": True},
        },
        {"N": "auto", "Source": "h", "DataSet": "extra"},
    ]
    write({"Command": "Validate"}, {"Layers": layers})
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(.*): largest error 0\.0", printed, re.MULTILINE) == [
        "biases from 'x' to 'h'",
        "weights from 'x' to 'h'",
        "bias of the batch normalization of 'h'",
        "scale of the batch normalization of 'h'",
        "biases from 'h' to 'Output2'",
        "biases from 'h' to 'Output3'",
        "weights from 'h' to 'Output3'",
    ]


def test_validate_of_a_large_loss(folder, capsys):
    """Of which float32 has not the digits that a step changes."""
    x = np.arange(1024.0)[:, None]
    data = {
        name: sj.SparseDataset.from_scipy(scipy.sparse.csr_array(values))
        for name, values in (("input", x + 1), ("output", -2000 * x + 3.5))
    }
    dsstne.write_datasets("data.nc", data)
    layers = [{"N": 1, "DataSet": "input", "Sparse": True}]
    layers += [{"N": 1, "DataSet": "output", "Activation": "Linear"}]
    write({"Command": "Validate"}, {"ErrorFunction": "L2", "Layers": layers})
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    assert capsys.readouterr().out.count("largest error 0.000") == 2


def test_validate_fails_on_a_wrong_gradient(folder, capsys, monkeypatch):
    penalty = {"SparsenessPenalty": {"p": 0.2, "beta": 3.0}}
    layers = [dict(layer) for layer in NETWORK["Layers"]]
    layers[1]["Sparse"] = True
    write({"Command": "Validate"}, {**NETWORK, **penalty, "Layers": layers})
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    # One activation whose slope is twice that of its value.
    monkeypatch.setattr(
        "sparsejax.dsstne.layers.activate",
        lambda _, z: 2 * jnp.tanh(z) - lax.stop_gradient(jnp.tanh(z)),
    )
    assert main(["dsstne", "encoder", "train.cdl"]) == 1
    assert "differs by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Command": "Fly"}, "Command"),
        ({"MiniBatch": 5}, 'unknown key "MiniBatch"'),
        ({"Data": ""}, '"Data" is missing'),
        ({"TrainingParameters": {}}, '"Epochs"'),
        *[
            ({"TrainingParameters": {"Epochs": 1, **inner}}, message)
            for inner, message in [
                (
                    {"AlphaInterval": 2.5},
                    '"AlphaInterval" must be a whole number from 0',
                ),
                ({"AlphaInterval": -1}, "whole number from 0"),
                ({"CheckpointInterval": 0.5}, "whole number from 0"),
                ({"CheckpointInterval": -1}, "whole number from 0"),
                ({"Epochs": 1.5}, '"Epochs" must be a whole number from 1'),
                ({"CheckpointName": "no/check"}, "there is no folder no"),
                ({"Results": "no/out.nc"}, "there is no folder no"),
            ]
        ],
        ({"TrainingParameters": {"Epochs": 1, "Optimizer": "adam"}}, "nesterov"),
        ({"Network": "none.json"}, "none.json"),
        ({"RandomSeed": 0.5}, '"RandomSeed" must be a whole number'),
        ({"RandomSeed": 2**32}, "RandomSeed"),
        ({"RandomSeed": "1"}, "RandomSeed"),
    ],
)
def test_wrong_files(folder, capsys, change, message):
    write(change)
    assert main(["dsstne", "encoder", "train.cdl"]) == 1
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert not printed.out and not list(folder.glob("out*"))
    assert line.startswith("sparsejax: error: ") and message in line


@pytest.mark.parametrize(("interval", "kept"), [(0, set()), (2.0, {"check2.nc"})])
def test_no_checkpoints_and_a_negative_seed(folder, interval, kept):
    inner = {"Epochs": 3, "CheckpointInterval": interval}
    if not interval:
        inner["CheckpointName"] = "no/folder/is/needed"
    write({"RandomSeed": -1, "TrainingParameters": inner})
    assert encoder.load_cdl("train.cdl").training.seed == 2**32 - 1
    assert main(["dsstne", "encoder", "train.cdl"]) == 0
    assert {p.name for p in folder.glob("*.nc")} == {"data.nc", "network.nc"} | kept


def test_random_characters_changed(tmp_path):
    """A damaged CDL file is read, or one line says why not."""
    rng = np.random.default_rng(0)
    path = tmp_path / "train.cdl"
    whole = np.frombuffer(json.dumps(CDL).encode(), np.uint8)
    marks = np.frombuffer(b'{}[]",:0-.e/*\\\n\x00\xff\xc3', np.uint8)
    refused = 0
    for _ in range(300):
        damaged = whole.copy()
        at = rng.integers(0, len(whole), rng.integers(1, 5))
        damaged[at] = rng.choice(marks, len(at))
        path.write_bytes(damaged.tobytes())
        try:
            encoder.load_cdl(str(path))
        except (ValueError, NotImplementedError) as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            refused += 1
    assert refused > 100
