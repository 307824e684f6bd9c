"""Two runs combined to one model, compared with the click model on the joined table."""

import dataclasses
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from served import Client, listening

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data.files.name_index import NameTable
from sparsejax.data.files.names import as_names
from sparsejax.kinds.stages import Stages
from sparsejax.predictors.files import model_of
from sparsejax.predictors.signature import Stages as StatedStages
from sparsejax.predictors.stages import DENSE, IDS, Requests
from sparsejax.processors import usable
from sparsejax.serving.engine import Engine, Shape
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.questions import form_of
from sparsejax.serving.service import Service, Settings

WORDS, KEYS = sj.data.VocabularyColumn, sj.data.KeyColumn
ITEMS = [f"i{n}" for n in range(12)]
# An item without a row, and one that no run knows.
ABOUT = [
    {"item": name, "price": float(n), "tags": [f"t{n % 3}"] * (n % 3), "weight": 1.0}
    for n, name in enumerate(ITEMS[:-1])
] + [{"item": "other", "price": 3.0, "tags": ["t9"], "weight": 2.0}]
USERS = {"user": ["ann", "bob", "eve"], "age": [30.0, 40.0, None]}
COLUMNS: dict[str, Any] = {
    "item_columns": ABOUT,
    "user_columns": USERS,
    "request_columns": ["device"],
}


@functools.cache
def histories() -> sj.SequenceDataset:
    """Rows of 0 to 7 items, some of them twice."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "user": user,
            "item": rng.choice(ITEMS, n).tolist(),
            "time": [*range(n)],
            "action": "view",
        }
        for user, n in (("ann", 7), ("bob", 2), ("eve", 1), ("new", 4))
    ]
    names = np.array(ITEMS, np.dtypes.StringDType())
    return sj.read_sequences(rows, features=names, events=sj.EventSchema("action"))


@functools.cache
def retrieval(kind: str) -> sj.Run:
    data = histories()
    if kind == "items":
        config = sj.NetworkConfig.autoencoder(hidden=(3,))
        return sj.Run.train(data.to_sparse(), config=config, num_epochs=1, seed=1)
    if kind == "histories":
        data = data.without_events()
    config = sj.GRUConfig(max_length=4, width=4)
    return sj.Run.train(data, config=config, num_epochs=1, seed=1)


@functools.cache
def ranking(kind: str) -> sj.Run:
    rng = np.random.default_rng(1)
    rows = [
        {
            "click": n % 2,
            "item": ITEMS[rng.integers(10)],
            "had": rng.choice(ITEMS, n % 6).tolist(),
            "user": ("ann", "bob", "eve")[n % 3],
            "device": ("phone", "tablet")[n % 2],
            "tags": [f"t{m}" for m in range(n % 3)],
            "price": n / 7,
            "age": n / 3,
            "place": str(n % 3),
            "height": n % 3,
        }
        for n in range(60)
    ]
    dense = {name: sj.data.DenseColumn(missing=0.5) for name in ("age", "price")}
    ids = {"user": WORDS(), "had": WORDS(like="item"), "item": WORDS()}
    ids |= {"tags": WORDS(), "device": sj.data.HashedColumn(30)}
    if kind == "keys":
        del ids["had"]
        ids |= {"item": KEYS(), "device": KEYS()}
        config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
        options: dict[str, Any] = {"dynamic": 200}
    else:
        # Only training reads these, so neither a request nor an item has them.
        ids["place"] = WORDS(fixed="1")
        dense["height"] = sj.data.DenseColumn(fixed=0.25)
        config = sj.DINConfig(dim=4, length=3, attention=(3,), hidden=(4,))
        options = {}
        if kind == "sums":
            config = sj.WideDeepConfig(dim=4, hidden=(4,), combiner="mean")
    labels: Any = {"click": sj.data.LabelColumn()}
    if kind == "labels":
        labels["price"] = sj.data.LabelColumn(loss="squared")
        del dense["price"]
        config = sj.DCNConfig(dim=4, cross=1, hidden=(4,))
    data = sj.read_clicks(rows, sj.ClickSchema(labels=labels, dense=dense, ids=ids))
    options |= {"optimizer": "adagrad", "learning_rate": 0.03, "num_epochs": 1}
    return sj.Run.train(data, config=config, **options)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("items", "din"),
        ("histories", "sums"),
        ("events", "keys"),
        ("histories", "labels"),
    ],
)
def test_scores_are_the_probabilities_of_the_joined_table(first, second) -> None:
    one, other, data = retrieval(first), ranking(second), histories()
    factors = {"click": 2.0, "price": -0.5} if second == "labels" else None
    both = sj.TwoStage(one, other, candidates=5, rank_by=factors, **COLUMNS)
    device = ["phone", None, "desk", "tablet"]
    found = both.recommend(k=5, requests={"device": device})
    candidates = one.recommend(k=5).names()
    about = {each["item"]: each for each in ABOUT}
    ages = dict(zip(*USERS.values(), strict=True))
    names = [str(name) for name in data.row_names]
    for row, (user, wanted) in enumerate(zip(names, candidates, strict=True)):
        had = data.indices[data.indptr[row] : data.indptr[row + 1]]
        had = [ITEMS[n] for n in (np.unique(had) if first == "items" else had)]
        if second == "sums":
            had = had[-200:]
        records = [
            {
                "item": item,
                "user": user,
                "had": had,
                "device": device[row],
                "age": ages.get(user),
                "price": about.get(item, {}).get("price"),
                "tags": about.get(item, {}).get("tags"),
            }
            for item in wanted
        ]
        scores: Any = other.predict(records)
        if factors:
            scores = sum(scores[name] * factor for name, factor in factors.items())
        order = np.argsort(-scores, kind="stable")
        assert found.names()[row] == [wanted[n] for n in order]
        np.testing.assert_allclose(
            found.scores[row][: len(order)], scores[order], rtol=2e-6
        )


def test_lists_of_items_are_of_nobody_in_the_table_of_users() -> None:
    one, other = retrieval("items"), ranking("din")
    found = []
    for name in ("0", "nobody"):
        columns = COLUMNS | {"user_columns": {"user": [name], "age": [90.0]}}
        both = sj.TwoStage(one, other, candidates=5, **columns)
        ask: dict[str, Any] = {"k": 5, "requests": {"device": ["phone"]}}
        found.append(both.recommend(inputs=[["i1", "i2"]], **ask).scores)
    np.testing.assert_array_equal(found[0], found[1])


class ByValues(nnx.Module):
    """A model that ranks items by a row's values; negative values give NaN."""

    num_features = num_items = 9

    def top_k(self, x, k, *, exclude=None):
        scores = jnp.where(x.todense() < 0, jnp.nan, x.todense())
        if exclude is not None:
            scores = jnp.where(exclude.todense() > 0, -jnp.inf, scores)
        scores, ids = jax.lax.top_k(scores, k)
        return jnp.where(scores == -jnp.inf, -1, ids), scores


class ByPrice(nnx.Module):
    """A model that ranks candidates by one of their columns, and counts them."""

    counts: ClassVar[list[int]] = []

    def __call__(self, dense, batch):
        self.counts.append(len(dense))
        return -dense[:, 0]


def test_stages_of_awkward_rows() -> None:
    price = np.array([5, 3, 8, 1, 9, 2, 7, 4, 6], np.float32)
    items: Any = {"items": {DENSE: price[:, None]}, "requests": {}, "dense": [0]}
    model = Stages(ByValues(), ByPrice(), candidates=3, **items)
    values = np.arange(1.0, 28, dtype=np.float32).reshape(3, 9)
    values[1, 4] = -1
    x = {"inputs": sj.CSR.from_scipy(scipy.sparse.csr_array(values))}
    denied = sj.CSR.from_scipy(
        scipy.sparse.csr_array(np.array([[0] * 9] * 2 + [[0] + [1] * 8], np.float32))
    )
    ids, scores = model.top_k(x, 4, exclude=denied)
    np.testing.assert_array_equal(ids[::2], [[7, 8, 6, -1], [0, -1, -1, -1]])
    assert np.isnan(scores[1]).any() and np.isfinite(scores[0, :3]).all()
    # No column comes with requests, and the second stage ranks all items.
    ids, _ = model.alone("second").top_k(x, 11)
    np.testing.assert_array_equal(ids, [[*np.argsort(price), -1, -1]] * 3)
    lost = items | {"items": {DENSE: np.where(price == 9, np.nan, price)[:, None]}}
    found = Stages(ByValues(), ByPrice(), candidates=3, **lost).alone("second")
    assert np.isnan(found.top_k(x, 2)[1]).any(axis=1).all()
    many = {
        "inputs": sj.CSR.from_scipy(
            scipy.sparse.csr_array(np.ones((200, 9), np.float32))
        )
    }
    ByPrice.counts.clear()
    with jax.disable_jit():
        model.top_k(many, 3)
    assert sum(ByPrice.counts) == 200 * 3  # and no padding besides


def test_columns_beside_a_history_are_as_long() -> None:
    ids = {"had": WORDS(), "days": WORDS(), "device": KEYS()}
    lengths = {"had": 2, "days": 2, "device": 1}
    requests = Requests(
        feature_names=as_names(["a", "b"]),
        stages=StatedStages(history="had", lengths=lengths, beside={"days": "had"}),
        schema=sj.ClickSchema("click", ids=ids),
        vocabularies={"had": as_names(["a", "b"]), "days": as_names(["1", "2"])},
    )
    columns = {"days": [["1", "2", "2"], []], "device": ["x", "y"]}
    found = requests.arrays(columns, [["b", "a", "new"], []])
    np.testing.assert_array_equal(found[f"{IDS}had"], [[2, 1], [-1, -1]])
    np.testing.assert_array_equal(found[f"{IDS}days"], [[3, 3], [-1, -1]])
    with pytest.raises(ValueError, match="3 ids in 'had', but 2 in 'days'"):
        requests.arrays({**columns, "days": [["1", "2"], []]}, [["a", "b", "a"], []])
    stages = dataclasses.replace(requests.stages, beside={"days": "gone"})
    with pytest.raises(ValueError, match="no such vocabularies, lengths, histories"):
        dataclasses.replace(requests, stages=stages)


def _asked(port: int, tensors: dict, parameters: dict) -> tuple[int, dict]:
    """Sends tensors of one row; returns the status and the answer."""
    inputs = [
        {
            "name": name,
            "datatype": "FP32" if name == "age" else "BYTES",
            "shape": [len(data)],
            "data": data,
        }
        for name, data in tensors.items()
    ]
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    status, _, answer = Client(port).ask("POST", "/v2/models/shop/infer", body)
    return status, json.loads(answer)


def test_a_request_of_a_service_equals_the_call_in_python(tmp_path) -> None:
    both = sj.TwoStage(retrieval("histories"), ranking("din"), candidates=6, **COLUMNS)
    path = tmp_path / "shop.predictor"
    both.export(path, k=4, batch_size=1)
    predictor = sj.load_predictor(path)
    assert predictor.requests.columns == ["age", "user", "device"]
    columns = {"age": [30.0], "user": ["ann"], "device": ["phone"]}
    data = histories()
    had = data.feature_names[data.indices[: data.indptr[1]]].tolist()
    found = predictor.recommend_records({"items": [had], **columns}, k=3)
    ours = both.recommend(["ann"], k=3, requests={"user": ["ann"], "device": ["phone"]})
    assert predictor.names(found) == ours.names()
    np.testing.assert_allclose(found.scores, ours.scores, rtol=1e-6)
    assert not {*had} & {*ours.names()[0]}
    service = Service("shop", Settings(shapes=(Shape(1, 256),)))
    service.load(path)
    with listening(service) as port:
        status, answer = _asked(port, {"items": had, **columns}, {"k": 3})
        items, scores, *_ = (each["data"] for each in answer["outputs"])
        assert (status, [items]) == (200, ours.names())
        assert np.float32(scores).tobytes() == found.scores.tobytes()
        with ThreadPoolExecutor(4) as pool:  # two of them are on the device at a time
            asked = ({"items": had, **columns} for _ in range(8))
            found_again = pool.map(lambda each: _asked(port, each, {"k": 3}), asked)
            assert all(each == (200, answer) for each in found_again)
        for wrong, text in (
            ({"items": had}, "'age' is missing"),
            ({"items": ["i1", None], **columns}, "'items' is null"),
            ({"items": had, **columns, "age": [1.0, 2.0]}, "must be [1]"),
            ({"items": had, **columns, "mood": ["a"]}, "unknown input 'mood'"),
        ):
            status, answer = _asked(port, wrong, {})
            assert status == 422 and text in answer["error"], answer
        missing = {"items": had, **columns, "device": [None]}
        assert _asked(port, missing, {})[0] == 200
    service.close()
    assert Engine(predictor, [Shape(1, 256)]).queues == (len(usable()) > 1)
    empty = predictor.recommend_records(
        [{"items": [], "age": None, "user": None, "device": "x"}]
    )
    assert empty.ids.shape == (1, 4) and (empty.ids >= 0).all()
    with pytest.raises(ValueError, match="the records lack the columns"):
        predictor.recommend_records({"items": [["i1"]], "user": ["ann"]})
    with pytest.raises(ValueError, match="has no recommend_names"):
        predictor.recommend_names(["i1"])
    tables = {n: NameTable.of(some) for n, some in predictor.names_in_file.items()}
    first, *others = predictor.signature.inputs
    for name, text in (("x", "inputs of the first"), ("events/x", "than its schemas")):
        renamed = (dataclasses.replace(first, name=name), *others)
        with pytest.raises(ValueError, match=f"other .*{text}"):
            model_of(dataclasses.replace(predictor.signature, inputs=renamed), tables)
    tensors = {
        "items": Tensor("items", "BYTES", (6, 1), ["i1"] * 6),
        "age": Tensor("age", "FP32", (6, 1), np.ones(6, np.float32)),
        "user": Tensor("user", "BYTES", (1,), ["ann"]),
        "device": Tensor("device", "BYTES", (6,), [None] * 6),
    }
    form = form_of(predictor)
    assert form.question(Asked(None, {}, tensors), Limits()).num_rows == 6
    for wrong, text in (
        (Tensor("age", "FP32", (2, 3), np.ones(6, np.float32)), "must be"),
        (Tensor("user", "BYTES", (3,), ["ann"] * 3), "must be"),
        (Tensor("user", "BYTES", (1, 5000), ["ann"] * 5000), "5000 names in a row"),
    ):
        asked = Asked(None, {}, {**tensors, wrong.name: wrong})
        with pytest.raises(RefusedError, match=text):
            form.question(asked, Limits())


def test_each_column_comes_from_one_place() -> None:
    one, other = retrieval("items"), ranking("din")
    cases: Any = (
        ({"item_columns": None}, "'price' of the ranking model comes from nowhere"),
        ({"request_columns": ["device", "age"]}, "'age' .* from user_columns and from"),
        ({"request_columns": ["device", "mood"]}, "has no column 'mood'"),
        (
            {"history_as": "device"},
            "'device' .* from request_columns and from the history",
        ),
        ({"item_columns": ABOUT[-1:]}, "a row for none of 'i0', .* rows for 'other'"),
        (
            {
                "user_columns": {"user": ["ann"], "hat": [1]},
                "request_columns": ["device", "age"],
            },
            "user_columns has .'hat'., but the ranking model reads none of them",
        ),
        ({"history_as": "price"}, "among categories, .* has no column 'price'"),
        ({"item_as": "had"}, "has no column 'had', by whose names"),
        ({"lengths": {"item": 3}}, "lengths has"),
        ({"rank_by": "buy"}, "the ranking run has one label, 'click'"),
        ({"user_columns": {"user": ["ann", "ann"], "age": [1, 2]}}, "more than once"),
    )
    for changes, text in cases:
        with pytest.raises((ValueError, sj.DataError), match=text):
            sj.TwoStage(one, other, **{**COLUMNS, **changes}).recommend(
                requests={"device": ["a"] * 4}
            )
    both = sj.TwoStage(one, other, candidates=5, **COLUMNS)
    cases: Any = (
        ({"k": 6, "requests": {"device": ["a"] * 4}}, "first stage finds 5 candidates"),
        ({"k": 2, "context": {"hour": 9}}, "context is of no use for a model of items"),
        ({"k": 2}, "give requests="),
        ({"k": 2, "requests": {"device": ["a"] * 3}}, "has 3 rows for 4 rows"),
        (
            {"k": 2, "requests": {"user": ["zoe"], "device": ["a"]}},
            "a row for none of 'ann'",
        ),
        ({"k": 2, "requests": {"user": ["ann"], "mood": ["a"]}}, "lacks the columns"),
    )
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            both.recommend(**options)
    with pytest.raises(ValueError, match="factors are finite, and not 0"):
        factors = {"click": 1.0, "price": float("nan")}
        sj.TwoStage(one, ranking("labels"), rank_by=factors, **COLUMNS)
    with pytest.raises(ValueError, match="first stage is a run that ranks items"):
        sj.TwoStage(other, other)
    with pytest.raises(ValueError, match="second stage is a run of clicks"):
        sj.TwoStage(one, one)


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("retrieval", "run"),
        ("ranking", None),
        ("request_columns", "device"),
        ("lengths", {"had": 2.5}),
        ("lengths", {"had": 0}),
        ("lengths", [3]),
        ("rank_by", ["click"]),
        ("rank_by", {"click": "1"}),
    ],
)
def test_arguments_have_their_types(name: str, given: Any) -> None:
    options: Any = {"retrieval": retrieval("items"), "ranking": ranking("din")}
    with pytest.raises(TypeError, match=f"^{name} is a|^{name} is the name"):
        sj.TwoStage(**options | COLUMNS | {name: given})


def test_both_stages_find_more_than_each_alone() -> None:
    """The history tells the group of items, and the mood of the request tells which of them."""
    rng = np.random.default_rng(0)
    groups, size, users = 8, 8, 240
    kinds = {
        f"{g}-{n}": ("calm", "loud")[n % 2] for g in range(groups) for n in range(size)
    }
    shown, heldout, moods = [], [], []
    for n in range(users):
        items = [f"{n % groups}-{m}" for m in rng.permutation(size)]
        user, mood = f"u{n}", ("calm", "loud")[rng.integers(2)]
        wanted = next(item for item in items[4:] + items if kinds[item] == mood)
        seen = [item for item in items[:4] if item != wanted]
        shown += [{"user": user, "item": item} for item in seen]
        heldout.append({"user": user, "item": wanted})
        moods.append({"user": user, "mood": mood})
    data = sj.read(shown)
    config = sj.NetworkConfig.autoencoder(hidden=(16,))
    options: Any = {"optimizer": "adagrad", "learning_rate": 0.1, "seed": 0}
    one = sj.Run.train(data, config=config, num_epochs=20, batch_size=60, **options)
    names = [*kinds]
    pairs = [
        (names[n], mood) for n in rng.integers(0, 64, 400) for mood in ("calm", "loud")
    ]
    clicks = [
        {
            "click": int(kinds[item] == mood),
            "item": item,
            "mood": mood,
            "kind": kinds[item],
        }
        for item, mood in pairs
    ]
    ids = {"kind": WORDS(), "mood": WORDS()}
    config = sj.DeepFMConfig(dim=4, hidden=(8,))
    clicks = sj.read_clicks(clicks, sj.ClickSchema("click", ids=ids))
    other = sj.Run.train(clicks, config=config, num_epochs=20, batch_size=80, **options)
    about = {"item": names, "kind": [*kinds.values()]}
    both = sj.TwoStage(
        one, other, candidates=5, item_columns=about, request_columns=["mood"]
    )
    asked: Any = {"k": 2, "requests": moods, "ranking_alone": True}
    found = both.evaluate(sj.read(heldout, features=data), **asked)
    # At best the first of two of the right kind, of four or five of the group.
    assert found["retrieval_recall@5"] > 0.95
    assert found["recall@2"] > 0.9 and found["retrieval_recall@2"] < 0.6
    assert found["ranking_recall@2"] < 0.2
    for stage in ("retrieval", "ranking", "popularity"):
        assert found["ndcg@2"] > found[f"{stage}_ndcg@2"] + 0.2
    alone = one.evaluate(sj.read(heldout, features=data), k=2)
    assert alone["ndcg@2"] == pytest.approx(found["retrieval_ndcg@2"])


def test_commands_do_as_the_methods(tmp_path, capsys) -> None:
    one, other, data = retrieval("items"), ranking("din"), histories()
    files = {
        "shown.csv": "user,item\n"
        + "".join(
            f"{user},{ITEMS[n]}\n"
            for row, user in enumerate(data.row_names)
            for n in data.indices[data.indptr[row] : data.indptr[row + 1]]
        ),
        "held.csv": "user,item\nann,i1\nbob,i3\nnew,i9\n",
        "items.json": json.dumps(ABOUT),
        "users.csv": "user,age\nann,30\nbob,40\neve,\n",
        "asked.csv": "user,device\nann,phone\nnew,desk\nbob,\neve,tablet\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    shown, held, items, users, asked = (str(tmp_path / name) for name in files)
    second = ["--second-stage", str(other.directory), "--num-candidates", "6"]
    second += ["--item-columns", items, "--user-columns", users]
    second += ["--request-columns", "device"]
    run, requested = str(one.directory), ["--requests", asked]
    both = sj.TwoStage(one, other, candidates=6, **COLUMNS)

    def done(*words: str) -> str:
        assert main([*words, *second]) == 0
        return capsys.readouterr().out

    said = done("evaluate", run, shown, held, "--k", "2", "--ranking-alone", *requested)
    options: Any = {"inputs": shown, "requests": asked, "k": 2}
    wanted = both.evaluate(held, ranking_alone=True, **options)
    assert json.loads(said.splitlines()[-1]) == pytest.approx(wanted)
    assert "retrieval     ranking" in said
    out = tmp_path / "out.csv"
    done("predict", run, shown, "--out", str(out), "--k", "2", *requested)
    found = both.recommend(inputs=shown, requests=asked, k=2)
    rows = [line.split(",") for line in out.read_text().splitlines()[1:]]
    assert [row[1] for row in rows] == [name for row in found.names() for name in row]
    path = tmp_path / "shop.predictor"
    done("export", run, str(path), "--k", "3", "--batch-size", "1")
    predictor = sj.load_predictor(path)
    assert (predictor.k, predictor.num_items) == (3, len(ITEMS))
    for flag, text in (
        (["--baselines"], "--baselines is of no use with --second-stage"),
        (["--requests", items, "--k", "2"], "lacks the columns ['device']"),
        (["--mesh", "data=1,model=1"], "--mesh is of no use with --second-stage"),
    ):
        words = [*("evaluate", run, shown, held, *second), *flag]
        assert main(words) != 0
        assert text in capsys.readouterr().err
    assert main(["predict", run, shown, "--out", str(out), "--parts", "2", *second])
    assert "--item-columns does not go with --parts" in capsys.readouterr().err
