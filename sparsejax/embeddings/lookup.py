"""The lookup of a stack of tables: one gather-matmul, however many tables and features.

This is the only place where rows are read in training. On a mesh each device sums the rows that
it has, and sends each sum to the device of the example, see `sparsejax.mesh.exchange`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from sparsejax.embeddings.placement import Stack
from sparsejax.mesh import exchange
from sparsejax.mesh.blocks import ShardedCSR, SparseRows
from sparsejax.mesh.layout import axes_are_explicit, axis_sizes, call_with_auto_axes
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.optimizers import gradients
from sparsejax.sparse import CSR


def look_up(
    stack: Stack,
    kernel: gradients.RowParam,
    x: CSR,
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "batch bags dim"], Bool[Array, ""] | None]:
    """What all features of a stack make of a batch.

    Args:
      stack: which features these are.
      kernel: its tables.
      x: its matrix of a `FeatureBatch`.
      implementation: see `gather_matmul`.

    Returns:
      `[batch, bags, dim]`; on a mesh the batch is divided over all its devices, if it is a
      multiple of their number and axes are Auto, else over "data". And whether the exchange
      had too little room, or None if there was none.
    """
    x = jax.tree.map(jnp.asarray, x)  # NumPy's would be checked again
    x = call_with_auto_axes(lambda x: combined(stack, x), x, out_specs=P())
    rows, crowded = _blocks(kernel, x, stack.bags), None
    if isinstance(rows, ShardedCSR) and rows.room is not None:
        crowded = exchange.is_crowded(rows)
    y = gradients.lookup(kernel, rows, implementation=implementation)
    shape = (x.num_rows // stack.bags, stack.bags, stack.dim)
    y = call_with_auto_axes(lambda y: y.reshape(shape), y, out_specs=P("data"))
    return y, crowded


def _blocks(kernel: gradients.RowParam, x: CSR, bags: int) -> SparseRows:
    """The matrix as the kernel is divided."""
    if not gradients.is_divided(kernel):
        return x
    blocks = ShardedCSR.of(x)
    data, model = axis_sizes()
    if axes_are_explicit() or model == 1 or x.num_rows % (data * model * bags):
        return blocks
    room = exchange.default_room(x.num_rows, x.nse)
    return dataclasses.replace(blocks, spread=True, room=room)


def combined(stack: Stack, x: CSR) -> CSR:
    """`x` with each row times the factor of its feature's combiner."""
    of_bag = np.concatenate(
        [[f.config.combiner or "sum"] * f.config.bags for f in stack.features]
    )
    kinds: list[gather.Combiner] = ["mean", "sqrtn"]
    kinds = [kind for kind in kinds if kind in of_bag]
    if not kinds or x.num_rows == 0:
        return x
    if (of_bag == kinds[0]).all():
        return gather.combined(x, kinds[0])
    bag = x.row_ids() % stack.bags
    values = jnp.ones(x.nse) if x.data is None else jnp.asarray(x.data)
    values = values.astype(accumulator(values.dtype))
    for kind in kinds:
        data = gather.combined(x, kind).data
        assert data is not None
        values = jnp.where(jnp.asarray(of_bag == kind)[bag], data, values)
    return x.with_data(values)
