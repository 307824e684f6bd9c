"""Trains a model by the tasks of a barrier stage, each of which runs `sparsejax train`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa

from sparsejax import codec
from sparsejax.data.files.opening import Path, is_address
from sparsejax.data.files.stores import Place
from sparsejax.mesh import locks
from sparsejax.spark import jobs, workers
from sparsejax.spark.child import Ended, run_command
from sparsejax.spark.run_copies import RunCopy

# Flags that `train` passes itself, so that a caller must not give them.
_OURS = (
    "--run",
    "--resume",
    "--distributed",
    "--coordinator",
    "--num-processes",
    "--process-id",
)
# Most seconds to wait for a process of an earlier submission that still uses the folder.
_ENDING_SECONDS = 60
_ERROR = "sparsejax: error: "
# Texts in the errors of processes that ended only because another process had ended.
_OF_OTHERS = ("another process was lost", "process 0 has failed")
_WRONG_USAGE = 2  # exit status
# Start of Spark's message if the cluster is too small or forbids barrier stages.
_NO_BARRIER = "Barrier execution mode does not"
_RESULT = pa.schema({"number": pa.int32(), "status": pa.int32(), "said": pa.string()})


def train(
    session: Any,
    data: Path,
    run: Path,
    *,
    processes: int,
    options: Sequence[str] = (),
    retries: int = 3,
) -> None:
    """Trains a model by `sparsejax train` in the tasks of one barrier stage.

    ::

        sj.spark.train(session, "s3://bucket/shop", "/shared/run", processes=2,
                       options=["--hidden", "256", "--epochs", "20"])

    Each task runs the command as a process of its own, with the GPUs that Spark has given to
    the task. The processes find each other and train one model. A process ends with its task.
    If one is lost, all end. Spark does not repeat a barrier stage that returns a result, so
    this function submits the stage again. The training then continues from its last
    checkpoint. Repeat the call after this program itself was killed.

    The run's folder must be shared by all hosts. If all processes are on one host, it may be
    an address in a store: each checkpoint is copied there when it is complete, and a later
    submission, on any host, continues from the copies. `fetch_run` copies them to a local
    folder.

    Args:
      session: the session of Spark, also one of Spark Connect.
      data: prepared folder to train on, or its address. All hosts must be able to read
        it.
      run: folder of the run, or an address.
      processes: number of tasks. The cluster must be able to run them at the same time.
      options: more flags of `sparsejax train`, in the form of the command line.
      retries: number of times that a training that lost a process is submitted again.

    Raises:
      ImportError: pyspark is not installed.
      JobError: Spark cannot start all tasks at the same time. This error comes after Spark
        has waited ten minutes for more executors.
      RuntimeError: processes were lost more than `retries` times.
      ValueError: an argument is wrong, or `sparsejax train` refuses one; the message is the
        command's.
    """
    job = _Job.of(data, run, processes=processes, options=options)
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, got {retries}")
    workers.check_workers(session)
    lost = ""
    for submission in range(retries + 1):
        if submission:
            warnings.warn(
                f"training is submitted again ({submission} of {retries}): {lost}",
                stacklevel=2,
            )
        try:
            ended = job.submit(session)
        except jobs.JobError as error:
            lost = str(error)
            if _NO_BARRIER in lost:  # Spark has already waited for executors
                raise
            continue
        refused = [process for process in ended if process.is_refusal]
        if refused:
            raise ValueError(f"sparsejax train: {refused[0].message}")
        others = [process for process in ended if process.status]
        if not others:
            return
        own = [process for process in others if not process.is_of_others]
        lost = (own or others)[0].message
    raise RuntimeError(
        f"training has lost a process {retries + 1} times, the last time so: {lost}; "
        "the logs of the executors say more. To continue, repeat the call"
    )


@dataclasses.dataclass(frozen=True)
class _Process:
    """The result of one process of the training.

    Attributes:
      number: number of the process.
      status: exit status; negative if a signal has killed the process.
      said: last lines of its standard error.
    """

    number: int
    status: int
    said: str

    @property
    def _last(self) -> str:
        return self.said.rstrip().rpartition("\n")[2]

    @property
    def is_of_others(self) -> bool:
        """Whether the process ended only because another process had ended."""
        return any(words in self._last for words in _OF_OTHERS)

    @property
    def is_refusal(self) -> bool:
        """Whether the command rejected its arguments or data: a retry would fail, too."""
        if self.status == _WRONG_USAGE:
            return True
        is_error = self.status == 1 and self._last.startswith(_ERROR)
        return is_error and not self.is_of_others

    @property
    def message(self) -> str:
        """The command's error; without one, its status or signal, and its last line."""
        if self.status == _WRONG_USAGE:
            return self.said
        if self._last.startswith(_ERROR):
            return self._last.removeprefix(_ERROR)
        end = f"process {self.number} ended with status {self.status}"
        if self.status < 0:
            end = f"process {self.number} was killed by signal {-self.status}"
        return f"{end}: {self._last}" if self._last else end


@dataclasses.dataclass(frozen=True)
class _Job:
    """The command that each task of the barrier stage runs.

    Attributes:
      data: path or address of the data.
      run: path or address of the run.
      processes: number of tasks.
      options: more flags of the command.
    """

    data: str
    run: str
    processes: int
    options: tuple[str, ...]

    @classmethod
    def of(
        cls, data: Path, run: Path, *, processes: int, options: Sequence[str]
    ) -> _Job:
        """Checks the arguments of `train`, and makes a job from them."""
        if processes < 1:
            raise ValueError(f"processes must be 1 or more, got {processes}")
        if isinstance(options, str):
            raise TypeError(f"options is a list of flags, got the string {options!r}")
        for option in options:
            if not isinstance(option, str):
                raise TypeError(f"a flag or its value is a str, got {option!r}")
            if option.partition("=")[0].replace("_", "-") in _OURS:
                raise ValueError(f"leave out {option}: train says it itself")
        return cls(jobs.absolute(data), jobs.absolute(run), processes, tuple(options))

    def submit(self, session: Any) -> list[_Process]:
        """Runs all processes once. Returns their results in the order of their numbers."""
        numbers = session.range(0, self.processes, 1, self.processes)
        task = functools.partial(_train_here, job=self)
        results = workers.map_batches(numbers, task, _RESULT, barrier=True)
        rows = jobs.collected(results)
        return sorted((_Process(*row) for row in rows), key=lambda p: p.number)

    def run_process(self, context: Any) -> Ended:
        """Runs the command in this task, after the tasks have exchanged their addresses."""
        number = context.partitionId()
        told = [
            codec.read(_Facts, codec.parse(text), "a task")
            for text in context.allGather(codec.text(_Facts.here()))
        ]
        hosts = {facts.host for facts in told}
        argv = ["train", self.data, *self.options, "--resume"]
        if self.processes > 1:
            host = context.getTaskInfos()[0].address.rpartition(":")[0]
            argv += ["--coordinator", f"{host}:{told[0].port}"]
            argv += [
                "--num-processes",
                f"{self.processes}",
                "--process-id",
                f"{number}",
            ]
        if is_address(self.run) and len(hosts) > 1:
            return _refused(
                f"the processes are on {len(hosts)} hosts, which need a folder that they "
                "share; a run is kept in a store only if all of them are on one host"
            )
        folder = pathlib.Path(self.run)
        if is_address(self.run):
            folder = _work_folder(self.run)
        with contextlib.ExitStack() as stack:
            problem = ""
            if number == 0:
                problem = _wait_until_free(folder)
                if is_address(self.run) and not problem:
                    stack.enter_context(_kept_in_store(folder, Place.of(self.run)))
            # Process 0 sends its problem to all processes: "" if the folder is ready.
            if problem := context.allGather(problem)[0]:
                return _refused(problem)
            return run_command([*argv, "--run", str(folder)], _gpus(context))


def _train_here(
    batches: Iterator[pa.RecordBatch], *, job: _Job
) -> Iterator[pa.RecordBatch]:
    """Function of a task: runs a process, and yields a row of `_RESULT` when it has ended."""
    from pyspark import BarrierTaskContext

    for _ in batches:  # the rows are not needed: the partition's number is the task's
        pass
    context = BarrierTaskContext.get()
    ended = job.run_process(context)
    result = {
        "number": context.partitionId(),
        "status": ended.status,
        "said": "\n".join(ended.lines),
    }
    yield pa.RecordBatch.from_pylist([result], schema=_RESULT)


def _refused(problem: str) -> Ended:
    """The result of a process in which the command was not started, with the reason."""
    return Ended(1, (f"{_ERROR}{problem}",))


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Address of a task, which the task sends to all other tasks.

    Attributes:
      host: name of the task's host.
      port: number of a port that is free on that host.
    """

    host: str
    port: int

    @classmethod
    def here(cls) -> _Facts:
        """The address of the current task."""
        with socket.create_server(("", 0)) as server:
            return cls(socket.gethostname(), server.getsockname()[1])


def _gpus(context: Any) -> dict[str, str]:
    """Environment variables that restrict JAX to the GPUs of this task."""
    gpus = context.resources().get("gpu")
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}


def _work_folder(run: str) -> pathlib.Path:
    """The local folder in which a run is trained if its own folder is in a store."""
    name = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
    return pathlib.Path(tempfile.gettempdir()) / f"sparsejax-run-{name}"


def _wait_until_free(folder: pathlib.Path) -> str:
    """Waits until no process of the previous submission holds the lock of the folder.

    Returns:
      A message about the process that still holds the lock after `_ENDING_SECONDS`, or "".
    """
    end = time.monotonic() + _ENDING_SECONDS
    while True:
        try:
            with locks.locked(folder):
                return ""
        except BlockingIOError as error:
            if time.monotonic() > end:
                return str(error)
            time.sleep(0.5)


@contextlib.contextmanager
def _kept_in_store(folder: pathlib.Path, place: Place) -> Generator[None]:
    """Copies the run from a store. While this context is open, new files are copied back."""
    shutil.rmtree(folder, ignore_errors=True)
    copy = RunCopy(folder, place)
    try:
        copy.fetch()
        with copy.kept():
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
