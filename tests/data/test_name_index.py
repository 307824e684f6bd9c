"""Many names are looked up at once, with the results of a dictionary."""

import struct

import numpy as np
import pytest

from sparsejax.data.files import name_index
from sparsejax.data.files.name_index import EncodedNames, NameTable, Places
from sparsejax.data.files.names import as_names

KNOWN = [
    *(f"item {i}" for i in range(300)),
    *("x" * length for length in range(1, 40)),
    *("x" * 16 + end for end in ("y", "z", "y" * 300)),
    *("日本", "日本語", "jalapeño", "a\0", "a"),
]
UNKNOWN = ["", "item", "item 300", "x" * 40, "x" * 16 + "w", "y" * 300, "a\0\0", "日"]


def encoded(names: list[str]) -> EncodedNames:
    """The names as bytes in memory, with other bytes before, between and after them."""
    each = [name.encode() for name in names]
    data = b"".join(b"\7\0\0\0" + name for name in each)
    lengths = np.array([len(name) for name in each], np.int64)
    ends = np.cumsum(lengths + 4)
    return EncodedNames(data, ends - lengths, ends)


def check(known: list[str], asked: list[str]) -> None:
    places = {name: place for place, name in enumerate(known)}
    made = NameTable.of(as_names(known))
    stored = made.index.shifts, made.index.table
    expected = [places.get(name, -1) for name in asked]
    for table in (made, NameTable(made.encoded, made.ends, stored)):
        found = table.index.find(encoded(asked))
        assert found.dtype == np.int32
        assert found.tolist() == expected
        assert [*map(table.index.place, asked)] == expected
        remembering = Places(table.index)
        for _ in range(2):  # the second time, the names are in the cache
            assert remembering.find(asked).tolist() == expected
        assert remembering.keys() == {*asked} & {*known}


def test_names_are_written():
    """After their lengths, as `struct` writes them."""
    index = NameTable.of(as_names(KNOWN)).index
    places = np.random.default_rng(0).permutation(np.arange(-3, len(KNOWN)).clip(-1))
    names = ["" if place < 0 else KNOWN[place] for place in places.tolist()]
    # Some names are longer than a record.
    assert max(map(len, names)) > 8 * index._width
    each = [name.encode() for name in names]
    expected = b"".join(struct.pack("<I", len(name)) + name for name in each)
    assert index.prefixed(places) == expected
    assert index.prefixed(np.array([0, -1])) == b"\6\0\0\0item 0" + bytes(4)
    assert index.prefixed(places[:0]) == b""
    assert NameTable.of(as_names([])).index.prefixed(np.array([-1])) == bytes(4)


def test_names_are_found():
    rng = np.random.default_rng(0)
    check(KNOWN, [*rng.permutation(KNOWN + UNKNOWN), *KNOWN])
    check(KNOWN, ["item 7"])  # all names have equal lengths
    check(KNOWN, [])
    check(["a"], ["a", "b", ""])
    check([], ["a"])


@pytest.mark.parametrize(
    "form", ["item {}", "{:x}", "{:09}", "日本 {}", "{} of many shops"]
)
def test_names_that_differ_little_have_places(form):
    """Few names would be found one after the other if hashes were alike."""
    index = NameTable.of(as_names([form.format(i) for i in range(5000)])).index
    assert not index._others and index.shifts.max() < 64


def test_files_have_these_hashes():
    """With others, names would not be found in files that have been written."""
    index = NameTable.of(as_names(["a", "eight by", "日本語 and more"])).index
    assert index.shifts.tolist() == [0, 0, 0, 0]
    places = np.flatnonzero(index.table >= 0)
    assert dict(zip(places.tolist(), index.table[places].tolist(), strict=True)) == {
        0: 1,
        3: 0,
        13: 2,
    }


@pytest.mark.parametrize("parts", [1, 7])
def test_names_of_one_hash(monkeypatch, parts):
    """Such names are told apart by their bytes."""

    def few(data, starts, lengths, words):
        return (lengths % parts).astype(np.uint64)

    monkeypatch.setattr(name_index, "_hashed", few)
    check(KNOWN, KNOWN + UNKNOWN)
    check(KNOWN, KNOWN[::-1])  # all names start with one word


def test_encoded_names_are_text():
    names = ["item 1", "", "日本"]
    found = encoded(names)
    assert [*found] == names and found[2] == "日本" and found[1:] == names[1:]
    assert len(found) == 3 and found[-1] == "日本"
