"""Parts of `fit` with which a training loop of your own is as fast."""

import importlib
from typing import Any

# Each is imported when it is first used. `__init__.pyi` says the same to type checkers.
_MODULES = {
    "CheckpointWarning": "engine.train.checkpoint",
    "Dispatch": "engine.train.dispatch",
    "Epochs": "engine.train.dispatch",
    "Examples": "engine.train.resident",
    "Program": "engine.train.dispatch",
    "Recipe": "verbs.recipe",
    "Trainable": "engine.train.resident",
    "place": "verbs.place",
    "recipe": "verbs.recipe",
}
__all__ = list(_MODULES)  # pyrefly: ignore


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"sparsejax.training has no {name!r}")
    return getattr(importlib.import_module(f"sparsejax.{_MODULES[name]}"), name)
