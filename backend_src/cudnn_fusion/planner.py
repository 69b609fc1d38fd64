"""Planning in a child process: a compile holds the interpreter's lock for up to seconds.

Run as ``python -m cudnn_fusion.planner`` with a JSON request on standard input; answers in JSON on standard
output.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cudnn_fusion.children import interpreter, live_and_die_with_parent
from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Dims, Operand, Operation, Segment

TIMEOUT_S = 300


@dataclass(frozen=True)
class PlanRequest:
    """A segment to plan: the first of ``recipes`` that can be built here, else the engine's first choice."""

    segment: Segment
    sizes: Mapping[str, Dims]
    recipes: tuple[Candidate, ...] = ()


def plan_in_child(requests: Sequence[PlanRequest], device: torch.device) -> list[BuiltPlan | str]:
    """A built plan, or the reason why there is none, for each request. Never raises for what a child does."""
    message = json.dumps({"device": device.index or 0, "requests": [_to_json(r) for r in requests]})
    try:
        done = subprocess.run(
            [interpreter(), "-m", "cudnn_fusion.planner"],
            input=message,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            preexec_fn=live_and_die_with_parent,
        )
        answers = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [f"the planning process failed: {error}"] * len(requests)
    if not isinstance(answers, list) or len(answers) != len(requests):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"the planning process ended with code {done.returncode}: {last}"] * len(requests)
    return [_answer(item) for item in answers]


def _answer(item: Mapping[str, Any]) -> BuiltPlan | str:
    if "reason" in item:
        return str(item["reason"])
    return BuiltPlan(
        candidate=_candidate(item["candidate"]),
        blob=base64.b64decode(item["blob"]),
        workspace_bytes=int(item["workspace_bytes"]),
        behavior_notes=tuple(item["behavior_notes"]),
        selected_engine=str(item["selected_engine"]),
    )


def plan_one(engine: CudnnEngine, request: PlanRequest) -> BuiltPlan:
    """Raises CandidateRejectedError when neither a recipe nor any of the engine's own plans can be built."""
    reasons: list[str] = []
    own = engine.candidates(request.segment, request.sizes)
    recipes = [candidate for candidate in request.recipes if candidate.engine == engine.name]
    for candidate in (*recipes, *own):
        try:
            return engine.build(request.segment, request.sizes, candidate)
        except CandidateRejectedError as error:
            reasons.append(f"{candidate.label()}: {error}")
    unsupported = [f"{form}: {why}" for form, why in engine.unsupported(request.segment, request.sizes)]
    raise CandidateRejectedError("; ".join((reasons or unsupported)[:3]) or "no candidates")


def main() -> None:
    """Reads requests, plans each, prints one line of JSON."""
    message = json.load(sys.stdin)
    device = torch.device("cuda", message["device"])
    torch.cuda.init()
    engine = CudnnEngine(device)
    answers: list[dict[str, Any]] = []
    for item in message["requests"]:
        try:
            built = plan_one(engine, _from_json(item))
        except CandidateRejectedError as error:
            answers.append({"reason": str(error)})
            continue
        answers.append({**asdict(built), "blob": base64.b64encode(built.blob or b"").decode()})
    print(json.dumps(answers), flush=True)


def _to_json(request: PlanRequest) -> dict[str, Any]:
    return {
        "segment": asdict(request.segment),
        "sizes": {name: list(dims) for name, dims in request.sizes.items()},
        "recipes": [asdict(candidate) for candidate in request.recipes],
    }


def _from_json(data: Mapping[str, Any]) -> PlanRequest:
    segment = data["segment"]
    operations = tuple(
        Operation(
            op["kind"],
            op["operand"],
            tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in op["attributes"]),
        )
        for op in segment["operations"]
    )
    return PlanRequest(
        segment=Segment(operations, tuple(Operand(**o) for o in segment["operands"]), segment["precision"]),
        sizes={name: tuple(dims) for name, dims in data["sizes"].items()},
        recipes=tuple(_candidate(candidate) for candidate in data["recipes"]),
    )


def _candidate(data: Mapping[str, Any]) -> Candidate:
    return Candidate(**{**data, "knobs": tuple((name, value) for name, value in data["knobs"])})


if __name__ == "__main__":
    main()
