"""A running server into which tests put models, and what they ask of it."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from repositories import rename
from tritonclient.utils import np_to_triton_dtype

from cudnn_fusion.triton_server import TritonServer
from tools.demo.serving_client import SETTLE_S, Route, requests_by_route, tell

TIMEOUT_S = 30.0
"""For every request of a test: one that hangs fails."""

CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Arrays = Mapping[str, np.ndarray]


class ModelServer:
    """A server with explicit model control and two repositories, ``repository`` and ``elsewhere``.

    Its clients may be used from any thread; close it before the server is stopped.
    """

    def __init__(self, server: TritonServer, repository: Path, elsewhere: Path) -> None:
        self.triton = server
        self.repository = repository
        self.elsewhere = elsewhere
        self.control = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._local = threading.local()
        self._http: list[Any] = []

    def close(self) -> None:
        """Closes all connections."""
        for client in (self.control, *self._http):
            client.close()

    def client(self, protocol: str) -> Any:
        """A client for the calling thread: those for HTTP must not be shared."""
        if protocol == "grpc":
            return self.control
        if not hasattr(self._local, "http"):
            self._local.http = tritonclient.http.InferenceServerClient(
                self.triton.http_url, network_timeout=TIMEOUT_S
            )
            self._http.append(self._local.http)
        return self._local.http

    def put(
        self, name: str, source: Path, edit: Callable[[str], str] | None = None, elsewhere: bool = False
    ) -> Model:
        """A copy of ``source`` under this name, its config.pbtxt changed by ``edit``; not loaded."""
        folder = (self.elsewhere if elsewhere else self.repository) / name
        shutil.copytree(source, folder)
        config = folder / "config.pbtxt"
        rename(config, name)
        if edit is not None:
            config.write_text(edit(config.read_text()))
        return Model(self, name, folder)


class Model:
    """A model in a `ModelServer`'s repository; loaded inside of a with block."""

    def __init__(self, server: ModelServer, name: str, folder: Path) -> None:
        self.server = server
        self.name = name
        self.folder = folder
        self._log_start = 0

    def __enter__(self) -> Model:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    def load(self) -> None:
        """InferenceServerException says why it cannot be loaded."""
        self._log_start = len(self.server.triton.log())
        self.server.control.load_model(self.name, client_timeout=TIMEOUT_S)

    def unload(self) -> None:
        self.server.control.unload_model(self.name, client_timeout=TIMEOUT_S)

    def log(self) -> str:
        """What the server has written since this model was loaded."""
        return self.server.triton.log()[self._log_start :]

    def log_lines(self, level: str) -> list[str]:
        """Lines of `log` at a level, ``I``, ``W`` or ``E``."""
        return [line for line in self.log().splitlines() if re.match(rf"{level}\d{{4}} ", line)]

    def infer(
        self, arrays: Arrays, protocol: str = "grpc", outputs: Sequence[str] = ("profile", "scores")
    ) -> dict[str, np.ndarray]:
        """Outputs by name, as they come; InferenceServerException for an error, also a timeout."""
        module = CLIENTS[protocol]
        wanted = [module.InferRequestedOutput(name) for name in outputs]
        timeout = {"client_timeout": TIMEOUT_S} if protocol == "grpc" else {}
        answer = self.server.client(protocol).infer(
            self.name, request_inputs(arrays, protocol), outputs=wanted, **timeout
        )
        names = [output.name if protocol == "grpc" else output["name"] for output in _outputs(answer)]
        return {name: answer.as_numpy(name) for name in names}

    def infer_at_once(self, requests: Sequence[Arrays]) -> list[Any]:
        """Sends requests over gRPC without waiting in between; an answer or an exception for each."""
        results: list[Any] = [None] * len(requests)
        left = threading.Semaphore(0)

        def finished(index: int, result: Any, error: Any) -> None:
            results[index] = error or {o.name: result.as_numpy(o.name) for o in _outputs(result)}
            left.release()

        for index, arrays in enumerate(requests):
            self.server.control.async_infer(
                self.name,
                request_inputs(arrays),
                callback=lambda result, error, index=index: finished(index, result, error),
                client_timeout=TIMEOUT_S,
            )
        for _ in requests:
            assert left.acquire(timeout=TIMEOUT_S)
        return results

    def routes(self) -> Counter[Route]:
        """How many requests each route has served, those answered by now included."""
        time.sleep(SETTLE_S)
        return self._routes()

    def _routes(self) -> Counter[Route]:
        return requests_by_route(self.server.triton.metrics(), self.name)

    def infer_and_tell(self, arrays: Arrays, protocol: str = "grpc") -> tuple[dict[str, np.ndarray], Route]:
        """The answer, and what served it. No other client of this model may be busy."""
        answer, routes = tell(self._routes, lambda: self.infer(arrays, protocol))
        (route,) = routes.elements()
        return answer, route

    def metric(self, name: str, label: str) -> dict[str, float]:
        """Values of ``cudnn_fusion_<name>`` for this model, by the value of one label."""
        time.sleep(SETTLE_S)
        found = {}
        for line in self.server.triton.metrics().splitlines():
            sample, _, value = line.rpartition(" ")
            labels = dict(_LABEL.findall(sample))
            if sample.startswith(f"cudnn_fusion_{name}{{") and labels.get("model") == self.name:
                found[labels[label]] = float(value)
        return found

    def statistics(self) -> Any:
        """Triton's own statistics, ``inference_count`` and ``execution_count`` among them."""
        return self.server.control.get_inference_statistics(self.name).model_stats[0]


def request_inputs(arrays: Arrays, protocol: str = "grpc") -> list[Any]:
    """Arrays by name as the client of this protocol wants them."""
    inputs = []
    for name, array in arrays.items():
        tensor = CLIENTS[protocol].InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _outputs(answer: Any) -> Any:
    response = answer.get_response()
    return response["outputs"] if isinstance(response, dict) else response.outputs


def mapped_regions(pid: int) -> set[Path]:
    """The shared-memory regions of model processes that the server with this process id maps."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(path) for path in re.findall(r"/dev/shm/triton_python_backend_shm_region_\S+", maps)}


def children(pid: int) -> set[str]:
    """Process ids of what this process has started and still runs: one for each model instance."""
    return {child for task in Path(f"/proc/{pid}/task").iterdir() for child in _children_of_task(task)}


def _children_of_task(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # a thread that has ended
        return []


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def parameter(name: str, value: str) -> Callable[[str], str]:
    """An edit of config.pbtxt that sets a parameter."""

    def edit(config: str) -> str:
        pattern = rf'(key: "{name}" value {{ string_value: )"[^"]*"'
        changed, count = re.subn(pattern, rf'\g<1>"{value}"', config)
        assert count == 1, f"config.pbtxt has no parameter {name}"
        return changed

    return edit


def joined_in_threes(config: str) -> str:
    """An edit of config.pbtxt: three requests of one row each, of whatever height, make one execute."""
    config = config.replace("dims: [ 3, -1, 16 ]", "dims: [ 3, -1, 16 ] allow_ragged_batch: true")
    batching = "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 3000000 }"
    return config.replace("dynamic_batching { }", batching)
