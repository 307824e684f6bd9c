"""Programs that recommend: functions of arrays as StableHLO, for CPUs and CUDA.

A program is called as ``program(weights, inputs, exclude)`` and gives ids and scores::

    weights    arrays
    inputs     for each input of the model (data, indices, indptr), a CSR's; of a dense
               one its rows, an array
    exclude    (indices, indptr)

The number of rows is fixed, the room for entries is the caller's, the same for all
matrices. What is kept of a program is the StableHLO alone. JAX's own form of an exported
function has more that a file from elsewhere could say; here all of it follows from the
sizes, which the file states in JSON.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir, passmanager
from jax.interpreters.mlir import make_ir_context

from sparsejax.mesh.layout import without_mesh

PLATFORMS = ("cpu", "cuda")

_BYTECODE = b"ML\xefR"  # what it begins with; text would be read as well

# What the compiler replaces by operations of its own. No others: a custom call may run
# whatever is registered under its name, a callback into Python for example.
_CUSTOM_CALLS = {"shape_assertion", "stablehlo.dynamic_reduce_window"}
_DIALECTS = {"builtin", "chlo", "func", "stablehlo"}
# Operations that wait for somebody else.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """What a program takes and gives.

    Attributes:
      rows: number of rows.
      k: items for each.
      weights: shape and dtype of each.
      inputs: for each input None if it is sparse, else shape and dtype of a dense row.
    """

    rows: int
    k: int
    weights: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[jax.ShapeDtypeStruct | None, ...] = (None,)

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """What a program is given, as shapes and dtypes; "entries" is dynamic."""
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

    def program(self, function: Callable[..., Any]) -> export.Exported:
        """A traceable function of these arguments as a program."""

        def typed(weights, inputs, exclude):
            ids, scores = function(weights, inputs, exclude)
            return ids.astype(jnp.int32), scores.astype(jnp.float32)

        jitted = jax.jit(typed, keep_unused=True)
        with without_mesh():  # the program is for one device
            exported = export.export(jitted, platforms=PLATFORMS)(*self.arguments)
        code = _without_locations(exported.mlir_module_serialized)
        return dataclasses.replace(exported, mlir_module_serialized=code)

    def load(self, code: bytes, convention: int) -> export.Exported:
        """What `program` made, from its StableHLO.

        Args:
          code: `mlir_module_serialized` of it.
          convention: its `calling_convention_version`.

        Raises:
          ValueError: it is no program of this signature, does what a program may not,
            or JAX is too old or too new for it.
        """
        oldest = export.minimum_supported_calling_convention_version
        newest = export.maximum_supported_calling_convention_version
        if not oldest <= convention <= newest:
            raise ValueError(
                f"its programs have calling convention {convention}; JAX "
                f"{jax.__version__} knows {oldest} to {newest}: export it again, or use "
                "a newer JAX"
            )
        like = self.program(self._nothing)
        expected = _checked_type(like.mlir_module_serialized)
        found = _checked_type(code)
        if found != expected:
            raise ValueError(f"a program has the type {found}, expected {expected}")
        return dataclasses.replace(
            like, mlir_module_serialized=code, calling_convention_version=convention
        )

    def _nothing(self, weights, inputs, exclude):
        return jnp.zeros((2, self.rows, self.k))


def check(program: export.Exported) -> None:
    """Raises ValueError if `Signature.load` would refuse what the program does."""
    _checked_type(program.mlir_module_serialized)


def _without_locations(code: bytes) -> bytes:
    """The same module, which does not say in which files it was written."""
    stated = re.match(rb"ML\xefR.StableHLO_v([0-9.]+)\0", code, re.DOTALL)
    assert stated is not None
    with make_ir_context():
        module = mlir.deserialize_portable_artifact(code)
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.run(module.operation)
        return mlir.serialize_portable_artifact(module, stated[1].decode())


def _checked_type(code: bytes) -> str:
    """The type of the function in a module that does only what a program may."""
    with make_ir_context():
        try:
            if not code.startswith(_BYTECODE):
                raise ValueError("no MLIR bytecode")
            module = mlir.deserialize_portable_artifact(code)
        except Exception as error:  # MLIR's messages have many lines
            raise ValueError("a program is no StableHLO that this JAX reads") from error
        refused: list[str] = []

        def look(operation: ir.Operation) -> ir.WalkResult:
            name = operation.name
            if name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target not in _CUSTOM_CALLS:
                    refused.append(f"the custom call {target!r}")
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


def _name(function) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value
