"""Reads HDF5 files that may be damaged or hostile. NetCDF-4 files are HDF5 files.

Files are read with h5py only. It hangs on one kind of damage, which is checked first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import struct
from collections.abc import Generator
from typing import Any

import numpy as np

from sparsejax.callers import needing
from sparsejax.data.files.names import Names, as_names, check_unique
from sparsejax.data.files.opening import DataError, Path, check_regular
from sparsejax.dsstne.datasets import check_memory

with needing("DSSTNE's NetCDF files need {}", "dsstne"):
    import h5py

# First bytes of the NetCDF formats that are not based on HDF5.
_CLASSIC = tuple(b"CDF" + bytes([version]) for version in (1, 2, 5))
# The signature of a global heap, and the header of an object in it: number, count, size.
_HEAP = b"GCOL\x01"
_HEAP_OBJECT = struct.Struct("<H6sQ")
# Types of attributes that can be read.
_KINDS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING)
# Layout of three numbers in the file: bytes of an attribute's name, type and dimensions.
_ATTRIBUTE_SIZES = struct.Struct("<HHH")
# Chunks of at most this size are read, even if they are far smaller in the file.
_SMALL_CHUNK = 16 * 2**20
# HDF5's reference to a text of variable length, which is stored at the address.
_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])


@contextlib.contextmanager
def opened(path: Path, what: str) -> Generator[File]:
    """While this context is open, the file is open for reading.

    Args:
      path: the file.
      what: content that the file should have, for messages.

    Raises:
      DataError: the file is missing or is not NetCDF-4.
    """
    check_regular(path)
    with damage(path, "is no NetCDF-4 file"):
        with open(path, "rb") as file:
            start = file.read(4)
            size = file.seek(0, io.SEEK_END)
            ends = size == 0 or _texts_end(file, size)
        if start in _CLASSIC:
            raise DataError.at(
                path,
                "is a NetCDF file of the classic format; convert it: nccopy -k nc4",
            )
        if not ends:
            raise DataError.at(path, "is damaged: a list of its texts has no end")
        file = h5py.File(path, "r")
    with file:
        yield File(path, file, size, what)


def _texts_end(file: io.BufferedReader, size: int) -> bool:
    """Whether HDF5 can read to the end of each global heap, in which it stores texts.

    An object with number 0 is free space, and its size is the distance to the next object. If
    that size is 0, HDF5 loops forever.
    """
    steps = 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_HEAP)
        while at >= 0:
            header = data[at + 8 : at + 16]
            end = min(at + int.from_bytes(header, "little"), size)
            place = at + 16
            while place + 16 <= end:
                number, _, length = _HEAP_OBJECT.unpack_from(data, place)
                move = length if number == 0 else 16 + (length + 7) // 8 * 8
                steps += 1
                # The number of steps is bounded: heaps do not overlap, and an object has at least
                # 16 bytes.
                if move == 0 or steps > size // 16:
                    return False
                place += move
            at = data.find(_HEAP, at + 1)
    return True


def _start_of_value(data: mmap.mmap, at: int, length: int) -> int | None:
    """Position of an attribute's value. Its name, of `length` bytes, is at `at`.

    An attribute consists of a version, flags, the sizes of its name, type and dimensions, then
    its name, type, dimensions and value. Version 3 has the name's encoding before the name. In
    version 1, each of these parts is padded to a multiple of 8 bytes.

    Returns:
      The position; None if there is no attribute with a name of this length.
    """
    for versions, size in (((1, 2), 8), ((3,), 9)):
        if at < size or data[at - size] not in versions:
            continue
        sizes = _ATTRIBUTE_SIZES.unpack_from(data, at - size + 2)
        if sizes[0] != length:
            continue
        if data[at - size] == 1:
            sizes = [(part + 7) // 8 * 8 for part in sizes]
        return at + sum(sizes)
    return None


@contextlib.contextmanager
def damage(path: Path, what: str) -> Generator[None]:
    """Converts h5py's errors to DataError; for damaged files they may have any type."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError.at(path, f"{what}: {reason or type(error).__name__}") from error


@dataclasses.dataclass(frozen=True)
class File:
    """Reads attributes and variables of an HDF5 file, which may be damaged or malicious."""

    path: Path
    file: h5py.File
    size: int
    what: str

    def error(self, message: str) -> DataError:
        return DataError.at(self.path, message)

    def has(self, name: str) -> bool:
        with damage(self.path, f"{name} cannot be read"):
            return name in self.file

    def has_attribute(self, name: str) -> bool:
        with damage(self.path, f"the attribute {name} cannot be read"):
            return name in self.file.attrs

    def attribute(self, name: str) -> Any:
        with damage(self.path, f"the attribute {name} cannot be read"):
            if name not in self.file.attrs:
                raise self.error(
                    f"has no attribute {name}, so it holds no {self.what} of DSSTNE"
                )
            stored = self.file.attrs.get_id(name)
            if stored.get_space().get_simple_extent_type() == h5py.h5s.NULL:
                return b""
            if stored.get_storage_size() > 2**16:
                raise self.error(f"the attribute {name} is too large")
            kind = stored.get_type()
            if kind.get_class() not in _KINDS:
                raise self.error(f"the attribute {name} is no number and no text")
            if isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str():
                self._check_text(name, stored.get_storage_size())
            return self.file.attrs[name]

    def _check_text(self, name: str, size: int) -> None:
        """Raises DataError if a text attribute states more bytes than the file has.

        HDF5 would allocate the memory that a damaged file states for a text, up to 4 GiB. The
        position of the text's reference is not known, so all positions that begin like this
        attribute are checked.
        """
        key, found = name.encode() + b"\0", False
        with (
            open(self.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            at = data.find(key)
            while at >= 0:
                start = _start_of_value(data, at, len(key))
                stored = b"" if start is None else data[start : start + size]
                if len(stored) == size:
                    found = True
                    lengths = np.frombuffer(stored, _REFERENCE)["length"]
                    if lengths.sum(dtype=np.int64) > self.size:
                        raise self.error(
                            f"the attribute {name} is longer than the file"
                        )
                at = data.find(key, at + 1)
        if not found:
            raise self.error(
                f"the attribute {name} is a text whose length cannot be checked; store "
                "it as text of a fixed length, as DSSTNE does"
            )

    def count(self, name: str, *, at_least: int = 0) -> int:
        value = np.asarray(self.attribute(name))
        if value.size != 1 or value.dtype.kind not in "iu":
            raise self.error(f"the attribute {name} is no integer")
        count = int(value.reshape(()))
        if not at_least <= count < 2**32:
            raise self.error(
                f"{name} is {count}; expected a number from {at_least} to {2**32 - 1}"
            )
        return count

    def number(self, name: str) -> float:
        """A float32 attribute as the shortest decimal number that rounds to it."""
        value = np.asarray(self.attribute(name))
        if value.size != 1 or value.dtype.kind not in "iuf" or value.dtype.itemsize > 8:
            raise self.error(f"the attribute {name} is no number")
        with np.errstate(over="ignore"):
            number = float(str(np.float32(value.reshape(()))))
        if not np.isfinite(number):
            raise self.error(f"the attribute {name} is {number}")
        return number

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        value = self.attribute(name)
        with damage(self.path, f"the attribute {name} is no text"):
            value = np.asarray(value).reshape(()).item()
            text = value.decode() if isinstance(value, bytes) else value
            if not isinstance(text, str) or not (text or may_be_empty):
                raise self.error(f"the attribute {name} is no text")
            return text

    def variable(self, name: str) -> h5py.Dataset:
        """A variable of this file; an error if it is too large for its bytes in the file."""
        with damage(self.path, f"{name} cannot be read"):
            if name not in self.file:
                raise self.error(f"has no variable {name}")
            found = self.file[name]
            hard = isinstance(self.file.get(name, getlink=True), h5py.HardLink)
            if not isinstance(found, h5py.Dataset) or not hard:
                raise self.error(f"{name} is no variable")
            if found.external or found.is_virtual:
                raise self.error(f"{name} lies in another file")
            stored = found.id.get_storage_size()
            size = found.size or 0
            check_memory(name, size * found.dtype.itemsize, stored)
            chunk = int(np.prod(found.chunks or (0,), dtype=np.float64))
            if chunk * found.dtype.itemsize > _SMALL_CHUNK:
                check_memory(f"a chunk of {name}", chunk * found.dtype.itemsize, stored)
            return found

    def array(self, name: str) -> np.ndarray:
        """A variable's numbers as a flat array."""
        found = self.variable(name)
        with damage(self.path, f"{name} cannot be read"):
            array = np.asarray(found[...]).reshape(-1)
        if array.dtype == "S1":  # NetCDF's char
            array = array.view(np.int8)
        if array.dtype.kind not in "iuf" or array.dtype.itemsize not in (1, 2, 4, 8):
            raise self.error(f"{name} holds {array.dtype}, not numbers")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def integers(self, name: str) -> np.ndarray:
        array = self.array(name)
        if array.dtype.kind == "f":
            raise self.error(f"{name} holds {array.dtype}; expected integers")
        return array

    def names(self, name: str) -> Names:
        found = self.variable(name)
        with damage(self.path, f"{name} cannot be read"):
            kind = h5py.check_string_dtype(found.dtype)
            if found.ndim != 1 or kind is None:
                raise self.error(f"{name} holds no list of names")
            if kind.length is None and self._length_of(found) > self.size:
                raise self.error(f"{name} is longer than the file")
            names = as_names([text.decode() for text in found[...].tolist()])
            check_unique(names, name)
        return names

    def _length_of(self, texts: h5py.Dataset) -> int:
        """Bytes of all texts together, computed without reading the texts.

        HDF5 would allocate the memory that a damaged file states for a text, up to 4 GiB.
        """
        stored = texts.id
        places = [(stored.get_offset(), stored.get_storage_size())]
        if texts.chunks is not None:
            chunks = (stored.get_chunk_info(i) for i in range(stored.get_num_chunks()))
            places = [(chunk.byte_offset, chunk.size) for chunk in chunks]
        total = 0
        with open(self.path, "rb") as file:
            for offset, size in places:
                if not size:
                    continue  # this text was never written
                filtered = stored.get_create_plist().get_nfilters()
                if offset is None or filtered or texts.file.userblock_size:
                    raise self.error(f"{texts.name[1:]} is compressed or compact")
                file.seek(offset)
                references = np.frombuffer(file.read(size), _REFERENCE)
                total += int(references["length"].sum(dtype=np.int64))
        return total
