"""Stores of the rows of stacks: static, dynamic, and both in host memory.

`store` has the interface. `STORES` names each kind, as the `store` of a table's configuration does.
"""
