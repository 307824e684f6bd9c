"""Exchanging ids with the owners of rows has the results of gathering all ids."""

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
from sparsejax.ops import row_update, scatter_gradient
from sparsejax.ops.row_update import TrainedKernel
from sparsejax.optimizers.row_gradient import RowTerms

ROWS, FEATURES, HIDDEN = 64, 700, 16
PADDED = 768


def few_each(*, wrong=False, repeat=1):
    """Makes rows of a few entries with duplicates; or with one wrong id, and nine that exceed the
    capacity.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, ROWS)
    lengths[:2] = 0, 3
    indices = rng.integers(0, FEATURES, lengths.sum()).astype(np.int32)
    indices[:3] = 7, 7, 600
    indices -= indices % repeat
    if wrong:
        indices[5] = FEATURES
        lengths[-9:] += 1
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    data = rng.standard_normal(len(indices)).astype(np.float32)
    leaves = (jnp.asarray(leaf) for leaf in (data, indices, indptr))
    return sj.CSR.tree_unflatten(FEATURES, (*leaves, None))


def mesh_of(shape):
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def divided(x, room, wire=None, distinct=None):
    nse, parts = x.nse, exchange.parts_of(x)
    share = exchange.Share(room, distinct=distinct)
    return exchange.divided(parts, nse=nse, by_rows=True, share=share, wire_dtype=wire)


@functools.partial(jax.jit, static_argnames=("room", "wire", "distinct", "on_mesh"))
def used(x, dy, w, *, room=None, wire=None, distinct=None, on_mesh=False):
    """The lookup, gradients, and new rows of a step whose terms are added last."""

    def total(data, w):
        y = x.with_data(data)
        y = sj.gather_matmul(divided(y, room, wire, distinct) if on_mesh else y, w)
        return jnp.sum(jnp.where(jnp.isnan(y), 0, y) * dy), y

    (_, y), slopes = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x.data, w)
    xs = [x, x]
    if on_mesh:
        xs = [divided(x, room, wire, distinct), divided(x, None)]
        ways = [x.route is not None and x.route.distinct for x in xs]
        assert ways == [distinct is not None, False]
    terms = scatter_gradient.row_terms(xs, [dy, 2 * dy], len(w))
    rule = sj.optimizers.adagrad(0.1)
    trained = TrainedKernel(w, rule.init(w.shape), None)
    after = row_update.step_terms(rule, trained, terms, row_update.Passed(jnp.int32(0)))
    flag = xs[0].crowded() if on_mesh else None
    return (y, slopes, after.w), flag


def operands():
    rng = np.random.default_rng(1)
    w = rng.standard_normal((PADDED, HIDDEN)).astype(np.float32)
    return jnp.asarray(rng.standard_normal((ROWS, HIDDEN)), jnp.float32), jnp.asarray(w)


# A room is a program. Of the last mesh each device has all rows, so it has no places.
@pytest.mark.parametrize(
    ("shape", "rooms", "distinct"),
    [
        ((1, 8), [0.5], None),
        ((2, 4), [8.0, 0.5], None),
        ((8, 1), [8.0], None),
        ((1, 8), [8.0], 0.8),
        ((2, 4), [8.0, 0.5], 0.8),
    ],
)
def test_places_change_no_result(shape, rooms, distinct):
    """Enough places, and too few, where all devices gather all ids.

    Distinct ids have 7 places of each pair of devices, or one.
    """
    for wrong in False, True:
        repeat = 1 if distinct is None else 64
        x, (dy, w) = few_each(wrong=wrong, repeat=repeat), operands()
        dy = jnp.where(jnp.isnan(sj.gather_matmul(x, w)), 0, dy)
        want, _ = used(x, dy, w)
        assert bool(np.isnan(want[0]).any()) == wrong
        with mesh_of(shape):
            w = jax.device_put(w, P("model", None))
            for room in rooms:
                got, crowded = used(
                    x, dy, w, room=room, distinct=distinct, on_mesh=True
                )
                if shape[1] > 1:
                    assert bool(crowded) == (room == 0.5 or wrong)
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                    got,
                    want,
                )


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (1, 8)])
def test_each_row_crosses_once(shape):
    """Each device asks for ids of its own; with eight owners, some has too few places."""
    rng, (_, w) = np.random.default_rng(2), operands()
    some = rng.integers(0, FEATURES, (8, 9))
    some[0] = np.arange(9)  # all of one owner
    ids = np.stack([rng.choice(row, 14) for row in some]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[3] = -1
    flat, dy = ids.reshape(-1), rng.standard_normal((ids.size, HIDDEN)).astype("f4")
    used = (flat >= 0)[:, None]
    slopes = np.zeros(w.shape)
    np.add.at(slopes, flat, np.where(used, dy, 0))

    @functools.partial(jax.jit, static_argnums=3)
    def both(ids, dy, w, wire):
        x = exchange.one_each(ids, PADDED, distinct=9, wire_dtype=wire)
        assert x.route is not None and x.route.distinct
        assert (x.crowded() is None) == (shape[1] < 8)
        y, pull = jax.vjp(lambda w: sj.gather_matmul(x, w), w)
        touched, values = scatter_gradient.row_gradient([x], [dy], PADDED)
        return y, *pull(dy), touched, values

    with mesh_of(shape):
        w = jax.device_put(w, P("model", None))
        for wire, most in (None, 1e-5), ("bfloat16", 1e-2):
            y, dense, touched, values = both(flat, dy, w, wire)
            rows = np.zeros((PADDED, HIDDEN))
            kept = np.asarray(touched) < PADDED
            rows[np.asarray(touched)[kept]] = np.asarray(values)[kept]
            wanted = np.where(used, np.asarray(w)[flat], 0)
            for got, want in (y, wanted), (dense, slopes), (rows, slopes):
                assert np.abs(got - want).max() < most * np.abs(want).max()
            assert sorted(np.asarray(touched)[kept]) == sorted({*flat} - {-1})
            # Along "data" alone rows stay. With too few places, all is gathered as it is.
            narrow = wire is not None and shape[1] < 8
            assert (np.abs(y - wanted).max() > 0) == (narrow and shape[1] == 2)
            assert (np.abs(rows - slopes).max() > 1e-5) == narrow


def test_narrow_numbers_on_the_wire():
    """Sums and gradients cross as bfloat16: errors are of its size, and not zero."""
    x, (dy, w) = few_each(), operands()
    want, _ = used(x, dy, w)
    with mesh_of((2, 4)):
        w = jax.device_put(w, P("model", None))
        got, _ = used(x, dy, w, room=8.0, wire="bfloat16", on_mesh=True)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        assert 1e-5 < error < 1e-2


def test_rows_that_wait_are_the_same():
    """Whatever the number is that they wait for."""
    parts = jax.tree.map(lambda a: jnp.stack([a, a])[None], few_each())
    route = exchange.Route(parts, parts, None, None)
    x = exchange.DividedRows(parts, route, 2 * parts.nse, None)
    with mesh_of((1, 2)):
        waiting = jax.jit(lambda number: x.read_after(jnp.full((ROWS, 3), number)))
        for number in np.nan, -0.0, -2.0, np.inf:
            jax.tree.map(np.testing.assert_array_equal, waiting(number), x)


@pytest.mark.parametrize("distinct", [None, 0.8])
def test_results_of_another_dtype(distinct):
    """They are rounded once, behind the exchange, and so are the sums of their gradients."""
    x, (dy, w) = few_each(repeat=64), operands()
    dy = dy.astype(jnp.bfloat16)
    want = sj.gather_matmul(x, w)
    narrow = sj.gather_matmul(x, w, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, want.astype(jnp.bfloat16))
    gradient = scatter_gradient.row_terms([x], [dy], PADDED)

    @jax.jit
    def both(x, dy, w):
        mine = divided(x, 8.0, distinct=distinct)
        y = sj.gather_matmul(mine, w, dtype=jnp.bfloat16)
        terms = scatter_gradient.row_terms([mine], [dy], PADDED)
        return y, terms.ids(), terms.values()

    with mesh_of((2, 4)):
        y, ids, values = both(x, dy, jax.device_put(w, P("model", None)))
    assert y.dtype == jnp.bfloat16 and values.dtype == jnp.float32
    np.testing.assert_allclose(
        y.astype(jnp.float32), narrow.astype(jnp.float32), rtol=2**-7, atol=1e-6
    )
    used = np.asarray(ids) < PADDED
    count = int(used.sum())
    np.testing.assert_array_equal(np.asarray(ids)[used], gradient.ids()[:count])
    np.testing.assert_allclose(
        np.asarray(values)[used], gradient.values()[:count], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(TypeError, match="dtype is int32; results are floating"):
        sj.gather_matmul(x, w, dtype=jnp.int32)


def test_terms_of_either_way():
    """They cross programs and add up, and touch no row if they are not chosen."""
    x, (dy, w) = few_each(), operands()
    want = scatter_gradient.dense_gradient(x, dy, PADDED)
    rule = sj.optimizers.adagrad(0.1)

    @functools.partial(jax.jit, static_argnames="room")
    def made(x, dy, room):
        return RowTerms(scatter_gradient.row_terms([divided(x, room)], [dy], PADDED))

    @jax.jit
    def used(g, w):
        trained = TrainedKernel(w, rule.init(w.shape), None)
        none = g.where(jnp.bool(False)).terms
        same = row_update.step_terms(
            rule, trained, none, row_update.Passed(jnp.int32(0))
        )
        return g.summed().todense(), same.w

    with mesh_of((1, 2)):
        w = jax.device_put(w, P("model", None))
        for room in 8.0, 0.5:
            g = made(x, dy, room)
            assert bool(g.terms.unsent.crowded) == (room == 0.5)
            dense, same = used(g, w)
            np.testing.assert_allclose(dense, want, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(same, w)


def test_all_rows_of_a_replicated_kernel():
    """Added as a whole, and gathered, which is better for many rows."""
    x, (dy, w) = few_each(), operands()
    for rows in 40, PADDED:
        x = sj.CSR.tree_unflatten(rows, (x.data, x.indices % rows, x.indptr, None))
        assert exchange.adds_all(rows, x.nse) == (rows == 40)
        want = scatter_gradient.row_gradient([x], [dy], rows)

        @jax.jit
        def both(x, dy, w):
            mine = exchange.divided(exchange.parts_of(x), nse=x.nse, by_rows=False)
            return sj.gather_matmul(mine, w), *scatter_gradient.row_gradient(
                [mine], [dy], w.shape[0]
            )

        y = sj.gather_matmul(x, w[:rows])
        with mesh_of((2, 4)):
            got, ids, values = both(x, dy, w[:rows])
        np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5)
        count = len(np.unique(x.indices))
        np.testing.assert_array_equal(ids[:count], want[0][:count])
        assert (np.asarray(ids[count:]) == rows).all()
        np.testing.assert_allclose(
            values[:count], want[1][:count], rtol=1e-4, atol=1e-5
        )


def test_rows_that_do_not_fit_do_not_fit_on_their_device():
    """Those of a later device would fit by their number alone."""
    x = few_each(wrong=True)
    wrong = x.overfull_rows()
    assert wrong[-1] and not wrong.all()
    with mesh_of((1, 8)):
        parts = jax.jit(exchange.parts_of)(x)
    assert parts.indptr.shape == (1, 8, ROWS // 8 + 1)
    for device, indptr in enumerate(parts.indptr[0]):
        part = sj.CSR.tree_unflatten(FEATURES, (None, x.indices, indptr, None))
        mine = slice(device * ROWS // 8, (device + 1) * ROWS // 8)
        np.testing.assert_array_equal(part.overfull_rows(), wrong[mine])


def numbers_of(text, operation, kind):
    """The number of elements in an operation's result on each device."""
    found = re.findall(rf'"stablehlo.{operation}".*?-> tensor<([\dx]+)x{kind}>', text)
    return sum(math.prod(map(int, sizes.split("x"))) for sizes in found)


# Numbers of two bytes cross as bits.
@pytest.mark.parametrize(("wire", "kind"), [(None, "f32"), ("bfloat16", "ui16")])
def test_only_what_is_needed_moves(wire, kind):
    """One id in each of 4,096 rows, 8 devices: 1.5 / 8 of the numbers, both ways."""
    rows = 4096
    leaves = (None, jnp.zeros(rows, jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32))
    x = sj.CSR.tree_unflatten(FEATURES, (*leaves, None))
    w = jnp.zeros((PADDED, HIDDEN))

    def both(x, w, dy):
        mine = divided(x, None, wire)
        terms = scatter_gradient.row_terms([mine], [dy], PADDED)
        return sj.gather_matmul(mine, w), terms.values()

    with mesh_of((1, 8)):
        text = jax.jit(both).lower(x, w, jnp.zeros((rows, HIDDEN))).as_text()
    places = 96  # of the 512 rows of a device
    assert numbers_of(text, "all_to_all", kind) == 2 * 8 * places * HIDDEN
    size = jnp.dtype(wire or jnp.float32)
    sent = exchange.bytes_sent(rows, rows, HIDDEN, data=1, model=8, wire_dtype=size)
    assert sent.sums == sent.gradients == 7 * places * HIDDEN * size.itemsize
    # What it takes otherwise is in the same program.
    assert "stablehlo.reduce_scatter" in text and "stablehlo.all_gather" in text
