"""The command line, on a checkerboard: even users like even items, odd users odd ones."""

import contextlib
import dataclasses
import errno
import gzip
import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import typing

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import optimizers
from sparsejax.cli import commands, demo, run
from sparsejax.cli import main as cli
from sparsejax.cli.main import main
from sparsejax.data import SparseDataset, read, sniff
from sparsejax.mesh import locks
from sparsejax.nn.config import NetworkConfig
from sparsejax.prediction import vectors
from sparsejax.prediction.evaluate import evaluate
from sparsejax.sparse import CSR
from sparsejax.training import plan as planning
from sparsejax.training.checkpoint import Checkpoints

USERS, ITEMS = 60, 20
NETWORK = ["--hidden", "16"]
FIT = ["--learning-rate", "0.01", "--batch-size", "16"]


@dataclasses.dataclass(frozen=True)
class Board:
    """A trained run and the files it was made from.

    Attributes:
      folder: with `train.txt`, `heldout.txt` and `run`.
      train: what is in `train.txt`.
      heldout: two more items of each user, of its colour.
      stderr: what training said.
    """

    folder: pathlib.Path
    train: SparseDataset
    heldout: SparseDataset
    stderr: str

    @property
    def files(self) -> list[str]:
        return [str(self.folder / name) for name in ("train.txt", "heldout.txt")]

    @property
    def run(self) -> str:
        return str(self.folder / "run")


def checkerboard() -> tuple[SparseDataset, SparseDataset]:
    """All items of its colour for each user: `(train, two held out for each)`."""
    full = np.add.outer(np.arange(USERS), np.arange(ITEMS)) % 2 == 0
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random(full.shape) + ~full, axis=1)  # its colour first
    heldout = np.zeros_like(full)
    np.put_along_axis(heldout, order[:, :2], True, axis=1)

    def dataset(dense: np.ndarray) -> SparseDataset:
        return SparseDataset.from_scipy(
            scipy.sparse.csr_array(dense),
            row_names=[f"user {u}" for u in range(USERS)],
            feature_names=[f"item{i}" for i in range(ITEMS)],
        )

    return dataset(full & ~heldout), dataset(heldout)


def write_lines(path: pathlib.Path, data: SparseDataset) -> str:
    """The data set in the text form, written without the code under test."""
    indptr, names = data.matrix.indptr, data.feature_names
    lines = (
        f"{row}\t{':'.join(names[data.matrix.indices[indptr[i] : indptr[i + 1]]])}\n"
        for i, row in enumerate(data.row_names)
    )
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> Board:
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
    return [*argv, "--optimizer", "sgd"]  # compiles fastest


def _names(*names: str) -> np.ndarray:
    return np.array(names, dtype=np.dtypes.StringDType())


def recommendations(path: pathlib.Path) -> dict[str, dict[str, float]]:
    """`{user: {item: score}}` of a file that `predict` wrote, in its order."""
    found = {}
    for line in path.read_text().splitlines():
        user, _, rest = line.partition("\t")
        entries = (entry.split(",") for entry in rest.split(":") if rest)
        found[user] = {item: float(score) for item, score in entries}
    return found


def items_of(data: SparseDataset, row: int) -> set[str]:
    start, end = data.matrix.indptr[row : row + 2]
    return set(data.feature_names[data.matrix.indices[start:end]])


def parameters(folder: str | pathlib.Path) -> dict[str, bytes]:
    """Every parameter of a run's model, bit for bit."""
    state = nnx.to_pure_dict(nnx.state(run.load_model(folder)[0], nnx.Param))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves
    }


def test_train_says_what_it_does(board):
    lines = board.stderr.splitlines()
    entries = board.train.num_entries
    count = sum(len(bits) // 4 for bits in parameters(board.run).values())
    counts = f"60 rows, 20 items, {entries} entries; every entry counts 1"
    assert lines[0].endswith(f"train.txt: {counts}")
    assert lines[2] == f"60 rows, 20 features, {entries} entries, {count:,} parameters"
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 25
    assert re.match(r"epoch 1/25  loss \d.*examples/s.*ndcg@2 \d", epochs[0])
    assert "Traceback" not in board.stderr


def test_evaluate_finds_what_was_held_out(board, capsys):
    assert main(["evaluate", board.run, *board.files, "--k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = json.loads(lines[-1])
    assert measured["users"] == USERS
    # Everything of the user's colour that it does not have yet is held out.
    assert measured["recall@2"] > 0.95
    assert measured["popularity_recall@2"] < 0.6
    assert {"ndcg@2", "precision@2", "truncated_recall@2"} < measured.keys()
    row = next(line for line in lines if line.startswith("recall@2 ")).split()
    expected = [measured["recall@2"], measured["popularity_recall@2"]]
    assert [float(cell) for cell in row[1:]] == pytest.approx(expected, abs=1e-4)


def test_evaluate_rows_it_was_not_trained_on(board, tmp_path, capsys):
    train, heldout = read(board.files[0]), read(board.files[1])
    both = train.to_scipy() + heldout.align_features(train).to_scipy()
    names = [f"other {row}" for row in range(USERS)]
    others = SparseDataset.from_scipy(
        both.astype(bool), row_names=names, feature_names=train.feature_names
    )
    others = others.split_rows(0.5, seed=0)[0]
    path = write_lines(tmp_path / "others.txt", others)
    argv = ["evaluate", board.run, path, "--fold-in", "0.7", "--k", "3"]
    assert main([*argv, "--popularity", board.files[0], "--seed", "3"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    model, names = run.load_model(board.run)
    data = read(path, features=names)
    assert measured == pytest.approx(
        evaluate(model, data, fold_in=0.7, seed=3, k=3, popularity=train)
    )
    assert measured["recall@3"] > 0.95
    assert measured["popularity_recall@3"] < 0.7
    for extra in ([], [board.files[1], "--fold-in", "0.7"]):
        assert main(["evaluate", board.run, path, *extra]) == 1
        assert "name the TEST file, or hold out" in capsys.readouterr().err


def test_evaluate_among_candidates(board, tmp_path, capsys):
    """Of one held-out item and the other colour's, the item is found."""
    lines = [
        f"user {u}\t" + ":".join(f"item{i}" for i in range(1 - u % 2, ITEMS, 2))
        for u in range(USERS)
    ]
    path = tmp_path / "candidates.tsv"
    path.write_text("\n".join(lines))
    argv = ["evaluate", board.run, *board.files, "--candidates", str(path)]
    assert main([*argv, "--k", "2"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["recall@2"] == measured["hit_rate@2"] == measured["map@2"] == 1
    assert measured["popularity_recall@2"] < 0.9


def measured_by(argv: list[str], capsys) -> tuple[dict[str, float], str]:
    """What `evaluate` printed: the last line, and the one before."""
    assert main(["evaluate", *argv, "--k", "2"]) == 0
    *_, said, last = capsys.readouterr().out.splitlines()
    return json.loads(last), said


def test_evaluate_counts_unknown_items(board, tmp_path, capsys):
    """A third of the users later like what was not there before."""
    lines = pathlib.Path(board.files[1]).read_text().splitlines()
    lines[::3] = [line.replace("item", "new item") for line in lines[::3]]
    test = tmp_path / "test.txt"
    test.write_text("\n".join(lines))
    argv = [board.run, board.files[0], str(test)]
    missed, said = measured_by(argv, capsys)
    assert (missed["users"], missed["users_unknown"]) == (60, 20)
    assert missed["entries_unknown"] == 40
    assert said == (
        "means over 60 users; 40 held-out entries are of unknown items, and 20 users "
        "have no others"
    )
    skipped, said = measured_by([*argv, "--unknown", "skip"], capsys)
    assert (skipped["users"], skipped["users_unknown"]) == (40, 20)
    for name in ("recall@2", "ndcg@2", "popularity_map@2"):
        assert missed[name] == pytest.approx(skipped[name] * 40 / 60)
    # Of new users: what is new is held out as often as anything else.
    argv = [board.run, str(test), "--fold-in", "0.5", "--popularity", board.files[0]]
    folded, _ = measured_by(argv, capsys)
    heldout = read(test).split(0.5, seed=0)[1]
    assert folded["entries_unknown"] == folded["users_unknown"] == 20
    assert folded["users"] == heldout.num_entries == 60


def test_evaluate_repeats(board, tmp_path, capsys):
    lines = pathlib.Path(board.files[1]).read_text().splitlines()
    lines[::2] = pathlib.Path(board.files[0]).read_text().splitlines()[::2]
    test = tmp_path / "test.txt"
    test.write_text("\n".join(lines))
    argv = [board.run, board.files[0], str(test)]
    assert main(["evaluate", *argv, "--k", "2"]) == 0
    printed, said = capsys.readouterr()
    [line] = [line for line in said.splitlines() if "warning" in line]
    assert line.startswith("sparsejax: warning: 240 of 300 held-out entries (80.0%)")
    assert "--keep-seen ranks them, too" in line
    assert json.loads(printed.splitlines()[-1])["hit_rate@2"] < 0.51
    kept, _ = measured_by([*argv, "--keep-seen"], capsys)
    assert kept["hit_rate@2"] > 0.6
    # All of it.
    assert main(["evaluate", board.run, board.files[0], board.files[0]]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "held-out entries of known items are excluded" in line
    assert "--keep-seen" in line


def test_evaluate_with_several_histories(board, tmp_path, capsys):
    """Of two held out items one is shown, and the other is found."""
    starts, names = board.heldout.matrix.indptr[:-1], board.heldout.feature_names
    files = {"more": tmp_path / "more.txt", "later": tmp_path / "later.txt"}
    for which, path in enumerate(files.values()):
        items = names[board.heldout.matrix.indices[starts + which]]
        pairs = zip(board.heldout.row_names, items, strict=True)
        path.write_text("".join(f"{row}\t{item}\n" for row, item in pairs))
    more = tmp_path / "new.txt"
    more.write_text("somebody\titem2:item4\n")
    with files["later"].open("a") as file:
        file.write("somebody\titem6\n")
    argv = [board.run, board.files[0], str(files["later"])]
    argv += ["--history", str(files["more"]), "--history", str(more)]
    measured, _ = measured_by(argv, capsys)
    model, names = run.load_model(board.run)
    train, *others, later = (
        read(path, features=names)
        for path in (board.files[0], files["more"], more, files["later"])
    )
    shown = train.merge(*others)
    assert measured == pytest.approx(
        evaluate(model, shown, later, k=2, popularity=train)
    )
    assert measured["users"] == 61 and measured["hit_rate@2"] > 0.95
    # What is shown in another file is excluded, too.
    alone, _ = measured_by(argv[:3], capsys)
    assert alone["mrr@2"] < measured["mrr@2"]
    argv = ["evaluate", board.run, board.files[0], "--fold-in", "0.5", *argv[3:]]
    assert main(argv) == 1
    assert "--history is shown beside TRAIN" in capsys.readouterr().err


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
    # Written again, without an exclusion, it is replaced.
    assert main([*argv, "--k", "8"]) == 0
    for user, items in recommendations(out).items():
        assert {int(item[4:]) % 2 for item in items} == {int(user[5:]) % 2}
    assert sorted(os.listdir(tmp_path)) == ["recs.tsv"]


def test_predict_excludes_what_a_file_says(board, tmp_path):
    some = board.heldout.align_rows(["user 1", "user 0"])
    unwanted = write_lines(tmp_path / "unwanted.txt", some)
    argv = ["predict", board.run, board.files[0], "--out", str(tmp_path / "recs.tsv")]
    argv += ["--exclude", unwanted, "--k", str(ITEMS)]
    assert main(argv) == 0
    found = recommendations(tmp_path / "recs.tsv")
    for u in range(USERS):
        missing = set(board.train.feature_names) - set(found[f"user {u}"])
        assert missing == (items_of(board.heldout, u) if u < 2 else set())
    assert main([*argv, "--exclude-seen"]) == 0
    found = recommendations(tmp_path / "recs.tsv")
    for u in range(USERS):
        missing = set(board.train.feature_names) - set(found[f"user {u}"])
        expected = items_of(board.train, u)
        assert missing == expected | (items_of(board.heldout, u) if u < 2 else set())


def test_report_of_a_run(board, tmp_path, capsys):
    out = str(tmp_path / "report.html")
    train, heldout = board.files
    argv = ["report", board.run, "--out", out, "--k", "2"]
    assert main([*argv, "--train", train, "--test", heldout]) == 0
    assert f"the report is in {out}" in capsys.readouterr().err
    page = pathlib.Path(out).read_text()
    # 25 epochs of loss, speed and validation metrics, not those of the best only.
    assert "best ndcg@2, epoch " in page and page.count("epoch 25: ") >= 4
    assert "popularity" in page and page.count("<section>") == 6
    assert "means over 60 users." in page
    assert "user 0" in page and "hidden1 size" in page and "adam" in page
    assert main(argv) == 0  # without data, over the old one
    page = pathlib.Path(out).read_text()
    assert "popularity" not in page and "user 0" not in page
    assert "item0" in page and "epoch 25: " in page
    assert main(argv[:2]) == 0
    assert (pathlib.Path(board.run) / "report.html").read_text() == page


def test_vectors_of_a_run(board, tmp_path):
    assert main(["vectors", board.run, "--out", str(tmp_path / "items.npz")]) == 0
    users = ["--out", str(tmp_path / "users.parquet"), "--data", board.files[0]]
    assert main(["vectors", board.run, *users]) == 0
    model, names = run.load_model(board.run)
    with np.load(tmp_path / "items.npz") as found:
        assert found["names"].tolist() == names.tolist()
        expected = np.asarray(model.output.kernel[...])[:ITEMS]
        np.testing.assert_array_equal(found["vectors"], expected)
    table = pq.read_table(tmp_path / "users.parquet")
    assert table["name"].to_pylist() == board.train.row_names.tolist()
    x = CSR.from_scipy(board.train.to_scipy()[:, _order(board, names)])
    expected = np.asarray(model.encode(x, deterministic=True))
    np.testing.assert_allclose(table["vector"].to_pylist(), expected, atol=1e-6)


def _order(board: Board, names: np.ndarray) -> list[int]:
    return [board.train.feature_names.tolist().index(n) for n in names.tolist()]


def test_similar_items_of_a_run(board, capsys):
    assert main(["similar", board.run, "item4", "item7", "--k", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model, names = run.load_model(board.run)
    found = vectors.similar_items(model, ["item4", "item7"], 4, names=names)
    for line, item, others, scores in zip(
        lines, ("item4", "item7"), found.names(names), found.scores, strict=True
    ):
        entries = (f"{o},{s:.6g}" for o, s in zip(others, scores, strict=True))
        assert line == f"{item}\t{':'.join(entries)}"


@pytest.mark.usefixtures("symbolic_sizes")
def test_a_run_is_exported(board, tmp_path, capsys):
    path = tmp_path / "model.predictor"
    flags = ["--k", "4", "--batch-size", "1"]
    assert main(["export", board.run, str(path), *flags]) == 0
    assert capsys.readouterr().err == f"the predictor is in {path}\n"
    predictor = sj.load_predictor(path)
    model, names = run.load_model(board.run)
    found = sj.recommend(model, board.train.align_features(names), 4)
    row = 3
    items = board.train.to_scipy()[[row]].indices
    history = board.train.feature_names[items].tolist()
    expected = found.names(names)[row]
    assert predictor.recommend_names(history, exclude_seen=False) == expected
    assert main(["export", board.run, str(tmp_path / "no" / "file")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_files_are_read_against_the_vocabulary_of_the_run(board, tmp_path, capsys):
    data = tmp_path / "new.txt"
    data.write_text("new\titem4:unheard of:item2\nempty\t\n")
    out = tmp_path / "recs.tsv"
    argv = ["predict", board.run, str(data), "--out", str(out), "--exclude-seen"]
    assert main([*argv, "--k", "3"]) == 0
    line, account = capsys.readouterr().err.splitlines()
    assert account == f"{data}: 2 rows, 20 items, 2 entries; every entry counts 1"
    assert line.startswith(f"sparsejax: warning: {data}: 1 of 3 entries are left out")
    assert "'unheard of'" in line
    found = recommendations(out)
    assert {int(item[4:]) % 2 for item in found["new"]} == {0}
    assert len(found["empty"]) == 3


def test_rows_that_are_only_held_out_are_reported(board, tmp_path, capsys):
    test = tmp_path / "test.txt"
    test.write_text("nobody\titem1\nuser 0\titem2\n")
    assert main(["evaluate", board.run, board.files[0], str(test)]) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "'nobody'" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["users"] == 1


def test_load_model_takes_the_best_checkpoint_else_the_newest(board, tmp_path):
    settings, names = run.load_run(board.run)
    assert names.tolist() == read(board.files[0]).feature_names.tolist()
    with run.begun(tmp_path / "run", settings, names, resume=False):
        pass
    with pytest.raises(ValueError, match="no checkpoint yet"):
        run.load_model(tmp_path / "run")
    checkpoints = run.checkpoints_of(tmp_path / "run", settings)

    def saved(step: int, score: float | None) -> bytes:
        modules = dataclasses.replace(settings, seed=step).build()
        checkpoints.save(step, modules, {}, score=score)
        return np.asarray(modules[0].output.kernel[...]).tobytes()

    def loaded() -> bytes:
        model, found = run.load_model(tmp_path / "run")
        assert found.tolist() == names.tolist()
        return np.asarray(model.output.kernel[...]).tobytes()

    saved(1, None)
    newest = saved(2, None)
    assert loaded() == newest
    best = saved(3, 0.5)
    saved(4, 0.4)
    assert loaded() == best


def test_network_from_a_file(small, tmp_path, capsys):
    config = NetworkConfig.autoencoder((4, 3), activation="tanh", tied=False)
    (tmp_path / "net.json").write_text(config.to_json())
    argv = [word for word in small if word not in NETWORK]
    argv += ["--config", str(tmp_path / "net.json")]
    # Also a flag that repeats its own default.
    assert main([*argv, "--activation=relu"]) == 1
    assert "leave out --activation, or --config" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(argv) == 0
    assert run.load_run(tmp_path / "run")[0].network == config


def test_every_setting_is_kept(small, tmp_path):
    heldout = write_lines(tmp_path / "heldout.txt", checkerboard()[1])
    argv = ["--optimizer", "adagrad", "--activation", "tanh", "--normalize", "--tied"]
    argv += ["--corruption", "0.25", "--dropout", "0.5", "--temperature", "0.2"]
    argv += ["--seed", "7", "--loss", "sigmoid_binary_cross_entropy"]
    argv += ["--validation", heldout, "--k", "3", "--patience", "2"]
    assert main([*small, *argv]) == 0
    settings = run.load_run(tmp_path / "run")[0]
    assert settings.network == NetworkConfig.autoencoder(
        (16,),
        activation="tanh",
        normalize=True,
        corruption=0.25,
        dropout=0.5,
        temperature=0.2,
        tied=True,
        loss="sigmoid_binary_cross_entropy",
    )
    assert settings.optimizer == optimizers.adagrad(1e-3)
    assert (settings.seed, settings.k, settings.patience) == (7, 3, 2)
    assert settings.indicator
    assert run.Run.from_json(settings.to_json()) == settings


def test_schedule_and_weight_decay(small, tmp_path):
    """60 rows in batches of 10 are 6 steps an epoch."""
    argv = [*small, "--batch-size", "10", "--learning-rate", "0.01"]
    argv += ["--optimizer", "adamw", "--weight-decay", "0.1", "--warmup-epochs", "0.5"]
    assert main(argv) == 0
    rate = optimizers.schedule(
        "warmup_constant_schedule", init_value=0.0, peak_value=0.01, warmup_steps=3
    )
    rule = optimizers.adamw(rate, weight_decay=0.1)
    assert run.load_run(tmp_path / "run")[0].optimizer == rule
    assert main([*argv, "--resume", "--epochs", "2"]) == 0
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 12


@pytest.mark.parametrize(
    ("warmup", "name", "options"),
    [
        (0.0, "cosine_decay_schedule", {"init_value": 0.01, "decay_steps": 18}),
        (
            1.0,
            "warmup_cosine_decay_schedule",
            {
                "init_value": 0.0,
                "peak_value": 0.01,
                "warmup_steps": 6,
                "decay_steps": 18,
            },
        ),
    ],
)
def test_cosine_decay_ends_with_the_last_epoch(warmup, name, options):
    flags = cli.Train(
        data="data",
        run=pathlib.Path("run"),
        optimizer="momentum",
        learning_rate=0.01,
        warmup_epochs=warmup,
        cosine_decay=True,
        batch_size=10,
        epochs=3,
    )
    rate = optimizers.schedule(name, **options)
    assert commands._rule(flags, [51]) == optimizers.momentum(rate)


def test_values_are_ignored_on_demand_and_then_later_too(tmp_path):
    data, ones = tmp_path / "data.tsv", tmp_path / "ones.tsv"
    data.write_text("user\titem\tvalue\na\tx\t1\na\ty\t5\nb\tx\t2\n")
    ones.write_text("a\tx\na\ty\nb\tx\n")
    argv = [*NETWORK, "--epochs", "1", "--optimizer", "sgd"]
    argv += ["--temperature", "None", "--no-normalize"]  # the values stay visible

    def predicted(folder: str, path: pathlib.Path) -> str:
        out = tmp_path / "recs"
        run = str(tmp_path / folder)
        assert main(["predict", run, str(path), "--out", str(out)]) == 0
        return out.read_text()

    train = ["train", str(data), "--run"]
    assert main([*train, str(tmp_path / "without"), *argv, "--no-value"]) == 0
    assert predicted("without", data) == predicted("without", ones)
    assert main([*train, str(tmp_path / "with"), *argv]) == 0
    assert predicted("with", data) != predicted("with", ones)


def test_train_on_a_part_of_the_data_at_a_time(small, tmp_path, capsys):
    saved = str(tmp_path / "saved.parquet")
    assert main(["convert", small[1], saved]) == 0
    train = ["train", saved, *small[2:], "--chunk-rows", "10"]
    assert main(train) == 0
    assert "epoch 1/1" in capsys.readouterr().err
    assert main([*train, "--resume", "--epochs", "2"]) == 0
    assert main([*train, "--resume", "--validation", saved]) == 1
    assert "leave out --chunk-rows" in capsys.readouterr().err
    assert main(["train", *small[1:], "--chunk-rows", "10", "--resume"]) == 1
    assert "is not a Parquet file" in capsys.readouterr().err


# Resuming


def test_resume_continues_with_more_epochs(small, tmp_path, capsys):
    assert main([*small, "--resume"]) == 0  # nothing there yet: begins
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


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (["--hidden", "8"], "hidden1 size 8: the run was begun with 16"),
        (["--hidden", "16", "4"], "hidden2"),
        (["--activation", "elu"], "hidden1 activation elu"),
        (["--tied"], "output tied"),
        (["--corruption", "0.25"], "corruption 0.25"),
        (["--loss", "l2_loss"], "loss l2_loss"),
        (["--optimizer", "sgd"], "optimizer sgd: the run was begun with adam"),
        (["--learning-rate", "0.5"], "--learning-rate 0.5"),
        (["--cosine-decay"], "'schedule': 'cosine_decay_schedule', 'decay_steps': "),
        (["--batch-size", "7"], "--batch-size 7"),
        (["--seed", "3"], "seed 3"),
        (["--k", "9"], "k 9"),
        (["--validation", "heldout.txt"], "other validation data"),
    ],
)
def test_resume_refuses_other_settings(
    board, tmp_path, monkeypatch, capsys, other, name
):
    monkeypatch.chdir(board.folder)
    argv = ["train", "train.txt", "--run", "run", "--epochs", "25", "--resume"]
    argv += [*NETWORK, *FIT, "--k", "2"]
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
    path.write_text("\n".join(lines[1:]) + "\nuser 5\titem2\n")
    assert main([*argv, "3"]) == 1
    assert "cannot resume with other validation data" in capsys.readouterr().err


def test_a_schedule_counts_the_steps_of_chunks(tmp_path, monkeypatch):
    rows = [[f"i{i % 9}", f"i{(i + 3) % 9}"] for i in range(100)]
    table = pa.table({"user": [f"u{i}" for i in range(100)], "items": rows})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=10)
    argv = ["train", str(tmp_path / "c.parquet"), "--run", str(tmp_path / "run")]
    argv += ["--chunk-rows", "10", "--batch-size", "8", "--epochs", "2", *NETWORK]
    assert main([*argv, "--cosine-decay"]) == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "'decay_steps': 40" in str(settings["optimizer"])  # 2 of each 10 chunks
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps()[-1] == 40


def test_resume_where_no_checkpoint_is_begins(small, tmp_path):
    (tmp_path / "run").mkdir()  # killed before its settings were written
    (tmp_path / "run" / ".1f.tmp").touch()
    assert main([*small, "--resume"]) == 0
    assert run.load_run(tmp_path / "run")[0].seed == 0


def test_an_interrupt_says_how_to_go_on(small, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commands.training, "fit", interrupted)
        assert main(small) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sparsejax: interrupted before a checkpoint was saved; repeat the command to "
        "begin again"
    )
    assert not (tmp_path / "run").exists()  # so that the same command can begin
    assert main(small) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(commands, "train", interrupted)
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
        patch.setattr(commands, "print_epoch", told)
        assert main([*small, "--epochs", "4"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sparsejax: interrupted; to continue, repeat the command with --resume"
    )
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2]
    assert main([*small, "--epochs", "4", "--resume"]) == 0
    whole = str(tmp_path / "whole")
    assert main([*small, "--run", whole, "--epochs", "4"]) == 0
    assert parameters(tmp_path / "run") == parameters(whole)


def test_a_bug_is_not_hidden(small, monkeypatch):
    def broken(flags):
        raise KeyError("oops")

    monkeypatch.setattr(commands, "train", broken)
    with pytest.raises(KeyError):
        main(small)


def test_a_checkpoint_that_cannot_be_written_is_told_in_a_line(small, tmp_path):
    limited = 'ulimit -f 8; exec "$@"'
    argv = [
        "sh",
        "-c",
        limited,
        "sh",
        sys.executable,
        "-m",
        "sparsejax",
        *small,
        "--hidden",
        "64",
    ]
    # Else Python would leave its compiled modules cut off at that size.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "epoch" not in line]
    assert re.search("error: checkpoint .* cannot be written to .*run", lines[-1])
    assert len(lines) < 5


def test_failed_training_leaves_nothing_behind(small, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "deep" / "er" / "run"
    argv = [*small, "--run", str(folder), "--learning-rate", "1e30"]
    argv += ["--optimizer", "sgd", "--loss", "l2_loss", "--epochs", "3"]
    before = sorted(os.listdir(tmp_path))
    assert main([*argv, "--activation", "linear"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^sparsejax: error: the loss is (inf|nan) in epoch", error)
    assert sorted(os.listdir(tmp_path)) == before


# Splitting


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
        ("--by random --fraction 2", "fraction must lie in"),
        ("--by random --fraction .999", "nothing is held out"),
        ("--by last --n 0", "n must be 1 or more"),
        ("--by time --at soon", "times are numbers, from 0 to 45.*got 'soon'"),
        ("--by time --at 99", "nothing is held out: .*from 0 to 45, the cut is 99"),
        ("--by time --at -1", "everything is held out"),
    ],
)
def test_split_refuses(events, tmp_path, capsys, argv, message):
    out = ["--out", str(tmp_path / "parts")]
    assert main(["split", events, *out, *argv.split()]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sparsejax: error: ") and re.search(message, error)
    assert os.listdir(tmp_path) == ["events.csv"]


def test_split_of_dates(tmp_path, capsys):
    path = tmp_path / "events.csv"
    path.write_text("user,item,date\na,x,2024-01-31\na,y,2024-02-01\nb,x,2024-03-01\n")
    argv = ["split", str(path), "--out", str(tmp_path / "parts"), "--by", "time"]
    assert main([*argv, "--at", "soon"]) == 1
    assert "expected a time as '2024-01-31'" in capsys.readouterr().err
    assert main([*argv, "--at", "20240201"]) == 0
    _, heldout = parts_of(tmp_path / "parts")
    assert pairs_of(heldout) == {("a", "y"), ("b", "x")}
    assert main([*argv, "--at", "2024-02-01"]) == 1
    assert "parts: exists; name another folder" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("validation", "by"), [("last", ["last"]), (".25", ["random", "--fraction", ".75"])]
)
def test_validation_from_the_data_is_that_of_two_files(
    events, tmp_path, capsys, validation, by
):
    """The same model, bit for bit, as from the files that `split` writes."""
    fit = [*NETWORK, *FIT, "--epochs", "2", "--k", "3"]
    one, two = tmp_path / "one", tmp_path / "two"
    train = ["train", events, "--run", str(one), "--validation", validation, *fit]
    assert main([*train, "--epochs", "1"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^validation: held out \d+ of 32 entries", err, re.MULTILINE)
    assert "ndcg@3" in err
    settings = run.load_run(one)[0]
    assert settings.validation_split == validation
    assert settings.described()["validation_split"] == validation
    assert main([*train, "--resume"]) == 0
    out = str(tmp_path / "parts")
    assert main(["split", events, "--out", out, "--by", *by]) == 0
    files = [f"{out}/train.parquet", "--validation", f"{out}/heldout.parquet"]
    assert main(["train", *files, "--run", str(two), *fit]) == 0
    assert parameters(one) == parameters(two)
    assert run.load_run(two)[0].validation == settings.validation
    # The files are the same data.
    assert main(["train", *files, "--run", str(one), *fit, "--resume"]) == 0
    other = ".5" if validation == "last" else ".1"
    assert main([*train, "--resume", "--validation", other]) == 1
    assert "other validation data" in capsys.readouterr().err


def test_validation_of_a_wrong_share(small, tmp_path, monkeypatch, capsys):
    for text in ("0", "1.5", "-.1", "2"):
        assert main([*small, f"--validation={text}"]) == 1
        assert "a share must lie in (0, 1); a file of this" in capsys.readouterr().err
    assert main([*small, "--validation", ".001"]) == 1
    assert "nothing is held out: 0.001 of each row" in capsys.readouterr().err
    # Files of such names.
    monkeypatch.chdir(tmp_path)
    for name in ("last", ".1"):
        write_lines(tmp_path / name, checkerboard()[1])
    assert main([*small, "--validation", "./last"]) == 0
    assert main([*small, "--resume", "--validation", "./.1"]) == 0
    assert "other validation data" not in capsys.readouterr().err
    chunked = [*small, "--resume", "--chunk-rows", "9", "--validation"]
    for text in (".1", "last"):
        assert main([*chunked, text]) == 1
        assert "leave out --chunk-rows" in capsys.readouterr().err


# Converting


@pytest.fixture
def valued() -> SparseDataset:
    """A data set with values, in the order in which a reader numbers its features."""
    dense = np.array([[0, 1.5, 0], [1, 0, -0.1], [0.3, 1e-30, 16777217]])
    return SparseDataset.from_scipy(
        scipy.sparse.csr_array(dense),
        row_names=["ä b", "c:,", '"'],
        feature_names=list("xyz"),
    )


@pytest.mark.parametrize(
    ("name", "to", "indicator"),
    [
        ("out.txt", "text", False),
        ("out.txt.gz", "text", True),
        ("out.tsv.xz", "pairs", False),
        ("out.tsv", "pairs", True),
        ("out.csv", None, False),
        ("out.csv.gz", None, True),
        ("out.parquet", None, False),
        ("out", "parquet", True),
        ("out.txt", "adjacency", True),
    ],
)
def test_convert_keeps_everything(valued, tmp_path, monkeypatch, name, to, indicator):
    monkeypatch.chdir(tmp_path)
    if to == "adjacency":
        valued = dataclasses.replace(valued, row_names=_names("a", "b", "c"))
    valued.save("in.parquet")
    argv = ["convert", "in.parquet", name] + (["--to", to] if to else [])
    assert main(argv + ["--no-value"] * indicator) == 0
    found = read(name, format=to, features=valued)
    expected = valued.without_values() if indicator else valued
    assert found.row_names.tolist() == expected.row_names.tolist()
    np.testing.assert_array_equal(found.matrix.indptr, expected.matrix.indptr)
    np.testing.assert_array_equal(found.matrix.indices, expected.matrix.indices)
    np.testing.assert_array_equal(found.matrix.data, expected.matrix.data)
    magic = {".gz": b"\x1f\x8b", ".xz": b"\xfd7z"}.get(pathlib.Path(name).suffix, b"")
    assert pathlib.Path(name).read_bytes().startswith(magic)
    assert sorted(os.listdir()) == sorted(["in.parquet", name])


def test_convert_reads_any_format_and_a_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in").write_text("a x y\nb\nc z\n")
    pathlib.Path("wanted").write_text("q\tz:x:new\n")
    argv = ["convert", "in", "out.csv", "--from", "adjacency", "--features", "wanted"]
    assert main(argv) == 0
    assert pathlib.Path("out.csv").read_text() == "user,item\na,x\nc,z\n"
    warnings = capsys.readouterr().err
    assert "1 of 3 entries are left out" in warnings
    assert "1 of 3 rows have no entries and are left out" in warnings


def test_convert_takes_columns_and_folders_of_parquet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in").mkdir()
    table = pa.table({"n": [1, 2], "sku": ["x", "y"], "buyer": ["a", "b"]})
    pq.write_table(table, "in/1.parquet")
    pq.write_table(table, "in/2.parquet")
    columns = ["--user", "buyer", "--item", "1", "--value", "n"]
    assert main(["convert", "in", "out.csv", *columns]) == 0
    expected = "user,item,value\na,x,2\nb,y,4\n"
    assert pathlib.Path("out.csv").read_text() == expected
    columns = ["--user", "1", "--item", "user"]
    assert main(["convert", "out.csv", "turned.csv", *columns]) == 0
    expected = "user,item,value\nx,a,2\ny,b,4\n"
    assert pathlib.Path("turned.csv").read_text() == expected
    address = pathlib.Path("in").absolute().as_uri()
    columns = ["--user", "buyer", "--item", "sku", "--no-value", "--to", "text"]
    assert main(["convert", address, "out.txt", *columns]) == 0
    assert pathlib.Path("out.txt").read_text() == "a\tx\nb\ty\n"
    assert main(["convert", "out.txt", "out.csv", "--from", "text", "--user", "0"]) == 1
    assert "the format text has no columns to name" in capsys.readouterr().err


def test_names_with_quotes_and_separators(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.csv").write_text('user,item\n"a,""b""\tc","1, 2: 3"\n')
    assert main(["convert", "in.csv", "out.csv"]) == 0
    assert pathlib.Path("out.csv").read_text() == pathlib.Path("in.csv").read_text()
    data = read("out.csv")
    assert data.row_names.tolist() == ['a,"b"\tc']
    assert data.feature_names.tolist() == ["1, 2: 3"]


# Errors: one line, status 1, nothing left behind


@pytest.fixture
def errors_folder(board, tmp_path, monkeypatch) -> pathlib.Path:
    """A folder with whatever the wrong commands below name."""
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
    zeros = _names(*(f"{name}\0x" for name in board.train.row_names))
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
        (TRAIN + "--learning-rate -1", "--learning-rate must be finite"),
        (TRAIN + "--weight-decay 0.1", "--weight-decay of adam would be an L2"),
        (TRAIN + "--warmup-epochs -1", "--warmup-epochs is -1.0; it must be 0"),
        (TRAIN + "--warmup-epochs 30 --cosine-decay", "below the 20 epochs"),
        (TRAIN + "--hidden", "hidden"),
        (TRAIN + "--hidden 10000000000000", "Out of memory"),
        (TRAIN + "--hidden 0", "'hidden1': size 0"),
        (TRAIN + "--corruption 1", "corruption"),
        (TRAIN + "--dropout -0.5", "dropout"),
        (TRAIN + "--temperature 0", "temperature"),
        (TRAIN + "--hidden 3 4 --tied", "must have 3 units"),
        (TRAIN + "--batch-size 0", "--batch-size 0 and --epochs 20 must be"),
        (TRAIN + "--epochs 0", "--epochs 0 must be positive"),
        (TRAIN + "--seed -1", "--seed -1 must be from 0"),
        (TRAIN + "--checkpoint-seconds -1", "--checkpoint-seconds -1.0 must not"),
        (TRAIN + "--validation data --k 0", "k must be"),
        ("train data --run 'a folder'", "a folder: exists"),
        ("train data --run 'a folder' --resume", "a folder: is not a run folder"),
        ("train data --run data --resume", "data: is not a folder"),
        ("evaluate missing data data", "missing: is not a run folder"),
        ("evaluate damaged data data", "run.json: these are not the settings"),
        ("evaluate newer data data", "run.json: settings of version 2"),
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
        ("predict run user.parquet --out out --exclude board", "'user 1'"),
        ("report missing", "missing: is not a run folder"),
        ("report run --test board", "--test needs --train"),
        ("report run --train unknown --format text", "unknown: all 2 entries"),
        ("report run --out no/page.html", "there is no folder"),
        ("vectors missing --out items.npy", "missing: is not a run folder"),
        ("vectors run --out items.csv", "items.csv: vectors are written to .npy"),
        ("vectors run --out no/items.npy", "there is no folder"),
        ("vectors run --out items.npy --data missing", "missing: no such file"),
        ("similar missing tea", "missing: is not a run folder"),
        ("similar run tea", "no item is called 'tea'; names are 'item"),
        ("similar run item0 --k 0", "k must be"),
        ("similar run", "name an ITEM behind the folder, as: sparsejax similar run/ "),
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
    # Beside what was read.
    lines = [
        line
        for line in captured.err.splitlines()
        if " features, " not in line and " items, " not in line
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


def test_flags_that_are_called_otherwise_elsewhere(capsys):
    assert main(["train", "data", "--run", "new", "--lr=0.1"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "sparsejax: --lr is called --learning-rate here"


def test_train_writes_for_tensorboard(small, tmp_path, monkeypatch, capsys):
    logs = tmp_path / "logs"
    assert main([*small, "--tensorboard", str(logs)]) == 0
    (file,) = logs.iterdir()
    assert b"examples_per_second" in file.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    argv = [*small, "--run", str(tmp_path / "other"), "--tensorboard", str(logs)]
    assert main(argv) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--tensorboard needs another package: pip install 'sparsejax[" in error


@pytest.mark.parametrize(
    "command",
    ["", "train", "evaluate", "predict", "export", "convert", "report", "vectors"]
    + ["similar", "plan", "demo"],
)
def test_help(capsys, command):
    assert main([*command.split(), "--help"]) == 0
    assert f"usage: sparsejax {command}".strip() in capsys.readouterr().out


PLAN = ["plan", "--items", "8000000", "--rows", "1000000", "--entries", "30000000"]


def test_plan_says_whether_it_fits(capsys):
    rmsprop = [*PLAN, "--optimizer", "rmsprop", "--memory", "45GB"]
    assert main(rmsprop) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "on one device, data=1, model=1" and last == "fits in 45.0 GB"
    assert main([*rmsprop, "--hidden", "1024"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("does not fit in 45.0 GB; needs model=4 at least\n") and not err
    mesh = ["--hidden", "1024", "--mesh", "model=4"]
    assert main([*rmsprop, *mesh, "--fused", "--output-dtype", "bfloat16"]) == 0
    assert "on each of 4 devices, data=1, model=4" in capsys.readouterr().out


def test_plan_of_a_network_from_a_file(tmp_path, capsys):
    path = str(tmp_path / "net.json")
    config = NetworkConfig.autoencoder((8, 4))
    pathlib.Path(path).write_text(config.to_json())
    targets = ["--features", "9000000", "--target-entries", "5000000", "--values"]
    argv = [*PLAN, *targets, "--config", path, "--memory", "9GB"]
    assert main(argv) == 0
    planned = planning.plan(
        config,
        optimizers.adam(1e-3),
        inputs=9_000_000,
        outputs=8_000_000,
        rows=1_000_000,
        entries=30_000_000,
        target_entries=5_000_000,
        values=True,
        memory=9 * 10**9,
    )
    assert capsys.readouterr().out == planned.table() + "\n"
    assert main([*argv, "--tied"]) == 1
    assert "leave out --tied, or --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "does not say its memory: pass --memory 141GB"),
        (["--memory", "141"], 'expected a size as "141GB"'),
        (["--memory", "1GB", "--mesh", "4"], "--mesh is written data=2,model=4"),
        (["--memory", "1GB", "--mesh", "model=3"], "model must be a divisor of 256"),
        (["--memory", "1GB", "--optimizer", "magic"], "unknown optimizer 'magic'"),
    ],
)
def test_plan_says_what_is_wrong(capsys, options, message):
    assert main([*PLAN, *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_plan_compiles_for_a_mesh_that_is_not_here():
    """For 64 devices, in a process of its own, which must be told before JAX begins."""
    argv = ["plan", "--items", "70000", "--rows", "5000", "--entries", "200000"]
    argv += ["--hidden", "32", "--optimizer", "sgd", "--batch-size", "64", "--fused"]
    argv += ["--mesh", "data=2,model=32", "--memory", "1GB", "--compile"]
    done = subprocess.run(
        [sys.executable, "-m", "sparsejax", *argv],
        capture_output=True,
        text=True,
        check=True,
    )
    _, kept, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"kept +(.*B) +\1", kept)


def test_formats_are_those_of_the_readers():
    assert typing.get_args(cli.Format) == typing.get_args(sniff.Format)


@pytest.mark.parametrize("form", ["text", "pairs", "adjacency"])
@pytest.mark.parametrize("name", ["a\0", "\ufeffa"])
def test_names_that_cannot_be_read_back_are_refused(tmp_path, form, name):
    table = pa.table({"user": [name, "b"], "item": ["x", "y"]})
    pq.write_table(table, tmp_path / "data.parquet")
    out = tmp_path / "out"
    command = ["convert", str(tmp_path / "data.parquet"), str(out), "--to", form]
    status = cli.main(command)
    if status == 0:  # under the header of pairs it is no byte order mark
        assert form == "pairs" and "\0" not in name
        assert read(out, format=form).row_names.tolist() == [name, "b"]
    else:
        assert not out.exists()


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
    assert re.search("--users: 1 of 2 .*'nobody'.*no file of this name", error)
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


# The demo, and real processes


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "OPTIMIZER", "sgd")  # compiles fastest
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert "epoch 1/1" in captured.err
    assert re.search(r"ndcg@10 +0\.\d+ +0\.\d+\n", captured.out)
    assert captured.out.count("  recommended") == demo.PRINTED_VISITORS
    assert os.listdir() == ["sparsejax-demo.html"]
    page = pathlib.Path("sparsejax-demo.html").read_text()
    assert page.count("<section>") == demo.SHOWN_VISITORS and "Free Downloads" in page


def sparsejax(*argv: str) -> subprocess.Popen:
    # A process started in the background of a shell ignores SIGINT, as its children do.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        "; runpy.run_module('sparsejax', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, *argv]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


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


def test_a_run_folder_is_one_trainings(small, tmp_path, capsys):
    assert main(small) == 0
    folder = tmp_path / "run"
    before = (folder / "run.json").read_bytes()
    for held in (folder, folder / "checkpoints"):  # by `train`, by `fit`
        with locks.locked(held):
            assert main([*small, "--resume", "--epochs", "2"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{held}: is in use by process {os.getpid()} on " in error
        assert (folder / "run.json").read_bytes() == before
    assert main([*small, "--resume", "--epochs", "2"]) == 0


@pytest.mark.slow
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
    names = run.load_model(tmp_path / "run")[1]
    assert ("other" in names) == (statuses[1] == 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("network", "layers", 1, "activation"), "relu"),
        (("network", "layers", 2, "temperature"), 0.2),
        (("network", "layers", 2), {"kind": "output", "name": "output"}),
        (("network", "loss", "name"), "l2_loss"),
        (("optimizer", "learning_rate"), 1),
        (("seed",), 1),
        (("num_features",), 21),
        (("data_fingerprint",), "0"),
    ],
)
def test_edited_settings_are_refused(board, tmp_path, path, value):
    folder = tmp_path / "run"
    shutil.copytree(board.run, folder)
    settings = json.loads((folder / "run.json").read_text())
    place = settings
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (folder / "run.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="of another run, or the settings of this"):
        run.load_model(folder)


def _places(document, path=()):
    yield path
    children = {}
    if isinstance(document, dict):
        children = document
    if isinstance(document, list):
        children = dict(enumerate(document))
    for name, child in children.items():
        yield from _places(child, (*path, name))


def test_a_run_folder_with_any_field_of_another_value(board, tmp_path):
    """Each is refused with a line, or tells nothing of the model."""
    folder = tmp_path / "run"
    shutil.copytree(board.run, folder)
    text = (folder / "run.json").read_text()
    values = [None, True, -1, 1e308, math.nan, 10**400, "", "x", [], [[]], {}, {"a": 1}]
    for i, path in enumerate(_places(json.loads(text))):
        # Those of all for each field are many.
        for value in [values[i % 12], values[(i + 5) % 12], "missing"]:
            document = json.loads(text)
            place = document
            for name in path[:-1]:
                place = place[name]
            if value != "missing":
                if not path:
                    document = value
                else:
                    place[path[-1]] = value
            elif path:
                del place[path[-1]]
            (folder / "run.json").write_text(json.dumps(document))
            settings = None
            try:
                settings, _ = run.load_run(folder)
                run.checkpoints_of(folder, settings).check()
            except ValueError as error:
                # The tests' own check of types comes before the code's.
                assert "\n" not in str(error) or "Type-check error" in str(error)
                continue
            # What a checkpoint is not known by, or the same in other words.
            unknown = {("num_epochs",), ("data",), ("validation_split",), ()}
            assert path in unknown or settings == run.load_run(board.run)[0], path


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_as_unbroken(board, tmp_path):
    argv = ["train", board.files[0], *NETWORK, "--epochs", "6", "--batch-size", "2"]
    argv += ["--checkpoint-seconds", "0", "--corruption", "0.2", "--dropout", "0.1"]
    whole = sparsejax(*argv, "--run", str(tmp_path / "whole"))
    argv += ["--run", str(tmp_path / "broken"), "--resume"]
    checkpoints = Checkpoints(tmp_path / "broken" / "checkpoints")
    reached = 0
    ends = [(signal.SIGINT, 130), (signal.SIGTERM, 130)]
    for how, status in [*ends, (signal.SIGKILL, -signal.SIGKILL)]:
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
    for process in (whole, sparsejax(*argv)):
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert checkpoints.steps()[-1] == 6 * 30
    assert parameters(tmp_path / "broken") == parameters(tmp_path / "whole")
