"""A program with its plans on one device: the one place that turns a request's sizes into executors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import for_device
from cudnn_fusion.plan_cache import PlanCache, Served
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Bucket, BucketChoice, choose

MAX_SEEN = 4096
"""How many untuned sizes are remembered as planned or being planned."""

REMEMBERED_CHOICES = 1024
"""For how many sizes of requests the choice of buckets is kept. It depends on the tuned buckets alone."""

_LOG = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """Seconds and counts of loading, for the log."""

    buckets: list[Bucket] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    plans_s: float = 0.0


class ServedModel:
    """Executors of one instance. Tuned buckets are built by `load`, others when first asked for.

    An untuned size is answered by an executor on ``reference`` at once; it is also queued, and a thread plans
    it in a child process and swaps the better executor in between requests. ``lock`` serialises that thread's
    work on the device with the requests'.
    """

    def __init__(
        self, program: Program, cache: PlanCache, stores: Sequence[PlanStore], settings: Settings
    ) -> None:
        self.program = program
        self.cache = cache
        self.settings = settings
        self.lock = threading.RLock()
        self.resources = Resources(*for_device(program, cache.device.type), cache.device)
        self._stores = tuple(stores)
        self._executors: OrderedDict[Bucket, Executor] = OrderedDict()
        self._tuned: set[Bucket] = set()
        self._choices: dict[Bucket, BucketChoice] = {}
        self._served: list[Served] = []
        self._planner = _BackgroundPlanner(self)

    @property
    def tuned(self) -> frozenset[Bucket]:
        """Buckets that requests are padded or split to."""
        return frozenset(self._tuned)

    @property
    def live(self) -> tuple[Executor, ...]:
        """Executors that are built, least recently used first."""
        return tuple(self._executors.values())

    def load(self) -> LoadReport:
        """Builds tuned buckets, the largest first, within the settings' limits; one at any rate.

        Out of memory means fewer buckets. Never raises because of what the plan stores hold.
        """
        report = LoadReport()
        stored = sorted(self._stored_buckets(), key=lambda b: math.prod(size for _, size in b.sizes))[::-1]
        smallest = next((bucket for bucket in reversed(stored) if self._fits_program(bucket)), None)
        for bucket in stored:
            if not self._fits_program(bucket):
                ranges = ", ".join(f"{a.name} {a.minimum}..{a.maximum}" for a in self.program.axes)
                report.skipped.append(f"{bucket.name}: the program has {ranges or 'no axes'}")
                continue
            if len(self._executors) >= self.settings.max_buckets:
                report.skipped.append(f"{bucket.name}: over MAX_BUCKETS={self.settings.max_buckets}")
                continue
            over_memory = f"{bucket.name}: over EXECUTOR_MEMORY_MB={self.settings.executor_memory_mb}"
            if self._bytes() >= self._memory_limit():
                report.skipped.append(over_memory)
                continue
            before = self.resources.made()
            try:
                started = time.perf_counter()
                served = self.plans(bucket, plan=True)
                planned = time.perf_counter()
                executor = Executor(self.resources, bucket, served, capture=True)
            except torch.cuda.OutOfMemoryError as error:
                report.skipped.append(f"{bucket.name}: out of memory: {error}")
                self.resources.drop_since(before)
                continue
            if self._bytes() + executor.bytes > self._memory_limit() and (
                self._executors or bucket != smallest
            ):
                # What an executor takes is known only when it is built.
                report.skipped.append(f"{over_memory}: takes {executor.bytes / 2**20:.1f} MiB")
                del executor
                self.resources.drop_since(before)
                continue
            self._served += served
            report.plans_s += planned - started
            report.buckets.append(bucket)
            self._tuned.add(bucket)
            self._choices.clear()
            self._executors[bucket] = executor
        return report

    def warm_up(self) -> None:
        """Runs the reference once at the smallest sizes.

        Torch's first call of a kernel loads libraries: the first request of an untuned size must not wait.
        """
        bucket = Bucket.of({axis.name: axis.minimum for axis in self.program.axes})
        sizes = self.resources.segment_sizes(bucket)
        sites = self.resources.partition.sites
        plain = [self.cache.reference(s.segment, z, "") for s, z in zip(sites, sizes, strict=True)]
        try:
            Executor(self.resources, bucket, plain, capture=False).run()
        except torch.cuda.OutOfMemoryError as error:
            _LOG.warning("no warm-up of the reference: out of memory: %s", error)

    def reasons(self) -> list[str]:
        """Why segments are not served ``exact``, a line each, with the number of segments it holds for."""
        counted = Counter(
            f"{served.origin}: {served.reason or 'stale: ' + ', '.join(served.stale)}"
            for served in self._served
            if served.reason or served.stale
        )
        return [f"{count} x {text}" for text, count in counted.most_common(8)]

    def why_untuned(self) -> str:
        """Why no bucket is live, or that plans of live ones are missing; else empty."""
        if self.settings.engine == "reference" or not self.resources.partition.sites:
            return ""
        if self._tuned:
            missing = sum(served.origin == "reference" for served in self._served)
            total = len(self._served)
            return f"{missing} of {total} segments in tuned buckets have no usable plan" if missing else ""
        if any(self._stored_buckets()):
            return "no tuned bucket could be built"
        if any(store.buckets(self.cache.compatibility) for store in self._stores):
            return "no bucket is tuned: the stored ones are for other content of this model"
        roots = ", ".join(str(store.root) for store in self._stores)
        return f"no bucket is tuned: {roots} has none for this model and kind of device"

    def choose(self, request: Bucket) -> BucketChoice:
        """How sizes of a request are served; see `cudnn_fusion.shapes.choose`."""
        choice = self._choices.get(request)
        if choice is None:
            if len(self._choices) >= REMEMBERED_CHOICES:
                self._choices.clear()
            choice = self._choices[request] = self._choose(request)
        return choice

    def _choose(self, request: Bucket) -> BucketChoice:
        axis = self.program.batch
        if axis is None:
            return choose(request, self._tuned, None)
        return choose(request, self._tuned, axis.name, axis.maximum, axis.minimum)

    def executor(self, bucket: Bucket) -> tuple[Executor, bool]:
        """The bucket's executor, and whether it was live. Plans nothing: an untuned bucket is queued."""
        executor = self._executors.get(bucket)
        if executor is not None:
            self._executors.move_to_end(bucket)
            return executor, True
        tuned = bucket in self._tuned
        executor = Executor(self.resources, bucket, self.plans(bucket, plan=False), capture=tuned)
        self._insert(bucket, executor)
        if not tuned and "reference" in executor.origins:
            self._planner.queue(bucket)
        return executor, False

    def plans(self, bucket: Bucket, plan: bool) -> list[Served]:
        """What serves each segment at a bucket; with ``plan`` True missing ones are planned, which takes
        seconds."""
        sizes = self.resources.segment_sizes(bucket)
        wanted = [(s.segment, z) for s, z in zip(self.resources.partition.sites, sizes, strict=True)]
        if self.settings.engine == "reference":
            return [self.cache.reference(s, z, "switched off by ENGINE=reference") for s, z in wanted]
        return self.cache.plan(wanted) if plan else [self.cache.find(s, z) for s, z in wanted]

    def swap(self, bucket: Bucket, executor: Executor) -> None:
        """Replaces a live bucket's executor; does nothing if the bucket has left meanwhile."""
        if bucket in self._executors:
            self._executors[bucket] = executor

    def close(self) -> None:
        """Stops the background thread and drops every executor."""
        self._planner.stop()
        with self.lock:
            self._executors.clear()

    def _insert(self, bucket: Bucket, executor: Executor) -> None:
        self._executors[bucket] = executor
        while len(self._executors) > 1 and (
            len(self._executors) > self.settings.max_buckets or self._bytes() > self._memory_limit()
        ):
            # A tuned one never leaves for an untuned one: it would be built again while a request waits. So
            # the limits can be passed by one untuned executor, the newest. Replays are done before a request
            # is answered: none is in flight for the one that leaves.
            leaving = [live for live in self._executors if live not in self._tuned and live != bucket]
            if not leaving and bucket in self._tuned:
                leaving = [live for live in self._executors if live != bucket]
            if not leaving:
                return
            del self._executors[leaving[0]]

    def _bytes(self) -> int:
        return sum(executor.bytes for executor in self._executors.values())

    def _memory_limit(self) -> int:
        return self.settings.executor_memory_mb << 20

    def _fits_program(self, bucket: Bucket) -> bool:
        sizes, axes = dict(bucket.sizes), {axis.name: axis for axis in self.program.axes}
        return sizes.keys() == axes.keys() and all(
            axis.minimum <= sizes[name] <= axis.maximum for name, axis in axes.items()
        )

    def _stored_buckets(self) -> Iterable[Bucket]:
        """Buckets tuned for this program: in this environment, or else in any other (their recipes serve)."""
        own: dict[Bucket, None] = {}
        other: dict[Bucket, None] = {}
        for store in self._stores:
            for record in store.buckets(self.cache.compatibility, self.program.sha256):
                own[Bucket(record.sizes)] = None
            for record in store.buckets_elsewhere(self.cache.compatibility, self.program.sha256):
                other[Bucket(record.sizes)] = None
        return own or other


class _BackgroundPlanner:
    """Plans queued buckets one at a time, away from the request path."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._queued: list[Bucket] = []
        self._seen: OrderedDict[Bucket, None] = OrderedDict()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def queue(self, bucket: Bucket) -> None:
        """Asks for a bucket once; later calls do nothing."""
        if "cudnn" not in self._model.cache.engines or self._model.settings.engine == "reference":
            return
        with self._wake:
            if bucket in self._seen or self._stopped:
                return
            self._seen[bucket] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            self._queued.append(bucket)
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background-planner", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Takes no further bucket; a planning process under way ends with this process."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queued or self._stopped)
                if self._stopped:
                    return
                bucket = self._queued.pop(0)
            try:
                self._improve(bucket)
            except Exception:
                _LOG.exception("planning bucket %s in the background failed", bucket.name)

    def _improve(self, bucket: Bucket) -> None:
        model = self._model
        sizes = model.resources.segment_sizes(bucket)
        wanted = [(s.segment, z) for s, z in zip(model.resources.partition.sites, sizes, strict=True)]
        with model.lock:
            requests = model.cache.missing(wanted)
        built = model.cache.build_missing(requests)
        for request, answer in zip(requests, built, strict=True):
            with model.lock:
                model.cache.accept(request, answer)
        with model.lock:
            if self._stopped:
                return
            executor = Executor(model.resources, bucket, model.plans(bucket, plan=False), capture=True)
            model.swap(bucket, executor)
