"""Segments as cuDNN graphs.

One form of a segment is one operation graph: either of all its operations (fused) or of its first ones, with
the rest left to torch. Each execution plan that cuDNN's heuristics name for a form is a candidate. A plan
always runs from its serialized form, while tuning too: what is checked is what will be served.

A graph can be planned for a described device on a machine without a GPU (`cudnn.create_device_properties`);
such an engine builds plans and cannot load them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, Sizes, aligned, one_line
from cudnn_fusion.engines.cudnn_operations import append
from cudnn_fusion.engines.folding import Folding, foldings
from cudnn_fusion.evaluate import pointwise
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import (
    ACTIVATIONS,
    CONVOLUTIONS,
    OUTPUT,
    POOL,
    TRANSPOSED,
    Dims,
    Operation,
    Segment,
    empty,
    image_dims,
    packed_strides,
    padded_dims,
)

PLANS_PER_FORM = (48, 8, 8)
"""How many plans of each convolution form are candidates: winners sit far down the lists of whole
chains; where one has plans, shorter forms hardly ever win.

Not in strict fp32, see `CudnnEngine._plan`.
"""


@functools.cache
def _cudnn() -> Any:
    """The frontend, imported when first needed: it is heavy and absent on machines that never plan.

    Once: `load_cudnn` reads the process's memory map, 2 ms, and every run of a plan comes by here.
    """
    from cudnn_fusion.preflight import load_cudnn

    load_cudnn()
    import cudnn

    return cudnn


@dataclass(frozen=True)
class _Form:
    """The first ``head`` operations of a segment as one operation graph; the rest in torch.

    With a ``folding`` the segment is the folded one.
    """

    segment: Segment
    head: int
    plan_limit: int
    as_matmul: bool = False
    folding: Folding | None = None

    @property
    def name(self) -> str:
        first, *kinds = [op.kind for op in self.segment.operations[: self.head]]
        first = "matmul" if self.as_matmul else first
        return "+".join([first if self.folding is None else f"{first}/{self.folding.factor}", *kinds])

    @property
    def operands(self) -> tuple[str, ...]:
        """Operands of the graph in uid order: uid = position + 1, ``y`` last."""
        taken = {"x"} | {op.operand for op in self.segment.operations[: self.head] if op.operand}
        return (*(o.name for o in self.segment.inputs if o.name in taken), OUTPUT)

    @property
    def tail(self) -> tuple[Operation, ...]:
        return self.segment.operations[self.head :]


SEARCHED_KNOBS = 3
"""Knobs with several values that make an engine's combinations worth a search."""
PLANS_PER_MATMUL_FORM = 10
PLANS_PER_BARE_FORM = 24
PLANS_PER_FOLDED_FORM = 12


def forms(segment: Segment, sizes: Sizes) -> list[_Form]:
    """The whole chain; the chain up to its activation; the convolution and its bias.

    A convolution in groups, or a transposed one, also bare: cuDNN has more kernels for them without a bias.
    One that is a matrix product has the first two as such too. Last the whole chain with its last axis
    folded, see `folding`. A pool is left to torch. None for a segment without a convolution.
    """
    if not segment.operations:
        return []
    kinds = [op.kind for op in segment.operations]
    pooled = kinds[-1] == POOL
    heads = [len(kinds) - pooled]
    activation = next((i for i, kind in enumerate(kinds) if kind in ACTIVATIONS), None)
    if activation is not None:
        heads.append(activation + 1)
    fused = list(dict.fromkeys(heads))
    heads.append(2 if kinds[1:2] == ["bias"] else 1)
    found = [
        _Form(segment, head, limit) for head, limit in zip(dict.fromkeys(heads), PLANS_PER_FORM, strict=False)
    ]
    conv = segment.operations[0]
    if 1 not in heads and (conv.kind in TRANSPOSED or conv.attribute("groups") > 1):
        found.append(_Form(segment, 1, PLANS_PER_BARE_FORM))
    if is_matmul(segment, sizes):
        found += [_Form(segment, head, PLANS_PER_MATMUL_FORM, as_matmul=True) for head in fused]
    for folding in [] if pooled else foldings(segment, sizes):
        whole = len(kinds)
        found.append(_Form(folding.segment, whole, PLANS_PER_FOLDED_FORM, False, folding))
        if is_matmul(folding.segment, folding.sizes):
            found.append(_Form(folding.segment, whole, PLANS_PER_MATMUL_FORM, True, folding))
    return found


def form_names(segment: Segment, sizes: Sizes) -> list[str]:
    """Names of all `forms`, as candidates have them."""
    return [form.name for form in forms(segment, sizes)]


def is_matmul(segment: Segment, sizes: Sizes) -> bool:
    """Whether each output element is a sum over the channels of one input element, for tensor cores."""
    conv = segment.operations[0]
    return (
        segment.precision != "fp32"
        and conv.kind not in TRANSPOSED
        and conv.attribute("groups") == 1
        and all(size == 1 for size in (*sizes["w"][2:], *conv.attribute("stride")))
        and not any((*conv.attribute("padding_before"), *conv.attribute("padding_after")))
    )


_Listed = tuple[int, Candidate]
"""A plan's index in its graph, and the plan."""


class CudnnEngine:
    """Plans, builds and runs cuDNN graphs on CUDA device ``device``, or plans for ``target``.

    ``target`` is a device description as `cudnn.create_device_properties` takes it. ``workspace_limit_bytes``
    bars plans that need more.
    """

    name = "cudnn"

    def __init__(
        self,
        device: torch.device,
        target: Mapping[str, Any] | None = None,
        workspace_limit_bytes: int = 1 << 30,
    ) -> None:
        self.device = device
        self.target = target
        self.workspace_limit_bytes = workspace_limit_bytes
        self._threads = threading.local()
        self._planned = functools.lru_cache(maxsize=4)(self._plan)

    def candidates(self, segment: Segment, sizes: Sizes, only: str | None = None) -> list[Candidate]:
        """Plans of all forms, or of the one named ``only``: fused first, cuDNN's order (A, B, FALLBACK).

        Behind a form's plans come further configurations of its kernels that the heuristics do not name.
        """
        found: list[Candidate] = []
        for form in forms(segment, sizes):
            if only not in (None, form.name):
                continue
            try:
                found += [candidate for _, candidate in self._planned(form, _freeze(segment, sizes))[1]]
            except CandidateRejectedError:
                continue
        return found

    def neighbours(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> list[Candidate]:
        """See `Searching.neighbours`: configurations of the same engine with one knob at another value.

        Of the values that some plan of this form has for the knob. An engine of many knobs takes hundreds of
        combinations, of which the heuristics name some thirty.
        """
        form = _form_named(segment, sizes, candidate.form)
        try:
            graph, listed = self._planned(form, _freeze(segment, sizes))
        except CandidateRejectedError:
            return []
        values: dict[str, set[int]] = {}
        for _, other in listed:
            if other.engine_id == candidate.engine_id and other.replayable:
                for name, value in other.knobs:
                    values.setdefault(name, set()).add(value)
        if (
            candidate.engine_id is None
            or sum(len(several) > 1 for several in values.values()) < SEARCHED_KNOBS
        ):
            return []
        named = {other.plan_name for _, other in listed}
        found: list[Candidate] = []
        for name, value in candidate.knobs:
            for other_value in sorted(values.get(name, set()) - {value}):
                knobs = {**dict(candidate.knobs), name: other_value}
                with contextlib.suppress(_cudnn().cudnnGraphNotSupportedError, RuntimeError):
                    index = _create_plan(graph, candidate.engine_id, knobs)
                    _, neighbour = _listed(graph, form, index)
                    if neighbour.replayable and neighbour.plan_name not in named:
                        found.append(neighbour)
        return found

    def unsupported(self, segment: Segment, sizes: Sizes) -> list[tuple[str, str]]:
        """(form, reason) for every form that cuDNN has no plan for."""
        reasons: list[tuple[str, str]] = []
        for form in forms(segment, sizes):
            try:
                self._planned(form, _freeze(segment, sizes))
            except CandidateRejectedError as error:
                reasons.append((form.name, str(error)))
        return reasons

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Builds the plan of this name, else the one with these engine and knobs, and serializes it."""
        cudnn = _cudnn()
        form = _form_named(segment, sizes, candidate.form)
        graph, listed = self._planned(form, _freeze(segment, sizes))
        try:
            index = self._index(graph, listed, candidate)
            graph.build_plan_at_index(index)
            workspace_bytes = int(graph.get_workspace_size_plan_at_index(index))
            if workspace_bytes > self.workspace_limit_bytes:
                raise CandidateRejectedError(
                    f"needs {workspace_bytes} bytes of workspace; the limit is {self.workspace_limit_bytes}"
                )
            notes = tuple(sorted(_last_word(n) for n in graph.get_behavior_notes_for_plan_at_index(index)))
            blob = graph.serialize(as_bytes=True)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError) as error:
            if "Deselecting" in str(error):
                raise CandidateRejectedError("not strict fp32: tensor cores or narrowed inputs") from error
            raise CandidateRejectedError(f"not built: {one_line(error)}") from error
        _, built = _listed(graph, form, index)
        return BuiltPlan(built, bytes(blob), workspace_bytes, notes, str(graph.selected_engine or ""))

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> CudnnPlan:
        """Deserializes. The blob's checksum has been verified before: cuDNN does not check it."""
        if blob is None:
            raise CandidateRejectedError("a cuDNN plan without its blob")
        if self.target is not None:
            raise CandidateRejectedError("planned for a described device: cannot be loaded on this machine")
        form = _form_named(segment, sizes, candidate.form)
        cudnn = _cudnn()
        try:
            graph = cudnn.pygraph(handle=self.handle())
            graph.deserialize(self.handle(), blob)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError) as error:
            raise CandidateRejectedError(f"not loaded: {one_line(error)}") from error
        plan = CudnnPlan(
            graph=graph,
            engine=self,
            names=form.operands,
            uids=tuple(range(1, len(form.operands) + 1)),
            tail=form.tail,
            out_dims=segment.convolved_dims(sizes),
            workspace_bytes=workspace_bytes,
        )
        return plan if form.folding is None else FoldedPlan(**vars(plan), folding=form.folding)

    def stream_handle(self) -> Any:
        """This thread's handle, set to torch's current stream."""
        handle = self.handle()
        _cudnn().set_stream(handle=handle, stream=torch.cuda.current_stream(self.device).cuda_stream)
        return handle

    def handle(self) -> Any:
        """This thread's handle, on any stream. Raises RuntimeError where cuDNN cannot make one."""
        # One handle a thread: cuDNN forbids sharing, and loading a blob swaps a handle's stream for a moment.
        if not hasattr(self._threads, "handle"):
            with torch.cuda.device(self.device):
                self._threads.handle = _cudnn().create_handle()
        return self._threads.handle

    def _plan(self, form: _Form, sizes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Any, list[_Listed]]:
        """The operation graph of a form with its plans listed, none built."""
        cudnn = _cudnn()
        try:
            graph = self._operation_graph(form, dict(sizes) if form.folding is None else form.folding.sizes)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
            if form.segment.precision == "fp32":
                notes = cudnn.numerical_note
                graph.deselect_numeric_notes([notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS])
            graph.check_support()
            count = int(graph.get_execution_plan_count())
            if form.segment.precision != "fp32":
                # Strict fp32 takes all: those that it bars come first (25 of 34), and are refused unbuilt.
                count = min(count, form.plan_limit)
            listed = [_listed(graph, form, index) for index in range(count)]
            if form.segment.precision != "fp32":
                listed += _more_configurations(graph, form, listed)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError) as error:
            raise CandidateRejectedError(f"cuDNN has no plan for {form.name}: {one_line(error)}") from error
        return graph, listed

    def _index(self, graph: Any, listed: Sequence[_Listed], candidate: Candidate) -> int:
        for index, other in listed:
            if other.plan_name == candidate.plan_name:
                return index
        if candidate.engine_id is None or not candidate.replayable:
            raise CandidateRejectedError(f"no plan is called {candidate.plan_name} here")
        knob_types = _cudnn().knob_type.__members__
        unknown = [name for name, _ in candidate.knobs if name not in knob_types]
        if unknown:
            raise CandidateRejectedError(f"this cuDNN frontend has no knob {', '.join(unknown)}")
        return _create_plan(graph, candidate.engine_id, dict(candidate.knobs))

    def _operation_graph(self, form: _Form, sizes: Sizes) -> Any:
        cudnn = _cudnn()
        place: dict[str, Any] = (
            {"handle": self.handle()}
            if self.target is None
            else {
                "device_property": cudnn.create_device_properties(json.dumps(dict(self.target))),
                "sm_version": int(self.target["deviceVer"]) // 10,
            }
        )
        floating = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(intermediate_data_type=floating, compute_data_type=floating, **place)
        tensors = {
            name: graph.tensor(
                name=name,
                uid=uid,
                dim=list(_place(form, name, sizes)[0]),
                stride=list(_place(form, name, sizes)[1]),
                data_type=_data_type(form.segment.operand(name).dtype),
            )
            for uid, name in enumerate(form.operands[:-1], start=1)
        }
        value = tensors["x"]
        out, out_strides = _place(form, OUTPUT, sizes)
        for operation in form.segment.operations[: form.head]:
            if form.as_matmul and operation.kind in CONVOLUTIONS:
                value = graph.matmul(value, tensors["w"])
            else:
                value = append(graph, operation, value, tensors, out)
        value.set_output(True).set_data_type(_data_type(form.segment.operand(OUTPUT).dtype))
        value.set_uid(len(form.operands))
        value.set_dim(list(out))
        value.set_stride(list(out_strides))
        return graph


def _place(form: _Form, name: str, sizes: Sizes) -> tuple[Dims, Dims]:
    """Dims and strides of an operand in a form's graph, in the memory that the segment's operand has.

    As a matrix product x is [1, rows, C], w [1, C, K], a result [1, rows, K], what is per channel [1, 1, K].
    """
    operand = form.segment.operand(name)
    if not form.as_matmul:
        dims = padded_dims(image_dims(sizes[name]), operand.layout)
        return dims, packed_strides(dims, operand.layout)
    outer, channels, *spatial = sizes[name]
    if name == "w":
        return (1, channels, outer), (channels * outer, 1, channels)
    rows = outer * math.prod(spatial)
    return (1, rows, channels), (rows * channels, channels, 1)


@dataclass
class CudnnPlan:
    """A deserialized plan, and the torch operations that follow it if its form does not cover the segment."""

    graph: Any
    engine: CudnnEngine
    names: tuple[str, ...]
    uids: tuple[int, ...]
    tail: tuple[Operation, ...]
    out_dims: tuple[int, ...]
    workspace_bytes: int

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        x = operands["x"]
        head_out = out
        if out is None or self.tail:
            head_out = empty(self.out_dims, "channels_last", x.dtype, x.device)
        assert head_out is not None
        buffers = [aligned(operands[name]) for name in self.names[:-1]]
        pointers = [*(buffer.data_ptr() for buffer in buffers), head_out.data_ptr()]
        self.graph.execute(pointers, workspace, self.engine.stream_handle(), tensor_uids=self.uids)
        if not self.tail:
            return head_out
        result = _run_tail(self.tail, head_out, operands)
        return result if out is None else out.copy_(result)


@dataclass
class FoldedPlan(CudnnPlan):
    """A plan of a folded convolution."""

    folding: Folding

    @property
    def preparation(self) -> Folding:
        """See `Preparing.preparation`."""
        return self.folding

    def prepare(self, operands: Operands) -> dict[str, torch.Tensor]:
        """See `Preparing.prepare`."""
        return self.folding.prepare(operands)

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        if tuple(operands["w"].shape) != self.folding.sizes["w"]:
            operands = self.prepare(operands)
        return super().run(operands, workspace, out)


def _run_tail(tail: tuple[Operation, ...], value: torch.Tensor, operands: Operands) -> torch.Tensor:
    """The operations in torch; a scale with the shift behind it in one kernel."""
    index = 0
    while index < len(tail):
        operation = tail[index]
        following = tail[index + 1] if index + 1 < len(tail) else None
        if operation.kind == "scale" and following is not None and following.kind == "shift":
            scale, shift = operands[str(operation.operand)], operands[str(following.operand)]
            value = torch.addcmul(shift, value, scale)
            index += 2
        else:
            value = pointwise(operation, value, operands)
            index += 1
    return value


def _create_plan(graph: Any, engine_id: int, knobs: Mapping[str, int]) -> int:
    """The index of a new plan of an engine. Raises what cuDNN raises where it takes no such knobs."""
    types = _cudnn().knob_type.__members__
    graph.create_execution_plan(engine_id, {types[name]: value for name, value in knobs.items()})
    return int(graph.get_execution_plan_count()) - 1


def _listed(graph: Any, form: _Form, index: int) -> _Listed:
    name = str(graph.get_plan_name_at_index(index))
    engine_id, knobs = graph.get_engine_and_knobs_at_index(index)
    named = tuple(sorted((_last_word(knob), int(value)) for knob, value in knobs.items()))
    # Knobs that this frontend has no name for all read as NOT_SET: one overwrites the other.
    replayable = "NOT_SET" not in dict(named) and name.count("_k") == len(named)
    return index, Candidate("cudnn", form.name, name, int(engine_id), named, replayable)


def _more_configurations(graph: Any, form: _Form, listed: Sequence[_Listed]) -> list[_Listed]:
    """Kernel configurations of a runtime-compiled engine beyond those that the heuristics name.

    They name two or three of some forty, rarely the fastest. Not for a form that precompiled engines serve
    too: of those the heuristics name many, and each configuration takes a second to compile.
    """
    cudnn = _cudnn()
    knob = cudnn.knob_type.KERNEL_CFG
    highest = {}
    engines = dict.fromkeys(candidate.engine_id for _, candidate in listed)
    for engine_id in engines:
        try:
            knobs = graph.get_knobs_for_engine(engine_id)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError):
            # An engine whose knobs cannot be asked for is precompiled.
            continue
        for found in knobs:
            if found.type == knob:
                highest[engine_id] = int(found.max_value)
    if not highest or (not form.as_matmul and len(highest) < len(engines)):
        return []
    engine_id, last = next(iter(highest.items()))
    named = {candidate.plan_name for _, candidate in listed}
    added: list[_Listed] = []
    for value in range(last + 1):
        try:
            graph.create_execution_plan(engine_id, {knob: value})
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError):  # not for this graph
            continue
        added.append(_listed(graph, form, int(graph.get_execution_plan_count()) - 1))
    return [(index, candidate) for index, candidate in added if candidate.plan_name not in named]


def _form_named(segment: Segment, sizes: Sizes, name: str) -> _Form:
    for form in forms(segment, sizes):
        if form.name == name:
            return form
    raise CandidateRejectedError(f"this segment has no form {name!r}")


def _data_type(dtype: str) -> Any:
    names = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
    return getattr(_cudnn().data_type, names[dtype])


def _freeze(segment: Segment, sizes: Sizes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The sizes in a graph, whose output is no pool's."""
    sizes = {**sizes, OUTPUT: segment.convolved_dims(sizes)}
    return tuple(sorted((name, tuple(dims)) for name, dims in sizes.items()))


def _last_word(value: Any) -> str:
    return str(value).rsplit(".", maxsplit=1)[-1]
