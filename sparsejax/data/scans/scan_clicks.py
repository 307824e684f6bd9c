"""Scans examples of clicks on disk, to read them a part at a time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa

from sparsejax import codec
from sparsejax.data.events.block import Cells
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import parquet
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import DataError
from sparsejax.data.scan import Group, Scan
from sparsejax.data.sets.click_columns import (
    CategoryCounter,
    ColumnReader,
    Numbered,
    categories_of,
    dense_of,
    labels_of,
    propensities_of,
    weights_of,
)
from sparsejax.data.sets.click_files import (
    Paths,
    as_paths,
    click_blocks,
    click_groups,
    group_cells,
)
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    features_of,
    num_ids,
    vocabulary_columns,
    without_time,
)
from sparsejax.data.sets.click_storage import (
    Ids,
    facts_of,
    stored_columns,
    stored_examples,
    stored_vocabularies,
)
from sparsejax.data.sets.clicks import ClickDataset, join_ids, known_vocabularies
from sparsejax.sparse import CSR


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedClicks(Scan[ClickDataset, ClickDataset]):
    """Examples of clicks on disk, which are read a chunk at a time.

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n0,ann\\n")
    >>> schema = ClickSchema("click", ids={"user": VocabularyColumn()})
    >>> scanned = scan_clicks("clicks.csv", schema, chunk_rows=2)
    >>> [chunk.ids["user"].tolist() for chunk in scanned.chunks()]
    [[2, 3], [2]]

    `scan_clicks` returns it.

    Attributes:
      path: path of the file, of several files, or of a folder, or an address.
      schema: types of the columns.
      vocabularies: categories of each `VocabularyColumn`, by name; see `ClickDataset`.
      chunk_rows: number of examples of a chunk; the last one may have fewer.
      is_saved: whether `ClickDataset.save` wrote the files.
    """

    kind: ClassVar[str] = "clicks"

    path: Paths
    schema: ClickSchema
    vocabularies: Mapping[str, Names]
    chunk_rows: int
    is_saved: bool = False

    def __repr__(self) -> str:
        return (
            f"ScannedClicks({self.path!r}, {len(self.schema.dense)} dense, "
            f"{len(self.schema.ids)} features)"
        )

    @property
    def num_ids(self) -> dict[str, int]:
        """The number of ids of each feature, which is the number of rows of its table."""
        return num_ids(self.schema, self.vocabularies)

    @property
    def features(self) -> dict[str, int | str]:
        """The features of a model for this data; see `ClickDataset.features`."""
        return features_of(self.schema, self.vocabularies)

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of examples. Text files are read once to count them."""
        if self._groups is not None:
            return sum(group.rows for group in self._groups)
        label = [self.schema.label]
        blocks = click_blocks(self.path, self.schema, label)
        return sum(len(block.columns[label[0]]) for block in blocks)

    def read(self, start: int, stop: int) -> ClickDataset:
        """Reads the examples `start .. stop - 1` of Parquet files.

        Raises:
          DataError: a file cannot be read, a line of it is wrong (see `read_clicks`), or a
            file was changed.
          NotImplementedError: a file is text, which can be read in order only.
          ValueError: the range is empty, or outside the data set.
        """
        self._row_groups  # noqa: B018 - text is an error
        if not 0 <= start < stop <= self.num_rows:
            raise ValueError(
                f"expected 0 <= start < stop <= {self.num_rows:,}, got {start:,}, {stop:,}"
            )
        return super().read(start, stop)

    def _decode(self, group: Group, low: int, high: int) -> ClickDataset:
        return self._of_block(group_cells(group, self._columns, low, high))

    def fingerprint(self) -> str:
        """A hash of the columns, the vocabularies and the files' metadata.

        Raises:
          NotImplementedError: a file is text.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(codec.text(self.schema.to_json()).encode())
        for name, known in self.vocabularies.items():
            digest.update("\0".join([name, *known.tolist()]).encode())
        for group in self._row_groups:
            cells = group.file.cells(self._columns)
            facts = (group.file.size, group.number, group.rows, *cells)
            digest.update(repr(facts).encode())
        return digest.hexdigest()

    def chunks(self, *, first: int = 0) -> Iterator[ClickDataset]:
        """Yields the examples in the order of the files, `chunk_rows` at a time.

        Args:
          first: number of chunks to skip at the beginning, to continue after an
            interruption.

        Raises:
          DataError: a file cannot be read, or a line of it is wrong (see `read_clicks`).
        """
        skip = first * self.chunk_rows
        waiting: list[ClickDataset] = []
        for block in click_blocks(self.path, self.schema, self._columns):
            label = block.columns[self._columns[0]]
            rows = len(label) - (label.null_count if self.is_saved else 0)
            if rows <= skip:
                skip -= rows
                continue
            waiting.append(self._of_block(block).rows(slice(skip, None)))
            skip = 0
            if sum(part.num_rows for part in waiting) < self.chunk_rows:
                continue
            all_ = self._joined(waiting)
            last = all_.num_rows - all_.num_rows % self.chunk_rows
            for start in range(0, last, self.chunk_rows):
                yield all_.rows(slice(start, start + self.chunk_rows))
            waiting = [all_.rows(slice(last, None))]
        if any(part.num_rows for part in waiting):
            yield self._joined(waiting)

    @property
    def _columns(self) -> list[str]:
        """The names of the columns to read from the files, labels first."""
        return stored_columns(self.schema) if self.is_saved else self.schema.used

    @functools.cached_property
    def _reader(self) -> ColumnReader:
        return ColumnReader(self.schema, self.vocabularies)

    @functools.cached_property
    def _groups(self) -> list[Group] | None:
        """The row groups of all files; None if a file is a text file."""
        found: list[Group] = []
        for path in as_paths(self.path):
            if not is_parquet(path):
                return None
            for source in parquet.parquet_files(path):
                groups = click_groups(source)
                if self.is_saved:
                    with source.open() as file:
                        rows = facts_of(source.path, file.schema_arrow).rows
                    groups = [
                        group._replace(rows=min(group.rows, rows - group.first))
                        for group in groups
                        if group.first < rows
                    ]
                found += groups
        return found

    @property
    def _row_groups(self) -> list[Group]:
        if self._groups is None:
            raise NotImplementedError(
                "text files can be read in order only, by chunks(); save them as Parquet, "
                "chunk by chunk, to read any part of them"
            )
        return self._groups

    def _of_block(self, block: Cells) -> ClickDataset:
        if self.is_saved:
            try:
                parts = stored_examples(block.columns, self.schema, self.vocabularies)
                return ClickDataset(**parts._asdict())
            except (ValueError, pa.ArrowException) as error:
                raise DataError.at(block.path, f"is damaged: {error}") from error
        found, sizes = self._reader.categories(block), self.num_ids
        numbered = self._reader.numbered(found).items()
        return ClickDataset(
            labels_of(block, self.schema),
            dense_of(block, self.schema.dense),
            {n: join_ids(block.path, n, [each], sizes[n]) for n, each in numbered},
            self.schema,
            self.vocabularies,
            weights=weights_of(block, self.schema),
            propensities=propensities_of(block, self.schema),
        )

    def _joined(self, parts: list[ClickDataset]) -> ClickDataset:
        if len(parts) == 1:
            return parts[0]
        ids: dict[str, Ids] = {}
        for name, size in self.num_ids.items():
            each = [part.ids[name] for part in parts]
            numbered = [
                Numbered(np.asarray(x.indices), np.diff(x.indptr))
                if isinstance(x, CSR)
                else Numbered(x, None)
                for x in each
            ]
            ids[name] = join_ids(self.path, name, numbered, size)
        weights = [part.weights for part in parts if part.weights is not None]
        seen = [p.propensities for p in parts if p.propensities is not None]
        return ClickDataset(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            ids,
            self.schema,
            self.vocabularies,
            weights=np.concatenate(weights) if weights else None,
            propensities=np.concatenate(seen) if seen else None,
        )


def scan_clicks(
    path: Paths,
    schema: ClickSchema | None = None,
    *,
    features: ClickDataset | ScannedClicks | Mapping[str, Names] | None = None,
    chunk_rows: int = 2**20,
) -> ScannedClicks:
    """Scans examples of clicks without loading them, for data larger than memory.

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n")
    >>> schema = ClickSchema("click", ids={"user": HashedColumn(100)})
    >>> scan_clicks("clicks.csv", schema).num_rows
    2

    Args:
      path: a file, a list of files that are read in this order, a folder, or an address
        of Parquet files.
      schema: types of the columns; None for files of `ClickDataset.save`, which contain
        them. Such files are the quickest to read.
      features: categories that get ids of their own, or other data that has them. By default
        the files are read once to count categories; distinct categories are kept in memory.
        Hashed columns need no such pass.
      chunk_rows: number of examples of a chunk.

    Raises:
      DataError: a file cannot be read (see `read_clicks`), or saved files have different
        schemas or vocabularies.
      ValueError: `chunk_rows` is not positive; `features` lacks a column, or is given for
        saved files.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    if schema is None:
        if features is not None:
            raise ValueError("saved files know their categories: leave out features")
        return _scan_saved(path, chunk_rows)
    if isinstance(features, ScannedClicks):
        features = features.vocabularies
    schema = without_time(schema)
    known = known_vocabularies(schema, features)
    if known is None:
        columns, counter, rows = vocabulary_columns(schema), CategoryCounter(schema), 0
        for block in click_blocks(path, schema, [*schema.targets, *columns]):
            rows += len(labels_of(block, schema))
            counter.add({name: categories_of(block, name) for name in columns})
        if not rows:
            raise DataError.at(as_paths(path)[0], "holds no examples")
        known = counter.finish()
    return ScannedClicks(path, schema, known, chunk_rows)


def _scan_saved(path: Paths, chunk_rows: int) -> ScannedClicks:
    """Scans files of `ClickDataset.save`, which must have equal schemas and vocabularies."""
    first: ScannedClicks | None = None
    for each in as_paths(path):
        for source in parquet.parquet_files(each):
            with source.open() as file:
                facts = facts_of(source.path, file.schema_arrow)
                vocabularies = stored_vocabularies(source.path, file, facts)
            schema = without_time(facts.schema)
            if first is None:
                first = ScannedClicks(path, schema, vocabularies, chunk_rows, True)
            elif schema != first.schema or any(
                not np.array_equal(vocabularies[name], known)
                for name, known in first.vocabularies.items()
            ):
                raise DataError.at(
                    source.path,
                    "has another schema or vocabulary than the first file; read all with "
                    "one vocabulary: read_clicks(..., features=train)",
                )
    assert first is not None  # `path` has a file
    return first
