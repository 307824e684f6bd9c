"""Tiles of a matrix product in registers, with operands copied in advance: Mosaic GPU, Hopper.

Each SM runs one program, which computes one tile after another. The summed dimension is
cut into steps of 128 bytes: 64 numbers of bfloat16, or 128 of int8. One warpgroup copies
operands to shared memory, some steps in advance. It goes on copying while the other warpgroups
process finished sums. Each of these has a part of the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import rem

_BYTES = 128  # bytes of each row in a step
STEP = 64  # elements of the summed dimension in a step: 128 bytes of bfloat16
ROWS = 64  # rows of a warpgroup, as `wgmma` requires
STAGES = 4  # number of steps that are copied in advance
# Registers of a thread that computes and of one that copies, by the number of warpgroups
# that compute. Warpgroups can only exchange registers. At first all threads have equally many:
# 512 (those of an SM, for 128 threads) divided by the number of all warpgroups,
# rounded down to a multiple of 8.
_REGISTERS = {2: (232, 40), 4: (112, 32)}


def matmul_tiles(
    num_tiles: int,
    tile_of: Callable,
    operands: Sequence[tuple],
    factors: Callable,
    finish: Callable,
    *,
    columns: Sequence[int],
    steps: int,
    warpgroups: int,
    constants: Sequence = (),
    scratch: Sequence = (),
    stages: int = STAGES,
    movers: Sequence[Callable] = (),
) -> None:
    """The body of a GPU program that `call` runs.

    Args:
      num_tiles: number of tiles of all programs.
      tile_of: function that maps a tile's number to the value that the other functions get as
        `tile`.
      operands: (matrix, shape of a step's block, place), where `place(tile, k)` is the
        first row and column of the block of step k.
      factors: function that maps a step's number, its blocks, the constants and a warpgroup's
        number to the two operands of `wgmma`, for each `[64, columns]` part of the tile that
        the warpgroup has.
      finish: function that is called with the tile, the warpgroup, a function that computes the
        sums of each part (float32; int32 for int8), and `scratch`. Data that it loads before it
        calls the function has arrived when the sums are complete.
      columns: number of columns of each part.
      steps: number of steps of a tile.
      warpgroups: number of warpgroups that compute, 2 or 4.
      constants: matrices that stay in shared memory.
      scratch: further shared memory, for `finish` and `movers`.
      stages: number of steps that are copied in advance.
      movers: at most 3 functions. Each runs on a warp of its own, next to the warp that
        copies operands. It is called with `scratch`, and with a function that calls a given
        function with each tile.
    """
    stages = min(stages, steps)
    registers, of_loader = _REGISTERS[warpgroups]
    is_integer = jnp.issubdtype(operands[0][0].dtype, jnp.integer)
    sums = jnp.int32 if is_integer else jnp.float32
    warpgroup = lax.axis_index("warpgroup")

    def each_tile(function):
        @plgpu.nd_loop((num_tiles,), collective_axes="program")
        def _(info):
            function(tile_of(info.index[0]), info.local_index * steps)

    def scope(blocks, kept, full, free, ready, *scratch_smem):
        def load():
            for matrix, smem in zip(constants, kept, strict=True):
                plgpu.copy_gmem_to_smem(matrix, smem, ready)

            @each_tile
            def _(tile, done):
                @pl.loop(0, steps)
                def _(k):
                    slot = rem(done + k, stages)

                    @pl.when(done + k >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for (matrix, extent, place), block in zip(
                        operands, blocks, strict=True
                    ):
                        at = map(pl.ds, place(tile, k), extent)
                        plgpu.copy_gmem_to_smem(
                            matrix.at[*at], block.at[slot], full.at[slot]
                        )

        def move():
            def tiles(function):
                each_tile(lambda tile, done: function(tile))

            jobs = [load, *(partial(mover, tiles, *scratch_smem) for mover in movers)]

            @plgpu.warp_map
            def _(warp):
                for i, job in enumerate(jobs):
                    pl.when(warp == i)(job)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(of_loader, action="decrease")
            move() if movers else load()

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(registers, action="increase")
            if constants:
                plgpu.barrier_wait(ready)

            @each_tile
            def _(tile, done):
                def make():
                    def multiply(*sums):
                        @pl.loop(0, steps)
                        def _(k):
                            slot = rem(done + k, stages)
                            plgpu.barrier_wait(full.at[slot])
                            here = [block.at[slot] for block in blocks]
                            for part, of_part in zip(
                                sums, factors(k, *here, *kept, warpgroup), strict=True
                            ):
                                plgpu.wgmma(part, *of_part)
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(free.at[slot])

                        return [part[...] for part in sums]

                    parts = [plgpu.ACC((ROWS, size), sums) for size in columns]
                    return pl.run_scoped(multiply, *parts)

                finish(tile, warpgroup, make, *scratch_smem)

            if scratch:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(
        scope,
        [
            plgpu.SMEM(
                (stages, *extent), matrix.dtype, transforms=transforms(matrix.dtype)
            )
            for matrix, extent, _ in operands
        ],
        [plgpu.SMEM(x.shape, x.dtype, transforms=transforms()) for x in constants],
        plgpu.Barrier(num_arrivals=len(operands), num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=max(1, len(constants))),
        *scratch,
        collective_axes="warpgroup",
    )


def call(
    name: str,
    body: Callable,
    out_type: Sequence,
    warpgroups: int,
    *arguments,
    programs: int | None = None,
):
    """Runs `body` on arrays or references, with one warpgroup more than `warpgroups`.

    A profiler shows `name`. By default there are `num_programs()` programs.
    """
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_programs() if programs is None else programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No memory is needed for reductions: a warp has whole rows of `wgmma`'s results when
            # it sums columns.
            reduction_scratch_bytes=0,
            # With the default semantics, JAX infers layouts, which takes half a minute.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*arguments)


def numbers(*scalars: jax.typing.ArrayLike) -> list[jax.Array]:
    """Converts scalars to int32 operands of a GPU program, an array each: joining them takes more
    launches.
    """
    return [jnp.reshape(jnp.asarray(x, jnp.int32), 1) for x in scalars]


def step_of(dtype: jax.typing.DTypeLike) -> int:
    """The number of elements of the summed dimension in a step."""
    return _BYTES // jnp.dtype(dtype).itemsize


def transforms(
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The layout of operands and results with rows of 128 bytes in shared memory."""
    return plgpu.TilingTransform((8, step_of(dtype))), plgpu.SwizzleTransform(_BYTES)


def store(target, values: jax.Array) -> None:
    """Writes an array from registers to a reference into global memory."""
    if hasattr(plgpu, "store"):  # JAX 0.12 requires `plgpu.store`; JAX 0.11 lacks it
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values


def num_programs() -> int:
    """The number of SMs; without a GPU two, for lowering and interpretation."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 2
