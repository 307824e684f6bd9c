"""DSSTNE's `generateNetCDF`: converts a text of samples to a NetCDF file."""

from __future__ import annotations

import dataclasses
import os

from sparsejax.data.files.opening import DataError
from sparsejax.dsstne.index_files import holes, index_text, read_index
from sparsejax.dsstne.netcdf import file_image
from sparsejax.dsstne.text import read_samples
from sparsejax.whole_files import check_writable, write_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """The command `generateNetCDF`. The attributes are named like its flags in `cli`.

    Attributes:
      dataset: name of the data set.
      text: a text file of samples, or a folder of them.
      out: the NetCDF file to write.
      features: the index file of features.
      samples: the index file of samples. New samples are added to it.
      create: whether to make a new index of features.
      merge: whether to add new features to the index. With neither flag, they are skipped.
      analog: whether entries have values.
    """

    dataset: str
    text: str
    out: str
    features: str
    samples: str
    create: bool = False
    merge: bool = False
    analog: bool = False


def generate(command: Generate) -> None:
    """Writes a text of samples as a NetCDF file, and the index files: all or none.

    If the process is killed while it renames the files, some are new and others old. Running
    it again writes the correct files.

    Raises:
      DataError: a file is missing or wrong.
      OSError: a file cannot be written.
      ValueError: both `create` and `merge` are given.
    """
    if command.create and command.merge:
        raise ValueError("-c makes a new index and -m adds to one: give one of them")
    for path in (command.out, command.features, command.samples):
        check_writable(path)
    known = () if command.create else read_index(command.features)
    old = read_index(command.samples) if os.path.exists(command.samples) else ()
    found = read_samples(
        command.text,
        features=known,
        samples=old,
        new_features=command.create or command.merge,
        analog=command.analog,
    )
    if not len(found.rows.indices):
        raise DataError.at(command.text, "no sample has a feature that can be written")
    dataset = found.dataset()
    files: list[tuple[str, str | memoryview]] = [
        (command.out, file_image({command.dataset: dataset}))
    ]
    if command.create or len(found.features) > len(known):
        files.append((command.features, index_text(found.features)))
    if len(found.samples) > len(old):
        files.append((command.samples, index_text(found.samples)))
    write_together(files)
    features = len(found.features) - len(holes(found.features))
    print(
        f"{command.out}: {command.dataset}, {dataset.num_examples:,} examples, "
        f"{features:,} features, width {dataset.columns:,}"
    )
