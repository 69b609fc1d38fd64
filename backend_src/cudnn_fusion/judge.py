"""The checks that a loaded plan must pass while tuning, on every layer that it would serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from cudnn_fusion import accuracy
from cudnn_fusion.engines.base import ReadyPlan, Sizes
from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.plan import Errors, SampledOutputs
from cudnn_fusion.segment import Segment, empty

Tensors = Mapping[str, torch.Tensor]


class Judge:
    """Float64 references of one key for every layer that uses it, and torch's own errors.

    ``layers`` holds the operands of each layer. The generated operands of ``seed`` are judged beside them: a
    plan is compared on those again whenever it is loaded, and must not be chosen if it would fail there.
    ``torch_error`` is the largest of torch's errors, ``sampled`` what a plan stores for that comparison.
    ``nan_fills_rows`` says that a plan may spread a NaN within a row, see `accuracy.fills_rows`.
    """

    def __init__(
        self,
        segment: Segment,
        sizes: Sizes,
        layers: Sequence[Tensors],
        seed: int,
        nan_fills_rows: bool = False,
    ) -> None:
        self._segment = segment
        self._sizes = sizes
        self._nan_fills_rows = nan_fills_rows
        device = layers[0]["x"].device
        self._operand_sets = [*layers, accuracy.generated_operands(segment, sizes, seed, device)]
        self._expected = [accuracy.reference(segment, operands) for operands in self._operand_sets]
        self._torch_errors = [
            accuracy.measure(evaluate_segment(segment, operands), expected)
            for operands, expected in zip(self._operand_sets, self._expected, strict=True)
        ]
        self._nan_operands = _with_nan(layers[0], segment.operand("x").layout)
        self._nan_expected = evaluate_segment(segment, self._nan_operands)
        self.torch_error = accuracy.largest(self._torch_errors)
        self.sampled = SampledOutputs(seed, tuple(accuracy.sample(self._expected[-1], seed).float().tolist()))

    def check(self, ready: ReadyPlan) -> Errors | str:
        """The largest errors over all layers, or the reason to reject. Raises what a failing plan raises."""
        errors: list[Errors] = []
        for operands, expected, torch_errors in zip(
            self._operand_sets, self._expected, self._torch_errors, strict=True
        ):
            error = accuracy.measure(self._run(ready, operands), expected)
            refusal = accuracy.verdict(error, torch_errors, self._segment.precision)
            if refusal:
                return refusal
            errors.append(error)
        nan_result = self._run(ready, self._nan_operands)
        refusal = accuracy.nan_refusal(nan_result, self._nan_expected, self._nan_fills_rows)
        return refusal or accuracy.largest(errors)

    def _run(self, ready: ReadyPlan, operands: Tensors) -> torch.Tensor:
        x = operands["x"]
        out = accuracy.poison(self._segment, self._sizes, x.device)
        workspace = accuracy.poisoned_workspace(ready.workspace_bytes, x.device)
        result = ready.run(operands, workspace, out)
        if x.device.type == "cuda":
            # A buffer error shows only here, and must be this candidate's.
            torch.cuda.synchronize(x.device)
        return result


def _with_nan(operands: Tensors, layout: str) -> dict[str, torch.Tensor]:
    x = empty(tuple(operands["x"].shape), layout, operands["x"].dtype, operands["x"].device)
    x.copy_(operands["x"])
    count = x.numel()
    for position in (0, count // 2, count - 1):
        index = [int(i) for i in torch.unravel_index(torch.tensor(position), x.shape)]
        x[tuple(index)] = math.nan
    return {**operands, "x": x}
