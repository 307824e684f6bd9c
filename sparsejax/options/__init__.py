"""The options of each verb: each is stated once, for Python and for the command line."""
