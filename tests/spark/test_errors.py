"""Errors of Spark are converted to errors of ours. These tests need no session."""

import pytest

import sparsejax as sj
from sparsejax.spark import jobs, workers

protocol = pytest.importorskip("py4j.protocol")

ABORTED = "Job aborted due to stage failure: "
ROLLBACK = (
    "A shuffle map stage with indeterminate output was failed and retried. However, Spark "
    "cannot rollback the ResultStage 3 to re-process the input data"
)
RECOVER = "Could not recover from a failed barrier ResultStage."


class JavaError(protocol.Py4JJavaError):
    """An error of Java for which pyspark has no class."""

    def __init__(self, said: str):
        self.said = said

    def __str__(self) -> str:
        return (
            "An error occurred while calling o54.collectToPython.\n"
            f": org.apache.spark.SparkException: {self.said}\n\tat org.apache.Some.java\n"
        )


class Frame:
    def __init__(self, error: Exception):
        self.error = error

    def collect(self) -> None:
        raise self.error


def test_errors_say_what_to_do():
    with (
        pytest.raises(RuntimeError, match="Write the frame to a table first"),
        workers.clear_errors("preparing"),
    ):
        raise JavaError(ABORTED + ROLLBACK)
    task = "Task 3 failed\nTraceback (most recent call last):\n  File x\n"
    with (
        pytest.raises(sj.DataError, match="^shop: is damaged$"),
        workers.clear_errors("preparing"),
    ):
        raise JavaError(
            f"{ABORTED}{task}sparsejax.data.files.opening.DataError: shop: is damaged"
        )


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ABORTED + RECOVER, f"org.apache.spark.SparkException: {ABORTED}{RECOVER}"),
        (
            "Traceback (most recent call last):\n  File x\nOSError: full",
            "OSError: full",
        ),
    ],
)
def test_the_message_of_a_job_is_a_line(said, line):
    with pytest.raises(jobs.JobError) as raised:
        jobs.collected(Frame(JavaError(said)))
    assert str(raised.value) == line
