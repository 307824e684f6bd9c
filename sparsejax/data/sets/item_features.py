"""Features of items: tags, numbers and vectors, with a row for each item."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse

from sparsejax.data.files import arrow, stored
from sparsejax.data.files import names as _names
from sparsejax.data.files.names import FeatureNames, Names
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.sets import vocabulary

VERSION = 1
# A number at least this many deviations from the mean probably stands for a missing number.
_FAR = 1e6


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ItemFeatures:
    """Features of items, in host memory; `sparsejax.read_item_features` reads them.

    >>> features = read_item_features([
    ...     {"item": "tea", "kind": "drink", "words": ["green", "leaf"]},
    ...     {"item": "rice", "kind": "food", "words": ["white"]},
    ... ])
    >>> features.tag_names.tolist()
    ['kind=drink', 'kind=food', 'words=green', 'words=leaf', 'words=white']
    >>> features.align(["rice", "salt"]).num_empty
    1

    Attributes:
      item_names: `[items]` names of the items.
      tag_names: `[tags]` names of the tags.
      tags: `[items, tags]` float32, a SciPy matrix. A tag or a word has the value 1, and a
        number its standardized value, as `numbers` describes.
      vectors: `[items, d]` float16 or float32, for example of texts or images; or None.
        An item without a vector has zeros.
      numbers: mean and standard deviation of each tag that is a number, by the name of the
        tag. Its values in `tags` have the mean subtracted and are divided by the deviation.
        The deviation is 0 if all numbers are equal; such a number carries no information.
      columns: the use of each column of the source, by its name: number, category, tags,
        words or vector; or the reason why it was left out.
    """

    item_names: Names
    tag_names: Names
    tags: scipy.sparse.csr_array
    vectors: np.ndarray | None = None
    numbers: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _names.check_unique(self.item_names, "item")
        _names.check_unique(self.tag_names, "tag")
        shape = len(self.item_names), len(self.tag_names)
        if self.tags.shape != shape:
            raise ValueError(f"tags has the shape {self.tags.shape}, expected {shape}")
        if self.vectors is not None and len(self.vectors) != shape[0]:
            raise ValueError(
                f"vectors has {len(self.vectors):,} rows, but there are {shape[0]:,} items"
            )

    def __repr__(self) -> str:
        parts = [f"{self.num_items:,} items", f"{len(self.tag_names):,} tags"]
        if self.vectors is not None:
            parts.append(f"vectors of {self.vectors.shape[1]:,} {self.vectors.dtype}")
        return f"ItemFeatures({', '.join(parts)})"

    @property
    def num_items(self) -> int:
        return len(self.item_names)

    @property
    def is_empty(self) -> np.ndarray:
        """`[items]` bool: whether an item has no tag, number or vector."""
        says = np.ones(len(self.tag_names), bool)
        for name, (_, deviation) in self.numbers.items():
            says[self.tag_names == name] = deviation > 0
        sums = np.append(0, np.cumsum(says[self.tags.indices]))[self.tags.indptr]
        empty = np.diff(sums) == 0
        if self.vectors is not None:
            empty &= ~self.vectors.any(axis=1)
        return empty

    @property
    def num_empty(self) -> int:
        """Number of items without a tag, number or vector."""
        return int(self.is_empty.sum())

    def names_after(self, items: FeatureNames | Iterable[object]) -> Names:
        """The names of the given items, followed by the items here that are new.

        Use it to add items without events to data:
        `data.align_features(features.names_after(data))`.
        """
        known = _names.of_features(items)
        return vocabulary.appended(known, _names.spelled_like(self.item_names, known))

    def align(self, items: FeatureNames | Iterable[object]) -> ItemFeatures:
        """Selects the features of the given items, in their order.

        An item without features here gets an empty row.

        Args:
          items: names, or a data set whose feature names are used.

        Raises:
          ValueError: no item has features here, so these are features of other items.
        """
        wanted = _names.of_features(items)
        own = _names.spelled_like(self.item_names, wanted)
        found = _names.find_names(wanted, own)
        if len(wanted) and not (found >= 0).any():
            raise ValueError(
                f"none of {len(wanted):,} items ({_names.quoted(wanted)}) has content: it is "
                f"of others ({_names.quoted(own)}); are these the same names?"
            )
        # Absent items select the last row, which is empty.
        tags = self.tags.copy()
        tags.resize((self.num_items + 1, tags.shape[1]))
        vectors = self.vectors
        if vectors is not None:
            taken = np.zeros((len(wanted), vectors.shape[1]), vectors.dtype)
            taken[found >= 0] = vectors[found[found >= 0]]
            vectors = taken
        return dataclasses.replace(
            self,
            item_names=wanted,
            tags=scipy.sparse.csr_array(
                tags[np.where(found < 0, self.num_items, found)]
            ),
            vectors=vectors,
        )

    def like(self, known: ItemFeatures) -> ItemFeatures:
        """Converts these features to the tags, units and vector dtype of other ones.

        So features of new items fit a model. Tags that `known` lacks are left out, and so are
        numbers that are equal for all items of `known`.

        Raises:
          ValueError: the widths of the vectors differ, no tag is known, or a number is too
            far from those of `known`.
        """
        width, others = (
            0 if each.vectors is None else each.vectors.shape[1]
            for each in (self, known)
        )
        if width != others:
            raise ValueError(
                f"these items have vectors of {width:,} numbers, but those that the model "
                f"knows have {others:,}; make them by the same model of texts or images"
            )
        place = _names.find_names(self.tag_names, known.tag_names)
        if len(known.tag_names) and not (place >= 0).any():
            have = (
                _names.quoted(self.tag_names)
                if len(self.tag_names)
                else "there is none"
            )
            raise ValueError(
                f"no tag ({have}) is one that the model knows "
                f"({_names.quoted(known.tag_names)}); give the same columns"
            )
        tags = scipy.sparse.coo_array(self.tags)
        row, column = tags.coords
        values = tags.data.astype(np.float64)
        kept = place[column] >= 0
        for name, (mean, deviation) in self.numbers.items():
            if name in known.numbers:
                at = column == np.flatnonzero(self.tag_names == name)[0]
                center, unit = known.numbers[name]
                if not unit:  # the number is equal for all items that the model knows
                    kept &= ~at
                    continue
                with np.errstate(over="ignore"):
                    own = values[at] * deviation + mean
                    values[at] = found = (own - center) / unit
                if (far := ~(np.abs(found) <= _FAR)).any():
                    bad = int(np.argmax(far))
                    item = str(self.item_names[row[at][bad]])
                    raise ValueError(
                        f"{name!r} of item {item!r} is {own[bad]:g}, but those that the "
                        f"model knows are {center:g} on average, with a deviation of "
                        f"{unit:g}; leave the cell empty where a number is missing"
                    )
        shape = self.num_items, len(known.tag_names)
        made = scipy.sparse.csr_array(
            (values[kept], (row[kept], place[column[kept]])), shape=shape
        )
        vectors = self.vectors
        if vectors is not None and known.vectors is not None:
            vectors = vectors.astype(known.vectors.dtype)
        return dataclasses.replace(
            self,
            tag_names=known.tag_names,
            tags=made.astype(np.float32),
            numbers=known.numbers,
            vectors=vectors,
        )

    def save(self, path: Path) -> None:
        """Writes the features as a Parquet file that `load` reads, whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        ends = arrow.from_numbers(self.tags.indptr.astype(np.int64))
        columns: dict[str, pa.Array] = {
            "item": _names.to_arrow(self.item_names),
            "tags": pa.LargeListArray.from_arrays(
                ends, arrow.from_numbers(self.tags.indices.astype(np.int32))
            ),
            "values": pa.LargeListArray.from_arrays(
                ends, arrow.from_numbers(self.tags.data.astype(np.float32))
            ),
            "tag": _names.to_arrow(self.tag_names),
        }
        if self.vectors is not None:
            count, width = self.vectors.shape
            columns["vector"] = pa.LargeListArray.from_arrays(
                arrow.from_numbers(np.arange(count + 1, dtype=np.int64) * width),
                arrow.from_numbers(self.vectors.reshape(-1)),
            )
        facts: dict[str, Any] = {"version": VERSION, "numbers": dict(self.numbers)}
        facts["columns"] = dict(self.columns)
        document = json.dumps(facts).encode()
        metadata = {_CHECKSUM: self.fingerprint().encode()}
        stored.write(
            path, stored.ITEM_FEATURES, columns, document, metadata, group_rows=2**14
        )

    @classmethod
    def load(cls, path: Path) -> ItemFeatures:
        """Reads a file that `save` wrote.

        Raises:
          DataError: the file is missing, has another format, or is damaged.
        """
        with stored.one_file(path).open() as file:
            schema = file.schema_arrow
            stored.ITEM_FEATURES.check(path, schema)
            facts = json.loads(stored.ITEM_FEATURES.stated(schema))
            if facts["version"] != VERSION:
                raise DataError.at(
                    path,
                    f"is of version {facts['version']}, but this release reads version "
                    f"{VERSION}; install a newer release",
                )
            table = file.read()
            columns = {
                name: table.column(name).combine_chunks().drop_null()
                for name in table.column_names
            }
            items, tags = (_names.as_names(columns[name]) for name in ("item", "tag"))
            lengths = arrow.numbers(columns["tags"].value_lengths())
            flat = {
                name: arrow.numbers(column.flatten())
                for name, column in columns.items()
                if name in ("tags", "values", "vector")
            }
            matrix = scipy.sparse.csr_array(
                (flat["values"], flat["tags"], np.append(0, np.cumsum(lengths))),
                shape=(len(items), len(tags)),
            )
            vectors = None
            if "vector" in flat:
                vectors = flat["vector"].reshape(len(items), -1)
            numbers = {name: tuple(pair) for name, pair in facts["numbers"].items()}
            made = cls(
                item_names=items,
                tag_names=tags,
                tags=matrix,
                vectors=vectors,
                numbers=numbers,
                columns=facts.get("columns", {}),  # absent before November 2026
            )
        if (schema.metadata or {}).get(_CHECKSUM) != made.fingerprint().encode():
            raise DataError.at(
                path, "is damaged: its checksum does not fit its content"
            )
        return made

    def fingerprint(self) -> str:
        """A checksum of the names, the tags, the units of numbers, and the vectors."""
        leaves = [stored.names_as_bytes(n) for n in (self.item_names, self.tag_names)]
        leaves += [
            self.tags.indptr.astype(np.int64).tobytes(),
            self.tags.indices.astype(np.int32).tobytes(),
            self.tags.data.astype(np.float32).tobytes(),
            b""
            if self.vectors is None
            else np.ascontiguousarray(self.vectors).tobytes(),
            json.dumps(dict(self.numbers)).encode(),
        ]
        return f"{stored.checksum(leaves):08x}"


_CHECKSUM = b"sparsejax.item_features.crc32"
