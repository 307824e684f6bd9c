"""From data to a trained model: `fit`, its dispatches, checkpoints and the plan.

This package lies above prediction and below the command line. It also has what a training
loop of your own needs to be as fast as `fit`.
"""

import lazy_loader

# `__init__.pyi` lists the names, which are imported when they are first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
