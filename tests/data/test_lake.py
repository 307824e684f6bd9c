"""Tables of Delta Lake and Iceberg are read as their own libraries read them.

Their folders also have files of earlier versions, which must not be read.
"""

import base64
import collections
import contextlib
import datetime
import json
import shutil
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data.reading.item_titles import read_titles

WEEK = [datetime.date(2024, 1, day) for day in range(1, 8)]


def events(users, items, day, ratings=None):
    n = len(users)
    ratings = ratings or [1.0] * n
    times = [datetime.datetime.combine(WEEK[day], datetime.time(i)) for i in range(n)]
    return pa.table(
        {
            "user": users,
            "item": items,
            "rating": pa.array(ratings, pa.float32()),
            "ts": pa.array(times, pa.timestamp("us", "UTC")),
            "day": pa.array([WEEK[day]] * n),
            "shop": [f"a/b c={day}%"] * n,
            "clicked": pa.array([i % 2 for i in range(n)], pa.int32()),
        }
    )


FIRST = events(["ann", "ann", "bob", "cy"], ["tea", "rye", "tea", "oat"], 0)
SECOND = events(["bob", "cy", "dan"], ["rye", "tea", "tea"], 1)


def write_delta(path):
    deltalake = pytest.importorskip("deltalake")
    by = ["day", "shop"]
    deltalake.write_deltalake(path, FIRST, partition_by=by)
    deltalake.write_deltalake(path, SECOND, mode="append")
    table = deltalake.DeltaTable(path)
    table.delete("user = 'bob' AND item = 'tea'")
    new = events(["cy", "eve"], ["oat", "tea"], 0, [5.0, 4.0])
    merge = table.merge(new, "s.user = t.user AND s.item = t.item", "s", "t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    table.optimize.compact()
    more = SECOND.slice(0, 1).append_column("note", pa.array(["late"]))
    more = more.set_column(1, "item", pa.array(["oat"]))
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge")
    return pa.table(deltalake.DeltaTable(path).to_pyarrow_table())


@contextlib.contextmanager
def catalog_at(path, **properties):
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    catalog = sql.SqlCatalog("test", uri="sqlite://", warehouse=path, **properties)
    try:
        catalog.create_namespace("shop")
        yield catalog
    finally:
        catalog.close()


def write_iceberg(path, **properties):
    pytest.importorskip("pyiceberg")
    from pyiceberg.types import StringType

    with catalog_at(path, **properties) as catalog:
        start = FIRST.rename_columns({"clicked": "was_clicked"})
        table = catalog.create_table("shop.events", start.schema, f"{path}/events")
        table.append(start)
        with table.update_spec() as spec:
            spec.add_identity("day")
        with table.update_schema() as schema:
            schema.rename_column("was_clicked", "clicked")
            schema.add_column("note", StringType())
        table.append(SECOND.append_column("note", pa.array(["late"] * 3)))
        table.delete("user = 'bob' and item = 'tea'")
        new = events(["cy"], ["oat"], 0, [5.0]).append_column("note", pa.array(["x"]))
        table.overwrite(new, "user = 'cy' and item = 'oat'")
        return table.scan().to_arrow()


WRITERS = {"delta": write_delta, "iceberg": write_iceberg}


@pytest.fixture(scope="module", params=WRITERS)
def written(request, tmp_path_factory):
    """The folder of a table, and its rows as read by the library of its format."""
    folder = tmp_path_factory.mktemp(request.param)
    rows = WRITERS[request.param](str(folder))
    return str(folder / "events" if request.param == "iceberg" else folder), rows


def entries(data):
    """The entries of a data set as a set, with times for histories."""
    rows = data.indptr if hasattr(data, "indptr") else data.matrix.indptr
    columns = data.indices if hasattr(data, "indptr") else data.matrix.indices
    found = []
    for i, name in enumerate(data.row_names.tolist()):
        part = slice(int(rows[i]), int(rows[i + 1]))
        names = data.feature_names[columns[part]].tolist()
        values = getattr(data, "times", None)
        if values is None:
            values = data.matrix.data
        values = [None] * len(names) if values is None else values[part].tolist()
        found += [(name, *pair) for pair in zip(names, values, strict=True)]
    return collections.Counter(map(str, found))


def clicks(source):
    ids = {"user": sj.data.KeyColumn(), "shop": sj.data.HashedColumn(2**20)}
    schema = sj.ClickSchema("clicked", {"rating": sj.data.DenseColumn()}, ids)
    return sj.read_clicks(source, schema), schema


def rows_of(data):
    found = [data.labels.tolist(), data.dense.tolist()]
    found += [np.asarray(data.ids[name]).tolist() for name in data.ids]
    return collections.Counter(map(str, zip(*found, strict=True)))


def test_events_are_those_of_the_library(written):
    folder, rows = written
    assert {*rows["user"].to_pylist()} >= {"ann", "cy", "dan"}
    assert 0 < rows["note"].null_count < len(rows)
    # The column of shops is in folders of the one, and a renamed column in files of the other.
    given: list[dict[str, Any]] = [{"time": "ts"}, {"item": "shop", "time": "day"}]
    for options in given:
        for read in (sj.read, sj.read_sequences):
            assert entries(read(folder, **options)) == entries(read(rows, **options))
    assert rows_of(clicks(folder)[0]) == rows_of(clicks(rows)[0])
    scanned = sj.data.scan_clicks(folder, clicks(folder)[1])
    assert rows_of(scanned.read(0, scanned.num_rows)) == rows_of(clicks(rows)[0])
    # Both sources are read, and compared.
    for source in (folder, rows.select(["user", "shop"])):
        with pytest.raises(sj.DataError, match="item '.*' has the title '.*', and '"):
            read_titles(source)


def test_prepared_rows_are_those_of_the_library(written, tmp_path):
    pytest.importorskip("duckdb")
    folder, rows = written
    for name, source in (("found", folder), ("right", rows)):
        sj.prepare(source, tmp_path / name, split_time="2024-01-02", time="ts")
    for part in ("train", "test"):
        found, right = (sj.read(tmp_path / n / part) for n in ("found", "right"))
        assert entries(found) == entries(right)
        assert found.num_rows


@pytest.mark.parametrize("format", WRITERS)
def test_lists_are_scanned_and_content_is_read(format, tmp_path):
    lists = pa.table({"user": [1, 2, 3], "items": [["tea", "rye"], ["tea"], ["oat"]]})
    content = pa.table({"item": ["tea", "rye"], "price": [2.0, 3.0]})
    fresh = pa.table({"item": ["oat"], "price": [4.0], "tags": ["a"]})
    for name, first in (("lists", lists), ("content", content)):
        path = f"{tmp_path}/{name}"
        if format == "delta":
            deltalake = pytest.importorskip("deltalake")
            deltalake.write_deltalake(path, first)
            deltalake.DeltaTable(path).delete(
                "user = 2" if name == "lists" else "price = 2"
            )
            if name == "content":
                deltalake.write_deltalake(
                    path, fresh, mode="append", schema_mode="merge"
                )
        else:
            with catalog_at(str(tmp_path)) as catalog:
                table = catalog.create_table(f"shop.{name}", first.schema, path)
                table.append(first)
                table.delete("user = 2" if name == "lists" else "price = 2")
                if name == "content":
                    with table.update_schema() as schema:
                        schema.union_by_name(fresh.schema)
                    table.append(fresh)
    for scan in (sj.data.scan_parquet, sj.data.scan_sequences):
        scanned = scan(tmp_path / "lists")
        assert (scanned.num_rows, scanned.num_entries) == (2, 3)
        assert sorted(scanned.feature_names) == ["oat", "rye", "tea"]
        names = scanned.feature_names[scanned.read(0, 2).indices].tolist()
        assert sorted(names) == ["oat", "rye", "tea"]
    found = sj.read_item_features(tmp_path / "content")
    right = sj.read_item_features(
        pa.concat_tables([content.slice(1), fresh], promote_options="default")
    )
    assert sorted(found.item_names) == sorted(right.item_names) == ["oat", "rye"]
    assert found.tag_names.tolist() == right.tag_names.tolist()
    at = [right.item_names.tolist().index(name) for name in found.item_names]
    np.testing.assert_array_equal(found.tags.toarray(), right.tags.toarray()[at])


def test_a_table_is_a_folder_that_a_store_has(bucket, tmp_path, monkeypatch):
    address, query = bucket
    _, host = query.split("endpoint_override=")
    options = {"s3.endpoint": f"http://{host}", "s3.region": "us-east-1"}
    rows = write_iceberg(f"{address}/lake", **options)
    found = sj.read_sequences(f"{address}/lake/events{query}", time="ts")
    assert entries(found) == entries(sj.read_sequences(rows, time="ts"))
    rows = write_delta(str(tmp_path / "delta"))
    store, _ = pa.fs.FileSystem.from_uri(address + query)
    pa.fs.copy_files(str(tmp_path), "shop", destination_filesystem=store)
    found = sj.read_sequences(f"{address}/delta{query}", time="ts")
    assert entries(found) == entries(sj.read_sequences(rows, time="ts"))


@pytest.mark.parametrize(
    ("mark", "kind", "package"),
    [
        ("_delta_log/00000000000000000000.json", "Delta", "deltalake"),
        ("metadata/v2.metadata.json", "Iceberg", "pyiceberg.table"),
        (".hoodie/hoodie.properties", "Hudi", None),
        ("2024/01/.hoodie_partition_metadata", "Hudi", None),
        ("snapshot/snapshot-1", "Paimon", None),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(
    mark, kind, package, tmp_path, monkeypatch
):
    """By all that read folders, also below and above it."""
    if package is not None:
        monkeypatch.setitem(sys.modules, package, None)
    folder = tmp_path / "table"
    (folder / mark).parent.mkdir(parents=True)
    (folder / mark).write_text("{}")
    part = folder / "data" / "dt=1"
    part.mkdir(parents=True)
    pq.write_table(FIRST, part / "1.parquet")
    is_nested = mark.startswith("2024")
    message = (
        f"table of {kind}" if package is None else r"pip install 'sparsejax\[lake\]'"
    )
    ways = [
        sj.read,
        sj.read_sequences,
        sj.data.scan_parquet,
        sj.data.scan_sequences,
        lambda path: sj.read_clicks(path, clicks(FIRST)[1]),
        lambda path: sj.data.scan_clicks(path, clicks(FIRST)[1]).num_rows,
        lambda path: sj.prepare(path, tmp_path / "out"),
        sj.read_item_features,
        read_titles,
    ]
    for read in ways:
        with pytest.raises((sj.DataError, ImportError), match=message):
            read(folder)
    for path in [tmp_path, *([] if is_nested else [part, folder / "data"])]:
        with pytest.raises(
            sj.DataError, match=rf"(has .*|a part of .*table), a table of {kind}"
        ):
            sj.read(path)
    with pytest.raises(
        sj.DataError, match="follow a folder of plain files|has .* in it"
    ):
        sj.Run.train(
            folder, tmp_path / "run", schema=clicks(FIRST)[1], dynamic=512, follow=True
        )
    assert not (tmp_path / "run").exists()


def commit(folder, *actions):
    """Writes a version of a Delta table by hand."""
    log = folder / "_delta_log"
    number = len(list(log.glob("*.json")))
    (log / f"{number:020}.json").write_text("\n".join(map(json.dumps, actions)))


def upgraded(*features):
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    return {
        "protocol": versions
        | dict.fromkeys(["readerFeatures", "writerFeatures"], features)
    }


def test_rows_that_a_vector_deletes_are_refused(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    pyroaring = pytest.importorskip("pyroaring")
    deltalake.write_deltalake(tmp_path, FIRST)
    commit(tmp_path, upgraded("deletionVectors"))
    right = entries(sj.read(FIRST))
    # The table version allows such files, but has none.
    assert entries(sj.read(tmp_path)) == right
    [line] = (tmp_path / "_delta_log" / f"{0:020}.json").read_text().splitlines()[-1:]
    bits = np.array([1681511377], "<u4").tobytes() + np.array([1], "<u8").tobytes()
    bits += np.array([0], "<u4").tobytes() + pyroaring.BitMap([0]).serialize()
    bits += b"\0" * (-len(bits) % 4)
    b85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    text = base64.b85encode(bits).translate(bytes.maketrans(b85, z85)).decode()
    vector = {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": len(bits),
        "cardinality": 1,
    }
    add = json.loads(line)["add"]
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    commit(tmp_path, {"remove": remove}, {"add": add | {"deletionVector": vector}})
    assert len(pa.table(deltalake.DeltaTable(tmp_path).deletion_vectors())) == 1
    with pytest.raises(
        sj.DataError, match="deletion vectors, which is not read; rewrite"
    ):
        sj.read(tmp_path)


def test_other_tables_of_delta_are_refused(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(tmp_path / "mapped", FIRST)
    commit(tmp_path / "mapped", upgraded("columnMapping"))
    with pytest.raises(
        sj.DataError, match="Delta with columns that were renamed, which"
    ):
        sj.read(tmp_path / "mapped")
    deltalake.write_deltalake(tmp_path / "empty", FIRST.slice(0, 0))
    with pytest.raises(sj.DataError, match="a table of Delta without rows"):
        sj.read(tmp_path / "empty")
    deltalake.write_deltalake(tmp_path / "torn", FIRST)
    [file] = (tmp_path / "torn").glob("*.parquet")
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(
        sj.DataError, match="is missing, though the log of the table nam"
    ):
        sj.read(tmp_path / "torn")


def test_other_tables_of_iceberg_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("pyiceberg")
    from pyiceberg.table import DataScan, FileScanTask

    write_iceberg(str(tmp_path))
    folder = tmp_path / "events"
    tasks = DataScan.plan_files

    # Replaces a scan: pyiceberg reads files of deletions, but cannot write them.
    def with_deletes(scan):
        return [FileScanTask(t.file, {t.file}, t.residual) for t in tasks(scan)]

    with monkeypatch.context() as patch:
        patch.setattr(DataScan, "plan_files", with_deletes)
        with pytest.raises(
            sj.DataError, match="files of deleted rows, which is not rea"
        ):
            sj.read(folder)
    newest = max((folder / "metadata").glob("*.metadata.json"))
    shutil.copy(newest, newest.with_name(newest.name[:6] + "other.metadata.json"))
    with pytest.raises(sj.DataError, match="2 metadata files of the last version"):
        sj.read(folder)
