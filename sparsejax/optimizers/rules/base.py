"""The base class of optimizer rules, and functions that rules use."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sparsejax.ops.row_update import LagTable, State
from sparsejax.optimizers.rules import missed_steps
from sparsejax.optimizers.rules.missed_steps import Linear


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer rule with a dense form (of optax) and a form for single rows.

    `catch_up` and `step` get some rows of a kernel, `[rows, hidden]` in float32, and of
    each of its state arrays. To add a rule, write a subclass.

    Attributes:
      learning_rate: step size: a number, or a function of the number of previous steps,
        like optax's schedules (`schedule` makes one that JSON can represent).
      weight_decay: decay rate: each step subtracts `learning_rate * weight_decay * w` from a
        weight `w`. All parameters decay, biases too.
    """

    # Whether a step that does not touch a row changes its state, apart from weight decay.
    shrinks_state: ClassVar[bool] = False
    moves_weights: ClassVar[bool] = False
    # Whether `step`, and `catch_up` if weights do not drift, work element by element, with
    # operations that Pallas supports on GPUs. A GPU program calls them on pieces of rows.
    elementwise: ClassVar[bool] = False
    # Whether `step` and `catch_up` work element by element except for means over a row, which
    # `step` computes by its further argument `mean`. In GPU programs, state with one number for
    # each row is passed as a number.
    by_row: ClassVar[bool] = False
    # Whether `step` and `catch_up` apply `weight_decay`.
    takes_weight_decay: ClassVar[bool] = False
    # Names of options that must be below 1; the next attribute has those that must not be 0.
    below_one: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[tuple[str, ...]] = ()

    learning_rate: float | optax.Schedule
    weight_decay: float = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            if name == "learning_rate" and callable(value):
                _check_schedule(value)
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
            object.__setattr__(self, name, value)
        if self.weight_decay and not self.takes_weight_decay:
            raise NotImplementedError(
                f"weight_decay of {self.name} would be an L2 penalty within the "
                "gradient, which also changes the state of every row in every step: "
                "that cannot be made up for later without replaying all of it. Use "
                "adamw, which decays weights beside the gradient, or sgd, momentum or "
                "nesterov; for a model without sparse kernels, optax"
            )
        for name in self.below_one:
            if (value := getattr(self, name)) >= 1:
                raise ValueError(f"{name} must be below 1, got {value}")
        for name in self.positive:
            if not (callable(value := getattr(self, name)) or value > 0):
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def name(self) -> str:
        """The rule's name in JSON and messages: the name of its class."""
        return type(self).__name__

    @property
    def drifts(self) -> bool:
        """Whether weights change in steps that do not touch their row."""
        return self.moves_weights or self.weight_decay > 0

    @property
    def decays(self) -> bool:
        """Whether weights or state change in steps that do not touch their row."""
        return self.shrinks_state or self.drifts

    def options(self) -> dict[str, Any]:
        """The arguments with which the rule was made."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def rate(self, count: ArrayLike) -> Any:
        """The learning rate of step `count` (from 1); an array if `count` is an array."""
        if not callable(self.learning_rate):
            return self.learning_rate
        rate = jnp.vectorize(self.learning_rate)(jnp.asarray(count) - 1)
        return jnp.asarray(rate, jnp.float32)

    def dense(self) -> optax.GradientTransformation:
        """The optax transformation that trains ordinary parameters by this rule."""
        raise NotImplementedError

    def init(self, shape: tuple[int, int]) -> State:
        """The state arrays of a kernel of this shape: `[rows, hidden]` or `[rows, 1]`."""
        return {}

    def start(self, w: Float[Array, "rows hidden"]) -> State:
        """The state arrays of a kernel with these weights; by default the arrays of `init`."""
        return self.init((w.shape[0], w.shape[1]))

    def catch_up(
        self, w: Float[Array, "rows hidden"], state: State, lag: jax.Array, count: Any
    ) -> tuple[jax.Array, State]:
        """The rows after `lag` steps without a gradient.

        Args:
          w: weights.
          state: state arrays.
          lag: `[rows, 1]` int32, the number of steps that each row has missed.
          count: number of steps done, including the missed ones.
        """
        return w, state

    def numbers(self, count: ArrayLike) -> Any:
        """The numbers that step `count` (from 1) needs: by default its learning rate.

        The result is a tree of numbers with the shape of `count`. They are computed outside GPU
        programs.
        """
        return self.rate(count)

    def step(
        self,
        w: Float[Array, "rows hidden"],
        state: State,
        gradient: Float[Array, "rows hidden"],
        numbers: Any,
        /,
    ) -> tuple[jax.Array, State]:
        """Weights and state of rows after one more step.

        Args:
          w: weights, which are up to date with all steps before.
          state: state arrays, up to date like `w`.
          gradient: gradient of the rows.
          numbers: numbers of this step, as `numbers` returns them.
        """
        raise NotImplementedError

    @property
    def table_lags(self) -> int:
        """The largest lag of `lag_table`, a power of 2; 0 if there is no table.

        With a table, `catch_up` is only for rows that have missed more steps.
        """
        return 0

    def lag_table(self, count: jax.Array, dtype: jnp.dtype) -> LagTable:
        """The table by which rows catch up with `count` steps; it is made once for all rows."""
        raise NotImplementedError

    def catch_up_by_table(
        self,
        w: Float[Array, "rows hidden"],
        state: State,
        numbers: Sequence[jax.Array],
        shared: Sequence[jax.Array],
    ) -> tuple[jax.Array, State]:
        """The rows after the steps that they have missed, by coefficients of `lag_table`.

        Args:
          w: weights.
          state: state arrays.
          numbers: coefficients for the lag of each row: a column `[rows, 1]` for each column
            of `LagTable.by_lag`.
          shared: numbers of the table that apply to all rows.
        """
        raise NotImplementedError

    def missed(self, rate: Any) -> Linear:
        """A step with a zero gradient as a linear map, for rules that are linear in this case."""
        raise NotImplementedError

    def all_missed(self, lag, count) -> Linear:
        if callable(self.learning_rate):
            return missed_steps.changing(self._missed_number, lag, count)
        return missed_steps.constant(self.missed(self.learning_rate), lag)

    def latest_missed(self, count, most: int) -> Linear:
        """The last 0, 1, ..., `most` steps until step `count`, combined, with gradients of zero."""
        if callable(self.learning_rate):
            return missed_steps.latest(self._missed_number, count, most)
        return missed_steps.latest(self.missed(self.learning_rate), count, most)

    def _missed_number(self, number: jax.Array) -> Linear:
        return self.missed(self.rate(number))


class LinearRule(Rule):
    """A rule that maps weights and state to linear combinations if the gradient is zero."""

    @property
    def table_lags(self) -> int:
        return missed_steps.TABLE if self.drifts else 0

    def lag_table(self, count, dtype):
        missed = self.latest_missed(count, self.table_lags)
        return LagTable(jnp.stack(missed, 1).astype(dtype), jnp.zeros(0, dtype))

    def catch_up(self, w, state, lag, count):
        return self.after_missed(w, state, self.all_missed(lag, count))

    def catch_up_by_table(self, w, state, numbers, shared):
        return self.after_missed(w, state, Linear(*numbers))

    def after_missed(
        self, w: jax.Array, state: State, missed: Linear
    ) -> tuple[jax.Array, State]:
        """The rows after these missed steps."""
        raise NotImplementedError


def mean_of_rows(x: jax.Array) -> jax.Array:
    """The mean of each row; a row is the part selected by one index of the first axis."""
    return jnp.mean(x, tuple(range(1, x.ndim)), keepdims=True)


def penalised(update, w, weight_decay: float):
    return update + weight_decay * w if weight_decay else update


def _check_schedule(schedule: optax.Schedule) -> None:
    rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if jnp.shape(rate) != ():
        raise TypeError(
            "as a function, learning_rate must map the number of steps done to a "
            f"number; it returns {rate}"
        )


def power(base: float, exponent: jax.Array) -> jax.Array:
    """`base^exponent` with operations that Pallas supports on GPUs; `base` is in [0, 1]."""
    if base == 0:
        return jnp.where(exponent > 0, 0.0, 1.0)
    # The base is rounded to float32, because the dense rule multiplies by this in each step.
    return jnp.exp2(exponent * math.log2(np.float32(base)))
