"""Configurations of models as data: frozen dataclasses, written to and read from JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from sparsejax import codec

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The JSON of a family of models, each of which is a subclass of the family's class.

    Attributes:
      model: the name of the model, "model" in JSON.
    """

    model: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object; defaults are left out."""
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {"version": VERSION, "model": self.model, **lists}

    # Tests check annotations by beartype, which takes Self only in classes it decorates.
    @classmethod
    def from_json[Config: ModelConfig](  # noqa: PYI019
        cls: type[Config], document: object
    ) -> Config:
        """The configuration of a JSON object, which `to_json` or a person has made.

        "model" chooses the class.

        Raises:
          ValueError: not an object, an unknown version, model or key, or a wrong value.
        """
        given = codec.without_version(document, VERSION, "the model")
        kinds = {kind.model: kind for kind in _all_kinds(cls)}
        if not isinstance(name := given.pop("model", None), str) or name not in kinds:
            raise ValueError(
                f'"model" is {str(name)[:60]!r}, not one of {", ".join(kinds)}'
            )
        return codec.read(kinds[name], given, name)


def _all_kinds[Config](cls: type[Config]) -> list[type[Config]]:
    """The class itself, if it is a model, and its subclasses."""
    return [kind for kind in (cls, *cls.__subclasses__()) if hasattr(kind, "model")]
