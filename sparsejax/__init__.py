"""Recommendation models with sparse inputs and outputs, on JAX.

>>> import sparsejax as sj
>>> train, test = sj.datasets.msweb().train.split(0.8, seed=0)  # doctest: +SKIP
"""

import importlib.metadata

__version__ = importlib.metadata.version("sparsejax")
