"""Losses over a sample of the items, for catalogues in which a pass over all items is too
expensive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax.mesh.promotion import promoting
from sparsejax.ops.item_chunks import accumulator, arrays
from sparsejax.ops.targets import IGNORED, Targets, as_targets, check_targets
from sparsejax.optimizers.gradients import rows_of


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class NegativeSampler:
    """Draws items with given probabilities, on the device, each in constant time.

    >>> sampler = NegativeSampler.by_popularity(np.array([8, 1, 0, 1]))
    >>> key = jax.random.fold_in(jax.random.key(0), 17)  # of a seed and a step
    >>> ids, log_q = sampler.sample(key, 1000)
    >>> int((ids == 2).sum()), ids.shape
    (0, (1000,))

    It is an alias table (Walker 1977): a slot is drawn uniformly, and then either the slot's
    own item or its alias. Draws are independent, so an item may be drawn several times.

    Attributes:
      num_items: number of items; they are numbered from 0.
      kept: `[num_items]`, probability of the slot's own item; None if all items are
        equally probable.
      alias: `[num_items]`, the other item of the slot; or None.
      log_q: `[num_items]`, the logarithm of each item's probability; or None.
    """

    num_items: int
    kept: jax.Array | None = None
    alias: jax.Array | None = None
    log_q: jax.Array | None = None

    def tree_flatten(self):
        return (self.kept, self.alias, self.log_q), self.num_items

    @classmethod
    def tree_unflatten(cls, num_items: int, leaves: Any) -> NegativeSampler:
        self = object.__new__(cls)
        names = ("num_items", "kept", "alias", "log_q")
        for name, value in zip(names, (num_items, *leaves), strict=True):
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def uniform(cls, num_items: int) -> NegativeSampler:
        """A sampler of equally probable items.

        Raises:
          ValueError: `num_items` is 0.
        """
        if num_items < 1:
            raise ValueError(f"there must be an item to draw, got {num_items}")
        return cls(num_items)

    @classmethod
    def by_popularity(
        cls, counts: np.ndarray, *, power: float = 1.0
    ) -> NegativeSampler:
        """A sampler in which item i has a probability proportional to `counts[i] ** power`.

        Args:
          counts: number of occurrences of each item; an item with 0 is never drawn.
          power: 1 is popularity itself, 0.75 is word2vec's, 0 is uniform over the items
            that occur.

        Raises:
          ValueError: counts are not one number for each item, negative or not finite, or
            all are 0.
        """
        counts = np.asarray(counts, np.float64)
        if counts.ndim != 1 or not (np.isfinite(counts) & (counts >= 0)).all():
            raise ValueError(
                "counts are finite numbers from 0 on, one for each item, got an array of "
                f"shape {counts.shape}"
            )
        mass = np.where(counts > 0, counts, 1) ** power * (counts > 0)
        if not mass.sum() > 0:
            raise ValueError("all counts are 0; an item must occur to be drawn")
        q = mass / mass.sum()
        kept, alias = _alias_table(q)
        with np.errstate(divide="ignore"):
            log_q = np.log(q)
        tables = np.float32(kept), np.int32(alias), np.float32(log_q)
        return cls(len(q), *map(jnp.asarray, tables))

    def sample(
        self, key: jax.Array, count: int
    ) -> tuple[Int[Array, "count"], Float[Array, "count"]]:
        """Draws `count` items independently; returns them, and their probabilities' logarithms."""
        of_place, of_item = jax.random.split(key)
        ids = jax.random.randint(of_place, (count,), 0, self.num_items, jnp.int32)
        if self.kept is None or self.alias is None or self.log_q is None:
            return ids, jnp.full(count, -math.log(self.num_items), jnp.float32)
        stays = jax.random.uniform(of_item, (count,)) < self.kept[ids]
        ids = jnp.where(stays, ids, self.alias[ids])
        return ids, self.log_q[ids]


def sample_with_batch(
    key: jax.Array, targets: Int[Array, "*batch"], num_items: int, count: int
) -> tuple[Int[Array, "count"], Float[Array, "count"]]:
    """Draws half of the items uniformly, and half from a batch's targets with their frequency.

    The probabilities are those of the mixture::

        q_i = (u / num_items + b share_i) / (u + b)

    for u draws of the first kind and b of the second, where `share_i` is the fraction of the
    targets that are item i. Without any target, draws of the second kind are -1, and do not count.

    The draws depend on the set of targets with their frequencies, and on the key; not on the
    targets' order or the number of padding rows. So they do not change with the padding or the
    mesh.

    Args:
      key: key of the random numbers.
      targets: items. A number that is no item is never drawn.
      num_items: number of items; they are numbered from 0.
      count: number of draws.

    Returns:
      The items, and the logarithm of each item's q, as `sampled_cross_entropy` takes them.
    """
    of_place, of_item = jax.random.split(key)
    flat = targets.reshape(-1).astype(jnp.int32)
    known = (flat >= 0) & (flat < num_items)
    # Sorted by item; numbers that are not items come last.
    ordered = jnp.sort(jnp.where(known, flat, num_items))
    total = jnp.sum(known)
    u = count - count // 2
    everywhere = jax.random.randint(of_item, (u,), 0, num_items, jnp.int32)
    place = jax.random.randint(of_place, (count // 2,), 0, jnp.maximum(total, 1))
    drawn = ordered.at[place].get(mode="fill", fill_value=IGNORED)
    ids = jnp.concatenate([everywhere, jnp.where(total > 0, drawn, IGNORED)])
    first, last = (jnp.searchsorted(ordered, ids, side=s) for s in ("left", "right"))
    share = (last - first) / jnp.maximum(total, 1)
    b = jnp.where(total > 0, count // 2, 0)
    q = (u / num_items + b * share) / (u + b)
    return ids, jnp.log(q).astype(jnp.float32)


@promoting()
def sampled_cross_entropy(
    h: Float[Array, "*batch hidden"],
    kernel: nnx.Variable | jax.Array,
    targets: jax.Array | np.ndarray,
    negatives: Int[Array, "count"],
    *,
    log_q: Float[Array, "count"] | None = None,
    loss: Literal["softmax", "sigmoid"] = "softmax",
    bias: Float[Array, "items"] | None = None,
    scale: Callable[[jax.Array], jax.Array] | None = None,
    weights: Float[Array, "*batch"] | None = None,
    dtype: Literal["bfloat16"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of one target a row against a sample of the items.

    >>> kernel = RowParam(jnp.ones((1000, 8)))
    >>> negatives, log_q = NegativeSampler.uniform(1000).sample(jax.random.key(0), 64)
    >>> h, targets = jnp.zeros((2, 3, 8)), jnp.array([[5, 0, 999], [7, -1, -1]])
    >>> float(sampled_cross_entropy(h, kernel, targets, negatives, log_q=log_q)) > 6.8
    True

    The batch shares its negatives j = 1 .. n. With s_i = scale_i h_r . kernel_i + bias_i, and
    q_j the probability with which negative j was drawn::

        "softmax"  loss_r = log(exp(s_t) + sum_j [j != t] exp(s_j) / (n q_j)) - s_t
        "sigmoid"  loss_r = softplus(-s_t) + sum_j [j != t] softplus(s_j) / (n q_j)

        result = sum_r weights_r loss_r / sum_r weights_r      over rows with a target

    The result estimates a loss over all items, if the negatives are independent draws
    from all items with probabilities q above 0:

    - "sigmoid": the sum over all items. Loss and gradients are unbiased.
    - "softmax": the exact softmax of `linear_cross_entropy`. The sum of exponentials is
      unbiased. Its logarithm is not: the loss is too small on average, by about half the
      relative variance of the sum, which falls as 1 / n. The gradients are biased in
      the same way. Train with few negatives first, and with all items at the end.

    Without `log_q`, each negative counts as one item: the loss is then that of choosing
    the target among these negatives. In-batch negatives are the targets of the batch
    (`negatives=targets.reshape(-1)`); their q is about their popularity, and they are not
    independent of the targets. A negative that is a row's target is ignored in that
    row, and a negative of -1 is ignored in all rows.

    Within `sparsejax.value_and_grad`, the gradient of a kernel that is a `RowParam` is a
    `RowGradient` with the rows of targets and negatives only. Memory is some `[rows, n]` arrays.

    Args:
      h: hidden vectors.
      kernel: `[items, hidden]`: the Variable, such as that of a `SparseLinear`, or an array.
      targets: `[*batch]` integers: an item, or -1 for a row to ignore.
      negatives: items, as `NegativeSampler.sample` draws them.
      log_q: the logarithm of the probability of each negative, which `sample` returns.
      loss: "softmax" or "sigmoid".
      bias: numbers added to the scores. None is 0.
      scale: function that makes the factor of each score, `[n]`, from the rows of the kernel,
        `[n, hidden]`; such as `SparseOutput.score_scale`, for cosines. None is 1.
      weights: factors of the rows' losses. None is 1 for each.
      dtype: dtype of the operands of the products with negatives and of their
        derivatives, whose sums are float32. None is that of `kernel`.

    Raises:
      ValueError: shapes do not match, a target in a NumPy array is no item, or the
        loss or dtype is unknown.
      TypeError: targets are not integers.
    """
    if loss not in ("softmax", "sigmoid"):
        raise ValueError(f'loss is "softmax" or "sigmoid", got {loss!r}')
    if dtype not in (None, "bfloat16"):
        raise ValueError(f'dtype is "bfloat16" or None, got {dtype!r}')
    h, negatives, log_q, bias, weights = arrays(h, negatives, log_q, bias, weights)
    kernel = kernel if isinstance(kernel, nnx.Variable) else jnp.asarray(kernel)
    num_items, hidden = kernel.shape
    batch = h.shape[:-1]
    if hidden != h.shape[-1]:
        raise ValueError(
            "expected h [..., hidden] and kernel [items, hidden], got "
            f"{h.shape} and {kernel.shape}"
        )
    check_targets(targets, batch, num_items)
    for name, array, shape in (
        ("weights", weights, batch),
        ("log_q", log_q, negatives.shape),
        ("bias", bias, (num_items,)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    target = as_targets(targets, num_items)
    vectors = rows_of(kernel, ids_read(target, negatives))
    return of_vectors(
        h.reshape(target.num_rows, hidden),
        vectors[: target.num_rows],
        vectors[target.num_rows :],
        target,
        negatives,
        log_q=log_q,
        loss=loss,
        bias=bias,
        scale=scale,
        weights=None if weights is None else weights.reshape(-1),
        dtype=dtype,
    )


def ids_read(target: Targets, negatives: Int[Array, "count"]) -> Int[Array, "ids"]:
    """The items that a loss reads, targets first; numbers that are no item become -1."""
    return jnp.concatenate(
        [
            jnp.where(target.ignored | target.broken, IGNORED, target.columns),
            jnp.maximum(negatives, IGNORED).astype(jnp.int32),
        ]
    )


def of_vectors(
    h: Float[Array, "rows hidden"],
    mine: Float[Array, "rows hidden"],
    drawn: Float[Array, "count hidden"],
    target: Targets,
    negatives: Int[Array, "count"],
    *,
    log_q: Float[Array, "count"] | None,
    loss: Literal["softmax", "sigmoid"] = "softmax",
    bias: Float[Array, "items"] | None,
    scale: Callable[[jax.Array], jax.Array] | None,
    weights: Float[Array, "rows"] | None = None,
    dtype: Literal["bfloat16"] | None,
) -> Float[Array, ""]:
    """`sampled_cross_entropy` with rows of the kernel that were read before.

    Args:
      h: hidden vectors.
      mine: the vector of each row's target.
      drawn: the vectors of the negatives.
      target: the target of each row.
      negatives: items that all rows share; -1 is ignored.
      log_q: the logarithm of the probability of each negative; None counts each as one
        item.
      loss: "softmax" or "sigmoid".
      bias: numbers added to the scores. None is 0.
      scale: function that computes the factor of each score from rows of the kernel. None is
        1.
      weights: factors of the rows' losses. None is 1 for each.
      dtype: dtype of the operands of the products with negatives; None is that of the
        kernel.
    """
    rows, count, summed = target.num_rows, len(negatives), accumulator(h.dtype)
    used = negatives != IGNORED
    given = jnp.ones(rows, summed) if weights is None else weights
    given = jnp.where(target.ignored, 0, given.astype(summed))
    # A row with weight 0 may have any values.
    flat = jnp.where((given == 0)[:, None], 0, h).astype(mine.dtype)
    of_target = jnp.sum(flat.astype(summed) * mine.astype(summed), axis=1)
    factors = None
    if scale is not None:
        of_target = of_target * scale(mine).astype(summed)
        factors = scale(drawn).astype(summed)
        if drawn.dtype == summed:
            # The factors are multiplied with the vectors, which have fewer elements than the
            # scores. In lower precision this would round the vectors twice, so then the scores are
            # multiplied.
            drawn, factors = drawn * factors[:, None], None
    if dtype is None:
        others = jnp.matmul(flat, drawn.T, preferred_element_type=summed)
    else:
        others = _rounded_scores(flat, drawn).astype(summed)
    if factors is not None:
        others = others * factors[None]
    if bias is not None:
        # -1 is replaced, because it would index the last item, whose bias may be -inf.
        ids = ids_read(target, negatives)
        of_ids = jnp.where(ids == IGNORED, 0, bias[ids]).astype(summed)
        of_target, others = of_target + of_ids[:rows], others + of_ids[None, rows:]
    counted = used[None] & (negatives[None] != target.columns[:, None])
    # The logarithm of the number of items that each negative represents.
    stands_for = jnp.zeros(count, summed)
    if log_q is not None:
        number = jnp.maximum(jnp.sum(used), 1).astype(summed)
        stands_for = jnp.where(used, -jnp.log(number) - log_q.astype(summed), 0)
    if loss == "softmax":
        others = jnp.where(counted, others + stands_for[None], -jnp.inf)
        # Kept apart from `of_target`: a concatenation would write the scores once more.
        top = jax.lax.stop_gradient(
            jnp.maximum(of_target, jnp.max(others, axis=1, initial=-jnp.inf))
        )
        top = jnp.where(jnp.isfinite(top), top, 0)
        sums = jnp.exp(of_target - top) + jnp.sum(
            jnp.exp(others - top[:, None]), axis=1
        )
        each = jnp.log(sums) + top - of_target
    else:
        of_others = jax.nn.softplus(others) * jnp.exp(stands_for)[None]
        each = jax.nn.softplus(-of_target)
        each += jnp.sum(jnp.where(counted, of_others, 0), 1)
    each = jnp.where(target.broken, jnp.nan, each)
    total = jnp.sum(given)
    each = jnp.where(given == 0, 0, given * each)
    return jnp.sum(each) / jnp.where(total == 0, 1, total)


@jax.custom_vjp
def _rounded_scores(h: jax.Array, vectors: jax.Array) -> jax.Array:
    """Computes `h vectors^T` in float32 from operands rounded to bfloat16."""
    return _product(h, vectors.T)


def _rounded_forward(h, vectors):
    # The rounded operands are stored for the derivative, in half the memory.
    kept = h.astype(jnp.bfloat16), vectors.astype(jnp.bfloat16)
    like = jnp.zeros(0, h.dtype), jnp.zeros(0, vectors.dtype)
    return _rounded_scores(*kept), (kept, like)


def _rounded_backward(residuals, slopes):
    (h, vectors), like = residuals
    slopes = slopes.astype(jnp.bfloat16)
    found = _product(slopes, vectors), _product(slopes.T, h)
    return tuple(x.astype(y.dtype) for x, y in zip(found, like, strict=True))


_rounded_scores.defvjp(_rounded_forward, _rounded_backward)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _alias_table(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Builds an alias table: for each slot the probability of its own item, and the other item.

    Items with less than one slot are filled up, in order, from items with more, in order. A donor
    that gave too much is filled up by the next donor. So running sums of the deficits and of the
    surpluses determine which item donates to which (Hübschle-Schneider and Sanders, "Parallel
    weighted random sampling", 2019).
    """
    mass = q * len(q)
    kept, alias = np.minimum(mass, 1), np.arange(len(q))
    small, large = np.flatnonzero(mass < 1), np.flatnonzero(mass >= 1)
    if not len(small):
        return kept, alias
    missing = np.cumsum(1 - mass[small])
    left = np.cumsum(mass[large] - 1)
    begins = np.concatenate([[0], missing[:-1]])
    giver = np.searchsorted(left, begins, side="right")
    alias[small] = large[np.minimum(giver, len(large) - 1)]
    last = np.searchsorted(missing, left, side="left")
    given = missing[np.minimum(last, len(missing) - 1)]
    too_much = np.clip(given - left, 0, 1)
    too_much[-1] = 0
    kept[large] = 1 - too_much
    alias[large[:-1]] = large[1:]
    return kept, alias
