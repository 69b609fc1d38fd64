"""Keys of segments, and how tensors lie in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import bias_operand, conv_segment, program_of, run_in_torch, run_with_sites, sizes_of
from torch import nn

from cudnn_fusion import lowered
from cudnn_fusion.evaluate import convolution
from cudnn_fusion.executor import Resources
from cudnn_fusion.partition import partition
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.segment import (
    Operand,
    Operation,
    empty,
    image_dims,
    image_operation,
    is_packed,
    packed_strides,
    to_layout,
)
from cudnn_fusion.shapes import Bucket

X, W = (2, 8, 9, 9), (8, 8, 3, 3)
LEAKY = Operation("leaky_relu", None, (("negative_slope", 0.01),))


def base(**attributes):
    return conv_segment(Operation("bias", "bias"), LEAKY, extra=[bias_operand()], **attributes)


def key(segment, x=X, w=W, validation="v1"):
    return segment.key(sizes_of(segment, x, w), validation)


def with_operand(segment, name, **changes):
    return replace(
        segment, operands=tuple(replace(o, **changes) if o.name == name else o for o in segment.operands)
    )


def with_operation(segment, index, operation):
    operations = list(segment.operations)
    operations[index] = operation
    return replace(segment, operations=tuple(operations))


DIFFERENT = {
    "dilation": base(dilation=(2, 2)),
    "dilation of one axis": base(dilation=(1, 2)),
    "stride": base(stride=(2, 2)),
    "stride of one axis": base(stride=(2, 1)),
    "groups": base(groups=2),
    "padding": base(padding_before=(1, 1), padding_after=(1, 1)),
    "padding before": base(padding_before=(1, 1)),
    "padding after": base(padding_after=(1, 1)),
    "padding of the other axis": base(padding_before=(0, 1), padding_after=(0, 1)),
    "other axes": with_operation(base(), 0, conv_segment(kind="conv3d").operations[0]),
    "transposed": with_operation(base(), 0, conv_segment(kind="conv_transpose2d").operations[0]),
    "output padding": with_operation(
        base(), 0, conv_segment(kind="conv_transpose2d", output_padding=(1, 0)).operations[0]
    ),
    "exact gelu": with_operation(base(), 2, Operation("gelu")),
    "approximate gelu": with_operation(base(), 2, Operation("gelu_tanh")),
    "elu": with_operation(base(), 2, Operation("elu", None, (("alpha", 1.0),))),
    "elu's alpha": with_operation(base(), 2, Operation("elu", None, (("alpha", 0.5),))),
    "negative slope": with_operation(base(), 2, Operation("leaky_relu", None, (("negative_slope", 0.1),))),
    "activation": with_operation(base(), 2, Operation("relu")),
    "no bias": conv_segment(LEAKY),
    "order of operations": replace(base(), operations=(base().operations[0], LEAKY, base().operations[1])),
    "kind of a per-channel operation": with_operation(base(), 1, Operation("scale", "bias")),
    "name of an operand": with_operation(base(), 1, Operation("bias", "bias2")),
    "one more operation": replace(base(), operations=(*base().operations, Operation("relu"))),
    "precision": replace(base(), precision="tf32"),
    **{
        f"{field} of {name}": with_operand(base(), name, **{field: value})
        for name in ("x", "w", "bias", "y")
        for field, value in (("dtype", "float16"), ("layout", "row_major"), ("role", "other"))
    },
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_in_one_field_is_another_key(name):
    """Plans of layers that differ in one attribute must not be mixed up (vllm issue 43119)."""
    sizes = sizes_of(base(), X, W)
    assert DIFFERENT[name].key(sizes, "v1").digest() != base().key(sizes, "v1").digest()


def test_keys_of_committed_plans_are_found_by_this_version():
    """A signature that changes makes every plan that was ever tuned a miss."""
    example = Path(__file__).resolve().parents[2] / "model_repository" / "conv_block" / "1"
    (site,) = partition(lowered.read(example / "lowered")).sites
    store = PlanStore(example / "plans")
    plans = [plan for stored in store.environments() for plan in store.plans(stored.compatibility.hash())]
    assert plans
    for plan in plans:
        sizes = {name: dims for name, dims, _ in plan.key.sizes}
        assert site.segment.key(sizes, plan.key.validation) == plan.key


@pytest.mark.parametrize("name", [name for name in DIFFERENT if name != "precision"])
def test_a_difference_in_one_field_is_another_signature(name):
    """Without the help of sizes and strides: at other sizes two layouts have the same strides."""
    assert DIFFERENT[name].signature() != base().signature()


def test_all_signatures_differ_from_each_other():
    signatures = [segment.signature() for name, segment in DIFFERENT.items() if name != "precision"]
    assert len(set(signatures)) == len(signatures)


STRIDES = {
    "x": {"channels_last": (648, 1, 72, 8), "row_major": (648, 81, 9, 1)},
    "w": {"channels_last": (72, 1, 24, 8), "row_major": (72, 9, 3, 1)},
    "bias": {"channels_last": (8, 1, 8, 8), "row_major": (8, 1, 1, 1)},
    "residual": {"channels_last": (392, 1, 56, 8), "row_major": (392, 49, 7, 1)},
    "y": {"channels_last": (392, 1, 56, 8), "row_major": (392, 49, 7, 1)},
}
"""Of the operands of X by W, in elements."""


def with_residual(**attributes):
    residual = Operand("residual", "float32", "channels_last", "input")
    return conv_segment(
        Operation("bias", "bias"),
        Operation("add", "residual"),
        extra=[bias_operand(), residual],
        **attributes,
    )


def strides_in(plan_key):
    return {name: strides for name, _, strides in plan_key.sizes}


@pytest.mark.parametrize("name", STRIDES)
def test_the_layout_and_the_strides_of_each_operand_are_in_the_key_one_without_the_other(name):
    """NCHW or NHWC, whichever operand it is."""
    last = with_residual()
    row_major = with_operand(last, name, layout="row_major")
    assert row_major.signature() != last.signature()
    all_last = {operand: strides["channels_last"] for operand, strides in STRIDES.items()}
    assert strides_in(key(last)) == all_last
    assert strides_in(key(row_major)) == {**all_last, name: STRIDES[name]["row_major"]}
    assert replace(key(row_major), signature=last.signature()).digest() != key(last).digest()


def test_the_strides_of_a_padded_input_are_in_the_key():
    segment = with_operand(base(), "x", layout="channels_last_padded")
    padded = key(segment, x=(2, 3, 9, 9), w=(8, 3, 3, 3))
    plain = key(base(), x=(2, 3, 9, 9), w=(8, 3, 3, 3))
    assert (strides_in(padded)["x"], strides_in(plain)["x"]) == ((324, 1, 36, 4), (243, 1, 27, 3))
    assert segment.signature() != base().signature()


@pytest.mark.parametrize(
    ("x", "w", "strides"),
    [
        pytest.param(
            (2, 8, 9, 9), (16, 8, 1, 1), ((648, 1, 72, 8), (8, 1, 8, 8), (1296, 1, 144, 16)), id="1x1 weight"
        ),
        pytest.param((5, 8, 1, 1), (4, 8, 1, 1), ((8, 1, 8, 8), (8, 1, 8, 8), (4, 1, 4, 4)), id="[N,C,1,1]"),
        pytest.param(
            (7, 1, 1, 1), (4, 1, 1, 1), ((1, 1, 1, 1), (1, 1, 1, 1), (4, 1, 4, 4)), id="[A,1] by [1,K]"
        ),
        pytest.param(
            (7, 8, 1, 1), (1, 8, 1, 1), ((8, 1, 8, 8), (8, 1, 8, 8), (1, 1, 1, 1)), id="[A,C] by [C,1]"
        ),
        pytest.param((7, 8, 1), (1, 8, 1), ((8, 1, 8), (8, 1, 8), (1, 1, 1)), id="line of [A,C] by [C,1]"),
        pytest.param(
            (1, 8, 9, 9), (8, 8, 9, 1), ((648, 1, 72, 8), (72, 1, 8, 8), (72, 1, 72, 8)), id="one row"
        ),
        pytest.param(
            (2, 1, 9, 9), (8, 1, 3, 3), ((81, 1, 9, 1), (9, 1, 3, 1), (392, 1, 56, 8)), id="one channel"
        ),
        pytest.param(
            (2, 3, 512, 512),
            (1, 3, 1, 1),
            ((786432, 1, 1536, 3), (3, 1, 3, 3), (262144, 1, 512, 1)),
            id="[2,3,512,512]",
        ),
    ],
)
def test_axes_of_size_one_have_canonical_strides_in_the_key(x, w, strides):
    """Any stride may be stated there: one memory, one key."""
    segment = conv_segment(kind=f"conv{len(x) - 2}d")
    assert strides_in(key(segment, x, w)) == dict(zip(("x", "w", "y"), strides, strict=True))


def keys_at(program, bucket):
    """The key of each site at a bucket, as the tuner and the server make it."""
    resources = Resources(program, partition(program), torch.device("cpu"))
    sites, sizes = resources.partition.sites, resources.segment_sizes(bucket)
    return [site.segment.key(z, "v1") for site, z in zip(sites, sizes, strict=True)]


def stated_otherwise(tensor):
    """The tensor in its own memory, with other strides where they do not matter."""
    strides = [s if n > 1 else 99 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


@pytest.mark.parametrize("kernel", [1, 3])
def test_how_a_weight_states_its_strides_is_not_in_the_key(kernel):
    """1x1 weights are packed in two memory formats at once, and torch names either."""
    program = program_of(nn.Conv2d(8, 16, kernel), "x:FP32[batch=1..4,8,9,9]")
    (expected,) = keys_at(program, Bucket.of({"batch": 2}))
    x = torch.randn(2, 8, 9, 9)
    (answer,) = run_in_torch(program, x)
    changes = {
        "row-major": lambda w: w.contiguous(),
        "channels-last": lambda w: w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w,
        "odd": stated_otherwise,
    }
    for name, change in changes.items():
        changed = replace(program, weights={n: change(w) for n, w in program.weights.items()})
        assert keys_at(changed, Bucket.of({"batch": 2})) == [expected], name
        torch.testing.assert_close(run_with_sites(changed, x), [answer])


class _Permuted(nn.Module):
    """A convolution of an input that is permuted first, if ``order`` is given."""

    def __init__(self, order=None):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x):
        return self.conv(x if self.order is None else x.permute(self.order))


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_a_permuted_input_has_the_key_of_a_packed_one(order):
    """The segment is given it packed anew, never with the strides of another order."""
    dims = (2, 3, 512, 512)
    given = tuple(dims[order.index(axis)] for axis in range(4))
    program = program_of(_Permuted(order), f"x:FP32[{','.join(map(str, given))}]")
    packed = program_of(_Permuted(), f"x:FP32[{','.join(map(str, dims))}]")
    assert keys_at(program, Bucket.of({})) == keys_at(packed, Bucket.of({}))
    x = torch.randn(given)
    (got,) = run_with_sites(program, x)
    torch.testing.assert_close(got, run_in_torch(packed, x.permute(order))[0])


def test_all_differences_differ_from_each_other():
    sizes = {**sizes_of(base(), X, W), "bias2": (1, 8, 1, 1)}
    digests = [segment.key(sizes, "v1").digest() for segment in DIFFERENT.values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("other", [{"x": (1, 8, 9, 9)}, {"x": (2, 8, 9, 10)}, {"w": (16, 8, 3, 3)}])
def test_other_sizes_are_another_key(other):
    assert key(base(), **other).digest() != key(base()).digest()


def test_other_validation_settings_are_another_key():
    assert key(base(), validation="v2").digest() != key(base()).digest()


def test_the_order_in_which_attributes_are_given_does_not_matter():
    conv = base().operations[0]
    shuffled = replace(conv, attributes=tuple(reversed(conv.attributes)))
    assert key(with_operation(base(), 0, shuffled)) == key(base())


class _TwoConvs(nn.Module):
    def __init__(self, **second):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, **{"padding": 1, **second})

    def forward(self, x):
        return self.second(self.first(x).relu()).relu()


def test_layers_that_differ_in_weights_only_share_a_key():
    first, second = partition(program_of(_TwoConvs(), "x:FP32[2,4,8,8]")).sites
    assert first.segment.signature() == second.segment.signature()


def test_layers_that_differ_in_dilation_share_none():
    """With padding that keeps the sizes equal only the attribute tells them apart."""
    program = program_of(_TwoConvs(dilation=2, padding=2), "x:FP32[2,4,8,8]")
    first, second = partition(program).sites
    assert first.segment.signature() != second.segment.signature()


@pytest.mark.parametrize(
    ("dims", "layout", "strides"),
    [
        ((2, 3, 4, 5), "channels_last", (60, 1, 15, 3)),
        ((2, 3, 4), "channels_last", (12, 1, 3)),
        ((2, 3, 4, 5, 6), "channels_last", (360, 1, 90, 18, 3)),
        ((2, 3, 1), "channels_last", (3, 1, 3)),
        ((2, 3, 4, 5), "row_major", (60, 20, 5, 1)),
        ((7,), "row_major", (1,)),
        ((), "row_major", ()),
        ((2, 3, 1, 1), "channels_last", (3, 1, 3, 3)),
        ((1, 1, 1, 1), "channels_last", (1, 1, 1, 1)),
    ],
)
def test_packed_strides(dims, layout, strides):
    assert packed_strides(dims, layout) == strides


def test_a_layout_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="3 to 5 dimensions"):
        packed_strides((2, 3), "channels_last")
    with pytest.raises(ValueError, match="unknown layout 'nchw'"):
        packed_strides((2, 3), "nchw")


@pytest.mark.parametrize(
    "dims",
    [
        (5, 4, 1, 1),
        (1, 1, 6, 7),
        (3, 1, 5, 1),
        (1, 8, 1, 1),
        (5, 4, 1),
        (1, 1, 7),
        (2, 4, 1, 1, 1),
        (2, 1, 3, 4, 5),
    ],
)
def test_strides_of_axes_of_size_one_do_not_matter(dims):
    """torch may state any stride there (pytorch issue 24090): both layouts are the same bytes."""
    for layout in ("row_major", "channels_last"):
        tensor = to_layout(torch.randn(dims), layout)
        odd = tensor.as_strided(
            dims, [s if n > 1 else 99 for n, s in zip(dims, tensor.stride(), strict=True)]
        )
        assert is_packed(odd, "channels_last")
        assert to_layout(odd, "channels_last") is odd


def test_views_are_packed_anew_and_keep_their_values():
    whole = torch.randn(2, 6, 5, 4)
    views = [
        whole,
        whole.permute(0, 1, 3, 2),
        whole.permute(0, 3, 1, 2),
        whole[:, ::2],
        whole[:, :, 1:3],
        whole[:1].expand(3, 6, 5, 4),
        whole.flip(2).to(memory_format=torch.channels_last)[:, 1:],
    ]
    for view in views:
        for layout in ("channels_last", "row_major"):
            packed = to_layout(view, layout)
            assert is_packed(packed, layout)
            torch.testing.assert_close(packed, view, rtol=0, atol=0)
            in_memory = packed.as_strided((packed.numel(),), (1,), packed.storage_offset())
            in_order = view.movedim(1, -1) if layout == "channels_last" else view
            assert torch.equal(in_memory, in_order.reshape(-1))
    nhwc = torch.randn(2, 5, 4, 6).permute(0, 3, 1, 2)
    assert to_layout(nhwc, "channels_last") is nhwc
    for rank in (3, 5):
        last = torch.randn(2, *range(4, 4 + rank - 2), 6).movedim(-1, 1)
        assert to_layout(last, "channels_last") is last


def test_channels_last_is_torchs_for_images_and_volumes():
    for dims, memory_format in (
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 4, 5, 6), torch.channels_last_3d),
    ):
        assert torch.empty(dims).to(memory_format=memory_format).stride() == packed_strides(
            dims, "channels_last"
        )


def test_a_line_is_an_image_of_height_one_in_the_same_memory():
    line = to_layout(torch.randn(2, 3, 5), "channels_last")
    image = line.unsqueeze(2)
    assert tuple(image.shape) == image_dims((2, 3, 5)) == (2, 3, 1, 5)
    assert image.stride() == packed_strides((2, 3, 1, 5), "channels_last")
    assert image_dims((2, 3, 4, 5)) == (2, 3, 4, 5)
    operation = conv_segment(kind="conv1d", padding_before=(2,), stride=(3,), groups=2).operations[0]
    expected = conv_segment(padding_before=(0, 2), stride=(1, 3), groups=2).operations[0]
    assert image_operation(operation) == expected
    assert image_operation(expected) is expected


def test_an_empty_tensor_has_the_layout_it_is_asked_for():
    assert empty((2, 3, 4, 5), "channels_last", torch.float16, torch.device("cpu")).stride() == (60, 1, 15, 3)
    assert is_packed(torch.empty(0, 3, 4, 5), "channels_last")


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 4, 11), (6, 2, 3), {"kind": "conv1d", "stride": (2,), "padding_before": (1,), "groups": 2}),
        (
            (1, 4, 5, 6, 7),
            (6, 4, 3, 2, 1),
            {"kind": "conv3d", "dilation": (1, 3, 2), "padding_after": (0, 1, 2)},
        ),
        ((2, 6, 5), (6, 2, 4), {"kind": "conv_transpose1d", "stride": (2,), "groups": 3}),
        (
            (1, 6, 5, 4),
            (6, 4, 3, 2),
            {
                "kind": "conv_transpose2d",
                "stride": (3, 2),
                "dilation": (2, 1),
                "padding_before": (2, 1),
                "padding_after": (2, 1),
                "output_padding": (2, 1),
            },
        ),
        ((2, 4, 11, 9), (6, 4, 3, 2), {"stride": (2, 1), "padding_before": (1, 0), "padding_after": (2, 1)}),
        ((1, 6, 8, 8), (6, 2, 3, 3), {"groups": 3, "dilation": (2, 3)}),
        ((3, 4, 1, 1), (5, 4, 1, 1), {}),
    ],
)
def test_output_dims_are_those_of_torch(x, w, attributes):
    segment = conv_segment(**attributes)
    got = convolution(torch.zeros(x), torch.zeros(w), None, segment.operations[0])
    assert segment.output_dims({"x": x, "w": w}) == tuple(got.shape)


class _PointConv(nn.Module):
    """1x1 convolutions on 1x1 images, as a squeeze-and-excite block has them."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(6, 3, 1)
        self.up = nn.Conv2d(3, 6, 1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


@pytest.mark.parametrize("form", ["channels_last", "row_major", "unfold_matmul"])
def test_inputs_in_any_layout_give_the_same_answer(form):
    """Strides that lie about size-1 axes gave wrong convolutions (pytorch issues 81106, 87617)."""
    torch.manual_seed(0)
    program = program_of(_PointConv(), "x:FP32[batch=1..8,6,5,7]")
    x = torch.randn(4, 6, 5, 7)
    (expected,) = run_in_torch(program, x)
    layouts = {
        "NCHW": x,
        "NHWC": x.contiguous(memory_format=torch.channels_last),
        "permuted": x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "sliced": torch.cat([x, x], 3)[..., :7],
    }
    for name, given in layouts.items():
        (got,) = run_with_sites(program, given, form=form)
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_operands_are_looked_up_by_name():
    assert base().operand("bias") == Operand("bias", "float32", "channels_last", "weight")
    with pytest.raises(KeyError):
        base().operand("residual")
    assert base().describe() == "conv2d+bias+leaky_relu"
