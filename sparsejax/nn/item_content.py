"""Content of items as a part of their vectors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from sparsejax.mesh.layout import (
    call_on_each_device,
    item_axes,
    jit_sharded,
    mesh_is_set,
    out_sharding,
    padded_rows,
    to_host,
)
from sparsejax.nn.linear_part import FromData
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.scatter_gradient import dense_gradient
from sparsejax.optimizers import growth
from sparsejax.sparse import CSR, unit_rows

# The size of a mesh divides 256, so that each device has whole blocks of tags.
_BLOCKS = 256
# Items whose content is worked on at a time: 200 MB of float32 for vectors of 768 numbers.
CHUNK_ITEMS = 2**16
# Tags of items that are sorted together for the gradient of T: about 40 bytes each. Sums of
# all tags are added for each such part, so that there should be few.
SORTED_TAGS = 2**23
# The number of entries from which on an item's own vector counts more than half, at first.
_HALF = 2.0
# The share of items that are their content alone in a step. Chosen on Amazon Beauty.
DROPPED = 0.1

_init = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ContentSizes:
    """How large the content of items is.

    >>> ContentSizes.of(None, np.zeros((3, 5), np.float16))
    ContentSizes(tags=0, entries=0, vectors=5, dtype='float16')

    Attributes:
      tags: number of different tags, 0 for none.
      entries: the most tags that one of 256 equal parts of the items has.
      vectors: numbers in the vector of an item, 0 for none.
      dtype: of these numbers.
    """

    tags: int = 0
    entries: int = 0
    vectors: int = 0
    dtype: str = "float32"

    @classmethod
    def of(
        cls,
        tags: scipy.sparse.csr_array | None,
        vectors: np.ndarray | None,
    ) -> ContentSizes:
        """The sizes of `tags: [items, tags]` and `vectors: [items, numbers]`."""
        count = entries = width = 0
        dtype = "float32"
        if tags is not None:
            _, count = _shape(tags)
            entries = int(_block_entries(tags).max())
        if vectors is not None:
            width, dtype = vectors.shape[1], str(vectors.dtype)
        return cls(count, entries, width, dtype)


class ItemContent(nnx.Module):
    """The part of the items' vectors that comes from what the items are.

    ::

        E_i = a(n_i) R_i + t_i T + v_i V                a(n) = n / (n + exp(log_half))

    R_i is the row of item i in a kernel, t_i are its tags (divided by their norm), v_i is
    its vector, and n_i the number of its entries in the training data. T, V and `log_half`
    are learned. So an item without entries is its content alone, and one with many is
    mostly itself.

    >>> tags = scipy.sparse.csr_array([[1.0, 0], [1, 1], [0, 0]])
    >>> content = ItemContent(3, 4, ContentSizes.of(tags, None), rngs=nnx.Rngs(0))
    >>> content.set_to(tags, None)
    >>> content.vectors_with(jnp.ones((256, 4))).shape
    (256, 4)

    In training, items drawn at random have a(n) = 0 in a step. So content is learned
    that does without R, and content alone is told from content together with R: without it,
    items without entries would be recommended far too often.

    All vectors are made at once, some items at a time, and so is their gradient reduced to
    those of R, T, V and `log_half`. No second array `[items, width]` of float32 is made.

    Args:
      items: number of items.
      width: numbers in a vector.
      sizes: of the content, which `set_to` brings.
      rngs: random streams; the module uses "params" and "dropout".
    """

    def __init__(self, items: int, width: int, sizes: ContentSizes, *, rngs: nnx.Rngs):
        self.items, self.sizes = items, sizes
        rows = padded_rows(items)

        def zeros(*shape, dtype=jnp.float32):
            spec = P(item_axes(), *[None] * (len(shape) - 1))
            made = jit_sharded(_zeros, spec, static=(0, 1))(shape, jnp.dtype(dtype))
            return FromData(made, **out_sharding(spec))

        self.log_half = nnx.Param(jnp.full((), math.log(_HALF), jnp.float32))
        self.deterministic = False
        self.implementation: Implementation = None
        self.draws = rngs.dropout.fork()
        self.entries = zeros(rows)
        self.tags: nnx.Dict | None = nnx.data(None)
        self.tag_kernel: nnx.Param | None = nnx.data(None)
        if sizes.tags:
            self.tags = nnx.Dict(
                indptr=zeros(_BLOCKS, rows // _BLOCKS + 1, dtype=jnp.int32),
                indices=zeros(_BLOCKS, sizes.entries, dtype=jnp.int32),
                values=zeros(_BLOCKS, sizes.entries),
            )
            shape = padded_rows(sizes.tags), width
            self.tag_kernel = nnx.Param(_init(rngs.params(), shape, jnp.float32))
        self.given: FromData | None = nnx.data(None)
        self.vector_kernel: nnx.Param | None = nnx.data(None)
        if sizes.vectors:
            self.given = zeros(rows, sizes.vectors, dtype=sizes.dtype)
            shape = sizes.vectors, width
            self.vector_kernel = nnx.Param(_init(rngs.params(), shape, jnp.float32))

    def set_to(
        self,
        tags: scipy.sparse.csr_array | None,
        vectors: np.ndarray | None,
    ) -> None:
        """Takes the content of the items, `[items, tags]` and `[items, numbers]`.

        Raises:
          ValueError: it is of another number of items, or has other tags or numbers.
        """
        given = ContentSizes.of(tags, vectors)
        if (given.tags, given.vectors) != (self.sizes.tags, self.sizes.vectors):
            raise ValueError(
                f"the content has {given.tags:,} tags and vectors of {given.vectors:,} "
                f"numbers, but the model was made for {self.sizes.tags:,} and "
                f"{self.sizes.vectors:,}"
            )
        for rows in (
            self.items if tags is None else _shape(tags)[0],
            self.items if vectors is None else len(vectors),
        ):
            if rows != self.items:
                raise ValueError(
                    f"the content is of {rows:,} items, but the model has "
                    f"{self.items:,}; align it: features.align(names of the items)"
                )
        if tags is not None:
            assert self.tags is not None
            most = max(given.entries, self.sizes.entries)
            self.sizes = dataclasses.replace(self.sizes, entries=most)
            blocks = _in_blocks(tags, most)
            for name, value in blocks.items():
                _put(self.tags[name], value)
        if vectors is not None:
            assert self.given is not None
            extra = padded_rows(self.items) - self.items
            _put(self.given, np.pad(vectors, ((0, extra), (0, 0))))

    def set_entries(self, counts: np.ndarray) -> None:
        """Takes the number of entries of each item in the training data, `[items]`.

        Raises:
          ValueError: they are of another number of items.
        """
        if counts.shape != (self.items,):
            raise ValueError(
                f"counts have the shape {counts.shape}; one for each of {self.items:,} items"
            )
        extra = padded_rows(self.items) - self.items
        _put(self.entries, np.pad(np.asarray(counts, np.float32), (0, extra)))

    def unseen(self) -> Bool[Array, "rows"]:
        """Whether an item has no entries, where others have some.

        The softmax in training leaves such items out: as negatives of all examples they would
        be pushed behind all others, together with what they have in common with known ones.
        """
        none = self.entries[...] == 0
        is_item = jnp.arange(len(none)) < self.items
        return none & is_item & ~jnp.all(none)

    def scale_start(self) -> None:
        """Divides the initial V by the norm that the items' vectors have on average."""
        if self.given is not None and self.vector_kernel is not None:
            norm = _mean_norm(self.given[...], self.items)
            self.vector_kernel.set_value(self.vector_kernel[...] / norm)

    def add_items(self, count: int) -> None:
        """Adds items without content and entries behind the known ones, in place."""
        growth.add_rows(self.entries, self.items, count, zeros=True)
        if self.given is not None:
            growth.add_rows(self.given, self.items, count, zeros=True)
        if self.tags is not None:
            before = self._stored_tags()
            before.resize((self.items + count, self.sizes.tags))
            entries = int(_block_entries(before).max())
            self.sizes = dataclasses.replace(self.sizes, entries=entries)
            for name, value in _in_blocks(before, entries).items():
                _put(self.tags[name], value)
        self.items += count

    def _stored_tags(self) -> scipy.sparse.csr_array:
        assert self.tags is not None
        names = ("values", "indices", "indptr")
        blocks = [to_host(self.tags[name][...]) for name in names]
        parts = [
            scipy.sparse.csr_array(
                (data[: ptr[-1]], column[: ptr[-1]], ptr),
                shape=(len(ptr) - 1, self.sizes.tags),
            )
            for data, column, ptr in zip(*blocks, strict=True)
        ]
        return scipy.sparse.csr_array(scipy.sparse.vstack(parts)[: self.items])

    def vectors_with(
        self,
        kernel: Float[Array, "rows width"],
        dtype: jax.typing.DTypeLike | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "rows width"]:
        """The items' vectors E, of the rows R. Zeros behind the last item stay zeros.

        Args:
          kernel: `[padded_rows(items), width]`.
          dtype: of the result; that of the kernel by default. In bfloat16 the products'
            operands are bfloat16, too. Sums are float32.
          deterministic: whether all items keep their rows R, also in training.
        """
        optional = self.tag_kernel, self.vector_kernel
        learned = _Learned(
            self.log_half[...], *(None if p is None else p[...] for p in optional)
        )
        tags = None
        if self.tags is not None:
            leaves = (self.tags[n][...] for n in ("values", "indices", "indptr"))
            tags = CSR.tree_unflatten(padded_rows(self.sizes.tags), (*leaves, None))
        given = None if self.given is None else self.given[...]
        entries = self.entries[...]
        if not (deterministic or self.deterministic):
            kept = jax.random.bernoulli(self.draws(), 1 - DROPPED, entries.shape)
            # An item without content would be nothing at all.
            entries = jnp.where(kept | ~_have_content(tags, given), entries, 0)
        fixed = _Fixed(entries, tags, given)
        axes = item_axes() if mesh_is_set() else None
        dtype = jnp.dtype(kernel.dtype if dtype is None else dtype)
        how = _How(dtype, axes, self.implementation)
        return _vectors(how, kernel, learned, fixed)


def with_vectors[Model: HasItems](model: Model, *, deterministic: bool = True) -> Model:
    """A model whose items have finished vectors: one without content stays as it is.

    Args:
      model: in any mode.
      deterministic: see `ItemContent.vectors_with`; the loss of training is not.

    In the result, which is for one call, the kernel of `model.output` is the vectors E. A
    tied input reads the same. All other modules and variables are those of the model.
    """
    output = model.output
    if output.content is None:
        return model
    metadata = output.kernel.get_metadata()
    vectors = output.vectors(deterministic=deterministic)
    kernel = nnx.Param(vectors, **metadata)
    # Not by attributes, which cannot be set within another trace.
    made = copy.copy(model)
    unseen = output.content.unseen()
    vars(made)["output"] = vars(made)["output"].finished(kernel, unseen)
    first = getattr(model, "first", None)
    if first is not None and first.kernel is output.kernel:
        tied = copy.copy(first)
        vars(tied)["kernel"] = kernel
        vars(made)["first"] = tied
    return made


class HasItems(Protocol):
    """A model whose layer `output` has the vectors of the items, a `SparseOutput`."""

    output: Any


class _Learned(NamedTuple):
    """The parameters that all items share; None where there is no such content."""

    log_half: jax.Array
    tag_kernel: jax.Array | None
    vector_kernel: jax.Array | None


class _Fixed(NamedTuple):
    """Numbers of entries, tags in blocks, and vectors of the items."""

    entries: jax.Array
    tags: CSR | None
    given: jax.Array | None


class _How(NamedTuple):
    """The dtype of the result, axes of the mesh over which items lie, and who gathers tags."""

    dtype: jnp.dtype
    axes: Any
    implementation: Implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vectors(how: _How, kernel, learned: _Learned, fixed: _Fixed) -> jax.Array:
    dtype, axes, _ = how

    def part(kernel, learned, fixed):
        if learned.tag_kernel is not None:  # once, and not for each chunk
            kind = _operand(dtype, kernel.dtype)
            learned = learned._replace(tag_kernel=learned.tag_kernel.astype(kind))

        def chunk(_, own):
            return None, _of_chunk(how, learned, *own).astype(dtype)

        _, made = lax.scan(chunk, None, _chunks(kernel, fixed))
        return made.reshape(kernel.shape)

    specs = P(axes), P(), P(axes)
    if axes is None:
        return part(kernel, learned, fixed)
    return call_on_each_device(
        part, kernel, learned, fixed, in_specs=specs, out_specs=P(axes)
    )


def _forward(how, kernel, learned, fixed):
    return _vectors(how, kernel, learned, fixed), (kernel, learned, fixed)


def _backward(how: _How, residuals, slopes: jax.Array):
    axes = how.axes

    def part(kernel, learned, fixed, slopes):
        tag_kernel = learned.tag_kernel
        if fixed.tags is not None:
            tag_kernel = _of_tags(how, fixed.tags, slopes, tag_kernel)
        # The chunks need no tags: their part is added as it is.
        learned, fixed = learned._replace(tag_kernel=None), fixed._replace(tags=None)

        def chunk(carry, part):
            sums, found = carry
            number, own = part
            wide = accumulator(own[0].dtype)
            _, pull = jax.vjp(
                lambda learned, rows: _of_chunk(how, learned, rows, *own[1:]),
                learned,
                own[0],
            )
            of_learned, of_rows = pull(found[number].astype(wide))
            # The gradient of the rows takes the place of that of the vectors.
            found = found.at[number].set(of_rows.astype(found.dtype))
            return (jax.tree.map(jnp.add, sums, of_learned), found), None

        own = _chunks(kernel, fixed)
        by_chunk = slopes.reshape(own[0].shape).astype(kernel.dtype)
        zeros = jax.tree.map(jnp.zeros_like, learned)
        numbers = jnp.arange(len(own[0]))
        (sums, of_rows), _ = lax.scan(chunk, (zeros, by_chunk), (numbers, own))
        sums = sums._replace(tag_kernel=tag_kernel)
        if axes is not None:
            sums = lax.psum(sums, axes)
        return of_rows.reshape(kernel.shape), sums

    arguments = *residuals, slopes
    if axes is None:
        found = part(*arguments)
    else:
        found = call_on_each_device(
            part,
            *arguments,
            in_specs=(P(axes), P(), P(axes), P(axes)),
            out_specs=(P(axes), P()),
        )
    return *found, None


_vectors.defvjp(_forward, _backward)


def _of_chunk(how: _How, learned: _Learned, rows, entries, tags, given) -> jax.Array:
    """The vectors of some items, in the dtype of sums."""
    wide, operand = accumulator(rows.dtype), _operand(how.dtype, rows.dtype)
    weight = entries / (entries + jnp.exp(learned.log_half))
    made = weight.astype(wide)[:, None] * rows.astype(wide)
    if given is not None:
        assert learned.vector_kernel is not None
        made += jnp.dot(
            given.astype(operand),
            learned.vector_kernel.astype(operand),
            preferred_element_type=wide,
        )
    if tags is not None:
        assert learned.tag_kernel is not None
        made += gather_matmul(
            _joined(tags),
            learned.tag_kernel,
            dtype=wide,
            implementation=how.implementation,
        )
    return made


def _operand(dtype, stored) -> jnp.dtype:
    """The dtype in which products read T and V, for rows that are stored in another."""
    is_half = dtype == jnp.bfloat16
    return jnp.dtype(jnp.bfloat16) if is_half else accumulator(stored)


def _of_tags(how: _How, tags: CSR, slopes: jax.Array, tag_kernel) -> jax.Array:
    """The gradient of T, from that of all vectors as it is: the tags are sorted by parts."""
    blocks, nse = jnp.shape(tags.indices)
    count = 1
    while blocks % (2 * count) == 0 and blocks * nse > count * SORTED_TAGS:
        count *= 2

    def divided(array):
        return array.reshape(count, len(array) // count, *array.shape[1:])

    def add(total, part):
        (some, slopes), form = part, how.implementation
        found = dense_gradient(_joined(some), slopes, len(total), implementation=form)
        return total + found, None

    zeros = jnp.zeros(tag_kernel.shape, accumulator(slopes.dtype))
    total, _ = lax.scan(add, zeros, jax.tree.map(divided, (tags, slopes)))
    return total.astype(tag_kernel.dtype)


def _chunks(kernel: jax.Array, fixed: _Fixed):
    """Rows of a kernel and what belongs to them, with a leading axis of chunks."""
    rows = len(kernel)
    count = 1
    # A power of 2, so that each chunk has whole blocks of tags.
    while rows // count > CHUNK_ITEMS and rows % (2 * count) == 0:
        if fixed.tags is not None and len(fixed.tags.indptr) < 2 * count:
            break
        count *= 2

    def divided(array):
        return array.reshape(count, len(array) // count, *array.shape[1:])

    return jax.tree.map(divided, (kernel, *fixed))


def _joined(blocks: CSR) -> CSR:
    """Blocks `[count, ...]` one after the other, each as large as its capacity."""
    count, nse = jnp.shape(blocks.indices)
    starts = jnp.arange(count, dtype=jnp.int32) * nse
    indptr = jnp.asarray(blocks.indptr)
    # Padding of a block belongs to its last row, with values of 0.
    begins = (indptr[:, :-1] + starts[:, None]).reshape(-1)
    indptr = jnp.append(begins, jnp.int32(count * nse))
    flat = jax.tree.map(lambda x: x.reshape(-1), (blocks.data, blocks.indices))
    return CSR.tree_unflatten(blocks.num_cols, (*flat, indptr, None))


def _have_content(
    tags: CSR | None, given: Float[Array, "rows numbers"] | None
) -> Bool[Array, "rows"] | bool:
    """Whether an item has tags, or a vector that is not all zeros."""
    found: Bool[Array, "rows"] | bool = False
    if tags is not None:
        found = (jnp.diff(tags.indptr, axis=1) > 0).reshape(-1)
    if given is not None:
        found |= jnp.any(given != 0, axis=1)
    return found


def _shape(tags: scipy.sparse.csr_array) -> tuple[int, int]:
    return tags.shape  # pyrefly: ignore


def _block_entries(tags: scipy.sparse.csr_array) -> np.ndarray:
    """`[256]` the number of tags in each block of the items."""
    ends = _padded_ends(tags)
    ends = ends[:: (len(ends) - 1) // _BLOCKS]
    return np.maximum(np.diff(ends), 1)


def _padded_ends(tags: scipy.sparse.csr_array) -> np.ndarray:
    rows, _ = _shape(tags)
    extra = padded_rows(rows) - rows
    return np.pad(np.asarray(tags.indptr, np.int64), (0, extra), mode="edge")


def _in_blocks(tags: scipy.sparse.csr_array, entries: int) -> dict[str, np.ndarray]:
    """Tags by blocks of items, each row divided by its norm."""
    ends = _padded_ends(tags)
    rows = (len(ends) - 1) // _BLOCKS
    data = unit_rows(tags).data
    starts = ends[::rows]
    block = np.repeat(np.arange(_BLOCKS), np.diff(starts))
    at = np.arange(len(data)) - starts[block]
    indptr = np.stack(
        [ends[b * rows : (b + 1) * rows + 1] - starts[b] for b in range(_BLOCKS)]
    )
    values = np.zeros((_BLOCKS, entries), np.float32)
    indices = np.zeros((_BLOCKS, entries), np.int32)
    values[block, at], indices[block, at] = data, tags.indices
    return {"indptr": indptr.astype(np.int32), "indices": indices, "values": values}


def _put(variable: nnx.Variable, value: np.ndarray) -> None:
    """Sets a variable, whose array stays where it is."""
    # See `LinearPart.set_to` on arrays that are put on a named device.
    before = variable[...]
    place = before.sharding if before.committed else None
    variable.set_value(jax.device_put(value.astype(before.dtype), place))


@functools.partial(jax.jit, static_argnums=1)
def _mean_norm(vectors: jax.Array, items: int) -> jax.Array:
    squares = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=1)
    return jnp.sqrt(jnp.maximum(jnp.sum(squares) / items, 1e-12))


def _zeros(shape, dtype):
    return jnp.zeros(shape, dtype)
