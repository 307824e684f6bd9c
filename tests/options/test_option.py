"""Options are defined once: arguments, flags, texts and errors are derived from them."""

import dataclasses
import inspect
import math
import typing
from typing import Any, ClassVar

import option_tables
import pytest
from option_uses import Uses

from sparsejax.cli import flags, shell
from sparsejax.options import measuring, planning, predicting, reading, training
from sparsejax.options.option import Flag, Options, option, takes, texts_of, verb

COMMANDS = flags.Command.__subclasses__()
STATED = [training.Train, measuring.Evaluate, measuring.Report, predicting.Recommend]
STATED += [predicting.Export, training.Fit, measuring.Measure, predicting.Rank]
STATED += [predicting.Write, planning.Plan, reading.Prepare]


class Brewing(Options, kw_only=False):
    """How tea is brewed.

    Attributes:
      leaves: The leaves.
      minutes: How long.
      milk: Also add milk.
      lemon: Add lemon, see minutes=...
    """

    only_with: ClassVar = {"lemon": ("milk", "minutes")}

    leaves: str = option(dataclasses.MISSING, Flag(positional=True, value="LEAVES"))
    _: dataclasses.KW_ONLY
    minutes: float | None = option(
        None, Flag(value="FLOAT", default="three"), above=0, below=60
    )
    milk: bool = option(False, Flag(gives=True), kinds=("items",))
    lemon: tuple[int, ...] = option(
        (), Flag(name="with-lemon", type=str | None, read="numbers"), least=1
    )


@verb(Brewing)
def brew(asked: Brewing) -> Brewing:
    """Brews.

    Returns:
      The tea.

    Raises:
      ValueError: there is no water.
    """
    return asked


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
    assert found == Brewing("assam") != Brewing("assam", minutes=4.0)
    assert repr(found).startswith("Brewing(leaves='assam', minutes=None, ")
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


def test_a_function_has_the_options_of_its_verb():
    found = brew("assam", minutes=3)
    assert (found, found.given) == (Brewing("assam", minutes=3), {"leaves", "minutes"})
    signature = inspect.signature(brew)
    assert list(signature.parameters) == ["leaves", "minutes", "milk", "lemon"]
    text = inspect.getdoc(brew)
    assert text is not None
    parts = [text.index(part) for part in ("Brews.", "Args:", "Returns:", "Raises:")]
    assert parts == sorted(parts)
    with pytest.raises(TypeError, match=r"brew\(\): missing .*'leaves'"):
        typing.cast(Any, brew)()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"minutes": 0}, ValueError, "minutes must be above 0, got 0"),
        ({"minutes": 60}, ValueError, "minutes must be below 60, got 60"),
        ({"minutes": float("nan")}, ValueError, "minutes must be above 0, got nan"),
        ({"lemon": (1, 0)}, ValueError, "lemon must be at least 1, got 0"),
        ({"lemon": (2.5,)}, TypeError, "lemon must be a whole number, got 2.5"),
        ({"lemon": range(2)}, ValueError, "lemon must be at least 1, got 0"),
        ({"lemon": "2"}, TypeError, "lemon must be a whole number, got '2'"),
        ({"minutes": "2"}, TypeError, "minutes must be a number, got '2'"),
    ],
)
def test_a_number_out_of_bounds_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        brew("assam", **given)


def test_seconds_without_an_end_are_taken():
    assert training.Looping(checkpoint_seconds=math.inf).checkpoint_seconds == math.inf


def test_an_option_without_the_other_that_it_needs_is_refused():
    cases: list[dict[str, Any]] = [{}, {"milk": False}, {"minutes": None}]
    for given in cases:
        asked = brew("assam", lemon=(1,), **given)
        with pytest.raises(ValueError, match="lemon needs milk or minutes, without"):
            asked.check_kind("items")
    brew("assam", lemon=(1,), milk=True).check_kind("items")
    brew("assam").check_effect()


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


def test_the_page_of_options_is_current():
    assert option_tables.PAGE.read_text() == option_tables.page()


@pytest.fixture(scope="module")
def uses() -> Uses:
    return Uses()


@pytest.mark.parametrize("options", [*COMMANDS, *STATED], ids=lambda o: o.__qualname__)
def test_each_option_has_a_text_and_is_used(options, uses):
    assert options.option_names() <= texts_of(options).keys()
    assert not uses.unread(options)


def test_an_option_that_nothing_reads_is_found(uses):
    class Sweetened(training.Stepping):
        model: int = 0  # a name that others read, of other classes
        sugar: int = 0

    assert uses.unread(Sweetened) == {"model", "sugar"}
