"""Similar items, by the vectors of a predictor's output layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.mesh.layout import without_mesh
from sparsejax.mesh.promotion import promoting
from sparsejax.mesh.xla_options import gpu_options
from sparsejax.ops.top_k import top_k
from sparsejax.predictors.runtime import Programs
from sparsejax.predictors.signature import Array, Signature
from sparsejax.sparse import CSR


def similar_programs(signature: Signature, programs: Programs) -> Programs:
    """Programs that return the items with the largest cosine to a given item.

    Their inputs are the number of the item, and excluded items, among them the item itself. A zero
    vector has the cosine 0 with all others. Items whose vectors are not finite are excluded.

    Args:
      signature: signature of a predictor with an output layer.
      programs: programs of that predictor, whose weights the result shares. The result also
          excludes the items that they exclude.
    """
    layer = signature.layer
    assert layer is not None
    exclude, (ids, scores) = signature.inputs[-1], signature.outputs
    num_items, (k,) = exclude.shape[-1], ids.shape

    def similar(weights: list[jax.Array], inputs: list[Any]) -> list[jax.Array]:
        (kernel, scale, bias, *denied), (items, own) = weights, inputs
        bias = sum(denied, start=bias)
        kernel, seen = kernel.astype(layer.dtype), CSR(None, *own, num_cols=num_items)
        found, cosines = top_k(
            kernel[items],
            kernel,
            k,
            bias=bias,
            scale=scale,
            exclude=seen,
            precision="highest",
        )
        cosines = jnp.where(found < 0, -jnp.inf, cosines * scale[items][:, None])
        return [found.astype(ids.dtype), cosines.astype(scores.dtype)]

    with without_mesh():  # programs run on one device
        options = dict(gpu_options()) or None
    kernel = programs.weights[layer.kernel]
    weights = [
        kernel,
        *_scale_and_bias(kernel),
        *programs.weights[-1:] * programs.denies,
    ]
    inputs = Array(name="items", dtype="int32", shape=()), exclude
    compiled = {
        rows: jax.jit(similar, compiler_options=options) for rows in programs.by_rows
    }
    return Programs(inputs, compiled, weights, code={}, denies=programs.denies)


@jax.jit
@promoting()
def _scale_and_bias(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse norm of each vector, and a bias that is -inf for vectors that are not finite."""
    largest = jnp.max(jnp.abs(kernel).astype(jnp.float32), axis=1)
    finite = jnp.isfinite(largest)
    # Vectors are divided by their largest number, so that squares neither overflow nor underflow.
    unit = jnp.where(finite & (largest > 0), largest, 1)
    norm = jnp.linalg.norm(kernel.astype(jnp.float32) / unit[:, None], axis=1) * unit
    scale = jnp.where(finite & (norm > 0), 1 / norm, 0)
    return scale, jnp.where(finite, 0, -jnp.inf).astype(jnp.float32)
