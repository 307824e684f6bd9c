"""The implementation that each operation chooses on a GPU of some compute capability, by tracing.

Eight devices are visible here. The choice must be that with a single visible device.
"""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from sparsejax import optimizers
from sparsejax.mesh import xla_options
from sparsejax.ops import (
    chunked_loss,
    hash_index,
    implementations,
    row_update,
    scatter_gradient,
)
from sparsejax.ops.coarse_top_k import CoarseItems, coarse_top_k
from sparsejax.ops.dot_interaction import blank_vectors, dot_interaction
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.history_attention import history_attention
from sparsejax.ops.linear_cross_entropy import linear_cross_entropy
from sparsejax.ops.output_loss import output_loss
from sparsejax.ops.top_k import top_k
from sparsejax.sparse import CSR

COLUMNS, HIDDEN = 256, 128


def step_on_rows(x, h, kernel):
    trained = row_update.TrainedKernel(kernel, {"sum_of_squares": kernel}, None)
    terms = scatter_gradient.row_terms([x], [h], COLUMNS)
    rule = optimizers.adagrad(0.1)
    return row_update.step_terms(
        rule, trained, terms, row_update.Passed(jnp.int32(0))
    ).w


def gradient(x, h, kernel, implementation=None):
    return scatter_gradient.row_gradient(
        [x], [h], COLUMNS, implementation=implementation
    )[1]


def loss(x, h, kernel, **options):
    def of(h, kernel):
        return output_loss(h, kernel, None, x, loss="softmax_cross_entropy", **options)

    return jax.grad(of, (0, 1))(h, kernel)


def interaction(x, h, kernel):
    blank = blank_vectors(h[:, :16], 27)
    rows = jnp.broadcast_to(h[:, None, :16], (4, 27 + blank, 16))
    return dot_interaction(rows, h[:, :16], blank=blank)


def attention(x, h, kernel):
    tokens = jnp.broadcast_to(h[:, None, :64], (4, 2, 64))
    return history_attention(
        tokens, tokens, tokens, jnp.array([0, 1, 4]), activation="softmax"
    )


def cross_entropy(x, h, kernel):
    return jax.grad(linear_cross_entropy)(h, kernel, jnp.zeros(4, int))


def coarse(x, h, kernel):
    items = CoarseItems.of(kernel, None)
    return coarse_top_k(h, kernel, 3, bias=None, coarse=items, scale=None, exclude=x)


def squared_loss(x, h, kernel):
    def of(h, kernel):
        return output_loss(h, kernel, None, x, loss="l2_loss")

    return jax.grad(of, (0, 1))(h, kernel)


def find(x, h, kernel):
    layout = hash_index.Layout(rows=44, firsts=(0,), sizes=(43,))
    index = hash_index.empty(layout)
    words = jnp.zeros(4, jnp.uint32) + jnp.uint32(h[0, 0])
    keys = hash_index.TableKeys(jnp.zeros(4, jnp.int32), words, words)
    return hash_index.find(layout, index, keys, jnp.ones(4, bool))


# Each with the dtype of its operands, whether GPUs newer than Hopper have a program, and
# whether older ones have cuSPARSE. Each operation that chooses a GPU program stands here.
OPERATIONS = {
    "gather_matmul": (lambda x, h, w: gather_matmul(x, w), jnp.float32, True, True),
    "gradient": (gradient, jnp.float32, True, True),
    "step_on_rows": (step_on_rows, jnp.float32, True, True),
    "output_loss": (loss, jnp.bfloat16, False, False),
    "top_k": (lambda x, h, w: top_k(h, w, 3), jnp.bfloat16, False, False),
    "dot_interaction": (interaction, jnp.bfloat16, False, False),
    "history_attention": (attention, jnp.bfloat16, False, False),
    "linear_cross_entropy": (cross_entropy, jnp.bfloat16, False, False),
    "coarse_top_k": (coarse, jnp.bfloat16, False, False),
    "l2_loss": (squared_loss, jnp.bfloat16, False, False),
    "hash_index": (find, jnp.float32, True, False),
}
# The modules of `ops` that ask whether a GPU program can run, with operations that ask there.
CHOOSING = {
    "chunked_loss": "output_loss",
    "coarse_top_k": "coarse_top_k",
    "dot_interaction": "dot_interaction",
    "gather_sum": "gather_matmul",
    "gram_loss": "l2_loss",
    "hash_index": "hash_index",
    "history_attention": "history_attention",
    "linear_cross_entropy": "linear_cross_entropy",
    "top_k": "top_k",
}


def traced(
    name: str, lies: jax.sharding.Sharding | None = None, *, deterministic: bool = False
) -> jax.stages.Traced:
    """Traces an operation on one device, without a mesh."""
    function, dtype, *_ = OPERATIONS[name]
    x = CSR(None, jnp.zeros(40, int), jnp.arange(5) * 10, num_cols=COLUMNS)
    h, kernel = jnp.ones((4, HIDDEN), dtype), jnp.ones((COLUMNS, HIDDEN), dtype)
    if lies is not None:
        kernel = jax.device_put(kernel, lies)
    jax.clear_caches()  # else what was traced for another GPU is found again
    return xla_options.Programs(function)[deterministic].program.trace(x, h, kernel)


def lowered(name: str, lies: jax.sharding.Sharding | None = None) -> str:
    """Lowers an operation for CUDA; the kernel has the sharding `lies`."""
    return traced(name, lies).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("capability", [9.0, 10.0, 12.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_form_for_a_new_gpu(monkeypatch, name, capability):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: capability)
    has_program = capability == 9.0 or OPERATIONS[name][2]
    assert ("custom_call @mosaic_gpu" in lowered(name)) == has_program


@pytest.mark.parametrize("capability", [7.5, 8.0, 8.9])
@pytest.mark.parametrize("name", OPERATIONS)
def test_form_for_an_older_gpu(monkeypatch, name, capability):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: capability)
    # JAX lowers cuSPARSE's calls only where its packages for CUDA are installed.
    text = str(traced(name).jaxpr)
    assert "mosaic_gpu" not in text
    assert ("csr_matmat" in text) == OPERATIONS[name][3]


def test_no_cusparse_where_bits_must_be_the_same(monkeypatch):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 8.0)
    for deterministic in (False, True, False):
        text = str(traced("gradient", deterministic=deterministic).jaxpr)
        assert ("csr_matmat" in text) != deterministic


@pytest.mark.parametrize("name", OPERATIONS)
def test_form_without_a_gpu(monkeypatch, name):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: None)
    assert "mosaic_gpu" not in lowered(name)


PRECISIONS = {
    "highest": "precision = [HIGHEST, HIGHEST]",
    "high": "num_primitive_operations = 3",
    "default": "precision = [DEFAULT, DEFAULT]",
}


def test_each_operation_that_chooses_stands_in_the_table():
    """A new operation must join `OPERATIONS`, whose tests see more devices than one."""
    assert set(CHOOSING.values()) <= OPERATIONS.keys()
    found = set()
    for path in pathlib.Path(implementations.__file__).parent.glob("*.py"):
        names = {
            n.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Name)
        }
        if "custom_call_can_run" in names:
            found.add(path.stem)
    assert found == CHOOSING.keys()


def test_nothing_asks_how_many_devices_are_visible():
    """A mesh says it; only commands that make a mesh of all devices ask."""
    wings = pathlib.Path(sj.__file__).parent
    found = {
        path.relative_to(wings).as_posix()
        for path in wings.rglob("*.py")
        if "device_count()" in path.read_text()
    }
    assert found == {"dsstne/devices.py", "mesh/processes.py"}


@pytest.mark.parametrize("name", ["gather_matmul", "top_k"])
def test_arrays_on_several_devices_need_a_mesh(monkeypatch, name):
    """XLA would repeat a GPU program on each device without a word."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    mesh = sj.make_mesh(model=2)
    divided = jax.NamedSharding(mesh, jax.P("model"))
    with pytest.raises(
        ValueError, match=r"on each of 2 devices.*jax\.set_mesh\(mesh\)"
    ):
        lowered(name, divided)
    with jax.set_mesh(mesh):
        assert "mosaic_gpu" not in lowered(name, divided)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert "custom_call @mosaic_gpu" in lowered(name, one)


def test_arrays_on_several_devices_without_a_gpu():
    """XLA's operations are divided rightly."""
    x = CSR(None, jnp.arange(40) % 7, jnp.arange(5) * 10, num_cols=COLUMNS)
    w = jnp.asarray(np.random.default_rng(0).standard_normal((COLUMNS, 8)), jnp.float32)
    divided = jax.device_put(
        w, jax.NamedSharding(sj.make_mesh(model=2), jax.P("model"))
    )
    np.testing.assert_allclose(
        jax.jit(gather_matmul)(x, divided), gather_matmul(x, w), 1e-6
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_of_products(precision):
    """On a GPU: float32, three products of bfloat16, TF32."""
    x = CSR(None, jnp.zeros(40, int), jnp.arange(5) * 10, num_cols=COLUMNS)
    operands = x, jnp.ones((4, HIDDEN)), jnp.ones((COLUMNS, HIDDEN))
    for function in (loss, lambda x, h, w, **options: top_k(h, w, 3, **options)):
        traced = jax.jit(functools.partial(function, precision=precision))
        text = traced.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        products = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
        assert len(products) == (4 if function is loss else 1)
        for product in products:
            assert PRECISIONS[precision] in product
            assert ("algorithm" in product) == (precision == "high")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scores", ["few", "many"])
def test_float32_is_rounded_for_the_program(monkeypatch, precision, scores):
    """By default, and where there are so many scores that it pays."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    if scores == "many":
        monkeypatch.setattr(chunked_loss, "ROUNDED_SCORES", 4 * COLUMNS - 1)
    function = functools.partial(loss, precision=precision)
    monkeypatch.setitem(OPERATIONS, "float32", (function, jnp.float32))
    rounded = precision == "default" and scores == "many"
    assert ("custom_call @mosaic_gpu" in lowered("float32")) == rounded


def test_rows_are_not_added_by_a_scatter():
    """XLA adds rows by a scatter of `[entries, hidden]` updates very slowly."""
    x = CSR(None, jnp.zeros(40, int), jnp.arange(5) * 10, num_cols=COLUMNS)
    h, kernel = jnp.ones((4, HIDDEN)), jnp.ones((COLUMNS, HIDDEN))

    def lowered(function):
        traced = jax.jit(function).trace(x, h, kernel)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    forward = lowered(lambda x, h, w: gather_matmul(x, w, implementation="xla_gpu"))
    assert "stablehlo.scatter" not in forward
    text = lowered(functools.partial(gradient, implementation="xla_gpu"))
    scatters = [part[:2000] for part in text.split("stablehlo.scatter")[1:]]
    assert not any(f"x{HIDDEN}xf32" in part.split("->")[0] for part in scatters)


def test_an_unknown_name():
    with pytest.raises(ValueError, match='"cusparse" or "mosaic_gpu", got \'cuda\''):
        implementations.check_implementation("cuda")
