"""From a source to a data set, and the types that verbs accept as data.

The highest room of `data`.
"""
