"""From data to a trained model: `fit`, its dispatches, checkpoints and the plan.

Above prediction, below the command line. Here are the names for a loop of your own at the
speed of `fit`.
"""

import lazy_loader

# `__init__.pyi` lists the names, which are imported when they are first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
