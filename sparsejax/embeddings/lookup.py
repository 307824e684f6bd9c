"""The lookup of a stack of tables: a single gather-matmul for all tables and features.

Training reads rows only here. On a mesh each device has the ids of its own examples. It reads rows
of replicated tables itself, and requests the sums of other rows from their owners, see
`sparsejax.mesh.exchange`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from sparsejax.embeddings.feature_batch import (
    WRONG,
    FeatureBatch,
    Ids,
    divides_batch,
    keys_on_devices,
    pack,
    without_examples,
)
from sparsejax.embeddings.placement import Stack
from sparsejax.embeddings.plan import TableSettings
from sparsejax.mesh import exchange
from sparsejax.mesh.exchange import DividedRows, SentKeys
from sparsejax.mesh.layout import (
    axis_sizes,
    call_with_auto_axes,
    mesh_is_set,
    replicated,
)
from sparsejax.mesh.per_device import blocks_of, on_blocks, own_block
from sparsejax.mesh.xla_options import Programs
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops import hash_index
from sparsejax.ops.gather_sum import in_turns
from sparsejax.ops.hash_index import TableKeys
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.optimizers import gradients
from sparsejax.sparse import CSR, Transposed

_LONG = 64  # number of ids of an example from which examples count as long


class Call(NamedTuple):
    """Settings of a lookup.

    Attributes:
      settings: settings of the exchange between devices.
      blank: number of bags without ids that each example has before its other bags. They are
        room for a vector of another layer: to put it there later would copy all rows.
      dtype: dtype of the result; by default the dtype of the tables.
      after: an array that is computed while rows of other devices arrive; the program waits for
        them when it is computed. It is divided as the batch is.
      implementation: implementation of the lookup, one of those of `gather_matmul`.
    """

    settings: TableSettings
    blank: int = 0
    dtype: jax.typing.DTypeLike | None = None
    after: jax.Array | None = None
    implementation: Implementation = None


def look_up(
    stack: Stack,
    kernel: gradients.RowParam,
    x: CSR | DividedRows,
    call: Call,
    *,
    made: bool = False,
    order: Array | np.ndarray | None = None,
    beside: tuple[Any, ...] | None = None,
) -> tuple[Float[Array, "batch bags dim"], Bool[Array, ""] | None]:
    """Looks up the rows of all features of a stack for a batch.

    Args:
      stack: the tables, and the features that read them.
      kernel: rows of the tables.
      x: matrix of the stack in a `FeatureBatch`, whose ids may have been sent to the devices
        that have their rows.
      call: settings of this lookup.
      made: whether combiners and blank bags are already applied to `x`.
      order: the row of each entry of `x`, if the rows of the kernel are in any order.
      beside: function that adds vectors to bags, such as those of ids without a row, and its
        last arguments: `add(divided, y, *arguments)`; or None.

    Returns:
      `[batch, bags, dim]`; on a mesh the batch is divided over all its devices, if it is a
      multiple of their number and axes are Auto, else over "data". And whether the exchange
      had too little room, or None if there was none.
    """
    # NumPy arrays would be validated again when the matrix is made.
    x = jax.tree.map(jnp.asarray, x)
    settings, blank, dtype, after, implementation = call
    if isinstance(x, DividedRows):
        check_mesh(x.parts)
        rows = _sent_with_blank(x, stack.bags, blank) if blank else x
    else:
        by_rows = gradients.is_divided(kernel)
        rows = _rows(stack, by_rows, x, settings, blank, is_made=made)
    if order is not None and isinstance(rows, CSR):
        rows = _sorted_by(rows, jnp.asarray(order), stack.num_rows)
    if isinstance(rows, DividedRows) and gradients.is_read_once(kernel):
        rows = rows.sorted_ahead()
    if isinstance(rows, DividedRows) and after is not None:
        rows = rows.read_after(after)
    bags = stack.bags + blank
    with in_turns(_period(stack, rows, rows.num_rows // bags)):
        y = gradients.lookup(kernel, rows, dtype=dtype, implementation=implementation)
    shape = (rows.num_rows // bags, bags, stack.dim)
    add, *operands = beside or (lambda _, y: y,)

    def shaped(y, *operands):
        return add(isinstance(rows, DividedRows), y, *operands).reshape(shape)

    y = call_with_auto_axes(shaped, y, *operands, out_specs=P("data"))
    return y, rows.crowded() if isinstance(rows, DividedRows) else None


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends the ids of a collection to the owners of their rows, before the step that reads these.

    Attributes:
      names: names of the features.
      stacks: all stacks of the collection; none has tables in host memory.
      by_rows: whether the kernel of each stack is divided over "model".
      settings: settings of the exchange between devices.
    """

    names: tuple[str, ...]
    stacks: tuple[Stack, ...]
    by_rows: tuple[bool, ...]
    settings: TableSettings

    def sent(
        self,
        ids: Mapping[str, Ids] | FeatureBatch,
        exists: Bool[Array, "batch"] | None = None,
    ) -> tuple[FeatureBatch, Bool[Array, ""]]:
        """A batch with `routes`, and whether the capacity of the exchange is too small.

        If the capacity is too small, the routes cannot be used. In padding examples, ids of
        dynamic tables request no row.
        """
        batch = ids if isinstance(ids, FeatureBatch) else pack(self.stacks, ids)
        if exists is not None:
            batch = without_examples(batch, exists)
        crowded, routes = jnp.bool(False), dict(batch.routes)
        stacks, keys = dict(batch.stacks), dict(batch.keys)
        for stack, divided in zip(self.stacks, self.by_rows, strict=True):
            if not divided or stack.name not in stacks:
                continue
            x = jax.tree.map(jnp.asarray, stacks[stack.name])
            if stack.name not in keys:
                found = self._ids_sent(stack, x)
            elif batch.assigned or not divides_batch(x.num_rows // stack.bags):
                found = None
            else:
                mine = None
                if not isinstance(ids, FeatureBatch):
                    mine = keys_on_devices(stack, ids, exists)
                if mine is None:
                    mine = _parts_of(x, keys[stack.name])
                found = self._keys_sent(stack, x.nse, *mine)
            if found is not None:
                routes[stack.name], flag = found
                crowded |= flag
                del stacks[stack.name]
                keys.pop(stack.name, None)
        batch = dataclasses.replace(batch, stacks=stacks, keys=keys, routes=routes)
        return batch, replicated(crowded)

    def _ids_sent(
        self, stack: Stack, x: CSR
    ) -> tuple[DividedRows, Bool[Array, ""]] | None:
        """The routes of the ids to the owners of their rows, and whether an owner has too little
        capacity; None if no ids are sent.

        None if none are sent.
        """
        rows = _rows(stack, True, x, self.settings, 0, is_made=False)
        if isinstance(rows, CSR) or (flag := rows.crowded()) is None:
            return None
        return rows.certain(), flag

    def _keys_sent(
        self, stack: Stack, nse: int, x: CSR, keys: TableKeys
    ) -> tuple[SentKeys, Bool[Array, ""]] | None:
        """Sends the keys of each device to the owners of their rows; see `exchange.keys_sent`."""
        parts = on_blocks(functools.partial(made, stack, 0), x)
        mine = axis_sizes()[1], parts.num_rows // stack.bags
        distinct = stack.distinct_of_owner(*mine, self.settings.distinct)
        columns = jnp.asarray(parts.indices)
        return exchange.keys_sent(
            parts.with_indices(jnp.where(columns == WRONG, -1, 0)),
            hash_index.spread(keys),
            keys,
            columns >= 0,
            nse=nse,
            share=exchange.Share(self.settings.exchange_room, distinct=distinct),
            wire_dtype=self.settings.wire_dtype or stack.dtype,
        )


@functools.partial(Programs, static_argnames=("sender",))
def sent(
    sender: Sender, ids: Mapping[str, Ids] | FeatureBatch
) -> tuple[FeatureBatch, Bool[Array, ""]]:
    """`Sender.sent` as a compiled program, in two forms, see `Programs`."""
    return sender.sent(ids)


def _period(stack: Stack, rows: CSR | DividedRows, examples: int) -> int:
    """Number of entries after which the tables repeat in the same order; see `in_turns`.

    It is 0 if the period is unknown, or if examples are short. In the order of tables, an H200
    takes 2 to 5 % longer for a lookup of 26 ids in each example, and 11 to 25 % less for 214 ids.
    """
    if len(stack.features) < 2 or not isinstance(rows.nse, int) or not examples:
        return 0
    period, more = divmod(rows.nse, examples)
    return 0 if more or period < _LONG else period


def _sorted_by(x: CSR, order: jax.Array, size: int) -> CSR:
    """Sorts the entries of `x` by a given order of the columns.

    This makes sums independent of the numbers of rows. A GPU program cuts the sorted entries into
    parts, so a row must be cut at the same entries wherever other rows are stored. And a CPU sorts
    the entries of large tables, but not the entries of small tables.

    Args:
      x: matrix whose entries were not sorted by column before.
      order: `[nse]` sort key of each entry's column, unique for each column.
      size: number above all sort keys.
    """
    columns = x.columns(padding=x.num_cols)
    number = jnp.where(columns < x.num_cols, order, size)
    found = Transposed.of(number, x.row_ids(), size)
    by_column = found._replace(
        columns=columns[found.order],
        # A matrix has at most as many different columns as entries. The omitted pointers repeat
        # the number of entries.
        indptr=found.indptr[: min(x.nse, x.num_cols) + 1],
    )
    return dataclasses.replace(x, transposed=by_column)


def made(stack: Stack, blank: int, x: CSR) -> CSR:
    """Applies combiners and blank bags to the matrix of a stack."""
    x = combined(stack, x)
    return _with_blank(x, stack.bags, blank) if blank else x


def _rows(
    stack: Stack,
    by_rows: bool,
    x: CSR,
    settings: TableSettings,
    blank: int,
    *,
    is_made: bool,
) -> CSR | DividedRows:
    """Applies combiners to the matrix, and divides it over the mesh as the kernel is divided."""
    bags, make = stack.bags + blank, functools.partial(made, stack, blank)
    if x.indptr.ndim == 1:
        if not is_made:
            x = call_with_auto_axes(make, x, out_specs=P())
        if not (x.nse and divides_batch(x.num_rows // bags)):
            return x
        nse, parts = x.nse, exchange.parts_of(x)
    else:
        check_mesh(x)
        nse, parts = x.indices.size, on_blocks(make, x)
    mine = axis_sizes()[1], parts.num_rows // bags
    share = stack.share(*mine, settings.exchange_room, settings.distinct)
    wire = settings.wire_dtype or stack.dtype
    return exchange.divided(
        parts, nse=nse, by_rows=by_rows, share=share, wire_dtype=wire
    )


def _parts_of(x: CSR, keys: TableKeys) -> tuple[CSR, TableKeys]:
    """Divides a matrix that all devices have, and its keys, by examples over the devices."""
    places = exchange.parts_of(x.with_indices(jnp.arange(x.nse, dtype=jnp.int32)))

    def part(parts, columns, keys):
        parts = own_block(parts)
        columns, keys = jax.tree.map(
            lambda values: jnp.asarray(values)[parts.indices], (columns, keys)
        )
        return parts.with_indices(columns, x.num_cols), keys

    return blocks_of(part, (places, x.indices, keys), (P("data", "model"), P(), P()))


def check_mesh(parts: CSR) -> None:
    """Raises ValueError if the current mesh differs from the one for which a batch was divided."""
    sizes = parts.indptr.shape[:-1]
    if not mesh_is_set() or sizes != axis_sizes():
        raise ValueError(
            f"the batch is packed for a mesh of data and model {sizes}, which is not set; "
            "pack it under the mesh where it is used"
        )


def _with_blank(x: CSR, bags: int, blank: int) -> CSR:
    """Adds `blank` empty rows to `x` before the rows of each example."""
    starts = jnp.asarray(x.indptr)[:-1].reshape(-1, bags)
    starts = jnp.pad(starts, ((0, 0), (blank, 0)), mode="edge").reshape(-1)
    indptr = jnp.concatenate([starts, x.indptr[-1:]])
    return CSR.tree_unflatten(x.num_cols, (x.data, x.indices, indptr, None))


def _sent_with_blank(x: DividedRows, bags: int, blank: int) -> DividedRows:
    """Does the work of `_with_blank` for ids that were already sent."""

    def part(x):
        parts = _with_blank(x.parts, bags, blank)

        def moved(bag):
            # Padding bags come after the last bag.
            example = lax.div(bag, jnp.int32(bags))
            return jnp.minimum(bag + blank * (example + 1), parts.num_rows)

        to = x.route.bags
        if isinstance(to, CSR):
            to = to.with_indices(moved(to.indices), parts.num_rows)
        else:
            to = moved(to)
        asked = _with_blank(x.route.asked, bags, blank)
        route = x.route._replace(asked=asked, bags=to)
        return dataclasses.replace(x, parts=parts, route=route)

    return on_blocks(part, x)


def combined(stack: Stack, x: CSR) -> CSR:
    """Multiplies each row of `x` by the combiner factor of its feature."""
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
