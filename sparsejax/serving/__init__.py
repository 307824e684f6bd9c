"""A prediction service: one device, dynamic batches, and the Open Inference Protocol.

This package imports `predictors`. `engine` and `batcher` do not depend on web protocols.
"""
