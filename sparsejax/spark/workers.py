"""Runs functions on Spark's workers: checks of versions and results, and clear errors."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa

import sparsejax
from sparsejax.data.files.opening import DataError

# A line of Spark's message with the error of a task: a Python exception's name and text.
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w+Error): (.+)$", re.MULTILINE)
_OURS = {"DataError": DataError, "FileExistsError": FileExistsError}

_TYPES = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.bool_(): "boolean",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
}


@dataclasses.dataclass(frozen=True)
class WorkerTask:
    """A function for `mapInArrow` that checks the schema of the batches that it yields.

    Spark's own error for a batch of a wrong type does not name the difference.

    Attributes:
      function: function from batches to batches. It and its attributes are pickled; a
        worker imports the modules of sparsejax.
      schema: schema of the batches that the function yields.
    """

    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in self.function(batches):
            if not batch.schema.equals(self.schema):
                name = getattr(self.function, "__name__", type(self.function).__name__)
                raise TypeError(
                    f"{name} is to yield batches with "
                    f"{_described(self.schema)}, but one has {_described(batch.schema)}"
                )
            yield batch


def map_batches(
    frame: Any,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
    *,
    barrier: bool = False,
    profile: Any = None,
) -> Any:
    """`frame.mapInArrow`, with a check of the batches that the function yields.

    Args:
      frame: a data frame of Spark.
      function: function from batches to batches, as in `WorkerTask`.
      schema: schema of the batches that the function yields.
      barrier: whether Spark starts all tasks at the same time, in a barrier stage.
      profile: resource profile of Spark for each task; None for the settings of the
        session.
    """
    return frame.mapInArrow(
        WorkerTask(function, schema), spark_schema(schema), barrier, profile
    )


def spark_schema(schema: pa.Schema) -> str:
    """The schema as Spark's DDL: names and types of the columns."""
    return ", ".join(f"`{field.name}` {spark_type(field.type)}" for field in schema)


def spark_type(type_: pa.DataType) -> str:
    """The name of the type in Spark SQL."""
    if pa.types.is_list(type_):
        return f"array<{spark_type(type_.value_type)}>"
    return _TYPES[type_]


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def spark_errors() -> tuple[type[Exception], ...]:
    """The exception classes that Spark raises when a job fails."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    # Without Spark Connect, some errors of Java are a Py4JJavaError, because pyspark has no class
    # for them: for example the loss of too many executors.
    return PySparkException, Py4JJavaError


def check_workers(session: Any) -> None:
    """Checks that workers have the driver's versions of Python and sparsejax.

    Raises:
      RuntimeError: a worker has another version, or lacks sparsejax. The message has both
        versions.
    """
    ours = _versions()
    remedy = (
        "install the same versions on all machines of the cluster, or name the Python "
        "that has them by PYSPARK_PYTHON in the environment of the driver before the "
        "session starts"
    )
    mine = ", ".join(f"{name} {version}" for name, version in ours.items())
    schema = pa.schema(dict.fromkeys(ours, pa.string()))
    try:
        found = map_batches(session.range(0, 64), _tell, schema).collect()
    except spark_errors() as error:
        text = str(error)
        if "PYTHON_VERSION_MISMATCH" in text or "different version in worker" in text:
            problem = "have another minor version of Python"
        elif "No module named" in text or "Can't get attribute" in text:
            problem = "cannot import this version of sparsejax"
        else:
            raise
        raise RuntimeError(
            f"Spark's workers {problem}. The driver has {mine}: {remedy}"
        ) from error
    for row in found:
        theirs = row.asDict()
        if theirs != ours:
            listed = ", ".join(f"{name} {version}" for name, version in theirs.items())
            raise RuntimeError(
                f"the driver has {mine}, but a worker has {listed}: {remedy}"
            )


def _versions() -> dict[str, str]:
    minor = ".".join(platform.python_version_tuple()[:2])
    return {"python": minor, "sparsejax": sparsejax.__version__}


def _tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.record_batch({name: [value] for name, value in _versions().items()})


@contextlib.contextmanager
def clear_errors(what: str) -> Generator[None]:
    """While this context is open, errors of Spark are raised again with a clear message.

    An error that sparsejax raised in a task is raised again with its own message.

    Args:
      what: name of Spark's work, for messages.

    Raises:
      DataError: a task raised a `DataError`.
      RuntimeError: Spark lost an executor, and the input is another one when computed again.
    """
    try:
        yield
    except spark_errors() as error:
        text = str(error)
        if "rollback" in text or "indeterminate" in text.lower():
            raise RuntimeError(
                f"{what} lost an executor, and Spark cannot compute the input again: it "
                "would be another one. Plans with limit, sample or repartition(n) are "
                "such. Write the frame to a table first and give that, or set "
                "spark.checkpoint.dir to a folder that all machines share"
            ) from error
        for name, message in _RAISED.findall(text):
            if name in _OURS:
                raise _OURS[name](message) from error
        raise
