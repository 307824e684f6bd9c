"""A decorator that compiles the step of a custom training loop.

At each call, `nnx.jit` splits modules into arrays and merges them again. This takes milliseconds
of Python, longer than a GPU takes for a step. Here modules are split once, and each later call
passes only their arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import jax
from flax import nnx

from sparsejax.engine.static import check_hashable
from sparsejax.mesh.layout import with_shardings
from sparsejax.mesh.xla_options import Programs, is_timed
from sparsejax.optimizers import inplace

# Number of combinations of modules that a step keeps split; others are split at each call.
_REMEMBERED = 16


@overload
def jit[**Arguments, Result](
    f: Callable[Arguments, Result],
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    deterministic: bool = False,
) -> Callable[Arguments, Result]: ...


@overload
def jit[**Arguments, Result](
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    deterministic: bool = False,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]: ...


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    deterministic: bool = False,
) -> Any:
    """Compiles a step of a training loop, with the optimizations of `fit`.

    ::

        @sj.jit
        def step(model, optimizer, x, y):
            def loss_fn(model):
                return loss(model(x), y)
            value, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return value

        for x, y in batches:
            losses.append(step(model, optimizer, x, y))   # does not wait for the step
        optimizer.flush(model)                            # at the end

    >>> from flax import nnx
    >>> double = jit(lambda layer, x: 2 * layer(x))
    >>> double(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3))).shape
    (4, 2)

    It is used like `nnx.jit`. Any argument, or part of one, may be an NNX module: a model, an
    `sj.Optimizer` or `nnx.Optimizer`, `nnx.Rngs`, an `nnx.Metric`, an `nnx.Variable`. It differs
    in these points:

    - Modules are split into arrays at the first call. Later calls with the same modules pass only
      these arrays, which is much faster.
    - These arrays are always donated: parameters and state are overwritten in place. An array that
      another object also holds, such as `nnx.clone(model)`, is copied first and not changed.
    - On a GPU the step runs as one CUDA graph, including its loops, and is compiled without the
      autotuning that `fit` omits, too.
    - Under `jax.set_mesh(make_mesh(...))`, arrays that are not divided are copied to every device
      at the first call, and every array keeps its sharding.
    - Attributes of modules other than arrays must be hashable: a tuple in place of a list. A
      change inside a list would not be detected.
    - The step can change values of variables. It cannot add or remove variables or modules, and it
      returns arrays, not modules.

    If a module has another mode (`model.eval()`), other settings, or arrays of other shapes, the
    step is compiled for it. Inside another traced function, such as `jax.grad` or `nnx.scan`, the
    step becomes a part of that function.

    Args:
      f: function to compile. Without it, a decorator with these options is returned.
      static_argnums: positions of arguments that are hashable Python values, not arrays; the step
          is compiled for each value.
      static_argnames: names of arguments that are Python values, not arrays.
      donate_argnums: positions of other arguments whose memory the step may reuse. Modules are
          always donated.
      donate_argnames: names of other arguments whose memory the step may reuse.
      deterministic: whether results are bitwise equal in every process on GPUs of one kind, see
          `fit`.

    Returns:
      A compiled function with the arguments of `f`.

    Raises:
      TypeError: (when called) a static argument or a setting of a module cannot be hashed,
        or the step returns a module.
      ValueError: (when called) a module has other parameters than at its first call; the step adds
          or removes variables of a module; the memory of a module was donated to another program;
          the optimizer was made for another model.
    """
    if f is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            deterministic=deterministic,
        )
    if not callable(f):
        raise TypeError(f"expected a function to compile, got {type(f).__name__}")
    static = _Named.of(f, "static", static_argnums, static_argnames)
    donated = _Named.of(f, "donate", donate_argnums, donate_argnames)
    if static.positions & donated.positions or static.names & donated.names:
        raise ValueError(f"an argument of {_name(f)} is both static and donated")
    step = _Step(f, static, donated, deterministic)

    @functools.wraps(f)
    def call(*arguments, **named):
        return step(arguments, named)

    return call


class _Named(NamedTuple):
    """A selection of arguments of a function, by position and by name."""

    positions: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        what: str,
        numbers: int | Sequence[int],
        names: str | Sequence[str],
    ) -> _Named:
        positions = [numbers] if isinstance(numbers, int) else list(numbers or ())
        chosen = [names] if isinstance(names, str) else list(names or ())
        try:
            parameters = list(inspect.signature(f).parameters.values())
        except ValueError:  # some functions written in C have no signature
            return cls(frozenset(positions), frozenset(chosen))
        kinds = inspect.Parameter
        by_place = [
            p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        any_place = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
        any_name = any(p.kind == kinds.VAR_KEYWORD for p in parameters)
        known = {p.name for p in parameters}
        for i, number in enumerate(positions):
            if number < 0:
                number = positions[i] = number + len(by_place)
            if number < 0 or (number >= len(by_place) and not any_place):
                raise ValueError(
                    f"{what}_argnums has {numbers}, but {_name(f)} has "
                    f"{len(by_place)} arguments by position"
                )
        for name in chosen:
            if name not in known and not any_name:
                raise ValueError(
                    f"{what}_argnames has {name!r}, but the arguments of {_name(f)} are "
                    f"{', '.join(sorted(known))}"
                )
        positions += [by_place.index(name) for name in chosen if name in by_place]
        chosen += [by_place[n] for n in positions if n < len(by_place)]
        return cls(frozenset(positions), frozenset(chosen))

    def split[Key: (int, str)](
        self, arguments: dict[Key, Any]
    ) -> tuple[dict[Key, Any], dict[Key, Any]]:
        """Divides arguments by position or by name into the selected ones and the others."""
        if not self.positions and not self.names:
            return {}, arguments
        here = {
            key: value
            for key, value in arguments.items()
            if key in (self.positions if isinstance(key, int) else self.names)
        }
        return here, {k: v for k, v in arguments.items() if k not in here}


class _How(NamedTuple):
    """The part of a compiled program's key that does not depend on shapes of arrays.

    Attributes:
      graphdef: the graph of the modules.
      structure: tree of the state, as in `inplace.Flattened`.
      layout: order of the arrays, as in `inplace.Flattened`.
      mesh: the current mesh.
      trees: tree structures of the arguments that are not donated, and of the donated ones.
      modules: for each leaf of the arguments, the number of the module in its place, or None.
      static: static arguments by position or name, with their types.
    """

    graphdef: nnx.GraphDef
    structure: Any
    layout: tuple[jax.sharding.Sharding, ...] | None
    mesh: Any
    trees: tuple[Any, Any]
    modules: tuple[int | None, ...]
    static: tuple[tuple[int | str, type, Any], ...]


class _Step:
    """A function, its compiled programs, and the modules with which it was called."""

    def __init__(
        self,
        f: Callable[..., Any],
        static: _Named,
        donated: _Named,
        deterministic: bool,
    ):
        self._f, self._static, self._donated = f, static, donated
        self._deterministic = deterministic
        self._programs: dict[_How, Programs] = {}
        self._split: dict[Any, _Split] = {}

    def __call__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        static, by_place = self._static.split(dict(enumerate(arguments)))
        static_names, by_name = self._static.split(named)
        donated, by_place = self._donated.split(by_place)
        donated_names, by_name = self._donated.split(by_name)
        kept, tree = jax.tree.flatten((by_place, by_name), is_leaf=_is_module)
        given, given_tree = jax.tree.flatten(
            (donated, donated_names), is_leaf=_is_module
        )
        are_modules = tuple(map(_is_module, kept + given))
        modules = list(itertools.compress(kept + given, are_modules))
        if modules:
            kept = [leaf for leaf in kept if not _is_module(leaf)]
            given = [leaf for leaf in given if not _is_module(leaf)]
        if _are_traced(kept) or _are_traced(given):
            return self._within(arguments, named)
        key = (
            (tree, given_tree),
            are_modules,
            tuple((k, type(v), v) for k, v in [*static.items(), *static_names.items()]),
            None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh(),
            tuple(map(id, modules)),
        )
        try:
            split = self._split.get(key)
        except TypeError:
            _check_hashable(self._f, key[2])
            raise
        try:
            if split is None or not split.is_of(modules):
                if _are_traced(jax.tree.leaves(nnx.state(modules))):
                    return self._within(arguments, named)
                split = self._of(key, modules, split)
            program = split.programs[self._deterministic].program
            return split.flat.run(
                lambda values: program(values, given, kept, split.flat.constants)
            )
        except (RuntimeError, ValueError) as error:
            _check_alive(modules, error)
            raise

    def _within(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the step as a part of another program, which is being traced."""
        if self._deterministic:
            raise ValueError(
                f"{_name(self._f)} is deterministic and cannot be called within another "
                "program, whose options hold for all of it; make that one deterministic"
            )
        return self._f(*arguments, **named)

    def _of(self, key: Any, modules: list[Any], before: _Split | None) -> _Split:
        """Splits modules, and finds the compiled program for them."""
        trees, are_modules, static, mesh, _ = key
        unique = {id(module): module for module in modules}
        places = {each: place for place, each in enumerate(unique)}
        flat = inplace.Flattened(tuple(unique.values()))
        check_hashable(flat.graphdef, *unique.values())
        numbers = iter([places[id(module)] for module in modules])
        how = _How(
            flat.graphdef,
            flat.structure,
            flat.layout,
            mesh,
            trees,
            tuple(next(numbers) if is_one else None for is_one in are_modules),
            static,
        )
        if before is not None and before.is_alive(modules):
            _check_same_variables(self._f, before, modules)
        if how not in self._programs:
            timed = is_timed(modules)
            self._programs[how] = _programs(self._f, how, timed)
        while len(self._split) >= _REMEMBERED:
            del self._split[next(iter(self._split))]
        # A weak reference to this step, so that neither keeps the other in memory.
        forget = functools.partial(_forget, weakref.ref(self), key)
        self._split[key] = _Split(flat, modules, self._programs[how], forget)
        return self._split[key]


class _Split:
    """Modules that were split into arrays, and the data that detects later changes of the modules.

    Attributes:
      flat: arrays of the modules.
      programs: compiled programs, which take and return these arrays.
      paths: paths of the modules' variables.
    """

    def __init__(
        self,
        flat: inplace.Flattened,
        modules: list[Any],
        programs: Programs,
        forget: Callable[[Any], None],
    ):
        self.flat, self.programs = flat, programs
        self.paths = _paths(modules)
        self._modules = [_reference(module, forget) for module in modules]
        # Containers inside the modules, and their contents when they were split.
        self._held: list[tuple[Any, list[Any], list[Any]]] = []
        for _, node in nnx.iter_graph(modules):
            if isinstance(node, nnx.Pytree) or dataclasses.is_dataclass(node):
                node = getattr(node, "__dict__", {})
            if isinstance(node, dict):
                self._held.append((node, list(node), list(node.values())))
            elif isinstance(node, list) and node is not modules:
                self._held.append((node, [], list(node)))
        self._metadata = [v.get_metadata() for v in flat.variables]

    def is_alive(self, modules: list[Any]) -> bool:
        """Whether the split modules still exist, and these are not new ones at the old memory
        addresses.
        """
        return all(
            reference() is module
            for reference, module in zip(self._modules, modules, strict=True)
        )

    def is_of(self, modules: list[Any]) -> bool:
        """Whether these are the split modules, and only values of their variables were changed."""
        for container, keys, values in self._held:
            if len(container) != len(values):
                return False
            if isinstance(container, dict):
                if list(container) != keys:
                    return False
                container = container.values()
            if not all(map(operator.is_, container, values)):
                return False
        try:
            same = self._metadata == [v.get_metadata() for v in self.flat.variables]
        except ValueError:  # comparing arrays in metadata by == raises an error
            return False
        return same and self.is_alive(modules)


def _programs(f: Callable[..., Any], how: _How, timed: bool) -> Programs:
    """Compiles a function into programs from arrays to arrays; the modules' arrays are donated."""

    def program(values, given, kept, constants):
        state = jax.tree.unflatten(how.structure, jax.tree.leaves(values))
        modules = nnx.merge(how.graphdef, state, constants, copy=True)
        fixed = jax.tree.leaves(nnx.split(modules, inplace.is_variable, ...)[2])
        arrays = iter([*kept, *given])
        leaves = [next(arrays) if n is None else modules[n] for n in how.modules]
        count = how.trees[0].num_leaves
        by_place, by_name = jax.tree.unflatten(how.trees[0], leaves[:count])
        more, more_names = jax.tree.unflatten(how.trees[1], leaves[count:])
        static = {key: value for key, _, value in how.static}
        by_place = {k: v for k, v in static.items() if isinstance(k, int)} | by_place
        by_name = {k: v for k, v in static.items() if isinstance(k, str)} | by_name
        by_place |= more
        result = f(
            *(by_place[i] for i in range(len(by_place))), **by_name, **more_names
        )
        _check_result(f, result)
        _check_kept(f, how, modules, fixed)
        after = [v.get_raw_value() for v in inplace.variables_of(modules)]
        return with_shardings(after, how.layout), result

    program.__name__ = _name(f)  # shown in profiles
    return Programs(
        program, loops_in_graphs=True, timed_fusions=timed, donate_argnums=(0, 1)
    )


def _forget(step: Callable[[], _Step | None], key: Any, _: Any) -> None:
    """Removes the entry of garbage-collected modules."""
    if (alive := step()) is not None:
        alive._split.pop(key, None)


def _reference(module: Any, forget: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return weakref.ref(module, forget)
    except TypeError:  # a Variable does not support weak references
        return lambda: module


def _is_module(node: Any) -> bool:
    return _are_modules(type(node))


# Cached: `isinstance` takes microseconds for a Variable, and a step has many leaves.
@functools.cache
def _are_modules(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree | nnx.Variable)


def _are_traced(leaves: Sequence[Any]) -> bool:
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", repr(f))


def _paths(modules: Sequence[Any]) -> list[str]:
    state = nnx.state(modules, inplace.is_variable)
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def _check_hashable(f: Callable[..., Any], static: Sequence[tuple]) -> None:
    """Raises TypeError if a static argument cannot be hashed."""
    for key, kind, value in static:
        try:
            hash(value)
        except TypeError as error:
            which = f"{key!r}" if isinstance(key, str) else f"number {key}"
            raise TypeError(
                f"argument {which} of {_name(f)} is static, and a {kind.__name__} cannot "
                "be hashed; pass a tuple, a frozen dataclass or an array that is not static"
            ) from error


def _check_alive(modules: Sequence[Any], error: Exception) -> None:
    """Raises ValueError if the memory of a variable was donated to another program."""
    for path, variable in nnx.to_flat_state(nnx.state(modules, inplace.is_variable)):
        value = variable.get_raw_value()
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(
                f"the array of '{'.'.join(map(str, path[1:]))}' was donated to another "
                "program, which has overwritten it; use what that program returned, or "
                "give it a copy (jnp.copy)"
            ) from error


def _check_same_variables(
    f: Callable[..., Any], before: _Split, modules: Sequence[Any]
) -> None:
    """Raises ValueError if variables were added to modules or removed from them."""
    was, now = set(before.paths), set(_paths(modules))
    if was != now:
        changes = [f"new is '{_of_one(path)}'" for path in sorted(now - was)]
        changes += [f"gone is '{_of_one(path)}'" for path in sorted(was - now)]
        raise ValueError(
            f"a module has other variables than in the first call of {_name(f)}: "
            f"{', '.join(changes)}. Make the step anew with sj.jit, and an optimizer "
            "for the parameters that the model has now"
        )


def _of_one(path: str) -> str:
    """A variable's path without the number of its module at the front."""
    return path.partition(".")[2] or path


def _check_result(f: Callable[..., Any], result: Any) -> None:
    """Raises TypeError if a step returns a module."""
    for leaf in jax.tree.leaves(result, is_leaf=_is_module):
        if _is_module(leaf):
            raise TypeError(
                f"{_name(f)} returns a {type(leaf).__name__}; modules are changed in "
                "place: return arrays, such as variable[...]"
            )


def _check_kept(
    f: Callable[..., Any], how: _How, modules: Sequence[Any], fixed: Sequence[Any]
) -> None:
    """Raises ValueError if the step changed anything but the values of variables."""
    graphdef, state, constants = nnx.split(modules, inplace.is_variable, ...)
    now = jax.tree.leaves(constants)
    if len(now) != len(fixed) or not all(map(operator.is_, now, fixed)):
        raise ValueError(
            f"{_name(f)} changes an array that is an attribute of a module; make it an "
            "nnx.Variable"
        )
    if graphdef != how.graphdef or jax.tree.structure(state) != how.structure:
        unfilled = jax.tree.unflatten(how.structure, [0] * how.structure.num_leaves)
        known = {path for path, _ in nnx.to_flat_state(unfilled)}
        paths = {path for path, _ in nnx.to_flat_state(state)} ^ known
        which = ", ".join(sorted(".".join(map(str, path[1:])) for path in paths))
        raise ValueError(
            f"{_name(f)} changes what a module consists of "
            f"({which or 'an attribute or the metadata of a variable'}); a step changes "
            "values of variables alone, so do this before it"
        )
