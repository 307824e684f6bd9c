"""The base class of sequence models: item vectors, loss and ranking."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

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

# One object for all models, because programs compiled for one function are not reused for an equal
# function.
normal = nnx.initializers.normal(0.02)

_USER = PADDING - 1  # id of the position of users

Ids = Int[Array, "batch length"]
Times = Float[Array, "batch length"] | None
# With user vectors, each history has one more position, at its front.
Vectors = Float[Array, "batch places width"]
TokenVectors = Float[Array, "tokens width"]


class SequenceModel(nnx.Module):
    """A model of histories. A subclass defines in `__call__` how items become hidden vectors.

    >>> class LastItem(SequenceModel):
    ...     def __call__(self, histories, times=None):
    ...         return self.output.kernel[...][jnp.maximum(histories, 0)]
    >>> model = LastItem(SASRecConfig(width=8), items=100, rngs=nnx.Rngs(0))
    >>> model.loss(jnp.array([[7, 3, 7], [5, 1, -1]])).shape
    ()

    With item vectors E, and the hidden vector h_t of position t, which depends only on positions
    up to t::

        score_ti = h_t . E_i                            or cos(h_t, E_i) / temperature

    Histories are `[batch, length]` int32, padded at the end with -1, the oldest item first, as
    `SequenceDataset.padded` returns them. A history without items has the hidden vector of an
    empty first position. An id that is neither an item nor -1 makes its row NaN.

    Times are `[batch, length]` float32, in any unit. Only differences inside a row matter, so the
    times of a row may start at 0, which keeps them exact.

    Event columns are arrays by name, `[batch, length]`, or `[batch, length, most]` for lists of
    categories. A model made for them reads at each position the vector of the item plus that of
    its event, `E_i + C_e`: see `EventVectors`. Scores use only item vectors.

    Columns named in `EventSchema.context` are known for the next event. Their vectors are added at
    the position before it: in `loss` for each target, and otherwise for the request, whose columns
    `[batch]` or `[batch, most]` are named `context/NAME`.

    User columns, named `users/NAME`, are `[batch]` or `[batch, most]`. A model made for them has
    an additional position with their vectors, in front of the history. So the first item is a
    target, too, and a history without items has the hidden vector of its user.

    Attributes:
      uses_times: whether times affect the result. They may still be None.
      config: settings of the model.
      num_items: number of items.
      output: output layer with the item vectors, `output.kernel`, for input and scores.
      events: `EventVectors` of the event columns; None if the model reads none.
      context: vectors of the columns that are known for the next event, or None.
      users: vectors of the user columns, or None.
      next_event: scores of the labels of the next event, given its item, or None. If set, `loss`
          also includes the mean loss of the labels over all events that follow an item or a user,
          regardless of the weights of targets.

    Args:
      config: settings of the model.
      items: number of items.
      content: sizes of the content of items (tags and vectors), as in `sparsejax.nn.ItemContent`;
          `sparsejax.build` passes them. None without content.
      events: sizes of the event columns; `sparsejax.build` passes them. None if the model reads no
          columns.
      rngs: random streams: "params", and in training "dropout" and "negatives".

    Raises:
      ValueError: `items` is not positive.
    """

    kind = "histories"
    # Whether `top_k` of this class applies the output layer to the result of `queries`.
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
        """Changes the number of sampled items of `loss`, in place; make a new optimizer
        afterwards.

        >>> config = SASRecConfig(max_length=4, width=8, negatives=3)
        >>> model = SASRec(config, items=9, rngs=nnx.Rngs(0))
        >>> model.set_negatives(None)  # to end with some epochs of the exact softmax
        >>> type(model.output.kernel).__name__
        'Param'

        With negatives, the item vectors are a `RowParam`: a step of `sparsejax.Optimizer` reads
        and writes only the vectors of items that are in the batch or drawn.

        Args:
          negatives: number of items drawn for the loss of each batch, as in `SequenceConfig`; None
              uses all items.
        """
        sampler = "uniform" if negatives is None else self.config.sampler
        self.config = dataclasses.replace(
            self.config, negatives=negatives, sampler=sampler
        )
        # With content, each step computes the vectors of all items, so it reads all rows.
        whole = negatives is None or self.output.content is not None
        kind, kernel = nnx.Param if whole else RowParam, self.output.kernel
        if type(kernel) is kind:
            return
        # If all items are scored, their vectors are divided over all devices. Otherwise they are
        # divided over the axis "model" only, as each step would gather them over "data".
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
        """Computes the hidden vector of each position.

        Raises:
          ValueError: histories are longer than `max_length`, or the event columns differ from
              those that the model was made for.
        """
        raise NotImplementedError("a sequence model defines __call__")

    def add_items(self, count: int, *, optimizer: Optimizer | None = None) -> None:
        """Adds items after the known ones, in place: see `FeedForward.add_items`.

        >>> model = SASRec(SASRecConfig(max_length=4, width=8), items=9, rngs=nnx.Rngs(0))
        >>> model.add_items(3)
        >>> model.num_items
        12

        Each call changes the shapes of arrays, for which programs are compiled again. Earlier
        programs stay in memory until `jax.clear_caches()` is called.

        Args:
          count: number of new items.
          optimizer: optimizer of the model, whose state is extended, too.
        """
        known: dict[tuple[str, ...], int] = {("output", "kernel"): self.num_items}
        self.output.add_items(count)
        if optimizer is not None:
            optimizer.add_rows(self, known)

    def embed(self, histories: Ids, events: EventColumns | None = None) -> Vectors:
        """The vector of each item plus that of its event; zeros if there is no item.

        If the model reads user columns, their vectors are an additional position in front.

        Raises:
          ValueError: histories are longer than `max_length`, or the event columns differ from
              those that the model was made for.
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
        """Adds a position at the front of an array `[batch, length, ...]`, for user vectors."""
        if self.users is None or x is None:
            return x
        more = [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, more, constant_values=fill)

    def _with_users(self, histories: Ids) -> Int[Array, "batch places"]:
        """Adds the user position in front of the histories."""
        return self._front(histories, _USER)

    def _times_with_users(self, times: Times) -> Times:
        """Adds a time for the user position, equal to the first time, in front of the times."""
        if self.users is None or times is None:
            return times
        return jnp.concatenate([times[:, :1], times], axis=1)

    def _vectors_of(self, ids: Int[Array, "tokens"]) -> TokenVectors:
        """The vector of each item; zeros for ids that are not items."""
        known = (ids >= 0) & (ids < self.num_items)
        return self.output.rows(jnp.where(known, ids, PADDING))

    def _with_events(
        self,
        vectors: jax.Array,
        events: EventColumns | None,
        ids: Int[Array, "*places"],
        rows: Int[Array, "*places"] | None = None,
    ) -> jax.Array:
        """Adds event vectors to item vectors, at positions with an item.

        The context of the next event is added at positions without an item, too, and user vectors
        are added at the position of users.

        Args:
          vectors: vectors of the items.
          events: event columns at these positions, and user columns `[batch, ...]`.
          ids: the items.
          rows: row of each position in the batch; None for positions `[batch, length]`.
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
                # Other positions get an index out of range, so that they contribute no gradient.
                at = jnp.where(ids == _USER, rows, len(users))
                users = users.at[at].get(mode="fill", fill_value=0)
            vectors = vectors + users
        return vectors

    def _events_of(
        self, events: EventColumns | None, histories: Ids, *, request: bool = True
    ) -> EventColumns | None:
        """Checks event columns, and adds at each position the context of the next event.

        Args:
          events: event columns by name.
          histories: the histories.
          request: whether the columns include the context of the event after the history.
              Otherwise the last position of the histories is only a target.

        Raises:
          ValueError: columns are given but the model reads none, or are missing, or have another
              shape.
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
        """The event columns without the last position, which is only a target."""
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
        """Mean cross-entropy of the next item over all positions that have one.

        It is a softmax over all items, or over sampled items: see `SequenceConfig.negatives`.

        If there are more than some thousand positions, a loop processes the tokens of some
        histories at a time. The number of iterations depends on the batch at run time, so that
        time and memory are proportional to the number of positions with a next item, not to the
        padding. `SASRec` and `HSTU` compute everything from item vectors to the loss and back in
        this loop; other models are called with all positions, and only their output layer is
        computed in the loop.

        Args:
          histories: items with up to `max_length + 1` positions.
          times: time of each position, or None.
          max_targets: upper bound of the number of positions with a next item, if known. All are
              then processed in one iteration of this size, which is a little faster on a GPU. With
              more positions the loss is NaN. A mesh of several devices needs this number: its
              parts along "data" share it equally, and histories are distributed so that parts have
              nearly equal numbers. None allows any number.
          weights: factor of the loss of each position as a target; the mean is weighted. The
              weight of the first position is not used. None is 1 for each.
          events: event columns at the positions of the histories; None if the model reads none.

        Raises:
          ValueError: histories are too long, or have less than two positions; or the event columns
              differ from those that the model was made for.
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
        wanted = model._vectors_of(targets)
        return loss + model._loss_of_next(h, wanted, targets, labels)

    def _loss_of_next(self, h, of_targets, targets, labels, total=None):
        """The mean loss of the event labels; with `total`, the sum of the losses divided by
        `total`.
        """
        assert self.next_event is not None
        is_event = targets != PADDING
        if total is None:
            total = jnp.maximum(jnp.sum(is_event), 1)
        return self.next_event.loss(h, of_targets, is_event, labels) / total

    def _labels_at(
        self, events: EventColumns | None, tokens: Tokens
    ) -> dict[str, jax.Array]:
        """The labels of the event that follows each token."""
        assert self.next_event is not None and events is not None
        labels = self.next_event.labels
        return {each.name: _of_targets(events[each.name], tokens) for each in labels}

    def _loss_of_places(self, histories, times, h, max_targets, weights):
        """The loss of the next items, given hidden vectors of all positions except the last."""
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
        """The loss of some hidden vectors.

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
        """Draws negatives; returns them with the logarithms of their probabilities, or None if the
        model uses no negatives.
        """
        if (count := self.config.negatives) is None:
            return None
        if self.config.sampler == "batch":
            drawn = sample_with_batch(self.draws(), targets, self.num_items, count)
        else:
            drawn = NegativeSampler.uniform(self.num_items).sample(self.draws(), count)
        # Drawing these few items on every device is faster than dividing the work.
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
        """The loss, computed in time and memory proportional to the positions with a next item.

        Args:
          histories: items of each row, with up to `max_length + 1` positions.
          times: time of each position, or None.
          size: number of tokens in a turn, an iteration of the loop.
          h: hidden vectors; None if `_of_tokens` computes them in each turn.
          weights: factor of the loss of each position as a target, or None.
          events: event columns, if `h` is None and the model reads any.
        """
        length = histories.shape[1]
        wanted = histories[:, 1:] != PADDING
        if weights is None:
            total = jnp.maximum(jnp.sum(wanted), 1)
        else:
            total = jnp.sum(jnp.where(wanted, weights[:, 1:], 0))
            total = jnp.where(total == 0, 1, total)
        drawn = self._drawn(histories[:, 1:])
        # The item rows of all turns are read before the loop, so that the optimizer is informed
        # which rows were read.
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
          histories: items with up to `max_length` positions.
          k: number of items.
          exclude: items to exclude for each row.
          excluded: a mask of items that are excluded in all rows.
          times: time of each position, or None.
          events: event columns; None if the model reads none.
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
        """Scores of the given items for each history, without computing other scores.

        Args:
          histories: items with up to `max_length` positions.
          ids: item numbers, in `[0, num_items)`. The score of any other number is NaN.
          times: time of each position, or None.
          events: event columns; None if the model reads none.
        """
        model = with_vectors(self)
        own = _columns(events)
        return model.output.item_scores(model.last(histories, times, **own), ids)


@dataclasses.dataclass(frozen=True)
class _LossOfTurn:
    """The part of the mean loss that a turn contributes, a `turns.TurnSum`.

    Attributes:
      of_tokens: whether the model, a `TokenModel`, computes hidden vectors. Otherwise these are
          given, and the model is the output layer.
      dtype: dtype of the operands of products with sampled negatives; None is the dtype of the
          vectors.
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
    """A `SequenceModel` that computes nothing for padding. Subclasses define `_new_block`.

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
        if self.users is not None:  # user vectors occupy an additional position
            config = dataclasses.replace(config, max_length=config.max_length + 1)
        shape = config.max_length, config.width
        self.places = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.dropout = Dropout(config.dropout, rngs=rngs)
        blocks = (self._new_block(config, rngs) for _ in range(config.blocks))
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def _new_block(self, config: Any, rngs: nnx.Rngs) -> Any:
        """Makes an attention layer. It is called with vectors and their tokens."""
        raise NotImplementedError("a model of tokens defines _new_block")

    def _of_tokens(
        self,
        tokens: Tokens,
        vectors: TokenVectors | None = None,
        events: EventColumns | None = None,
    ) -> TokenVectors:
        """The hidden vector of each token, which depends on the tokens before it.

        Args:
          tokens: tokens of some histories.
          vectors: vectors of the tokens' items; None looks them up.
          events: event columns of the batch, `[batch, length, ...]`, and user columns, `[batch,
              ...]`.
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

        On a CPU, padding is not computed.
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
            # A time earlier than a previous time of its row is replaced by that time.
            times = lax.cummax(times, axis=1)
        h = last(state, vectors, rest, histories, times, events)
        return jnp.where(jnp.any(self._broken(items), axis=1)[:, None], jnp.nan, h)

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
        """`SequenceModel.loss`, which on a mesh divides tokens over all devices.

        With sampled negatives, each device requests the vector of each item of its tokens, targets
        and negatives once.

        Args:
          histories: items with up to `max_length + 1` positions.
          times: time of each position, or None.
          max_targets: upper bound of the number of positions with a next item, if known.
          weights: factor of the loss of each position as a target; None is 1 for each.
          events: event columns at the positions of the histories; None if the model reads none.
          wire_dtype: dtype in which item vectors and their gradients are sent between devices,
              such as bfloat16; None is the dtype of the vectors.

        Raises:
          ValueError: histories are too long, or have less than two positions; the event columns
              differ from those that the model was made for; or `wire_dtype` is given, but no
              vectors are sent.
          TypeError: `wire_dtype` is not a floating dtype of at least 16 bits.
        """
        _check_two(histories)
        _check_weights(weights, histories)
        if wire_dtype is not None:
            check_floating("wire_dtype", wire_dtype)
        self._check_length(histories.shape[1] - 1)
        events = self._events_of(events, histories, request=False)
        model = with_vectors(self, deterministic=False)
        broken = jnp.any(self._broken(histories[:, :-1]))
        # An item after padding would be assigned to an earlier position: the loss becomes NaN.
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
        """Whether each device on a mesh requests only the vectors of its own tokens."""
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
        """The vectors of tokens, targets and negatives, each requested once by a device.

        Args:
          tokens: tokens of each device, from `Tokens.packed`.
          targets: next items of the tokens.
          negatives: items that all tokens share.
          asked: number of items that a device requests.
          wire_dtype: dtype in which vectors and gradients are sent; None is the dtype of the
              vectors.
        """
        devices = len(tokens.indptr)
        room, count = len(targets) // devices, len(negatives)
        # Each device requests its part of the negatives; then all parts are gathered.
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
    """Numbers of items whose vectors each device of a mesh requests, with sampled negatives.

    Attributes:
      ids: number of ids: tokens, targets and the device's part of the negatives.
      distinct: upper bound of the number of distinct items among them.
    """

    ids: int
    distinct: int

    @classmethod
    def of(cls, tokens: int, histories: int, drawn: int, devices: int) -> Asked:
        """Computes the numbers from tokens and histories of a device, and all negatives."""
        each = -(-drawn // devices)
        # Each history has one more item than it has targets.
        return cls(2 * tokens + each, min(tokens + histories, 2 * tokens) + each)


def _check_wire(wire_dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError if `wire_dtype` is given although devices exchange no vectors."""
    if wire_dtype is not None:
        raise ValueError(
            "wire_dtype is of no use here: it is for sampled negatives, without content, on "
            "a mesh of several devices that divide the histories evenly; leave it out"
        )


def _columns(events: EventColumns | None) -> dict[str, EventColumns]:
    """The keyword arguments for event columns in a call of the model; empty if there are none."""
    return {} if events is None else {"events": events}


def _at_the_end(h: Vectors, histories: Ids) -> Float[Array, "batch width"]:
    """The vector at each history's last item."""
    place = _last_place(histories)
    return jnp.take_along_axis(h, place[:, None, None], axis=1)[:, 0]


def _last_place(histories: Ids) -> Int[Array, "batch"]:
    """The position of each history's last item; the first position if there is none."""
    return jnp.maximum(jnp.sum(histories != PADDING, axis=1) - 1, 0)


def _of_targets(
    weights: Shaped[Array, "batch length"], tokens: Tokens
) -> Shaped[Array, "tokens"]:
    """Selects from the weights of positions the weight of each token's next item."""
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
