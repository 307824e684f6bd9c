"""What each operation runs on a GPU of some compute capability, by tracing it there."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax import optimizers
from sparsejax.mesh import xla_options
from sparsejax.ops import chunked_loss, implementations, row_update, scatter_gradient
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.output_loss import output_loss
from sparsejax.ops.top_k import top_k
from sparsejax.sparse import CSR

COLUMNS, HIDDEN = 256, 128


def step_on_rows(x, h, kernel):
    trained = row_update.TrainedKernel(kernel, {"sum_of_squares": kernel}, None)
    terms = scatter_gradient.row_terms([x], [h], COLUMNS)
    rule = optimizers.adagrad(0.1)
    return row_update.step_terms(rule, trained, terms, jnp.int32(0)).w


def gradient(x, h, kernel, implementation=None):
    return scatter_gradient.row_gradient(
        [x], [h], COLUMNS, implementation=implementation
    )[1]


def loss(x, h, kernel, **options):
    def of(h, kernel):
        return output_loss(h, kernel, None, x, loss="softmax_cross_entropy", **options)

    return jax.grad(of, (0, 1))(h, kernel)


# Each with the dtype of its operands, whether GPUs newer than Hopper have a program, and
# whether older ones have cuSPARSE.
OPERATIONS = {
    "gather_matmul": (lambda x, h, w: gather_matmul(x, w), jnp.float32, True, True),
    "gradient": (gradient, jnp.float32, True, True),
    "step_on_rows": (step_on_rows, jnp.float32, True, True),
    "output_loss": (loss, jnp.bfloat16, False, False),
    "top_k": (lambda x, h, w: top_k(h, w, None, 3), jnp.bfloat16, False, False),
}


def traced(name: str, *, deterministic: bool = False) -> jax.stages.Traced:
    """An operation, on a mesh of one device."""
    function, dtype, *_ = OPERATIONS[name]
    x = CSR(None, jnp.zeros(40, int), jnp.arange(5) * 10, num_cols=COLUMNS)
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1], axis_types=auto)
    # Within it a program is for one device, also where there are more.
    function = jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    h, kernel = jnp.ones((4, HIDDEN), dtype), jnp.ones((COLUMNS, HIDDEN), dtype)
    jax.clear_caches()  # else what was traced for another GPU is found again
    return xla_options.Programs(function)[deterministic].program.trace(x, h, kernel)


def lowered(name: str) -> str:
    """The program for CUDA."""
    return traced(name).lower(lowering_platforms=("cuda",)).as_text()


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_of_products(precision):
    """On a GPU: float32, three products of bfloat16, TF32."""
    x = CSR(None, jnp.zeros(40, int), jnp.arange(5) * 10, num_cols=COLUMNS)
    operands = x, jnp.ones((4, HIDDEN)), jnp.ones((COLUMNS, HIDDEN))
    for function in (loss, lambda x, h, w, **options: top_k(h, w, None, 3, **options)):
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
