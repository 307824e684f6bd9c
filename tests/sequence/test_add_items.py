"""A trained sequence model gets more items."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj

HISTORIES = np.array([[0, 1, 2, 3], [4, 0, 1, -1], [9, -1, -1, -1]], np.int32)


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_known_items_stay_and_new_ones_are_learned(temperature):
    config = sj.SASRecConfig(
        max_length=4, width=8, blocks=1, heads=1, temperature=temperature
    )
    model = sj.sequence.SASRec(config, items=250, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.05))
    model.eval()

    @nnx.jit
    def step(model, optimizer, histories):
        loss, grads = nnx.value_and_grad(lambda m: m.loss(histories))(model)
        optimizer.update(model, grads)
        return loss

    # Programs: operation by operation, each would be compiled.
    last = nnx.jit(lambda model: model.last(jnp.asarray(HISTORIES)))
    best = nnx.jit(lambda model, histories: model.top_k(histories, 1)[0])
    step(model, optimizer, jnp.asarray(HISTORIES))
    before = [
        (path, np.asarray(leaf[...]))
        for path, leaf in nnx.to_flat_state(nnx.state((model, optimizer)))
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    h = last(model)
    scores = model.output.scores(h)

    model.add_items(25, optimizer=optimizer)

    after = dict(nnx.to_flat_state(nnx.state((model, optimizer))))
    for path, array in before:
        known = after[path][...]
        if array.ndim and len(array) == 256:
            assert known.shape[0] == 512
            array, known = array[:250], known[:250]
        np.testing.assert_array_equal(known, array, str(path))
    np.testing.assert_allclose(last(model), h, rtol=1e-6)
    again = model.output.scores(h)
    assert again.shape == (3, 275)
    np.testing.assert_allclose(again[:, :250], scores, rtol=1e-5, atol=1e-6)
    new = jnp.asarray([[0, 260], [260, 270]], jnp.int32)
    first = step(model, optimizer, new)
    for _ in range(20):
        loss = step(model, optimizer, new)
    assert loss < 0.5 * first
    assert best(model, new[:, :1]).tolist() == [[260], [270]]
