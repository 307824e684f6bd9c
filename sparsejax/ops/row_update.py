"""Optimizer rules applied in place to the rows of a kernel that a batch touches.

Rows that are not touched are not written. Under some rules untouched rows change, too. Such a
rule defines how a row catches up with missed steps; `TrainedKernel.last` has the step after
which a row was last up to date.

Rules work in float32. A kernel in bfloat16 is rounded after each step, stochastically if
there is `noise`. All steps that a row has missed are rounded once, with the noise of the last
of them. So the expectation is as if each step had been rounded, and the variance is smaller.
A row that is read, brought up to date or moved has equal bits afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import gather_matmul as mosaic_gather
from pallas_kernels import row_update as mosaic
from pallas_kernels.catch_up import CatchUp, Missed
from pallas_kernels.rounding import Noise
from sparsejax.mesh.blocks import LookupRows, ShardedCSR
from sparsejax.mesh.exchange import DividedRows
from sparsejax.mesh.layout import call_on_each_device
from sparsejax.mesh.per_device import own_block
from sparsejax.ops.gather_matmul import data_gradient_by_gather
from sparsejax.ops.gather_sum import added, gather_sum, mosaic_is_fastest
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.scatter_gradient import COUNTING_LIMIT, Terms, rank_by_count
from sparsejax.sparse import CSR, segment_ids, sums_so_far

State = dict[str, jax.Array]

# A CPU works on blocks of this many elements, which stay in its cache. Other devices work on
# blocks of this many rows, so that a block is worth the launch of its programs.
_CPU_ELEMENTS, _BLOCK = 2**15, 2**16
# Number of rows whose missed steps are repeated together.
_REPEATED = 128
# Smallest number of lags with which a program of many steps uses a lag table. The program updates
# each row before its lag exceeds the table, which takes too long with a shorter table.
LEAST_LAGS = 128
NEVER = -1


class LagTable(NamedTuple):
    """Numbers by which rows catch up, for each number of missed steps (lag).

    Attributes:
      by_lag: the numbers for each lag, from 0.
      shared: numbers that apply to all rows.
    """

    by_lag: Float[Array, "lags numbers"]
    shared: Float[Array, "shared"]


@runtime_checkable
class RowRule(Protocol):
    """A rule that updates some rows of `w [rows, hidden]`, in float32 or float64, and of state."""

    # Whether `step` (and `catch_up`, if weights do not drift) works element by element,
    # with operations that Pallas supports on GPUs. Then its arrays may be pieces of a row.
    elementwise: ClassVar[bool]
    # Whether `step` and `catch_up` work element by element except for means over a row. Then
    # `step` has a further argument `mean`, a function that computes such a mean. The state may be
    # one number for each row.
    by_row: ClassVar[bool]

    @property
    def drifts(self) -> bool:
        """Whether the weights of a row change in steps that do not touch it."""
        ...

    @property
    def table_lags(self) -> int:
        """The largest lag of `lag_table`; 0 if `catch_up` is fast for all lags."""
        ...

    def lag_table(self, count: jax.Array, dtype: jnp.dtype) -> LagTable:
        """The table by which rows catch up with `count` steps."""
        ...

    def catch_up_by_table(
        self,
        w: jax.Array,
        state: State,
        numbers: Sequence[jax.Array],
        shared: Sequence[jax.Array],
    ) -> tuple[jax.Array, State]:
        """Does the work of `catch_up`, given the table's numbers as `[rows, 1]` columns."""
        ...

    def numbers(self, count: jax.Array) -> Any:
        """A tree of scalars that step `count` needs, such as its learning rate."""
        ...

    def catch_up(
        self, w: jax.Array, state: State, lag: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, State]:
        """The rows after `lag [rows, 1]` steps without a gradient; the last is step `count`."""
        ...

    def step(
        self, w: jax.Array, state: State, gradient: jax.Array, numbers: Any, /
    ) -> tuple[jax.Array, State]:
        """Applies a step to up-to-date rows; returns their new weights and state."""
        ...


class TrainedKernel(NamedTuple):
    """A kernel together with its optimizer state.

    Attributes:
      w: `[features, hidden]`.
      state: arrays with the shape of `w` or `[features, 1]`, in float32 (float64 if `w` is).
      last: `[features]` int32, the step after which each row was last up to date;
        `NEVER` if no step has touched the row, so that it has missed nothing. None if rows
        miss nothing under the rule.
    """

    w: Float[Array, "features hidden"]
    state: State
    last: Int[Array, "features"] | None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.w.shape[0]

    def stale_rows(self, count: jax.Array) -> Bool[Array, "features"]:
        """Mask of the rows that are not up to date after `count` steps."""
        if self.last is None:
            return jnp.zeros(self.num_rows, bool)
        return _lag(self.last, count) > 0


class Passed(NamedTuple):
    """The number of steps that are done, and how rows catch up with them.

    Attributes:
      count: number of these steps.
      noise: random numbers that round a bfloat16 kernel; None rounds to nearest.
      table: the rule's lag table if it was made before. Then no row may have missed more
        steps than the table has.
    """

    count: jax.Array
    noise: Noise | None = None
    table: LagTable | None = None

    def own(self, num_rows: int) -> Passed:
        """In `shard_map`: `Passed` with noise for this device's `num_rows` rows."""
        noise = self.noise
        noise = None if noise is None else noise.after(_first_row(num_rows))
        return self._replace(noise=noise)

    def with_table(self, rule: RowRule, trained: TrainedKernel) -> Passed:
        """Adds the rule's lag table, if weights drift under the rule and it has a table."""
        if self.table is not None or not (rule.drifts and rule.table_lags):
            return self
        table = rule.lag_table(self.count, accumulator(trained.w.dtype))
        return self._replace(table=table)


def step_rows(
    rule: RowRule,
    trained: TrainedKernel,
    ids: Int[Array, "capacity"],
    gradient: Float[Array, "capacity hidden"],
    passed: Passed,
    *,
    divided: bool = False,
) -> TrainedKernel:
    """Brings the rows `ids` up to date after the steps passed, then applies the next step.

    `ids` are unique; padding ids are out of range. Each row is written once. If
    `divided`, the rows of the kernel are divided over "model"; ids and gradients are on
    the device that has their row.
    """
    if divided:

        def part(trained, ids, gradient, passed):
            rows = trained.num_rows
            ids = ids - _first_row(rows)
            return step_rows(rule, trained, ids, gradient, passed.own(rows))

        rows = P("model")
        return call_on_each_device(
            part, (trained, ids, gradient, passed), (rows, rows, rows, P()), rows
        )

    def step(trained, ids, gradient, passed, block):
        young, numbers = passed.table is not None, rule.numbers(passed.count + 1)
        passed = passed.with_table(rule, trained)

        def work(trained, block_ids, positions):
            w, state = _caught_up(rule, trained, block_ids, passed, young)
            slope = gradient.at[positions].get(mode="clip").astype(w.dtype)
            w, state = rule.step(w, state, slope, numbers)
            w = narrowed(w, trained.w.dtype, passed.noise, passed.count + 1, block_ids)
            return _written(trained, block_ids, w, state, passed.count + 1)

        used = jnp.sum(ids < trained.num_rows)
        return _in_blocks(block, used, ids, trained.num_rows, work, trained)

    return _for_platform(step, trained, ids, gradient, passed)


def step_terms(
    rule: RowRule,
    trained: TrainedKernel,
    terms: Terms,
    passed: Passed,
    *,
    implementation: Implementation = None,
) -> TrainedKernel:
    """`step_rows` with gradients that are not summed yet; one GPU program may sum and step.

    The program takes rules that work element by element or by row, and widths for which
    `takes_rows` is true. If weights drift under the rule, missed steps must not be rounded
    at random. Then the summed gradients are never written to memory.
    """
    if terms.divided:

        def part(terms, trained, passed):
            passed = passed.own(terms.num_rows)
            return step_terms(
                rule, trained, terms, passed, implementation=implementation
            )

        rows = P("model")
        return terms.per_device(part, (trained, passed), (rows, P()), out_specs=rows)
    if terms.unsent is not None:
        step = functools.partial(
            step_terms, rule, passed=passed, implementation=implementation
        )
        crowded = terms.unsent.crowded

        def gathered(trained):
            found = terms.gathered()
            return step(trained, found), jnp.minimum(found.by_column.indptr[0], 0)

        # The host waits for this condition, and cannot launch further programs meanwhile. So it
        # comes first, and layers still compute while gradients are exchanged.
        trained, zero = lax.cond(
            crowded, gathered, lambda trained: (trained, jnp.int32(0)), trained
        )
        return step(trained, terms.exchanged_after(zero).where(~crowded))
    fits = _by_rows(rule, trained.w, trained.state)
    fits &= not rule.drifts or in_programs(rule, passed.noise)
    column, dy = terms.by_column.columns, terms.dy
    fits &= takes_rows(dy.shape[1], by_row=rule.by_row)
    fits &= mosaic_is_fastest(dy, column.shape[0])
    if implementation is None and fits:
        implementation = "mosaic_gpu"
    if implementation != "mosaic_gpu":
        values = terms.values(implementation)
        return step_rows(rule, trained, terms.ids(), values, passed)
    by_column = terms.by_column
    targets = by_column.ends()
    young, passed = passed.table is not None, passed.with_table(rule, trained)
    count, noise, table = passed
    if table is not None and not young:
        # The rows depend on the slopes, so that they are written after all reads of the kernel.
        most = trained.num_rows + jnp.isnan(dy[0, 0]).astype(jnp.int32)
        touched = jnp.where(targets >= 0, targets, trained.num_rows)
        touched = jnp.minimum(touched, most)
        trained = _without_old(rule, trained, touched, passed)
    lags, last = None, trained.last
    if last is not None:
        # Without the barrier, XLA reads these numbers in the program that counts the entries,
        # which has few threads: a step takes 26 us instead of 5.
        lags = _lag(_read(last, lax.optimization_barrier(column)), count)
        done = jnp.where(targets >= 0, targets, trained.num_rows)
        # Indices are not unique: entries that are not the last of a row have equal indices.
        last = last.at[done].set(count + 1, mode="drop")

    step, scalars = step_of_arrays(rule, trained.state, count + 1)

    def update(arrays, gradient, lag, scalars, mean):
        done, *scalars = scalars
        if lag is not None:
            state = dict(zip(trained.state, arrays[1:], strict=True))
            w, state = rule.catch_up(arrays[0], state, lag, done)
            arrays = [w, *(state[name] for name in trained.state)]
        means = {"mean": mean} if rule.by_row else {}
        return step(arrays, gradient, scalars, **means)

    lines = None
    if table is not None:
        catch_up = _catch_up_of_arrays(rule, trained.state)
        lines = catch_up, table.by_lag, table.shared
    w, *state = mosaic.row_update(
        update,
        [trained.w, *trained.state.values()],
        terms.data,
        by_column.rows,
        by_column.indptr,
        targets,
        lags,
        terms.dy,
        [jnp.asarray(count, jnp.float32), *scalars],
        table=lines,
        place=place_of(noise, count + 1),
    )
    return TrainedKernel(w, dict(zip(trained.state, state, strict=True)), last)


def in_programs(rule: RowRule, noise: Noise | None) -> bool:
    """Whether GPU programs bring rows up to date while they read them.

    They cannot if missed steps are rounded at random, since a row would be rounded twice.
    """
    return rule.elementwise and rule.table_lags >= LEAST_LAGS and noise is None


def by_elements(rule: RowRule, w: jax.Array, state: State) -> bool:
    """Whether a GPU program can apply the rule's step to pieces of rows."""
    return rule.elementwise and all(x.shape == w.shape for x in state.values())


def _by_rows(rule: RowRule, w: jax.Array, state: State) -> bool:
    """Whether a GPU program can apply the rule's step to whole rows."""
    shapes = (w.shape, (w.shape[0], 1))
    in_shape = all(x.shape in shapes for x in state.values())
    return by_elements(rule, w, state) or (rule.by_row and in_shape)


def takes_rows(hidden: int, *, by_row: bool = False) -> bool:
    """Whether the GPU program that sums gradients and updates rows supports this width.

    It takes multiples of 8 below 128, and multiples of 128 (for rules that work by row, up
    to 512).
    """
    return mosaic.takes(hidden, by_row)


def step_of_arrays(
    rule: RowRule, state: State, count: jax.Array
) -> tuple[Callable, list[Float[Array, ""]]]:
    """Step `count` as a function and its scalars, the arguments of GPU programs.

    Returns:
      A function of the list `[w, *state.values()]`, the gradient and the scalars, which returns
      such a list and passes further arguments on to the rule; and the scalars.
    """
    numbers, tree = jax.tree.flatten(rule.numbers(count))

    def step(arrays, gradient, scalars, **means):
        old = dict(zip(state, arrays[1:], strict=True))
        w, new = rule.step(arrays[0], old, gradient, tree.unflatten(scalars), **means)
        return [w, *(new[name] for name in state)]

    return step, [jnp.asarray(number, jnp.float32) for number in numbers]


def _catch_up_of_arrays(rule: RowRule, state: State) -> CatchUp:
    """Makes `catch_up_by_table` a function of `[w, *state.values()]`, the form that GPU programs
    call.
    """
    names = list(state)

    def catch_up(arrays, numbers, shared):
        old = dict(zip(names, arrays[1:], strict=True))
        w, new = rule.catch_up_by_table(arrays[0], old, numbers, shared)
        return [w, *(new[name] for name in names)]

    return catch_up


def place_of(
    noise: Noise | None, step: jax.Array
) -> tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None:
    """The noise's key for a step, and the first row, as arguments of GPU programs."""
    return None if noise is None else (noise.key(step), noise.first_row)


def narrowed(
    w: Float[Array, "*shape"],
    dtype: jnp.dtype,
    noise: Noise | None,
    step: jax.Array,
    ids: Int[Array, "rows"] | None = None,
) -> Float[Array, "*shape"]:
    """Rounds weights to the dtype in which they are stored after this step.

    Args:
      w: weights in the dtype that rules work in.
      dtype: dtype in which the weights are stored; bfloat16 if there is noise.
      noise: random numbers for rounding this array; None rounds to nearest.
      step: number of the step.
      ids: numbers of the rows, if they are not in order.
    """
    if noise is None:
        return w.astype(dtype)
    return noise.rounded(w.astype(jnp.float32), step, ids)  # the weights may be float64


def step_whole(
    rule: RowRule,
    trained: TrainedKernel,
    gradient: Float[Array, "features hidden"],
    count: jax.Array,
    *,
    noise: Noise | None = None,
) -> TrainedKernel:
    """Step `count + 1` on all rows. Under a rule that drifts they must be up to date."""
    w, state = _wide(trained.w), trained.state
    if not rule.drifts and trained.last is not None:
        lag = _lag(trained.last, count)[:, None]
        w, state = rule.catch_up(w, state, lag, count)
    slope = gradient.astype(w.dtype)
    w, state = rule.step(w, state, slope, rule.numbers(count + 1))
    # Computed from the old array, so that its sharding on a mesh does not change.
    last = None if trained.last is None else jnp.maximum(trained.last, count + 1)
    state = {name: state[name].astype(trained.state[name].dtype) for name in state}
    w = narrowed(w, trained.w.dtype, noise, count + 1)
    return TrainedKernel(w, state, last)


def settle(
    rule: RowRule,
    trained: TrainedKernel,
    passed: Passed,
    *,
    divided: bool = False,
    beyond: int = 0,
    young: bool = False,
) -> TrainedKernel:
    """Brings all rows up to date that have missed more than `beyond` steps.

    The function takes almost no time if there are no such rows. `young` says that no row has
    missed more steps than the rule's table has.
    """
    if trained.last is None:
        return trained
    if divided:

        def part(trained, passed):
            how = {"beyond": beyond, "young": young}
            return settle(rule, trained, passed.own(trained.num_rows), **how)

        rows = P("model")
        return call_on_each_device(part, (trained, passed), (rows, P()), rows)
    count = passed.count
    if not rule.drifts:  # weights do not drift, so only the state changes, in one pass
        lag = _lag(trained.last, count)[:, None]
        _, state = rule.catch_up(trained.w, trained.state, lag, count)
        return TrainedKernel(
            trained.w, state, jnp.where(trained.last == NEVER, NEVER, count)
        )

    def catch_up(trained, passed, block):
        every = jnp.arange(trained.num_rows, dtype=jnp.int32)
        stale = _lag(trained.last, passed.count) > beyond
        passed = passed.with_table(rule, trained)

        def work(trained, block_ids, _):
            w, state = _caught_up(rule, trained, block_ids, passed, young)
            return _written(trained, block_ids, w, state, passed.count)

        ids, used = _chosen(stale, every)
        return _in_blocks(block, used, ids, trained.num_rows, work, trained)

    return _for_platform(catch_up, trained, passed)


def are_young(rule: RowRule, last: jax.Array | None, count: jax.Array) -> bool:
    """Whether the host can see that no row has missed more steps than the rule's table has.

    A program that relies on it compiles in half the time.
    """
    if last is None or not (rule.drifts and rule.table_lags):
        return False
    if any(isinstance(array, jax.core.Tracer) for array in (last, count)):
        return False
    if not (last.is_fully_addressable and count.is_fully_addressable):
        return False
    if int(count) <= rule.table_lags:
        return True
    steps = np.asarray(last)
    oldest = np.min(steps, where=steps != NEVER, initial=int(count))
    return int(count) - int(oldest) <= rule.table_lags


def current_rows(
    rule: RowRule, trained: TrainedKernel, ids: Int[Array, "capacity"], passed: Passed
) -> Float[Array, "capacity hidden"]:
    """Copies of the rows `ids` as `settle` would write them. The kernel is not changed.

    The copies have `w`'s dtype. Copies for padding ids are arbitrary.
    """

    def read(trained, ids, passed, block):
        young, passed = passed.table is not None, passed.with_table(rule, trained)

        def work(rows, block_ids, positions):
            w, _ = _caught_up(rule, trained, block_ids, passed, young)
            return _write(rows, positions, w)

        used = jnp.sum(ids < trained.num_rows)
        rows = jnp.zeros((ids.shape[0], trained.w.shape[1]), trained.w.dtype)
        return _in_blocks(block, used, ids, trained.num_rows, work, rows)

    return _for_platform(read, trained, ids, passed)


def gather_current(
    rule: RowRule,
    trained: TrainedKernel,
    x: LookupRows,
    passed: Passed,
    *,
    implementation: Implementation = None,
) -> Float[Array, "batch hidden"]:
    """`gather_matmul` of the rows as they are after the steps passed. No row is written."""
    read = functools.partial(gather_current, rule, implementation=implementation)
    if isinstance(x, ShardedCSR):

        def part(trained, blocks, passed):
            y = read(trained, own_block(blocks), passed.own(trained.num_rows))
            return x.sum_over_columns(y)

        specs = P("model"), P("data", "model"), P()
        return call_on_each_device(
            part, (trained, x.blocks, passed), specs, x.rows_spec
        )
    if isinstance(x, DividedRows):

        def sums(trained, x, passed):
            if x.route is not None:
                passed = passed.own(trained.num_rows)
            add = functools.partial(added, implementation=implementation)
            return own_block(x).sums(
                lambda x, _: read(trained, x, passed), add, trained.w.dtype
            )

        specs = x.kernel_spec, P("data", "model"), P()
        return call_on_each_device(
            sums, (trained, x, passed), specs, P(("data", "model"))
        )

    @jax.custom_vjp
    def differentiable(data, x, *given):
        return _gathered(rule, implementation, x.with_data(data), *given)

    def forward(*operands):
        return differentiable(*operands), operands

    def backward(operands, dy):
        data, x, *given = operands
        slope = None
        if data is not None:
            copies = _copied(rule, x.with_data(data), *given)
            slope = data_gradient_by_gather(*copies, dy).astype(data.dtype)
        return slope, *(None for _ in operands[1:])

    differentiable.defvjp(forward, backward)
    return differentiable(x.data, x.with_data(None), trained, passed)


def _copied(rule, x, trained, passed):
    """Copies the rows that `x` reads; returns `x` with indices into the copies, and the copies."""
    ids, slots = touched_rows(x, trained.num_rows)
    rows = current_rows(rule, trained, ids, passed)
    return CSR(x.data, slots, x.indptr, num_cols=ids.shape[0]), rows


def _gathered(rule, implementation, x, trained, passed):
    """Does the work of `gather_current` on one device, without a derivative."""
    count, noise, table = passed

    def by_copies(trained, x, count):
        at = passed._replace(count=count)
        return gather_sum(*_copied(rule, x, trained, at), implementation)

    fits = in_programs(rule, noise) and trained.last is not None
    fits &= takes_rows(trained.w.shape[1]) and by_elements(
        rule, trained.w, trained.state
    )
    if implementation is None and fits and mosaic_is_fastest(trained.w, x.nse):
        implementation = "mosaic_gpu"
    if implementation != "mosaic_gpu" or not fits:
        return by_copies(trained, x, count)

    def by_program(trained, x, count):
        lines = table or rule.lag_table(count, accumulator(trained.w.dtype))
        missed = Missed(
            _catch_up_of_arrays(rule, trained.state),
            list(trained.state.values()),
            trained.last,
            jnp.asarray(count, jnp.int32),
            *lines,
        )
        indices, indptr = jnp.asarray(x.indices), jnp.asarray(x.indptr)
        data = None if x.data is None else jnp.asarray(x.data)
        return mosaic_gather.gather_matmul(
            data, indices, indptr, trained.w, x.num_cols, missed=missed
        )

    if table is not None:
        return by_program(trained, x, count)
    used = x.columns(padding=trained.num_rows)
    lag = jnp.where(used < trained.num_rows, _lag(_read(trained.last, used), count), 0)
    old = jnp.any(lag > rule.table_lags)
    return lax.cond(old, by_copies, by_program, trained, x, count)


def touched_rows(
    x: CSR, num_rows: int
) -> tuple[Int[Array, "capacity"], Int[Array, "nse"]]:
    """The rows of a kernel that the entries of `x` name.

    Returns:
      ids: unique and ascending, padded with `num_rows`; `capacity` is the smaller of
        `nse` and `num_rows`.
      slots: the index in `ids` of the column of each entry; `capacity` for an entry that
        is padding or out of range.
    """
    capacity = min(x.nse, num_rows)

    def by_count(x):
        return rank_by_count(x.columns(padding=num_rows), num_rows)

    def by_sort(x):
        by_column = x.by_column()
        ids = by_column.distinct(num_rows)
        ids = jnp.pad(ids, (0, capacity - ids.shape[0]), constant_values=num_rows)
        slot = segment_ids(by_column.indptr, x.nse)
        position = jnp.arange(x.nse, dtype=jnp.int32)
        slot = jnp.where(position < by_column.indptr[-1], slot, capacity)
        return ids, jnp.zeros(x.nse, jnp.int32).at[by_column.order].set(slot)

    if x.transposed is not None or num_rows > COUNTING_LIMIT * x.nse:
        return by_sort(x)
    return lax.platform_dependent(x, cpu=by_count, default=by_sort)


def _first_row(num_rows):
    """The number of the first kernel row on this device."""
    return lax.axis_index("model") * num_rows


def _lag(last, count):
    """The number of missed steps of each row, among the first `count` steps."""
    return jnp.where(last == NEVER, 0, count - last)


def _without_old(rule, trained, ids, passed):
    """Brings the rows `ids` up to date that have missed more steps than the lag table has."""
    lag = _lag(_read(trained.last, ids), passed.count)
    old = (ids < trained.num_rows) & (lag > rule.table_lags)

    def repeat(trained, block_ids, _):
        at = passed._replace(table=None)
        w, state = _caught_up(rule, trained, block_ids, at)
        return _written(trained, block_ids, w, state, passed.count)

    places, used = _chosen(old, ids)
    return _in_blocks(_REPEATED, used, places, trained.num_rows, repeat, trained)


def _chosen(
    mask: Bool[Array, "n"], ids: Int[Array, "n"]
) -> tuple[Int[Array, "n"], Int[Array, ""]]:
    """Moves the ids whose mask is true to the front, in order; also returns their number."""
    used, size = jnp.sum(mask, dtype=jnp.int32), mask.shape[0]

    def pack():
        places = jnp.where(mask, sums_so_far(mask) - 1, size)
        return jnp.zeros_like(ids).at[places].set(ids, mode="drop")

    return lax.cond(used > 0, pack, lambda: ids), used


def _caught_up(rule, trained, ids, passed, young=False):
    """Computes up-to-date copies of the rows `ids`, in float32 or float64. For an id out of range,
    the result is arbitrary.

    With noise the weights are bfloat16 numbers.
    """
    w, state, last = jax.tree.map(lambda a: _read(a, ids), trained)
    w, (count, noise, table) = _wide(w), passed
    if last is None:
        return w, state
    lag = jnp.where(ids < trained.num_rows, _lag(last, count), 0)
    before = w, state
    if table is None:
        w, state = rule.catch_up(w, state, lag[:, None], count)
    else:
        numbers = _read(table.by_lag, lag)
        columns = [numbers[:, i : i + 1] for i in range(numbers.shape[1])]
        w, state = rule.catch_up_by_table(w, state, columns, list(table.shared))
        if not young:
            w, state = _old_repeated(rule, before, (w, state), lag, count)
    if noise is not None and rule.drifts:
        w = _wide(narrowed(w, trained.w.dtype, noise, count, ids))
    return w, state


def _old_repeated(rule, before, after, lag, count):
    """Replaces the rows of `after` whose lag exceeds the table, by repeating their missed
    steps.
    """
    old, every = lag > rule.table_lags, jnp.arange(lag.shape[0], dtype=jnp.int32)

    def repeat(before, after, lag):
        places, used = _chosen(old, every)

        def work(after, block, _):
            w, state = jax.tree.map(lambda a: _read(a, block), before)
            some = rule.catch_up(w, state, _read(lag, block)[:, None], count)
            return jax.tree.map(lambda a, rows: _write(a, block, rows), after, some)

        return _in_blocks(_REPEATED, used, places, len(lag), work, after)

    return lax.cond(
        jnp.any(old), repeat, lambda before, after, lag: after, before, after, lag
    )


def _written(trained, ids, w, state, count):
    state = {name: _write(trained.state[name], ids, state[name]) for name in state}
    last = trained.last
    if last is not None:
        # The maximum equals `count`. It makes the write depend on the read: otherwise XLA copies
        # the whole array in each block.
        last = _write(last, ids, jnp.maximum(_read(last, ids), count))
    return TrainedKernel(_write(trained.w, ids, w), state, last)


def _wide(w):
    """Converts weights to the dtype in which rules compute."""
    return w.astype(accumulator(w.dtype))


def _read(array, ids):
    # Filling with zeros beyond the end makes XLA's gather on a CPU 17 times slower.
    return array.at[ids].get(mode="clip")


def _write(array, ids, rows):
    rows = rows.astype(array.dtype)
    return array.at[ids].set(rows, mode="drop", unique_indices=True)


def _in_blocks[Carry](
    size: int,
    count: jax.Array,
    ids: Int[Array, "n"],
    padding: int,
    work: Callable[[Carry, jax.Array, jax.Array], Carry],
    carry: Carry,
) -> Carry:
    """Folds `carry = work(carry, block of ids, its positions)` over `ids[:count]`.

    The number of blocks depends on `count`, not on the capacity of `ids`.
    """
    size = max(1, min(size, ids.shape[0]))
    ids = jnp.pad(ids, (0, -ids.shape[0] % size), constant_values=padding)

    def block(i, carry):
        positions = i * size + jnp.arange(size, dtype=jnp.int32)
        block_ids = lax.dynamic_slice(ids, (i * size,), (size,))
        block_ids = jnp.where(positions < count, block_ids, padding)
        return work(carry, block_ids, positions)

    return lax.fori_loop(0, -(-count // size), block, carry)


def _for_platform(function, trained: TrainedKernel, *args: Any):
    """Calls `function(trained, *args, block=...)` with the block size for the platform."""
    on_cpu = max(128, _CPU_ELEMENTS // max(1, trained.w.shape[1]))
    return lax.platform_dependent(
        trained,
        *args,
        cpu=functools.partial(function, block=on_cpu),
        default=functools.partial(function, block=_BLOCK),
    )
