"""The entries of histories (tokens), concatenated without padding."""

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

PADDING = -1  # value of positions after the end of a history
# The tokens of a batch are divided over all devices, including those along "model".
_DIVIDED = P(("data", "model"))


class Tokens(NamedTuple):
    """The tokens that a model reads from a batch of histories.

    On a mesh each device has its own histories, and an equal capacity for their tokens; without a
    mesh, or if the devices do not divide the histories, there is one part. `packed` distributes
    histories so that each part has nearly equally many tokens.

    Attributes:
      ids: item of each token; `PADDING` if there is none.
      places: position of each token in its history.
      rows: row of the batch to which each token belongs.
      indptr: offsets at which histories begin and end, inside their part.
      times: time of each token, or None. Times never decrease in a history.
    """

    ids: Int[Array, "tokens"]
    places: Int[Array, "tokens"]
    rows: Int[Array, "tokens"]
    indptr: Int[Array, "parts histories_plus_1"]
    times: Float[Array, "tokens"] | None

    @classmethod
    def spread(cls, histories, times=None) -> Tokens:
        """All positions of `[batch, length]` as tokens, row by row, so that rows do not affect
        each other.

        Each padding position counts as a separate history.
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
        """Packs the positions of `[batch, length + 1]` that have a next item.

        Args:
          histories: items of each row, oldest first; the last position is only a target.
          times: time of each position, or None.
          room: capacity for tokens, shared equally by the parts of a mesh.

        Returns:
          The tokens, their next items, and whether all fit into the capacity.
        """
        # NumPy arrays cannot be indexed by traced indices.
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
        """`history_attention` inside these histories, `[tokens, heads, dim]`.

        Without times there is no time bias.
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
        # With `checked`, JAX knows that q, k and v differ between devices, so it does not sum
        # their gradients over devices.
        return call_on_each_device(
            of_part, arguments, (*[_DIVIDED] * 5, P(), P()), _DIVIDED, checked=True
        )


class Attention(nnx.Module):
    """A layer that calls `Tokens.attend`.

    Attributes:
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `history_attention`; None chooses the
          fastest.
    """

    implementation: Implementation = None


class Dropout(nnx.Dropout):
    """Dropout for the vectors of tokens.

    The numbers dropped from a token depend only on its row in the batch and its position, so that
    they do not change with the capacity or the mesh.
    """

    def __call__(self, x, tokens: Tokens):  # pyrefly: ignore[bad-override]
        if self.deterministic or self.rate == 0:
            return x
        assert self.rngs is not None
        key, width = self.rngs(), math.prod(x.shape[1:])
        # A number is kept if its 16-bit random draw is at least this threshold.
        least = max(1, round((1 - self.rate) * 2**16))

        def of_token(row, place):
            one = jax.random.fold_in(jax.random.fold_in(key, row), place)
            # Each 32-bit random number gives two draws of 16 bits.
            words = jax.random.bits(one, (-(-width // 2),), jnp.uint32)
            draws = lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:width]
            return draws.astype(jnp.int32) < least

        # Stored for the derivative: drawing again would take longer than reading.
        keep = lax.optimization_barrier(jax.vmap(of_token)(tokens.rows, tokens.places))
        return jnp.where(keep.reshape(x.shape), x * (2**16 / least), 0)


def _parts(batch: int) -> int:
    """Number of parts into which a batch is divided."""
    devices = num_devices()
    return 1 if batch % devices else devices


def _divided(parts: int) -> bool:
    """Whether each device processes its own part."""
    return mesh_is_set() and num_devices() == parts


def _by_part(function, histories, times, *, deal: bool = False):
    """Calls `function` with row numbers, histories and times of each part.

    Args:
      function: function whose results are concatenated over the parts.
      histories: histories of the batch.
      times: time of each position, or None.
      deal: whether histories are exchanged between parts, so that all have nearly equal numbers of
          positions with a next item. Ids and times are few bytes compared with vectors.
    """
    if times is not None:
        # A time earlier than a previous time of its row is replaced by that time.
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
