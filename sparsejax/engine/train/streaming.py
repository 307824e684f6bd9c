"""Training data on disk. One chunk at a time is on the devices.

While one chunk is trained on, the next is read and copied to the devices. Inside a chunk the order
is as in `sparsejax.engine.train.resident`, except that a shard is a range of consecutive rows of
the file. So a process reads only the rows that its devices train on.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sparsejax.engine.batching import bucket, on_device
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.resident import (
    Resident,
    TrainingTask,
    checked_weights,
    first_row,
)
from sparsejax.mesh.blocks import ShardedCSR, parts_of_process
from sparsejax.mesh.layout import VIRTUAL_SHARDS, current_mesh, device_memory, put_rows
from sparsejax.sparse import CSR

# Data that takes at most the first fraction of the devices' memory is read once, as one chunk.
# Otherwise a chunk takes the second fraction, and two chunks are in memory at a time.
_SHARE, _CHUNK_SHARE = 1 / 4, 1 / 8


Matrix = CSR | np.ndarray


@runtime_checkable
class OnDisk(Protocol):
    """Data on disk that is read in chunks."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> int | None:
        """Number of rows that a chunk should have, or None if any number is possible."""
        ...

    def fingerprint(self) -> str:
        """A hash of the metadata of the files."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Scanned:
    """Rows on disk, and the task that is trained on them.

    Attributes:
      sources: data sources on disk with equally many rows, which are matched by position.
      roles: task with the roles of the matrices.
      read: function that reads and checks the rows `start .. stop - 1` of each matrix, as NumPy
          arrays.
      num_bytes: bytes of memory that all rows would take.
      ends: function that returns the end of each chunk, given the desired number of rows in a
          chunk.
    """

    sources: Sequence[OnDisk]
    roles: TrainingTask
    read: Callable[[int, int], Sequence[Matrix]]
    num_bytes: int
    ends: Callable[[int], Sequence[int]]

    @property
    def num_rows(self) -> int:
        return self.sources[0].num_rows

    def fingerprint(self) -> str:
        """A hash of the metadata of the files."""
        return "-".join(source.fingerprint() for source in self.sources)


class Stream:
    """Examples on disk, for `fit`.

    Attributes:
      chunks: number of rows in each chunk.
      chunk_rows: number of rows that a chunk should have.
    """

    def __init__(self, rows: Scanned, weights: ArrayLike | None):
        self._rows, self.num_rows = rows, rows.num_rows
        if self.num_rows == 0:
            raise ValueError("inputs has no rows")
        self._weights = checked_weights(weights, self.num_rows)
        # Stored now, because the thread that reads chunks has no mesh set.
        self._mesh = current_mesh()
        self._device = jax.config.jax_default_device
        self.chunk_rows = rows.sources[0].chunk_rows or self._rows_that_fit()
        self._ends = [0, *rows.ends(self.chunk_rows)]
        self.chunks = np.diff(self._ends).tolist()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "sparsejax-reader")
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self._here: tuple[int, Resident] | None = None

    def order(self, seed: int, epoch: int) -> list[int]:
        """The chunk numbers, in the order of an epoch."""
        rng = np.random.default_rng((seed, epoch))
        return rng.permutation(len(self.chunks)).tolist()

    def on_device(self, chunk: int, following: int | None) -> Resident:
        """Waits for the data of a chunk and returns it on the devices.

        The chunk `following` is read next.
        """
        if self._here is None or self._here[0] != chunk:
            self._here = None  # frees the memory of the last chunk
            ahead = self._ahead.pop(chunk, None)
            done = self._prepare(chunk) if ahead is None else ahead.result()
            placed = done if isinstance(done, Resident) else self._place(chunk, done)
            self._here = chunk, placed
        if following is not None and following not in (chunk, *self._ahead):
            self._ahead[following] = self._thread.submit(self._prepare, following)
        return self._here[1]

    def close(self) -> None:
        """Stops the reading thread."""
        self._thread.shutdown(cancel_futures=True)

    def fingerprint(self) -> str:
        """A hash of the metadata of the files."""
        weights = [] if self._weights is None else [self._weights]
        return f"{self._rows.fingerprint()}-{fingerprint(*weights)}"

    def _prepare(self, chunk: int) -> Resident | list[dict[int, Matrix]]:
        """Reads a chunk and copies it to the devices. With several processes it only reads its
        part, as they must copy together.
        """
        parts = self.read(chunk)
        if jax.process_count() > 1:
            return parts
        with jax.default_device(self._device):
            return self._place(chunk, parts)

    def read(self, chunk: int) -> list[dict[int, Matrix]]:
        """Reads a chunk: for each matrix, the parts that this process trains on, by number.

        A sparse matrix that is replicated over a mesh is a single part, number 0.
        """
        start, rows = self._ends[chunk], self.chunks[chunk]
        ends, mine = [0, rows], [0]
        if self._mesh is not None:
            ends = _part_ends(rows, self._mesh.shape["data"])
            mine = parts_of_process(self._mesh)
            if self._rows.roles.whole:
                return [
                    {0: matrix}
                    if isinstance(matrix, CSR)
                    else {part: matrix[ends[part] : ends[part + 1]] for part in mine}
                    for matrix in self._rows.read(start, start + rows)
                ]
        read = [
            self._rows.read(start + ends[part], start + ends[part + 1]) for part in mine
        ]
        return [
            dict(zip(mine, parts, strict=True)) for parts in zip(*read, strict=True)
        ]

    def _place(self, chunk: int, parts: list[dict[int, Matrix]]) -> Resident:
        start, rows = self._ends[chunk], self.chunks[chunk]
        roles, weights = self._rows.roles, self._weights
        if weights is not None:
            weights = weights[start : start + rows]
        if self._mesh is None:
            matrices = tuple(
                on_device(x) if isinstance(x, CSR) else jnp.asarray(_with_one(x)[None])
                for x in (mine[0] for mine in parts)
            )
            if weights is not None:
                weights = jnp.asarray(weights)[None]
            return Resident(matrices, weights, rows, contiguous=True, roles=roles)
        ends = _part_ends(rows, self._mesh.shape["data"])
        room = int(np.diff(ends).max())
        placed = tuple(self._over_mesh(mine, room) for mine in parts)
        if weights is not None:
            each = [weights[a:b] for a, b in itertools.pairwise(ends)]
            padded = np.stack([np.pad(w, (0, room - len(w))) for w in each])
            weights = put_rows(padded, self._mesh)
        return Resident(placed, weights, rows, contiguous=True, roles=roles)

    def _over_mesh(
        self, parts: Mapping[int, Matrix], room: int
    ) -> ShardedCSR | CSR | jax.Array:
        """Combines parts of at most `room` rows to a matrix on the mesh."""
        assert self._mesh is not None
        some = next(iter(parts.values()))
        if isinstance(some, CSR):
            matrices = {p: x for p, x in parts.items() if isinstance(x, CSR)}
            if self._rows.roles.whole:
                # The sharding names the mesh, because the reading thread has none set.
                everywhere = NamedSharding(self._mesh, P())
                return jax.device_put(on_device(some), everywhere)
            # Capacities are rounded, so that one program serves all chunks.
            return ShardedCSR.from_parts(matrices, room, self._mesh, nse=bucket)
        shape = (self._mesh.shape["data"], room + 1, *some.shape[1:])

        def block(index):
            mine = np.asarray(parts[index[0].start or 0])
            padded = np.zeros(shape[1:], some.dtype)
            padded[: len(mine)] = mine
            return padded[None]

        return jax.make_array_from_callback(
            shape, NamedSharding(self._mesh, P("data")), block
        )

    def _rows_that_fit(self) -> int:
        """Number of rows of a chunk that fit in the memory of the devices."""
        limit = device_memory()
        if limit is None:
            return self.num_rows
        needed = self._rows.num_bytes
        room = limit * (1 if self._mesh is None else self._mesh.size)
        if needed <= _SHARE * room:
            return self.num_rows
        return max(1, int(self.num_rows * _CHUNK_SHARE * room / needed))


def _with_one(array: np.ndarray) -> np.ndarray:
    """The array with its first row appended."""
    return np.append(array, array[:1], axis=0)


def _part_ends(rows: int, data: int) -> list[int]:
    """The ends of `data` parts of a chunk's rows, starting with 0."""
    shards = np.arange(0, VIRTUAL_SHARDS + 1, VIRTUAL_SHARDS // data)
    return first_row(shards, rows).tolist()
