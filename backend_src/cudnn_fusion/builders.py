"""Building candidates in several processes at once.

A build holds the interpreter's lock, for a runtime-compiled engine up to a second and in torch's compiler for
longer, while the GPU has nothing to do: so other processes build what this one checks and times.
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
from cudnn_fusion.engines.depthwise import DepthwiseEngine
from cudnn_fusion.engines.inductor import InductorEngine
from cudnn_fusion.engines.stem import StemEngine
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Dims, Segment

_LOG = logging.getLogger(__name__)

Built = tuple[str, BuiltPlan | str]
"""A candidate's label, and what was built of it or the reason why nothing was."""

_OF_KERNELS = {engine.name: engine for engine in (DepthwiseEngine, StemEngine)}
"""Engines that compile sources of this package."""
MAX_WORKERS = {CudnnEngine.name: 16, InductorEngine.name: 4, **dict.fromkeys(_OF_KERNELS, 4)}
"""Processes for each engine; one for torch's compiler takes seconds to start and much memory."""
PARTS = 4
"""A form's candidates are built in so many tasks: compiling forty kernels one by one takes half a minute."""

_Builder = CudnnEngine | DepthwiseEngine | InductorEngine | StemEngine
_Task = tuple[str, int]
"""A form, and which part of its candidates."""
_Key = tuple[str, str, _Task, tuple[tuple[str, Dims], ...]]


def build_all(engine: Engine, segment: Segment, sizes: Sizes) -> Iterator[Built]:
    """Builds every candidate of an engine."""
    return build_each(engine, segment, sizes, engine.candidates(segment, sizes))


def build_task(engine: _Builder, segment: Segment, sizes: Sizes, task: _Task) -> Iterator[Built]:
    """Builds the candidates of one task."""
    form, part = task
    return build_each(engine, segment, sizes, engine.candidates(segment, sizes, form)[part::PARTS])


def build_each(
    engine: Engine, segment: Segment, sizes: Sizes, candidates: Iterable[Candidate]
) -> Iterator[Built]:
    """Builds these candidates of an engine."""
    for candidate in candidates:
        try:
            yield candidate.label(), engine.build(segment, sizes, candidate)
        except FAILURES as failure:
            yield candidate.label(), reason_of(failure, "is not built")


class Builders:
    """Worker processes with an engine each, for CUDA device ``device``. Close them when done.

    ``workers`` is their number for each engine; by default as many as there are cores, within `MAX_WORKERS`.
    """

    def __init__(self, device: torch.device, workers: int | None = None) -> None:
        self._engines: dict[str, _Builder] = {
            CudnnEngine.name: CudnnEngine(device),
            InductorEngine.name: InductorEngine(device),
            **{name: engine(device) for name, engine in _OF_KERNELS.items()},
        }
        self._device = device
        cores = max(1, (os.cpu_count() or 2) - 1)
        self._pools = {
            name: ProcessPoolExecutor(
                workers or min(MAX_WORKERS[name], cores), mp_context=multiprocessing.get_context("spawn")
            )
            for name in self._engines
        }
        self._pending: dict[_Key, Future[list[Built]]] = {}

    def builds_for(self, engine: Engine) -> bool:
        """Whether `built` gives what this engine would build."""
        return engine.name in self._engines

    def start(self, wanted: Sequence[tuple[Segment, Sizes]]) -> None:
        """Has the candidates of these segments built, in this order."""
        for segment, sizes in wanted:
            for name, engine in self._engines.items():
                for task in _tasks(engine, segment, sizes):
                    # A pool with a dead worker takes nothing more.
                    with contextlib.suppress(BrokenProcessPool):
                        self._pending[_key(name, segment, sizes, task)] = self._pools[name].submit(
                            _build, name, self._device.index or 0, segment, dict(sizes), task
                        )

    def built(self, name: str, segment: Segment, sizes: Sizes) -> Iterable[Built]:
        """What was built of a segment's candidates of the engine ``name``; waits for it. What no worker
        builds is built here."""
        engine = self._engines[name]
        for task in _tasks(engine, segment, sizes):
            pending = self._pending.pop(_key(name, segment, sizes, task), None)
            built: Iterable[Built] = build_task(engine, segment, sizes, task)
            if pending is not None:
                try:
                    built = pending.result()
                except Exception as failure:  # a lost worker, or one that has no memory for a handle
                    _LOG.warning("a builder failed, building here: %s", one_line(failure))
            yield from built

    def close(self) -> None:
        """Ends the workers; what is not built yet is left out."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


def _tasks(engine: _Builder, segment: Segment, sizes: Sizes) -> list[_Task]:
    if isinstance(engine, CudnnEngine):
        return [(form, part) for form in form_names(segment, sizes) for part in range(PARTS)]
    # The others have one form.
    return [(c.form, part) for part, c in enumerate(engine.candidates(segment, sizes)[:PARTS])]


def _key(name: str, segment: Segment, sizes: Mapping[str, Dims], task: _Task) -> _Key:
    return name, segment.signature() + segment.precision, task, tuple(sorted(sizes.items()))


@functools.cache
def _worker_engine(name: str, device_index: int) -> _Builder:
    device = torch.device("cuda", device_index)
    if name in _OF_KERNELS:
        return _OF_KERNELS[name](device)
    if name == InductorEngine.name:
        torch.cuda.set_device(device)
        return InductorEngine(device)
    engine = CudnnEngine(device)
    engine.handle()  # Without a handle no form would have candidates, which is not what is meant.
    return engine


def _build(name: str, device_index: int, segment: Segment, sizes: Sizes, task: _Task) -> list[Built]:
    return list(build_task(_worker_engine(name, device_index), segment, sizes, task))
