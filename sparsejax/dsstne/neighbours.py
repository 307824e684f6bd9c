"""DSSTNE's `knn-search`: the nearest vectors in text files."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from sparsejax.data.files.names import Names, as_names
from sparsejax.data.files.opening import ByteStream, DataError, line_blocks, open_data
from sparsejax.engine.rank.nearest import nearest
from sparsejax.whole_files import check_writable, whole_text_file

DTYPES = {"fp32": "float32", "fp16": "float16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The command `knn-search`.

    Attributes:
      data: files of vectors among which to search; they are concatenated.
      queries: files of vectors whose neighbours are searched.
      out: the file to write, whose folder is created; None is standard output.
      k: number of neighbours of each query.
      batch_size: number of queries that are processed together.
      data_type: one of `DTYPES`.
      key_delimiter: text between a key and its vector.
      vector_delimiter: text between numbers.
      score_separator: text between a key and its score.
      precision: number of digits of a score after its decimal point.
      keys_only: whether to omit the scores.
    """

    data: tuple[str, ...]
    queries: tuple[str, ...]
    out: str | None = None
    k: int = 100
    batch_size: int = 128
    data_type: str = "fp32"
    key_delimiter: str = "\t"
    vector_delimiter: str = " "
    score_separator: str = ":"
    precision: int = 3
    keys_only: bool = False


def search(command: Search) -> None:
    """Writes `key<TAB>key:score key:score ...`, the highest dot products first.

    Raises:
      DataError: a file is missing or wrong.
      OSError: the file cannot be written; no partial file is left.
      ValueError: a number does not fit in the data type.
    """
    if command.out is not None:
        _check_out(pathlib.Path(command.out))
    if not command.key_delimiter or not command.vector_delimiter:
        raise ValueError("--key-val-delim and --vec-delim must not be empty")
    keys, vectors = read_vectors(command, command.data)
    wanted, queries = read_vectors(command, command.queries)
    if queries.shape[1] != vectors.shape[1]:
        raise DataError.at(
            command.queries[0],
            f"has vectors of {queries.shape[1]} numbers, but {command.data[0]} of "
            f"{vectors.shape[1]}",
        )
    found = nearest(
        queries,
        vectors,
        command.k,
        dtype=DTYPES[command.data_type],
        batch_size=command.batch_size,
    )
    with _writing(command.out) as file:
        for key, ids, scores in zip(wanted, found.ids, found.scores, strict=True):
            entries = (
                keys[i]
                if command.keys_only
                else f"{keys[i]}{command.score_separator}{score:.{command.precision}f}"
                for i, score in zip(ids, scores, strict=True)
                if i >= 0
            )
            line = command.vector_delimiter.join(entries)
            file.write(f"{key}{command.key_delimiter}{line}\n")


def _check_out(path: pathlib.Path) -> None:
    """Raises ValueError if the file or its folder cannot be created."""
    if path.parent.exists():
        check_writable(path)
        return
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{path}: {above} is not a folder")


@contextlib.contextmanager
def _writing(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_text_file(path) as file:
        yield file


def read_vectors(command: Search, paths: tuple[str, ...]) -> tuple[Names, np.ndarray]:
    """Reads keys and vectors, `[rows, width]` float32, from files with lines `key<TAB>1 2 3`.

    Raises:
      DataError: a file is missing, empty, or has a wrong line.
    """
    keys: list[str] = []
    vectors: list[np.ndarray] = []
    for path in paths:
        with open_data(path) as stream:
            for number, text in _lines(stream, path):
                key, delimiter, rest = text.partition(command.key_delimiter)
                if not delimiter:
                    raise DataError.at(
                        path, f"there is no {command.key_delimiter!r}", line=number
                    )
                vector = _numbers(rest, command.vector_delimiter)
                if vector is None or (vectors and len(vector) != len(vectors[0])):
                    width = f"{len(vectors[0])} " if vectors else ""
                    raise DataError.at(
                        path,
                        f"expected {width}finite numbers, got {rest[:40]!r}",
                        line=number,
                    )
                keys.append(key)
                vectors.append(vector)
    if not vectors:
        raise DataError.at(paths[0], "holds no vectors")
    return as_names(keys), np.stack(vectors)


def _lines(stream: ByteStream, path: str) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line that is not empty."""
    for block in line_blocks(stream, path):
        for number, text in enumerate(block.data.decode().split("\n"), block.first):
            if text:
                yield number, text


def _numbers(text: str, delimiter: str) -> np.ndarray | None:
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(text.strip(delimiter).split(delimiter), np.float32)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None
