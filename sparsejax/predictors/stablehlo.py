"""Programs that predict: functions of arrays, compiled to StableHLO for CPUs and CUDA.

A program is called as ``program(weights, inputs)`` and returns its outputs, as described by the
signature of the predictor::

    weights    arrays
    inputs     for each sparse input (data, indices, indptr), as in a CSR, or without values
               (indices, indptr); for each dense input its rows, an array

The number of rows is fixed. The caller chooses the capacity for entries, one number for all
matrices. A file stores only the StableHLO of a program. JAX's own format for exported functions
contains more, which would have to be trusted in a file from elsewhere. Here all else follows from
the signature, which is JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import mlir
from jax.extend.mlir import ir, passmanager
from jax.extend.random import threefry2x32_p
from jax.interpreters.mlir import lower_fun, make_ir_context

from sparsejax.mesh.layout import without_mesh
from sparsejax.predictors.signature import Array, Signature

_BYTECODE = b"ML\xefR"  # the first bytes of bytecode; MLIR would also accept text

# Allowed custom calls: the compiler replaces them by its own operations. Any other custom call
# could execute the code that is registered under its name, such as a callback into Python.
_CUSTOM_CALLS = {"shape_assertion", "stablehlo.dynamic_reduce_window"}
_DIALECTS = {"builtin", "chlo", "func", "stablehlo"}
# Operations that communicate with other devices or with the host.
_EXCHANGES = {
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "infeed",
        "outfeed",
        "recv",
        "reduce_scatter",
        "send",
    )
}


def arguments(signature: Signature, rows: int) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of the weights and inputs of a program; the number of entries is
    dynamic.
    """
    weights = [weight.like for weight in signature.program_weights]
    return weights, inputs_like(signature.program_inputs, rows)


def inputs_like(inputs: Sequence[Array], rows: int) -> list[Any]:
    """Shapes and dtypes of the inputs of a program, see `arguments`."""
    (entries,) = export.symbolic_shape("entries")
    indices = jax.ShapeDtypeStruct((entries,), jnp.int32)

    def argument(given: Array) -> Any:
        if not given.sparse:
            return jax.ShapeDtypeStruct((rows, *given.shape), jnp.dtype(given.dtype))
        indptr = jax.ShapeDtypeStruct((rows * given.bags + 1,), jnp.int32)
        if given.dtype is None:
            return indices, indptr
        data = jax.ShapeDtypeStruct((entries,), jnp.dtype(given.dtype))
        return data, indices, indptr

    return [argument(given) for given in inputs]


def program(
    signature: Signature, rows: int, function: Callable[..., Any]
) -> export.Exported:
    """Makes a program from a function of `arguments` that JAX can trace.

    Args:
      signature: inputs and outputs of the function.
      rows: number of rows of a request.
      function: function that returns as many arrays as there are `program_outputs`.

    Raises:
      ValueError: the function contains an operation that is not allowed in a program.
    """
    jitted = _jitted(signature, function)
    with without_mesh():  # programs run on one device
        # Errors of the function itself are raised here, and stay as they are.
        traced = jitted.trace(*arguments(signature, rows))
        with _failures_named(traced.jaxpr):
            exported = _exported(signature, rows, jitted)
            _checked_type(exported.mlir_module_serialized)
            code = _without_locations(exported.mlir_module_serialized)
    return dataclasses.replace(exported, mlir_module_serialized=code)


def load(signature: Signature, rows: int, code: bytes) -> export.Exported:
    """Restores a program made by `program` from its `mlir_module_serialized`.

    Raises:
      ValueError: the code is not a program of this signature, contains an operation that is not
          allowed, or needs an older or newer JAX.
    """
    convention = signature.calling_convention
    oldest = export.minimum_supported_calling_convention_version
    newest = export.maximum_supported_calling_convention_version
    if not oldest <= convention <= newest:
        raise ValueError(
            f"its programs have calling convention {convention}; JAX {jax.__version__} "
            f"knows {oldest} to {newest}: export it again, or use a newer JAX"
        )

    # Fields that do not change the type are removed: programs then share the result of `_like`,
    # and the signature is hashable.
    bare = dataclasses.replace(
        signature,
        stacks=(),
        schema=None,
        events=None,
        users=None,
        stages=None,
        new_items=None,
    )
    like = _like(bare, rows, jax.config.jax_enable_x64)
    expected = _checked_type(like.mlir_module_serialized)
    found = _checked_type(code)
    if found != expected:
        raise ValueError(f"a program has the type {found}, expected {expected}")
    return dataclasses.replace(
        like, mlir_module_serialized=code, calling_convention_version=convention
    )


@functools.lru_cache(maxsize=64)
def _like(signature: Signature, rows: int, wide: bool) -> export.Exported:
    """An exported program with this signature that returns zeros; `wide` enables 64-bit types.

    It is cached, because a service loads many versions: for each function traced with a dynamic
    number of entries, JAX would keep .6 MB.
    """

    def nothing(*_: Any) -> list[jax.Array]:
        shapes = [((rows, *o.shape), o.like.dtype) for o in signature.program_outputs]
        return [jnp.zeros(*each) for each in shapes]

    with without_mesh():
        return _exported(signature, rows, _jitted(signature, nothing))


def _jitted(signature: Signature, function: Callable[..., Any]) -> Any:
    def typed(*given):
        pairs = zip(function(*given), signature.program_outputs, strict=True)
        return [found.astype(output.like.dtype) for found, output in pairs]

    return jax.jit(typed, keep_unused=True)


def _exported(signature: Signature, rows: int, jitted: Any) -> export.Exported:
    make = export.export(
        jitted, platforms=signature.platforms, _override_lowering_rules=_DECOMPOSED
    )
    return make(*arguments(signature, rows))


def _decomposed(combine: Callable[..., jax.Array], identity: Callable[[Any], Any]):
    """JAX's lowering of a cumulative operation on CPUs, for all platforms.

    On GPUs, JAX lowers some of these operations to custom calls, which a file must not contain.
    """

    def windows(x, *, axis, reverse):
        if not x.size:  # a window is not empty
            return x
        more = x.shape[axis] - 1
        sizes, padding = [1] * x.ndim, [(0, 0)] * x.ndim
        sizes[axis] = more + 1
        padding[axis] = (0, more) if reverse else (more, 0)
        first = np.asarray(identity(x.dtype), x.dtype)
        return lax.reduce_window(x, first, combine, sizes, [1] * x.ndim, padding)

    return lower_fun(windows, multiple_results=False)


def _least(dtype) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _largest(dtype) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _threefry(k0, k1, x0, x1):
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), the source of `jax.random`."""
    keys = k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for left in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << np.uint32(left) | x1 >> np.uint32(32 - left))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


_DECOMPOSED = (
    (lax.cumsum_p, _decomposed(lax.add, lambda _: 0)),
    (lax.cumprod_p, _decomposed(lax.mul, lambda _: 1)),
    (lax.cummax_p, _decomposed(lax.max, _least)),
    (lax.cummin_p, _decomposed(lax.min, _largest)),
    (lax.cumlogsumexp_p, _decomposed(jnp.logaddexp, lambda _: -np.inf)),
    (threefry2x32_p, lower_fun(_threefry, multiple_results=True)),
)


def _with_effects(jaxpr: Any) -> list[str]:
    """Names of the operations in a traced function that have side effects."""
    names = []
    for equation in jaxpr.eqns:
        inner = [
            _with_effects(p)
            for p in jax.tree.leaves(equation.params)
            if hasattr(p, "eqns")
        ]
        names += [name for part in inner for name in part]
        if equation.effects and not inner:
            names.append(equation.primitive.name)
    return names


@contextlib.contextmanager
def _failures_named(jaxpr: Any) -> Generator[None]:
    """While this context is open, errors of JAX become a ValueError with a message of one line."""
    try:
        yield
    except ValueError:
        raise
    # JAX and MLIR raise many kinds of exceptions, whose messages have many lines.
    except Exception as error:
        text, effects = str(error), _with_effects(jaxpr)
        found = re.search(r"composite.*? name = \"([\w.]+)\"", text)
        found = found or re.search(r"(?:lowering for|operation) '?([\w.]+)", text)
        name = effects[0] if effects else found and found[1]
        what = f"the operation {name}" if name else text.split("\n")[0][:100]
        raise ValueError(
            f"a predictor cannot hold this model: {what} has no form that runs on CPUs "
            "and GPUs without JAX"
        ) from error


def _without_locations(code: bytes) -> bytes:
    """Removes the names of source files from a module's bytecode."""
    stated = re.match(rb"ML\xefR.StableHLO_v([0-9.]+)\0", code, re.DOTALL)
    assert stated is not None
    with make_ir_context():
        module = mlir.deserialize_portable_artifact(code)
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.run(module.operation)
        return mlir.serialize_portable_artifact(module, stated[1].decode())


def _checked_type(code: bytes) -> str:
    """Checks the bytecode of a module, and returns the type of its function.

    Raises:
      ValueError: the module contains an operation that is not allowed in a program.
    """
    with make_ir_context():
        try:
            if not code.startswith(_BYTECODE):
                raise ValueError("no MLIR bytecode")
            module = mlir.deserialize_portable_artifact(code)
        except Exception as error:  # MLIR's messages have many lines
            raise ValueError(
                "a program is not StableHLO, or this JAX cannot read it"
            ) from error
        refused: list[str] = []

        def look(operation: ir.Operation) -> ir.WalkResult:
            name = operation.name
            if name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target not in _CUSTOM_CALLS:
                    refused.append(f"the custom call {target!r}{_made_by(operation)}")
            elif name in _EXCHANGES or name.partition(".")[0] not in _DIALECTS:
                refused.append(f"the operation {name}")
            return ir.WalkResult.INTERRUPT if refused else ir.WalkResult.ADVANCE

        module.operation.walk(look)
        if refused:
            raise ValueError(
                f"a program contains {refused[0]}, which may do anything; predictors "
                "hold only arithmetic"
            )
        main = [f for f in module.body if _name(f) == "main"]
        if not main:
            raise ValueError("a program has no function main")
        return str(main[0].attributes["function_type"])


def _made_by(operation: ir.Operation) -> str:
    """Text that names the JAX operation that was lowered to an operation; "" if it is unknown."""
    found = re.search(r'^loc\("(?:[^"]*/)?(\w+)"', str(operation.location))
    return f" (of {found[1]})" if found else ""


def _name(function) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value
