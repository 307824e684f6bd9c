"""Sequence models as data: a frozen dataclass, written to and read from versioned JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASRecConfig:
    """What a `SASRec` is made of.

    >>> SASRecConfig(width=128, temperature=0.05).to_json()
    {'version': 1, 'model': 'sasrec', 'width': 128, 'temperature': 0.05}

    Attributes:
      max_length: the most items that a history may have.
      width: numbers in the vector of an item.
      blocks: number of blocks.
      heads: of each attention; a divisor of `width`.
      dropout: probability of dropping a number in training.
      temperature: if given, scores are cosines divided by it, otherwise dot products.

    Raises:
      ValueError: a value is out of range.
      TypeError: a value is no number, or not an integer.
    """

    max_length: int = 50
    width: int = 64
    blocks: int = 2
    heads: int = 2
    dropout: float = 0.2
    temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_length", "width", "blocks", "heads"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} must be an integer, got {size!r}")
            if size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}"
            )
        for name in ("dropout", "temperature"):
            number = getattr(self, name)
            if name == "temperature" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"{name} must be a number, got {number!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object; defaults are left out."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return {"version": VERSION, "model": "sasrec", **values}

    @classmethod
    def from_json(cls, document: object) -> SASRecConfig:
        """The configuration of a JSON object, which `to_json` or a person has made.

        Raises:
          ValueError: not an object, an unknown version, model or key, or a wrong value.
          TypeError: a value is of a wrong type.
        """
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        given = dict(document)
        if type(version := given.pop("version", None)) is not int or version != VERSION:
            raise ValueError(
                f'"version" is {version!r}; this release reads version {VERSION}'
            )
        if (name := given.pop("model", None)) != "sasrec":
            raise ValueError(f'"model" is {name!r}, not sasrec')
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f'unknown key "{key}"; known: {", ".join(known)}')
        return cls(**given)
