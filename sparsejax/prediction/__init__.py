"""From a trained model to answers: recommend, evaluate, vectors, exported predictors.

This wing stands above `nn` and `data`, and below `training`, which measures what it
trains. `predictor`, `predictor_files` and `programs` run without Flax.
"""
