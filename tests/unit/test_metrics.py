"""Counts on their way to the server."""

import threading
import time
from types import SimpleNamespace

import pytest

from cudnn_fusion.metrics import FLUSH_S, Metrics

ONE, TWO = (("reason", "one"),), (("reason", "two"),)


class Families:
    """Stands in for Triton's metrics, which the serving tests read from a real server."""

    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self):
        self.values = {}
        self.calls = 0
        self.fails_once = False

    def __call__(self, name, description, kind):
        return SimpleNamespace(Metric=lambda labels: self._metric(name, labels))

    def _metric(self, name, labels):
        return SimpleNamespace(increment=lambda value: self._add((name, labels["reason"]), value))

    def _add(self, key, value):
        self.calls += 1
        if self.fails_once:
            self.fails_once = False
            raise RuntimeError("the server is going away")
        self.values[key] = self.values.get(key, 0) + value


@pytest.fixture
def families():
    return Families()


@pytest.fixture
def metrics(families):
    made = Metrics(SimpleNamespace(MetricFamily=families), "m", "1")
    yield made
    made.close()


def test_counts_from_several_threads_arrive_once_and_in_few_calls(metrics, families):
    def count():
        for _ in range(1000):
            metrics.add("errors_total", 1, ONE)
            metrics.add("errors_total", 2, TWO)

    threads = [threading.Thread(target=count) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - started
    metrics.close()
    assert families.values == {
        ("cudnn_fusion_errors_total", "one"): 4000,
        ("cudnn_fusion_errors_total", "two"): 8000,
    }
    assert families.calls <= 2 * (took / FLUSH_S + 2)


def test_counts_arrive_without_being_asked_for_again_and_again(metrics, families):
    for expected in (1, 2, 3):
        metrics.add("errors_total", 1, ONE)
        deadline = time.monotonic() + 5
        while families.values.get(("cudnn_fusion_errors_total", "one")) != expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_is_added_during_the_last_flush_is_passed_on_when_closing(metrics, families):
    adding = families._add

    def slow(key, value):
        if key[1] == "one":
            metrics.add("errors_total", 1, TWO)
            metrics._closing.set()
        adding(key, value)

    families._add = slow
    metrics.add("errors_total", 1, ONE)
    metrics._thread.join(5)
    assert families.values == {
        ("cudnn_fusion_errors_total", "one"): 1,
        ("cudnn_fusion_errors_total", "two"): 1,
    }


def test_a_counter_that_fails_stops_no_other(metrics, families):
    families.fails_once = True
    metrics.add("errors_total", 1, ONE)
    metrics.add("errors_total", 1, TWO)
    metrics.flush()
    metrics.add("errors_total", 5, ONE)
    metrics.flush()
    assert families.values[("cudnn_fusion_errors_total", "one")] == 5
    assert families.values[("cudnn_fusion_errors_total", "two")] == 1


def test_without_metrics_in_the_server_nothing_fails():
    def refused(**_):
        raise RuntimeError("metrics are disabled")

    refused.COUNTER = refused.GAUGE = "kind"
    metrics = Metrics(SimpleNamespace(MetricFamily=refused), "m", "1")
    metrics.add("errors_total", 1, ONE)
    metrics.set("bytes", 1, kind="weights")
    metrics.close()
