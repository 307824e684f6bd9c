"""Networks, as `build` makes them."""

from __future__ import annotations

from flax import nnx

from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.item_content import ContentSizes
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule


def new_network(
    config: NetworkConfig,
    *,
    rule: Rule,
    inputs: int,
    outputs: int,
    seed: int,
    content: ContentSizes | None = None,
) -> tuple[FeedForward, Optimizer]:
    """A network and its optimizer."""
    rngs = nnx.Rngs(seed)
    model = FeedForward(
        config, inputs=inputs, outputs=outputs, content=content, rngs=rngs
    )
    return model, Optimizer(model, rule, seed=seed)
