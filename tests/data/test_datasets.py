"""The bundled data set, and the code that made it."""

import lzma
import pathlib

import numpy as np
import pytest

from sparsejax.data import DataError, datasets

UCI = """\
I,4,"www.example.com","created by hand"
A,1287,1,"Routes, all of them ","/route"
A,1288,1,"library","/library"
A,1290,1,"library","/lib"
C,"10001",10001
V,1288,1
V,1290,1
C,"10002",10002
C,"10003",10003
V,1288,1
"""


def test_msweb():
    data = datasets.msweb()
    assert (data.train.num_rows, data.train.num_entries) == (32_711, 98_654)
    assert (data.test.num_rows, data.test.num_entries) == (5_000, 15_191)
    assert data.train.num_features == data.test.num_features == 294
    features = data.train.feature_names.tolist()
    assert data.test.feature_names.tolist() == features
    assert set(data.titles) == set(features)
    assert data.titles["/msdownload"] == "Free Downloads"
    assert data.train.matrix.data is None and data.test.matrix.data is None
    # Test visitors are other people, so no name of theirs may match one in train.
    assert not set(data.train.row_names) & set(data.test.row_names)
    # The most visited areas, as the repository's own description of the data counts.
    counts = np.bincount(data.train.matrix.indices, minlength=294)
    assert counts[features.index("/msdownload")] == counts.max() == 10_836
    # Visitor 10001 of the original file saw areas 1000, 1001 and 1002.
    first = data.train.align_rows(["train-10001"])
    names = data.train.feature_names[first.matrix.indices].tolist()
    assert sorted(names) == ["/athome", "/regwiz", "/support"]


def test_attribution_is_beside_the_data():
    folder = pathlib.Path(datasets.__file__).parent / "msweb"
    text = (folder / "ATTRIBUTION.txt").read_text()
    assert "CC BY 4.0" in text and "Breese" in text and "UCI" in text
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000


@pytest.mark.parametrize("pack", [bytes, lzma.compress])
def test_read_msweb_uci(tmp_path, pack):
    path = tmp_path / "data"
    path.write_bytes(pack(UCI.encode()))
    dataset, titles = datasets.read_msweb_uci(path, row_prefix="train-")
    assert dataset.row_names.tolist() == ["train-10001", "train-10002", "train-10003"]
    assert dataset.feature_names.tolist() == ["/route", "/library", "/lib"]
    assert dataset.to_scipy().toarray().tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 0]]
    assert titles == {
        "/route": "Routes, all of them",
        "/library": "library",
        "/lib": "library",
    }


def test_convert_msweb(tmp_path, monkeypatch):
    (tmp_path / "a").write_text(UCI)
    (tmp_path / "b").write_text(UCI.replace('C,"10002",10002\n', ""))
    datasets.convert_msweb(tmp_path / "a", tmp_path / "b", tmp_path)
    monkeypatch.setattr(datasets, "_FOLDER", tmp_path)
    data = datasets.msweb()
    # Ranked by frequency in train; the area that nobody visited is there too.
    expected = ["/library", "/route", "/lib"]
    assert data.train.feature_names.tolist() == expected
    assert data.test.feature_names.tolist() == expected
    assert data.train.to_scipy().toarray().tolist() == [[1, 0, 1], [0] * 3, [1, 0, 0]]
    assert data.test.row_names.tolist() == ["test-10001", "test-10003"]
    assert data.titles["/lib"] == "library"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no case"),
        ("1,2,3\n", "no case"),
        (UCI + "V,9999,1\n", "data:11: not UCI's form.*9999"),
        (UCI.replace('C,"10001",10001\n', ""), "no case before the votes"),
        (UCI + "A,1,1,\u00e9,/e\n", "not UCI's form"),
    ],
)
def test_read_msweb_uci_errors(tmp_path, text, message):
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        datasets.read_msweb_uci(path)
