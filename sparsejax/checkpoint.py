"""Checkpoints of a training run: written whole, verified when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from orbax.checkpoint import v1 as ocp

from sparsejax import distributed
from sparsejax.sparse import CSR

_KEPT = 3  # newest checkpoints that stay; the best one stays beside them


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used; an older one was."""


class Checkpoints:
    """The checkpoints of one run in one directory.

    Each holds the state of a tuple of NNX modules (parameters, optimizer state, random
    keys) and a JSON object that says how far training had come. Orbax writes a
    checkpoint under a temporary name and renames it, so a killed process leaves no
    half of one. A checksum of all arrays is stored beside them and compared on
    reading, because the storage format itself does not notice a changed byte.

    The newest three stay, and the one with the highest `score`.

    What was saved on one mesh can be restored on any other, or on none. Several
    processes call each method together, and need the same file system.

    Args:
      directory: made when the first checkpoint is saved.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = epath.Path(directory).resolve()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        names = (path.name for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

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
          step: its name; an older one of the same step is replaced.
          modules: NNX modules.
          progress: JSON values; floats come back bit for bit.
          score: how good it is (higher is better), if that was measured.

        Raises:
          OSError: it cannot be written; those that were there are.
        """
        arrays = _arrays(nnx.state(modules))
        record: dict[str, Any] = {
            "progress": dict(progress),
            "shapes": {name: list(array.shape) for name, array in arrays.items()},
            "checksums": checksums(arrays),
        }
        if score is not None:
            record["score"] = score
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
            with ocp.training.Checkpointer(
                self.directory,
                preservation_policy=policy,  # pyrefly: ignore[bad-argument-type]
                cleanup_tmp_directories=True,
            ) as checkpointer:
                checkpointer.save(
                    step,
                    arrays,
                    force=True,
                    overwrite=True,
                    metrics=None if score is None else {"score": score},
                    custom_metadata={"record": json.dumps(record)},
                )
        except (OSError, ValueError) as error:
            raise OSError(
                f"checkpoint {step} cannot be written to {self.directory}, make room "
                f"there and resume; those that were there are unharmed ({error})"
            ) from error

    def restore(
        self, modules: tuple[Any, ...], *, best: bool = False
    ) -> dict[str, Any] | None:
        """Loads the newest sound checkpoint into the modules.

        A damaged one is passed over, with a `CheckpointWarning`, for the one before.

        Args:
          modules: the same modules that were saved, in any state.
          best: prefer the checkpoint with the highest score to the newest.

        Returns:
          The `progress` it was saved with, or None where there is no checkpoint.

        Raises:
          ValueError: the checkpoint is of another model or optimizer, or all
            checkpoints are damaged.
        """
        steps = self.steps()[::-1]
        if not steps:
            return None
        with ocp.training.Checkpointer(self.directory) as checkpointer:
            if best:
                # Stable: among steps without a score the newest stays first.
                steps.sort(key=lambda step: -_score(checkpointer, step))
            for step in steps:
                progress, arrays, failure = {}, {}, ""
                try:
                    record = _record(checkpointer, step)
                    progress = record["progress"]
                    arrays = _load(checkpointer, step, modules, record)
                except _OtherModel as error:
                    raise ValueError(f"{self.directory / str(step)}: {error}") from None
                except Exception as error:  # noqa: BLE001 - whatever a damaged file raises
                    failure = f"{type(error).__name__}: {str(error)[:200]}"
                # Each process reads its own part: another's may be the damaged one.
                if distributed.is_true_anywhere(bool(failure)):
                    warnings.warn(
                        f"checkpoint {self.directory / str(step)} is damaged and was "
                        f"skipped ({failure or 'in another process'})",
                        CheckpointWarning,
                        stacklevel=2,
                    )
                    continue
                _set_arrays(modules, arrays)
                return progress
        raise ValueError(
            f"no checkpoint in {self.directory} can be read; start again in another "
            "directory"
        )

    def progress(self) -> dict[str, Any] | None:
        """How far training had come at the newest checkpoint whose record can be read.

        The arrays are not looked at. None where there is no such checkpoint.
        """
        if not self.steps():
            return None
        with ocp.training.Checkpointer(self.directory) as checkpointer:
            for step in reversed(self.steps()):
                # What a damaged file raises may be anything; `restore` will say so.
                with contextlib.suppress(Exception):
                    return _record(checkpointer, step)["progress"]
        return None

    def delete_after(self, step: int) -> None:
        """Removes checkpoints later than `step`: damaged ones that were passed over."""

        def delete():
            for later in self.steps():
                if later > step:
                    (self.directory / str(later)).rmtree()

        distributed.in_first(delete)


class _OtherModel(Exception):
    pass


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """One 32-bit number for each array, the same however it is sharded.

    The sum over all elements of bits times an odd number that depends on the position,
    modulo 2^32: any single changed element changes it.
    """
    return {name: int(value) for name, value in _checksums(dict(arrays)).items()}


@jax.jit
def _checksums(arrays):
    def checksum(array):
        if array.dtype == jnp.bool_:
            array = array.astype(jnp.uint8)
        width = jnp.dtype(array.dtype).itemsize * 8
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
        # By axes, so that each device makes its own part.
        position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            position += place * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, arrays)


def fingerprint(*parts: CSR | jax.Array | np.ndarray) -> str:
    """A hash of the contents of matrices and arrays: the same data, the same string.

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
        else:
            add(part)
    return digest.hexdigest()


def _arrays(state) -> dict[str, jax.Array]:
    """Leaves by path; typed random keys as the integers they are made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in leaves}


def _plain(leaf):
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _load(checkpointer, step, modules, record) -> dict[str, jax.Array]:
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in _arrays(nnx.state(modules)).items()
    }
    shapes = {name: tuple(shape) for name, shape in record["shapes"].items()}
    for name in sorted({*abstract, *shapes}):
        if name not in shapes or name not in abstract:
            where = "the checkpoint" if name not in shapes else "this model"
            raise _OtherModel(
                f"made with another model or optimizer: {where} has no {name}"
            )
        if shapes[name] != abstract[name].shape:
            raise _OtherModel(
                f"made with another model: {name} has shape {shapes[name]} there and "
                f"{abstract[name].shape} here"
            )
    arrays = checkpointer.load(step, abstract)
    if checksums(arrays) != record["checksums"]:
        raise ValueError("its checksum does not match")
    return arrays


def _set_arrays(modules, arrays) -> None:
    state = nnx.state(modules)

    def restored(path, leaf):
        array = arrays[jax.tree_util.keystr(path)]
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return array

    pure = jax.tree_util.tree_map_with_path(restored, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(modules, state)


def _record(checkpointer, step) -> dict[str, Any]:
    return json.loads(checkpointer.metadata(step).custom_metadata["record"])


def _score(checkpointer, step) -> float:
    try:
        return _record(checkpointer, step).get("score", -float("inf"))
    except Exception:  # noqa: BLE001 - damaged; `restore` will say so
        return -float("inf")
