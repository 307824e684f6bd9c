"""An exchange of few rows gives what an exchange of all rows gives."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax as sj
from sparsejax.mesh import exchange
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.ops import row_update, scatter_gradient
from sparsejax.ops.row_update import TrainedKernel

ROWS, FEATURES, HIDDEN = 64, 700, 128
PADDED = 768


def one_each(*, wrong=False, extra=0):
    """About one entry a row; with `extra`, entries that do not fit."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, ROWS)
    lengths[:2] = 0, 2
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    indices = rng.integers(0, FEATURES, indptr[-1] - extra).astype(np.int32)
    if wrong:
        indices[5] = FEATURES
    data = rng.standard_normal(len(indices)).astype(np.float32)
    leaves = (jnp.asarray(leaf) for leaf in (data, indices, indptr))
    return sj.CSR.tree_unflatten(FEATURES, (*leaves, None))


def mesh_of(shape):
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def spread(x, room):
    return dataclasses.replace(ShardedCSR.of(x), spread=True, room=room)


@functools.partial(jax.jit, static_argnames="room")
def used(x, dy, w, *, room=None):
    """The lookup, and new rows of a step whose terms are added at last."""
    if room is not None:
        x = spread(x, room)
    terms = scatter_gradient.row_terms([x, x], [dy, 2 * dy], len(w))
    rule = sj.optimizers.adagrad(0.1)
    trained = TrainedKernel(w, rule.init(w.shape), None)
    after = row_update.step_terms(rule, trained, terms, jnp.int32(0))
    return sj.gather_matmul(x, w), after.w


@pytest.mark.parametrize(
    ("shape", "options"), [((1, 8), {}), ((2, 4), {"wrong": True, "extra": 9})]
)
def test_room_changes_no_result(shape, options):
    x, rng = one_each(**options), np.random.default_rng(1)
    w = rng.standard_normal((PADDED, HIDDEN)).astype(np.float32)
    dy = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
    want = used(x, dy, w)
    assert bool(np.isnan(want[0]).any()) == bool(options)
    with mesh_of(shape):
        w = jax.device_put(w, P("model", None))
        for room in (7, 1):  # enough, too little
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                used(x, dy, w, room=room),
                want,
            )


def floats_of(text, operation):
    """How many numbers an operation has as its result, on each device."""
    found = re.findall(rf'"stablehlo.{operation}".*?-> tensor<([\dx]+)xf32>', text)
    return sum(math.prod(map(int, sizes.split("x"))) for sizes in found)


def test_only_what_is_needed_moves():
    """One id in each of 4,096 rows, 8 devices: 1.5 / 8 of the numbers, both ways."""
    rows = 4096
    leaves = (None, jnp.zeros(rows, jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32))
    x = sj.CSR.tree_unflatten(FEATURES, (*leaves, None))
    w = jnp.zeros((PADDED, HIDDEN))

    def both(x, w, dy, room):
        blocks = spread(x, room)
        terms = scatter_gradient.row_terms([blocks], [dy], PADDED)
        return sj.gather_matmul(blocks, w), terms.values()

    with mesh_of((1, 8)):
        room = exchange.default_room(rows, rows)
        assert room == 96  # of the 512 rows of a device
        dy = jnp.zeros((rows, HIDDEN))
        run = jax.jit(both, static_argnums=3)
        text = run.lower(x, w, dy, room).as_text()
    # What it takes otherwise is in the same program.
    assert "stablehlo.reduce_scatter" in text and "stablehlo.all_gather" in text
    assert floats_of(text, "all_to_all") == 2 * 8 * room * HIDDEN
