"""A cache of linear parts of networks, shared by commands."""

from __future__ import annotations

import hashlib
import os
import pathlib
import warnings
import zipfile
from typing import Any

import jax
import numpy as np
import platformdirs
import scipy
from jaxtyping import Float

import sparsejax
from sparsejax import kept_files
from sparsejax.mesh.layout import default_device
from sparsejax.nn import closed_form
from sparsejax.nn.config import LinearConfig
from sparsejax.verbs.build import matrix_of

# If all files together are larger, the least recently used files are removed.
MAX_BYTES = 2**29

Arrays = tuple[Float[np.ndarray, "items rank"], Float[np.ndarray, "items"]]


def folder() -> pathlib.Path:
    """The cache folder of linear parts, such as `~/.cache/sparsejax/linear_parts`."""
    cache = platformdirs.user_cache_path("sparsejax", appauthor=False)
    return cache / "linear_parts"


def linear_part(
    data: Any, config: LinearConfig, *, fingerprint: str, keep: bool
) -> Arrays:
    """Computes a linear part by `closed_form`, or reads it from the cache.

    A damaged file is computed again, and a warning says why a file cannot be written. Several
    processes that train together read no files: if their files differed, they would train
    different models.

    Args:
      data: training data.
      config: settings of the linear part.
      fingerprint: fingerprint of the data.
      keep: whether to read the result from the cache, and to write it there.

    Raises:
      NotImplementedError: the data is scanned.
    """
    matrix = matrix_of(data)
    if not keep or jax.process_count() > 1:
        return closed_form.closed_form(matrix, config)
    path = _path(fingerprint, matrix.shape, config)
    if (found := _read(path)) is not None:
        return found
    computed = closed_form.closed_form(matrix, config)
    if sum(array.nbytes for array in computed) <= MAX_BYTES:
        try:
            with kept_files.kept_file(path, MAX_BYTES) as file:
                np.savez(file, kernel=computed[0], scale=computed[1])
        except OSError as error:
            warnings.warn(
                f"the linear part is not kept: {error.filename}: {error.strerror}",
                stacklevel=2,
            )
    return computed


def is_kept(data: Any, config: LinearConfig, *, fingerprint: str) -> bool:
    """Whether the cache has the result of `linear_part`.

    Raises:
      NotImplementedError: the data is scanned.
    """
    return _path(fingerprint, matrix_of(data).shape, config).exists()


def _path(
    fingerprint: str, shape: tuple[int, ...], config: LinearConfig
) -> pathlib.Path:
    """The path of the file, whose name is a hash of all that affects the linear part."""
    modules = sparsejax, jax, np, scipy
    parts = [
        fingerprint,
        shape,
        config,
        default_device().device_kind,
        [module.__version__ for module in modules],
    ]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    digest.update(pathlib.Path(closed_form.__file__).read_bytes())
    return folder() / f"{digest.hexdigest()}.npz"


def _read(path: pathlib.Path) -> Arrays | None:
    """The arrays in a file; None if the file does not exist or is damaged."""
    try:
        with kept_files.opened_own(path) as content:
            file = np.load(content, allow_pickle=False)
            found = file["kernel"], file["scale"]
        os.utime(path)  # marks it as recently used
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return found
