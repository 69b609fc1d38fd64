"""Writes an exported model as a directory of a Triton model repository.

    <name>/config.pbtxt
    <name>/<version>/model.py       imports the package's TritonPythonModel
    <name>/<version>/__pycache__    a file: keeps Python from making a folder here
    <name>/<version>/model.pt2      the program as torch.export saves it, for other tools; never served
    <name>/<version>/lowered/       what is served

Everything is written into a temporary directory first and then renamed into place. What others put into a
version directory (its ``plans`` above all) is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cudnn_fusion import lowered
from cudnn_fusion.declarations import TRITON_NAMES
from cudnn_fusion.export_errors import first_line
from cudnn_fusion.lowered import Program, ProgramError, TensorSpec
from cudnn_fusion.settings import Settings

_MADE_BY = "# Made by cudnn-fusion's export; checksum of what follows: "
# Inside the model's directory, where Triton ignores it; in the repository it would be taken for a model, and
# one that an interrupted export left would keep the server from starting.
_STAGING = ".exporting-"
_OWN_FILES = ("model.pt2", "model.py", "lowered", "__pycache__")
_MODEL_PY = """from cudnn_fusion.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
# The interpreter in which Triton runs a model ignores PYTHONDONTWRITEBYTECODE. It makes no folder where a
# file of that name is.
_NO_BYTE_CODE = """A file in place of the folder in which Python would keep model.py's byte code:
Triton takes such a folder for a change of the model and loads the model again.
"""
_TRITON_NAMES = {dtype: f"TYPE_{name}" for dtype, name in TRITON_NAMES.items()}


@dataclass(frozen=True)
class WrittenModel:
    """What `write_model` did. ``messages`` tell, a sentence each, what was kept or is out of date."""

    directory: Path
    version: int
    program: Program
    messages: tuple[str, ...]


def write_model(
    exported: ExportedProgram, program: Program, out: Path, *, version: int = 1, force: bool = False
) -> WrittenModel:
    """Writes the model to ``out``, whose last part is the model's name.

    An existing directory is replaced only if an earlier export made it, or with ``force``. A config.pbtxt
    that was edited since is kept while the model's inputs and outputs are the same; else it is replaced with
    ``force`` only, the old one going to config.pbtxt.old.

    ProgramError: the name or version is not one, the program cannot be described to Triton, or the directory
    must not be replaced. OSError: it cannot be written.
    """
    name = model_name(out)
    out = Path(os.path.abspath(out))
    if version < 1:
        raise ProgramError(f"version {version} must be 1 or more: Triton names versions by positive numbers")
    config = config_text(program, name)
    config_messages = _check_replaceable(out, version, config, force)
    with _staging(out) as staging:
        made = staging / "new"
        program, messages = _write_version(exported, program, made)
        messages += _plan_messages(out / str(version), program)
        _swap_in(made, out / str(version), staging / "old")
        if "kept" not in config_messages:
            (staging / "config.pbtxt").write_text(config, encoding="utf-8")
            if "replaced" in config_messages:
                os.replace(out / "config.pbtxt", out / "config.pbtxt.old")
            os.replace(staging / "config.pbtxt", out / "config.pbtxt")
    return WrittenModel(out, version, program, (*messages, *config_messages.values()))


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A temporary directory in ``out``. When nothing was put beside it in the end, ``out`` goes too."""
    out.mkdir(parents=True, exist_ok=True)
    for left_by_a_killed_export in out.glob(f"{_STAGING}*"):
        shutil.rmtree(left_by_a_killed_export)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=_STAGING) as temporary:
            yield Path(temporary)
    finally:
        if not any(out.iterdir()):
            out.rmdir()


def model_name(out: Path) -> str:
    """The name of the model that is written to ``out``. ProgramError: Triton would not take it."""
    name = os.path.basename(os.path.abspath(out))
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise ProgramError(
            f"{name!r} cannot be a model's name: end --out in letters, digits, '_', '.' and '-', "
            "for example model_repository/resnet50"
        )
    return name


def _check_replaceable(out: Path, version: int, config: str, force: bool) -> dict[str, str]:
    """What to do about an old config.pbtxt, with the message that says so.

    ``kept``: it stays. ``replaced``: it is put aside. ``shared``: other versions have to fit the new one too.
    """
    if out.exists() and not out.is_dir():
        raise ProgramError(f"{out} is a file, expected a directory or nothing")
    path = out / "config.pbtxt"
    if not out.is_dir() or all(entry.name.startswith(_STAGING) for entry in out.iterdir()):
        return {}
    old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    recorded, body = _recorded_checksum(old)
    if recorded is None:
        if not force:
            raise ProgramError(
                f"{out} exists and was not made by an export: choose another --out or use --force"
            )
        return {"replaced": f"the old config.pbtxt is now {path}.old"} if old else {}
    unchanged = recorded == _recorded_checksum(config)[0]
    if recorded == _checksum(body):
        others = [path.name for path in out.iterdir() if path.name.isdecimal() and path.name != str(version)]
        if unchanged or not others:
            return {}
        versions = ", ".join(sorted(others, key=int))
        return {
            "shared": f"config.pbtxt changed, and other versions ({versions}) read it: check that they fit"
        }
    if unchanged:
        return {"kept": "config.pbtxt was edited and is kept: inputs and outputs are unchanged"}
    if not force:
        raise ProgramError(
            f"{path} was edited and does not fit the new inputs and outputs: save your changes and use "
            "--force, or choose another --out"
        )
    return {"replaced": f"the edited config.pbtxt is now {path}.old: move your changes into the new one"}


def _recorded_checksum(text: str) -> tuple[str | None, str]:
    first, _, body = text.partition("\n")
    return (first.removeprefix(_MADE_BY), body) if first.startswith(_MADE_BY) else (None, text)


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _write_version(
    exported: ExportedProgram, program: Program, directory: Path
) -> tuple[Program, tuple[str, ...]]:
    directory.mkdir()
    (directory / "model.py").write_text(_MODEL_PY, encoding="utf-8")
    (directory / "__pycache__").write_text(_NO_BYTE_CODE, encoding="utf-8")
    written = lowered.write(program, directory / "lowered")
    try:
        torch.export.save(exported, directory / "model.pt2")
    except NotImplementedError as error:
        # Above all a named tuple as result: it is served, but torch cannot write its type down.
        (directory / "model.pt2").unlink(missing_ok=True)
        return written, (f"no model.pt2, which serving does not need: {first_line(error)}",)
    return written, ()


def _plan_messages(version: Path, program: Program) -> tuple[str, ...]:
    if not (version / "plans").is_dir():
        return ()
    try:
        old = lowered.read(version / "lowered").sha256
    except ProgramError:
        old = ""
    if old == program.sha256:
        return ("the program is unchanged, its plans are kept",)
    return (
        "the program changed: its plans are kept and used where a segment is the same, "
        "the others are stale. Run tools/pretune.py",
    )


def _swap_in(made: Path, version: Path, old: Path) -> None:
    """Renames ``made`` to ``version``, with what others had put there; undone when it fails halfway."""
    if not version.exists():
        made.rename(version)
        return
    moved: list[str] = []
    version.rename(old)
    try:
        for entry in sorted(old.iterdir()):
            if entry.name not in _OWN_FILES:
                entry.rename(made / entry.name)
                moved.append(entry.name)
        made.rename(version)
    except OSError:
        for name in moved:
            (made / name).rename(old / name)
        old.rename(version)
        raise
    shutil.rmtree(old, ignore_errors=True)


def config_text(program: Program, name: str) -> str:
    """config.pbtxt for ``program`` served as ``name``.

    ProgramError: Triton has no data type for an input or output, or one is a scalar or never has an element.
    """
    axis = next((axis for axis in program.axes if axis.name == program.batch_axis), None)
    inputs = ",\n".join(_tensor_text(spec, program.batch_axis) for spec in program.inputs)
    outputs = ",\n".join(_tensor_text(spec, program.batch_axis) for spec in program.outputs)
    batching = _BATCHING if axis else ""
    about_batch = (
        f"# At most {axis.maximum}, the end of axis {axis.name}; smaller is allowed."
        if axis
        else "# The program has no batch axis: requests are not joined, and dims hold every dimension."
    )
    body = f"""name: "{name}"
backend: "python"
{about_batch}
max_batch_size: {axis.maximum if axis else 0}
# Inputs and outputs are the program's: do not change them (-1 is a dynamic size).
input [
{inputs}
]
output [
{outputs}
]
{batching}{_PARAMETERS}"""
    return f"{_MADE_BY}{_checksum(body)}\n{body}"


_BATCHING = """# You may set preferred_batch_size and max_queue_delay_microseconds inside: requests that
# wait together run together.
dynamic_batching { }
"""


def _parameter(name: str, value: object) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


_DEFAULTS = Settings()
_PARAMETERS = f"""# You may add instance_group (count, kind, gpus) and model_warmup.
# ENGINE "auto" serves the plans made for the machine, "reference" serves plain torch.
{_parameter("ENGINE", _DEFAULTS.engine)}
# Memory for the buffers of all buckets of one instance, and how many buckets it holds.
{_parameter("EXECUTOR_MEMORY_MB", _DEFAULTS.executor_memory_mb)}
{_parameter("MAX_BUCKETS", _DEFAULTS.max_buckets)}
# Leave at "no": inputs may stay on the GPU.
{_parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")}
"""


def _tensor_text(spec: TensorSpec, batch_axis: str | None) -> str:
    if spec.dtype not in _TRITON_NAMES:
        raise ProgramError(
            f"{spec.name!r} is {spec.dtype}, which Triton does not transport: convert it inside the model, "
            "complex numbers with torch.view_as_real"
        )
    shape = spec.shape[1:] if batch_axis else spec.shape
    if not spec.shape:
        raise ProgramError(
            f"{spec.name!r} is a scalar, which Triton does not transport: make it a [1] tensor"
        )
    if 0 in spec.shape:
        raise ProgramError(
            f"{spec.name!r} is {spec.describe()} and never has an element, which Triton does not transport: "
            "leave it out"
        )
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape)
    # Triton allows no empty dims: a value per row travels as [batch, 1].
    layout = f"dims: [ {dims} ]" if shape else "dims: [ 1 ] reshape { shape: [ ] }"
    return f'  {{ name: "{spec.name}" data_type: {_TRITON_NAMES[spec.dtype]} {layout} }}'
