"""Depthwise convolutions: the kernel's text, run on the CPU as C++, and compiled for a GPU."""

import sys

import pytest
import torch
from cpu_kernels import CpuKernel
from programs import CPU, conv_segment, program_of, sizes_of
from torch import nn

from cudnn_fusion import accuracy
from cudnn_fusion.engines import cuda_source, depthwise
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.depthwise import FORM, MAX_TAPS, TILES, DepthwiseEngine, DepthwisePlan, is_served
from cudnn_fusion.engines.gpu_kernels import Kernels, Launch
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import ACTIVATIONS, Operand, Operation

SAME = {"padding_before": (1, 1), "padding_after": (1, 1)}
ATTRIBUTES = {"leaky_relu": (("negative_slope", 0.1),), "elu": (("alpha", 0.7),)}
BIAS, ADD = Operation("bias", "bias"), Operation("add", "residual")
TAIL = (BIAS, Operation("silu"), ADD)

RUN = """
extern "C" void run({parameters}, int blocks, int, int threads) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) depthwise({names});
}}
"""
"""Every thread of every block in turn."""


def cpu_kernel(segment, sizes, tile, folder):
    launch = depthwise._launch(segment, sizes, tile)
    return CpuKernel(segment, depthwise.source(segment, sizes, tile), RUN, launch, folder, "-O0")


def depthwise_segment(*tail, kind="conv2d", channels=6, dtype="float32", precision="fp32", **attributes):
    extra = [
        Operand(op.operand, dtype, "channels_last", "input" if op.kind == "add" else "weight")
        for op in tail
        if op.operand
    ]
    return conv_segment(
        *tail, kind=kind, dtype=dtype, precision=precision, extra=extra, groups=channels, **attributes
    )


def run_on_the_cpu(segment, sizes, tile, folder, operands):
    """The plan's result, in a poisoned output."""
    plan = DepthwisePlan(cpu_kernel(segment, sizes, tile, folder), sizes["w"])
    return plan.run(operands, None, accuracy.poison(segment, sizes, CPU))


def error_on_the_cpu(segment, sizes, tile, folder):
    operands = accuracy.generated_operands(segment, sizes, 5, CPU)
    found = run_on_the_cpu(segment, sizes, tile, folder, operands)
    return accuracy.measure(found, accuracy.reference(segment, operands))


STRIDED = {"stride": (2, 3), "padding_before": (0, 4), "padding_after": (1, 0)}


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_is_the_convolution(tile, tmp_path):
    segment = depthwise_segment(*TAIL, channels=6, **STRIDED)
    sizes = sizes_of(segment, (2, 6, 9, 20), (6, 1, 3, 5))
    assert error_on_the_cpu(segment, sizes, tile, tmp_path).largest < 1e-6


@pytest.mark.parametrize(
    ("kind", "x", "kernel", "attributes", "tile"),
    [
        ("conv2d", (2, 6, 9, 7), (7, 7), {"padding_before": (3, 3), "padding_after": (3, 3)}, (7, 7, 1)),
        ("conv2d", (1, 5, 9, 8), (3, 5), STRIDED, (2, 4, 1)),
        ("conv2d", (3, 6, 9, 9), (3, 3), {"dilation": (2, 3), **SAME}, (2, 4, 2)),
        ("conv2d", (1, 260, 3, 3), (3, 3), SAME, (1, 1, 2)),
        ("conv1d", (2, 6, 20), (5,), {"stride": (2,), "padding_before": (2,)}, (1, 8, 2)),
        ("conv1d", (2, 6, 70), (31,), {"dilation": (2,), "padding_after": (9,)}, (1, 14, 2)),
        ("conv3d", (2, 6, 5, 6, 4), (3, 3, 2), {"padding_after": (1, 1, 1)}, (2, 4, 2)),
        (
            "conv3d",
            (1, 6, 7, 6, 4),
            (3, 3, 3),
            {"stride": (2, 1, 1), "dilation": (2, 1, 1), "padding_before": (1, 1, 1)},
            (1, 4, 2),
        ),
    ],
)
def test_one_to_three_axes(kind, x, kernel, attributes, tile, tmp_path):
    segment = depthwise_segment(*TAIL, kind=kind, channels=x[1], **attributes)
    sizes = sizes_of(segment, x, (x[1], 1, *kernel))
    assert is_served(segment, sizes)
    assert error_on_the_cpu(segment, sizes, tile, tmp_path).largest < 1e-6


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_is_torchs_and_keeps_nans(kind, tmp_path):
    segment = depthwise_segment(BIAS, Operation(kind, None, ATTRIBUTES.get(kind, ())), channels=4, **SAME)
    sizes = sizes_of(segment, (2, 4, 6, 6), (4, 1, 3, 3))
    operands = accuracy.generated_operands(segment, sizes, 5, CPU)
    operands["x"] *= 5  # beyond where relu6 and hardswish bend
    operands["x"][0, 1, 2, 3] = torch.nan
    found = run_on_the_cpu(segment, sizes, (1, 4, 2), tmp_path, operands)
    expected = accuracy.reference(segment, operands)
    assert expected.isnan().sum() == 9
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "precision", "rms"), [("float16", "fp16", 3e-4), ("bfloat16", "bf16", 2.4e-3)]
)
def test_half_precision_is_summed_in_single(dtype, precision, rms, tmp_path):
    tail = (BIAS, Operation("scale", "scale"), Operation("shift", "shift"), Operation("relu"), ADD)
    segment = depthwise_segment(*tail, dtype=dtype, precision=precision, **SAME)
    sizes = sizes_of(segment, (2, 6, 9, 8), (6, 1, 3, 3))
    assert error_on_the_cpu(segment, sizes, (2, 4, 2), tmp_path).rms < rms


def test_weights_are_prepared_once():
    segment = depthwise_segment(dtype="float16", precision="fp16")
    sizes = sizes_of(segment, (1, 6, 9, 8), (6, 1, 3, 5))
    operands = accuracy.generated_operands(segment, sizes, 5, CPU)
    seen = []

    class Kernel:
        def run(self, given, workspace, out=None):
            seen.append(given["w"])

    plan = DepthwisePlan(Kernel(), sizes["w"])
    prepared = plan.prepare(operands)
    plan.run(operands, None)
    plan.run(prepared, None)
    assert prepared["w"].is_contiguous()
    assert prepared["w"].dtype == torch.float32
    assert torch.equal(prepared["w"].t().reshape(6, 1, 3, 5), operands["w"].float())
    assert torch.equal(seen[0], prepared["w"])
    assert seen[1] is prepared["w"]


def test_only_depthwise_convolutions_with_few_taps_are_served():
    engine = DepthwiseEngine(CPU)

    def candidates(groups, w, x=(1, 6, 20, 20)):
        segment = conv_segment(groups=groups)
        return engine.candidates(segment, sizes_of(segment, x, w))

    found = candidates(6, (6, 1, 7, 7))
    assert [c.label() for c in found] == [f"depthwise:{FORM}:{p}x{q}x{v}" for p, q, v in TILES]
    assert MAX_TAPS < 81
    for groups, w in ((6, (6, 1, 9, 9)), (6, (12, 1, 3, 3)), (3, (6, 2, 3, 3)), (1, (6, 6, 3, 3))):
        assert candidates(groups, w) == []
    assert candidates(1, (1, 1, 3, 3), x=(1, 1, 20, 20)) == []
    transposed = conv_segment(kind="conv_transpose2d", groups=6)
    assert not is_served(transposed, sizes_of(transposed, (1, 6, 5, 5), (6, 1, 3, 3)))
    segment = depthwise_segment()
    sizes = sizes_of(segment, (1, 6, 20, 20), (6, 1, 3, 3))
    assert is_served(segment, sizes)
    assert engine.candidates(segment, sizes, "another") == []
    for x, y in (("float32", "float16"), ("float32", "float32")):
        layout = "channels_last" if x != y else "row_major"
        operands = (
            Operand("x", x, layout, "input"),
            segment.operands[1],
            Operand("y", y, layout, "output"),
        )
        object.__setattr__(segment, "operands", operands)
        assert not is_served(segment, sizes)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")]
)
def test_every_tile_compiles_for_an_h200(dtype, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    activations = tuple(Operation(kind, None, ATTRIBUTES.get(kind, ())) for kind in ACTIVATIONS)
    segment = depthwise_segment(*TAIL, *activations, dtype=dtype, precision=precision, **SAME)
    sizes = sizes_of(segment, (2, 6, 9, 8), (6, 1, 3, 3))
    engine = DepthwiseEngine(CPU)
    for candidate in engine.candidates(segment, sizes):
        built = engine.build(segment, sizes, candidate)
        assert built.candidate == candidate
        assert built.blob is not None
        kernels = Kernels.from_bytes(built.blob)
        assert kernels.code[0][:4] == b"\x7fELF"
        (launch,) = kernels.launches
        assert (launch.name, len(launch.arguments), launch.block) == ("depthwise", 5, (128, 1, 1))


def test_what_does_not_compile_is_rejected_with_the_compilers_words():
    with pytest.raises(CandidateRejectedError, match=r"not compiled for sm_90: .*error.*nothing"):
        cuda_source.compiled("some.cu", "nothing", (9, 0))
    with pytest.raises(CandidateRejectedError, match=r"not compiled for sm_12"):
        cuda_source.compiled("some.cu", "", (1, 2))


def test_tiles_are_of_the_outputs_size():
    def of(channels, rows, columns):
        sizes = {"x": (1, channels, 9, 9), "w": (channels, 1, 3, 3), "y": (1, channels, rows, columns)}
        return depthwise.tiles(conv_segment(groups=channels).operations[0], sizes)

    assert of(6, 14, 14) == list(TILES)
    assert of(6, 1, 1) == [(1, 1, 2)]
    assert of(6, 1, 8) == [(1, 1, 2), (1, 4, 2), (1, 8, 2), (1, 14, 2)]
    assert {vector for *_, vector in of(5, 14, 14)} == {1}
    assert len(set(of(5, 14, 14))) == len(of(5, 14, 14))


def test_a_thread_for_each_tile_and_pair_of_channels():
    segment = depthwise_segment(channels=6)
    sizes = sizes_of(segment, (2, 6, 9, 200), (6, 1, 3, 3))  # y is [2, 6, 7, 198]
    blocks, *_ = depthwise._launch(segment, sizes, (2, 4, 2)).grid
    assert blocks == -(-2 * 3 * 4 * 50 // 128)
    segment = depthwise_segment(kind="conv3d", channels=6)
    sizes = sizes_of(segment, (2, 6, 5, 9, 200), (6, 1, 2, 3, 3))
    assert depthwise._launch(segment, sizes, (2, 4, 2)).grid == (-(-2 * 4 * 3 * 4 * 50 // 128), 1, 1)


@pytest.mark.parametrize(
    ("kind", "x", "kernel", "attributes", "most"),
    [
        ("conv1d", (1, 6, 9000), (3,), {"dilation": (64,)}, 0),
        ("conv1d", (1, 6, 9000), (3,), {"dilation": (60,)}, 8),
        ("conv1d", (1, 6, 9000), (64,), {"dilation": (32,)}, 0),
        ("conv2d", (1, 6, 900, 900), (3, 3), {"dilation": (18, 18)}, 14),
        ("conv2d", (1, 6, 900, 900), (7, 7), {"stride": (16, 16)}, 8),
        ("conv2d", (1, 6, 900, 9), (3, 3), {"dilation": (400, 1)}, 0),
    ],
)
def test_a_thread_reaches_no_further_than_compiles_in_time(kind, x, kernel, attributes, most):
    """NVRTC takes 46 s for three taps 2,048 apart, and has no time limit."""
    segment = depthwise_segment(kind=kind, **attributes)
    sizes = sizes_of(segment, x, (6, 1, *kernel))
    found = depthwise.tiles(segment.operations[0], sizes)
    assert max((q for _, q, _ in found), default=0) == most
    assert len(DepthwiseEngine(CPU).candidates(segment, sizes)) == len(found)


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings", "cuda.bindings.nvrtc"])
def test_without_cuda_python_nothing_is_built(missing, monkeypatch):
    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        if name.startswith(missing):
            monkeypatch.setitem(sys.modules, name, None)
    if missing == "cuda.bindings.nvrtc":
        monkeypatch.delattr("cuda.bindings.nvrtc", raising=False)
    with pytest.raises(CandidateRejectedError, match="cuda-python is not installed"):
        cuda_source.compiled("some.cu", "", (9, 0))


def test_a_plan_that_no_depthwise_convolution_has_is_not_loaded(monkeypatch):
    engine = DepthwiseEngine(CPU)
    candidate = Candidate("depthwise", FORM, "1x1x2")
    monkeypatch.setattr("cudnn_fusion.engines.kernels_plan.LoadedKernels", lambda kernels: kernels)
    launch = Launch(0, "k", (1, 1, 1), (1, 1, 1), 0, ())
    segment = depthwise_segment()
    sizes = sizes_of(segment, (1, 6, 9, 9), (6, 1, 3, 3))
    assert engine.load(segment, sizes, candidate, Kernels((launch,), (b"",), 0).to_bytes(), 0)
    with pytest.raises(CandidateRejectedError, match="needs a workspace"):
        engine.load(segment, sizes, candidate, Kernels((launch,), (b"",), 64).to_bytes(), 0)
    (region,) = partition(program_of(nn.MaxPool2d(2)), with_regions=True).sites
    with pytest.raises(CandidateRejectedError, match="for what is none"):
        engine.load(region.segment, {"y": (1, 3, 4, 4)}, candidate, b"", 0)
