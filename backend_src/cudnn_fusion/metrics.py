"""What an instance reports through Triton's metrics endpoint.

Every call to one of Triton's metrics is a round trip between processes. Counts are therefore gathered while
requests are served, and a thread passes them on soon after, as one call for each counter.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

_LOG = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]

FLUSH_S = 0.05
"""Seconds that counts are gathered before they reach Triton."""

_CLOSE_S = 2.0


class Metrics:
    """Counters and gauges of one instance. With Triton's metrics switched off no method does anything.

    Gauges are set at once; counters are at most `FLUSH_S` and a round trip behind. ``close`` passes on what
    is left.
    """

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._base = {"model": model, "version": version}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._families: dict[str, Any] = {}
        self._flushing = threading.Lock()
        self._pending: deque[tuple[tuple[str, Labels], int]] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        try:
            self._make_families(pb_utils)
        except Exception as error:
            # Creating a family raises when the server runs without metrics; the model serves all the same.
            _LOG.warning("serving without metrics: %s", error)
            self._families = {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _make_families(self, pb_utils: Any) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        descriptions = {
            "requests_total": (counter, "Requests by bucket, choice of bucket and worst origin of a segment"),
            "errors_total": (counter, "Requests that were refused or failed, by reason"),
            "candidates_total": (counter, "Candidates built or timed by this server, by stage"),
            "segments": (gauge, "Segments of tuned buckets by origin of their plan"),
            "buckets": (gauge, "Buckets by state: tuned, skipped"),
            "load_seconds": (gauge, "Seconds of each part of loading"),
            "bytes": (gauge, "Bytes by kind: weights, workspace, executors"),
            "preflight_errors": (gauge, "Errors found by the preflight checks; plans are off when not 0"),
        }
        for name, (kind, description) in descriptions.items():
            self._families[name] = pb_utils.MetricFamily(
                name=f"cudnn_fusion_{name}", description=description, kind=kind
            )

    def add(self, name: str, value: int, labels: Labels = ()) -> None:
        """Adds to a counter. Takes no lock: it is on the path of every request."""
        self._pending.append(((name, labels), value))
        if not self._wake.is_set():
            self._wake.set()

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        metric = self._metric(name, tuple(labels.items()))
        if metric is not None:
            metric.set(value)

    def flush(self) -> None:
        """Passes on what has been gathered."""
        with self._flushing:
            gathered: Counter[tuple[str, Labels]] = Counter()
            for _ in range(len(self._pending)):
                key, value = self._pending.popleft()
                gathered[key] += value
            for (name, labels), value in gathered.items():
                try:
                    metric = self._metric(name, labels)
                    if metric is not None:
                        metric.increment(value)
                except Exception as error:
                    _LOG.warning("metric %s was not counted: %s", name, error)

    def close(self) -> None:
        """Passes on what is left and ends the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(FLUSH_S)
            # Before the flush: what is added during it wakes this thread again.
            self._wake.clear()
            self.flush()
        self.flush()  # what was added while the last one was under way

    def _metric(self, name: str, labels: Labels) -> Any:
        family = self._families.get(name)
        if family is None:
            return None
        key = (name, labels)
        if key not in self._metrics:
            every: Mapping[str, str] = {**self._base, **dict(labels)}
            self._metrics[key] = family.Metric(labels=every)
        return self._metrics[key]
