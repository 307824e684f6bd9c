"""Mosaic GPU of Pallas, which is imported when a GPU program first asks it for something.

The import takes .3 s, which a machine that runs no GPU program saves.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *


def __getattr__(name: str) -> object:
    from jax.experimental.pallas import mosaic_gpu

    return getattr(mosaic_gpu, name)
