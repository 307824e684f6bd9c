"""Several processes train together; some are lost or asked to end; other processes resume."""

import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import socket
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
from sparsejax.data import ClickSchema, KeyColumn
from sparsejax.data.datasets import msweb
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.mesh import processes
from sparsejax.runs import folders

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
from sparsejax.cli import main as cli
raise SystemExit(cli.main())
"""
# The same, which also exports the model that it loads.
EXPORTING = f"""
import sys
import sparsejax as sj
from sparsejax.runs import folders
restored = folders.restored_modules
def exported(folder, *arguments):
    model, optimizer = restored(folder, *arguments)
    sj.export_predictor(model, f"{{folder.directory}}/predictor", k=3, batch_size=16)
    try:
        sj.export_predictor(model, f"{{folder.directory}}/no/predictor")
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.__stderr__)
    return model, optimizer
folders.restored_modules = exported
{PROGRAM}
"""


def start(
    argv: list[str],
    folder: pathlib.Path,
    *,
    processes: int,
    devices: int,
    program: str = PROGRAM,
):
    """Starts the processes of one command. Their output is written into `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
    }
    started = []
    for i in range(processes):
        flags = ["--coordinator", address, "--num-processes", str(processes)]
        with open(folder / f"{i}.out", "w") as out, open(folder / f"{i}.err", "w") as e:
            started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        program,
                        *argv,
                        *flags,
                        "--process-id",
                        f"{i}",
                    ],
                    stdout=out,
                    stderr=e,
                    env=environment,
                )
            )
    return started


def said(folder: pathlib.Path, process: int, where: str = "err") -> str:
    return (folder / f"{process}.{where}").read_text()


def wait_for(step: int, checkpoints: Checkpoints, processes) -> None:
    """Waits until there is a checkpoint after a step."""
    while not [s for s in checkpoints.steps() if s > step]:
        assert all(p.poll() is None for p in processes)
        time.sleep(0.05)


def ended(processes, seconds: float = 300) -> list[int]:
    """Waits for processes; returns their exit statuses."""
    end = time.monotonic() + seconds
    try:
        return [p.wait(end - time.monotonic()) for p in processes]
    finally:
        for p in processes:
            p.kill()


def history(folder: pathlib.Path) -> list[dict[str, float]]:
    progress = folders.checkpoints_of(folder, folders.load_run(folder)[0]).progress()
    assert progress is not None
    return progress["history"]


def test_a_run_survives_its_processes(tmp_path):
    rows, _ = msweb().train.split_rows(0.25, seed=0)
    train, heldout = rows.split(0.8, seed=0)
    files = [str(tmp_path / name) for name in ("train.parquet", "heldout.parquet")]
    train.save(files[0])
    heldout.save(files[1])
    argv = ["train", files[0], "--validation", files[1], "--hidden", "8"]
    argv += ["--batch-size", "64", "--optimizer", "sgd"]  # compiles fastest
    argv += ["--decay", "none"]  # so that a resume may raise the number of epochs
    assert main([*argv, "--run", str(tmp_path / "whole"), "--epochs", "3"]) == 0
    expected = history(tmp_path / "whole")

    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints")
    argv += ["--run", str(folder), "--checkpoint-seconds", "0"]

    # Two processes, and one is killed.
    two = start([*argv, "--epochs", "1"], tmp_path, processes=2, devices=1)
    wait_for(0, checkpoints, two)
    two[1].send_signal(signal.SIGKILL)
    assert ended(two)[0] == 1, said(tmp_path, 0)
    assert said(tmp_path, 0).endswith(
        "sparsejax: error: another process was lost; to continue, repeat the command "
        "with --resume\n"
    )
    assert said(tmp_path, 0, "out") == "" and "rows" not in said(tmp_path, 1)
    newest = checkpoints.steps()[-1]
    assert 0 < newest < expected[0]["step"]

    # Two of two devices each go on, and one is told to end: both save, and end.
    argv += ["--resume"]
    flags = ["--epochs", "2", "--mesh", "data=2,model=2"]
    two = start([*argv, *flags], tmp_path, processes=2, devices=2)
    wait_for(newest, checkpoints, two)
    two[1].send_signal(signal.SIGTERM)
    assert ended(two) == [130, 143], said(tmp_path, 0)
    assert "interrupted; to continue, repeat the command with --resume" in said(
        tmp_path, 1
    )
    assert newest < checkpoints.steps()[-1] < expected[1]["step"]

    # One goes on to the end, on a mesh of its own.
    assert main([*argv, "--epochs", "3", "--mesh", "data=2,model=4"]) == 0
    for ours, theirs in zip(history(folder), expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"examples_per_second"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3)

    # What is written comes from the first alone.
    out = tmp_path / "recommended.tsv"
    argv = ["predict", str(folder), files[0], "--out", str(out), "--k", "3"]
    argv += ["--mesh", "model=2", "--keep-seen"]
    two = start(argv, tmp_path, processes=2, devices=1, program=EXPORTING)
    assert ended(two) == [0, 0], said(tmp_path, 0)
    lines = out.read_text().splitlines()
    assert len(lines) == train.num_rows and lines[0].count(":") == 2
    assert "there is no folder" in said(tmp_path, 0)
    assert "process 0 has failed" in said(tmp_path, 1)
    some = train.align_rows(train.row_names[:20])
    names = sj.load_predictor(folder / "predictor").recommend(some).names(train)
    for line, expected in zip(lines, names, strict=False):
        entries = line.partition("\t")[2].split(":")
        assert [entry.partition(",")[0] for entry in entries] == expected


def test_processes_read_chunks_together(tmp_path):
    data, _ = msweb().train.split_rows(0.1, seed=0)
    path = str(tmp_path / "data.parquet")
    data.save(path)
    argv = ["train", path, "--chunk-rows", "1000", "--hidden", "8", "--epochs", "1"]
    argv += ["--batch-size", "128", "--optimizer", "sgd", "--run"]
    assert main([*argv, str(tmp_path / "alone")]) == 0
    two = [*argv, str(tmp_path / "two"), "--mesh", "data=2"]
    assert ended(start(two, tmp_path, processes=2, devices=1)) == [0, 0]
    [ours], [expected] = (history(tmp_path / name) for name in ("two", "alone"))
    np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=1e-5)


def test_histories_in_processes(tmp_path):
    """Two processes do what one does."""
    rows = [[(u * 7 + n * (1 + u % 3)) % 90 for n in range(5)] for u in range(150)]
    indptr, times = np.arange(151) * 5, np.tile(np.arange(5) * 3600, 150)
    users, items = (np.arange(n).astype(str) for n in (150, 90))
    data = sj.SequenceDataset(indptr, np.ravel(rows), users, items, times)
    data.save(tmp_path / "data.parquet")
    config = sj.HSTUConfig(max_length=4, width=8, blocks=1)
    (tmp_path / "hstu.json").write_text(json.dumps(config.to_json()))
    argv = ["train", str(tmp_path / "data.parquet"), "--validation", "last"]
    argv += ["--config", str(tmp_path / "hstu.json"), "--batch-size", "64", "--run"]
    assert main([*argv, str(tmp_path / "one"), "--epochs", "2"]) == 0
    two = [*argv, str(tmp_path / "two"), "--epochs", "2", "--mesh", "data=2,model=2"]
    assert ended(start(two, tmp_path, processes=2, devices=2)) == [0, 0], said(
        tmp_path, 0
    )
    found, expected = (history(tmp_path / name) for name in ("two", "one"))
    for ours, theirs in zip(found, expected, strict=True):
        for name in ours.keys() - {"examples_per_second"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-3)


def test_click_models_in_processes(tmp_path, capsys):
    """Two give the losses of one. One that is killed goes on with the same bits."""
    path = ROOT / "examples" / "04_clicks.py"
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    settings: dict[str, Any] = {"rows": 2000, "num_epochs": 6, "kind": "wide_deep"}
    example = runpy.run_path(str(path))
    example["main"](**settings)
    expected = capsys.readouterr().out
    argv = ["--rows", "2000", "--num-epochs", "6", "--model", "wide_deep"]

    meshed = [*argv, "--mesh", "2,1"]
    two = start(meshed, tmp_path, processes=2, devices=1, program=program)
    assert ended(two) == [0, 0], said(tmp_path, 0)
    assert "loss" not in said(tmp_path, 1, "out")

    def losses(text):
        return [float(loss) for loss in re.findall(r"loss (\S+),", text)]

    found = losses(said(tmp_path, 0, "out"))
    np.testing.assert_allclose(found, losses(expected), atol=2e-6)

    folder = tmp_path / "checkpoints"
    checkpointed = [*argv, "--checkpoints", str(folder)]
    one = start(checkpointed, tmp_path, processes=1, devices=1, program=program)
    wait_for(0, Checkpoints(folder), one)
    one[0].send_signal(signal.SIGKILL)
    ended(one)
    example["main"](**settings, checkpoints=str(folder))
    assert capsys.readouterr().out == expected


def test_dynamic_tables_in_processes(tmp_path):
    """Two that were killed go on with the same bits; one goes on with the same ids."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 200, 1000) + np.arange(1000) // 5
    names = users.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"click": users % 2, "user": names}), path)
    tables = DynamicTables(num_rows=256, evict="lru")
    config = WideDeepConfig(dim=2, hidden=(4,), dynamic=tables)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    schema = ClickSchema("click", ids={"user": KeyColumn()})
    (tmp_path / "schema.json").write_text(json.dumps(schema.to_json()))
    argv = ["train", str(path), "--schema", str(tmp_path / "schema.json")]
    argv += ["--config", str(tmp_path / "config.json"), "--model", "wide_deep"]
    argv += ["--batch-size", "64", "--optimizer", "sgd", "--learning-rate", "1"]
    argv += ["--epochs", "9", "--checkpoint-seconds", "0", "--run"]
    places = [tmp_path / name for name in ("two", "whole", "one")]

    def train(folder, *flags):
        command = [*argv, str(folder), "--mesh", "model=2", *flags]
        return start(command, tmp_path, processes=2, devices=1)

    two = train(places[0])
    wait_for(4, Checkpoints(places[0] / "checkpoints"), two)
    two[1].send_signal(signal.SIGKILL)
    assert ended(two)[0] == 1, said(tmp_path, 0)
    shutil.copytree(places[0], places[2])
    for place, flags in ((places[0], ["--resume"]), (places[1], [])):
        assert ended(train(place, *flags)) == [0, 0], said(tmp_path, 0)
    assert main([*argv, str(places[2]), "--resume"]) == 0
    runs = [sj.Run.load(place) for place in places]
    states = [jax.tree.map(np.asarray, nnx.state(run.model)) for run in runs]
    jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
    whole, one = (run.model.embeddings for run in runs[1:])
    assert whole.stats() == one.stats() and whole.stats()["user"].evicted > 50
    np.testing.assert_array_equal(one.ids("user"), whole.ids("user"))
    expected, found = (run.predict(path) for run in runs[1:])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mesh", "data=2;model=4"], "--mesh is written data=2,model=4, got"),
        (["--mesh", "data=2,data=4"], "--mesh is written data=2,model=4, got"),
        (["--mesh", "rows=2"], "--mesh is written data=2,model=4, got"),
        (["--mesh", "data=3"], "data must be a divisor of 64, got 3"),
        (["--mesh", "data=2,model=64"], "needs 128 devices, there are 8"),
        (["--process-id", "1"], "give the coordinator, the number of processes and"),
    ],
)
def test_devices_that_cannot_be(flags, message, tmp_path, capsys):
    assert main(["train", "data.tsv", "--run", str(tmp_path / "r"), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_process_without_a_cluster(monkeypatch, tmp_path, capsys):
    def initialize(*args, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    argv = ["train", "data.tsv", "--run", str(tmp_path / "r"), "--distributed"]
    assert main(argv) == 1
    assert "no cluster was found" in capsys.readouterr().err


def test_the_mesh_of_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert processes.mesh_of(None).shape == {"data": 4, "model": 2}
    with pytest.raises(ValueError, match="has 4 devices, but 4 processes have 8"):
        processes.mesh_of("model=4")
    assert processes.mesh_of("auto").shape == {"data": 4, "model": 2}
    monkeypatch.setattr(jax, "device_count", lambda: 12)
    with pytest.raises(ValueError, match="with 12 devices need --mesh: model must be"):
        processes.mesh_of(None)


@pytest.mark.parametrize(("devices", "used"), [(1, 1), (2, 2), (6, 4), (8, 8)])
def test_the_mesh_of_all_devices(monkeypatch, devices, used):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert processes.mesh_of("auto").shape == {"data": 1, "model": used}


def test_gpus_without_work_are_named(monkeypatch, capsys):
    assert processes.idle_gpus() == 0  # of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    printing.print_summary("5 rows", nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    said = capsys.readouterr().err
    assert said.splitlines()[1] == (
        "one GPU of 8 is used; --mesh auto divides the model over all"
    )
    with jax.set_mesh(processes.mesh_of("auto")):
        assert processes.idle_gpus() == 0


def test_what_one_process_does_for_all(monkeypatch):
    done = []
    processes.in_first(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        processes.in_first(lambda: 1 / 0)
    assert done == [1] and processes.is_same_everywhere("a")
    assert processes.true_anywhere(True, False) == [True, False]

    def others_failed(flags):
        return np.stack([flags, [True] * len(flags)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", others_failed)
    with pytest.raises(processes.OtherProcessError):
        processes.in_first(lambda: done.append(2))
    assert done == [1, 2]
