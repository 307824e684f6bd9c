"""Embedding tables of click models: many tables, one lookup, spread over a mesh.

Above the optimizers (a stack of tables is a `RowParam`), beside `nn` and `data`. The core knows
nothing of it.
"""
