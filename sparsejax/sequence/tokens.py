"""The entries of histories one after the other, without padding between them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sparsejax.mesh.layout import call_on_each_device, dealt, mesh_is_set, num_devices
from sparsejax.ops.history_attention import history_attention
from sparsejax.ops.implementations import Implementation
from sparsejax.sparse import segment_ids, sums_so_far

PADDING = -1  # where a history has ended
# All devices divide the tokens of a batch: those along "model", too.
_DIVIDED = P(("data", "model"))


class Tokens(NamedTuple):
    """The tokens that a model reads of a batch of histories.

    On a mesh each device has its own histories, and as much room for their tokens as the
    others; else, or if the devices do not divide the histories, there is one part. `packed`
    deals histories to the parts, so that each has nearly the same number of tokens.

    Attributes:
      ids: the items; `PADDING` where there is none.
      places: place of each token in its history.
      rows: row of the batch to which each token belongs.
      indptr: places at which histories begin and end, counted within their part.
      times: time of each token, or None. Times do not fall within a history.
    """

    ids: Int[Array, "tokens"]
    places: Int[Array, "tokens"]
    rows: Int[Array, "tokens"]
    indptr: Int[Array, "parts histories_plus_1"]
    times: Float[Array, "tokens"] | None

    @classmethod
    def spread(cls, histories, times=None) -> Tokens:
        """All places of `[batch, length]`, row by row, so that no row moves another.

        A place behind the end of its history is a history of its own.
        """

        def of_part(rows, histories, times):
            count, length = histories.shape
            places = jnp.tile(jnp.arange(length, dtype=jnp.int32), count)
            ends = jnp.maximum(jnp.sum(histories != PADDING, axis=1), 1)
            starts = (places == 0) | (places >= jnp.repeat(ends, length))
            every = len(places)
            (indptr,) = jnp.nonzero(starts, size=every + 1, fill_value=every)
            return cls(
                histories.reshape(-1),
                places,
                jnp.repeat(rows, length),
                indptr.astype(jnp.int32)[None],
                None if times is None else times.reshape(-1),
            )

        return _by_part(of_part, histories, times)

    @classmethod
    def packed(cls, histories, times, room: int) -> tuple[Tokens, jax.Array, jax.Array]:
        """The places of `[batch, length + 1]` that have a next item.

        Args:
          histories: items of each row, oldest first; the last place is a target only.
          times: time of each place, or None.
          room: the number of tokens, which parts of a mesh have in equal shares.

        Returns:
          The tokens, their next items, and whether there is room for all.
        """
        # NumPy's arrays take no traced indices.
        histories, times = jax.tree.map(jnp.asarray, (histories, times))
        parts = _parts(len(histories))
        room = -(-room // parts)

        def of_part(rows, histories, times):
            counts = jnp.sum(histories[:, 1:] != PADDING, axis=1)
            indptr = jnp.append(jnp.int32(0), sums_so_far(counts))
            row = jnp.minimum(segment_ids(indptr, room), len(rows) - 1)
            places = jnp.arange(room, dtype=jnp.int32) - indptr[row]
            used = jnp.arange(room) < indptr[-1]
            places = jnp.where(used, places, 0)

            def at(x, places, fill):
                return jnp.where(used, x[row, places], fill)

            tokens = cls(
                at(histories, places, PADDING),
                places,
                rows[row],
                indptr[None],
                None if times is None else at(times, places, 0),
            )
            fits = (indptr[-1] <= room)[None]
            return tokens, at(histories, places + 1, PADDING), fits

        tokens, targets, fits = _by_part(of_part, histories, times, deal=True)
        return tokens, targets, jnp.all(fits)

    def attend(self, q, k, v, *, place_bias=None, time_bias=None, **rule):
        """`history_attention` within these histories, `[tokens, heads, dim]`.

        Without times there is no bias of times.
        """
        if self.times is None:
            time_bias = None

        def of_part(q, k, v, indptr, times, place_bias, time_bias):
            return history_attention(
                q,
                k,
                v,
                indptr[0],
                place_bias=place_bias,
                times=times,
                time_bias=time_bias,
                **rule,
            )

        times = None if time_bias is None else self.times
        arguments = q, k, v, self.indptr, times, place_bias, time_bias
        if not _divided(len(self.indptr)):
            return of_part(*arguments)
        # Checked, so that gradients of q, k and v are not summed over devices.
        return call_on_each_device(
            of_part, arguments, (*[_DIVIDED] * 5, P(), P()), _DIVIDED, checked=True
        )


class Attention(nnx.Module):
    """A layer with `Tokens.attend`.

    Attributes:
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `history_attention`; None
        picks the fastest.
    """

    implementation: Implementation = None


class Dropout(nnx.Dropout):
    """Drops numbers of tokens.

    The numbers that are dropped from a token depend only on its row of the batch and
    its place, so that they do not change with the room or the mesh.
    """

    def __call__(self, x, tokens: Tokens):  # pyrefly: ignore[bad-override]
        if self.deterministic or self.rate == 0:
            return x
        assert self.rngs is not None
        key, width = self.rngs(), math.prod(x.shape[1:])
        least = max(1, round((1 - self.rate) * 2**16))  # of 2^16 numbers are kept

        def of_token(row, place):
            one = jax.random.fold_in(jax.random.fold_in(key, row), place)
            # Two draws of 16 bits from each random number.
            words = jax.random.bits(one, (-(-width // 2),), jnp.uint32)
            draws = lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:width]
            return draws.astype(jnp.int32) < least

        # Kept for the derivative: to draw again takes longer than to read.
        keep = lax.optimization_barrier(jax.vmap(of_token)(tokens.rows, tokens.places))
        return jnp.where(keep.reshape(x.shape), x * (2**16 / least), 0)


def _parts(batch: int) -> int:
    """Into how many parts a batch is divided."""
    devices = num_devices()
    return 1 if batch % devices else devices


def _divided(parts: int) -> bool:
    """Whether each device works on a part of its own."""
    return mesh_is_set() and num_devices() == parts


def _by_part(function, histories, times, *, deal: bool = False):
    """Calls `function` with numbers of rows, histories and times of each part.

    Args:
      function: function whose results the parts have one after the other.
      histories: histories of the batch.
      times: time of each place, or None.
      deal: whether parts exchange histories, so that all have nearly the same number of
        places with a next item. Ids and times are few bytes beside vectors.
    """
    if times is not None:
        # A time before an earlier one counts as that.
        times = lax.cummax(times, axis=1)
    rows = jnp.arange(len(histories), dtype=jnp.int32)
    parts = _parts(len(histories))
    if not _divided(parts):
        return function(rows, histories, times)

    def of_dealt(*batch):
        axes = "data", "model"
        every = jax.tree.map(lambda x: lax.all_gather(x, axes, tiled=True), batch)
        targets = jnp.sum(every[1][:, 1:] != PADDING, axis=1)
        own = dealt(targets, parts)[lax.axis_index(axes)]
        return function(*jax.tree.map(lambda x: x[own], every))

    return call_on_each_device(
        of_dealt if deal and parts > 1 else function,
        (rows, histories, times),
        _DIVIDED,
        _DIVIDED,
    )
