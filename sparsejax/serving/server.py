"""The process of a service: its ports, its start, and its end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import uvicorn
import uvloop

from sparsejax import ending
from sparsejax.serving import app
from sparsejax.serving import grpc as over_grpc
from sparsejax.serving.connections import configured
from sparsejax.serving.logs import flush, log
from sparsejax.serving.service import Service, Settings
from sparsejax.serving.versions import Versions

# After SIGTERM requests are still taken until none came for so long: whoever balances the
# load learns only after a while that this process is not ready.
_QUIET = 1.0
_POLL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Where a service listens.

    Attributes:
      host: its name or address.
      port: port of HTTP; 0 takes a free one.
      grpc_port: port of gRPC, which is off if it is None.
      tls_cert: file of the certificates, or None.
      tls_key: file of its key, or None.
      admin: host and port of the repository extension, which is off if it is None.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    admin: tuple[str, int] | None = None


class _Server(uvicorn.Server):
    """uvicorn without handlers for signals, which `run` has."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    path: str | os.PathLike[str],
    name: str,
    settings: Settings,
    address: Address,
    *,
    grace: float = 30.0,
    watch: float | None = None,
) -> None:
    """Serves a predictor until SIGTERM or SIGINT comes.

    Args:
      path: path of the predictor, or its address in a store; or a folder of versions.
      name: name of the model.
      settings: settings of the service.
      address: address on which it listens.
      grace: seconds after SIGTERM in which the process ends. For up to half of them
        requests are still taken.
      watch: seconds between looks for a newer version in the folder; None never looks.

    Raises:
      OSError: the file cannot be read, or the port is taken.
      ValueError: the file is no predictor, or it cannot be asked by names.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(path, name, settings, address, grace, watch))
        finally:
            flush()  # the thread that writes ends with the process
    # A model or a change that was being loaded has come to its end by now, and said so.
    log("ended", model=name)
    flush()


async def _serve(
    path, name: str, settings: Settings, at: Address, grace: float, watch: float | None
) -> None:
    begun = time.monotonic()
    service = Service(name, settings)
    patience = max(1, int(grace / 2))
    config = configured(
        service,
        ssl_certfile=at.tls_cert,
        ssl_keyfile=at.tls_key,
        timeout_graceful_shutdown=patience,
    )
    server = _Server(config)
    servers = [server]  # of HTTP
    listening = _listening(at.host, at.port)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    told: list[signal.Signals] = []
    loading: asyncio.Future = loop.create_future()

    def end(number: signal.Signals) -> None:
        # A model is not compiled to its end for a service that nobody can ask yet.
        if told or not loading.done():
            ending.leave(number)
        log("signal", signal=number.name)
        if told:  # the second one closes all connections
            for each in servers:
                each.force_exit = True
        elif loading.done():  # a thread that waits for a disk must not hold the process
            last = threading.Timer(grace, _leave, (service,))
            last.daemon = True
            last.start()
        told.append(number)
        service.draining = True
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    ports: dict[str, int] = {"port": listening.getsockname()[1]}
    remote = None
    if at.grpc_port is not None:
        remote = over_grpc.server(service)
        ports["grpc_port"] = _bound(remote, at)
        await remote.start()
    versions = Versions(service, path) if os.path.isdir(path) else None
    administering = []
    if at.admin is not None:
        assert versions is not None  # else it was refused
        bound = _listening(*at.admin)
        ports["admin_port"] = bound.getsockname()[1]
        application = app.admin(service, versions)
        options = {"timeout_graceful_shutdown": patience}
        admin = _Server(configured(service, application, **options))
        servers.append(admin)
        administering.append(asyncio.ensure_future(admin.serve(sockets=[bound])))
    log("listening", host=at.host, model=name, **ports)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    # The health of the process is answered while the model is loaded and compiled.
    load = functools.partial(service.load, path) if versions is None else versions.first
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    watching: list[asyncio.Future] = []
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        first = {"return_when": asyncio.FIRST_COMPLETED}
        await asyncio.wait({loading, stopped, serving}, **first)
        if loading.done():
            loading.result()
            # The collector of garbage does not look through these objects again and again.
            gc.collect()
            gc.freeze()
            log("ready", model=name, seconds=time.monotonic() - begun, **ports)
            if versions is not None and watch is not None:
                watching.append(asyncio.ensure_future(versions.watch(watch)))
            if service.excluded is not None:
                watching.append(asyncio.ensure_future(service.excluded.watch()))
            if service.changing is not None:
                coming = service.changing.watch(lambda: service.predictor)
                watching.append(asyncio.ensure_future(coming))
        await asyncio.wait({stopped, serving}, **first)
        if signal.SIGTERM in told[:1]:
            await _until_quiet(service, grace / 2)
    finally:
        for each in watching:
            each.cancel()
        for each in servers:
            each.should_exit = True
        if remote is not None:
            await remote.stop(grace / 2)
        await asyncio.wait({serving, *administering})
        await asyncio.to_thread(service.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    serving.result()


def _leave(service: Service) -> None:
    """Ends the process without the threads that still work.

    The status is 0 if all requests were answered.
    """
    busy = [each.name for each in threading.enumerate() if not each.daemon]
    log("left", in_hand=service.in_hand, threads=busy)
    flush()
    os._exit(1 if service.in_hand else 0)


def _listening(host: str, port: int) -> socket.socket:
    """The port. A taken one is an error before anything is loaded."""
    try:
        (family, *_, where), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # :: is all that this machine has, of both families, as gRPC takes it, too.
        both = where[0] == "::" and socket.has_dualstack_ipv6()
        listening = socket.create_server(
            where[:2], family=family, backlog=2048, dualstack_ipv6=both
        )
    except OSError as error:
        raise OSError(
            error.errno, f"cannot listen: {error.strerror}", f"{host}:{port}"
        ) from None
    listening.setblocking(False)
    return listening


def _bound(server: grpc.aio.Server, at: Address) -> int:
    """The port of gRPC, which the server has from now on."""
    host = f"[{at.host}]" if ":" in at.host else at.host
    where = f"{host}:{at.grpc_port}"
    try:
        if at.tls_cert is None or at.tls_key is None:
            return server.add_insecure_port(where)
        pair = (
            pathlib.Path(at.tls_key).read_bytes(),
            pathlib.Path(at.tls_cert).read_bytes(),
        )
        return server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
    except RuntimeError:
        raise OSError(errno.EADDRINUSE, "cannot listen: it is taken", where) from None


async def _until_quiet(service: Service, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end and now < service.last_request + _QUIET:
        await asyncio.sleep(_POLL)
