"""Columns whose values are in the names of folders, as Hive writes them: `dt=2024-01-01`."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import pyarrow as pa

from sparsejax.data.files import arrow

_FOLDER = re.compile(r"([^=]+)=(.*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
# Metadata of a schema's field: the column's values come from the names of folders.
_OF_FOLDER = {b"sparsejax": b"folder"}
_TYPE = pa.dictionary(pa.int32(), pa.string())


def of_folder(field: pa.Field) -> pa.Field:
    """Marks a column as one whose values are in the names of folders."""
    return field.with_metadata(_OF_FOLDER)


def is_of_folder(field: pa.Field) -> bool:
    """Whether `of_folder` has marked the column."""
    return (field.metadata or {}).get(b"sparsejax") == b"folder"


@dataclasses.dataclass(frozen=True)
class Constants:
    """Columns of a file that have one value for all its rows, from the names of folders.

    Attributes:
      texts: value of each column, by its name; None is a null.
    """

    texts: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, path: str) -> Constants:
        """Parses the names of folders in a path: `dt=2024-01-01/part-0` gives `dt`."""
        folders = path.split("/")[:-1]
        found = [m.groups() for each in folders if (m := _FOLDER.fullmatch(each))]
        plain = urllib.parse.unquote
        return cls({plain(k): None if v == _NULL else plain(v) for k, v in found})

    def beside(self, names: Collection[str]) -> Constants:
        """The columns that are not among `names`, the columns stored in the file itself."""
        return Constants({n: t for n, t in self.texts.items() if n not in names})

    def own(self, names: Iterable[str]) -> list[str]:
        """The columns among `names` that are stored in the file, not in names of folders."""
        return [name for name in names if name not in self.texts]

    def schema(self, own: pa.Schema) -> pa.Schema:
        """Appends the constant columns to the schema `own` of the file."""
        for name in self.texts:
            own = own.append(of_folder(pa.field(name, _TYPE)))
        return own

    def column(self, name: str, rows: int) -> pa.Array:
        """A constant column as an array with `rows` equal cells."""
        codes = arrow.from_numbers(np.zeros(rows, np.int32))
        text = pa.array([self.texts[name]], pa.string())
        return pa.DictionaryArray.from_arrays(codes, text)

    def added[Rows: (pa.Table, pa.RecordBatch)](
        self, rows: Rows, names: Collection[str]
    ) -> Rows:
        """Appends the constant columns among `names` to rows of the file."""
        for name in self.texts:
            if name in names:
                rows = rows.append_column(name, self.column(name, rows.num_rows))
        return rows


NO_CONSTANTS = Constants()
