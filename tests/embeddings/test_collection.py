"""An embedding collection compared with NumPy in float64."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import placed_training
import pytest
from flax import nnx
from jax.sharding import AxisType
from tolerances import assert_close

import sparsejax as sj
from sparsejax.embeddings.lookup import sent
from sparsejax.embeddings.placement import Distinct
from sparsejax.embeddings.tables import sender_of

BATCH = 8
TABLES = {
    "item": sj.embeddings.TableConfig(700, 6, placement="rows"),
    "one": sj.embeddings.TableConfig(1, 6, placement="rows"),
    "user": sj.embeddings.TableConfig(50, 3, init=jax.nn.initializers.normal(1.0)),
    "unused": sj.embeddings.TableConfig(5, 2),
}
FEATURES = {
    "item": "item",
    "user": "user",
    "liked": sj.embeddings.FeatureConfig("item", combiner="mean"),
    "one": sj.embeddings.FeatureConfig("one", combiner="sqrtn"),
    "recent": sj.embeddings.FeatureConfig("item", combiner=None, length=4),
    "weighted": sj.embeddings.FeatureConfig("item", combiner="mean"),
    "bought": sj.embeddings.FeatureConfig("item", combiner=None, length=5),
    "friends": sj.embeddings.FeatureConfig("user", combiner="sqrtn", outside="drop"),
}


def collection_of(tables=TABLES, features=FEATURES, **options):
    return sj.embeddings.EmbeddingCollection(
        tables, features, rngs=nnx.Rngs(0), **options
    )


def ragged(lists, num_cols, weights=None, *, extra=0):
    """Makes a CSR from lists of ids, which keep their order and duplicates."""
    ids = np.concatenate([*map(np.asarray, lists), np.zeros(extra)]).astype(np.int32)
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    data = None
    if weights is not None:
        data = np.concatenate([*weights, np.full(extra, np.nan)]).astype(np.float32)
    return sj.CSR.tree_unflatten(num_cols, (data, ids, indptr, None))


def random_ids(seed=0, batch=BATCH):
    rng = np.random.default_rng(seed)

    def lists(num_rows, longest):
        return [
            rng.integers(0, num_rows, rng.integers(0, longest + 1))
            for _ in range(batch)
        ]

    def array(num_rows, *shape):
        return rng.integers(-1, num_rows, (batch, *shape)).astype(np.int32)

    weighted, bought = lists(700, 6), lists(700, 5)
    weighted[1], bought[2] = [7, 7, 3], []  # a duplicate, no id
    return {
        "item": array(700),
        "user": array(50, 1),
        "liked": array(700, 3),
        "one": array(1, 4),
        "recent": array(700, 3),
        "weighted": ragged(
            weighted, 700, [rng.random(len(ids)) + 0.5 for ids in weighted], extra=3
        ),
        "bought": ragged(bought, 700),
        "friends": array(70, 3),  # of a table of 50
    }


def bags_of(value, config):
    """For each example a list of bags; a bag is a list of (id, weight)."""
    examples = []
    for b in range(len(value.indptr) - 1 if isinstance(value, sj.CSR) else len(value)):
        if isinstance(value, sj.CSR):
            part = slice(value.indptr[b], value.indptr[b + 1])
            ids = np.asarray(value.indices)[part]
            weights = np.ones(len(ids)) if value.data is None else value.data[part]
        else:
            ids, weights = np.atleast_1d(value[b]), np.ones(value[b].size)
        pairs = list(zip(ids.tolist(), weights.tolist(), strict=True))
        if config.combiner is None:
            bags = [[p] for p in pairs] + [[]] * (config.length - len(pairs))
        else:
            bags = [pairs]
        examples.append(bags)
    return examples


def oracle(tables, features, ids):
    """The results `{feature: rows}`, and their terms: (table, id, example, bag, factor)."""
    rows, terms = {}, {}
    for name, feature in features.items():
        config = (
            sj.embeddings.FeatureConfig(feature)
            if isinstance(feature, str)
            else feature
        )
        table = tables[config.table]
        examples = bags_of(ids[name], config)
        found = np.zeros((len(examples), config.bags, table.shape[1]))
        terms[name] = []
        for b, bags in enumerate(examples):
            for k, bag in enumerate(bags):
                bag = [(i, v) for i, v in bag if 0 <= i < len(table)]
                total = sum(v for _, v in bag)
                if config.combiner == "sqrtn":
                    total = np.sqrt(sum(v * v for _, v in bag))
                scale = 1 / total if bag and config.combiner in ("mean", "sqrtn") else 1
                for i, v in bag:
                    found[b, k] += scale * v * table[i]
                    terms[name].append((config.table, i, b, k, scale * v))
        rows[name] = found if config.combiner is None else found[:, 0]
    return rows, terms


def tables_of(collection):
    tables = placed_training.tables_of(collection)
    return {name: tables[name].astype(np.float64) for name in TABLES}


def on_device(ids):
    return jax.tree.map(jnp.asarray, ids)


def mesh_or_none(shape, axis_type=AxisType.Auto):
    if shape is None:
        return contextlib.nullcontext()
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2)
    return jax.set_mesh(mesh)


@pytest.fixture(scope="module")
def collection():
    return collection_of()


call = nnx.jit(lambda collection, ids: (collection(ids), collection.concat(ids)))


@pytest.mark.parametrize("packed", ["device", "host"])
def test_every_kind_of_feature(collection, packed):
    ids = random_ids()
    want, _ = oracle(tables_of(collection), FEATURES, ids)
    batch = on_device(ids) if packed == "device" else collection.pack(ids)
    got, joined = call(collection, batch)
    assert got.keys() == FEATURES.keys()
    for name in FEATURES:
        assert_close(got[name], want[name], terms=8, magnitude=4)
    flat = [np.asarray(got[name]).reshape(BATCH, -1) for name in FEATURES]
    np.testing.assert_array_equal(joined, np.concatenate(flat, axis=1))
    assert joined.shape == (BATCH, collection.num_outputs)


def as_lists(ids):
    """Converts ids to `WideIds`; NumPy's integers have 64 bits by default."""
    found = {}
    for name, value in ids.items():
        if isinstance(value, sj.CSR):
            count = int(value.indptr[-1])
            weights = None if value.data is None else value.data[:count]
            given = value.indices[:count].astype(np.int64), value.indptr, weights
            found[name] = sj.embeddings.WideIds.ragged(*given)
        else:
            found[name] = sj.embeddings.WideIds.of(value.astype(np.int64))
    return found


@pytest.mark.parametrize("packed", ["device", "host", "mesh"])
def test_lists_in_any_order(collection, packed):
    ids = random_ids(3)
    want, _ = oracle(tables_of(collection), FEATURES, ids)
    lists = as_lists(ids)
    assert (np.diff(lists["weighted"].low.astype(np.int64)) < 0).any()
    batch = collection.pack(lists) if packed == "host" else on_device(lists)
    if packed == "mesh":
        with mesh_or_none((2, 4)):
            got, _ = call(collection_of(), batch)
    else:
        got, _ = call(collection, batch)
    for name in FEATURES:
        assert_close(got[name], want[name], terms=8, magnitude=4)


@pytest.mark.usefixtures("wrong_types")
def test_large_numbers_are_outside_a_table(collection):
    lists = as_lists(random_ids())
    for number in (700, 2**31 - 1, 2**32 + 5, 2**63):
        one = sj.embeddings.WideIds.ragged(np.array([number], np.uint64), [0] * 8 + [1])
        with pytest.raises(ValueError, match="'weighted', example 7: id .* is outside"):
            collection.pack(lists | {"weighted": one})
        got, _ = call(collection, on_device(lists | {"weighted": one, "friends": one}))
        assert np.isnan(got["weighted"]).tolist() == [[False] * 6] * 7 + [[True] * 6]
        assert not np.asarray(got["friends"]).any()  # outside="drop"


def test_host_and_device_pack_the_same(collection):
    ids = random_ids(1)
    host = collection.pack(ids)
    device = jax.jit(collection.pack)(on_device(ids))
    for name, x in host.stacks.items():
        assert isinstance(x.indices, np.ndarray)
        used = int(x.indptr[-1])
        np.testing.assert_array_equal(device.stacks[name].indptr, x.indptr)
        np.testing.assert_array_equal(
            device.stacks[name].indices[:used], x.indices[:used]
        )
        if x.data is not None:
            np.testing.assert_array_equal(
                device.stacks[name].data[:used], x.data[:used]
            )


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_in_the_batch(collection, batch):
    ids = random_ids()
    for name, value in ids.items():
        if isinstance(value, sj.CSR):
            ids[name] = ragged([[]] * batch, 700, [[]] * batch, extra=2)
        else:
            ids[name] = np.full_like(value[:batch], -1)
    got, _ = call(collection, on_device(ids))
    for name, rows in got.items():
        assert len(rows) == batch and not np.asarray(rows).any(), name


def test_what_is_wrong_on_the_host_is_nan_on_the_device(collection):
    """Only the rows it concerns; `friends` drops what it does not know."""
    ids = random_ids()
    ids["item"][2], ids["recent"][3, 1], ids["user"][4] = 700, 2**31 - 1, -2
    ids["friends"][5] = -7
    ids["bought"].indices[ids["bought"].indptr[6]] = 900  # example 6 has some
    assert ids["bought"].indptr[6] < ids["bought"].indptr[7]
    for name, example, number in [
        ("item", 2, 700),
        ("recent", 3, 2**31 - 1),
        ("user", 4, -2),
        ("bought", 6, 900),
    ]:
        one = random_ids() | {name: ids[name]}
        with pytest.raises(
            ValueError, match=f"'{name}', example {example}: id {number} "
        ):
            collection.pack(one)
    got, _ = call(collection, on_device(ids))
    want, _ = oracle(tables_of(collection), FEATURES, ids)
    want["item"][2] = want["recent"][3, 1] = want["user"][4] = want["bought"][6, 0] = (
        np.nan
    )
    for name in FEATURES:
        assert_close(got[name], want[name], terms=8, magnitude=4)


def test_too_little_room(collection):
    """All rows that do not fit are NaN, the others are right."""
    ids = random_ids()
    want, _ = oracle(tables_of(collection), FEATURES, ids)
    name = "6_float32_rows"
    nse = {name: int(collection.pack(ids).stacks[name].indptr[-1])}
    with pytest.raises(ValueError, match="room for nse="):
        collection.pack(ids, nse={name: nse[name] - 1})
    collection.pack(ids, nse=nse)
    pack = jax.jit(functools.partial(collection.pack, nse={name: nse[name] // 2}))
    got, _ = call(collection, pack(on_device(ids)))
    assert_close(got["user"], want["user"], terms=8, magnitude=4)
    assert_close(got["item"][:3], want["item"][:3], terms=8, magnitude=4)
    assert np.isnan(got["recent"][5:]).all()


def test_a_feature_without_room(collection):
    """A CSR that lacks entries makes NaN of what follows, and a long list of its end."""
    ids = random_ids()
    short = ids["weighted"]
    cut = sj.CSR.tree_unflatten(
        700, (*(leaf[:5] for leaf in jax.tree.leaves(short)[:2]), short.indptr, None)
    )
    bad = int(np.argmax(short.indptr[1:] > 5))
    with pytest.raises(ValueError, match="'weighted' is overfull"):
        collection.pack(ids | {"weighted": cut})
    want, _ = oracle(tables_of(collection), FEATURES, ids)
    got, _ = call(collection, on_device(ids | {"weighted": cut}))
    assert_close(got["weighted"][:bad], want["weighted"][:bad], terms=8, magnitude=4)
    assert np.isnan(got["weighted"][bad:]).all()
    lists = [[1, 2, 3, 4, 5, 6]] + [[7]] * (BATCH - 1)
    with pytest.raises(ValueError, match="'bought', example 0: 6 ids, but length=5"):
        collection.pack(ids | {"bought": ragged(lists, 700)})
    got, _ = call(collection, on_device(ids | {"bought": ragged(lists, 700)}))
    item = np.asarray(collection.table("item"))
    np.testing.assert_allclose(got["bought"][0, :4], item[1:5], rtol=1e-6)
    assert np.isnan(got["bought"][0, 4]).all()
    np.testing.assert_allclose(got["bought"][1, 0], item[7], rtol=1e-6)


def ids_with(**changes):
    return random_ids() | changes


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ({"item": np.zeros(8, np.int32)}, ValueError, "but the ids lack"),
        (ids_with(other=np.zeros(8, np.int32)), ValueError, r"ids have \['other'\]"),
        (ids_with(item=np.zeros(8, np.int64)), TypeError, "'item' must be int32"),
        (ids_with(item=np.zeros(8, np.float32)), TypeError, "'item' must be int32"),
        (ids_with(item=np.zeros((8, 1, 1), np.int32)), ValueError, "'item' must be"),
        (ids_with(item=np.zeros(7, np.int32)), ValueError, "differ in their numbers"),
        (
            ids_with(recent=np.zeros((8, 5), np.int32)),
            ValueError,
            "'recent' has lists of 5",
        ),
        (ids_with(item=ragged([[1]] * 8, 701)), ValueError, "'item' has 701 columns"),
    ],
)
def test_bad_ids(collection, ids, error, message):
    with pytest.raises(error, match=message):
        collection.pack(ids)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: sj.embeddings.TableConfig(0, 4),
            ValueError,
            "num_rows must be at least 1",
        ),
        (
            lambda: sj.embeddings.TableConfig(4, 4, dtype=jnp.int32),
            TypeError,
            "floating",
        ),
        (
            lambda: sj.embeddings.TableConfig(4, 4, dtype="float8_e5m2"),
            TypeError,
            "16 bits or",
        ),
        (
            lambda: sj.embeddings.FeatureConfig("item", combiner=None),
            ValueError,
            "length",
        ),
        (lambda: sj.embeddings.FeatureConfig("item", length=3), ValueError, "length"),
        (lambda: collection_of(features={}), ValueError, "at least one feature"),
        (
            lambda: collection_of(features={"a": "b"}),
            ValueError,
            "'a' reads the table 'b'",
        ),
        (lambda: collection_of(plan={"b": "rows"}), ValueError, "plan has a table 'b'"),
    ],
)
def test_bad_configurations(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_gradient_of_weights(collection):
    """Against differences of the oracle; a weight of padding has none."""
    ids = random_ids()
    tables = tables_of(collection)
    slope = np.random.default_rng(5).standard_normal((BATCH, 6))

    def oracle_loss(data):
        leaves = (data, *jax.tree.leaves(ids["weighted"])[1:], None)
        changed = ids | {"weighted": sj.CSR.tree_unflatten(700, leaves)}
        rows, _ = oracle(tables, {"weighted": FEATURES["weighted"]}, changed)
        return np.sum(rows["weighted"] * slope)

    def loss(data, others, collection):
        x = others["weighted"].with_data(data)
        rows = collection(others | {"weighted": x})["weighted"]
        return jnp.sum(rows * jnp.asarray(slope, jnp.float32))

    data = np.asarray(ids["weighted"].data)
    got = nnx.jit(nnx.grad(loss))(jnp.asarray(data), on_device(ids), collection)
    used, step = int(ids["weighted"].indptr[-1]), 1e-6
    assert not np.asarray(got[used:]).any()
    wide = data.astype(np.float64)
    for j in range(used):
        d = np.where(np.arange(len(wide)) == j, step, 0)
        want = (oracle_loss(wide + d) - oracle_loss(wide - d)) / (2 * step)
        np.testing.assert_allclose(got[j], want, rtol=1e-3, atol=1e-5)


class Clicks(nnx.Module):
    def __init__(self, tables=TABLES):
        self.embeddings = collection_of(tables)
        self.out = nnx.Linear(self.embeddings.num_outputs, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.out(self.embeddings.concat(ids))[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, click):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(ids), click).mean()

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def oracle_training(tables, weights, bias, batches, *, adagrad):
    """Trains 20 steps in NumPy; returns losses and tables."""
    tables = {name: table.copy() for name, table in tables.items()}
    sums = {name: np.zeros((len(t), 1)) for name, t in tables.items()}
    losses = []
    for ids, click in batches:
        rows, terms = oracle(tables, FEATURES, ids)
        flat = [rows[name].reshape(BATCH, -1) for name in FEATURES]
        score = (np.concatenate(flat, axis=1) @ weights + bias)[:, 0]
        losses.append(np.mean(np.logaddexp(0, score) - click * score))
        dscore = (1 / (1 + np.exp(-score)) - click) / BATCH
        dx = dscore[:, None] * weights[:, 0][None]
        slopes, at = {}, 0
        for name, part in zip(FEATURES, flat, strict=True):
            shape = (BATCH, -1, tables[_config(name).table].shape[1])
            slopes[name] = dx[:, at : at + part.shape[1]].reshape(shape)
            at += part.shape[1]
        gradients = {name: np.zeros_like(table) for name, table in tables.items()}
        for name in FEATURES:
            for table, i, b, k, factor in terms[name]:
                gradients[table][i] += factor * slopes[name][b, k]
        for name, g in gradients.items():
            scale = 0.5
            if adagrad:
                sums[name] += np.mean(g * g, axis=1, keepdims=True)
                scale = 0.5 / (np.sqrt(sums[name]) + 1e-8)
            tables[name] -= scale * g
    return losses, tables


def _config(name):
    feature = FEATURES[name]
    return sj.embeddings.FeatureConfig(feature) if isinstance(feature, str) else feature


def batches_of(count):
    rng = np.random.default_rng(3)
    batches = []
    for seed in range(count):
        ids = random_ids(seed)
        for name in "weighted", "bought":  # of one capacity: one program
            x = ids[name]
            pad = (0, 60 - x.nse)
            data = None if x.data is None else np.pad(x.data, pad)
            leaves = (data, np.pad(x.indices, pad), x.indptr, None)
            ids[name] = sj.CSR.tree_unflatten(700, leaves)
        batches.append((ids, rng.integers(0, 2, BATCH).astype(np.float32)))
    return batches


@pytest.mark.parametrize(
    ("rule", "mesh", "axis_type"),
    [
        ("rowwise_adagrad", None, None),
        ("rowwise_adagrad", (2, 4), AxisType.Auto),
        ("sgd", (1, 8), AxisType.Explicit),
    ],
)
def test_twenty_steps(rule, mesh, axis_type):
    """The other parameters stay: optax moves them by nothing."""
    batches = batches_of(20)
    with mesh_or_none(mesh, axis_type):
        model = Clicks()
        before = tables_of(model.embeddings)
        kernel = np.asarray(model.out.kernel[...], np.float64)
        bias = np.asarray(nnx.state(model.out)["bias"][...], np.float64)
        made = sj.optimizers.get(rule, learning_rate=0.5)
        optimizer = sj.Optimizer(model, made, dense=optax.set_to_zero())
        losses = [
            float(train_step(model, optimizer, on_device(ids), jnp.asarray(click)))
            for ids, click in batches
        ]
        after = tables_of(model.embeddings)
    adagrad = rule == "rowwise_adagrad"
    want = oracle_training(before, kernel, bias, batches, adagrad=adagrad)
    np.testing.assert_allclose(losses, want[0], rtol=2e-5)
    for name in TABLES:
        np.testing.assert_allclose(after[name], want[1][name], rtol=1e-4, atol=2e-5)


def test_a_table_has_its_own_rule():
    tables = TABLES | {
        "user": sj.embeddings.TableConfig(50, 3, rule=sj.optimizers.sgd(0.0))
    }
    model = Clicks(tables)
    optimizer = sj.Optimizer(model, sj.optimizers.adamw(0.1), dense=optax.sgd(0.1))
    before = tables_of(model.embeddings)
    (ids, click), *_ = batches_of(1)
    train_step(model, optimizer, on_device(ids), jnp.asarray(click))
    optimizer.flush(model)
    after = tables_of(model.embeddings)
    np.testing.assert_array_equal(after["user"], before["user"])
    assert (after["item"] != before["item"]).mean() > 0.9  # weight decay moves all rows


def test_a_seed_gives_the_same_tables_everywhere():
    """Whatever the mesh and the placement; a checkpoint of one mesh fits another."""
    one = collection_of()
    with mesh_or_none((2, 4)):
        spread = collection_of()
        kernel = spread.kernels["6_float32_rows"]
        assert kernel[...].addressable_shards[0].data.shape == (768 // 4, 6)
        np.testing.assert_array_equal(kernel[...], one.kernels["6_float32_rows"][...])
    states = [nnx.to_pure_dict(nnx.state(c)) for c in (one, spread)]
    assert [jax.tree.map(jnp.shape, s) for s in states[:1]] == [
        jax.tree.map(jnp.shape, s) for s in states[1:]
    ]
    other = collection_of(
        TABLES | {"user": sj.embeddings.TableConfig(50, 3)}, plan={"user": "rows"}
    )
    again = collection_of(TABLES | {"user": sj.embeddings.TableConfig(50, 3)})
    np.testing.assert_array_equal(other.table("user"), again.table("user"))
    user = np.asarray(again.table("user"))
    assert abs(user).max() <= 50**-0.5 and len(np.unique(user)) == user.size
    assert not np.array_equal(one.table("item")[:1], one.table("one"))


def test_tables_on_a_mesh_are_not_copied(monkeypatch):
    """Else a table would need twice its memory while it is made."""
    divided, divide = [], jax.lax.with_sharding_constraint

    def noted(x, *rest):
        divided.append(isinstance(x, jax.core.Tracer))
        return divide(x, *rest)

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", noted)
    with jax.set_mesh(sj.make_mesh(data=1, model=8)):
        table = sj.embeddings.TableConfig(1024, 8, placement="rows")
        made = sj.embeddings.EmbeddingCollection(
            {"a": table}, {"a": "a"}, rngs=nnx.Rngs(0)
        )
        sj.Optimizer(made, sj.optimizers.rowwise_adagrad(0.1))
        [kernel] = made.kernels.values()
        assert kernel[...].addressable_shards[0].data.shape == (128, 8)
    assert all(divided)


@pytest.mark.parametrize("mesh", [None, (1, 8)])
def test_set_table(mesh):
    rows = np.random.default_rng(0).standard_normal((700, 6)).astype(np.float32)
    with mesh_or_none(mesh):
        collection = collection_of()
        others = np.asarray(collection.table("one"))
        collection.set_table("item", rows)
        np.testing.assert_array_equal(collection.table("item"), rows)
        np.testing.assert_array_equal(collection.table("one"), others)
        with pytest.raises(ValueError, match="'item' is 700 x 6"):
            collection.set_table("item", rows[:-1])
        with pytest.raises(ValueError, match="there is no table 'items'"):
            collection.table("items")


def test_results_have_the_dtype():
    collection = collection_of(dtype=jnp.bfloat16)
    got = jax.eval_shape(lambda: collection(on_device(random_ids())))
    assert {rows.dtype for rows in got.values()} == {jnp.dtype(jnp.bfloat16)}


def step_of(collection, optimizer):
    """A training step as a function of state and ids, and the initial state."""
    graphdef, state = nnx.split((collection, optimizer))

    def step(state, ids):
        collection, optimizer = nnx.merge(graphdef, state)
        _, grads = optimizer.value_and_grad(lambda c: jnp.sum(c.concat(ids) ** 2))(
            collection
        )
        optimizer.update(collection, grads)
        return nnx.state((collection, optimizer))

    return step, state


def lowered_step(count):
    tables = {
        f"t{i}": sj.embeddings.TableConfig(15_000, 8, placement="rows")
        for i in range(count)
    }
    features = {f"f{i}": f"t{i}" for i in range(count)}
    collection = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(collection, sj.optimizers.rowwise_adagrad(0.1))
    step, state = step_of(collection, optimizer)
    ids = {name: jnp.zeros(832 // count, jnp.int32) for name in features}
    lowered = jax.jit(step).trace(state, ids).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    here = ("gather", "scatter", "sort", "while", "case")
    between = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter")
    return {name: text.count(f'"stablehlo.{name}"') for name in (*here, *between)}


@pytest.mark.parametrize(("mesh", "wanted"), [(None, [64]), ((1, 2), [0, 0, 64])])
def test_a_lookup_knows_when_a_table_comes_again(monkeypatch, mesh, wanted):
    """Not of rows that an owner sends, nor of one table or short examples."""
    found, mosaic = [], sj.ops.gather_sum.mosaic

    def noted(data, indices, indptr, w, num_cols, *, config, **options):
        found.append(0 if config is None else config.period)
        return jnp.zeros((len(indptr) - 1, w.shape[1]))

    monkeypatch.setattr(mosaic, "gather_matmul", noted)
    for lengths, expected in (
        ({"a": 60, "b": 4}, wanted),
        ({"a": 59, "b": 4}, [0] * len(wanted)),
        ({"a": 64}, [0] * len(wanted)),
    ):
        with mesh_or_none(mesh):
            tables = {
                n: sj.embeddings.TableConfig(90, 8, placement="rows") for n in lengths
            }
            collection = collection_of(tables, {n: n for n in lengths})
            collection.implementation = "mosaic_gpu"
            ids = {n: jnp.zeros((8, count), jnp.int32) for n, count in lengths.items()}
            found.clear()
            jax.eval_shape(collection, ids)
        assert sorted(found) == expected


@pytest.mark.parametrize("zipf", [None, 1.2])
def test_no_constant_grows_with_the_batch(zipf):
    """XLA would compute what is made of it when it compiles: half a minute on two GPUs."""
    tables = {
        f"t{i}": sj.embeddings.TableConfig(5_000, 4, placement="rows") for i in range(4)
    }
    features = {f"f{i}": f"t{i}" for i in range(4)}
    rule, batch = sj.optimizers.rowwise_adagrad(0.1), 4096
    with mesh_or_none((2, 4)):
        popularity = None if zipf is None else dict.fromkeys(features, zipf)
        plan = sj.plan_embeddings(
            tables,
            features,
            batch_size=batch,
            data=2,
            model=4,
            rule=rule,
            popularity=popularity,
        )
        collection = collection_of(tables, features, plan=plan)
        optimizer = sj.Optimizer(collection, rule)
        step, state = step_of(collection, optimizer)
        lies = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(("data", "model")))
        ids = jax.ShapeDtypeStruct((batch,), np.int32, sharding=lies)
        compiled = jax.jit(step).lower(state, dict.fromkeys(features, ids)).compile()
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* constant\(", compiled.as_text() or "")
    assert max(math.prod(map(int, size.split(","))) for size in sizes) < 2000


@pytest.mark.parametrize("mesh", [None, (1, 8)])
def test_a_step_has_no_more_operations_with_more_tables(mesh):
    with mesh_or_none(mesh):
        one, many = lowered_step(1), lowered_step(26)
    assert one["gather"] and one["sort"] and one == many
    assert bool(one["all_to_all"]) == (mesh is not None)


class Counted(nnx.Module):
    """A collection that counts how often its steps are traced."""

    times_traced = 0

    def __init__(self):
        tables = {
            "a": sj.embeddings.TableConfig(3000, 6, placement="rows"),
            "b": sj.embeddings.TableConfig(40, 6, placement="rows"),
            "d": sj.embeddings.TableConfig(40, 4, placement="rows"),
            "e": sj.embeddings.TableConfig(30, 3, placement="replicated"),
        }
        features = {
            "a": "a",
            "b": sj.embeddings.FeatureConfig("b", combiner="mean"),
            "c": sj.embeddings.FeatureConfig("a", combiner=None, length=2),
            "d": "d",
            "e": "e",
        }
        self.embeddings = collection_of(tables, features)

    def __call__(self, ids, weights):
        ids = ids | {"d": ids["d"].with_data(weights)}
        return jnp.sum(jnp.square(self.embeddings.concat(ids) - 1))


@nnx.jit
def exchanging_step(model, optimizer, ids):
    Counted.times_traced += 1
    weights = jnp.asarray(ids["d"].data)
    slopes = jax.grad(lambda weights: model(ids, weights))(weights)
    loss, grads = optimizer.value_and_grad(lambda m: m(ids, weights))(model)
    optimizer.update(model, grads)
    return loss, slopes


def shardings(optimizer):
    arrays = jax.tree.leaves(nnx.state(optimizer))
    return [(array.sharding, array.ndim) for array in arrays]


@functools.cache
def exchanging_run(rule, mesh=None, distinct=False):
    """Losses, gradients and tables of a training with ids of all devices, then with ids that one
    device owns.
    """
    rng = np.random.default_rng(0)
    spread = {
        "a": rng.integers(-1, 3000, 64).astype(np.int32),
        "b": rng.integers(-1, 40, (64, 2)).astype(np.int32),
        "c": rng.integers(-1, 3000, (64, 2)).astype(np.int32),
        "d": ragged([[b % 40] for b in range(64)], 40, rng.random((64, 1))),
        "e": rng.integers(-1, 30, (64, 3)).astype(np.int32),
    }
    one = spread | {name: np.zeros_like(spread[name]) for name in "abc"}
    found, overflows = [], []
    with mesh_or_none(mesh):
        model = Counted()
        if distinct:  # of 8 examples
            rows = {"a": 20.0, "b": 9.0, "d": 7.0}
            model.embeddings.expect(Distinct(8, tuple(rows.items())))
        optimizer = sj.Optimizer(model, rule)
        before = shardings(optimizer)
        for ids in (spread, spread, one, spread):
            found.append(exchanging_step(model, optimizer, on_device(ids)))
            overflows.append(int(model.embeddings.overflows[...]))
        # State that comes back laid otherwise has the step compiled once more.
        for (a, ndim), (b, _) in zip(before, shardings(optimizer), strict=True):
            assert a.is_equivalent_to(b, ndim), (a, b)
        optimizer.flush(model)
        found.append(placed_training.tables_of(model.embeddings))
        return jax.tree.map(np.asarray, found), overflows


ADAGRAD = sj.optimizers.adagrad(0.1)


@pytest.mark.parametrize(
    ("rule", "mesh", "distinct"),
    [
        (ADAGRAD, (1, 8), False),
        (ADAGRAD, (8, 1), False),
        (ADAGRAD, (2, 4), True),
        (sj.optimizers.adamw(0.1), (2, 4), False),
        (sj.optimizers.adamw(0.1), (2, 4), True),
    ],
)
def test_exchange(rule, mesh, distinct):
    """A mesh gives what one device gives, also if one device owns the ids of a step.

    These are one distinct id, for which there is room.
    """
    want, overflows = exchanging_run(rule)
    assert not any(overflows)
    before = Counted.times_traced
    got, overflows = exchanging_run(rule, mesh, distinct)
    assert overflows == ([0] * 4 if mesh[1] == 1 or distinct else [0, 0, 1, 1])
    assert Counted.times_traced == before + 1  # one program for both ways
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want
    )


def test_ahead():
    """A step that knows that its ids have places gives what one gives that asks."""
    rng = np.random.default_rng(0)
    rows = {"a": 3000}
    spread = {
        n: rng.integers(0, size, 256).astype(np.int32) for n, size in rows.items()
    }
    one = dict.fromkeys(rows, np.zeros(256, np.int32))  # all ids are of one device
    results = []
    with jax.set_mesh(sj.make_mesh(model=2)):
        batches = [on_device(ids) for ids in (spread, one, spread)]
        for ahead in False, True:
            tables = {
                name: sj.embeddings.TableConfig(size, 4, placement="rows")
                for name, size in rows.items()
            }
            collection = collection_of(tables, dict(zip(rows, rows, strict=True)))
            optimizer = sj.Optimizer(collection, ADAGRAD)

            @sj.jit
            def step(collection, optimizer, ids):
                def loss_fn(c):
                    return jnp.sum(jnp.square(c.concat(ids) - 1))

                loss, grads = optimizer.value_and_grad(loss_fn)(collection)
                optimizer.update(collection, grads)
                return loss

            given = list(collection.ahead(batches)) if ahead else batches
            found = [step(collection, optimizer, ids) for ids in given]
            optimizer.flush(collection)
            found += [collection.table(name) for name in rows]
            results.append(jax.tree.map(np.asarray, found))
            assert int(collection.overflows[...]) == 1
        jax.tree.map(np.testing.assert_array_equal, *results)
        first = jnp.ones((256, 4))
        joined = sj.jit(lambda c, ids: c.joined(first, ids, blank=2))
        np.testing.assert_array_equal(
            joined(collection, given[0]), joined(collection, batches[0])
        )
        concat = sj.jit(lambda c, ids: c.concat(ids))
        right = concat(collection, given[1])
        crowded, _ = sent[False](sender_of(collection), batches[1])
        wrong = concat(collection, crowded)
        assert not np.array_equal(right, wrong)  # so a batch that fits is not asked


def test_ahead_says_which_batches_have_places():
    table = sj.embeddings.TableConfig(3000, 4, placement="rows")
    spread = np.random.default_rng(0).integers(0, 3000, 256).astype(np.int32)
    batches = [{"a": spread}, {"a": np.zeros(256, np.int32)}, {"a": spread}]
    with jax.set_mesh(sj.make_mesh(model=2)):
        collection = collection_of({"a": table}, {"a": "a"})
        given = list(collection.ahead(map(on_device, batches)))
    assert [bool(ids.routes) for ids in given] == [True, False, True]
    for wrong in np.array([1, 2**32 + 2]), np.array([1, 3000], np.int32):
        for refused in collection.pack, lambda ids: next(collection.ahead([ids])):
            with pytest.raises((TypeError, ValueError), match=r"int64|3000 is outside"):
                refused({"a": wrong})
    short = {"new": sj.embeddings.FeatureConfig("new", combiner=None, length=2)}
    dynamic = {"new": sj.embeddings.DynamicTableConfig(256, 4)}
    three = sj.embeddings.WideIds.ragged(np.arange(3), np.array([0, 3]))
    with pytest.raises(ValueError, match="3 ids, but length=2"):
        next(collection_of(dynamic, short).ahead([{"new": three}]))


@pytest.mark.usefixtures("wrong_types")
def test_ahead_of_tables_in_host_memory():
    """Ids of other tables are sent, and the rows in host memory come behind that."""
    hosted = {"host": True, "device_rows": 256}
    tables = {
        "here": sj.embeddings.TableConfig(3000, 4, placement="rows"),
        "there": sj.embeddings.TableConfig(1024, 2, **hosted),
    }
    rng = np.random.default_rng(0)
    batches = [
        {name: rng.integers(0, 1024, 16).astype(np.int32) for name in tables}
        for _ in range(3)
    ]
    found = []
    with jax.set_mesh(sj.make_mesh(model=2)):
        for ahead in False, True:
            collection = collection_of(tables, {name: name for name in tables})
            given = collection.ahead(batches) if ahead else batches
            for rows in collection.staged(given):
                assert isinstance(rows, sj.embeddings.FeatureBatch)
                assert bool(rows.routes) == ahead
                found.append(jax.tree.map(np.asarray, call(collection, rows)))
    jax.tree.map(np.testing.assert_array_equal, found[:3], found[3:])


def test_what_is_wrong_on_a_mesh():
    """As on one device: NaN for an id that is wrong, and for what has no room."""
    ids = random_ids()
    ids["user"][4] = 50  # of a replicated table
    narrow = {"item": ids["item"].copy(), "one": ids["one"]}
    narrow["item"][2] = 700
    features = {"item": "item", "one": "one"}
    name = "6_float32_rows"
    results = []
    for mesh in None, (2, 4):
        with mesh_or_none(mesh):
            collection, arrays = collection_of(), collection_of(TABLES, features)
            count = int(collection.pack(random_ids()).stacks[name].indptr[-1])

            @nnx.jit
            def run(collection, arrays, ids, narrow, count=count):
                short = collection.pack(ids, nse={name: count // 2})
                return collection(ids), collection(short), arrays(narrow)

            found = run(collection, arrays, on_device(ids), on_device(narrow))
            results.append(jax.tree.map(np.asarray, found))
            packed = jax.jit(arrays.pack)(on_device(narrow))
    with pytest.raises(ValueError, match="the batch is packed for the stacks"):
        collection(packed)
    with pytest.raises(
        ValueError, match=r"a mesh of data and model \(2, 4\), which is"
    ):
        arrays(packed)
    want, got = results
    assert all(np.isnan(rows["item"]).any() for rows in want[1:])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )


def test_what_one_training_says_is_not_for_the_next():
    collection = collection_of(exchange_room=2.0)
    given, seen = collection.settings, Distinct(8, (("item", 5.0),))
    collection.expect(seen, wire_dtype="bfloat16", exchange_room=0.5)
    now = collection.settings
    assert now.exchange == {"wire_dtype": "bfloat16", "exchange_room": 0.5}
    assert now.distinct == seen and now.tables == given.tables
    collection.expect(None)
    assert collection.settings == given and given.exchange_room == 2.0


def test_bad_options():
    for kind in "int8", "float8_e4m3fn":
        with pytest.raises(TypeError, match="wire_dtype must be floating, of 16 bits"):
            collection_of(wire_dtype=kind)
    with pytest.raises(ValueError, match="exchange_room must be positive, got 0"):
        collection_of(exchange_room=0.0)


def test_a_plan_is_no_single_placement(monkeypatch):
    """Without the annotations, which the suite checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(TypeError, match="such as {'item': 'rows'}, got 'rows'"):
        collection_of(plan="rows")
