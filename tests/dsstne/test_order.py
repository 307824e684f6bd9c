"""The internal order of columns in training: balanced over shards, and invisible to users."""

import json
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data.sets.vocabulary import imbalance
from sparsejax.dsstne import order, rules
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import load_parameters

TIED = {
    "InputLayer": "h",
    "SourceInputLayer": "x",
    "SourceOutputLayer": "h",
    "Transposed": True,
}


def popular_first(rng, rows, columns):
    share = 0.9 / (1 + np.arange(columns)) ** 0.5
    return scipy.sparse.csr_array(rng.random((rows, columns)) < share)


def datasets(**matrices) -> dict[str, Any]:
    return {
        name: FileDataset(
            m.shape[1:], SparseRows(m.indptr[:-1], m.indptr[1:], m.indices)
        )
        for name, m in matrices.items()
    }


def definition(columns, items, **output):
    layers = [
        {"Name": "x", "N": columns, "Sparse": True},
        {"Name": "h", "N": 4},
        {"Name": "y", "N": items, **output},
    ]
    return Definition.from_json({"Layers": layers})


def test_entries_are_spread_evenly():
    matrix = popular_first(np.random.default_rng(0), 200, 640)
    data = datasets(x=matrix, y=matrix[:, :512])
    orders = order.balanced_orders(definition(640, 512), data)
    assert sorted(orders) == ["x", "y"]
    for name, given in orders.items():
        counts = np.bincount(data[name].rows.indices, minlength=len(given))
        assert imbalance(counts, 8) > 1.7
        assert imbalance(counts[given], 8) < 1.2
        moved: Any = order.in_order(data[name], given).examples()
        before = data[name].examples().to_scipy()
        np.testing.assert_array_equal(
            moved.to_scipy().toarray(), before.toarray()[:, given]
        )


def test_classes_are_moved_too():
    ids = np.array([0, 2, 2, 1, 0, 0])
    data = {"x": FileDataset((3,), Classes(ids)), "y": FileDataset((3,), Classes(ids))}
    orders = order.balanced_orders(definition(3, 3), data)
    moved: Any = order.in_order(data["y"], orders["y"])
    np.testing.assert_array_equal(orders["y"][moved.rows.ids], ids)


def test_layers_that_share_weights_have_one_order():
    rng = np.random.default_rng(1)
    data = datasets(x=popular_first(rng, 50, 9), y=popular_first(rng, 50, 9))
    orders = order.balanced_orders(definition(9, 9, SharedWeights=[TIED]), data)
    np.testing.assert_array_equal(orders["x"], orders["y"])
    # If one of them cannot be moved, neither is the other.
    dense = {**data, "y": FileDataset.of(np.ones((50, 9), np.float32))}
    assert not order.balanced_orders(definition(9, 9, SharedWeights=[TIED]), dense)
    assert list(order.balanced_orders(definition(9, 9), dense)) == ["x"]


def test_parameters_go_there_and_back():
    rng = np.random.default_rng(2)
    network = definition(7, 5)
    orders = {"x": rng.permutation(7), "y": rng.permutation(5)}
    numbers = Network(network, rngs=nnx.Rngs(0)).parameters()
    moved = order.from_file_order(numbers, orders)
    first = numbers.weights["x", "h"][orders["x"]]
    np.testing.assert_array_equal(moved.weights["x", "h"], first)
    back = order.to_file_order(moved, orders)
    for pair, array in numbers.weights.items():
        np.testing.assert_array_equal(back.weights[pair], array)
        np.testing.assert_array_equal(back.biases[pair], numbers.biases[pair])


@pytest.mark.parametrize("output", [{}, {"SharedWeights": [TIED]}])
def test_a_file_has_the_weights_that_training_in_its_order_gives(
    tmp_path, monkeypatch, output
):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    x, y = popular_first(rng, 12, 6), popular_first(rng, 12, 6)
    document = definition(6, 6, **output).to_json()
    document |= {"ShuffleIndices": False, "WeightsData": "start.nc"}
    for layer, name in zip(document["Layers"], ("x", None, "y"), strict=True):
        if name is not None:
            layer["DataSet"] = name
    network = Network(Definition.from_json(document), rngs=nnx.Rngs(0))
    sj.dsstne.save_network("start.nc", network)
    sj.dsstne.write_datasets("x.nc", {"x": sj.SparseDataset.from_scipy(x)})
    sj.dsstne.write_datasets("y.nc", {"y": sj.SparseDataset.from_scipy(y)})
    (tmp_path / "config.json").write_text(json.dumps(document))
    command = "dsstne train -c config.json -i x.nc -o y.nc -n net.nc"
    assert main(f"{command} -e 2 -b 4 -alpha 0.5 -lambda 0".split()) == 0
    optimizer = sj.Optimizer(network, rules.SGD(0.5))
    sj.fit(network, optimizer, x, y, batch_size=4, num_epochs=2, shuffle=False)
    _, numbers = load_parameters("net.nc")
    expected = network.parameters()
    for pair, weights in expected.weights.items():
        np.testing.assert_allclose(numbers.weights[pair], weights, rtol=1e-4, atol=1e-6)
    for pair, bias in expected.biases.items():
        np.testing.assert_allclose(numbers.biases[pair], bias, rtol=1e-4, atol=1e-6)
