"""Names of users and items: all readers spell a name equally, or all refuse it."""

import decimal
import itertools
import pathlib
import re
import uuid

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse

import sparsejax as sj
from sparsejax.cli.main import main


def stored(table: pa.Table, folder: pathlib.Path) -> str:
    path = folder / "table.parquet"
    pq.write_table(table, path)
    return str(path)


def converted(table: pa.Table, folder: pathlib.Path, **given) -> sj.SparseDataset:
    """The data that the command `convert` writes."""
    out = folder / "converted.parquet"
    flags = [f"--{name}={value}" for name, value in given.items()]
    if main(["convert", stored(table, folder), str(out), *flags]):
        raise ValueError("the command says why")
    return sj.SparseDataset.load(out)


def prepared(events, folder: pathlib.Path, **given) -> sj.SparseDataset:
    sj.prepare(events, folder / "prepared", **given)
    return sj.read(folder / "prepared")


def from_scipy(table: pa.Table, folder: pathlib.Path) -> sj.SparseDataset:
    """The data read from a SciPy matrix, with names of users, of items, or of both."""
    given = {}
    for role, column in (("row", "user"), ("feature", "item")):
        names = table[column].combine_chunks()
        if pa.types.is_floating(names.type):
            given[f"{role}_names"] = names.to_numpy(zero_copy_only=False)
        else:
            given[f"{role}_names"] = names
    return sj.SparseDataset.from_scipy(scipy.sparse.eye_array(len(table)), **given)


# Each takes a table whose users and items are distinct.
IN = {
    "from_arrow": lambda table, folder: sj.data.from_arrow(table),
    "read_sequences of a frame": lambda table, folder: sj.read_sequences(table),
    "read": lambda table, folder: sj.read(stored(table, folder)),
    "read_sequences": lambda table, folder: sj.read_sequences(stored(table, folder)),
    "prepare of a frame": prepared,
    "prepare": lambda table, folder: prepared(stored(table, folder), folder),
    "from_scipy": from_scipy,
    "convert": converted,
}
SCANS = {
    "scan_parquet": lambda table, folder: sj.data.scan_parquet(stored(table, folder)),
    "scan_sequences": lambda table, folder: sj.data.scan_sequences(
        stored(table, folder)
    ),
}


def whole_floats(dtype):
    limit = 2 ** (np.finfo(dtype).nmant + 1)
    return np.array([0, -3, limit - 1, 1 - limit], dtype), limit


FOR_SLOW = ("versions", "float32", "decimals", "decimals with digits", "hugeint")


def names_of(data) -> set[str]:
    return set(data.feature_names.tolist())


D = decimal.Decimal
IDS = [uuid.UUID(int=n) for n in (1, 2**127)]
# Arrow's arrays, and their names.
RIGHT = {
    "versions": (["1.0", "2.0", "10.0"], ["1.0", "2.0", "10.0"]),
    "arXiv": (["0704.0001", "1706.03762"], ["0704.0001", "1706.03762"]),
    "text of all kinds": (["007", "7", "NaN", "None", "+1", " 1", "1e3", "-0"], None),
    "views": (pa.array(["1.0", "x"], pa.string_view()), ["1.0", "x"]),
    "bytes": (pa.array([b"1.0", b"2.0"]), ["1.0", "2.0"]),
    "dictionaries": (pa.array(["1.0", "2.0"]).dictionary_encode(), ["1.0", "2.0"]),
    "integers": (pa.array([1, -2, 2**63 - 1]), ["1", "-2", str(2**63 - 1)]),
    "uint64": (pa.array([1, 2**64 - 1], pa.uint64()), ["1", str(2**64 - 1)]),
    "floats in dictionaries": (pa.array([1.0, 3.0]).dictionary_encode(), ["1", "3"]),
    "decimals": (
        pa.array([D(12345678901234567890), D(12345678901234567891)], pa.decimal128(38)),
        ["12345678901234567890", "12345678901234567891"],
    ),
    "decimals of 256 bits": (
        pa.array([D(10**60), D(10**60 + 1)], pa.decimal256(70)),
        [str(10**60), str(10**60 + 1)],
    ),
    "decimals of hundreds": (pa.array([D(12300)], pa.decimal128(5, -2)), ["12300"]),
    "decimals with zeros": (
        pa.array([D("7.00"), D("-8.00"), D("100.00")], pa.decimal128(9, 2)),
        ["7", "-8", "100"],
    ),
    "decimals with digits": (
        pa.array([D("4503599627370497.5"), D("2.0")], pa.decimal128(20, 1)),
        ["4503599627370497.5", "2"],
    ),
    "small decimals": (
        pa.array([D("1E-10"), D(0)], pa.decimal128(38, 12)),
        ["0.0000000001", "0"],
    ),
    "UUIDs": (pa.array(IDS, pa.uuid()), list(map(str, IDS))),
    "16 bytes": (pa.array([i.bytes for i in IDS], pa.binary(16)), list(map(str, IDS))),
}
for dtype in (np.float16, np.float32, np.float64):
    found = whole_floats(dtype)[0]
    RIGHT[np.dtype(dtype).name] = pa.array(found), [str(int(x)) for x in found]
for name, signed in (("hugeint", True), ("uhugeint", False)):
    of_duckdb = pa.opaque(pa.binary(16), name, "DuckDB")
    numbers = [-(2**100) if signed else 2**127, 12345678901234567890]
    storage = [n.to_bytes(16, "little", signed=signed) for n in numbers]
    storage = pa.array(storage, pa.binary(16))
    array = pa.ExtensionArray.from_storage(of_duckdb, storage)
    RIGHT[name] = array, list(map(str, numbers))


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (way, kind)
        for way, kind in itertools.product([*IN, *SCANS], RIGHT)
        # Parquet has no such decimals.
        if kind != "decimals of hundreds" or way in ("from_arrow", "from_scipy")
        # These take longer.
        if not way.startswith(("convert", "prepare")) or kind in FOR_SLOW
    ],
)
def test_names(way, kind, tmp_path):
    column, expected = RIGHT[kind]
    column = pa.array(column) if isinstance(column, list) else column
    expected = column.to_pylist() if expected is None else expected
    number = pa.array(range(len(column)))
    items = (IN | SCANS)[way](pa.table({"user": number, "item": column}), tmp_path)
    assert sorted(items.feature_names.tolist()) == sorted(expected)
    if way in IN and "prepare" not in way and "convert" not in way:
        users = IN[way](pa.table({"user": column, "item": number}), tmp_path)
        assert sorted(users.row_names.tolist()) == sorted(expected)


def wrong_floats(dtype):
    return pa.array(np.array([whole_floats(dtype)[1]], dtype))


FOR_SLOW += ("fractions", "null")
FLOATS = "holds .* floats of this type must be integers below 2\\^"
WRONG = {
    "fractions": (pa.array([1.0, 4.5]), "holds 4.5, which cannot be a name"),
    "infinite": (pa.array([float("inf")]), "holds inf, which cannot be a name"),
    "float16": (wrong_floats(np.float16), f"{FLOATS}11"),
    "float32": (wrong_floats(np.float32), f"{FLOATS}24"),
    "float64": (wrong_floats(np.float64), f"{FLOATS}53"),
    "booleans": (pa.array([True, False]), "text or integers,? .* bool"),
    "dates": (pa.array([1, 2], pa.date32()), "text or integers,? .* date32"),
    "null": (pa.array(["a", None]), "is empty or null|without an item"),
    "empty": (pa.array(["", "b"]), "is empty or null|without an item"),
    "NaN": (pa.array([1.0, float("nan")]), "is empty or null|without an item"),
    "bignum": (
        pa.ExtensionArray.from_storage(
            pa.opaque(pa.binary(), "bignum", "DuckDB"), pa.array([b"\x80\x00\x01\x05"])
        ),
        "text or integers",
    ),
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (way, kind)
        for way, kind in itertools.product([*IN, *SCANS], WRONG)
        if not way.startswith(("convert", "prepare"))
        or (way, kind) in itertools.product(["prepare of a frame"], FOR_SLOW)
    ],
)
def test_what_is_no_name(way, kind, tmp_path):
    column, message = WRONG[kind]
    number = pa.array(range(len(column)))
    with pytest.raises(ValueError, match=message):
        (IN | SCANS)[way](pa.table({"user": number, "item": column}), tmp_path)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (pd.DataFrame({"user": [1.0, 2.0], "item": ["1.0", "2.0"]}), ["1.0", "2.0"]),
        (pl.DataFrame({"user": [1.0, 2.0], "item": ["1.0", "2.0"]}), ["1.0", "2.0"]),
        (pd.DataFrame({"user": ["a", "b"], "item": [1.0, 2.0]}), ["1", "2"]),
        (pl.DataFrame({"user": ["a", "b"], "item": [1.0, 2.0]}), ["1", "2"]),
        (pl.DataFrame({"user": ["a"], "item": [D("2.50")]}), ["2.5"]),
        (
            pl.DataFrame({"user": ["a", "b"], "item": ["1.0", "x"]}).cast(
                pl.Categorical
            ),
            ["1.0", "x"],
        ),
        (
            pl.DataFrame({"user": ["a"], "item": [["x", "y"]]}).cast(
                {"item": pl.List(pl.Enum(["y", "z", "x"]))}
            ),
            ["x", "y"],
        ),
        (pa.table({"user": ["a"], "items": [["1.0", "x"]]}), ["1.0", "x"]),
        (pa.table({"user": ["a"], "items": [[D("1.0"), D("2.5")]]}), ["1", "2.5"]),
    ],
    ids=lambda value: type(value).__module__,
)
def test_names_of_frames(frame, expected, tmp_path):
    for data in (
        sj.data.from_arrow(frame),
        sj.read_sequences(frame),
        prepared(frame, tmp_path),
    ):
        assert sorted(data.feature_names.tolist()) == expected


def test_frames_that_arrow_does_not_hold(tmp_path):
    frame = pd.DataFrame({"user": ["a", "b"], "item": [7, "x"]})
    for way in (sj.data.from_arrow, sj.read_sequences, lambda f: prepared(f, tmp_path)):
        with pytest.raises(sj.DataError, match="the table: cannot be read: .*'x'"):
            way(frame)


# --- names as Python and NumPy objects ---


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([1.0, 2.0], ["1", "2"]),
        ([1, 2.0], ["1", "2"]),
        (["1.0", "x"], ["1.0", "x"]),
        ([1, "x"], ["1", "x"]),
        ([D("2.50"), 10**30], ["2.5", str(10**30)]),
        ([IDS[0], np.float32(7)], [str(IDS[0]), "7"]),
        (np.array([1.0, 2.0], np.float32), ["1", "2"]),
        (np.array([b"a", b"b"]), ["a", "b"]),
        (pd.Series([1.0, 2.0]), ["1", "2"]),
        (pl.Series(["1.0", "2.0"]), ["1.0", "2.0"]),
        (pa.chunked_array([[1.0], [2.0]]), ["1", "2"]),
    ],
    # Without memory addresses, so that the id is equal in each session.
    ids=lambda given: re.sub(" at 0x[0-9a-f]+", "", repr(given)),
)
def test_names_that_are_given(names, expected):
    eye = scipy.sparse.eye_array(2)
    data = sj.SparseDataset.from_scipy(eye, row_names=names, feature_names=names)
    assert data.row_names.tolist() == data.feature_names.tolist() == expected
    assert data.align_features(names).feature_names.tolist() == expected
    dense = sj.data.DenseDataset(np.eye(2), names)
    assert dense.row_names.tolist() == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", None], "name 1 is empty or null"),
        (["a", float("nan")], "name 1 is empty or null"),
        (["", "b"], "name 0 is empty or null"),
        (np.array(["", "b"], np.dtypes.StringDType()), "name 0 is empty or null"),
        (pd.Series(["a", None]), "name 1 is empty or null"),
        (pa.array([1, None]), "name 1 is empty or null"),
        ([True, False], "name 0 holds True, which cannot be a name"),
        (np.array([True, False]), "name 0 holds .*True.*, which cannot be a name"),
        ([1.5, 2.0], "name 0 holds 1.5, which cannot be a name"),
        ([np.float32(2**24), 1.0], "name 0 holds 16777216.0, which .* below 2.24"),
        (np.array([1, 2], "datetime64[D]"), "which cannot be a name"),
    ],
    # Without memory addresses, so that the id is equal in each session.
    ids=lambda given: re.sub(" at 0x[0-9a-f]+", "", repr(given)),
)
def test_names_that_cannot_be_given(names, message):
    eye = scipy.sparse.eye_array(2)
    for given in ({"row_names": names}, {"feature_names": names}):
        with pytest.raises(ValueError, match=message):
            sj.SparseDataset.from_scipy(eye, **given)
    data = sj.SparseDataset.from_scipy(eye)
    for align in (data.align_features, data.align_rows):
        with pytest.raises(ValueError, match=message):
            align(names)


# --- CSV files, in which values have no types ---


FORMS = {
    "csv": "user,item\n{}",
    "tsv": "user\titem\n{}",
    "pairs.txt": "{}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "cells",
    [["1.0", "2.0"], ["4.5", "3.0"], ["0704.0001", "1706.03762"], ["7", "1.0", "007"]],
    ids=" ".join,
)
def test_cells_stay_as_they_are(form, cells, tmp_path):
    path, comma = tmp_path / form, "\t" if form == "tsv" else ","
    body = "".join(f"u{n}{comma}{cell}\n" for n, cell in enumerate(cells))
    path.write_text(FORMS[form].format(body))
    chosen = {"user": 0, "item": 1}
    for read in (sj.read, sj.read_sequences):
        data = read(path, delimiter=comma, **chosen)
        assert sorted(data.feature_names.tolist()) == sorted(cells)
    assert names_of(prepared(path, tmp_path, delimiter=comma, **chosen)) == set(cells)


AGAINST = {
    "from_arrow": lambda table, folder, names: sj.data.from_arrow(
        table, features=names
    ),
    "read": lambda table, folder, names: sj.read(stored(table, folder), features=names),
    "align": lambda table, folder, names: sj.data.from_arrow(table).align_features(
        names
    ),
    "read_sequences": lambda table, folder, names: sj.read_sequences(
        stored(table, folder), features=names
    ).to_sparse(),
    "scan_parquet": lambda table, folder, names: sj.SparseDataset.from_scipy(
        sj.data.scan_parquet(stored(table, folder), features=names)
        .read(0, 3)
        .to_scipy(),
        row_names=["a", "b", "c"],
        feature_names=names,
    ),
    "prepare": lambda table, folder, names: prepared(table, folder, features=names),
}


@pytest.mark.parametrize("way", AGAINST)
@pytest.mark.filterwarnings("ignore::sparsejax.data.UnknownFeaturesWarning")
def test_the_spelling_of_a_vocabulary_counts(way, tmp_path):
    """Where it has integers only, cells like `7.0` are these; otherwise they are text."""
    table = pa.table({"user": list("aabc"), "item": ["1.0", "1", "2.0", "3.5"]})
    data = AGAINST[way](table, tmp_path, ["2", "1"])
    items = dict(
        zip(data.row_names.tolist(), data.matrix.indptr[1:].tolist(), strict=True)
    )
    assert data.feature_names[data.matrix.indices].tolist() in (["1", "2"], ["2", "1"])
    assert data.num_entries == 2 and "a" in items
    for names, expected in ((["1", "x"], ["1"]), (["1.0", "1"], ["1", "1.0"])):
        (tmp_path / str(len(expected))).mkdir()
        data = AGAINST[way](table, tmp_path / str(len(expected)), names)
        assert sorted(data.feature_names[data.matrix.indices].tolist()) == expected


def test_entries_of_two_spellings_are_merged():
    table = {"user": ["a"] * 3, "item": ["1.0", "1", "1.0"], "value": [1.0, 2.0, 4.0]}
    data = sj.data.from_arrow(
        pa.table(table | {"time": [5, 9, 7]}), features=["1", "2"]
    )
    assert data.matrix.data.tolist() == [7.0] and data.times.tolist() == [9]  # pyrefly: ignore
    new = sj.data.from_arrow(pa.table({"user": ["a"] * 3, "item": ["1.0", "new", "1"]}))
    assert new.append_features(["2", "1"]).feature_names.tolist() == ["2", "1", "new"]
    new = sj.read_sequences(pa.table({"user": ["a"] * 3, "item": ["1.0", "new", "1"]}))
    new = new.append_features(["2", "1"])
    assert new.feature_names.tolist() == ["2", "1", "new"]
    assert new.indices.tolist() == [1, 2, 1]


def test_known_names_of_whole_numbers_are_found_in_text_with_a_point(tmp_path):
    path = tmp_path / "floats.csv"
    pairs = [(user, 1 + (user * 3 + n) % 8) for user in range(20) for n in range(3)]
    path.write_text("user,item\n" + "".join(f"{u}.0,{i}.0\n" for u, i in pairs))
    names = np.array([*"31245678"])
    for read in (sj.read, sj.read_sequences):
        data = read(path, features=names)
        assert data.num_entries == 60 and data.left_out is None
        assert data.feature_names.tolist() == names.tolist()
