"""Compiled programs, which a command keeps for the commands after it.

JAX finds a program by what it was lowered to. `sparsejax.mesh.kept_programs` finds the large
ones by what they are made of, so that they are not lowered again.
"""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Iterator

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

from sparsejax.kept_files import check_writable
from sparsejax.mesh import kept_programs

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


def ready_folder() -> pathlib.Path:
    """Where those are kept that are found before they are traced."""
    return folder().with_name("ready_programs")


@contextlib.contextmanager
def programs_kept(*, since: float) -> Iterator[None]:
    """Keeps compiled programs in two folders, and looks for them there, while this context is open.

    If JAX has a folder already, such as that of `JAX_COMPILATION_CACHE_DIR`, it keeps that
    one. Programs are kept on a best effort: if a program cannot be read or written, a
    warning says why, and from then on programs are compiled without the folder.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    try:
        for each in (folder(), ready_folder()):
            check_writable(each)
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
        # JAX warns about each program; after the first warning the folder is not used.
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
        with kept_programs.kept_in(ready_folder(), since=since):
            yield
    finally:
        warnings.showwarning = show
        _set(before)


def _after_an_error(text: str) -> str:
    """A message for the user. Removes programs of which one cannot be read."""
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
