"""Each flag of each command changes something: an output, a record of a run, or an error.

The commands and their flags come from `sparsejax.cli.flags`. A new flag is red here by its name
until the table has words that change what a command does. Most words are wrong ones: an error
comes before anything is computed, and a flag that is mapped nowhere raises none.
"""

import contextlib
import io
import json
import pathlib
import re
import shutil

import pytest
from run_folders import NETWORK, checkerboard, write_lines

from sparsejax.cli import flags, shell
from sparsejax.cli.main import main
from sparsejax.serving import server

SHORT = "--epochs 1 --optimizer sgd --decay none"
TINY = " ".join(NETWORK) + " " + SHORT
OF_HISTORIES = f"--config sasrec.json --negatives 2 {SHORT}"
OF_CLICKS = f"--config wide_deep.json --batch-size 32 {SHORT}"
WHICH = "--label click --dense age --categories user"
TUNE = "--run tuned --trials 1 --epochs 1 --hidden 4 --linear None --optimizer sgd"
PLAN = "plan --items 20 --rows 60 --entries 300 --memory 1GB"

# The arguments of a flag, for commands that have it; DATA is replaced by the file to read.
NETWORKS = {
    "--hidden": "0",
    "--activation": "nosuch",
    "--loss": "nosuch",
    "--normalize": "--no-normalize",
    "--corruption": "2",
    "--dropout": "2",
    "--temperature": "-1",
    "--tied": "",
    "--output-dtype": "nosuch",
    "--precision": "highest",
    "--param-dtype": "bfloat16",
    "--linear": "0",
}
NO_MEMORY = "--normalize", "--precision"  # `plan` does not have these flags
CONTENT = {"--item-features": "nosuch", "--columns": "nosuch", "--words": "nosuch"}
HISTORIES = {"--width": "0", "--blocks": "0", "--heads": "0"}
DEVICES = {
    "--mesh": "data=0",
    "--distributed": "",
    "--coordinator": "nosuch",
    "--num-processes": "2",
    "--process-id": "0",
}
SECOND = {
    "--second-stage": "nosuch",
    "--num-candidates": "0",
    "--item-columns": "nosuch",
    "--user-columns": "nosuch",
    "--request-columns": "nosuch",
    "--item-as": "nosuch",
    "--user-as": "nosuch",
    "--history-as": "nosuch",
}
COUNTING = {"--unknown": "skip", "--unknown-users": "skip", "--keep-seen": ""}
CHOSEN = {"--exclude-items": "nosuch", "--only-items": "nosuch", "--k": "0"}
# Commands that read interactions, with a run and a file.
READERS = {
    "train": f"train DATA --run out {TINY}",
    "evaluate": "evaluate RUN DATA held.csv",
    "compare": "compare RUN RUN DATA held.csv",
    "predict": "predict RUN DATA --out out.txt",
    "convert": "convert DATA out.csv --to pairs",
    "prepare": "prepare DATA out",
    "split": "split DATA --by random --fraction .5 --out out",
    "report": "report RUN --train DATA --test held.csv",
    "vectors": "vectors RUN --data DATA --out out.npz",
}
# For each flag: the run, the file, the basic arguments, and arguments that change the outcome.
READING = {
    "--user": ("items", "events.csv", "--user nosuch"),
    "--item": ("items", "events.csv", "--item nosuch"),
    "--value": ("valued", "events.csv --value timestamp", "--value nosuch"),
    "--no-value": ("valued", "events.csv --value timestamp", "--no-value"),
    "--time": ("histories", "events.csv", "--time nosuch"),
    "--no-time": ("histories", "events.csv --time timestamp", "--no-time"),
    "--time-format": ("histories", "events.csv", "--time-format %H:%M"),
    "--delimiter": ("items", "events.csv", "--delimiter abc"),
    "--separator": ("items", "lists.csv --separator |", "--separator x"),
    "--skip-bad-lines": ("items", "bad.csv", "--skip-bad-lines"),
    "--format": ("items", "events.csv", "--format parquet"),
    "--user-features": ("histories", "events.csv", "--user-features nosuch"),
}
ABOUT_CLICKS = {
    "--label": ("--dense age --categories user", "--label nosuch"),
    "--dense": ("--label click --categories user", "--dense nosuch"),
    "--categories": ("--label click --dense age", "--categories nosuch"),
    "--weight": ("--label click --dense age --categories user", "--weight nosuch"),
    "--dynamic": ("--label click --categories user", "--dynamic 0"),
    "--schema": ("", "--schema nosuch"),
}
OF_EVENTS = {"--kind": "nosuch", "--targets": "nosuch", "--weights": "a=b"}
OF_EVENTS |= {"--user-schema": "nosuch", "--user-features": "nosuch"}
CLICKS = {
    "train": f"train clicks.csv --run out {OF_CLICKS}",
    "tune": "tune clicks.csv --run out --model wide_deep --trials 1 --validation 7",
    "split": "split clicks.csv --by rows --fraction .5 --out out",
    "plan": "plan --memory 1GB --model wide_deep --examples clicks.csv",
}
# For each command: the basic arguments, and the values of flags for which a name and a value
# suffice.
OWN = {
    f"train events.csv --run out {TINY}": {
        **NETWORKS,
        **CONTENT,
        **DEVICES,
        "--run": "elsewhere",
        "--from": "nosuch",
        "--validation": "1.5",
        "--k": "0",
        "--patience": "0",
        "--model": "sasrec",
        "--config": "nosuch",
        "--optimizer": "nosuch",
        "--learning-rate": "-1",
        "--weight-decay": "-1",
        "--warmup-epochs": "-1",
        "--decay": "cosine",
        "--batch-size": "0",
        "--chunk-rows": "0",
        "--deterministic": "",
        "--epochs": "0",
        "--seed": "-1",
        "--checkpoint-seconds": "-1",
        "--tensorboard": "events.csv",
        "--export-to": "events.csv",
        "--gate": "ndcg@5",
    },
    f"train events.csv --run out {TINY} --tied": {"--fused": ""},
    f"train events.csv --run items {TINY}": {"--resume": ""},
    f"train events.csv --run out {OF_HISTORIES}": {"--negatives": "0", **OF_EVENTS},
    f"train nosuch --run out --model sasrec {SHORT}": HISTORIES,
    f"train clicks.csv --run out {OF_CLICKS} --label click --categories user": {
        "--follow": "",
        "--changes": "changes",
        "--export-seconds": "1",
    },
    f"tune events.csv {TUNE}": {
        **NETWORKS,
        **CONTENT,
        "--run": "items",
        "--trials": "0",
        "--time": "nosuch",
        "--model": "sasrec",
        "--validation": "1.5",
        "--k": "0",
        "--epochs": "0",
        "--patience": "0",
        "--optimizer": "nosuch",
        "--learning-rate": "-1",
        "--batch-size": "0",
        "--seed": "-1",
        "--user": "nosuch",
        "--item": "nosuch",
        "--value": "nosuch",
        "--no-value": "",
        "--time-column": "nosuch",
        "--delimiter": "abc",
        "--separator": "x",
        "--time-format": "%Y",
        "--skip-bad-lines": "",
        "--format": "parquet",
    },
    f"tune events.csv {TUNE} --time-column timestamp": {"--no-time": ""},
    "tune nosuch --run out --trials 1 --model sasrec": HISTORIES,
    "tune events.csv --run out --trials 1 --model sasrec --epochs 1 --optimizer sgd"
    " --width 4 --blocks 1 --heads 1": OF_EVENTS,
    "split events.csv --by last --out out --histories": {
        "--kind": "nosuch",
        "--targets": "nosuch",
        "--user-schema": "nosuch",
        "--user-features": "nosuch",
    },
    "evaluate items events.csv held.csv": {
        **DEVICES,
        **COUNTING,
        **CHOSEN,
        "--candidates": "nosuch",
        "--history": "nosuch",
        "--fold-in": "2",
        "--seed": "1",
        "--popularity": "nosuch",
        "--baselines": "",
        "--by-entries": "",
        **SECOND,
        "--requests": "nosuch",
        "--ranking-alone": "",
    },
    "evaluate histories events.csv held.csv": {"--rank-by": "nosuch"},
    "evaluate clicks clicks.csv": {
        "--groups": "nosuch",
        "--weighted": "",
        "--calibrate": "nosuch",
        "--method": "platt",
        "--negatives-kept": "2",
    },
    "compare items items events.csv held.csv": {
        **DEVICES,
        **COUNTING,
        **CHOSEN,
        "--candidates": "nosuch",
    },
    "predict items events.csv --out out.txt": {
        **DEVICES,
        **CHOSEN,
        "--out": "other.txt",
        "--parts": "0",
        "--part": "0",
        "--workers": "1",
        "--finish": "",
        "--users": "nosuch",
        "--keep-seen": "",
        "--exclude": "nosuch",
        **SECOND,
        "--requests": "nosuch",
    },
    "predict items events.csv --out out.txt --keep-seen": {"--exclude-seen": ""},
    "predict histories events.csv --out out.txt": {
        "--context": "hour",
        "--rank-by": "nosuch",
    },
    "export items out.predictor": {
        "--k": "0",
        "--batch-size": "0",
        "--int8": "",
        **SECOND,
    },
    "export histories out.predictor": {"--rank-by": "nosuch"},
    "export items out.predictor --no-compilation-cache": {"--compile": ""},
    "export clicks out.predictor": {
        "--unknown-ids": "zeros",
        "--calibrate": "nosuch",
        "--method": "platt",
        "--negatives-kept": "2",
    },
    "convert events.csv out.csv --to pairs": {
        "--from": "parquet",
        "--to": "text",
        "--features": "nosuch",
    },
    "prepare events.csv out": {
        "--duplicates": "max",
        "--min-user": "0",
        "--min-item": "0",
        "--features": "nosuch",
        "--split-time": "nosuch",
        "--repeats": "all",
        "--split-last": "0",
        "--split-fraction": "2",
        "--seed": "1",
        "--memory": "nosuch",
        "--histories": "",
    },
    "prepare events.csv out --histories": {"--schema": "nosuch"},
    "prepare events.csv out --split-last 1": {"--time-format": "%H:%M"},
    "split events.csv --by last --out out --time timestamp": {
        "--time": "nosuch",
        "--no-time": "",
        "--time-format": "%H:%M",
    },
    "split events.csv --by last --out out": {
        "--by": "time",
        "--out": "other",
        "--n": "0",
        "--at": "5",
        "--fraction": "2",
        "--seed": "1",
        "--repeats": "new",
        "--histories": "",
    },
    "report items --train events.csv --test held.csv": {
        **DEVICES,
        **COUNTING,
        "--train": "nosuch",
        "--test": "nosuch",
        "--titles": "nosuch",
        "--out": "other.html",
        "--k": "0",
    },
    "report clicks --test clicks.csv": {"--groups": "nosuch"},
    "vectors items --out out.npz": {"--out": "out.txt", "--data": "nosuch"},
    "vectors histories --out out.npz --data events.csv": {"--context": "hour"},
    "similar items item1": {"--k": "0"},
    f"{PLAN} --hidden 4": {
        **{f: w for f, w in NETWORKS.items() if f not in NO_MEMORY},
        **CONTENT,
        "--items": "0",
        "--rows": "0",
        "--entries": "-1",
        "--features": "0",
        "--target-entries": "-1",
        "--values": "",
        "--mesh": "data=0",
        "--memory": "nosuch",
        "--model": "sasrec",
        "--config": "nosuch",
        "--optimizer": "nosuch",
        "--batch-size": "0",
        "--fused": "",
        "--compile": "",
    },
    f"{PLAN} --model sasrec": {
        **HISTORIES,
        "--negatives": "0",
        "--kind": "nosuch",
        "--user-features": "nosuch",
        "--user-schema": "nosuch",
    },
    f"{PLAN} --model hstu --width 8 --blocks 1": {"--times": ""},
    "plan --memory 1GB --model wide_deep --label click --categories user": {
        "--examples": "nosuch"
    },
    "serve a.predictor": {
        "--name": "other",
        "--host": "::1",
        "--port": "1",
        "--grpc-port": "1",
        "--tls-cert": "nosuch",
        "--tls-key": "nosuch",
        "--shapes": "1x8",
        "--max-wait": "1",
        "--watch": "1",
        "--keep": "1",
        "--swap": "drain",
        "--histories": "nosuch",
        "--user-features": "nosuch",
        "--similar": "",
        "--exclude-file": "nosuch",
        "--changes": "nosuch",
        "--admin": "1",
        "--page": "--no-page",
        "--titles": "nosuch",
        "--grace": "1",
    },
    "export-triton out.predictor models": {"--name": "a/b", "--shapes": "nosuch"},
    "demo --report nosuch/page": {"--report": "elsewhere/page"},
}
# The observed outcome is that programs are not cached, because no folder can be made.
UNCACHED = {
    "train": "train nosuch --run out",
    "tune": "tune nosuch",
    "evaluate": "evaluate items nosuch nosuch",
    "compare": "compare items items nosuch nosuch",
    "predict": "predict items nosuch --out out",
    "export": "export nosuch out",
    "report": "report nosuch",
    "vectors": "vectors nosuch --out out",
    "similar": "similar nosuch item1",
    "plan": "plan --items 1 --rows 1 --entries 1 --memory nosuch",
    "serve": "serve nosuch --port -1",
    "demo": "demo --report nosuch/out.html",
}


def _cases() -> dict[tuple[str, str], tuple[str, str]]:
    """For each command and flag: the basic words, and words with the flag that change the
    result.
    """
    found = {}
    for before, own in OWN.items():
        for flag, value in own.items():
            after = value if value.startswith("--no-") else f"{flag} {value}"
            found[before.split()[0].replace("-", ""), flag] = before, after
    for command, words in READERS.items():
        for flag, (run, data, after) in READING.items():
            # In `convert`, the flag for the format is --from.
            if (command, flag) not in {
                ("convert", "--format"),
                ("prepare", "--no-time"),
                ("convert", "--user-features"),
                ("prepare", "--user-features"),
            }:
                file, *given = data.split(maxsplit=1)
                before = words.replace("RUN", run).replace("DATA", file)
                words_before = " ".join([before, *given])
                found.setdefault((command, flag), (words_before, after))
    for command, words in CLICKS.items():
        for flag, (given, after) in ABOUT_CLICKS.items():
            found[command, flag] = f"{words} {given}", after
    for command, before in UNCACHED.items():
        found[command, "--compilation-cache"] = before, "--no-compilation-cache"
    return found


CASES = _cases()
# For each run folder, the command that makes the run.
RUNS = {
    "items": f"train events.csv --run items {TINY}",
    "valued": f"train events.csv --run valued --value timestamp {TINY}",
    "histories": f"train events.csv --run histories {OF_HISTORIES}",
    "clicks": f"train clicks.csv --run clicks {OF_CLICKS} {WHICH}",
    "tuned": f"tune events.csv {TUNE}",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> pathlib.Path:
    """A folder with data and a trained run of each kind."""
    folder = tmp_path_factory.mktemp("world")
    write_lines(folder / "small.txt", checkerboard()[0])
    rows = [
        f"user{u},item{(u + 2 * n) % 20},{100 * n + u}\n"
        for u in range(12)
        for n in range(5)
    ]
    files = {
        "events.csv": ["user,item,timestamp\n", *rows],
        "bad.csv": ["user,item,timestamp\n", *(20 * rows), "one,two,3,four,five\n"],
        "lists.csv": ["user,items\n"]
        + [f"user{u},item{u}|item{u + 2}|item{u + 4}\n" for u in range(12)],
        "held.csv": ["user,item,timestamp\n"]
        + [f"user{u},item{(u + 12) % 20},900\n" for u in range(12)]
        + ["user1,new,901\n", "stranger,item1,902\n"],
        "clicks.csv": ["click,age,user\n"]
        + [f"{n % 2},{n / 2},u{n % 7}\n" for n in range(64)],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(lines))
    config = {"version": 1, "model": "sasrec", "width": 4, "blocks": 1, "heads": 1}
    (folder / "sasrec.json").write_text(json.dumps(config))
    config = {"version": 1, "model": "wide_deep", "dim": 2, "hidden": [4]}
    (folder / "wide_deep.json").write_text(json.dumps(config))
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()):
        for command in RUNS.values():
            assert main(command.split()) == 0
    return folder


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, frozenset], tuple[int | str, str, dict[str, bytes]]]:
    """Caches the results of commands, by their words and by the existing runs."""
    return {}


def carried_out(words: str, runs: frozenset, world: pathlib.Path, folder: pathlib.Path):
    """Runs a command beside some runs; returns its status, text and files, without times."""
    left = RUNS.keys() - runs  # a run has some 20 files and folders
    shutil.copytree(
        world, folder, ignore=lambda inside, _: left if inside == str(world) else ()
    )
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            status = main(words.split())
        except RuntimeError as error:
            # --distributed raises this, as JAX already has devices.
            status = str(error)
    files = {
        path.relative_to(folder).as_posix(): re.sub(
            rb"[\d.]+ s\b", b"", path.read_bytes()
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "checkpoints" not in path.parts
        if path.name not in (".lock", "metrics.jsonl", "trials.log")
    }
    text = re.sub(r"[\d.,]+ ?(?=(?:examples/|rows/|users/)?m?s\b)", "", said.getvalue())
    return status, text, files


def test_the_table_has_each_flag():
    there = {
        (kind.__name__.lower(), flag.spelled(option.name))
        for kind in flags.Command.__subclasses__()
        for option, flag in shell.all_flags(kind)
        if not flag.positional
    }
    assert CASES.keys() == there


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_flag_changes_what_is_done(
    command, flag, world, outcomes, tmp_path, monkeypatch, request
):
    before, after = CASES[command, flag]

    def served(*given, **options):
        print(given, options)

    monkeypatch.setattr(server, "run", served)
    if flag == "--compilation-cache":
        request.getfixturevalue("no_kept_programs")
        monkeypatch.setenv("XDG_CACHE_HOME", str(world / "events.csv"))
    words = f"{before} {after}"
    # The existing runs are equal for both commands.
    runs = frozenset(RUNS.keys() & words.split())
    if (before, runs) not in outcomes:
        folder = tmp_path / "before"
        outcomes[before, runs] = carried_out(before, runs, world, folder)
    found = carried_out(words, runs, world, tmp_path / "after")
    assert found[0] != 2, found[1]
    assert "is of no use for" not in found[1]
    assert found != outcomes[before, runs], "the flag changes nothing"
