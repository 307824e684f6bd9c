"""Access to Mosaic GPU of Pallas, which is imported when a GPU program first uses it.

The import takes 0.3 s, which a machine that runs no GPU program saves.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # Python reads `__path__` at `from ... import`
        raise AttributeError(name)
    return getattr(_library(), name)


def _library() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    ask_once()
    if jax.default_backend() == "gpu":
        compile_beside()
    return mosaic_gpu


def kernel(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, with an error if the program is compiled where XLA would divide it.

    XLA cannot divide a GPU program over devices: each device would gather all operands
    and compute all results, without a warning.

    Raises:
      ValueError: when the program is compiled for several devices outside of
        `jax.shard_map`.
    """
    launch = _library().kernel(body, **options)

    def call(*operands: Any) -> Any:
        checked = list(operands)
        for i, operand in enumerate(operands):
            if isinstance(operand, jax.Array):  # references need no check
                checked[i] = on_one_device(operand)
                break
        return launch(*checked)

    return call


def on_one_device(array: jax.Array) -> jax.Array:
    """Returns the array; raises an error at compilation if XLA would divide the program, see
    `kernel`.
    """
    return _on_one_device.bind(array)


def _lower_on_one_device(ctx: mlir.LoweringRuleContext, array: Any) -> list[Any]:
    # In `jax.shard_map`, the context has another class, without this attribute.
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
    """Caches the version of ptxas, which Mosaic queries.

    Mosaic queries it at each conversion of a boolean, so at each branch of a program, and starts a
    process each time. This takes more than half of the time in which programs are lowered.
    """
    from jax._src import lib

    # A private name of JAX, which may change. Without it, Mosaic queries the version each time.
    library = getattr(lib, "mosaic_gpu", None)
    extension: Any = getattr(library, "_mosaic_gpu_ext", None)
    ask = getattr(extension, "_get_ptxas_isa_version", None)
    if ask is not None:
        extension._get_ptxas_isa_version = functools.cache(ask)


@functools.cache
def compile_beside() -> None:
    """Makes a thread compile each GPU program as soon as it is lowered.

    XLA compiles one program after another, for .2 to 3 s each, after its own passes over the whole
    program. For HSTU's training step these took 11 of 26 s. Mosaic keeps compiled programs
    in the process, by a hash of the program: XLA then finds them there.
    """
    from jax.experimental.mosaic.gpu import core

    # A private name of JAX, which may change. Without it, XLA compiles all programs itself.
    known = getattr(core, "KNOWN_KERNELS", None)
    if type(known) is dict:
        vars(core)["KNOWN_KERNELS"] = _Lowered(known)


class _Lowered(dict[bytes, bytes]):
    """Mosaic GPU modules by their hash; each is compiled when it is added."""

    def __init__(self, known: dict[bytes, bytes]):
        super().__init__(known)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mosaic")

    def __setitem__(self, kernel_hash: bytes, module: bytes) -> None:
        super().__setitem__(kernel_hash, module)
        self._thread.submit(_compile, kernel_hash, module)


def _compile(kernel_hash: bytes, module: bytes) -> None:
    """Compiles a program that contains this module. The program never runs, so its operands do not
    matter.
    """
    if not threading.main_thread().is_alive():
        return  # the process is ending, so the program is not needed
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    launch = jax.ffi.ffi_call("mosaic_gpu_v2", x, has_side_effect=True)
    settings = dict.fromkeys(
        ("use_custom_barrier", "skip_device_barrier", "uses_xla_collective_metadata"),
        False,
    )
    jax.jit(
        functools.partial(launch, kernel_hash=kernel_hash, module=module, **settings)
    ).lower(x).compile()
