"""Sums of gathered rows in GPU programs, for sparse rows of any length.

::

    entries    0          T          2T         3T         4T         nse
               |----------|----------|----------|----------|----------|
    rows       [a ][b][  c  ][ d ][           e             ][ f  ]  padding
    programs   0: a b c   1: d e'    2: e'      3: e'  (e'' in 4)    4: e'' f

A program has a range of `T` consecutive entries, so that work is equal for rows of any length.
A row belongs to the program in whose range it starts, if it ends in that range or in the
next one. Only a longer row (`e`) is cut, at the ends of the ranges. Its pieces are
written to `partial`, and a second launch adds them in order. Equal input gives equal
bits, because there are no atomics.

A program is a warpgroup with a piece of up to 2,048 bytes of the rows, or a team of a few
lanes with whole rows (`teams`), such as 4 lanes for rows of 16 float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import store as store_registers
from pallas_kernels.teams import Team, team_for

# Threads of a warpgroup. The width of a piece of a row is a multiple of this.
_THREADS = 128
_FEWEST = 8  # smallest number of entries in a program
# Largest distance of consecutive programs in a turn: its square must fit into int32.
_STRIDE = 2**15
_WAYS = 8  # each step of a search divides the rows into this many parts
# Number of columns of a program that adds the pieces of cut rows. On ml20m, 512 columns with 8
# pieces at once take 6.6 us; 256 columns with 16 pieces take 10 us.
REDUCE_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided; `default_config` picks one.

    Attributes:
      entries: number of entries of a program, `T`.
      unroll: number of weight rows that are loaded before the first is added.
      chunk: most elements of a weight row that a warpgroup takes. Programs of
        one chunk run before those of the next, so that less of `w` has to fit in the L2
        cache.
      threads: number of threads that process a weight row: a warpgroup's 128, or a power of 2 up
        to 32, which take whole rows.
      period: number of entries after which entries of the same table come again; 0 if they
        do not. Programs then begin with the first tables of all rows, so that popular
        rows of few tables stay in the L2 cache.
    """

    entries: int
    unroll: int
    chunk: int
    threads: int = _THREADS
    period: int = 0


def entries_for(nse: int, programs: int, most: int = 64) -> int:
    """The number of entries in a program: `most`, or fewer so that there are at least `programs`
    programs.

    A program processes its entries one by one, and bringing a row up to date or updating it takes
    longer than computing its gradient. So a batch of few entries needs many short programs.
    """
    entries = most
    while entries > _FEWEST and nse < programs * entries:
        entries //= 2
    return entries


def takes_narrow(hidden: int) -> bool:
    """Whether teams of lanes support rows with this few elements."""
    return hidden < _THREADS and hidden % 8 == 0


def team_of(hidden: int, itemsize: int, threads: int, chunk: int) -> Team:
    """The team of `threads` threads for whole rows, or for pieces of at most `chunk` elements."""
    if threads == _THREADS:
        return Team(threads, *chunk_of(hidden, chunk, itemsize))
    team = team_for(hidden, itemsize, threads)
    if team is None:
        raise ValueError(f"{threads} lanes do not take rows of {hidden} elements")
    return team


def grid(hidden: int, team: Team, programs: int) -> tuple[int, int]:
    """The grid of blocks: the number of chunks of a row, and of blocks for each chunk."""
    return pl.cdiv(hidden, team.width), pl.cdiv(programs, team.count)


def reducing_team(team: Team, hidden: int) -> Team:
    """The threads that share a row in programs that add partial float32 sums of long rows."""
    if team.threads < _THREADS:
        return team
    return Team(_THREADS, *chunk_of(hidden, REDUCE_CHUNK, 4))


def chunk_of(hidden: int, most: int, itemsize: int) -> tuple[int, int]:
    """Elements of a row that a program takes, and elements that a thread accesses at once.

    The first is a multiple of 128. It is chosen so that all programs together take the
    fewest elements and, among equals, so that there are the fewest programs.
    """
    units = range(1, min(most, hidden) // _THREADS + 1)
    unit = min(units, key=lambda u: (pl.cdiv(hidden, u * _THREADS) * u, -u))
    return unit * _THREADS, min(unit & -unit, hidden & -hidden, 16 // itemsize)


def columns_of(hidden: int, chunk: int):
    """The columns of this program. Each program has a whole chunk, so the last two chunks may
    overlap.
    """
    start = lax.axis_index("chunk") * chunk
    if hidden % chunk:
        start = jnp.minimum(start, hidden - chunk)
    return pl.ds(start, chunk)


def compiler_params() -> plgpu.CompilerParams:
    """Compiler parameters of programs that gather or update rows."""
    return plgpu.CompilerParams(
        # Barriers are not needed: no program reads memory that it or another program has written.
        unsafe_no_auto_barriers=True,
        # With the default semantics, JAX infers layouts, which takes half a minute.
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def _by_period(place: jax.Array, programs: int, config: Config) -> jax.Array:
    """Converts a position in the order of execution to a program number."""
    if not config.period:
        return place
    # This many programs have a whole number of periods. Each begins elsewhere in its period.
    common = math.gcd(config.period, config.entries)
    stride = config.period // common
    turns = programs // stride
    if turns < 2 or stride > _STRIDE:
        return place
    number = rem(place, turns) * stride
    after = pow(config.entries // common, -1, stride) if stride > 1 else 0
    found = number + rem(div(place, turns) * after, stride)
    return jnp.where(place < turns * stride, found, place)


def sum_body(
    entries_gmem,
    indptr_gmem,
    w_gmem,
    partial_gmem,
    cut_rows_gmem,
    store,
    read_ahead=lambda columns, entry: (),
    ready=lambda entry, ahead: ahead,
    *,
    load=None,
    value=lambda loaded: loaded,
    valued,
    num_cols,
    team: Team,
    config: Config,
):
    """Sums the rows that belong to a program, and its pieces of rows that are cut.

    Args:
      entries_gmem: arrays `[nse]` with one value for each entry: the index of its row of
        `w`; its factor, if `valued`; then any others.
      cut_rows_gmem: `[2, programs]`, written: for each range, the row that begins in it
        and is cut, or -1 if no row is; and the range in which that row ends.
      store: function that is called with a row, the columns, the row's sum, the values of its
        last entry, and the result of `ready` for that entry.
      read_ahead: function that is called for each entry when its row of `w` is loaded, with the
        columns and the entry's values.
      ready: function that is called for each entry when all values are read, with the entry's
        values and the result of `read_ahead`. The teams of a warp call it together; each calls
        `store` alone.
      load: function that is called with the columns and an index, and returns the values that
        are read for it; by default the row of `w`.
      value: function that computes the row to sum from the result of `load`. All values that
        are needed at once are read first.
      team: the threads of the program.
    """
    nse, num_rows = entries_gmem[0].shape[0], indptr_gmem.shape[0] - 1
    programs = cut_rows_gmem.shape[1]
    t, unroll = config.entries, config.unroll
    single = nse < 2 * num_rows  # most rows may have a single entry
    p, c = _by_period(team.number(), programs, config), lax.axis_index("chunk")
    columns = columns_of(w_gmem.shape[1], team.width)
    count = jnp.minimum(indptr_gmem[num_rows], nse)
    begin = p * t
    stop = jnp.minimum(begin + t, count)

    @pl.when((p < programs) & (stop <= begin) & (c == 0))
    def _no_entries():
        cut_rows_gmem[0, p] = -1

    def rows_of(entries):
        """The rows to which the entries belong."""
        length = nse // num_rows
        if length * num_rows != nse:
            return search_rows(entries)
        # If all rows are equally long, a division replaces the search.
        rows = [div(entry, length) for entry in entries]
        found = functools.reduce(
            jnp.logical_and,
            [
                (indptr_gmem[row] <= entry) & (entry < indptr_gmem[row + 1])
                for row, entry in zip(rows, entries, strict=True)
            ],
        )
        return lax.cond(found, lambda: tuple(rows), lambda: search_rows(entries))

    def search_rows(entries):
        """Searches the rows of entries. A step has eight parts, so that few reads are serial."""
        width, steps = 1, 0
        while width < num_rows:
            width, steps = width * _WAYS, steps + 1

        def narrow(_, carry):
            width, *lows = carry
            width = width // _WAYS
            new = []
            probes = [
                [
                    indptr_gmem[jnp.minimum(low + width * k, num_rows)]
                    for k in range(1, _WAYS)
                ]
                for low in lows
            ]
            for low, entry, probe in zip(lows, entries, probes, strict=True):
                right = jnp.int32(0)
                for start in probe:
                    right = right + jnp.where(start <= entry, 1, 0)
                new.append(low + width * right)
            return width, *new

        start = jnp.int32(width), *([jnp.int32(0)] * len(entries))
        return tuple(lax.fori_loop(0, steps, narrow, start)[1:])

    def row_of(entry, low, high):
        """Finds the row in [low, high) to which an entry belongs, by short code, because the case
        is rare.
        """

        def halve(bounds):
            low, high = bounds
            middle = div(low + high, 2)
            right = indptr_gmem[middle] <= entry
            return jnp.where(right, middle, low), jnp.where(right, high, middle)

        return lax.while_loop(lambda b: b[1] - b[0] > 1, halve, (low, high))[0]

    @pl.when((p < programs) & (begin < stop))
    def _entries():
        # Row a has the first entry of the range, row b the last one. This program sums
        # the entries [first, last).
        row_a, row_b = rows_of([begin, stop - 1])
        start_a, end_a = indptr_gmem[row_a], indptr_gmem[row_a + 1]
        start_b, end_b = indptr_gmem[row_b], indptr_gmem[row_b + 1]
        earlier = start_a < begin
        theirs = earlier & (end_a <= (div(start_a, t) + 2) * t)
        head = earlier & ~theirs
        first = jnp.where(theirs, end_a, begin)
        mine = (start_b >= begin) & (end_b <= begin + 2 * t)
        tail = (start_b >= begin) & ~mine & (end_b <= nse)
        last = jnp.where(mine, end_b, stop)
        last = jnp.where(end_b > nse, jnp.maximum(start_b, begin), last)

        @pl.when(c == 0)
        def _():
            cut_rows_gmem[0, p] = jnp.where(tail, row_b, -1)
            cut_rows_gmem[1, p] = div(end_b - 1, t)

        def flush(row, acc, bad, entry, ahead):
            acc = acc + bad
            is_head = head & (row == row_a)
            is_tail = tail & (row == row_b)

            def is_cut():
                which = jnp.where(is_tail, 1, 0)
                store_registers(partial_gmem.at[which, p, columns], acc)

            def is_whole():
                store(row, columns, acc, entry, ahead)

            lax.cond(~(is_head | is_tail), is_whole, is_cut)

        def end_of(row):
            return indptr_gmem[jnp.minimum(row + 1, num_rows)]

        # `end` is where the row, or its piece in this program, ends. `following` is where
        # the next row ends, loaded in advance. `bad` is NaN if an index of the row is out of
        # bounds, else 0.
        def end_row(position, last_entry, row, end, following, bad, acc):
            def search():
                found = row_of(position, row, row_b + 1)
                return found, end_of(found), end_of(found + 1)

            def ended():
                flush(row, acc, bad, *last_entry)
                empty = (following <= position) & (position < last)
                after = row + 1, following, end_of(row + 2)
                new, end, further = lax.cond(empty, search, lambda: after)
                end = jnp.minimum(end, last)
                return new, end, further, jnp.float32(0), team.splat(0.0)

            same = row, end, following, bad, acc
            return lax.cond(position == end, ended, lambda: same)

        def load_entries(position):
            def whole():
                blocks = [ref.at[pl.ds(position, unroll)] for ref in entries_gmem]
                return [[ref[u] for u in range(unroll)] for ref in blocks]

            def clipped():
                places = [jnp.minimum(position + u, last - 1) for u in range(unroll)]
                return [[ref[i] for i in places] for ref in entries_gmem]

            return lax.cond(position + unroll <= last, whole, clipped)

        w_columns = w_gmem.at[:, columns]

        def load_row(i):
            return team.load(w_columns.at[i]) if load is None else load(columns, i)

        def block(carry):
            position, row, end, following, bad, acc, entries = carry
            ids = [i.astype(jnp.uint32) for i in entries[0]]
            safe = [jnp.minimum(i, num_cols - 1).astype(jnp.int32) for i in ids]
            loaded = [load_row(i) for i in safe]
            each = [tuple(values[u] for values in entries) for u in range(unroll)]
            ahead = [read_ahead(columns, entry) for entry in each]
            # Loaded in advance, because an index takes as long to arrive as a row.
            upcoming = lax.cond(
                position + unroll < last,
                lambda: load_entries(position + unroll),
                lambda: entries,
            )
            terms = [value(each) for each in loaded]
            pairs = zip(each, ahead, strict=True)
            ahead = [ready(entry, found) for entry, found in pairs]
            largest = functools.reduce(jnp.maximum, ids)

            def term(u):
                term = terms[u].astype(jnp.float32)
                return term * entries[1][u].astype(jnp.float32) if valued else term

            def one_row():
                total = acc
                for u in range(unroll):
                    total = total + term(u)
                return row, end, following, bad, total

            def several_rows():
                # Entries past the last one are copies of it. They are added after the
                # last row has ended, so they do not change any result.
                state = row, end, following, bad, acc
                for u in range(unroll):
                    *place, worst, total = state
                    worst = jnp.where(ids[u] < num_cols, worst, jnp.float32(jnp.nan))
                    state = *place, worst, total + term(u)
                    if u < unroll - 1:
                        state = end_row(position + u + 1, (each[u], ahead[u]), *state)
                return state

            def row_each():
                # `end_row` adds the last entry itself.
                for u in range(unroll - 1):
                    store(row + u, columns, term(u), each[u], ahead[u])
                new = row + unroll - 1
                state = new, position + unroll, end_of(new + 1), jnp.float32(0)
                return *state, acc + term(unroll - 1)

            def several_or_each():
                ends = [end_of(row + u) for u in range(unroll)]
                one_each = (largest < num_cols) & (indptr_gmem[row] == position)
                for u in range(unroll):
                    one_each &= ends[u] == position + u + 1
                one_each &= position + unroll <= last
                return lax.cond(one_each, row_each, several_rows)

            # Mosaic lowers the last branch of a `cond` twice, so the shorter branch is last.
            several = (position + unroll > end) | (largest >= num_cols)
            state = lax.cond(
                several, several_or_each if single else several_rows, one_row
            )
            position = position + unroll
            return position, *end_row(position, (each[-1], ahead[-1]), *state), upcoming

        @pl.when(first < last)
        def _():
            row = lax.cond(
                theirs, lambda: row_of(first, row_a, row_b + 1), lambda: row_a
            )
            end, following = end_of(row), end_of(row + 1)
            state = first, row, jnp.minimum(end, last), following
            zero = jnp.float32(0), team.splat(0.0)
            carry = *state, *zero, load_entries(first)
            lax.while_loop(lambda carry: carry[0] < last, block, carry)


def reduce_body(partial_gmem, cut_rows_gmem, store, *, team: Team):
    """Sums a cut row: partial[1, p] + sum of partial[0, q] over the ranges q after p.

    Calls `store` with the row, the columns and the sum.
    """
    p, programs = team.number(), cut_rows_gmem.shape[1]
    columns = columns_of(partial_gmem.shape[-1], team.width)

    def load(which, q):
        return team.load(partial_gmem.at[which, q, columns])

    here = jnp.minimum(p, programs - 1)
    row, last = cut_rows_gmem[0, here], cut_rows_gmem[1, here]

    @pl.when((row >= 0) & (p < programs))
    def _():
        carry = p + 1, load(1, p)
        for unroll in (32, 8, 1) if team.width <= 256 else (8, 1):

            def block(carry, unroll=unroll):
                q, acc = carry
                for term in [load(0, q + u) for u in range(unroll)]:
                    acc = acc + term
                return q + unroll, acc

            def more(carry, unroll=unroll):
                return carry[0] + unroll <= last + 1

            carry = lax.while_loop(more, block, carry)
        store(row, columns, carry[1])
