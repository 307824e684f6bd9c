"""Content of items: reading from each form, alignment, saving, and errors."""

import datetime
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import sparsejax as sj

ROWS = [
    {"item": "tea", "kind": "drink", "price": 4.0, "title": "Green Tea, green!"},
    {"item": "rice", "kind": "food|grain", "price": 2.0, "title": "Rice"},
    {"item": "salt", "kind": None, "price": None, "title": ""},
]
# The tags in ROWS by name.
TAGS = {
    "tea": {"kind=drink": 1, "price": 1, "title:green": 1, "title:tea": 1},
    "rice": {"kind=food": 1, "kind=grain": 1, "price": -1, "title:rice": 1},
    "salt": {},
}


def as_dicts(features):
    dense = features.tags.toarray()
    return {
        str(item): {
            str(features.tag_names[t]): float(row[t]) for t in np.flatnonzero(row)
        }
        for item, row in zip(features.item_names, dense, strict=True)
    }


def written(folder, form):
    path = folder / f"items.{form}"
    if form in ("csv", "tsv", "csv.gz"):
        comma = "\t" if form == "tsv" else ","
        lines = [["item", "kind", "price", "title"]]
        lines += [["" if r[k] is None else f"{r[k]}" for k in lines[0]] for r in ROWS]
        quoted = [[f'"{c}"' if "," in c else c for c in line] for line in lines]
        text = "\n".join(comma.join(line) for line in quoted) + "\n"
        raw = text.encode()
        path.write_bytes(gzip.compress(raw) if form.endswith("gz") else raw)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif form == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif form == "table":
        return pa.Table.from_pylist(ROWS)
    else:
        return ROWS
    return path


@pytest.mark.parametrize(
    "form", ["csv", "tsv", "csv.gz", "parquet", "jsonl", "json", "table", "dicts"]
)
def test_each_form_says_the_same(tmp_path, form):
    features = sj.read_item_features(written(tmp_path, form), words=["title"])
    assert as_dicts(features) == TAGS
    assert features.numbers == {"price": (3.0, 1.0)}
    assert features.num_empty == 1


def test_vectors_of_texts_stay_small(tmp_path):
    vectors = np.arange(8, dtype=np.float16).reshape(2, 4)
    table = pa.table(
        {
            "item": [7, 9, 11],
            "text": pa.array([vectors[0], None, vectors[1]], pa.list_(pa.float16())),
        }
    )
    pq.write_table(table, tmp_path / "vectors.parquet")
    features = sj.read_item_features(tmp_path / "vectors.parquet")
    assert features.vectors is not None and features.vectors.dtype == np.float16
    np.testing.assert_array_equal(features.vectors, [vectors[0], [0] * 4, vectors[1]])
    fixed = table.set_column(
        1, "text", pa.array([vectors[0], None, vectors[1]], pa.list_(pa.float16(), 4))
    )
    np.testing.assert_array_equal(
        sj.read_item_features(fixed).vectors, features.vectors
    )
    both = sj.read_item_features(table.append_column("two", table["text"]))
    assert both.vectors is not None and both.vectors.shape == (3, 8)


@pytest.mark.parametrize("options", [{}, {"item": "item"}])
def test_names_in_csv_are_text(tmp_path, options):
    """As they are in events: Arrow would make numbers of them, and nulls."""
    path = tmp_path / "items.csv"
    lines = [
        "item,kind,brand,title,price",
        "007,NA,010,12,1",
        "1E5,tea,10,,NA",
        "NA,,,7,3",
    ]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    features = sj.read_item_features(path, tags=["brand"], words=["title"], **options)
    assert as_dicts(features) == {
        "007": {"kind=NA": 1, "brand=010": 1, "title:12": 1, "price": -1},
        "1E5": {"kind=tea": 1, "brand=10": 1},
        "NA": {"title:7": 1, "price": 1},
    }
    path.write_text("item,x\n007,1\n,2\n")
    with pytest.raises(sj.DataError, match="'item' of row 1 is empty"):
        sj.read_item_features(path)


def test_attributes_in_one_json_object(tmp_path):
    path = tmp_path / "attributes.json"
    path.write_text('{"4": [1, 2],\n "83": [2], "5": []}')
    features = sj.read_item_features(path)
    assert as_dicts(features) == {
        "4": {"attributes=1": 1, "attributes=2": 1},
        "83": {"attributes=2": 1},
        "5": {},
    }


def test_aligned_with_items_that_have_none_and_new_ones():
    features = sj.read_item_features(ROWS, words=["title"])
    data = sj.data.from_arrow(
        pa.table({"user": ["a", "a", "b"], "item": ["rice", "milk", "tea"]})
    )
    aligned = features.align(data)
    assert aligned.item_names.tolist() == data.feature_names.tolist()
    found = as_dicts(aligned)
    assert found.pop("milk") == {} and found == {k: TAGS[k] for k in ("rice", "tea")}
    # The vocabulary may have new items, too.
    longer = data.align_features(features.names_after(data))
    assert longer.feature_names[:3].tolist() == data.feature_names.tolist()
    assert as_dicts(features.align(longer)) == TAGS | {"milk": {}}


def test_numbers_of_names_that_pandas_has_made_floats():
    features = sj.read_item_features(
        [{"item": "7.0", "x": "a"}, {"item": "8", "x": "b"}]
    )
    assert features.align(["8", "7"]).num_empty == 0


def test_new_items_in_the_units_of_known_ones():
    known = sj.read_item_features(ROWS, words=["title"])
    new = sj.read_item_features(
        [
            {"item": "oat", "kind": "grain", "price": 5.0, "title": "new RICE"},
            {"item": "oil", "kind": "food", "price": 9.0, "title": ""},
        ],
        words=["title"],
    ).like(known)
    assert new.tag_names.tolist() == known.tag_names.tolist()
    assert as_dicts(new) == {
        "oat": {"kind=grain": 1, "price": 2, "title:rice": 1},
        "oil": {"kind=food": 1, "price": 6},
    }
    with pytest.raises(ValueError, match="no tag .* is one that the model knows"):
        sj.read_item_features([{"item": "oat", "brand": "x"}]).like(known)
    vectors = sj.read_item_features([{"item": "oat", "v": [0.5, 1.0]}])
    with pytest.raises(ValueError, match="vectors of 2 numbers, but .* have 0"):
        vectors.like(known)
    both = sj.read_item_features([{"item": "tea", "kind": "drink", "v": [1.0, 2.0]}])
    with pytest.raises(ValueError, match="no tag .there is none. is one that"):
        vectors.like(both)


def test_other_units_are_other_content():
    one, two = (
        sj.read_item_features([{"item": "a", "x": 0}, {"item": "b", "x": top}])
        for top in (1, 2)
    )
    assert (one.tags != two.tags).nnz == 0
    assert one.fingerprint() != two.fingerprint()


@pytest.mark.parametrize(
    "options",
    [
        {"item": "item"},
        {"columns": ["kind"]},
        {"tags": ["price"]},
        {"words": ["title"]},
        {"separator": ""},
    ],
)
def test_saved_content_has_no_options(tmp_path, options):
    sj.read_item_features(ROWS).save(tmp_path / "saved.parquet")
    with pytest.raises(ValueError, match=f"{next(iter(options))}=... has no effect"):
        sj.read_item_features(tmp_path / "saved.parquet", **options)


def test_saved_and_damaged(tmp_path):
    rows = [row | {"v": [float(i), 1.0]} for i, row in enumerate(ROWS)]
    features = sj.read_item_features(rows, words=["title"])
    path = tmp_path / "features.parquet"
    features.save(path)
    for found in (sj.ItemFeatures.load(path), sj.read_item_features(path)):
        assert as_dicts(found) == TAGS and found.numbers == features.numbers
        np.testing.assert_array_equal(found.vectors, features.vectors)
        assert found.vectors is not None and found.vectors.dtype == np.float32
    table = pq.read_table(path)
    changed = table.set_column(
        0,
        "item",
        pa.array(
            ["oat", "rice", "salt", *[None] * (len(table) - 3)], pa.large_string()
        ),
    )
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(sj.DataError, match="checksum does not fit"):
        sj.ItemFeatures.load(path)
    pq.write_table(pa.table({"item": ["a"]}), path)
    with pytest.raises(sj.DataError, match="no saved features of items"):
        sj.ItemFeatures.load(path)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"item": "a", "x": 1}, {"item": "a", "x": 2}], {}, "item 'a' has several rows, whose 'x' are 1 and 2; give"),
        ([{"item": "a", "x": 1.0}, {"item": "b", "x": float("-inf")}], {}, "column 'x' of item 'b' is -inf; leave the cell empty where"),
        ([{"item": "a", "x": 1.0}, {"item": "b", "x": 1.7976931348623157e308}], {}, "item 'b' is 1.79.*e[+]308, the largest number of its type; leave"),
        ([{"item": "a", "x": 1.0}, {"item": "b", "x": -3.4028234663852886e38}], {}, "item 'b' is -3.40.*e[+]38, the largest number of its type; leave"),
        ([{"item": n, "x": x} for n, x in zip("abcd", [1.0, 9e99, 2.0, 9e99], strict=True)], {}, "item 'b' is 9e[+]99, and all smaller numbers are alike beside it"),
        ([{"item": "a", "v": [1.0, 2.0]}, {"item": "b", "v": [1.0, -3e38]}], {}, "column 'v' of item 'b' has -3.*e[+]38 at place 1; .* or divide"),
        ([{"item": "a", "v": [1.0, 2.0]}, {"item": "b", "v": [1.0, float("inf")]}], {}, "column 'v' of item 'b' has inf at place 1"),
        ([{"item": "a", "v": [1.0, 2.0]}, {"item": "b", "v": [1.0]}], {}, "column 'v' of item 'b' has 1 numbers, others have 2"),
        ([{"item": "a", "v": [0.0, 0.0]}], {}, "no content of items: column 'v' is left out, zeros alone"),
        ([{"item": "a", "x": "", "y": 1}], {"columns": ["x"]}, "column 'x' is left out, without any value"),
        ([{"item": "a"}], {}, "no column but 'item'"),
        ([{"item": None, "x": 1}], {}, "'item' of row 0 is empty"),
        ([{"x": 1, "y": 2}], {}, "no column has a name of items"),
        ([{"item": "a", "x": 1}], {"words": ["z"]}, "words has 'z', but the columns are 'x'"),
        ([{"item": "a", "x": 1}], {"words": ["x"]}, "column 'x' is int64, which has no words"),
        ([{"item": "a", "x": {"y": 1}}], {"columns": ["x"]}, "column 'x' is struct.*, which is no content"),
        ([{"item": f"{i}", "x": f"t{i}"} for i in range(20)], {"columns": ["x"]}, "column 'x' is titles: 20 of 20 texts occur once; words=x makes tags"),
        ([{"item": "a", "x": False}], {}, "column 'x' is left out, true for no item"),
    ],
)  # fmt: skip
def test_wrong_content_names_column_and_item(rows, options, message):
    with pytest.raises(ValueError, match=message):
        sj.read_item_features(rows, **options)


def test_content_of_other_items():
    features = sj.read_item_features(ROWS)
    with pytest.raises(
        ValueError, match="none of 2 items .*'x', 'y'.* has content.*'tea'"
    ):
        features.align(["x", "y"])


def test_no_json(tmp_path):
    path = tmp_path / "x.json"
    for text, message in (
        ('{"a": [1', "is not JSON"),
        ('{"a": 1}', "not with a list"),
        ("[1]", "not of objects"),
    ):
        path.write_text(text)
        with pytest.raises(sj.DataError, match=message):
            sj.read_item_features(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_folders_of_hive_are_columns(tmp_path, suffix):
    rows = {"drink": ["tea", "mate"], "food": ["rice"], None: ["pen"]}
    whole = []
    for kind, items in rows.items():
        folder = "__HIVE_DEFAULT_PARTITION__" if kind is None else kind
        path = tmp_path / "all" / f"kind={folder}" / f"part.{suffix}"
        path.parent.mkdir(parents=True)
        table = pa.table({"item": items, "price": [float(len(i)) for i in items]})
        whole += [{"kind": kind, **row} for row in table.to_pylist()]
        if suffix == "parquet":
            pq.write_table(table, path)
        elif suffix == "csv":
            pyarrow.csv.write_csv(table, path)
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    found = sj.read_item_features(tmp_path / "all")
    wanted = sj.read_item_features(whole).align(found.item_names)
    assert sorted(found.tag_names) == ["kind=drink", "kind=food", "price"]
    order = [wanted.tag_names.tolist().index(name) for name in found.tag_names]
    np.testing.assert_array_equal(found.tags.toarray(), wanted.tags.toarray()[:, order])
    # A column in the file has precedence over the name of its folder.
    pq.write_table(
        pa.table({"item": ["tea"], "kind": ["hot"]}),
        tmp_path / "all/kind=food/own.parquet",
    )
    own = sj.read_item_features(tmp_path / "all/kind=food/own.parquet")
    assert own.tag_names.tolist() == ["kind=hot"]


def test_each_column_says_what_it_became(tmp_path):
    rows = [
        {
            "item": f"i{i}",
            "title": f"Thing {i}" if i else "Thing 1",
            "kind": f"k{i % 3}",
            "genres": "a|b" if i else "c",
            "labels": ["x", f"y{i}"],
            "price": float(i) if i else None,
            "weight": 2.5,
            "new": i < 4,
            "since": datetime.date(2026, 1, 1),
            "note": None,
            "text": [0.5, float(i)],
        }
        for i in range(24)
    ]
    features = sj.read_item_features(rows)
    assert features.columns == {
        "title": "left out, titles: 22 of 24 texts occur once; words=title makes tags of "
        "their words",
        "kind": "category, 3 different",
        "genres": "tags, 3 different",
        "labels": "tags, 25 different",
        "price": "number, of 1 items empty",
        "weight": "number, 2.5 for all items, which says nothing",
        "new": "tag, true for 4 items",
        "since": "left out, date32[day], which is no content",
        "note": "left out, without any value",
        "text": "vector of 2 numbers",
    }
    assert not any(name.startswith("title") for name in features.tag_names)
    words = sj.read_item_features(rows, words=["title"])
    tags = sj.read_item_features(rows, tags=["title"])
    for asked, account in (
        (words, "words, 24 different"),
        (tags, "category, 23 different"),
    ):
        assert asked.columns == {**features.columns, "title": account}
    features.save(tmp_path / "saved.parquet")
    assert sj.ItemFeatures.load(tmp_path / "saved.parquet").columns == features.columns
    # With fewer texts there is no warning: each new product may have a category of its own.
    assert sj.read_item_features(rows[:19]).columns["title"] == "category, 18 different"


@pytest.mark.parametrize("unit", [1.0, 1e200, 1e305, 1e-200])
def test_numbers_of_any_size(unit):
    values = np.array([1.0, -2.0, 4.0, 5.0])
    cells = [*(values * unit), float("nan")]
    table = pa.table({"item": [*"abcde"], "x": pa.array(cells, from_pandas=False)})
    features = sj.read_item_features(table)
    wanted = (values - values.mean()) / values.std()
    np.testing.assert_allclose(features.tags.toarray()[:4, 0], wanted, rtol=1e-6)
    assert features.num_empty == 1
    np.testing.assert_allclose(
        features.numbers["x"], (values.mean() * unit, values.std() * unit), rtol=1e-12
    )


def test_one_new_product_with_a_number_alone():
    known = sj.read_item_features([{"item": "a", "x": 1.0}, {"item": "b", "x": 5.0}])
    new = sj.read_item_features(
        [{"item": "c", "x": 9.0, "kind": None}], columns=["x", "kind"]
    )
    assert as_dicts(new.like(known)) == {"c": {"x": 3.0}}
    for far in (1e9, 1e60, 1.7e308):
        wrong = sj.read_item_features([{"item": "c", "x": far}])
        with pytest.raises(ValueError, match="'x' of item 'c' is .* are 3 on average"):
            wrong.like(known)
    # A number that was equal for all known items has no information about new items.
    alike = sj.read_item_features(
        [{"item": "a", "x": 1.0, "k": "y"}, {"item": "b", "x": 1.0}]
    )
    assert alike.num_empty == 1
    assert sj.read_item_features([{"item": "c", "x": 9.0}]).like(alike).num_empty == 1


def test_content_that_says_nothing():
    data = sj.data.from_arrow(pa.table({"user": ["a", "b"], "item": ["tea", "rice"]}))
    alike = sj.read_item_features([{"item": "tea", "x": 1}, {"item": "rice", "x": 1}])
    with pytest.raises(
        ValueError, match="says nothing of any item, as 'x' is number, 1"
    ):
        sj.build(sj.NetworkConfig.autoencoder((4,)), data, item_features=alike)
