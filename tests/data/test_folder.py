"""Data sets as folders: their content, partial reading, and errors."""

import datetime
import decimal
import json
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import contents

import sparsejax as sj
from sparsejax.data.prepared import folder_files

pytest.importorskip("duckdb")


def events(rows=300, items=20, count=4000, seed=0):
    """Events of integer users and items; a third of the events have the same item."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, items, count)
    item[rng.random(count) < 1 / 3] = 7
    user = rng.integers(0, rows, count)
    user[:15] = 3  # this user has most items
    item[:15] = np.arange(15)
    value = rng.integers(1, 9, count) / 2
    return pa.table({"user": user, "item": item, "value": value})


@pytest.fixture
def small_groups(monkeypatch):
    """Sets small sizes: row groups of 100 entries, and files of 500 entries."""
    monkeypatch.setattr(folder_files, "GROUP_ENTRIES", 100)
    monkeypatch.setattr(folder_files, "FILE_ENTRIES", 500)


def test_groups_and_files(tmp_path, small_groups):
    table = events()
    users = pa.table(
        {"user": ["one"] * 700, "item": np.arange(700), "value": [1.0] * 700}
    )
    table = pa.concat_tables(
        [t.set_column(0, "user", t["user"].cast(pa.string())) for t in (table, users)]
    )
    whole = sj.data.from_arrow(table)
    manifest = sj.prepare(table, tmp_path / "out", split_fraction=0.7)
    again = sj.prepare(table, tmp_path / "again", split_fraction=0.7)
    assert again.train == manifest.train  # the files must have equal bytes
    groups = [group for file in manifest.train for group in file.groups]
    lengths = sorted(sum(group) for group in groups)  # an empty row takes space, too
    assert lengths[-1] > 490 and lengths[-2] <= 100 and lengths[1] > 60
    assert len(manifest.train) > 3
    for part, data in zip(("train", "test"), whole.split(0.7, seed=0), strict=True):
        found = sj.read(tmp_path / "out" / part)
        order = data.align_rows(found.row_names)
        assert contents(found) == contents(order)
        scanned = sj.data.scan_parquet(tmp_path / "out" / part)
        some = scanned.read(17, 200).to_scipy().toarray()
        np.testing.assert_array_equal(some, found.to_scipy().toarray()[17:200])
    # The order of the rows differs from that of their names, and from that of the table.
    rows = sj.read(tmp_path / "out").row_names[:-1].astype("T")
    assert abs(np.corrcoef(np.argsort(rows), np.arange(len(rows)))[0, 1]) < 0.3
    counts = pq.read_table(tmp_path / "out" / "vocabulary.parquet")
    assert counts["item"].to_pylist() == whole.feature_names.tolist()
    assert counts["rows"].to_pylist() == np.bincount(whole.matrix.indices).tolist()


def test_what_is_no_finished_folder(tmp_path):
    out = tmp_path / "out"
    sj.prepare(events(), out)
    with pytest.raises(FileExistsError):
        sj.prepare(events(), out, min_user=2)
    with pytest.raises(ValueError, match="is a saved data set, so it has no columns"):
        sj.read(out, user="user")
    with pytest.raises(ValueError, match="is a saved data set, so it has no columns"):
        sj.data.scan_parquet(out, features=["1"])
    [part] = (out / "train").iterdir()
    with pytest.raises(sj.DataError, match="part of a prepared data set.*its folder"):
        sj.read(part)
    scanned, content = sj.data.scan_parquet(out), part.read_bytes()
    before = scanned.fingerprint()
    part.write_bytes(content[:-1])
    for read in (lambda: sj.read(out), lambda: scanned.read(0, 5)):
        with pytest.raises(sj.DataError, match="is damaged, or was changed"):
            read()
    part.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(sj.DataError, match="is damaged"):
        sj.read(out)
    part.unlink()
    with pytest.raises(sj.DataError, match="No such file"):
        sj.read(out)
    part.write_bytes(content)
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["train"][0]["crc32"] += 1
    path.write_text(json.dumps(manifest))
    assert sj.data.scan_parquet(out).fingerprint() != before  # the data has changed
    path.write_text(json.dumps(manifest | {"vocabulary": "0"}))
    with pytest.raises(sj.DataError, match="is not the vocabulary of the manifest"):
        sj.read(out)
    path.write_text(json.dumps(manifest | {"version": 9}))
    with pytest.raises(sj.DataError, match='"version" is 9; this release reads'):
        sj.read(out)
    for text in ("{}", "nonsense", json.dumps(manifest | {"train": [{}]})):
        path.write_text(text)
        with pytest.raises(sj.DataError, match=r"manifest.json: is"):
            sj.read(out)
    path.unlink()
    for read in (sj.read, sj.data.scan_parquet):
        with pytest.raises(sj.DataError, match="preparing it was not finished"):
            read(out)


BAD = {
    "user": ["ann", None, "", "bob", "bob", "eve", "eve"],
    "item": ["tea", "tea", "rye", None, "tea", "rye", "tea"],
    "value": [1.0, 2.0, 3.0, 4.0, np.nan, 1e39, 7.0],
    "time": ["2024-01-05", "", None, "2024-01-06", "2024-01-07", "x", "soon"],
}


def test_a_manifest_of_another_program_is_none(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "manifest.json").write_text('{"files": []}')
    table = pa.table({"user": ["a", "b"], "item": ["x", "y"]})
    pq.write_table(table, tmp_path / "train" / "log.parquet")
    for path in (tmp_path, tmp_path / "train"):
        assert sj.read(path).num_rows == 2


@pytest.mark.parametrize("form", [pa.table, pd.DataFrame, "file"])
def test_wrong_events_are_counted(tmp_path, form):
    table = pa.table(BAD)
    if form == "file":
        pq.write_table(table, tmp_path / "events.parquet")
        table = str(tmp_path / "events.parquet")
    elif form is pd.DataFrame:
        table = form(BAD)
    with pytest.raises(
        sj.DataError,
        match=r"2 events without a user, 1 events without an item, 2 events whose value "
        r"is null or not finite as float32, 1 events whose time .* the first is row 1 of "
        r".*skip_bad_lines=True",
    ):
        sj.prepare(table, tmp_path / "out", duplicates="last")
    assert not (tmp_path / "out").exists()
    manifest = sj.prepare(
        table, tmp_path / "out", duplicates="last", skip_bad_lines=True
    )
    assert sum(manifest.skipped.values()) == 6
    assert "2 events without a user" in str(manifest)
    assert contents(sj.read(tmp_path / "out")) == {"ann": {"tea": 1.0}}


def test_wrong_events_alone_and_infinite_ones(tmp_path):
    infinite = float("inf")
    table = {"user": ["a", "a", "b", "b"], "item": [1, 2, 2, 3]}
    table |= {
        "value": [1.0, infinite, -infinite, 2.0],
        "time": [1.0, 2.0, 3.0, infinite],
    }
    with pytest.raises(sj.DataError, match="2 events whose value.*1 events whose time"):
        sj.prepare(pa.table(table), tmp_path / "out", split_last=1)
    manifest = sj.prepare(
        pa.table(table), tmp_path / "out", duplicates="last", skip_bad_lines=True
    )
    assert sum(manifest.skipped.values()) == 3
    assert contents(sj.read(tmp_path / "out")) == {"a": {"1": 1.0}}
    for wrong in (slice(1, 3), slice(1, 1)):
        some = {name: column[wrong] for name, column in table.items()}
        with pytest.raises(sj.DataError, match="holds no data: there are no events"):
            sj.prepare(pa.table(some), tmp_path / "none", skip_bad_lines=True)
    assert not (tmp_path / "none").exists()


def test_other_types_of_columns_and_empty_files(tmp_path):
    numbers = [1, 2, 2, 3, 1, 10]
    table = {"user": list("abacba"), "item": numbers, "value": numbers}
    table |= {"time": [datetime.date(2024, 1, day) for day in range(1, 7)]}
    texts, decimals = list(map(str, numbers)), list(map(decimal.Decimal, numbers))
    expected = contents(sj.data.from_arrow(pa.table(table)))
    forms = [("item", texts, pa.string_view()), ("item", texts, pa.binary())]
    forms += [("item", texts, pa.dictionary(pa.int8(), pa.string()))]
    forms += [("item", numbers, pa.uint64()), ("item", numbers, pa.float64())]
    forms += [("item", decimals, pa.decimal128(8)), ("value", numbers, pa.uint8())]
    forms += [("value", decimals, pa.decimal128(8, 2))]
    forms += [("time", table["time"], type_) for type_ in (pa.date32(), pa.date64())]
    moments = [datetime.datetime(2024, 1, day, 12) for day in range(1, 7)]
    forms += [("time", moments, pa.timestamp("ns", "Europe/Paris"))]
    forms += [("time", list(map(str, table["time"])), pa.large_string())]
    for number, (name, values, type_) in enumerate(forms):
        some = pa.table(table | {name: pa.array(values, type_)})
        source, out = some, tmp_path / f"out{number}"
        if number % 2:
            (source := tmp_path / f"{number}").mkdir()
            for part in range(3):
                rows = some.slice(0, len(some) * (part == 1))
                pq.write_table(rows, source / f"{part}.parquet")
        sj.prepare(source, out, duplicates="last" if name == "time" else "add")
        assert contents(sj.read(out)) == expected, type_
    for name in ("item", "value", "time"):
        wrong = pa.table(table | {name: [True] * 6})
        options: Any = {"time": "time"} if name == "time" else {}
        with pytest.raises(sj.DataError, match=f"column '{name}' .* but it is bool"):
            sj.prepare(wrong, tmp_path / "out", split_last=1, **options)


def test_duplicates_and_what_is_left(tmp_path):
    table = {"user": [1, 1, 1, 2], "item": [9, 9, 9, 10], "value": [1.0, 4, 2, 5]}
    table = pa.table(table | {"time": [3.5, 1, 3.5, 0]})
    for duplicates, value in (("add", 7.0), ("last", 2.0), ("max", 4.0)):
        sj.prepare(table, tmp_path / duplicates, duplicates=duplicates)
        found = contents(sj.read(tmp_path / duplicates))
        assert found == {"1": {"9": value}, "2": {"10": 5.0}}
    # Integers are converted to text.
    assert sj.read(tmp_path / "add").feature_names.tolist() == ["10", "9"]
    out = tmp_path / "out"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"min_user": 2}, "nothing is left: no users have min_user=2"),
        ({"split_time": 0}, "everything is held out.* no event is before split_time=0"),
        ({"split_time": 9.0}, "nothing is held out"),
        ({"features": ["none"]}, "the vocabulary lacks: '10', '9'; it has 'none'"),
        ({"time": "none", "split_last": 1}, "no column 'none'"),
        ({"split_last": 1, "split_time": 3}, "there is one split, but split_time and"),
        ({"split_fraction": 1.0}, "split_fraction must be below 1"),
        ({"min_item": 0}, "min_item must be at least 1, got 0"),
        ({"split_time": "2024-01-01"}, "the times are numbers, from 0.0 to 3.5"),
        ({"memory": "much"}, "memory='much' is not an amount of memory"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            sj.prepare(table, out, **options)
    sums = pa.table({"user": [1, 1], "item": [2, 2], "value": [3e38, 3e38]})
    with pytest.raises(sj.DataError, match="the values of '1' and '2' have too large"):
        sj.prepare(sums, out)
    with pytest.raises(sj.DataError, match="holds no data: there are no events"):
        sj.prepare(table.slice(0, 0), out)
    with pytest.raises(sj.DataError, match="column 'item' holds 4.5, which cannot be"):
        sj.prepare(pa.table({"user": [1], "item": [4.5]}), out)
    assert not [
        p.name for p in tmp_path.iterdir() if p.name not in ("add", "last", "max")
    ]


def test_formats_and_lists(tmp_path):
    (tmp_path / "events.csv").write_text("user,item,rating\nann,tea,4\nbob,rye,1\n")
    (tmp_path / "events.tsv").write_text("ann\ttea,4:milk,2\nbob\trye,1\n")
    lists = pa.table({"user": ["ann", "bob"], "items": [["tea", "milk"], ["rye"]]})
    pq.write_table(lists, tmp_path / "events.parquet")
    for name in ("events.csv", "events.tsv", "events.parquet"):
        out = tmp_path / f"{name}.out"
        sj.prepare(tmp_path / name, out)
        expected, found = sj.read(tmp_path / name), sj.read(out)
        assert contents(found) == contents(expected.align_rows(found.row_names))
        assert found.feature_names.tolist() == expected.feature_names.tolist()
    with pytest.raises(
        sj.DataError, match="is a saved data set, not a table of events"
    ):
        expected.save(tmp_path / "saved.parquet")
        sj.prepare(tmp_path / "saved.parquet", tmp_path / "out")


def test_in_a_store(bucket, monkeypatch, small_groups):
    address, query = bucket
    store, _ = pa.fs.FileSystem.from_uri(address + query)
    table = events()
    store.create_dir("shop/log")
    for number in range(2):
        part = table.slice(number * 2000, 2000)
        pq.write_table(part, f"shop/log/{number}.parquet", filesystem=store)
    out = f"{address}/prepared{query}"
    manifest = sj.prepare(f"{address}/log{query}", out, split_fraction=0.8)
    found = sj.read(out)
    data = sj.data.from_arrow(table).split(0.8, seed=0).train
    assert contents(found) == contents(data.align_rows(found.row_names))
    assert sj.read(f"{address}/prepared/test{query}").num_rows == manifest.num_rows(
        "test"
    )
    with pytest.raises(FileExistsError, match="^s3://shop/prepared.*: already exists"):
        sj.prepare(table, out)

    from moto.moto_server import werkzeug_app

    requests, answer = [], werkzeug_app.DomainDispatcherApplication.__call__

    def counted(self, environ, start_response):
        requests.append(environ["PATH_INFO"])
        return answer(self, environ, start_response)

    monkeypatch.setattr(werkzeug_app.DomainDispatcherApplication, "__call__", counted)
    scanned = sj.data.scan_parquet(out)
    assert len(manifest.train) > 3
    # The number of requests does not depend on the number of files.
    assert len(requests) <= 3, requests
    requests.clear()
    # A process that reads a third of the rows opens the files of these rows.
    scanned.read(100, 200)
    files = {path for path in requests if path.endswith(".parquet")}
    assert 1 <= len(files) < len(manifest.train)
    store.delete_file("shop/prepared/manifest.json")
    with pytest.raises(sj.DataError, match="preparing it was not finished"):
        sj.data.scan_parquet(out)


def test_a_preparation_that_was_done_can_be_repeated(tmp_path):
    """Its process may have been killed after the folder appeared."""
    out, table = tmp_path / "out", {"user": list("aabb"), "item": list("xyxz")}
    frame = pd.DataFrame(table)
    manifest = sj.prepare(frame, out, split_fraction=0.5)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert sj.prepare(frame, out, split_fraction=0.5) == manifest
    # The order of events does not matter.
    assert sj.prepare(frame[::-1], out, split_fraction=0.5) == manifest
    for changed, options in (
        (frame, {"split_fraction": 0.25}),
        (frame, {"split_fraction": 0.5, "seed": 1}),
        (frame.replace("z", "y"), {"split_fraction": 0.5}),
        (frame[1:], {"split_fraction": 0.5}),
    ):
        with pytest.raises(FileExistsError, match="out: already exists"):
            sj.prepare(changed, out, **options)  # pyrefly: ignore
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    # A folder with a missing file is not a data set.
    part = next((out / "train").iterdir())
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(FileExistsError, match="out: already exists"):
        sj.prepare(frame, out, split_fraction=0.5)
    part.write_bytes(content)
    (out / "vocabulary.parquet").unlink()
    with pytest.raises(FileExistsError, match="out: already exists"):
        sj.prepare(frame, out, split_fraction=0.5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError, match="empty: already exists"):
        sj.prepare(frame, tmp_path / "empty")
