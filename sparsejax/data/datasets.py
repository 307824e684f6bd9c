"""The data set that is bundled with the package."""

from __future__ import annotations

import dataclasses
import pathlib

import pyarrow.parquet as pq

from sparsejax.data.sets.dataset import SparseDataset

_FOLDER = pathlib.Path(__file__).parent / "msweb"


@dataclasses.dataclass(frozen=True)
class MSWeb:
    """Areas of www.microsoft.com that visitors opened in a week of February 1998.

    Attributes:
      train: 32,711 visitors, 98,654 visits, 294 areas. Rows have names like
        `train-10001`. Features are named by their path, like `/products`.
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
