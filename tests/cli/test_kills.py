"""Commands killed by SIGKILL at any moment leave only complete files, and succeed when they are
repeated.
"""

import dataclasses
import itertools
import json
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from run_folders import parameters

import sparsejax as sj

KILLS = 5
SPARSEJAX = [sys.executable, "-m", "sparsejax"]
FAST = "--batch-size 64 --optimizer sgd --decay none"
TRAIN = f"train events.csv --run new --hidden 4 --checkpoint-seconds 0 --resume {FAST}"
TWO = "--train parts/train.parquet --test parts/heldout.parquet"


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that writes a file or a folder, or only prints."""

    argv: str
    out: str | None


CASES = {
    "export": Case("export items items.predictor --k 3", "items.predictor"),
    "export --calibrate": Case(
        "export clicks clicks.predictor --calibrate later.csv", "clicks.predictor"
    ),
    "evaluate --calibrate": Case(
        "evaluate clicks later.csv --calibrate later.csv", None
    ),
    "train": Case(f"{TRAIN} --epochs 4", "new"),
    "train --export-to": Case(
        f"{TRAIN} --epochs 2 --validation last --export-to versions", "versions"
    ),
    "prepare": Case("prepare events.csv prepared --split-last 1", "prepared"),
    "split": Case("split events.csv --by last --out divided", "divided"),
    "tune": Case(
        "tune events.csv --run tuned --trials 3 --epochs 1 --hidden 4 --batch-size 64",
        "tuned",
    ),
    "compare": Case(
        "compare items other parts/train.parquet parts/heldout.parquet", None
    ),
    "report": Case(f"report items {TWO} --out page.html", "page.html"),
}


def begin(argv: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    """Starts a command, whose two output streams go to a file."""
    with open(folder / "said", "a") as said:
        return subprocess.Popen(
            [*SPARSEJAX, *argv.split()], cwd=folder, stdout=said, stderr=said, text=True
        )


def run(argv: str, folder: pathlib.Path) -> str:
    """Runs a command that must succeed; returns its last line of output."""
    assert begin(argv, folder).wait(300) == 0, (folder / "said").read_text()
    return (folder / "said").read_text().splitlines()[-1]


def events(rng: np.random.Generator) -> str:
    drawn = rng.integers([60, 20, 10**6], size=(900, 3)).tolist()
    return "user,item,timestamp\n" + "".join(f"u{u},i{i},{t}\n" for u, i, t in drawn)


def clicks(rng: np.random.Generator, count: int) -> str:
    users = rng.integers(20, size=count)
    labels, ages = (rng.random((2, count)) * [[20], [90]]).round(2)
    lines = zip((labels < users).astype(int), ages, users, strict=True)
    return "click,age,user\n" + "".join(f"{y},{a},{u}\n" for y, a, u in lines)


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> pathlib.Path:
    """The files that the commands read."""
    folder, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    (folder / "events.csv").write_text(events(rng))
    (folder / "clicks.csv").write_text(clicks(rng, 600))
    (folder / "later.csv").write_text(clicks(rng, 300))
    age, user = {"age": sj.data.DenseColumn()}, {"user": sj.data.HashedColumn(40)}
    schema = sj.ClickSchema("click", dense=age, ids=user)
    (folder / "schema.json").write_text(json.dumps(schema.to_json()))
    run("split events.csv --by last --out parts", folder)
    for name in ("items", "other"):
        run(f"train parts/train.parquet --run {name} --hidden 4 --epochs 1", folder)
    of_clicks = "--model wide_deep --schema schema.json --epochs 1"
    run(f"train clicks.csv --run clicks {of_clicks}", folder)
    return folder


class Places:
    """Paths of a shop's files and runs."""

    def __init__(self, shop: pathlib.Path, parent: pathlib.Path):
        self._shop, self._parent = shop, parent
        self._numbers = itertools.count()

    def new(self) -> pathlib.Path:
        folder = self._parent / str(next(self._numbers))
        folder.mkdir()
        for path in self._shop.iterdir():
            if path.name != "said":
                (folder / path.name).symlink_to(path)
        return folder


def written(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files that a command has begun to write, also under temporary names."""
    for path in folder.iterdir():
        if not path.is_symlink() and path.name != "said":
            yield path


def content(path: pathlib.Path) -> Any:
    """The content of a file, which must be complete."""
    match path.suffix:
        case ".parquet":
            return pq.read_table(path).to_pylist()
        case ".json":
            return json.loads(path.read_text())
        case ".predictor":
            predictor = sj.load_predictor(path)
            if predictor.signature.kind == "items":
                return predictor.recommend_names([["i1", "i2"], []])
            found = predictor.predict_records({"age": [3.0, 40.0], "user": ["1", "7"]})
            return found.tolist()
        case ".html":
            page = path.read_text()
            assert page.rstrip().endswith("</html>")
            return page
        case _:
            return path.read_bytes()


def contents(out: pathlib.Path) -> Any:
    """The content of all visible files in a folder, or of one file. All must be complete."""
    if out.is_file():
        return content(out)
    if (out / "run.json").exists() and (out / "vocabulary.parquet").exists():
        return parameters(out) if [*out.glob("checkpoints/[0-9]*")] else {}
    seen = {
        path.relative_to(out).as_posix(): path
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    return {
        name: content(path)
        for name, path in seen.items()
        if not any(part.startswith(".") for part in path.relative_to(out).parts)
    }


def tuned(out: pathlib.Path) -> int:
    """The number of trials that were not interrupted in a complete tuning."""
    (best,) = out.glob("trial-*")
    assert parameters(best)
    sj.NetworkConfig.from_json(json.loads((out / "network.json").read_text()))
    lines = [json.loads(line) for line in (out / "trials.log").read_text().splitlines()]
    # Codes of a trial's end and its state in Optuna's journal.
    return sum(line["op_code"] == 6 and line["state"] in (1, 2) for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_a_killed_command_is_repeated(name, shop, tmp_path):
    case, places, chance = CASES[name], Places(shop, tmp_path), random.Random(name)
    # The second run finds the compiled programs of the first, as the killed commands do.
    run(case.argv, places.new())
    whole = places.new()
    began, first = time.monotonic(), 0.0
    process = begin(case.argv, whole)
    while process.poll() is None:
        if not first and any(written(whole)):
            first = time.monotonic()
        time.sleep(0.001)
    assert process.returncode == 0
    took = time.monotonic() - began
    writes = began + took - first if first else took
    killed = 0
    while killed < KILLS:
        folder = places.new()
        process = begin(case.argv, folder)
        if case.out is None or killed % 5 < 2:  # the command is killed at any time
            time.sleep(chance.uniform(0, took))
        else:  # the command is killed while it writes, mostly near the end
            while process.poll() is None and not any(written(folder)):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, writes))
        process.kill()
        if process.wait() == 0:
            continue
        killed += 1
        if case.out is not None and (folder / case.out).exists() and name != "tune":
            contents(folder / case.out)
        last = run(case.argv, folder)
        if case.out is None:
            assert last == (whole / "said").read_text().splitlines()[-1]
        elif name == "tune":
            assert tuned(folder / case.out) == tuned(whole / case.out) == 3
        elif name == "train --export-to":
            # A command killed after its first version writes a further version.
            found, expected = contents(folder / case.out), contents(whole / case.out)
            assert {*found} <= {"1/model.predictor", "2/model.predictor"} >= {*expected}
            assert all(each in expected.values() for each in found.values())
        else:
            assert contents(folder / case.out) == contents(whole / case.out)
        left = [path for path in folder.rglob(".sparsejax-*") if path.is_file()]
        assert not left, left
