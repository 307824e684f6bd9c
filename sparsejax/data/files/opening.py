"""Opens data files, plain or compressed. Each failure raises a `DataError` that names the file."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import io
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Buffer, Generator, Iterator
from typing import Protocol, runtime_checkable

from tqdm import tqdm

from sparsejax.data.files import others
from sparsejax.whole_files import path_problem

Path = str | os.PathLike[str]


@runtime_checkable
class ByteStream(Protocol):
    """An object from which bytes can be read in order."""

    def read(self, size: int = ..., /) -> bytes: ...


# Bytes of a block. In large blocks the overhead of NumPy's calls is negligible; in small ones the
# temporary arrays, about ten times as large as the block, take little memory.
BLOCK_BYTES = 8 * 2**20

# A longer line is an error; otherwise a small compressed file could fill the memory.
MAX_LINE_BYTES = 64 * 2**20

_HEAD_BYTES = 64 * 2**10

_XZ_BYTES = 2**18  # bytes that are read at a time
# First bytes that identify compressed files.
_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_BZ2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", re.DOTALL)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
# Patterns of the first bytes of unsupported compressed formats.
_OTHERS = {
    "lz4": rb"\x04\x22\x4d\x18",
    "7z": rb"7z\xbc\xaf\x27\x1c",
    "compress": rb"\x1f[\x9d\xa0]",
    "lzip": rb"LZIP\x01",
    "snappy": rb"\xff\x06\0\0sNaPpY",
}


class DataError(ValueError):
    """An error about a data file that cannot be read.

    The message starts with the file's path. If one line is wrong, its number follows,
    counted from 1: `ratings.tsv:17: value 'abc' is not a number`.

    Attributes:
      line: number of the wrong line; None if the error is not about one line.
      problem: message without path and line.
    """

    line: int | None = None
    problem: str = ""

    @classmethod
    def at(cls, path: Path, message: str, *, line: int | None = None) -> DataError:
        """Makes the error for a file, or for a line of it."""
        place = shown(path) if line is None else f"{shown(path)}:{line}"
        error = cls(f"{place}: {message}")
        error.line, error.problem = line, message
        return error


# `skip_bad_lines` raises an error if the share of bad lines is larger.
MAX_BAD_SHARE = 0.01
_MANY_BAD = 1000  # with more bad lines, the share is checked before the file's end


@dataclasses.dataclass(eq=False)
class WithoutLines(os.PathLike[str]):
    """A file that is read without some lines: `open_data` puts blank lines in their place.

    Lines that are not text are found while the file is read. `bad_lines` finds the others.

    Attributes:
      path: path of the file.
      problems: fault of each record that is left out, by the number of its first line.
      blank: numbers of all lines that are left out.
    """

    path: Path
    problems: dict[int, str] = dataclasses.field(default_factory=dict)
    blank: set[int] = dataclasses.field(default_factory=set)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def leave_out(self, start: int, stop: int, problem: str) -> None:
        """Records that the lines `start .. stop - 1` are left out, because of `problem`."""
        self.problems[start] = problem
        self.blank.update(range(start, stop))

    @property
    def are_many(self) -> bool:
        """Whether there are so many bad lines that their share is checked early."""
        return len(self.problems) > _MANY_BAD

    def check(self, total: int, *, so_far: bool = False) -> None:
        """Raises DataError if more than one line in a hundred is bad, and more than one line."""
        if so_far and not self.are_many:
            return
        if len(self.problems) > max(1, MAX_BAD_SHARE * total):
            first = "the first " * so_far
            raise DataError.at(
                self.path,
                f"{len(self.problems):,} of {first}{total:,} lines are bad, which is more than "
                f"{MAX_BAD_SHARE:.0%}: {self._kinds()}; correct the file, or say how it is "
                "read: format=..., delimiter=..., and the columns",
            )

    def account(self, total: int) -> str:
        """A text for a warning, with the number of lines that are left out."""
        count = len(self.problems)
        what = "1 bad line is" if count == 1 else f"{count:,} bad lines are"
        return f"{shown(self.path)}: {what} left out of {total:,}: {self._kinds()}"

    def kinds(self) -> dict[str, list[int]]:
        """The numbers of bad lines for each kind of fault; the key is an example of the fault."""
        found: dict[str, tuple[str, list[int]]] = {}
        for line, problem in sorted(self.problems.items()):
            # Only the kind of fault is kept: advice to the author of the file, cells and numbers
            # are removed.
            text = re.split(r" \((?!row|feature)|; |, [\d,]+ times in all", problem)[0]
            kind = re.sub(r"'[^']*'|\d[\d,.]*", "", text)
            found.setdefault(kind, (text, []))[1].append(line)
        return dict(found.values())

    def _kinds(self) -> str:
        parts = []
        for text, lines in self.kinds().items():
            some = ", ".join(map(str, lines[:_SHOWN]))
            more = f" and {len(lines) - _SHOWN:,} more" if len(lines) > _SHOWN else ""
            parts.append(f"{text} (line {some}{more})")
        return "; ".join(parts)


_SHOWN = 3  # lines of each kind of fault that a message lists


class _WithBlankLines:
    """A stream that replaces bad lines, and lines that are not UTF-8 text, by blank lines."""

    def __init__(self, stream: ByteStream, file: WithoutLines):
        self._stream, self._file = stream, file
        self._first, self._rest = 1, b""

    def read(self, size: int = -1, /) -> bytes:
        while True:
            chunk = self._stream.read(size)
            cut = chunk.rfind(b"\n") + 1 if chunk else 0
            if chunk and not cut:
                self._rest += chunk
                if len(self._rest) <= MAX_LINE_BYTES:
                    continue
                # The line is passed on, so that its reader raises an error about its length.
                data, self._rest = self._rest, b""
                return data
            data, self._rest = self._rest + chunk[:cut], chunk[cut:]
            count = data.count(b"\n")
            lines = range(self._first, self._first + count + 1)
            self._first += count
            return self._cleaned(data, lines) if data else data

    def _cleaned(self, data: bytes, lines: range) -> bytes:
        at = 0
        while not data.isascii() and at < len(data):
            try:
                data[at:].decode()
                break
            except UnicodeDecodeError as error:
                place = at + error.start
                self._fault(lines, data, place, _not_utf8(data[place]))
                at = data.find(b"\n", place) + 1 or len(data)
        if b"\r" in data:
            for stray in re.finditer(rb"\r(?!\n)", data):
                self._fault(lines, data, stray.start(), _STRAY)
        if self._file.blank.isdisjoint(lines):
            return data
        texts = data.split(b"\n")
        for line, text in zip(lines, texts, strict=True):
            if line in self._file.blank and text:
                texts[line - lines.start] = b""
        return b"\n".join(texts)

    def _fault(self, lines: range, data: bytes, at: int, problem: str) -> None:
        line = lines.start + data.count(b"\n", 0, at)
        if line not in self._file.blank:
            self._file.leave_out(line, line + 1, problem)


def check_path(path: Path) -> None:
    """Raises DataError if no file can have a path."""
    if (problem := path_problem(path)) is not None:
        raise DataError.at(path, problem)


def check_regular(path: Path) -> None:
    """Raises DataError if `path` is not a regular file.

    This is checked before opening, because opening a pipe would wait for a writer.
    """
    check_path(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise DataError.at(path, "no such file") from error
    except OSError as error:
        raise DataError.at(path, f"cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise DataError.at(path, "is a directory; expected a file")
    if not stat.S_ISREG(mode):
        raise DataError.at(path, "is not a regular file; write the data to one first")


@contextlib.contextmanager
def open_data(path: Path) -> Generator[ByteStream]:
    """Opens a file to read bytes, which are decompressed while they are read.

    The file may be plain, gzip, xz, bzip2, zstd, or a zip of one file. Its first bytes decide,
    not its name. A file that is missing, a directory, truncated or damaged raises
    `DataError`, also while it is read. If reading takes long, a bar shows its progress.
    """
    if is_address(path):
        raise DataError.at(
            path,
            "only Parquet is read from an address; copy the file to this machine first",
        )
    check_regular(path)
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb", buffering=0))
            bar = stack.enter_context(progress_bar(path, os.path.getsize(path)))
            file = stack.enter_context(_Watched(raw, bar))
            first = file.peek(10)
            _check_compression(path, first)
            stream: ByteStream = file
            if first.startswith(_GZIP):
                stream = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif first.startswith(_XZ):
                stream = stack.enter_context(io.BufferedReader(_Xz(file)))
            elif _BZ2.match(first):
                stream = stack.enter_context(bz2.BZ2File(file))
            elif first.startswith(_ZSTD):
                stream = stack.enter_context(io.BufferedReader(_Zstd(file)))
            elif first.startswith(_ZIP):
                stream = stack.enter_context(_only_file(path, file))
            if isinstance(path, WithoutLines):
                stream = _WithBlankLines(stream, path)
            yield stream
    except _DAMAGED as error:
        raise DataError.at(
            path, f"compressed data is truncated or damaged: {error}"
        ) from (error)
    except OSError as error:
        raise DataError.at(
            path, f"cannot be read: {error.strerror or error}"
        ) from error


def _check_compression(path: Path, first: bytes) -> None:
    """Raises DataError if the first bytes are those of an unsupported compressed format."""
    for name, magic in _OTHERS.items():
        if re.match(magic, first, re.DOTALL):
            raise DataError.at(
                path,
                f"is compressed by {name}, which is not read; decompress it, or compress "
                "it by gzip, xz, bzip2 or zstd",
            )


_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


@contextlib.contextmanager
def _only_file(path: Path, file: io.BufferedReader) -> Generator[zipfile.ZipExtFile]:
    """Opens the only file of a zip archive.

    Raises:
      DataError: the archive has several files, or is encrypted.
    """
    with zipfile.ZipFile(file) as archive:
        names = [info for info in archive.infolist() if not info.is_dir()]
        # For each file, macOS adds a file with metadata to the archive.
        names = [info for info in names if not info.filename.startswith("__MACOSX/")]
        if problem := others.of_names([info.filename for info in names]):
            raise DataError.at(path, problem)
        if len(names) != 1:
            raise DataError.at(
                path,
                f"is a zip of {len(names)} files; expected one: unpack it, and name the "
                "folder or one of its files",
            )
        if names[0].flag_bits & 1:
            raise DataError.at(path, "is an encrypted zip; unpack it first")
        try:
            with archive.open(names[0]) as member:
                assert isinstance(member, zipfile.ZipExtFile)
                yield member
        except NotImplementedError as error:
            raise DataError.at(path, f"cannot be unpacked: {error}") from error


class _Zstd(io.RawIOBase):
    """Decompresses a zstd file, a piece at a time."""

    def __init__(self, file: io.BufferedReader):
        import pyarrow as pa  # imported here, because other formats do not need it

        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        try:
            data = self._stream.read(len(view))
        except OSError as error:
            raise EOFError(str(error)) from error
        view[: len(data)] = data
        return len(data)


class _Xz(io.RawIOBase):
    """Decompresses all streams of an xz file in order, with padding between them.

    `lzma.LZMAFile` ignores damage after the first stream.
    """

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            if self._stream.eof:
                rest = self._stream.unused_data or self._file.read(_XZ_BYTES)
                while rest and not (rest := rest.lstrip(b"\0")):
                    rest = self._file.read(_XZ_BYTES)
                if not rest:
                    return 0
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            else:
                rest = b""
                if self._stream.needs_input and not (
                    rest := self._file.read(_XZ_BYTES)
                ):
                    raise EOFError("the file ends within a stream")
            data = self._stream.decompress(rest, len(view))
            if data:
                view[: len(data)] = data
                return len(data)


class _Watched(io.BufferedReader):
    """A reader that updates a progress bar."""

    def __init__(self, raw: io.RawIOBase, bar: tqdm):
        super().__init__(raw)
        self._bar = bar

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._bar.update(len(data))
        return data


def progress_bar(path: Path, size: int) -> tqdm:
    """A progress bar for `size` bytes, shown on a terminal after one second."""
    return tqdm(
        total=size,
        desc=os.path.basename(os.fspath(path).partition("?")[0].rstrip("/")),
        unit="B",
        unit_scale=True,
        delay=1,
        leave=False,
        disable=None,  # disabled unless stderr is a terminal
    )


def shown(path: Path) -> str:
    """A path for messages, without the password that an address may contain."""
    plain = os.fspath(path).encode("utf-8", "backslashreplace").decode()
    return re.sub("(?<=://)[^/@]*@", "", plain).replace("\0", "\\0")


def is_address(path: Path) -> bool:
    """Whether a path is an address like `s3://bucket/folder`."""
    return bool(re.match("[a-z][a-z0-9+.-]*://", os.fspath(path)))


@dataclasses.dataclass(frozen=True)
class Lines:
    """A block of whole lines of a file.

    Attributes:
      data: UTF-8 bytes. Every line, also the last one, ends in a line feed.
      path: path of the file.
      first: number of the first line, counted from 1.
    """

    data: bytes
    path: Path
    first: int

    def text(self, start: int, stop: int) -> str:
        """The lines `start .. stop - 1` of the file, without the line feed at the end."""
        found = self.data.split(b"\n", stop - self.first)[start - self.first :]
        return b"\n".join(found[: stop - start]).decode()

    def error(self, line: int, message: str) -> DataError:
        """Makes the error for a line of the block, counted from 0."""
        return DataError.at(self.path, message, line=self.first + line)


def line_blocks(
    stream: ByteStream, path: Path, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[Lines]:
    """Yields a file's lines in blocks of about `block_bytes`.

    A byte order mark is removed, and CR LF becomes LF. A line longer than a block makes
    its block longer, up to `MAX_LINE_BYTES`.

    Raises:
      DataError: the file has a zero byte (so it is binary), invalid UTF-8, a carriage
        return inside a line, or a line that is too long.
    """
    first = 1
    pending: list[bytes] = []
    while True:
        chunk = stream.read(block_bytes)
        if first == 1 and not pending and (problem := others.of_bytes(chunk)):
            raise DataError.at(path, problem)
        if b"\0" in chunk:
            problem = "is not text: it holds zero bytes (binary, or UTF-16?)"
            raise DataError.at(path, problem)
        cut = chunk.rfind(b"\n") + 1
        if chunk and not cut:
            pending.append(chunk)
            if sum(map(len, pending)) > MAX_LINE_BYTES:
                problem = f"the line is longer than {MAX_LINE_BYTES:,} bytes"
                raise DataError.at(path, problem, line=first)
            continue
        data = b"".join((*pending, chunk[:cut]))
        pending = [chunk[cut:]]
        if not chunk and data:
            data += b"\n"
        if data:
            if first == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            data = data.replace(b"\r\n", b"\n")
            lines = Lines(data, path, first)
            _check_text(lines)
            first += data.count(b"\n")
            yield lines
        if not chunk:
            return


def lines_of(path: Path) -> list[str]:
    """Reads the lines of a text file that are not empty.

    Raises:
      DataError: all lines are empty; see `line_blocks` for other reasons.
    """
    with open_data(path) as stream:
        text = b"".join(lines.data for lines in line_blocks(stream, path)).decode()
    found = [line for line in text.split("\n") if line]
    if not found:
        raise DataError.at(path, "holds no names: the file is empty")
    return found


def head(path: Path) -> Lines:
    """Reads the first block of lines, about 64 KiB, that is not blank.

    Raises:
      DataError: all lines are blank.
    """
    with open_data(path) as stream:
        for lines in line_blocks(stream, path, block_bytes=_HEAD_BYTES):
            if lines.data.decode().strip():  # strips white space outside ASCII, too
                return lines
    raise DataError.at(path, "holds no data: the file is empty")


def _check_text(lines: Lines) -> None:
    data = lines.data
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start)
            raise lines.error(line, _not_utf8(data[error.start])) from error
    if (stray := data.find(b"\r")) >= 0:
        raise lines.error(data.count(b"\n", 0, stray), _STRAY)


_STRAY = "carriage return inside a line; lines must end in LF or CR LF"


def half_pair(error: UnicodeEncodeError) -> str:
    """The error text for a str with half a surrogate pair, such as a title that was cut."""
    half = error.object[error.start]
    return f"has half of a surrogate pair, {half!r}, which is no character; remove it"


def _not_utf8(byte: int) -> str:
    return f"byte 0x{byte:02x} is not valid UTF-8; convert the file to UTF-8"
