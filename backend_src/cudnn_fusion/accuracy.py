"""How right a plan is: the float64 reference, errors against it, and the bound for each precision mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.plan import Errors, SampledOutputs
from cudnn_fusion.segment import OUTPUT, TRANSPOSED, Dims, Operation, Segment, empty

SAMPLES = 4096
VALIDATION = "float64;largest,rms;torch*1.5;nan;v2"
"""Names these checks in a plan's key: plans checked otherwise are not reused as checked."""

TORCH_MULTIPLE = 1.5


@dataclass(frozen=True)
class Mode:
    """A precision mode. A plan passes when each of its errors is at most `TORCH_MULTIPLE` times torch's own
    in the same mode, or at most the floor.

    Floors are a few roundings of the mode's narrowest type, relative to the largest output (``largest``) or
    to the outputs' norm (``rms``). ``dtype`` is the type of operands.
    """

    dtype: str
    floor_largest: float
    floor_rms: float


MODES: Mapping[str, Mode] = {
    "fp32": Mode("float32", floor_largest=1e-5, floor_rms=2e-6),
    "tf32": Mode("float32", floor_largest=2e-3, floor_rms=1e-3),
    "fp16": Mode("float16", floor_largest=1e-3, floor_rms=3e-4),
    "bf16": Mode("bfloat16", floor_largest=8e-3, floor_rms=2.4e-3),
}


def reference(segment: Segment, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``y`` in float64, on the operands' device."""
    return evaluate_segment(segment, {name: value.double() for name, value in operands.items()})


def measure(result: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Relative errors of ``result`` against a finite float64 ``expected`` of equal dims.

    A result that is not finite has infinite errors.
    """
    difference = result.double() - expected
    if expected.numel() == 0:
        return Errors(0.0, 0.0)
    peak, scale = difference.abs().max().item(), expected.abs().max().item()
    norm = torch.linalg.vector_norm(difference).item()
    rms_scale = torch.linalg.vector_norm(expected).item()
    return Errors(_ratio(peak, scale), _ratio(norm, rms_scale))


def largest(errors: Sequence[Errors]) -> Errors:
    """The largest of each kind."""
    return Errors(max(e.largest for e in errors), max(e.rms for e in errors))


def _ratio(error: float, scale: float) -> float:
    if not math.isfinite(error):
        return math.inf
    if scale > 0:
        return error / scale
    return 0.0 if error == 0 else math.inf


def verdict(errors: Errors, torch_errors: Errors, precision: str) -> str | None:
    """None when the errors are within the mode's bound, else the reason in one line.

    Where torch's own result is not finite (an overflow, or NaN among the inputs) only the floor is allowed.
    """
    mode = MODES[precision]
    bounds = Errors(
        _bound(mode.floor_largest, torch_errors.largest), _bound(mode.floor_rms, torch_errors.rms)
    )
    if errors.largest <= bounds.largest and errors.rms <= bounds.rms:
        return None
    reason = (
        f"wrong: error {errors.largest:.2e} largest, {errors.rms:.2e} rms; "
        f"allowed {bounds.largest:.2e} and {bounds.rms:.2e}"
    )
    if math.isfinite(torch_errors.largest):
        return reason
    return f"{reason}; torch's own result is not finite: values overflow in {precision}, or an input is NaN"


def _bound(floor: float, torch_error: float) -> float:
    return max(floor, TORCH_MULTIPLE * torch_error) if math.isfinite(torch_error) else floor


def poison(segment: Segment, sizes: Mapping[str, Dims], device: torch.device) -> torch.Tensor:
    """A segment's output full of NaN: an element that a plan does not write stays NaN."""
    operand = segment.operand(OUTPUT)
    out = empty(tuple(sizes[OUTPUT]), operand.layout, getattr(torch, operand.dtype), device)
    return out.fill_(math.nan)


def poisoned_workspace(size_bytes: int, device: torch.device) -> torch.Tensor:
    """A workspace full of NaN, as other plans may leave it: fresh memory is often zero, which would hide that
    a plan reads what it has not written."""
    return torch.full((size_bytes,), 255, dtype=torch.uint8, device=device)


def nan_refusal(result: torch.Tensor, torch_result: torch.Tensor, within_rows: bool = False) -> str | None:
    """The reason to refuse a plan that drops a NaN which torch keeps, or spreads one that torch does not.

    Both are results for the same operands, a few of whose elements are NaN. ``within_rows`` allows it to
    spread within a row (along all axes but the first).
    """
    dropped = (torch_result.isnan() & ~result.isnan()).sum().item()
    allowed = torch_result.isnan()
    if within_rows:
        allowed = _rows(allowed).any(1).view(-1, *(1,) * (allowed.dim() - 1))
    spread = (result.isnan() & ~allowed).sum().item()
    if dropped or spread:
        return f"NaN: {dropped} outputs dropped it, {spread} have one that torch has not"
    return None


def fills_rows(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a NaN in the first row of a program's inputs fills rows of all outputs, the first among them,
    and leaves the others without: further ones on the way would change nothing."""
    if not all(output.is_floating_point() and output.dim() for output in outputs):
        return False
    found = [_rows(output.isnan()) for output in outputs]
    return all(bool(f[0].all()) and torch.equal(f.any(1), f.all(1)) for f in found)


def _rows(mask: torch.Tensor) -> torch.Tensor:
    return mask.flatten(1) if mask.dim() > 1 else mask.view(-1, 1)


def generated_operands(
    segment: Segment, sizes: Mapping[str, Dims], seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Packed operands with values that follow from ``seed`` alone, the same on every device and version.

    Values are uniform in [-1, 1); weights of the convolution are divided by the square root of the number of
    products in a sum, so that outputs stay near 1.
    """
    operands: dict[str, torch.Tensor] = {}
    for index, operand in enumerate(segment.inputs):
        dims = tuple(sizes[operand.name])
        values = _hashed(math.prod(dims), seed * 1009 + index, device)
        if operand.name == "w":
            values = values / math.sqrt(max(1, _products_in_a_sum(segment.operations[0], dims)))
        tensor = empty(dims, operand.layout, getattr(torch, operand.dtype), device)
        operands[operand.name] = tensor.copy_(values.view(dims))
    return operands


def _products_in_a_sum(conv: Operation, w: Dims) -> int:
    if conv.kind in TRANSPOSED:
        # An output gets a product from one in so many of the kernel's positions as the stride is long.
        stride: Dims = conv.attribute("stride")
        return w[0] * math.prod(w[2:]) // (int(conv.attribute("groups")) * math.prod(stride))
    return math.prod(w[1:])


def sample(result: torch.Tensor, seed: int) -> torch.Tensor:
    """The sampled positions of an output, float64, on the CPU: SAMPLES of them, or all when it has fewer."""
    flat_positions = _positions(result.numel(), seed, result.device)
    indices = []
    for size in reversed(result.shape):
        indices.append(flat_positions % size)
        flat_positions = flat_positions // size
    return result[tuple(reversed(indices))].double().cpu()


def sampled_reference(
    segment: Segment, sizes: Mapping[str, Dims], seed: int, device: torch.device
) -> SampledOutputs:
    """Reference outputs for `generated_operands` of the same seed."""
    operands = generated_operands(segment, sizes, seed, device)
    values = sample(reference(segment, operands), seed).float()
    return SampledOutputs(seed, tuple(values.tolist()))


def compare_sampled(
    result: torch.Tensor, sampled: SampledOutputs, torch_errors: Errors | None, precision: str
) -> str | None:
    """Judges a plan's result for the generated operands by the stored reference outputs alone.

    None when it is within the mode's bound, else the reason.
    """
    expected = torch.tensor(sampled.values, dtype=torch.float64)
    found = sample(result, sampled.seed)
    if found.shape != expected.shape:
        return f"wrong: {found.numel()} sampled outputs where {expected.numel()} are stored"
    return verdict(measure(found, expected), torch_errors or Errors(0.0, 0.0), precision)


def _positions(count: int, seed: int, device: torch.device) -> torch.Tensor:
    if count <= SAMPLES:
        return torch.arange(count, device=device)
    return ((_hashed(SAMPLES, seed + 77, device) + 1) / 2 * count).long().clamp_(0, count - 1)


def _hashed(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Float64 values in [-1, 1) from integer arithmetic, which is exact everywhere (xorshift-multiply)."""
    mask = (1 << 31) - 1
    key = (seed * 0x9E3779B1 + 0x7F4A7C15) & mask
    bits = torch.arange(count, dtype=torch.int64, device=device) & mask
    for multiplier in (0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9):
        # The key goes in between the rounds: added before them it would only shift the sequence.
        bits ^= (bits >> 16) ^ key
        bits = (bits * multiplier) & mask
    bits ^= bits >> 15
    return bits.double() / (1 << 30) - 1.0
