"""Sparse rows times a dense matrix: the needed rows of the matrix are gathered."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from sparsejax.mesh.blocks import LookupRows, ShardedCSR, SparseRows, check_kernel_rows
from sparsejax.mesh.exchange import DividedRows
from sparsejax.mesh.layout import (
    call_on_each_device,
    call_with_auto_axes,
    check_kernel_spec,
    reshard_if_explicit,
    vary_alike,
    vary_over,
    varying_axes,
)
from sparsejax.mesh.per_device import own_block
from sparsejax.mesh.promotion import promoting
from sparsejax.ops.gather_sum import added, gather_sum
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.scatter_gradient import dense_gradient
from sparsejax.sparse import CSR

Combiner = Literal["sum", "mean", "sqrtn"]


@promoting()
def gather_matmul(
    x: LookupRows,
    w: Float[Array, "features hidden"],
    *,
    combiner: Combiner = "sum",
    kernel_spec: P | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "batch hidden"]:
    """Multiplies sparse rows with a dense matrix: an embedding bag.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> gather_matmul(x, jnp.ones((5, 2)), combiner="mean").tolist()
    [[1.0, 1.0], [0.0, 0.0]]

    ::

        y[b] = s_b sum_j v_j w[i_j]        over the entries j of row b

        combiner   "sum"   s_b = 1
                   "mean"  s_b = 1 / sum_j v_j
                   "sqrtn" s_b = 1 / sqrt(sum_j v_j^2)

    A row without entries, or whose weights sum to zero, gives zeros. Sums are computed in
    float32 (float64 for a float64 `w`) and rounded once to `dtype`. Memory traffic:
    `nse * hidden` elements of `w`, and the result. No `[nse, hidden]` array is made.

    Differentiable in `w` (a dense gradient; see `sparsejax.value_and_grad` for one of
    the touched rows only) and in `x.data`.

    Args:
      x: `[batch, features]`. An entry outside `[0, features)`, or a row that does not
        fit in an overfull CSR, makes its row NaN.
      w: matrix with at least `x.num_cols` rows; further rows are never read.
      combiner: how the rows of a bag are combined.
      kernel_spec: how `w` is divided over the mesh that is set: `P("model", None)` divides
        its rows. Then each device sums its own rows for its part of the batch, and the
        sums are added. The rows of the result are divided over "data" (see also
        `ShardedCSR.of_rows`). A `ShardedCSR` implies it.
      dtype: floating dtype of the result; that of `w` by default.
      implementation: "mosaic_gpu" is the GPU program (Hopper or newer), "xla" the
        reference, "xla_gpu" the reference as GPUs run it, "cusparse" cuSPARSE's product
        (float32; two runs differ in their last bits). None chooses the fastest one here.

    Raises:
      ValueError: shapes do not match, an unknown combiner or implementation, or a spec
        that does not fit the mesh.
      TypeError: `w` or `dtype` is not of a real floating dtype.
    """
    w = jnp.asarray(w)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"w is {w.dtype}; cast it to a floating dtype, as float32")
    dtype = jnp.dtype(w.dtype if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype is {dtype}; results are floating, as float32")
    if w.ndim != 2 or w.shape[0] < x.num_cols:
        raise ValueError(
            f"x has {x.num_cols:,} columns but w has shape {w.shape}; "
            "w needs a row for each column"
        )
    check_implementation(implementation)
    if kernel_spec is not None:
        check_kernel_spec(kernel_spec)
        x = ShardedCSR.of(x) if isinstance(x, CSR) else x
    if isinstance(x, ShardedCSR):
        check_kernel_rows("w", w, x)
    x, w = vary_alike(combined(x, combiner), w)
    return _gather_sum(x, w, implementation, dtype)


def check_combiner(combiner: str) -> None:
    """Raises ValueError for a combiner that does not exist."""
    if combiner not in get_args(Combiner):
        raise ValueError(f'combiner is "sum", "mean" or "sqrtn", got {combiner!r}')


def combined[Matrix: LookupRows](x: Matrix, combiner: Combiner) -> Matrix:
    """`x` with each row times its factor `s_b`, see `gather_matmul`.

    Differentiable in `x.data`. Each row is first divided by a power of 2 near its largest
    value, so that neither its sum nor its sum of squares leaves the range of float32.
    """
    check_combiner(combiner)
    if combiner == "sum":
        return x

    if isinstance(x, DividedRows):
        raise NotImplementedError(
            f"the combiner {combiner!r} of rows that are divided over all devices: apply it "
            "to the part of each device before"
        )
    spec = P("data", "model") if isinstance(x, ShardedCSR) else P()
    rows = call_with_auto_axes(lambda x: x.row_ids(), x, out_specs=spec)

    def of_row(values):
        def read(values, rows):
            return values.at[rows].get(mode="fill", fill_value=0)

        return call_with_auto_axes(read, values, rows, out_specs=spec)

    if x.data is None:
        lengths = call_with_auto_axes(
            lambda x: x.row_lengths(), x, out_specs=P(*spec[:1])
        )
        data = of_row(_inverse(lengths.astype(jnp.float32), combiner))
        return x.with_data(data)  # pyrefly: ignore[bad-return]
    # Padding is replaced before the division: NaN in padding would make its gradient NaN too.
    used, dtype = rows < x.num_rows, accumulator(x.data.dtype)
    values = jnp.where(used, reshard_if_explicit(jnp.asarray(x.data, dtype), spec), 0)
    largest = _over_rows(x, jnp.abs(lax.stop_gradient(values)), "largest")
    # A power of 2: division by it does not round.
    power = lax.reduce_precision(largest / 2, jnp.finfo(dtype).nexp, 0)
    values = values / jnp.where(used, of_row(jnp.where(power > 0, power, 1)), 1)
    total = values if combiner == "mean" else jnp.square(values)
    data = values * of_row(_inverse(_over_rows(x, total, "sum"), combiner))
    return x.with_data(data)  # pyrefly: ignore[bad-return]


def _inverse(total: jax.Array, combiner: Combiner) -> Float[Array, "batch"]:
    inside = total != 0
    # The selection comes before the division, so that the gradient is not NaN.
    total = jnp.where(inside, total, 1)
    scale = 1 / total if combiner == "mean" else lax.rsqrt(total)
    return jnp.where(inside, scale, 0)


def _over_rows(
    x: SparseRows, values: jax.Array, what: Literal["sum", "largest"]
) -> Float[Array, "batch"]:
    """Reduces the values of each row to their sum or maximum; `values` has one number for each
    entry.

    With "largest", values must not be negative, and the result has no derivative.
    """

    def reduce(x, values):
        segments = jax.ops.segment_sum if what == "sum" else jax.ops.segment_max
        return segments(values, x.row_ids(), num_segments=x.num_rows)

    if isinstance(x, CSR):
        return reduce(x, values)
    blocks, entries = x.blocks.with_data(None), P("data", "model")
    over_blocks = lax.psum if what == "sum" else lax.pmax

    @jax.custom_vjp
    def total(values):
        return call_on_each_device(
            lambda x, values: over_blocks(
                reduce(own_block(x), own_block(values)), "model"
            ),
            (blocks, values),
            (entries, entries),
            P("data"),
        )

    def backward(_, slope):
        def of_entries(x, slope):
            rows = own_block(x).row_ids()
            return slope.at[rows].get(mode="fill", fill_value=0)[None, None]

        return (
            call_on_each_device(
                of_entries, (blocks, slope), (entries, P("data")), entries
            ),
        )

    total.defvjp(lambda values: (total(values), None), backward)
    return total(values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_sum(
    x: LookupRows, w: jax.Array, implementation: Implementation, dtype: jnp.dtype
) -> jax.Array:
    return gather_sum(x, w, implementation, dtype=dtype)


def _backward(implementation, dtype, residuals, dy):
    x, w = residuals
    dw = dense_gradient(x, dy, w.shape[0], implementation=implementation)
    dw = dw.astype(w.dtype)
    if isinstance(x, DividedRows):
        return _data_gradients(x, w, dy, implementation), dw
    data = None
    if x.data is not None:
        data = _data_gradient(x, w, dy, implementation).astype(x.data.dtype)
    blocks = x.blocks if isinstance(x, ShardedCSR) else x
    # None means "no derivative" only for integer leaves. For the whole CSR it would
    # silently mean a zero gradient of data too.
    dx = CSR.tree_unflatten(blocks.num_cols, (data, None, None, None))
    if isinstance(x, ShardedCSR):
        dx = dataclasses.replace(x, blocks=dx, transposed=None)
    return dx, dw


_gather_sum.defvjp(lambda *given: (_gather_sum(*given), given[:2]), _backward)


def _data_gradient(
    x: SparseRows, w: jax.Array, dy: jax.Array, implementation: Implementation
) -> Float[Array, "*entries"]:
    """d loss / d data_j = w[i_j] . dy[row of j]"""
    if isinstance(x, ShardedCSR):
        entries = P("data", "model")
        return call_on_each_device(
            lambda x, w, dy: _data_gradient(own_block(x), w, dy, implementation)[
                None, None
            ],
            (x.blocks, w, dy),
            (entries, P("model"), P("data")),
            entries,
        )
    # There are no entries or no rows, so nothing is gathered.
    if x.nse == 0 or x.num_rows == 0:
        return jnp.zeros(x.nse, accumulator(w.dtype))
    if implementation in ("xla_gpu", "cusparse"):
        return data_gradient_by_gather(x, w, dy)
    return lax.platform_dependent(
        x, w, dy, cpu=data_gradient_by_loop, default=data_gradient_by_gather
    )


def _data_gradients(
    x: DividedRows, w: jax.Array, dy: jax.Array, implementation: Implementation
) -> DividedRows:
    """The gradients of `x.data`: for the device's own entries, and for exchanged entries."""
    if x.data is None:
        return x.with_gradient(None, None)

    def part(x, w, dy):
        x = own_block(x)

        def of(block, dy, w=w):
            slope = _data_gradient(block, w, dy, implementation)
            return slope.astype(block.data.dtype)

        if x.route is None:
            return of(x.parts, dy)[None, None], None

        def gather():
            def entries(data):
                return dataclasses.replace(x, parts=x.parts.with_data(data)).block()

            _, pull = jax.vjp(lambda d: entries(d).data, x.parts.data)
            (slope,) = pull(of(entries(x.parts.data), x.block_slopes(dy)))
            owned = x.route.owned.data
            return slope, None if owned is None else jnp.zeros_like(owned)

        def exchange():
            slopes = x.owned_slopes(dy, add).astype(dy.dtype)
            return jnp.zeros_like(x.parts.data), of(x.route.owned, slopes)

        def exchange_distinct():
            rows = x.sent_back(lambda: gather_sum(x.route.owned, w, implementation))
            slope = of(x.route.asked, dy, rows)
            slope = jnp.pad(slope, (0, x.parts.nse - len(slope)))
            return slope, None

        add = functools.partial(added, implementation=implementation)
        if x.route.distinct:
            found = x.by_way(gather, exchange_distinct)
        else:
            found = x.by_way(gather, exchange)
        return jax.tree.map(lambda a: a[None, None], found)

    spec = P("data", "model")
    found = call_on_each_device(
        part, (x, w, dy), (spec, x.kernel_spec, P(("data", "model"))), spec
    )
    return x.with_gradient(*found)


def data_gradient_by_loop(x: CSR, w: jax.Array, dy: jax.Array) -> jax.Array:
    """The data gradient by a sequential loop over rows and entries, which is fast on a CPU."""
    sums = accumulator(w.dtype)
    indices, indptr = jnp.asarray(x.indices), jnp.asarray(x.indptr)

    def row(b, d_data):
        slope = lax.dynamic_index_in_dim(dy, b, keepdims=False).astype(sums)

        def entry(i, d_data):
            term = lax.dynamic_index_in_dim(w, indices[i], keepdims=False)
            return d_data.at[i].set(jnp.sum(term.astype(sums) * slope))

        stop = jnp.minimum(indptr[b + 1], x.nse)
        return lax.fori_loop(indptr[b], stop, entry, d_data)

    zeros = vary_over(jnp.zeros(x.nse, sums), varying_axes(w))
    return lax.fori_loop(0, x.num_rows, row, zeros)


def data_gradient_by_gather(x: CSR, w: jax.Array, dy: jax.Array) -> jax.Array:
    """The data gradient by gathers and a sum over the columns, which is fast on a GPU."""
    sums = accumulator(w.dtype)
    terms = w.at[x.indices].get(mode="fill", fill_value=0).astype(sums)
    slopes = dy.at[x.row_ids()].get(mode="fill", fill_value=0).astype(sums)
    return jnp.sum(terms * slopes, axis=1)
