"""DSSTNE's update rules.

They differ from optax's rules: the penalties lambda and lambda1 are part of the gradient and
do not apply to biases, velocities include the learning rate, roots are of `max(1e-9, v)`,
Adagrad starts at 0, AdaDelta has no learning rate, and Adam's powers start at 2. With the
gradient g of the mean loss::

    g' = g + weight_decay w + l1 sign(w)     for weights, which have two dimensions or more
    g' = g                                   for biases

`learning_rate` is DSSTNE's alpha, `weight_decay` its lambda, `l1` its lambda1; `mu` and `mu1`
have DSSTNE's names.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.optimizers.rules.base import LinearRule, Rule, power
from sparsejax.optimizers.rules.missed_steps import Linear
from sparsejax.optimizers.rules.replay import Replay

_LEAST_SQUARE = 1e-9
_ADAM_EPS = 1e-8


class _Count(NamedTuple):
    count: Any


class _Velocity(NamedTuple):
    count: Any
    velocity: Any


class _Squares(NamedTuple):
    count: Any
    squares: Any


class _SquaresAndMoves(NamedTuple):
    count: Any
    squares: Any
    moves: Any


class _Moments(NamedTuple):
    count: Any
    mean: Any
    squares: Any


@dataclasses.dataclass(frozen=True)
class DsstneRule(Rule):
    """The common base of DSSTNE's rules.

    Attributes:
      l1: factor of the penalty `l1 sign(w)` that is added to each weight's gradient.
    """

    elementwise = True
    takes_weight_decay = True
    # The type of the state of `dense`. Its arrays have the names that `init` uses.
    dense_state: ClassVar[Any] = _Count

    l1: float = dataclasses.field(default=0.0, kw_only=True)

    @property
    def drifts(self) -> bool:
        return super().drifts or self.l1 > 0

    @property
    def row_sparse(self) -> bool:
        """Whether rows that steps do not touch can catch up later.

        If not, a kernel has to be an `nnx.Param`, not a `RowParam`.
        """
        return self.l1 == 0

    def memory(self, shape: tuple[int, ...], *, rows_only: bool) -> int:
        """Bytes of memory for weights in training, with their state and gradient.

        Args:
          shape: shape of the weights.
          rows_only: whether they belong to a sparse input. If the rule is `row_sparse`,
            their gradient only has the rows of a batch, and is not counted.
        """
        arrays = 1 + len(self.dense_state._fields[1:])
        if not (rows_only and self.row_sparse):
            arrays += 1
        return 4 * arrays * math.prod(shape)

    def init(self, shape):
        names = self.dense_state._fields[1:]
        return {name: jnp.zeros(shape, jnp.float32) for name in names}

    def dense(self):
        names = self.dense_state._fields[1:]

        def init(params):
            arrays = (jax.tree.map(jnp.zeros_like, params) for _ in names)
            return self.dense_state(jnp.zeros((), jnp.int32), *arrays)

        def update(updates, state, params=None):
            if params is None:
                raise ValueError(
                    f"{self.name} needs the parameters: update(g, s, params)"
                )
            count = optax.safe_increment(state.count)
            numbers = self.numbers(count)
            leaves, tree = jax.tree.flatten(updates)
            olds = [tree.flatten_up_to(getattr(state, name)) for name in names]
            weights = tree.flatten_up_to(params)
            moves, news = [], []
            for i, (g, w) in enumerate(zip(leaves, weights, strict=True)):
                old = {
                    name: arrays[i] for name, arrays in zip(names, olds, strict=True)
                }
                move, new = self.move(self._penalised(g, w), old, numbers)
                moves.append(move)
                news.append(new)
            arrays = (tree.unflatten([new[name] for new in news]) for name in names)
            return tree.unflatten(moves), self.dense_state(count, *arrays)

        return optax.GradientTransformation(init, update)

    def step(self, w, state, gradient, numbers):
        move, state = self.move(self._penalised(gradient, w), state, numbers)
        return w + move, state

    def move(self, gradient, state, numbers) -> tuple[jax.Array, Any]:
        """The change that is added to the weights, and the new state."""
        raise NotImplementedError

    def catch_up(self, w, state, lag, count):
        if not self.row_sparse:
            raise NotImplementedError(
                f"{self.name} with weight_decay={self.weight_decay} and l1={self.l1} "
                "changes every row in every step, in a way that cannot be made up for "
                "later: make the kernel an nnx.Param, which is updated as a whole"
            )
        return self.rest(w, state, lag, count)

    def rest(self, w, state, lag, count):
        """The function `catch_up` for a rule that is `row_sparse`."""
        return super().catch_up(w, state, lag, count)

    @property
    def table_lags(self) -> int:
        return super().table_lags if self.row_sparse else 0

    def _penalised(self, gradient, w):
        if jnp.ndim(w) < 2:  # a bias has no penalty
            return gradient
        if self.weight_decay:
            gradient = gradient + self.weight_decay * w
        if self.l1:
            gradient = gradient + self.l1 * jnp.sign(w)
        return gradient


@dataclasses.dataclass(frozen=True)
class SGD(DsstneRule, LinearRule):
    """Plain gradient descent.

    With g' the gradient and the penalties::

        w -= learning_rate g'
    """

    def move(self, gradient, state, numbers):
        return -(numbers * gradient), state

    def after_missed(self, w, state, missed):
        return w + missed.ww * w, state

    def missed(self, rate):
        return Linear(ww=-rate * self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Momentum(DsstneRule, LinearRule):
    """Momentum with a velocity that includes the learning rate.

    With g' the gradient and the penalties::

        v = mu v - learning_rate g'
        w += v
    """

    shrinks_state = True
    moves_weights = True
    dense_state = _Velocity

    mu: float
    below_one = ("mu",)

    def move(self, gradient, state, numbers):
        velocity = self.mu * state["velocity"] - numbers * gradient
        return velocity, {"velocity": velocity}

    def after_missed(self, w, state, missed):
        velocity = state["velocity"]
        after = missed.mw * w + missed.mm * velocity
        return w + (missed.ww * w + missed.wm * velocity), {"velocity": after}

    def missed(self, rate):
        decay = rate * self.weight_decay
        return Linear(-decay, self.mu, -decay, self.mu)


@dataclasses.dataclass(frozen=True)
class Nesterov(Momentum):
    """Nesterov's momentum.

    With g' the gradient and the penalties::

        u = v
        v = mu u - learning_rate g'
        w += v + mu (v - u)
    """

    def move(self, gradient, state, numbers):
        before = state["velocity"]
        velocity = self.mu * before - numbers * gradient
        return velocity + self.mu * (velocity - before), {"velocity": velocity}

    def missed(self, rate):
        decay = rate * self.weight_decay
        return Linear(-(1 + self.mu) * decay, self.mu**2, -decay, self.mu)


@dataclasses.dataclass(frozen=True)
class _Adaptive(DsstneRule):
    """Rules whose state depends on penalties, so that they are row-sparse only without one."""

    @property
    def row_sparse(self) -> bool:
        return super().row_sparse and not self.weight_decay


@dataclasses.dataclass(frozen=True)
class AdaGrad(_Adaptive):
    """AdaGrad.

    With g' the gradient and the penalties::

        v += g'^2                        v starts at 0
        w -= learning_rate g' / sqrt(max(1e-9, v))
    """

    dense_state = _Squares

    def move(self, gradient, state, numbers):
        squares = state["squares"] + jnp.square(gradient)
        return -(numbers * (_inverse_root(squares) * gradient)), {"squares": squares}

    def rest(self, w, state, lag, count):
        return w, state


@dataclasses.dataclass(frozen=True)
class RMSProp(_Adaptive):
    """RMSProp.

    With g' the gradient and the penalties::

        v = mu v + (1 - mu) g'^2
        w -= learning_rate g' / sqrt(max(1e-9, v))
    """

    shrinks_state = True
    dense_state = _Squares

    mu: float
    below_one = ("mu",)

    def move(self, gradient, state, numbers):
        squares = _average(self.mu, state["squares"], gradient)
        return -(numbers * (_inverse_root(squares) * gradient)), {"squares": squares}

    def rest(self, w, state, lag, count):
        return w, {"squares": state["squares"] * power(self.mu, lag)}


@dataclasses.dataclass(frozen=True)
class AdaDelta(_Adaptive):
    """AdaDelta, which computes its own step size: it has no learning rate.

    ::

        u = mu u + (1 - mu) g'^2
        d = sqrt(max(1e-9, v) / max(1e-9, u)) g'
        v = mu v + (1 - mu) d^2
        w -= d
    """

    shrinks_state = True
    dense_state = _SquaresAndMoves

    learning_rate: float = dataclasses.field(default=1.0, init=False)
    mu: float
    below_one = ("mu",)

    def move(self, gradient, state, numbers):
        squares = _average(self.mu, state["squares"], gradient)
        root = jnp.sqrt(jnp.maximum(state["moves"], _LEAST_SQUARE))
        move = root * _inverse_root(squares) * gradient
        moves = _average(self.mu, state["moves"], move)
        return -move, {"squares": squares, "moves": moves}

    def rest(self, w, state, lag, count):
        factor = power(self.mu, lag)
        return w, {name: array * factor for name, array in state.items()}


@dataclasses.dataclass(frozen=True)
class Adam(_Adaptive):
    """Adam, in DSSTNE's form.

    ::

        m = mu m + (1 - mu) g'
        v = mu1 v + (1 - mu1) g'^2
        w -= learning_rate m / (1 - mu^(t + 1)) / (sqrt(v / (1 - mu1^(t + 1))) + 1e-8)

    in step t, from 1. It is row-sparse if mu is below sqrt(mu1): otherwise rows without
    a gradient would move ever faster.
    """

    shrinks_state = True
    moves_weights = True
    dense_state = _Moments

    mu: float
    mu1: float
    below_one = ("mu", "mu1")

    @property
    def row_sparse(self) -> bool:
        return super().row_sparse and self.mu**2 < self.mu1

    def numbers(self, count):
        after = count + 1
        return self.rate(count), _total(self.mu, after), _total(self.mu1, after)

    def move(self, gradient, state, numbers):
        rate, mean_total, square_total = numbers
        mean = self.mu * state["mean"] + (1 - self.mu) * gradient
        squares = _average(self.mu1, state["squares"], gradient)
        root = jnp.sqrt(squares / square_total)
        move = -(rate * (mean / mean_total / (root + _ADAM_EPS)))
        return move, {"mean": mean, "squares": squares}

    @property
    def _replay(self) -> Replay:
        return Replay(self.mu, self.mu1, _ADAM_EPS, ahead=1)

    @property
    def table_lags(self) -> int:
        return self._replay.lags if self.row_sparse else 0

    def lag_table(self, count, dtype):
        return self._replay.table(self.rate, count, None, dtype)

    def catch_up_by_table(self, w, state, numbers, shared):
        mean = state["mean"]
        of_mean, of_squares = numbers[0], numbers[1]
        squares = state["squares"] * of_squares
        total = self._replay.sum_of(jnp.sqrt(squares), numbers[2:], shared)
        return w - mean * total, {"mean": mean * of_mean, "squares": squares}

    def rest(self, w, state, lag, count):
        mean = state["mean"]
        total = self._replay.repeated(
            jnp.sqrt(state["squares"]),
            lag,
            self._replay.owed(mean, lag),
            count,
            self.rate,
            0.0,
        )
        return w - mean * total, {
            "mean": mean * power(self.mu, lag),
            "squares": state["squares"] * power(self.mu1, lag),
        }


@dataclasses.dataclass(frozen=True)
class Decay:
    """A falling learning rate: by the network's `Decay`, and by the intervals of a CDL file.

    >>> rate = Decay(alpha=0.1, decay=0.5)
    >>> [round(rate(steps_done), 4) for steps_done in (0, 1, 2)]
    [0.1, 0.0667, 0.05]

    ::

        rate = alpha multiplier^floor(count / steps) / (1 + decay count)

    after `count` steps.

    Attributes:
      alpha: the rate of the first step.
      decay: the network's `Decay`, a factor of the count in the formula above.
      multiplier: factor by which each interval multiplies the rate.
        steps: number of steps in an interval; 0 is one interval without end.
    """

    alpha: float
    decay: float = 0.0
    multiplier: float = 1.0
    steps: int = 0

    def __call__(self, count: Any) -> Any:
        rate = self.alpha / (1 + self.decay * count)
        return rate * self.multiplier ** (count // self.steps) if self.steps else rate


def _average(mu: float, squares: jax.Array, x: jax.Array) -> jax.Array:
    return mu * squares + (1 - mu) * jnp.square(x)


def _inverse_root(squares: jax.Array) -> jax.Array:
    return lax.rsqrt(jnp.maximum(squares, _LEAST_SQUARE))


def _total(mu: float, steps: Any) -> Any:
    """`1 - mu^steps`, computed without cancellation if mu is nearly 1; `steps` is at least 1."""
    return -jnp.expm1(steps * math.log(mu)) if mu else 1.0
