"""Optimizers that write only the rows a step touches, with the results of dense rules.

With a dense rule every step also changes the rows whose gradient is zero. Here a step does
not write these rows; they catch up later. The state of a row catches up when the row is
next written. Its weights, under rules that change them, also catch up whenever they are read.
After `Optimizer.flush` all weights are those of the dense rule, up to rounding.

>>> rate = schedule("cosine_decay_schedule", init_value=1e-3, decay_steps=10_000)
>>> optimizer = Optimizer(model, adamw(rate, weight_decay=1e-2))
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels.rounding import Noise
from sparsejax.mesh.blocks import LookupRows
from sparsejax.mesh.kept_programs import as_shapes
from sparsejax.mesh.layout import (
    call_on_each_device,
    jit_sharded,
    mesh_is_set,
    out_sharding,
)
from sparsejax.mesh.promotion import promoting
from sparsejax.mesh.xla_options import Programs
from sparsejax.ops import gather_matmul as gather
from sparsejax.ops import row_update
from sparsejax.ops.gather_sum import mosaic_is_fastest
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.row_update import Passed, State, TrainedKernel
from sparsejax.optimizers import gradients, growth, inplace, rules
from sparsejax.optimizers.gradients import Path, RowParam
from sparsejax.optimizers.row_gradient import RowGradient, RowTerms
from sparsejax.optimizers.rules import Rule

# Updating a row that is read and written singly takes about ten times as long as a row in a pass
# over the whole kernel (on a CPU, 256 floats a row: 3.6 us against 0.36). A batch touches fewer
# rows than its capacity.
_LARGE_PART = 8


class Moved(NamedTuple):
    """How the rows of a new parameter are made from rows of others, see `Optimizer.move_rows`.

    Attributes:
      sources: paths of the old parameters.
      make: function that makes an array with a row for each row of the parameter. Its arguments
        are an array of initial rows, and an array for each source.
    """

    sources: tuple[Path, ...]
    make: Callable[..., jax.Array]


# Function that brings rows up to date; its argument and its result are arrays by name.
HostSettler = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]


@runtime_checkable
class HostRows(Protocol):
    """Rows of a kernel that are in host memory: the entry "host" in the kernel's metadata."""

    def forget_slots(self) -> None:
        """Marks all rows as absent from the devices: each is copied there again when needed."""
        ...

    def attach(
        self,
        kernel: nnx.Variable,
        state: Mapping[str, nnx.Variable] | None,
        rule: Rule | None,
        *,
        reading: bool = False,
    ) -> None:
        """Sets the variables that hold the rows on the devices, and their rule."""
        ...

    def check_state(self, state: Mapping[str, nnx.Variable]) -> None:
        """Raises ValueError if the rows have the state of another optimizer."""
        ...

    def variables(self) -> list[nnx.Variable]:
        """The variables that were passed to the last `attach`."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> list[str]:
        """Writes all rows to files in a folder, and returns the names of the files."""
        ...

    def load(self, folder: str | os.PathLike[str], names: list[str]) -> None:
        """Reads rows from files that `save` wrote.

        Raises:
          ValueError: a file was changed, or belongs to another model.
          OSError: a file cannot be read.
        """
        ...

    def settle(self, settled: HostSettler, *, everywhere: bool) -> None:
        """Brings all rows up to date.

        Args:
          settled: function that brings rows ("row") and their state arrays up to date.
          everywhere: whether to include rows that no batch has touched yet.
        """
        ...


_HOST_ROW = "row"


class _Ahead(NamedTuple):
    """The steps that are prepared while `Optimizer.ahead` is open.

    Attributes:
      first: number of the first step.
      last: updates of this step and later ones change nothing; None if all steps count.
      tables: for each rule and dtype the lag tables of all steps, concatenated. No row
        may have missed more steps than they have lags.
    """

    first: jax.Array
    last: jax.Array | None
    tables: dict[tuple[Rule, Any], row_update.LagTable]


_ahead: contextvars.ContextVar[_Ahead | None] = contextvars.ContextVar(
    "sparsejax_ahead", default=None
)


def updates_whole(rows: int, entries: int, *, in_programs: bool = False) -> bool:
    """Whether it is faster to update a whole kernel than single rows, if its rows drift.

    Args:
      rows: number of rows of the kernel.
      entries: most rows that a batch touches.
      in_programs: whether GPU programs bring rows up to date while they read and write them.
    """
    return rows <= (entries if in_programs else _LARGE_PART * entries)


_static = ("rule", "divided", "beyond", "young")
_settle = Programs(
    row_update.settle,
    inside_others=True,
    static_argnames=_static,
    donate_argnames="trained",
)
_settled = jax.jit(row_update.settle, static_argnames=_static)


def compile_flush(
    optimizer: Optimizer, model: Any, *, deterministic: bool = False
) -> list[Callable[[], None]]:
    """Functions that compile the programs of `Optimizer.flush`, for other threads.

    Rows in host memory need no such program: they are brought up to date in pieces. The
    model and the optimizer may have shapes in place of arrays. They may be changed before the
    functions are called.
    """
    return [
        functools.partial(
            _settle[deterministic].compile_ahead,
            optimizer.rule_of(kernel),
            as_shapes(optimizer._trained(path, kernel.get_value())),
            as_shapes(optimizer.step.get_value()),
            noise=as_shapes(optimizer.noise_of(path)),
            divided=gradients.is_divided(kernel),
            beyond=0,
            young=True,  # rows usually satisfy this, see `are_young`
        )
        for path, kernel in optimizer._drifting(model).items()
    ]


class Optimizer(nnx.Pytree):
    """Trains a model: each `RowParam` row by row, all other parameters with optax.

    >>> layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
    >>> int(Optimizer(layer, optimizers.adam(1e-3)).step[...])
    0

    ::

        optimizer = Optimizer(model, adam(1e-3))

        @sj.jit
        def step(model, optimizer, x, y):
            def loss_fn(model):
                return loss(model(x), y)
            value, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return value

        optimizer.flush(model)                    # at the end

    Under `sj.jit` kernels and their state are updated in place. All state is in
    `nnx.OptState` variables: a checkpoint of `nnx.state((model, optimizer))`, taken at
    any step, is complete.

    State is kept in float32, also for a parameter in bfloat16. Such a parameter is
    updated in float32, and then rounded at random with an unchanged expectation. The random
    bits depend on (seed, step, row, column) only: not on the mesh, the implementation or
    the order of the work. See docs/optimizers.md.

    Args:
      model: the model to train, with its initial parameters.
      rule: one of `sparsejax.optimizers`, such as `adam(1e-3)`. A `RowParam` that was made
        with a rule of its own, such as a table of an `EmbeddingCollection`, keeps that rule.
      wrt: which Variables to train.
      dense: an optax transformation for all other parameters, such as `optax.adam(1e-3)`;
        by default they have `rule` too.
      seed: seed of the random rounding of parameters in bfloat16.

    Attributes:
      step: `[]` int32 variable, the number of steps done.
      rounding: for each parameter in bfloat16, by its path, a `[]` int32 variable: the seed
        of its rounding. Other parameters are rounded to nearest.
    """

    @promoting()
    def __init__(
        self,
        model: Any,
        rule: Rule,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
        dense: optax.GradientTransformation | None = None,
        seed: int = 0,
    ):
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rule must be one of sparsejax.optimizers ({', '.join(rules.NAMES)}), got "
                f"{type(rule).__name__}; for an optax rule use nnx.Optimizer and "
                "nnx.value_and_grad"
            )
        if isinstance(dense, Rule):
            raise TypeError(
                f"dense must be an optax transformation, got the rule {dense.name}; give "
                f"optax's {dense.name}, or {dense.name}(...).dense()"
            )
        self.rule, self.wrt, self.transformation = rule, wrt, dense
        self.step = nnx.OptState(jnp.zeros((), jnp.int32))
        parameters = jax.tree.map(_wide, self._ordinary(model))
        state = self._transformation().init(parameters)
        self.dense = nnx.data(jax.tree.map(nnx.OptState, state))
        self.rows = nnx.data(
            {
                _key(path): _init_rows(self.rule_of(kernel), kernel)
                for path, kernel in gradients.row_params(model, wrt).items()
            }
        )
        self.rounding = nnx.data(
            {
                _key(path): nnx.OptState(_seed_of(path, seed))
                for path, variable in nnx.to_flat_state(nnx.state(model, wrt))
                if variable.dtype == jnp.bfloat16
            }
        )

    def noise_of(self, path: Path) -> Noise | None:
        """The noise that rounds a parameter at random; None rounds it to nearest."""
        seed = self.rounding.get(_key(path))
        return None if seed is None else Noise(seed.get_value())

    def rule_of(self, kernel: RowParam) -> Rule:
        """The rule that trains this kernel: its own, or the optimizer's."""
        return kernel.get_metadata().get("rule") or self.rule

    def _transformation(self) -> optax.GradientTransformation:
        return self.rule.dense() if self.transformation is None else self.transformation

    def _drifting(self, model: Any) -> dict[Path, RowParam]:
        """The kernels of a model whose rows also change in steps that do not touch them."""
        kernels = gradients.row_params(model, self.wrt)
        return {p: k for p, k in kernels.items() if self.rule_of(k).drifts}

    def _ordinary(self, tree: Any) -> dict[str, jax.Array]:
        """The parameters (or gradients) of a model that are not `RowParam`s."""
        wanted = nnx.All(self.wrt, nnx.Not(RowParam))
        variables = nnx.to_flat_state(nnx.state(tree, wanted))
        return {_key(path): variable[...] for path, variable in variables}

    def value_and_grad(
        self,
        f: Callable[..., Any],
        *,
        has_aux: bool = False,
        dense: gradients.Dense = "error",
    ) -> Callable[..., Any]:
        """`sparsejax.value_and_grad` that reads rows as the dense rule would have updated them.

        Rows are brought up to date while they are read, and not written. If they drift and the
        batch may touch a large part of a kernel, an update of the whole kernel is
        faster: it is brought up to date in place, and its gradient is a dense array. A
        kernel that the loss also reads elsewhere (`dense="allow"`) has a dense gradient
        too.
        """
        return gradients.value_and_grad_with(
            self._plan, f, wrt=self.wrt, has_aux=has_aux, dense=dense
        )

    @promoting()
    def update(self, model: Any, grads: Any, *, updated: Sequence[Path] = ()) -> None:
        """Applies one step: updates the parameters of `model` and the optimizer's state.

        Args:
          model: the parameters are updated in place.
          grads: gradients from `value_and_grad`, possibly clipped or accumulated.
          updated: paths of parameters that are no `RowParam` and that the caller updates
            in this step, together with their `state_of`. Their gradients are not read.

        Raises:
          ValueError: the optimizer was made for another model; a gradient is missing or has
            another shape; or it was computed from rows that may be out of date: by
            `sparsejax.value_and_grad` with a rule under which rows drift. (Dense gradients of
            such rows, from `nnx.value_and_grad`, raise too, or under tracing make the rows
            NaN.)
        """
        self._check_made_for(model)
        flat = dict(nnx.to_flat_state(grads))
        step, made = self.step[...], _ahead.get()
        counts = None if made is None or made.last is None else step < made.last
        for path, kernel in gradients.row_params(model, self.wrt).items():
            if path not in flat:
                raise ValueError(
                    f"grads has no gradient of '{_dotted(path)}'; make it with "
                    "optimizer.value_and_grad, for the same model"
                )
            leaf = flat.pop(path)
            g = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            if g.shape != kernel.shape:
                raise ValueError(
                    f"the gradient of '{_dotted(path)}' has shape {g.shape}, the "
                    f"kernel {kernel.shape}"
                )
            moved = self._moved(path, kernel, g, step, counts)
            self._set_trained(path, kernel, moved)
            if gradients.is_divided(kernel) and mesh_is_set():
                flat = _after(moved, flat)
        self._update_ordinary(model, nnx.from_flat_state(flat), updated)
        self.step[...] = step + (1 if counts is None else counts.astype(step.dtype))

    @promoting()
    def add_rows(self, model: Any, known: Mapping[Path, int]) -> None:
        """Adds state for rows that `growth.add_rows` added to parameters.

        The state of known rows does not change. New rows start as in a new optimizer, at this
        step.

        Args:
          model: a model whose parameters already have the new rows.
          known: for the path of each such parameter, its number of rows before.

        Raises:
          NotImplementedError: the state of `dense=...` has arrays without a row for each row.
        """
        step = self.step[...]
        for path, kernel in gradients.row_params(model, self.wrt).items():
            if path not in known:
                continue
            fresh = _init_rows(self.rule_of(kernel), kernel)
            for name, variable in self._rows_of(path).items():
                value = _at_step(name, fresh[name][...], step)
                growth.with_first_rows(variable, value, known[path])
        rows = {_key(path): count for path, count in known.items()}
        parameters = jax.tree.map(_wide, self._ordinary(model))
        fresh = self._transformation().init(parameters)

        def grow(place, variable, value):
            before, after = jnp.shape(variable[...]), jnp.shape(value)
            key = getattr(place[-1], "key", None) if place else None
            # Some optimizer states have one number for each row, such as row-wise Adagrad's.
            if (
                key in rows
                and before[1:] == after[1:]
                and after[:1] == parameters[key].shape[:1]
            ):
                growth.with_first_rows(variable, value, rows[key])
            elif before != after:
                raise NotImplementedError(
                    f"the optimizer's dense=... keeps an array of shape {before} for "
                    "parameters that get more rows; it must have a row for each"
                )

        is_variable = lambda node: isinstance(node, nnx.Variable)
        jax.tree_util.tree_map_with_path(grow, self.dense, fresh, is_leaf=is_variable)

    def rows_within(self, path: Path, kernel: RowParam) -> dict[str, nnx.OptState]:
        """The optimizer state of a kernel's rows, found by the end of the kernel's path.

        Raises:
          ValueError: the optimizer has no such kernel, or several of them.
        """
        return dict(self.rows[self._key_within(path, kernel)])

    def settled_within(
        self, path: Path, kernel: RowParam
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The rows of a kernel and their state as `flush` would write them; nothing is written.

        If rows drift, the result is a copy. See `rows_within`.
        """
        key = self._key_within(path, kernel)
        arrays = {name: variable[...] for name, variable in self.rows[key].items()}
        rule, seed = self.rule_of(kernel), self.rounding.get(key)
        if not rule.drifts:
            return kernel[...], arrays
        last = arrays.pop("last_step")
        trained = _settled(
            rule,
            TrainedKernel(kernel[...], arrays, last),
            Passed(self.step[...], None if seed is None else Noise(seed[...])),
            divided=gradients.is_divided(kernel),
            young=row_update.are_young(rule, last, self.step[...]),
        )
        return trained.w, {**trained.state, "last_step": trained.last}

    def host_settler_within(self, path: Path, kernel: RowParam) -> HostSettler | None:
        """A function that brings rows in host memory up to date, like `flush`; None if none drift.

        See `rows_within`.
        """
        self._key_within(path, kernel)
        rule = self.rule_of(kernel)
        return self._host_settler(rule, deterministic=False) if rule.drifts else None

    def _key_within(self, path: Path, kernel: RowParam) -> str:
        """The name of a kernel, given only the end of its path."""
        end = _key(path)
        found = [key for key in self.rows if f"/{key}".endswith(f"/{end}")]
        if len(found) != 1:
            raise ValueError(
                f"the optimizer trains {len(found)} parameters whose path ends with "
                f"'{_dotted(path)}', expected one"
                + (
                    ": give assign_rows the path of the collection, as `within`"
                    if found
                    else ": make it for the model that has these tables"
                )
            )
        variables = self.rows[found[0]]
        if any(v.shape[0] != kernel.shape[0] for v in variables.values()):
            raise ValueError(
                "the optimizer was made for another model: its state of "
                f"'{found[0]}' has other rows than the {kernel.shape[0]:,} of the kernel"
            )
        return found[0]

    @promoting()
    def move_rows(self, model: Any, moved: Mapping[Path, Moved]) -> None:
        """Makes the state of row parameters whose rows were made from other parameters.

        The state of a row is moved with the row. New rows start as in a new optimizer, at
        this step.

        Args:
          model: the model with the new parameters.
          moved: for the path of each new parameter, how its rows are made.
        """
        step, kernels = self.step[...], gradients.row_params(model, self.wrt)
        rows, rounding = dict(self.rows), dict(self.rounding)
        gone = {_key(path) for move in moved.values() for path in move.sources}
        before = {key: (rows.pop(key), rounding.pop(key, None)) for key in gone}
        for path, move in moved.items():
            kernel = kernels[path]
            states, seeds = zip(*(before[_key(p)] for p in move.sources), strict=True)
            fresh = _init_rows(self.rule_of(kernel), kernel)
            for name, variable in fresh.items():
                value = _at_step(name, variable[...], step)
                arrays = [state[name][...] for state in states]
                variable.set_value(move.make(value, *arrays))
            rows[_key(path)] = fresh
            if seeds[0] is not None:
                rounding[_key(path)] = seeds[0]
        self.rows, self.rounding = nnx.data(rows), nnx.data(rounding)

    @promoting()
    def flush(self, model: Any, *, deterministic: bool = False) -> None:
        """Brings all rows of `model` up to date, in place.

        Call it before weights are used elsewhere: to evaluate without `reading`, to save or
        to export. Do not call it in the middle of a run: a catch-up in two parts rounds
        differently.

        Args:
          model: the model.
          deterministic: whether to compute equal bits in every process on equal GPUs. Not
            inside a program of your own, whose options apply to all of it.

        Raises:
          ValueError: the optimizer was made for a model whose kernels have other rows.
        """
        self._checked_rows(model)
        for path, kernel in self._drifting(model).items():
            if (host := _host_of(kernel)) is not None:
                self._settle_host(path, kernel, host, deterministic)
            self._settle(path, kernel, deterministic=deterministic)

    @contextlib.contextmanager
    def ahead(
        self, model: Any, steps: int, count: jax.Array | None = None
    ) -> Iterator[None]:
        """While this context is open, up to `steps` steps need not search for very old rows.

        A program that runs many steps opens it around their loop. Rows that would meanwhile miss
        more steps than the lag tables have are brought up to date first, in place. The tables
        of all steps are made at once.

        Args:
          model: the model.
          steps: most steps that are done in this context.
          count: number of these steps that count. Updates in later ones do not change the rows of
            `RowParam`s, their state and `step`; they do change other parameters.
        """
        first = self.step[...]
        made = _Ahead(first, None if count is None else first + count, {})
        self._checked_rows(model)
        kernels = self._drifting(model)
        if any(self.rule_of(k).table_lags <= steps for k in kernels.values()):
            kernels = {}
        numbers = made.first + jnp.arange(steps, dtype=jnp.int32)
        for path, kernel in kernels.items():
            rule, dtype = self.rule_of(kernel), accumulator(kernel.dtype)
            if (rule, dtype) not in made.tables:
                made.tables[rule, dtype] = _tables(rule, numbers, dtype)
            table = jax.tree.map(lambda each: each[0], made.tables[rule, dtype])
            self._settle(path, kernel, beyond=rule.table_lags - steps, table=table)
        token = _ahead.set(made)
        try:
            yield
        finally:
            _ahead.reset(token)

    def _table_ahead(
        self, rule: Rule, trained: TrainedKernel
    ) -> row_update.LagTable | None:
        """The rule's table for the current step if `ahead` has computed it, else None."""
        made = _ahead.get()
        key = rule, accumulator(trained.w.dtype)
        if made is None or key not in made.tables:
            return None
        return jax.tree.map(
            functools.partial(_of_step, self.step[...] - made.first), made.tables[key]
        )

    def reading(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Makes `model` read its rows up to date while this context is open; nothing is written.

        ::

            @sj.jit
            def evaluate(model, optimizer, x):
                with optimizer.reading(model):
                    return model(x)

        Use it for results without gradients, inside the function that is compiled.
        """
        self._checked_rows(model)
        kernels = self._drifting(model)
        if not kernels:
            return contextlib.nullcontext()
        readers = {
            path: self._reader(path, self.rule_of(kernel), skip=True)
            for path, kernel in kernels.items()
        }
        settlers = {path: self._settler(path, k) for path, k in kernels.items()}
        return gradients.reading(model, readers, settlers)

    def where(self, model: Any, counts: jax.Array, after: Any, before: Any) -> Any:
        """The state of `(model, self)` after a step if the step counts, otherwise before it.

        Rows of `RowParam`s are always taken from the state after the step: `update` does
        not change them if the step does not count.
        """
        kernels = {(0, *path) for path in gradients.row_params(model, self.wrt)}

        def chosen(path, new, old):
            if path in kernels or path[:2] == (1, "rows"):
                return new
            return jax.tree.map(functools.partial(jax.lax.select, counts), new, old)

        pairs = zip(nnx.to_flat_state(after), nnx.to_flat_state(before), strict=True)
        return nnx.from_flat_state(
            [(path, chosen(path, new, old)) for (path, new), (_, old) in pairs]
        )

    def _rows_of(self, path: Path) -> Mapping[str, nnx.OptState]:
        if _key(path) not in self.rows:
            raise ValueError(
                "the optimizer was made for another model: it has no state of "
                f"'{_dotted(path)}'"
            )
        return self.rows[_key(path)]

    def _check_made_for(self, model: Any) -> None:
        """Raises ValueError if the optimizer's state does not match the model's parameters."""
        kernels = self._checked_rows(model)
        if gone := self.rows.keys() - set(map(_key, kernels)):
            raise ValueError(
                "the optimizer was made for another model: it has state of "
                f"'{min(gone)}', which the model lacks"
            )
        parameters = jax.tree.map(_wide, self._ordinary(model))
        expected = jax.eval_shape(self._transformation().init, parameters)
        here = nnx.as_pure(self.dense)
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(here)]
        wanted = [leaf.shape for leaf in jax.tree.leaves(expected)]
        if jax.tree.structure(here) != jax.tree.structure(expected) or shapes != wanted:
            raise ValueError(
                "the optimizer was made for another model: its state does not have the "
                "shapes of the model's ordinary parameters, which are "
                + ", ".join(f"{key} {value.shape}" for key, value in parameters.items())
            )

    def _checked_rows(self, model: Any) -> dict[Path, RowParam]:
        """The `RowParam`s of a model by path. Raises ValueError if their state has other
        shapes.
        """
        kernels = gradients.row_params(model, self.wrt)
        for path, kernel in kernels.items():
            for variable in self._rows_of(path).values():
                if variable.shape[0] != kernel.shape[0] or (
                    variable.ndim == kernel.ndim
                    and variable.shape[1] not in (1, kernel.shape[1])
                ):
                    raise ValueError(
                        "the optimizer was made for another model: its state of "
                        f"'{_dotted(path)}' has shape {variable.shape}, the kernel "
                        f"{kernel.shape}"
                    )
        return kernels

    def _trained(self, path: Path, w: jax.Array) -> TrainedKernel:
        variables = self._rows_of(path)
        arrays = {name: variable.get_value() for name, variable in variables.items()}
        return TrainedKernel(w, arrays, arrays.pop("last_step", None))

    def _set_trained(
        self, path: Path, kernel: RowParam, trained: TrainedKernel
    ) -> None:
        kernel.set_value(trained.w)
        variables = self._rows_of(path)
        for name, array in trained.state.items():
            variables[name].set_value(array)
        if trained.last is not None:
            variables["last_step"].set_value(trained.last)

    def _settle(
        self,
        path: Path,
        kernel: RowParam,
        *,
        deterministic: bool = False,
        beyond: int = 0,
        table: row_update.LagTable | None = None,
        young: bool = False,
    ) -> None:
        """Brings the rows up to date, in place, that have missed more than `beyond` steps.

        See `row_update.settle`.
        """
        state = self._rows_of(path)

        def settled():
            rule, before = self.rule_of(kernel), self._trained(path, kernel[...])
            # Compiled, so that arrays are donated even if the caller is not inside `jit`.
            trained = _settle[deterministic](
                rule,
                before,
                Passed(self.step[...], self.noise_of(path), table),
                divided=gradients.is_divided(kernel),
                beyond=beyond,
                young=young or row_update.are_young(rule, before.last, self.step[...]),
            )
            arrays = {**trained.state, "last_step": trained.last}
            return [trained.w, *(arrays[name] for name in state)], None

        inplace.overwrite([kernel, *state.values()], settled)

    def host_rows(self, model: Any, *, reading: bool = False) -> dict[Path, HostRows]:
        """The rows of a model that are in host memory, attached to this optimizer's state.

        Args:
          model: the model.
          reading: whether the rows will only be read.

        Raises:
          ValueError: `reading`, and the rows have the state of another optimizer.
        """
        found = {}
        for path, kernel in gradients.row_params(model, self.wrt).items():
            if (host := _host_of(kernel)) is not None:
                state, rule = self._rows_of(path), self.rule_of(kernel)
                host.attach(kernel, state, rule, reading=reading)
                found[path] = host
        return found

    def _settle_host(
        self, path: Path, kernel: RowParam, host: HostRows, deterministic: bool
    ) -> None:
        """Brings a kernel's rows in host memory up to date."""
        if isinstance(kernel.get_raw_value(), jax.core.Tracer):
            raise ValueError(
                f"'{_dotted(path)}' has rows in host memory, which a compiled function cannot "
                "write: call flush outside of it"
            )
        host.check_state(self._rows_of(path))  # a copied model may have outdated state
        rule = self.rule_of(kernel)
        settled = self._host_settler(rule, deterministic=deterministic)
        # Weight decay also changes rows that no batch has touched yet.
        host.settle(settled, everywhere=rule.weight_decay > 0)

    def _host_settler(self, rule: Rule, *, deterministic: bool) -> HostSettler:
        """A function that brings rows from host memory up to date, for a rule that drifts."""
        step = self.step[...]

        def settled(rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            state = dict(rows)
            w, last = state.pop(_HOST_ROW), state.pop("last_step")
            after = _settle[deterministic](
                rule,
                TrainedKernel(w, state, last),
                Passed(step),
                divided=False,
                beyond=0,
                young=row_update.are_young(rule, last, step),
            )
            return {_HOST_ROW: after.w, "last_step": after.last, **after.state}

        return settled

    def _settler(self, path: Path, kernel: RowParam) -> gradients.Settler:
        """Makes a function that returns the up-to-date kernel without changing the stored one."""

        def settled(w: jax.Array) -> jax.Array:
            trained, step = self._trained(path, w), self.step[...]
            passed, rule = Passed(step, self.noise_of(path)), self.rule_of(kernel)
            divided = gradients.is_divided(kernel)
            return jax.lax.cond(
                jnp.any(trained.stale_rows(step)),
                lambda: row_update.settle(rule, trained, passed, divided=divided).w,
                lambda: w,
            )

        return settled

    def _plan(self, model, elsewhere, capacities) -> gradients.UpdatePlan:
        self._check_made_for(model)
        kernels = self._drifting(model)
        elsewhere = elsewhere & kernels.keys()
        whole = {
            path
            for path, kernel in kernels.items()
            if capacities[path] and self._whole(path, kernel, capacities[path])
        }
        for path in whole | elsewhere:
            kernel = kernels[path]
            trained = self._trained(path, kernel[...])
            table = self._table_ahead(self.rule_of(kernel), trained)
            self._settle(path, kernel, table=table, young=table is not None)
        rest = kernels.keys() - whole - elsewhere
        readers = {
            path: self._reader(path, self.rule_of(kernels[path])) for path in rest
        }
        return gradients.UpdatePlan(readers, frozenset(whole))

    def _whole(self, path: Path, kernel: RowParam, entries: int) -> bool:
        if _host_of(kernel) is not None:  # most rows of the kernel are in host memory
            return False
        rows, hidden = kernel.shape
        w = kernel[...]
        rule, noise = self.rule_of(kernel), self.noise_of(path)
        in_programs = row_update.in_programs(rule, noise)
        in_programs &= row_update.takes_rows(hidden)
        in_programs &= mosaic_is_fastest(
            w, entries, divided=gradients.is_divided(kernel)
        )
        return updates_whole(rows, entries, in_programs=in_programs)

    def _reader(
        self, path: Path, rule: Rule, *, skip: bool = False
    ) -> gradients.Reader:
        """A function that reads rows and brings them up to date.

        Args:
          skip: whether to read the kernel directly if all rows are up to date. (Not under
            differentiation: the branches would have copies of the kernel as residuals.)
        """

        def read(x: LookupRows, w: jax.Array, implementation: Implementation):
            trained, step = self._trained(path, w), self.step[...]

            def plain():
                return gather.gather_matmul(x, w, implementation=implementation)

            def current():
                table = None if skip else self._table_ahead(rule, trained)
                passed = Passed(step, self.noise_of(path), table)
                return row_update.gather_current(
                    rule, trained, x, passed, implementation=implementation
                )

            if x.nse == 0:
                return plain()
            if not skip:
                return current()
            return jax.lax.cond(jnp.any(trained.stale_rows(step)), current, plain)

        return read

    def _moved(
        self,
        path: Path,
        kernel: RowParam,
        g: Any,
        step: jax.Array,
        counts: jax.Array | None,
    ) -> TrainedKernel:
        trained, rule = self._trained(path, kernel[...]), self.rule_of(kernel)
        noise = self.noise_of(path)
        if isinstance(g, RowGradient):
            if counts is not None:
                g = g.where(counts)
            if rule.drifts and not g.current:
                raise ValueError(
                    f"rows drift under {rule.name}, but this gradient of "
                    f"'{_dotted(path)}' was taken at rows that may be out of date; "
                    "use optimizer.value_and_grad, not sparsejax.value_and_grad"
                )
            passed = Passed(step, noise, self._table_ahead(rule, trained))
            if isinstance(g, RowTerms):
                return row_update.step_terms(rule, trained, g.terms, passed)
            if g.ids.shape[0] == 0:
                return trained
            return row_update.step_rows(
                rule, trained, g.ids, g.values, passed, divided=g.divided
            )
        if rule.drifts:
            g = _refuse_stale(path, trained, g, step)
        moved = row_update.step_whole(rule, trained, g, step, noise=noise)
        if counts is None:
            return moved
        return jax.tree.map(functools.partial(jnp.where, counts), moved, trained)

    def _update_ordinary(self, model: Any, grads: Any, updated: Sequence[Path]) -> None:
        others = {_key(path) for path in updated}
        old = _without(self._ordinary(model), others)
        parameters = jax.tree.map(_wide, old)
        slopes = jax.tree.map(_wide, _without(self._ordinary(grads), others))
        before = nnx.as_pure(self.dense)
        updates, after = self._transformation().update(
            slopes, _without(before, others), parameters
        )
        moved: Any = optax.apply_updates(parameters, updates)
        paths = {_key(path): path for path, _ in nnx.to_flat_state(nnx.state(model))}
        step = self.step[...] + 1
        new = {
            paths[key]: row_update.narrowed(
                w, old[key].dtype, self.noise_of(paths[key]), step
            )
            for key, w in moved.items()
        }
        nnx.update(model, nnx.from_flat_state(new))
        # Restores the parts that were removed before.
        after = jax.tree.map(
            lambda b, a: {**b, **a} if isinstance(b, dict) else a,
            before,
            after,
            is_leaf=lambda node: isinstance(node, dict),
        )
        nnx.update(self.dense, nnx.state(after))

    def state_of(self, paths: Sequence[Path]) -> dict[Path, State]:
        """The state arrays of parameters that are no `RowParam`, with the rule's names.

        Raises:
          NotImplementedError: the state of `rule.dense()` has no such arrays, or the
            optimizer was made with `dense=`.
        """
        found: dict[Path, State] = {path: {} for path in paths}
        for path, (names, variables) in self._dense_arrays(paths).items():
            found[path] = {n: v[...] for n, v in zip(names, variables, strict=True)}
        return found

    def set_state_of(self, states: Mapping[Path, State]) -> None:
        """Replaces the state arrays that `state_of` returned."""
        for path, (names, variables) in self._dense_arrays(list(states)).items():
            for name, variable in zip(names, variables, strict=True):
                variable.set_value(states[path][name])

    def _dense_arrays(self, paths: Sequence[Path]):
        """For each parameter, the names and variables of its state."""
        if self.transformation is not None:
            raise NotImplementedError(
                "with dense=... an optimizer cannot move "
                f"'{_dotted(paths[0])}' within another program, as a fused update does; "
                "leave fused out"
            )
        leaves = jax.tree_util.tree_leaves_with_path(
            self.dense, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        wanted = sorted(self.rule.init((1, 1)))
        found = {}
        for path in paths:
            ours = {
                getattr(place[-2], "name", None): variable
                for place, variable in leaves
                if getattr(place[-1], "key", None) == _key(path)
            }
            if sorted(map(str, ours)) != wanted:
                raise NotImplementedError(
                    f"{self.rule.name}.dense() keeps {sorted(map(str, ours))} of "
                    f"'{_dotted(path)}', but its rows keep {wanted}: they must have "
                    "the same names"
                )
            found[path] = wanted, [ours[name] for name in wanted]
        return found


def _tables(rule: Rule, numbers: jax.Array, dtype: Any) -> row_update.LagTable:
    """The rule's `lag_table` after each number of steps, stacked along a new first axis."""

    def table(count):
        return rule.lag_table(count, dtype)

    # On a CPU, a product of many matrices has other bits if the matrices are grouped differently,
    # as after a resume. So each step has its own product. On a GPU the bits are equal, and
    # separate products would launch ten programs for each step.
    return jax.lax.platform_dependent(
        numbers, cpu=functools.partial(jax.lax.map, table), default=jax.vmap(table)
    )


def _of_step(place: jax.Array, tables: jax.Array) -> jax.Array:
    """The table of one step."""
    # For a GPU, a condition that is always true, but XLA cannot know this: otherwise it would copy
    # a part of the tables, outside the graph of the step and on another stream.
    return jax.lax.platform_dependent(
        place,
        tables,
        cpu=lambda place, tables: tables[place],
        default=lambda place, tables: jnp.where(place >= 0, tables[place], 0),
    )


def _host_of(kernel: RowParam) -> HostRows | None:
    return kernel.get_metadata().get("host")


def _wide(array: jax.Array) -> jax.Array:
    """Converts a parameter or gradient to the dtype in which rules compute."""
    return array.astype(accumulator(array.dtype))


def _seed_of(path: Path, seed: int) -> jax.Array:
    """A random seed for the parameter with this path."""
    name = zlib.crc32(f"{seed}/{_key(path)}".encode())
    return jnp.asarray(np.uint32(name).astype(np.int32))


def _after(trained: TrainedKernel, flat: Mapping[Path, Any]) -> dict[Path, Any]:
    """Makes row gradients depend on updated rows, so that other gradients are read after that.

    On a mesh, rows are updated while devices add up the gradients of whole parameters, with which
    little else overlaps.
    """
    whole = {
        path: leaf
        for path, leaf in flat.items()
        if isinstance(leaf, nnx.Variable)
        and not isinstance(leaf, RowParam)
        and not any(leaf.get_metadata().get("out_sharding") or ())
    }

    def part(whole, w):
        # This is always true, but the compiler cannot know it.
        moved = w[0, 0].astype(jnp.float32).view(jnp.int32) | 1 != 0
        return jax.tree.map(lambda g: jnp.where(moved, g, 0), whole)

    specs = P(), P("model")
    return {**flat, **call_on_each_device(part, (whole, trained.w), specs, P())}


def _without(tree: Any, keys: AbstractSet[str]) -> Any:
    """A copy of a tree whose dictionaries lack some keys."""
    return jax.tree.map(
        lambda node: (
            {key: value for key, value in node.items() if key not in keys}
            if isinstance(node, dict)
            else node
        ),
        tree,
        is_leaf=lambda node: isinstance(node, dict),
    )


def _key(path: Path) -> str:
    """A unique name for a path, also if parts of the path contain "/"."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return "/".join(parts)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _refuse_stale(
    path: Path, trained: TrainedKernel, g: jax.Array, step: jax.Array
) -> jax.Array:
    """Returns a dense gradient if it was computed from up-to-date rows, else raises ValueError.

    In a traced program, the result is NaN in rows that were not up to date.
    """
    stale = trained.stale_rows(step)
    if isinstance(stale, jax.core.Tracer):
        return jnp.where(stale[:, None], jnp.nan, g)
    if stale.any():
        raise ValueError(
            f"this dense gradient of '{_dotted(path)}' was taken at rows that are not "
            "up to date; use optimizer.value_and_grad, not nnx.value_and_grad"
        )
    return g


def _init_rows(rule: Rule, kernel: RowParam) -> dict[str, nnx.OptState]:
    lies = out_sharding(P("model")) if gradients.is_divided(kernel) else {}
    make = jit_sharded(_first_state, lies.get("out_sharding"), static=(0,))
    arrays = make(rule, kernel[...])
    return {name: nnx.OptState(array, **lies) for name, array in arrays.items()}


def first_state(rule: Rule, w: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    """The initial state of rows with the weights `w` that are added at this step."""
    arrays = _first_state(rule, w).items()
    return {name: _at_step(name, array, step) for name, array in arrays}


def _at_step(name: str, fresh: jax.Array, step: jax.Array) -> jax.Array:
    """Replaces the fresh step number of new rows by the current step."""
    if name != "last_step":
        return fresh
    # With 0, a new row would have missed all earlier steps.
    return jnp.where(fresh == 0, step, fresh)


def _first_state(rule: Rule, w: jax.Array) -> dict[str, jax.Array]:
    dtype = accumulator(w.dtype)
    arrays = {n: a.astype(dtype) for n, a in rule.start(w.astype(dtype)).items()}
    if rule.decays:
        # Weight decay changes a row from the first step on; other rules only after it is touched.
        first = 0 if rule.weight_decay else row_update.NEVER
        arrays["last_step"] = jnp.full(w.shape[0], first, jnp.int32)
    return arrays
