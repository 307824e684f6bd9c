"""Ranking: batches of rows to the best items, and how good these are."""
