"""`sparsejax split`."""

import dataclasses
import errno
import os
import pathlib
import re

import numpy as np
import pytest

from sparsejax.cli.main import main
from sparsejax.data import ClickDataset, SequenceDataset, SparseDataset, read


def pairs_of(data: SparseDataset) -> set[tuple[str, str]]:
    rows = data.row_names.repeat(np.diff(data.matrix.indptr)).tolist()
    return set(zip(rows, data.feature_names[data.matrix.indices].tolist(), strict=True))


def parts_of(folder: pathlib.Path) -> list[SparseDataset]:
    assert sorted(os.listdir(folder)) == ["heldout.parquet", "train.parquet"]
    return [read(folder / f"{part}.parquet") for part in ("train", "heldout")]


@pytest.mark.parametrize(
    ("argv", "printed", "expected"),
    [
        (
            "--by last",
            "8 of 32 entries.* in 8 rows; .*, rows too short: 1",
            lambda data: data.split_last(),
        ),
        (
            "--by last --n 3",
            "in 8 rows; .*, rows too short: 4",
            lambda data: data.split_last(3),
        ),
        ("--by time --at 30", "of 32", lambda data: data.split_at(30)),
        ("--by time --at 29.5", "of 32", lambda data: data.split_at(29.5)),
        ("--by time --fraction .7", "of", lambda data: data.split_at(fraction=0.7)),
        ("--by random --fraction .7", "of", lambda data: data.split(0.7, seed=0)),
        (
            "--by random --fraction .7 --seed 3",
            "of 32",
            lambda data: data.split(0.7, seed=3),
        ),
        (
            "--by rows --fraction .7",
            "in 3 rows; new rows: 3",
            lambda data: data.split_rows(0.7, seed=0),
        ),
        (
            "--by items --fraction .7 --seed 2",
            "new features: [1-9]",
            lambda data: data.split_items(0.7, seed=2),
        ),
    ],
)
def test_split(events, tmp_path, capsys, argv, printed, expected):
    out = tmp_path / "parts"
    assert main(["split", events, "--out", str(out), *argv.split()]) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"^held out .*{printed}", line)
    for part, wanted in zip(parts_of(out), expected(read(events)), strict=True):
        assert part.times is not None and wanted.times is not None
        np.testing.assert_array_equal(part.times, wanted.times)
        assert pairs_of(part) == pairs_of(wanted)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--by last --at 3", "--at does not go with --by last"),
        ("--by random --fraction .5 --n 2", "--n does not go with --by random"),
        ("--by time --at 3 --seed 2", "--seed does not go with --by time"),
        ("--by time", "--by time needs the time, --at, or a share, --fraction"),
        (
            "--by time --at 3 --fraction .5",
            "--by time needs the time, --at, or a share",
        ),
        ("--by random", "--by random needs --fraction"),
        ("--by rows", "--by rows needs --fraction"),
        ("--by items --at 3", "--at does not go with --by items"),
        ("--by random --fraction 2", "fraction must lie in"),
        ("--by random --fraction .999", "nothing is held out"),
        ("--by last --n 0", "n must be 1 or more"),
        ("--by time --at soon", "times are numbers, from 0 to 45.*got 'soon'"),
        ("--by time --at 99", "nothing is held out: .*from 0 to 45, the cut is 99"),
        ("--by time --at -1", "everything is held out"),
        ("--by last --targets buy", "--targets needs --histories"),
    ],
)
def test_split_refuses(events, tmp_path, capsys, argv, message):
    out = ["--out", str(tmp_path / "parts")]
    assert main(["split", events, *out, *argv.split()]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sparsejax: error: ") and re.search(message, error)
    assert os.listdir(tmp_path) == ["events.csv"]


def test_the_last_target_of_each_user_is_held_out(tmp_path, capsys):
    # Events are "viewed" or "bought".
    kinds = {"ann": "vbvb", "bob": "bvv", "eve": "vv"}
    rows = [(user, i, kind) for user in kinds for i, kind in enumerate(kinds[user])]
    events = tmp_path / "events.csv"
    lines = ["user,item,kind", *(f"{user},i{i},{kind}" for user, i, kind in rows)]
    events.write_text("\n".join(lines))
    words = "--by last --histories --no-time --kind kind --targets b --out"
    parts = tmp_path / "parts"
    assert main(["split", str(events), *words.split(), str(parts)]) == 0
    assert "rows too short: 2" in capsys.readouterr().err
    train, heldout = (
        SequenceDataset.load(parts / f"{name}.parquet") for name in ("train", "heldout")
    )
    assert np.diff(heldout.indptr).tolist() == [1, 0, 0]  # the user bob keeps one entry
    assert heldout.feature_names[heldout.indices[0]] == "i3"
    assert np.diff(train.indptr).tolist() == [3, 3, 2]
    assert (
        train.weights is not None and train.weights.tolist() == [0, 1, 0, 1] + [0] * 4
    )


def test_split_of_dates(tmp_path, capsys):
    path = tmp_path / "events.csv"
    path.write_text("user,item,date\na,x,2024-01-31\na,y,2024-02-01\nb,x,2024-03-01\n")
    argv = ["split", str(path), "--out", str(tmp_path / "parts"), "--by", "time"]
    assert main([*argv, "--at", "soon"]) == 1
    assert "expected a time like '2024-01-31'" in capsys.readouterr().err
    assert main([*argv, "--at", "20240201"]) == 0
    _, heldout = parts_of(tmp_path / "parts")
    assert pairs_of(heldout) == {("a", "y"), ("b", "x")}
    # As if the command had been killed at its very end.
    assert main([*argv, "--at", "2024-02-01"]) == 0
    assert main([*argv, "--at", "2024-03-01"]) == 1
    assert "parts: already exists, with other content" in capsys.readouterr().err
    (tmp_path / "parts/notes").touch()
    assert main([*argv, "--at", "2024-02-01"]) == 1
    assert "parts: already exists; name another folder" in capsys.readouterr().err


def test_split_by_time_needs_times(board, tmp_path, capsys):
    argv = ["split", board.files[0], "--out", str(tmp_path / "parts"), "--by"]
    for by in (["last"], ["time", "--at", "3"]):
        assert main([*argv, *by]) == 1
        assert "has no times; name their column: --time" in capsys.readouterr().err
    run = ["train", board.files[0], "--run", str(tmp_path / "run")]
    assert main([*run, "--validation", "last"]) == 1
    assert "has no times; name their column: --time" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_split_is_whole_or_not_there(events, tmp_path, capsys, monkeypatch):
    save = SparseDataset.save

    def full(data, path):
        if path.name == "heldout.parquet":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(data, path)

    monkeypatch.setattr(SparseDataset, "save", full)
    argv = ["split", events, "--out", str(tmp_path / "parts"), "--by", "last"]
    assert main(argv) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["events.csv"]


def test_clicks_are_split_by_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 2},u{i % 3},{i}.5,2026-11-{i + 1:02}" for i in range(10)]
    pathlib.Path("clicks.csv").write_text(
        "\n".join(["click,user,price,at", *rows]) + "\n"
    )
    columns = ["--label", "click", "--dense", "price", "--categories", "user"]
    argv = ["split", "clicks.csv", "--by", "time", *columns, "--out"]
    assert main([*argv, "parts", "--time", "at", "--at", "2026-11-08"]) == 0
    assert "held out 3 of 10 examples (30.0%)" in capsys.readouterr().err
    train, heldout = (
        ClickDataset.load(f"parts/{part}.parquet") for part in ("train", "heldout")
    )
    assert train.dense[:, 0].tolist() == [i + 0.5 for i in range(7)]
    assert heldout.dense[:, 0].tolist() == [7.5, 8.5, 9.5]
    # The parts can be split again, and by rows.
    again = ["split", "parts/train.parquet", "--fraction", ".5", "--out"]
    assert main([*again, "by_time", "--by", "time"]) == 0
    assert main([*again, "by_rows", "--by", "rows"]) == 0
    dataclasses.replace(train, times=None).save("old.parquet")
    for wrong, message in (
        ([*again, "x", "--by", "random"], "--by random is of no use for clicks"),
        ([*again, "x", "--by", "time", "--time", "at"], "leave out --time"),
        (
            [*again, "x", "--by", "time", "--user", "a"],
            "--user, .*of no use for clicks",
        ),
        (
            [*argv, "x", "--fraction", ".5"],
            "--by time needs --time, the column of times",
        ),
        ([*again, "x", "--by", "rows", "--format", "pairs"], "--format, .*of no use"),
        (["split", "old.parquet", *again[2:], "x", "--by", "time"], "it was read from"),
    ):
        assert main(wrong) == 1
        assert re.search(message, capsys.readouterr().err), message
    assert not pathlib.Path("x").exists()
