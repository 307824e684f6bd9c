"""A whole model on a mesh with Explicit axes equals the model on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType
from matrices import random_csr

import sparsejax as sj
from sparsejax.mesh.blocks import ShardedCSR

ROWS, ITEMS = 64, 300


def explicit_mesh():
    types = (AxisType.Explicit,) * 2
    return jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=types))


def table(density, seed):
    return random_csr(ROWS, ITEMS, density, seed=seed).to_scipy().astype(bool)


def a_model(hidden=(8, 4), **options):
    # The last hidden layer lies over both axes.
    config = sj.NetworkConfig.autoencoder(hidden, temperature=0.5, **options)
    return sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))


def both(results):
    """Runs a function on one device, and on the mesh."""
    want = results()
    with explicit_mesh():
        return results(), want


def assert_close(got, want):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    jax.tree.map(close, got, want)


def test_methods_and_steps():
    x = random_csr(ROWS, ITEMS, 0.05)
    ids = jnp.asarray(np.tile(np.arange(3), (ROWS, 1)))

    def results():
        model, batch = a_model(), x
        if not jax.sharding.get_abstract_mesh().empty:
            batch = jax.jit(ShardedCSR.of)(x)
        optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-2))

        @nnx.jit
        def step(model, optimizer, batch):
            def loss(model):
                return model.loss(batch, batch)

            value, gradients = optimizer.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        @nnx.jit
        def used(model, batch):
            found, scores = model.top_k(batch, 5, exclude=batch)
            dense = nnx.grad(lambda m: m.loss(batch, batch, deterministic=True))(model)
            counts = sj.metrics.recommendation_counts(found, ITEMS)
            some = model.item_scores(batch, ids)
            gradient = dense.output.kernel[...]
            return found, scores, counts, some, gradient, model(batch)

        losses = [step(model, optimizer, batch) for _ in range(2)]
        optimizer.flush(model)
        model.eval()
        return jax.tree.map(np.asarray, (losses, used(model, batch)))

    assert_close(*both(results))


def test_a_tied_kernel():
    x = random_csr(ROWS, ITEMS, 0.05)

    def results():
        model = a_model((8,), tied=True)
        before = jax.tree.map(jax.typeof, nnx.state(model))
        optimizer = sj.Optimizer(model, sj.optimizers.rmsprop(1e-2))

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return model.loss(x, x)

            value, gradients = optimizer.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses = [step(model, optimizer) for _ in range(3)]
        assert jax.tree.map(jax.typeof, nnx.state(model)) == before
        return jax.tree.map(np.asarray, losses)

    assert_close(*both(results))


def test_functions():
    train, heldout = table(0.05, 1), table(0.03, 2)
    heldout = scipy.sparse.csr_array(heldout.toarray() & ~train.toarray())

    def results():
        model = a_model()
        before = jax.tree.map(jax.typeof, nnx.state(model))
        optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
        options = {"batch_size": 64, "num_epochs": 2, "k": 5}
        history = sj.fit(model, optimizer, train, validation=heldout, **options)
        for entry in history:
            del entry["examples_per_second"]
        assert jax.tree.map(jax.typeof, nnx.state(model)) == before
        found = sj.recommend(model, train, 5, exclude=train)
        similar = sj.similar_items(model, [3, ITEMS - 1], k=4)
        vectors = sj.item_vectors(model), sj.user_vectors(model, train)
        return history, found.ids, similar.scores, vectors

    assert_close(*both(results))
