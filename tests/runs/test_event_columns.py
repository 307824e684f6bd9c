"""Runs and commands of histories whose events have columns."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pandas
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data import DataError, DenseColumn, HashedColumn
from sparsejax.kinds.histories.kind import KIND
from sparsejax.options.training import Training
from sparsejax.runs.folders import Folder
from sparsejax.runs.publishing import Gate, measured
from sparsejax.serving.histories import Histories
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.questions import form_of

SCHEMA = sj.EventSchema(
    kind="action",
    dense={"price": DenseColumn(missing=0.0)},
    ids={"tags": HashedColumn(7)},
)
CLICKS = sj.ClickSchema("click", ids={"user": HashedColumn(7)})
CONFIG = sj.GRUConfig(max_length=6, width=4, blocks=1, dropout=0.0)
HOW: dict[str, Any] = {
    "batch_size": 16,
    "optimizer": "sgd",
    "decay": "none",
    "learning_rate": 0.1,
}


def table(users: int = 24, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    rows = [
        {
            "user": f"u{user}",
            "item": f"i{rng.integers(8)}",
            "time": time,
            "action": ["view", "buy"][rng.integers(2)],
            "price": None if rng.random() < 0.2 else rng.random(),
            "tags": [f"t{tag}" for tag in rng.integers(9, size=rng.integers(4))],
        }
        for user in range(users)
        for time in range(5)
    ]
    return pandas.DataFrame(rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> sj.Run:
    return sj.Run.train(
        table(),
        tmp_path_factory.mktemp("runs") / "run",
        config=CONFIG,
        schema=SCHEMA,
        targets="buy",
        validation="last",
        num_epochs=2,
        k=3,
        **HOW,
    )


def bits(model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def check_equal(one, other) -> None:
    for a, b in zip(bits(one), bits(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_is_the_training_in_python_and_is_measured_on_its_targets(run):
    data = sj.read_sequences(table(), events=SCHEMA).with_targets("buy")
    train, heldout = data.split_last()
    model, optimizer = sj.build(CONFIG, train, run.settings.optimizer, seed=0)
    history = sj.fit(
        model,
        optimizer,
        train,
        batch_size=16,
        num_epochs=2,
        validation=heldout,
        k=3,
        early_stopping=sj.EarlyStopping(metric="ndcg@3", patience=9),
    )
    check_equal(run.model, model)
    assert [e["ndcg@3"] for e in run.history] == [e["ndcg@3"] for e in history]
    assert run.settings.targets == ("buy",)
    # From the folder alone, with room for as many categories of an event.
    again = sj.Run.load(run.directory)
    later = table(seed=1)
    others = sj.read_sequences(later, features=data, events=data.events)
    shown, _ = others.split_last()
    expected = sj.recommend(model, shown, 3, exclude=None)
    found = again.recommend(
        inputs=later.iloc[[i % 5 < 4 for i in range(120)]], k=3, exclude_seen=False
    )
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert found.names() == expected.names(data)
    measured = again.evaluate(later, inputs=shown, k=3, exclude_seen=False)
    targets = others.with_targets("buy")
    assert (
        measured["ndcg@3"]
        == sj.evaluate(model, shown, targets, k=3, exclude=None)["ndcg@3"]
    )
    assert not any("[" in name for name in measured)  # the targets are of one kind


def test_held_out_events_are_measured_by_their_kinds(run):
    data = sj.read_sequences(table(), events=SCHEMA)
    train, heldout = data.split_last(2)
    found = sj.evaluate(run.model, train, heldout, k=3, exclude=None, by="kinds")
    for kind in ("view", "buy"):
        own = heldout.of_kinds(kind)
        alone = sj.evaluate(run.model, train, own, k=3, exclude=None)
        for name in ("recall@3", "ndcg@3", "popularity_ndcg@3"):
            assert found[f"{name}[action={kind}]"] == pytest.approx(alone[name])
        assert found[f"entries[action={kind}]"] == own.to_sparse().num_entries
    with pytest.raises(ValueError, match="these have none; read them with events="):
        sj.evaluate(run.model, train, heldout.to_sparse(), k=3, by="kinds")


def test_a_later_event_changes_no_earlier_prediction(run):
    events = table()
    changed = events.assign(
        price=np.where(events.time < 3, events.price.fillna(0), 7.0),
        action=np.where(events.time < 3, events.action, "returned"),  # a new kind
    )
    early, late = (
        run.recommend(inputs=each[each.time < 3], k=3) for each in (events, changed)
    )
    np.testing.assert_array_equal(early.scores, late.scores)
    whole = [run.recommend(inputs=each, k=3).scores for each in (events, changed)]
    assert (whole[0] != whole[1]).any()


def test_wrong_columns_and_other_data_are_errors(run, tmp_path):
    with pytest.raises(DataError, match="'nosuch'"):
        sj.Run.train(table(), config=CONFIG, schema=sj.EventSchema(kind="nosuch"))
    with pytest.raises(DataError, match="'action'"):
        run.recommend(inputs=table().drop(columns="action"))
    with pytest.raises(ValueError, match="no event is of the kind 'sale'"):
        sj.Run.train(table(), config=CONFIG, schema=SCHEMA, targets="sale")
    with pytest.raises(ValueError, match="give model='sasrec', 'hstu' or 'gru'"):
        sj.Run.train(table(), schema=SCHEMA)
    with pytest.raises(
        TypeError, match="schema is of EventSchema here, got ClickSchema"
    ):
        sj.Run.train(table(), config=CONFIG, schema=CLICKS)
    with pytest.raises(ValueError, match="targets is of no use for a model of items"):
        sj.Run.train(table(), targets="buy")
    other = table().assign(price=1.0)
    with pytest.raises(ValueError, match="other entries"):
        sj.Run.train(
            other,
            run.directory,
            config=CONFIG,
            schema=SCHEMA,
            targets="buy",
            validation="last",
            num_epochs=3,
            k=3,
            resume=True,
            **HOW,
        )


def test_a_resumed_run_has_the_bits_of_one_and_a_later_run_its_targets(run, tmp_path):
    how: dict[str, Any] = HOW | {
        "config": CONFIG,
        "schema": SCHEMA,
        "k": 3,
        "validation": "last",
    }
    for epochs in (1, 2):
        resumed = sj.Run.train(
            table(),
            tmp_path / "run",
            targets=["buy"],
            num_epochs=epochs,
            resume=epochs > 1,
            **how,
        )
    check_equal(resumed.model, run.model)
    resumed.train_more(table(seed=2), num_epochs=1, **HOW)
    assert resumed.settings.targets == ("buy",)
    assert resumed.known.events.schema == SCHEMA


def test_other_columns_of_held_out_events_are_other_data():
    """They decide on the targets, and are the context; the order of users does not count."""
    heldout = table(seed=1)
    order = heldout.user.map(lambda user: -int(user[1:]))
    same = heldout.iloc[np.argsort(order, kind="stable")]
    bought = heldout.assign(action="buy")
    found = []
    for each in (heldout, same, bought):
        how: Any = {"config": CONFIG, "schema": SCHEMA, "targets": "buy"}
        training = Training(table(), validation=each, **how)
        found.append(KIND.source(training, None).validation)
    assert found[0] == found[1] != found[2]


def test_a_version_is_measured_on_data_with_categories_of_another_order(run, tmp_path):
    """A new training may have other ids than the version that serves."""
    later = table(seed=3)
    later["action"] = np.where(later.time < 3, "new", later.action)
    how: dict[str, Any] = {"config": CONFIG, "validation": "last"}
    kind: Any = KIND
    run.export(tmp_path / "p", k=3)
    predictor, gate = sj.load_predictor(tmp_path / "p"), Gate("ndcg", 3)
    own = kind.source(Training(later, schema=SCHEMA, **how), None)
    more = Training(later, origin=run.directory, **how)
    with pytest.warns(UserWarning, match="such as 'new'"):
        like = kind.source(more, Folder.of(run.directory))
    assert not own.data.events.has_ids_of(like.data.events)
    found, wanted = (measured(predictor, each, gate) for each in (own, like))
    assert found == wanted
    bare = kind.source(Training(later, **how), None)
    with pytest.raises(ValueError, match="columns of events none, but the predictor"):
        measured(predictor, bare, gate)


def test_a_run_reads_columns_from_disk_and_one_after_it_tells_of_new_categories(
    tmp_path,
):
    path = tmp_path / "events.parquet"
    sorted_ = table().sort_values(["user", "time"]).reset_index(drop=True)
    sorted_.to_parquet(path, row_group_size=25)
    how: dict[str, Any] = {"config": CONFIG, "num_epochs": 1, **HOW}
    run = sj.Run.train(path, tmp_path / "run", schema=SCHEMA, chunk_rows=8, **how)
    scanned = sj.data.scan_sequences(path, events=SCHEMA, chunk_rows=8)
    model, optimizer = sj.build(CONFIG, scanned, run.settings.optimizer, seed=0)
    sj.fit(model, optimizer, scanned, batch_size=16, num_epochs=1)
    check_equal(run.model, model)
    wanted = sj.Run.train(path, schema=SCHEMA, chunk_rows=8, targets="buy", **how)
    model_of_buys, optimizer = sj.build(CONFIG, scanned, wanted.settings.optimizer)
    sj.fit(
        model_of_buys, optimizer, scanned, targets="buy", batch_size=16, num_epochs=1
    )
    check_equal(wanted.model, model_of_buys)
    with pytest.raises(ValueError, match="user_features=... needs all of the data"):
        users = [{"user": "u0", "plan": "paid"}]
        sj.Run.train(path, schema=SCHEMA, chunk_rows=8, user_features=users, **how)
    # The folder has the categories; later data has others.
    again = sj.Run.load(tmp_path / "run")
    data = sj.read_sequences(path, features=scanned.feature_names, events=SCHEMA)
    found = again.recommend(inputs=sorted_, k=3, exclude_seen=False)
    expected = sj.recommend(model, data, 3, exclude=None)
    assert found.names() == expected.names(data)
    later = table().assign(action=np.where(table().time < 4, table().action, "return"))
    training = Training(later, config=CONFIG, origin=again.directory)
    earlier = Folder.of(again.directory)
    kind: Any = KIND
    saved = sj.read_sequences(later, events=SCHEMA)
    saved.save(tmp_path / "later")
    for data in (later, saved, tmp_path / "later"):
        with pytest.warns(UserWarning, match="'action': 24 of 120 .*such as 'return'"):
            more = kind.read_to_train(training.replaced(data=data), earlier)
    rows = iter(later.to_dict("records"))  # which can be read once
    with pytest.warns(UserWarning, match="'action': 24 of 120 .*: it gets the id"):
        more = kind.read_to_train(training.replaced(data=rows), earlier)
    assert more.events.vocabularies["action"].tolist() == ["buy", "view"]


def test_a_saved_model_is_a_run(run, tmp_path):
    data = sj.read_sequences(table(), events=SCHEMA)
    model, optimizer = sj.build(CONFIG, data, sj.optimizers.sgd(0.1))
    sj.save_model(tmp_path / "run", model, optimizer, data)
    found = sj.Run.load(tmp_path / "run").recommend(inputs=table(), k=2)
    expected = sj.recommend(model, data, 2, exclude="inputs")
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_commands_from_a_file_to_a_report(tmp_path, capsys):
    data = table().drop(columns="tags").fillna(0)
    data.to_csv(tmp_path / "events.csv", index=False)
    (tmp_path / "gru.json").write_text(json.dumps(CONFIG.to_json()))
    home, file = str(tmp_path / "run"), str(tmp_path / "events.csv")
    columns = ["--kind", "action", "--dense", "price"]
    parts = str(tmp_path / "parts")
    split = ["split", file, "--by", "last", "--histories", "--out", parts, *columns]
    assert main(split) == 0
    files = [f"{parts}/train.parquet", f"{parts}/heldout.parquet"]
    train = ["train", file, "--run", home, "--config", str(tmp_path / "gru.json")]
    train += [
        "--optimizer",
        "sgd",
        "--decay",
        "none",
        "--epochs",
        "1",
        "--batch-size",
        "16",
    ]
    assert main([*train, *columns, "--weights", "buy=1,view=.5"]) == 0
    capsys.readouterr()
    assert main(["evaluate", home, *files, "--k", "3", "--keep-seen"]) == 0
    out = capsys.readouterr().out.splitlines()
    measured, again = json.loads(out[-1]), sj.Run.load(home)
    assert again.settings.weights == {"buy": 1.0, "view": 0.5}
    shown, heldout = (sj.SequenceDataset.load(each) for each in files)
    found = sj.evaluate(again.model, shown, heldout, k=3, exclude=None, by="kinds")
    assert measured == pytest.approx(found)
    assert sum("[action=" in line.partition(" ")[0] for line in out[:-2]) == 4
    report = ["report", home, "--train", files[0], "--test", files[1], "--k", "3"]
    assert main([*report, "--keep-seen"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Kinds of events" in page and "action=view" in page
    assert f"{shown.kinds['view']} view" in page
    assert main(["predict", home, file, "--k", "2", "--out", f"{parts}/x.csv"]) == 0
    assert (
        main([*train[:2], *train[2:3], f"{parts}/b", *train[4:], "--targets", "sale"])
        == 1
    )
    error = capsys.readouterr().err
    assert "no columns of events" in error
    plan = ["plan", "--items", "9", "--rows", "9", "--entries", "90", "--model", "gru"]
    assert main([*plan, "--memory", "1GB", "--examples", file]) == 1
    assert "--examples is of no use without columns" in capsys.readouterr().err

    # A run without targets is compared with one that has them on these.
    plain = [*train[:3], f"{parts}/plain", *train[4:]]
    bought = [*train[:3], f"{parts}/buy", *train[4:], *columns, "--targets", "buy"]
    assert main(plain) == main(bought) == 0
    capsys.readouterr()
    compare = ["compare", f"{parts}/plain", f"{parts}/buy", *files]
    assert main([*compare, "--k", "3", "--keep-seen"]) == 0
    count = len({*heldout.of_kinds("buy").to_sparse().matrix.row_ids().tolist()})
    assert f"paired over {count} rows" in capsys.readouterr().out


def test_a_request_has_a_context_and_events_as_objects(tmp_path, capsys):
    events = table().drop(columns="tags").fillna(0)
    events.to_csv(tmp_path / "events.csv", index=False)
    schema = sj.EventSchema(
        kind="action", dense={"price": DenseColumn(missing=0.0)}, context=["price"]
    )
    how: dict[str, Any] = HOW | {"config": CONFIG, "schema": schema, "num_epochs": 1}
    run = sj.Run.train(events, tmp_path / "run", **how)
    shown = sj.read_sequences(events, features=run.known, events=run.known.events)
    shown = shown.with_context({"price": 0.5})
    out = str(tmp_path / "vectors.npz")
    data = str(tmp_path / "events.csv")
    argv = ["vectors", str(tmp_path / "run"), "--data", data, "--out", out]
    assert main([*argv, "--context", "price=.5"]) == 0, capsys.readouterr().err
    expected = sj.user_vectors(run.model, shown)
    np.testing.assert_array_equal(np.load(out)["vectors"], expected)
    # Histories in a call are lists of events, also where one lacks a column, or is empty.
    names = shown.row_names[:3]
    records = [
        [
            {n: v for n, v in row.items() if n not in ("user", "price")}
            for row in events[events.user == name].to_dict("records")
        ]
        for name in names
    ]
    same = events[events.user.isin(names)].assign(price=None)
    ask: dict[str, Any] = {"k": 3, "exclude_seen": False, "context": {"price": 0.5}}
    found, wanted = (run.recommend(inputs=each, **ask) for each in (records, same))
    np.testing.assert_array_equal(found.scores, wanted.scores)
    assert len(run.recommend(inputs=[records[0], []], **ask).names()) == 2
    with pytest.raises(ValueError, match="an event has no item"):
        run.recommend(inputs=[[{"action": "buy"}]], **ask)
    # Both are measured on the targets of one, in the context of the held-out events.
    sj.Run.train(events, tmp_path / "buy", targets="buy", **how)
    train, heldout = shown.split_last()
    files = [str(tmp_path / f"{part}.parquet") for part in ("train", "heldout")]
    train.save(files[0])
    heldout.save(files[1])
    runs = [str(tmp_path / name) for name in ("run", "buy")]
    assert main(["compare", *runs, *files, "--k", "3", "--keep-seen"]) == 0
    assert "paired over" in capsys.readouterr().out


def test_lists_may_have_no_event_and_exclude_by_lists(run):
    how: dict[str, Any] = {"k": 1, "exclude_seen": False}
    [first], [second] = run.recommend(inputs=[[], []], **how).names()
    assert first == second
    [other], [again] = run.recommend(
        inputs=[[], []], exclude=[[first], []], **how
    ).names()
    assert other != again == first
    wrong: list[Any] = [
        ([[], []], table()),
        (table(), [[first]]),
        ([[]], [[], [first]]),
    ]
    for inputs, exclude in wrong:
        with pytest.raises(ValueError, match="both as lists, with one list for each"):
            run.recommend(inputs=inputs, exclude=exclude, k=1)


def test_two_stages_read_columns_of_events(run, tmp_path):
    rows = [{"click": n % 2, "item": f"i{n % 8}", "user": "a"} for n in range(16)]
    ids = {"item": sj.data.VocabularyColumn(), "user": HashedColumn(7)}
    schema = sj.ClickSchema("click", ids=ids)
    config = sj.WideDeepConfig(dim=2, hidden=(2,))
    ranking = sj.Run.train(
        sj.read_clicks(rows, schema), config=config, num_epochs=1, optimizer="adagrad"
    )
    both, later = sj.TwoStage(run, ranking, candidates=3), table(seed=1)
    how: dict[str, Any] = {"k": 3, "exclude_seen": False}
    both_found, found = (each.recommend(inputs=later, **how) for each in (both, run))
    np.testing.assert_array_equal(
        np.sort(both_found.ids, axis=1), np.sort(found.ids, axis=1)
    )
    shown = later.iloc[[i % 5 < 4 for i in range(120)]]
    measured = both.evaluate(later, inputs=shown, ranking_alone=True, **how)
    alone = run.evaluate(later, inputs=shown, **how)
    assert measured["retrieval_ndcg@3"] == pytest.approx(alone["ndcg@3"])
    with pytest.raises(ValueError, match="k is 20, but the first stage finds 3"):
        both.evaluate(later, inputs=shown, exclude_seen=False)
    people = [{"user": f"u{user}", "plan": ["a", "b"][user % 2]} for user in range(24)]
    known = {"schema": dataclasses.replace(SCHEMA, context=["price"])}
    first = sj.Run.train(
        table(), config=CONFIG, user_features=people, num_epochs=1, **known, **HOW
    )
    both = sj.TwoStage(first, ranking, candidates=3)
    both.export(tmp_path / "both.predictor", k=3, batch_size=1)
    predictor = sj.load_predictor(tmp_path / "both.predictor")
    how["context"] = {"price": 0.5}
    expected = both.recommend(["u3"], inputs=later, **how)
    events = later[later.user == "u3"].assign(price=lambda each: each.price.fillna(0))
    record: dict[str, Any] = {"items": [*events["item"]]} | {
        f"events/{name}": [*events[name]] for name in SCHEMA.used
    }
    record |= {"context/price": 0.5, "users/plan": "b", "user": "u3"}
    found = predictor.recommend_records([record], k=3, exclude_seen=False)
    assert predictor.names(found) == expected.names()
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    with pytest.raises(ValueError, match="'events/price' must be lists with a value"):
        predictor.recommend_records([record | {"events/price": [1]}])
    tags = [[*each, *[""] * (3 - len(each))] for each in record["events/tags"]]
    flat = [tag for each in tags for tag in each]
    tensors = {
        "items": Tensor("items", "BYTES", (5,), record["items"]),
        "events/action": Tensor("", "BYTES", (5,), record["events/action"]),
        "events/price": Tensor("", "FP32", (5,), np.array(record["events/price"])),
        "events/tags": Tensor("", "BYTES", (5, 3), flat),
        "context/price": Tensor("", "FP32", (1,), np.array([0.5])),
        "users/plan": Tensor("", "BYTES", (1,), ["b"]),
        "user": Tensor("", "BYTES", (1,), ["u3"]),
    }
    sj.read_sequences(later).save(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="rows.parquet: the model reads columns of e"):
        form_of(predictor, Histories(tmp_path / "rows.parquet"))
    asked = Asked(None, {"exclude_seen": False}, tensors)
    question = form_of(predictor).question(asked, Limits())
    (given, _) = predictor.model.rows_of_names(
        [record["items"]],
        exclude_seen=False,
        columns={
            name: cells if name.startswith("events/") else [cells]
            for name, cells in record.items()
            if name != "items"
        },
    )
    for ours, theirs in zip(question.given, given, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(RefusedError, match="the events lack the columns"):
        del tensors["events/price"]
        form_of(predictor).question(asked, Limits())
