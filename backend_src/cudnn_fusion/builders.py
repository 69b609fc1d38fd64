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
from cudnn_fusion.segment import Dims, Segment

_LOG = logging.getLogger(__name__)

Built = tuple[str, BuiltPlan | str]
"""A candidate's label, and what was built of it or the reason why nothing was."""

MAX_WORKERS = 8
"""More would wait for the one process that times."""

_Key = tuple[str, str, tuple[tuple[str, Dims], ...]]


def build_all(engine: Engine, segment: Segment, sizes: Sizes, form: str | None = None) -> Iterator[Built]:
    """Builds every candidate of an engine, or of one of its forms."""
    for candidate in engine.candidates(segment, sizes):
        if form is not None and candidate.form != form:
            continue
        try:
            yield candidate.label(), engine.build(segment, sizes, candidate)
        except FAILURES as failure:
            yield candidate.label(), reason_of(failure, "is not built")


class Builders:
    """Worker processes with a cuDNN engine each, for CUDA device ``device``. Close them when done."""

    def __init__(self, device: torch.device, workers: int | None = None) -> None:
        self._engine = CudnnEngine(device)
        self._pool = ProcessPoolExecutor(
            workers or max(1, min(MAX_WORKERS, (os.cpu_count() or 2) // 2)),
            mp_context=multiprocessing.get_context("spawn"),
        )
        self._pending: dict[_Key, Future[list[Built]]] = {}

    def start(self, wanted: Sequence[tuple[Segment, Sizes]]) -> None:
        """Has the candidates of these segments built, in this order."""
        for segment, sizes in wanted:
            for form in form_names(segment, sizes):
                # A pool with a dead worker takes nothing more.
                with contextlib.suppress(BrokenProcessPool):
                    self._pending[_key(segment, sizes, form)] = self._pool.submit(
                        _build, self._engine.device.index or 0, segment, dict(sizes), form
                    )

    def built(self, segment: Segment, sizes: Sizes) -> Iterable[Built]:
        """What was built of a segment's candidates; waits for it. What no worker builds is built here."""
        for form in form_names(segment, sizes):
            pending = self._pending.pop(_key(segment, sizes, form), None)
            built: Iterable[Built] = build_all(self._engine, segment, sizes, form)
            if pending is not None:
                try:
                    built = pending.result()
                except Exception as failure:  # a lost worker, or one that has no memory for a handle
                    _LOG.warning("a builder failed, building here: %s", one_line(failure))
            yield from built

    def close(self) -> None:
        """Ends the workers; what is not built yet is left out."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _key(segment: Segment, sizes: Mapping[str, Dims], form: str) -> _Key:
    return segment.signature() + segment.precision, form, tuple(sorted(sizes.items()))


@functools.cache
def _worker_engine(device_index: int) -> CudnnEngine:
    engine = CudnnEngine(torch.device("cuda", device_index))
    engine.handle()  # Without a handle no form would have candidates, which is not what is meant.
    return engine


def _build(device_index: int, segment: Segment, sizes: Sizes, form: str) -> list[Built]:
    return list(build_all(_worker_engine(device_index), segment, sizes, form))
