"""Clicks: examples with labels, and models that predict the probability of a label."""
