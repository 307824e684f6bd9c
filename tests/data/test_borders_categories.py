"""Categories of clicks have one spelling, in whatever form they are read."""

import itertools

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data.sets.click_records import examples_of

MEMBER = [True, False, True, False, None, True]
CITY = [2.0, 1.0, None, -3.0, 0.0, 2.0]
FRAME = pd.DataFrame({"click": [1, 0] * 3, "member": MEMBER, "city": CITY})
COLUMNS = {"member": MEMBER, "city": CITY}
NULL, NAN = None, float("nan")


def table(**types) -> pa.Table:
    columns = {n: pa.array(c, types.get(n)) for n, c in COLUMNS.items()}
    return pa.table({"click": [1, 0] * 3} | columns)


def with_nan() -> pa.Table:
    city = pa.array(np.array([NAN if c is None else c for c in CITY]))
    return table().set_column(2, "city", city)


def csv(path, **options):
    FRAME.to_csv(path, index=False, **options)


def parquet(found):
    return lambda path: pq.write_table(found, path)


# Functions that write these columns to files.
FILES = {
    "pandas.csv": csv,
    "pandas.tsv": lambda path: csv(path, sep="\t"),
    "pandas with NaN.csv": lambda path: csv(path, na_rep="nan"),
    "polars.csv": lambda path: pl.from_arrow(table()).write_csv(path),  # pyrefly: ignore
    "polars with NaN.csv": lambda path: pl.from_arrow(with_nan()).write_csv(path),  # pyrefly: ignore
    "R.csv": lambda path: path.write_text(
        "click,member,city\n1,TRUE,2\n0,FALSE,1\n1,TRUE,\n0,FALSE,-3\n1,,0\n0,TRUE,2\n"
    ),
    "floats.parquet": parquet(table()),
    "float32.parquet": parquet(table(city=pa.float32())),
    "integers.parquet": parquet(table(city=pa.int16())),
    "decimals.parquet": parquet(
        table(city=pa.int16()).cast(
            pa.schema(
                [
                    ("click", pa.int64()),
                    ("member", pa.bool_()),
                    ("city", pa.decimal128(9, 2)),
                ]
            )
        )
    ),
    "NaN.parquet": parquet(with_nan()),
    "dictionaries.parquet": parquet(
        pa.table(
            {
                n: c.combine_chunks().dictionary_encode() if n == "city" else c
                for n, c in zip(
                    with_nan().column_names, with_nan().columns, strict=True
                )
            }
        )
    ),
    "text.parquet": parquet(
        pa.table(
            {
                "click": [1, 0] * 3,
                "member": [None if m is None else str(m) for m in MEMBER],
                "city": [None if c is None else str(c) for c in CITY],
            }
        )
    ),
    "lists.parquet": parquet(
        pa.table(
            {
                "click": [1, 0] * 3,
                "member": [[m] for m in MEMBER],
                "city": [[NAN if c is None else c] for c in CITY],
            }
        )
    ),
}
KINDS = [sj.data.VocabularyColumn(), sj.data.HashedColumn(50_000)]


def schema_of(kind) -> sj.ClickSchema:
    return sj.ClickSchema("click", ids={"member": kind, "city": kind})


def flat(ids):
    return getattr(ids, "indices", ids).tolist()


def ids_of(data) -> dict[str, list[int]]:
    return {name: flat(ids) for name, ids in data.ids.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, write in FILES.items():
        write(folder / name)
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=["vocabulary", "hashed"])
@pytest.mark.parametrize("name", FILES)
def test_files(kind, name, files):
    """Alone, and against the vocabulary of another file."""
    schema = schema_of(kind)
    expected = sj.read_clicks(files / "integers.parquet", schema)
    city = [expected.ids["city"][at] for at in (0, 1, 2, 3, 4)]  # pyrefly: ignore
    assert len(set(city)) == 5 and city[2] == 0 and expected.ids["member"][4] == 0  # pyrefly: ignore
    assert sorted(expected.vocabularies.get("member", [])) in ([], ["false", "true"])
    for train, known in itertools.product([name, "integers.parquet"], [False, True]):
        vocabulary = sj.read_clicks(files / train, schema) if known else None
        data = sj.read_clicks(files / name, schema, features=vocabulary)
        assert ids_of(data) == ids_of(expected)
        scanned = sj.data.scan_clicks(files / name, schema, features=vocabulary)
        assert ids_of(next(scanned.chunks())) == ids_of(expected)
        if known:
            again = files / "integers.parquet"
            data = sj.read_clicks(again, schema, features=vocabulary)
            assert ids_of(data) == ids_of(expected)


RECORDS = {
    "lists": COLUMNS,
    "arrays": {
        "member": MEMBER,
        "city": np.array([NAN if c is None else c for c in CITY]),
    },
    "text": {
        "member": [None if m is None else str(m) for m in MEMBER],
        "city": ["2.0", "1.0", "nan", "-3.0", "0.0", "2"],
    },
    "objects": {"member": [True, False, True, False, NAN, True], "city": CITY},
    "table": with_nan().select(["member", "city"]),
    "frame": {name: FRAME[name] for name in COLUMNS},
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", KINDS, ids=["vocabulary", "hashed"])
def test_records(kind, name, files):
    """As `predict_records` takes them."""
    for file in ("pandas.csv", "floats.parquet"):
        train = sj.read_clicks(files / file, schema_of(kind))
        _, found = examples_of(RECORDS[name], train.schema, train.vocabularies)
        assert {n: flat(ids) for n, ids in found.items()} == ids_of(train)


def test_integers_beyond_int64_and_minus_zero(tmp_path):
    """As uint64 has them; Arrow writes a zero with a sign as `-0`."""
    path, large = tmp_path / "clicks.csv", [2**64 - 1, 2**63]
    path.write_text(f"click,member,city\n1,0,{large[0]}\n0,-0,{large[1]}\n")
    schema = schema_of(sj.data.HashedColumn(50_000))
    member, city = ids_of(sj.read_clicks(path, schema)).values()
    assert member[0] == member[1] and city[0] != city[1]
    typed = pa.table({"click": [1, 0], "member": [-0.0, 0.0]})
    typed = typed.append_column("city", pa.array(large, pa.uint64()))
    pq.write_table(typed, tmp_path / "clicks.parquet")
    found = ids_of(sj.read_clicks(tmp_path / "clicks.parquet", schema))
    assert list(found.values()) == [member, city]
    _, ids = examples_of({"member": [0, 0], "city": large}, schema, {})
    assert flat(ids["city"]) == city
    with pytest.raises(sj.DataError, match="records: column 'city': .*too large"):
        examples_of({"member": [0], "city": [2**64]}, schema, {})


@pytest.mark.parametrize(
    "type_",
    [
        pa.string_view(),
        pa.binary_view(),
        pa.large_binary(),
        pa.dictionary(pa.uint32(), pa.string_view()),
    ],
    ids=str,
)
def test_text_of_any_type_with_nulls(type_, files):
    """As polars gives it."""
    train = sj.read_clicks(files / "pandas.csv", schema_of(KINDS[0]))
    texts = [[None if x is None else str(x) for x in c] for c in COLUMNS.values()]
    if pa.types.is_dictionary(type_):
        codes = [pa.array(c).dictionary_encode() for c in texts]
        arrays = [
            pa.DictionaryArray.from_arrays(
                c.indices.cast(pa.uint32()), c.dictionary.cast(pa.string_view())
            )
            for c in codes
        ]
    else:
        arrays = [pa.array(c).cast(pa.binary()).cast(type_) for c in texts]
    given = pa.table(dict(zip(COLUMNS, arrays, strict=True)))
    _, found = examples_of(given, train.schema, train.vocabularies)
    assert {n: flat(ids) for n, ids in found.items()} == ids_of(train)
    schema = sj.ClickSchema("click", dense={"city": sj.data.DenseColumn(missing=9.0)})
    numbers, _ = examples_of(given, schema, {})
    assert numbers[:, 0].tolist() == [9 if c is None else c for c in CITY]


def test_other_text_stays(tmp_path):
    path = tmp_path / "clicks.csv"
    cells = ["007", "007.0", "1e3", "2.5", "Nan", "truE", "+1", "v1.0", "1.0.0"]
    path.write_text("click,c\n" + "".join(f"1,{cell}\n" for cell in cells))
    schema = sj.ClickSchema("click", ids={"c": sj.data.VocabularyColumn()})
    assert set(sj.read_clicks(path, schema).vocabularies["c"].tolist()) == set(cells)
