"""The process of a service: ports, start, and end by a signal."""

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

# After SIGTERM, requests are answered until none has come for this many seconds, because a load
# balancer learns only after a while that the process is not ready.
_QUIET = 1.0
_POLL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """The addresses on which a service listens.

    Attributes:
      host: name or address of the host.
      port: port of HTTP; 0 takes a free one.
      grpc_port: port of gRPC; None is no gRPC.
      tls_cert: file of the certificates, or None.
      tls_key: file of the certificate's private key, or None.
      admin: host and port of the repository extension; None is no extension.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    admin: tuple[str, int] | None = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, because `run` sets its own."""

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
      grace: seconds after SIGTERM in which the process ends. For up to half of this time
        requests are still accepted.
      watch: seconds between polls for a newer version in the folder; None never polls.

    Raises:
      OSError: the file cannot be read, or the port is taken.
      ValueError: the file is no predictor, or the predictor has no names.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(path, name, settings, address, grace, watch))
        finally:
            flush()  # the thread that writes log lines ends with the process
            # If a model or a change was being loaded, that has ended now, and is logged.
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
    servers = [server]  # HTTP servers
    listening = _listening(at.host, at.port)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    told: list[signal.Signals] = []
    loading: asyncio.Future = loop.create_future()

    def end(number: signal.Signals) -> None:
        # While the model is loaded, the process ends at once, without waiting for the compiler.
        if told or not loading.done():
            ending.leave(number)
        log("signal", signal=number.name)
        if told:  # the second signal closes all connections
            for each in servers:
                each.force_exit = True
        elif loading.done():  # a thread that waits for a disk must not delay the end
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
        assert versions is not None  # otherwise the arguments were refused
        bound = _listening(*at.admin)
        ports["admin_port"] = bound.getsockname()[1]
        application = app.admin(service, versions)
        options = {"timeout_graceful_shutdown": patience}
        admin = _Server(configured(service, application, **options))
        servers.append(admin)
        administering.append(asyncio.ensure_future(admin.serve(sockets=[bound])))
    log("listening", host=at.host, model=name, **ports)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    # The model is loaded and compiled in a thread, so that health requests are answered meanwhile.
    load = functools.partial(service.load, path) if versions is None else versions.first
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    watching: list[asyncio.Future] = []
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        first = {"return_when": asyncio.FIRST_COMPLETED}
        await asyncio.wait({loading, stopped, serving}, **first)
        if loading.done():
            loading.result()
            # Frozen objects are skipped by later garbage collections.
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
    """Ends the process at once, even if threads are running.

    The exit status is 0 if all requests were answered, else 1.
    """
    busy = [each.name for each in threading.enumerate() if not each.daemon]
    log("left", in_hand=service.in_hand, threads=busy)
    flush()
    os._exit(1 if service.in_hand else 0)


def _listening(host: str, port: int) -> socket.socket:
    """Opens a socket at a port. Called before anything is loaded: a port in use is an error."""
    try:
        (family, *_, where), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # As in gRPC, :: means all addresses of this machine, both of IPv6 and of IPv4.
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
    """Opens gRPC's port and returns its number."""
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
