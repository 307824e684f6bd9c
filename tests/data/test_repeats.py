"""Splits of events, some of which are repeats."""

import copy
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from contents import contents

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data.prepared.folder import DataFolder

REPEATS: list[Any] = ["new", "all"]


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


def parts_of(split):
    return [
        pairs_of(p.to_sparse() if isinstance(p, sj.data.SequenceDataset) else p)
        for p in split
    ]


def expected(table, cut, repeats):
    """The expected pairs of both parts, computed from the events."""
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
        if repeats == "new":
            assert parts_of(data.split_at(cut)) == [train, held]  # the default
        split = data.split_at(cut, repeats=repeats)
        assert parts_of(split) == [train, held]
        earlier, later = (np.asarray(part.times) for part in split)
        assert earlier.max() < cut <= later.min()
        for part in split:
            np.testing.assert_array_equal(part.row_names, data.row_names)


@pytest.mark.usefixtures("wrong_types")
def test_what_is_told_and_refused():
    table = pa.table(
        {
            "user": ["ann", "ann", "ann", "bob", "bob"],
            "item": ["tea", "rye", "tea", "rye", "tea"],
            "time": [1, 2, 9, 3, 8],
        }
    )
    data = sj.read(table)
    histories = sj.read_sequences(table)
    for each in (data, histories):
        split = each.split_at(5)
        assert (split.repeats, each.split_at(5, repeats="all").repeats) == (1, 0)
        assert str(split) == (
            "held out 1 of 4 entries (25.0%), in 1 rows; new rows: 0, new features: 0; "
            "repeats left out: 1"
        )
        assert copy.copy(split).repeats == 1
    assert histories.split_last(1).heldout.num_entries == 2
    assert histories.split_last(1, repeats="new").heldout.num_entries == 1
    wrong: Any = "old"
    with pytest.raises(ValueError, match='repeats is "new" or "all", got .old.'):
        histories.split_at(5, repeats=wrong)
    valued = table.append_column("rating", pa.array([1.0] * 5))
    with pytest.raises(ValueError, match="1 entries have events on both sides of 5,"):
        sj.read(valued).split_at(5)
    assert sj.read(valued).without_values().split_at(5).train.num_entries == 3


def test_nothing_but_repeats_is_held_out():
    table = pa.table({"user": ["a", "a"], "item": ["tea", "tea"], "time": [1, 9]})
    with pytest.raises(ValueError, match="nothing is held out but repeats"):
        sj.read(table).split_at(5)
    with pytest.raises(ValueError, match="nothing is held out but repeats"):
        sj.read_sequences(table).split_at(5)
    with pytest.raises(ValueError, match="last entries of all rows are repeats"):
        sj.read_sequences(table).split_last(repeats="new")


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


def test_prepared_as_read(tmp_path):
    """Folders, what is scanned of them, and the command have the parts of `split_at`."""
    table, cut = events(3), 10
    path = tmp_path / "all.parquet"
    pq.write_table(table, path)
    for repeats in REPEATS:
        split = sj.read(table).split_at(cut, repeats=repeats)
        out = tmp_path / repeats
        argv = ["prepare", str(path), str(out), "--split-time", str(cut)]
        assert main([*argv, *(["--repeats", "all"] if repeats == "all" else [])]) == 0
        names = sj.read(out).feature_names
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sj.data.UnknownFeaturesWarning)
            wanted = [part.align_features(names) for part in split]
        for part, where in zip(wanted, (out, out / "test"), strict=True):
            scanned = sj.data.scan_parquet(where)
            rows = scanned.read(0, scanned.num_rows)
            found = sj.read(where)
            assert pairs_of(found) == pairs_of(part)
            np.testing.assert_array_equal(rows.indices, found.matrix.indices)
        folder = DataFolder.find(out)
        assert folder is not None
        manifest = folder.manifest
        assert manifest.repeats == split.repeats
        assert ("repeats left out" in str(manifest)) == (split.repeats > 0)
        assert (split.repeats > 0) == (repeats == "new")
    with pytest.raises(ValueError, match="repeats needs split_time"):
        sj.prepare(table, tmp_path / "no", repeats="new", split_last=1)


def test_values_are_split(tmp_path):
    """Each part has the values of its own events, which no merged pair has."""
    table = pa.table(
        {
            "user": ["ann", "ann", "ann", "ann", "bob"],
            "item": ["tea", "tea", "tea", "tea", "tea"],
            "value": [1.0, 2.0, 8.0, 4.0, 16.0],
            "time": [1, 2, 9, 8, 8],
        }
    )
    wanted: dict[Any, Any] = {"add": (3.0, 12.0), "last": (2.0, 8.0), "max": (2.0, 8.0)}
    for duplicates, (before, after) in wanted.items():
        for repeats in REPEATS:
            out = tmp_path / f"{duplicates}_{repeats}"
            sj.prepare(table, out, split_time=5, repeats=repeats, duplicates=duplicates)
            assert contents(sj.read(out)) == {"ann": {"tea": before}}
            held = {"bob": {"tea": 16.0}}
            held |= {"ann": {"tea": after}} if repeats == "all" else {}
            assert contents(sj.read(out / "test")) == held
