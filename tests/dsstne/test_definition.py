"""DSSTNE's network JSON: sizes, defaults, round trips, and errors."""

import copy
import dataclasses
import json
import random
import time
from typing import Any

import dsstne_networks as networks
import pytest

from sparsejax.dsstne.definition import (
    Definition,
    DeltaBoost,
    ScaledMargins,
    weights_of,
)
from sparsejax.dsstne.keys import parse
from sparsejax.dsstne.layer_definition import (
    Activation,
    Connection,
    LayerDefinition,
    LocalResponseNormalization,
    Sharing,
    SparsenessPenalty,
    WeightInit,
)

MOVIELENS = """
{
    "Version" : 0.7,
    "Name" : "AE",
    "Kind" : "FeedForward",  // plain
    "SparsenessPenalty" : { "p" : 0.5, "beta" : 2.0 },
    "ShuffleIndices" : false,
    "Denoising" : { "p" : 0.2 },
    "ScaledMarginalCrossEntropy" : {
        "oneTarget" : 1.0, "zeroTarget" : 0.0, "oneScale" : 1.0, "zeroScale" : 1.0
    },
    "Layers" : [
        { "Name" : "Input", "Kind" : "Input", "N" : "auto", "DataSet" : "gl_input", "Sparse" : true },
        { "Name" : "Hidden", "Kind" : "Hidden", "Type" : "FullyConnected", "N" : 128, "Activation" : "Sigmoid", "Sparse" : true },
        /* as many
           as films */
        { "Name" : "Output", "Kind" : "Output", "Type" : "FullyConnected", "DataSet" : "gl_output", "N" : "auto", "Activation" : "Sigmoid", "Sparse" : true }
    ],
    "ErrorFunction" : "ScaledMarginalCrossEntropy"
}
"""


def network(*layers, data=None, **keys):
    return Definition.from_json({"Layers": list(layers), **keys}, data)


def three(*, data=None, top=None, **hidden):
    layers = {"N": 4}, {"N": 2, **hidden}, {"N": 4}
    return network(*layers, data=data, **(top or {}))


def test_the_movielens_sample():
    data = {"gl_input": [9856], "gl_output": (9856,)}
    ae = Definition.from_json(parse(MOVIELENS), data)
    assert ae.margins == ScaledMargins(one_target=1, zero_target=0)
    assert (ae.denoising, ae.shuffle_indices, ae.name) == (0.2, False, "AE")
    source, hidden, output = ae.layers
    assert source.denoising and source.activation is None and source.size == (9856,)
    assert hidden.sources == (Connection(layer="Input"),)
    assert hidden.weight_init == WeightInit(scheme="Xavier", scale=1.0, bias=0.0)
    assert ae.penalty_of(hidden) == SparsenessPenalty(p=0.5, beta=2.0)
    assert ae.penalty_of(output) is None
    assert output.dataset == "gl_output"
    assert Definition.from_json(json.loads(json.dumps(ae.to_json()))) == ae


def test_the_sizes_of_the_cifar_sample():
    data = {"input": (32, 32, 3), "output": (10,)}
    cifar = Definition.from_json(networks.CIFAR, data)
    sizes = {layer.name: layer.size for layer in cifar.layers}
    assert sizes["C1"] == sizes["C1a"] == (32, 32, 128)
    assert sizes["P1"] == sizes["C2"] == sizes["C2a"] == (15, 15, 128)
    assert (sizes["P2"], sizes["C3a"]) == ((6, 6, 128), (6, 6, 96))
    assert (sizes["P3"], sizes["Hidden10"]) == ((3, 3, 96), (1024,))
    assert sizes["Output"] == (10,)
    assert cifar.layer("C3").padding == (2, 2)
    assert cifar.layer("P1").padding == (0, 0)
    assert Definition.from_json(cifar.to_json(), data) == cifar


@pytest.mark.parametrize(
    ("width", "kernel", "stride", "size", "padding"),
    [
        (32, 7, 1, 32, 3),
        (15, 4, 2, 6, 0),
        (4, 4, 2, 1, 0),
        (3, 5, 1, 1, 1),  # narrower than the kernel
        (2, 5, 2, 1, 2),
        (1, 1, 1, 1, 0),
    ],
)
def test_windows(width, kernel, stride, size, padding):
    made = network(
        {"N": [width, 3]},
        {
            "Type": "Convolutional",
            "N": 6,
            "Kernel": kernel,
            "KernelStride": stride,
        },
        {"N": 2},
    ).layer("Hidden1")
    assert (made.size, made.padding) == ((size, 6), (padding,))


@pytest.mark.parametrize(("width", "kernel"), [(32, 4), (2, 5), (5, 5)])
def test_windows_that_dsstne_cannot_make(width, kernel):
    layer = {"Type": "Convolutional", "N": 6, "Kernel": kernel}
    with pytest.raises(ValueError, match="'Hidden1': a kernel of .* DSSTNE would"):
        network({"N": [width, 3]}, layer, {"N": 2})


def test_defaults_are_those_of_the_parser():
    plain = three()
    assert plain == three(top={"Version": 0.9, "Kind": "feedforward"})
    assert [layer.name for layer in plain.layers] == ["Input0", "Hidden1", "Output2"]
    assert plain.error_function == "CrossEntropy" and plain.shuffle_indices
    assert plain.margins == ScaledMargins(one_target=0.9, zero_target=0.1)
    assert plain.lrn == LocalResponseNormalization(k=2, n=5, alpha=1e-4, beta=0.75)
    assert plain.delta_boost == DeltaBoost(one=1, zero=1)
    assert plain.layer("Hidden1").activation == Activation(
        name="Sigmoid", slope=1.0, elu_alpha=1.0, selu_lambda=1.050701
    )


def test_keys_and_choices_are_case_insensitive_and_have_aliases():
    made = three(
        top={
            "NAME": "x",
            "slope": 0.25,
            "lrn": {"K": 1},
            "errorfunction": "cross entropy",
            "DataScaledMarginalCrossEntropy": {"onescale": 30},
        },
        ACTIVATION="leakyRectifiedLinear",
        eluALPHA=2,
        weightinit={"SCHEME": "gaussian", "scale": 0.01},
    )
    assert made.lrn.k == 1 and made.margins.one_scale == 30
    activation = made.layer("Hidden1").activation
    assert activation == Activation(name="LRELU", slope=0.25, elu_alpha=2.0)


EVERYTHING = {
    "Name": "everything",
    "Kind": "AutoEncoder",
    "LRN": {"k": 1, "n": 3, "alpha": 0.01, "beta": 0.5},
    "Maxout": {"k": 3},
    "SparsenessPenalty": {"p": 0.2, "beta": 1.5},
    "Denoising": {"p": 0.3},
    "DeltaBoost": {"one": 30, "zero": 0.5},
    "ScaledMarginalCrossEntropy": {"oneTarget": 0.8, "zeroTarget": 0.2},
    "ShuffleIndices": 0,
    "SELULambda": 1.2,
    "Decay": 0.125,
    "WeightsData": "start.nc",
    "ErrorFunction": "L2Hinge",
    "Layers": [
        {"Name": "A", "Kind": "Input", "N": 8, "DataSet": "a", "Sparse": True},
        {"Name": "B", "Kind": "Input", "N": [2, 2, 2], "pDropout": 0.25},
        {
            "Name": "H1",
            "Kind": "Hidden",
            "Source": ["A", "B"],
            "N": 6,
            "BatchNormalization": True,
            "SparsenessPenalty": {"beta": 3},
            "Sparse": True,
            "WeightNorm": 2,
            "DeltaNorm": 0.5,
            "Activation": "SELU",
        },
        {
            "Name": "H2",
            "Kind": "Hidden",
            "Source": "H1",
            "Skip": ["H1"],
            "N": 6,
            "SparsenessPenalty": True,
        },
        {
            "Name": "M",
            "Kind": "Hidden",
            "Type": "Pooling",
            "Function": "Maxout",
            "Source": ["H1", "H2"],
            "Activation": "Linear",
        },
        {"Name": "L", "Type": "Pooling", "Function": "LRN", "Source": "B"},
        {
            "Name": "C",
            "Kind": "Output",
            "Type": "Pooling",
            "Function": "Cosine",
            "Source": ["M", "H1", "H2"],
            "DataSet": "c",
        },
        {
            "Name": "O",
            "Kind": "Output",
            "N": 8,
            "Source": "H1",
            "SharedWeights": [
                {
                    "InputLayer": "H1",
                    "SourceInputLayer": "A",
                    "SourceOutputLayer": "H1",
                    "Transposed": True,
                }
            ],
        },
    ],
}


def test_all_keys_go_there_and_back():
    made = Definition.from_json(EVERYTHING)
    assert Definition.from_json(made.to_json()) == made
    assert made.penalty_of(made.layer("H1")) == SparsenessPenalty(p=0.2, beta=3.0)
    assert made.layer("M").size == (6,) and made.layer("L").size == (2, 2, 2)
    assert made.layer("C").size == (2,)
    assert made.layer("O").sources[0].shared == Sharing(
        source_input="A", source_output="H1", transposed=True
    )
    assert {c.weight_norm for c in made.layer("H1").sources} == {2.0}
    changed = dataclasses.replace(made, name="other")
    assert changed.to_json() != made.to_json()


def test_layers_may_read_later_ones_and_hidden_or_output_layers_may_lack():
    made = network(
        {"N": 3},
        {"Kind": "Output", "N": 3, "Source": "late"},
        {"Name": "late", "Kind": "Hidden", "N": 5, "Source": "Input0"},
    )
    assert [layer.name for layer in made.in_order] == ["Input0", "late", "Output1"]
    assert len(network({"N": 1}, {"N": 1}).layers) == 2
    encoder = network({"N": 3}, {"Kind": "Hidden", "N": 5, "Activation": "tanh"})
    assert encoder.of_kind("Output") == ()


REFUSED = [
    ({"top": {"Layrs": []}}, r'"Layrs"; the nearest known key is "Layers"'),
    ({"WeightInits": {}}, r"'Hidden1'|layer 1: unknown key .* \"WeightInit\""),
    ({"top": {"WeightData": "x"}}, 'nearest known key is "WeightsData"'),
    ({"Recurrent": True}, '"Recurrent" is not supported: DSSTNE'),
    ({"top": {"L1Penalty": {}}}, "lambda1"),
    ({"Kind": "Target"}, "use Output"),
    ({"Activation": "RELUMax"}, "no formula"),
    ({"Activation": "Maxout"}, "Function"),
    ({"Activation": "foo"}, "one of Sigmoid"),
    ({"Type": "Pooling", "Function": "LCN"}, "no formula"),
    ({"Type": "Pooling"}, '"Function"'),
    ({"Type": "Pooling", "Function": "Maxout", "Kernel": 2}, '"Kernel" has no effect'),
    ({"Type": "Pooling", "Function": "Maxout", "DeltaNorm": 2}, '"DeltaNorm" has no'),
    ({"Type": "Pooling", "Function": "LRN", "pDropout": 0.5}, "no effect"),
    ({"Type": "Pooling", "Function": "LRN", "Activation": "tanh"}, "no effect"),
    ({"Type": "Pooling", "Function": "Cosine", "N": 1}, "two sources or more"),
    ({"Kernel": 3}, "no effect"),
    ({"DataSet": "x"}, "for layers of kind Input or Output; this one is Hidden"),
    ({"Source": "Inputs"}, "'Inputs', which is no layer; the nearest name is 'Input0'"),
    ({"Source": "Output2"}, "circle: 'Hidden1' reads 'Output2' reads 'Hidden1'|circle"),
    ({"Source": "Hidden1"}, "circle"),
    ({"Source": ["Input0", "Input0"]}, "twice"),
    ({"Source": []}, "name of a layer"),
    ({"Skip": "Input0"}, "adds the units of 'Input0', which has 4"),
    ({"N": "auto"}, "hidden"),
    ({"N": 0}, "whole number from 1, or a list of 1 to 4"),
    ({"N": 2.5}, "whole number"),
    ({"N": True}, "whole number"),
    ({"N": [2**20, 2**20]}, "in all"),
    ({"N": 1e300}, "whole number"),
    ({"pDropout": 1}, r"pDropout must be from 0 to below 1, got 1"),
    ({"pDropout": "a"}, "must be a number"),
    ({"pDropout": 10**400}, "finite"),
    ({"BatchNormalization": "yes"}, "true or false"),
    ({"WeightInit": 3}, "must be a JSON object"),
    ({"n": 2}, '"N" and "n" are the same key|same key'),
    ({"Name": "Input0"}, "two layers are called 'Input0'"),
    ({"top": {"Version": 0.6}}, "0.7"),
    ({"top": {"ErrorFunction": "SMCE"}}, "one of L1"),
    ({"top": {"Denoising": {"p": 1.0}}}, "below 1"),
    ({"top": {"Denoising": {"q": 1.0}}}, 'nearest known key is "p"'),
    (
        {
            "SharedWeights": {
                "InputLayer": "Input0",
                "SourceInputLayer": "Hidden1",
                "SourceOutputLayer": "Output2",
            }
        },
        "which are 2 x 4; it needs 4 x 2",
    ),
    (
        {
            "SharedWeights": {
                "InputLayer": "Output2",
                "SourceInputLayer": "Input0",
                "SourceOutputLayer": "Hidden1",
            }
        },
        "another one of its sources",
    ),
    ({"SharedWeights": {"Transpose": True}}, 'is "Transposed"'),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_refused(keys, message):
    with pytest.raises((ValueError, NotImplementedError), match=message) as raised:
        three(**keys)
    assert "\n" not in str(raised.value)


def test_more_that_is_refused():
    inputs = [{"Kind": "Input", "N": 2} for _ in range(5)]
    names = [f"Input{i}" for i in range(5)]
    with pytest.raises(ValueError, match="5 sources; DSSTNE has up to 4"):
        network(*inputs, {"N": 2, "Source": names})
    best = {"Type": "Pooling", "Function": "Maxout", "Source": names}
    assert network(*inputs, best).layer("Output5").size == (2,)
    with pytest.raises(ValueError, match="of one size"):
        network({"N": 3}, *inputs[1:], best)
    with pytest.raises(ValueError, match="no layer of kind Input"):
        Definition(layers=())
    with pytest.raises(ValueError, match="only layers of kind Input"):
        network({"N": 2})
    with pytest.raises(ValueError, match='"N" of a hidden convolutional'):
        three(Type="Convolutional", N=[2, 2])
    with pytest.raises(ValueError, match="is 5, but its sources make it 1"):
        network(
            {"N": 2},
            {"Kind": "Hidden", "N": 2},
            {
                "Type": "Pooling",
                "Function": "DotProduct",
                "Source": ["Input0", "Hidden1"],
                "N": 5,
            },
        )


def test_data_that_do_not_fit():
    layers = {"N": 4, "DataSet": "a"}, {"N": "auto", "DataSet": "b"}
    with pytest.raises(ValueError, match="no data set 'b'; there are: 'a'"):
        network(*layers, data={"a": (4,)})
    with pytest.raises(ValueError, match="data set 'a' is 5, wider than .* which is 4"):
        network(*layers, data={"a": (5,), "b": (3,)})
    assert network(*layers, data={"a": (3,), "b": (3,)}).layer("Output1").size == (3,)


def test_json_has_no_key_for_locked_weights():
    made = three()
    locked = dataclasses.replace(
        made.layer("Hidden1"), sources=(Connection(layer="Input0", locked=True),)
    )
    made = dataclasses.replace(made, layers=(made.layers[0], locked, made.layers[2]))
    with pytest.raises(ValueError, match="'Hidden1': JSON has no key for locked"):
        made.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n'a': 1}", "line 2 column 1"),
        ('{"a": 1 /* forgotten }', "comment that begins in line 1 has no end"),
        ("{}\n /*/", "comment that begins in line 2 has no end"),
        ('// c\n/* d\n */ {"a": }', "line 3"),
        ("[" * 100_000, "too deep"),
        ("", "line 1"),
    ],
)
def test_text_that_is_not_json(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_long_texts_and_many_layers_take_linear_time():
    """Quadratic time would be a minute for each."""
    began = time.process_time()
    with pytest.raises(ValueError, match="that begins in line 2 has no end"):
        parse("{}\n" + "/*a" * 10_000)
    assert parse("/* a */" * 10_000 + "{}") == {}
    made = network(*[{"N": 1} for _ in range(5_000)])
    assert made.in_order == made.layers
    assert len(weights_of(made)) == 4_999
    assert time.process_time() - began < 10
    with pytest.raises(ValueError, match="10,001 layers; at most 10,000"):
        network(*[{"N": 1}] * 10_001)


def test_comments_in_strings_stay():
    assert parse('{"a": "// \\" /* x */" /* y " */}') == {"a": '// " /* x */'}


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "network.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"Layers": []}).encode())
    with pytest.raises(ValueError, match=r"network\.json: the network: \"Layers\""):
        Definition.load(path)
    path.write_bytes(b"\xff{}")
    with pytest.raises(ValueError, match=r"network\.json: "):
        Definition.load(path)
    path.write_text(json.dumps(EVERYTHING))
    assert Definition.load(path) == Definition.from_json(EVERYTHING)


def test_layers_that_are_made_by_hand_are_checked():
    source = LayerDefinition(name="a", kind="Input", size=(4,))
    hidden = LayerDefinition(
        name="b",
        type="Pooling",
        function="LRN",
        size=(3,),
        sources=(Connection(layer="a"),),
    )
    with pytest.raises(ValueError, match="'b' is 3, but its sources make it 4"):
        Definition(layers=(source, hidden))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride": (0,)}, "'b': KernelStride must be 1 to 3 numbers from 1"),
        ({"kernel": (0,)}, "'b': Kernel must be 1 to 3 numbers from 1, .* got 0"),
        ({"kernel": (2, 2)}, "'b': KernelStride must be .* as many as Kernel has"),
        ({"kernel": (), "stride": ()}, "'b': Kernel must be .* got none"),
        ({"padding": (-1,)}, "'b': padding must be 1 to 3 numbers from 0"),
    ],
)
def test_windows_that_are_made_by_hand_are_checked(changes, message):
    source = LayerDefinition(name="a", kind="Input", size=(4,))
    pool = LayerDefinition(
        name="b",
        type="Pooling",
        function="Max",
        size=(2,),
        kernel=(2,),
        stride=(2,),
        sources=(Connection(layer="a"),),
    )
    assert Definition(layers=(source, pool)).layer("b") == pool
    with pytest.raises(ValueError, match=message):
        Definition(layers=(source, dataclasses.replace(pool, **changes)))


def test_the_numbers_of_lrn_are_those_of_cudnn():
    lrn = {"Type": "Pooling", "Function": "LRN"}
    layers = {"N": [4, 3]}, {"Kind": "Hidden", **lrn}, {"Kind": "Output", "N": 2}
    for wrong in ({"n": 17}, {"k": 1e-6}, {"beta": 0.001}):
        [key] = wrong
        with pytest.raises(ValueError, match=f"LocalResponseNormalization {key} must"):
            network(*layers, LRN=wrong)
        assert three(top={"LRN": wrong}).lrn != LocalResponseNormalization()
    assert network(*layers, LRN={"n": 16, "k": 1e-5, "beta": 0.01}).lrn.n == 16


ODD = [
    *(None, True, 0, -1, 2, 1.5, 1e308, 10**30, float("nan"), "", "x\n", "auto"),
    *("Input", "Hidden", "Output", "Pooling", [], [1, 2, 3], ["h", "h"], {}, {"p": 1}),
]  # fmt: skip
SMALL: dict[str, Any] = {
    "Layers": [
        {"Name": "a", "N": 4, "DataSet": "a"},
        {
            "Name": "h",
            "N": 4,
            "Skip": "a",
            "SharedWeights": {"InputLayer": "a", "SourceInputLayer": "h", "SourceOutputLayer": "o", "Transposed": True},
        },
        {"Name": "o", "N": 4, "WeightInit": {"Scheme": "Gaussian", "Scale": 2}},
    ],
    "DeltaBoost": {"one": 1, "zero": 2},
}  # fmt: skip


def places(node):
    """All pairs `(container, key)` in a JSON value."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys if isinstance(node, dict | list) else ():
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def test_random_values_and_keys():
    """Whatever is in it, it is read, or one line says what is wrong."""
    rng, refused = random.Random(0), 0
    data = {"input": (32, 32, 3), "output": (10,)}
    for _ in range(400):
        changed = copy.deepcopy(rng.choice([SMALL, networks.CIFAR]))
        for _ in range(rng.randint(1, 3)):
            node, key = rng.choice(list(places(changed)) or [(changed, "Layers")])
            kind = rng.random()
            if kind < 0.6:
                node[key] = copy.deepcopy(rng.choice(ODD))
            elif kind < 0.8 and isinstance(node, dict):
                node[rng.choice(["Kind", "n", "Type", "x\n"])] = node.get(key)
            elif key in node or isinstance(node, list):
                del node[key]
        try:
            Definition.from_json(changed, data)
        except (ValueError, NotImplementedError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert 100 < refused < 400
