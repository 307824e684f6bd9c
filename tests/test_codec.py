"""Dataclasses become JSON and come back; see `test_edited_files.py` for wrong values."""

import dataclasses
import json
from collections.abc import Mapping

import pytest

from sparsejax import codec


@dataclasses.dataclass(frozen=True)
class Leaf:
    sizes: tuple[int, ...] = (1, 2)
    rate: float | None = None


@dataclasses.dataclass(frozen=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...]
    named: Mapping[str, Leaf]


TREE = Tree("a", (Leaf(), Leaf((), 0.5)), {"b": Leaf((3,))})


def test_what_is_written_is_read():
    text = json.dumps(codec.document(TREE))
    assert text == json.dumps(dataclasses.asdict(TREE))  # as files of before have it
    assert codec.read(Tree, codec.parse(text), "the tree") == TREE


def test_defaults_are_left_out_of_the_outermost():
    assert codec.document(Leaf(rate=2.0), skip_defaults=True) == {"rate": 2.0}
    assert codec.document(Leaf(), skip_defaults=True) == {}


def test_a_tag_chooses_the_class():
    kinds = {"leaf": Leaf, "tree": Tree}
    found = codec.read_tagged(kinds, "kind", {"kind": "leaf", "rate": 1}, "it")
    assert found == Leaf(rate=1.0)
    for wrong, problem in [
        ({"kind": "bush"}, "it: \"kind\" is 'bush', not one of leaf, tree"),
        ({"kind": ["leaf"]}, "not one of leaf, tree"),
        ({}, 'it: "kind" is None, not one of'),
        ({"kind": "leaf", "height": 1}, 'it: unknown key "height"'),
        ([], "it must be an object"),
    ]:
        with pytest.raises(ValueError, match=problem):
            codec.read_tagged(kinds, "kind", wrong, "it")


def test_only_one_version_is_read():
    assert codec.without_version({"version": 2, "a": 1}, 2, "it") == {"a": 1}
    with pytest.raises(ValueError, match='"version" is 3; .* install a newer release'):
        codec.without_version({"version": 3}, 2, "it")
    with pytest.raises(ValueError, match='"version" is 1; .* version 2; write it anew'):
        codec.without_version({"version": 1}, 2, "it")
    for wrong in ({"version": True}, {"version": "2"}, {}):
        with pytest.raises(ValueError, match="this release reads version 2$"):
            codec.without_version(wrong, 2, "it")


def test_a_name_with_numbers():
    assert codec.read_named({"name": "a", "b": 1, "c": True}, "name", "it") == (
        "a",
        {"b": 1, "c": True},
    )
    for wrong, problem in [
        ({"b": 1}, 'it: expected an object with a "name"'),
        ({"name": 3}, 'it: expected an object with a "name"'),
        ({"name": "a", "b": "1"}, 'it: "b" must be int or float or bool'),
        (["a"], "it must be an object"),
    ]:
        with pytest.raises(ValueError, match=problem):
            codec.read_named(wrong, "name", "it")
