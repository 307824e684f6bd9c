"""The methods of `Run`, each of which is one command."""

import dataclasses
import gc
import json
import pathlib
import weakref
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from run_folders import checkerboard, items_of, parameters, write_lines

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.clicks import kind as of_clicks
from sparsejax.options.training import Recorded
from sparsejax.runs.folders import Folder, Settings, continued, load_run

COLUMNS: dict[str, Any] = {"user": "who", "item": "what"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder with files of all kinds: rows of items, histories with times, clicks."""
    folder = tmp_path_factory.mktemp("runs")
    train, heldout = checkerboard()
    write_lines(folder / "items.txt", train)
    write_lines(folder / "items-heldout.txt", heldout)
    rng = np.random.default_rng(0)
    lines, last = ["who,what,time"], ["who,what,time"]
    for user in range(30):
        places = (user + np.cumsum(1 + (rng.random(6) < 0.1))) % 11
        events = [f"u{user},i{item},{t}" for t, item in enumerate(places)]
        lines += events[:-1]
        last += events[-1:]
    (folder / "histories.csv").write_text("\n".join(lines) + "\n")
    (folder / "histories-heldout.csv").write_text("\n".join(last) + "\n")
    for name, rows in (("clicks.csv", 600), ("clicks-heldout.csv", 200)):
        user, item, x = (
            rng.integers(0, 9, rows),
            rng.integers(0, 5, rows),
            rng.random(rows),
        )
        click = (user + item + 4 * x > 8 + rng.random(rows)).astype(int)
        columns = zip(click, user, item, x.round(3), strict=True)
        text = "".join(f"{c},u{u},i{i},{v}\n" for c, u, i, v in columns)
        (folder / name).write_text("click,user,item,x\n" + text)
    return folder


SCHEMA = sj.ClickSchema(
    "click",
    dense={"x": sj.data.DenseColumn()},
    ids={"user": sj.data.VocabularyColumn(), "item": sj.data.VocabularyColumn()},
)
# The arguments of `Run.train` and the flags that say the same; both of `evaluate`.
KINDS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any], list[str]]] = {
    "items": (
        {"validation": ".2", "k": 3},
        ["--validation", ".2", "--k", "3"],
        {"k": 3, "baselines": True},
        ["--k", "3", "--baselines"],
    ),
    "histories": (
        {"model": "gru", "validation": "last", "k": 3, **COLUMNS, "num_epochs": 3}
        | {"patience": 2, "optimizer": "adam", "decay": "none"},
        ["--model", "gru", "--validation", "last", "--k", "3", "--epochs", "3"]
        + ["--user", "who", "--item", "what", "--patience", "2"]
        + ["--optimizer", "adam", "--decay", "none"],
        {"k": 3, "exclude_seen": False},
        ["--k", "3", "--keep-seen", "--user", "who", "--item", "what"],
    ),
    "clicks": (
        {"schema": SCHEMA, "validation": 0.2, "num_epochs": 2, "batch_size": 100},
        ["--model", "dlrm", "--label", "click", "--dense", "x", "--validation", ".2"]
        + ["--categories", "user", "item", "--epochs", "2", "--batch-size", "100"],
        {"groups": "user"},
        ["--groups", "user"],
    ),
}
ENDINGS = {"items": ".txt", "histories": ".csv", "clicks": ".csv"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_one_command(kind, folder, tmp_path, capsys):
    options, flags, measured, flags_of_measured = KINDS[kind]
    file, heldout = (
        str(folder / f"{kind}{part}{ENDINGS[kind]}") for part in ("", "-heldout")
    )
    run = sj.Run.train(file, tmp_path / "python", **options)
    assert main(["train", file, "--run", str(tmp_path / "command"), *flags]) == 0
    assert parameters(tmp_path / "python") == parameters(tmp_path / "command")
    one, two = (load_run(tmp_path / name)[0] for name in ("python", "command"))
    assert one == two
    loaded = sj.Run.load(tmp_path / "command")
    of_speed = {"examples_per_second"}
    for ours, theirs in zip(run.history, loaded.history, strict=True):
        assert all(ours[n] == theirs[n] for n in ours.keys() - of_speed)

    capsys.readouterr()
    files = [file, heldout] if kind != "clicks" else [heldout]
    argv = ["evaluate", str(tmp_path / "command"), *files, *flags_of_measured]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert run.evaluate(heldout, **measured) == said


def test_names_go_in_and_come_out(folder, tmp_path):
    data = sj.read(folder / "items.txt")
    run = sj.Run.train(data, num_epochs=3)
    found = run.recommend(["user 7", "user 2"], k=4)
    model, known = sj.load_model(run.directory)
    shown = data.align_rows(["user 7", "user 2"])
    expected = sj.recommend(model, shown, k=4, exclude=shown)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert found.names() == expected.names(known)
    first = found.to_arrow().to_pylist()[0]
    assert first["user"] == "user 7" and first["item"] == found.names()[0][0]
    for row, names in enumerate(found.names()):
        assert len(names) == 4 and not set(names) & items_of(shown, row)
    kept = run.recommend("user 7", k=20, exclude_seen=False)
    assert sorted(kept.names()[0]) == sorted(known.tolist())
    near = run.similar(["item3"], k=2)
    assert near.names() == sj.similar_items(model, ["item3"], 2, names=known).names(
        known
    )
    run.export(tmp_path / "items.predictor", k=4)
    predictor = sj.load_predictor(tmp_path / "items.predictor")
    assert predictor.recommend(shown, exclude=shown).names(known) == found.names()
    run.report(tmp_path / "report.html", folder / "items-heldout.txt")
    page = (tmp_path / "report.html").read_text()
    assert "Held-out items found" in page and "user 2" in page


def test_a_run_is_saved_and_loaded_and_trained_on(folder, tmp_path):
    data = sj.read(folder / "items.txt")
    run = sj.Run.train(data, num_epochs=2, optimizer="adagrad", decay="none")
    place = run.directory
    assert place.exists()
    run.save(tmp_path / "runs" / "monday")
    with pytest.raises(FileExistsError):
        run.save(tmp_path / "runs" / "monday")
    before = parameters(place)
    assert parameters(tmp_path / "runs" / "monday") == before

    lines = "user 1\titem1:item3\nuser 2\titem2:new\nnobody\tnew:item4\n"
    (tmp_path / "tuesday.txt").write_text(lines)
    later = sj.Run.load(tmp_path / "runs" / "monday")
    with pytest.raises(ValueError, match="inputs="):
        later.recommend(["user 1"])
    options: dict[str, Any] = {"num_epochs": 2, "optimizer": "adagrad", "decay": "none"}
    later.train_more(tmp_path / "tuesday.txt", **options)
    assert later.known.tolist() == [*data.feature_names.tolist(), "new"]
    assert later.recommend(["nobody"], k=1).names() != [[]]
    assert later.settings.origin == str(tmp_path / "runs" / "monday")
    argv = ["train", str(tmp_path / "tuesday.txt"), "--run", str(tmp_path / "c")]
    argv += ["--from", str(tmp_path / "runs" / "monday"), "--epochs", "2"]
    assert main([*argv, "--optimizer", "adagrad", "--decay", "none"]) == 0
    assert parameters(later.directory) == parameters(tmp_path / "c")
    assert parameters(tmp_path / "runs" / "monday") == before

    # A run keeps its modules. A folder does not, so that a service of it has no optimizer.
    assert run.model is run.model and run.optimizer is run.optimizer
    opened = Folder.of(place)
    modules = [weakref.ref(module) for module in opened.modules()]
    gc.collect()
    assert [module() for module in modules] == [None, None]

    # What was only kept for the run goes with it.
    del run
    gc.collect()
    assert not place.exists()


def test_tables_histories_and_clicks_in_memory(folder, tmp_path):
    table = pa.table({"who": ["ann", "bob", "ann"], "what": ["tea", "tea", "rye"]})
    run = sj.Run.train(table, num_epochs=1, **COLUMNS)
    assert run.recommend(["bob"], k=1).names() == [["rye"]]
    more = pa.table({"who": ["eve"], "what": ["rye"]})
    assert run.recommend(k=1, inputs=more).names() == [["tea"]]
    # Baskets, as a predictor takes them.
    baskets = [["rye"], ["tea"], []]
    run.export(tmp_path / "shop.predictor", k=1)
    predictor = sj.load_predictor(tmp_path / "shop.predictor")
    found = run.recommend(k=1, inputs=baskets).names()
    assert found[:2] == [["tea"], ["rye"]]
    assert found == predictor.recommend_names(baskets)

    histories = sj.read_sequences(folder / "histories.csv", **COLUMNS)
    run = sj.Run.train(histories, model="gru", num_epochs=1)
    (tmp_path / "x").mkdir()
    run.save(tmp_path / "x" / "run")
    again = sj.Run.load(tmp_path / "x" / "run", **COLUMNS)
    baskets = [["i3", "i4"], ["i4", "i3"], ["i3", "unknown", "i4"]]
    with pytest.warns(match="unknown"):
        ranked = again.recommend(k=2, inputs=baskets)
    assert ranked.names()[0] == ranked.names()[2]
    assert not np.array_equal(ranked.scores[0], ranked.scores[1])  # in their order
    found = again.recommend(["u3"], k=2, inputs=folder / "histories.csv")
    np.testing.assert_array_equal(found.ids, run.recommend(["u3"], k=2).ids)

    clicks = sj.read_clicks(folder / "clicks.csv", SCHEMA)
    run = sj.Run.train(clicks, num_epochs=1, batch_size=200)
    test = folder / "clicks-heldout.csv"
    found = run.predict(test)
    read = sj.read_clicks(test, SCHEMA, features=clicks)
    np.testing.assert_array_equal(found, sj.predict(run.model, read))
    assert run.evaluate(read) == sj.evaluate(run.model, read)
    run.report(tmp_path / "clicks.html", test)
    assert "Calibration" in (tmp_path / "clicks.html").read_text()
    with pytest.raises(ValueError, match="has no items to rank: use predict"):
        run.recommend(inputs=test)


def test_errors_speak_python(folder, tmp_path):
    file, clicks = folder / "items.txt", folder / "clicks.csv"
    wrong = [
        (
            lambda: sj.Run.train(file, schema=SCHEMA, model="autoencoder"),
            "schema is of no",
        ),
        (lambda: sj.Run.train(file, negatives=3), "negatives is of no use"),
        (lambda: sj.Run.train(file, model="dlmr"), "is not one of autoencoder"),
        (lambda: sj.Run.train(file, patience=2), "patience needs validation, without"),
        (
            lambda: sj.Run.train(file, warmup_epochs=-1),
            "warmup_epochs must be at least 0",
        ),
        (lambda: sj.Run.train(file, resume=True), "needs the directory"),
        (
            lambda: sj.Run.train(sj.read(file), user="u"),
            "user is of no use for a data set",
        ),
        (
            lambda: sj.Run.train(clicks, schema=SCHEMA, k=20),
            "k is of no use for a model",
        ),
        (
            lambda: sj.Run.train(clicks, schema=SCHEMA, validation="last"),
            "validation=last",
        ),
        (
            lambda: sj.Run.train(clicks, model="dlrm"),
            "name the columns of this file: schema=",
        ),
        (
            lambda: sj.Run.train(file, validation=1.5),
            "validation=1.5: a share must be between",
        ),
        (
            lambda: sj.Run.train(
                file, model="gru", config=sj.NetworkConfig.autoencoder()
            ),
            "config describes autoencoder",
        ),
        (lambda: sj.Run.load(tmp_path), "is not a run folder"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "--" not in str(raised.value)
    with pytest.raises(TypeError, match="config is a NetworkConfig"):
        sj.Run.train(file, config=cast(Any, sj.optimizers.adam(1e-3)))
    run = sj.Run.train(file, num_epochs=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        cast(Any, run).train_more(file, epochs=3)
    with pytest.raises(ValueError, match="fold_in=") as raised:
        run.evaluate()
    assert "--" not in str(raised.value)
    with pytest.raises(ValueError, match="groups is of no use"):
        run.evaluate(file, groups="user")
    with pytest.raises(ValueError, match="users=...: 1 of 1 names"):
        run.recommend(["nobody"])
    with pytest.raises(ValueError, match="use recommend"):
        run.predict(file)


def test_clicks_choose_the_dtype_of_the_device(folder, monkeypatch):
    """Where no configuration is given. With one, its dtype counts."""
    monkeypatch.setattr(of_clicks, "custom_call_can_run", lambda *_, **__: True)
    clicks = sj.read_clicks(folder / "clicks.csv", SCHEMA)
    config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
    for given, dtype in ((None, "bfloat16"), (config, "float32")):
        run = sj.Run.train(clicks, config=given, num_epochs=1, batch_size=200)
        assert run.model.config.dtype == dtype


def test_a_run_is_resumed_with_the_dtype_that_it_was_begun_with(
    folder, monkeypatch, tmp_path
):
    """It may have been begun on another device, or by a release that chose another one."""
    clicks = sj.read_clicks(folder / "clicks.csv", SCHEMA)
    how: Any = {"model": "dlrm", "decay": "none", "batch_size": 200}
    sj.Run.train(clicks, tmp_path / "run", num_epochs=1, **how)
    monkeypatch.setattr(of_clicks, "custom_call_can_run", lambda *_, **__: True)
    more = sj.Run.train(clicks, tmp_path / "run", num_epochs=2, resume=True, **how)
    assert more.model.config.dtype == "float32" and len(more.history) == 2


def test_clicks_go_on_with_new_categories(folder, tmp_path, capsys):
    """Monday, then Tuesday: users that are new, and the state of the optimizer."""
    lines = (folder / "clicks-heldout.csv").read_text().replace("u3,", "v1,")
    (tmp_path / "tuesday.csv").write_text(lines.replace("i2,", "j2,"))
    how: dict[str, Any] = {"decay": "none", "batch_size": 100, "num_epochs": 2}
    run = sj.Run.train(folder / "clicks.csv", tmp_path / "monday", schema=SCHEMA, **how)
    before, steps = run.known, int(run.optimizer.step[...])
    predicted = run.predict(tmp_path / "tuesday.csv")
    data = sj.read_clicks(
        tmp_path / "tuesday.csv", SCHEMA, features=before, append=True
    )
    now = dataclasses.replace(run.settings, num_features=20)
    longer, _, kept, _ = continued(Folder.of(run.directory), now, data)
    assert kept and longer.num_ids == data.num_ids
    # To the bit, also of examples with new categories, until it is trained on.
    np.testing.assert_array_equal(sj.predict(longer, data), predicted)

    run.train_more(tmp_path / "tuesday.csv", tmp_path / "tuesday", **how)
    assert int(run.optimizer.step[...]) == steps + 4
    for name, new in (("user", "v1"), ("item", "j2")):
        known = before.vocabularies[name]
        assert run.known.vocabularies[name].tolist() == [*known, new]
    assert run.evaluate(folder / "clicks-heldout.csv")["auc"] > 0.6
    after = run.predict(tmp_path / "tuesday.csv")
    assert np.abs(after - predicted).max() > 1e-3

    # So does the command, to the bit; and a data set of its own vocabulary.
    argv = ["train", str(tmp_path / "tuesday.csv"), "--from", str(tmp_path / "monday")]
    argv += ["--decay", "none", "--batch-size", "100", "--epochs", "2", "--run"]
    capsys.readouterr()
    assert main([*argv, str(tmp_path / "command")]) == 0
    said = capsys.readouterr().err
    assert "18 ids are known, 2 are new; the optimizer goes on with its state" in said
    assert parameters(tmp_path / "tuesday") == parameters(tmp_path / "command")
    again = sj.Run.load(tmp_path / "monday")
    again.train_more(sj.read_clicks(tmp_path / "tuesday.csv", SCHEMA), **how)
    assert parameters(again.directory) == parameters(tmp_path / "command")

    assert main([*argv, str(tmp_path / "no"), "--label", "click"]) == 1
    assert "takes the columns of its run: leave out --schema" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "no"), "--chunk-rows", "9"]) == 1
    assert "leave out --chunk-rows" in capsys.readouterr().err


def test_a_model_of_items_takes_saved_histories(tmp_path, capsys):
    """It sees neither their order nor their repeats."""
    rng = np.random.default_rng(0)
    events = [
        (u, (u + 2 * int(i)) % 12) for u in range(24) for i in rng.integers(0, 4, 9)
    ]
    histories = sj.read_sequences(
        [{"user": f"u{u}", "item": f"i{i}"} for u, i in events]
    )
    histories.save(tmp_path / "histories.parquet")
    how: dict[str, Any] = {
        "num_epochs": 2,
        "config": sj.NetworkConfig.autoencoder((8,)),
    }
    sparse = sj.Run.train(histories.to_sparse(), **how)
    for source in (histories, tmp_path / "histories.parquet"):
        run = sj.Run.train(source, **how)
        assert parameters(run.directory) == parameters(sparse.directory)
        found, expected = (each.recommend(["u3"], k=4) for each in (run, sparse))
        assert found.names() == expected.names()
    run.save(tmp_path / "run")
    argv = [
        "evaluate",
        str(tmp_path / "run"),
        *[str(tmp_path / "histories.parquet")] * 2,
    ]
    assert main([*argv, "--keep-seen"]) == 0
    said = capsys.readouterr().err
    assert f"216 events, {histories.to_sparse().num_entries} entries" in said


# Another value of each option that a run records.
OTHERS = {"k": 7, "patience": 4, "seed": 5, "deterministic": True}
OTHERS |= {"targets": ("buy",), "weights": "watched"}


@pytest.mark.parametrize("name", sorted(Recorded.option_names()))
def test_an_option_that_is_recorded_is_kept_by_a_resume(name):
    settings = Settings(
        network=sj.NetworkConfig.autoencoder((4,)),
        optimizer=sj.optimizers.sgd(0.1),
        num_features=3,
        num_epochs=2,
        batch_size=4,
        indicator=True,
        data="a.csv",
        data_fingerprint="x",
        vocabulary_fingerprint="y",
        validation=None,
        validation_split=None,
    )
    changes: dict[str, Any] = {name: OTHERS[name]}
    other = dataclasses.replace(settings, **changes)
    written = json.loads(json.dumps(other.to_json()))
    assert Settings.from_json(written) == other
    assert other.identity() != settings.identity()
    for ours, theirs in ((other, settings), (settings, other)):
        with pytest.raises(ValueError, match=f"cannot resume with {name} "):
            ours.check_resumes(theirs)
