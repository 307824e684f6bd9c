"""The sparse operations. Each file has the mathematics, XLA's forms, the derivative and the
choice among implementations of one operation.

This package imports `mesh`, and the optimizers import this package. Other packages may
import the public functions, and `item_chunks` for loops over items.
"""
