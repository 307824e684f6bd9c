"""Typed tables: Parquet files, folders and object stores; tables in memory."""

import decimal
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import contents
from hypothesis import given
from hypothesis import strategies as st

import sparsejax as sj
from sparsejax.data import DataError, from_arrow, read, read_pairs, read_parquet

ONES = {"ann": {"milk": 1, "tea": 1}, "bob": {"tea": 1}}
VALUES = {"ann": {"milk": 2.5, "tea": 3}, "bob": {"tea": 0}}
PAIRS = {
    "user": ["ann", "ann", "bob"],
    "item": ["milk", "tea", "tea"],
    "rating": [2.5, 3, 0],
}
LISTS = {
    "user": ["ann", "bob", "eve", "ann"],
    "items": [["milk"], ["tea"], None, ["tea"]],
    "ratings": [[2.5], [0.0], None, [3.0]],
}


def without(table: dict, *names: str) -> pa.Table:
    return pa.table({name: table[name] for name in table if name not in names})


def test_pairs():
    dataset = from_arrow(pa.table(PAIRS))
    assert contents(dataset) == VALUES
    assert contents(from_arrow(pa.table(PAIRS), indicator=True)) == ONES
    dataset = from_arrow(without(PAIRS, "rating"))
    assert contents(dataset) == ONES
    assert dataset.matrix.data is None
    assert dataset.feature_names.tolist() == ["tea", "milk"]  # the most frequent first


def test_lists():
    assert contents(from_arrow(pa.table(LISTS))) == VALUES | {"eve": {}}
    table = without(LISTS, "ratings")
    assert contents(from_arrow(table)) == ONES | {"eve": {}}
    turned = table.select(["items", "user"])
    assert contents(from_arrow(turned)) == ONES | {"eve": {}}


@pytest.mark.parametrize(
    "list_type",
    [
        pa.list_,
        pa.large_list,
        pa.list_view,
        pa.large_list_view,
        lambda t: pa.list_(t, 2),
    ],
)
def test_every_kind_of_list(list_type):
    items = pa.array([["x", "y"], ["y", "z"], None], list_type(pa.string()))
    table = pa.table({"user": ["a", "b", "c"], "seen": items})
    expected = {"a": {"x": 1, "y": 1}, "b": {"y": 1, "z": 1}, "c": {}}
    assert contents(from_arrow(table)) == expected
    assert contents(from_arrow(table.slice(1))) == {k: expected[k] for k in "bc"}


@pytest.mark.parametrize(
    ("type_", "names"),
    [
        (pa.string(), "xyz"),
        (pa.large_string(), "xyz"),
        (pa.string_view(), "xyz"),
        (pa.binary(), "xyz"),
        (pa.int8(), (0, -1, 7)),
        (pa.uint64(), (0, 2**64 - 1, 7)),
        (pa.dictionary(pa.uint32(), pa.string()), "xyz"),
        (pa.dictionary(pa.int8(), pa.string()), "xyz"),
    ],
    ids=str,
)
def test_every_kind_of_name(type_, names):
    a, b, c = names
    column = pa.array([a, b, c, a], type_)
    table = pa.table({"user": column, "item": column})
    expected = {str(name): {str(name): 1} for name in names}
    assert contents(from_arrow(table)) == expected
    # Of a dictionary, only what appears is a name.
    assert contents(from_arrow(table.slice(1))) == expected
    assert contents(from_arrow(table.slice(1, 1))) == {str(b): {str(b): 1}}
    batches = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(1))
    assert contents(from_arrow(batches)) == expected


@pytest.mark.parametrize(
    "type_", [pa.int8(), pa.uint16(), pa.float16(), pa.float64(), pa.decimal128(9, 2)]
)
def test_every_kind_of_value(type_):
    kind = decimal.Decimal if pa.types.is_decimal(type_) else int
    values = pa.array([kind(2), kind(3)], type_)
    table = pa.table({"user": ["a", "b"], "item": ["x", "x"], "score": values})
    assert contents(from_arrow(table)) == {"a": {"x": 2}, "b": {"x": 3}}


def test_columns():
    """By number, by name, and by what they are called."""
    table = pa.table({"a": [1, 1], "b": ["u", "v"], "c": [2.0, 3.0], "d": ["x", "y"]})
    expected = {"u": {"x": 2}, "v": {"y": 3}}
    assert contents(from_arrow(table, user="b", item=3, value="c")) == expected
    assert contents(from_arrow(table, user=1, item="d", value=2)) == expected
    table = table.rename_columns(["price", "userId", "rating", "movie_id"])
    assert contents(from_arrow(table)) == expected
    table = table.rename_columns(["user", "title", "timestamp", "item"])
    assert contents(from_arrow(table)) == {"1": {"x": 1, "y": 1}}
    # Names are known first; if they are not, the only list holds the items.
    table = pa.table({"user": ["a"], "tags": [["x", "y"]], "item": ["z"]})
    assert contents(from_arrow(table)) == {"a": {"z": 1}}
    table = table.rename_columns(["user", "tags", "colour"])
    assert contents(from_arrow(table)) == {"a": {"x": 1, "y": 1}}


def test_values_that_are_all_missing():
    table = pa.table(PAIRS | {"rating": pa.nulls(3, pa.float32())})
    dataset = from_arrow(table)
    assert contents(dataset) == ONES and dataset.matrix.data is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": ["a", None, "b"]}, "row 1: the user .* is empty or null"),
        ({"item": ["a", "b", ""]}, "row 2: an item .* is empty or null"),
        ({"item": pa.array(["a", None, "b"]).dictionary_encode()}, "row 1: an item"),
        ({"rating": [1.0, None, 2.0]}, "row 1: an entry has no value but earlier"),
        ({"rating": [None, 1.0, 2.0]}, "row 1: an entry has a value but earlier"),
        ({"rating": [1.0, 2.0, np.nan]}, "row 2: a value is not finite"),
        ({"rating": [1.0, 1e39, 1.0]}, "row 1: a value is not finite"),
        (
            {"user": [1.0, 2.5, 3.0]},
            "row 1: column 'user' holds 2.5, which cannot be a name",
        ),
        ({"user": [1.0, np.nan, None]}, "row 1: the user .*, 2 times in all"),
        ({"user": [True, True, False]}, "'user' is read as the user, which is text"),
        ({"user": pa.array([b"\xff"] * 3)}, "not valid UTF-8"),
    ],
)
def test_errors_of_pairs(changes, message):
    table = pa.table(PAIRS | changes)
    options = {"user": "user"}
    with pytest.raises(DataError, match=f"^the table: .*{message}"):
        from_arrow(table, **options)
    # The number counts all batches.
    rows = pa.Table.from_batches(table.to_batches(max_chunksize=1))
    with pytest.raises(DataError, match=message):
        from_arrow(rows, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": [["a"], [""], None, ["c"]]}, "row 1: an item .* empty"),
        ({"items": [["a"], ["b"], None, [None]]}, "row 3: an item .* null"),
        # As many entries as rows.
        (
            {"items": [["a"], [], ["b", "c"], [""]], "ratings": [[1], [], [2, 3], [4]]},
            "row 3: an item",
        ),
        (
            {
                "items": [["a"], [], ["b", "c"], ["d"]],
                "ratings": [[1], [], [2, np.inf], [4]],
            },
            "row 2: a value is not finite",
        ),
        (
            {"ratings": [[1], [2], None, [3, 4]]},
            "row 3: the numbers of values and of items differ",
        ),
        ({"ratings": [[1], [None], [], [3]]}, "row 1: an entry has no value"),
        ({"user": [["a"]] * 4}, "'user' is read as the user, which is text"),
        (
            {"items": [[[1]]] * 4},
            "read as the item, which is lists of text",
        ),
    ],
)
def test_errors_of_lists(changes, message):
    with pytest.raises(DataError, match=message):
        from_arrow(pa.table(LISTS | changes))


def test_errors_of_columns():
    table = pa.table(PAIRS)
    with pytest.raises(
        DataError, match="no column 'x'; name another: item=.*0 'user'.*2 'rating'"
    ):
        from_arrow(table, item="x")
    with pytest.raises(DataError, match="no column 3; name another: value=COLUMN"):
        from_arrow(table, value=3)
    with pytest.raises(ValueError, match="user is 1, item is 1"):
        from_arrow(table, user="item", item="item")
    with pytest.raises(DataError, match="'item' is read as the value, which is num"):
        from_arrow(table.append_column("n", [[1, 2, 3]]), item="n", value="item")
    with pytest.raises(
        DataError, match="no column has a name that is known for the item"
    ):
        from_arrow(pa.table({"r": ["x"]}))
    twice = pa.table([["a"], ["x"], ["y"]], names=["user", "item", "item"])
    with pytest.raises(
        DataError, match="the table: which column is the item, 'item' or 'item'"
    ):
        from_arrow(twice)
    with pytest.raises(TypeError, match="PyCapsule.*polars, pandas.*got dict"):
        from_arrow(PAIRS)
    with pytest.raises(DataError, match="the table: holds no data"):
        from_arrow(pa.table(PAIRS).slice(0, 0))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(
    st.lists(
        st.tuples(names, st.lists(st.tuples(names, st.integers(-99, 99)), max_size=5)),
        min_size=1,
        max_size=9,
    ).filter(lambda rows: any(entries for _, entries in rows)),
    st.sampled_from([1, 2, 100]),
)
def test_oracle(rows, batch_rows):
    """Lists, and the same as pairs, mean what plain Python says."""
    expected: dict[str, dict[str, float]] = {}
    for user, entries in rows:
        into = expected.setdefault(user, {})
        for item, value in entries:
            into[item] = into.get(item, 0) + value
    lists = pa.table(
        {
            "user": [user for user, _ in rows],
            "items": pa.array(
                [[item for item, _ in entries] for _, entries in rows],
                pa.list_(pa.string()),
            ),
            "values": pa.array(
                [[value for _, value in entries] for _, entries in rows],
                pa.list_(pa.int64()),
            ),
        }
    )
    flat = [(user, *entry) for user, entries in rows for entry in entries]
    users, items, values = zip(*flat, strict=True)
    pairs = pa.table({"user": users, "item": items, "value": values})
    lists, pairs = (
        pa.Table.from_batches(table.to_batches(max_chunksize=batch_rows), table.schema)
        for table in (lists, pairs)
    )
    found = from_arrow(lists)
    assert contents(found) == expected
    assert found.row_names.tolist() == list(expected)
    some = {user: row for user, row in expected.items() if row}
    assert contents(from_arrow(pairs)) == some
    with_features = from_arrow(pairs, features=found)
    assert with_features.feature_names.tolist() == found.feature_names.tolist()


def test_second_table_gets_the_first_ones_columns():
    train = from_arrow(pa.table(PAIRS))
    table = pa.table({"user": ["zoe", "zoe"], "item": ["tea", "rum"]})
    with pytest.warns(
        sj.data.UnknownFeaturesWarning, match="the table: 1 of 2 entries"
    ):
        test = from_arrow(table, features=train)
    assert contents(test) == {"zoe": {"tea": 1}}
    assert test.feature_names.tolist() == train.feature_names.tolist()


# other libraries


def test_polars():
    polars = pytest.importorskip("polars")
    assert contents(from_arrow(polars.DataFrame(PAIRS))) == VALUES
    assert contents(from_arrow(polars.DataFrame(LISTS))) == VALUES | {"eve": {}}
    frame = polars.DataFrame(PAIRS).with_columns(
        polars.col("user", "item").cast(polars.Categorical)
    )
    assert contents(from_arrow(frame[1:])) == {"ann": {"tea": 3}, "bob": {"tea": 0}}


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(PAIRS)
    assert contents(from_arrow(frame)) == VALUES
    # An index without a name is no value.
    some = frame[["user", "item"]].iloc[[2, 0, 1]]
    assert contents(from_arrow(some)) == ONES
    assert contents(from_arrow(frame.set_index(["user", "item"]))) == VALUES
    assert contents(from_arrow(frame.astype({"item": "category"})[1:])) == {
        "ann": {"tea": 3},
        "bob": {"tea": 0},
    }


# Parquet


def test_parquet_of_pairs_and_of_lists(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(PAIRS), path)
    assert contents(read(path)) == contents(read_parquet(path)) == VALUES
    assert contents(read(path, indicator=True)) == ONES
    pq.write_table(pa.table(LISTS), path, row_group_size=1)
    assert contents(read_parquet(path)) == VALUES | {"eve": {}}
    found = read_parquet(path, user="user", item="items", value="ratings")
    assert contents(found) == VALUES | {"eve": {}}
    with pytest.raises(DataError, match=f"^{path}: there is no column 'x'"):
        read_parquet(path, user="x")
    read_parquet(path).save(path)
    assert contents(read_parquet(path)) == VALUES | {"eve": {}}
    with pytest.raises(ValueError, match="a saved data set, so it has no columns"):
        read_parquet(path, user="user")


def test_folder_of_parquet_files(tmp_path):
    table = pa.table(PAIRS)
    folder = tmp_path / "purchases"
    (folder / "day=2").mkdir(parents=True)
    pq.write_table(table.slice(2), folder / "day=2" / "part-0.parquet")
    pq.write_table(table.slice(0, 1), folder / "a.parquet")
    # Another order of columns, another type of text, a column more.
    other = table.slice(1, 1).select(["rating", "item", "user"])
    other = other.set_column(1, "item", other["item"].cast(pa.large_string()))
    pq.write_table(other.append_column("x", [["y"]]), folder / "b.parquet")
    for name in ("_SUCCESS", "_metadata.parquet", ".part.parquet", "notes.txt"):
        (folder / name).write_text("no Parquet")
    for path in (folder, str(folder) + "/", pathlib.Path(os.path.relpath(folder))):
        dataset = read(path)
        assert contents(dataset) == VALUES
        assert dataset.row_names.tolist() == ["ann", "bob"]

    pq.write_table(without(PAIRS, "rating"), folder / "c.parquet")
    with pytest.raises(DataError, match="c.parquet: has no column of the value"):
        read_parquet(folder)
    (folder / "c.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="c.parquet: is not a Parquet file"):
        read_parquet(folder)
    pq.write_table(pa.table(PAIRS | {"user": ["a", "", "b"]}), folder / "c.parquet")
    with pytest.raises(DataError, match="c.parquet: row 1: the user"):
        read_parquet(folder)
    pq.write_table(without(LISTS), folder / "c.parquet")
    with pytest.raises(DataError, match="c.parquet: there is no column 'item'"):
        read_parquet(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a directory without a .parquet file"):
        read_parquet(tmp_path / "empty")


# object stores


def test_addresses_that_are_none(tmp_path):
    with pytest.raises(DataError, match="^magic://x/y: cannot be read: Unrecognized"):
        read_parquet("magic://x/y")
    with pytest.raises(DataError, match="^magic://x/y: cannot be read"):
        read_parquet("magic://someone:secret@x/y")
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(PAIRS), path)
    with pytest.raises(DataError, match="only Parquet is read from an address"):
        read("s3://bucket/ratings.csv", format="pairs")
    assert contents(read_parquet(f"file://{path}")) == VALUES


def test_object_store(bucket, tmp_path):
    address, query = bucket
    store, _ = pa.fs.FileSystem.from_uri(address + query)
    for name, start in (("a", 0), ("b/c", 2)):
        part = pa.table(PAIRS).slice(start, 2)
        pq.write_table(part, f"shop/pairs/{name}.parquet", filesystem=store)
    assert contents(read_parquet(f"{address}/pairs{query}")) == VALUES
    some = read(f"{address}/pairs/a.parquet{query}")
    assert contents(some) == {"ann": VALUES["ann"]}
    some.save(tmp_path / "saved")
    with store.open_output_stream("shop/saved") as stream:
        stream.write((tmp_path / "saved").read_bytes())
    again = sj.SparseDataset.load(f"{address}/saved{query}")
    assert contents(again) == contents(some)

    with pytest.raises(DataError, match="^s3://shop/none.*: no such file"):
        read_parquet(f"{address}/none{query}")
    with pytest.raises(DataError, match="^s3://other.*: (no such file|cannot be read)"):
        read_parquet(f"s3://other/x{query}")
    with store.open_output_stream("shop/pairs/d.parquet") as stream:
        stream.write(b"nonsense")
    with pytest.raises(DataError, match="^s3://shop/pairs/d.parquet: is not a Parquet"):
        read_parquet(f"{address}/pairs{query}")


@pytest.mark.parametrize(
    "type_", [pa.int8(), pa.float64(), pa.decimal128(5, 2)], ids=str
)
def test_values_in_dictionaries(type_, tmp_path):
    """As pandas' categories of numbers, and as Parquet files have them."""
    plain = pa.table({"user": ["a", "b"], "item": ["x", "x"], "rating": [4, 2]})
    values = pa.array([4, 2], pa.int8()).cast(type_).dictionary_encode()
    table = plain.set_column(2, "rating", values)
    lists = plain.set_column(1, "item", pa.array([["x"], ["x"]]))
    offsets = pa.array([0, 1, 2], pa.int32())
    lists = lists.set_column(2, "rating", pa.ListArray.from_arrays(offsets, values))
    for frame in (table, lists):
        data = sj.data.from_arrow(frame)
        assert data.matrix.data is not None and data.matrix.data.tolist() == [4, 2]
    pytest.importorskip("duckdb")
    sj.prepare(table, tmp_path / "out")
    assert sj.read(tmp_path / "out").to_scipy().sum() == 6


def test_the_first_wrong_row_is_named(tmp_path):
    faults = {"user": ["ann", "bob", "eve", None], "item": ["tea", "", "rye", "rye"]}
    table = pa.table(faults | {"time": [1, 2, None, 4]})
    with pytest.raises(DataError, match="row 1: an item .*, 1 times in all"):
        from_arrow(table)
    named = table.set_column(1, "item", pa.array(["x", "y", "z", "x"]))
    with pytest.raises(DataError, match="row 1: an event has no time"):
        from_arrow(named.slice(1))
    path = tmp_path / "events.csv"
    path.write_text("user,item,time\nann,tea,1\nbob,,2\neve,rye,\n,rye,4\n")
    with pytest.raises(DataError, match=r"csv:3: the item .*, 2 times in all"):
        read_pairs(path)
    path.write_text("user,item,rating\nann,tea,1\nbob,rye,x\neve,tea\n")
    with pytest.raises(DataError, match="csv:3: value 'x' is not a number"):
        read_pairs(path)
    path.write_text("user,item,rating\nann,tea,1\n,\neve,tea,3\n")
    with pytest.raises(DataError, match="csv:3: expected 3 columns .*, got 2"):
        read_pairs(path)
