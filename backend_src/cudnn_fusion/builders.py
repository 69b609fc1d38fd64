"""Building candidates in several processes at once.

A build holds the interpreter's lock, for a runtime-compiled engine up to a second, while the GPU has nothing
to do: so other processes build what this one checks and times.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from cudnn_fusion.engines.base import FAILURES, BuiltPlan, Engine, Sizes, one_line, reason_of
from cudnn_fusion.engines.cudnn_graph import CudnnEngine, form_names
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Dims, Segment

_LOG = logging.getLogger(__name__)

Built = tuple[str, BuiltPlan | str]
"""A candidate's label, and what was built of it or the reason why nothing was."""

MAX_WORKERS = 16
PARTS = 4
"""A form's candidates are built in so many tasks: compiling forty kernels one by one takes half a minute."""

_Task = tuple[str, int]
"""A form, and which part of its candidates."""
_Key = tuple[str, _Task, tuple[tuple[str, Dims], ...]]


def build_all(engine: Engine, segment: Segment, sizes: Sizes) -> Iterator[Built]:
    """Builds every candidate of an engine."""
    return _build_each(engine, segment, sizes, engine.candidates(segment, sizes))


def build_task(engine: CudnnEngine, segment: Segment, sizes: Sizes, task: _Task) -> Iterator[Built]:
    """Builds the candidates of one task."""
    form, part = task
    return _build_each(engine, segment, sizes, engine.candidates(segment, sizes, form)[part::PARTS])


def _build_each(
    engine: Engine, segment: Segment, sizes: Sizes, candidates: Iterable[Candidate]
) -> Iterator[Built]:
    for candidate in candidates:
        try:
            yield candidate.label(), engine.build(segment, sizes, candidate)
        except FAILURES as failure:
            yield candidate.label(), reason_of(failure, "is not built")


class Builders:
    """Worker processes with a cuDNN engine each, for CUDA device ``device``. Close them when done."""

    def __init__(self, device: torch.device, workers: int | None = None) -> None:
        self._engine = CudnnEngine(device)
        self._pool = ProcessPoolExecutor(
            workers or max(1, min(MAX_WORKERS, (os.cpu_count() or 2) - 1)),
            mp_context=multiprocessing.get_context("spawn"),
        )
        self._pending: dict[_Key, Future[list[Built]]] = {}

    def start(self, wanted: Sequence[tuple[Segment, Sizes]]) -> None:
        """Has the candidates of these segments built, in this order."""
        for segment, sizes in wanted:
            for task in _tasks(segment, sizes):
                # A pool with a dead worker takes nothing more.
                with contextlib.suppress(BrokenProcessPool):
                    self._pending[_key(segment, sizes, task)] = self._pool.submit(
                        _build, self._engine.device.index or 0, segment, dict(sizes), task
                    )

    def built(self, segment: Segment, sizes: Sizes) -> Iterable[Built]:
        """What was built of a segment's candidates; waits for it. What no worker builds is built here."""
        for task in _tasks(segment, sizes):
            pending = self._pending.pop(_key(segment, sizes, task), None)
            built: Iterable[Built] = build_task(self._engine, segment, sizes, task)
            if pending is not None:
                try:
                    built = pending.result()
                except Exception as failure:  # a lost worker, or one that has no memory for a handle
                    _LOG.warning("a builder failed, building here: %s", one_line(failure))
            yield from built

    def close(self) -> None:
        """Ends the workers; what is not built yet is left out."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _tasks(segment: Segment, sizes: Sizes) -> list[_Task]:
    return [(form, part) for form in form_names(segment, sizes) for part in range(PARTS)]


def _key(segment: Segment, sizes: Mapping[str, Dims], task: _Task) -> _Key:
    return segment.signature() + segment.precision, task, tuple(sorted(sizes.items()))


@functools.cache
def _worker_engine(device_index: int) -> CudnnEngine:
    engine = CudnnEngine(torch.device("cuda", device_index))
    engine.handle()  # Without a handle no form would have candidates, which is not what is meant.
    return engine


def _build(device_index: int, segment: Segment, sizes: Sizes, task: _Task) -> list[Built]:
    return list(build_task(_worker_engine(device_index), segment, sizes, task))
