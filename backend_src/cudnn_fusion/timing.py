"""Timing several ways to do one thing against each other, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]

FIRST_ROUNDS = 3
FINAL_ROUNDS = 15
FINALISTS = 8
RUNS_PER_GRAPH = 20


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of one run, microseconds."""

    median_us: float
    spread_us: float


def time_interleaved(
    runs: Sequence[Run], device: torch.device, keep: Sequence[int] = ()
) -> dict[int, Timing]:
    """Times every run in turn, round by round, so that a change of clocks or load meets all alike.

    After a few rounds only the fastest go on, and those whose index is in ``keep``. Returns the timing of all
    by index; of those that left early, what was measured until then. On a GPU a run is a CUDA-graph replay of
    `RUNS_PER_GRAPH` calls between events; a call that cannot be captured raises.
    """
    measures = [_measure_cuda(run, device) if device.type == "cuda" else _measure_cpu(run) for run in runs]
    samples: dict[int, list[float]] = {index: [] for index in range(len(runs))}
    _rounds(measures, samples, list(samples), FIRST_ROUNDS)
    ranked = sorted(samples, key=lambda index: min(samples[index]))
    best = min(samples[ranked[0]])
    finalists = [i for i in ranked[:FINALISTS] if min(samples[i]) <= 1.5 * best]
    finalists += [index for index in keep if index not in finalists]
    for index in finalists:
        samples[index].clear()
    _rounds(measures, samples, finalists, FINAL_ROUNDS if device.type == "cuda" else 7)
    return {index: _summary(values) for index, values in samples.items()}


def _rounds(
    measures: Sequence[Callable[[], float]], samples: dict[int, list[float]], which: Sequence[int], count: int
) -> None:
    for _ in range(count):
        for index in which:
            samples[index].append(measures[index]())


def _summary(values: Sequence[float]) -> Timing:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return Timing(statistics.median(values), high - low)


def _measure_cpu(run: Run) -> Callable[[], float]:
    run()

    def measure() -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6

    return measure


def _measure_cuda(run: Run, device: torch.device) -> Callable[[], float]:
    graph = capture(run, device, RUNS_PER_GRAPH)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / RUNS_PER_GRAPH

    measure()
    return measure


def capture(run: Run, device: torch.device, calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` calls, after a warm-up call."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph
