"""Reads and draws data for the evaluation protocols of published papers."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import numpy as np

from sparsejax.data.reading.readers import read_pairs
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.splits import Split
from sparsejax.sparse import CSR, as_int32


class UnseenUsers(NamedTuple):
    """Data to evaluate a model on users that it was not trained on.

    >>> train, validation, test = read_vae_cf("pro_sg")
    >>> train
    SparseDataset(2 rows, 3 features, 4 entries, indicator)

    Attributes:
      train: all entries of the users to train on.
      validation: entries of other users: those that the model is shown, and those that it
        should find.
      test: entries of yet other users, in two such parts, for the final evaluation.
    """

    train: SparseDataset
    validation: Split[SparseDataset]
    test: Split[SparseDataset]


def read_vae_cf(folder: str | os.PathLike[str]) -> UnseenUsers:
    """Reads the files of Mult-VAE's protocol (Liang et al. 2018, strong generalisation).

    Its notebook writes them to a folder `pro_sg`, for MovieLens-20M, Netflix and MSD::

        train.csv          uid,sid        the users to train on
        validation_tr.csv  uid,sid        other users: entries that the model is shown
        validation_te.csv  uid,sid                and entries that it should find
        test_tr.csv        uid,sid        yet other users
        test_te.csv        uid,sid

    The metric called recall in these papers is `truncated_recall` here.

    >>> data = read_vae_cf("pro_sg")
    >>> shown, heldout = data.test
    >>> model = baselines.ease(data.train)
    >>> found = evaluate(model, shown, heldout, k=(20, 50, 100), popularity=data.train)
    >>> metrics = ("truncated_recall@20", "truncated_recall@50", "ndcg@100")
    >>> [0 <= found[metric] <= 1 for metric in metrics]
    [True, True, True]

    Args:
      folder: path of the folder with the five files.

    Returns:
      The three parts, with the items of `train` as features. Entries of other items are left
      out, with a warning.

    Raises:
      DataError: a file is missing, or has another form.
    """

    def part(name: str, features: SparseDataset | None) -> SparseDataset:
        path = os.path.join(folder, f"{name}.csv")
        return read_pairs(path, user="uid", item="sid", features=features)

    train = part("train", None)

    def others(name: str) -> Split[SparseDataset]:
        return Split(part(f"{name}_tr", train), part(f"{name}_te", train))

    return UnseenUsers(train, others("validation"), others("test"))


def random_candidates(
    *seen: SparseDataset, count: int = 99, seed: int = 0
) -> SparseDataset:
    """Draws for each row some items that it does not have, to rank them with held-out ones.

    The protocol of NCF (He et al. 2017) ranks one held-out item among 99 others::

        train, heldout = data.split_last()
        candidates = random_candidates(train, heldout, count=99)
        evaluate(model, train, heldout, k=10, candidates=candidates)

    >>> drawn = random_candidates(train, heldout, count=5)
    >>> drawn.num_entries == 5 * train.num_rows
    True

    Args:
      seen: data sets over equal features. Items in any of them are not drawn. The result has
        a row for each row of any of them, matched by name.
      count: number of items to draw for each row. A row with fewer free items gets all of
        them.
      seed: seed of the random choice, which also depends on the order of rows.

    Raises:
      ValueError: there is no data set, or `count` is not positive.
    """
    if not seen or count < 1:
        raise ValueError(
            f"expected a data set or more, and count=1 or more, got {len(seen)} and {count}"
        )
    whole = seen[0].without_values().merge(*(s.without_values() for s in seen[1:]))
    rng = np.random.default_rng(seed)
    indptr, indices = np.asarray(whole.matrix.indptr), np.asarray(whole.matrix.indices)
    drawn = []
    for start, end in itertools.pairwise(indptr):
        has = indices[start:end]
        free = whole.num_features - has.size
        places = np.sort(rng.choice(free, min(count, free), replace=False))
        # The p-th item that is not in the row is p plus the number of the row's items before it.
        before = np.searchsorted(has - np.arange(has.size), places, side="right")
        drawn.append(places + before)
    lengths = [0, *map(len, drawn)]
    matrix = CSR(
        None,
        np.concatenate([np.zeros(0, np.int64), *drawn]).astype(np.int32),
        as_int32("indptr", np.cumsum(lengths)),
        num_cols=whole.num_features,
    )
    return SparseDataset(matrix, whole.row_names, whole.feature_names)
