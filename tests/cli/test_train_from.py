"""`sparsejax train --from`: a model of an earlier run gets new items."""

import csv
import dataclasses

import numpy as np
import pytest
from run_folders import FIT, NETWORK, parameters

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.runs import folders

USERS, KNOWN, ITEMS = 48, 18, 20


def write(path, items):
    """Writes a file in which users like the items of their parity; the last items are new."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["user", "item"])
        for u in range(USERS):
            lines.writerows([f"u{u}", f"i{i}"] for i in range(u % 2, items, 2))
    return str(path)


def test_new_items_go_to_the_end_and_training_goes_on(tmp_path, capsys):
    before, later = (
        write(tmp_path / f"{n}.csv", items)
        for n, items in (("before", KNOWN), ("later", ITEMS))
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    options, network = (
        [*FIT, "--epochs", "12", "--decay", "none"],
        [*NETWORK, "--corruption", "0"],
    )
    assert main(["train", before, "--run", first, *network, *options]) == 0
    capsys.readouterr()
    argv = ["train", later, "--from", first, "--run", second, *options]
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert "18 items are known, 2 are new; the optimizer goes on with its state" in said

    known, names = folders.load_run(first)[1], folders.load_run(second)[1]
    assert names[:KNOWN].tolist() == known.tolist()
    assert sorted(names[KNOWN:]) == ["i18", "i19"]
    model, _ = sj.load_model(second)
    data = sj.read(later, features=names)
    some = data.to_scipy()[:, np.arange(ITEMS) < KNOWN]
    shown = sj.SparseDataset.from_scipy(
        some, row_names=data.row_names, feature_names=names[:KNOWN]
    ).align_features(names)
    # Each user gets, of two new items, the one of its parity.
    found = sj.recommend(model, shown, k=1, exclude=shown).names(names)
    for user, items in zip(shown.row_names, found, strict=True):
        assert items == [f"i{18 + int(user[1:]) % 2}"]

    # The result must be that of an uninterrupted training.
    wanted, third = parameters(second), str(tmp_path / "third")
    argv[argv.index(second)] = third
    argv[argv.index("12")] = "7"
    assert main([*argv, "--checkpoint-seconds", "0"]) == 0
    argv[argv.index("7")] = "12"
    assert main([*argv, "--resume"]) == 0
    assert parameters(third) == wanted


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[str, str]:
    """A run of two epochs, and the path of its data."""
    folder = tmp_path_factory.mktemp("first")
    before, run = write(folder / "before.csv", KNOWN), str(folder / "run")
    options = [*NETWORK, "--epochs", "2", "--optimizer", "adagrad"]
    assert main(["train", before, "--run", run, *options]) == 0
    return run, before


def test_before_training_the_known_items_are_recommended_as_before(first, tmp_path):
    first, before = first
    later = write(tmp_path / "later.csv", ITEMS)
    settings, known = folders.load_run(first)
    data = sj.read(later).append_features(known)
    changed = {"num_features": ITEMS, "optimizer": sj.optimizers.sgd(0.1)}
    new = dataclasses.replace(settings, **changed)
    model, optimizer, kept, _ = folders.continued(folders.Folder.of(first), new, data)
    assert not kept and optimizer.rule == sj.optimizers.sgd(0.1)
    trained, _ = sj.load_model(first)
    old = sj.read(before, features=known)
    wide = old.align_features(data)
    scores = np.asarray(model(wide.matrix, deterministic=True))
    np.testing.assert_allclose(
        scores[:, :KNOWN], trained(old.matrix), rtol=1e-5, atol=1e-6
    )


def test_what_it_cannot_do_is_said(first, tmp_path, capsys):
    first, before = first
    argv = ["train", before, "--from", first, "--run", str(tmp_path / "second")]

    def refused(text, *more):
        capsys.readouterr()
        assert main([*argv, *more]) == 1
        assert text in capsys.readouterr().err

    refused("leave out --hidden, or --from", "--hidden", "8")
    refused("leave out --config", "--config", str(tmp_path / "net.json"))
    refused("which is autoencoder; leave out --model", "--model", "sasrec")
    # The model of the earlier run may be named.
    more = ["--model", "autoencoder", "--chunk-rows", "10"]
    refused("leave out --chunk-rows", *more)
    argv[3] = str(tmp_path / "nothing")
    refused("is not a run folder")
