"""Counts branches on kinds, lines, long functions and untyped places, for `make lint`.

    python tests/structure.py ceilings [--root FOLDER]

It counts the texts of both packages, imports neither, and fails if a count is above its ceiling
in `[tool.sparsejax.ceilings]` of pyproject.toml. A ceiling only goes down, except in a commit
whose message has a line that begins with "Ceiling:" and says why.

A *kind* is items, histories or clicks. A *branch on kinds* tests the class of a model, a
configuration or a data set of one of them, or compares with a kind's name, or asks a
predicate such as `of_histories`. Questions that a module of one kind asks about that kind alone
do not count. Nor does the question whether a table or an object has a column or a key of such a
name.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
_ITEMS = "FeedForward Recommender NetworkConfig SparseDataset ScannedDataset"
_HISTORIES = "SASRec HSTU GRU SequenceModel HistoryModel NextItems SequenceConfig"
_HISTORIES += " SASRecConfig HSTUConfig GRUConfig SequenceDataset ScannedSequences"
_CLICKS = "DLRM DCN DeepFM WideDeep ClickModel ClickModelConfig DLRMConfig DCNConfig"
_CLICKS += " DeepFMConfig WideDeepConfig ClickDataset ScannedClicks Clicks"
KINDS: dict[str, str] = {
    **dict.fromkeys(_ITEMS.split(), "items"),
    **dict.fromkeys(_HISTORIES.split(), "histories"),
    **dict.fromkeys(_CLICKS.split(), "clicks"),
}
# The kind that a module is about, by words in its path; for other modules by the wing.
HOMES = {"click": "clicks", "sequence": "histories", "histor": "histories"}
WINGS = {"nn": "items", "dsstne": "items"}
WORDS = {"items", "histories", "clicks", "autoencoder", "sasrec", "hstu", "gru"}
PREDICATES = {"of_histories", "is_click_model", "is_history_model"}
MOST_PARAMETERS = 8
# Functions and modules with more lines of code than this count as long.
LONG_FUNCTION = 40
LONG_MODULE = 300


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch on kinds: its position, and the question that it asks."""

    where: str
    asks: str


def branches(path: str, tree: ast.AST) -> Iterator[Branch]:
    """Finds the branches on kinds in a module."""
    for node in ast.walk(tree):
        asked = _asked(node)
        if asked and {KINDS.get(name, "") for name in asked.split()} != {home(path)}:
            yield Branch(f"{path}:{getattr(node, 'lineno', 0)}", asked)


def home(path: str) -> str | None:
    """The kind that a module is about; None if it is about no single kind."""
    found = [kind for word, kind in HOMES.items() if word in path]
    parts = path.removesuffix(".py").split("/")
    if parts[1] == "kinds" and "items" in parts:
        found.append("items")
    return [*found, WINGS.get(parts[1])][0]


def _asked(node: ast.AST) -> str:
    """The question that a node asks about a kind; empty if it asks none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
            return " ".join(sorted(_names(node.args[1]) & KINDS.keys()))
        if node.func.id in PREDICATES:
            return node.func.id
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        is_type = any(
            isinstance(side, ast.Call) and _names(side.func) == {"type"}
            for side in sides
        )
        if is_type and (found := set[str]().union(*map(_names, sides)) & KINDS.keys()):
            return " ".join(sorted(found))
        if isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(
            node.left, ast.Constant
        ):
            return ""  # this only asks whether a column or a key of this name exists
        return " ".join(sorted(_words(sides) & WORDS))
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return " ".join(sorted(_attributes(node.test) & PREDICATES))
    if isinstance(node, ast.MatchClass):
        return " ".join(_names(node.cls) & KINDS.keys())
    if isinstance(node, ast.MatchValue):
        return " ".join(_words([node.value]) & WORDS)
    if isinstance(node, ast.Dict):
        # A dict whose only such key is "items" is not a table of kinds.
        found = _words([key for key in node.keys if key]) & set(KINDS.values())
        return " ".join(sorted(found)) if len(found) > 1 else ""
    return ""


def _words(nodes: list[ast.expr]) -> set[str]:
    """The string constants in some expressions."""
    return {
        leaf.value
        for node in nodes
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    }


def _names(node: ast.AST) -> set[str]:
    return {
        leaf.id if isinstance(leaf, ast.Name) else leaf.attr
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Name | ast.Attribute)
    }


def _attributes(node: ast.AST) -> set[str]:
    """Names of attributes and variables that a test reads, but not of functions it calls."""
    called = {id(leaf.func) for leaf in ast.walk(node) if isinstance(leaf, ast.Call)}
    return {
        leaf.attr if isinstance(leaf, ast.Attribute) else leaf.id
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Attribute | ast.Name) and id(leaf) not in called
    }


def long_signatures(path: str, tree: ast.AST) -> Iterator[str]:
    """Functions with more parameters than a reader keeps in mind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            count = len([a for a in every if a.arg not in ("self", "cls")])
            if count > MOST_PARAMETERS:
                yield f"{path}:{node.lineno} {node.name} {count}"


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines with code: lines with docstrings, comments or nothing do not count."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    no_code |= {tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def untyped(text: str, tree: ast.AST) -> int:
    """How often the code defeats type checking: `Any`, `object`, `cast`, or an ignored line.

    A call of `object` makes a sentinel and is not counted.
    """
    called = {id(leaf.func) for leaf in ast.walk(tree) if isinstance(leaf, ast.Call)}
    found = len(re.findall(r"# *(?:type|pyrefly): *ignore", text))
    for node in ast.walk(tree):
        name = getattr(node, "id", "") if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Attribute) and _names(node.value) == {"typing"}:
            name = node.attr
        found += name == "Any" or (name == "object" and id(node) not in called)
        found += name == "cast" and id(node) in called
    return found


def counted(root: pathlib.Path) -> dict[str, int]:
    """All counts that have a ceiling, for the texts of a checkout."""
    found: collections.Counter[str] = collections.Counter()
    functions, modules = [0], [0]
    for package in ("pallas_kernels", "sparsejax"):
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text)
            name = path.relative_to(root).as_posix()
            lines = code_lines(text, tree)
            modules.append(len(lines))
            functions += [
                len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found["modules"] += 1
            found["lines of code"] += len(lines)
            found["untyped places"] += untyped(text, tree)
            many = len(list(long_signatures(name, tree)))
            found[f"functions with more than {MOST_PARAMETERS} parameters"] += many
            if package == "sparsejax":
                found["branches on kinds"] += len(list(branches(name, tree)))
    found["lines of the longest function"] = max(functions)
    found["lines of the longest module"] = max(modules)
    long = sum(size > LONG_FUNCTION for size in functions)
    found[f"functions with more than {LONG_FUNCTION} lines"] = long
    long = sum(size > LONG_MODULE for size in modules)
    found[f"modules with more than {LONG_MODULE} lines"] = long
    words = (root / "benchmarks" / "README.md").read_text().split()
    found["words of benchmarks/README.md"] = len(words)
    return dict(found)


def ceilings(pyproject: str) -> dict[str, int]:
    """The ceilings in the text of a pyproject.toml; none if it has no such table."""
    tool = tomllib.loads(pyproject).get("tool", {})
    return tool.get("sparsejax", {}).get("ceilings", {})


def above(counts: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Messages about counts above their ceilings, or without a ceiling."""
    wrong = [
        f"{name}: {count:,} is above the ceiling, {limits[name]:,}"
        for name, count in counts.items()
        if name in limits and count > limits[name]
    ]
    for name in sorted(counts.keys() ^ limits.keys()):
        have, lack = ("count", "ceiling") if name in counts else ("ceiling", "count")
        wrong.append(f"{name}: has a {have}, but no {lack}")
    return wrong


def raised(before: dict[str, int], after: dict[str, int], message: str) -> list[str]:
    """Ceilings that a commit raises, or removes, without a reason in its message.

    Args:
      before: the ceilings of the commit's parent.
      after: the commit's ceilings.
      message: the commit's message.
    """
    if re.search(r"^Ceilings?:", message, re.MULTILINE):
        return []
    return [
        f"{name}: the ceiling rose from {limit:,} to {after.get(name, 'nothing')}; it only "
        'goes down, unless the commit\'s message says why after "Ceiling:"'
        for name, limit in before.items()
        if name not in after or after[name] > limit
    ]


def _raised_in_history(root: pathlib.Path, commits: int = 20) -> list[str]:
    """Ceilings raised without a reason in the last commits of pyproject.toml."""
    try:
        log = _git(root, "log", f"-{commits}", "--format=%H", "--", "pyproject.toml")
    except (OSError, subprocess.CalledProcessError):
        return []  # the folder is not a clone, as in a source archive
    wrong = []
    for commit in log.split():
        after = ceilings(_git(root, "show", f"{commit}:pyproject.toml"))
        message = _git(root, "log", "-1", "--format=%B", commit)
        try:
            before = ceilings(_git(root, "show", f"{commit}^:pyproject.toml"))
        except subprocess.CalledProcessError:
            # This is the first commit, or the last one that a shallow clone has.
            continue
        wrong += [f"{commit[:8]}: {line}" for line in raised(before, after, message)]
    return wrong


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", root, *arguments]
    return subprocess.check_output(
        command, text=True, stderr=subprocess.DEVNULL
    ).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["ceilings"])
    parser.add_argument("--root", type=pathlib.Path, default=_HERE.parent)
    root = parser.parse_args().root.resolve()
    counts = counted(root)
    limits = ceilings((root / "pyproject.toml").read_text())
    for name, found in counts.items():
        print(f"{name}: {found:,} of at most {limits.get(name, 0):,}")
    if wrong := above(counts, limits) + _raised_in_history(root):
        sys.exit("\n".join(["Too many:", *wrong]))


if __name__ == "__main__":
    main()
