"""Reads and writes formats on disk: bytes, columns, names, tables, saved data sets.

This subpackage is the lowest one of `data`: it imports no data sets.
"""
