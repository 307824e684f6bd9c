"""A training step of click models in a loop of one's own."""

import optax
from flax import nnx


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, dense, ids, click):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(dense, ids), click).mean()

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
