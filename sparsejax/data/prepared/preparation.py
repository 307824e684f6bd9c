"""Prepares events on one machine, by DuckDB: writes a folder of sorted rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from sparsejax import codec, processors
from sparsejax.callers import needing
from sparsejax.data.events.block import Cells, row_error
from sparsejax.data.events.stream import Events as Stream
from sparsejax.data.events.stream import events_of
from sparsejax.data.files import arrow
from sparsejax.data.files.columns import BY_NAME, Chosen
from sparsejax.data.files.entries import Entries, Leaves
from sparsejax.data.files.names import (
    Names,
    as_names,
    find_names,
    of_features,
    quoted,
    to_arrow,
)
from sparsejax.data.files.opening import DataError, Path, is_address, shown
from sparsejax.data.files.parquet import MANIFEST
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared import queries
from sparsejax.data.prepared.folder import (
    VERSION,
    DataFolder,
    Manifest,
    Part,
    vocabulary_file,
    vocabulary_hash,
)
from sparsejax.data.prepared.folder_files import (
    finish,
    leaves_of,
    whole_users,
    write_rows,
)
from sparsejax.data.sets import split
from sparsejax.data.sets.events import EventCounter, Events, named
from sparsejax.data.sets.vocabulary import popularity_ranks
from sparsejax.options.option import verb
from sparsejax.options.reading import Prepare, Preparing
from sparsejax.whole_files import temporary_folder, whole_folder

_BATCH = 2**18  # sorted entries that are read from the engine at a time
# Bytes that the engine's memory must have for each event that is grouped at once. DuckDB 2.0 keeps
# up to 8 bytes per event that it cannot spill (github.com/duckdb/duckdb/issues/22578).
BYTES_PER_EVENT = 32
_BUCKET_BITS = 4
# Defaults of options that have no effect on histories.
_OF_ITEMS = {
    "value": None,
    "indicator": False,
    "duplicates": "add",
    "split_fraction": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """The rule that splits entries into train and test; without fields nothing is held out.

    At most one of `time`, `last` and `fraction` is given.

    Attributes:
      time: time of the split; events at or after it are held out.
      repeats: with `time`, treatment of an entry that has events on both sides; see
        `SparseDataset.split_at`.
      last: number of the last entries of each row that are held out.
      fraction: share of the entries of each row that stays in train.
      seed: seed of the random choice by `fraction`.
    """

    time: split.Time | None = None
    repeats: split.Repeats = "new"
    last: int | None = None
    fraction: float | None = None
    seed: int = 0

    @classmethod
    def of(cls, asked: Preparing) -> Cut:
        """Reads the rule from the options of `prepare`; ValueError if several are given."""
        names = "split_time", "split_last", "split_fraction"
        given = [name for name in names if getattr(asked, name) is not None]
        if len(given) > 1:
            raise ValueError(f"there is one split, but {' and '.join(given)} are given")
        time, last, fraction = (getattr(asked, name) for name in names)
        repeats = asked.repeats or "new"
        return cls(
            time=time, repeats=repeats, last=last, fraction=fraction, seed=asked.seed
        )

    def __bool__(self) -> bool:
        return not self.time is self.last is self.fraction is None

    def before(self, times: np.ndarray | None) -> Any:
        """The time of the split, converted to the type of the events' times; None if unused.

        Args:
          times: some times of the events, or None.
        """
        if self.time is None or times is None:
            return None
        time = split.as_time(self.time, times)
        # A time that int64 cannot represent stays a float, and is before or after all times.
        return int(time.astype(np.int64)) if isinstance(time, np.datetime64) else time

    def keys(self, items: Names) -> np.ndarray | None:
        """`[items]` numbers of the items by which the split chooses; None if not needed."""
        if self.last is not None:
            # Among events with equal times, the item whose name sorts last is the latest.
            rank = np.empty(len(items), np.int64)
            rank[np.argsort(items, stable=True)] = np.arange(len(items))
            return rank
        return None if self.fraction is None else split.hashes(items, self.seed)

    def parts(
        self, entries: Entries, names: pa.Array, keys: np.ndarray | None
    ) -> dict[Part, np.ndarray]:
        """Assigns entries to parts: for each part a mask `[entries]`.

        Args:
          entries: entries of whole users.
          names: names of these users.
          keys: `[entries]` key of each entry's item, from `self.keys`.
        """
        if self.time is not None:
            stays, later = (entries.columns[n] != 0 for n in ("earlier", "later"))
            return {
                "train": stays,
                "test": later & ~stays if self.repeats == "new" else later,
            }
        is_held = self._held_out(entries, names, keys)
        return {"train": ~is_held, "test": is_held}

    def _held_out(
        self, entries: Entries, names: pa.Array, keys: np.ndarray | None
    ) -> np.ndarray:
        if keys is None:
            return np.zeros(len(entries.indices), bool)
        indptr = entries.indptr
        if self.last is not None:
            return split.heldout_last(
                indptr, entries.columns["latest"], keys, self.last
            )
        assert self.fraction is not None
        users = split.hashes(as_names(names), self.seed)
        at = np.arange(len(keys))
        return split.heldout_by_hash(indptr, at, users, keys, self.fraction)


class Asked:
    """The options of `prepare`, on one machine or on Spark, checked and converted.

    Attributes:
      cut: rule that splits entries into train and test.
      known: given vocabulary, or None.
      chosen: columns that the caller chose for roles.
      with_time: whether events must have times.
      settings: settings, as the manifest states them.
    """

    def __init__(self, asked: Preparing):
        asked.check_effect()
        self.cut = cut = Cut.of(asked)
        given = asked.features
        self.known = known = None if given is None else of_features(given)
        columns = asked.user, asked.item, asked.value
        time = BY_NAME if asked.time is None else asked.time
        self.chosen = Chosen(*columns, time)
        is_cut = cut.time is not None or cut.last is not None
        self.with_time = is_cut or asked.duplicates == "last"
        self.settings: dict[str, Any] = {
            "columns": [*columns, asked.time],
            "duplicates": asked.duplicates,
            "min_user": asked.min_user,
            "min_item": asked.min_item,
            "features": None if known is None else vocabulary_hash(known),
            "indicator": asked.indicator,
            "split_time": None if cut.time is None else str(cut.time),
            "repeats": cut.repeats,
            "split_last": cut.last,
            "split_fraction": cut.fraction,
            "seed": cut.seed,
            "skip_bad_lines": asked.skip_bad_lines,
        }
        self.events = None
        if isinstance(asked, Prepare) and asked.histories:
            for name, default in _OF_ITEMS.items():
                if getattr(asked, name) != default:
                    raise ValueError(
                        f"{name}=... is of no use with histories=True: leave it out"
                    )
            self.settings["histories"] = True
            if asked.schema is not None:
                self.events = EventCounter(asked.schema)
                self.settings["schema"] = asked.schema.to_json()


@verb(Prepare)
def prepare(asked: Prepare) -> Manifest:
    """Writes events as a prepared data set in a folder; the events need not fit in memory.

    >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
    >>> print(prepare(pandas.DataFrame(table), "prepared"))
    train: 2 rows, 3 entries; 2 items
    >>> read("prepared").feature_names.tolist()
    ['tea', 'rye']
    >>> scan_parquet("prepared").num_rows
    2

    The folder has the vocabulary, `train/`, `test/` if there is a split, and a manifest.
    It can be passed to `read`, `scan_parquet` and all commands. Its path stands for the part
    `train`; the path of `test` in it has the held-out entries. Vocabulary, columns and values
    are equal to those that `read` makes from equal events. Rows have a pseudo-random order,
    and rows without entries are left out.

    DuckDB does the work; it needs `pip install 'sparsejax[prepare]'`. Data that exceeds the
    memory is written to a temporary folder: beside `out`, or the system's if `out` is an
    address. The vocabulary must fit in memory. A local folder appears whole or not at all. In
    a store the manifest is written last, and a folder without it is incomplete: repeat the
    call.

    Raises:
      DataError: the events cannot be read, or some are wrong: the message counts them and
        shows one. Or no entries remain, or none are held out.
      FileExistsError: `out` exists. If it is a complete folder of equal events and settings,
        its manifest is returned and nothing is written.
      ImportError: DuckDB is not installed.
      OSError: `out` cannot be written.
      ValueError: an argument is wrong.
    """
    settings = Asked(asked)
    before = prepared_before(asked.out, settings.settings)
    with _writing(asked.out, before) as folder, _engine(folder, asked.memory) as engine:
        found = events_of(asked, settings.chosen, with_time=settings.with_time)
        found.vocabulary = settings.known
        steps = settings.cut, settings.settings
        preparation = _Preparation(engine, found, *steps)
        if asked.histories:
            preparation = _Histories(engine, found, *steps, settings.events)
        return preparation.run(folder, settings.known, before)


def prepared_before(out: Path, settings: Mapping[str, Any]) -> DataFolder | None:
    """The complete folder at `out`, if it was prepared with these settings; None if it is new.

    A process may be killed after its folder has appeared. Then a repeated call is no error.

    Raises:
      FileExistsError: `out` has other content.
    """
    place = Place.of(out)
    text = place.below(MANIFEST).read()
    if text is None and (is_address(out) or not os.path.lexists(out)):
        return None
    other = FileExistsError(f"{shown(out)}: already exists; name another folder")
    try:
        folder = DataFolder.find(out)
        if folder is None:
            raise other
        manifest = folder.manifest
        if manifest.settings != codec.plain(settings):
            raise FileExistsError(
                f"{shown(out)}: already exists, prepared with other settings; name another "
                "folder"
            )
        folder.vocabulary()
    except DataError as error:
        raise other from error
    for file in (*manifest.train, *manifest.test):
        if place.below(file.path).size() != file.size:
            raise other
    return folder


def check_same(before: DataFolder, identity: str) -> Manifest:
    """Checks that a folder was prepared from the same events; returns its manifest.

    Raises:
      FileExistsError: the folder was prepared from other events.
    """
    if before.manifest.id != identity:
        raise FileExistsError(
            f"{shown(before.place.path)}: already exists, prepared from other events; name "
            "another folder"
        )
    return before.manifest


@contextlib.contextmanager
def _writing(out: Path, before: DataFolder | None) -> Generator[Place]:
    """Yields the folder to write to. A local folder is published when this context closes."""
    if is_address(out) or before is not None:
        yield Place.of(out)
        return
    with whole_folder(out) as folder:
        yield Place.of(folder)


@contextlib.contextmanager
def _engine(folder: Place, memory: str | None) -> Generator[Any]:
    """Opens a DuckDB database that spills to a temporary folder if its memory is full."""
    with needing("preparing data needs DuckDB", "prepare"):
        import duckdb

    beside = (
        tempfile.gettempdir()
        if folder.is_remote
        else os.path.dirname(os.path.abspath(folder.inner))
    )
    with temporary_folder(beside) as spill, duckdb.connect() as engine:
        engine.execute("SET temp_directory = $1", [os.fspath(spill)])
        # By default DuckDB uses a thread for each core of the machine, even under `taskset`.
        [[threads]] = engine.execute("SELECT current_setting('threads')").fetchall()
        cores = len(processors.usable())
        engine.execute("SET threads = $1", [min(threads, cores)])
        engine.execute("SET preserve_insertion_order = false")
        if memory is not None:
            try:
                engine.execute("SET memory_limit = $1", [memory])
            except duckdb.Error as error:
                raise ValueError(
                    f"memory={memory!r} is not an amount of memory; write it like '4GB'"
                ) from error
        try:
            yield engine
        except duckdb.OutOfMemoryException as error:
            raise MemoryError(
                "the engine needs more memory, or more room in its temporary folder: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error


@dataclasses.dataclass
class _Preparation:
    """Groups a stream of events by user, splits them and writes the files of a folder."""

    repeats: ClassVar[bool] = False  # whether a user's pairs may have an item again
    engine: Any
    events: Stream
    cut: Cut
    settings: dict[str, Any]
    # Events after the cut that are not held out, because the user had the item before.
    repeated: int = dataclasses.field(default=0, init=False)

    def run(
        self, folder: Place, known: Names | None, done: DataFolder | None
    ) -> Manifest:
        """Writes the folder; if `done` is complete, only checks that its events are equal."""
        before = self.cut.before(self.events.times)
        pairs = self._frequent(self._pairs(before))
        identity = self._identity(self._run(self._content(pairs, before)))
        if done is not None:
            return check_same(done, identity)
        items = self.engine.sql(self._items(pairs, before)).to_arrow_table()
        names, counts, size = self._vocabulary(items, known)
        self._number(pairs, names)
        keys = self.cut.keys(names)

        def users() -> Iterator[tuple[Entries, pa.Array, dict[Part, np.ndarray]]]:
            people = _Names(self._stream(queries.names()))
            for entries in whole_users(self._entries(pairs, before)):
                users = people.take(entries.of_rows["users"])
                self._check_values(entries, users, names)
                of_items = None if keys is None else keys[entries.indices]
                parts = self._parts(entries, users, of_items, before)
                # Codes from `size` on stand for items that the vocabulary does not contain.
                columns = np.where(entries.indices < size, entries.indices, -1)
                yield entries.replaced(indices=columns), users, parts

        counted = with_left_out(self.cut, known, len(names) > size)
        writers = write_rows(users(), folder, identity, counted)
        manifest = Manifest(
            id=identity,
            indicator=not self.events.valued,
            num_items=size,
            vocabulary=vocabulary_hash(names[:size]),
            train=tuple(writers["train"].files),
            test=tuple(writers["test"].files) if self.cut else (),
            left_out={part: w.left_out for part, w in writers.items() if w.left_out},
            skipped=dict(self.events.wrong.counts),
            settings=self.settings,
            vocabulary_file=vocabulary_file(identity if folder.is_remote else None),
            repeats=self.repeated
            + repeats_left_out(self.cut, writers["test"].repeated if self.cut else 0),
            **self._stated(),
        )
        check_prepared(self.events.path, manifest, self.cut)
        finish(folder, manifest, names[:size], counts)
        if self.cut.last is not None:
            warn_of_merged(manifest, writers["test"].repeated)
        return manifest

    def _which(self, before: Any) -> dict[str, bool]:
        return {
            "valued": self.events.valued,
            "timed": before is not None or self.cut.last is not None,
            "sides": before is not None,
        }

    def _content(self, pairs: str, before: Any) -> str:
        """SQL for the number of entries and a hash of all of them."""
        return queries.content(queries.DUCKDB, pairs, **self._which(before))

    def _items(self, pairs: str, before: Any) -> str:
        """SQL for all items and their counts."""
        return queries.items(pairs, sides=before is not None)

    def _entries(self, pairs: str, before: Any) -> Iterator[Leaves]:
        """Yields the entries in batches, sorted by user and column."""
        query = queries.entries(pairs, **self._which(before))
        return map(leaves_of, self._stream(query))

    def _parts(
        self, entries: Entries, users: pa.Array, keys: np.ndarray | None, before: Any
    ) -> dict[Part, np.ndarray]:
        """Assigns entries of whole users to parts. Returns a mask `[entries]` for each part."""
        del before
        return self.cut.parts(entries, users, keys)

    def _stated(self) -> dict[str, Any]:
        """Fields of the manifest that only histories have."""
        return {}

    def _pairs(self, before: Any) -> str:
        events = self.events
        which = {"valued": events.valued, "timed": events.times is not None}
        duplicates, sides = self.settings["duplicates"], before is not None
        grouped = queries.pairs(queries.DUCKDB, "{}", duplicates, **which, sides=sides)
        single = queries.single("events", **which, before=before)
        most = self._most()
        self._consume(f"CREATE TABLE pairs AS {grouped.format(single)}", most)
        if events.are_left():
            self._group_in_buckets(grouped, single, most)
        self._check_events()
        return "pairs"

    def _check_events(self) -> None:
        """Raises DataError if an event is wrong, or if there are no events."""
        events = self.events
        if events.wrong.counts and not self.settings["skip_bad_lines"]:
            raise DataError.at(
                events.path,
                f"{events.wrong}; correct them, or leave them out by skip_bad_lines=True",
            )
        if not self._count("pairs"):
            raise DataError.at(
                events.path, f"holds no data: there are no events{self._skipped()}"
            )

    def _number(self, pairs: str, names: Names) -> None:
        """Makes the tables `codes` and `people`, which number items and users."""
        codes = arrow.from_numbers(np.arange(len(names), dtype=np.int32))
        given = pa.table({"item": to_arrow(names), "code": codes})
        self.engine.register("given", given)  # visible to this connection only
        self._make("codes", "SELECT item, code FROM given")
        self._make("people", queries.people(queries.DUCKDB, pairs))

    def _most(self) -> int:
        """The number of events that the engine can group at once in its memory."""
        limit = "parse_formatted_bytes(current_setting('memory_limit'))"
        [[limit]] = self._run(f"SELECT {limit}")
        return max(limit // BYTES_PER_EVENT, 1)

    def _group_in_buckets(self, grouped: str, single: str, most: int) -> None:
        """Groups the table `pairs` and the events that are not read yet, by buckets of users.

        Args:
          grouped: query that groups the rows of a table; `{}` stands for the table.
          single: subquery that selects events as pairs.
          most: number of events that are read at once.
        """
        [[spill]] = self._run("SELECT current_setting('temp_directory')")
        folder = os.path.join(spill, "buckets")
        write = (
            f"COPY ({queries.in_buckets('{}', _BUCKET_BITS)}) TO {_literal(folder)} "
            "(FORMAT parquet, COMPRESSION lz4, PARTITION_BY (bucket), APPEND)"
        )
        self._run(write.format("pairs"))
        self._run("CREATE OR REPLACE TABLE pairs AS FROM pairs LIMIT 0")
        while self.events.are_left():
            self._consume(write.format(single), most)
        for bucket in os.listdir(folder):
            files = os.path.join(glob.escape(folder), bucket, "*.parquet")
            source = f"read_parquet({_literal(files)})"
            self._run(f"INSERT INTO pairs {grouped.format(source)}")
            shutil.rmtree(os.path.join(folder, bucket))

    def _consume(self, query: str, most: int | None) -> None:
        """Runs a query in which the table `events` has the next events, at most `most` of them."""
        self.engine.register("events", self.events.reader(most))
        try:
            self._run(query)
        except Exception:
            self.events.check()  # raises the events' own error, if they are the cause
            raise
        finally:
            self.engine.unregister("events")

    def _skipped(self) -> str:
        counts = self.events.wrong.counts
        return f" but wrong ones: {self.events.wrong}" if counts else ""

    def _frequent(self, table: str) -> str:
        """The name of a table with the pairs whose user and item are frequent enough."""

        def chosen(table: str, column: str, least: int) -> tuple[str, int]:
            following = f"{table}_"
            how = {"repeats": self.repeats}
            self._make(following, queries.frequent(table, column, least, **how))
            self._run(f"DROP TABLE {table}")
            return following, self._count(following)

        count = self._count(table)
        return frequent(self.events.path, self.settings, table, count, chosen)

    def _vocabulary(
        self, found: pa.Table, known: Names | None
    ) -> tuple[Names, np.ndarray, int]:
        """Names of all items, those of the vocabulary first; the counts of these; their number."""
        names, counts = (
            as_names(found["item"]),
            arrow.numbers(found["n"].combine_chunks()).astype(np.int64),
        )
        if known is None:
            size = int(np.count_nonzero(counts))
            if not size:
                raise all_held_out(self.events.path, self.cut)
            order = popularity_ranks(size)
            order = np.append(order, np.arange(size, len(names)))
            return names[order], counts[order[:size]], size
        place = find_names(known, names)
        if (place < 0).all():
            raise all_unknown(self.events.path, names, known)
        rest = names[find_names(names, known) < 0]
        counts = np.where(place < 0, 0, counts[place])
        return np.concatenate([known, rest]), counts, len(known)

    def _check_values(self, entries: Entries, users: pa.Array, items: Names) -> None:
        finite = np.ones(len(entries.indices), bool)
        with np.errstate(over="ignore"):
            for name in ("values", "later_values"):
                if name in entries.columns:
                    finite &= np.isfinite(entries.columns[name].astype(np.float32))
        if not finite.all():
            at = int(np.argmin(finite))
            row = int(np.searchsorted(entries.indptr, at, side="right")) - 1
            raise DataError.at(
                self.events.path,
                f"the values of {users[row].as_py()!r} and "
                f"{items[entries.indices[at]]!r} have too large a sum",
            )

    def _identity(self, content: list[tuple]) -> str:
        """A hash of the settings and of the content (see `queries.content`)."""
        facts = [VERSION, self.settings, content]
        text = json.dumps(facts, sort_keys=True).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def _run(self, query: str) -> list[tuple]:
        return self.engine.execute(query).fetchall()

    def _make(self, table: str, query: str) -> None:
        self._run(f"CREATE TABLE {table} AS {query}")

    def _count(self, table: str) -> int:
        [[count]] = self._run(f"SELECT count(*) FROM {table}")
        return count

    def _stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yields a result in batches. Its own cursor permits other queries in the meantime."""
        yield from self.engine.cursor().sql(query).to_arrow_reader(_BATCH)


@dataclasses.dataclass
class _Histories(_Preparation):
    """Sorts a stream of events to histories, splits them and writes the files of a folder.

    Attributes:
      counter: counter of categories in event columns; None if there are no such columns.
    """

    repeats: ClassVar[bool] = True
    counter: EventCounter | None

    def _pairs(self, before: Any) -> str:
        del before
        self.events.take = self.counter.take if self.counter else lambda _: None
        self._consume("CREATE TABLE pairs AS FROM events", None)
        self._check_events()
        return "pairs"

    @functools.cached_property
    def _columns(self) -> list[str]:
        return ["time"] * (self.events.times is not None) + list(self.events.beside)

    @functools.cached_property
    def _of_events(self) -> Events | None:
        """Types and categories of the event columns, as empty `Events`, after all events."""
        return None if self.counter is None else self.counter.finish()

    def _content(self, pairs: str, before: Any) -> str:
        columns = ", ".join(["name", "item", *self._columns, "place"])
        hashed = queries.DUCKDB.hash.format(columns)
        return f"SELECT count(*), bit_xor({hashed}) FROM {pairs}"

    def _items(self, pairs: str, before: Any) -> str:
        return queries.items(pairs, sides=False, repeats=True)

    def _entries(self, pairs: str, before: Any) -> Iterator[Leaves]:
        return map(self._leaves, self._stream(queries.histories(pairs, self._columns)))

    def _stated(self) -> dict[str, Any]:
        events = self._of_events
        return {
            "histories": True,
            "events": None if events is None else events.to_json(),
        }

    def _leaves(self, batch: pa.RecordBatch) -> Leaves:
        """The columns of a batch of sorted events, by their names in `Entries`."""
        found, like = dict(leaves_of(batch)), self.events.times
        times = found.pop("latest", None)
        if times is not None and like is not None:
            found["times"] = times.view(like.dtype) if like.dtype.kind == "M" else times
        if (events := self._of_events) is None:
            return found
        columns = {name: batch.column(key) for key, name in self.events.beside.items()}
        cells = Cells(columns, row_error(self.events.path, 0), self.events.path)
        return found | named(events.with_room(events.read(cells, columns)))

    def _parts(
        self, entries: Entries, users: pa.Array, keys: np.ndarray | None, before: Any
    ) -> dict[Part, np.ndarray]:
        places = np.arange(len(entries.indices))
        is_held = np.zeros(len(places), bool)
        if self.cut.last is not None:
            is_held = split.heldout_last(entries.indptr, places, places, self.cut.last)
        if before is None:
            return {"train": ~is_held, "test": is_held}
        times = entries.columns["times"]
        later = (times.view(np.int64) if times.dtype.kind == "M" else times) >= before
        if self.cut.repeats == "new" and later.any():
            items = entries.indices
            known = split.are_known(entries.row_of, items, later, int(items.max()) + 1)
            self.repeated += int(np.sum(later & known))
            return {"train": ~later, "test": later & ~known}
        return {"train": ~later, "test": later}


class _Names:
    """Reads users' names, in ascending order of the users' numbers."""

    def __init__(self, batches: Iterator[pa.RecordBatch]):
        self._batches = batches
        self._waiting: list[pa.Array] = []
        self._first = 0  # number of the first user whose name was not taken
        self._num_waiting = 0

    def take(self, users: np.ndarray) -> pa.Array:
        """Names of the next users, up to the user with the number `users[-1]`."""
        count = int(users[-1]) + 1 - self._first
        while self._num_waiting < count:
            names = next(self._batches).column("name").cast(pa.large_string())
            self._waiting.append(names)
            self._num_waiting += len(names)
        names = pa.concat_arrays(self._waiting)
        self._waiting = [names[count:]]
        self._first += count
        self._num_waiting -= count
        return names[:count]


def with_left_out(
    cut: Cut, known: Names | None, some_unknown: bool
) -> dict[Part, bool]:
    """The parts to write; the values say whether entries of unknown items are counted.

    Args:
      cut: rule that splits entries.
      known: given vocabulary, or None if the items of the part train are the vocabulary.
      some_unknown: whether events have items that the vocabulary lacks.
    """
    parts: dict[Part, bool] = {"train": known is not None and some_unknown}
    return parts | {"test": some_unknown} if cut else parts


def frequent[Table](
    path: Path,
    settings: Mapping[str, Any],
    pairs: Table,
    count: int,
    chosen: Callable[[Table, str, int], tuple[Table, int]],
) -> Table:
    """Selects pairs with frequent users and items, repeatedly until all that remain are frequent.

    Args:
      path: name of the events in messages.
      settings: settings of the preparation.
      pairs: all pairs.
      count: number of the pairs.
      chosen: function of pairs, a column and a least count, which returns the pairs whose
        value in the column occurs at least that often, and their number.

    Raises:
      DataError: no pair remains.
    """
    least = {"item": settings["min_item"], "name": settings["min_user"]}
    steps = [(column, least) for column, least in least.items() if least > 1]
    unchanged, turn = 0, 0
    while steps and unchanged < len(steps):
        pairs, left = chosen(pairs, *steps[turn % len(steps)])
        turn += 1
        unchanged, count = (unchanged + 1 if left == count else 0), left
        if len(steps) == 1:
            break
    if not count:
        raise DataError.at(
            path,
            f"nothing is left: no users have min_user={settings['min_user']:,} items that "
            f"have min_item={settings['min_item']:,} such users",
        )
    return pairs


def all_held_out(path: Path, cut: Cut) -> DataError:
    """The error for a split that leaves no items in train."""
    return DataError.at(
        path,
        "everything is held out, nothing to train on: no event is before "
        f"split_time={cut.time}",
    )


def all_unknown(path: Path, names: Names, known: Names) -> DataError:
    """The error for a given vocabulary that has none of the events' items."""
    return DataError.at(
        path,
        f"all entries are of items that the vocabulary lacks: {quoted(names)}; it has "
        f"{quoted(known)}",
    )


def check_prepared(path: Path, manifest: Manifest, cut: Cut) -> None:
    """Raises DataError if the part train, or the part test of a split, is empty."""
    if not manifest.num_entries():
        raise DataError.at(
            path,
            "there is nothing to train on: all entries are held out, or are of items that "
            "the vocabulary lacks",
        )
    if cut and not manifest.num_rows("test"):
        raise DataError.at(
            path, "nothing is held out: rows are too short, or the time is too late"
        )


def repeats_left_out(cut: Cut, repeated: int) -> int:
    """The number of repeated entries that were not held out, for the manifest."""
    return repeated if cut.time is not None and cut.repeats == "new" else 0


def warn_of_merged(manifest: Manifest, repeated: int) -> None:
    """Warns if `repeated` held-out entries also have other events."""
    heldout = manifest.num_entries("test") + manifest.left_out.get("test", 0)
    split.warn_of_repeats(repeated, heldout)


def _literal(text: str) -> str:
    quoted = text.replace("'", "''")
    return f"'{quoted}'"
