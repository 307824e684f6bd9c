"""Mosaic GPU of Pallas, which is imported when a GPU program first asks it for something.

The import takes .3 s, which a machine that runs no GPU program saves.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # Python asks for `__path__` at `from ... import`
        raise AttributeError(name)
    return getattr(_library(), name)


def _library() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    ask_once()
    return mosaic_gpu


def kernel(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, which refuses to be compiled where XLA would divide the program.

    XLA cannot divide a GPU program between devices: each device would gather all operands
    and compute all results, without a word.

    Raises:
      ValueError: when the program is compiled for several devices outside of
        `jax.shard_map`.
    """
    launch = _library().kernel(body, **options)

    def call(*operands: Any) -> Any:
        checked = list(operands)
        for i, operand in enumerate(operands):
            if isinstance(operand, jax.Array):  # not a reference
                checked[i] = on_one_device(operand)
                break
        return launch(*checked)

    return call


def on_one_device(array: jax.Array) -> jax.Array:
    """The same array, in a program that must not be divided by XLA; see `kernel`."""
    return _on_one_device.bind(array)


def _lower_on_one_device(ctx: mlir.LoweringRuleContext, array: Any) -> list[Any]:
    # Within `jax.shard_map` the context is another, without this number.
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices is not None and devices > 1:
        raise ValueError(
            f"XLA would repeat a GPU program on each of {devices} devices, as it cannot "
            "divide it: call it within `with jax.set_mesh(mesh):`, with the mesh that its "
            "arrays are on, and give the operation its kernel_spec; or put all arrays on "
            "one device"
        )
    return [array]


_on_one_device = Primitive("on_one_device")
_on_one_device.def_impl(lambda array: array)
_on_one_device.def_abstract_eval(lambda aval: aval)
batching.primitive_batchers[_on_one_device] = lambda arrays, dims: (
    on_one_device(*arrays),
    *dims,
)
mlir.register_lowering(_on_one_device, lambda ctx, array: [array])
mlir.register_lowering(_on_one_device, _lower_on_one_device, platform="cuda")


@functools.cache
def ask_once() -> None:
    """Lets Mosaic remember which version of ptxas there is.

    It asks for it at each conversion of a boolean, so at each branch of a program, and
    starts a process each time: more than half of the time in which programs are lowered.
    """
    from jax._src import lib

    # JAX's own names, which may change: then it asks each time.
    library = getattr(lib, "mosaic_gpu", None)
    extension: Any = getattr(library, "_mosaic_gpu_ext", None)
    ask = getattr(extension, "_get_ptxas_isa_version", None)
    if ask is not None:
        extension._get_ptxas_isa_version = functools.cache(ask)
