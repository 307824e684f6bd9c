"""NetworkConfig: conversion to JSON and back, and errors that name the wrong value."""

import json
import math

import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import sparsejax as sj
from sparsejax.nn.config import (
    HiddenConfig,
    InputConfig,
    LinearConfig,
    NetworkConfig,
    OutputConfig,
    temperature_for,
)

RNGS = nnx.Rngs(0)


@given(
    hidden=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(
        lambda h: [*h, h[0]]
    ),
    activation=st.sampled_from(["relu", "tanh"]),
    normalize=st.booleans(),
    rate=st.sampled_from([0.0, 0.5]),
    temperature=st.none() | st.just(0.1),
    tied=st.booleans(),
    options=st.dictionaries(
        st.sampled_from(["label_smoothing", "z_loss"]), st.floats(0, 1)
    ),
    precision=st.sampled_from([None, "high"]),
)
def test_json_round_trip(
    hidden, activation, normalize, rate, temperature, tied, options, precision
):
    config = NetworkConfig.autoencoder(
        hidden,
        activation=activation,
        normalize=normalize,
        corruption=rate,
        dropout=rate,
        temperature=temperature,
        tied=tied,
        loss="softmax_cross_entropy",
        loss_options=options,
        precision=precision,
    )
    again = NetworkConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config and hash(again) == hash(config)


def test_written_by_hand():
    config = NetworkConfig.from_json(
        {
            "version": 1,
            "loss": {"name": "scaled_marginal_cross_entropy", "one_scale": 30},
            "layers": [
                {"kind": "input", "corruption": 0.2},
                {"kind": "hidden", "name": "code", "source": "input", "size": 8},
                {"kind": "output", "source": "code", "temperature": 1, "tied": "code"},
            ],
        }
    )
    assert config.layers == (
        InputConfig(corruption=0.2),
        HiddenConfig(name="code", source="input", size=8),
        OutputConfig(source="code", temperature=1.0, tied="code"),
    )
    assert config.loss_options == (("one_scale", 30),)


def document(**changes) -> dict:
    layers = [
        {"kind": "input"},
        {"kind": "hidden", "name": "a", "size": 8},
        {"kind": "hidden", "name": "b", "size": 4},
        {"kind": "output"},
    ]
    for place, change in changes.pop("layer", {}).items():
        layers[place] = layers[place] | change
    return {"version": 1, "layers": layers} | changes


def test_flags_of_a_loss_survive_json():
    options = {"ignore_zeros": True}
    config = NetworkConfig.autoencoder((3,), loss="l2_loss", loss_options=options)
    again = NetworkConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, '"version" is 2; this release reads version 1'),
        ({"precision": "tf32"}, '"high" or "default", got \'tf32\''),
        ({"colour": 1}, 'the network: unknown key "colour"'),
        ({"layers": []}, '"layers" must be a list'),
        ({"layers": [{"kind": "input"}, {"kind": "output"}]}, "got input, output"),
        ({"loss": 3}, '"loss" must be a name'),
        ({"loss": {"name": "l2_loss", "x": "y"}}, 'the loss: "x" must be int or float'),
        ({"loss": "l3_loss"}, "there is no loss 'l3_loss'"),
        ({"loss": {"name": "l2_loss", "margin": 1}}, "l2_loss has no option 'margin'"),
        (
            {"loss": {"name": "softmax_cross_entropy", "z_loss": -1}},
            "z_loss must be finite",
        ),
        (
            {"layer": {2: {"activation": "sine"}}},
            "layer 'b': unknown activation 'sine'",
        ),
        ({"layer": {1: {"kind": "conv"}}}, r"layer 1 \('a'\): \"kind\" is 'conv'"),
        ({"layer": {1: {"units": 3}}}, r"layer 1 \('a'\): unknown key \"units\""),
        ({"layer": {1: {"size": "8"}}}, r'"size" must be int, got \'8\''),
        ({"layer": {1: {"size": True}}}, '"size" must be int, got True'),
        ({"layer": {3: {"dtype": "int8"}}}, "'output': dtype is \"float32\" or"),
        ({"layer": {2: {"dtype": "int8"}}}, "'b': dtype is \"float32\" or"),
        ({"layer": {1: {"kind": ["hidden"]}}}, r"\"kind\" is \['hidden'\], not one"),
        (
            {"layer": {3: {"temperature": math.inf}}},
            "temperature. must be a finite number",
        ),
        ({"layer": {1: {"size": 0}}}, "layer 'a': size 0 is not positive"),
        ({"layer": {1: {"dropout": 1.0}}}, r"layer 'a': dropout 1.0 is not in \[0, 1"),
        ({"layer": {2: {"name": "a"}}}, "two layers are called 'a'"),
        ({"layer": {2: {"source": "input"}}}, "layer 'b' reads 'input'; only a chain"),
        ({"layer": {2: {"source": ["a", "input"]}}}, "several sources .*only a chain"),
        ({"layer": {3: {"temperature": -1}}}, "'output': temperature -1.0 is not posi"),
        ({"layer": {3: {"tied": "b"}}}, "tied to 'b'; only the kernel of 'a'"),
        ({"layer": {3: {"tied": "a"}}}, "'b' must have 8 units too, not 4"),
    ],
)
def test_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        NetworkConfig.from_json(document(**changes))


def test_missing_key_and_bad_json(tmp_path):
    broken = document()
    del broken["layers"][1]["size"]
    with pytest.raises(ValueError, match=r"layer 1 \('a'\): \"size\" is missing"):
        NetworkConfig.from_json(broken)
    path = tmp_path / "net.json"
    path.write_text('{"version": 1,\n "layers": [}')
    with pytest.raises(ValueError, match=r"net.json: not JSON: .* line 2"):
        NetworkConfig.load(path)


def test_the_temperature_falls_with_the_number_of_items():
    sizes = [1, 294, 5_000, 10_000, 20_000, 40_000, 10_000_000]
    found = [temperature_for(size)[0] for size in sizes]
    assert found == [0.18, 0.18, 0.18, 0.153, 0.127, 0.1, 0.1]


def test_for_data():
    sizes = 6_040, 3_706, 800_000
    linear, about_linear = LinearConfig.for_data(*sizes)
    temperature, about_temperature = temperature_for(3_706)
    config, why = NetworkConfig.for_data(*sizes)
    assert config == NetworkConfig.autoencoder(temperature=temperature, linear=linear)
    assert why == f"{about_temperature}\n{about_linear}"
    # What is given is neither chosen nor explained.
    given = {"hidden": (8,), "temperature": None, "linear": None}
    assert NetworkConfig.for_data(*sizes, **given) == (
        NetworkConfig.autoencoder(**given),
        "",
    )


def test_for_data_takes_data_or_its_sizes():
    data, _ = sj.datasets.msweb().train.split(0.8, seed=0)
    sizes = data.num_rows, data.num_features, data.num_entries
    assert NetworkConfig.for_data(data) == NetworkConfig.for_data(*sizes)
    with pytest.raises(TypeError, match="three numbers"):
        NetworkConfig.for_data(5, 3)
    with pytest.raises(TypeError, match="own sizes"):
        NetworkConfig.for_data(data, items=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkConfig.autoencoder(loss="nope"), "no loss 'nope'"),
        (
            lambda: NetworkConfig.autoencoder(loss_options={"margin": 1}),
            "no option 'margin'",
        ),
        (lambda: NetworkConfig.autoencoder(activation="sine"), "activation 'sine'"),
        (lambda: NetworkConfig.autoencoder(precision="tf32"), "got 'tf32'"),  # pyrefly: ignore
        (lambda: NetworkConfig.autoencoder(param_dtype="int8"), "got 'int8'"),
        (lambda: sj.DLRMConfig(combiner="max"), "combiner is one of"),  # pyrefly: ignore
        (lambda: sj.DCNConfig(dtype="int8"), "dtype is one of"),  # pyrefly: ignore
        (lambda: sj.embeddings.FeatureConfig("t", combiner="max"), "combiner is"),  # pyrefly: ignore
        (
            lambda: sj.embeddings.TableConfig(3, 2, placement="disk"),  # pyrefly: ignore
            "placement is one of",
        ),
        (lambda: sj.SparseLinear(3, 2, combiner="max", rngs=RNGS), "combiner is"),  # pyrefly: ignore
        (lambda: sj.SparseLinear(3, 2, implementation="cpu", rngs=RNGS), "got 'cpu'"),  # pyrefly: ignore
        (lambda: sj.SparseOutput(3, 2, implementation="cpu", rngs=RNGS), "got 'cpu'"),  # pyrefly: ignore
        (lambda: sj.SparseOutput(3, 2, precision="tf32", rngs=RNGS), "got 'tf32'"),  # pyrefly: ignore
    ],
)
@pytest.mark.usefixtures("wrong_types")
def test_a_name_that_does_not_exist_is_refused_where_it_is_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()
