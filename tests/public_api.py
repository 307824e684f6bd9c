"""Lists the public names and their signatures as lines of text.

`tests/public_api.txt` has them. After a change that was meant, write it anew::

    PYTHONPATH=. python tests/public_api.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from sparsejax.options.option import Options

PACKAGES = [
    "",
    "baselines",
    "clicks",
    "data",
    "data.datasets",
    "dsstne",
    "losses",
    "metrics",
]
PACKAGES += ["embeddings", "mesh", "nn", "optimizers", "sequence", "spark", "training"]
PACKAGES += ["cli.flags"]  # this module has the flags of the commands
SNAPSHOT = pathlib.Path(__file__).parent / "public_api.txt"


def lines() -> list[str]:
    """A line for each public name, and for each public member of a class."""
    found: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(f"sparsejax.{package}".rstrip("."))
        for name in sorted(public_names(module)):
            found += described(
                f"{module.__name__}.{name}".removeprefix("sparsejax."),
                getattr(module, name),
            )
    return found


def public_names(module: Any) -> set[str]:
    """The names that a module's stub lists, that it imports under their own name, or that it
    defines.
    """
    path = pathlib.Path(module.__file__)
    stub = path.with_suffix(".pyi")
    text = (stub if stub.exists() else path).read_text()
    named = set(
        re.findall(r"import \w+ as (\w+)|^    (\w+) as \2,$", text, re.MULTILINE)
    )
    reexported = {one or other for one, other in named}
    if path.stem == "__init__":
        return reexported
    own = vars(module).items()
    return {
        name
        for name, value in own
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }


def described(name: str, value: Any) -> Iterator[str]:
    """The signature of a function; for a class also of its members."""
    if inspect.ismodule(value):
        return
    yield name + signature(value)
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    is_made_of = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    fields = {field.name for field in is_made_of} | {*getattr(value, "_fields", ())}
    for member, _ in sorted(inspect.getmembers(value)):
        owner = next((c for c in value.__mro__ if member in vars(c)), object)
        if (member.startswith("_") and member != "__call__") or member in fields:
            continue
        if not owner.__module__.startswith("sparsejax"):
            continue
        if owner is Options:  # these are equal for all verbs and commands
            continue
        own = inspect.getattr_static(value, member)
        if isinstance(own, staticmethod | classmethod):
            own = own.__func__
        yield f"{name}.{member}{signature(own)}"


def signature(value: Any) -> str:
    """Parameters with their defaults. Annotations can be read in the code."""
    if isinstance(value, type):  # the metaclass of NNX modules accepts any arguments
        made = inspect.getattr_static(value, "__init__")
        value = value if made is object.__init__ else made
    if callable(value):  # a callable, unless something states another signature
        value = inspect.unwrap(value, stop=lambda f: hasattr(f, "__signature__"))
    if not callable(value) or getattr(value, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=shown(parameter))
        for parameter in found.parameters.values()
    ]
    bare = inspect.Signature(parameters)
    return str(bare)


class _Shown:
    """An object whose `repr` is this text."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown(parameter: inspect.Parameter) -> Any:
    """The default of a parameter, without memory addresses of objects."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return default
    if dataclasses.is_dataclass(default) or isinstance(
        default, str | int | float | tuple
    ):
        return default
    if default is None or isinstance(default, bool):
        return default
    return _Shown(
        re.sub(" at 0x[0-9a-f]+", "", getattr(default, "__name__", repr(default)))
    )


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
