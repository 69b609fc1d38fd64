"""Sending frames to a served model, and learning from the metrics what served them."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype

from cudnn_fusion.metrics import FLUSH_S
from cudnn_fusion.triton_server import TritonServer

PROTOCOLS = ("grpc", "http")

# A proxy named in the environment is not for this machine's own server.
os.environ.setdefault("no_grpc_proxy", "127.0.0.1,localhost")

Values = npt.NDArray[Any]
T = TypeVar("T")

SETTLE_S = 4 * FLUSH_S
"""Seconds after which an answered request is counted."""

_SAMPLE = re.compile(r"^cudnn_fusion_requests_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Route:
    """What served a request: the bucket's name, how it was chosen, and the worst origin of its plans."""

    bucket: str
    choice: str
    origin: str


def requests_by_route(metrics: str, model: str) -> Counter[Route]:
    """How many requests of ``model`` each route has served, from the text of the metrics endpoint."""
    counts: Counter[Route] = Counter()
    for sample in _SAMPLE.finditer(metrics):
        labels = dict(_LABEL.findall(sample["labels"]))
        if labels.get("model") == model:
            route = Route(labels["bucket"], labels["choice"], labels["origin"])
            counts[route] += int(float(sample["count"]))
    return counts


def tell(routes: Callable[[], Counter[Route]], call: Callable[[], T]) -> tuple[T, Counter[Route]]:
    """What ``call`` gives, and the routes that it added; empty when none are counted within 5 s.

    A model's counts reach the server a moment after the answers: those of earlier requests are waited for.
    """
    time.sleep(SETTLE_S)
    before = routes()
    result = call()
    deadline = time.monotonic() + 5.0
    while not (new := routes() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result, new


class ServingClient:
    """gRPC and HTTP connections to ``server``. Close it before the server is stopped: Triton waits for open
    HTTP connections."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._clients: dict[str, Any] = {
            "grpc": tritonclient.grpc.InferenceServerClient(server.grpc_url),
            "http": tritonclient.http.InferenceServerClient(server.http_url, network_timeout=60.0),
        }
        self._known_names: dict[str, tuple[str, str]] = {}
        self._modules: dict[str, Any] = {"grpc": tritonclient.grpc, "http": tritonclient.http}

    def __enter__(self) -> ServingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in self._clients.values():
            client.close()

    def infer(self, model: str, values: Values, protocol: str = "grpc") -> Values:
        """The first output of ``model``, as float32, for ``values`` of the model's input type."""
        input_name, output_name = self._names(model)
        datatype = np_to_triton_dtype(values.dtype)
        tensor = self._modules[protocol].InferInput(input_name, values.shape, datatype)
        tensor.set_data_from_numpy(values)
        answer = self._clients[protocol].infer(model, [tensor])
        return np.asarray(answer.as_numpy(output_name), dtype=np.float32)

    def infer_and_tell(self, model: str, values: Values, protocol: str) -> tuple[Values, Route | None]:
        """The answer, and what served it; None when the metrics do not tell. No other client may be busy."""
        answer, routes = tell(
            lambda: requests_by_route(self._server.metrics(), model),
            lambda: self.infer(model, values, protocol),
        )
        return answer, next(iter(routes), None)

    def _names(self, model: str) -> tuple[str, str]:
        """Names of the first input and the first output, asked for once."""
        if model not in self._known_names:
            metadata = self._clients["grpc"].get_model_metadata(model)
            self._known_names[model] = (metadata.inputs[0].name, metadata.outputs[0].name)
        return self._known_names[model]


def interleaved_times_ms(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Wall times of each call in milliseconds, ``rounds`` of each, in turn, after some that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-10, rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number >= 0:
                times[name].append(1e3 * (time.perf_counter() - started))
    return times
