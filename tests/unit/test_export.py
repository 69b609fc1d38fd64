"""Exporting models, as a user declares them, into programs."""

from __future__ import annotations

import json
import logging
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import models
import pytest
import torch
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.dims import evaluate
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Program, ProgramError
from cudnn_fusion.program import export_program, load_model

ROOT = Path(__file__).parents[2]


def _declared(*texts: str) -> list[InputDeclaration]:
    return [InputDeclaration.parse(text) for text in texts]


def _exported(model: nn.Module, *texts: str, precision: str = "fp32") -> Program:
    return export_program(model, _declared(*texts), precision)[1]


def _run(program: Program, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return Interpreter(program, program.weights, torch.device("cpu")).run(inputs)


@pytest.fixture(scope="module")
def conv_net() -> tuple[nn.Module, Program]:
    model = models.ConvNet()
    return model, _exported(model, "x:FP32[batch=1..64,3,14,14]")


@pytest.fixture(scope="module")
def two_sizes() -> tuple[nn.Module, Program]:
    model = models.TwoSizes().eval()
    return model, _exported(model, "x:FP32[batch=1..4,3,h=8..40,w=8..50]")


class TestDynamicSizes:
    @pytest.mark.parametrize("batch", [1, 2, 64])
    def test_batch_exported_at_two_or_more_runs_at_every_size(
        self, conv_net: tuple[nn.Module, Program], batch: int
    ) -> None:
        """torch.export specialises on an example batch of 1."""
        model, program = conv_net
        x = torch.randn(batch, 3, 14, 14)
        torch.testing.assert_close(_run(program, x)[0], model(x), rtol=1e-4, atol=1e-4)
        assert program.batch_axis == "batch"

    @pytest.mark.parametrize(("height", "width"), [(8, 50), (9, 8), (40, 33)])
    def test_dynamic_height_and_width(
        self, two_sizes: tuple[nn.Module, Program], height: int, width: int
    ) -> None:
        model, program = two_sizes
        x = torch.randn(3, 3, height, width)
        for answer, expected in zip(_run(program, x), model(x), strict=True):
            torch.testing.assert_close(answer, expected)
        shapes = [
            [evaluate(d, {"batch": 3, "h": height, "w": width}) for d in o.shape] for o in program.outputs
        ]
        assert shapes == [list(result.shape) for result in model(x)]

    def test_says_which_sizes_to_write_when_the_model_branches_on_them(self) -> None:
        class Branches(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2 if x.shape[0] > 4 else x + 1

        with pytest.raises(ProgramError, match=r"b <= 64(.|\n)*declare b=1\.\.4"):
            _exported(Branches(), "x:FP32[b=1..64,3]")

    def test_a_size_that_only_broadcasts_is_found(self) -> None:
        class Broadcasts(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + torch.ones(2, 3)

        with pytest.raises(ProgramError, match=r"at sizes \{'b': 1\}, expected \[1, 3\]|write 2 instead"):
            _exported(Broadcasts(), "x:FP32[b=1..2,3]")


class TestInputsAndOutputs:
    def test_nested_results_get_names_from_where_they_stand(self) -> None:
        model = models.SeveralOutputs()
        program = _exported(model, "right:FP32[batch=1..9,3]", "left:FP32[batch=1..9,3]")
        assert [spec.name for spec in program.inputs] == ["left", "right"]
        names = [spec.name for spec in program.outputs]
        assert names == ["total", "parts_0", "parts_1_0", "pair_low", "pair_high"]
        left, right = torch.randn(2, 4, 3)
        answers = dict(zip(names, _run(program, left, right), strict=True))
        torch.testing.assert_close(answers["parts_0"], left * 2)
        torch.testing.assert_close(answers["parts_1_0"], -right)
        torch.testing.assert_close(answers["pair_high"], (left + right).clamp(min=0))

    def test_inputs_with_other_names_are_positional(self) -> None:
        program = _exported(models.SeveralOutputs(), "IN__0:FP32[b=1..9,3]", "IN__1:FP32[b=1..9,3]")
        left, right = torch.randn(2, 4, 3)
        torch.testing.assert_close(_run(program, left, right)[2], -right)

    def test_too_many_inputs_are_refused_with_the_parameters(self) -> None:
        with pytest.raises(ProgramError, match=r"do not fit forward\(x\)"):
            _exported(models.BatchMean(), "a:FP32[2,3]", "b:FP32[2,3]")

    def test_outputs_can_be_inputs_weights_and_each_other(self) -> None:
        model = models.InPlaceOnInput()
        program = _exported(model, "x:FP32[batch=1..8,3]")
        x = torch.randn(2, 3)
        for answer, expected in zip(_run(program, x.clone()), model(x.clone()), strict=True):
            torch.testing.assert_close(answer, expected.detach())

    def test_writing_into_an_input_does_not_reach_the_caller(self) -> None:
        program = _exported(models.InPlaceOnInput(), "x:FP32[batch=1..8,3]")
        x = torch.randn(2, 3)
        before = x.clone()
        _run(program, x)
        torch.testing.assert_close(x, before, rtol=0, atol=0)

    def test_output_names_can_be_given(self) -> None:
        model, declared = models.ConvNet(), _declared("x:FP32[batch=1..64,3,14,14]")
        assert export_program(model, declared, "fp32", output_names=["logits"])[1].outputs[0].name == "logits"
        with pytest.raises(ProgramError, match="2 output names given for 1 outputs"):
            export_program(model, declared, "fp32", output_names=["a", "b"])

    def test_optional_inputs_may_be_left_out_and_integers_keep_their_type(self) -> None:
        model = models.Tokens().eval()
        program = _exported(model, "ids:INT32[b=1..8,t=1..9]", "mask:FP32[b=1..8,t=1..9]", precision="fp16")
        assert [spec.dtype for spec in program.inputs] == ["int32", "float32"]
        ids, mask = torch.randint(0, 9, (1, 5), dtype=torch.int32), torch.ones(1, 5)
        [answer] = _run(program, ids, mask)
        torch.testing.assert_close(answer.float(), model(ids, mask).detach(), rtol=1e-2, atol=1e-2)

    def test_a_size_as_result_is_refused(self) -> None:
        class ReturnsSize(nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
                return x + 1, x.shape[0]

        with pytest.raises(ProgramError, match="number or size"):
            _exported(ReturnsSize(), "x:FP32[b=1..4,3]")


class TestBatchAxis:
    def test_a_mean_over_the_batch_is_found(self) -> None:
        program = _exported(models.BatchMean(), "x:FP32[batch=1..64,3]")
        assert program.batch_axis is None
        assert "reduces over rows" in program.notes[-1]

    def test_a_statistic_over_the_batch_hidden_in_a_normalisation_is_found(self) -> None:
        class LargestOfAll(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x / x.abs().amax()

        assert _exported(LargestOfAll(), "x:FP32[batch=1..64,3]").batch_axis is None

    def test_an_axis_that_stands_in_a_second_dimension_is_no_batch_axis(self) -> None:
        """Padding would change the size of every row."""
        program = _exported(nn.ReLU(), "input:FP32[n=1..8,n=1..8]")
        assert program.batch_axis is None
        assert "input has it in another dimension too" in program.notes[-1]

    def test_rows_that_become_several_rows_are_no_batch(self) -> None:
        class Windows(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.view(-1, 4, 3)

        program = _exported(Windows(), "x:FP32[b=1..8,16,3]")
        assert program.outputs[0].shape[0] == "4*b"
        assert program.batch_axis is None

    def test_a_static_first_dimension_is_no_batch_axis(self) -> None:
        assert _exported(models.ConvNet(), "x:FP32[2,3,14,14]").batch_axis is None


class TestPrecision:
    def test_a_half_program_is_compared_in_single_precision(self) -> None:
        """Half precision takes a large image model's export from seconds to most of an hour on many CPUs."""
        seen: list[torch.dtype] = []

        class Telling(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if type(x) is torch.Tensor:
                    seen.append(x.dtype)
                return self.layer(x)

        program = _exported(Telling(), "x:FP16[batch=1..4,4]", precision="fp16")
        assert seen[-1] == torch.float32
        assert program.batch_axis == "batch"
        assert not [note for note in program.notes if "compared" in note or "differ" in note]
        assert _run(program, torch.zeros(2, 4).half())[0].dtype == torch.float16

    def test_a_model_that_computes_in_half_precision_alone_is_compared_so(self) -> None:
        class OnlyHalf(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = {"w": torch.eye(4).half()}

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.mm(x, self.table["w"])

        program = _exported(OnlyHalf(), "x:FP16[batch=1..4,4]", precision="fp16")
        assert not [note for note in program.notes if "compared" in note or "differ" in note]

    @pytest.mark.parametrize(("precision", "bound"), [("fp16", 5e-3), ("bf16", 4e-2)])
    def test_half_precision_is_served_in_the_declared_input_type(self, precision: str, bound: float) -> None:
        model = models.ConvNet()
        program = _exported(model, "x:FP32[batch=1..64,3,14,14]", precision=precision)
        x = torch.randn(4, 3, 14, 14)
        [answer] = _run(program, x)
        assert program.inputs[0].dtype == "float32"
        assert answer.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        expected = model(x)
        assert (answer - expected).norm() / expected.norm() < bound

    def test_the_callers_model_is_not_changed(self) -> None:
        model = models.ConvNet().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        _exported(model, "x:FP32[batch=1..64,3,14,14]", precision="fp16")
        assert model.training
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(before[name].dtype == after[name].dtype for name in before)

    def test_unknown_precision_lists_the_known(self) -> None:
        with pytest.raises(ProgramError, match=r"'fp8' is not available: use one of fp32, tf32, fp16, bf16"):
            _exported(models.ConvNet(), "x:FP32[2,3,14,14]", precision="fp8")

    def test_a_weight_beyond_the_range_of_half_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        model.weight.data.fill_(1e6)
        with pytest.raises(ProgramError, match=r"weight 'weight' holds values beyond the range of float16"):
            _exported(model, "input:FP32[2,2]", precision="fp16")


class TestRefusals:
    def test_control_flow_on_data_gives_torchs_reason_and_the_line(self) -> None:
        with pytest.raises(ProgramError) as caught:
            _exported(models.DecidesByValue(), "x:FP32[batch=1..8,3]")
        text = str(caught.value)
        assert "Could not guard on data-dependent expression" in text
        assert "if x.sum() > 0:" in text
        assert "torch.where" in text
        assert len(text.splitlines()) < 10

    @pytest.mark.parametrize(
        ("model", "line"), [(models.LoopsByValue, "while x.norm() > 1:"), (models.CutsByValue, "int(x[0]")]
    )
    def test_loops_and_sizes_from_data_name_their_line(self, model: type[nn.Module], line: str) -> None:
        with pytest.raises(ProgramError) as caught:
            _exported(model(), "x:FP32[batch=1..8,3]")
        assert line in str(caught.value)
        assert "torch.cond" in str(caught.value)

    def test_a_size_that_must_be_a_multiple_is_said_with_the_declared_shape(self) -> None:
        class HalvesAndDoubles(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cat([x, nn.functional.max_pool2d(x, 2).repeat_interleave(2, 2)], 1)

        with pytest.raises(ProgramError, match=r"x:FP32\[b,3,h,8\](.|\n)*a multiple of some size"):
            _exported(HalvesAndDoubles(), "x:FP32[b=1..8,3,h=8..64,8]")

    def test_a_wrong_type_of_input_gives_torchs_reason(self) -> None:
        with pytest.raises(ProgramError, match=r"Expected tensor for argument(.|\n)*input:FP32|indices"):
            _exported(nn.Embedding(4, 2), "input:FP32[b=1..8,3]")

    def test_torch_cond_is_the_way_out(self) -> None:
        model = models.ChoosesByValue().eval()
        program = _exported(model, "x:FP32[batch=1..8,3]")
        for sign in (1, -1):
            x = sign * torch.rand(2, 3)
            torch.testing.assert_close(_run(program, x)[0], model(x).detach())

    def test_a_result_whose_size_depends_on_values(self) -> None:
        class Selects(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x[x > 0]

        with pytest.raises(ProgramError, match="depends on the values in a tensor"):
            _exported(Selects(), "x:FP32[b=1..8,3]")

    def test_state_changed_by_a_call(self) -> None:
        with pytest.raises(ProgramError, match=r"changes its own state on every call \(calls\)"):
            _exported(models.Counter(), "x:FP32[batch=1..8,3]")

    def test_a_module_that_stays_in_training_mode(self) -> None:
        with pytest.raises(ProgramError, match="still in training mode: StaysInTraining"):
            _exported(models.StaysInTraining(), "x:FP32[batch=1..8,3]")

    def test_dropout_left_on(self) -> None:
        class DropsAlways(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.dropout(x, training=True)

        with pytest.raises(ProgramError, match="drops values at random"):
            _exported(DropsAlways(), "x:FP32[b=1..8,3]")


class TestLoadModel:
    def test_a_saved_program_is_exported_anew(self, tmp_path: Path) -> None:
        model = models.ConvNet()
        batch = torch.export.Dim("n", min=1, max=8)
        saved = torch.export.export(model, (torch.randn(2, 3, 14, 14),), dynamic_shapes=({0: batch},))
        torch.export.save(saved, tmp_path / "model.pt2")
        program = _exported(
            load_model(str(tmp_path / "model.pt2")), "x:FP32[batch=1..16,3,14,14]", precision="fp16"
        )
        x = torch.randn(16, 3, 14, 14)
        torch.testing.assert_close(_run(program, x)[0].float(), model(x), rtol=2e-2, atol=2e-2)

    def test_a_saved_program_with_inputs_by_name(self, tmp_path: Path) -> None:
        class Difference(nn.Module):
            def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
                return left - right

        example = {"right": torch.ones(2, 3), "left": torch.ones(2, 3)}
        torch.export.save(torch.export.export(Difference(), (), example), tmp_path / "named.pt2")
        loaded = load_model(str(tmp_path / "named.pt2"))
        declared = _declared("right:FP32[b=1..9,3]", "left:FP32[b=1..9,3]")
        program = export_program(loaded, declared, "fp32")[1]
        values = {"left": torch.randn(4, 3), "right": torch.randn(4, 3)}
        [answer] = _run(program, *(values[spec.name] for spec in program.inputs))
        torch.testing.assert_close(answer, values["left"] - values["right"])

    def test_a_factory_in_the_current_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "made_here.py").write_text(
            "import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        assert isinstance(load_model("made_here:make"), nn.Linear)

    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            ("nothing.pt2", "no such file"),
            ("models", "expected package.module:factory"),
            ("models:Nothing", "models has no 'Nothing'"),
            ("not_there.x:y", "no module 'not_there'"),
            ("torch.nn:Linear", "cannot be called without arguments"),
            ("math:pi", "expected a function"),
        ],
    )
    def test_says_what_is_wrong_with_a_reference(self, reference: str, said: str) -> None:
        with pytest.raises(ProgramError, match=said):
            load_model(reference)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("def make():\n    raise OSError('no weights here')", "cannot be made: OSError: no weights here"),
            ("make = 1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
            ("def make():\n    raise SystemExit(0)", "cannot be made: SystemExit: 0"),
            (
                "class E(Exception):\n def __str__(self):\n  return 1 / 0\ndef make():\n raise E",
                r"cannot be made: \S+E: <exception str\(\) failed>",
            ),
        ],
    )
    def test_a_failure_in_the_users_code_is_one_line_with_its_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
    ) -> None:
        module = f"failing_{len(code)}"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(ProgramError, match=rf"{said} \({tmp_path}/{module}.py:\d\)$"):
            load_model(f"{module}:make")

    @pytest.mark.parametrize(
        ("module", "said"),
        [
            (nn.LazyConv2d(4, 3), "weight, bias have no size yet: run the model once"),
            (nn.Conv2d(3, 4, 3, device="meta"), "weight, bias are on the meta device: load the weights"),
            (torch.jit.script(nn.ReLU()), "is TorchScript, which torch.export does not take"),
        ],
    )
    def test_models_without_values_or_code_to_trace(self, module: nn.Module, said: str) -> None:
        with pytest.raises(ProgramError, match=said):
            export_program(module, [InputDeclaration.parse("x:FP32[batch=1..4,3,8,8]")], "fp32")

    def test_a_damaged_pt2(self, tmp_path: Path) -> None:
        (tmp_path / "bad.pt2").write_bytes(b"nothing")
        with pytest.raises(ProgramError, match="not a program saved by torch"):
            load_model(str(tmp_path / "bad.pt2"))


def _tool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "export.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


_TOOL_MODELS = """
import torch
class Decides(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x
"""


def test_the_tool_writes_a_model_and_says_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    done = _tool("--model", "mine:make", "--input", "input:FP32[b=1..8,3]", "--out", "r/linear", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "batch axis: b" in done.stdout
    recorded = json.loads((tmp_path / "r/linear/1/lowered/program.json").read_text())
    assert recorded["name"] == "linear"


def test_the_tool_fails_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run in this process: an exception that the tool lets out fails the test."""
    (tmp_path / "refused_model.py").write_text(_TOOL_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = ["--model", "refused_model:Decides", "--input", "x:FP32[b=1..8,3]", "--out", "r/m"]
    monkeypatch.setattr(sys, "argv", ["export.py", *given])
    torch_log = logging.getLogger("torch")
    level = torch_log.level
    try:
        with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / "export.py"), run_name="__main__")
    finally:
        torch_log.setLevel(level)
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert "control flow depends on data" in said
    assert "Traceback" not in said
    assert not (tmp_path / "r").exists()
