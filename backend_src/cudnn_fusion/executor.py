"""One bucket of one model, ready to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_fusion import cuda_graphs
from cudnn_fusion.engines.base import Preparing, ReadyPlan, Sizes
from cudnn_fusion.interpreter import Interpreter, Replacement, infer_shapes, recorded_shapes
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import Partition
from cudnn_fusion.plan_cache import Served, worst
from cudnn_fusion.segment import SegmentSite, empty, per_channel_dims, to_layout
from cudnn_fusion.shapes import Bucket

WARM_UP_RUNS = 2


@dataclass(frozen=True)
class Made:
    """The workspace and the weights as plans read them, at one time."""

    workspace: torch.Tensor
    prepared: dict[Hashable, Mapping[str, torch.Tensor]]


@dataclass
class Resources:
    """What all executors of an instance share: the weights, one workspace, one CUDA-graph pool, one stream.

    Executors run in order on ``stream``; the outputs of one leave its buffers before the next runs.
    ``exported`` is the program whose answers count where ``program`` is what a device runs instead.
    """

    program: Program
    partition: Partition
    device: torch.device
    exported: Program | None = None
    weights: Mapping[str, torch.Tensor] = field(init=False)
    stream: torch.cuda.Stream | None = field(init=False, default=None)
    pool: Any = field(init=False, default=None)
    workspace: torch.Tensor = field(init=False)
    _prepared: dict[Hashable, Mapping[str, torch.Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = _laid_out(self.program, self.partition, self.device)
        self.workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self.pool = torch.cuda.graph_pool_handle()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each storage once, also of what plans have made of them."""
        prepared = [weight for weights in self._prepared.values() for weight in weights.values()]
        storages = {
            w.untyped_storage().data_ptr(): w.untyped_storage().nbytes()
            for w in (*self.weights.values(), *prepared)
        }
        return sum(storages.values())

    def weights_of(self, site: SegmentSite, ready: ReadyPlan) -> Mapping[str, torch.Tensor]:
        """A site's weights by operand name, as a plan reads them; executors of all buckets share them."""
        weights = site_weights(site, self.weights)
        if not isinstance(ready, Preparing):
            return weights
        key = (tuple(site.value(name) for name in weights), ready.preparation)
        if key not in self._prepared:
            self._prepared[key] = ready.prepare(weights)
        return self._prepared[key]

    def workspace_of(self, size_bytes: int) -> torch.Tensor:
        """The shared workspace, grown if it is smaller; captured graphs keep the one they were made with."""
        if self.workspace.numel() < size_bytes:
            self.workspace = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return self.workspace

    def made(self) -> Made:
        """What has been made for executors so far."""
        return Made(self.workspace, dict(self._prepared))

    def drop_since(self, made: Made) -> None:
        """Frees what was made since, for an executor that is not kept."""
        self.workspace, self._prepared = made.workspace, made.prepared
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def segment_sizes(self, bucket: Bucket) -> list[Sizes]:
        """Dims of every operand of every site at a bucket, in the order of ``partition.sites``."""
        shapes = recorded_shapes(self.program, dict(bucket.sizes))
        sites = self.partition.sites
        if not all(site.value(operand.name) in shapes for site in sites for operand in site.segment.operands):
            shapes = infer_shapes(self.program, dict(bucket.sizes))
        return [site_sizes(site, shapes, self.program) for site in sites]


def site_sizes(site: SegmentSite, shapes: Mapping[str, tuple[int, ...]], program: Program) -> Sizes:
    """Dims of a site's operands; per-channel ones are [1,K,1,...] however the program shapes them."""
    sizes: dict[str, tuple[int, ...]] = {}
    for operand in site.segment.operands:
        if operand.role == "weight":
            sizes[operand.name] = _weight_dims(site, operand.name, program.weights)
        else:
            sizes[operand.name] = shapes[site.value(operand.name)]
    return sizes


def site_weights(site: SegmentSite, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A site's weights by operand name, with the dims that `site_sizes` gives; views, no copies, if they are
    laid out as the site's operands."""
    bound: dict[str, torch.Tensor] = {}
    for operand in site.segment.inputs:
        if operand.role == "weight":
            weight = weights[site.value(operand.name)]
            shaped = weight.reshape(_weight_dims(site, operand.name, weights))
            bound[operand.name] = to_layout(shaped, operand.layout)
    return bound


def _weight_dims(site: SegmentSite, name: str, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    weight = weights[site.value(name)]
    if not site.segment.is_per_channel(name):
        return tuple(weight.shape)
    return per_channel_dims(weight.numel(), weights[site.value("w")].dim())


class Executor:
    """Static inputs, the program with its segments served by plans, and on a GPU one CUDA graph of it all.

    ``served`` is in the order of ``partition.sites``. With ``capture`` False nothing is captured, as for a
    size that is served once. Building runs the program, so it is never done on the request path of a tuned
    bucket. ``on_cpu`` says whether `run` takes a caller's tensors.
    """

    def __init__(self, resources: Resources, bucket: Bucket, served: Sequence[Served], capture: bool) -> None:
        self.bucket = bucket
        self.origins = Counter(s.origin for s in served)
        self.origin = worst(self.origins)
        self.on_cpu = resources.device.type == "cpu"
        self._resources = resources
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[torch.Tensor] = []
        device = resources.device
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        workspace = resources.workspace_of(max((s.ready.workspace_bytes for s in served), default=0))
        self._interpreter = Interpreter(
            resources.program,
            resources.weights,
            device,
            [
                _replacement(site, plan, resources.weights_of(site, plan.ready), workspace)
                for site, plan in zip(resources.partition.sites, served, strict=True)
            ],
        )
        self.inputs = _static_inputs(resources, bucket)
        # An output may be an input or a weight itself, and must not change with it after it was handed out.
        self._static = {_storage(t) for t in (*self.inputs, *resources.weights.values())}
        if capture and device.type == "cuda":
            self._capture()
        self.bytes = sum(t.numel() * t.element_size() for t in self.inputs)
        if device.type == "cuda":
            self.bytes = max(self.bytes, torch.cuda.memory_reserved(device) - before)

    @property
    def captured(self) -> bool:
        """Whether outputs are the CUDA graph's own buffers, to be copied before any executor runs again."""
        return self._graph is not None

    def run(self, given: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Runs on what ``inputs`` hold; the outputs, in any layout, are valid until any executor runs again.

        On a CPU tensors of the same dims and types, at any alignment, can be ``given`` in place of
        ``inputs``, so that nothing is copied. On a GPU the work is queued on the shared stream, which the
        caller has made current.
        """
        if self._graph is None:
            outputs = self._interpreter.run(given or self.inputs, row_major=False)
            callers = {_storage(t) for t in given}
            return [
                o.clone() if (storage := _storage(o)) in self._static or storage in callers else o
                for o in outputs
            ]
        self._graph.replay()
        return self._outputs

    def _capture(self) -> None:
        stream = self._resources.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._resources.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._interpreter.run(self.inputs)
        stream.synchronize()
        self._graph, self._outputs = cuda_graphs.capture(
            lambda observe: self._interpreter.run(self.inputs, observe, row_major=False),
            stream,
            self._resources.pool,
            {site.value("y"): _later_inputs(site) for site in self._resources.partition.sites},
        )


def input_dims(shape: Sequence[int | str], bucket: Bucket) -> tuple[int, ...]:
    """An input's dims at a bucket: named axes take the bucket's sizes."""
    return tuple(size if isinstance(size, int) else bucket.size(size) for size in shape)


def _static_inputs(resources: Resources, bucket: Bucket) -> list[torch.Tensor]:
    """Zeroed input buffers; those that a segment reads lie as it wants them: filling them converts."""
    layouts = {
        site.value(operand.name): operand.layout
        for site in reversed(resources.partition.sites)
        for operand in site.segment.inputs
        if operand.role == "input"
    }
    return [
        empty(
            input_dims(spec.shape, bucket),
            layouts.get(spec.value, "row_major"),
            getattr(torch, spec.dtype),
            resources.device,
        ).zero_()
        for spec in resources.program.inputs
    ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _replacement(
    site: SegmentSite, served: Served, weights: Mapping[str, torch.Tensor], workspace: torch.Tensor
) -> Replacement:
    changing = [(o.name, o.layout) for o in site.segment.inputs if o.role == "input"]
    fence = None
    if workspace.is_cuda and _later_inputs(site):
        fence = torch.zeros(1, dtype=torch.uint8, device=workspace.device)
    return Replacement(
        covers=site.covers,
        inputs=tuple(site.value(name) for name, _ in changing),
        output=site.value("y"),
        run=_segment_call(changing, weights, served, workspace, fence),
    )


def _later_inputs(site: SegmentSite) -> list[str]:
    """Values of inputs besides ``x``: kernels may read them without waiting for their writer."""
    return [site.value(o.name) for o in site.segment.inputs if o.role == "input" and o.name != "x"]


def _segment_call(
    changing: Sequence[tuple[str, str]],
    bound: Mapping[str, torch.Tensor],
    served: Served,
    workspace: torch.Tensor,
    fence: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    run = served.ready.run

    def call(*values: torch.Tensor) -> torch.Tensor:
        if fence is not None and not torch.cuda.is_current_stream_capturing():
            # No kernel starts before this has ended, see `cuda_graphs`.
            fence.zero_()
        operands = dict(bound)
        for (name, layout), value in zip(changing, values, strict=True):
            operands[name] = to_layout(value, layout)
        return run(operands, workspace)

    return call


def _laid_out(program: Program, partition: Partition, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights on the device, each once, as the first segment that reads it wants it."""
    layouts = {
        site.value(operand.name): operand.layout
        for site in reversed(partition.sites)
        for operand in site.segment.inputs
        if operand.role == "weight" and not site.segment.is_per_channel(operand.name)
    }
    return {
        name: to_layout(weight.to(device), layouts[name]) if name in layouts else weight.to(device)
        for name, weight in program.weights.items()
    }
