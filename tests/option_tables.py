"""Writes the page of all options from the dataclasses that define them.

`docs/options.md` is this page. After a change of an option, write it anew::

    PYTHONPATH=. python tests/option_tables.py
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from sparsejax.cli import flags
from sparsejax.options import measuring, predicting, training
from sparsejax.options.option import (
    Options,
    bounds_of,
    flags_of,
    kinds_of,
    texts_of,
)

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "options.md"
# The methods of `Run` that do the work of a command.
METHODS: dict[type[Options], tuple[str, type[Options]]] = {
    flags.Train: ("Run.train", training.Train),
    flags.Evaluate: ("Run.evaluate", measuring.Evaluate),
    flags.Predict: ("Run.recommend", predicting.Recommend),
    flags.Export: ("Run.export", predicting.Export),
    flags.Report: ("Run.report", measuring.Report),
}
HEAD = """# All options

`tests/option_tables.py` writes this page from the dataclasses that state the options. An option
without kinds of models is for all of them. Options that several commands share stand once, at the
end of the page; a row in the table of a command replaces the shared one. "Flags" says that the
method in Python has no such arguments. The functions `fit`, `evaluate`, `recommend`,
`export_predictor`, `plan` and `prepare` list their arguments in the [API](api/index.md).
"""
COLUMNS = ("argument", "flag", "default", "models", "meaning")
Row = tuple[str, ...]


@dataclasses.dataclass
class Section:
    """A section of the page: a command.

    Attributes:
      title: its heading.
      options: its dataclass.
      arguments: the options that its method in Python takes.
    """

    title: str
    options: type[Options]
    arguments: Collection[str]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The names and table rows of the section's options."""
        for field in dataclasses.fields(self.options):
            if field.name in self.arguments or flags_of(field):
                yield field.name, _row(self.options, field)


def page() -> str:
    """The text of the whole page."""
    sections = list(_sections())
    users = collections.Counter(
        owner
        for section in sections
        for owner in dict.fromkeys(
            _owner(section.options, name) for name, _ in section.rows()
        )
    )
    groups = {owner: dict(_own_rows(owner)) for owner, n in users.items() if n > 1}
    parts = [HEAD]
    for section in sections:
        parts += [f"## {section.title}", "", *_section(section, groups)]
    for owner, rows in groups.items():
        parts += [f"## {_title(owner)}", "", *_table(rows.values())]
    return "\n".join(parts)


def _sections() -> Iterator[Section]:
    """The sections: one for each command."""
    for command in flags.Command.__subclasses__():
        words = re.sub(r"\B(?=[A-Z])", "-", command.__name__).lower()
        method, python = METHODS.get(command, ("", Options))
        title = f"`sparsejax {words}`" + (f" and `{method}`" if method else "")
        yield Section(title, command, python.option_names())


def _section(
    section: Section, groups: dict[type[Options], dict[str, Row]]
) -> Iterator[str]:
    """The links to the groups of a section, and a table of its other options."""
    own: list[Row] = []
    shared: dict[type[Options], list[str]] = {}
    for name, row in section.rows():
        owner = _owner(section.options, name)
        if groups.get(owner, {}).get(name) == row:
            shared.setdefault(owner, []).append(name)
        else:
            own.append((row[0] if name in section.arguments else "", *row[1:]))
    links = []
    for owner, names in shared.items():
        group = groups[owner]
        link = f"[{_title(owner)}](#{_anchor(owner)})"
        notes = []
        if lacking := [name for name in group if name not in names]:
            notes.append("without " + _code(lacking))
        taken = [name for name in names if name in section.arguments]
        if section.arguments and not taken:
            notes.append("flags")
        elif 0 < len(taken) < len(names):
            notes.append("in Python " + _code(taken))
        links.append(link + (f" ({'; '.join(notes)})" if notes else ""))
    if links:
        yield f"Shared: {', '.join(links)}.\n"
    if own:
        yield from _table(own)


def _owner(options: type[Options], name: str) -> type[Options]:
    """The class that defines an option."""
    return next(c for c in options.__mro__ if name in inspect.get_annotations(c))


def _own_rows(owner: type[Options]) -> Iterator[tuple[str, Row]]:
    """The options that a class itself defines, with their table rows."""
    for field in dataclasses.fields(owner):
        if _owner(owner, field.name) is owner:
            yield field.name, _row(owner, field)


def _row(options: type[Options], field: dataclasses.Field[Any]) -> Row:
    """The table cells of an option."""
    default = "needed"
    if field.default is not dataclasses.MISSING:
        shown = [flag.default for flag in flags_of(field) if flag.default]
        default = shown[0] if shown else f"`{field.default!r}`"
    return (
        f"`{field.name}`",
        " ".join(f"`{flag.spelled(field.name)}`" for flag in flags_of(field)),
        "; ".join(filter(None, (default, bounds_of(field)))),
        ", ".join(kinds_of(field)),
        texts_of(options)[field.name],
    )


def _table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table of options."""
    for row in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""


def _title(owner: type[Options]) -> str:
    """The heading of a group: the beginning of its docstring."""
    text = (inspect.getdoc(owner) or "").partition("\n")[0].replace("`", "")
    return re.split(r"[.,:]", text)[0]


def _anchor(owner: type[Options]) -> str:
    """The anchor of a group's heading."""
    return re.sub(r"[^\w -]", "", _title(owner).lower()).replace(" ", "-")


def _code(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
