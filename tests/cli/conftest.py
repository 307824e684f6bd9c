"""Fixtures for the tests of the commands: a trained run, and small training data."""

import contextlib
import io

import numpy as np
import pytest
from run_folders import (
    FIT,
    ITEMS,
    NETWORK,
    Board,
    checkerboard,
    write_lines,
)

from sparsejax.cli.main import main


@pytest.fixture(scope="session")
def board(tmp_path_factory) -> Board:
    """A run of 25 epochs and its files, which tests only read."""
    folder = tmp_path_factory.mktemp("board")
    train, heldout = checkerboard()
    files = [write_lines(folder / "train.txt", train)]
    files += [write_lines(folder / "heldout.txt", heldout)]
    argv = ["train", files[0], "--run", str(folder / "run"), "--epochs", "25"]
    argv += [*NETWORK, *FIT, "--validation", files[1], "--k", "2"]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert main(argv) == 0, stderr.getvalue()
    return Board(folder, train, heldout, stderr.getvalue())


@pytest.fixture
def small(tmp_path) -> list[str]:
    """Arguments that train a tiny model for an epoch into `tmp_path / "run"`."""
    path = write_lines(tmp_path / "small.txt", checkerboard()[0])
    argv = ["train", path, "--run", str(tmp_path / "run"), *NETWORK, "--epochs", "1"]
    # SGD compiles fastest. Without decay, a resumed training may have more epochs.
    return [*argv, "--optimizer", "sgd", "--decay", "none"]


@pytest.fixture
def events(tmp_path) -> str:
    """Eight rows of three to five events of the checkerboard, with their times, shuffled."""
    lines = [
        f"user {u},item{(u + 2 * step) % ITEMS},{10 * step + u}\n"
        for u in range(8)
        for step in range(3 + u % 3)
    ]
    np.random.default_rng(0).shuffle(lines)
    path = tmp_path / "events.csv"
    path.write_text("user,item,timestamp\n" + "".join(lines) + "lonely,item1,7\n")
    return str(path)
