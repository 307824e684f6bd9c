"""The page of all options, which is made of the dataclasses that state them.

`docs/options.md` is this page. After a change of an option, write it anew::

    PYTHONPATH=. python tests/option_tables.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import typing
from collections.abc import Collection, Iterator

from sparsejax.cli import flags
from sparsejax.options import measuring, planning, predicting, reading, training
from sparsejax.options.option import (
    Options,
    bounds_of,
    flags_of,
    kinds_of,
    texts_of,
)

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "options.md"
# The methods of `Run` that do the work of a command, and the functions.
METHODS: dict[type[Options], tuple[str, type[Options]]] = {
    flags.Train: ("Run.train", training.Train),
    flags.Evaluate: ("Run.evaluate", measuring.Evaluate),
    flags.Predict: ("Run.recommend", predicting.Recommend),
    flags.Export: ("Run.export", predicting.Export),
    flags.Report: ("Run.report", measuring.Report),
}
FUNCTIONS: dict[str, type[Options]] = {
    "fit": training.Fit,
    "evaluate": measuring.Measure,
    "recommend": predicting.Rank,
    "export_predictor": predicting.Write,
    "plan": planning.Plan,
    "prepare": reading.Prepare,
}
HEAD = """# All options

`tests/option_tables.py` writes this page from the dataclasses that state the options. An option
without kinds of models is for all of them.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command in typing.get_args(flags.Command):
        words = re.sub(r"\B(?=[A-Z])", "-", command.__name__).lower()
        method, python = METHODS.get(command, ("", Options))
        title = f"## `sparsejax {words}`" + (f" and `{method}`" if method else "")
        parts += [title, *_table(command, python.option_names())]
    for name, options in FUNCTIONS.items():
        parts += [f"## `{name}`", *_table(options, options.option_names())]
    return "\n".join(parts)


def _table(options: type[Options], arguments: Collection[str]) -> Iterator[str]:
    """A table of options, in lines."""
    of_shell = options not in FUNCTIONS.values()
    yield "\n| argument | flag | default | models | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for field in dataclasses.fields(options):
        flags_here = flags_of(field) if of_shell else ()
        if field.name not in arguments and not flags_here:
            continue
        default = "needed"
        if field.default is not dataclasses.MISSING:
            shown = [flag.default for flag in flags_here if flag.default]
            default = shown[0] if shown else f"`{field.default!r}`"
        cells = [
            f"`{field.name}`" if field.name in arguments else "",
            " ".join(f"`{flag.spelled(field.name)}`" for flag in flags_here),
            "; ".join(filter(None, (default, bounds_of(field)))),
            ", ".join(kinds_of(field)),
            texts_of(options)[field.name],
        ]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
