"""The first module of a command: from its first line on, a signal ends the process.

Before that, it imports nothing that takes time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

import sparsejax.ending as ending  # noqa: PLR0402 - `from` asks the package for a name

# `typing` takes 5 ms to import, and a signal in this time would not be handled.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class _Hidden:
    """Hides installed packages that other packages import, but that commands do not need.

    pyarrow imports pandas when it makes an array, and Flax imports IPython to detect a notebook.
    Both imports take a fifth of a second.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Raises ModuleNotFoundError for a hidden package; for others, the search goes on."""
        if fullname in ("pandas", "IPython"):
            raise ModuleNotFoundError(f"commands do not import {fullname}")


def run() -> NoReturn:
    """Runs the command of this process, and ends the process.

    A program that calls this function, such as a profiler, continues afterwards.
    """
    is_whole_process = _is_whole_process()
    if is_whole_process:
        _open_closed()
        ending.watch()
        sys.meta_path.insert(0, _Hidden())
    from sparsejax.cli.main import main

    status = main()
    if is_whole_process:
        end(status)
    sys.exit(status)


def _open_closed() -> None:
    """Opens standard streams that are closed, so that no data file gets their descriptors.

    The new standard output is opened for reading: writing to it is an error, because the text
    would be lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            reads = number < 2
            file = os.open(os.devnull, os.O_RDONLY if reads else os.O_WRONLY)
            if file == number:
                mode = "w" if number else "r"
                setattr(sys, name, os.fdopen(file, mode, encoding="utf-8"))


def _is_whole_process() -> bool:
    """Whether the process only runs a command, by its script or by `python -m sparsejax`."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names in (["<module>"], ["<module>", "_run_code", "_run_module_as_main"])


def end(status: int) -> NoReturn:
    """Ends the process as `multiprocessing` ends one.

    Waits for threads and runs exit handlers, but does not free memory piece by piece: if a GPU was
    used, Python would take more than half a second for that.
    """
    threading._shutdown()  # pyrefly: ignore[missing-attribute]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            if stream is not None:  # None if it was closed before
                stream.flush()
    os._exit(status)
