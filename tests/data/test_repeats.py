"""Splits of events of which some are repeats."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse

import sparsejax as sj
from sparsejax.cli.main import main

REPEATS = ["new", "all"]


def events(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 60))
    return pa.table(
        {
            "user": [f"u{u}" for u in rng.integers(0, 5, n)],
            "item": [f"i{i}" for i in rng.integers(0, 6, n)],
            "time": rng.integers(0, 20, n),
        }
    )


def pairs_of(data):
    matrix = data.matrix.to_scipy()
    rows, columns = scipy.sparse.coo_array(matrix).coords
    return set(zip(data.row_names[rows], data.feature_names[columns], strict=True))


def expected(table, cut, repeats):
    """The pairs of both parts, from the events."""
    rows = list(
        zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    )
    train = {(u, i) for u, i, t in rows if t < cut}
    held = {(u, i) for u, i, t in rows if t >= cut}
    return train, held - train if repeats == "new" else held


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("seed", range(20))
def test_each_part_has_the_pairs_of_its_events(seed, repeats):
    table, cut = events(seed), 10
    train, held = expected(table, cut, repeats)
    for data in (sj.read(table), sj.read_sequences(table)):
        if not train or not held:
            with pytest.raises(ValueError, match="held out"):
                data.split_at(cut, repeats=repeats)
            continue
        if isinstance(data, sj.data.SequenceDataset):
            train_part, heldout = data.split_at(cut, repeats=repeats)
            parts = [train_part.to_sparse(), heldout.to_sparse()]
        else:
            parts = list(data.split_at(cut, repeats=repeats))
        assert [pairs_of(part) for part in parts] == [train, held]
        earlier, later = (np.asarray(part.times) for part in parts)
        assert earlier.max() < cut <= later.min()
        for part in parts:
            np.testing.assert_array_equal(part.row_names, data.row_names)


def test_the_default_is_as_it_was():
    table = pa.table(
        {
            "user": ["ann", "ann", "ann", "bob", "bob"],
            "item": ["tea", "rye", "tea", "rye", "tea"],
            "time": [1, 2, 9, 3, 8],
        }
    )
    data = sj.read(table)
    with pytest.warns(UserWarning, match='1 of 2 held-out entries .*repeats="new"'):
        parts = data.split_at(5)
    assert pairs_of(parts.train) == {("ann", "rye"), ("bob", "rye")}
    parts = data.split_at(5, repeats="new")
    assert pairs_of(parts.train) == {("ann", "tea"), ("ann", "rye"), ("bob", "rye")}
    assert pairs_of(parts.heldout) == {("bob", "tea")}
    histories = sj.read_sequences(table)
    assert histories.split_at(5).heldout.num_entries == 2
    assert histories.split_at(5, repeats="new").heldout.num_entries == 1
    assert histories.split_last(1).heldout.num_entries == 2
    assert histories.split_last(1, repeats="new").heldout.num_entries == 1
    wrong: Any = "old"
    with pytest.raises(ValueError, match='repeats is "new" or "all", got .old.'):
        histories.split_at(5, repeats=wrong)
    valued = table.append_column("rating", pa.array([1.0] * 5))
    with pytest.raises(ValueError, match="1 entries have events on both sides"):
        sj.read(valued).split_at(5, repeats="all")


def test_nothing_but_repeats_is_held_out():
    table = pa.table({"user": ["a", "a"], "item": ["tea", "tea"], "time": [1, 9]})
    with pytest.raises(ValueError, match="nothing is held out but repeats"):
        sj.read(table).split_at(5, repeats="new")
    with pytest.raises(ValueError, match="all that was is a repeat"):
        sj.read_sequences(table).split_at(5, repeats="new")


def test_the_command(tmp_path, capsys):
    path = tmp_path / "all.csv"
    path.write_text("user,item,time\nann,tea,1\nann,tea,9\nbob,tea,2\nbob,rye,8\n")
    split = ["split", str(path), "--out", str(tmp_path / "parts"), "--repeats", "new"]
    assert main([*split, "--by", "time", "--at", "5"]) == 0
    held = sj.read(tmp_path / "parts" / "heldout.parquet")
    assert pairs_of(held) == {("bob", "rye")}
    split[3] = str(tmp_path / "others")
    for by in (["--by", "last"], ["--by", "random", "--fraction", ".5"]):
        assert main([*split, *by]) != 0
        assert "--repeats does not go with" in capsys.readouterr().err
    assert main([*split, "--by", "last", "--histories"]) == 0
