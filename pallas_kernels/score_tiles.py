"""Tiles of scores in registers, for the kernels over all items: a Mosaic GPU matmul.

::

    scores[b, i] = h[b] . kernel[i]        h [batch, hidden], kernel [items, hidden]

A program (one an SM) goes through tiles of 128 rows and 256 items. One warpgroup copies
operands to shared memory, `stages` steps of 64 ahead, also while the other two are busy
with the last tile's scores. Of a tile these have 64 rows each; once its scores are summed
an `epilogue` makes something smaller of them. Scores are never written to memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 128  # of a program's tile
TILE_ITEMS = 256
STEP = 64  # of `hidden`: 128 bytes of bfloat16
ROWS = 64  # of a warpgroup, which `wgmma` asks for

# How operands and results of 64 two-byte columns lie in shared memory.
LAYOUT = (plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(2 * STEP))


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut. The defaults are the fastest on an H200, jax 0.11.2.

    Attributes:
      stages: steps of 64 that are copied ahead.
      width: tiles of items that are gone through side by side, so that `h` and they
        stay in the cache.
    """

    stages: int = 4
    width: int = 8


def unsupported(hidden: int, items: int, dtype: jnp.dtype) -> str | None:
    """What is wrong with operands of this kind, as the end of a sentence."""
    if dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, not {dtype}"
    if hidden % STEP or not hidden:
        return f"takes hidden sizes that are multiples of {STEP}, not {hidden}"
    if items % TILE_ITEMS or not items:
        return f"takes kernels of a multiple of {TILE_ITEMS} rows, not {items:,}"
    return None


def score_tiles(
    epilogue: Callable,
    h: jax.Array,
    kernel: jax.Array,
    scalars: Sequence[jax.typing.ArrayLike],
    inputs: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    scratch: object | None = None,
    config: Config,
):
    """Calls `epilogue` on all tiles of `h` and rows `start ...` of `kernel`.

    `epilogue(make, row, column, warpgroup, scalars, inputs, outputs, scratch)` gets
    references, and a function that makes the float32 scores `[64, 256]`, the first of
    which is that of `row` and item `start + column`. What it loads before it calls the
    function is there when the scores are.

    Args:
      epilogue: see above.
      h: rows in a multiple of 128.
      kernel: see `unsupported`.
      scalars: int32, handed to the epilogue.
      inputs: arrays in global memory.
      out_type: what the epilogue writes.
      start: first item.
      size: number of items, a multiple of 256.
      scratch: shared memory of the epilogue.
      config: how the work is cut.
    """
    batch, hidden = h.shape
    tiles = batch // TILE_ROWS, size // TILE_ITEMS
    steps = hidden // STEP
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (start, *scalars)])

    def body(numbers_gmem, h_gmem, kernel_gmem, *refs):
        inputs_gmem, outputs_gmem = refs[: len(inputs)], refs[len(inputs) :]

        def pipeline(step, context):
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(steps,),
                memory_registers=40,
                in_specs=[
                    plgpu.BlockSpec((rows, STEP), lambda k: (0, k), transforms=LAYOUT)
                    for rows in (TILE_ROWS, TILE_ITEMS)
                ],
                wg_axis="warpgroup",
                num_compute_wgs=2,
                max_concurrent_steps=min(config.stages, steps),
                compute_context=context,
            )

        def nothing(*_):
            pass

        buffers = {
            "allocations": pipeline(nothing, nothing).get_allocations(
                h_gmem, kernel_gmem
            )
        }
        if scratch is not None:
            buffers["scratch_smem"] = scratch

        @functools.partial(pl.run_scoped, **buffers, collective_axes="warpgroup")
        def _(allocations, scratch_smem=None):
            warpgroup = lax.axis_index("warpgroup")
            first = numbers_gmem[0]
            numbers = [numbers_gmem[1 + i] for i in range(len(scalars))]

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="program")
            def _(info):
                m, n = plgpu.planar_snake(info.index[0], tiles, 0, config.width)
                row, column = m * TILE_ROWS, n * TILE_ITEMS

                def context(run):
                    @functools.partial(
                        pl.run_scoped, acc=plgpu.ACC((ROWS, TILE_ITEMS), jnp.float32)
                    )
                    def _(acc):
                        def make():
                            run(acc)
                            return acc[...]

                        epilogue(
                            make,
                            row + warpgroup * ROWS,
                            column,
                            warpgroup,
                            numbers,
                            inputs_gmem,
                            outputs_gmem,
                            scratch_smem,
                        )

                def multiply(_, h_smem, kernel_smem, acc):
                    mine = h_smem.at[pl.ds(warpgroup * ROWS, ROWS)]
                    plgpu.wgmma(acc, mine, kernel_smem.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return acc

                pipeline(multiply, context)(
                    h_gmem.at[pl.ds(row, TILE_ROWS), :],
                    kernel_gmem.at[pl.ds(first + column, TILE_ITEMS), :],
                    allocations=allocations,
                )

            if scratch is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(_num_programs(),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # With the default semantics inferring the layouts takes half a minute.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(numbers, h, kernel, *inputs)


def _num_programs() -> int:
    """One for each SM; where there is no GPU, a few, for lowering and interpretation."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 2


def row_vector(ref, row) -> jax.Array:
    """`[64]` elements from `row` on, for `spread_rows`."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(ref.at[pl.ds(row, ROWS)], layout=layout, optimized=False)


def spread_rows(vector: jax.Array, columns: int) -> jax.Array:
    """`[64, columns]` with `vector` in each column."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), (0,))


def spread_columns(ref, column, columns: int) -> jax.Array:
    """`[64, columns]` with elements `column ...` of a vector in each row."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    vector = plgpu.load(ref.at[pl.ds(column, columns)], layout=layout, optimized=False)
    return lax.broadcast_in_dim(vector, (ROWS, columns), (1,))


def column_numbers(columns: int) -> jax.Array:
    """`[64, columns]` with 0, 1, 2 ... in each row."""
    shape, layout = (ROWS, columns), plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
