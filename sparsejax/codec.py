"""Dataclasses as JSON, which is read strictly: they say which keys there are, and their types.

A wrong value raises ValueError with its key, whatever it is: of another type, NaN, an integer
beyond 64 bits, an object where a list is expected, or nested so deeply that Python gives up.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

MODEL_VERSION = 1  # of the JSON of a `ModelConfig`
_SHOWN = 60  # letters of a wrong value that a message has
_NUMBERS = 2**63  # integers are below; sizes have narrower bounds of their own
_NAMES = {type(None): "null", dict: "an object", list: "a list"}

# A value of JSON.
Json = Mapping[str, Any] | Sequence[Any] | str | float | bool | None


def document(instance: Any, *, skip_defaults: bool = False) -> dict[str, Any]:
    """Converts a dataclass, and dataclasses inside it, to JSON; `read` reads it.

    Args:
      instance: the dataclass's instance.
      skip_defaults: leave out its fields that have their default.
    """
    return {
        field.name: _plain_json(getattr(instance, field.name))
        for field in dataclasses.fields(instance)
        if not (skip_defaults and getattr(instance, field.name) == field.default)
    }


def _plain_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return document(value)
    if isinstance(value, Mapping):
        return {key: _plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(entry) for entry in value]
    return value


def text(value: Any, *, indent: int | None = None) -> str:
    """JSON text of a dataclass, or of a value that has dataclasses in it.

    >>> text({"k": 10})
    '{"k": 10}'
    """
    return json.dumps(value, indent=indent, default=_as_json)


def _as_json(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else document(value)


def plain(value: Any) -> Any:
    """The value as it is read after it was written: lists in place of tuples."""
    return parse(text(value), finite=False)


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of JSON text.

    >>> parse('{"k": 10}')
    {'k': 10}

    Args:
      text: text to read.
      finite: refuse NaN and infinities, which JSON has not, but Python writes.

    Raises:
      ValueError: it is not JSON; or it has a number that is refused.
    """
    strict: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        return json.loads(text, **(strict if finite else {}))
    except RecursionError as error:
        raise ValueError(f"is nested too deeply: {error}") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def load[T](path: str | os.PathLike[str], read: Callable[[Any], T]) -> T:
    """The object that a function makes of the value that a file of JSON holds.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not JSON, or not of such an object; the message names the file.
    """
    content = pathlib.Path(path).read_bytes()
    try:
        return read(parse(content))
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read[T](kind: type[T], document: object, label: str) -> T:
    """The dataclass of a JSON object.

    Args:
      kind: the dataclass. Its fields are numbers, text, flags, null, choices (`Literal`),
        tuples, mappings by text, and other dataclasses. A field of another class takes an
        instance of it, which the caller has read.
      document: the object; its keys are the names of the fields.
      label: name of the object, for messages.

    Raises:
      ValueError: a key is unknown or missing, or a value is of another type, or is refused
        by the dataclass.
    """
    found = fields(kind, document, label)
    try:
        return kind(**found)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{label}: {error}") from error


def read_tagged[T](
    kinds: Mapping[str, type[T]], tag: str, document: Json, label: str
) -> T:
    """Reads the one of several dataclasses that a key of the object names; see `read`.

    Args:
      kinds: the dataclasses, by the values of the key.
      tag: the key, which is no field.
      document: the object.
      label: name of the object, for messages.

    Raises:
      ValueError: the key is missing or names none of them; see `read`.
    """
    given = value(dict[str, Any], document, label)
    name = given.pop(tag, None)
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f'{label}: "{tag}" is {_short(name)}, not one of {", ".join(kinds)}'
        )
    return read(kinds[name], given, label)


def read_named(
    document: Json, tag: str, label: str
) -> tuple[str, dict[str, int | float | bool]]:
    """The name that a key of a JSON object has, and its other keys, which are numbers.

    Raises:
      ValueError: it is no object, the key has no name, or another key no number.
    """
    options = value(dict[str, Any], document, label)
    if not isinstance(name := options.pop(tag, None), str):
        raise ValueError(
            f'{label}: expected an object with a "{tag}", got {_short(document)}'
        )
    return name, {k: value(int | float | bool, v, label, k) for k, v in options.items()}


def fields(kind: type, document: object, label: str) -> dict[str, Any]:
    """The values that `read` finds, by the names of fields."""
    given = value(dict[str, Any], document, label)
    known = {field.name: field for field in dataclasses.fields(kind)}
    check_keys(given, known, label)
    hints = typing.get_type_hints(kind)
    for name, field in known.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not optional and name not in given:
            raise ValueError(f'{label}: "{name}" is missing')
    return {
        key: value(hints[key], given[key], label, key) for key in given
    }  # in the order of the document


def check_keys(given: Iterable[str], known: Iterable[str], label: str) -> None:
    """Raises ValueError if a key is unknown."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f'{label}: unknown key "{key[:_SHOWN]}"; known: {", ".join(known)}'
            )


def without_version(document: Json, version: int, label: str) -> dict[str, Any]:
    """The rest of a JSON object, if its "version" is this one.

    Raises:
      ValueError: it is no object, or of another version.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"expected a JSON object, got {type(document).__name__}")
    rest = value(dict[str, Any], document, label)
    found = rest.pop("version", None)
    if type(found) is not int or found != version:  # True is 1
        cure = ""
        if type(found) is int:
            is_newer = found > version
            cure = "; install a newer release" if is_newer else "; write it anew"
        raise ValueError(
            f'{label}: "version" is {_short(found)}; this release reads version '
            f"{version}{cure}"
        )
    return rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration, which says how to build a model."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object."""
        raise NotImplementedError


class ModelConfig(Config):
    """The JSON of a family of models, each of which is a subclass of the family's class.

    Attributes:
      model: the name of the model, "model" in JSON.
    """

    model: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object; defaults are left out."""
        values = document(self, skip_defaults=True)
        return {"version": MODEL_VERSION, "model": self.model, **values}

    @classmethod
    def from_json(cls, document: Json) -> Self:
        """The configuration of a JSON object, which `to_json` or a person has made.

        "model" chooses the class.

        Raises:
          ValueError: not an object, an unknown version, model or key, or a wrong value.
        """
        given = without_version(document, MODEL_VERSION, "the model")
        kinds: dict[str, type[Self]] = {}
        for kind in _family(cls):
            if hasattr(kind, "model"):
                kinds.setdefault(kind.model, kind)
        return read_tagged(kinds, "model", given, "the model")


def _family[T](kind: type[T]) -> Iterator[type[T]]:
    """A class, and all that are derived from it."""
    yield kind
    for each in kind.__subclasses__():
        yield from _family(each)


def value(hint: Any, given: object, label: str, key: str = "") -> Any:
    """A JSON value as a type: `tuple[int, ...]` for a list of integers.

    Args:
      hint: the type, see `read`.
      given: the value.
      label: name of the object that has the value, for messages.
      key: name or index of the value in that object, for messages.

    Raises:
      ValueError: it is of another type.
    """
    if hint is Any:
        return given
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, given, label, key)
    if origin is Literal:
        for choice in inner:
            if type(given) is type(choice) and given == choice:
                return choice
        raise _wrong(f"one of {', '.join(map(str, inner))}", given, label, key)
    if origin is Sequence:
        hint, origin = tuple[inner[0], ...], tuple
    if origin is tuple or _is_named_tuple(hint):
        return _tuple(hint, given, label, key)
    if origin in (dict, Mapping):
        if not isinstance(given, Mapping) or not all(type(k) is str for k in given):
            raise _wrong("an object", given, label, key)
        return {k: value(inner[1], v, label, _below(key, k)) for k, v in given.items()}
    if hint in (int, float, str, bool, type(None)):
        return _plain(hint, given, label, key)
    if isinstance(given, hint):
        return given
    if dataclasses.is_dataclass(hint):
        return read(hint, given, f'{label}: "{key}"' if key else label)
    raise _wrong(_name(hint), given, label, key)


def _one_of(hints: Sequence[Any], given: object, label: str, key: str) -> Any:
    """A value of one of several types."""
    plain = type(given) in hints and type(given) in (int, float, str, bool, type(None))
    for hint in (type(given),) if plain else hints:
        if (_is_plain(hint) or _is_class(hint)) and not _fits(hint, given):
            continue
        return value(hint, given, label, key)
    raise _wrong(" or ".join(map(_name, hints)), given, label, key)


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, str, bool, type(None))


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and not _is_named_tuple(hint)


def _fits(hint: Any, given: object) -> bool:
    if hint is float:
        return type(given) in (int, float)
    if _is_plain(hint):
        return type(given) is hint
    return isinstance(given, hint) or (
        dataclasses.is_dataclass(hint) and isinstance(given, Mapping)
    )


def _plain(hint: Any, given: object, label: str, key: str) -> Any:
    if not _fits(hint, given):
        raise _wrong(_name(hint), given, label, key)
    if hint is int and not -_NUMBERS <= typing.cast(int, given) < _NUMBERS:
        raise _wrong("an integer of 64 bits", given, label, key)
    if hint is float:
        try:
            found = float(typing.cast(float, given))
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise _wrong("a finite number", given, label, key)
        return found
    return given


def _tuple(hint: Any, given: object, label: str, key: str) -> Any:
    if not isinstance(given, list | tuple):
        raise _wrong("a list", given, label, key)
    named = _is_named_tuple(hint)
    kinds = list(
        typing.get_type_hints(hint).values() if named else typing.get_args(hint)
    )
    if kinds[1:] == [...]:
        kinds = kinds[:1] * len(given)
    if len(kinds) != len(given):
        raise _wrong(f"a list of {len(kinds)}", given, label, key)
    pairs = zip(kinds, given, strict=True)
    found = [value(k, v, label, f"{key}[{i}]") for i, (k, v) in enumerate(pairs)]
    return hint(*found) if named else tuple(found)


def _is_named_tuple(hint: Any) -> bool:
    return (
        isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    )


def _below(key: str, inner: str) -> str:
    return f"{key}.{inner}" if key else inner


def _name(hint: Any) -> str:
    if (origin := typing.get_origin(hint)) is not None:
        return "a list" if origin is tuple else "an object"
    return _NAMES.get(hint) or getattr(hint, "__name__", str(hint))


def _wrong(expected: str, given: object, label: str, key: str) -> ValueError:
    where = f'{label}: "{key}"' if key else label
    return ValueError(f"{where} must be {expected}, got {_short(given)}")


def _short(given: object) -> str:
    """A value for a message. Its text may be long, or too deep to be written."""
    try:
        text = repr(given)
    except (RecursionError, ValueError):  # or an integer with too many digits
        text = type(given).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return found
