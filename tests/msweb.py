"""Makes the bundled data set, `sparsejax/data/msweb`, from UCI's original files.

    python tests/msweb.py anonymous-msweb.data anonymous-msweb.test FOLDER

The files are those of https://doi.org/10.24432/C5VS3Q. They hold areas `A`, and for each
case `C` its votes `V`::

    A,1277,1,"NetShow for PowerPoint","/stream"
    C,"10001",10001
    V,1277,1
"""

from __future__ import annotations

import csv
import pathlib
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse

from sparsejax.data import SparseDataset, vocabulary_order
from sparsejax.data.files.names import as_names
from sparsejax.sparse import CSR


def convert(train: pathlib.Path, test: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes `train.parquet`, `test.parquet` and `titles.parquet` into a folder."""
    visits, titles = read(train, "train-")
    counts = np.bincount(visits.matrix.indices, minlength=visits.num_features)
    order = vocabulary_order(counts, visits.feature_names)
    visits = visits.align_features(visits.feature_names[order])
    visits.save(folder / "train.parquet")
    others, _ = read(test, "test-")
    others.align_features(visits).save(folder / "test.parquet")
    table = pa.table({"feature": list(titles), "title": list(titles.values())})
    pq.write_table(table, folder / "titles.parquet", compression="zstd")


def read(path: pathlib.Path, prefix: str) -> tuple[SparseDataset, dict[str, str]]:
    """The visits, and the title of each area by its path.

    Every area is a feature, visited or not, in the file's order.

    Args:
      path: the file.
      prefix: put before the numbers of cases, which are the same in train and test
        though the visitors are not.
    """
    names: list[str] = []
    column: dict[str, int] = {}
    titles: dict[str, str] = {}
    cases: list[str] = []
    rows: list[int] = []
    columns: list[int] = []
    with open(path, encoding="ascii", newline="") as file:
        for record in csv.reader(file):
            match record:
                case ["A", area, _, title, name]:
                    column[area] = len(names)
                    names.append(name)
                    titles[name] = title.strip()
                case ["C", _, number]:
                    cases.append(f"{prefix}{number}")
                case ["V", area, _]:
                    rows.append(len(cases) - 1)
                    columns.append(column[area])
    votes = np.ones(len(rows), bool), (rows, columns)
    matrix = scipy.sparse.coo_array(votes, shape=(len(cases), len(names)))
    visits = CSR.from_scipy(matrix)
    return SparseDataset(visits, as_names(cases), as_names(names)), titles


if __name__ == "__main__":
    convert(*map(pathlib.Path, sys.argv[1:]))
