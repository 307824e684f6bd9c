"""Entry point of the command line: parses arguments, runs the command, and reports errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import logging
import operator
import os
import re
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import TextIO

import tyro
from tyro.conf import OmitArgPrefixes

import sparsejax
from sparsejax import ending
from sparsejax.cli import compiling, flags, shell
from sparsejax.cli.wording import in_flags
from sparsejax.mesh import interrupts
from sparsejax.options.models import Histories, Network

# The start time. A source file that changed later may differ from the module that was imported.
_BEGUN = time.time()

_FEWEST_COLUMNS = 40  # least width of a help page

# Flags of other programs, and our names for them: tyro would not find these similar.
_CALLED_OTHERWISE = {
    "--lr": "--learning-rate",
    "--num-epochs": "--epochs",
    "--output": "--out",
    "--top-k": "--k",
    "--wd": "--weight-decay",
}

# Options that describe a model of one kind. Click models are described in a file for --config.
_OPTIONS = (Network, Histories)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: success; 1: an error, reported in a line on stderr, or a plan that does not fit; 2: wrong
    usage; 130: interrupted by Ctrl-C; 143: by SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Orbax logs files that a killed process has left, and tracebacks of errors that it also
    # raises. Our own warnings and errors are enough.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    command = None
    try:
        if argv[:1] == ["dsstne"]:
            return _dsstne(argv[1:])
        command = _parse(argv)
        devices = flags.Devices()
        if isinstance(command, flags.Devices):
            devices = command.as_type(flags.Devices)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_line_warnings(command))
            stack.enter_context(_on(devices, command))
            status = _carry_out(command, devices)
        sys.stdout.flush()
    except SystemExit as stopped:  # --help, --version, wrong usage
        return int(stopped.code or 0)
    except BaseException as error:  # noqa: BLE001 - raised again, if it is a bug
        return _failed(error, command)
    return status


def _parse(argv: Sequence[str]) -> flags.Command:
    """Parses a command. For help or wrong usage, it prints a text and raises SystemExit."""
    commands = _commands()
    # A parser is made only for the named command: making all takes as long as importing NumPy.
    named = commands.get(argv[0]) if argv else None
    parsers = {
        shell.parser_of(c) if named in (None, c) else shell.name_of(c): c
        for c in commands.values()
    }
    union = functools.reduce(operator.or_, parsers)
    options = {"args": argv, "config": (OmitArgPrefixes,)}
    columns = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < _FEWEST_COLUMNS:  # tyro would loop forever
        os.environ["COLUMNS"] = str(_FEWEST_COLUMNS)
    try:
        if argv == ["--version"]:
            print(f"sparsejax {sparsejax.__version__}")
            raise SystemExit(0)
        parsed = tyro.cli(
            union,
            prog="sparsejax",
            description="Recommendations from sparse data. --version prints the version. "
            "sparsejax dsstne --help shows the commands of Amazon's DSSTNE.",
            **options,
        )
        kind = parsers[type(parsed)]
        shell.check_lists(kind, argv)
        command = shell.command_of(kind, parsed, argv)
        return command.noting(
            told=lambda text: print(in_flags(text, kind), file=sys.stderr)
        )
    except SystemExit as stopped:
        words = {word.partition("=")[0] for word in argv} if stopped.code else set()
        for word in words & _CALLED_OTHERWISE.keys():
            _say(f"{word} is called {_CALLED_OTHERWISE[word]} here")
        if stopped.code:
            with contextlib.suppress(SystemExit):
                _, unknown = tyro.cli(
                    union, return_unknown_args=True, console_outputs=False, **options
                )
                _advise(argv, unknown)
        raise
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns
        sys.stdout.flush()


@functools.cache
def _commands() -> Mapping[str, type[flags.Command]]:
    """The class of each command, by the command's name."""
    commands = flags.Command.__subclasses__()
    return {_function_of(command).replace("_", "-"): command for command in commands}


def _advise(argv: Sequence[str], unknown: Sequence[str]) -> None:
    """Prints advice about the words in `argv` that the command does not accept."""
    if (command := _commands().get(argv[0])) is None:
        return
    known = shell.flag_names(command)
    fields = {
        option.name for option, flag in shell.all_flags(command) if flag.positional
    }
    takes_data = not fields.isdisjoint(("data", "inputs"))
    for word, after in zip(unknown, [*unknown[1:], "true"], strict=True):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and "config" in known:
            option = flag[2:].replace("-", "_")
            if (model := _model_with(option, argv)) is not None:
                value = value or ("true" if after.startswith("--") else after)
                with contextlib.suppress(ValueError):
                    value = json.loads(value)
                file = {"version": 1, "model": model, option: value}
                _say(
                    f"{flag} is no flag: write it into a JSON file for --config, "
                    f"such as {json.dumps(file)}"
                )
        elif takes_data and os.path.exists(word):
            _say(
                f"DATA is one file or one folder: for {word} and others, put the files "
                "into one folder and give the folder"
            )
            break


def _model_with(option: str, argv: Sequence[str]) -> str | None:
    """The model named in `argv`, or else the first model, whose configuration has the option."""
    from sparsejax.kinds.kind import kind_for

    named = [m for m in flags.MODELS if m in argv or f"--model={m}" in argv]
    for model in named or flags.MODELS:
        config = kind_for(model).described(model)[0]
        if hasattr(config, "model") and option in vars(config):
            return model
    return None


def _dsstne(argv: Sequence[str]) -> int:
    """Runs a command of DSSTNE, which parses its own flags."""
    from sparsejax.dsstne import cli
    from sparsejax.mesh import processes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_line_warnings(None))
        if processes.are_of_mpirun():
            stack.enter_context(_joined(flags.Devices(distributed=True), None))
        stack.enter_context(interrupts.noted())
        cli.run(argv)
    sys.stdout.flush()
    return 0


def _carry_out(command: flags.Command, devices: flags.Devices) -> int:
    """Runs a parsed command and returns its exit status."""
    with _importing():
        # `plan` may simulate devices. Several processes must join before the device is
        # initialized.
        runs = isinstance(command, flags.Compilation) and not isinstance(
            command, flags.Plan
        )
        # With --parts, this process leaves the devices to child processes.
        runs = runs and getattr(command, "parts", None) is None
        if runs and not devices.several:
            _start_device()
        match command:
            case flags.Train() | flags.Plan():
                from sparsejax.cli import train as module
            case flags.Tune():
                from sparsejax.cli import tune as module
            case flags.Serve() | flags.ExportTriton():
                from sparsejax.cli import serve as module
            case flags.Demo():
                from sparsejax.cli import demo as module
            case flags.Predict(parts=int()):
                from sparsejax.cli import parts as module
            case _:
                from sparsejax.cli import commands as module
    if isinstance(command, flags.Train | flags.Tune | flags.Plan):
        _check_network(command)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_programs(command, devices))
        advice = functools.partial(_what_next, command)
        stack.enter_context(interrupts.noted(advice))
        if not isinstance(command, flags.Serve):  # a service writes JSON
            stack.enter_context(compiling.told_if_long(_say_compiling))
        if isinstance(command, flags.Serve) and _is_run(command.model):
            from sparsejax.cli import commands

            command = stack.enter_context(commands.exported(command))
        result = getattr(module, _function_of(type(command)))(command)
    return 1 if result is False else 0  # a plan that does not fit


def _is_run(path: str) -> bool:
    """Whether a path is the folder of a run."""
    return os.path.isfile(os.path.join(path, "run.json"))


def _function_of(kind: type) -> str:
    """The name of the function that runs a command: `export_triton` for `ExportTriton`."""
    return re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower()


def _start_device() -> None:
    """Initializes the device in another thread, while modules are imported.

    Initializing a GPU takes .3 s, and its compiler's first program .1 s.
    """
    import jax

    def start():
        with contextlib.suppress(Exception):  # raised again by the first computation
            jax.devices()
            from sparsejax.mesh.xla_options import gpu_options

            gpu_options()

    threading.Thread(target=start, daemon=True).start()


@contextlib.contextmanager
def _importing() -> Generator[None]:
    """While this context is open, the garbage collector is off: imports take a third of the time.

    Imported objects live until the process ends, so scanning them again and again is useless. They
    are exempt from later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # once per process, as it also keeps garbage
            gc.freeze()
        gc.enable()


def _check_network(command: flags.Train | flags.Tune | flags.Plan) -> None:
    """Raises ValueError if flags describe the network, and so does a file or an earlier run."""
    model, config = command.model, getattr(command, "config", None)
    origin = getattr(command, "origin", None)
    if origin is not None:
        if config is not None:
            raise ValueError("--from takes the network of its run: leave out --config")
        why = "--from takes the network of its run: leave out {}, or --from"
    elif config is not None:
        why = "--config describes the whole network: leave out {}, or --config"
    else:
        _check_given(command, flags.MODELS[model or flags.DEFAULT_MODEL])
        return
    for options in _OPTIONS:
        for name, flag in shell.flag_names(options).items():
            if name in command.given:
                raise ValueError(why.format(flag))


def _check_given(command: flags.Train | flags.Tune | flags.Plan, kind: str) -> None:
    """Raises ValueError if given flags describe a model of another kind."""
    for options in _OPTIONS:
        of = options.describes
        for name, flag in shell.flag_names(options).items():
            if of != kind and name in command.given:
                models = ", ".join(n for n, k in flags.MODELS.items() if k == of)
                raise ValueError(
                    f"{flag} is for --model {models}: leave it out, or name such a model"
                )


@contextlib.contextmanager
def _on(devices: flags.Devices, command: flags.Command) -> Generator[None]:
    """While this context is open, the processes are connected, and the mesh is set."""
    if devices == flags.Devices():
        yield
        return

    import jax

    from sparsejax.mesh import processes

    with contextlib.ExitStack() as stack:
        if devices.several:
            stack.enter_context(_joined(devices, command))
        stack.enter_context(jax.set_mesh(processes.mesh_of(devices.mesh)))
        yield


@contextlib.contextmanager
def _joined(devices: flags.Devices, command: flags.Command | None) -> Generator[None]:
    """While this context is open, processes are connected, and only the first one prints."""
    from sparsejax.mesh import processes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_results_alone())
        processes.join_processes(
            devices.coordinator,
            devices.num_processes,
            devices.process_id,
            when_lost=lambda: _say(_lost(command), sys.__stderr__),
        )
        if not processes.is_first():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _programs(
    command: flags.Command, devices: flags.Devices
) -> contextlib.AbstractContextManager[None]:
    """A context in which compiled programs are kept for later commands, if `command` says so."""
    # Several processes would wait for each other's compiler if some of them had cached programs.
    keeps = isinstance(command, flags.Compilation) and command.compilation_cache
    if not keeps or devices.several:
        return contextlib.nullcontext()
    from sparsejax.cli.compilation_cache import programs_kept

    return programs_kept(since=_BEGUN)


@contextlib.contextmanager
def _results_alone() -> Generator[None]:
    """While this context is open, only Python can print to stdout.

    Otherwise Gloo, which connects processes on CPUs, would print there, too.
    """
    before = sys.stdout
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        sys.stdout = results
        try:
            yield
        finally:
            sys.stdout = before
            results.flush()
            os.dup2(results.fileno(), 1)


@contextlib.contextmanager
def _one_line_warnings(command: flags.Command | None) -> Generator[None]:
    def show(message, category, filename, lineno, file=None, line=None) -> None:
        _say(f"warning: {_message(message, command)}")

    with warnings.catch_warnings():
        # By default, Python shows only the first warning of each place in the code.
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:  # hides "Exception ignored" messages
            yield
        finally:
            sys.unraisablehook = hook


def _failed(error: BaseException, command: flags.Command | None) -> int:
    """Reports why a command failed, and returns its exit status.

    If the error is a bug, it is raised again.
    """
    from sparsejax.mesh import processes

    ending.wait_if_leaving()
    status = 1
    if _is_interrupt(error):
        after = _what_next(command)
        ending.say_once(lambda: _say(f"interrupted{after}"))
        status = interrupts.status()
    elif isinstance(error, BrokenPipeError):  # the reader of the output is gone
        # Python flushes stdout at exit: this must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif processes.is_lost_peer(error):
        _say(f"error: {_message(error, command)}")
        _say(_lost(command))
    elif isinstance(error, processes.OtherProcessError) or _is_for_users(error):
        _say(f"error: {_message(error, command)}")
    elif processes.is_joined():
        traceback.print_exception(error)
    else:
        raise error
    processes.leave(status)
    return status


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt caused an error. A library may have raised another error for it."""
    while error is not None:
        if "KeyboardInterrupt" in (type(error).__name__, *str(error).split()):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lost(command: flags.Command | None) -> str:
    return f"error: another process was lost{_what_next(command)}"


def _what_next(command: flags.Command | None) -> str:
    """Advice to a user whose training or tuning was interrupted; "" for other commands."""
    if isinstance(command, flags.Tune):
        return "; to continue, repeat the command"
    if not isinstance(command, flags.Train):
        return ""
    from sparsejax.runs import folders

    if folders.has_checkpoints(command.directory):
        return "; to continue, repeat the command with --resume"
    return " before a checkpoint was saved; repeat the command to begin again"


def _is_for_users(error: BaseException) -> bool:
    """Whether a user can correct an error. Other errors are bugs, which need their traceback."""
    kinds = (ValueError, OSError, ArithmeticError, MemoryError, NotImplementedError)
    if isinstance(error, ImportError) and "pip install" in str(error):
        return True  # an optional package
    # JAX has no class of its own for lack of memory.
    return isinstance(error, kinds) or "Out of memory" in str(error)


def _message(error: BaseException | str, command: flags.Command | None) -> str:
    """The text of an error or a warning on one line, with flags instead of Python arguments."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        return "the result cannot be written: standard output is closed"
    text = in_flags(str(error), None if command is None else type(command))
    return " ".join(text.split("\n")) or type(error).__name__


def _say_compiling(seconds: float) -> None:
    _say(f"a program is being compiled, for {seconds:.0f} s so far")


def _say(line: str, file: TextIO | None = None) -> None:
    print(f"sparsejax: {line}", file=sys.stderr if file is None else file)
