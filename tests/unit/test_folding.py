"""Convolutions with neighbours folded into the channels: the same results in the same memory."""

import random

import pytest
from programs import CPU, bias_operand, conv_segment, sizes_of
from torch.testing import assert_close

from cudnn_fusion import accuracy
from cudnn_fusion.engines.cudnn_graph import form_names
from cudnn_fusion.engines.folding import folding_by, foldings
from cudnn_fusion.evaluate import evaluate_segment
from cudnn_fusion.segment import PADDED, Operand, Operation, Segment, packed_strides, to_layout

RESIDUAL = Operand("residual", "float32", "channels_last", "input")
TAIL = (Operation("bias", "bias"), Operation("relu"), Operation("add", "residual"))


def segment_of(kind="conv2d", precision="fp16", **attributes):
    extra = [bias_operand(), RESIDUAL]
    return conv_segment(*TAIL, kind=kind, precision=precision, extra=extra, **attributes)


def viewed(tensor, dims):
    """The same channels-last memory with other dims."""
    return tensor.as_strided(dims, packed_strides(dims, "channels_last"))


def operands_of(segment, sizes):
    operands = accuracy.generated_operands(segment, sizes, 3, CPU)
    return {name: to_layout(value.double(), segment.operand(name).layout) for name, value in operands.items()}


def folded_result(folding, segment, sizes, operands):
    """What the folded segment computes from the same bytes, as the segment's ``y``."""
    given = folding.prepare(operands)
    padded = sizes["x"][1] != folding.stored_channels
    for name in ("x", "residual"):
        given[name] = viewed(operands[name], folding.sizes[name])
    assert not padded or given["x"].untyped_storage().nbytes() == 8 * given["x"].numel()
    result = evaluate_segment(folding.segment, given)
    assert tuple(result.shape) == folding.sizes["y"]
    return viewed(to_layout(result, "channels_last"), sizes["y"])


def check(folding, segment, sizes):
    operands = operands_of(segment, sizes)
    expected = evaluate_segment(segment, operands)
    assert_close(folded_result(folding, segment, sizes, operands), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        (
            (2, 1, 64, 1),
            (8, 1, 32, 1),
            {"stride": (4, 1), "padding_before": (14, 0), "padding_after": (14, 0)},
        ),
        ((2, 4, 16, 16), (8, 4, 7, 7), {"stride": (2, 2), "padding_before": (3, 3), "padding_after": (3, 3)}),
        ((1, 2, 5, 8), (3, 2, 4, 4), {"stride": (4, 4), "padding_after": (3, 0)}),
        (
            (2, 3, 6, 16),
            (4, 3, 3, 5),
            {"dilation": (1, 2), "padding_before": (1, 4), "padding_after": (1, 4)},
        ),
    ],
    ids=["audio", "stem", "patches", "dilated"],
)
def test_every_folding_gives_the_same_result(x, w, attributes):
    segment = segment_of(**attributes)
    sizes = sizes_of(segment, x, w)
    axis = 2 if x[3] == 1 else 3
    found = [folding_by(2**n, axis, segment, sizes) for n in range(1, 7)]
    assert sum(folding is not None for folding in found) >= 2
    for folding in found:
        if folding is not None:
            check(folding, segment, sizes)


@pytest.mark.parametrize("seed", range(30))
def test_random_convolutions(seed):
    choose = random.Random(seed)
    kind = choose.choice(["conv1d", "conv2d", "conv3d"])
    rank = int(kind[-2])

    def each(low, high):
        return tuple(choose.randint(low, high) for _ in range(rank))

    kernel = each(1, 6)
    segment = segment_of(
        kind, stride=each(1, 2), padding_before=each(0, 4), padding_after=each(0, 4), dilation=each(1, 2)
    )
    c, k = choose.randint(1, 5), choose.randint(1, 5)
    sizes = sizes_of(segment, (2, c, *each(11, 14)[1:], 16), (k, c, *kernel))
    for factor in (2, 4, 8, 16):
        folding = folding_by(factor, rank + 1, segment, sizes)
        if folding is not None:
            check(folding, segment, sizes)


def test_channels_that_the_layout_adds_have_weights_of_zero():
    plain = segment_of(padding_before=(1, 1), padding_after=(1, 1))
    operands = tuple(
        Operand(o.name, o.dtype, PADDED, o.role) if o.name in ("x", "w") else o for o in plain.operands
    )
    segment = Segment(plain.operations, operands, "fp16")
    sizes = sizes_of(segment, (2, 3, 4, 8), (5, 3, 3, 3))
    folding = folding_by(4, 3, segment, sizes)
    assert folding.sizes["x"] == (2, 16, 4, 2)
    check(folding, segment, sizes)


def test_audio_is_folded_and_the_last_layers_become_matrix_products():
    def names(x, w, **attributes):
        segment = conv_segment(
            Operation("bias", "bias"), precision="fp16", extra=[bias_operand()], **attributes
        )
        return [name for name in form_names(segment, sizes_of(segment, x, w)) if "/" in name]

    first = {"stride": (4, 1), "padding_before": (254, 0), "padding_after": (254, 0)}
    assert names((1, 1, 1024, 1), (128, 1, 512, 1), **first)[0] == "conv2d/64+bias"
    same = {"padding_before": (31, 0), "padding_after": (32, 0)}
    assert names((1, 16, 64, 1), (16, 16, 64, 1), **same)[:2] == ["conv2d/64+bias", "matmul/64+bias"]


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((1, 64, 56, 56), (64, 64, 3, 3), {}),
        ((1, 4, 8, 8), (4, 1, 3, 3), {"groups": 4}),
        ((1, 4, 8, 7), (4, 4, 3, 3), {}),
        ((1, 4, 1, 1), (4, 4, 1, 1), {}),
        ((1, 512, 8, 4096), (8, 512, 8, 8), {}),
    ],
    ids=["channels enough", "groups", "an odd width", "one position", "too large weights"],
)
def test_what_is_not_folded(x, w, attributes):
    segment = segment_of(**attributes)
    found = foldings(segment, sizes_of(segment, x, w))
    assert [f.factor for f in found if f.factor > 8] == []
    assert x[1] == 512 or found == []


def test_a_nan_stays_within_its_row():
    """The zeros among the weights spread it there: see `accuracy.fills_rows`."""
    segment = segment_of(padding_before=(1, 1), padding_after=(1, 1))
    sizes = sizes_of(segment, (2, 4, 4, 16), (4, 4, 3, 3))
    operands = operands_of(segment, sizes)
    operands["x"][0, 1, 2, 8] = float("nan")
    expected = evaluate_segment(segment, operands).isnan()
    result = folded_result(folding_by(8, 3, segment, sizes), segment, sizes, operands).isnan()
    assert (result | ~expected).all()
    assert result.sum() > expected.sum()
    assert not result[1].any()
