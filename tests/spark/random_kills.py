"""Kills processes of a cluster of Spark at random, and checks that results are complete.

    python tests/spark/random_kills.py --kills 20

It needs the environment of `make test-spark`. Each kill (SIGKILL) hits an executor, a Python
worker, the child of a training, or the driver, while a training by two tasks or a prediction
runs, whose run and parts are in a store. After the loss of the driver the same job is done
by another one. Each result must have the bytes of the one that nothing disturbed, and at the
end no process and no temporary file of ours may be left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from spark_processes import is_running, processes_below

PARTS, K = 12, 5
OPTIONS = ["--hidden", "4", "--linear", "None", "--batch-size", "64", "--epochs", "8"]
OPTIONS += ["--optimizer", "sgd", "--checkpoint-seconds", "0"]
_ENDING_SECONDS, _JOB_SECONDS = 90, 900


def drive() -> None:
    """The code of a driver: runs jobs from its standard input, one on each line."""
    from pyspark.sql import SparkSession

    import sparsejax as sj

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # As many executors may be lost as are killed.
        .config("spark.deploy.maxExecutorRetries", "-1")
        .config("spark.task.maxFailures", "8")
        .getOrCreate()
    )
    warnings.simplefilter("always")
    for line in sys.stdin:
        job = json.loads(line)
        if job["kind"] == "train":
            data, run = job["arguments"]
            sj.spark.train(session, data, run, processes=2, options=OPTIONS)
        else:
            sj.spark.predict(session, *job["arguments"], k=K, parts=PARTS)
        print("done", file=answers, flush=True)
    session.stop()


class Driver:
    """A driver in a separate process."""

    def __init__(self, log: pathlib.Path):
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--drive"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def begin(self, job: dict) -> threading.Thread:
        """Starts a job; returns a thread that ends with the job, or with the driver."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        self.answer = ""

        answers = self.process.stdout

        def wait() -> None:
            self.answer = answers.readline()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def finish(self, waiting: threading.Thread) -> None:
        """Waits until the job has ended."""
        waiting.join(_JOB_SECONDS)
        if self.answer != "done\n":
            raise SystemExit(f"the driver has said {self.answer!r}; see its log")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(_ENDING_SECONDS)


def left_of(processes: list[int]) -> list[int]:
    """The processes that still run after the time in which they should end."""
    end = time.monotonic() + _ENDING_SECONDS
    while left := [p for p in processes if is_running(p)]:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return left


@contextlib.contextmanager
def bucket() -> Iterator[tuple[pa.fs.FileSystem, str, str]]:
    """An object store: its file system, its address, and the query part of addresses."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's requests
    os.environ |= {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
    store, _ = pa.fs.FileSystem.from_uri(f"s3://shop{query}&allow_bucket_creation=true")
    store.create_dir("shop")
    try:
        yield store, "s3://shop", query
    finally:
        server.stop()


def contents(store: pa.fs.FileSystem, folder: str) -> dict[str, bytes]:
    """The files of a folder in the store."""
    found = {}
    for info in store.get_file_info(pa.fs.FileSelector(folder, recursive=True)):
        if info.is_file:
            with store.open_input_stream(info.path) as stream:
                found[info.path.removeprefix(folder)] = stream.read()
    return found


def main(kills: int, seed: int) -> None:
    import numpy as np
    from run_folders import parameters

    import sparsejax as sj
    from sparsejax.cli.main import main as sparsejax
    from sparsejax.data.prepared import folder_files

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, bucket() as (store, address, query):
        folder = pathlib.Path(name)
        scratch = folder / "scratch"
        scratch.mkdir()
        os.environ |= {"TMPDIR": str(scratch), "PYSPARK_PYTHON": sys.executable}
        os.environ["PYTHONPATH"] = str(ROOT)
        log = pathlib.Path(tempfile.gettempdir()) / "random_kills.log"
        print("the drivers' log is", log)
        events = np.random.default_rng(0)
        table = pa.table(
            {
                "user": events.integers(0, 300, 6000),
                "item": events.integers(0, 40, 6000) ** 2 // 40,
            }
        )
        pq.write_table(table, "shop/log.parquet", filesystem=store)
        folder_files.GROUP_ENTRIES = 300
        shop, predictor = f"{address}/prepared{query}", f"{address}/predictor{query}"
        sj.prepare(f"{address}/log.parquet{query}", shop, split_fraction=0.8)

        def job(kind: str, out: str) -> dict:
            given = [shop] if kind == "train" else [predictor, shop]
            return {"kind": kind, "arguments": [*given, f"{address}/{out}{query}"]}

        driver = Driver(log)
        seconds = {}
        for kind in ("train", "predict"):  # which nothing disturbs
            begin = time.monotonic()
            driver.finish(driver.begin(job(kind, f"{kind}-whole")))
            seconds[kind] = time.monotonic() - begin
            if kind == "train":
                sj.spark.fetch_run(f"{address}/train-whole{query}", folder / "whole")
                file = folder / "model"
                assert sparsejax(["export", str(folder / "whole"), str(file)]) == 0
                with store.open_output_stream("shop/predictor") as stream:
                    stream.write(file.read_bytes())
        trained = parameters(folder / "whole")
        predicted = contents(store, "shop/predict-whole")
        print(f"undisturbed: {seconds}", flush=True)

        done: collections.Counter[str] = collections.Counter()
        targets = ["executor", "worker", "child", "driver"]
        plan = [targets[i % len(targets)] for i in range(kills)]
        rng.shuffle(plan)
        for number, target in enumerate(plan):
            kind = "train" if target == "child" else rng.choice(["train", "predict"])
            victim, tries = None, 0
            while victim is None:  # again, if the job was over too soon
                out = f"{kind}-{number}-{tries}"
                tries += 1
                waiting = driver.begin(job(kind, out))
                # The first job of a driver waits for its start.
                at = time.monotonic() + rng.uniform(0.5, seconds[kind])
                while waiting.is_alive():
                    time.sleep(0.05)
                    below = processes_below(driver.process.pid)
                    found = (
                        [driver.process.pid]
                        if target == "driver"
                        else processes_below(driver.process.pid, target)
                    )
                    if time.monotonic() > at and found:
                        victim = rng.choice(found)
                        os.kill(victim, signal.SIGKILL)
                        break
                if target == "driver" and victim is not None:
                    driver.process.wait()
                    waiting.join()
                    if left := left_of(below):
                        raise SystemExit(f"orphans of the driver: {left}")
                    driver = Driver(log)
                    waiting = driver.begin(job(kind, out))
                driver.finish(waiting)
            if left := left_of(processes_below(driver.process.pid, "child")):
                raise SystemExit(f"orphans of a training: {left}")
            if kind == "predict":
                assert contents(store, f"shop/{out}") == predicted
            else:
                fetched = folder / out
                sj.spark.fetch_run(f"{address}/{out}{query}", fetched)
                assert parameters(fetched) == trained
            done[f"{target} in {kind}"] += 1
            print(f"{number + 1}: {target} in {kind}: complete", flush=True)
        below = processes_below(driver.process.pid)
        driver.stop()
        if left := left_of(below):
            raise SystemExit(f"orphans: {left}")
        # Spark's own folders of killed Java processes stay.
        ours = [
            path.name
            for path in scratch.iterdir()
            if not path.name.startswith(
                ("spark", "blockmgr", "hsperf", "liblz4", "artifacts")
            )
        ]
        print(json.dumps({"complete": sum(done.values()), **done, "files left": ours}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive()
    else:
        main(arguments.kills, arguments.seed)
