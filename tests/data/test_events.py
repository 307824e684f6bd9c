"""Event columns: reading, saving, splitting, and use as targets."""

import dataclasses
import functools
import json
from typing import Any, cast

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data import (
    DataError,
    DenseColumn,
    Events,
    HashedColumn,
    KeyColumn,
    LabelColumn,
    SequenceDataset,
    VocabularyColumn,
)

SCHEMA = sj.EventSchema(
    kind="action",
    dense={"price": DenseColumn(log1p=True, missing=-1.0), "seconds": DenseColumn()},
    ids={"device": VocabularyColumn(min_count=3), "shop": HashedColumn(7)},
)


def frame(rows: int = 60, seed: int = 0) -> pandas.DataFrame:
    """Events in random order, with missing values in all columns that allow them."""
    rng = np.random.default_rng(seed)

    def some(values, share=0.2):
        found = rng.choice(values, rows).astype(object)
        found[rng.random(rows) < share] = None
        return found

    return pandas.DataFrame(
        {
            "user": rng.choice(["ann", "bob", "cy"], rows),
            "item": rng.choice(["tea", "rye", "oat", "pea"], rows),
            "price": some([1.5, 20.0, 0.25]).astype(float),
            "seconds": rng.integers(0, 99, rows),
            "time": rng.integers(0, 20, rows),
            "action": some(["view", "cart", "buy"]),
            "device": some(["web", "app", "kiosk"]),
            "shop": some(["north", "south"]),
        }
    )


def written(table: pandas.DataFrame, form: str, folder):
    """The table in one of the forms that are read."""
    path = folder / f"events.{form}"
    if form == "frame":
        return table
    if form == "csv":
        table.to_csv(path, index=False)
    elif form == "jsonl":
        rows = [
            {name: None if pandas.isna(x) else x for name, x in row.items()}
            for row in table.to_dict("records")
        ]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form == "parquet":
        table.to_parquet(path, row_group_size=7)
    else:
        path = folder / "parts"
        for place, part in table.groupby("shop", dropna=False):
            below = path / f"shop={'' if part.shop.isna().all() else place}"
            below.mkdir(parents=True)
            part.drop(columns="shop").to_csv(below / "a.csv", index=False)
    return path


def read(source, **options) -> Any:
    """The histories that are read, typed as `Any` because the events of a `SequenceDataset` may be
    None.
    """
    return sj.read_sequences(source, events=SCHEMA, **options)


def numbered(column: pandas.Series, min_count: int = 1) -> tuple[list[str], list[int]]:
    """The vocabulary, ordered by number of occurrences and then by name, and the ids."""
    counts = column.value_counts()
    known = [n for n in sorted(counts.index, key=lambda n: (-counts[n], n))]
    known = [n for n in known if counts[n] >= min_count]
    ids = [
        0 if pandas.isna(x) else known.index(x) + 2 if x in known else 1 for x in column
    ]
    return known, ids


@pytest.mark.parametrize("form", ["frame", "csv", "jsonl", "parquet", "folders"])
def test_columns_are_as_a_stable_sort_has_them(form, tmp_path):
    table = frame()
    if form == "folders":
        table = table.dropna(subset="shop").sort_values("shop", kind="stable")
        table = table.reset_index(drop=True)
    data = sj.read_sequences(written(table, form, tmp_path), events=SCHEMA)
    place = {name: row for row, name in enumerate(dict.fromkeys(table.user))}
    assert data.row_names.tolist() == list(place)
    order = np.lexsort((table.time, table.user.map(place)))
    wanted = table.iloc[order]
    events = data.events
    assert events is not None and len(events) == data.num_entries == len(table)
    assert data.feature_names[data.indices].tolist() == wanted.item.tolist()
    assert list(events.columns) == SCHEMA.used == ["price", "seconds", *SCHEMA.ids]
    price = np.where(wanted.price.isna(), -1, np.log1p(wanted.price))
    np.testing.assert_allclose(events["price"], price, rtol=1e-6)
    assert events["seconds"].tolist() == wanted.seconds.tolist()
    for name, least in (("action", 1), ("device", 3)):
        known, ids = numbered(wanted[name], least)
        assert events.vocabularies[name].tolist() == known
        assert events[name].tolist() == ids
    hashed = {
        x: events["shop"][(wanted.shop == x).to_numpy()] for x in ("north", "south")
    }
    assert all(len(set(ids.tolist())) == 1 and ids[0] > 0 for ids in hashed.values())
    assert not events["shop"][wanted.shop.isna().to_numpy()].any()
    assert "columns of events: price" in str(data.columns)


def test_later_data_has_the_ids_of_the_training_data():
    train = sj.read_sequences(frame(), events=SCHEMA)
    events = train.events
    assert events is not None
    row = {"user": "new", "item": "tea", "time": 1, "price": 3.0, "seconds": 2}
    later = [row | {"action": "return", "device": "tv", "shop": "north"}]
    later += [row | {"action": "buy", "device": None, "shop": "west"}]
    data = sj.read_sequences(later, features=train, events=events)
    assert data.events is not None
    known = events.vocabularies["action"].tolist()
    assert data.events["action"].tolist() == [1, known.index("buy") + 2]
    assert data.events["device"].tolist() == [1, 0]
    events.check_like(data.events, "later")
    again = sj.EventSchema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert again == SCHEMA
    empty = Events.from_json(json.loads(json.dumps(events.to_json())))
    assert not len(empty) and empty.num_ids == events.num_ids
    with pytest.raises(
        ValueError, match="later has other columns of events, or other cat"
    ):
        events.check_like(read(frame(9)).events, "later")


LISTS = pa.table(
    {
        "user": ["ann", "bob", "cy"],
        "items": [["tea", "rye"], [], ["tea"]],
        "action": [["view", "buy"], [], [None]],
        "tags": [[["a", "b", "c"], []], [], [["b"]]],
        "country": ["de", "fr", None],
    }
)
OF_LISTS = sj.EventSchema(
    kind="action", ids={"tags": VocabularyColumn(), "country": VocabularyColumn()}
)


def test_rows_with_lists_have_lists_or_one_value_for_all(tmp_path):
    data = sj.read_sequences(LISTS, events=OF_LISTS)
    events = data.events
    assert events is not None
    assert events["action"].tolist() == [3, 2, 0]
    assert events["country"].tolist() == [2, 2, 0]
    assert events["tags"].tolist() == [[3, 2, 4], [-1, -1, -1], [2, -1, -1]]
    data.save(tmp_path / "lists.parquet")
    again = sj.read_sequences(tmp_path / "lists.parquet", events=events)
    same(again, data)
    # CSV files with typed headers may have lists, too.
    path = tmp_path / "typed.csv"
    path.write_text("user:token,item:token,tags:token_seq\nann,tea,a b\nann,rye,\n")
    of_text = sj.EventSchema(ids={"tags": VocabularyColumn()})
    found = sj.read_sequences(path, events=of_text).events
    assert found is not None and found["tags"].tolist() == [[2, 3], [-1, -1]]


def test_a_file_that_was_saved_with_other_categories_gets_those_of_the_training_data(
    tmp_path,
):
    ids = {"tags": VocabularyColumn(), "first": VocabularyColumn(like="tags")}
    schema = sj.EventSchema(kind="action", ids=ids)
    rows = [
        {"user": "ann", "item": "tea", "action": a, "tags": list(t), "first": t[:1]}
        for a, t in (("view", "ab"), ("buy", ""), ("view", "bc"))
    ]
    later = [
        {"user": "bob", "item": "tea", "action": a, "tags": list(t), "first": t[:1]}
        for a, t in (("return", "dc"), ("buy", "b"), ("buy", "ac"))
    ]
    train = sj.read_sequences(rows, events=schema)
    sj.read_sequences(later, events=schema).save(tmp_path / "later.parquet")
    same(
        sj.read_sequences(later, features=train, events=train.events),
        sj.read_sequences(tmp_path / "later.parquet", events=train.events),
    )
    with pytest.raises(ValueError, match="has other columns of events"):
        other = sj.read_sequences(rows, events=sj.EventSchema(kind="action")).events
        sj.read_sequences(tmp_path / "later.parquet", events=other)


def same(data: SequenceDataset, other: SequenceDataset) -> None:
    assert data.events is not None and other.events is not None
    other.events.check_like(data.events, "the file")
    for name in other.events.schema.used:
        np.testing.assert_array_equal(data.events[name], other.events[name])
    assert (data.weights is None) == (other.weights is None)
    if other.weights is not None:
        np.testing.assert_array_equal(data.weights, other.weights)
    np.testing.assert_array_equal(data.indptr, other.indptr)


def test_a_saved_file_has_all_columns_and_others_refuse_it(tmp_path):
    data = sj.read_sequences(frame(), events=SCHEMA).with_targets("buy")
    path = tmp_path / "saved.parquet"
    data.save(path)
    same(SequenceDataset.load(path), data)
    empty = data.of_kinds("buy").align_rows(["nobody"], missing="empty")
    empty.save(path)
    same(SequenceDataset.load(path), empty)
    data.save(path)
    with pytest.raises(DataError):
        sj.SparseDataset.load(path)
    with pytest.raises(
        DataError, match=r"are not read here; .* events=None, users=None\)"
    ):
        sj.data.scan_sequences(path)
    with pytest.raises(
        ValueError, match="columns of events are those that it was saved"
    ):
        sj.read_sequences(path, events=SCHEMA)
    # As the message advises; without events, weights alone would remain.
    plain = dataclasses.replace(data, weights=None, events=None)
    plain.save(tmp_path / "plain.parquet")
    assert sj.data.scan_sequences(tmp_path / "plain.parquet").num_rows == 3
    with pytest.raises(DataError, match="has no columns of events"):
        sj.read_sequences(tmp_path / "plain.parquet", events=data.events)
    # A file with a changed cell must be rejected.
    table = pq.read_table(path)
    column = table["events/seconds"].combine_chunks()
    flat = column.flatten().to_numpy().copy()
    flat[3] += 1
    changed = pa.ListArray.from_arrays(
        column.offsets, pa.array(flat), mask=column.is_null()
    )
    at = table.column_names.index("events/seconds")
    field = table.schema.field(at)
    pq.write_table(table.set_column(at, field, pa.chunked_array([changed])), path)
    with pytest.raises(DataError, match="is damaged"):
        SequenceDataset.load(path)


MORE = {"tags": VocabularyColumn(), "like": HashedColumn(5)}
WITH_LISTS = dataclasses.replace(SCHEMA, ids={**SCHEMA.ids, **MORE})


def two_files(folder, group: int) -> pandas.DataFrame:
    """Writes sorted events to two files; only one has lists, some of which are empty or
    missing.
    """
    table = frame(90).sort_values("user", kind="stable").reset_index(drop=True)
    rng = np.random.default_rng(1)
    tags = [[f"t{t}" for t in rng.integers(6, size=n)] for n in rng.integers(0, 4, 90)]
    tags = [t[: 1 if u == "ann" else 3] for t, u in zip(tags, table.user, strict=True)]
    some: Any = {
        "tags": [None if place % 9 == 4 else each for place, each in enumerate(tags)],
        "like": [f"t{place % 6}" if place % 5 else None for place in range(90)],
    }
    table = table.assign(**some)
    folder.mkdir()
    parts = [table[:40], table[40:]]
    alone: Any = {"like": [[x] if x else [] for x in parts[0].like]}
    parts[0] = parts[0].assign(**alone)
    for name, part in zip("ab", parts, strict=True):
        part.to_parquet(folder / f"{name}.parquet", row_group_size=group)
    return table


@pytest.mark.parametrize("group", [1, 7, 10**6])
@pytest.mark.parametrize("form", ["pairs", "saved", "known"])
def test_scanned_columns_are_those_in_memory(form, group, tmp_path):
    two_files(tmp_path / "t", group)
    path: Any = tmp_path / "t"
    # A scan counts an item twice if a user has it twice, so its own order may differ.
    options: Any = {"events": WITH_LISTS, "features": ["tea", "rye", "oat", "pea"]}
    if form == "known":
        train = sj.read_sequences(
            frame(40).assign(tags="t1", like="t2"), events=WITH_LISTS
        )
        options = {"events": train.events, "features": train}
    data = cast(Any, sj.read_sequences(path, **options))
    if form == "saved":
        path, options = tmp_path / "saved", {}
        path.mkdir()
        # Files may have different maximum lengths of lists.
        for name, rows in (("a", ["ann"]), ("b", ["bob", "cy"])):
            part = data.align_rows(rows)
            least = part.events["tags"][
                :, : max(1, (part.events["tags"] >= 0).sum(1).max())
            ]
            columns = {**part.events.columns, "tags": least}
            own = part.events.with_columns(columns)
            dataclasses.replace(part, events=own).save(path / f"{name}.parquet")
    scanned: Any = sj.data.scan_sequences(path, **options)
    assert scanned.num_rows == 3 and "ann" in data.row_names
    assert scanned.events.num_ids == data.events.num_ids
    assert scanned.events.lists == data.events.lists
    scanned.events.check_like(data.events, "the data")
    assert scanned.feature_names.tolist() == data.feature_names.tolist()
    for start, stop in ((0, 3), (0, 1), (1, 3), (2, 2)):
        found, wanted = scanned.read(start, stop), slice(*data.indptr[[start, stop]])
        np.testing.assert_array_equal(found.indices, data.indices[wanted])
        np.testing.assert_array_equal(found.times, data.times[wanted])
        for name in WITH_LISTS.used:
            column = found.events[name]
            assert column.dtype == data.events[name].dtype
            np.testing.assert_array_equal(column, data.events[name][wanted])
    known = scanned.without_rows()
    assert known.num_rows == 0 and known.events.lists == data.events.lists
    if form == "pairs":
        plain = sj.data.scan_sequences(path)
        other = sj.EventSchema(kind="action")
        prints = [plain, scanned, sj.data.scan_sequences(path, events=other)]
        assert len({each.fingerprint() for each in prints}) == 3


@pytest.mark.usefixtures("wrong_types")
def test_columns_that_cannot_be_scanned(tmp_path):
    table = two_files(tmp_path / "t", 7)
    with pytest.raises(DataError, match="there is no column 'nosuch'"):
        sj.data.scan_sequences(tmp_path / "t", events=sj.EventSchema(kind="nosuch"))
    table[40:].drop(columns="tags").to_parquet(tmp_path / "t" / "b.parquet")
    messages = []
    for reader in (sj.read_sequences, sj.data.scan_sequences):
        with pytest.raises(
            DataError, match="b.parquet.*there is no column 'tags'"
        ) as e:
            reader(tmp_path / "t", events=WITH_LISTS)
        messages.append(str(e.value))
    assert messages[0] == messages[1]
    table.assign(seconds=None).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(DataError, match="'seconds' is empty, null or NaN"):
        sj.data.scan_sequences(tmp_path / "c.parquet", events=WITH_LISTS)
    data = cast(Any, read(frame()))
    data.save(tmp_path / "s.parquet")
    with pytest.raises(
        ValueError, match="leave out user, item, time, features and even"
    ):
        sj.data.scan_sequences(tmp_path / "s.parquet", events=SCHEMA)
    (tmp_path / "u").mkdir()
    data.save(tmp_path / "u" / "a.parquet")
    read(frame(50, seed=3)).align_features(data).save(tmp_path / "u" / "b.parquet")
    with pytest.raises(DataError, match="b.parquet: has other columns of events than"):
        sj.data.scan_sequences(tmp_path / "u")
    with pytest.raises(TypeError, match="events is an EventSchema, or the events of"):
        sj.data.scan_sequences(tmp_path / "c.parquet", events=cast(Any, "action"))


def test_columns_go_with_their_entries():
    data = read(frame())
    assert data.events is not None
    # Each event is identified by its seconds, its item and its time.
    key = [*zip(data.indices, data.times, data.events["seconds"], strict=True)]
    every = dict(zip(key, data.events["shop"], strict=True))
    train, heldout = data.split_last(3)
    parts: list[Any] = [
        train,
        heldout,
        *data.split_rows(0.5, seed=0),
        *data.split(0.5, seed=1),
    ]
    parts += [
        *data.split_at(fraction=0.5, repeats="all"),
        data.align_rows(["cy", "ann"]),
    ]
    for part in parts:
        assert part.events is not None and len(part.events) == part.num_entries
        keys = zip(part.indices, part.times, part.events["seconds"], strict=True)
        assert [every[k] for k in keys] == part.events["shop"].tolist()
    fewer = data.append_features(["new", "pea"])
    assert fewer.events is not None
    np.testing.assert_array_equal(fewer.events["seconds"], data.events["seconds"])
    padded = data.padded_column(data.events["seconds"], 4, fill=-5)
    items = data.padded(4)
    assert ((padded == -5) == (items == -1)).all() and padded.shape == items.shape
    assert repr(data).endswith(
        "times, events with price, seconds, action, device, shop)"
    )


def test_targets_and_weights_are_those_of_the_kinds():
    data = read(frame())
    events = data.events
    assert events is not None
    kinds = np.array(["", "", *events.vocabularies["action"].tolist()])[
        events["action"]
    ]
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({"targets": "buy"}, {"buy": 1}),
        ({"targets": ["buy", "cart"]}, {"buy": 1, "cart": 1}),
        ({"weights": {"buy": 2, "view": 0.5}}, {"buy": 2, "view": 0.5}),
        ({"targets": "view", "weights": {"buy": 2, "view": 0.5}}, {"view": 0.5}),
    ]
    for given, wanted in cases:
        found = data.with_targets(given.get("targets"), weights=given.get("weights"))
        assert found.weights is not None
        assert found.weights.tolist() == [wanted.get(kind, 0) for kind in kinds]
        only = found.only_targets()
        assert only.num_entries == np.sum(found.weights > 0)
    by_column = data.with_targets("buy", weights="seconds").weights
    np.testing.assert_array_equal(
        by_column, np.where(kinds == "buy", events["seconds"], 0)
    )
    assert (
        data.of_kinds("buy", "view").num_entries
        == np.isin(kinds, ["buy", "view"]).sum()
    )


@pytest.mark.parametrize("n", [1, 2, 99])
def test_the_last_targets_are_held_out_and_nothing_behind_them_is_seen(n):
    table = frame(80, seed=3)
    table["user"] += [f"{row % 9}" for row in range(len(table))]  # short histories
    data = read(table).with_targets("buy")
    train, heldout = data.split_last(n)
    assert data.weights is not None
    for row in range(data.num_rows):
        begin, end = data.indptr[row : row + 2]
        targets = [e for e in range(begin + 1, end) if data.weights[e] > 0][-n:]
        stays = range(begin, targets[0] if targets else end)
        of_train = slice(*train.indptr[row : row + 2])
        of_heldout = slice(*heldout.indptr[row : row + 2])
        assert train.indices[of_train].tolist() == data.indices[stays].tolist()
        assert heldout.indices[of_heldout].tolist() == data.indices[targets].tolist()
    assert (heldout.weights == 1).all()
    assert data.split_last(n).repeats == 0
    has = [
        (data.weights[data.indptr[r] + 1 : data.indptr[r + 1]] > 0).any()
        for r in range(data.num_rows)
    ]
    assert data.num_examples == sum(has)


def test_an_item_behind_the_targets_is_not_known():
    """Its event is in neither part, so its purchase is not a repeat."""
    rows = [("tea", "view"), ("rye", "buy"), ("rye", "view")]
    rows += [("tea", "buy"), ("oat", "view")]
    table = [{"user": "ann", "item": item, "action": kind} for item, kind in rows]
    data = sj.read_sequences(table, events=sj.EventSchema(kind="action"))
    split = data.with_targets("buy").split_last(2, repeats="new")
    found = [part.feature_names[part.indices].tolist() for part in split]
    assert found == [["tea"], ["rye"]] and split.repeats == 1


def test_bad_lines_are_left_out(tmp_path):
    path = tmp_path / "events.csv"
    lines = ["user,item,price"] + [f"u{i % 9},i{i % 5},{i}" for i in range(300)]
    lines[40] = "u1,i1,cheap"
    path.write_text("\n".join(lines))
    schema = sj.EventSchema(dense={"price": DenseColumn()})
    with pytest.raises(DataError, match=r"events\.csv:41: column 'price'"):
        sj.read_sequences(path, events=schema)
    with pytest.warns(UserWarning, match="1 bad line is left out of 300"):
        data = sj.read_sequences(path, events=schema, skip_bad_lines=True)
    assert data.num_entries == 299


def test_a_number_that_is_missing_is_no_label(tmp_path):
    """The model's input gets what the column says; by their names alone labels have losses."""
    price = DenseColumn(log1p=True, missing=5.0)
    schema = sj.EventSchema("action", {"price": price}, labels=["action", "price"])
    assert schema.several == {"action": LabelColumn(), "price": LabelColumn("squared")}
    assert sj.EventSchema.from_json(schema.to_json()) == schema
    rows = [ROWS[0] | {"price": x} for x in (None, 0.0, 3.0)]
    data = sj.read_sequences(rows, events=schema)
    assert data.events is not None
    wanted = np.array([np.nan, 0, np.log(4)], np.float32)
    np.testing.assert_array_equal(data.events["price"], wanted)
    weights = data.with_targets(weights="price").weights
    np.testing.assert_array_equal(weights, np.array([5, 0, np.log(4)], np.float32))
    data.save(tmp_path / "data.parquet")
    saved = sj.read_sequences(tmp_path / "data.parquet").events
    assert saved is not None and saved.schema == schema
    np.testing.assert_array_equal(saved["price"], wanted)
    plain = dataclasses.replace(schema, labels=())
    without = sj.read_sequences(rows, events=plain).events
    assert without is not None and without["price"][0] == 5


def labelled(price: LabelColumn | None = None, **options: Any) -> sj.EventSchema:
    labels: Any = {"action": LabelColumn()} if price is None else {"price": price}
    columns: Any = {"dense": {"price": DenseColumn()}, "labels": labels}
    return sj.EventSchema(**({"kind": "action"} | columns | options))


ROWS = [{"user": "ann", "item": "tea", "action": "view", "price": 1.0}] * 2


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (lambda: sj.EventSchema(), ValueError, "expected at least one column"),
        (
            lambda: sj.EventSchema(kind="a", ids={"a": HashedColumn(3)}),
            ValueError,
            "must be a VocabularyColumn",
        ),
        (
            lambda: sj.EventSchema(ids={"a": KeyColumn()}),
            ValueError,
            "for dynamic tables",
        ),
        (
            lambda: sj.EventSchema(
                dense={"a": DenseColumn()}, ids={"a": HashedColumn(3)}
            ),
            ValueError,
            r"\['a'\] have two",
        ),
        (
            lambda: sj.read_sequences(ROWS, events=sj.EventSchema(kind="where")),
            DataError,
            "there is no column 'where'",
        ),
        (
            lambda: sj.read_sequences(
                ROWS, events=sj.EventSchema(kind="item"), item="item"
            ),
            ValueError,
            "each role needs a column of its own",
        ),
        (
            lambda: sj.read_sequences(
                [ROWS[0] | {"date": 3}],
                events=sj.EventSchema(dense={"date": DenseColumn()}),
            ),
            DataError,
            "'date' is a column of events, so that events have no time; name another",
        ),
        (
            lambda: sj.read_sequences(ROWS, events=cast(Any, {"kind": "action"})),
            TypeError,
            "events is an EventSchema",
        ),
        (
            lambda: sj.read_sequences(
                [ROWS[0] | {"price": "dear"}],
                events=sj.EventSchema(dense={"price": DenseColumn()}),
            ),
            DataError,
            "row 0: column 'price'",
        ),
        (
            lambda: sj.read_sequences(
                [{"user": "a", "items": ["x", "y"], "action": ["view"]}],
                events=sj.EventSchema(kind="action"),
            ),
            DataError,
            "the numbers of 'action' and of items differ",
        ),
        (
            lambda: sj.read_sequences(
                [ROWS[0] | {"tags": ["t"] * 65}],
                events=sj.EventSchema(ids={"tags": HashedColumn(9)}),
            ),
            DataError,
            "65 categories here, but an event has at most 64",
        ),
        (
            lambda: sj.read_sequences(ROWS).with_targets("view"),
            ValueError,
            "no columns of events",
        ),
        (
            lambda: of_kinds().with_targets("sold"),
            ValueError,
            "no event is of the kind 'sold'; the kinds of the column 'action' are 'view'",
        ),
        (
            lambda: of_kinds().with_targets(weights={"view": -1}),
            ValueError,
            "finite numbers of 0 or more, got -1.0 for entry 0",
        ),
        (
            lambda: of_kinds().with_targets(weights="action"),
            ValueError,
            "is no column of numbers of the events; there is none",
        ),
        (
            lambda: of_kinds().with_targets(weights={"view": 0}),
            ValueError,
            "no event is a target with a positive weight",
        ),
        (lambda: of_kinds().with_targets(), ValueError, "give targets=..., weights="),
        *[
            (
                functools.partial(sj.EventSchema, dense=dense, ids=ids),
                ValueError,
                r"fixed=... is for columns of clicks.* out of \['a'\]",
            )
            for dense, ids in (
                ({"a": DenseColumn(fixed=0.0), "b": DenseColumn()}, {}),
                ({}, {"a": HashedColumn(9, fixed="x")}),
                ({}, {"a": VocabularyColumn(fixed="x")}),
            )
        ],
        (
            lambda: labelled(labels=["price", "price"]),
            ValueError,
            "labels names a column twice",
        ),
        (lambda: labelled(labels="sold"), ValueError, "labels names the column 'sold'"),
        (
            lambda: labelled(context=["action"]),
            ValueError,
            r"not known before the event are \['price'\]",
        ),
        (
            lambda: labelled(labels={"action": LabelColumn("squared")}),
            ValueError,
            'categories have the loss "binary"',
        ),
        (
            lambda: labelled(LabelColumn(weight="price")),
            ValueError,
            "have no after=..., and a number as weight",
        ),
        (
            lambda: labelled(LabelColumn(), dense={"price": DenseColumn(log1p=True)}),
            ValueError,
            "that log1p=True makes are no shares",
        ),
        (
            lambda: sj.read_sequences(
                [ROWS[0] | {"price": 3.5}], events=labelled(LabelColumn())
            ),
            ValueError,
            "label 'price' with the loss 'binary' must be 0 or 1, got 3.5",
        ),
        (
            lambda: sj.data.read_user_features(
                ROWS[:1], labelled(LabelColumn("squared"), kind=None)
            ),
            ValueError,
            "no context and no labels",
        ),
    ],
)
def test_wrong_arguments(read, error, message, wrong_types):
    with pytest.raises(error, match=message):
        read()


@pytest.mark.parametrize("form", ["table", "columns", "stream", "dicts"])
def test_users_of_any_source_without_a_schema(form):
    """A stream can be read only once, and the types of the columns are found first."""
    columns = {"user": ["bob", "ann", "cy"], "plan": ["a", None, "b"], "age": [3, 1, 2]}
    table = pa.table(columns)
    given = {
        "table": table,
        "columns": columns,
        "stream": table.to_reader(),
        "dicts": iter(table.to_pylist()),
    }
    users = sj.data.read_user_features(given[form])
    assert users.user_names.tolist() == ["bob", "ann", "cy"]
    np.testing.assert_array_equal(users.columns["plan"], [2, 0, 3])
    np.testing.assert_allclose(users.columns["age"], np.log1p([3, 1, 2]), rtol=1e-6)


def test_numbers_of_users_may_be_beyond_those_that_floats_have():
    users = [{"user": "ann", "number": 2**62 + 1}, {"user": "bob", "number": 0}]
    found = sj.data.read_user_features(users).columns["number"]
    np.testing.assert_allclose(found, [62 * np.log(2), 0], rtol=1e-6)


def test_one_name_of_a_column_of_the_context_does():
    assert sj.EventSchema(kind="action", context="action").context == ("action",)


def of_kinds() -> SequenceDataset:
    return sj.read_sequences(ROWS, events=sj.EventSchema(kind="action"))
