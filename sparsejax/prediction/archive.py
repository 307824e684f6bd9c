"""What files of predictors have in common: a zip archive of programs and weights.

::

    SETTINGS            JSON: version, sizes, lists of the programs and weights
    ...                 more JSON
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
import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax import export

from sparsejax import codec
from sparsejax.data.files import is_address, shown
from sparsejax.data.stores import Place
from sparsejax.mesh import processes
from sparsejax.mesh.xla_options import gpu_options
from sparsejax.prediction.programs import ClickSignature, Signature
from sparsejax.whole_files import check_writable, whole_file

# Limits on what a file may state, far above what `save` writes.
_MOST_SETTINGS, _MOST_PROGRAM, _MOST_PROGRAMS = 2**20, 2**24, 64
_PIECE = 2**24  # bytes that are read at a time
_DTYPES = {
    name
    for name in (
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *(f"float{bits}" for bits in (16, 32, 64)),
        "bfloat16",
        "bool",
        "float8_e4m3fn",
    )
}


class Stored(NamedTuple):
    """An array that is written some rows at a time.

    Attributes:
      like: its shape and dtype.
      pieces: its rows in order. With several processes all have to take all pieces.
    """

    like: jax.ShapeDtypeStruct | jax.Array
    pieces: Iterator[np.ndarray]


def save(
    path: str | os.PathLike[str],
    name: str,
    settings: dict[str, Any],
    *,
    more: Mapping[str, Any],
    programs: Iterable[tuple[int, export.Exported]],
    weights: Sequence[Stored],
) -> None:
    """Writes a predictor, whole or not at all.

    With several processes the first one writes, and all take part in collecting the
    weights.

    Args:
      path: the file.
      name: of the part with the settings.
      settings: JSON. Programs and weights are added.
      more: further parts, JSON by their names.
      programs: with their numbers of rows.
      weights: the first argument of each program.
    """
    parts = [weight.pieces for weight in weights]
    settings = {
        **settings,
        "jax": jax.__version__,
        "programs": [],
        "weights": [stated_array(weight.like) for weight in weights],
    }

    def write() -> None:
        try:
            _write(path, name, settings, more, programs, parts)
        except Exception:
            _take_all(parts)  # the other processes do so, and wait for this one
            raise

    if not processes.is_first():
        _take_all(parts)
    processes.in_first(write)


def _take_all(parts: Iterable[Iterator[np.ndarray]]) -> None:
    for _ in itertools.chain(*parts):
        pass


def _write(path, name, settings, more, programs, parts) -> None:
    check_writable(path)
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for size, program in programs:
            settings["programs"].append(size)
            settings["calling_convention"] = program.calling_convention_version
            # Programs are mostly text, so they shrink.
            archive.writestr(
                _part(f"programs/{size}"),
                bytes(program.mlir_module_serialized),
                compress_type=zipfile.ZIP_DEFLATED,
            )
        for i, weight_parts in enumerate(parts):
            with archive.open(_part(f"weights/{i}"), "w", force_zip64=True) as entry:
                for part in weight_parts:
                    entry.write(_bytes_of(part))
        for other, document in more.items():
            archive.writestr(_part(other), json.dumps(document))
        archive.writestr(_part(name), json.dumps(settings, indent=2))


def _part(name: str) -> zipfile.ZipInfo:
    """An entry without the time, so that the same model is the same bytes."""
    return zipfile.ZipInfo(name)


def _bytes_of(array: np.ndarray) -> memoryview:
    # As bytes, because the buffer protocol does not know bfloat16.
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Generator[io.BufferedReader]:
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


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Generator[None]:
    """Within it, what is wrong with a file raises ValueError with its name.

    Raises:
      RuntimeError: see `check_process`.
    """
    check_process()
    try:
        yield
    except MemoryError:
        raise
    # A damaged file can raise any of many kinds of exceptions, six in zipfile alone.
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"{path}: is not a predictor, or is damaged: {text}"
        ) from error


def read_settings(archive: zipfile.ZipFile, name: str) -> Any:
    """The JSON of the settings."""
    return read_json(archive, name, _MOST_SETTINGS)


def read_json(archive: zipfile.ZipFile, name: str, most: int) -> Any:
    """What a part of the archive says; see `read_part`."""
    try:
        return codec.parse(read_part(archive, name, most))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def ready(
    programs: Mapping[int, export.Exported], weights: Iterable[np.ndarray]
) -> tuple[dict[int, Callable[..., Any]], list[jax.Array]]:
    """Programs that are compiled when they are first called, and weights on the device."""
    options = dict(gpu_options()) or None
    compiled: dict[int, Callable[..., Any]] = {
        size: jax.jit(program.call, compiler_options=options)
        for size, program in programs.items()
    }
    return compiled, jax.device_put(list(weights))


def identity(path: str | os.PathLike[str], file: io.BufferedReader) -> str:
    """A hash of a file's content, by the checksums of its parts.

    Raises:
      ValueError: it is not a predictor.
    """
    try:
        with zipfile.ZipFile(file) as parts:
            facts = [(e.filename, e.file_size, e.CRC) for e in parts.infolist()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{shown(path)}: is not a predictor: {error}") from error
    return hashlib.blake2b(repr(sorted(facts)).encode(), digest_size=16).hexdigest()


def check_identity(
    path: str | os.PathLike[str], file: io.BufferedReader, wanted: str
) -> None:
    """Raises ValueError if a file has another `identity`."""
    if identity(path, file) != wanted:
        raise ValueError(
            f"{shown(path)}: was replaced while it was used; load it again, or repeat the "
            "command"
        )


def again[Loaded](
    load: Callable[[str, str], Loaded],
    path: str | os.PathLike[str],
    file: io.BufferedReader,
) -> Callable[[], Loaded]:
    """What loads the same file again, in any process: how a predictor is pickled.

    Args:
      load: takes a path and the `identity` that the file must have.
      path: of the file, or its address.
      file: it, opened.
    """
    where = os.fspath(path) if is_address(path) else os.path.abspath(path)
    return functools.partial(load, where, identity(path, file))


def pickled(again: Callable[[], Any] | None) -> tuple[Callable[..., Any], tuple]:
    """What `__reduce__` of a predictor returns.

    Raises:
      TypeError: it does not come from a file.
    """
    if again is None:
        raise TypeError(
            "a predictor is pickled as the path of its file, and this one was not loaded "
            "from a file"
        )
    return again, ()


_process: int | None = None  # in which a predictor was loaded


def check_process() -> None:
    """Raises RuntimeError in a process that was forked from one with a predictor.

    A fork has none of the threads that run programs, and would wait for them for ever.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise RuntimeError(
            "this process was forked from one that has loaded a predictor, and JAX does "
            "not work in it; load predictors after the fork only (gunicorn without "
            "--preload), or start processes by spawn"
        )


def check_version(settings: Any, version: int) -> None:
    """Raises ValueError if settings have another version."""
    found = entry(settings, "version", int)
    if found != version:
        raise ValueError(
            f"predictor of version {found}; this release reads version {version}"
        )


def sizes_of_programs(settings: Any) -> tuple[int, ...]:
    """The numbers of rows for which a file has programs."""
    sizes = entry(settings, "programs", list)
    if not 1 <= len(sizes) <= _MOST_PROGRAMS:
        raise ValueError(f"the predictor states {len(sizes)} programs")
    return tuple(map(size, sizes))


def read_programs(
    archive: zipfile.ZipFile,
    signatures: Mapping[int, Signature | ClickSignature],
    convention: int,
) -> dict[int, export.Exported]:
    """The programs, for each number of rows."""
    return {
        rows: signature.load(
            read_part(archive, f"programs/{rows}", _MOST_PROGRAM), convention
        )
        for rows, signature in signatures.items()
    }


def check_sizes(shapes: Sequence[jax.ShapeDtypeStruct], length: int) -> None:
    """Raises ValueError if arrays are larger than the file, before memory is taken."""
    total = sum(map(_num_bytes, shapes))
    if total > length:
        raise ValueError(
            f"the settings state weights of {total:,} bytes, in a file of {length:,}"
        )


def read_weights(
    archive: zipfile.ZipFile, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    """The weights, after `check_sizes`."""
    weights = []
    for i, shape in enumerate(shapes):
        expected = _num_bytes(shape)
        content = read_part(archive, f"weights/{i}", expected)
        if len(content) != expected:
            raise ValueError(
                f"weights/{i} has {len(content):,} bytes, expected {expected:,}"
            )
        weights.append(np.frombuffer(content, shape.dtype).reshape(shape.shape))
    return weights


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def read_part(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The content of a part of the archive; its checksum is compared.

    Never more than `most` bytes are unpacked, whatever the archive states.

    Raises:
      ValueError: the part is larger than `most` bytes or than is stated, or packed in
        another way than `save` does.
    """
    found = archive.getinfo(name)
    if found.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"{name} is packed by method {found.compress_type}; expected stored or "
            "deflated parts"
        )
    if found.file_size > most:
        raise ValueError(f"{name} has {found.file_size:,} bytes, more than {most:,}")
    is_packed = found.compress_type == zipfile.ZIP_DEFLATED
    if not is_packed and found.compress_size != found.file_size:
        raise ValueError(f"{name} states two sizes")
    with archive.open(found) as part:
        # Read as a whole, it would be unpacked before it is cut to the stated size.
        pieces, left = [], found.file_size
        while left and (piece := part.read(min(left, _PIECE))):
            pieces.append(piece)
            left -= len(piece)
    if left:
        raise ValueError(f"{name} has {left:,} bytes fewer than it states")
    return b"".join(pieces)


def entry[T](stated: Any, name: str, kind: type[T]) -> T:
    """An entry of a JSON object of the settings."""
    value = stated.get(name) if isinstance(stated, dict) else None
    if type(value) is not kind:  # True is an int
        raise ValueError(f"the settings do not have {name!r} of type {kind.__name__}")
    if kind is int:
        codec.value(int, value, "the settings", name)
    return value


def size(value: object) -> int:
    """A positive int32 of the settings."""
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"the settings state a size of {value!r}")
    return value


def stated_array(array: jax.ShapeDtypeStruct | jax.Array) -> dict[str, Any]:
    """The JSON for the shape and dtype of an array."""
    return {"dtype": jnp.dtype(array.dtype).name, "shape": array.shape}


def array_of(stated: Any) -> jax.ShapeDtypeStruct:
    """Reads what `stated_array` returned."""
    dtype, shape = entry(stated, "dtype", str), entry(stated, "shape", list)
    if dtype not in _DTYPES:
        raise ValueError(f"the settings state an array of dtype {dtype!r}")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise ValueError(f"the settings state an array of shape {shape}")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
