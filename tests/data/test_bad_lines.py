"""Unreadable lines are skipped on request, are counted, and must be few."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from contents import contents

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.clicks.kind import KIND
from sparsejax.options.reading import Reading

LINES = 1500


def written(path, lines):
    data = b"\n".join(l if isinstance(l, bytes) else l.encode() for l in lines)
    data += b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def forms(i):
    user, item, value = f"u{i % 50}", f"i{i % 37}", i % 5 + 1
    return {
        "csv": f"{user},{item},{value}",
        "tsv": f"{user}\t{item}\t{value}",
        "jsonl": f'{{"user": "{user}", "item": "{item}", "rating": {value}}}',
        "text": f"{user}\t{item},{value}:more,2",
        "adjacency": f"{user} {item} more",
    }


# For each format: bad lines, and the part of the message about each.
BAD = {
    "csv": [
        ("u1,i2,n/a", "value 'n/a' is not a number"),
        ("u1,i2", "expected 3 columns as on the first line, got 2"),
        (b"u1,\xe9t\xe9,3", "byte 0xe9 is not valid UTF-8"),
        (",i3,4", "the user (row) is empty"),
        ('u1,"abc,3', "a quote opens here and closes before 'two'"),
        ("u1,i9,nan", "value 'nan' is not finite"),
        ("u1,i\r9,3", "carriage return inside a line"),
    ],
    "tsv": [("u1\ti2\t3\t4", "expected 3 columns as on the first line, got 4")],
    "jsonl": [
        ('{"user": "u1", "item": ', "is not JSON"),
        ("[1, 2]", "expected a JSON object on each line"),
        ('{"user": null, "item": "i3", "rating": 2}', "the user (row) is empty or null"),
        ('{"user": "u1", "item": "i3", "rating": "x"}', "'rating' is 'x', but it is int64"),
    ],
    "text": [
        ("u1 without a tab", "no TAB"),
        ("u1\ti3,n/a", "value 'n/a' is not a number"),
        ("u1\ti3,1,2", "two commas in one entry"),
    ],
    "adjacency": [(b"u1 i\xff", "byte 0xff is not valid UTF-8")],
}  # fmt: skip


@pytest.mark.parametrize("form", BAD)
def test_bad_lines_are_left_out_and_counted(tmp_path, form):
    good = [forms(i)[form] for i in range(LINES)]
    header = {"csv": ["user,item,rating"], "tsv": ["user\titem\trating"]}.get(form, [])
    if form == "csv":
        good[900] = 'u2,"two\nlines, ""x""",2'
    else:
        good[900] = ""
    lines: list[str | bytes] = [*good]
    places: dict[int, str] = {}
    # Bad lines among the first lines, by which the format is detected, and far after them; two are
    # adjacent.
    for at, (bad, problem) in zip(
        (3, 700, 701, 1400, 20, 899, 5), BAD[form], strict=False
    ):
        lines[at] = bad
        good[at] = ""
        places[at + 1 + len(header)] = problem
    ending = "csv.gz" if form == "csv" else form
    path = written(tmp_path / f"bad.{ending}", header + lines)
    clean = written(tmp_path / f"good.{ending}", header + good)
    options = {"format": "pairs" if form in ("csv", "tsv") else form}
    wanted = sj.read(clean, format=options["format"])
    with pytest.raises(sj.DataError, match="bad.*:[0-9]+: "):
        sj.read(path, format=options["format"])
    with pytest.warns(UserWarning) as told:
        found = sj.read(path, format=options["format"], skip_bad_lines=True)
    assert contents(found) == contents(wanted)
    [line] = [str(w.message) for w in told]
    number = "1 bad line is" if len(places) == 1 else f"{len(places)} bad lines are"
    assert f"bad.{ending}: {number} left out of 1,5" in line
    for at, problem in places.items():
        at += at > 902 and form == "csv"  # an earlier record takes two lines
        assert f"{problem}" in line and f"(line {at})" in line


@pytest.mark.parametrize(
    ("bad", "total", "error"),
    [(1, 3, None), (2, 200, None), (3, 200, "3 of 200 lines are bad, .* than 1%"),
     (1500, 3000, "1,001 of the first 3,000 lines are bad"), (40, 40, "40 of 40 lines")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*left out of")
def test_many_bad_lines_are_an_error(tmp_path, bad, total, error):
    lines = ["user,item", *(f"u{i}" for i in range(bad))]
    lines += [f"u{i % 9},i{i}" for i in range(total - bad)]
    path = written(tmp_path / "x.csv", lines)
    if error is None:
        data = sj.data.read_pairs(path, skip_bad_lines=True)
        assert data.num_entries == total - bad
        return
    with pytest.raises(sj.DataError, match=error):
        sj.read_sequences(path, skip_bad_lines=True)


def test_what_has_no_lines(tmp_path):
    data = sj.datasets.msweb().train
    data.save(tmp_path / "saved.parquet")
    table = pa.table({"user": ["a"], "item": ["b"]})
    for source in (tmp_path / "saved.parquet", table):
        with pytest.raises(ValueError, match="is for files of lines, but"):
            sj.read(source, skip_bad_lines=True)
    clicks = pa.table({"label": [1, 0], "x": [1.0, 2.0]})
    schema = sj.data.ClickSchema("label", dense={"x": sj.data.DenseColumn()})
    with pytest.raises(ValueError, match="is for files of lines, but the source is in"):
        sj.read_clicks(clicks, schema, skip_bad_lines=True)


@pytest.fixture
def events(tmp_path):
    """Events with four bad lines: a bad time, two with a wrong number of columns, and a bad
    user.
    """
    lines = ["user,item,time", *(f"u{i % 60},i{(i * 7) % 37},{i}" for i in range(800))]
    lines[117], lines[130], lines[131], lines[150] = (
        "u1,i2,n/a",
        "u1,i2",
        "u1,i3",
        ",i3,4",
    )
    return str(written(tmp_path / "x.csv", lines))


def test_commands_say_what_they_leave_out(events, tmp_path, capsys):
    split = ["split", events, "--by", "last", "--out", str(tmp_path / "parts")]
    assert main(split) == 1
    assert "x.csv:118: time 'n/a' is" in capsys.readouterr().err
    assert main([*split, "--skip-bad-lines"]) == 0
    assert (
        "warning: "
        + events
        + ": 4 bad lines are left out of 800: time 'n/a' is neither a "
        "finite number nor a date of ISO 8601, like 2024-12-31 or 2024-12-31T23:59:59Z "
        "(line 118); expected 3 columns as on the first line, got 2 (line 131, 132); the "
        "user (row) is empty (line 151)\n"
    ) in capsys.readouterr().err
    assert sj.read(tmp_path / "parts/train.parquet").num_entries == 796 - 60
    prepare = ["prepare", events, str(tmp_path / "folder"), "--skip-bad-lines"]
    assert main(prepare) == 0
    said = capsys.readouterr().err
    # This reader does not read times, so that bad time does not count.
    assert "3 bad lines are left out of 800" in said
    assert (
        "left out: 2 expected 3 columns as on the first line, got 2, 1 the user" in said
    )


def test_clicks(tmp_path):
    lines = ["label,x,c", *(f"{i % 2},{i},k{i % 5}" for i in range(600))]
    lines[50], lines[51], lines[90] = "2,3,k1", "1,abc,k1", "1,3"
    path = written(tmp_path / "c.csv", lines)
    schema = sj.data.ClickSchema(
        "label", {"x": sj.data.DenseColumn()}, {"c": sj.data.HashedColumn(100)}
    )
    with pytest.warns(
        match="3 bad lines are left out of 600: .*line 51.*line 52.*line 91"
    ):
        data = sj.read_clicks(path, schema, skip_bad_lines=True)
    good = [l for i, l in enumerate(lines) if i not in (50, 51, 90)]
    wanted = sj.read_clicks(written(tmp_path / "good.csv", good), schema)
    for found in (data, followed(path, wanted)):
        assert found is not None
        np.testing.assert_array_equal(found.labels, wanted.labels)
        np.testing.assert_array_equal(found.dense, wanted.dense)
        np.testing.assert_array_equal(found.ids["c"], wanted.ids["c"])


def followed(path, known):
    """The examples that a run which follows a folder reads from a file."""
    with pytest.warns(match="3 bad lines are left out of 600"):
        return KIND.read_followed(str(path), known, Reading(skip_bad_lines=True))
