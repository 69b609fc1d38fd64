"""One bucket, ready to run."""

from dataclasses import dataclass

import pytest
import torch
from programs import CPU, block, cache_of, line, program_of, run_in_torch, served, tuner_of, with_hash
from torch import nn

from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.executor import Executor, Resources, input_dims
from cudnn_fusion.lowered import ProgramError
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate
from cudnn_fusion.plan_cache import Served
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.segment import SegmentSite, is_packed
from cudnn_fusion.shapes import Bucket


def resources_of(program):
    return Resources(program, partition(program), CPU)


def executor_of(resources, bucket):
    cache = cache_of([])
    sites = zip(resources.partition.sites, resources.segment_sizes(bucket), strict=True)
    return Executor(resources, bucket, [cache.find(site.segment, z) for site, z in sites], capture=True)


def run(executor, *inputs):
    for target, source in zip(executor.inputs, inputs, strict=True):
        target.copy_(source)
    return executor.run()


def test_answers_are_those_of_the_program_at_every_bucket():
    resources = resources_of(block())
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 3, 8, 8)
        executor = executor_of(resources, Bucket.of({"batch": rows}))
        torch.testing.assert_close(run(executor, x), run_in_torch(block(), x), rtol=1e-4, atol=1e-5)
        assert not executor.captured


def test_runs_do_not_remember_each_other():
    executor = executor_of(resources_of(block()), Bucket.of({"batch": 3}))
    x, other = torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8)
    (first,) = run(executor, x)
    kept = first.clone()
    run(executor, other)
    assert torch.equal(first, kept), "an answer does not change when the next request runs"
    torch.testing.assert_close(run(executor, x)[0], kept)


class _Handed(nn.Module):
    """Outputs that are an input, a view of it, a weight, the same value twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return x, x.flatten(1), x[:, :1], self.weight, y, y


def test_outputs_that_are_inputs_or_weights_are_handed_out_as_copies():
    program = program_of(_Handed(), "x:FP32[2,3,4,4]")
    resources = resources_of(program)
    executor = executor_of(resources, Bucket(()))
    x = torch.randn(2, 3, 4, 4)
    outputs = run(executor, x)
    for got, wanted in zip(outputs, run_in_torch(program, x), strict=True):
        torch.testing.assert_close(got, wanted)
    kept = [output.clone() for output in outputs]
    for output in outputs:
        output.add_(1)
    again = run(executor, x)
    for got, wanted in zip(again[:4], kept[:4], strict=True):
        torch.testing.assert_close(got, wanted)
    assert program.weights["weight"].tolist() == [0.0, 1.0, 2.0]


def test_a_callers_own_tensors_are_run_on_as_they_lie_and_stay_the_callers():
    program = program_of(_Handed(), "x:FP32[2,3,4,4]")
    executor = executor_of(resources_of(program), Bucket(()))
    memory = bytearray(2 * 3 * 16 * 4 + 4)
    for offset in (0, 4, 2):
        x = torch.frombuffer(memory, dtype=torch.float32, count=2 * 3 * 16, offset=offset).view(2, 3, 4, 4)
        given = torch.randn(x.shape)
        x.copy_(given)
        outputs = executor.run([x])
        for got, wanted in zip(outputs, run_in_torch(program, given), strict=True):
            torch.testing.assert_close(got, wanted)
        for output in outputs:
            output.add_(1)
        assert torch.equal(x, given), "an output is never the caller's memory"
        assert not executor.inputs[0].any(), "nothing was copied into the executor's buffer"


def test_inputs_of_segments_lie_as_segments_want_them():
    resources = resources_of(line())
    (x,) = executor_of(resources, Bucket.of({"batch": 2, "length": 10})).inputs
    assert x.shape == (2, 2, 10, 1)
    assert is_packed(x, "channels_last")
    assert not x.any()


def test_weights_exist_once_however_many_buckets_there_are():
    resources = resources_of(block())
    before = resources.weight_bytes
    pointers = {name: weight.data_ptr() for name, weight in resources.weights.items()}
    executors = [executor_of(resources, Bucket.of({"batch": n})) for n in range(1, 9)]
    assert resources.weight_bytes == before == sum(w.numel() * 4 for w in block().weights.values())
    assert {name: weight.data_ptr() for name, weight in resources.weights.items()} == pointers
    for rows, executor in enumerate(executors, start=1):
        assert executor.bytes == rows * 3 * 8 * 8 * 4


@dataclass(frozen=True)
class Doubling:
    """Wants every weight doubled, and then runs as torch does."""

    site: SegmentSite
    workspace_bytes = 0
    preparation = "doubled"

    def prepare(self, operands):
        return {name: weight * 2 for name, weight in operands.items()}

    def run(self, operands, workspace, out=None):
        inputs = self.site.segment.inputs
        halves = {o.name: operands[o.name] / (2 if o.role == "weight" else 1) for o in inputs}
        return evaluate_segment(self.site.segment, halves)


def test_weights_are_prepared_once_for_all_buckets():
    program = block()
    resources = resources_of(program)
    before = resources.weight_bytes
    plans = [
        Served("exact", Doubling(site), Candidate("cudnn", "doubled")) for site in resources.partition.sites
    ]
    for rows in (2, 3):
        x = torch.randn(rows, 3, 8, 8)
        executor = Executor(resources, Bucket.of({"batch": rows}), plans, capture=True)
        torch.testing.assert_close(run(executor, x), run_in_torch(program, x), rtol=1e-4, atol=1e-5)
        assert resources.weight_bytes == 2 * before


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)

        def forward(self, x):
            return self.conv(self.conv(x).relu()) + self.conv.weight.sum()

    program = program_of(Tied(), "x:FP32[2,4,5,5]")
    resources = resources_of(program)
    assert resources.weight_bytes == 4 * 4 * 9 * 4
    x = torch.randn(2, 4, 5, 5)
    got = run(executor_of(resources, Bucket(())), x)
    torch.testing.assert_close(got, run_in_torch(program, x), rtol=1e-4, atol=1e-5)


def test_the_workspace_only_grows():
    resources = resources_of(block())
    assert resources.workspace_of(100).numel() == 100
    assert resources.workspace_of(50).numel() == 100
    assert resources.workspace_of(200).numel() == 200


def test_a_bucket_that_the_program_cannot_run_at_is_refused():
    with pytest.raises(ProgramError, match="batch"):
        resources_of(block()).segment_sizes(Bucket.of({"other": 3}))


def test_dims_of_inputs_at_a_bucket():
    assert input_dims(("batch", 3, "height"), Bucket.of({"batch": 2, "height": 5})) == (2, 3, 5)


def test_origins_are_counted(tmp_path):
    program, store = with_hash(block()), PlanStore(tmp_path)
    tuner = tuner_of(program, store)
    outcomes = tuner.tune(Bucket.of({"batch": 2}), None)
    assert len(outcomes) == 2
    model = served(program, store)
    model.load()
    tuned, _ = model.executor(Bucket.of({"batch": 2}))
    untuned, _ = model.executor(Bucket.of({"batch": 3}))
    assert (tuned.origin, tuned.origins) == ("exact", {"exact": 2})
    assert (untuned.origin, untuned.origins) == ("reference", {"reference": 2})


def test_half_precision_programs_take_and_give_their_declared_types():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x).relu()

    for precision, declared in (("bf16", "BF16"), ("fp16", "FP32")):
        program = program_of(Half(), f"x:{declared}[batch=1..4,3,6,6]", precision=precision)
        executor = executor_of(resources_of(program), Bucket.of({"batch": 2}))
        x = torch.randn(2, 3, 6, 6).to(executor.inputs[0].dtype)
        (got,), (wanted,) = run(executor, x), run_in_torch(program, x)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
