"""Sums of gathered rows, without a derivative: implementations, and the choice among them.

`gather_matmul` and its gradient `scatter_gradient` both call these functions.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels import gather_matmul as mosaic
from pallas_kernels.mosaic import on_one_device
from sparsejax.mesh.blocks import LookupRows
from sparsejax.mesh.exchange import DividedRows, narrower
from sparsejax.mesh.layout import (
    call_on_each_device,
    vary_alike,
    vary_over,
    varying_axes,
)
from sparsejax.mesh.per_device import own_block
from sparsejax.mesh.xla_options import same_bits_are_wanted
from sparsejax.ops.implementations import (
    BEFORE_HOPPER,
    HOPPER_OR_NEWER,
    Implementation,
    custom_call_can_run,
)
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.piece_sum import by_pieces, by_steps
from sparsejax.sparse import CSR

# Number of rows read per iteration of the CPU loop. 4 to 32 are within 10 % of each other, and 8
# is the fastest (26,744 x 256, batch 512, 67 k entries: 2.4 ms, 3.1 with 1; SciPy takes 4.1). If
# most sums have at most one row, 1 is the fastest: 106,496 sums of one row took 10.8 ms instead of
# 29.6.
_UNROLL = 8

# Number of entries after which they read the first table again; 0 if it is unknown. As a part of
# JAX's context it is a key of the caches of traced and compiled programs.
_period = jax.make_user_context(default_value=0)


def in_turns(period: int) -> contextlib.AbstractContextManager[object]:
    """While this context is open, lookups assume that tables repeat every `period` entries.

    The GPU program then reads one table after the other for all examples, so that popular
    rows stay in its caches.
    """
    return _period(period)


def gather_sum(
    x: LookupRows,
    w: Float[Array, "features hidden"],
    implementation: Implementation,
    *,
    wide: bool = False,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "batch hidden"]:
    """`gather_matmul` with the combiner "sum", without a derivative.

    With `wide`, the sums keep the dtype of the summation. Otherwise they are rounded to
    `dtype`, by default the dtype of `w`.
    """
    dtype = jnp.dtype(w.dtype if dtype is None else dtype)
    dtype = accumulator(w.dtype) if wide else dtype
    if isinstance(x, CSR):
        return _sum_on_device(*vary_alike(x, w), implementation, dtype)

    def summed(x, w, dtype=dtype):
        return gather_sum(x, w, implementation, dtype=dtype)

    if isinstance(x, DividedRows):

        def part(x, w):
            # Rows for other devices are rounded only after they are added.
            read = w.dtype if x.crosses else dtype

            def of_kernel(block, wire):
                if not x.crosses:
                    return summed(block, w, dtype)
                # Owners receive ids in another order, without a period.
                with in_turns(0):
                    return summed(block, w, narrower(read, wire))

            return own_block(x).sums(
                of_kernel, lambda block, rows, _: summed(block, rows), dtype
            )

        return call_on_each_device(
            part, (x, w), (P("data", "model"), x.kernel_spec), P(("data", "model"))
        )
    return call_on_each_device(
        lambda blocks, w: x.sum_over_columns(summed(own_block(blocks), w)),
        (x.blocks, w),
        (P("data", "model"), P("model")),
        x.rows_spec,
    )


def added(
    x: CSR,
    w: Float[Array, "features hidden"],
    dtype: jnp.dtype | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "batch hidden"]:
    """`gather_sum` whose result has the dtype of the summation, or a narrower `dtype`."""
    made = narrower(accumulator(w.dtype), dtype)
    return gather_sum(x, w, implementation, dtype=made)


def _sum_on_device(
    x: CSR, w: jax.Array, implementation: Implementation, dtype: jnp.dtype
) -> jax.Array:
    if implementation is None and mosaic_is_fastest(w, x.nse):
        implementation = "mosaic_gpu"
    if implementation == "mosaic_gpu":
        indices, indptr = jnp.asarray(x.indices), jnp.asarray(x.indptr)
        data = None if x.data is None else jnp.asarray(x.data)
        config = None
        if period := _period.value:
            config = mosaic.default_config(w.shape[1], w.dtype.itemsize, x.nse, period)
        return mosaic.gather_matmul(
            data, indices, indptr, w, x.num_cols, dtype=dtype, config=config
        )
    if implementation is None and _cusparse_is_fastest(x, w):
        implementation = "cusparse"
    if implementation == "cusparse" and _cusparse_fits(x, w):
        return by_cusparse(x, w).astype(dtype)
    # In an exported program, the number of entries is a symbol.
    for_gpu = by_pieces if isinstance(x.nse, int) else by_steps
    if implementation in ("xla_gpu", "cusparse"):
        return for_gpu(x, w, dtype)
    return lax.platform_dependent(
        x,
        w,
        cpu=functools.partial(by_loop, dtype=dtype),
        default=functools.partial(for_gpu, dtype=dtype),
    )


def mosaic_is_fastest(w: jax.Array, nse: int, *, divided: bool = False) -> bool:
    """Whether the GPU program can run here and is faster than XLA's form.

    The figures are in benchmarks/notes/gather_matmul.md.

    Args:
      w: the matrix whose rows are gathered.
      nse: number of entries.
      divided: whether `shard_map` divides the work, without which a GPU program needs a
        single device.
    """
    rows, hidden = w.shape
    if w.dtype not in (jnp.float32, jnp.bfloat16) or not mosaic_fits(rows, hidden, nse):
        return False
    # The GPU program cannot state the mesh axes over which its results vary.
    if varying_axes(w):
        return False
    return custom_call_can_run(HOPPER_OR_NEWER, divided=divided)


def mosaic_fits(rows: int, hidden: int, nse: int) -> bool:
    """Whether the GPU program is fast for `w [rows, hidden]` and `nse` entries."""
    # For another width below 128 the program pads `w`, which copies it. On an H200
    # the copy takes .18 us for 1,000 rows, and the program saves .15 us for 1,000 entries.
    return hidden >= 128 or mosaic.takes_narrow(hidden) or 4 * rows <= 3 * nse


def _cusparse_is_fastest(x: CSR, w: jax.Array) -> bool:
    """Whether cuSPARSE is the fastest here: on a GPU that our GPU program does not support."""
    # cuSPARSE cannot be called in these cases, see also `mosaic_is_fastest`.
    if varying_axes(w) or not _cusparse_fits(x, w):
        return False
    return custom_call_can_run(BEFORE_HOPPER) and not same_bits_are_wanted()


def _cusparse_fits(x: CSR, w: jax.Array) -> bool:
    """Whether JAX passes such operands to cuSPARSE."""
    sizes = x.num_rows, x.nse, *w.shape
    # In an exported program, sizes are symbols.
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    # cuSPARSE rejects more entries than a dense matrix of this shape has.
    fits = x.nse <= (x.num_rows + 1) * w.shape[0]
    return fits and w.dtype in (jnp.float32, jnp.float64)


def by_cusparse(x: CSR, w: jax.Array) -> jax.Array:
    """`x @ w` by cuSPARSE; on other devices by JAX's own sparse product.

    Two runs of cuSPARSE differ in their last bits.
    """
    # This import loads much of SciPy, so it is done late.
    from jax.experimental import sparse

    indptr = jnp.minimum(jnp.asarray(x.indptr, jnp.int32), x.nse)
    # cuSPARSE needs every entry in a row, so one more row has the padding entries.
    indptr = jnp.concatenate([indptr, jnp.full(1, x.nse, jnp.int32)])
    ids = jnp.asarray(x.indices, jnp.int32)
    inside = (ids >= 0) & (ids < x.num_cols)
    data = jnp.ones(x.nse, w.dtype) if x.data is None else jnp.asarray(x.data, w.dtype)
    data, ids = jnp.where(inside, data, jnp.nan), jnp.where(inside, ids, 0)
    shape = x.num_rows + 1, w.shape[0]
    w = on_one_device(w)
    y = (sparse.CSR((data, ids, indptr), shape=shape) @ w)[:-1]
    return jnp.where(x.overfull_rows()[:, None], jnp.nan, y)


def by_loop(x: CSR, w: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """XLA's form that is fast on a CPU: a sequential loop over rows and entries."""
    hidden, sums, axes = w.shape[1], accumulator(w.dtype), varying_axes(w)
    is_known = isinstance(x.nse, int) and isinstance(x.num_rows, int)
    unroll = 1 if is_known and x.nse <= x.num_rows else _UNROLL
    indices = jnp.pad(jnp.asarray(x.indices), (0, unroll))
    data = None
    if x.data is not None:
        data = jnp.pad(jnp.asarray(x.data, sums), (0, unroll))
    indptr = jnp.asarray(x.indptr)

    def row(b, y):
        start, end = indptr[b], indptr[b + 1]

        def block(carry):
            i, total = carry
            ids = lax.dynamic_slice(indices, (i,), (unroll,))
            for u in range(unroll):
                term = lax.dynamic_index_in_dim(w, ids[u], keepdims=False)
                term = term.astype(sums)
                if data is not None:
                    term = term * data[i + u]
                inside = (ids[u] >= 0) & (ids[u] < x.num_cols)
                term = jnp.where(inside, term, jnp.nan)
                # A selection, not a factor of 0: the row that padding reads may be NaN.
                total = total + jnp.where(i + u < end, term, 0)
            return i + unroll, total

        stop = jnp.minimum(end, x.nse)
        zeros = vary_over(jnp.zeros(hidden, sums), axes)
        _, total = lax.while_loop(lambda c: c[0] < stop, block, (start, zeros))
        total = jnp.where(end > x.nse, jnp.nan, total)
        return lax.dynamic_update_index_in_dim(y, total.astype(y.dtype), b, 0)

    y = vary_over(jnp.zeros((x.num_rows, hidden), dtype or w.dtype), axes)
    return lax.fori_loop(0, x.num_rows, row, y) if x.num_rows else y
