"""The division of parameters over a mesh with the axes "data" and "model"."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROW_MULTIPLE = 256
VIRTUAL_SHARDS = 64

# Elements in a piece of an array that a process sends to all others (256 MB).
_EXCHANGED_ELEMENTS = 2**26

# The partition spec of the input layer's kernel: its rows (one for each feature) are divided over
# the axis "model".
BY_ROWS = P("model", None)


def padded_rows(rows: int) -> int:
    """The number of rows that are allocated for a kernel.

    It is `rows` rounded up to a multiple of 256, and from 16,384 rows on to a multiple of
    512, 1,024, ... 65,536 (at most 1/32 more). So the shards of a large kernel have multiples
    of 256 rows too, as the GPU programs need. The number does not depend on the mesh, so that a
    checkpoint fits any mesh. Rows beyond `rows` stay zero and have no effect.
    """
    multiple = ROW_MULTIPLE
    while multiple < ROW_MULTIPLE**2 and multiple * 64 <= rows:
        multiple *= 2
    return -(-rows // multiple) * multiple


def bit_reversed(hands: Any) -> Any:
    """Reverses the bits of 8-bit numbers: 1 becomes 128. The array is NumPy's or JAX's.

    Rows are distributed round robin to 256 groups; each device has consecutive groups. With
    the groups in this order, rows with neighbouring ranks are on different devices, even on
    few devices.
    """
    hands = hands >> 4 | (hands & 0x0F) << 4
    hands = (hands & 0xCC) >> 2 | (hands & 0x33) << 2
    return (hands & 0xAA) >> 1 | (hands & 0x55) << 1


def make_mesh(
    *, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh over which batches ("data") and large kernels ("model") are divided.

    >>> mesh = make_mesh(data=1, model=1)
    >>> with jax.set_mesh(mesh):
    ...     layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> layer.kernel[...].sharding.spec == jax.P("model", None)
    True

    Its axes are `Auto`: the compiler divides the work between our operations. Devices
    along "model" are adjacent, because they exchange the most data.

    Args:
      data: number of parts of a batch; a divisor of 64 and of the batch size.
      model: number of parts of the input's kernel. `data * model`, the number of parts of the
        output's kernel, is at most 256.
      devices: `data * model` devices; by default the first ones that JAX lists.

    Raises:
      ValueError: `data` does not divide 64, `model` does not divide 256, or there are too few
        devices.
    """
    check_axis_sizes(data, model)
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


def check_axis_sizes(data: int, model: int) -> None:
    """Raises ValueError if no mesh can have axes of these sizes."""
    for name, size, whole in (
        ("data", data, VIRTUAL_SHARDS),
        ("model", model, ROW_MULTIPLE),
    ):
        if size < 1 or whole % size:
            raise ValueError(
                f"{name} must be a divisor of {whole}, got {size}: so many devices along this axis of the "
                "mesh cannot share our arrays evenly"
            )
    if data * model > ROW_MULTIPLE:
        raise ValueError(
            f"data * model must be at most {ROW_MULTIPLE}, got {data} * {model}: so many "
            "devices cannot share the output's items evenly"
        )


def varying_axes(tree: Any) -> frozenset[str]:
    """Mesh axes over which an array of the tree varies, if `jax.shard_map` checks them."""
    types = (jax.typeof(leaf) for leaf in jax.tree.leaves(tree))
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def vary_over[Tree](tree: Tree, axes: frozenset[str]) -> Tree:
    """Casts the arrays of a tree to types that vary over at least these mesh axes.

    Its derivative sums over the added axes.
    """

    def cast(leaf):
        missing = axes - varying_axes(leaf)
        return lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def vary_alike[*Trees](*trees: *Trees) -> tuple[*Trees]:
    """Casts all arrays of the trees to types that vary over the same mesh axes, for loops."""
    return vary_over(trees, varying_axes(trees))


def item_axes() -> str | tuple[str, str]:
    """The mesh axes over which the output's items are divided.

    The items are divided over all devices, also those along "data", where batches are divided.
    In a step, the devices exchange hidden vectors and their gradients, which are much smaller
    than the gradient of the output's kernel.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return ("model", "data") if shape.get("data", 1) > 1 else "model"


class HiddenLayout(NamedTuple):
    """How a hidden layer is divided over a mesh.

    Attributes:
      kernel: partition spec of its `[inputs, outputs]` kernel.
      bias: partition spec of its `[outputs]` bias.
    """

    kernel: P
    bias: P


def hidden_layout(inputs: int, outputs: int, *, by_inputs: bool) -> HiddenLayout | None:
    """How a hidden layer is divided over "model"; None without a mesh.

    >>> with jax.set_mesh(make_mesh(data=1, model=1)):
    ...     layout = hidden_layout(128, 64, by_inputs=False)
    ...     kernel = nnx.Param(jnp.zeros((128, 64)), out_sharding=layout.kernel)
    >>> layout.kernel == jax.P(None, "model")
    True

    Successive layers are divided alternately by their outputs and by their inputs. Of two
    such layers, the first computes on each device the units that the second reads there, so
    devices exchange only the sums of the second.

    Args:
      inputs: size of the layer below, which is the input of this layer.
      outputs: size of this layer.
      by_inputs: whether the layer below was divided by its outputs.

    Returns:
      The layout. None also if the size to be divided is no multiple of the axis "model".
    """
    if not mesh_is_set() or (inputs if by_inputs else outputs) % axis_sizes()[1]:
        return None
    if by_inputs:
        return HiddenLayout(P("model", None), P(None))
    return HiddenLayout(P(None, "model"), P("model"))


def mesh_is_set() -> bool:
    """Whether `jax.set_mesh` has set a mesh with an axis "model"; it works in traced functions."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and "model" in mesh.shape and not mesh.manual_axes


def current_mesh() -> jax.sharding.Mesh | None:
    """The mesh that is set, if there is one; see `mesh_is_set`."""
    return jax.sharding.get_mesh() if mesh_is_set() else None


def axis_sizes() -> tuple[int, int]:
    """Sizes of "data" and "model" in the mesh that is set; it works in traced functions.

    Raises:
      ValueError: no mesh is set, it lacks an axis, or an axis does not divide our sizes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("this needs a mesh: use `with jax.set_mesh(mesh):`")
    if not {"data", "model"} <= mesh.shape.keys():
        raise ValueError(
            'the mesh must have axes "data" and "model" (sparsejax.make_mesh makes '
            f"one), it has {tuple(mesh.axis_names)}"
        )
    check_axis_sizes(mesh.shape["data"], mesh.shape["model"])
    return mesh.shape["data"], mesh.shape["model"]


def parts_of_axes() -> tuple[int, int]:
    """The sizes of "data" and "model" in the mesh that is set; `(1, 1)` without a mesh."""
    return axis_sizes() if mesh_is_set() else (1, 1)


def num_devices() -> int:
    """Number of devices of the mesh that is set; 1 without a mesh; also while tracing."""
    return math.prod(parts_of_axes())


def call_on_each_device(
    f: Callable[..., Any],
    arguments: tuple[Any, ...],
    in_specs: Any,
    out_specs: Any,
    *,
    checked: bool = False,
) -> Any:
    """Calls `f` on each device of the mesh, with that device's parts of the arguments.

    If JAX checks over which axes arrays vary, gradients are summed over no further axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arguments = jax.tree.map(
        lambda spec, tree: reshard_if_explicit(tree, spec),
        in_specs,
        arguments,
        is_leaf=lambda node: isinstance(node, P),
    )
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked
    )(*arguments)


def reshard_if_explicit[Tree](tree: Tree, spec: P) -> Tree:
    """Divides the arrays of a tree by `spec`, if the axes of the mesh are Explicit.

    Then their types agree. If the axes are Auto, the tree is returned unchanged.
    """
    if not axes_are_explicit():
        return tree
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)


def call_with_auto_axes(f: Callable[..., Any], *arguments: Any, out_specs: Any) -> Any:
    """Calls `f` with the axes of the mesh as Auto: the compiler divides the work.

    With Explicit axes, the type of each array has to say how it is divided, and some
    operations of `f` have no rule for that.
    """
    if not axes_are_explicit():
        return f(*arguments)
    return jax.jit(jax.sharding.auto_axes(f, out_sharding=out_specs))(*arguments)


def axes_are_explicit() -> bool:
    """Whether the axes of the mesh that is set are Explicit; it works in traced functions."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


@contextlib.contextmanager
def using_auto_axes() -> Generator[None]:
    """Makes the axes of the mesh Auto while this context is open, as our programs need.

    It is also a decorator. Arrays must be on that mesh, see `put_on_mesh`. Do not use it in
    traced functions.
    """
    if not axes_are_explicit():
        yield
        return
    with jax.set_mesh(_with_auto_axes(jax.sharding.get_mesh())):
        yield


def _with_auto_axes(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * mesh.devices.ndim
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def out_sharding(spec: P) -> dict[str, Any]:
    """Options for a `flax.nnx.Variable` that is divided by `spec`, if a mesh is set.

    The value must already be divided in this way, see `jit_sharded`: flax would divide it again,
    and so copy it. Large tables leave no memory for a copy.
    """
    if not mesh_is_set():
        return {}
    return {"out_sharding": spec, "eager_sharding": False}


def jit_sharded[**Args, Made](
    make: Callable[Args, Made],
    spec: P | None,
    *,
    static: tuple[int, ...],
    donate: tuple[int, ...] = (),
) -> Callable[Args, Made]:
    """`jax.jit(make)` with its result divided by `spec` on the mesh, if one is set.

    Without a spec or a mesh, it is `jax.jit(make)`. Calls with an equal function and equal
    `static` arguments (given by position) reuse the compiled program. `donate` has the
    positions of arguments whose memory the result may take.
    """
    if spec is None or not mesh_is_set():
        return jax.jit(make, static_argnums=static, donate_argnums=donate)
    mesh = jax.sharding.get_abstract_mesh()
    check_axis_sizes(mesh.shape.get("data", 1), mesh.shape["model"])
    # An abstract mesh is enough to evaluate shapes; it needs no devices.
    lies = NamedSharding(mesh, spec)
    return jax.jit(
        make, static_argnums=static, donate_argnums=donate, out_shardings=lies
    )


def sharding_of(spec: P) -> jax.sharding.Sharding:
    """The sharding that `put_on_mesh` gives an array with this spec; one device without a mesh."""
    if not mesh_is_set():
        return jax.sharding.SingleDeviceSharding(default_device())
    return NamedSharding(jax.sharding.get_mesh(), spec)


def put_on_mesh[Tree](tree: Tree) -> Tree:
    """Copies the arrays of a tree to the mesh that is set, if one is set.

    An array that is divided over axes of a mesh stays divided over these axes. All other
    arrays are replicated on every device.
    """
    if not mesh_is_set():
        return tree
    mesh = jax.sharding.get_mesh()

    def put(leaf):
        axes = tuple(getattr(leaf.sharding, "spec", ()))
        # JAX omits trailing None axes in the specs of results. With them in the arguments' specs,
        # a program would be compiled a second time for its own results.
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return jax.device_put(leaf, NamedSharding(mesh, P(*axes)))

    return jax.tree.map(put, tree)


def put_rows(array: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Copies an array to the mesh, with its rows (the first axis) divided over "data"."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, P("data")), lambda index: array[index]
    )


def dealt(loads: jax.Array, parts: int) -> jax.Array:
    """Distributes items over parts, equally many to each, so that the sums of loads are close.

    Items are assigned by descending load: to parts 0, 1, 2, then 2, 1, 0, then 0, ...
    The sums of two parts differ by no more than the largest load.

    Args:
      loads: `[items]`, the load of each item.
      parts: number of parts; a divisor of the number of items.

    Returns:
      `[parts, items of a part]`: indices of the items of each part.
    """
    rounds = jnp.argsort(loads, descending=True).reshape(-1, parts)
    back = jnp.arange(len(rounds))[:, None] % 2 > 0
    return jnp.where(back, rounds[:, ::-1], rounds).T


def replicated[Tree](tree: Tree) -> Tree:
    """Replicates a traced tree on all devices of the mesh, if a mesh is set.

    Then every process can read it.
    """
    if axes_are_explicit():
        return reshard_if_explicit(tree, P())
    return lax.with_sharding_constraint(tree, P()) if mesh_is_set() else tree


def divided_over_all[Tree](tree: Tree) -> Tree:
    """Divides the rows of a traced tree evenly over all devices of the mesh that is set."""
    spec = P(("data", "model"))
    if axes_are_explicit():
        return reshard_if_explicit(tree, spec)
    return lax.with_sharding_constraint(tree, spec)


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array as a NumPy array, in every process. All processes must call this."""
    if _is_here(array):
        return np.asarray(array)
    whole, start = np.empty(array.shape, array.dtype), 0
    for part in exchanged(array):
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def to_host_in_pieces(array: jax.Array) -> Iterator[np.ndarray]:
    """Yields the array some rows at a time, in every process; all must iterate to the end."""
    return iter([np.asarray(array)]) if _is_here(array) else exchanged(array)


def _is_here(array: jax.Array) -> bool:
    """Whether this process can read the whole array."""
    return array.is_fully_addressable or array.is_fully_replicated


def exchanged(
    array: jax.Array, *, piece_elements: int = _EXCHANGED_ELEMENTS
) -> Iterator[np.ndarray]:
    """Yields an array on a mesh some rows at a time; all processes exchange their rows.

    A device may only have enough memory for its part and one piece.

    Args:
      array: `[rows, ...]` on a mesh. All processes must take all pieces.
      piece_elements: approximate number of elements in a piece.
    """
    sharding = cast(NamedSharding, array.sharding)
    mesh = _with_auto_axes(cast(jax.sharding.Mesh, sharding.mesh))
    array = jax.device_put(array, NamedSharding(mesh, sharding.spec))
    # At most the array's rows: otherwise small arrays would take as long as a whole piece.
    size = min(len(array), max(1, piece_elements * len(array) // array.size))
    get = jax.jit(
        lambda array, rows: array.at[rows].get(mode="clip"),
        out_shardings=NamedSharding(mesh, P()),
    )
    for start in range(0, len(array), size):
        rows = np.arange(start, start + size, dtype=np.int32)
        # The caller's mesh may have Explicit axes, which these operations do not support.
        with jax.set_mesh(mesh):
            part = np.asarray(get(array, rows))
        yield part[: len(array) - start]


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Unsets the mesh while this context is open."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def using_mesh(
    mesh: jax.sharding.Mesh | None,
) -> contextlib.AbstractContextManager[Any]:
    """Sets a mesh that `current_mesh` returned, or none, while this context is open."""
    return without_mesh() if mesh is None else jax.set_mesh(mesh)


def shardings_of(tree: Any) -> tuple[jax.sharding.Sharding, ...] | None:
    """The sharding of each leaf of a tree on the mesh that is set; None without a mesh."""
    if not mesh_is_set():
        return None
    return tuple(leaf.sharding for leaf in jax.tree.leaves(tree))


def with_shardings[Tree](
    tree: Tree, shardings: tuple[jax.sharding.Sharding, ...] | None
) -> Tree:
    """Constrains the leaves of a traced tree to `shardings_of` another tree, as loops need."""
    if shardings is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, shardings, strict=True)
    kept = [lax.with_sharding_constraint(leaf, sharding) for leaf, sharding in pairs]
    return jax.tree.unflatten(structure, kept)


def check_kernel_spec(kernel_spec: P) -> None:
    """Raises ValueError unless the spec divides a kernel as a `ShardedCSR` does."""
    if (*kernel_spec, None, None)[:2] != tuple(BY_ROWS):
        raise ValueError(
            f"kernel_spec is {kernel_spec}; the rows of a kernel for sparse inputs lie "
            'over "model": P("model", None)'
        )


def rows_per_device(num_rows: int) -> int:
    """The number of kernel rows on each device, as rows are divided over "model".

    Raises:
      ValueError: the rows cannot be divided evenly.
    """
    _, model = axis_sizes()
    if num_rows % model:
        raise ValueError(
            f"{num_rows:,} rows cannot be divided by {model}, the size of the mesh's "
            'axis "model"'
        )
    return num_rows // model


def is_for_one_device() -> bool:
    """Whether a program that is traced or compiled now runs on one device.

    The mesh that is set decides, not the number of devices that the process sees. It runs on
    one device if no mesh is set, if the mesh has one device, or in `jax.shard_map`, which
    divides the work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1 or bool(mesh.manual_axes)


def default_device() -> jax.Device:
    """The device on which JAX allocates arrays without a mesh, see `jax.default_device`."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def device_memory() -> int | None:
    """The bytes of the default device that JAX may allocate; None if the device does not say."""
    stats = default_device().memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def readable_bytes(size: float) -> str:
    """A number of bytes as text with three digits.

    >>> readable_bytes(105_000_000_000)
    '105 GB'
    """
    for prefix in ("", "k", "M", "G", "T"):
        if size < 999.5 or prefix == "T":
            break
        size /= 1000
    digits = 0 if not prefix or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:,.{digits}f} {prefix}B"


def available_memory() -> int:
    """Bytes of host memory that can be used without swapping; all memory if that is unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            name, number, *_ = line.split()
            if name == "MemAvailable:":
                return 1024 * int(number)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
