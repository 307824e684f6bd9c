"""Writes and reads the folders that `prepare` makes.

It imports `sets` and `events`; `scans` and `reading` import it.
"""
