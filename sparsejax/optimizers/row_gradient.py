"""Gradients that consist of the rows a batch has touched, and their arithmetic."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import jax
import jax.extend.random
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.layout import call_on_each_device, rows_per_device
from sparsejax.ops import scatter_gradient
from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR


def _no_random_numbers(*_: Any) -> NoReturn:
    raise TypeError("these are row ids, no key of random numbers")


# JAX forbids arithmetic on random keys; its error message contains this tag.
_SEAL = jax.extend.random.define_prng_impl(
    key_shape=(1,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    name="sparsejax_row_gradient",
    tag="row ids of a sparsejax.optimizers.RowGradient, which is no array: use its + and *, or "
    "sparsejax.optimizers.accumulate, sparsejax.optimizers.global_norm, sparsejax.optimizers.clip_by_global_norm",
)


class RowGradient(abc.ABC):
    """A gradient of a `[num_rows, hidden]` kernel that is zero except in a few rows.

    >>> g = RowSums(jnp.array([1, 3]), jnp.ones((2, 1)), num_rows=4)
    >>> isinstance(g, RowGradient), (2 * g).todense()[:, 0].tolist()
    (True, [0.0, 2.0, 0.0, 2.0])

    ::

        dense[ids[u]] = values[u]

    There are two kinds. A `RowSums` has `ids` and `values`. A `RowTerms` has terms
    whose sums are the values; `value_and_grad` returns one if a GPU program of the
    optimizer can add them. `summed()` converts both to a `RowSums`.

    A row gradient can be added to another one or to an array, and multiplied or divided
    by a scalar. The result is a `RowSums` (an array, if an array was added).

    Both kinds are pytrees and pass unchanged through `jax.jit`, `lax.scan`, `jax.vmap` and
    `jax.shard_map`. Functions that work leaf by leaf (`jax.tree.map`, `optax.global_norm`,
    `lax.psum`) would be wrong: the same index in two gradients may belong to different
    rows. The leaves with row numbers are therefore arrays with which JAX refuses
    arithmetic, with a `TypeError` in most cases. Use
    `is_leaf=lambda g: isinstance(g, RowGradient)` in `jax.tree.map`, and
    `accumulate`, `global_norm` and `clip_by_global_norm` of `sparsejax.optimizers`.

    Attributes:
      num_rows: rows of the kernel (static).
      current: whether the loss read rows that were up to date (static). An optimizer
        whose rows drift needs such a gradient, see `Optimizer.value_and_grad`.
      divided: whether the rows of the kernel are divided over the mesh axis "model"
        (static). Each device then has the gradient of its own rows.
    """

    # With None, NumPy arrays use the operators + and * of this class.
    __array_ufunc__ = None

    num_rows: int
    current: bool
    divided: bool

    @property
    @abc.abstractmethod
    def ids(self) -> Int[Array, "... capacity"]:
        """`[capacity]` int32: the touched rows.

        They are unique and ascending, padded with `num_rows`. If the gradient is
        `divided`, this is true for each device's part.
        """

    @property
    @abc.abstractmethod
    def values(self) -> Float[Array, "... hidden"]:
        """`[capacity, hidden]`: the gradient of each touched row, zero in padding."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(num_rows, hidden)`."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of `values`."""

    @abc.abstractmethod
    def summed(self) -> RowSums:
        """Converts the gradient to a `RowSums`."""

    @abc.abstractmethod
    def where(self, chosen: Bool[Array, ""]) -> RowGradient:
        """This gradient if `chosen` is true, otherwise one that touches no row."""

    def __getitem__(self, index) -> Any:
        if index is not ...:
            raise TypeError("a RowGradient has no elements; use .todense()[...]")
        return self  # like an array, so that grads["kernel"][...] is the gradient

    def todense(self) -> Float[Array, "num_rows hidden"]:
        """Converts the gradient to a dense array."""
        return self._added_to(jnp.zeros(self.shape, self.dtype))

    def _added_to(self, dense: jax.Array) -> jax.Array:
        values = self.values.astype(dense.dtype)
        return dense.at[self.ids].add(values, mode="drop", unique_indices=True)

    def _with_values(self, values: jax.Array) -> RowSums:
        return RowSums(self.ids, values, self.num_rows, self.current, self.divided)

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

    def __neg__(self) -> RowSums:
        return self._with_values(-self.values)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other


@jax.tree_util.register_pytree_with_keys_class
@final
class RowSums(RowGradient):
    """A `RowGradient` with the ids and the values of the touched rows.

    >>> RowSums(jnp.array([1, 3]), jnp.ones((2, 1)), num_rows=4).todense()[:, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        ids: Int[Array, "*stack capacity"],
        values: Float[Array, "*stack capacity hidden"],
        num_rows: int,
        current: bool = False,
        divided: bool = False,
    ):
        self._ids, self._values = _sealed(ids), values
        self.num_rows, self.current, self.divided = num_rows, current, divided

    @property
    def ids(self) -> Int[Array, "... capacity"]:
        return _opened(self._ids)

    @property
    def values(self) -> Float[Array, "... hidden"]:
        return self._values

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self._values.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        return self._values.dtype

    def summed(self) -> RowSums:
        return self

    def where(self, chosen: Bool[Array, ""]) -> RowSums:
        ids = jnp.where(chosen, self.ids, self.num_rows)
        return RowSums(ids, self._values, self.num_rows, self.current, self.divided)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        leaves = [(key("ids"), self._ids), (key("values"), self._values)]
        return leaves, (self.num_rows, self.current, self.divided)

    @classmethod
    def tree_unflatten(cls, static, leaves) -> RowSums:
        # The constructor would check the leaves, but they may be shapes, or anything that tree.map
        # returned.
        self = object.__new__(cls)
        self._ids, self._values = leaves
        self.num_rows, self.current, self.divided = static
        return self

    def __repr__(self) -> str:
        num_rows, hidden = self.shape
        return f"RowSums(ids={self.ids!r}, shape=({num_rows}, {hidden}))"


@jax.tree_util.register_pytree_with_keys_class
@final
class RowTerms(RowGradient):
    """A `RowGradient` whose terms are not added yet.

    `Optimizer.update` can add the terms of a row in the same GPU program that updates the
    row. The values are then never written to memory. `values`, `summed()` and arithmetic
    add the terms each time they are called.
    """

    def __init__(self, terms: scatter_gradient.Terms, current: bool = False):
        self._by_column = jax.tree.map(_sealed, terms.by_column)
        self._data, self._dy = terms.data, terms.dy
        self._unsent = _each_index(_sealed, terms.unsent)
        self.num_rows, self.current = terms.num_rows, current
        self.divided = terms.divided

    @property
    def terms(self) -> scatter_gradient.Terms:
        """The terms; `values` has their sums."""
        by_column = jax.tree.map(_opened, self._by_column)
        return scatter_gradient.Terms(
            by_column,
            self._data,
            self._dy,
            self.num_rows,
            self.divided,
            _each_index(_opened, self._unsent),
        )

    @property
    def ids(self) -> Int[Array, "... capacity"]:
        return self.terms.ids()

    @property
    def values(self) -> Float[Array, "... hidden"]:
        return self.terms.values()

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self._dy.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        return accumulator(self._dy.dtype)

    def summed(self) -> RowSums:
        terms = self.terms.whole()
        ids, values = terms.ids(), terms.values()
        return RowSums(ids, values, self.num_rows, self.current, self.divided)

    def where(self, chosen: Bool[Array, ""]) -> RowTerms:
        return RowTerms(self.terms.where(chosen), self.current)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        leaves = [
            (key("by_column"), self._by_column),
            (key("data"), self._data),
            (key("dy"), self._dy),
            (key("unsent"), self._unsent),
        ]
        return leaves, (self.num_rows, self.current, self.divided)

    @classmethod
    def tree_unflatten(cls, static, leaves) -> RowTerms:
        self = object.__new__(cls)  # without the constructor's checks, as in `RowSums`
        self._by_column, self._data, self._dy, self._unsent = leaves
        self.num_rows, self.current, self.divided = static
        return self

    def __repr__(self) -> str:
        num_rows, hidden = self.shape
        return f"RowTerms(shape=({num_rows}, {hidden}))"


def _sealed(indices: jax.Array) -> jax.Array:
    """Wraps integers as a tree leaf on which JAX forbids arithmetic."""
    bits = lax.bitcast_convert_type(jnp.asarray(indices, jnp.int32), jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_SEAL)


def _opened(leaf: jax.Array) -> jax.Array:
    """The integers that `_sealed` wrapped."""
    return lax.bitcast_convert_type(jax.random.key_data(leaf)[..., 0], jnp.int32)


def _is_index(leaf: Any) -> bool:
    dtype = leaf.dtype
    return dtype == jnp.int32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _each_index[Tree](change: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """Applies a function to the int32 arrays of a tree, sealed or not."""
    return jax.tree.map(lambda a: change(a) if _is_index(a) else a, tree)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, RowGradient)


def merge(gradients: Sequence[RowGradient]) -> RowSums:
    """The sum of row gradients of one kernel.

    Its capacity is the sum of theirs, or `num_rows` if that is less: nothing can
    overflow. Values are added in the given order.

    Raises:
      ValueError: there are no gradients, or their kernels differ in shape.
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
    if first.divided:
        rows, num_rows = P("model"), rows_per_device(first.num_rows)

        def part(ids, values):
            start = lax.axis_index("model") * num_rows
            found, values = _sum_of([i - start for i in ids], values, num_rows)
            found = jnp.where(found < num_rows, found + start, first.num_rows)
            return found, values

        ids, values = call_on_each_device(part, (ids, values), (rows, rows), rows)
    else:
        ids, values = _sum_of(ids, values, first.num_rows)
    current = all(g.current for g in gradients)
    return RowSums(ids, values, first.num_rows, current, first.divided)


def _sum_of(ids, values, num_rows: int):
    """Sums gradients; returns ids and values of the sum. Ids out of range are ignored."""
    ids, values = jnp.concatenate(ids), jnp.concatenate(values)
    if not ids.shape[0]:
        return ids, values
    # The gradients as a matrix with one entry in each row.
    rows = jnp.arange(ids.shape[0] + 1, dtype=jnp.int32)
    x = CSR(None, ids, rows, num_cols=num_rows)
    ids, sums = scatter_gradient.row_gradient([x], [values], num_rows)
    return ids, sums.astype(values.dtype)


def accumulate[Gradients](stacked: Gradients) -> Gradients:
    """Sums gradients over their leading axis, which `jax.lax.scan` over micro-batches makes.

    >>> g = RowSums(jnp.array([[1, 3], [0, 1]]), jnp.ones((2, 2, 1)), num_rows=4)
    >>> accumulate(g).todense()[:, 0].tolist()
    [1.0, 2.0, 0.0, 1.0]

    The capacity of a `RowGradient` becomes that of the stacked one, at most `num_rows`.
    """

    def total(g):
        if not isinstance(g, RowGradient):
            return jnp.sum(g, axis=0)
        leaves, tree = jax.tree.flatten(g)
        return merge([tree.unflatten(part) for part in zip(*leaves, strict=True)])

    return jax.tree.map(total, stacked, is_leaf=_is_rows)


def global_norm(grads: Any) -> Float[Array, ""]:
    """`sqrt(sum of squares)` over all gradients, dense ones and row gradients.

    >>> g = RowSums(jnp.array([1, 3]), jnp.full((2, 1), 2.0), num_rows=4)
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
    grads = jax.tree.map(
        lambda g: g.summed() if _is_rows(g) else jnp.asarray(g), grads, is_leaf=_is_rows
    )
    norm = global_norm(grads)
    scale = jnp.where(norm < max_norm, 1, max_norm / norm)

    def clip(g):
        return g * scale.astype(g.dtype)

    return jax.tree.map(clip, grads, is_leaf=_is_rows)
