"""Predictors: their files, and programs that run without Flax and the model's code.

This package stands above `engine`, and contains no model. `verbs.export` writes its files.
"""
