"""Embedding tables: many tables read by one lookup, divided over a mesh.

This package stands above the optimizers, as a stack of tables is a `RowParam`, and beside `nn` and
`data`. The core does not import it.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
