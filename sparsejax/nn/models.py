"""FeedForward, a Flax NNX module that is built from a NetworkConfig."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax import losses
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import axes_are_explicit, hidden_layout
from sparsejax.nn.activations import activation
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.item_content import ContentSizes, with_vectors
from sparsejax.nn.layers import (
    SparseDropout,
    SparseLinear,
    SparseOutput,
    normalize_rows,
)
from sparsejax.nn.linear_part import LinearPart
from sparsejax.optimizers import growth
from sparsejax.optimizers.optimizer import Optimizer


class FeedForward(nnx.Module):
    """A chain of layers from sparse features to scores over items.

    ::

        x --normalize, corrupt--> SparseLinear --f, dropout--> ... --> SparseOutput

    >>> config = NetworkConfig.autoencoder((8,))
    >>> model = FeedForward(config, inputs=5, outputs=5, rngs=nnx.Rngs(0))
    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> model(x, deterministic=True).shape
    (2, 5)

    Args:
      config: the layers and the loss.
      inputs: number of input features.
      outputs: number of items.
      content: sizes of the content of items (tags and vectors), as for
        `sparsejax.nn.ItemContent`; `sparsejax.build` passes them. A tied input reads
        the content, too. None: items have no content.
      rngs: random streams: "params" for the parameters, "dropout" for noise.
    """

    kind = "items"
    # Whether `top_k` of this class applies the output layer to the result of `queries`.
    ranks_by_layer: ClassVar[bool] = True

    def __init__(
        self,
        config: NetworkConfig,
        *,
        inputs: int,
        outputs: int,
        content: ContentSizes | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.corruption = SparseDropout(config.input.corruption, rngs=rngs)
        sizes = [h.size for h in config.hidden]
        if config.linear is not None and inputs != outputs:
            raise ValueError(
                f"a linear part needs as many items as features, got {outputs:,} and "
                f"{inputs:,}"
            )
        self.output = SparseOutput(
            sizes[-1],
            outputs,
            use_bias=config.output.use_bias,
            temperature=config.output.temperature,
            dtype=config.output.dtype,
            precision=config.precision,
            param_dtype=config.param_dtype,
            linear=LinearPart(config.linear, inputs) if config.linear else None,
            content=content,
            rngs=rngs,
        )
        tied = config.output.tied is not None
        if tied and inputs != outputs:
            raise ValueError(
                f"a tied output needs as many items as features, got {outputs:,} and "
                f"{inputs:,}"
            )
        self.first = SparseLinear(
            inputs,
            sizes[0],
            use_bias=config.hidden[0].use_bias,
            dtype=config.hidden[0].dtype,
            param_dtype=config.param_dtype,
            kernel=self.output.kernel if tied else None,
            rngs=rngs,
        )
        self.rest = nnx.List(
            nnx.Linear(
                before,
                h.size,
                use_bias=h.use_bias,
                dtype=h.dtype,
                precision=config.precision,
                rngs=rngs,
                **_divided(before, h.size, by_inputs=i % 2 == 1),
            )
            for i, (before, h) in enumerate(zip(sizes, config.hidden[1:], strict=False))
        )
        self.dropout = nnx.List(
            [nnx.Dropout(h.dropout, rngs=rngs) for h in config.hidden]
        )
        self.loss_rule = losses.get(config.loss, **dict(config.loss_options))

    @property
    def num_features(self) -> int:
        """Number of input features."""
        return self.first.in_features

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        return self.output.num_items

    def add_items(
        self,
        count: int,
        *,
        features: int | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Adds items, and as many input features, after the known ones, in place.

        >>> model = FeedForward(
        ...     NetworkConfig.autoencoder((8,)), inputs=5, outputs=5, rngs=nnx.Rngs(0)
        ... )
        >>> optimizer = Optimizer(model, optimizers.adam(1e-3))
        >>> model.add_items(3, optimizer=optimizer)
        >>> model.num_items, model.num_features
        (8, 8)

        No known row of a kernel, of a bias or of the optimizer's state changes. So for
        rows of known features, the scores of known items do not change. A new
        row of a kernel or a bias is the mean of the known rows: a new item has about the
        mean score until it is trained. A linear part gives new items the score 0 until
        `model.output.linear.set_from(data)` computes it again.

        `data.append_features(names)` gives data the vocabulary of such a model. On a mesh
        the new rows are on the last devices.

        Each call makes new shapes, for which programs are compiled. The programs for
        earlier shapes stay in memory until `jax.clear_caches()` is called.

        Args:
          count: number of new items.
          features: number of new input features, `count` by default. It may only differ
            for a model whose features are not its items: not tied, no linear part.
          optimizer: the model's optimizer, whose state gets rows too.

        Raises:
          ValueError: a number is negative, the numbers cannot differ, or the layers were
            folded for predictions.
        """
        features = count if features is None else features
        output, tied = self.output, self.first.kernel is self.output.kernel
        if features != count and (tied or output.linear is not None):
            raise ValueError(
                "the items of this model are its features (a tied output or a linear "
                f"part), got {count:,} new items and {features:,} new features"
            )
        if features < 0:
            raise ValueError(f"cannot add {features:,} features: it is negative")
        known: dict[tuple[str, ...], int] = {
            ("first", "kernel"): self.num_features,
            ("output", "kernel"): self.num_items,
            ("output", "bias"): self.num_items,
        }
        output.add_items(count)
        if not tied:
            growth.add_rows(self.first.kernel, self.num_features, features)
        self.first.in_features += features
        if optimizer is not None:
            optimizer.add_rows(self, known)

    def encode(
        self, x: SparseRows, *, deterministic: bool | None = None
    ) -> Float[Array, "batch hidden"]:
        """The last hidden layer, `[batch, hidden]`: the vector of each row.

        Args:
          x: `[batch, num_features]`.
          deterministic: whether to omit corruption and dropout. By default
            `model.train()` and `model.eval()` decide.
        """
        if self.config.input.normalize:
            x = normalize_rows(x)
        x = self.corruption(x, deterministic=deterministic)
        h = (with_vectors(self) if self._reads_content else self).first(x)
        hidden = self.config.hidden
        for i, (config, dropout) in enumerate(zip(hidden, self.dropout, strict=True)):
            if i > 0:
                layer = self.rest[i - 1]
                h = layer(h, out_sharding=_result_spec(layer))
            # Looked up at each call: a model that has JAX's functions as attributes cannot be
            # pickled.
            h = dropout(activation(config.activation)(h), deterministic=deterministic)
        return h

    def __call__(
        self, x: SparseRows, *, deterministic: bool | None = None
    ) -> Float[Array, "batch items"]:
        """All scores, `[batch, num_items]`; for many items use `top_k`."""
        model = with_vectors(self)
        h = model.encode(x, deterministic=deterministic)
        return model.output.scores(h, self._linear(x))

    def loss(
        self,
        x: SparseRows,
        labels: SparseRows,
        *,
        weights: Float[Array, "batch"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, ""]:
        """`sum_b weights_b loss_b`, with the configuration's loss; weights are 1 by default.

        It is the loss of the layers' scores, without the scores of a linear part.
        """
        model = with_vectors(self, deterministic=bool(deterministic))
        h = model.encode(x, deterministic=deterministic)
        return model.output.loss(h, labels, loss=self.loss_rule, weights=weights)

    def queries(self, x: SparseRows) -> Float[Array, "batch width"]:
        """The vectors that `top_k` multiplies with the items' vectors, without noise."""
        return self.output.queries(self.encode(x, deterministic=True), self._linear(x))

    def top_k(
        self,
        x: SparseRows,
        k: int,
        *,
        exclude: SparseRows | None = None,
        excluded: Bool[Array, "items"] | None = None,
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and scores of the `k` best items of each row, without noise.

        Args:
          x: the rows.
          k: number of items in each row of the result.
          exclude: items not to be returned, for each row.
          excluded: a mask of items that are excluded in all rows.
        """
        model = with_vectors(self)
        h = model.encode(x, deterministic=True)
        u = self._linear(x)
        return model.output.top_k(h, k, exclude=exclude, excluded=excluded, u=u)

    def item_scores(
        self, x: SparseRows, ids: Int[Array, "batch count"]
    ) -> Float[Array, "batch count"]:
        """Scores of the items `ids` of each row, without noise."""
        model = with_vectors(self)
        h = model.encode(x, deterministic=True)
        return model.output.item_scores(h, ids, self._linear(x))

    @property
    def _reads_content(self) -> bool:
        """Whether the input layer reads item vectors that must be computed from content first."""
        output = self.output
        return output.content is not None and self.first.kernel is output.kernel

    def _linear(self, x: SparseRows) -> Float[Array, "batch rank"] | None:
        """Encodes the rows by the output's linear part; None if it has none."""
        return None if self.output.linear is None else self.output.linear.encode(x)


def _divided(inputs: int, outputs: int, *, by_inputs: bool) -> dict[str, Any]:
    """Options for a hidden `nnx.Linear` whose kernel `hidden_layout` divides."""
    layout = hidden_layout(inputs, outputs, by_inputs=by_inputs)
    if layout is None:
        return {}
    return {
        "kernel_metadata": {"out_sharding": layout.kernel},
        "bias_metadata": {"out_sharding": layout.bias},
    }


def _result_spec(layer: nnx.Linear) -> P | None:
    """The partition spec of a hidden layer's result, if axes are Explicit."""
    if not axes_are_explicit():
        return None
    divided = layer.kernel.get_metadata().get("out_sharding", P(None, None))
    return P("data", divided[1])
