"""Adds new items to a predictor, with vectors computed from their content."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sparsejax.callers import warn_caller
from sparsejax.data.files.names import Names, find_names, quoted, spelled_like
from sparsejax.data.sets import vocabulary
from sparsejax.data.sets.item_features import ItemFeatures
from sparsejax.mesh.layout import padded_rows, without_mesh
from sparsejax.predictors.signature import LABEL, Array, NewItems, Signature
from sparsejax.sparse import unit_rows

TAGS = "tags"  # the list of tag names in a file
# Vectors with a smaller norm are divided by this norm, as in the model's layer.
_MIN_NORM = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """Parts to compute vectors of new items: kernels, and the tags that have rows in them.

    Attributes:
      stated: description of the content in the signature.
      known: content without items, with all known tags.
      kernels: kernels of tags and of vectors, as `NewItems.arrays` describes them.
    """

    stated: NewItems
    known: ItemFeatures
    kernels: Sequence[np.ndarray]

    @classmethod
    def of(
        cls,
        signature: Signature,
        vocabularies: Mapping[str, Names],
        kernels: Iterable[np.ndarray],
    ) -> Content | None:
        """Reads the content parts of a file; None if it has none.

        Raises:
          ValueError: the number of tags differs from the number of rows in the signature.
        """
        stated, names = signature.new_items, vocabularies.get(TAGS)
        if stated is None:  # then the list of tag names belongs to a column of clicks
            return None
        count = 0 if stated.tag_kernel is None else stated.tag_kernel.shape[0]
        if (0 if names is None else len(names)) != count:
            raise ValueError(f"{LABEL} has {count:,} tags, but there are other names")
        none = np.empty(0, np.dtypes.StringDType())
        vectors = None
        if stated.vector_kernel is not None:
            width = stated.vector_kernel.shape[0]
            vectors = np.zeros((0, width), stated.vectors)
        known = ItemFeatures(
            item_names=none,
            tag_names=none if names is None else names,
            tags=scipy.sparse.csr_array((0, count), dtype=np.float32),
            vectors=vectors,
            numbers=stated.numbers,
        )
        return cls(stated, known, [*kernels])

    def vectors_of(self, features: ItemFeatures, dtype: Any) -> np.ndarray:
        """Computes vectors of new items, as `ItemContent` does for items without entries.

        Args:
          features: content of the items, with only known tags.
          dtype: dtype of the items' vectors.
        """
        kernels = iter(self.kernels)
        made = np.zeros((features.num_items, self.kernels[0].shape[1]), np.float32)
        if self.stated.tag_kernel is not None:
            made += (unit_rows(features.tags) @ next(kernels)).astype(np.float32)
        if features.vectors is not None:
            both = features.vectors, next(kernels)
            if dtype == jnp.bfloat16:
                both = tuple(each.astype(dtype) for each in both)
            first, second = (each.astype(np.float32) for each in both)
            made += first @ second
        return made.astype(dtype)


def chosen(content: Content, features: ItemFeatures, known: Names) -> ItemFeatures:
    """Selects the content of new items, converted to the known tags and vectors.

    Args:
      content: content of the predictor.
      features: content of items, some of which may be known.
      known: names of the predictor's items.

    Raises:
      TypeError: `features` is not an `ItemFeatures`.
      ValueError: no item is new, no new item has known content, or `ItemFeatures.like` finds that
          the content has other columns.
    """
    if not isinstance(features, ItemFeatures):
        raise TypeError(
            "add_items takes what sparsejax.read_item_features reads, got "
            f"{type(features).__name__}"
        )
    names = spelled_like(features.item_names, known)
    new = names[find_names(names, known) < 0]
    if not len(new):
        raise ValueError(
            f"the predictor has all of these {len(names):,} items; give the content of new "
            "ones"
        )
    # The names are spelled as in the predictor's vocabulary.
    features = dataclasses.replace(features, item_names=names)
    some = features.align(new).like(content.known)
    empty = some.is_empty
    if empty.all():
        raise ValueError(
            f"nothing is known of {len(new):,} new items ({quoted(new)}): give their tags or "
            "vectors"
        )
    if empty.any():
        warn_caller(
            f"{int(empty.sum()):,} of {len(new):,} new items were left out, as nothing is "
            f"known of them: {quoted(new[empty])}"
        )
        some = some.align(new[~empty])
    return some


def extended(
    signature: Signature,
    weights: Sequence[jax.Array],
    content: Content,
    features: ItemFeatures,
    known: Names,
) -> tuple[Signature, list[jax.Array], Names]:
    """Adds items to a predictor; returns its new signature, weights and names.

    Args:
      signature: signature of the predictor.
      weights: weights of the predictor.
      content: content of the predictor.
      features: content of the new items, from `chosen`.
      known: names of the predictor's items.
    """
    assert signature.layer is not None
    kernel, *others = (weights[at] for at in signature.layer_places)
    count, total = features.num_items, len(known) + features.num_items
    vectors = content.vectors_of(features, kernel.dtype)
    # The layer computes norms of vectors that are rounded to the dtype of the products, too.
    norms = np.maximum(np.linalg.norm(vectors.astype(np.float32), axis=1), _MIN_NORM)
    factors = np.ones(count, np.float32)
    if content.stated.temperature is not None:
        factors = (1 / (norms * content.stated.temperature)).astype(np.float32)
    if more := kernel.shape[1] - vectors.shape[1]:
        # The linear part has no scores for a new item. If the kernel contains the linear part, it
        # has no separate scale.
        scaled = vectors.astype(np.float32) * factors[:, None]
        vectors = np.pad(scaled, ((0, 0), (0, more))).astype(kernel.dtype)
        factors = np.ones(count, np.float32)
    added = [vectors]
    if signature.layer.bias is not None:
        bias = weights[signature.layer.bias]
        mean = np.mean(np.asarray(bias[: len(known)], np.float32))
        added.append(np.full(count, mean, bias.dtype))
    if signature.layer.scale is not None:
        added.append(factors)
    with without_mesh():
        longer = [
            _longer(array, rows.astype(array.dtype), len(known), padded_rows(total))
            for array, rows in zip([kernel, *others], added, strict=True)
        ]
    own = len(signature.program_weights)
    place = itertools.count(own)
    layer = dataclasses.replace(
        signature.layer,
        kernel=next(place),
        bias=None if signature.layer.bias is None else next(place),
        scale=None if signature.layer.scale is None else next(place),
    )
    *inputs, exclude = signature.inputs
    exclude = dataclasses.replace(exclude, shape=(total,))
    arrays = tuple(Array.of(array, None) for array in longer)
    made = dataclasses.replace(
        signature,
        inputs=(*inputs, exclude),
        weights=(*signature.program_weights, *arrays),
        layer=layer,
        added=signature.added + count,
    )
    names = vocabulary.appended(known, features.item_names)
    return made, [*weights[:own], *longer], names


@functools.partial(jax.jit, static_argnums=(2, 3))
def _longer(array: jax.Array, rows: jax.Array, known: int, room: int) -> jax.Array:
    """The first `known` rows of an array, then the new rows, then zeros up to `room` rows."""
    rest = room - known - len(rows)
    joined = jnp.concatenate([array[:known], rows])
    return jnp.pad(joined, ((0, rest), *((0, 0),) * (array.ndim - 1)))
