"""Finds the options that the library reads, by the annotations of variables in its source."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
from collections.abc import Iterator

import sparsejax
from sparsejax.options.option import Options

LIBRARY = pathlib.Path(sparsejax.__file__).parent
Kind = type[Options]
# Methods that return all options of a class by name.
_WHOLE = {"values_of", "useful", "option_names"}
# Methods that copy the options which two classes share.
_PASSES = {"as_type", "shared_with"}


class Uses:
    """The options that some modules read.

    Attributes:
      read: an option, with the class by which it is read.
      passed: a class whose options become those of the other.
    """

    def __init__(self) -> None:
        self.read: set[tuple[Kind, str]] = set()
        self.passed: set[tuple[Kind, Kind]] = set()
        for module in ("cli.flags", "engine.train.loop", "engine.rank.evaluation"):
            importlib.import_module(f"sparsejax.{module}")
        self._known: dict[str, list[Kind]] = {}
        left: list[Kind] = [Options]
        while left:
            cls = left.pop()
            left += cls.__subclasses__()
            if cls.__module__.startswith("sparsejax."):
                self._known.setdefault(cls.__name__, []).append(cls)
        for path in sorted(LIBRARY.rglob("*.py")):
            text = path.read_text()
            if "sparsejax.options" not in text and "flags" not in text:
                continue
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    self._note_aliases(node)
                elif isinstance(node, ast.ClassDef):
                    self._note(node, self._typed_in(node))
                elif isinstance(node, ast.FunctionDef):
                    self._note(node, self._typed(node))

    def unread(self, options: Kind) -> set[str]:
        """The options of a class that no module reads."""
        return {
            field.name
            for field in dataclasses.fields(options)
            if not self._is_read(options, field.name)
        }

    def _is_read(self, options: Kind, name: str) -> bool:
        origin = _stated_by(options, name)
        if any(n == name and origin & _stated_by(c, name) for c, n in self.read):
            return True
        return any(
            origin & _stated_by(before, name)
            and name in after.option_names()
            and not origin & _stated_by(after, name)
            and self._is_read(after, name)
            for before, after in self.passed
        )

    def _note_aliases(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            if each.asname and each.name in self._known:
                self._known.setdefault(each.asname, self._known[each.name])

    def _typed_in(self, cls: ast.ClassDef) -> dict[str, list[Kind]]:
        """The attributes of a class that hold options; in a class of options also `self`."""
        found = {"self": self._known.get(cls.name, [])}
        for node in cls.body:
            if isinstance(node, ast.AnnAssign):
                name = f"self.{_place(node.target)}"
                found[name] = [*self._named(node.annotation)]
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                given = self._typed(node).items()
                found |= {f"self.{name}": kinds for name, kinds in given}
        return found

    def _typed(self, function: ast.FunctionDef) -> dict[str, list[Kind]]:
        """The variables of a function that hold options."""
        found: dict[str, list[Kind]] = {}
        given = function.args
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            if each.annotation is not None:
                found[each.arg] = [*self._named(each.annotation)]
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            name, call = _place(node.targets[0]), node.value
            if isinstance(call, ast.Call) and _method(call) == "as_type":
                found[name] = [*found.get(name, []), *self._named(call.args[0])]
        return found

    def _named(self, annotation: ast.expr) -> Iterator[Kind]:
        for node in ast.walk(annotation):
            first, _, last = _place(node).rpartition(".")
            for cls in self._known.get(last, []):
                if first != "flags" or cls.__module__.endswith("flags"):
                    yield cls

    def _note(self, part: ast.AST, typed: dict[str, list[Kind]]) -> None:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                held = typed.get(_place(node.value), [])
                self.read |= {(cls, node.attr) for cls in held}
            elif isinstance(node, ast.MatchClass):
                for cls in self._named(node.cls):
                    self.read |= {(cls, name) for name in node.kwd_attrs}
            elif isinstance(node, ast.Call) and _method(node) in _WHOLE:
                assert isinstance(node.func, ast.Attribute)
                for argument in (node.func.value, *node.args):
                    for cls in self._named(argument):
                        if cls.__name__ != "Recorded":  # a record is no use
                            self.read |= {(cls, name) for name in cls.option_names()}
            elif isinstance(node, ast.Call) and _method(node) in _PASSES:
                assert isinstance(node.func, ast.Attribute)
                for before in typed.get(_place(node.func.value), []):
                    self.passed |= {(before, c) for c in self._named(node.args[0])}


def _place(node: ast.AST) -> str:
    """A variable, or an attribute of one, as text; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{_place(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _stated_by(options: Kind, name: str) -> set[type]:
    """The classes that define an option: the class itself, or a base class."""
    return {c for c in options.__mro__ if name in vars(c).get("__annotations__", {})}
