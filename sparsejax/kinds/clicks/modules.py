"""Click models, as `build` makes them."""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx

from sparsejax.embeddings.model_config import ClickModelConfig
from sparsejax.embeddings.models import build_click_model
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule


def new_click_model(
    config: ClickModelConfig,
    *,
    rule: Rule,
    num_dense: int,
    features: Mapping[str, int | str],
    seed: int,
) -> tuple[nnx.Module, Optimizer]:
    """A model and its optimizer."""
    model = build_click_model(
        config, num_dense=num_dense, features=features, rngs=nnx.Rngs(seed)
    )
    return model, Optimizer(model, rule, seed=seed)
