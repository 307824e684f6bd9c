"""Helpers for all Spark jobs: paths for workers, resource profiles, and errors in one line."""

from __future__ import annotations

import os
import re
from typing import Any

from sparsejax.data.files.opening import Path, is_address
from sparsejax.spark import workers

_TRACEBACK = "Traceback (most recent call last):"
_CALLING = "An error occurred while calling "


class JobError(RuntimeError):
    """A job of Spark has failed. The message is the most informative line of Spark's message."""


def collected(frame: Any) -> list[Any]:
    """Computes a data frame and returns its rows.

    Raises:
      JobError: the job has failed.
    """
    try:
        return frame.collect()
    except workers.spark_errors() as error:
        raise JobError(_first_line(str(error))) from error


def one_task_a_device(session: Any) -> Any:
    """A resource profile with which an executor runs one task at a time, or one for each GPU.

    Each task is a process with a copy of the model, so several would share one device. The
    result is None if the settings of the session have this effect already, or if there are no
    executors.
    """
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    def number(name: str) -> int:
        return int(session.conf.get(name, "0") or 0)

    gpus, cores = (
        number("spark.executor.resource.gpu.amount"),
        number("spark.executor.cores"),
    )
    cpus = max(1, cores // max(1, gpus))
    is_local = re.match(r"local(\[|$)", session.conf.get("spark.master", "local") or "")
    if is_local or (not gpus and cpus <= max(1, number("spark.task.cpus"))):
        return None
    wanted = TaskResourceRequests().cpus(cpus)
    if gpus:
        wanted = wanted.resource("gpu", 1)
    return ResourceProfileBuilder().require(wanted).build


def absolute(path: Path) -> str:
    """An absolute path, because workers run in other folders; an address stays as it is."""
    return os.fspath(path) if is_address(path) else os.path.abspath(path)


def _first_line(said: str) -> str:
    """The error line of a Python worker; if there is none, the first line of Spark's message."""
    _, is_python, rest = said.partition(_TRACEBACK)
    if said.startswith(_CALLING):  # Java's error follows this line
        said = said.partition("\n: ")[2] or said
    lines = (rest if is_python else said).split("\n")
    plain = [line for line in lines if line.strip() and not line[0].isspace()]
    return plain[0].strip() if plain else said.strip()
