"""Stores of the rows of stacks: static, dynamic, and both in host memory.

`store` has the interface. `STORES` of `sparsejax.embeddings.tables` names each kind, as the `store`
of a table's configuration does.
"""
