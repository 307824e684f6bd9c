"""How parameters and sparse matrices lie on a mesh with axes "data" and "model"."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.sparse import CSR, MAX_ENTRIES, Transposed, take_rows

ROW_MULTIPLE = 256
VIRTUAL_SHARDS = 64

# In a piece of an array that one process sends to all others: 256 MB.
_EXCHANGED_ELEMENTS = 2**26

# How a kernel lies on a mesh: its rows, which are features or items, over "model".
BY_ROWS = P("model", None)


def padded_rows(rows: int) -> int:
    """Rows a kernel is allocated with: `rows`, rounded up by at most 1/32.

    To a multiple of 256, and from 16,384 rows on of 512, 1,024, ... 65,536, so that also
    the parts of a large kernel are multiples of 256, as the GPU kernels take them. It does
    not depend on the mesh, so that a checkpoint fits any mesh. Rows beyond `rows` stay
    zero and take part in nothing.
    """
    multiple = ROW_MULTIPLE
    while multiple < ROW_MULTIPLE**2 and multiple * 64 <= rows:
        multiple *= 2
    return -(-rows // multiple) * multiple


def make_mesh(
    *, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh over which batches ("data") and large kernels ("model") are divided.

    >>> mesh = make_mesh(data=1, model=1)
    >>> with jax.set_mesh(mesh):
    ...     layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> layer.kernel[...].sharding.spec == jax.P("model", None)
    True

    Its axes are `Auto`: the compiler divides what is between our operations. Devices
    along "model" are neighbours, as they exchange the most.

    Args:
      data: parts of a batch; divides 64 and the batch size.
      model: parts of a kernel; divides 256.
      devices: `data * model` of them; the first of all by default.

    Raises:
      ValueError: a size does not divide, or there are not so many devices.
    """
    check_axes(data, model)
    devices = jax.devices() if devices is None else devices
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data} and model={model} needs {data * model} devices, "
            f"there are {len(devices)}"
        )
    return jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[: data * model],
    )


def check_axes(data: int, model: int) -> None:
    """Raises ValueError if no mesh can have axes of these sizes."""
    for name, size, whole in (
        ("data", data, VIRTUAL_SHARDS),
        ("model", model, ROW_MULTIPLE),
    ):
        if size < 1 or whole % size:
            raise ValueError(f"{name} must be a divisor of {whole}, got {size}")


def mesh_is_set() -> bool:
    """Whether `jax.set_mesh` has set a mesh with an axis "model"; also under tracing."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and "model" in mesh.shape and not mesh.manual_axes


def axis_sizes() -> tuple[int, int]:
    """Sizes of "data" and "model" in the mesh that is set; also under tracing.

    Raises:
      ValueError: no mesh is set, or it lacks one of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("this needs a mesh: use `with jax.set_mesh(mesh):`")
    if not {"data", "model"} <= mesh.shape.keys():
        raise ValueError(
            'the mesh must have axes "data" and "model" (sparsejax.make_mesh makes '
            f"one), it has {tuple(mesh.axis_names)}"
        )
    return mesh.shape["data"], mesh.shape["model"]


def on_each_device(
    f: Callable[..., Any], *arguments: Any, in_specs: Any, out_specs: Any
) -> Any:
    """`f` of the parts of its arguments that each device of the mesh has."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        # There a type says how an array lies, and must agree.
        arguments = jax.tree.map(
            lambda spec, tree: jax.tree.map(
                lambda leaf: jax.sharding.reshard(leaf, spec), tree
            ),
            in_specs,
            arguments,
            is_leaf=lambda node: isinstance(node, P),
        )
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*arguments)


def on_mesh(spec: P) -> dict[str, Any]:
    """What a `flax.nnx.Variable` is told of how it lies on the mesh, if one is set."""
    return {"out_sharding": spec} if mesh_is_set() else {}


def init_sharded[**Args, Made](
    make: Callable[Args, Made], spec: P | None
) -> Callable[Args, Made]:
    """`make`, compiled so that the result is made where it belongs on the mesh."""
    if spec is None or not mesh_is_set():
        return jax.jit(make)
    return jax.jit(make, out_shardings=spec)


def placed[Tree](tree: Tree) -> Tree:
    """The arrays of a tree on the mesh that is set, if one is.

    One that is divided over axes of a mesh stays so, any other is whole on every device.
    """
    if not mesh_is_set():
        return tree
    mesh = jax.sharding.get_mesh()

    def put(leaf):
        spec = getattr(leaf.sharding, "spec", P())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def everywhere[Tree](tree: Tree) -> Tree:
    """A traced tree that every device of the mesh has whole, if a mesh is set.

    So every process can read it.
    """
    return lax.with_sharding_constraint(tree, P()) if mesh_is_set() else tree


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array, in every process, all of which must ask for it.

    Some rows at a time where processes have to exchange them, as a device may not have
    room for more than its part.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    size = max(1, _EXCHANGED_ELEMENTS * len(whole) // whole.size)
    get = jax.jit(
        lambda array, rows: array.at[rows].get(mode="clip"),
        out_shardings=NamedSharding(cast(NamedSharding, array.sharding).mesh, P()),
    )
    for start in range(0, len(whole), size):
        part = np.asarray(get(array, np.arange(start, start + size, dtype=np.int32)))
        whole[start : start + size] = part[: len(whole) - start]
    return whole


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Within it no mesh is set."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def layout_of(tree: Any) -> tuple[jax.sharding.Sharding, ...] | None:
    """How each leaf of a tree lies on the mesh that is set, or None without one."""
    if not mesh_is_set():
        return None
    return tuple(leaf.sharding for leaf in jax.tree.leaves(tree))


def laid_out[Tree](
    tree: Tree, layout: tuple[jax.sharding.Sharding, ...] | None
) -> Tree:
    """A traced tree whose leaves lie as `layout_of` said, so that they do not drift."""
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, layout, strict=True)
    kept = [lax.with_sharding_constraint(leaf, place) for leaf, place in pairs]
    return jax.tree.unflatten(structure, kept)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedCSR:
    """A `[rows, num_cols]` sparse matrix in blocks, one for each device of a mesh.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> with jax.set_mesh(make_mesh(data=1, model=1)):
    ...     blocks = ShardedCSR.of(x)
    >>> blocks.shape, blocks.blocks.indices.shape
    ((2, 5), (1, 1, 2))

    Block `(d, m)` lies on the device with these coordinates on the axes "data" and
    "model". It holds the d-th of equal parts of the rows and the columns that belong to
    the m-th part of a kernel, numbered from its first one. So each device finds the
    entries of its own kernel rows, and sees a plain CSR.

    Every operation takes it in place of a `CSR`, under `jax.set_mesh`.

    Attributes:
      blocks: a stack of matrices, its leaves `[data, model, ...]`.
      num_cols: number of columns (static).
      transposed: of each part of the columns the entries of all rows by column, its
        leaves `[model, ...]`, if they were sorted ahead of time.
    """

    blocks: CSR
    num_cols: int = dataclasses.field(kw_only=True)
    transposed: Transposed | None = dataclasses.field(kw_only=True, default=None)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        leaves = [
            (key("blocks"), self.blocks),
            (key("transposed"), self.transposed),
        ]
        return leaves, self.num_cols

    @classmethod
    def tree_unflatten(cls, num_cols, leaves) -> ShardedCSR:
        self = object.__new__(cls)
        for name, value in zip(
            ("blocks", "transposed", "num_cols"), (*leaves, num_cols), strict=True
        ):
            object.__setattr__(self, name, value)
        return self

    @property
    def num_rows(self) -> int:
        """Number of rows, of all blocks."""
        return self.blocks.indptr.shape[-3] * self.blocks.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, num_cols)`."""
        return self.num_rows, self.num_cols

    @property
    def nse(self) -> int:
        """Capacity: number of entries that can be stored, of all blocks."""
        data, model = self.blocks.indptr.shape[-3:-1]
        return data * model * self.blocks.nse

    @property
    def data(self) -> jax.Array | np.ndarray | None:
        """`[data, model, nse]` values, or None for an indicator matrix."""
        return self.blocks.data

    def with_data(self, data: jax.Array | None) -> ShardedCSR:
        """The same entries with other values."""
        return dataclasses.replace(
            self, blocks=dataclasses.replace(self.blocks, data=data)
        )

    @classmethod
    def of(cls, x: CSR) -> ShardedCSR:
        """The blocks of a matrix that each device has as a whole.

        Differentiable in `data`. A block has room for all entries of `x`, as they may
        all be in one.

        Raises:
          ValueError: no mesh is set, or its axis "data" does not divide the rows.
        """
        data, model = axis_sizes()
        if x.num_rows % data:
            raise ValueError(
                f"{x.num_rows:,} rows cannot be divided by {data}, the size of the "
                'mesh\'s axis "data"'
            )
        rows, width = x.num_rows // data, padded_rows(x.num_cols) // model

        def block(x):
            first = lax.axis_index("data") * rows
            part = take_rows(x, first + jnp.arange(rows, dtype=jnp.int32), x.nse)
            cut = lax.dynamic_slice_in_dim(x.overfull_rows(), first, rows)
            part = columns_between(part, lax.axis_index("model"), width, cut)
            return jax.tree.map(lambda leaf: leaf[None, None], part)

        plain = dataclasses.replace(x, transposed=None)
        blocks = on_each_device(
            block, plain, in_specs=(P(),), out_specs=P("data", "model")
        )
        return cls(blocks, num_cols=x.num_cols)

    @classmethod
    def from_host(
        cls,
        matrix: CSR,
        rows: np.ndarray,
        mesh: jax.sharding.Mesh,
        *,
        nse: int | None = None,
    ) -> ShardedCSR:
        """The blocks of some rows of a NumPy matrix, each put on its device.

        Args:
          matrix: all rows.
          rows: `[data, n]` the rows of each part; -1 is an empty one.
          mesh: with the axes "data" and "model".
          nse: room in a block; by default what the fullest needs.

        Raises:
          ValueError: the entries of a block do not fit in `nse` or in 2^31 - 1.
        """
        parts = {d: _host_rows(matrix, rows[d]) for d in parts_of_process(mesh)}
        return cls.from_parts(parts, rows.shape[1], mesh, nse=nse)

    @classmethod
    def from_parts(
        cls,
        parts: Mapping[int, CSR],
        rows: int,
        mesh: jax.sharding.Mesh,
        *,
        nse: int | Callable[[int], int] | None = None,
    ) -> ShardedCSR:
        """The blocks of a matrix of which each process has the rows of its devices.

        All processes call it together.

        Args:
          parts: NumPy matrices of at most `rows` rows: of each of `parts_of_process`.
          rows: of a part; what a matrix lacks are empty rows.
          mesh: with the axes "data" and "model".
          nse: room in a block, or a function that makes it of what the fullest of all
            needs; by default just that.

        Raises:
          ValueError: the entries of a block do not fit in `nse` or in 2^31 - 1.
        """
        some = next(iter(parts.values()))
        shape = mesh.shape["data"], mesh.shape["model"]
        width = padded_rows(some.num_cols) // shape[1]
        places = {d: np.asarray(part.indices) // width for d, part in parts.items()}
        counts = {
            d: np.bincount(place, minlength=shape[1]) for d, place in places.items()
        }
        fullest = max(int(count.max()) for count in counts.values())
        if jax.process_count() > 1:
            everywhere = np.asarray(min(fullest, 2**31 - 1), np.int32)
            fullest = int(multihost_utils.process_allgather(everywhere).max())
        if not isinstance(nse, int):
            nse = max(fullest, 1) if nse is None else nse(fullest)
        if fullest > min(nse, MAX_ENTRIES):
            raise ValueError(
                f"a block has {fullest:,} entries, there is room for "
                f"{min(nse, MAX_ENTRIES):,}; divide the matrix over more devices"
            )

        def entries(values, index):
            d, m = (part.start or 0 for part in index[:2])
            mine = values(parts[d])[places[d] == m]
            return np.pad(mine, (0, nse - len(mine)))[None, None]

        def columns(index):
            found = entries(lambda part: np.asarray(part.indices), index)
            # Padding may be anything.
            return (found - (index[1].start or 0) * width).astype(np.int32)

        def indptr(index):
            d, m = (part.start or 0 for part in index[:2])
            before = np.concatenate([[0], np.cumsum(places[d] == m)])
            ends = before[np.asarray(parts[d].indptr)].astype(np.int32)
            return np.pad(ends, (0, rows + 1 - len(ends)), mode="edge")[None, None]

        def made(size, block):
            return jax.make_array_from_callback(
                (*shape, size), NamedSharding(mesh, P("data", "model")), block
            )

        data = None
        if some.data is not None:
            data = made(nse, functools.partial(entries, lambda p: np.asarray(p.data)))
        blocks = CSR(data, made(nse, columns), made(rows + 1, indptr), num_cols=width)
        return cls(blocks, num_cols=some.num_cols)

    def take(self, rows: jax.Array, nse: int) -> ShardedCSR:
        """Some rows of each part, for many batches: a stack of matrices.

        Nothing moves between devices.

        Args:
          rows: `[steps, data, n]` rows for each batch, counted from the first of their
            part. A row that does not exist, as -1, is empty.
          nse: room in a block, as `fullest` says; rows that do not fit come out of
            every operation as NaN.

        Returns:
          `[data * n, num_cols]` matrices; the leaves of the blocks are
          `[steps, data, model, ...]`.
        """

        def block(part, rows):
            part = local(part)
            taken = jax.vmap(lambda r: take_rows(part, r, nse))(rows[:, 0])
            return jax.tree.map(lambda leaf: leaf[:, None, None], taken)

        blocks = on_each_device(
            block,
            dataclasses.replace(self.blocks, transposed=None),
            rows,
            in_specs=(P("data", "model"), P(None, "data")),
            out_specs=P(None, "data", "model"),
        )
        return ShardedCSR(blocks, num_cols=self.num_cols)

    def fullest(self, rows: jax.Array) -> jax.Array:
        """`[]` int32: entries of the fullest block that `take` makes of these rows."""

        def block(indptr, rows):
            lengths, rows = jnp.diff(indptr[0, 0]), rows[:, 0]
            lengths = lengths.at[rows].get(mode="fill", fill_value=0)
            entries = jnp.sum(jnp.where(rows >= 0, lengths, 0), axis=1)
            return lax.pmax(jnp.max(entries, initial=0), ("data", "model"))

        return on_each_device(
            block,
            self.blocks.indptr,
            rows,
            in_specs=(P("data", "model"), P(None, "data")),
            out_specs=P(),
        )

    def row_lengths(self) -> jax.Array:
        """`[rows]` int32: number of entries of each row."""
        lengths = jnp.sum(jnp.diff(self.blocks.indptr), axis=-2, dtype=jnp.int32)
        return lengths.reshape(*lengths.shape[:-2], self.num_rows)

    def row_ids(self) -> jax.Array:
        """`[data, model, nse]` int32: the row of each entry; at least `rows` for padding."""
        data = self.blocks.indptr.shape[-3]
        local = jax.vmap(jax.vmap(CSR.row_ids))(self.blocks)
        first = jnp.arange(data, dtype=jnp.int32)[:, None, None] * self.blocks.num_rows
        padding = local >= self.blocks.num_rows
        return jnp.where(padding, self.num_rows, local + first)

    def column_ids(self) -> jax.Array:
        """`[data, model, nse]` int32: the column of each entry."""
        model = self.blocks.indptr.shape[-2]
        first = jnp.arange(model, dtype=jnp.int32)[:, None] * self.blocks.num_cols
        return jnp.asarray(self.blocks.indices) + first[None]

    def with_transposed(self) -> ShardedCSR:
        """The same matrix, or stack of matrices, with its entries also by column."""
        return dataclasses.replace(self, transposed=self.by_column())

    def by_column(self) -> Transposed:
        """For each part of the columns, the entries of all rows by column.

        Sorted now, unless they were ahead of time. `order` counts the entries of the
        blocks below each other.
        """
        if self.transposed is not None:
            return self.transposed
        stacked = self.blocks.indptr.ndim > 3
        lead = (None,) if stacked else ()

        def sort(blocks):
            return jax.tree.map(
                lambda leaf: jnp.expand_dims(leaf, len(lead)), sorted_rows(blocks)
            )

        return on_each_device(
            lambda blocks: sort(local(blocks)),
            dataclasses.replace(self.blocks, transposed=None),
            in_specs=(P(*lead, "data", "model"),),
            out_specs=P(*lead, "model"),
        )

    def todense(self) -> jax.Array:
        """`[rows, num_cols]` array; for tests and small matrices."""
        dense = jax.vmap(jax.vmap(CSR.todense))(self.blocks)
        dense = dense.transpose(0, 2, 1, 3).reshape(self.num_rows, -1)
        return dense[:, : self.num_cols]


def check_spec(kernel_spec: P) -> None:
    """Raises ValueError unless the spec divides a kernel as a `ShardedCSR` does."""
    if (*kernel_spec, None, None)[:2] != tuple(BY_ROWS):
        raise ValueError(
            f"kernel_spec is {kernel_spec}; the rows of a kernel for sparse inputs lie "
            'over "model": P("model", None)'
        )


def check_rows(name: str, kernel: jax.Array, x: ShardedCSR) -> None:
    """Raises ValueError unless each device has the kernel rows of its block's columns."""
    rows = padded_rows(x.num_cols)
    if kernel.shape[0] != rows:
        raise ValueError(
            f"{name} has {kernel.shape[0]:,} rows; on a mesh a matrix of "
            f"{x.num_cols:,} columns needs {rows:,}, a multiple of {ROW_MULTIPLE}"
        )


def rows_of_device(num_rows: int) -> int:
    """Rows that each device has of a kernel, of which each along "model" has a part.

    Raises:
      ValueError: they cannot be divided evenly.
    """
    _, model = axis_sizes()
    if num_rows % model:
        raise ValueError(
            f"{num_rows:,} rows cannot be divided by {model}, the size of the mesh's "
            'axis "model"'
        )
    return num_rows // model


def on_one_device() -> bool:
    """Whether what is traced now runs on one device: there is no other, or `shard_map`
    divides the work."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or bool(mesh.manual_axes)


def parts_of_process(mesh: jax.sharding.Mesh) -> list[int]:
    """The places on the axis "data" where this process has a device."""
    mine = np.vectorize(lambda device: device.process_index)(mesh.devices)
    axis = mesh.axis_names.index("data")
    here = np.moveaxis(mine == jax.process_index(), axis, 0)
    return np.flatnonzero(here.reshape(len(here), -1).any(axis=1)).tolist()


def _host_rows(matrix: CSR, rows: np.ndarray) -> CSR:
    """Some rows of a NumPy matrix, in this order; -1 is an empty one."""
    ptr = np.asarray(matrix.indptr, np.int64)
    lengths = np.where(rows >= 0, ptr[rows + 1] - ptr[rows], 0)
    ends = np.cumsum(lengths)
    at = np.repeat(ptr[rows] - (ends - lengths), lengths) + np.arange(lengths.sum())
    data = None if matrix.data is None else np.asarray(matrix.data)[at]
    indices = np.asarray(matrix.indices)[at]
    indptr = np.concatenate([[0], ends])
    # Not the constructor: it would look at every entry again.
    leaves = (data, indices, indptr, None)
    return CSR.tree_unflatten(matrix.num_cols, leaves)


def local(tree: Any) -> Any:
    """A device's block of blocks `[..., 1, 1, n]`, or of parts `[..., 1, n]` of columns."""

    def squeezed(leaf):
        return leaf.reshape(*leaf.shape[:-3], leaf.shape[-1])

    return jax.tree.map(squeezed, tree)


def local_columns(by_column: Transposed) -> Transposed:
    """A device's part of a `ShardedCSR.transposed`, `[..., 1, n]`."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(*leaf.shape[:-2], leaf.shape[-1]), by_column
    )


def sorted_rows(block: CSR) -> Transposed:
    """By column, the entries that the devices along "data" have of the same columns.

    On each device: `block` is its own, or a stack of blocks.
    """

    def entries(block):
        return block.columns(padding=block.num_cols), block.row_ids()

    stacked = block.indptr.ndim > 1
    columns, rows = (jax.vmap(entries) if stacked else entries)(block)
    first = lax.axis_index("data") * block.num_rows
    columns, rows = below_each_other((columns, rows + first))
    return Transposed.of(columns, rows, block.num_cols)


def below_each_other(arrays: Any) -> Any:
    """What the devices along "data" have, `[..., n]`, one after the other."""

    def gathered(array):
        return lax.all_gather(array, "data", axis=array.ndim - 1, tiled=True)

    return jax.tree.map(gathered, arrays)


def columns_between(x: CSR, part: jax.Array, width: int, cut: jax.Array) -> CSR:
    """The columns `part * width .. (part + 1) * width - 1`, numbered from 0.

    Room stays for all. An index that is no column of `x` stays wrong, in part 0. Rows
    that are `cut` lack entries, as all after them do, and are overfull in the result.
    """
    columns = jnp.asarray(x.indices)
    row = x.row_ids()
    wrong = (columns < 0) | (columns >= x.num_cols)
    inside = ~wrong & (columns // width == part)
    kept = (inside | (wrong & (part == 0))) & (row < x.num_rows)
    place = jnp.where(kept, jnp.cumsum(kept) - 1, x.nse)

    def compact(values):
        return jnp.zeros_like(values).at[place].set(values, mode="drop")

    lengths = (
        jnp.zeros(x.num_rows, jnp.int32)
        .at[row]
        .add(kept.astype(jnp.int32), mode="drop")
    )
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    ends = jnp.where(cut, x.nse + 1, ends)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    indices = compact(jnp.where(wrong, -1, columns - part * width))
    data = None if x.data is None else compact(jnp.asarray(x.data))
    return CSR(data, indices, indptr, num_cols=width)


def imbalance(counts: np.ndarray) -> float:
    """The largest of some counts, divided by their mean; 1 if there are none."""
    return float(counts.max() / counts.mean()) if counts.any() else 1.0
