"""The committed example is what the tools make of it now, and is right."""

from pathlib import Path

import pytest
import torch
from programs import served

from cudnn_fusion import devices, lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.environment import target_compatibility
from cudnn_fusion.model_directory import config_text
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.program import export_program
from cudnn_fusion.shapes import Bucket
from tools.demo.conv_block import conv_block

EXAMPLE = Path(__file__).resolve().parents[2] / "model_repository" / "conv_block"


@pytest.fixture(scope="module")
def committed():
    return lowered.read(EXAMPLE / "1" / "lowered")


def test_exporting_again_gives_the_committed_program(committed, tmp_path):
    declaration = InputDeclaration.parse("image:FP16[batch=1..64,64,56,56]")
    program = export_program(conv_block(), [declaration], "fp16", name="conv_block")[1]
    assert lowered.write(program, tmp_path).sha256 == committed.sha256
    assert (EXAMPLE / "config.pbtxt").read_text() == config_text(program, "conv_block")


def test_its_committed_plans_are_whole_and_cover_three_buckets(committed):
    store = PlanStore(EXAMPLE / "1" / "plans")
    h200 = target_compatibility(devices.load("h200"), 91900)
    buckets = [record.bucket for record in store.buckets(h200, committed.sha256)]
    assert buckets == [Bucket.of({"batch": size}) for size in (1, 8, 64)]
    plans = store.plans(h200.hash())
    assert len(plans) == 3
    for plan in plans:
        found = store.find(h200, plan.key)
        assert found.plan.candidate.form == "conv2d+bias+relu"
        assert found.blob


def test_it_computes_what_pytorch_computes(committed, tmp_path):
    model = served(committed, PlanStore(tmp_path))
    executor, _ = model.executor(Bucket.of({"batch": 2}))
    image = torch.randn(2, 64, 56, 56, generator=torch.Generator().manual_seed(3)).half()
    executor.inputs[0].copy_(image)
    with torch.inference_mode():
        expected = conv_block().double()(image.double())
    found = executor.run()[0].double()
    assert torch.linalg.vector_norm(found - expected) <= 5e-4 * torch.linalg.vector_norm(expected)
