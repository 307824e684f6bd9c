"""The base of sequence models: the vectors of items, the loss and the best items."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.embeddings.config import check_floating
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import (
    BY_ROWS,
    divided_over_all,
    item_axes,
    jit_sharded,
    mesh_is_set,
    num_devices,
    out_sharding,
    replicated,
)
from sparsejax.nn.item_content import ContentSizes, with_vectors
from sparsejax.nn.layers import SparseOutput
from sparsejax.nn.sampled import NegativeSampler, sample_with_batch
from sparsejax.optimizers.gradients import RowParam, is_divided, rows_of_parts
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sequence.config import SequenceConfig, operand_dtype
from sparsejax.sequence.events import EventColumns, EventSizes, EventVectors, NextEvent
from sparsejax.sequence.tokens import PADDING, Dropout, Tokens
from sparsejax.sequence.turns import (
    Picked,
    Turn,
    last_of_turns,
    sum_of_turns,
    tokens_of_turn,
)

# Once: a program that is compiled for a function is not found for its like.
normal = nnx.initializers.normal(0.02)

_USER = PADDING - 1  # the place of users

Ids = Int[Array, "batch length"]
Times = Float[Array, "batch length"] | None
Vectors = Float[Array, "batch length width"]
TokenVectors = Float[Array, "tokens width"]


class SequenceModel(nnx.Module):
    """A model of histories. Each says in `__call__` how items become hidden vectors.

    >>> class LastItem(SequenceModel):
    ...     def __call__(self, histories, times=None):
    ...         return self.output.kernel[...][jnp.maximum(histories, 0)]
    >>> model = LastItem(SASRecConfig(width=8), items=100, rngs=nnx.Rngs(0))
    >>> model.loss(jnp.array([[7, 3, 7], [5, 1, -1]])).shape
    ()

    With E the vectors of the items and h_t the hidden vector of place t, which depends on
    the places up to t alone::

        score_ti = h_t . E_i                            or cos(h_t, E_i) / temperature

    Histories are `[batch, length]` int32, the oldest item first, then -1, as
    `SequenceDataset.padded` makes them. A history without items has the vector of its
    first place alone. An id that is neither an item nor -1 makes its row NaN.

    Times are `[batch, length]` float32, in any unit. Only differences within a row count,
    so that the times of a row may begin with 0, which keeps them exact.

    Columns of events are arrays by name, `[batch, length]` or `[batch, length, most]` for lists of
    categories. A model that was made for them reads at each place the vector of the item plus
    that of its event, `E_i + C_e`: see `EventVectors`. It scores with the vectors of items alone.

    Columns that `EventSchema.context` names are known of the event to come. Vectors of them are
    added at the place before it: in `loss` for each target, and elsewhere for the request,
    whose columns are `[batch]` or `[batch, most]` with the names `context/NAME`.

    Columns of users, named `users/NAME`, are `[batch]` or `[batch, most]`. A model that was made for
    them has one place more, in front of the history, with their vectors. So the first item is a
    target, too, and a history without items has its user's hidden vector.

    Attributes:
      uses_times: whether times make a difference. They may still be None.
      config: settings of the model.
      num_items: number of items.
      output: the vectors of the items, `output.kernel`, read and scored with.
      events: the vectors of events' columns, `EventVectors`; None if the model reads none.
      context: the vectors of the columns that are known of the event to come, or None.
      users: the vectors of users' columns, or None.
      next_event: the scores of the labels of the next event, given its item; or None. `loss`
        then also has the mean of their losses over all events behind an item, or a user,
        whatever the weights of targets are.

    Args:
      config: settings of the model.
      items: number of items.
      content: sizes of the content of items (tags and vectors), as for
        `sparsejax.nn.ItemContent`; `sparsejax.build` passes them. None: items have no
        content.
      events: sizes of the columns of events; `sparsejax.build` passes them. None: the model
        reads no columns.
      rngs: random streams: "params", and in training "dropout" and "negatives".

    Raises:
      ValueError: `items` is not positive.
    """

    kind = "histories"
    # Whether `top_k` is that of the output layer for `queries`, in this class.
    ranks_by_layer: ClassVar[bool] = True
    uses_times: bool = False
    events: EventVectors | None = None
    context: EventVectors | None = None
    users: EventVectors | None = None
    next_event: NextEvent | None = None

    def __init__(
        self,
        config: SequenceConfig,
        *,
        items: int,
        content: ContentSizes | None = None,
        events: EventSizes | None = None,
        rngs: nnx.Rngs,
    ):
        if items < 1:
            raise ValueError(f"items must be 1 or more, got {items}")
        self.config = config
        self.output = SparseOutput(
            config.width,
            items,
            use_bias=False,
            kernel_init=normal,
            temperature=config.temperature,
            content=content,
            rngs=rngs,
        )
        if events is not None:
            self.events = EventVectors(events, config.width, rngs=rngs)
            if events.context:
                own = events.of_context
                self.context = EventVectors(own, config.width, rngs=rngs)
            if events.users is not None:
                self.users = EventVectors(events.users, config.width, rngs=rngs)
            if events.labels:
                self.next_event = NextEvent(events, config.width, rngs=rngs)
        self.draws = rngs.negatives.fork()
        self.set_negatives(config.negatives)

    def set_negatives(self, negatives: int | None) -> None:
        """Makes `loss` the softmax over other items, in place; then make a new optimizer.

        >>> config = SASRecConfig(max_length=4, width=8, negatives=3)
        >>> model = SASRec(config, items=9, rngs=nnx.Rngs(0))
        >>> model.set_negatives(None)  # to end with some epochs of the exact softmax
        >>> type(model.output.kernel).__name__
        'Param'

        While there are negatives the vectors of the items are a `RowParam`: a step of
        `sparsejax.Optimizer` reads and writes only those that the batch has or that are drawn.

        Args:
          negatives: number of items drawn for the loss of each batch, as in
            `SequenceConfig`; None takes all.
        """
        sampler = "uniform" if negatives is None else self.config.sampler
        self.config = dataclasses.replace(
            self.config, negatives=negatives, sampler=sampler
        )
        # With content, all vectors are made in each step, so that all rows are read.
        whole = negatives is None or self.output.content is not None
        kind, kernel = nnx.Param if whole else RowParam, self.output.kernel
        if type(kernel) is kind:
            return
        # Where all are scored, all devices divide them. Rows of a batch are read from the
        # devices along "model": else all vectors would be gathered over "data" in each step.
        spec = P(item_axes(), None) if whole else BY_ROWS
        value, metadata = kernel[...], kernel.get_metadata()
        if mesh_is_set():
            value = jit_sharded(_same, spec, static=())(value)
            metadata = metadata | out_sharding(spec)
        self.output.kernel = kind(value, **metadata)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.output.num_items

    def __call__(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Vectors:
        """The hidden vector of each place.

        Raises:
          ValueError: histories are longer than `max_length`, or the columns of events are
            not those that the model was made for.
        """
        raise NotImplementedError("a sequence model defines __call__")

    def add_items(self, count: int, *, optimizer: Optimizer | None = None) -> None:
        """Adds items behind the known ones, in place: see `FeedForward.add_items`.

        >>> model = SASRec(SASRecConfig(max_length=4, width=8), items=9, rngs=nnx.Rngs(0))
        >>> model.add_items(3)
        >>> model.num_items
        12

        Every round of new items has new shapes, for which programs are compiled anew. Those
        of the rounds before stay in memory until `jax.clear_caches()` is called.

        Args:
          count: number of new items.
          optimizer: the model's; its state gets rows too.
        """
        known: dict[tuple[str, ...], int] = {("output", "kernel"): self.num_items}
        self.output.add_items(count)
        if optimizer is not None:
            optimizer.add_rows(self, known)

    def embed(self, histories: Ids, events: EventColumns | None = None) -> Vectors:
        """The vector of each item, plus that of its event; zeros where there is no item.

        If the model reads columns of users, their vectors are a place of its own in front.

        Raises:
          ValueError: histories are longer than `max_length`, or the columns of events are
            not those that the model was made for.
        """
        self._check_length(histories.shape[1])
        events = self._events_of(events, histories)
        items, histories = histories, self._with_users(histories)
        vectors = self._vectors_of(histories.reshape(-1))
        vectors = vectors.reshape(*histories.shape, -1)
        vectors = self._with_events(vectors, events, histories)
        broken = self._front(self._broken(items), False)
        return jnp.where(broken[..., None], jnp.nan, vectors)

    def _front(self, x: Any, fill: Any = 0) -> Any:
        """An array of places, `[batch, length, ...]`, with the place of users in front."""
        if self.users is None or x is None:
            return x
        more = [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, more, constant_values=fill)

    def _with_users(self, histories: Ids) -> Ids:
        """The histories with the place of users in front."""
        return self._front(histories, _USER)

    def _times_with_users(self, times: Times) -> Times:
        """The times, with that of the first item at the place of users."""
        if self.users is None or times is None:
            return times
        return jnp.concatenate([times[:, :1], times], axis=1)

    def _vectors_of(self, ids: Int[Array, "tokens"]) -> TokenVectors:
        """The vector of each item; zeros where the id is of no item."""
        known = (ids >= 0) & (ids < self.num_items)
        return self.output.rows(jnp.where(known, ids, PADDING))

    def _with_events(
        self,
        vectors: jax.Array,
        events: EventColumns | None,
        ids: Int[Array, "*places"],
        rows: Int[Array, "*places"] | None = None,
    ) -> jax.Array:
        """The vectors of items plus those of their events, where there is an item.

        The context of the event behind a place also stands where there is none, and the vectors
        of users where their place is.

        Args:
          vectors: vectors of the items.
          events: the columns at these places, and of users `[batch, ...]`.
          ids: the items.
          rows: row of each place in the batch; None for places `[batch, length]`.
        """
        if self.events is None or events is None:
            return vectors
        if names := self.events.sizes.shapes:
            own = self.events({name: events[name] for name in names})
            vectors = vectors + jnp.where((ids >= 0)[..., None], own, 0)
        if self.context is not None:
            names = self.context.sizes.shapes
            ahead = self.context({name: events[f"{CONTEXT}{name}"] for name in names})
            vectors = vectors + ahead
        if self.users is not None:
            names = self.users.sizes.shapes
            users = self.users({name: events[f"{USERS}{name}"] for name in names})
            if rows is None:
                users = jnp.where((ids == _USER)[..., None], users[:, None], 0)
            else:
                # Out of range elsewhere, where the derivative has nothing to add.
                at = jnp.where(ids == _USER, rows, len(users))
                users = users.at[at].get(mode="fill", fill_value=0)
            vectors = vectors + users
        return vectors

    def _events_of(
        self, events: EventColumns | None, histories: Ids, *, request: bool = True
    ) -> EventColumns | None:
        """The columns of events, checked, with the context of the event behind each place.

        Args:
          events: the columns.
          histories: the histories.
          request: whether the context of the event to come is among the columns. Otherwise the
            last place of the histories is a target only.

        Raises:
          ValueError: the model was made for columns and there are none, the other way round,
            or they have another shape.
        """
        if self.events is None:
            if events is not None:
                raise ValueError(
                    "the model was made without columns of events; make it with "
                    "build(config, data), of data that have them"
                )
            return None
        sizes = self.events.sizes
        if events is None:
            raise ValueError(
                f"the model reads the columns of events {[*sizes.shapes]}; give events=..."
            )
        sizes.check(events, histories.shape, request=request)
        events = {
            n: self._front(x) if n in sizes.shapes else x for n, x in events.items()
        }
        if not request:
            return sizes.in_training(events)
        return sizes.in_request(events, _last_place(self._with_users(histories)))

    def _before_last(self, events: EventColumns) -> EventColumns:
        """The columns for a call with all places but the last, which is a target only."""
        names = () if self.context is None else self.context.sizes.shapes
        to_come = {f"{CONTEXT}{name}": events[name][:, -1] for name in names}
        of_users = {n: x for n, x in events.items() if n.startswith(USERS)}
        own = {n: x[:, :-1] for n, x in events.items() if n not in of_users}
        return own | of_users | to_come

    def _broken(self, ids: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return (ids < PADDING) | (ids >= self.num_items)

    def _check_length(self, length: int) -> None:
        most = self.config.max_length
        if length > most:
            raise ValueError(
                f"histories have {length} places, but max_length is {most}; cut them: "
                f"data.padded({most})"
            )

    def loss(
        self,
        histories: Ids,
        times: Times = None,
        *,
        max_targets: int | None = None,
        weights: Float[Array, "batch length"] | None = None,
        events: EventColumns | None = None,
    ) -> Float[Array, ""]:
        """Mean cross-entropy of the next item, over all places that have one.

        It is over all items, or those that are drawn: see `SequenceConfig.negatives`.

        Where there are more than some thousand places, the tokens of some histories are
        worked on together, in as many turns as the batch needs when it runs: time and memory
        are proportional to the places that have a next item, not to the padding.
        `SASRec` and `HSTU` are computed so from the vectors of items to the loss and
        back; other models are called with all places, and their output layer computes
        the rest alone.

        Args:
          histories: up to `max_length + 1` places.
          times: time of each place, or None.
          max_targets: the most places that have a next item, where it is known. All are then
            one turn of so many places, which a GPU works on a little faster. More places make the
            loss NaN. A mesh of several devices has one turn always, and needs this number: parts of
            "data" share it evenly, and deal out the histories so that parts have nearly the
            same number. None is any number.
          weights: factor of the loss of each place as a target, so that the first place has no
            use; the mean is weighted. None is 1 for each.
          events: columns of the events, of the same places as the histories; None if the
            model was made without.

        Raises:
          ValueError: histories are longer, or have less than two places; or the columns of
            events are not those that the model was made for.
        """
        _check_two(histories)
        _check_weights(weights, histories)
        columns = self._events_of(events, histories, request=False)
        model = with_vectors(self, deterministic=False)
        own = {} if events is None else {"events": model._before_last(events)}
        h = model(histories[:, :-1], None if times is None else times[:, :-1], **own)
        histories, weights = self._with_users(histories), self._front(weights)
        times = self._times_with_users(times)
        loss = model._loss_of_places(histories, times, h, max_targets, weights)
        if model.next_event is None or columns is None:
            return loss
        targets, h = histories[:, 1:].reshape(-1), h.reshape(-1, h.shape[-1])
        labels = {
            each.name: columns[each.name][:, 1:].reshape(
                len(targets), *columns[each.name].shape[2:]
            )
            for each in model.next_event.labels
        }
        return loss + model._loss_of_next(
            h, model._vectors_of(targets), targets, labels
        )

    def _loss_of_next(self, h, of_targets, targets, labels, total=None):
        """The mean loss of the labels of events, or their sum over `total`."""
        assert self.next_event is not None
        is_event = targets != PADDING
        if total is None:
            total = jnp.maximum(jnp.sum(is_event), 1)
        return self.next_event.loss(h, of_targets, is_event, labels) / total

    def _labels_at(
        self, events: EventColumns | None, tokens: Tokens
    ) -> dict[str, jax.Array]:
        """The labels of each token's next event."""
        assert self.next_event is not None and events is not None
        labels = self.next_event.labels
        return {each.name: _of_targets(events[each.name], tokens) for each in labels}

    def _loss_of_places(self, histories, times, h, max_targets, weights):
        """The loss of the next items, of the hidden vectors of all places but the last."""
        size = tokens_of_turn(histories)
        if max_targets is None and size is not None:
            return self._loss_by_turns(histories, times, size, h, weights=weights)
        targets = histories[:, 1:]
        if weights is not None:
            weights = weights[:, 1:]
        if max_targets is None:
            return self._cross_entropy(h, targets, weights)
        h, targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
        wanted = targets != PADDING
        (places,) = jnp.nonzero(wanted, size=max_targets, fill_value=len(targets))
        h = h.at[places].get(mode="fill", fill_value=0)
        targets = targets.at[places].get(mode="fill", fill_value=PADDING)
        if weights is not None:
            weights = weights.reshape(-1).at[places].get(mode="fill", fill_value=0)
        loss = self._cross_entropy(h, targets, weights)
        return jnp.where(jnp.sum(wanted) > max_targets, jnp.nan, loss)

    def _cross_entropy(self, h, targets, weights=None):
        return self._loss_of_hidden(h, targets, self._drawn(targets), weights)

    def _loss_of_hidden(self, h, targets, drawn, weights):
        """The loss of hidden vectors.

        Args:
          h: hidden vectors.
          targets: next items.
          drawn: negatives and their log probabilities; with None the loss is over all items.
          weights: factors of the losses, or None.
        """
        if drawn is None:
            return self.output.cross_entropy(h, targets, weights=weights)
        negatives, log_q = drawn
        return self.output.sampled_cross_entropy(
            h, targets, negatives, log_q=log_q, weights=weights, dtype=self._score_dtype
        )

    @property
    def _score_dtype(self) -> Literal["bfloat16"] | None:
        return "bfloat16" if operand_dtype(self.config) == "bfloat16" else None

    def _drawn(self, targets) -> tuple[jax.Array, jax.Array] | None:
        """Negatives and the logarithms of their probabilities; None without negatives."""
        if (count := self.config.negatives) is None:
            return None
        if self.config.sampler == "batch":
            drawn = sample_with_batch(self.draws(), targets, self.num_items, count)
        else:
            drawn = NegativeSampler.uniform(self.num_items).sample(self.draws(), count)
        # To divide so few over a mesh takes longer than to draw them everywhere.
        return (replicated(drawn[0]), replicated(drawn[1])) if mesh_is_set() else drawn

    def _loss_by_turns(
        self,
        histories: Ids,
        times: Times,
        size: int,
        h: Vectors | None = None,
        *,
        weights: Float[Array, "batch length"] | None = None,
        events: EventColumns | None = None,
    ) -> Float[Array, ""]:
        """The loss, with memory and time proportional to the places that have a next item.

        Args:
          histories: items of each row, up to `max_length + 1` places.
          times: time of each place, or None.
          size: the number of tokens of a turn.
          h: the hidden vectors; None if `_of_tokens` computes them in each turn.
          weights: factor of the loss of each place as a target, or None.
          events: columns of the events, where `h` is None and the model reads any.
        """
        length = histories.shape[1]
        wanted = histories[:, 1:] != PADDING
        if weights is None:
            total = jnp.maximum(jnp.sum(wanted), 1)
        else:
            total = jnp.sum(jnp.where(wanted, weights[:, 1:], 0))
            total = jnp.where(total == 0, 1, total)
        drawn = self._drawn(histories[:, 1:])
        # The rows of items that a turn reads are read before the loop, so that the optimizer
        # sees which they are.
        inputs = jnp.pad(wanted, ((0, 0), (0, 1))) & (h is None)
        is_read = inputs | jnp.pad(wanted, ((0, 0), (1, 0)))
        ids = jnp.where(is_read, histories, PADDING).reshape(-1)
        if drawn is not None:
            ids = jnp.concatenate([ids, drawn[0]])
        arrays, picks, of_drawn, bias = [], [], None, None
        if h is not None:
            arrays.append(h.reshape(-1, h.shape[-1]))
            picks.append(Picked(0, length - 1))
        if h is None or drawn is not None:
            vectors = self._vectors_of(ids)
            arrays.append(vectors[: histories.size])
            of_drawn = vectors[histories.size :]
        if h is None:
            picks.append(Picked(0, length))
        output, of_next = self.output, None
        if h is None and self.next_event is not None:
            of_next = jnp.maximum(jnp.sum(wanted), 1)
        if drawn is not None or of_next is not None:
            picks.append(Picked(len(arrays) - 1, length, 1))
        if drawn is not None:
            bias, output = output.training_bias(), output.without_vectors()
        model = output
        if h is None:
            model = copy.copy(self)
            vars(model)["output"] = output
        return sum_of_turns(
            _LossOfTurn(h is None, self._score_dtype),
            model,
            histories,
            times,
            arrays,
            picks,
            of_drawn,
            (bias, drawn, total, weights, events, of_next),
            size=size,
        )

    def last(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Float[Array, "batch width"]:
        """The hidden vector of each history's last item."""
        h = self(histories, times, **_columns(events))
        return _at_the_end(h, self._with_users(histories))

    def queries(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Float[Array, "batch width"]:
        """The vectors that `top_k` multiplies with the items' vectors."""
        return self.output.queries(self.last(histories, times, **_columns(events)))

    def top_k(
        self,
        histories: Ids,
        k: int,
        *,
        exclude: SparseRows | None = None,
        excluded: Bool[Array, "items"] | None = None,
        times: Times = None,
        events: EventColumns | None = None,
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and scores of the items that are most likely next; see `sparsejax.top_k`.

        Args:
          histories: up to `max_length` places.
          k: number of items.
          exclude: items to leave out of each row.
          excluded: a mask of items that are excluded in all rows.
          times: time of each place, or None.
          events: columns of the events; None if the model was made without.
        """
        model = with_vectors(self)
        own = _columns(events)
        h = model.last(histories, times, **own)
        return model.output.top_k(h, k, exclude=exclude, excluded=excluded)

    def item_scores(
        self,
        histories: Ids,
        ids: Int[Array, "batch count"],
        *,
        times: Times = None,
        events: EventColumns | None = None,
    ) -> Float[Array, "batch count"]:
        """Scores of some items for each history, without computing the others'.

        Args:
          histories: up to `max_length` places.
          ids: item numbers, in `[0, num_items)`. The score of any other number is NaN.
          times: time of each place, or None.
          events: columns of the events; None if the model was made without.
        """
        model = with_vectors(self)
        own = _columns(events)
        return model.output.item_scores(model.last(histories, times, **own), ids)


@dataclasses.dataclass(frozen=True)
class _LossOfTurn:
    """A turn's part of the mean loss, a `turns.TurnSum`.

    Attributes:
      of_tokens: whether the model makes the hidden vectors, a `TokenModel`. Else they are
        picked, and the model is the output layer.
      dtype: dtype of the operands of products with sampled negatives; None is the
        vectors' dtype.
    """

    of_tokens: bool
    dtype: Literal["bfloat16"] | None

    def __call__(self, model: Any, turn: Turn, of_drawn: Any, fixed: Any) -> jax.Array:
        bias, drawn, total, weights, events, of_next = fixed
        h, *of_targets = turn.picked
        output, more = model, None
        if self.of_tokens:
            output, h = model.output, model._of_tokens(turn.tokens, h, events)
        if of_next is not None:
            labels = model._labels_at(events, turn.tokens)
            more = model._loss_of_next(h, *of_targets, turn.targets, labels, of_next)
        if weights is not None:
            weights = _of_targets(weights, turn.tokens)
        if drawn is None:
            loss = output.cross_entropy(h, turn.targets, weights=weights)
        else:
            loss = output.sampled_of_vectors(
                h,
                *of_targets,
                of_drawn,
                turn.targets,
                *drawn,
                bias=bias,
                weights=weights,
                dtype=self.dtype,
            )
        has_target = turn.targets != PADDING
        if weights is None:
            loss = loss * (jnp.sum(has_target) / total)
        else:
            loss = loss * (jnp.sum(jnp.where(has_target, weights, 0)) / total)
        return loss if more is None else loss + more


class TokenModel(SequenceModel):
    """A `SequenceModel` that computes nothing for padding. Each defines `_new_block`.

    A call with padded histories gives the same numbers as one with tokens. The vectors of
    a history depend on no other history.
    """

    def __init__(
        self,
        config: SequenceConfig,
        *,
        items: int,
        content: ContentSizes | None = None,
        events: EventSizes | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, items=items, content=content, events=events, rngs=rngs)
        if self.users is not None:  # who have a place
            config = dataclasses.replace(config, max_length=config.max_length + 1)
        shape = config.max_length, config.width
        self.places = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.dropout = Dropout(config.dropout, rngs=rngs)
        blocks = (self._new_block(config, rngs) for _ in range(config.blocks))
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def _new_block(self, config: Any, rngs: nnx.Rngs) -> Any:
        """A layer of attention, called with vectors and their tokens."""
        raise NotImplementedError("a model of tokens defines _new_block")

    def _of_tokens(
        self,
        tokens: Tokens,
        vectors: TokenVectors | None = None,
        events: EventColumns | None = None,
    ) -> TokenVectors:
        """The hidden vector of each token, which depends on those before it.

        Args:
          tokens: tokens of some histories.
          vectors: vectors of their items; None reads them.
          events: columns of the events of the batch, `[batch, length, ...]`, and of users,
            `[batch, ...]`.
        """
        if vectors is None:
            vectors = self._vectors_of(tokens.ids)
        if events is not None:
            events = {
                n: x if n.startswith(USERS) else x[tokens.rows, tokens.places]
                for n, x in events.items()
            }
            vectors = self._with_events(vectors, events, tokens.ids, tokens.rows)
        vectors = vectors * self.config.width**0.5
        x = self.dropout(vectors + self.places[...][tokens.places], tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return self.norm(x)

    def __call__(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Vectors:
        self._check_length(histories.shape[1])
        events = self._events_of(events, histories)
        if 0 in histories.shape:
            return jnp.zeros((*histories.shape, self.config.width))
        items, histories = histories, self._with_users(histories)
        times = self._times_with_users(times)
        h = self._of_tokens(Tokens.spread(histories, times), None, events)
        broken = jnp.any(self._broken(items), axis=1)
        h = h.reshape(*histories.shape, -1)
        return jnp.where(broken[:, None, None], jnp.nan, h)

    def last(
        self, histories: Ids, times: Times = None, *, events: EventColumns | None = None
    ) -> Float[Array, "batch width"]:
        """The hidden vector of each history's last item.

        On a CPU nothing is computed for padding.
        """
        self._check_length(histories.shape[1])
        drops = self.dropout.rate > 0 and not self.dropout.deterministic
        size = tokens_of_turn(self._with_users(histories))
        if 0 in histories.shape or size is None or drops:
            return super().last(histories, times, events=events)
        events = self._events_of(events, histories)
        items, histories = histories, self._with_users(histories)
        times = self._times_with_users(times)
        vectors = self._vectors_of(histories.reshape(-1))
        layers = copy.copy(self)
        vars(layers)["output"] = None
        graph, state, rest = nnx.split(layers, nnx.Param, ...)

        def of_all(state, vectors, rest, histories, times, events):
            tokens = Tokens.spread(histories, times)
            h = nnx.merge(graph, state, rest)._of_tokens(tokens, vectors, events)
            return _at_the_end(h.reshape(*histories.shape, -1), histories)

        def of_turns(state, vectors, rest, histories, times, events):
            model = nnx.merge(graph, state, rest)

            def of_tokens(tokens, vectors):
                return model._of_tokens(tokens, vectors, events)

            return last_of_turns(of_tokens, histories, times, vectors, size)

        @jax.custom_vjp
        def last(*arrays):
            return lax.platform_dependent(*arrays, cpu=of_turns, default=of_all)

        def forward(*arrays):
            return last(*arrays), arrays

        def backward(arrays, slopes):
            state, vectors, *fixed = arrays

            def of_smooth(state, vectors):
                return of_all(state, vectors, *fixed)

            _, pull = jax.vjp(of_smooth, state, vectors)
            return *pull(slopes), None, None, None, None

        last.defvjp(forward, backward)
        if times is not None:
            # A time before an earlier one counts as that.
            times = lax.cummax(times, axis=1)
        h = last(state, vectors, rest, histories, times, events)
        broken = jnp.any(self._broken(items), axis=1)
        return jnp.where(broken[:, None], jnp.nan, h)

    def loss(
        self,
        histories: Ids,
        times: Times = None,
        *,
        max_targets: int | None = None,
        weights: Float[Array, "batch length"] | None = None,
        events: EventColumns | None = None,
        wire_dtype: jax.typing.DTypeLike | None = None,
    ) -> Float[Array, ""]:
        """`SequenceModel.loss`, on a mesh with tokens on all devices.

        With sampled negatives each device asks once for each item that its tokens, targets and
        negatives have.

        Args:
          histories: up to `max_length + 1` places.
          times: time of each place, or None.
          max_targets: the most places that have a next item, where it is known.
          weights: factor of the loss of each place as a target; None is 1 for each.
          events: columns of the events, of the same places as the histories; None if the
            model was made without.
          wire_dtype: dtype in which vectors of items and their gradients cross between
            devices, such as bfloat16; None is that of the vectors.

        Raises:
          ValueError: histories are longer, or have less than two places; the columns of events are
            not those that the model was made for; or no vectors cross, and `wire_dtype` is
            given.
          TypeError: `wire_dtype` is no floating dtype of 16 bits or more.
        """
        _check_two(histories)
        _check_weights(weights, histories)
        if wire_dtype is not None:
            check_floating("wire_dtype", wire_dtype)
        self._check_length(histories.shape[1] - 1)
        events = self._events_of(events, histories, request=False)
        model = with_vectors(self, deterministic=False)
        broken = jnp.any(self._broken(histories[:, :-1]))
        # An item behind padding would be taken for one of an earlier place.
        is_item = histories != PADDING
        broken |= jnp.any(is_item[:, 1:] & ~is_item[:, :-1])
        histories, weights = self._with_users(histories), self._front(weights)
        times = self._times_with_users(times)
        size = tokens_of_turn(histories)
        if max_targets is None and size is not None:
            _check_wire(wire_dtype)
            loss = model._loss_by_turns(
                histories, times, size, weights=weights, events=events
            )
            return jnp.where(broken, jnp.nan, loss)
        room = histories[:, 1:].size if max_targets is None else max_targets
        tokens, targets, fits = Tokens.packed(histories, times, room)
        if weights is not None:
            weights = _of_targets(weights, tokens)
        drawn = model._drawn(targets)
        if drawn is not None and model._reads_by_device(tokens):
            asked = Asked.of(
                len(targets) // num_devices(),
                len(histories) // num_devices(),
                len(drawn[0]),
                num_devices(),
            )
            vectors, of_targets, of_drawn = model._read_by_device(
                tokens, targets, drawn[0], asked, wire_dtype
            )
            h = model._of_tokens(tokens, vectors, events)
            loss = model.output.sampled_of_vectors(
                h,
                of_targets,
                of_drawn,
                targets,
                *drawn,
                bias=model.output.training_bias(),
                weights=weights,
                dtype=model._score_dtype,
            )
        else:
            _check_wire(wire_dtype)
            h, of_targets = model._of_tokens(tokens, None, events), None
            loss = model._loss_of_hidden(h, targets, drawn, weights)
        if model.next_event is not None:
            if of_targets is None:
                of_targets = model._vectors_of(targets)
            labels = model._labels_at(events, tokens)
            loss = loss + model._loss_of_next(h, of_targets, targets, labels)
        return jnp.where(fits & ~broken, loss, jnp.nan)

    def _reads_by_device(self, tokens: Tokens) -> bool:
        """Whether each device of a mesh reads the vectors of its own tokens."""
        kernel = self.output.kernel
        return (
            1 < len(tokens.indptr) == num_devices()
            and isinstance(kernel, RowParam)
            and is_divided(kernel)
        )

    def _read_by_device(
        self,
        tokens: Tokens,
        targets: Int[Array, "tokens"],
        negatives: Int[Array, "count"],
        asked: Asked,
        wire_dtype: jax.typing.DTypeLike | None,
    ) -> tuple[TokenVectors, TokenVectors, Float[Array, "count width"]]:
        """The vectors of tokens, targets and negatives, for which each device asks once.

        Args:
          tokens: tokens of each device, from `Tokens.packed`.
          targets: their next items.
          negatives: items that all tokens share.
          asked: the items that a device asks for.
          wire_dtype: dtype in which vectors and gradients cross; None is the vectors'.
        """
        devices = len(tokens.indptr)
        room, count = len(targets) // devices, len(negatives)
        # Each device asks for its part of the negatives, and all get all.
        each = asked.ids - 2 * room
        shared = jnp.pad(
            negatives, (0, devices * each - count), constant_values=PADDING
        )

        def own(ids):
            known = (ids >= 0) & (ids < self.num_items)
            return jnp.where(known, ids, PADDING).reshape(devices, -1)

        ids = jnp.concatenate([own(tokens.ids), own(targets), own(shared)], axis=1)
        vectors = rows_of_parts(
            self.output.kernel,
            divided_over_all(ids.reshape(-1)),
            distinct=asked.distinct,
            wire_dtype=wire_dtype,
        ).reshape(devices, asked.ids, -1)

        def taken(first, size):
            found = vectors[:, first : first + size]
            return divided_over_all(found.reshape(devices * size, -1))

        of_negatives = replicated(taken(2 * room, each))[:count]
        return taken(0, room), taken(room, room), of_negatives


class Asked(NamedTuple):
    """Items whose vectors a device of a mesh asks for, with sampled negatives.

    Attributes:
      ids: number of ids: of tokens, targets and some of the negatives.
      distinct: the most distinct items among them.
    """

    ids: int
    distinct: int

    @classmethod
    def of(cls, tokens: int, histories: int, drawn: int, devices: int) -> Asked:
        """The numbers for so many tokens and histories of a device, and negatives of all."""
        each = -(-drawn // devices)
        # A history has one item more than it has targets.
        return cls(2 * tokens + each, min(tokens + histories, 2 * tokens) + each)


def _check_wire(wire_dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError if a dtype is given where nothing crosses in it."""
    if wire_dtype is not None:
        raise ValueError(
            "wire_dtype is of no use here: it is for sampled negatives, without content, on "
            "a mesh of several devices that divide the histories evenly; leave it out"
        )


def _columns(events: EventColumns | None) -> dict[str, EventColumns]:
    """The argument of events for a model's call, which a model without columns may not have."""
    return {} if events is None else {"events": events}


def _at_the_end(h: Vectors, histories: Ids) -> Float[Array, "batch width"]:
    """The vector at each history's last item."""
    place = _last_place(histories)
    return jnp.take_along_axis(h, place[:, None, None], axis=1)[:, 0]


def _last_place(histories: Ids) -> Int[Array, "batch"]:
    """The place of each history's last item; the first one if there is none."""
    return jnp.maximum(jnp.sum(histories != PADDING, axis=1) - 1, 0)


def _of_targets(
    weights: Float[Array, "batch length"], tokens: Tokens
) -> Float[Array, "tokens"]:
    """The weight of each token's next item."""
    return weights[tokens.rows, tokens.places + 1]


def _check_weights(weights: jax.Array | None, histories: Ids) -> None:
    if weights is not None and weights.shape != histories.shape:
        raise ValueError(
            f"weights has shape {weights.shape}; one for each place of the histories: "
            f"{histories.shape}"
        )


def _same(x: jax.Array) -> jax.Array:
    return x


def _check_two(histories: Ids) -> None:
    if histories.shape[1] < 2:
        raise ValueError(
            "a loss needs histories of two places or more, an item and the next, got "
            f"{histories.shape}"
        )
