"""Every kind of segment tuned and served on the CPU, against float64; layers that others have got wrong."""

import pytest
import torch
import torch.nn.functional as F
from programs import CPU, program_of, served, tuner_of, with_hash
from torch import nn

from cudnn_fusion import accuracy
from cudnn_fusion.judge import Judge
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.segment import ACTIVATIONS
from cudnn_fusion.shapes import Bucket


def steep(conv):
    """The convolution with results that reach the flat ends of activations."""
    with torch.no_grad():
        conv.weight.mul_(6)
    return conv


class Kinds(nn.Module):
    """A head of each kind over a shared image [N,8,12,12]; every head is another segment."""

    def __init__(self):
        super().__init__()
        self.activations = nn.ModuleDict(
            {
                "relu": nn.ReLU(),
                "relu6": nn.ReLU6(),
                "leaky_relu": nn.LeakyReLU(0.2),
                "silu": nn.SiLU(),
                "sigmoid": nn.Sigmoid(),
                "tanh": nn.Tanh(),
                "elu": nn.ELU(0.6),
                "gelu": nn.GELU(),
                "gelu_tanh": nn.GELU("tanh"),
                "hardswish": nn.Hardswish(),
                "hardsigmoid": nn.Hardsigmoid(),
            }
        )
        self.convs = nn.ModuleDict({kind: steep(nn.Conv2d(8, 6, 3, padding=1)) for kind in self.activations})
        self.line = nn.Conv1d(8, 8, 9, padding=4)
        self.line_down = nn.Conv1d(8, 12, 4, stride=4, groups=2)
        self.line_up = nn.ConvTranspose1d(12, 8, 4, stride=4)
        self.volume = nn.Conv3d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 16, 7, padding=3, groups=8)
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x):
        heads = {kind: self.activations[kind](conv(x)) for kind, conv in self.convs.items()}
        line = x.flatten(2)
        line = F.gelu(self.line(line) + line)
        volume = x.view(-1, 8, 3, 4, 12)
        return heads | {
            "line": self.line_up(F.elu(self.line_down(line))),
            "volume": F.relu(self.volume(volume) + volume),
            "depthwise": F.hardswish(self.up(self.depthwise(x))),
        }


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The module, its program tuned for 3 rows, what tuning said, and the store of plans."""
    torch.manual_seed(5)
    module = Kinds().eval()
    program = with_hash(program_of(module, "x:FP32[batch=1..8,8,12,12]"))
    store = PlanStore(tmp_path_factory.mktemp("plans"))
    return module, program, tuner_of(program, store).tune(Bucket.of({"batch": 3}), None), store


def test_every_kind_is_tuned(tuned):
    _, _, outcomes, _ = tuned
    described = {outcome.work.segment.describe() for outcome in outcomes}
    assert described >= {
        *(f"conv2d+bias+{kind}" for kind in ACTIVATIONS),
        "conv1d+bias+add+gelu",
        "conv1d+bias+elu",
        "conv_transpose1d+bias",
        "conv3d+bias+add+relu",
        "conv2d+bias",
        "conv_transpose2d+bias+hardswish",
    }
    for outcome in outcomes:
        assert outcome.plan is not None, outcome.reasons
        rejected = dict(outcome.plan.rejected)
        assert not rejected, f"{outcome.work.segment.describe()}: {rejected}"


def test_tuned_plans_give_the_answers_of_float64(tuned):
    module, program, _, store = tuned
    model = served(program, store)
    assert [bucket.size("batch") for bucket in model.load().buckets] == [3]
    executor, live = model.executor(Bucket.of({"batch": 3}))
    assert live
    assert executor.origins == {"exact": len(model.resources.partition.sites)}
    x = torch.randn(3, 8, 12, 12, generator=torch.Generator().manual_seed(6))
    executor.inputs[0].copy_(x)
    answers = dict(zip([spec.name for spec in program.outputs], executor.run(), strict=True))
    with torch.inference_mode():
        expected = module.double()(x.double())
    module.float()
    assert set(answers) == set(expected)
    for name, wanted in expected.items():
        assert answers[name].shape == wanted.shape
        error = accuracy.measure(answers[name], wanted)
        assert error.largest < 1e-5, name


def test_nan_spreads_as_in_torch(tuned):
    module, program, _, store = tuned
    model = served(program, store)
    executor, _ = model.executor(Bucket.of({"batch": 3}))
    x = torch.randn(3, 8, 12, 12, generator=torch.Generator().manual_seed(7))
    x[1, 2, 5, 6] = torch.nan
    executor.inputs[0].copy_(x)
    with torch.inference_mode():
        expected = module(x)
    for spec, answer in zip(program.outputs, executor.run(), strict=True):
        wanted = expected[spec.name].isnan()
        assert torch.equal(answer.isnan(), wanted), spec.name
        assert wanted[1].any()
        assert not wanted[[0, 2]].any()


class Layer(nn.Module):
    """``function(x, conv)``."""

    def __init__(self, conv, function):
        super().__init__()
        self.conv = conv
        self.function = function

    def forward(self, x):
        return self.function(x, self.conv)


LAYERS = {
    # onnxruntime issue 26274 and triton server issue 8137: zeros before the image and none behind it. At the
    # size reported, 416, it is served in tests/serving.
    "stride 2, padded before only": (
        lambda: Layer(nn.Conv2d(32, 64, 3, 2), lambda x, c: c(F.pad(x, (1, 0, 1, 0)))),
        "x:FP32[1,32,104,104]",
        "conv2d+bias",
    ),
    # tensorflow issue 60377: odd channels, K=255 as a detector's heads have.
    "relu6 in fp16, odd channels": (
        lambda: Layer(steep(nn.Conv2d(17, 255, 3, padding=1)), lambda x, c: F.relu6(c(x))),
        "x:FP16[2,17,13,13]",
        "conv2d+bias+relu6",
    ),
    # Paddle issue 20712: a convolution in groups of which a fast algorithm was inaccurate.
    "grouped 5x5": (
        lambda: Layer(nn.Conv2d(384, 384, 5, padding=2, groups=32), lambda x, c: c(x)),
        "x:FP32[2,384,14,14]",
        "conv2d+bias",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_others_have_got_wrong_are_right(name, tmp_path):
    make, declared, described = LAYERS[name]
    torch.manual_seed(8)
    module = make().eval()
    precision = "fp16" if "FP16" in declared else "fp32"
    program = with_hash(program_of(module, declared, precision=precision))
    bucket, store = Bucket(()), PlanStore(tmp_path)
    (outcome,) = tuner_of(program, store).tune(bucket, None)
    assert outcome.work.segment.describe() == described
    assert outcome.plan is not None
    model = served(program, store)
    model.load()
    for executor in (
        model.executor(bucket)[0],
        served(program, store, engine="reference").executor(bucket)[0],
    ):
        x = torch.randn(executor.inputs[0].shape, generator=torch.Generator().manual_seed(9))
        executor.inputs[0].copy_(x)
        (answer,) = executor.run()
        with torch.inference_mode():
            expected = module.double()(executor.inputs[0].double())
        error = accuracy.measure(answer, expected)
        mode = accuracy.MODES[precision]
        assert error.largest < 2 * mode.floor_largest, f"{executor.origin}: {error}"
        assert error.rms < 2 * mode.floor_rms, f"{executor.origin}: {error}"


def test_an_inaccurate_fast_grouped_convolution_is_not_chosen(tmp_path):
    """As if its products were summed in half precision (Paddle issue 20712)."""
    torch.manual_seed(8)
    conv = nn.Conv2d(384, 384, 5, padding=2, groups=32).eval()
    program = with_hash(program_of(conv, "input:FP32[1,384,8,8]"))
    tuner = tuner_of(program, PlanStore(tmp_path))
    (work,) = tuner.work(Bucket(()))
    operands = accuracy.generated_operands(work.segment, work.sizes, 1, CPU)
    judge = Judge(work.segment, work.sizes, [operands], seed=1)

    class Fast:
        workspace_bytes = 0

        def run(self, operands, workspace, out=None):
            whole = F.conv2d(
                operands["x"].bfloat16(), operands["w"].bfloat16(), None, padding=2, groups=32
            ).float()
            return out.copy_(whole + operands["bias"])

    assert str(judge.check(Fast())).startswith("wrong: error")
