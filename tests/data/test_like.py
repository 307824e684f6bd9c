"""Click columns that share another column's categories and ids."""

import json
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data.sets.click_records import examples_of

Column = sj.data.VocabularyColumn
SCHEMA = sj.ClickSchema(
    "click",
    ids={
        "seen": Column(like="item"),
        "item": Column(min_count=3),
        "user": Column(),
        "last": Column(like="item"),
    },
    time="day",
)


def made(seed=0, rows=60) -> list[dict[str, Any]]:
    """Draws examples whose lists have items that are never shown. Later examples have other
    items.
    """
    rng = np.random.default_rng(seed)

    def item(day: int) -> str:
        return f"i{day + int(rng.zipf(1.5)) % 20}"

    return [
        {
            "click": int(rng.integers(2)),
            "day": day,
            "item": item(day) if rng.random() < 0.9 else None,
            "seen": [item(day + 3) for _ in range(int(rng.integers(4)))],
            "last": item(day + 5),
            "user": f"u{int(rng.integers(5))}",
        }
        for day in rng.permutation(np.arange(rows) % 6).tolist()
    ]


def by_hand(rows, known=()) -> tuple[list[str], list]:
    """The vocabulary of three columns and their ids, computed by the rules in plain Python."""
    shown = [[row["item"]] if row["item"] else [] for row in rows]
    all_ = [
        name
        for row, item in zip(rows, shown, strict=True)
        for name in [*item, *row["seen"], row["last"]]
    ]
    counts = Counter(name for name in all_ if name not in known)
    new = sorted((-count, name) for name, count in counts.items() if count >= 3)
    names = [*known, *(name for _, name in new)]
    place = {name: 2 + i for i, name in enumerate(names)}
    ids = [
        (
            place.get(row["item"], 1) if row["item"] else 0,
            [place.get(name, 1) for name in row["seen"]],
            place.get(row["last"], 1),
        )
        for row in rows
    ]
    return names, ids


def single(data: sj.ClickDataset, name: str) -> list[int]:
    ids = data.ids[name]
    assert isinstance(ids, np.ndarray)
    return ids.tolist()


def check(data: sj.ClickDataset, names, ids) -> None:
    assert data.vocabularies.keys() == {"item", "user"}
    assert data.vocabularies["item"].tolist() == names
    seen = data.ids["seen"]
    assert isinstance(seen, sj.CSR)
    lists = np.split(np.asarray(seen.indices), np.asarray(seen.indptr)[1:-1])
    item, last = (single(data, name) for name in ("item", "last"))
    found = list(zip(item, [x.tolist() for x in lists], last, strict=True))
    assert found == ids
    sizes = data.num_ids
    assert sizes["seen"] == sizes["last"] == sizes["item"] == 2 + len(names)
    assert data.features == sizes | {"seen": "item", "last": "item"}


def same(one: sj.ClickDataset, other: sj.ClickDataset) -> None:
    jax.tree.map(np.testing.assert_array_equal, dict(one.ids), dict(other.ids))
    for name, known in one.vocabularies.items():
        np.testing.assert_array_equal(known, other.vocabularies[name])


def test_columns_share_their_ids(tmp_path):
    rows = made()
    names, ids = by_hand(rows)
    assert any(1 in seen for _, seen, _ in ids) and 0 in {item for item, _, _ in ids}
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (rows, path, lines):
        data = sj.read_clicks(source, SCHEMA)
        check(data, names, ids)
    scanned = sj.data.scan_clicks(path, SCHEMA, chunk_rows=11)
    assert scanned.features == data.features
    for start, chunk in zip(range(0, 60, 11), scanned.chunks(), strict=True):
        check(chunk, names, ids[start : start + 11])
    data.save(tmp_path / "saved.parquet")
    for again in (
        sj.ClickDataset.load(tmp_path / "saved.parquet"),
        next(sj.data.scan_clicks(str(tmp_path / "saved.parquet")).chunks()),
    ):
        check(again, names, ids)


def test_new_ids_and_later_days():
    rows, later = made(), made(1)
    data = sj.read_clicks(rows, SCHEMA)
    names, _ = by_hand(rows)
    longer = sj.read_clicks(later, SCHEMA, features=data, append=True)
    check(longer, *by_hand(later, names))
    known = {name: 2 + i for i, name in enumerate(names)}
    given: Any = {"item": names, "user": ["u0"]}
    read = sj.read_clicks(later, SCHEMA, features=given)
    assert single(read, "last") == [known.get(row["last"], 1) for row in later]

    appended = sj.read_clicks(later, SCHEMA).append_features(data)
    assert (
        appended.vocabularies["item"].tolist() == longer.vocabularies["item"].tolist()
    )
    first, second = data.split_at(3)
    parts = [[row for row in rows if (row["day"] >= 3) == held] for held in (0, 1)]
    train = sj.read_clicks(parts[0], SCHEMA)
    same(first, train)
    same(second, sj.read_clicks(parts[1], SCHEMA, features=train))


def test_the_schema_as_json():
    document = SCHEMA.to_json()
    assert document["ids"]["seen"] == {
        "kind": "vocabulary",
        "min_count": 1,
        "like": "item",
    }
    # The fingerprints of runs and scans contain this document.
    assert document["ids"]["item"] == {"kind": "vocabulary", "min_count": 3}
    assert sj.ClickSchema.from_json(json.loads(json.dumps(document))) == SCHEMA


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            {"a": Column(like="b")},
            r"'a' is like 'b', but ids has no such column; .*\['a'\]",
        ),
        ({"a": Column(like="a")}, "'a' is like itself"),
        (
            {"a": Column(like="b"), "b": Column(like="c"), "c": Column()},
            "is itself like 'c': say like='c' in both",
        ),
        (
            {"a": Column(like="b"), "b": sj.data.HashedColumn(9)},
            "'b', which is a HashedColumn",
        ),
    ],
)
def test_columns_that_cannot_be_alike(ids, message):
    with pytest.raises(ValueError, match=message):
        sj.ClickSchema("click", ids=ids)
    with pytest.raises(ValueError, match="min_count=2 has no effect in a column"):
        Column(min_count=2, like="b")


@pytest.mark.parametrize("sign", "|;, ")
def test_text_that_seems_to_be_a_list_is_said(tmp_path, sign, is_here):
    ids = {"item": Column(min_count=2), "seen": Column(like="item"), "user": Column()}
    schema = sj.ClickSchema("click", ids=ids)
    rows = [
        {
            "click": 0,
            "item": f"i{i % 4}",
            "user": f"a{sign}b",
            # As many are one item alone.
            "seen": f"i{i % 4}" if i % 2 else f"i{i % 4}{sign}i{(i + 1) % 4}",
        }
        for i in range(12)
    ]
    path = tmp_path / "clicks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = re.escape(f"column 'seen': 'i0{sign}i1' is one category")
    said += ".* of 'item'.* seen:token_seq with spaces.* item:token"
    with pytest.warns(UserWarning, match=said) as found:
        sj.read_clicks(path, schema)
    assert len(found) == 1 and is_here(found[0])
    with pytest.warns(UserWarning, match=said):
        sj.data.scan_clicks(path, schema)
    lists = [row | {"seen": row["seen"].split(sign)} for row in rows]
    names = [row | {"seen": f"x{sign}y"} for row in rows]
    # This and the following reads cause no warning.
    known = sj.read_clicks(lists, schema)
    sj.read_clicks(names, schema)
    # Only later data is text; no row shows the items that it lists.
    with pytest.warns(UserWarning, match=said):
        sj.read_clicks(rows[:1], schema, features=known)
    columns = {name: [rows[0][name]] for name in ids}
    with pytest.warns(UserWarning, match=said):
        examples_of(columns, schema, known.vocabularies)
    examples_of(columns | {"seen": [["i0", "i1"]]}, schema, known.vocabularies)
