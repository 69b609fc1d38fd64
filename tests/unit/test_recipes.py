"""Plans of another environment: rebuilt here as recipes and checked, never loaded as they are."""

from dataclasses import replace

import pytest
import torch
from programs import FakeEngine, block, cache_of, run_in_torch, served, tuner_of, write_version

from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.plan import Candidate, sha256_hex
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.shapes import Bucket

BUCKET = Bucket.of({"batch": 2})


@pytest.fixture
def moved(tmp_path):
    """A program, and a store in which its plans were tuned with other threads than here."""
    program = write_version(tmp_path / "model", block())
    tuner = tuner_of(program, PlanStore(tmp_path / "here"))
    tuner.tune(BUCKET, None)
    here = cpu_compatibility()
    elsewhere = replace(here, threads=(here.threads or 0) + 62)
    store = PlanStore(tmp_path / "elsewhere")
    for plan in tuner.store.plans(here.hash()):
        found = tuner.store.find(here, plan.key)
        assert isinstance(found, Found)
        store.publish(elsewhere, found.plan, found.blob)
    for record in tuner.store.buckets(here):
        store.publish_bucket(elsewhere, record)
    return program, store


def test_a_winner_of_another_cpu_serves_as_recipe_and_says_why(moved):
    program, store = moved
    model = served(program, store)
    report = model.load()
    assert report.buckets == [BUCKET]
    executor = model.live[0]
    assert set(executor.origins) == {"recipe"}
    assert any("threads" in reason for reason in model.reasons())
    x = torch.randn(executor.inputs[0].shape)
    executor.inputs[0].copy_(x)
    for found, expected in zip(executor.run(), run_in_torch(program, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_other_environments_plans_stay_where_they_are(moved):
    _, store = moved
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    served(moved[0], store).load()
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before


def test_a_recipe_that_is_wrong_here_is_not_used(moved):
    program, store = moved
    wrong = FakeEngine({"": lambda ready, operands, out: out.zero_()}, name="torch")
    cache = cache_of([store], torch=wrong)
    tuner = tuner_of(program, store)
    wanted = [(work.segment, work.sizes) for work in tuner.work(BUCKET)]
    for answer in cache.plan(wanted):
        assert answer.origin == "reference"
        assert answer.candidate == Candidate("torch", "channels_last")


@pytest.mark.parametrize(
    ("capability", "damaged", "origin"),
    [(None, False, "recipe"), ("8.0", False, "reference"), (None, True, "reference")],
)
def test_kernels_of_another_environment_serve_on_the_same_kind_of_gpu(
    moved, tmp_path, capability, damaged, origin
):
    program, store = moved
    elsewhere = replace(cpu_compatibility(), threads=1000, compute_capability=capability)
    kernels = PlanStore(tmp_path / "kernels")
    for environment in store.environments():
        for plan in store.plans(environment.compatibility.hash()):
            candidate = Candidate("depthwise", "direct", "right")
            blob = b"right"
            made = replace(plan, candidate=candidate, blob_sha256=sha256_hex(blob))
            kernels.publish(elsewhere, made, blob)
    if damaged:
        for path in kernels.root.rglob("*.plan"):
            path.chmod(0o644)
            path.write_bytes(b"wrong")
    engine = FakeEngine(
        {"right": lambda ready, operands, out: ready.run(operands, None, out)}, name="depthwise"
    )
    cache = cache_of([kernels], depthwise=engine)
    wanted = [(work.segment, work.sizes) for work in tuner_of(program, store).work(BUCKET)]
    for answer in cache.plan(wanted):
        assert answer.origin == origin
    assert bool(engine.loaded) == (origin == "recipe")
    assert engine.built == []
