"""The command `predict --parts`. It imports no models, so a task starts a second sooner."""

from __future__ import annotations

import sys

from sparsejax.cli import flags
from sparsejax.data.files.opening import shown
from sparsejax.options.reading import Reading
from sparsejax.predictors.parts import Parts
from sparsejax.predictors.workers import write_parts


def predict(command: flags.Predict) -> None:
    """`sparsejax predict --parts`."""
    count = command.parts
    assert count is not None
    useless = {"users", "exclude", "exclude_items", "only_items", "context", "requests"}
    if wrong := sorted(command.given & (useless | flags.SecondStage.option_names())):
        name = command.spelled(wrong[0])
        raise ValueError(f"{name} does not go with --parts: leave it out")
    columns = Reading.option_names() - {"indicator"}
    if command.given & columns:
        raise ValueError(
            "--parts takes a folder that prepare wrote: leave out --format and the flags "
            "that name columns"
        )
    if command.part is not None and command.finish:
        raise ValueError("--part writes one part, --finish the manifest: leave one out")
    if command.workers is not None and (command.part is not None or command.finish):
        raise ValueError("--workers makes all parts: leave out --part and --finish")
    if command.as_type(flags.Devices) != flags.Devices():
        raise ValueError(
            "a part is made on one device: leave out --mesh, and give --workers instead"
        )
    parts = Parts.of(
        command.run,
        command.inputs,
        command.out,
        count=count,
        k=command.k,
        exclude_seen=command.exclude_seen,
        indicator=command.indicator,
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
