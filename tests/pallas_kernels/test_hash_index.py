"""The GPU program that finds keys: interpreted on a CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import Layout, TableKeys

# Tables of which several keys share a bucket, and of which buckets are full.
LAYOUT = Layout(rows=44, firsts=(0, 23), sizes=(23, 20))


@functools.cache
def filled(layout, count, tables=2, seed=0):
    """An index of random keys, and the keys."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 2**64, count, np.uint64)
    # Keys that differ in one word only, and the outermost ones. An index takes each once.
    names[: count // 3] >>= np.uint64(32)
    names[:2] = 0, 2**64 - 1
    names = rng.permutation(np.unique(names))
    count, high = len(names), (names >> np.uint64(32)).astype(np.uint32)
    table = rng.integers(0, tables, count).astype(np.int32)
    keys = TableKeys(table, high, names.astype(np.uint32))

    @jax.jit
    def add(index, keys, wanted):
        of, _ = hash_index.distinct(layout, keys, wanted)
        return hash_index.insert(layout, index, of, of.first)[0]

    # Later ones find their first bucket fuller, and take the second one.
    index, turn = hash_index.empty(layout), np.arange(count) % 3
    for some in range(3):
        index = add(index, keys, turn == some)
    return index, keys


def looked_for(keys, count, seed=1):
    """Some of the keys, other keys that differ in table or one word, and a mask of the keys to
    find.
    """
    rng = np.random.default_rng(seed)
    at = rng.integers(0, len(keys.table), count)
    table, high, low = (word[at].copy() for word in keys)
    table[::5] ^= 1
    high[1::7] ^= 1
    low[2::7] ^= np.uint32(2**31)
    return TableKeys(table, high, low), rng.random(count) < 0.9


@pytest.mark.parametrize("first_part", [0, 192])
def test_equals_the_operations_of_xla(running, first_part):
    index, keys = filled(LAYOUT, 12_000)
    index = jax.tree.map(lambda array: array[first_part : first_part + 128], index)
    keys, wanted = looked_for(keys, 400)

    def find(implementation):
        call = jax.jit(
            functools.partial(hash_index.find, LAYOUT, implementation=implementation)
        )
        return np.asarray(call(index, keys, wanted, np.int32(first_part)))

    expected = find("xla")
    assert np.sum(expected >= 0) > 20 and np.sum(wanted & (expected < 0)) > 20
    with running():
        actual = find("mosaic_gpu")
    np.testing.assert_array_equal(actual, expected)


def test_no_keys(running):
    index, keys = filled(LAYOUT, 12_000)
    none = jax.tree.map(lambda word: word[:0], keys)
    with running():
        rows = hash_index.find(
            LAYOUT, index, none, jnp.zeros(0, bool), implementation="mosaic_gpu"
        )
    assert rows.shape == (0,)


def test_lowers_for_cuda():
    index, keys = filled(LAYOUT, 12_000)
    find = functools.partial(hash_index.find, LAYOUT, implementation="mosaic_gpu")
    traced = jax.jit(find).trace(index, keys, np.ones(12_000, bool))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
def test_real_sizes():
    layout = Layout(rows=8192, firsts=(0,), sizes=(8192,))
    index, keys = filled(layout, 2_000_000, tables=1)
    keys, wanted = looked_for(keys, 1_000_000)
    keys = keys._replace(table=jnp.zeros_like(keys.table))
    find = functools.partial(hash_index.find, layout)
    expected, actual = (
        jax.jit(functools.partial(find, implementation=name))(index, keys, wanted)
        for name in ("xla", "mosaic_gpu")
    )
    assert np.sum(np.asarray(expected) >= 0) > 500_000
    np.testing.assert_array_equal(actual, expected)
