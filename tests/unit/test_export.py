"""Exporting models, as a user declares them, into programs and model directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from torch import nn

from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration, dynamic_axes, example_sizes
from cudnn_fusion.dims import axis_names, evaluate
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Axis, Program, ProgramError
from cudnn_fusion.model_directory import config_text, write_model
from cudnn_fusion.program import export_program, load_model

ROOT = Path(__file__).parents[2]


def _declared(*texts: str) -> list[InputDeclaration]:
    return [InputDeclaration.parse(text) for text in texts]


def _exported(model: nn.Module, *texts: str, precision: str = "fp32") -> Program:
    return export_program(model, _declared(*texts), precision)[1]


def _run(program: Program, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return Interpreter(program, program.weights, torch.device("cpu")).run(inputs)


class TestDeclarations:
    def test_reads_names_types_axes_and_sizes(self) -> None:
        [declared] = _declared("image:FP16[batch=1..64, 3,height=224..512,224]")
        axes = Axis("batch", 1, 64), Axis("height", 224, 512)
        assert declared == InputDeclaration("image", "FP16", (axes[0], 3, axes[1], 224))
        assert dynamic_axes([declared]) == axes

    @pytest.mark.parametrize(
        ("text", "position", "said"),
        [
            ("x", 1, "':DTYPE' is missing"),
            ("x:FP32", 6, "the dimensions"),
            ("x:FP99[1]", 2, "'FP99' is not a data type"),
            ("x:FP32[3,a=8]", 9, "write just 8"),
            ("x:FP32[a=4..4]", 7, "write just 4"),
            ("x:FP32[0]", 7, "at least 1"),
            ("x:FP32[a=0..2]", 7, "start at 1 or more"),
            ("x:FP32[a=4..2]", 7, "below its start 4"),
            ("x:FP32[2,,3]", 9, "neither a size"),
            ("x:FP32[b=1-4]", 9, "not a range"),
            ("x:FP32[class=1..3]", 7, "not a name for an axis"),
            ("x:FP32[1", 8, "']' is missing"),
            ("9 x:FP32[1]", 0, "not a name"),
        ],
    )
    def test_points_at_what_it_cannot_read(self, text: str, position: int, said: str) -> None:
        with pytest.raises(ProgramError, match=r".") as caught:
            InputDeclaration.parse(text)
        lines = str(caught.value).splitlines()
        assert said in lines[0]
        assert lines[1] == f"  {text}"
        assert lines[2].index("^") - 2 == position

    def test_one_axis_has_one_range(self) -> None:
        with pytest.raises(ProgramError, match=r"axis 'b' is declared as 1\.\.4 and.* as 1\.\.8"):
            dynamic_axes(_declared("x:FP32[b=1..4,2]", "y:FP32[b=1..8,2]"))

    def test_example_sizes_are_at_least_two_and_differ_from_others(self) -> None:
        sizes = example_sizes(_declared("x:FP32[b=1..64,3,h=2..50,w=3..50]", "y:FP32[n=2..2000,2]"))
        assert min(sizes.values()) >= 2
        assert len({*sizes.values(), 3, 2}) == 6


class TestDims:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [("batch", 5), ("2*batch + 1", 11), ("(((h - 1)//2)) + 1", 4), ("Max(1, h - 9)", 1), ("h**2", 64)],
    )
    def test_evaluates_expressions_over_axes(self, text: str, expected: int) -> None:
        assert evaluate(text, {"batch": 5, "h": 8}) == expected
        assert axis_names(text) <= {"batch", "h"}

    @pytest.mark.parametrize(
        "text", ["__import__('os')", "h.real", "[h]", "h if h else 1", "'h'", "h**h**h", "h +"]
    )
    def test_refuses_anything_but_arithmetic(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"expression|arithmetic|exponent"):
            evaluate(text, {"h": 99})


class TestDynamicSizes:
    @pytest.mark.parametrize("batch", [1, 2, 64])
    def test_batch_exported_at_two_or_more_runs_at_every_size(self, batch: int) -> None:
        """torch.export specialises on an example batch of 1."""
        model = models.ConvNet()
        program = _exported(model, "x:FP32[batch=1..64,3,14,14]")
        x = torch.randn(batch, 3, 14, 14)
        torch.testing.assert_close(_run(program, x)[0], model(x), rtol=1e-4, atol=1e-4)
        assert program.batch_axis == "batch"

    @pytest.mark.parametrize(("height", "width"), [(8, 50), (9, 8), (40, 33)])
    def test_dynamic_height_and_width(self, height: int, width: int) -> None:
        model = models.TwoSizes().eval()
        program = _exported(model, "x:FP32[batch=1..4,3,h=8..40,w=8..50]")
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
        assert "changes with the other rows" in program.notes[-1]

    def test_a_static_first_dimension_is_no_batch_axis(self) -> None:
        assert _exported(models.ConvNet(), "x:FP32[2,3,14,14]").batch_axis is None


class TestPrecision:
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

    def test_a_damaged_pt2(self, tmp_path: Path) -> None:
        (tmp_path / "bad.pt2").write_bytes(b"nothing")
        with pytest.raises(ProgramError, match="not a program saved by torch"):
            load_model(str(tmp_path / "bad.pt2"))


class TestModelDirectory:
    def _write(self, out: Path, model: nn.Module | None = None, **options: object) -> tuple[str, ...]:
        exported, program = export_program(
            model or nn.Linear(3, 2), _declared("input:FP32[b=1..8,3]"), "fp32"
        )
        return write_model(exported, program, out, **options).messages  # type: ignore[arg-type]

    def test_holds_what_triton_and_the_server_need(self, tmp_path: Path) -> None:
        out = tmp_path / "repository" / "small"
        self._write(out, version=3)
        config = (out / "config.pbtxt").read_text()
        assert 'name: "small"' in config
        assert "max_batch_size: 8" in config
        assert '{ name: "input" data_type: TYPE_FP32 dims: [ 3 ] }' in config
        assert "dynamic_batching { }" in config
        assert 'key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" }' in config
        assert "TritonPythonModel" in (out / "3" / "model.py").read_text()
        assert lowered.read(out / "3" / "lowered").batch_axis == "b"
        assert isinstance(load_model(str(out / "3" / "model.pt2")), torch.export.ExportedProgram)
        assert [path.name for path in out.parent.iterdir()] == ["small"]

    def test_without_batch_axis_every_dimension_is_in_dims(self) -> None:
        text = config_text(_exported(models.BatchMean(), "x:FP32[batch=1..64,3]"), "m")
        assert "max_batch_size: 0" in text
        assert "dims: [ -1, 3 ]" in text
        assert "dynamic_batching" not in text

    def test_a_value_per_row_is_reshaped_and_a_scalar_refused(self) -> None:
        class RowSums(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.sum(1)

        class Total(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.sum()

        assert "dims: [ 1 ] reshape { shape: [ ] }" in config_text(
            _exported(RowSums(), "x:FP32[b=1..8,3]"), "m"
        )
        with pytest.raises(ProgramError, match="'output' is a scalar"):
            config_text(_exported(Total(), "x:FP32[b=1..8,3]"), "m")

    def test_a_foreign_directory_is_replaced_by_force_only(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text("mine")
        with pytest.raises(ProgramError, match="not made by an export"):
            self._write(tmp_path / "m")
        self._write(tmp_path / "m", force=True)
        assert (tmp_path / "m" / "config.pbtxt.old").read_text() == "mine"

    def test_plans_survive_and_are_called_stale_when_the_program_changed(self, tmp_path: Path) -> None:
        out, model = tmp_path / "m", nn.Linear(3, 2)
        self._write(out, model)
        (out / "1" / "plans").mkdir()
        (out / "1" / "plans" / "a.plan").write_text("plan")
        assert any("unchanged" in message for message in self._write(out, model))
        assert any("stale" in message for message in self._write(out, nn.Linear(3, 2)))
        assert (out / "1" / "plans" / "a.plan").read_text() == "plan"

    def test_an_edited_config_is_kept_while_it_fits(self, tmp_path: Path) -> None:
        out = tmp_path / "m"
        self._write(out)
        path = out / "config.pbtxt"
        edited = path.read_text() + "instance_group [ { count: 2 } ]\n"
        path.write_text(edited)
        self._write(out)
        assert path.read_text() == edited
        with pytest.raises(ProgramError, match="does not fit the new inputs"):
            self._write(out, nn.Linear(3, 9))
        self._write(out, nn.Linear(3, 9), force=True)
        assert "dims: [ 9 ]" in path.read_text()
        assert (out / "config.pbtxt.old").read_text() == edited

    def test_the_name_must_be_one(self, tmp_path: Path) -> None:
        with pytest.raises(ProgramError, match="cannot be a model's name"):
            self._write(tmp_path / "my model")


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


def test_the_tool_fails_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_TOOL_MODELS)
    done = _tool("--model", "mine:Decides", "--input", "x:FP32[b=1..8,3]", "--out", "r/m", cwd=tmp_path)
    assert done.returncode == 1
    assert "control flow depends on data" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()
