"""Flax modules: the configuration of networks, layers and models.

This package imports the optimizers (a layer's kernel is a `RowParam`), and does not import
`data`. The packages for predictions import it.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
