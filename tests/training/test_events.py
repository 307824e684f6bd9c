"""Trains on histories whose events have columns, and with only some events as targets."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pandas
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.data.sets.click_records import cells_of
from sparsejax.kinds.histories.next_items import rank_by_of
from sparsejax.runs.report import examples_of

ITEMS = 8


def world(users: int, seed: int = 0, says: bool = True) -> pandas.DataFrame:
    """Draws events: after a "buy" a user's next item is 3 further, after a "view" 1, in 9 of 10
    cases.
    """
    rng = np.random.default_rng(seed)
    item, rows = rng.integers(ITEMS, size=users), []
    for time in range(9):
        kind = rng.integers(2, size=users)
        names = [f"i{i}" for i in item]
        rows.append(
            pandas.DataFrame(
                {
                    "user": [f"u{u}" for u in range(users)],
                    "item": names,
                    "time": time,
                    "action": np.where(kind, "buy", "view"),
                    "price": rng.random(users),
                }
            )
        )
        step = np.where(kind if says else rng.integers(2, size=users), 3, 1)
        other = rng.integers(ITEMS, size=users)
        item = np.where(rng.random(users) < 0.9, (item + step) % ITEMS, other)
    return pandas.concat(rows)


SCHEMA = sj.EventSchema(kind="action", dense={"price": sj.data.DenseColumn()})
MODELS = {
    "sasrec": (sj.SASRecConfig(max_length=8, width=16, blocks=1, dropout=0.0), 12),
    "hstu": (sj.HSTUConfig(max_length=8, width=16, blocks=1, dropout=0.0), 12),
    "gru": (sj.GRUConfig(max_length=8, width=32, blocks=1, dropout=0.0), 18),
}


def trained(config, data, **options) -> tuple[Any, list[dict[str, float]]]:
    model, optimizer = sj.build(config, data, sj.optimizers.adam(0.02))
    return model, sj.fit(model, optimizer, data, batch_size=64, **options)


@pytest.mark.parametrize("name", MODELS)
def test_models_reach_the_bound_of_ids_and_that_of_kinds(name):
    """Without the kind, a next item is one of two: .9 / 2 + .1 / 8. With it .9 + .1 / 8."""
    config, epochs = MODELS[name]
    data = sj.read_sequences(world(1000), events=SCHEMA)
    others = sj.read_sequences(world(3000, seed=1), features=data, events=data.events)
    shown, heldout = others.split_last()
    found = []
    ways = [lambda each: each, sj.SequenceDataset.without_events]
    # No model can find a kind that its data lack, so one is enough for the second bound.
    for own in ways[: 1 + (name == "sasrec")]:
        model, _ = trained(config, own(data), num_epochs=epochs)
        measured = sj.evaluate(
            model, own(shown), own(heldout), k=1, exclude=None, popularity=own(data)
        )
        found.append(measured["recall@1"])
    assert found[0] > 0.9125 - 0.02
    assert all(recall < 0.4625 + 0.03 for recall in found[1:])


def small(**options) -> Any:
    return trained(sj.GRUConfig(max_length=4, width=4, blocks=1), **options)


def test_only_targets_are_learned_and_measured():
    data = sj.read_sequences(world(70), events=SCHEMA)
    train, heldout = data.split_last()
    model, history = small(
        data=train, targets="buy", num_epochs=1, validation=heldout, k=3
    )
    _, same = small(
        data=train.with_targets("buy"),
        num_epochs=1,
        validation=heldout.with_targets("buy"),
        k=3,
    )
    assert same[0]["loss"] == history[0]["loss"]
    assert same[0]["ndcg@3"] == history[0]["ndcg@3"]
    found = sj.evaluate(model, train, heldout.of_kinds("buy"), k=3, exclude=None)
    assert found["ndcg@3"] == history[0]["ndcg@3"]
    every = sj.evaluate(model, train, heldout, k=3, exclude=None)
    assert found["users"] < every["users"] == 70
    # By a column, by an array, and by kinds with equal weights, whose sum is infinite.
    assert train.events is not None
    by_array = train.events["price"]
    losses = [
        small(data=train, weights=weights, num_epochs=1)[1][0]["loss"]
        for weights in ("price", by_array, {"buy": 1e38, "view": 1e38}, None)
    ]
    assert losses[0] == losses[1] != losses[3]
    assert losses[2] == pytest.approx(losses[3], rel=1e-6)
    # Rows that have no target are no examples.
    nothing = dataclasses.replace(train, weights=np.zeros(train.num_entries))
    with pytest.raises(
        ValueError, match="the next of positive weight, so there is noth"
    ):
        small(data=nothing)
    # Nor is a long row, of whose last places none is a target.
    early = np.zeros(train.num_entries)
    early[train.indptr[:-1] + 1] = 1
    with pytest.raises(
        ValueError, match="the next of positive weight, so there is noth"
    ):
        small(data=train, weights=early)
    with pytest.raises(ValueError, match="validation: no event is a target with a pos"):
        small(data=train, targets="buy", validation=heldout.of_kinds("view"))


def whole(schema: sj.EventSchema) -> sj.SequenceDataset:
    """Events with columns, one of which is known before the event, and with user columns."""
    table = world(70)
    tags = np.random.default_rng(1).integers(0, 5, len(table))
    table["tags"] = [["a", "b", "c", "d"][:n] for n in tags]
    people = [{"user": f"u{u}", "plan": "ab"[u % 2]} for u in range(60)]
    users = sj.data.read_user_features(people, PLANS)
    schema = dataclasses.replace(schema, context=["price"])
    return sj.read_sequences(table, events=schema, users=users)


def bought_after(users: int, seed: int) -> tuple[pandas.DataFrame, np.ndarray]:
    """Draws events of random items. Whether an item is bought depends on it and on the kind
    before.

    Returns:
      The events, and the probability that the last one is a purchase.
    """
    rng = np.random.default_rng(seed)
    kind, rows, p = rng.integers(2, size=users), [], np.zeros(0)
    for time in range(6):
        item = rng.integers(ITEMS, size=users)
        p = np.where((item + kind) % 2, 0.85, 0.15)
        seconds = 2 + item / 4 + kind + rng.normal(0, 0.5, users)
        seconds[rng.random(users) < 0.2] = np.nan
        kind = (rng.random(users) < p).astype(int)
        rows.append(
            pandas.DataFrame(
                {
                    "user": [f"u{u}" for u in range(users)],
                    "item": [f"i{i}" for i in item],
                    "time": time,
                    "action": np.where(kind, "buy", "view"),
                    "seconds": seconds,
                }
            )
        )
    return pandas.concat(rows), p


SECONDS = {"seconds": sj.data.DenseColumn(missing=0.0)}
LABELLED = sj.EventSchema(kind="action", dense=SECONDS, labels=["action", "seconds"])


@pytest.mark.parametrize("name", MODELS)
def test_labels_reach_their_bounds_and_rank_purchases_higher(name):
    """Of two of eight items purchases have 2 / 8, and of the four likely ones .85 / 2."""
    config = dataclasses.replace(MODELS[name][0], max_length=5)
    data = sj.read_sequences(bought_after(1500, 0)[0], events=LABELLED)
    table, p = bought_after(3000, 1)
    others = sj.read_sequences(table, features=data, events=data.events)
    shown, heldout = others.split_last()
    model, _ = trained(config, data, num_epochs=12)
    last = table[table.time == 5]
    is_bought = (last.action == "buy").to_numpy()
    how = {"k": 2, "exclude": None, "popularity": data}
    bought = heldout.with_targets("buy")
    plain, found = (
        sj.evaluate(model, shown, bought, rank_by=by, **how) for by in (None, "buy")
    )
    assert found["auc/action=buy"] > sj.metrics.auc(p, is_bought) - 0.01
    assert found["log_loss/action=buy"] < sj.metrics.log_loss(p, is_bought) + 0.02
    assert found["calibration/action=buy"] == pytest.approx(1, abs=0.05)
    assert found["squared_error/seconds"] < 0.25 + 0.03
    assert found["calibration/seconds"] == pytest.approx(1, abs=0.03)
    assert found["hit_rate@2"] > 0.425 - 0.04 > 0.3 > plain["hit_rate@2"]
    # The order is that of the products; both factors are in the answer.
    ranked = sj.recommend(model, shown, k=8, exclude=None, rank_by="action=buy")
    items = sj.recommend(model, shown, k=8, exclude=None)
    assert ranked.values is not None and items.values is None
    products = ranked.scores + np.log(ranked.values)
    assert (np.diff(products, axis=1) < 1e-5).all()
    at = np.argsort(ranked.ids), np.argsort(items.ids)
    both = (
        np.take_along_axis(*x, 1)
        for x in zip((ranked.scores, items.scores), at, strict=True)
    )
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)


def test_a_name_of_a_label_is_found_or_an_error():
    ids = {"then": sj.data.VocabularyColumn(), "hour": sj.data.HashedColumn(9)}
    schema = sj.EventSchema("action", SECONDS, ids, labels=["action", "then", "hour"])
    rows = [
        {"user": "u", "item": f"i{n}", "action": kind, "then": then, "hour": 7}
        for n, (kind, then) in enumerate((("view", "buy"), ("buy", "stay")))
    ]
    table = [row | {"seconds": None} for row in rows]
    data = sj.read_sequences(table, events=schema)
    model, _ = sj.build(sj.GRUConfig(max_length=4, width=4, blocks=1), data)
    events = data.events
    assert events is not None
    head: Any = model.next_event
    for name, label, one in (
        ("view", "action", {"action": ["view"]}),
        ("action=buy", "action", {"action": ["buy"]}),
        ("then=buy", "then", {"then": ["buy"]}),
        ("hour=7", "hour", {"hour": [7]}),
    ):
        found = rank_by_of(model, events, name)
        [first] = [each.first for each in head.labels if each.name == label]
        cells = cells_of(one, [label])
        assert found.place == first + events.read(cells, [label])[label][0] - 1
    for name, message in (
        ("buy", "is a label of several columns"),
        ("sold", "is not a label"),
        ("action=sold", "is not a label"),
        ("action=nan", "is not a label"),  # which is how a missing value is written
        ("hour=nan", "is not a label"),
        ("seconds", "is not a label"),
    ):
        with pytest.raises(ValueError, match=f"rank_by='{name}' {message}"):
            rank_by_of(model, events, name)
    with pytest.raises(ValueError, match="needs a model of histories whose events"):
        rank_by_of(object(), events, "buy")


@pytest.mark.parametrize(
    "wanted",
    [{"targets": "buy"}, {"weights": {"buy": 1, "view": 0.25}}, {"weights": "price"}],
    ids=str,
)
def test_targets_on_disk_are_those_in_memory(wanted, tmp_path):
    data = sj.read_sequences(world(20), events=SCHEMA)
    data.save(tmp_path / "histories.parquet")
    scanned, losses = sj.data.scan_sequences(tmp_path / "histories.parquet"), []
    for each in (data, scanned):
        config = sj.GRUConfig(max_length=4, width=4, blocks=1, dropout=0.0)
        model, optimizer = sj.build(config, data, sj.optimizers.sgd(0.5))
        losses.append(
            sj.fit(model, optimizer, each, batch_size=20, num_epochs=2, **wanted)
        )
    first, second = ([epoch["loss"] for epoch in history] for history in losses)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert scanned.with_targets(**wanted).fingerprint() != scanned.fingerprint()
    refused: list[dict[str, Any]] = [{"targets": "gift"}]
    refused.append({"targets": "buy", "weights": {"view": 1}})
    refused += [{"weights": {"buy": 1, "view": -1}}, {"targets": []}]
    texts = "^no event is of the kind 'gift'|^no event is a tar|^weights are finite"
    for wrong in refused:
        with pytest.raises(ValueError, match=texts):
            sj.fit(model, optimizer, scanned, **wrong)


def test_a_resume_gives_the_same_bits(tmp_path):
    data = whole(SCHEMA).with_targets("buy")

    class Killed(Exception):
        pass

    def killed(epoch):
        if epoch == 2:
            raise Killed

    expected, history = small(data=data, num_epochs=3)
    folder: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0}
    with pytest.raises(Killed):
        small(data=data, num_epochs=3, **folder, after_epoch=killed)
    model, resumed = small(data=data, num_epochs=3, **folder, resume=True)
    assert [h["loss"] for h in resumed] == [h["loss"] for h in history]
    states = [jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, expected)]
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = data.with_targets("view")
    with pytest.raises(ValueError, match="cannot resume with other data"):
        small(data=other, num_epochs=3, **folder, resume=True)
    weighed = {"action": sj.data.LabelColumn(weight=0.5)}
    folder["checkpoint_dir"] = tmp_path / "labels"
    for labels in (["action"], weighed):
        data = whole(dataclasses.replace(SCHEMA, labels=labels))
        if labels is weighed:
            with pytest.raises(ValueError, match="resume with labels .*'weight': 0.5"):
                small(data=data, num_epochs=2, **folder, resume=True)
        else:
            small(data=data, num_epochs=1, **folder)


def test_a_mesh_trains_as_one_device_does():
    ids = {**SCHEMA.ids, "tags": sj.data.HashedColumn(9)}
    data = whole(dataclasses.replace(SCHEMA, ids=ids)).with_context({"price": 0.5})
    assert data.events is not None and data.events["tags"].shape[1] == 4
    how = {"data": data, "weights": {"buy": 1, "view": 0.25}, "num_epochs": 2}
    model, history = small(**how)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        on_mesh, divided = small(**how)
        ranked = sj.recommend(on_mesh, data, k=3, exclude=None)
    np.testing.assert_allclose(
        [h["loss"] for h in divided], [h["loss"] for h in history], rtol=1e-5
    )
    expected = sj.recommend(model, data, k=3, exclude=None)
    np.testing.assert_allclose(ranked.scores, expected.scores, rtol=1e-3, atol=1e-4)


def test_a_column_of_the_last_event_changes_the_answer():
    data = sj.read_sequences(world(70), events=SCHEMA)
    model, _ = small(data=data, num_epochs=1)
    assert data.events is not None
    ids = data.events["action"].copy()
    ids[data.indptr[1:] - 1] = 5 - ids[data.indptr[1:] - 1]
    columns = dict(data.events.columns) | {"action": ids}
    other = dataclasses.replace(data, events=data.events.with_columns(columns))
    before, after = (sj.recommend(model, x, k=8, exclude=None) for x in (data, other))
    by_item = [
        np.take_along_axis(r.scores, np.argsort(r.ids, 1), 1) for r in (before, after)
    ]
    assert (np.abs(by_item[0] - by_item[1]).max(axis=1) > 0).all()


def test_the_request_has_the_context_of_the_event_to_come():
    price = sj.data.DenseColumn(missing=0.5)
    schema = sj.EventSchema(
        kind="action", dense={"price": price}, context=["price", "action"]
    )
    table = world(30)
    data = sj.read_sequences(table, events=schema)
    assert sj.EventSchema.from_json(schema.to_json()) == schema
    model, _ = small(data=data, num_epochs=1)
    seen, heldout = data.split_last(2)
    # Of two held-out events it is that of the first one.
    context = table[table.time == 7].set_index("user").loc[data.row_names]
    found = sj.recommend(model, seen, k=1, exclude=None, context=context)
    wanted = heldout.padded(2)
    hits = (found.ids == wanted).any(axis=1)
    measured = sj.evaluate(model, seen, heldout, k=1, exclude=None)
    assert measured["precision@1"] == pytest.approx(hits.mean())
    # Rows of a frame that has names are found by them.
    shuffled = context.reset_index().iloc[::-1]
    pairs = (seen.with_context(each).context for each in (shuffled, context))
    jax.tree.map(np.testing.assert_array_equal, *pairs)
    with pytest.raises(ValueError, match="has no row for the users 'u29'"):
        seen.with_context(shuffled[1:])
    # A report shows the answers in this context, and none without.
    examples = examples_of(model, seen, heldout, keep_seen=True, k=1)
    assert [e.recommended for e in examples] == found.names(seen)[: len(examples)]
    assert examples and not examples_of(model, seen, k=1)
    some = seen.with_context_of(heldout.align_rows(data.row_names[1:]))
    assert some.context is not None
    assert [some.context[n][0] for n in ("price", "action")] == [0.5, 0]
    columns = {name: context[name].tolist() for name in schema.context}
    rows = [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    for same in (columns, rows):
        again = sj.recommend(model, seen, k=1, exclude=None, context=same)
        np.testing.assert_array_equal(again.scores, found.scores)
    # One value for all; a column that is not there is missing, as None is.
    of_all = seen.with_context({"price": 0.5, "action": ["buy"] * 30})
    missing = seen.with_context([{"action": "buy"}] * 29 + [{"price": None}])
    assert of_all.context is not None and missing.context is not None
    np.testing.assert_array_equal(of_all.context["price"], missing.context["price"])
    assert (
        of_all.context["action"].tolist()[:29] + [0] == [*missing.context["action"]]
        and (of_all.context["action"] > 1).all()
    )
    vectors = [sj.user_vectors(model, each) for each in (of_all, missing)]
    same = (vectors[0] == vectors[1]).all(axis=1)
    assert same[:29].all() and not same[29]


def test_held_out_events_may_be_of_new_users_alone():
    """Of another user there are none. The inputs have a context, but not for the new user."""
    price = sj.data.DenseColumn(missing=0.5)
    schema = sj.EventSchema(
        "action", {"price": price}, context="price", labels="action"
    )
    data = sj.read_sequences(world(3), events=schema)
    model, _ = sj.build(sj.GRUConfig(max_length=4, width=4, blocks=1), data)
    shown, heldout = data.split_last()
    shown = shown.align_rows(["u0", "other"], missing="empty")
    heldout = heldout.align_rows(["u2", "other"], missing="empty")
    with pytest.warns(UserWarning, match="have a log loss, but no AUC"):
        found, same = (
            sj.evaluate(model, each, heldout, k=1, exclude=None)
            for each in (shown, shown.with_context({"price": 0.1}))
        )
    assert str(found) == str(same) and found["log_loss/action=buy"] > 0


def planned(users: int, seed: int = 0) -> tuple[pandas.DataFrame, Any]:
    """Draws steps of 1, 3, 5 or 7 items, which are followed in 9 of 10 cases; also returns the
    best possible predictions.
    """
    rng = np.random.default_rng(seed)
    first, hour, plan = (rng.integers(n, size=users) for n in (ITEMS, 2, 2))
    best = (first + 1 + 2 * hour + 4 * plan) % ITEMS
    other = rng.integers(ITEMS, size=users)
    then = np.where(rng.random(users) < 0.9, best, other)
    user = [f"u{seed}_{u}" for u in range(users)]
    parts = [
        pandas.DataFrame(
            {"user": user, "item": [f"i{i}" for i in item], "time": time, "hour": hours}
        )
        for time, (item, hours) in enumerate(((first, hour * 0), (then, hour)))
    ]
    people = {"user": user, "plan": np.array(["free", "paid"])[plan]}
    return pandas.concat(parts), (people, (then == best).mean())


PLANS = sj.EventSchema(ids={"plan": sj.data.VocabularyColumn()})


@pytest.mark.parametrize("name", MODELS)
def test_models_reach_the_bound_of_the_hour_and_the_plan(name):
    """Without them, a next item is one of four: .9 / 4 + .1 / 8."""
    config = dataclasses.replace(MODELS[name][0], max_length=2)
    schema = sj.EventSchema(ids={"hour": sj.data.HashedColumn(25)}, context=["hour"])
    table, (people, _) = planned(1500)
    users = sj.data.read_user_features(people, PLANS)
    data = sj.read_sequences(table, events=schema, users=users)
    assert data.users is not None
    table, (people, bound) = planned(3000, seed=1)
    users = sj.data.read_user_features(people, data.users)
    others = sj.read_sequences(table, features=data, events=data.events, users=users)
    shown, heldout = others.split_last()
    found = []
    for own in (lambda each: each, lambda e: e.without_events().with_users(None)):
        model, _ = trained(config, own(data), num_epochs=20)
        measured = sj.evaluate(
            model, own(shown), own(heldout), k=1, exclude=None, popularity=own(data)
        )
        found.append(measured["recall@1"])
    assert found[0] > bound - 0.01
    assert found[1] < 0.2375 + 0.03


def test_users_are_known_by_their_columns(tmp_path):
    plans = [
        {"user": f"u{u}", "plan": ["a", "b"][: u % 3], "age": None if u == 3 else u}
        for u in range(9)
    ]
    age = sj.data.DenseColumn(missing=7.0)
    schema = sj.EventSchema(
        ids={"plan": sj.data.VocabularyColumn()}, dense={"age": age}
    )
    users = sj.data.read_user_features(plans, schema)
    data = sj.read_sequences(world(10), events=SCHEMA, users=users)
    found = data.users
    assert found is not None and data.num_rows == 10
    row = {name: row for row, name in enumerate(data.row_names)}
    # Nothing is known of u9, nor of the age of u3.
    unknown, some = row["u9"], row["u2"]
    assert found["age"][[unknown, row["u3"], some]].tolist() == [7, 7, 2]
    assert found["plan"][[unknown, some]].tolist() == [[-1, -1], [2, 3]]
    more = data.align_rows(["u2", "new", "u1"], missing="empty")
    assert more.users is not None
    assert more.users["age"].tolist() == [2, 7, 1]
    assert more.users["plan"].tolist() == [[2, 3], [-1, -1], [2, -1]]
    for part in data.split_last():
        assert part.users is found
    config = sj.GRUConfig(max_length=4, width=4, blocks=1)
    model, optimizer = sj.build(config, data)
    sj.fit(model, optimizer, data, num_epochs=1)
    # An empty history has an answer by its user's columns alone.
    ranked = sj.recommend(model, more, k=3, exclude=None)
    other = more.with_users(
        sj.data.read_user_features([{"user": "new", "plan": "b", "age": 9}], found)
    )
    assert (
        sj.recommend(model, other, k=3, exclude=None).scores[1] != ranked.scores[1]
    ).all()
    # A new user of held-out data has its own columns there.
    shown = more.align_rows(["u2"])
    measured = sj.evaluate(
        model, shown, data.align_rows(["u2", "u1"]), k=1, exclude=None
    )
    assert measured["users"] == 2
    shown, heldout = data.split_last()
    how: dict[str, Any] = {"k": 3, "exclude": None}
    by_plan = sj.evaluate(model, shown, heldout, groups="plan", **how)
    for place, plan in enumerate("ab", 2):
        own = data.row_names[(found["plan"] == place).any(axis=1)]
        parts = (part.align_rows(own) for part in (shown, heldout))
        alone = sj.evaluate(model, *parts, popularity=None, **how)
        assert by_plan[f"ndcg@3[plan={plan}]"] == pytest.approx(alone["ndcg@3"])
        assert by_plan[f"entries[plan={plan}]"] == len(own)
    with pytest.raises(ValueError, match="groups='age' is no column of categories"):
        sj.evaluate(model, shown, heldout, groups="age", **how)
    less = heldout.without_events()
    with pytest.raises(ValueError, match='by="kinds" measures .* and these have none'):
        sj.evaluate(model, shown, less, groups="plan", by="kinds", **how)
    with pytest.raises(ValueError, match="of users none, but the model reads"):
        sj.recommend(model, data.with_users(None), k=2)
    plain, _ = sj.build(sj.GRUConfig(max_length=4, width=4), data.with_users(None))
    with pytest.raises(ValueError, match="of users .*, but the model reads none"):
        sj.recommend(plain, data, k=2)
    for saved in (data, data.without_events(), data.align_rows([])):
        saved.save(tmp_path / "data.parquet")
        loaded = sj.read_sequences(tmp_path / "data.parquet").users
        assert loaded is not None and saved.users is not None
        loaded.check_like(saved.users, "saved")
        jax.tree.map(np.testing.assert_array_equal, loaded.columns, saved.users.columns)
    sj.save_model(tmp_path / "saved", model, optimizer, data)
    saved = sj.Run.load(tmp_path / "saved").recommend(inputs=data, k=3)
    np.testing.assert_array_equal(
        saved.scores, sj.recommend(model, data, k=3, exclude="inputs").scores
    )
    for table, message in (
        ([*plans, plans[4]], "column 'user' has 'u4' twice"),
        ([{"user": None, "plan": "a", "age": 1}], "each user has a name"),
        ([{"user": "u1", "plan": "a"}], "age"),
    ):
        with pytest.raises(sj.data.DataError, match=message):
            sj.data.read_user_features(table, schema)
    with pytest.raises(ValueError, match="no kind, no context and"):
        sj.data.read_user_features(plans, SCHEMA)
    strict = sj.EventSchema(dense={"age": sj.data.DenseColumn()})
    with pytest.raises(ValueError, match="nothing is known of 1 users, and the column"):
        users = sj.data.read_user_features(plans[:3] + plans[4:], strict)
        sj.read_sequences(world(9), users=users)


def test_context_that_cannot_be_is_an_error():
    schema = dataclasses.replace(SCHEMA, context=["price"])
    data = sj.read_sequences(world(20), events=schema)
    model, _ = sj.build(sj.GRUConfig(max_length=4, width=4), data)
    plain = sj.read_sequences(world(20), events=SCHEMA)
    for context, message in (
        (None, "reads what is known of the event to come: .'price'.; give context"),
        ({"prise": 1}, "context has .'prise'., expected .'price'."),
        ({"price": [1]}, "context has 1 rows, but there are 20 histories"),
        ([{}], "context has 1 rows, but there are 20 histories"),
        ({"price": "dear"}, "'dear'"),
        ({"price": None}, "column 'price' is empty, null or NaN"),
        (pandas.DataFrame({"prise": [1] * 20}), "lack the columns .'price'."),
    ):
        with pytest.raises(ValueError, match=message):
            sj.recommend(model, data, k=2, context=context)
    shorter = {"price": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="20 rows, but the context 'price' has 3"):
        dataclasses.replace(data, context=shorter)
    with pytest.raises(ValueError, match=r"EventSchema\(context=...\)"):
        plain.with_context({"price": 1})
    with pytest.raises(ValueError, match="no columns of events, so nothing is known"):
        plain.without_events().with_context({"price": 1})
    with pytest.raises(ValueError, match="the context of the event to come is not kno"):
        sj.evaluate(model, data, data.without_events(), k=2)
    with pytest.raises(ValueError, match="but the model reads .* context=..price"):
        sj.recommend(model, plain, k=2)
    with pytest.raises(ValueError, match="context is for histories"):
        sparse = data.to_sparse()
        items, _ = sj.build(sj.NetworkConfig.autoencoder((4,)), sparse)
        sj.recommend(items, sparse, k=2, context={"price": 1})
    for wrong, message in (
        (["day"], "context names the columns .'day'."),
        (["price", "price"], "names a column twice"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SCHEMA, context=wrong)
    with pytest.raises(ValueError, match="may not begin with 'context/'"):
        sj.EventSchema(ids={"context/day": sj.data.HashedColumn(9)})


def test_whatever_does_not_read_columns_refuses_them(tmp_path):
    data = sj.read_sequences(world(20), events=SCHEMA)
    config = sj.GRUConfig(max_length=4, width=4)
    model, optimizer = sj.build(config, data)
    plain, of_plain = sj.build(config, data.without_events())
    with pytest.raises(
        ValueError, match="which the model does not read: make the model"
    ):
        sj.fit(plain, of_plain, data)
    with pytest.raises(
        ValueError, match="which the model does not read: make the model"
    ):
        sj.recommend(plain, data, k=2)
    for use in (
        lambda x: sj.fit(model, optimizer, x),
        lambda x: sj.recommend(model, x, k=2),
        lambda x: sj.evaluate(model, x, data, k=2),
    ):
        with pytest.raises(ValueError, match="but inputs has none; read the data with"):
            use(data.without_events())
    fewer = sj.EventSchema(kind="action")
    with pytest.raises(ValueError, match="but the model reads"):
        sj.recommend(model, sj.read_sequences(world(20), events=fewer), k=2)
    # The kinds of the model, of which the other one is more frequent.
    swapped = world(20)
    swapped["action"] = swapped.action.map({"buy": "view", "view": "buy"})
    with pytest.raises(ValueError, match="or their categories have other ids; read"):
        sj.recommend(model, sj.read_sequences(swapped, events=SCHEMA), k=2)
    sj.export_predictor(plain, tmp_path / "a.zip", names=data)
    with pytest.raises(
        ValueError, match="has the columns of events .*, but the predict"
    ):
        sj.load_predictor(tmp_path / "a.zip").recommend(data, k=2)
    data.without_events().save(tmp_path / "plain.parquet")
    scanned = sj.data.scan_sequences(tmp_path / "plain.parquet")
    with pytest.raises(ValueError, match="no columns of events, so there are no kinds"):
        sj.fit(plain, of_plain, scanned, targets="buy")
    with pytest.raises(NotImplementedError, match="scanned: give weights by the names"):
        sj.fit(plain, of_plain, scanned, weights=np.ones(scanned.num_entries))
    with pytest.raises(ValueError, match="no columns of events"):
        sj.fit(plain, of_plain, data.without_events(), targets="buy")
    sparse = data.to_sparse()
    items = sj.build(sj.NetworkConfig.autoencoder((4,)), sparse)
    for weights in ("price", {"buy": 1.0}):
        with pytest.raises(TypeError, match="are for histories: give one number"):
            sj.fit(*items, sparse, weights=weights)
    with pytest.raises(ValueError, match="name the kinds of events to predict"):
        sj.fit(model, optimizer, data, data.to_sparse())
