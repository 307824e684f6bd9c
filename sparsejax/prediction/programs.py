"""Programs that predict: functions of arrays as StableHLO, for CPUs and CUDA.

A program that recommends is called as ``program(weights, inputs, exclude)`` and returns ids
and scores::

    weights    arrays
    inputs     for each sparse input of the model (data, indices, indptr), as in a CSR;
               for each dense input its rows, an array
    exclude    (indices, indptr)

A program of a click model is called as ``program(weights, dense, ids)`` and returns logits::

    dense      [rows, columns] float32
    ids        for each stack of tables (indices, indptr), as in a CSR with a row for each bag

The number of rows is fixed. The caller chooses the room for entries, the same for all
matrices. A file keeps only the StableHLO of a program. JAX's own form of an exported
function says more, and a file from elsewhere could say anything there. Here everything
else follows from the sizes, which the file states in JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import mlir
from jax.extend.mlir import ir, passmanager
from jax.interpreters.mlir import lower_fun, make_ir_context

from sparsejax.mesh.layout import without_mesh

PLATFORMS = ("cpu", "cuda")

_BYTECODE = b"ML\xefR"  # first bytes; MLIR would also read text

# Custom calls that the compiler replaces by its own operations. Others are refused: a
# custom call runs whatever is registered under its name, for example a callback into
# Python.
_CUSTOM_CALLS = {"shape_assertion", "stablehlo.dynamic_reduce_window"}
_DIALECTS = {"builtin", "chlo", "func", "stablehlo"}
# Operations that wait for another device or for the host.
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


class _Signature:
    """The types of a program's arguments and results."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments as shapes and dtypes; the number of entries is dynamic."""
        raise NotImplementedError

    @property
    def results(self) -> Any:
        """The results as shapes and dtypes."""
        raise NotImplementedError

    def program(self, function: Callable[..., Any]) -> export.Exported:
        """Makes a program from a function of these arguments that JAX can trace.

        Raises:
          ValueError: the function does something that a program may not do.
        """
        jitted = self._jitted(function)
        with without_mesh():  # the program is for one device
            traced = jitted.trace(*self.arguments)  # errors of the function itself
            with _failures_named(traced.jaxpr):
                exported = self._exported(jitted)
                _checked_type(exported.mlir_module_serialized)
                code = _without_locations(exported.mlir_module_serialized)
        return dataclasses.replace(exported, mlir_module_serialized=code)

    def _jitted(self, function: Callable[..., Any]) -> Any:
        def typed(*arguments):
            found = function(*arguments)
            leaves, structure = jax.tree.flatten(self.results)
            arrays = [found] if len(leaves) == 1 else [*found]
            pairs = zip(arrays, leaves, strict=True)
            return structure.unflatten([x.astype(like.dtype) for x, like in pairs])

        return jax.jit(typed, keep_unused=True)

    def _exported(self, jitted: Any) -> export.Exported:
        make = export.export(
            jitted, platforms=PLATFORMS, _override_lowering_rules=_DECOMPOSED
        )
        return make(*self.arguments)

    def load(self, code: bytes, convention: int) -> export.Exported:
        """Restores a program that `program` made, from its StableHLO.

        Args:
          code: the program's `mlir_module_serialized`.
          convention: the program's `calling_convention_version`.

        Raises:
          ValueError: the code is not a program of this signature, or does something that
            a program may not do, or JAX is too old or too new for it.
        """
        oldest = export.minimum_supported_calling_convention_version
        newest = export.maximum_supported_calling_convention_version
        if not oldest <= convention <= newest:
            raise ValueError(
                f"its programs have calling convention {convention}; JAX "
                f"{jax.__version__} knows {oldest} to {newest}: export it again, or use "
                "a newer JAX"
            )
        with without_mesh():
            like = self._exported(self._jitted(self._nothing))
        expected = _checked_type(like.mlir_module_serialized)
        found = _checked_type(code)
        if found != expected:
            raise ValueError(f"a program has the type {found}, expected {expected}")
        return dataclasses.replace(
            like, mlir_module_serialized=code, calling_convention_version=convention
        )

    def _nothing(self, *arguments: Any) -> Any:
        return jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), self.results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature(_Signature):
    """The types of the arguments and results of a program that recommends.

    Attributes:
      rows: number of rows.
      k: number of items for each row.
      weights: shape and dtype of each array of weights.
      inputs: for each input None if it is sparse, else shape and dtype of a dense row.
    """

    rows: int
    k: int
    weights: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[jax.ShapeDtypeStruct | None, ...] = (None,)

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        (entries,) = export.symbolic_shape("entries")
        data = jax.ShapeDtypeStruct((entries,), jnp.float32)
        indices = jax.ShapeDtypeStruct((entries,), jnp.int32)
        indptr = jax.ShapeDtypeStruct((self.rows + 1,), jnp.int32)
        inputs = [
            (data, indices, indptr)
            if row is None
            else jax.ShapeDtypeStruct((self.rows, *row.shape), row.dtype)
            for row in self.inputs
        ]
        return list(self.weights), inputs, (indices, indptr)

    @property
    def results(self) -> Any:
        shape = (self.rows, self.k)
        return tuple(jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickSignature(_Signature):
    """The types of the arguments and results of a program of a click model.

    Attributes:
      rows: number of examples.
      num_dense: number of dense columns.
      bags: of an example, in each stack of tables.
      weights: shape and dtype of each array of weights.
    """

    rows: int
    num_dense: int
    bags: tuple[int, ...]
    weights: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        (entries,) = export.symbolic_shape("entries")
        dense = jax.ShapeDtypeStruct((self.rows, self.num_dense), jnp.float32)
        indices = jax.ShapeDtypeStruct((entries,), jnp.int32)
        ids = [
            (indices, jax.ShapeDtypeStruct((self.rows * bags + 1,), jnp.int32))
            for bags in self.bags
        ]
        return list(self.weights), dense, ids

    @property
    def results(self) -> Any:
        return jax.ShapeDtypeStruct((self.rows,), jnp.float32)


def _decomposed(combine: Callable[..., jax.Array], identity: Callable[[Any], Any]):
    """How a cumulative operation is lowered, on every platform: as JAX does on a CPU.

    On a GPU JAX has operations of its own for some of them, which no file can hold.
    """

    def windows(x, *, axis, reverse):
        more = x.shape[axis] - 1
        sizes, padding = [1] * x.ndim, [(0, 0)] * x.ndim
        sizes[axis] = more + 1
        padding[axis] = (0, more) if reverse else (more, 0)
        first = np.asarray(identity(x.dtype), x.dtype)
        return lax.reduce_window(x, first, combine, sizes, [1] * x.ndim, padding)

    return lower_fun(windows, multiple_results=False)


def _least(dtype) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return -np.inf if floating else jnp.iinfo(dtype).min


def _largest(dtype) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.inf if floating else jnp.iinfo(dtype).max


_DECOMPOSED = (
    (lax.cumsum_p, _decomposed(lax.add, lambda _: 0)),
    (lax.cumprod_p, _decomposed(lax.mul, lambda _: 1)),
    (lax.cummax_p, _decomposed(lax.max, _least)),
    (lax.cummin_p, _decomposed(lax.min, _largest)),
    (lax.cumlogsumexp_p, _decomposed(jnp.logaddexp, lambda _: -np.inf)),
)


def _with_effects(jaxpr: Any) -> list[str]:
    """The operations of a traced function that do more than to compute."""
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
    """Within it, what JAX cannot lower or write raises ValueError of one line."""
    try:
        yield
    except ValueError:
        raise
    # JAX and MLIR raise many kinds of exceptions, with messages of many lines.
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
    """The same module without the names of the source files."""
    stated = re.match(rb"ML\xefR.StableHLO_v([0-9.]+)\0", code, re.DOTALL)
    assert stated is not None
    with make_ir_context():
        module = mlir.deserialize_portable_artifact(code)
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.run(module.operation)
        return mlir.serialize_portable_artifact(module, stated[1].decode())


def _checked_type(code: bytes) -> str:
    """The type of a module's function.

    Raises:
      ValueError: the module does something that a program may not do.
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
    """The operation of JAX that became this one, while the program says so."""
    found = re.search(r'^loc\("(?:[^"]*/)?(\w+)"', str(operation.location))
    return f" (of {found[1]})" if found else ""


def _name(function) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value


def on_this_process(state: jax.Array) -> jax.Array:
    """A key or a count that all processes have, on this process's devices alone."""
    if not jax.dtypes.issubdtype(state.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(state))
    words = jnp.asarray(np.asarray(jax.random.key_data(state)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(state))
