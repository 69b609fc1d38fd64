"""Model directories: what Triton reads, what of a user's is kept, and that nothing in them can run."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Axis, Program, ProgramError, TensorSpec
from cudnn_fusion.model_directory import WrittenModel, config_text, write_model
from cudnn_fusion.program import export_program, load_model
from cudnn_fusion.settings import ENGINES, Settings


@cache
def _linear(features: int = 2, seed: int = 0) -> tuple[ExportedProgram, Program]:
    torch.manual_seed(seed)
    declared = InputDeclaration.parse("input:FP32[b=1..8,3]")
    return export_program(nn.Linear(3, features), [declared], "fp32", name="linear")


def _write(out: Path, features: int = 2, seed: int = 0, **options: Any) -> WrittenModel:
    return write_model(*_linear(features, seed), out, **options)


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def _program(inputs: dict[str, tuple[int | str, ...]], batch_axis: str | None, dtype: str) -> Program:
    specs = tuple(TensorSpec(name, dtype, shape, name) for name, shape in inputs.items())
    outputs = (TensorSpec("out", dtype, specs[0].shape, specs[0].name),)
    return Program("m", "fp32", specs, outputs, (Axis("b", 1, 64), Axis("t", 1, 9)), batch_axis, (), {})


class TestLayout:
    def test_holds_what_triton_and_the_server_need(self, tmp_path: Path) -> None:
        out = tmp_path / "repository" / "small"
        written = _write(out, version=3)
        assert written.directory == out
        assert sorted(_files(out)) == [
            "3/__pycache__",
            "3/lowered/program.json",
            "3/lowered/weights.safetensors",
            "3/model.pt2",
            "3/model.py",
            "config.pbtxt",
        ]
        read = lowered.read(out / "3" / "lowered")
        assert read.batch_axis == "b"
        assert read.sha256 == written.program.sha256
        assert isinstance(load_model(str(out / "3" / "model.pt2")), ExportedProgram)
        # Triton takes every directory beside the model for a model.
        assert [path.name for path in out.parent.iterdir()] == ["small"]

    def test_the_model_file_only_imports_the_package(self, tmp_path: Path) -> None:
        _write(tmp_path / "m")
        statements = ast.parse((tmp_path / "m" / "1" / "model.py").read_text()).body
        assert [ast.unparse(statement) for statement in statements] == [
            "from cudnn_fusion.triton_model import TritonPythonModel",
            "__all__ = ['TritonPythonModel']",
        ]

    def test_a_result_that_torch_cannot_save_is_served_all_the_same(self, tmp_path: Path) -> None:
        declared = [InputDeclaration.parse(f"{name}:FP32[b=1..9,3]") for name in ("left", "right")]
        exported, program = export_program(models.SeveralOutputs(), declared, "fp32")
        written = write_model(exported, program, tmp_path / "m")
        assert any("no model.pt2" in message for message in written.messages)
        assert not (tmp_path / "m" / "1" / "model.pt2").exists()
        read = lowered.read(tmp_path / "m" / "1" / "lowered")
        assert [spec.name for spec in read.outputs][-1] == "pair_high"

    @pytest.mark.parametrize("name", ["my model", ".hidden", "-m", "mödel"])
    def test_the_name_must_be_one(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ProgramError, match=re.escape(f"{name!r} cannot be a model's name")):
            _write(tmp_path / name)
        assert not (tmp_path / name).exists()

    def test_the_version_must_be_a_positive_number(self, tmp_path: Path) -> None:
        with pytest.raises(ProgramError, match="version 0 must be 1 or more"):
            _write(tmp_path / "m", version=0)

    def test_a_file_in_the_place_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "m").write_text("mine")
        with pytest.raises(ProgramError, match="is a file, expected a directory"):
            _write(tmp_path / "m", force=True)


class TestConfig:
    @pytest.mark.parametrize("batch_axis", ["b", None])
    def test_is_what_triton_reads(self, batch_axis: str | None) -> None:
        text_format = pytest.importorskip("google.protobuf.text_format")
        model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
        inputs: dict[str, tuple[int | str, ...]] = {"x": ("b", 3, "t"), "lengths": ("b",)}
        text = config_text(_program(inputs, batch_axis, "bfloat16"), "served")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert (config.name, config.backend) == ("served", "python")
        x, lengths = config.input
        assert [x.name, lengths.name, config.output[0].name] == ["x", "lengths", "out"]
        assert x.data_type == lengths.data_type == model_config_pb2.TYPE_BF16
        if batch_axis:
            assert config.max_batch_size == 64
            assert (list(x.dims), list(config.output[0].dims)) == ([3, -1], [3, -1])
            # Triton takes no empty dims.
            assert (list(lengths.dims), lengths.HasField("reshape")) == ([1], True)
            assert list(lengths.reshape.shape) == []
        else:
            assert config.max_batch_size == 0
            assert (list(x.dims), list(lengths.dims)) == ([-1, 3, -1], [-1])
        assert config.HasField("dynamic_batching") == (batch_axis is not None)

    def test_parameters_are_the_servers_defaults(self) -> None:
        text = config_text(_linear()[1], "m")
        parameters = dict(
            re.findall(r'parameters \{ key: "(\w+)" value \{ string_value: "(\w+)" \} \}', text)
        )
        assert parameters.keys() == {
            "ENGINE",
            "EXECUTOR_MEMORY_MB",
            "MAX_BUCKETS",
            "FORCE_CPU_ONLY_INPUT_TENSORS",
        }
        assert parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] == "no"
        assert Settings.from_parameters(parameters) == Settings()

    def test_its_comment_names_the_engines_that_the_server_takes(self) -> None:
        [comment] = re.findall(r"^# ENGINE .*$", config_text(_linear()[1], "m"), re.MULTILINE)
        assert tuple(re.findall(r'"(\w+)"', comment)) == ENGINES

    def test_a_tensor_that_never_has_an_element_is_refused(self) -> None:
        with pytest.raises(ProgramError, match=r"'x' is \[b, 0\] and never has an element.*leave it out"):
            config_text(_program({"x": ("b", 0)}, "b", "float32"), "m")

    def test_a_scalar_is_refused(self) -> None:
        with pytest.raises(ProgramError, match=r"'x' is a scalar.*make it a \[1\] tensor"):
            config_text(_program({"x": ()}, None, "float32"), "m")

    def test_a_type_that_triton_lacks_is_refused(self) -> None:
        with pytest.raises(ProgramError, match=r"'x' is complex64.*view_as_real"):
            config_text(_program({"x": ("b", 3)}, "b", "complex64"), "m")


class TestReplacing:
    def test_a_foreign_directory_is_replaced_by_force_only(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text("mine")
        with pytest.raises(ProgramError, match="not made by an export"):
            _write(tmp_path / "m")
        assert _files(tmp_path / "m") == {"config.pbtxt": b"mine"}
        _write(tmp_path / "m", force=True)
        assert (tmp_path / "m" / "config.pbtxt.old").read_text() == "mine"

    def test_plans_survive_and_are_called_stale_when_the_program_changed(self, tmp_path: Path) -> None:
        out = tmp_path / "m"
        assert _write(out).messages == ()
        (out / "1" / "plans").mkdir()
        (out / "1" / "plans" / "a.plan").write_text("plan")
        assert any("unchanged" in message for message in _write(out).messages)
        assert any("stale" in message for message in _write(out, seed=1).messages)
        assert (out / "1" / "plans" / "a.plan").read_text() == "plan"
        assert lowered.read(out / "1" / "lowered").sha256 == _write(tmp_path / "n", seed=1).program.sha256

    def test_an_edited_config_is_kept_while_it_fits(self, tmp_path: Path) -> None:
        out = tmp_path / "m"
        _write(out)
        path = out / "config.pbtxt"
        edited = path.read_text() + "instance_group [ { count: 2 } ]\n"
        path.write_text(edited)
        assert any("edited and is kept" in message for message in _write(out).messages)
        assert path.read_text() == edited
        with pytest.raises(ProgramError, match="does not fit the new inputs"):
            _write(out, features=9)
        assert lowered.read(out / "1" / "lowered").outputs[0].shape == ("b", 2)
        _write(out, features=9, force=True)
        assert "dims: [ 9 ]" in path.read_text()
        assert (out / "config.pbtxt.old").read_text() == edited

    def test_another_version_that_shares_the_config_is_named(self, tmp_path: Path) -> None:
        out = tmp_path / "m"
        _write(out)
        before = _files(out / "1")
        assert _write(out, seed=1, version=2).messages == ()
        [message] = _write(out, features=9, version=3).messages
        assert "other versions (1, 2) read it" in message
        assert _files(out / "1") == before
        assert "dims: [ 9 ]" in (out / "config.pbtxt").read_text()

    @pytest.mark.parametrize("exists", [False, True])
    def test_a_failed_export_leaves_everything_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
    ) -> None:
        out = tmp_path / "m"
        if exists:
            _write(out)
        before = _files(tmp_path)

        def full(*_: object, **__: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(lowered, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            _write(out, seed=1)
        assert _files(tmp_path) == before
        assert out.exists() == exists

    def test_a_version_that_cannot_be_moved_into_place_goes_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "m"
        _write(out)
        (out / "1" / "plans").mkdir()
        (out / "1" / "plans" / "a.plan").write_text("plan")
        before, rename = _files(out), Path.rename

        def refusing(self: Path, target: Path) -> Path:
            if self.name == "new":
                raise PermissionError("not allowed")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refusing)
        with pytest.raises(PermissionError):
            _write(out, seed=1)
        assert _files(out) == before

    def test_nothing_is_written_beside_the_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A directory that a killed export left in the repository would keep the server from starting."""
        seen: list[str] = []
        save = lowered.save_file

        def observing(weights: dict[str, torch.Tensor], path: Path) -> None:
            seen.extend(entry.name for entry in tmp_path.iterdir())
            save(weights, path)

        monkeypatch.setattr(lowered, "save_file", observing)
        _write(tmp_path / "m")
        assert seen == ["m"]

    @pytest.mark.parametrize("exists", [False, True])
    def test_what_a_killed_export_left_is_cleared(self, tmp_path: Path, exists: bool) -> None:
        out = tmp_path / "m"
        if exists:
            _write(out)
        (out / ".exporting-abc" / "new").mkdir(parents=True)
        _write(out)
        assert sorted(path.name for path in out.iterdir()) == ["1", "config.pbtxt"]


_observed: list[tuple[str, str]] | None = None


def _observe(event: str, arguments: tuple[Any, ...]) -> None:
    if _observed is not None and event in ("open", "pickle.find_class"):
        _observed.append((event, str(arguments[0])))


sys.addaudithook(_observe)  # stays for the life of the process, hence the switch


class _CreatesFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_reading_the_served_program_opens_only_its_two_files_and_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.export.load unpickles parts of a .pt2: a planted one must not be touched by the server."""
    version = _write(tmp_path / "m").directory / "1"
    planted = tmp_path / "planted"
    for place in (version / "model.pt2", version / "lowered" / "weights.pt", version / "lowered" / "p.pkl"):
        place.write_bytes(pickle.dumps(_CreatesFile(planted)))
    observed: list[tuple[str, str]] = []
    monkeypatch.setattr(sys.modules[__name__], "_observed", observed)

    program = lowered.read(version / "lowered")
    answer = Interpreter(program, program.weights, torch.device("cpu")).run([torch.ones(2, 3)])[0]

    assert answer.shape == (2, 2)
    opened = {path for event, path in observed if event == "open" and path.startswith(str(tmp_path))}
    assert opened <= {str(version / "lowered" / file) for file in ("program.json", "weights.safetensors")}
    assert str(version / "lowered" / "program.json") in opened
    assert not [event for event, _ in observed if event == "pickle.find_class"]
    assert not planted.exists()

    pickle.loads((version / "model.pt2").read_bytes())
    assert planted.exists()  # the payload works, and the hook sees it
    assert [event for event, _ in observed if event == "pickle.find_class"]


def test_channels_and_axes_of_an_exported_model_reach_the_config() -> None:
    declared = [InputDeclaration.parse("x:FP32[batch=1..64,3]")]
    text = config_text(export_program(models.BatchMean(), declared, "fp32")[1], "m")
    assert "max_batch_size: 0" in text
    assert "dims: [ -1, 3 ]" in text
    assert "dynamic_batching" not in text
