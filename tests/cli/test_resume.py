"""Training that is resumed, interrupted or killed."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from run_folders import FIT, NETWORK, parameters, write_lines

from sparsejax.cli import commands, printing
from sparsejax.cli.main import main
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.mesh import locks
from sparsejax.runs import folders, linear_parts, training


def test_resume_continues_with_more_epochs(small, tmp_path, capsys):
    assert main([*small, "--resume"]) == 0  # there is no run yet, so training begins
    assert main(small) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sparsejax: error: ") and "--resume" in error
    assert main([*small, "--resume", "--epochs", "3"]) == 0
    epochs = re.findall(r"epoch \d/\d", capsys.readouterr().err)
    assert epochs == ["epoch 2/3", "epoch 3/3"]
    whole = [*small, "--run", str(tmp_path / "whole"), "--epochs", "3"]
    assert main(whole) == 0
    assert parameters(tmp_path / "run") == parameters(tmp_path / "whole")
    assert main([*small, "--resume", "--epochs", "2"]) == 1
    assert "begun with 3, which can only be raised" in capsys.readouterr().err


def test_resume_does_not_compute_the_linear_part_again(small, tmp_path, monkeypatch):
    small[small.index("--linear") + 1] = "3"
    assert main(small) == 0
    again = lambda *_, **__: pytest.fail("again")
    monkeypatch.setattr(linear_parts, "linear_part", again)
    assert main([*small, "--resume", "--epochs", "2"]) == 0
    model, _ = folders.load_model(tmp_path / "run")
    assert model.output.linear is not None
    assert float(abs(model.output.linear.scale[...]).sum()) > 0


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (["--hidden", "8"], "hidden1 size 8: the run was begun with 16"),
        (["--hidden", "16", "4"], "hidden2"),
        (["--activation", "elu"], "hidden1 activation elu"),
        (["--tied"], "output tied"),
        (["--corruption", "0.25"], "corruption 0.25"),
        (["--loss", "l2_loss"], "loss l2_loss"),
        (["--optimizer", "sgd"], "optimizer sgd: the run was begun with adagrad"),
        (["--learning-rate", "0.5"], "--learning-rate 0.5"),
        (["--decay", "none"], "decay none: the run was begun with cosine"),
        (["--epochs", "26"], "26 epochs: the learning rate of the run falls to 0 by"),
        (["--batch-size", "7"], "--batch-size 7"),
        (["--seed", "3"], "seed 3"),
        (["--k", "9"], "k 9"),
        (["--precision", "high"], "precision high: the run was begun with default"),
        (["--deterministic"], "deterministic True: the run was begun with False"),
        (["--validation", "heldout.txt"], "other validation data"),
    ],
)
def test_resume_refuses_other_settings(
    board, tmp_path, monkeypatch, capsys, other, name
):
    monkeypatch.chdir(board.folder)
    argv = ["train", "train.txt", "--run", "run", "--epochs", "25", "--resume"]
    argv += NETWORK[2:] if "--hidden" in other else NETWORK
    argv += [*FIT, "--k", "2"]
    if "--validation" not in other:
        argv += ["--validation", "heldout.txt"]
    else:
        argv += ["--validation", write_lines(tmp_path / "other.txt", board.train)]
        other = []
    before = (board.folder / "run" / "run.json").read_bytes()
    assert main([*argv, *other]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sparsejax: error: cannot resume with ") and name in error
    assert (board.folder / "run" / "run.json").read_bytes() == before


def test_resume_refuses_other_data(small, tmp_path, capsys):
    assert main(small) == 0
    path = pathlib.Path(small[1])
    text = path.read_text()
    path.write_text(text.replace("item3", "item three"))
    assert main([*small, "--resume"]) == 1
    assert "other features" in capsys.readouterr().err
    settings = tmp_path / "run" / "run.json"
    before = settings.read_bytes()
    path.write_text("".join(text.splitlines(keepends=True)[::-1]))
    assert main([*small, "--resume", "--epochs", "9"]) == 1
    assert "other data" in capsys.readouterr().err
    assert settings.read_bytes() == before


def test_validation_is_the_same_in_another_order_of_rows(small, tmp_path, capsys):
    path = tmp_path / "heldout.txt"
    lines = [f"user {u}\titem{u % 2 + 2}" for u in range(4)]
    path.write_text("\n".join(lines) + "\n")
    argv = [*small, "--validation", str(path), "--resume", "--epochs"]
    assert main([*argv, "1"]) == 0
    path.write_text("\n".join(lines[::-1]) + "\n")
    assert main([*argv, "2"]) == 0
    others = [*lines[1:], "user 5\titem2"], [*lines[1:], f"{lines[0]}:unknown"]
    for other in others:
        path.write_text("\n".join(other) + "\n")
        assert main([*argv, "3"]) == 1
        assert "cannot resume with other validation data" in capsys.readouterr().err


def test_resume_where_no_checkpoint_is_begins(small, tmp_path):
    # As if the command had been killed before its settings were written.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".1f.tmp").touch()
    assert main([*small, "--resume"]) == 0
    assert folders.load_run(tmp_path / "run")[0].seed == 0


def test_an_interrupt_says_how_to_go_on(small, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "fit", interrupted)
        assert main(small) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sparsejax: interrupted before a checkpoint was saved; repeat the command to "
        "begin again"
    )
    # The folder is removed, so that the same command can begin again.
    assert not (tmp_path / "run").exists()
    assert main(small) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted)
        assert main([*small, "--resume"]) == 130
    assert capsys.readouterr().err == (
        "sparsejax: interrupted; to continue, repeat the command with --resume\n"
    )
    monkeypatch.setattr(commands, "convert", interrupted)
    assert main(["convert", "a", "b"]) == 130
    assert capsys.readouterr().err == "sparsejax: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint(small, tmp_path, monkeypatch, capsys, number):
    def told(epochs, step, entry):
        if entry["epoch"] == 2:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(printing, "print_epoch", told)
        assert main([*small, "--epochs", "4"]) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sparsejax: interrupted; to continue, repeat the command with --resume"
    )
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2]
    assert main([*small, "--epochs", "4", "--resume"]) == 0
    whole = str(tmp_path / "whole")
    assert main([*small, "--run", whole, "--epochs", "4"]) == 0
    assert parameters(tmp_path / "run") == parameters(whole)


def test_a_run_folder_is_one_trainings(small, tmp_path, capsys):
    assert main(small) == 0
    folder = tmp_path / "run"
    before = (folder / "run.json").read_bytes()
    for held in (folder, folder / "checkpoints"):  # locked by `train`, then by `fit`
        with locks.locked(held):
            assert main([*small, "--resume", "--epochs", "2"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{held}: is in use by process {os.getpid()} on " in error
        assert (folder / "run.json").read_bytes() == before
    assert main([*small, "--resume", "--epochs", "2"]) == 0


def sparsejax(*argv: str) -> subprocess.Popen:
    # A process started in the background of a shell ignores SIGINT, as its children do.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        "; runpy.run_module('sparsejax', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, *argv]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_of_two_trainings_on_a_folder_one_is_refused(small, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(pathlib.Path(small[1]).read_text().replace("item3", "other"))
    argv = [*small, "--epochs", "30", "--checkpoint-seconds", "0", "--resume"]
    both = [sparsejax(*argv), sparsejax("train", str(other), *argv[2:])]
    said = [process.communicate()[1] for process in both]
    statuses = [process.returncode for process in both]
    assert sorted(statuses) == [0, 1], said
    refused = said[statuses.index(1)].splitlines()[-1]
    assert "is in use by process" in refused or "other features" in refused
    names = folders.load_model(tmp_path / "run")[1]
    assert ("other" in names) == (statuses[1] == 0)


def test_killed_and_resumed_is_the_same_as_unbroken(board, tmp_path):
    argv = ["train", board.files[0], *NETWORK, "--epochs", "6", "--batch-size", "2"]
    argv += ["--checkpoint-seconds", "0", "--corruption", "0.2", "--dropout", "0.1"]
    assert main([*argv, "--run", str(tmp_path / "whole")]) == 0
    argv += ["--run", str(tmp_path / "broken"), "--resume"]
    checkpoints = Checkpoints(tmp_path / "broken" / "checkpoints")
    reached = 0
    # SIGTERM ends as SIGINT does: `test_a_signal_saves_a_checkpoint`.
    for how, status in [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]:
        broken = sparsejax(*argv)
        while max(checkpoints.steps(), default=0) <= reached and broken.poll() is None:
            time.sleep(0.01)
        broken.send_signal(how)
        _, said = broken.communicate()
        assert broken.returncode == status, said
        assert "Traceback" not in said
        assert how == signal.SIGKILL or "repeat the command with --resume" in said
        reached = checkpoints.steps()[-1]
    assert reached < 6 * 30
    assert main(argv) == 0
    assert checkpoints.steps()[-1] == 6 * 30
    assert parameters(tmp_path / "broken") == parameters(tmp_path / "whole")
