"""Runs that follow a folder: each file is trained on once, when it appears."""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.cli import printing
from sparsejax.cli.main import main
from sparsejax.clicks import DynamicTables, WideDeepConfig
from sparsejax.data import ClickSchema, DenseColumn, HashedColumn, KeyColumn
from sparsejax.data.sets.click_schema import VocabularyColumn
from sparsejax.engine.train.following import Feed, Followed, _Exports, _Following
from sparsejax.mesh import interrupts
from sparsejax.runs import following

SCHEMA = ClickSchema(
    "click",
    dense={"age": DenseColumn()},
    ids={"user": KeyColumn(), "seen": HashedColumn(50)},
)
BATCH = 64
WIDE_DEEP: dict[str, Any] = {
    "model": "wide_deep",
    "schema": SCHEMA,
    "dynamic": 1024,
    "batch_size": BATCH,
    "optimizer": "adagrad",  # compiles faster
}


def write(folder, name, rows, seed):
    """Writes a file under a temporary name, and renames it."""
    rng = np.random.default_rng(seed)
    users = rng.integers(20 * seed, 20 * seed + 100, rows)
    table = {
        "click": (users + rng.integers(0, 20, rows)) % 2,
        "age": rng.random(rows),
        "user": users.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "seen": [rng.integers(0, 50, n) for n in rng.integers(0, 4, rows)],
    }
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / ".new")
    (folder / ".new").rename(folder / name)


def ended_at(until, log=None):
    """A function `log` that ends a training when a file ends, after at least `until` steps."""

    def told(step, entry):
        if log is not None:
            log(entry)
        if step >= until:
            interrupts.note()

    return told


def follow(place, *, until, log=None, **options):
    """Trains for at least `until` steps, to the end of a file."""

    return sj.Run.train(
        place / "clicks",
        place / "run",
        **WIDE_DEEP,
        follow=True,
        resume=True,
        log=ended_at(until, log),
        **options,
    )


def arrays_of(run):
    return jax.tree.map(np.asarray, nnx.state((run.model, run.optimizer)))


def tables_of(model, folder):
    folder.mkdir()
    found = {}
    for node in (model.embeddings, model.linear.embeddings):
        for name in node.names:
            path = folder / f"{len(found)}.parquet"
            node.save_table(name, path)
            found[name, len(found)] = path.read_bytes()
    return found


def test_each_file_is_trained_on_once_also_after_interrupts(tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    files = [("b/1.parquet", 2500), ("b/2.parquet", 0), ("c.parquet", 70)]
    for place in (one, other):
        for seed, (name, rows) in enumerate(files):
            write(place / "clicks", name, rows, seed)
        (place / "clicks" / "_half").write_text("being written")
    steps = 40 + 2
    entries = []
    whole = follow(one, until=steps, log=entries.append)
    assert [entry["step"] for entry in entries] == [40, 42]
    assert entries[0]["inserted"] > 0 == entries[0]["refused"]
    # Told to end within the first file, at each export. It has three dispatches.
    exported = following.export_changes

    def once(*arguments):
        interrupts.note()
        return exported(*arguments)

    options = {"changes": other / "changes", "export_seconds": 0}
    with monkeypatch.context() as patched:
        patched.setattr(following, "export_changes", once)
        for _ in range(2):
            run = follow(other, until=steps, **options)
    assert len(run.history) < 2
    run = follow(other, until=steps, **options)
    jax.tree.map(np.testing.assert_array_equal, arrays_of(run), arrays_of(whole))
    # What was exported is what was trained, and later files come on top of it.
    (other / "clicks" / "c.parquet").unlink()
    write(other / "clicks", "a.parquet", 100, 5)
    run = follow(other, until=steps + 2, **options)
    assert [entry["step"] for entry in run.history] == [40, 42, 44]
    model, _ = run.settings.build(run.known)
    taken = sj.apply_changes(model, other / "changes")
    assert taken.steps == steps + 2
    found = tables_of(model, tmp_path / "taken")
    assert found == tables_of(run.model, tmp_path / "trained")
    with pytest.raises(ValueError, match="cannot resume with other data"):
        sj.Run.train(
            other / "clicks/a.parquet",
            other / "run",
            **WIDE_DEEP,
            decay="none",
            resume=True,
        )


def test_a_store_is_followed_on_a_mesh_after_another_run(tmp_path, monkeypatch, capsys):
    write(tmp_path / "clicks", "1.parquet", 640, 0)
    first = follow(tmp_path, until=10)
    later = tmp_path / "later"
    for seed, (name, rows) in enumerate([("a/1.parquet", 300), ("b.parquet", 2200)], 1):
        write(later, name, rows, seed)
    here: dict[str, Any] = {"follow": True, "batch_size": BATCH}
    first.train_more(later, tmp_path / "here", log=ended_at(5 + 35), **here)
    monkeypatch.setattr(printing, "print_file", ended_at(5 + 35))
    monkeypatch.setattr(following, "_LOOK_SECONDS_OF_STORE", 0.1)
    changes = tmp_path / "changes"
    argv = f"train file://{later} --from {tmp_path / 'run'} --run {tmp_path / 'there'}"
    argv += f" --follow --changes {changes} --mesh data=2,model=4 --batch-size {BATCH}"
    assert main(argv.split()) == 0, capsys.readouterr().err
    runs = sj.Run.load(tmp_path / "there"), first
    assert [entry["step"] for entry in runs[0].history] == [5, 40]
    losses = [[entry["loss"] for entry in run.history] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    ids = [run.model.embeddings.ids("user") for run in runs]
    np.testing.assert_array_equal(*ids)
    taken, _ = runs[0].settings.build(runs[0].known)
    sj.apply_changes(taken, changes)
    found = [
        tables_of(each, tmp_path / f"{each is taken}")
        for each in (taken, runs[0].model)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dynamic": None}, ValueError, "follow=True needs dynamic"),
        ({"num_epochs": 2}, ValueError, "num_epochs=... is of no use with follow=True"),
        ({"validation": 0.1}, ValueError, "validation=... is of no use"),
        ({"chunk_rows": 100}, ValueError, "chunk_rows=... is of no use"),
        ({"decay": "cosine"}, ValueError, "decay=cosine is of no use with follow=True"),
        ({"schema": None}, ValueError, "follow=True needs schema"),
        ({"export_seconds": 5}, ValueError, "export_seconds needs changes"),
        ({"export_seconds": -1, "changes": "c"}, ValueError, "must be at least 0"),
        ({"follow": False, "changes": "c"}, ValueError, "changes needs follow"),
        ({"model": "autoencoder"}, ValueError, "follow is of no use for a model of it"),
        ({"model": "sasrec"}, ValueError, "follow is of no use for a model of histor"),
        ({"data": __file__}, ValueError, "needs a folder .*, but this is a file"),
        ({"data": [{"click": 1}]}, TypeError, "needs a folder in which files appear"),
        ({"directory": "clicks/run"}, ValueError, "clicks/run is written while all fi"),
        ({"changes": "clicks"}, ValueError, "clicks is written .* folder elsewhere"),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model": "dlrm", "schema": SCHEMA, "dynamic": 512, "follow": True}
    given |= {"data": "clicks", "directory": "run"} | options
    if given["model"] != "dlrm":
        given["schema"] = given["dynamic"] = None
    with pytest.raises(error, match=message):
        sj.Run.train(**given)
    assert not any(tmp_path.rglob("*"))


def test_an_address_of_a_folder_here_is_a_folder_here(tmp_path):
    options: dict[str, Any] = {"schema": SCHEMA, "dynamic": 512, "follow": True}
    with pytest.raises(ValueError, match="run is written while all files below"):
        sj.Run.train(f"file://{tmp_path}", tmp_path / "run", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("wrong_types")
def test_a_file_that_was_emptied_skips_no_rows_of_the_next():
    progress = Followed({}, examples=64, file="a")
    feed = Feed(names=lambda: ["a", "b"], read=lambda name: None, seconds=1)
    nothing: Any = None
    following = _Following(nothing, progress, nothing, feed, BATCH, None)
    with pytest.raises(ValueError, match="a has 0 rows, but 64 of it were trained on"):
        following.run()


def test_categories_must_be_known_beforehand(tmp_path):
    schema = ClickSchema("click", ids={"user": KeyColumn(), "page": VocabularyColumn()})
    with pytest.raises(ValueError, match="the categories of page are not known"):
        sj.Run.train(tmp_path, schema=schema, dynamic=512, follow=True)


@pytest.mark.usefixtures("wrong_types")
def test_an_empty_folder_makes_no_file_forgotten():
    progress, looks = Followed({}, files=["a", "b"]), [["a", "c"], ["a", "b"], []]
    feed = Feed(names=looks.pop, read=lambda name: None, seconds=1)
    nothing: Any = None
    following = _Following(nothing, progress, nothing, feed, BATCH, None)
    assert [following._next() for _ in range(3)] == [None, None, "c"]
    assert progress.files == ["a"]


@pytest.mark.usefixtures("wrong_types")
def test_an_export_that_failed_is_tried_again_at_the_end(tmp_path, monkeypatch):
    full, written, said = concurrent.futures.Future(), concurrent.futures.Future(), []
    full.set_exception(OSError("the disk is full"))
    written.set_result(None)
    exports = [written, full]
    monkeypatch.setattr(following, "export_changes", lambda *_: exports.pop())
    nothing: Any = None
    changes = following._Changes(nothing, nothing, tmp_path / "changes", said.append)
    changes()
    changes.end()
    assert not exports and len(said) == 1 and "the disk is full" in said[0]


def test_an_export_that_failed_is_told_of_and_tried_again_while_no_files_come(
    tmp_path, monkeypatch
):
    ends: list[Any] = [concurrent.futures.Future() for _ in range(3)]
    begun, said = iter(ends), []
    monkeypatch.setattr(following, "export_changes", lambda *_: next(begun))
    nothing: Any = None
    changes = following._Changes(nothing, nothing, tmp_path / "changes", said.append)
    now, clock = [0.0], _Exports(changes, 60, 7)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def look(at):
        now[0] = at
        clock.do(7, if_due=True)
        return len(said), ends.index(changes._last) if changes._last else None

    assert look(0) == (0, 0)
    assert look(100) == (0, 0)  # it is still written
    now[0] = 100
    ends[0].set_exception(OSError("the disk is full"))
    assert look(101) == (1, 1)
    ends[1].set_exception(OSError("the disk is full"))
    assert look(102) == look(160) == (2, None)
    assert look(161) == (2, 2)
    ends[2].set_result(None)
    assert look(500) == look(900) == (2, None)
    changes.end()
    assert len(said) == 2


def test_a_damaged_file_ends_it_and_loses_nothing(tmp_path):
    write(tmp_path / "clicks", "1.parquet", 70, 0)
    (tmp_path / "clicks" / "2.parquet").write_bytes(b"PAR1 cut off")
    changes = tmp_path / "changes"
    with pytest.raises(sj.DataError, match="2.parquet: is not a Parquet file"):
        follow(tmp_path, until=9, changes=changes, export_seconds=1000)
    # Both have the steps of the first file.
    names = [path.name for path in sorted(changes.iterdir()) if path.is_dir()]
    assert names == ["00000000", "00000001"]
    assert [entry["step"] for entry in sj.Run.load(tmp_path / "run").history] == [2]
    write(tmp_path / "clicks", "2.parquet", 70, 1)
    run = follow(tmp_path, until=4, changes=changes)
    assert [entry["step"] for entry in run.history] == [2, 4]


def test_events_are_answered_by_and_kills_lose_nothing(tmp_path):
    # By the command: a file each second, changes each second, and a training that is killed.
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "follow.py"
    command = [sys.executable, script, "--rate", "100", "--seconds", "3"]
    command += ["--export-seconds", "1", "--kills", "2"]
    command += ["--output", tmp_path / "found.json"]
    subprocess.run(list(map(str, command)), check=True, timeout=600)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kills"] == 2 and found["events measured"] >= 100
    assert found["each file trained on once"]
    assert found["changes are the trained tables"]


def test_rows_in_host_memory_are_followed(tmp_path):
    """A quarter of them is on the device. The base and its changes are the tables."""
    for seed in range(2):
        write(tmp_path / "clicks", f"{seed}.parquet", 320, seed)
    tables = DynamicTables(num_rows=256, host_rows=1024)
    config = WideDeepConfig(dim=2, hidden=(4,), dynamic=tables)
    run = sj.Run.train(
        tmp_path / "clicks",
        tmp_path / "run",
        **(WIDE_DEEP | {"dynamic": None, "model": None}),
        config=config,
        follow=True,
        log=ended_at(10),
        changes=tmp_path / "changes",
        export_seconds=0,
    )
    model, _ = run.settings.build(run.known)
    assert sj.apply_changes(model, tmp_path / "changes").number > 0
    found = tables_of(model, tmp_path / "taken")
    assert found == tables_of(run.model, tmp_path / "trained")
