"""Mosaic GPU of Pallas, which is imported when a GPU program first asks it for something.

The import takes .3 s, which a machine that runs no GPU program saves.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *


def __getattr__(name: str) -> object:
    from jax.experimental.pallas import mosaic_gpu

    ask_once()
    return getattr(mosaic_gpu, name)


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
