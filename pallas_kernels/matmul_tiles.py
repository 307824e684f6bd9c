"""Tiles of a matrix product in registers, operands copied ahead: Mosaic GPU, Hopper.

A program (one an SM) goes through tiles. One warpgroup copies operands to shared memory,
some steps of 64 of the summed dimension ahead, also while the others are busy with what
comes after the sums. Of a tile these have a part each.

A step's operands are read from the cache faster than it can give them. So two programs
have tiles with the same second operand, where there is an even number of such tiles, and
each reads half of it for both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

STEP = 64  # of the summed dimension: 128 bytes of bfloat16
ROWS = 64  # of a warpgroup, which `wgmma` asks for

# How operands and results of 64 two-byte columns lie in shared memory.
LAYOUT = (plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(2 * STEP))

# Registers of a thread that computes or copies, by the number of warpgroups that compute:
# together what 512 (of an SM), divided by all and rounded down to 8, gives them at first.
_REGISTERS = {2: (232, 40), 4: (112, 32)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the work is cut.

    Attributes:
      warpgroups: 2 or 4, that compute.
      stages: steps that are copied ahead.
      pairs: whether programs work two by two.
    """

    warpgroups: int
    pairs: bool
    stages: int = 4


def matmul_tiles(
    num_tiles: int,
    tile_of: Callable,
    operands: Sequence[tuple],
    factors: Callable,
    finish: Callable,
    *,
    columns: int,
    steps: int,
    shape: Shape,
    scratch: Sequence = (),
) -> None:
    """The body of a kernel that `call` runs, with the same `shape`.

    Args:
      num_tiles: of a program, or of two.
      tile_of: from a tile's number, and which of the two programs it is for, to what the
        other functions get as `tile`.
      operands: (matrix, shape of a step's block, place), twice, where `place(tile, k)` is
        its first row and column at step k.
      factors: from the blocks of a step and a warpgroup's number to the two operands of
        `wgmma` for its `[64, columns]` part of the tile.
      finish: called with the tile, the warpgroup, a function that makes the float32 sums,
        and `scratch`. What it loads before it calls the function is there when the sums
        are.
      columns: see `factors`.
      steps: of 64, which a tile takes.
      shape: how the work is cut.
      scratch: shared memory.
    """
    stages, warpgroups = min(shape.stages, steps), shape.warpgroups
    registers, of_loader = _REGISTERS[warpgroups]
    warpgroup = lax.axis_index("warpgroup")
    half = lax.axis_index("half") if shape.pairs else 0

    def each_tile(function):
        @plgpu.nd_loop((num_tiles,), collective_axes="program")
        def _(info):
            function(tile_of(info.index[0], half), info.local_index * steps)

    def scope(blocks, full, free, *scratch_smem):
        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(of_loader, action="decrease")

            @each_tile
            def _(tile, done):
                @pl.loop(0, steps)
                def _(k):
                    slot = lax.rem(done + k, stages)

                    @pl.when(done + k >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for i, (matrix, extent, place) in enumerate(operands):
                        at = map(pl.ds, place(tile, k), extent)
                        plgpu.copy_gmem_to_smem(
                            matrix.at[*at],
                            blocks[i].at[slot],
                            full.at[slot],
                            collective_axes="half" if shape.pairs and i == 1 else None,
                        )

            # Not before the other program is done with what is in this one.
            @pl.when(lax.axis_index("program") < num_tiles)
            def _():
                for slot in range(stages):
                    plgpu.barrier_wait(free.at[slot])

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(registers, action="increase")

            @each_tile
            def _(tile, done):
                def make():
                    def multiply(sums):
                        @pl.loop(0, steps)
                        def _(k):
                            slot = lax.rem(done + k, stages)
                            plgpu.barrier_wait(full.at[slot])
                            here = [block.at[slot] for block in blocks]
                            plgpu.wgmma(sums, *factors(*here, warpgroup))
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(free.at[slot])

                        return sums[...]

                    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns)))

                finish(tile, warpgroup, make, *scratch_smem)

            if scratch:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barrier = plgpu.Barrier
    if shape.pairs:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("half",))
    pl.run_scoped(
        scope,
        [
            plgpu.SMEM((stages, *extent), matrix.dtype, transforms=LAYOUT)
            for matrix, extent, _ in operands
        ],
        plgpu.Barrier(num_arrivals=len(operands), num_barriers=stages),
        barrier(num_arrivals=warpgroups, num_barriers=stages),
        *scratch,
        collective_axes="warpgroup",
    )


def call(body: Callable, out_type: Sequence, shape: Shape, *arguments):
    """Runs `body`, which is to call `matmul_tiles`, on arrays or references."""
    programs = _num_programs()
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(programs // 2 if shape.pairs else programs,),
        grid_names=("program",),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # With the default semantics inferring the layouts takes half a minute.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        cluster=(2,) * shape.pairs,
        cluster_names=("half",) * shape.pairs,
    )(*arguments)


def _num_programs() -> int:
    """One for each SM; where there is no GPU, a few, for lowering and interpretation."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 4
