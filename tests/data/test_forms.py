"""Equal data read from all supported forms: files, folders, frames, records."""

import bz2
import functools
import gzip
import io
import json
import lzma
import zipfile
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data import DataError

USERS = ["ann", "ann", "bob", "eve", "eve", "ann"]
ITEMS = ["tea", "rye", "tea", "fig", "tea", "tea"]
RATINGS = [2.0, 3.5, 1.0, 4.0, 5.0, 0.5]
TIMES = [f"2024-01-{day:02}T10:00:00" for day in (3, 1, 2, 5, 4, 6)]
LABELS = [1, 0, 0, 1, 1, 0]
TABLE = pa.table(
    {
        "user_id": USERS,
        "item_id": ITEMS,
        "rating": RATINGS,
        "order_timestamp": TIMES,
        "label": LABELS,
    }
)
SCHEMA = sj.ClickSchema(
    "label",
    dense={"rating": sj.data.DenseColumn()},
    ids={"user_id": sj.data.VocabularyColumn(), "item_id": sj.data.HashedColumn(50)},
)


def _bytes(table=TABLE, delimiter=","):
    out = io.BytesIO()
    options = pa.csv.WriteOptions(quoting_style="none", delimiter=delimiter)
    header = delimiter.join(table.column_names).encode() + b"\n"
    pa.csv.write_csv(
        table,
        out,
        pa.csv.WriteOptions(
            include_header=False, quoting_style="none", delimiter=options.delimiter
        ),
    )
    return header + out.getvalue()


def _lines(table=TABLE):
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def _zip(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("events/", b"")
        archive.writestr("events/all.csv", data)
        archive.writestr("__MACOSX/._all.csv", b"\0")
    return out.getvalue()


def _zstd(data):
    half = len(data) // 2  # the first of two frames has this many rows
    return b"".join(
        pa.compress(d, "zstd", asbytes=True) for d in (data[:half], data[half:])
    )


def _file(name, data):
    def write(folder):
        (folder / name).write_bytes(data())
        return folder / name

    return write


def _folder(name, write, form=lambda folder: folder / "all"):
    """A form of two files, the second with the last rows, beside files that are skipped."""

    def make(folder):
        for at, part in enumerate((TABLE.slice(0, 4), TABLE.slice(4))):
            path = folder / "all" / name.format(at)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(write(part))
        (folder / "all" / "_SUCCESS").write_bytes(b"")
        (folder / "all" / ".crc").write_bytes(b"x")
        (folder / "all" / "part-9").write_bytes(b"")
        return form(folder)

    return make


def _parts(folder):
    return sorted((folder / "all").glob("part-0*"))


def _qualified():
    return _bytes(TABLE.rename_columns([f"orders.{n}" for n in TABLE.column_names]))


FORMS = {
    "csv": _file("all.csv", _bytes),
    "jsonl": _file("all.jsonl", _lines),
    "json lines in another name": _file("all.txt", _lines),
    "gz": _file("all.csv.gz", lambda: gzip.compress(_bytes())),
    "xz": _file("all.csv.xz", lambda: lzma.compress(_bytes())),
    "bz2": _file("all.csv.bz2", lambda: bz2.compress(_bytes())),
    "zst": _file("all.jsonl.zst", lambda: _zstd(_lines())),
    "zip": _file("all.zip", lambda: _zip(_bytes())),
    "folder of csv": _folder("part-{}.csv", _bytes),
    "folder without suffix": _folder("part-0000{}", lambda t: _bytes(t, "\t")),
    "folder of jsonl": _folder("part-{}.jsonl", _lines),
    "list of csv": _folder("part-0{}.csv", _bytes, _parts),
    "list of parquet": _folder("part-0{}.parquet", lambda t: _parquet_bytes(t), _parts),
    "arrow": lambda folder: TABLE,
    "polars": lambda folder: pl.DataFrame(TABLE),
    "pandas": lambda folder: TABLE.to_pandas(),
    "duckdb": lambda folder: duckdb.from_arrow(TABLE),
    "dicts": lambda folder: TABLE.to_pylist(),
    "batches": lambda folder: iter(TABLE.to_batches(max_chunksize=2)),
    "iterator of dicts": lambda folder: iter(TABLE.to_pylist()),
}


def _parquet_bytes(table=TABLE):
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def _plain(value):
    if isinstance(value, sj.CSR):
        return [_plain(leaf) for leaf in (value.indptr, value.indices, value.data)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def items(source, folder):
    data = sj.read(source)
    return [
        _plain(data.matrix),
        *map(
            _plain,
            (
                data.row_names,
                data.feature_names,
                data.times,
                data.order,
                data.first_times,
            ),
        ),
    ]


def histories(source, folder):
    data = sj.read_sequences(source)
    return list(
        map(
            _plain,
            (data.indptr, data.indices, data.row_names, data.feature_names, data.times),
        )
    )


def clicks(source, folder):
    data = sj.read_clicks(source, SCHEMA)
    ids = {name: _plain(each) for name, each in data.ids.items()}
    return [
        _plain(data.labels),
        _plain(data.dense),
        ids,
        _plain(data.vocabularies["user_id"]),
    ]


def prepared(source, folder):
    sj.prepare(source, folder / "prepared", duplicates="last", split_fraction=0.5)
    return items(folder / "prepared", folder) + items(
        folder / "prepared" / "test", folder
    )


@pytest.fixture(scope="module")
def of_parquet(tmp_path_factory):
    """A cache of the results of functions on the table in a Parquet file."""

    @functools.cache
    def made(what):
        folder = tmp_path_factory.mktemp("parquet")
        return what(_file("all.parquet", _parquet_bytes)(folder), folder)

    return made


@pytest.mark.parametrize("what", [items, histories, clicks, prepared])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same(form, what, tmp_path, of_parquet):
    assert what(FORMS[form](tmp_path), tmp_path) == of_parquet(what)


@pytest.mark.parametrize("what", [items, histories, prepared])
def test_names_with_their_table(what, tmp_path):
    (tmp_path / "a").mkdir()
    same = what(_file("all.csv", _bytes)(tmp_path), tmp_path)
    path = _file("all.csv", _qualified)(tmp_path / "a")
    assert what(path, tmp_path / "a") == same


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("what", [items, histories, clicks, prepared])
def test_folders_of_hive_are_columns(what, suffix, tmp_path):
    write = {"csv": _bytes, "jsonl": _lines, "parquet": _parquet_bytes}[suffix]
    days = [time[:10] for time in TIMES]
    whole = TABLE.drop_columns(["order_timestamp"]).append_column("dt", pa.array(days))
    order = sorted(range(len(days)), key=days.__getitem__)
    for at, day in enumerate(days):
        part = tmp_path / "all" / f"dt={day}" / f"part-0.{suffix}"
        part.parent.mkdir(parents=True)
        part.write_bytes(write(whole.drop_columns(["dt"]).slice(at, 1)))
    (tmp_path / "b").mkdir()
    same = what(whole.take(order), tmp_path / "b")
    assert what(tmp_path / "all", tmp_path) == same


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_times_of_a_file_count_more_than_the_day_of_its_folder(suffix, tmp_path):
    write = {"csv": _bytes, "jsonl": _lines, "parquet": _parquet_bytes}[suffix]
    part = tmp_path / "all" / "dt=2024-01-01" / f"part-0.{suffix}"
    part.parent.mkdir(parents=True)
    part.write_bytes(write(TABLE))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    found = histories(tmp_path / "all", tmp_path / "a")
    assert found == histories(TABLE, tmp_path / "b")
    days = sj.read_sequences(tmp_path / "all", time="dt").times
    assert days is not None and len(np.unique(days)) == 1


def _hive(folder, column, table):
    """A Parquet folder with a subfolder for each value of a column."""
    for cell in dict.fromkeys(table[column].to_pylist()):
        part = (
            folder
            / f"{column}={'__HIVE_DEFAULT_PARTITION__' if cell is None else cell}"
        )
        part.mkdir(parents=True)
        cells = table[column].to_pylist()
        rows = table.filter(pa.array([each == cell for each in cells]))
        pq.write_table(
            rows.drop_columns([column]), part / "a.parquet", row_group_size=2
        )
    return folder


def test_scans_of_folders_of_hive(tmp_path):
    # The user is a folder, so that pairs are sorted by it.
    table = TABLE.take([0, 1, 5, 2, 3, 4])
    by_user = _hive(tmp_path / "users", "user_id", table)
    pq.write_table(table, tmp_path / "pairs.parquet")
    for scan in (sj.data.scan_parquet, sj.data.scan_sequences):
        found, same = scan(by_user), scan(tmp_path / "pairs.parquet")
        assert found.feature_names.tolist() == same.feature_names.tolist()
        one, other = found.read(0, 3), same.read(0, 3)
        np.testing.assert_array_equal(one.indptr, other.indptr)
        np.testing.assert_array_equal(one.indices, other.indices)
    read = sj.read_sequences(by_user, features=found.feature_names)
    np.testing.assert_array_equal(read.indices, one.indices)
    # Each row has the time of its folder.
    lists = pa.table(
        {
            "items": [["tea", "rye"], ["fig"], ["tea"]],
            "dt": ["2024-01-02", "2024-01-01", "2024-01-02"],
        }
    )
    by_day = _hive(tmp_path / "days", "dt", lists)
    times = sj.data.scan_sequences(by_day, time="dt").read(0, 3).times
    assert times is not None
    assert times.astype("datetime64[D]").astype(str).tolist() == [
        *["2024-01-01"] * 1,
        *["2024-01-02"] * 3,
    ]
    before = sj.data.scan_sequences(by_day, time="dt").fingerprint()
    (by_day / "dt=2024-01-01").rename(by_day / "dt=2023-01-01")
    assert sj.data.scan_sequences(by_day, time="dt").fingerprint() != before


def test_scans_of_clicks_in_folders_of_hive(tmp_path):
    users = [*USERS[:4], None, "ann"]
    table = TABLE.set_column(0, "user_id", pa.array(users, pa.string()))
    folder = _hive(tmp_path / "clicks", "user_id", table)
    scanned = sj.data.scan_clicks(folder, SCHEMA, chunk_rows=2)
    same = sj.data.read_clicks(folder, SCHEMA)
    assert scanned.num_rows == 6
    [*chunks], whole = scanned.chunks(), scanned.read(0, 6)
    for name in SCHEMA.ids:
        wanted = _plain(same.ids[name])
        assert _plain(whole.ids[name]) == wanted
        parts = [_plain(chunk.ids[name]) for chunk in chunks]
        assert [each for part in parts for each in part] == wanted
    before = scanned.fingerprint()
    (folder / "user_id=bob").rename(folder / "user_id=bo")
    assert sj.data.scan_clicks(folder, SCHEMA, features=same).fingerprint() != before


@pytest.mark.parametrize("separator", ["|", " ", ";;"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_lists_in_cells(suffix, separator, tmp_path):
    lists = pa.table(
        {
            "user": ["ann", "bob", "eve"],
            "item": [["tea", "rye"], ["tea"], ["fig", "rye", "tea"]],
            "time": [5, 3, 4],
        }
    )
    cells = [separator.join(each) for each in lists["item"].to_pylist()]
    cells[0] += separator  # an empty part of a cell is not an item
    text = lists.set_column(1, "item", pa.array(cells))
    write = {
        "csv": lambda t: _bytes(t, "\t"),
        "jsonl": _lines,
        "parquet": _parquet_bytes,
    }
    path = _file(f"all.{suffix}", lambda: write[suffix](text))(tmp_path)
    if suffix == "csv":
        path = path.rename(tmp_path / "all.tsv")
    got, same = sj.read(path, separator=separator), sj.data.from_arrow(lists)
    for field in ("row_names", "feature_names", "times"):
        np.testing.assert_array_equal(getattr(got, field), getattr(same, field))
    assert _plain(got.matrix) == _plain(same.matrix)
    got = sj.read_sequences(path, separator=separator)
    assert _plain(got.indices) == _plain(sj.read_sequences(lists).indices)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_times_in_a_format(suffix, tmp_path):
    write = {"csv": _bytes, "jsonl": _lines, "parquet": _parquet_bytes}[suffix]
    texts = [f"{t[8:10]}.{t[5:7]}.{t[:4]} 10h" for t in TIMES]
    table = TABLE.set_column(3, "order_timestamp", pa.array(texts))
    path = _file(f"all.{suffix}", lambda: write(table))(tmp_path)
    got = sj.read_sequences(path, time_format="%d.%m.%Y %Hh")
    assert _plain(got.times) == _plain(sj.read_sequences(TABLE).times)
    with pytest.raises(
        DataError, match="time '03.01.2024 10h' does not have the format"
    ):
        sj.read(path, time_format="%d/%m/%Y")
    with pytest.raises(DataError, match="the order was not read"):
        sj.read_sequences(path)


_RULE = "-" * 6
OTHERS: dict[str, str | bytes] = {
    "JSON array": '[{"user": "ann", "item": "tea"}]\n',
    "JSON array,": '[\n  {"user": "ann", "item": "tea"}\n]\n',
    "JSON array on each line": '["ann", "tea"]\n["bob", "rye"]\n',
    "JSON over several lines": '{\n  "events": [\n    {"user": "ann"}\n  ]\n}\n',
    "Matrix Market": "%%MatrixMarket matrix coordinate real general\n3 3 1\n1 1 5\n",
    "ARFF": "% shop\n@RELATION shop\n@ATTRIBUTE user string\n@DATA\nann,tea\n",
    "libsvm": "1 1:3 2:5\n0 4:1\n",
    "libsvm,": "2 qid:1 1:3 2:5\n0 qid:1 4:1\n",
    "table of psql or markdown": f" user | item \n{_RULE}+{_RULE}\n ann  | tea\n(1 row)\n",
    "table of markdown": f"# Plays\n\n| user | item |\n|{_RULE}|:-|\n| ann | tea |\n",
    "table as a database prints": f"+{_RULE}+\n| user |\n+{_RULE}+\n| ann  |\n",
    "table as a program prints": "┌──────┐\n│ user │\n├──────┤\n│ ann  │\n└──────┘\n",
    "table of psql": "-[ RECORD 1 ]\nuser | ann\nitem | tea\n",
    "printed data frame": "  user item\n0  ann  tea\n1  bob  rye\n",
    "HTML or XML": "<!DOCTYPE html>\n<html><body>Log in</body></html>\n",
    "HTML or XML,": "<table>\n<tr><td>ann</td></tr>\n</table>\n",
    "YAML": "- user: ann\n  item: tea\n",
    "TOML": '[[events]]\nuser = "ann"\n',
    "SQL": "-- a dump\nINSERT INTO plays VALUES ('ann', 'tea');\n",
    "LaTeX": "\\begin{tabular}{ll}\nann & tea \\\\\n\\end{tabular}\n",
    "NumPy array": b"\x93NUMPY\1\0v\0{'descr': '<i8'}\n" + b"\0" * 8,
    "pickle": b"\x80\4\x95\n\0\0\0",
    "SQLite": b"SQLite format 3\0\x10\0",
    "Feather": b"ARROW1\0\0\xff\xff",
    "ORC": b"ORC\x0a\x1f\n",
    "UTF-16": "user,item\n".encode("utf-16"),
    "tar": b"a.csv".ljust(257, b"\0") + b"ustar\0",
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_formats_are_named(what, tmp_path):
    content = OTHERS[what]
    data = content.encode() if isinstance(content, str) else content
    for suffix in ("", ".csv", ".jsonl", ".gz"):
        path = tmp_path / f"plays{suffix}"
        path.write_bytes(gzip.compress(data) if suffix == ".gz" else data)
        others = [lambda p: sj.prepare(p, tmp_path / "out")] if not suffix else []
        for read in [sj.read, lambda p: sj.read_clicks(p, SCHEMA), *others]:
            with pytest.raises(DataError, match=f"seems to be .*{what.rstrip(',')}"):
                read(path)


def test_other_archives_are_named(tmp_path):
    path = tmp_path / "plays"
    for names, what in (
        (["[Content_Types].xml", "xl/workbook.xml"], "an Excel workbook"),
        (["a.npy"], "arrays of NumPy .*numpy.load"),
        (["indptr.npy", "data.npy"], "arrays of NumPy .*load_npz"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
        with pytest.raises(DataError, match=f"seems to be {what}"):
            sj.read(path)


def test_what_is_alike_is_read(tmp_path):
    """Names of columns and cells that begin as other formats do."""
    texts = {
        "user,item\nann,[tea]\nann,---\n----,<b>\n": 3,
        "ORCID,item_id\n5,tea\n": 1,
        "item,user\n- tea: hot,ann\n": 1,
        "user|item\nann|tea\n": 1,
        "user|item|id\nann|tea|1\n-|-|-\n": 2,
        "\tuser\titem\n0\tann\ttea\n1\tbob\trye\n": 2,
        "<unk>,tea\nann,rye\n": 2,
        "item,user\ninsert into the blank,ann\ncreate table lamp,bob\n": 2,
        f"user,item\n{'a' * 247},ustart\n": 1,
    }
    for at, (text, count) in enumerate(texts.items()):
        path = tmp_path / f"{at}.csv"
        path.write_text(text)
        columns: dict[str, Any] = {"user": "ORCID"} if "ORCID" in text else {}
        assert sj.read(path, **columns).num_entries == count


def test_wrong_lines_of_json(tmp_path):
    path = tmp_path / "all.jsonl"
    for text, problem in [
        (
            '{"user": "a", "item": "b"}\n\n{"user": "a"}\n',
            "jsonl:3: an item .* empty or null",
        ),
        (
            '{"user": "a", "item": "b"}\n{"user": 1, "item": "b"}\n',
            "jsonl:2: 'user' is 1, but",
        ),
        ('{"user": "a", "item": "b"}\n{"user": "a", \n', "jsonl:2: is not JSON"),
        ('{"user": "a", "item": "b"}\n["a", "b"]\n', "jsonl:2: expected a JSON object"),
        ('{"user": "a",\n "item": "b"}\n', "jsonl:1: is not JSON"),
        ('{"user": [{"id": 1}], "item": "b"}\n', "column 'user' is read as the user"),
        (
            '{"user": {"id": 1}, "item": "b"}\n{"user": {"id": "a"}, "item": "b"}\n',
            "jsonl:2: 'user' is {'id': 'a'}, but",
        ),
        (
            '{"user": {"id": 1}, "item": "b"}\n{"item": "b"}\n',
            "jsonl:2: the user .*'user.id'",
        ),
    ]:
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            sj.read(path)


def test_objects_within_lines_of_json(tmp_path):
    folder = tmp_path / "dt=2024-05-02"
    folder.mkdir()
    rows = [
        {
            "session": {"id": who, "user": {"id": 7, "country": "DE"}},
            "track": None if what is None else {"id": what, "artist": {"name": "x"}},
            "played_at": f"2024-05-02T10:00:0{i}Z",
            "meta": {"ts": "2020-01-01T00:00:00Z"},
        }
        for i, (who, what) in enumerate([("a", "t2"), ("b", "t1"), ("a", "t1")])
    ]
    (folder / "part-0").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = sj.read_sequences(tmp_path)
    assert list(data.row_names) == ["a", "b"]
    assert [data.feature_names[i] for i in data.indices] == ["t2", "t1", "t1"]
    # A key of the record has precedence over a key of an object inside.
    assert "time = played_at" in str(data.columns)
    found = sj.read(tmp_path, user="session.user.id", item="track.artist.name")
    assert (list(found.row_names), list(found.feature_names)) == (["7"], ["x"])

    schema = sj.ClickSchema("click", ids={"user.id": sj.data.VocabularyColumn()})
    clicks = tmp_path / "clicks.jsonl"
    clicks.write_text(
        '{"click": 1, "user": {"id": "a"}}\n{"click": 0, "user": null}\n'
        '{"click": 0, "user": {"id": "a", "age": 3}, "user.age": 4}\n'
    )
    ids = sj.read_clicks(clicks, schema).ids["user.id"]
    np.testing.assert_array_equal(ids, [2, 0, 2])
    ages = sj.ClickSchema("click", dense={"user.age": sj.data.DenseColumn(missing=0.0)})
    assert sj.read_clicks(clicks, ages).dense[:, 0].tolist() == [0, 0, 4]


def test_files_of_a_folder_must_agree(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,rating\nann,tea,1\n")
    (tmp_path / "b.csv").write_text("user,item\nann,tea\n")
    with pytest.raises(
        DataError, match=r"b.csv: has the columns user = user, item = item,"
    ):
        sj.read(tmp_path)
    # The columns may be in any order.
    (tmp_path / "b.csv").write_text("rating,item,user\n2,tea,ann\n")
    assert _plain(sj.read(tmp_path).matrix)[2] == [3]
    (tmp_path / "b.csv").write_text("user,item,rating\nann,tea,x\n")
    with pytest.raises(DataError, match="b.csv:2: value 'x'"):
        sj.read(tmp_path)


def test_damaged_archives(tmp_path):
    path = tmp_path / "all.zip"
    two = io.BytesIO()
    with zipfile.ZipFile(two, "w") as archive:
        archive.writestr("a.csv", b"user,item\n")
        archive.writestr("b.csv", b"user,item\n")
    path.write_bytes(two.getvalue())
    with pytest.raises(DataError, match="is a zip of 2 files; expected one"):
        sj.read(path)
    good = {
        "zip": _zip(_bytes()),
        "zst": _zstd(_bytes()),
        "bz2": bz2.compress(_bytes()),
    }
    for name, data in good.items():
        path.write_bytes(data[: len(data) - 30] if name != "zip" else data[:60])
        with pytest.raises(DataError, match="truncated or damaged"):
            sj.read(path)
    wrong = bytearray(good["zip"])
    wrong[wrong.index(b"all.csv") + 40] ^= 1
    path.write_bytes(wrong)
    with pytest.raises(DataError, match="truncated or damaged"):
        sj.read(path)


def test_arguments_without_effect_are_errors(tmp_path):
    with pytest.raises(ValueError, match="format is for files"):
        sj.read(TABLE, format="pairs")
    path = tmp_path / "rows"
    path.write_text("ann tea rye\nbob tea\n")
    with pytest.raises(ValueError, match="has no columns with lists or times"):
        sj.read(path, separator="|")
    with pytest.raises(TypeError, match="got int"):
        sj.read(7)
    with pytest.raises(DataError, match="there is no record"):
        sj.read([])
