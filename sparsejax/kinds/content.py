"""Item content in models of items and models of histories."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.data.files.names import FeatureNames
from sparsejax.data.reading.sources import num_columns
from sparsejax.data.sets.item_features import ItemFeatures
from sparsejax.mesh.layout import to_host
from sparsejax.nn.item_content import ContentSizes, ItemContent
from sparsejax.nn.layers import SparseLinear, SparseOutput


def content_of(model: nnx.Module | None) -> ItemContent | None:
    """The content module in a model's output layer, or None."""
    return getattr(getattr(model, "output", None), "content", None)


def fitting(features: ItemFeatures, items: Any) -> ItemFeatures:
    """The content of a data set's items, in the order of the items.

    Args:
      features: content, matched by item name, or by position if the data has no names.
      items: the data, whose features are the items.

    Raises:
      TypeError: `features` is not an `ItemFeatures`.
      ValueError: no item has content, all content is empty, or the numbers of items differ.
    """
    if not isinstance(features, ItemFeatures):
        raise TypeError(
            "item_features are what sparsejax.read_item_features reads, got "
            f"{type(features).__name__}"
        )
    if isinstance(items, FeatureNames):
        features = features.align(items)
        if features.num_empty == features.num_items:
            raise ValueError(
                "the content says nothing of any item, as "
                + "; ".join(f"{n!r} is {text}" for n, text in features.columns.items())
            )
        return features
    count = num_columns("data", items)
    if features.num_items != count:
        raise ValueError(
            f"the data have {count:,} items without names, but there is content of "
            f"{features.num_items:,}; give content of each, in their order"
        )
    return features


def sizes_of(features: ItemFeatures) -> ContentSizes:
    return ContentSizes.of(*_parts(features))


def sizes_among(features: ItemFeatures, items: int) -> ContentSizes:
    """Sizes of the content of `items` items, over which `features` are spread evenly.

    Raises:
      ValueError: the content has more items than the vocabulary.
    """
    if features.num_items > items:
        raise ValueError(
            f"there is content of {features.num_items:,} items, but only {items:,} items; "
            "items that are in no event count, too"
        )
    lengths = np.zeros(items, np.int64)
    place = np.arange(features.num_items) * items // max(1, features.num_items)
    tags, vectors = _parts(features)
    if tags is not None:
        lengths[place] = np.diff(tags.indptr)
        shape = items, len(features.tag_names)
        ends = np.append(0, np.cumsum(lengths))
        tags = scipy.sparse.csr_array((tags.data, tags.indices, ends), shape=shape)
    return ContentSizes.of(tags, vectors)


def check_same_sizes(features: ItemFeatures, sizes: ContentSizes) -> None:
    """Raises ValueError if content has other numbers of tags or vectors than the model was made
    for.
    """
    given = sizes_of(features)
    found, wanted = ((each.tags, each.vectors) for each in (given, sizes))
    if found != wanted:
        raise ValueError(
            f"item_features has {found[0]:,} tags and vectors of {found[1]:,} numbers, but "
            f"the model was made for {wanted[0]:,} and {wanted[1]:,}; give what build was given"
        )


def set_content(model: nnx.Module, features: ItemFeatures, *, new: bool) -> None:
    """Sets the item content of a model.

    Args:
      model: a model made for content of these sizes.
      features: content of its items, in their order.
      new: whether the model is not trained yet.
    """
    content = content_of(model)
    assert content is not None
    content.set_to(*_parts(features))
    if new:
        content.scale_start()


def count_entries(model: nnx.Module, counts: np.ndarray) -> None:
    """Sets, in a model with content, the number of training entries of each item.

    The stored number of an item never decreases, so that training on a later part of the data does
    not reset an item.
    """
    if (content := content_of(model)) is not None:
        known = to_host(content.entries[...])[: len(counts)]
        content.set_entries(np.maximum(known, counts))


def check_counted(model: Any) -> None:
    """Raises NotImplementedError for a model with content: items of scanned data are not
    counted.
    """
    if content_of(model) is not None:
        raise NotImplementedError(
            "a model with content of its items has to know how many entries each item has, "
            "and scanned data is not counted; read it into memory"
        )


def copied(model: nnx.Module) -> Any:
    """A copy of a model that shares its weight arrays."""
    return nnx.merge(*nnx.split(model), copy=True)


def without_content(model: nnx.Module) -> Any:
    """A copy whose item vectors have only their own learned part, `a(n) R`, without content."""
    model = copied(model)
    content = content_of(model)
    assert content is not None
    for kernel in (content.tag_kernel, content.vector_kernel):
        if kernel is not None:
            kernel.set_value(jnp.zeros_like(kernel[...]))
    return model


def finished(model: Any) -> Any:
    """A copy of a model with content whose item vectors are computed once, for many calls.

    A model without content is returned unchanged.
    """
    if content_of(model) is None:
        return model
    model = copied(model)
    finish_vectors(model)
    return model


def finish_vectors(model: nnx.Module) -> None:
    """Replaces the output kernel of a model by the item vectors computed from content, in
    place.
    """
    layers = [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, SparseLinear | SparseOutput)
    ]
    for output in layers:
        if not isinstance(output, SparseOutput) or output.content is None:
            continue
        before = output.kernel
        kernel = nnx.Param(_vectors(output), **before.get_metadata())
        output.content = None
        for layer in layers:
            if layer.kernel is before:
                layer.kernel = kernel


@nnx.jit
def _vectors(output: SparseOutput) -> jax.Array:
    return output.vectors()


def _parts(features: ItemFeatures):
    """Tags and vectors of items. Stored zeros of tags are removed, because they are no content."""
    if not len(features.tag_names):
        return None, features.vectors
    tags = features.tags
    if not tags.data.all():
        tags = tags.copy()
        tags.eliminate_zeros()
    return tags, features.vectors
