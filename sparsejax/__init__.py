"""Recommendation models with sparse inputs and outputs, on JAX.

>>> import sparsejax as sj
>>> train, heldout = sj.datasets.msweb().train.split(0.8, seed=0)
>>> config = sj.NetworkConfig.autoencoder(hidden=(64,))
>>> size = train.num_features
>>> model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
>>> optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
>>> history = sj.fit(model, optimizer, train, num_epochs=1)
>>> found = sj.recommend(model, train, k=10, exclude=train)
>>> found.ids.shape
(32711, 10)
"""

import importlib
from typing import Any

import lazy_loader

# `__init__.pyi` lists the names. Each is imported when it is first used: the command line
# answers --help at once, and `load_predictor` needs no Flax.
_named, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # It takes as long as all the rest here, and a command must handle signals soon.
        metadata = importlib.import_module("importlib.metadata")
        return metadata.version("sparsejax")
    return _named(name)
