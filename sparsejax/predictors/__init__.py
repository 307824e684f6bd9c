"""Predictors: their files, and programs that run without Flax and the model's code.

This wing stands above `engine`, and knows no model. `verbs.export` writes its files.
"""
