"""Requests of ever new sizes: memory stays bounded, nothing is tuned or planned while a request waits.

``LENGTH_REQUESTS`` and ``IMAGE_REQUESTS`` set how many are sent, ``TEST_SEED`` which.
"""

import os
import random
import statistics
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from programs import FakeEngine, program_of, right, run_in_torch, served, with_hash
from torch import nn

from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket

LENGTH_REQUESTS = int(os.environ.get("LENGTH_REQUESTS", "600"))
IMAGE_REQUESTS = int(os.environ.get("IMAGE_REQUESTS", "50"))
SEED = int(os.environ.get("TEST_SEED", "20261202"))
LENGTHS = range(800, 1000)
LIVE = 8


def memory_kib():
    """Resident memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def answer(model, bucket, x):
    """As a request is served: sizes chosen, executor found or built, input copied in, run."""
    with model.lock:
        (part,) = model.choose(bucket).parts
        executor, live = model.executor(part.bucket)
        executor.inputs[0].copy_(x)
        return executor.run()[0], live


def test_many_lengths_run_in_bounded_memory(tmp_path):
    """1,500 requests over 200 lengths kept 200 compiled models (pytorch issue 104701)."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(8, 16, 9, padding=4),
        nn.GELU(),
        nn.Conv1d(16, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv1d(16, 4, 1),
    )
    program = with_hash(program_of(module, "input:FP32[1,8,length=16..4000]"))
    model = served(program, PlanStore(tmp_path), max_buckets=LIVE)
    model.load()
    choose = random.Random(SEED)
    used: OrderedDict[int, None] = OrderedDict()
    before = 0
    for number in range(LENGTH_REQUESTS):
        length = choose.choice(LENGTHS)
        x = torch.randn(1, 8, length)
        got, live = answer(model, Bucket.of({"length": length}), x)
        assert live == (length in used), "what was used lately is there, what was not has left"
        used[length] = None
        used.move_to_end(length)
        if len(used) > LIVE:
            used.popitem(last=False)
        assert [executor.bucket.size("length") for executor in model.live] == list(used)
        if number % 50 == 0:
            torch.testing.assert_close(got, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
        if number == LENGTH_REQUESTS // 4:
            before = memory_kib()
    grown = memory_kib() - before
    print(f"TEST_SEED={SEED}: {LENGTH_REQUESTS} requests, {grown} KiB grown since the first quarter")
    assert grown < 20 * 1024


@pytest.fixture
def planned_in(monkeypatch):
    """Makes a model's planning, which a child process would do, say which thread waits for it."""

    def watch(model):
        threads = []

        def in_child(requests):
            threads.append(threading.current_thread())
            time.sleep(0.2)
            return ["no plan for this size"] * len(requests)

        monkeypatch.setattr(model.cache, "build_missing", in_child)
        return threads

    return watch


def test_random_image_sizes_are_never_tuned_or_planned_while_a_request_waits(tmp_path, planned_in):
    """Height and width anywhere in 400 to 600 made a benchmark run of every request (pytorch issue 2759)."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.Hardswish(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    )
    program = with_hash(program_of(module, "input:FP32[1,3,height=400..600,width=400..600]"))
    engine = FakeEngine({"slow to plan": right})
    model = served(program, PlanStore(tmp_path), {"cudnn": engine}, max_buckets=LIVE)
    model.load()
    waited = planned_in(model)
    choose = random.Random(SEED)
    first_s, again_s = [], []
    try:
        for _ in range(IMAGE_REQUESTS):
            height, width = choose.randrange(400, 601), choose.randrange(400, 601)
            x = torch.randn(1, 3, height, width)
            bucket = Bucket.of({"height": height, "width": width})
            for seconds in (first_s, again_s):
                started = time.perf_counter()
                got, _ = answer(model, bucket, x)
                seconds.append(time.perf_counter() - started)
            torch.testing.assert_close(got, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
            assert len(model.live) <= LIVE
    finally:
        model.close()
    p99_ms = 1000 * statistics.quantiles(first_s, n=100, method="inclusive")[98]
    more_ms = 1000 * (statistics.median(first_s) - statistics.median(again_s))
    print(
        f"TEST_SEED={SEED}: {IMAGE_REQUESTS} sizes, p99 {p99_ms:.1f} ms; "
        f"a size's first request takes {more_ms:.1f} ms longer than its second"
    )
    assert waited, "sizes are planned"
    assert threading.main_thread() not in waited
    assert not engine.built
    assert not engine.loaded
    assert more_ms < 50
