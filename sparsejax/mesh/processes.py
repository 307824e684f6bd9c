"""Start, agreement and end of several processes that train together."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparsejax.mesh import interrupts, locks, peers
from sparsejax.mesh.layout import ROW_MULTIPLE, make_mesh, mesh_is_set

# A process that is silent for this long counts as lost, and all others end.
HEARTBEAT_SECONDS = 60

# A variable that only `mpirun` of Open MPI 4 sets. JAX finds the other processes with it.
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"

# How long a failing process waits for the others, which may be failing too.
_GRACE_SECONDS = 5


class OtherProcessError(RuntimeError):
    """Another process has failed. Its own message says why."""


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    when_lost: Callable[[], None] | None = None,
) -> None:
    """Joins the processes that train one model together.

    Call it before anything else in the program uses JAX's devices. Afterwards a
    SIGTERM makes `fit` save a checkpoint and end: a cluster sends it before it takes a
    machine away. A second SIGTERM ends the process at once.

    If one process is lost, the others end some seconds later, with status 1.

    ::

        join_processes("10.0.0.1:1234", num_processes=2, process_id=0)

    >>> join_processes("10.0.0.1:1234")
    Traceback (most recent call last):
    ValueError: give the coordinator, the number of processes and the id of this one, ...

    Args:
      coordinator: `host:port` at which process 0 listens. By default it is found from
        the environment variables of Slurm, Open MPI, Kubernetes and others, see
        `jax.distributed.initialize`.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      when_lost: function that is called in another thread just before this process ends because
        another one was lost. By default it prints a line to standard error.

    Raises:
      ValueError: no cluster was found, or only some of the arguments are given.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ValueError(
            "give the coordinator, the number of processes and the id of this one, or "
            "none of them"
        )
    method = None if coordinator is None else "deactivate"
    if method is None and are_of_mpirun() and _OPEN_MPI_4 not in os.environ:
        method = "mpi4py"
        if importlib.util.find_spec(method) is None:
            raise ValueError(
                "the processes of Open MPI 5 find each other by another package: pip "
                "install mpi4py"
            )
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=method,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            "no cluster was found (Slurm, Open MPI and Kubernetes tell their processes "
            "of it); give --coordinator, --num-processes and --process-id"
        ) from error
    signal.signal(signal.SIGTERM, _note)
    peers.watch(_say_lost if when_lost is None else when_lost)


def _say_lost() -> None:
    print("sparsejax: error: another process was lost", file=sys.__stderr__)


def _note(number: int, frame: object) -> None:
    interrupts.note(number)
    signal.signal(number, signal.SIG_DFL)


def are_of_mpirun() -> bool:
    """Whether this is one of several processes started by Open MPI's `mpirun`."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1


def is_joined() -> bool:
    """Whether this process has joined others in one training, or will join them."""
    return jax.distributed.is_initialized()


def mesh_of(text: str | None) -> jax.sharding.Mesh:
    """The mesh that a text such as "data=2,model=4" describes.

    "auto" or None takes all devices: a kernel is divided over the devices of a process,
    which have fast connections, and a batch over the processes. If a process has, for
    example, 6 devices, which do not divide our sizes, "auto" takes 4 of them.

    Raises:
      ValueError: the text describes no mesh, or with several processes a mesh that lacks
        some of their devices.
    """
    processes, devices = jax.process_count(), jax.device_count()
    if text == "auto" and processes == 1:
        return make_mesh(model=math.gcd(2 ** (devices.bit_length() - 1), ROW_MULTIPLE))
    if text in (None, "auto"):
        try:
            return make_mesh(data=processes, model=devices // processes)
        except ValueError as error:
            raise ValueError(
                f"{processes} processes with {devices} devices need --mesh: {error}"
            ) from None
    data, model = axes_of(text)
    mesh = make_mesh(data=data, model=model)
    if processes > 1 and mesh.size != devices:
        raise ValueError(
            f"--mesh {text} has {mesh.size} devices, but {processes} processes have "
            f"{devices}, and each must take part"
        )
    return mesh


def idle_gpus() -> int:
    """The number of this process's GPUs that have no work because no mesh is set."""
    if mesh_is_set() or jax.default_backend() == "cpu":
        return 0
    return len(jax.local_devices()) - 1


def axes_of(text: str) -> tuple[int, int]:
    """The sizes of "data" and "model" in a text such as "data=2,model=4".

    Raises:
      ValueError: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "model") or name in sizes or not size.isdecimal():
            raise ValueError(f"--mesh is written data=2,model=4, got {text!r}")
        sizes[name] = int(size)
    return sizes.get("data", 1), sizes.get("model", 1)


def is_first() -> bool:
    """Whether this is the process that prints and writes files."""
    return jax.process_index() == 0


def true_anywhere(*flags: bool) -> list[bool]:
    """Whether each flag is set in some process. All processes must call this."""
    if jax.process_count() == 1:
        return list(flags)
    return multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist()


def is_true_anywhere(flag: bool) -> bool:
    """Whether a flag is set in some process. All processes must call this."""
    return true_anywhere(flag)[0]


def number_of_first(number: int) -> int:
    """The number that process 0 passed; it is below 2^32. All processes must call this."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.uint32(number)))


def is_same_everywhere(text: str) -> bool:
    """Whether all processes have the same text. All processes must call this."""
    if jax.process_count() == 1:
        return True
    # The text is sent as uint32, a dtype that JAX keeps with and without 64-bit types.
    words = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    lengths = multihost_utils.process_allgather(np.asarray(len(words), np.int32))
    if (lengths != lengths[0]).any():
        return False
    return bool((multihost_utils.process_allgather(words) == words).all())


def in_first(function: Callable[[], object]) -> None:
    """Calls a function in process 0. The other processes wait for it.

    Raises:
      OtherProcessError: the function failed in process 0. Process 0 itself raises the
        error of the function.
    """
    failed = None
    if is_first():
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised below, after all were told
            failed = error
    anywhere = is_true_anywhere(failed is not None)
    if failed is not None:
        raise failed
    if anywhere:
        raise OtherProcessError("process 0 has failed; its message says why")


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """While this context is open, process 0 locks a folder for all, see `locks.locked`.

    Raises:
      BlockingIOError: another run has locked the folder.
      OtherProcessError: another run has locked the folder; raised in processes other than 0.
    """
    with contextlib.ExitStack() as stack:
        in_first(lambda: stack.enter_context(locks.locked(folder)))
        yield


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error means that a process was lost during an operation over all devices."""
    words = ("Gloo", "NCCL", "heartbeat", "coordination service")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in str(error) for word in words
    )


def leave(status: int) -> None:
    """Ends a process that has failed, after a few seconds at most.

    At an ordinary exit JAX waits for all processes, for minutes if one does not answer.
    """
    if is_joined():
        if status != 1:
            peers.end_watch()
        # Other processes may fail for the same reason: each has time to print its own message.
        sys.stdout.flush()
        sys.stderr.flush()
        end = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        end.start()
        end.join(_GRACE_SECONDS)
        os._exit(status)
