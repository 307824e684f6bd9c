"""Score gradients of an output layer's loss, and their product with the kernel.

::

    slopes  = function(scores)          [batch, size]
    product = slopes kernel             [batch, hidden], the gradient of h

As in attention, slopes are multiplied when they are computed, and the kernel is read once for
both products. The `[64, hidden]` sums of the product stay in the registers of a warpgroup.
The remaining registers have 128 scores of each row. While one warpgroup processes its
scores, the products of the other warpgroup are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, call, num_programs, numbers, transforms
from pallas_kernels.output_loss import (
    SLOPES_COLUMNS,
    ItemLayer,
    Labels,
    SlopesEpilogue,
    label_arrays,
    slopes_inputs,
    slopes_scratch,
)
from pallas_kernels.score_tiles import COLUMNS, TILE_ROWS

MAX_HIDDEN = 256
_WARPGROUPS = TILE_ROWS // ROWS
_TILES = 2  # number of tiles of the kernel's rows in shared memory
# Number of tiles whose odds are multiplied before a logarithm is taken. Each tile has 16 factors
# of at most 2.
_TILES_OF_ODDS = 4
# Registers of each computing thread, and of each copying thread; see `matmul_tiles`.
_REGISTERS = 240, 24


def slopes_product(
    function: Callable,
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: Labels,
    vectors: Sequence[Float[Array, "batch"]],
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
    with_values: bool = True,
    with_slopes: bool = True,
) -> tuple[
    Float[Array, "parts batch"] | None,
    Float[Array, "batch size"] | None,
    Float[Array, "parts batch hidden"],
]:
    """Computes `output_loss.slopes`, and partial products of these slopes with the kernel's rows.

    The arguments are those of `slopes`; `hidden` is at most `MAX_HIDDEN`. The values are
    summed over the items of each part. Without `with_slopes`, the slopes are not written,
    and None is returned for them; tiles from `limit` on then take no time.
    """
    batch, hidden = h.shape
    down, across = batch // TILE_ROWS, size // COLUMNS
    # Items are divided into parts if there are at least twice as many programs as row tiles.
    parts = max(1, min(num_programs() // down, across))
    layer = ItemLayer(bias, None)
    of_labels = label_arrays(labels)
    epilogue = SlopesEpilogue(function, layer, len(of_labels), with_values)
    # These are copied to shared memory, one tile at a time.
    of_items = [kernel, *layer.arrays()]
    inputs = slopes_inputs(of_labels, vectors)

    def body(start_gmem, limit_gmem, h_gmem, *refs):
        first, end = start_gmem[0], limit_gmem[0]
        items_gmem, refs = refs[: len(of_items)], refs[len(of_items) :]
        inputs_gmem = refs[: len(inputs)]
        *outputs_gmem, product_gmem = refs[len(inputs) :]
        warpgroup = lax.axis_index("warpgroup")
        sums_type = plgpu.ACC((ROWS, COLUMNS))
        count = across
        if not with_slopes:
            # At least `_TILES` tiles, so that each part uses all slots; `tile` relies on it.
            inside = div(jnp.maximum(end - first, 0) + COLUMNS - 1, COLUMNS)
            count = jnp.clip(inside, min(across, max(_TILES, parts)), across)

        def each_part(function):
            """Calls `function(row, part, steps, again, tile)` with each part of a program.

            `again` is true if shared memory had other rows of `h` before. `tile(j)` is
            the first column of the part's tile j, its slot in shared memory, and whether
            the slot had another tile before.
            """

            @plgpu.nd_loop((down * parts,), collective_axes="program")
            def _(info):
                (i,) = info.index
                row, part = rem(i, down) * TILE_ROWS, div(i, down)
                steps = div(count - 1 - part, parts) + 1
                # Number of tiles that this program has processed; see `parts`.
                done = info.local_index * across

                def tile(j):
                    column = (part + j * parts) * COLUMNS
                    return column, rem(done + j, _TILES), done + j >= _TILES

                function(row, part, steps, done > 0, tile)

        def copy(h_smem, items_smem, h_full, h_free, full, free):
            @each_part
            def _(row, part, steps, again, tile):
                @pl.when(again)
                def _():
                    plgpu.barrier_wait(h_free)

                rows = h_gmem.at[pl.ds(row, TILE_ROWS)]
                plgpu.copy_gmem_to_smem(rows, h_smem, h_full)

                @pl.loop(0, steps)
                def _(j):
                    column, slot, again = tile(j)

                    @pl.when(again)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for gmem, smem in zip(items_gmem, items_smem, strict=True):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[pl.ds(first + column, COLUMNS)],
                            smem.at[slot],
                            full.at[slot],
                        )

        def compute(h_smem, items_smem, slopes_smem, h_full, h_free, full, free):
            kernel_smem, *layer_smem = items_smem
            mine = pl.ds(warpgroup * ROWS, ROWS)
            my_slopes = slopes_smem.at[warpgroup]

            @each_part
            def _(row, part, steps, again, tile):
                first_row = row + warpgroup * ROWS

                def labels_of(j):
                    column, _, _ = tile(jnp.minimum(j, steps - 1))
                    return epilogue.labels(first_row, column, inputs_gmem)

                def score(sums, j):
                    """Starts the product that computes the scores of a tile."""
                    _, slot, _ = tile(j)

                    @pl.when(j < steps)
                    def _():
                        plgpu.barrier_wait(full.at[slot])

                    # After the last tile, the slot has arbitrary data, whose product is not used.
                    items = kernel_smem.at[slot].transpose((1, 0))
                    plgpu.wgmma(sums, h_smem.at[mine], items)

                def multiply(product):
                    plgpu.barrier_wait(h_full)
                    of_rows = epilogue.of_rows(first_row, inputs_gmem)

                    def first_scores(sums):
                        score(sums, 0)
                        return sums[...]

                    products = pl.run_scoped(first_scores, sums_type)
                    carry = products, labels_of(0), epilogue.no_sums()

                    def step(j, carry):
                        products, bits, sums = carry
                        column, slot, _ = tile(j)
                        slopes = []
                        layer_refs = [ref.at[slot] for ref in layer_smem]
                        for c in range(0, COLUMNS, SLOPES_COLUMNS):
                            piece, sums = epilogue.part(
                                products[:, c : c + SLOPES_COLUMNS],
                                c,
                                bits,
                                of_rows,
                                sums,
                                end - (first + column),
                                layer_refs,
                            )
                            slopes.append(piece)
                        slopes = lax.concatenate(slopes, 1)
                        if with_slopes:
                            epilogue.write(
                                slopes, first_row, column, my_slopes, outputs_gmem
                            )
                        else:
                            my_slopes[...] = slopes
                            plgpu.commit_smem()
                        plgpu.wgmma(product, my_slopes, kernel_smem.at[slot])
                        next_bits = labels_of(j + 1)

                        def next_scores(sums):
                            score(sums, j + 1)
                            plgpu.wgmma_wait(1)
                            plgpu.barrier_arrive(free.at[slot])
                            return sums[...]

                        products = pl.run_scoped(next_scores, sums_type)
                        if with_values:
                            sums = lax.cond(
                                rem(j, _TILES_OF_ODDS) == _TILES_OF_ODDS - 1,
                                lambda: (epilogue.total(sums), epilogue.no_sums()[1]),
                                lambda: sums,
                            )
                        return products, next_bits, sums

                    *_, sums = lax.fori_loop(0, steps, step, carry)
                    rows = pl.ds(first_row, ROWS)
                    for ref in outputs_gmem[: int(with_values)]:
                        ref[part, rows] = jnp.sum(epilogue.total(sums), axis=1)
                    product_gmem[part, rows] = product[...]
                    plgpu.barrier_arrive(h_free)

                pl.run_scoped(multiply, plgpu.ACC((ROWS, hidden)))

            if with_slopes:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def scope(h_smem, items_smem, slopes_smem, h_full, h_free, full, free):
            @pl.when(warpgroup == _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[1], action="decrease")
                copy(h_smem, items_smem, h_full, h_free, full, free)

            @pl.when(warpgroup < _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
                compute(h_smem, items_smem, slopes_smem, h_full, h_free, full, free)

        pl.run_scoped(
            scope,
            plgpu.SMEM((TILE_ROWS, hidden), h.dtype, transforms=transforms()),
            [
                plgpu.SMEM((_TILES, COLUMNS, hidden), h.dtype, transforms=transforms()),
                *(plgpu.SMEM((_TILES, COLUMNS), x.dtype) for x in layer.arrays()),
            ],
            slopes_scratch(_WARPGROUPS, COLUMNS, h.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
            plgpu.Barrier(num_arrivals=len(of_items), num_barriers=_TILES),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_TILES),
            collective_axes="warpgroup",
        )

    values = jax.ShapeDtypeStruct((parts, batch), jnp.float32)
    out_type = [
        *[values] * with_values,
        *[jax.ShapeDtypeStruct((batch, size), h.dtype)] * with_slopes,
        jax.ShapeDtypeStruct((parts, batch, hidden), jnp.float32),
    ]
    arguments = *numbers(start, limit), h, *of_items, *inputs
    made = call("slopes_product", body, out_type, _WARPGROUPS, *arguments)
    written = made[-2] if with_slopes else None
    return made[0] if with_values else None, written, made[-1]
