"""Dynamic tables compared with static ones, and with a Python dictionary."""

import contextlib
import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import (
    Admit,
    DynamicTableConfig,
    FeatureConfig,
    RowNumber,
    WideIds,
)
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.placement import Distinct
from sparsejax.ops import hash_index, index_edits
from sparsejax.optimizers.optimizer import first_state

BATCH = 16


class Model(nnx.Module):
    """A model whose result is the sum of all numbers of an example, each at its position."""

    def __init__(self, tables, features, **options):
        self.embeddings = sj.embeddings.EmbeddingCollection(
            tables, features, rngs=nnx.Rngs(0), **options
        )

    def __call__(self, ids):
        return jnp.tanh(self.embeddings.concat(ids))


@sj.jit
def train(model, optimizer, ids, target):
    if model.embeddings.indexes:
        ids = model.embeddings.assign_rows(ids, optimizer)

    def loss_fn(model):
        return jnp.mean((model(ids) - target) ** 2)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@sj.jit
def assign(model, optimizer, ids, clock):
    rows = model.embeddings.assign_rows(ids, optimizer, clock=clock)
    return {name: x.indices for name, x in rows.stacks.items()}


@sj.jit
def looked_up(model, ids):
    return model.embeddings(ids)


def words(keys):
    keys = np.asarray(keys, np.uint64)
    return (keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)


def part_of(table, key):
    high, low = words([key])
    keys = hash_index.TableKeys(np.array([table], np.int32), high, low)
    return int(hash_index.part_of(keys)[0])


# --- training ---

NAMES = np.random.default_rng(7).integers(0, 2**64, 100, np.uint64)
NAMES[:3] = 0, 2**63, 2**64 - 1
FEATURES = {
    "user": "user",
    "item": FeatureConfig("item", combiner="mean"),
    "seen": FeatureConfig("item", combiner=None, length=3),
    "bought": FeatureConfig("item", combiner="sqrtn"),
}


def random_ids(rng, batch=BATCH):
    """Ids from 0 to 99; -1 for none, and lists with weights."""
    lengths = rng.integers(0, 4, batch)
    bought = rng.integers(0, 100, lengths.sum()).astype(np.int32)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    room = 3 * batch  # one shape, one program
    bought = np.pad(bought, (0, room - len(bought)))
    weights = (rng.random(room) + 0.5).astype(np.float32)
    return {
        "user": rng.integers(-1, 100, batch).astype(np.int32),
        "item": rng.integers(-1, 100, (batch, 3)).astype(np.int32),
        "seen": rng.integers(-1, 100, (batch, 2)).astype(np.int32),
        "bought": sj.CSR.tree_unflatten(100, (weights, bought, indptr, None)),
    }


def as_names(ids):
    """Maps ids to 64-bit names."""

    def named(value):
        if isinstance(value, sj.CSR):
            wide = WideIds.of(NAMES[value.indices])
            return WideIds(wide.low, wide.high, None, value.indptr, value.data)
        return WideIds.of(NAMES[value], mask=value >= 0)

    return {name: named(value) for name, value in ids.items()}


def tables_of(kind, rows, **options):
    return {name: kind(rows, 3, **options) for name in ("user", "item")}


def vectors(model, table, feature, names=NAMES):
    """The vectors of names; names without a row have their initial vector."""
    nothing = np.zeros(0, np.uint64), np.zeros(1 + len(names), np.int64)
    lists = {name: WideIds.ragged(*nothing) for name in FEATURES}
    lists[feature] = WideIds.of(names)
    return looked_up(model, model.embeddings.pack(lists))[feature]


def trained_pair(rule, steps):
    """Trains a model with dynamic tables and a model with static tables on equal data."""
    dynamic = Model(tables_of(DynamicTableConfig, 60_000), FEATURES)
    static = Model(
        tables_of(sj.embeddings.TableConfig, 100, placement="rows"), FEATURES
    )
    static.embeddings.set_table("user", vectors(dynamic, "user", "user"))
    static.embeddings.set_table("item", vectors(dynamic, "item", "item"))
    optimizers = [sj.Optimizer(model, rule) for model in (dynamic, static)]
    losses = [
        trained(*each, steps)
        for each in zip((dynamic, static), optimizers, strict=True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    return dynamic, static, *optimizers


def trained(model, optimizer, steps, seed=1):
    """The losses of some steps."""
    rng, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        ids = random_ids(rng)
        target = rng.random((BATCH, 18)).astype(np.float32)
        if model.embeddings.indexes:
            ids = model.embeddings.pack(as_names(ids))
        else:
            ids = jax.tree.map(jnp.asarray, ids)
        losses.append(float(train(model, optimizer, ids, target)))
    optimizer.flush(model)
    return losses


def assert_same(dynamic, static, name):
    expected = static.embeddings.table(name)
    np.testing.assert_allclose(vectors(dynamic, name, name), expected, atol=1e-5)


def test_equals_static_tables():
    dynamic, static, *_ = trained_pair(sj.optimizers.adam(0.1), 6)
    for name in "user", "item":
        assert_same(dynamic, static, name)
    stats = dynamic.embeddings.stats()
    assert (
        stats["user"].rows
        == stats["user"].inserted
        == len(dynamic.embeddings.ids("user"))
    )
    assert stats["user"].refused == stats["user"].evicted == 0
    assert {0, 2**63, 2**64 - 1} <= set(dynamic.embeddings.ids("item").tolist())


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "rmsprop", "ftrl"])
def test_equals_static_tables_under_each_rule(rule):
    rule = sj.optimizers.get(rule, learning_rate=0.1)
    dynamic, static, *_ = trained_pair(rule, 6)
    for name in "user", "item":
        assert_same(dynamic, static, name)


@pytest.mark.parametrize(
    "rule", ["adam", "sgd", "momentum", "adagrad", "rmsprop", "ftrl"]
)
def test_equals_static_tables_after_a_move_to_another_mesh(rule, tmp_path):
    rule = sj.optimizers.get(rule, learning_rate=0.1)
    dynamic, static, optimizer, of_static = trained_pair(rule, 4)
    for name in "user", "item":
        path = tmp_path / f"{name}.parquet"
        dynamic.embeddings.save_table(name, path, optimizer=optimizer)
    expected = trained(static, of_static, 4, seed=2)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        moved = Model(tables_of(DynamicTableConfig, 60_000), FEATURES)
        of_moved = sj.Optimizer(moved, rule)
        of_moved.step[...] = jnp.int32(optimizer.step[...])
        for name in "user", "item":
            path = tmp_path / f"{name}.parquet"
            moved.embeddings.load_table(name, path, of_moved)
        losses = trained(moved, of_moved, 4, seed=2)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name in "user", "item":
            assert_same(moved, static, name)


# --- who has a row ---


@dataclasses.dataclass(frozen=True)
class Fading(RowNumber):
    """A custom policy: counts in which old occurrences have a lower weight."""

    name = "faded"
    dtype = jnp.float32

    def initial(self, times, now):
        return times

    def update(self, value, times, now):
        return value * 0.75 + times


class Dictionary:
    """A Python model of a table: the ids and their rows, as documented."""

    def __init__(self, config):
        self.config, self.size = config, config.num_rows // 256
        self.rows: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.faded: dict[int, np.float32] = {}
        self.evicted = 0
        self.free = {part: list(range(self.size - 1, -1, -1)) for part in range(256)}

    def add(self, keys, now):
        new: dict[int, list[int]] = {}
        for key in sorted(set(keys)):
            if key in self.rows:
                self.last[key] = now
                self.count[key] += keys.count(key)
                often = np.float32(keys.count(key))
                self.faded[key] = self.faded[key] * np.float32(0.75) + often
            else:
                new.setdefault(part_of(0, key), []).append(key)
        for part, wanted in new.items():
            if len(wanted) > len(self.free[part]):
                self.evict(part, len(wanted), set(keys), now)
            for key in wanted:
                if self.free[part]:
                    self.rows[key] = part * self.size + self.free[part].pop()
                    self.last[key], self.count[key] = now, keys.count(key)
                    self.faded[key] = np.float32(keys.count(key))

    def evict(self, part, needed, kept, now):
        of_part = [key for key, row in self.rows.items() if row // self.size == part]
        can = [key for key in of_part if key not in kept]
        live, gone = self.config.time_to_live, []
        if live is not None:
            gone = [key for key in can if now - self.last[key] > live]
        wanted = max(needed - len(self.free[part]), math.ceil(self.size / 32))
        if self.config.evict:
            scores = {"lru": self.last, "lfu": self.count, Fading(): self.faded}
            score = scores[self.config.evict]
            rest = sorted(set(can) - set(gone), key=lambda key: (score[key], key))
            gone += rest[: max(wanted - len(gone), 0)]
        if self.config.evict == "lfu":
            for key in of_part:
                self.count[key] //= 2
        rows = sorted(self.rows.pop(key) % self.size for key in gone)
        self.free[part] += rows
        self.evicted += len(gone)


def compare_with_a_dictionary(batches, *, begin=0, **options):
    config = DynamicTableConfig(1024, 2, **options)
    model = Model({"id": config}, {"id": "id"})
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    known, rng = Dictionary(config), np.random.default_rng(3)
    for number in range(batches):
        now = begin + number
        # Most ids come again for a while, then others do.
        keys = 40 * number + rng.geometric(1 / 800, 128)
        keys = [0, 2**64 - 1, *keys.tolist()[2:]] if number % 7 == 0 else keys.tolist()
        known.add(keys, now)
        packed = model.embeddings.pack({"id": np.array(keys, np.uint64)})
        clock = np.int32(now)
        (columns,) = assign(model, optimizer, packed, clock).values()
        assert columns.tolist() == [known.rows.get(key, -2) for key in keys]
    assert model.embeddings.ids("id").tolist() == sorted(known.rows)
    stats = model.embeddings.stats()["id"]
    assert (stats.rows, stats.evicted) == (len(known.rows), known.evicted)
    assert stats.inserted == stats.rows + stats.evicted
    assert stats.found + stats.inserted + stats.refused <= 128 * batches
    assert stats.evicted or not (config.evict or config.time_to_live)


def test_lru_equals_a_dictionary():
    compare_with_a_dictionary(50)


def test_a_policy_of_ones_own_equals_a_dictionary(tmp_path):
    compare_with_a_dictionary(50, evict=Fading())
    pairs = [one_table(evict=Fading(), rule=sj.optimizers.sgd(0.1)) for _ in range(2)]
    (model, optimizer), (other, of_other) = pairs
    given(model, optimizer, [7, 8, 7])
    given(model, optimizer, [7])
    path = tmp_path / "id.parquet"
    model.embeddings.save_table("id", path)
    table = pq.read_table(path)
    assert table.column_names == ["id", "row", "count", "last", "faded"]
    assert table.column("faded").to_pylist() == [2.5, 1.0]
    other.embeddings.load_table("id", path, of_other)
    for a, b in zip(
        *(arrays_of(each.embeddings.indexes) for each, _ in pairs), strict=True
    ):
        if a.dtype == np.float32:
            np.testing.assert_array_equal(np.sort(a, axis=None), np.sort(b, axis=None))
    pq.write_table(table.drop_columns(["count", "last", "faded"]), path)
    other.embeddings.load_table("id", path, of_other)
    other.embeddings.save_table("id", path)
    assert pq.read_table(path).column("faded").to_pylist() == [1.0, 1.0]


@pytest.mark.parametrize("begin", [0, -(2**31)])
def test_lfu_with_a_time_to_live_equals_a_dictionary(begin):
    compare_with_a_dictionary(50, evict="lfu", time_to_live=15, begin=begin)


@pytest.mark.parametrize("time_to_live", [2**31, 2**40])
def test_a_time_to_live_may_be_any_number(time_to_live):
    """On a clock of int32, nothing is older than 2^32 - 1."""
    model, optimizer = one_table(rows=256, evict=None, time_to_live=time_to_live)
    keys = np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64)
    table_keys = hash_index.TableKeys(np.zeros(3000, np.int32), *words(keys))
    keys = keys[hash_index.part_of(table_keys) == 7][:4]  # a part has one row
    clocks = [-(2**31), -(2**31) + 2, 0, 2**31 - 1]
    for key, clock in zip(keys, clocks, strict=True):
        given(model, optimizer, [key], np.int32(clock))
        age = clock - clocks[0]
        stats = model.embeddings.stats()["id"]
        assert (stats.rows, stats.evicted) == (1, int(age > time_to_live))


def test_counts_do_not_wrap(tmp_path):
    """Not in a table, nor in a file of a release whose counts have wrapped."""
    path = tmp_path / "table.parquet"
    counts = [2**30 - 2, 2**31 - 3, 2**31 - 1, -(2**31) + 5]
    file = {
        "id": pa.array(range(4), pa.uint64()),
        "row": pa.array([[0.0, 0.0]] * 4, pa.list_(pa.float32(), 2)),
        "count": pa.array(counts, pa.int32()),
    }
    pq.write_table(pa.table(file), path)
    model, optimizer = one_table(sj.optimizers.sgd(0.1), 2560, evict="lfu")
    model.embeddings.load_table("id", path, optimizer)
    rng = np.random.default_rng(0)
    for clock in range(3):
        given(model, optimizer, np.resize(range(5), 300), clock)
    model.embeddings.save_table("id", path)
    # An id is counted until 2^30, by whole batches.
    right = [2**30 + 58, *counts[1:3], 2**30, 180]
    assert pq.read_table(path)["count"].to_pylist() == right
    for clock in range(3, 15):
        given(model, optimizer, rng.integers(0, 2**64, 300, np.uint64), clock)
    assert model.embeddings.stats()["id"].evicted
    assert {*range(4)} <= {*model.embeddings.ids("id").tolist()}


def test_ids_that_share_both_buckets_are_refused_from_the_33rd_on():
    """The bound that docs/dynamic_tables.md states, for ids that somebody has made."""
    model, optimizer = one_table(sj.optimizers.sgd(0.1), 256 * 40)  # 5 buckets a part
    keys = np.arange(300_000, dtype=np.uint64)
    table_keys = hash_index.TableKeys(np.zeros(len(keys), np.int32), *words(keys))
    one, two = hash_index.spread(table_keys), hash_index.hashed(table_keys, 2)
    first, second = (one & 0xFFFFFF) % 5, (two & 0xFFFFFF) % 5
    second = np.where(first == second, (first + 1) % 5, second)
    alike = (one >> 24 == 7) & (np.minimum(first, second) == 0)
    keys = keys[alike & (np.maximum(first, second) == 1)][:64]
    assert len(keys) == 64
    for _ in range(2):
        columns = given(model, optimizer, keys)
    assert (columns >= 0).sum() == 32
    stats = model.embeddings.stats()["id"]
    assert (stats.rows, stats.refused, stats.evicted) == (32, 64, 0)


@pytest.mark.parametrize(
    ("clock", "error", "message"),
    [
        (np.int64(2**31), ValueError, "clock=2,147,483,648 does not fit into int32"),
        (
            396 * 2**32 - 2**31 + 10,
            ValueError,
            "count in a larger unit, or from a later",
        ),
        (-(2**31) - 1, ValueError, "does not fit into int32"),
        (2**80, ValueError, "does not fit into int32"),
        (np.float32(3), TypeError, "clock is an integer, an int32, got"),
        (np.arange(2), TypeError, "clock is an integer"),
    ],
)
def test_a_clock_fits_into_int32(clock, error, message, wrong_types):
    model, optimizer = one_table()
    with pytest.raises(error, match=message):
        model.embeddings.assign_rows({"id": np.arange(3)}, optimizer, clock=clock)
    with pytest.raises(TypeError, match=r"one number of int32, got float32\[\]"):
        given(model, optimizer, [3], np.float32(1))
    for fits in (np.int64(2**31 - 1), np.uint8(3), jnp.int32(-(2**31))):
        model.embeddings.assign_rows({"id": np.arange(3)}, optimizer, clock=fits)


@pytest.mark.parametrize(
    "options",
    [
        {"evict": "lru"},
        {"evict": "lfu"},
        {"evict": None},
        {"evict": None, "time_to_live": 12},
        {"evict": "lru", "time_to_live": 12},
    ],
)
def test_each_policy_equals_a_dictionary_for_long(options):
    compare_with_a_dictionary(1000, **options)


def one_table(rule=None, rows=1024, **options):
    model = Model({"id": DynamicTableConfig(rows, 2, **options)}, {"id": "id"})
    return model, sj.Optimizer(model, rule or sj.optimizers.adam(0.1))


def given(model, optimizer, keys, clock=0):
    packed = model.embeddings.pack({"id": np.asarray(keys, np.uint64)})
    (columns,) = assign(model, optimizer, packed, clock).values()
    return np.asarray(columns)


def arrays_of(*modules):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(modules))]


def test_the_order_of_a_batch_changes_nothing():
    rng, pairs = (
        np.random.default_rng(4),
        [one_table(evict="lfu"), one_table(evict="lfu")],
    )
    for now in range(20):
        keys = 30 * now + rng.integers(0, 500, 128)
        for pair, each in zip(pairs, (keys, rng.permutation(keys)), strict=True):
            given(*pair, each, now)
    for a, b in zip(*(arrays_of(*pair) for pair in pairs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_that_is_restored_goes_on_the_same():
    one, other = one_table(evict="lfu"), one_table(evict="lfu")
    batches = np.random.default_rng(8).integers(0, 3000, (20, 128))
    for now, keys in enumerate(batches):
        if now == 12:
            saved = jax.tree.map(np.asarray, nnx.state(one))
            nnx.update(other, jax.tree.map(jnp.asarray, saved))
        given(*one, keys, now)
        if now >= 12:
            given(*other, keys, now)
    assert one[0].embeddings.stats()["id"].evicted
    for a, b in zip(arrays_of(*one), arrays_of(*other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_a_mesh_has_the_same_rows(shape):
    tables = {name: DynamicTableConfig(512, 2) for name in ("user", "item")}
    features = {"user": "user", "item": FeatureConfig("item", combiner="mean")}

    def trained():
        model, rng = Model(tables, features), np.random.default_rng(5)
        optimizer = sj.Optimizer(model, sj.optimizers.adam(0.1))
        for _ in range(4):
            ids = random_ids(rng)
            packed = model.embeddings.pack(as_names({n: ids[n] for n in features}))
            train(model, optimizer, packed, rng.random((BATCH, 4)).astype(np.float32))
        (kernel,) = model.embeddings.kernels.values()
        stats = model.embeddings.stats()
        unknown = WideIds.of(NAMES[:BATCH] + np.uint64(1))
        unknown = model.embeddings.pack(dict.fromkeys(features, unknown))
        first = np.concatenate([*looked_up(model, unknown).values()], 1)
        assert np.all(np.any(first != 0, axis=1))
        arrays = np.asarray(kernel[...]), first
        return arrays_of(model.embeddings.indexes), arrays, stats

    indexes, rows, stats = trained()
    data, model_parts = shape
    with jax.set_mesh(sj.make_mesh(data=data, model=model_parts)):
        indexes_of_many, rows_of_many, stats_of_many = trained()
    for a, b in zip(indexes, indexes_of_many, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(rows, rows_of_many, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert stats == stats_of_many


SENT = {"user": "user", "item": FEATURES["item"], "seen": FEATURES["seen"]}


@pytest.mark.parametrize(
    ("shape", "packed"), [((1, 2), False), ((2, 4), False), ((2, 2), True)]
)
def test_ids_that_are_sent_have_the_same_rows(shape, packed):
    """Of lists, too, of more ids than rows, and of more distinct ones than places."""
    features = FEATURES if packed else SENT
    tables = {
        "user": DynamicTableConfig(256, 4, evict="lfu"),
        "item": DynamicTableConfig(256, 4, evict=None, admit=Admit(count=60)),
    }
    rng, size = np.random.default_rng(6), 512
    names = rng.integers(0, 2**64, 2000, np.uint64)
    shapes = {"user": size, "item": (size, 3), "seen": (size, 2)}
    lists = WideIds.ragged(names[rng.integers(0, 60, size)], np.arange(size + 1))
    steps = []
    for i in range(5):
        of = names if i == 3 else names[40 * i :][:60]
        ids = {
            name: WideIds.of(rng.choice(of, shape), mask=rng.random(shape) < 0.9)
            for name, shape in shapes.items()
        }
        steps.append(ids | ({"bought": lists} if packed else {}))

    def run(ahead):
        model = Model(tables, features)
        optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.1))
        if ahead:
            told = Distinct(size // math.prod(shape), (("user", 60.0), ("item", 60.0)))
            model.embeddings.expect(told)
            given = map(model.embeddings.pack, steps) if packed else steps
            batches = [*model.embeddings.ahead(given)]
            assert [bool(b.routes) for b in batches] == [True, True, True, False, True]
        else:
            batches = [*map(model.embeddings.pack, steps)]
        target = np.ones((size, model.embeddings.num_outputs), np.float32)
        found = [train(model, optimizer, batch, target) for batch in batches]
        found += looked_up(model, batches[-1]).values()
        (kernel,) = model.embeddings.kernels.values()
        stats = model.embeddings.stats()
        return arrays_of(model.embeddings.indexes), [kernel[...], *found], stats

    indexes, rows, stats = run(ahead=False)
    assert stats["user"].evicted and stats["item"].waiting and stats["item"].refused
    with jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1])):
        indexes_of_many, rows_of_many, stats_of_many = run(ahead=True)
    for a, b in zip(indexes, indexes_of_many, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(rows, rows_of_many, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert stats == stats_of_many


# --- ids without a row ---


def test_an_id_without_a_row_has_its_first_vector_and_no_gradient():
    model, optimizer = one_table()
    names = {"id": np.array([5, 2**64 - 5], np.uint64)}
    before = arrays_of(model)
    first = model.embeddings(names)["id"]
    for a, b in zip(before, arrays_of(model), strict=True):  # to look changes nothing
        np.testing.assert_array_equal(a, b)
    bound = 1024**-0.5
    assert np.all(np.abs(first) <= bound) and np.unique(first).size == 4
    with pytest.warns(UserWarning, match="new ids will not be learned"):
        grads = sj.grad(lambda model: jnp.sum(model(names)))(model)
    gradient = grads["embeddings"]["kernels"]["2_float32_dynamic"][...]
    assert np.all(gradient.ids >= 1024)  # none of a row
    given(model, optimizer, names["id"])
    np.testing.assert_array_equal(model.embeddings(names)["id"], first)
    assert model.embeddings.stats()["id"].inserted == 2


def test_a_row_that_comes_back_begins_anew():
    model, optimizer = one_table()
    names = np.arange(4000, 4128, dtype=np.uint64)
    first = np.asarray(model.embeddings({"id": names})["id"])
    target = np.ones((128, 2), np.float32)
    train(model, optimizer, model.embeddings.pack({"id": names}), target)
    for i in range(30):  # others push them out
        given(model, optimizer, names + 1000 + 128 * i, clock=2 + i)
    assert not set(names.tolist()) & set(model.embeddings.ids("id").tolist())
    columns = given(model, optimizer, names, clock=99)
    assert np.all(columns >= 0)
    np.testing.assert_array_equal(model.embeddings({"id": names})["id"], first)
    (state,) = optimizer.rows.values()
    moments = [array[...] for name, array in state.items() if name != "last_step"]
    assert len(moments) == 2
    assert not any(np.any(array[columns]) for array in moments)


def test_adam_is_exact_where_rows_go_and_come_back():
    rate, b1, b2, eps = 0.1, 0.9, 0.999, 1e-8
    model, optimizer = one_table(sj.optimizers.adam(rate, b1=b1, b2=b2, eps=eps))
    known, rng = Dictionary(DynamicTableConfig(1024, 2)), np.random.default_rng(4)
    names = np.arange(3000, dtype=np.uint64)
    first = np.asarray(model.embeddings({"id": names})["id"], np.float64)
    w, moments = {}, {}
    returned, gone = 0, set()
    for now in range(32):
        keys = 600 * (now // 4 % 4) + rng.integers(0, 600, 128)  # all come again
        target = rng.random((128, 2))
        before = set(known.rows)
        known.add(keys.tolist(), now)
        gone |= before - set(known.rows)
        new = set(known.rows) - before
        returned += len(new & gone)
        w = {k: first[k] if k in new else w[k] for k in known.rows}
        moments = {
            k: (np.zeros(2), np.zeros(2)) if k in new else moments[k]
            for k in known.rows
        }
        packed = model.embeddings.pack({"id": keys.astype(np.uint64)})
        train(model, optimizer, packed, target.astype(np.float32))
        grads = {k: np.zeros(2) for k in known.rows}
        for key, wanted in zip(keys.tolist(), target, strict=True):
            if key in grads:
                y = np.tanh(w[key])
                grads[key] += 2 * (y - wanted) * (1 - y**2) / 256
        for key, g in grads.items():  # also rows that this batch does not have
            m, v = moments[key]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            moments[key] = m, v
            scaled = m / (1 - b1 ** (now + 1)), v / (1 - b2 ** (now + 1))
            w[key] = w[key] - rate * scaled[0] / (np.sqrt(scaled[1]) + eps)
    assert returned > 100
    optimizer.flush(model)
    ids = model.embeddings.ids("id")
    assert ids.tolist() == sorted(known.rows)
    found = np.asarray(model.embeddings({"id": ids})["id"])
    expected = np.stack([w[key] for key in ids.tolist()])
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_ids_are_counted_before_they_get_a_row():
    model, optimizer = one_table(admit=Admit(count=3), evict=None)
    rng = np.random.default_rng(6)
    seldom = rng.choice(2**32, 2000, replace=False).astype(np.uint64)
    often = np.arange(100, dtype=np.uint64) + 2**40
    for i in range(0, 2000, 100):
        given(model, optimizer, seldom[i : i + 100])
    # With 2,000 ids and 4,096 counters in each row of the sketch.
    early = model.embeddings.stats()["id"].rows / 2000
    assert early <= (1 - np.exp(-2000 / 4096)) ** 4
    for seen in range(3):
        columns = given(model, optimizer, often)
        share = np.mean(columns >= 0)
        assert share > 0.9 if seen == 2 else share < 0.1
    model.embeddings.halve_counts()
    counters = model.embeddings.indexes["2_float32_dynamic"]["sketch"][...]
    assert np.max(counters) in (1, 2)
    stats = model.embeddings.stats()["id"]
    seen = stats.waiting + stats.inserted + stats.found + stats.refused
    assert seen == 2300


def test_ids_are_admitted_with_a_probability():
    model, optimizer = one_table(admit=Admit(probability=0.25), evict=None)
    names = np.arange(128, dtype=np.uint64)
    rows = [np.mean(given(model, optimizer, names, clock=now) >= 0) for now in range(4)]
    expected = 1 - 0.75 ** np.arange(1, 5)
    np.testing.assert_allclose(rows, expected, atol=0.13)
    assert np.all(np.diff(rows) > 0)


# --- input ---


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("traced", [False, True])
def test_ids_that_are_all_there_are_packed_as_those_of_a_mask(batch, traced):
    tables = {"a": DynamicTableConfig(512, 4), "b": DynamicTableConfig(512, 4)}
    features = {
        "one": "a",
        "bag": "b",
        "none": "b",
        "order": FeatureConfig("a", combiner=None, length=3),
    }
    embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    shapes = {"one": (), "bag": (2,), "none": (0,), "order": (2,)}
    sizes = {name: (batch, *shape) for name, shape in shapes.items()}
    ids = {n: rng.integers(0, 2**64, s, np.uint64) for n, s in sizes.items()}
    pack = jax.jit(embeddings.pack) if traced else embeddings.pack
    found = pack({name: WideIds.of(value) for name, value in ids.items()})
    masked = {
        name: dataclasses.replace(WideIds.of(value), present=np.ones(value.shape, bool))
        for name, value in ids.items()
    }
    expected = pack(masked)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_ids_in_every_form():
    model, _ = one_table()
    pack = model.embeddings.pack
    wanted = np.array([3, 0, 7], np.uint64)
    masked = np.ma.masked_array([3, 9, 7], mask=[False, True, False])
    for form in (
        np.array([3, -1, 7]),
        np.array([3, -1, 7], np.int32),
        masked,
        WideIds.of(np.array([3, 9, 7]), mask=np.array([True, False, True])),
        WideIds.ragged([3, 7], [0, 1, 1, 2]),
    ):
        batch = pack({"id": form})
        (x,), (keys,) = batch.stacks.values(), batch.keys.values()
        assert x.indptr.tolist() == [0, 1, 1, 2]
        assert keys.low[:2].tolist() == wanted[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.array([1.5]), TypeError, "integers, got float64"),
        (np.array(["a"]), TypeError, "integers, got <U1"),
        (np.array([4, -2]), ValueError, "id -2 is negative"),
        (np.zeros((2, 2, 2), np.int64), ValueError, r"\[batch\] or \[batch, n\]"),
    ],
)
def test_wrong_ids(ids, error, message, wrong_types):
    model, _ = one_table()
    with pytest.raises(error, match=message):
        model.embeddings.pack({"id": ids})


def test_a_batch_may_have_more_ids_than_the_table_rows():
    model, optimizer = one_table()
    names = {"id": np.arange(2000)}
    first = np.asarray(model.embeddings(names)["id"])
    assert np.isfinite(first).all()
    columns = given(model, optimizer, names["id"])
    stats = model.embeddings.stats()["id"]
    assert stats.rows == np.sum(columns >= 0) > 900
    assert stats.rows + stats.refused == 2000
    np.testing.assert_array_equal(model.embeddings(names)["id"], first)


def test_a_large_batch_has_the_rows_of_small_ones():
    # Large ones have programs for none, few and many new ids.
    rng, size = np.random.default_rng(4), 8192
    (large, optimizer), (small, other) = one_table(rows=50_000), one_table(rows=50_000)
    names = np.arange(size, dtype=np.uint64)
    for share in (1.0, 0.0, 0.01, 0.1):
        fresh = rng.choice(size, round(share * size), replace=False)
        names[fresh] += np.uint64(size)
        columns = given(large, optimizer, names)
        for start in range(0, size, 2048):
            given(small, other, names[start : start + 2048])
        np.testing.assert_array_equal(columns, given(large, optimizer, names))
        assert np.min(columns) >= 0
        stats = large.embeddings.stats()["id"]
        assert stats.rows == small.embeddings.stats()["id"].rows == stats.inserted
        assert stats.refused == 0
    ids = large.embeddings.ids("id")
    np.testing.assert_array_equal(ids, small.embeddings.ids("id"))
    assert stats.found == 8 * size - stats.inserted


def test_what_a_mask_leaves_out_may_be_any_number():
    ids, mask = np.array([3, -9, 7]), np.array([True, False, True])
    wide = WideIds.of(ids, mask=mask)
    np.testing.assert_array_equal(wide.present, mask)
    assert wide.low.tolist() == [3, 0, 7]
    with pytest.raises(ValueError, match="id -9 is negative"):
        WideIds.of(ids, mask=~mask)
    with pytest.raises(ValueError, match="mask must be bool of the shape"):
        WideIds.of(ids, mask=mask[:2])


def test_ids_on_a_device_must_be_wide():
    model, _ = one_table()
    with pytest.raises(TypeError, match="JAX cuts int64 to 32 bits"):
        model.embeddings({"id": jnp.arange(3)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"evict": "fifo"}, ValueError, 'evict is "lru", "lfu" or None'),
        ({"time_to_live": 0}, ValueError, "time_to_live must be at least 1"),
        ({"placement": "table"}, ValueError, "leave out placement"),
        ({"admit": 3}, TypeError, "admit must be an Admit"),
    ],
)
def test_wrong_tables(options, error, message, wrong_types):
    with pytest.raises(error, match=message):
        DynamicTableConfig(10, 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "count or probability"),
        ({"count": 2, "probability": 0.5}, "count or probability"),
        ({"count": 256}, "at most 255"),
        ({"probability": 0.0}, "above 0"),
    ],
)
def test_wrong_admission(options, message):
    with pytest.raises(ValueError, match=message):
        Admit(**options)


def test_wrong_calls():
    model, optimizer = one_table()
    embeddings, ids = model.embeddings, {"id": np.arange(3)}
    rows = embeddings.assign_rows(ids, optimizer)
    with pytest.raises(ValueError, match="their rows already"):
        embeddings.assign_rows(rows, optimizer)
    with pytest.raises(ValueError, match="is dynamic, its rows have no order of ids"):
        embeddings.table("id")
    static = Model({"id": sj.embeddings.TableConfig(9, 2)}, {"id": "id"})
    with pytest.raises(ValueError, match="which this collection has none"):
        static.embeddings.assign_rows(ids, optimizer)
    with pytest.raises(ValueError, match="table 'id' is not dynamic"):
        static.embeddings.ids("id")
    other = sj.Optimizer(static, sj.optimizers.adam(0.1))
    with pytest.raises(ValueError, match="make it for the model that has these tables"):
        embeddings.assign_rows(ids, other)
    with pytest.raises(ValueError, match="leave outside out"):
        config = FeatureConfig("id", outside="drop")
        Model({"id": DynamicTableConfig(9, 2)}, {"id": config}).embeddings.pack(ids)


# --- files ---


def saved(path, steps=3, **options):
    """A trained table, its optimizer, and its file with the optimizer's state."""
    model, optimizer = one_table(**options)
    rng = np.random.default_rng(9)
    for _ in range(steps):
        names = rng.integers(0, 2**64, 128, np.uint64)
        names[:2] = 0, 2**64 - 1
        target = rng.random((128, 2)).astype(np.float32)
        train(model, optimizer, model.embeddings.pack({"id": names}), target)
    optimizer.flush(model)
    model.embeddings.save_table("id", path, optimizer=optimizer)
    return model, optimizer


def of_ids(model, optimizer):
    """All numbers and arrays of each id, in the order of ids."""
    table = pq.read_table(path_of(model, optimizer))
    return {name: table.column(name).to_pylist() for name in table.column_names}


def path_of(model, optimizer):
    path = pathlib.Path("again.parquet")
    model.embeddings.save_table("id", path, optimizer=optimizer)
    return path


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_a_file_is_loaded_into_a_larger_table_on_another_mesh(
    mesh, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model, optimizer = saved("one.parquet")
    before = of_ids(model, optimizer)
    assert (
        before["id"] == model.embeddings.ids("id").tolist() and len(before["id"]) > 200
    )
    assert {"id", "row", "count", "last"} < before.keys() and max(before["count"]) == 3
    names = np.array(before["id"][:128], np.uint64)

    def trained_on(model, optimizer):
        packed = model.embeddings.pack({"id": names})
        train(model, optimizer, packed, np.ones((128, 2), np.float32))
        optimizer.flush(model)
        return of_ids(model, optimizer)

    step = int(optimizer.step[...])
    after = trained_on(model, optimizer)
    sizes = {} if mesh is None else {"data": mesh[0], "model": mesh[1]}
    with jax.set_mesh(sj.make_mesh(**sizes)) if mesh else contextlib.nullcontext():
        other = Model({"id": DynamicTableConfig(5000, 2)}, {"id": "id"})
        of_other = sj.Optimizer(other, sj.optimizers.adam(0.1))
        given(other, of_other, np.arange(100, 200))  # which the file replaces
        of_other.step[...] = jnp.int32(step)
        other.embeddings.load_table("id", "one.parquet", of_other)
        assert of_ids(other, of_other) == before
        after_other = trained_on(other, of_other)
    for name in ("id", "count", "last"):
        assert after[name] == after_other[name]
    np.testing.assert_allclose(after["row"], after_other["row"], atol=1e-6)
    assert after["row"] != before["row"]


def test_vectors_of_elsewhere_are_loaded(tmp_path, monkeypatch):
    for module, name in ((files, "BLOCK"), (index_edits, "_BLOCK")):
        monkeypatch.setattr(module, name, 2)
    path = tmp_path / "vectors.parquet"
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    flat = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), 2)
    pq.write_table(pa.table({"id": np.array([9, 2**40, 4]), "row": flat}), path)
    model, optimizer = one_table(rule=sj.optimizers.ftrl(0.1))
    given(model, optimizer, np.arange(50))
    model.embeddings.load_table("id", path, optimizer)
    assert model.embeddings.ids("id").tolist() == [4, 9, 2**40]
    names = np.array([9, 2**40, 4])
    np.testing.assert_array_equal(model.embeddings({"id": names})["id"], rows)
    columns = given(model, optimizer, names)
    (state,) = optimizer.rows.values()
    fresh = first_state(optimizer.rule, jnp.asarray(rows), optimizer.step[...])
    for name, array in fresh.items():
        np.testing.assert_array_equal(state[name][...][columns], array)


def test_a_file_of_bfloat16_has_float32(tmp_path):
    path = tmp_path / "table.parquet"
    model, optimizer = one_table(sj.optimizers.sgd(0.1), dtype=jnp.bfloat16)
    given(model, optimizer, np.arange(5))
    model.embeddings.save_table("id", path)
    ids = model.embeddings.ids("id")
    rows = np.float32(model.embeddings({"id": ids})["id"])
    assert pq.read_table(path)["row"].to_pylist() == rows.tolist()


def test_wrong_files(tmp_path):
    model, optimizer = one_table()
    given(model, optimizer, np.arange(50))
    before = arrays_of(model)
    path = tmp_path / "wrong.parquet"

    def refused(message, ids, rows, width=2, **columns):
        flat = pa.FixedSizeListArray.from_arrays(np.asarray(rows).reshape(-1), width)
        pq.write_table(pa.table({"id": ids, "row": flat, **columns}), path)
        with pytest.raises(ValueError, match=message) as error:
            model.embeddings.load_table("id", path, optimizer)
        assert str(path) in str(error.value)

    two, rows = np.array([1, 2]), np.zeros((2, 2), np.float32)
    refused("'row' has .*float.*3.*expected", two, np.zeros(6, np.float32), width=3)
    refused("'row' has .*double.*expected", two, rows.astype(np.float64))
    refused("the id 1 twice", np.array([1, 1]), rows)
    refused("not finite", two, np.full((2, 2), np.nan, np.float32))
    refused("id -1 is negative", np.array([-1, 2]), rows)
    refused("ids must be uint64", np.array([0.5, 2]), rows)
    many = np.arange(3000, dtype=np.uint64)
    refused("3,000 ids, .* in one of 256 parts", many, np.zeros((3000, 2), np.float32))
    path.write_bytes(b"PAR1 not more")
    with pytest.raises(ValueError, match="not a Parquet file"):
        model.embeddings.load_table("id", path, optimizer)
    pq.write_table(pa.table({"id": two}), path)
    with pytest.raises(ValueError, match="expected one 'row'"):
        model.embeddings.load_table("id", path, optimizer)
    for a, b in zip(before, arrays_of(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_of_another_rule_or_step_is_refused(tmp_path):
    path = tmp_path / "one.parquet"
    model, _ = saved(path)
    after = sj.Optimizer(model, sj.optimizers.adam(0.1))
    with pytest.raises(ValueError, match="after 3 steps, but the optimizer has done 0"):
        model.embeddings.load_table("id", path, after)
    for rule in sj.optimizers.adagrad, sj.optimizers.rmsprop, sj.optimizers.sgd:
        other = sj.Optimizer(model, rule(0.1))
        with pytest.raises(ValueError, match="the state of another rule"):
            model.embeddings.load_table("id", path, other)
    pq.write_table(pq.read_table(path).replace_schema_metadata(), path)
    with pytest.raises(ValueError, match="do not say after how many steps"):
        model.embeddings.load_table("id", path, after)
    model.embeddings.load_table("id", path, None)
    with pytest.raises(ValueError, match="leave names out"):
        model.embeddings.save_table("id", path, names=["a"])
    with pytest.raises(ValueError, match=".parquet files"):
        model.embeddings.save_table("id", tmp_path / "one.npy")


def test_a_plan_counts_the_index():
    tables = {
        "user": DynamicTableConfig(60_000, 16, admit=Admit(count=2)),
        "item": DynamicTableConfig(100_000, 16),
    }
    features = {name: name for name in tables}
    plan = sj.plan_embeddings(
        tables, features, rule=sj.optimizers.sgd(0.1), batch_size=64, data=1, model=1
    )
    model = Model(tables, features, plan=plan)
    arrays = jax.tree.leaves(nnx.state(model.embeddings))
    (device,) = plan.devices
    assert device.tables == pytest.approx(sum(a.nbytes for a in arrays), rel=0.01)
    assert device.tables == pytest.approx(sum(t.memory for t in plan.tables), rel=0.02)
