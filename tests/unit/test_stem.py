"""First convolutions: the kernel's text, run on the CPU as C++ in threads, and compiled for GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cpu_kernels import TensorCoreKernel
from programs import CPU, conv_segment, program_of, sizes_of
from torch import nn

from cudnn_fusion.engines import stem
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.cudnn_graph import form_names
from cudnn_fusion.engines.gpu_kernels import Kernels, Launch
from cudnn_fusion.engines.stem import FORM, MAX_TAPS, POOLED_TILES, TILES, StemEngine, StemPlan, is_served
from cudnn_fusion.evaluate import evaluate
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import CHANNELS_LAST, PADDED, POOL, Operand, Operation, empty, to_layout

SAME = {"padding_before": (1, 1), "padding_after": (1, 1)}
BIAS, RELU = Operation("bias", "bias"), Operation("relu")


def pool(kernel=(3, 3), stride=(2, 2), padding=(1, 1)):
    return Operation(POOL, None, (("kernel", kernel), ("stride", stride), ("padding", padding)))


def stem_segment(*tail, dtype="float16", layout=CHANNELS_LAST, **attributes):
    extra = [
        Operand(str(op.operand), dtype, CHANNELS_LAST, "input" if op.kind == "add" else "weight")
        for op in tail
        if op.operand
    ]
    precision = "fp16" if dtype == "float16" else "bf16"
    segment = conv_segment(*tail, dtype=dtype, precision=precision, extra=extra, **attributes)
    first = tuple(replace(o, layout=layout) for o in segment.operands[:2])
    return replace(segment, operands=(*first, *segment.operands[2:]))


def operands_of(segment, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    operands = {}
    for operand in segment.inputs:
        value = torch.randn(sizes[operand.name], generator=generator).to(getattr(torch, operand.dtype))
        operands[operand.name] = to_layout(value, operand.layout)
    return operands


def run_on_cpu(segment, sizes, tile, operands, folder, at_once=2):
    kernel = stem._Kernel(segment, sizes, tile)
    cpu = TensorCoreKernel(segment, kernel.source(1), kernel.launch(at_once), folder)
    out = empty(sizes["y"], CHANNELS_LAST, operands["x"].dtype, CPU).fill_(float("nan"))
    return StemPlan(cpu, sizes["w"]).run(operands, None, out)


ODD = {"stride": (1, 3), "dilation": (2, 1), "padding_before": (0, 2), "padding_after": (1, 0)}
CASES = {
    "padded image, pool": ((BIAS, RELU, pool()), {"layout": PADDED, "stride": (2, 2), **SAME}, (16, 3, 3, 3)),
    "several steps, a channel": ((BIAS, RELU), SAME, (8, 1, 5, 5)),
    "silu and a residual": (
        (BIAS, Operation("silu"), Operation("add", "residual")),
        {"layout": PADDED, **SAME},
        (32, 3, 3, 3),
    ),
    "dilated, bf16": ((BIAS,), {"dtype": "bfloat16", **ODD}, (24, 4, 3, 2)),
    "another window, bf16": (
        (BIAS, RELU, pool((2, 3), (1, 3), (1, 0))),
        {"dtype": "bfloat16", **SAME},
        (8, 2, 3, 3),
    ),
    "several blocks of channels": ((Operation("scale", "scale"),), SAME, (96, 3, 2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_the_segment_means(name, tmp_path):
    tail, attributes, w = CASES[name]
    segment = stem_segment(*tail, **attributes)
    sizes = sizes_of(segment, (2, w[1], 13, 11), w)
    assert is_served(segment, sizes)
    operands = operands_of(segment, sizes)
    blocks = 3 if w[0] == 96 else 1
    tile = (4, 8, 8 if blocks > 1 else 1, 2, 0)  # what a warp sums bounds a block's channels
    assert stem._Kernel(segment, sizes, tile).launch(2 * blocks).grid == (2, blocks, 1)
    result = run_on_cpu(segment, sizes, tile, operands, tmp_path, at_once=2 * blocks)
    reference = evaluate(segment.operations, {n: v.double() for n, v in operands.items()})
    error = (result.double() - reference).norm() / reference.norm()
    assert error < (3e-3 if "bf16" in name else 4e-4), error
    held = run_on_cpu(segment, sizes, (4, 8, 1, 2, 1), operands, tmp_path, at_once=2 * blocks)
    assert torch.equal(held, result)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_outputs_that_depend_on_it(value, tmp_path):
    """Also behind a pool, and no others: neither by padded channels nor by positions that fill a step."""
    segment = stem_segment(BIAS, RELU, pool(), layout=PADDED, **SAME)
    sizes = sizes_of(segment, (1, 3, 14, 14), (8, 3, 3, 3))
    operands = operands_of(segment, sizes)
    operands["x"][0, 1, 6, 7] = value
    result = run_on_cpu(segment, sizes, (4, 4, 1, 2, 0), operands, tmp_path)
    assert torch.equal(result.isnan(), evaluate(segment.operations, operands).isnan())


def test_every_tile_compiles_for_every_gpu_generation(monkeypatch):
    def device(capability, memory):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(
            major=capability[0],
            minor=capability[1],
            multi_processor_count=132,
            regs_per_multiprocessor=65536,
            shared_memory_per_multiprocessor=memory << 10,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    engine = StemEngine(CPU)
    plain = stem_segment(BIAS, Operation("silu"), dtype="bfloat16", layout=PADDED, **SAME)
    pooled = stem_segment(BIAS, RELU, pool(), layout=PADDED, stride=(2, 2), **SAME)
    large = sizes_of(pooled, (8, 3, 224, 224), (64, 3, 7, 7))
    small_plain = sizes_of(plain, (1, 3, 64, 64), (32, 3, 3, 3))
    for capability, memory in (((9, 0), 228), ((8, 0), 164), ((8, 6), 64)):
        device(capability, memory)
        candidates = engine.candidates(pooled, large)
        assert (len(candidates) == len(POOLED_TILES)) == (memory > 64)
        some = slice(None) if memory == 228 else slice(-1, None)
        for segment, sizes, chosen in (
            (pooled, large, candidates[-2:][some]),
            (plain, small_plain, engine.candidates(plain, small_plain)[some]),
        ):
            assert chosen
            for candidate in chosen:
                built = engine.build(segment, sizes, candidate)
                (launch,) = Kernels.from_bytes(built.blob).launches
                assert launch.shared_bytes <= (memory - 1) << 10
                assert launch.grid[0] <= 132 * 8
    device((7, 5), 64)
    assert engine.candidates(pooled, large) == []
    device((9, 0), 228)
    assert engine.candidates(pooled, large, "another") == []
    small = sizes_of(plain, (1, 3, 4, 4), (32, 3, 3, 3))
    assert [c.plan_name for c in engine.candidates(plain, small)] == []
    assert {c.form for c in engine.candidates(pooled, large)} == {FORM}
    assert [c.plan_name for c in engine.candidates(pooled, large)] == [
        "x".join(map(str, t)) for t in POOLED_TILES
    ]


def test_only_convolutions_of_few_channels_in_half_precision_are_served():
    def served(*tail, x=(1, 3, 20, 20), w=(8, 3, 3, 3), **changes):
        segment = stem_segment(*tail, **changes)
        return is_served(segment, sizes_of(segment, x, w))

    assert served(BIAS, RELU, pool())
    assert served(BIAS, Operation("add", "residual"))
    assert MAX_TAPS < 12 * 12
    assert not served(w=(8, 3, 12, 12))
    assert not served(w=(12, 3, 3, 3))
    assert not served(x=(1, 5, 9, 9), w=(8, 5, 3, 3))
    assert not served(x=(1, 4, 9, 9), w=(8, 2, 3, 3), groups=2)
    assert not served(BIAS, Operation("add", "residual"), pool())
    single = conv_segment(dtype="float32", precision="fp32")
    assert not is_served(single, sizes_of(single, (1, 3, 9, 9), (8, 3, 3, 3)))
    line = conv_segment(kind="conv1d", dtype="float16", precision="fp16")
    assert not is_served(line, sizes_of(line, (1, 3, 9), (8, 3, 3)))


def test_a_plan_that_no_such_convolution_has_is_not_loaded(monkeypatch):
    engine = StemEngine(CPU)
    candidate = Candidate("stem", FORM, "x".join(map(str, TILES[0])))
    monkeypatch.setattr("cudnn_fusion.engines.kernels_plan.LoadedKernels", lambda kernels: kernels)
    launch = Launch(0, "k", (1, 1, 1), (1, 1, 1), 0, ())
    segment = stem_segment(BIAS)
    sizes = sizes_of(segment, (1, 3, 9, 9), (8, 3, 3, 3))
    assert engine.load(segment, sizes, candidate, Kernels((launch,), (b"",), 0).to_bytes(), 0)
    with pytest.raises(CandidateRejectedError, match="needs a workspace"):
        engine.load(segment, sizes, candidate, Kernels((launch,), (b"",), 64).to_bytes(), 0)
    with pytest.raises(CandidateRejectedError, match="for what is none"):
        engine.load(segment, {**sizes, "w": (8, 9, 3, 3)}, candidate, b"", 0)


class Pooled(nn.Sequential):
    def __init__(self, channels=3, pool=None, between=()):
        pool = pool or nn.MaxPool2d(3, 2, 1)
        super().__init__(nn.Conv2d(channels, 8, 3), nn.ReLU(), *between, pool, nn.Conv2d(8, 8, 1))


def kinds(model, channels=3, precision="fp16", with_regions=True):
    dtype = precision.upper()
    program = program_of(model, f"x:{dtype}[batch=1..64,{channels},12,12]", precision=precision)
    return sorted(site.segment.describe() for site in partition(program, with_regions).sites)


def test_a_pool_behind_a_first_convolution_is_in_its_chain_where_an_engine_serves_it():
    whole, apart = "conv2d+bias+relu+max_pool2d", ["conv2d+bias", "conv2d+bias+relu", "max_pool2d"]
    assert kinds(Pooled()) == ["conv2d+bias", whole]
    assert kinds(Pooled(), precision="bf16") == ["conv2d+bias", whole]
    assert kinds(Pooled(pool=nn.MaxPool2d(2))) == ["conv2d+bias", whole]
    assert kinds(Pooled(pool=nn.MaxPool2d((2, 3), (1, 2), (0, 1)))) == ["conv2d+bias", whole]
    assert kinds(Pooled(), precision="fp32") == apart
    assert kinds(Pooled(5), 5) == apart
    assert kinds(Pooled(pool=nn.MaxPool2d(3, 2, 1, ceil_mode=True))) == apart
    assert kinds(Pooled(pool=nn.MaxPool2d(2, 2, dilation=2))) == apart
    assert kinds(Pooled(), with_regions=False) == apart[:2]


def test_a_chain_with_a_pool_means_what_torch_computes():
    segment = stem_segment(BIAS, RELU, pool((3, 2), (2, 1), (1, 0)), **SAME)
    sizes = sizes_of(segment, (2, 3, 13, 11), (8, 3, 3, 3))
    operands = {name: value.double() for name, value in operands_of(segment, sizes).items()}
    conv = torch.nn.functional.conv2d(operands["x"], operands["w"], operands["bias"].flatten(), padding=1)
    expected = torch.nn.functional.max_pool2d(conv.relu(), (3, 2), (2, 1), (1, 0))
    assert torch.equal(evaluate(segment.operations, operands), expected)
    assert sizes["y"] == tuple(expected.shape)
    assert segment.convolved_dims(sizes) == tuple(conv.shape)


def test_cudnn_plans_a_chain_up_to_its_pool():
    segment = stem_segment(BIAS, RELU, pool(), layout=PADDED, stride=(2, 2), **SAME)
    sizes = sizes_of(segment, (8, 3, 224, 224), (64, 3, 7, 7))
    assert form_names(segment, sizes) == ["conv2d+bias+relu", "conv2d+bias"]
