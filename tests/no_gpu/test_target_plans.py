"""tools/pretune.py --target: plans of a whole model for a GPU that is not here."""

import json
import re

import pytest
import torch

from cudnn_fusion import devices, lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.environment import target_compatibility
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.preflight import cudnn_version
from cudnn_fusion.program import export_program
from cudnn_fusion.report import ModelReport
from cudnn_fusion.shapes import Bucket


class Net(torch.nn.Module):
    """Two convolutions with equal sizes and different weights, a residual, and a convolution with silu."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.second = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.third = torch.nn.Conv2d(16, 32, 1)

    def forward(self, x):
        y = torch.relu(self.second(torch.relu(self.first(x))) + x)
        return torch.nn.functional.silu(self.third(y))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("repository") / "net"
    declaration = InputDeclaration.parse("x:FP16[batch=1..8,16,14,14]")
    program = export_program(Net().eval(), [declaration], "fp16")[1]
    lowered.write(program, directory / "1" / "lowered")
    return directory


def test_a_whole_model_is_planned_once_and_marked_untimed(model, tool):
    first = tool("pretune.py", model, "--target", "h200", "--buckets", "1,8")
    assert first.returncode == 0, first.stdout + first.stderr
    store = PlanStore(model / "1" / "plans")
    compatibility = target_compatibility(devices.load("h200"), cudnn_version())
    plans = store.plans(compatibility.hash())
    assert len(plans) == 6
    assert {plan.timed for plan in plans} == {False}
    assert {plan.checked_on for plan in plans} == {"none"}
    assert {plan.candidate.engine for plan in plans} == {"cudnn"}
    assert [record.sizes for record in store.buckets(compatibility)] == [(("batch", 1),), (("batch", 8),)]
    second = tool("pretune.py", model, "--target", "h200", "--buckets", "1,8")
    assert second.returncode == 0
    assert "candidates built 0" in " ".join(second.stdout.split())


class Pooled(torch.nn.Module):
    """What a GPU serves otherwise than a CPU: the norm behind the activation goes into the pooling kernel."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)

    def forward(self, x):
        return torch.nn.functional.max_pool2d(self.norm(torch.relu(self.conv(x))), 2)


def test_a_model_is_planned_and_reported_as_a_gpu_will_serve_it(tmp_path, tool):
    declaration = InputDeclaration.parse("x:FP16[batch=1..8,16,14,14]")
    program = export_program(Pooled().eval(), [declaration], "fp16")[1]
    lowered.write(program, tmp_path / "1" / "lowered")
    done = tool("pretune.py", tmp_path, "--target", "h200", "--buckets", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    here = target_compatibility(devices.load("h200"), cudnn_version())
    report = ModelReport(tmp_path / "1")
    segments = report.answer(Bucket.of({"batch": 2}), here).segments
    found = {item.segment: (item.origin, item.plan and item.plan.candidate.engine) for item in segments}
    assert found == {"conv2d+bias+relu": ("exact", "cudnn"), "mul+add+max_pool2d": ("exact", "torch")}
    (environment,) = report.environments()
    assert sorted(tuned.segment for tuned in environment.plans) == sorted(found)
    assert all(tuned.sites for tuned in environment.plans)


def test_another_description_makes_other_plans(model, tool, tmp_path):
    description = json.loads(json.dumps(devices.load("h200")))
    description["properties"]["multiProcessorCount"] = 78
    description["properties"]["deviceName"] = "NVIDIA H200 NVL half"
    path = tmp_path / "half.json"
    path.write_text(json.dumps(description))
    done = tool("pretune.py", model, "--target", path, "--buckets", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"NVIDIA H200 NVL half", done.stdout)
    store = PlanStore(model / "1" / "plans")
    half = target_compatibility(description, cudnn_version())
    assert half.hash() != target_compatibility(devices.load("h200"), cudnn_version()).hash()
    assert half in [stored.compatibility for stored in store.environments()]
    assert len(store.plans(half.hash())) == 3
