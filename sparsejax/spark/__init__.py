"""Prepares data, trains and recommends by tasks of Apache Spark.

This wing stands above `training` and below `cli`. `__init__.pyi` lists the public names.
`pip install 'sparsejax[spark]'` installs the requirements except Java. The wing uses data
frames only, not RDDs, so it also works with Spark Connect.
"""

import lazy_loader

# Names are imported at their first use, so that a task imports only the modules that it needs.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
