"""The lowered form on disk: what goes in comes out, and nothing in it can run."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Axis, Constant, Node, Program, ProgramError, Ref, TensorSpec
from cudnn_fusion.program import export_program


def _small(**changes: Any) -> Program:
    nodes = (
        Node(
            "masked", "aten.masked_fill.Scalar", (Ref("x"), Ref("mask"), -math.inf), (), ("b", 3), "float32"
        ),
        Node(
            "y",
            "aten._to_copy.default",
            (Ref("masked"),),
            (("dtype", Constant("dtype", "float16")), ("non_blocking", False)),
            ("b", 3),
            "float16",
        ),
        Node("both", "aten.cat.default", ((Ref("y"), Ref("y")), 0), (), ("2*b", 3), "float16"),
    )
    program = Program(
        name="small",
        precision="fp16",
        inputs=(TensorSpec("x", "float32", ("b", 3), "x"),),
        outputs=(TensorSpec("out", "float16", ("2*b", 3), "both"),),
        axes=(Axis("b", 1, 8),),
        batch_axis=None,
        nodes=nodes,
        weights={"mask": torch.tensor([True, False, True]), "t": torch.randn(3, 2).t()},
        notes=("a note",),
    )
    return replace(program, **changes)


def test_what_is_read_equals_what_was_written(tmp_path: Path) -> None:
    written = lowered.write(_small(), tmp_path)
    read = lowered.read(tmp_path)
    assert read == written
    assert read.sha256
    assert read.weights.keys() == written.weights.keys()
    assert all(torch.equal(read.weights[name], written.weights[name]) for name in read.weights)
    assert all(weight.is_contiguous() for weight in read.weights.values())


def test_an_exported_program_answers_the_same_after_reading(tmp_path: Path) -> None:
    declared = InputDeclaration.parse("x:FP32[batch=1..64,3,14,14]")
    _, program = export_program(models.ConvNet(), [declared], "bf16")
    lowered.write(program, tmp_path)
    read, x = lowered.read(tmp_path), torch.randn(2, 3, 14, 14)
    answers = [Interpreter(p, p.weights, torch.device("cpu")).run([x])[0] for p in (program, read)]
    assert torch.equal(*answers)


_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text()
_ARGUMENTS = st.recursive(
    _SCALARS | st.just(Ref("x")) | st.builds(Constant, st.text(), st.text()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(_ARGUMENTS)
def test_arguments_of_every_kind_survive(argument: Any) -> None:
    encoded = json.loads(json.dumps(lowered._encode_argument(argument), allow_nan=False))
    decoded = lowered._decode_argument(encoded)
    assert repr(decoded) == repr(argument)  # equality would take 1 for True and refuse nan


class TestContentHash:
    def test_is_independent_of_place_time_and_layout_of_the_text(self, tmp_path: Path) -> None:
        first = lowered.write(_small(), tmp_path / "a")
        second = lowered.write(
            _small(weights=dict(reversed(first.weights.items()))), tmp_path / "elsewhere" / "b"
        )
        assert first.sha256 == second.sha256
        path = tmp_path / "a" / "program.json"
        path.write_text(json.dumps(json.loads(path.read_text())))
        os.utime(path, (0, 0))
        assert lowered.read(tmp_path / "a").sha256 == first.sha256

    def test_changes_with_a_weight_and_with_an_argument(self, tmp_path: Path) -> None:
        first = lowered.write(_small(weights={"mask": torch.tensor([True, False, True])}), tmp_path)
        weight = lowered.write(_small(weights={"mask": torch.tensor([True, True, True])}), tmp_path)
        node = replace(_small().nodes[0], args=(Ref("x"), Ref("mask"), 0.0))
        argument = lowered.write(replace(first, nodes=(node, *first.nodes[1:])), tmp_path)
        assert len({first.sha256, weight.sha256, argument.sha256}) == 3


class _CreatesFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("file", ["program.json", "weights.safetensors"])
@pytest.mark.parametrize("save", [pickle.dumps, None])
def test_a_planted_pickle_is_refused_and_not_run(
    tmp_path: Path, file: str, save: Callable[[Any], bytes] | None
) -> None:
    lowered.write(_small(), tmp_path)
    planted = tmp_path / "planted"
    payload = _CreatesFile(planted)
    if save:
        (tmp_path / file).write_bytes(save(payload))
    else:
        torch.save(payload, tmp_path / file)
    with pytest.raises(ProgramError, match=file):
        lowered.read(tmp_path)
    assert not planted.exists()
    pickle.loads(pickle.dumps(payload))
    assert planted.exists()  # the payload works: it was not run above


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{} {}",
        b"[]",
        b'{"format_version": NaN}',
        b"[" * 100_000,
        b'{"format_version": 1}',
    ],
)
def test_damaged_json_is_refused(tmp_path: Path, content: bytes) -> None:
    lowered.write(_small(), tmp_path)
    (tmp_path / "program.json").write_bytes(content)
    with pytest.raises(ProgramError, match=r"program\.json"):
        lowered.read(tmp_path)


def test_a_number_beyond_the_range_of_a_float_is_refused(tmp_path: Path) -> None:
    """JSON has no infinity, but Python reads one from 1e999."""
    lowered.write(_small(), tmp_path)
    path = tmp_path / "program.json"
    document = json.loads(path.read_text())
    document["nodes"][0]["args"][2] = 12345.5
    path.write_text(json.dumps(document).replace("12345.5", "1e999"))
    with pytest.raises(ProgramError, match="1e999 is not a number"):
        lowered.read(tmp_path)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.99])
def test_a_changed_weight_is_refused(tmp_path: Path, place: float) -> None:
    """One bit of a value: safetensors has no checksum of its own."""
    lowered.write(_small(), tmp_path)
    path = tmp_path / "weights.safetensors"
    data = bytearray(path.read_bytes())
    values = 8 + int.from_bytes(data[:8], "little")
    data[values + int(place * (len(data) - values))] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProgramError, match="was changed or damaged after the export; export again"):
        lowered.read(tmp_path)


def test_a_changed_program_and_one_without_a_checksum_are_refused(tmp_path: Path) -> None:
    lowered.write(_small(), tmp_path)
    path = tmp_path / "program.json"
    document = json.loads(path.read_text())
    for change in ({"name": "other"}, {"sha256": None}):
        path.write_text(json.dumps(document | change))
        with pytest.raises(ProgramError, match="was changed or damaged after the export; export again"):
            lowered.read(tmp_path)
    path.write_text(json.dumps(document))
    assert lowered.read(tmp_path).sha256 == document["sha256"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["program.json", "weights.safetensors"])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, file: str) -> None:
    lowered.write(_small(), tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(ProgramError, match=f"{file}.*not a regular file"):
        lowered.read(tmp_path)


def test_truncated_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    lowered.write(_small(), tmp_path / "a")
    lowered.write(_small(weights={"mask": torch.ones(4)}), tmp_path / "b")
    path = tmp_path / "a" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ProgramError, match="not a readable safetensors"):
        lowered.read(tmp_path / "a")
    path.write_bytes((tmp_path / "b" / "weights.safetensors").read_bytes())
    with pytest.raises(ProgramError, match="does not belong to it: mask, t differ"):
        lowered.read(tmp_path / "a")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"program\.json cannot be read"):
        lowered.read(tmp_path)


def _set(*path: str | int) -> Callable[[Any, Any], None]:
    def change(document: Any, value: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "value", "said"),
    [
        (_set("format_version"), 2, "format version 2, this version reads 1"),
        (_set("extra"), 1, "unknown or missing fields: extra"),
        (_set("nodes", 0, "code"), "x", "unknown or missing fields: code"),
        (_set("nodes", 0, "args", 0), {"ref": "y"}, "reads 'y', which nothing before it computes"),
        (_set("nodes", 0, "args", 0), {"call": "os.system"}, "expected a value, a reference or a constant"),
        (_set("nodes", 1, "name"), "x", "'x' is used twice"),
        (_set("nodes", 0, "shape"), ["c", 3], "has the size 'c'"),
        (_set("nodes", 0, "shape"), ["open('x')", 3], "something other than arithmetic"),
        (_set("nodes", 0, "dtype"), "load", "which torch does not have"),
        (_set("nodes", 0, "op"), 3, "a node's op is int, expected str"),
        (_set("outputs", 0, "value"), "gone", "which nothing computes"),
        (_set("outputs"), [], "no outputs"),
        (_set("inputs", 0, "value"), "y", "an input's value must be its name"),
        (_set("axes", 0, "minimum"), 9, "range 9..8"),
        (_set("axes", 0, "minimum"), True, "minimum is bool, expected int"),
        (_set("batch_axis"), "n", "batch axis 'n' is not one of its axes"),
        (_set("batch_axis"), "b", "batch axis 'b' is not the first of 'out'"),
        (_set("axes"), [{"name": "b", "minimum": 1, "maximum": 8}] * 2, "two of its axes have the same name"),
        (_set("precision"), "fp8", "precision is 'fp8'"),
        (_set("nodes"), {}, "nodes is dict, expected list"),
    ],
)
def test_what_no_export_writes_is_refused(
    tmp_path: Path, change: Callable[[Any, Any], None], value: Any, said: str
) -> None:
    lowered.write(_small(), tmp_path)
    path = tmp_path / "program.json"
    document = json.loads(path.read_text())
    change(document, value)
    path.write_text(json.dumps(document))
    with pytest.raises(ProgramError) as caught:
        lowered.read(tmp_path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_invalid_program_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no outputs"):
        lowered.write(_small(outputs=()), tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_argument_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    node = replace(_small().nodes[0], args=(Ref("x"), Ref("mask"), 1j))  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="argument of type complex"):
        lowered.write(_small(nodes=(node, *_small().nodes[1:])), tmp_path)
