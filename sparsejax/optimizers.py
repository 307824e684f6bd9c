"""Optimizers that write only the rows a step touches, and equal their dense twins.

With a dense rule every step also changes the rows whose gradient is zero. Here a row
that is not touched is left as it is, and what it missed is made up for later::

    rule              an untouched row's    made up for
    sgd, adagrad      nothing changes       -
    rmsprop           state decays          when the row is next written
    adam              weights drift too     also whenever the row is read

After `Optimizer.flush` all weights are those of the dense rule, up to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from sparsejax import gradients
from sparsejax.gradients import Path, RowGradient, RowParam
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops import row_update
from sparsejax.ops.row_update import State, Table
from sparsejax.sparse import CSR

# A kernel of at most this many rows for each that a batch may touch is updated as a
# whole, if its rows drift: reading a row up to date and writing it costs about ten
# times as much as a row of a pass over the table (on a CPU, 256 floats a row: 3.6 us
# against .36), and the batch touches somewhat fewer rows than it may.
_LARGE_PART = 8


@dataclasses.dataclass(frozen=True)
class Rule:
    """How parameters move: a dense optax rule and the same rule for single rows.

    The functions below see some rows of a kernel, `[rows, hidden]` in float32, and of
    each state array of it. Another rule is a subclass.

    Attributes:
      learning_rate: step size.
      decays: whether the state of a row changes in steps that do not touch it.
      drifts: whether its weights change too.
    """

    name: ClassVar[str]
    decays: ClassVar[bool] = False
    drifts: ClassVar[bool] = False

    learning_rate: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{field.name} must be finite and not negative, got {value}"
                )
            object.__setattr__(self, field.name, float(value))

    def dense(self) -> optax.GradientTransformation:
        """The rule for ordinary parameters."""
        raise NotImplementedError

    def init(self) -> dict[str, float]:
        """The state arrays of a kernel: the first value of each."""
        return {}

    def catch_up(
        self, w: Float[Array, "rows hidden"], state: State, lag: jax.Array, count: Any
    ) -> tuple[jax.Array, State]:
        """Rows after `lag` steps without a gradient.

        Args:
          w: weights.
          state: state arrays.
          lag: `[rows, 1]` int32, the number of steps that each row has missed.
          count: steps done so far, those included.
        """
        return w, state

    def step(
        self,
        w: Float[Array, "rows hidden"],
        state: State,
        gradient: Float[Array, "rows hidden"],
        count: Any,
    ) -> tuple[jax.Array, State]:
        """Rows, up to date, after one more step: number `count`, from 1."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Sgd(Rule):
    """See `sgd`."""

    name = "sgd"

    def dense(self):
        return optax.sgd(self.learning_rate)

    def step(self, w, state, gradient, count):
        return w - self.learning_rate * gradient, state


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """See `adagrad`."""

    name = "adagrad"
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def dense(self):
        return optax.adagrad(**dataclasses.asdict(self))

    def init(self):
        return {"sum_of_squares": self.initial_accumulator_value}

    def step(self, w, state, gradient, count):
        total = jnp.square(gradient) + state["sum_of_squares"]
        scale = jnp.where(total > 0, lax.rsqrt(total + self.eps), 0)
        w = w - self.learning_rate * (scale * gradient)
        return w, {"sum_of_squares": total}


@dataclasses.dataclass(frozen=True)
class RmsProp(Rule):
    """See `rmsprop`."""

    name = "rmsprop"
    decays = True
    decay: float = 0.9
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        _check_below_one(decay=self.decay)
        _check_positive(eps=self.eps)

    def dense(self):
        return optax.rmsprop(**dataclasses.asdict(self), eps_in_sqrt=True)

    def init(self):
        return {"nu": 0.0}

    def catch_up(self, w, state, lag, count):
        return w, {"nu": state["nu"] * self.decay**lag}

    def step(self, w, state, gradient, count):
        nu = (1 - self.decay) * jnp.square(gradient) + self.decay * state["nu"]
        w = w - self.learning_rate * (lax.rsqrt(nu + self.eps) * gradient)
        return w, {"nu": nu}


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """See `adam`."""

    name = "adam"
    decays = True
    drifts = True
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        _check_below_one(b1=self.b1, b2=self.b2)
        _check_positive(eps=self.eps)
        if self.b1**2 >= self.b2:
            raise ValueError(
                f"b1 must be below sqrt(b2), got b1={self.b1}, b2={self.b2}: rows that "
                "are not touched would drift ever faster"
            )

    @property
    def max_replay(self) -> int:
        """Missed steps that are replayed; what further ones add is lost in rounding.

        A missed step moves a weight by about `(b1 / sqrt(b2))^k` of the first one, as
        the first moment shrinks with b1 and the root of the second with sqrt(b2). So
        this share of the whole movement is left after k steps, and it falls below
        float32's half eps, 2^-24, after 159 steps at the defaults.
        """
        if self.b1 == 0:
            return 0
        ratio = self.b1 / math.sqrt(self.b2)
        return math.ceil(math.log(2**-24) / math.log(ratio))

    def dense(self):
        return optax.adam(**dataclasses.asdict(self))

    def init(self):
        return {"mu": 0.0, "nu": 0.0}

    def catch_up(self, w, state, lag, count):
        mu, root = state["mu"], jnp.sqrt(state["nu"])
        start = count - lag
        owed = jnp.minimum(lag, self.max_replay)

        # In the k-th missed step, number start + k, the moments are mu b1^k and
        # nu b2^k, so all of them take one root, and one division each.
        def missed(k, total):
            k = k + 1
            factor = self.b1**k / (1 - self.b1 ** (start + k))
            factor = jnp.where(k <= owed, factor, 0)
            shrink = jnp.sqrt(self.b2**k / (1 - self.b2 ** (start + k)))
            return total + factor / (root * shrink + self.eps)

        total = lax.fori_loop(0, jnp.max(owed), missed, jnp.zeros_like(w))
        state = {"mu": mu * self.b1**lag, "nu": state["nu"] * self.b2**lag}
        return w - self.learning_rate * (mu * total), state

    def step(self, w, state, gradient, count):
        mu = (1 - self.b1) * gradient + self.b1 * state["mu"]
        nu = (1 - self.b2) * jnp.square(gradient) + self.b2 * state["nu"]
        mean = mu / (1 - self.b1**count)
        root = jnp.sqrt(nu / (1 - self.b2**count))
        w = w - self.learning_rate * (mean / (root + self.eps))
        return w, {"mu": mu, "nu": nu}


def sgd(learning_rate: float) -> Rule:
    """`w -= learning_rate g`"""
    return Sgd(learning_rate)


def adagrad(
    learning_rate: float, initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> Rule:
    """::

    v += g^2                        v starts at initial_accumulator_value
    w -= learning_rate g / sqrt(v + eps)
    """
    return Adagrad(learning_rate, initial_accumulator_value, eps)


def rmsprop(learning_rate: float, decay: float = 0.9, eps: float = 1e-8) -> Rule:
    """::

    v = decay v + (1 - decay) g^2
    w -= learning_rate g / sqrt(v + eps)
    """
    return RmsProp(learning_rate, decay, eps)


def adam(
    learning_rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> Rule:
    """::

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    w -= learning_rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)    in step t

    Raises:
      ValueError: b1 is not below sqrt(b2).
    """
    return Adam(learning_rate, b1, b2, eps)


_RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RmsProp, Adam)
}


def get(name: str, **options: float) -> Rule:
    """The rule called `name`: `get("adam", learning_rate=1e-3)`.

    Raises:
      ValueError: there is none, or it has no such option.
    """
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise ValueError(f"unknown optimizer {name!r}; known: {known}")
    options_of = [field.name for field in dataclasses.fields(_RULES[name])]
    unknown = [option for option in options if option not in options_of]
    if unknown or "learning_rate" not in options:
        raise ValueError(
            f"{name} takes the options {', '.join(options_of)}, of which learning_rate "
            f"is needed; got {', '.join(options) or 'none'}"
        )
    return _RULES[name](**options)


def to_json(rule: Rule) -> dict[str, Any]:
    """Name and options of a rule, as a JSON object."""
    return {"name": rule.name, **dataclasses.asdict(rule)}


def from_json(document: Mapping[str, Any]) -> Rule:
    """Reads what `to_json` made.

    Raises:
      ValueError: an unknown name or option.
      TypeError: an option is not a number.
    """
    if not isinstance(document, Mapping) or "name" not in document:
        raise ValueError(f'expected an object with a "name", got {document!r}')
    return get(**document)


class Optimizer(nnx.Pytree):
    """Trains a model: `RowParam`s row by row, all other parameters with optax.

    ::

        optimizer = Optimizer(model, adam(1e-3))

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, x, y):
            def loss_fn(model):
                return loss(model(x), y)
            value, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return value

        optimizer.flush(model)                    # at the end

    Donated, kernels and their state are updated in place. All state is in
    `nnx.OptState` variables: a checkpoint of `nnx.state((model, optimizer))`, taken at
    any step, is complete.

    Args:
      model: the parameters are those it has now.
      rule: from this module.
      wrt: which Variables to train.

    Attributes:
      step: `[]` int32 variable, the number of steps done.
    """

    def __init__(
        self, model: Any, rule: Rule, *, wrt: nnx.filterlib.Filter = nnx.Param
    ):
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rule must be one of sparsejax.optimizers ({', '.join(_RULES)}), got "
                f"{type(rule).__name__}; for an optax rule use nnx.Optimizer and "
                "nnx.value_and_grad"
            )
        self.rule, self.wrt = rule, wrt
        self.step = nnx.OptState(jnp.zeros((), jnp.int32))
        parameters = nnx.as_pure(nnx.state(model, self._ordinary))
        self.dense = nnx.data(jax.tree.map(nnx.OptState, rule.dense().init(parameters)))
        self.rows = nnx.data(
            {
                _key(path): _init_rows(rule, kernel)
                for path, kernel in gradients.row_params(model, wrt).items()
            }
        )

    @property
    def _ordinary(self) -> nnx.filterlib.Filter:
        return nnx.All(self.wrt, nnx.Not(RowParam))

    def value_and_grad(
        self,
        f: Callable[..., Any],
        *,
        has_aux: bool = False,
        dense: gradients.Dense = "error",
    ) -> Callable[..., Any]:
        """`sparsejax.value_and_grad` that reads rows as the dense rule would have them.

        Rows are brought up to date on the fly and not written. If they drift and the
        batch may touch a large part of a kernel, an update of the whole kernel is
        quicker: it is brought up to date in place, and its gradient is a dense array.
        So is that of a kernel the loss also reads elsewhere (`dense="allow"`).
        """
        return gradients.value_and_grad_with(
            self._plan, f, wrt=self.wrt, has_aux=has_aux, dense=dense
        )

    def update(self, model: Any, grads: Any) -> None:
        """One step: moves the parameters of `model` and the state here.

        Args:
          model: the parameters are updated in place.
          grads: from `value_and_grad`, also clipped or accumulated.

        Raises:
          ValueError: a gradient is missing or of another shape, or it was taken at
            rows that may be out of date: from `sparsejax.value_and_grad` with a rule
            that drifts. (Dense gradients of such rows, from `nnx.value_and_grad`, raise
            too, or under tracing make the rows NaN.)
        """
        flat = dict(nnx.to_flat_state(grads))
        step = self.step[...]
        for path, kernel in gradients.row_params(model, self.wrt).items():
            if path not in flat:
                raise ValueError(
                    f"grads has no gradient of '{_key(path, '.')}'; make it with "
                    "optimizer.value_and_grad, for the same model"
                )
            leaf = flat.pop(path)
            g = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            if g.shape != kernel.shape:
                raise ValueError(
                    f"the gradient of '{_key(path, '.')}' has shape {g.shape}, the "
                    f"kernel {kernel.shape}"
                )
            self._set_table(path, kernel, self._moved(path, kernel, g, step))
        self._update_ordinary(model, nnx.from_flat_state(flat))
        self.step[...] = step + 1

    def flush(self, model: Any) -> None:
        """Brings all rows of `model` up to date, in place.

        Before weights leave training: to evaluate without `reading`, to save, to
        export. Not in the middle of a run: splitting a catch-up in two rounds
        differently.
        """
        if not self.rule.decays:
            return
        for path, kernel in gradients.row_params(model, self.wrt).items():
            self._settle(path, kernel)

    def reading(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Within it, `model` reads its rows up to date; nothing is written.

        ::

            @nnx.jit
            def evaluate(model, optimizer, x):
                with optimizer.reading(model):
                    return model(x)

        For results without gradients, in the function that is compiled, not around it.
        """
        if not self.rule.drifts:
            return contextlib.nullcontext()
        paths = gradients.row_params(model, self.wrt)
        readers = {path: self._reader(path, skip=True) for path in paths}
        return gradients.reading(model, readers)

    def _table(self, path: Path, w: jax.Array) -> Table:
        if _key(path) not in self.rows:
            raise ValueError(
                "the optimizer was made for another model: it has no state of "
                f"'{_key(path, '.')}'"
            )
        variables = self.rows[_key(path)]
        arrays = {name: variable[...] for name, variable in variables.items()}
        return Table(w, arrays, arrays.pop("last_step", None))

    def _set_table(self, path: Path, kernel: RowParam, table: Table) -> None:
        kernel.set_value(table.w)
        variables = self.rows[_key(path)]
        for name, array in table.state.items():
            variables[name].set_value(array)
        if table.last is not None:
            variables["last_step"].set_value(table.last)

    def _settle(self, path: Path, kernel: RowParam) -> None:
        """Brings a whole kernel up to date, in place."""
        table = self._table(path, kernel[...])
        settled = row_update.settle(self.rule, table, self.step[...])
        self._set_table(path, kernel, settled)

    def _plan(self, model, elsewhere, capacities) -> gradients.Plan:
        if not self.rule.drifts:
            return gradients.Plan({}, frozenset())
        kernels = gradients.row_params(model, self.wrt)
        whole = {
            path
            for path, capacity in capacities.items()
            if capacity and kernels[path].shape[0] <= _LARGE_PART * capacity
        }
        for path in whole | elsewhere:
            self._settle(path, kernels[path])
        rest = kernels.keys() - whole - elsewhere
        readers = {path: self._reader(path) for path in rest}
        return gradients.Plan(readers, frozenset(whole))

    def _reader(self, path: Path, *, skip: bool = False) -> gradients.Reader:
        """Reads rows up to date.

        Args:
          skip: read the kernel itself where no row is behind. (Not under
            differentiation: the branches would have copies of the kernel as residuals.)
        """

        def read(x: CSR, w: jax.Array, implementation: gather.Implementation):
            table, step = self._table(path, w), self.step[...]

            def plain():
                return gather.gather_matmul(x, w, implementation=implementation)

            def current():
                ids, slots = row_update.touched_rows(x, table.num_rows)
                rows, places = row_update.current_rows(self.rule, table, ids, step)
                capacity = ids.shape[0]
                slots = places.at[slots].get(mode="fill", fill_value=capacity)
                local = CSR(x.data, slots, x.indptr, num_cols=capacity)
                return gather.gather_matmul(local, rows, implementation=implementation)

            if x.nse == 0:
                return plain()
            if not skip:
                return current()
            return jax.lax.cond(jnp.any(table.stale_rows(step)), current, plain)

        return read

    def _moved(self, path: Path, kernel: RowParam, g: Any, step: jax.Array) -> Table:
        table, rule = self._table(path, kernel[...]), self.rule
        if isinstance(g, RowGradient):
            if rule.drifts and not g.current:
                raise ValueError(
                    f"rows drift under {rule.name}, but this gradient of "
                    f"'{_key(path, '.')}' was taken at rows that may be out of date; "
                    "use optimizer.value_and_grad, not sparsejax.value_and_grad"
                )
            if g.ids.shape[0] == 0:
                return table
            return row_update.step_rows(rule, table, g.ids, g.values, step)
        if rule.drifts:
            g = _refuse_stale(path, table, g, step)
        return row_update.step_whole(rule, table, g, step)

    def _update_ordinary(self, model: Any, grads: Any) -> None:
        parameters = nnx.as_pure(nnx.state(model, self._ordinary))
        grads = nnx.as_pure(nnx.state(grads, self._ordinary))
        before = nnx.as_pure(self.dense)
        updates, after = self.rule.dense().update(grads, before, parameters)
        nnx.update(model, optax.apply_updates(parameters, updates))
        nnx.update(self.dense, nnx.state(after))


def _key(path: Path, separator: str = "/") -> str:
    return separator.join(map(str, path))


def _refuse_stale(path: Path, table: Table, g: jax.Array, step: jax.Array) -> jax.Array:
    """A dense gradient that was taken at rows that are up to date; else an error."""
    stale = table.stale_rows(step)
    if isinstance(stale, jax.core.Tracer):
        return jnp.where(stale[:, None], jnp.nan, g)
    if stale.any():
        raise ValueError(
            f"this dense gradient of '{_key(path, '.')}' was taken at rows that are not "
            "up to date; use optimizer.value_and_grad, not nnx.value_and_grad"
        )
    return g


def _init_rows(rule: Rule, kernel: RowParam) -> dict[str, nnx.OptState]:
    shape = kernel.shape
    arrays = {n: jnp.full(shape, v, jnp.float32) for n, v in rule.init().items()}
    if rule.decays:
        arrays["last_step"] = jnp.zeros(shape[0], jnp.int32)
    return {name: nnx.OptState(array) for name, array in arrays.items()}


def _check_below_one(**options: float) -> None:
    for name, value in options.items():
        if value >= 1:
            raise ValueError(f"{name} must be below 1, got {value}")


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
