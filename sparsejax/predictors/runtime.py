"""Programs on the device: chooses those that answer a request, and prepares their arguments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from sparsejax.mesh.layout import without_mesh
from sparsejax.mesh.promotion import promoting
from sparsejax.mesh.xla_options import gpu_options
from sparsejax.ops import coarse_top_k
from sparsejax.ops.coarse_top_k import CoarseItems
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.precision import Precision
from sparsejax.ops.top_k import top_k
from sparsejax.predictors.signature import Array, Signature
from sparsejax.sparse import CSR

# Programs are compiled for 1, 8, 64, ... rows. These are few, and a request that fills less than
# half of a program runs by smaller programs.
_ROWS_STEP = 8
# Each capacity for entries is 4 times the previous one. An unused entry costs a few nanoseconds.
_ROOM_STEP = 4


def sizes_of_programs(largest: int) -> tuple[int, ...]:
    """The numbers of rows for which a predictor has programs."""
    sizes = [1]
    while sizes[-1] * _ROWS_STEP < largest:
        sizes.append(sizes[-1] * _ROWS_STEP)
    return (*sizes, largest) if largest > 1 else (1,)


def sizes_for(rows: int, programs: Collection[int]) -> list[int]:
    """The sizes of the programs that answer a request with a number of rows.

    All but the last are full. The last is at least half full, unless no program is smaller.
    """
    sizes = []
    while rows > 0:
        fits = min((s for s in programs if rows <= s <= 2 * rows), default=None)
        size = fits or max((s for s in programs if s <= rows), default=min(programs))
        sizes.append(size)
        rows -= size
    return sizes


def room_for(entries: int, least: int) -> int:
    """The smallest capacity for these entries, of a small set of capacities."""
    room = least
    while room < entries:
        room *= _ROOM_STEP
    return room


class Entries(NamedTuple):
    """A matrix in CSR form, whose entries are in any order inside a row."""

    data: np.ndarray | None
    indices: np.ndarray
    indptr: np.ndarray


Rows = CSR | Entries | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a predictor, each compiled at its first use.

    Attributes:
      inputs: descriptions of the arrays in their second argument.
      by_rows: a function `(weights, inputs) -> outputs` for each number of rows, see `programs`.
          Each is compiled for several capacities for entries.
      weights: first argument of the programs, on the device.
      code: exported StableHLO of the programs.
      only: variants of the programs whose last input is the only items to rank, in place of
          excluded items. None if the output layer is part of the programs.
      denies: whether the last weight is a mask for `deny`. The arrays of int8 items, if there are
          any, come before it, see `coarse_items`.
      signature: signature of the predictor; None if the programs do not belong to its file.
      tells_of_passes: whether the last output is a number that is not 0 if the int8 items were not
          sufficient to prove the answer.
    """

    inputs: tuple[Array, ...]
    by_rows: dict[int, Any]
    weights: list[jax.Array]
    code: Mapping[int, export.Exported]
    only: Programs | None = None
    denies: bool = False
    signature: Signature | None = None
    tells_of_passes: bool = False

    @classmethod
    def of(
        cls,
        signature: Signature,
        programs: Mapping[int, export.Exported],
        weights: Iterable[np.ndarray | jax.Array],
        *,
        denies: bool = False,
    ) -> Programs:
        """Copies weights to the device; with `denies` also a mask of excluded items, for
        `deny`.
        """
        own = len(signature.weights)
        on_device = jax.device_put(list(weights))
        # If `weights` already contains these arrays, other programs have made them, and they are
        # shared.
        on_device[own:] = coarse_items(signature, on_device)
        coarse = len(on_device) > own
        if denies:
            # `denies` is given only for a predictor whose file states the layer.
            assert signature.layer is not None
            # The kernel may have more rows than there are items, as padding.
            rows = len(on_device[signature.layer.kernel])
            on_device.append(_denied(rows, np.empty(0, np.int32)))

        def made(best: _Best, only: Programs | None) -> Programs:
            compiled = _by_rows(signature, programs, best, denies)
            facts = (signature.inputs, compiled, on_device, programs, only, denies)
            return cls(*facts, signature, coarse and best is _best_of_all)

        only = None if signature.layer is None else made(_best_of_some, None)
        return made(_best_of_all, only)

    def batches(self, rows: int) -> list[tuple[int, slice]]:
        """The sizes of the programs for a number of rows, and a slice with the rows of each."""
        sizes = sizes_for(rows, self.by_rows)
        starts = itertools.accumulate(sizes, initial=0)
        return [
            (size, slice(start, min(start + size, rows)))
            for size, start in zip(sizes, starts, strict=False)
        ]

    def sizes_up_to(self, rows: int) -> list[int]:
        """The sizes of all programs that requests of up to `rows` rows use."""
        most = min(rows, max(self.by_rows))
        sizes = (sizes_for(n, self.by_rows) for n in range(1, most + 1))
        return sorted({*itertools.chain(*sizes)})

    def steady(self) -> Programs:
        """A copy that keeps the current weights, even if the weights of these programs are
        replaced.
        """
        return dataclasses.replace(self, weights=[*self.weights])

    def denying(self, signature: Signature) -> Programs:
        """A copy prepared for `deny`. The output layer must be separate from the programs."""
        return Programs.of(signature, self.code, self.weights, denies=True)

    def deny(self, items: np.ndarray) -> None:
        """Excludes these items, and no others, for all rows from now on.

        Nothing is compiled again. A batch uses either the earlier exclusions or these.

        Args:
          items: ids of the items.
        """
        assert self.denies
        # The list is changed in place, because compiled programs and `only` refer to it, too.
        self.weights[-1] = _denied(len(self.weights[-1]), items)

    @property
    def can_deny(self) -> bool:
        """Whether items can be excluded for all rows, by `without` or `denying`."""
        return self.signature is not None and self.signature.layer is not None

    def without(self, items: np.ndarray) -> Programs:
        """A copy with the current weights, in which these items are excluded for all rows.

        Items that were excluded before stay excluded.

        Args:
          items: ids of the items. The output layer must be separate from the programs.
        """
        assert self.signature is not None and self.signature.layer is not None
        weights = [*self.weights]
        more = _denied(len(weights[self.signature.layer.kernel]), items)
        if self.denies:
            more += weights.pop()
        weights.append(more)
        compiled = self.by_rows if self.denies else self._denying_by_rows
        return dataclasses.replace(
            self, by_rows=compiled, weights=weights, only=None, denies=True
        )

    @functools.cached_property
    def _denying_by_rows(self) -> dict[int, Any]:
        assert self.signature is not None
        return _by_rows(self.signature, self.code, _best_of_all, True)

    def run(self, size: int, given: Sequence[Rows], room: int) -> Any:
        """Starts computing the outputs for a batch, without waiting for them.

        Args:
          size: number of rows of the program.
          given: for each input up to `size` rows, on the host.
          room: capacity for the entries of each matrix.
        """
        arguments = self.arguments(size, given, room)
        with without_mesh():  # programs run on one device
            found = self.by_rows[size](self.weights, arguments)
        # If `tells_of_passes`, there is one more output, which only `serving.engine` uses.
        return found[: len(found) - self.tells_of_passes]

    def arguments(self, size: int, given: Sequence[Rows], room: int) -> list[Any]:
        """The second argument of a program, on the host; see `run`."""
        pairs = zip(self.inputs, given, strict=True)
        return [_argument(like, each, size, room) for like, each in pairs]

    def compiled(self, size: int, room: int) -> Callable[[Any], Any]:
        """Compiles the program for one size and capacity now.

        It takes `arguments` of this shape, joined by `in_one_array`. Its outputs are joined, too;
        `apart` separates them. A single array is used because each copy to or from a GPU takes
        tens of microseconds, however small the array is.
        """
        likes, tree = jax.tree.flatten(self.arguments(size, self.nothing, room))
        program = self.by_rows[size].__wrapped__

        def whole(weights: list[jax.Array], given: Any) -> Any:
            inputs = jax.tree.unflatten(tree, apart(given, likes))
            return in_one_array(program(weights, inputs))

        with without_mesh():
            options = dict(gpu_options(loops_in_graphs=True)) or None
            one_array = jax.jit(whole, compiler_options=options)
            made = one_array.lower(self.weights, in_one_array(likes)).compile()
        return functools.partial(made, self.weights)

    @property
    def nothing(self) -> list[Rows]:
        """Rows of each input, of which there are none."""
        none = Entries(None, np.empty(0, np.int32), np.zeros(1, np.int32))
        return [
            none if each.sparse else np.zeros((0, *each.shape), each.dtype)
            for each in self.inputs
        ]


def in_one_array(arrays: Any) -> Any:
    """Joins arrays to a single int32 array `[words]`, or to a list of arrays, see `apart`.

    Args:
      arrays: a tree of NumPy or JAX arrays.
    """
    leaves = jax.tree.leaves(arrays)
    if not _are_words(leaves):
        return leaves
    if all(isinstance(each, np.ndarray) for each in leaves):
        return np.concatenate([each.ravel().view(np.int32) for each in leaves])
    words = (lax.bitcast_convert_type(each, jnp.int32) for each in leaves)
    return jnp.concatenate([each.ravel() for each in words])


def apart(given: Any, likes: Sequence[Any]) -> list[Any]:
    """Separates a result of `in_one_array` into its arrays, which for NumPy are views.

    Args:
      given: result of `in_one_array`: a list of the arrays unless all elements have four bytes.
      likes: arrays with the dtypes and shapes of the joined ones.
    """
    if not _are_words(likes):
        return given
    found, start = [], 0
    for like in likes:
        end = start + math.prod(like.shape)
        part = given[start:end].reshape(like.shape)
        if isinstance(part, np.ndarray):
            found.append(part.view(like.dtype))
        else:
            found.append(lax.bitcast_convert_type(part, like.dtype))
        start = end
    return found


def _are_words(arrays: Iterable[Any]) -> bool:
    """Whether all arrays have elements of four bytes."""
    return all(np.dtype(each.dtype).itemsize == 4 for each in arrays)


def _by_rows(
    signature: Signature,
    programs: Mapping[int, export.Exported],
    best: _Best,
    denies: bool,
) -> dict[int, Any]:
    """Makes `Programs.by_rows`: a jitted program for each number of rows."""
    with without_mesh():  # programs run on one device
        options = dict(gpu_options()) or None
    return {
        rows: jax.jit(
            _whole(signature, program, best, denies), compiler_options=options
        )
        for rows, program in programs.items()
    }


def coarse_items(signature: Signature, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of `CoarseItems` that follow the weights, or an empty list.

    Args:
      signature: signature of the predictor.
      weights: arrays on the device. If there are more than in the signature, the others are the
          int8 arrays.
    """
    layer, own = signature.layer, len(signature.weights)
    if layer is None or not layer.int8:
        return []
    kernel, dtype = weights[layer.kernel], jnp.dtype(layer.dtype)
    with without_mesh():
        if not coarse_top_k.is_of_use(kernel.shape, dtype):
            return []
    count = len(CoarseItems._fields)
    if len(weights) >= own + count:
        return list(weights[own : own + count])
    scale = None if layer.scale is None else weights[layer.scale]
    return list(CoarseItems.of(kernel.astype(dtype), scale))


def _denied(rows: int, items: np.ndarray) -> jax.Array:
    """A bias that excludes items: -inf for `items`, and 0 for all others."""
    bias = np.zeros(rows, np.float32)
    bias[items] = -np.inf
    return jax.device_put(bias)


class _Layer(NamedTuple):
    """Arrays and precision of an output layer, as in `sparsejax.top_k` and `coarse_top_k`."""

    kernel: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None
    precision: Precision
    coarse: CoarseItems | None


# Function of row vectors, an output layer, a matrix of items, and k. It returns ids and scores of
# the `k` best items. With int8 items it also returns whether the scores of all items were
# computed.
_Best = Callable[[jax.Array, _Layer, CSR, int], tuple[jax.Array, ...]]


def _best_of_all(
    h: jax.Array, layer: _Layer, exclude: CSR, k: int
) -> tuple[jax.Array, ...]:
    """The `k` best items of each row that are not in the matrix `exclude`."""
    options = {"bias": layer.bias, "scale": layer.scale, "precision": layer.precision}
    best: Callable[..., tuple[jax.Array, ...]] = top_k
    if layer.coarse is not None:
        best = functools.partial(coarse_top_k.coarse_top_k, coarse=layer.coarse)
    return best(h, layer.kernel, k, exclude=exclude, **options)


@promoting()
def _best_of_some(
    h: jax.Array, layer: _Layer, only: CSR, k: int
) -> tuple[jax.Array, jax.Array]:
    """The `k` best items of each row that are in the matrix `only`. The lower id wins a tie."""
    ids, rows = jnp.asarray(only.indices), only.row_ids()
    inside = jnp.arange(len(ids)) < only.indptr[-1]
    dtype = accumulator(h.dtype)
    vectors = h[rows].astype(dtype) * layer.kernel[ids].astype(dtype)
    scores = jnp.sum(vectors, axis=1)
    if layer.scale is not None:
        scores *= layer.scale[ids]
    if layer.bias is not None:
        scores += layer.bias[ids]
    # NaN ranks first, so that the caller notices it.
    order = jnp.where(jnp.isnan(scores), -jnp.inf, -scores)
    rows = jnp.where(inside, rows, len(h))
    _, _, ids, scores = lax.sort((rows, order, ids, scores), num_keys=3)
    places = only.indptr[:-1, None] + jnp.arange(k, dtype=jnp.int32)[None]
    found = scores.at[places].get(mode="clip")
    met = (places < only.indptr[1:, None]) & (found != -jnp.inf)
    ids = jnp.where(met, ids.at[places].get(mode="clip"), -1)
    return ids, jnp.where(met, found, -jnp.inf)


def _whole(
    signature: Signature, program: export.Exported, best: _Best, denies: bool
) -> Callable[..., Any]:
    """Adds the output layer to a program, if the file stores the layer separately."""
    stated = signature.layer
    if stated is None:
        return program.call
    num_items, (k,) = signature.inputs[-1].shape[-1], signature.outputs[0].shape
    taken, own = len(signature.program_weights), len(signature.weights)

    def ranked(weights: list[jax.Array], inputs: list[Any]) -> list[jax.Array]:
        *shown, items = inputs
        (h,) = program.call(weights[:taken], shown)
        bias, scale = (
            None if at is None else weights[at] for at in (stated.bias, stated.scale)
        )
        if bias is not None:
            bias = bias.astype(accumulator(bias.dtype))
        more = weights[own : len(weights) - denies]
        if denies:
            denied = weights[-1].astype(accumulator(h.dtype))
            bias = denied if bias is None else bias + denied.astype(bias.dtype)
        layer = _Layer(
            kernel=weights[stated.kernel].astype(h.dtype),
            bias=bias,
            scale=scale,
            precision=stated.precision,
            coarse=CoarseItems(*more) if more else None,
        )
        ids, scores, *whole = best(h, layer, CSR(None, *items, num_cols=num_items), k)
        pairs = zip((ids, scores), signature.outputs, strict=True)
        found = [array.astype(output.dtype) for array, output in pairs]
        return found + [each.astype(jnp.int32) for each in whole]

    return ranked


def _argument(like: Array, given: Rows, rows: int, room: int) -> Any:
    """Converts rows of an input to the program's dtype, and pads them with empty rows."""
    if isinstance(given, np.ndarray):
        return _padded(given.astype(like.dtype, copy=False), rows, like.dtype)
    ends = np.asarray(given.indptr)
    indptr = np.full(rows * like.bags + 1, ends[-1], np.int32)
    indptr[: len(ends)] = ends
    indices = _padded(np.asarray(given.indices), room, np.int32)
    if like.dtype is None:
        return indices, indptr
    data = np.ones(len(given.indices)) if given.data is None else given.data
    return _padded(data, room, like.dtype), indices, indptr


def _padded(array, room: int, dtype) -> np.ndarray:
    padded = np.zeros((room, *np.shape(array)[1:]), dtype)
    padded[: len(array)] = array
    return padded
