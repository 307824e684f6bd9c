"""Networks, as `build` makes them."""

from __future__ import annotations

from flax import nnx

from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule


def new_network(
    config: NetworkConfig, *, rule: Rule, inputs: int, outputs: int, seed: int
) -> tuple[FeedForward, Optimizer]:
    """A network and its optimizer."""
    model = FeedForward(config, inputs=inputs, outputs=outputs, rngs=nnx.Rngs(seed))
    return model, Optimizer(model, rule, seed=seed)
