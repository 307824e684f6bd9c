"""Stores of the rows of stacks: static or dynamic, on the devices or in host memory.

`store` defines the interface. `STORES` in `sparsejax.embeddings.tables` maps the name of each kind
to its class. A table configuration has this name in its attribute `store`.
"""
