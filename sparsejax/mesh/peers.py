"""Connections between the processes of a training, to notice when one of them is lost.

On a GPU, an operation over all devices never ends if one of the processes is gone. The operating
system closes the connections of a process however it ends. So the other processes notice its loss
at once, and end, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

# Time for which a process may continue after another one was lost. Meanwhile an operation may
# raise an error of its own, which is more precise.
_GRACE_SECONDS = 5

# TCP settings: a machine counts as lost if it does not answer for 5 + 3 * 2 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_CONNECT_SECONDS = 10

_KNOWN, _ENDED, _LOST = b"k", b"e", b"l"
_ADDRESS_BYTES = 1024

_connections: list[socket.socket] = []
_lost = threading.Event()
_on_abort = []  # references that keep callbacks alive, because C code may call them


def watch(when_lost: Callable[[], None]) -> None:
    """Ends this process soon after another one is lost. All processes must call this.

    A process that ends without `end_watch` is lost: it was killed, it failed, or its
    machine does not answer. If no connection can be made, there is a warning, and only
    JAX's heartbeats notice a loss.

    Args:
      when_lost: function that is called just before the process ends with status 1, in another
        thread.
    """
    if jax.process_count() == 1:
        return
    token = secrets.token_bytes(16) if jax.process_index() == 0 else b""
    server = _listen() if jax.process_index() == 0 else None
    if server is not None:
        names = [str(server.getsockname()[1]), token.hex(), *_names()]
        _sent(" ".join(names))
        target, arguments = _serve, (server, token, when_lost)
    else:
        port, word, *names = _sent("").split(" ")
        connection = _connected(names, int(port), bytes.fromhex(word))
        if connection is None:
            warnings.warn(
                f"process 0 cannot be reached at port {port} of {', '.join(names)}: if a "
                "process is lost, the others may notice a minute later",
                stacklevel=3,
            )
            return
        target, arguments = _listen_to_first, (connection, when_lost)
    threading.Thread(target=target, args=arguments, daemon=True).start()
    atexit.register(_at_exit)
    _catch_abort(when_lost)


def end_watch() -> None:
    """Informs the other processes that this process ends as intended."""
    _tell(_ENDED)
    _connections.clear()


def _at_exit() -> None:
    if getattr(sys, "last_exc", None) is None:
        end_watch()
    else:  # with an exception, JAX would first wait for the other processes
        _tell(_LOST)


def _tell(word: bytes) -> None:
    for connection in _connections:
        with contextlib.suppress(OSError):
            connection.sendall(word)


def _catch_abort(when_lost: Callable[[], None]) -> None:
    """Ends this process in order when JAX aborts it. JAX does so if process 0 is gone."""

    def end_or_abort(number: int) -> None:
        if _lost.wait(_GRACE_SECONDS):
            _end(when_lost)
        # The abort has another cause: when this function returns, `abort` ends the process.

    # A Python handler would run in the main thread, which may be waiting for a device.
    _on_abort.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(end_or_abort))
    libc = ctypes.CDLL(None)
    libc.signal(int(signal.SIGABRT), _on_abort[-1])


def _names() -> list[str]:
    """Names and addresses by which other machines may reach this one."""
    names = [socket.gethostname(), socket.getfqdn()]
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError), udp as out:
        # A UDP `connect` sends nothing. It only chooses the network interface.
        out.connect(("192.0.2.1", 9))
        names.append(out.getsockname()[0])
    return [*dict.fromkeys(names), "127.0.0.1"]


def _sent(text: str) -> str:
    """Broadcasts a text from process 0, and returns it in all processes."""
    array = np.zeros(_ADDRESS_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)[:_ADDRESS_BYTES]
    array[: len(encoded)] = encoded
    sent = np.asarray(multihost_utils.broadcast_one_to_all(array), np.uint8)
    return sent.tobytes().rstrip(b"\0").decode()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", 0))


def _connected(names: list[str], port: int, token: bytes) -> socket.socket | None:
    """A connection to process 0 that it has confirmed; None if there is none."""
    for name in names:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((name, port), _CONNECT_SECONDS)
            connection.sendall(token)
            if connection.recv(1) == _KNOWN:
                connection.settimeout(None)
                _keep_alive(connection)
                _connections.append(connection)
                return connection
            connection.close()
    return None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # some operating systems lack this option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen_to_first(connection: socket.socket, when_lost: Callable[[], None]) -> None:
    if _received(connection) != _ENDED:
        _end_after_grace(when_lost)


def _serve(server: socket.socket, token: bytes, when_lost: Callable[[], None]) -> None:
    """Accepts connections from the other processes; informs all of them when one is lost."""
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is server:
                    if (accepted := _accepted(server, token)) is not None:
                        selector.register(accepted, selectors.EVENT_READ)
                        _connections.append(accepted)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                selector.unregister(connection)
                if _received(connection) == _ENDED:
                    continue
                for other in _connections:
                    with contextlib.suppress(OSError):
                        other.sendall(_LOST)
                _end_after_grace(when_lost)


def _accepted(server: socket.socket, token: bytes) -> socket.socket | None:
    """A new connection; None if it does not come from one of our processes."""
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        word = connection.recv(len(token), socket.MSG_WAITALL)
        if secrets.compare_digest(word, token):
            connection.sendall(_KNOWN)
            connection.settimeout(None)
            _keep_alive(connection)
            return connection
        connection.close()
    return None


def _received(connection: socket.socket) -> bytes:
    """One received byte; empty if the connection is broken."""
    try:
        return connection.recv(1)
    except OSError:
        return b""


def _end_after_grace(when_lost: Callable[[], None]) -> None:
    _lost.set()
    time.sleep(_GRACE_SECONDS)
    _end(when_lost)


def _end(when_lost: Callable[[], None]) -> None:
    when_lost()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
