"""The data set that comes with the package."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse

from sparsejax.data.dataset import SparseDataset
from sparsejax.data.files import DataError, Path, open_data
from sparsejax.data.names import as_names
from sparsejax.data.vocabulary import vocabulary_order

_FOLDER = pathlib.Path(__file__).parent / "msweb"


@dataclasses.dataclass(frozen=True)
class MSWeb:
    """Areas of www.microsoft.com that visitors looked at, in a week of February 1998.

    Attributes:
      train: 32,711 visitors, 98,654 visits, 294 areas. Rows are named `train-10001`,
        features by their path, as in `/products`.
      test: 5,000 other visitors (`test-10001`, ...), 15,191 visits, the same areas.
      titles: the title of each area by its path. Two areas may share a title.
    """

    train: SparseDataset
    test: SparseDataset
    titles: dict[str, str] = dataclasses.field(repr=False)


def msweb() -> MSWeb:
    """The bundled data set with its official split into train and test visitors.

    UCI "Anonymous Microsoft Web Data" by Jack S. Breese, David Heckerman and Carl M.
    Kadie, 1998, https://doi.org/10.24432/C5VS3Q, licensed under CC BY 4.0.
    """
    titles = pq.read_table(_FOLDER / "titles.parquet").to_pydict()
    return MSWeb(
        SparseDataset.load(_FOLDER / "train.parquet"),
        SparseDataset.load(_FOLDER / "test.parquet"),
        dict(zip(titles["feature"], titles["title"], strict=True)),
    )


def convert_msweb(train: Path, test: Path, folder: Path) -> None:
    """Makes the bundled files from UCI's: how they were made, and can be again.

    Args:
      train: `anonymous-msweb.data` (may be compressed).
      test: `anonymous-msweb.test`.
      folder: where to write `train.parquet`, `test.parquet` and `titles.parquet`.
    """
    folder = pathlib.Path(folder)
    rows, titles = read_msweb_uci(train, row_prefix="train-")
    counts = np.bincount(rows.matrix.indices, minlength=rows.num_features)
    order = vocabulary_order(counts, rows.feature_names)
    rows = rows.align_features(rows.feature_names[order])
    rows.save(folder / "train.parquet")
    read_msweb_uci(test, row_prefix="test-")[0].align_features(rows).save(
        folder / "test.parquet"
    )
    table = pa.table({"feature": list(titles), "title": list(titles.values())})
    pq.write_table(table, folder / "titles.parquet", compression="zstd")


def read_msweb_uci(
    path: Path, *, row_prefix: str = ""
) -> tuple[SparseDataset, dict[str, str]]:
    """Reads UCI's form of the data: areas `A`, and for each case `C` its votes `V`.

    ::

        A,1277,1,"NetShow for PowerPoint","/stream"
        C,"10001",10001
        V,1277,1

    Args:
      path: the file.
      row_prefix: put before the case numbers, which are the same in train and test
        though the visitors are not.

    Returns:
      `(data set, titles)`; every area is a feature, visited or not, in the file's order.

    Raises:
      DataError: the file is not of this form.
    """
    names: list[str] = []
    column: dict[str, int] = {}
    titles: dict[str, str] = {}
    cases: list[str] = []
    rows: list[int] = []
    columns: list[int] = []
    with open_data(path) as stream:
        reader = csv.reader(io.TextIOWrapper(stream, "ascii", newline=""))
        try:
            for record in reader:
                match record:
                    case ["A", area, _, title, name]:
                        column[area] = len(names)
                        names.append(name)
                        titles[name] = title.strip()
                    case ["C", _, number]:
                        cases.append(f"{row_prefix}{number}")
                    case ["V", area, _]:
                        rows.append(len(cases) - 1)
                        columns.append(column[area])
        except (KeyError, UnicodeDecodeError) as error:
            message = f"not UCI's form of the data: {error!r}"
            raise DataError.at(path, message, line=reader.line_num) from error
    if not cases or min(rows, default=0) < 0:
        raise DataError.at(path, "not UCI's form of the data: no case before the votes")
    matrix = scipy.sparse.coo_array(
        (np.ones(len(rows), bool), (rows, columns)), shape=(len(cases), len(names))
    )
    dataset = SparseDataset(
        SparseDataset.from_scipy(matrix).matrix, as_names(cases), as_names(names)
    )
    return dataset, titles
