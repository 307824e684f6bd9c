"""SASRec: self-attention over a history, with the exact softmax over all items."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sparsejax.sequence.config import SASRecConfig
from sparsejax.sequence.model import Ids, SequenceModel, Times, Vectors, normal


class SASRec(SequenceModel):
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

        x_t  = dropout(sqrt(width) E[item_t] + P_t)
        x    = x + dropout(attention(norm(x)))          t sees the places up to t
        x    = x + dropout(W2 gelu(W1 norm(x)))         ... `blocks` times
        h_t  = norm(x_t)

        score_ti = h_t . E_i                            or cos(h_t, E_i) / temperature

    Places count from the oldest item that is given. See `SequenceModel` for the rest.

    Attributes:
      places: `[max_length, width]`.
    """

    def __init__(self, config: SASRecConfig, *, items: int, rngs: nnx.Rngs):
        super().__init__(config, items=items, rngs=rngs)
        shape = config.max_length, config.width
        self.places = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.blocks))
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, histories: Ids, times: Times = None) -> Vectors:
        """The hidden vector of each place. Times make no difference."""
        vectors = self.embed(histories) * self.config.width**0.5
        x = self.dropout(vectors + self.places[...][None, : histories.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


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

    def __call__(self, x: Vectors) -> Vectors:
        y, by_head = self.norm1(x), (*x.shape[:2], self.heads, -1)
        q, k, v = (
            layer(y).reshape(by_head)
            for layer in (self.queries, self.keys, self.values)
        )
        # Padding comes last, so no item sees it.
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout1(self.mixed(y.reshape(x.shape)))
        return x + self.dropout2(self.down(nnx.gelu(self.up(self.norm2(x)))))
