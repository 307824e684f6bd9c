"""Errors, help and exit status of every command."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import typing

import pytest
from run_folders import (
    names_of,
)

import sparsejax as sj
from sparsejax.cli import shell
from sparsejax.cli import train as training
from sparsejax.cli.main import main
from sparsejax.data.events import sniff
from sparsejax.options import reading


@pytest.fixture
def errors_folder(board, tmp_path, monkeypatch) -> pathlib.Path:
    """A folder with all files that the wrong commands below name."""
    monkeypatch.chdir(tmp_path)
    write = {
        "data": "a\tx:y\nb\tx\n",
        "bad": "a\tx:y\nno tab here\n",
        "number": "a\tx,1\nb\tx,one\n",
        "valued": "a\tx,1\nb\tx,2\n",
        "unknown": "a\tfoo:bar\n",
        "board": "user 0\titem1:item2\n",
        "spaces": "a b\tx:y\n",
        "empty": "",
        "none.json": "{",
        "wrong.json": '{"version": 1, "layers": [{"kind": "magic"}]}',
        "a folder/file": "",
        "damaged/run.json": "[1]",
        "newer/run.json": '{"version": 2}',
    }
    for name, text in write.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    board.train.align_rows(["user 1"]).save("user.parquet")
    zeros = names_of(*(f"{name}\0x" for name in board.train.row_names))
    dataclasses.replace(board.train, row_names=zeros).save("zeros.parquet")
    os.symlink(board.run, "run")
    return tmp_path


TRAIN = "train data --run new --format text "


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train missing --run new", "missing: no such file"),
        ("train 'a folder' --run new", "is a directory"),
        ("train empty --run new", "empty"),
        ("train bad --run new --format text", "bad:2: no TAB"),
        (
            "train number --run new --format text",
            "number:2: value 'one' is not a number",
        ),
        (TRAIN + "--validation missing", "missing: no such file"),
        (TRAIN + "--validation unknown", "unknown: all 2 entries are of features"),
        (TRAIN + "--validation board", "board: "),
        (TRAIN + "--patience 3", "--patience needs --validation"),
        (TRAIN + "--validation data --patience 0", "patience must be at least 1"),
        (TRAIN + "--config missing.json", "missing.json: No such file"),
        (TRAIN + "--config none.json", "none.json: not JSON"),
        (TRAIN + "--config wrong.json", "wrong.json: layer 0"),
        (TRAIN + "--config none.json --tied", "leave out --tied, or --config"),
        (TRAIN + "--activation magic", "unknown activation 'magic'"),
        (TRAIN + "--loss magic", "magic"),
        (TRAIN + "--optimizer magic", "magic"),
        (TRAIN + "--learning-rate -1", "--learning-rate must be at least 0"),
        (TRAIN + "--weight-decay 0.1", "--weight-decay of adam would be an L2"),
        (TRAIN + "--warmup-epochs -1", "--warmup-epochs must be at least 0"),
        (TRAIN + "--warmup-epochs 200", "below the 200 epochs"),
        (TRAIN + "--hidden", "hidden"),
        (TRAIN + "--hidden 10000000000000", "not below 2^31"),
        (TRAIN + "--hidden 0", "'hidden1': size 0"),
        (TRAIN + "--corruption 1", "corruption"),
        (TRAIN + "--dropout -0.5", "dropout"),
        (TRAIN + "--temperature 0", "temperature"),
        (TRAIN + "--hidden 3 4 --tied", "must have 3 units"),
        (TRAIN + "--batch-size 0", "--batch-size must be at least 1"),
        (TRAIN + "--epochs 0", "--epochs must be at least 1"),
        (TRAIN + "--seed -1", "--seed must be at least 0"),
        (TRAIN + "--checkpoint-seconds -1", "--checkpoint-seconds must be at least 0"),
        (TRAIN + "--validation data --k 0", "k must be"),
        ("train data --run 'a folder'", "a folder: exists"),
        ("train data --run 'a folder' --resume", "a folder: is not a run folder"),
        ("train data --run data --resume", "data: is not a folder"),
        ("evaluate missing data data", "missing: is not a run folder"),
        ("evaluate damaged data data", "run.json: these are not the settings"),
        ("evaluate newer data data", 'run.json: the settings of a run: "version" is 2'),
        ("evaluate run unknown board --format text", "unknown: all 2 entries"),
        ("evaluate run board missing --format text", "missing: no such file"),
        ("evaluate run user.parquet board", "board: "),
        ("evaluate run board board --format text --k 0", "k must be"),
        ("predict run missing --out out", "missing: no such file"),
        ("predict run board --format text --out no/out", "there is no folder"),
        ("predict run board --format text --out 'a folder'", "a folder: is not a file"),
        ("predict run board --format text --out out --k 0", "k must be"),
        ("predict run unknown --format text --out out", "unknown: all 2 entries"),
        (
            "predict run zeros.parquet --out out",
            r"row name 'user 0\x00x' contains '\x00'",
        ),
        ("predict run user.parquet --out out --keep-seen --exclude board", "'user 1'"),
        ("report missing", "missing: is not a run folder"),
        ("report run --test board", "--test needs --train"),
        ("report run --keep-seen", "--keep-seen needs --train"),
        ("prepare data new --repeats all", "--repeats needs --split-time"),
        ("report run --train unknown --format text", "unknown: all 2 entries"),
        ("report run --out no/page.html", "there is no folder"),
        ("vectors missing --out items.npy", "missing: is not a run folder"),
        ("vectors run --out items.csv", "items.csv: vectors are written to .npy"),
        ("vectors run --out no/items.npy", "there is no folder"),
        ("vectors run --out items.npy --data missing", "missing: no such file"),
        ("similar missing tea", "missing: is not a run folder"),
        ("similar run tea", "no item is called 'tea'; names are 'item"),
        ("similar run item0 --k 0", "k must be"),
        (
            "similar run",
            "name an ITEM after the folder, for example: sparsejax similar run/",
        ),
        ("convert missing out.csv", "missing: no such file"),
        ("convert data out.txt --from text", "pass --to text, pairs, adjacency"),
        ("convert bad out.csv --from text", "bad:2: no TAB"),
        ("convert valued out.txt --from text --to adjacency", "--no-value"),
        ("convert spaces out.txt --from text --to adjacency", "'a b' contains ' '"),
        ("convert data no/out.csv --from text", "there is no folder"),
        ("convert data no/out.parquet --from text", "there is no folder"),
        ("convert data 'a folder' --from text --to parquet", "a folder: is not a file"),
    ],
)
def test_errors(errors_folder, capsys, command, message):
    before = sorted(str(path) for path in errors_folder.rglob("*"))
    argv = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command)]
    assert main(argv) == 1
    captured = capsys.readouterr()
    # Beside what was read and chosen.
    stated = (" features, ", " items, ", "linear part of ", "temperature 0.18: ")
    lines = [
        line
        for line in captured.err.splitlines()
        if not any(words in line for words in stated)
    ]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("sparsejax: error: ")
    assert message in lines[0]
    assert captured.out == ""
    assert sorted(str(path) for path in errors_folder.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    ["", "magic", "train", "train data", "train data --run new --epochs many"]
    + ["train data --run new --format magic", "predict run data", "convert one"],
)
def test_wrong_usage(capsys, command):
    assert main(command.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--lr=0.1", "--lr is called --learning-rate here"),
        ("more", "for more and others, put the files into one folder and give the fo"),
        ("--max-length 20", '{"version": 1, "model": "sasrec", "max_length": 20}'),
        ("--model gru --max_length=9", '"model": "gru", "max_length": 9}'),
    ],
)
def test_words_that_no_command_has(tmp_path, monkeypatch, capsys, words, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").touch()
    assert main(["train", "data", "--run", "new", *words.split()]) == 2
    assert advice in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("read", [shell.values_of, shell.weights_of])
def test_a_name_has_one_value(read):
    assert {**read("a=1,b=2")}.keys() == {"a", "b"}
    for text in ("a=1,a=2", "a=1,2", "=1"):
        with pytest.raises(ValueError, match="one (value|number) by"):
            read(text)


def test_the_flag_of_a_list_is_given_once(capsys):
    argv = ["serve", "x", "--shapes", "1x2", "3x4", "--port", "1", "--shapes=5x6"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert "--shapes is given twice: write --shapes 1x2 3x4 5x6" in error


@pytest.mark.parametrize(
    "command",
    ["", "train", "evaluate", "predict", "export", "convert", "report", "vectors"]
    + ["compare", "similar", "plan", "serve", "demo"],
)
def test_help(capsys, command):
    assert main([*command.split(), "--help"]) == 0
    assert f"usage: sparsejax {command}".strip() in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["1", "5"])
@pytest.mark.parametrize("words", [["similar", "--help"], ["nosuch"], ["similar"]])
def test_a_narrow_terminal(monkeypatch, capsys, columns, words):
    """It once took a core for ever, also where a page says what is wrong."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(words) == (0 if "--help" in words else 2)
    assert os.environ["COLUMNS"] == columns
    assert "similar" in "".join(capsys.readouterr())


def test_standard_output_that_is_closed(tmp_path):
    """No data file gets its number, and a result is not lost in silence."""
    (tmp_path / "in.csv").write_text("user,item\nann,tea\n")

    def closed(words: str) -> subprocess.CompletedProcess[str]:
        shell = f'exec "$0" -m sparsejax {words} >&-'
        return subprocess.run(
            ["sh", "-c", shell, sys.executable],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert closed("convert in.csv out.parquet").returncode == 0
    assert sj.read(tmp_path / "out.parquet").row_names.tolist() == ["ann"]
    done = closed("--version")
    assert done.returncode == 1
    assert done.stderr == (
        "sparsejax: error: the result cannot be written: standard output is closed\n"
    )


def test_formats_are_those_of_the_readers():
    assert typing.get_args(reading.Format) == typing.get_args(sniff.Format)


def test_a_bug_is_not_hidden(small, monkeypatch):
    def broken(flags):
        raise KeyError("oops")

    monkeypatch.setattr(training, "train", broken)
    with pytest.raises(KeyError):
        main(small)


def test_a_reader_that_stops_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "sparsejax", "--version"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        check=False,
    )
    os.close(write_end)
    assert process.stderr == b""


def test_the_end_of_a_process_leaves_nothing_undone():
    program = """
import atexit, sys, threading, time
from sparsejax.cli.entry import end
sys.stderr = None  # it was closed
atexit.register(print, "third")
threading.Thread(target=lambda: (time.sleep(0.2), print("second"))).start()
print("first")
end(3)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "first\nsecond\nthird\n"), done.stderr


def test_what_runs_a_command_within_itself_goes_on(tmp_path):
    """A command alone ends its process at once; a profiler still writes its file."""
    noted = "import os\nend = os._exit\nos._exit = lambda n: (os.write(1, b'at once'), end(n))"
    (tmp_path / "sitecustomize.py").write_text(noted)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words, "-m", "sparsejax", "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            check=True,
        )
        return done.stdout

    assert said().endswith("at once")
    assert said("-m", "cProfile", "-o", str(tmp_path / "found")).endswith("0\n")
    assert (tmp_path / "found").stat().st_size


def test_prepare_without_its_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    (tmp_path / "events.csv").write_text("user,item\nann,tea\n")
    argv = ["prepare", str(tmp_path / "events.csv"), str(tmp_path / "new")]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert (
        "sparsejax: error: preparing data needs DuckDB: pip install 'sparsejax[prepare]'"
        in said
    )
    assert "Traceback" not in said and not (tmp_path / "new").exists()


def test_commands_hide_packages_that_others_import(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "shop.csv").write_text("click,user\n" + "1,ann\n0,bob\n" * 20)
    line = "split shop.csv --by rows --fraction .5 --out parts --label click"
    words = ["-X", "importtime", "-m", "sparsejax", *line.split(), "--categories=user"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pyarrow" in imported and not {"pandas.core", "IPython.core"} & imported
