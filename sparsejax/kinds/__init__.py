"""The kinds of models and data: items, histories and clicks. `kind.Kind` defines how they
differ.
"""
