"""Configurations of sequence models: frozen dataclasses, stored as versioned JSON."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import numpy as np

from sparsejax.codec import ModelConfig
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.ops.implementations import HOPPER, custom_call_can_run

# For `suited_to`: the lengths to choose from, and the fraction of entries that may be cut off.
# Both were chosen on Amazon Beauty and MovieLens.
_LENGTHS, _CUT = (50, 100, 200, 500, 1000, 2000), 0.05
# Devices store the data in rows of equal length. This is the maximum number of positions in all
# rows.
_MOST_PLACES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(ModelConfig):
    """Settings of all sequence models. Subclasses such as `SASRecConfig` add further settings.

    >>> SequenceConfig.from_json({"version": 1, "model": "sasrec", "width": 64}).width
    64

    Attributes:
      max_length: largest number of items that the model reads of a history.
      width: number of numbers in an item vector.
      blocks: number of blocks, one after the other.
      dropout: probability that a number is dropped in training.
      temperature: number by which cosines are divided to give scores; None for dot products.
      negatives: number of sampled items: the loss is a softmax over the target and these items,
          drawn anew for each batch; see `sparsejax.nn.sampled_cross_entropy`. None is the exact
          softmax over all items.
      sampler: distribution of the sampled items: "uniform", or "batch", which draws half of them
          uniformly and half from the batch's targets, so that popular items are drawn more often.
          Both are corrected by log q.

    Raises:
      ValueError: a value is out of range.
      TypeError: a value is not a number, or not an integer.
    """

    kind: ClassVar[str] = "histories"
    _longest: ClassVar[int] = _LENGTHS[-1]

    max_length: int = 50
    width: int = 128
    blocks: int = 2
    dropout: float = 0.4
    temperature: float | None = 0.1
    negatives: int | None = None
    sampler: str = "uniform"

    def __post_init__(self) -> None:
        if self.sampler not in (samplers := ("uniform", "batch")):
            raise ValueError(f"sampler is one of {samplers}, got {self.sampler!r}")
        if self.sampler != "uniform" and self.negatives is None:
            raise ValueError(
                f"sampler={self.sampler!r} draws negatives, but negatives is None, which is "
                "the softmax over all items; give a number of them"
            )
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            drawn = name == "negatives" and value is not None
            if type(field.default) is int or drawn:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{name} must be an integer, got {value!r}")
                if not 1 <= value < 2**31:
                    bound = "1 or more" if value < 1 else "below 2^31"
                    raise ValueError(f"{name} must be {bound}, got {value}")
        check_number("dropout", self.dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.temperature is not None:
            check_positive("temperature", self.temperature)

    def suited_to(self, data: SequenceDataset) -> Self:
        """A copy with the `max_length` that suits the data, and a `dtype` for this device.

        `max_length` is the smallest of 50, 100, 200, 500, 1,000 and 2,000 that cuts off at most 5
        % of the entries, or else the largest. Lengths above 50 are only chosen if all rows
        together have at most 2^28 positions on the devices. A GRU gets at most 200, as it
        processes positions one by one. A `dtype` of None becomes "bfloat16" on a GPU that can run
        our programs for it.

        >>> long = SequenceDataset([0, 80], [0] * 80, ["ann"], ["tea"])
        >>> SASRecConfig(width=64).suited_to(long).max_length
        100
        """
        return self.suited_to_lengths(np.diff(data.indptr))

    def suited_to_lengths(self, lengths: np.ndarray) -> Self:
        """A copy that suits data whose rows have these numbers of entries; see `suited_to`.

        >>> SASRecConfig(width=64).suited_to_lengths(np.array([80])).max_length
        100
        """
        longest = min(self._longest, _MOST_PLACES // max(1, len(lengths)))
        for length in _LENGTHS:
            if entries_cut_off(lengths, length) <= _CUT * lengths.sum():
                break
        fitting = [each for each in _LENGTHS if each <= min(length, longest)]
        return dataclasses.replace(self, max_length=max(fitting, default=_LENGTHS[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(SequenceConfig):
    """Settings of the models with attention; each model's class documents them."""

    heads: int = 2
    dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}"
            )
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f'dtype is "float32" or "bfloat16", got {self.dtype!r}')

    def suited_to_lengths(self, lengths: np.ndarray) -> Self:
        suited = super().suited_to_lengths(lengths)
        if suited.dtype is None and custom_call_can_run(HOPPER, divided=True):
            return dataclasses.replace(suited, dtype="bfloat16")
        return suited


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASRecConfig(AttentionConfig):
    """Settings of a `SASRec`; see `SequenceConfig` too.

    >>> SASRecConfig(width=64, temperature=0.05).to_json()
    {'version': 1, 'model': 'sasrec', 'width': 64, 'temperature': 0.05}

    Attributes:
      heads: number of heads of each attention; a divisor of `width`.
      dtype: "float32" or "bfloat16", the dtype of the operands of products, including attention,
          and of the scores of sampled negatives. None is float32, or the choice of `suited_to`.
          Parameters, norms, biases of attention and sums are always float32.

    Raises:
      ValueError: a value is out of range.
      TypeError: a value is not a number, or not an integer.
    """

    model = "sasrec"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSTUConfig(AttentionConfig):
    """Settings of an `HSTU`; see `SequenceConfig` too.

    >>> HSTUConfig(heads=4).to_json()
    {'version': 1, 'model': 'hstu', 'heads': 4}

    Attributes:
      heads: number of heads of each attention; a divisor of `width`.
      dtype: "float32" or "bfloat16", the dtype of the operands of products, including attention,
          and of the scores of sampled negatives. None is float32, or the choice of `suited_to`.
          Parameters, norms, biases of attention and sums are always float32.
      divisor: number by which the sums of attention are divided, before a norm. None is
          `max_length`. A large divisor weakens short histories, so set 50 if histories may be
          long, as `suited_to` does.

    Raises:
      ValueError: a value is out of range.
      TypeError: a value is not a number, or not an integer.
    """

    model = "hstu"
    divisor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisor is not None:
            check_positive("divisor", self.divisor)

    def suited_to_lengths(self, lengths: np.ndarray) -> Self:
        suited = super().suited_to_lengths(lengths)
        if self.divisor is None and suited.max_length > _LENGTHS[0]:
            return dataclasses.replace(suited, divisor=float(_LENGTHS[0]))
        return suited


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRUConfig(SequenceConfig):
    """Settings of a `GRU`; see `SequenceConfig`.

    >>> GRUConfig(blocks=1).to_json()
    {'version': 1, 'model': 'gru', 'blocks': 1}
    """

    model = "gru"
    _longest = 200


def entries_cut_off(lengths: np.ndarray, max_length: int) -> int:
    """The number of entries that a model is not trained on, for rows of these lengths."""
    # A training row has one more entry than the model reads: the last one is only a target.
    return int(np.maximum(lengths - max_length - 1, 0).sum())


def operand_dtype(config: SequenceConfig) -> str:
    """The dtype of the operands of products; float32 for a model without attention."""
    return (isinstance(config, AttentionConfig) and config.dtype) or "float32"


def check_number(name: str, value: object) -> None:
    """Checks that a value is a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Checks that a value is a finite number above 0."""
    check_number(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive, got {value}")
