"""A model as a program: `load_predictor` needs neither Flax nor the model's code.

A predictor is one file, a zip archive::

    predictor.json      version, sizes, what programs and weights there are
    items.json          names of the items, or null
    programs/1          for one row: StableHLO, see `sparsejax.programs`
    programs/8          for batches of 8 rows
    ...
    weights/0           the numbers of an array, little-endian
    ...

Weights are arguments of the programs: as constants they would be in each of them, would
be compiled, and could not pass 2 GiB. The archive has a checksum of each part, and only
the programs are compressed.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sparsejax.data.names import Names, as_names, quoted
from sparsejax.data.sources import (
    Features,
    Inputs,
    NamedCSR,
    Source,
    Sources,
    check_columns,
    check_inputs,
    check_same_features,
    dense_row,
    rows_of_inputs,
)
from sparsejax.mesh import processes
from sparsejax.mesh.layout import to_host_in_pieces, without_mesh
from sparsejax.prediction.loop import check_positive, collect, rows_of
from sparsejax.prediction.programs import Signature
from sparsejax.prediction.recommendations import Recommendations
from sparsejax.sparse import CSR, host_rows
from sparsejax.whole_files import check_writable, whole_file

VERSION = 2
_SETTINGS, _ITEMS = "predictor.json", "items.json"

# Programs are for 1, 8, 64, ... rows: few to compile, and fewer rows than half of a program
# take smaller ones.
_ROWS_STEP = 8
# Room for so many entries a row, but at least this many in all; and 4, 16, 64, ... times
# as many. An entry of room costs some nanoseconds.
_ENTRIES, _LEAST_ENTRIES, _ENTRIES_STEP = 64, 256, 4

# Bounds on what a file may state, far above what is written.
_MOST_SETTINGS, _MOST_PROGRAM, _MOST_PROGRAMS = 2**20, 2**24, 64
_DTYPES = {
    name
    for name in (
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *(f"float{bits}" for bits in (16, 32, 64)),
        "bfloat16",
        "bool",
    )
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictor:
    """What `sparsejax.load_predictor` returns.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")
    >>> predictor.recommend(train).ids.shape
    (32711, 2)
    >>> predictor.recommend_names(["/products", "/support"])
    ['/...', '/...']

    Programs are compiled when they are first needed, which takes a second or more: call
    `warm_up` before the first request.

    Attributes:
      k: number of items recommended to each row, at most.
      num_features: number of input features; of several inputs as the model has it.
      num_items: number of items that are scored.
      items: names of the items, or None.
      programs: for each number of rows, `(weights, inputs, exclude) -> (ids, scores)`,
        see `sparsejax.programs`; each is compiled for some numbers of entries.
      weights: their first argument, on the device.
    """

    k: int
    num_features: Features
    num_items: int
    items: Names | None
    programs: dict[int, Callable[..., Any]]
    weights: list[jax.Array]

    def recommend(
        self,
        inputs: Sources,
        *,
        k: int | None = None,
        exclude: Source | str | None = None,
    ) -> Recommendations:
        """The `k` best of all items for each row, as `sparsejax.recommend` has them.

        Scores may differ from those in the last bits, also with the number of rows that
        are asked for at once: other programs add in another order.

        Args:
          inputs: `[rows, num_features]`; or several by name.
          k: items per row, at most as many as the predictor was exported for, which is
            the default.
          exclude: `[rows, num_items]`, what not to recommend, or the name of an input;
            see `recommend`.

        Raises:
          FloatingPointError: a score is NaN; names the row.
          TypeError: `inputs` or `exclude` is no such data.
          ValueError: `inputs` or `exclude` does not fit the model or the other; `k` is
            too large.
        """
        shown = _on_host(Inputs.of(inputs))
        x = shown.rows
        if isinstance(x, NamedCSR) and self.num_items == self.num_features:
            check_same_features(
                x, NamedCSR("the predictor", x.matrix, None, self.items)
            )
        check_inputs(shown, self.num_features)
        if exclude is None:
            return self._recommend(shown, k, None, None)
        if exclude is inputs:
            exclude = "inputs"  # its name where it is the only one
        seen = _part_on_host(shown.named("exclude", exclude))
        check_columns("exclude", seen.matrix.num_cols, self.num_items, "items")
        if shown.alone and isinstance(x, NamedCSR):
            check_same_features(x, seen)
        return self._recommend(shown, k, seen.matrix, rows_of(seen, x))

    @overload
    def recommend_names(
        self,
        histories: Sequence[str],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[str]: ...

    @overload
    def recommend_names(
        self,
        histories: Sequence[Sequence[str]],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[list[str]]: ...

    def recommend_names(
        self,
        histories: Sequence[str] | Sequence[Sequence[str]],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[str] | list[list[str]]:
        """The names of the `k` best items for a history of names, or for several.

        >>> export_predictor(model, "model.predictor", k=2, names=train)
        >>> predictor = load_predictor("model.predictor")
        >>> predictor.recommend_names(["/products", "/support"], k=1)
        ['/...']
        >>> predictor.recommend_names([["/products"], []])
        [['/...', '/...'], ['/...', '/...']]

        A history is a set: a name that it has twice counts once, and every entry has
        the value 1. Names that the predictor does not know are passed over, and a
        history without any known name is an empty one, as of a new user.

        Args:
          histories: names of items, `["a", "b"]`; or a list of such lists. An empty list
            is one history.
          k: as for `recommend`.
          exclude_seen: do not recommend what the history has.
          unknown: "skip" passes over unknown names; "error" raises.

        Returns:
          Names from the best down, of each history: `k`, or fewer where items run out.

        Raises:
          FloatingPointError: a score is NaN; names the row.
          TypeError: a name is no string, or a string stands for a history.
          ValueError: a name is unknown, and `unknown` is "error"; the predictor was
            exported without names, or its inputs are not its items; `k` is too large.
        """
        if unknown not in ("skip", "error"):
            raise ValueError(f'unknown is "skip" or "error", got {unknown!r}')
        if isinstance(histories, str):
            raise TypeError(
                f"a history is a list of names, got the string {histories!r}"
            )
        one = all(isinstance(part, str) for part in histories)
        several = cast(Sequence[Sequence[str]], [histories] if one else histories)
        matrix = self._matrix_of(several, unknown)
        shown = Inputs({"inputs": NamedCSR("histories", matrix)}, alone=True)
        rows = np.arange(matrix.num_rows)
        found = self._recommend(shown, k, matrix if exclude_seen else None, rows)
        names = self.names(found)
        return names[0] if one else names

    def names(self, found: Recommendations) -> list[list[str]]:
        """The recommended items of each row by name.

        Raises:
          ValueError: the predictor was exported without names.
        """
        return found.names(self._item_names())

    def warm_up(self, *, max_items: int = 256, rows: int = 1) -> None:
        """Compiles and runs all programs that small requests need, ahead of the first.

        Args:
          max_items: entries of a row, or of what it excludes, at most.
          rows: rows of a request, at most.

        Raises:
          ValueError: an argument is not positive.
        """
        check_positive(max_items=max_items, rows=rows)
        largest = max(self.programs)
        sizes = {s for n in range(1, min(rows, largest) + 1) for s in self._sizes(n)}
        empty = [
            _NOTHING if row is None else np.zeros((0, *row.shape), row.dtype)
            for row in rows_of_inputs(self.num_features)
        ]
        for size in sorted(sizes):
            room = 0
            while room < max_items * size:
                room = _room(size, room + 1)
                jax.block_until_ready(self._run(size, empty, _NOTHING, room))
        if self.items is not None:
            _ = self._columns

    def _item_names(self) -> Names:
        if self.items is None:
            raise ValueError(
                "this predictor has no names; export it with names=..., or use "
                "found.names(...)"
            )
        return self.items

    @functools.cached_property
    def _columns(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._item_names().tolist())}

    def _matrix_of(
        self, histories: Sequence[Sequence[str]], unknown: Literal["skip", "error"]
    ) -> CSR:
        """`[histories, num_features]`."""
        if not isinstance(self.num_features, int):
            raise ValueError(
                "the predictor has several inputs; use recommend({name: source})"
            )
        columns = self._columns
        if self.num_features != self.num_items:
            raise ValueError(
                f"the predictor knows the names of its {self.num_items:,} items, not of "
                f"its {self.num_features:,} features; use recommend with a matrix"
            )
        rows: list[list[int]] = []
        missing: list[str] = []
        for history in histories:
            if isinstance(history, str) or not isinstance(history, Iterable):
                raise TypeError(
                    "expected one list of names, or a list of such lists; among lists "
                    f"there is {history!r}"
                )
            for name in history:
                if not isinstance(name, str):
                    raise TypeError(f"a name is a str, got {name!r}")
            known = {columns[name] for name in history if name in columns}
            rows.append(sorted(known))
            missing += [name for name in history if name not in columns]
        if missing and unknown == "error":
            raise ValueError(
                f"{len(missing):,} of {sum(map(len, histories)):,} names are no items of "
                f"the predictor: {quoted(missing)}"
            )
        indices = np.fromiter(itertools.chain(*rows), np.int32)
        indptr = np.cumsum([0, *map(len, rows)])
        return CSR(None, indices, indptr, num_cols=self.num_features)

    def _recommend(
        self,
        shown: Inputs,
        k: int | None,
        seen: CSR | None,
        seen_rows: np.ndarray | None,
    ) -> Recommendations:
        k = self.k if k is None else k
        check_positive(k=k)
        if k > self.k:
            raise ValueError(
                f"k is {k} but the predictor was exported for k={self.k}; export it "
                "again with a larger k"
            )
        x, matrices = shown.rows, self._in_order(shown)
        sizes = self._sizes(x.num_rows)
        starts = itertools.accumulate(sizes, initial=0)
        counts = [
            min(size, x.num_rows - start)
            for size, start in zip(sizes, starts, strict=False)
        ]

        def results() -> Iterator[Any]:
            start = 0
            for size, count in zip(sizes, counts, strict=True):
                rows = np.arange(start, start + count)
                parts = [
                    host_rows(matrix, rows) if isinstance(matrix, CSR) else matrix[rows]
                    for matrix in matrices
                ]
                unwanted = _NOTHING
                if seen is not None and seen_rows is not None:
                    unwanted = host_rows(seen, seen_rows[rows])
                sparse = [part for part in (*parts, unwanted) if isinstance(part, CSR)]
                room = _room(size, max(part.nse for part in sparse))
                yield self._run(size, parts, unwanted, room)
                start += count

        return collect(x, k, counts, results())

    def _sizes(self, rows: int) -> list[int]:
        """The programs for so many rows: the largest is full, the last at least half."""
        known, sizes = sorted(self.programs), []
        while rows > 0:
            fits = min((s for s in known if rows <= s <= 2 * rows), default=None)
            size = fits or max(s for s in known if s <= rows)
            sizes.append(size)
            rows -= size
        return sizes

    def _in_order(self, shown: Inputs) -> list[CSR | np.ndarray]:
        """The inputs' matrices and arrays, in the order in which programs take them."""
        if not isinstance(self.num_features, Mapping):
            return [shown.matrix]
        return [shown.parts[name].matrix for name in self.num_features]

    def _run(
        self, size: int, parts: Sequence[CSR | np.ndarray], unwanted: CSR, room: int
    ):
        """Ids and scores of a batch, not waited for."""
        dtypes = rows_of_inputs(self.num_features)
        inputs = [
            _csr_arrays(part, size, room)
            if isinstance(part, CSR)
            else _dense_rows(part, size, row)
            for part, row in zip(parts, dtypes, strict=True)
        ]
        exclude = _arrays(unwanted, size, room)
        with without_mesh():  # programs are for one device
            return self.programs[size](self.weights, inputs, exclude)


def sizes_of_programs(largest: int) -> list[int]:
    """The numbers of rows that there are programs for."""
    sizes = [1]
    while sizes[-1] * _ROWS_STEP < largest:
        sizes.append(sizes[-1] * _ROWS_STEP)
    return [*sizes, largest] if largest > 1 else sizes


_NOTHING = CSR(None, np.empty(0, np.int32), np.zeros(1, np.int32), num_cols=1)


def _room(rows: int, entries: int) -> int:
    """Room for these entries, one of few sizes."""
    room = max(_LEAST_ENTRIES, _ENTRIES * rows)
    while room < entries:
        room *= _ENTRIES_STEP
    return room


def unflattened(features: Features, inputs: Sequence[Any]) -> Any:
    """What a model takes, from the inputs of a program."""
    if isinstance(features, int):
        return CSR(*inputs[0], num_cols=features)
    return {
        name: CSR(*given, num_cols=size) if isinstance(size, int) else given
        for (name, size), given in zip(features.items(), inputs, strict=True)
    }


def _csr_arrays(matrix: CSR, rows: int, room: int) -> tuple[np.ndarray, ...]:
    data = np.ones(matrix.nse) if matrix.data is None else matrix.data
    return _padded(data, room, np.float32), *_arrays(matrix, rows, room)


def _dense_rows(
    array: np.ndarray, rows: int, row: jax.ShapeDtypeStruct | None
) -> np.ndarray:
    """The array with further rows of zeros, in the dtype of the program."""
    assert row is not None
    return _padded(array.astype(row.dtype, copy=False), rows, row.dtype)


def _arrays(matrix: CSR, rows: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and indptr of a matrix on the host, with further rows that are empty."""
    indptr = np.asarray(matrix.indptr)
    more = (0, rows + 1 - len(indptr))
    indptr = np.pad(indptr, more, mode="edge").astype(np.int32)
    return _padded(np.asarray(matrix.indices), room, np.int32), indptr


def _padded(array, room: int, dtype) -> np.ndarray:
    padded = np.zeros((room, *np.shape(array)[1:]), dtype)
    padded[: len(array)] = array
    return padded


def _on_host(inputs: Inputs) -> Inputs:
    """The same in NumPy."""
    parts = {
        name: _part_on_host(part) if isinstance(part, NamedCSR) else part
        for name, part in inputs.parts.items()
    }
    return dataclasses.replace(inputs, parts=parts)


def _part_on_host(part: NamedCSR) -> NamedCSR:
    """The same in NumPy, checked if it was not."""
    matrix = part.matrix
    if isinstance(matrix.indices, np.ndarray):
        return part
    data = None if matrix.data is None else np.asarray(matrix.data)
    leaves = np.asarray(matrix.indices), np.asarray(matrix.indptr)
    return dataclasses.replace(
        part, matrix=CSR(data, *leaves, num_cols=matrix.num_cols)
    )


def save_predictor(
    path: str | os.PathLike[str],
    *,
    k: int,
    num_features: Features,
    num_items: int,
    items: Sequence[str] | None,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Sequence[jax.Array],
) -> None:
    """Writes a predictor, whole or not at all; see `sparsejax.export_predictor`.

    Of several processes the first writes; all bring the parts of the weights together.
    """
    parts = [to_host_in_pieces(weight) for weight in weights]

    def write() -> None:
        try:
            _write(path, settings, items, programs, parts)
        except Exception:
            _take_all(parts)  # as the others do
            raise

    settings = {
        "version": VERSION,
        "jax": jax.__version__,
        "k": k,
        "num_items": num_items,
        "inputs": _stated_inputs(num_features),
        "programs": [],
        "weights": [_stated_array(weight) for weight in weights],
    }
    if not processes.is_first():
        _take_all(parts)
    processes.in_first(write)


def _take_all(parts: Iterable[Iterator[np.ndarray]]) -> None:
    for _ in itertools.chain(*parts):
        pass


def _write(path, settings, items, programs, parts) -> None:
    check_writable(path)
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for size, program in programs:
            settings["programs"].append(size)
            settings["calling_convention"] = program.calling_convention_version
            # They are text in the main.
            archive.writestr(
                f"programs/{size}",
                bytes(program.mlir_module_serialized),
                compress_type=zipfile.ZIP_DEFLATED,
            )
        for i, weight_parts in enumerate(parts):
            with archive.open(f"weights/{i}", "w", force_zip64=True) as entry:
                for part in weight_parts:
                    entry.write(_bytes_of(part))
        archive.writestr(_ITEMS, json.dumps(items))
        archive.writestr(_SETTINGS, json.dumps(settings, indent=2))


def _bytes_of(array: np.ndarray) -> memoryview:
    # As bytes, since the buffer protocol has no bfloat16.
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8))


def load_predictor(path: str | os.PathLike[str]) -> Predictor:
    """Reads what `sparsejax.export_predictor` wrote.

    Needs neither Flax nor the model's code, and runs nothing that the file names:
    programs consist of arithmetic alone. JAX reads programs of releases up to six months
    older than itself.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")  # in another process
    >>> predictor.names(predictor.recommend(train, exclude=train))
    [['/...', '/...'], ...]

    Raises:
      OSError: the file cannot be read.
      ValueError: it is something else, of another version, damaged, or does what a
        predictor may not.
    """
    with open(path, "rb") as file:
        try:
            settings, items, programs, weights = _read(file)
        except MemoryError:
            raise
        # Of zipfile alone there are six kinds; a file from elsewhere finds them all.
        except Exception as error:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(
                f"{path}: is no predictor, or is damaged: {text}"
            ) from error
    return Predictor(
        k=settings.k,
        num_features=settings.num_features,
        num_items=settings.num_items,
        items=items,
        programs={size: jax.jit(program.call) for size, program in programs.items()},
        weights=[jnp.asarray(weight) for weight in weights],
    )


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What predictor.json says, checked.

    Attributes:
      k: items for each row.
      num_features: of the input; of several inputs as the model has it.
      num_items: of the model.
      programs: their numbers of rows.
      convention: their calling convention.
      weights: shape and dtype of each.
    """

    k: int
    num_features: Features
    num_items: int
    programs: tuple[int, ...]
    convention: int
    weights: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, stated: Any) -> _Settings:
        """Takes the JSON.

        Raises:
          ValueError: it is of another version, or not what is written.
        """
        version = _entry(stated, "version", int)
        if version != VERSION:
            raise ValueError(
                f"predictor of version {version}; this release reads version {VERSION}"
            )
        inputs = _entry(stated, "inputs", list)
        sizes = _entry(stated, "programs", list)
        if not 1 <= len(sizes) <= _MOST_PROGRAMS:
            raise ValueError(f"the predictor states {len(sizes)} programs")
        return cls(
            k=_size(_entry(stated, "k", int)),
            num_features=_features(inputs),
            num_items=_size(_entry(stated, "num_items", int)),
            programs=tuple(map(_size, sizes)),
            convention=_entry(stated, "calling_convention", int),
            weights=tuple(map(_array, _entry(stated, "weights", list))),
        )


def _entry[T](stated: Any, name: str, kind: type[T]) -> T:
    """An entry of a JSON object."""
    value = stated.get(name) if isinstance(stated, dict) else None
    if type(value) is not kind:  # True is an int
        raise ValueError(f"{_SETTINGS} has no {name!r} of type {kind.__name__}")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{_SETTINGS} states a size of {value!r}")
    return value


def _stated_inputs(features: Features) -> list[dict[str, Any]]:
    """What predictor.json says of the inputs."""
    if isinstance(features, int):
        return [{"num_features": features}]
    return [
        {"name": name, "num_features": size}
        if isinstance(size, int)
        else {"name": name, **_stated_array(dense_row(size))}
        for name, size in features.items()
    ]


def _features(stated: list[Any]) -> Features:
    """What `_stated_inputs` wrote."""
    if len(stated) == 1 and isinstance(stated[0], dict) and "name" not in stated[0]:
        return _size(_entry(stated[0], "num_features", int))
    features: dict[str, int | jax.ShapeDtypeStruct] = {}
    for one in stated:
        name = _entry(one, "name", str)
        if "num_features" in one:
            features[name] = _size(_entry(one, "num_features", int))
        else:
            features[name] = _array(one)
    if not stated or len(features) != len(stated):
        raise ValueError(
            f"{_SETTINGS} states {len(stated)} inputs, without one name each"
        )
    return features


def _stated_array(array: jax.ShapeDtypeStruct | jax.Array) -> dict[str, Any]:
    """What predictor.json says of an array."""
    return {"dtype": jnp.dtype(array.dtype).name, "shape": array.shape}


def _array(stated: Any) -> jax.ShapeDtypeStruct:
    """What `_stated_array` wrote."""
    dtype, shape = _entry(stated, "dtype", str), _entry(stated, "shape", list)
    if dtype not in _DTYPES:
        raise ValueError(f"{_SETTINGS} states an array of dtype {dtype!r}")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise ValueError(f"{_SETTINGS} states an array of shape {shape}")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _read(
    file: io.BufferedReader,
) -> tuple[_Settings, Names | None, dict[int, export.Exported], Sequence[np.ndarray]]:
    length = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        settings = _Settings.of(json.loads(_part(archive, _SETTINGS, _MOST_SETTINGS)))
        shapes = settings.weights
        sizes = [math.prod(w.shape) * w.dtype.itemsize for w in shapes]
        if sum(sizes) > length:
            raise ValueError(
                f"{_SETTINGS} states weights of {sum(sizes):,} bytes, in a file of "
                f"{length:,}"
            )
        items = json.loads(_part(archive, _ITEMS, length))
        if items is not None and (
            not isinstance(items, list)
            or len(items) != settings.num_items
            or not all(type(name) is str for name in items)
        ):
            raise ValueError(f"{_ITEMS} has no {settings.num_items:,} names")
        programs = {}
        for rows in settings.programs:
            signature = Signature(
                rows=rows,
                k=settings.k,
                weights=shapes,
                inputs=rows_of_inputs(settings.num_features),
            )
            code = _part(archive, f"programs/{rows}", _MOST_PROGRAM)
            programs[rows] = signature.load(code, settings.convention)
        weights = []
        for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            content = _part(archive, f"weights/{i}", size)
            if len(content) != size:
                raise ValueError(
                    f"weights/{i} has {len(content):,} bytes, expected {size:,}"
                )
            weights.append(np.frombuffer(content, shape.dtype).reshape(shape.shape))
    return settings, None if items is None else as_names(items), programs, weights


def _part(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The content of a part, whose checksum is compared.

    Raises:
      ValueError: it is larger than it may be.
    """
    size = archive.getinfo(name).file_size
    if size > most:
        raise ValueError(f"{name} has {size:,} bytes, more than {most:,}")
    return archive.read(name)
