"""CSV and TSV files with a (user, item) pair on each line, perhaps with value and time."""

from __future__ import annotations

from collections.abc import Iterator

from sparsejax.data.events.block import Block, Check
from sparsejax.data.events.pair_layout import Layout
from sparsejax.data.events.records import MAX_RECORD_BYTES, record_cells
from sparsejax.data.files.opening import BLOCK_BYTES, ByteStream, Path


def pair_blocks(
    stream: ByteStream,
    path: Path,
    layout: Layout,
    *,
    block_bytes: int = BLOCK_BYTES,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Block]:
    """Parses the pairs of a file in blocks.

    Args:
      stream: the file, opened.
      path: the file that messages name.
      layout: how to read it.
      block_bytes: see `record_blocks`.
      max_record_bytes: see `record_blocks`.

    Raises:
      DataError: a record is wrong; the message has the line of the first one.
    """
    cells = record_cells(
        stream,
        path,
        layout,
        layout.places,
        ("user", "item"),
        block_bytes=block_bytes,
        max_record_bytes=max_record_bytes,
    )
    return Check(layout.columns, encoded=False).blocks(cells)
