"""Reads docstrings, comments, errors and pages for words that hide the subject of a sentence.

Run it for a list of faults, each with its file and line: python tests/texts.py
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("sparsejax", "pallas_kernels")

# "Whether ..." is the answer of a function that returns a bool. A comment may begin with
# "As", "On" or "With": what follows is mostly a whole sentence, "On a GPU ...".
_BEGINS = {
    "docstring": r"(Of|As|On|With|What|That|Those|Whose|Lest|But for)\b",
    "comment": r"(Of|What|That|Those|Whose|Lest|But for)\b",
    "message": r"(of|that|those|whose|lest|but for)\b",
    # An entry has a noun first, or an adjective with its noun: "seed: seed of the draws".
    "entry": (
        r"(?i:of|what|that|those|who|whom|whose|by|as|so|see|like|lest|(?:the )?same|to|from|where|has"
        r"|called|makes|gives|gets|takes|brings|returns|adds|added|initialises|computes)\b"
    ),
}
# "None if there is none" is plain; "What is none has time 0" is not.
_WITHIN = (
    r"(?<!there )\b(is|are) none\b|\b(but for|but of|lest|by and by|so too|as of an?)\b"
)
# A number may stand between: "but of 7 labels 3 are clicks", "is 5 by 4 and 3 by 2".
_IN_MESSAGES = _WITHIN.replace("but for|but of|", "").replace("by and by|", "")
# In a page a sentence that begins with a preposition hides its subject alike.
_IN_PAGES = rf"(?:^|[.:] )((?:Of|Lest) .{{0,60}})|({_WITHIN}.{{0,40}})"

_SECTION = re.compile(r"( *)(Args|Attributes|Raises|Returns|Yields|Warns):$")
_UNNAMED = ("Returns", "Yields")
_ENTRY = re.compile(r" *\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?:(?: (.*))?$")


class Text(NamedTuple):
    """A text of a module: which kind it is, its line, and its words."""

    kind: str
    line: int
    words: str


def texts(source: str) -> Iterator[Text]:
    """The docstrings of a module and their entries, its comments, errors and warnings."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (words := ast.get_docstring(node)):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            yield Text("docstring", first, words)
            for line, entry in entries(lines[first - 1 : last]):
                yield Text("entry", first + line, entry)
        if isinstance(node, ast.Raise | ast.Call) and (words := _message(node)):
            yield Text("message", node.lineno, words)
    for block in re.finditer(r"^([ ]*)#:? ?(.*(?:\n\1#.*)*)", source, re.MULTILINE):
        line = source.count("\n", 0, block.start()) + 1
        yield Text("comment", line, re.sub(r"\n *#", " ", block[2]))


def entries(docstring: list[str]) -> Iterator[tuple[int, str]]:
    """The entries of a docstring's sections: the number of the line, and the text's begin.

    In "Returns" an entry may have no name: then the section's first line begins it.
    """
    section, outer, inner = "", 0, 0
    for number, line in enumerate(docstring):
        indent = len(line) - len(line.lstrip())
        if match := _SECTION.match(line):
            section, outer, inner = match[2], len(match[1]), 0
        elif line.strip() and indent <= outer:
            section = ""
        elif section and line.strip():
            is_first, inner = not inner, inner or indent
            if indent != inner:
                continue
            if match := _ENTRY.match(line):
                # The text may begin on the line after the name.
                following = docstring[number + 1 :][:1]
                yield number, match[1] or " ".join(following).strip()
            if section in _UNNAMED and is_first:
                yield number, line.strip()


def _message(node: ast.Raise | ast.Call) -> str:
    """The text of an error or a warning, without what f-strings insert."""
    is_warning = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("warn", "warn_caller", "DataError.at", ".error")
    )
    if isinstance(node, ast.Call) and not is_warning:
        return ""
    parts = [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return "".join(part for part in parts if " " in part)


def faults(source: str) -> list[Text]:
    """The texts of a module that begin with no noun or verb, or have a riddle within."""
    return [
        text
        for text in texts(source)
        if re.match(_BEGINS[text.kind], text.words)
        or text.kind != "entry"
        and re.search(
            _IN_MESSAGES if text.kind == "message" else _WITHIN,
            " ".join(text.words.split()),
        )
    ]


def faults_of_repository() -> list[str]:
    """The faults of both packages and of all pages: file, line, and the text's begin."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).glob("**/*.py")):
            name = path.relative_to(ROOT)
            found += [
                f"{name}:{text.line}: {text.kind}: {text.words[:80]}"
                for text in faults(path.read_text(encoding="utf-8"))
            ]
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = path.read_text(encoding="utf-8")
        found += [
            f"{path.relative_to(ROOT)}:{page.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            for match in re.finditer(_IN_PAGES, page, re.MULTILINE)
        ]
    return found


if __name__ == "__main__":
    found = faults_of_repository()
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
