"""Reads from and writes to an object store that fails, also by processes that are killed."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import contents

import sparsejax as sj
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared import folder_files
from sparsejax.data.prepared.folder import Manifest, vocabulary_hash

pytest.importorskip("duckdb")

ROWS = 300


def events(seed=0):
    rng = np.random.default_rng(seed)
    columns = {"user": rng.integers(0, ROWS, 4000), "item": rng.integers(0, 50, 4000)}
    return pa.table(columns | {"value": rng.random(4000)})


class Store:
    """The store of `bucket`, with faults.

    Attributes:
      address: of the bucket.
      query: what completes an address.
      files: the file system.
      requests: method, path and number of bytes of each response's body so far.
      fault: called with method, path and number of each request before the store; if it
        returns a word, this happens instead: "503", "stall" or "cut".
    """

    def __init__(self, bucket):
        self.address, self.query = bucket
        self.files, _ = pa.fs.FileSystem.from_uri(self.address + self.query)
        self.requests: list[tuple[str, str, int]] = []
        self.fault = lambda method, path, number: None
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def at(self, name):
        return f"{self.address}/{name}{self.query}"

    def answer(self, application, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path, 0))
            number = len(self.requests)
        match self.fault(method, path, number):
            case "503":
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>wait</Message></Error>"]
            case "stall":
                self.ended.wait()
            case "cut":
                environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]) // 2)
                raise ConnectionResetError
        body = b"".join(application(environ, start_response))
        self.requests[number - 1] = method, path, len(body)
        return [body]


@pytest.fixture
def store(bucket, monkeypatch):
    from moto.moto_server import werkzeug_app

    found = Store(bucket)
    kind = werkzeug_app.DomainDispatcherApplication
    answer = kind.__call__
    monkeypatch.setattr(
        kind,
        "__call__",
        lambda self, *given: found.answer(lambda *a: answer(self, *a), *given),
    )
    yield found
    found.ended.set()
    found.files.delete_dir_contents("shop")


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(folder_files, "GROUP_ENTRIES", 200)
    monkeypatch.setattr(folder_files, "FILE_ENTRIES", 600)


@pytest.mark.parametrize("fault", ["503", "stall", "cut"])
def test_faults_are_retried(fault, store, small_groups):
    table, failed = events(), []

    def happens(method, path, number):
        if fault == "503":
            fails = number % 10 == 5
        else:
            fails = path.endswith("part.parquet") or "/train/" in path
            fails &= not failed and method == ("GET" if fault == "stall" else "PUT")
        failed.extend([number] * fails)
        return fault if fails else None

    store.fault = happens
    manifest = sj.prepare(table, store.at("out"))
    found = sj.read(store.at("out"))
    assert contents(found) == contents(
        sj.data.from_arrow(table).align_rows(found.row_names)
    )
    assert failed and manifest.num_rows() == ROWS


def test_a_file_that_is_gone(store):
    sj.prepare(events(), store.at("out"))
    scanned = sj.data.scan_parquet(store.at("out"))
    store.files.delete_dir("shop/out/train")
    with pytest.raises(sj.DataError, match=r"^s3://shop/out/train/part-.*\.parquet: "):
        scanned.read(0, 10)


def test_an_upload_that_is_interrupted(store):
    content = os.urandom(2**20) * 25  # in three pieces

    def interrupts(method, path, number):
        if method == "PUT" and not told:
            told.append(number)
            signal.raise_signal(signal.SIGINT)

    told: list[int] = []
    store.fault = interrupts
    place = Place.of(store.at("large"))
    with pytest.raises(KeyboardInterrupt), place.writing() as file:
        file.write(content)
    assert told
    assert place.size() in (None, len(content))


def everything(store, folder):
    selector = pa.fs.FileSelector(f"shop/{folder}", recursive=True)
    found = {}
    for info in store.files.get_file_info(selector):
        if info.is_file:
            with store.files.open_input_stream(info.path) as stream:
                found[info.path.partition(folder)[2]] = stream.read()
    return found


# Each line is a folder to prepare, in a new process that has the packages already.
PREPARES = """
import os, sys
import pyarrow.parquet
import sparsejax as sj
from sparsejax.data.prepared import folder_files, preparation
folder_files.GROUP_ENTRIES, folder_files.FILE_ENTRIES = 200, 600
for out in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        sj.prepare(pyarrow.parquet.read_table(sys.argv[1]), out.strip())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_preparing_that_is_killed_at_any_point(store, tmp_path, small_groups):
    pq.write_table(events(), tmp_path / "events.parquet")
    sj.prepare(events(), store.at("whole"))
    whole = everything(store, "whole")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PREPARES, str(tmp_path / "events.parquet")],
        env=os.environ | {"TMPDIR": str(scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def status(folder, kill_at=None):
            """Runs a process that may be killed at a request; returns its exit status and the
            number of requests.
            """
            begun, known, pids = len(store.requests), threading.Event(), []

            def kills(method, path, number):
                if number - begun == kill_at:
                    known.wait()
                    os.kill(pids[0], signal.SIGKILL)

            store.fault = kills
            print(store.at(folder), file=process.stdin, flush=True)
            pids.append(int(process.stdout.readline()))
            known.set()
            ended = int(process.stdout.readline())
            store.fault = lambda *_: None
            return ended, len(store.requests) - begun

        ended, count = status("first")
        assert ended == 0 and everything(store, "first") == whole
        for fifths in range(5):
            killed, _ = status("again", 1 + (count - 1) * fifths // 5)
            assert killed == -signal.SIGKILL
            with pytest.raises(sj.DataError, match="not finished|no such file"):
                sj.read(store.at("again"))
        assert status("again")[0] == 0
        assert everything(store, "again") == whole
        process.stdin.close()
    # The engine's own folder alone is left.
    assert all(path.name.startswith(".sparsejax-") for path in scratch.iterdir())


@pytest.mark.parametrize(
    ("same", "writes"), [(True, "train"), (False, "train"), (False, "vocabulary")]
)
def test_two_at_once(same, writes, store, small_groups):
    """Another preparation finishes while one writes its rows, or its vocabulary."""
    sj.prepare(events(seed=not same), store.at("quick"))
    quick = everything(store, "quick")

    def finishes(method, path, number):
        if method == "PUT" and f"/slow/{writes}" in path and not done:
            done.append(number)
            pa.fs.copy_files(
                "shop/quick",
                "shop/slow",
                source_filesystem=store.files,
                destination_filesystem=store.files,
            )

    done: list[int] = []
    store.fault = finishes
    if same:
        sj.prepare(events(), store.at("slow"))
        assert everything(store, "slow") == quick
    else:
        with pytest.raises(FileExistsError, match="another preparation has finished"):
            sj.prepare(events(), store.at("slow"))
        found = everything(store, "slow")
        assert {name: found[name] for name in quick} == quick
    assert contents(sj.read(store.at("slow"))) == contents(sj.read(store.at("quick")))
    assert done


def test_how_little_is_asked_for(store, monkeypatch):
    """Of a folder of many files each of four processes reads a quarter."""
    monkeypatch.setattr(folder_files, "GROUP_ENTRIES", 2**16)
    monkeypatch.setattr(folder_files, "FILE_ENTRIES", 40 * 2**16)
    rng = np.random.default_rng(0)
    # Rows of 1 to 63 entries, whose random columns can hardly be compressed.
    lengths = rng.integers(1, 64, 160_000)
    indptr = np.append(0, np.cumsum(lengths))
    columns = np.cumsum(rng.integers(1, 1024, indptr[-1]))
    columns -= np.repeat(columns[indptr[:-1]], lengths)
    names = pa.array(np.arange(len(lengths))).cast(pa.large_string())
    folder, items = Place.of(store.at("large")), np.arange(2**16).astype("T")
    with folder_files.part_writer(folder, "train", "id") as writer:
        indices = columns.astype(np.int32)
        writer.add(Entries(indptr, {"indices": indices}, {"names": names}))
    manifest = Manifest(
        id="id",
        indicator=True,
        num_items=len(items),
        vocabulary=vocabulary_hash(items),
        train=tuple(writer.files),
        test=(),
        left_out={},
        skipped={},
        settings={},
        vocabulary_file="vocabulary.parquet",
    )
    folder_files.finish(folder, manifest, items, np.zeros(len(items)))
    sizes = [file.size for file in manifest.train]
    assert len(sizes) == 2
    for quarter in range(4):
        begun = len(store.requests)
        scanned = sj.data.scan_parquet(store.at("large"))
        assert len(store.requests) - begun <= 3, store.requests[begun:]
        ends = [scanned.num_rows * part // 4 for part in (quarter, quarter + 1)]
        begun = len(store.requests)
        read = scanned.read(*ends)
        np.testing.assert_array_equal(
            read.indices, columns[indptr[ends[0]] : indptr[ends[1]]]
        )
        asked = sum(size for _, _, size in store.requests[begun:])
        assert 0.8 * sum(sizes) / 4 < asked <= 1.1 * sum(sizes) / 4
    # However many files there are.
    many = dataclasses.replace(manifest, train=manifest.train * 500)
    store.files.delete_file("shop/large/manifest.json")
    folder_files.finish(folder, many, items, np.zeros(len(items)))
    begun = len(store.requests)
    scanned = sj.data.scan_parquet(store.at("large"))
    assert len(store.requests) - begun <= 3
    assert scanned.num_rows == 500 * len(lengths)
