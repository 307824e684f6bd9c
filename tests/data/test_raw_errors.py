"""Bad text, paths and cells are errors that name the file and the column."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparsejax as sj
from sparsejax.data.reading.item_titles import read_titles
from sparsejax.runs.following import names_in

HALF = "\ud83d"  # the first half of a surrogate pair


@pytest.mark.parametrize("read", [sj.read, sj.read_sequences])
def test_half_of_a_surrogate_pair(tmp_path, read):
    rows = [{"user": "ann", "item": "tea"}, {"user": HALF, "item": "rye"}]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    said = "has half of a surrogate pair"
    with pytest.raises(sj.DataError, match=f"events.jsonl:2: 'user' {said}"):
        read(path)
    with pytest.raises(sj.DataError, match=f"the table: column 'user' {said}"):
        read(rows)
    with pytest.raises(sj.DataError, match=f"name 1 {said}"):
        sj.read(rows[:1], features=["tea", HALF])


@pytest.mark.parametrize(
    "text", [[{"item": "tea", "kind": HALF}], {"tea": [HALF]}, {HALF: ["drink"]}]
)
def test_half_of_a_surrogate_pair_in_content(tmp_path, text):
    path = tmp_path / "items.json"
    path.write_text(json.dumps(text))
    with pytest.raises(sj.DataError, match="items.json: .*half of a surrogate pair"):
        sj.read_item_features(path)


@pytest.mark.parametrize(
    "cells",
    [[b"\xff\xd8", b"\xff\xd9"], [[b"\xff"], [b"a"]], [2**62, 2**62 + 1]],
)
def test_cells_that_are_no_content_are_left_out(cells):
    columns = {"item": ["a", "b"], "odd": cells, "kind": ["x", "y"]}
    assert "left out" in sj.read_item_features(pa.table(columns)).columns["odd"]
    del columns["kind"]
    with pytest.raises(sj.DataError, match="column 'odd' is left out"):
        sj.read_item_features(pa.table(columns))
    with pytest.raises(sj.DataError, match="column 'odd' is "):
        sj.read_item_features(pa.table(columns), columns=["odd"])


def test_names_of_items_that_are_no_text():
    table = pa.table({"item": [b"a", b"\xff"], "kind": ["x", "y"]})
    with pytest.raises(sj.DataError, match="column 'item': .* not valid UTF-8"):
        sj.read_item_features(table)


def test_cells_of_several_types_name_the_column():
    with pytest.raises(sj.DataError, match="column 'item' cannot be read"):
        sj.read([{"user": "ann", "item": "tea"}, {"user": "ann", "item": 3}])


@pytest.mark.parametrize(
    "read", [sj.read, sj.read_sequences, sj.read_item_features, read_titles]
)
def test_a_nul_in_a_path(read):
    with pytest.raises(sj.DataError, match=r"a\\0b.csv: has a NUL"):
        read("a\0b.csv")


def test_files_without_a_byte_are_skipped(tmp_path):
    pq.write_table(pa.table({"user": ["ann"], "item": ["tea"]}), tmp_path / "1.parquet")
    (tmp_path / "0.parquet").touch()
    (tmp_path / "2.parquet").touch()
    assert sj.read(tmp_path).row_names.tolist() == ["ann"]
    assert sj.read_sequences(tmp_path).row_names.tolist() == ["ann"]
    assert sj.data.scan_parquet(tmp_path).num_rows == 1
    assert names_in(str(tmp_path)) == ["1.parquet"]
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(sj.DataError, match="without a .*file that is not empty"):
        sj.read(tmp_path)


def test_rows_of_an_item_that_are_equal_count_once():
    rows = [
        {"item": "tea", "kind": "drink", "price": 4.0},
        {"item": "rye", "kind": "grain", "price": np.nan},
        {"item": "tea", "kind": "drink", "price": 4.0},
        {"item": "rye", "kind": "grain", "price": np.nan},
    ]
    with pytest.warns(UserWarning, match="2 rows repeat another one"):
        found = sj.read_item_features(rows)
    assert found.item_names.tolist() == ["tea", "rye"]
    once = sj.read_item_features(rows[:2])
    np.testing.assert_array_equal(found.tags.toarray(), once.tags.toarray())
    rows[2]["kind"] = "leaf"
    with pytest.raises(
        sj.DataError, match="item 'tea' has several rows, whose 'kind' are 'drink' and"
    ):
        sj.read_item_features(rows)


@pytest.mark.parametrize(
    "text",
    ['{"tea": ["a"], "tea": ["b"]}', '[{"item": "tea", "kind": "a", "kind": "b"}]'],
)
def test_keys_of_json_that_are_there_twice(tmp_path, text):
    (tmp_path / "items.json").write_text(text)
    with pytest.raises(sj.DataError, match="has the key '.*' more than once"):
        sj.read_item_features(tmp_path / "items.json")


def test_columns_that_are_there_twice(tmp_path):
    (tmp_path / "items.csv").write_text("item,kind,kind\ntea,a,b\n")
    with pytest.raises(sj.DataError, match="has several columns 'kind'"):
        sj.read_item_features(tmp_path / "items.csv")


def test_titles_that_are_missing_repeated_or_several(tmp_path):
    path, said = tmp_path / "titles.csv", []
    path.write_text("item,title\ntea,Tea\nrye,\ntea,Tea\n")
    assert read_titles(path, said.append) == {"item": "title", "tea": "Tea"}
    assert said == [
        f"{path}: 1 items have no title and are shown by their names",
        f"{path}: 1 rows repeat the title of an item",
    ]
    rows = [{"item": "tea", "title": None}, {"item": "rye", "title": "Rye"}]
    assert read_titles(rows, said.append) == {"rye": "Rye"}
    assert read_titles({"tea": None, "rye": "Rye", "oat": np.nan}) == {"rye": "Rye"}
    path.write_text("tea,Tea\ntea,Coffee\n")
    with pytest.raises(
        sj.DataError, match="titles.csv:2: item 'tea' has the title 'Coffee', and 'Tea'"
    ):
        read_titles(path)
    with pytest.raises(sj.DataError, match="the name of the item is empty"):
        read_titles([{"item": None, "title": "Tea"}])


@pytest.mark.parametrize("levels", [65, 20_000, 100_000])
@pytest.mark.parametrize("pair", [("[", "]"), ('{"a":', "}")])
def test_json_within_json_within_json(tmp_path, levels, pair):
    """Arrow's parser would end the process."""
    begin, end = pair
    path = tmp_path / "deep.jsonl"
    line = '{"user":"ann","item":"tea","more":[["]]"]]}\n'
    path.write_text(line + f'{{"user":"ann","item":{begin * levels}1{end * levels}}}\n')
    with pytest.raises(
        sj.DataError, match=r"deep\.jsonl:2: has lists or objects within"
    ):
        sj.read(path)
    with pytest.raises(
        sj.DataError, match=r"deep\.jsonl:2: has lists or objects within"
    ):
        sj.data.read_item_features(path)


def test_brackets_in_text_are_no_levels(tmp_path):
    path = tmp_path / "text.jsonl"
    name = "[" * 99 + '\\"{'
    path.write_text(f'{{"user":"ann","item":"{name}"}}\n')
    assert [*sj.read(path).feature_names] == [name.replace("\\", "")]
