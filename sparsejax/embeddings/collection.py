"""EmbeddingCollection: many tables and features, read by few lookups."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from sparsejax.embeddings import feature_batch, table_files
from sparsejax.embeddings.config import FeatureConfig, Placement, TableConfig
from sparsejax.embeddings.feature_batch import FeatureBatch, Ids
from sparsejax.embeddings.lookup import look_up
from sparsejax.embeddings.placement import (
    Stack,
    StackedFeature,
    StackedTable,
    first_rows,
    stack_tables,
)
from sparsejax.mesh.layout import (
    BY_ROWS,
    call_with_auto_axes,
    jit_sharded,
    out_sharding,
    replicated,
)
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.optimizers import inplace
from sparsejax.optimizers.gradients import RowParam


class EmbeddingCollection(nnx.Module):
    """Tables of embeddings, and features that read them.

    >>> tables = {"item": TableConfig(1000, 8), "user": TableConfig(500, 4)}
    >>> features = {
    ...     "user": "user",
    ...     "item": "item",
    ...     "recent": FeatureConfig("item", combiner=None, length=3),
    ... }
    >>> embeddings = EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    >>> ids = {
    ...     "user": jnp.array([7, 8]),
    ...     "item": jnp.array([[1, 2], [3, -1]]),
    ...     "recent": jnp.array([[5, 6], [9, -1]]),
    ... }
    >>> embeddings.concat(ids).shape, embeddings.num_outputs
    ((2, 36), 36)
    >>> jax.tree.map(jnp.shape, embeddings(ids))
    {'item': (2, 8), 'recent': (2, 3, 8), 'user': (2, 4)}

    Tables of one width, dtype, placement and rule lie below each other in one `RowParam`, a
    *stack*. However many tables a stack has, a step reads it by one lookup, sorts the ids
    once, and updates the touched rows once. `sparsejax.Optimizer` and
    `sparsejax.value_and_grad` treat it as the kernel of a `SparseLinear`.

    Ids of a feature are an int32 array, `[batch]` or `[batch, n]`, where -1 stands for no id,
    or a `CSR` `[batch, num_rows]` of the ids, whose data are weights. An id counts as often as
    it occurs. Without ids a feature is zero, whatever the combiner.

    On a mesh rows of large tables are divided over "model", and batches over "data". A seed
    gives the same tables on every mesh, and a checkpoint fits every mesh.

    Args:
      tables: by name.
      features: by name; a string is short for `FeatureConfig(table)`.
      dtype: of the results; that of the tables by default.
      plan: the placement of tables whose configuration has none. By default tables of one
        width, dtype and rule are replicated if they have up to 2^20 numbers together, and
        else divided by rows.
      implementation: see `sparsejax.gather_matmul`.
      rngs: random streams.

    Attributes:
      overflows: `[]` int32 variable: how often the devices of a mesh had too little room to
        exchange only the sums that are needed, and exchanged all. Results are the same.

    Raises:
      ValueError: there is no feature, or a feature or `plan` names an unknown table.
    """

    def __init__(
        self,
        tables: Mapping[str, TableConfig],
        features: Mapping[str, str | FeatureConfig],
        *,
        dtype: jax.typing.DTypeLike | None = None,
        plan: Mapping[str, Placement] | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        check_implementation(implementation)
        configs = {
            name: FeatureConfig(f) if isinstance(f, str) else f
            for name, f in features.items()
        }
        if not configs:
            raise ValueError("a collection needs at least one feature")
        for name, config in configs.items():
            if config.table not in tables:
                raise ValueError(
                    f"feature {name!r} reads the table {config.table!r}, but the tables "
                    f"are {sorted(tables)}"
                )
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.implementation: Implementation = implementation
        self.stacks = stack_tables(tables, configs, {} if plan is None else plan)
        self.names = tuple(configs)
        key = rngs.params()
        self.overflows = nnx.Variable(jnp.zeros((), jnp.int32))
        self.kernels = nnx.data({s.name: _kernel(s, key) for s in self.stacks})

    def __call__(self, ids: Mapping[str, Ids] | FeatureBatch) -> dict[str, jax.Array]:
        """What each feature makes of a batch.

        Returns:
          `{feature: [batch, dim]}`, and `[batch, length, dim]` for a feature without combiner:
          zero where there is no id. An id that its table does not have, and that is neither
          found on the host nor dropped, makes its row NaN.
        """
        rows = self._rows(ids)
        found = {}
        for stack, feature in self._features():
            mine = rows[stack.name][:, feature.bag_range]
            found[feature.name] = mine if feature.config.length else mine[:, 0]
        return found

    def concat(
        self, ids: Mapping[str, Ids] | FeatureBatch
    ) -> Float[Array, "batch outputs"]:
        """`[batch, num_outputs]`: the features one after the other, in their order.

        Nothing is copied if all tables are in one stack.
        """
        rows = self._rows(ids)
        parts = []
        by_stack = itertools.groupby(self._features(), lambda pair: pair[0])
        for stack, pairs in by_stack:  # features that follow each other
            features = [feature for _, feature in pairs]
            bags = slice(features[0].bag_range.start, features[-1].bag_range.stop)
            part = rows[stack.name][:, bags]
            parts.append(part.reshape(len(part), part.shape[1] * stack.dim))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def pack(
        self,
        ids: Mapping[str, Ids],
        *,
        nse: Mapping[str, int] | None = None,
    ) -> FeatureBatch:
        """The ids of a batch as one matrix for each stack, which calls take in place of ids.

        A call does it itself. An input pipeline can do it ahead: NumPy arrays give NumPy
        arrays.

        Args:
          ids: of each feature.
          nse: by the name of a stack, how many ids there is room for; by default for as many
            as the arguments have room. One program serves all batches of one `nse`.

        Raises:
          ValueError: a feature is missing or unknown; shapes do not fit. If all ids are NumPy
            arrays: an id is outside its table, a list is too long, or there is too little
            room. (If they are not, rows that this concerns are NaN. If there is too little
            room, these are all rows from the first one that does not fit.)
          TypeError: ids are not int32.
        """
        return feature_batch.pack(self.stacks, ids, nse=nse)

    @property
    def num_outputs(self) -> int:
        """Numbers that `concat` gives for an example."""
        return sum(stack.dim * stack.bags for stack in self.stacks)

    def table(self, name: str) -> Float[Array, "rows dim"]:
        """The rows of a table, in the order of ids.

        Rules under which rows drift need `optimizer.flush(model)` before.
        """
        stack, table = self._table(name)
        kernel = self.kernels[stack.name][...]
        read = functools.partial(_table_rows, stack, table)
        return call_with_auto_axes(read, kernel, out_specs=P())

    def set_table(self, name: str, array: Any) -> None:
        """Replaces the rows of a table.

        Args:
          name: of the table.
          array: `[num_rows, dim]`, in the order of ids.

        Raises:
          ValueError: there is no such table, or the shape is another.
        """
        stack, table = self._table(name)
        expected = (table.config.num_rows, stack.dim)
        if np.shape(array) != expected:
            raise ValueError(
                f"table {name!r} is {expected[0]:,} x {expected[1]:,}, got an array of the "
                f"shape {np.shape(array)}"
            )
        kernel = self.kernels[stack.name]
        write = jit_sharded(_with_table, _spec(stack), static=(0, 1), donate=(2,))
        inplace.overwrite(
            [kernel], lambda: ([write(stack, table, kernel[...], array)], None)
        )

    def save_table(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        names: Sequence[object] | None = None,
    ) -> None:
        """Writes the rows of a table in the order of ids, some rows at a time.

        ::

            .parquet    columns `id`, `name` if there are names, `row` (a list of fixed size)
            .npy        the array `[num_rows, dim]`

        The file appears whole or not at all. Neither the host nor a device needs room for
        the whole table. With several processes all call this and the first one writes.
        Numbers are float32, those of a float64 table float64.

        >>> tables = {"user": TableConfig(4, 2)}
        >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
        >>> embeddings.save_table("user.parquet", "user.parquet")
        Traceback (most recent call last):
        ValueError: there is no table 'user.parquet'; there are ['user']
        >>> embeddings.save_table("user", "user.parquet", names=["ann", "bob"])

        Args:
          name: of the table. Under a rule whose rows drift, `optimizer.flush(model)` before.
          path: the file, which is replaced if it exists.
          names: what ids stand for, in their order. If these are fewer than ids, they are
            of the last ones: those of `ClickDataset.vocabularies` begin with id 2.

        Raises:
          OSError: the file cannot be written.
          OtherProcessError: process 0 could not write the file; the message says why.
          ValueError: there is no such table, `path` has another ending or cannot be a file,
            or there are more names than rows.
        """
        stack, table = self._table(name)
        kernel = self.kernels[stack.name][...]
        shape = (table.config.num_rows, stack.dim)
        like = jax.ShapeDtypeStruct(shape, kernel.dtype)
        table_files.save_table(path, self.table_pieces(name), like, names)

    def table_pieces(self, name: str) -> Iterator[np.ndarray]:
        """The rows of a table in the order of ids, some at a time: `[n, dim]` on the host.

        With several processes all have to take all pieces.
        """
        stack, table = self._table(name)
        return table_files.table_pieces(stack, table, self.kernels[stack.name][...])

    def _features(self) -> list[tuple[Stack, StackedFeature]]:
        """All features with their stacks, in the order in which they were given."""
        found = {f.name: (s, f) for s in self.stacks for f in s.features}
        return [found[name] for name in self.names]

    def _table(self, name: str) -> tuple[Stack, StackedTable]:
        found = {t.name: (s, t) for s in self.stacks for t in s.tables}
        if name not in found:
            raise ValueError(f"there is no table {name!r}; there are {sorted(found)}")
        return found[name]

    def _rows(self, ids: Mapping[str, Ids] | FeatureBatch) -> dict[str, jax.Array]:
        """`[batch, bags, dim]` of each stack."""
        batch = ids if isinstance(ids, FeatureBatch) else self.pack(ids)
        rows, crowded = {}, []
        for stack in self.stacks:
            if not stack.features:
                continue
            found, flag = look_up(
                stack,
                self.kernels[stack.name],
                batch.stacks[stack.name],
                implementation=self.implementation,
            )
            rows[stack.name] = found if self.dtype is None else found.astype(self.dtype)
            crowded += [] if flag is None else [flag]
        if crowded:
            # In a program that Flax does not know, such as jax.jit, state cannot change.
            with contextlib.suppress(errors.TraceContextError):
                self.overflows[...] += sum(flag.astype(jnp.int32) for flag in crowded)
        return rows


def _spec(stack: Stack) -> P:
    return BY_ROWS if stack.divided else P()


def _kernel(stack: Stack, key: jax.Array) -> RowParam:
    """The parameter of a stack."""
    # Compiled, so that only the result is allocated, on the devices where it belongs.
    value = jit_sharded(first_rows, _spec(stack), static=(0,))(stack, key)
    metadata: dict[str, Any] = out_sharding(_spec(stack))
    if stack.rule is not None:
        metadata["rule"] = stack.rule
    return RowParam(value, **metadata)


def _places(stack: Stack, table: StackedTable) -> jax.Array:
    ids = jnp.arange(table.config.num_rows, dtype=jnp.int32)
    return stack.place(ids + table.first)


def _table_rows(stack: Stack, table: StackedTable, kernel: jax.Array) -> jax.Array:
    return replicated(kernel[_places(stack, table)])


def _with_table(
    stack: Stack, table: StackedTable, kernel: jax.Array, array: jax.Array
) -> jax.Array:
    def written(kernel, array):
        rows = array.astype(kernel.dtype)
        return kernel.at[_places(stack, table)].set(rows, unique_indices=True)

    return call_with_auto_axes(written, kernel, array, out_specs=_spec(stack))
