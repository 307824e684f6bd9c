"""Earlier items of users, from a saved data set, so that requests need not have them."""

from __future__ import annotations

import os

import numpy as np

from sparsejax.data.files import stored
from sparsejax.data.files.opening import DataError


class Histories:
    """The rows of a saved data set, by name, in memory.

    Attributes:
      path: path of the file.
      ordered: whether the items of a row have an order.
      features: names of the items.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads a file that `save` of a `SparseDataset` or a `SequenceDataset` wrote.

        Raises:
          DataError: the file is missing or damaged, or is no such data set.
        """
        with stored.one_file(path).open() as file:
            form = stored.form_of(file.schema_arrow)
        if form is None or not form.has_rows:
            raise DataError.at(
                path,
                "holds no rows of items; save them with SparseDataset.save or "
                "SequenceDataset.save",
            )
        rows = stored.read_rows(path, form)
        self.path, self.features = path, rows.feature_names
        self.ordered = form.ordered
        self._indptr, columns = rows.entries.indptr, rows.entries.columns
        self._indices, self._values = columns["indices"], columns.get("values")
        times = columns.get("times")
        if times is not None and times.dtype.kind == "M":
            times = (times - np.datetime64(0, "us")) / np.timedelta64(1, "s")
        self._times = None if times is None else times.astype(np.float64)
        self._rows = {name: row for row, name in enumerate(rows.row_names.tolist())}

    @property
    def has_values(self) -> bool:
        """Whether the items of a row have values."""
        return self._values is not None

    @property
    def has_times(self) -> bool:
        """Whether the items of a row have times."""
        return self._times is not None

    def __contains__(self, user: str) -> bool:
        """Whether there is a row with this name."""
        return user in self._rows

    def of(
        self, user: str, known: np.ndarray, *, most: int | None, once: bool
    ) -> tuple[list[str], np.ndarray | None, np.ndarray | None]:
        """The items of a row by name, their values and their times; empty for an unknown row.

        Args:
          user: name of the row.
          known: for each of `features`, whether it is wanted.
          most: the largest number of different items; the earliest are omitted. None keeps all.
          once: whether only the last occurrence of each item is kept.
        """
        row = self._rows.get(user)
        ends = (0, 0) if row is None else self._indptr[row : row + 2]
        part = slice(*ends)
        places = np.flatnonzero(known[self._indices[part]]) + ends[0]
        if once or (most is not None and len(places) > most):
            # The last position of each distinct item, counted from the end of the row.
            _, last = np.unique(self._indices[places][::-1], return_index=True)
            last.sort()
            if once:
                places = places[::-1][last[:most]][::-1]
            elif most is not None and len(last) > most:
                places = places[len(places) - last[most] :]
        values, times = (
            None if each is None else each[places]
            for each in (self._values, self._times)
        )
        return self.features[self._indices[places]].tolist(), values, times
