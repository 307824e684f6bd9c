"""DSSTNE's network files: reading and writing, also by netCDF4."""

import dataclasses

import dsstne_networks as networks
import h5py
import netCDF4
import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import DataError
from sparsejax.dsstne.definition import Definition, weights_of
from sparsejax.dsstne.network_files import (
    Normalization,
    Parameters,
    load_parameters,
    save_parameters,
)

# Every key that a network file can hold, with two sources, a skip and shared weights.
EVERYTHING = {
    "Name": "all",
    "Kind": "AutoEncoder",
    "ErrorFunction": "L2",
    "ShuffleIndices": False,
    "Denoising": {"p": 0.2},
    "SparsenessPenalty": {"p": 0.3, "beta": 2.5},
    "DeltaBoost": {"one": 2.0, "zero": 0.5},
    "ScaledMarginalCrossEntropy": {"oneTarget": 0.8, "zeroScale": 0.7},
    "LRN": {"k": 1.0, "n": 3, "alpha": 0.1, "beta": 0.6},
    "Maxout": {"k": 4},
    "Decay": 0.01,
    "Layers": [
        {"Name": "a", "N": [6, 6, 2], "DataSet": "pixels"},
        {"Name": "b", "Kind": "Input", "N": 5, "DataSet": "words", "Sparse": True},
        {
            "Name": "c",
            "Kind": "Hidden",
            "Source": "a",
            "Type": "Convolutional",
            "N": 3,
            "Kernel": [3, 3],
            "KernelStride": [1, 1],
            "Activation": "LRELU",
            "Slope": 0.1,
            "BatchNormalization": True,
        },
        {
            "Name": "p",
            "Kind": "Hidden",
            "Type": "Pooling",
            "Function": "Max",
            "Kernel": [2, 2],
            "KernelStride": [2, 2],
        },
        {
            "Name": "h",
            "Kind": "Hidden",
            "Source": ["p", "b"],
            "N": 4,
            "Activation": "ELU",
            "ELUAlpha": 0.7,
            "pDropout": 0.25,
            "WeightNorm": 3.0,
            "DeltaNorm": 2.0,
            "Sparse": True,
            "SparsenessPenalty": {"p": 0.1, "beta": 1.0},
            "WeightInit": {"Scheme": "Gaussian", "Scale": 0.1, "Bias": -0.5},
        },
        {"Name": "i", "Kind": "Hidden", "N": 4, "Skip": "h", "Activation": "Tanh"},
        {
            "Name": "o",
            "N": 5,
            "DataSet": "words",
            "SharedWeights": {
                "InputLayer": "i",
                "SourceInputLayer": "b",
                "SourceOutputLayer": "h",
                "Transposed": True,
            },
        },
    ],
}


def numbers(network, seed=0):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def biases(layer):
        return layer.size[-1] if layer.type == "Convolutional" else layer.units

    return Parameters(
        {pair: drawn(*shape) for pair, shape in weights_of(network).items()},
        {
            (source.layer, layer.name): drawn(biases(layer))
            for layer in network.layers
            if layer.has_weights
            for source in layer.sources
        },
        {
            layer.name: Normalization(*(drawn(biases(layer)) for _ in range(4)))
            for layer in network.layers
            if layer.batch_normalization
        },
    )


def test_a_file_of_dsstne(tmp_path):
    network, parameters = load_parameters(networks.tiny(tmp_path / "net.nc"))
    assert [layer.size for layer in network.layers] == [(4,), (2,), (3,)]
    assert network.error_function == "CrossEntropy" and network.name == "tiny"
    assert network.layer("Input").sparse and not network.layer("Hidden").sparse
    assert network.layer("Input").dataset == "gl_input"
    assert network.margins.one_target == 0.9  # not the float32 that is next to it
    np.testing.assert_array_equal(
        parameters.weights["Input", "Hidden"], [[1, 0], [0, 1], [1, 1], [-1, 0]]
    )
    np.testing.assert_array_equal(parameters.biases["Hidden", "Output"], [-1, -1, 1])


@pytest.mark.parametrize("locked", [False, True])
def test_everything_goes_there_and_back(tmp_path, locked):
    network = Definition.from_json(EVERYTHING)
    if locked:
        *others, last = network.layers
        source = dataclasses.replace(last.sources[0], locked=True)
        last = dataclasses.replace(last, sources=(source,))
        network = dataclasses.replace(network, layers=(*others, last))
    given = numbers(network)
    save_parameters(tmp_path / "net.nc", network, given)
    read, found = load_parameters(tmp_path / "net.nc")
    assert read == network
    for name in ("weights", "biases"):
        ours, theirs = getattr(given, name), getattr(found, name)
        assert ours.keys() == theirs.keys()
        for pair, array in ours.items():
            np.testing.assert_array_equal(theirs[pair], array)
    ours, theirs = given.normalizations["c"], found.normalizations["c"]
    for array, other in zip(
        dataclasses.astuple(ours), dataclasses.astuple(theirs), strict=True
    ):
        np.testing.assert_array_equal(array, other)


def test_what_is_written_has_names_and_types_of_dsstne(tmp_path):
    network, parameters = load_parameters(networks.tiny(tmp_path / "theirs.nc"))
    save_parameters(tmp_path / "ours.nc", network, parameters)
    with (
        netCDF4.Dataset(tmp_path / "ours.nc") as ours,
        netCDF4.Dataset(tmp_path / "theirs.nc") as theirs,
    ):
        for name in theirs.ncattrs():
            value, wanted = ours.getncattr(name), theirs.getncattr(name)
            assert type(value) is type(wanted), name
            assert value == wanted, name
        more = set(ours.ncattrs()) - set(theirs.ncattrs())
        assert more == {f"weight{i}_{k}" for i in (0, 1) for k in ("bLocked", "norm")}
        assert ours.getncattr("weight0_height") == 4
        assert ours.variables.keys() == theirs.variables.keys()
        for name, variable in theirs.variables.items():
            assert ours[name].dtype == variable.dtype == np.float32
            np.testing.assert_array_equal(ours[name][:], variable[:])


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("layers", np.uint32(4), "no attribute layer3_name, so it holds no network"),
        ("layers", np.uint32(2**31), "at most 10,000"),
        ("kind", np.uint32(7), "kind is 7; known are 0 to 1"),
        ("layer1_Nx", np.uint32(3), "weight0_bias has 2 numbers.* need 3"),
        ("layer1_dimensions", np.uint32(9), "9 dimensions; expected 1 to 4"),
        ("layer1_source0", "Hdden", "no weights from 'Hdden' to 'Hidden'"),
        ("layer1_pDropout", np.float32(np.nan), "layer1_pDropout is nan"),
        (
            "layer1_kernelX",
            np.uint32(0),
            "layer1_kernelX is 0; expected a number from 1",
        ),
        ("layer1_kernelStrideX", np.uint32(0), "layer1_kernelStrideX is 0; expected"),
        ("layer2_kind", np.uint32(3), "Target"),
        ("layer2_activation", np.uint32(8), "RELUMax"),
    ],
)
def test_wrong_attributes(tmp_path, attribute, value, message):
    path = networks.tiny(tmp_path / "net.nc")
    with netCDF4.Dataset(path, "a") as file:
        file.setncattr(attribute, value)
    with pytest.raises((DataError, NotImplementedError), match=message) as error:
        load_parameters(path)
    assert "net.nc" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("layer3_kernelStrideY", np.uint32(0), "layer3_kernelStrideY is 0; expected"),
        (
            "layer2_kernelY",
            np.uint32(0),
            "layer2_kernelY is 0; expected a number from 1",
        ),
        ("LRN_n", np.int32(17), "LocalResponseNormalization n must be from 1 to 16"),
        ("LRN_k", np.float32(0), "LocalResponseNormalization k must be 1e-05 or more"),
        ("LRN_beta", np.float32(0), "LocalResponseNormalization beta must be 0.01"),
    ],
)
def test_wrong_windows(tmp_path, attribute, value, message):
    network = Definition.from_json(
        {
            "Layers": [
                *EVERYTHING["Layers"][:4],
                {"Kind": "Hidden", "Type": "Pooling", "Function": "LRN"},
                {"Kind": "Output", "N": 2},
            ],
            "LRN": {"n": 16, "k": 1e-5, "beta": 0.01},
        }
    )
    path = tmp_path / "net.nc"
    save_parameters(path, network, numbers(network))
    assert load_parameters(path)[0] == network
    with netCDF4.Dataset(path, "a") as file:
        file.setncattr(attribute, value)
    with pytest.raises(DataError, match=message) as error:
        load_parameters(path)
    assert str(error.value).startswith(str(path))


def test_an_empty_text_is_one_for_netcdf_too(tmp_path):
    definition = Definition.from_json({"Layers": [{"N": 2}, {"N": 2}]})
    save_parameters(tmp_path / "net.nc", definition, numbers(definition))
    with netCDF4.Dataset(tmp_path / "net.nc") as file:
        assert file.getncattr("layer0_dataSet") == file.getncattr("name") == ""


def test_wrong_numbers(tmp_path):
    path = networks.tiny(tmp_path / "net.nc")
    network, parameters = load_parameters(path)
    with netCDF4.Dataset(path, "a") as file:
        file["weight1_bias"][1] = np.inf
    with pytest.raises(DataError, match=r"weight1_bias\[1\] is inf"):
        load_parameters(path)
    for weights, message in [
        ({}, "weight0_weights, from 'Input' to 'Hidden', is missing"),
        (
            {**parameters.weights, ("Input", "Hidden"): np.ones((2, 4))},
            "expected finite numbers 4 x 2, got 2 x 4",
        ),
    ]:
        changed = Parameters(weights, parameters.biases)
        with pytest.raises(ValueError, match=message):
            save_parameters(tmp_path / "new.nc", network, changed)
        assert not (tmp_path / "new.nc").exists()


def test_damaged_files_are_refused(tmp_path):
    whole = networks.tiny(tmp_path / "net.nc").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.nc"
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for at in rng.integers(0, len(damaged), 8):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_parameters(path)
        except (DataError, NotImplementedError):
            refused += 1
    assert refused > 50


def test_a_function_is_needed_only_where_a_layer_pools(tmp_path):
    """DSSTNE reads `poolingfunction` of pooling layers alone."""
    path = tmp_path / "net.nc"
    networks.tiny(path)
    wanted = sj.dsstne.load_network(path)
    with h5py.File(path, "a") as file:
        names = [name for name in file.attrs if name.endswith("_poolingfunction")]
        assert len(names) == 3
        for name in names:
            del file.attrs[name]
    assert sj.dsstne.load_network(path).definition == wanted.definition
    with h5py.File(path, "a") as file:
        file.attrs["layer1_type"] = np.uint32(2)
    with pytest.raises(sj.DataError, match="layer1_poolingfunction"):
        sj.dsstne.load_network(path)
