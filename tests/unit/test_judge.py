"""What a plan must stand before it may serve."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from programs import CPU, block, with_hash

from cudnn_fusion import accuracy
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.executor import Resources
from cudnn_fusion.judge import Judge
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate
from cudnn_fusion.shapes import Bucket


@dataclass
class Accumulating:
    """Adds to what its workspace holds; ``clears`` says whether it sets it to zero first."""

    inner: Any
    clears: bool
    workspace_bytes: int = 16

    def run(self, operands, workspace, out=None):
        sums = workspace.view(torch.float32)
        if self.clears:
            sums.zero_()
        return out.copy_(self.inner.run(operands, None) + sums[0])


@pytest.mark.parametrize("clears", [True, False])
def test_a_plan_that_counts_on_a_zero_workspace_is_refused(clears):
    program = with_hash(block())
    resources = Resources(program, partition(program), CPU)
    site, sizes = resources.partition.sites[0], resources.segment_sizes(Bucket.of({"batch": 2}))[0]
    operands = accuracy.generated_operands(site.segment, sizes, 3, CPU)
    inner = TorchEngine(CPU).load(site.segment, sizes, Candidate("torch", REFERENCE_FORM), None, 0)
    verdict = Judge(site.segment, sizes, [operands], seed=1).check(Accumulating(inner, clears))
    assert isinstance(verdict, str) is not clears
