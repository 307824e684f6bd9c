"""Networks of DSSTNE as modules, compared with its formulas in float64."""

from typing import Any

import dsstne_networks as networks
import jax
import jax.numpy as jnp
import netCDF4
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made, rows
from flax import nnx

import sparsejax as sj
from sparsejax import dsstne
from sparsejax.dsstne import rules
from sparsejax.dsstne.definition import Definition, weights_of
from sparsejax.dsstne.network import Network, regularization
from sparsejax.dsstne.network_files import Parameters, load_parameters, save_parameters
from sparsejax.sparse import CSR


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def tiny(tmp_path):
    definition, parameters = load_parameters(networks.tiny(tmp_path / "net.nc"))
    return Network(definition, parameters=parameters, rngs=nnx.Rngs(0))


def test_scores_of_a_file(tiny):
    x = rows([1.0, 0, 1, 0], [0.5, 0, 2, 0], [0, 0, 0, 0])
    expected = [[0.682, 0.614, 0.098], [0.700, 0.682, 0.069]]
    units = np.asarray(tiny.values(x, "Output", deterministic=True))
    np.testing.assert_allclose(units[:2], expected, atol=5e-4)
    np.testing.assert_allclose(units[2], sigmoid(np.array([0, 0, -1])), rtol=1e-6)
    ids, scores = tiny.top_k(x, 3)
    assert ids[:2].tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(scores[:2], expected, atol=5e-4)
    hidden = tiny.units(x, "Hidden", batch_size=2)
    np.testing.assert_allclose(
        hidden[0], sigmoid(np.array([2.0, 1.0])), rtol=1e-6
    )  # features 0 and 2: [1 + 1, 0 + 1]


def test_padding_and_excluded_items_are_not_ranked(tiny):
    tiny.rank_first(2)
    ids, scores = tiny.top_k(rows([1.0, 0, 0, 0]), 3, exclude=rows([1.0, 0]))
    assert ids.tolist() == [[1, -1, -1]]
    assert np.isneginf(scores[0, 1:]).all()


def test_numbers_go_there_and_back_with_the_same_bits(tmp_path, tiny):
    network = made(
        {"Name": "a", "N": [4, 4, 2], "DataSet": "a"},
        {"Name": "b", "Kind": "Input", "N": 6, "DataSet": "b", "Sparse": True},
        {
            "Name": "c",
            "Kind": "Hidden",
            "Source": "a",
            "N": 3,
            "Type": "Convolutional",
            "Kernel": [3, 3],
            "KernelStride": [1, 1],
            "BatchNormalization": True,
        },
        {"Name": "h", "Kind": "Hidden", "Source": ["c", "b"], "N": 5},
        {
            "Name": "o",
            "N": 6,
            "DataSet": "b",
            "SharedWeights": {
                "InputLayer": "h",
                "Transposed": True,
                "SourceInputLayer": "b",
                "SourceOutputLayer": "h",
            },
        },
    )
    for number, module in enumerate((network, tiny)):
        path = tmp_path / f"{number}.nc"
        save_parameters(path, module.definition, module.parameters())
        definition, parameters = load_parameters(path)
        again = Network(definition, parameters=parameters, rngs=nnx.Rngs(5))
        same = jax.tree.map(
            lambda a, b: np.array_equal(a, b),
            nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)),
            nnx.state(again, nnx.Any(nnx.Param, nnx.BatchStat)),
        )
        assert all(jax.tree.leaves(same))


def test_several_sources_and_skips():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)), rng.integers(0, 2, (3, 5)).astype(float)
    network = made(
        {"Name": "x", "N": 4, "DataSet": "x"},
        {"Name": "y", "Kind": "Input", "N": 5, "DataSet": "y", "Sparse": True},
        {
            "Name": "h",
            "Kind": "Hidden",
            "N": 3,
            "Source": ["x", "y"],
            "Activation": "Tanh",
        },
        {
            "Name": "i",
            "Kind": "Hidden",
            "N": 3,
            "Skip": "h",
            "Activation": "LRELU",
            "Slope": 0.25,
        },
        {"Name": "o", "N": 2, "Source": ["i", "h"], "Activation": "Linear"},
        ErrorFunction="L2",
    )
    rng = np.random.default_rng(1)
    shapes = weights_of(network.definition)
    weights = {pair: rng.normal(size=shape) for pair, shape in shapes.items()}
    biases = {pair: rng.normal(size=shape[1]) for pair, shape in shapes.items()}
    network = Network(
        network.definition, parameters=Parameters(weights, biases), rngs=nnx.Rngs(0)
    )

    def times(array, source, layer):
        return array @ weights[source, layer] + biases[source, layer]

    h = np.tanh(times(x, "x", "h") + times(y, "y", "h"))
    i = times(h, "h", "i") + h
    i = np.where(i > 0, i, 0.25 * i)
    expected = times(i, "i", "o") + times(h, "h", "o")
    given = {
        "x": jnp.asarray(x, jnp.float32),
        "y": CSR.from_scipy(scipy.sparse.csr_array(y)),
    }
    found = network(given, deterministic=True)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    labels = rng.normal(size=(3, 2))
    labels[1] = 0
    loss = network.loss(given, CSR.from_scipy(scipy.sparse.csr_array(labels)))
    np.testing.assert_allclose(loss, np.sum((expected - labels) ** 2) / 2, rtol=1e-5)
    ids, scores = network.top_k(given, 3)
    assert (np.asarray(ids)[:, 2] == -1).all()
    np.testing.assert_allclose(scores[:, 0], expected.max(axis=1), rtol=1e-5)


def test_softmax_labels_are_a_distribution(tiny):
    layers = [
        {"Name": "Input", "N": 4, "Sparse": True},
        {"Name": "Hidden", "N": 2},
        {"Name": "Output", "N": 3, "Activation": "SoftMax"},
    ]
    network = made(*layers, parameters=tiny.parameters())
    x, labels = rows([True, False, True, False]), rows([True, True, False])
    s = np.asarray(tiny(x, deterministic=True), np.float64)[0]
    log_p = s - np.log(np.exp(s).sum())
    np.testing.assert_allclose(network.loss(x, labels), -log_p[:2].mean(), rtol=1e-5)
    network.rank_first(2)  # the third is padding, but is in the sum
    ids, scores = network.top_k(x, 3)
    best = np.argsort(-log_p[:2])
    assert ids[0].tolist() == [*best, -1]
    np.testing.assert_allclose(scores[0, :2], np.exp(log_p[best]), rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "weighted", "slope"),
    [
        ([[0.3], [0.1]], False, -3.75),  # the mean is .2: 2 (-.5 / .2 + .5 / .8)
        ([[0.3], [0.1]], True, -3.75),
        ([[-0.3], [-0.1]], False, 2 * (-0.5 / 1e-6 + 0.5 / (1 - 1e-6))),
        ([[3.0], [0.1]], False, 2 * (-0.5 / (1 - 1e-6) + 0.5 / 1e-6)),
    ],
)
def test_the_penalty_has_slopes_but_no_value(first, weighted, slope):
    """Also with weights of examples, and where a mean is not between 0 and 1."""
    network = made(
        {"Name": "x", "N": 2, "Sparse": True},
        {"Name": "h", "N": 1, "Sparse": True, "Activation": "Linear"},
        {"Name": "o", "N": 1, "Activation": "Linear", "WeightInit": {"Scheme": "Constant", "Scale": 0}},
        ErrorFunction="L2",
        SparsenessPenalty={"p": 0.5, "beta": 2.0},
        parameters=Parameters(
            {("x", "h"): np.array(first), ("h", "o"): np.zeros((1, 1))},
            {("x", "h"): np.zeros(1), ("h", "o"): np.zeros(1)},
        ),
    )  # fmt: skip
    # The third row does not exist.
    x, labels = rows([1.0, 0], [0, 1.0], [1.0, 1.0]), rows([0.0], [0.0], [0.0])
    weights = jnp.array([0.5, 0.5, 0])
    if weighted:  # with 3 and .5
        network = Network(
            network.definition,
            parameters=network.parameters(),
            weighted=True,
            rngs=nnx.Rngs(0),
        )
        weights = jnp.array([1.5, 0.25, 0])

    def loss(network):
        return network.loss(x, labels, weights=weights)

    value, grads = nnx.value_and_grad(loss)(network)
    assert value == 0
    slopes = dict(nnx.to_flat_state(grads))
    [kernel] = [
        v for path, v in slopes.items() if path[1] == 1 and path[-1] == "kernel"
    ]
    np.testing.assert_allclose(kernel[...][:2, 0], [slope / 2] * 2, rtol=1e-6)


def shortened(weights, limit):
    norm = np.linalg.norm(weights, axis=0)
    return weights * np.minimum(1, limit / norm)


@pytest.mark.parametrize(
    ("row_sparse", "norm"), [(False, np.inf), (True, np.inf), (True, 0.2)]
)
def test_training_equals_the_formulas(row_sparse, norm):
    """Two epochs of SGD with penalty on weights, in float64, also with rows left alone."""
    layers: list[dict[str, Any]]
    layers = [{"Name": "x", "N": 300, "Sparse": True, "DataSet": "d"}]
    layers += [{"Name": "h", "N": 3}, {"Name": "o", "N": 300, "DataSet": "d"}]
    if norm < np.inf:
        layers[1]["WeightNorm"] = layers[2]["WeightNorm"] = norm
    rng = np.random.default_rng(0)
    data = np.zeros((40, 300))
    data[np.arange(40)[:, None], rng.integers(0, 100, (40, 3))] = 1
    definition = Definition.from_json({"Layers": layers})
    network = Network(definition, row_sparse=row_sparse, rngs=nnx.Rngs(0))
    start = network.parameters()
    w, v = (start.weights[p].astype(np.float64) for p in (("x", "h"), ("h", "o")))
    b, c = np.zeros(3), np.zeros(300)
    for _ in range(2):
        for x in (data[:16], data[16:32], data[32:]):
            h = sigmoid(x @ w + b)
            d = (sigmoid(h @ v + c) - x) / len(x)
            e = d @ v.T * h * (1 - h)
            v, w = v - 0.5 * (h.T @ d + 0.01 * v), w - 0.5 * (x.T @ e + 0.01 * w)
            c, b = c - 0.5 * d.sum(0), b - 0.5 * e.sum(0)
            v, w = shortened(v, norm), shortened(w, norm)
    optimizer = sj.Optimizer(network, rules.SGD(0.5, weight_decay=0.01))
    matrix = scipy.sparse.csr_array(data.astype(bool))
    sj.fit(network, optimizer, matrix, batch_size=16, num_epochs=2, shuffle=False)
    found = network.parameters()
    np.testing.assert_allclose(found.weights["x", "h"], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.weights["h", "o"], v, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.biases["x", "h"], b, rtol=1e-4, atol=1e-6)
    total = regularization(network, l2=0.1, l1=0.2)
    expected = sum(0.05 * (a**2).sum() + 0.2 * np.abs(a).sum() for a in (w, v))
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_parameters_that_do_not_fit(tiny):
    numbers, definition = tiny.parameters(), tiny.definition
    for parameters, message in [
        (Parameters({}, numbers.biases), "weights from 'Input' to 'Hidden' .* none"),
        (Parameters(numbers.weights, {}), "bias from 'Input' to 'Hidden'"),
        (
            Parameters(
                {**numbers.weights, ("Input", "Hidden"): np.ones((2, 4))},
                numbers.biases,
            ),
            r"must have the shape \(4, 2\), got \(2, 4\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            Network(definition, parameters=parameters, rngs=nnx.Rngs(0))


def refused(network, x, labels, message):
    """Checks that training the network raises an error, in each of the functions that begin a
    training.
    """
    optimizer = sj.Optimizer(network, rules.SGD(0.1))
    for use in (
        lambda: network.loss(x, labels),
        lambda: network.mean_loss(x, labels),
        lambda: sj.fit(network, optimizer, x, labels, log=lambda *_: pytest.fail()),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=message):
            use()


# Attributes of a file whose network trains no more, and what its layers then make of z.
UNTRAINED = [
    ({"deltaBoost_one": np.float32(30), "errorFunction": np.uint32(3)}, "DeltaBoost"),
    ({"deltaBoost_zero": np.float32(-2)}, "DeltaBoost zero must be 0 or more"),
    ({"layer2_activation": np.uint32(7), "errorFunction": np.uint32(3)}, "SoftMax"),
    ({"layer2_activation": np.uint32(7), "errorFunction": np.uint32(1)}, "SoftMax"),
    ({"layer2_activation": np.uint32(1), "errorFunction": np.uint32(2)}, "Tanh"),
    ({"layer2_activation": np.uint32(3), "errorFunction": np.uint32(4)}, "Linear"),
    (
        {"layer2_activation": np.uint32(7), "layer2_pDropout": np.float32(0.5)},
        "pDropout after SoftMax",
    ),
    ({"errorFunction": np.uint32(5)}, "Hinge needs a dense data set"),
    ({"layer1_pDropout": np.float32(1)}, "pDropout must be from 0 to below 1"),
    ({"denoising_p": np.float32(1.5), "bDenoising": np.uint32(1)}, "Denoising p"),
    ({"SMCE_oneTarget": np.float32(1.5)}, "oneTarget must be from 0 to 1"),
    ({"decay": np.float32(-1)}, "Decay"),
    ({"layer1_deltaNorm": np.float32(-1)}, "DeltaNorm"),
    ({"weight0_norm": np.float32(-1)}, "WeightNorm"),
]


@pytest.mark.parametrize(("attributes", "message"), UNTRAINED)
def test_a_network_that_cannot_be_trained_is_read_and_ranks(
    tmp_path, attributes, message
):
    path = networks.tiny(tmp_path / "net.nc")
    with netCDF4.Dataset(path, "a") as file:
        file.setncatts(attributes)
    network = dsstne.load_network(path)
    x = rows([1.0, 0, 1, 0], [0, 0, 0, 0])
    z = np.array([[2 * 0.880797 - 1, 2 * 0.731059 - 1, 1 - 2 * 1.611856], [0, 0, -1]])
    made = {
        1: np.tanh,
        3: lambda z: z,
        7: lambda z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True),
    }
    activation = int(attributes.get("layer2_activation", 0))
    expected = made.get(activation, sigmoid)(z)
    np.testing.assert_allclose(network(x, deterministic=True), z, atol=1e-5)
    units = network.values(x, "Output", deterministic=True)
    np.testing.assert_allclose(units, expected, atol=1e-5)
    if (attributes, message) in (UNTRAINED[0], UNTRAINED[2]):  # each is compiled
        found = sj.recommend(network, x, k=2, exclude=None)
        assert found.ids.tolist() == [[0, 1], [0, 1]]
        np.testing.assert_allclose(found.scores, expected[:, :2], atol=1e-5)
    refused(network, x, rows([0.0, 1, 0], [1, 0, 0]), message)
    # What is read is what is written.
    dsstne.save_network(tmp_path / "again.nc", network)
    again = load_parameters(tmp_path / "again.nc")[0]
    assert again == load_parameters(path)[0]


def test_inputs_of_one_data_set():
    """Forward they may share it; of different widths they may not."""
    inputs = [{"N": 3, "DataSet": "d"}, {"N": 3, "Kind": "Input", "DataSet": "d"}]
    network = made(*inputs, {"N": 2, "Source": ["Input0", "Input1"]})
    weights, x = network.parameters().weights, jnp.array([[1.0, 0, 2]])
    expected = x @ np.sum(list(weights.values()), axis=0)
    np.testing.assert_allclose(network({"d": x}), expected, rtol=1e-5)
    found = sj.recommend(network, {"d": x}, k=2, exclude=None)
    assert found.ids[0, 0] == np.argmax(expected)
    refused(network, {"d": x}, rows([0.0, 1]), "two inputs read the data set 'd'")
    with pytest.raises(ValueError, match="'d'.* differ in width"):
        made(inputs[0], {**inputs[1], "N": 4}, {"N": 2})


def test_a_network_without_outputs_only_has_units():
    network = made({"N": 4, "Sparse": True}, {"N": 2, "Kind": "Hidden"})
    numbers = network.parameters().weights["Input0", "Hidden1"]
    x = rows([1.0, 0, 2, 0], [0, 0, 0, 0])
    expected = sigmoid(np.array([numbers[0] + 2 * numbers[2], [0, 0]]))
    np.testing.assert_allclose(network.units(x, "Hidden1"), expected, rtol=1e-5)
    assert network.loss_rule is None
    for use in (
        lambda: network.num_items,
        lambda: network(x),
        lambda: network.top_k(x, 2),
        lambda: network.loss(x, x),
    ):
        with pytest.raises(ValueError, match="no layer of kind Output"):
            use()


def test_an_output_may_read_an_input_or_an_output():
    """`a = x W + b`, `c = a V + d` with losses of both; also the network of one weight."""
    network = made(
        {"Name": "x", "N": 3},
        {"Name": "a", "Kind": "Output", "N": 2, "Activation": "Tanh"},
        {"Name": "c", "Kind": "Output", "N": 4, "Activation": "Linear"},
        ErrorFunction="L2",
    )
    weights = network.parameters().weights
    x, y, z = (np.random.default_rng(0).normal(size=(5, n)) for n in (3, 2, 4))
    a = np.tanh(x @ weights["x", "a"])
    c = a @ weights["a", "c"]
    labels = {
        "a": CSR.from_scipy(scipy.sparse.csr_array(y)),
        "c": CSR.from_scipy(scipy.sparse.csr_array(z)),
    }
    given = {"x": jnp.float32(x)}
    loss, grads = nnx.value_and_grad(lambda network: network.loss(given, labels))(
        network
    )
    expected = (((a - y) ** 2).sum() + ((c - z) ** 2).sum()) / 2
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    delta = (a - y + (c - z) @ weights["a", "c"].T) * (1 - a**2)
    [slope] = [v[...] for _, v in nnx.to_flat_state(grads) if v[...].shape == (3, 2)]
    np.testing.assert_allclose(slope, x.T @ delta, rtol=1e-4, atol=1e-5)
    ids, _ = network.top_k(given, 1)  # of the first, as none is called Output
    assert ids[:, 0].tolist() == a.argmax(axis=1).tolist()
    with pytest.raises(ValueError, match="have the targets a, c: .* got one target"):
        network.loss(given, labels["a"])
    with pytest.raises(ValueError, match="targets has 4 columns"):
        network.loss(given, {"a": labels["c"], "c": labels["c"]})
    mean = network.mean_loss({"x": x.astype(np.float32)}, {"a": scipy.sparse.csr_array(y), "c": scipy.sparse.csr_array(z)}, batch_size=2)  # fmt: skip
    np.testing.assert_allclose(mean, expected / 5, rtol=1e-5)


LAYERS_OF_TWO_OUTPUTS = [
    {"Name": "x", "N": 40, "Sparse": True, "DataSet": "d"},
    {"Name": "h", "N": 16, "Activation": "Tanh"},
    {"Name": "i", "N": 8},
    {"Name": "o", "Kind": "Output", "N": 40, "DataSet": "d"},
    {"Name": "p", "Kind": "Output", "Source": "h", "N": 3, "DataSet": "e", "pDropout": 0.5},
]  # fmt: skip


def test_a_mesh_gives_the_same():
    """Two outputs; hidden layers are divided by their outputs, then by their inputs."""
    definition = Definition.from_json({"Layers": LAYERS_OF_TWO_OUTPUTS})
    rng = np.random.default_rng(0)
    data, labels = (scipy.sparse.csr_array(rng.random((20, n)) < 0.3) for n in (40, 3))

    def trained():
        network = Network(definition, rngs=nnx.Rngs(0))
        optimizer = sj.Optimizer(network, rules.Momentum(0.5, 0.5, weight_decay=0.01))
        targets = {"d": data, "e": labels}
        history = sj.fit(network, optimizer, data, targets, batch_size=8, num_epochs=2)
        variables = nnx.to_flat_state(nnx.state(network, nnx.Param))
        specs = {v[...].shape: v[...].sharding for _, v in variables}
        return history, network.parameters(), specs

    history, plain, _ = trained()
    with jax.set_mesh(sj.make_mesh(model=8)):
        meshed_history, meshed, specs = trained()
        assert specs[16, 8].spec == jax.P(None, "model")
        assert specs[8,].spec == jax.P("model")
    for one, other in zip(history, meshed_history, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
    for pair, array in plain.weights.items():
        np.testing.assert_allclose(meshed.weights[pair], array, rtol=1e-4, atol=1e-6)
        bias = plain.biases[pair]
        np.testing.assert_allclose(meshed.biases[pair], bias, rtol=1e-4, atol=1e-6)


def test_the_cifar_sample_trains():
    """With an eighth of its channels and hidden units."""
    sizes = {"input": (32, 32, 3), "output": (10,)}
    layers = [
        layer | {"N": size // 8} if isinstance(size := layer.get("N"), int) else layer
        for layer in networks.CIFAR["Layers"]
    ]
    narrow = Definition.from_json(networks.CIFAR | {"Layers": layers}, sizes)
    network = Network(narrow, rngs=nnx.Rngs(0))
    image = np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32)
    labels = scipy.sparse.csr_array(np.eye(10, dtype=bool)[3:4])
    before = network.parameters().weights
    [history] = sj.fit(
        network,
        sj.Optimizer(network, rules.Nesterov(0.025, 0.5, weight_decay=0.0001)),
        {"input": image},
        labels,
        batch_size=1,
        num_epochs=1,
    )
    assert np.isfinite(history["loss"])
    after = network.parameters().weights
    assert all((before[pair] != after[pair]).any() for pair in before)
    assert after["P3", "Hidden10"].shape == (3 * 3 * 12, 128)
