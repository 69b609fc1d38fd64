"""One model instance: opens what a version directory holds, and answers lists of requests."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, not in its __all__

from cudnn_fusion import lowered, preflight
from cudnn_fusion.declarations import TRITON_NAMES
from cudnn_fusion.engines.base import Engine
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
from cudnn_fusion.engines.depthwise import DepthwiseEngine
from cudnn_fusion.engines.inductor import InductorEngine
from cudnn_fusion.engines.stem import StemEngine
from cudnn_fusion.engines.torch_eager import TorchEngine, configure
from cudnn_fusion.environment import (
    Compatibility,
    cpu_compatibility,
    cuda_compatibility,
    current_provenance,
)
from cudnn_fusion.metrics import Labels, Metrics
from cudnn_fusion.plan_cache import ORIGINS, PlanCache, worst
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.requests import (
    BadRequestError,
    Fitting,
    Incoming,
    copy_in,
    cut_out,
    group,
    parse,
)
from cudnn_fusion.retune import retune_in_child, untuned_here
from cudnn_fusion.served_model import LoadReport, ServedModel
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Part
from cudnn_fusion.trust import TrustError, Verifier, distrust

_LOG = logging.getLogger(__name__)

LOWERED = "lowered"
PLANS = "plans"


class ServingError(Exception):
    """A model cannot be served at all; the message says what is wrong and what to do."""


class Clock:
    """Seconds of each part of loading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class Place:
    """A device with the engines that work there and the environment that plans are looked up for."""

    device: torch.device
    engines: Mapping[str, Engine]
    compatibility: Compatibility
    findings: tuple[preflight.Finding, ...] = ()

    @property
    def errors(self) -> list[preflight.Finding]:
        """Findings because of which plans are off."""
        return [finding for finding in self.findings if finding.level == "error"]


def place(device: torch.device) -> Place:
    """Checks the device and opens its engines. On a GPU with preflight errors there is torch alone."""
    engines: dict[str, Engine] = {"torch": TorchEngine(device)}
    if device.type == "cpu":
        return Place(device, engines, cpu_compatibility())
    torch.cuda.set_device(device)
    findings = tuple(preflight.check_gpu(device.index or 0))
    if not any(finding.level == "error" for finding in findings):
        engines["cudnn"] = CudnnEngine(device)
        engines["inductor"] = InductorEngine(device)
        engines["depthwise"] = DepthwiseEngine(device)
        engines["stem"] = StemEngine(device)
        return Place(device, engines, cuda_compatibility(device.index or 0), findings)
    return Place(device, engines, Compatibility("cuda", torch.cuda.get_device_name(device)), findings)


def _retune(
    version_directory: Path,
    settings: Settings,
    here: Place,
    program: lowered.Program,
    stores: Sequence[PlanStore],
) -> None:
    """Tunes into the overlay what is tuned for other environments alone. Never raises."""
    assert settings.plan_overlay is not None
    overlay, budget_s = settings.plan_overlay, settings.retune_budget_s
    buckets = untuned_here([*stores, PlanStore(overlay)], here.compatibility, program.sha256)
    if buckets:
        names = ", ".join(bucket.name for bucket in buckets)
        _LOG.warning("RETUNE=load: not tuned in this environment: %s; tuning, at most %s s", names, budget_s)
        told = retune_in_child(version_directory, overlay, here.device, buckets, budget_s)
        _LOG.warning("RETUNE=load: %s", told)


def instance_device(kind: str, device_id: str) -> torch.device:
    """The device that Triton gave an instance: KIND_GPU does not select it by itself. Raises ServingError."""
    if kind != "GPU":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ServingError(
            "instance_group asks for KIND_GPU, but torch sees no GPU; use KIND_CPU, or install a CUDA "
            "build of torch and check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", int(device_id))


@dataclass
class Instance:
    """What `TritonPythonModel` delegates to."""

    model: ServedModel
    place: Place
    clock: Clock
    report: LoadReport = field(default_factory=LoadReport)
    _fitting: Fitting = field(default_factory=dict)
    _built: int = 0

    @classmethod
    def open(
        cls, version_directory: Path, device: torch.device, settings: Settings, clock: Clock
    ) -> Instance:
        """Reads the lowered program and builds the tuned buckets. Raises ServingError."""
        try:
            program = lowered.read(version_directory / LOWERED)
        except lowered.ProgramError as error:
            raise ServingError(
                f"the exported program cannot be used: {error} (tools/export.py writes it)"
            ) from error
        clock.lap("read")
        configure(program.precision)
        here = place(device)
        for finding in here.findings:
            level = {"error": logging.ERROR, "warning": logging.WARNING}.get(finding.level, logging.INFO)
            _LOG.log(level, "preflight: %s %s", finding.what, finding.do)
        clock.lap("preflight")
        verifier = None
        if settings.plan_trust == "signed":
            try:
                verifier = Verifier(settings.plan_public_key)
            except TrustError as error:
                raise ServingError(f"parameter PLAN_PUBLIC_KEY: {error}") from error
        stores = [PlanStore(version_directory / PLANS, verifier)]
        if settings.plan_overlay is not None:
            # What others could have put there is neither loaded nor run by the process that tunes.
            trusted = not os.path.lexists(settings.plan_overlay) or distrust(settings.plan_overlay) is None
            if settings.retune == "load" and settings.engine != "reference" and trusted:
                _retune(version_directory, settings, here, program, stores)
                clock.lap("retune")
            if (reason := distrust(settings.plan_overlay)) is None:
                stores.insert(0, PlanStore(settings.plan_overlay, verifier))
            else:
                _LOG.warning("PLAN_OVERLAY %.200s is not read: %.300s", settings.plan_overlay, reason)
        cache = PlanCache(
            stores, here.compatibility, current_provenance(here.compatibility.kind), here.engines, device
        )
        instance = cls(ServedModel(program, cache, stores, settings), here, clock)
        clock.lap("weights")
        if device.type == "cuda":
            # Torch's own choice of algorithm is timed only while loading, never for a request.
            torch.backends.cudnn.benchmark = True
        instance.report = instance.model.load()
        if problem := instance.model.why_untuned():
            _LOG.warning("%s: torch serves instead until tools/pretune.py has run here", problem)
        torch.backends.cudnn.benchmark = False
        clock.lap("executors")
        clock.seconds["executors"] -= instance.report.plans_s
        clock.seconds["plans"] = instance.report.plans_s
        if device.type == "cuda":
            # As an untuned size will run: without a search, whose libraries are others.
            instance.model.warm_up()
        clock.lap("warm_up")
        return instance

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raises ServingError when config.pbtxt does not describe the program."""
        program = self.model.program
        batched = int(config.get("max_batch_size", 0)) > 0
        if batched and program.batch_axis is None:
            raise ServingError(
                "max_batch_size is set, but the program has no batch axis along which rows are independent; "
                "set max_batch_size: 0 and give full dims"
            )
        given = {item["name"]: item for item in config["input"]}
        if set(given) != {spec.name for spec in program.inputs}:
            expected = ", ".join(f"{s.name} {TRITON_NAMES[s.dtype]} {s.describe()}" for s in program.inputs)
            raise ServingError(f"inputs are {', '.join(sorted(given))}; the program takes {expected}")
        outputs = {spec.name: spec for spec in program.outputs}
        for item in config["output"]:
            if item["name"] not in outputs:
                raise ServingError(
                    f"output {item['name']!r} is unknown; the program gives {', '.join(outputs)}"
                )
        for specs, items in ((program.inputs, config["input"]), (program.outputs, config["output"])):
            for item in items:
                spec = next(s for s in specs if s.name == item["name"])
                expected = f"TYPE_{TRITON_NAMES[spec.dtype]}"
                if item["data_type"] != expected:
                    raise ServingError(f"{item['name']!r} is {item['data_type']}; the program has {expected}")
                dims = [int(size) for size in item.get("reshape", {}).get("shape", item["dims"])]
                if not self._dims_fit(dims, spec.shape[1:] if batched else spec.shape):
                    after_batch = " after the batch" if batched else ""
                    raise ServingError(
                        f"{item['name']!r} has dims {dims}{after_batch}; the program has {spec.describe()}; "
                        "write -1 for what changes"
                    )

    def _dims_fit(self, dims: Sequence[int], shape: Sequence[lowered.Dim]) -> bool:
        """Whether config.pbtxt's dims allow sizes that the program has; -1 allows every size."""
        ranges = {axis.name: range(axis.minimum, axis.maximum + 1) for axis in self.model.program.axes}
        return len(dims) == len(shape) and all(
            given == -1 or (given == size if isinstance(size, int) else given in ranges.get(size, (given,)))
            for given, size in zip(dims, shape, strict=True)
        )

    def execute(self, requests: Sequence[Any], pb_utils: Any, metrics: Metrics) -> list[Any]:
        """One response for each request, in order."""
        program = self.model.program
        responses: list[Any] = [None] * len(requests)
        incoming: list[Incoming] = []
        for index, request in enumerate(requests):
            try:
                incoming.append(parse(index, request, program, self._fitting))
            except BadRequestError as error:
                responses[index] = _error(pb_utils, str(error), pb_utils.TritonError.INVALID_ARG)
                metrics.add("errors_total", 1, (("reason", "invalid"),))
        for together in [incoming] if len(incoming) == 1 else group(incoming, program.batch_axis):
            self._answer(together, responses, pb_utils, metrics)
        return responses

    def _answer(
        self, requests: Sequence[Incoming], responses: list[Any], pb_utils: Any, metrics: Metrics
    ) -> None:
        """Runs a group; where that fails, each of its requests alone: one does not fail the others."""
        try:
            served = self._run(requests)
        except Exception as error:
            _LOG.error("requests of %s failed: %s", requests[0].bucket.name, error)
            if len(requests) == 1:
                responses[requests[0].index] = _failure(pb_utils, error)
                metrics.add("errors_total", 1, (("reason", "failed"),))
                return
            for request in requests:
                request.outputs = []
                self._answer([request], responses, pb_utils, metrics)
            return
        metrics.add("requests_total", len(requests), served)
        self._count_built(metrics)
        for request in requests:
            responses[request.index] = self._response(request, pb_utils)

    def _run(self, requests: Sequence[Incoming]) -> Labels:
        """Runs a group of requests; gives how it was served."""
        model, axis = self.model, self.model.program.batch_axis
        bucket = requests[0].bucket
        if axis is not None and len(requests) > 1:
            bucket = bucket.with_size(axis, sum(request.rows(axis) for request in requests))
        choice = model.choose(bucket)
        if choice.kind == "exact_shape" and len(requests) == 1:
            axis = None  # The request is the bucket: no rows to lay together or to cut.
        stream = model.resources.stream
        with model.lock:
            if stream is None:
                origin = self._run_parts(requests, choice.parts, axis)
            else:
                with torch.cuda.stream(stream):
                    origin = self._run_parts(requests, choice.parts, axis)
                    stream.synchronize()
        return (("bucket", choice.label), ("choice", choice.kind), ("origin", origin))

    def _run_parts(self, requests: Sequence[Incoming], parts: Sequence[Part], axis: str | None) -> str:
        """Runs each part; the worst origin. Without ``axis`` the first request is the part."""
        origin = ORIGINS[0]
        for part in parts:
            executor, _ = self.model.executor(part.bucket)
            if axis is None and executor.on_cpu:
                outputs = executor.run(requests[0].tensors)
                requests[0].outputs = [output.contiguous() for output in outputs]
            else:
                copy_in(requests, part, axis, executor.inputs)
                cut_out(requests, part, axis, executor.run(), executor.captured)
            origin = worst((origin, executor.origin))
        return origin

    def _response(self, request: Incoming, pb_utils: Any) -> Any:
        # By DLPack: an array of numpy 2 arrives empty on older servers, and BF16 has no numpy type. From the
        # CPU as a capsule, which is faster; for one of a GPU tensor the server would not wait.
        tensors = [
            pb_utils.Tensor.from_dlpack(spec.name, to_dlpack(tensor) if tensor.is_cpu else tensor)
            for spec, tensor in zip(self.model.program.outputs, request.outputs, strict=True)
            if spec.name in request.requested
        ]
        return pb_utils.InferenceResponse(tensors)

    def report_load(self, metrics: Metrics) -> None:
        """Sets the metrics that loading decides."""
        origins: Counter[str] = Counter()
        for executor in self.model.live:
            origins.update(executor.origins)
        for origin, count in origins.items():
            metrics.set("segments", count, origin=origin)
        metrics.set("buckets", len(self.report.buckets), state="tuned")
        metrics.set("buckets", len(self.report.skipped), state="skipped")
        for part, seconds in self.clock.seconds.items():
            metrics.set("load_seconds", seconds, part=part)
        metrics.set("bytes", self.model.resources.weight_bytes, kind="weights")
        metrics.set("bytes", self.model.resources.workspace.numel(), kind="workspace")
        metrics.set("bytes", sum(e.bytes for e in self.model.live), kind="executors")
        metrics.set("preflight_errors", len(self.place.errors))
        # The server times no candidates.
        metrics.add("candidates_total", 0, (("stage", "timed"),))
        metrics.add("candidates_total", 0, (("stage", "built"),))
        self._count_built(metrics)
        metrics.flush()

    def _count_built(self, metrics: Metrics) -> None:
        """Adds what was built since: in a child process, for recipes and heuristics."""
        built = self.model.cache.loads["planned"]
        if built != self._built:
            metrics.add("candidates_total", built - self._built, (("stage", "built"),))
            self._built = built

    def describe(self) -> str:
        """One line for the log: what is served, in which time it was loaded, what it takes."""
        origins: Counter[str] = Counter()
        for executor in self.model.live:
            origins.update(executor.origins)
        seconds = ", ".join(f"{part} {value:.2f}" for part, value in self.clock.seconds.items())
        taken = {executor.bucket: executor.bytes / 2**20 for executor in self.model.live}
        buckets = " ".join(f"{b.name} ({taken.get(b, 0.0):.1f} MiB)" for b in self.report.buckets) or "none"
        text = (
            f"program {self.model.program.sha256[:12]} {self.model.program.precision} "
            f"on {self.place.device}; tuned buckets: {buckets}; segments: {dict(origins)}; "
            f"seconds: {seconds}; MiB: weights {self.model.resources.weight_bytes / 2**20:.1f}, "
            f"workspace {self.model.resources.workspace.numel() / 2**20:.1f}, "
            f"buckets {sum(taken.values()):.1f}"
        )
        for note in (*self.report.skipped, *self.model.reasons()):
            text += f"\n  {note}"
        return text

    def close(self) -> None:
        """Frees executors and stops background planning."""
        self.model.close()
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
            torch.cuda.empty_cache()


def _failure(pb_utils: Any, error: Exception) -> Any:
    """A failed run as a response: a value that indexes out of range is the request's own fault."""
    if isinstance(error, IndexError):
        message = f"{error}: a value of this request is outside of the range that the model takes"
        return _error(pb_utils, message, pb_utils.TritonError.INVALID_ARG)
    return _error(pb_utils, str(error), pb_utils.TritonError.INTERNAL)


def _error(pb_utils: Any, message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
