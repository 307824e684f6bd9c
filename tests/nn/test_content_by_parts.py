"""Losses with content, without an array of all item vectors, compared with dense float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType
from kernels import kernel_can_run
from nn.test_item_content import ITEMS, near, some_counts, some_tags, some_vectors

import sparsejax as sj
from sparsejax.kinds.histories import footprint
from sparsejax.mesh.layout import padded_rows
from sparsejax.nn import ContentSizes, content_vectors
from sparsejax.sequence.build import build_sequence_model

WIDTH = 8


def some_layer(tags, vectors, *, items=ITEMS, width=WIDTH, **options) -> Any:
    sizes = ContentSizes.of(tags, vectors)
    layer = sj.nn.SparseOutput(width, items, content=sizes, rngs=nnx.Rngs(0), **options)
    content: Any = layer.content
    content.set_to(tags, vectors)
    content.set_entries(some_counts(items))  # some items have none
    content.by_parts = True
    return layer


def rows_of_content(content, tags, vectors):
    """The rows by which T and V are multiplied, in float64."""
    rows = padded_rows(content.items)
    made = []
    if tags is not None:
        dense = np.zeros((rows, content.tag_kernel.shape[0]))
        norms = np.linalg.norm(tags.toarray(), axis=1, keepdims=True)
        part = tags.toarray() / np.where(norms > 0, norms, 1)
        dense[: len(part), : part.shape[1]] = part
        made.append(("tag_kernel", dense))
    if vectors is not None:
        dense = np.zeros((rows, vectors.shape[1]))
        dense[: len(vectors)] = vectors
        made.append(("vector_kernel", dense))
    return made


def dense_loss(parameters, h, layer, fixed, targets, z_loss):
    content = layer.content
    n = np.asarray(content.entries[...], np.float64)
    a = n / (n + jnp.exp(parameters["log_half"]))
    e = a[:, None] * parameters["kernel"]
    for name, dense in fixed:
        e += dense @ parameters[name]
    e, n = e[: layer.num_items], n[: layer.num_items]
    if layer.temperature is not None:
        # Those without entries are denied, and may be zeros.
        e = jnp.where((n == 0)[:, None], 1, e)
        e /= jnp.linalg.norm(e, axis=1, keepdims=True) * layer.temperature
        h /= jnp.linalg.norm(h, axis=1, keepdims=True)
    scores = h @ e.T
    if layer.bias is not None:
        scores += parameters["bias"][None, : layer.num_items]
    of_targets = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    lse = jax.nn.logsumexp(jnp.where((n == 0)[None], -np.inf, scores), axis=1)
    losses = lse - of_targets + z_loss * lse**2
    return jnp.sum(jnp.where(targets >= 0, losses, 0)) / np.sum(targets >= 0)


@pytest.mark.parametrize(
    ("with_tags", "with_vectors", "chunk", "dtype", "options", "z_loss"),
    [
        (True, True, 300, None, {}, 0.1),
        (True, False, 2**16, None, {"temperature": 0.3, "use_bias": False}, 0.0),
        (False, True, 40, None, {"temperature": 0.3}, 0.0),
        (True, True, 300, jnp.bfloat16, {"use_bias": False}, 0.0),
    ],
)
def test_loss_and_gradients(
    monkeypatch, with_tags, with_vectors, chunk, dtype, options, z_loss
):
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", chunk)
    tags = some_tags() if with_tags else None
    vectors = some_vectors() if with_vectors else None
    layer = some_layer(tags, vectors, dtype=dtype, **options)
    check(layer, tags, vectors, dtype or jnp.float32, z_loss)


def check(layer, tags, vectors, dtype, z_loss, rows=24):
    rng = np.random.default_rng(5)
    h = rng.standard_normal((2, rows // 2, layer.in_features)).astype(np.float32)
    if dtype == jnp.bfloat16:
        h = np.float32(jnp.asarray(h, dtype))
    counts = np.asarray(layer.content.entries[...])
    known = np.flatnonzero(counts[: layer.num_items])  # others are denied
    targets = np.append(known[[0, -1, -1]], rng.choice(known, rows - 3))
    targets[5] = -1
    h.reshape(rows, -1)[5] = np.nan  # an ignored row may be anything

    def f(layer, h):
        shape = h.shape[:-1]
        return layer.cross_entropy(h, jnp.reshape(targets, shape), z_loss=z_loss)

    loss, (grads, dh) = nnx.jit(nnx.value_and_grad(f, argnums=(0, 1)))(layer, h)
    learned = {
        str(path[-1]): np.asarray(x[...], np.float64)
        for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    with jax.enable_x64(True):
        fixed = rows_of_content(layer.content, tags, vectors)
        wide = np.nan_to_num(h.reshape(rows, -1).astype(np.float64), nan=1.0)

        def total(learned, h):
            return dense_loss(learned, h, layer, fixed, targets, z_loss)

        call = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
        want, (of_learned, of_h) = call(learned, jnp.asarray(wide))
        of_learned = jax.tree.map(np.asarray, of_learned)
        of_h = np.where(targets[:, None] < 0, 0, np.asarray(of_h))
    near(loss, np.asarray(want), dtype, 64)
    near(dh.reshape(rows, -1), of_h, dtype, 256)
    found = {str(p[-1]): x[...] for p, x in nnx.to_flat_state(grads)}
    assert found.keys() == of_learned.keys()
    for name, value in of_learned.items():
        near(found[name], value, dtype, 1000)
    assert not np.asarray(found["kernel"])[layer.num_items :].any()


def test_on_a_mesh(monkeypatch):
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", 100)
    types = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    tags, vectors = some_tags(), some_vectors()
    with jax.set_mesh(mesh):
        layer = some_layer(tags, vectors, temperature=0.3)
        check(layer, tags, vectors, jnp.float32, 0.0)


def test_rows_at_the_borders_of_devices():
    """Each id has its row from one device, in one part of its items."""
    tags, vectors = some_tags(), some_vectors()
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        content = some_layer(tags, vectors).content
        kernel = jax.random.normal(jax.random.key(0), (padded_rows(ITEMS), WIDTH))
        each = len(kernel) // 8
        ids = np.append(np.arange(0, ITEMS, each), [-1, 1, each - 1, ITEMS - 1])
        found, _ = jax.jit(content.rows_at)(kernel, jnp.asarray(ids, jnp.int32))
        want = np.asarray(content.vectors_with(kernel))[ids]
    np.testing.assert_allclose(found, np.where(ids[:, None] < 0, 0, want), rtol=1e-5)


def test_gpu_programs(monkeypatch):
    """Interpreted here: the sums, and slopes with their product, in two parts of the items."""
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", 256)
    vectors = some_vectors(500)
    options = {"implementation": "mosaic_gpu", "use_bias": False}
    layer = some_layer(
        None, vectors, items=500, width=64, dtype=jnp.bfloat16, **options
    )
    with kernel_can_run():
        check(layer, None, vectors, jnp.bfloat16, 0.0)


@pytest.mark.parametrize("mesh_shape", [None, (2, 4)])
def test_models_of_histories(monkeypatch, mesh_shape):
    """The loss and the gradients of training are those where all vectors are stored."""
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", 100)
    tags, vectors = some_tags(), some_vectors()
    config = sj.SASRecConfig(max_length=6, width=8, heads=1, blocks=1, dropout=0)
    rng = np.random.default_rng(6)
    histories = rng.integers(0, ITEMS, (4, 7)).astype(np.int32)
    histories[1, 3:] = -1

    def found(by_parts):
        sizes = ContentSizes.of(tags, vectors)
        model: Any = build_sequence_model(
            config, items=ITEMS, content=sizes, rngs=nnx.Rngs(0)
        )
        content = model.output.content
        content.set_to(tags, vectors)
        content.set_entries(1 + some_counts())
        content.by_parts = by_parts

        def f(model):
            return model.loss(jnp.asarray(histories), max_targets=24)

        loss, grads = nnx.jit(nnx.value_and_grad(f))(model)
        return loss, dict(nnx.to_flat_state(grads))

    def both():
        return found(False), found(True)

    if mesh_shape is None:
        stored, parts = both()
    else:
        with jax.set_mesh(sj.make_mesh(data=mesh_shape[0], model=mesh_shape[1])):
            stored, parts = both()
    near(parts[0], np.asarray(stored[0]), jnp.float32, 64)
    for path, value in stored[1].items():
        near(parts[1][path][...], np.asarray(value[...]), jnp.float32, 1000)


def test_networks_have_no_such_form():
    tags = some_tags()
    content = ContentSizes.of(tags, None)
    config = sj.NetworkConfig.autoencoder((WIDTH,))
    model: Any = sj.FeedForward(
        config, inputs=ITEMS, outputs=ITEMS, content=content, rngs=nnx.Rngs(0)
    )
    model.output.content.set_to(tags, None)
    model.output.content.by_parts = True
    rows = sj.CSR.from_scipy(scipy.sparse.csr_array(np.eye(2, ITEMS)))
    with pytest.raises(ValueError, match="by_parts is for models of histories"):
        model.loss(rows, rows)


def test_no_array_of_all_vectors():
    """Beside arguments and gradients, memory does not grow with the items."""

    def temporary(items, by_parts):
        config = sj.SASRecConfig(
            max_length=4, width=32, heads=1, blocks=1, temperature=None
        )
        sizes = ContentSizes(vectors=4)
        model: Any = nnx.eval_shape(
            lambda: build_sequence_model(
                config, items=items, content=sizes, rngs=nnx.Rngs(0)
            )
        )
        model.output.content.by_parts = by_parts
        graph, learned, rest = nnx.split(model, nnx.Param, ...)

        def step(learned, rest, histories):
            def f(learned):
                model: Any = nnx.merge(graph, learned, rest, copy=True)
                return model.loss(histories, max_targets=8)

            return jax.grad(f)(learned)

        histories = jax.ShapeDtypeStruct((2, 5), jnp.int32)
        made = jax.jit(step).lower(learned, rest, histories).compile()
        found: Any = made.memory_analysis()
        return found.temp_size_in_bytes

    few, many = 2**16, 2**18
    of_vectors = 4 * 32 * (many - few)
    grown = {p: temporary(many, p) - temporary(few, p) for p in (False, True)}
    assert grown[False] - grown[True] > 0.9 * of_vectors, grown


def test_fit_chooses_the_form_by_memory(monkeypatch):
    """As a plan does. The losses are those of the other form."""
    for module in (content_vectors, footprint):
        monkeypatch.setattr(module, "CHUNK_ITEMS", 256)
    items, rng = 2000, np.random.default_rng(7)
    data = sj.SequenceDataset(
        np.arange(0, 65, 8),
        rng.integers(0, items, 64).astype(np.int32),
        np.arange(8).astype(str),
        np.arange(items).astype(str),
    )
    rows = [{"item": str(i), "kind": f"k{i % 3}"} for i in range(items)]
    features = sj.read_item_features(rows)
    config = sj.SASRecConfig(max_length=7, width=64, heads=1, blocks=1)
    rule = sj.optimizers.adam(1e-3)

    def trained():
        model, optimizer = sj.build(config, data, rule, item_features=features)
        sizes = {"batch_size": 8, "num_epochs": 2}
        found = sj.fit(model, optimizer, data, deterministic=True, **sizes)
        content: Any = model.output.content
        return [each["loss"] for each in found], content

    stored, content = trained()
    assert not content.by_parts
    sizes = {"inputs": items, "rows": 8, "entries": 64, "batch_size": 8}
    planned = sj.plan(config, rule, content=content.sizes, memory=10**9, **sizes)
    assert planned.fits and not planned.by_parts
    memory = planned.total - 1
    less = sj.plan(config, rule, content=content.sizes, memory=memory, **sizes)
    assert less.fits and less.by_parts and "part by part" in less.table()
    vectors = 4 * padded_rows(items) * config.width
    assert planned.total - less.total > 0.9 * vectors
    monkeypatch.setattr(footprint, "device_memory", lambda: memory)
    losses, content = trained()
    assert content.by_parts
    np.testing.assert_allclose(losses, stored, rtol=1e-4)
