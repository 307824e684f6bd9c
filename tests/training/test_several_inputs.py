"""Models with several inputs by name: rows are joined, in one training step and one ranking."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.data.reading.sources import Inputs, features_of
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.dispatch import epoch_order

ROWS, ITEMS, WORDS, ITEMS_OUT = 100, 30, 20, 25
NAMES = [f"user{r}" for r in range(ROWS)]
RATE = 0.05


class Several(nnx.Module):
    """A model that is linear in all inputs, so that NumPy can train it, too."""

    def __init__(self, rngs: nnx.Rngs):
        self.history = sj.SparseLinear(ITEMS, 4, use_bias=False, rngs=rngs)
        self.words = sj.SparseLinear(WORDS, 4, use_bias=False, rngs=rngs)
        self.profile = nnx.Linear(6, 4, use_bias=False, rngs=rngs)
        self.country = nnx.Embed(3, 4, rngs=rngs)
        self.output = sj.SparseOutput(4, ITEMS_OUT, use_bias=False, rngs=rngs)
        self.loss_rule = sj.losses.get("l2_loss")

    @property
    def num_features(self):
        country = jax.ShapeDtypeStruct((), jnp.int32)  # a tuple would mean float32
        return {"history": ITEMS, "words": WORDS, "profile": (2, 3), "country": country}

    @property
    def num_items(self):
        return ITEMS_OUT

    def encode(self, x, *, deterministic=None):
        profile = x["profile"].reshape(-1, 6)
        h = self.history(x["history"]) + self.words(x["words"])
        return h + self.profile(profile) + self.country(x["country"])

    def loss(self, x, labels, *, weights=None):
        h = self.encode(x)
        return self.output.loss(h, labels, loss=self.loss_rule, weights=weights)

    def top_k(self, x, k, *, exclude=None):
        return self.output.top_k(self.encode(x), k, exclude=exclude)

    def item_scores(self, x, ids):
        return self.output.item_scores(self.encode(x), ids)


def sparse(columns: int, density: float, seed: int) -> sj.SparseDataset:
    rng = np.random.default_rng(seed)
    matrix = scipy.sparse.csr_array(rng.random((ROWS, columns)) < density)
    return sj.SparseDataset.from_scipy(matrix, row_names=NAMES)


def sources() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "history": sparse(ITEMS, 0.1, 1),
        "words": sparse(WORDS, 0.2, 2),
        "profile": sj.data.DenseDataset(rng.normal(size=(ROWS, 2, 3)), NAMES),
        "country": sj.data.DenseDataset(rng.integers(0, 3, ROWS), NAMES),
    }


TARGETS = sparse(ITEMS_OUT, 0.15, 3)

# Random entries are held out and excluded at once.
REPEATS = pytest.mark.filterwarnings("ignore:.*already have them")


def on(shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def build(rule=None):
    model = Several(nnx.Rngs(0))
    return model, sj.Optimizer(model, rule or sj.optimizers.sgd(RATE))


def trained(inputs=None, *, shape=None, targets: Any = TARGETS, **options):
    """Trains; returns the model, its history without speeds, and all arrays of model and
    optimizer.
    """
    with on(shape):
        model, optimizer = build()
        settings: dict[str, Any] = {"batch_size": 64, "num_epochs": 2} | options
        inputs = sources() if inputs is None else inputs
        history = sj.fit(model, optimizer, inputs, targets, **settings)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    for entry in history:
        del entry["examples_per_second"]
    return model, history, {name: np.asarray(a) for name, a in arrays.items()}


@pytest.fixture(scope="module")
def expected():
    return trained()


def same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


def dense(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """All inputs in float64; a country as an indicator."""
    return {
        "history": inputs["history"].to_scipy().toarray().astype(np.float64),
        "words": inputs["words"].to_scipy().toarray().astype(np.float64),
        "profile": inputs["profile"].values.reshape(-1, 6).astype(np.float64),
        "country": np.eye(3)[inputs["country"].values],
    }


def weights_of(model: Several) -> tuple[dict[str, np.ndarray], np.ndarray]:
    layers = {
        "history": model.history.kernel[:ITEMS],
        "words": model.words.kernel[:WORDS],
        "profile": model.profile.kernel[...],
        "country": model.country.embedding[...],
    }
    kernel = np.asarray(model.output.kernel[:ITEMS_OUT], np.float64)
    return {n: np.asarray(w, np.float64) for n, w in layers.items()}, kernel


def test_trains_as_numpy_does(expected):
    model, history, _ = expected
    x, y = dense(sources()), TARGETS.to_scipy().toarray().astype(np.float64)
    layers, kernel = weights_of(build()[0])
    for epoch in range(2):
        losses = []
        order = np.asarray(epoch_order(jax.random.key(0), epoch, ROWS, 64, 1))
        for drawn in order.reshape(len(order), -1):
            rows = drawn[drawn >= 0]
            h = sum(x[name][rows] @ w for name, w in layers.items())
            error = h @ kernel.T - y[rows]
            losses.append((error**2).sum() / 2)
            back = error @ kernel / len(rows)
            kernel = kernel - RATE * error.T @ h / len(rows)
            for name in layers:
                layers[name] = layers[name] - RATE * x[name][rows].T @ back
        np.testing.assert_allclose(history[epoch]["loss"], sum(losses) / ROWS, 1e-5)
    found, found_kernel = weights_of(model)
    np.testing.assert_allclose(found_kernel, kernel, rtol=1e-4, atol=1e-5)
    for name, w in layers.items():
        np.testing.assert_allclose(found[name], w, rtol=1e-4, atol=1e-5, err_msg=name)


def test_rows_are_brought_together(expected):
    inputs = sources()
    turned = np.random.default_rng(5).permutation(ROWS)
    names = [NAMES[r] for r in turned]
    # In other orders, with rows too many, by position; and the targets as an input.
    words = inputs["words"].align_rows([*names, "nobody"], missing="empty")
    profile = inputs["profile"].align_rows(["nobody", *names], fill=7)
    country = jnp.asarray(inputs["country"].values)
    assert words.num_rows == profile.num_rows == ROWS + 1
    again = {
        "country": country,
        "history": inputs["history"],
        "words": words,
        "profile": profile,
    }
    targets = TARGETS.align_rows(names)
    _, history, arrays = trained(again, targets=targets)
    assert history == expected[1]
    assert same_bits(arrays, expected[2])

    shown = Inputs.of({"first": np.zeros((ROWS, 1))} | again)
    assert shown.rows.row_names is inputs["history"].row_names
    np.testing.assert_array_equal(
        shown.parts["profile"].matrix, inputs["profile"].values
    )


def test_a_mesh_trains_and_ranks_as_one_device_does(expected):
    options = {"exclude": None, "popularity": None, "k": 5, "batch_size": 64}
    model, history, arrays = trained(shape=(2, 4))
    for ours, theirs in zip(history, expected[1], strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[2][name], rtol=1e-3, atol=1e-5)
    with on((2, 4)):
        found = sj.recommend(model, sources(), 5, exclude=None)
        measured = sj.evaluate(model, sources(), TARGETS, **options)
        vectors = sj.user_vectors(model, sources(), batch_size=64)
    on_one = expected[0]
    theirs = sj.recommend(on_one, sources(), 5, exclude=None)
    np.testing.assert_allclose(found.scores, theirs.scores, rtol=1e-3, atol=1e-5)
    assert measured == pytest.approx(
        sj.evaluate(on_one, sources(), TARGETS, **options), abs=0.01
    )
    np.testing.assert_allclose(
        vectors, sj.user_vectors(on_one, sources()), rtol=1e-3, atol=1e-5
    )


def test_resumes_bit_for_bit(tmp_path, expected):
    trained(num_epochs=1, checkpoint_dir=tmp_path)
    turned = dict(reversed(sources().items()))
    _, history, arrays = trained(turned, checkpoint_dir=tmp_path, resume=True)
    assert history == expected[1] and same_bits(arrays, expected[2])
    other = sources() | {"country": np.zeros(ROWS, int)}
    with pytest.raises(ValueError, match="cannot resume with other data"):
        trained(other, checkpoint_dir=tmp_path, resume=True)


@REPEATS
def test_other_ways_to_train(expected):
    _, history, arrays = trained(fused=True)
    np.testing.assert_allclose(history[1]["loss"], expected[1][1]["loss"], rtol=1e-5)
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[2][name], rtol=1e-3, atol=1e-5)
    # Targets that are an input, as the same data given twice.
    inputs = sources() | {"history": sparse(ITEMS, 0.1, 1), "seen": TARGETS}

    class WithTargets(Several):
        @property
        def num_features(self):
            return {**super().num_features, "seen": ITEMS_OUT}

    losses = []
    for targets in ("seen", TARGETS):
        model = WithTargets(nnx.Rngs(0))
        optimizer = sj.Optimizer(model, sj.optimizers.sgd(RATE))
        history = sj.fit(
            model,
            optimizer,
            inputs,
            targets,
            batch_size=64,
            num_epochs=1,
            weights=np.arange(ROWS),
            validation=sparse(ITEMS_OUT, 0.05, 9),
        )
        losses.append({n: v for n, v in history[0].items() if "second" not in n})
    assert losses[0] == losses[1] and "recall@20" in losses[0]


def test_entries_sorted_ahead_train_the_same(expected, monkeypatch):
    monkeypatch.setattr(dispatch, "sorts_ahead", lambda: True)
    _, _, arrays = trained()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[2][name], rtol=1e-3, atol=1e-5)


@REPEATS
def test_ranks_as_numpy_does(expected):
    model = expected[0]
    layers, kernel = weights_of(model)
    x = dense(sources())
    h = sum(x[name] @ w for name, w in layers.items())
    np.testing.assert_allclose(
        sj.user_vectors(model, sources(), batch_size=32), h, rtol=1e-4, atol=1e-5
    )
    scores = h @ kernel.T
    np.testing.assert_allclose(
        sj.recommend(model, sources(), ITEMS_OUT, batch_size=48, exclude=None).scores,
        -np.sort(-scores, axis=1),
        rtol=1e-4,
        atol=1e-5,
    )
    seen = TARGETS.to_scipy().toarray() != 0
    left = np.where(seen, -np.inf, scores)
    best = np.argsort(-left, axis=1, kind="stable")[:, :3]
    found = sj.recommend(model, sources(), 3, exclude=TARGETS)
    np.testing.assert_array_equal(found.ids, best)

    heldout = sparse(ITEMS_OUT, 0.1, 11)
    wanted = heldout.to_scipy().toarray() != 0
    users = wanted.any(axis=1)
    hits = np.take_along_axis(wanted, best, axis=1).sum(axis=1)
    recall = np.mean(hits[users] / wanted[users].sum(axis=1))
    turned = heldout.align_rows(NAMES[::-1])
    measured = sj.evaluate(
        model, sources(), turned, k=3, exclude=TARGETS, popularity=TARGETS
    )
    assert measured["recall@3"] == pytest.approx(recall, rel=1e-6)
    assert measured["users"] == users.sum() and "popularity_recall@3" in measured


@REPEATS
def test_an_input_by_name():
    class Seen(nnx.Module):
        """A model that scores the highest item of the history."""

        num_items = ITEMS

        @property
        def num_features(self):
            return {"history": ITEMS, "offset": ()}

        def top_k(self, x, k, *, exclude=None):
            scores = x["history"].todense() + x["offset"][:, None]
            kernel, bias = jnp.eye(ITEMS), jnp.zeros(ITEMS)
            return sj.top_k(scores, kernel, k, bias=bias, exclude=exclude)

    history = sparse(ITEMS, 0.1, 1)
    inputs = {"offset": np.arange(ROWS), "history": history}
    model = Seen()
    by_name = sj.recommend(model, inputs, 4, exclude="history")
    given = sj.recommend(model, inputs, 4, exclude=history)
    np.testing.assert_array_equal(by_name.ids, given.ids)
    assert (by_name.scores == np.arange(ROWS)[:, None]).all()  # of nothing it has
    heldout = sparse(ITEMS, 0.1, 4)
    named = {"exclude": "history", "popularity": "history"}
    same = {"exclude": history, "popularity": history}
    assert sj.evaluate(model, inputs, heldout, **named) == sj.evaluate(
        model, inputs, heldout, **same
    )
    with pytest.raises(ValueError, match="exclude is data or the name of a sparse"):
        sj.evaluate(model, inputs, heldout)
    with pytest.raises(ValueError, match="split one of them by"):
        sj.evaluate(model, inputs, fold_in=0.5, **named)


def test_what_several_inputs_refuse(tmp_path):
    inputs = sources()
    short = sj.data.DenseDataset(np.zeros((5, 2, 3)), NAMES[:5])
    inputs["words"].save(tmp_path / "words.parquet")
    scanned = sj.data.scan_parquet(tmp_path / "words.parquet")
    wrong = np.zeros((ROWS, 2, 3))
    wrong[7, 1, 2] = np.nan
    many = "give one source without a name; inputs has the names 'history'"
    cases: list[tuple[Any, str]] = [
        ({}, "inputs is empty"),
        (inputs["history"], "the model has the inputs 'history', 'words', .*by name"),
        ({"history": inputs["history"]}, "names 'history' but the model has the inp"),
        (inputs | {"age": np.zeros(ROWS)}, "names 'history', .*'age' but the model"),
        (inputs | {"profile": np.zeros((9, 2, 3))}, "100 rows but inputs\\['profile'"),
        (inputs | {"profile": short}, "95 of 100 rows of inputs.'history'.*'profile'"),
        (inputs | {"profile": wrong}, r"inputs\['profile'\]\[7, 1, 2\] is nan"),
        (inputs | {"profile": np.zeros((ROWS, 6))}, r"shape \(6,\) but .* \(2, 3\)"),
        (inputs | {"profile": inputs["words"]}, "is sparse but the model takes dense"),
        (inputs | {"words": np.zeros((ROWS, 20))}, "dense but .* 20 sparse features"),
        (inputs | {"words": inputs["history"]}, "30 columns but the model has 20 feat"),
        (inputs | {"country": np.full(ROWS, 2**40)}, "is 1099511627776, too large for"),
        (inputs | {"country": np.full(ROWS, "x")}, "must be real numbers, got <U1"),
        (inputs | {"country": 5 * [1]}, "a DenseDataset or an array, got list"),
        (inputs | {"words": scanned}, r"inputs\['words'\] is scanned"),
    ]
    model, optimizer = build()
    for given, message in cases:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            sj.fit(model, optimizer, given, TARGETS, num_epochs=1)
    with pytest.raises(ValueError, match="several inputs need targets"):
        sj.fit(model, optimizer, inputs)
    for name in ("profile", "nothing"):
        with pytest.raises(ValueError, match=f"got '{name}'; there is 'history', 'wo"):
            sj.fit(model, optimizer, inputs, name)
    config = sj.NetworkConfig.autoencoder((4,))
    plain = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=many):
        sj.recommend(plain, {"history": inputs["history"]})
    with pytest.raises(
        ValueError, match="got 'inputs'; there is .*; exclude=None excl"
    ):
        sj.recommend(model, inputs)

    class Holds(Several):
        def __init__(self):
            vars(self)["num_features"] = {"history": ITEMS}

    with pytest.raises(TypeError, match="make it a @property"):
        features_of(Holds())


def test_dense_rows_by_name():
    ages = sj.data.DenseDataset(
        jnp.arange(3, dtype=jnp.bfloat16), ["ann", "bob", "eve"]
    )
    assert ages.values.dtype == jnp.bfloat16 and ages.num_rows == 3
    data = sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(np.eye(2)), row_names=["eve", "ann"]
    )
    found = ages.align_rows(data)
    assert found.values.tolist() == [2, 0] and found.row_names.tolist() == [
        "eve",
        "ann",
    ]
    assert data.align_rows(ages, missing="empty").matrix.indptr.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="1 of 3 rows .* 'bob'; missing=\"empty\""):
        data.align_rows(ages)
    with pytest.raises(ValueError, match="1 of 2 rows .* 'zoe'; fill=0"):
        ages.align_rows(["zoe", "ann"])
    whole = sj.data.DenseDataset([[1, 2]], ["ann"])
    assert whole.align_rows(["zoe"], fill=9).values.tolist() == [[9, 9]]
    for values, names, message in [
        (1.0, ["ann"], "a row for each example, got one number"),
        ([1.0], ["ann", "bob"], "1 rows but 2 row names"),
        ([1.0, 2.0], ["ann", "ann"], "row names must be unique"),
        ([1.0, np.inf], ["ann", "bob"], r"values\[1\] is inf"),
        (
            [1.0, 1e300],
            ["ann", "bob"],
            r"values\[1\] is 1e\+300, too large for float32",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            sj.data.DenseDataset(values, names)
    with pytest.raises(ValueError, match="fill=0.5 cannot be stored as int32"):
        whole.align_rows(["zoe"], fill=0.5)
    assert dataclasses.is_dataclass(whole) and "1 rows of 2 int32" in repr(whole)


@pytest.mark.usefixtures("symbolic_sizes")
def test_a_predictor_takes_several_inputs(expected, tmp_path):
    model, _, _ = expected
    path = tmp_path / "model.predictor"
    sj.export_predictor(model, path, k=5, batch_size=16)
    predictor = sj.load_predictor(path)
    assert predictor.num_features == model.num_features | {
        "profile": jax.ShapeDtypeStruct((2, 3), jnp.float32)
    }
    given = sources()
    # No whole number of batches; the inputs in another order.
    some = {n: s.align_rows(NAMES[:39]) for n, s in given.items()}
    some = dict(reversed(some.items())) | {"words": given["words"]}  # of more rows
    wanted = sj.recommend(model, some, k=5, exclude=TARGETS)
    found = predictor.recommend(some, exclude=TARGETS)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_allclose(found.scores, wanted.scores, 1e-5)
    predictor.warm_up(rows=2)
    one = {n: s.align_rows(NAMES[:1]) for n, s in given.items()}
    assert predictor.recommend(one, k=2).ids.tolist() == wanted_of(model, one)
    with pytest.raises(ValueError, match="'history', 'words', 'profile', 'country'"):
        predictor.recommend(given["history"])
    with pytest.raises(ValueError, match="inputs has the names 'history'"):
        predictor.recommend({"history": given["history"]})
    with pytest.raises(ValueError, match=r"use recommend\(\{name: source\}\)"):
        predictor.recommend_names(["a"])


def wanted_of(model, inputs) -> list[list[int]]:
    return sj.recommend(model, inputs, k=2, exclude=None).ids.tolist()
