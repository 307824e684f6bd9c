"""Ends each command by a signal at random times, and counts how many ended as they should.

    python benchmarks/signals.py [--tries 20] [--cores 0 1 2] [--only train serve]

A command begins with nothing cached. The time is uniform between 0 and the command's own
length, at most 30 s. Right is: the status 130 or 143 (0 for a service that is ready) within
3 s, one line that says so, no traceback, and no file with another name than what the command
writes. A training may say that it saves first.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent / "tests")]

_COLUMNS = "--label label --dense price --categories user item"
_HISTORIES = "train shop.parts/train.parquet --model sasrec --run new --epochs 3"
# The command, and what it may write.
_COMMANDS = {
    "train": (
        f"train clicks.csv --model dlrm --run new --epochs 3 {_COLUMNS}",
        ("new",),
    ),
    "train histories": (_HISTORIES, ("new",)),
    "evaluate": (
        "evaluate run shop.parts/train.parquet shop.parts/heldout.parquet",
        (),
    ),
    "predict": ("predict run shop.parts/train.parquet --out best.csv", ("best.csv",)),
    "export": ("export run new.predictor", ("new.predictor",)),
    "report": (
        "report run --train shop.parts/train.parquet --test shop.parts/heldout.parquet",
        ("report.html",),
    ),
    "tune": ("tune shop.csv --trials 1 --epochs 1 --run new", ("new",)),
    "split": ("split shop.csv --by last --histories --out new", ("new",)),
    "prepare": ("prepare shop.csv new", ("new",)),
    "serve": ("serve shop.predictor --port 0", ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--cores", nargs="+", default=["0"])
    parser.add_argument("--only", nargs="+", default=list(_COMMANDS))
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    cores: queue.Queue[str] = queue.Queue()
    for own in arguments.cores:
        cores.put(own)
    counts: dict[str, collections.Counter] = {
        n: collections.Counter() for n in arguments.only
    }
    lock = threading.Lock()

    def attempt(name: str, seed: int) -> None:
        own = cores.get()
        try:
            with lock:
                length = lengths[name]
            found = _signalled(
                shop, name, random.Random(seed).uniform(0, length), own, seed % 2
            )
        finally:
            cores.put(own)
        with lock:
            counts[name][found["verdict"]] += 1
            if found["verdict"] != "right":
                print(json.dumps(found), flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(counts, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        shop = pathlib.Path(folder)
        _make(shop, arguments.cores[0])
        lengths: dict[str, float] = {}
        with concurrent.futures.ThreadPoolExecutor(len(arguments.cores)) as pool:
            list(
                pool.map(
                    lambda name: lengths.update({name: _length(shop, name, cores)}),
                    arguments.only,
                )
            )
            print(
                json.dumps({name: round(each, 1) for name, each in lengths.items()}),
                flush=True,
            )
            tries = [
                (name, seed)
                for seed in range(arguments.tries)
                for name in arguments.only
            ]
            list(pool.map(lambda each: attempt(*each), tries))
    for name, each in counts.items():
        print(f"{name}: {dict(each)}")


def _make(shop: pathlib.Path, cores: str) -> None:
    from as_user import shops

    shops.clicks(shop / "clicks.csv", 12_000)
    shops.histories(shop / "shop.csv", 600)
    for line in (
        "split shop.csv --by last --histories --out shop.parts",
        _HISTORIES.replace("new", "run").replace("3", "1"),
        "export run shop.predictor",
    ):
        process, _ = _started(line, shop, cores, shop)
        assert process.wait() == 0, line


def _length(shop: pathlib.Path, name: str, cores: queue.Queue) -> float:
    """Seconds of the command, without a signal; of a service, a second more than its start."""
    own = cores.get()
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(shop, folder)
        begin = time.perf_counter()
        process, file = _started(_COMMANDS[name][0], copy, own, folder)
        while process.poll() is None and time.perf_counter() - begin < 30:
            time.sleep(0.05)
            if '"ready"' in file.read_text():
                break
        length = time.perf_counter() - begin
        process.kill()
        process.wait()
    cores.put(own)
    return length + (name == "serve")


def _signalled(
    shop: pathlib.Path, name: str, seconds: float, cores: str, term: int
) -> dict:
    number = signal.SIGTERM if term else signal.SIGINT
    line, writes = _COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(shop, folder)
        before = set(os.listdir(copy))
        process, file = _started(line, copy, cores, folder)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        else:
            return {"command": name, "verdict": "ended before"}
        begin = time.perf_counter()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        took, text = time.perf_counter() - begin, file.read_text()
        lines = text.splitlines()
        others = [each for each in set(os.listdir(copy)) - before if each not in writes]
        ready, saves = '"ready"' in text, "saves first" in text
        right = process.returncode == 128 + number or (
            ready and process.returncode == 0
        )
        right &= "Traceback" not in text and not others and (took < 3 or saves)
        said = [each for each in lines if "interrupted" in each]
        right &= (ready and process.returncode == 0) or len(said) == 1
        verdict = "right" if right else "wrong"
        if process.returncode == 0 and not ready:
            verdict = "ended before"  # as the signal was sent
        elif process.returncode == -number or (not right and "sparsejax" not in text):
            verdict = "before the first module"
        return {
            "command": name,
            "verdict": verdict,
            "at": round(seconds, 2),
            "took": round(took, 2),
            "signal": number.name,
            "status": process.returncode,
            "said": lines[-3:],
            "others": others,
        }


def _copy(shop: pathlib.Path, folder: str) -> pathlib.Path:
    copy = pathlib.Path(folder) / "shop"
    shutil.copytree(
        shop,
        copy,
        copy_function=os.link,
        ignore=shutil.ignore_patterns("said", "cache"),
    )
    return copy


def _started(line: str, folder: pathlib.Path, cores: str, notes: str | pathlib.Path):
    """The process, and the file of what it says."""
    file = pathlib.Path(notes) / "said"
    environment = os.environ | {
        "XDG_CACHE_HOME": str(pathlib.Path(notes) / "cache"),
        "JAX_PLATFORMS": "cpu",
    }
    with file.open("w") as said:
        process = subprocess.Popen(
            ["taskset", "-c", cores, sys.executable, "-m", "sparsejax", *line.split()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    return process, file


if __name__ == "__main__":
    main()
