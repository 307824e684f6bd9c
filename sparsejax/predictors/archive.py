"""The file of a predictor: a zip archive of programs, weights and JSON.

::

    programs/1          for one row: see `stablehlo`
    programs/8          for batches of 8 rows
    ...
    weights/0           elements of an array, little-endian
    ...
    names/0/...         other arrays
    NAME.json           JSON documents

Weights are arguments of the programs. As constants they would be stored in each program, slow down
its compilation, and be limited to 2 GiB. The archive has a checksum of each part. Only the
programs are compressed. No part has a timestamp, so that equal models give equal bytes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import math
import os
import zipfile
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import filelock
import jax
import numpy as np
import platformdirs
from jax import export

from sparsejax import codec, kept_files
from sparsejax.data.files.opening import is_address, shown
from sparsejax.data.files.stores import Place
from sparsejax.mesh import processes
from sparsejax.predictors.signature import Array
from sparsejax.whole_files import check_writable, opened_regular, whole_file

# Most bytes of settings and of a program in a file, far more than `save` writes.
MOST_SETTINGS, _MOST_PROGRAM = 2**20, 2**24
_PIECE = 2**24  # bytes that are read at a time


class Stored(NamedTuple):
    """An array that is written some rows at a time.

    Attributes:
      like: shape and dtype of the array.
      pieces: rows of the array in order. With several processes, each must iterate over all
          pieces.
      name: name of the array, as in `Array`.
    """

    like: jax.ShapeDtypeStruct | jax.Array
    pieces: Iterator[np.ndarray]
    name: str | None = None


def save(
    path: str | os.PathLike[str],
    documents: Mapping[str, Any],
    *,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Iterable[Stored],
    others: Iterable[tuple[str, np.ndarray]] = (),
) -> None:
    """Writes a predictor's file, under a temporary name that is renamed when it is complete.

    With several processes, the first one writes, and all help to collect the weights.

    Args:
      path: path of the file.
      documents: JSON values by part name.
      programs: pairs of a number of rows and the program for it.
      weights: the first argument of each program.
      others: further arrays by part name, read by the first process only.
    """
    parts = [weight.pieces for weight in weights]

    def write() -> None:
        try:
            _write(path, documents, programs, parts, others)
        except Exception:
            # All processes take the same number of pieces together, so the rest is taken here;
            # otherwise the other processes would wait for this one.
            _take_all(parts)
            raise

    if not processes.is_first():
        _take_all(parts)
    processes.in_first(write)


def _take_all(parts: Iterable[Iterator[np.ndarray]]) -> None:
    for _ in itertools.chain(*parts):
        pass


def _write(path, documents, programs, parts, others) -> None:
    check_writable(path)
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for rows, program in programs:
            # Programs are mostly text, so compression makes them much smaller.
            archive.writestr(
                zipfile.ZipInfo(f"programs/{rows}"),
                bytes(program.mlir_module_serialized),
                compress_type=zipfile.ZIP_DEFLATED,
            )
        weights = ((f"weights/{i}", pieces) for i, pieces in enumerate(parts))
        one_piece = ((name, [array]) for name, array in others)
        for name, pieces in itertools.chain(weights, one_piece):
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                for piece in pieces:
                    entry.write(_bytes_of(piece))
        for name, document in documents.items():
            archive.writestr(zipfile.ZipInfo(name), codec.text(document))


def _bytes_of(array: np.ndarray) -> memoryview:
    # The array is viewed as bytes, because the buffer protocol does not support bfloat16.
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Generator[io.BufferedReader]:
    """Opens a predictor's file.

    A file in an object store is copied to this host first, unless a copy exists.

    Raises:
      OSError: the file cannot be opened or copied.
      ValueError: the path is a pipe or a device.
    """
    if not is_address(path):
        with opened_regular(path) as file:
            yield file
        return
    place = Place.of(path)
    version = place.version()
    if version is None:
        raise FileNotFoundError(errno.ENOENT, "no such file", shown(path))
    folder = platformdirs.user_cache_path("sparsejax") / "predictors"
    kept_files.check_writable(folder)
    address = hashlib.blake2b(os.fspath(path).encode(), digest_size=8).hexdigest()
    with contextlib.ExitStack() as stack:
        with filelock.FileLock(folder / f"{address}.lock"):
            copy = folder / f"{address}-{version}"
            if not copy.is_file():
                for older in folder.glob(f"{address}-*"):
                    older.unlink(missing_ok=True)
                place.fetch(copy)
            # An open copy stays readable, even after a newer copy has replaced it.
            file = stack.enter_context(open(copy, "rb"))
        yield file


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Generator[None]:
    """While this context is open, an error in a file raises ValueError with the file's name.

    Raises:
      RuntimeError: this process was forked from one that has loaded a predictor.
    """
    check_process()
    try:
        yield
    except MemoryError:
        raise
    # Damaged files raise many kinds of exceptions, six by zipfile alone.
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"{path}: is not a predictor, or is damaged: {text}"
        ) from error


def read_json(archive: zipfile.ZipFile, name: str, most: int) -> Any:
    """The value of a JSON part in the archive; see `read_part`."""
    try:
        return codec.parse(read_part(archive, name, most))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def identity(path: str | os.PathLike[str], file: io.BufferedReader) -> str:
    """A hash of a file's content, made from the checksums of its parts.

    Raises:
      ValueError: the file is not a predictor.
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
    """Raises ValueError if the `identity` of a file is not `wanted`."""
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
    """A function that loads the same file again in any process, for pickling.

    Args:
      load: function that takes a path and the `identity` that the file must have.
      path: path or address of the file.
      file: the opened file.
    """
    where = os.fspath(path) if is_address(path) else os.path.abspath(path)
    return functools.partial(load, where, identity(path, file))


def pickled(again: Callable[[], Any] | None) -> tuple[Callable[..., Any], tuple]:
    """The result of `__reduce__` for a predictor.

    Raises:
      TypeError: the predictor was not loaded from a file.
    """
    if again is None:
        raise TypeError(
            "a predictor is pickled as the path of its file, and this one was not loaded "
            "from a file"
        )
    return again, ()


_process: int | None = None  # the process in which a predictor was loaded


def check_process() -> None:
    """Raises RuntimeError in a process that was forked after a predictor was loaded.

    A forked process has no threads to run programs, and would wait for them forever.
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


def read_program(archive: zipfile.ZipFile, rows: int) -> bytes:
    """Reads the program for a number of rows."""
    return read_part(archive, f"programs/{rows}", _MOST_PROGRAM)


def read_weights(
    archive: zipfile.ZipFile, arrays: Sequence[Array], length: int
) -> list[np.ndarray]:
    """Reads the weights, which together may have at most `length` bytes.

    Raises:
      ValueError: the weights are larger (memory is not allocated then), or a part has another size
          than its array.
    """
    _check_total(arrays, length)
    return [
        read_array(archive, f"weights/{i}", array.shape, array.like.dtype)
        for i, array in enumerate(arrays)
    ]


def _check_total(arrays: Sequence[Array], length: int) -> None:
    total = sum(array.num_bytes for array in arrays)
    if total > length:
        raise ValueError(
            f"the signature states weights of {total:,} bytes, in a file of {length:,}"
        )


def check_weights(
    archive: zipfile.ZipFile, arrays: Sequence[Array], length: int
) -> None:
    """Reads all weights without keeping them; see `read_weights`."""
    _check_total(arrays, length)
    for number, array in enumerate(arrays):
        name = f"weights/{number}"
        _check_stored(archive, name)
        found = sum(map(len, _pieces(archive, name, array.num_bytes)))
        if found != array.num_bytes:
            raise ValueError(
                f"{name} has {found:,} bytes, expected {array.num_bytes:,}"
            )


def check_names(archive: zipfile.ZipFile, known: Collection[str]) -> None:
    """Raises ValueError if an archive has an unknown part, or a part twice.

    No release wrote unknown parts, and no code would check their contents.
    """
    names = archive.namelist()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0][:80]!r} is no part of a predictor")
    if len(names) > len(set(names)):
        raise ValueError("has a part twice")


def read_array(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Reads the array of a part.

    Arrays are not compressed, so the file's size bounds the array's size.

    Raises:
      ValueError: the part has another size, or is compressed.
    """
    _check_stored(archive, name)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    content = read_part(archive, name, size)
    if len(content) != size:
        raise ValueError(f"{name} has {len(content):,} bytes, expected {size:,}")
    return np.frombuffer(content, dtype).reshape(shape)


def _check_stored(archive: zipfile.ZipFile, name: str) -> None:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is packed; expected a stored part")


def read_part(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Reads a part of the archive, and verifies its checksum.

    At most `most` bytes are decompressed, whatever size the archive states.

    Raises:
      ValueError: the part is larger than `most` bytes or than its stated size, or is compressed in
          another way than by `save`.
    """
    return b"".join(_pieces(archive, name, most))


def _pieces(archive: zipfile.ZipFile, name: str, most: int) -> Iterator[bytes]:
    """Yields the content that `read_part` returns, in pieces."""
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
        # A single read would decompress the whole part, even beyond the stated size.
        left = found.file_size
        while left and (piece := part.read(min(left, _PIECE))):
            yield piece
            left -= len(piece)
    if left:
        raise ValueError(f"{name} has {left:,} bytes fewer than it states")
