"""What is recommended to each row, and the loop over batches that finds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
import pyarrow as pa

from sparsejax.data import SparseDataset
from sparsejax.data.batching import Batch, Batches, Shown, for_batches, rows_in_a_batch
from sparsejax.data.names import Names, as_names, to_arrow
from sparsejax.data.sources import (
    Features,
    Held,
    Inputs,
    Rows,
    Source,
    Table,
    check_columns,
    check_inputs,
    check_same_features,
    find_rows,
)
from sparsejax.sparse import CSR

Step = Callable[[Shown, Batch | None], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Recommendations:
    """The best items of each row.

    >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
    >>> found.names(["milk", "tea", "rye"])
    [['rye', 'milk']]

    Attributes:
      ids: `[rows, k]` int32, item numbers from the best down; -1 where candidates ran
        out.
      scores: `[rows, k]` float32, the model's scores; -inf where candidates ran out.
    """

    ids: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def names(self, items: SparseDataset | Iterable[object]) -> list[list[str]]:
        """The recommended items of each row by name; where they ran out, fewer than k.

        Args:
          items: the names of all items, or a data set whose features they are.

        Raises:
          ValueError: there are fewer names than items.
        """
        known = self._item_names(items)
        if self.ids.max(initial=-1) < 0:
            return [[] for _ in self.ids]
        counts = np.sum(self.ids >= 0, axis=1)
        rows = known[self.ids].tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def to_arrow(
        self,
        users: SparseDataset | Iterable[object],
        items: SparseDataset | Iterable[object],
    ) -> pa.Table:
        """A table with a line for each recommendation, best first, as Arrow has it.

        Its columns are user, item (text), score (float32) and rank (int32, from 1). pandas
        and polars take it: `table.to_pandas()`, `polars.from_arrow(table)`.

        >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
        >>> found.to_arrow(["ann"], ["milk", "tea", "rye"]).to_pylist()[0]
        {'user': 'ann', 'item': 'rye', 'score': 1.5, 'rank': 1}

        Args:
          users: the names of all rows, or a data set whose rows they are.
          items: the names of all items, or a data set whose features they are.

        Raises:
          ValueError: there are not as many users as rows, or fewer names than items.
        """
        known = as_names(users.row_names if isinstance(users, SparseDataset) else users)
        if len(known) != len(self):
            raise ValueError(
                f"{len(known):,} users were given for the recommendations of {len(self):,} "
                "rows"
            )
        rows, ranks = np.nonzero(self.ids >= 0)
        ids = self.ids[rows, ranks]
        columns = {
            "user": to_arrow(known).take(pa.array(rows)),
            "item": to_arrow(self._item_names(items)).take(pa.array(ids)),
            "score": pa.array(self.scores[rows, ranks], pa.float32()),
            "rank": pa.array(ranks + 1, pa.int32()),
        }
        return pa.table(columns)

    def _item_names(self, items: SparseDataset | Iterable[object]) -> Names:
        known = items.feature_names if isinstance(items, SparseDataset) else items
        known = as_names(known)
        highest = self.ids.max(initial=-1)
        if highest >= len(known):
            raise ValueError(
                f"item {highest:,} is recommended but only {len(known):,} names were "
                "given; give those of the features the model was trained on"
            )
        return known


def recommend_by(
    step: Step,
    inputs: Inputs,
    k: int,
    *,
    exclude: Source | str | None,
    num_features: Features,
    num_items: int,
    batch_size: int,
) -> Recommendations:
    """Recommendations to all rows of the inputs; see `sparsejax.recommend`.

    Args:
      step: ids and scores, `[batch, k]`, from what a batch is shown and what is not to
        be recommended to it.
      inputs: `[rows, num_features]`, or several.
      k: items per row.
      exclude: `[rows, num_items]`, or the name of an input.
      num_features: of the model.
      num_items: of the model.
      batch_size: rows a step.

    Raises:
      FloatingPointError: a score is NaN; names the row.
      ValueError: `inputs` or `exclude` does not fit the model or the other.
    """
    check_positive(k=k, batch_size=batch_size)
    check_inputs(inputs, num_features)
    x = inputs.rows
    batch_size = rows_in_a_batch(batch_size, x.num_rows)
    held = inputs.for_batches()
    rows = np.arange(x.num_rows)
    batches = inputs.batches(held, rows, batch_size)
    unwanted = None
    if exclude is not None:
        seen = inputs.named("exclude", exclude)
        check_columns("exclude", seen.matrix.num_cols, num_items, "items")
        if inputs.alone and isinstance(x, Table):
            check_same_features(x, seen)
        unwanted = exclusion(inputs, rows, held, seen, batch_size)

    results = (step(*pair) for pair in zip(batches, each(unwanted), strict=False))
    starts = range(0, x.num_rows, batch_size)
    counts = [min(batch_size, x.num_rows - start) for start in starts]
    return collect(x, k, counts, results)


def collect(
    x: Rows,
    k: int,
    counts: Sequence[int],
    results: Iterable[tuple[jax.Array, jax.Array]],
) -> Recommendations:
    """The first `k` of each row, from the results of one batch after the other.

    Args:
      x: what was scored.
      k: items per row.
      counts: rows in each batch; its results may have more.
      results: ids and scores, `[at least count, at least k]`, of each batch.

    Raises:
      FloatingPointError: a score is NaN; names the row.
    """
    ids = np.empty((x.num_rows, k), np.int32)
    scores = np.empty((x.num_rows, k), np.float32)
    start = 0
    for count, result in zip(counts, _one_late(results), strict=True):
        part = slice(start, start + count)
        found = jax.device_get(result)
        ids[part], scores[part] = (array[:count, :k] for array in found)
        check_scores(np.isnan(scores[part]).any(axis=1), x, start + np.arange(count))
        start += count
    return Recommendations(ids, scores)


def exclusion(
    inputs: Inputs, rows: np.ndarray, held: Held, seen: Table, batch_size: int
) -> Batches:
    """What `seen` has for some rows of the inputs, which are `held` for batches."""
    for name, table in inputs.tables.items():
        matrix = held[name]
        if table.matrix is seen.matrix and isinstance(matrix, CSR):
            return Batches.of(indicator(matrix), rows, batch_size)
    found = rows_of(seen, inputs.rows)
    matrix = for_batches(indicator(seen.matrix))
    return Batches.of(matrix, found[rows], batch_size)


def rows_of(seen: Table, x: Rows) -> np.ndarray:
    """`[rows of x]`: the row of `seen` for each, -1 if it has none.

    Raises:
      ValueError: it has none for any.
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
    """The same entries without values."""
    return dataclasses.replace(matrix, data=None)


def each(batches: Iterable | None) -> Iterable:
    """The batches, or None for ever."""
    return itertools.repeat(None) if batches is None else batches


def check_positive(**values: int) -> None:
    """Raises ValueError unless all are at least 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_scores(bad: np.ndarray, table: Rows, rows: np.ndarray) -> None:
    """Raises FloatingPointError if any is `bad`; `rows` are their numbers in `table`."""
    if bad.any():
        where = table.label(int(rows[np.argmax(bad)]))
        raise FloatingPointError(
            f"the model gives NaN for {where}; its weights or the values of the row are "
            "not finite"
        )


def _one_late[T](results: Iterable[T]) -> Iterator[T]:
    """The same, each after the next was asked for: so the device is never idle."""
    pairs = itertools.pairwise(itertools.chain(results, [None]))
    return (current for current, _ in pairs if current is not None)
