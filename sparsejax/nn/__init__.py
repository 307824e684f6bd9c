"""Flax modules: the network's description, its layers and models.

Above the optimizers (a layer's kernel is a `RowParam`), beside `data`, below prediction.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
