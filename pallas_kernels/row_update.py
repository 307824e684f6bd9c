"""An optimizer's step on the rows of a kernel that a batch has touched: Mosaic GPU.

The gradient of a row is the sum of the rows of `dy` that its entries name, as in
`gather_matmul`. When such a sum is complete, the program reads the row and its state,
updates them, and writes them back. It does not write the gradient to memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels.catch_up import CatchUp, at_random, line_of, shared_of
from pallas_kernels.matmul_tiles import numbers, store
from pallas_kernels.row_sums import (
    Config,
    compiler_params,
    entries_for,
    grid,
    reduce_body,
    reducing_team,
    sum_body,
    takes_narrow,
    team_of,
)
from pallas_kernels.teams import Team, on_teams, team_for

# `Update` is a function that updates a row: (the row of each array, its gradient, its missed steps
# or none, scalars, function that computes the mean over a row) -> new row of each array.
Mean = Callable[[jax.Array], jax.Array]
Update = Callable[
    [list[jax.Array], jax.Array, jax.Array | None, list[jax.Array], Mean],
    Sequence[jax.Array],
]

# Number of programs for a large batch. With twice as many, a batch of 100,000 entries is slower:
# more pieces of popular rows must be added afterwards.
_PROGRAMS = 4_096


def default_config(hidden: int, nse: int, by_row: bool = False) -> Config:
    """The fastest configuration that was tried on an H200, jax 0.11.2."""
    chunk = 256 if hidden <= 256 else 512
    entries = entries_for(nse, _PROGRAMS)
    if (by_row or takes_narrow(hidden)) and (team := team_for(hidden, 4)):
        unroll, threads = 8 if hidden <= 16 else 4, team.threads
        if hidden == 128:  # half a warp is 3 % faster here than a whole warp
            threads = 16
        return Config(entries=entries, unroll=unroll, chunk=chunk, threads=threads)
    return Config(entries=entries, unroll=4, chunk=chunk)


def takes(hidden: int, by_row: bool = False) -> bool:
    """Whether `row_update` supports rows with `hidden` elements.

    Args:
      hidden: number of elements of a row.
      by_row: whether the update needs whole rows.
    """
    if by_row and team_for(hidden, 4) is None:
        return False
    return takes_narrow(hidden) or hidden % 128 == 0


def row_update(
    update: Update,
    arrays: Sequence[Float[Array, "num_rows _"]],
    data: Float[Array, "nse"] | None,
    rows: Int[Array, "nse"],
    indptr: Int[Array, "capacity_plus_1"],
    targets: Int[Array, "nse"],
    lags: Int[Array, "nse"] | None,
    dy: Float[Array, "batch hidden"],
    scalars: Sequence[Float[Array, ""]] = (),
    *,
    table: tuple[CatchUp, Float[Array, "lags _"], Float[Array, "_"]] | None = None,
    place: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None,
    config: Config | None = None,
) -> list[Float[Array, "num_rows _"]]:
    """Updates rows of a kernel and its state, in place if they are donated.

    ::

        gradient_u = sum_j data_j dy[rows_j]      entries j = indptr[u] .. indptr[u + 1] - 1
        arrays[:][target_u] = update(arrays[:][target_u], gradient_u, lag_u, scalars)

    Gradients are summed in float32 in the order of the entries. Reads `nse * hidden`
    elements of `dy`, and reads and writes the touched rows of each array once.

    Args:
      update: function that works element by element, in float32, on pieces of a row. Arrays
        that it creates must be scalars. If an array has one number a row, `update` gets
        whole rows, that number as a scalar, and a function that computes the mean over a row.
      arrays: kernel and state, float32 or bfloat16, `[num_rows, hidden]`, with sizes that `takes`
        allows; an array of the state may be `[num_rows, 1]`.
      data: values, or None if every entry is 1.
      rows: int32, each in `[0, batch)`.
      indptr: int32, where the entries of each touched row start. The last element is the
        number of entries; entries beyond it are ignored.
      targets: int32; at the last entry of each touched row the number of that row in the
        arrays, and -1 at the other entries. No row occurs twice.
      lags: missed steps of each touched row, at its last entry, which `update` gets as float32;
        or None.
      dy: float32 or bfloat16.
      scalars: further numbers that `update` gets, common to all rows.
      table: function, table and shared numbers by which rows are brought up to date, see
        `catch_up`. `update` then gets no `lag_u`.
      place: key (`Noise.key`) by which bfloat16 arrays are rounded at random, and number of the
        arrays' first row. Without it they are rounded to nearest.
      config: how the work is divided; see `gather_matmul`.

    Raises:
      ValueError: the GPU program does not support these shapes or dtypes.
    """
    hidden, nse = dy.shape[1], rows.shape[0]
    by_row = any(array.shape[1] == 1 for array in arrays)
    for array in (dy, *arrays):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"float32 or bfloat16 arrays only, got {array.dtype}")
        if array.shape[1] not in (hidden, 1) or not takes(hidden, by_row):
            raise ValueError(
                "dy and the arrays must have one width that `takes` allows, as a multiple "
                f"of 8 below 128 or of 128; got {hidden} and {array.shape[1]}"
            )
    if nse == 0 or dy.shape[0] == 0:
        return list(arrays)
    if config is None:
        config = default_config(hidden, nse, by_row)
        # Bringing rows up to date needs more registers and code for each row.
        if table is not None:
            config = dataclasses.replace(config, unroll=min(config.unroll, 4))
            # With fewer teams in a warp, fewer rows are updated one after the other: with 16
            # teams, 32 us become 23.
            if config.threads == 4:
                config = dataclasses.replace(config, threads=8)

    noise = [] if place is None else numbers(*place)

    def moved(team, *operands):
        return _moved(
            team, update, catch_up, operands, data is not None, lags is not None, config
        )

    entries = [rows, *([] if data is None else [data]), targets]
    entries += [] if lags is None else [lags]
    scalars = [jnp.reshape(scalar, 1) for scalar in scalars]
    catch_up, *tables = table or (None,)
    team = team_of(hidden, 4, config.threads, config.chunk)
    return on_teams(
        moved, team, (indptr, dy), entries, tables, scalars, noise, list(arrays)
    )


def _moved(team: Team, update, catch_up, operands, valued, lagged, config):
    """Runs `row_update` with the given team; returns the new arrays."""
    (indptr, dy), entries, tables, scalars, noise, arrays = operands
    given = *tables, *scalars, *noise
    hidden, programs = dy.shape[1], pl.cdiv(entries[0].shape[0], config.entries)
    extras = entries[-2:] if lagged else entries[-1:]
    by_row = any(array.shape[1] == 1 for array in arrays)
    mover = _Mover(team, update, catch_up, by_row, len(scalars))

    def row_update_sum(indptr_gmem, dy_gmem, *refs):
        *refs, partial_gmem, cut_rows_gmem = refs
        entries_gmem, numbers_gmem, arrays_gmem = _split(refs, len(entries), len(given))

        def read_ahead(columns, entry):
            """Loads the row to be updated, when the last entry of its gradient is read."""
            target = entry[-len(extras)]
            return jax.lax.cond(
                target >= 0,
                lambda: mover.read(arrays_gmem, target, columns),
                lambda: mover.nothing(arrays_gmem),
            )

        def ready(entry, old):
            """Computes the up-to-date row. The teams of a warp do this together."""
            if catch_up is None:
                return old
            target, lag = entry[-2:]
            return jax.lax.cond(
                (target >= 0) & (lag > 0),
                lambda: mover.caught_up(numbers_gmem, old, lag),
                lambda: mover.wide(old),
            )

        def put(row, columns, gradient, entry, old):
            extra = entry[-len(extras) :]
            mover.move(arrays_gmem, numbers_gmem, columns, old, gradient, extra)

        sum_body(
            entries_gmem,
            indptr_gmem,
            dy_gmem,
            partial_gmem,
            cut_rows_gmem,
            put,
            read_ahead,
            ready,
            valued=valued,
            num_cols=dy.shape[0],
            team=team,
            config=config,
        )

    array_refs = [jax.new_ref(array) for array in arrays]
    partial, cut_rows = plgpu.kernel(
        row_update_sum,
        out_type=[
            jax.ShapeDtypeStruct((2, programs, hidden), jnp.float32),
            jax.ShapeDtypeStruct((2, programs), jnp.int32),
        ],
        grid=grid(hidden, team, programs),
        grid_names=("chunk", "program"),
        compiler_params=compiler_params(),
    )(indptr, dy, *entries, *given, *array_refs)
    if programs > 1:
        reducing = dataclasses.replace(mover, team=reducing_team(team, hidden))

        def row_update_reduce(indptr_gmem, partial_gmem, cut_rows_gmem, *refs):
            extras_gmem, numbers_gmem, arrays_gmem = _split(
                refs, len(extras), len(given)
            )

            def put(row, columns, gradient):
                last = indptr_gmem[row + 1] - 1
                extra = [ref[last] for ref in extras_gmem]
                old = reducing.read(arrays_gmem, extra[0], columns)
                if catch_up is not None:
                    old = reducing.caught_up(numbers_gmem, old, extra[1])
                reducing.move(arrays_gmem, numbers_gmem, columns, old, gradient, extra)

            reduce_body(partial_gmem, cut_rows_gmem, put, team=reducing.team)

        plgpu.kernel(
            row_update_reduce,
            out_type=[],
            grid=grid(hidden, reducing.team, programs),
            grid_names=("chunk", "program"),
            compiler_params=compiler_params(),
        )(indptr, partial, cut_rows, *extras, *given, *array_refs)
    return [jax.freeze(ref) for ref in array_refs]


@dataclasses.dataclass(frozen=True)
class _Mover:
    """Reads, updates and writes rows for a team.

    Attributes:
      team: team that has the row, or a piece of it.
      update: function that computes the new values of a row, as in `row_update`.
      catch_up: function that brings a row up to date by a table of missed steps; None without
        one.
      by_row: whether some arrays have one number a row.
      num_scalars: number of scalars for `update`, which come before those for random rounding.
    """

    team: Team
    update: Update
    catch_up: CatchUp | None
    by_row: bool
    num_scalars: int

    def read(self, arrays_gmem, target, columns):
        """Reads row `target` of the arrays. For an array with one number for each row, reads that
        number.
        """
        return [
            ref[target, 0]
            if ref.shape[1] == 1
            else self.team.load(ref.at[target, columns])
            for ref in arrays_gmem
        ]

    def nothing(self, arrays_gmem):
        """Zeros with the types that `read` returns."""
        return [
            (jnp.float32(0) if ref.shape[1] == 1 else self.team.splat(0)).astype(
                ref.dtype
            )
            for ref in arrays_gmem
        ]

    def wide(self, old):
        """The row that `read` returned, in float32."""
        return [row.astype(jnp.float32) for row in old]

    def caught_up(self, numbers_gmem, old, lag):
        """The row that `read` returned, after the steps that it has missed, in float32."""
        assert self.catch_up is not None
        (table_gmem, shared_gmem), *_ = self._numbers(numbers_gmem)
        line = line_of(table_gmem, lag)
        return list(self.catch_up(self.wide(old), line, shared_of(shared_gmem)))

    def _numbers(self, numbers_gmem):
        """Divides the numbers into: table and shared numbers, if any; scalars; key and first row,
        if any.
        """
        return _split(numbers_gmem, 0 if self.catch_up is None else 2, self.num_scalars)

    def move(self, arrays_gmem, numbers_gmem, columns, old, gradient, extra):
        """Computes the new values of the row that `extra` names from old row and gradient, and
        writes them.
        """
        _, scalars_gmem, noise_gmem = self._numbers(numbers_gmem)
        target, *lag = extra
        number = (lambda value: value) if self.by_row else self.team.splat
        lag = number(lag[0].astype(jnp.float32)) if lag and not self.catch_up else None
        old = self.wide(old)
        scalars = [number(ref[0]) for ref in scalars_gmem]
        new = self.update(old, gradient, lag, scalars, self._mean)
        for ref, row in zip(arrays_gmem, new, strict=True):
            if ref.shape[1] == 1:
                ref[target, 0] = row.astype(ref.dtype)
                continue
            if noise_gmem and ref.dtype == jnp.bfloat16:
                key, first_row = (ref[0] for ref in noise_gmem)
                row = at_random(self.team, key, first_row + target, columns, row)
            store(ref.at[target, columns], row.astype(ref.dtype))

    def _mean(self, row):
        return self.team.sum(row) / self.team.width


def _split(refs, *counts):
    """Splits references into groups of `counts`, and the rest."""
    parts = []
    for count in counts:
        parts.append(refs[:count])
        refs = refs[count:]
    return *parts, refs
