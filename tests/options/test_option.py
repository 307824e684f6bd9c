"""Options are stated once: arguments, flags, texts and refusals are made of them."""

import ast
import dataclasses
import inspect
import pathlib
import typing
from typing import Any

import pytest

import sparsejax as sj
from sparsejax.cli import flags, shell
from sparsejax.options.option import Flag, Options, option, takes, texts_of

LIBRARY = pathlib.Path(sj.__file__).parent
COMMANDS = typing.get_args(flags.Command)


@dataclasses.dataclass(frozen=True)
class Brewing(Options):
    """How tea is brewed.

    Attributes:
      leaves: The leaves.
      minutes: How long.
      milk: Also add milk.
      lemon: Add lemon, see minutes=...
    """

    leaves: str = option(dataclasses.MISSING, Flag(positional=True, value="LEAVES"))
    _: dataclasses.KW_ONLY
    minutes: float | None = option(None, Flag(value="FLOAT", default="three"))
    milk: bool = option(False, Flag(gives=True), kinds=("items",))
    lemon: tuple[int, ...] = option(
        (), Flag(name="with-lemon", type=str | None, read="numbers")
    )


class Kettle:
    @takes(Brewing)
    def brew(self, asked: Brewing) -> Brewing:
        """Brews.

        Raises:
          ValueError: there is no water.
        """
        return asked


def parsed(*words: str) -> Brewing:
    import tyro

    values = tyro.cli(shell.parser_of(Brewing), args=words)
    return shell.command_of(Brewing, values, words)


def test_arguments_are_the_options():
    found = Kettle().brew("assam", minutes=None, milk=False)
    assert found == Brewing("assam")
    assert found.given == {"leaves", "milk"}  # also at its default; None is no argument
    signature = inspect.signature(Kettle.brew)
    assert list(signature.parameters) == ["self", "leaves", "minutes", "milk", "lemon"]
    text = inspect.getdoc(Kettle.brew)
    assert text is not None
    first, arguments = text.split("\n\nArgs:\n")
    assert first == "Brews."
    assert "  minutes: How long.\n" in arguments
    assert arguments.endswith("Raises:\n  ValueError: there is no water.")
    with pytest.raises(TypeError, match=r"brew\(\): .*'sugar'"):
        typing.cast(Any, Kettle()).brew("assam", sugar=1)


def test_flags_are_the_options():
    assert parsed("assam") == Brewing("assam")
    found = parsed("assam", "--minutes", "2", "--milk", "--with-lemon", "1,2")
    assert found == Brewing("assam", minutes=2, milk=True, lemon=(1, 2))
    assert found.given == {"leaves", "minutes", "milk", "lemon"}


def test_an_option_that_a_kind_has_no_use_for_is_refused():
    with pytest.raises(ValueError, match="milk is of no use for a model of clicks"):
        Kettle().brew("assam", milk=False).check_kind("clicks")
    Kettle().brew("assam", milk=True).check_kind("items")
    Kettle().brew("assam").check_kind("clicks")
    assert Brewing("assam").useful("clicks", Brewing).keys() == {
        *("leaves", "minutes", "lemon")
    }


def test_others_with_the_same_options_know_what_was_given():
    told: list[str] = []
    first = Kettle().brew("assam", minutes=3).noting(told=told.append)
    changed = first.replaced(minutes=4.0, milk=True)
    assert changed.given == {"leaves", "minutes"}
    changed.say("hot")
    again = changed.as_type(Brewing, leaves="oolong")
    assert (again.leaves, again.milk) == ("oolong", True)
    assert again.given == {"leaves", "minutes"}
    again.say("hotter")
    assert told == ["hot", "hotter"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_each_option_has_a_text_and_is_used(command, attributes):
    texts = texts_of(command)
    names = {field.name for field in dataclasses.fields(command)}
    assert names <= texts.keys()
    assert names <= attributes


@pytest.fixture(scope="module")
def attributes() -> set[str]:
    """The names of attributes that the library reads, outside of the options themselves.

    What is passed on as a whole is used by its name as an argument.
    """
    found: set[str] = set()
    for path in LIBRARY.rglob("*.py"):
        if path.parent.name == "options" or path.name == "flags.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found
