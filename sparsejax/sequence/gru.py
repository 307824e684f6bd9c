"""GRU: a recurrent state that is updated by each item of a history."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sparsejax.nn.item_content import ContentSizes
from sparsejax.sequence.config import GRUConfig
from sparsejax.sequence.events import EventColumns, EventSizes
from sparsejax.sequence.model import Ids, SequenceModel, Times, Vectors


class GRU(SequenceModel):
    """Gated recurrent units (GRU4Rec, Hidasi et al., 2016), by default with the exact softmax.

    >>> model = GRU(GRUConfig(max_length=4, width=8), items=100, rngs=nnx.Rngs(0))
    >>> model.loss(jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1]])).shape
    ()

    With item vectors E, and h_0 = 0::

        x_t     = dropout(E[item_t])                    plus C[event_t], if it reads columns
        r, z, n = W x_t + b                             three parts
        r, z    = sigmoid(r + R h_(t-1)), sigmoid(z + Z h_(t-1))
        n       = tanh(n + r * (N h_(t-1) + c))
        h_t     = (1 - z) * n + z * h_(t-1)
        x_t     = dropout(h_t)                          ... `blocks` times

    The hidden vectors are the h of the last block. See `SequenceModel` for loss and ranking.
    """

    def __init__(
        self,
        config: GRUConfig,
        *,
        items: int,
        content: ContentSizes | None = None,
        events: EventSizes | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"content": content, "events": events}
        super().__init__(config, items=items, **sizes, rngs=rngs)
        self.blocks = nnx.List(Gated(config, rngs=rngs) for _ in range(config.blocks))

    def __call__(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Vectors:
        """The hidden vector of each position. Times are ignored."""
        x = self.embed(histories, events)
        for block in self.blocks:
            x = block(x)
        return x


class Gated(nnx.Module):
    """A gated recurrent unit."""

    def __init__(self, config: GRUConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.inputs = nnx.Linear(width, 3 * width, rngs=rngs)
        self.gates = nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs)
        self.new = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Vectors) -> Vectors:
        def step(h, inputs):
            r, z, n = jnp.split(inputs, 3, axis=1)
            of_h = jnp.split(self.gates(h), 2, axis=1)
            r, z = nnx.sigmoid(r + of_h[0]), nnx.sigmoid(z + of_h[1])
            h = (1 - z) * jnp.tanh(n + r * self.new(h)) + z * h
            return h, h

        # The input products of all positions are computed at once.
        inputs = jnp.swapaxes(self.inputs(self.dropout(x)), 0, 1)
        _, h = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), inputs)
        return jnp.swapaxes(h, 0, 1)
