"""`output_loss` against a dense float64 oracle."""

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import matrices
import numpy as np
import optax
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import kernel_can_run
from memory import temporary_bytes
from tolerances import assert_close, eps_of_form

from sparsejax import losses
from sparsejax.ops import chunked_loss
from sparsejax.ops.chunked_loss import Layer, LossBatch, Method, Updates
from sparsejax.ops.gram_loss import loss_and_updates
from sparsejax.ops.output_loss import (
    output_loss,
    output_loss_in_chunks,
    output_loss_per_example,
    output_loss_per_example_in_chunks,
)
from sparsejax.sparse import CSR

RULES = [
    losses.SigmoidBinaryCrossEntropy(),
    losses.L2Loss(),
    losses.ScaledMarginalCrossEntropy(one_target=0.8, one_scale=3.0),
    losses.SoftmaxCrossEntropy(),
    losses.L1Loss(),
    losses.HingeLoss(),
    losses.L2HingeLoss(),
    losses.SigmoidBinaryCrossEntropy(ignore_zeros=True),
]
# The squared loss without scores. It has no scale.
GRAM = "l2_loss by Gram matrices"
every_rule = pytest.mark.parametrize("rule", [*RULES, GRAM], ids=str)
# Without those whose form is that of another.
main_rules = pytest.mark.parametrize("rule", [*RULES[:4], GRAM], ids=str)
# One that takes a single pass, the one that takes two, and the form without scores, for
# what no rule changes.
both_kinds = pytest.mark.parametrize("rule", [RULES[0], RULES[3], GRAM], ids=str)
OPERANDS = ("h", "kernel", "bias", "scale", "weights")


# The oracle: dense, in float64, derivatives by hand


def sigmoid(s):
    return np.exp(-np.logaddexp(0, -s))


def loss_and_slopes(rule, s, t, listed):
    """Losses `[batch]` and their derivatives with respect to the scores, `[batch, items]`."""
    rule = losses.L2Loss() if rule == GRAM else rule
    if getattr(rule, "ignore_zeros", False):
        all_items = dataclasses.replace(rule, ignore_zeros=False)
        value, slopes = values_and_slopes(all_items, s, t, listed)
        value, slopes = np.where(listed, value, 0), np.where(listed, slopes, 0)
    else:
        value, slopes = values_and_slopes(rule, s, t, listed)
    return value.sum(1), slopes


def values_and_slopes(rule, s, t, listed):
    """Losses of single scores, `[batch, items]`, and their derivatives."""
    if isinstance(rule, losses.SigmoidBinaryCrossEntropy):
        return np.logaddexp(0, s) - t * s, sigmoid(s) - t
    if isinstance(rule, losses.L2Loss):
        return (s - t) ** 2 / 2, s - t
    if isinstance(rule, losses.L1Loss):
        return np.abs(s - t), np.sign(s - t)
    if isinstance(rule, losses.HingeLoss):
        t = np.where(listed, t, -1)
        return np.maximum(0, 1 - t * s), np.where(t * s < 1, -t, 0)
    if isinstance(rule, losses.L2HingeLoss):
        d = s - np.abs(t)
        d = np.where(t > 0, np.minimum(0, d), np.maximum(0, d))
        return d**2 / 2, d
    if isinstance(rule, losses.SoftmaxCrossEntropy):
        total = t.sum(1, keepdims=True)
        lse = np.logaddexp.reduce(s, axis=1, keepdims=True)
        return t * (lse - s), total * np.exp(s - lse) - t
    logit = {p: np.log(p / (1 - p)) for p in (rule.one_target, rule.zero_target)}
    edges = np.abs(np.stack([s - logit[p] for p in logit]))
    assert edges.min() > 1e-5, "a score is so near a threshold that rounding decides"
    one = np.where(s < logit[rule.one_target], rule.one_scale, 0)
    zero = np.where(s > logit[rule.zero_target], rule.zero_scale, 0)
    value = np.where(listed, one * np.logaddexp(0, -s), zero * np.logaddexp(0, s))
    return value, np.where(listed, -one * sigmoid(-s), zero * sigmoid(s))


def oracle(rule, problem):
    """Loss, gradients, and the size of the terms of each sum."""
    labels = problem.labels
    n = labels.num_cols
    dense = matrices.oracle(labels)
    listed = matrices.oracle(dataclasses.replace(labels, data=None)) != 0
    x = {
        name: np.asarray(value, np.float64)
        for name, value in operands_of(rule, problem).items()
        if value is not None
    }
    h, kernel = x["h"], x["kernel"][:n]
    bias, scale = x.get("bias", np.zeros(n))[:n], x.get("scale", np.ones(n))[:n]
    weights = x.get("weights", np.ones(len(h)))
    raw = h @ kernel.T
    loss, slopes = loss_and_slopes(rule, raw * scale + bias, dense, listed)
    # The scores' own rounding errors, in the loss and carried on by the slopes.
    moved = (np.abs(h) @ np.abs(kernel).T) * np.abs(scale) + np.abs(bias) + 1
    size = np.abs(loss) + (moved * (np.abs(slopes) + np.abs(dense) + listed)).sum(1)
    delta = weights[:, None] * slopes
    spread = np.abs(weights)[:, None] * (np.abs(slopes) + np.abs(dense))
    # And in the slopes: no second derivative here is above the labels' sum or 3.
    bend = np.maximum(np.abs(dense).sum(1, keepdims=True), 1)
    spread = spread + np.abs(weights)[:, None] * bend * moved

    def gradients(d, a, absolute=lambda x: x):
        h, w, s = absolute(x["h"]), absolute(kernel), absolute(scale)
        out = {"h": (d * s) @ w, "kernel": s[:, None] * (d.T @ h)}
        out["bias"], out["scale"] = d.sum(0), (d * a).sum(0)
        out["weights"] = size if absolute is np.abs else loss
        extra = len(x["kernel"]) - n
        for name in ("kernel", "bias", "scale"):
            pad = [(0, extra)] + [(0, 0)] * (out[name].ndim - 1)
            out[name] = np.pad(out[name], pad)
        return {name: out[name] for name in x}

    return SimpleNamespace(
        per_example=loss,
        loss=float(weights @ loss),
        gradients=gradients(delta, raw),
        sizes=gradients(spread, np.abs(h) @ np.abs(kernel).T, np.abs),
        size=float(np.abs(weights) @ size),
        per_example_size=size,
    )


def make_problem(
    labels, *, hidden=5, extra_rows=3, options=OPERANDS, dtype=jnp.float32, seed=0
):
    """Random operands for these labels; `options` that are not named are None."""
    rng = np.random.default_rng(seed)
    batch, items = labels.shape
    rows = items + extra_rows

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    problem = {
        "h": normal(batch, hidden),
        "kernel": normal(rows, hidden),
        "bias": normal(rows),
        "scale": normal(rows) / 2 + 1,
        "weights": jnp.asarray(rng.uniform(0.5, 2, batch), jnp.float32),
    }
    needed = ("h", "kernel", *options)
    kept = {name: problem[name] if name in needed else None for name in OPERANDS}
    return SimpleNamespace(**kept, labels=labels)


def operands_of(rule, problem):
    kept = [name for name in OPERANDS if rule != GRAM or name != "scale"]
    return {name: getattr(problem, name) if name in kept else None for name in OPERANDS}


def form_of(rule) -> tuple[Any, dict[str, Any]]:
    """The rule, and options for the method that computes its loss."""
    return (losses.L2Loss(), {"form": "gram"}) if rule == GRAM else (rule, {})


def per_example_of(rule, problem, **options):
    rule, form = form_of(rule)
    return output_loss_per_example_in_chunks(
        problem.h,
        problem.kernel,
        problem.bias,
        problem.labels,
        loss=rule,
        scale=None if form else problem.scale,
        **form,
        **options,
    )


def loss_of(rule, operands, labels, *, chunk_scores=None, **options):
    rule, form = form_of(rule)
    function = output_loss
    if chunk_scores is not None or form:
        options |= {"chunk_scores": chunk_scores, **form}
        function = output_loss_in_chunks
    return function(
        operands["h"],
        operands["kernel"],
        operands["bias"],
        labels,
        loss=rule,
        scale=operands["scale"],
        weights=operands["weights"],
        **options,
    )


@functools.cache
def compiled(rule, **options):
    """Loss and gradients as a compiled function."""
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, rule, **options)))


def run(rule, problem, **options) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and gradients by name."""
    operands = operands_of(rule, problem)
    loss, gradients = compiled(rule, **options)(operands, problem.labels)
    return loss, {name: g for name, g in gradients.items() if g is not None}


def check(rule, problem, **options):
    want = oracle(rule, problem)
    dtype, eps = problem.h.dtype, None
    if dtype == jnp.float32:
        eps = eps_of_form(*map(options.get, ("precision", "implementation")))
    loss, gradients = run(rule, problem, **options)
    batch, hidden = problem.h.shape
    terms = batch * problem.labels.num_cols * hidden
    assert loss.dtype == jnp.float32
    close = functools.partial(assert_close, terms=terms, dtype=dtype, eps=eps)
    close(loss, want.loss, magnitude=want.size)
    assert set(gradients) == set(want.gradients)
    for name, gradient in gradients.items():
        assert gradient.dtype == getattr(problem, name).dtype
        size = want.sizes[name]
        try:
            close(gradient, want.gradients[name], magnitude=size)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None
    for name in ("kernel", "bias", "scale"):
        if name in gradients:
            padding = gradients[name][problem.labels.num_cols :]
            np.testing.assert_array_equal(padding, jnp.zeros_like(padding))


# Against the oracle


@every_rule
@pytest.mark.parametrize(
    ("valued", "chunk_scores"),
    [(False, 128), (True, None)],
    ids=["chunks", "one_chunk"],
)
def test_equals_the_oracle(rule, valued, chunk_scores):
    problem = make_problem(matrices.random_csr(6, 300, valued=valued))
    check(rule, problem, chunk_scores=chunk_scores)
    if valued:
        check_per_example(rule, problem, chunk_scores=chunk_scores)


def test_kept_scores_of_several_chunks_equal_the_oracle(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_SCORES", 6 * 128)
    check(RULES[3], make_problem(matrices.random_csr(6, 477, valued=True)))


def check_per_example(rule, problem, **options):
    got = per_example_of(rule, problem, **options)
    want, size = oracle(rule, problem), problem.labels.num_cols * problem.h.shape[1]
    eps = eps_of_form(*map(options.get, ("precision", "implementation")))
    assert_close(
        got, want.per_example, terms=size, magnitude=want.per_example_size, eps=eps
    )


@both_kinds
@pytest.mark.parametrize(  # the default is above
    ("precision", "implementation"), [("highest", "xla"), ("high", "xla_gpu")]
)
def test_every_precision_equals_the_oracle(rule, precision, implementation):
    problem = make_problem(matrices.random_csr(6, 300), hidden=16)
    options = {"precision": precision, "implementation": implementation}
    check(rule, problem, chunk_scores=128, **options)
    check_per_example(rule, problem, chunk_scores=128, **options)


@both_kinds
@pytest.mark.parametrize(
    "options", [(), ("bias",), ("scale",), ("weights",)], ids=lambda o: o or "none"
)
def test_bias_scale_and_weights_are_optional(rule, options):
    check(rule, make_problem(matrices.random_csr(4, 30), options=options))


@both_kinds
@given(matrix=matrices.csrs(unique=True), seed=st.integers(0, 99))
def test_awkward_labels(rule, matrix, seed):
    check(rule, make_problem(matrix, extra_rows=2, seed=seed))


@both_kinds
@pytest.mark.parametrize("valued", [False, True])
def test_labels_that_were_sorted_ahead(rule, valued):
    labels = matrices.random_csr(6, 300, valued=valued)
    check(rule, make_problem(labels.with_transposed()))


@main_rules
def test_bfloat16(rule):
    labels = matrices.random_csr(6, 300)
    problem = make_problem(labels, hidden=16, dtype=jnp.bfloat16, seed=1)
    check(rule, problem, chunk_scores=128)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_oracle_gradients_are_finite_differences(rule):
    labels = matrices.random_csr(3, 8, valued=True)
    problem = make_problem(labels, hidden=2, extra_rows=1)
    exact = {name: np.asarray(getattr(problem, name), np.float64) for name in OPERANDS}
    gradients = oracle(rule, problem).gradients

    def loss_at(name, index, step):
        moved = exact[name].copy()
        moved[index] += step
        return oracle(
            rule, SimpleNamespace(**exact | {name: moved}, labels=labels)
        ).loss

    for name, value in exact.items():
        for index in np.ndindex(value.shape):
            step = 1e-6
            slope = (loss_at(name, index, step) - loss_at(name, index, -step)) / (
                2 * step
            )
            np.testing.assert_allclose(
                gradients[name][index], slope, rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_equals_optax_on_dense_labels(rule):
    name = getattr(rule, "name", "")
    if not hasattr(optax, name):
        pytest.skip("optax has no such loss")
    problem = make_problem(matrices.random_csr(5, 40, valued=True), extra_rows=0)
    dense = problem.labels.todense()

    def reference(operands):
        scores = jnp.dot(operands["h"], operands["kernel"].T, precision="highest")
        scores = scores * operands["scale"][None] + operands["bias"][None]
        per_example = getattr(optax, name)(scores, dense)
        per_example = per_example.reshape(len(dense), -1).sum(1)
        return jnp.sum(operands["weights"] * per_example)

    operands = {name: getattr(problem, name) for name in OPERANDS}
    want = jax.jit(jax.value_and_grad(reference))(operands)
    got = run(rule, problem)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want
    )


@pytest.mark.parametrize(
    "loss", ["sigmoid_binary_cross_entropy", "softmax_cross_entropy"]
)
def test_second_derivatives(loss):
    labels = matrices.random_csr(3, 6, 0.4, seed=1)
    t = jnp.asarray(matrices.oracle(labels), jnp.float32)
    kernel = jax.random.normal(jax.random.key(0), (6, 2))

    def dense(h):
        scores = h @ kernel.T
        if loss == "softmax_cross_entropy":
            return -jnp.sum(t * jax.nn.log_softmax(scores))
        return jnp.sum(jax.nn.softplus(scores) - t * scores)

    def of_batch(h):
        return output_loss(h, kernel, None, labels, loss=loss)

    def of_examples(h):
        return jnp.sum(output_loss_per_example(h, kernel, None, labels, loss=loss))

    h = jax.random.normal(jax.random.key(1), (3, 2))
    want = jax.hessian(dense)(h)
    for function in (of_batch, of_examples):
        for hessian in (jax.jacfwd(jax.grad(function)), jax.jacrev(jax.grad(function))):
            np.testing.assert_allclose(hessian(h), want, rtol=1e-4, atol=1e-6)
        with pytest.raises(NotImplementedError, match="reverse mode: use jax.grad"):
            jax.jvp(function, (h,), (h,))


# The kernel, under the same function


def test_kernel_denies_items_under_l2():
    labels = matrices.random_csr(5, 300)
    problem = make_problem(labels, hidden=64, extra_rows=212, dtype=jnp.bfloat16)
    denied = ~matrices.oracle(labels).any(axis=0)
    problem.bias = problem.bias.at[:300].add(jnp.where(denied, -jnp.inf, 0))
    want = run(losses.L2Loss(), problem, implementation="xla")
    with kernel_can_run():
        got = run(losses.L2Loss(), problem, implementation="mosaic_gpu")
    assert np.isfinite(want[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.05, atol=0.05
        )


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (RULES[0], jnp.bfloat16),
        (RULES[2], jnp.bfloat16),
        (RULES[3], jnp.bfloat16),
        (RULES[3], jnp.float32),
    ],
    ids=str,
)
def test_kernel_equals_the_oracle(rule, dtype):
    labels = matrices.random_csr(5, 300)
    extra = 512 - 300
    problem = make_problem(labels, hidden=64, extra_rows=extra, dtype=dtype)
    with kernel_can_run():
        check(rule, problem, implementation="mosaic_gpu", chunk_scores=128 * 256)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernel_reads_and_writes_in_place(dtype):
    labels = matrices.random_csr(150, 500)
    options = ("bias", "weights")  # a scale makes copies of the kernel anyway
    problem = make_problem(
        labels, hidden=64, extra_rows=12, options=options, dtype=dtype
    )
    with kernel_can_run():
        check(RULES[0], problem, implementation="mosaic_gpu", chunk_scores=256 * 256)


@pytest.mark.parametrize(
    ("rule", "dtype"), [(RULES[0], jnp.bfloat16), (RULES[3], jnp.float32)], ids=str
)
def test_kernel_lowers_for_cuda_on_a_mesh(rule, dtype):
    # It cannot be interpreted there: devices would share one shared memory.
    mesh = mesh_of((2, 2))
    labels = matrices.random_csr(4, 1000)
    problem = make_problem(labels, hidden=64, extra_rows=24, dtype=dtype)
    operands = operands_of(rule, problem)
    options = {"implementation": "mosaic_gpu", "kernel_spec": P("model")}
    function = functools.partial(loss_of, rule, **options)
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(function)).trace(operands, labels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(
    ("rule", "options"),
    [(RULES[0], ()), (RULES[3], ()), *((rule, OPERANDS) for rule in (*RULES, GRAM))],
    ids=str,
)
def test_kernel_lowers_for_cuda(rule, options):
    labels = matrices.random_csr(5, 300)
    problem = make_problem(
        labels, hidden=128, extra_rows=212, options=options, dtype=jnp.bfloat16
    )
    operands = operands_of(rule, problem)
    function = functools.partial(loss_of, rule, implementation="mosaic_gpu")
    traced = jax.jit(jax.value_and_grad(function)).trace(operands, labels)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    count = 2 if isinstance(rule, losses.SoftmaxCrossEntropy) else 1
    # The kernel's rows are summed by label, and the gradient is made and then changed; a
    # sum and a change also join rows that are cut.
    count = 5 if rule == GRAM else count
    assert text.count("custom_call @mosaic_gpu") == count


# Of one block of columns that takes all shared memory, and of several.
@pytest.mark.parametrize("hidden", [256, 1024])
def test_kernel_in_place_lowers_for_cuda(hidden):
    labels = matrices.random_csr(5, 700)
    problem = make_problem(
        labels, hidden=hidden, extra_rows=68, options=("bias",), dtype=jnp.bfloat16
    )
    operands = {name: getattr(problem, name) for name in OPERANDS}
    options = {"implementation": "mosaic_gpu", "chunk_scores": 128 * 256}
    function = functools.partial(loss_of, RULES[0], **options)
    traced = jax.jit(jax.value_and_grad(function)).trace(operands, labels)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_kernel_equals_xla_at_real_sizes(rule, in_place):
    labels = matrices.random_csr(700, 27_278, 0.005)
    extra = 27_392 - 27_278
    options = ("bias", "weights") if in_place else OPERANDS
    chunk_scores = 2**22 if in_place else None
    problem = make_problem(
        labels, hidden=1024, extra_rows=extra, options=options, dtype=jnp.bfloat16
    )
    problem.h = problem.h / 32
    results = [
        run(rule, problem, implementation="xla"),
        *(
            run(rule, problem, implementation="mosaic_gpu", chunk_scores=chunk_scores)
            for _ in range(2)
        ),
    ]
    jax.tree.map(np.testing.assert_array_equal, *results[1:])
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    for name, want in results[0][1].items():
        error = jnp.linalg.norm((results[1][1][name] - want).astype(jnp.float32))
        assert error < 2**-7 * jnp.linalg.norm(want.astype(jnp.float32))


# The squared loss by Gram matrices


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("xla", ("bias", "weights")),
        ("xla_gpu", ("bias", "weights")),
        ("mosaic_gpu", ()),
        ("mosaic_gpu", ("bias", "weights")),
    ],
    ids=str,
)
def test_gram_matrices_in_every_implementation(implementation, options):
    # On GPUs several blocks of rows are in the Gram matrix.
    items = 12_200 if implementation == "xla_gpu" else 680
    labels = matrices.random_csr(5, items, 100 / items, valued=bool(options))
    problem = make_problem(
        labels, hidden=128, extra_rows=88, options=options, dtype=jnp.bfloat16
    )
    problem.h = problem.h + 1  # a mean that does not cancel
    problem.kernel = problem.kernel.at[items:].set(jnp.nan)  # padding
    with kernel_can_run():
        check(GRAM, problem, implementation=implementation)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 1e-4), (jnp.bfloat16, 5e-3)], ids=str
)
def test_gram_matrices_cancel_at_a_good_fit(dtype, bound):
    # Hidden units with a large mean, and the kernel that fits them best: large numbers in
    # the products cancel. Scores give a gradient in bfloat16 that is off by 2.4e-3. With
    # Gram matrices of rows that are not centred it would be .14.
    rng = np.random.default_rng(0)
    dense = rng.random((256, 600)) < 0.05
    h = 1 / (1 + np.exp(-0.1 * rng.standard_normal((256, 16))))
    labels = CSR.from_scipy(scipy.sparse.csr_array(dense[:128]))
    kernel = np.linalg.lstsq(h, dense.astype(float), rcond=None)[0].T
    problem = SimpleNamespace(
        h=jnp.asarray(h[:128], dtype),
        kernel=jnp.asarray(kernel, dtype),
        bias=None,
        scale=None,
        weights=None,
        labels=jax.tree.map(jnp.asarray, labels),
    )
    want = oracle(GRAM, problem)
    loss, gradients = run(GRAM, problem)
    h, kernel = (np.abs(np.asarray(x, np.float64)) for x in (h[:128], kernel))
    sizes = ((h @ (kernel.T @ kernel)) * h).sum() / 2  # of the terms that cancel
    assert abs(loss - want.loss) < np.finfo(np.float32).eps * sizes
    for name, gradient in gradients.items():
        exact = want.gradients[name]
        off = np.linalg.norm(np.asarray(gradient, np.float64) - exact)
        assert off < bound * np.linalg.norm(exact), name


@pytest.mark.parametrize(
    ("batch", "nse", "form"),
    [(1024, 2**14, "gram"), (1024, 2**22, "chunks"), (64, 2**14, "chunks")],
)
def test_the_form_is_chosen_by_the_sizes(batch, nse, form):
    def lowered(form):
        def loss(h, kernel, indices, indptr):
            labels = CSR(None, indices, indptr, num_cols=len(kernel))
            options = {"loss": losses.L2Loss(), "form": form}
            return output_loss_in_chunks(h, kernel, None, labels, **options)

        shapes = (batch, 64), (2**17, 64), (nse,), (batch + 1,)
        dtypes = 2 * [jnp.float32] + 2 * [jnp.int32]
        operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
        return jax.jit(loss).lower(*operands).as_text()

    assert lowered(None) == lowered(form)


def test_gram_matrices_of_another_loss_are_refused():
    problem = make_problem(matrices.random_csr(3, 20), options=("scale",))
    loss = inspect.unwrap(output_loss_in_chunks)
    operands = problem.h, problem.kernel, None, problem.labels
    for rule, scale in [(losses.L1Loss(), None), (losses.L2Loss(), problem.scale)]:
        with pytest.raises(ValueError, match="l2_loss without a scale"):
            loss(*operands, loss=rule, scale=scale, form="gram")


# Edges


@main_rules
def test_extreme_scores_are_finite(rule):
    labels = matrices.random_csr(4, 60)
    problem = make_problem(labels, options=("bias",))
    problem.h = problem.h * 1e4
    loss, gradients = run(rule, problem)
    scores = np.asarray(problem.h, np.float64) @ np.asarray(problem.kernel).T
    assert np.abs(scores).max() > 1e4
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((loss, gradients)))
    want = oracle(rule, problem)
    assert_close(loss, want.loss, terms=5 * 240, magnitude=want.size)


@both_kinds
def test_a_row_without_labels(rule):
    labels = CSR(None, jnp.zeros(4, jnp.int32), jnp.zeros(3, jnp.int32), num_cols=7)
    check(rule, make_problem(labels))
    if isinstance(rule, losses.SoftmaxCrossEntropy):
        loss, gradients = run(rule, make_problem(labels))
        assert all((x == 0).all() for x in jax.tree.leaves((loss, gradients)))


@both_kinds
def test_no_capacity_at_all(rule):
    labels = CSR(None, jnp.zeros(0, jnp.int32), jnp.zeros(3, jnp.int32), num_cols=7)
    check(rule, make_problem(labels))


def broken_labels(kind):
    """Labels of three rows; the second row is invalid."""
    indices = jnp.int32([1, 4, 0, 2, 5])
    if kind == "overfull":  # of five entries in row 1 two do not fit
        indices = jnp.int32([1, 4, 0, 2, 5])
        return CSR(None, indices, jnp.int32([0, 2, 7, 7]), num_cols=6)
    bad = {"negative": -1, "num_cols": 6, "padding row": 7, "far": 2**31 - 1}[kind]
    indices = indices.at[3].set(bad)
    return CSR(None, indices, jnp.int32([0, 2, 4, 5]), num_cols=6)


@both_kinds
@pytest.mark.parametrize(
    "kind", ["overfull", "negative", "num_cols", "padding row", "far"]
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "sorted_ahead"])
def test_broken_labels_are_nan(rule, kind, ahead):
    labels = broken_labels(kind)
    problem = make_problem(labels.with_transposed() if ahead else labels)
    got = per_example_of(rule, problem)
    # In the overfull CSR the row after the broken one does not fit either.
    assert list(jnp.isnan(got)) == [False, True, kind == "overfull"]
    loss, gradients = run(rule, problem)
    assert jnp.isnan(loss)
    assert jnp.isnan(gradients["h"][1]).all() and jnp.isfinite(gradients["h"][0]).all()
    assert jnp.isnan(gradients["kernel"][:6]).all()
    assert (gradients["kernel"][6:] == 0).all()


@main_rules
def test_weight_zero_silences_a_row_whatever_is_in_it(rule):
    problem = make_problem(broken_labels("negative"))
    problem.weights = jnp.float32([1, 0, 2])
    problem.h = problem.h.at[1].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30, 0]))
    loss, gradients = run(rule, problem)
    assert (gradients["h"][1] == 0).all()
    assert jnp.isnan(gradients["weights"][1])  # the row's loss

    without = make_problem(
        jax.tree.map(jnp.asarray, problem.labels.take(jnp.array([0, 2])))
    )
    for name in OPERANDS:
        value = getattr(problem, name)
        rows = name in ("h", "weights")
        setattr(without, name, value[jnp.array([0, 2])] if rows else value)
    want, want_gradients = run(rule, without)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for name in set(gradients) - {"h", "weights"}:
        np.testing.assert_allclose(
            gradients[name], want_gradients[name], rtol=1e-5, atol=1e-6
        )


@both_kinds
def test_weights_have_a_gradient_where_they_are_zero(rule):
    problem = make_problem(matrices.random_csr(3, 20))
    problem.weights = jnp.zeros(3)
    check(rule, problem)


@pytest.mark.parametrize(
    "rule", [RULES[0], RULES[2], RULES[3], losses.L1Loss(), losses.L2Loss(), GRAM]
)
def test_denied_items_have_no_part_in_loss_and_gradients(rule):
    labels = CSR(None, jnp.int32([0, 3, 1]), jnp.int32([0, 2, 3]), num_cols=6)
    problem = make_problem(labels, extra_rows=0)
    # Items 4 and 5 are denied; then they are left out.
    problem.bias = problem.bias.at[4:].set(-jnp.inf)
    loss, gradients = run(rule, problem)
    few = make_problem(dataclasses.replace(labels, num_cols=4))
    for name in OPERANDS:
        value = getattr(problem, name)
        setattr(few, name, value if name in ("h", "weights") else value[:4])
    want, want_gradients = run(rule, few)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for name, gradient in gradients.items():
        if name in ("kernel", "bias", "scale"):
            assert (gradient[4:] == 0).all()
            gradient = gradient[:4]
        np.testing.assert_allclose(gradient, want_gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "softmax"])
def test_a_label_of_0_may_be_denied(name):
    labels = CSR(
        jnp.array([0.0, 1.0]), jnp.array([0, 1]), jnp.array([0, 2]), num_cols=3
    )
    rule = {
        "sigmoid": losses.SigmoidBinaryCrossEntropy(),
        "hinge": losses.HingeLoss(),
        "softmax": losses.SoftmaxCrossEntropy(),
    }[name]

    def loss(h, bias):
        return output_loss(h, jnp.ones((3, 2)), bias, labels, loss=rule)

    denied = jnp.array([-jnp.inf, 0, 0])
    value, slope = jax.value_and_grad(loss)(jnp.ones((1, 2)), denied)
    want = {"sigmoid": 2.0 + 2 * np.log1p(np.exp(-2)), "softmax": np.log(2), "hinge": 4}
    np.testing.assert_allclose(value, want[name], rtol=1e-6)
    assert jnp.isfinite(slope).all()


def test_softmax_with_all_items_denied():
    labels = CSR(None, jnp.int32([2]), jnp.int32([0, 1, 1]), num_cols=4)
    problem = make_problem(labels)
    problem.bias = jnp.full_like(problem.bias, -jnp.inf)
    got = output_loss_per_example(
        problem.h, problem.kernel, problem.bias, labels, loss="softmax_cross_entropy"
    )
    assert jnp.isnan(got[0]) and got[1] == 0


@both_kinds
def test_nan_operands_are_not_hidden(rule):
    problem = make_problem(matrices.random_csr(3, 20))  # a program of another test
    problem.h = problem.h.at[1, 0].set(jnp.nan)
    loss, gradients = run(rule, problem)
    assert jnp.isnan(loss) and jnp.isnan(gradients["h"][1]).all()


# Derivatives beyond a plain gradient


@both_kinds
def test_the_cotangent_scales(rule):
    problem = make_problem(matrices.random_csr(4, 30), dtype=jnp.bfloat16)
    operands = operands_of(rule, problem)

    @jax.jit
    def both(operands):
        value, pull = jax.vjp(lambda x: loss_of(rule, x, problem.labels), operands)
        return [pull(jnp.asarray(by, value.dtype))[0] for by in (1, -0.5)]

    plain, scaled = both(operands)
    jax.tree.map(
        lambda p, s: np.testing.assert_array_equal(p * jnp.asarray(-0.5, p.dtype), s),
        plain,
        scaled,
    )


@both_kinds
def test_per_example_is_differentiable(rule):
    problem = make_problem(matrices.random_csr(4, 30))

    def weighted(operands):
        of_operands = per_example_of(rule, SimpleNamespace(**vars(problem) | operands))
        return jnp.sum(problem.weights * of_operands)

    operands = operands_of(rule, problem)
    del operands["weights"]
    got = jax.grad(weighted)(operands)
    _, want = run(rule, problem)
    for name in set(want) - {"weights"}:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-6)


def test_labels_are_constants():
    problem = make_problem(matrices.random_csr(4, 30, valued=True))

    def loss(data):
        labels = dataclasses.replace(problem.labels, data=data)
        return output_loss(problem.h, problem.kernel, problem.bias, labels)

    assert (jax.grad(loss)(problem.labels.data) == 0).all()


@both_kinds
def test_float64_operands_are_used_in_float64(rule):
    with jax.enable_x64(True):
        problem = make_problem(matrices.random_csr(4, 30), dtype=jnp.float64)
        loss, gradients = run(rule, problem)
        want = oracle(rule, problem)
        np.testing.assert_allclose(loss, want.loss, rtol=1e-12)
        np.testing.assert_allclose(
            gradients["kernel"], want.gradients["kernel"], rtol=1e-9, atol=1e-12
        )


def test_a_rule_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Quartic(losses.ElementwiseLoss):
        def absent(self, scores):
            return scores**4

        def listed(self, scores, labels):
            return (scores - labels) ** 4

    problem = make_problem(matrices.random_csr(4, 30, valued=True), extra_rows=0)
    operands = {name: getattr(problem, name) for name in OPERANDS}

    def reference(operands):
        scores = jnp.dot(operands["h"], operands["kernel"].T, precision="highest")
        scores = scores * operands["scale"][None] + operands["bias"][None]
        errors = (scores - problem.labels.todense()) ** 4
        return jnp.sum(operands["weights"] * errors.sum(1))

    want = jax.jit(jax.value_and_grad(reference))(operands)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3),
        run(Quartic(), problem),
        want,
    )


# Memory and devices


@both_kinds
@pytest.mark.parametrize("differentiate", [False, True])
def test_memory_does_not_grow_with_the_number_of_items(rule, differentiate):
    batch, hidden = 256, 4
    function = functools.partial(loss_of, rule)
    if differentiate:
        function = jax.value_and_grad(function)

    def temporaries(items):
        def floats(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        operands = {
            "h": floats(batch, hidden),
            "kernel": floats(items, hidden),
            "bias": floats(items),
            "scale": None if rule == GRAM else floats(items),
            "weights": floats(batch),
        }
        labels = CSR.from_scipy(matrices.random_csr(batch, items, 0.0).to_scipy())
        return temporary_bytes(function, operands, labels)

    # With fewer, a CPU keeps the scores of a softmax.
    few, many = temporaries(2**18), temporaries(2**19)
    assert 0 < few < 2**25
    # Not even one vector of items may be allowed for each row of the batch.
    assert many - few < 8 * (2**19 - 2**18) * 4


def test_a_frozen_kernel_has_no_gradient_in_memory():
    batch, hidden, items = 64, 64, 2**15
    labels = matrices.random_csr(batch, items, 0.0)
    operands = make_problem(labels, hidden=hidden)

    def loss(h, kernel, bias):
        options = {"loss": RULES[0], "chunk_scores": 2**14}
        return output_loss_in_chunks(h, kernel, bias, labels, **options)

    temporary = temporary_bytes(
        jax.grad(loss), operands.h, operands.kernel, operands.bias
    )
    assert temporary < 4 * items * hidden


def mesh_of(shape, axes=("data", "model")):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


@both_kinds
@pytest.mark.parametrize("with_spec", [True, False], ids=["shard_map", "partitioner"])
def test_sharded_by_items_equals_unsharded(rule, with_spec):
    mesh = mesh_of((2, 4))
    # The last device has padding only in its last 12 rows.
    problem = make_problem(matrices.random_csr(8, 1000), extra_rows=24)
    want = run(rule, problem, chunk_scores=8 * 128)
    spec = P("model") if with_spec else None

    placed = {
        name: jax.device_put(
            value,
            NamedSharding(mesh, P("data" if name in ("h", "weights") else "model")),
        )
        for name, value in operands_of(rule, problem).items()
        if value is not None
    }
    placed = dict.fromkeys(OPERANDS) | placed
    options = {"kernel_spec": spec, "chunk_scores": 8 * 128}
    function = jax.value_and_grad(functools.partial(loss_of, rule, **options))
    with jax.set_mesh(mesh):
        value, gradients = jax.jit(function)(placed, problem.labels)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    for name, wanted in want[1].items():
        np.testing.assert_allclose(gradients[name], wanted, rtol=1e-5, atol=1e-4)
    if with_spec:
        assert gradients["kernel"].sharding.spec == P(("model", "data"))
        assert gradients["h"].sharding.spec == P("data")


@pytest.mark.parametrize(
    ("shape", "axes", "batch"),
    [((8,), ("model",), 3), ((2, 4), ("data", "model"), 3), ((8,), ("data",), 8)],
    ids=str,
)
def test_other_meshes(shape, axes, batch):
    rule = losses.SoftmaxCrossEntropy()
    mesh = mesh_of(shape, axes)
    problem = make_problem(matrices.random_csr(batch, 60), extra_rows=4)
    want = run(rule, problem)
    spec = P("model") if "model" in axes else P()
    operands = {name: getattr(problem, name) for name in OPERANDS}
    weights = operands.pop("weights")

    def loss(operands):
        options: dict[str, Any] = {"weights": weights, "kernel_spec": spec}
        options |= {"loss": rule, "precision": "high"}
        return output_loss(labels=problem.labels, **operands, **options)

    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(loss))(operands)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for name, gradient in got[1].items():
        np.testing.assert_allclose(gradient, want[1][name], rtol=1e-5, atol=1e-5)


def test_broken_labels_are_nan_on_a_mesh():
    problem = make_problem(broken_labels("num_cols"), extra_rows=2)
    with jax.set_mesh(mesh_of((4,), ("model",))):
        got = output_loss_per_example(
            problem.h,
            problem.kernel,
            problem.bias,
            problem.labels,
            kernel_spec=P("model"),
        )
    assert list(jnp.isnan(got)) == [False, True, False]


# Updates where the gradients are made


def fused_sgd(rule, problem, rate, chunk_scores):
    """After SGD steps on each chunk: the layer, the gradient of h, and the losses."""

    def update(start, gradients, layer):
        def descend(array, gradient):
            rows = jax.lax.dynamic_slice_in_dim(array, start, len(gradient))
            rows = rows - rate * gradient
            return jax.lax.dynamic_update_slice_in_dim(array, rows, start, 0)

        return jax.tree.map(descend, layer, gradients)

    rule, form = form_of(rule)
    return loss_and_updates(
        Method(rule=rule, chunk_scores=chunk_scores, **form),
        LossBatch(problem.h, problem.labels, problem.weights),
        Layer(problem.kernel, problem.bias, None if form else problem.scale),
        Updates(layer=lambda layer: layer, update=update),
    )


@both_kinds
def test_updates_in_chunks_equal_a_step_with_the_gradient(rule):
    problem = make_problem(matrices.random_csr(6, 300, valued=True))
    _, gradients = run(rule, problem, chunk_scores=128)
    losses_, dh, layer = jax.jit(lambda: fused_sgd(rule, problem, 0.1, 128))()
    np.testing.assert_allclose(losses_, gradients["weights"], rtol=1e-6)
    np.testing.assert_allclose(dh, gradients["h"], rtol=1e-5, atol=1e-5)
    for name, new in layer._asdict().items():
        if name not in gradients:
            continue
        want = getattr(problem, name) - 0.1 * gradients[name]
        np.testing.assert_allclose(new, want, rtol=1e-5, atol=1e-5)


@both_kinds
def test_updates_in_chunks_need_no_gradient_in_memory(rule):
    batch, hidden, items = 64, 64, 2**15
    problem = make_problem(matrices.random_csr(batch, items, 0.0), hidden=hidden)
    constants = {"h": problem.h, "weights": problem.weights, "labels": problem.labels}

    def step(kernel, bias, scale):
        new = SimpleNamespace(kernel=kernel, bias=bias, scale=scale, **constants)
        return fused_sgd(rule, new, 0.1, 2**14)

    operands = problem.kernel, problem.bias, problem.scale
    assert temporary_bytes(step, *operands, donate_argnums=(0, 1, 2)) < items * hidden


# Errors


def test_wrong_arguments_are_refused():
    problem = make_problem(matrices.random_csr(4, 30))
    loss = inspect.unwrap(output_loss)  # past the checks of its annotations
    h, kernel, bias, labels = problem.h, problem.kernel, problem.bias, problem.labels
    wide = dataclasses.replace(labels, num_cols=34)
    with pytest.raises(ValueError, match="labels has 34 columns but the kernel has 33"):
        loss(h, kernel, bias, wide)
    with pytest.raises(ValueError, match="labels has 4 rows but h has 3"):
        loss(h[:3], kernel, bias, labels)
    with pytest.raises(ValueError, match="h has no rows"):
        loss(h[:0], kernel, bias, labels)
    with pytest.raises(ValueError, match="no columns"):
        loss(h, kernel, bias, dataclasses.replace(labels, num_cols=0))
    with pytest.raises(ValueError, match=r"got \(4, 4\) and \(33, 5\)"):
        loss(h[:, :4], kernel, bias, labels)
    with pytest.raises(ValueError, match="bias has shape"):
        loss(h, kernel, bias[:30], labels)
    with pytest.raises(ValueError, match="scale has shape"):
        loss(h, kernel, bias, labels, scale=bias[:30])
    with pytest.raises(ValueError, match="weights has shape"):
        loss(h, kernel, bias, labels, weights=bias)
    with pytest.raises(TypeError, match="h is bfloat16 and kernel float32; cast"):
        loss(h.astype(jnp.bfloat16), kernel, bias, labels)
    with pytest.raises(ValueError, match='"cusparse" or "mosaic_gpu", got'):
        loss(h, kernel, bias, labels, implementation="triton")
    with pytest.raises(NotImplementedError, match='but precision is "high"; use "xla"'):
        options = {"implementation": "mosaic_gpu", "precision": "high"}
        loss(h, kernel, bias, labels, **options)
    with pytest.raises(ValueError, match='"high" or "default", got \'float32\''):
        loss(h, kernel, bias, labels, precision="float32")
    with pytest.raises(ValueError, match="kernel_spec needs a mesh"):
        loss(h, kernel, bias, labels, kernel_spec=P("model"))
    with pytest.raises(ValueError, match="there is no loss"):
        loss(h, kernel, bias, labels, loss="l3_loss")
