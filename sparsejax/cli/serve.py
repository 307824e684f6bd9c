"""The commands `serve` and `export-triton`."""

from __future__ import annotations

import os
import pathlib

from sparsejax.callers import needing
from sparsejax.cli import flags
from sparsejax.cli.compiling import told_if_long
from sparsejax.data.reading.item_titles import read_titles
from sparsejax.options.predicting import Serving


def export_triton(command: flags.ExportTriton) -> None:
    """`sparsejax export-triton`."""
    with needing("export-triton needs {}", "serve"):
        from sparsejax.serving import triton
    from sparsejax.serving.engine import Shape

    folder = triton.export(
        command.model,
        command.repository,
        name=command.name or command.model.stem,
        shapes=tuple(map(Shape.parse, command.shapes)),
    )
    print(
        f"{folder}: version {folder.name} of {folder.parent.name}; start Triton with "
        f"--model-repository={command.repository}"
    )


def _admin_of(text: str) -> tuple[str, int]:
    """Parses the host and the port given by `--admin`."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(
            f"--admin is a port, or host and port like 10.0.0.5:8001, got {text!r}"
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def serve(command: flags.Serve) -> None:
    """`sparsejax serve`."""
    with needing("serve needs {}", "serve"):
        # gRPC's log is off: its lines are not JSON, and contain text sent by clients, even line
        # ends. gRPC reads this variable when it is imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from sparsejax.serving import server
    from sparsejax.serving.engine import Shape
    from sparsejax.serving.logs import log
    from sparsejax.serving.service import Settings

    if (command.tls_cert is None) != (command.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both, or none")
    if command.titles is not None and not command.page:
        raise ValueError("--titles are for the page: leave out --no-page")
    for flag, port in (("--port", command.port), ("--grpc-port", command.grpc_port)):
        if port is not None and not 0 <= port < 2**16:
            raise ValueError(f"{flag} must be from 0 to 65535, got {port}")
    is_folder = os.path.isdir(command.model)
    if command.watch is not None and not (is_folder and command.watch > 0):
        raise ValueError(
            "--watch is a positive number of seconds, for a folder of versions like "
            "models/films with models/films/3/model.predictor"
        )
    is_fixed = command.watch is None and command.admin is None
    if command.keep and is_fixed:
        raise ValueError(
            "--keep goes with --watch or --admin, which let newer versions serve"
        )
    if command.swap == "drain" and (is_fixed or command.keep):
        raise ValueError(
            "--swap drain goes with --watch or --admin, which let newer versions serve, and "
            "without --keep, which needs room for several"
        )
    admin = None if command.admin is None else _admin_of(command.admin)
    if admin is not None and not is_folder:
        raise ValueError(
            "--admin is for a folder of versions like models/films with "
            "models/films/3/model.predictor"
        )
    shapes = tuple(map(Shape.parse, command.shapes))
    path = pathlib.PurePath(
        os.path.abspath(command.model) if is_folder else command.model
    )
    address = server.Address(
        host=command.host,
        port=command.port,
        grpc_port=command.grpc_port,
        tls_cert=None if command.tls_cert is None else str(command.tls_cert),
        tls_key=None if command.tls_key is None else str(command.tls_key),
        admin=admin,
    )
    with told_if_long(lambda seconds: log("compiling", seconds=seconds)):
        server.run(
            command.model,
            command.name or (path.name if is_folder else path.stem),
            Settings(
                shapes=shapes,
                titles=None
                if command.titles is None
                else read_titles(command.titles, command.say),
                **command.values_of(Serving),
            ),
            address,
            grace=command.grace,
            watch=command.watch,
        )
