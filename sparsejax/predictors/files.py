"""Reads the files of predictors that `saving` writes."""

from __future__ import annotations

import importlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from sparsejax.data.files.name_index import NameTable
from sparsejax.predictors import archive, names, stablehlo
from sparsejax.predictors.new_items import Content
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.runtime import Programs
from sparsejax.predictors.saving import ANSWER, SETTINGS
from sparsejax.predictors.signature import KINDS, LABEL, Array, Signature
from sparsejax.predictors.stored_answer import StoredAnswer


def load_predictor(path: str | os.PathLike[str]) -> Predictor:
    """Reads a predictor that `sparsejax.export_predictor` wrote.

    This needs neither Flax nor the model's code. No code that the file names is executed: programs
    consist of arithmetic only. JAX can read the programs of releases that are up to six months
    older.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")  # in another process
    >>> predictor.names(predictor.recommend(train, exclude=train))
    [['/...', '/...'], ...]

    Args:
      path: path of the file, or its URL in an object store, like `s3://bucket/model.predictor`. A
          file in a store is copied once to the user's cache folder; later calls use the copy until
          the file changes. The processes of a host wait for the first copy.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a predictor, is damaged, has an unknown version, or contains an
          operation that is not allowed.
    """
    with archive.opened(path) as file:
        return _ready(path, file)


def load_same_predictor(path: str | os.PathLike[str], identity: str) -> Predictor:
    """Loads a predictor if its file still has the content of a `predictor_identity`.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file has other content.
    """
    with archive.opened(path) as file:
        archive.check_identity(path, file, identity)
        return _ready(path, file)


def check_predictor(path: str | os.PathLike[str]) -> None:
    """Checks that a file is a complete predictor. Nothing is copied to the device.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is damaged, or has an unknown version or layout.
    """
    with archive.opened(path) as file:
        length = os.fstat(file.fileno()).st_size
        with archive.reading(path), zipfile.ZipFile(file) as parts:
            signature, tables = read_signature(parts, length)
            model_of(signature, tables)
            _answer_in(parts, signature, length)
            for rows in signature.rows:
                stablehlo.load(signature, rows, archive.read_program(parts, rows))
            archive.check_weights(parts, _arrays_of(signature), length)


class Kept:
    """A cache of the last loaded predictor, shared by several parts."""

    def __init__(self):
        self._identity: str | None = None
        self._predictor: Predictor | None = None

    def load(self, path: str | os.PathLike[str], identity: str) -> Predictor:
        """Loads a predictor by `load_same_predictor`, unless it is cached."""
        if self._predictor is None or self._identity != identity:
            self._predictor = None  # freed before the next one needs memory
            self._predictor = load_same_predictor(path, identity)
            self._identity = identity
        return self._predictor


def predictor_identity(path: str | os.PathLike[str]) -> str:
    """A hash of a predictor's content, made from the checksums of its parts.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a predictor.
    """
    with archive.opened(path) as file:
        return archive.identity(path, file)


def _ready(path: str | os.PathLike[str], file: io.BufferedReader) -> Predictor:
    length = os.fstat(file.fileno()).st_size
    with archive.reading(path), zipfile.ZipFile(file) as parts:
        signature, tables = read_signature(parts, length)
        model, answer = (
            model_of(signature, tables),
            _answer_in(parts, signature, length),
        )
        named = {name: table.names for name, table in tables.items()}
        code = {
            rows: stablehlo.load(signature, rows, archive.read_program(parts, rows))
            for rows in signature.rows
        }
        weights = archive.read_weights(parts, _arrays_of(signature), length)
        count = len(signature.weights)
        content = Content.of(signature, named, weights[count:])
        again = archive.again(load_same_predictor, path, file)
    runtime = Programs.of(signature, code, weights[:count])
    return Predictor(
        signature=signature,
        model=model(runtime),
        names_in_file=named,
        content=content,
        again=again,
        answer=answer,
    )


def _arrays_of(signature: Signature) -> tuple[Array, ...]:
    """All arrays in a file: the weights, and kernels that compute vectors of new items."""
    new = signature.new_items
    return (*signature.weights, *(() if new is None else new.arrays))


def _answer_in(
    parts: zipfile.ZipFile, signature: Signature, length: int
) -> StoredAnswer | None:
    """The stored example with its answer; None if the file contains none."""
    if ANSWER not in parts.namelist():
        return None
    document = archive.read_json(parts, ANSWER, length)
    return StoredAnswer.from_json(document, signature)


def model_of(
    signature: Signature, vocabularies: Mapping[str, NameTable]
) -> Callable[[Programs], Any]:
    """A function that makes a `Predictor.model` from programs with this signature.

    Raises:
      ValueError: no predictor of this kind has such a signature or such names.
    """
    if (served := KINDS.get(signature.kind)) is None:
        raise ValueError(
            f'{LABEL}: "kind" must be one of {", ".join(KINDS)}, got {signature.kind!r}'
        )
    module = importlib.import_module(f"{__package__}.{served.module}")
    return getattr(module, served.name).of(signature, vocabularies)


def read_signature(
    parts: zipfile.ZipFile, length: int
) -> tuple[Signature, dict[str, NameTable]]:
    """Reads the signature of a file's programs, and the names in the file.

    Args:
      parts: archive of the predictor.
      length: size of the file in bytes, which bounds the size of the names.

    Raises:
      ValueError: the file has an unknown version or layout.
    """
    document = archive.read_json(parts, SETTINGS, archive.MOST_SETTINGS)
    signature = Signature.from_json(document)
    known = {SETTINGS, ANSWER, names.COUNTS}
    known |= {f"programs/{rows}" for rows in signature.rows}
    known |= {f"weights/{number}" for number, _ in enumerate(_arrays_of(signature))}
    counts = names.counts(parts, length)
    # Unknown parts are rejected before any part is decompressed, so they need no size limit.
    archive.check_names(parts, known | names.part_names(counts))
    return signature, names.read(parts, counts, length)
