"""Helpers for scoring rows batch by batch: excluded items, checks, and collecting results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from sparsejax.data.reading.sources import Inputs, Named, NamedCSR, find_rows
from sparsejax.engine.batching import Batch, Batches, Held, for_batches
from sparsejax.engine.rank.denied import with_denied
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.sparse import CSR, host_rows


def collect(
    x: Named, k: int, counts: Sequence[int], results: Iterable[tuple[jax.Array, ...]]
) -> Recommendations:
    """Concatenates the results of all batches to `k` recommendations for each row.

    Args:
      x: rows that were scored.
      k: items per row.
      counts: number of rows in each batch; its results may have more rows.
      results: for each batch, in order, ids and scores and maybe values, each `[at least count, at
          least k]`.

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
    """
    ids = np.empty((x.num_rows, k), np.int32)
    scores, values = (np.empty((x.num_rows, k), np.float32) for _ in range(2))
    start, has_values = 0, False
    for count, result in zip(counts, one_late(results), strict=True):
        part = slice(start, start + count)
        found = [array[:count, :k] for array in jax.device_get(result)]
        ids[part], scores[part], *more = found
        if has_values := bool(more):
            [values[part]] = more
        bad = np.isnan([scores[part], *more]).any(axis=(0, 2))
        check_scores(bad, x, start + np.arange(count))
        start += count
    return Recommendations(ids, scores, values=values if has_values else None)


def exclusion(
    inputs: Inputs, rows: np.ndarray, held: Held, seen: NamedCSR, batch_size: int
) -> Batches:
    """Batches with the entries of `seen` that belong to the given rows of the inputs.

    `held` is the result of `held_inputs`.
    """
    for name, part in inputs.parts.items():
        matrix = held[name]
        if part.matrix is seen.matrix and isinstance(matrix, CSR):
            return Batches.of(indicator(matrix), rows, batch_size)
    found = rows_of(seen, inputs.rows)
    matrix = for_batches(indicator(seen.matrix))
    return Batches.of(matrix, found[rows], batch_size)


def denying(
    seen: CSR | None,
    rows: np.ndarray,
    denied: np.ndarray,
    num_items: int,
    batch_size: int,
) -> Iterator[Batch]:
    """Makes the excluded items of each batch of rows, one batch at a time.

    Args:
      seen: items that each row has already, or None.
      rows: row numbers in `seen`; -1 stands for an empty row.
      denied: ids of excluded items, from `denied_items`.
      num_items: number of items.
      batch_size: rows in a batch.
    """
    if seen is None:
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        seen, rows = CSR(None, none, start, num_cols=num_items), np.full_like(rows, -1)
    matrix = jax.tree.map(np.asarray, indicator(seen))
    for start in range(0, rows.size, batch_size):
        some = host_rows(matrix, rows[start : start + batch_size])
        part = for_batches(with_denied(some, denied, num_items))
        yield from Batches.of(part, np.arange(some.num_rows), batch_size)


def rows_of(seen: NamedCSR, x: Named) -> np.ndarray:
    """`[rows of x]`: the number of the row in `seen` for each row of `x`; -1 if `seen` lacks it.

    Raises:
      ValueError: `seen` lacks all rows.
    """
    found = find_rows(x, seen)
    if found.size and found.max() < 0:
        ours, theirs = np.arange(x.num_rows), np.arange(seen.num_rows)
        raise ValueError(
            f"exclude has none of the rows of inputs: {x.labels(ours)} are not "
            f"among {seen.labels(theirs)}"
        )
    return found


def indicator(matrix: CSR) -> CSR:
    """A matrix with the entries of `matrix` and without values."""
    return dataclasses.replace(matrix, data=None)


def each(batches: Iterable | None) -> Iterable:
    """The batches; without batches, None repeated endlessly."""
    return itertools.repeat(None) if batches is None else batches


def check_positive(**values: int) -> None:
    """Raises TypeError unless all values are integers, ValueError unless all are at least 1."""
    for name, value in values.items():
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_scores(bad: np.ndarray, part: Named, rows: np.ndarray) -> None:
    """Raises FloatingPointError if a row is `bad`, named by `rows`, the row numbers in `part`."""
    if bad.any():
        where = part.label(int(rows[np.argmax(bad)]))
        raise FloatingPointError(
            f"the model gives NaN for {where}; its weights or the values of the row are "
            "not finite"
        )


def one_late[T](results: Iterable[T]) -> Iterator[T]:
    """Yields the given results, each after the next one was requested.

    So the device, or a thread, works on the next result while the caller uses this one.
    """
    pairs = itertools.pairwise(itertools.chain(results, [None]))
    return (current for current, _ in pairs if current is not None)
