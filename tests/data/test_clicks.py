"""Readers of clicks compared with a plain Python loop."""

import collections
import csv
import dataclasses
import gzip
import itertools
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data.events import tables
from sparsejax.data.files.xxh64 import xxh64
from sparsejax.data.sets import click_files, clicks
from sparsejax.data.sets.click_records import examples_of

DENSE, IDS = ["I1", "I2"], ["C1", "C2"]
NAMES = ("label", *DENSE, *IDS)
LOG = sj.data.DenseColumn(log1p=True, missing=0.0)
SCHEMA = sj.ClickSchema(
    "label",
    dense={"I1": LOG, "I2": sj.data.DenseColumn(missing=-1.0)},
    ids={"C1": sj.data.VocabularyColumn(min_count=3), "C2": sj.data.HashedColumn(17)},
)
WITHOUT_HEADER = dataclasses.replace(SCHEMA, columns=NAMES)


def records(n=200, seed=0, first=0):
    """Draws the cells of lines: some are empty, and categories are skewed."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        numbers = [str(rng.integers(-2, 99)), f"{rng.random():.3f}"]
        words = [f"é{first + int(rng.zipf(1.5)) % 50}", f"x y{rng.integers(30)}"]
        cells = [c if rng.random() < 0.8 else "" for c in (*numbers, *words)]
        found.append([str(int(rng.random() < 0.3)), *cells])
    return found


def write(path, lines, form):
    if form == "parquet":
        columns = [[c or None for c in column] for column in zip(*lines, strict=True)]
        arrays = [
            pa.array([c and kind(c) for c in column])
            for column, kind in zip(columns, (int, int, float, str, str), strict=True)
        ]
        pq.write_table(pa.table(arrays, NAMES), path, row_group_size=37)
    elif form == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([NAMES, *lines])
    else:
        text = "".join("\t".join(line) + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(text) if form == "tsv.gz" else text)


def scalar_xxh64(text: str) -> int:
    """The xxh64 hash of one text by its specification, with Python's integers."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
    data, bits = text.encode(), 2**64

    def turn(x, by):
        return (x << by | x >> (64 - by)) % bits

    def step(h, lane):
        return turn((h + lane * p2) % bits, 31) * p1 % bits

    rest, h = data, p5
    if len(data) >= 32:
        lanes = [(p1 + p2) % bits, p2, 0, -p1 % bits]
        while len(rest) >= 32:
            for i in range(4):
                word = int.from_bytes(rest[8 * i : 8 * i + 8], "little")
                lanes[i] = step(lanes[i], word)
            rest = rest[32:]
        turns = zip(lanes, (1, 7, 12, 18), strict=True)
        h = sum(turn(v, by) for v, by in turns) % bits
        for v in lanes:
            h = ((h ^ step(0, v)) * p1 + p4) % bits
    h = (h + len(data)) % bits
    while len(rest) >= 8:
        h = (turn(h ^ step(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4) % bits
        rest = rest[8:]
    if len(rest) >= 4:
        word = int.from_bytes(rest[:4], "little")
        h = (turn(h ^ word * p1 % bits, 23) * p2 + p3) % bits
        rest = rest[4:]
    for byte in rest:
        h = turn(h ^ byte * p5 % bits, 11) * p1 % bits
    h = (h ^ h >> 33) * p2 % bits
    h = (h ^ h >> 29) * p3 % bits
    return h ^ h >> 32


def test_xxh64():
    texts = ["", "a", "abc", "Nobody inspects the spammish repetition", "ж" * 50]
    rng = np.random.default_rng(0)
    texts += ["".join(map(chr, rng.integers(32, 900, n))) for n in range(70)]
    got = xxh64(pa.array(["left out", *texts], pa.large_string())[1:])
    assert got.tolist() == [scalar_xxh64(text) for text in texts]
    # Values from the documentation of other implementations.
    assert [f"{h:x}" for h in got[:4].tolist()] == [
        "ef46db3751d8e999",
        "d24ec4f1a98c6e5b",
        "44bc2cf5ad770999",
        "fbcea83c8a378bf1",
    ]


def expected(lines, train=None):
    """Labels, numbers and ids of the columns of `lines`, computed by their definition."""
    labels = [float(line[0]) for line in lines]
    dense = [
        [
            math.log1p(max(float(line[1] or 0), 0)),
            float(line[2]) if line[2] else -1.0,
        ]
        for line in lines
    ]
    counts = collections.Counter(line[3] for line in (train or lines) if line[3])
    kept = [word for word, count in counts.items() if count >= 3]
    names = sorted(kept, key=lambda word: (-counts[word], word.encode()))
    words = {"": 0} | {name: i + 2 for i, name in enumerate(names)}
    ids = {
        "C1": [words.get(line[3], 1) for line in lines],
        "C2": [1 + scalar_xxh64(line[4]) % 16 if line[4] else 0 for line in lines],
    }
    return labels, dense, ids, names


def lists_of(data: sj.ClickDataset, name: str) -> sj.CSR:
    ids = data.ids[name]
    assert isinstance(ids, sj.CSR)
    return ids


def assert_equal(data, lines, train=None):
    labels, dense, ids, names = expected(lines, train)
    np.testing.assert_array_equal(data.labels, labels)
    np.testing.assert_allclose(data.dense, dense, rtol=1e-6)
    assert data.labels.dtype == data.dense.dtype == np.float32
    for name, want in ids.items():
        np.testing.assert_array_equal(data.ids[name], want)
        assert data.ids[name].dtype == np.int32
    assert data.vocabularies["C1"].tolist() == names
    assert data.num_ids == {"C1": len(names) + 2, "C2": 17}


@pytest.mark.parametrize("form", ["tsv", "tsv.gz", "csv", "parquet"])
def test_files_are_read_as_they_are(tmp_path, form, monkeypatch):
    monkeypatch.setattr(click_files, "BLOCK_BYTES", 900)
    lines, later = records(), records(60, 1, first=20)
    schema = WITHOUT_HEADER if "tsv" in form else SCHEMA
    for name, part in (("train", lines), ("test", later)):
        write(tmp_path / f"{name}.{form}", part, form)
    train = sj.read_clicks(tmp_path / f"train.{form}", schema)
    assert_equal(train, lines)
    assert (
        min(np.bincount(np.asarray(train.ids["C1"]))[:3]) > 3
    )  # some values are missing, and some are rare
    test = sj.read_clicks(tmp_path / f"test.{form}", schema, features=train)
    assert_equal(test, later, lines)

    both = [tmp_path / f"{name}.{form}" for name in ("train", "test")]
    assert_equal(sj.read_clicks(both, schema), lines + later)
    scanned = sj.data.scan_clicks(both, schema, chunk_rows=70)
    assert scanned.num_rows == 260
    chunks = list(scanned.chunks())
    assert [chunk.num_rows for chunk in chunks] == [70, 70, 70, 50]
    for i, chunk in enumerate(chunks):
        part = (lines + later)[70 * i : 70 * (i + 1)]
        assert_equal(chunk, part, lines + later)
    [last] = scanned.chunks(first=3)
    np.testing.assert_array_equal(last.ids["C1"], chunks[3].ids["C1"])
    if form == "parquet":
        part = scanned.read(30, 215)
        assert_equal(part, (lines + later)[30:215], lines + later)
        for wrong in ((-1, 3), (5, 5), (0, 261)):
            with pytest.raises(ValueError, match="expected 0 <= start < stop <= 260"):
                scanned.read(*wrong)
    else:
        with pytest.raises(NotImplementedError, match="read in order only, by chunks"):
            scanned.read(0, 1)
    again = sj.data.scan_clicks(both[1], schema, features=train, chunk_rows=100)
    assert_equal(next(again.chunks()), later, lines)


@pytest.mark.parametrize("form", ["parquet", "csv", "tsv.gz"])
def test_labels_may_be_missing(tmp_path, form):
    """With them, their column is not read; files that have no header may lack it."""
    schema = WITHOUT_HEADER if form == "tsv.gz" else SCHEMA
    lines = records()
    write(path := tmp_path / f"train.{form}", lines, form)
    train = sj.read_clicks(path, schema)
    write(
        path, [["?" if form != "parquet" else "0", *cells] for _, *cells in lines], form
    )
    found = [clicks.read_served(path, schema, train, labelled=False)]
    if form == "parquet":
        pq.write_table(pq.read_table(path).drop_columns("label"), path)
    else:
        text = (
            gzip.decompress(path.read_bytes()).decode()
            if form == "tsv.gz"
            else path.read_text()
        )
        delimiter = "\t" if form == "tsv.gz" else ","
        text = "".join(
            f"{line.partition(delimiter)[2]}\n" for line in text.splitlines()
        )
        path.write_bytes(
            gzip.compress(text.encode()) if form == "tsv.gz" else text.encode()
        )
    found.append(clicks.read_served(path, schema, train, labelled=False))
    for each in found:
        assert not each.labels.any()
        np.testing.assert_array_equal(each.dense, train.dense)
        for name, ids in train.ids.items():
            np.testing.assert_array_equal(each.ids[name], ids)
    with pytest.raises(sj.DataError, match=r"no column 'label'|expected 5 columns"):
        sj.read_clicks(path, schema, features=train)


def test_a_header_may_be_there_although_columns_are_named(tmp_path):
    lines = records(20)
    write(tmp_path / "with.csv", lines, "csv")
    assert_equal(sj.read_clicks(tmp_path / "with.csv", WITHOUT_HEADER), lines)


def test_criteo(tmp_path):
    schema = sj.ClickSchema.criteo(sj.data.HashedColumn(1000))
    numbers = ["", "-3", *["7"] * 11]
    line = "\t".join(["1", *numbers, *["68fd1e64"] * 25, ""])
    (tmp_path / "day").write_text(f"{line}\n\n  \n{line}\n")
    data = sj.read_clicks(tmp_path / "day", schema)
    assert data.num_rows == 2 and data.dense.shape == (2, 13)
    np.testing.assert_allclose(data.dense[1], [0, 0, *[math.log(8)] * 11], rtol=1e-6)
    word = 1 + scalar_xxh64("68fd1e64") % 999
    assert [int(np.asarray(ids)[1]) for ids in data.ids.values()] == [word] * 25 + [0]


LISTS = {
    "y": [1, 0, 1, 0, 1],
    "tags": [["b", "a", "b"], None, [], ["c", None, ""], ["a"]],
    "seen": pa.array(
        [[9, 2, 9], [2], [], [7, 7, 7, 2], [2]], pa.large_list(pa.int16())
    ),
}
OF_LISTS = sj.ClickSchema(
    "y", ids={"tags": sj.data.VocabularyColumn(), "seen": sj.data.HashedColumn(50)}
)


@pytest.mark.parametrize("rows", [1, 2, 10])
def test_lists(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", rows)
    pq.write_table(pa.table(LISTS), tmp_path / "lists.parquet")
    data = sj.read_clicks(tmp_path / "lists.parquet", OF_LISTS)
    tags, seen = lists_of(data, "tags"), lists_of(data, "seen")
    assert data.vocabularies["tags"].tolist() == ["a", "b", "c"]
    assert tags.indices.tolist() == [3, 2, 3, 4, 0, 0, 2]
    assert tags.indptr.tolist() == [0, 3, 3, 3, 6, 7] and tags.num_cols == 5
    numbers = [9, 2, 9, 2, 7, 7, 7, 2, 2]
    assert seen.indices.tolist() == [1 + scalar_xxh64(str(n)) % 49 for n in numbers]
    some = data.rows(np.array([3, 0]))
    picked = lists_of(some, "tags")
    assert picked.indices.tolist() == [4, 0, 0, 3, 2, 3]
    assert picked.indptr.tolist() == [0, 3, 6]
    scanned = sj.data.scan_clicks(tmp_path / "lists.parquet", OF_LISTS, chunk_rows=3)
    flat = [lists_of(chunk, "tags").indices.tolist() for chunk in scanned.chunks()]
    assert flat == [[3, 2, 3], [4, 0, 0, 2]]
    some.save(tmp_path / "saved")
    again = lists_of(sj.ClickDataset.load(tmp_path / "saved"), "tags")
    assert again.shape == (2, 5)
    np.testing.assert_array_equal(again.indices, picked.indices)


def test_types_of_parquet(tmp_path):
    columns = {
        "y": [True, False, True],
        "count": pa.array([3, None, 0], pa.int8()),
        "price": pa.array([1, 2, None], pa.decimal128(5, 2)),
        "text": pa.array(["4.5", "", None]),
        "city": pa.array(["x", None, "x"]).dictionary_encode(),
        "number": [5.0, 6.0, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    dense = {
        name: sj.data.DenseColumn(missing=9.0) for name in ("count", "price", "text")
    }
    ids = {name: sj.data.VocabularyColumn() for name in ("city", "number")}
    data = sj.read_clicks(tmp_path / "a.parquet", sj.ClickSchema("y", dense, ids))
    np.testing.assert_array_equal(data.labels, [1, 0, 1])
    np.testing.assert_array_equal(data.dense, [[3, 1, 4.5], [9, 2, 9], [0, 9, 9]])
    np.testing.assert_array_equal(data.ids["city"], [2, 0, 2])
    assert data.vocabularies["number"].tolist() == ["5", "6"]


def test_saved(tmp_path):
    write(tmp_path / "a.tsv", records(), "tsv")
    data = sj.read_clicks(tmp_path / "a.tsv", WITHOUT_HEADER)
    # The vocabulary is longer than the data.
    for part in (data, data.rows(slice(0, 3))):
        part.save(tmp_path / "saved")
        again = sj.ClickDataset.load(tmp_path / "saved")
        assert again.schema == part.schema and repr(again) == repr(part)
        assert repr(again).startswith(f"ClickDataset({part.num_rows} examples, ")
        for name in ("labels", "dense"):
            np.testing.assert_array_equal(getattr(again, name), getattr(part, name))
        for name, ids in part.ids.items():
            np.testing.assert_array_equal(again.ids[name], ids)
        assert again.vocabularies["C1"].tolist() == data.vocabularies["C1"].tolist()
    table = pq.read_table(tmp_path / "saved")
    facts = json.loads(table.schema.metadata[b"sparsejax.clicks"])

    def damaged(message, table=table, **others):
        changed = json.dumps(facts | others)
        table = table.replace_schema_metadata({b"sparsejax.clicks": changed})
        pq.write_table(table, tmp_path / "saved")
        with pytest.raises(sj.DataError, match=message):
            sj.ClickDataset.load(tmp_path / "saved")

    damaged('"version" is 7; this release reads version 1; install a newer', version=7)
    damaged("its checksum does not fit", crc32=1)
    damaged("is damaged: 3 examples, not 2,000", rows=2000)
    damaged("is damaged: .*ids/C2", table.drop_columns(["ids/C2"]))
    pq.write_table(pa.table(LISTS), tmp_path / "saved")
    with pytest.raises(sj.DataError, match="not a saved data set of clicks"):
        sj.ClickDataset.load(tmp_path / "saved")
    with pytest.raises(sj.DataError, match="no such file"):
        sj.ClickDataset.load(tmp_path / "other")


@pytest.mark.parametrize("form", ["tsv", "lists"])
def test_saved_parts_are_scanned(tmp_path, form):
    if form == "tsv":
        write(tmp_path / "a.tsv", records(100), "tsv")
        data = sj.read_clicks(tmp_path / "a.tsv", WITHOUT_HEADER)
    else:
        pq.write_table(pa.table(LISTS), tmp_path / "a.parquet")
        data = sj.read_clicks(tmp_path / "a.parquet", OF_LISTS)
    rows = data.num_rows
    (tmp_path / "parts").mkdir()
    cuts = [0, 2, rows // 2, rows]  # the first part has more categories than examples
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        path = tmp_path / "parts" / f"{i}.parquet"
        data.rows(slice(start, stop)).save(path)
        pq.write_table(pq.read_table(path), path, row_group_size=16)
    scanned = sj.data.scan_clicks(tmp_path / "parts", chunk_rows=3)
    assert scanned.schema == data.schema and scanned.num_ids == data.num_ids
    assert scanned.num_rows == rows

    def assert_rows(part, start, stop):
        some = data.rows(slice(start, stop))
        for name in ("labels", "dense"):
            np.testing.assert_array_equal(getattr(part, name), getattr(some, name))
        jax.tree.map(np.testing.assert_array_equal, part.ids, some.ids)

    for i, chunk in enumerate(scanned.chunks()):
        assert_rows(chunk, 3 * i, min(3 * i + 3, rows))
    for start, stop in ((0, rows), (1, 4), (rows - 2, rows)):
        assert_rows(scanned.read(start, stop), start, stop)

    other = dataclasses.replace(data, labels=1 - data.labels)
    name = next(iter(data.vocabularies))
    known = dict(data.vocabularies)
    other = dataclasses.replace(other, vocabularies=known | {name: known[name][::-1]})
    other.save(tmp_path / "parts" / "3.parquet")
    with pytest.raises(sj.DataError, match="3.parquet: has another schema or vocabu"):
        sj.data.scan_clicks(tmp_path / "parts")
    pq.write_table(pa.table(LISTS), tmp_path / "plain")
    with pytest.raises(
        sj.DataError, match="not a saved data set .* give their ClickSchema"
    ):
        sj.data.scan_clicks(tmp_path / "plain")
    with pytest.raises(ValueError, match="leave out features"):
        sj.data.scan_clicks(tmp_path / "parts", features=data)


def test_split_rows(tmp_path):
    lines = [["1" if i % 3 else "0", str(i), "0", "a", "b"] for i in range(40)]
    write(tmp_path / "a.tsv", lines, "tsv")
    schema = sj.ClickSchema("label", {"I1": sj.data.DenseColumn()}, columns=NAMES)
    data = sj.read_clicks(tmp_path / "a.tsv", schema)
    train, heldout = data.split_rows(0.9, seed=0)
    places = heldout.dense[:, 0].astype(int).tolist()
    assert places == [9, 17, 21, 23]  # the split must be equal in each release
    assert sorted(places + train.dense[:, 0].astype(int).tolist()) == [*range(40)]
    assert heldout.labels.tolist() == [float(i % 3 > 0) for i in places]
    other = data.split_rows(0.9, seed=1).heldout
    assert other.dense[:, 0].astype(int).tolist() != places
    with pytest.raises(ValueError, match="nothing is held out: 3 examples are too few"):
        data.rows(slice(0, 3)).split_rows(0.9, seed=0)
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\)"):
        data.split_rows(1, seed=0)


GOOD = "0\t1\t2\ta\tb\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2\t1\t2\ta\tb", "the label 'label' is 2; expected 0 or 1"),
        ("\t1\t2\ta\tb", "the label 'label' is missing"),
        ("nan\t1\t2\ta\tb", "the label 'label' is missing"),
        ("1\t1\tNaN\ta\tb", r"column 'I2' is empty, null or NaN; .*missing=0.0"),
        ("1\tinf\t2\ta\tb", "column 'I1': value 'inf' is not finite"),
        ("1\t1e39\t2\ta\tb", "column 'I1': value '1e\\+39' is too large for float32"),
        ("1\tx\t2\ta\tb", "column 'I1': value 'x' is not a number"),
        (
            "1\t1\t2\ta",
            r"expected 5 columns \(label, I1, I2, ...\), got 4: the line is",
        ),
        (
            "1\t1\t\ta\tb",
            r"column 'I2' is empty, null or NaN; .* DenseColumn\(missing=0.0\)",
        ),
    ],
)
def test_wrong_lines(tmp_path, line, message):
    strict = {"I1": LOG, "I2": sj.data.DenseColumn()}
    schema = dataclasses.replace(WITHOUT_HEADER, dense=strict)
    (tmp_path / "a.tsv").write_text(GOOD + "\n  \n" + GOOD + line + "\n" + GOOD)
    with pytest.raises(sj.DataError, match=f"a.tsv:5: {message}"):
        sj.read_clicks(tmp_path / "a.tsv", schema)
    with pytest.raises(sj.DataError, match=f"a.tsv:5: {message}"):
        list(sj.data.scan_clicks(tmp_path / "a.tsv", schema).chunks())


@pytest.mark.usefixtures("wrong_types")
def test_wrong_files(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('label,I1,I2,C1\n1,2,3,"a\nb"\n')
    with pytest.raises(
        sj.DataError, match=r"a.csv:1: there is no column 'C2'; .*0 'lab"
    ):
        sj.read_clicks(path, SCHEMA)
    path.write_text('label,I1,I2,C1,C2\n1,2,3,"a\nb",c\n1,x,3,a,b\n')
    with pytest.raises(sj.DataError, match="a.csv:4: column 'I1': value 'x'"):
        sj.read_clicks(path, SCHEMA)
    path.write_text("label,I1,I2,C1,C2\n")
    for reader in (sj.read_clicks, sj.data.scan_clicks):
        with pytest.raises(sj.DataError, match="a.csv: holds no examples"):
            reader(path, SCHEMA)
    with pytest.raises(ValueError, match="at least one file"):
        sj.read_clicks([], SCHEMA)
    with pytest.raises(ValueError, match="chunk_rows must be positive"):
        sj.data.scan_clicks(path, SCHEMA, chunk_rows=0)
    with pytest.raises(ValueError, match=r"features lacks \['C1'\]; it has \['X'\]"):
        sj.read_clicks(path, SCHEMA, features={"X": np.array(["a"])})
    other: Any = "train.csv"
    with pytest.raises(TypeError, match="features is a data set of clicks, .* got str"):
        sj.read_clicks(path, SCHEMA, features=other)

    path = tmp_path / "a.parquet"
    good = {"label": [0, 1], "I1": [1, 2], "I2": [1, 2], "C1": ["a", "b"], "C2": [3, 4]}
    for change, message in (
        ({"label": [0, 3]}, "row 1: the label 'label' is 3"),
        ({"I2": [0, float("inf")]}, "row 1: column 'I2': value 'inf' is not finite"),
        ({"I2": [[1], [2]]}, "column 'I2' must hold numbers, but it is list"),
        ({"C2": [0.0, 0.5]}, "row 1: column 'C2' holds 0.5, which cannot be a name"),
        ({"C2": [[1.0], [2.0, 0.5]]}, "row 1: column 'C2' holds 0.5"),
        ({"C1": [{"a": 1}] * 2}, "column 'C1' must hold text, integers, or lists"),
    ):
        pq.write_table(pa.table(good | change), path)
        with pytest.raises(sj.DataError, match=f"a.parquet: {message}"):
            sj.read_clicks(path, SCHEMA)


def test_schemas():
    everything = sj.ClickSchema.criteo({"C1": sj.data.HashedColumn(5)})
    for schema in (SCHEMA, WITHOUT_HEADER, everything):
        document = json.loads(json.dumps(schema.to_json()))
        assert sj.ClickSchema.from_json(document) == schema
    with pytest.raises(ValueError, match="not a schema of clicks"):
        sj.ClickSchema.from_json({"label": "y"})
    column = sj.data.HashedColumn(5)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ids": {"y": column}}, r"each column has one role, but \['y'\] have two"),
        ({}, "at least one column in dense or ids"),
        ({"ids": {"a": column}, "columns": ("y", "b")}, r"columns lacks \['a'\]"),
        ({"ids": {"a": column}, "columns": ("y", "a", "a")}, "has a name twice"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            sj.ClickSchema("y", **arguments)
    with pytest.raises(ValueError, match=r"size must be in \[2, 2\^31\), got 1"):
        sj.data.HashedColumn(1)
    with pytest.raises(ValueError, match=r"min_count must be in \[1, "):
        sj.data.VocabularyColumn(0)
    with pytest.raises(ValueError, match="missing must be finite"):
        sj.data.DenseColumn(missing=float("nan"))


@pytest.mark.usefixtures("symbolic_sizes")  # without checks of annotations
def test_a_data_set_checks_its_parts(tmp_path):
    write(tmp_path / "a.tsv", records(9), "tsv")
    data = sj.read_clicks(tmp_path / "a.tsv", WITHOUT_HEADER)
    ids: dict[str, Any] = dict(data.ids)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"labels": data.labels + 1}, "labels must be 0 or 1"),
        ({"dense": data.dense[:3]}, r"dense must have shape \(9, 2\), got \(3, 2\)"),
        ({"dense": data.dense * np.nan}, "dense must be finite"),
        ({"ids": {"C1": ids["C1"]}}, r"ids must have the features \['C1', 'C2'\]"),
        ({"ids": ids | {"C2": ids["C2"] + 17}}, r"'C2'\] has an id outside \[0, 17\)"),
        (
            {"ids": ids | {"C2": ids["C2"][:4]}},
            r"'C2'\] has 4 examples, but there are 9",
        ),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(data, **change)


def test_a_split_says_what_is_held_out():
    labels, dense = np.array([0, 1, 0, 1], np.float32), np.empty((4, 0), np.float32)
    schema = sj.ClickSchema("click", ids={"user": sj.data.HashedColumn(9)})
    ids = {"user": np.array([1, 2, 1, 4], np.int32)}
    data = sj.data.ClickDataset(labels, dense, ids, schema, {})
    split = sj.data.Split(data.rows(slice(0, 2)), data.rows(slice(2, 4)))
    assert str(split) == "held out 2 of 4 examples (50.0%)"
    assert (split.new_rows, split.new_features) == (2, 1)


def single(found: sj.ClickDataset, name: str) -> np.ndarray:
    ids = found.ids[name]
    assert isinstance(ids, np.ndarray)
    return ids


def lists(found: sj.ClickDataset, name: str) -> sj.CSR:
    ids = found.ids[name]
    assert isinstance(ids, sj.CSR)
    return ids


def test_new_categories_get_ids_behind_the_known_ones(tmp_path):
    ids = {
        "user": sj.data.VocabularyColumn(min_count=2),
        "shop": sj.data.HashedColumn(9),
    }
    schema = sj.ClickSchema("click", ids=ids | {"tags": sj.data.VocabularyColumn()})

    def day(users, tags):
        return [
            {"click": i % 2, "user": user, "shop": "x", "tags": list(tag)}
            for i, (user, tag) in enumerate(zip(users, tags, strict=True))
        ]

    monday = sj.read_clicks(
        day(["ann", "bob"] * 2 + ["eve"], ["ab", "", "a", "b", "a"]), schema
    )
    rows = day(
        ["eve", "bob", "dan", "eve", None, "zoe", "dan"],
        ["c", "a", "", "cb", "d", "", "c"],
    )
    tuesday = sj.read_clicks(rows, schema, features=monday, append=True)
    # Known ids are found even if they are rare. By now eve and dan are frequent enough.
    assert tuesday.vocabularies["user"].tolist() == ["ann", "bob", "dan", "eve"]
    assert single(tuesday, "user").tolist() == [5, 3, 4, 5, 0, 1, 4]
    assert tuesday.vocabularies["tags"].tolist() == ["a", "b", "c", "d"]
    assert lists(tuesday, "tags").indices.tolist() == [4, 2, 4, 3, 5, 4]
    assert tuesday.num_ids == {"user": 6, "shop": 9, "tags": 6}

    # In the data in memory, bob was too rare for a row of his own.
    own = sj.read_clicks(rows, schema)
    longer = own.append_features(monday)
    assert longer.vocabularies["user"].tolist() == ["ann", "bob", "dan", "eve"]
    assert single(longer, "user").tolist() == [5, 1, 4, 5, 0, 1, 4]
    for found in (tuesday, longer):
        np.testing.assert_array_equal(found.ids["shop"], own.ids["shop"])
        np.testing.assert_array_equal(found.labels, own.labels)
    np.testing.assert_array_equal(
        lists(longer, "tags").indptr, lists(own, "tags").indptr
    )
    assert longer.vocabularies["tags"].tolist() == ["a", "b", "c", "d"]
    assert lists(longer, "tags").indices.tolist() == [4, 2, 4, 3, 5, 4]
    longer.save(tmp_path / "longer.parquet")
    assert sj.ClickDataset.load(tmp_path / "longer.parquet").num_ids == tuesday.num_ids

    with pytest.raises(ValueError, match="append=True needs features"):
        sj.read_clicks(rows, schema, append=True)
    other = sj.ClickSchema("click", ids={"user": sj.data.VocabularyColumn()})
    with pytest.raises(ValueError, match="this data set has other columns"):
        longer.append_features(sj.read_clicks(rows, other))
    with pytest.raises(ValueError, match=r"lacks \['tags'\]"):
        longer.append_features({"user": np.array(["ann"])})


def test_numbers_are_found_in_vocabularies_however_they_are_spelled():
    schema = sj.ClickSchema("click", ids={"user": sj.data.VocabularyColumn()})
    rows = [{"click": 0, "user": user} for user in (7, 8)]
    known = {"user": np.array(["7.0"])}
    read = sj.read_clicks(rows, schema, features=known, append=True)
    for found in (read, sj.read_clicks(rows, schema).append_features(known)):
        assert found.vocabularies["user"].tolist() == ["7.0", "8"]
        assert single(found, "user").tolist() == [2, 3]


def timed_rows(form: str) -> list[dict[str, Any]]:
    """Examples of ten days in random order; later days have other categories."""
    rng = np.random.default_rng(0)
    rows = []
    for day in rng.permutation(np.repeat(np.arange(10), 12)).tolist():
        times = {
            "int": day,
            "float": day + 0.5,
            "date": f"2026-11-{day + 1:02}T10:00:00Z",
        }
        ads = [
            f"ad{int(rng.integers(day, day + 4))}" for _ in range(int(rng.integers(3)))
        ]
        rows.append(
            {
                "label": int(rng.integers(2)),
                "I1": float(rng.random()),
                "user": f"u{int(rng.zipf(1.5)) % 9}" if rng.random() < 0.9 else None,
                "ads": ads,
                "at": times[form],
            }
        )
    return rows


@pytest.mark.parametrize(
    ("form", "cut"), [("int", 6), ("float", 6), ("date", "2026-11-07")]
)
def test_parts_by_time_are_as_if_read_apart(tmp_path, form, cut):
    rows = timed_rows(form)
    schema = sj.ClickSchema(
        "label",
        dense={"I1": LOG},
        ids={
            "user": sj.data.VocabularyColumn(min_count=2),
            "ads": sj.data.VocabularyColumn(),
        },
        time="at",
    )
    data = sj.read_clicks(rows, schema)
    data.save(tmp_path / "saved.parquet")
    again = sj.ClickDataset.load(tmp_path / "saved.parquet")
    later = [str(row["at"]) >= str(cut) for row in rows]
    first, second = (
        [row for row, is_later in zip(rows, later, strict=True) if is_later == which]
        for which in (False, True)
    )
    train = sj.read_clicks(first, schema)
    heldout = sj.read_clicks(second, schema, features=train)
    ads = heldout.ids["ads"]
    # New ids are unknown, so they get id 1.
    assert isinstance(ads, sj.CSR) and (ads.indices == 1).any()
    for parts in (
        data.split_at(cut),
        again.split_at(cut),
        again.split_at(fraction=0.6),
    ):
        for part, expected in zip(parts, (train, heldout), strict=True):
            assert part.schema == schema
            np.testing.assert_array_equal(part.times, expected.times)
            np.testing.assert_array_equal(part.labels, expected.labels)
            np.testing.assert_array_equal(part.dense, expected.dense)
            jax.tree.map(np.testing.assert_array_equal, part.ids, expected.ids)
            for name, known in expected.vocabularies.items():
                assert part.vocabularies[name].tolist() == known.tolist()


def test_scans_have_no_times(tmp_path):
    schema = sj.ClickSchema("y", ids={"user": sj.data.HashedColumn(9)})
    table = pa.table({"y": [0, 1, 1], "user": ["a", "b", "a"], "at": [3, 5, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    timed = dataclasses.replace(schema, time="at")
    data = sj.read_clicks(tmp_path / "a.parquet", timed)
    assert data.times is not None
    data.save(tmp_path / "saved.parquet")
    read = sj.data.scan_clicks(tmp_path / "a.parquet", timed)
    plain = sj.data.scan_clicks(tmp_path / "a.parquet", schema)
    assert read.fingerprint() == plain.fingerprint()
    for found in read, sj.data.scan_clicks(tmp_path / "saved.parquet"):
        (chunk,) = found.chunks()
        assert found.schema == schema
        assert chunk.schema == schema and chunk.times is None


def test_times_of_clicks_that_are_wrong():
    schema = sj.ClickSchema("label", ids={"user": sj.data.HashedColumn(9)}, time="at")
    row = {"label": 1, "user": "ann", "at": 3}
    assert sj.ClickSchema.from_json(schema.to_json()) == schema
    assert "time" not in SCHEMA.to_json()
    for at, message in ((None, "'at' has no time here"), ("noon", "'at': ")):
        with pytest.raises(sj.DataError, match=message):
            sj.read_clicks([row | {"at": "2026-11-01"}, row | {"at": at}], schema)
    with pytest.raises(sj.DataError, match="no column 'at'"):
        sj.read_clicks([{"label": 1, "user": "ann"}], schema)
    data = sj.read_clicks([row, row | {"at": 5}], schema)
    with pytest.raises(ValueError, match="the times are from 3 to 5, the cut is 9"):
        data.split_at(9)
    with pytest.raises(ValueError, match="pass either a time or a fraction"):
        data.split_at()
    untimed = dataclasses.replace(data, times=None)
    with pytest.raises(
        ValueError, match=r"name their column: ClickSchema\(time=COLUMN\)"
    ):
        untimed.split_at(4)
    with pytest.raises(ValueError, match="times must have shape"):
        dataclasses.replace(data, times=np.zeros(3))
    with pytest.raises(ValueError, match="each column has one role"):
        dataclasses.replace(schema, time="user")


def test_none_and_nan_and_an_empty_cell_are_missing_in_every_form(tmp_path):
    """Of numbers and of categories: files, tables, dicts of columns and lists of dicts."""
    schema = sj.ClickSchema(
        "label",
        {"I1": sj.data.DenseColumn(missing=-1.0), "I2": LOG},
        {"C1": sj.data.VocabularyColumn(), "C2": sj.data.HashedColumn(50)},
    )
    nan = float("nan")
    none = {
        "label": [0, 1, 1, 0],
        "I1": [1.5, None, 3.0, None],
        "I2": [None, 2.0, None, 4.0],
        "C1": ["a", None, "b", "a"],
        "C2": [7, 8, None, 7],
    }
    nans = {n: [nan if x is None else x for x in c] for n, c in none.items()}
    frame = pd.DataFrame(nans)
    frame.to_csv(tmp_path / "empty.csv", index=False)
    frame.to_csv(tmp_path / "nan.csv", index=False, na_rep="")
    text = (tmp_path / "nan.csv").read_text().splitlines()
    text[2], text[4] = "1,nan,2.0,,8.0", "0,NaN,4.0,a,7.0"
    (tmp_path / "nan.csv").write_text("\n".join(text) + "\n")
    numbers = {n: pa.array(nans[n], pa.float64()) for n in ("I1", "I2")}
    table = pa.table(none | numbers)
    pq.write_table(table, tmp_path / "nan.parquet")
    wanted = sj.read_clicks(pa.table(none), schema)
    np.testing.assert_array_equal(wanted.dense[:, 0], [1.5, -1, 3, -1])
    forms = [
        tmp_path / "empty.csv",
        tmp_path / "nan.csv",
        tmp_path / "nan.parquet",
        table,
        frame,
        none,
        nans,
        [dict(zip(none, row, strict=True)) for row in zip(*none.values(), strict=True)],
        frame.to_dict("records"),
    ]
    for form in forms:
        found = sj.read_clicks(form, schema)
        np.testing.assert_array_equal(found.dense, wanted.dense)
        for name in schema.ids:
            np.testing.assert_array_equal(found.ids[name], wanted.ids[name])
        if not isinstance(form, pathlib.Path):
            dense, ids = examples_of(form, schema, wanted.vocabularies)
            np.testing.assert_array_equal(dense, wanted.dense)
            np.testing.assert_array_equal(ids["C2"], wanted.ids["C2"])
    with pytest.raises(sj.DataError, match="columns differ in their lengths"):
        sj.read_clicks(none | {"I1": [1.0]}, schema)
