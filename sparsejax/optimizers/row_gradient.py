"""A gradient that holds only the rows a batch has touched, and arithmetic with it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.extend.random
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sparsejax.mesh.layout import call_on_each_device, rows_per_device
from sparsejax.ops import scatter_gradient
from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR


def _no_random_numbers(*_: Any) -> NoReturn:
    raise TypeError("these are row ids, no key of random numbers")


# JAX refuses arithmetic with keys, and its message has their tag in it.
_ROW_IDS = jax.extend.random.define_prng_impl(
    key_shape=(1,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    name="sparsejax_row_ids",
    tag="row ids of a sparsejax.RowGradient, which is no array: use its + and *, or "
    "sparsejax.accumulate, sparsejax.global_norm, sparsejax.clip_by_global_norm",
)


@jax.tree_util.register_pytree_with_keys_class
class RowGradient:
    """A gradient of a `[num_rows, hidden]` kernel that is zero but in a few rows.

    >>> g = RowGradient(jnp.array([1, 3]), jnp.ones((2, 1)), num_rows=4)
    >>> (2 * g).todense()[:, 0].tolist()
    [0.0, 2.0, 0.0, 2.0]

    ::

        dense[ids[u]] = values[u]

    It can be added to another one or to an array, and multiplied or divided by a
    scalar. It is a pytree of the ids and the values, so it passes through `jax.jit`,
    `lax.scan`, `jax.vmap` and `jax.shard_map`. What goes leaf by leaf (`jax.tree.map`,
    `optax.global_norm`, `lax.psum`) would also add or scale the ids; the leaf of the ids
    is therefore an array with which JAX refuses arithmetic, with a `TypeError` in most
    places. Use `is_leaf=lambda g: isinstance(g, RowGradient)` in `jax.tree.map`, and
    `sparsejax.accumulate`, `sparsejax.global_norm` and `sparsejax.clip_by_global_norm`.

    Attributes:
      ids: `[capacity]` int32, unique and ascending, padded with `num_rows`; on a mesh so
        for each part of the rows.
      values: `[capacity, hidden]`, zero in padding.
      num_rows: rows of the kernel (static).
      current: whether the loss has read rows that were up to date, so that an optimizer
        whose rows drift can use this gradient (static), see `Optimizer.value_and_grad`.
      divided: whether kernel, ids and values lie by rows over "model", each value where
        its row is (static).
      terms: what the values are the sums of, as long as nothing has asked for them: an
        optimizer may sum them where it uses them. Lost by any operation.
    """

    __array_ufunc__ = None  # NumPy arrays leave + and * to this class

    def __init__(
        self,
        ids: Int[Array, "capacity"],
        values: Float[Array, "capacity hidden"],
        num_rows: int,
        current: bool = False,
        divided: bool = False,
    ):
        self._ids, self._values = _sealed(ids), values
        self.num_rows, self.current, self.divided = num_rows, current, divided
        self.terms: scatter_gradient.Terms | None = None

    @classmethod
    def of_terms(cls, terms: scatter_gradient.Terms, current: bool) -> RowGradient:
        """The sums of `terms`, made when they are asked for."""
        self = object.__new__(cls)
        self._ids, self.num_rows = _sealed(terms.ids()), terms.num_rows
        self.terms, self.current, self.divided = terms, current, terms.divided
        return self

    @property
    def ids(self) -> Int[Array, "... capacity"]:
        """`[capacity]` int32, unique and ascending but for padding."""
        return _opened(self._ids)

    @property
    def values(self) -> Float[Array, "... hidden"]:
        """`[capacity, hidden]`, zero in padding."""
        return self._values if self.terms is None else self.terms.values()

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        # Past the property: without terms it may be anything tree.map returned.
        values = self._values if self.terms is None else self.values
        leaves = [(key("ids"), self._ids), (key("values"), values)]
        return leaves, (self.num_rows, self.current, self.divided)

    @classmethod
    def tree_unflatten(cls, static, leaves) -> RowGradient:
        # Past the constructor: leaves may be shapes, or anything tree.map returned.
        self = object.__new__(cls)
        self._ids, self._values = leaves
        self.num_rows, self.current, self.divided = static
        self.terms = None
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """`(num_rows, hidden)`."""
        summed = self._values if self.terms is None else self.terms.dy
        return self.num_rows, summed.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        """That of the values."""
        if self.terms is not None:
            return accumulator(self.terms.dy.dtype)
        return self._values.dtype

    def __repr__(self) -> str:
        num_rows, hidden = self.shape
        return f"RowGradient(ids={self.ids!r}, shape=({num_rows}, {hidden}))"

    def __getitem__(self, index) -> RowGradient:
        if index is not ...:
            raise TypeError("a RowGradient has no elements; use .todense()[...]")
        return self  # so that grads["kernel"][...] is the gradient, as for an array

    def todense(self) -> Float[Array, "num_rows hidden"]:
        """The same gradient as one array."""
        return self._added_to(jnp.zeros(self.shape, self.dtype))

    def _added_to(self, dense: jax.Array) -> jax.Array:
        values = self.values.astype(dense.dtype)
        return dense.at[self.ids].add(values, mode="drop", unique_indices=True)

    def _with_values(self, values: jax.Array) -> RowGradient:
        return RowGradient(self.ids, values, self.num_rows, self.current, self.divided)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, RowGradient):
            return merge([self, other])
        if getattr(other, "shape", None) != self.shape:
            return NotImplemented
        return self._added_to(jnp.asarray(other))

    __radd__ = __add__

    def __mul__(self, scalar: Any) -> Any:
        if jnp.ndim(scalar) != 0:
            return NotImplemented
        return self._with_values(self.values * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> Any:
        if jnp.ndim(scalar) != 0:
            return NotImplemented
        return self._with_values(self.values / scalar)

    def __neg__(self) -> RowGradient:
        return self._with_values(-self.values)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other


def _sealed(ids: jax.Array) -> jax.Array:
    """Row ids as a leaf of a tree, with which there is no arithmetic."""
    bits = lax.bitcast_convert_type(jnp.asarray(ids, jnp.int32), jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_ROW_IDS)


def _opened(leaf: jax.Array) -> jax.Array:
    """The row ids that are `_sealed` in the leaf."""
    return lax.bitcast_convert_type(jax.random.key_data(leaf)[..., 0], jnp.int32)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, RowGradient)


def merge(gradients: Sequence[RowGradient]) -> RowGradient:
    """The sum of row gradients of one kernel.

    Its capacity is the sum of theirs, or `num_rows` if that is less: nothing can
    overflow. Values are added in the order given.

    Raises:
      ValueError: there is none, or they are of kernels of different shapes.
    """
    if not gradients:
        raise ValueError("merge needs at least one RowGradient")
    first = gradients[0]
    for g in gradients:
        if g.shape != first.shape:
            raise ValueError(
                f"expected gradients of one kernel, got shapes {first.shape} and "
                f"{g.shape}"
            )
        if g.divided != first.divided:
            raise ValueError("one of the gradients lies on a mesh, another does not")
    ids, values = [g.ids for g in gradients], [g.values for g in gradients]
    add = functools.partial(_sum_of, num_rows=first.num_rows)
    if first.divided:
        rows, num_rows = P("model"), rows_per_device(first.num_rows)

        def part(ids, values):
            start = lax.axis_index("model") * num_rows
            found, values = _sum_of([i - start for i in ids], values, num_rows)
            found = jnp.where(found < num_rows, found + start, first.num_rows)
            return found, values

        add = functools.partial(
            call_on_each_device, part, in_specs=(rows, rows), out_specs=rows
        )
    current = all(g.current for g in gradients)
    ids, values = add(ids, values)
    return RowGradient(ids, values, first.num_rows, current, first.divided)


def _sum_of(ids, values, num_rows: int):
    """Ids and values of the sum of gradients; ids out of range do not count."""
    ids, values = jnp.concatenate(ids), jnp.concatenate(values)
    if not ids.shape[0]:
        return ids, values
    # A matrix with one entry a row.
    rows = jnp.arange(ids.shape[0] + 1, dtype=jnp.int32)
    x = CSR(None, ids, rows, num_cols=num_rows)
    ids, sums = scatter_gradient.row_gradient([x], [values], num_rows)
    return ids, sums.astype(values.dtype)


def accumulate[Gradients](stacked: Gradients) -> Gradients:
    """Sums gradients over a leading axis: what `jax.lax.scan` over micro-batches stacks.

    >>> g = RowGradient(jnp.array([[1, 3], [0, 1]]), jnp.ones((2, 2, 1)), num_rows=4)
    >>> accumulate(g).todense()[:, 0].tolist()
    [1.0, 2.0, 0.0, 1.0]

    The capacity of a `RowGradient` becomes that of the stack, at most `num_rows`.
    """

    def total(g):
        if not isinstance(g, RowGradient):
            return jnp.sum(g, axis=0)
        parts = [
            RowGradient(ids, values, g.num_rows, g.current, g.divided)
            for ids, values in zip(g.ids, g.values, strict=True)
        ]
        return merge(parts)

    return jax.tree.map(total, stacked, is_leaf=_is_rows)


def global_norm(grads: Any) -> Float[Array, ""]:
    """`sqrt(sum of squares)` over all gradients, dense ones and row gradients.

    >>> g = RowGradient(jnp.array([1, 3]), jnp.full((2, 1), 2.0), num_rows=4)
    >>> float(global_norm({"kernel": g, "bias": jnp.ones(1)}))
    3.0

    The ids of a `RowGradient` are unique, so this is the norm of the dense gradient.
    """
    leaves = jax.tree.leaves(grads, is_leaf=_is_rows)
    arrays = [g.values if isinstance(g, RowGradient) else g for g in leaves]
    squares = [jnp.sum(jnp.square(a.astype(accumulator(a.dtype)))) for a in arrays]
    zero = jnp.zeros((), jnp.float32)
    return jnp.sqrt(functools.reduce(operator.add, squares, zero))


def clip_by_global_norm[Gradients](
    grads: Gradients, max_norm: jax.typing.ArrayLike
) -> Gradients:
    """Scales gradients by `min(1, max_norm / global_norm(grads))`, as optax does.

    >>> clip_by_global_norm({"bias": jnp.array([3.0, 4.0])}, 2.5)["bias"].tolist()
    [1.5, 2.0]
    """
    norm = global_norm(grads)
    scale = jnp.where(norm < max_norm, 1, max_norm / norm)

    def clip(g):
        return g * scale.astype(g.dtype)

    return jax.tree.map(clip, grads, is_leaf=_is_rows)
