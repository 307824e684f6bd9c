"""Counts what a reader of the package meets: branches on kinds, imports, ways through rooms.

python benchmarks/structure.py ceilings [--root FOLDER]            fails above a ceiling
python benchmarks/structure.py run [--root FOLDER] [--out NAME]    counts a checkout
python benchmarks/structure.py table BEFORE AFTER                  results beside each other

`make lint` runs `ceilings`: it counts the texts of both packages, imports neither, and compares
the counts with `[tool.sparsejax.ceilings]` in pyproject.toml. A ceiling only goes down, except in a
commit whose message has a line that begins with "Ceiling:" and says why.

A *kind* is items, histories or clicks. A *branch on kinds* tests the class of a model, a
configuration or a data set of one of them, or compares with a kind's name, or asks a
predicate such as `of_histories`. What a module of one kind asks of that kind alone is none:
whether its data is in memory or on disk, or which of its models it is. Nor is the question
whether a table or an object has a column or a key of such a name. A *room* is a module, a *wing* a package, and the import
contract of the checkout says on which floor it stands.

A *way* is what a call enters until the first operation of a step is traced. A *stop* is
another room than before, in the order of calls. A *return* is a stop on a higher floor than
the one before. A *climb* is a call that leads to a higher floor than its caller's, so that who
reads the caller has to look above. A *callback* leads there, too, but the caller was handed the
function: a decorator by its `@`, or the loss that a gradient is taken of by a room that waits
for the result. Who reads has just been there. What Python or JAX calls to make, hash or compare
a value is neither.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

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
# The kind of a module, by words in its path; of the others, by its wing.
HOMES = {"click": "clicks", "sequence": "histories", "histor": "histories"}
WINGS = {"embeddings": "clicks", "nn": "items", "dsstne": "items"}
WORDS = {"items", "histories", "clicks", "autoencoder", "sasrec", "hstu", "gru"}
PREDICATES = {"of_histories", "is_click_model", "is_history_model"}
MOST_PARAMETERS = 8
# A function or a module with more lines of code than this is a long one.
LONG_FUNCTION = 40
LONG_MODULE = 300
_JSON = {"json.loads", "json.dumps", "json.load", "json.dump"}
_OF_VALUES = {"__init__", "__post_init__", "__hash__", "__eq__"}
_FIRST_OPERATIONS = {"gather_matmul", "gather_sum", "history_attention"}


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch on kinds: where it stands, and what it asks."""

    where: str
    asks: str


def branches(path: str, tree: ast.AST) -> Iterator[Branch]:
    """The branches on kinds of a module."""
    for node in ast.walk(tree):
        asked = _asked(node)
        if asked and {KINDS.get(name, "") for name in asked.split()} != {home(path)}:
            yield Branch(f"{path}:{getattr(node, 'lineno', 0)}", asked)


def home(path: str) -> str | None:
    """The kind that a module is about, if it is about one."""
    found = [kind for word, kind in HOMES.items() if word in path]
    parts = path.removesuffix(".py").split("/")
    if parts[1] == "kinds" and "items" in parts:
        found.append("items")
    return [*found, WINGS.get(parts[1])][0]


def _asked(node: ast.AST) -> str:
    """What a node asks about a kind; nothing if it is no such question."""
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
            return ""  # whether there is a column or a key of this name
        return " ".join(sorted(_words(sides) & WORDS))
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return " ".join(sorted(_attributes(node.test) & PREDICATES))
    if isinstance(node, ast.MatchClass):
        return " ".join(_names(node.cls) & KINDS.keys())
    if isinstance(node, ast.MatchValue):
        return " ".join(_words([node.value]) & WORDS)
    if isinstance(node, ast.Dict):
        # A dict with a key "items" alone is no table of kinds.
        found = _words([key for key in node.keys if key]) & set(KINDS.values())
        return " ".join(sorted(found)) if len(found) > 1 else ""
    return ""


def _words(nodes: list[ast.expr]) -> set[str]:
    """The strings of some expressions."""
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
    """Numbers of the lines with code: no docstring, no comment, nothing blank."""
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
    """How often a type checker learns nothing: `Any`, `object`, `cast`, an ignored line.

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
    """What has a ceiling, counted in the texts of a checkout."""
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
    """What is wrong with some counts: those above their ceilings, and those without one."""
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
        return []  # no clone, as in a source archive
    wrong = []
    for commit in log.split():
        after = ceilings(_git(root, "show", f"{commit}:pyproject.toml"))
        message = _git(root, "log", "-1", "--format=%B", commit)
        try:
            before = ceilings(_git(root, "show", f"{commit}^:pyproject.toml"))
        except subprocess.CalledProcessError:
            continue  # the first commit, or the last one that a shallow clone has
        wrong += [f"{commit[:8]}: {line}" for line in raised(before, after, message)]
    return wrong


def codecs(tree: ast.AST) -> set[str]:
    """How a module reads or writes JSON: by calls of `json`, or by its own functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _JSON:
            found.add("json")
        if isinstance(node, ast.FunctionDef) and node.name == "from_json":
            found.add("from_json")
        if isinstance(node, ast.FunctionDef) and node.name == "to_json":
            found.add("to_json")
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("VERSION", "_VERSION"):
                found.add("version")
    return found


def floors(root: pathlib.Path) -> dict[str, int]:
    """The floor of each wing, from the ground up."""
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    for contract in tool["importlinter"]["contracts"]:
        if contract.get("containers") == ["sparsejax"]:
            layers = reversed(contract["layers"])
            return {
                wing: floor
                for floor, layer in enumerate(layers)
                for wing in re.findall(r"\w+", layer)
            }
    raise ValueError(f"{root}: pyproject.toml has no contract of wings")


def imports(root: pathlib.Path) -> tuple[int, dict[str, int]]:
    """The number of imports between modules, and of the wings that each wing imports."""
    import grimp

    graph = grimp.build_graph("sparsejax", cache_dir=None)
    arrows, wings = 0, collections.defaultdict(set)
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            arrows += 1
            if _wing(module) != _wing(other):
                wings[_wing(module)].add(_wing(other))
    return arrows, {wing: len(others) for wing, others in sorted(wings.items())}


def _wing(module: str) -> str:
    return module.split(".")[1] if "." in module else "sparsejax"


class _Arrived(Exception):
    """The first operation of a step is reached."""


def way(call: Any, floor: dict[str, int]) -> dict[str, Any]:
    """The rooms that a call enters before the first operation of a step."""
    entered: list[str] = []
    climbs, callbacks = [], []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("sparsejax."):
            return
        code = frame.f_code.co_name
        if code == "<module>":
            return
        caller = frame.f_back
        while caller and not caller.f_globals.get("__name__", "").startswith(
            "sparsejax."
        ):
            caller = caller.f_back
        if caller is not None:
            above = caller.f_globals["__name__"]
            if floor[_wing(name)] > floor[_wing(above)] and code not in _OF_VALUES:
                found = callbacks if _is_handed(frame, caller) else climbs
                found.append(f"{above} -> {name}.{code}")
        entered.append(name)
        if name.startswith("sparsejax.ops.") and code in _FIRST_OPERATIONS:
            sys.setprofile(None)
            raise _Arrived

    sys.setprofile(note)
    try:
        call()
    except _Arrived:
        pass
    finally:
        sys.setprofile(None)
    stops = [
        n for n, before in zip(entered, ["", *entered], strict=False) if n != before
    ]
    heights = [floor[_wing(stop)] for stop in stops]
    returns = sum(b > a for a, b in itertools.pairwise(heights))
    rooms = sorted(set(entered))
    return {
        "rooms": len(rooms),
        "stops": len(stops),
        "returns": returns,
        "climbs": len(climbs),
        "callbacks": len(callbacks),
        "names": rooms,
        "climbed": sorted(set(climbs)),
        "called_back": sorted(set(callbacks)),
    }


def _is_handed(frame: FrameType, caller: FrameType) -> bool:
    """Whether the function of a frame was handed to its caller.

    The caller has it in a variable or an attribute, as the wrapper of a decorator; or the
    room that defines it has called the caller, and waits.
    """
    held = [*caller.f_locals.values()]
    held += getattr(caller.f_locals.get("self"), "__dict__", {}).values()
    for value in filter(callable, held):
        if getattr(inspect.unwrap(value), "__code__", None) is frame.f_code:
            return True
    room, waiting = frame.f_globals.get("__name__"), caller.f_back
    while waiting is not None:
        if waiting.f_globals.get("__name__") == room:
            return True
        waiting = waiting.f_back
    return False


def ways(floor: dict[str, int]) -> dict[str, Any]:
    """The ways of `fit`, `evaluate` and `recommend` of items, and of `fit` of other kinds."""
    import numpy as np
    import scipy.sparse
    from flax import nnx

    import sparsejax as sj

    def items(rows: int) -> sj.SparseDataset:
        held = np.random.default_rng(rows).random((rows, 30)) < 0.3
        return sj.SparseDataset.from_scipy(scipy.sparse.csr_array(held))

    def histories(rows: int) -> sj.SequenceDataset:
        named: Any = [[f"{n}" for n in range(count)] for count in (rows, 30)]
        drawn = np.random.default_rng(rows).integers(0, 30, 5 * rows)
        return sj.SequenceDataset(np.arange(0, 5 * rows + 1, 5), drawn, *named)

    schema = sj.ClickSchema("click", ids={"user": sj.data.HashedColumn(30)})

    def clicks(rows: int) -> sj.ClickDataset:
        drawn = np.random.default_rng(rows).integers(0, 30, rows).astype(np.int32)
        labels = (drawn % 2).astype(np.float32)
        dense = np.zeros((rows, 0), np.float32)
        return sj.ClickDataset(labels, dense, {"user": drawn}, schema, {})

    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=30, outputs=30, rngs=nnx.Rngs(0))
    ordered = sj.sequence.SASRec(
        sj.SASRecConfig(width=8, blocks=1), items=30, rngs=nnx.Rngs(0)
    )
    clicked = sj.embeddings.WideDeep(
        sj.WideDeepConfig(dim=4), num_dense=0, features={"user": 30}, rngs=nnx.Rngs(0)
    )

    def fit(model: Any) -> Callable[[Any, int], Any]:
        optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
        return lambda d, n: sj.fit(model, optimizer, d, batch_size=n, num_epochs=1)

    calls = {
        "fit": (items, fit(model)),
        "fit of histories": (histories, fit(ordered)),
        "fit of clicks": (clicks, fit(clicked)),
        "evaluate": (
            items,
            lambda d, n: sj.evaluate(model, d, d, k=3, exclude=None, batch_size=n),
        ),
        "recommend": (
            items,
            lambda d, n: sj.recommend(model, d, k=3, batch_size=n, exclude=None),
        ),
    }
    found = {}
    for name, (data, call) in calls.items():
        call(data(20), 8)  # imports what it uses
        other = data(52)  # of another size, so that its program is traced
        found[name] = way(functools.partial(call, other, 16), floor)
    return found


def count(root: pathlib.Path) -> dict[str, Any]:
    """All numbers of a checkout, which is the one that is imported."""
    package = importlib.import_module("sparsejax")
    if pathlib.Path(str(package.__file__)).resolve().parent.parent != root:
        raise ValueError(f"{package.__file__} is imported: set PYTHONPATH={root}")
    wings: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    found: dict[str, Any] = {"branches": [], "long_signatures": []}
    json_users: dict[str, list[str]] = {}
    for path in sorted((root / "sparsejax").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        tree = ast.parse(text)
        wing = name.split("/")[1].removesuffix(".py")
        asked = [dataclasses.asdict(branch) for branch in branches(name, tree)]
        long = list(long_signatures(name, tree))
        found["branches"] += asked
        found["long_signatures"] += long
        if uses := codecs(tree) - {"to_json"}:
            json_users[name] = sorted(uses)
        wings[wing] += collections.Counter(
            modules=1,
            lines=text.count("\n"),
            branches=len(asked),
            long_signatures=len(long),
        )
    arrows, above = imports(root)
    for wing, others in above.items():
        wings[wing]["wings_imported"] = others
    stub = (root / "sparsejax" / "__init__.pyi").read_text()
    users = [set(uses) for uses in json_users.values()]
    found["totals"] = {
        "modules": sum(wing["modules"] for wing in wings.values()),
        "lines": sum(wing["lines"] for wing in wings.values()),
        "branches on kinds": len(found["branches"]),
        "imports between modules": arrows,
        "imports between wings": sum(above.values()),
        f"functions with more than {MOST_PARAMETERS} parameters": len(
            found["long_signatures"]
        ),
        "modules that call json": sum("json" in uses for uses in users),
        "modules with a from_json": sum("from_json" in uses for uses in users),
        "modules that handle a version": sum("version" in uses for uses in users),
        "public names at the top": len(set(re.findall(r" as (\w+)", stub))),
    }
    found["json"] = json_users
    found["wings"] = {wing: dict(numbers) for wing, numbers in sorted(wings.items())}
    found["ways"] = ways(floors(root))
    for verb, numbers in found["ways"].items():
        for what in ("rooms", "stops", "returns", "climbs", "callbacks"):
            found["totals"][f"{verb}: {what}"] = numbers[what]
    return found


def shown(*results: dict[str, Any]) -> str:
    """The totals beside each other, as Markdown."""
    heads = ["", *(f"{r['date']}, {r['commit']}" for r in results)]
    rows = [heads, ["---"] * len(heads)]
    for name in results[-1]["totals"]:
        numbers = [f"{r['totals'][name]:,}" for r in results]
        rows.append([name, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", root, *arguments]
    return subprocess.check_output(
        command, text=True, stderr=subprocess.DEVNULL
    ).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    limited = commands.add_parser("ceilings")
    limited.add_argument("--root", type=pathlib.Path, default=_HERE.parent)
    run = commands.add_parser("run")
    run.add_argument("--root", type=pathlib.Path, default=_HERE.parent)
    run.add_argument("--out", default="structure")
    table = commands.add_parser("table")
    table.add_argument("results", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "table":
        paths = [_HERE / "results" / f"{name}.json" for name in arguments.results]
        print(shown(*(json.loads(path.read_text()) for path in paths)))
        return
    root = arguments.root.resolve()
    if arguments.command == "ceilings":
        counts = counted(root)
        limits = ceilings((root / "pyproject.toml").read_text())
        for name, found in counts.items():
            print(f"{name}: {found:,} of at most {limits.get(name, 0):,}")
        if wrong := above(counts, limits) + _raised_in_history(root):
            sys.exit("\n".join(["Too many:", *wrong]))
        return
    result = {
        "date": _git(root, "log", "-1", "--format=%cs"),
        "commit": _git(root, "rev-parse", "--short", "HEAD"),
        "command": f"python benchmarks/structure.py run --out {arguments.out}",
        **count(root),
    }
    path = _HERE / "results" / f"{arguments.out}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(shown(result))


if __name__ == "__main__":
    main()
