"""Operations of Mosaic GPU that Pallas lacks, for teams of lanes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import WARP_SIZE, WARPGROUP_SIZE
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector

_NUMBER, _SUM = (
    plgpu.ShapeDtypeStruct((), jnp.dtype(dtype), layout=plgpu.Layout.WG_SPLAT(()))
    for dtype in (jnp.int32, jnp.float32)
)


def thread_over(threads: int) -> jax.Array:
    """The thread's number in its block, divided by `threads`, a power of 2."""

    @plgpu.inline_mgpu(return_type=_NUMBER)
    def number(_):
        bits = threads.bit_length() - 1
        number = arith.shrui(mgpu.thread_idx(), _constant(bits))
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return number()


def sum_over(threads: int, layout) -> Callable[[jax.Array], jax.Array]:
    """Makes a function that sums the elements of a team's row.

    `jnp.sum` would wait for all lanes of the warp, but other teams may run other code.
    """

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=_SUM)
    def total(_, row):
        total = functools.reduce(arith.addf, row.registers.flat)
        total = functools.reduce(
            arith.addf,
            [
                vector.extract(total, dynamic_position=[], static_position=[i])
                for i in range(total.type.shape[0])
            ],
        )
        first = arith.andi(mgpu.thread_idx(), _constant(WARP_SIZE - threads))
        team = arith.shli(
            arith.shrui(_constant(-1), _constant(WARP_SIZE - threads)), first
        )
        last, kind = _constant(WARP_SIZE - 1), nvvm.ShflKind.bfly
        distance = 1
        while distance < threads:
            bits = arith.bitcast(last.type, total)
            bits = nvvm.shfl_sync(team, bits, _constant(distance), last, kind)
            total = arith.addf(total, arith.bitcast(total.type, bits))
            distance *= 2
        return mgpu.FragmentedArray.splat(total, (), is_signed=None)

    return total


def elements_of(row: jax.Array, layout) -> list[jax.Array]:
    """The elements of a row that this thread has, as scalars."""
    kind, (width,) = row.dtype, row.shape
    number = plgpu.ShapeDtypeStruct((), kind, layout=plgpu.Layout.WG_SPLAT(()))
    signed = jnp.issubdtype(kind, jnp.signedinteger)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=[number] * width)
    def elements(_, row):
        (register,) = row.registers.flat
        found = [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for i in range(width)
        ]
        return [mgpu.FragmentedArray.splat(x, (), is_signed=signed) for x in found]

    return elements(row)


def store(target, values: jax.Array, layout) -> None:
    """Writes to memory without a barrier before or after."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(_, target, values):
        values.store_untiled(target, optimized=False)

    write(target, values)


def store_folded(target, values: jax.Array, column: int, layout) -> None:
    """Writes a tile of 64 rows to 32 rows in shared memory, adding rows with equal diagonals.

    Of each 16 rows the last 8 are added to the first 8, shifted left by eight columns: there the
    diagonals are equal.

    Args:
      target: rows in memory. The tile's first column is written to column `column`.
      values: float32 `[64, 64]`.
      layout: layout of the values, that of `wgmma`'s results.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(_, target, values):
        upper, lower = values.registers.reshape(-1, 2).T
        row, first = _of_wgmma()
        # Each warp has 8 rows instead of 16.
        warp = arith.shrui(_thread(), _constant(5))
        row = arith.subi(row, arith.shli(warp, _constant(3)))
        folded = [lower[0], *map(arith.addf, upper[:-1], lower[1:]), upper[-1]]
        for n, pair in enumerate(folded):
            at = arith.addi(first, _constant(column + 8 * (n - 1)))
            vector.store(pair, target, [*_index(row), *_index(at)])

    write(target, values)


def diagonals(numbers, first: int) -> jax.Array:
    """`[64, 64]` in the layout of `wgmma`'s results: row r, column c has number first + c - r.

    A thread reads 18 of the numbers, as rows that are 8 apart share numbers.
    """
    layout = plgpu.Layout.WGMMA
    found = plgpu.ShapeDtypeStruct((64, 64), numbers.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=found)
    def read(_, numbers):
        row, column = _of_wgmma()
        start = arith.addi(arith.subi(column, row), _constant(first))
        pair = ir.VectorType.get((2,), numbers.type.element_type)
        parts = [
            vector.from_elements(
                pair,
                [
                    memref.load(
                        numbers, _index(arith.addi(start, _constant(8 * n + i)))
                    )
                    for i in range(2)
                ],
            )
            for n in range(-1, 8)
        ]
        like = mgpu.FragmentedArray.splat(
            arith.constant(numbers.type.element_type, 0.0), (64, 64), mgpu.WGMMA_LAYOUT
        )
        registers = like.registers.copy()
        registers.flat[:] = [parts[n - h + 1] for n in range(8) for h in range(2)]
        return mgpu.FragmentedArray(
            _registers=registers, _layout=like.layout, _is_signed=None
        )

    return read(numbers)


def look_up(table, index: jax.Array, layout) -> jax.Array:
    """`table[index]` for a vector of floats in memory; each element has its own index."""
    found = plgpu.ShapeDtypeStruct(index.shape, table.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=found)
    def read(_, table, index):
        registers = index.registers.copy()
        for at, places in enumerate(index.registers.flat):
            (count,) = places.type.shape
            numbers = [
                memref.load(table, _index(_element(places, i))) for i in range(count)
            ]
            kind = ir.VectorType.get((count,), numbers[0].type)
            registers.flat[at] = vector.from_elements(kind, numbers)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=None
        )

    return read(table, index)


def look_up_ends(table, index: jax.Array, layout, count: int) -> list[jax.Array]:
    """The first `count` of four numbers that `table` has for each index, in one load.

    Args:
      table: a vector in shared memory, four float32 numbers for each index.
      index: int32 indices of the table.
      layout: layout of the index, and of the results.
      count: 2 or 4.
    """
    found = plgpu.ShapeDtypeStruct(index.shape, table.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=[found] * count)
    def read(_, table, index):
        results = [index.registers.copy() for _ in range(count)]
        kind = ir.VectorType.get((count,), table.type.element_type)
        for at, places in enumerate(index.registers.flat):
            (size,) = places.type.shape
            rows = [
                vector.load(
                    kind,
                    table,
                    _index(arith.shli(_element(places, i), _constant(2))),
                    alignment=4 * count,
                )
                for i in range(size)
            ]
            pair = ir.VectorType.get((size,), table.type.element_type)
            for n, result in enumerate(results):
                numbers = [_element(row, n) for row in rows]
                result.flat[at] = vector.from_elements(pair, numbers)
        return [
            mgpu.FragmentedArray(
                _registers=result, _layout=index.layout, _is_signed=None
            )
            for result in results
        ]

    return read(table, index)


def sum_of_thread(values: jax.Array, layout) -> jax.Array:
    """For each thread of a warpgroup, the sum of the elements that it has, `[128]`."""
    strided = plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE,), vec_size=1)
    found = plgpu.ShapeDtypeStruct((WARPGROUP_SIZE,), values.dtype, layout=strided)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=found)
    def total(_, values):
        total = functools.reduce(arith.addf, values.registers.flat)
        (count,) = total.type.shape
        total = functools.reduce(arith.addf, [_element(total, i) for i in range(count)])
        kind = ir.VectorType.get((1,), total.type)
        registers = values.registers.reshape(-1)[:1].copy()
        registers[0] = vector.from_elements(kind, [total])
        return mgpu.FragmentedArray(
            _registers=registers,
            _layout=mgpu.WGStridedFragLayout((WARPGROUP_SIZE,), vec_size=1),
            _is_signed=None,
        )

    return total(values)


def add_sums_of_warps(target, values: jax.Array) -> None:
    """Adds the sums of the 4 warps of a warpgroup to 4 numbers in shared memory.

    Args:
      values: `[128]`, one number for each thread.
    """
    strided = plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE,), vec_size=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), strided))
    def add(_, target, values):
        (total,) = values.registers.flat
        total = _element(total, 0)
        everybody, last = _constant(-1), _constant(WARP_SIZE - 1)
        for bit in range(5):
            bits = arith.bitcast(last.type, total)
            distance = _constant(1 << bit)
            bits = nvvm.shfl_sync(everybody, bits, distance, last, nvvm.ShflKind.bfly)
            total = arith.addf(total, arith.bitcast(total.type, bits))
        thread = mgpu.thread_idx()
        warp = arith.andi(arith.shrui(thread, _constant(5)), _constant(3))
        at = [arith.index_cast(ir.IndexType.get(), warp)]
        first = arith.cmpi(
            arith.CmpIPredicate.eq, arith.andi(thread, last), _constant(0)
        )
        with mgpu.when(first):
            memref.store(arith.addf(memref.load(target, at), total), target, at)

    add(target, values)


def add_to_slots(slots, values: jax.Array, index: jax.Array, layout) -> None:
    """Adds each element to one of its thread's sums: `slots[128 index + thread]`.

    The order of additions is fixed, as no two threads share a sum.

    Args:
      slots: a vector in shared memory.
      values: float32.
      index: int32 index for each element.
      layout: layout of the values and of the index.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def add(_, slots, values, index):
        (count,) = values.registers.flat[0].type.shape
        pairs = zip(values.registers.flat, index.registers.flat, strict=True)
        elements = [
            (_element(x, i), _element(at, i)) for x, at in pairs for i in range(count)
        ]
        # Several sums are read before one is written, so that their latencies overlap.
        for group in itertools.batched(elements, 4):
            places = [_of_thread(at) for _, at in group]
            sums = [memref.load(slots, place) for place in places]
            for n, (mine, at) in enumerate(group):
                total = arith.addf(sums[n], mine)
                for other, its in group[:n]:
                    same = arith.cmpi(arith.CmpIPredicate.eq, at, its)
                    more = arith.select(same, other, arith.constant(mine.type, 0.0))
                    total = arith.addf(total, more)
                sums[n] = total
            for place, total in zip(places, sums, strict=True):
                memref.store(total, slots, place)

    add(slots, values, index)


def add_sums_of_slots(first, others, slots, count: jax.Array) -> None:
    """Adds the sums of up to 64 slots of 128 numbers, each by two threads.

    Args:
      first: two numbers in shared memory, for the first slot.
      others: `[256]`, four numbers for each slot; sums are added to two of them.
      slots: a vector in shared memory.
      count: number of slots; the results of further ones are undefined.
    """
    types = *(plgpu.RefType(),) * 3, plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=types)
    def add(_, first, others, slots, count):
        (count,) = count.registers.flat
        thread = _thread()
        start = arith.shli(thread, _constant(6))
        # Each lane starts at another number, so that all use different banks of memory.
        totals = [arith.constant(slots.type.element_type, 0.0)] * 4
        for i in range(64):
            at = arith.andi(arith.addi(thread, _constant(i)), _constant(63))
            number = memref.load(slots, _index(arith.addi(start, at)))
            totals[i % 4] = arith.addf(totals[i % 4], number)
        total = functools.reduce(arith.addf, totals)
        half = arith.andi(thread, _constant(1))
        slot = arith.shrui(thread, _constant(1))
        place = _index(arith.addi(arith.shli(slot, _constant(2)), half))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, slot, _constant(0))
        # Selects the slots from 1 to `count` - 1.
        is_other = arith.cmpi(
            arith.CmpIPredicate.ult,
            arith.subi(slot, _constant(1)),
            arith.subi(count, _constant(1)),
        )
        for condition, target, at in (
            (is_first, first, _index(half)),
            (is_other, others, place),
        ):
            with mgpu.when(condition):
                memref.store(arith.addf(memref.load(target, at), total), target, at)

    add(first, others, slots, count)


def _of_wgmma() -> tuple[ir.Value, ir.Value]:
    """The first row and column of a `wgmma` result that this thread has.

    The thread has two of every eight columns, in this row and in the row 8 below.
    """
    thread = _thread()
    row = arith.addi(
        arith.shli(arith.shrui(thread, _constant(5)), _constant(4)),
        arith.andi(arith.shrui(thread, _constant(2)), _constant(7)),
    )
    return row, arith.shli(arith.andi(thread, _constant(3)), _constant(1))


def _thread() -> ir.Value:
    """The number of the thread in its warpgroup."""
    return arith.andi(mgpu.thread_idx(), _constant(WARPGROUP_SIZE - 1))


def _index(value: ir.Value) -> list[ir.Value]:
    return [arith.index_cast(ir.IndexType.get(), value)]


def _of_thread(slot: ir.Value) -> list[ir.Value]:
    bits = WARPGROUP_SIZE.bit_length() - 1
    return _index(arith.addi(arith.shli(slot, _constant(bits)), _thread()))


def _element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])


def _constant(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)
