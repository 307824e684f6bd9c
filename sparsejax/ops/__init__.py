"""The sparse operations, one file each: mathematics, XLA's form, derivative, choice.

Above `mesh`, below the optimizers. Other wings may import the public functions, and
`item_chunks` for loops over items.
"""
