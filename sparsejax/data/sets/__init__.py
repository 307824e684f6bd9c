"""Data sets in memory: of items, of histories and of clicks, and how they are split.

It imports `files` and `events`, and none of the other subpackages of `data`.
"""
