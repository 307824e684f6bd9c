"""The lists of docs/how_to_add.md name the files that name their examples."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_to_add.md"
SECTIONS = dict(
    re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
)
CODE = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in ("*.py", "*.pyi")
    for path in (ROOT / "sparsejax").rglob(pattern)
}


def test_there_are_seven_lists():
    assert len(SECTIONS) == 7


@pytest.mark.parametrize("name", SECTIONS)
def test_a_list_is_complete_and_has_nothing_else(name):
    section = SECTIONS[name]
    [line] = re.findall(r"^Example: (.+)$", section, re.MULTILINE)
    example = re.compile(
        "|".join(rf"(?<!\w){re.escape(word)}\b" for word in re.findall("`(.+?)`", line))
    )
    listed = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert len({*listed}) == len(listed)
    for path in listed:
        assert example.search((ROOT / path).read_text()), f"{path} has no {line}"
    found = {path for path, text in CODE.items() if example.search(text)}
    assert found == {path for path in listed if path.startswith("sparsejax/")}
