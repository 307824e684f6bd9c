"""A predictor as one file, a zip archive.

::

    predictor.json      version, sizes, lists of the programs and weights
    items.json          names of the items, or null
    programs/1          for one row: StableHLO, see `programs`
    programs/8          for batches of 8 rows
    ...
    weights/0           the numbers of an array, little-endian
    ...

Weights are arguments of the programs. As constants they would be in each program, would
be compiled, and could not exceed 2 GiB. The archive has a checksum of each part. Only the
programs are compressed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax import export

from sparsejax.data.files import is_address, shown
from sparsejax.data.names import Names, as_names
from sparsejax.data.sources import Features, dense_row, rows_of_inputs
from sparsejax.data.stores import Place
from sparsejax.mesh import processes
from sparsejax.mesh.layout import to_host_in_pieces
from sparsejax.mesh.xla_options import gpu_options
from sparsejax.prediction.predictor import Predictor
from sparsejax.prediction.programs import Signature
from sparsejax.whole_files import check_writable, whole_file

VERSION = 2
_SETTINGS, _ITEMS = "predictor.json", "items.json"

# Limits on what a file may state, far above what `save_predictor` writes.
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

    With several processes the first one writes, and all take part in collecting the
    weights.
    """
    parts = [to_host_in_pieces(weight) for weight in weights]

    def write() -> None:
        try:
            _write(path, settings, items, programs, parts)
        except Exception:
            _take_all(parts)  # the other processes do so, and wait for this one
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
            # Programs are mostly text, so they shrink.
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
    # As bytes, because the buffer protocol does not know bfloat16.
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8))


def load_predictor(path: str | os.PathLike[str]) -> Predictor:
    """Reads what `sparsejax.export_predictor` wrote.

    This needs neither Flax nor the model's code. It runs nothing that the file names:
    programs consist of arithmetic alone. JAX reads the programs of releases that are up
    to six months older.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")  # in another process
    >>> predictor.names(predictor.recommend(train, exclude=train))
    [['/...', '/...'], ...]

    Args:
      path: the file, or its address in a store, like `s3://bucket/model.predictor`. It is
        then copied once to the cache folder of the user, where later calls find it as
        long as it does not change. The processes of a host wait for the first copy.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a predictor, is damaged, has another version, or does
        something that a predictor may not do.
    """
    with _opened(path) as file:
        try:
            settings, items, programs, weights = _read(file)
        except MemoryError:
            raise
        # A damaged file can raise any of many kinds of exceptions, six in zipfile alone.
        except Exception as error:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(
                f"{path}: is not a predictor, or is damaged: {text}"
            ) from error
    options = dict(gpu_options()) or None
    return Predictor(
        k=settings.k,
        num_features=settings.num_features,
        num_items=settings.num_items,
        items=items,
        programs={
            size: jax.jit(program.call, compiler_options=options)
            for size, program in programs.items()
        },
        weights=[jnp.asarray(weight) for weight in weights],
    )


def predictor_identity(path: str | os.PathLike[str]) -> str:
    """A hash of a predictor's content, by the checksums of its parts.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a predictor.
    """
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                facts = [(e.filename, e.file_size, e.CRC) for e in archive.infolist()]
        except zipfile.BadZipFile as error:
            raise ValueError(f"{shown(path)}: is not a predictor: {error}") from error
    return hashlib.blake2b(repr(sorted(facts)).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """Opens a predictor. One in a store is copied to this host before, if it is new."""
    if not is_address(path):
        with open(path, "rb") as file:
            yield file
        return
    place = Place.of(path)
    version = place.version()
    if version is None:
        raise FileNotFoundError(errno.ENOENT, "no such file", shown(path))
    folder = platformdirs.user_cache_path("sparsejax") / "predictors"
    folder.mkdir(parents=True, exist_ok=True)
    address = hashlib.blake2b(os.fspath(path).encode(), digest_size=8).hexdigest()
    with contextlib.ExitStack() as stack:
        with filelock.FileLock(folder / f"{address}.lock"):
            copy = folder / f"{address}-{version}"
            if not copy.is_file():
                for older in folder.glob(f"{address}-*"):
                    older.unlink(missing_ok=True)
                place.fetch(copy)
            # Who has opened a file keeps it, also if a newer one takes its place.
            file = stack.enter_context(open(copy, "rb"))
        yield file


@dataclasses.dataclass(frozen=True)
class Settings:
    """What predictor.json says, checked.

    Attributes:
      k: most items for a row.
      num_features: number of input features; with several inputs a dict, as the model
        has it.
      num_items: number of items.
      programs: numbers of rows for which there are programs.
      convention: calling convention of the programs.
      weights: shape and dtype of each array of weights.
    """

    k: int
    num_features: Features
    num_items: int
    programs: tuple[int, ...]
    convention: int
    weights: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, stated: Any) -> Settings:
        """Reads the JSON object of a file.

        Raises:
          ValueError: it has another version, or `save_predictor` did not write it.
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
        raise ValueError(f"{_SETTINGS} does not have {name!r} of type {kind.__name__}")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{_SETTINGS} states a size of {value!r}")
    return value


def _stated_inputs(features: Features) -> list[dict[str, Any]]:
    """The JSON for the inputs of a model."""
    if isinstance(features, int):
        return [{"num_features": features}]
    return [
        {"name": name, "num_features": size}
        if isinstance(size, int)
        else {"name": name, **_stated_array(dense_row(size))}
        for name, size in features.items()
    ]


def _features(stated: list[Any]) -> Features:
    """Reads what `_stated_inputs` returned."""
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
            f"{_SETTINGS} states {len(stated)} inputs, but not a name of its own for each"
        )
    return features


def _stated_array(array: jax.ShapeDtypeStruct | jax.Array) -> dict[str, Any]:
    """The JSON for the shape and dtype of an array."""
    return {"dtype": jnp.dtype(array.dtype).name, "shape": array.shape}


def _array(stated: Any) -> jax.ShapeDtypeStruct:
    """Reads what `_stated_array` returned."""
    dtype, shape = _entry(stated, "dtype", str), _entry(stated, "shape", list)
    if dtype not in _DTYPES:
        raise ValueError(f"{_SETTINGS} states an array of dtype {dtype!r}")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise ValueError(f"{_SETTINGS} states an array of shape {shape}")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _read(
    file: io.BufferedReader,
) -> tuple[Settings, Names | None, dict[int, export.Exported], Sequence[np.ndarray]]:
    length = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        settings = Settings.of(json.loads(_part(archive, _SETTINGS, _MOST_SETTINGS)))
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
            raise ValueError(f"{_ITEMS} does not have {settings.num_items:,} names")
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
    """The content of a part of the archive; its checksum is compared.

    Raises:
      ValueError: the part is larger than `most` bytes.
    """
    size = archive.getinfo(name).file_size
    if size > most:
        raise ValueError(f"{name} has {size:,} bytes, more than {most:,}")
    return archive.read(name)
