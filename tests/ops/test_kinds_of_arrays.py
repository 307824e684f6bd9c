"""Every public operation takes arrays of NumPy and of JAX, traced ones and weak types."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import metrics
from sparsejax.metrics.ranking import METRICS
from sparsejax.sparse import CSR

# Annotations are of JAX's arrays: they are what comes back.
pytestmark = pytest.mark.usefixtures("symbolic_sizes")

ROWS, WIDTH, ITEMS = 3, 4, 7
DRAW = np.random.default_rng(0)


def drawn(*shape):
    return DRAW.standard_normal(shape, np.float32)


LABELS = CSR.from_scipy(
    scipy.sparse.csr_array(DRAW.random((ROWS, ITEMS)) < 0.4).astype(np.float32)
)
H, KERNEL, BIAS = drawn(ROWS, WIDTH), drawn(ITEMS, WIDTH), drawn(ITEMS)
SCALE, WEIGHTS = np.abs(drawn(ITEMS)), np.abs(drawn(ROWS))
TARGETS = np.array([1, -1, 6], np.int32)
NEGATIVES, LOG_Q = np.array([0, 1, 5], np.int32), -np.abs(drawn(3))
IDS = np.array([[1, 2], [3, -1], [0, 6]], np.int32)
HISTORIES = np.array([[1, 2, 3], [4, -1, -1], [0, 6, 5]], np.int32)
TIMES = np.array([[0, 5, 90], [0, 0, 0], [0, 1, 2]], np.float32)
SCORES, CLICKED = drawn(9), np.array([0, 1, 1, 0, 1, 0, 0, 1, 0], np.float32)


@functools.cache
def output(**options) -> sj.SparseOutput:
    return sj.SparseOutput(WIDTH, ITEMS, rngs=nnx.Rngs(0), **options)


@functools.cache
def hstu() -> sj.sequence.SequenceModel:
    config = sj.HSTUConfig(max_length=3, width=4, blocks=1, heads=1)
    model = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
    model.eval()
    return model


@functools.cache
def tables() -> sj.embeddings.EmbeddingCollection:
    return sj.embeddings.EmbeddingCollection(
        {"items": sj.embeddings.TableConfig(ITEMS, WIDTH)},
        {"item": sj.embeddings.FeatureConfig("items")},
        rngs=nnx.Rngs(0),
    )


@functools.cache
def clicks() -> Any:
    config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
    return sj.clicks.build_click_model(
        config, num_dense=2, features={"item": ITEMS}, rngs=nnx.Rngs(0)
    )


# Of each operation a function of arrays, and the arrays.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "linear_cross_entropy": (
        lambda h, w, t, b, s, g: sj.linear_cross_entropy(
            h, w, t, bias=b, scale=s, weights=g
        ),
        (H, KERNEL, TARGETS, BIAS, SCALE, WEIGHTS),
    ),
    "linear_cross_entropy of a gradient": (
        jax.grad(lambda h, w, t: sj.linear_cross_entropy(h, w, t), argnums=(0, 1)),
        (H, KERNEL, TARGETS),
    ),
    "output_loss": (
        lambda h, w, b, s, g: sj.output_loss(h, w, b, LABELS, scale=s, weights=g),
        (H, KERNEL, BIAS, SCALE, WEIGHTS),
    ),
    "output_loss_per_example": (
        lambda h, w, b, s: sj.output_loss_per_example(
            h, w, b, LABELS, scale=s, loss="softmax_cross_entropy"
        ),
        (H, KERNEL, BIAS, SCALE),
    ),
    "top_k": (
        lambda h, w, b, s: sj.top_k(h, w, 3, bias=b, scale=s, exclude=LABELS),
        (H, KERNEL, BIAS, SCALE),
    ),
    "gather_matmul": (lambda w: sj.gather_matmul(LABELS, w), (KERNEL,)),
    "gather_matmul, mean": (
        lambda w: sj.gather_matmul(LABELS, w, combiner="mean"),
        (KERNEL,),
    ),
    "normalize_rows": (
        lambda data: sj.nn.normalize_rows(LABELS.with_data(data)).data,
        (np.abs(drawn(LABELS.nse)),),
    ),
    "lookup": (
        lambda data: sj.optimizers.lookup(output().kernel, LABELS.with_data(data)),
        (np.abs(drawn(LABELS.nse)),),
    ),
    "CSR": (
        lambda data, indices, indptr, w: sj.gather_matmul(
            CSR(data, indices, indptr, num_cols=ITEMS), w
        ),
        (
            np.array([2, 1, 3], np.float32),
            np.array([4, 0, 6], np.int32),
            np.array([0, 1, 1, 3], np.int32),
            KERNEL,
        ),
    ),
    "sampled_cross_entropy": (
        lambda h, w, t, n, q, b, g: sj.nn.sampled_cross_entropy(
            h, w, t, n, log_q=q, bias=b, weights=g
        ),
        (H, KERNEL, TARGETS, NEGATIVES, LOG_Q, BIAS, WEIGHTS),
    ),
    "sampled_cross_entropy, sigmoid": (
        lambda h, w, t, n, q: sj.nn.sampled_cross_entropy(
            h, w, t, n, log_q=q, loss="sigmoid"
        ),
        (H, KERNEL, TARGETS, NEGATIVES, LOG_Q),
    ),
    "SparseOutput.loss": (
        lambda h, g: output().loss(h, LABELS, weights=g),
        (H, WEIGHTS),
    ),
    "SparseOutput.cross_entropy": (
        lambda h, t, g: output().cross_entropy(h, t, weights=g),
        (H, TARGETS, WEIGHTS),
    ),
    "SparseOutput.sampled_cross_entropy": (
        lambda h, t, n, q: output(temperature=0.5).sampled_cross_entropy(
            h, t, n, log_q=q
        ),
        (H, TARGETS, NEGATIVES, LOG_Q),
    ),
    "SparseOutput.top_k": (lambda h: output(temperature=0.5).top_k(h, 3), (H,)),
    "SparseOutput.scores": (lambda h: output().scores(h), (H,)),
    "SparseOutput.item_scores": (
        lambda h, ids: output().item_scores(h, ids),
        (H, np.maximum(IDS, 0)),
    ),
    "SequenceModel": (lambda x, t: hstu()(x, t), (HISTORIES, TIMES)),
    "SequenceModel.loss": (lambda x, t: hstu().loss(x, t), (HISTORIES, TIMES)),
    "SequenceModel.last": (lambda x, t: hstu().last(x, t), (HISTORIES, TIMES)),
    "SequenceModel.top_k": (
        lambda x, t: hstu().top_k(x, 2, times=t),
        (HISTORIES, TIMES),
    ),
    "EmbeddingCollection": (lambda ids: tables()({"item": ids})["item"], (IDS[:, 0],)),
    "EmbeddingCollection, lists": (
        lambda ids: tables()({"item": ids})["item"],
        (IDS,),
    ),
    "click model": (
        lambda dense, ids: clicks()(dense, {"item": ids}),
        (drawn(ROWS, 2), IDS[:, 0]),
    ),
    "metrics of a ranking": (
        lambda ids: [metric(ids, LABELS, 2) for metric in METRICS.values()],
        (np.array([[1, 2], [3, -1], [0, 6]], np.int32),),
    ),
    "metrics.recommendation_counts": (
        lambda ids: metrics.recommendation_counts(ids, ITEMS, 2),
        (np.array([[1, 2], [3, -1], [0, 6]], np.int32),),
    ),
    "metrics.BinnedAuc": (
        lambda scores, labels: metrics.BinnedAuc.empty().update(scores, labels),
        (SCORES, CLICKED),
    ),
    "clip_by_global_norm": (
        lambda a, b: sj.optimizers.clip_by_global_norm({"a": a, "b": b}, 0.5),
        (H, BIAS),
    ),
    "global_norm": (
        lambda a, b: sj.optimizers.global_norm({"a": a, "b": b}),
        (H, BIAS),
    ),
    "accumulate": (lambda a: sj.optimizers.accumulate({"a": a}), (H,)),
    **{
        f"losses.{name}": (
            lambda s, t, name=name: sj.losses.get(name)(s, t, t > 0),  # pyrefly: ignore
            (SCORES, CLICKED),
        )
        for name in sj.losses.NAMES
        # The softmax is over the items of a row, not a rule of each score.
        if name != "softmax_cross_entropy"
    },
}


def weak(array: np.ndarray) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array as a weak type, like Python's numbers."""
    is_weak = array.dtype.kind == "f"
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=is_weak)


def arrays_of(found) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def wide(array: np.ndarray) -> np.ndarray:
    """Converts an array to the 64-bit dtype that NumPy uses by default."""
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


# An id is a row of a table: what does not fit in int32 is refused, not cut off.
IDS_ARE_INT32 = {"EmbeddingCollection", "EmbeddingCollection, lists", "click model"}


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    """Fills caches before anything is traced: arrays made during a trace would leak into the
    caches.

    A worker of pytest-xdist may begin with any case.
    """
    for make in (output, functools.partial(output, temperature=0.5)):
        make()
    for make in (hstu, tables, clicks):
        make()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_every_kind_of_array(name):
    operation, arrays = OPERATIONS[name]
    expected = arrays_of(operation(*map(jnp.asarray, arrays)))
    first, *others = arrays
    widened = [wide(x) for x in arrays]
    if name in IDS_ARE_INT32:
        with pytest.raises(TypeError, match="must be int32, got int64"):
            operation(*widened)
        widened = [
            x if x.dtype.kind == "f" else a
            for x, a in zip(widened, arrays, strict=True)
        ]
    for found in (operation(*arrays), operation(*widened)):
        for got, wanted in zip(arrays_of(found), expected, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    # Traced ones are not computed: only what is made of their types may differ.
    for found in (
        jax.eval_shape(operation, *map(weak, arrays)),
        jax.eval_shape(lambda x: operation(x, *others), first),
        jax.eval_shape(lambda *x: operation(first, *x), *others),
    ):
        for got, wanted in zip(jax.tree.leaves(found), expected, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_goes_where_types_may_not_be_mixed(name):
    operation, arrays = OPERATIONS[name]
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(operation, *map(jnp.asarray, arrays))
