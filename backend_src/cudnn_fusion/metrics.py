"""What an instance reports through Triton's metrics endpoint.

Every call to a metric is a round trip between processes, so an execute makes one for each distinct way in
which its requests were served, mostly one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LOG = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and gauges of one instance. With Triton's metrics switched off no method does anything."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._base = {"model": model, "version": version}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._requests: dict[Labels, Any] = {}
        self._families: dict[str, Any] = {}
        try:
            self._make_families(pb_utils)
        except Exception as error:
            # Creating a family raises when the server runs without metrics; the model serves all the same.
            _LOG.warning("serving without metrics: %s", error)
            self._families = {}

    def _make_families(self, pb_utils: Any) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        descriptions = {
            "requests_total": (counter, "Requests by bucket, choice of bucket and worst origin of a segment"),
            "rows_total": (counter, "Rows that were run, by kind: asked for, or added as padding"),
            "errors_total": (counter, "Requests that were refused or failed, by reason"),
            "executors_built_total": (counter, "Executors built while serving"),
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

    def add(self, name: str, value: float, **labels: str) -> None:
        """Adds to a counter."""
        metric = self._metric(name, labels)
        if metric is not None:
            metric.increment(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        metric = self._metric(name, labels)
        if metric is not None:
            metric.set(value)

    def served(self, counts: Counter[Labels]) -> None:
        """Counts the requests of one execute, by their labels bucket, choice and origin."""
        for labels, count in counts.items():
            if labels not in self._requests:
                self._requests[labels] = self._metric("requests_total", dict(labels))
            metric = self._requests[labels]
            if metric is not None:
                metric.increment(count)

    def _metric(self, name: str, labels: Mapping[str, str]) -> Any:
        family = self._families.get(name)
        if family is None:
            return None
        key = (name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            self._metrics[key] = family.Metric(labels={**self._base, **labels})
        return self._metrics[key]
