"""From the configuration of a sequence model to the model."""

from __future__ import annotations

from flax import nnx

from sparsejax.sequence.config import (
    GRUConfig,
    HSTUConfig,
    SASRecConfig,
    SequenceConfig,
)
from sparsejax.sequence.gru import GRU
from sparsejax.sequence.hstu import HSTU
from sparsejax.sequence.model import SequenceModel
from sparsejax.sequence.sasrec import SASRec


def build_sequence_model(
    config: SequenceConfig, *, items: int, rngs: nnx.Rngs
) -> SequenceModel:
    """The model of a configuration.

    >>> config = SequenceConfig.from_json({"version": 1, "model": "sasrec"})
    >>> type(build_sequence_model(config, items=100, rngs=nnx.Rngs(0))).__name__
    'SASRec'

    Args:
      config: of one of the models.
      items: number of items.
      rngs: random streams: "params", and "dropout" in training.

    Raises:
      TypeError: the configuration is of no model.
    """
    match config:
        case SASRecConfig():
            return SASRec(config, items=items, rngs=rngs)
        case HSTUConfig():
            return HSTU(config, items=items, rngs=rngs)
        case GRUConfig():
            return GRU(config, items=items, rngs=rngs)
        case _:
            raise TypeError(
                "expected a SASRecConfig, HSTUConfig or GRUConfig, got "
                f"{type(config).__name__}"
            )
