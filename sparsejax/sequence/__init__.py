"""Models of histories: what a user does next.

Above the optimizers, beside `nn` and `data`. The exact softmax over all items is
`ops.linear_cross_entropy`.
"""
