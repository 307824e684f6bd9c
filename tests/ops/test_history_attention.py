"""history_attention and its gradients against NumPy in float64."""

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from memory import temporary_bytes

from sparsejax.ops import history_attention as ops
from sparsejax.ops import implementations
from sparsejax.ops.history_attention import history_attention, time_thresholds

FORMS = "xla", "xla_gpu"
# Empty histories, one entry, some in one block, and longer than two blocks.
LENGTHS = 0, 1, 5, 0, 290, 2, 40, 0
TOKENS, HEADS, DIM, PLACES, BUCKETS = 350, 2, 8, 100, 60


def make(lengths=LENGTHS, tokens=TOKENS, heads=HEADS, dim=DIM, seed=0):
    """Draws q, k, v, indptr, times and both biases in float64; padding has invalid values."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, tokens, heads, dim))
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    used = int(indptr[-1])
    # From seconds to years, some of them equal.
    gaps = np.floor(np.exp(rng.uniform(-2, 12, tokens)))
    times = np.cumsum(gaps) % 2**23  # exact in float32, also their differences
    for start, end in itertools.pairwise(indptr):
        times[start:end] = np.sort(times[start:end])
    for x in (q, k, v, times):
        x[used:] = np.nan
    place, time = (rng.standard_normal(n) for n in (PLACES, BUCKETS))
    return q, k, v, indptr, times, place, time


def oracle(
    q, k, v, indptr, times, place, time, dy=None, *, rule, scale, divisor
) -> Any:
    """The result; with `dy` also the gradients of q, k, v, place and time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
    dplace: Any = None if place is None else np.zeros(len(place))
    dtime: Any = None if time is None else np.zeros(len(time))
    distance: Any = None
    bucket: Any = None
    for start, end in itertools.pairwise(indptr):
        own, n = slice(start, end), end - start
        scores = scale * np.einsum("thd,shd->hts", q[own], k[own])
        apart = np.arange(n)[:, None] - np.arange(n)
        seen = apart >= 0
        if place is not None:
            distance = np.clip(apart, 0, len(place) - 1)
            scores += place[distance]
        if time is not None:
            since = np.where(seen, times[own, None] - times[None, own], 0)
            bucket = np.floor(np.log(np.maximum(since, 1)) / 0.301).astype(int)
            bucket = np.minimum(bucket, len(time) - 1)
            scores += time[bucket]
        share = 1 / (1 + np.exp(-scores))
        if rule == "silu":
            weights = np.where(seen, scores * share, 0)
        else:
            weights = np.exp(np.where(seen, scores, -np.inf))
            weights /= weights.sum(axis=2, keepdims=True)
        y[own] = np.einsum("hts,shd->thd", weights, v[own]) / divisor
        if dy is None:
            continue
        out = dy[own] / divisor
        pulled = np.einsum("thd,shd->hts", out, v[own])
        if rule == "silu":
            ds = np.where(seen, pulled * share * (1 + scores * (1 - share)), 0)
        else:
            inner = (weights * pulled).sum(axis=2, keepdims=True)
            ds = weights * (pulled - inner)
        dv[own] = np.einsum("hts,thd->shd", weights, out)
        dq[own] = scale * np.einsum("hts,shd->thd", ds, k[own])
        dk[own] = scale * np.einsum("hts,thd->shd", ds, q[own])
        if place is not None:
            np.add.at(dplace, distance, ds.sum(0))
        if time is not None:
            np.add.at(dtime, bucket, ds.sum(0))
    return y if dy is None else (dq, dk, dv, dplace, dtime)


@functools.partial(
    jax.jit, static_argnames=("rule", "form", "scale", "divisor", "precision")
)
def attend(
    q,
    k,
    v,
    indptr,
    times,
    place,
    time,
    *,
    rule,
    form,
    scale,
    divisor=3.0,
    precision=None,
):
    return history_attention(
        q,
        k,
        v,
        indptr,
        activation=rule,
        scale=scale,
        divisor=divisor,
        place_bias=place,
        times=times,
        time_bias=time,
        implementation=form,
        precision=precision,
    )


@functools.partial(jax.jit, static_argnames=("rule", "form", "scale", "divisor"))
def gradients(q, k, v, indptr, times, place, time, dy, **options):
    def of(q, k, v, place, time):
        return attend(q, k, v, indptr, times, place, time, **options)

    return jax.vjp(of, q, k, v, place, time)[1](dy)


def close(actual, want, error):
    """Compares arrays, with a tolerance relative to the largest expected element."""
    size = np.sqrt(np.mean(np.square(want))) if np.size(want) else 1.0
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, want, rtol=error, atol=8 * error * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rule", "scale", "dtype", "biased"),
    [
        ("silu", 1.0, jnp.float32, True),
        ("silu", 0.5, jnp.bfloat16, False),
        ("softmax", 0.25, jnp.float32, True),
    ],
)
def test_equals_float64(form, rule, scale, dtype, biased):
    *qkv, indptr, times, place, time = make()
    qkv = [jnp.asarray(x, dtype) for x in qkv]
    dy = np.random.default_rng(9).standard_normal(qkv[0].shape)
    biases = (times, place, time) if biased else (None, None, None)
    biases = [None if x is None else x.astype(np.float32) for x in biases]
    options: dict[str, Any] = {"rule": rule, "scale": scale, "divisor": 3.0}
    used = slice(0, indptr[-1])
    inner = [np.asarray(x, np.float64)[used] for x in qkv]
    dy = jnp.asarray(dy, dtype)
    given = *inner, indptr, *biases
    error = 2e-5 if dtype == jnp.float32 else 2e-2
    y = attend(*qkv, indptr, *biases, form=form, **options)
    assert y.dtype == dtype
    close(y[used], oracle(*given, **options), error)
    assert not np.any(y[indptr[-1] :])
    found = gradients(*qkv, indptr, *biases, dy, form=form, **options)
    dy = np.asarray(dy, np.float64)[used]
    want = oracle(*given, dy=dy, **options)
    for actual, exact in zip(found, want, strict=True):
        if exact is None:
            assert actual is None
            continue
        inside = len(exact) if exact.ndim == 1 else indptr[-1]
        close(actual[:inside], exact, error)
        assert not np.any(actual[inside:])


@pytest.mark.parametrize("rule", ["silu", "softmax"])
def test_the_oracle_has_the_gradient_of_its_values(rule):
    """By finite differences; so the forms have it too."""
    q, k, v, indptr, times, place, time = make((3, 0, 5), 8, 1, 4)
    place = place[:4]
    dy = np.random.default_rng(1).standard_normal(q.shape)
    options: dict[str, Any] = {"rule": rule, "scale": 0.7, "divisor": 2.0}
    parts = [q, k, v, place, time]
    found = oracle(q, k, v, indptr, times, place, time, dy, **options)

    def value(parts):
        q, k, v, place, time = parts
        return np.sum(dy * oracle(q, k, v, indptr, times, place, time, **options))

    rng = np.random.default_rng(2)
    for i, slope in enumerate(found):
        way = rng.standard_normal(slope.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(parts)
            moved[i] = parts[i] + step * way
            ends.append(value(moved))
        np.testing.assert_allclose(
            (ends[0] - ends[1]) / 2e-6, np.sum(slope * way), rtol=1e-6
        )


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_padded_attention_of_hstu(form):
    """The sums and gradients of what HSTU was first, with padded histories."""
    rng = np.random.default_rng(0)
    biases = [jnp.float32(rng.standard_normal(n)) for n in (9, 128)]
    lengths = np.array([9, 0, 1, 4])
    inside = np.arange(9) < lengths[:, None]
    q, k, v, dy = jnp.float32(rng.standard_normal((4, 4, 9, 2, 4)))
    times = np.sort(rng.integers(0, 10**6, (4, 9)), axis=1).astype(np.float32)

    def padded(q, k, v, place, time):
        apart = np.maximum(np.arange(9)[:, None] - np.arange(9), 0)
        since = jnp.abs(times[:, :, None] - times[:, None])
        bucket = (jnp.log(jnp.maximum(since, 1)) / 0.301).astype(jnp.int32)
        biases = place[apart][None, None] + time[jnp.minimum(bucket, 127)][:, None]
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + biases
        before = jnp.tri(9, dtype=bool)[None, None]
        weights = jnp.where(before, nnx.silu(scores) / 9, 0)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    def packed(q, k, v, place, time):
        indptr = np.cumsum([0, *lengths])
        q, k, v, mine = (jnp.asarray(x)[inside] for x in (q, k, v, times))
        y = attend(
            q,
            k,
            v,
            indptr,
            mine,
            place,
            time,
            rule="silu",
            form=form,
            scale=1.0,
            divisor=9.0,
        )
        return jnp.zeros((4, 9, 2, 4), y.dtype).at[inside].set(y)

    mask = inside[..., None, None]
    want, pull = jax.vjp(padded, q, k, v, *biases)
    found, pull_packed = jax.vjp(packed, q, k, v, *biases)
    np.testing.assert_allclose(found, want * mask, rtol=1e-5, atol=1e-6)
    for a, b in zip(pull_packed(dy * mask), pull(dy * mask), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", ["silu", "softmax"])
def test_what_is_later_or_elsewhere_changes_no_bit(form, rule):
    *qkv, indptr, times, place, time = make()
    qkv = [np.float32(x) for x in qkv]
    biases = np.float32(times), np.float32(place), np.float32(time)
    options: dict[str, Any] = {"rule": rule, "form": form, "scale": 1.0}
    y = np.asarray(attend(*qkv, indptr, *biases, **options))
    # All but entries 6 to 205, which are the first 200 of the history of 290.
    kept = np.zeros(TOKENS, bool)
    kept[6:206] = True
    others = [np.where(kept[:, None, None], x, 7 - 2 * x) for x in qkv]
    again = np.asarray(attend(*others, indptr, *biases, **options))
    np.testing.assert_array_equal(again[kept], y[kept])
    assert np.any(again[206:296] != y[206:296])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_do(form):
    *qkv, _, times, place, time = make((), 3)
    for indptr in (np.zeros(1, int), np.zeros(4, int)):
        options: dict[str, Any] = {"rule": "silu", "form": form, "scale": 1.0}
        y = attend(*qkv, indptr, times, place, time, **options)
        np.testing.assert_array_equal(y, np.zeros(y.shape))
        dy = np.ones(y.shape)
        for x in gradients(*qkv, indptr, times, place, time, dy, **options):
            np.testing.assert_array_equal(x, np.zeros(x.shape))
    nothing = jnp.zeros((0, 2, 4))
    assert history_attention(nothing, nothing, nothing, indptr).shape == (0, 2, 4)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_wrong_in_a_jax_array_makes_its_history_nan(form):
    *qkv, _, times, place, time = make((3, 4, 2, 5), 14)
    qkv = [np.float32(x) for x in qkv]
    # The last history does not fit, and the second has times that go back.
    indptr = jnp.array([0, 3, 7, 9, 15])
    times[:] = np.arange(14)
    times[3:5] = -5, -7  # also before the first history's last, which is no matter
    options: dict[str, Any] = {"rule": "silu", "form": form, "scale": 1.0}
    y = attend(*qkv, indptr, times, place, time, **options)
    wrong = np.isnan(y).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(wrong), [3, 4, 5, 6, *range(9, 14)])
    times[:] = np.arange(14)
    times[8] = np.inf
    y = attend(*qkv, jnp.array([0, 3, 7, 9, 14]), times, place, time, **options)
    wrong = np.isnan(y).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(wrong), [7, 8])


@pytest.mark.parametrize("form", FORMS)
def test_on_a_mesh(form):
    """Each device has its own histories; the gradients of the biases are added."""
    parts = [make((20, 0, 30 + i), 60, 1, 4, seed=i) for i in range(8)]
    q, k, v, indptr, times = (
        np.concatenate(x) for x in list(zip(*parts, strict=True))[:5]
    )
    place, time = (np.float32(x) for x in parts[0][5:])
    q, k, v, times = (np.float32(np.nan_to_num(x)) for x in (q, k, v, times))
    options: dict[str, Any] = {"rule": "silu", "form": form, "scale": 1.0}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own, P = jax.P("data"), jax.P

    def loss(place, time):
        apply = jax.shard_map(
            lambda *x: attend(*x, **options),
            mesh=mesh,
            in_specs=(own, own, own, own, own, P(), P()),
            out_specs=own,
        )
        return jnp.sum(jnp.sin(apply(q, k, v, indptr, times, place, time)))

    @jax.jit
    def alone(*part):
        def of(place, time):
            return jnp.sum(jnp.sin(attend(*part, place, time, **options)))

        return jax.value_and_grad(of, (0, 1))(place, time)

    value, slopes = jax.jit(jax.value_and_grad(loss, (0, 1)))(place, time)
    split = (np.array_split(x, 8) for x in (q, k, v, indptr, times))
    each = [alone(*part) for part in zip(*split, strict=True)]
    want, exact = jax.tree.map(lambda *x: np.sum(x, axis=0), *each)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, b in zip(slopes, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_lowers_for_hopper_also_in_a_shard_map(monkeypatch):
    """The GPU programs are chosen for operands that they take; not for others."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=auto)
    indptr = jnp.array([0, 90, 130, 0, 50, 100])
    times, place, time = jnp.zeros(270), jnp.ones(PLACES), jnp.ones(BUCKETS)

    def lowered(dim, dtype, rule):
        def loss(q, place, time):
            apply = jax.shard_map(
                lambda *x: attend(*x, rule=rule, form=None, scale=1.0),
                mesh=mesh,
                in_specs=(*[jax.P("data")] * 5, jax.P(), jax.P()),
                out_specs=jax.P("data"),
            )
            y = apply(q, q, q, indptr, times, place, time)
            return jnp.sum(y.astype(jnp.float32))

        q = jax.ShapeDtypeStruct((270, 2, dim), dtype)
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, place, time)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    # 135 tokens a device are padded to 256.
    assert "mosaic_gpu" in lowered(64, jnp.bfloat16, "silu")
    assert "mosaic_gpu" not in lowered(32, jnp.bfloat16, "silu")
    assert "mosaic_gpu" not in lowered(64, jnp.float32, "softmax")


@pytest.mark.parametrize(("rule", "programs"), [("silu", 3), ("softmax", 4)])
def test_layers_alike_share_their_gpu_programs(rule, programs, monkeypatch):
    """Each is in the lowered program once, so that it is compiled once."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)

    def loss(q, layers):
        for _ in range(layers):
            q = history_attention(q, q, q, jnp.array([0, 90, 130]), activation=rule)
        return jnp.sum(q.astype(jnp.float32))

    q = jax.ShapeDtypeStruct((256, 1, 64), jnp.bfloat16)
    for layers in (1, 3):
        traced = jax.jit(jax.value_and_grad(loss), static_argnums=1).trace(q, layers)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == programs


@pytest.mark.parametrize("form", FORMS)
def test_memory_grows_with_the_number_of_tokens(form):
    def used(tokens):
        q = jax.ShapeDtypeStruct((tokens, 1, 8), jnp.float32)
        others = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (tokens, 50, 40))
        indptr = jax.ShapeDtypeStruct((3,), jnp.int32)
        options: dict[str, Any] = {"rule": "silu", "form": form, "scale": 1.0}
        return temporary_bytes(
            functools.partial(gradients, **options), q, q, q, indptr, *others, q
        )

    assert used(8192) < 2.2 * used(4096)


def test_many_histories_do_not_make_the_program_larger():
    """The compile time grew with the logarithm of their number, and then with the number."""
    q = jax.ShapeDtypeStruct((512, 1, 8), jnp.float32)

    def size(histories):
        indptr = jax.ShapeDtypeStruct((histories + 1,), jnp.int32)
        compiled = jax.jit(history_attention).lower(q, q, q, indptr).compile()
        return str(compiled.as_text()).count("\n")

    assert size(513) <= 1.02 * size(5)


def test_thresholds_are_those_of_the_logarithm():
    least = time_thresholds(40)
    near = np.concatenate([least[1:], np.nextafter(least[1:], np.float32(0))])
    exact = np.log(near.astype(np.float64)) / 0.301
    bucket = np.searchsorted(least, near, side="right") - 1
    np.testing.assert_array_equal(bucket, np.floor(exact))
    assert len(time_thresholds(1)) == 1


def wrong(message, error=ValueError, **changes):
    return pytest.param(changes, error, message, id=message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        wrong("activation is", activation="relu"),
        wrong("divisor is", divisor=0),
        wrong("expected q, k and v", k=jnp.zeros((4, 2, 2))),
        wrong("cast them to one", TypeError, k=jnp.zeros((4, 1, 2), jnp.bfloat16)),
        wrong("indptr has shape", indptr=np.zeros((1, 2), int)),
        wrong("indptr is float", TypeError, indptr=np.zeros(2)),
        wrong("go together", times=np.zeros(4)),
        wrong("place_bias has shape", place_bias=jnp.zeros((2, 2))),
        wrong("times has shape", times=np.zeros(3), time_bias=jnp.zeros(3)),
        wrong("must ascend from 0", indptr=np.array([0, 3, 2])),
        wrong("but q has 4 tokens", indptr=np.array([0, 5])),
        wrong(
            r"times\[2\] is 1", times=np.array([1, 3, 1, 2.0]), time_bias=jnp.zeros(3)
        ),
        wrong(r"times\[0\] is inf", times=np.full(4, np.inf), time_bias=jnp.zeros(3)),
        wrong("has no form", NotImplementedError, implementation="cusparse"),
        wrong("takes bfloat16", NotImplementedError, implementation="mosaic_gpu"),
    ],
)
def test_wrong_input(changes, error, message):
    x = jnp.zeros((4, 1, 2))
    arguments = {"q": x, "k": x, "v": x, "indptr": np.array([0, 3, 4])} | changes
    operands = [arguments.pop(name) for name in ("q", "k", "v", "indptr")]
    unchecked = inspect.unwrap(history_attention)  # past the checks of its annotations
    with pytest.raises(error, match=message):
        unchecked(*operands, **arguments)


@pytest.mark.parametrize(
    ("dim", "dtype", "writes"),
    [(64, "bfloat16", 0), (64, "float32", 1), (32, "bfloat16", 1)],
)
def test_scores_that_are_written(dim, dtype, writes, monkeypatch):
    """None by GPU programs; else those of some blocks, whatever the operands are."""
    others = ops.scores_at_once(1000, 2, dim, dtype)
    assert others > 0
    monkeypatch.setattr(ops, "custom_call_can_run", lambda *_, **__: True)
    found = ops.scores_at_once(1000, 2, dim, dtype)
    assert found == writes * others
