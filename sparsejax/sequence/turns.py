"""Sums over the entries (tokens) of histories, computed for a number of tokens at a time, without
padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.layout import is_for_one_device
from sparsejax.ops.implementations import xla_is_for_gpu
from sparsejax.sequence.tokens import PADDING, Tokens
from sparsejax.sparse import sums_so_far

# Tokens in a turn on a CPU: the vectors of a turn then fit in the caches.
_CPU_TOKENS = 1024
# On a GPU a turn launches about 200 short programs, which take as long as 6,000 tokens (H200,
# width 256). So a turn should have all tokens of a typical batch. If the lengths of histories are
# lognormal, and the longest are cut off so that 5 % of entries are lost, tokens fill a third of
# all positions.
_GPU_LEAST, _GPU_MOST, _FILLED = 2**14, 2**15, 3 / 8


class Picked(NamedTuple):
    """A choice of rows from an array with one row for each position of a batch of histories.

    Attributes:
      array: index of the array.
      length: number of positions that the array has for each history.
      shift: chosen position minus the token's own position.
    """

    array: int
    length: int
    shift: int = 0


class Turn(NamedTuple):
    """The tokens of some histories, which are processed together.

    Attributes:
      tokens: tokens of these histories, followed by padding.
      targets: the next item of each token.
      picked: for each `Picked`, the chosen rows `[tokens, width]` of its array.
    """

    tokens: Tokens
    targets: Int[Array, "tokens"]
    picked: Sequence[jax.Array]


# Function (model, turn, shared, fixed) that returns the sum over a turn's tokens, computed with a
# copy of the model. It is a key of compiled loops, so it must be hashable, and equal to functions
# with equal results.
TurnSum = Callable[[Any, Turn, Any, Any], Float[Array, ""]]


def tokens_of_turn(histories: Int[Array, "batch length"]) -> int | None:
    """The number of tokens in a turn; None if all positions are one turn.

    On a mesh of several devices, parts of a batch have different numbers of tokens, and would need
    different numbers of turns, while layers communicate in each turn. So all positions are one
    turn there.
    """
    batch, length = histories.shape
    places, size = batch * (length - 1), _CPU_TOKENS
    if xla_is_for_gpu(None):
        size = max(_GPU_LEAST, min(_GPU_MOST, round(_FILLED * places)))
    size = max(size, length)
    return size if is_for_one_device() and places > size else None


def sum_of_turns(
    function: TurnSum,
    model: nnx.Module,
    histories: Int[Array, "batch length"],
    times: Float[Array, "batch length"] | None,
    arrays: Sequence[jax.Array],
    picks: Sequence[Picked],
    shared: Any,
    fixed: Any,
    *,
    size: int,
) -> Float[Array, ""]:
    """The sum of a function over turns. The number of turns is computed at run time.

    A turn has whole histories, as many as fit into `size` tokens; a token is a position with a
    next item. There is at least one turn. The loop computes the derivatives together with the sum,
    as a loop of unknown length cannot be run backward. It stores only a turn's contribution to the
    gradients, so that memory for layers does not grow with the batch.

    It can be differentiated once, in reverse mode, with respect to the parameters of the model,
    `arrays` and `shared`. Each turn starts with the same random state; afterwards the model has
    the random state after one turn.

    Args:
      function: function that computes the sum over a turn's tokens, a `TurnSum`.
      model: model, of which a copy is passed to the function.
      histories: items of each row; the last position is only a target.
      times: time of each position, or None.
      arrays: arrays `[rows, width]` from which turns choose rows.
      picks: choices of rows, for `Turn.picked`.
      shared: tree of arrays that is passed to each turn.
      fixed: tree of arrays that are not differentiated.
      size: number of tokens in a turn, at least the length of a history.
    """
    graph, random, rest = nnx.split(model, nnx.RngState, ...)
    leaves, structure = jax.tree.flatten((rest, shared))
    smooth = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)
    if times is not None:
        # A time earlier than a previous time of its row is replaced by that time.
        times = lax.cummax(times, axis=1)
    wanted = histories[:, 1:] != PADDING
    indptr = jnp.append(jnp.int32(0), sums_so_far(jnp.sum(wanted, axis=1)))
    # Padded by one turn, because a slice that exceeds the array would start earlier.
    (places,) = jnp.nonzero(wanted.reshape(-1), size=wanted.size + size, fill_value=0)
    batch = _Batch(histories, times, indptr, places.astype(jnp.int32))
    others = [x for x, each in zip(leaves, smooth, strict=True) if not each]
    constants, of_constants = jax.tree.flatten((random, others, fixed, batch))
    work = _Work(function, graph, structure, of_constants, smooth, tuple(picks), size)

    @jax.custom_vjp
    def summed(inputs, arrays, constants) -> Any:
        return _loop(work, inputs, arrays, constants, (), ())[:2]

    def forward(inputs, arrays, constants) -> Any:
        wanted = (
            tuple(i for i, x in enumerate(each) if x.perturbed)
            for each in (inputs, arrays)
        )
        values = ([x.value for x in each] for each in (inputs, arrays, constants))
        total, random, sums = _loop(work, *values, *wanted)
        gradients = [
            [found.get(i) for i, _ in enumerate(each)]
            for found, each in zip(sums, (inputs, arrays), strict=True)
        ]
        return (total, random), gradients

    def backward(gradients, cotangents):
        slope, _ = cotangents
        if isinstance(slope, SymbolicZero):
            return None, None, None
        of_inputs, of_arrays = (
            [None if x is None else slope.astype(x.dtype) * x for x in each]
            for each in gradients
        )
        return of_inputs, of_arrays, None

    summed.defvjp(forward, backward, symbolic_zeros=True)
    inputs = [x for x, each in zip(leaves, smooth, strict=True) if each]
    total, random = summed(inputs, list(arrays), constants)
    layers = (each for _, each in nnx.iter_graph(model))
    if any(isinstance(x, nnx.Dropout) and not x.deterministic for x in layers):
        # Flax does not allow a program to update a model that is not among its arguments, such as
        # the model in `lambda histories: model.loss(histories)`.
        nnx.update(model, random)
    return total


def last_of_turns(
    of_tokens: Callable[[Tokens, jax.Array], Float[Array, "tokens width"]],
    histories: Int[Array, "batch length"],
    times: Float[Array, "batch length"] | None,
    vectors: Float[Array, "places width"],
    size: int,
) -> Float[Array, "batch width"]:
    """The hidden vector of each history's last item, without computing padding.

    It uses a loop of unknown length, as `sum_of_turns` does, so it has no derivative.

    Args:
      of_tokens: function from tokens and their item vectors to hidden vectors.
      histories: items of each row, oldest first; the last position counts like the others.
      times: time of each position, or None. Times never decrease in a history.
      vectors: vector of the item at each position.
      size: number of tokens in a turn, at least the length of a history.
    """
    batch, length = histories.shape
    ends = jnp.maximum(jnp.sum(histories != PADDING, axis=1), 1)
    indptr = jnp.append(jnp.int32(0), sums_so_far(ends))
    used = jnp.arange(length)[None] < ends[:, None]
    (places,) = jnp.nonzero(used.reshape(-1), size=used.size + size, fill_value=0)
    # Windows assume a target after each token.
    histories = jnp.pad(histories, ((0, 0), (0, 1)), constant_values=PADDING)
    of_batch = _Batch(histories, times, indptr, places.astype(jnp.int32))
    pick = Picked(0, length)

    def step(carry):
        first, last = carry
        window = _Window.of(of_batch, first, size)
        at = window.rows(pick, len(vectors))
        read = vectors.at[at].get(mode="fill", fill_value=0)
        h = of_tokens(window.turn(of_batch, ()).tokens, read)
        found = h[jnp.maximum(window.indptr[1:] - 1, 0)]
        is_here = window.indptr[1:] > window.indptr[:-1]
        return window.end, jnp.where(is_here[:, None], found, last)

    start = jnp.int32(0), jnp.zeros((batch, vectors.shape[1]), vectors.dtype)
    return lax.while_loop(lambda carry: carry[0] < batch, step, start)[1]


class _Batch(NamedTuple):
    """The histories, which are equal for all turns.

    Attributes:
      histories: items of each row, oldest first; the last position is only a target.
      times: time of each position, ascending in a history, or None.
      indptr: offsets at which the tokens of each history begin and end.
      places: position of each token, numbered through the batch.
    """

    histories: Int[Array, "batch length"]
    times: Float[Array, "batch length"] | None
    indptr: Int[Array, "batch_plus_1"]
    places: Int[Array, "tokens"]


@dataclasses.dataclass(frozen=True)
class _Work:
    """The computation of one turn; see `sum_of_turns`.

    Attributes:
      function: function that computes the sum over a turn's tokens, a `TurnSum`.
      graph: graph of the model.
      structure: tree structure of the model's state and of `shared`, whose leaves are inputs or
          other arrays.
      of_constants: tree structure of random state, other arrays, `fixed` and the `_Batch`.
      smooth: bool for each leaf: whether it is an input, which can be differentiated.
      picks: choices of rows, for `Turn.picked`.
      size: number of tokens in a turn.
    """

    function: TurnSum
    graph: Any
    structure: Any
    of_constants: Any
    smooth: tuple[bool, ...]
    picks: tuple[Picked, ...]
    size: int

    def __call__(self, inputs, picked, constants, window: _Window):
        """Computes the sum over a turn. Returns the sum, and the random state after the turn."""
        random, others, fixed, batch = jax.tree.unflatten(self.of_constants, constants)
        inputs, others = iter(inputs), iter(others)
        leaves = [next(inputs if each else others) for each in self.smooth]
        rest, shared = jax.tree.unflatten(self.structure, leaves)
        model = nnx.merge(self.graph, random, rest, copy=True)
        value = self.function(model, window.turn(batch, picked), shared, fixed)
        return value, nnx.split(model, nnx.RngState, ...)[1]


# A separate program, so that its cached compilation can be reused.
@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _loop(work: _Work, inputs, arrays, constants, wanted, wanted_arrays):
    """Runs all turns: returns the sum, the random state, and gradients of requested inputs and
    arrays.

    Gradients are dicts: the key is the index of an input or array, the value is its gradient.
    """
    random, *_, batch = jax.tree.unflatten(work.of_constants, constants)
    picks, tokens = work.picks, batch.indptr

    def goes_on(carry):
        turns, first, *_ = carry
        return (turns == 0) | (tokens[first] < tokens[-1])

    def step(carry):
        turns, first, total, _, of_inputs, of_arrays = carry
        window = _Window.of(batch, first, work.size)
        at = [window.rows(pick, len(arrays[pick.array])) for pick in picks]
        read = [
            arrays[pick.array].at[i].get(mode="fill", fill_value=0)
            for pick, i in zip(picks, at, strict=True)
        ]

        def differentiated(some, some_read):
            own = [some.get(i, x) for i, x in enumerate(inputs)]
            own_read = [some_read.get(i, x) for i, x in enumerate(read)]
            return work(own, own_read, constants, window)

        if not (wanted or wanted_arrays):
            value, random = differentiated({}, {})
            return turns + 1, window.end, total + value, random, {}, {}
        value, pull, random = jax.vjp(
            differentiated,
            {i: inputs[i] for i in wanted},
            {i: read[i] for i, pick in enumerate(picks) if pick.array in wanted_arrays},
            has_aux=True,
        )
        more, more_read = pull(jnp.ones_like(value))
        of_inputs = {i: x + more[i] for i, x in of_inputs.items()}
        of_arrays = dict(of_arrays)
        for i, slopes in more_read.items():
            # Each token has its own rows, also in later turns.
            places = of_arrays[picks[i].array].at[at[i]]
            of_arrays[picks[i].array] = places.add(
                slopes, mode="drop", unique_indices=True, indices_are_sorted=True
            )
        return turns + 1, window.end, total + value, random, of_inputs, of_arrays

    sums = (
        {i: jnp.zeros_like(each[i]) for i in chosen}
        for each, chosen in ((inputs, wanted), (arrays, wanted_arrays))
    )
    start = jnp.int32(0), jnp.int32(0), jnp.zeros((), jnp.float32), random, *sums
    _, _, total, random, *sums = lax.while_loop(goes_on, step, start)
    return total, random, sums


class _Window(NamedTuple):
    """The positions of a turn's tokens in the batch.

    Attributes:
      end: number of the first history of the next turn.
      row: number of the history of each token.
      place: position of the token in its history; 0 for padding.
      used: mask, False for padding.
      indptr: offsets at which histories begin and end in the turn; histories of other turns are
          empty.
    """

    end: Int[Array, ""]
    row: Int[Array, "tokens"]
    place: Int[Array, "tokens"]
    used: Bool[Array, "tokens"]
    indptr: Int[Array, "histories_plus_1"]

    @classmethod
    def of(cls, batch: _Batch, first, size: int) -> _Window:
        indptr, length = batch.indptr, batch.histories.shape[1] - 1
        start = indptr[first]
        end = jnp.searchsorted(indptr, start + size, side="right").astype(jnp.int32) - 1
        count = indptr[end] - start
        used = jnp.arange(size, dtype=jnp.int32) < count
        places = lax.dynamic_slice_in_dim(batch.places, start, size)
        places = jnp.where(used, places, 0)
        row, place = lax.div(places, length), lax.rem(places, length)
        return cls(end, row, place, used, jnp.clip(indptr - start, 0, count))

    def rows(self, pick: Picked, count: int) -> Int[Array, "tokens"]:
        """The row of an array that each token reads, ascending. Padding has rows after the last."""
        at = self.row * pick.length + self.place + pick.shift
        return jnp.where(self.used, at, count + jnp.arange(len(at), dtype=jnp.int32))

    def turn(self, batch: _Batch, picked) -> Turn:
        def at(x, places, fill):
            return jnp.where(self.used, x[self.row, places], fill)

        tokens = Tokens(
            at(batch.histories, self.place, PADDING),
            self.place,
            self.row,
            self.indptr[None],
            None if batch.times is None else at(batch.times, self.place, 0),
        )
        return Turn(tokens, at(batch.histories, self.place + 1, PADDING), picked)
