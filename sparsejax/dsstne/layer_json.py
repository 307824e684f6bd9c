"""Conversion of a layer from and to JSON. Defaults are the defaults of DSSTNE's parser."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.dsstne.keys import Keys
from sparsejax.dsstne.layer_definition import (
    ACTIVATIONS,
    FUNCTIONS,
    KINDS,
    MAX_LAYERS,
    SCHEMES,
    TYPES,
    WINDOWS,
    Activation,
    Connection,
    LayerDefinition,
    Sharing,
    SparsenessPenalty,
    WeightInit,
    has_window,
    label_of,
)

_ANY_LAYER = ("Kind", "Type", "Name", "Sparse", "N", "pDropout")
_CURVES = ("Activation", "RELUSlope", "ELUAlpha", "SELULambda")
_WEIGHTS = ("WeightNorm", "DeltaNorm", "WeightInit", "SharedWeights")
_WINDOW = ("Kernel", "KernelStride", "Function")
_READING_LAYER = ("Source", *_WINDOW, "Skip", *_CURVES, *_WEIGHTS)
_KEYS_OF_KIND = {
    "Input": (*_ANY_LAYER, "DataSet"),
    "Hidden": (*_ANY_LAYER, *_READING_LAYER, "BatchNormalization", "SparsenessPenalty"),
    "Output": (*_ANY_LAYER, *_READING_LAYER, "DataSet"),
}
_LAYER_KEYS = {
    key: ("Slope",) if key == "RELUSlope" else ()
    for key in dict.fromkeys(itertools.chain(*_KEYS_OF_KIND.values()))
}


def drafts_of(network: Keys, data: Mapping) -> dict[str, LayerDefinition]:
    """The layers by name. A size that depends on other layers has only the number of channels."""
    layers = network.values.get("Layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError('the network: "Layers" must be a list of layers')
    if len(layers) > MAX_LAYERS:
        raise ValueError(
            f'the network: "Layers" has {len(layers):,} layers; at most {MAX_LAYERS:,} '
            "are read"
        )
    shape = Activation(
        slope=network.number("RELUSlope", 1.0),
        elu_alpha=network.number("ELUAlpha", 1.0),
        selu_lambda=network.number("SELULambda", 1.050701),
    )
    denoised = network.inner("Denoising", ("p",)).number("p", 0.0) > 0
    drafts: dict[str, LayerDefinition] = {}
    before = None
    for i, layer in enumerate(layers):
        by_place = "Input" if i == 0 else "Output" if i == len(layers) - 1 else "Hidden"
        draft = _draft(i, layer, by_place, before, shape, denoised, data)
        if draft.name in drafts:
            raise ValueError(f"two layers are called {draft.name!r}")
        drafts[draft.name] = draft
        before = draft.name
    return drafts


def _draft(
    i: int,
    document: Any,
    by_place: str,
    before: str | None,
    shape: Activation,
    denoised: bool,
    data: Mapping[str, Sequence[int]],
) -> LayerDefinition:
    keys = Keys(document, _LAYER_KEYS, f"layer {i}")
    kind = keys.choice("Kind", KINDS, by_place)
    name = keys.text("Name", f"{kind}{i}")
    keys.label = f"layer {name!r}"
    for key in keys.values:
        if key not in _KEYS_OF_KIND[kind]:
            homes = [k for k in KINDS if key in _KEYS_OF_KIND[k]]
            raise ValueError(
                f'{keys.label}: "{keys.written[key]}" is for layers of kind '
                f"{' or '.join(homes)}; this one is {kind}"
            )
    type = keys.choice("Type", TYPES, "FullyConnected")
    _check_keys_of_type(keys, kind, type)
    dataset = keys.text("DataSet", "")
    sparse = keys.flag("Sparse", False)
    common = {
        "name": name,
        "kind": kind,
        "type": type,
        "size": _draft_size(keys, kind, type, dataset, data),
        "dataset": dataset,
        "sparse": sparse,
        "dropout": keys.number("pDropout", 0.0),
    }
    if kind == "Input":
        return LayerDefinition(**common, denoising=sparse and denoised)
    sources = keys.texts("Source")
    if sources is None:
        if before is None:
            raise ValueError(
                f'{keys.label}: it is the first layer, so its "Source" must be given'
            )
        sources = (before,)
    init = keys.inner("WeightInit", ("Scheme", "Scale", "Bias"))
    kernel = keys.wholes("Kernel", 3) or (1,)
    stride = keys.wholes("KernelStride", 3) or (1,)
    if len(stride) > len(kernel):
        raise ValueError(
            f'{keys.label}: "KernelStride" has {len(stride)} numbers, "Kernel" '
            f"{len(kernel)}"
        )
    # As in DSSTNE, a bool is ignored here.
    if isinstance(keys.values.get("SparsenessPenalty"), bool):
        del keys.values["SparsenessPenalty"]
    activation = None
    if type != "Pooling":
        activation = Activation(
            name=keys.choice("Activation", ACTIVATIONS, "Sigmoid"),
            slope=keys.number("RELUSlope", shape.slope),
            elu_alpha=keys.number("ELUAlpha", shape.elu_alpha),
            selu_lambda=keys.number("SELULambda", shape.selu_lambda),
        )
    return LayerDefinition(
        **common,
        sources=_connections(keys, sources),
        skips=keys.texts("Skip") or (),
        activation=activation,
        weight_init=WeightInit(
            scheme=init.choice("Scheme", SCHEMES, "Xavier"),
            scale=init.number("Scale", 1.0),
            bias=init.number("Bias", 0.0),
        ),
        delta_norm=keys.number("DeltaNorm", 0.0),
        batch_normalization=keys.flag("BatchNormalization", False),
        sparseness_penalty=read_penalty(keys),
        function=keys.choice("Function", FUNCTIONS, None),
        kernel=kernel,
        stride=(*stride, *[1] * (len(kernel) - len(stride))),
        padding=(0,) * len(kernel),
    )


def _check_keys_of_type(keys: Keys, kind: str, type: str) -> None:
    """Raises ValueError if a layer of this type has keys that would have no effect."""
    if type == "Pooling":
        if "Function" not in keys.values:
            raise ValueError(
                f'{keys.label}: a layer of Type Pooling needs a "Function": one of '
                f"{', '.join(FUNCTIONS)}"
            )
        function = keys.choice("Function", FUNCTIONS, None)
        useless = [
            "pDropout",
            "WeightInit",
            "WeightNorm",
            "SharedWeights",
            "BatchNormalization",
            *(["DeltaNorm"] if kind == "Hidden" else []),
            *([] if function in WINDOWS else ["Kernel", "KernelStride"]),
        ]
        # "Linear" is allowed, because these layers have no activation.
        if keys.choice("Activation", ACTIVATIONS, "Linear") != "Linear":
            useless.append("Activation")
        what = f"a pooling layer ({function})"
    else:
        useless = ["Function"]
        what = f"a layer of Type {type}"
        if type == "FullyConnected":
            useless += ["Kernel", "KernelStride"]
    if kind == "Input":
        return
    for key in useless:
        value = keys.values.get(key)
        if value is not None and value not in (0, False):
            raise ValueError(
                f'{keys.label}: "{keys.written[key]}" has no effect in {what}; leave '
                "it out"
            )


def _draft_size(
    keys: Keys, kind: str, type: str, dataset: str, data: Mapping
) -> tuple[int, ...]:
    value = keys.values.get("N")
    if isinstance(value, str) and value.lower() == "auto":
        if kind == "Hidden":
            raise ValueError(
                f'{keys.label}: "N" is "auto", the size of a data set, and a hidden '
                "layer has none; give a number"
            )
        if dataset not in data:
            known = ", ".join(map(repr, data)) or "none"
            raise ValueError(
                f'{keys.label}: "N" is "auto", but there is no data set {dataset!r}; '
                f"there are: {known}"
            )
        return tuple(data[dataset])
    if value is None and type == "Pooling" and kind != "Input":
        return ()
    if value is None:
        raise ValueError(f'{keys.label}: "N", the number of units, is missing')
    size = keys.wholes("N", 4)
    assert size is not None
    if kind == "Hidden" and type == "Convolutional" and len(size) > 1:
        raise ValueError(
            f'{keys.label}: "N" of a hidden convolutional layer is its number of '
            f"channels, one number, got {list(size)}"
        )
    return size


def _connections(keys: Keys, sources: Sequence[str]) -> tuple[Connection, ...]:
    norm = keys.number("WeightNorm", 0.0)
    shares = keys.values.get("SharedWeights", [])
    known = ("InputLayer", "SourceInputLayer", "SourceOutputLayer", "Transposed")
    shared: dict[str, Sharing] = {}
    for share in shares if isinstance(shares, list) else [shares]:
        inner = Keys(share, known, f'{keys.label}, "SharedWeights"')
        for key in known[:3]:
            if not inner.text(key, ""):
                raise ValueError(f'{inner.label}: "{key}" is missing')
        source = inner.text("InputLayer", "")
        if source not in sources or source in shared:
            raise ValueError(
                f'{inner.label}: "InputLayer" must be another one of its sources '
                f"({', '.join(map(repr, sources))}) each time, got {source!r}"
            )
        shared[source] = Sharing(
            source_input=inner.text("SourceInputLayer", ""),
            source_output=inner.text("SourceOutputLayer", ""),
            transposed=inner.flag("Transposed", False),
        )
    return tuple(
        Connection(layer=source, weight_norm=norm, shared=shared.get(source))
        for source in sources
    )


def read_penalty(keys: Keys) -> SparsenessPenalty | None:
    """The sparseness penalty of a layer or of the network; None if it has no such key."""
    if "SparsenessPenalty" not in keys.values:
        return None
    inner = keys.inner("SparsenessPenalty", ("p", "beta"))
    return SparsenessPenalty(p=inner.number("p", 0.0), beta=inner.number("beta", 0.0))


def layer_to_json(layer: LayerDefinition, *, denoised: bool) -> dict[str, Any]:
    """Converts a layer to a JSON object; `denoised` is whether the network has denoising."""
    document: dict[str, Any] = {"Name": layer.name, "Kind": layer.kind}
    document["Type"] = layer.type
    channels = layer.type == "Convolutional" and layer.kind == "Hidden"
    document["N"] = layer.size[-1] if channels else _one_or_all(layer.size)
    if layer.dataset:
        document["DataSet"] = layer.dataset
    # In a network with denoising, "Sparse" of an input means that denoising applies to it.
    if layer.denoising if denoised and layer.kind == "Input" else layer.sparse:
        document["Sparse"] = True
    if layer.dropout:
        document["pDropout"] = layer.dropout
    if layer.kind == "Input":
        return document
    document["Source"] = _one_or_all([source.layer for source in layer.sources])
    if layer.skips:
        document["Skip"] = _one_or_all(layer.skips)
    if layer.function is not None:
        document["Function"] = layer.function
    if has_window(layer):
        document["Kernel"] = list(layer.kernel)
        document["KernelStride"] = list(layer.stride)
    if layer.activation is not None:
        document["Activation"] = layer.activation.name
        document["RELUSlope"] = layer.activation.slope
        document["ELUAlpha"] = layer.activation.elu_alpha
        document["SELULambda"] = layer.activation.selu_lambda
    if layer.weight_init != WeightInit():
        init = layer.weight_init
        document["WeightInit"] = {
            "Scheme": init.scheme,
            "Scale": init.scale,
            "Bias": init.bias,
        }
    if layer.delta_norm:
        document["DeltaNorm"] = layer.delta_norm
    if layer.batch_normalization:
        document["BatchNormalization"] = True
    if layer.sparseness_penalty is not None:
        document["SparsenessPenalty"] = dataclasses.asdict(layer.sparseness_penalty)
    document |= _connections_to_json(layer)
    return document


def _connections_to_json(layer: LayerDefinition) -> dict[str, Any]:
    document: dict[str, Any] = {}
    norms = {source.weight_norm for source in layer.sources}
    if len(norms) > 1 or any(source.locked for source in layer.sources):
        raise ValueError(
            f"{label_of(layer)}: JSON has no key for locked weights, nor for a norm of "
            "each source; use a network file (.nc)"
        )
    if norms != {0.0}:
        document["WeightNorm"] = norms.pop()
    shares = [
        {
            "InputLayer": source.layer,
            "SourceInputLayer": source.shared.source_input,
            "SourceOutputLayer": source.shared.source_output,
            "Transposed": source.shared.transposed,
        }
        for source in layer.sources
        if source.shared is not None
    ]
    if shares:
        document["SharedWeights"] = shares
    return document


def _one_or_all(values: Sequence) -> Any:
    return values[0] if len(values) == 1 else list(values)
