"""Training data that stays on disk; one chunk at a time is on the devices.

While one chunk is trained on, the next is read and copied to the devices. Within a chunk
the order is that of `sparsejax.training.resident`, except that the rows of a shard follow
each other in the file. So a process reads only the rows that its devices train on.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sparsejax.data import ScannedDataset
from sparsejax.data.batching import bucket, on_device
from sparsejax.mesh.blocks import ShardedCSR, parts_of_process
from sparsejax.mesh.layout import VIRTUAL_SHARDS, device_memory, mesh_is_set, put_rows
from sparsejax.sparse import CSR
from sparsejax.training.checkpoint import fingerprint
from sparsejax.training.resident import Resident, checked_weights, first_row

# Data that takes at most the first share of the devices' memory is read once. Otherwise a
# chunk takes the second share, and two chunks are there at a time.
_SHARE, _CHUNK_SHARE = 1 / 4, 1 / 8


class Stream:
    """What `fit` trains on, from disk.

    Attributes:
      chunks: number of rows of each chunk.
      chunk_rows: number of rows that a chunk should have.
    """

    def __init__(
        self,
        inputs: ScannedDataset,
        targets: ScannedDataset | None,
        weights: ArrayLike | None,
        check: Callable[[CSR], None] = lambda labels: None,
    ):
        """`check` is called with the labels when they are read."""
        self._check = check
        self._sources = [inputs] if targets is None else [inputs, targets]
        if targets is not None and targets.num_rows != inputs.num_rows:
            raise ValueError(
                f"targets has {targets.num_rows:,} rows but inputs has "
                f"{inputs.num_rows:,}; scanned rows are matched by position"
            )
        if inputs.num_rows == 0:
            raise ValueError("inputs has no rows")
        self._weights = checked_weights(weights, inputs.num_rows)
        # Kept, because the thread that reads does not see what this one has set.
        self._mesh = jax.sharding.get_mesh() if mesh_is_set() else None
        self._device = jax.config.jax_default_device
        self.chunk_rows = inputs.chunk_rows or self._rows_that_fit()
        self._ends = [0]
        for end in itertools.accumulate(group.rows for group in inputs.groups):
            if end - self._ends[-1] >= self.chunk_rows or end == inputs.num_rows:
                self._ends.append(end)
        self.chunks = np.diff(self._ends).tolist()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "sparsejax-reader")
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self._here: tuple[int, Resident] | None = None

    @property
    def num_rows(self) -> int:
        return self._sources[0].num_rows

    def order(self, seed: int, epoch: int) -> list[int]:
        """The chunks in the order of an epoch."""
        rng = np.random.default_rng((seed, epoch))
        return rng.permutation(len(self.chunks)).tolist()

    def resident(self, chunk: int, following: int | None) -> Resident:
        """The data of a chunk on the devices, once read; `following` comes next."""
        if self._here is None or self._here[0] != chunk:
            self._here = None  # frees its memory
            ahead = self._ahead.pop(chunk, None)
            done = self._prepare(chunk) if ahead is None else ahead.result()
            placed = done if isinstance(done, Resident) else self._place(chunk, done)
            self._here = chunk, placed
        if following is not None and following not in (chunk, *self._ahead):
            self._ahead[following] = self._thread.submit(self._prepare, following)
        return self._here[1]

    def close(self) -> None:
        """Ends the thread that reads."""
        self._thread.shutdown(cancel_futures=True)

    def fingerprint(self) -> str:
        """A hash of what the files say of themselves."""
        weights = [] if self._weights is None else [self._weights]
        parts = [source.fingerprint() for source in self._sources]
        return "-".join([*parts, fingerprint(*weights)])

    def _prepare(self, chunk: int) -> Resident | list[dict[int, CSR]]:
        """Reads a chunk, and places it unless several processes must do that together."""
        parts = self.read(chunk)
        if jax.process_count() > 1:
            return parts
        with jax.default_device(self._device):
            return self._place(chunk, parts)

    def read(self, chunk: int) -> list[dict[int, CSR]]:
        """For each source, the parts of the chunk that this process trains on."""
        start, rows = self._ends[chunk], self.chunks[chunk]
        ends, mine = [0, rows], [0]
        if self._mesh is not None:
            ends = _part_ends(rows, self._mesh.shape["data"])
            mine = parts_of_process(self._mesh)
        parts = [
            {
                part: source.read(start + ends[part], start + ends[part + 1])
                for part in mine
            }
            for source in self._sources
        ]
        for labels in parts[-1].values():
            self._check(labels)
        return parts

    def _place(self, chunk: int, parts: list[dict[int, CSR]]) -> Resident:
        start, rows = self._ends[chunk], self.chunks[chunk]
        weights = self._weights
        if weights is not None:
            weights = weights[start : start + rows]
        if self._mesh is None:
            matrices = tuple(on_device(mine[0]) for mine in parts)
            if weights is not None:
                weights = jnp.asarray(weights)[None]
            return Resident(matrices, weights, rows, contiguous=True)
        ends = _part_ends(rows, self._mesh.shape["data"])
        room = int(np.diff(ends).max())
        # Rounded, so that one program serves all chunks.
        blocks = tuple(
            ShardedCSR.from_parts(mine, room, self._mesh, nse=bucket) for mine in parts
        )
        if weights is not None:
            each = [weights[a:b] for a, b in itertools.pairwise(ends)]
            padded = np.stack([np.pad(w, (0, room - len(w))) for w in each])
            weights = put_rows(padded, self._mesh)
        return Resident(blocks, weights, rows, contiguous=True)

    def _rows_that_fit(self) -> int:
        """Rows of a chunk, by the memory of the devices."""
        limit = device_memory()
        if limit is None:
            return self.num_rows
        needed = sum(
            source.num_entries * (4 if source.indicator else 8)
            for source in self._sources
        )
        room = limit * (1 if self._mesh is None else self._mesh.size)
        if needed <= _SHARE * room:
            return self.num_rows
        return max(1, int(self.num_rows * _CHUNK_SHARE * room / needed))


def _part_ends(rows: int, data: int) -> list[int]:
    """Where each of `data` parts of the rows of a chunk ends; begins with 0."""
    shards = np.arange(0, VIRTUAL_SHARDS + 1, VIRTUAL_SHARDS // data)
    return first_row(shards, rows).tolist()
