"""Starts Triton on a model repository, in the foreground.

    python tools/serve.py --model-repository model_repository -- --log-verbose=1

Everything after ``--`` goes to tritonserver. Shared memory that killed servers have left behind is removed
first. SIGTERM and SIGINT are passed on; the exit code is the server's (128 + N when signal N ended it).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from cudnn_fusion.triton_server import (
    ServerNotFoundError,
    TritonServer,
    port_is_free,
    sweep_shared_memory,
)

Port = Annotated[int, typer.Option(min=1, max=65535)]


def main(
    tritonserver_arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: passed to tritonserver as they are.")
    ] = None,
    *,
    model_repository: Annotated[
        list[Path] | None, typer.Option(help="Folder with a folder per model; may be given several times.")
    ] = None,
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Port = 8002,
    address: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 makes the server reachable from outside.")
    ] = "127.0.0.1",
) -> None:
    """Start Triton on a model repository and stay in the foreground."""
    refuse_taken_ports({"http": http_port, "grpc": grpc_port, "metrics": metrics_port}, address)
    for region in sweep_shared_memory():
        typer.echo(f"removed {region}, left behind by a server that was killed", err=True)
    try:
        server = TritonServer(
            *(model_repository or [Path("model_repository")]),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            address=address,
            extra_args=tritonserver_arguments or (),
            inherit_output=True,
        )
        code = run_in_foreground(server)
    except (ServerNotFoundError, FileNotFoundError) as error:
        fail(str(error))
    raise typer.Exit(code if code >= 0 else 128 - code)


def run_in_foreground(server: TritonServer) -> int:
    """Runs ``server`` until it ends; its exit code."""
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if started:
            server.send_signal(number)

    started = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        server.start()
        started = True
        if received:  # came while the server was being started
            server.send_signal(received[0])
        while (code := server.wait(timeout_s=1.0)) is None:
            if received:
                # Asked to end, as it has been: one that hangs while it shuts down is killed.
                return server.stop() or 0
        return code
    finally:
        server.stop()


def refuse_taken_ports(ports: dict[str, int], address: str) -> None:
    """Ends the program, naming each port of ``ports`` that is taken and what to do about it."""
    taken = [
        f"Port {port} ({name}) of {address} is in use or not allowed: stop the program that listens there "
        f"(`ss -ltnp 'sport = :{port}'` names it) or choose another with --{name}-port."
        for name, port in ports.items()
        if not port_is_free(port, address)
    ]
    if len(set(ports.values())) < len(ports):
        taken.append("The HTTP, gRPC and metrics ports must be three different ones.")
    if taken:
        fail("\n".join(taken))


def fail(message: str) -> None:
    """Prints ``message`` and ends the program with exit code 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
