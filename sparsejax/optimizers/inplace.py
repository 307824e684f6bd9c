"""Programs that overwrite the arrays of variables.

A program to which an array is donated writes its result into the memory of the array. The
array is then deleted for all its holders. One holder may be a copy by `nnx.clone`, which
shares the arrays of its original. An array with another holder is therefore copied first.
The copy wastes no memory, because both values are still needed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.mesh import interrupts
from sparsejax.mesh.layout import mesh_is_set, put_on_mesh, shardings_of, without_mesh


def variables_of(modules: Any) -> list[nnx.Variable]:
    """The variables of NNX modules, in the order of the leaves of `nnx.state`."""
    found = {
        tuple(path): node
        for path, node in nnx.iter_graph(modules)
        if isinstance(node, nnx.Variable)
    }
    flat = nnx.to_flat_state(nnx.state(modules))
    # An array may also be an attribute itself.
    return [found[tuple(path)] for path, _ in flat if tuple(path) in found]


def overwrite[Result](
    variables: Sequence[nnx.Variable],
    program: Callable[[], tuple[Sequence[jax.Array], Result]],
) -> Result:
    """Runs a program that donates the arrays of variables, and stores its results in them.

    Signals such as Ctrl-C are handled after the end, never between program and storing.

    Args:
      variables: the program may donate their arrays; it reads them when called.
      program: function that returns an array for each variable, and a result that is passed on.
    """
    with interrupts.uninterrupted():
        unshare(variables)
        arrays, result = program()
        _store(variables, arrays)
    return result


# Flax asks for each value in which trace it is set: 1.5 us, and a step has a hundred.
_raw_value = inspect.getattr_static(nnx.Variable, "_raw_value", None)
_set_value = getattr(_raw_value, "__set__", nnx.Variable.set_raw_value)


def _store(
    variables: Sequence[nnx.Variable], arrays: Sequence[jax.typing.ArrayLike]
) -> None:
    """Sets the values of variables that were all made in one trace."""
    for variable, array in zip(variables[:1], arrays[:1], strict=True):
        variable.set_raw_value(array)  # raises if this is another trace
    for variable, array in zip(variables[1:], arrays[1:], strict=True):
        _set_value(variable, array)


def is_variable(path: Sequence[Any], node: Any) -> bool:
    """Matches arrays inside `nnx.Variable`s; plain array attributes do not match."""
    return isinstance(node, nnx.Variable)


class Flattened:
    """NNX modules as a list of values, one for each variable: found once, used at each call.

    To split and merge modules takes milliseconds of Python at each call of a program. Here a
    program takes and gives values alone, and overwrites them in place.

    Under `jax.set_mesh(make_mesh(...))`, whatever is not divided is copied to every device.

    Args:
      modules: such as `(model, optimizer)`.

    Attributes:
      variables: all their variables.
      graphdef: the graph of the modules.
      structure: tree of their variables, whose leaves are the values.
      layout: how each array of the variables lies on the mesh; None without one.
      constants: arrays that are attributes themselves, not in a variable.
    """

    def __init__(self, modules: Any):
        self.variables = variables_of(modules)
        unshare(self.variables)  # once placed, they may share memory
        if mesh_is_set():
            state = jax.tree.map(jnp.asarray, nnx.state(modules, is_variable))
            nnx.update(modules, put_on_mesh(state))
        self.graphdef, state, self.constants = nnx.split(modules, is_variable, ...)
        self.layout = shardings_of(state)
        self.structure = jax.tree.structure(state)

    def run[Result](
        self, program: Callable[[Sequence[Any]], tuple[Sequence[Any], Result]]
    ) -> Result:
        """Runs a program on the values, see `overwrite`.

        Args:
          program: function that takes a value for each variable and may donate it; it returns
            as many, and a result that is passed on.
        """
        return overwrite(
            self.variables,
            lambda: program([each.get_raw_value() for each in self.variables]),
        )


def unshare(variables: Sequence[nnx.Variable]) -> None:
    """Copies each array that has a holder other than its variable."""
    # By `map` alone: this runs at each step, before the device has work.
    values = [variable.get_raw_value() for variable in variables]
    if max(map(sys.getrefcount, values), default=0) <= _holders_in_list():
        return
    del values
    if not any(map(_is_shared, variables)):
        return
    gc.collect()  # it may have been garbage that held them
    for variable in variables:
        if _is_shared(variable):
            variable.set_raw_value(_copied(variable.get_raw_value()))


def _is_shared(variable: nnx.Variable) -> bool:
    if not isinstance(variable.get_raw_value(), jax.Array):
        return False
    if isinstance(variable.get_raw_value(), jax.core.Tracer):
        return False  # within a program nothing is overwritten
    return _holders(variable) > _holders_of_own()


def _holders(variable: nnx.Variable) -> int:
    return sys.getrefcount(variable.get_raw_value())


@functools.cache
def _holders_of_own() -> int:
    """`_holders` of an array that only its variable holds; depends on Python's version."""
    return _holders(nnx.Variable(_new()))


@functools.cache
def _holders_in_list() -> int:
    """Number of references to an array that a list holds, too."""
    value = nnx.Variable(_new())
    return max(map(sys.getrefcount, [value.get_raw_value()]))


def _new() -> jax.Array:
    """An array for which nothing is compiled."""
    return jax.device_put(np.zeros((), np.float32))


def _copied(array: jax.Array) -> jax.Array:
    """A copy on the same devices. Processes need not make it together."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _copied(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    with without_mesh():  # each part stays on its device
        # A copy of an array without a fixed place has none, too. Otherwise programs are
        # compiled again.
        if not array.committed:
            return jnp.copy(array)
        parts = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


class HostCopy:
    """The arrays that variables have now, in the memory of the host."""

    def __init__(self, variables: Sequence[nnx.Variable]):
        self._copies = [(v, _on_host(v.get_raw_value())) for v in variables]

    def restore(self) -> None:
        """Gives the variables these values back."""
        for variable, again in self._copies:
            variable.set_raw_value(again())


def _on_host(array: jax.Array) -> Callable[[], jax.Array]:
    """Copies an array to the host; the result puts it back on the same devices."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        again, impl = _on_host(jax.random.key_data(array)), jax.random.key_impl(array)
        return lambda: jax.random.wrap_key_data(again(), impl=impl)
    shape, sharding = array.shape, array.sharding
    parts = {str(part.index): np.array(part.data) for part in array.addressable_shards}
    return lambda: jax.make_array_from_callback(
        shape, sharding, lambda index: parts[str(index)]
    )
