"""Builds a sequence model from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx

from sparsejax.nn.item_content import ContentSizes
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.events import EventSizes
from sparsejax.sequence.gru import GRU
from sparsejax.sequence.hstu import HSTU
from sparsejax.sequence.model import SequenceModel
from sparsejax.sequence.sasrec import SASRec

# The model class for each configuration name.
_MODELS: Mapping[str, type[SequenceModel]] = {
    "sasrec": SASRec,
    "hstu": HSTU,
    "gru": GRU,
}


def build_sequence_model(
    config: SequenceConfig,
    *,
    items: int,
    content: ContentSizes | None = None,
    events: EventSizes | None = None,
    rngs: nnx.Rngs,
) -> SequenceModel:
    """Builds the model that a configuration describes.

    >>> config = SequenceConfig.from_json({"version": 1, "model": "sasrec"})
    >>> type(build_sequence_model(config, items=100, rngs=nnx.Rngs(0))).__name__
    'SASRec'

    Args:
      config: settings of one of the models.
      items: number of items.
      content: sizes of the content of items (tags and vectors), as in `SequenceModel`; None
          without content.
      events: sizes of the event columns, as in `SequenceModel`; None without columns.
      rngs: random streams: "params", and "dropout" in training.

    Raises:
      TypeError: the configuration does not belong to a model here.
    """
    sizes = {"content": content, "events": events}
    return model_of(config)(config, items=items, **sizes, rngs=rngs)


def model_of(config: SequenceConfig) -> type[SequenceModel]:
    """The class of the model for a configuration.

    Raises:
      TypeError: the configuration does not belong to a model here.
    """
    model = _MODELS.get(getattr(config, "model", ""))
    if model is None:
        raise TypeError(
            "expected a SASRecConfig, HSTUConfig or GRUConfig, got "
            f"{type(config).__name__}"
        )
    return model
