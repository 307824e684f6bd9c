"""The AUC from histograms of scores, which can be added over batches and devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Shaped

from sparsejax.mesh.layout import call_with_auto_axes

# A count is stored as `high * 2^20 + low`. So int32 sums of `low` over 1,024 devices do not
# overflow.
_LOW_BITS = 20
_MASK = 2**_LOW_BITS - 1
# Float32 can represent all bin numbers up to this one.
_MOST_BINS = 2**24


class AucBounds(NamedTuple):
    """An AUC from histograms, with bounds: the exact AUC is in `[auc - error, auc + error]`.

    Attributes:
      auc: the AUC in which a pair of a click and a non-click in one bin counts half.
      error: half of the share of these pairs among all pairs.
    """

    auc: float
    error: float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "high", "wrong"],
    meta_fields=["start", "stop"],
)
@dataclasses.dataclass(frozen=True)
class BinnedAuc:
    """Two histograms of scores: for clicks, and for other examples.

    `update` counts a batch. It can be called under `jax.jit`, and copies nothing to the host.
    Counts are integers: their order does not matter, and they are exact below 2^51. The
    histograms of several processes or devices can be added: by `a + b`, or by
    `jax.lax.psum(a, "data")` under `jax.shard_map` on at most 1,024 devices.

    >>> update = jax.jit(metrics.BinnedAuc.update)
    >>> binned = metrics.BinnedAuc.empty(-10, 10)
    >>> binned = update(binned, jnp.array([-1.0, 2.0]), jnp.array([0, 1]))
    >>> binned = update(binned, jnp.array([0.5, 0.5]), jnp.array([0, 1]))
    >>> binned.result()
    AucBounds(auc=0.875, error=0.125)

    Attributes:
      low: `[2, bins]` int32, the lower 20 bits of the counts: for other examples, for clicks.
      high: `[2, bins]` int32, the counts divided by 2^20, rounded down.
      wrong: `[]` int32, number of scores that are NaN and of labels that are not 0 or 1.
      start: the lower end of the first bin.
      stop: the upper end of the last bin.
    """

    low: Int[Array, "2 bins"]
    high: Int[Array, "2 bins"]
    wrong: Int[Array, ""]
    start: float
    stop: float

    @classmethod
    def empty(
        cls, start: float = -16.0, stop: float = 16.0, *, bins: int = 2**16
    ) -> BinnedAuc:
        """Makes histograms without examples.

        Args:
          start: the lower end of the first bin. Smaller scores are counted in the first bin.
          stop: the upper end of the last bin. Larger scores are counted in it. The default
            range is for logits. For probabilities use 0 and 1.
          bins: number of bins of equal width. Each takes 16 bytes.

        Raises:
          ValueError: the range is empty or not finite, or `bins` is below 1 or above 2^24.
        """
        if not (np.isfinite(start) and np.isfinite(stop) and start < stop):
            raise ValueError(
                f"start and stop must be finite, and start below stop; got {start}, {stop}"
            )
        if not 1 <= bins <= _MOST_BINS:
            raise ValueError(f"bins must be in [1, {_MOST_BINS:,}], got {bins:,}")
        zeros = jnp.zeros((2, bins), jnp.int32)
        none = jnp.zeros((), jnp.int32)
        return cls(zeros, zeros, none, float(start), float(stop))

    def update(
        self,
        scores: Shaped[Array | np.ndarray, "batch"],
        labels: Shaped[Array | np.ndarray, "batch"],
        *,
        where: Bool[Array | np.ndarray, "batch"] | None = None,
    ) -> BinnedAuc:
        """Adds a batch to the histograms, and returns them.

        Args:
          scores: logits, or other numbers that grow with the probability of a click.
          labels: 1 for a click, else 0.
          where: which examples count; all by default.
        """
        batch = scores.shape[0]
        where = jnp.ones(batch, bool) if where is None else jnp.asarray(where)
        added, wrong = call_with_auto_axes(
            self._counts, scores, labels, where, out_specs=P()
        )
        # The counts of a single batch may need more than 20 bits.
        low = self.low + (added & _MASK)
        high = self.high + (added >> _LOW_BITS) + (low >> _LOW_BITS)
        return dataclasses.replace(
            self, low=low & _MASK, high=high, wrong=self.wrong + wrong
        )

    def _counts(self, scores, labels, where) -> tuple[jax.Array, jax.Array]:
        scores, labels = jnp.asarray(scores, jnp.float32), jnp.asarray(labels)
        bins = self.low.shape[1]
        place = (scores - self.start) * (bins / (self.stop - self.start))
        place = jnp.floor(jnp.clip(place, 0, bins - 1))
        is_click = labels == 1
        wrong = where & (jnp.isnan(scores) | ~(is_click | (labels == 0)))
        # Scores to be ignored get a row number out of range, so that they are dropped. A bin
        # number out of range would not be dropped, see `mesh.xla_options.DETERMINISTIC`.
        row = jnp.where(where & ~wrong, is_click.astype(jnp.int32), 2)
        zeros = jnp.zeros(self.low.shape, jnp.int32)
        added = zeros.at[row, place.astype(jnp.int32)].add(1, mode="drop")
        return added, jnp.sum(wrong, dtype=jnp.int32)

    def __add__(self, other: BinnedAuc) -> BinnedAuc:
        """Adds the counts of both histograms.

        Raises:
          ValueError: the bins differ.
        """
        ours, theirs = ((b.start, b.stop, b.low.shape[1]) for b in (self, other))
        if ours != theirs:
            raise ValueError(
                f"histograms with other bins: start, stop and bins are {ours} and {theirs}"
            )
        low = self.low + other.low
        return dataclasses.replace(
            self,
            low=low & _MASK,
            high=self.high + other.high + (low >> _LOW_BITS),
            wrong=self.wrong + other.wrong,
        )

    def counts(self) -> np.ndarray:
        """`[2, bins]` int64: counts for other examples and for clicks, on the host."""
        low, high = (
            np.asarray(part).astype(np.int64) for part in (self.low, self.high)
        )
        return (high << _LOW_BITS) + low

    def result(self) -> AucBounds:
        """The AUC and its error bound, in float64 on the host.

        Raises:
          ValueError: there are no clicks or no other examples, a score was NaN, or a label was
            not 0 or 1.
        """
        if wrong := int(self.wrong):
            raise ValueError(
                f"{wrong:,} examples have a score that is NaN, or a label other than 0 "
                "and 1"
            )
        others, clicks = self.counts().astype(np.float64)
        if not (pairs := others.sum() * clicks.sum()):
            raise ValueError(
                f"the AUC needs both classes, but of {int(others.sum() + clicks.sum()):,} "
                f"examples {int(clicks.sum()):,} are clicks"
            )
        tied = clicks @ others / 2
        below = np.cumsum(others) - others
        return AucBounds(float((clicks @ below + tied) / pairs), float(tied / pairs))
