"""Embedding tables of click models: many tables, one lookup, spread over a mesh.

Above the optimizers (a stack of tables is a `RowParam`), beside `nn` and `data`. The core knows
nothing of it.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
