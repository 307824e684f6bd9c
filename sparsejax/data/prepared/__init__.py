"""Folders that `prepare` writes, and how.

Above `sets` and `events`.
"""
