"""Configurations of models as data: frozen dataclasses, written to and read from JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

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
          TypeError: a value is of a wrong type.
        """
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        given = dict(document)
        if type(version := given.pop("version", None)) is not int or version != VERSION:
            raise ValueError(
                f'"version" is {version!r}; this release reads version {VERSION}'
            )
        kinds = {kind.model: kind for kind in _all_kinds(cls)}
        if not isinstance(name := given.pop("model", None), str) or name not in kinds:
            raise ValueError(f'"model" is {name!r}, not one of {", ".join(kinds)}')
        kind = kinds[name]
        known = [field.name for field in dataclasses.fields(kind)]
        for key in given:
            if key not in known:
                raise ValueError(f'unknown key "{key}"; known: {", ".join(known)}')
        for key, value in given.items():
            is_list = isinstance(kind.__dataclass_fields__[key].default, tuple)
            if is_list != isinstance(value, list):
                what = "a list" if is_list else "no list"
                raise TypeError(f'"{key}" must be {what}, got {value!r}')
            given[key] = tuple(value) if is_list else value
        return kind(**given)


def _all_kinds[Config](cls: type[Config]) -> list[type[Config]]:
    """The class itself, if it is a model, and its subclasses."""
    return [kind for kind in (cls, *cls.__subclasses__()) if hasattr(kind, "model")]
