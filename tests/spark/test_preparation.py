"""Spark prepares data sets as folders that equal those of `read` and DuckDB."""

import concurrent.futures
import datetime
import decimal
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contents import contents
from event_tables import entries, expected, frequent, many_events, repeats, tables
from hypothesis import given
from spark_processes import killing

import sparsejax as sj
from sparsejax.data.files.stores import Place
from sparsejax.spark import preparation

# Whatever pyspark and the garbage collector warn of is not ours.
pytestmark = pytest.mark.filterwarnings("default")
KINDS = ["whole", "fraction", "last", "new", "all", "features"]
# Ann has tea before and after the split at 3, and as her last item.
REPEATED = {
    "user": ["ann", "ann", "ann", "bob", "bob"],
    "item": ["tea", "rye", "tea", "rye", "tea"],
    "value": [1.0] * 5,
    "time": [1, 2, 9, 3, 8],
}


@hypothesis.settings(
    max_examples=6,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@given(
    kind=st.sampled_from(KINDS),
    table=tables(),
    least=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]),
    indicator=st.booleans(),
)
@hypothesis.example(kind="new", table=REPEATED, least=(1, 1), indicator=False)
@hypothesis.example(kind="all", table=REPEATED, least=(1, 1), indicator=False)
@hypothesis.example(kind="last", table=REPEATED, least=(1, 1), indicator=True)
def test_the_same_as_read_and_duckdb(session, kind, table, least, indicator):
    kept = frequent(table, *least)
    hypothesis.assume(kept["user"])
    try:
        with repeats() as warned:
            options, train, heldout, left_out = expected(
                kept, kind, indicator=indicator
            )
    except ValueError:  # nothing or everything is held out or unknown
        hypothesis.assume(False)
        raise
    options |= {"min_user": least[0], "min_item": least[1], "indicator": indicator}
    with tempfile.TemporaryDirectory() as folder:
        out, local = pathlib.Path(folder, "spark"), pathlib.Path(folder, "duckdb")
        frame = session.createDataFrame(pa.table(table))
        with repeats() as told:
            manifest = sj.spark.prepare(frame, out, **options)
        with repeats() as also:
            known = sj.prepare(pa.table(table), local, **options)
        assert told == also == warned
        assert manifest.repeats == known.repeats == left_out
        found = [sj.read(out)]
        if heldout is not None:
            found.append(sj.read(out / "test"))
    assert manifest.vocabulary == known.vocabulary
    assert (manifest.left_out, manifest.skipped) == (known.left_out, known.skipped)
    for data, given_ in zip(found, (train, heldout), strict=False):
        assert entries(data) == entries(given_)
        assert data.feature_names.tolist() == given_.feature_names.tolist()
        assert (data.matrix.data is None) == indicator
        if given_.left_out is not None:
            unknown = given_.align_rows(data.row_names).left_out
            np.testing.assert_array_equal(data.left_out, unknown)


def test_an_executor_dies_while_parts_are_written(session, bucket, monkeypatch):
    """Into a store, with a vocabulary that is sorted in several ranges."""
    address, query = bucket
    out = f"{address}/killed{query}"
    monkeypatch.setattr(preparation, "TASK_ENTRIES", 150)
    session.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
    session.conf.set("spark.sql.shuffle.partitions", "4")
    events = many_events()
    try:
        with killing("executor", lambda: len(Place.of(out).below("train").names()) > 2):
            frame = session.createDataFrame(events)
            manifest = sj.spark.prepare(frame, out, split_fraction=0.5, time="when")
    finally:
        session.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "true")
        session.conf.set("spark.sql.shuffle.partitions", "2")
    names = Place.of(out).below("train").names()
    assert sorted(file.path for file in manifest.train) == sorted(
        f"train/{name}" for name in names
    )
    assert len(names) > 20
    train, heldout = sj.data.from_arrow(events).split(0.5, seed=0)
    for part, data in (("train", train), ("test", heldout)):
        found = sj.read(f"{address}/killed/{part}{query}")
        assert entries(found) == entries(data)
        assert found.feature_names.tolist() == data.feature_names.tolist()
        assert len(set(found.row_names.tolist())) == found.num_rows


def test_wrong_events(session, tmp_path):
    table = pa.table(
        {
            "user": ["a", None, "a", "b", "b", "", "c", "c"],
            "item": [1.0, 2.0, None, 4.0, float("nan"), 1.0, 2.0, 1.0],
            "value": [1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, None, 3.0],
            "time": ["2024-05-01", "2024-05-02", *["2024-05-03"] * 5, "yesterday"],
        }
    )
    frame = session.createDataFrame(table)
    with pytest.raises(sj.DataError, match=r"2 events without a user.*one of them has"):
        sj.spark.prepare(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = sj.spark.prepare(
        frame, tmp_path / "spark", duplicates="last", skip_bad_lines=True
    )
    known = sj.prepare(
        table, tmp_path / "duckdb", duplicates="last", skip_bad_lines=True
    )
    assert manifest.skipped == known.skipped
    assert sum(manifest.skipped.values()) == 7
    assert contents(sj.read(tmp_path / "spark")) == {"a": {"1": 1.0}}
    frame = session.createDataFrame(pa.table({"user": ["a"], "item": [2.5]}))
    with pytest.raises(sj.DataError, match="a number that cannot be a name"):
        sj.spark.prepare(frame, tmp_path / "out", skip_bad_lines=True)
    large = {"user": ["a", "a"], "item": ["x", "x"], "value": [3e38, 3e38]}
    with pytest.raises(
        sj.DataError, match="values of 'a' and 'x' have too large a sum"
    ):
        sj.spark.prepare(session.createDataFrame(pa.table(large)), tmp_path / "out")
    with pytest.raises(sj.DataError, match="holds no data"):
        sj.spark.prepare(frame.where("user = 'b'"), tmp_path / "out")


DAYS = [datetime.date(2024, 5, 1), datetime.date(2024, 5, 3), datetime.date(2024, 5, 2)]
ZONE = datetime.timezone(datetime.timedelta(hours=2))


@pytest.mark.parametrize(
    "columns",
    [
        {"user": ["1.0", "2.0", "2.0"], "item": ["x", "2.5", "7.0"], "time": DAYS},
        {
            "user": pa.array([1.0, 2.0, 2.0], pa.float32()),
            "item": pa.array([decimal.Decimal(n) for n in ("7.00", "7.50", "8.00")]),
            "time": DAYS,
        },
        {
            "user": [b"a", b"b", b"b"],
            "item": ["3.0", "4.0", "5.0"],
            "rating": [None] * 3,
            "time": [
                datetime.datetime(2024, 5, n, 0, 30, tzinfo=ZONE) for n in (3, 4, 2)
            ],
        },
        {
            "user": [3, 4, 5],
            "item": [["p", "q"], ["q"], []],
            "rating": [[1.5, 2.5], [3.0], []],
            "time": ["2024-05-02T23:30:00", "2024-05-01", "2024-05-01"],
        },
    ],
)
def test_columns_of_other_types(session, columns, tmp_path):
    table = pa.table(columns)
    options = {"split_time": "2024-05-02T23:00:00"}
    frame = session.createDataFrame(table)
    manifest = sj.spark.prepare(frame, tmp_path / "spark", **options)
    known = sj.prepare(table, tmp_path / "duckdb", **options)
    assert manifest.vocabulary == known.vocabulary
    assert manifest.left_out == known.left_out
    for part in ("train", "test"):
        found, data = (sj.read(tmp_path / by / part) for by in ("spark", "duckdb"))
        assert entries(found) == entries(data)


def test_times_of_files_count_more_than_those_of_folders(session, tmp_path):
    for day, items in (("2024-05-01", ["tea", "rye"]), ("2024-05-02", ["rye", "tea"])):
        folder = tmp_path / f"events/dt={day}"
        folder.mkdir(parents=True)
        times = [f"{day}T01:00:00", f"{day}T05:00:00"]
        events = {"user": ["ann", "bob"], "item": items, "time": times}
        pq.write_table(pa.table(events), folder / "part.parquet")
    frame = session.read.parquet(f"{tmp_path}/events")
    assert {"time", "dt"} <= set(frame.columns)
    options = {"split_time": "2024-05-02T03:00:00"}
    found = sj.spark.prepare(frame, tmp_path / "spark", **options)
    known = sj.prepare(tmp_path / "events", tmp_path / "duckdb", **options)
    assert found.vocabulary == known.vocabulary and found.num_rows("test") == 1
    for part in ("train", "test"):
        rows, data = (sj.read(tmp_path / by / part) for by in ("spark", "duckdb"))
        assert entries(rows) == entries(data)
    with_days = sj.spark.prepare(frame, tmp_path / "days", time="dt", split_last=1)
    assert with_days.num_rows("test") == 2


def test_two_calls_at_once_and_again(session, tmp_path, monkeypatch):
    """A call finishes while another one of the same frame is about to write."""
    frame = session.createDataFrame(many_events())
    monkeypatch.setattr(preparation, "TASK_ENTRIES", 2000)
    kind = preparation._Preparation
    keep, entries_of, kept, ids = kind._keep, kind._entries, [], []

    def call(fraction: float) -> str:
        options = {"split_fraction": fraction, "time": "when"}
        return sj.spark.prepare(frame, tmp_path / "out", **options).id

    def note(self, frame):
        kept.append(keep(self, frame))
        return kept[-1]

    def interrupt(self, *given):
        if not ids:
            ids.append("")
            first = [*kept]
            ids[0] = call(0.75)
            # What Spark keeps for the one is not dropped with the other's.
            assert first and all(frame.storageLevel.useDisk for frame in first)
        return entries_of(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_keep", note)
        patch.setattr(kind, "_entries", interrupt)
        with pytest.raises(FileExistsError, match="another preparation has finished"):
            call(0.5)
    found = sj.read(tmp_path / "out")
    train, _ = sj.data.from_arrow(many_events()).split(0.75, seed=0)
    assert entries(found) == entries(train)
    with pytest.raises(FileExistsError, match="already exists"):
        sj.spark.prepare(frame, tmp_path / "out")
    # A driver that was killed before the end: the same command makes the same files.
    text = (tmp_path / "out" / "manifest.json").read_text()
    before = {p: p.read_bytes() for p in (tmp_path / "out" / "train").iterdir()}
    (tmp_path / "out" / "manifest.json").unlink()
    assert call(0.75) == ids[0]
    assert text == (tmp_path / "out" / "manifest.json").read_text()
    assert before == {p: p.read_bytes() for p in (tmp_path / "out" / "train").iterdir()}


def test_tasks_that_run_twice_at_once(session, tmp_path, monkeypatch):
    """As speculation does: Spark never runs both attempts on one host, so this test does."""
    monkeypatch.setattr(preparation, "TASK_ENTRIES", 1000)
    map_batches = preparation.map_batches

    def twice(frame, function, schema):
        def both(batches):
            given = list(batches)
            with concurrent.futures.ThreadPoolExecutor() as threads:
                first, second = (
                    threads.submit(lambda: list(function(iter(given))))
                    for _ in range(2)
                )
            assert first.result() == second.result()
            yield from second.result()

        return map_batches(frame, both, schema)

    monkeypatch.setattr(preparation, "map_batches", twice)
    events = many_events()
    manifest = sj.spark.prepare(session.createDataFrame(events), tmp_path / "out")
    assert entries(sj.read(tmp_path / "out")) == entries(sj.data.from_arrow(events))
    written = [*(tmp_path / "out" / "train").iterdir()]
    assert len(written) == len(manifest.train) > 3


@pytest.mark.parametrize("changed", ["entries", "user", "item", "value", "when"])
def test_the_frame_is_another_one_when_it_is_computed_again(
    session, changed, tmp_path, monkeypatch
):
    """What was kept of it is lost before the parts are written, as executors may be."""
    functions = pytest.importorskip("pyspark.sql.functions")
    lost, map_batches = tmp_path / "lost", preparation.map_batches

    @functions.udf("boolean")
    def is_another(user):
        return lost.exists()

    def after_a_loss(frame, function, *rest):
        if isinstance(function, preparation.Write):
            lost.touch()
            session.catalog.clearCache()
        return map_batches(frame, function, *rest)

    monkeypatch.setattr(preparation, "map_batches", after_a_loss)
    frame = session.createDataFrame(many_events())
    flag = is_another(frame["user"])
    if changed == "entries":
        frame, came = frame.where(~flag | (frame["user"] % 2 == 1)), r"[\d,]+ came"
    else:
        # Users, values and times that were not there, but items that were.
        column = frame[changed]
        other = 1499 - column if changed == "item" else column + 1
        frame = frame.withColumn(changed, functions.when(flag, other).otherwise(column))
        came = "as many with other content came"
    out = tmp_path / "out"
    told = rf"entries were counted, but {came}\. .*Write the frame to a table first"
    with pytest.raises(RuntimeError, match=told):
        sj.spark.prepare(frame, out, time="when", split_time=3000)
    assert not (out / "manifest.json").exists()


def test_workers_of_another_version(session, tmp_path, monkeypatch):
    frame = session.createDataFrame(pa.table({"user": ["a"], "item": ["x"]}))
    with monkeypatch.context() as patch:
        patch.setattr(sj, "__version__", "9.9")
        with pytest.raises(RuntimeError, match=r"driver has .*9\.9, but a worker has"):
            sj.spark.prepare(frame, tmp_path / "out")
    # What the driver tells workers of itself.
    monkeypatch.setattr(session.sparkContext, "pythonVer", "3.99")
    with pytest.raises(
        RuntimeError, match=r"have another minor version of Python\. The"
    ):
        sj.spark.prepare(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mark", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"),
        ("metadata/v1.metadata.json", "Iceberg"),
        (".hoodie/hoodie.properties", "Hudi"),
        (None, None),
    ],
)
def test_files_of_a_table_without_its_log_are_refused(session, tmp_path, mark, kind):
    """Those of earlier versions would be read, too."""
    folder = tmp_path / "a table"
    part = folder / "data" / "dt=1"
    part.mkdir(parents=True)
    pq.write_table(pa.table({"user": ["ann"], "item": ["tea"]}), part / "1.parquet")
    if mark is None:
        sj.spark.prepare(session.read.parquet(str(folder)), tmp_path / "out")
        return
    (folder / mark).parent.mkdir()
    (folder / mark).write_text("{}")
    frame = session.read.parquet(str(folder / "data")).groupBy("user", "item").count()
    with pytest.raises(
        sj.DataError, match=rf"a table: is a table of {kind}, but the fr"
    ):
        sj.spark.prepare(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()
