"""Data sets that are read one row group at a time.

It imports `sets` and `prepared`; `reading` imports it.
"""
