"""The text and adjacency formats, behaviour common to all readers, and detection of the format."""

import gzip
import io
import lzma
import os
import pathlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tqdm
from contents import Contents, contents
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data import (
    DataError,
    SparseDataset,
    UnknownFeaturesWarning,
    guess_format,
    read,
    read_adjacency,
    read_pairs,
    read_parquet,
    read_text,
    vocabulary_order,
)
from sparsejax.data.events import lines
from sparsejax.data.events.block import Check
from sparsejax.data.files import opening
from sparsejax.data.files.names import NameEncoder, as_names
from sparsejax.data.files.values import parse_values, value_problem
from sparsejax.data.sets.assemble import assemble


def merged(rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]]) -> Contents:
    """The content of a file's lines, merged in plain Python."""
    result: Contents = {}
    for row, entries in rows:
        into = result.setdefault(row, {})
        for feature, value in entries:
            into[feature] = 1.0 if value is None else into.get(feature, 0.0) + value
    return result


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "data.txt") -> pathlib.Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


TEXT = "ann\tmilk:tea\nbob\t\neve\ttea:wine:milk:\n"
TEXT_CONTENTS = {
    "ann": {"milk": 1, "tea": 1},
    "bob": {},
    "eve": {"tea": 1, "wine": 1, "milk": 1},
}


def test_text(write):
    dataset = read_text(write(TEXT))
    assert contents(dataset) == TEXT_CONTENTS
    assert dataset.matrix.data is None
    # Two rows have milk and tea, one has wine; equal counts go by name. Of these
    # ranks 0, 1, 2 the hands lie in the order 0, 2, 1.
    assert dataset.feature_names.tolist() == ["milk", "wine", "tea"]
    assert repr(dataset) == "SparseDataset(3 rows, 3 features, 5 entries, indicator)"
    assert dataset.matrix.indices.dtype == dataset.matrix.indptr.dtype == np.int32


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("\n", "\r\n"),
        TEXT.rstrip("\n"),
        "\n\n" + TEXT.replace("\n", "\n\n"),
        "  \n" + TEXT + "\t\n \n",
        "\ufeff" + TEXT,
        TEXT.replace("ann\tmilk", "ann\t::milk:"),
        TEXT.replace("bob\t", "bob\t:\t"),
        TEXT.replace("ann\tmilk:tea", "ann\tmilk\nbob\t\nann\ttea"),
        TEXT.replace("ann\tmilk:tea", "ann\tmilk:tea:milk"),
        TEXT.replace("tea", "tea,"),
    ],
    ids=[
        "crlf",
        "no end of line",
        "blank lines",
        "lines of white space",
        "byte order mark",
        "empty entries",
        "separators in an empty row",
        "row in parts",
        "duplicate",
        "comma without value",
    ],
)
def test_text_variants(write, text):
    assert contents(read_text(write(text))) == TEXT_CONTENTS


def test_text_values(write):
    text = "a\tx,1.5:y,-2e3: z , 7 :x,0.25\nb\ty,0\na\ty,1"
    dataset = read_text(write(text))
    assert contents(dataset) == {
        "a": {"x": 1.75, "y": -1999.0, " z ": 7.0},
        "b": {"y": 0.0},  # a stored zero is an entry
    }
    assert np.asarray(dataset.matrix.data).dtype == np.float32


def test_text_indicator_ignores_values(write):
    text = "1\t2,1112486027:29,not a number\n7\t29\n8\t29,nan"
    dataset = read_text(write(text), indicator=True)
    assert contents(dataset) == {"1": {"2": 1, "29": 1}, "7": {"29": 1}, "8": {"29": 1}}
    assert dataset.matrix.data is None


def test_text_separators_in_row_names(write):
    dataset = read_text(write("a:b,c\tx:y\na b\tx\n"))
    assert contents(dataset) == {"a:b,c": {"x": 1, "y": 1}, "a b": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\tx\nb x\n", 2, "no TAB.*'b x'"),
        ("a\tx\n\n\r\nb\n", 4, "no TAB"),
        ("a\tx\n\tx\n", 2, "row has no name"),
        ("a\tx\t3\n", 1, "second TAB.*pairs"),
        ("a\tx:y\tz\n", 1, "second TAB"),
        ("a\tx,1\nb\tx,1:y,abc\n", 2, "value 'abc' is not a number"),
        ("a\tx,1\n\nb\tx,NaN\n", 3, "value 'NaN' is not finite"),
        ("a\tx,-inf\n", 1, "value '-inf' is not finite"),
        ("a\tx,1e39\n", 1, "too large for float32"),
        ("a\tx,1e999\n", 1, "too large for float32"),
        ("a\tx,1_000\n", 1, "not a number"),
        ("a\tx,0x10\n", 1, "not a number"),
        ("a\tx,1,2\n", 1, "two commas"),
        ("a\tx\nb\t,1\n", 2, "without a feature"),
        ("a\tx,1\nb\ty\n", 2, "has no value but earlier entries have one"),
        ("a\tx\nb\ty:z,1\n", 2, "has a value but earlier entries have none"),
        ("a\tx\nb\ry\n", 2, "carriage return"),
        # The line of the first of two errors is named.
        ("a\tx,bad\nb", 1, "not a number"),
        ("a\nb\tx,bad", 1, "no TAB"),
    ],
)
def test_text_errors(write, text, line, message):
    path = write(text)
    with pytest.raises(DataError, match=message) as caught:
        read_text(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_invalid_utf8_names_line(write):
    path = write(b"a\tx\nb\ty\xff\n")
    for reader in (read_text, read_adjacency, read_pairs):
        with pytest.raises(DataError, match="not valid UTF-8") as caught:
            reader(path)
        assert str(caught.value).startswith(f"{path}:2: byte 0xff")


READERS = [read, read_text, read_adjacency, read_pairs, read_parquet]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty|Parquet"),
        (b"\n \r\n\n", "empty|Parquet"),
        (bytes(range(256)) * 4, "binary|UTF-8|Parquet"),
        ("a\tx\n".encode("utf-16"), "binary|UTF-8|Parquet"),
        (gzip.compress(b"", mtime=0), "empty|Parquet"),
        (
            gzip.compress(b"a\tx:y\n" * 999, mtime=0)[:-20],
            "truncated or damaged|Parquet",
        ),
        (gzip.compress(b"a\tx:y\n", mtime=0)[:5], "truncated or damaged|Parquet"),
        (lzma.compress(b"a\tx:y\n" * 999)[:-20], "truncated or damaged|Parquet"),
        (lzma.compress(b"a\tx:y\n" * 999)[:40] + b"?" * 40, "damaged|Parquet"),
        (gzip.compress(b"a\tx:y\n", mtime=0) + b"trailing", "damaged|Parquet"),
        (lzma.compress(b"a\tx:y\n") + b"trailing", "damaged|Parquet"),
        (lzma.compress(b"a\tx:y\n") * 2 + b"\0" * 4 + b"?", "damaged|Parquet"),
        (
            lzma.compress(b"a\tx:y\n") + lzma.compress(b"b\tx\n")[:-8] + b"?" * 8,
            "damaged|Parquet",
        ),
    ],
    ids=str,
)
def test_unreadable_content(write, reader, content, message):
    path = write(content)
    with pytest.raises(DataError, match=message) as caught:
        reader(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("reader", READERS)
def test_unreadable_paths(tmp_path, reader):
    with pytest.raises(DataError, match="no such file"):
        reader(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="is a directory"):
        reader(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        reader(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        reader(tmp_path / "pipe")


def test_streams_of_xz_one_after_the_other(write):
    first, second = (lzma.compress(line) for line in (b"a\tx:y\n", b"b\tx\n"))
    path = write(first + b"\0" * 4 + second + b"\0" * 8)
    assert contents(read_text(path)) == {"a": {"x": 1, "y": 1}, "b": {"x": 1}}


def test_a_line_has_an_end(write):
    """A few bytes of xz may be a line of many gigabytes."""
    text = b"a\tx\nb\t" + b"x" * (opening.MAX_LINE_BYTES + opening.BLOCK_BYTES)
    path = write(lzma.compress(text, preset=0))
    for reader in (read, read_text, read_adjacency, read_pairs):
        with pytest.raises(DataError, match=":2: the line is longer than 67,108,864 b"):
            reader(path)


def test_truncated_after_the_first_block(write):
    text = "".join(f"row {i}\tfeature {i * 7919 % 997}\n" for i in range(20_000))
    packed = gzip.compress(text.encode())
    path = write(packed[: len(packed) // 2])
    for reader in (read_text, read_pairs):
        with pytest.raises(DataError, match="truncated"):
            reader(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_bar_follows_the_file(write, monkeypatch, pack):
    text = "".join(f"row {i}\tfeature {i * 7919 % 997}\n" for i in range(20_000))
    path = write(pack(text.encode()), "d.txt")
    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            assert options["delay"] == 1  # the delay is in seconds
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr(opening, "tqdm", Bar)
    read_text(path)
    read_pairs(path)
    for bar in (bars[0], bars[-1]):
        assert (bar.n, bar.desc) == (bar.total, "d.txt")
    bars.clear()
    pq.write_table(pa.table({"user": ["a"] * 999, "item": range(999)}), path)
    read_parquet(path)
    assert bars[0].n == pytest.approx(bars[0].total) == path.stat().st_size


@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz", "d.txt.xz", "no suffix"])
def test_compressed(write, name):
    pack = {"gz": gzip.compress, "xz": lzma.compress}.get(name.split(".")[-1], bytes)
    assert contents(read(write(pack(TEXT.encode()), name))) == TEXT_CONTENTS


def test_compression_is_recognised_without_the_name(write):
    assert contents(read_text(write(lzma.compress(TEXT.encode())))) == TEXT_CONTENTS
    assert contents(read_text(write(TEXT, "plain.gz"))) == TEXT_CONTENTS


def test_adjacency(write):
    text = " 0 5 3\t9 \r\n\n1\n2 9 5 9\n0 4\n\u3042 \u00e9:,\n"
    dataset = read_adjacency(write(text))
    assert contents(dataset) == {
        "0": {"5": 1, "3": 1, "9": 1, "4": 1},
        "1": {},
        "2": {"9": 1, "5": 1},
        "\u3042": {"\u00e9:,": 1},
    }
    assert dataset.matrix.data is None


def test_no_feature_at_all(write):
    path = write("a\t\nb\t\n")
    with pytest.raises(DataError, match="none of the rows has a feature"):
        read_text(path)
    dataset = read_text(path, features=["x"])
    assert contents(dataset) == {"a": {}, "b": {}}
    assert dataset.num_features == 1


def test_vocabulary_order():
    # By hand: 600 features, feature i has count 600 - i, so rank i.
    order = vocabulary_order(
        np.arange(600, 0, -1), as_names(f"{i:03}" for i in range(600))
    )
    assert order[:6].tolist() == [0, 256, 512, 128, 384, 64]
    # Contiguous parts are dealt one rank after the other.
    many = vocabulary_order(
        np.arange(1024, 0, -1), as_names(f"{i:04}" for i in range(1024))
    )
    for ways in (2, 4, 8):
        dealt = [sorted(part.tolist()) for part in np.split(many, ways)]
        assert sorted(dealt) == [list(range(w, 1024, ways)) for w in range(ways)]
    assert sorted(order.tolist()) == list(range(600))


def test_vocabulary_of_a_file(write):
    """Most frequent first, equal ones by name, dealt into 256 hands."""
    counts = {f"f{i:03}": 1 + i % 3 for i in range(300)}
    lines = [
        f"r{row}\t" + ":".join(f for f, count in counts.items() if row < count)
        for row in (2, 0, 1)
    ]
    dataset = read_text(write("\n".join(lines)))
    ranked = sorted(counts, key=lambda f: (-counts[f], f))
    expected = sorted(
        range(300), key=lambda rank: (int(f"{rank % 256:08b}"[::-1], 2), rank)
    )
    assert dataset.feature_names.tolist() == [ranked[rank] for rank in expected]
    assert dataset.row_names.tolist() == ["r2", "r0", "r1"]


def test_second_file_gets_the_first_ones_columns(write):
    train = read_text(write(TEXT))
    with pytest.warns(UnknownFeaturesWarning) as caught:
        test = read_text(
            write("zoe\tbeer:tea:rum\nann\tbeer\n", "b.txt"), features=train
        )
    assert contents(test) == {"zoe": {"tea": 1}, "ann": {}}
    assert test.feature_names.tolist() == train.feature_names.tolist()
    assert test.matrix.num_cols == train.matrix.num_cols
    message = str(caught[0].message)
    assert "3 of 4 entries" in message and "2 features" in message
    assert "'beer', 'rum'" in message and "b.txt" in message
    # There is no warning if all names are known. A list of names suffices as an argument.
    same_again = read_text(write(TEXT), features=train.feature_names)
    assert contents(same_again) == TEXT_CONTENTS


def test_second_file_with_nothing_known(write):
    path = write("a\tx:y\n")
    with pytest.raises(DataError, match="all 2 entries are of features.*'x', 'y'"):
        read_text(path, features=["tea"])
    with pytest.raises(ValueError, match="unique.*'tea'"):
        read_text(path, features=["tea", "x", "tea"])


def test_sum_beyond_float32(write):
    path = write("a\tx,3e38:x,3e38\n")
    with pytest.raises(DataError, match="of 'a' and 'x' have too large a sum"):
        read_text(path)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_block_size_does_not_matter(write, size):
    def read_in_blocks(blocks_of, path):
        with opening.open_data(path) as stream:
            blocks = blocks_of(stream, path, block_bytes=size)
            return assemble(blocks, path, features=None)

    def text_blocks(*args, **options):
        return Check().blocks(lines.text_cells(*args, indicator=False, **options))

    def adjacency_blocks(*args, **options):
        return Check().blocks(lines.adjacency_cells(*args, **options))

    rng = np.random.default_rng(0)
    rows = [
        (
            f"u\u00e9{rng.integers(40)}",
            [(f"f{rng.integers(60)}", None) for _ in range(n)],
        )
        for n in rng.integers(0, 12, 100)
    ]
    text = "\r\n".join(
        f"{row}\t" + ":".join(f for f, _ in entries) for row, entries in rows
    )
    assert contents(read_in_blocks(text_blocks, write(text))) == merged(rows)
    spaced = text.replace("\t", " ").replace(":", " ")
    assert contents(read_in_blocks(adjacency_blocks, write(spaced))) == merged(rows)
    path = write(text + "\nbad line\n")
    with pytest.raises(DataError, match=f"{path}:101: no TAB"):
        read_in_blocks(text_blocks, path)
    path = write(text + "\nu\tf,1\n")
    with pytest.raises(DataError, match=f"{path}:101: an entry has a value"):
        read_in_blocks(text_blocks, path)


# Without what the text form escapes: the tests of the writers have names with it.
name_text = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r:,\0\\"), min_size=1
).filter(lambda name: name.strip())
# Multiples of 1/8, so that sums are exact.
value = st.integers(-9000, 9000).map(lambda n: n / 8)


@st.composite
def text_rows(draw):
    entry = st.tuples(name_text, value if draw(st.booleans()) else st.none())
    features = draw(st.lists(entry, min_size=1, max_size=8))
    rows = draw(
        st.lists(
            st.tuples(name_text, st.lists(st.sampled_from(features), max_size=6)),
            min_size=1,
            max_size=8,
        )
    )
    return [(features[0][0], [features[0]]), *rows]


@given(text_rows())
def test_text_to_parquet_and_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("round", numbered=True)
    text = "\n".join(
        f"{row}\t" + ":".join(f if v is None else f"{f},{v!r}" for f, v in entries)
        for row, entries in rows
    )
    (folder / "data.txt").write_bytes(text.encode())
    dataset = read_text(folder / "data.txt")
    assert contents(dataset) == merged(rows)
    assert list(contents(dataset)) == list(merged(rows))
    assert (dataset.matrix.data is None) == (rows[0][1][0][1] is None)

    dataset.save(folder / "data.parquet")
    again = SparseDataset.load(folder / "data.parquet")
    assert again.row_names.tolist() == dataset.row_names.tolist()
    assert again.feature_names.tolist() == dataset.feature_names.tolist()
    assert again.matrix.num_cols == dataset.matrix.num_cols
    for leaf in ("data", "indices", "indptr"):
        left, right = getattr(again.matrix, leaf), getattr(dataset.matrix, leaf)
        assert (left is None) == (right is None)
        if right is not None:
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()


@given(st.binary(max_size=200))
def test_any_bytes_give_data_or_a_data_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any", numbered=True) / "data.txt"
    path.write_bytes(content)
    for reader in READERS:
        try:
            assert isinstance(reader(path), SparseDataset)
        except DataError:
            pass


@given(st.text(alphabet='ab\t:, \n1.e-"\r', max_size=60))
def test_any_text_gives_data_or_a_data_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any", numbered=True) / "data.txt"
    path.write_bytes(content.encode())
    for reader in READERS:
        try:
            assert isinstance(reader(path), SparseDataset)
        except DataError as error:
            assert "cannot be parsed" not in str(error)


@given(st.text(alphabet="0123456789+-.eE_ infatyx\u0660", max_size=8))
def test_value_problem_is_found_where_parsing_fails(text):
    assert (parse_values(pa.array([text])) is None) == bool(value_problem(text))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_survives_text(number):
    parsed = parse_values(pa.array([repr(number)]))
    assert parsed is not None and parsed.tobytes() == np.float64(number).tobytes()


@given(
    st.lists(st.lists(st.sampled_from("abcdefghijkl"), max_size=9), max_size=9),
    st.sampled_from([2, 2**20]),
)
def test_name_encoder(blocks, waiting):
    encoder = NameEncoder(waiting)
    for number, block in enumerate(blocks):
        array = pa.array(block, pa.large_string())
        encoder.add(array if number % 2 else array.dictionary_encode())
    found, codes = encoder.finish()
    flat = [name for block in blocks for name in block]
    assert found[codes].tolist() == flat
    # In the order of first appearance.
    assert found.tolist() == list(dict.fromkeys(flat))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.parquet", "", "parquet"),
        ("A.CSV", "", "pairs"),
        ("a.csv.gz", "", "pairs"),
        ("a.tsv", "u\ti,3:j,4\n", "text"),
        ("a.txt", "u\ti\nv\ti:j\n", "text"),
        # The reader of this format finds the bad line.
        ("a.txt", "u\t\nv\ti:j\nno tab\n", "text"),
        ("a.txt", "u\ti:j:k\nv\tj:k:l\n", "text"),  # all rows have equally many items
        ("a.txt", "u\ti:j\nv\ti:k\nw\tk:l\n", "text"),
        ("a.txt", "u\ti:j:k:l\nv\tm:n:o:p\n", "text"),
        ("a.txt", "u\ti:j:k:l\nv\ti:n:o:p\n", "pairs"),  # a scheme
        ("a.tsv", "u\ti\t3\nv\tj\t4\n", "pairs"),
        ("a.tsv", "u\ti\nv\tj\n", "pairs"),
        ("a.tsv", "user_id\titem_id\nv\tj:k\n", "pairs"),
        ("a.txt", "1,1193\n1,661\n", "pairs"),
        ("a.dat", "1;2;3\n4;5;6\n", "pairs"),
        ("a.txt", "\n0 1 2 3\n1 5\n", "adjacency"),
        ("a", "0 1 2\n1\n", "adjacency"),
        # It is undecidable whether these are lists, or pairs with ratings.
        ("a.txt", "1 1193 5\n1 661 3\n", None),
        ("a.txt", "u\ti j\nv\tk l m\n", None),
        ("a.txt", "u\ti,4\nv\tj,3\n", None),
        ("a.txt", "1\tbook\n2\tmilk:tea\n", None),  # a header, or a row of the text?
        ("a.txt", "user\ta:b\nann\tb:c\n", None),
        ("a.txt", "user\titem\nann\thttp://a.b\n", "pairs"),
        ("a.tsv", "u\ti\t3\nv\tj\n", None),
        ("a.txt", "word\nword\n", None),
    ],
)
def test_guess_format(write, name, content, expected):
    path = write(content, name)
    if expected:
        assert guess_format(path) == expected
        return
    with pytest.raises(
        DataError, match="not clear.*--format.*text, pairs or adjacency"
    ):
        guess_format(path)


def test_read_dispatches(write, tmp_path):
    text = write(TEXT)
    read(text).save(tmp_path / "d.parquet")
    assert contents(read(tmp_path / "d.parquet")) == TEXT_CONTENTS
    adjacency = write("ann milk tea\nbob\neve tea wine milk\n", "a.txt")
    assert contents(read(adjacency)) == TEXT_CONTENTS
    assert contents(read(adjacency, format="adjacency")) == TEXT_CONTENTS
    pairs = write("user,item,count\nann,milk,2\nann,tea,3\n", "p.csv")
    assert contents(read(pairs)) == {"ann": {"milk": 2, "tea": 3}}
    assert contents(read(pairs, indicator=True)) == {"ann": {"milk": 1, "tea": 1}}
    with pytest.raises(ValueError, match="unknown format 'jason'.*text, pairs"):
        read(text, format="jason")


@pytest.mark.parametrize("format", ["text", "pairs", "adjacency", "parquet"])
def test_every_format_aligns_features(write, tmp_path, format):
    path = {
        "text": lambda: write("a\ty:z\n"),
        "pairs": lambda: write("a,y\na,z\n"),
        "adjacency": lambda: write("a y z\n"),
        "parquet": lambda: tmp_path / "d.parquet",
    }[format]()
    read_text(write("a\ty:z\n", "t.txt")).save(tmp_path / "d.parquet")
    with pytest.warns(UnknownFeaturesWarning, match="1 of 2 entries"):
        dataset = read(path, format=format, features=["x", "y"])
    assert contents(dataset) == {"a": {"y": 1}}
    assert dataset.feature_names.tolist() == ["x", "y"]
    with pytest.raises(DataError, match=f"^{path}: all 2 entries"):
        read(path, format=format, features=["x"])


def test_frequency_counts_rows_not_lines(write):
    """A pair that recurs is one entry, so it counts once for the order."""
    dataset = read_adjacency(write("u a a a\nv b\nw b\n"))
    counts: dict[str, int] = defaultdict(int)
    for row in contents(dataset).values():
        for feature in row:
            counts[feature] += 1
    assert counts == {"a": 1, "b": 2}
    assert dataset.feature_names.tolist() == ["b", "a"]
