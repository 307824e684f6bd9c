"""Flax NNX layers with sparse inputs and sparse outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax import losses
from sparsejax.mesh.blocks import SparseRows, check_sparse_rows
from sparsejax.mesh.layout import (
    BY_ROWS,
    call_with_auto_axes,
    item_axes,
    jit_sharded,
    out_sharding,
    padded_rows,
)
from sparsejax.nn.content_vectors import Scoring, inverse_norm
from sparsejax.nn.item_content import ContentSizes, ItemContent
from sparsejax.nn.linear_part import LinearPart
from sparsejax.nn.sampled import of_vectors, sampled_cross_entropy
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops import output_loss as output
from sparsejax.ops import top_k as topk
from sparsejax.ops.chunked_loss import Method
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.ops.item_chunks import accumulator, dot
from sparsejax.ops.linear_cross_entropy import linear_cross_entropy
from sparsejax.ops.precision import Precision, check_precision
from sparsejax.ops.targets import (
    Labels,
    as_targets,
    check_item_ids,
    check_targets,
    only_of_items,
)
from sparsejax.optimizers import gradients, growth

Initializer = Callable[..., jax.Array]

# As in DSSTNE and Mult-VAE. Weights start small, because a row of the input sums many of them.
_default_kernel_init = nnx.initializers.glorot_uniform()
_default_bias_init = nnx.initializers.zeros_init()

# Partition spec of an array with a row for each example.
_BATCH = P("data")


class SparseLinear(nnx.Module):
    """A linear layer for sparse rows: `y = x W + b`.

    >>> layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> layer(x).shape
    (2, 3)

    Only the rows of W that `x` names are read. Under `sparsejax.value_and_grad` its
    gradient is a `RowGradient` with just these rows; under `nnx.value_and_grad` it is
    dense. The kernel's first axis is rounded up to a multiple of 256; the added rows
    stay zero.

    Args:
      in_features: number of columns of `x`.
        out_features: number of units of this layer.
      use_bias: whether to add a bias.
      dtype: dtype of the result; that of the kernel by default.
      param_dtype: dtype of kernel and bias. `sparsejax.Optimizer` rounds bfloat16 at
        random, so that small steps are not lost.
      kernel_init: function that initialises the `[in_features, out_features]` kernel.
      bias_init: function that initialises the bias.
      combiner: "sum", "mean" or "sqrtn", see `sparsejax.gather_matmul`.
      kernel: a parameter to share, such as that of a tied `SparseOutput`; by default the
        layer makes one.
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `sparsejax.gather_matmul`;
        None picks the fastest here.
      rngs: random streams.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = _default_kernel_init,
        bias_init: Initializer = _default_bias_init,
        combiner: gather.Combiner = "sum",
        kernel: nnx.Param | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        check_implementation(implementation)
        gather.check_combiner(combiner)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.combiner: gather.Combiner = combiner
        self.implementation: Implementation = implementation
        if kernel is None:
            shape = (in_features, out_features)
            value = _padded(kernel_init, rngs.params(), shape, param_dtype, BY_ROWS)
            kernel = gradients.RowParam(value, **out_sharding(BY_ROWS))
        _check_kernel(kernel, in_features, out_features)
        self.kernel = kernel
        shape = (out_features,)
        self.bias = (
            nnx.Param(bias_init(rngs.params(), shape, param_dtype))
            if use_bias
            else None
        )

    def __call__(self, x: SparseRows) -> Float[Array, "batch hidden"]:
        """Computes the units `[batch, out_features]` for rows `x: [batch, in_features]`."""
        check_sparse_rows(x, self.in_features)
        y = gradients.lookup(
            self.kernel, x, combiner=self.combiner, implementation=self.implementation
        )
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None, :]
        return y if self.dtype is None else y.astype(self.dtype)


class SparseOutput(nnx.Module):
    """Scores over many items: `s = h W^T + b`, or cosines divided by a temperature.

    The kernel is `[items, in_features]`, so an item's vector is a row of memory, and
    `SparseLinear` can share it. `loss` and `top_k` never make the `[batch, items]`
    array of scores. With a temperature, `s_i = h . W_i / (|h| |W_i| temperature) + b_i`,
    and 0 (plus bias) where a vector is zero.

    >>> layer = SparseOutput(3, 5, rngs=nnx.Rngs(0))
    >>> ids, scores = layer.top_k(jnp.ones((2, 3)), 4)
    >>> ids.shape
    (2, 4)

    Args:
      in_features: size of `h`.
      num_items: number of items.
      use_bias: whether each item has a bias.
      temperature: divisor of scores, which are then cosines.
      dtype: dtype of the operands of the products. By default it is bfloat16 if the
        kernel is; otherwise the wider dtype of `h` and the kernel. Sums are made in
        float32.
      param_dtype: dtype of kernel and bias. `sparsejax.Optimizer` rounds bfloat16 at
        random, so that small steps are not lost.
      kernel_init: function that initialises the `[num_items, in_features]` kernel.
      bias_init: function that initialises the bias.
      kernel: a parameter to share; by default the layer makes one.
      linear: linear part whose scores are added to those of `h` if `u`, the result of its
        `encode`, is given. `loss` never adds them.
      content: sizes of the content of items, as for `sparsejax.nn.ItemContent`. Then an
        item's vector is the sum of its content's vector and its row of the kernel W, which is
        weighted.
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `sparsejax.output_loss`;
        None picks the fastest here.
      precision: "highest", "high" or "default" (None), for products of float32 operands;
        see `sparsejax.output_loss` for `loss`, and `sparsejax.top_k` for `top_k` and
        `scores`. `item_scores` always has float32's precision.
      rngs: random streams.
    """

    def __init__(
        self,
        in_features: int,
        num_items: int,
        *,
        use_bias: bool = True,
        temperature: float | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = _default_kernel_init,
        bias_init: Initializer = _default_bias_init,
        kernel: nnx.Param | None = None,
        linear: LinearPart | None = None,
        content: ContentSizes | None = None,
        implementation: Implementation = None,
        precision: Precision = None,
        rngs: nnx.Rngs,
    ):
        check_implementation(implementation)
        check_precision(precision)
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.in_features = in_features
        self.num_items = num_items
        self.temperature = temperature
        self.dtype = dtype
        self.implementation: Implementation = implementation
        self.precision: Precision = precision

        def made(init, *shape):
            spec = P(item_axes(), *[None] * (len(shape) - 1))
            value = _padded(init, rngs.params(), shape, param_dtype, spec)
            return nnx.Param(value, **out_sharding(spec))

        if kernel is None:
            kernel = made(kernel_init, num_items, in_features)
        _check_kernel(kernel, num_items, in_features)
        self.kernel = kernel
        self.bias = made(bias_init, num_items) if use_bias else None
        self.linear: LinearPart | None = nnx.data(linear)
        self.folded_scale: nnx.Variable | None = nnx.data(None)
        self.content: ItemContent | None = nnx.data(None)
        self.unseen: jax.Array | None = nnx.data(None)  # only `finished` sets it
        if content is not None:
            self.content = ItemContent(num_items, in_features, content, rngs=rngs)

    def vectors(self, *, deterministic: bool = True) -> Float[Array, "items hidden"]:
        """The vectors of the items, with padding: the kernel, or its sum with the content.

        Args:
          deterministic: whether all items keep their own rows of the kernel, also in
            training.
        """
        kernel = gradients.whole(self.kernel)
        if self.content is None:
            return kernel
        return self.content.vectors_with(
            kernel, self.dtype, deterministic=deterministic
        )

    def rows(self, ids: Int[Array, "count"]) -> Float[Array, "count hidden"]:
        """The vectors of some items; zeros for an id of -1."""
        if self.content is not None and self.content.by_parts:
            kernel = gradients.whole(self.kernel)
            made, kernel = self.content.rows_at(kernel, ids, self.dtype)
            if self.unseen is not None:
                # This layer exists for a single call, in which gradients are added in place.
                kernel = nnx.Param(kernel, **self.kernel.get_metadata())
                vars(self)["kernel"] = kernel
            return made
        kernel = self.kernel if self.content is None else self.vectors()
        return gradients.rows_of(kernel, ids)

    def finished(
        self, kernel: nnx.Param, unseen: jax.Array, content: ItemContent | None = None
    ) -> SparseOutput:
        """The layer with these vectors in place of its kernel and its content.

        Args:
          kernel: the vectors.
          unseen: mask of the items without entries in the training data, if others have
            some.
          content: content to be added to the vectors.
        """
        made = copy.copy(self)
        # Flax forbids setting attributes in another trace, so `vars` is updated.
        vars(made).update(kernel=kernel, content=content, unseen=unseen)
        return made

    def training_bias(self) -> Float[Array, "items"] | None:
        """The bias of a softmax in training, which excludes items without entries."""
        return self._without_unseen(None if self.bias is None else self.bias[...])

    def _without_unseen(self, bias: jax.Array | None) -> jax.Array | None:
        """The bias of a softmax in training: -inf for items without entries, to exclude them."""
        unseen = self.unseen
        if unseen is None and self.content is not None:
            unseen = self.content.unseen()
        return bias if unseen is None else _denying(bias, unseen)

    def add_items(self, count: int) -> None:
        """Adds items after the known items, in place: see `FeedForward.add_items`.

        In a model of your own, update the state of its optimizer by
        `optimizer.add_rows(model, {path of the kernel: items before, ...})`.

        Raises:
          ValueError: `count` is negative, or the layer was folded for predictions.
        """
        if count < 0:
            raise ValueError(f"cannot add {count:,} items: it is negative")
        if self.folded_scale is not None:
            raise ValueError("this model was folded for predictions; load it again")
        growth.add_rows(self.kernel, self.num_items, count)
        if self.bias is not None:
            growth.add_rows(self.bias, self.num_items, count)
        if self.linear is not None:
            self.linear.add_items(count)
        if self.content is not None:
            self.content.add_items(count)
        self.num_items += count

    def scores(
        self,
        h: Float[Array, "batch hidden"],
        u: Float[Array, "batch rank"] | None = None,
    ) -> Float[Array, "batch items"]:
        """All scores, `[batch, num_items]`, in float32 or float64; meant for few items."""

        def all_scores(h, kernel, bias, scale):
            scores = dot(h, kernel, (1, 1), precision=self.precision)
            if scale is not None:
                scores = scores * scale[None, :]
            if bias is not None:
                scores = scores + bias[None, :]
            return scores[:, : self.num_items]

        operands = self._operands(h, u)
        return call_with_auto_axes(all_scores, *operands, out_specs=_BATCH)

    def loss(
        self,
        h: Float[Array, "*batch hidden"],
        labels: Labels | jax.Array | np.ndarray,
        *,
        loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
        weights: Float[Array, "*batch"] | None = None,
    ) -> Float[Array, ""]:
        """`sum_b weights_b loss_b`, see `sparsejax.output_loss`.

        Args:
          h: hidden vectors, of a batch of any shape if there is one label a row.
          labels: sparse rows; or one label for each row, `[*batch]` integers, as
            `sparsejax.linear_cross_entropy` takes them: -1 is no label, and the row is
            ignored.
          loss: name of a rule in `sparsejax.losses`, or a rule.
          weights: factors of the rows' losses. None is 1 for each.
        """
        if isinstance(labels, jax.Array | np.ndarray):
            check_targets(labels, h.shape[:-1], self.num_items)
            labels = as_targets(labels, self.num_items)
            h = h.reshape(labels.num_rows, h.shape[-1])
            weights = None if weights is None else weights.reshape(-1)
        elif not isinstance(labels, Labels):
            check_sparse_rows(labels)
        if labels.num_cols != self.num_items:
            raise ValueError(
                f"labels has {labels.num_cols:,} columns but the layer has "
                f"{self.num_items:,} items; read both with the same vocabulary"
            )
        h, kernel, bias, scale = self._operands(h)
        if isinstance(losses.get(loss), losses.SoftmaxCrossEntropy):
            bias = self._without_unseen(bias)
        return output.output_loss(
            h,
            kernel,
            bias,
            labels,
            loss=loss,
            scale=scale,
            weights=weights,
            kernel_spec=self.kernel_spec,
            implementation=self.implementation,
            precision=self.precision,
        )

    def cross_entropy(
        self,
        h: Float[Array, "*batch hidden"],
        targets: jax.Array | np.ndarray,
        *,
        weights: Float[Array, "*batch"] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Float[Array, ""]:
        """Mean softmax cross-entropy of one target a row.

        >>> layer = SparseOutput(3, 5, rngs=nnx.Rngs(0))
        >>> layer.cross_entropy(jnp.ones((2, 4, 3)), jnp.zeros((2, 4), int)).shape
        ()

        See `sparsejax.linear_cross_entropy`.
        """
        if self.content is not None and self.content.by_parts and not label_smoothing:
            return self._cross_entropy_by_parts(h, targets, weights, z_loss)
        h, kernel, bias, scale = self._operands(h)
        bias = self._without_unseen(bias)
        return linear_cross_entropy(
            h,
            kernel,
            targets,
            bias=bias,
            scale=scale,
            weights=weights,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            num_items=self.num_items,
            kernel_spec=self.kernel_spec,
            implementation=self.implementation,
            precision=self.precision,
        )

    def _cross_entropy_by_parts(self, h, targets, weights, z_loss):
        """Does the work of `cross_entropy` for a layer with content, without an array of all
        vectors.
        """
        assert self.content is not None
        check_targets(targets, h.shape[:-1], self.num_items)
        targets = jnp.asarray(targets).reshape(-1)
        labels = as_targets(targets, self.num_items)
        h = jnp.asarray(h).reshape(len(targets), h.shape[-1])
        # An ignored row may have any values.
        h = self.hidden_operand(jnp.where(labels.ignored[:, None], 0, h))
        bias = None if self.bias is None else self.bias[...]
        bias = self._without_unseen(bias)
        method = Method(
            rule=losses.SoftmaxCrossEntropy(z_loss=z_loss),
            implementation=self.implementation,
            precision=check_precision(self.precision),
        )
        scoring = Scoring(method, self.num_items, self.temperature)
        found, scores = self.content.softmax_sums(
            gradients.whole(self.kernel),
            h,
            bias,
            jnp.where(labels.ignored | labels.broken, -1, targets),
            scoring,
            self.dtype,
        )
        made = found - scores + z_loss * jnp.square(found)
        made = jnp.where(labels.broken, jnp.nan, made)
        share = jnp.ones_like(found)
        if weights is not None:
            share = weights.reshape(-1).astype(found.dtype)
        share = jnp.where(labels.ignored, 0, share)
        total = jnp.sum(share)
        made = jnp.sum(jnp.where(share == 0, 0, share * made))
        return made / jnp.where(total == 0, 1, total)

    def sampled_cross_entropy(
        self,
        h: Float[Array, "*batch hidden"],
        targets: jax.Array | np.ndarray,
        negatives: Int[Array, "count"],
        *,
        log_q: Float[Array, "count"] | None = None,
        weights: Float[Array, "*batch"] | None = None,
        dtype: Literal["bfloat16"] | None = None,
    ) -> Float[Array, ""]:
        """`cross_entropy` against a sample of the items, without a pass over all of them.

        >>> layer = SparseOutput(3, 5, rngs=nnx.Rngs(0))
        >>> h, targets = jnp.ones((2, 4, 3)), jnp.zeros((2, 4), int)
        >>> layer.sampled_cross_entropy(h, targets, jnp.array([1, 4])).shape
        ()

        See `sparsejax.nn.sampled_cross_entropy`. If the kernel is a `RowParam`, its gradient
        only has the rows of targets and negatives.
        """
        return sampled_cross_entropy(
            self.hidden_operand(h),
            self.kernel if self.content is None else self.vectors(),
            targets,
            negatives,
            log_q=log_q,
            bias=self.training_bias(),
            scale=None if self.temperature is None else self.score_scale,
            weights=weights,
            dtype=dtype,
        )

    def sampled_of_vectors(
        self,
        h: Float[Array, "rows hidden"],
        of_targets: Float[Array, "rows hidden"],
        of_negatives: Float[Array, "count hidden"],
        targets: Int[Array, "rows"],
        negatives: Int[Array, "count"],
        log_q: Float[Array, "count"] | None,
        *,
        bias: Float[Array, "items"] | None,
        weights: Float[Array, "rows"] | None = None,
        dtype: Literal["bfloat16"] | None = None,
    ) -> Float[Array, ""]:
        """`sampled_cross_entropy` with vectors of items that were read before.

        Args:
          h: hidden vectors.
          of_targets: the vector of each row's target.
          of_negatives: the vectors of the negatives.
          targets: one item for each row; -1 for none, and the row is ignored.
          negatives: items that all rows share, as `NegativeSampler.sample` draws them.
          log_q: the logarithm of the probability of each negative; None counts each as
            one item.
          bias: bias of all items, as `training_bias` returns it.
          weights: factors of the rows' losses. None is 1 for each.
          dtype: dtype of the operands of the products; None is that of the vectors.
        """
        return of_vectors(
            self.hidden_operand(h),
            of_targets,
            of_negatives,
            as_targets(targets, self.num_items),
            negatives,
            log_q=log_q,
            bias=bias,
            scale=None if self.temperature is None else self.score_scale,
            weights=weights,
            dtype=dtype,
        )

    def without_vectors(self) -> SparseOutput:
        """A layer without the vectors of its items, which only has `sampled_of_vectors`."""
        made = copy.copy(self)
        kernel = nnx.Param(jnp.zeros((0, self.in_features), self.kernel.dtype))
        # Flax forbids setting attributes in another trace, so `vars` is updated.
        vars(made).update(kernel=kernel, bias=None, content=None, unseen=None)
        return made

    def top_k(
        self,
        h: Float[Array, "batch hidden"],
        k: int,
        *,
        exclude: SparseRows | None = None,
        excluded: Bool[Array, "items"] | None = None,
        u: Float[Array, "batch rank"] | None = None,
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and scores of the `k` best items, see `sparsejax.top_k`.

        Args:
          h: hidden vectors.
          k: number of items in each row of the result.
          exclude: items not to be returned, for each row.
          excluded: a mask of items that are excluded in all rows.
          u: vectors of the linear part, as its `encode` returns them.
        """
        if exclude is not None:
            check_sparse_rows(exclude)
        h, kernel, bias, scale = self._operands(h, u)
        if excluded is not None:
            excluded = jnp.pad(excluded, (0, len(kernel) - self.num_items))
            bias = _denying(bias, excluded)
        return topk.top_k(
            h,
            kernel,
            k,
            bias=bias,
            scale=scale,
            exclude=exclude,
            num_items=self.num_items,
            kernel_spec=self.kernel_spec,
            implementation=self.implementation,
            precision=self.precision,
        )

    def item_scores(
        self,
        h: Float[Array, "batch hidden"],
        ids: Int[Array, "batch count"],
        u: Float[Array, "batch rank"] | None = None,
    ) -> Float[Array, "batch count"]:
        """Scores of some items for each row. Their kernel rows are gathered.

        Args:
          h: hidden vectors.
          ids: item numbers, in `[0, num_items)`. The score of another number is NaN.
          u: vectors of the linear part, as its `encode` returns them.

        Raises:
          TypeError: `ids` is no array of integers.
          ValueError: `ids` has another shape, or is a NumPy array with an id that is no
            item.
        """
        check_item_ids(ids, len(h), self.num_items)

        def some_scores(h, kernel, bias, scale, ids):
            scores = jnp.einsum(
                "bh,bch->bc",
                h,
                kernel[ids],
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=accumulator(h.dtype),
            )
            if scale is not None:
                scores = scores * scale[ids]
            scores = scores if bias is None else scores + bias[ids]
            return only_of_items(scores, ids, self.num_items)

        operands = self._operands(h, u)
        return call_with_auto_axes(some_scores, *operands, ids, out_specs=_BATCH)

    @property
    def kernel_spec(self) -> P | None:
        """The partition spec of the kernel on the mesh that is set; None if it is not divided."""
        mesh = jax.sharding.get_abstract_mesh()
        spec = self.kernel.get_metadata().get("out_sharding")
        return spec if "model" in mesh.shape else None

    def hidden_operand(
        self, h: Float[Array, "*batch hidden"]
    ) -> Float[Array, "*batch hidden"]:
        """`h` as an operand of the products: in their dtype, and normalised for cosines."""
        h = jnp.asarray(h)
        if self.temperature is not None:
            h = h * inverse_norm(h)[..., None].astype(h.dtype)
        stored = self.kernel.dtype
        # If the operand's dtype differed from the kernel's, the kernel would be copied.
        is_half = stored == jnp.bfloat16
        finer = stored if is_half else jnp.promote_types(h.dtype, stored)
        return h.astype(self.dtype or finer)

    def queries(
        self,
        h: Float[Array, "*batch hidden"],
        u: Float[Array, "*batch rank"] | None = None,
    ) -> Float[Array, "*batch width"]:
        """The vectors that are multiplied with items' vectors: `hidden_operand(h)`, then `u`."""
        h = self.hidden_operand(h)
        return h if u is None else jnp.concatenate([h, u.astype(h.dtype)], axis=-1)

    def score_scale(
        self, kernel: Float[Array, "items hidden"]
    ) -> Float[Array, "items"]:
        """The factor of each item's scores, for a layer with a temperature."""
        assert self.temperature is not None
        return inverse_norm(kernel) / self.temperature

    def fold(self) -> None:
        """Computes once all values that each call would compute from the kernel alone.

        These are the kernel in the dtype of the products, and the scale of cosines; with a
        linear part, one kernel of both. Afterwards the layer cannot be trained.
        """
        kernel = self.kernel[...]
        scale = None if self.temperature is None else self.score_scale(kernel)
        if self.linear is not None:
            kernel = self._joined(kernel.astype(jnp.float32), scale)
            self.kernel = nnx.Param(kernel)
            self.folded_scale = nnx.Variable(jnp.ones(len(kernel)))
        elif scale is not None:
            self.folded_scale = nnx.Variable(scale)
        if self.dtype is not None:
            # A new parameter, because a tied layer keeps the old one.
            self.kernel = nnx.Param(kernel.astype(self.dtype))

    def _joined(self, kernel, scale):
        """The kernel for the concatenation `[h, u]`, without a scale."""
        assert self.linear is not None

        def joined(kernel, scale, more, factors):
            if scale is not None:
                kernel = kernel * scale.astype(kernel.dtype)[:, None]
            more = (more * factors[:, None]).astype(kernel.dtype)
            return jnp.concatenate([kernel, more], axis=1)

        more = self.linear.kernel[...], self.linear.scale[...]
        return call_with_auto_axes(
            joined, kernel, scale, *more, out_specs=self.kernel_spec
        )

    def _operands(self, h, u=None):
        kernel, h = self.vectors(), self.queries(h, u)
        bias = None if self.bias is None else self.bias[...]
        bias = None if bias is None else bias.astype(accumulator(bias.dtype))
        if self.folded_scale is not None:
            scale = self.folded_scale[...]
        else:
            scale = None if self.temperature is None else self.score_scale(kernel)
        kernel = kernel.astype(h.dtype)
        if u is not None and self.folded_scale is None:
            kernel, scale = self._joined(kernel, scale), None
        return h, kernel, bias, scale


class SparseDropout(nnx.Module):
    """Drops entries of a CSR in training: input corruption of a denoising autoencoder.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array(np.ones((2, 50))))
    >>> corrupted = SparseDropout(0.5, rngs=nnx.Rngs(0))(x)
    >>> np.unique(corrupted.data).tolist()
    [0.0, 2.0]

    Each entry stays with probability `1 - rate` and is then multiplied by
    `1 / (1 - rate)`. The draw depends on (key, row, column) only, not on how the entries
    are stored or divided over devices.

    Args:
      rate: probability of dropping an entry.
      rngs: random streams; the layer uses "dropout".
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be in [0, 1), got {rate}")
        self.rate = rate
        self.deterministic = False
        self.rngs = rngs.dropout.fork()

    def __call__[Matrix: SparseRows](
        self, x: Matrix, *, deterministic: bool | None = None
    ) -> Matrix:
        """Returns `x` with some values set to 0. If `deterministic`, returns `x` itself."""
        check_sparse_rows(x)
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or self.rate == 0:
            return x
        key = self.rngs()

        def kept(row, column):
            entry = jax.random.fold_in(jax.random.fold_in(key, row), column)
            return jax.random.bernoulli(entry, 1 - self.rate)

        keep = jnp.vectorize(kept)(x.row_ids(), x.column_ids())
        data = jnp.where(keep, jnp.float32(1 / (1 - self.rate)), 0)
        if x.data is not None:
            data = data * x.data
        return x.with_data(data)  # pyrefly: ignore[bad-return]


def normalize_rows[Matrix: SparseRows](x: Matrix) -> Matrix:
    """Divides each row by its L2 norm; an empty row stays empty.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[3.0, 0, 4.0], [0, 0, 0]]))
    >>> np.round(normalize_rows(x).todense(), 6).tolist()
    [[0.6..., 0.0, 0.8...], [0.0, 0.0, 0.0]]
    """

    check_sparse_rows(x)
    return gather.combined(x, "sqrtn")


def _denying(
    bias: Float[Array, "items"] | None, excluded: Bool[Array, "items"]
) -> Float[Array, "items"]:
    """A bias that is -inf for excluded items. The scores of other items keep their bits."""
    more = jnp.where(excluded, -jnp.inf, 0).astype(jnp.float32)
    return more if bias is None else bias + more


def _padded(init, key, shape, dtype, spec):
    """Calls `init` with the true shape, appends padding rows of zeros, and divides the result by
    `spec`.
    """
    # Compiled, so that only the result is allocated, and directly on its devices.
    return jit_sharded(_made, spec, static=(0, 2, 3))(init, key, shape, dtype)


def _made(init, key, shape, dtype):
    extra = padded_rows(shape[0]) - shape[0]
    return jnp.pad(init(key, shape, dtype), ((0, extra), *((0, 0),) * len(shape[1:])))


def _check_kernel(kernel: nnx.Param, rows: int, width: int) -> None:
    expected = (padded_rows(rows), width)
    if kernel.shape != expected:
        raise ValueError(
            f"the kernel to share has shape {kernel.shape}, expected {expected} "
            f"({rows:,} rows, rounded up to a multiple of 256)"
        )
