"""Click models: each computes a logit for every example, from dense columns and from ids.

All are called as `model(dense, ids)`. Their tables are an `EmbeddingCollection`; all other layers
are ordinary Flax layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.clicks.config import (
    ClickModelConfig,
    DCNConfig,
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    SharedBottom,
    TINConfig,
    WideDeepConfig,
)
from sparsejax.clicks.layers import Layers, chained, relu, shared_layers, with_bias
from sparsejax.embeddings import new_ids
from sparsejax.embeddings.collection import EmbeddingCollection
from sparsejax.embeddings.config import FeatureConfig, Placement, TableConfig
from sparsejax.embeddings.feature_batch import CandidateBatch, FeatureBatch, Ids
from sparsejax.embeddings.plan import EmbeddingPlan
from sparsejax.ops.dot_interaction import blank_vectors, dot_interaction
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import sgd
from sparsejax.wide_ids import NUM_IDS

# Factors and position vectors start small, because they are multiplied with other vectors.
_factor_init = nnx.initializers.normal(0.01)
# With at most this many places in a history, a CPU adds no separate matrix for each example. A
# step of DIN with batch 512 took 52 ms of processor time with such matrices and 57 without them
# for 50 places; 9.9 and 8.6 ms for 8 places.
_FEW_PLACES = 24
_PLAN: Mapping[str, Placement] = {}
_ONE_LABEL: Mapping[str, str | None] = {}

Dense = Float[Array | np.ndarray, "batch columns"]


class _OnMesh(NamedTuple):
    """Placement of the tables, settings of the exchange, and labels; see `EmbeddingCollection`."""

    plan: EmbeddingPlan | Mapping[str, Placement]
    wire_dtype: jax.typing.DTypeLike | None
    exchange_room: float | None
    labels: Mapping[str, str | None]


class _ClickModel[C: ClickModelConfig](nnx.Module):
    """Base class of click models: stores the sizes of the inputs, and embedding tables of one
    width.
    """

    kind = "clicks"
    # Whether a training step consists of many short fusions, see `mesh.xla_options.is_timed`.
    short_fusions: ClassVar[bool] = True
    # Whether the model always has a linear part.
    _has_linear: ClassVar[bool] = False

    def __init__(
        self,
        config: C,
        *,
        num_dense: int,
        features: Mapping[str, int | str],
        plan: EmbeddingPlan | Mapping[str, Placement] = _PLAN,
        wire_dtype: jax.typing.DTypeLike | None = None,
        exchange_room: float | None = None,
        labels: Mapping[str, str | None] = _ONE_LABEL,
        rngs: nnx.Rngs,
    ):
        if not features:
            raise ValueError("a click model needs at least one feature")
        on_mesh = _OnMesh(plan, wire_dtype, exchange_room, labels)
        self.config, self.num_dense = config, num_dense
        self.dtype = jnp.dtype(config.dtype)
        self.names, self.labels = tuple(features), tuple(labels)
        self.after = tuple(
            None if before is None else self.labels.index(before)
            for before in labels.values()
        )
        _check_labels(config, self.labels)
        apart = self._apart(features)
        self.embeddings = _tables(config, features, config.dim, on_mesh, rngs, **apart)
        linear = None
        if self._has_linear or config.regression:
            linear = _Linear(config, num_dense, features, on_mesh, rngs)
        self.linear: _Linear | None = nnx.data(linear)
        share = Fitted(jnp.ones(())) if config.regression else None
        self.share: Fitted | None = nnx.data(share)
        self._build(rngs)

    def _apart(self, features: Mapping[str, int | str]) -> Mapping[str, Any]:
        """Arguments of `_tables` that name the features whose vectors are not summed; by default
        none.
        """
        return {}

    def _build(self, rngs: nnx.Rngs) -> None:
        """Makes the layers that follow the tables."""
        raise NotImplementedError

    def __call__(
        self, dense: Dense, ids: Mapping[str, Ids] | FeatureBatch
    ) -> Float[Array, "batch *labels"]:
        """Computes the logit of each example, in float32: `[batch]`, or `[batch, labels]` with
        labels.
        """
        logit = self._trained(dense, ids)
        if self.share is not None:
            logit = self.share[...] * logit
        return self._finished(logit, dense, ids)

    def _trained(self, dense, ids) -> jax.Array:
        """The logits of the trained layers, without the linear part."""
        raise NotImplementedError

    def training_logits(
        self, dense: Dense, ids: Mapping[str, Ids] | FeatureBatch
    ) -> Float[Array, "batch *labels"]:
        """The logit whose loss `fit` minimizes: that of the model with a `share` of 1."""
        return self._finished(self._trained(dense, ids), dense, ids)

    def _finished(self, logit: jax.Array, dense, ids) -> jax.Array:
        """Adds the linear part to logits, and combines each label with its earlier label."""
        if self.linear is not None:
            logit = self.linear(dense, ids) + logit
        is_chain = any(before is not None for before in self.after)
        return chained(logit, self.after) if is_chain else logit

    def _last(self, inputs: int, sizes: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Module:
        """Makes the last layers: to one logit, or to a logit for each label as `sharing` says."""
        if not self.labels:
            return Layers(inputs, (*sizes, 1), self.dtype, rngs)
        sharing = self.config.sharing or SharedBottom()
        labels = len(self.labels)
        return shared_layers(sharing, inputs, sizes, labels, self.dtype, rngs)

    def _logit(self, x: jax.Array) -> jax.Array:
        return (x if self.labels else x[:, 0]).astype(jnp.float32)

    @property
    def num_ids(self) -> dict[str, int]:
        """The number of ids of each feature."""
        found = {
            feature.name: NUM_IDS if stack.dynamic else feature.table.config.num_rows
            for stack in self.embeddings.stacks
            for feature in stack.features
        }
        return {name: found[name] for name in self.names}

    @property
    def like(self) -> dict[str, str]:
        """For each feature that reads another feature's table, the name of that feature."""
        return {
            feature.name: feature.config.table
            for stack in self.embeddings.stacks
            for feature in stack.features
            if feature.config.table != feature.name
        }

    @property
    def num_inputs(self) -> int:
        """Number of dense columns plus the widths of all embeddings."""
        return self.num_dense + self.embeddings.num_outputs

    def add_ids(
        self, added: Mapping[str, int], *, optimizer: Optimizer | None = None
    ) -> None:
        """Adds ids after the known ids of features: see `sparsejax.embeddings.add_ids`."""
        new_ids.add_ids(self, added, optimizer=optimizer)

    def _inputs(self, dense, ids) -> jax.Array:
        """Concatenates dense columns and embeddings to `[batch, num_inputs]`."""
        dense = self._dense(dense)
        rows = self.embeddings.concat(ids).astype(self.dtype)
        return jnp.concatenate([dense, rows], axis=1)

    def _dense(self, dense) -> jax.Array:
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense must be [batch, {self.num_dense}], as num_dense says, got the "
                f"shape {dense.shape}"
            )
        return jnp.asarray(dense, self.dtype)


class DLRM(_ClickModel[DLRMConfig]):
    """Dot products between all pairs of embeddings (Naumov et al. 2019).

    ::

        z_0 = bottom(dense);  z_1 ... z_F = the embeddings
        logit = top(z_0, z_i . z_j for all i < j)

    >>> model = DLRM(DLRMConfig(), num_dense=3, features={"user": 50, "item": 90}, rngs=nnx.Rngs(0))
    >>> ids = {"user": jnp.array([3, 4]), "item": jnp.array([[1, 2], [5, -1]])}
    >>> model(jnp.ones((2, 3)), ids).shape
    (2,)

    Arguments: see `build_click_model`.
    """

    def _build(self, rngs: nnx.Rngs) -> None:
        config = self.config
        bottom, vectors, inputs = None, len(self.names), 0
        if self.num_dense:
            sizes = (*config.bottom, config.dim)
            bottom = Layers(self.num_dense, sizes, self.dtype, rngs, end=True)
            vectors, inputs = vectors + 1, config.dim
        self.bottom: Layers | None = nnx.data(bottom)
        inputs += vectors * (vectors - 1) // 2
        if not inputs:
            raise ValueError(
                "one feature alone has no pairs; give it dense columns too"
            )
        self.top = self._last(inputs, config.top, rngs)
        # Implementation of `dot_interaction`.
        self.implementation: Implementation = None

    def _trained(self, dense, ids) -> jax.Array:
        dense = self._dense(dense)
        blank = 0
        first = None if self.bottom is None else self.bottom(dense)
        if first is None:
            rows = self.embeddings.concat(ids).astype(self.dtype)
            rows = _vectors(rows, self.config.dim)
        else:
            blank = blank_vectors(first, 1 + len(self.names), self.implementation)
            rows = self.embeddings.joined(first, ids, blank=blank)
        pairs = dot_interaction(
            rows, first, blank=blank, implementation=self.implementation
        )
        return self._logit(self.top(pairs))


class DCN(_ClickModel[DCNConfig]):
    """Cross layers, then ordinary ones (DCN-V2, Wang et al. 2021).

    ::

        x_0 = dense columns and embeddings
        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l      W_l = U_l V_l with a rank
        logit = hidden(x_L)

    >>> model = DCN(DCNConfig(rank=4), num_dense=0, features={"user": 50}, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 0)), {"user": jnp.array([3, 4])}).shape
    (2,)

    Arguments: see `build_click_model`.
    """

    def _build(self, rngs: nnx.Rngs) -> None:
        config, size, dtype = self.config, self.num_inputs, self.dtype

        def cross():
            if config.rank is None:
                return nnx.Linear(size, size, dtype=dtype, rngs=rngs)
            down = nnx.Linear(size, config.rank, use_bias=False, dtype=dtype, rngs=rngs)
            up = nnx.Linear(config.rank, size, dtype=dtype, rngs=rngs)
            return nnx.Sequential(down, up)

        self.cross = nnx.List(cross() for _ in range(config.cross))
        self.hidden = self._last(size, config.hidden, rngs)

    def _trained(self, dense, ids) -> jax.Array:
        first = x = self._inputs(dense, ids)
        for layer in self.cross:
            x = first * layer(x) + x
        return self._logit(self.hidden(x))


class DeepFM(_ClickModel[DeepFMConfig]):
    """A factorization machine and layers on the same embeddings (Guo et al. 2017).

    ::

        v_i = the embedding of feature i, or of dense column i times its value
        logit = linear + sum over i < j of v_i . v_j + hidden(dense, embeddings)

    The linear part has a number for each id, in tables of its own, and one for each dense
    column. With several labels, the sum over pairs has a factor for each.

    >>> model = DeepFM(DeepFMConfig(), num_dense=3, features={"user": 50}, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 3)), {"user": jnp.array([3, 4])}).shape
    (2,)

    Arguments: see `build_click_model`.
    """

    _has_linear = True

    def _build(self, rngs: nnx.Rngs) -> None:
        shape = (self.num_dense, self.config.dim)
        self.factors = nnx.Param(_factor_init(rngs.params(), shape))
        self.hidden = self._last(self.num_inputs, self.config.hidden, rngs)
        # A weight of the pairs for each label, if there are labels.
        scales = nnx.Param(jnp.ones(len(self.labels))) if self.labels else None
        self.scales: nnx.Param | None = nnx.data(scales)

    def _trained(self, dense, ids) -> jax.Array:
        x = self._inputs(dense, ids)
        rows = _vectors(x[:, self.num_dense :], self.config.dim)
        factors = self.factors[...].astype(x.dtype)
        columns = x[:, : self.num_dense, None] * factors[None]
        vectors = jnp.concatenate([columns, rows], axis=1).astype(jnp.float32)
        # The sum over all pairs is half of (square of the sum - sum of the squares).
        square, squares = jnp.square(vectors.sum(1)), jnp.square(vectors).sum(1)
        pairs = 0.5 * jnp.sum(square - squares, axis=1)
        if self.scales is not None:
            pairs = pairs[:, None] * self.scales[...][None]
        return pairs + self._logit(self.hidden(x))


class WideDeep(_ClickModel[WideDeepConfig]):
    """A linear model beside layers on embeddings (Cheng et al. 2016).

    ::

        logit = linear + hidden(dense, embeddings)

    The linear part has a number for each id, in tables of its own, and one for each dense
    column. For products of columns, give a feature whose ids are pairs.

    >>> config = WideDeepConfig(hidden=(8,))
    >>> model = WideDeep(config, num_dense=3, features={"user": 50}, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 3)), {"user": jnp.array([3, 4])}).shape
    (2,)

    Arguments: see `build_click_model`.
    """

    _has_linear = True

    def _build(self, rngs: nnx.Rngs) -> None:
        self.hidden = self._last(self.num_inputs, self.config.hidden, rngs)

    def _trained(self, dense, ids) -> jax.Array:
        return self._logit(self.hidden(self._inputs(dense, ids)))


class _HistoryModel[H: (DINConfig, TINConfig)](_ClickModel[H]):
    """Base class of models that weight the ids of a history by a candidate."""

    def _apart(self, features):
        histories = {name: of for name, of in features.items() if isinstance(of, str)}
        if not histories:
            raise ValueError(
                f"{type(self).__name__} needs a history: a column of lists whose ids are "
                "those of another column, read with like=, such as "
                "VocabularyColumn(like='item'). The "
                f"features are {list(features)}; without histories take dlrm or dcn"
            )
        # Tuples, as a module's attributes are hashed.
        self.histories = tuple(histories.items())
        self.beside = _beside(self.config, features, histories)
        columns = [column for _, column in self.beside]
        return {"histories": self.config.length, "beside": columns}

    def _build(self, rngs):
        config = self.config
        self.attention = nnx.List(self._unit(rngs) for _ in self.histories)
        inputs = self.num_dense + config.dim * (len(self.names) - len(self.beside))
        self.hidden = self._last(inputs, config.hidden, rngs)

    def _unit(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the parameters that weight the ids of a history."""
        raise NotImplementedError

    def _pooled(self, unit: Any, name: str, candidate: jax.Array, rows) -> jax.Array:
        """The weighted sum of a history, `[batch, dim]`. A place without an id has a vector of
        zeros.
        """
        raise NotImplementedError

    def _looked_up(self, ids) -> dict[str, jax.Array]:
        """The vectors of all features by name."""
        return {n: v.astype(self.dtype) for n, v in self.embeddings(ids).items()}

    def _trained(self, dense, ids) -> jax.Array:
        rows = self._looked_up(ids)
        pooled = {
            name: self._pooled(unit, name, rows[candidate], rows).astype(self.dtype)
            for (name, candidate), unit in zip(
                self.histories, self.attention, strict=True
            )
        }
        beside = {column for _, column in self.beside}
        vectors = [(rows | pooled)[n] for n in self.names if n not in beside]
        x = [self._dense(dense), *vectors]
        return self._logit(self.hidden(jnp.concatenate(x, 1)))


class DIN(_HistoryModel[DINConfig]):
    """Each id of a history is weighed by the candidate before the history is summed.

    The Deep Interest Network of Zhou et al. 2018. A feature that reads the table of another
    one, such as the items that a user had beside the item that is shown, is a *history* of that
    other feature, its *candidate*::

        e_t = the vector of id t of a history;  c = the vector of its candidate
        w_t = attention([e_t, c, e_t - c, e_t * c])
        h = sum over t of w_t e_t
        logit = hidden(dense, embeddings of the other features, h of each history)

    Weights are not normalized, so that a history with many items of interest has a long sum. If
    a history has more than `length` ids, the last ones are read. The layers have ReLU where the
    paper has PReLU or Dice: their statistics over a batch would make an example's answer depend
    on the other examples.

    >>> features = {"user": 50, "item": 90, "had": "item"}
    >>> model = DIN(DINConfig(length=3), num_dense=0, features=features, rngs=nnx.Rngs(0))
    >>> ids = {"user": jnp.array([3]), "item": jnp.array([4]), "had": jnp.array([[5, 6, -1]])}
    >>> model(jnp.zeros((1, 0)), ids).shape
    (1,)

    Arguments: see `build_click_model`.

    Raises:
      ValueError: no feature reads the table of another one.
    """

    def _unit(self, rngs):
        sizes = (*self.config.attention, 1)
        return Layers(4 * self.config.dim, sizes, self.dtype, rngs)

    def _looked_up(self, ids):
        found = super()._looked_up(ids)
        if isinstance(ids, CandidateBatch):  # a history for each request
            shared = super()._looked_up(ids.requests)
            for name, _ in self.histories:
                if getattr(ids.candidates[name], "size", 1) == 0:
                    found[name] = shared[name]
        return found

    def _pooled(self, unit, name, candidate, rows):
        forms = {"default": functools.partial(_interest, unit)}
        if len(rows[name]) == len(candidate):
            return forms["default"](rows[name], candidate)
        forms["cpu"] = functools.partial(_shared_interest, unit)
        return jax.lax.platform_dependent(rows[name], candidate, **forms)


def _interest(layers: Layers, history: jax.Array, candidate: jax.Array) -> jax.Array:
    """`[batch, dim]`: the sum of a history by its `_attention` for each candidate."""
    if len(history) != len(candidate):
        history = jnp.repeat(history, len(candidate) // len(history), axis=0)
    return _summed(history, _attention(layers, history, candidate), axis=1)


def _shared_interest(layers: Layers, history, candidate) -> jax.Array:
    """`_interest` for candidates that share a history: one product for all of them."""
    rows, length, dim = history.shape
    first, *others = layers.layers
    of_each, of_both, once = _first_parts(first, candidate)
    of_pairs = candidate.reshape(rows, -1, dim).swapaxes(1, 2)[..., None]
    kernels = of_each[None, :, None] + of_pairs * of_both[None, :, None]
    x = jnp.matmul(history, kernels.reshape(rows, dim, -1)) + once.reshape(rows, 1, -1)
    weights = _weights(others, x.reshape(rows, -1, once.shape[1]))
    weights = weights.reshape(rows, length, -1)
    formula, dtype = "btc,btd->bcd", jnp.float32
    found = jnp.einsum(formula, weights, history, preferred_element_type=dtype)
    return found.reshape(candidate.shape)


def _attention(layers: Layers, history: jax.Array, candidate: jax.Array) -> jax.Array:
    """The attention scores `[batch, length]`: `layers([e, c, e - c, e * c])`; `e` is a vector of
    the history, `c` the candidate.

    The first layer is linear in these four parts. So `e` and `e - c` share one product, and the
    products with `c` are computed once for each example. The part `e * c` doubles the width of the
    product with `e`, or is added to a separate matrix for each example.
    """
    first, *others = layers.layers
    of_each, of_both, once = _first_parts(first, candidate)

    def of_examples(e, c):
        return jnp.matmul(e, of_each[None] + c[:, :, None] * of_both[None])

    def of_all(e, c):
        both = jnp.concatenate([e, e * c[:, None]], axis=-1)
        return both @ jnp.concatenate([of_each, of_both])

    on_cpu = of_examples if history.shape[1] > _FEW_PLACES else of_all
    forms = {"cpu": on_cpu, "default": of_all}
    x = jax.lax.platform_dependent(history, candidate, **forms) + once[:, None]
    return _weights(others, x)


def _first_parts(first: nnx.Linear, candidate: jax.Array) -> tuple[jax.Array, ...]:
    """The kernels for `e` and for `e * c`, and the first layer's output for `c` alone."""
    kernel = first.kernel[...].astype(candidate.dtype)
    of_each, of_candidate, of_gap, of_both = jnp.split(kernel, 4)
    once = with_bias(first, candidate @ (of_candidate - of_gap))
    return of_each + of_gap, of_both, once


def _weights(layers: Sequence[nnx.Linear], x: jax.Array) -> jax.Array:
    """The weights of ids, from the output of the first layer of the attention."""
    for layer in layers[:-1]:
        x = layer(relu(x))
    for layer in layers[-1:]:
        scores = _summed(relu(x), layer.kernel[...].astype(x.dtype)[:, 0], axis=2)
        x = with_bias(layer, scores.astype(x.dtype)[..., None])
    return x[..., 0]


def _summed(
    x: Float[Array, "batch length columns"], weights: jax.Array, axis: int
) -> jax.Array:
    """Sums `x` over an axis in float32, with a weight for each column or for each place."""
    formula = "btc,c->bt" if axis == 2 else "btc,bt->bc"

    def as_product(x, weights):
        return jnp.einsum(formula, x, weights, preferred_element_type=jnp.float32)

    # As a batched sum: a GPU is slow at multiplying a matrix by one column.
    def as_sum(x, weights):
        weights = weights[None, None] if axis == 2 else weights[..., None]
        return (x * weights).sum(axis, dtype=jnp.float32)

    return jax.lax.platform_dependent(x, weights, cpu=as_product, default=as_sum)


class TIN(_HistoryModel[TINConfig]):
    """Attention of the candidate to a history with places; the sum is multiplied by the candidate.

    The Temporal Interest Network of Zhou et al. 2024 (arXiv:2308.08487). A *history* and its
    *candidate* are those of `DIN`::

        e_t = the vector of id t of a history
              + the vectors of the columns beside it + place[ids behind t + 1]
        c = the vector of its candidate + place[0]
        a_t = softmax over t of e_t . c / sqrt(dim)
        h = sum over t of a_t e_t * c
        logit = hidden(dense, embeddings of the other features, h of each history)

    A column *beside* a history is a list that is as long, such as the time since each of its
    ids, in ranges. Places are counted from the end. If a history has more than `length` ids, the
    last ones are read. A place whose id is unknown keeps its number, and takes no part.

    >>> features = {"item": 90, "had": "item", "days": 30}
    >>> config = TINConfig(length=3, beside=(("had", "days"),))
    >>> model = TIN(config, num_dense=0, features=features, rngs=nnx.Rngs(0))
    >>> ids = {"had": jnp.array([[5, 6, -1]]), "days": jnp.array([[9, 2, -1]])}
    >>> model(jnp.zeros((1, 0)), ids | {"item": jnp.array([4])}).shape
    (1,)

    Arguments: see `build_click_model`.

    Raises:
      ValueError: no feature reads the table of another one, or `config.beside` names a feature
        that is not there, is no history, or has another use.
    """

    def _unit(self, rngs):
        return _Places(self.config.length, self.config.dim, rngs)

    def _pooled(self, unit, name, candidate, rows):
        known = (rows[name] != 0).any(-1)
        events = sum(
            (rows[column] for of, column in self.beside if of == name), start=rows[name]
        )
        here, *before = jnp.split(unit.vectors[...].astype(events.dtype), [1])
        query, size = candidate + here, known.shape[1]
        count = (known * (1 + jnp.arange(size))[None]).max(1)
        # Scores of place vectors are computed once for each place, without a `[batch, length,
        # dim]` array.
        scores = (events * query[:, None]).sum(-1, dtype=jnp.float32)
        of_places = query @ before[0][:size].T
        scores = scores + _from_the_end(of_places, count).astype(jnp.float32)
        weights = _softmax(scores / np.sqrt(self.config.dim), known).astype(
            events.dtype
        )
        summed = (weights[..., None] * events).sum(1, dtype=jnp.float32)
        return query * (summed + _from_the_end(weights, count) @ before[0][:size])


class _Places(nnx.Module):
    """Position vectors: one for the candidate's place, and one for each place before it."""

    def __init__(self, length: int, dim: int, rngs: nnx.Rngs):
        self.vectors = nnx.Param(_factor_init(rngs.params(), (1 + length, dim)))


def _beside(config, features, histories) -> tuple[tuple[str, str], ...]:
    """Checks the configuration's pairs (history, column beside it), and returns them."""
    pairs = getattr(config, "beside", ())
    found = [column for _, column in pairs]
    free = [name for name in features if name not in {*histories, *histories.values()}]
    for history, column in pairs:
        if history not in histories or column not in free or found.count(column) > 1:
            raise ValueError(
                "beside has pairs of a history and of a column that no other pair has: "
                f"histories are {list(histories)}, columns {free}, got {(history, column)}"
            )
    return pairs


@jax.custom_vjp
def _from_the_end(x: jax.Array, count: jax.Array) -> jax.Array:
    """Reverses the order of the first `count` numbers in each row, and sets the others to 0."""
    at = count[:, None] - 1 - jnp.arange(x.shape[1])[None]
    return jnp.where(at >= 0, jnp.take_along_axis(x, jnp.maximum(at, 0), axis=1), 0)


# This reversal is a symmetric matrix, so its derivative is the same reversal, without a scatter.
_from_the_end.defvjp(
    lambda x, count: (_from_the_end(x, count), count),
    lambda count, slope: (_from_the_end(slope, count), None),
)


def _softmax(scores: jax.Array, known: jax.Array) -> jax.Array:
    """The softmax over the known places of each row; a row without a known place has zeros."""
    scores = jnp.where(known, scores, -jnp.inf)
    most = jax.lax.stop_gradient(scores.max(1, keepdims=True, initial=-1e30))
    weights = jnp.exp(scores - most)
    return weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-30)


class Fitted(nnx.Variable):
    """An array that is fitted outside of training. Optimizers do not change it."""


class _Linear(nnx.Module):
    """The linear part: a weight for each id and each dense column, and a bias, all initially 0.

    If the configuration has `regression`, optimizers do not change these parameters.
    """

    def __init__(self, config, num_dense, features, on_mesh, rngs):
        zeros = nnx.initializers.zeros
        rule = sgd(0.0) if config.regression else None
        labels = (len(on_mesh.labels),) if on_mesh.labels else ()
        self.embeddings = _tables(
            config,
            features,
            max(labels, default=1),
            on_mesh,
            rngs,
            init=zeros,
            rule=rule,
        )
        variable = Fitted if config.regression else nnx.Param
        self.weights = variable(jnp.zeros((num_dense, *labels)))
        self.bias = variable(jnp.zeros(labels))

    def __call__(self, dense, ids) -> jax.Array:
        rows, bias = self.embeddings.concat(ids), self.bias[...]
        if labels := bias.shape:
            rows, bias = rows.reshape(len(rows), -1, *labels), bias[None]
        dense = jnp.asarray(dense, jnp.float32)
        return rows.sum(axis=1) + dense @ self.weights[...] + bias


# The model class for each name of a configuration.
_MODELS: Mapping[str, type[Any]] = {
    "dlrm": DLRM,
    "dcn": DCN,
    "deepfm": DeepFM,
    "wide_deep": WideDeep,
    "din": DIN,
    "tin": TIN,
}


def gives_ids_as_they_are(model: Any) -> bool:
    """Whether a model passes the ids of a batch unchanged to its embedding collections.

    True for the models of this module. Any other class, also a subclass, may change the ids.
    """
    return type(model) in _MODELS.values()


def build_click_model(
    config: ClickModelConfig,
    *,
    num_dense: int,
    features: Mapping[str, int | str],
    plan: EmbeddingPlan | Mapping[str, Placement] = _PLAN,
    wire_dtype: jax.typing.DTypeLike | None = None,
    exchange_room: float | None = None,
    labels: Mapping[str, str | None] = _ONE_LABEL,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Builds the click model that a configuration describes.

    >>> config = ClickModelConfig.from_json({"version": 1, "model": "dcn"})
    >>> model = build_click_model(config, num_dense=3, features={"user": 50}, rngs=nnx.Rngs(0))
    >>> type(model).__name__
    'DCN'

    Args:
      config: configuration of one of the models.
      num_dense: number of dense columns; may be 0.
      features: number of ids of each feature, by the feature's name; the number 2^64 makes a
        dynamic table, by `config.dynamic`. Or the name of another feature, which has these ids,
        too, and whose table this feature reads; DIN and TIN read it as a history of that one.
        `ClickDataset.features` is such a mapping.
      plan: a plan made by `plan_embeddings`, or placements of some tables.
        `EmbeddingCollection` places the others.
      wire_dtype: dtype in which sums and gradients cross between devices; by default the dtype
        of the table.
      exchange_room: places for ids between each pair of devices, as a multiple of an even
        share; 1.5 by default, and more for few ids.
      labels: several labels by name, each with the earlier label without which it cannot be 1,
        or None. None are named for a model of one label.
      rngs: random streams.
    """
    make = _MODELS.get(getattr(config, "model", ""))
    if make is None:
        raise TypeError(
            "expected the configuration of a click model, such as DLRMConfig(), got "
            f"{type(config).__name__}"
        )
    return make(
        config,
        num_dense=num_dense,
        features=features,
        plan=plan,
        wire_dtype=wire_dtype,
        exchange_room=exchange_room,
        labels=labels,
        rngs=rngs,
    )


def _tables(
    config,
    features,
    dim,
    on_mesh: _OnMesh,
    rngs,
    *,
    init=None,
    rule=None,
    histories: int | None = None,
    beside: Sequence[str] = (),
):
    """The tables of all features.

    Args:
      histories: how many vectors of a feature that reads the table of another one stay apart;
        by default they are summed, as are those of the others.
      beside: other features whose vectors stay apart.
    """
    tables = {}
    for name, rows in features.items():
        if isinstance(rows, str):
            if isinstance(features.get(rows, ""), str):
                raise ValueError(
                    f"feature {name!r} reads the table of {rows!r}, which is no feature with a "
                    f"table of its own; features are {dict(features)}"
                )
        elif rows < NUM_IDS:
            tables[name] = TableConfig(rows, dim, init=init, rule=rule)
        elif config.dynamic is None:
            raise ValueError(
                f"feature {name!r} has ids of 64 bits: say how many rows its table has, by "
                "dynamic=DynamicTables(num_rows=...) of the model's configuration, or dynamic=N"
            )
        else:
            tables[name] = config.dynamic.table(dim, init)
    if config.dynamic and NUM_IDS not in features.values():
        raise ValueError(
            "the configuration has dynamic tables, but no feature has ids of 64 bits: read "
            "its column as a KeyColumn, or leave out dynamic"
        )
    read = {}
    for name, rows in features.items():
        table = rows if isinstance(rows, str) else name
        if histories is None or (table == name and name not in beside):
            read[name] = FeatureConfig(table, combiner=config.combiner)
        else:
            read[name] = FeatureConfig(
                table, combiner=None, length=histories, longer="last"
            )
    plan = on_mesh.plan
    if isinstance(plan, EmbeddingPlan):
        plan = plan.of_width(dim)
    options = on_mesh._asdict() | {"plan": plan}
    del options["labels"]
    return EmbeddingCollection(tables, read, rngs=rngs, **options)


def _vectors(rows: jax.Array, dim: int) -> jax.Array:
    """Reshapes `[batch, features * dim]` to `[batch, features, dim]`."""
    return rows.reshape(len(rows), rows.shape[1] // dim, dim)


def _check_labels(config: ClickModelConfig, labels: tuple[str, ...]) -> None:
    """Raises ValueError if the configuration does not fit these labels."""
    if labels and config.regression:
        raise ValueError(
            f"regression=True is for one label, but there are {len(labels)}: leave it out"
        )
    if not labels and config.sharing is not None:
        raise ValueError(
            "sharing says how several labels share layers, but there is one: leave it out, or "
            "name more by ClickSchema(labels=[...])"
        )
