"""Models of histories, as `build` makes them."""

from __future__ import annotations

from flax import nnx

from sparsejax.nn.item_content import ContentSizes
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sequence.build import build_sequence_model
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.events import EventSizes
from sparsejax.sequence.model import SequenceModel


def new_sequence_model(
    config: SequenceConfig,
    *,
    rule: Rule,
    inputs: int,
    seed: int,
    content: ContentSizes | None = None,
    events: EventSizes | None = None,
) -> tuple[SequenceModel, Optimizer]:
    """A model and its optimizer."""
    rngs = nnx.Rngs(seed)
    sizes = {"content": content, "events": events}
    model = build_sequence_model(config, items=inputs, **sizes, rngs=rngs)
    return model, Optimizer(model, rule, seed=seed)
