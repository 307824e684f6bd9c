"""Compiled programs, which a command keeps for the commands after it."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import warnings
from collections.abc import Iterator

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

# The least recently used programs are removed beyond this.
MAX_BYTES = 2**30

SETTINGS: dict[str, object] = {
    "jax_compilation_cache_max_size": MAX_BYTES,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}
_READING = "Error reading persistent compilation cache"
_WRITING = "Error writing persistent compilation cache"


def folder() -> pathlib.Path:
    """Where compiled programs are kept, such as `~/.cache/sparsejax/programs`."""
    return platformdirs.user_cache_path("sparsejax", appauthor=False) / "programs"


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Within it, JAX keeps compiled programs in `folder()`, and looks there for them.

    If JAX has a folder already, such as that of `JAX_COMPILATION_CACHE_DIR`, it keeps that
    one. Programs are kept on a best effort: if a program cannot be read or written, a
    warning says why, and from then on programs are compiled without the folder.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    try:
        check_writable(folder())
    except OSError as error:
        warnings.warn(
            f"compiled programs are not kept: {error.filename}: {error.strerror}",
            stacklevel=2,
        )
        yield
        return
    settings = SETTINGS | {"jax_compilation_cache_dir": str(folder())}
    before = {name: getattr(jax.config, name) for name in settings}
    show = warnings.showwarning

    def notice(message, category, filename, lineno, file=None, line=None) -> None:
        # What JAX says of each program; after the first time the folder is not used.
        text = str(message)
        if text.startswith((_READING, _WRITING)):
            _set(before)
            told = _after_an_error(text)
            show(UserWarning(told), UserWarning, filename, lineno)
        else:
            show(message, category, filename, lineno, file, line)

    _set(settings)
    warnings.showwarning = notice
    try:
        yield
    finally:
        warnings.showwarning = show
        _set(before)


def _after_an_error(text: str) -> str:
    """What to tell the user. Removes programs of which one cannot be read."""
    reason = text.partition("': ")[2]
    if text.startswith(_WRITING):
        return f"compiled programs are no longer kept in {folder()}: {reason}"
    if "Timeout" in reason:
        return f"compiled programs are not read, as another process has {folder()}"
    # A program that was cut off is never written again while its file is there.
    for file in folder().glob("*-cache"):
        file.unlink(missing_ok=True)
    return f"the compiled programs in {folder()} are damaged and were removed: {reason}"


def _set(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def check_writable(path: pathlib.Path) -> None:
    """Makes a folder that only the user can read, if it does not exist.

    Raises:
      OSError: files cannot be made in it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass
