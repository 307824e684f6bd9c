"""The products of all pairs of an example's vectors, as in DLRM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels import dot_interaction as mosaic
from sparsejax.mesh.layout import (
    axes_are_explicit,
    axis_sizes,
    call_on_each_device,
    mesh_is_set,
    varying_axes,
)
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    custom_call_can_run,
    xla_is_for_gpu,
)


def blank_vectors(
    first: Float[Array, "batch dim"],
    vectors: int,
    implementation: Implementation = None,
) -> int:
    """The number of blank vectors to add so that the products are computed fast.

    The GPU program takes multiples of 16 vectors. XLA would copy 16-bit vectors to make their
    number a multiple of 8. cuBLAS rounds float32 to TF32, which is faster with a multiple of 4.
    """
    blank = -vectors % mosaic.MULTIPLE
    if _takes_program(first, vectors + blank, implementation):
        return blank
    if first.dtype.itemsize == 2:
        return -vectors % 8
    tf32 = first.dtype == jnp.float32 and xla_is_for_gpu(implementation)
    return -vectors % 4 if tf32 else 0


def dot_interaction(
    rows: Float[Array, "batch vectors dim"],
    first: Float[Array, "batch dim"] | None,
    *,
    blank: int = 0,
    implementation: Implementation = None,
) -> Float[Array, "batch columns"]:
    """`first`, and the products of vectors i and j for all i < j.

    Further columns of 0 may follow: a matrix product is faster with a round number of
    columns, and appending them later would copy the array.

    Args:
      rows: the vectors. If `first` is given, it is also the first of these vectors.
      first: vectors that are written before the products. Their gradient is separate from
        that of `rows`.
      blank: number of vectors after the first one that have no pairs, as
        `blank_vectors` counts.
      implementation: "mosaic_gpu" is a GPU program for Hopper; "xla" and "xla_gpu" are made
        of XLA's operations; None chooses the fastest one here.
    """
    program = _takes_program(rows, rows.shape[1], implementation)
    return _joined(rows, first, _Pairs(rows.shape[1], blank, program))


class _Pairs(NamedTuple):
    """The pairs of vectors, and whether a GPU program computes their products.

    Attributes:
      vectors: number of vectors of an example, including the blank ones.
      blank: number of vectors, after the first one, that have no pairs.
      program: whether the GPU program is used.
    """

    vectors: int
    blank: int
    program: bool

    def places(self) -> np.ndarray:
        """`[pairs]` numbers `i * vectors + j`, ordered by i and then j."""
        used = np.ones(self.vectors, bool)
        used[1 : 1 + self.blank] = False
        return np.flatnonzero(np.triu(used[:, None] & used[None], 1))

    def columns(self, before: int) -> np.ndarray:
        """A matrix `[vectors, vectors]` with the result column of each pair, in both orders; -1
        without a pair.

        Args:
          before: number of columns before the products.
        """
        columns = np.full(self.vectors**2, -1)
        places = self.places()
        columns[places] = before + np.arange(len(places))
        columns = columns.reshape(self.vectors, self.vectors)
        return np.maximum(columns, columns.T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _joined(rows: jax.Array, first: jax.Array | None, pairs: _Pairs) -> jax.Array:
    places = pairs.places()
    if not pairs.program:
        products = jnp.einsum("bid,bjd->bij", rows, rows)
        products = products.reshape(len(rows), pairs.vectors**2)[:, places]
        given = [] if first is None else [first]
        return jnp.concatenate([*given, products], axis=1)
    before = 0 if first is None else first.shape[1]
    count = mosaic.columns_for(before + len(places), pairs.vectors)
    after = count - before - len(places)
    # Columns of the first vector get the numbers -2, -3, ...
    numbers = -2 - np.arange(before)
    places = np.concatenate([numbers, places, np.full(after, -1)])
    places = places.astype(np.int32)
    return _on_devices(lambda rows: mosaic.products(rows, jnp.asarray(places)), rows)


def _backward(pairs: _Pairs, saved, slopes: jax.Array):
    """The gradient of vector i: the sum over its pairs of the pair's gradient times vector j.

    This is one matrix product, where autodiff has two. A product belongs to one pair, so the
    gradients of the pairs can be gathered. A scatter would take ten times as long.
    """
    rows, first = saved
    before = 0 if first is None else first.shape[1]
    of_first = None if first is None else slopes[:, :before]
    if pairs.program:
        columns = pairs.columns(before).astype(np.int32)

        def of_rows(rows, slopes):
            return mosaic.slopes_of_rows(rows, slopes, jnp.asarray(columns))

        return _on_devices(of_rows, rows, slopes), of_first
    columns = pairs.columns(0)
    slopes = slopes[:, before:]
    place = np.where(columns < 0, slopes.shape[1], columns).reshape(-1)
    # A pair that does not exist reads a column of zeros.
    slopes = jnp.pad(slopes, ((0, 0), (0, 1)))[:, place]
    slopes = slopes.reshape(-1, *columns.shape)
    return jnp.einsum("bij,bjd->bid", slopes, rows), of_first


_joined.defvjp(lambda *x: (_joined(*x), x[:2]), _backward)


def _takes_program(
    like: jax.Array, vectors: int, implementation: Implementation
) -> bool:
    """Whether the GPU program is used for arrays `[batch, ..., dim]` with this many vectors."""
    batch, dim, parts = like.shape[0], like.shape[-1], _parts()
    fault = mosaic.unsupported(batch // parts, vectors, dim, like.dtype)
    if batch % parts:
        fault = f"takes a multiple of {parts} examples, not {batch:,}"
    if implementation == "mosaic_gpu":
        if fault:
            raise NotImplementedError(f"the GPU program {fault}")
        return True
    # The GPU program cannot state the mesh axes over which its results vary.
    if implementation is not None or fault or varying_axes(like):
        return False
    return custom_call_can_run(HOPPER, divided=parts > 1)


def _parts() -> int:
    """The number of devices over which the examples are divided."""
    if not mesh_is_set() or axes_are_explicit():
        return 1
    data, model = axis_sizes()
    return data * model


def _on_devices(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls `f` on each device with the device's examples."""
    if _parts() == 1:
        return f(*arrays)
    spec = P(("data", "model"))
    return call_on_each_device(f, (*arrays,), (spec,) * len(arrays), spec)
