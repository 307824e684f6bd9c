"""Click models: embedding tables, and layers that compute a logit from the looked-up rows.

This package stands above `embeddings`, as each model has an `EmbeddingCollection`.
"""

import lazy_loader

# `__init__.pyi` lists the names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
