"""Processor seconds that each command's programs take to compile on a CPU, by the defaults.

    python benchmarks/compile_times.py run [--tree EARLIER] [--only 'histories*'] [--cores 0,1 2,3]
    python benchmarks/compile_times.py table

Each command is a process of its own on some cores, with nothing cached. `--tree` names the
checkout whose `sparsejax` is measured. `ranking` is `top_k` of 256 histories. A command that
takes longer than `--limit` seconds is ended, and has no figure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "tests")]

from report import RESULTS, table, write_section

_RECORDER = _HERE.parent / "tests" / "as_user" / "programs.py"
_COLUMNS = "--label label --dense price --categories user item"
_SECOND = "tune train.csv --trials 1 --epochs 1 --run tuned"
_AFTER = (
    "evaluate run train.csv heldout.csv",
    "predict run train.csv --out best.csv",
    "report run --train train.csv --test heldout.csv",
    "export run shop.predictor",
    "serve shop.predictor --port 0",
)
_CLICKS = (
    "evaluate run heldout.csv",
    "predict run heldout.csv --out p.csv",
    "report run --test heldout.csv",
    "export run shop.predictor",
    "serve shop.predictor --port 0",
)
# Kind and model, rows, items or ids, places.
_CASES: dict[str, tuple[str, int, int, int]] = {
    f"{model} {rows:,} rows, {items:,} {of}"
    + (f", {places:,} places" * bool(places)): (
        model,
        rows,
        items,
        places,
    )
    for model, rows, items, places, of in (
        ("items", 1_000, 100, 0, "items"),
        ("items", 20_000, 10_000, 0, "items"),
        ("items", 1_000, 1_000_000, 0, "items"),
        ("sasrec", 1_000, 100, 10, "items"),
        ("sasrec", 1_000, 1_000, 200, "items"),
        ("sasrec", 200, 1_000, 2_000, "items"),
        ("sasrec", 200, 1_000_000, 50, "items"),
        ("sasrec --negatives 128 --optimizer adam", 1_000, 1_000, 50, "items"),
        ("hstu", 1_000, 100, 10, "items"),
        ("hstu", 1_000, 1_000, 200, "items"),
        ("hstu", 200, 1_000, 2_000, "items"),
        ("hstu", 200, 1_000_000, 50, "items"),
        ("gru", 1_000, 1_000, 200, "items"),
        ("dlrm", 1_000, 100, 0, "ids"),
        ("dlrm", 100_000, 100_000, 0, "ids"),
        ("deepfm", 100_000, 100_000, 0, "ids"),
        ("wide_deep", 100_000, 100_000, 0, "ids"),
        ("dcn", 1_000_000, 1_000_000, 0, "ids"),
    )
}
_RANKING = [
    (model, places) for model in ("sasrec", "hstu") for places in (50, 100, 200)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table", "ranking"])
    parser.add_argument("--tree", type=pathlib.Path, default=_HERE.parent)
    parser.add_argument("--only", default="*")
    parser.add_argument("--verbs", default="*")
    parser.add_argument("--cores", nargs="+", default=["0,1"], help="of processes")
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--side", choices=["before", "after"], default="after")
    parser.add_argument("--of", nargs=2, default=["sasrec", "50"])
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.action == "run":
        _run(arguments)
    elif arguments.action == "ranking":
        _rank(arguments.of[0], int(arguments.of[1]))
    else:
        _write_table()


def _run(arguments: argparse.Namespace) -> None:
    output = arguments.output or RESULTS / f"compile_times_{arguments.side}.json"
    found: list[dict] = []
    cores: queue.Queue[str] = queue.Queue()
    for own in arguments.cores:
        cores.put(own)
    names = [*(f"ranking {m} 256 x {n}" for m, n in _RANKING), *_CASES]
    with concurrent.futures.ThreadPoolExecutor(len(arguments.cores)) as pool:
        jobs = [
            pool.submit(_case, name, arguments, cores, found)
            for name in names
            if fnmatch.fnmatch(name, arguments.only)
        ]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
            report = {
                "date": datetime.date.today().isoformat(),
                "command": "python benchmarks/compile_times.py run",
                "results": found,
            }
            output.write_text(json.dumps(report, indent=1) + "\n")


def _case(name, arguments, cores, found) -> None:
    own = cores.get()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if name.startswith("ranking"):
                _, model, _, _, places = name.split()
                command = [__file__, "ranking", "--of", model, places]
                _add(found, name, "top_k", _called(command, folder, own, arguments))
                return
            model, rows, items, places = _CASES[name]
            _write(pathlib.Path(folder), model, rows, items, places)
            for line in _commands(model):
                verb, file = line.split()[0], pathlib.Path(folder) / "programs.json"
                if verb != "train" and not fnmatch.fnmatch(verb, arguments.verbs):
                    continue
                file.unlink(missing_ok=True)
                command = [str(_RECORDER), str(file), *line.split()]
                called = _called(command, folder, own, arguments)
                if file.exists():
                    called |= json.loads(file.read_text())
                _add(found, name, verb, called)
    finally:
        cores.put(own)


def _commands(model: str) -> list[str]:
    if model in ("dlrm", "deepfm", "wide_deep", "dcn"):
        train = f"train train.csv --run run --model {model} --epochs 1 {_COLUMNS}"
        tune = f"{_SECOND} --model {model} {_COLUMNS}"
        return [train, *_CLICKS, tune]
    named = "" if model == "items" else f" --model {model}"
    return [f"train train.csv --run run --epochs 1{named}", *_AFTER, _SECOND + named]


def _called(command: list[str], folder: str, cores: str, arguments) -> dict:
    """Seconds of a process, and its answer if it prints one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": f"{arguments.tree}:{os.environ.get('PYTHONPATH', '')}",
            "XDG_CACHE_HOME": cache,
            "JAX_PLATFORMS": "cpu",
        }
        begin = time.perf_counter()
        process = subprocess.Popen(
            ["taskset", "-c", cores, sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        ended = concurrent.futures.ThreadPoolExecutor(1).submit(
            _wait, process, arguments.limit
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            if '"ready"' in line:
                process.send_signal(signal.SIGTERM)
        ended.result()
        answer: dict = {"seconds": round(time.perf_counter() - begin, 1)}
        if process.returncode:
            answer |= {"status": process.returncode, "said": lines[-1:]}
        elif lines and lines[-1].startswith('{"programs"'):
            answer |= json.loads(lines[-1])
        return answer


def _wait(process: subprocess.Popen, limit: float) -> None:
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()


def _add(found: list[dict], name: str, verb: str, called: dict) -> None:
    programs = sorted(called.pop("programs", []), key=lambda each: -each["processor"])
    result = {"case": name, "verb": verb, **called, "programs": len(programs)}
    result["processor"] = round(sum(each["processor"] for each in programs), 2)
    if programs:
        result["longest"] = programs[0]["name"]
        result["longest_processor"] = round(programs[0]["processor"], 2)
    found.append(result)
    print(json.dumps(result), flush=True)


def _write(
    folder: pathlib.Path, model: str, rows: int, items: int, places: int
) -> None:
    rng = np.random.default_rng(0)
    if model in ("dlrm", "deepfm", "wide_deep", "dcn"):
        users, bought = rng.integers(0, items, (2, rows)).astype(str)
        cells = [
            rng.integers(0, 2, rows).astype(str),
            rng.random(rows).astype("U6"),
            users,
            bought,
        ]
        lines = np.array([*map(",".join, zip(*cells, strict=True))])
        for name, part in ("train", lines), ("heldout", lines[: max(200, rows // 10)]):
            (folder / f"{name}.csv").write_text(
                "label,price,user,item\n" + "\n".join(part) + "\n"
            )
        return
    # Every item occurs, so that the model has so many.
    longest = places or max(20, -(-items // rows))
    lengths = rng.integers(min(5, longest - 1), longest + 1, rows)
    lengths[:2] = longest + 1, longest
    while (missing := items - lengths.sum()) > 0:
        lengths[-1 if places else rng.integers(rows)] += missing if places else 1
    events = rng.integers(0, items, lengths.sum())
    events[: min(items, len(events))] = rng.permutation(items)[: len(events)]
    users = np.repeat(np.arange(rows), lengths)
    if not places:
        users, events = np.unique(np.stack([users, events]), axis=1)
    last = np.r_[users[1:] != users[:-1], True]
    time = np.arange(len(users))
    for name, part in ("train", ~last), ("heldout", last):
        lines = map("u{},i{},{}".format, users[part], events[part], time[part])
        (folder / f"{name}.csv").write_text(
            "user,item,time\n" + "\n".join(lines) + "\n"
        )


def _rank(model: str, places: int) -> None:
    """Prints the programs of `top_k` of 256 histories, and the rows that it ranks a second."""
    import jax
    import jax.numpy as jnp
    from as_user import programs
    from flax import nnx

    import sparsejax as sj

    config = {"sasrec": sj.SASRecConfig, "hstu": sj.HSTUConfig}[model](
        max_length=places, width=64
    )
    built = sj.sequence.build_sequence_model(config, items=3_706, rngs=nnx.Rngs(0))
    built.eval()
    rng = np.random.default_rng(0)
    histories = rng.integers(0, 3_706, (256, places)).astype(np.int32)
    lengths = np.clip(
        rng.lognormal(np.log(places / 2), 0.7, 256).astype(int), 1, places
    )
    histories = jnp.where(np.arange(places) < lengths[:, None], histories, -1)
    times = jnp.cumsum(jnp.ones(histories.shape), 1) if model == "hstu" else None
    ranked = nnx.jit(
        lambda model, histories, times: model.top_k(histories, 20, times=times)
    )
    with programs.recorded() as found:
        jax.block_until_ready(ranked(built, histories, times))
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < 5:
        jax.block_until_ready(ranked(built, histories, times))
        count += 1
    rate = 256 * count / (time.perf_counter() - begin)
    each = [{"name": p.name, "processor": p.processor} for p in found]
    print(json.dumps({"programs": each, "rows_a_second": round(rate)}))


def _write_table() -> None:
    """A line for each case: all programs of each command, and the longest in brackets."""
    before, after = (
        json.loads((RESULTS / f"compile_times_{side}.json").read_text())["results"]
        for side in ("before", "after")
    )
    verbs = ["train", "evaluate", "predict", "report", "export", "serve", "tune"]
    commands, ranking = [], []
    for case in dict.fromkeys(each["case"] for each in after):
        found = {each["verb"]: each for each in after if each["case"] == case}
        if "top_k" in found:
            [was] = [each for each in before if each["case"] == case] or [{}]
            now = found["top_k"]
            ranking.append(
                [
                    case,
                    was.get("processor", "-"),
                    now["processor"],
                    now.get("rows_a_second", "-"),
                ]
            )
            continue
        texts = [
            f"{found[verb]['processor']:.1f} ({found[verb]['longest_processor']:.1f})"
            if verb in found
            else "-"
            for verb in verbs
        ]
        most = max(
            each["longest_processor"] / each["reference"] for each in found.values()
        )
        commands.append([case, *texts, f"{most:.0f}"])
    lines = table(["case", *verbs, "longest to the reference"], commands)
    heads = ["case", "compiled before", "compiled", "rows a second"]
    write_section("compile_times", [*lines, "", *table(heads, sorted(ranking))])


if __name__ == "__main__":
    main()
