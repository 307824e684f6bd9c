"""`sparsejax compare`."""

import dataclasses
import json

import numpy as np
import pytest
from run_folders import FIT, NETWORK, write_lines

import sparsejax as sj
from sparsejax.cli.main import main


@pytest.mark.filterwarnings("ignore:recommending the most popular")
def test_a_better_run_is_told_from_a_worse_one(board, tmp_path, capsys):
    worse = str(tmp_path / "worse")
    # The second run shares its programs: it is trained on other items, equally many.
    names = np.random.default_rng(0).permutation(board.train.feature_names)
    other = dataclasses.replace(board.train, feature_names=names)
    argv = ["train", write_lines(tmp_path / "other.txt", other), "--run", worse]
    argv += ["--epochs", "25", *NETWORK, *FIT]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(["compare", worse, board.run, *board.files, "--k", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    found = json.loads(out[-1])
    assert 0 < found["recall@2"]["low"] < found["recall@2"]["difference"]
    assert "95% interval" in out[0] and out[-2] == "paired over 60 rows"
    inputs, heldout = board.files
    options: dict = {"inputs": inputs, "k": 2, "keep_rows": True}
    measured = [sj.Run.load(worse).evaluate(heldout, **options)]
    measured += [sj.Run.load(board.run).evaluate(heldout, **options)]
    assert json.loads(sj.compare(*measured).to_json()) == found
    model, names = sj.load_model(board.run)
    train, heldout = (sj.read(file, features=names) for file in board.files)
    assert measured[1] == sj.evaluate(model, train, heldout, k=2)


def test_a_run_that_is_worse_than_popularity_says_so(board):
    """Each user is held to have items of the other colour, which the run does not find."""
    rows = np.roll(board.heldout.row_names, 1)
    wrong = dataclasses.replace(board.heldout, row_names=rows)
    run = sj.Run.load(board.run)
    with pytest.warns(UserWarning, match="popular items to everyone is better"):
        run.evaluate(wrong, inputs=board.files[0], k=2)


def test_the_same_run_twice(board, capsys):
    assert main(["compare", board.run, board.run, *board.files]) == 0
    out = capsys.readouterr().out
    assert "may be chance" in out
    assert all(
        d["low"] == d["high"] == 0 for d in json.loads(out.splitlines()[-1]).values()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--schema", "x"], "Unrecognized"), (["--k", "0"], "k")],
)
def test_wrong_flags(board, capsys, flags, message):
    assert main(["compare", board.run, board.run, *board.files, *flags]) != 0
    assert message in capsys.readouterr().err
