"""The first module of a command: from its first instruction on, a signal ends the process.

It imports nothing that takes time before that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

import sparsejax.ending as ending  # noqa: PLR0402 - `from` asks the package for a name

# `typing` takes 5 ms, in which a signal would not be handled.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class _Hidden:
    """Hides packages that others import wherever they are installed, and commands do not need.

    pyarrow imports pandas when it makes an array, in half a second, and Flax imports IPython
    to look for a notebook, in a sixth.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Finds nothing, and raises ModuleNotFoundError for a hidden package."""
        if fullname in ("pandas", "IPython"):
            raise ModuleNotFoundError(f"commands do not import {fullname}")


def run() -> NoReturn:
    """Carries out the command of this process, and ends the process.

    What runs the command within itself, as a profiler does, goes on after it.
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
    """Opens standard streams that are closed, so that no data file gets their number.

    What is written to standard output is an error then, as it would be lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            reads = number < 2
            file = os.open(os.devnull, os.O_RDONLY if reads else os.O_WRONLY)
            if file == number:
                mode = "w" if number else "r"
                setattr(sys, name, os.fdopen(file, mode, encoding="utf-8"))


def _is_whole_process() -> bool:
    """Whether only the script of a command, or `python -m sparsejax`, has called `run`."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names in (["<module>"], ["<module>", "_run_code", "_run_module_as_main"])


def end(status: int) -> NoReturn:
    """Ends the process as `multiprocessing` ends one.

    Threads end, and what is registered for an exit is done. But nothing is freed piece by
    piece: where a GPU was used, Python takes more than half a second for that.
    """
    threading._shutdown()  # pyrefly: ignore[missing-attribute]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            if stream is not None:  # None: it was closed before the command began
                stream.flush()
    os._exit(status)
