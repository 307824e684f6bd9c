"""Scans a data set on disk, to read it a part at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import scipy.sparse

from sparsejax.data.events import tables
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import parquet, stored
from sparsejax.data.files.columns import Chosen, Column
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import Names, quoted
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.scan import Group
from sparsejax.data.scans import scan_tables
from sparsejax.data.scans.scan_entries import SavedFiles, ScannedEntries
from sparsejax.data.sets.assemble import Features
from sparsejax.sparse import CSR, MAX_ENTRIES, as_int32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScannedDataset(ScannedEntries[CSR]):
    """Rows of sparse features on disk, which `fit` reads a chunk at a time.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases")
    ScannedDataset('purchases', 3 rows, 3 features)

    `scan_parquet` returns it. With several processes, each reads the rows that its devices
    train on.

    Attributes:
      path: file, folder or address.
      vocabulary: `[features]` names, or the prepared folder that has them.
      indicator: whether every entry is 1.
      chunk_rows: approximate number of rows of a chunk; None for as many as fit the devices.
      groups: row groups, in order.
      layout: columns of a table; None for a saved data set.
    """

    path: Path
    vocabulary: Names | DataFolder
    indicator: bool
    chunk_rows: int | None
    groups: tuple[Group, ...]
    layout: TableLayout | None = None

    @property
    def num_features(self) -> int:
        if isinstance(self.vocabulary, DataFolder):
            return self.vocabulary.manifest.num_items
        return len(self.vocabulary)

    @functools.cached_property
    def feature_names(self) -> Names:
        """`[features]` names. Those of a prepared folder are read at the first use.

        Raises:
          DataError: the file with the names is damaged.
        """
        if isinstance(self.vocabulary, DataFolder):
            return self.vocabulary.vocabulary()
        return self.vocabulary

    def _lists(self, names: Iterable[str]) -> list[str]:
        return ["indices"] if self.indicator else ["indices", "values"]

    def _joined(self, parts: list[Entries]) -> CSR:
        return self._shared(parts)[0]

    def _shared(self, parts: list[Entries]) -> tuple[CSR, float]:
        """The matrix of all parts, and the share of entries whose items are in the vocabulary."""
        nothing = Entries.of(
            np.zeros(1, np.int64),
            indices=np.empty(0, np.int32),
            values=None if self.indicator else np.empty(0, np.float32),
        )
        rows = Entries.joined([nothing, *parts])
        if (count := len(rows.indices)) > MAX_ENTRIES:
            raise ValueError(
                f"{count:,} entries do not fit in int32 offsets (2^31 - 1); scan with a "
                "smaller chunk_rows"
            )
        if self.layout is None:
            return self._checked(rows, "is damaged: "), 1.0
        kept = self._known(rows)
        # With int64 offsets, SciPy would also convert the indices to int64.
        matrix = scipy.sparse.csr_array(
            (
                kept.columns.get("values", np.ones(len(kept.indices), bool)),
                kept.indices,
                as_int32("indptr", kept.indptr),
            ),
            shape=(kept.num_rows, self.num_features),
        )
        matrix.sum_duplicates()  # this also sorts
        with np.errstate(over="ignore"):  # CSR refuses infinite values
            values = None if self.indicator else matrix.data.astype(np.float32)
        merged = Entries.of(matrix.indptr, indices=matrix.indices, values=values)
        # Sums of finite values may overflow to infinity.
        return self._checked(merged, ""), len(kept.indices) / max(count, 1)

    def _checked(self, rows: Entries, problem: str) -> CSR:
        try:
            return rows.csr(self.num_features)
        except ValueError as error:
            raise DataError.at(self.path, f"{problem}{error}") from error


def scan_parquet(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    features: Features = None,
    indicator: bool = False,
    chunk_rows: int | None = None,
) -> ScannedDataset:
    """Scans Parquet files without loading their rows, so that `fit` reads them in chunks.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases").num_rows
    3

    Use it for data that is larger than the memory of the devices or of a host. While `fit`
    trains on a chunk, it reads the next one. Each epoch has another order of the chunks
    and of the rows within each chunk. Rows of different chunks are not mixed: shuffle the
    rows once, when you write the files.

    The files hold one of these:

    * a folder that `sparsejax.prepare` wrote. Only its manifest is read at first, however
      many files it has, and its rows are shuffled already;
    * files of `SparseDataset.save` or `sparsejax convert`: the quickest to read;
    * a table with a list of items on each row, as `from_arrow` takes it. Each row is an
      example: rows of the same user are not merged, and a user column is not needed;
    * a table of pairs, sorted by its user column: integers by size, text by its bytes,
      as databases do. That column is read once, to find where users begin.

    Args:
      path: a file or a folder of files of one kind, or an address; see `read_parquet`.
        Saved files of one folder must have equal vocabularies (`convert --features`).
      user: name of the column with the row's name, for a table; see `from_arrow`.
      item: name of the column with the feature's name, or with a list of names.
      value: name of the column with the value, or with a list of values.
      features: vocabulary of a table. Without it the item column is read once more, and the
        vocabulary is its items. They have the order of `read`, except that an item counts
        twice if a user has it twice.
      indicator: ignore values.
      chunk_rows: approximate number of rows that are on the devices at a time, in whole row
        groups (a saved data set has groups of 65,536 rows). By default all rows, if they take
        less than a quarter of the memory of the devices that training uses, otherwise as many
        as take an eighth of it.

    Raises:
      DataError: a file is of another kind, is damaged, or differs from the first one.
        Pairs are not sorted.
      ValueError: `chunk_rows` is not positive. Columns or `features` are given for a saved
        data set.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    chosen = Chosen(user, item, value)
    if (folder := DataFolder.find(path, histories=False)) is not None:
        _check_own(path, chosen, features)
        return ScannedDataset(
            path,
            folder,
            indicator or folder.manifest.indicator,
            chunk_rows,
            tuple(folder.groups()),
        )
    files = parquet.parquet_files(path)
    first, schema = parquet.first_schema(files)
    parquet.check_no_part(first, schema)
    form = stored.form_of(schema)
    if form is not None and form.has_rows:
        _check_own(path, chosen, features)
        valued = lambda schema: "values" in schema.names
        found = SavedFiles.of(files, "values", valued, form=stored.ITEMS)
        names, are_ones = found.features, indicator or not found.kind
        return ScannedDataset(path, names, are_ones, chunk_rows, found.groups)
    layout = tables.find_table_layout(
        first, schema, chosen, indicator=indicator, with_user=False, with_time=False
    )
    groups, names, _ = scan_tables.find_rows(path, files, layout, features)
    valued = layout.value is not None
    scanned = ScannedDataset(path, names, not valued, chunk_rows, groups, layout)
    if features is not None:
        # Decoding the first group finds mistakes in the files early.
        first = scanned._decode(groups[0], 0, groups[0].rows)
        _, share = scanned._shared([first])
        if share == 0:
            raise DataError.at(
                path,
                "all entries of the first row group are of features that the vocabulary "
                f"lacks; it has {quoted(names)}",
            )
    return scanned


def _check_own(path: Path, chosen: Chosen, features: Features) -> None:
    """Raises ValueError if the caller chooses columns or features of a saved data set."""
    if chosen or features is not None:
        raise ValueError(
            f"{shown(path)}: is a saved data set, so it has no columns to name and "
            "has its own vocabulary; leave out user, item, value and features"
        )
