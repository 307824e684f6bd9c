"""Values of flags that are lists: names, and whole numbers."""

from __future__ import annotations

import os
import re


def numbers_of(text: str) -> int | tuple[int, ...]:
    """The whole number, or the numbers with commas between.

    Raises:
      ValueError: it is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"is a whole number, or several with commas, such as 5,10; got {text!r}"
        ) from None
    return found if len(found) > 1 else found[0]


def names_of(text: str) -> list[str]:
    """The names in a file, one a line; or names with commas between.

    Raises:
      ValueError: it looks like a file, and there is none.
    """
    from sparsejax.data.files.opening import lines_of

    if os.path.isfile(text):
        return lines_of(text)
    # A name that is no item has no effect, so a mistyped file must not be taken for one.
    if re.search(r"\.(txt|csv|tsv|list)$", text):
        raise ValueError(f"{text}: there is no such file")
    return text.split(",")
