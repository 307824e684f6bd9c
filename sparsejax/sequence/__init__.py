"""Models of histories: what a user does next.

Above `nn`, whose output layer has the exact softmax over all items.
"""
