"""SASRec: self-attention over a history, with the exact softmax over all items."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import padded_rows
from sparsejax.ops.linear_cross_entropy import linear_cross_entropy
from sparsejax.ops.top_k import top_k
from sparsejax.sequence.config import SASRecConfig

PADDING = -1  # where a history has ended
_TINY = 1e-12  # below it a norm counts as this


class SASRec(nnx.Module):
    """Self-attentive sequential recommendation (Kang and McAuley, 2018), pre-norm.

    >>> model = SASRec(SASRecConfig(max_length=4, width=8), items=100, rngs=nnx.Rngs(0))
    >>> histories = jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1]])
    >>> model.loss(histories).shape  # of 5 targets: 3, 7, 9, 2 and 1
    ()
    >>> model.eval()
    >>> ids, scores = model.top_k(histories[:, :4], 10)
    >>> ids.shape
    (2, 10)

    With E the vectors of the items and P those of the places::

        x_t  = dropout(E[item_t] + P_t)
        x    = x + dropout(attention(norm(x)))          t sees the places up to t
        x    = x + dropout(W2 gelu(W1 norm(x)))         ... `blocks` times
        h_t  = norm(x_t)

        score_ti = h_t . E_i                            or cos(h_t, E_i) / temperature

    Histories are `[batch, length]` int32, the oldest item first, then -1, as
    `SequenceDataset.padded` makes them. Places count from the oldest item that is given. A
    history without items has the vector of its first place alone. An id that is neither an
    item nor -1 makes its row NaN.

    Attributes:
      config: what the model is made of.
      num_items: number of items.
      items: `[rows, width]` the vectors of the items, read and scored with. Rows from
        `num_items` on are padding.
      places: `[max_length, width]`.

    Args:
      config: what the model is made of.
      items: number of items.
      rngs: random streams: "params", and "dropout" in training.

    Raises:
      ValueError: `items` is not positive.
    """

    def __init__(self, config: SASRecConfig, *, items: int, rngs: nnx.Rngs):
        if items < 1:
            raise ValueError(f"items must be 1 or more, got {items}")
        self.config, self.num_items = config, items
        normal, width = jax.nn.initializers.normal(0.02), config.width
        vectors = normal(rngs.params(), (items, width), jnp.float32)
        self.items = nnx.Param(
            jnp.pad(vectors, ((0, padded_rows(items) - items), (0, 0)))
        )
        self.places = nnx.Param(
            normal(rngs.params(), (config.max_length, width), jnp.float32)
        )
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.blocks))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(
        self, histories: Int[Array, "batch length"]
    ) -> Float[Array, "batch length width"]:
        """The vector of each place.

        Raises:
          ValueError: histories are longer than `max_length`.
        """
        length = histories.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"histories have {length} places, but max_length is "
                f"{self.config.max_length}; cut them: data.padded({self.config.max_length})"
            )
        is_item = histories != PADDING
        # Out of range: no item, and a row of NaN. Padding is overwritten.
        known = (histories >= 0) & (histories < self.num_items)
        rows = jnp.where(known, histories, len(self.items[...]))
        vectors = self.items[...].at[rows].get(mode="fill", fill_value=jnp.nan)
        vectors = jnp.where(is_item[..., None], vectors, 0)
        x = self.dropout(vectors + self.places[...][None, :length])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, histories: Int[Array, "batch length"]) -> Float[Array, ""]:
        """Mean cross-entropy of the next item, over all places that have one.

        Args:
          histories: up to `max_length + 1` places.

        Raises:
          ValueError: histories are longer, or have less than two places.
        """
        if histories.shape[1] < 2:
            raise ValueError(
                "a loss needs histories of two places or more, an item and the next, got "
                f"{histories.shape}"
            )
        h, scale = self._output(self(histories[:, :-1]))
        return linear_cross_entropy(
            h, self.items[...], histories[:, 1:], scale=scale, num_items=self.num_items
        )

    def top_k(
        self,
        histories: Int[Array, "batch length"],
        k: int,
        *,
        exclude: SparseRows | None = None,
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and scores of the items that are most likely next; see `sparsejax.top_k`.

        Args:
          histories: up to `max_length` places.
          k: number of items.
          exclude: items to leave out of each row.
        """
        last = jnp.maximum(jnp.sum(histories != PADDING, axis=1) - 1, 0)
        h = jnp.take_along_axis(self(histories), last[:, None, None], axis=1)[:, 0]
        h, scale = self._output(h)
        return top_k(
            h,
            self.items[...],
            None,
            k,
            scale=scale,
            exclude=exclude,
            num_items=self.num_items,
        )

    def _output(self, h: jax.Array) -> tuple[jax.Array, Any]:
        """Hidden vectors and the items' scale: for cosines, the inverse norms."""
        if self.config.temperature is None:
            return h, None
        scale = _inverse_norms(self.items[...])[:, 0] / self.config.temperature
        return h * _inverse_norms(h), scale


class Block(nnx.Module):
    """Attention to the places before, then two layers for each place alone."""

    def __init__(self, config: SASRecConfig, *, rngs: nnx.Rngs):
        width, self.heads = config.width, config.heads
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.queries, self.keys, self.values, self.mixed = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout1, self.dropout2 = (
            nnx.Dropout(config.dropout, rngs=rngs) for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length width"]:
        y, by_head = self.norm1(x), (*x.shape[:2], self.heads, -1)
        q, k, v = (
            layer(y).reshape(by_head)
            for layer in (self.queries, self.keys, self.values)
        )
        # Padding comes last, so no item sees it.
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout1(self.mixed(y.reshape(x.shape)))
        return x + self.dropout2(self.down(nnx.gelu(self.up(self.norm2(x)))))


def _inverse_norms(x: Float[Array, "*rows width"]) -> Float[Array, "*rows 1"]:
    """1 / norm of each vector. The gradient of a zero is finite."""
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return jax.lax.rsqrt(jnp.maximum(squares, _TINY))
