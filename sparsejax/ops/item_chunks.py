"""What the operations over all items share: scores, a chunk of items at a time.

`[batch, items]` is too large to keep, and is needed only once or twice, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sparsejax.sparse import CSR

# A multiple of this many items is a whole number of SIMD vectors and matrix tiles.
_ALIGNMENT = 128


def chunk_size(batch: int, num_items: int, budget: int) -> int:
    """Items in a chunk so that a `[batch, size]` array has about `budget` elements.

    Chunks are even, but for the last one, and never smaller than 128 items.
    """
    largest = max(1, budget // batch // _ALIGNMENT) * _ALIGNMENT
    count = -(-num_items // largest)
    even = -(-num_items // count)
    return min(num_items, -(-even // _ALIGNMENT) * _ALIGNMENT)


def fold[Carry](
    step: Callable[[jax.typing.ArrayLike, int, Carry], Carry],
    carry: Carry,
    num_items: int,
    size: int,
) -> Carry:
    """`carry = step(start, size, carry)` over all chunks; the last one may be smaller.

    Sizes are static. With one chunk there is no loop, and XLA sees through.
    """
    whole, rest = divmod(num_items, size)
    if whole == 1:
        carry = step(0, size, carry)
    else:
        starts = jnp.arange(whole, dtype=jnp.int32) * size
        carry, _ = lax.scan(
            lambda c, start: (step(start, size, c), None), carry, starts
        )
    return step(whole * size, rest, carry) if rest else carry


def slice_rows(array: jax.Array, start: jax.typing.ArrayLike, size: int) -> jax.Array:
    """Rows `start .. start + size - 1`."""
    return lax.dynamic_slice_in_dim(array, start, size)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which products of operands of this dtype are summed."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over the two named axes: operands as given, sums in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulator(a.dtype),
    )


def scores(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    start: jax.typing.ArrayLike,
    size: int,
) -> Float[Array, "batch size"]:
    """`(h . kernel_i) scale_i + bias_i` for items `start .. start + size - 1`."""
    result = dot(h, slice_rows(kernel, start, size), (1, 1))
    if scale is not None:
        result *= slice_rows(scale, start, size).astype(result.dtype)[None]
    if bias is not None:
        result += slice_rows(bias, start, size).astype(result.dtype)[None]
    return result


def local_columns(
    matrix: CSR, start: jax.typing.ArrayLike, size: int
) -> Int[Array, "nse"]:
    """Column of each entry within a chunk; `size` (to be dropped) if it is elsewhere.

    Not negative, which an index update would take for a count from the end.
    """
    columns = jnp.asarray(matrix.indices) - start
    return jnp.where((columns >= 0) & (columns < size), columns, size)


def broken_rows(matrix: CSR) -> Bool[Array, "rows"]:
    """Rows that must come out as NaN: overfull, or with an index out of range."""
    outside = (matrix.indices < 0) | (matrix.indices >= matrix.num_cols)
    broken = matrix.overfull_rows()
    return broken.at[matrix.row_ids()].max(jnp.asarray(outside), mode="drop")


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for an implementation that does not exist."""
    if implementation not in (None, "xla"):
        raise ValueError(f'implementation is None or "xla", got {implementation!r}')


def check_layer(
    h: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
) -> None:
    """Raises ValueError or TypeError for operands that are no output layer."""
    if h.ndim != 2 or kernel.ndim != 2 or h.shape[1] != kernel.shape[1]:
        raise ValueError(
            "expected h [batch, hidden] and kernel [items, hidden], got "
            f"{h.shape} and {kernel.shape}"
        )
    if h.shape[0] == 0:
        raise ValueError("h has no rows; the batch is empty")
    if h.dtype != kernel.dtype or not jnp.issubdtype(h.dtype, jnp.floating):
        raise TypeError(
            f"h is {h.dtype} and kernel {kernel.dtype}; cast one so that both are the "
            "same floating dtype"
        )
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and vector.shape != kernel.shape[:1]:
            raise ValueError(
                f"{name} has shape {vector.shape} but the kernel has "
                f"{kernel.shape[0]:,} rows; one {name} value for each"
            )


def check_matrix(name: str, matrix: CSR, h: jax.Array, kernel: jax.Array) -> None:
    """Raises ValueError if the CSR called `name` does not fit the output layer."""
    if matrix.num_rows != h.shape[0]:
        raise ValueError(
            f"{name} has {matrix.num_rows:,} rows but h has {h.shape[0]:,}; "
            "one row for each example"
        )
    if matrix.num_cols == 0:
        raise ValueError(f"{name} has no columns; there must be an item")
    if matrix.num_cols > kernel.shape[0]:
        raise ValueError(
            f"{name} has {matrix.num_cols:,} columns but the kernel has "
            f"{kernel.shape[0]:,} rows; read the data with the vocabulary the layer "
            "was made for"
        )
