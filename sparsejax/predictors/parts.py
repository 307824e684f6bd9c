"""Recommendations for a prepared folder, in numbered parts that any scheduler can compute.

::

    part-ID-00000.parquet   row, items, scores: for some row groups of the folder
    part-ID-00001.parquet   ...
    _manifest.json          written when all parts are complete

A part is a fixed set of row groups. Its file is renamed into place when complete, and never
written again. `ID` is a hash of the predictor, the data and the settings. A folder contains the
parts of one prediction.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax import codec
from sparsejax.data.files import arrow
from sparsejax.data.files.entries import Entries, offsets
from sparsejax.data.files.names import to_arrow
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.parquet import ParquetPath
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared.folder import DataFolder, read_rows, vocabulary_hash
from sparsejax.data.scan import Group
from sparsejax.engine.rank.loop import one_late
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.predictors.files import load_same_predictor, predictor_identity
from sparsejax.predictors.predictor import Predictor

_VERSION = 1
# The name begins with an underscore, because readers of Parquet folders skip such names.
_MANIFEST = "_manifest.json"
_KEY = b"sparsejax.recommendations"
_SHOWN = 10  # maximum of numbers of missing parts in a message
_AT_ONCE = 16  # parts checked at a time, as a store answers slowly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A prediction in parts; see `Parts.of`.

    Attributes:
      identity: hash of the predictor, the data and the settings.
      arguments: arguments of `Parts.of`, as plain values. From these another process makes an
          equal prediction, unless files have changed.
      predictor: hash of the predictor's content.
      data: path of the prepared folder.
      out: path of the output folder.
      count: number of parts.
      k: number of items for each row.
      exclude_seen: whether items that a row already has are excluded.
      indicator: whether values are ignored.
    """

    identity: str
    arguments: dict[str, Any]
    predictor: str
    data: DataFolder
    out: Place
    count: int
    k: int
    exclude_seen: bool
    indicator: bool

    @classmethod
    def of(
        cls,
        predictor: Path,
        data: Path,
        out: Path,
        *,
        count: int,
        k: int,
        exclude_seen: bool,
        indicator: bool = False,
    ) -> Parts:
        """Describes a prediction in parts, without computing it.

        Args:
          predictor: path or URL of a file written by `export_predictor`.
          data: path or URL of a folder written by `sparsejax.prepare`.
          out: path or URL of the output folder, which the first part makes.
          count: number of parts. If it exceeds the number of row groups, some parts are empty.
          k: number of items for each row.
          exclude_seen: whether items that a row already has are excluded.
          indicator: whether values are ignored, as in the training of the model.

        Raises:
          DataError: `data` is not a prepared folder.
          ValueError: `count` is not positive, or `predictor` is not a predictor.
        """
        if count < 1:
            raise ValueError(f"parts must be 1 or more, got {count}")
        folder = DataFolder.find(data, histories=False)
        if folder is None:
            raise DataError.at(
                data,
                "is no prepared folder, which prediction in parts needs; make one with "
                "sparsejax prepare",
            )
        content = predictor_identity(predictor)
        facts = [
            _VERSION,
            content,
            folder.manifest.vocabulary,
            [(g.file.crc32, g.number) for g in folder.groups()],
            [count, k, exclude_seen, indicator],
        ]
        identity = hashlib.blake2b(codec.text(facts).encode(), digest_size=8)
        paths = {"predictor": predictor, "data": data, "out": out}
        return cls(
            identity=identity.hexdigest(),
            arguments={name: os.fspath(path) for name, path in paths.items()}
            | {"count": count, "k": k}
            | {"exclude_seen": exclude_seen, "indicator": indicator},
            predictor=content,
            data=folder,
            out=Place.of(out),
            count=count,
            k=k,
            exclude_seen=exclude_seen,
            indicator=indicator,
        )

    def groups(self, part: int) -> list[Group]:
        """The row groups that belong to a part."""
        groups = self._groups
        ends = [number * len(groups) // self.count for number in (part, part + 1)]
        return groups[slice(*ends)]

    @functools.cached_property
    def _groups(self) -> list[Group]:
        return self.data.groups()

    def load_predictor(self) -> Predictor:
        """Loads the predictor.

        Raises:
          OSError: the file cannot be read.
          ValueError: the file is damaged, or was replaced.
        """
        return load_same_predictor(self.arguments["predictor"], self.predictor)

    def missing(self) -> list[int]:
        """The numbers of the parts that are not complete."""
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            complete = list(threads.map(self.is_complete, range(self.count)))
        return [part for part in range(self.count) if not complete[part]]

    def is_complete(self, part: int) -> bool:
        """Whether the file of a part exists. It is complete if it exists."""
        place = self._place(part)
        size = place.size()
        if size is None:
            return False
        try:
            file = ParquetPath(place.path, place.filesystem, place.inner, size)
            with file.open() as opened:
                metadata = opened.schema_arrow.metadata or {}
                rows = opened.metadata.num_rows
        except DataError:
            return False
        wanted = sum(group.rows for group in self.groups(part))
        return metadata.get(_KEY) == self.identity.encode() and rows == wanted

    def write(self, part: int, load: Callable[[], Predictor]) -> bool:
        """Writes a part, unless it is complete; returns whether it was written.

        Args:
          part: number of the part, from 0.
          load: function that returns the predictor, such as `load_predictor`. It is called only if
              the part is written.

        Raises:
          DataError: a file of the data is damaged.
          OSError: the part cannot be written.
          ValueError: `part` is out of range, or the predictor has no item names or other names
              than the data. Or `out` has parts of another prediction.
        """
        if not 0 <= part < self.count:
            raise ValueError(
                f"part is {part}, but the {self.count:,} parts have the numbers 0 to "
                f"{self.count - 1:,}"
            )
        if self.is_complete(part):
            return False
        self._check_out()
        predictor = load()
        self._check(predictor)
        schema = _SCHEMA.with_metadata({_KEY: self.identity.encode()})
        with (
            self._place(part).writing() as file,
            pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                # Values of the other columns rarely repeat, so dictionaries would only cost time
                # and space.
                use_dictionary=["items.list.element"],
                write_page_checksum=True,
            ) as writer,
        ):
            self._write_groups(self.groups(part), predictor, writer)
        return True

    def finish(self) -> None:
        """Writes the manifest, when all parts are complete.

        Raises:
          ValueError: parts are missing, whose numbers the message gives. Or `out` has parts of
              another prediction.
        """
        self._check_out()
        missing = self.missing()
        if missing:
            numbers = ", ".join(map(str, missing[:_SHOWN]))
            more = ", ..." if len(missing) > _SHOWN else ""
            raise ValueError(
                f"{shown(self.out.path)}: {len(missing):,} of {self.count:,} parts are "
                f"missing: {numbers}{more}"
            )
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            files = list(threads.map(self._stated, range(self.count)))
        manifest = _Manifest(
            kind="recommendations",
            id=self.identity,
            k=self.k,
            exclude_seen=self.exclude_seen,
            indicator=self.indicator,
            files=files,
        )
        text = codec.text({"version": _VERSION, **codec.document(manifest)}, indent=1)
        with self.out.below(_MANIFEST).writing() as file:
            file.write(text.encode())

    def _stated(self, part: int) -> _Written:
        """The entry of a part in the manifest."""
        rows = sum(group.rows for group in self.groups(part))
        return _Written(self._name(part), self._place(part).size(), rows)

    def _name(self, part: int) -> str:
        return f"part-{self.identity}-{part:05}.parquet"

    def _place(self, part: int) -> Place:
        return self.out.below(self._name(part))

    def _check(self, predictor: Predictor) -> None:
        if predictor.items is None:
            raise ValueError(
                "the predictor has no names of items; export it again, with them"
            )
        _, vocabulary = _names_of(predictor)
        if vocabulary != self.data.manifest.vocabulary:
            raise ValueError(
                f"{shown(self.data.place.path)} has other items than the predictor, or "
                "another order of them; prepare the data with the vocabulary that the "
                "model was trained on as its features"
            )

    def _check_out(self) -> None:
        """Raises ValueError if the output folder contains parts of another prediction."""
        names = [n for n in self.out.names() if n.startswith("part-")]
        others = [n for n in names if not n.startswith(f"part-{self.identity}-")]
        if others:
            raise ValueError(
                f"{shown(self.out.path)}: has parts of another prediction, such as "
                f"{min(others)}; name another folder. Each predictor, data set, k and number "
                "of parts needs a folder of its own"
            )

    def _write_groups(
        self, groups: Iterable[Group], predictor: Predictor, writer: pq.ParquetWriter
    ) -> None:
        """Writes recommendations for row groups, in their order.

        While the device computes a group, a thread writes the previous group and reads the next.
        So at most three groups are in memory.
        """
        items, _ = _names_of(predictor)

        def write(rows: Entries, found: Recommendations) -> None:
            writer.write_table(_table(rows, found, items))

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            read = (thread.submit(read_rows, group) for group in groups)
            written = (
                thread.submit(write, rows, self._recommend(rows, predictor))
                for rows in (reading.result() for reading in one_late(read))
            )
            for writing in one_late(written):
                writing.result()

    def _recommend(self, rows: Entries, predictor: Predictor) -> Recommendations:
        size = self.data.manifest.num_items
        if self.indicator:
            rows = rows.replaced(values=None)
        matrix = rows.csr(size)
        exclude = matrix if self.exclude_seen else None
        return predictor.recommend(matrix, k=self.k, exclude=exclude)


@dataclasses.dataclass(frozen=True)
class _Written:
    """The entry of a part's file in the manifest."""

    path: str
    size: int | None
    rows: int


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """The content of `_manifest.json`, without its version."""

    kind: str
    id: str
    k: int
    exclude_seen: bool
    indicator: bool
    files: Sequence[_Written]


_SCHEMA = pa.schema(
    {
        "row": pa.large_string(),
        "items": pa.list_(pa.large_string()),
        "scores": pa.list_(pa.float32()),
    }
)


# A cache by predictor: a process may write many small parts with one predictor.
_named: weakref.WeakKeyDictionary[Predictor, tuple[pa.LargeStringArray, str]] = (
    weakref.WeakKeyDictionary()
)


def _names_of(predictor: Predictor) -> tuple[pa.LargeStringArray, str]:
    """The names of a predictor's items, and a hash of them."""
    assert predictor.items is not None  # `write` has checked it
    if predictor not in _named:
        names = to_arrow(predictor.items), vocabulary_hash(predictor.items)
        _named[predictor] = names
    return _named[predictor]


def _table(
    rows: Entries, found: Recommendations, items: pa.LargeStringArray
) -> pa.Table:
    """A table of the recommendations for some rows. `items` are the names of all items."""
    is_item = found.ids >= 0
    ends = arrow.from_numbers(offsets(is_item.sum(axis=1)))
    names = items.take(arrow.from_numbers(found.ids[is_item]))
    scores = arrow.from_numbers(found.scores[is_item])
    columns = [
        rows.of_rows["names"],
        pa.ListArray.from_arrays(ends, names),
        pa.ListArray.from_arrays(ends, scores),
    ]
    return pa.table(columns, schema=_SCHEMA)
