"""Models of histories on the command line, from a file to recommendations."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from run_folders import kill_in_training

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.runs import folders

ITEMS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file whose lines have a user and items in order; each item is the successor of the last.

    The last item of each user is split off, and the one before it is for validation.
    """
    folder = tmp_path_factory.mktemp("histories")
    rng = np.random.default_rng(0)
    lines = []
    for user in range(80):
        steps = np.where(rng.random(4 + user % 5) < 0.9, 1, 2)
        items = (user + np.cumsum(steps)) % ITEMS
        lines.append(" ".join([f"u{user}", *(f"i{item}" for item in items)]))
    (folder / "histories.txt").write_text("\n".join(lines) + "\n")
    config = {"version": 1, "model": "gru", "width": 16, "blocks": 1, "max_length": 6}
    (folder / "gru.json").write_text(json.dumps(config))
    splits, files = folder / "splits", str(folder / "histories.txt")
    argv = ["split", files, "--by", "last", "--histories", "--out", str(splits)]
    assert main(argv) == 0
    assert main(train(folder)) == 0
    return folder


def train(folder, *more, out="run", epochs=12):
    data = str(folder / "splits" / "train.parquet")
    argv = ["train", data, "--run", str(folder / out), "--validation", "last"]
    argv += ["--config", str(folder / "gru.json"), "--learning-rate", ".1"]
    argv += ["--optimizer", "adagrad", "--decay", "none"]
    return [*argv, "--k", "3", "--batch-size", "16", "--epochs", str(epochs), *more]


def test_one_model_from_a_file_to_recommendations(folder, capsys):
    splits, home = folder / "splits", str(folder / "run")
    files = [str(splits / name) for name in ("train.parquet", "heldout.parquet")]
    assert main(["evaluate", home, *files, "--k", "3", "--keep-seen"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["recall@3"] > 0.8 > 2 * measured["popularity_recall@3"]
    assert measured["users"] == 80

    # The vector of each history.
    vectors = [home, "--data", files[0], "--out", str(folder / "users.npz")]
    assert main(["vectors", *vectors]) == 0
    assert np.load(folder / "users.npz")["vectors"].shape == (80, 16)

    # Baselines are given the model's input, without its order.
    argv = ["evaluate", home, *files, "--k", "3", "--baselines"]
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["model", "popularity", "item_knn", "ease"]
    histories = [
        sj.read_sequences(file, features=sj.load_model(home)[1]) for file in files
    ]
    rows, wanted = (data.to_sparse() for data in histories)
    found = sj.evaluate(sj.baselines.ease(rows), rows, wanted, k=3)
    assert json.loads(table[-1])["ease_ndcg@3"] == pytest.approx(found["ndcg@3"])

    # The commands' results must equal those in Python, of the model of the best epoch.
    model, names = sj.load_model(home)
    data, heldout = (sj.read_sequences(file, features=names) for file in files)
    found = sj.evaluate(model, data, heldout, k=3, exclude=None)
    assert found["ndcg@3"] == pytest.approx(measured["ndcg@3"])

    out = folder / "next.jsonl"
    argv = [
        "predict",
        home,
        files[0],
        "--k",
        "2",
        "--users",
        "u7,u3",
        "--out",
        str(out),
    ]
    assert main([*argv, "--keep-seen"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = sj.recommend(
        model, data.align_rows(["u7", "u3"]), 2, exclude=None
    ).names(names)
    assert [line["items"] for line in lines] == expected
    assert main([*argv, "--exclude-seen", "--exclude", files[1]]) == 0
    seen = {"u7": set(), "u3": set()}
    for part in (data, heldout):
        for user in seen:
            start, end = part.align_rows([user]).indptr
            seen[user] |= set(names[part.align_rows([user]).indices[start:end]])
    for line in map(json.loads, out.read_text().splitlines()):
        assert not seen[line["user"]] & set(line["items"])

    argv = ["report", home, "--train", files[0], "--test", files[1], "--keep-seen"]
    assert main([*argv, "--k", "3"]) == 0
    page = (folder / "run" / "report.html").read_text()
    assert f"{measured['ndcg@3']:.4g}"[:5] in page and "gru" in page
    assert main(["similar", home, "i3", "--k", "2"]) == 0
    assert len(capsys.readouterr().out.split()) == 2


def test_evaluate_among_candidates(folder, capsys):
    splits, path = folder / "splits", folder / "candidates.csv"
    files = [str(splits / name) for name in ("train.parquet", "heldout.parquet")]
    lines = [f"u{u},i{(u + k) % ITEMS}" for u in range(80) for k in (0, 4, 8)]
    path.write_text("\n".join(["user,item", *lines]))
    argv = ["evaluate", str(folder / "run"), *files, "--keep-seen", "--k", "1"]
    assert main([*argv, "--candidates", str(path)]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    model, names = sj.load_model(folder / "run")
    data, heldout = (sj.read_sequences(file, features=names) for file in files)
    among = sj.read(str(path), features=names)
    given = {"k": 1, "exclude": None}
    found = sj.evaluate(model, data, heldout, candidates=among, **given)
    assert measured == pytest.approx(found)
    of_all = sj.evaluate(model, data, heldout, **given)
    assert found["recall@1"] > of_all["recall@1"]


def test_export(folder, symbolic_sizes):
    path = str(folder / "next.predictor")
    assert main(["export", str(folder / "run"), path, "--k", "2"]) == 0
    predictor = sj.load_predictor(path)
    model, names = sj.load_model(folder / "run")
    history = sj.read_sequences(folder / "histories.txt", features=names)
    user = history.align_rows(["u9"])
    expected = sj.recommend(model, user, 2, exclude=None).names(names)[0]
    found = predictor.recommend_names(
        names[user.indices].tolist(), exclude_seen=False, k=2
    )
    assert found == expected


def test_of_a_sample_first_and_of_all_items_at_the_end(folder, capsys):
    sampled = "--negatives", "4", "--checkpoint-seconds", "0"
    argv = train(folder, *sampled, out="killed", epochs=8)
    assert kill_in_training(argv, folder / "killed") < 8 * 5
    assert main([*argv, "--resume"]) == 0
    assert main(train(folder, *sampled, out="at_once", epochs=8)) == 0
    models = [sj.load_model(folder / name)[0] for name in ("killed", "at_once")]
    states = [jax.tree.leaves(nnx.state(model, nnx.Param)) for model in models]
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)
    assert models[0].config.negatives == 4
    argv = train(folder, "--from", str(folder / "killed"), out="exact", epochs=1)
    index = argv.index("--config")
    assert main(argv[:index] + argv[index + 2 :]) == 0
    assert "0 are new; the optimizer begins anew" in capsys.readouterr().err
    assert sj.load_model(folder / "exact")[0].config.negatives is None


def test_a_table_with_times_and_chunks(folder, capsys):
    events = [(u, (u * t) % 5, t) for t in range(5, -1, -1) for u in range(9)]
    lines = ["user,item,time", *(f"u{u},i{i},{t}" for u, i, t in events)]
    (folder / "events.csv").write_text("\n".join(lines))
    config = sj.HSTUConfig(width=8, blocks=1, max_length=4, dropout=0.0)
    (folder / "hstu.json").write_text(json.dumps(config.to_json()))
    argv = ["train", str(folder / "events.csv"), "--model", "hstu", "--epochs", "1"]
    argv += ["--config", str(folder / "hstu.json"), "--time", "time"]
    assert main([*argv, "--run", str(folder / "timed")]) == 0
    assert "54 entries in the order of time" in capsys.readouterr().err
    assert folders.load_run(folder / "timed")[0].network == config
    sj.read_sequences(folder / "events.csv").save(folder / "events.parquet")
    argv[1] = str(folder / "events.parquet")
    argv = [*argv[:-2], "--chunk-rows", "40", "--run", str(folder / "chunks")]
    assert main(argv) == 0
    one, other = (
        sj.load_model(folder / name)[0].output.kernel[...]
        for name in ("timed", "chunks")
    )
    np.testing.assert_allclose(one, other, atol=1e-4)  # one batch, in another order


def test_what_the_data_decide(folder):
    lines = [f"u{user} " + " ".join(f"i{n % 7}" for n in range(60)) for user in "abc"]
    (folder / "long.txt").write_text("\n".join(lines))
    argv = ["train", str(folder / "long.txt"), "--run", str(folder / "long")]
    argv += ["--format", "adjacency", "--model", "gru", "--learning-rate", ".01"]
    assert main([*argv, "--epochs", "1"]) == 0
    settings, _ = folders.load_run(folder / "long")
    assert isinstance(settings.network, sj.sequence.SequenceConfig)
    assert settings.network == sj.GRUConfig(max_length=100)
    recipe = sj.training.recipe(settings.network, 3, num_epochs=1, peak=0.01)
    assert settings.optimizer == recipe.rule and settings.batch_size == 256


def test_new_items_go_to_the_end(folder, capsys):
    lines = [f"u{user} i{user % ITEMS} late" for user in range(80)]
    (folder / "more.txt").write_text("\n".join(lines))
    argv = ["train", str(folder / "more.txt"), "--from", str(folder / "run")]
    argv += ["--run", str(folder / "more"), "--epochs", "9", "--learning-rate", ".1"]
    argv += ["--format", "adjacency", "--optimizer", "adagrad", "--decay", "none"]
    assert main([*argv, "--batch-size", "16"]) == 0
    said = capsys.readouterr().err
    assert "12 items are known, 1 are new; the optimizer goes on with its" in said
    known, (model, names) = folders.load_run(folder / "run")[1], sj.load_model(argv[5])
    assert names.tolist() == [*known.tolist(), "late"]
    more = sj.read_sequences(folder / "more.txt", format="adjacency", features=names)
    found = sj.recommend(model, more.split_last().train, 1, exclude=None).ids
    assert (found == ITEMS).all()


def test_held_out_rows_that_the_data_lacks(folder, capsys):
    late = str(folder / "late.tsv")
    (folder / "late.tsv").write_text("u3\ti1\nu3\ti2\nnew\ti3\n")
    argv = train(folder, out="late", epochs=1)
    argv[argv.index("last")] = late
    data = str(folder / "splits" / "train.parquet")
    measure = ["evaluate", str(folder / "run"), data, late, "--keep-seen"]
    assert main(argv) == main(measure) == 0
    said = capsys.readouterr()
    assert said.err.count("1 of 2 rows are not in") == 2
    found = json.loads(said.out.splitlines()[-1])
    assert (found["users"], found["users_new"]) == (2, 1)


def test_nothing_to_learn(folder, capsys):
    (folder / "short.tsv").write_text("u1\ti1\nu2\ti2\n")
    argv = ["train", str(folder / "short.tsv"), "--run", str(folder / "new")]
    assert main([*argv, "--model", "gru"]) == 1
    assert "no row has two entries, an item and the next" in capsys.readouterr().err
    assert not (folder / "new").exists()


def test_wrong_arguments(folder, capsys):
    def error(*argv):
        assert main(list(argv)) == 1
        return capsys.readouterr().err

    argv = ["train", str(folder / "histories.txt"), "--run", str(folder / "new")]
    text = error(*argv, "--model", "sasrec", "--hidden", "8")
    assert "--hidden is for --model autoencoder: leave it out" in text
    assert "--width is for --model sasrec, hstu, gru: " in error(*argv, "--width", "8")
    text = error(*argv, "--model", "gru", "--heads", "2")
    assert "--heads is of no use for gru" in text
    config = str(folder / "gru.json")
    text = error(*argv, "--model", "sasrec", "--config", config)
    assert "--model sasrec: " in text and "gru.json describes gru" in text
    assert "--no-value is of no use for" in error(*argv, "--model", "gru", "--no-value")
    files = [
        str(folder / "splits" / f"{name}.parquet") for name in ("train", "heldout")
    ]
    text = error("evaluate", str(folder / "run"), *files, "--history", files[0])
    assert "--history is of no use for a model of histories" in text
    assert not (folder / "new").exists()
