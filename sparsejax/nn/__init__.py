"""Flax modules: the network's description, its layers and models.

Above the optimizers (a layer's kernel is a `RowParam`), beside `data`, below prediction.
"""
