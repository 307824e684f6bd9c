"""Tables as files."""

from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import table_files

TABLES = {
    "user": sj.embeddings.TableConfig(1001, 8, placement="rows"),
    "item": sj.embeddings.TableConfig(7, 8, placement="rows", dtype="bfloat16"),
    "cut": sj.embeddings.TableConfig(1001, 8, placement="columns", pieces=4),
}
FEATURES = {name: name for name in TABLES}


@pytest.mark.parametrize(("model", "axes"), [(1, "Auto"), (8, "Auto"), (8, "Explicit")])
def test_a_table_by_pieces(model, axes, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK_NUMBERS", 8 * 300)
    types = (jax.sharding.AxisType[axes],) * 2
    mesh = jax.make_mesh((1, model), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        collection = sj.embeddings.EmbeddingCollection(
            TABLES, FEATURES, rngs=nnx.Rngs(0)
        )
        expected = {name: np.asarray(collection.table(name)) for name in TABLES}
        for name in ("user", "cut"):
            pieces = list(collection.table_rows(name))
            assert [len(piece) for piece in pieces] == [300, 300, 300, 101]
            np.testing.assert_array_equal(np.concatenate(pieces), expected[name])
        names = [f"é{i}" for i in range(999)]
        collection.save_table("user", tmp_path / "user.parquet", names=names)
        collection.save_table("user", tmp_path / "user.npy")
        collection.save_table("item", tmp_path / "item.parquet")
    np.testing.assert_array_equal(np.load(tmp_path / "user.npy"), expected["user"])
    found = pq.read_table(tmp_path / "user.parquet")
    assert found["id"].to_pylist() == list(range(1001))
    assert found["name"].to_pylist() == [None, None, *names]
    rows = found["row"].combine_chunks().flatten().to_numpy().reshape(-1, 8)
    np.testing.assert_array_equal(rows, expected["user"])
    found = pq.read_table(tmp_path / "item.parquet")
    assert found.column_names == ["id", "row"]
    wide = np.asarray(expected["item"], np.float32)
    np.testing.assert_array_equal(np.array(found["row"].to_pylist(), np.float32), wide)


def test_what_is_wrong_with_a_table_file(tmp_path):
    collection = sj.embeddings.EmbeddingCollection(TABLES, FEATURES, rngs=nnx.Rngs(0))
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("a.csv", {}, "a.csv: tables are written to .npy, .parquet files"),
        ("a.npy", {"names": ["x"]}, "has no names; write .parquet"),
        ("a.parquet", {"names": ["x"] * 8}, "8 names, but the table has 7 rows"),
        ("no/a.npy", {}, "there is no folder"),
    )
    for path, options, message in cases:
        with pytest.raises(ValueError, match=message):
            collection.save_table("item", tmp_path / path, **options)
    assert not list(tmp_path.iterdir())
