"""What the checks of a plan catch, and what they let pass."""

import math
from dataclasses import replace

import pytest
import torch
from programs import bias_operand, conv_segment, sizes_of

from cudnn_fusion import accuracy
from cudnn_fusion.evaluate import evaluate
from cudnn_fusion.plan import Errors
from cudnn_fusion.segment import Operand, Operation, is_packed

CPU = torch.device("cpu")
SEED = 11
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def segment_in(precision):
    dtype = DTYPES[precision]
    return conv_segment(
        Operation("bias", "bias"),
        Operation("add", "residual"),
        Operation("relu"),
        dtype=dtype,
        precision=precision,
        padding_before=(1, 1),
        padding_after=(1, 1),
        extra=[bias_operand(dtype), Operand("residual", dtype, "channels_last", "input")],
    )


class Case:
    """A segment with its operands, reference and torch's own result."""

    def __init__(self, precision):
        self.precision = precision
        self.segment = segment_in(precision)
        self.sizes = sizes_of(self.segment, (4, 32, 12, 12), (48, 32, 3, 3))
        self.operands = accuracy.generated_operands(self.segment, self.sizes, SEED, CPU)
        self.expected = accuracy.reference(self.segment, self.operands)
        self.result = evaluate(self.segment.operations, self.operands)
        self.torch_errors = accuracy.measure(self.result, self.expected)
        self.sampled = accuracy.sampled_reference(self.segment, self.sizes, SEED, CPU)

    def verdict(self, result):
        """Of all outputs."""
        return accuracy.verdict(accuracy.measure(result, self.expected), self.torch_errors, self.precision)

    def sampled_verdict(self, result):
        """Of the sampled outputs alone, as after loading."""
        return accuracy.compare_sampled(result, self.sampled, self.torch_errors, self.precision)


@pytest.fixture(scope="module", params=list(accuracy.MODES))
def case(request):
    return Case(request.param)


def with_values(result, place, value):
    changed = result.clone()
    changed[place] = value
    return changed


LAST_ROW = (-1, slice(None), -1, slice(None))
WRONG = {
    "NaN in one output": lambda c: with_values(c.result, (0, 3, 2, 1), math.nan),
    "inf in one output": lambda c: with_values(c.result, (0, 3, 2, 1), math.inf),
    "-inf in one output": lambda c: with_values(c.result, (3, 47, 11, 11), -math.inf),
    "nothing written": lambda c: accuracy.poison(c.segment, c.sizes, CPU),
    "zeros": lambda c: torch.zeros_like(c.result),
    "last batch row not computed": lambda c: with_values(c.result, -1, 0.0),
    "last image row wrong": lambda c: with_values(c.result, LAST_ROW, c.result[LAST_ROW].flip(0) + 1),
    "one channel wrong": lambda c: with_values(c.result, (slice(None), 5), c.result[:, 6]),
    "channels in another order": lambda c: c.result.roll(1, 1),
    "rows in another order": lambda c: c.result.roll(1, 0),
    "scaled by 1.05": lambda c: c.result * 1.05,
    "bias missing": lambda c: evaluate(
        c.segment.operations, {**c.operands, "bias": torch.zeros_like(c.operands["bias"])}
    ),
    "residual missing": lambda c: evaluate(
        c.segment.operations, {**c.operands, "residual": torch.zeros_like(c.operands["residual"])}
    ),
    "activation missing": lambda c: evaluate(c.segment.operations[:-1], c.operands),
    "flipped kernel": lambda c: evaluate(
        c.segment.operations, {**c.operands, "w": c.operands["w"].flip((2, 3))}
    ),
}
AMONG_FEW_OUTPUTS = ("NaN in one output", "inf in one output", "-inf in one output")


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_caught(case, fault):
    """A fast plan that is wrong must not win (pytorch issue 163539)."""
    assert "wrong: error" in (case.verdict(WRONG[fault](case)) or "passed")


@pytest.mark.parametrize("fault", [name for name in WRONG if name not in AMONG_FEW_OUTPUTS])
def test_wrong_results_are_caught_by_sampled_outputs(case, fault):
    """Of these, 4,096 of 27,648 outputs see every one that is not a single element."""
    assert "wrong: error" in (case.sampled_verdict(WRONG[fault](case)) or "passed")


def test_sound_results_pass(case):
    assert case.verdict(case.result) is None
    assert case.sampled_verdict(case.result) is None
    assert case.verdict(case.expected.to(case.result.dtype)) is None
    rounded_once_more = case.result.to(torch.bfloat16 if case.precision == "bf16" else case.result.dtype)
    assert case.verdict(rounded_once_more) is None
    reordered = evaluate(
        case.segment.operations,
        {name: value.contiguous() for name, value in case.operands.items()},
    )
    assert case.verdict(reordered) is None


def test_half_precision_does_not_pass_as_single():
    case = Case("fp32")
    halves = {name: value.half().float() for name, value in case.operands.items()}
    assert case.verdict(evaluate(case.segment.operations, halves))


def test_tf32_passes_as_tf32_only():
    """Operands cut to TF32's 10 bits (pytorch issue 107514: the bound must fit the mode)."""
    fp32, tf32 = Case("fp32"), Case("tf32")

    def cut(value):
        return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)

    operands = {**fp32.operands, "x": cut(fp32.operands["x"]), "w": cut(fp32.operands["w"])}
    result = evaluate(fp32.segment.operations, operands)
    assert tf32.verdict(result) is None
    assert fp32.verdict(result)


@pytest.mark.parametrize("precision", list(accuracy.MODES))
def test_an_overflow_of_torch_itself_allows_nothing(precision):
    """Where torch's own result is infinite its error is no yardstick: NaN and inf are still refused."""
    infinite = Errors(math.inf, math.inf)
    assert accuracy.verdict(infinite, infinite, precision)
    assert accuracy.verdict(Errors(math.nan, math.nan), infinite, precision)
    assert accuracy.verdict(Errors(0.5, 0.5), infinite, precision)
    assert accuracy.verdict(Errors(0.0, 0.0), infinite, precision) is None


def test_an_overflow_in_half_precision_is_refused():
    segment = conv_segment(dtype="float16", precision="fp16")
    operands = {"x": torch.full((1, 8, 2, 2), 3e4).half(), "w": torch.full((2, 8, 1, 1), 2.0).half()}
    expected = accuracy.reference(segment, operands)
    result = evaluate(segment.operations, operands)
    assert result.isinf().all()
    errors = accuracy.measure(result, expected)
    assert accuracy.verdict(errors, errors, "fp16")


def test_errors_are_relative():
    expected = torch.tensor([0.0, 3.0, -4.0], dtype=torch.float64)
    errors = accuracy.measure(torch.tensor([0.3, 3.0, -4.4]), expected)
    assert errors.largest == pytest.approx(0.1)
    assert errors.rms == pytest.approx(0.1)
    assert accuracy.measure(torch.tensor([math.nan, 3.0, -4.0]), expected) == Errors(math.inf, math.inf)


def test_zeros_where_zeros_are_right():
    zeros = torch.zeros(4, dtype=torch.float64)
    assert accuracy.measure(torch.zeros(4), zeros) == Errors(0.0, 0.0)
    assert accuracy.measure(torch.tensor([0.0, 1e-30, 0.0, 0.0]), zeros).largest == math.inf
    assert accuracy.measure(torch.zeros(0), torch.zeros(0, dtype=torch.float64)) == Errors(0.0, 0.0)


def test_operands_follow_from_the_seed_alone():
    segment = segment_in("fp16")
    sizes = sizes_of(segment, (2, 16, 30, 30), (8, 16, 3, 3))
    threads = torch.get_num_threads()
    first = accuracy.generated_operands(segment, sizes, 5, CPU)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        torch.manual_seed(99)
        second = accuracy.generated_operands(segment, sizes, 5, CPU)
        other = accuracy.generated_operands(segment, sizes, 6, CPU)
    finally:
        torch.set_num_threads(threads)
    assert list(first) == ["x", "w", "bias", "residual"]
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, other[name])
        assert value.dtype == torch.float16
        assert is_packed(value, "channels_last")
        assert value.abs().max() <= 1
    assert first["x"].float().std() == pytest.approx(3**-0.5, rel=0.02)
    assert first["w"].float().std() == pytest.approx((3 * 16 * 9) ** -0.5, rel=0.1), "sums stay near 1"
    assert abs(float(first["x"].float().mean())) < 0.02


def test_generated_values_stay_the_same_from_version_to_version():
    """Stored sampled outputs are compared with operands that are generated anew."""
    segment = conv_segment()
    operands = accuracy.generated_operands(segment, {"x": (1, 1, 1, 3), "w": (1, 1, 1, 1)}, 0, CPU)
    expected = torch.tensor([-0.27285149693489075, 0.3989793658256531, 0.40745973587036133]).view(1, 1, 1, 3)
    torch.testing.assert_close(operands["x"], expected, rtol=0, atol=1e-7)


def test_samples_are_taken_by_logical_position(case):
    """A plan's output may lie in any layout."""
    row_major = case.result.contiguous()
    assert row_major.stride() != case.result.stride()
    assert torch.equal(accuracy.sample(case.result, 3), accuracy.sample(row_major, 3))
    assert len(accuracy.sample(case.result, 3)) == accuracy.SAMPLES
    assert not torch.equal(accuracy.sample(case.result, 3), accuracy.sample(case.result, 4))
    small = torch.arange(24.0).view(1, 2, 3, 4)
    assert accuracy.sample(small, 9).tolist() == list(range(24)), "all of them when there are few"


def test_sampled_positions_reach_every_part_of_an_output():
    index = torch.arange(64 * 32 * 16 * 16).view(64, 32, 16, 16)
    seen = accuracy.sample(index, 1).long()
    assert seen.min() < 1000
    assert seen.max() > index.numel() - 1000
    for axis, size in enumerate(index.shape):
        step = index.stride(axis)
        assert len(set(((seen // step) % size).tolist())) == size


def test_a_result_of_other_dims_does_not_compare():
    case = Case("fp32")
    small = torch.zeros(1, 48, 2, 2)
    assert "192 sampled outputs where 4096" in (case.sampled_verdict(small) or "")


def test_without_torchs_errors_the_floor_is_the_bound():
    case = Case("fp32")
    assert accuracy.compare_sampled(case.result, case.sampled, None, "fp32") is None
    assert accuracy.compare_sampled(case.result * 1.001, case.sampled, None, "fp32")


@pytest.mark.parametrize("kind", ["relu", "relu6", "leaky_relu", "silu", "sigmoid", "tanh"])
def test_a_plan_that_drops_nan_is_refused(kind):
    """torch keeps NaN through a relu; a plan may clip it to zero (tensorflow issue 40072)."""
    slope = (("negative_slope", 0.1),) if kind == "leaky_relu" else ()
    segment = conv_segment(Operation(kind, None, slope))
    operands = accuracy.generated_operands(segment, sizes_of(segment, (2, 3, 6, 6), (4, 3, 3, 3)), 1, CPU)
    operands["x"][1, 2, 5, 5] = math.nan
    result = evaluate(segment.operations, operands)
    assert result.isnan().sum() == 4
    assert accuracy.nan_refusal(result, result) is None
    dropped = accuracy.nan_refusal(result.nan_to_num(0.0), result)
    assert dropped == "NaN: 4 outputs dropped it, 0 have one that torch has not"
    spread = accuracy.nan_refusal(with_values(result, (0, 0), math.nan), result)
    assert spread is not None
    assert "16 have one that torch has not" in spread


def test_a_nan_may_spread_within_its_row_where_that_is_allowed():
    expected = with_values(torch.zeros(2, 3, 2, 2), (1, 0, 0, 1), math.nan)
    within = with_values(expected, (1, 2), math.nan)
    assert accuracy.nan_refusal(within, expected) is not None
    assert accuracy.nan_refusal(within, expected, within_rows=True) is None
    assert accuracy.nan_refusal(expected.nan_to_num(0.0), expected, within_rows=True) is not None
    other = with_values(within, (0, 1, 0, 0), math.nan)
    assert "1 have one that torch has not" in accuracy.nan_refusal(other, expected, within_rows=True)


def test_a_nan_fills_rows_when_all_outputs_of_its_row_are_nan_and_no_others():
    clean = torch.zeros(2, 3)
    filled = with_values(clean, (0,), math.nan)
    assert accuracy.fills_rows([filled, with_values(torch.zeros(2), (0,), math.nan)])
    for output in (
        clean,
        with_values(clean, (0, 1), math.nan),
        with_values(filled, (1, 1), math.nan),
        with_values(clean, (1,), math.nan),
        torch.tensor(math.nan),
        torch.zeros(2, dtype=torch.int64),
    ):
        assert not accuracy.fills_rows([filled, output])


def test_poison_is_channels_last_and_all_nan():
    output = accuracy.poison(segment_in("bf16"), {"y": (2, 3, 4, 5)}, CPU)
    assert output.isnan().all()
    assert is_packed(output, "channels_last")


def test_the_reference_is_computed_in_double_precision():
    """Sums near 2,000 in half precision are off by whole units."""
    segment = replace(segment_in("fp16"), operations=segment_in("fp16").operations[:1])
    operands = {"x": torch.ones(1, 4096, 1, 1).half(), "w": torch.full((1, 4096, 1, 1), 0.5003).half()}
    operations = (replace(segment.operations[0], attributes=conv_segment().operations[0].attributes),)
    result = accuracy.reference(replace(segment, operations=operations), operands)
    assert result.dtype == torch.float64
    assert result.item() == 4096 * float(torch.tensor(0.5003).half())
