"""Copies rows between host memory and device memory, through reused pinned buffers.

A GPU copies from and to *pinned* memory at the speed of its bus, and several times
slower from and to other memory. So several threads gather rows into pinned memory, which is
kept: filling a new array would take longer, since its pages have to be mapped.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import DTypeLike

from sparsejax.mesh.layout import default_device, mesh_is_set

_PINNED = "pinned_host"
# Buffers are kept for at most this many shapes.
_MOST_KEPT = 8
# With fewer rows, another thread is not worth its start.
_FEW = 512


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_count(), "sparsejax-rows")


@functools.cache
def beside(name: str) -> concurrent.futures.ThreadPoolExecutor:
    """A thread pool with one thread, beside the caller's; its work may use `in_parts`."""
    return concurrent.futures.ThreadPoolExecutor(1, f"sparsejax-{name}")


def _count() -> int:
    return max(1, min(16, os.cpu_count() or 1))


def in_parts(count: int, work: Callable[[slice], None]) -> None:
    """Calls `work` on slices of `count` rows in several threads; NumPy copies without the GIL."""
    parts = min(_count(), -(-count // _FEW))
    if parts <= 1:
        work(slice(0, count))
        return
    ends = [count * i // parts for i in range(parts + 1)]
    list(_threads().map(work, map(slice, ends[:-1], ends[1:])))


def reserved(
    shape: Sequence[int], dtype: DTypeLike, folder: str | os.PathLike[str] | None
) -> np.ndarray:
    """An array of zeros, in memory or in a file of a folder.

    The file has no name: its disk space is free again when the array is deleted or the process
    ends, in whatever way.

    Raises:
      OSError: the folder does not exist, or the disk is full.
    """
    if folder is None:
        return np.zeros(shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Disk space is allocated now: on a full disk, a later write to the mapping would kill
            # the process.
            os.posix_fallocate(file.fileno(), 0, size)
            whole = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OSError(
            error.errno,
            f"rows of a table need {size:,} bytes in the folder host_path={folder!r}: "
            f"{error.strerror}; give a folder of a local disk with so much room",
        ) from None
    return np.frombuffer(whole, dtype).reshape(shape)


class Buffer:
    """Rows that are copied to the devices.

    Attributes:
      parts: an array `[room, ...]` for each device along "model".
    """

    def __init__(self, devices: int, shape: Sequence[int], dtype: DTypeLike):
        self._sent: jax.Array | None = None
        self._pinned: list[jax.Array] = []
        size = (devices * shape[0], *shape[1:])
        if not _pins():
            self._whole = np.empty(size, dtype)
            self.parts = np.split(self._whole, devices)
            return
        self._devices = _devices()
        for device in self._devices.reshape(-1):
            lies = SingleDeviceSharding(device, memory_kind=_PINNED)
            self._pinned.append(jax.device_put(np.zeros(shape, dtype), lies))
        jax.block_until_ready(self._pinned)
        self._views = [_view(array) for array in self._pinned]
        self.parts = self._views[:devices]

    def wait(self) -> None:
        """Waits until the copies are done, so that the buffer can be written again."""
        if self._sent is not None and not self._sent.is_deleted():
            self._sent.block_until_ready()
        self._sent = None

    def sent(self) -> jax.Array:
        """Starts the copies; returns `[devices * room, ...]`. Do not write the parts meanwhile."""
        if not self._pinned:
            return by_device(self._whole)
        for place, view in enumerate(self._views[len(self.parts) :]):
            view[...] = self.parts[place % len(self.parts)]
        there = [
            jax.device_put(array, SingleDeviceSharding(device))
            for array, device in zip(
                self._pinned, self._devices.reshape(-1), strict=True
            )
        ]
        if not mesh_is_set():
            self._sent = there[0]
        else:
            room, *rest = self.parts[0].shape
            self._sent = jax.make_array_from_single_device_arrays(
                (len(self.parts) * room, *rest),
                NamedSharding(jax.sharding.get_mesh(), P("model")),
                there,
            )
        return self._sent


class Buffers:
    """A pool of pinned host buffers."""

    def __init__(self) -> None:
        self._kept: dict[tuple, tuple[Buffer, Buffer]] = {}

    def everywhere(self, name: str, array: np.ndarray) -> jax.Array:
        """Copies the whole array to each device."""
        if mesh_is_set():
            lies = NamedSharding(jax.sharding.get_mesh(), P())
            return jax.device_put(array, lies)
        buffer = self.one(name, 1, array.shape, array.dtype)
        buffer.parts[0][...] = array
        return buffer.sent()

    def one(
        self, name: str, devices: int, shape: Sequence[int], dtype: DTypeLike
    ) -> Buffer:
        """Takes a buffer of this name, shape and dtype, with a part for each of `devices`.

        Waits until its last transfer to the devices has ended, so that it may be written.
        """
        # A CPU device may use the array's memory itself, so the buffer must not be reused.
        if not _pins():
            return Buffer(devices, shape, dtype)
        key = name, devices, tuple(shape), str(dtype)
        one, other = self._kept.pop(key, None) or (
            Buffer(devices, shape, dtype),
            Buffer(devices, shape, dtype),
        )
        self._kept[key] = other, one
        if len(self._kept) > _MOST_KEPT:  # removes the least recently used buffers
            del self._kept[next(iter(self._kept))]
        one.wait()
        return one


def by_device(array: np.ndarray) -> jax.Array:
    """An array on the devices, with one part for each device along "model"."""
    if not mesh_is_set():
        return jax.numpy.asarray(array)
    return jax.device_put(array, NamedSharding(jax.sharding.get_mesh(), P("model")))


def leaving(array: jax.Array) -> jax.Array:
    """Starts to copy an array to the host."""
    if not _pins():
        array.copy_to_host_async()
        return array
    if not mesh_is_set():
        (device,) = array.devices()
        return jax.device_put(array, SingleDeviceSharding(device, memory_kind=_PINNED))
    lies = NamedSharding(jax.sharding.get_mesh(), P("model"), memory_kind=_PINNED)
    return jax.device_put(array, lies)


def arrived(array: jax.Array) -> list[np.ndarray]:
    """Waits for the copies that `leaving` started; returns one for each device along "model"."""
    parts = {s.index[0].start or 0: s.data for s in array.addressable_shards}
    return [np.asarray(parts[start]) for start in sorted(parts)]


def _devices() -> np.ndarray:
    """The devices as an array `[data, model]`."""
    if mesh_is_set():
        return jax.sharding.get_mesh().devices
    return np.array([default_device()])


@functools.cache
def _pins() -> bool:
    """Whether the devices support pinned host memory separate from their own memory."""
    kinds = {memory.kind for memory in default_device().addressable_memories()}
    return jax.default_backend() == "gpu" and _PINNED in kinds


def _view(array: jax.Array) -> np.ndarray:
    """A NumPy view of an array in pinned memory."""
    where = (ctypes.c_byte * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(where, array.dtype).reshape(array.shape)
