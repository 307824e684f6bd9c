"""HSTU: gated attention without a softmax, biased by places and times."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.ops.history_attention import TIME_RATIO
from sparsejax.sequence.config import HSTUConfig
from sparsejax.sequence.model import Ids, SequenceModel, Times, Vectors, normal

_BUCKETS = 128  # of times


class HSTU(SequenceModel):
    """Hierarchical sequential transduction units (Zhai et al., 2024).

    >>> model = HSTU(HSTUConfig(max_length=4, width=8), items=100, rngs=nnx.Rngs(0))
    >>> histories = jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1]])
    >>> times = jnp.array([[0, 60, 61, 900, 4000], [0, 86400, 0, 0, 0]], jnp.float32)
    >>> model.loss(histories, times).shape
    ()

    With E the vectors of the items, P those of the places, `*` by element, and the
    attention of each head divided by `max_length` in place of a softmax::

        x_t        = dropout(sqrt(width) E[item_t] + P_t)
        u, v, q, k = silu(W1 norm(x))
        a_ts       = silu(q_t . k_s + place_(t-s) + time_bucket(t, s)) / max_length
        x_t        = x_t + W2 dropout(u_t * norm(sum_s<=t a_ts v_s)) + b   ... `blocks` times
        h_t        = norm(x_t)

        bucket(t, s) = log(|time_t - time_s|) / 0.301, rounded down, from 0 to 127

    Times that differ by less than 1 fall into the first bucket, so that seconds are a good
    unit. Without times there is no bias of times. A model that was trained without times
    makes nothing of times that it is shown later. See `SequenceModel` for the rest.

    Attributes:
      places: `[max_length, width]`.
    """

    uses_times = True

    def __init__(self, config: HSTUConfig, *, items: int, rngs: nnx.Rngs):
        super().__init__(config, items=items, rngs=rngs)
        shape = config.max_length, config.width
        self.places = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(
            GatedAttention(config, rngs=rngs) for _ in range(config.blocks)
        )
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, histories: Ids, times: Times = None) -> Vectors:
        """The hidden vector of each place."""
        vectors = self.embed(histories) * self.config.width**0.5
        x = self.dropout(vectors + self.places[...][None, : histories.shape[1]])
        for block in self.blocks:
            x = block(x, times)
        return self.norm(x)


class GatedAttention(nnx.Module):
    """Attention by SiLU, gated by a fourth product of its input."""

    def __init__(self, config: HSTUConfig, *, rngs: nnx.Rngs):
        width, self.heads = config.width, config.heads
        self.max_length = config.max_length
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.gates, self.values, self.queries, self.keys = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.mixed = nnx.Linear(width, width, rngs=rngs)
        shape = (config.max_length,)
        self.place_bias = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        # Zeros stay zeros in training without times, and then times make no difference.
        self.time_bias = nnx.Param(jnp.zeros(_BUCKETS))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Vectors, times: Times) -> Vectors:
        y, by_head = self.norm1(x), (*x.shape[:2], self.heads, -1)
        u, v, q, k = (
            nnx.silu(layer(y))
            for layer in (self.gates, self.values, self.queries, self.keys)
        )
        q, k, v = (z.reshape(by_head) for z in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + self.biases(x.shape[1], times)
        # Padding comes last, so no item sees it.
        before = jnp.tri(x.shape[1], dtype=bool)[None, None]
        weights = jnp.where(before, nnx.silu(scores) / self.max_length, 0)
        y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return x + self.mixed(self.dropout(u * self.norm2(y)))

    def biases(
        self, length: int, times: Times
    ) -> Float[Array, "#batch 1 length length"]:
        """What is added to the scores of each place (row) and those before it."""
        place = jnp.arange(length)
        before = jnp.maximum(place[:, None] - place[None], 0)
        bias = self.place_bias[...][before][None, None]
        if times is None:
            return bias
        apart = jnp.abs(times[:, :, None] - times[:, None])
        bucket = (jnp.log(jnp.maximum(apart, 1)) / TIME_RATIO).astype(jnp.int32)
        return bias + self.time_bias[...][jnp.minimum(bucket, _BUCKETS - 1)][:, None]
