"""Checkpoints of a training run. They are written atomically and verified when read."""

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

if TYPE_CHECKING:  # imported lazily: its 230 modules load while a program compiles
    from orbax.checkpoint import v1 as ocp

_KEPT = 3  # number of newest checkpoints that are kept; the best one is kept, too
VERSION = 1  # version of the record's format
_HOST_ROWS = "host_rows"  # name of the folder with rows that are in host memory
_METADATA = "_CHECKPOINT_METADATA"  # file of orbax, which also contains our record
_HANDLERS = r"orbax\.checkpoint\.[\w.]+\.(PyTreeHandler|MetricsHandler)"
_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used, so an older one is used."""


class Checkpoints:
    """The checkpoints of one run, stored in one directory.

    Each contains the state of a tuple of NNX modules (parameters, optimizer state, random keys)
    and a record: the progress of training, the identity of the run, and checksums.
    Orbax writes a checkpoint under a temporary name and renames it, so a killed process leaves no
    incomplete checkpoint. The checksums are verified on reading, as the storage format does not
    detect changed bytes.

    The newest three checkpoints are kept, and the one with the highest `score`.

    A checkpoint that was saved on one mesh can be restored on any other mesh, or without
    a mesh. Several processes call each method together, and must share a file system.

    Args:
      directory: folder, which is made when the first checkpoint is saved.
      identity: JSON values that identify the run. They are stored in each checkpoint, and a
          checkpoint with other values is rejected.
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
        """A context that locks the directory against other processes, see `locks.locked`.

        Raises:
          BlockingIOError: another process has locked it.
        """
        with processes.alone_in(os.fspath(self.directory)):
            yield

    def steps(self) -> list[int]:
        """Numbers of the steps that have a checkpoint, in ascending order."""
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
        """Writes a checkpoint, and returns when it is on disk.

        Args:
          step: number of the step, which names the checkpoint. An older one with this number is
              replaced.
          modules: NNX modules.
          progress: JSON values; floats are restored exactly.
          score: quality of the model (higher is better), or None if it was not measured.

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
            # These files are written first, because the checkpoint refers to them.
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
        """Folder for the rows of a parameter that are in host memory."""
        return (
            self.directory
            / _HOST_ROWS
            / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        )

    def _remove_unnamed(self) -> None:
        """Removes files of rows that no checkpoint refers to."""
        try:
            records = [_opened(self.directory / str(step)) for step in self.steps()]
        except _Damaged:
            # A damaged record may refer to any file, so nothing is removed.
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
        """Checks that the checkpoints belong to this run and this release.

        Raises:
          ValueError: a checkpoint belongs to another run or release. The message names the
              difference.
        """
        for step in self.steps():
            with contextlib.suppress(_Damaged):  # `restore` reports the damage
                self._record(step)

    def restore(
        self, modules: tuple[Any, ...], *, best: bool = False
    ) -> dict[str, Any] | None:
        """Loads the newest undamaged checkpoint into the modules.

        If the newest is damaged, the previous one is used, with a `CheckpointWarning`.

        Args:
          modules: modules of equal structure as those saved, with any values, or with shapes
              (`jax.ShapeDtypeStruct`) in place of arrays, whose shardings give the placement.
          best: whether the checkpoint with the highest score is preferred to the newest.

        Returns:
          The `progress` of the checkpoint, or None if there is no checkpoint.

        Raises:
          ValueError: a checkpoint belongs to another run, model, optimizer or release, or all are
              damaged.
        """
        steps = self.steps()[::-1]
        if not steps:
            return None
        self.check()
        if best:
            # The sort is stable: steps without a score stay in their order, the newest first.
            steps.sort(key=lambda step: -self._score(step))
        for step in steps:
            progress, arrays, failure = {}, {}, ""
            try:
                record = self._record(step)
                progress = dict(record.progress)
                arrays = self._load(step, modules, record)
            except _Damaged as error:
                failure = str(error)
            # Each process reads only its part, so another process may have found damage.
            if not processes.is_true_anywhere(bool(failure)):
                _set_arrays(modules, arrays)
                for host in _host_rows(modules)[0].values():
                    # The arrays on the devices may have come from another checkpoint, so the slot
                    # numbers are invalid.
                    host.forget_slots()
                return progress
            if processes.is_true_anywhere(not (self.directory / str(step)).is_dir()):
                continue  # another process, which still trains, removed this checkpoint
            warnings.warn(
                f"checkpoint {self.directory / str(step)} is damaged and was skipped "
                f"({failure or 'in another process'})",
                CheckpointWarning,
                stacklevel=2,
            )
        if processes.is_true_anywhere(self.steps()[::-1] != sorted(steps)[::-1]):
            # The process that removed it has saved newer ones.
            return self.restore(modules, best=best)
        raise ValueError(
            f"no checkpoint in {self.directory} can be read; start again in another "
            "directory"
        )

    @staticmethod
    def compile_checksums(modules: tuple[Any, ...]) -> Callable[[], None]:
        """A function that compiles the checksum program of `save` and `restore`, to call in a
        thread.

        The modules may have shapes in place of arrays, and may change while it runs.
        """
        shapes = as_shapes(_arrays(nnx.state(modules)))
        return functools.partial(_checksums[False].compile_ahead, shapes)

    def progress(self) -> dict[str, Any] | None:
        """The progress stored in the newest checkpoint whose record can be read.

        Arrays are not read. The result is None if there is no such checkpoint.

        Raises:
          ValueError: a checkpoint belongs to another run or another release.
        """
        for step in reversed(self.steps()):
            with contextlib.suppress(_Damaged):  # `restore` reports the damage
                return dict(self._record(step).progress)
        return None

    def _record(self, step: int) -> _Record:
        """Reads the record of a checkpoint, and checks that it belongs to this run."""
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
            # An infinite score is sorted first, so that `restore` reads this checkpoint and warns.
            return math.inf
        return -math.inf if score is None else score

    def _load(
        self, step: int, modules: tuple[Any, ...], record: _Record
    ) -> dict[str, jax.Array]:
        """Reads the arrays of a checkpoint and verifies their checksums."""
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
            if failure:  # makes unfinished reads fail now, instead of later
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
        """Removes checkpoints later than `step`: damaged ones that `restore` skipped."""

        def delete():
            for later in self.steps():
                if later > step:
                    (self.directory / str(later)).rmtree()

        processes.in_first(delete)


class _Damaged(Exception):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    """The record of a checkpoint: everything but its arrays and its version.

    Attributes:
      identity: settings and data of the run, compared when training resumes.
      progress: progress of the training.
      shapes: shapes of the arrays.
      checksums: checksums of the arrays.
      score: quality of the model, or None if it was not measured.
      host_rows: files with the parameter rows that are in host memory.
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
    """Reads the record of the checkpoint in a folder, without executing any code that it names."""
    try:
        metadata = codec.parse((path / _METADATA).read_text(), finite=False)
        handlers = metadata["item_handlers"].values()
        sealed = metadata["custom_metadata"]
        is_whole = sealed["digest"] == _digest(sealed["record"])
        # Before the first epoch, the best score is -inf.
        stated = codec.parse(sealed["record"], finite=False)
        version = stated.pop("version")
    except Exception as error:  # noqa: BLE001 - whatever a damaged file raises
        raise _Damaged(f"its record cannot be read: {_first_line(error)}") from None
    # Orbax finds only handlers that are registered; it does not import them.
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
    """The first line of the message of an error's original cause."""
    while cause := error.__cause__ or error.__context__:
        if not isinstance(cause, Exception):
            break
        error = cause
    return f"{type(error).__name__}: {str(error).partition('\n')[0][:200]}"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses the output of orbax and asyncio when a read raises an exception."""
    loggers = [logging.getLogger(name) for name in ("", "absl", "asyncio")]
    hook = sys.unraisablehook
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        # suppresses "coroutine was never awaited"
        warnings.simplefilter("ignore", RuntimeWarning)
        for logger in loggers:
            logger.addFilter(_no_record)
            stack.callback(logger.removeFilter, _no_record)
        sys.unraisablehook = lambda _: None
        stack.callback(setattr, sys, "unraisablehook", hook)
        yield


def _no_record(record: logging.LogRecord) -> bool:
    return False


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A 32-bit checksum for each array, which does not depend on its sharding.

    The checksum is the sum of each element's bits times an odd number that depends on its
    position, modulo 2^32. A change of any single element changes the sum.
    """
    return {name: int(value) for name, value in _checksums[False](dict(arrays)).items()}


@Programs
def _checksums(arrays):
    def checksum(array):
        if array.dtype == jnp.bool_:
            array = array.astype(jnp.uint8)
        width = jnp.dtype(array.dtype).itemsize * 8
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
        # Positions are computed axis by axis, so that each device processes only its own part.
        position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            position += place * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, arrays)


def fingerprint(*parts: CSR | jax.Array | np.ndarray) -> str:
    """A hash of matrices, arrays and names; equal contents have equal hashes.

    Padding of a CSR is not hashed.
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
    """Orbax's context without compression.

    Trained weights hardly compress, and compression would take most of the time of a save and a
    third of the time of a restore.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _arrays(state) -> dict[str, Any]:
    """The arrays of a state (or their shapes) by path. Typed random keys are converted to
    integers.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in leaves}


def _not_empty(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The non-empty arrays: orbax cannot write empty ones, such as a kernel of no dense
    columns.
    """
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
    """`jax.random.key_impl`, also for the `ShapeDtypeStruct` of a key array."""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), keys)
    return found[0]


def _host_rows(
    modules: tuple[Any, ...],
) -> tuple[dict[str, HostRows], nnx.filterlib.Filter]:
    """The rows in host memory by the path of their parameter, and a filter that selects all other
    variables.
    """
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
