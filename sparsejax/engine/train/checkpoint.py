"""Checkpoints of a training run: written whole, verified when read."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import hashlib
import logging
import math
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from sparsejax import codec
from sparsejax.mesh import processes
from sparsejax.mesh.kept_programs import as_shapes
from sparsejax.mesh.xla_options import Programs
from sparsejax.optimizers.gradients import row_params
from sparsejax.optimizers.optimizer import HostRows, Optimizer
from sparsejax.sparse import CSR

if TYPE_CHECKING:  # its 230 modules are imported while a program of ours is compiled
    from orbax.checkpoint import v1 as ocp

_KEPT = 3  # newest checkpoints that are kept; the best one is kept, too
VERSION = 1  # of the record
_HOST_ROWS = "host_rows"  # a folder, of rows that are in host memory
_METADATA = "_CHECKPOINT_METADATA"  # orbax's file, which also holds the record
_HANDLERS = r"orbax\.checkpoint\.[\w.]+\.(PyTreeHandler|MetricsHandler)"
_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used, so an older one was used."""


class Checkpoints:
    """The checkpoints of one run in one directory.

    Each holds the state of a tuple of NNX modules (parameters, optimizer state, random
    keys) and a record: how far training had come, which run it was, and checksums.
    Orbax writes a checkpoint under a temporary name and renames it, so a killed process
    leaves no incomplete checkpoint. The checksums are compared on reading, because the
    storage format itself does not notice a changed byte.

    The newest three checkpoints are kept, and the one with the highest `score`.

    A checkpoint that was saved on one mesh can be restored on any other mesh, or without
    a mesh. Several processes call each method together, and must share a file system.

    Args:
      directory: the folder, made when the first checkpoint is saved.
      identity: JSON values that identify the run. They are kept with each checkpoint. A
        checkpoint with other values is refused.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        identity: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self.directory = epath.Path(directory).resolve()
        self.identity = codec.plain(identity)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which no other process can hold the directory, see `locks.locked`.

        Raises:
          BlockingIOError: another process holds it.
        """
        with processes.alone_in(os.fspath(self.directory)):
            yield

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        names = (path.name for path in self.directory.iterdir() if path.is_dir())
        return sorted(
            int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)
        )

    def save(
        self,
        step: int,
        modules: tuple[Any, ...],
        progress: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> None:
        """Writes one checkpoint and returns when it is safe on disk.

        Args:
          step: the checkpoint's name. An older one of the same step is replaced.
          modules: NNX modules.
          progress: JSON values; floats come back bit for bit.
          score: how good it is (higher is better), if that was measured.

        Raises:
          OSError: the checkpoint cannot be written. Earlier ones are unharmed.
        """
        from orbax.checkpoint import v1 as ocp

        hosts, held = _host_rows(modules)
        arrays = _arrays(nnx.state(modules, held))
        policies = ocp.training.preservation_policies
        policy = policies.AnyPreservationPolicy(
            [
                policies.LatestN(_KEPT),
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics["score"],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        try:
            # Before the checkpoint that names them.
            files = {
                name: tuple(host.save(self._host_folder(name)))
                for name, host in hosts.items()
            }
            record = _Record(
                identity=self.identity,
                progress=progress,
                shapes={name: array.shape for name, array in arrays.items()},
                checksums=checksums(arrays),
                score=score,
                host_rows=files,
            )
            with ocp.training.Checkpointer(
                self.directory,
                preservation_policy=policy,  # pyrefly: ignore[bad-argument-type]
                cleanup_tmp_directories=True,
                context=_uncompressed(),
            ) as checkpointer:
                checkpointer.save(
                    step,
                    _not_empty(arrays),
                    force=True,
                    overwrite=True,
                    metrics=None if score is None else {"score": score},
                    custom_metadata=_sealed(record),
                )
        except (OSError, ValueError) as error:
            is_full = any(text in str(error) for text in _FULL)
            raise OSError(
                f"checkpoint {step} cannot be written to {self.directory}"
                f"{', make room there and resume' if is_full else ''}; earlier "
                f"checkpoints are unharmed ({_first_line(error)})"
            ) from error
        if hosts:
            self._remove_unnamed()

    def _host_folder(self, name: str) -> epath.Path:
        """Where the rows of a parameter are that are in host memory."""
        return (
            self.directory
            / _HOST_ROWS
            / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        )

    def _remove_unnamed(self) -> None:
        """Removes files of rows that no checkpoint names."""
        try:
            records = [_opened(self.directory / str(step)) for step in self.steps()]
        except _Damaged:  # it may name any
            return
        named = {
            self._host_folder(name) / file
            for record in records
            for name, files in record.host_rows.items()
            for file in files
        }
        for folder in (self.directory / _HOST_ROWS).iterdir():
            for path in folder.iterdir():
                if path not in named and not path.name.startswith("."):
                    path.unlink()

    def check(self) -> None:
        """Checks that the checkpoints are of this run, and of this release.

        Raises:
          ValueError: a checkpoint is of another run or release. The message says how it
            differs.
        """
        for step in self.steps():
            with contextlib.suppress(_Damaged):  # `restore` will say so
                self._record(step)

    def restore(
        self, modules: tuple[Any, ...], *, best: bool = False
    ) -> dict[str, Any] | None:
        """Loads the newest sound checkpoint into the modules.

        If it is damaged, the one before it is used, with a `CheckpointWarning`.

        Args:
          modules: modules like those that were saved, with any values; or with
            shapes (`jax.ShapeDtypeStruct`) in place of arrays, which say where each array
            goes.
          best: prefer the checkpoint with the highest score to the newest.

        Returns:
          The `progress` it was saved with, or None where there is no checkpoint.

        Raises:
          ValueError: a checkpoint is of another run, model, optimizer or release, or all
            checkpoints are damaged.
        """
        steps = self.steps()[::-1]
        if not steps:
            return None
        self.check()
        if best:
            # Stable: among steps without a score the newest stays first.
            steps.sort(key=lambda step: -self._score(step))
        for step in steps:
            progress, arrays, failure = {}, {}, ""
            try:
                record = self._record(step)
                progress = dict(record.progress)
                arrays = self._load(step, modules, record)
            except _Damaged as error:
                failure = str(error)
            # Each process reads its own part. The damage may be in another process's
            # part.
            if not processes.is_true_anywhere(bool(failure)):
                _set_arrays(modules, arrays)
                for host in _host_rows(modules)[0].values():
                    # The number of the devices' state may belong to an earlier
                    # checkpoint now.
                    host.forget_slots()
                return progress
            if processes.is_true_anywhere(not (self.directory / str(step)).is_dir()):
                continue  # a training that is still running has removed it
            warnings.warn(
                f"checkpoint {self.directory / str(step)} is damaged and was skipped "
                f"({failure or 'in another process'})",
                CheckpointWarning,
                stacklevel=2,
            )
        if processes.is_true_anywhere(self.steps()[::-1] != sorted(steps)[::-1]):
            return self.restore(modules, best=best)  # that training saved others
        raise ValueError(
            f"no checkpoint in {self.directory} can be read; start again in another "
            "directory"
        )

    @staticmethod
    def compile_checksums(modules: tuple[Any, ...]) -> Callable[[], None]:
        """A call that compiles the program of `save` and `restore`, for another thread.

        The modules may have shapes in place of arrays. They may be changed meanwhile.
        """
        shapes = as_shapes(_arrays(nnx.state(modules)))
        return functools.partial(_checksums[False].compile_ahead, shapes)

    def progress(self) -> dict[str, Any] | None:
        """How far training had come at the newest checkpoint whose record can be read.

        The arrays are not read. Returns None if there is no such checkpoint.

        Raises:
          ValueError: a checkpoint is of another run, or of another release.
        """
        for step in reversed(self.steps()):
            with contextlib.suppress(_Damaged):  # `restore` will say so
                return dict(self._record(step).progress)
        return None

    def _record(self, step: int) -> _Record:
        """The record of a checkpoint of this run."""
        path = self.directory / str(step)
        record = _opened(path)
        theirs, ours = record.identity, self.identity
        for name in [*ours, *theirs]:
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"{path}: is a checkpoint of another run, or the settings of this "
                    f"one were edited: {name} is {theirs.get(name)!r} there and "
                    f"{ours.get(name)!r} here"
                )
        return record

    def _score(self, step: int) -> float:
        try:
            score = self._record(step).score
        except _Damaged:
            return math.inf  # tried first, so that the user is warned
        return -math.inf if score is None else score

    def _load(
        self, step: int, modules: tuple[Any, ...], record: _Record
    ) -> dict[str, jax.Array]:
        """The arrays of a checkpoint, compared with their checksums."""
        from orbax.checkpoint import v1 as ocp

        path = self.directory / str(step)
        hosts, held = _host_rows(modules)
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _arrays(nnx.state(modules, held)).items()
        }
        shapes = record.shapes
        for name in sorted({*abstract, *shapes}):
            if name not in shapes or name not in abstract:
                where = "the checkpoint" if name not in shapes else "this model"
                raise ValueError(
                    f"{path}: made with another model or optimizer: {where} has no "
                    f"{name}"
                )
            if shapes[name] != abstract[name].shape:
                raise ValueError(
                    f"{path}: made with another model: {name} has shape "
                    f"{shapes[name]} there and {abstract[name].shape} here"
                )
        failure, arrays = "", cast(Any, {})
        with _silence():
            try:
                arrays = ocp.load(
                    path, cast(Any, _not_empty(abstract)), checkpointable_name="state"
                )
            except Exception as error:  # noqa: BLE001 - whatever a damaged file raises
                failure = _first_line(error)
            if failure:  # let reads that are still running fail now, not later
                time.sleep(0.1)
                gc.collect()
        if failure:
            raise _Damaged(f"its arrays cannot be read: {failure}")
        for name in abstract.keys() - arrays.keys():
            at = abstract[name]
            arrays[name] = jnp.zeros(at.shape, at.dtype, device=at.sharding)
        if checksums(arrays) != record.checksums:
            raise _Damaged("its checksum does not match")
        for name in sorted({*hosts, *record.host_rows}):
            if name not in hosts or name not in record.host_rows:
                where = "the checkpoint" if name in hosts else "this model"
                raise ValueError(
                    f"{path}: made with another model: {where} has no rows in host memory "
                    f"of {name}"
                )
            try:
                hosts[name].load(self._host_folder(name), list(record.host_rows[name]))
            except OSError as error:
                raise _Damaged(str(error)) from None
            except ValueError as error:
                raise ValueError(
                    f"{path}: made with another model or optimizer: {error}"
                ) from None
        return arrays

    def delete_after(self, step: int) -> None:
        """Removes checkpoints later than `step`: damaged ones that were passed over."""

        def delete():
            for later in self.steps():
                if later > step:
                    (self.directory / str(later)).rmtree()

        processes.in_first(delete)


class _Damaged(Exception):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    """The facts of a checkpoint beside its arrays and the version.

    Attributes:
      identity: settings and data of the run, which a resume compares.
      progress: how far training had come.
      shapes: shapes of the arrays.
      checksums: checksums of the arrays.
      score: how good it is, if that was measured.
      host_rows: the files of parameters whose rows are in host memory.
    """

    identity: Mapping[str, Any]
    progress: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    checksums: Mapping[str, int]
    score: float | None = None
    host_rows: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


def _sealed(record: _Record) -> dict[str, str]:
    stated = codec.document(record, skip_defaults=True)
    text = codec.text({"version": VERSION, **stated})
    return {"record": text, "digest": _digest(text)}


def _opened(path: epath.Path) -> _Record:
    """The record of the checkpoint in a folder. Nothing that it names is run."""
    try:
        metadata = codec.parse((path / _METADATA).read_text(), finite=False)
        handlers = metadata["item_handlers"].values()
        sealed = metadata["custom_metadata"]
        is_whole = sealed["digest"] == _digest(sealed["record"])
        # The best score of a training is -inf before its first epoch.
        stated = codec.parse(sealed["record"], finite=False)
        version = stated.pop("version")
    except Exception as error:  # noqa: BLE001 - whatever a damaged file raises
        raise _Damaged(f"its record cannot be read: {_first_line(error)}") from None
    # Orbax looks for a handler only among those that it has; it imports none.
    for name in handlers:
        if not re.fullmatch(_HANDLERS, str(name)):
            raise _Damaged(f"its arrays need a handler that is not known: {name!r}")
    if not is_whole:
        raise _Damaged("its record does not match its digest")
    if version != VERSION:
        raise ValueError(
            f"{path}: a checkpoint of version {version!r}; this release reads version "
            f"{VERSION}"
        )
    try:
        return codec.read(_Record, stated, "the record")
    except ValueError as error:
        raise _Damaged(f"its record cannot be read: {error}") from None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _first_line(error: Exception) -> str:
    """The first cause of an error, in one line."""
    while cause := error.__cause__ or error.__context__:
        if not isinstance(cause, Exception):
            break
        error = cause
    return f"{type(error).__name__}: {str(error).partition('\n')[0][:200]}"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drops the lines that orbax and asyncio print when a read fails with an exception."""
    loggers = [logging.getLogger(name) for name in ("", "absl", "asyncio")]
    hook = sys.unraisablehook
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", RuntimeWarning)  # "coroutine was never awaited"
        for logger in loggers:
            logger.addFilter(_no_record)
            stack.callback(logger.removeFilter, _no_record)
        sys.unraisablehook = lambda _: None
        stack.callback(setattr, sys, "unraisablehook", hook)
        yield


def _no_record(record: logging.LogRecord) -> bool:
    return False


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """One 32-bit number for each array, the same however it is sharded.

    The sum over all elements of the element's bits times an odd number that depends on
    its position, modulo 2^32. A change of any single element changes the sum.
    """
    return {name: int(value) for name, value in _checksums[False](dict(arrays)).items()}


@Programs
def _checksums(arrays):
    def checksum(array):
        if array.dtype == jnp.bool_:
            array = array.astype(jnp.uint8)
        width = jnp.dtype(array.dtype).itemsize * 8
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
        # Computed axis by axis, so that each device makes its own part.
        position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            position += place * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, arrays)


def fingerprint(*parts: CSR | jax.Array | np.ndarray) -> str:
    """A hash of matrices, arrays and names: the same string for the same content.

    Padding of a CSR does not count.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(array: Any) -> None:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array)

    for part in parts:
        if isinstance(part, CSR):
            count = int(part.indptr[-1])
            add(part.indptr)
            add(part.indices[:count])
            add(np.asarray(part.shape) if part.data is None else part.data[:count])
        elif isinstance(part.dtype, np.dtypes.StringDType):
            add(np.strings.str_len(part))
            for start in range(0, len(part), 2**16):
                digest.update("".join(part[start : start + 2**16].tolist()).encode())
        else:
            add(part)
    return digest.hexdigest()


def _uncompressed() -> ocp.Context:
    """Orbax's options, without compression.

    Trained numbers hardly get smaller, and compressing them takes most of the time of a save,
    and a third of the time of a restore.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _arrays(state) -> dict[str, Any]:
    """Arrays or their shapes by path; typed random keys as the integers they are made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in leaves}


def _not_empty(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that orbax can write, without empty ones such as a kernel of no dense columns."""
    return {name: array for name, array in arrays.items() if array.size}


def _plain(leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        shape = jax.eval_shape(_plain, leaf)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _key_impl(keys):
    """`jax.random.key_impl` of keys or of their shape."""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), keys)
    return found[0]


def _host_rows(
    modules: tuple[Any, ...],
) -> tuple[dict[str, HostRows], nnx.filterlib.Filter]:
    """Rows in host memory by the paths of their parameters, and a filter of other variables."""
    found: dict[str, HostRows] = {}
    for path, kernel in row_params(modules).items():
        if (host := kernel.get_metadata().get("host")) is not None:
            found["/".join(map(str, path))] = host
    if not found:
        return {}, ...
    optimizers = [module for module in modules if isinstance(module, Optimizer)]
    if optimizers:
        (optimizer,) = optimizers
        for module in modules:
            if module is not optimizer:
                optimizer.host_rows(module)
    cached = {id(v) for host in found.values() for v in host.variables()}
    paths = {
        tuple(path) for path, node in nnx.iter_graph(modules) if id(node) in cached
    }
    return found, lambda path, _: tuple(path) not in paths


def _set_arrays(modules, arrays) -> None:
    state = nnx.state(modules, _host_rows(modules)[1])

    def restored(path, leaf):
        name = jax.tree_util.keystr(path)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = arrays[name]
        if is_key:
            return jax.random.wrap_key_data(array, impl=_key_impl(leaf))
        return array

    pure = jax.tree_util.tree_map_with_path(restored, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(modules, state)
