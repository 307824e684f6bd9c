"""A cache on disk of compiled programs, which are found without tracing.

JAX's own cache finds a program by its lowered text, so each process traces and lowers
its programs before it finds them there. Here the key of a program has everything that tracing
reads: the sources of our packages and the versions of their dependencies, the devices, JAX's
settings, and the arguments (for arrays, all except their values).

Arguments may name only functions and classes of our packages and their dependencies. So
programs for a user's own model are not cached: the sources of the model are unknown here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import pickle
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import pallas_kernels
import sparsejax
from sparsejax import kept_files, processors
from sparsejax.mesh.layout import default_device, device_memory, mesh_is_set

# If the folder is larger than this, the least recently used programs are removed.
MAX_BYTES = 2**30

_SUFFIX = ".program"
_SEAL = 16  # number of bytes of the checksum at the start of a file
_OURS = sparsejax, pallas_kernels
_PACKAGES = "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes"
_OF_CUDA = "jax_cuda", "nvidia_"
# Arguments may name functions and classes of these packages: the key has their sources or
# versions.
_KNOWN = {"pallas_kernels", "sparsejax", *_PACKAGES, *sys.stdlib_module_names}
# JAX settings that name cache folders. They do not change programs, so they are not in the key.
_PLACES = (
    "jax_compilation_cache_",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_",
)
# Environment variables with these prefixes are a part of the key.
_VARIABLES = "JAX_", "LIBTPU_", "TF_", "XLA_"

_folder: _Folder | None = None


class _UnknownError(Exception):
    """Raised if the key of a program cannot be computed, because it depends on unknown code."""


@contextlib.contextmanager
def kept_in(folder: pathlib.Path, *, since: float) -> Generator[None]:
    """While this context is open, compiled programs of `Keepable` are cached in a folder.

    Errors are ignored: a program that cannot be read is compiled.

    Args:
      folder: folder in which only this user can write, since loading a program may run any
        code.
      since: time at which this process began to import modules. If one of our sources was
        changed later, nothing is cached: the file may differ from the imported module.
    """
    global _folder
    before, _folder = _folder, _Folder(folder, since)
    try:
        yield
    finally:
        _folder = before


def are_kept() -> bool:
    """Whether a context of `kept_in` is open."""
    return _folder is not None


def may_compile_beside() -> bool:
    """Whether another thread may compile and run programs while this thread does.

    On a CPU it would slow down this thread. On a mesh all processes must run
    their programs in one order.
    """
    return are_kept() and jax.default_backend() == "gpu" and not mesh_is_set()


class Keepable:
    """A function under `jax.jit` whose programs are cached inside `kept_in`.

    Args:
      f: the function, which is identified by its module and its name.
      static_argnames: names of the static arguments, as for `jax.jit`.
      inside_others: whether it may be called inside other programs, even if it has options
        for the compiler. Then the options of the outermost program apply.
      options: further options of `jax.jit`.

    Attributes:
      program: the function under `jax.jit`, whose programs are not cached.
      inside: the form that is called inside another program.
      static: names of the static arguments.
      options: further options of `jax.jit`.
      signature: signature of the function.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        static_argnames: str | Iterable[str] = (),
        inside_others: bool = False,
        **options: Any,
    ):
        if isinstance(static_argnames, str):
            static_argnames = (static_argnames,)
        self.static, self.options = frozenset(static_argnames), options
        self.program = jax.jit(f, static_argnames=tuple(static_argnames), **options)
        self.inside = self.program
        if inside_others and options.get("compiler_options"):
            plain: dict[str, Any] = {**options, "compiler_options": None}
            self.inside = jax.jit(f, static_argnames=tuple(static_argnames), **plain)
        self.signature = inspect.signature(f)
        functools.update_wrapper(self, f)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.inside is not self.program and _is_traced((arguments, named)):
            return self.inside(*arguments, **named)
        if _folder is None:
            return self.program(*arguments, **named)
        return _folder.run(self, self.signature.bind(*arguments, **named))

    def compile_ahead(self, *arguments: Any, **named: Any) -> None:
        """Compiles the program for some arguments if programs are cached; runs nothing.

        A shape with a sharding stands for an array that is committed to its devices. A
        shape without one stands for an array on the default device that is not
        committed. A call of the program in another thread waits for the compilation.
        """
        self.lower_ahead(*arguments, **named)()

    def lower_ahead(self, *arguments: Any, **named: Any) -> Callable[[], object]:
        """The first half of `compile_ahead`; returns a function that does the second half.

        The first half is Python, which only one thread runs at a time. Call it before other
        threads need Python. The second half is the compiler, which another thread may run.
        """
        if _folder is None:
            return _nothing
        return _folder.lower_ahead(self, self.signature.bind(*arguments, **named))


class _Types(NamedTuple):
    """The key of a compiled program.

    Attributes:
      static: the static arguments, with their types.
      tree: the structure of the other arguments.
      leaves: shape, dtype and placement of each array in the other arguments.
      mesh: the mesh that is set.
      settings: settings of JAX.
    """

    static: tuple[tuple[type, Any], ...]
    tree: jax.tree_util.PyTreeDef
    leaves: tuple[Any, ...]
    mesh: Any
    settings: tuple[Any, ...]


class _Folder:
    """A folder of cached programs, and the programs already loaded from it."""

    def __init__(self, path: pathlib.Path, since: float):
        self._path, self._since = path, since
        self._loaded: dict[tuple[Keepable, _Types], Callable[..., Any]] = {}
        self._lowered: dict[
            tuple[Keepable, _Types], tuple[pathlib.Path, jax.stages.Lowered]
        ] = {}
        self._finding: dict[tuple[Keepable, _Types], threading.Lock] = {}
        self._writes = True

    def run(self, keepable: Keepable, bound: inspect.BoundArguments) -> Any:
        """Calls the program for some arguments."""
        types, by_place, by_name = self._taken_apart(keepable, bound)
        if types is None:
            return keepable.program(*bound.args, **bound.kwargs)
        program = self._ready(keepable, types, bound)
        if program is keepable.program:
            return program(*bound.args, **bound.kwargs)
        return program(*by_place, **by_name)

    def lower_ahead(
        self, keepable: Keepable, bound: inspect.BoundArguments
    ) -> Callable[[], object]:
        """Finds or lowers a program for some arguments; returns a function to compile it."""
        types, _, _ = self._taken_apart(keepable, bound)
        if types is None:
            return _nothing
        key = keepable, types
        with self._finding.setdefault(key, threading.Lock()):
            self._find(keepable, types, bound)
        return functools.partial(self._ready, keepable, types, bound)

    def _ready(
        self, keepable: Keepable, types: _Types, bound: inspect.BoundArguments
    ) -> Callable[..., Any]:
        """Returns the program for these types. Only one thread loads or compiles it."""
        key = keepable, types
        if (program := self._loaded.get(key)) is not None:
            return program
        with self._finding.setdefault(key, threading.Lock()):
            self._find(keepable, types, bound)
            if key in self._lowered:
                self._loaded[key] = self._compiled(*self._lowered.pop(key))
            return self._loaded[key]

    def _taken_apart(
        self, keepable: Keepable, bound: inspect.BoundArguments
    ) -> tuple[_Types | None, list[Any], dict[str, Any]]:
        """Splits a call into the key of its program, its positional and its keyword arguments. The
        key is None if the call is traced as part of another program.
        """
        bound.apply_defaults()
        static = []
        by_place = []
        by_name = {}
        for name, value in bound.arguments.items():
            kind = keepable.signature.parameters[name].kind
            if name in keepable.static:
                static.append((type(value), value))
            elif kind is inspect.Parameter.KEYWORD_ONLY:
                by_name[name] = value
            else:
                by_place.append(value)
        leaves, tree = jax.tree.flatten((tuple(by_place), by_name))
        if _is_traced(leaves):
            return None, by_place, by_name
        types = _Types(
            tuple(static),
            tree,
            tuple(map(_type, leaves)),
            None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh(),
            tuple(jax.config.values.values()),
        )
        return types, by_place, by_name

    def _find(
        self, keepable: Keepable, types: _Types, bound: inspect.BoundArguments
    ) -> None:
        """Loads the program from the folder, or lowers it."""
        key = keepable, types
        if key in self._loaded or key in self._lowered:
            return
        name = _name(keepable, types, self._since)
        if name is None:
            self._loaded[key] = keepable.program
            return
        path = self._path / f"{name}{_SUFFIX}"
        if (found := _read(path, types.tree)) is not None:
            self._loaded[key] = found
            return
        self._lowered[key] = path, keepable.program.lower(*bound.args, **bound.kwargs)

    def _compiled(
        self, path: pathlib.Path, lowered: jax.stages.Lowered
    ) -> jax.stages.Compiled:
        """Compiles a program and writes it into the folder."""
        # JAX's own cache cannot be disabled for one thread only. So it stays enabled while other
        # threads compile.
        on_cpu = jax.default_backend() == "cpu"
        with _without_cache() if on_cpu else contextlib.nullcontext():
            compiled = lowered.compile()
        if self._writes:
            try:
                _write(path, compiled)
            except OSError as error:
                self._writes = False
                warnings.warn(
                    f"programs are not kept ready: {error.filename}: {error.strerror}",
                    stacklevel=4,
                )
        return compiled


def _nothing() -> None:
    """Does nothing. `lower_ahead` returns this function if programs are not cached."""


def as_shapes[Tree](tree: Tree) -> Tree:
    """Replaces the arrays of a tree by their shapes, for `compile_ahead` in another thread.

    If that thread held the arrays, the training could not overwrite them, and would copy them.
    """

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding if leaf.committed else None,
            weak_type=getattr(jax.typeof(leaf), "weak_type", False),
        )

    return jax.tree.map(shape, tree)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _type(leaf: Any) -> tuple[Any, ...]:
    """The shape, dtype and placement of an argument that is, or becomes, an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        found = leaf.shape, str(leaf.dtype), leaf.weak_type
        if leaf.sharding is None:
            return (*found, jax.device_put(np.zeros(())).sharding, False)
        return (*found, leaf.sharding, True)
    aval = jax.typeof(leaf)
    found = aval.shape, str(aval.dtype), getattr(aval, "weak_type", False)
    if isinstance(leaf, jax.Array):
        return (*found, leaf.sharding, leaf.committed)
    return found


def _name(keepable: Keepable, types: _Types, since: float) -> str | None:
    """A hash of everything that a program depends on; None if it depends on unknown code."""
    settings = {
        name: value
        for name, value in zip(jax.config.values, types.settings, strict=True)
        if not name.startswith(_PLACES)
    }
    f = inspect.unwrap(keepable)
    if not _is_known(f.__module__) or "<" in f.__qualname__:
        return None
    try:
        return _digest_of(
            (
                _process(since),
                _devices_of(types),
                sorted(settings.items()),
                (f.__module__, f.__qualname__),
                sorted(keepable.static),
                sorted(keepable.options.items()),
                types[:-1],
            )
        )
    except Exception:  # noqa: BLE001 - failures of pickling have many types
        return None


def _is_known(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _KNOWN


def _process(since: float) -> tuple[Any, ...]:
    """The part of the key that is constant in a process."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    }
    return (
        _packages(since),
        default_device().client.platform_version,
        _processor() if default_device().platform == "cpu" else device_memory(),
        jax.process_count(),
        environment,
    )


def _devices_of(types: _Types) -> list[tuple[Any, ...]]:
    """The devices on which a program runs; other devices of the process do not matter."""
    devices = {default_device()} if types.mesh is None else set(types.mesh.devices.flat)
    for *_, sharding, _ in (leaf for leaf in types.leaves if len(leaf) > 3):
        devices |= sharding.device_set
    return sorted((each.id, each.platform, each.device_kind) for each in devices)


@functools.cache
def _packages(since: float) -> tuple[Any, ...]:
    """The hashes of our packages' sources, and the versions of other packages.

    Raises:
      _UnknownError: a source was changed after `since`.
    """
    # The names of these folders contain versions. Reading the files in them would take a tenth
    # of a second.
    beside = pathlib.Path(jax.__file__).parents[1].glob("*.dist-info")
    return (
        [sources(pathlib.Path(*each.__path__), since) for each in _OURS],
        [(name, importlib.metadata.version(name)) for name in _PACKAGES],
        sorted(each.name for each in beside if each.name.startswith(_OF_CUDA)),
        sys.version,
        platform.machine(),
    )


def sources(folder: pathlib.Path, since: float) -> str:
    """A hash of all modules in a folder.

    Raises:
      _UnknownError: a module was changed after `since`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        # A file that was moved here keeps its old mtime, but gets a new ctime.
        if path.stat().st_ctime > since:
            raise _UnknownError
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _processor() -> Any:
    """Describes the CPU for which a program is compiled: its features and number of cores."""
    names = "flags", "Features", "model name"
    found = [len(processors.usable())]
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        found += [x for x in lines.splitlines() if x.startswith(names)]
    return found


class _Digest:
    """A hash of the parts of a program's key; equal parts give equal hashes in all processes.

    It hashes the content that pickle would write. Whether equal objects are identical does not
    matter.
    """

    def __init__(self):
        self._digest = hashlib.blake2b(digest_size=16)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def add(self, value: Any) -> None:
        """Adds an object and everything that it contains.

        Raises:
          _UnknownError: it contains a function or a class of an unknown package, or one that
            its module does not name, such as a function inside a function.
          Exception: it cannot be pickled.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            self._say(kind.__name__, repr(value))
        elif kind in (tuple, list):
            self._say(kind.__name__, len(value))
            for each in value:
                self.add(each)
        elif kind is dict:
            self._say("dict", len(value))
            for pair in value.items():
                self.add(pair)
        elif kind in (set, frozenset):
            self._say(kind.__name__, sorted(map(_digest_of, value)))
        elif isinstance(value, jax.Device):
            self._say("device", value.id)
        elif isinstance(getattr(value, "__qualname__", None), str):
            self._add_named(value)
        elif _is_value(value):
            # Only fields: a cached attribute, such as a hash, differs between processes.
            fields = [getattr(value, each.name) for each in dataclasses.fields(value)]
            self.add((kind, fields))
        else:
            parts = value.__reduce_ex__(4)
            # The object is pickled as a global name of its module.
            if isinstance(parts, str):
                self.add((kind, parts))
                return
            parts = (*parts, *[None] * 5)[:5]
            self._say("object")
            self.add((*parts[:3], *(None if x is None else [*x] for x in parts[3:])))

    def _add_named(self, value: Any) -> None:
        """Adds a function or a class by its module and name."""
        module, name = value.__module__, value.__qualname__
        found = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # No module has an attribute for `NoneType`, so it cannot be found by name.
        is_none = value is type(None)
        if not is_none and (found is not value or not _is_known(module)):
            raise _UnknownError
        self._say("named", module, name)

    def _say(self, *words: Any) -> None:
        self._digest.update(f"{words}\n".encode())


def _digest_of(value: Any) -> str:
    digest = _Digest()
    digest.add(value)
    return digest.hexdigest()


def _is_value(value: Any) -> bool:
    """Whether this is a frozen dataclass whose equality compares its fields."""
    params = getattr(value, "__dataclass_params__", None)
    return params is not None and params.frozen and params.eq


@contextlib.contextmanager
def _without_cache() -> Generator[None]:
    """While this context is open, JAX compiles programs even if its own cache has them.

    A CPU program from JAX's cache cannot be serialized: it has lost its functions.
    """
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


def _write(path: pathlib.Path, program: jax.stages.Compiled) -> None:
    """Writes a program to a file, if it can be serialized."""
    try:
        content, _, out_tree = serialize_executable.serialize(program)
        executable: Any = program.runtime_executable()
        devices = [each.id for each in executable.local_devices()]
        content = pickle.dumps((content, out_tree, devices), protocol=5)
    except Exception:  # noqa: BLE001 - XLA and JAX have no class for this error
        return
    with kept_files.kept_file(path, MAX_BYTES) as file:
        file.write(_seal(path, content) + content)


def _read(path: pathlib.Path, tree: Any) -> Callable[..., Any] | None:
    """Loads the program in a file; returns None if the file is missing or damaged."""
    try:
        # JAX serializes programs as pickles, which can run any code. So the owner of the file is
        # checked first.
        with kept_files.opened_own(path) as file:
            content = file.read()
        seal, content = content[:_SEAL], content[_SEAL:]
        if seal != _seal(path, content):
            return None
        os.utime(path)  # marks the program as recently used
        if jax.default_backend() == "gpu":
            # This import finds the library that launches Mosaic programs; tracing, which is
            # skipped, would import it.
            importlib.import_module("jax.experimental.mosaic.gpu")
        content, out_tree, ids = pickle.loads(content)
        devices = {each.id: each for each in jax.devices()}
        return serialize_executable.deserialize_and_load(
            content, tree, out_tree, execution_devices=[devices[i] for i in ids]
        )
    except Exception:  # noqa: BLE001 - whatever the fault, the program can be compiled
        return None


def _seal(path: pathlib.Path, content: bytes) -> bytes:
    """The checksum that is stored with a program. It covers its content and the file's name."""
    name = path.name.encode()
    return hashlib.blake2b(content, digest_size=_SEAL, key=name).digest()
