"""Data sets that are read one row group at a time.

Above `sets` and `prepared`, below `reading`.
"""
