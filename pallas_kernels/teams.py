"""Teams of threads that process one row together; a block of a GPU program has several.

::

    rows of 16 float32    lanes 0-3  4-7  8-11 12-15 16-19 20-23 24-27 28-31
                          team  0    1    2    3     4     5     6     7
                          one load of a warp: 8 rows of 64 bytes

A program of Mosaic GPU is written for a warpgroup. Here it is written for a team, which may
be a few lanes of a warp. A layout says which thread has which elements of the team's row.
Scalars for Mosaic, such as the number of a row, may differ between teams. So the
teams of a warp branch separately, and their code must not contain a barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic as plgpu

_BLOCK = 128  # threads of a block: a warpgroup
_WARP = 32
_MOST = 16  # most elements of a row for each lane, as they are in registers
_BYTES = 16  # most bytes that a lane accesses at once


@dataclasses.dataclass(frozen=True)
class Team:
    """Threads that process one row, or a piece of it.

    Attributes:
      threads: number of threads: a warpgroup's 128, or a power of 2 up to 32.
      width: number of elements of the row or piece; a multiple of `threads * vec`.
      vec: elements that a thread accesses at once.
      alone: whether it is the only team of its block.
    """

    threads: int
    width: int
    vec: int
    alone: bool = False

    @property
    def count(self) -> int:
        """The number of teams in a block."""
        return 1 if self.alone else _BLOCK // self.threads

    @property
    def layout(self):
        """The layout of the row's elements in the registers of the team's threads."""
        if self.threads == _BLOCK:
            return plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.vec)
        tiles, lanes = [(self.vec,)], []
        if self.threads > 1:
            tiles, lanes = [(self.threads * self.vec,), *tiles], [-2]
        # Mosaic treats the other teams of the warpgroup as copies of this one.
        if self.threads < _WARP:
            lanes = [plgpu.Replicated(_WARP // self.threads), *lanes]
        return plgpu.Layout.TILED(
            plgpu.Tiling(tuple(tiles)),
            warp_dims=(plgpu.Replicated(_BLOCK // _WARP),),
            lane_dims=tuple(lanes),
            vector_dim=-1,
        )

    def number(self) -> jax.Array:
        """The number of this team among those of all blocks of the grid axis "program"."""
        block = lax.axis_index("program")
        if self.count == 1:
            return block
        from pallas_kernels.lanes import thread_over  # this import loads Mosaic GPU

        return block * self.count + thread_over(self.threads)

    def splat(self, value: jax.typing.ArrayLike) -> jax.Array:
        """A row whose elements are all `value`."""
        full = jnp.full((self.width,), value, jnp.float32)
        return plgpu.layout_cast(full, self.layout)

    def columns(self) -> jax.Array:
        """The column of each element of the row."""
        return plgpu.broadcasted_iota(jnp.int32, (self.width,), 0, layout=self.layout)

    def load(self, ref) -> jax.Array:
        """Loads the row from memory."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def elements(self, row: jax.Array) -> list[jax.Array]:
        """The elements of a row that this thread has, as scalars."""
        if self.count == 1:
            return [row[i] for i in range(self.width)]
        from pallas_kernels.lanes import elements_of  # this import loads Mosaic GPU

        return elements_of(row, self.layout)

    def sum(self, row: jax.Array) -> jax.Array:
        """The sum of the row's elements, in float32."""
        if self.count == 1:
            return jnp.sum(row)
        from pallas_kernels.lanes import sum_over  # this import loads Mosaic GPU

        return sum_over(self.threads, self.layout)(row)


def team_for(width: int, itemsize: int, threads: int | None = None) -> Team | None:
    """The team for whole rows of `width` elements; None if they are too long or uneven.

    It has as many lanes as can access 16 bytes each, or `threads` if so many lanes can share the
    row. If the lanes would have too many elements, they access fewer bytes at once.
    """
    vec = _BYTES // itemsize
    while vec:
        for lanes in (32, 16, 8, 4, 2, 1) if threads is None else (threads,):
            if width % (lanes * vec) == 0 and width <= _MOST * lanes:
                return Team(lanes, width, vec)
        vec //= 2
    return None


def on_teams(program: Callable, team: Team, *operands):
    """Calls `program(team, *operands)`.

    In the interpreter, on a CPU, a block has one team, as there are no lanes.
    """
    if team.count == 1:
        return program(team, *operands)
    alone = dataclasses.replace(team, alone=True)

    def on_gpu(*operands):
        return program(team, *operands)

    def interpreted(*operands):
        return program(alone, *operands)

    return lax.platform_dependent(*operands, cuda=on_gpu, default=interpreted)
