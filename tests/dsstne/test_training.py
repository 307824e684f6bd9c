"""Trains on all kinds of data sets by `train`, compared with DSSTNE's formulas in float64.

Each training starts from a network file (`WeightsData`). The printed error is that of these
weights.
"""

import json
import re

import numpy as np
import pytest
import scipy.sparse

from sparsejax.cli.main import main
from sparsejax.dsstne import netcdf
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network_files import (
    Parameters,
    load_parameters,
    save_parameters,
)

EXAMPLES, FEATURES, HIDDEN, ITEMS = 7, 6, 3, 5
MARGINS = {"oneTarget": 0.8, "zeroTarget": 0.3, "oneScale": 2, "zeroScale": 0.5}
RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(EXAMPLES, FEATURES)) * (
    RNG.random((EXAMPLES, FEATURES)) < 0.5
)
KERNELS = RNG.normal(size=(FEATURES, HIDDEN)), RNG.normal(size=(HIDDEN, ITEMS)) * 2
BIASES = RNG.normal(size=HIDDEN), RNG.normal(size=ITEMS)
WEIGHTS = RNG.random(EXAMPLES) * 3
INDEX = np.array([2, 0, 1, 1, 2, 0, 2])
# Labels of unique rows, and of examples. One row has none.
UNIQUE = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]])
LISTED = RNG.random((EXAMPLES, ITEMS)) < 0.4
VALUES = np.where(LISTED, RNG.random((EXAMPLES, ITEMS)) + 0.5, 0)
CLASSES = RNG.integers(0, ITEMS, EXAMPLES)


def sparse(rows, **given):
    """A sparse data set; integers as values make it an indicator."""
    matrix = scipy.sparse.csr_array(rows)
    values = matrix.data.astype(np.float32) if matrix.dtype.kind == "f" else None
    starts, ends = matrix.indptr[:-1], matrix.indptr[1:]
    entries = SparseRows(starts, ends, matrix.indices, values)
    return FileDataset((rows.shape[1],), entries, **given)


def train(targets, activation, error_function, flags):
    """The numbers that `train` prints, and those computed from the network that it writes."""
    document = {
        "ErrorFunction": error_function,
        "ScaledMarginalCrossEntropy": MARGINS,
        "ShuffleIndices": False,
        "Layers": [
            {"Name": "Input", "N": FEATURES, "DataSet": "x"},
            {"Name": "Hidden", "N": HIDDEN, "Activation": "Tanh"},
            {"Name": "Output", "N": ITEMS, "DataSet": "y", "Activation": activation},
        ],
    }
    pairs = ("Input", "Hidden"), ("Hidden", "Output")
    kernels, biases = (
        {p: array.astype(np.float32) for p, array in zip(pairs, arrays, strict=True)}
        for arrays in (KERNELS, BIASES)
    )
    network = Definition.from_json(document)
    save_parameters("start.nc", network, Parameters(kernels, biases))
    netcdf.save("data.nc", {"x": sparse(INPUTS), "y": targets})
    with open("config.json", "w") as file:
        json.dump({**document, "WeightsData": "start.nc"}, file)
    files = "-c config.json -i data.nc -o data.nc -n gl.nc"
    assert main(f"dsstne train {files} -e 1 {flags}".split()) == 0
    return load_parameters("gl.nc")[1]


def printed(capsys):
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.search(
        r"training error ([\d.]+), .* regularization error ([\d.]+)", line
    )
    assert found is not None
    return float(found[1]), float(found[2])


def forward():
    hidden = np.tanh(INPUTS @ KERNELS[0] + BIASES[0])
    return hidden, hidden @ KERNELS[1] + BIASES[1]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def log_softmax(z):
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def margins(a, listed, labels):
    ones = np.where(a < MARGINS["oneTarget"], -MARGINS["oneScale"] * np.log(a), 0)
    zeros = np.where(
        a > MARGINS["zeroTarget"], -MARGINS["zeroScale"] * np.log(1 - a), 0
    )
    return np.where(listed, labels * ones, zeros)


A, P = sigmoid(forward()[1]), log_softmax(forward()[1])
SHARES = LISTED / np.maximum(LISTED.sum(axis=1, keepdims=True), 1)
SMCE, DSMCE = "ScaledMarginalCrossEntropy", "DataScaledMarginalCrossEntropy"
CASES = {
    "classes": (
        FileDataset((ITEMS,), Classes(CLASSES)),
        ("SoftMax", "CrossEntropy"),
        -P * np.eye(ITEMS)[CLASSES],
    ),
    "several labels": (
        sparse(LISTED),
        ("SoftMax", "CrossEntropy"),
        -P * SHARES,
    ),
    "weighted labels": (
        sparse(LISTED, weights=WEIGHTS),
        ("SoftMax", "CrossEntropy"),
        -P * LISTED * WEIGHTS[:, None],
    ),
    "labels that are weights, without zeros": (
        sparse(VALUES, ignore_zeros=True),
        ("Sigmoid", DSMCE),
        margins(A, LISTED, VALUES) * LISTED,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_of_every_kind_of_targets(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    targets, network, losses = CASES[case]
    found = train(targets, *network, "-alpha 0 -b 4")
    error, _ = printed(capsys)
    assert error == pytest.approx(losses.sum() / EXAMPLES, rel=1e-5)
    for pair, kernel in zip(found.weights, KERNELS, strict=True):
        np.testing.assert_allclose(found.weights[pair], kernel, rtol=1e-6)


def test_a_step_on_indexed_weighted_data_with_both_penalties(
    tmp_path, monkeypatch, capsys
):
    """The weights are those of unique rows."""
    monkeypatch.chdir(tmp_path)
    alpha, l2, l1 = 0.3, 0.02, 0.05
    by_row = WEIGHTS[:3]
    targets = sparse(UNIQUE, index=INDEX, weights=by_row)
    flags = f"-alpha {alpha} -lambda {l2} -lambda1 {l1} -b {EXAMPLES}"
    found = train(targets, "Sigmoid", SMCE, flags)
    error, penalty = printed(capsys)

    labels, weights = UNIQUE[INDEX], by_row[INDEX][:, None]
    hidden, _ = forward()
    losses = weights * margins(A, labels == 1, labels)
    assert error == pytest.approx(losses.sum() / EXAMPLES, rel=1e-5)
    ones = np.where(A < MARGINS["oneTarget"], MARGINS["oneScale"] * (A - 1), 0)
    zeros = np.where(A > MARGINS["zeroTarget"], MARGINS["zeroScale"] * A, 0)
    slopes = weights * np.where(labels == 1, ones, zeros) / EXAMPLES
    before = (slopes @ KERNELS[1].T) * (1 - hidden**2)
    sums = 0.0
    for pair, kernel, bias, x, slope in zip(
        found.weights, KERNELS, BIASES, (INPUTS, hidden), (before, slopes), strict=True
    ):
        wanted = kernel - alpha * (x.T @ slope + l2 * kernel + l1 * np.sign(kernel))
        np.testing.assert_allclose(found.weights[pair], wanted, rtol=1e-4, atol=1e-6)
        wanted_bias = bias - alpha * slope.sum(axis=0)
        np.testing.assert_allclose(
            found.biases[pair], wanted_bias, rtol=1e-4, atol=1e-6
        )
        sums += l2 / 2 * np.sum(wanted**2) + l1 * np.sum(np.abs(wanted))
    assert penalty == pytest.approx(sums, rel=1e-4)
