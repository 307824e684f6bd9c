"""Batch prediction by the tasks of a Spark job, each of which writes some parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from sparsejax import codec
from sparsejax.data.files.opening import Path, shown
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.predictors.parts import Parts
from sparsejax.spark import jobs, scoring, workers

_RESULT = pa.schema({"part": pa.int64(), "written": pa.bool_(), "problem": pa.string()})


def predict(
    session: Any,
    predictor: Path,
    data: Path,
    out: Path,
    *,
    k: int,
    parts: int | None = None,
    exclude_seen: bool = True,
    indicator: bool = False,
) -> int:
    """Writes recommendations for the rows of a prepared folder, in parts, by tasks of Spark.

    ::

        sj.spark.predict(session, "s3://bucket/model.predictor", "s3://bucket/shop",
                         "s3://bucket/recommendations", k=10)

    A part is a file that appears whole, and is not written again. So Spark may repeat a task,
    or run it twice. If this program is killed, repeat the call: existing parts are kept. A
    manifest is written at the end. The files and their names are equal to those that
    `sparsejax predict --parts` writes with equal settings and an equal number of parts.

    An executor runs one task at a time, or one for each of its GPUs, if the settings
    `spark.executor.cores` and `spark.executor.resource.gpu.amount` state their numbers.

    Args:
      session: the session of Spark, also one of Spark Connect.
      predictor: a file of `export_predictor` that all workers can read, or its address.
      data: a folder that `prepare` wrote, or its address.
      out: a folder that all workers can write to, or an address.
      k: number of items recommended for each row.
      parts: number of parts; the default is the number of row groups of the data, each of
        which has about 2^20 entries.
      exclude_seen: whether items that a row already has are not recommended to it.
      indicator: ignore values, as in the training of the model.

    Returns:
      The number of parts that this call has written; other parts existed before.

    Raises:
      DataError: `data` is no prepared folder.
      JobError: a task failed more often than Spark repeats it.
      RuntimeError: workers have another version of Python or sparsejax.
      ValueError: an argument is wrong; predictor, data and `out` do not match each other; or
        a file of the data is damaged.
    """
    prediction = Parts.of(
        jobs.absolute(predictor),
        jobs.absolute(data),
        jobs.absolute(out),
        count=_number_of_groups(data) if parts is None else parts,
        k=k,
        exclude_seen=exclude_seen,
        indicator=indicator,
    )
    workers.check_workers(session)
    count = prediction.count
    task = functools.partial(
        _write, arguments=codec.text(prediction.arguments), identity=prediction.identity
    )
    results = workers.map_batches(
        session.range(0, count, 1, count),
        task,
        _RESULT,
        profile=jobs.one_task_a_device(session),
    )
    written = 0
    for row in jobs.collected(results):
        if row["problem"] is not None:
            raise ValueError(row["problem"])
        written += row["written"]
    prediction.finish()
    return written


def _number_of_groups(data: Path) -> int:
    folder = DataFolder.find(data)
    return 1 if folder is None else max(1, len(folder.groups()))


def _write(
    batches: Iterator[pa.RecordBatch], *, arguments: str, identity: str
) -> Iterator[pa.RecordBatch]:
    """Function of a task: writes the parts with the given numbers, yields a row for each."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            written, problem = False, None
            try:
                parts = _parts(arguments, identity)
                path, content = parts.arguments["predictor"], parts.predictor
                load = functools.partial(scoring.predictor_here, path, content)
                written = parts.write(number, load)
            except ValueError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # the disk or the store has failed: Spark repeats the task
                problem = str(error)  # a repeated task would fail again
            result = {"part": number, "written": written, "problem": problem}
            yield pa.RecordBatch.from_pylist([result], schema=_RESULT)


@functools.lru_cache(maxsize=1)
def _parts(arguments: str, identity: str) -> Parts:
    """Opens the prediction in a worker. The cache lets each process read the manifest only once.

    The driver's object is not sent: its file systems may hold credentials.
    """
    parts = Parts.of(**codec.parse(arguments))
    if parts.identity != identity:
        predictor, data = parts.arguments["predictor"], parts.arguments["data"]
        raise ValueError(
            f"a worker finds another {shown(predictor)} or {shown(data)} than the driver; "
            "let both be where all machines read the same files, and do not change them "
            "meanwhile"
        )
    return parts
