"""Ranking: computes the best items for batches of rows, and metrics of these rankings."""
