"""Small lowered programs, and stand-ins for an engine and for a server's requests."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, ReadyPlan, Sizes
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.environment import Compatibility, Provenance, cpu_compatibility, current_provenance
from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate
from cudnn_fusion.plan_cache import PlanCache
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.program import export_program
from cudnn_fusion.segment import TRANSPOSED, Operand, Operation, Segment, per_channel_dims
from cudnn_fusion.served_model import ServedModel
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.tuner import Tuner

CPU = torch.device("cpu")

# Tensors here are tiny: threads would only wait for each other, long ones on a machine that does other work.
torch.set_num_threads(1)


def program_of(module: nn.Module, *inputs: str, precision: str = "fp32") -> Program:
    """The lowered program of ``module`` for inputs declared as ``NAME:DTYPE[...]``."""
    declarations = [InputDeclaration.parse(text) for text in inputs or ("x:FP32[batch=1..64,3,8,8]",)]
    return export_program(module.eval(), declarations, precision)[1]


class Chains(nn.Module):
    """Functions of one input, each of which gives an output of its own."""

    def __init__(self, chains: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(chain(x) for chain in self.chains)


class Block(nn.Module):
    """conv + relu, conv + residual + relu, mean: two different segments, rows independent."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return torch.relu(self.second(y) + y).mean((2, 3))


class Twins(nn.Module):
    """Two layers of equal shape and other weights: one key."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()


class Line(nn.Module):
    """A convolution along a length that changes from request to request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(2, 3, (5, 1), padding=(2, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


@functools.cache
def block(seed: int = 0) -> Program:
    """`Block`, exported for 1 to 64 rows."""
    return program_of(Block(seed))


@functools.cache
def twins() -> Program:
    """`Twins`, exported for 1 to 64 rows."""
    return program_of(Twins())


@functools.cache
def line() -> Program:
    """`Line`, exported for 1 to 8 rows and lengths 4 to 400."""
    return program_of(Line(), "x:FP32[batch=1..8,2,length=4..400,1]")


def write_version(model: Path, program: Program, version: int = 1) -> Program:
    """Writes a program as a version of a model directory; gives it with its content hash."""
    return lowered.write(program, model / str(version) / "lowered")


def with_hash(program: Program) -> Program:
    """The program as if it had been written: with some content hash."""
    weights = [weight.double().sum().item() for weight in program.weights.values()]
    return replace(program, sha256=hashlib.sha256(repr((program.nodes, weights)).encode()).hexdigest())


def run_in_torch(program: Program, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the program gives with nothing replaced."""
    return Interpreter(program, program.weights, CPU).run(inputs)


def run_with_sites(program: Program, *inputs: torch.Tensor, form: str = REFERENCE_FORM) -> list[torch.Tensor]:
    """What an executor gives whose segments are served by a torch form, or by the reference."""
    resources = Resources(program, partition(program), CPU)
    dims = {
        axis: size
        for spec, tensor in zip(program.inputs, inputs, strict=True)
        for axis, size in zip(spec.shape, tensor.shape, strict=True)
        if isinstance(axis, str)
    }
    bucket = Bucket.of(dims)
    cache = cache_of([])
    served = []
    for site, sizes in zip(resources.partition.sites, resources.segment_sizes(bucket), strict=True):
        plan = cache.reference(site.segment, sizes, "")
        candidate = Candidate("torch", form)
        if candidate in TorchEngine(CPU).candidates(site.segment, sizes):
            plan = replace(plan, ready=TorchEngine(CPU).load(site.segment, sizes, candidate, None, 0))
        served.append(plan)
    executor = Executor(resources, bucket, served, capture=False)
    for target, source in zip(executor.inputs, inputs, strict=True):
        target.copy_(source)
    return executor.run()


def conv_segment(
    *tail: Operation,
    kind: str = "conv2d",
    dtype: str = "float32",
    precision: str = "fp32",
    extra: Sequence[Operand] = (),
    **attributes: object,
) -> Segment:
    """A convolution, with default attributes where none are given, then ``tail``, which reads ``extra``."""
    zeros, ones = ((value,) * int(kind[-2]) for value in (0, 1))
    sizes = {"padding_before": zeros, "padding_after": zeros, "stride": ones, "dilation": ones}
    last = {"output_padding": zeros} if kind in TRANSPOSED else {}
    given = {**sizes, "groups": 1, **last, **attributes}
    conv = Operation(kind, "w", tuple(given.items()))
    operands = (
        Operand("x", dtype, "channels_last", "input"),
        Operand("w", dtype, "channels_last", "weight"),
        *extra,
        Operand("y", dtype, "channels_last", "output"),
    )
    return Segment((conv, *tail), operands, precision)


def bias_operand(dtype: str = "float32") -> Operand:
    """The operand of a ``bias`` operation."""
    return Operand("bias", dtype, "channels_last", "weight")


def sizes_of(segment: Segment, x: tuple[int, ...], w: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Dims of every operand, from those of ``x`` and ``w``."""
    sizes: dict[str, tuple[int, ...]] = {"x": x, "w": w}
    y = segment.output_dims(sizes)
    for operand in segment.operands[2:]:
        per_channel = operand.role == "weight"
        sizes[operand.name] = per_channel_dims(y[1], len(y)) if per_channel else y
    return sizes


def cache_of(stores: Sequence[PlanStore], **engines: object) -> PlanCache:
    """A plan cache of this CPU with torch's engine and those given by name."""
    available = {"torch": TorchEngine(CPU), **engines}
    return PlanCache(stores, cpu_compatibility(), current_provenance("cpu"), available, CPU)  # type: ignore[arg-type]


def tuner_of(
    program: Program,
    store: PlanStore,
    *,
    engines: Sequence[object] | None = None,
    known: Sequence[PlanStore] = (),
    unfinished: Sequence[PlanStore] = (),
    compatibility: Compatibility | None = None,
    provenance: Provenance | None = None,
) -> Tuner:
    """A tuner for this CPU, with torch's engine unless others are given."""
    return Tuner(
        Resources(program, partition(program), CPU),
        [TorchEngine(CPU)] if engines is None else engines,  # type: ignore[arg-type]
        compatibility or cpu_compatibility(),
        provenance or current_provenance("cpu"),
        store,
        known,
        unfinished,
    )


def served(
    program: Program, store: PlanStore, engines: dict[str, object] | None = None, **settings: object
) -> ServedModel:
    """A served model over one plan store."""
    return ServedModel(program, cache_of([store], **(engines or {})), [store], Settings(**settings))  # type: ignore[arg-type]


Run = Callable[[ReadyPlan, Operands, torch.Tensor | None], torch.Tensor]


@dataclass
class FakePlan:
    """Torch's result, after ``behaviour`` had its way with it."""

    ready: ReadyPlan
    behaviour: Run
    workspace_bytes: int = 0

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `ReadyPlan.run`."""
        return self.behaviour(self.ready, operands, out)


def right(ready: ReadyPlan, operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    """A behaviour without fault."""
    return ready.run(operands, None, out)


@dataclass
class FakeEngine:
    """An engine whose candidates' names choose a behaviour; counts what it is asked to do.

    ``refused`` maps names to the reason why they cannot be built.
    """

    behaviours: dict[str, Run]
    refused: dict[str, str] = field(default_factory=dict)
    name: str = "cudnn"
    built: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def candidates(self, segment: Segment, sizes: Sizes) -> list[Candidate]:
        """One for each behaviour and each refusal."""
        return [Candidate(self.name, "fake", name) for name in (*self.behaviours, *self.refused)]

    def unsupported(self, segment: Segment, sizes: Sizes) -> list[tuple[str, str]]:
        """Nothing is."""
        return []

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """The candidate's name is its blob."""
        self.built.append(candidate.plan_name)
        if candidate.plan_name in self.refused:
            raise CandidateRejectedError(self.refused[candidate.plan_name])
        return BuiltPlan(candidate, candidate.plan_name.encode(), 0)

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> FakePlan:
        """Binds the behaviour, if the blob is what `build` has made."""
        self.loaded.append(candidate.plan_name)
        if blob != candidate.plan_name.encode():
            raise CandidateRejectedError(f"not loaded: no plan begins with {(blob or b'')[:8]!r}")
        if candidate.plan_name not in self.behaviours:
            raise CandidateRejectedError(f"no behaviour {candidate.plan_name!r}")
        ready = TorchEngine(CPU).load(segment, sizes, Candidate("torch", REFERENCE_FORM), None, 0)
        return FakePlan(ready, self.behaviours[candidate.plan_name])


@dataclass
class GivenTensor:
    """A request's tensor, as the server hands it over."""

    given_name: str
    tensor: torch.Tensor
    cpu: bool = True

    def name(self) -> str:
        """Its name."""
        return self.given_name

    def is_cpu(self) -> bool:
        """Where it lies."""
        return self.cpu

    def __dlpack__(self, **arguments: object) -> object:
        return self.tensor.__dlpack__(**arguments)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


@dataclass
class GivenRequest:
    """A server's request."""

    tensors: list[GivenTensor]
    outputs: list[str]

    def inputs(self) -> list[GivenTensor]:
        """Its input tensors."""
        return self.tensors

    def requested_output_names(self) -> list[str]:
        """What it asks for."""
        return self.outputs


def request_of(program: Program, **tensors: torch.Tensor) -> GivenRequest:
    """A request for all outputs."""
    return GivenRequest(
        [GivenTensor(n, t) for n, t in tensors.items()], [spec.name for spec in program.outputs]
    )
