"""Reading and writing of DSSTNE's NetCDF files of data sets.

A file is NetCDF-4, that is HDF5. For the n-th data set its root has the attributes
`name{n} attributes{n} kind{n} dataType{n} dimensions{n} width{n} [height{n} [length{n}]]`
and the variables `sparseStart{n} sparseEnd{n} sparseIndex{n} [sparseData{n}]` or `data{n}`,
and perhaps `index{n}` and `dataWeight{n}`. Names may be in `indToFeature{n}` and `samples`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from sparsejax.callers import needing
from sparsejax.data import DenseDataset, SparseDataset
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import DataError, Path
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows, find_problem
from sparsejax.dsstne.hdf5 import File, opened
from sparsejax.dsstne.index_files import index_names
from sparsejax.whole_files import check_writable, whole_file

with needing("DSSTNE's NetCDF files need {}", "dsstne"):
    import h5netcdf
    import h5py

_SPARSE, _BOOLEAN, _IGNORE_ZERO, _INDEXED, _WEIGHTED = 1, 2, 32, 64, 128
_UNUSED = 4 | 8 | 16  # Compressed, Recurrent, Mutable
_RGB8, _RGB16, _UCHAR, _CHAR = 6, 7, 8, 9
# The number `dataType{n}` of each type of values that can be written.
_DATA_TYPES = {
    np.uint32: 0,
    np.int32: 1,
    np.int64: 2,
    np.uint64: 3,
    np.float32: 4,
    np.float64: 5,
    np.uint8: _UCHAR,
    np.int8: _CHAR,
}

Index = Path | Iterable[object]


def read_datasets(
    path: Path,
    *,
    features: Index | Mapping[str, Index] | None = None,
    samples: Index | None = None,
    targets: Iterable[str] = (),
) -> dict[str, Any]:
    """Reads the data sets of one of DSSTNE's NetCDF files, by name.

    >>> baskets = read("purchases.tsv")
    >>> dsstne.write_datasets("purchases.nc", {"input": baskets, "ages": np.eye(3)})
    >>> data = dsstne.read_datasets("purchases.nc")
    >>> data["input"]
    SparseDataset(3 rows, 3 features, 6 entries, indicator)

    Sparse data and classes (Boolean data that is not sparse) become a `SparseDataset`,
    with the file's columns in their order. Dense data become float32
    `[rows, width]`, `[rows, height, width]` or `[rows, length, height, width]`; a
    `DenseDataset` if rows have names. Several entries of a row and a column are merged to
    an indicator, or to their sum. Bytes are scaled as in DSSTNE: dense UChar to
    `x / 256 - 0.5`, Char to `x / 128`; in targets to `x / 256` and `x / 128`.

    Columns after the last feature are padding and have names like `(padding 300)`. Names
    are taken from the indices that are given, otherwise from the file. Without any names,
    numbers are used.

    `read_weights` reads the weights of examples. `read_ignore_zeros` reads which data
    sets are SparseIgnoreZero.

    Args:
      path: the file.
      features: a file of names and their numbers, as `generateNetCDF` writes it, or the
        names in order; or a dict from data sets to such indices, if they differ.
      samples: a file of names and their numbers, or the names in order, for the rows of
        all data sets.
      targets: names of the data sets that a model should predict.

    Returns:
      A dict from each name to a `SparseDataset`, a `DenseDataset` or an array.

    Raises:
      DataError: the file is missing, damaged or wrong; the message names the variable. Or
        an index does not match the file.
      ValueError: the file has no data set with a given name.
    """
    found = load(path)
    targets = set(targets)
    if not isinstance(features, Mapping):
        shared = None if features is None else index_names(features)
        columns = dict.fromkeys(found, shared)
    else:
        columns = {str(name): index_names(index) for name, index in features.items()}
    unknown = sorted((targets | columns.keys()) - found.keys())
    if unknown:
        there = ", ".join(map(repr, found))
        raise ValueError(f"{path} has no data set {unknown[0]!r}; it has {there}")
    rows = None if samples is None else index_names(samples)
    sources = {}
    for name, dataset in found.items():
        try:
            sources[name] = dataset.source(
                target=name in targets, feature_names=columns.get(name), row_names=rows
            )
        except ValueError as error:
            raise DataError.at(path, f"the data set {name!r}: {error}") from error
    return sources


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads the weights of examples (`dataWeight`) from one of DSSTNE's NetCDF files.

    >>> data = {"input": np.eye(3), "output": np.eye(3)}
    >>> weights = np.array([1, 2, 0.5])
    >>> dsstne.write_datasets("rated.nc", data, weights={"output": weights})
    >>> dsstne.read_weights("rated.nc")
    {'output': array([1. , 2. , 0.5], dtype=float32)}

    The weights of the targets can be passed to `fit(weights=)`, with a `Network(weighted=True)`.

    Args:
      path: the file.

    Returns:
      `[rows]` float32 weights by the name of the data set, for data sets that have weights.
      `write_datasets` takes them in this form.

    Raises:
      DataError: the file is missing, damaged or wrong.
    """
    found = {name: data.example_weights() for name, data in load(path).items()}
    return {name: weights for name, weights in found.items() if weights is not None}


def read_ignore_zeros(path: Path) -> set[str]:
    """Reads which data sets of one of DSSTNE's NetCDF files are SparseIgnoreZero.

    >>> data = {"input": read("purchases.tsv"), "output": read("purchases.tsv")}
    >>> dsstne.write_datasets("listed.nc", data, ignore_zeros=["output"])
    >>> dsstne.read_ignore_zeros("listed.nc")
    {'output'}

    In a loss, only listed entries of these data sets count: `Network(ignore_zeros=True)`.

    Args:
      path: the file.

    Returns:
      Names of data sets, in the form that `write_datasets` takes.

    Raises:
      DataError: the file is missing, damaged or wrong.
    """
    return {name for name, dataset in load(path).items() if dataset.ignore_zeros}


def write_datasets(
    path: Path,
    datasets: Mapping[str, SparseDataset | DenseDataset | np.ndarray],
    *,
    weights: Mapping[str, ArrayLike] | None = None,
    ignore_zeros: Iterable[str] = (),
) -> None:
    """Writes data sets as one of DSSTNE's NetCDF files, whole or not at all.

    `read_datasets` returns equal data and names. DSSTNE matches the rows of data sets by
    position, so they are written in the order of the first data set whose rows have names.

    Args:
      path: the file.
      datasets: data by name. Rows are matched by name if they have names.
      weights: `[rows]` weights of the examples, by the name of the data set.
      ignore_zeros: names of the sparse data sets of which only the listed entries count in
        a loss (SparseIgnoreZero).

    Raises:
      OSError: the file cannot be written; no partial file is left.
      TypeError: a data set has another type.
      ValueError: a data set is empty or cannot be written, rows are missing, or weights
        do not match the data.
    """
    weights, ignoring = weights or {}, set(ignore_zeros)
    for what, names in (("weights", weights.keys()), ("ignore_zeros", ignoring)):
        if unknown := names - datasets.keys():
            raise ValueError(
                f"{what}: {min(unknown)!r} is no data set; there are "
                f"{', '.join(map(repr, datasets))}"
            )
    for name in sorted(ignoring):
        if not isinstance(datasets[name], SparseDataset):
            raise ValueError(
                f"ignore_zeros: {name!r} is not sparse, so all its entries are listed"
            )
    named = [
        d for d in datasets.values() if isinstance(d, SparseDataset | DenseDataset)
    ]
    found = {}
    for name, source in datasets.items():
        if isinstance(source, SparseDataset | DenseDataset):
            same = np.array_equal(source.row_names, named[0].row_names)
            if name in weights and not same:
                raise ValueError(
                    f"the rows of {name!r} would be reordered, but not its weights; give "
                    "all data sets the same rows"
                )
            source = source.align_rows(named[0])
        given = weights.get(name)
        given = None if given is None else np.asarray(given, np.float32)
        found[name] = FileDataset.of(
            source, weights=given, ignore_zeros=name in ignoring
        )
    save(path, found)


def load(path: Path) -> dict[str, FileDataset]:
    """Reads the data sets of a file by name, without conversion.

    Raises:
      DataError: the file is missing, damaged or wrong.
    """
    with opened(path, "data sets") as file:
        row_names = file.names("samples") if file.has("samples") else None
        found: dict[str, FileDataset] = {}
        for n in range(file.count("datasets", at_least=1)):
            name = file.text(f"name{n}")
            if name in found:
                raise DataError.at(path, f"name{n} is {name!r}, as an earlier one")
            dataset = _load(file, n, row_names)
            if problem := find_problem(dataset, n):
                raise DataError.at(path, problem)
            if row_names is not None and len(row_names) != dataset.num_examples:
                raise DataError.at(
                    path,
                    f"samples has {len(row_names):,} names but the data set {name!r} has "
                    f"{dataset.num_examples:,} examples",
                )
            found[name] = dataset
    return found


def _load(file: File, n: int, row_names: Names | None) -> FileDataset:
    """Reads data set `n` of a file, without checking it."""
    attributes = file.count(f"attributes{n}")
    known = _SPARSE | _BOOLEAN | _IGNORE_ZERO | _INDEXED | _WEIGHTED | _UNUSED
    if attributes & ~known:
        raise file.error(f"attributes{n} is {attributes}; known are sums of {known}")
    data_type = file.count(f"dataType{n}")
    if data_type == _RGB16:
        raise file.error(f"dataType{n} is {_RGB16} (RGB16), which is not supported")
    if data_type > _CHAR:
        raise file.error(f"dataType{n} is {data_type}; known are 0 to {_CHAR}")
    dimensions = file.count(f"dimensions{n}", at_least=1)
    if dimensions > 3:
        raise file.error(f"dimensions{n} is {dimensions}; expected 1 to 3")
    size = tuple(
        file.count(f"{name}{n}", at_least=1)
        for name in ("width", "height", "length")[:dimensions]
    )
    rows: SparseRows | Classes | np.ndarray
    if attributes & _SPARSE:
        values = None
        if not attributes & _BOOLEAN:
            values = _values(file, f"sparseData{n}", data_type)
        starts, ends, indices = (
            file.integers(f"{name}{n}")
            for name in ("sparseStart", "sparseEnd", "sparseIndex")
        )
        rows = SparseRows(starts, ends, indices, values)
    elif attributes & _BOOLEAN:
        rows = Classes(file.integers(f"data{n}"))
    else:
        rows = _values(file, f"data{n}", data_type)
        columns = FileDataset(size, rows).columns
        if len(rows) % columns:
            raise file.error(
                f"data{n} has {len(rows):,} values, which is no multiple of the "
                f"{columns:,} columns"
            )
        rows = rows.reshape(-1, *reversed(size))
    names = f"indToFeature{n}"
    return FileDataset(
        size,
        rows,
        index=file.integers(f"index{n}") if attributes & _INDEXED else None,
        weights=_values(file, f"dataWeight{n}", 4) if attributes & _WEIGHTED else None,
        ignore_zeros=bool(attributes & _IGNORE_ZERO),
        feature_names=file.names(names) if file.has(names) else None,
        row_names=row_names,
    )


def _values(file: File, name: str, data_type: int) -> np.ndarray:
    """The numbers of a variable, with a dtype of one byte if `data_type` has one byte."""
    array = file.array(name)
    wanted = {_RGB8: np.uint8, _UCHAR: np.uint8, _CHAR: np.int8}.get(data_type)
    if wanted is None:  # only data types of bytes are scaled later
        return array.astype(np.int32) if array.dtype.itemsize == 1 else array
    limits = np.iinfo(wanted)
    outside = ~((array >= limits.min) & (array <= limits.max))
    if outside.any():
        at = int(np.argmax(outside))
        raise file.error(
            f"{name}[{at}] is {array[at]}, which does not fit in its data type"
        )
    return array.astype(wanted, copy=False)


def save(path: Path, datasets: Mapping[str, FileDataset]) -> None:
    """Writes data sets as one file, whole or not at all.

    Raises:
      OSError: the file cannot be written; no partial file is left.
      ValueError: data sets do not match each other, as in `file_image`.
    """
    check_writable(path)
    image = file_image(datasets)
    with whole_file(path) as out:
        out.write(image)


def file_image(datasets: Mapping[str, FileDataset]) -> memoryview:
    """The content of a file of data sets.

    DSSTNE itself cannot read values that are 64-bit integers.

    Raises:
      ValueError: there is no data set, or one is empty or cannot be written.
    """
    if not datasets:
        raise ValueError("there is no data set to write")
    row_names = _shared_row_names(datasets)
    # The file is written in memory first, because HDF5 ends the process if the disk is full.
    image = io.BytesIO()
    with h5netcdf.File(image, "w") as file:
        file.attrs["datasets"] = np.uint32(len(datasets))
        for n, (name, dataset) in enumerate(datasets.items()):
            if not name or "\0" in name:
                raise ValueError(f"{name!r} cannot be the name of a data set")
            if problem := find_problem(dataset, n):
                raise ValueError(f"the data set {name!r}: {problem}")
            _save(file, n, name, dataset)
        if row_names is not None:
            file.dimensions["samplesDim"] = len(row_names)
            _save_names(file, "samples", "samplesDim", row_names)
    return image.getbuffer()


def _shared_row_names(datasets: Mapping[str, FileDataset]) -> Names | None:
    """The row names of the data sets, which must be equal in all of them.

    Raises:
      ValueError: the numbers or names of rows differ.
    """
    [(first, one), *others] = datasets.items()
    for name, other in others:
        if other.num_examples != one.num_examples:
            raise ValueError(
                f"{first!r} has {one.num_examples:,} rows but {name!r} has "
                f"{other.num_examples:,}"
            )
    named = [d.row_names for d in datasets.values() if d.row_names is not None]
    if any(not np.array_equal(names, named[0]) for names in named):
        raise ValueError("the rows of the data sets have different names")
    return named[0] if named else None


def _save(file: h5netcdf.File, n: int, name: str, dataset: FileDataset) -> None:
    rows = dataset.rows
    values = rows if isinstance(rows, np.ndarray) else None
    attributes = 0
    if isinstance(rows, SparseRows):
        attributes, values = _SPARSE, rows.values
    if values is None:
        attributes |= _BOOLEAN
    for flag, is_set in (
        (_IGNORE_ZERO, dataset.ignore_zeros),
        (_INDEXED, dataset.index is not None),
        (_WEIGHTED, dataset.weights is not None),
    ):
        attributes |= flag if is_set else 0
    dtype = np.dtype(np.uint32) if values is None else values.dtype
    if dtype.type not in _DATA_TYPES:
        raise ValueError(f"the data set {name!r}: values of {dtype} cannot be written")
    file.attrs[f"name{n}"] = np.bytes_(name.encode())
    counts = {
        "attributes": attributes,
        "kind": 0,
        "dataType": _DATA_TYPES[dtype.type],
        "dimensions": len(dataset.size),
        **dict(zip(("width", "height", "length"), dataset.size, strict=False)),
    }
    for key, count in counts.items():
        file.attrs[f"{key}{n}"] = np.uint32(count)

    def save(key: str, dimension: str, array: np.ndarray) -> None:
        file.create_variable(f"{key}{n}", (f"{dimension}{n}",), array.dtype, data=array)

    file.dimensions[f"examplesDim{n}"] = dataset.num_examples
    of_rows = "examplesDim"
    if dataset.index is not None:
        of_rows = "uniqueExamplesDim"
        file.dimensions[f"{of_rows}{n}"] = dataset.num_unique
    if isinstance(rows, SparseRows):
        file.dimensions[f"sparseDataDim{n}"] = len(rows.indices)
        offsets = np.uint32 if len(rows.indices) < 2**32 else np.uint64
        save("sparseStart", of_rows, rows.starts.astype(offsets))
        save("sparseEnd", of_rows, rows.ends.astype(offsets))
        save("sparseIndex", "sparseDataDim", rows.indices.astype(np.uint32))
    if isinstance(rows, Classes):
        file.dimensions[f"dataDim{n}"] = len(rows.ids)
        save("data", "dataDim", rows.ids.astype(np.uint32))
    if values is not None:
        values = np.ascontiguousarray(values).reshape(-1)
        if dtype == np.int8:
            values = values.view("S1")  # DSSTNE reads Char from NetCDF's char
        if isinstance(rows, SparseRows):
            save("sparseData", "sparseDataDim", values)
        else:
            file.dimensions[f"dataDim{n}"] = len(values)
            save("data", "dataDim", values)
    if dataset.index is not None:
        save("index", "examplesDim", dataset.index.astype(np.uint32))
    if dataset.weights is not None:
        by_example = len(dataset.weights) == dataset.num_examples
        dimension = "examplesDim" if by_example else of_rows
        save("dataWeight", dimension, np.asarray(dataset.weights, np.float32))
    if dataset.feature_names is not None and len(dataset.feature_names):
        dimension = f"indToFeatureDim{n}"
        file.dimensions[dimension] = len(dataset.feature_names)
        _save_names(file, f"indToFeature{n}", dimension, dataset.feature_names)


def _save_names(file: h5netcdf.File, key: str, dimension: str, names: Names) -> None:
    texts = np.array(names.tolist(), object)
    file.create_variable(key, (dimension,), h5py.string_dtype(), data=texts)
