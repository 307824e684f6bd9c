"""The content of a data set as plain Python objects."""

import numpy as np

from sparsejax.data import SparseDataset

Contents = dict[str, dict[str, float]]


def contents(dataset: SparseDataset) -> Contents:
    """`{row name: {feature name: value}}`, rows in order."""
    matrix = dataset.matrix
    data = np.ones(matrix.nse) if matrix.data is None else matrix.data
    return {
        str(name): {
            str(dataset.feature_names[matrix.indices[at]]): float(data[at])
            for at in range(matrix.indptr[row], matrix.indptr[row + 1])
        }
        for row, name in enumerate(dataset.row_names)
    }
