"""What `make lint` counts, and how it fails above a ceiling."""

import ast
import pathlib
import textwrap

import pytest
import structure

ROOT = pathlib.Path(__file__).parents[1]
CEILINGS = structure.ceilings((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(data, ClickDataset)",
        "type(model) is SASRec",
        "kind.name == 'clicks'",
        "of_histories(model)",
        "a if model.of_histories else b",
        "{'items': Network, 'histories': Histories}[kind.name]",
        "_OPTIONS = {'clicks': 1, 'items': 2}",
        """
        match kind.name:
            case "clicks":
                pass
        """,
        """
        match data:
            case ClickDataset():
                pass
        """,
    ],
)
def test_a_branch_on_kinds_is_counted(code):
    tree = ast.parse(textwrap.dedent(code))
    assert len(list(structure.branches("sparsejax/verbs/other.py", tree))) == 1


@pytest.mark.parametrize(
    "code", ["'items' in columns", "{'items': 1, 'scores': 2}", "isinstance(x, list)"]
)
def test_no_other_question_is_counted(code):
    assert not list(structure.branches("sparsejax/verbs/other.py", ast.parse(code)))


def test_lines_of_code_are_no_docstrings_comments_or_blanks():
    text = textwrap.dedent('''
        """A module.

        With two paragraphs.
        """

        # A comment.
        VALUE = (
            1,  # beside code
        )


        def function():
            """A docstring."""
            return """text
            that counts"""
    ''')
    lines = structure.code_lines(text, ast.parse(text))
    assert [text.splitlines()[n - 1].strip() for n in sorted(lines)] == [
        "VALUE = (",
        "1,  # beside code",
        ")",
        "def function():",
        'return """text',
        'that counts"""',
    ]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(x: Any) -> object: ...", 2),
        ("def f(x: dict[str, typing.Any]): ...", 1),
        ("x = cast(int, y)", 1),
        ("x = y  # type: ignore", 1),
        ("x = y  # pyrefly: ignore[bad-argument-type]", 1),
        ("from typing import Any", 0),
        ("_NOTHING = object()", 0),
        ("def f(x: int) -> str: ...", 0),
    ],
)
def test_untyped_places_are_counted(code, count):
    assert structure.untyped(code, ast.parse(code)) == count


def test_one_more_than_the_ceiling_fails():
    assert not structure.above(CEILINGS, CEILINGS)
    for name, limit in CEILINGS.items():
        (wrong,) = structure.above({**CEILINGS, name: limit + 1}, CEILINGS)
        assert wrong.startswith(f"{name}: {limit + 1:,} is above")
    (wrong,) = structure.above({**CEILINGS, "new": 1}, CEILINGS)
    assert wrong == "new: has a count, but no ceiling"
    (wrong,) = structure.above({}, {"old": 1})
    assert wrong == "old: has a ceiling, but no count"


def test_a_ceiling_rises_only_with_a_reason():
    before = {"modules": 3, "branches on kinds": 5}
    assert not structure.raised(before, {**before, "modules": 2}, "Merge two modules")
    assert not structure.raised({}, before, "Count")
    higher = {**before, "modules": 4}
    assert structure.raised(before, higher, "Add a module")
    assert structure.raised(before, {"modules": 3}, "Ask for a branch")
    assert not structure.raised(before, higher, "Add a module\n\nCeiling: a new wing")


def test_each_count_has_a_ceiling():
    assert structure.counted(ROOT).keys() == CEILINGS.keys()
