"""Metrics of rankings computed by their definitions, one item at a time."""

import math


def expected(name, ids, labels, k):
    """The metric of one row."""
    hits = [rank for rank, i in enumerate(ids[:k], start=1) if i in labels]
    if not labels:
        return 0.0
    if name == "ndcg":
        best = sum(1 / math.log2(r + 1) for r in range(1, min(k, len(labels)) + 1))
        return sum(1 / math.log2(rank + 1) for rank in hits) / best
    if name == "hit_rate":
        return float(bool(hits))
    if name == "mrr":
        return 1 / hits[0] if hits else 0.0
    if name == "map":
        precisions = [(j + 1) / rank for j, rank in enumerate(hits)]
        return sum(precisions) / min(k, len(labels))
    possible = {
        "recall": len(labels),
        "truncated_recall": min(k, len(labels)),
        "precision": k,
    }
    return len(hits) / possible[name]
