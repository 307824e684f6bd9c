"""SASRec: self-attention over a history."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sparsejax.sequence.config import SASRecConfig, operand_dtype
from sparsejax.sequence.model import TokenModel, TokenVectors
from sparsejax.sequence.tokens import Attention, Dropout, Tokens


class SASRec(TokenModel):
    """Self-attentive sequential recommendation (Kang and McAuley, 2018), pre-norm.

    >>> model = SASRec(SASRecConfig(max_length=4, width=8), items=100, rngs=nnx.Rngs(0))
    >>> histories = jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1]])
    >>> model.loss(histories).shape  # of 5 targets: 3, 7, 9, 2 and 1
    ()
    >>> model.eval()
    >>> ids, scores = model.top_k(histories[:, :4], 10)
    >>> ids.shape
    (2, 10)

    With item vectors E and position vectors P::

        x_t  = dropout(sqrt(width) E[item_t] + P_t)     E[item_t] + C[event_t], if it reads columns
        x    = x + dropout(attention(norm(x)))          t sees the places up to t
        x    = x + dropout(W2 gelu(W1 norm(x)))         ... `blocks` times
        h_t  = norm(x_t)

        score_ti = h_t . E_i                            or cos(h_t, E_i) / temperature

    Positions count from the oldest given item. Times are ignored. See `SequenceModel` for loss and
    ranking.

    Attributes:
      places: `[max_length, width]` position vectors.
    """

    def _new_block(self, config: SASRecConfig, rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)


class Block(Attention):
    """Attention to previous positions, then two layers for each position separately."""

    def __init__(self, config: SASRecConfig, *, rngs: nnx.Rngs):
        width, self.heads = config.width, config.heads
        dtype = jnp.dtype(operand_dtype(config))
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.queries, self.keys, self.values, self.mixed = (
            nnx.Linear(width, width, use_bias=False, dtype=dtype, rngs=rngs)
            for _ in range(4)
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.dropout1, self.dropout2 = (
            Dropout(config.dropout, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x: TokenVectors, tokens: Tokens) -> TokenVectors:
        y, by_head = self.norm1(x), (len(x), self.heads, -1)
        q, k, v = (
            layer(y).reshape(by_head)
            for layer in (self.queries, self.keys, self.values)
        )
        y = tokens.attend(
            q, k, v, activation="softmax", implementation=self.implementation
        )
        x = x + self.dropout1(self.mixed(y.reshape(x.shape)), tokens)
        # The activation's derivative is recomputed from the result of `up`, so that nothing more
        # is stored.
        y = self.down(jax.checkpoint(nnx.gelu)(self.up(self.norm2(x))))
        return x + self.dropout2(y, tokens)
