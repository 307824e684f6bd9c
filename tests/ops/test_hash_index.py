"""The index of keys against a Python dictionary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax as sj
from sparsejax.mesh import xla_options
from sparsejax.mesh.layout import call_on_each_device
from sparsejax.ops import hash_index

TWO = hash_index.Layout(rows=12, firsts=(0, 7), sizes=(7, 4))
KEYS = 64  # of a batch


def keys_of(pairs):
    tables, keys = zip(*pairs, strict=True) if pairs else ((), ())
    keys = np.array(keys, np.uint64)
    low = (keys & np.uint64(2**32 - 1)).astype(np.uint32)
    high = (keys >> np.uint64(32)).astype(np.uint32)
    return hash_index.TableKeys(np.array(tables, np.int32), high, low)


def padded(pairs):
    assert len(pairs) <= KEYS
    wanted = np.arange(KEYS) < len(pairs)
    return keys_of([*pairs, *[(0, 0)] * (KEYS - len(pairs))]), wanted


def step(layout, index, keys, wanted, first_part=0):
    """Adds keys to an index; returns it, and the row of each key."""
    found = hash_index.find(layout, index, keys, wanted, first_part)
    part = hash_index.part_of(keys) - first_part
    mine = wanted & (part >= 0) & (part < len(index.used))
    of, _ = hash_index.distinct(layout, keys, mine & (found < 0))
    index, rows = hash_index.insert(layout, index, of, of.first, first_part)
    return index, jnp.asarray(found).at[of.place].max(rows[of.start])


stepped = jax.jit(step, static_argnums=0)
found = jax.jit(hash_index.find, static_argnums=0)
removed = jax.jit(hash_index.remove, static_argnums=0)


@pytest.mark.gpu
def test_deterministic_scatters_lose_no_row():
    layout = hash_index.Layout(rows=20, firsts=(0,), sizes=(19,))
    rng = np.random.default_rng(0)
    index, gone = hash_index.empty(layout, 256), rng.random((256, 20)) < 0.5
    for _ in range(130):
        keys = keys_of([(0, int(n)) for n in rng.integers(0, 2**63, KEYS)])
        index, _ = stepped(layout, index, keys, np.ones(KEYS, bool))
    same = jax.jit(
        hash_index.remove, static_argnums=0, compiler_options=xla_options.DETERMINISTIC
    )
    expected, actual = removed(layout, index, gone), same(layout, index, gone)
    assert np.sum(index.num_free == 0) > 200 and expected.used.sum() < index.used.sum()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


class Dictionary:
    """A Python model of the index: the keys and their rows."""

    def __init__(self, layout):
        self.layout, self.rows = layout, {}
        self.free = {
            (part, table): list(range(first + size - 1, first - 1, -1))
            for part in range(256)
            for table, (first, size) in enumerate(
                zip(layout.firsts, layout.sizes, strict=True)
            )
        }

    def add(self, pairs):
        for table, key in sorted(set(pairs) - self.rows.keys()):
            part = int(hash_index.part_of(keys_of([(table, key)]))[0])
            if rows := self.free[part, table]:
                self.rows[table, key] = part * self.layout.rows + rows.pop()

    def remove(self, rows):
        gone = {row: pair for pair, row in self.rows.items() if row in rows}
        for row in sorted(gone):
            del self.rows[gone[row]]
            part = row // self.layout.rows
            self.free[part, gone[row][0]].append(row % self.layout.rows)


def random_pairs(rng, of):
    keys = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    keys += rng.integers(0, of, 37).tolist()
    keys += rng.integers(0, 2**64, 20, np.uint64).tolist()
    rng.shuffle(keys)
    return [(int(rng.integers(2)), key) for key in keys[: rng.integers(1, KEYS)]]


def compare_with_a_dictionary(batches):
    rng, index = np.random.default_rng(0), hash_index.empty(TWO)
    known = Dictionary(TWO)
    for batch in range(batches):
        pairs = random_pairs(rng, 4000)
        known.add(pairs)
        keys, wanted = padded(pairs)
        index, rows = stepped(TWO, index, keys, wanted)
        expected = [known.rows.get(pair, -1) for pair in pairs]
        assert rows[: len(pairs)].tolist() == expected
        assert not np.any(np.asarray(rows[len(pairs) :]) >= 0)
        if batch % 3 == 2:
            gone = rng.random((256, TWO.rows)) < 0.4
            index = removed(TWO, index, gone)
            known.remove(set(np.flatnonzero(gone).tolist()))
    used = np.flatnonzero(index.used)
    assert used.tolist() == sorted(known.rows.values())
    assert int(np.sum(index.num_free)) + len(used) == 256 * 11


def test_equals_a_dictionary():
    compare_with_a_dictionary(40)


def test_equals_a_dictionary_for_long():
    compare_with_a_dictionary(1000)


def test_the_order_of_a_batch_changes_nothing():
    rng = np.random.default_rng(1)
    one = other = hash_index.empty(TWO)
    for _ in range(10):
        pairs = random_pairs(rng, 4000)
        shuffled = rng.permutation(len(pairs))
        one, rows = stepped(TWO, one, *padded(pairs))
        other, others = stepped(TWO, other, *padded([pairs[i] for i in shuffled]))
        assert rows[shuffled].tolist() == others[: len(pairs)].tolist()
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_table_fills_to_its_last_row():
    layout = hash_index.Layout(rows=30, firsts=(0,), sizes=(29,))
    rng, index = np.random.default_rng(2), hash_index.empty(layout)
    everything = np.ones(2048, bool)
    for _ in range(20):
        keys = [(0, int(key)) for key in rng.integers(0, 2**64, 2048, np.uint64)]
        index, _ = stepped(layout, index, keys_of(keys), everything)
    assert not np.any(index.num_free)
    low, high = np.asarray(index.keys)[:, :29].reshape(-1, 2).T
    keys = hash_index.TableKeys(np.zeros(len(low), np.int32), high, low)
    rows = found(layout, index, keys, np.ones(len(low), bool))
    expected = np.arange(256)[:, None] * 30 + np.arange(29)
    np.testing.assert_array_equal(rows, expected.reshape(-1))


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_mesh_equals_one_device(shape):
    rng, data, model = np.random.default_rng(3), *shape
    batches = [padded(random_pairs(rng, 4000)) for _ in range(5)]

    def part(index, keys, wanted):
        first = jax.lax.axis_index("model") * len(index.used)
        index, rows = step(TWO, index, keys, wanted, first)
        rows = jnp.where(rows < 0, -1, rows + first * TWO.rows)
        return index, jax.lax.pmax(rows, "model")

    spec, many = P("model"), hash_index.empty(TWO)
    with jax.set_mesh(sj.make_mesh(data=data, model=model)):
        specs = {"in_specs": (spec, P(), P()), "out_specs": (spec, P())}
        divided = jax.jit(lambda *given: call_on_each_device(part, given, **specs))
        many = jax.tree.map(put_by_parts, many)
        rows_of_many = []
        for keys, wanted in batches:
            many, rows = divided(many, keys, wanted)
            rows_of_many.append(np.asarray(rows))
    one = hash_index.empty(TWO)
    for (keys, wanted), of_many in zip(batches, rows_of_many, strict=True):
        one, rows = stepped(TWO, one, keys, wanted)
        np.testing.assert_array_equal(rows, of_many)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)


def put_by_parts(array):
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), P("model"))
    return jax.device_put(array, sharding)
