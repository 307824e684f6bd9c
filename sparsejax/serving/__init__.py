"""A service of predictions: one device, dynamic batches, and the Open Inference Protocol.

This wing stands on `predictors`. `engine` and `batcher` know nothing of the web.
"""
