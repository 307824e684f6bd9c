"""Convolution and pooling. Units are `[channel][z][y][x]`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.dsstne.layer_definition import (
    LayerDefinition,
    LocalResponseNormalization,
)

_NORM_EPS = 1e-8


def convolved(
    layer: LayerDefinition,
    before: LayerDefinition,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """The sums of a convolutional layer, `[batch, units]`.

    Args:
      layer: definition of the layer, with the window.
      before: definition of the source.
      x: values of the source, `[batch, its units]`.
      kernel: the weights, whose shape is that of `weight_shape`.
      bias: one number for each channel.
    """
    dimensions = len(layer.kernel)
    places = "DHW"[-dimensions:]
    found = lax.conv_general_dilated(
        _image(x, before.size, dimensions),
        kernel,
        window_strides=tuple(reversed(layer.stride)),
        padding=_padding(layer),
        dimension_numbers=(f"NC{places}", f"OI{places}", f"NC{places}"),
        precision=lax.Precision.HIGHEST,
    )
    return _flat(found + bias.reshape(1, -1, *[1] * dimensions))


def pooled(
    layer: LayerDefinition,
    lrn: LocalResponseNormalization,
    sources: list[tuple[LayerDefinition, jax.Array]],
) -> jax.Array:
    """The values of a pooling layer, computed from its sources: `[batch, units]`.

    Args:
      layer: definition of the layer, with the function and, if the function needs one, the window.
      lrn: settings of the function LRN.
      sources: the sources with their values, `[batch, its units]` each.
    """
    arrays = [array for _, array in sources]
    function = layer.function
    if function == "Maxout":
        return functools.reduce(jnp.maximum, arrays)
    if function in ("DotProduct", "Cosine"):
        first, *others = arrays
        products = [jnp.sum(first * other, axis=-1) for other in others]
        if function == "Cosine":
            lengths = [_length(array) + _NORM_EPS for array in arrays]
            products = [
                product / (lengths[0] * length)
                for product, length in zip(products, lengths[1:], strict=True)
            ]
        return jnp.stack(products, axis=-1)
    if function == "LRN":
        return sum(
            (_normalised(before, lrn, array) for before, array in sources),
            start=jnp.zeros((), jnp.float32),
        )
    return sum(
        (_window(layer, before, array) for before, array in sources),
        start=jnp.zeros((), jnp.float32),
    )


def _length(x: jax.Array) -> jax.Array:
    """The L2 norm of each row, whose derivative at 0 is defined as 0."""
    square = jnp.sum(jnp.square(x), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _normalised(
    before: LayerDefinition, lrn: LocalResponseNormalization, x: jax.Array
) -> jax.Array:
    """Local response normalization of `x` over neighbouring channels."""
    image = _image(x, before.size, len(before.size) - 1)
    window = (1, lrn.n, *[1] * (image.ndim - 2))
    behind = (lrn.n - 1) // 2
    padding = [(0, 0)] * image.ndim
    padding[1] = (behind, lrn.n - behind - 1)
    squares = lax.reduce_window(
        jnp.square(image), 0.0, lax.add, window, (1,) * image.ndim, padding
    )
    return _flat(image * (lrn.k + lrn.alpha / lrn.n * squares) ** -lrn.beta)


def _window(layer: LayerDefinition, before: LayerDefinition, x: jax.Array) -> jax.Array:
    """The maximum or mean of the units in each window, without padding."""
    image = _image(x, before.size, len(layer.kernel))
    window = (1, 1, *reversed(layer.kernel))
    strides = (1, 1, *reversed(layer.stride))
    padding = [(0, 0), (0, 0), *_padding(layer)]
    if layer.function == "Max":
        return _flat(
            lax.reduce_window(image, -jnp.inf, lax.max, window, strides, padding)
        )

    def add(array):
        return lax.reduce_window(array, 0.0, lax.add, window, strides, padding)

    return _flat(add(image) / add(jnp.ones_like(image)))


def _image(x: jax.Array, size: tuple[int, ...], dimensions: int) -> jax.Array:
    """Reshapes units to `[batch, channels, z, y, x]`, with only `dimensions` of the last axes."""
    sizes = (*size, *[1] * (dimensions + 1 - len(size)))
    return x.reshape(x.shape[0], sizes[dimensions], *reversed(sizes[:dimensions]))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _padding(layer: LayerDefinition) -> list[tuple[int, int]]:
    return [(padding, padding) for padding in reversed(layer.padding)]
