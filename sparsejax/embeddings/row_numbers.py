"""Numbers stored for each row of a dynamic table, which serve as eviction policies.

The two built-in numbers are stored for every table. Files, checkpoints and changes store each
number under its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

# Largest value of a count; it is not increased further.
MOST_SEEN = 2**30


@dataclasses.dataclass(frozen=True)
class RowNumber:
    """A number stored for each row, for `DynamicTableConfig(..., evict=Mine())`.

    If rows are needed, those with the lowest score lose their ids. A subclass is a frozen
    dataclass with a `name`. Its methods are traced, and work on arrays element by element.

    >>> @dataclasses.dataclass(frozen=True)
    ... class FirstSeen(RowNumber):
    ...     name = "born"
    ...
    ...     def initial(self, times, now):
    ...         return jnp.full_like(times, now)
    >>> DynamicTableConfig(1000, 2, evict=FirstSeen()).evict
    FirstSeen()

    Attributes:
      name: name of the column in files, different from those of the table's other numbers.
      dtype: dtype of the number, int32 or float32.
    """

    name: ClassVar[str] = ""
    dtype: ClassVar[Any] = jnp.int32

    def initial(self, times: Array, now: Array) -> Array:
        """The initial number of a new row.

        Args:
          times: number of occurrences of the id in the batch.
          now: current time of the clock of `assign_rows`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method initial")

    def update(self, value: Array, times: Array, now: Array) -> Array:
        """The new number of a row whose id is in a batch; by default the old one.

        Args:
          value: old number.
          times: number of occurrences of the id in the batch.
          now: current time of the clock of `assign_rows`.
        """
        del times, now
        return value

    def score(self, value: Array, now: Array) -> Array:
        """The score of a row, int32 or float32: by default the number itself."""
        del now
        return value

    def faded(self, value: Array) -> Array:
        """The number after an eviction in the row's part; by default it is not changed."""
        return value

    def loaded(self, values: np.ndarray | None, count: int) -> np.ndarray:
        """Numbers for ids loaded from a file, on the host.

        Args:
          values: column of the file; None if it has none. Then the ids get the numbers of ids that
              were seen once, at time 0.
          count: number of ids.
        """
        if values is not None:
            return values
        once, at = jnp.ones(count, jnp.int32), jnp.int32(0)
        return np.asarray(self.initial(once, at), self.dtype)

    @property
    def fades(self) -> bool:
        """Whether an eviction changes the number by `faded`, after `update` was applied."""
        return type(self).faded is not RowNumber.faded

    def seen(
        self,
        values: Array,
        at: Int[Array, "ids"],
        times: Int[Array, "ids"],
        now: jax.Array,
    ) -> jax.Array:
        """Applies `update` to the rows of a batch's ids, in which an id may be repeated.

        Args:
          values: the numbers of all rows.
          at: row of each id; a number beyond the last row for ids without one.
          times: number of occurrences that each entry stands for.
          now: current time of the clock.
        """
        total = jnp.zeros(len(values), jnp.int32).at[at].add(times, mode="drop")
        before, often = (a.at[at].get(mode="clip") for a in (values, total))
        # Entries with equal ids write equal numbers.
        after = self.update(before, often, now).astype(values.dtype)
        return jnp.asarray(values).at[at].set(after, mode="drop")


@dataclasses.dataclass(frozen=True)
class LastSeen(RowNumber):
    """The time at which the id was last seen."""

    name = "last"

    def initial(self, times: Array, now: Array) -> Array:
        return jnp.broadcast_to(now, times.shape)

    def seen(self, values: Array, at: Array, times: Array, now: jax.Array) -> jax.Array:
        del times
        return jnp.asarray(values).at[at].set(now, mode="drop")


@dataclasses.dataclass(frozen=True)
class TimesSeen(RowNumber):
    """How often the id was seen, until it reaches `MOST_SEEN`; halved at each eviction of its part."""

    name = "count"

    def initial(self, times: Array, now: Array) -> Array:
        del now
        return times

    def faded(self, value: Array) -> Array:
        return value // 2

    def loaded(self, values: np.ndarray | None, count: int) -> np.ndarray:
        # In earlier releases it could overflow: a negative count becomes the largest one.
        values = super().loaded(values, count)
        return np.where(values < 0, np.int32(MOST_SEEN), values)

    def seen(self, values: Array, at: Array, times: Array, now: jax.Array) -> jax.Array:
        # A batch has too few ids to raise a count from `MOST_SEEN` above the int32 maximum.
        # Limiting the sums would need another scatter, half as slow again on a GPU.
        values = jnp.asarray(values)
        counts = values.at[at].get(mode="fill", fill_value=0) < MOST_SEEN
        return values.at[at].add(jnp.where(counts, times, 0), mode="drop")


BUILT_IN: tuple[RowNumber, ...] = (TimesSeen(), LastSeen())
_POLICIES: dict[str, RowNumber] = {"lru": LastSeen(), "lfu": TimesSeen()}


def policy(evict: str | RowNumber | None) -> RowNumber | None:
    """The number by which rows are evicted; None if none are."""
    return _POLICIES[evict] if isinstance(evict, str) else evict


def ordered(score: Array) -> UInt32[Array, "..."]:
    """Maps int32 or float32 scores to unsigned integers in the same order."""
    if jnp.issubdtype(score.dtype, jnp.floating):
        # The bits of negative floats are in descending order. Adding 0 turns -0 into 0.
        words = lax.bitcast_convert_type(score.astype(jnp.float32) + 0.0, jnp.int32)
        return ordered(jnp.where(words < 0, words ^ np.int32(2**31 - 1), words))
    words = lax.bitcast_convert_type(score.astype(jnp.int32), jnp.uint32)
    return words ^ np.uint32(1 << 31)
