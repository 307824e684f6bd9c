"""Models of histories, as `build` makes them."""

from __future__ import annotations

from flax import nnx

from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sequence.build import build_sequence_model
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.model import SequenceModel


def new_sequence_model(
    config: SequenceConfig, *, rule: Rule, inputs: int, seed: int
) -> tuple[SequenceModel, Optimizer]:
    """A model and its optimizer."""
    model = build_sequence_model(config, items=inputs, rngs=nnx.Rngs(seed))
    return model, Optimizer(model, rule, seed=seed)
