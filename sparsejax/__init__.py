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

_found: tuple = ()


def _names() -> tuple:
    """Returns the functions `__getattr__` and `__dir__`, and the list of names in `__init__.pyi`.

    Each name is imported when it is first used. So the command line answers --help at once, and
    `load_predictor` needs no Flax.
    """
    global _found
    if not _found:
        # Imported late, because this takes 30 ms, in which a command would not handle signals.
        lazy_loader = importlib.import_module("lazy_loader")
        _found = lazy_loader.attach_stub(__name__, __file__)
    return _found


def __getattr__(name: str) -> object:
    if name == "__version__":
        metadata = importlib.import_module("importlib.metadata")
        return metadata.version("sparsejax")
    named, _, public = _names()
    return public if name == "__all__" else named(name)


def __dir__() -> list[str]:
    return _names()[1]()
