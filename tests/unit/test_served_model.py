"""A program with its plans: what is built when, what leaves, what serves."""

import random
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from programs import FakeEngine, block, line, program_of, right, run_in_torch, served, tuner_of, with_hash
from torch import nn

from cudnn_fusion.engines.base import BuiltPlan
from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.executor import Executor
from cudnn_fusion.instance import Clock, Instance, Place
from cudnn_fusion.plan import BucketRecord, Candidate
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket


def batch(rows):
    return Bucket.of({"batch": rows})


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path)


@pytest.fixture
def program():
    return with_hash(block())


@pytest.fixture(scope="module")
def once_tuned(tmp_path_factory):
    """Buckets of 1 to 16 rows are tuned."""
    store = PlanStore(tmp_path_factory.mktemp("tuned"))
    tuner = tuner_of(with_hash(block()), store)
    for rows in (1, 2, 4, 8, 16):
        tuner.tune(batch(rows), None)
    return store


@pytest.fixture
def tuned(once_tuned, store):
    """A copy of them."""
    shutil.copytree(once_tuned.root, store.root, dirs_exist_ok=True)
    return store


def run(model, x):
    (part,) = model.choose(batch(len(x))).parts
    executor, _ = model.executor(part.bucket)
    executor.inputs[0].zero_()
    executor.inputs[0][: len(x)].copy_(x)
    return executor.run()[0][: len(x)], executor


def test_every_tuned_bucket_is_live_after_loading(program, tuned):
    model = served(program, tuned)
    report = model.load()
    assert report.buckets == [batch(n) for n in (16, 8, 4, 2, 1)]
    assert report.skipped == []
    assert model.tuned == {batch(n) for n in (16, 8, 4, 2, 1)}
    assert {e.origin for e in model.live} == {"exact"}
    assert model.reasons() == []
    for rows in (1, 3, 16):
        x = torch.randn(rows, 3, 8, 8)
        answer, executor = run(model, x)
        torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
        assert executor.origin == "exact"


def test_max_buckets_is_kept_and_reported(program, tuned):
    model = served(program, tuned, max_buckets=2)
    report = model.load()
    assert report.buckets == [batch(16), batch(8)], "the largest serve all sizes"
    assert report.skipped == [f"batch={n}: over MAX_BUCKETS=2" for n in (4, 2, 1)]
    assert model.choose(batch(3)).parts[0].bucket == batch(8)
    for rows in range(17, 30):
        for part in model.choose(batch(rows)).parts:
            model.executor(part.bucket)
    assert len(model.live) == 2


@pytest.mark.parametrize(("limit_mb", "kept"), [(1, [32, 8]), (2, [32, 16, 8]), (3, [32, 16, 8])])
def test_executor_memory_is_kept_and_reported(store, limit_mb, kept):
    """Input buffers of 32, 16 and 8 rows take 0.75, 0.375 and 0.1875 MiB."""
    program = with_hash(
        program_of(nn.Sequential(nn.Conv2d(6, 2, 3), nn.ReLU()), "x:FP32[batch=1..32,6,32,32]")
    )
    tuner = tuner_of(program, store)
    for rows in (32, 16, 8):
        tuner.tune(batch(rows), None)
    model = served(program, store, executor_memory_mb=limit_mb)
    report = model.load()
    assert [bucket.size("batch") for bucket in report.buckets] == kept
    assert sum(e.bytes for e in model.live) <= limit_mb << 20
    assert len(report.buckets) + len(report.skipped) == 3
    assert all(f"over EXECUTOR_MEMORY_MB={limit_mb}" in text for text in report.skipped)


def test_a_bucket_over_the_limit_does_not_keep_smaller_ones_out(store, monkeypatch):
    """64 rows of input take 1.5 MiB, 16 take 0.375."""
    program = with_hash(
        program_of(nn.Sequential(nn.Conv2d(6, 2, 3), nn.ReLU()), "x:FP32[batch=1..64,6,32,32]")
    )
    tuner = tuner_of(program, store)
    for rows in (64, 16):
        tuner.tune(batch(rows), None)
    model = served(program, store, executor_memory_mb=1)
    workspaces = {64: 5 << 20, 16: 3 << 20}
    real = Executor.__init__

    def asks_for_workspace(self, resources, bucket, *given, **named):
        resources.workspace_of(workspaces[bucket.size("batch")])
        real(self, resources, bucket, *given, **named)

    monkeypatch.setattr(Executor, "__init__", asks_for_workspace)
    report = model.load()
    assert report.buckets == [batch(16)]
    assert model.resources.workspace.numel() == workspaces[16]
    assert report.skipped == ["batch=64: over EXECUTOR_MEMORY_MB=1: takes 1.5 MiB"]


def test_one_executor_is_kept_even_if_it_is_over_the_limit(store):
    program = with_hash(
        program_of(nn.Sequential(nn.Conv2d(6, 2, 3), nn.ReLU()), "x:FP32[batch=1..64,6,32,32]")
    )
    tuner_of(program, store).tune(batch(64), None)
    model = served(program, store, executor_memory_mb=1)
    assert model.load().buckets == [batch(64)]
    tuned_executor = model.live[0]
    for rows in (63, 62):
        executor, _ = model.executor(batch(rows))
        assert executor.bytes > 1 << 20
        assert model.live == (tuned_executor, executor), "one untuned executor beside the tuned one"


def test_the_largest_are_those_with_most_elements_of_all_axes(store):
    program = with_hash(line())
    few, many = Bucket.of({"batch": 2, "length": 4}), Bucket.of({"batch": 1, "length": 64})
    tuner = tuner_of(program, store)
    for bucket in (few, many):
        tuner.tune(bucket, None)
    assert served(program, store, max_buckets=1).load().buckets == [many]


def test_the_least_recently_used_leaves(program, tuned):
    model = served(program, tuned, max_buckets=3)
    model.load()
    assert [e.bucket for e in model.live] == [batch(16), batch(8), batch(4)]
    assert model.executor(batch(16))[1]
    executor, live = model.executor(batch(40))
    assert not live
    tuned_buckets = [batch(8), batch(4), batch(16)]
    assert [e.bucket for e in model.live] == [*tuned_buckets, batch(40)], "no tuned one left for it"
    assert model.executor(batch(40)) == (executor, True)
    model.executor(batch(41))
    assert [e.bucket for e in model.live] == [*tuned_buckets, batch(41)]


def test_many_lengths_leave_few_executors(store):
    """1,500 requests over 200 lengths (pytorch issue 104701)."""
    model = served(with_hash(line()), store, max_buckets=8)
    model.load()
    choose = random.Random(0)
    weight_bytes = model.resources.weight_bytes
    for _ in range(1500):
        bucket = Bucket.of({"batch": 1, "length": choose.randrange(4, 204)})
        choice = model.choose(bucket)
        assert choice.kind == "none"
        executor, _ = model.executor(choice.parts[0].bucket)
        assert executor.bucket == bucket
        assert len(model.live) <= 8
    assert model.live[-1] is executor
    assert model.resources.weight_bytes == weight_bytes


def test_engine_reference_uses_no_plan(program, tuned):
    engine = FakeEngine({"sound": right})
    model = served(program, tuned, {"cudnn": engine}, engine="reference")
    report = model.load()
    assert len(report.buckets) == 5
    assert {e.origin for e in model.live} == {"reference"}
    assert model.reasons() == ["10 x reference: switched off by ENGINE=reference"]
    assert not model.cache.loads
    executor, _ = model.executor(batch(40))
    assert executor.origin == "reference"
    assert not engine.loaded
    assert "background-planner" not in {thread.name for thread in threading.enumerate()}


def test_untuned_sizes_are_answered_by_reference(program, store):
    model = served(program, store)
    assert model.load().buckets == []
    for rows in (1, 64):
        x = torch.randn(rows, 3, 8, 8)
        answer, executor = run(model, x)
        assert executor.origin == "reference"
        torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
    choice = model.choose(batch(100))
    assert [(p.bucket.size("batch"), p.rows) for p in choice.parts] == [(64, 64), (36, 36)]


def test_sizes_below_the_smallest_exported_are_never_run(store):
    program = with_hash(program_of(nn.Conv2d(3, 2, 3), "x:FP32[batch=3..8,3,4,4]"))
    model = served(program, store)
    sizes = [(p.bucket.size("batch"), p.rows) for p in model.choose(batch(17)).parts]
    assert sizes == [(8, 8), (8, 8), (3, 1)]


def test_plans_of_another_program_do_not_make_its_buckets(tuned, store):
    model = served(with_hash(block(seed=5)), store)
    assert model.load().buckets == []


@pytest.mark.parametrize(
    "sizes", [(("other", 3),), (("batch", 0),), (("batch", 65),), (("batch", 2), ("other", 3)), ()]
)
def test_a_stored_bucket_that_does_not_fit_the_program_is_left_out(program, tuned, sizes):
    record = BucketRecord(sizes, program.sha256, ())
    tuned.publish_bucket(cpu_compatibility(), record)
    report = served(program, tuned).load()
    assert report.buckets == [batch(n) for n in (16, 8, 4, 2, 1)]
    assert report.skipped == [f"{Bucket(sizes).name}: the program has batch 1..64"]


def test_out_of_memory_means_fewer_buckets(program, tuned, monkeypatch):
    model = served(program, tuned)
    real = model.plans

    def little_memory(bucket, plan):
        if bucket.size("batch") > 4:
            model.resources.workspace_of(1 << 20)
            raise torch.cuda.OutOfMemoryError("2 GiB")
        return real(bucket, plan)

    monkeypatch.setattr(model, "plans", little_memory)
    report = model.load()
    assert report.buckets == [batch(4), batch(2), batch(1)]
    assert report.skipped == ["batch=16: out of memory: 2 GiB", "batch=8: out of memory: 2 GiB"]
    assert model.choose(batch(6)).kind == "split"
    assert model.resources.workspace.numel() == 0, "what the large ones asked for is free again"


def test_it_says_why_nothing_is_tuned(program, tuned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")

    def why(store, program=program, **settings):
        model = served(program, store, **settings)
        model.load()
        return model.why_untuned()

    assert why(tuned) == ""
    assert why(PlanStore(folder / "none"), engine="reference") == ""
    assert why(PlanStore(folder / "none")) == (
        f"no bucket is tuned: {folder / 'none'} has none for this model and kind of device"
    )
    assert why(tuned, replace(program, sha256="0" * 64)).endswith("are for other content of this model")
    shutil.copytree(tuned.root, folder / "some")
    next((folder / "some").glob("*/entries/*")).unlink()
    assert why(PlanStore(folder / "some")).startswith("1 of 10 segments in tuned buckets have no usable")


def test_reasons_count_what_is_not_exact(program, tuned):
    entries = sorted((tuned.root / cpu_compatibility().hash() / "entries").iterdir())
    for path in entries[:3]:
        path.write_bytes(b"")
    model = served(program, PlanStore(tuned.root))
    assert len(model.load().buckets) == 5, "a bucket with a damaged plan is still served"
    assert len(model.reasons()) == 3
    assert all(text.startswith("1 x reference: ") for text in model.reasons())


def test_an_answer_is_not_another_requests_input(store):
    """A model whose output is its input must not hand out the buffer that the next request fills."""

    class Echo(nn.Module):
        def forward(self, x):
            return x

    model = served(with_hash(program_of(Echo(), "x:FP32[batch=1..4,3]")), store)
    model.load()
    executor, _ = model.executor(batch(2))
    executor.inputs[0].fill_(1.0)
    (first,) = executor.run()
    executor.inputs[0].fill_(2.0)
    (second,) = executor.run()
    assert first.unique().tolist() == [1.0]
    assert second.unique().tolist() == [2.0]


class TestBackground:
    """An untuned size is planned away from the request path."""

    @pytest.fixture
    def model(self, program, store, monkeypatch):
        model = served(program, store, {"cudnn": FakeEngine({"new": right})})
        self.asked, self.go = [], threading.Event()

        def in_child(requests):
            self.asked.append(len(requests))
            assert self.go.wait(10)
            return [BuiltPlan(Candidate("cudnn", "fake", "new"), b"new", 0)] * len(requests)

        monkeypatch.setattr(model.cache, "build_missing", in_child)
        yield model
        self.go.set()
        model.close()

    def wait_until(self, condition):
        for _ in range(500):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError("still not after 5 s")

    def test_reference_answers_at_once_and_a_plan_later(self, model, program):
        x = torch.randn(3, 3, 8, 8)
        answer, executor = run(model, x)
        assert executor.origin == "reference", "nothing is planned while a request waits"
        for _ in range(5):
            run(model, x)
        self.go.set()
        self.wait_until(lambda: model.live[-1].origin == "heuristic")
        planned, executor = run(model, x)
        assert executor.origins == {"heuristic": 2}
        torch.testing.assert_close(planned, answer, rtol=1e-4, atol=1e-5)
        assert self.asked == [2], "each size is planned once"

    def test_an_executor_that_has_left_does_not_come_back(self, model):
        model.settings = type(model.settings)(max_buckets=1)
        run(model, torch.randn(3, 3, 8, 8))
        self.wait_until(lambda: self.asked)
        run(model, torch.randn(5, 3, 8, 8))
        self.go.set()
        self.wait_until(lambda: len(self.asked) == 2 and model.live[-1].origin == "heuristic")
        assert [e.bucket for e in model.live] == [batch(5)]

    def test_a_size_that_cannot_be_planned_is_not_tried_again(self, model, monkeypatch):
        model.settings = type(model.settings)(max_buckets=1)
        rows = []

        def in_vain(requests):
            rows.append(requests[0].sizes["x"][0])
            return ["no plan"] * len(requests)

        monkeypatch.setattr(model.cache, "build_missing", in_vain)
        for count in (3, 5, 3, 6):
            run(model, torch.randn(count, 3, 8, 8))
        self.wait_until(lambda: 6 in rows)
        assert rows == [3, 5, 6]

    def test_closing_drops_everything(self, model):
        run(model, torch.randn(3, 3, 8, 8))
        model.close()
        assert model.live == ()
        self.go.set()
        thread = model._planner._thread
        thread.join(10)
        assert not thread.is_alive()
        assert model.live == ()

    def test_a_failure_while_planning_does_not_end_it(self, model, monkeypatch, caplog):
        def broken(requests):
            raise RuntimeError("planner broke")

        good = model.cache.build_missing
        monkeypatch.setattr(model.cache, "build_missing", broken)
        run(model, torch.randn(3, 3, 8, 8))
        self.wait_until(lambda: "planning bucket batch=3" in caplog.text)
        monkeypatch.setattr(model.cache, "build_missing", good)
        self.go.set()
        run(model, torch.randn(4, 3, 8, 8))
        self.wait_until(lambda: model.live[-1].origin == "heuristic")


def test_the_line_for_the_log_says_what_each_bucket_takes(program, tuned):
    model = served(program, tuned)
    report = model.load()
    for executor, mib in zip(model.live, (1.0, 2.0, 3.5, 4.0, 5.0), strict=True):
        executor.bytes = int(mib * 2**20)
    place = Place(torch.device("cpu"), {}, cpu_compatibility())
    line = Instance(model, place, Clock(), report).describe()
    assert "batch=16 (1.0 MiB) batch=8 (2.0 MiB) batch=4 (3.5 MiB)" in line
    assert "buckets 15.5" in line
