"""`linear_cross_entropy` against a dense float64 oracle."""

import functools
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import kernel_can_run
from memory import temporary_bytes
from tolerances import assert_close, eps_of_form, tolerance

from sparsejax import losses
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.layers import SparseOutput
from sparsejax.ops.linear_cross_entropy import linear_cross_entropy
from sparsejax.ops.output_loss import output_loss_in_chunks
from sparsejax.ops.targets import Targets
from sparsejax.sparse import CSR

BATCH, ITEMS, HIDDEN = (2, 3), 300, 8
TARGETS = np.array([[5, 0, 299], [7, -1, 7]], np.int32)
PLAIN, BOTH = {}, {"label_smoothing": 0.1, "z_loss": 0.01}
OPTIONS = [PLAIN, {"label_smoothing": 0.1}, {"z_loss": 0.01}, BOTH]
OPERANDS = ("h", "kernel", "bias", "scale", "weights")
BY_ITEMS = P(("model", "data"))
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def make(*, dtype=jnp.float32, hidden=HIDDEN, padding=3, without=()):
    """Draws operands. An ignored row and padding have invalid values, and one item is excluded."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(*BATCH, hidden))
    kernel = rng.normal(size=(ITEMS + padding, hidden))
    bias, scale = rng.normal(size=len(kernel)), rng.uniform(0.5, 1.5, len(kernel))
    h[1, 1], kernel[ITEMS:], bias[3] = np.nan, 1e4, -np.inf
    arrays = {"h": h, "kernel": kernel, "bias": bias, "scale": scale}
    arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    arrays["weights"] = jnp.asarray(rng.uniform(0.5, 2, BATCH), jnp.float32)
    return {name: array for name, array in arrays.items() if name not in without}


def oracle(arrays, targets=TARGETS, *, label_smoothing=0.0, z_loss=0.0):
    """Loss, gradients, and the approximate size of the terms of each sum, in float64."""
    x = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    h, kernel = x["h"].reshape(-1, x["h"].shape[-1]), x["kernel"][:ITEMS]
    target = targets.reshape(-1)
    kept = target >= 0
    h = np.where(kept[:, None], h, 0)
    bias, scale = (
        x.get(n, v)[:ITEMS]
        for n, v in (("bias", np.zeros(ITEMS)), ("scale", np.ones(ITEMS)))
    )
    given = x.get("weights", np.ones(BATCH)).reshape(-1)
    weights = np.where(kept, given, 0) / given[kept].sum()
    raw = h @ kernel.T
    s = raw * scale + bias
    live = s > -np.inf
    lse = np.logaddexp.reduce(s, axis=1, keepdims=True)
    wanted = (np.arange(ITEMS) == target[:, None]) * (1 - label_smoothing)
    wanted = wanted + label_smoothing * live / live.sum(1, keepdims=True)
    known = np.where(live, s, 0)
    loss = (lse - (wanted * known).sum(1, keepdims=True) + z_loss * lse**2)[:, 0]
    slopes = (1 + 2 * z_loss * lse) * np.exp(s - lse) - wanted
    loss = np.where(kept, loss, 0)
    total = weights @ loss

    def gradients(slopes, h, kernel, scale, raw):
        delta = weights[:, None] * slopes
        of = {
            "h": ((delta * scale) @ kernel).reshape(x["h"].shape),
            "kernel": (delta * scale).T @ h,
            "bias": delta.sum(0),
            "scale": (delta * raw).sum(0),
            "weights": np.where(kept, (loss - total) / given[kept].sum(), 0),
        }
        of["weights"] = of["weights"].reshape(BATCH)
        extra = len(x["kernel"]) - ITEMS
        for name in ("kernel", "bias", "scale"):
            pad = [(0, extra)] + [(0, 0)] * (of[name].ndim - 1)
            of[name] = np.pad(of[name], pad)
        return {name: of[name] for name in x}

    # Errors of the scores move the slopes.
    moved = np.abs(h) @ np.abs(kernel).T * scale + np.abs(np.where(live, bias, 0)) + 1
    sizes = gradients(
        *(np.abs(slopes) + moved * (np.exp(s - lse) + wanted), np.abs(h)),
        *(np.abs(kernel), scale, np.abs(raw)),
    )
    sizes["weights"] = np.full(BATCH, moved.max())
    return SimpleNamespace(
        loss=total,
        size=moved.max(),
        gradients=gradients(slopes, h, kernel, scale, raw),
        sizes=sizes,
    )


def loss_of(arrays, targets, **options):
    rest = {name: arrays.get(name) for name in ("bias", "scale", "weights")}
    return linear_cross_entropy(
        arrays["h"], arrays["kernel"], targets, num_items=ITEMS, **rest, **options
    )


@functools.cache
def compiled(**options):
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, **options)))


def check(arrays, targets=TARGETS, **options):
    want = oracle(
        arrays, targets, **{name: options[name] for name in BOTH if name in options}
    )
    loss, gradients = compiled(**options)(arrays, jnp.asarray(targets))
    dtype = arrays["h"].dtype
    eps = None
    if dtype == jnp.float32:
        eps = eps_of_form(*map(options.get, ("precision", "implementation")))
    close = functools.partial(assert_close, dtype=dtype, eps=eps, terms=6 * ITEMS)
    assert loss.dtype == jnp.float32
    close(loss, want.loss, magnitude=want.size)
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype
        close(gradient, want.gradients[name], magnitude=want.sizes[name])


# Against the oracle


@every_option
@pytest.mark.parametrize("implementation", ["xla", "xla_gpu"])
def test_equals_the_oracle(options, implementation):
    check(make(), implementation=implementation, **options)


@pytest.mark.parametrize("without", [OPERANDS[2:], ("scale",)], ids=str)
def test_operands_are_optional(without):
    check(make(without=without), **BOTH)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_every_precision(precision):
    check(make(), precision=precision)


def test_bfloat16():
    check(make(dtype=jnp.bfloat16), **BOTH)


@pytest.mark.parametrize(
    ("without", "dtype", "options"),
    [
        (("scale", "bias"), jnp.bfloat16, PLAIN),  # the slopes and their product
        (("scale",), jnp.float32, BOTH),
        ((), jnp.bfloat16, BOTH),  # the slopes alone
    ],
    ids=str,
)
def test_kernel_equals_the_oracle(without, dtype, options):
    # Sizes that it does not take get zeros.
    with kernel_can_run():
        check(
            make(without=without, dtype=dtype, hidden=20),
            implementation="mosaic_gpu",
            **options,
        )


def test_kernel_with_targets_in_several_chunks():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(200, 64)) / 4, jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(768, 64)) / 4, jnp.bfloat16)
    # In each half of a tile, none in some, and the same in several rows.
    columns = jnp.asarray(rng.permutation(np.arange(200) * 3 + 100).clip(0, 512))
    columns = columns.at[3].set(-1).at[4:8].set(299).astype(jnp.int32)

    def loss(h, kernel, implementation):
        return output_loss_in_chunks(
            *(h, kernel, None, Targets(columns, num_cols=700)),
            loss=losses.SoftmaxCrossEntropy(),
            implementation=implementation,
            chunk_scores=256 * 256,
        )

    both = jax.value_and_grad(loss, (0, 1))
    with kernel_can_run():
        got = both(h, kernel, "mosaic_gpu")
    want = both(h, kernel, "xla")
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-7)


@every_option
def test_oracle_gradients_are_finite_differences(options):
    arrays = make()
    arrays = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    want = oracle(arrays, **options)
    step = 1e-6
    places = {"h": (0, 1, 2), "kernel": (299, 1), "bias": 299, "scale": 5}
    for name, place in (places | {"weights": (1, 0)}).items():
        values = []
        for sign in (1, -1):
            moved = {name: array.copy() for name, array in arrays.items()}
            moved[name][place] += sign * step
            values.append(oracle(moved, **options).loss)
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(want.gradients[name][place], rel=1e-5, abs=1e-8)


def test_equals_optax():
    rng = np.random.default_rng(0)
    h, kernel = (jnp.float32(rng.normal(size=(n, 8))) for n in (9, 50))
    targets = jnp.asarray(rng.integers(0, 50, 9), jnp.uint8)
    want = optax.softmax_cross_entropy_with_integer_labels(h @ kernel.T, targets)
    got = linear_cross_entropy(h, kernel, targets)
    np.testing.assert_allclose(got, want.mean(), rtol=1e-6)
    one_hot = optax.smooth_labels(jax.nn.one_hot(targets, 50), 0.2)
    want = optax.softmax_cross_entropy(h @ kernel.T, one_hot)
    got = linear_cross_entropy(h, kernel, targets, label_smoothing=0.2)
    np.testing.assert_allclose(got, want.mean(), rtol=1e-6)


def test_second_derivatives():
    arrays = make(without=("bias", "scale", "weights"))
    arrays["h"] = jnp.nan_to_num(arrays["h"])

    def dense(h):
        scores = h.reshape(-1, HIDDEN) @ arrays["kernel"][:ITEMS].T
        targets = TARGETS.reshape(-1)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        lse = jax.nn.logsumexp(scores, axis=1)
        return jnp.sum(jnp.where(targets >= 0, loss + 0.01 * lse**2, 0)) / 5

    def ours(h):
        return loss_of(arrays | {"h": h}, jnp.asarray(TARGETS), z_loss=0.01)

    got, want = (jax.hessian(f)(arrays["h"]) for f in (ours, dense))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Edges


def test_nothing_counts():
    arrays, function = make(), compiled(**BOTH)
    ignored = function(arrays, jnp.full(BATCH, -1, jnp.int32))
    weightless = function(arrays | {"weights": jnp.zeros(BATCH)}, jnp.asarray(TARGETS))
    for result in (ignored, weightless):
        for array in jax.tree.leaves(result):
            np.testing.assert_array_equal(array, jnp.zeros_like(array))


def test_ignored_rows_of_an_array_on_the_host_are_not_computed():
    rng = np.random.default_rng(0)
    h, kernel = (jnp.asarray(rng.normal(size=(n, HIDDEN))) for n in (64, ITEMS))
    targets = np.full((8, 8), -1)
    targets[1, 2:7], weights = [4, 9, 9, 0, 299], jnp.arange(64.0).reshape(8, 8)

    def loss(h, weights, targets):
        h = h.reshape(8, 8, HIDDEN)
        return linear_cross_entropy(h, kernel, targets, weights=weights)

    def step(of):
        # Targets on the host stay there.
        of_them = functools.partial(loss, targets=of)
        return jax.jit(jax.value_and_grad(of_them, (0, 1)))(h, weights)

    got, want = (step(of) for of in (targets, jnp.asarray(targets)))
    same = functools.partial(np.testing.assert_allclose, **tolerance(h.dtype, ITEMS))
    jax.tree.map(same, got, want)

    def text(targets):
        made = jax.make_jaxpr(functools.partial(loss, targets=targets))(h, weights)
        return str(made)

    # All items are one chunk here.
    assert f"f32[64,{ITEMS}]" in text(jnp.asarray(targets))
    assert f"f32[8,{ITEMS}]" in text(targets)
    assert f"f32[64,{ITEMS}]" not in text(targets)


@pytest.mark.parametrize("target", [ITEMS, -2, 2**31 - 1])
def test_a_traced_target_that_is_no_item_is_nan(target):
    arrays = make()
    wrong = jnp.asarray(TARGETS).at[0, 0].set(target)
    loss, gradients = compiled()(arrays, wrong)
    assert np.isnan(loss) and np.isnan(gradients["h"][0, 0]).all()
    assert np.isfinite(gradients["h"][0, 1]).all()


def test_a_target_may_be_denied_only_at_a_price():
    arrays = make() | {"h": jnp.ones((*BATCH, HIDDEN))}
    targets = np.where(TARGETS == 5, 3, TARGETS)
    assert loss_of(arrays, targets) == np.inf


def test_wrong_arguments_are_refused():
    h, kernel, targets = jnp.ones((2, 3, 8)), jnp.ones((10, 8)), np.zeros((2, 3), int)
    unchecked = inspect.unwrap(
        linear_cross_entropy
    )  # what a user without jaxtyping has

    def refused(error, match, *arguments, **options):
        with pytest.raises(error, match=match):
            unchecked(*arguments, **options)

    refused(TypeError, "array of integers.*float32", h, kernel, jnp.ones((2, 3)))
    refused(TypeError, "array of integers.*list", h, kernel, [1, 2])
    refused(ValueError, r"\(6,\); one for each hidden", h, kernel, np.zeros(6, int))
    wrong = targets.copy()
    wrong[1, 2] = 10
    match = r"target 10 at \(1, 2\) is no item: targets are in \[0, 10\), or -1"
    refused(ValueError, match, h, kernel, wrong)
    refused(ValueError, "target 9 at", h, kernel, targets + 9, num_items=9)
    refused(ValueError, "target -2 at 0", h[0], kernel, np.array([-2, 0, 0]))
    refused(ValueError, "num_items is 11", h, kernel, targets, num_items=11)
    refused(ValueError, r"h \[\.\.\., hidden\]", h, kernel[:, :7], targets)
    refused(ValueError, "batch is empty", h[:0], kernel, targets[:0])
    refused(TypeError, "same floating dtype", h, kernel.astype("bfloat16"), targets)
    refused(ValueError, "bias has shape", h, kernel, targets, bias=jnp.ones(9))
    refused(ValueError, "weights has shape", h, kernel, targets, weights=jnp.ones(6))
    refused(ValueError, "label_smoothing", h, kernel, targets, label_smoothing=1.5)
    refused(ValueError, "z_loss", h, kernel, targets, z_loss=-1.0)
    refused(ValueError, "implementation is", h, kernel, targets, implementation="x")


# Memory, meshes, GPUs


def test_memory_does_not_grow_with_the_number_of_items():
    def size(items):
        h, kernel, targets = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((256, 16), jnp.float32),
                ((items, 16), jnp.float32),
                ((256,), jnp.int32),
            )
        )
        step = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
        return temporary_bytes(step, h, kernel, targets)

    # With fewer items, a CPU keeps all scores.
    few, many = size(2**18), size(2**19)
    # The gradient of the kernel is made once, and scaled.
    assert many - few < 1.1 * (2**19 - 2**18) * 16 * 4


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 4), AxisType.Auto),
        ((8, 1), AxisType.Auto),
        ((1, 8), AxisType.Auto),
        ((2, 4), AxisType.Explicit),
    ],
    ids=str,
)
def test_mesh_equals_one_device(shape, axes):
    rng = np.random.default_rng(0)
    arrays = make(padding=212)
    arrays["h"] = jnp.asarray(rng.normal(size=(8, 2, HIDDEN)), jnp.float32)
    arrays["weights"] = jnp.asarray(rng.uniform(0.5, 2, (8, 2)), jnp.float32)
    targets = jnp.asarray(rng.integers(-1, ITEMS, (8, 2)), jnp.int32)
    targets = jnp.where(targets == 3, 4, targets)
    want = compiled(**BOTH)(arrays, targets)
    mesh = make_mesh(data=shape[0], model=shape[1])
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(axes,) * 2)
    with jax.set_mesh(mesh):
        of = {"h": P("data"), "weights": P("data")}
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, of.get(name, BY_ITEMS)))
            for name, x in arrays.items()
        }
        placed_targets = jax.device_put(targets, NamedSharding(mesh, P("data")))
        step = functools.partial(loss_of, kernel_spec=BY_ITEMS, **BOTH)
        got = jax.jit(jax.value_and_grad(step))(placed, placed_targets)
    close = tolerance(jnp.float32, 16 * ITEMS)
    same = functools.partial(np.testing.assert_allclose, **close)
    jax.tree.map(same, got, want)
    spec = got[1]["kernel"].sharding
    assert spec.is_equivalent_to(NamedSharding(mesh, BY_ITEMS), 2)


@pytest.mark.parametrize("shape", [None, (2, 2)], ids=str)
@pytest.mark.parametrize("hidden", [64, 512])
def test_kernel_lowers_for_cuda(shape, hidden):
    arrays = make(dtype=jnp.bfloat16, hidden=hidden, padding=212)
    options = {"implementation": "mosaic_gpu", **BOTH}

    def lowered(**options):
        step = jax.jit(jax.value_and_grad(functools.partial(loss_of, **options)))
        traced = step.trace(arrays, jnp.asarray(TARGETS))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    if shape is None:
        text = lowered(**options)
        # The sums of softmax and the slopes; no label is looked for in the first.
        assert text.count("custom_call @mosaic_gpu") == 2
    else:
        arrays = make(dtype=jnp.bfloat16, hidden=hidden, padding=724)
        with jax.set_mesh(make_mesh(data=shape[0], model=shape[1])):
            text = lowered(kernel_spec=BY_ITEMS, **options)
            assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(("tokens", "count"), [(8_192, 3), (8_320, 2)])
def test_the_kernel_of_a_large_batch_is_differentiated_by_xla(tokens, count):
    def loss(h, kernel, columns):
        return output_loss_in_chunks(
            *(h, kernel, None, Targets(columns, num_cols=512)),
            loss=losses.SoftmaxCrossEntropy(),
            implementation="mosaic_gpu",
            chunk_scores=256 * tokens,
        )

    arguments = (
        jnp.ones((tokens, 64), jnp.bfloat16),
        jnp.ones((512, 64), jnp.bfloat16),
        jnp.zeros(tokens, jnp.int32),
    )
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == count


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "hidden", "items", "options", "dtype"),
    [
        (700, 64, 270_011, BOTH, jnp.bfloat16),
        (1024, 256, 200_192, PLAIN, jnp.float32),
        (640, 768, 50_257, BOTH, jnp.bfloat16),
        (1_300, 512, 400_000, {"z_loss": 0.01}, jnp.bfloat16),  # blocks of rows
        (8_200, 128, 600_000, {"z_loss": 0.01}, jnp.bfloat16),  # two passes
    ],
)
def test_kernel_equals_xla_at_real_sizes(tokens, hidden, items, options, dtype):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(tokens, hidden)) / hidden**0.5, dtype)
    kernel = jnp.asarray(rng.normal(size=(items, hidden)), dtype)
    targets = jnp.asarray(rng.integers(-1, items, tokens), jnp.int32)

    def step(implementation):
        loss = functools.partial(
            linear_cross_entropy, implementation=implementation, **options
        )
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(h, kernel, targets)

    want, got, again = step("xla"), step("mosaic_gpu"), step("mosaic_gpu")
    jax.tree.map(np.testing.assert_array_equal, got, again)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-4)
    for mine, other in zip(got[1], want[1], strict=True):
        error = jnp.linalg.norm((mine - other).astype(jnp.float32))
        assert error < 2**-7 * jnp.linalg.norm(other.astype(jnp.float32))


# Layers


def matrix_of(targets):
    rows = np.flatnonzero(targets >= 0)
    indptr = np.concatenate([[0], np.cumsum(targets >= 0)]).astype(np.int32)
    indices = np.asarray(targets[rows], np.int32)
    return jax.tree.map(jnp.asarray, CSR(None, indices, indptr, num_cols=ITEMS))


def test_a_layer_takes_targets():
    layer = SparseOutput(HIDDEN, ITEMS, temperature=0.2, rngs=nnx.Rngs(0))
    h = jax.random.normal(jax.random.key(0), (*BATCH, HIDDEN))
    flat, targets = h.reshape(-1, HIDDEN), TARGETS.reshape(-1)
    kept = jnp.asarray(targets >= 0, jnp.float32)
    for loss in ("softmax_cross_entropy", "l2_loss"):
        want = layer.loss(flat, matrix_of(targets), loss=loss, weights=kept)
        np.testing.assert_allclose(layer.loss(h, TARGETS, loss=loss), want, rtol=1e-5)
    want = layer.loss(flat, matrix_of(targets), loss="softmax_cross_entropy") / 5
    np.testing.assert_allclose(layer.cross_entropy(h, TARGETS), want, rtol=1e-5)
    with pytest.raises(ValueError, match=r"target 300 at \(0, 0\) is no item"):
        layer.loss(h, np.full(BATCH, ITEMS))


def test_options_of_the_loss_hold_for_several_labels():
    rule = losses.SoftmaxCrossEntropy(**BOTH)
    h, kernel = jnp.ones((2, 4)), jnp.eye(4)
    labels = jnp.array([[1, 1, 0, 0], [0, 0, 0, 0.0]])
    matrix = CSR.from_scipy(scipy.sparse.csr_array(labels > 0))
    got = output_loss_in_chunks(h, kernel, None, matrix, loss=rule)
    # All scores are 1.
    lse = np.log(4) + 1
    assert got == pytest.approx(2 * (lse - 1 + 0.01 * lse**2), rel=1e-6)
