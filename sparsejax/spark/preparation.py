"""Prepares events in a data frame of Spark: writes a folder of sorted rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.callers import needing
from sparsejax.data.files import arrow
from sparsejax.data.files.names import Names, as_names, to_arrow
from sparsejax.data.files.opening import DataError, is_address, shown
from sparsejax.data.files.parquet import MANIFEST
from sparsejax.data.files.spelling import has_only_digits
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared import queries
from sparsejax.data.prepared.folder import (
    VERSION,
    DataFolder,
    Manifest,
    vocabulary_file,
    vocabulary_hash,
)
from sparsejax.data.prepared.folder_files import finish
from sparsejax.data.prepared.preparation import (
    Asked,
    Cut,
    all_held_out,
    all_unknown,
    check_prepared,
    check_same,
    frequent,
    prepared_before,
    repeats_left_out,
    warn_of_merged,
    with_left_out,
)
from sparsejax.data.sets.vocabulary import hand_starts
from sparsejax.options.option import verb
from sparsejax.options.reading import PrepareFrame
from sparsejax.spark.events import (
    PATH,
    FrameEvents,
    check_files,
    count_wrong,
    frame_events,
)
from sparsejax.spark.row_writing import WRITTEN, Found, Write
from sparsejax.spark.workers import check_workers, clear_errors, map_batches

# A task writes `TASK_ENTRIES` entries, which are a row group. If that would take more than
# `MANY_TASKS` tasks, each task writes more entries.
TASK_ENTRIES, MANY_TASKS, MANY_ENTRIES = 2**20, 256, 2**24

_BROADCAST_ITEMS = 2**20  # the codes of up to so many items go to all workers
_INDEX_BITS = 33  # bits of `monotonically_increasing_id` for the place in a partition


@verb(PrepareFrame)
def prepare(asked: PrepareFrame) -> Manifest:
    """Writes the events in a data frame of Spark as a prepared data set in a folder.

    ::

        session = SparkSession.builder.getOrCreate()
        frame = session.read.table("shop.purchases")
        sj.spark.prepare(frame, "s3://bucket/shop", split_last=1)

    Vocabulary, columns and values are equal to those that `sparsejax.prepare` and `read`
    make. The order of rows is another pseudo-random one. Tasks write the files by pyarrow,
    not by Spark, so they need pyarrow's credentials for the store. The driver holds the
    vocabulary, and writes the manifest last. A folder without a manifest is incomplete:
    repeat the call. It writes equal files for equal events and settings. If two calls write
    one folder at the same time, the manifest belongs to one of them.

    A frame whose plan has `limit`, `sample` or `repartition(n)` may have other rows each time
    that Spark computes it. Write such a frame to a table first, or set
    `spark.checkpoint.dir`: then its entries are written there once.

    Raises:
      DataError: a column cannot be found, or events are wrong: the message counts them and
        shows one. Or the frame reads the files of a Delta or another table without its log,
        or no entries remain, or none are held out.
      FileExistsError: `out` has a manifest of other events or settings. If they are equal,
        the existing manifest is returned and nothing is written.
      ImportError: pyspark is not installed.
      RuntimeError: the workers have another version of Python or of sparsejax. Or the
        frame had other rows when it was computed again.
      ValueError: an argument is wrong.
    """
    with needing("preparing data on Spark needs pyspark", "spark"):
        import pyspark  # noqa: F401
    settings, frame, out = Asked(asked), asked.frame, asked.out
    address = os.fspath(out) if is_address(out) else os.path.abspath(out)
    before = None  # a folder without a manifest is incomplete, and is written again
    if Place.of(address).below(MANIFEST).size() is not None:
        before = prepared_before(address, settings.settings)
    check_workers(frame.sparkSession)
    with contextlib.ExitStack() as kept, clear_errors("preparing the frame"):
        check_files(frame)
        events = frame_events(
            frame,
            settings.chosen,
            indicator=asked.indicator,
            with_time=settings.with_time,
        )
        preparation = _Preparation(
            frame.sparkSession, events, settings.cut, settings.settings, kept
        )
        return preparation.run(address, settings.known, before)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Counts and checksums of the (user, item) pairs.

    Attributes:
      entries: number of pairs.
      wrong: whether some events are wrong; a wrong event counts as a pair without a name.
      mixed: XOR of the hashes of all pairs.
      checksum: sum of the upper halves of the hashes.
      too_large: a pair whose sum of values is infinite, or None.
    """

    entries: int
    wrong: bool
    mixed: int
    checksum: int
    too_large: tuple[str, str] | None


@dataclasses.dataclass
class _Preparation:
    """Groups the events of a frame by user, splits them and writes the files of a folder.

    Attributes:
      kept: exit stack that drops temporary views and persisted data at the end of the call.
    """

    session: Any
    events: FrameEvents
    cut: Cut
    settings: Mapping[str, Any]
    kept: contextlib.ExitStack

    def run(self, out: str, known: Names | None, done: DataFolder | None) -> Manifest:
        """Writes the folder; if `done` is complete, only checks that its events are equal."""
        before = self._before()
        pairs, facts, skipped = self._pairs(known, before)
        chosen = self._frequent(pairs, facts.entries)
        if chosen is not pairs:
            pairs, facts = chosen, self._facts(chosen)
        sides = before is not None
        codes, names, counts, some_unknown = self._codes(pairs, known, sides)
        num_tasks = max(
            min(math.ceil(facts.entries / TASK_ENTRIES), MANY_TASKS),
            math.ceil(facts.entries / MANY_ENTRIES),
        )
        identity = self._identity(facts, vocabulary_hash(names), num_tasks)
        if done is not None:
            return check_same(done, identity)
        counted = with_left_out(self.cut, known, some_unknown)
        write = Write(out, identity, self.cut, counted, num_tasks)
        entries = self._entries(pairs, codes, len(names), num_tasks, sides)
        found = Found.of(map_batches(entries, write, WRITTEN).collect())
        if (found.entries, found.checksum) != (facts.entries, facts.checksum):
            came = f"{found.entries:,} came"
            if found.entries == facts.entries:
                came = "as many with other content came"
            raise RuntimeError(
                f"the frame was another one when Spark computed it again: {facts.entries:,} "
                f"entries were counted, but {came}. Plans with limit, sample "
                "or repartition(n) are such. Write the frame to a table first and give that, "
                "or set spark.checkpoint.dir to a folder that all machines share"
            )
        manifest = Manifest(
            id=identity,
            indicator=not self.events.valued,
            num_items=len(names),
            vocabulary=vocabulary_hash(names),
            train=found.files["train"],
            test=found.files["test"],
            left_out={part: n for part, n in found.left_out.items() if n},
            skipped=skipped,
            settings=self.settings,
            vocabulary_file=vocabulary_file(identity),
            repeats=repeats_left_out(self.cut, found.repeated),
        )
        check_prepared(PATH, manifest, self.cut)
        _finish(Place.of(out), manifest, names, counts)
        if self.cut.last is not None:
            warn_of_merged(manifest, found.repeated)
        return manifest

    def _before(self) -> Any:
        """The time of the split, converted to the type of the events' times; None without one."""
        try:
            return self.cut.before(self.events.times)
        except ValueError:
            pass
        from pyspark.sql import functions as F

        # `before` is called again with the first and last time, so that its error names them.
        like = self.events.times
        assert like is not None
        [row] = self.events.frame.agg(F.min("time"), F.max("time")).collect()
        found = [time for time in row if time is not None] or [0]
        times = np.array(found, "f8" if like.dtype.kind == "f" else "i8")
        return self.cut.before(times.view(like.dtype))

    def _pairs(
        self, known: Names | None, before: Any
    ) -> tuple[Any, _Facts, dict[str, int]]:
        """The (user, item) pairs, facts about them, and the numbers of dropped events by fault."""
        events, skip_bad_lines = self.events, self.settings["skip_bad_lines"]
        # Equal plans share one persisted copy, which is dropped as soon as one of them is
        # unpersisted. The condition with a random name makes the plans of this call differ from
        # those of all other calls.
        own = events.frame.where(f"'{uuid.uuid4().hex}' <> ''")
        if known is not None and has_only_digits(to_arrow(known)):
            own = own.withColumn("item", _without_point_zero("item"))
        which = {"valued": events.valued, "timed": events.times is not None}
        query = queries.pairs(
            queries.SPARK,
            queries.single(self._view(own), **which, before=before),
            self.settings["duplicates"],
            **which,
            sides=before is not None,
        )
        pairs = self.session.sql(query)
        if self.session.conf.get("spark.checkpoint.dir", None):
            pairs = pairs.checkpoint()
        else:
            pairs = self._keep(pairs)
        facts = self._facts(pairs)
        skipped = {}
        if facts.wrong:
            skipped = count_wrong(events, skip_bad_lines=skip_bad_lines)
            pairs = pairs.where("name IS NOT NULL")
        if not facts.entries:
            wrong = f" but wrong ones: {skipped}" if skipped else ""
            raise DataError.at(PATH, f"holds no data: there are no events{wrong}")
        if facts.too_large is not None:
            user, item = facts.too_large
            raise DataError.at(
                PATH, f"the values of {user!r} and {item!r} have too large a sum"
            )
        return pairs, facts, skipped

    def _facts(self, pairs: Any) -> _Facts:
        from pyspark.sql import functions as F

        is_pair = F.col("name").isNotNull()
        hashed = F.when(is_pair, _hash(pairs))
        facts = {
            "entries": F.count("name"),
            "wrong": F.count_if(~is_pair),
            "mixed": F.bit_xor(hashed),
            "checksum": F.sum(_upper_half(hashed)),
        }
        if self.events.valued:
            values = [c for c in ("value", "later_value") if c in pairs.columns]
            large = F.greatest(*map(F.abs, values), F.lit(0.0)) == float("inf")
            facts["large"] = F.min(F.when(large, F.struct("name", "item")))
        [row] = pairs.agg(*(f.alias(name) for name, f in facts.items())).collect()
        found = row.asDict()
        return _Facts(
            entries=found["entries"],
            wrong=found["wrong"] > 0,
            mixed=found["mixed"] or 0,
            checksum=found["checksum"] or 0,
            too_large=None if found.get("large") is None else tuple(found["large"]),
        )

    def _frequent(self, pairs: Any, count: int) -> Any:
        """Pairs whose user and item occur at least as often as the settings require."""

        def chosen(pairs: Any, column: str, least: int) -> tuple[Any, int]:
            query = queries.frequent(self._view(pairs), column, least)
            following = self._keep(self.session.sql(query))
            left = following.count()
            pairs.unpersist()
            return following, left

        return frequent(PATH, self.settings, pairs, count, chosen)

    def _codes(
        self, pairs: Any, known: Names | None, sides: bool
    ) -> tuple[Any, Names, np.ndarray, bool]:
        """Numbers all items.

        Returns:
          `(frame, names, counts, some_unknown)`: a frame of all items with their `code`, the
          column in the matrix or -1, and their `key` (see `Cut`); the vocabulary; the number of
          rows that have each item; and whether some items are not in the vocabulary.
        """
        from pyspark.sql import functions as F

        query = queries.items(self._view(pairs), sides=sides)
        items, count, size = self._numbered(self.session.sql(query), "n > 0")
        if known is None:
            if not size:
                raise all_held_out(PATH, self.cut)
            starts = ", ".join(map(str, hand_starts(size)))
            code = f"element_at(array({starts}), CAST(number % 256 AS INT) + 1)"
            code = f"CAST({code} + number DIV 256 AS INT)"
            items = items.withColumn("code", F.expr(f"if(number < {size}, {code}, -1)"))
        else:
            codes = arrow.from_numbers(np.arange(len(known), dtype=np.int32))
            given = pa.table({"item": to_arrow(known), "code": codes})
            given = self.session.createDataFrame(given)
            code = F.coalesce(given["code"], F.lit(-1)).alias("code")
            items = items.join(given, "item", "left").select("item", "n", code)
        found = items.where("code >= 0").select("item", "n", "code").toArrow()
        places = found["code"].to_numpy()
        if known is None:
            names = as_names(found["item"].combine_chunks())
            in_order = np.empty_like(names)
            in_order[places] = names
        elif len(places):
            in_order = known
        else:
            some = [row[0] for row in items.select("item").limit(4).collect()]
            raise all_unknown(PATH, as_names(some), known)
        counts = np.zeros(len(in_order), np.int64)
        counts[places] = found["n"].to_numpy()
        return self._with_keys(items), in_order, counts, count > len(places)

    def _with_keys(self, items: Any) -> Any:
        """Items with the column `key`, computed as by `Cut.keys`, if the split needs keys."""
        if self.cut.last is not None:
            ordered = items.select("item", "code").orderBy("item")
            ranked, _, _ = self._numbered(ordered, "true")
            return ranked.withColumnRenamed("number", "key")
        items = items.select("item", "code")
        if self.cut.fraction is None:
            return items
        return map_batches(items, _Hash(self.cut), _HASHED)

    def _numbered(self, ordered: Any, which: str) -> tuple[Any, int, int]:
        """Numbers the rows of a sorted frame.

        Spark sorts by ranges of values, so rows are numbered within each range, and then offset.
        `row_number` would number all rows in a single task.

        Returns:
          The rows with their `number` from 0, the number of rows, and the number of rows for
          which the SQL condition `which` is true.
        """
        from pyspark.sql import functions as F

        place = F.monotonically_increasing_id()
        rows = self._keep(ordered.withColumn("place", place))
        rows = rows.withColumn("range", F.shiftrightunsigned("place", _INDEX_BITS))
        chosen = F.count_if(F.expr(which))
        found = rows.groupBy("range").agg(F.count("*"), chosen).collect()
        count, starts = 0, []
        for number, in_range, _ in sorted(map(tuple, found)):
            starts.append((number, count))
            count += in_range
        index = F.col("place").bitwiseAND(F.lit(2**_INDEX_BITS - 1))
        if len(starts) > 1:
            table = self.session.createDataFrame(starts, "range bigint, start bigint")
            rows = rows.join(F.broadcast(table), "range")
            index = index + F.col("start")
        rows = rows.withColumn("number", index).drop("place", "range", "start")
        return rows, count, sum(row[2] for row in found)

    def _entries(
        self, pairs: Any, codes: Any, num_items: int, num_tasks: int, sides: bool
    ) -> Any:
        """Entries with codes and hashes, sorted by user. A user's entries are in one partition."""
        from pyspark.sql import functions as F

        if num_items <= _BROADCAST_ITEMS:
            codes = F.broadcast(codes)
        # The tasks that write entries also add up their hashes. So `run` can check that the
        # written entries are those that were counted. This costs four bytes per entry in the
        # shuffle, as the hash cannot be computed later, without the item's name. `observe` would
        # cost no bytes, but counts rows twice if Spark computes them again after a failure.
        hashed = pairs.withColumn("hash", _upper_half(_hash(pairs)))
        joined = hashed.join(codes, "item")
        timed = sides or self.cut.last is not None
        found = queries.facts(valued=self.events.valued, timed=timed, sides=sides)
        keys = ["key"] * ("key" in codes.columns)
        joined = joined.select(
            "name",
            "code",
            "hash",
            *keys,
            *(F.expr(fact).alias(name) for name, fact in found.items()),
        )
        order = F.expr(queries.SPARK.hash.format("name"))
        return joined.repartition(num_tasks, "name").sortWithinPartitions(
            order, "name", "code"
        )

    def _identity(self, facts: _Facts, vocabulary: str, num_tasks: int) -> str:
        """A hash of the entries and the settings, by which the folder is identified."""
        sums = [facts.entries, facts.mixed, facts.checksum, vocabulary, num_tasks]
        text = json.dumps([VERSION, "spark", self.settings, sums], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _view(self, frame: Any) -> str:
        """Makes a temporary view of a frame, and returns its name for SQL.

        `session.sql(query, pairs=frame)` would drop its view after the call, and with it the
        frame's persisted data.
        """
        name = f"sparsejax_{uuid.uuid4().hex}"
        frame.createTempView(name)
        self.kept.callback(self.session.catalog.dropTempView, name)
        return name

    def _keep(self, frame: Any) -> Any:
        """Persists a frame until the call ends: its rows are then computed only once."""
        frame = frame.persist()
        self.kept.callback(frame.unpersist)
        return frame


def _without_point_zero(column: str) -> Any:
    """Column expression that removes ".0" of whole numbers, see `spelling.without_point_zero`."""
    from pyspark.sql import functions as F

    return F.regexp_replace(column, r"\A(-?[0-9]+)\.0\z", "$1")


def _hash(pairs: Any) -> Any:
    """Column expression for a hash of each pair: of its user, item, value and time.

    The value is a sum, rounded to float32. Spark may add three or more decimals in any order: in
    one of about 2^29 cases the rounded sum then differs. After the loss of an executor, `run` may
    therefore report changed entries; a repeated call succeeds.
    """
    from pyspark.sql import functions as F

    return F.xxhash64(*(name for name in pairs.columns if name != "first"))


def _upper_half(hashed: Any) -> Any:
    """Column expression for the upper 32 bits of hashes, whose sums fit in 64 bits."""
    from pyspark.sql import functions as F

    return F.shiftright(hashed, 32).cast("int")


_HASHED = pa.schema({"item": pa.string(), "code": pa.int32(), "key": pa.int64()})


@dataclasses.dataclass(frozen=True)
class _Hash:
    """Function of a task that adds the column `key`, computed by `Cut.keys`, to items."""

    cut: Cut

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            items, codes = batch.columns
            keys = self.cut.keys(as_names(items))
            assert keys is not None
            key = arrow.from_numbers(keys.view(np.int64))
            yield pa.record_batch([items.cast(pa.string()), codes, key], schema=_HASHED)


def _finish(
    folder: Place, manifest: Manifest, names: Names, counts: np.ndarray
) -> None:
    """Checks that the files of all workers exist, and writes the other files, the manifest last.

    Raises:
      FileExistsError: another call has completed the folder with other content.
      RuntimeError: a file that workers wrote is missing.
    """
    for part in ("train", "test"):
        there = set(folder.below(part).names())
        for file in getattr(manifest, part):
            if file.path.rpartition("/")[2] not in there:
                raise RuntimeError(
                    f"{shown(folder.path)}: a worker wrote {file.path}, but the driver does "
                    "not see it; name a folder that all machines share, or an address"
                )
    finish(folder, manifest, names, counts)
