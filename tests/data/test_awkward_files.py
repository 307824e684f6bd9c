"""Files as shops and notebooks write them: how they are read, or which error they raise.

Each case states the columns that are read and the resulting data, or the error message. No case
may train on a column that was misinterpreted.
"""

import dataclasses
import decimal
import pathlib
import uuid
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contents import Contents, contents

import sparsejax as sj
from sparsejax.cli import main as cli
from sparsejax.data import DataError, SparseDataset, from_arrow, read

ONES: Contents = {"1": {"7": 1, "8": 1}, "2": {"7": 1}}
VALUES: Contents = {"1": {"7": 2, "8": 5}, "2": {"7": 1}}
FRAME = pandas.DataFrame(
    {
        "user": [1, 1, 2],
        "item": [7, 8, 7],
        "rating": [2, 5, 1],
        "timestamp": [978300760, 978302109, 978301968],
    }
)
PAIRS = FRAME[["user", "item"]]
IDS = [uuid.UUID(int=7), uuid.UUID(int=7), uuid.UUID(int=2**127)]
BY_UUID: Contents = {
    "00000000-0000-0000-0000-000000000007": ONES["1"],
    "80000000-0000-0000-0000-000000000000": ONES["2"],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A file and what becomes of it.

    Attributes:
      source: content of a CSV file, or a table.
      columns: how the account of the columns begins, or None for an error.
      expected: the contents, or the message.
      times: what `times` are, as text.
      options: of the reader.
    """

    source: str | bytes | Any
    columns: str | None
    expected: Contents | str
    times: list[str] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, folder: pathlib.Path) -> SparseDataset:
        if not isinstance(self.source, str | bytes):
            return from_arrow(self.source, **self.options)
        path = folder / "data.csv"
        content = self.source
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read(path, **self.options)


def csv(**columns: list) -> str:
    """A CSV file, as pandas writes it."""
    return pandas.DataFrame(columns).to_csv(index=False)


def frame(**columns: Any) -> pandas.DataFrame:
    """The base frame, in which some columns are replaced."""
    return FRAME.assign(**columns)


USER, ITEM, TIMES = [1, 1, 2], [7, 8, 7], FRAME["timestamp"].astype(str).tolist()
DAYS = ["2024-01-01", "2024-01-03", "2024-01-02"]
MICROSECONDS = [f"{day}T00:00:00.000000" for day in DAYS]

CASES = {
    "a CSV with the index of its frame": Case(
        PAIRS.to_csv(),
        "user = user (integers), item = item (integers); not read: c",
        ONES,
    ),
    "a frame's index in Parquet": Case(
        pa.Table.from_pandas(PAIRS, preserve_index=True), "user = user (int64)", ONES
    ),
    "created_at is the time": Case(
        csv(user=USER, item=ITEM, created_at=TIMES),
        "user = user (integers), item = item (integers), time = created_at (integers); 2",
        ONES,
        TIMES,
    ),
    "an order's number and its price are no values": Case(
        csv(order_id=[3, 4, 5], date=DAYS, customer=USER, sku=ITEM, price=[9, 8, 7]),
        "user = customer (integers), item = sku (integers), time = date (dates); "
        "not read: order_id, price; 2 rows",
        ONES,
        MICROSECONDS,
    ),
    "the time stands first": Case(
        csv(timestamp=TIMES, account=USER, track=ITEM, rating=[2, 5, 1]),
        "user = account (integers), item = track (integers), value = rating (integers), "
        "time = timestamp (integers); 2 rows",
        VALUES,
        TIMES,
    ),
    "users became floats": Case(
        frame(user=[1.0, 1.0, 2.0]), "user = user (double)", VALUES, TIMES
    ),
    "a user is NaN": Case(
        frame(user=[1.0, None, None]),
        None,
        "row 1: the user .*, 2 times in all: fill in",
    ),
    "floats in CSV are text": Case(
        csv(user=[1.0, 1.0, 2.0], item=[7.0, 8.0, 7.0]),
        "user = user (text), item = item (text)",
        {"1.0": {"7.0": 1, "8.0": 1}, "2.0": {"7.0": 1}},
    ),
    "users are UUIDs": Case(
        frame(user=IDS).drop(columns=["rating", "timestamp"]),
        "user = user (extension<arrow.uuid>), item",
        BY_UUID,
    ),
    "UUIDs in 16 bytes": Case(
        pa.table(
            {"user": pa.array([i.bytes for i in IDS], pa.binary(16)), "item": ITEM}
        ),
        "user = user (fixed_size_binary[16])",
        BY_UUID,
    ),
    "UUIDs as text": Case(csv(user=IDS, item=ITEM), "user = user (text)", BY_UUID),
    "items became floats": Case(
        frame(item=[7.0, 8.0, 7.0]),
        "user = user (int64), item = item (double)",
        VALUES,
        TIMES,
    ),
    "items are fractions": Case(
        frame(item=[7.0, 8.5, 7.0]),
        None,
        "row 1: column 'item' holds 8.5, which cannot be a name",
    ),
    "items have points in CSV": Case(
        csv(user=USER, item=[4.5, 3.0, 4.5]),
        "user = user (integers), item = item (text)",
        {"1": {"4.5": 1, "3.0": 1}, "2": {"4.5": 1}},
    ),
    "floats too large for ids": Case(
        frame(user=[2.0**53, 1, 2]),
        None,
        "row 0: column 'user' holds .* integers below 2",
    ),
    "items are decimals": Case(
        frame(item=[decimal.Decimal(7), decimal.Decimal(8), decimal.Decimal(7)]),
        "user = user (int64), item = item (decimal128",
        VALUES,
        TIMES,
    ),
    "semicolons, and decimals with a comma": Case(
        "user;item;rating\n1;7;2,5\n",
        None,
        "csv:2: value '2,5' .*: a decimal has a point",
    ),
    "semicolons and commas without a header": Case(
        "1;7;4,5\n2;7;3,5\n",
        None,
        "separated by ',' or by ';'; say which: delimiter=','",
    ),
    "MovieLens' ratings.dat": Case(
        "1::7::2::978300760\n1::8::5::978302109\n2::7::1::978301968\n",
        "user = column 0 (integers), item = column 1 (integers), value = column 2 "
        "(integers), time = column 3 (integers); 2",
        VALUES,
        TIMES,
    ),
    "two characters, and a name that has one of them": Case(
        "user||item\n1||a|b\n2||c\n",
        "user",
        {"1": {"a|b": 1}, "2": {"c": 1}},
        options={"delimiter": "||"},
    ),
    "MovieLens' u.data": Case(
        FRAME.to_csv(index=False, header=False, sep="\t"),
        None,
        "without a header .*: user=COLUMN, .*0 .integers, like '1'.*3 .integers, like '978300",
    ),
    "three columns without a header": Case(
        "1,7,2\n1,8,5\n2,7,1\n", None, "without a header it is not clear which column"
    ),
    "columns by their numbers": Case(
        "1,7,2\n1,8,5\n2,7,1\n",
        "user = column 0 (integers), item = column 1 (integers), value = column 2",
        VALUES,
        options={"user": 0, "item": 1, "value": 2},
    ),
    "two columns without a header": Case(
        "1,7\n1,8\n2,7\n",
        "user = column 0 (integers), item = column 1 (integers)",
        ONES,
    ),
    "ratings for items without a header": Case(
        "1,4.5\n1,3.0\n", None, "without a header it is not clear which column"
    ),
    "days for items without a header": Case(
        "1,2024-01-01\n1,2024-01-02\n", None, "without a header it is not clear"
    ),
    "a header in another language": Case(
        "kunde,artikel\n1,7\n1,8\n", None, "known for the user.*0 'kunde' .*1 'artikel'"
    ),
    "a first line that may be a header": Case(
        "ann,book\nbob,tea\n", None, "is the first line a header.*'book', or data"
    ),
    "a byte order mark": Case(
        b"\xef\xbb\xbf" + PAIRS.to_csv(index=False).encode(), "user = user", ONES
    ),
    "UTF-16": Case(PAIRS.to_csv(index=False).encode("utf-16"), None, "in UTF-16"),
    "quotes, with the separator within": Case(
        '"user","item"\n"1","7"\n"2","a, ""b"""\n',
        "user",
        {"1": {"7": 1}, "2": {'a, "b"': 1}},
    ),
    "a quote that is not closed": Case(
        'user,item\n1,"7\n1,"8"\n2,7\n', None, "csv:2: a quote opens here .*'8.* line 3"
    ),
    "cut within quotes": Case(
        'user,item\n1,7\n2,"8', None, "csv:3: a quote opens here and is not closed"
    ),
    "no content": Case("", None, "the file is empty"),
    "only a header": Case("user,item\n", None, "holds no data"),
    "one column": Case("user\n1\n", None, "at least two columns"),
    "the same column twice": Case(
        "user,item,item\n1,7,8\n", None, "which column is the item, 'item' or 'item'"
    ),
    "two columns that may be the user": Case(
        csv(user_id=USER, session_id=USER, item=ITEM),
        None,
        "which column is the user, 'user_id' or 'session_id'; name it: user=COLUMN",
    ),
    "two columns that may be the value": Case(
        csv(user=USER, item=ITEM, rating=USER, count=USER),
        None,
        "'rating' or 'count'; name it: value=COLUMN, or ignore values: indicator=True",
    ),
    "upper case, spaces, plurals": Case(
        "USER ID, Item-IDs , Stars\n1,7,2\n1,8,5\n2,7,1\n",
        "user = USER ID (integers), item = Item-IDs (integers), value = Stars (int",
        VALUES,
    ),
    "values are words": Case(
        csv(user=USER, item=ITEM, rating=["good", "bad", "good"]),
        None,
        "csv:2: value 'good' is not a number .rating .text. is read as the value",
    ),
    "values are booleans": Case(
        frame(rating=[True, False, True]),
        None,
        "'rating' .* is numbers, but it is bool",
    ),
    "values are constant": Case(
        frame(rating=[3, 3, 3]),
        "user = user (int64), item = item (int64), value = rating (int64)",
        {"1": {"7": 3, "8": 3}, "2": {"7": 3}},
        TIMES,
    ),
    "some values are null": Case(
        frame(rating=[1.0, None, 2.0]), None, "row 1: an entry has no value but earlier"
    ),
    "items are days": Case(
        frame(item=pandas.to_datetime(DAYS)), None, "'item' .*, but it is timestamp"
    ),
    "items are booleans": Case(
        frame(item=[True, False, True]), None, "'item' is read as the item.*is bool"
    ),
    "two lists": Case(
        pa.table({"user": [1, 2], "seen": [[7, 8], [7]], "kept": [[8], [7]]}),
        None,
        "which column is the item, 'seen' or 'kept'; name it: item=COLUMN",
    ),
    "a list of items, and one of floats": Case(
        pa.table({"user": [1, 2], "seen": [[7, 8], [7]], "vector": [[0.5], [0.5]]}),
        "user = user (int64), item = seen (list<",
        ONES,
    ),
    "one list": Case(
        pa.table({"user": [1, 2], "seen": [[7, 8], [7]]}),
        "user = user (int64), item",
        ONES,
    ),
    "categories": Case(
        frame(user=pandas.Categorical(USER), item=pandas.Categorical(ITEM)),
        "user = user (dictionary",
        VALUES,
        TIMES,
    ),
    "integers beyond 64 bits": Case(
        csv(user=[2**70, 2**70, 2], item=ITEM),
        "user = user (integers)",
        {str(2**70): ONES["1"], "2": ONES["2"]},
    ),
    "integers beyond 64 bits in a frame": Case(
        frame(user=[2**70, 1, 2]), None, "the table: cannot be read: .*too large"
    ),
    "negative ids": Case(
        csv(user=[-1, -1, 2], item=ITEM), "user", {"-1": ONES["1"], "2": ONES["2"]}
    ),
    "leading zeros": Case(
        "user,item\n007,07\n", "user = user (text)", {"007": {"07": 1}}
    ),
    "names that look like nothing": Case(
        "user,item\nNA,null\nnan,None\n",
        "user",
        {"NA": {"null": 1}, "nan": {"None": 1}},
    ),
    "an item is empty": Case(
        "user,item\n1,7\n1,\n,8\n", None, "csv:3: the item .* is empty, 2 times in all"
    ),
    "the latest of equal events": Case(
        csv(user=[1, 1, 1], item=[7, 8, 7], time=DAYS),
        "user",
        {"1": {"7": 1, "8": 1}},
        [MICROSECONDS[2], MICROSECONDS[1]],
    ),
    "times with a zone are UTC": Case(
        csv(user=[1], item=[7], time=["2024-01-01 01:00:00+01:00"]),
        "user",
        {"1": {"7": 1}},
        [MICROSECONDS[0]],
    ),
    "times of two kinds": Case(
        "user,item,time\n1,7,2024-01-01\n1,8,978300760\n",
        None,
        "csv:3: time '978300760' is a number, but an earlier time is a date",
    ),
    "a time that is missing": Case(
        "user,item,time\n1,7,5\n1,8,\n", None, "csv:3: an event has no time but earlier"
    ),
    "a date of another form is not read": Case(
        csv(user=USER, item=ITEM, date=["12/31/2024"] * 3),
        "user = user (integers), item = item (integers); not read: date (time '12/31/2024'",
        ONES,
    ),
    "the same date, asked for": Case(
        csv(user=USER, item=ITEM, date=["12/31/2024"] * 3),
        None,
        "csv:2: time '12/31/2024' is neither a finite number nor",
        options={"time": "date"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read(name, tmp_path):
    case = CASES[name]
    if case.columns is None:
        with pytest.raises(DataError, match=str(case.expected)):
            case.read(tmp_path)
        return
    dataset = case.read(tmp_path)
    assert str(dataset.columns).startswith(case.columns)
    assert contents(dataset) == case.expected
    found = None
    if dataset.times is not None:
        by_name = {
            (row, dataset.feature_names[i]): str(time)
            for row, low, high in zip(
                dataset.row_names,
                dataset.matrix.indptr[:-1],
                dataset.matrix.indptr[1:],
                strict=True,
            )
            for i, time in zip(
                dataset.matrix.indices[low:high], dataset.times[low:high], strict=True
            )
        }
        found = [by_name[key] for key in sorted(by_name)]
    assert found == case.times


def test_the_command_line_speaks_of_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.csv").write_text("kunde,artikel,rating\n1,7,2\n1,8,5\n")
    convert = ["convert", "a.csv", "b.parquet"]
    assert cli.main(convert) == 1
    assert "name it: --user COLUMN, by its name or" in capsys.readouterr().err
    assert cli.main([*convert, "--user", "kunde", "--item", "1"]) == 0
    assert capsys.readouterr().err == (
        "a.csv: user = kunde (integers), item = artikel (integers), value = rating "
        "(integers); 1 rows, 2 items, 2 entries; values of 2 to 5 are weights, so that "
        "the lowest is a weak like and not a dislike (with --no-value every entry counts 1); no times\n"
    )
    named = ["--user", "0", "--item", "artikel", "--no-value"]
    assert cli.main([*convert, *named]) == 0
    assert (
        "not read: rating; 1 rows, 2 items, 2 entries; every entry counts 1; no times\n"
        in (capsys.readouterr().err)
    )


def _read_clicks(path):
    schema = sj.ClickSchema("click", ids={"user": sj.data.HashedColumn(9)})
    return sj.read_clicks(path, schema)


# First bytes of each compression format, from its specification.
COMPRESSED = {
    "lz4": b"\x04\x22\x4d\x18\x64\x40",
    "7z": b"7z\xbc\xaf\x27\x1c\0\x04",
    "compress": b"\x1f\x9d\x90\x75\xe6",
}


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize(
    "reader",
    [
        sj.read,
        sj.data.read_text,
        sj.data.read_pairs,
        sj.data.read_adjacency,
        sj.read_sequences,
        _read_clicks,
        lambda path: sj.prepare(path, path.parent / "out"),
    ],
    ids=["read", "text", "pairs", "adjacency", "sequences", "clicks", "prepare"],
)
def test_other_compressions_are_named(name, reader, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(COMPRESSED[name])
    wanted = f"t.csv: is compressed by {name.strip()}, .* decompress it"
    with pytest.raises(DataError, match=wanted):
        reader(path)


def test_text_that_begins_like_a_compression_is_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user,item\nann,tea\n".replace("user", "BZh9"))
    data = read(path, user="BZh9", item="item")
    assert contents(data) == {"ann": {"tea": 1}}


LARGE_TIMES = pa.table(
    {
        "user": ["ann", "bob"],
        "item": ["tea", "rye"],
        "time": pa.array([1, 2**63 + 5], pa.uint64()),
    }
)
LISTS = pa.table(
    {
        "user": ["ann"],
        "items": [["tea", "rye"]],
        "times": pa.array([[1, 2**63 + 5]], pa.list_(pa.uint64())),
    }
)


@pytest.mark.parametrize("table", [LARGE_TIMES, LISTS], ids=["pairs", "lists"])
@pytest.mark.parametrize(
    "reader",
    [
        lambda table, path: sj.data.from_arrow(table),
        lambda table, path: sj.read_sequences(table),
        lambda table, path: sj.read(path),
        lambda table, path: sj.read_sequences(path),
        lambda table, path: sj.data.scan_sequences(path).read(
            0, len(set(table["user"].to_pylist()))
        ),
    ],
    ids=["from_arrow", "sequences", "read", "sequences of a file", "scan"],
)
def test_a_time_that_is_too_large_is_named(table, reader, tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    with pytest.raises(DataError, match=r"time 9223372036854775813 is too large"):
        reader(table, path)


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "events.parquet"
    pq.write_table(pa.table({"user": ["a"], "item": ["x"]}), path)

    def batches(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 314572800000 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    for way in (sj.read, sj.read_sequences):
        with pytest.raises(MemoryError, match=r"events.parquet: .*smaller row groups"):
            way(path)
