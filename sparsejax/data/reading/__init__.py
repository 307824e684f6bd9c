"""From a source to a data set, and what counts as data where a verb takes some.

The highest room of `data`.
"""
