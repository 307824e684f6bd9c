"""Content of items (tags and vectors). A part of each item's vector is computed from its
content.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.layout import (
    item_axes,
    jit_sharded,
    mesh_is_set,
    out_sharding,
    padded_rows,
    to_host,
)
from sparsejax.nn import content_vectors
from sparsejax.nn.content_vectors import Fixed, How, Learned, Scoring
from sparsejax.nn.linear_part import FromData
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers import growth
from sparsejax.sparse import CSR, unit_rows

# The number of devices in a mesh divides 256, so that each device has whole blocks of tags.
_BLOCKS = 256
# The initial number of training entries with which an item's own vector has a weight of one half.
_HALF = 2.0
# The fraction of items whose own vectors are dropped in a step, so that only their content counts.
# Chosen on Amazon Beauty.
DROPPED = 0.1

_init = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ContentSizes:
    """The sizes of the content of items.

    >>> ContentSizes.of(None, np.zeros((3, 5), np.float16))
    ContentSizes(tags=0, entries=0, vectors=5, dtype='float16')

    Attributes:
      tags: number of different tags, 0 for none.
      entries: largest number of tags in one of 256 equal parts of the items.
      vectors: length of an item's vector, 0 for none.
      dtype: dtype of the vectors.

    Raises:
      ValueError: there are neither tags nor vectors, or a number is negative.
    """

    tags: int = 0
    entries: int = 0
    vectors: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if (
            min(self.tags, self.entries, self.vectors) < 0
            or not self.tags + self.vectors
        ):
            raise ValueError(f"content has tags, vectors or both, got {self}")

    @classmethod
    def of(
        cls, tags: scipy.sparse.csr_array | None, vectors: np.ndarray | None
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
    """The part of the items' vectors that is computed from tags and vectors of the items.

    ::

        E_i = a(n_i) R_i + t_i T + v_i V                a(n) = n / (n + exp(log_half))

    R_i is the row of item i in a kernel, t_i are its tags (divided by their norm), v_i is
    its vector, and n_i the number of its entries in the training data. T, V and `log_half`
    are learned. So the vector of an item without entries is its content alone, and that of an
    item with many entries is mostly R_i.

    >>> tags = scipy.sparse.csr_array([[1.0, 0], [1, 1], [0, 0]])
    >>> content = ItemContent(3, 4, ContentSizes.of(tags, None), rngs=nnx.Rngs(0))
    >>> content.set_to(tags, None)
    >>> content.vectors_with(jnp.ones((256, 4))).shape
    (256, 4)

    In training, items drawn at random have a(n) = 0 in a step. So the model learns
    to use content without R, and not only together with R: otherwise items without
    entries would be recommended far too often.

    The vectors of all items are computed in chunks. Their gradient is reduced to
    the gradients of R, T, V and `log_half` in the same way. No second array `[items,
    width]` of float32 is made.

    Attributes:
      by_parts: whether models of histories train without an array of all vectors: they compute
        the vectors of some items, use them, and compute them again for the gradients. `fit` sets
        it if the memory does not suffice otherwise.

    Args:
      items: number of items.
      width: numbers in a vector.
        sizes: sizes of the content that is passed to `set_to`.
      rngs: random streams; the module uses "params" and "dropout".
    """

    def __init__(self, items: int, width: int, sizes: ContentSizes, *, rngs: nnx.Rngs):
        self.items, self.sizes = items, sizes
        rows = padded_rows(items)

        def zeros(*shape, dtype=jnp.float32):
            spec = P(item_axes(), *[None] * (len(shape) - 1))
            made = jit_sharded(jnp.zeros, spec, static=(0, 1))(shape, jnp.dtype(dtype))
            return FromData(made, **out_sharding(spec))

        self.log_half = nnx.Param(jnp.full((), math.log(_HALF), jnp.float32))
        self.deterministic = False
        self.implementation: Implementation = None
        self.by_parts = False
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
        self, tags: scipy.sparse.csr_array | None, vectors: np.ndarray | None
    ) -> None:
        """Sets the content of the items, `[items, tags]` and `[items, numbers]`.

        Raises:
          ValueError: the number of items, tags or numbers differs from the module's.
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
        """Sets the number of entries of each item in the training data, `[items]`.

        Raises:
          ValueError: the number of items differs from the module's.
        """
        if counts.shape != (self.items,):
            raise ValueError(
                f"counts have the shape {counts.shape}; one for each of {self.items:,} items"
            )
        extra = padded_rows(self.items) - self.items
        _put(self.entries, np.pad(np.asarray(counts, np.float32), (0, extra)))

    def unseen(self) -> Bool[Array, "rows"]:
        """Mask of the items without entries, if others have some.

        The softmax in training excludes such items. As negatives of all examples they
        would be ranked after all others, and so would the content that they share with
        known items.
        """
        none = self.entries[...] == 0
        is_item = jnp.arange(len(none)) < self.items
        return none & is_item & ~jnp.all(none)

    def scale_start(self) -> None:
        """Divides the initial V by the mean norm of the items' content vectors."""
        if self.given is not None and self.vector_kernel is not None:
            norm = _mean_norm(self.given[...], self.items)
            self.vector_kernel.set_value(self.vector_kernel[...] / norm)

    def add_items(self, count: int) -> None:
        """Adds items without content and entries after the known items, in place."""
        growth.add_rows(self.entries, self.items, count, zeros=True)
        if self.given is not None:
            growth.add_rows(self.given, self.items, count, zeros=True)
        if self.tags is not None:
            before = self.stored_tags()
            before.resize((self.items + count, self.sizes.tags))
            entries = int(_block_entries(before).max())
            self.sizes = dataclasses.replace(self.sizes, entries=entries)
            for name, value in _in_blocks(before, entries).items():
                _put(self.tags[name], value)
        self.items += count

    def stored_tags(self) -> scipy.sparse.csr_array:
        """The tags of the items, `[items, tags]`, each row divided by its norm."""
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
        """The items' vectors E, computed from the rows R. Padding rows stay zero.

        Args:
          kernel: `[padded_rows(items), width]`.
          dtype: dtype of the result; that of the kernel by default. In bfloat16 the
            products' operands are bfloat16, too. Sums are float32.
          deterministic: whether all items keep their rows R, also in training.
        """
        content = self if deterministic else self.of_step()
        return content_vectors.all_vectors(*content._operands(kernel, dtype))

    def rows_at(
        self,
        kernel: Float[Array, "rows width"],
        ids: Int[Array, "count"],
        dtype: jax.typing.DTypeLike | None = None,
    ) -> tuple[Float[Array, "count width"], Float[Array, "rows width"]]:
        """`vectors_with(kernel, dtype)[ids]`, without an array of all vectors.

        An id of -1 gives zeros. Also returns the kernel, see `content_vectors.rows_at`.
        """
        return content_vectors.rows_at(*self._operands(kernel, dtype), ids)

    def softmax_sums(
        self,
        kernel: Float[Array, "rows width"],
        h: Float[Array, "batch width"],
        bias: Float[Array, "rows"] | None,
        targets: Int[Array, "batch"],
        scoring: Scoring,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
        """The softmax's normalisers, and scores of targets, without an array of all vectors."""
        how, *operands = self._operands(kernel, dtype)
        return content_vectors.softmax_sums(how, scoring, *operands, bias, h, targets)

    def of_step(self) -> ItemContent:
        """The content for one training step, in which items drawn at random are without R.

        Use the result for one call only. Outside training it is this module.
        """
        if self.deterministic:
            return self
        entries = self.entries[...]
        kept = jax.random.bernoulli(self.draws(), 1 - DROPPED, entries.shape)
        _, _, _, fixed = self._operands(entries, None)
        # An item without content keeps its own vector: otherwise its vector would be zero.
        entries = jnp.where(kept | ~_have_content(fixed.tags, fixed.given), entries, 0)
        made = copy.copy(self)
        # Flax forbids setting attributes in another trace, so `vars` is updated.
        vars(made).update(entries=FromData(entries), deterministic=True)
        return made

    def _operands(self, kernel: jax.Array, dtype) -> tuple[How, Any, Learned, Fixed]:
        """Converts the layer to arguments of the functions in `content_vectors`."""
        optional = self.tag_kernel, self.vector_kernel
        learned = Learned(
            self.log_half[...], *(None if p is None else p[...] for p in optional)
        )
        tags = None
        if self.tags is not None:
            leaves = (self.tags[n][...] for n in ("values", "indices", "indptr"))
            tags = CSR.tree_unflatten(padded_rows(self.sizes.tags), (*leaves, None))
        given = None if self.given is None else self.given[...]
        axes = item_axes() if mesh_is_set() else None
        dtype = jnp.dtype(kernel.dtype if dtype is None else dtype)
        how = How(dtype, axes, self.implementation)
        return how, kernel, learned, Fixed(self.entries[...], tags, given)


def with_vectors[Model: HasItems](model: Model, *, deterministic: bool = True) -> Model:
    """A model in which the items' vectors are computed; without content, the model itself.

    Args:
      model: a model in any mode.
      deterministic: whether all items keep their rows R, also in training. The loss in
        training passes False.

    The result is for one call. The kernel of its `output` is the vectors E, which a
    tied input reads too. All other modules and variables are those of the model. If
    the content is used `by_parts` in training, it is kept, with the items drawn without R.
    """
    output = model.output
    if output.content is None:
        return model
    # Flax forbids setting attributes in another trace, so the copy's `vars` are updated.
    made = copy.copy(model)
    unseen = output.content.unseen()
    first = getattr(model, "first", None)
    if output.content.by_parts and not deterministic:
        if first is not None:
            raise ValueError(
                "by_parts is for models of histories, and this is a network: leave it False"
            )
        content = output.content.of_step()
        vars(made)["output"] = output.finished(output.kernel, unseen, content)
        return made
    metadata = output.kernel.get_metadata()
    vectors = output.vectors(deterministic=deterministic)
    kernel = nnx.Param(vectors, **metadata)
    vars(made)["output"] = output.finished(kernel, unseen)
    if first is not None and first.kernel is output.kernel:
        tied = copy.copy(first)
        vars(tied)["kernel"] = kernel
        vars(made)["first"] = tied
    return made


@runtime_checkable
class HasItems(Protocol):
    """A model whose layer `output` has the vectors of the items, a `SparseOutput`."""

    output: Any


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
    """The number of tags in each block of the items, `[256]`."""
    ends = _padded_ends(tags)
    ends = ends[:: (len(ends) - 1) // _BLOCKS]
    return np.maximum(np.diff(ends), 1)


def _padded_ends(tags: scipy.sparse.csr_array) -> np.ndarray:
    rows, _ = _shape(tags)
    extra = padded_rows(rows) - rows
    return np.pad(np.asarray(tags.indptr, np.int64), (0, extra), mode="edge")


def _in_blocks(tags: scipy.sparse.csr_array, entries: int) -> dict[str, np.ndarray]:
    """Divides tags into blocks of items. Each row is divided by its norm."""
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
    """Sets a variable without changing the device of its array."""
    # Placed like the old array; see `LinearPart.set_to` on arrays committed to a device.
    before = variable[...]
    place = before.sharding if before.committed else None
    variable.set_value(jax.device_put(value.astype(before.dtype), place))


@functools.partial(jax.jit, static_argnums=1)
def _mean_norm(vectors: jax.Array, items: int) -> jax.Array:
    squares = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=1)
    return jnp.sqrt(jnp.maximum(jnp.sum(squares) / items, 1e-12))
