"""Timing several ways to do one thing against each other, in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], object]

FIRST_ROUNDS = 3
FINAL_ROUNDS = 15
CPU_FINAL_ROUNDS = 7
FINALISTS = 8
FIRST_RUNS_PER_GRAPH = 5
RUNS_PER_GRAPH = 20
FIRST_GRAPH_US = 500.0
GRAPH_US = 4000.0
"""A graph holds fewer runs than that when these take longer: long runs need no repetition."""
HOPELESS = 4.0
"""A run that alone takes so many times the fastest's leaves at once; it is not even captured."""
SEARCHES = 3
"""How often the fastest so far may lead to further runs."""


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of one run, microseconds.

    ``final`` says that it was timed to the end. One that left early was timed at another moment, perhaps of
    less load: its time does not compare with theirs.
    """

    median_us: float
    spread_us: float
    final: bool


def time_interleaved(
    runs: Sequence[Run],
    device: torch.device,
    keep: Sequence[int] = (),
    on_failure: Callable[[int, Exception], None] | None = None,
    accept: Callable[[int], bool] = lambda index: True,
    further: Callable[[int], Sequence[Run]] = lambda index: (),
) -> dict[int, Timing]:
    """Times every run in turn, round by round, so that a change of clocks or load meets all alike.

    The hopeless leave after one run, and after a few rounds only the fastest go on, and those whose index is
    in ``keep``; of them those that ``accept`` refuses are left out, and the next fastest take their places.
    Before that ``further`` gives runs near the fastest so far, by its index: they take the indices that
    follow, and up to `SEARCHES` times a new fastest leads to others.
    Returns the timing of all others by index; of those that left early, what was measured until then. On a
    GPU a run is a CUDA-graph replay of some calls between events, in the end up to `RUNS_PER_GRAPH`. A run
    that raises (one that cannot be captured does) is left out and told to ``on_failure``; without that,
    raises.
    """
    race = _Race(device, on_failure, accept)
    for index, run in enumerate(runs):
        race.enter(index, run)
    race.rounds(list(race.samples), FIRST_ROUNDS)
    count, searched = len(runs), set[int]()
    for _ in range(SEARCHES):
        fastest = race.fastest()
        if fastest is None or fastest in searched:
            break
        searched.add(fastest)
        added = further(fastest)
        indices = range(count, count + len(added))
        for index, run in zip(indices, added, strict=True):
            race.enter(index, run)
        race.rounds(indices, FIRST_ROUNDS)
        count += len(added)
    finalists = race.finals(keep, FINAL_ROUNDS if device.type == "cuda" else CPU_FINAL_ROUNDS)
    return {index: _summary(values, index in finalists) for index, values in race.samples.items()}


class _Race:
    """Runs that are timed against each other. ``samples`` holds microseconds of those still in it."""

    def __init__(
        self,
        device: torch.device,
        on_failure: Callable[[int, Exception], None] | None,
        accept: Callable[[int], bool],
    ) -> None:
        self.samples: dict[int, list[float]] = {}
        self._runs: dict[int, Run] = {}
        self._alone_us: dict[int, float] = {}
        self._measures: dict[int, Callable[[], float]] = {}
        self._accepted: set[int] = set()
        self._device = device
        self._on_failure = on_failure
        self._accept = accept
        # One pool for all graphs: memory that one capture has freed serves the next, which allocates nothing.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def enter(self, index: int, run: Run) -> None:
        """Runs it; prepares it for the first rounds unless it is hopeless."""
        self._runs[index] = run
        self.samples[index] = []
        try:
            run()
            alone = _alone_us(run, self._device)
            fastest = min(self._alone_us.values(), default=alone)
            if alone > HOPELESS * fastest:
                alone = min(alone, _alone_us(run, self._device))  # Something else may have held it up.
        except (RuntimeError, ValueError, TypeError) as failure:
            self._leave(index, failure)
            return
        self._alone_us[index] = alone
        if alone > HOPELESS * fastest:
            self.samples[index].append(alone)
        else:
            self._prepare(index, FIRST_RUNS_PER_GRAPH, FIRST_GRAPH_US)

    def rounds(self, which: Sequence[int], count: int) -> None:
        """Measures each of ``which`` once a round."""
        for _ in range(count):
            for index in which:
                if index not in self.samples or index not in self._measures:
                    continue
                try:
                    self.samples[index].append(self._measures[index]())
                except (RuntimeError, ValueError, TypeError) as failure:
                    self._leave(index, failure)

    def fastest(self) -> int | None:
        """The fastest so far that is accepted; None if none is."""
        ordered = sorted(self.samples, key=lambda index: min(self.samples[index]))
        return next((index for index in ordered if self._is_accepted(index)), None)

    def finals(self, keep: Sequence[int], count: int) -> list[int]:
        """Times the fastest so far and those of ``keep`` anew, and gives which.

        When one of them fails, those that were compared with it get another chance.
        """
        while True:
            finalists = self._fastest(keep)
            for index in finalists:
                self.samples[index].clear()
                if self._device.type == "cuda" or index not in self._measures:
                    self._prepare(index, RUNS_PER_GRAPH, GRAPH_US)
            self.rounds(finalists, count)
            if all(index in self.samples for index in finalists):
                return finalists

    def _prepare(self, index: int, most_calls: int, graph_us: float) -> None:
        run = self._runs[index]
        calls = max(1, min(most_calls, math.ceil(graph_us / max(self._alone_us[index], 1.0))))
        try:
            self._measures[index] = (
                _measure_cuda(run, self._device, calls, self._pool)
                if self._device.type == "cuda"
                else _measure_cpu(run)
            )
        except (RuntimeError, ValueError, TypeError) as failure:
            self._leave(index, failure)

    def _fastest(self, keep: Sequence[int]) -> list[int]:
        """Accepted ones: those of ``keep``, and up to `FINALISTS` near the fastest."""
        fastest: list[int] = []
        for index in sorted(self.samples, key=lambda index: min(self.samples[index])):
            close = not fastest or min(self.samples[index]) <= 1.5 * min(self.samples[fastest[0]])
            if len(fastest) == FINALISTS or not close:
                break
            if self._is_accepted(index):
                fastest.append(index)
        return fastest + [i for i in keep if i not in fastest and i in self.samples and self._is_accepted(i)]

    def _is_accepted(self, index: int) -> bool:
        if index not in self._accepted:
            if not self._accept(index):
                del self.samples[index]
                return False
            self._accepted.add(index)
        return True

    def _leave(self, index: int, failure: Exception) -> None:
        if self._on_failure is None:
            raise failure
        self.samples.pop(index, None)
        self._on_failure(index, failure)


def _summary(values: Sequence[float], final: bool) -> Timing:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return Timing(statistics.median(values), high - low, final)


def _alone_us(run: Run, device: torch.device) -> float:
    """One run by itself. On a GPU the time to launch it counts where that is longer."""
    return elapsed_us(run, 1) if device.type == "cuda" else _measure_cpu(run)()


def _measure_cpu(run: Run) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6

    return measure


def _measure_cuda(run: Run, device: torch.device, calls: int, pool: Any) -> Callable[[], float]:
    graph = capture(run, device, calls, pool)

    def measure() -> float:
        return elapsed_us(graph.replay, 1) / calls

    measure()
    return measure


def elapsed_us(run: Run, calls: int) -> float:
    """Microseconds of one of so many calls, queued on torch's current stream behind each other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def capture(run: Run, device: torch.device, calls: int, pool: Any) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` calls, after a warm-up call; its memory is from ``pool``."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        # Not torch.cuda.graph: it collects garbage each time, which takes ten times as long as the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                run()
        finally:
            graph.capture_end()
    return graph
