"""The layered look-up: which plan serves a segment, and why not a better one."""

import logging
from dataclasses import replace

import pytest
import torch
from programs import (
    CPU,
    FakeEngine,
    block,
    cache_of,
    right,
    run_in_torch,
    served,
    tuner_of,
    twins,
    with_hash,
)

from cudnn_fusion import accuracy
from cudnn_fusion.engines.base import BuiltPlan
from cudnn_fusion.environment import cpu_compatibility, current_provenance
from cudnn_fusion.plan import Candidate, sha256_hex
from cudnn_fusion.plan_cache import ORIGINS, PlanCache, run_once, worst
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.shapes import Bucket

BUCKET = Bucket.of({"batch": 2})


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path)


@pytest.fixture
def tuned(store):
    """The work of a tuned bucket, one item for each of two segments, served by a fake engine's plan."""
    program = with_hash(block())
    outcomes = tuner_of(program, store, engines=[FakeEngine({"sound": right})]).tune(BUCKET, None)
    return [outcome.work for outcome in outcomes]


def find(cache, work):
    return cache.find(work.segment, work.sizes)


def entry(store, work):
    found = store.find(cpu_compatibility(), work.key)
    assert isinstance(found, Found)
    return found


def zeros(ready, operands, out):
    return out.zero_()


def is_right(answer, work):
    result = run_once(answer.ready, work.segment, work.sizes, 3, CPU)
    expected = accuracy.reference(work.segment, accuracy.generated_operands(work.segment, work.sizes, 3, CPU))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_exact_after_tuning_reference_before(store, tmp_path):
    program = with_hash(block())
    work = tuner_of(program, store).work(BUCKET)
    for item in work:
        answer = find(cache_of([store]), item)
        assert answer.origin == "reference"
        assert answer.reason == f"no plans for this environment in {tmp_path}"
        is_right(answer, item)
    tuner_of(program, store).tune(BUCKET, None)
    for item in work:
        answer = find(cache_of([store]), item)
        assert (answer.origin, answer.reason, answer.stale) == ("exact", "", ())
        assert answer.stored is not None
        is_right(answer, item)


def test_the_overlay_is_read_first(tuned, store, tmp_path):
    overlay = PlanStore(tmp_path / "overlay")
    plan = entry(store, tuned[0]).plan
    overlay.publish(
        cpu_compatibility(), replace(plan, candidate=Candidate("torch", "row_major"), blob_sha256=None), None
    )
    cache = cache_of([overlay, store], cudnn=FakeEngine({"sound": right}))
    assert find(cache, tuned[0]).candidate.form == "row_major"
    assert find(cache, tuned[1]).candidate.plan_name == "sound"


def test_without_a_store_torch_serves(tuned):
    answer = find(cache_of([]), tuned[0])
    assert (answer.origin, answer.reason) == ("reference", "no plan store")


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b"not json", None])
def test_a_damaged_entry_is_a_miss_with_a_reason(tuned, store, damage, caplog):
    """pytorch issues 153791, 119698."""
    path = store.root / cpu_compatibility().hash() / "entries" / f"{tuned[0].key.digest()}.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    cache = cache_of([PlanStore(store.root)], cudnn=FakeEngine({"sound": right}))
    with caplog.at_level(logging.WARNING):
        answer = find(cache, tuned[0])
    assert answer.origin == "reference"
    assert path.name in answer.reason
    assert len(caplog.records) == 1
    is_right(answer, tuned[0])
    assert find(cache, tuned[1]).origin == "exact", "the others are not affected"


def test_plans_of_another_environment_are_a_miss_that_says_so(tuned, store):
    cache = cache_of([store], cudnn=FakeEngine({"sound": right}))
    cache.compatibility = replace(cache.compatibility, torch="1.0", threads=99)
    answer = find(cache, tuned[0])
    assert answer.origin == "reference"
    assert "another environment only" in answer.reason
    assert "torch: stored" in answer.reason
    assert "here 1.0" in answer.reason


def test_another_provenance_marks_stale_and_serves(tuned, store):
    provenance = replace(current_provenance("cpu"), product="99.0")
    engines = {"cudnn": FakeEngine({"sound": right})}
    cache = PlanCache([store], cpu_compatibility(), provenance, engines, CPU)
    answer = find(cache, tuned[0])
    assert answer.origin == "exact"
    assert len(answer.stale) == 1
    assert answer.stale[0].startswith("product ")
    assert answer.stale[0].endswith("-> 99.0")


def test_a_plan_that_gives_other_numbers_after_loading_is_not_used(tuned, store, caplog):
    """Right when tuned, wrong after reload (tensorflow issue 50570)."""
    with caplog.at_level(logging.WARNING):
        answer = find(cache_of([store], cudnn=FakeEngine({"sound": zeros})), tuned[0])
    assert answer.origin == "reference"
    assert answer.reason.startswith("wrong: error")
    assert len(caplog.records) == 1
    assert "conv2d+bias+relu" in caplog.text
    is_right(answer, tuned[0])


def raises(ready, operands, out):
    raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ({}, "engine cudnn is not available"),
        ({"cudnn": FakeEngine({})}, "does not run: no behaviour 'sound'"),
        ({"cudnn": FakeEngine({"sound": raises})}, "does not run: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_plan_whose_engine_or_form_is_gone_is_a_miss_with_one_warning(tuned, store, engines, said, caplog):
    """flashinfer issues 3566, 3449."""
    cache = cache_of([store], **engines)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer = find(cache, tuned[0])
    assert (answer.origin, answer.reason) == ("reference", said)
    assert len(caplog.records) == 1
    is_right(answer, tuned[0])


BLOBS = {
    "wrong first bytes": b"\0\0und",
    "cut": b"sou",
    "empty": b"",
    "more behind it": b"sound and more",
    "another plan's": b"other",
}


@pytest.mark.parametrize("checksum", ["matches", "does not match"])
@pytest.mark.parametrize("damage", BLOBS)
def test_a_model_with_a_damaged_blob_loads_refuses_that_plan_and_serves_the_rest(
    store, damage, checksum, monkeypatch, caplog
):
    program, sizes = with_hash(block()), [Bucket.of({"batch": rows}) for rows in (2, 4)]
    tuner = tuner_of(program, store, engines=[FakeEngine({"sound": right})])
    for bucket in sizes:
        tuner.tune(bucket, None)
    refused = tuner.work(BUCKET)[0]
    plan, blob = entry(store, refused).plan, BLOBS[damage]
    store.publish(cpu_compatibility(), replace(plan, blob_sha256=sha256_hex(blob)), blob)
    path = store.root / cpu_compatibility().hash() / "blobs" / f"{sha256_hex(blob)}.plan"
    said = f"does not run: not loaded: no plan begins with {blob[:8]!r}"
    if checksum == "does not match":
        path.write_bytes(blob + b"!")
        said = f"{path.name}: its {len(blob) + 1} bytes do not match their checksum"
    engine = FakeEngine({"sound": right})
    model = served(program, PlanStore(store.root), {"cudnn": engine})
    monkeypatch.setattr(model.cache, "build_missing", lambda requests: ["no other plan"] * len(requests))
    with caplog.at_level(logging.WARNING):
        report = model.load()
    assert (report.buckets, report.skipped) == (sizes[::-1], [])
    (reason,) = model.reasons()
    assert reason.startswith("1 x reference: ")
    assert said in reason
    assert reason.endswith("; no other plan")
    assert len(caplog.records) == 1
    assert said in caplog.text
    origins = {executor.bucket: executor.origins for executor in model.live}
    assert origins == {sizes[0]: {"exact": 1, "reference": 1}, sizes[1]: {"exact": 2}}
    for bucket in sizes:
        executor, live = model.executor(bucket)
        assert live
        x = torch.randn(bucket.size("batch"), 3, 8, 8)
        executor.inputs[0].copy_(x)
        torch.testing.assert_close(executor.run(), run_in_torch(program, x), rtol=1e-4, atol=1e-5)
    assert len(caplog.records) == 1, "a plan is refused once, not by every request"


def test_a_torch_form_that_no_longer_exists_is_a_miss(tuned, store):
    plan = entry(store, tuned[0]).plan
    gone = replace(plan, candidate=Candidate("torch", "winograd"), blob_sha256=None)
    store.publish(cpu_compatibility(), gone, None)
    answer = find(cache_of([store]), tuned[0])
    assert answer.origin == "reference"
    assert "no form 'winograd'" in answer.reason


def test_the_next_store_serves_when_the_first_ones_plan_fails(tuned, store, tmp_path):
    overlay = PlanStore(tmp_path / "overlay")
    plan = entry(store, tuned[0]).plan
    overlay.publish(
        cpu_compatibility(), replace(plan, candidate=Candidate("torch", "gone"), blob_sha256=None), None
    )
    cache = cache_of([overlay, store], cudnn=FakeEngine({"sound": right}))
    assert find(cache, tuned[0]).candidate.plan_name == "sound"


def test_two_sites_of_one_key_load_once(store):
    program = with_hash(twins())
    tuner_of(program, store, engines=[FakeEngine({"sound": right})]).tune(BUCKET, None)
    engine = FakeEngine({"sound": right})
    model = served(program, store, {"cudnn": engine})
    model.load()
    assert engine.loaded == ["sound"]
    assert len(model.resources.partition.sites) == 2
    executor, _ = model.executor(BUCKET)
    assert executor.origins == {"exact": 2}
    x = torch.randn(2, 3, 8, 8)
    executor.inputs[0].copy_(x)
    torch.testing.assert_close(executor.run(), run_in_torch(program, x), rtol=1e-4, atol=1e-5)


def test_plans_checked_in_another_way_are_not_used(tuned, store, monkeypatch):
    """Tuned with checking off, loaded with checking on (tilelang issue 2793)."""
    monkeypatch.setattr(accuracy, "VALIDATION", "float64;stricter")
    answer = find(cache_of([store], cudnn=FakeEngine({"sound": right})), tuned[0])
    assert answer.origin == "reference"
    assert answer.reason == "no plan is stored for this segment at these sizes and settings"


def test_a_plan_made_without_the_device_is_compared_before_it_serves(store):
    program = with_hash(block())
    tuner = tuner_of(program, store, engines=[])
    tuner.plan_untimed(BUCKET, FakeEngine({"sound": right}))
    work = tuner.work(BUCKET)[0]
    assert entry(store, work).plan.sampled is None
    answer = find(cache_of([store], cudnn=FakeEngine({"sound": right})), work)
    assert answer.origin == "exact"
    answer = find(cache_of([store], cudnn=FakeEngine({"sound": zeros})), work)
    assert answer.origin == "reference"
    assert answer.reason.startswith("wrong: error")


class TestPlanning:
    """Missing plans, planned in a child process (which is played here)."""

    def built(self, name):
        return BuiltPlan(Candidate("cudnn", "fake", name), name.encode(), 0)

    def planned(self, cache, work, answer, monkeypatch):
        asked = []
        monkeypatch.setattr(
            cache, "build_missing", lambda requests: asked.extend(requests) or [answer] * len(requests)
        )
        (result,) = cache.plan([(work.segment, work.sizes)])
        return result, asked

    def test_the_engines_first_choice_serves_when_it_is_right(self, store, monkeypatch):
        work = tuner_of(with_hash(block()), store).work(BUCKET)[0]
        cache = cache_of([store], cudnn=FakeEngine({"new": right}))
        answer, asked = self.planned(cache, work, self.built("new"), monkeypatch)
        assert answer.origin == "heuristic"
        assert answer.reason.startswith("no plans for this environment")
        assert asked[0].recipes == ()
        assert cache.loads["planned"] == 1
        is_right(answer, work)
        again, asked = self.planned(cache, work, self.built("new"), monkeypatch)
        assert again is answer
        assert asked == []

    def test_a_wrong_first_choice_is_not_used(self, store, monkeypatch):
        work = tuner_of(with_hash(block()), store).work(BUCKET)[0]
        cache = cache_of([store], cudnn=FakeEngine({"new": zeros}))
        answer, _ = self.planned(cache, work, self.built("new"), monkeypatch)
        assert answer.origin == "reference"
        assert "heuristic: wrong: error" in answer.reason
        is_right(answer, work)

    def test_a_child_that_fails_leaves_the_reference(self, store, monkeypatch):
        work = tuner_of(with_hash(block()), store).work(BUCKET)[0]
        cache = cache_of([store], cudnn=FakeEngine({}))
        answer, _ = self.planned(cache, work, "the planning process ended with code -9", monkeypatch)
        assert answer.origin == "reference"
        assert answer.reason.endswith("; the planning process ended with code -9")

    def test_a_winner_of_another_environment_is_the_recipe(self, tuned, store, monkeypatch):
        cache = cache_of([store], cudnn=FakeEngine({"sound": right}))
        cache.compatibility = replace(cache.compatibility, torch="1.0")
        answer, asked = self.planned(cache, tuned[0], self.built("sound"), monkeypatch)
        assert answer.origin == "recipe"
        assert [candidate.plan_name for candidate in asked[0].recipes] == ["sound"]
        assert "another environment only" in answer.reason

    def test_each_missing_key_is_planned_once(self, store, monkeypatch):
        tuner = tuner_of(with_hash(twins()), store)
        (work,) = tuner.work(BUCKET)
        cache = cache_of([store], cudnn=FakeEngine({"new": right}))
        assert len(cache.missing([(work.segment, work.sizes)] * 2)) == 1

    def test_without_cudnn_nothing_is_planned(self, store):
        work = tuner_of(with_hash(block()), store).work(BUCKET)[0]
        assert cache_of([store]).missing([(work.segment, work.sizes)]) == []


def test_the_worst_origin():
    assert worst([]) == "exact"
    assert worst(["exact", "heuristic", "recipe"]) == "heuristic"
    assert worst(ORIGINS) == "reference"
