"""Times at the limits of their types: all readers find one order, or raise an error."""

import contextlib
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.cli.main import main

# Ways in. Each takes a table with the columns user, item and time, sorted by user, and a
# folder, and gives the last item of each user by time.


def _items(data: sj.SparseDataset | sj.SequenceDataset) -> dict[str, list[str]]:
    """The items of each user, in the order in which they are stored."""
    if isinstance(data, sj.SparseDataset):
        indptr, indices = data.matrix.indptr, data.matrix.indices
    else:
        indptr, indices = data.indptr, data.indices
    names = data.feature_names[indices].tolist()
    return {
        user: names[start:stop]
        for user, start, stop in zip(
            data.row_names.tolist(), indptr[:-1], indptr[1:], strict=True
        )
        if start < stop
    }


def _only(held: sj.SparseDataset | sj.SequenceDataset) -> dict[str, str]:
    return {user: item for user, [item] in _items(held).items()}


def _last(data: sj.SparseDataset | sj.SequenceDataset) -> dict[str, str]:
    return _only(data.split_last(1).heldout)


def _text_file(table: pa.Table, folder, ending: str) -> str:
    comma = "\t" if ending == "tsv" else ","
    columns = {name: table[name].to_pylist() for name in table.column_names}
    time = table.schema.field("time").type
    if pa.types.is_timestamp(time) or pa.types.is_date(time):
        dates = np.asarray(table["time"].cast(pa.timestamp("us")))
        columns["time"] = np.datetime_as_string(dates).tolist()
    lines = zip(*columns.values(), strict=True)
    cells = [["" if cell is None else _text(cell) for cell in line] for line in lines]
    path = folder / f"table.{ending}"
    rows = [comma.join(row) for row in [list(columns), *cells]]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def _text(cell) -> str:
    return cell.decode() if isinstance(cell, bytes) else str(cell)


def _csv(table: pa.Table, folder) -> str:
    return _text_file(table, folder, "csv")


def _tsv(table: pa.Table, folder) -> str:
    return _text_file(table, folder, "tsv")


def _parquet(table: pa.Table, folder) -> str:
    pq.write_table(table, folder / "table.parquet")
    return str(folder / "table.parquet")


def _int96(table: pa.Table, folder) -> str:
    path = folder / "int96.parquet"
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    return str(path)


def _folder_of_parquet(table: pa.Table, folder) -> str:
    for n, part in enumerate((table[:2], table[2:])):
        (folder / "parts").mkdir(exist_ok=True)
        pq.write_table(part, folder / "parts" / f"{n}.parquet")
    return str(folder / "parts")


def _arrow(table: pa.Table, folder) -> pa.Table:
    return table


def _pandas(table: pa.Table, folder) -> pd.DataFrame:
    return table.to_pandas()


def _polars(table: pa.Table, folder) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _lists(table: pa.Table, folder) -> pa.Table:
    return (
        table.group_by("user", use_threads=False)
        .aggregate([("item", "list"), ("time", "list")])
        .rename_columns(["user", "item", "time"])
    )


def _list_file(table: pa.Table, folder) -> str:
    return _parquet(_lists(table, folder), folder)


def _by_read(source, **options):
    read = sj.data.from_arrow if hasattr(source, "__arrow_c_stream__") else sj.read
    return _last(read(source, **options))


def _by_read_sequences(source, **options):
    return _last(sj.read_sequences(source, **options))


def _by_scan(source, **options):
    scanned = sj.data.scan_sequences(source, **options)
    found = scanned.read(0, scanned.num_rows)
    last = scanned.feature_names[found.indices[found.indptr[1:] - 1]].tolist()
    return dict(zip(["a", "b", "c"], last, strict=False))


def _by_prepare(source, folder, **options):
    out = folder / f"prepared{len(list(folder.iterdir()))}"
    sj.prepare(source, out, split_last=1, **options)
    return _only(sj.read(out / "test"))


def _by_command(source, folder, histories=False, more=()):
    out = folder / f"split{len(list(folder.iterdir()))}"
    argv = ["split", source, "--by", "last", "--out", str(out), *more]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main([*argv, "--histories"] if histories else argv)
    if status:
        raise ValueError(stderr.getvalue())
    path = out / "heldout.parquet"
    return _only((sj.SequenceDataset if histories else sj.SparseDataset).load(path))


FILES = [_csv, _tsv, _parquet, _int96, _folder_of_parquet, _list_file]
FRAMES = [_arrow, _pandas, _polars, _lists]


class Way(NamedTuple):
    """A reader with a form of its input: `call(source, folder, **options)`."""

    name: str
    form: Callable[[pa.Table, pathlib.Path], Any]
    call: Callable[..., dict[str, str]]


def _ways() -> Iterator[Way]:
    for form in [*FILES, *FRAMES]:
        yield Way("read", form, lambda s, f, **o: _by_read(s, **o))
        yield Way("read_sequences", form, lambda s, f, **o: _by_read_sequences(s, **o))
    for form in [_parquet, _int96, _folder_of_parquet, _list_file]:
        yield Way("scan_sequences", form, lambda s, f, **o: _by_scan(s, **o))
    for form in [_csv, _parquet, _int96, _list_file, _arrow, _polars]:
        yield Way("prepare", form, lambda s, f, **o: _by_prepare(s, f, **o))
    for form in [_csv, _parquet]:
        yield Way("split", form, lambda s, f, **o: _by_command(s, f, **o))
        yield Way("histories", form, lambda s, f, **o: _by_command(s, f, True, **o))


WAYS = [*_ways()]
HISTORIES = [w for w in WAYS if w.name.endswith("sequences") or w.name == "histories"]
SETS = [way for way in WAYS if way.name == "read"]


def each(ways: list[Way]):
    """Parametrizes a test by the ways to read, as its parameter `way`."""
    names = [f"{way.name}-{way.form.__name__.strip('_')}" for way in ways]
    return pytest.mark.parametrize("way", ways, ids=names)


USERS, ITEMS = ["a", "a", "a", "b", "b"], ["x", "y", "z", "x", "y"]
LAST = {"a": "y", "b": "x"}
DATES = ["2024-02-01", "2024-03-01", "2024-01-01", "2024-03-01", "2024-02-01"]


def table(times) -> pa.Table:
    return pa.table({"user": USERS, "item": ITEMS, "time": times})


# Tables write 9999-12-31 for "no end"; 1600 and 2300 are out of the range of int64 nanoseconds.
FAR = ["2300-01-01", "9999-12-31", "1600-01-01", "2024-03-01", "1600-01-01"]


@each(WAYS)
def test_far_dates(way, tmp_path):
    times = pa.array(FAR).cast(pa.timestamp("us"))
    assert way.call(way.form(table(times), tmp_path), tmp_path) == LAST


TYPES = [
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.string_view()),
    pa.date32(),
    pa.date64(),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("ms", "UTC"),
    pa.dictionary(pa.int32(), pa.timestamp("us")),
]


def of_type(texts: list[str], type_: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(type_):
        whole = pa.array(texts).dictionary_encode()
        codes = whole.indices.cast(type_.index_type)
        names = of_type(whole.dictionary.to_pylist(), type_.value_type)
        return pa.DictionaryArray.from_arrays(codes, names)
    if (
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or (pa.types.is_binary_view(type_))
    ):
        return pa.array([text.encode() for text in texts], type_)
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        plain = pa.timestamp("us", getattr(type_, "tz", None))
        texts = [f"{t}T00:00Z" if plain.tz else t for t in texts]
        return pa.array(texts).cast(plain).cast(type_)
    return pa.array(texts, type_)


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_every_type_of_dates(type_, tmp_path):
    given = table(of_type(DATES, type_))
    assert _by_read(given) == _by_read(given, time="time") == LAST
    assert _by_read_sequences(given) == LAST
    assert _by_prepare(given, tmp_path) == LAST
    if not pa.types.is_dictionary(type_) or type_.value_type == pa.string():
        path = _parquet(given, tmp_path)
        assert _by_read_sequences(path) == _by_scan(path) == LAST


def test_frames_of_polars():
    texts = pl.DataFrame({"user": USERS, "item": ITEMS, "time": DATES})
    column = pl.col("time")
    for frame in (
        texts,
        texts.with_columns(column.cast(pl.Categorical)),
        texts.with_columns(column.cast(pl.Enum(sorted(set(DATES))))),
        texts.with_columns(column.str.to_date()),
        texts.with_columns(column.str.to_datetime(time_unit="ms")),
    ):
        assert _by_read(frame) == _by_read_sequences(frame) == LAST


def test_exact_decimals_are_integers():
    # Nanoseconds as DuckDB's hugeint; converted to float64 they would be equal.
    base = 1_700_000_000_000_000_000
    times = pa.array([base + n for n in (1, 3, 2, 9, 8)], pa.decimal128(38, 0))
    data = sj.read_sequences(table(times))
    assert data.times is not None and data.times.dtype == np.int64
    assert _last(data) == LAST
    fractions = pa.array(["1.5", "3", "2.5", "9", "8"]).cast(pa.decimal128(38, 1))
    data = sj.read_sequences(table(fractions))
    assert data.times is not None and data.times.dtype == np.float64
    assert _last(data) == LAST


OUTSIDE = "does not fit in microseconds"


# INT96 holds nanoseconds, text says what it says, and pandas refuses far times itself.
TYPED = [way for way in WAYS if way.form not in (_int96, _pandas, _csv, _tsv)]


@each(TYPED)
def test_times_that_microseconds_cannot_hold(way, tmp_path):
    # Parquet and polars have no time type in seconds.
    both = [("ms", -(10**17)), ("s", 10**13)]
    for unit, far in both if way.form in (_arrow, _lists) else both[:1]:
        times = pa.array([5, far, 4, 3, 2], pa.timestamp(unit))
        with pytest.raises(
            ValueError, match=rf"time {far} {unit} since 1970 {OUTSIDE}"
        ):
            way.call(way.form(table(times), tmp_path), tmp_path)


def test_every_far_date():
    for type_, far, unit in (
        (pa.date32(), 2**31 - 1, "days"),
        (pa.date64(), 86_400_000 * 10**10, "ms"),
        (pa.timestamp("us"), -(2**63), "us"),
        (pa.timestamp("s", "UTC"), -(10**14), "s"),
    ):
        plain = pa.int32() if type_ == pa.date32() else pa.int64()
        times = pa.array([5, far, 4, 3, 2], plain).cast(type_)
        for read in (sj.data.from_arrow, sj.read_sequences):
            with pytest.raises(ValueError, match=rf"{far} {unit} since 1970 {OUTSIDE}"):
                read(table(times))


def test_wrong_events_of_polars_are_left_out(tmp_path):
    frame = pl.DataFrame(
        {"user": USERS, "item": ITEMS, "time": [*DATES[:4], "yesterday"]}
    )
    with pytest.raises(
        ValueError, match="row 4 of the table, with time 'yesterday' is"
    ):
        sj.prepare(frame, tmp_path / "all", split_last=1)
    manifest = sj.prepare(frame, tmp_path / "good", split_last=1, skip_bad_lines=True)
    assert list(manifest.skipped.values()) == [1]
    lists = frame.group_by("user", maintain_order=True).agg("item", "time")
    manifest = sj.prepare(lists, tmp_path / "lists", split_last=1, skip_bad_lines=True)
    assert list(manifest.skipped.values()) == [1]


def test_events_whose_time_is_empty_text_are_left_out(tmp_path):
    events = table(pa.array([*DATES[:4], ""]))
    with pytest.raises(ValueError, match="row 4 of the table, with time '' is neither"):
        sj.prepare(events, tmp_path / "all", split_last=1)
    manifest = sj.prepare(events, tmp_path / "good", split_last=1, skip_bad_lines=True)
    assert list(manifest.skipped.values()) == [1]


@each([way for way in WAYS if way.form is not _int96])
def test_slashes_behind_the_year(way, tmp_path):
    times = [date.replace("-", "/") + "T19:39:37" for date in DATES]
    assert way.call(way.form(table(pa.array(times)), tmp_path), tmp_path) == LAST


# Times that cannot be parsed. The newest event is first in the file, as logs often are.
SLASHED = ["06/09/2015", "06/08/2015", "06/07/2015", "06/09/2015", "06/08/2015"]
UNREADABLE = {
    "slashes": (SLASHED, "time '06/09/2015' is neither a finite number nor a date"),
    "spaces first": (["", *SLASHED[1:]], "time '06/08/2015' is neither"),
    "empty": ([""] * 5, "none of its cells has a time"),
}
FILE_ORDER = {"a": "z", "b": "y"}
ALL = {"a": ["x", "y", "z"], "b": ["x", "y"]}
NOT_READ = r"the order was not read: 'time' is the column of times, but "
REMEDY = "say that the order of the file is meant: "


@each([way for way in HISTORIES if way.form not in (_int96, _pandas)])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_order_that_is_not_read_is_an_error(way, kind, tmp_path):
    times, problem = UNREADABLE[kind]
    source = way.form(table(pa.array(times)), tmp_path)
    of_command = way.name == "histories"
    flag = "--no-time" if of_command else "time=None"
    with pytest.raises(ValueError, match=f"{NOT_READ}{problem}") as caught:
        way.call(source, tmp_path)
    assert REMEDY + flag in str(caught.value)
    no_time = {"more": ["--no-time"]} if of_command else {"time": None}
    assert way.call(source, tmp_path, **no_time) == FILE_ORDER


@each([way for way in SETS if way.form is not _int96])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_sets_leave_out_what_is_no_time_and_say_so(way, kind, tmp_path):
    times, problem = UNREADABLE[kind]
    source = way.form(table(pa.array(times)), tmp_path)
    read = sj.data.from_arrow if hasattr(source, "__arrow_c_stream__") else sj.read
    data = read(source)
    found = {user: sorted(items) for user, items in _items(data).items()}
    assert data.times is None and found == ALL
    assert data.columns is not None and data.columns.time is None
    assert f"not read: time ({problem}" in str(data.columns)
    plain = read(source, time=None)
    assert plain.columns is not None and "not read: time;" in str(plain.columns)
    if kind == "slashes":  # a column that is named explicitly must be read
        with pytest.raises(ValueError, match=f"{problem}.*leave times out: time=None"):
            read(source, time="time")


@pytest.mark.parametrize("form", [_csv, _parquet, _arrow, _polars, _lists])
def test_where_times_are_needed_the_error_shows_the_cell(form, tmp_path):
    source = form(table(pa.array(SLASHED)), tmp_path)
    message = (
        "has no column of times: 'time' is the column of times, but time '06/09/2015'"
    )
    with pytest.raises(ValueError, match=message):
        sj.prepare(source, tmp_path / "out", split_last=1)
    # This split does not need times.
    sj.prepare(source, tmp_path / "out", split_fraction=0.5)
    if isinstance(source, str):
        with pytest.raises(ValueError, match="has no times: 'time' is .* '06/09/2015'"):
            _by_command(source, tmp_path)


@pytest.mark.parametrize("type_", [pa.bool_(), pa.time64("us"), pa.duration("s")])
def test_types_that_are_no_times(type_, tmp_path):
    times = pa.nulls(5, type_) if type_ == pa.bool_() else pa.array([1] * 5, type_)
    given = table(times)
    for read in (
        sj.read_sequences,
        lambda t, **o: _by_scan(_parquet(t, tmp_path), **o),
    ):
        with pytest.raises(ValueError, match=rf"{NOT_READ}.* is not a time"):
            read(given)
        read(given, time=None)
    assert sj.data.from_arrow(given).times is None


@each([way for way in WAYS if way.name.startswith("read") and way.form is not _int96])
def test_missing_among_times(way, tmp_path):
    source = way.form(table(pa.array([5, None, 4, 3, 2])), tmp_path)
    if way.form is _pandas:
        return  # this reader makes NaN of it, which is not a time
    message = "an event has no time but earlier events have one; .*: time=None"
    with pytest.raises(ValueError, match=message):
        way.call(source, tmp_path)
    if way.name == "read_sequences":
        assert way.call(source, tmp_path, time=None) == FILE_ORDER


def test_two_columns_of_times(tmp_path):
    given = table(pa.array([1, 2, 3, 4, 5])).append_column("date", pa.array(DATES))
    for read in (sj.data.from_arrow, sj.read_sequences):
        with pytest.raises(ValueError, match="which column is the time.*: time=None"):
            read(given)
        assert read(given, time=None).times is None
        assert _last(read(given, time="date")) == LAST


def test_what_a_sequence_dataset_says_it_read(tmp_path, capsys):
    given = table(pa.array(DATES)).append_column("price", pa.array([1.0] * 5))
    data = sj.read_sequences(given)
    text = (
        "user = user (string), item = item (string), time = time (string); not read: price; "
        "2 histories of 3 items, 5 entries in the order of time"
    )
    assert str(data.columns) == text
    for part in (*data.split_last(), data.align_features(["x", "y", "z"])):
        assert part.columns is not None and part.columns.user is not None
    assert "in the order of the file" in str(
        sj.read_sequences(given, time=None).columns
    )
    _by_command(_parquet(given, tmp_path), tmp_path, histories=True)
    some = sj.read_sequences(given, features=["x", "y", "z", "more"])
    assert "2 histories of 4 items, 5 entries" in str(some.columns)


def test_saved_data_and_no_time(tmp_path):
    data = sj.read_sequences(table(pa.array(DATES)))
    data.save(tmp_path / "histories")
    plain = sj.read_sequences(tmp_path / "histories", time=None)
    assert plain.times is None and plain.indices.tolist() == data.indices.tolist()
    data.to_sparse().save(tmp_path / "set")
    assert sj.read(tmp_path / "set", time=None).times is None
    with pytest.raises(ValueError, match="no order but that of its times"):
        sj.read_sequences(tmp_path / "set", time=None)


def test_flags_that_do_not_go_together(tmp_path):
    source = _csv(table(pa.array(DATES)), tmp_path)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        both = ["--time", "time", "--no-time"]
        assert main(["convert", source, str(tmp_path / "out.csv"), *both])
        assert main(["prepare", source, str(tmp_path / "out"), "--no-time"]) == 2
    assert "give --time or --no-time, not both" in stderr.getvalue()


def test_a_column_of_times_that_is_empty(tmp_path):
    """Where the order is needed, the error says why there is none."""
    given = table(pa.nulls(5, pa.int64()))
    for way in HISTORIES:
        with pytest.raises(ValueError, match="none of its cells has a time"):
            way.call(way.form(given, tmp_path), tmp_path)
    path = _csv(given, tmp_path)
    for last in (1, None):
        with pytest.raises(
            sj.DataError, match="no column of times: .*none of its cells"
        ):
            sj.prepare(path, tmp_path / "out", split_last=last, duplicates="last")
