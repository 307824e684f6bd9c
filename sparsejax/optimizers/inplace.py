"""Programs that overwrite the arrays of variables.

A program to which an array is donated writes its result into the memory of the array. The
array is then deleted for all objects that refer to it. One of these may be a copy by
`nnx.clone`, which shares the arrays of its original. So an array with several references is
copied first. The copy wastes no memory, because both values are still needed.
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
    # Arrays that are plain attributes, not in a variable, are omitted.
    return [found[tuple(path)] for path, _ in flat if tuple(path) in found]


def overwrite[Result](
    variables: Sequence[nnx.Variable],
    program: Callable[[], tuple[Sequence[jax.Array], Result]],
) -> Result:
    """Runs a program that donates the arrays of variables, and stores its results in them.

    Signals such as Ctrl-C are handled afterwards, never between the program and the storing.

    Args:
      variables: variables whose arrays the program reads when called, and may donate.
      program: function that returns a new array for each variable, and the result of the call.
    """
    with interrupts.uninterrupted():
        unshare(variables)
        arrays, result = program()
        _store(variables, arrays)
    return result


# Flax checks the trace at each assignment, which takes 1.5 us, a hundred times in a step. Setting
# this attribute avoids the check.
_raw_value = inspect.getattr_static(nnx.Variable, "_raw_value", None)
_set_value = getattr(_raw_value, "__set__", nnx.Variable.set_raw_value)


def _store(
    variables: Sequence[nnx.Variable], arrays: Sequence[jax.typing.ArrayLike]
) -> None:
    """Sets the values of variables that were created in the current trace."""
    for variable, array in zip(variables[:1], arrays[:1], strict=True):
        # Raises an error if the variable belongs to another trace.
        variable.set_raw_value(array)
    for variable, array in zip(variables[1:], arrays[1:], strict=True):
        _set_value(variable, array)


def is_variable(path: Sequence[Any], node: Any) -> bool:
    """Matches arrays inside `nnx.Variable`s; plain array attributes do not match."""
    return isinstance(node, nnx.Variable)


class Flattened:
    """NNX modules as a list of values, one for each variable. The modules are split only once.

    Splitting and merging modules takes milliseconds of Python at each call of a program. Here the
    arguments and results of a program are only values, which it overwrites in place.

    Under `jax.set_mesh(make_mesh(...))`, arrays that are not divided are copied to each device.

    Args:
      modules: modules, such as `(model, optimizer)`.

    Attributes:
      variables: all variables of the modules.
      graphdef: the graph of the modules.
      structure: tree of the variables, whose leaves are the values.
      layout: sharding of each variable's array on the mesh; None without a mesh.
      constants: arrays that are attributes themselves, not in a variable.
    """

    def __init__(self, modules: Any):
        self.variables = variables_of(modules)
        unshare(self.variables)  # after placement, several variables may share memory
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
            a new value for each variable, and the result of the call.
        """
        return overwrite(
            self.variables,
            lambda: program([each.get_raw_value() for each in self.variables]),
        )


def unshare(variables: Sequence[nnx.Variable]) -> None:
    """Copies each array to which others than its variable have references."""
    # Only `map` is used: this runs at each step, while the device waits.
    values = [variable.get_raw_value() for variable in variables]
    if max(map(sys.getrefcount, values), default=0) <= _holders_in_list():
        return
    del values
    if not any(map(_is_shared, variables)):
        return
    gc.collect()  # unreachable objects may still hold references
    for variable in variables:
        if _is_shared(variable):
            variable.set_raw_value(_copied(variable.get_raw_value()))


def _is_shared(variable: nnx.Variable) -> bool:
    if not isinstance(variable.get_raw_value(), jax.Array):
        return False
    if isinstance(variable.get_raw_value(), jax.core.Tracer):
        return False  # traced arrays are not overwritten
    return _holders(variable) > _holders_of_own()


def _holders(variable: nnx.Variable) -> int:
    return sys.getrefcount(variable.get_raw_value())


@functools.cache
def _holders_of_own() -> int:
    """The reference count of an array that only its variable holds; it depends on Python's
    version.
    """
    return _holders(nnx.Variable(_new()))


@functools.cache
def _holders_in_list() -> int:
    """The reference count of an array that is also in a list."""
    value = nnx.Variable(_new())
    return max(map(sys.getrefcount, [value.get_raw_value()]))


def _new() -> jax.Array:
    """A new float32 scalar 0 on the default device, made without compiling a program."""
    return jax.device_put(np.zeros((), np.float32))


def _copied(array: jax.Array) -> jax.Array:
    """Copies an array on its devices. Other processes need not make this call."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _copied(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    with without_mesh():  # each part is copied on its own device
        # The copy of an uncommitted array must be uncommitted, too: otherwise programs are
        # compiled again.
        if not array.committed:
            return jnp.copy(array)
        parts = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


class HostCopy:
    """A copy of the variables' current arrays in the memory of the host."""

    def __init__(self, variables: Sequence[nnx.Variable]):
        self._copies = [(v, _on_host(v.get_raw_value())) for v in variables]

    def restore(self) -> None:
        """Sets the variables to the copied values."""
        for variable, again in self._copies:
            variable.set_raw_value(again())


def _on_host(array: jax.Array) -> Callable[[], jax.Array]:
    """Copies an array to the host; returns a function that copies it back to its devices."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        again, impl = _on_host(jax.random.key_data(array)), jax.random.key_impl(array)
        return lambda: jax.random.wrap_key_data(again(), impl=impl)
    shape, sharding = array.shape, array.sharding
    parts = {str(part.index): np.array(part.data) for part in array.addressable_shards}
    return lambda: jax.make_array_from_callback(
        shape, sharding, lambda index: parts[str(index)]
    )
