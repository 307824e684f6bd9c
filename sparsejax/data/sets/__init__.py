"""Data sets in memory: of items, of histories and of clicks, and how they are split.

Above `files` and `events`.
"""
