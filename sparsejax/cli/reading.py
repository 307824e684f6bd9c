"""The flags that say how files are read, as `Reading`."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any

from sparsejax.cli.flags import Command, Compare, Evaluate, Plan, Predict, Train
from sparsejax.cli.flags import Reading as Flags
from sparsejax.cli.wording import in_flags
from sparsejax.data import ItemFeatures, read, read_item_features
from sparsejax.data.files.columns import BY_NAME
from sparsejax.data.files.opening import lines_of
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.sets.assemble import Features
from sparsejax.runs.options import Correcting, Reading


def reading_of(command: Flags) -> Reading:
    """How a command reads its files. What was read is printed to stderr.

    Raises:
      ValueError: `--time` and `--no-time` are given.
    """
    columns = command.columns
    if columns.no_time and columns.time is not None:
        raise ValueError("give --time or --no-time, not both")
    by_name = BY_NAME if columns.time is None else columns.time
    return Reading(
        format=command.format,
        user=columns.user,
        item=columns.item,
        value=columns.value,
        time=None if columns.no_time else by_name,
        delimiter=columns.delimiter,
        separator=columns.separator,
        time_format=columns.time_format,
        indicator=columns.no_value,
        skip_bad_lines=columns.skip_bad_lines,
        say=functools.partial(_print, command),
    )


def _print(command: Command, text: str) -> None:
    print(in_flags(text, command), file=sys.stderr)


def correcting_of(command: Command) -> Correcting:
    """How a command corrects probabilities."""
    given = getattr(command, "correcting", None)
    return Correcting() if given is None else Correcting(**vars(given))


def cutoffs_of(text: str) -> int | tuple[int, ...]:
    """The numbers of recommendations that `--k` of a measurement names.

    Raises:
      ValueError: it is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--k is a whole number, or several with commas, such as 5,10; got {text!r}"
        ) from None
    return found if len(found) > 1 else found[0]


def keeps_seen(command: Predict) -> bool:
    """Whether items are recommended that a row already has.

    Raises:
      ValueError: the flags say both.
    """
    if command.keep_seen and command.exclude_seen:
        raise ValueError("give --keep-seen or --exclude-seen, not both")
    return command.keep_seen


def content_of(command: Train | Plan) -> ItemFeatures | str | None:
    """The content of items that a command names: its file, or what is read by its flags.

    Raises:
      ValueError: there are flags about content, and there is no content.
    """
    options: dict[str, Any] = {
        "columns": command.content_columns,
        "words": command.words,
    }
    given = {name: value for name, value in options.items() if value}
    if not given:
        return command.item_features
    if command.item_features is None:
        raise ValueError(
            f"--{next(iter(given))} says how --item-features is read; name the file"
        )
    return read_item_features(command.item_features, **given)


def read_features(path: str) -> Features:
    """The features of a file, to read others against."""
    folder = DataFolder.find(path)
    return read(path) if folder is None else folder.vocabulary()


def items_of(command: Evaluate | Compare | Predict) -> dict[str, Any]:
    """The names of items that `--exclude-items` and `--only-items` give, by argument."""
    given = {n: getattr(command, n) for n in ("exclude_items", "only_items")}
    given = {name: text for name, text in given.items() if text is not None}
    for name, text in given.items():
        # A name that is no item has no effect, so a mistyped file must not be taken for one.
        if re.search(r"\.(txt|csv|tsv|list)$", text) and not os.path.isfile(text):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {text}: there is no such file")
    return {name: names_of(text)[0] for name, text in given.items()}


def names_of(text: str) -> tuple[list[str], str]:
    """The names that a flag has: the lines of a file, or names between commas.

    Returns:
      The names, and what to say after an error about them.
    """
    if os.path.isfile(text):
        return lines_of(text), ""
    return text.split(","), f"; there is no file called {text} either"
