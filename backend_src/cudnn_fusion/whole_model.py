"""The whole program as the judge: segments that are near-equal alone are compared where they will run.

Alone and repeated, a plan finds its operands in the cache and its own kernel in front of it. In the program
neither holds, and the time between two kernels depends on both. So after the segments are tuned, the captured
program decides between the fastest plans of the segments that matter; then its result is checked as a whole,
and more exact plans take over where it is wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from cudnn_fusion import accuracy
from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import ProgramError, cast, in_type
from cudnn_fusion.plan import Errors, PlanKey
from cudnn_fusion.plan_cache import Served
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.timing import elapsed_us, time_interleaved

MAX_TRIALS = 32
CLOSE = 1.25
"""A runner-up is tried when alone it takes at most this many times the winner's time, or `CLOSE_US` more."""
CLOSE_US = 1.5
GAIN = 0.997
"""The whole program with a runner-up must take at most this share of its time with the winner."""
ROUNDS = 9
ROUND_US = 1500.0
CHECK_RUNS = 6

Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Option:
    """One plan that could serve a key. ``us`` is its time alone."""

    served: Served
    us: float


def choose(
    resources: Resources,
    bucket: Bucket,
    keys: Sequence[PlanKey],
    served: Sequence[Served],
    options: Mapping[PlanKey, Sequence[Option]],
) -> list[Served]:
    """What serves each site after trying runners-up in the captured program.

    ``keys`` and ``served`` are in the order of ``partition.sites``; ``options`` are best first, the winner
    included. On a CPU nothing is captured and nothing is tried.
    """
    chosen = list(served)
    if resources.device.type != "cuda":
        return chosen
    best = Executor(resources, bucket, chosen, capture=True)
    for key, option in _trials(keys, options):
        trial = [option.served if k == key else s for k, s in zip(keys, chosen, strict=True)]
        executor = Executor(resources, bucket, trial, capture=True)
        if _share(executor, best) <= GAIN:
            chosen, best = trial, executor
    return chosen


def _trials(
    keys: Sequence[PlanKey], options: Mapping[PlanKey, Sequence[Option]]
) -> list[tuple[PlanKey, Option]]:
    """Runners-up worth a trial, those of the keys that take most time first."""
    found = []
    for key in dict.fromkeys(keys):
        winner, *others = options.get(key, ()) or (None,)
        if winner is None:
            continue
        weight = winner.us * sum(k == key for k in keys)
        limit = max(CLOSE * winner.us, winner.us + CLOSE_US)
        found += [(weight, key, other) for other in others if other.us <= limit]
    found.sort(key=lambda item: -item[0])
    return [(key, option) for _, key, option in found[:MAX_TRIALS]]


def make_exact(
    resources: Resources,
    bucket: Bucket,
    keys: Sequence[PlanKey],
    served: Sequence[Served],
    options: Mapping[PlanKey, Sequence[Option]],
    judge: Callable[[Executor], WholeErrors | None],
) -> tuple[list[Served], Executor, WholeErrors | None]:
    """What serves each site so that ``judge`` passes the program, with the executor and its errors.

    Errors of plans that each passed their check add up. While the whole is refused, the most exact option
    replaces what serves a key: first for the key with the largest error, then for twice as many each time.
    """
    chosen = list(served)
    executor = Executor(resources, bucket, chosen, capture=True)
    errors = judge(executor)
    exact = _more_exact(keys, chosen, options)
    count = 1
    while errors is not None and errors.refusal and count < 2 * len(exact):
        replaced = dict(exact[:count])
        chosen = [replaced.get(key, plan) for key, plan in zip(keys, served, strict=True)]
        executor = Executor(resources, bucket, chosen, capture=True)
        errors = judge(executor)
        count *= 2
    return chosen, executor, errors


def _more_exact(
    keys: Sequence[PlanKey], served: Sequence[Served], options: Mapping[PlanKey, Sequence[Option]]
) -> list[tuple[PlanKey, Served]]:
    """The most exact option of each key where it is better than what serves, largest errors first."""
    found = []
    for key, plan in dict(zip(keys, served, strict=True)).items():
        most_exact = min((option.served for option in options.get(key, ())), key=_error, default=plan)
        if _error(most_exact) < _error(plan):
            found.append((key, plan, most_exact))
    found.sort(key=lambda item: -_error(item[1]))
    return [(key, most_exact) for key, _, most_exact in found]


def _error(served: Served) -> float:
    return math.inf if served.stored is None or served.stored.error is None else served.stored.error.rms


def _share(executor: Executor, other: Executor) -> float:
    """Time of one executor as a share of the other's: the median over rounds in which both are run."""
    executor.run()
    other.run()
    runs = max(1, min(200, round(ROUND_US / max(elapsed_us(other.run, 1), 1.0))))
    return statistics.median(
        elapsed_us(executor.run, runs) / elapsed_us(other.run, runs) for _ in range(ROUNDS)
    )


def times_us(executors: Sequence[Executor], device: torch.device) -> list[float]:
    """Median time of each executor, run in turn."""
    if device.type != "cuda":
        keep = range(len(executors))
        return [t.median_us for t in time_interleaved([e.run for e in executors], device, keep).values()]
    rounds = [[elapsed_us(executor.run, 10) for executor in executors] for _ in range(ROUNDS + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


@dataclass(frozen=True)
class WholeErrors:
    """Largest errors over all floating outputs: of the plans, and of torch alone."""

    ours: Errors
    torch: Errors
    refusal: str | None


def check(resources: Resources, executor: Executor, inputs: Inputs, others: Inputs) -> WholeErrors | None:
    """Errors of the whole program against float64, as ``executor`` serves it; None if float64 cannot run it.

    Before each run for ``inputs`` there is one for ``others``: what a kernel reads unwritten is then theirs.
    """
    expected = reference(resources, inputs)
    if expected is None:
        return None
    plain = Interpreter(resources.program, resources.weights, resources.device).run(inputs)
    ours: list[list[torch.Tensor]] = []
    for _ in range(CHECK_RUNS if executor.captured else 1):
        for values in (others, inputs):
            for buffer, value in zip(executor.inputs, values, strict=True):
                buffer.copy_(value)
            result = executor.run()
        ours.append([output.clone() for output in result])
    precision = resources.program.precision
    worst, torch_worst, refusal = Errors(0.0, 0.0), Errors(0.0, 0.0), None
    for index, wanted in enumerate(expected):
        if wanted is None:
            continue
        torch_error = accuracy.measure(plain[index], wanted)
        error = accuracy.largest([accuracy.measure(outputs[index], wanted) for outputs in ours])
        refusal = refusal or accuracy.verdict(error, torch_error, precision)
        worst = accuracy.largest([worst, error])
        torch_worst = accuracy.largest([torch_worst, torch_error])
    return WholeErrors(worst, torch_worst, refusal)


def reference(resources: Resources, inputs: Inputs) -> list[torch.Tensor | None] | None:
    """The program's floating outputs in float64, None for others; None if it cannot run so, or gives one
    that is not finite."""
    exported = resources.exported or resources.program
    program = in_type(exported, "float64")
    weights = cast({name: w.to(resources.device) for name, w in exported.weights.items()}, torch.float64)
    doubles = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        outputs = Interpreter(program, weights, resources.device).run(doubles)
    except (ProgramError, RuntimeError, TypeError, ValueError, IndexError):
        return None
    found = [output if output.is_floating_point() else None for output in outputs]
    if any(o is not None and (o.dtype != torch.float64 or not o.isfinite().all()) for o in found):
        return None
    return found
