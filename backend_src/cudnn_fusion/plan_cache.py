"""The layered look-up of plans for segments.

==============  ==============================================================================
origin          what serves
==============  ==============================================================================
``exact``       the winner tuned for these sizes in a compatible environment, loaded from its blob
``recipe``      a winner of another environment, planned anew here and checked (marked stale)
``heuristic``   cuDNN's first choice, planned in a child process and checked
``reference``   torch, one call an operation
==============  ==============================================================================

Every layer answers with a plan that has been checked on this device since it was loaded, or with the reason
why it has none; nothing here raises because of what a store holds.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cudnn_fusion import accuracy
from cudnn_fusion.engines.base import FAILURES, BuiltPlan, Engine, ReadyPlan, Sizes, one_line
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.environment import Compatibility, Provenance, compare
from cudnn_fusion.plan import Candidate, Plan, PlanKey
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.planner import PlanRequest, plan_in_child
from cudnn_fusion.regions import Region
from cudnn_fusion.segment import Segment

ORIGINS = ("exact", "recipe", "heuristic", "reference")
"""Best first."""

OF_KERNELS = frozenset({"depthwise", "inductor", "stem"})
"""Engines whose blob is machine code and its launches, whatever library versions are about."""

MAX_KNOWN = 2048
"""How many answers are kept: requests of ever new sizes must not fill the memory."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What serves a segment at given sizes, and why.

    ``reason`` says why no better layer does; empty for ``exact``. ``stale`` lists differences of provenance.
    ``stored`` is the record behind an ``exact`` or ``recipe`` plan.
    """

    origin: str
    ready: ReadyPlan
    candidate: Candidate
    reason: str = ""
    stale: tuple[str, ...] = ()
    stored: Plan | None = None


def worst(origins: Iterable[str]) -> str:
    """The worst of some origins; ``exact`` for none, as a program without segments is served as planned."""
    return max(origins, key=ORIGINS.index, default="exact")


class PlanCache:
    """Plans for one model instance on one device. Not thread-safe: its owner serialises calls.

    ``stores`` are read in order (overlay first). ``engines`` maps names to engines of this device.
    """

    def __init__(
        self,
        stores: Sequence[PlanStore],
        compatibility: Compatibility,
        provenance: Provenance,
        engines: Mapping[str, Engine],
        device: torch.device,
    ) -> None:
        self.stores = tuple(stores)
        self.compatibility = compatibility
        self.provenance = provenance
        self.engines = engines
        self.device = device
        self.loads: Counter[str] = Counter()
        """How often each layer answered, by origin, plus ``planned``: plans built in child processes."""
        self._torch = TorchEngine(device)
        self._known: OrderedDict[PlanKey, Served] = OrderedDict()

    def find(self, segment: Segment, sizes: Sizes) -> Served:
        """``exact`` or ``reference``: reads, loads and checks, but plans nothing."""
        key = segment.key(sizes, accuracy.VALIDATION)
        if key not in self._known:
            self._remember(key, self._exact(segment, sizes, key))
        return self._known[key]

    def plan(self, wanted: Sequence[tuple[Segment, Sizes]]) -> list[Served]:
        """``recipe`` or ``heuristic`` for each segment that `find` answers with ``reference``.

        Plans in one child process, which may take seconds: never called on the request path.
        """
        requests = self.missing(wanted)
        for request, answer in zip(requests, self.build_missing(requests), strict=True):
            self.accept(request, answer)
        return [self.find(segment, sizes) for segment, sizes in wanted]

    def missing(self, wanted: Sequence[tuple[Segment, Sizes]]) -> list[PlanRequest]:
        """A request for each segment that `find` answers with ``reference``, each key once.

        Without cuDNN there is nothing to plan; only recipes for torch are then asked for.
        """
        requests: dict[PlanKey, PlanRequest] = {}
        for segment, sizes in wanted:
            if self.find(segment, sizes).origin == "reference":
                request = PlanRequest(segment, dict(sizes), self._recipes(segment, sizes))
                if "cudnn" in self.engines or self._at_hand(request) is not None:
                    requests[segment.key(sizes, accuracy.VALIDATION)] = request
        return list(requests.values())

    def build_missing(self, requests: Sequence[PlanRequest]) -> list[BuiltPlan | str]:
        """Plans in a child process; touches neither the device nor this cache."""
        at_hand = [self._at_hand(request) for request in requests]
        planned = [request for request, known in zip(requests, at_hand, strict=True) if known is None]
        answers = iter(plan_in_child(planned, self.device) if planned else [])
        return [known or next(answers) for known in at_hand]

    def _at_hand(self, request: PlanRequest) -> BuiltPlan | None:
        """What needs no planning: torch, where it won in another environment or nothing else can be planned,
        and kernels of another environment, which hold no more than machine code for this kind of GPU."""
        first = request.recipes[0] if request.recipes else None
        if first is not None and first.engine == "torch":
            return BuiltPlan(first, None, 0)
        if first is not None and first.engine in OF_KERNELS:
            kernels = self._kernels_elsewhere(request.segment.key(request.sizes, accuracy.VALIDATION))
            if kernels is not None:
                return kernels
        return (
            BuiltPlan(Candidate("torch", REFERENCE_FORM), None, 0)
            if isinstance(request.segment, Region)
            else None
        )

    def _kernels_elsewhere(self, key: PlanKey) -> BuiltPlan | None:
        capability, usable = self.compatibility.compute_capability, OF_KERNELS & self.engines.keys()
        for store in self.stores:
            for other, plan in store.find_elsewhere(self.compatibility, key):
                if plan.candidate.engine in usable and other.compute_capability == capability:
                    found = store.find(other, key)
                    if isinstance(found, Found):
                        return BuiltPlan(plan.candidate, found.blob, plan.workspace_bytes)
        return None

    def accept(self, request: PlanRequest, answer: BuiltPlan | str) -> None:
        """Loads a planned segment, compares it with the reference and keeps it if it is right."""
        segment, sizes = request.segment, request.sizes
        key = segment.key(sizes, accuracy.VALIDATION)
        reason = self.find(segment, sizes).reason
        if isinstance(answer, str):
            self._remember(key, self.reference(segment, sizes, f"{reason}; {answer}"))
            return
        if answer.candidate.engine == "cudnn":
            self.loads["planned"] += 1
        labels = [candidate.label() for candidate in request.recipes]
        origin = "recipe" if answer.candidate.label() in labels else "heuristic"
        served = self._compared(segment, sizes, origin, None, answer)
        if isinstance(served, str):
            _LOG.warning("a planned %s is not used: %s", segment.describe(), served)
            served = self.reference(segment, sizes, f"{reason}; {origin}: {served}")
        self._remember(key, replace(served, reason=served.reason or reason))

    def reference(self, segment: Segment, sizes: Sizes, reason: str) -> Served:
        """Torch, which serves when nothing better does."""
        candidate = Candidate("torch", REFERENCE_FORM)
        ready = self._torch.load(segment, sizes, candidate, None, 0)
        return Served("reference", ready, candidate, reason)

    def _remember(self, key: PlanKey, served: Served) -> None:
        self._known[key] = served
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            # Executors keep what they use; the rest is found again when it is asked for.
            self._known.popitem(last=False)
        self.loads[served.origin] += 1

    def _exact(self, segment: Segment, sizes: Sizes, key: PlanKey) -> Served:
        reasons: list[str] = []
        for store in self.stores:
            found = store.find(self.compatibility, key)
            if not isinstance(found, Found):
                reasons.append(found.reason)
                continue
            served = self._checked(segment, sizes, "exact", found.plan, found.blob)
            if isinstance(served, Served):
                return served
            reasons.append(served)
            _LOG.warning("a stored plan is not used: %s: %s", segment.describe(), served)
        return self.reference(segment, sizes, "; ".join(dict.fromkeys(reasons)) or "no plan store")

    def _checked(
        self, segment: Segment, sizes: Sizes, origin: str, plan: Plan, blob: bytes | None
    ) -> Served | str:
        """Loads a stored plan and compares it with its stored sampled outputs; the reason if it fails."""
        built = BuiltPlan(plan.candidate, blob, plan.workspace_bytes)
        if plan.sampled is None:
            # Planned without the device: nothing has been run, so the reference is computed here.
            return self._compared(segment, sizes, origin, plan, built)
        engine = self.engines.get(plan.candidate.engine)
        if engine is None:
            return f"engine {plan.candidate.engine} is not available"
        try:
            ready = engine.load(segment, sizes, plan.candidate, blob, plan.workspace_bytes)
            result = run_once(ready, segment, sizes, plan.sampled.seed, self.device)
        except FAILURES as error:
            return f"does not run: {one_line(error)}"
        refusal = accuracy.compare_sampled(result, plan.sampled, plan.torch_error, segment.precision)
        if refusal:
            return refusal
        return Served(origin, ready, plan.candidate, "", self._stale(plan), plan)

    def _compared(
        self, segment: Segment, sizes: Sizes, origin: str, plan: Plan | None, built: BuiltPlan
    ) -> Served | str:
        """Loads a plan nobody has run yet and compares it with the float64 reference and torch."""
        candidate = built.candidate
        engine = self.engines.get(candidate.engine)
        if engine is None:
            return f"engine {candidate.engine} is not available"
        seed = 1
        try:
            ready = engine.load(segment, sizes, candidate, built.blob, built.workspace_bytes)
            result = run_once(ready, segment, sizes, seed, self.device)
            torch_result = run_once(
                self.reference(segment, sizes, "").ready, segment, sizes, seed, self.device
            )
        except FAILURES as error:
            return f"does not run: {one_line(error)}"
        sampled = accuracy.sampled_reference(segment, sizes, seed, self.device)
        expected = torch.tensor(sampled.values, dtype=torch.float64)
        torch_error = accuracy.measure(accuracy.sample(torch_result, seed), expected)
        refusal = accuracy.compare_sampled(result, sampled, torch_error, segment.precision)
        if refusal:
            return refusal
        stale = () if plan is None else self._stale(plan)
        return Served(origin, ready, candidate, "", stale, plan)

    def _recipes(self, segment: Segment, sizes: Sizes) -> tuple[Candidate, ...]:
        key = segment.key(sizes, accuracy.VALIDATION)
        elsewhere = [
            plan.candidate
            for store in self.stores
            for _, plan in store.find_elsewhere(self.compatibility, key)
        ]
        return tuple(dict.fromkeys(elsewhere))

    def _stale(self, plan: Plan) -> tuple[str, ...]:
        try:
            stored = Provenance.from_json(plan.provenance)
        except (KeyError, TypeError, ValueError):
            return ("provenance unreadable",)
        return tuple(f"{d.field} {d.stored} -> {d.here}" for d in compare(stored, self.provenance))


def run_once(
    ready: ReadyPlan, segment: Segment, sizes: Sizes, seed: int, device: torch.device
) -> torch.Tensor:
    """A plan's result for generated operands, in a poisoned output, synchronised."""
    operands = accuracy.generated_operands(segment, sizes, seed, device)
    workspace = accuracy.poisoned_workspace(ready.workspace_bytes, device)
    out = accuracy.poison(segment, sizes, device)
    result = ready.run(operands, workspace, out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result
