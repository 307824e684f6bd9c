"""`sparsejax predict`."""

import gzip
import json
import os
import pathlib
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from run_folders import (
    ITEMS,
    NETWORK,
    USERS,
    items_of,
    recommendations,
    write_lines,
)

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data import read


def test_predict_recommends_the_users_colour(board, tmp_path):
    out = tmp_path / "recs.tsv"
    argv = ["predict", board.run, board.files[0], "--out", str(out)]
    assert main([*argv, "--k", "2", "--exclude-seen"]) == 0
    found = recommendations(out)
    assert list(found) == board.train.row_names.tolist()
    right = [
        set(found[f"user {u}"]) == items_of(board.heldout, u) for u in range(USERS)
    ]
    assert np.mean(right) > 0.95
    for scores in found.values():
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    # This is the default format.
    first = out.read_text()
    assert main([*argv, "--k", "2"]) == 0
    assert out.read_text() == first
    # The file is replaced; this time nothing is excluded.
    assert main([*argv, "--k", "8", "--keep-seen"]) == 0
    for user, items in recommendations(out).items():
        assert {int(item[4:]) % 2 for item in items} == {int(user[5:]) % 2}
    assert sorted(os.listdir(tmp_path)) == ["recs.tsv"]


def test_predict_excludes_what_a_file_says(board, tmp_path):
    some = board.heldout.align_rows(["user 1", "user 0"])
    unwanted = write_lines(tmp_path / "unwanted.txt", some)
    argv = ["predict", board.run, board.files[0], "--out", str(tmp_path / "recs.tsv")]
    argv += ["--exclude", unwanted, "--k", str(ITEMS)]
    assert main([*argv, "--keep-seen"]) == 0
    found = recommendations(tmp_path / "recs.tsv")
    for u in range(USERS):
        missing = set(board.train.feature_names) - set(found[f"user {u}"])
        assert missing == (items_of(board.heldout, u) if u < 2 else set())
    assert main(argv) == 0
    found = recommendations(tmp_path / "recs.tsv")
    for u in range(USERS):
        missing = set(board.train.feature_names) - set(found[f"user {u}"])
        expected = items_of(board.train, u)
        assert missing == expected | (items_of(board.heldout, u) if u < 2 else set())


def test_files_are_read_against_the_vocabulary_of_the_run(board, tmp_path, capsys):
    data = tmp_path / "new.txt"
    data.write_text("new\titem4:unheard of:item2\nempty\t\n")
    out = tmp_path / "recs.tsv"
    argv = ["predict", board.run, str(data), "--out", str(out), "--exclude-seen"]
    assert main([*argv, "--k", "3"]) == 0
    line, account, which = capsys.readouterr().err.splitlines()
    assert which == "3 items a row, without those that it has"
    assert account == f"{data}: 2 rows, 20 items, 2 entries; every entry counts 1"
    assert line.startswith(f"sparsejax: warning: {data}: 1 of 3 entries are left out")
    assert "'unheard of'" in line
    found = recommendations(out)
    assert {int(item[4:]) % 2 for item in found["new"]} == {0}
    assert len(found["empty"]) == 3


def test_predict_writes_what_the_name_says(board, tmp_path):
    predicted = {}
    for ending in (".tsv", ".csv", ".jsonl.gz", ".parquet"):
        path = tmp_path / f"recs{ending}"
        argv = ["predict", board.run, board.files[0], "--k", "2", "--exclude-seen"]
        assert main([*argv, "--out", str(path)]) == 0
        if ending == ".tsv":
            found = recommendations(path)
            predicted[ending] = [[u, i] for u, items in found.items() for i in items]
        elif ending == ".jsonl.gz":
            lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
            predicted[ending] = [[a["user"], i] for a in lines for i in a["items"]]
        else:
            read_ = pd.read_csv if ending == ".csv" else pd.read_parquet
            frame = read_(path)
            assert frame["rank"].tolist() == [1, 2] * USERS
            predicted[ending] = frame[["user", "item"]].to_numpy().tolist()
    assert len(predicted[".csv"]) == 2 * USERS
    assert all(pairs == predicted[".csv"] for pairs in predicted.values())


def test_sold_out_items_are_recommended_to_nobody(board, tmp_path, capsys):
    out = tmp_path / "recs.tsv"
    argv = ["predict", board.run, board.files[0], "--out", str(out), "--k", str(ITEMS)]
    (tmp_path / "sold.txt").write_text("item3\nitem8\nitem3\n")
    for seen, items in (([], "item3,item8"), (["--keep-seen"], "sold.txt")):
        items = str(tmp_path / items) if items.endswith("txt") else items
        assert main([*argv, *seen, "--exclude-items", items]) == 0
        found = recommendations(out)
        for u in range(USERS):
            missing = set(board.train.feature_names) - set(found[f"user {u}"])
            had = set() if seen else items_of(board.train, u)
            assert missing == {"item3", "item8"} | had
    argv_ = [*argv, "--keep-seen", "--exclude-items", "item3"]
    assert main([*argv_, "--only-items", str(tmp_path / "sold.txt")]) == 0
    assert set(map(tuple, recommendations(out).values())) == {("item8",)}
    # The best items are those without the flag, minus the excluded items.
    names = board.train.feature_names.tolist()
    run = sj.Run.load(board.run)
    every, some = (
        run.recommend(k=ITEMS, inputs=board.files[0], exclude_items=left).names()
        for left in ([], names[:3])
    )
    for whole, part in zip(every, some, strict=True):
        assert part == [name for name in whole if name not in names[:3]]
    capsys.readouterr()
    assert main([*argv, "--exclude-items", "item3,nothing"]) == 0
    assert (
        "warning: --exclude-items: 1 of 2 names are not items of the model, and have no "
        "effect: 'nothing'\n" in capsys.readouterr().err
    )
    assert main([*argv, "--exclude-items", "sold.txt"]) == 1
    assert "--exclude-items sold.txt: there is no such file" in capsys.readouterr().err


def test_seen_items_are_left_out_or_not(board, tmp_path, capsys):
    argv = ["predict", board.run, board.files[0], "--out", str(tmp_path / "recs.tsv")]
    assert main([*argv, "--keep-seen", "--exclude-seen"]) == 1
    assert "--keep-seen or --exclude-seen, not both" in capsys.readouterr().err
    assert main([*argv, "--keep-seen"]) == 0
    assert "10 items a row, also those that it has" in capsys.readouterr().err


def test_predict_for_some_users(board, tmp_path, monkeypatch, capsys):
    argv = ["predict", board.run, board.files[0], "--k", "2"]
    whole, some = tmp_path / "whole", tmp_path / "some"
    assert main([*argv, "--out", str(whole)]) == 0
    monkeypatch.chdir(tmp_path)
    pathlib.Path("users.txt").write_text("user 7\r\n\nuser 3\r\nuser 7\r\n")
    for users in ("user 7,user 3", "users.txt"):
        assert main([*argv, "--out", str(some), "--users", users]) == 0
        found = recommendations(some)
        assert list(found) == ["user 7", "user 3"]
        assert found == {name: recommendations(whole)[name] for name in found}
    assert main([*argv, "--out", str(some), "--users", "user 3,nobody"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        "--users: 1 of 2 .*'nobody'; leave them out; .*no file.* as DATA", error
    )
    assert "missing=" not in error  # `missing=` is an argument in Python, not a flag
    pathlib.Path("users.txt").write_text("\n")
    assert main([*argv, "--out", str(some), "--users", "users.txt"]) == 1
    assert "users.txt: holds no names" in capsys.readouterr().err
    assert list(recommendations(some)) == ["user 7", "user 3"]


def test_titles_with_separators(tmp_path, capsys):
    """Names as in a catalogue of films go all the way."""
    titles = [
        "Alien: Covenant",
        "Crouching Tiger, Hidden Dragon",
        "Tab\tHunter",
        "AC\\DC",
    ]
    table = pa.table({"user": [f"u: {i // 2}" for i in range(8)], "item": titles * 2})
    path = str(tmp_path / "data.parquet")
    pq.write_table(table, path)
    train = ["train", path, "--run", str(tmp_path / "run"), *NETWORK, "--epochs", "1"]
    assert main([*train, "--optimizer", "sgd"]) == 0
    out = tmp_path / "recs.tsv"
    assert main(["predict", str(tmp_path / "run"), path, "--out", str(out)]) == 0
    found = read(out, format="text")
    assert set(found.feature_names.tolist()) == set(titles)
    assert found.row_names.tolist() == [f"u: {i}" for i in range(4)]
    capsys.readouterr()
    assert main(["similar", str(tmp_path / "run"), titles[0], "--k", "3"]) == 0
    (tmp_path / "similar.tsv").write_text(capsys.readouterr().out)
    similar = read(tmp_path / "similar.tsv", format="text")
    assert similar.row_names.tolist() == titles[:1]
    assert set(similar.feature_names.tolist()) == set(titles[1:])
