"""Files and what is in them: bytes, columns, names, tables, saved parts.

The lowest room of `data`: it knows no data set.
"""
