"""Numbers that are kept for each row of a dynamic table, by which rows lose their ids.

The two built-in ones are kept for every table. Files, checkpoints and changes have each number under
its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

# Nothing is added to the count of an id that has reached this number.
MOST_SEEN = 2**30


@dataclasses.dataclass(frozen=True)
class RowNumber:
    """A number that is kept for each row: `DynamicTableConfig(..., evict=Mine())`.

    Where rows are needed, those with the lowest score lose their ids. A subclass is a frozen
    dataclass with a `name`. Its methods are traced: they work on arrays, element by element.

    >>> @dataclasses.dataclass(frozen=True)
    ... class FirstSeen(RowNumber):
    ...     name = "born"
    ...
    ...     def initial(self, times, now):
    ...         return jnp.full_like(times, now)
    >>> DynamicTableConfig(1000, 2, evict=FirstSeen()).evict
    FirstSeen()

    Attributes:
      name: name of the column in files; it differs from those of the table's other numbers.
      dtype: int32 or float32.
    """

    name: ClassVar[str] = ""
    dtype: ClassVar[Any] = jnp.int32

    def initial(self, times: Array, now: Array) -> Array:
        """The number of a new row.

        Args:
          times: number of times that the batch has the id.
          now: the clock of `assign_rows`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method initial")

    def update(self, value: Array, times: Array, now: Array) -> Array:
        """The number of a row whose id is in a batch; by default it stays.

        Args:
          value: the number before.
          times: number of times that the batch has the id.
          now: the clock of `assign_rows`.
        """
        del times, now
        return value

    def score(self, value: Array, now: Array) -> Array:
        """The score of a row, int32 or float32: by default the number itself."""
        del now
        return value

    def faded(self, value: Array) -> Array:
        """The number after an eviction in the part of the row; by default it stays."""
        return value

    def loaded(self, values: np.ndarray | None, count: int) -> np.ndarray:
        """The numbers of ids from a file, on the host.

        Args:
          values: the column of the file; None if it has none. Then they are those of ids that
            were seen once, at 0.
          count: number of ids.
        """
        if values is not None:
            return values
        once, at = jnp.ones(count, jnp.int32), jnp.int32(0)
        return np.asarray(self.initial(once, at), self.dtype)

    @property
    def fades(self) -> bool:
        """Whether an eviction changes it, after the update by the batch."""
        return type(self).faded is not RowNumber.faded

    def seen(
        self,
        values: Array,
        at: Int[Array, "ids"],
        times: Int[Array, "ids"],
        now: jax.Array,
    ) -> jax.Array:
        """`update` for the ids of a batch, in which one may be several times.

        Args:
          values: the numbers of all rows.
          at: the row of each id; behind the last row for ids without one.
          times: how often each of them counts.
          now: the clock.
        """
        total = jnp.zeros(len(values), jnp.int32).at[at].add(times, mode="drop")
        before, often = (a.at[at].get(mode="clip") for a in (values, total))
        # Entries of one id write the same number.
        after = self.update(before, often, now).astype(values.dtype)
        return jnp.asarray(values).at[at].set(after, mode="drop")


@dataclasses.dataclass(frozen=True)
class LastSeen(RowNumber):
    """When the id was last seen."""

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
        # Earlier releases let it wrap: then it is the largest.
        values = super().loaded(values, count)
        return np.where(values < 0, np.int32(MOST_SEEN), values)

    def seen(self, values: Array, at: Array, times: Array, now: jax.Array) -> jax.Array:
        # A batch has fewer ids than fit above `MOST_SEEN`, so no count wraps. To bound the sums
        # themselves takes another scatter, half as long again on a GPU.
        values = jnp.asarray(values)
        counts = values.at[at].get(mode="fill", fill_value=0) < MOST_SEEN
        return values.at[at].add(jnp.where(counts, times, 0), mode="drop")


BUILT_IN: tuple[RowNumber, ...] = (TimesSeen(), LastSeen())
_POLICIES: dict[str, RowNumber] = {"lru": LastSeen(), "lfu": TimesSeen()}


def policy(evict: str | RowNumber | None) -> RowNumber | None:
    """The number by which rows lose their ids; None if none do."""
    return _POLICIES[evict] if isinstance(evict, str) else evict


def ordered(score: Array) -> UInt32[Array, "..."]:
    """Unsigned numbers in the order of scores, int32 or float32."""
    if jnp.issubdtype(score.dtype, jnp.floating):
        # Bits of negative floats descend. -0 is 0.
        words = lax.bitcast_convert_type(score.astype(jnp.float32) + 0.0, jnp.int32)
        return ordered(jnp.where(words < 0, words ^ np.int32(2**31 - 1), words))
    words = lax.bitcast_convert_type(score.astype(jnp.int32), jnp.uint32)
    return words ^ np.uint32(1 << 31)
