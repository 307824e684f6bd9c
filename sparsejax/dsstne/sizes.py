"""Sizes of convolutional and pooling layers, computed from the layers that they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sparsejax.dsstne.layer_definition import (
    WINDOWS,
    LayerDefinition,
    has_window,
    label_of,
    padded_to,
    times,
)


def sized(
    draft: LayerDefinition, layers: Mapping[str, LayerDefinition]
) -> LayerDefinition:
    """Completes a layer by the size that follows from its sources."""
    if draft.kind == "Input" or draft.type == "FullyConnected":
        return draft
    padding = draft.padding
    if draft.kind == "Hidden" and has_window(draft):
        # DSSTNE adds padding only to hidden layers.
        source = layers[draft.sources[0].layer]
        sizes = padded_to(source.size, len(draft.kernel))
        padding = tuple(map(_padding, sizes, draft.kernel, draft.stride))
    draft = dataclasses.replace(draft, padding=padding)
    given = draft.size
    if draft.type == "Convolutional" and draft.kind == "Hidden":
        return dataclasses.replace(draft, size=_size_of(draft, layers))
    if given == ():
        return dataclasses.replace(draft, size=_size_of(draft, layers))
    return draft  # `Definition` checks it


def check_size(layer: LayerDefinition, layers: Mapping[str, LayerDefinition]) -> None:
    """Raises ValueError if a layer's size does not follow from the layers that it reads."""
    for skip in layer.skips:
        if layers[skip].units != layer.units:
            raise ValueError(
                f"{label_of(layer)} adds the units of {skip!r}, which has "
                f"{layers[skip].units:,}; it has {layer.units:,} itself"
            )
    if layer.kind == "Input" or layer.type == "FullyConnected":
        return
    size = _size_of(layer, layers)
    if size != layer.size:
        raise ValueError(
            f"{label_of(layer)} is {times(layer.size)}, but its sources make it "
            f"{times(size)}"
        )


def _size_of(
    layer: LayerDefinition, layers: Mapping[str, LayerDefinition]
) -> tuple[int, ...]:
    """The size of a convolutional or pooling layer, from the sizes of its sources."""
    sources = [layers[source.layer] for source in layer.sources]
    whole = layer.type == "Pooling" and layer.function not in WINDOWS
    if whole and layer.function != "LRN":
        for source in sources:
            if source.size != sources[0].size:
                raise ValueError(
                    f"{label_of(layer)} ({layer.function}) reads layers of one size, but "
                    f"{sources[0].name!r} is {times(sources[0].size)} and "
                    f"{source.name!r} {times(source.size)}"
                )
    if layer.function in ("DotProduct", "Cosine"):
        if len(sources) < 2:
            raise ValueError(
                f"{label_of(layer)} ({layer.function}) compares its first source with "
                "the others: it needs two sources or more"
            )
        return (len(sources) - 1,)
    sizes = [source.size if whole else _window(layer, source) for source in sources]
    for source, size in zip(sources, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"{label_of(layer)} would be {times(sizes[0])} by {sources[0].name!r} "
                f"and {times(size)} by {source.name!r}"
            )
    return sizes[0]


def _window(layer: LayerDefinition, source: LayerDefinition) -> tuple[int, ...]:
    """The size of a layer whose window moves over its source."""
    dimensions = len(layer.kernel)
    if len(source.size) > dimensions + 1:
        raise ValueError(
            f"{label_of(layer)}: a kernel of {dimensions} dimensions reads these and one "
            f"of channels, but its source {source.name!r} is {times(source.size)}"
        )
    made = []
    places = padded_to(source.size, dimensions)
    windows = zip(places, layer.kernel, layer.stride, layer.padding, strict=False)
    for width, kernel, stride, padding in windows:
        # `size` is that of a convolution's result, and `reserved` the size that DSSTNE allocates.
        size = (width + 2 * padding - kernel) // stride + 1
        reserved = size
        if layer.kind == "Hidden":
            strided = width if stride == 1 else (width - kernel) // stride + 1
            reserved = 1 if width <= kernel else strided
        if size != reserved or size < 1:
            raise ValueError(
                f"{label_of(layer)}: a kernel of {kernel} with stride {stride} and "
                f"padding {padding} makes {max(size, 0)} of the {width} units of "
                f"{source.name!r}, where DSSTNE would need {max(reserved, 1)}; use an "
                "odd kernel that is narrower than its source, or a larger stride"
            )
        made.append(size)
    channels = source.size[dimensions:]
    if layer.type == "Convolutional":
        # In a draft, `size` contains only the number of channels.
        channels = layer.size[-1:]
    return (*made, *channels)


def _padding(width: int, kernel: int, stride: int) -> int:
    if width < kernel:
        return (kernel - width + 1) // 2
    return kernel // 2 if stride == 1 else 0
