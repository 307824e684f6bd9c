"""Apache Spark prepares data where it lies.

This wing stands above `training` and below `cli`. `__init__.pyi` lists the public names.
`pip install 'sparsejax[spark]'` installs its requirements, but not Java, which it needs. It
uses data frames alone, so Spark Connect works, too.
"""

import lazy_loader

# Each name is imported when it is first used: a task imports only what it needs.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
