"""Predictors and services of histories whose events have columns."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from served import Client, listening, tensor

import sparsejax as sj
from sparsejax.data import DataError, DenseColumn, HashedColumn, VocabularyColumn
from sparsejax.serving.engine import Shape
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.questions import form_of
from sparsejax.serving.service import Service, Settings

SCHEMA = sj.EventSchema(
    kind="action",
    dense={"price": DenseColumn(log1p=True, missing=0.0)},
    ids={"tags": VocabularyColumn(), "hour": HashedColumn(25)},
    context=["hour"],
)


def events(users: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "user": f"u{user}",
            "item": f"i{rng.integers(5)}",
            "time": int(time),
            "action": ["view", "buy"][rng.integers(2)],
            "price": None if rng.random() < 0.2 else float(rng.random()),
            "tags": [f"t{tag}" for tag in rng.integers(5, size=rng.integers(4))],
            "hour": int(rng.integers(24)),
        }
        for user in range(users)
        for time in range(1 + user % 7)
    ]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model that reads times, its data, and the file of its predictor."""
    data = sj.read_sequences(events(), events=SCHEMA)
    config = sj.HSTUConfig(max_length=4, width=8, blocks=1, heads=2)
    made = sj.build(config, data, sj.optimizers.sgd(0.1))
    model: Any = made[0]
    for table in [*model.events.tables, model.events.numbers, *model.context.tables]:
        table[...] *= 30
    model.eval()
    path = tmp_path_factory.mktemp("events") / "shop.predictor"
    sj.export_predictor(model, path, k=5, names=data, batch_size=1)
    return model, data, path


def requested(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each user in the form of a request."""
    users = dict.fromkeys(row["user"] for row in rows)
    return [[row for row in rows if row["user"] == user] for user in users]


def test_a_predictor_recommends_as_its_model(given):
    model, data, path = given
    predictor = sj.load_predictor(path)
    hours = np.arange(9) * 2
    shown = data.with_context({"hour": hours})
    expected = sj.recommend(model, shown, 5, exclude=None, batch_size=1)
    found = predictor.recommend(shown)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    assert predictor.names(found) == expected.names(data)
    # By names, with other keys, and with columns that an event lacks: they are missing.
    lists = requested(events())
    context = {"hour": hours.tolist()}
    names = predictor.recommend_names(lists, context=context, exclude_seen=False)
    assert names == expected.names(data)
    one = predictor.recommend_names(lists[5], context={"hour": 10}, exclude_seen=False)
    assert one == names[5]
    other = predictor.recommend_names(lists[5], context={"hour": 3}, exclude_seen=False)
    assert other != names[5]
    later = events(seed=1)
    assert predictor.events is not None
    read = sj.read_sequences(
        later, features=predictor.items, events=predictor.events
    ).with_context({"hour": 7})
    found = predictor.recommend_names(
        requested(later), context={"hour": 7}, exclude_seen=False
    )
    assert found == predictor.names(predictor.recommend(read))


def test_unknown_items_take_their_columns_with_them(given):
    predictor = sj.load_predictor(given[2])
    history = requested(events())[6]
    stranger = history[0] | {"item": "nosuch", "price": 1e9}
    names = predictor.recommend_names(history, context={"hour": 1})
    assert names == predictor.recommend_names(
        [history[0], stranger, *history[1:]], context={"hour": 1}
    )


def test_a_list_that_is_missing_is_empty_also_where_there_is_no_list(given):
    predictor = sj.load_predictor(given[2])
    found = []
    for tags in (None, []):
        rows = [row | {"tags": tags} for row in events()]
        data = sj.read_sequences(
            rows, features=predictor.items, events=predictor.events
        )
        found.append(predictor.recommend(data.with_context({"hour": 7})).scores)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.usefixtures("wrong_types")
def test_wrong_requests_are_errors(given):
    model, data, path = given
    predictor = sj.load_predictor(path)
    [history] = requested(events(1))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (["i1"], TypeError, "an event is an object"),
        ([{"action": "buy"}], ValueError, "an event has no item"),
        ([history[0], "i1"], TypeError, "an event is an object"),
        ([history[0] | {"price": "much"}], DataError, "'price'"),
        ([history[0] | {"time": None}], ValueError, "times are finite"),
    ]
    for asked, error, message in wrong:
        with pytest.raises(error, match=message):
            predictor.recommend_names(asked, context={"hour": 1})
    with pytest.raises(ValueError, match="inputs has the columns of events none, but"):
        predictor.recommend(data.without_events())
    with pytest.raises(ValueError, match="known of the event to come"):
        predictor.recommend(data)
    with pytest.raises(ValueError, match="give names=train, the data"):
        sj.export_predictor(model, "x.predictor", names=data.feature_names)


def test_a_service_answers_as_the_predictor(given):
    predictor = sj.load_predictor(given[2])
    lists = requested(events())[4:7]
    flat = [event for history in lists for event in history]

    tags = [each["tags"] + [""] * (3 - len(each["tags"])) for each in flat]
    inputs = [
        tensor("items", "BYTES", [each["item"] for each in flat]),
        tensor("lengths", "INT32", [len(each) for each in lists]),
        tensor("times", "FP64", [each["time"] for each in flat]),
        tensor("events/action", "BYTES", [each["action"] for each in flat]),
        tensor("events/price", "FP32", [each["price"] for each in flat]),
        tensor("events/hour", "BYTES", [str(each["hour"]) for each in flat]),
        tensor("events/tags", "BYTES", tags, [len(flat), 3]),
        tensor("context/hour", "BYTES", ["4", "5", "6"]),
    ]
    context = {"hour": [4, 5, 6]}
    service = Service("shop", Settings(shapes=(Shape(1, 64),)))
    service.load(given[2])
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        asked = {"parameters": {"k": 3, "exclude_seen": False}, "model": "shop"}
        status, found = client.infer(*inputs, **asked)
        assert status == 200, found
        expected = predictor.recommend_names(
            lists, k=3, context=context, exclude_seen=False
        )
        assert np.reshape(found["items"]["data"], (3, 3)).tolist() == expected
        assert found["unknown"]["data"] == [0, 0, 0]
        others = [*inputs]  # a kind that is new
        others[3] = tensor(
            "events/action", "BYTES", ["returned", *inputs[3]["data"][1:]]
        )
        status, found = client.infer(*others, **asked)
        assert status == 200 and found["unknown"]["data"] == [1, 0, 0]
        status, error = client.infer(*inputs[:4], *inputs[5:], **asked)
        assert status == 422 and "lack the columns ['price']" in error
        wrong = tensor("events/price", "FP32", [1.0])
        status, error = client.infer(*inputs[:4], wrong, *inputs[5:], **asked)
        assert status == 422 and "must have the shape [18]" in error
        wrong = tensor("events/hour", "INT32", [[9, 10]] * 18, [18, 2])
        status, error = client.infer(*inputs[:5], wrong, *inputs[6:], **asked)
        assert status == 422 and "must have datatype BYTES, as empty" in error


def test_a_predictor_and_its_service_rank_by_a_label(tmp_path):
    price = {"price": DenseColumn(missing=0.0)}
    schema = sj.EventSchema(kind="action", dense=price, labels=["action", "price"])
    data, path = sj.read_sequences(events(), events=schema), tmp_path / "shop.predictor"
    config = sj.GRUConfig(max_length=4, width=8, blocks=1)
    model: Any = sj.build(config, data, sj.optimizers.sgd(0.1))[0]
    for table in [model.output.kernel, model.next_event.scores.kernel]:
        table[...] *= 30
    model.eval()
    how = {"k": 3, "names": data, "batch_size": 1}
    with pytest.raises(ValueError, match="these are 'buy', 'view', 'price'"):
        sj.export_predictor(model, path, rank_by="bought", **how)
    sj.export_predictor(model, path, rank_by="buy", **how)
    expected = sj.recommend(model, data, 3, exclude=None, rank_by="buy")
    plain = sj.recommend(model, data, 3, exclude=None)
    assert (expected.ids != plain.ids).any()
    predictor = sj.load_predictor(path)
    found = predictor.recommend(data)
    np.testing.assert_array_equal(found.ids, expected.ids)
    for name in ("scores", "values"):
        x, y = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    row = list(data.row_names).index("u6")
    history = requested(events())[6]
    inputs = [
        tensor("items", "BYTES", [each["item"] for each in history]),
        tensor("events/action", "BYTES", [each["action"] for each in history]),
        tensor("events/price", "FP32", [each["price"] for each in history]),
    ]
    service = Service("shop", Settings(shapes=(Shape(1, 64),)))
    service.load(path)
    with contextlib.closing(service), listening(service) as port:
        asked = {"parameters": {"k": 2, "exclude_seen": False}, "model": "shop"}
        client = Client(port)
        status, answer = client.infer(*inputs, **asked)
        assert status == 200, answer
        best = expected.names(data)[row][0]
        # One item is left, in an answer whose rows have one length.
        others = [name for name in data.feature_names if name != best]
        inputs = [each | {"shape": [1, *each["shape"]]} for each in inputs]
        inputs.append(tensor("exclude", "BYTES", others, [1, len(others)]))
        status, padded = client.infer(*inputs, **asked)
    assert status == 200, padded
    assert padded["items"]["data"] == [best, ""] and padded["lengths"]["data"] == [1]
    assert padded["scores"]["data"][1] == np.finfo(np.float32).min
    assert padded["values"]["data"] == [answer["values"]["data"][0], 0]
    assert answer["items"]["data"] == expected.names(data)[row][:2]
    for name in ("scores", "values"):
        wanted = getattr(expected, name)[row, :2]
        np.testing.assert_allclose(answer[name]["data"], wanted, rtol=1e-4, atol=1e-5)


PEOPLE = [
    {"user": f"u{u}", "plan": "ab"[u % 2], "likes": ["x", "y"][: u % 3], "age": u}
    for u in range(9)
]


@pytest.fixture(scope="module")
def of_users(tmp_path_factory):
    """A model that reads user columns and no event columns, its data, and its predictor's file."""
    ids = {"plan": VocabularyColumn(), "likes": VocabularyColumn()}
    age = DenseColumn(log1p=True, missing=0.0)
    users = sj.data.read_user_features(
        PEOPLE, sj.EventSchema(dense={"age": age}, ids=ids)
    )
    data = sj.read_sequences(events(), users=users)
    config = sj.GRUConfig(max_length=4, width=8, blocks=1)
    made = sj.build(config, data, sj.optimizers.sgd(0.1))
    model: Any = made[0]
    for table in [*model.users.tables, model.users.numbers]:
        table[...] *= 30
    model.eval()
    path = tmp_path_factory.mktemp("users") / "people.predictor"
    sj.export_predictor(model, path, k=5, names=data, batch_size=1)
    return model, data, path


def test_a_request_has_the_columns_of_its_users(of_users):
    model, data, path = of_users
    predictor = sj.load_predictor(path)
    expected = sj.recommend(model, data, 5, exclude=None, batch_size=1)
    found = predictor.recommend(data)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    names, lists = predictor.names(found), requested(events())
    how: dict[str, Any] = {"exclude_seen": False}
    with pytest.raises(ValueError, match="fall within a history: give the oldest"):
        predictor.recommend_names(
            [{"item": "i1", "time": 2}, {"item": "i2", "time": 1}]
        )
    # Events may be objects also where no columns are read, and other keys are not read.
    for histories in (lists, [[e["item"] for e in each] for each in lists]):
        again = predictor.recommend_names(histories, users=records(PEOPLE), **how)
        assert again == names
    other = [dict(each) for each in records(PEOPLE)]
    other[3]["plan"] = "a"
    changed = predictor.recommend_names(lists, users=other, **how)
    assert [r for r in range(9) if changed[r] != names[r]] == [3]
    # Of a user of whom nothing is known, all columns are missing.
    nothing = predictor.recommend_names(lists, **how)
    assert nothing == predictor.recommend_names(lists, users={"plan": None}, **how)
    assert nothing != names
    assert predictor.users is not None
    read = sj.data.read_user_features(PEOPLE, predictor.users)
    later = sj.read_sequences(events(), features=predictor.items, users=read)
    assert predictor.names(predictor.recommend(later)) == names
    with pytest.raises(ValueError, match="columns of users none, but the predictor"):
        predictor.recommend(data.with_users(None))
    with pytest.raises(ValueError, match="reads no column 'users/age2'"):
        predictor.recommend_names(lists, users={"age2": 3})


def records(people: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{n: v for n, v in each.items() if n != "user"} for each in people]


def test_a_service_takes_columns_of_users_or_looks_them_up(of_users, tmp_path):
    predictor, lists = sj.load_predictor(of_users[2]), requested(events())[3:6]
    table = tmp_path / "people.jsonl"
    table.write_text("".join(json.dumps(each) + "\n" for each in PEOPLE))
    service = Service(
        "shop", Settings(shapes=(Shape(1, 64),), user_features=str(table))
    )
    service.prepare()
    service.load(of_users[2])
    likes = [[*PEOPLE[u]["likes"], "", ""][:2] for u in (3, 4, 5)]
    items = [
        tensor("items", "BYTES", [each["item"] for one in lists for each in one]),
        tensor("lengths", "INT32", [len(each) for each in lists]),
    ]
    columns = [
        tensor("users/age", "FP32", [3.0, 4.0, 5.0]),
        tensor("users/plan", "BYTES", ["b", "a", "b"]),
        tensor("users/likes", "BYTES", likes, [3, 2]),
    ]
    named = tensor("users", "BYTES", ["u3", "u4", "nosuch"])
    expected = predictor.recommend_names(
        lists, users=records(PEOPLE[3:6]), exclude_seen=False
    )
    nothing = predictor.recommend_names(lists, exclude_seen=False)
    other = [each | {"plan": "gold"} for each in records(PEOPLE[3:6])]
    gold = predictor.recommend_names(lists, users=other, exclude_seen=False)
    plans = tensor("users/plan", "BYTES", ["gold"] * 3)
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)

        def answers(*inputs) -> tuple[list[list[str]], Any]:
            asked = {"parameters": {"exclude_seen": False}, "model": "shop"}
            status, found = client.infer(*items, *inputs, **asked)
            assert status == 200, found
            return np.reshape(found["items"]["data"], (3, 5)).tolist(), found

        assert answers(*columns)[0] == expected
        by_name, found = answers(named)
        assert by_name == [*expected[:2], nothing[2]]
        assert found["unknown_users"]["data"] == [0, 0, 1]
        replaced, found = answers(named, plans)  # the request counts
        assert replaced[:2] == gold[:2] and found["unknown"]["data"] == [1, 1, 1]
        assert answers()[0] == nothing
    # A number without one for missing values has to come with each request.
    strict = sj.EventSchema(dense={"age": DenseColumn()})
    users = sj.data.read_user_features(PEOPLE, strict)
    data = of_users[1].with_users(users)
    model, _ = sj.build(sj.GRUConfig(max_length=4, width=8), data)
    sj.export_predictor(model, tmp_path / "strict", k=2, names=data)
    loaded = sj.load_predictor(tmp_path / "strict")
    assert "users/age" in [each.name for each in form_of(loaded).inputs]
    with pytest.raises(ValueError, match="nothing is known of 1 users"):
        loaded.recommend_names(["i1"])
    form = form_of(loaded, user_features=str(table))
    asked = {
        "items": Tensor("items", "BYTES", (1, 1), ["i1"]),
        "users": Tensor("users", "BYTES", (1,), ["nosuch"]),
    }
    with pytest.raises(RefusedError, match="nothing is known of 1 users"):
        form.question(Asked(None, {}, asked), Limits())
    asked["users/age"] = Tensor("users/age", "FP32", (1,), np.array([3.0]))
    assert form.question(Asked(None, {}, asked), Limits()).num_rows == 1
    plain = Service("shop", Settings(user_features=str(table)))
    with pytest.raises(ValueError, match="reads no columns of users; leave"):
        data = of_users[1].with_users(None)
        model, _ = sj.build(sj.GRUConfig(max_length=4, width=8), data)
        sj.export_predictor(model, tmp_path / "plain", k=2, names=data)
        plain.load(tmp_path / "plain")
