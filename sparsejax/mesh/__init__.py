"""Devices and processes: layouts on a mesh, blocks of sparse rows, several processes.

This package imports `sparse` and `losses` only. All other packages may import all of it.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
