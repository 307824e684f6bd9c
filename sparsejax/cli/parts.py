"""The command `predict --parts`. A task starts a second sooner without models' code."""

from __future__ import annotations

import sys

from sparsejax.cli import flags
from sparsejax.cli.reading import keeps_seen
from sparsejax.data.files.opening import shown
from sparsejax.predictors.parts import Parts
from sparsejax.predictors.workers import write_parts


def predict(command: flags.Predict) -> None:
    """`sparsejax predict --parts`."""
    count = command.parts
    assert count is not None
    if command.given & {"users", "exclude", "exclude_items", "only_items"}:
        raise ValueError(
            "--users, --exclude, --exclude-items and --only-items do not go with --parts"
        )
    no_value = command.columns.no_value
    if command.format is not None or command.columns != flags.Columns(
        no_value=no_value
    ):
        raise ValueError(
            "--parts takes a folder that prepare wrote: leave out --format and the flags "
            "that name columns"
        )
    if command.part is not None and command.finish:
        raise ValueError("--part writes one part, --finish the manifest: leave one out")
    if command.workers is not None and (command.part is not None or command.finish):
        raise ValueError("--workers makes all parts: leave out --part and --finish")
    if command.devices != flags.Devices():
        raise ValueError(
            "a part is made on one device: leave out --mesh, and give --workers instead"
        )
    parts = Parts.of(
        command.run,
        command.data,
        command.out,
        count=count,
        k=command.k,
        exclude_seen=not keeps_seen(command),
        indicator=no_value,
    )
    if command.finish:
        parts.finish()
        return
    if command.part is None:
        wanted, written = count, write_parts(parts, workers=command.workers)
    else:
        wanted, written = 1, parts.write(command.part, parts.load_predictor)
    print(
        f"{shown(command.out)}: wrote {written:,} parts, {wanted - written:,} were there",
        file=sys.stderr,
    )
    if command.part is None:
        parts.finish()
