"""CSV and TSV files of other programs: headers, colons, and the cost of reading."""

import gzip
import itertools
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.cli.main import main


def prepared(path) -> sj.SparseDataset:
    sj.prepare(path, path.parent / "prepared")
    return sj.read(path.parent / "prepared")


def converted(path) -> sj.SparseDataset:
    out = path.parent / "converted.parquet"
    if main(["convert", str(path), str(out)]):
        raise sj.DataError("the command says why")
    return sj.SparseDataset.load(out)


WAYS = {
    "read": sj.read,
    "read_sequences": sj.read_sequences,
    "prepare": prepared,
    "convert": converted,
}
every_way = pytest.mark.parametrize("way", WAYS)


def items_of(data) -> list[str]:
    return sorted(data.feature_names.tolist())


# --- colons ---


@every_way
@pytest.mark.parametrize(
    ("pairs", "items"),
    [
        ("ann\tspotify:track:1\nbob\tspotify:track:2\nann\tspotify:track:2\n", 2),
        ("ann\tspotify:track:1\nbob\tspotify:track:2\n", 2),
        ("ann\thttp://shop/1\nbob\thttps://shop:8080/2\neve\tplain\n", 3),
        ("ann\t12:30\nbob\t12:45\n", 2),
        ("user\titem\nann\ta:b\nbob\tc:d:e\n", 2),
        ("customer_id:token\tsku:token\nann\ta:b\nbob\tc:d:e\n", 2),
    ],
)
def test_pairs_with_colons(way, pairs, items, tmp_path):
    path = tmp_path / "plays.tsv"
    path.write_text(pairs)
    found = WAYS[way](path)
    assert len(items_of(found)) == items and set("".join(items_of(found))) & set(":")


@pytest.mark.parametrize("way", ["read", "read_sequences", "prepare"])
@pytest.mark.parametrize(
    "lines",
    [
        "ann\t12:30\nbob\t13:45\n",  # each line has equally many colons
        "ann\tisbn:1\nbob\turn:isbn:2\nann\tplain\n",  # a row on two lines
        "ann\tStar Wars: Episode IV\nbob\tAlien\n",
        "ann\tmilk:tea\nbob\tmilk:tea\n",
        "ann\tspotify:track:1\nbob\tspotify:user:x:list:2\n",
        "ann\thttp://shop/1:http://shop/2\nbob\tx\n",
    ],
)
def test_what_could_be_rows_or_pairs(way, lines, tmp_path):
    path = tmp_path / "plays.tsv"
    path.write_text(lines)
    with pytest.raises(sj.DataError, match="the format is not clear .* --format"):
        WAYS[way](path)
    assert items_of(sj.read(path, format="text"))
    assert any(
        ":" in item for item in items_of(sj.data.read_pairs(path, user=0, item=1))
    )


@pytest.mark.parametrize(
    ("lines", "items"),
    [
        ("ann\tmilk:tea\nbob\ttea\n", ["milk", "tea"]),
        ("ann\tmilk:tea:\nbob\t\neve\ttea:rye:milk\n", ["milk", "rye", "tea"]),
        ("ann\tmilk,1:tea,2\nbob\tmilk,1:rye,2\nann\tmilk,5\n", ["milk", "rye", "tea"]),
        ("ann\tmilk:tea\n", ["milk", "tea"]),
        ("ann\ta\\:b:tea\nbob\ttea:x:y\n", ["a:b", "tea", "x", "y"]),
    ],
)
def test_rows(lines, items, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text(lines)
    assert items_of(sj.read(path)) == items


# --- headers with types, as in RecBole's files ---


@every_way
@pytest.mark.parametrize("ending", ["inter", "tsv", "csv"])
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_headers_with_types(way, ending, columns, tmp_path):
    rows = [
        ["user_id:token", "item_id:token", "rating:float", "timestamp:float"],
        ["ua", "ia", "4", "20.5"],
        ["ub", "ib", "2.5", "10"],
        ["ua", "ib", "1", "30"],
    ]
    comma = "," if ending == "csv" else "\t"
    path = tmp_path / f"kg.{ending}"
    path.write_text("".join(comma.join(row[:columns]) + "\n" for row in rows))
    found = WAYS[way](path)
    assert sorted(found.row_names.tolist()) == ["ua", "ub"]
    assert items_of(found) == ["ia", "ib"]
    if way == "read":
        assert (found.matrix.data is not None) == (columns > 2)  # pyrefly: ignore
        assert (found.times is not None) == (columns > 3)
        for name in ("item_id", "item_id:token"):
            assert items_of(sj.read(path, item=name)) == ["ia", "ib"]


LISTS = [
    "user_id:token\titem_id_list:token_seq\trating_list:float_seq\ttime_list:float_seq",
    "ua\tib ia ib\t1 2 4\t30 10 20",
    "ub\t\t\t",
    "uc\tic\t.5\t7",
]
CHOSEN = {"value": "rating_list", "time": "time_list"}


def test_lists(tmp_path):
    path = tmp_path / "lists.inter"
    path.write_text("\n".join(LISTS) + "\n")
    data = sj.read(path, **CHOSEN)
    assert data.row_names.tolist() == ["ua", "ub", "uc"]
    dense = data.to_scipy().toarray()[:, np.argsort(data.feature_names)]
    assert dense.tolist() == [[2, 5, 0], [0, 0, 0], [0, 0, 0.5]]
    histories = sj.read_sequences(path, time="time_list:float_seq")
    names = histories.feature_names[histories.indices].tolist()
    assert names == ["ia", "ib", "ib", "ic"] and histories.indptr.tolist() == [
        0,
        3,
        3,
        4,
    ]
    with pytest.warns(UserWarning, match="1 of 1 held-out entries also have earlier"):
        sj.prepare(path, tmp_path / "out", split_last=1, **CHOSEN)
    assert items_of(sj.read(tmp_path / "out" / "test")) == ["ia", "ib", "ic"]
    path.write_text("\n".join(LISTS[:1] + LISTS[2:3]) + "\n")
    with pytest.raises(sj.DataError, match="none of the rows has a feature"):
        sj.read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ud\tia ib\t1\t1 2", ":5: the numbers of values and of items differ"),
        ("ud\tia ib\t1 2\t1", ":5: the numbers of times and of items differ"),
        ("ud\tia ib\t1 x\t1 2", ":5: value 'x' is not a number"),
        ("ud\tia ib\t1 2\t1 y", ":5: time 'y' is neither"),
        ("\tia ib\t1 2\t1 2", ":5: the user .* is empty"),
        ("ud\tia ib\t1 2", ":5: expected 4 columns"),
    ],
)
def test_lists_that_are_wrong(line, message, tmp_path):
    path = tmp_path / "lists.inter"
    path.write_text("\n".join([*LISTS, line]) + "\n")
    with pytest.raises(sj.DataError, match=message):
        sj.read(path, **CHOSEN)


def test_lists_where_there_can_be_none(tmp_path):
    path = tmp_path / "lists.inter"
    path.write_text("user_id:token_seq\titem_id:token\nua\tia\n")
    with pytest.raises(sj.DataError, match="the column of the user has lists"):
        sj.read(path)
    path.write_text("user_id:token\titem_id:token\trating:float_seq\nua\tia\t1\n")
    with pytest.raises(sj.DataError, match="the column of the value has lists"):
        sj.read(path)
    path.write_text("user_id:token\titems:token_seq\ttime:float\nua\tia ib\t3\n")
    assert sj.read(path).times.tolist() == [3, 3]  # pyrefly: ignore


def test_clicks_with_types(tmp_path):
    path = tmp_path / "ctr.inter"
    path.write_text("label:float\tage:float\ttags:token_seq\n1\t3\ta b\n0\t4\t\n")
    columns = {"dense": {"age": sj.data.DenseColumn()}}
    schema = sj.ClickSchema(
        "label", ids={"tags": sj.data.VocabularyColumn()}, **columns
    )
    for data in (sj.read_clicks(path, schema), sj.data.scan_clicks(path, schema)):
        assert data.vocabularies["tags"].tolist() == ["a", "b"]
    tags = sj.read_clicks(path, schema).ids["tags"]
    assert tags.indices.tolist() == [2, 3] and tags.indptr.tolist() == [0, 2, 2]  # pyrefly: ignore
    columns = {"dense": {"age:float": sj.data.DenseColumn()}}
    # The type is text, as in the file.
    named = {"tags:token_seq": sj.data.VocabularyColumn()}
    schema = sj.ClickSchema("label:float", ids=named, **columns)
    names = sj.read_clicks(path, schema).vocabularies["tags:token_seq"]
    assert names.tolist() == ["a b"]


# --- files concatenated by `cat` ---


HEADERS = {
    "plain": ("user,item\n", "{},{}\n"),
    "BOM": ("\ufeffuser,item\n", "{},{}\n"),
    "CR LF": ("user,item\r\n", "{},{}\r\n"),
    "quoted": ('"user","item"\n', '"{}","{}"\n'),
    "two lines": ('user,item,"a\nb"\n', "{},{},x\n"),
    "value and time": ("user,item,rating,date\n", "{},{},3,2024-01-02\n"),
    "unread": ("title,item,user\n", "x,{1},{0}\n"),
    "typed": ("user_id:token,item_id:token\n", "{},{}\n"),
}


@pytest.mark.parametrize(
    ("way", "packed"), [*((way, False) for way in WAYS), ("read", True)]
)
@pytest.mark.parametrize("kind", HEADERS)
def test_a_repeated_header(way, kind, packed, tmp_path, capsys):
    header, row = HEADERS[kind]
    names = itertools.product("ab", "cd")
    parts = [(header + row.format(*pair)).encode() for pair in names]
    path = tmp_path / ("joined.csv.gz" if packed else "joined.csv")
    path.write_bytes(b"".join(map(gzip.compress, parts) if packed else parts))
    line = 1 + parts[0].count(b"\n")
    message = f":{line}: the header stands here again"
    if way == "convert":
        found = WAYS[way](path)
        assert capsys.readouterr().err.count(message) == 1
    else:
        with pytest.warns(UserWarning, match=message) as told:
            found = WAYS[way](path)
        assert len(told) == 1
    assert sorted(found.row_names.tolist()) == ["a", "b"]
    assert items_of(found) == ["c", "d"]


@pytest.mark.parametrize("first", ["user,item", '"user","item"', "\ufeffUser,Item"])
@pytest.mark.parametrize(
    "again", ['"user","item"', '\ufeff"User", "Item"', "user,item", "USER, item "]
)
def test_a_header_that_is_repeated_in_another_form(first, again, tmp_path):
    """As where the files of two programs were joined."""
    path = tmp_path / "joined.csv"
    path.write_text(f"{first}\na,x\n{again}\nb,item\nuser,y\n")
    for way in ("read", "read_sequences", "prepare"):
        with pytest.warns(UserWarning, match=":3: the header stands here again"):
            found = WAYS[way](path)
        assert sorted(found.row_names.tolist()) == ["a", "b", "user"]
        assert sorted(items_of(found)) == ["item", "x", "y"]


def test_a_repeated_header_of_clicks(tmp_path):
    path = tmp_path / "clicks.csv"
    path.write_text("click,city\n1,x\n0,y\nclick,city\n1,x\n")
    schema = sj.ClickSchema("click", ids={"city": sj.data.VocabularyColumn()})
    with pytest.warns(UserWarning, match=":4: the header stands here again"):
        assert sj.read_clicks(path, schema).num_rows == 3
    # The line is a part of a quoted cell.
    path.write_text('click,city\n1,"a\nclick,city\nb"\n')
    assert sj.read_clicks(path, schema).vocabularies["city"].tolist() == [
        "a\nclick,city\nb"
    ]


def test_what_only_looks_like_a_header(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text(
        'user,item\nuser,tea\nann,item\nuser,item2\n"user",item,\n'[:-2] + "s\n"
    )
    data = sj.read(path)
    assert set(data.row_names.tolist()) == {"user", "ann"}


# --- the work of reading ---


def work_of(call) -> int:
    """Counts function calls, and the bytes of texts and arrays whose methods are called."""
    total = 0

    def count(_, event, function):
        nonlocal total
        if event == "call":
            total += 1
        elif event == "c_call":
            owner = getattr(function, "__self__", None)
            total += 1
            if isinstance(owner, bytes | str | bytearray):
                total += len(owner)
            elif isinstance(owner, np.ndarray):
                total += owner.nbytes

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return total


def columns_of(rows: int, kind: str) -> dict[str, list[str]]:
    number = range(rows)
    columns = {
        "user": [f"u{n % 997}" for n in number],
        "item": [f"i{n % 89}" for n in number],
    }
    match kind:
        case "quotes":
            columns["title"] = ['a "title"\nof it'] * rows
        case "stray quotes":
            columns["title"] = ['12" disk'] * rows
        case "long cells":
            columns["item"] = [f"{n % 89}" * 100 for n in number]
        case "many columns":
            columns |= {f"c{at}": ["x"] * rows for at in range(20)}
        case "one user":
            columns["user"] = ["u"] * rows
    return columns


def written(columns: dict[str, list[str]], kind: str, path):
    if path.suffix == ".parquet":
        table = pa.table(columns).sort_by("user")
        pq.write_table(table, path, row_group_size=1000)
        return path

    def quoted(cell):
        if kind in ("quotes", "long cells"):
            return '"' + cell.replace('"', '""') + '"'
        return cell

    rows = [list(columns), *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join(map(quoted, row)) + "\n" for row in rows))
    return path


def read_clicks(path):
    schema = sj.ClickSchema("label", ids={"item": sj.data.VocabularyColumn()})
    return sj.read_clicks(path, schema)


READERS = {
    "read": (sj.read, ".csv"),
    "read_sequences": (sj.read_sequences, ".csv"),
    "read_clicks": (read_clicks, ".csv"),
    "read of Parquet": (sj.read, ".parquet"),
    "scan_parquet": (lambda path: sj.data.scan_parquet(path).read(0, 1), ".parquet"),
    "scan_sequences": (
        lambda path: sj.data.scan_sequences(path).read(0, 1),
        ".parquet",
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", ["quotes", "stray quotes", "long cells", "many columns", "one user"]
)
def test_the_work_grows_as_the_file(reader, kind, tmp_path):
    read, ending = READERS[reader]
    if ending == ".parquet" and "quotes" in kind:
        pytest.skip("nothing is quoted there")
    work = []
    for rows in (3_000, 12_000):
        columns = columns_of(rows, kind)
        if reader == "read_clicks":
            columns = {"label": ["1"] * rows} | columns
        path = written(columns, kind, tmp_path / f"{rows}{ending}")
        work.append(work_of(lambda path=path: read(path)))
    assert work[1] < 6 * work[0]
