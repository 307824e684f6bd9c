"""Files and their contents: bytes, columns, names, tables, saved parts.

The lowest room of `data`: it knows no data set.
"""
