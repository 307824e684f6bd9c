"""Files of recommendations hold what was recommended."""

import csv
import gzip
import json
import os
import pathlib

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from contents import contents

from sparsejax.data import SparseDataset, read_text
from sparsejax.data.files.names import as_names
from sparsejax.engine.rank.recommendation_files import save_recommendations
from sparsejax.engine.rank.recommendations import Recommendations

ITEMS = as_names(["al,pha", "be:ta", "ga\tmma", 'de"lta', "eps\nilon", "ze\\ta"])
ROWS = as_names(["a,b", "c:d", 'e"f', "none", "g\th"])


def found() -> Recommendations:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((5, 6)), axis=1)[:, :4].astype(np.int32)
    scores = -np.sort(-rng.random((5, 4))).astype(np.float32)
    ids[1, 2:], scores[1, 2:] = -1, -np.inf
    ids[3], scores[3] = -1, -np.inf
    return Recommendations(ids, scores)


def expected() -> list[dict]:
    recommended = found()
    return [
        {
            "user": ROWS[row],
            "item": ITEMS[recommended.ids[row, at]],
            "score": float(recommended.scores[row, at]),
            "rank": at + 1,
        }
        for row in range(5)
        for at in range(4)
        if recommended.ids[row, at] >= 0
    ]


def records(path: pathlib.Path) -> list[dict]:
    """The records in a file of recommendations, read by other libraries."""
    ending = path.name.partition(".")[2]
    opened = gzip.open if ending.endswith(".gz") else open
    if ending == "parquet":
        return pq.read_table(path).to_pylist()
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        if ending.startswith("csv"):
            return [
                line | {"score": float(line["score"]), "rank": int(line["rank"])}
                for line in csv.DictReader(file)
            ]
        return [
            {"user": line["user"], "item": item, "score": score, "rank": rank}
            for line in map(json.loads, file)
            for rank, (item, score) in enumerate(
                zip(line["items"], line["scores"], strict=True), 1
            )
        ]


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"])
def test_recommendations(tmp_path, ending):
    path = tmp_path / f"recs.{ending}"
    save_recommendations(path, ROWS, found(), ITEMS, rows_at_a_time=2)
    got = records(path)
    for line in got:
        line["score"] = float(np.float32(line["score"]))  # not a bit is lost
    assert got == expected()
    if ending == "parquet":
        assert pq.ParquetFile(path).num_row_groups == 3
    # Nothing is recommended to nobody.
    nobody = Recommendations(found().ids[:0], found().scores[:0])
    save_recommendations(path, ROWS[:0], nobody, ITEMS)
    assert records(path) == []
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["recs", "recs.tsv", "recs.txt.gz"])
def test_recommendations_as_text(tmp_path, name):
    save_recommendations(tmp_path / name, ROWS, found(), ITEMS)
    data = read_text(tmp_path / name)
    wanted = {str(row): {} for row in ROWS}
    for line in expected():
        wanted[line["user"]][line["item"]] = float(np.float32(f"{line['score']:.6g}"))
    assert contents(data) == wanted


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl", "parquet"])
def test_a_file_of_recommendations_is_whole_or_not_there(tmp_path, ending):
    path = tmp_path / f"recs.{ending}"
    path.write_text("before")
    broken = Recommendations(found().ids + 3, found().scores)  # there are no such items
    with pytest.raises((ValueError, IndexError)):
        save_recommendations(path, ROWS, broken, ITEMS)
    assert path.read_text() == "before" and os.listdir(tmp_path) == [path.name]


def test_names_that_text_cannot_hold(tmp_path):
    for rows, items, message in (
        (
            np.array([*ROWS[:4], ""], np.dtypes.StringDType()),
            ITEMS,
            "a row has an empty name, which text",
        ),
        (ROWS, as_names([*ITEMS[:5], "a\0b"]), r"item name 'a\\x00b' contains '\\x00'"),
    ):
        with pytest.raises(ValueError, match=message):
            save_recommendations(tmp_path / "recs", rows, found(), items)
        assert os.listdir(tmp_path) == []
        save_recommendations(tmp_path / "r.jsonl", rows, found(), items)
        assert {line["user"] for line in records(tmp_path / "r.jsonl")} <= set(rows)
        (tmp_path / "r.jsonl").unlink()


def test_to_arrow():
    table = found().to_arrow(ROWS, ITEMS)
    assert table.schema == pa.schema(
        {
            "user": pa.large_string(),
            "item": pa.large_string(),
            "score": pa.float32(),
            "rank": pa.int32(),
        }
    )
    assert table.to_pylist() == expected()
    assert table.to_pandas().equals(
        pd.DataFrame(table.to_pydict()).astype(table.to_pandas().dtypes)
    )
    assert pl.DataFrame(table).height == len(expected())
    data = SparseDataset.from_scipy(
        scipy.sparse.csr_array((5, 6), dtype=bool), row_names=ROWS, feature_names=ITEMS
    )
    assert found().to_arrow(data, data).equals(table)
    with pytest.raises(ValueError, match="4 users were given .* of 5 rows"):
        found().to_arrow(ROWS[:4], ITEMS)
    with pytest.raises(ValueError, match="only 2 names were given"):
        found().to_arrow(ROWS, ITEMS[:2])
