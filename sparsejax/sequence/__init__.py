"""Models of histories: they predict the next item of a user.

This package stands above `nn`, whose output layer has the exact softmax over all items.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
