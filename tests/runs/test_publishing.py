"""Publishing: the next version for a service is written only if it is better."""

import csv
import functools

import numpy as np
import pytest
from flax import nnx
from run_folders import NETWORK

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.source import Source
from sparsejax.metrics.comparison import Measured, Rows
from sparsejax.runs import publishing
from sparsejax.runs.publishing import FILE, Gate, following, numbers

USERS, KNOWN, ITEMS = 48, 18, 20


def write(path, items):
    """Writes a file in which users like the items of their parity; the last items are new.

    What is held out of them is in a file beside it.
    """
    with (
        open(path, "w", newline="") as file,
        open(f"{path}.heldout.csv", "w", newline="") as other,
    ):
        kept, heldout = csv.writer(file), csv.writer(other)
        for lines in (kept, heldout):
            lines.writerow(["user", "item"])
        for u in range(USERS):
            for i in range(u % 2, items, 2):
                is_held = (i // 2 + u // 2) % 5 == 0
                (heldout if is_held else kept).writerow([f"u{u}", f"i{i}"])
    return str(path)


def versions(folder) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir())


def test_each_night_the_better_version_is_written(tmp_path, capsys, monkeypatch):
    """As cron does it. The service finds the new items from the swap on."""
    few = functools.partial(publishing.export_with_answer, batch_size=8)  # programs
    monkeypatch.setattr(publishing, "export_with_answer", few)
    published, publish = [], publishing.publish

    def kept(*given, **options):
        published.append(functools.partial(publish, *given, **options))
        return publish(*given, **options)

    monkeypatch.setattr(publishing, "publish", kept)
    films = tmp_path / "models" / "films"
    days = [write(tmp_path / f"{n}.csv", size) for n, size in enumerate((KNOWN, ITEMS))]
    options = ["--learning-rate", "0.01", "--batch-size", "16", "--k", "3"]
    options += ["--export-to", str(films), "--gate", "ndcg@3"]
    options += ["--decay", "none"]

    def night(day, run, *more):
        heldout = ["--validation", f"{days[day]}.heldout.csv"]
        argv = ["train", days[day], "--run", str(tmp_path / run)]
        argv += [*heldout, *options, *more]
        assert main(argv) == 0
        return capsys.readouterr().err

    said = night(0, "first", *NETWORK, "--corruption", "0", "--epochs", "1")
    assert f"{films}: version 1 is new" in said
    continued = ["--from", str(tmp_path / "first")]
    said = night(1, "second", *continued, "--epochs", "12")
    assert f"{films}: version 2 is new: ndcg@3 " in said and ", of version 1 " in said
    assert "; change +" in said and ", 95 % interval [+" in said
    assert "i19" not in sj.load_predictor(films / "1" / FILE).items
    assert "i19" in sj.load_predictor(films / "2" / FILE).items
    assert sj.load_predictor(films / "2" / FILE).answer is not None
    # A version that is damaged does not serve, so the gate compares with the one before.
    (films / "3").mkdir()
    (films / "3" / FILE).write_bytes((films / "2" / FILE).read_bytes()[:-99])
    # As good is not better.
    stays = published[-1]()
    assert f"{films}: version 2 stays: ndcg@3 " in stays
    assert stays.endswith("interval [+0.0000, +0.0000], which may be chance")
    # Nor is what is better by chance: one of two rows is, by more than the other is worse.
    uncertain = [
        Measured({"ndcg@3": mean}, Rows(None, {"ndcg@3": np.array(values)}))
        for mean, values in ((0.4, [0.3, 0.5]), (0.55, [0.8, 0.3]))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "measured", lambda *_: uncertain.pop(0))
        stays = published[-1]()
    assert f"{films}: version 2 stays" in stays and "change +0.1500" in stays
    assert stays.endswith(", which may be chance")
    assert versions(films) == [1, 2, 3]
    faults = {
        "ndcg@9 ranks more": (days[1], "ndcg@9", "autoencoder"),
        "version 2 is of items, but the run of histories": (days[1], "ndcg@3", "gru"),
    }
    for message, (data, gate, model) in faults.items():
        argv = ["train", data, "--run", str(tmp_path / "none"), "--export-to"]
        argv += [str(films), "--gate", gate, "--validation", "last", "--model", model]
        assert main(argv) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.fixture(scope="module")
def history() -> sj.SequenceDataset:
    indptr, items = np.array([0, 3, 6]), np.array([0, 1, 2, 3, 1, 0], np.int32)
    rows, names = (
        np.array(list(text), np.dtypes.StringDType()) for text in ("ab", "wxyz")
    )
    return sj.SequenceDataset(indptr, items, rows, names)


def test_a_metric_by_hand(tmp_path, history):
    """Ids of a version are not those of the run: what counts are names."""
    shown, heldout = history.split_last(1)
    source = Source(
        data=shown,
        everything=history,
        chunks=[2],
        fingerprint="",
        known=history.feature_names,
        heldout=heldout,
    )
    config = sj.SASRecConfig(max_length=3, width=4, blocks=1, heads=1)
    model = sj.sequence.build_sequence_model(config, items=4, rngs=nnx.Rngs(0))
    path = tmp_path / "p"
    # It knows neither w, which is held out of b, nor calls z what the run does.
    sj.export_predictor(model, path, k=3, names=["z", "new", "x", "y"], batch_size=1)
    predictor = sj.load_predictor(path)
    asked = [["x"], ["z", "x"]]  # what it knows of w x and z x
    found = predictor.recommend_names(asked)
    wanted = ["y", "w"]
    ranks = [
        names.index(name) + 1 if name in names else np.inf
        for names, name in zip(found, wanted, strict=True)
    ]
    assert ranks[0] < np.inf and ranks[1] == np.inf
    for metric, oracle in (
        ("mrr", np.mean([1 / rank for rank in ranks])),
        ("ndcg", np.mean([1 / np.log2(1 + rank) for rank in ranks])),
        ("recall", 0.5),
    ):
        found = publishing.measured(predictor, source, Gate(metric, 3))
        np.testing.assert_allclose(found[f"{metric}@3"], oracle, rtol=1e-6)
    with pytest.raises(ValueError, match="recommends 3 items with names, but ndcg@4"):
        publishing.measured(predictor, source, Gate("ndcg", 4))


def test_the_newest_version_and_the_next(tmp_path):
    assert numbers(tmp_path / "none") == []
    assert following(tmp_path) == 1
    for name in ("2", "10", "11", "new", ".new-x", "012"):
        (tmp_path / name).mkdir()
    for name in ("2", "10", "new", "012"):  # 11 has no file yet
        (tmp_path / name / FILE).write_text("")
    assert numbers(tmp_path) == [10, 2]
    assert following(tmp_path) == 13


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gate", "ndcg@20"], "--gate needs --export-to"),
        (["--gate", "ndcg", "--export-to", "out"], "like ndcg@20, got 'ndcg'"),
        (
            ["--gate", "auc@2", "--export-to", "out"],
            "metrics are recall, truncated_recall",
        ),
        (["--gate", "map@2", "--export-to", "out"], "map@2 is measured on held-out"),
        (
            ["--gate", "map@2", "--export-to", "out", "--validation", ".1"],
            "map@2 on a share of the events is unfair",
        ),
        (["--export-to", "data.csv"], "expected a folder of versions"),
    ],
)
def test_faults_are_found_before_the_training(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "data.csv", 4)
    assert main(["train", data, "--run", "run", *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
