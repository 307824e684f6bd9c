"""Functions that read a source into a data set, and types of data that verbs accept.

No other subpackage of `data` imports it.
"""
