"""Brings rows of a kernel up to date while GPU programs read them: Mosaic GPU.

Under some optimizer rules, rows also change in steps that do not touch them. The change of a
row by missed steps is a function of its weights, its state, and numbers that depend only on how
many steps it has missed. A table has these numbers. So a program that reads a row, its state and
a line of the table can compute the current row, without writing it or looping over steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul_tiles import numbers
from pallas_kernels.rounding import of_columns, of_rows, rounded
from pallas_kernels.teams import Team

# Function that brings a row up to date: (the row of each array, a line of the table, shared
# numbers) -> new rows.
CatchUp = Callable[
    [list[jax.Array], Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Missed:
    """The operands by which programs bring rows up to date.

    Attributes:
      catch_up: function that works element by element, in float32, on pieces of a row.
      state: `[num_rows, hidden]` arrays of the optimizer's state.
      last: `[num_rows]`, the step at which each row was up to date; -1 if it has missed none.
      count: `[]`, number of steps done. A row that is read must not have missed more steps than
        the table has lines.
      table: a line for each number of missed steps, from 0.
      shared: numbers that apply to all rows.
      place: key and row by which a bfloat16 kernel is rounded at random, see `row_update`; None
        rounds to nearest.
    """

    catch_up: CatchUp = dataclasses.field(metadata={"static": True})
    state: list[Float[Array, "num_rows hidden"]]
    last: Int[Array, "num_rows"]
    count: Int[Array, ""]
    table: Float[Array, "lags numbers"]
    shared: Float[Array, "shared"]
    place: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None

    def operands(self) -> list[jax.Array]:
        """The arrays in the order of a program's operands; `reader` gets their references."""
        place = [] if self.place is None else numbers(*self.place)
        count = jnp.reshape(self.count, 1)
        return [*self.state, self.last, count, self.table, self.shared, *place]

    def reader(self, team: Team, w_gmem, refs) -> tuple[Callable, Callable]:
        """The functions `load` and `value` for `sum_body`, which give up-to-date rows."""
        state_gmem, refs = refs[: len(self.state)], refs[len(self.state) :]
        last_gmem, count_gmem, table_gmem, shared_gmem, *noise_gmem = refs

        def load(columns, i):
            rows = [team.load(ref.at[i, columns]) for ref in (w_gmem, *state_gmem)]
            return columns, i, last_gmem[i], rows

        def value(loaded):
            columns, i, last, rows = loaded
            lag = count_gmem[0] - last

            def caught_up():
                wide = [row.astype(jnp.float32) for row in rows]
                line = line_of(table_gmem, lag)
                w, *_ = self.catch_up(wide, line, shared_of(shared_gmem))
                if noise_gmem and w_gmem.dtype == jnp.bfloat16:
                    key, first_row = (ref[0] for ref in noise_gmem)
                    w = at_random(team, key, first_row + i, columns, w)
                return w.astype(w_gmem.dtype)

            behind = (last >= 0) & (lag > 0)
            return jax.lax.cond(behind, caught_up, lambda: rows[0])

        return load, value


@dataclasses.dataclass(frozen=True)
class Read(Sequence[jax.Array]):
    """A sequence of numbers in memory. Each is read only in the branch that uses it.

    Attributes:
      read: function that reads the number with an index.
      places: indices of the numbers.
    """

    read: Callable[[int], jax.Array]
    places: range

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> jax.Array: ...

    @overload
    def __getitem__(self, index: slice) -> Read: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Read(self.read, self.places[index])
        return self.read(self.places[index])


def line_of(table_gmem, lag: jax.Array) -> Read:
    """Returns the line of the table for a row that has missed `lag` steps."""
    lags, columns = table_gmem.shape
    lag = jnp.minimum(jnp.maximum(lag, 0), lags - 1)
    return Read(lambda j: table_gmem[lag, j], range(columns))


def shared_of(shared_gmem) -> Read:
    """Reads the numbers that apply to all rows."""
    return Read(lambda j: shared_gmem[j], range(shared_gmem.shape[0]))


def at_random(team: Team, key, row, columns, w: jax.Array) -> jax.Array:
    """Rounds a piece of a row at random to bfloat16, as it would be stored; returns it in
    float32.
    """
    column = of_columns(columns.start + team.columns())
    return rounded(w, of_rows(key, row), column)
