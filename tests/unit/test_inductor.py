"""What is left to torch's compiler, and how depthwise convolutions are written for it."""

import pytest
import torch
from programs import CPU, bias_operand, conv_segment, sizes_of

from cudnn_fusion import accuracy
from cudnn_fusion.engines import inductor
from cudnn_fusion.engines.inductor import MAX_TAPS, InductorEngine, is_depthwise, shifted
from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Operand, Operation

TAIL = (Operation("bias", "bias"), Operation("silu"), Operation("add", "residual"))
SAME = {"padding_before": (1, 1), "padding_after": (1, 1)}


def depthwise(kind="conv2d", channels=6, dtype="float32", precision="fp32", **attributes):
    extra = [bias_operand(dtype), Operand("residual", dtype, "channels_last", "input")]
    return conv_segment(
        *TAIL, kind=kind, dtype=dtype, precision=precision, extra=extra, groups=channels, **attributes
    )


@pytest.mark.parametrize(
    ("kind", "x", "kernel", "attributes"),
    [
        ("conv2d", (2, 6, 9, 8), (3, 3), SAME),
        ("conv2d", (2, 6, 9, 8), (7, 7), {"padding_before": (3, 3), "padding_after": (3, 3)}),
        (
            "conv2d",
            (1, 6, 9, 8),
            (3, 5),
            {"stride": (2, 3), "padding_before": (0, 4), "padding_after": (1, 0)},
        ),
        ("conv2d", (1, 6, 9, 9), (3, 3), {"dilation": (2, 3), **SAME}),
        ("conv1d", (2, 6, 20), (5,), {"stride": (2,), "padding_before": (2,)}),
        ("conv3d", (1, 6, 5, 6, 4), (3, 3, 2), {"padding_after": (1, 1, 1)}),
    ],
)
def test_a_sum_of_shifted_images_is_the_convolution(kind, x, kernel, attributes):
    segment = depthwise(kind, **attributes)
    sizes = sizes_of(segment, x, (6, 1, *kernel))
    operands = accuracy.generated_operands(segment, sizes, 5, CPU)
    expected = evaluate_segment(segment, operands)
    torch.testing.assert_close(shifted(segment, operands), expected, rtol=1e-5, atol=1e-6)
    module = inductor._module(segment, [operands[o.name] for o in segment.inputs])
    fresh = accuracy.generated_operands(segment, sizes, 6, CPU)
    found = module(*(fresh[o.name] for o in segment.inputs))
    torch.testing.assert_close(found, evaluate_segment(segment, fresh), rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_single():
    segment = depthwise(dtype="float16", precision="fp16", **SAME)
    sizes = sizes_of(segment, (2, 6, 9, 8), (6, 1, 3, 3))
    operands = accuracy.generated_operands(segment, sizes, 5, CPU)
    found = shifted(segment, operands)
    assert found.dtype == torch.float16
    assert accuracy.measure(found, accuracy.reference(segment, operands)).rms < 3e-4


def test_only_depthwise_convolutions_with_few_taps_are_written_so(monkeypatch):
    monkeypatch.setattr(inductor, "can_compile", lambda: True)
    engine = InductorEngine(CPU)

    def candidates(groups, w, x=(1, 6, 20, 20)):
        segment = conv_segment(groups=groups)
        return engine.candidates(segment, sizes_of(segment, x, w))

    assert candidates(6, (6, 1, 7, 7)) == [Candidate("inductor", "shifted")]
    assert MAX_TAPS < 81
    for groups, w in ((6, (6, 1, 9, 9)), (6, (12, 1, 3, 3)), (3, (6, 2, 3, 3)), (1, (6, 6, 3, 3))):
        assert candidates(groups, w) == []
    assert candidates(1, (6, 1, 3, 3), x=(1, 1, 20, 20)) == []
    transposed = conv_segment(kind="conv_transpose2d", groups=6)
    assert not is_depthwise(transposed, sizes_of(transposed, (1, 6, 5, 5), (6, 1, 3, 3)))
    monkeypatch.setattr(inductor, "can_compile", lambda: False)
    assert candidates(6, (6, 1, 7, 7)) == []
