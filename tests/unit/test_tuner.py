"""Tuning: who wins, who is rejected and why, what is kept and what is done again."""

import time
from dataclasses import replace

import pytest
import torch
from programs import (
    CPU,
    Chains,
    FakeEngine,
    FakePlan,
    block,
    cache_of,
    program_of,
    right,
    run_in_torch,
    served,
    tuner_of,
    twins,
    with_hash,
)
from torch import nn

from cudnn_fusion import accuracy, tuner, whole_model
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.executor import Executor
from cudnn_fusion.plan import Candidate
from cudnn_fusion.plan_store import Found, Miss, PlanStore
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.tuner import model_inputs

BUCKET = Bucket.of({"batch": 2})


def slow(ready, operands, out):
    time.sleep(0.002)
    return ready.run(operands, None, out)


def zeros(ready, operands, out):
    return out.zero_()


def unwritten(ready, operands, out):
    return out


def out_of_memory(ready, operands, out):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


def without_nan(ready, operands, out):
    return out.copy_(ready.run(operands, None).nan_to_num(0.0))


class Wearing:
    """Right for some runs, then raises."""

    def __init__(self, runs):
        self.left = runs

    def __call__(self, ready, operands, out):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("an illegal memory access")
        return ready.run(operands, None, out)


def wrong_for_generated(ready, operands, out):
    """Right for the small values that the layers see in these tests."""
    result = ready.run(operands, None, out)
    return result.mul_(1.5) if operands["x"].abs().max() > 0.9 else result


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path / "staging")


@pytest.fixture(scope="module")
def program():
    return with_hash(block())


def reasons(outcome):
    return {label.rsplit(":", 1)[-1]: reason for label, reason in (outcome.plan or outcome).rejected}


def stored(store, outcome):
    return store.find(cpu_compatibility(), outcome.work.key)


class TestChoice:
    def test_a_fast_wrong_candidate_is_rejected_with_its_reason(self, program, store):
        """The fastest candidate may be the wrong one (pytorch issue 163539)."""
        engine = FakeEngine({"wrong": zeros, "sound": right, "unwritten": unwritten})
        outcomes = tuner_of(program, store, engines=[engine]).tune(BUCKET, None)
        assert [o.plan.candidate.plan_name for o in outcomes] == ["sound", "sound"]
        for outcome in outcomes:
            found = stored(store, outcome)
            assert isinstance(found, Found)
            assert found.plan == outcome.plan
            assert found.blob == b"sound"
            why = reasons(outcome)
            assert why["wrong"].startswith("wrong: error")
            assert why["unwritten"].startswith("wrong: error inf")

    def test_the_fastest_of_the_sound_ones_wins(self, program, store):
        engine = FakeEngine({"slow": slow, "fast": right, "slower": slow})
        outcomes = tuner_of(program, store, engines=[engine]).tune(BUCKET, None)
        for outcome in outcomes:
            plan = outcome.plan
            assert plan.candidate.plan_name == "fast"
            assert plan.candidates_timed == 3
            assert plan.time_us < 2000

    def test_torchs_time_is_kept_beside_the_winners(self, program, store):
        engines = [FakeEngine({"slow": slow}), TorchEngine(CPU)]
        for outcome in tuner_of(program, store, engines=engines).tune(BUCKET, None):
            assert outcome.plan.candidate.engine == "torch"
            assert outcome.plan.torch_time_us >= outcome.plan.time_us
            assert outcome.plan.blob_sha256 is None

    def test_candidates_that_cannot_be_built_are_skipped(self, program, store):
        engine = FakeEngine({"sound": right}, refused={"refused": "needs more workspace than the limit"})
        for outcome in tuner_of(program, store, engines=[engine]).tune(BUCKET, None):
            assert reasons(outcome)["refused"] == "needs more workspace than the limit"

    def test_an_engine_that_raises_something_else_loses_only_that_candidate(self, program, store):
        class Fragile(FakeEngine):
            def build(self, segment, sizes, candidate):
                if candidate.plan_name == "crashes":
                    raise RuntimeError("internal\nerror")
                return super().build(segment, sizes, candidate)

        engine = Fragile({"crashes": right, "sound": right})
        for outcome in tuner_of(program, store, engines=[engine]).tune(BUCKET, None):
            assert reasons(outcome)["crashes"] == "is not built: internal error"
            assert outcome.plan.candidate.plan_name == "sound"

    def test_a_candidate_that_runs_out_of_memory_is_skipped(self, program, store):
        engine = FakeEngine({"hungry": out_of_memory, "sound": right})
        for outcome in tuner_of(program, store, engines=[engine]).tune(BUCKET, None):
            assert reasons(outcome)["hungry"].startswith("does not run: CUDA out of memory")

    def test_a_candidate_that_fails_only_when_timed_is_skipped(self, program, tmp_path):
        """Passes its checks, then fails (flashinfer issue 4165)."""
        checks = 3
        for runs in (checks, checks + 1, checks + 5):
            engine = FakeEngine({"wearing": Wearing(runs), "sound": right})
            tuned = tuner_of(program, PlanStore(tmp_path / str(runs)), engines=[engine])
            (outcome, _) = tuned.tune(BUCKET, None)
            assert outcome.plan.candidate.plan_name == "sound"
            assert reasons(outcome)["wearing"] == "fails when run again and again: an illegal memory access"

    def test_a_candidate_that_drops_nan_is_rejected(self, program, store):
        """tensorflow issue 40072."""
        engine = FakeEngine({"drops": without_nan, "sound": right})
        for outcome in tuner_of(program, store, engines=[engine]).tune(BUCKET, None):
            assert reasons(outcome)["drops"].startswith("NaN: ")

    def test_a_winner_passes_the_check_after_loading_too(self, program, store):
        """Loading compares generated operands: who would fail there is not chosen."""
        engine = FakeEngine({"wrong for generated": wrong_for_generated, "sound": slow})
        samples = {"x": torch.rand(4, 3, 8, 8) * 0.1}
        outcomes = tuner_of(program, store, engines=[engine]).tune(BUCKET, samples)
        assert outcomes[0].plan.candidate.plan_name == "sound"
        assert served(program, store, {"cudnn": engine}).load().buckets == [BUCKET]

    def test_checked_on_says_what_was_compared(self, program, store):
        """With samples, what an interrupted run without them has left is checked again."""
        samples = {"x": torch.randn(3, 3, 8, 8)}
        for given, told in ((None, "generated"), (samples, "samples")):
            outcomes = tuner_of(program, store).tune(BUCKET, given)
            assert {o.plan.checked_on for o in outcomes} == {told}


class TestSearch:
    class Engine(FakeEngine):
        """Has neighbours that it does not list."""

        def candidates(self, segment, sizes):
            return [Candidate("cudnn", "fake", "slow")]

        def neighbours(self, segment, sizes, candidate):
            near = {"slow": ("zeros", "fast", "refused", "slow"), "fast": ("slow", "fast")}
            return [Candidate("cudnn", "fake", name) for name in near[candidate.plan_name]]

    def test_near_the_fastest_is_a_faster_one(self, program, store):
        def zeroed(ready, operands, out):
            return ready.run(operands, None, out).zero_()

        engine = self.Engine({"slow": slow, "fast": right, "zeros": zeroed}, refused={"refused": "no"})
        for outcome in tuner_of(program, store, engines=[engine]).tune(BUCKET, None):
            assert outcome.plan.candidate.plan_name == "fast"
            assert outcome.plan.candidates_timed == 2
            why = reasons(outcome)
            assert why["zeros"].startswith("wrong: error")
            assert why["refused"] == "no"
        assert sorted(set(engine.built)) == ["fast", "refused", "slow", "zeros"]
        assert engine.built.count("slow") == engine.built.count("fast") == 2  # one for each segment


class TestNothingFound:
    def test_nothing_is_stored_when_every_candidate_fails(self, program, store):
        """tvm issue 9600."""
        engine = FakeEngine({"wrong": zeros, "hungry": out_of_memory}, refused={"refused": "no"})
        tuned = tuner_of(program, store, engines=[engine])
        for outcome in tuned.tune(BUCKET, None):
            assert outcome.plan is None
            assert len(outcome.reasons) == 3
            assert isinstance(stored(store, outcome), Miss)
        assert store.buckets(cpu_compatibility()) == []

    def test_an_engine_without_candidates_is_named_as_the_reason(self, program, store):
        outcomes = tuner_of(program, store, engines=[FakeEngine({})]).tune(BUCKET, None)
        assert [o.plan for o in outcomes] == [None, None]
        assert {o.reasons for o in outcomes} == {(("cudnn", "supports no form of this segment"),)}

    def test_a_bucket_with_one_segment_missing_is_not_recorded(self, program, store):
        def only_with_residual(ready, operands, out):
            return right(ready, operands, out) if "residual" in operands else out

        engine = FakeEngine({"partial": only_with_residual})
        first, second = tuner_of(program, store, engines=[engine]).tune(BUCKET, None)
        assert first.plan is None
        assert second.plan is not None
        assert store.buckets(cpu_compatibility()) == []
        assert isinstance(stored(store, second), Found), "what is finished is kept"

    def test_the_whole_program_is_checked_as_it_will_be_served(self, program, store):
        tuner_of(program, store).tune(BUCKET, None)
        (record,) = store.buckets(cpu_compatibility())
        assert 0 < record.torch_error.rms < 1e-6
        assert 0 < record.error.rms < 1e-6

    def test_a_bucket_whose_whole_program_is_wrong_is_not_recorded(self, program, store, monkeypatch):
        """Each plan is right alone: what goes wrong between them shows only here."""

        class Wrong(Executor):
            def run(self):
                return [output * 1.001 for output in super().run()]

        monkeypatch.setattr(whole_model, "Executor", Wrong)
        pretuning = tuner_of(program, store)
        outcomes = pretuning.tune(BUCKET, None)
        assert all(outcome.plan is not None for outcome in outcomes)
        assert store.buckets(cpu_compatibility()) == []
        (problem,) = pretuning.problems
        assert problem.startswith("batch=2: the whole program from these plans is wrong: error ")

    @pytest.mark.parametrize("resumed", [False, True])
    def test_a_more_exact_plan_is_published_where_the_fastest_made_the_whole_wrong(
        self, program, store, tmp_path, monkeypatch, resumed
    ):
        """Each plan is within its own bound; together they are not. Also where an interrupted run has left
        the fastest, and nothing of those behind it."""
        check = whole_model.check

        def strict(*arguments):
            errors = check(*arguments)
            return replace(errors, refusal="wrong" if errors.ours.rms > 1e-7 else None)

        def off(ready, operands, out):
            time.sleep(0.004)
            return ready.run(operands, None, out).mul_(1 + 5e-7)

        def sound(ready, operands, out):
            time.sleep(0.005)
            return ready.run(operands, None, out)

        monkeypatch.setattr(whole_model, "check", strict)
        engine = FakeEngine({"off": off, "sound": sound})
        left = PlanStore(tmp_path / "left")
        if resumed:
            interrupted = tuner_of(program, left, engines=[engine])
            monkeypatch.setattr(interrupted, "_record", lambda *_: [])  # ends before the whole is judged
            interrupted.tune(BUCKET, None)
        pretuning = tuner_of(program, store, engines=[engine], unfinished=[left])
        outcomes = pretuning.tune(BUCKET, None)
        assert pretuning.problems == []
        assert {outcome.plan.candidate.plan_name for outcome in outcomes} == {"sound"}
        assert [stored(store, outcome).plan for outcome in outcomes] == [o.plan for o in outcomes]
        (record,) = store.buckets(cpu_compatibility())
        assert (record.swapped, record.error.rms) == (2, pytest.approx(0, abs=1e-7))

    @pytest.mark.parametrize("slower", [False, True])
    def test_torchs_form_serves_a_program_that_plans_make_slower(self, program, store, monkeypatch, slower):
        """Alone every fused plan is faster."""

        class SlowAlone(TorchEngine):
            def load(self, segment, sizes, candidate, blob, workspace_bytes):
                return FakePlan(super().load(segment, sizes, candidate, blob, workspace_bytes), slow)

        monkeypatch.setattr(whole_model, "times_us", lambda *_: [20.0, 10.0] if slower else [10.0, 20.0])
        engines = [FakeEngine({"fused": right}), SlowAlone(CPU)]
        outcomes = tuner_of(program, store, engines=engines).tune(BUCKET, None)
        assert {o.plan.candidate.engine for o in outcomes} == {"torch" if slower else "cudnn"}
        assert {o.plan.candidate.form for o in outcomes} == {REFERENCE_FORM if slower else "fake"}
        assert all(stored(store, o).plan == o.plan for o in outcomes)
        (record,) = store.buckets(cpu_compatibility())
        assert (record.model_time_us, record.swapped) == (10.0, 2 if slower else 0)

    def test_a_plan_may_spread_a_nan_where_the_program_fills_the_row_with_it_anyway(self, tmp_path):
        """The first program ends in a mean over all positions, the second gives each its own output."""

        def spreading(ready, operands, out):
            y = ready.run(operands, None, out)
            return y.masked_fill_(y.isnan().flatten(1).any(1).view(-1, 1, 1, 1), float("nan"))

        class Everywhere(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 1)

            def forward(self, x):
                return self.conv(x)

        class Mean(Everywhere):
            def forward(self, x):
                return self.conv(x).mean((1, 2, 3))

        for module, accepted in ((Mean(), True), (Everywhere(), False)):
            program = with_hash(program_of(module, "x:FP32[batch=1..4,3,8,8]"))
            engine = FakeEngine({"spreading": spreading})
            store = PlanStore(tmp_path / module.__class__.__name__)
            (outcome,) = tuner_of(program, store, engines=[engine]).tune(BUCKET, None)
            assert (outcome.plan is not None) is accepted
            assert accepted or "have one that torch has not" in outcome.reasons[0][1]

    def test_values_that_overflow_are_no_reason_to_accept_anything(self, store):
        """fp16: torch's own result is infinite, so that its error must not be the bound."""
        module = nn.Conv2d(4, 4, 1, bias=False)
        module.weight.data.fill_(60.0)
        program = with_hash(program_of(module, "x:FP16[batch=1..4,4,3,3]", precision="fp16"))
        engine = FakeEngine({"zeros": zeros, "like torch": right})
        samples = {"x": torch.full((2, 4, 3, 3), 1000.0)}
        (outcome,) = tuner_of(program, store, engines=[engine]).tune(BUCKET, samples)
        assert outcome.plan is None
        assert {"torch's own result is not finite" in reason for _, reason in outcome.reasons} == {True}

    def test_samples_with_nan_make_nothing_pass(self, program, store):
        engine = FakeEngine({"zeros": zeros})
        samples = {"x": torch.full((2, 3, 8, 8), float("nan"))}
        outcomes = tuner_of(program, store, engines=[engine]).tune(BUCKET, samples)
        assert [outcome.plan for outcome in outcomes] == [None, None]


class TestAgain:
    def test_a_second_run_builds_and_times_nothing(self, program, store):
        first = tuner_of(program, store)
        made = first.tune(BUCKET, None)
        assert first.built_candidates == first.timed_candidates == 6
        second = tuner_of(program, store)
        outcomes = second.tune(BUCKET, None)
        assert (second.built_candidates, second.timed_candidates) == (0, 0)
        assert [o.plan for o in outcomes] == [o.plan for o in made]
        assert all(o.reused for o in outcomes)

    def test_a_second_run_records_nothing_new(self, program, store, tmp_path, monkeypatch):
        """A bucket recorded anew would change the model directory, and the server would reload the model."""
        tuner_of(program, store).tune(BUCKET, None)
        published = PlanStore(tmp_path / "plans")
        published.merge_from(store)
        (record,) = published.buckets(cpu_compatibility())
        assert record.model_time_us > 0
        assert record.torch_time_us > 0
        monkeypatch.setattr(tuner, "time_interleaved", None)
        for other in (store, PlanStore(tmp_path / "another staging directory")):
            tuner_of(program, other, known=[published]).tune(BUCKET, None)
            before = files(published)
            assert published.merge_from(other) == 0
            assert files(published) == before

    @pytest.mark.parametrize("published", [False, True])
    def test_a_finished_plan_that_no_longer_loads_is_tuned_again(self, program, store, tmp_path, published):
        """The server refuses such a plan, so that it must not count as finished for ever."""
        old = PlanStore(tmp_path / "model") if published else store
        tuner_of(program, old, engines=[FakeEngine({"old": right})]).tune(BUCKET, None)
        again = tuner_of(program, store, engines=[FakeEngine({"new": right})], known=[old])
        outcomes = again.tune(BUCKET, None)
        assert [(o.reused, o.plan.candidate.plan_name) for o in outcomes] == [(False, "new")] * 2
        without_engine = tuner_of(program, store, known=[old])
        outcomes = without_engine.tune(BUCKET, None)
        assert [(o.reused, o.plan.candidate.engine) for o in outcomes] == [(False, "torch")] * 2
        assert without_engine.tune(BUCKET, None)[0].reused

    @pytest.mark.parametrize("finished", [1, 2, 3])
    def test_an_interruption_loses_nothing(self, program, store, finished):
        buckets = [BUCKET, Bucket.of({"batch": 4})]
        first = tuner_of(program, store)
        seen = []

        def interrupt(outcome):
            seen.append(outcome)
            if len(seen) == finished:
                raise KeyboardInterrupt

        first.on_outcome = interrupt
        with pytest.raises(KeyboardInterrupt):
            all(first.tune(bucket, None) for bucket in buckets)
        assert all(isinstance(stored(store, o), Found) for o in seen)
        second = tuner_of(program, store)
        outcomes = [o for bucket in buckets for o in second.tune(bucket, None)]
        assert [o.reused for o in outcomes] == [i < finished for i in range(4)]
        assert second.timed_candidates == (4 - finished) * 3
        assert len(store.buckets(cpu_compatibility())) == 2

    def test_other_weights_are_checked_again_and_not_timed(self, store, tmp_path):
        engine = FakeEngine({"sound": right})
        old = with_hash(block())
        made = tuner_of(old, store, engines=[engine]).tune(BUCKET, None)
        new = with_hash(block(seed=9))
        assert new.sha256 != old.sha256
        staging = PlanStore(tmp_path / "new")
        engine = FakeEngine({"sound": right})
        tuned = tuner_of(new, staging, engines=[engine], known=[store])
        outcomes = tuned.tune(BUCKET, None)
        assert all(o.reused for o in outcomes)
        assert (tuned.built_candidates, tuned.timed_candidates) == (0, 0)
        assert engine.loaded.count("sound") >= 2, "each is loaded and compared with the new weights"
        assert [o.plan.time_us for o in outcomes] == [o.plan.time_us for o in made]
        assert len(staging.buckets(cpu_compatibility(), new.sha256)) == 1

    def test_a_plan_that_is_wrong_with_other_weights_is_tuned_anew(self, store, tmp_path):
        engine = FakeEngine({"first": right})
        tuner_of(with_hash(block()), store, engines=[engine]).tune(BUCKET, None)
        engine = FakeEngine({"first": zeros, "second": right})
        tuned = tuner_of(with_hash(block(seed=9)), PlanStore(tmp_path / "n"), engines=[engine], known=[store])
        outcomes = tuned.tune(BUCKET, None)
        assert [o.plan.candidate.plan_name for o in outcomes] == ["second", "second"]
        assert not any(o.reused for o in outcomes)

    def test_an_equal_sibling_version_gives_its_plans(self, program, store, tmp_path):
        """The same program exported again as the next version: its plans must be there too."""
        tuner_of(program, store).tune(BUCKET, None)
        staging = PlanStore(tmp_path / "next")
        tuned = tuner_of(program, staging, known=[store])
        outcomes = tuned.tune(BUCKET, None)
        assert tuned.timed_candidates == 0
        published = PlanStore(tmp_path / "version 2")
        assert published.merge_from(staging) == 2
        assert all(isinstance(stored(published, o), Found) for o in outcomes)
        assert served(program, published).load().buckets == [BUCKET]

    def test_another_environments_plans_are_not_taken_over(self, program, store, tmp_path):
        elsewhere = replace(cpu_compatibility(), device_name="another processor")
        tuner_of(program, store, compatibility=elsewhere).tune(BUCKET, None)
        tuned = tuner_of(program, PlanStore(tmp_path / "here"), known=[store])
        tuned.tune(BUCKET, None)
        assert tuned.timed_candidates == 6


class TestLayers:
    def test_two_layers_of_one_shape_share_a_plan_and_are_both_right(self, store):
        """mxnet issue 21104."""
        program = with_hash(twins())
        tuned = tuner_of(program, store)
        (outcome,) = tuned.tune(BUCKET, None)
        assert [site.name for site in outcome.work.sites] == ["conv2d", "conv2d_1"]
        model = served(program, store)
        model.load()
        executor, _ = model.executor(BUCKET)
        x = torch.randn(2, 3, 8, 8)
        executor.inputs[0].copy_(x)
        torch.testing.assert_close(executor.run(), run_in_torch(program, x), rtol=1e-4, atol=1e-5)
        assert model.cache.loads == {"exact": 1}

    def test_a_plan_must_be_right_for_every_layer(self, store):
        program = with_hash(twins())
        second = program.weights["second.weight"]

        def wrong_for_the_second(ready, operands, out):
            result = ready.run(operands, None, out)
            return result.mul_(2) if torch.equal(operands["w"], second) else result

        engine = FakeEngine({"partial": wrong_for_the_second, "sound": slow})
        (outcome,) = tuner_of(program, store, engines=[engine]).tune(BUCKET, None)
        assert outcome.plan.candidate.plan_name == "sound"
        assert reasons(outcome)["partial"].startswith("wrong: error")

    def test_layers_are_checked_on_what_they_see(self, store):
        """Values that a network computes, not generated ones, reach the checks."""
        seen = []

        def record(ready, operands, out):
            seen.append(operands["x"])
            return ready.run(operands, None, out)

        x = torch.full((2, 3, 8, 8), 7.0)
        tuner_of(with_hash(block()), store, engines=[FakeEngine({"r": record})]).tune(BUCKET, {"x": x})
        assert any(torch.equal(value, x) for value in seen)

    def test_a_weight_as_residual_or_input_is_tuned(self, store):
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(2, 2, 3, padding=1)
                self.positions = nn.Parameter(torch.randn(1, 2, 6, 6))

            def forward(self, x):
                return self.conv(x) + self.positions, self.conv(self.positions)

        program = with_hash(program_of(Positions(), "x:FP32[1,2,6,6]"))
        outcomes = tuner_of(program, store).tune(Bucket(()), None)
        assert len(outcomes) == 2
        assert all(outcome.plan for outcome in outcomes)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
    def test_what_is_tuned_is_served_in_every_precision(self, store, precision):
        torch.manual_seed(5)
        saturated = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Sigmoid(), nn.BatchNorm2d(6))
        saturated[0].bias.data.fill_(40.0)
        plain = nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU(), nn.BatchNorm2d(6))
        plain[2].running_var.fill_(0.01)
        module = Chains([saturated, plain])
        program = with_hash(program_of(module, "x:FP32[batch=1..4,4,9,9]", precision=precision))
        outcomes = tuner_of(program, store).tune(BUCKET, None)
        assert all(outcome.plan for outcome in outcomes)
        cache = cache_of([store])
        for outcome in outcomes:
            found = cache.find(outcome.work.segment, outcome.work.sizes)
            assert (found.origin, found.reason) == ("exact", "")


class TestUntimed:
    def test_the_first_that_can_be_built_is_planned_without_running_it(self, program, store):
        engine = FakeEngine({"good": out_of_memory}, name="cudnn")
        engine.candidates = lambda segment, sizes: [
            replace(c, plan_name=name)
            for c in FakeEngine.candidates(engine, segment, sizes)
            for name in ("refused", "good")
        ]
        engine.refused["refused"] = "not here"
        tuned = tuner_of(program, store, engines=[])
        for outcome in tuned.plan_untimed(BUCKET, engine):
            assert outcome.plan.candidate.plan_name == "good"
            assert (outcome.plan.timed, outcome.plan.time_us) == (False, None)
            assert outcome.plan.checked_on == "none"
        assert engine.loaded == []
        (record,) = store.buckets(cpu_compatibility())
        assert record.model_time_us is None
        second = tuner_of(program, store, engines=[])
        assert all(o.reused for o in second.plan_untimed(BUCKET, engine))
        assert second.built_candidates == 0

    def test_the_first_tuning_on_the_device_replaces_them(self, program, store, tmp_path):
        engine = FakeEngine({"sound": right})
        tuner_of(program, store, engines=[]).plan_untimed(BUCKET, engine)
        tuned = tuner_of(program, PlanStore(tmp_path / "s"), engines=[engine], known=[store])
        assert all(o.plan.timed and not o.reused for o in tuned.tune(BUCKET, None))
        assert store.merge_from(tuned.store) == 2
        (record,) = store.buckets(cpu_compatibility())
        assert record.model_time_us is not None

    def test_an_engine_without_candidates_says_so(self, program, store):
        for outcome in tuner_of(program, store, engines=[]).plan_untimed(BUCKET, FakeEngine({})):
            assert outcome.plan is None
            assert outcome.reasons == (("cudnn", "supports no form of this segment"),)


class TestInputs:
    def test_rows_of_samples_are_repeated(self):
        samples = {"x": torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 8, 8)}
        (x,) = model_inputs(block(), Bucket.of({"batch": 7}), samples, 0, CPU)
        assert x[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
        (x,) = model_inputs(block(), Bucket.of({"batch": 2}), samples, 0, CPU)
        assert x.shape == (2, 3, 8, 8)

    def test_samples_take_the_inputs_type(self):
        (x,) = model_inputs(block(), BUCKET, {"x": torch.ones(1, 3, 8, 8, dtype=torch.float64)}, 0, CPU)
        assert x.dtype == torch.float32

    @pytest.mark.parametrize(
        ("samples", "said"),
        [
            ({"y": torch.zeros(1, 3, 8, 8)}, r"no array for input 'x'; they hold \['y'\]"),
            ({}, r"no array for input 'x'; they hold \[\]"),
            ({"x": torch.zeros(1, 3, 8)}, r"dims \[1, 3, 8\]; expected one row or more of \[3, 8, 8\]"),
            ({"x": torch.zeros(1, 3, 8, 9)}, r"dims \[1, 3, 8, 9\]; expected one row or more"),
            ({"x": torch.zeros(0, 3, 8, 8)}, r"dims \[0, 3, 8, 8\]; expected one row or more"),
            ({"x": torch.tensor(1.0)}, r"dims \[\]; expected one row or more"),
        ],
    )
    def test_samples_that_do_not_fit_are_refused(self, samples, said):
        with pytest.raises(ValueError, match=said):
            model_inputs(block(), BUCKET, samples, 0, CPU)

    def test_generated_inputs_follow_from_the_seed(self):
        first, again, other = (model_inputs(block(), BUCKET, None, seed, CPU)[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_a_scalar_input_is_taken_as_it_is(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(2, 2, 1)

            def forward(self, x, factor, index):
                return self.conv(x) * factor + index

        program = program_of(Scaled(), "x:FP32[1,2,3,3]", "factor:FP32[]", "index:INT64[1]")
        samples = {"x": torch.ones(1, 2, 3, 3), "factor": torch.tensor(3.0), "index": torch.tensor([4])}
        _, factor, index = model_inputs(program, Bucket(()), samples, 0, CPU)
        assert (factor.item(), index.item()) == (3.0, 4)
        _, factor, index = model_inputs(program, Bucket(()), None, 0, CPU)
        assert factor.shape == ()
        assert index.item() in (0, 1)


def files(store):
    return {
        str(path.relative_to(store.root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in store.root.rglob("*")
        if path.is_file()
    }


def test_plans_are_stored_under_the_present_checks(program, store):
    (outcome, _) = tuner_of(program, store).tune(BUCKET, None)
    assert outcome.plan.key.validation == accuracy.VALIDATION
