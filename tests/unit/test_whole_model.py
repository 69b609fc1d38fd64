"""The whole program's choice between plans, and its check."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cudnn_fusion import whole_model
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate, Errors, PlanKey
from cudnn_fusion.plan_cache import Served
from cudnn_fusion.program import export_program
from cudnn_fusion.shapes import Bucket

CPU = torch.device("cpu")
TWO = Bucket.of({"batch": 2})


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        return y.float().mean((2, 3)).to(x.dtype), y.flatten(1).argmax(1)


@pytest.fixture(scope="module")
def resources():
    torch.manual_seed(1)
    declaration = InputDeclaration.parse("x:FP32[batch=1..4,3,6,6]")
    program = export_program(Small(), [declaration], "fp32")[1]
    return Resources(program, partition(program), CPU)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(2, 3, 6, 6, generator=generator)] for _ in range(2)]


class Plan:
    """Torch's form of a site, spoiled by ``factor``."""

    workspace_bytes = 0

    def __init__(self, segment, factor=1.0):
        self.segment, self.factor = segment, factor

    def run(self, operands, workspace, out=None):
        return evaluate_segment(self.segment, operands) * self.factor


def served(resources, factor=1.0):
    return [
        Served("exact", Plan(site.segment, factor), Candidate("torch", "channels_last"))
        for site in resources.partition.sites
    ]


def executor(resources, factor=1.0):
    return Executor(resources, TWO, served(resources, factor), capture=True)


def test_a_right_program_has_torchs_own_errors(resources, inputs):
    errors = whole_model.check(resources, executor(resources), *inputs)
    assert errors.refusal is None
    assert 0 < errors.ours.rms < 1e-6
    assert errors.ours.rms == pytest.approx(errors.torch.rms, rel=0.5)


def test_a_program_that_is_a_little_wrong_is_refused_with_the_figures(resources, inputs):
    errors = whole_model.check(resources, executor(resources, 1.0001), *inputs)
    assert "wrong: error" in errors.refusal
    assert errors.ours.rms == pytest.approx(2e-4, rel=0.6)


def test_the_reference_is_float64_even_where_the_program_names_a_type(resources, inputs):
    first, second = whole_model.reference(resources, inputs[0])
    assert first.dtype == torch.float64
    assert second is None, "an output of whole numbers has no error"


def test_there_is_no_reference_where_values_are_not_finite(resources, inputs):
    assert whole_model.reference(resources, [inputs[0][0] * float("nan")]) is None
    assert whole_model.check(resources, executor(resources), [inputs[0][0] * float("inf")], inputs[1]) is None


def test_on_a_cpu_nothing_is_swapped(resources):
    plans = served(resources)
    keys = [key(str(i)) for i in range(len(plans))]
    options = {
        k: [whole_model.Option(p, 1.0), whole_model.Option(p, 1.0)] for k, p in zip(keys, plans, strict=True)
    }
    assert whole_model.choose(resources, TWO, keys, plans, options) == plans


def key(name):
    return PlanKey(name, (), "fp32", "v")


def option(us):
    return whole_model.Option(Served("exact", None, Candidate("torch", str(us))), us)


def trials(keys, options):
    return [(k.signature, o.us) for k, o in whole_model._trials(keys, options)]


def test_runners_up_near_the_winner_are_tried_the_heaviest_keys_first():
    a, b, c = key("a"), key("b"), key("c")
    options = {
        a: [option(10.0), option(12.0), option(13.0)],
        b: [option(8.0), option(8.5)],
        c: [option(1.0), option(2.4), option(2.6)],
    }
    assert trials([a, b, b, c], options) == [("b", 8.5), ("a", 12.0), ("c", 2.4)]


def test_a_key_without_options_is_left_as_it_is():
    assert trials([key("a"), key("b")], {key("b"): [option(1.0)]}) == []


def test_the_number_of_trials_is_bounded():
    keys = [key(f"{i:03}") for i in range(100)]
    options = {k: [option(100.0 - i), option(100.0 - i)] for i, k in enumerate(keys)}
    found = trials(keys, options)
    assert len(found) == whole_model.MAX_TRIALS
    assert found[0] == ("000", 100.0)


class Clock:
    """Stands for the captured program: its time is a sum of what its plans say."""

    def __init__(self, resources, bucket, plans, capture):
        self.us = sum(float(plan.candidate.form) for plan in plans)


@pytest.fixture
def clocked(resources, monkeypatch):
    monkeypatch.setattr(whole_model, "Executor", Clock)
    monkeypatch.setattr(whole_model, "_share", lambda executor, other: executor.us / other.us)
    monkeypatch.setattr(resources, "device", torch.device("cuda", 0))
    return resources


def timed(alone, whole):
    return whole_model.Option(Served("exact", None, Candidate("torch", str(whole))), alone)


def test_the_program_takes_the_runner_up_that_makes_it_faster(clocked):
    a, b = key("a"), key("b")
    options = {
        a: [timed(10.0, 10.0), timed(10.5, 9.0), timed(11.0, 8.0)],
        b: [timed(5.0, 5.0), timed(5.1, 5.0)],
    }
    winners = [options[k][0].served for k in (a, b, a)]
    chosen = whole_model.choose(clocked, TWO, [a, b, a], winners, options)
    assert [plan.candidate.form for plan in chosen] == ["8.0", "5.0", "8.0"]


def test_a_gain_within_the_noise_changes_nothing(clocked):
    a = key("a")
    options = {a: [timed(10.0, 10.0), timed(10.5, 9.98)]}
    winners = [options[a][0].served]
    assert whole_model.choose(clocked, TWO, [a], winners, options) == winners


def spoiled(resources, site, factor):
    """An option whose results are wrong by ``factor``, as its record says."""
    plan = Plan(resources.partition.sites[site].segment, factor)
    error = SimpleNamespace(error=Errors(factor - 1.0, factor - 1.0))
    return whole_model.Option(Served("exact", plan, Candidate("torch", str(factor)), stored=error), 1.0)


def made_exact(resources, inputs, factors):
    """The factor of what serves each site in the end; ``factors`` are its options, the winner first."""
    keys = [key(str(site)) for site in range(len(factors))]
    options = {
        k: [spoiled(resources, site, factor) for factor in factors[site]] for site, k in enumerate(keys)
    }
    winners = [options[k][0].served for k in keys]
    chosen, _, errors = whole_model.make_exact(
        resources, TWO, keys, winners, options, lambda e: whole_model.check(resources, e, *inputs)
    )
    return [plan.ready.factor for plan in chosen], errors


def test_where_the_whole_is_wrong_the_most_exact_plans_take_over_the_worst_first(resources, inputs):
    factors = [(1.00001, 1.0), (1.0000005, 1.0)]
    chosen, errors = made_exact(resources, inputs, factors)
    assert (chosen, errors.refusal) == ([1.0, 1.0000005], None)
    chosen, errors = made_exact(resources, inputs, [*factors[:1], (1.000005, 1.0)])
    assert (chosen, errors.refusal) == ([1.0, 1.0], None)


def test_a_right_whole_keeps_its_fastest_plans(resources, inputs):
    assert made_exact(resources, inputs, [(1.0000005, 1.0), (1.0, 1.0)])[0] == [1.0000005, 1.0]


def test_without_more_exact_plans_the_refusal_stands(resources, inputs):
    chosen, errors = made_exact(resources, inputs, [(1.00001, 1.0001), (1.0,)])
    assert chosen == [1.00001, 1.0]
    assert "wrong: error" in errors.refusal
