"""Parts of `fit` with which a training loop of your own is as fast."""

import lazy_loader

# Each is imported when it is first used. `__init__.pyi` says the same to type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    "sparsejax",
    submod_attrs={
        "engine.train.dispatch": ["Dispatch", "Epochs", "Program"],
        "engine.train.resident": ["Examples", "Trainable"],
        "verbs.place": ["place"],
        "verbs.recipe": ["Recipe", "recipe"],
    },
)
