"""Folders of Parquet files: a column that only some of the files have is an error, in any
order.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.cli.main import main

OLD = {"user": [1, 1], "item": ["x", "y"]}
NEW = {"user": [1, 1], "item": ["y", "x"]}
LISTS = {"user": [1], "items": [["x", "y"]]}


def rows(scan):
    return lambda folder: scan(folder).read(0, 1)


def prepared(folder, **options):
    sj.prepare(folder, folder.parent / "prepared", **options)


def converted(folder):
    if main(["convert", str(folder), str(folder.parent / "out.parquet")]):
        raise sj.DataError("the command says why")


# Readers, and the roles of the columns that they read.
WAYS = {
    "read": (sj.read, {"value", "time"}),
    "read, indicator": (lambda folder: sj.read(folder, indicator=True), {"time"}),
    "read, no times": (lambda folder: sj.read(folder, time=None), {"value"}),
    "read_parquet": (sj.data.read_parquet, {"value", "time"}),
    "read_sequences": (sj.read_sequences, {"time"}),
    "scan_parquet": (rows(sj.data.scan_parquet), {"value"}),
    "scan_parquet, names": (
        lambda folder: sj.data.scan_parquet(folder, features=["x", "y"]).read(0, 1),
        {"value"},
    ),
    "scan_sequences": (rows(sj.data.scan_sequences), {"time"}),
    "prepare": (prepared, {"value"}),
    "prepare, last": (lambda f: prepared(f, duplicates="last"), {"value", "time"}),
    "convert": (converted, {"value", "time"}),
}
MORE = {
    "value": {"rating": [5.0, 4.0]},
    "time": {"ts": [7, 8]},
    "both": {"rating": [5.0, 4.0], "ts": [7, 8]},
    "none": {"title": ["a", "b"]},
}


def write(folder, *tables):
    folder.mkdir()
    for number, table in enumerate(tables):
        pq.write_table(pa.table(table), folder / f"{number}.parquet")
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("later", [True, False])
def test_columns_of_some_files(way, kind, later, tmp_path, capsys):
    read, looked_for = WAYS[way]
    times = {"ts": [1, 2]} if way == "prepare, last" and kind == "value" else {}
    parts = [OLD | times, NEW | MORE[kind] | times]
    folder = write(tmp_path / "events", *(parts if later else parts[::-1]))
    differing = {"both": {"value", "time"}, "none": set()}.get(
        kind, {kind}
    ) & looked_for
    if way == "prepare, last" and kind == "none":
        return  # this reader needs times
    if not differing:
        read(folder)
        return
    first, second = ("0.parquet", "1.parquet") if later else ("1.parquet", "0.parquet")
    if way == "prepare, last" and kind in ("time", "both") and later:
        message = "has no column of times"
    else:
        role = "value" if "value" in differing else "time"
        name = {"value": "rating", "time": "ts"}[role]
        message = (
            f"{first}: has no column of the {role}, but .*{second} has '{name}'; give all "
            "files the same columns"
        )
    with pytest.raises(sj.DataError, match=message if way != "convert" else None):
        read(folder)
    if way == "convert":
        assert "give all files the same columns" in capsys.readouterr().err


READ = {
    "read": lambda folder: sj.read(folder).num_entries,
    "read_sequences": lambda folder: sj.read_sequences(folder).num_entries,
    "scan_parquet": lambda folder: sj.data.scan_parquet(folder).read(0, 1).nse,
    "scan_sequences": lambda folder: len(
        sj.data.scan_sequences(folder).read(0, 1).indices
    ),
    "prepare": lambda folder: sj.prepare(
        folder, folder.parent / "out", duplicates="last"
    ).num_entries(),
}


@pytest.mark.parametrize("way", READ)
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("table", [NEW, LISTS], ids=["pairs", "lists"])
def test_files_without_rows(way, later, table, tmp_path):
    """Where there are no cells, pandas gives columns of objects no type."""
    size = len(table["user"])
    whole = table | {"rating": [5.0, 4.0], "ts": [7, 8]}
    if size == 1:
        whole = table | {"rating": [[5.0, 4.0]], "ts": [[7, 8]]}
    empty = dict.fromkeys(whole, pa.array([], pa.null()))
    parts = [whole, empty, empty] if later else [empty, empty, whole]
    assert READ[way](write(tmp_path / "events", *parts)) == 2
    nothing = write(tmp_path / "nothing", empty, empty)
    with pytest.raises(sj.DataError, match="holds no data"):
        READ[way](nothing)


@pytest.mark.parametrize("later", [True, False])
def test_lists_of_some_files(later, tmp_path):
    parts = [LISTS, LISTS | {"ratings": [[1.0, 2.0]]}]
    folder = write(tmp_path / "events", *(parts if later else parts[::-1]))
    for read in (sj.read, sj.data.scan_parquet, lambda f: prepared(f)):
        with pytest.raises(sj.DataError, match="has no column of the value"):
            read(folder)


def test_a_column_that_was_chosen(tmp_path):
    """It is missing in one of the files."""
    parts = [OLD | {"points": [1, 2]}, NEW]
    for number, files in enumerate((parts, parts[::-1])):
        folder = write(tmp_path / str(number), *files)
        with pytest.raises(sj.DataError, match="no column.*'points'"):
            sj.read(folder, value="points")
