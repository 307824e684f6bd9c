"""The bundled data set, and the script that made it."""

import pathlib
import runpy

import numpy as np
import pyarrow.parquet as pq

from sparsejax.data import SparseDataset, datasets

SCRIPT = pathlib.Path(__file__).parents[1] / "msweb.py"


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
    # Test visitors are other people, so none of their names may match a name in train.
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


def test_the_bundled_files_can_be_made_again(tmp_path):
    """Also from the data itself, written as UCI has it."""
    data = datasets.msweb()
    areas = [f'A,{i},1,"{t} ","{n}"' for i, (n, t) in enumerate(data.titles.items())]
    number = {name: i for i, name in enumerate(data.titles)}

    def write(visits, name):
        lines = ['I,4,"www.microsoft.com","created by getlog.pl"', *areas]
        names = visits.feature_names.tolist()
        for row, case in enumerate(visits.row_names.tolist()):
            lines.append('C,"{0}",{0}'.format(case.partition("-")[2]))
            start, end = visits.matrix.indptr[row : row + 2]
            found = visits.matrix.indices[start:end].tolist()
            lines += [f"V,{number[names[feature]]},1" for feature in found]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="ascii")

    write(data.train, "data")
    write(data.test, "test")
    script = runpy.run_path(str(SCRIPT))
    script["convert"](tmp_path / "data", tmp_path / "test", tmp_path)
    for name in ("train", "test"):
        made = SparseDataset.load(tmp_path / f"{name}.parquet")
        kept = getattr(data, name)
        assert made.row_names.tolist() == kept.row_names.tolist()
        assert made.feature_names.tolist() == kept.feature_names.tolist()
        assert made.matrix.data is None
        np.testing.assert_array_equal(made.matrix.indices, kept.matrix.indices)
        np.testing.assert_array_equal(made.matrix.indptr, kept.matrix.indptr)
    titles = pq.read_table(tmp_path / "titles.parquet").to_pydict()
    assert dict(zip(titles["feature"], titles["title"], strict=True)) == data.titles
