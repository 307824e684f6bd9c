"""Runs, commands and services of histories whose users have columns."""

import contextlib
import dataclasses
import io
import json
from typing import Any

import numpy as np
import pandas
import pytest

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.histories.kind import KIND
from sparsejax.options.training import Training
from sparsejax.runs.folders import Folder

PLANS = sj.EventSchema(ids={"plan": sj.data.VocabularyColumn()})
CONFIG = sj.GRUConfig(max_length=2, width=32, blocks=1, dropout=0.0)
SMALL = dataclasses.replace(CONFIG, width=4)
HOW: dict[str, Any] = {"optimizer": "sgd", "decay": "none", "num_epochs": 1}


def world(
    users: int, seed: int = 0
) -> tuple[pandas.DataFrame, pandas.DataFrame, float]:
    """Draws users and events: with a free plan the next item is 1 further, with a paid one 3, in 9
    of 10 cases.

    Returns events, users, and the best answers with knowledge of the plan.
    """
    rng = np.random.default_rng(seed)
    first, plan, other = (rng.integers(n, size=users) for n in (8, 2, 8))
    best = (first + 1 + 2 * plan) % 8
    then = np.where(rng.random(users) < 0.9, best, other)
    name = [f"u{user}" for user in range(users)]
    parts = [
        pandas.DataFrame({"user": name, "item": [f"i{i}" for i in item], "time": time})
        for time, item in enumerate((first, then))
    ]
    people = {"user": name, "plan": np.array(["free", "paid"])[plan]}
    return pandas.concat(parts), pandas.DataFrame(people), (then == best).mean()


def told(*argv: str) -> str:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        assert main([*argv]) == 0, error.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with events, users and a run, written by commands."""
    folder = tmp_path_factory.mktemp("users")
    table, people, _ = world(800)
    table.to_csv(folder / "events.csv", index=False)
    people.to_csv(folder / "users.csv", index=False)
    (folder / "gru.json").write_text(json.dumps(CONFIG.to_json()))
    events = str(folder / "events.csv")
    train = ["train", events, "--config", str(folder / "gru.json"), "--epochs", "16"]
    train += ["--optimizer", "adam", "--learning-rate", ".02", "--batch-size", "64"]
    own = ["--user-features", str(folder / "users.csv")]
    told(*train, "--run", str(folder / "run"), *own)
    return folder, train


def test_commands_reach_the_bound_of_the_plan(files, tmp_path):
    """Without the plan, a next item is one of two: .9 / 2 + .1 / 8."""
    folder, train = files
    table, people, bound = world(2000, seed=1)
    table.to_csv(tmp_path / "later.csv", index=False)
    people.to_csv(tmp_path / "people.csv", index=False)
    later = ["--user-features", str(tmp_path / "people.csv")]
    split = ["split", str(tmp_path / "later.csv"), "--histories", "--by", "last"]
    parts = []
    for name, more in (("with", later), ("without", [])):
        told(*split, "--out", str(tmp_path / name), *more)
        saved = (tmp_path / name / f"{part}.parquet" for part in ("train", "heldout"))
        parts.append([*map(str, saved)])
    run, plain = str(folder / "run"), str(tmp_path / "plain")
    told(*train, "--run", plain)
    how = ["--k", "1", "--keep-seen"]

    def measured(*argv: str) -> dict[str, float]:
        return json.loads(told("evaluate", *argv, *how).splitlines()[-1])

    found = measured(run, *parts[0])
    assert found["recall@1"] > bound - 0.01
    assert measured(run, *parts[1], *later)["recall@1"] == found["recall@1"]
    # A run without columns of users leaves out those of the data, also in a comparison.
    without = measured(plain, *parts[0])
    assert without["recall@1"] < 0.4625 + 0.03
    assert "recall@1" in told("compare", plain, run, *parts[1], *later, *how)
    report = ["report", run, "--train", parts[1][0], "--test", parts[1][1], *later]
    told(*report, "--out", str(tmp_path / "page.html"), "--k", "1")
    assert "columns of users: plan" in (tmp_path / "page.html").read_text()
    # The table has to be named, and named for a use.
    for argv, message in (
        (["evaluate", run, *parts[1]], "of users none, but the model reads"),
        (["evaluate", plain, *parts[1], *later], "reads no columns of users; leave it"),
        (
            ["split", str(tmp_path / "later.csv"), "--by", "last", *later],
            "for histories",
        ),
        ([*train, "--run", f"{plain}2", "--user-schema", "x.json"], "--user-features"),
    ):
        error = io.StringIO()
        more = ["--out", str(tmp_path / "x")] if argv[0] == "split" else []
        with contextlib.redirect_stderr(error):
            assert main([*argv, *more]) == 1
        assert message in error.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> sj.Run:
    table, people, _ = world(30)
    folder = tmp_path_factory.mktemp("run") / "run"
    users = sj.data.read_user_features(people, PLANS)
    return sj.Run.train(table, folder, user_features=users, config=SMALL, **HOW)


def scores(run: sj.Run, users: pandas.DataFrame) -> np.ndarray:
    again = sj.Run.load(run.directory, user_features=users)
    return again.recommend(inputs=world(9)[0], k=8, exclude_seen=False).scores


def test_a_column_of_a_user_changes_the_answers_of_this_user_alone(run):
    people, row = world(9)[1], 4
    answers = [scores(run, people)]
    rest = people.drop(index=row)
    other = {"free": "paid", "paid": "free"}[people.plan[row]]
    for plan in (other, "", "gold", "silver"):
        own = pandas.DataFrame([{"user": f"u{row}", "plan": plan}])
        answers.append(scores(run, pandas.concat([rest, own])))
        same = (answers[-1] == answers[0]).all(axis=1)
        assert same.tolist() == [r != row for r in range(9)]
    # A user that the table lacks has missing values. A new category is unknown.
    np.testing.assert_array_equal(scores(run, rest), answers[2])
    np.testing.assert_array_equal(answers[3], answers[4])
    assert (answers[2][row] != answers[3][row]).any()


def test_histories_in_lists_are_of_nobody_in_the_table(run, tmp_path):
    """Their numbers may be names of users. Answers are those for users that the table lacks."""
    ask: dict[str, Any] = {"k": 8, "exclude_seen": False}
    strangers = pandas.DataFrame({"user": ["x", "y"], "item": ["i1", "i1"]})
    numbered = pandas.DataFrame({"user": ["0", "1"], "plan": ["paid", "free"]})
    with_table = sj.Run.load(run.directory, user_features=numbered)
    with pytest.warns(UserWarning, match="has '0', '1', and no user of the data.*'x'"):
        wanted = with_table.recommend(inputs=strangers, **ask).scores
    lists = [["i1"], ["i1"]]
    for each in (with_table, sj.Run.load(run.directory)):
        found = each.recommend(inputs=lists, **ask)
        np.testing.assert_array_equal(found.scores, wanted)
    named = strangers.assign(user=["0", "1"])
    assert (with_table.recommend(inputs=named, **ask).scores != wanted).any()
    run.export(tmp_path / "p", k=8, batch_size=2)
    answers = sj.load_predictor(tmp_path / "p").recommend_names(
        lists, exclude_seen=False
    )
    assert answers == found.names()
    with pytest.raises(ValueError, match="which lists of items do not have"):
        sj.Run.train(lists, user_features=numbered, config=SMALL)


def test_saved_users_have_the_categories_of_the_run_before(run, tmp_path):
    table, people, _ = world(9)
    people.loc[:3, "plan"] = "gold"  # more frequent than "free" and "paid"
    own = sj.data.read_user_features(people, PLANS)
    sj.read_sequences(table, users=own).save(tmp_path / "later")
    kind: Any = KIND
    training = Training(tmp_path / "later", config=SMALL, origin=run.directory)
    found = kind.read_to_train(training, Folder.of(run.directory))
    known = sj.data.read_user_features(people, run.known.users)
    wanted = known.of(found.row_names)["plan"]
    np.testing.assert_array_equal(found.users["plan"], wanted)
    # A run without columns of users leaves them out.
    plain = sj.Run.train(table, tmp_path / "plain", config=SMALL, **HOW)
    found = kind.read_to_train(training, Folder.of(plain.directory))
    assert found.users is None


def test_validation_may_lack_users_of_whom_all_numbers_must_be_known():
    table = world(9)[0].assign(action="view")
    people = pandas.DataFrame({"user": [f"u{n}" for n in range(9)], "age": range(9)})
    strict = sj.EventSchema(dense={"age": sj.data.DenseColumn()})
    users = sj.data.read_user_features(people, strict)
    training = Training(
        table,
        config=SMALL,
        schema=sj.EventSchema(kind="action"),
        validation=table[table.user < "u4"],
        user_features=users,
    )
    kind: Any = KIND
    assert kind.source(training, None).heldout.num_rows == 4


def test_a_resume_and_a_later_run_notice_another_table(run):
    table, people, _ = world(30)
    again: dict[str, Any] = HOW | {"config": SMALL, "num_epochs": 2}
    again |= {"directory": run.directory, "resume": True}
    other = people.assign(plan=np.roll(people.plan, 1))
    renamed = people.assign(plan=people.plan + "s")
    for given, message in (
        (other, "other entries"),
        (renamed, "other features"),
        (None, "other features"),
    ):
        with pytest.raises(
            ValueError, match=f"cannot resume with other data.*{message}"
        ):
            sj.Run.train(table, user_features=given, **again)
    resumed = sj.Run.train(table, user_features=people, **again)
    assert len(resumed.history) == 2
    # New users, and a new category, which is unknown; the table of before has no effect.
    table, people, _ = world(40, seed=1)
    people.loc[3, "plan"] = "gold"
    resumed.train_more(table, num_epochs=1, user_features=people)
    assert resumed.known.users is not None
    assert sorted(resumed.known.users.vocabularies["plan"]) == ["free", "paid"]
    assert len(resumed.recommend(k=2).names()) == 40
    with pytest.raises(
        ValueError, match="trained with columns of users, user_features"
    ):
        sj.Run.load(run.directory).train_more(table, num_epochs=1)
    with pytest.raises(ValueError, match="is of no use for a model of items"):
        sj.Run.train(table, user_features=people)
