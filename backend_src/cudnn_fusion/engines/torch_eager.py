"""Segments in torch: the CPU's engine, and on a GPU the reference and the unfused competitor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, Sizes
from cudnn_fusion.evaluate import Convolve, convolution, evaluate_segment, on_images, padded
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import OUTPUT, Operation, Segment, to_layout

REFERENCE_FORM = "channels_last"
"""The form that serves when no plan does: one torch call an operation, channels-last throughout."""


def configure(precision: str) -> None:
    """Sets this process's torch switches for a precision mode: TF32 only where it is asked for by name."""
    allowed = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@dataclass(frozen=True)
class TorchPlan:
    """A segment in one torch form. Needs no workspace."""

    segment: Segment
    convolve: Convolve
    workspace_bytes: int = 0

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        result = to_layout(
            evaluate_segment(self.segment, operands, self.convolve), self.segment.operand(OUTPUT).layout
        )
        return result if out is None else out.copy_(result)


class TorchEngine:
    """Forms in torch: on a GPU only the channels-last one, on a CPU all that fit."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def candidates(self, segment: Segment, sizes: Sizes) -> list[Candidate]:
        """Every form that applies to the sizes, the reference form first."""
        forms = [REFERENCE_FORM]
        if self.device.type == "cpu" and segment.operations:
            forms.append("row_major")
            conv = segment.operations[0]
            if conv.kind in ("conv1d", "conv2d") and conv.attribute("groups") == 1:
                forms.append("unfold_matmul")
            if _is_one_dimensional(segment, sizes):
                forms.append("conv1d")
        return [Candidate("torch", form) for form in forms]

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Nothing is compiled: the form's name is the plan."""
        if candidate not in self.candidates(segment, sizes):
            raise CandidateRejectedError(f"torch has no form {candidate.form!r} for this segment")
        return BuiltPlan(candidate, blob=None, workspace_bytes=0)

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> TorchPlan:
        """Binds the form's function. Raises CandidateRejectedError for a form unknown here."""
        self.build(segment, sizes, candidate)
        return TorchPlan(segment, _FORMS[candidate.form])


def _is_one_dimensional(segment: Segment, sizes: Sizes) -> bool:
    """Whether it is a 2-D convolution along H alone."""
    conv = segment.operations[0]
    return (
        conv.kind == "conv2d"
        and sizes["x"][3] == sizes["w"][3] == 1
        and conv.attribute("padding_before")[1] == conv.attribute("padding_after")[1] == 0
    )


def _row_major(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
) -> torch.Tensor:
    return convolution(x.contiguous(), w.contiguous(), bias, operation)


def _conv1d(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
) -> torch.Tensor:
    before, after = operation.attribute("padding_before")[0], operation.attribute("padding_after")[0]
    line = x.squeeze(3)
    if before or after:
        line = F.pad(line, (before, after))
    return F.conv1d(
        line,
        w.squeeze(3),
        None if bias is None else bias.reshape(-1),
        operation.attribute("stride")[0],
        0,
        operation.attribute("dilation")[0],
        operation.attribute("groups"),
    ).unsqueeze(3)


@on_images
def _unfold_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
) -> torch.Tensor:
    whole = padded(x, operation)
    stride, dilation = operation.attribute("stride"), operation.attribute("dilation")
    k, _, r, s = w.shape
    p = (whole.shape[2] - dilation[0] * (r - 1) - 1) // stride[0] + 1
    q = (whole.shape[3] - dilation[1] * (s - 1) - 1) // stride[1] + 1
    columns = F.unfold(whole, (r, s), dilation, 0, stride)
    result = torch.matmul(w.reshape(k, -1), columns).view(x.shape[0], k, p, q)
    return result if bias is None else result + bias


_FORMS: dict[str, Convolve] = {
    REFERENCE_FORM: convolution,
    "row_major": _row_major,
    "conv1d": _conv1d,
    "unfold_matmul": _unfold_matmul,
}
