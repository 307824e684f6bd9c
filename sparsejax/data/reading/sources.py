"""Checks matrices and arrays that users pass as inputs, and aligns their rows by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sparsejax.data.files.names import Names, find_names, quoted
from sparsejax.data.scan import Scan
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.dense import DenseDataset, dense_rows
from sparsejax.sparse import CSR, host_rows

Source = SparseDataset | CSR | scipy.sparse.sparray | scipy.sparse.spmatrix
Dense = DenseDataset | np.ndarray | jax.Array
Sources = Source | Mapping[str, Source | Dense]

# The type of a model's `num_features`. A model with one input has its number of features. A model
# with several inputs has a dict by input: the number of features of a sparse input; the shape of a
# dense input's row, or its shape and dtype.
Features = int | Mapping[str, int | tuple[int, ...] | jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """A matrix or an array, perhaps with the names of its rows.

    Attributes:
      what: name of the argument, for messages.
      matrix: `[rows, ...]` data.
      row_names: `[rows]` names of the rows, or None.
    """

    what: str
    matrix: CSR | np.ndarray
    row_names: Names | None = None

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    def label(self, row: int) -> str:
        """A description of a row for a message: its number, its name if known, and `what`."""
        name = "" if self.row_names is None else f" ({self.row_names[row]!r})"
        return f"row {row:,}{name} of {self.what}"

    def labels(self, rows: np.ndarray) -> str:
        """The names or numbers of the first few of these rows, for a message."""
        return quoted(rows if self.row_names is None else self.row_names[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class NamedCSR(Named):
    """A sparse source as a CSR on the host or the device, perhaps with names.

    Attributes:
      feature_names: `[features]` names of the columns, or None.
      left_out: `[rows]` number of entries left out of each row, or None; see
        `SparseDataset`.
    """

    matrix: CSR
    feature_names: Names | None = None
    left_out: np.ndarray | None = None

    @classmethod
    def of(cls, what: str, source: Source) -> NamedCSR:
        """Converts a source that a user passed as the argument `what`.

        Raises:
          TypeError: the source has a type that is not supported.
        """
        if isinstance(source, SparseDataset):
            names = (source.row_names, source.feature_names)
            return cls(what, source.matrix, *names, source.left_out)
        if isinstance(source, CSR):
            return cls(what, source)
        if scipy.sparse.issparse(source):
            return cls(what, CSR.from_scipy(source))
        raise TypeError(
            f"{what} is a SparseDataset, a CSR or a SciPy sparse matrix, got "
            f"{type(source).__name__}{_advice(source)}"
        )

    @property
    def num_rows(self) -> int:
        return self.matrix.num_rows


@dataclasses.dataclass(frozen=True, eq=False)
class NamedArray(Named):
    """A dense source as an array on the host, perhaps with names."""

    matrix: np.ndarray

    @classmethod
    def of(cls, what: str, source: Dense) -> NamedArray:
        """Converts an array or a data set that a user passed as the argument `what`.

        Raises:
          TypeError: the source is not an array of numbers.
          ValueError: the source is a single number, or a value is not finite.
        """
        if isinstance(source, DenseDataset):
            return cls(what, source.values, source.row_names)
        return cls(what, dense_rows(what, source))


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a model: one source, or several by name.

    The first source with row names decides the order of rows. Other sources with row names
    are brought into this order; sources without row names already have it.

    Attributes:
      parts: sources by name. Row `i` of each belongs to row `i` of the others. A single
        source without a name is called "inputs".
      alone: whether it is a single source without a name.
    """

    parts: Mapping[str, NamedCSR | NamedArray]
    alone: bool

    @classmethod
    def of(cls, sources: Sources | Inputs) -> Inputs:
        """Converts the argument `inputs` of a public function.

        Raises:
          NotImplementedError: one of several sources is scanned.
          TypeError: a source has a type that is not supported.
          ValueError: there is no source, a row is missing, the numbers of rows differ, or
            a dense value is not finite.
        """
        if isinstance(sources, Inputs):
            return sources
        if not isinstance(sources, Mapping):
            return cls({"inputs": NamedCSR.of("inputs", sources)}, True)
        if not sources:
            raise ValueError("inputs is empty; give {name: source}")
        parts = {name: _part(name, source) for name, source in sources.items()}
        first = _first(parts)
        return cls({name: aligned(part, first) for name, part in parts.items()}, False)

    @property
    def rows(self) -> NamedCSR | NamedArray:
        """The source that decides the order of rows."""
        return _first(self.parts)

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def features(self) -> Features:
        """The value of `num_features` of a model that takes these inputs."""
        sizes = {
            name: part.matrix.shape[1:]
            if isinstance(part, NamedArray)
            else part.matrix.num_cols
            for name, part in self.parts.items()
        }
        return self.matrix.num_cols if self.alone else sizes

    @property
    def matrix(self) -> CSR:
        """The matrix of the single source without a name."""
        matrix = self.parts["inputs"].matrix
        assert isinstance(matrix, CSR)
        return matrix

    def named(self, what: str, source: Source | str) -> NamedCSR:
        """Converts a source for the argument `what`, or finds the sparse input of this name.

        Raises:
          TypeError: the source has a type that is not supported.
          ValueError: no sparse input has this name.
        """
        if not isinstance(source, str):
            return NamedCSR.of(what, source)
        found = self.parts.get(source)
        if not isinstance(found, NamedCSR):
            sparse = [n for n, part in self.parts.items() if isinstance(part, NamedCSR)]
            cure = "; exclude=None excludes nothing" if what == "exclude" else ""
            raise ValueError(
                f"{what} is data or the name of a sparse input, got {source!r}; there is "
                f"{_listed(sparse)}{cure}"
            )
        return found


def _part(name: Any, source: Any) -> NamedCSR | NamedArray:
    what = f"inputs[{name!r}]"
    if not isinstance(name, str):
        raise TypeError(f"the names of inputs are str, got {name!r}")
    if isinstance(source, Scan):
        raise NotImplementedError(
            f"{what} is scanned, but chunks of several files cannot be matched by row; "
            "read all inputs into memory, or train on one scanned input alone"
        )
    if isinstance(source, DenseDataset | np.ndarray | jax.Array):
        return NamedArray.of(what, source)
    if isinstance(source, SparseDataset | CSR) or scipy.sparse.issparse(source):
        return NamedCSR.of(what, source)
    raise TypeError(
        f"{what} is a SparseDataset, a CSR, a SciPy sparse matrix, a DenseDataset or an "
        f"array, got {type(source).__name__}"
    )


def _advice(source: Any) -> str:
    """Text for an error if a caller passed names in place of data, otherwise ""."""
    some: Any = source
    while isinstance(some, list | tuple | np.ndarray) and len(some):
        some = some[0]
    if not isinstance(some, str):
        return ""
    return (
        " of names. A model knows numbers only: a Run, or a predictor exported with "
        "names=train, knows the names. Of users: run.recommend([...]). Of the items that a user "
        "has had: predictor.recommend_names([...])"
    )


def _first(parts: Mapping[str, NamedCSR | NamedArray]) -> NamedCSR | NamedArray:
    """The first source that has row names; if there is none, the first source."""
    found = [part for part in parts.values() if part.row_names is not None]
    return [*found, *parts.values()][0]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def find_rows(wanted: Named, among: Named) -> np.ndarray:
    """`[wanted rows]`: the number of the matching row of `among`, or -1, for each row of `wanted`.

    Rows are matched by name if both have names. Otherwise row `i` belongs to row `i`.

    Raises:
      ValueError: a source has no names, and the numbers of rows differ.
    """
    if wanted.row_names is not None and among.row_names is not None:
        if wanted.row_names is among.row_names:
            return np.arange(wanted.num_rows)
        return find_names(wanted.row_names, among.row_names)
    if wanted.num_rows != among.num_rows:
        raise ValueError(
            f"{wanted.what} has {wanted.num_rows:,} rows but {among.what} has "
            f"{among.num_rows:,}; give the same rows, or give data sets for both: their "
            "rows are matched by name"
        )
    return np.arange(wanted.num_rows)


def aligned[T: Named](part: T, rows: Named) -> T:
    """Reorders the rows of `part` to match `rows`.

    Raises:
      ValueError: a row is missing, or the numbers of rows differ.
    """
    found = find_rows(rows, part)
    missing = np.flatnonzero(found < 0)
    if missing.size:
        raise ValueError(
            f"{missing.size:,} of {rows.num_rows:,} rows of {rows.what} are not in "
            f"{part.what}: {rows.labels(missing)}"
        )
    if np.array_equal(found, np.arange(part.num_rows)):
        return part
    matrix = part.matrix
    if isinstance(matrix, CSR):
        matrix = host_rows(jax.tree.map(np.asarray, matrix), found)
    else:
        matrix = matrix[found]
    return dataclasses.replace(part, matrix=matrix, row_names=rows.row_names)


def features_of(model: Any) -> Features:
    """The value of `model.num_features`.

    Raises:
      TypeError: the model has no `num_features`, or has a dict in an attribute of the module.
    """
    if not hasattr(model, "num_features"):
        raise TypeError(
            f"{type(model).__name__} has no num_features, as FeedForward has (a model of "
            "histories takes a SequenceDataset)"
        )
    if isinstance(vars(model).get("num_features"), Mapping):
        raise TypeError(
            f"num_features of {type(model).__name__} is a dict, which cannot be part of a "
            "compiled program as an attribute; make it a @property that returns the dict"
        )
    return model.num_features


def dense_row(features: tuple[int, ...] | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a row of a dense input; float32 if only a shape is given."""
    if isinstance(features, tuple):
        return jax.ShapeDtypeStruct(features, jnp.float32)
    return features


def check_inputs(inputs: Inputs, features: Features) -> None:
    """Raises ValueError if names, kinds or shapes of inputs do not match the model's features."""
    if not isinstance(features, Mapping):
        if not inputs.alone:
            raise ValueError(
                f"the model has one input, so give one source without a name; inputs has "
                f"the names {_listed(inputs.parts)}"
            )
        check_columns("inputs", inputs.matrix.num_cols, features, "features")
        return
    if inputs.alone:
        raise ValueError(
            f"the model has the inputs {_listed(features)}; give them by name, as "
            "{name: source}"
        )
    if inputs.parts.keys() != features.keys():
        raise ValueError(
            f"inputs has the names {_listed(inputs.parts)} but the model has the inputs "
            f"{_listed(features)}"
        )
    for name, expected in features.items():
        part = inputs.parts[name]
        if not isinstance(expected, int):
            _check_dense(part, dense_row(expected).shape)
        elif isinstance(part, NamedCSR):
            check_columns(part.what, part.matrix.num_cols, expected, "features")
        else:
            raise ValueError(
                f"{part.what} is dense but the model takes {expected:,} sparse features"
            )


def _check_dense(part: NamedCSR | NamedArray, shape: tuple[int, ...]) -> None:
    if isinstance(part, NamedCSR):
        raise ValueError(
            f"{part.what} is sparse but the model takes dense rows of shape {shape}"
        )
    if part.matrix.shape[1:] != shape:
        raise ValueError(
            f"{part.what} has rows of shape {part.matrix.shape[1:]} but the model "
            f"takes {shape}"
        )


def num_columns(what: str, source: Any) -> int:
    """The number of columns of data, in memory or scanned.

    Raises:
      TypeError: the source has a type that is not supported.
    """
    if isinstance(source, CSR):
        return source.num_cols
    if scipy.sparse.issparse(source):
        return source.shape[1]
    if isinstance(found := getattr(source, "num_features", None), int):
        return found
    raise TypeError(
        f"{what} must be a SparseDataset, a ScannedDataset, a CSR or a SciPy matrix, got "
        f"{type(source).__name__}"
    )


def check_columns(what: str, columns: int, expected: int, kind: str) -> None:
    """Raises ValueError if `columns` is not `expected`; `what` and `kind` are for the error."""
    if columns != expected:
        raise ValueError(
            f"{what} has {columns:,} columns but the model has {expected:,} {kind}; "
            "read both with the same vocabulary"
        )


def check_same_features(a: NamedCSR, b: NamedCSR) -> None:
    """Raises ValueError if two sources with equal numbers of features have different names."""
    ours, theirs = a.feature_names, b.feature_names
    if ours is None or theirs is None or ours is theirs or len(ours) != len(theirs):
        return
    different = np.flatnonzero(ours != theirs)
    if different.size:
        at = different[0]
        raise ValueError(
            f"column {at:,} is {ours[at]!r} in {a.what} but {theirs[at]!r} in {b.what}; "
            "read both with the same vocabulary"
        )
