"""Names as binary data, decoded by the fast and by the slow form."""

import numpy as np
import pytest
from served import prefixed

from sparsejax.data.files.name_index import NameTable
from sparsejax.data.files.names import as_names
from sparsejax.serving import protocol
from sparsejax.serving.protocol import Chosen, Limits, RefusedError, Tensor, Vocabulary

LONG = b"x" * 300
LISTS = [
    [],
    [b""],
    [b"", b"", b"a"],
    [b"item 1", b"two words", b"\0\0\0\0", b"z" * 127],
    [b"z" * 128, b"a"],
    [b"a", LONG, b"b"],
    ["jalapeño".encode(), b"a", "日本".encode()],
    [b"\n" * 48, b"0" * 48],
]


def read(data: bytes, limits: Limits) -> list[str]:
    return [*protocol.of_bytes(memoryview(data), "BYTES", "it", limits)]


@pytest.mark.parametrize("names", LISTS, ids=range(len(LISTS)))
def test_names_are_read(names):
    expected = [name.decode() for name in names]
    assert read(prefixed(*names), Limits()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1", "end within the length"),
        (prefixed(b"a") + b"\0\0\0", "end within the length"),
        (prefixed(b"a") + b"\5\0\0\0abcd", "end within a name"),
        (prefixed(b"a") + b"\1\1\0\0a", "a name has 257 bytes"),  # ASCII, and long
        (prefixed(b"a") + b"\0\0\0\1", "a name has 16777216 bytes"),
        (prefixed(b"a" * 101), "a name has 101 bytes"),
        (prefixed(b"\xff"), "must be in UTF-8"),
    ],
)
def test_faults_of_names_are_named(data, message):
    with pytest.raises(RefusedError, match=message):
        read(data, Limits(name=100))


def test_random_bytes_are_read_as_one_name_after_the_other():
    """Both ways give the same, or both refuse."""
    rng, read_fast = np.random.default_rng(0), 0
    for turn in range(3000):
        data = bytes(rng.integers(0, (4, 128, 256)[turn % 3], rng.integers(0, 14)))
        try:
            slow = [*protocol._prefixed(memoryview(data), "it", Limits())]
        except RefusedError:
            slow = None
        fast = protocol._encoded(data)
        read_fast += fast is not None
        assert (None if fast is None else [*fast]) == slow
    assert read_fast > 100


def test_names_that_fill_up_rows_are_read_fast():
    rng, texts = np.random.default_rng(0), ["", "", "a", "item 17", "日本", "\0"]
    for count in (1, 2, 30, 200):
        names = [texts[i] for i in rng.integers(0, len(texts), count)]
        found = protocol._encoded(prefixed(*(name.encode() for name in names)))
        assert found is not None and [*found] == names


def test_chosen_names_as_text_and_as_bytes():
    names = ["item 1", "jalapeño", "x" * 300, "日本"]
    vocabulary = Vocabulary(NameTable.of(as_names(names)))
    for ids in ([], [0], [-1], [3, 0, -1, 1, 1, -1, 2], [-1, -1]):
        chosen = Chosen(vocabulary, np.array(ids, np.int32))
        tensor = Tensor("items", "BYTES", (len(ids),), chosen)
        expected = [names[i] if i >= 0 else "" for i in ids]
        assert protocol.plain(tensor) == expected
        data = protocol.to_bytes(tensor)
        assert data == prefixed(*(name.encode() for name in expected))
