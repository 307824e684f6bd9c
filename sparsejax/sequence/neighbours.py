"""A model wrapper that adds scores of content similarity to the scores of a model of histories."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.mesh.layout import mesh_is_set, padded_rows, to_host
from sparsejax.nn.item_content import ItemContent, with_vectors
from sparsejax.nn.layers import SparseOutput
from sparsejax.sequence.config import check_number
from sparsejax.sequence.events import EventColumns
from sparsejax.sequence.model import Ids, SequenceModel, Times
from sparsejax.sparse import unit_rows

# Content vectors with more than 1024 numbers are projected at random to 512.
MOST_NUMBERS, _PROJECTED = 1024, 512


class WithNeighbours(SequenceModel):
    """A trained model with content, whose scores include the similarity to recent items.

    ::

        score_i = score of the model + weight cos(c_last, c_i) - popularity log(1 + n_i)

    c_i is the content of item i: its tags, weighted by the inverse of their frequency, and its
    vector. c_last is the sum of the content of the last items of the history. n_i is the number of
    training entries of the item. Items with few entries gain most: see docs/item_features.md.

    It only ranks and cannot be trained. It contains copies of the model's parts that it needs.

    >>> tags = scipy.sparse.csr_array([[1.0, 0], [1, 1], [0, 1]])
    >>> sizes = ContentSizes.of(tags, None)
    >>> config = SASRecConfig(max_length=4, width=8)
    >>> model = SASRec(config, items=3, content=sizes, rngs=nnx.Rngs(0))
    >>> model.output.content.set_to(tags, None)
    >>> WithNeighbours(model).top_k(jnp.array([[0, 1, -1, -1]]), 2)[0].shape
    (1, 2)

    Content of more than 1,024 different tags and numbers is projected at random to 512.

    Args:
      model: trained model with content of its items.
      weight: factor of the cosine. Scores of a model with temperature .1 are in [-10, 10].
      recent: number of last items whose content is summed.
      popularity: factor of the logarithm; 0 disables it.

    Raises:
      TypeError: `model` is not a sequence model, or `weight` or `popularity` is not a number.
      ValueError: the model has no content, or a number is negative or not finite.
      NotImplementedError: a mesh is set, or the model reads event columns.
    """

    def __init__(
        self,
        model: SequenceModel,
        *,
        weight: float = 2.0,
        recent: int = 3,
        popularity: float = 0.2,
    ):
        if not isinstance(model, SequenceModel):
            raise TypeError(
                f"expected a model of histories, got {type(model).__name__}"
            )
        if (content := model.output.content) is None:
            raise ValueError(
                "the model has no content of its items: build it with item_features"
            )
        if model.events is not None:
            raise NotImplementedError(
                "the model reads columns of events, which scores of neighbours do not have"
            )
        for name, value in (("weight", weight), ("popularity", popularity)):
            check_number(name, value)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if isinstance(recent, bool) or not isinstance(recent, int) or recent < 1:
            raise ValueError(f"recent must be an integer and 1 or more, got {recent!r}")
        if mesh_is_set():
            raise NotImplementedError("there is no form for a mesh: leave set_mesh out")
        self.weight, self.recent, self.popularity = weight, recent, popularity
        self.config, self.uses_times = model.config, model.uses_times
        self.model = nnx.clone(with_vectors(model))
        own = self.model.output
        vectors = own.kernel[...]
        if own.temperature is not None:
            vectors = vectors * own.score_scale(vectors)[:, None]
        of_content = _directions(content)
        counts = jnp.log1p(content.entries[...])[:, None]
        kernel = jnp.concatenate([vectors, of_content, counts], axis=1)
        self.output = SparseOutput(
            kernel.shape[1],
            model.num_items,
            use_bias=False,
            kernel=nnx.Param(kernel),
            rngs=nnx.Rngs(0),
        )

    def last(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Float[Array, "batch width"]:
        self._events_of(events, histories)
        h = self.model.output.hidden_operand(self.model.last(histories, times))
        kernel, width = self.output.kernel[...], h.shape[1]
        count = jnp.sum(histories >= 0, axis=1)
        places = count[:, None] - 1 - jnp.arange(self.recent)[None]
        ids = jnp.take_along_axis(histories, jnp.maximum(places, 0), axis=1)
        known = (places >= 0) & (ids >= 0)
        found = kernel[jnp.where(known, ids, 0), width:-1]
        found = jnp.sum(jnp.where(known[..., None], found, 0), axis=1)
        norm = jnp.linalg.norm(found, axis=1, keepdims=True)
        found = self.weight * found / jnp.maximum(norm, 1e-6)
        of_counts = jnp.full((len(h), 1), -self.popularity, found.dtype)
        return jnp.concatenate([h.astype(found.dtype), found, of_counts], axis=1)

    def loss(self, histories: Ids, times: Times = None, **options):
        raise NotImplementedError("it only ranks: train the model that it was made of")

    def add_items(self, count: int, *, optimizer=None) -> None:
        raise NotImplementedError("add items to the model that it was made of")


def _directions(content: ItemContent) -> Float[Array, "rows numbers"]:
    """The tags and the content vector of each item, as one vector of length 1; zeros without
    content.
    """
    parts: list[Any] = []
    if content.tags is not None:
        tags = content.stored_tags().astype(np.float32)
        often = np.bincount(tags.indices, minlength=content.sizes.tags)
        rare = np.log(content.items / np.maximum(often, 1)).astype(np.float32)
        parts.append(
            unit_rows(scipy.sparse.csr_array(tags @ scipy.sparse.diags_array(rare)))
        )
    if content.given is not None:
        given = to_host(content.given[...])[: content.items].astype(np.float32)
        norms = np.linalg.norm(given, axis=1, keepdims=True)
        parts.append(given / np.maximum(norms, 1e-6))
    width = sum(part.shape[1] for part in parts)
    if width > MOST_NUMBERS:
        rng = np.random.default_rng(0)
        draws = [
            rng.standard_normal((p.shape[1], _PROJECTED), np.float32) for p in parts
        ]
        made = sum(p @ d for p, d in zip(parts, draws, strict=True))
    else:
        dense = [p.toarray() if scipy.sparse.issparse(p) else p for p in parts]
        made = np.concatenate(dense, axis=1)
    made = np.asarray(made, np.float32)
    made /= np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-6)
    return jnp.asarray(
        np.pad(made, ((0, padded_rows(content.items) - len(made)), (0, 0)))
    )
