"""Converts dataclasses to JSON and back; reading is strict about keys and types.

A wrong value raises ValueError with its key. Wrong values are those of another type, NaN,
integers beyond 64 bits, objects where a list is expected, and values that are nested more
deeply than Python's limit of recursion.
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

MODEL_VERSION = 1  # version number in the JSON of a `ModelConfig`
_SHOWN = 60  # most characters of a wrong value in a message
_NUMBERS = 2**63  # absolute bound of integers; callers check narrower bounds
_NAMES = {type(None): "null", dict: "an object", list: "a list"}

# Type of a value in JSON, as `json` parses it.
Json = Mapping[str, Any] | Sequence[Any] | str | float | bool | None


def document(instance: Any, *, skip_defaults: bool = False) -> dict[str, Any]:
    """Converts a dataclass, and dataclasses inside it, to a dict for JSON; `read` reverses it.

    Args:
      instance: instance of a dataclass.
      skip_defaults: leave out fields whose value is the default.
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
    """Serializes a dataclass, or a value that contains dataclasses, as JSON text.

    >>> text({"k": 10})
    '{"k": 10}'
    """
    known = lambda v: dict(v) if isinstance(v, Mapping) else document(v)
    return json.dumps(value, indent=indent, default=known)


def plain(value: Any) -> Any:
    """Writes a value as JSON and reads it again: tuples become lists, dataclasses dicts."""
    return parse(text(value), finite=False)


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """Parses JSON text.

    >>> parse('{"k": 10}')
    {'k': 10}

    Args:
      text: text to read.
      finite: refuse NaN and infinities, which Python writes although JSON does not allow them.

    Raises:
      ValueError: the text is not JSON, or has a number that is refused.
    """
    strict: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        return json.loads(text, **(strict if finite else {}))
    except RecursionError as error:
        raise ValueError(f"is nested too deeply: {error}") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def load[T](path: str | os.PathLike[str], read: Callable[[Any], T]) -> T:
    """Parses a JSON file and passes its value to a function, whose result it returns.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not JSON, or `read` refuses its value; the message names the file.
    """
    content = pathlib.Path(path).read_bytes()
    try:
        return read(parse(content))
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read[T](kind: type[T], document: object, label: str) -> T:
    """Builds an instance of a dataclass from a JSON object.

    Args:
      kind: the dataclass. Its fields are numbers, text, flags, null, choices (`Literal`),
        tuples, mappings with text as keys, and other dataclasses. For a field of any other
        class the document must hold an instance, which the caller has built.
      document: the JSON object; its keys are the names of the fields.
      label: name of the object, for messages.

    Raises:
      ValueError: a key is unknown or missing, a value has another type, or the dataclass
        refuses a value.
    """
    found = fields(kind, document, label)
    try:
        return kind(**found)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{label}: {error}") from error


def read_tagged[T](
    kinds: Mapping[str, type[T]], tag: str, document: Json, label: str
) -> T:
    """Reads one of several dataclasses, which a key of the object chooses; see `read`.

    Args:
      kinds: the dataclasses, by the value of that key.
      tag: the key that chooses; it is not a field of the dataclasses.
      document: the JSON object.
      label: name of the object, for messages.

    Raises:
      ValueError: the key is missing or names no dataclass of `kinds`; see also `read`.
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
    """Splits a JSON object into the name under the key `tag` and its numbers, by key.

    Raises:
      ValueError: the document is no object, `tag` has no text, or another value is no number.
    """
    options = value(dict[str, Any], document, label)
    if not isinstance(name := options.pop(tag, None), str):
        raise ValueError(
            f'{label}: expected an object with a "{tag}", got {_short(document)}'
        )
    return name, {k: value(int | float | bool, v, label, k) for k, v in options.items()}


def fields(kind: type, document: object, label: str) -> dict[str, Any]:
    """Reads the values for the fields of a dataclass as `read` does; returns them by name."""
    given = value(dict[str, Any], document, label)
    known = {field.name: field for field in dataclasses.fields(kind)}
    check_keys(given, known, label)
    hints = typing.get_type_hints(kind)
    for name, field in known.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not optional and name not in given:
            raise ValueError(f'{label}: "{name}" is missing')
    # Keys stay in the order of the document.
    return {key: value(hints[key], given[key], label, key) for key in given}


def check_keys(given: Iterable[str], known: Iterable[str], label: str) -> None:
    """Raises ValueError if a key is unknown."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f'{label}: unknown key "{key[:_SHOWN]}"; known: {", ".join(known)}'
            )


def without_version(document: Json, version: int, label: str) -> dict[str, Any]:
    """Checks the "version" of a JSON object and returns the object without this key.

    Raises:
      ValueError: the document is no object, or has another version.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"expected a JSON object, got {type(document).__name__}")
    rest = value(dict[str, Any], document, label)
    found = rest.pop("version", None)
    # True == 1, but True is not a version.
    if type(found) is not int or found != version:
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
    """A configuration that describes how to build a model."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object."""
        raise NotImplementedError


class ModelConfig(Config):
    """Base class for configurations of a family of models; `model` in JSON selects the subclass.

    Attributes:
      model: name of the model, stored as "model" in JSON.
    """

    model: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object, without fields that have their default."""
        values = document(self, skip_defaults=True)
        return {"version": MODEL_VERSION, "model": self.model, **values}

    @classmethod
    def from_json(cls, document: Json) -> Self:
        """Builds a configuration from a JSON object, written by `to_json` or by hand.

        The key "model" selects the class.

        Raises:
          ValueError: the document is no object, has an unknown version, model or key, or has
            a wrong value.
        """
        given = without_version(document, MODEL_VERSION, "the model")
        kinds: dict[str, type[Self]] = {}
        for kind in _family(cls):
            if hasattr(kind, "model"):
                kinds.setdefault(kind.model, kind)
        return read_tagged(kinds, "model", given, "the model")


def _family[T](kind: type[T]) -> Iterator[type[T]]:
    """Yields a class and all its subclasses, direct and indirect."""
    yield kind
    for each in kind.__subclasses__():
        yield from _family(each)


def value(hint: Any, given: object, label: str, key: str = "") -> Any:
    """Checks a JSON value against a type and converts it: a list for `tuple[int, ...]`.

    Args:
      hint: the type, see `read`.
      given: the value.
      label: name of the object that has the value, for messages.
      key: name or index of the value in that object, for messages.

    Raises:
      ValueError: the value has another type.
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
    """Converts a value to the first of several types that it fits."""
    plain = type(given) in hints and type(given) in (int, float, str, bool, type(None))
    for hint in (type(given),) if plain else hints:
        is_class = isinstance(hint, type) and not _is_named_tuple(hint)
        if (_is_plain(hint) or is_class) and not _fits(hint, given):
            continue
        return value(hint, given, label, key)
    raise _wrong(" or ".join(map(_name, hints)), given, label, key)


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, str, bool, type(None))


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
    """The `repr` of a value, cut to `_SHOWN` characters for a message; its type if `repr`
    fails.
    """
    try:
        text = repr(given)
    except (RecursionError, ValueError):
        # It is nested too deeply, or an integer in it is too long.
        text = type(given).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return found
