"""`sparsejax convert`."""

import dataclasses
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from run_folders import (
    names_of,
)

from sparsejax.cli.main import main
from sparsejax.data import SparseDataset, read


@pytest.fixture
def valued() -> SparseDataset:
    """A data set with values. Its features are in the order in which a reader numbers them."""
    dense = np.array([[0, 1.5, 0], [1, 0, -0.1], [0.3, 1e-30, 16777217]])
    return SparseDataset.from_scipy(
        scipy.sparse.csr_array(dense),
        row_names=["ä b", "c:,", '"'],
        feature_names=list("xyz"),
    )


@pytest.mark.parametrize(
    ("name", "to", "indicator"),
    [
        ("out.txt", "text", False),
        ("out.txt.gz", "text", True),
        ("out.tsv.xz", "pairs", False),
        ("out.tsv", "pairs", True),
        ("out.csv", None, False),
        ("out.csv.gz", None, True),
        ("out.parquet", None, False),
        ("out", "parquet", True),
        ("out.txt", "adjacency", True),
    ],
)
def test_convert_keeps_everything(valued, tmp_path, monkeypatch, name, to, indicator):
    monkeypatch.chdir(tmp_path)
    if to == "adjacency":
        valued = dataclasses.replace(valued, row_names=names_of("a", "b", "c"))
    valued.save("in.parquet")
    argv = ["convert", "in.parquet", name] + (["--to", to] if to else [])
    assert main(argv + ["--no-value"] * indicator) == 0
    found = read(name, format=to, features=valued)
    expected = valued.without_values() if indicator else valued
    assert found.row_names.tolist() == expected.row_names.tolist()
    np.testing.assert_array_equal(found.matrix.indptr, expected.matrix.indptr)
    np.testing.assert_array_equal(found.matrix.indices, expected.matrix.indices)
    np.testing.assert_array_equal(found.matrix.data, expected.matrix.data)
    magic = {".gz": b"\x1f\x8b", ".xz": b"\xfd7z"}.get(pathlib.Path(name).suffix, b"")
    assert pathlib.Path(name).read_bytes().startswith(magic)
    assert sorted(os.listdir()) == sorted(["in.parquet", name])


def test_convert_reads_any_format_and_a_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in").write_text("a x y\nb\nc z\n")
    pathlib.Path("wanted").write_text("q\tz:x:new\n")
    argv = ["convert", "in", "out.csv", "--from", "adjacency", "--features", "wanted"]
    assert main(argv) == 0
    assert pathlib.Path("out.csv").read_text() == "user,item\na,x\nc,z\n"
    warnings = capsys.readouterr().err
    assert "1 of 3 entries are left out" in warnings
    assert "1 of 3 rows have no entries and are left out" in warnings


def test_convert_takes_columns_and_folders_of_parquet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in").mkdir()
    table = pa.table({"n": [1, 2], "sku": ["x", "y"], "buyer": ["a", "b"]})
    pq.write_table(table, "in/1.parquet")
    pq.write_table(table, "in/2.parquet")
    columns = ["--user", "buyer", "--item", "1", "--value", "n"]
    assert main(["convert", "in", "out.csv", *columns]) == 0
    expected = "user,item,value\na,x,2\nb,y,4\n"
    assert pathlib.Path("out.csv").read_text() == expected
    columns = ["--user", "1", "--item", "user"]
    assert main(["convert", "out.csv", "turned.csv", *columns]) == 0
    expected = "user,item,value\nx,a,2\ny,b,4\n"
    assert pathlib.Path("turned.csv").read_text() == expected
    address = pathlib.Path("in").absolute().as_uri()
    columns = ["--user", "buyer", "--item", "sku", "--no-value", "--to", "text"]
    assert main(["convert", address, "out.txt", *columns]) == 0
    assert pathlib.Path("out.txt").read_text() == "a\tx\nb\ty\n"
    assert main(["convert", "out.txt", "out.csv", "--from", "text", "--user", "0"]) == 1
    assert "the format text has no columns to name" in capsys.readouterr().err


def test_names_with_quotes_and_separators(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.csv").write_text('user,item\n"a,""b""\tc","1, 2: 3"\n')
    assert main(["convert", "in.csv", "out.csv"]) == 0
    assert pathlib.Path("out.csv").read_text() == pathlib.Path("in.csv").read_text()
    data = read("out.csv")
    assert data.row_names.tolist() == ['a,"b"\tc']
    assert data.feature_names.tolist() == ["1, 2: 3"]


@pytest.mark.parametrize("form", ["text", "pairs", "adjacency"])
@pytest.mark.parametrize("name", ["a\0", "\ufeffa"])
def test_names_that_cannot_be_read_back_are_refused(tmp_path, form, name):
    table = pa.table({"user": [name, "b"], "item": ["x", "y"]})
    pq.write_table(table, tmp_path / "data.parquet")
    out = tmp_path / "out"
    command = ["convert", str(tmp_path / "data.parquet"), str(out), "--to", form]
    status = main(command)
    if status == 0:  # under the header of pairs it is no byte order mark
        assert form == "pairs" and "\0" not in name
        assert read(out, format=form).row_names.tolist() == [name, "b"]
    else:
        assert not out.exists()


def test_convert_reads_lists_in_cells_and_times_in_a_format(tmp_path, capsys):
    path, out = tmp_path / "all.jsonl", str(tmp_path / "out.parquet")
    path.write_text('{"user": "ann", "genres": "Drama|War", "when": "31.12.2024"}\n')
    columns = ["--item", "genres", "--time", "when", "--separator", "|"]
    argv = ["convert", str(path), out, *columns, "--time-format", "%d.%m.%Y"]
    assert main(argv) == 0
    data = read(out)
    assert sorted(data.feature_names.tolist()) == ["Drama", "War"]
    assert str(data.times).count("2024-12-31") == 2
    assert main([*argv[:2], out, "--item", "genres"]) == 0
    assert capsys.readouterr().err.endswith("every entry counts 1; no times\n")
