"""Reading of JSON with DSSTNE's extensions.

Comments are allowed. Keys and the names of choices are case-insensitive.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.dsstne.layer_definition import MAX_UNITS

_ALIASES = {
    "rectifiedlinear": "RELU",
    "leakyrectifiedlinear": "LRELU",
    "exponentiallinear": "ELU",
    "scaledexponentiallinear": "SELU",
    "cross entropy": "CrossEntropy",
    "localresponsenormalization": "LRN",
}
_NO_FORMULA = "DSSTNE has a name for it, but no formula"
_REFUSED = {
    "prelu": _NO_FORMULA,
    "maxout": "it is a Function of a layer of Type Pooling",
    "relumax": _NO_FORMULA,
    "linearmax": _NO_FORMULA,
    "stochastic": _NO_FORMULA,
    "lcn": _NO_FORMULA,
    "localcontrastnormalization": _NO_FORMULA,
    "globaltemporal": _NO_FORMULA,
    "target": "DSSTNE reads this kind, but never trained it; use Output",
    "recurrent": "DSSTNE's documents name it, but DSSTNE never had it",
    "lstm": "DSSTNE never had it",
    "gru": "DSSTNE never had it",
    "l1penalty": (
        "DSSTNE's documents name it, but DSSTNE never had it; an L1 penalty of all "
        "weights is lambda1 of the update rule"
    ),
}


def parse(text: str) -> Any:
    """The value of JSON text. Comments, `// ...` and `/* ... */`, are allowed.

    >>> parse('{"N": 128 /* units */} // a layer')
    {'N': 128}

    Raises:
      ValueError: the text is not JSON; the message has the line and the column.
    """

    def blank(match: re.Match) -> str:
        if match["open"]:
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"not JSON: the comment that begins in line {line} has no end"
            )
        # Strings are kept. Of a comment, the line breaks are kept, so that errors name the right
        # line.
        return match["string"] or re.sub(r"[^\n]", " ", match[0])

    # Once an alternative begins, it matches something. Otherwise the search would fail and be
    # tried again at the next position, which takes quadratic time. The JSON parser reports a
    # string without an end.
    string, open_comment = r'(?P<string>"(?:[^"\\\n]|\\.)*"?)', r"(?P<open>/\*.*)"
    tokens = rf"{string}|//[^\n]*|/\*.*?\*/|{open_comment}"
    try:
        return json.loads(re.sub(tokens, blank, text, flags=re.DOTALL))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not a network: its brackets are too deep") from error


class Keys:
    """A JSON object with case-insensitive keys; unknown keys are errors."""

    def __init__(self, document: object, known: Any, label: str):
        if not isinstance(document, dict):
            raise ValueError(
                f"{label} must be a JSON object, {{...}}, got {_short(document)}"
            )
        aliases = known if isinstance(known, Mapping) else {key: () for key in known}
        names = {
            spelling.lower(): key
            for key, others in aliases.items()
            for spelling in (key, *others)
        }
        self.label = label
        self.values: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        for written, value in document.items():
            key = names.get(written.lower())
            if key is None:
                raise _unknown(written, names, aliases, label)
            if key in self.values:
                raise ValueError(
                    f'{label}: "{self.written[key]}" and "{written}" are the same key'
                )
            self.values[key], self.written[key] = value, written

    def _wrong(self, key: str, expected: str) -> ValueError:
        got = _short(self.values[key])
        return ValueError(
            f'{self.label}: "{self.written[key]}" must be {expected}, got {got}'
        )

    def number(self, key: str, default: Any) -> Any:
        if key not in self.values:
            return default
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return value

    def whole(
        self, key: str, default: int, *, least: int = 1, most: int = MAX_UNITS
    ) -> int:
        if key not in self.values:
            return default
        if (value := _as_whole(self.values[key], least, most)) is None:
            upto = "" if most == MAX_UNITS else f" to {most}"
            raise self._wrong(key, f"a whole number from {least}{upto}")
        return value

    def wholes(self, key: str, most: int) -> tuple[int, ...] | None:
        """A whole number, or a list of up to `most` of them; None if the key is missing."""
        if key not in self.values:
            return None
        value = self.values[key]
        numbers = value if isinstance(value, list) else [value]
        found = [_as_whole(number) for number in numbers]
        if not 1 <= len(found) <= most or None in found:
            raise self._wrong(
                key, f"a whole number from 1, or a list of 1 to {most} of them"
            )
        return tuple(number for number in found if number is not None)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if value not in (0, 1):
            raise self._wrong(key, "true or false")
        return bool(value)

    def text(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if key in self.values and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A name, or a list of names; None if the key is missing."""
        if key not in self.values:
            return None
        value = self.values[key]
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            raise self._wrong(key, "the name of a layer, or a list of such names")
        return tuple(names)

    def choice(self, key: str, choices: Sequence[str], default: Any) -> Any:
        if key not in self.values:
            return default
        value = self.text(key, None)
        lower = value.lower()
        known = {choice.lower(): choice for choice in choices}
        if (found := known.get(_ALIASES.get(lower, lower).lower())) is not None:
            return found
        if lower in _REFUSED:
            raise NotImplementedError(
                f'{self.label}: "{self.written[key]}" is "{value}", which is not '
                f"supported: {_REFUSED[lower]}"
            )
        raise self._wrong(key, f"one of {', '.join(choices)}")

    def inner(self, key: str, known: Any) -> Keys:
        return Keys(self.values.get(key, {}), known, f'{self.label}, "{key}"')


def _as_whole(value: Any, least: int = 1, most: int = MAX_UNITS) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not least <= value <= most or int(value) != value:
        return None
    return int(value)


def _unknown(written: str, names: Any, known: Any, label: str) -> Exception:
    lower = written.lower()
    if reason := {k: _REFUSED[k] for k in ("recurrent", "l1penalty")}.get(lower):
        return NotImplementedError(
            f"{label}: {_short(written)} is not supported: {reason}"
        )
    nearest = difflib.get_close_matches(lower, names, n=1, cutoff=0.0)
    hint = f'; the nearest known key is "{names[nearest[0]]}"' if nearest else ""
    return ValueError(f"{label}: unknown key {_short(written)}{hint}")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
