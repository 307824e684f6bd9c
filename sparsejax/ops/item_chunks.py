"""Functions shared by operations over all items, which score a chunk of items at a time.

The array of all scores, `[batch, items]`, is too large for memory. Each part of it is needed only
once or twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.output_loss import label_words
from pallas_kernels.score_tiles import TILE_ROWS
from sparsejax.mesh.blocks import ShardedCSR, SparseRows, check_kernel_rows
from sparsejax.mesh.layout import axis_sizes, padded_rows
from sparsejax.mesh.per_device import gather_over_data, own_block
from sparsejax.ops.precision import Precision, of_xla
from sparsejax.ops.targets import Labels, TargetColumns, Targets

# With a multiple of this many items, a chunk is a whole number of SIMD vectors and matrix tiles.
_ALIGNMENT = 128
# On a GPU, all matrix products are fast if the number of items is a multiple of this.
_ROUNDED = 256


@dataclasses.dataclass(frozen=True)
class Shard:
    """How work on items is divided over a mesh; each device scores its items for all rows.

    Attributes:
      batch: mesh axis over which the rows of the batch are divided before and after; None if
        each device has all rows. It is one of the axes `items`.
      items: mesh axes over which the items are divided; empty if each device has all.
    """

    batch: str | None = None
    items: tuple[str, ...] = ()

    @property
    def rows_spec(self) -> P:
        """The partition spec of an array with a row for each row of the batch."""
        return P(self.batch)

    @property
    def items_spec(self) -> P:
        """The partition spec of an array with a row for each item."""
        return P(self.items or None)

    def first_item(self, items: int) -> jax.typing.ArrayLike:
        """The index of this device's first item; `items` is the number of items on each device."""
        return lax.axis_index(self.items) * items if self.items else 0

    def all_rows[Tree](self, rows: Tree) -> Tree:
        """Gathers the rows of the whole batch from all devices along `batch`."""
        if self.batch is None:
            return rows
        return jax.tree.map(lambda x: lax.all_gather(x, self.batch, tiled=True), rows)

    def own_rows(
        self, rows: Shaped[Array, "batch *rest"]
    ) -> Shaped[Array, "part *rest"]:
        """This device's part of the rows of the whole batch."""
        if self.batch is None:
            return rows
        size = len(rows) // lax.axis_size(self.batch)
        return slice_rows(rows, lax.axis_index(self.batch) * size, size)

    def sum_over_items[Tree](self, values: Tree) -> Tree:
        """Sums values over the devices that have the other parts of the items."""
        return lax.psum(values, self.items) if self.items else values

    def own_sums(
        self, rows: Shaped[Array, "batch *rest"]
    ) -> Shaped[Array, "part *rest"]:
        """`own_rows(sum_over_items(rows))` in one collective that moves fewer bytes."""
        if self.batch is None:
            return self.sum_over_items(rows)
        rows = lax.psum_scatter(rows, self.batch, tiled=True)
        rest = tuple(axis for axis in self.items if axis != self.batch)
        return lax.psum(rows, rest) if rest else rows


def shard_of(
    kernel_spec: P | None, matrix: Labels | None, batch: int, rows: int
) -> Shard | None:
    """How the work is divided over the mesh that is set; None if it is not divided.

    The items are divided as the blocks of the matrix are, or else as `kernel_spec` says.
    On a mesh with an axis "data", these parts are divided further over "data", so that no
    sum over devices has the kernel's size. The rows of the batch are divided over "data" if
    the size of that axis divides their number.

    Args:
      kernel_spec: how the kernel's rows are divided over the mesh, as in `output_loss`.
      matrix: labels or exclusions.
      batch: rows of the batch.
      rows: number of rows of the kernel.

    Raises:
      ValueError: no mesh is set; or the spec names an axis that the mesh lacks, divides
        `hidden`, or contradicts the blocks; or the rows cannot be divided evenly.
    """
    if isinstance(matrix, ShardedCSR):
        axis_sizes()  # raises an error if the current mesh lacks these axes
        if kernel_spec is not None and _axes_of(kernel_spec)[:1] != ("model",):
            raise ValueError(
                f'kernel_spec is {kernel_spec}; the blocks lie over "model", so must '
                "the items"
            )
        items: tuple[str, ...] = ("model",)
    elif kernel_spec is None:
        return None
    else:
        items = _axes_of(kernel_spec)
    sizes = jax.sharding.get_abstract_mesh().shape
    data = sizes.get("data", 1)
    if data > 1 and "data" not in items:
        items = (*items, "data")
    parts = math.prod(sizes[axis] for axis in items)
    if rows % parts:
        raise ValueError(
            f"the kernel has {rows:,} rows, which cannot be divided evenly over "
            f"{parts} devices ({' and '.join(items)}); add rows of zeros"
        )
    return Shard("data" if data > 1 and batch % data == 0 else None, items)


def _axes_of(kernel_spec: P) -> tuple[str, ...]:
    """The axes over which the spec divides the items."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("kernel_spec needs a mesh: use `with jax.set_mesh(mesh):`")
    first, *rest = (*kernel_spec, None)
    if any(axis is not None for axis in rest):
        raise ValueError(
            f"kernel_spec is {kernel_spec}; only the first axis, the items, can be "
            "divided"
        )
    axes = () if first is None else (first,) if isinstance(first, str) else first
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"kernel_spec names {missing[0]!r}; the mesh has {tuple(mesh.axis_names)}"
        )
    return axes


def entries_spec(matrix: Labels | None, shard: Shard) -> P:
    """The partition spec by which each device gets its part of a matrix without `transposed`.

    A device gets its block, its rows of the batch, or the whole matrix.
    """
    if isinstance(matrix, Targets):
        return shard.rows_spec
    return P("data", "model") if isinstance(matrix, ShardedCSR) else P()


def chunk_size(batch: int, num_items: int, budget: int) -> int:
    """Items in a chunk so that a `[batch, size]` array has about `budget` elements.

    All chunks but the last have the same size, which is at least 128 items.
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

    Sizes are static. With one chunk there is no loop, so XLA can fuse across it.
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


def write_rows(
    array: jax.Array, rows: jax.Array, start: jax.typing.ArrayLike
) -> jax.Array:
    """Writes `rows`, converted to the array's dtype, into `array` from row `start` on."""
    return lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), start, 0)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which products of operands of this dtype are summed."""
    # JAX arrays are not float64 unless 64-bit types are enabled, but NumPy arrays may be.
    return jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    dtype: jnp.dtype | None = None,
    *,
    precision: Precision = None,
) -> jax.Array:
    """Matrix product that contracts axis `contract[0]` of `a` with `contract[1]` of `b`.

    Sums are made in float32. `precision` concerns float32 operands; others are used as given.
    The result is rounded to `dtype`, if one is given: on a GPU by the product itself.
    """

    sums = accumulator(a.dtype)

    def product(a, b, dtype=sums):
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=of_xla(precision, a.dtype),
            preferred_element_type=dtype,
        )

    if dtype is None or dtype == sums:
        return product(a, b)
    return lax.platform_dependent(
        a,
        b,
        cuda=lambda a, b: product(a, b, dtype),
        default=lambda a, b: product(a, b).astype(dtype),
    )


def scores(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    start: jax.typing.ArrayLike,
    size: int,
    *,
    precision: Precision = None,
) -> Float[Array, "batch size"]:
    """`(h . kernel_i) scale_i + bias_i` for items `start .. start + size - 1`."""
    result = dot(h, slice_rows(kernel, start, size), (1, 1), precision=precision)
    if scale is not None:
        result *= slice_rows(scale, start, size).astype(result.dtype)[None]
    if bias is not None:
        result += slice_rows(bias, start, size).astype(result.dtype)[None]
    return result


class Entries(NamedTuple):
    """The entries of a CSR in the coordinates of one device, `[nse]` each.

    Attributes:
      rows: row within the batch; -1 for padding.
      columns: column within the device's part of the items; it may be outside.
      data: values; None if all are 1.
    """

    rows: Int[Array, "nse"]
    columns: Int[Array, "nse"]
    data: Shaped[Array, "nse"] | None

    def places(
        self, start: jax.typing.ArrayLike, shape: tuple[int, int]
    ) -> tuple[Int[Array, "nse"], Int[Array, "nse"]]:
        """The row and column of each entry in the chunk that begins at column `start`.

        An entry outside the chunk has a column beyond it, to be dropped. These columns
        all differ, so the targets are unique if the indices of each row are.
        """
        columns = self.columns - start
        inside = (self.rows >= 0) & (columns >= 0) & (columns < shape[1])
        # Not len(): in an exported program the length is a symbol.
        beyond = shape[1] + jnp.arange(columns.shape[0], dtype=jnp.int32)
        return jnp.where(inside, self.rows, 0), jnp.where(inside, columns, beyond)

    def dense(
        self,
        values: Shaped[Array, "nse"] | bool,
        start: jax.typing.ArrayLike,
        shape: tuple[int, int],
    ) -> Shaped[Array, "batch size"]:
        """A dense chunk of the `values` from column `start` on; 0 where there is no entry."""
        chunk = jnp.zeros(shape, jnp.result_type(values))
        place = self.places(start, shape)
        return chunk.at[place].set(values, mode="drop", unique_indices=True)

    def words(
        self,
        start: jax.typing.ArrayLike,
        shape: tuple[int, int],
        *,
        counted: bool = False,
    ) -> Int[Array, "padded words"]:
        """The entries of the chunk as bits in int32 words, for the GPU programs."""
        columns = jnp.where(self.rows < 0, -1, self.columns - start)
        return label_words(self.rows, columns, *shape, counted=counted)


def labels_of(
    labels: Labels, shard: Shard, items: int
) -> tuple[Entries | TargetColumns, Bool[Array, "part"]]:
    """`entries_of`; for `Targets`, the columns of the rows that the device is given."""
    if not isinstance(labels, Targets):
        return entries_of(labels, shard, items)
    columns = jnp.where(labels.broken, -1, labels.columns)
    columns = shard.all_rows(columns) - shard.first_item(items)
    return TargetColumns(columns), labels.broken


def entries_of(
    matrix: SparseRows, shard: Shard, items: int
) -> tuple[Entries, Bool[Array, "part"]]:
    """The entries with the device's items in view, and a mask of its rows that must give NaN.

    A row gives NaN if it is overfull or has an index out of range. The device has `items`
    items. It is given all of a CSR, but only its own block of a `ShardedCSR`.
    """
    if isinstance(matrix, ShardedCSR):
        block = own_block(matrix.blocks)
        entries, broken = entries_of(block, Shard(), items)
        broken = lax.psum(broken.astype(jnp.int32), "model") > 0
        if shard.batch is None:
            return entries, broken
        # The columns of a block are divided among the devices along "data".
        place = lax.axis_index("data")
        rows = jnp.where(entries.rows < 0, -1, entries.rows + place * block.num_rows)
        entries = gather_over_data(entries._replace(rows=rows))
        return entries._replace(columns=entries.columns - place * items), broken
    if matrix.data is None and matrix.transposed is not None:
        # The order of entries does not matter, and `transposed` already has each entry's row.
        rows, indices = matrix.transposed.rows, matrix.transposed.columns
    else:
        rows, indices = matrix.row_ids(), jnp.asarray(matrix.indices)
    outside = (indices < 0) | (indices >= matrix.num_cols)
    # Writes only the wrong entries: on a GPU, many writes to few positions are slow.
    broken = jnp.where(outside, rows, matrix.num_rows)
    broken = matrix.overfull_rows().at[broken].max(outside, mode="drop")
    rows = jnp.where((rows >= 0) & (rows < matrix.num_rows), rows, -1)
    data = None if matrix.data is None else jnp.ravel(matrix.data)
    entries = Entries(rows, indices - shard.first_item(items), data)
    return entries, shard.own_rows(broken)


def rounded_items(num_items: int, rows: int) -> int:
    """Rounds `num_items` up to a size with fast products, if this is all rows of the kernel.

    Otherwise XLA would copy a part of the rows.
    """
    rounded = min(padded_rows(num_items), rows)
    return num_items if rounded % _ROUNDED else rounded


def pad_rows(
    array: Shaped[Array, "batch *rest"], rows: int | None = None
) -> Shaped[Array, "padded *rest"]:
    """Appends rows of zeros, up to `rows` or to a multiple that all GPU programs take."""
    extra = -len(array) % TILE_ROWS if rows is None else rows - len(array)
    return jnp.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1))


def arrays(*operands: Any) -> tuple[Any, ...]:
    """Converts the operands to JAX arrays with JAX's dtypes; None stays None."""
    return jax.tree.map(jnp.asarray, operands)


def check_layer(
    h: jax.Array, kernel: jax.Array, bias: jax.Array | None, scale: jax.Array | None
) -> None:
    """Raises ValueError or TypeError if the operands do not make an output layer."""
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


def check_matrix(name: str, matrix: Labels, h: jax.Array, kernel: jax.Array) -> None:
    """Raises ValueError if the matrix called `name` does not fit the output layer."""
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
    if not isinstance(matrix, ShardedCSR):
        return
    sizes, blocks = axis_sizes(), matrix.blocks.indptr.shape[:-1]
    if blocks != sizes:
        raise ValueError(
            f"{name} is in {blocks} blocks but the mesh that is set is {sizes} devices "
            '("data", "model"); make the blocks for this mesh'
        )
    check_kernel_rows("the kernel", kernel, matrix)
