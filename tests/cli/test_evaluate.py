"""`sparsejax evaluate`."""

import json
import pathlib

import pytest
from run_folders import ITEMS, USERS, write_lines

from sparsejax import baselines
from sparsejax.cli.main import main
from sparsejax.data import SparseDataset, read
from sparsejax.runs import folders
from sparsejax.verbs.evaluate import evaluate


def measured_by(argv: list[str], capsys) -> tuple[dict[str, float], str]:
    """Parses the output of `evaluate`: returns the metrics in the last line, and the line before
    it.
    """
    assert main(["evaluate", *argv, "--k", "2"]) == 0
    *_, said, last = capsys.readouterr().out.splitlines()
    return json.loads(last), said


def test_evaluate_finds_what_was_held_out(board, capsys):
    assert main(["evaluate", board.run, *board.files, "--k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = json.loads(lines[-1])
    assert measured["users"] == USERS
    # All items of the user's colour that it does not have yet are held out.
    assert measured["recall@2"] > 0.95
    assert measured["popularity_recall@2"] < 0.6
    assert {"ndcg@2", "precision@2", "truncated_recall@2"} < measured.keys()
    row = next(line for line in lines if line.startswith("recall@2 ")).split()
    expected = [measured["recall@2"], measured["popularity_recall@2"]]
    assert [float(cell) for cell in row[1:]] == pytest.approx(expected, abs=1e-4)

    # Several cut-offs at a time.
    assert main(["evaluate", board.run, *board.files, "--k", "2,5"]) == 0
    several = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "ndcg@5" in several
    assert {name: several[name] for name in measured} == measured
    assert main(["evaluate", board.run, *board.files, "--k", "2;5"]) == 1
    assert "such as 5,10; got '2;5'" in capsys.readouterr().err


def test_items_by_their_entries(board, capsys):
    both = [
        measured_by([board.run, *board.files, *f], capsys)[0]
        for f in ([], ["--by-entries"])
    ]
    plain, apart = both
    assert {k: v for k, v in apart.items() if not k.endswith("]")} == plain
    data, heldout = read(board.files[0]), read(board.files[1])
    model, names = folders.load_model(board.run)
    data, heldout = (part.align_features(names) for part in (data, heldout))
    assert apart == evaluate(model, data, heldout, k=2, by="entries")
    assert sum(
        v for k, v in apart.items() if k.startswith("share@2[")
    ) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:.*held-out entries")
def test_sold_out_items_are_ranked_for_nobody(board, tmp_path, capsys):
    (tmp_path / "sold.txt").write_text("item3\nitem8\n")
    flags = ["--exclude-items", str(tmp_path / "sold.txt")]
    argv = [board.run, *board.files, *flags]
    measured, _ = measured_by([*argv, "--baselines"], capsys)
    model, names = folders.load_model(board.run)
    data, heldout = (read(path, features=names) for path in board.files)
    how: dict = {"k": 2, "exclude_items": ["item8", "item3"]}
    assert evaluate(model, data, heldout, **how).items() <= measured.items()
    assert measured["recall@2"] < evaluate(model, data, heldout, k=2)["recall@2"]
    nearest = evaluate(baselines.item_knn(data), data, heldout, **how)
    assert measured["item_knn_ndcg@2"] == pytest.approx(nearest["ndcg@2"])
    assert main(["compare", board.run, *argv, "--k", "2"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["recall@2"]
    assert compared["first"] == compared["second"] == measured["recall@2"]
    assert main(["evaluate", *argv, "--only-items", "nothing"]) == 1
    assert "no item is left to recommend" in capsys.readouterr().err


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
    model, names = folders.load_model(board.run)
    data = read(path, features=names)
    assert measured == pytest.approx(
        evaluate(model, data, fold_in=0.7, seed=3, k=3, popularity=train)
    )
    assert measured["recall@3"] > 0.95
    assert measured["popularity_recall@3"] < 0.7
    for extra in ([], [board.files[1], "--fold-in", "0.7"]):
        assert main(["evaluate", board.run, path, *extra]) == 1
        assert (
            "give TEST, or --fold-in to hold out a part of TRAIN"
            in capsys.readouterr().err
        )


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
    # For new users: new items are held out as often as others.
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
    # Both files are equal, so all held-out entries are excluded.
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
    model, names = folders.load_model(board.run)
    train, *others, later = (
        read(path, features=names)
        for path in (board.files[0], files["more"], more, files["later"])
    )
    shown = train.merge(*others)
    assert measured == pytest.approx(
        evaluate(model, shown, later, k=2, popularity=train)
    )
    assert measured["users"] == 61 and measured["hit_rate@2"] > 0.95
    # Items that another file shows are excluded, too.
    alone, _ = measured_by(argv[:3], capsys)
    assert alone["mrr@2"] < measured["mrr@2"]
    argv = ["evaluate", board.run, board.files[0], "--fold-in", "0.5", *argv[3:]]
    assert main(argv) == 1
    assert "--history needs TEST" in capsys.readouterr().err


def test_rows_that_are_only_held_out_are_reported(board, tmp_path, capsys):
    test = tmp_path / "test.txt"
    test.write_text("nobody\titem1\nuser 0\titem2\n")
    assert main(["evaluate", board.run, board.files[0], str(test)]) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "'nobody'" in captured.err
    found = json.loads(captured.out.splitlines()[-1])
    assert (found["users"], found["users_new"]) == (2, 1)


def test_evaluate_beside_baselines(board, capsys):
    argv = [board.run, *board.files, "--baselines"]
    measured, _ = measured_by(argv, capsys)
    train, heldout = (read(path, features=board.train) for path in board.files)
    for name, model in (
        ("ease", baselines.ease(train)),
        ("item_knn", baselines.item_knn(train)),
    ):
        found = evaluate(model, train, heldout, k=2)
        for metric in ("ndcg@2", "coverage@2", "gini@2", "mean_popularity@2"):
            assert measured[f"{name}_{metric}"] == pytest.approx(found[metric])
    # Both baselines detect the colours.
    assert measured["ease_recall@2"] > 0.95 > measured["popularity_recall@2"]
    assert main(["evaluate", *argv, "--k", "2"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "popularity", "item_knn", "ease"]
    row = next(row for row in rows if row.startswith("coverage@2 ")).split()
    assert float(row[4]) == pytest.approx(measured["ease_coverage@2"], abs=1e-4)
    # Rows to be measured would be a part of the training data.
    argv = ["evaluate", board.run, board.files[0], "--fold-in", "0.5", "--baselines"]
    assert main(argv) == 1
    assert "--baselines with --fold-in needs --popularity" in capsys.readouterr().err


def test_evaluate_leaves_out_baselines_beyond_memory(board, capsys, monkeypatch):
    monkeypatch.setattr("sparsejax.ops.item_weights.available_memory", lambda: 1000)
    argv = ["evaluate", board.run, *board.files, "--baselines", "--k", "2"]
    assert main(argv) == 0
    printed, said = capsys.readouterr()
    assert "left out: EASE of 20 items needs 6,400 bytes, but 1,000 bytes are" in said
    assert printed.splitlines()[0].split() == ["model", "popularity", "item_knn"]
