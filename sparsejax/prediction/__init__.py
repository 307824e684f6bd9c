"""From a trained model to answers: recommend, evaluate, vectors, exported predictors.

Above `nn` and `data`, below training, which measures what it trains. `predictor` and
`programs` run without Flax.
"""
