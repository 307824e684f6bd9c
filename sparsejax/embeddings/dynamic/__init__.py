"""Dynamic tables: 64-bit ids get a row when they are first seen, and may lose it again.

Once ids have rows, such a table is a stack like any other. Here are the way from ids to rows
(`assignment`), who loses a row (`eviction`), who gets none yet (`admission`), what ids without a
row read (`vectors`), and files (`files`). All is a function of the seed and the batches alone.
"""
