"""Times how long a new event takes until a predictor's answers depend on it.

    python benchmarks/follow.py --kills 0 --output benchmarks/results/follow.json
    python benchmarks/follow.py --output benchmarks/results/follow_kills.json

One process trains, `sparsejax train clicks/ --dynamic N --follow --changes changes/`. This process
writes a file of events each second, applies the changes to a predictor, and asks it all the time.
The events of a file are spread over its second, so half a second passes on average before the file
exists. Then the training is killed at random times, again and again, and resumed. In the end the
changes must equal the trained tables bit by bit, and each event must be trained on once.
"""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx
from report import save

import sparsejax as sj

BATCH, USERS, ITEMS = 1024, 50_000, 5_000
SCHEMA = {
    "label": "click",
    "ids": {
        "user": {"kind": "key"},
        "item": {"kind": "key"},
        "hour": {"kind": "hashed", "size": 25},
    },
}


def events(number, rate):
    """The clicks of one second. One in a hundred users is new."""
    rng = np.random.default_rng(number)
    users = rng.zipf(1.3, rate) % USERS + number * USERS // 100
    items = rng.zipf(1.2, rate) % ITEMS
    hashed = np.uint64(0x9E3779B97F4A7C15)
    return pa.table(
        {
            "click": ((users + items) % 7 < 2).astype(np.int64),
            "user": users.astype(np.uint64) * hashed,
            "item": items.astype(np.uint64) * hashed,
            "hour": rng.integers(0, 24, rate),
        }
    )


ASKED = events(0, 8).drop_columns("click")


class Writer(threading.Thread):
    """Thread that writes a file each second. A file is renamed when it is complete."""

    def __init__(self, folder, rate):
        super().__init__(daemon=True)
        self.folder, self.rate, self.ends = folder, rate, []
        self.stopped = threading.Event()

    def write(self, end):
        """Writes the file for the second that ends at `end`."""
        number = len(self.ends)
        table = events(number, self.rate)
        time.sleep(max(0.0, end - time.time()))
        hidden = self.folder / ".being_written"
        pq.write_table(table, hidden)
        hidden.rename(self.folder / f"{number:08d}.parquet")
        self.ends.append(end)

    def run(self):
        end = time.time()
        while not self.stopped.is_set():
            end += 1
            self.write(end)

    def end(self):
        """Waits until the last file is written."""
        self.stopped.set()
        self.join()


class Training:
    """The process of the training command, which may be killed and started again."""

    def __init__(self, place, seconds):
        (place / "schema.json").write_text(json.dumps(SCHEMA))
        self._command = [
            *(sys.executable, "-m", "sparsejax", "train", place / "clicks"),
            *("--run", place / "run", "--model", "dlrm", "--follow", "--resume"),
            *("--schema", place / "schema.json", "--dynamic", 2**17),
            *("--batch-size", BATCH, "--checkpoint-seconds", 2 * seconds),
            *("--changes", place / "changes", "--export-seconds", seconds),
        ]
        self._log = place / "log.txt"
        self.begin()

    def begin(self):
        with open(self._log, "ab") as log:
            words = list(map(str, self._command))
            self.process = subprocess.Popen(words, stderr=log)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait() != 0:
            raise RuntimeError("the training has failed, see log.txt")


def wait_for(there, training):
    while not there():
        if training.process.poll() is not None:
            raise RuntimeError("the training has ended, see log.txt")
        time.sleep(0.2)


def latencies(place, predictor, writer, seconds):
    """Seconds from each event to the first answer that uses it, for the events of some seconds."""
    steps = -(-writer.rate // BATCH)
    found, first, done = [], None, 0
    end = time.time() + seconds
    while time.time() < end or not found:
        taken = predictor.apply_changes(place / "changes")
        predictor.predict_records(ASKED)
        now, files = time.time(), taken.steps // steps
        if first is None:  # these events were written before the reader started
            first = done = files
        for at in writer.ends[done:files]:
            found.append(now - at + 1 - (np.arange(writer.rate) + 0.5) / writer.rate)
        done = max(done, files)
        time.sleep(0.1)
    return np.concatenate(found)


def bytes_of(model, place):
    """All parameters of a model as bytes: tables as files, and other layers."""
    place.mkdir()
    found, tables = {}, []
    for path, node in nnx.iter_graph(model):
        if isinstance(node, sj.embeddings.EmbeddingCollection):
            tables.append(path)
            for name in node.names:
                file = place / ".".join([*map(str, path), name, "parquet"])
                node.save_table(name, file)
                found[file.name] = file.read_bytes()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if not any(path[: len(table)] == table for table in tables):
            found[path] = np.asarray(variable[...]).tobytes()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=5000, help="events a second")
    parser.add_argument("--seconds", type=int, default=60, help="that are measured")
    parser.add_argument("--export-seconds", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "clicks").mkdir()
        training = Training(place, args.export_seconds)
        try:
            found = result(place, args, training)
        except Exception:
            print((place / "log.txt").read_text(), file=sys.stderr)
            raise
        finally:
            training.kill()
    save(found, args.output)


def result(place, args, training):
    """Measures latencies, and tests whether any event was lost or repeated when the training was
    killed.
    """
    changes = place / "changes"
    wait_for(lambda: list(changes.glob("0*")), training)
    sj.Run.load(place / "run").export(place / "clicks.predictor")
    writer = Writer(place / "clicks", args.rate)
    writer.write(time.time())
    steps = -(-args.rate // BATCH)
    fresh = sj.Run.load(place / "run")

    def trained():
        link = max(changes.glob("0*"))
        manifest = json.loads((link / "manifest.json").read_text())
        return manifest["steps"] // steps

    # The first steps compile programs, so they are not measured.
    wait_for(lambda: trained() > 0, training)
    predictor = sj.load_predictor(place / "clicks.predictor")
    for _ in range(3):  # the first answers compile programs, so they are not measured
        predictor.apply_changes(changes)
        predictor.predict_records(ASKED)
        time.sleep(args.export_seconds)
    writer.start()
    waits = latencies(place, predictor, writer, args.seconds)
    rng = np.random.default_rng(0)
    for _ in range(args.kills):
        # A kill before any further step would test nothing.
        further = trained() + 1
        wait_for(lambda least=further: trained() >= least, training)
        time.sleep(rng.random() * args.export_seconds)
        training.kill()
        training.begin()
    writer.end()
    wait_for(lambda: trained() == len(writer.ends), training)
    training.end()
    run = sj.Run.load(place / "run")
    other, _ = fresh.settings.build(fresh.known)
    taken = sj.apply_changes(other, changes)
    equal = bytes_of(run.model, place / "one") == bytes_of(other, place / "two")
    found = {
        "device": jax.devices()[0].device_kind,
        "events a second": args.rate,
        "export seconds": args.export_seconds,
        "events measured": len(waits),
        "seconds from event to answer": {
            "p50": float(np.median(waits)),
            "p99": float(np.quantile(waits, 0.99)),
            "most": float(waits.max()),
        },
        "kills": args.kills,
        "files": len(writer.ends),
        "steps": taken.steps,
        "each file trained on once": taken.steps == len(writer.ends) * steps,
        "changes are the trained tables": equal,
    }
    if not (found["each file trained on once"] and equal):
        raise RuntimeError(f"something is wrong: {found}")
    return found


if __name__ == "__main__":
    main()
