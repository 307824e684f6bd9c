"""Dynamic tables: 64-bit ids are assigned a row when first seen, and may be evicted later.

Once ids have rows, such a table is a stack like any other. This package contains the assignment of
rows (`assignment`), eviction (`eviction`), admission of new ids (`admission`), vectors of ids
without a row (`vectors`), and files (`files`). All results depend only on the seed and the
batches.
"""
