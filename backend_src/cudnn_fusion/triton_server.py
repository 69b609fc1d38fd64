"""Running a real Triton server as a child process: start, wait until ready, read its log, stop, clean up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cudnn_fusion.server_files import (
    ServerFiles,
    ServerNotFoundError,
    find_server,
    lay_out,
    server_environment,
)
from cudnn_fusion.shm_regions import count_regions, list_regions, remove_unused, sweep_shared_memory

__all__ = [
    "ServerFiles",
    "ServerNotFoundError",
    "ServerStartError",
    "TritonServer",
    "count_regions",
    "find_server",
    "free_ports",
    "port_is_free",
    "sweep_shared_memory",
]

_log = logging.getLogger(__name__)

# Runs between fork and the server: asks the kernel to end the server when the process that started it dies
# (1 is PR_SET_PDEATHSIG). A program of its own, since code between fork and exec is unsafe with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that asked for the server has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""

_SETTLE_LIMIT_S = 2.0
_SETTLE_SAMPLES = 5
_SETTLE_SAMPLE_S = 0.02
_STUB_GRACE_S = 5.0
_KILL_WAIT_S = 10.0
_POLL_S = 0.1
_NO_GPU_ERROR = "CudaDriverHelper has not been initialized"

# Requests to the child on this machine must not go through a proxy that the environment names.
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerStartError(RuntimeError):
    """The server ended, a model failed to load, or it was not ready in time. Holds the log's last lines."""


class TritonServer:
    """A Triton server for the time of a ``with`` block.

    ``repositories`` are model repositories, all served. A port of 0 is replaced by a free one. ``models``
    are waited for by name; without them the server's own readiness counts, which needs every model that it
    loads at start. ``extra_args`` go to tritonserver as they are; ``env`` is added to this process's
    environment. ``log_file`` gets the server's output, ``inherit_output`` lets it go to the terminal instead;
    with neither, the log is kept until `stop` and `log` still gives it afterwards.

    The thread that starts a server has to live as long as the server: when it ends, the kernel stops
    the server, so that none is left behind when this process is killed.

    Raises ServerNotFoundError when there is no server for this Python, FileNotFoundError for a repository
    that is not a directory, ServerStartError when the server cannot be started.
    """

    def __init__(
        self,
        *repositories: Path | str,
        models: Sequence[str] = (),
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        address: str = "127.0.0.1",
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        inherit_output: bool = False,
        ready_timeout_s: float = 120.0,
        exit_timeout_s: float = 30.0,
    ) -> None:
        self._repositories = [_existing_directory(Path(path)) for path in repositories]
        self._models = tuple(models)
        self._address = address
        self._requested_ports = (http_port, grpc_port, metrics_port)
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})
        self._log_file = log_file
        self._inherit_output = inherit_output
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._last_log = ""
        self._regions_before: set[Path] = set()

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient.http wants it."""
        return f"{self._connect_address}:{self._ports[0]}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient.grpc wants it."""
        return f"{self._connect_address}:{self._ports[1]}"

    @property
    def metrics_url(self) -> str:
        """The address of the metrics in Prometheus' text format."""
        return f"http://{self._connect_address}:{self._ports[2]}/metrics"

    @property
    def pid(self) -> int:
        """The server's process id. RuntimeError before `start`."""
        return self._running.pid

    def start(self) -> None:
        """Starts the server without waiting for it."""
        if self._process is not None:
            raise RuntimeError("this server has been started already; make a new TritonServer")
        files = find_server()
        self._folder = Path(tempfile.mkdtemp(prefix="cudnn_fusion_server_"))
        try:
            backends = lay_out(files, self._folder)
            environment = server_environment(files, self._folder, {**os.environ, **self._env})
            self._regions_before = set(list_regions())
            self._ports = free_ports(self._requested_ports, self._address)
            self._process = self._launch(files, backends, environment)
        except BaseException:
            self._remove_folder()
            raise

    def wait_ready(self) -> None:
        """Returns when the server and its models are ready; ServerStartError otherwise, at once where the
        server has ended or a model that is waited for has failed."""
        deadline = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            code = self._running.poll()
            if code is not None:
                raise self._start_error(f"Triton ended with {_describe_exit(code)} before it was ready")
            if failure := self._model_failure():
                raise self._start_error(failure)
            if time.monotonic() > deadline:
                raise self._start_error(f"Triton was not ready after {self._ready_timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def metrics(self) -> str:
        """The metrics in Prometheus' text format. OSError when the server does not answer."""
        return self._get(self.metrics_url)

    def log(self) -> str:
        """Everything the server and its models have written; empty when it went to the terminal."""
        path = self._log_path
        if path is not None and path.is_file():
            return path.read_text(errors="replace")
        return self._last_log

    def log_errors(self) -> list[str]:
        """The lines of the log that Triton marks as errors, less the one that every machine without a GPU
        gets."""
        lines = self.log().splitlines()
        return [
            line for line in lines if line[:1] == "E" and line[1:5].isdigit() and _NO_GPU_ERROR not in line
        ]

    def send_signal(self, number: int) -> None:
        """Sends a signal to the server process alone (its stubs are ended by it), once it can take one."""
        _until_it_waits(self._running)
        self._running.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Waits until the server has ended by itself or by a signal; its exit code, negative for a signal,
        and None if it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._running.wait(timeout_s)
        return None

    def stop(self) -> int | None:
        """Ends the server and everything it started; its exit code, None if it was never started.

        SIGTERM first; SIGKILL after the exit timeout. A client's open HTTP connection makes Triton wait out
        that timeout: close clients first. Removes the server's files and the shared memory it has left.
        """
        process = self._process
        if process is None:
            return None
        try:
            if process.poll() is None:
                _until_it_waits(process)
                process.terminate()
                try:
                    # Triton's own exit timeout comes first; what is on top is for its last words.
                    process.wait(self._exit_timeout_s + _STUB_GRACE_S)
                except subprocess.TimeoutExpired:
                    _log.warning("Triton did not stop in %.0f s and is killed", self._exit_timeout_s)
        finally:
            _end_group(process)
            remove_unused(set(list_regions()) - self._regions_before)
            self._last_log = self.log()
            self._remove_folder()
        return process.returncode

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server has not been started; call start() or use it in a with statement")
        return self._process

    @property
    def _connect_address(self) -> str:
        return "127.0.0.1" if self._address == "0.0.0.0" else self._address

    @property
    def _log_path(self) -> Path | None:
        if self._log_file is not None:
            return self._log_file
        return self._folder / "triton.log" if self._folder and not self._inherit_output else None

    def _launch(
        self, files: ServerFiles, backends: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [str(files.executable), *self._server_arguments(backends)]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
            # A session of its own: Ctrl-C in the terminal reaches this process, which decides what to do.
            return subprocess.Popen(
                launcher,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )

    def _server_arguments(self, backends: Path) -> list[str]:
        http_port, grpc_port, metrics_port = self._ports
        return [
            *(f"--model-repository={path}" for path in self._repositories),
            f"--backend-directory={backends}",
            f"--http-address={self._address}",
            f"--http-port={http_port}",
            f"--grpc-address={self._address}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={self._address}",
            f"--metrics-port={metrics_port}",
            f"--exit-timeout-secs={self._exit_timeout_s:.0f}",
            *self._extra_args,
        ]

    def _is_ready(self) -> bool:
        paths = [f"v2/models/{model}/ready" for model in self._models] or ["v2/health/ready"]
        try:
            for path in paths:
                self._get(f"http://{self.http_url}/{path}")
            # Triton opens its ports one after the other: an answer over HTTP does not mean the others.
            for port, service in zip(self._ports[1:], ("grpc", "metrics"), strict=True):
                if f"--allow-{service}=false" not in self._extra_args:
                    socket.create_connection((self._connect_address, port), timeout=5).close()
        except OSError:
            return False
        return True

    def _model_failure(self) -> str | None:
        """A sentence about the first model that is waited for and has failed to load."""
        index = urllib.request.Request(f"http://{self.http_url}/v2/repository/index", method="POST")
        try:
            states = json.loads(self._get(index))
        except (OSError, ValueError):
            return None
        for state in states:
            reason = state.get("reason", "")
            wanted = not self._models or state["name"] in self._models
            if wanted and state.get("state") == "UNAVAILABLE" and reason not in ("", "unloaded"):
                return f"model {state['name']} failed to load: {reason}"
        return None

    def _start_error(self, what: str) -> ServerStartError:
        if self._log_path is None:
            return ServerStartError(f"{what}; see its output above.")
        # For a wrong option Triton's usage text follows the reason, several screens of it.
        lines = self.log().partition("Usage: tritonserver")[0].splitlines()
        # A model's own error is the reason most of the time and is far above the last lines.
        failures = list(dict.fromkeys(line.strip() for line in lines if "failed to load" in line))[:5]
        said = "\n".join(["", *failures, "Last lines of its log:", *lines[-30:]])
        return ServerStartError(f"{what}.{said}")

    def _get(self, request: str | urllib.request.Request) -> str:
        with _http.open(request, timeout=5) as response:
            body: bytes = response.read()
        return body.decode()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port`` of ``address`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_ports(requested: Sequence[int], address: str = "127.0.0.1") -> list[int]:
    """``requested`` with every 0 replaced by a free port, all different."""
    with contextlib.ExitStack() as held:
        ports = []
        for port in requested:
            if port == 0:
                probe = held.enter_context(socket.socket())
                probe.bind((address, 0))
                port = probe.getsockname()[1]  # noqa: PLW2901
            ports.append(port)
    return ports


def _existing_directory(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"model repository {path} is not a directory: give the folder that holds a folder per model, or "
            "make one with tools/export.py"
        )
    return path.resolve()


def _until_it_waits(process: subprocess.Popen[bytes]) -> None:
    """Returns when the server's main thread has slept for a moment, or after a limit.

    Triton's signal handler takes a lock that the main thread holds shortly before it waits for a signal: one
    that comes in that moment, right behind the last line of its start, stops it for ever.
    """
    asleep, deadline = 0, time.monotonic() + _SETTLE_LIMIT_S
    while asleep < _SETTLE_SAMPLES and time.monotonic() < deadline and process.poll() is None:
        asleep = asleep + 1 if _sleeps(process.pid) else 0
        time.sleep(_SETTLE_SAMPLE_S)


def _sleeps(pid: int) -> bool:
    """Whether the main thread of a process is asleep, by proc(5): the state stands behind the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (OSError, IndexError):
        return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Makes sure that nothing of the server's process group is left, its stubs included."""
    deadline = time.monotonic() + (_STUB_GRACE_S if process.poll() is not None else 0)
    killed = False
    while _group_has_members(process):
        if time.monotonic() > deadline:
            if killed:
                _log.error("processes of group %d could not be ended", process.pid)
                return
            # The group cannot be another's: its id is not given out again while a member lives.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            killed = True
            deadline = time.monotonic() + _KILL_WAIT_S
        time.sleep(_POLL_S)


def _group_has_members(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the group still runs; ended ones that nobody has collected do not count."""
    process.poll()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the program's name in parentheses: state, parent, group.
            state, _, group = status.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                return True
    return False


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
