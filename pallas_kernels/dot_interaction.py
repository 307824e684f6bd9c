"""Products of pairs of an example's vectors, and their gradient: Mosaic GPU, Hopper.

::

        y[b, k] = rows[b, i] . rows[b, j]        or element c of the first vector, rows[b, 0, c]
        drows[b, i] = sum_j slopes[b, of(i, j)] rows[b, j]

    A tile is 64 vectors: the vectors of several successive examples. Its products are one `wgmma`
for each example, of all 64 vectors with those of the example. Products between examples are
not used. So a matrix of 32 x 32 products is computed as two of 64 x 32, which takes less time
than reading memory. The wanted products are gathered from shared memory, and the gradients of
products are gathered when they are read: neither the whole matrix of products nor that of their
gradients is written.

A program is one warpgroup, and a multiprocessor runs several. So some read while others
compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import call, num_programs, store

TILE = 64  # number of vectors in a tile; a multiple of 64, as `wgmma` requires
# The number of an example's vectors, and their length, must be multiples of this for `wgmma`.
MULTIPLE = 16
_THREADS = 128
_MOST_DIM = 256
# Number of tiles in shared memory: the next one is copied while one is computed.
_SLOTS = 2
# Bytes of shared memory for the programs of a multiprocessor, and the largest number of programs
# there.
_SHARED, _MOST_PROGRAMS = 200_000, 8


def unsupported(batch: int, vectors: int, dim: int, dtype: jnp.dtype) -> str | None:
    """The reason why `products` does not support these sizes, to end a sentence; None if it
    does.
    """
    if dtype != jnp.bfloat16:
        return f"takes bfloat16 vectors, not {dtype}"
    if vectors % MULTIPLE or not 0 < vectors <= TILE:
        return f"takes 16, 32, 48 or 64 vectors of an example, not {vectors}"
    if dim % MULTIPLE or not 0 < dim <= _MOST_DIM:
        return f"takes vectors of a multiple of 16 numbers up to 256, not {dim}"
    if batch % (TILE // vectors) or not batch:
        return f"takes a multiple of {TILE // vectors} examples, not {batch:,}"
    return None


def columns_for(count: int, vectors: int) -> int:
    """The smallest number of columns, at least `count`, that `products` can write."""
    multiple = _THREADS // (TILE // vectors)
    return -(-count // multiple) * multiple


def products(
    rows: Float[Array, "batch vectors dim"], places: Int[Array, "columns"]
) -> Float[Array, "batch columns"]:
    """Products of pairs of vectors of each example, and numbers of its first vector.

    Args:
      rows: the vectors, with a shape and dtype that `unsupported` allows.
      places: `[columns]`, `i * vectors + j` for a pair; -1 for 0; `-2 - c` for element c of
        the first vector. See `columns_for`.
    """
    _, vectors, dim = rows.shape
    example = jnp.arange(TILE // vectors, dtype=jnp.int32)[:, None]
    places = places[None]
    table = jnp.where(places >= 0, vectors**2 * example + places, places)
    table = jnp.where(places < -1, places - vectors * dim * example, table)
    return _on_platform(_products, rows, table.reshape(-1))


def slopes_of_rows(
    rows: Float[Array, "batch vectors dim"],
    slopes: Float[Array, "batch columns"],
    columns: Int[Array, "vectors vectors"],
) -> Float[Array, "batch vectors dim"]:
    """The gradient of the vectors.

    Args:
      rows: the vectors that `products` multiplied.
      slopes: the gradient of the result of `products`.
      columns: `[vectors, vectors]`: the column of `slopes` by which vector j is multiplied
        for the gradient of vector i; -1 is a factor of 0.
    """
    _, vectors, _ = rows.shape
    example = jnp.arange(TILE // vectors, dtype=jnp.int32)[:, None, None]
    table = jnp.where(columns[None] < 0, -1, columns[None] + slopes.shape[1] * example)
    table = table.reshape(-1, vectors)
    table = jnp.pad(table, ((0, TILE - len(table)), (0, 0)), constant_values=-1)
    return _on_platform(_slopes, rows, table, slopes)


def _on_platform(program: Callable, *operands: jax.Array) -> jax.Array:
    """Runs `program` on a GPU. For a CPU the interpreter is used, which lacks operations of Mosaic
    GPU itself.
    """
    return lax.platform_dependent(
        *operands,
        cuda=partial(program, interpretable=False),
        default=partial(program, interpretable=True),
    )


def _look_up(memory, index: jax.Array, layout, *, interpretable: bool) -> jax.Array:
    """Reads the elements of `memory` with these indices; 0 for a negative index."""
    place = jnp.maximum(index, 0)
    if interpretable:
        found = memory[...].reshape(-1)[place]
    else:
        # Imported late, because it loads Mosaic GPU: see `mosaic`.
        from pallas_kernels import lanes

        found = lanes.look_up(memory, place, layout)
    return jnp.where(index >= 0, found, jnp.zeros((), found.dtype))


def _products(rows, table, *, interpretable: bool):
    batch, vectors, dim = rows.shape
    examples = TILE // vectors
    columns = len(table) // examples
    tiles = batch // examples
    vec = 2 if len(table) % (2 * _THREADS) == 0 else 1
    strided = plgpu.Layout.WG_STRIDED((len(table),), vec_size=vec)

    def start(table_gmem, _):
        return plgpu.load(table_gmem, layout=strided, optimized=False)

    def work(i, slot, index, rows_smem, refs, staged_smem):
        _, numbers_gmem, out_gmem = refs
        staged = staged_smem.at[slot]
        find = partial(_look_up, layout=strided, interpretable=interpretable)
        # Numbers are read from global memory, because the tile in shared memory has another order.
        first = find(numbers_gmem.at[i], -2 - index)

        def multiply(*sums):
            for e, part in enumerate(sums):
                mine = rows_smem.at[pl.ds(e * vectors, vectors)]
                plgpu.wgmma(part, rows_smem, mine.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return lax.optimization_barrier([part[...] for part in sums])

        made = pl.run_scoped(multiply, *[plgpu.ACC((TILE, vectors))] * examples)
        row, own = _row_numbers(vectors), made[0]
        for e in range(1, examples):
            own = jnp.where(row >= e * vectors, made[e], own)
        store(staged, own.astype(rows.dtype))
        plgpu.commit_smem()
        flat = staged if interpretable else staged.reshape(TILE * vectors)
        store(out_gmem.at[i], jnp.where(index < -1, first, find(flat, index)))

    staged = plgpu.SMEM((_SLOTS, TILE, vectors), rows.dtype)
    out = jax.ShapeDtypeStruct((tiles, len(table)), rows.dtype)
    smem = _tiles(dim, dim, rows.dtype)
    operands = [table, rows.reshape(tiles, -1)]
    found = _run("dot_interaction", start, work, rows, smem, operands, out, staged)
    return found.reshape(batch, columns)


def _slopes(rows, table, slopes, *, interpretable: bool):
    batch, vectors, dim = rows.shape
    examples = TILE // vectors
    size = examples * vectors

    def start(table_gmem, _):
        return plgpu.load(table_gmem, layout=plgpu.Layout.WGMMA, optimized=False)

    def work(i, slot, index, rows_smem, refs, scratch):
        _, slopes_gmem, out_gmem = refs
        out_smem, factors_smem = scratch
        layout = plgpu.Layout.WGMMA
        found = _look_up(slopes_gmem.at[i], index, layout, interpretable=interpretable)
        row = _row_numbers(vectors)

        def multiply(sums):
            for e in range(examples):
                inside = (row >= e * vectors) & (row < (e + 1) * vectors)
                own = jnp.where(inside, found, jnp.zeros((), found.dtype))
                if interpretable:
                    factors_smem[e] = own
                    plgpu.commit_smem()
                    own = factors_smem.at[e]
                plgpu.wgmma(sums, own, rows_smem.at[pl.ds(e * vectors, vectors)])
            plgpu.wgmma_wait(0)
            return lax.optimization_barrier(sums[...])

        made = pl.run_scoped(multiply, plgpu.ACC((TILE, dim)))
        # Waits until the previous copy from this slot has ended.
        plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
        target = out_smem.at[slot]
        target[...] = made.astype(rows.dtype)
        plgpu.commit_smem()
        part = out_gmem.at[pl.ds(i * size, size)]
        plgpu.copy_smem_to_gmem(target.at[pl.ds(0, size)], part)

    factors = plgpu.SMEM((examples, TILE, vectors), rows.dtype)
    # The sums are taken over the vectors of an example.
    smem = _tiles(dim, vectors, rows.dtype)
    scratch = [smem, factors if interpretable else None]
    slopes = slopes.reshape(batch // examples, -1)
    out = jax.ShapeDtypeStruct((batch * vectors, dim), rows.dtype)
    name = "dot_interaction_slopes"
    found = _run(name, start, work, rows, smem, [table, slopes], out, scratch)
    return found.reshape(rows.shape)


def _run(name, start, work, rows, smem, operands, out, scratch):
    """Runs a program that computes one tile of vectors after another.

    Args:
      name: the name that a profiler shows.
      start: function that makes values for all tiles, from references to `operands`.
      work: function that is called with a tile's number, its slot, the result of `start`, the
        tile in shared memory, references to `operands` and the result, and `scratch`. It has a
        barrier.
      rows: `[batch, vectors, dim]`.
      smem: shared memory for tiles of `rows`.
      operands: further arrays.
      out: the result.
      scratch: further shared memory.
    """
    batch, vectors, dim = rows.shape
    size = TILE // vectors * vectors
    tiles = batch * vectors // size
    # Shared memory also has the tiles of the gradient.
    room = _SHARED // (2 * _SLOTS * TILE * dim * rows.dtype.itemsize)
    programs = min(tiles, num_programs() * min(_MOST_PROGRAMS, room))

    def body(rows_gmem, *refs):
        program = lax.axis_index("program")

        def copy(i, slot, rows_smem, full):
            plgpu.copy_gmem_to_smem(
                rows_gmem.at[pl.ds(i * size, size)],
                rows_smem.at[slot, pl.ds(0, size)],
                full.at[slot],
            )

        def scope(rows_smem, full, scratch):
            made = start(*refs[: len(operands)])
            copy(program, 0, rows_smem, full)

            def step(k, _):
                i, slot = program + k * programs, rem(k, _SLOTS)

                @pl.when(i + programs < tiles)
                def _():
                    copy(i + programs, rem(k + 1, _SLOTS), rows_smem, full)

                plgpu.barrier_wait(full.at[slot])
                work(i, slot, made, rows_smem.at[slot], refs, scratch)

            lax.fori_loop(0, div(tiles - 1 - program, programs) + 1, step, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        pl.run_scoped(
            scope,
            smem,
            plgpu.Barrier(num_barriers=_SLOTS),
            scratch,
            collective_axes="warpgroup",
        )

    flat = rows.reshape(batch * vectors, dim)
    (found,) = call(name, body, [out], 0, flat, *operands, programs=programs)
    return found


def _tiles(dim: int, summed: int, dtype: jnp.dtype):
    """Shared memory for tiles of vectors, in the layout for sums over `summed` elements."""
    width = next(n for n in (64, 32, 16) if dim % n == 0 and summed % n == 0)
    swizzle = plgpu.SwizzleTransform(width * dtype.itemsize)
    transforms = plgpu.TilingTransform((8, width)), swizzle
    return plgpu.SMEM((_SLOTS, TILE, dim), dtype, transforms=transforms)


def _row_numbers(columns: int) -> jax.Array:
    """An array `[64, columns]` in which each element is its row number."""
    shape, layout = (TILE, columns), plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
