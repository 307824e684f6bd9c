"""A disk cache of compiled programs, shared by commands.

The key of JAX's cache is the lowered program. `sparsejax.mesh.kept_programs` has keys for large
programs that are known before lowering, so that these are not lowered again.
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

# If all programs together are larger, the least recently used ones are removed.
MAX_BYTES = 2**30

SETTINGS: dict[str, object] = {
    "jax_compilation_cache_max_size": MAX_BYTES,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}
_READING = "Error reading persistent compilation cache"
_WRITING = "Error writing persistent compilation cache"


def folder() -> pathlib.Path:
    """The cache folder of compiled programs, such as `~/.cache/sparsejax/programs`."""
    return platformdirs.user_cache_path("sparsejax", appauthor=False) / "programs"


def ready_folder() -> pathlib.Path:
    """The cache folder of programs whose keys are known before tracing."""
    return folder().with_name("ready_programs")


@contextlib.contextmanager
def programs_kept(*, since: float) -> Iterator[None]:
    """While this context is open, compiled programs are cached in two folders.

    If JAX already has a cache folder, such as that of `JAX_COMPILATION_CACHE_DIR`, it keeps it.
    Errors of the cache are not fatal: if a program cannot be read or written, a warning says why,
    and later programs are compiled without the cache.
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
        # JAX would warn for each program, so the first warning disables the cache.
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
    """Text of a warning about the cache. If a program is damaged, all programs are removed."""
    reason = text.partition("': ")[2]
    if text.startswith(_WRITING):
        return f"compiled programs are no longer kept in {folder()}: {reason}"
    if "Timeout" in reason:
        return f"compiled programs are not read, as another process has {folder()}"
    # Damaged files must be removed, because JAX never overwrites an existing file.
    for file in folder().glob("*-cache"):
        file.unlink(missing_ok=True)
    return f"the compiled programs in {folder()} are damaged and were removed: {reason}"


def _set(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
