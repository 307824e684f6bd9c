"""The drawing in the docs says the same as the import contract."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {contract["name"]: contract for contract in CONTRACTS["contracts"]}


def floors() -> list[set[str]]:
    """The wings of the contract, from the ground up; a floor's do not import each other."""
    layers = CONTRACTS["A wing imports only from wings below it"]["layers"]
    return [set(re.findall(r"\w+", layer)) - {"__main__"} for layer in reversed(layers)]


def drawn() -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """The modules that each box of the drawing stands for, and the arrows."""
    [drawing] = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    boxes = re.findall(r'(\w+)\["([\w, ]+)<br>', drawing)
    arrows = re.findall(r"(\w+) --> (\w+)", drawing)
    return {box: set(names.split(", ")) for box, names in boxes}, set(arrows)


def reached(box: str, arrows: set[tuple[str, str]]) -> set[str]:
    """All boxes to which arrows lead from this one."""
    direct = {end for start, end in arrows if start == box}
    return direct.union(*(reached(end, arrows) for end in direct))


def test_every_wing_is_drawn_and_is_there():
    boxes, _ = drawn()
    wings = set.union(*floors())
    assert set.union(*boxes.values()) == wings | {"pallas_kernels"}
    package = ROOT / "sparsejax"
    there = {path.stem for path in package.iterdir() if not path.name.startswith("_")}
    assert there == wings | {"py"}  # py.typed


def test_arrows_are_what_the_contract_allows():
    boxes, arrows = drawn()
    floor = {wing: i for i, wings in enumerate(floors()) for wing in wings}
    names = (
        "A service knows no model",
        "Data needs no operations and no mesh",
        "The engine knows no kind of model",
        "Predictors know no model",
    )
    forbidden = {
        (source.split(".")[1], target.split(".")[1])
        for needless in (CONTRACTS[name] for name in names)
        for source in needless["source_modules"]
        for target in needless["forbidden_modules"]
    }
    for lower in boxes.keys() - {"pallas_kernels"}:
        ends = reached(lower, arrows)
        for upper in boxes.keys() - {"pallas_kernels", lower}:
            allowed = all(
                floor[low] < floor[up] and (up, low) not in forbidden
                for low in boxes[lower]
                for up in boxes[upper]
            )
            assert (upper in ends) == allowed, (lower, upper)
    assert ("pallas_kernels", "ops") in arrows


def test_every_wing_has_a_row_in_the_table():
    rows = re.findall(r"^\| (`[\w`, ]+`) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named == set.union(*floors())
