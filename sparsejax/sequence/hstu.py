"""HSTU: gated attention without softmax, biased by positions and times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparsejax.sequence.config import HSTUConfig, operand_dtype
from sparsejax.sequence.model import TokenModel, TokenVectors, normal
from sparsejax.sequence.tokens import Attention, Dropout, Tokens

_BUCKETS = 128  # number of time buckets


class HSTU(TokenModel):
    """Hierarchical sequential transduction units (Zhai et al., 2024).

    >>> model = HSTU(HSTUConfig(max_length=4, width=8), items=100, rngs=nnx.Rngs(0))
    >>> histories = jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1]])
    >>> times = jnp.array([[0, 60, 61, 900, 4000], [0, 86400, 0, 0, 0]], jnp.float32)
    >>> model.loss(histories, times).shape
    ()

    With item vectors E, position vectors P, `*` by element, and the attention of each head divided
    by `divisor` instead of a softmax::

        x_t        = dropout(sqrt(width) E[item_t] + P_t)   E + C[event_t], if it reads columns
        u, v, q, k = silu(W1 norm(x))
        a_ts       = silu(q_t . k_s + place_(t-s) + time_bucket(t, s)) / divisor
        x_t        = x_t + W2 dropout(u_t * norm(sum_s<=t a_ts v_s)) + b   ... `blocks` times
        h_t        = norm(x_t)

        bucket(t, s) = log(time_t - time_s) / 0.301, rounded down, from 0 to 127

    Time differences below 1 fall into the first bucket, so that seconds are a good unit. A time
    that is earlier than a previous time counts as equal to it. Without times there is no time
    bias. A model that was trained without times ignores times given later. See `SequenceModel` for
    loss and ranking.

    Attributes:
      places: `[max_length, width]` position vectors.
    """

    uses_times = True

    def _new_block(self, config: HSTUConfig, rngs: nnx.Rngs) -> GatedAttention:
        return GatedAttention(config, rngs=rngs)


class GatedAttention(Attention):
    """Attention by SiLU, gated by a fourth product of its input."""

    def __init__(self, config: HSTUConfig, *, rngs: nnx.Rngs):
        width, self.heads = config.width, config.heads
        dtype = jnp.dtype(operand_dtype(config))
        self.divisor = config.divisor or config.max_length
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.gates, self.values, self.queries, self.keys = (
            nnx.Linear(width, width, use_bias=False, dtype=dtype, rngs=rngs)
            for _ in range(4)
        )
        self.mixed = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        shape = (config.max_length,)
        self.place_bias = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        # Without times in training, the biases stay 0, so that times have no effect later.
        self.time_bias = nnx.Param(jnp.zeros(_BUCKETS))
        self.dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: TokenVectors, tokens: Tokens) -> TokenVectors:
        y, by_head = self.norm1(x), (len(x), self.heads, -1)
        gates = self.gates(y)
        v, q, k = (
            nnx.silu(layer(y)).reshape(by_head)
            for layer in (self.values, self.queries, self.keys)
        )
        y = tokens.attend(
            q,
            k,
            v,
            divisor=self.divisor,
            place_bias=self.place_bias[...],
            time_bias=self.time_bias[...],
            implementation=self.implementation,
        )
        y = _gated(gates, self.norm2(y.reshape(x.shape)))
        return x + self.mixed(self.dropout(y, tokens))


def _product(gates: TokenVectors, y: TokenVectors) -> TokenVectors:
    return nnx.silu(gates) * y


_gated = jax.custom_vjp(_product)


def _gated_backward(operands, dz):
    _, pull = jax.vjp(_product, *operands)
    # Without the barrier, XLA fuses all of this, some of it twice, into the program that sums over
    # tokens for the norm's parameters. That program has a low memory throughput.
    return lax.optimization_barrier(pull(dz))


_gated.defvjp(lambda *x: (_product(*x), x), _gated_backward)
